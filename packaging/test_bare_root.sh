#!/bin/sh
# test_bare_root.sh [SUITE...]: tests the wheel, the archive and the Debian packages in minimal systems without a
# compiler: Debian bullseye (glibc 2.31; its Python is too old for the wheel) and bookworm, made by debootstrap in
# build/bare-root. Builds programs outside, against the archive. Prints the time of each step. Needs root; uses a mount
# namespace, so that nothing stays mounted.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
packages=$root/build/package
work=$root/build/bare-root
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
name=gradcodec-$version-linux-x86_64
wheel=$packages/gradcodec-$version-py3-none-manylinux_2_17_x86_64.whl
[ $# -gt 0 ] || set -- bullseye bookworm
PATH=$PATH:/usr/sbin:/sbin
for needed in debootstrap unshare chroot; do
    command -v $needed > /dev/null || { echo "NOT RUN, because there is no $needed: packages in a bare root"; exit 0; }
done
[ "$(id -u)" -eq 0 ] || { echo "NOT RUN, because this is not root: packages in a bare root"; exit 0; }
mkdir -p "$work"

seconds() { # WHAT COMMAND...
    what=$1 && shift
    begin=$(date +%s%N)
    "$@" > "$work/log" 2>&1 || { echo "FAILED: $what"; cat "$work/log"; exit 1; }
    printf '%6d ms  %s: %s\n' $((($(date +%s%N) - begin) / 1000000)) "$what" "$(tail -n 1 "$work/log" | cut -c1-100)"
}
inside() { # SUITE COMMAND...: runs a command in the system, with its own /proc
    suite=$1 && shift
    unshare --mount --pid --fork --kill-child --mount-proc="$work/$suite/proc" chroot "$work/$suite" \
        /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@"
}

# Builds C programs outside, against the unpacked archive; Zig links them for glibc 2.17.
rm -rf "$work/opt" && mkdir -p "$work/opt/bin"
tar -C "$work/opt" -xf "$packages/$name.tar.xz"
examples="bits errors feedback versions allreduce share digits dlopen kernels"
for example in $examples; do
    build/package-venv/bin/python -m ziglang cc -target x86_64-linux-gnu.2.17 -std=c99 -O2 \
        -I"$work/opt/$name/include" "examples_c/$example.c" -o "$work/opt/bin/$example" \
        -L"$work/opt/$name/lib" -lgradcodec -lm -ldl -pthread
done
if [ ! -e "$work/wheels/ready" ]; then
    build/package-venv/bin/python -m pip download --quiet --disable-pip-version-check -c tests/constraints.txt --only-binary :all: \
        --python-version 3.11 --dest "$work/wheels" numpy cffi
    touch "$work/wheels/ready"
fi

for suite; do
    if [ ! -e "$work/$suite/ready" ]; then
        rm -rf "${work:?}/$suite"
        seconds "debootstrap" debootstrap --variant=minbase --include=python3,python3-venv "$suite" "$work/$suite" \
            http://deb.debian.org/debian
        touch "$work/$suite/ready"
    fi
    system=$work/$suite
    echo "== $suite: $(inside "$suite" ldd --version | sed -n 1p), $(inside "$suite" python3 --version)"
    ! inside "$suite" sh -c 'command -v cc || command -v gcc || command -v clang' || { echo "FAILED: it has a compiler"; exit 1; }
    rm -rf "$system/opt" && mkdir -p "$system/opt/packages"
    cp "$packages/$name.tar.xz" "$packages"/libgradcodec*_amd64.deb "$wheel" "$work"/wheels/*.whl "$system/opt/packages"
    # Debian's minimal system has no xz program, which tar -J needs.
    cp -r "$work/opt/$name" "$work/opt/bin" "$system/opt"
    mkdir "$system/opt/examples_c" && cp -r examples_c/data "$system/opt/examples_c"

    echo "   the archive: $(stat -c %s "$packages/$name.tar.xz") bytes, unpacked $(du -sb "$work/opt/$name" | cut -f1)"
    for example in $examples; do
        argument=
        [ "$example" != digits ] || argument=examples_c/data/digits.bin
        seconds "$example" inside "$suite" env --chdir=/opt "LD_LIBRARY_PATH=/opt/$name/lib" GRADCODEC_CACHE=0 \
            "bin/$example" $argument
    done

    sizes=$(cd "$system/opt/packages" && stat -c '%n %s' libgradcodec0_* libgradcodec-dev_* | tr '\n' ' ')
    echo "   Debian packages: $sizes"
    seconds "dpkg --install" inside "$suite" sh -ec 'cd /opt/packages
        dpkg --install libgradcodec0_* libgradcodec-dev_*'
    seconds "bits, with no path" inside "$suite" /opt/bin/bits
    inside "$suite" dpkg --purge libgradcodec0 libgradcodec-dev > "$work/log"
    ! inside "$suite" /opt/bin/bits > "$work/log" 2>&1 || { echo "FAILED: bits runs without the package"; exit 1; }
    left=$(find "$system/usr" -name '*gradcodec*')
    [ -z "$left" ] || { echo "FAILED: dpkg --purge leaves $left"; exit 1; }

    if inside "$suite" python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "   the wheel: $(stat -c %s "$wheel") bytes"
        seconds "python3 -m venv" inside "$suite" python3 -m venv /opt/venv
        pip="/opt/venv/bin/pip install --no-index --find-links /opt/packages"
        # shellcheck disable=SC2086 # words
        seconds "pip install gradcodec" inside "$suite" $pip gradcodec
        seconds "without NumPy" inside "$suite" /opt/venv/bin/python -c '
from gradcodec import GradCodec
gradcodec = GradCodec()
print(gradcodec.tensor_empty([8], "float32").shape, gradcodec.build_info().splitlines()[0])'
        # shellcheck disable=SC2086 # words
        inside "$suite" $pip --quiet numpy cffi
        mkdir "$system/opt/examples"
        for example in examples/python/*.py; do
            grep -qE '^(import torch_ops|from this_tree|from mpi4py|"""Finds)' "$example" || cp "$example" "$system/opt/examples"
        done
        found=/opt/venv/lib/python3.11/site-packages/gradcodec
        for example in "$system"/opt/examples/*.py; do
            example=${example##*/} library=
            [ "$example" != cffi_bits.py ] || library=GRADCODEC_LIBRARY=$found/lib/libgradcodec.so.0
            seconds "$example" inside "$suite" env GRADCODEC_INCLUDE=$found/include $library \
                /opt/venv/bin/python "/opt/examples/$example"
        done
    else
        echo "   the wheel: NOT RUN, because it wants Python 3.10"
    fi
done
echo "ok: every form works in $*"
