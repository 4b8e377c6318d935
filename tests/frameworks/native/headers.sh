#!/bin/sh
# Compiles the DLPack declarations of torch, of tvm-ffi and ours in one unit, in any order; and a program with tvm-ffi.
# Prints what is not installed, and skips it. Usage: headers.sh PYTHON CXX LIBRARY_DIR WORK_DIR
set -eu
[ $# -eq 4 ] || { echo "usage: $0 PYTHON CXX LIBRARY_DIR WORK_DIR" >&2; exit 2; }
cd "$(dirname "$0")/../../.."
python=$1 cxx=$2 library=$(cd "$3" && pwd) work=$4
mkdir -p "$work"
torch=$($python -c '
from torch.utils import cpp_extension
print(*("-isystem" + path for path in cpp_extension.include_paths()))')
if tvm=$($python -c '
import tvm_ffi.libinfo as info
print("-isystem" + info.find_include_path(), "-isystem" + info.find_dlpack_include_path())' 2>/dev/null); then
    tvm_header=tvm/ffi/container/tensor.h
else
    tvm='' tvm_header=''
    echo "SKIPPED tvm-ffi: not installed for $python"
fi

# order HEADER...: compiles a unit with these headers in this order, and checks their declarations with layout.h
order() {
    for file in "$@"; do echo "#include <$file>"; done >"$work/order.cpp"
    printf '#undef CHECK\n#include "layout.h"\n' >>"$work/order.cpp" # torch has a macro of that name, too
    # shellcheck disable=SC2086 # the flags are words. -isystem: warnings in real headers are not ours.
    $cxx -std=c++20 -Wall -Wextra -Werror -fsyntax-only -Iinclude -Itests/dlpack $torch $tvm "$work/order.cpp" ||
        { echo "FAILED: $*"; exit 1; }
    echo "ok $*"
}

for theirs in ATen/dlpack.h $tvm_header; do
    for ours in gradcodec.h gradcodec/gradcodec.hpp; do
        order "$theirs" $ours
        order $ours "$theirs"
    done
done
# gradcodec/c10d.hpp includes gradcodec/torch.hpp before any header of torch.
order gradcodec/c10d.hpp ATen/DLConvertor.h $tvm_header
order $tvm_header ATen/DLConvertor.h gradcodec/c10d.hpp

if [ -n "$tvm_header" ]; then
    lib=$($python -c 'import tvm_ffi.libinfo as l; print(l.find_libtvm_ffi())')
    # shellcheck disable=SC2086
    $cxx -std=c++17 -O2 -Wall -Wextra -Werror -Iinclude $tvm tests/frameworks/native/tvm.cpp -o "$work/tvm" \
        -L"$library" -lgradcodec "$lib" -Wl,-rpath,"$library":"$(dirname "$lib")"
    "$work/tvm"
fi
