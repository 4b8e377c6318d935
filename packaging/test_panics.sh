#!/bin/sh
# test_panics.sh: a panic in a library that Zig has linked, with its own unwinder, becomes a status, as in the one that gcc
# links (src/panics.rs). The library has a panic planted in gc_set_threads, and in no other way differs from the one that
# packages have.
set -eu
cd "$(dirname "$0")/.."
copy=$PWD/build/package/panics
rm -rf "$copy" && mkdir -p "$copy"
cp -r src kernels include Cargo.toml Cargo.lock build.rs "$copy"
sed -i 's/boundary(|| pool::set_threads(n))/boundary(|| { let name = String::from("planted"); if n == 1000 { panic!("{name}") } pool::set_threads(n) })/' \
    "$copy/src/capi/threads.rs"
# A name of its own: cargo would take one library for the other.
sed -i 's/^name = "gradcodec"$/name = "gradcodec-panics"/' "$copy/Cargo.toml" "$copy/Cargo.lock"
grep -q planted "$copy/src/capi/threads.rs" || { echo "FAILED: nothing was planted" >&2; exit 1; }
# The flags of build.sh, so that what the library depends on is not built again.
root=$PWD
export RUSTFLAGS="--remap-path-prefix=$root=/gradcodec --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
tools=$root/build/package-venv
CARGO_ZIGBUILD_ZIG_PATH=$(echo "$tools"/lib/python3*/site-packages/ziglang/zig)
export CARGO_ZIGBUILD_ZIG_PATH
"$tools/bin/cargo-zigbuild" rustc --release --locked --quiet --lib --crate-type cdylib \
    --manifest-path "$copy/Cargo.toml" --target x86_64-unknown-linux-gnu.2.17 --target-dir "$root/build/package/target"
python3 - "$root/build/package/target/x86_64-unknown-linux-gnu/release/libgradcodec_panics.so" <<'END'
import ctypes, subprocess, sys, threading
needed = subprocess.run(["readelf", "-d", sys.argv[1]], check=True, capture_output=True, text=True).stdout
assert "libgcc_s" not in needed, "not Zig's unwinder"
lib = ctypes.CDLL(sys.argv[1])
lib.gc_last_error.restype = ctypes.c_char_p
def panics():
    for _ in range(3):
        assert lib.gc_set_threads(1000) == 99, "not GC_STATUS_PANIC"
        words = lib.gc_last_error().decode()
        assert "threads.rs" in words and "planted" in words, words
        assert lib.gc_set_threads(2) == 0
    print("ok:", words)
panics()
thread = threading.Thread(target=panics)
thread.start()
thread.join()
END
