#!/bin/sh
# What gradcodec.hpp costs over C: instructions and calls of the same functions, compiled with -O2, on the way that is
# taken when nothing is refused. Usage: cost.sh CC CXX INCLUDE_DIR WORK_DIR
set -eu
[ $# -eq 4 ] || { echo "usage: $0 CC CXX INCLUDE_DIR WORK_DIR" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$4"
# A few instructions: the comparison with OK, and two managed tensors' empty ends, which views have.
allowed=12

$1 -std=c11 -O2 -Wall -Wextra -pedantic -Werror -I"$3" -c "$here/cost.c" -o "$4/cost_c.o"
$2 -std=c++17 -O2 -Wall -Wextra -pedantic -Werror -I"$3" -c "$here/cost.cpp" -o "$4/cost_cpp.o"

# FILE FUNCTION: "instructions calls" of the function itself; what gcc thought unlikely lies in FUNCTION.cold
count() {
    objdump -d --no-show-raw-insn "$1" | awk -v name="<$2>:" '
        /^[0-9a-f]+ </ { inside = $2 == name }
        inside && /^ / && !/nop|xchg +%ax,%ax/ { instructions++ } # those fill up to the next function
        inside && /\tcall/ { calls++ }
        END { print instructions + 0, calls + 0 }'
}

failed=0
for function in cost_pack_signs_into cost_unpack_chunks_into cost_pack_bits; do
    c=$(count "$4/cost_c.o" $function) cpp=$(count "$4/cost_cpp.o" $function)
    echo "$function: C ${c% *} instructions, ${c#* } calls; C++ ${cpp% *} instructions, ${cpp#* } calls"
    { [ "${c#* }" -gt 0 ] && [ "${cpp#* }" -eq "${c#* }" ]; } || { echo "FAILED: other calls than C's"; failed=1; }
    [ "${cpp% *}" -le $((${c% *} + allowed)) ] || { echo "FAILED: more than $allowed instructions over C"; failed=1; }
done
if nm -u "$4/cost_cpp.o" | grep -w _Znwm; then echo "FAILED: operator new is called"; failed=1; fi
exit $failed
