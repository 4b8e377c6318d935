#!/bin/sh
# run.sh LIBRARY_DIR VENV CC: tests Rust bindings that bindgen makes from the header, with the library in LIBRARY_DIR.
# bindgen loads the libclang in LIBCLANG_PATH, or PyPI's in VENV.
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
    # PyPI's package lacks the compiler's own headers, such as stddef.h.
    BINDGEN_EXTRA_CLANG_ARGS="-isystem $($cc -print-file-name=include) ${BINDGEN_EXTRA_CLANG_ARGS:-}"
    export LIBCLANG_PATH BINDGEN_EXTRA_CLANG_ARGS
fi
# The first is for the linker, the second for the program.
export LIBRARY_PATH="$library" LD_LIBRARY_PATH="$library"
cargo run --quiet --locked --manifest-path tests/bindgen/Cargo.toml --target-dir target/bindgen
