#!/usr/bin/env bash
# sanitize.sh [PYTHON]: runs all kernels under compute-sanitizer's memcheck and racecheck. Before, a program with a
# defect for each must be found: a run that finds nothing is no proof.
#
# GRADCODEC_LIBRARY names the library; default: lib/libgradcodec.so.0. Prints a line if the GPU or the tool is missing.
set -uo pipefail
cd "$(dirname "$0")/../.."

python=${1:-python3}
export GRADCODEC_LIBRARY=${GRADCODEC_LIBRARY:-$PWD/lib/libgradcodec.so.0}
program=tests/spec/sanitize.py
log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=0 failed=0

if ! (cd tests/spec && "$python" -c 'import driver, sys; sys.exit(not driver.device_count())'); then
    echo "SKIPPED compute-sanitizer: no CUDA device"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
for tool in "$(command -v compute-sanitizer)" /usr/local/cuda/bin/compute-sanitizer; do
    [ -x "$tool" ] && break
done
if ! [ -x "$tool" ]; then
    echo "FAILED  compute-sanitizer is not installed"
    exit 1
fi

# run TOOL WHAT: checks everything that the program does, its children too
run() {
    "$tool" --tool "$1" --error-exitcode 9 --target-processes all --print-limit 5 "$python" "$program" $2 >"$log" 2>&1
}

verdict() { # WORD NAME
    if [ "$1" = ok ]; then
        echo "ok      $2"
        passed=$((passed + 1))
    else
        echo "FAILED  $2"
        tail -n 60 "$log"
        failed=$((failed + 1))
    fi
}

finds() { # TOOL WHAT WORDS: checks that the run fails with these words
    run "$1" "$2"
    if [ $? = 9 ] && grep -q "$3" "$log"; then verdict ok "$1 finds $2"; else verdict bad "$1 finds $2"; fi
}

clean() { # TOOL: checks that the run succeeds, to its end, and that nothing is found
    run "$1" everything
    if [ $? = 0 ] && grep -q '^done$' "$log" &&
        grep -Eq 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards' "$log"; then
        verdict ok "$1"
    else
        verdict bad "$1"
    fi
}

finds memcheck wild "Invalid __global__ read"
finds racecheck race "Race reported\|Potential .* hazard"
clean memcheck
clean racecheck
echo "$passed passed, $failed failed"
exit $((failed > 0))
