#!/bin/sh
# Fetches real dlpack.h files of five DLPack versions into DIR/<name>/dlpack/dlpack.h; installs nothing.
# Usage: fetch.sh DIR      (PYTHON names the interpreter whose pip is used; python3 if unset)
set -eu
[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# keep NAME FILE: installs a header by renaming it, so that an interrupted run leaves no partial header
keep() {
    mkdir -p "$dir/$1/dlpack"
    cp "$2" "$dir/$1/dlpack/dlpack.h.part"
    mv "$dir/$1/dlpack/dlpack.h.part" "$dir/$1/dlpack/dlpack.h"
    echo "fetched $1"
}

# wheel NAME REQUIREMENT PATH-IN-WHEEL: the header is the same on every machine, so one platform's wheel is enough.
wheel() {
    if [ -f "$dir/$1/dlpack/dlpack.h" ]; then echo "present $1"; return; fi
    "${PYTHON:-python3}" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
        --implementation cp --python-version 3.12 \
        --platform manylinux2014_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_28_x86_64 \
        --dest "$work/$1" "$2" || { echo "FAILED $1: no wheel of $2" >&2; exit 1; }
    "${PYTHON:-python3}" -m zipfile -e "$work/$1"/*.whl "$work/$1/x"
    keep "$1" "$work/$1/x/$3"
}

# DLPack 1.0 and 1.1, where DLManagedTensorVersioned is a tag without a typedef
wheel cuda-core-0.1.1 cuda-core==0.1.1 cuda/core/experimental/dlpack.h
wheel cuda-core-0.3.2 cuda-core==0.3.2 cuda/core/experimental/dlpack.h
# 1.2 and 1.3, with the exchange API
wheel tvm-ffi-0.1.0 apache-tvm-ffi==0.1.0 tvm_ffi/include/dlpack/dlpack.h
wheel tvm-ffi-0.1.15 apache-tvm-ffi==0.1.15.post2 tvm_ffi/include/dlpack/dlpack.h

# Debian's header, older than 1.0. apt keeps its state in our folder, needs no root and does not change the system.
if ls "$dir"/debian-*/dlpack/dlpack.h >/dev/null 2>&1; then
    echo "present $(basename "$dir"/debian-*)"
elif ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "SKIPPED debian: no apt-get here"
else
    mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial" "$work/deb"
    # Disables hooks of the distribution or image, which would work on the system's own folders.
    cat >"$work/apt/conf" <<END
Dir::State::lists "$work/apt/lists";
Dir::Cache "$work/apt/cache";
APT::Sandbox::User "$(id -un)";
Acquire::Languages "none";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
END
    private() { apt-get -qq -c "$work/apt/conf" "$@"; }
    { private update && (cd "$work/deb" && private download libdlpack-dev); } ||
        { echo "FAILED debian: apt-get has no libdlpack-dev" >&2; exit 1; }
    dpkg-deb -x "$work"/deb/*.deb "$work/deb/x"
    version=$(dpkg-deb -f "$work"/deb/*.deb Version)
    keep "debian-${version%%-*}" "$work/deb/x/usr/include/dlpack/dlpack.h"
fi
