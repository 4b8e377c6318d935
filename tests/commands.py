"""Checks that every command in the documentation is run by a test, or runs the commands of one group.

    python3 tests/commands.py                               # checks that LIST below covers every command
    python3 tests/commands.py GROUP LIBRARY_DIR WORK_DIR    # runs a group's commands in WORK_DIR, a copy of this tree

A command stands in a ```sh block of a document, indented in a document or comment, or in `backticks` in a document,
comment or header. The lines of a block, and adjacent lines of a comment, form one script.
"""

import fnmatch
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# The first pattern that matches counts; `sh` marks a block. The right column names what runs the command:
#   GROUP            the Makefile or a test runs the text from the document through this program
#   by FILE          that test runs the text from the document
#   in FILE          that test contains the same text and runs it
#   make             `.ci/run` or `.ci/nightly` makes the target, directly or as a prerequisite
#   exempt: REASON   nothing runs the command
LIST = [
    ("README.md sh: *", "by tests/packaging/readme.sh"),
    ("docs/INSTALL.md sh: *", "by tests/packaging/readme.sh"),
    ("docs/INSTALL.md: make uninstall PREFIX=*", "in tests/packaging/readme.sh"),
    ("docs/INSTALL.md: cc program.c -pthread $(gradcodec-config *", "in packaging/test_wheel.sh"),
    ("docs/START.md sh: *pip install *", "exempt: `make package` builds it; packaging/test_wheel.sh installs it elsewhere"),
    ("packaging/config.py: *", "in packaging/test_wheel.sh"),
    ("include/gradcodec.h: cc program.c -pthread $(pkg-config *", "in tests/packaging/readme.sh"),
    # Targets of the Makefile.
    ("*: make test*", "make"),
    ("*: make gpu-*", "exempt: a GPU"),
    ("*: make multi-gpu*", "exempt: several GPUs; tests/multi_gpu is run with --device cpu"),
    ("*: make bench*", "exempt: measures for an hour; test_benches.py runs the programs"),
    *((f"*: make {name}*", "exempt: several GPUs, and measures")
      for name in ("allreduce-perf", "convergence", "links", "training-step")),
    ("*: make nodes*", "exempt: measures; test_nodes_bench.py runs the program with a small model"),
    ("*: make slow-links*", "exempt: measures; test_nodes_bench.py runs the program with a small model"),
    ("*: make accuracy*", "exempt: wants a GPU or an hour, and measures"),
    ("*: make header", "exempt: writes headers; tests/source/header.rs makes them, too, and compares"),
    ("*: make kernels", "exempt: writes fatbins; `make test-fatbin` makes them, too, and compares"),
    ("*: make install-static", "in packaging/build.sh"),
    ("*: make *install*", "in tests/packaging/install.sh"),
    ("*: make help", "in tests/packaging/readme.sh"),
    ("*: make *", "make"),
    ("docs/WHEN.md: python bench/when.py", "in tests/python/test_when.py"),
    ("*: python3 examples/python/cuda_graph.py", "exempt: two GPUs; test_examples.py of tests/frameworks runs it"),
    ("*: python -m gradcodec.torch build", "exempt: wants PyTorch; test_torch_native.py of tests/frameworks runs it"),
    ("*: python -m gradcodec", "exempt: test_client.py of tests/python runs it, with the library of the tests"),
    # Commands for contributors and releases.
    ("CONTRIBUTING.md: cargo test --profile fast allocation", "exempt: a part of `make test-rust`"),
    ("CONTRIBUTING.md: GRADCODEC_LIBRARY=*", "exempt: a part of `make test-python`"),
    ("CONTRIBUTING.md: cargo clippy", "in .ci/run"),
    ("CONTRIBUTING.md: cargo doc", "in .ci/run"),
    ("CONTRIBUTING.md: cargo fmt", "in .ci/run"),
    ("*: .ci/*", "exempt: is what runs all others"),
    ("RELEASING.md: cargo check", "exempt: a part of every build"),
    ("RELEASING.md: python3 tests/abi/abi.py *", "exempt: writes the file that `make test-abi` compares with"),
    ("RELEASING.md: python3 packaging/notices.py", "exempt: writes the notices that `make test-package` compares with"),
    ("RELEASING.md: python3 packaging/check.py --release", "exempt: wants a tag; `make test-package` runs the rest"),
    ("RELEASING.md: git *", "exempt: a tag, by who releases"),
    ("RELEASING.md: build/package-venv/bin/twine *", "exempt: an account"),
    ("RELEASING.md: p*", "exempt: a release on PyPI; packaging/test_wheel.sh does so with the wheel"),
    ("*: cargo cinstall", "exempt: wants cargo-c; `make test-cargo-c` runs it where that is"),
    ("examples_c/data/README.md: pip install *", "exempt: says how the data were made"),
    # Languages.
    ("docs/KERNELS.md: pip install nvidia-cuda-nvrtc", "exempt: tests take the NVRTC that pip puts into build/kernel-venv"),
    ("docs/LANGUAGES.md sh: bindgen *", "exempt: the program is seldom there; make test-bindgen runs the crate so"),
    ("docs/LANGUAGES.md sh: *go run*", "go"),
    ("docs/LANGUAGES.md sh: export *", "in tests/languages/run.sh"),
    ("docs/LANGUAGES.md sh: gfortran *", "fortran"),
    ("docs/LANGUAGES.md sh: luajit *", "lua"),
    ("docs/LANGUAGES.md sh: mcs *", "csharp"),
    ("*: java *", "exempt: wants a JDK of 22; tests/languages/run.sh runs the class on a runtime that has no compiler"),
    ("examples/go/*: *", "go"),
    ("examples/fortran/*: *", "fortran"),
    ("examples/lua/*: *", "lua"),
    ("examples/csharp/*: *", "csharp"),
    # Examples.
    *((f"{program}: *", "mpi") for program in ("examples_c/mpi.c", "examples/python/mpi_allreduce.py")),
    ("examples_c/*: *", "examples"),
    ("examples/rust/*: *", "rust"),
    # Examples that need a framework: they compile files of examples_cpp, or start a process per GPU.
    *((f"examples/python/{name}.py: *", "peers") for name in "ddp peers relu_mask torch_ops tvm_ops".split()),
    ("examples/python/*: *", "examples"),
    ("examples_cpp/CMakeLists.txt: *", "cmake"),
    ("examples_cpp/*.cu: *", "exempt: -arch=native wants a GPU; tests/frameworks/native/nvcc.sh compiles it for others"),
    ("examples_cpp/*: *", "examples_cpp"),
]

