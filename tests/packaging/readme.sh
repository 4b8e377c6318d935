#!/bin/sh
# readme.sh CC LIBRARY_DIR: the commands and the programs of README.md, as they stand there, print what it says they print:
# after an install to $HOME/.local, and after one to /usr/local; the program at the top of gradcodec.h runs, too.
# The PATH has the python3 with NumPy. `make` installs the library in LIBRARY_DIR: none is built.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 CC LIBRARY_DIR" >&2; exit 2; }
cc=$1 library=$(cd "$2" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# block LANGUAGE [N]: the N-th fenced block of that language
block() {
    awk -v fence="\`\`\`$1" -v wanted="${2:-1}" '$0 == "```" { inside = 0 } inside { print }
        $0 == fence { inside = ++seen == wanted }' "$root/README.md"
}

# The folder that the commands want to be in: the repository, with the two programs saved there.
mkdir "$work/tree" "$work/home" "$work/bin"
ln -s "$root"/* "$work/tree"
block c 2 > "$work/tree/pack.c"
# The block that is indented after "Start here:".
sed -n '/^ \* Start here:$/,/^ \* Compile it/s/^ \*     //p' "$root/include/gradcodec.h" > "$work/tree/program.c"
block python 2 > "$work/tree/pack.py" # the first is for PyTorch: tests/frameworks/python/test_torch_compress.py

[ "$(grep -c '^```sh$' "$root/README.md")" -eq 5 ] ||
    { echo "FAILED: README.md has other commands than these five" >&2; exit 1; }
block sh 1 > "$work/install_home"
block sh 2 > "$work/install_usr_local"
block sh 3 > "$work/c_home"
block sh 4 > "$work/c_usr_local"
block sh 5 > "$work/python"
block text 1 > "$work/c_printed"
block text 2 > "$work/python_printed"

# In the namespace of private.sh everybody is root.
printf '#!/bin/sh\nexec "$@"\n' > "$work/bin/sudo"
chmod +x "$work/bin/sudo"

# all.sh INSTALL C [COMMAND]: these commands, with no more of an environment than a newcomer has
cat > "$work/all.sh" <<'END'
set -eu
work=$(dirname "$0")
cd "$work/tree"
sh -eu "../$1" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
check() { # COMMANDS PRINTED
    sh -eu "../$1" > "$work/got"
    [ -s "$work/$2" ] && diff "$work/$2" "$work/got" || { echo "FAILED: README.md's $1 prints something else" >&2; exit 1; }
    echo "ok $1: $(head -n 1 "$work/got")"
}
check "$2" c_printed
check python python_printed
[ -z "${3:-}" ] || sh -euc "$3"
END
unset LD_LIBRARY_PATH PKG_CONFIG_PATH GRADCODEC_LIBRARY MAKEFLAGS MFLAGS
export HOME="$work/home" MAKEFLAGS="LIB=$library" PYTHONDONTWRITEBYTECODE=1
# What stands in README.md and gradcodec.h between backticks.
sh "$work/all.sh" install_home c_home '
    export PKG_CONFIG_PATH=$HOME/.local/lib/pkgconfig
    cc program.c $(pkg-config --cflags --libs gradcodec) -Wl,-rpath,$(pkg-config --variable=libdir gradcodec)
    ./a.out > ../start_printed
    make uninstall PREFIX=$HOME/.local > ../log'
[ -z "$(find "$work/home" ! -type d)" ] || { echo "FAILED: make uninstall leaves files" >&2; exit 1; }
PATH="$work/bin:$PATH" sh "$root/tests/packaging/private.sh" "$work/private" sh "$work/all.sh" install_usr_local c_usr_local \
    > "$work/usr_local" || { cat "$work/usr_local"; exit 1; }
cat "$work/usr_local"
without=
! grep -q '^NOT RUN' "$work/usr_local" || without=", but for the installation to /usr/local, which was NOT RUN"

# compile NAME: $work/NAME.c, with warnings
compile() {
    # shellcheck disable=SC2086 # a compiler may come with options
    $cc -std=c99 -Wall -Wextra -pedantic -Werror -I"$root/include" "$work/$1.c" -o "$work/$1" -L"$library" \
        -lgradcodec -pthread
}
cp "$work/tree/pack.c" "$work/"
compile pack

# The functions of the first screen, on two ranks that have 1 and 3.
{ block c 1; cat <<'END'
#include <pthread.h>
#include <stdio.h>
static gc_comm_t *comms[2];
static float gradients[2][1000];
static void *train(void *rank)
{
    float *gradient = rank ? gradients[1] : gradients[0];
    gc_allreduce_t *allreduce;
    for (int i = 0; i < 1000; i++)
        gradient[i] = rank ? 3 : 1;
    if (begin(comms[rank ? 1 : 0], 1000, &allreduce) || average(allreduce, gradient, 1000))
        fprintf(stderr, "%s\n", gc_last_error());
    gc_allreduce_free(allreduce);
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

block c 3 > "$work/codec.c"
block text 3 > "$work/codec_printed"
compile codec
LD_LIBRARY_PATH="$library" "$work/codec" > "$work/got"
[ -s "$work/codec_printed" ] && diff "$work/codec_printed" "$work/got" ||
    { echo "FAILED: README.md's codec prints something else" >&2; exit 1; }
echo "ok codec: $(head -n 1 "$work/got")"

block python 3 > "$work/codec.py"
GRADCODEC_LIBRARY="$library/libgradcodec.so.0" PYTHONPATH="$root/python" python3 "$work/codec.py" > "$work/got"
[ -s "$work/got" ] && diff "$work/codec_printed" "$work/got" ||
    { echo "FAILED: README.md's codec in Python prints something else" >&2; exit 1; }
echo "ok codec in Python: $(head -n 1 "$work/got")"

mv "$work/tree/program.c" "$work/"
compile program
LD_LIBRARY_PATH="$library" "$work/program" | diff "$work/start_printed" - && mv "$work/start_printed" "$work/got"
printf '4000 bytes in 208: 0.395285, -0.395285\n4000 bytes in 208: 0.433962, -0.433962\n' | diff - "$work/got" ||
    { echo "FAILED: the program at the top of gradcodec.h printed:" >&2; cat "$work/got" >&2; exit 1; }
echo "ok header: $(head -n 1 "$work/got")"

# The figures on the first screen are those of the tables.
python3 "$root/bench/figures.py" --check
echo "ok numbers"

# `make help` lists every target that has a comment, and those that README.md names.
make --no-print-directory -C "$root" help > "$work/help"
[ "$(grep -c '^  ' "$work/help")" -eq "$(grep -c '^## ' "$root/Makefile")" ]
for target in $(grep -o '`make [a-z0-9-]*' "$root/README.md" | cut -d' ' -f2 | sort -u); do
    grep -q "^  $target " "$work/help" || { echo "FAILED: README.md names make $target, make help does not" >&2; exit 1; }
done
echo "ok: the commands and programs of README.md and gradcodec.h run$without"
