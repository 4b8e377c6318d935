#!/usr/bin/env python3
"""wheel.py ARCH: makes build/package/gradcodec-VERSION-py3-none-manylinux_2_17_ARCH.whl from build/package/ARCH/lib.

A wheel is a zip file with a list of its contents; this program's output is reproducible. The wheel contains the package
`gradcodec` (python/gradcodec), and in its folder the files for C and C++ programs: lib/ with the library, its
pkg-config file and its CMake package, include/, and share/doc/.
"""

import base64
import hashlib
import os
import pathlib
import re
import sys
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Default without a commit: the first second of 1980, the earliest time that a zip file can store.
EPOCH = int(os.environ.get("SOURCE_DATE_EPOCH", 315532800))
METADATA = """\
Metadata-Version: 2.4
Name: gradcodec
Version: {version}
Summary: {summary}
License-Expression: MIT OR Apache-2.0
License-File: LICENSE
License-File: LICENSE-APACHE
License-File: THIRD-PARTY-NOTICES
Requires-Python: >=3.10
Classifier: Development Status :: 4 - Beta
Classifier: Intended Audience :: Developers
Classifier: Intended Audience :: Science/Research
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: C
Classifier: Programming Language :: C++
Classifier: Programming Language :: Python :: 3 :: Only
Classifier: Programming Language :: Rust
Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence
Classifier: Typing :: Typed
Description-Content-Type: text/markdown

"""
WHEEL = """\
Wheel-Version: 1.0
Generator: gradcodec packaging/wheel.py
Root-Is-Purelib: false
Tag: py3-none-manylinux_2_17_{arch}
"""
# Replaces the symbolic link for `-lgradcodec`, which a wheel cannot contain: linkers read this text as a script.
LINK = "INPUT(libgradcodec.so.0)\n"


def description(readme):
    """Returns README.md for a page without our other files: replaces pictures and links to files by words."""
    relative = r"\]\((?!https?:)([^)#]+)\)"
    text = re.sub(rf"!\[([^]]*){relative}", r"*\1: \2*", readme)
    words = lambda link: link[1] if link[1] == link[2] else f"{link[1]} ({link[2]})"
    text = re.sub(rf"\[([^]]*){relative}", words, text)
    return text.rstrip("\n") + "\n\nFiles that are named here, such as `docs/ABI.md`, are in the sources.\n"


def contents(arch, about):
    """Yields the names of files in the wheel, with their contents."""
    prefix = ROOT / "build/package" / arch / "prefix"
    package = ROOT / "python" / "gradcodec"
    for file in sorted([*package.glob("*.py"), package / "hook.cpp", package / "py.typed"]):
        yield f"gradcodec/{file.name}", file.read_bytes()
    yield "gradcodec/_config.py", (ROOT / "packaging/config.py").read_bytes()
    yield "gradcodec/lib/libgradcodec.so.0", (prefix / f"lib/libgradcodec.so.{about['version']}").read_bytes()
    yield "gradcodec/lib/libgradcodec.so", LINK.encode()
    for folder in "include", "lib/cmake", "lib/pkgconfig", "share/doc":
        for file in sorted((prefix / folder).rglob("*")):
            name = str(file.relative_to(prefix))
            if file.is_file() and not name.startswith("share/doc/gradcodec/examples"):
                yield f"gradcodec/{name}", file.read_bytes()
    # pip installs this file next to the environment's programs, where man finds it.
    page = "share/man/man7/gradcodec.7"
    yield f"gradcodec-{about['version']}.data/data/{page}", (prefix / page).read_bytes()
    info = f"gradcodec-{about['version']}.dist-info"
    for name in "LICENSE", "LICENSE-APACHE", "THIRD-PARTY-NOTICES":
        yield f"{info}/licenses/{name}", (ROOT / name).read_bytes()
    yield f"{info}/METADATA", (METADATA.format(**about) + description((ROOT / "README.md").read_text())).encode()
    yield f"{info}/WHEEL", WHEEL.format(arch=arch).encode()
    yield f"{info}/entry_points.txt", b"[console_scripts]\ngradcodec-config = gradcodec._config:main\n"


def write(wheel, name, data):
    entry = zipfile.ZipInfo(name, time.gmtime(EPOCH)[:6])
    entry.external_attr = (0o100755 if ".so" in name else 0o100644) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.create_system = 3
    wheel.writestr(entry, data, compresslevel=9)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    arch = sys.argv[1]
    manifest = (ROOT / "Cargo.toml").read_text()
    about = {
        "version": re.search(r'^version = "(.*)"', manifest, re.M)[1],
        "summary": re.search(r'^description = "(.*)"', manifest, re.M)[1],
    }
    path = ROOT / f"build/package/gradcodec-{about['version']}-py3-none-manylinux_2_17_{arch}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        record = []
        for name, data in contents(arch, about):
            write(wheel, name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
        name = f"gradcodec-{about['version']}.dist-info/RECORD"
        write(wheel, name, "".join([*record, f"{name},,\n"]).encode())
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