# Programs that a command line starts with, after any variable assignments.
PROGRAMS = (
    "apt apt-get bash bindgen cargo cc cd clang cmake conda csc ctest curl docker dotnet dpkg export g++ gcc"
    " gfortran git go java javac julia ldconfig luajit make mcs mono mpicc mpicxx mpiexec mpirun ninja node npm"
    " nvcc php pip pip3 pkg-config pkgconf podman pytest python python3 R ruby rustc rustup sh sudo tar torchrun"
    " twine uv wget xz zig"
)
WORD = r"(?:[\w./~$-]*/)?(?:" + "|".join(map(re.escape, PROGRAMS.split())) + r")|\.ci/\w+|\./[\w./-]+"
COMMAND = re.compile(rf"(?:[A-Z_]+=\S* +)*(?:{WORD})(?: +\S|$)")
OF_A_SENTENCE = {*PROGRAMS.split()}  # a lone program name in backticks is not a command


def documents():
    """Returns the documents, and all files whose comments are searched for commands."""
    patterns = ["*.md", "docs/*.md", "kernels/*.md", "examples*/**/*", "python/**/*", "include/**/*.h*", "packaging/config.py"]
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    kinds = "md py c cpp cu h hpp cuh rs go java lua f90 cs txt toml mod".split()
    return [path for path in paths if path.suffix[1:] in kinds and "target" not in path.relative_to(ROOT).parts]


def without_blocks(text):
    """Returns a document's lines outside of fenced blocks, and its sh blocks."""
    lines, blocks, block, language = [], [], [], None
    for line in text.split("\n"):
        fence = re.match(r"\s*```(\S*)", line)
        if fence and language is None:
            language, block = fence[1], []
        elif fence:
            blocks += ["\n".join(block)] if language in ("sh", "bash", "shell", "console") else []
            language = None
        elif language is None:
            lines.append(line)
        else:
            block.append(line.strip())
    return lines, blocks


def comments(path, text):
    """Returns the text of comment lines, and empty lines for others; for Python, the module's docstring."""
    if path.suffix == ".py":
        top = re.match(r'(?:#!.*\n)?"""(.*?)"""', text, re.S)
        return top[1].split("\n") if top else []
    found = (re.match(r"\s*(?:\*|//[/!]?|#|--|!|/\*\*?)(?=\s)(.*?)\s*(?:\*/)?$", line) for line in text.split("\n"))
    return [line[1] if line else "" for line in found]


def scripts(path, text):
    """Yields pairs: the path, followed by " sh" for a block, and the script."""
    where, document = path.as_posix(), path.suffix == ".md"
    lines, blocks = without_blocks(text) if document else (comments(path, text), [])
    yield from ((f"{where} sh", block) for block in blocks)
    adjacent = []
    for line in [*lines, ""]:
        command, wide = re.sub(r"\s+# .*", "", line).strip(), line.expandtabs(4)
        if len(wide) - len(wide.lstrip()) >= (4 if document else 3) and COMMAND.match(command):
            adjacent.append(command)
            if not document:
                continue
        if adjacent:
            yield where, "\n".join(adjacent)
        adjacent = []
    for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", " ".join(line.strip() for line in lines)):
        if COMMAND.match(code) and code not in OF_A_SENTENCE:
            yield where, code


