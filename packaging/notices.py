#!/usr/bin/env python3
"""THIRD-PARTY-NOTICES: the licences of all code that is linked into the library; its binaries must include them.

    notices.py           writes the file: needs cargo, the crates' sources and rustc's documentation
    notices.py --check   fails if the file differs (the part about Rust's library only if rustc is the same)

The crates are pinned in Cargo.lock, for the Linux targets of the library. Crates for tests and build scripts are not
linked, nor are procedural macros and their dependencies. If a crate offers a choice of licences, MIT is taken.
"""

import html
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = ROOT / "THIRD-PARTY-NOTICES"
TARGETS = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
HEAD = """\
GradCodec itself is licensed under MIT OR Apache-2.0: see LICENSE and LICENSE-APACHE. Its shared and static libraries
contain parts of the following works. This file is made by packaging/notices.py.
"""
RUST = "The Rust standard library"
# Crates of Rust's library for other systems, or for its build and tests.
NOT_LINKED = re.compile(
    "cc|dlmalloc|fortanix-sgx-abi|getopts|hermit-abi|moto-rt|r-efi|r-efi-alloc|rand|rand_core|rand_xorshift|shlex|"
    "rustc-literal-escaper|unwinding|vex-sdk|wasi|wit-bindgen|windows.*"
)
ZIG = """\
What Zig has linked (the wheel, the archive, the Debian packages) contains LLVM's libunwind besides, under the
Apache-2.0 licence with the LLVM exception, by which binary forms need no notice.
"""


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def linked_crates():
    """Returns cargo's metadata of each linked crate, sorted by name and version."""
    crates = {}
    for target in TARGETS:
        about = json.loads(output("cargo", "metadata", "--locked", "--format-version=1", f"--filter-platform={target}"))
        packages = {package["id"]: package for package in about["packages"]}
        nodes = {node["id"]: node for node in about["resolve"]["nodes"]}
        root = about["resolve"]["root"]
        seen, waiting = {root}, [root]
        while waiting:
            for link in nodes[waiting.pop()]["deps"]:
                package = packages[link["pkg"]]
                macro = any("proc-macro" in kind["kind"] for kind in package["targets"])
                normal = any(kind["kind"] is None for kind in link["dep_kinds"])
                if normal and not macro and link["pkg"] not in seen:
                    seen.add(link["pkg"])
                    waiting.append(link["pkg"])
        crates.update({(packages[i]["name"], packages[i]["version"]): packages[i] for i in seen - {root}})
    return [crates[key] for key in sorted(crates)]


def taken(files):
    """Returns the texts of the chosen licence and NOTICE file. `files`: a crate's licence texts, by name."""
    choices = [name for name in sorted(files) if "MIT" in name.upper()] or [
        name for name in sorted(files) if re.match("LICEN[CS]E|COPYING", name.upper())
    ]
    if not choices:
        sys.exit(f"no licence among {sorted(files)}")
    notice = [name for name in files if name.upper().startswith("NOTICE")]
    return "\n".join(files[name].strip("\n") for name in choices[:1] + notice)


def crates_part():
    for crate in linked_crates():
        folder = pathlib.Path(crate["manifest_path"]).parent
        files = [path for path in folder.iterdir() if re.match("LICEN[CS]E|COPYING|NOTICE", path.name.upper())]
        files = {path.name: path.read_text() for path in files}
        yield f"{crate['name']} {crate['version']} ({crate['license']})", taken(files)


def rust_part():
    """Yields the licences from rustc's documentation: of the standard library, and of the crates linked into it."""
    folder = pathlib.Path(output("rustc", "--print=sysroot").strip(), "share/doc/rust")
    text = (folder / "COPYRIGHT-library.html").read_text()
    in_tree, crates = text.split('<h2 id="out-of-tree-dependencies">')
    owners = sorted(set(re.findall(r"<b>Copyright:</b> (.*?)</p>", in_tree)))
    owners = "\n".join(f"Copyright {html.unescape(owner)}" for owner in owners)
    licences = [(folder / f"licenses/{name}.txt").read_text().strip() for name in ("MIT", "Unicode-3.0")]
    title = f"{RUST}, of {output('rustc', '--version').strip()} (MIT OR Apache-2.0; Unicode-3.0)"
    yield title, "\n\n".join([owners, *licences])
    for crate in crates.split("<h3>📦 ")[1:]:
        name, version = re.match(r"(.*?)-(\d.*?)</h3>", crate).groups()
        files = re.findall(r"<summary><code>(.*?)</code></summary>\s*<pre>(.*?)</pre>", crate, re.S)
        licence = html.unescape(re.search("<b>License:</b> (.*?)</p>", crate)[1])
        if not NOT_LINKED.fullmatch(name):
            files = {file: html.unescape(text) for file, text in files}
            yield f"{name} {version} ({licence}), in the Rust standard library", taken(files)


def written(works):
    """Formats the works: each text once, under the names of all works with that text."""
    names = {}
    for name, text in works:
        tidy = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
        names.setdefault(tidy, []).append(name)
    line = "\n" + "-" * 100 + "\n"
    return "".join(f"{line}" + "\n".join(titles) + f"\n\n{text}\n" for text, titles in names.items())


def main():
    crates = HEAD + "\n" + ZIG + written(crates_part())
    if sys.argv[1:] == ["--check"]:
        there = FILE.read_text()
        release = output("rustc", "--version").strip()
        expected = crates + written(rust_part()) if release in there else crates
        if not there.startswith(expected) or RUST not in there:
            sys.exit("FAILED: THIRD-PARTY-NOTICES is not what packaging/notices.py writes: run it")
        print(f"ok: THIRD-PARTY-NOTICES has every crate{' and ' + release if release in there else ''}")
        return
    FILE.write_text(crates + written(rust_part()))


main()
