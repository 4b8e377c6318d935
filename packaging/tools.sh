#!/bin/sh
# tools.sh: installs the tools that make and check packages into build/package-venv. aarch64.sh calls it before it
# enters its Debian, which has no pip.
set -eu
cd "$(dirname "$0")/.."
tools=build/package-venv
if [ ! -e "$tools/ready" ] || [ packaging/requirements.txt -nt "$tools/ready" ] || [ tests/constraints.txt -nt "$tools/ready" ]; then
    echo "getting Zig, cargo-zigbuild and what checks packages (100 MB) into $tools"
    python3 -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt \
        -r packaging/requirements.txt
    touch "$tools/ready"
fi