def all_scripts():
    for path in documents():
        yield from scripts(path.relative_to(ROOT), path.read_text())


def what_runs(where, script):
    """Returns the first matching line of LIST, the pattern and what runs the script, or (None, None)."""
    fitting = (line for line in LIST if fnmatch.fnmatchcase(f"{where}: {script}", line[0]))
    return next(fitting, (None, None))


def read(name):
    return (ROOT / name).read_text()


def made_by_ci():
    """Returns the Makefile targets that .ci/run and .ci/nightly make, with their prerequisites."""
    makefile = read("Makefile")
    for name, words in re.findall(r"(?m)^((?:MORE_)?PARTS) = (.*)", makefile):
        makefile = makefile.replace(f"$({name})", words)
    parts = re.findall(r"(?m)^([a-z0-9-]+):(.*)\n((?:\t.*\n|(?:ifn?eq|else|endif).*\n)*)", makefile)
    called = r"(?:\$\(MAKE\)|parts\.sh)(.*)"
    rules = {name: " ".join([wants, *re.findall(called, recipe)]) for name, wants, recipe in parts}
    known, new = set(), set(re.findall(r"\bmake ([a-z0-9-]+)", read(".ci/run") + read(".ci/nightly")))
    while new:
        known |= new
        new = {word for name in new for word in rules.get(name, "").split() if word in rules} - known
    return known


def wrong_with(where, script):
    """Returns what is wrong with LIST for a script, or None."""
    _, by = what_runs(where, script)
    if by is None:
        return "nothing runs it, and it is not exempt"
    kind, _, rest = by.partition(" ")
    if kind == "exempt:":
        return None if rest else "exempt without a reason"
    if kind == "make":
        missing = [word for word in script.split()[1:] if "=" not in word and word not in made_by_ci()]
        return f"CI does not make {' and '.join(missing)}" if missing else None
    if kind == "by":
        return None if (ROOT / rest).exists() else f"there is no {rest}"
    if kind == "in":
        target = re.fullmatch(r"make (\S+)", script)
        missing = [line for line in ([target[1]] if target else script.split("\n"))
                   if not re.search(rf"(?<![\w-]){re.escape(line)}(?![\w-])", read(rest))]  # fmt: skip
        return f"{rest} has no: {missing[0]}" if missing else None
    callers = [ROOT / "Makefile", *ROOT.glob("tests/**/*.sh")]
    if not any(re.search(rf"(?:commands\.py|as_it_stands) {kind}\b", path.read_text()) for path in callers):
        return f"nothing calls commands.py {kind}"
    return None


def faults():
    """Yields the faults of all commands, and the lines of LIST that match no command."""
    every = list(all_scripts())
    for where, script in every:
        why = wrong_with(where, script)
        if why:
            yield f"{where}: {script!r}: {why}"
    used = {what_runs(*each)[0] for each in every}
    yield from (f"tests/commands.py: no command is {pattern!r}" for pattern, _ in LIST if pattern not in used)


def tree(library, work):
    """Makes a tree of links to this one, with `library` where `make` puts it, and an empty build folder."""
    shutil.rmtree(work, ignore_errors=True)
    (work / "build").mkdir(parents=True)
    (work / "target").mkdir()
    (work / "target/release").symlink_to(library.resolve())
    for path in ROOT.iterdir():
        if path.name not in ("build", "target", ".git"):
            (work / path.name).symlink_to(path)


def run(group, library, work):
    tree(library, work)
    # `python3` on the PATH is the interpreter that runs this program, and its environment provides other programs.
    environment = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ran = 0
    for where, script in all_scripts():
        if what_runs(where, script)[1] == group:
            print(f"== {where}", script, sep="\n", flush=True)
            done = subprocess.run(["sh", "-euc", script], cwd=work, env=environment)
            if done.returncode:
                sys.exit(f"FAILED, status {done.returncode}: a command of {where}")
            ran += 1
    if not ran:
        sys.exit(f"FAILED: no command is in a group {group!r}")
    print(f"ok: {group}: {ran} as they stand there")


def main(arguments):
    if len(arguments) == 3:
        return run(arguments[0], pathlib.Path(arguments[1]), pathlib.Path(arguments[2]).absolute())
    if arguments:
        sys.exit(__doc__)
    found = list(faults())
    print(*found, sep="\n")
    sys.exit("FAILED: commands that no test runs" if found else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
