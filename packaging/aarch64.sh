#!/bin/sh
# aarch64.sh: makes wheel, archive and Debian packages for aarch64 on x86-64, and tests them with qemu: C examples and
# tests, with threads. Rust for aarch64 is Debian's rustc-web, which conflicts with other Rust packages. So debootstrap
# makes a minimal system in build/bare-root/aarch64; a mount namespace mounts this repository and cargo's folder into
# it. Needs root.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
system=$root/build/bare-root/aarch64
packages=$root/build/package
cargo_home=${CARGO_HOME:-$HOME/.cargo}
PATH=$PATH:/usr/sbin:/sbin
for needed in debootstrap unshare chroot; do
    command -v $needed > /dev/null || { echo "NOT RUN, because there is no $needed: aarch64"; exit 0; }
done
[ "$(id -u)" -eq 0 ] || { echo "NOT RUN, because this is not root: aarch64"; exit 0; }

# inside COMMAND...: runs a command in the system, at the path of this repository
inside() {
    unshare --mount --pid --fork --kill-child --mount-proc="$system/proc" sh -euc '
        system=$1 root=$2 cargo_home=$3
        shift 3
        mkdir -p "$system$root" "$system$cargo_home"
        mount --bind "$root" "$system$root"
        mount --bind "$cargo_home" "$system$cargo_home"
        exec chroot "$system" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
            DEBIAN_FRONTEND=noninteractive CARGO_HOME="$cargo_home" "GRADCODEC_COMMIT=$GRADCODEC_COMMIT" \
            sh -euc "cd \"\$1\" && shift && exec \"\$@\"" sh "$root" "$@"
    ' sh "$system" "$root" "$cargo_home" "$@"
}
# The system has no git, so the commit is passed in the environment.
GRADCODEC_COMMIT=${GRADCODEC_COMMIT:-$(sh packaging/commit.sh)}
export GRADCODEC_COMMIT

if [ ! -e "$system/ready" ]; then
    echo "making a Debian with Rust for aarch64 in build/bare-root/aarch64: 1.5 GB, some minutes"
    if [ ! -e "$system/bootstrapped" ]; then
        rm -rf "$system"
        debootstrap --variant=minbase bookworm "$system" http://deb.debian.org/debian
        touch "$system/bootstrapped"
    fi
    {
        echo "deb http://deb.debian.org/debian bookworm main"
        echo "deb http://deb.debian.org/debian-security bookworm-security main"
    } > "$system/etc/apt/sources.list"
    inside dpkg --add-architecture arm64
    inside apt-get update -qq
    inside apt-get install -qq --yes --no-install-recommends rustc-web cargo-web libstd-rust-web-dev:arm64 libc6:arm64 \
        qemu-user binutils-aarch64-linux-gnu ca-certificates make python3
    touch "$system/ready"
fi
cargo fetch --quiet --locked
sh packaging/tools.sh
inside env CARGO_NET_OFFLINE=true sh packaging/build.sh aarch64
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH
python3 packaging/wheel.py aarch64
sh packaging/archive.sh aarch64
sh packaging/debian.sh aarch64

library=build/package/aarch64/lib
# This PATH has an nm that supports aarch64.
inside env PATH=/usr/aarch64-linux-gnu/bin:/usr/bin:/bin \
    sh tests/abi/symbols.sh "$library/libgradcodec.so.0" tests/abi/functions.h
newest=$(readelf --version-info "$library/libgradcodec.so" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
[ "$newest" = GLIBC_2.17 ] || { echo "FAILED: it wants $newest" >&2; exit 1; }
unknown=$(inside aarch64-linux-gnu-nm -D --undefined-only "$library/libgradcodec.so" | awk '$1 == "U" && $2 !~ /@/')
[ -z "$unknown" ] || { echo "FAILED: glibc 2.17 has no $unknown" >&2; exit 1; }
build/package-venv/bin/auditwheel show "$packages"/gradcodec-*-manylinux_2_17_aarch64.whl | tr '\n' ' ' |
    grep -q 'following platform tag: "manylinux_2_17_aarch64"' || { echo "FAILED: auditwheel" >&2; exit 1; }

mkdir -p "$packages/aarch64/bin"
# Excludes tests that count a process's threads, because qemu has its own threads.
programs="examples_c/bits examples_c/errors examples_c/versions examples_c/allreduce examples_c/share
    examples_c/digits packaging/panic tests/c/threads tests/c/null"
for program in $programs; do
    begin=$(date +%s)
    name=${program##*/} argument=
    build/package-venv/bin/python -m ziglang cc -target aarch64-linux-gnu.2.17 -std=c11 -O2 -Iinclude "$program.c" \
        -o "$packages/aarch64/bin/$name" -L"$library" -lgradcodec -lm -ldl -pthread
    [ "$name" != digits ] || argument=examples_c/data/digits.bin
    inside env "LD_LIBRARY_PATH=$library" qemu-aarch64 "build/package/aarch64/bin/$name" $argument \
        > "$packages/aarch64/log" 2>&1 ||
        { echo "FAILED: $program"; cat "$packages/aarch64/log"; exit 1; }
    echo "ok $program: $(tail -n 1 "$packages/aarch64/log" | cut -c1-90), $(($(date +%s) - begin)) s"
done
echo "ok: every form for aarch64 is made, and its library works under qemu"
