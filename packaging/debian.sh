#!/bin/sh
# debian.sh ARCH: makes Debian packages of build/package/ARCH: libgradcodec0 to run programs, libgradcodec-dev to build
# them, and libgradcodec0-dbgsym. DEBFULLNAME and DEBEMAIL name the maintainer, SOURCE_DATE_EPOCH the date.
set -eu
: "${SOURCE_DATE_EPOCH:?is not set}"
arch=$1
root=$(cd "$(dirname "$0")/.." && pwd)
work=$root/build/package/$arch
version=$(sed -n 's/^Version: //p' "$work/prefix/lib/pkgconfig/gradcodec.pc")
major=${version%%.*}
case $arch in
x86_64) architecture=amd64 ;;
aarch64) architecture=arm64 ;;
esac
multiarch=$arch-linux-gnu
maintainer="${DEBFULLNAME:-GradCodec} <${DEBEMAIL:-root@localhost}>"
deb=$work/debian
lib=libgradcodec$major
rm -rf "$deb"
umask 022
mkdir -p "$deb/all" "$deb/$lib/DEBIAN" "$deb/libgradcodec-dev/DEBIAN" "$deb/$lib-dbgsym/DEBIAN"

make --no-print-directory -C "$root" install install-static DESTDIR="$deb/all" PREFIX=/usr \
    LIBDIR="/usr/lib/$multiarch" MANDIR=/usr/share/man LIB="$work/lib" CARGO=true > "$work/install.log"

# move PACKAGE PATH...: moves installed files into a package
move() {
    package=$1 && shift
    for path; do
        mkdir -p "$(dirname "$deb/$package/$path")"
        mv "$deb/all/$path" "$deb/$package/$path"
    done
}
move "$lib" "usr/lib/$multiarch/libgradcodec.so.$major" "usr/lib/$multiarch/libgradcodec.so.$version"
move libgradcodec-dev usr/include "usr/lib/$multiarch/libgradcodec.so" "usr/lib/$multiarch/libgradcodec.a" \
    "usr/lib/$multiarch/pkgconfig" "usr/lib/$multiarch/cmake" usr/share/man usr/share/gradcodec
gzip -9n "$deb/libgradcodec-dev/usr/share/man/man7/gradcodec.7"
mkdir -p "$deb/libgradcodec-dev/usr/share/doc/libgradcodec-dev"
for path in CHANGELOG.md SECURITY.md docs examples examples_c examples_cpp kernels.md; do
    mv "$deb/all/usr/share/doc/gradcodec/$path" "$deb/libgradcodec-dev/usr/share/doc/libgradcodec-dev/$path"
done
chmod 644 "$deb/$lib/usr/lib/$multiarch/libgradcodec.so.$version"
cp -r "$work/debug" "$deb/$lib-dbgsym/usr"

# package NAME SECTION DEPENDS SUMMARY: builds a package; the rest of the description is the standard input
package() {
    tree=$deb/$1
    doc=$tree/usr/share/doc/$1
    mkdir -p "$doc"
    {
        echo "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/"
        echo "Upstream-Name: gradcodec"
        echo
        echo "Files: *"
        echo "Copyright: $(sed -n "s/^Copyright (c) //Ip" "$root/LICENSE")"
        echo "License: Expat or Apache-2.0"
        sed 's/^$/./; s/^/ /' "$root/LICENSE"
        echo " ."
        echo " On Debian systems the Apache License, Version 2.0, is in /usr/share/common-licenses/Apache-2.0."
        echo "Comment: What is linked into the library is in THIRD-PARTY-NOTICES, beside this file."
    } > "$doc/copyright"
    install -m 644 "$root/THIRD-PARTY-NOTICES" "$doc"
    {
        printf 'gradcodec (%s-1) unstable; urgency=medium\n\n  * As CHANGELOG.md of the sources says.\n\n' "$version"
        printf ' -- %s  %s\n' "$maintainer" "$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")"
    } | gzip -9n > "$doc/changelog.Debian.gz"
    # Computes sizes as dpkg-gencontrol does: a file's size in KiB, and 1 per folder on any file system.
    size=$(cd "$tree" && find . -path ./DEBIAN -prune -o -printf '%y %s\n' |
        awk '{ size += $1 ~ /[fl]/ ? int(($2 + 1023) / 1024) : 1 } END { print size }')
    {
        printf 'Package: %s\nSource: gradcodec\nVersion: %s-1\nArchitecture: %s\n' "$1" "$version" "$architecture"
        printf 'Maintainer: %s\nInstalled-Size: %s\nDepends: %s\n' "$maintainer" "$size" "$3"
        printf 'Section: %s\nPriority: optional\nMulti-Arch: same\nDescription: %s\n' "$2" "$4"
        sed 's/^/ /'
    } > "$tree/DEBIAN/control"
    (cd "$tree" && find usr -type f | LC_ALL=C sort | xargs md5sum) > "$tree/DEBIAN/md5sums"
    file=$root/build/package/$1_$version-1_$architecture.deb
    dpkg-deb --root-owner-group -Zxz --build "$tree" "$file" > "$work/dpkg-deb.log"
    echo "${file#"$root/"}: $(stat -c %s "$file") bytes"
}
echo "libgradcodec $major $lib (>= $version)" > "$deb/$lib/DEBIAN/shlibs"
echo "activate-noawait ldconfig" > "$deb/$lib/DEBIAN/triggers"
# A synopsis begins with a small letter.
about=$(sed -n 's/^description = "C\(.*\)"$/c\1/p' "$root/Cargo.toml")
package "$lib" libs "libc6 (>= 2.17)" "$about" <<END
GradCodec averages gradients over the ranks of a training job in 1 to 16 bits
per element, with error feedback. Tensors pass as DLPack structs.
.
This package has the shared library.
END
package libgradcodec-dev libdevel "$lib (= $version-1)" "$about (development)" <<END
GradCodec averages gradients over the ranks of a training job in 1 to 16 bits
per element, with error feedback. Tensors pass as DLPack structs.
.
This package has the headers, the static library, the Python package in
/usr/share/gradcodec/python, and examples.
END
package "$lib-dbgsym" debug "$lib (= $version-1)" "debug symbols for $lib" <<END
Line numbers for backtraces and debuggers.
END
