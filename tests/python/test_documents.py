"""What the documents must have: every variable of the environment, none that nothing reads, commands that are run."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def variables():
    """The names that sources read from the environment: in Rust, Python and C."""
    found = {}
    patterns = {
        ".rs": r'(?:getenv|variable)\(c"(\w+)"|\(c"([A-Z_]+)", "|env::var(?:_os)?\("(GRADCODEC_\w+)"',
        ".py": r'environ(?:\.get\(|\[|\.setdefault\()"(GRADCODEC_\w+)"',
        ".c": r'getenv\("(\w+)"',
        ".h": r'getenv\("(\w+)"',
        ".hpp": r'getenv\("(\w+)"',
    }
    for folder in "build.rs", "src", "examples", "examples_c", "examples_cpp", "python", "include":
        for path in sorted([ROOT / folder, *(ROOT / folder).rglob("*")]):
            for names in re.findall(patterns.get(path.suffix, "(?!)"), path.read_text(encoding="utf-8") if path.is_file() else ""):
                found.setdefault("".join(names), path.relative_to(ROOT))
    return {name: path for name, path in found.items() if not name.startswith("GRADCODEC_TEST_")}


@pytest.mark.skipif(not (ROOT / "src").exists(), reason="the tree of `make dist` has no sources")
def test_every_variable_of_the_environment_is_documented():
    page = (ROOT / "docs/ENVIRONMENT.md").read_text(encoding="utf-8")
    found = variables()
    assert {"GRADCODEC_CPU", "GRADCODEC_NVRTC", "GRADCODEC_CACHE", "GRADCODEC_CACHE_DIR", "HOME"} <= set(found)
    assert [f"{name}, in {path}" for name, path in found.items() if f"`{name}`" not in page] == []


def test_no_variable_is_documented_that_nothing_reads():
    text = "".join(
        path.read_text(encoding="utf-8", errors="replace")
        for folder in ("src", "tests", "examples", "examples_c", "examples_cpp", "python", "Makefile")
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]
        if path.is_file() and path.name != "test_documents.py"
    )
    named = set(re.findall(r"(?m)^\| `(GRADCODEC_\w+)`", (ROOT / "docs/ENVIRONMENT.md").read_text(encoding="utf-8")))
    assert len(named) >= 8
    if (ROOT / "src").exists():
        assert [name for name in sorted(named) if name not in text] == []


def test_every_test_that_a_document_names_is_there():
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    named = {found for page in pages for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)}
    assert len(named) >= 10
    files = {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in named}
    assert [(file, name) for file, name in sorted(named) if f"def {name}(" not in files[file]] == []


def rows(page, head):
    """The cells of a page's first table that has this in its head."""
    text = (ROOT / page).read_text(encoding="utf-8")
    table = next(each for each in re.findall(r"(?m)(?:^\|.*\n)+", text) if head in each.partition("\n")[0])
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]


def test_losses_for_whoever_decides_are_those_that_were_measured():
    measured = set(re.findall(r"\d\.\d+", (ROOT / "docs/CODECS.md").read_text(encoding="utf-8")))
    losses = {loss for row in rows("docs/CHOOSING.md", "measured loss") for loss in re.findall(r"\d\.\d+", row[-1])}
    assert len(losses) > 15 and losses - measured == set()


