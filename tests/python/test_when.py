"""docs/WHEN.md is what bench/when.py makes of the tables in docs/PERFORMANCE.md, and how its model comes about."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import when  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return when.Model("in a graph")


def test_the_page_is_that_of_the_tables(model):
    page = when.page(model)
    assert (ROOT / "docs/WHEN.md").read_text() == page, "python bench/when.py writes it"
    assert "\n%" not in page, "the site takes such a line for a comment"


def test_a_line_is_fitted_through_points_of_one():
    least, slope = when.fitted({n: 20e-6 + 4e-12 * n for n in (2**20, 2**24, 2**28)})
    assert least == pytest.approx(20e-6) and slope == pytest.approx(4e-12)


def test_ranks_exchange_once_below_a_mebibyte_of_all_payloads_and_two_below_four():
    assert when.once("bf16", 2**20 - 1) and not when.once("bf16", 2**20)  # 2 ranks, 2 bytes
    assert when.once("bf16", 2**17 - 1, world=4) and not when.once("bf16", 2**17, world=4)
    assert when.once("int8 over NCCL", 2**20) and not when.once("int8", 2**18, world=4)
    assert not when.once("onebit", 1) and not when.once("int8 errors", 1)


def test_over_nvlink_the_model_is_what_it_was_fitted_to(model):
    many = when.FULL
    for codec in when.SENT:
        said = model.compressed(codec, many, 2, when.NVLINK, "float32")
        assert said == pytest.approx(model.between_two(codec, "float32", many))
    assert model.plain(many, 2, when.NVLINK, "bfloat16") == pytest.approx(model.between_two("NCCL", "bfloat16", many))


def test_at_the_rate_that_the_page_names_both_take_the_same_time(model):
    rate = model.break_even("int8", 2**16, 4, "float32")
    assert model.factor("int8", 2**16, 4, rate, "float32") == pytest.approx(1)
    assert model.factor("int8", 2**16, 4, 2 * rate, "float32") < 1
    assert model.break_even("int4", when.FULL, 8, "float32") is None


@pytest.mark.parametrize("part, most", [("exchanges", 0.07), ("all codecs", 0.15)])
def test_from_4k_elements_on_the_model_is_nowhere_further_off(model, part, most):
    """Of a run to which nothing is fitted, and of the one to which it is."""
    found, further = [], []
    for who, _, of in when.errors(model, part, "in a graph"):
        for n in [n for n in of if n >= 2**12]:
            (further if n > 2**20 and when.once(who, n) else found).append(abs(of[n]))
    assert len(found) > 50 and max(found) < most
    assert all(error < 0.21 for error in further)  # of INT4


def test_the_errors_of_every_way_to_call_are_printed():
    """python bench/when.py --errors"""
    program = [sys.executable, str(ROOT / "bench/when.py"), "--errors"]
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert all(f"| {how}, % |" in printed for how in when.HOW) and "| NCCL, float32 | " in printed
