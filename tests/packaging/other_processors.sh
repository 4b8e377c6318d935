#!/bin/sh
# Checks and tests the code for a processor other than x86-64, in a copy without the parts for x86-64. For aarch64
# itself `cargo check --target aarch64-unknown-linux-gnu` does the same, where that target is installed.
set -eu
copy=build/other_processors
rm -rf "$copy" && mkdir -p "$copy/tests"
cp -r src kernels include Cargo.toml Cargo.lock build.rs "$copy/"
grep -rl 'target_arch = "x86_64"' "$copy/src" | xargs sed -i 's/target_arch = "x86_64"/target_arch = "aarch64"/'
cargo test --profile fast --quiet --locked --lib --manifest-path "$copy/Cargo.toml" --target-dir "$copy/target"
if rustup target list --installed 2>/dev/null | grep -q aarch64-unknown-linux-gnu; then
    cargo check --quiet --locked --lib --target aarch64-unknown-linux-gnu --target-dir "$copy/target"
else
    echo "SKIPPED aarch64: the target is not installed"
fi
