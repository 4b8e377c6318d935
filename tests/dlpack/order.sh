#!/bin/sh
# Compiles our headers and real dlpack.h files in one unit, in either order and in every language. Compares the names in
# gradcodec/dlpack.h with the real 1.3.
# Usage: order.sh CC CXX INCLUDE_DIR HEADERS_DIR      (fetch.sh fills HEADERS_DIR)
set -u
[ $# -eq 4 ] || { echo "usage: $0 CC CXX INCLUDE_DIR HEADERS_DIR" >&2; exit 2; }
cc=$1 cxx=$2 include=$3 headers=$4
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

# count STATUS WHAT: counts a result, and prints the log of a failure
count() {
    if [ "$1" -eq 0 ]; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "FAILED $2"
    sed 's/^/    /' "$work/log"
}

# everywhere WHAT REAL UNIT: compiles UNIT in every language; REAL is the folder with a real dlpack.h, or empty.
# -isystem hides a real header's own pedantic warnings.
everywhere() {
    before=$failed
    for std in c99 c11 c17 c++11 c++14 c++17 c++20; do
        case $std in c++*) compiler=$cxx language=c++ ;; *) compiler=$cc language=c ;; esac
        $compiler -x $language -std=$std -Wall -Wextra -pedantic -Werror -fsyntax-only \
            -I "$include" -I "$here" -I "$here/../abi" ${2:+-isystem "$2"} "$3" >"$work/log" 2>&1
        count $? "$1, $std"
    done
    [ "$failed" -ne "$before" ] || echo "ok $1"
}

# unit INCLUDE...: prints a file that includes the headers in this order and then checks the result
unit() {
    for file in "$@"; do echo "#include <$file>"; done
    echo '#include "layout.h"'
    case " $* " in *" gradcodec.h "*) echo '#include "functions.h"' ;; esac
}

for ours in gradcodec/dlpack.h gradcodec.h gradcodec/loader.h; do
    unit $ours >"$work/unit"
    everywhere "$ours alone" "" "$work/unit"
    unit $ours $ours >"$work/unit"
    everywhere "$ours twice" "" "$work/unit"
    for real in "$headers"/*; do
        name=$(basename "$real")
        unit dlpack/dlpack.h $ours >"$work/unit"
        everywhere "$name, then $ours" "$real" "$work/unit"
        unit $ours dlpack/dlpack.h >"$work/unit"
        everywhere "$ours, then $name" "$real" "$work/unit"
    done
done

# Compares our header with the newest real one: same macros and constants. layout.h checks the values.
macros() { $cc -dM -E -x c "$1" | grep -o '\bDLPACK_[A-Z_]*' | sort -u; }
constants() { $cc -E -P -x c "$1" | grep -o '\bkDL[A-Za-z0-9_]*' | sort -u; }
compared=0
for real in "$headers"/*/dlpack/dlpack.h; do
    grep -q 'DLPACK_MAJOR_VERSION 1$' "$real" && grep -q 'DLPACK_MINOR_VERSION 3$' "$real" || continue
    compared=1
    for header in "$include/gradcodec/dlpack.h" "$real"; do macros "$header"; constants "$header"; done | sort | uniq -u >"$work/log"
    [ ! -s "$work/log" ]
    count $? "$(basename "${real%/dlpack/dlpack.h}"): these are in one header only"
done
: >"$work/log"
[ $compared -eq 1 ]
count $? "no DLPack 1.3 under $headers to compare with"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
