#!/bin/sh
# test_wheel.sh WHEEL: auditwheel must confirm the wheel's name, and twine its text, whose links must work on PyPI. All
# Python examples that need no framework must run in an environment with only the wheel, NumPy and cffi
# (build/package/venv). C programs must build with gradcodec-config, pkg-config and, if installed, CMake.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
wheel=$(realpath "$1")
venv=$root/build/package/venv
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "FAILED: $*" >&2
    exit 1
}
unset GRADCODEC_LIBRARY GRADCODEC_INCLUDE LD_LIBRARY_PATH PYTHONPATH PKG_CONFIG_PATH
export PYTHONDONTWRITEBYTECODE=1 GRADCODEC_CACHE=0

build/package-venv/bin/auditwheel show "$wheel" > "$work/audit" || fail "auditwheel: $(cat "$work/audit")"
tr '\n' ' ' < "$work/audit" | grep -q 'following platform tag: "manylinux_2_17_x86_64"' ||
    fail "auditwheel says: $(cat "$work/audit")"
echo "ok auditwheel: manylinux_2_17"
build/package-venv/bin/twine check --strict "$wheel" > "$work/twine" || fail "twine: $(cat "$work/twine")"
# Renders the text as PyPI shows it, without our other files.
build/package-venv/bin/python - "$wheel" <<'END' || fail "the text for PyPI"
import email, re, sys, zipfile
from readme_renderer import markdown
wheel = zipfile.ZipFile(sys.argv[1])
(name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
page = markdown.render(email.message_from_bytes(wheel.read(name)).get_payload(decode=True).decode())
links = re.findall(r'(?:href|src)="(.*?)"', page)
there = {"#" + place for place in re.findall(r'id="(.*?)"', page)}
lost = [link for link in links if not link.startswith(("https://", "http://")) and link not in there]
assert links and not lost, f"these links lead nowhere on PyPI: {lost}"
print(f"ok twine: PyPI can show the wheel's text, and its {len(links)} links lead somewhere")
END

rm -rf "$venv"
python3 -m venv "$venv"
pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check"
$pip -c tests/constraints.txt numpy cffi pkgconf
$pip --no-deps "$wheel"
python=$venv/bin/python

# Copies the examples unchanged, except those that compile a program of this tree or need an MPI.
mkdir "$work/examples"
for example in examples/python/*.py; do
    grep -qE '^(import torch_ops|from this_tree|from mpi4py|"""Finds)' "$example" || cp "$example" "$work/examples"
done
package=$("$python" -c 'import gradcodec, os; print(os.path.dirname(gradcodec.__file__))')
for module in python/gradcodec/*; do [ -d "$module" ] || cmp "$module" "$package/${module##*/}"; done
# Two examples read files from folders that must be named.
export GRADCODEC_INCLUDE="$package/include"
cd "$work"
"$python" -c '
import gradcodec
library = gradcodec.GradCodec()
mapped = [line.split()[-1] for line in open("/proc/self/maps") if "libgradcodec" in line]
assert set(mapped) == {gradcodec.__path__[0] + "/lib/libgradcodec.so.0"}, mapped
print("ok GradCodec() has the library of the wheel; it says:\n" + library.build_info())
'
for example in examples/*.py; do
    library=
    # cffi_bits.py loads the library itself and needs its path.
    [ "$example" != examples/cffi_bits.py ] || library=$package/lib/libgradcodec.so.0
    env ${library:+"GRADCODEC_LIBRARY=$library"} "$python" "$example" > log 2>&1 || fail "$example: $(cat log)"
    echo "ok ${example#*/}: $(tail -n 1 log)"
done

if [ -x "$root/build/venv-peers/bin/python" ]; then
    sh "$root/bench/first_step.sh" "$wheel" "$root/build/venv-peers/bin/python" > log || fail "first step: $(cat log)"
    echo "ok PyTorch: $(tail -n 1 log)"
else
    echo "NOT RUN, because there is no PyTorch (make peers): bench/first_step.sh"
fi

PATH=$venv/bin:$PATH
cp "$root/examples_c/bits.c" program.c
# shellcheck disable=SC2046 # the flags are words
cc program.c -pthread $(gradcodec-config --includes --libs)
./a.out > log || fail "bits: $(cat log)"
# shellcheck disable=SC2046
${CC:-cc} -std=c99 -Wall -Wextra -pedantic -Werror program.c -o bits -Wl,-rpath,"$package/lib" \
    $(PKG_CONFIG_PATH=$package/lib/pkgconfig pkgconf --cflags --libs gradcodec)
./bits > log || fail "bits: $(cat log)"
[ "$(gradcodec-config --version)" = "$(python -c 'import importlib.metadata as m; print(m.version("gradcodec"))')" ] ||
    fail "gradcodec-config --version: $(gradcodec-config --version)"
# Tests a folder whose name has characters that are special to a shell.
odd="$work/a folder; of \$(my) 'own'"
mkdir "$odd" && cp -r "$package" "$odd"
eval "${CC:-cc} -std=c99 \"$root/examples_c/bits.c\" -o odd $("$python" "$odd/gradcodec/_config.py" --includes --libs)"
./odd > log || fail "bits: $(cat log)"
ldd odd | grep -qF "$odd" || fail "another library: $(ldd odd)"
[ "$("$python" "$odd/gradcodec/_config.py" --cmakedir)" = "$odd/gradcodec/lib/cmake/gradcodec" ] || fail "--cmakedir"
echo "ok C: bits, by gradcodec-config, also from a folder with spaces and quotes, and by pkg-config"
sh "$root/tests/packaging/man.sh" "$venv/share/man/man7/gradcodec.7"
cmake=$(command -v cmake || echo "$root/build/venv-peers/bin/cmake")
if [ -x "$cmake" ]; then
    cat > CMakeLists.txt <<END
cmake_minimum_required(VERSION 3.18)
project(program C)
find_package(gradcodec 0.1 REQUIRED CONFIG)
add_executable(program $root/examples_c/bits.c)
target_link_libraries(program PRIVATE gradcodec::gradcodec)
END
    PATH=$(dirname "$cmake"):$PATH
    cmake -S . -B build -Dgradcodec_DIR="$(gradcodec-config --cmakedir)" > log && cmake --build build >> log &&
        ./build/program >> log || fail "CMake: $(cat log)"
    echo "ok C: bits, by CMake"
else
    echo "NOT RUN, because there is no CMake: find_package with the wheel"
fi
