#!/bin/sh
# build.sh [ARCH]: builds the library for distribution: shared and stripped, with its debug symbols in a separate file,
# and static. Zig links it for glibc 2.17, so that one build runs on all Linux systems of the last ten years.
# build/package/ARCH/lib receives the libraries, build/package/ARCH/prefix the relocatable installation. The build is
# reproducible in any folder, except for the debug symbols. ARCH: x86_64 by default; for aarch64 use
# packaging/aarch64.sh.
set -eu
umask 022
cd "$(dirname "$0")/.."
root=$PWD
arch=${1:-x86_64}
tools=$root/build/package-venv
work=$root/build/package
target=$work/target-$arch
out=$work/$arch/lib
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)

sh packaging/tools.sh
# Packages name the current commit. Without this variable, an incremental build would name the last commit that changed
# the library.
GRADCODEC_COMMIT=${GRADCODEC_COMMIT:-$(sh packaging/commit.sh)}
export GRADCODEC_COMMIT
echo "building the library with cargo and Zig for $arch and glibc 2.17: a few minutes the first time"
# Removes the names of this folder and of the user's from panic messages and debug symbols. Two flags are needed,
# because cargo's trim-paths is not available in stable releases.
cargo_home=${CARGO_HOME:-$HOME/.cargo}
export RUSTFLAGS="--remap-path-prefix=$root=/gradcodec --remap-path-prefix=$cargo_home=/cargo"
CARGO_ZIGBUILD_ZIG_PATH=$(echo "$tools"/lib/python3*/site-packages/ziglang/zig)
export CARGO_ZIGBUILD_ZIG_PATH
"$tools/bin/cargo-zigbuild" rustc --release --locked --quiet --lib --crate-type cdylib,staticlib \
    --target "$arch-unknown-linux-gnu.2.17" --target-dir "$target" -- \
    -Clink-arg=-Wl,--build-id=0x67726164636f6465632d6275696c642d69642e2e

rm -rf "$out" "$work/$arch/debug" && mkdir -p "$out" "$work/$arch/debug"
built=$target/$arch-unknown-linux-gnu/release
binutils=
[ "$arch" = "$(uname -m)" ] || binutils=$arch-linux-gnu-
"${binutils}objcopy" --strip-all "$built/libgradcodec.so" "$out/libgradcodec.so"
# The build-id, by which debuggers find the symbols, is a hash of the stripped library. The symbols contain the folder
# in which Zig compiles its unwinder, so only they differ between folders. The linker has written "gradcodec-build-id.."
# as a placeholder.
cp "$built/libgradcodec.so" "$work/$arch/whole.so"
id=$(python3 - "$out/libgradcodec.so" "$work/$arch/whole.so" <<'END'
import hashlib, pathlib, sys
shipped, whole = map(pathlib.Path, sys.argv[1:])
place = b"gradcodec-build-id.."
digest = hashlib.sha1(shipped.read_bytes()).digest()
for file in shipped, whole:
    assert file.read_bytes().count(place) == 1, file
    file.write_bytes(file.read_bytes().replace(place, digest))
print(digest.hex())
END
)
debug=$work/$arch/debug/lib/debug/.build-id/$(echo "$id" | cut -c1-2)
mkdir -p "$debug"
"${binutils}objcopy" --only-keep-debug --compress-debug-sections "$work/$arch/whole.so" \
    "$debug/$(echo "$id" | cut -c3-).debug"
rm "$work/$arch/whole.so"
ln -s libgradcodec.so "$out/libgradcodec.so.0"
"${binutils}strip" --strip-debug --enable-deterministic-archives -o "$out/libgradcodec.a" "$built/libgradcodec.a"

prefix=$work/$arch/prefix
rm -rf "$prefix"
make --no-print-directory install install-static PREFIX="$prefix" LIBDIR="$prefix/lib" \
    MANDIR="$prefix/share/man" LIB="$out" CARGO=true DESTDIR= > "$work/install.log"
sed -i 's|^prefix=.*|prefix=${pcfiledir}/../..|' "$prefix/lib/pkgconfig/gradcodec.pc"
