#!/bin/sh
# readme.sh CC LIBRARY_DIR: runs the commands and the C code of README.md, the commands of docs/INSTALL.md and the
# program at the top of gradcodec.h, and compares their output with these pages. Installs the library in LIBRARY_DIR to
# $HOME/.local and to /usr/local, and builds none.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 CC LIBRARY_DIR" >&2; exit 2; }
cc=$1 library=$(cd "$2" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# block PAGE LANGUAGE [N]: prints the N-th fenced block of that language
block() {
    awk -v fence="\`\`\`$2" -v wanted="${3:-1}" '$0 == "```" { inside = 0 } inside { print }
        $0 == fence { inside = ++seen == wanted }' "$root/$1"
}

# Make the folder that the commands expect: the repository, with the program at the top of the header saved there.
mkdir "$work/tree" "$work/home" "$work/bin"
ln -s "$root"/* "$work/tree"
# Extract the block that is indented after "Start here:".
sed -n '/^ \* Start here:$/,/^ \* It prints/s/^ \*     //p' "$root/include/gradcodec.h" > "$work/tree/program.c"
sed -n 's/^ \* It prints `\(.*\)`\.$/\1/p' "$root/include/gradcodec.h" > "$work/printed"
[ -s "$work/printed" ] || { echo "FAILED: gradcodec.h does not say what its program prints" >&2; exit 1; }

# count PAGE N: checks that the page has N blocks of commands, each of which is run below
count() {
    [ "$(grep -c '^```sh$' "$root/$1")" -eq "$2" ] || { echo "FAILED: $1 has not $2 blocks of commands" >&2; exit 1; }
}
count README.md 2
block README.md text > "$work/result"
count docs/INSTALL.md 4
block README.md sh 2 > "$work/install_home"
block docs/INSTALL.md sh 1 | diff "$work/install_home" - || { echo "FAILED: INSTALL.md installs otherwise" >&2; exit 1; }
block docs/INSTALL.md sh 2 > "$work/install_usr_local"
block docs/INSTALL.md sh 3 > "$work/c_home"
block docs/INSTALL.md sh 4 > "$work/c_usr_local"
block docs/INSTALL.md text | diff "$work/printed" - || { echo "FAILED: INSTALL.md prints something else" >&2; exit 1; }

# In the namespace of private.sh every user is root.
printf '#!/bin/sh\nexec "$@"\n' > "$work/bin/sudo"
chmod +x "$work/bin/sudo"

# all.sh INSTALL C [COMMAND]: runs these commands, with no more of an environment than a newcomer has
cat > "$work/all.sh" <<'END'
set -eu
work=$(dirname "$0")
cd "$work/tree"
sh -eu "../$1" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
sh -eu "../$2" > "$work/got"
diff "$work/printed" "$work/got" || { echo "FAILED: INSTALL.md's $2 prints something else" >&2; exit 1; }
echo "ok $2: $(cat "$work/got")"
[ -z "${3:-}" ] || sh -euc "$3"
END
unset LD_LIBRARY_PATH PKG_CONFIG_PATH GRADCODEC_LIBRARY MAKEFLAGS MFLAGS
export HOME="$work/home" MAKEFLAGS="LIB=$library"
# Run the commands that INSTALL.md and gradcodec.h have between backticks.
sh "$work/all.sh" install_home c_home '
    export PKG_CONFIG_PATH=$HOME/.local/lib/pkgconfig
    cc program.c -pthread $(pkg-config --cflags --libs gradcodec) -Wl,-rpath,$(pkg-config --variable=libdir gradcodec)
    ./a.out | diff ../printed -
    make uninstall PREFIX=$HOME/.local > ../log'
[ -z "$(find "$work/home" ! -type d)" ] || { echo "FAILED: make uninstall leaves files" >&2; exit 1; }
PATH="$work/bin:$PATH" sh "$root/tests/packaging/private.sh" "$work/private" sh "$work/all.sh" install_usr_local c_usr_local \
    > "$work/usr_local" || { cat "$work/usr_local"; exit 1; }
cat "$work/usr_local"
without=
! grep -q '^NOT RUN' "$work/usr_local" || without=", but for the installation to /usr/local, which was NOT RUN"

# compile NAME: compiles $work/NAME.c, with warnings
compile() {
    # shellcheck disable=SC2086 # a compiler may come with options
    $cc -std=c99 -Wall -Wextra -pedantic -Werror -I"$root/include" "$work/$1.c" -o "$work/$1" -L"$library" \
        -lgradcodec -lm -pthread
}
mv "$work/tree/program.c" "$work/"
compile program

# Run README.md's C code on two ranks, whose values are 1 and 3.
{ printf '#include <gradcodec.h>\n#include <stdio.h>\nstatic void average(gc_comm_t *comm, float *gradient, int64_t n)\n{\n'
block README.md c; cat <<'END'
}
#include <pthread.h>
static gc_comm_t *comms[2];
static float gradients[2][1000];
static void *train(void *rank)
{
    float *gradient = rank ? gradients[1] : gradients[0];
    for (int i = 0; i < 1000; i++)
        gradient[i] = rank ? 3 : 1;
    average(comms[rank ? 1 : 0], gradient, 1000);
    return NULL;
}
int main(void)
{
    pthread_t other;
    int near = 0;
    if (gc_comm_group(2, comms) || pthread_create(&other, NULL, train, comms))
        return 1;
    train(NULL);
    pthread_join(other, NULL);
    for (int i = 0; i < 1000; i++)
        near += gradients[0][i] == gradients[1][i] && gradients[0][i] > 1.97f && gradients[0][i] < 2.03f;
    printf("%d means of 1000\n", near);
    gc_comm_free(comms[0]);
    gc_comm_free(comms[1]);
}
END
} > "$work/average.c"
compile average
LD_LIBRARY_PATH="$library" "$work/average" > "$work/got"
[ "$(cat "$work/got")" = "1000 means of 1000" ] ||
    { echo "FAILED: README.md's all-reduce gives $(cat "$work/got")" >&2; exit 1; }
echo "ok all-reduce: $(cat "$work/got")"

# CI runs README.md's two commands. Check here that `make demo` ends with the line of README.md (other C libraries may
# round differently), and `make test` with a line of that form.
[ "$(block README.md sh 1)" = "$(printf 'make demo\nmake test')" ] ||
    { echo "FAILED: README.md begins with other commands than make demo and make test" >&2; exit 1; }
cp "$root/examples_c/digits.c" "$work/digits.c"
compile digits
LD_LIBRARY_PATH="$library" "$work/digits" "$root/examples_c/data/digits.bin" | tail -n 1 | diff - "$work/result" ||
    { echo "FAILED: make demo ends with another line than README.md says" >&2; exit 1; }
# shellcheck disable=SC2016 # variables of parts.sh
grep -qF 'echo "$SECONDS s: $(($# - lost)) passed, $lost failed, $(grep -c . <<<"$notes") not run"' "$root/tests/parts.sh" &&
    grep -qF '`<seconds> s: <n> passed, 0 failed, <n> not run`' "$root/README.md" ||
    { echo "FAILED: make test ends with another line than README.md says" >&2; exit 1; }
echo "ok make demo: $(cat "$work/result")"

# `make help` must list every target that has a comment, and the targets that README.md names.
make --no-print-directory -C "$root" help > "$work/help"
[ "$(grep -c '^  ' "$work/help")" -eq "$(grep -c '^## ' "$root/Makefile")" ]
for page in README.md docs/INSTALL.md; do
    for target in $(grep -o '`make [a-z0-9-]*' "$root/$page" | cut -d' ' -f2 | sort -u); do
        grep -q "^  $target " "$work/help" || { echo "FAILED: $page names make $target, make help does not" >&2; exit 1; }
    done
done
echo "ok: the commands and programs of README.md, INSTALL.md and gradcodec.h run$without"
