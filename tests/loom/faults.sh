#!/usr/bin/env bash
# faults.sh: the models of this folder on copies of src/backend/cpu/pool/job.rs with one fault each, which they must find: a
# model that sees nothing is no proof. Works in build/loom.
set -euo pipefail
cd "$(dirname "$0")/../.."

# Cargo does not tell the copy from the original by its path: the original has another folder.
export CARGO_TARGET_DIR=$PWD/target/loom_faults RUST_BACKTRACE=0

copy=$PWD/build/loom
file=src/backend/cpu/pool/job.rs
rm -rf "$copy"
mkdir -p "$copy/tests" "$copy/$(dirname $file)"
cp -r tests/loom "$copy/tests/"

# fault NAME SED_SCRIPT: a name says what the copy does wrong
fault() {
    local log=$copy/log
    sed -E "$2" $file >"$copy/$file"
    ! cmp -s $file "$copy/$file" || { echo "FAILED: \"$1\" changes nothing"; exit 1; }
    cargo test --quiet --locked --manifest-path "$copy/tests/loom/Cargo.toml" --no-run 2>"$log" ||
        { cat "$log"; echo "FAILED: \"$1\" does not compile"; exit 1; }
    if timeout 300 cargo test --quiet --locked --manifest-path "$copy/tests/loom/Cargo.toml" >"$log" 2>&1; then
        echo "FAILED: \"$1\" is not found"
        exit 1
    fi
    local panic
    panic=$(grep -m 1 -A 1 "^thread .* panicked" "$log" | tail -n 1) || panic=$(tail -n 1 "$log") # or a crash
    echo "found: $1: $panic"
}

swap='pool\.tickets\.swap.*'
fault "tickets before the job" "/pool\.job\.store/{h;d}; /$swap/{G}"
fault "tickets before the count of parts" "/pool\.left\.store/{h;d}; /$swap/{G}"
fault "tickets that publish nothing" "/$swap/s/Release/Relaxed/"
fault "a ticket that is looked at, and taken in a second step" \
    's/(self\.tickets\.)fetch_add(\(1, Ordering::Acquire\);)/\1load(Ordering::Acquire); \1fetch_add\2/'
fault "a ticket that nobody checks" 's/index >= parts/parts == 0/'
fault "a part that is done, but its writes not seen" '/left\.fetch_sub/s/AcqRel/Relaxed/'
fault "a caller that does not wait" 's/0 => break,/_ => break,/; /left => pool\.left\.sleep/d'
fault "a caller that nobody wakes" '/self\.left\.wake\(1\)/d'
fault "threads that nobody wakes" '/pool\.bell\.wake\(others\)/d'
fault "a bell that does not ring" '/pool\.bell\.fetch_add/d'
fault "a failure that is lost" 's/first\.get_or_insert\(failure\);/drop((failure, \&mut first));/'
fault "a refused caller who gives the threads back" 's/\.then\(\|\| Taken\(self\)\)/.then_some(Taken(self))/'
fault "a child that keeps its parent's tickets" '/self\.tickets\.store\(0/d'
fault "a child whose threads are taken" '/self\.taken\.store\(false, Ordering::Relaxed\)/d'
