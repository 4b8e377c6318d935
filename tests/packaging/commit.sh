#!/bin/sh
# commit.sh DIR: tests build.rs in a crate without other code. It must name the commit of the sources, omit "-dirty"
# after the commit that has them, and cargo must build again only when one of the sources changes.
set -eu
dir=$(mkdir -p "$1" && cd "$1" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
fail() { echo "FAILED: $*" >&2; exit 1; }
command -v git > /dev/null || { echo "NOT RUN, because there is no git: the commit that a build names"; exit 0; }
unset GRADCODEC_COMMIT GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null CARGO_TARGET_DIR="$dir/target" CARGO_NET_OFFLINE=true
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@localhost GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@localhost
rm -rf "$dir/tree" "$dir/other" "$dir/copy" "$dir/target"
mkdir -p "$dir/tree/src" "$dir/tree/include" "$dir/tree/kernels"
cd "$dir/tree"
printf '[package]\nname = "tiny"\nversion = "0.1.0"\nedition = "2024"\n[workspace]\n' > Cargo.toml
printf 'fn main() { println!("{}", env!("GRADCODEC_COMMIT")) }\n' > src/main.rs
touch include/a.h kernels/a.cu README.md
cp "$root/build.rs" .

# says COMMIT built|fresh WHAT: checks the commit that a build names, and if there was something to build
says() {
    ${CARGO:-cargo} build -v > "$dir/log" 2>&1 || { cat "$dir/log"; fail "$3: cargo"; }
    if grep -q '^ *Compiling' "$dir/log"; then did=built; else did=fresh; fi
    said=$("$CARGO_TARGET_DIR/debug/tiny")
    [ "$said $did" = "$1 $2" ] || { cat "$dir/log"; fail "$3: it says $said and was $did, not $1 and $2"; }
}
commit() { git add -A && git commit -q -m "$1"; }
head() { git rev-parse --short=12 HEAD; }

says unknown built "without git"
says unknown fresh "without git, again"
git init -q -b main
git -C "$dir/tree" commit -q --allow-empty -m first
touch src/main.rs
says "$(head)-dirty" built "files that are new"
says "$(head)-dirty" fresh "the same again"
commit second
says "$(head)" built "after their commit"
says "$(head)" fresh "the same again"

# A file that is no source causes no build, and neither does its commit: the sources are those of the second commit.
second=$(head)
echo more >> README.md && git status > /dev/null
says "$second" fresh "another file"
commit third
says "$second" fresh "a commit of another file"

echo >> src/main.rs
says "$(head)-dirty" built "a change"
git add -A
says "$(head)-dirty" fresh "staged"
commit fourth
says "$(head)" built "committed"
echo >> include/a.h
says "$(head)-dirty" built "a change of a header"
git checkout -q include/a.h
says "$(head)" built "taken back"

# Build with packed branches, with a log and without one.
for log in true false; do
    git config core.logAllRefUpdates $log
    [ $log = true ] || rm -r .git/logs
    echo >> src/main.rs && git pack-refs --all
    says "$(head)-dirty" built "packed, log $log"
    says "$(head)-dirty" fresh "packed, log $log, again"
    commit packed
    says "$(head)" built "packed, log $log, committed"
done
git checkout -q --detach
echo >> src/main.rs
says "$(head)-dirty" built "no branch"
commit detached
says "$(head)" built "no branch, committed"

# git notices the new timestamp of a file, and would write it to the index.
touch src/main.rs && cp -p .git/index "$dir/index"
says "$(head)" built "a new stamp"
cmp .git/index "$dir/index" && [ ! .git/index -nt "$dir/index" ] || fail "it writes to the index"

# Set git's variables as a hook of another repository does.
git init -q "$dir/other" && git -C "$dir/other" commit -q --allow-empty -m other
touch src/main.rs
GIT_DIR=$dir/other/.git GIT_WORK_TREE=$dir/other GIT_INDEX_FILE=$dir/other/.git/index says "$(head)" built "GIT_DIR"

# Build in a worktree, whose .git is a file.
git worktree add -q -b beside "$dir/other/worktree"
cd "$dir/other/worktree"
says "$(head)" built "a worktree"
echo >> src/main.rs
says "$(head)-dirty" built "a worktree, changed"
commit beside
says "$(head)" built "a worktree, committed"
says "$(head)" fresh "a worktree, again"

# Build sources without their repository, by themselves and within another repository.
for place in "$dir/copy" "$dir/other/copy"; do
    mkdir "$place" && cp -r src include kernels build.rs Cargo.toml "$place" && cd "$place"
    says unknown built "$place"
    says unknown fresh "$place, again"
    GRADCODEC_COMMIT=v1 says v1 built "$place, said"
done
echo "ok: a build names the commit of its sources, and builds again only when they change"
