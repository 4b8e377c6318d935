#!/usr/bin/env bash
# run.sh [SECONDS]: fuzzes each target for SECONDS (default 60) on the widest instruction set of this processor, or with
# GRADCODEC_TESTS=all on each, under AddressSanitizer with overflow checks. It starts from the inputs in
# corpus/TARGET.tar.xz, which are unpacked into build/fuzz/TARGET/corpus; new inputs go to build/fuzz/TARGET/found. It
# ends at the first crash: cargo-fuzz prints where the input is and how to run and to minimize it. renew.sh makes the
# archives.
set -euo pipefail
cd "$(dirname "$0")"

seconds=${1:-60}
targets="descriptors model payloads shares kernels"
command -v xz >/dev/null || { echo "FAILED: the corpora are .tar.xz archives, and there is no xz (xz-utils) here"; exit 1; }
for target in $targets; do
    corpus=../build/fuzz/$target/corpus archive=corpus/$target.tar.xz
    rm -rf "$corpus" && mkdir -p "$corpus" "../build/fuzz/$target/found"
    tar --extract --xz --file "$archive" --directory "$corpus" && [ -n "$(ls "$corpus")" ] ||
        { echo "FAILED $target: fuzz/$archive is damaged"; exit 1; }
done

version=0.13.2
export RUSTC_BOOTSTRAP=1 # the sanitizer's flag is not stable
[ "$(cargo fuzz --version 2>/dev/null)" = "cargo-fuzz $version" ] ||
    cargo install cargo-fuzz --quiet --locked --version "$version"

sets=(portable)
for set in avx2 avx512; do
    if grep -qw "${set/avx512/avx512bw}" /proc/cpuinfo; then
        sets+=("$set")
    else
        echo "SKIPPED $set: this processor does not have it"
    fi
done
[ "${GRADCODEC_TESTS:-quick}" = all ] || sets=("${sets[-1]}")

log=$(mktemp)
trap 'rm -f "$log"' EXIT
for target in $targets; do
    folder=../build/fuzz/$target
    cargo fuzz build "$target" >"$log" 2>&1 || { cat "$log"; echo "FAILED $target: it does not build"; exit 1; }
    for set in "${sets[@]}"; do
        # An input takes much less than half a minute, even on a busy machine.
        if ! GRADCODEC_CPU=$set cargo fuzz run "$target" "$folder/found" "$folder/corpus" -- \
            -max_total_time="$seconds" -timeout=30 -max_len=1024 -rss_limit_mb=4096 -print_final_stats=1 \
            >"$log" 2>&1; then
            cat "$log"
            echo "FAILED $target, $set"
            exit 1
        fi
        awk -v target="$target, $set" '
            /^stat::number_of_executed_units:/ { executions = $2 }
            /^stat::average_exec_per_sec:/ { rate = $2 }
            / cov: / { for (i = 1; i < NF; i++) if ($i == "cov:") coverage = $(i + 1) }
            END { print target ": " executions " executions, " rate " a second, " coverage " edges covered" }' "$log"
    done
done
