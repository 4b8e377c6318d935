#!/bin/sh
# Two libraries whose ranks exchange once, and twice, whatever the size, for bench/multi_gpu.py:
#     make one-exchange
#     python3 bench/multi_gpu.py --library FOLDER/always-one.so --against FOLDER/always-two.so
# The limit, ONE_EXCHANGE_BYTES, is a constant of the source: each is built of a copy of src with another.
set -eu
cd "$(dirname "$0")/.."
out=build/one-exchange
for of in "always-one 1 << 40" "always-two 0"; do
    name=${of%% *} limit=${of#* }
    rm -rf "$out/tree" && mkdir -p "$out/tree"
    cp -R Cargo.toml Cargo.lock build.rs cbindgen.toml src kernels include "$out/tree"
    sed -i "s/^const ONE_EXCHANGE_BYTES: i64 = .*;/const ONE_EXCHANGE_BYTES: i64 = $limit;/" \
        "$out/tree/src/plan/codec.rs"
    grep -q "ONE_EXCHANGE_BYTES: i64 = $limit;" "$out/tree/src/plan/codec.rs"
    cargo build --quiet --profile "${PROFILE:-release}" --lib --manifest-path "$out/tree/Cargo.toml" \
        --target-dir "$out/target"
    cp "$out/target/${PROFILE:-release}/libgradcodec.so" "$out/$name.so"
    echo "$out/$name.so"
done
