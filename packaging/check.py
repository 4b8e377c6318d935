#!/usr/bin/env python3
"""Checks that all files agree on the version and on the list of functions.

    check.py              during development of a version
    check.py --release    for a release: also needs a date in CHANGELOG.md, a clean tree and a tag on the commit
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def text(path):
    return (ROOT / path).read_text()


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout.strip()


def faults(release):
    version = re.search(r'^version = "(.*)"', text("Cargo.toml"), re.M)[1]
    major, minor, _ = version.split(".")
    header = text("include/gradcodec.h")
    locks = ("Cargo.lock", "examples/rust/Cargo.lock", "fuzz/Cargo.lock")
    named = {
        **{path: re.search(r'name = "gradcodec"\nversion = "(.*)"', text(path))[1] for path in locks},
        "include/gradcodec.h": ".".join(re.findall(r"#define GRADCODEC_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)),
        "python/gradcodec/__init__.py": re.search(r'^__version__ = "(.*)"', text("python/gradcodec/__init__.py"), re.M)[1],
        "CHANGELOG.md": re.search(r"^## \[(\d.*?)\]", text("CHANGELOG.md"), re.M)[1],
    }
    yield from (f"{path} is of {other}, Cargo.toml of {version}" for path, other in named.items() if other != version)
    # The .abi file and functions.h are written independently, so both are compared.
    abi = ROOT / f"tests/abi/gradcodec-{major}.{minor}.abi"
    if abi.exists():
        promised = set(re.findall(r"^function (gc_\w+) ", abi.read_text(), re.M))
        listed = set(re.findall(r"^FUNCTION\((gc_\w+),", text("tests/abi/functions.h"), re.M))
        yield from (f"{abi.name} lacks {name}" for name in sorted(listed - promised))
        yield from (f"tests/abi/functions.h lacks {name}" for name in sorted(promised - listed))
    else:
        yield f"there is no {abi.name}"
    if not release:
        return
    if not re.search(rf"^## \[{re.escape(version)}\] - \d\d\d\d-\d\d-\d\d$", text("CHANGELOG.md"), re.M):
        yield f"CHANGELOG.md has no day for {version}"
    if output("git", "status", "--porcelain"):
        yield "the tree is not as it is in the commit"
    if f"v{version}" not in output("git", "tag", "--points-at", "HEAD").split():
        yield f"the commit has no tag v{version}"


def main():
    found = list(faults("--release" in sys.argv[1:]))
    if found:
        sys.exit("\n".join(f"FAILED: {fault}" for fault in found))
    print("ok: every version is the same, and the file of the ABI has every function")


main()
