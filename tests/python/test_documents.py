"""What the documents must have: every variable of the environment, and none that nothing reads."""

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
    for folder in "build.rs", "src", "examples_c", "examples_cpp", "examples_python", "include":
        for path in sorted([ROOT / folder, *(ROOT / folder).rglob("*")]):
            for names in re.findall(patterns.get(path.suffix, "(?!)"), path.read_text() if path.is_file() else ""):
                found.setdefault("".join(names), path.relative_to(ROOT))
    return {name: path for name, path in found.items() if not name.startswith("GRADCODEC_TEST_")}


@pytest.mark.skipif(not (ROOT / "src").exists(), reason="the tree of `make dist` has no sources")
def test_every_variable_of_the_environment_is_documented():
    page = (ROOT / "docs/ENVIRONMENT.md").read_text()
    found = variables()
    assert {"GRADCODEC_CPU", "GRADCODEC_NVRTC", "GRADCODEC_CACHE", "GRADCODEC_CACHE_DIR", "HOME"} <= set(found)
    assert [f"{name}, in {path}" for name, path in found.items() if f"`{name}`" not in page] == []


def test_no_variable_is_documented_that_nothing_reads():
    text = "".join(
        path.read_text(errors="replace")
        for folder in ("src", "tests", "examples_c", "examples_cpp", "examples_python", "Makefile")
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]
        if path.is_file() and path.name != "test_documents.py"
    )
    named = set(re.findall(r"(?m)^\| `(GRADCODEC_\w+)`", (ROOT / "docs/ENVIRONMENT.md").read_text()))
    assert len(named) >= 8
    if (ROOT / "src").exists():
        assert [name for name in sorted(named) if name not in text] == []
