#!/bin/sh
# archive.sh ARCH: makes a tar.xz of the prefix and one of the debug symbols of build/package/ARCH, with their sha256.
# The archives may be unpacked anywhere: the files of pkg-config and CMake name no absolute folder. SOURCE_DATE_EPOCH
# must be set.
set -eu
: "${SOURCE_DATE_EPOCH:?is not set}"
arch=$1
cd "$(dirname "$0")/../build/package"
version=$(sed -n 's/^Version: //p' "$arch/prefix/lib/pkgconfig/gradcodec.pc")

# archive NAME FOLDER: makes an archive that does not depend on the user, the time or the order of files
archive() {
    tar --create --file "$1.tar" --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" \
        --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --transform "s|^\.|$1|S" --directory "$2" .
    xz -9e --threads=1 --force "$1.tar"
    sha256sum "$1.tar.xz" > "$1.tar.xz.sha256"
    echo "build/package/$1.tar.xz: $(stat -c %s "$1.tar.xz") bytes"
}
archive "gradcodec-$version-linux-$arch" "$arch/prefix"
archive "gradcodec-$version-linux-$arch-debug" "$arch/debug"
