#!/bin/sh
# Compiles the examples in CUDA C++ with the nvcc of the machine or of PYTHON's wheels, with every warning an error, and
# runs them. Without a device they print SKIPPED. Usage: nvcc.sh PYTHON CXX LIBRARY_DIR WORK_DIR
set -eu
[ $# -eq 4 ] || { echo "usage: $0 PYTHON CXX LIBRARY_DIR WORK_DIR" >&2; exit 2; }
cd "$(dirname "$0")/../../.."
python=$1 cxx=$2 library=$(cd "$3" && pwd) work=$4
mkdir -p "$work"

wheels=$($python -c 'import glob, sysconfig as s; print(*glob.glob(s.get_path("purelib") + "/nvidia/cu[0-9]*"))')
for nvcc in "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc "$wheels/bin/nvcc" ""; do
    [ ! -x "$nvcc" ] || break
done
[ -n "$nvcc" ] || { echo "SKIPPED examples in CUDA C++: no nvcc, neither here nor for $python"; exit 0; }
set -- -Iinclude -L"$library" -lgradcodec -Xlinker -rpath,"$library"
case $nvcc in "$wheels"/*) set -- "$@" -L"$wheels/lib" ;; esac # nvcc does not search its wheel's folder

for source in examples_cpp/*.cu; do
    program=$work/$(basename "$source" .cu)
    # Machine code for the oldest GPUs and for Hopper. All GPUs after Hopper compile the PTX.
    "$nvcc" -std=c++17 -O2 -ccbin "$cxx" -gencode arch=compute_75,code=sm_75 \
        -gencode arch=compute_90,code=[sm_90,compute_90] -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror \
        "$source" -o "$program" "$@"
    echo "== $source"
    "$program" >"$work/log" || { cat "$work/log"; echo "FAILED: $source"; exit 1; }
    cat "$work/log"
    if grep -q SKIPPED "$work/log" && $python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "FAILED: $source has found no device, but torch has"
        exit 1
    fi
done
echo "ok: the examples in CUDA C++, by $nvcc"
