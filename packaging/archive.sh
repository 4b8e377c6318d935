#!/bin/sh
# archive.sh ARCH: of build/package/ARCH a tar.xz of the prefix, one of the debug symbols, and the sha256 of each.
# They may be unpacked anywhere: neither pkg-config's file nor CMake's names a folder outside. SOURCE_DATE_EPOCH is
# set.
set -eu
: "${SOURCE_DATE_EPOCH:?is not set}"
arch=$1
cd "$(dirname "$0")/../build/package"
version=$(sed -n 's/^Version: //p' "$arch/prefix/lib/pkgconfig/gradcodec.pc")

# archive NAME FOLDER: nothing in it depends on who packs it, when, and in which order the files lie
archive() {
    tar --create --file "$1.tar" --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" \
        --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --transform "s|^\.|$1|S" --directory "$2" .
    xz -9e --threads=1 --force "$1.tar"
    sha256sum "$1.tar.xz" > "$1.tar.xz.sha256"
    echo "build/package/$1.tar.xz: $(stat -c %s "$1.tar.xz") bytes"
}
archive "gradcodec-$version-linux-$arch" "$arch/prefix"
archive "gradcodec-$version-linux-$arch-debug" "$arch/debug"
