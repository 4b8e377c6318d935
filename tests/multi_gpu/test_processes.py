"""Ranks as processes, each with its own GPU. All bytes must be those of NumPy's models, which exchange in Python."""

import pytest

import cases
from block_cases import NAMES
from block_model import INT4, INT8
from cases import Case, compare, expected_of_handle, on_rank
from codec_model import NONFINITE, ONEBIT, SIGN, TAKEN_BACK, TRANSACTIONAL
from comms import World

KINDS = [
    Case("float32", "float32"),
    Case("bfloat16", "bfloat16"),
    Case("bfloat16", "float32"),
    Case("float16", "float32"),
    Case("float16", None),
    Case("float32", None, SIGN),
    Case("bfloat16", None, SIGN),
    Case("float32", "float32", INT8),
    Case("bfloat16", None, INT4, raw=(0, 1, 1, 0)),
    Case(segments=(1,)),
    Case(segments=tuple(range(40))),
]


def name(case):
    codec = {ONEBIT: "onebit", SIGN: "sign", **NAMES}[case.codec]
    return f"{codec} {case.values}, errors {case.error}, {len(case.segments)} segments"


def usable(ranks, over):
    if over.startswith("torch") and not all(ranks.call(cases.shows_its_communicator)):
        pytest.skip("this torch does not show its communicator")


def test_every_communicator_computes_the_bytes_of_the_model(ranks, on, over):
    usable(ranks, over)
    case = Case()
    compare(ranks.call(on_rank, on, over, cases.steps_of_handle, case), expected_of_handle(ranks.world, case))


def test_two_levels(ranks, on, usual):
    """Tests one node with all ranks, and a node for each rank; tests/multi_gpu/test_peers.py has other numbers."""
    for machines in sorted({1, ranks.world}):
        found = ranks.call(cases.steps_over_two, on, (usual, usual), machines, Case())
        compare(found, expected_of_handle(ranks.world, Case()))


@pytest.mark.parametrize("case", KINDS, ids=name)
def test_a_handle(ranks, on, usual, case):
    compare(ranks.call(on_rank, on, usual, cases.steps_of_handle, case), expected_of_handle(ranks.world, case))


def test_a_non_finite_step_of_one_rank_is_taken_back_on_all(ranks, on, usual):
    case = Case(nonfinite=TRANSACTIONAL, infinite=2)
    expected = expected_of_handle(ranks.world, case)
    assert [int(of_rank[-1][2][0]) for of_rank in expected] == [NONFINITE | TAKEN_BACK] * ranks.world
    compare(ranks.call(on_rank, on, usual, cases.steps_of_handle, case), expected)


def test_a_large_result_matches_a_group_on_the_cpu(ranks, on, usual):
    n, steps = (2**26 + 3 if on == "cuda" else 2**20 + 3), 3
    found = ranks.call(on_rank, on, usual, cases.digest_of_handle, n, steps)
    with World(ranks.world) as group:
        host = cases.OnHost()
        expected = group.each(lambda rank: cases.digest_of_handle(group.comms[rank], host, rank, ranks.world, n, steps))
    assert found == expected and len(set(found)) == 1


@pytest.mark.parametrize("case", [Case(steps=30), Case("bfloat16", "bfloat16", steps=30)], ids=name)
def test_a_graph_launched_again_and_again(ranks, on, over, case):
    if on == "cpu":
        pytest.skip("no GPU: nothing to capture")
    usable(ranks, over)
    compare(ranks.call(on_rank, on, over, cases.graph_of_handle, case), expected_of_handle(ranks.world, case))


def test_a_call_on_a_stream_does_not_wait_for_it(ranks, on, usual):
    if on == "cpu":
        pytest.skip("no GPU: no stream")
    assert ranks.call(on_rank, on, usual, cases.is_held_back) == [True] * ranks.world


def test_a_captured_non_finite_step_is_taken_back(ranks, on, usual):
    if on == "cpu":
        pytest.skip("no GPU: nothing to capture")
    case = Case(nonfinite=TRANSACTIONAL, infinite=2, steps=6)
    compare(ranks.call(on_rank, on, usual, cases.graph_of_handle, case), expected_of_handle(ranks.world, case))
