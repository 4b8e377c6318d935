#!/bin/sh
# install.sh DIR CC LIBRARY_DIR: builds an example against an installed tree, found by pkg-config alone; installs to
# other folders, uninstalls, and checks that ldconfig runs only where it should.
set -eu
dir=$(mkdir -p "$1" && cd "$1" && pwd)
cc=$2 library=$(cd "$3" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
version=$(sed -n 's/^\/\* gradcodec.h, version \([0-9.]*\)\..*/\1/p' "$root/include/gradcodec.h")
rm -rf "$dir"

# install TARGET VARIABLE=VALUE...
install() {
    make --no-print-directory -C "$root" LIB="$library" "$@" > /dev/null
}

# example LIBDIR: builds an example with the library that pkg-config finds in LIBDIR, and runs it
example() {
    mkdir -p "$dir/example" && cd "$dir/example"
    # shellcheck disable=SC2046 # the flags are words
    $cc -std=c99 -Wall -Wextra -pedantic -Werror "$root/examples_c/bits.c" -o bits \
        $(PKG_CONFIG_PATH="$1/pkgconfig" pkgconf --cflags --libs gradcodec)
    LD_LIBRARY_PATH="$1" ./bits
    [ "$(PKG_CONFIG_PATH="$1/pkgconfig" pkgconf --modversion gradcodec)" = "$version" ]
    [ "$(readlink "$1/libgradcodec.so")" = libgradcodec.so.0 ]
}

nothing_left_in() {
    left=$(find "$1" ! -type d)
    [ -z "$left" ] || { echo "FAILED: uninstall leaves $left" >&2; exit 1; }
}

if [ -e "$root/Cargo.toml" ]; then
    for target in all install demo wheel; do
        said=$(make -C "$root" "$target" CARGO=no-cargo PREFIX="$dir/none" 2>&1) && { echo "FAILED: $target" >&2; exit 1; }
        echo "$said" | grep -q 'there is no no-cargo here: .* needs Rust 1\.[0-9]* or newer' || { echo "$said"; exit 1; }
    done
    echo "ok: without Rust make says what is needed"
fi

install install PREFIX="$dir/usual"
example "$dir/usual/lib"
sh "$root/tests/packaging/man.sh" "$dir/usual/share/man/man7/gradcodec.7"
install uninstall PREFIX="$dir/usual"
nothing_left_in "$dir/usual"
echo "ok: an example builds and runs against the installed tree, which can be uninstalled"

multiarch=$dir/multiarch/lib/x86_64-linux-gnu
install install PREFIX="$dir/multiarch" LIBDIR="$multiarch" MANDIR="$dir/multiarch/man"
example "$multiarch"
[ -s "$dir/multiarch/man/man7/gradcodec.7" ]
[ ! -e "$dir/multiarch/share/man" ]
install uninstall PREFIX="$dir/multiarch" LIBDIR="$multiarch" MANDIR="$dir/multiarch/man"
nothing_left_in "$dir/multiarch"
echo "ok: the same with LIBDIR and MANDIR"

install install-strip PREFIX="$dir/stripped"
! readelf -S "$dir/stripped/lib/libgradcodec.so" | grep -q debug_info || { echo "FAILED: debug symbols" >&2; exit 1; }
example "$dir/stripped/lib"
# The installed files suffice for the examples among them.
cd "$dir/stripped/share/doc/gradcodec"
grep -q '^dlpark .*Apache-2.0' THIRD-PARTY-NOTICES || { echo "FAILED: no notices" >&2; exit 1; }
ls CHANGELOG.md SECURITY.md docs/KERNELS.md > "$dir/log"
# shellcheck disable=SC2046 # the flags are words
$cc -std=c99 examples_c/feedback.c -o "$dir/feedback" -lm -pthread -Wl,-rpath,"$dir/stripped/lib" \
    $(PKG_CONFIG_PATH="$dir/stripped/lib/pkgconfig" pkgconf --cflags --libs gradcodec)
"$dir/feedback" > "$dir/log" || { cat "$dir/log"; exit 1; }
PYTHONPATH="$dir/stripped/share/gradcodec/python" python3 examples/python/codec_numpy.py > "$dir/log" ||
    { cat "$dir/log"; exit 1; }
env -u GRADCODEC_LIBRARY PYTHONPATH="$dir/stripped/share/gradcodec/python" python3 -c "import gradcodec; print(gradcodec.GradCodec())" |
    grep -qF "$dir/stripped/lib/" || { echo "FAILED: the package takes another library" >&2; exit 1; }
cd "$root"
install uninstall PREFIX="$dir/stripped"
nothing_left_in "$dir/stripped"
echo "ok: without debug symbols, with the examples, documents and notices"

# Check as root that make runs ldconfig for a folder that ldconfig reads, and for no other.
cat > "$dir/as_root.sh" <<'END'
set -eu
known() { ldconfig -p | grep -q libgradcodec; }
cache() { stat -c %i /etc/ld.so.cache; } # ldconfig writes a new file
before=$(cache)
make --no-print-directory -C "$1" LIB="$3" install DESTDIR="$2/staged" > /dev/null
make --no-print-directory -C "$1" LIB="$3" install PREFIX="$2/elsewhere" > /dev/null
[ "$(cache)" = "$before" ] || { echo "FAILED: ldconfig has run for a folder that it does not read" >&2; exit 1; }
make --no-print-directory -C "$1" LIB="$3" install > /dev/null
known || { echo "FAILED: ldconfig does not know what was installed to /usr/local" >&2; exit 1; }
make --no-print-directory -C "$1" uninstall > /dev/null
! known || { echo "FAILED: ldconfig knows what was uninstalled" >&2; exit 1; }
echo "ok: ldconfig knows what is installed to /usr/local"
END
sh "$root/tests/packaging/private.sh" "$dir/private" sh "$dir/as_root.sh" "$root" "$dir" "$library"
