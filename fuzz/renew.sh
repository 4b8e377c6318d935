#!/usr/bin/env bash
# renew.sh TARGET...: packs into corpus/TARGET.tar.xz few inputs that cover all edges of the archive's inputs and of
# those that run.sh has found. The same inputs give the same archive to the byte.
set -euo pipefail
cd "$(dirname "$0")"

export RUSTC_BOOTSTRAP=1
for target; do
    folder=../build/fuzz/$target
    rm -rf "$folder/merged" && mkdir -p "$folder/merged"
    cargo fuzz run "$target" "$folder/merged" "$folder/corpus" "$folder/found" -- -set_cover_merge=1 -use_counters=0
    tar --create --sort=name --format=gnu --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
        --directory "$folder/merged" . | xz -9e --threads=1 >"corpus/$target.tar.xz"
    echo "$target: $(ls "$folder/merged" | wc -l) inputs, $(stat -c %s "corpus/$target.tar.xz") bytes"
done
