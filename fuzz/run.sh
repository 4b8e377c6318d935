#!/usr/bin/env bash
# run.sh [SECONDS]: fuzzes each target for so long (60 unless told), under AddressSanitizer with overflow checks. Ends
# at the first crash; cargo-fuzz prints where the input lies and how to run and to minimize it.
set -euo pipefail
cd "$(dirname "$0")"

seconds=${1:-60}
export RUSTC_BOOTSTRAP=1 # the sanitizer's flag is not stable
cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --locked

log=$(mktemp)
trap 'rm -f "$log"' EXIT
for target in descriptors model; do
    mkdir -p "corpus/$target"
    cargo fuzz build "$target"
    if ! cargo fuzz run "$target" -- -max_total_time="$seconds" -timeout=20 -max_len=1024 -print_final_stats=1 \
        >"$log" 2>&1; then
        tail -n 60 "$log"
        echo "FAILED $target"
        exit 1
    fi
    awk -v target="$target" '
        /^stat::number_of_executed_units:/ { executions = $2 }
        /^stat::average_exec_per_sec:/ { rate = $2 }
        / cov: / { for (i = 1; i < NF; i++) if ($i == "cov:") coverage = $(i + 1) }
        END { print target ": " executions " executions, " rate " a second, " coverage " edges covered" }' "$log"
done
