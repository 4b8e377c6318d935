#!/bin/sh
# build.sh [ARCH]: the library as it is given to others: shared, stripped, with its debug symbols in a file apart; and
# static. Zig links it for glibc 2.17, so that one build runs on every Linux of the last ten years.
# build/package/ARCH/lib has the libraries, build/package/ARCH/prefix all that is installed, which may be moved as a
# whole. The same sources give the same bytes in every folder, but for the debug symbols. ARCH: x86_64, if it is not
# named; for aarch64 there is packaging/aarch64.sh.
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
# Packages are of a commit as a whole; a build in a folder where much was built before would name the last one that has
# changed the library.
GRADCODEC_COMMIT=${GRADCODEC_COMMIT:-$(sh packaging/commit.sh)}
export GRADCODEC_COMMIT
echo "building the library with cargo and Zig for $arch and glibc 2.17: a few minutes the first time"
# What names this folder, or the user's, stands in messages of panics and in debug symbols otherwise. Two flags are
# needed, and cargo's own trim-paths is not there in stable releases.
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
# The build-id, by which debuggers find the symbols, is a hash of the library without them: in them is the name of the
# folder in which Zig compiles its unwinder, so they alone differ from folder to folder. The linker has put
# "gradcodec-build-id.." in its place.
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
