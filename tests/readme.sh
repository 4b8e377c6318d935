#!/bin/sh
# readme.sh CC PYTHON LIBRARY: the programs that README.md shows, as they stand there, print what it says they print;
# and the one at the top of gradcodec.h compiles and runs.
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

# compile NAME: $work/NAME.c, as a newcomer would but for the warnings
compile() {
    # shellcheck disable=SC2086 # a compiler may come with options
    $cc -std=c99 -Wall -Wextra -pedantic -Werror -I"$root/include" "$work/$1.c" -o "$work/$1" -L"$library" -lgradcodec
}

export LD_LIBRARY_PATH="$library${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

block c > "$work/pack.c"
compile pack
"$work/pack" > "$work/got"
compare c

block python > "$work/pack.py"
"$python" "$work/pack.py" > "$work/got"
compare python

# The block that is indented after "Start here:".
sed -n '/^ \* Start here:$/,/^ \* Compile it/s/^ \*     //p' "$root/include/gradcodec.h" > "$work/start.c"
compile start
"$work/start" > "$work/got"
[ "$(wc -l < "$work/got")" -eq 4 ] && [ "$(head -n 1 "$work/got")" = "chunk 0: 32 bytes, the first is 0xa0" ] ||
    { echo "FAILED: the program at the top of gradcodec.h printed:" >&2; cat "$work/got" >&2; exit 1; }
echo "ok header: $(head -n 1 "$work/got")"

echo "ok: the programs of README.md and gradcodec.h run"