def test_the_first_screen_has_the_codecs_and_losses_that_were_measured():
    sizes = {"float32": 4.0}
    for name, _, size, *_ in rows("docs/CODECS.md", "sends"):
        sizes[name.strip("`").removeprefix("GC_CODEC_")] = float(size)
    losses = {
        (sent.split(", ")[-1], errors == "kept"): loss
        for optimizer, sent, errors, loss, *_ in rows("docs/CODECS.md", "loss, mean of three seeds")
        if optimizer == "AdamW"
    }
    text = (ROOT / "docs/PERFORMANCE.md").read_text(encoding="utf-8").split("<!-- all codecs -->")[1]
    head, times = re.search(r"(?m)^\| float32 from C, us +\|(.*)\n(?:^\|.*\n)+?^\| 300M +\|(.*)", text).groups()
    columns = zip(head.split("|"), times.split("|"))
    speeds = {who.strip(): time.strip(" )").split("(")[1] for who, time in columns if "(" in time}
    for name, size, loss, speed, _ in rows("README.md", "loss under AdamW"):
        codec, _, errors = name.partition(", errors ")
        assert float(size) == pytest.approx(sizes.pop(codec), abs=0.01), name
        assert loss == losses.get((codec, errors == "kept"), "-"), name
        who = codec.lower() + (" errors" if errors and codec != "ONEBIT" else "")
        assert speed == ("1" if codec == "float32" else speeds.get(who, "-")), name
    assert sizes == {}, "the first screen has every codec"


@pytest.fixture
def commands():
    """tests/commands.py, which has the list of what runs the commands of documents and examples."""
    spec = importlib.util.spec_from_file_location("commands", ROOT / "tests/commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not (ROOT / ".ci/run").exists(), reason="the tree of `make dist` has not all of the tests")
def test_every_command_of_a_document_or_an_example_is_run_or_exempt(commands):
    assert list(commands.faults()) == []


@pytest.mark.skipif(not (ROOT / ".ci/run").exists(), reason="the tree of `make dist` has not all of the tests")
@pytest.mark.parametrize(
    "path, text, script, why",
    [
        ("docs/NEW.md", "Do:\n```sh\nfrobnicate it\n```\n", "frobnicate it", "nothing runs it"),
        ("docs/NEW.md", "Do:\n\n    CC=gcc build/bin/python -m new  # soon\n", "CC=gcc build/bin/python -m new", "runs"),
        ("README.md", "Call `cc new.c\n-lgradcodec`.", "cc new.c -lgradcodec", "nothing runs it"),
        ("README.md", "`make new-target` makes it.", "make new-target", "does not make new-target"),
        ("README.md", "`make test-new` tests it.", "make test-new", "does not make test-new"),
        ("CHANGELOG.md", "`make install-new`", "make install-new", "tests/packaging/install.sh has no: install-new"),
        ("examples_new/bits.c", "/* Bits.\n *\n *   zig build\n *   ./bits */", "zig build\n./bits", "nothing runs it"),
        ("examples_cpp/new.cpp", "//     g++ new.cpp\nint x;", "g++ new.cpp", None),
        ("include/new.hpp", "/** Compile it with `g++ a.cpp`. */", "g++ a.cpp", "nothing runs it"),
        ("docs/NEW.md", "```text\nmake new\n```\n`make`, `go`, and `python3` are\nneeded; `not_a it`.", None, None),
    ],
)
def test_a_command_that_nothing_runs_is_found(commands, path, text, script, why):
    found = list(commands.scripts(pathlib.PurePath(path), text))
    assert [each for _, each in found] == ([script] if script else [])
    if script:
        said = commands.wrong_with(*found[0])
        assert why in said if why else said is None


def test_what_a_group_has_is_run_and_a_failure_ends_it(commands, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(commands, "LIST", [("docs/A.md*", "a"), ("docs/B.md*", "b")])
    monkeypatch.setattr(commands, "ROOT", tmp_path / "root")
    for name, line in (("A", "ls target/release > build/seen"), ("B", "false\ntrue")):
        (tmp_path / "root/docs").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"root/docs/{name}.md").write_text(f"```sh\n{line}\n```\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libgradcodec.so.0").touch()
    commands.run("a", tmp_path / "lib", tmp_path / "work")
    assert (tmp_path / "work/build/seen").read_text(encoding="utf-8") == "libgradcodec.so.0\n"
    assert "ok: a: 1 as they stand there" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="status 1: a command of docs/B.md"):
        commands.run("b", tmp_path / "lib", tmp_path / "work")
    with pytest.raises(SystemExit, match="no command is in a group 'c'"):
        commands.run("c", tmp_path / "lib", tmp_path / "work")
