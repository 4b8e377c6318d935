"""Ranks that reach each other's memory, a process each: the bytes of the model, graphs, streams, and lost ranks."""

import pytest

import cases
from block_model import INT4, INT8
from capi import Status
from cases import Case, alternating_on_the_host, compare, expected_of_handle, on_rank
from codec_model import NONFINITE, SIGN, TRANSACTIONAL
from test_processes import KINDS, name

OVER = ["peers", "mapped peers"]
SIZES = [10_001, 300_007]


@pytest.mark.parametrize("way", OVER)
@pytest.mark.parametrize("case", KINDS, ids=name)
def test_a_handle(peers, way, case):
    ranks = peers.get()
    compare(ranks.call(on_rank, "cuda", way, cases.steps_of_handle, case), expected_of_handle(ranks.world, case))


@pytest.mark.parametrize(
    "case", [Case(), Case("bfloat16", "bfloat16"), Case("float32", None, SIGN), Case("bfloat16", "bfloat16", INT8)], ids=name
)
def test_halves_with_a_handle_created_between_them(peers, case):
    ranks = peers.get()
    compare(ranks.call(on_rank, "cuda", "peers", cases.halves_of_handle, case), expected_of_handle(ranks.world, case))


def test_memory_that_nccl_maps(peers, pytestconfig):
    """Tests windows of NCCL. examples/python/peers.py has memory of gc_share and PyTorch's symmetric memory."""
    if pytestconfig.gpus < 2:
        pytest.skip("two GPUs needed for NCCL, one found")
    ranks = peers.get()
    for case in Case(), Case("bfloat16", None, SIGN):
        found = ranks.call(cases.steps_over_source, "windows", case)
        if found == [None] * ranks.world:
            pytest.skip("NCCL is older than 2.29: its host functions do not say where the windows of others are")
        for of_each in zip(*found):
            compare(of_each, expected_of_handle(ranks.world, case))


GRAPHS = [
    Case(steps=30),
    Case("bfloat16", "bfloat16", steps=30),
    Case(codec=INT8, steps=30),
    Case(codec=INT8, nonfinite=TRANSACTIONAL, steps=10),
    Case("bfloat16", None, INT4, raw=(0, 1, 1, 0), steps=30),
    Case(error=None, codec=INT8, segments=(3000, 70), steps=200),  # uses one-shot
    Case(error=None, codec=INT8, segments=(1_000_000,), steps=3),  # uses one-shot, too, up to four ranks
]


@pytest.mark.parametrize("case", GRAPHS, ids=name)
def test_a_graph_launched_again_and_again(peers, case):
    ranks = peers.get()
    compare(ranks.call(on_rank, "cuda", "peers", cases.graph_of_handle, case), expected_of_handle(ranks.world, case))


@pytest.mark.parametrize("kind", cases.ALTERNATING)
@pytest.mark.parametrize("in_graphs, times", [(True, 1000), (False, 200)], ids=["graphs", "streams"])
def test_sizes_that_alternate(peers, in_graphs, times, kind):
    ranks = peers.get()
    found = ranks.call(cases.alternating, "peers", SIZES, times, in_graphs, kind, seconds=200)
    assert found == [alternating_on_the_host(ranks.world, SIZES, times, kind)] * ranks.world


@pytest.mark.parametrize("kind", cases.ONE_OF)
@pytest.mark.parametrize("dies", [False, True], ids=["stays away", "dies"])
def test_a_rank_that_does_not_call(peers, dies, kind):
    *others, last = peers.get().outcomes(cases.waits_in_vain, 2_000, dies, kind, seconds=60)
    assert (last.kind, last.value) == (("gone", 7) if dies else ("done", None))
    for other in others:
        assert other.kind == "done", other
        nan, flags, status, sentence, later, works = other.value
        assert (nan, flags, status, later, works) == (True, NONFINITE, Status.TIMEOUT, Status.COMM, True), other
        assert "2000 ms" in sentence


def test_an_abort_of_one_rank_ends_the_waits_of_all(peers):
    *others, last = peers.get().call(cases.aborts_while_others_wait, seconds=60)
    assert others == [(Status.COMM, Status.COMM, True)] * len(others) and last == (True,)


