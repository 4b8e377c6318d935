#!/bin/sh
# test_package.sh: tests the output of `make package`. Checks the archive, and its library's exports, dependencies and
# glibc version. Builds programs against it with pkg-config, shared and static; panics must be caught. Checks the debug
# symbols, the contents of the Debian packages, and notices and documents in every form.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
arch=x86_64
packages=$root/build/package
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
name=gradcodec-$version-linux-$arch
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "FAILED: $*" >&2
    exit 1
}
unset LD_LIBRARY_PATH PKG_CONFIG_PATH

(cd "$packages" && sha256sum --check --quiet "$name.tar.xz.sha256" "$name-debug.tar.xz.sha256") || fail "sha256"
tar -C "$work" -xf "$packages/$name.tar.xz"
tar -C "$work" -xf "$packages/$name-debug.tar.xz"
[ "$(ls "$work")" = "$(printf '%s\n' "$name" "$name-debug")" ] || fail "the archives hold $(ls "$work")"
prefix=$work/$name
library=$prefix/lib/libgradcodec.so.$version
# The unstripped library.
built=build/package/target-$arch/$arch-unknown-linux-gnu/release/libgradcodec.so
sh tests/abi/symbols.sh "$library" tests/abi/functions.h "$built" > "$work/log" || fail "$(grep '^FAILED' "$work/log")"
python3 tests/abi/instructions.py "$built" > "$work/log" || fail "$(cat "$work/log")"
newest=$(objdump -T "$library" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
[ "$(printf 'GLIBC_2.17\n%s\n' "$newest" | sort -V | tail -n 1)" = GLIBC_2.17 ] || fail "it wants $newest"
# An unversioned name comes from a glibc newer than Zig supports: an older one could not load the library.
unknown=$(nm -D --undefined-only "$library" | awk '$1 == "U" && $2 !~ /@/ { print $2 }')
[ -z "$unknown" ] || fail "glibc 2.17 has no $unknown"
echo "ok: the library exports and needs what it should, and wants $newest"
! grep -rl -e "$root" -e "${CARGO_HOME:-$HOME/.cargo}" "$prefix" || fail "these name the folder that they were built in"

id() { readelf --notes "$1" 2>/dev/null | sed -n 's/.*Build ID: //p'; }
debug=$work/$name-debug/lib/debug/.build-id/$(id "$library" | sed 's|^..|&/|').debug
[ -e "$debug" ] && [ "$(id "$debug")" = "$(id "$library")" ] || fail "build-id: $(id "$library")"
readelf --debug-dump=decodedline "$debug" 2>/dev/null | grep -q 'bits.rs' || fail "no lines in the debug symbols"
echo "ok: debug symbols apart, found by build-id"

PATH=$root/build/package/venv/bin:$root/build/venv/bin:$PATH
pkg_config=$(command -v pkgconf || command -v pkg-config) || fail "no pkg-config"
compile() { # PROGRAM FLAGS...: builds and runs an example, and a test that panics are caught with the linked unwinder
    program=$1 && shift
    for source in examples_c/bits.c packaging/panic.c; do
        ${CC:-cc} -std=c99 -Wall -Wextra -pedantic -Werror "$source" -o "$work/$program" -pthread "$@"
        "$work/$program" > "$work/log" || fail "$program, $source: $(cat "$work/log")"
    done
}
export PKG_CONFIG_PATH="$prefix/lib/pkgconfig"
# shellcheck disable=SC2046 # the flags are words
compile shared $("$pkg_config" --cflags --libs gradcodec) -Wl,-rpath,"$prefix/lib"
mkdir "$work/static" && cp -r "$prefix/include" "$work/static" && mkdir "$work/static/lib"
cp -r "$prefix/lib/libgradcodec.a" "$prefix/lib/pkgconfig" "$work/static/lib"
# shellcheck disable=SC2046 # likewise
compile linked $(PKG_CONFIG_PATH="$work/static/lib/pkgconfig" "$pkg_config" --static --cflags --libs gradcodec)
! readelf -d "$work/linked" | grep -q libgradcodec || fail "the static library is not static"
echo "ok: bits by pkg-config, shared ($(stat -c %s "$work/shared") bytes), static ($(stat -c %s "$work/linked") bytes)"
echo "ok: $(cat "$work/log")"

has() { # FILE LISTING...
    wanted=$1 && shift
    "$@" | grep "$wanted" > /dev/null || fail "no $wanted by $*"
}
wheel=$packages/gradcodec-$version-py3-none-manylinux_2_17_$arch.whl
has licenses/THIRD-PARTY-NOTICES python3 -m zipfile --list "$wheel"
for file in THIRD-PARTY-NOTICES CHANGELOG.md SECURITY.md docs/KERNELS.md; do
    has "share/doc/gradcodec/$file" find "$prefix"
    has "share/doc/gradcodec/$file" python3 -m zipfile --list "$wheel"
done
for deb in "$packages"/libgradcodec*_amd64.deb; do
    mkdir "$work/deb" && dpkg-deb -x "$deb" "$work/deb"
    grep -q 'dlpark .*Apache-2.0' "$work"/deb/usr/share/doc/*/THIRD-PARTY-NOTICES || fail "$deb has no notices"
    case $deb in
    */libgradcodec0_*) cmp "$library" "$(echo "$work"/deb/usr/lib/*/libgradcodec.so.0)" ;;
    */libgradcodec-dev_*)
        [ -e "$work/deb/usr/include/gradcodec/loader.h" ] && [ -L "$(echo "$work"/deb/usr/lib/*/libgradcodec.so)" ] &&
            gzip -dc "$work/deb/usr/share/man/man7/gradcodec.7.gz" | cmp - "$prefix/share/man/man7/gradcodec.7" &&
            [ -e "$work/deb/usr/share/doc/libgradcodec-dev/docs/KERNELS.md" ]
        ;;
    */*-dbgsym_*)
        [ "$(cd "$work/deb/usr/lib/debug/.build-id" && echo */*)" = "$(id "$library" | sed 's|^..|&/|').debug" ]
        ;;
    esac || fail "$deb"
    size=$(dpkg-deb --contents "$deb" | awk '{ size += /^-/ ? int(($3 + 1023) / 1024) : 1 } END { print size }')
    [ "$size" = "$(dpkg-deb --field "$deb" Installed-Size)" ] || fail "$deb: its files take $size KiB"
    rm -r "$work/deb"
done
echo "ok: every form has the notices and documents, and each Debian package what belongs to it"
if command -v lintian > /dev/null; then
    # The maintainer is set when the packages are released.
    lintian --fail-on error --suppress-tags bogus-mail-host,bogus-mail-host-in-debian-changelog,root-in-contact \
        "$packages"/libgradcodec*_amd64.deb || fail "lintian"
    echo "ok: lintian finds no error"
else
    echo "NOT RUN, because there is no lintian: lintian"
fi
