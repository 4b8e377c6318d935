"""docs/WHEN.md has the tables of bench/when.py's model, which is fitted to the tables in docs/PERFORMANCE.md."""

import pathlib
import statistics
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import when  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return when.Model()


def test_the_page_has_the_tables_that_the_program_prints():
    """Runs python bench/when.py."""
    printed = subprocess.run([sys.executable, str(ROOT / "bench/when.py")], check=True, capture_output=True, text=True).stdout
    page = (ROOT / "docs/WHEN.md").read_text(encoding="utf-8")
    tables = printed.strip().split("\n\n")
    assert len(tables) == 3 and [table for table in tables if table not in page] == []


def test_the_page_has_the_share_and_the_largest_error_of_the_model(model):
    page = (ROOT / "docs/WHEN.md").read_text(encoding="utf-8")
    assert f"gets, {model.share:.2f}." in page
    times = [(who, n, t) for who, of in when.measured().items() for n, t in of.items() if n >= when.LEAST]
    worst = max(abs(model.between_two(*who, n) / t - 1) for who, n, t in times)
    assert "at most 15 % off" in page and 0.10 < worst < 0.15


def test_the_page_has_the_error_of_the_model_for_measured_steps_between_nodes():
    page = (ROOT / "docs/WHEN.md").read_text(encoding="utf-8")
    header, rows = when.steps_beside()
    found = {name: dict(zip(header[1:], cells)) for name, *cells in rows}
    off = {
        name: [abs(float(cell.split("(")[1][:-1])) for cell in of.values() if "(" in cell] for name, of in found.items()
    }
    every = [each for name, of in off.items() for each in of if not name.startswith("MB")]
    assert "at most 15 % off, in the median 1 %" in " ".join(page.split())
    assert 14 < max(every) <= 15 and statistics.median(every) == 1
    assert "within 1 %" in page and max(off["MB that left a node, 2 x 2"]) < 1
    # Every number of the page with the measured steps has a number of the model's beside it.
    steps, left, _ = when.measured_steps()
    assert len(steps) == 10 and sum(len(step.ms) for step in steps) == 49 == len(every)
    assert len(left) == len(off["MB that left a node, 2 x 2"]) == 5


def test_between_nodes_the_page_compares_with_nccl_for_1_4_and_8_gpus_per_node(model):
    page = " ".join((ROOT / "docs/WHEN.md").read_text(encoding="utf-8").split())
    least = {1: "3.8 to 3.9", 4: "3.8 to 6.7", 8: "3.7 to 7.2"}
    for ranks, said in least.items():
        times = []
        for rate in (25e9 / 8, 10e9 / 8):
            own = model.between_nodes("int8", "levels", when.FULL, 2, ranks, rate, "float32")
            plain = [model.between_nodes(None, way, when.FULL, 2, ranks, rate, "float32") for way in ("ring", "tree")]
            times += [f"{one / own:.2g}" for one in plain]
        assert said == f"{min(times)} to {max(times)}", times
        assert f"{said} with {ranks} GPU" in page, (ranks, said)
