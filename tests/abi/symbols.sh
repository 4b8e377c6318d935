#!/bin/sh
# symbols.sh LIBRARY LIST [RELEASE]: what the library exports, needs and is marked with. RELEASE: the library of cargo's
# profile release with its symbols, in which instructions must be inlined.
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
# The C library, the compiler's own and the loader: nothing of CUDA, Python or a framework.
check "needs nothing else" "" \
    "$(echo "$dynamic" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -vE '^(libc|libm|libdl|libpthread|libgcc_s|ld-linux.*)\.so' || true)"
# An intrinsic that is a function of its own is called from one without its instructions: slow, though right.
[ -z "${3:-}" ] || check "instructions are inlined" "" "$(nm "$3" | grep core_arch | grep -v _xgetbv || true)"
exit $failed
