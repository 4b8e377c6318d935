#!/bin/sh
# symbols.sh LIBRARY LIST [RELEASE]: checks the library's exports, dependencies and marks. RELEASE: the unstripped
# library of cargo's profile release, in which instructions must be inlined.
set -eu
library=$1 list=$2
names=$(sed -n 's/^FUNCTION(\([^,]*\),.*/\1/p' "$list" | sort)
failed=0
check() { # what, expected, got
    if [ "$2" = "$3" ]; then
        echo "ok $1"
    else
        echo "FAILED $1: expected"; echo "$2"; echo "got"; echo "$3"; failed=1
    fi
}

check "exports only what $list names" "$names" "$(nm -D --defined-only "$library" | awk '{ print $3 }' | sort)"
check "all names begin with gc_" "" "$(echo "$names" | grep -v '^gc_' || true)"
dynamic=$(readelf -d "$library")
check "SONAME" "libgradcodec.so.0" "$(echo "$dynamic" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')"
check "marked NODELETE" "1" "$(echo "$dynamic" | grep -c 'FLAGS_1.*NODELETE')"
# Allowed: the C library, the compiler's runtime and the loader. Not allowed: CUDA, Python or a framework.
check "needs nothing else" "" \
    "$(echo "$dynamic" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -vE '^(libc|libm|libdl|libpthread|libgcc_s|ld-linux.*)\.so' || true)"
# An intrinsic that is not inlined was called by a function without its instructions: correct, but slow.
[ -z "${3:-}" ] || check "instructions are inlined" "" "$(nm "$3" | grep core_arch | grep -v _xgetbv || true)"
exit $failed
