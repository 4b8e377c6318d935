#!/usr/bin/env python3
"""Whether all that names the version, or should have every function, agrees.

    check.py              while a version is being made
    check.py --release    for its release: it has a day in CHANGELOG.md, and the commit is whole and has its tag
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
    # The promise of a release is a file, and the list of functions is written by hand: neither is made from the other.
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
