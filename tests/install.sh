#!/bin/sh
# install.sh DIR CC: builds an example against an installed tree, found by pkg-config alone.
set -eu
dir=$(mkdir -p "$1" && cd "$1" && pwd)
cc=$2
rm -rf "$dir"
make --no-print-directory install PREFIX="$dir" > /dev/null
export PKG_CONFIG_PATH="$dir/lib/pkgconfig"
mkdir "$dir/example" && cp examples_c/bits.c "$dir/example/"
cd "$dir/example"
# shellcheck disable=SC2046 # the flags are words
$cc -std=c99 -Wall -Wextra -pedantic -Werror bits.c -o bits $(pkgconf --cflags --libs gradcodec)
LD_LIBRARY_PATH="$dir/lib" ./bits
[ "$(pkgconf --modversion gradcodec)" = "$(sed -n 's/^\/\* gradcodec.h, version \([0-9.]*\)\..*/\1/p' "$dir/include/gradcodec.h")" ]
[ "$(readlink "$dir/lib/libgradcodec.so")" = libgradcodec.so.0 ]
echo "ok: an example builds and runs against the installed tree"
