#!/bin/sh
# Tests gradcodec.hpp in every standard from C++17, in two translation units of one program, and with real dlpack.h
# files before and after it. The examples compile in the standards after C++17. Usage: hpp.sh CXX LIBRARY_DIR WORK_DIR
# DLPACK_DIR (LIBRARY_DIR contains libgradcodec.so; tests/dlpack/fetch.sh fills DLPACK_DIR, which may be missing)
# GRADCODEC_TESTS=quick: the program runs in C++17 and only compiles in the other standards.
set -eu
[ $# -eq 4 ] || { echo "usage: $0 CXX LIBRARY_DIR WORK_DIR DLPACK_DIR" >&2; exit 2; }
cd "$(dirname "$0")/../.."
cxx=$1 library=$(cd "$2" && pwd) work=$3 dlpack=$4
mkdir -p "$work"
flags="-O2 -g -Wall -Wextra -pedantic -Werror -pthread -Iinclude"
link="-L$library -lgradcodec -Wl,-rpath,$library"

# shellcheck disable=SC2086 # the flags are words
for standard in c++17 c++20 c++23; do
    if ! echo 'int main() {}' | $cxx -std=$standard -x c++ -fsyntax-only - 2>/dev/null; then
        echo "SKIPPED $standard: $cxx does not know it"
        continue
    fi
    if [ "$standard" != c++17 ]; then
        for source in tests/cpp/hpp.cpp examples_cpp/raii.cpp examples_cpp/feedback.cpp examples_cpp/kernels.cpp \
            examples_cpp/dlopen.cpp; do
            $cxx -std=$standard $flags -fsyntax-only "$source"
        done
        echo "ok compiles as $standard"
        [ "${GRADCODEC_TESTS:-quick}" = all ] || continue
    fi
    $cxx -std=$standard $flags -O0 -DOTHER_UNIT -Dmain=other_main -c tests/cpp/hpp.cpp -o "$work/other.o"
    $cxx -std=$standard $flags tests/cpp/hpp.cpp "$work/other.o" -o "$work/hpp" $link
    echo "== hpp, $standard" && "$work/hpp"
done

# shellcheck disable=SC2086
$cxx -std=c++17 $flags tests/cpp/throws.cpp -o "$work/throws" $link
echo "== throws" && "$work/throws"

# Builds and runs the program at the top of the header.
sed -n '/^ \*     #include <gradcodec/,/^ \*     }$/s/^ \*     //p' include/gradcodec/gradcodec.hpp >"$work/start.cpp"
# shellcheck disable=SC2086
$cxx -std=c++17 $flags "$work/start.cpp" -o "$work/start" $link
[ "$("$work/start" | head -n 1)" = "32 bytes, the first is 160" ] ||
    { "$work/start"; echo "FAILED: the program at the top of gradcodec.hpp prints something else"; exit 1; }
echo "ok the program at the top of gradcodec.hpp"

# Checks that invalid programs do not compile: a const destination, a type without a DLPack dtype, a copied owner.
refused() { # WHAT SENTENCE STATEMENT
    cat >"$work/refused.cpp" <<END
#include <gradcodec/gradcodec.hpp>
extern const float *in;
extern const uint8_t *out;
extern long double *x;
int main() { $3 }
END
    # shellcheck disable=SC2086
    if $cxx -std=c++17 $flags -fsyntax-only "$work/refused.cpp" 2>"$work/log"; then
        echo "FAILED: compiles: $1"
        exit 1
    fi
    grep -q "$2" "$work/log" || { cat "$work/log"; echo "FAILED: refused for another reason: $1"; exit 1; }
    echo "ok does not compile: $1"
}
refused "a const destination" "view of const memory" \
    'gradcodec::pack_signs_into(gradcodec::view(in, {8}), 0, gradcodec::view(out, {1, 1}));'
refused "a type without a dtype" "no DLPack dtype" 'gradcodec::view(x, {8});'
refused "a copied owner" "deleted" 'gradcodec::Tensor a; gradcodec::Tensor b = a;'

# With real dlpack.h files, which may be older than gradcodec.hpp needs. -isystem hides warnings about those files.
for real in "$dlpack"/*; do
    [ -d "$real" ] || { echo "SKIPPED real dlpack.h files: none in $dlpack"; break; }
    for order in "dlpack/dlpack.h gradcodec/gradcodec.hpp" "gradcodec/gradcodec.hpp dlpack/dlpack.h"; do
        for file in $order; do echo "#include <$file>"; done >"$work/order.cpp"
        cat >>"$work/order.cpp" <<'END'
#include "layout.h"
gradcodec::Tensor both_ways(gradcodec::Tensor tensor);
gradcodec::Tensor both_ways(gradcodec::Tensor tensor) {
  return gradcodec::unpack_bits(gradcodec::pack_bits(std::move(tensor)));
}
END
        # shellcheck disable=SC2086
        $cxx -std=c++17 $flags -O0 -Itests/dlpack -isystem "$real" -c "$work/order.cpp" -o "$work/order.o" ||
            { echo "FAILED: $(basename "$real"): $order"; exit 1; }
    done
    echo "ok with $(basename "$real") before and after"
done
echo "ok: gradcodec.hpp"
