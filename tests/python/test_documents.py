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
            # cargo may have built an example in its folder: what lies in target/ is no source.
            is_source = path.suffix in patterns and "target" not in path.relative_to(ROOT).parts
            if is_source and path.is_file():
                for names in re.findall(patterns[path.suffix], path.read_text(encoding="utf-8")):
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
