#!/bin/sh
# man.sh PAGE: checks the installed manual page. It has the functions of tests/abi/functions.h and no others, and the
# library's variables; groff and mandoc find no fault.
set -eu
page=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: the manual page: $*" >&2; exit 1; }

sed -n 's/^FUNCTION(\(gc_[a-z0-9_]*\),.*/\1/p' "$root/tests/abi/functions.h" | sort > "$work/listed"
sed -n 's/^\.B \(gc_[a-z0-9_]*\)$/\1/p' "$page" | sort > "$work/named"
[ -s "$work/named" ] && diff "$work/listed" "$work/named" || fail "these functions"
sed -n '/^## The library/,/^## The Python/s/^| `\([A-Z_]*\)`.*/\1/p' "$root/docs/ENVIRONMENT.md" > "$work/listed"
sed -n 's/^\.B \([A-Z_]*\)$/\1/p' "$page" > "$work/named"
[ -s "$work/named" ] && diff "$work/listed" "$work/named" || fail "these variables"
# Markdown syntax that roff does not have.
! grep '`\|^|\|likewise' "$page" || fail "these lines"

ran=
if command -v groff > /dev/null; then
    groff -ww -man -Tascii "$page" > "$work/text" 2> "$work/log" || fail "groff: $(cat "$work/log")"
    [ ! -s "$work/log" ] || fail "groff: $(cat "$work/log")"
    grep -q gc_pack_chunks "$work/text" || fail "groff shows no gc_pack_chunks"
    ran="$ran groff"
fi
if command -v mandoc > /dev/null; then
    # Before its release a version has no date.
    mandoc -T lint -W warning "$page" > "$work/log" || true
    ! grep -v 'missing date' "$work/log" || fail "mandoc"
    ran="$ran mandoc"
fi
echo "ok: the manual page has all functions and variables"
[ -z "$ran" ] || echo "ok: it is read by$ran without a fault"
[ -n "$ran" ] || echo "NOT RUN, because there is neither groff nor mandoc: the page as it is shown"
