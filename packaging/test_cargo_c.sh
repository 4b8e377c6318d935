#!/bin/sh
# test_cargo_c.sh DIR CC: tests `cargo cinstall` (cargo-c), which installs into DIR by the metadata in Cargo.toml: the
# library with its SONAME, the headers, and a pkg-config file that builds an example, shared and static.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR CC" >&2; exit 2; }
dir=$1 cc=$2
cd "$(dirname "$0")/.."
cargo cinstall --version > /dev/null 2>&1 ||
    { echo "NOT RUN, because there is no cargo-c (cargo install --locked cargo-c): cargo cinstall"; exit 0; }
pkg_config=$(command -v pkgconf || command -v pkg-config) ||
    { echo "NOT RUN, because there is no pkg-config: cargo cinstall"; exit 0; }
fail() { echo "FAILED: cargo cinstall: $*" >&2; exit 1; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
rm -rf "$dir" && mkdir -p "$dir"
prefix=$(cd "$dir" && pwd)/prefix

echo "building the library with cargo-c: a few minutes the first time"
cargo cinstall --release --locked --target-dir target/cargo-c --prefix "$prefix" --libdir "$prefix/lib" \
    > "$dir/log" 2>&1 || fail "$(cat "$dir/log")"
(cd "$prefix" && find . ! -type d | LC_ALL=C sort) > "$dir/installed"
{
    echo "./lib/libgradcodec.a"
    for name in "" .0 ".$version"; do echo "./lib/libgradcodec.so$name"; done
    echo "./lib/pkgconfig/gradcodec.pc"
    find include -type f | sed 's|^|./|'
} | LC_ALL=C sort | diff - "$dir/installed" || fail "these files"
diff -r include "$prefix/include" || fail "the headers"
sh tests/abi/symbols.sh "$prefix/lib/libgradcodec.so" tests/abi/functions.h > "$dir/log" || fail "$(cat "$dir/log")"

export PKG_CONFIG_PATH="$prefix/lib/pkgconfig"
[ "$("$pkg_config" --modversion gradcodec)" = "$version" ] || fail "the version is $("$pkg_config" --modversion gradcodec)"
mkdir -p "$dir/static" && cp "$prefix/lib/libgradcodec.a" "$dir/static"
# shellcheck disable=SC2046 # the flags are words
$cc -std=c99 examples_c/bits.c -o "$dir/shared" $("$pkg_config" --cflags --libs gradcodec) -Wl,-rpath,"$prefix/lib"
# shellcheck disable=SC2046 # likewise
$cc -std=c99 examples_c/bits.c -o "$dir/linked" -L"$dir/static" $("$pkg_config" --static --cflags --libs gradcodec)
for program in shared linked; do
    "$dir/$program" > "$dir/log" || fail "$program: $(cat "$dir/log")"
done
! readelf -d "$dir/linked" | grep -q libgradcodec || fail "the static library is not static"
echo "ok: cargo cinstall gives the library, shared and static, its headers and its pkg-config file"
