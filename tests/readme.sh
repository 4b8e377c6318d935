#!/bin/sh
# readme.sh CC PYTHON LIBRARY: the programs that README.md shows, as they stand there, print what it says they print.
set -eu
[ $# -eq 3 ] || { echo "usage: $0 CC PYTHON LIBRARY" >&2; exit 2; }
cc=$1 python=$2
library=$(cd "$(dirname "$3")" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# block LANGUAGE: the first fenced block of that language
block() {
    awk -v fence="\`\`\`$1" '$0 == "```" && inside { exit } inside { print } $0 == fence { inside = 1 }' "$root/README.md"
}

# printed LANGUAGE: the first block of text after it
printed() {
    awk -v fence="\`\`\`$1" '$0 == "```" && inside { exit } inside { print } $0 == fence { seen = 1 }
        $0 == "```text" && seen { inside = 1 }' "$root/README.md"
}

# compare LANGUAGE: with what the program printed, in $work/got
compare() {
    printed "$1" > "$work/expected"
    [ -s "$work/expected" ] || { echo "FAILED: README.md does not say what its $1 program prints" >&2; exit 1; }
    diff "$work/expected" "$work/got" || { echo "FAILED: README.md's $1 program prints something else" >&2; exit 1; }
    echo "ok $1: $(cat "$work/got")"
}

export LD_LIBRARY_PATH="$library${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

block c > "$work/pack.c"
# shellcheck disable=SC2086 # a compiler may come with options
$cc -std=c99 -Wall -Wextra -pedantic -Werror -I"$root/include" "$work/pack.c" -o "$work/pack" -L"$library" -lgradcodec
"$work/pack" > "$work/got"
compare c

block python > "$work/pack.py"
"$python" "$work/pack.py" > "$work/got"
compare python

echo "ok: the README's programs run"
