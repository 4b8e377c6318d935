#!/usr/bin/env bash
# parts.sh JOBS TARGET...: makes parts of the tests, JOBS of them in parallel. A line marks a part's start, another its
# end with its seconds; its output follows. The last lines list what was not run, what failed and how many passed.
set -uo pipefail
cd "$(dirname "$0")/.."
jobs=$1
shift
log=build/tests/parts.log
mkdir -p build/tests
# Removes the jobs of a `make -j` that has called this script: the tests have their own number of jobs.
MAKEFLAGS=$(sed -E 's/(^| )-j[0-9]*//; s/ ?--jobserver-[a-z]+=[^ ]*//' <<<"${MAKEFLAGS:-}")
export MAKEFLAGS

echo "$# parts of the tests, $jobs side by side: $*"
# Makes the library first, so that cargo's progress is shown. If this fails, the parts fail and are listed.
${MAKE:-make} --no-print-directory test-library || :
# $(begin) in the Makefile prints the start to descriptor 3 at once. It prints "== part NAME" with the part's own
# output, which make holds back until the part has ended.
ended() {
    local line begin=build/tests/parts.begin.
    while IFS= read -r line; do
        if [[ $line == "== part "* ]]; then
            line=${line#== part }
            echo "end: $line, $(($(date +%s) - $(cat "$begin$line" 2>/dev/null || date +%s))) s"
        else
            printf '%s\n' "$line"
        fi
    done
}
export PARTS_FD=3
{ ${MAKE:-make} --no-print-directory --keep-going --output-sync=target -j"$jobs" "$@" 2>&1 | ended; } 3>&1 | tee "$log"

# make lists failed targets first, then the targets that it did not start for that reason.
failed=$(sed -nE "s/^make(\[[0-9]+\])?: \*\*\* \[([^]]*: )?([^] ]+)\].*/\3/p
    s/^make.*No rule to make target [\`']([^']*)'.*/\1/p" "$log" |
    sort -u)
not_begun=$(sed -nE "s/^make.*Target [\`']([^']*)' not remade because of errors.*/\1/p" "$log" | grep -vxF "$failed")
notes=$(grep -E 'NOT RUN, because|^SKIPPED[: ][^[]' "$log" | sort -u)
[ -z "$notes" ] || echo "$notes"
[ -z "$failed" ] || sed 's/^/FAILED: /' <<<"$failed"
[ -z "$not_begun" ] || sed 's/^/NOT RUN, because something that it needs has FAILED: /' <<<"$not_begun"
lost=$(printf '%s\n%s\n' "$failed" "$not_begun" | grep -cFx "$(printf '%s\n' "$@")")
echo "$SECONDS s: $(($# - lost)) passed, $lost failed, $(grep -c . <<<"$notes") not run"
[ -z "$failed$not_begun" ]
