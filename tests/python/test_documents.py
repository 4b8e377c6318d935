"""Checks that documents have every variable of the environment, none that is not read, and commands that are run."""

import importlib.util
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def variables():
    """Returns the names that sources in Rust, Python and C read from the environment, each with a file."""
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
            # cargo may have built an example in its folder: files in target/ are no sources.
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


def test_every_test_that_a_document_names_exists():
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    named = {found for page in pages for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)}
    assert len(named) >= 10
    files = {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in named}
    assert [(file, name) for file, name in sorted(named) if f"def {name}(" not in files[file]] == []


def rows(page, head):
    """Returns the cells of a page's first table that has `head` in its head."""
    text = (ROOT / page).read_text(encoding="utf-8")
    table = next(each for each in re.findall(r"(?m)(?:^\|.*\n)+", text) if head in each.partition("\n")[0])
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]


def test_losses_in_the_documents_are_the_measured_ones():
    measured = set(re.findall(r"\d\.\d+", (ROOT / "docs/CODECS.md").read_text(encoding="utf-8")))
    losses = {loss for row in rows("docs/CHOOSING.md", "measured loss") for loss in re.findall(r"\d\.\d+", row[-1])}
    assert len(losses) > 15 and losses - measured == set()


def test_the_readme_has_the_sizes_of_codecs_and_the_speeds_that_were_measured():
    sizes = {"float32": 4.0}
    for name, _, size, *_ in rows("docs/CODECS.md", "sends"):
        sizes[name.strip("`").removeprefix("GC_CODEC_").lower()] = float(size)
    link, *_ = [row for row in rows("docs/PERFORMANCE.md", "| nodes and link |") if row[0] == "2 nodes x 2 GPUs, 10 Gbit/s"]
    head = (ROOT / "docs/PERFORMANCE.md").read_text(encoding="utf-8").split("| nodes and link |")[1].split("\n")[0]
    head = [cell.strip() for cell in head.strip("| ").split("|")]
    measured = dict(zip(head, map(float, link[1:])))
    found = set()
    for name, size, _, speed in rows("README.md", "speed-up at 10 Gbit/s"):
        codec = name.strip("*`")
        assert float(size) == pytest.approx(sizes[codec], abs=0.01), name
        took = measured["NCCL" if codec == "float32" else codec.upper()] if speed != "-" else None
        assert took is None or re.findall(r"[\d.]+", speed)[0] == f"{measured['NCCL'] / took:.1f}", name
        found |= {codec} if took else set()
    assert found == {"float32", "int8", "int4"}
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    steps = {name: dict(zip(head, map(float, cells))) for name, *cells in rows("docs/PERFORMANCE.md", "| nodes and link |")}
    in_page = {
        "one machine with NVLink": "1 node x 4 GPUs, NVLink", "one machine whose": "1 node x 4 GPUs, no peer access",
        "two nodes of two GPUs, Ethernet of 25": "2 nodes x 2 GPUs, 25 Gbit/s",
        "two nodes of two GPUs, Ethernet of 10": "2 nodes x 2 GPUs, 10 Gbit/s",
    }  # fmt: skip
    hook = re.search(r"bfloat16 hook it takes (\d+) ms at 25 Gbit/s and (\d+) ms at 10 Gbit/s", text).groups()
    assert [float(ms) for ms in hook] == [steps[f"2 nodes x 2 GPUs, {n} Gbit/s"]["PyTorch's bf16 hook"] for n in (25, 10)]
    for name, nccl, own, _ in rows("README.md", "| your GPUs |"):
        step = next((steps[place] for begin, place in in_page.items() if name.startswith(begin)), None)
        numbers = [float(number.replace(",", "")) for number in re.findall(r"([\d,]+) ms", f"{nccl} {own}")]
        if step:
            assert numbers == [step[who] for who in ("NCCL", "INT8", "INT4")][: len(numbers)], name
        else:  # the row of slow links, in seconds
            slow = steps["2 nodes x 2 GPUs, 1 Gbit/s"]
            assert (nccl, own) == (f"{slow['NCCL'] / 1e3:.0f} s", f"`int4` {slow['INT4'] / 1e3:.1f} s")
    larger = rows("docs/CODECS.md", "at the end, more text")
    for seed, losses in enumerate(text.split("126 million weights, one seed:")[1].split(". ")[0].split("another seed:")):
        table = {row[0]: f"{float(row[-1]):.3f}" for row in larger if row[1] == str(seed)}
        found = dict(re.findall(r"(\w+) (0\.\d{3})", losses))
        assert found == {name: table[name] for name in found} and {"float32", "INT8"} <= set(found), losses
    float32 = {row[1]: float(row[-1]) for row in larger if row[0] == "float32"}
    above = {(row[0], row[1]): float(row[-1]) / float32[row[1]] - 1 for row in larger}
    of_one_bit = above.pop(("1-bit Adam", "0"))
    for page in "docs/CODECS.md", "docs/CHOOSING.md":
        content = (ROOT / page).read_text(encoding="utf-8")
        assert f"within {100 * max(map(abs, above.values())):.1f} % of float32" in content, page
        assert f"{100 * of_one_bit:.1f} % above float32" in content, page
    assert f"1-bit Adam with `onebit` reached {(1 + of_one_bit) * float32['0']:.3f}" in text
    losses = re.search(r"float32 ([\d.]+), INT8 ([\d.]+), INT4 ([\d.]+)\.", text).groups()
    expected = {
        sent.split(", ")[-1]: loss
        for optimizer, sent, errors, loss, *_ in rows("docs/CODECS.md", "loss, mean of three seeds")
        if optimizer == "AdamW" and (errors == "kept" or "INT4" not in sent)
    }
    assert losses == tuple(expected[codec] for codec in ("float32", "INT8", "INT4"))


@pytest.mark.skipif(not (ROOT / "Cargo.toml").exists(), reason="the tree of `make dist` has no sources")
def test_there_is_one_description_of_the_project():
    (about,) = re.findall(r'(?m)^description = "(.*)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    begins = {
        "README.md": f"# GradCodec\n\n**{about}.**\n",
        "include/gradcodec.h": f"\n/*\n * {about}.\n *\n",
        "packaging/gradcodec.pc.in": f"\nDescription: {about}\n",
        "python/gradcodec/__init__.py": f'"""{about}.\n',
        "src/lib.rs": f"//! {about}.\n",
        # These files take the description from Cargo.toml, or from the header.
        "packaging/wheel.py": '"summary": re.search(r\'^description = "(.*)"\', manifest, re.M)[1]',
        "packaging/debian.sh": "about=$(sed -n 's/^description = ",
    }
    assert [name for name, text in begins.items() if text not in (ROOT / name).read_text(encoding="utf-8")] == []
    page = subprocess.run(["sh", ROOT / "docs/man.sh"], capture_output=True, text=True, check=True).stdout
    assert f"gradcodec \\- {about[0].lower()}{about[1:]}\n" in page


@pytest.fixture
def commands():
    """Returns tests/commands.py, which lists what runs the commands of documents and examples."""
    spec = importlib.util.spec_from_file_location("commands", ROOT / "tests/commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not (ROOT / ".ci/run").exists(), reason="the tree of `make dist` has not all of the tests")
def test_every_command_of_a_document_or_an_example_is_run_or_exempt(commands):
    assert list(commands.faults()) == []
