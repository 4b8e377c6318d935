#!/bin/sh
# run.sh LIBRARY_DIR VENV CC: Rust bindings of the header, made by bindgen, against the library that is in LIBRARY_DIR.
# bindgen loads libclang: the one that LIBCLANG_PATH names, or PyPI's, in VENV.
set -eu
[ $# -eq 3 ] || { echo "usage: $0 LIBRARY_DIR VENV CC" >&2; exit 2; }
library=$(cd "$1" && pwd) venv=$2 cc=$3
cd "$(dirname "$0")/../.."

if [ -z "${LIBCLANG_PATH:-}" ]; then
    if [ ! -e "$venv/ready" ] || [ tests/bindgen/requirements.txt -nt "$venv/ready" ]; then
        python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            -c tests/constraints.txt -r tests/bindgen/requirements.txt && touch "$venv/ready" ||
            { echo "NOT RUN, because LIBCLANG_PATH names no libclang, and pip gets none: bindgen"; exit 0; }
    fi
    LIBCLANG_PATH=$(echo "$PWD/$venv"/lib/python3*/site-packages/clang/native)
    # It comes without the compiler's own headers: stddef.h and the like.
    BINDGEN_EXTRA_CLANG_ARGS="-isystem $($cc -print-file-name=include) ${BINDGEN_EXTRA_CLANG_ARGS:-}"
    export LIBCLANG_PATH BINDGEN_EXTRA_CLANG_ARGS
fi
# For the linker, and for the program.
export LIBRARY_PATH="$library" LD_LIBRARY_PATH="$library"
cargo run --quiet --locked --manifest-path tests/bindgen/Cargo.toml --target-dir target/bindgen
