#!/bin/sh
# Tests the CMake package: the examples against an installed tree that was moved; the version file; and with a Python
# that has torch, torch_ops and ddp, which that Python then runs. Usage: cmake.sh WORK_DIR LIBRARY_DIR [PYTHON]
set -eu
[ $# -ge 2 ] || { echo "usage: $0 WORK_DIR LIBRARY_DIR [PYTHON]" >&2; exit 2; }
work=$(mkdir -p "$1" && cd "$1" && pwd) library=$(cd "$2" && pwd)
python=$(if [ -n "${3:-}" ]; then command -v "$3"; fi)
case $python in /* | '') ;; *) python=$PWD/$python ;; esac
PATH=${python:+$(dirname "$python"):}$PATH # a virtual environment's cmake and ninja
cd "$(dirname "$0")/../.."
rm -rf "$work" && mkdir "$work"
generator=$(command -v ninja >/dev/null && echo Ninja || echo "Unix Makefiles")

make --no-print-directory LIB="$library" install PREFIX="$work/elsewhere" >/dev/null
mv "$work/elsewhere" "$work/installed"
package=$work/installed/lib/cmake/gradcodec
version=$(sed -n 's/^set(PACKAGE_VERSION "\(.*\)")/\1/p' "$package/gradcodec-config-version.cmake")
[ "$version" = "$(sed -n 's/^\/\* gradcodec.h, version \([0-9.]*\)\..*/\1/p' include/gradcodec.h)" ]
cp -r examples_cpp "$work/examples" # apart from the repository: nothing else is found by accident

configure() { # BUILD_DIR OPTION...
    build=$1 && shift
    cmake -G "$generator" -S "$work/examples" -B "$build" "$@" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    cmake --build "$build" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
}

configure "$work/build" -DCMAKE_PREFIX_PATH="$work/installed" -DCMAKE_CXX_FLAGS="-Wall -Wextra -pedantic -Werror"
"$work/build/raii"
"$work/build/feedback"
LD_LIBRARY_PATH="$work/installed/lib" "$work/build/dlopen"
echo "ok: the examples build against a tree that was moved"

make --no-print-directory LIB="$library" install PREFIX="$work/prefix" LIBDIR="$work/prefix/lib/deeper" >/dev/null
configure "$work/deeper" -Dgradcodec_DIR="$work/prefix/lib/deeper/cmake/gradcodec"
"$work/deeper/raii"
echo "ok: and with another LIBDIR"

# asks WANTED ARGUMENT...: checks if find_package(gradcodec ARGUMENT...) finds the package (WANTED is 1) or not (0)
asks() {
    wanted=$1 && shift
    mkdir -p "$work/asks"
    printf 'cmake_minimum_required(VERSION 3.19)\nproject(asks NONE)\nfind_package(gradcodec %s CONFIG QUIET)\n' "$*" \
        >"$work/asks/CMakeLists.txt"
    cat >>"$work/asks/CMakeLists.txt" <<'END'
file(WRITE "${CMAKE_BINARY_DIR}/found" "${gradcodec_FOUND}")
END
    rm -rf "$work/asks/build"
    cmake -S "$work/asks" -B "$work/asks/build" -DCMAKE_PREFIX_PATH="$work/installed" >"$work/log" 2>&1 ||
        { cat "$work/log"; exit 1; }
    [ "$(cat "$work/asks/build/found")" = "$wanted" ] ||
        { echo "FAILED: find_package(gradcodec $*) is not $wanted"; exit 1; }
}
asks 1
asks 1 0.1
asks 1 "$version"
asks 1 "$version EXACT"
asks 1 0.1...0.9
asks 1 0.0.1...1
asks 0 1.0
asks 0 0.99
asks 0 "${version%.*}.99"
asks 0 0.0.1...0.0.9
asks 0 "0.0.1...<$version"
echo "ok: find_package gives versions that fit, and no others"

[ -n "$python" ] || { echo "SKIPPED torch_ops and ddp: no Python with torch was named"; exit 0; }

# Run the commands in CMakeLists.txt, with the library where that file expects it.
make --no-print-directory LIB="$library" install PREFIX="$work/home/.local" >/dev/null
HOME=$work/home "$python" tests/commands.py cmake "$work/home/.local/lib" "$work/as_it_stands"

torch=$("$python" -c 'import torch; print(torch.utils.cmake_prefix_path)')
set -- -DTORCH_OPS=ON -DCMAKE_PREFIX_PATH="$work/installed;$torch"
if "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' && [ -z "${CUDA_HOME:-}" ] &&
    ! command -v nvcc >/dev/null && [ ! -d /usr/local/cuda ]; then
    # Make a toolkit of the wheels on which torch depends. They lack the names without a version that linkers need.
    wheels=$("$python" -c 'import glob, sysconfig as s; print(*glob.glob(s.get_path("purelib") + "/nvidia/cu[0-9]*"))')
    if [ ! -x "$wheels/bin/nvcc" ]; then
        echo "SKIPPED torch_ops and ddp: this torch is built for CUDA, and CMake does not find it without nvcc"
        exit 0
    fi
    mkdir -p "$work/cuda/lib" && ln -s lib "$work/cuda/lib64"
    ln -s "$wheels/bin" "$wheels/include" "$wheels/nvvm" "$work/cuda/"
    for file in "$wheels"/lib/lib*; do
        name=$(basename "$file")
        ln -s "$file" "$work/cuda/lib/$name"
        [ "$name" = "${name%.so.*}" ] || ln -s "$file" "$work/cuda/lib/${name%.so.*}.so"
    done
    export CUDA_HOME="$work/cuda" CUDACXX="$work/cuda/bin/nvcc"
    set -- "$@" -DCUDA_TOOLKIT_ROOT_DIR="$work/cuda"
fi
configure "$work/torch" "$@"
GRADCODEC_TORCH_OPS=$work/torch/libtorch_ops.so "$python" examples/python/torch_ops.py
GRADCODEC_DDP=$work/torch/libddp.so "$python" examples/python/ddp.py
echo "ok: torch_ops and ddp as built by CMake"
