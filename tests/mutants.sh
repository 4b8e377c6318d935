#!/usr/bin/env bash
# mutants.sh [PARTS]: cargo-mutants plants faults in the Rust code of codecs and all-reduces, one at a time, and runs
# the Rust tests. A run takes one of PARTS parts (default 28), another every day. It prints the faults that no Rust test
# detects (Python tests may), and fails if the tests fail without a fault.
set -euo pipefail
cd "$(dirname "$0")/.."

parts=${1:-28} version=27.1.0
[ "$(cargo mutants --version 2>/dev/null)" = "cargo-mutants $version" ] ||
    cargo install cargo-mutants --quiet --locked --version "$version"

files=()
for folder in src/codec/cpu src/codec/plan src/comm; do # only existing paths
    [ ! -d $folder ] || files+=(--file "$folder/**/*.rs" --file "$folder/*.rs")
    [ ! -f $folder ] || files+=(--file "$folder")
done
mkdir -p build
status=0
cargo mutants --profile fast --output build/mutants --shard "$(($(date +%s) / 86400 % parts))/$parts" --timeout 300 \
    --no-shuffle --colors never "${files[@]}" -- --lib --test golden || status=$?
case $status in 0 | 2 | 3) ;; *) exit $status ;; esac # 2: undetected faults, 3: timeouts