@pytest.mark.parametrize("kind", [kind for kind in cases.ONE_OF if "one exchange" not in kind])
def test_a_rank_that_dies_within_a_call(peers, kind):
    """Leaves one-shot out: a rank whose flag is set has sent everything, so the others' call succeeds."""
    *others, last = peers.get().outcomes(cases.dies_in_the_middle, 2_000, kind, seconds=60)
    assert (last.kind, last.value) == ("gone", 7), last
    for other in others:
        assert other.kind == "done", other
        nan, status, sentence, later, works = other.value
        assert (nan, status, later, works) == (True, Status.TIMEOUT, Status.COMM, True), other
        assert "2000 ms" in sentence


@pytest.mark.parametrize("way", OVER)
@pytest.mark.parametrize("case", [Case(steps=20), Case("bfloat16", "bfloat16", segments=(300_007, 5), steps=20)], ids=name)
def test_memory_freed_directly_after_a_call(peers, way, case):
    ranks = peers.get()
    compare(ranks.call(cases.freed_at_once, way, case), expected_of_handle(ranks.world, case))


@pytest.mark.parametrize("between", ["id", "staged pipes"])
def test_two_levels_of_gpus(peers, pytestconfig, between):
    """Tests peer memory within and NCCL or a host transport between nodes, which imitate machines of as many GPUs."""
    if between == "id" and pytestconfig.gpus < 2:
        pytest.skip("two GPUs needed for NCCL, one found")
    ranks = peers.get()
    halves = {2} if between == "id" and ranks.world % 2 == 0 else set()
    for machines in sorted({1, ranks.world, *halves}):
        one_level = machines in (1, ranks.world)
        for case in Case(), Case("bfloat16", None, SIGN if one_level else INT4), Case("float32", "bfloat16", INT8):
            found = ranks.call(cases.steps_over_two, "cuda", ("peers", between), machines, case)
            compare(found, expected_of_handle(ranks.world, case, machines))


@pytest.mark.parametrize("ways", [("id", "id"), ("staged pipes", "staged pipes"), ("peers", "peers")], ids=str)
def test_two_nodes_of_two_gpus(peers, pytestconfig, ways):
    """Tests NCCL on both levels, a host transport, and peer memory, which all GPUs of one machine have."""
    ranks = peers.get()
    if pytestconfig.gpus < 4 or ranks.world != 4:
        pytest.skip("four GPUs needed")
    for case in Case(), Case("bfloat16", "float32", INT4, raw=(0, 0, 1, 0)), Case("float16", None, INT8):
        found = ranks.call(cases.steps_over_two, "cuda", ways, 2, case)
        compare(found, expected_of_handle(ranks.world, case, 2))


def test_a_signal_ends_a_waiting_rank(peers):
    first, *others = peers.get().outcomes(cases.ends_by_a_signal, seconds=30)
    assert (first.kind, first.value) == ("gone", -15)
    assert all((other.kind, other.value) == ("done", "there") for other in others)


# No kind here uses one-shot, whose payloads are pushed only when all ranks have begun.
@pytest.mark.parametrize("kind", ["onebit", "int8"])
@pytest.mark.parametrize("where, status, is_nan", [("flags", Status.TIMEOUT, True), ("areas", Status.CORRUPT, False)])
def test_a_buffer_that_is_overwritten(peers, where, status, is_nan, kind):
    """Checks that invalid flags count as missing ones, and invalid payloads as corrupt, on all ranks."""
    ranks = peers.get()
    assert ranks.call(cases.garbage, where, 2_000, kind, seconds=60) == [(is_nan, status, True)] * ranks.world


def test_invalid_buffers(peers):
    found = peers.get().call(cases.refusals_of_buffers)[0]
    status, _, made = found.pop("good")
    assert (status, made) == (Status.OK, True)
    for what, (status, sentence, made) in found.items():
        assert (status, made) == (Status.INVALID_ARGUMENT, False), (what, sentence)
    for what, word in {"too small": "1535", "not all 0": "buffers[1]", "of the host": "buffers[1]", "rank": "rank 2"}.items():
        assert word in found[what][1], found[what]
