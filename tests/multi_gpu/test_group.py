"""A rank is a thread of this process: with a GPU of its own, as far as there are; otherwise ranks share GPUs."""

from ctypes import POINTER

import pytest

import cases
import driver
from block_model import INT4, INT8
from capi import Comm, Status, lib
from cases import Case, compare, expected_of_handle
from codec_model import SIGN
from codecs_c import Refused
from comms import World

KINDS = [
    Case("float32", "float32"),
    Case("bfloat16", "bfloat16"),
    Case("float16", None),
    Case("float32", None, SIGN),
    Case("float32", "float32", INT8),
    Case("bfloat16", None, INT4, raw=(0, 1, 1, 0)),
]


@pytest.fixture
def place(pytestconfig):
    """That of a rank, in the rank's thread."""
    return lambda rank: cases.OnCard(rank % pytestconfig.cards) if pytestconfig.cards else cases.OnHost()


def each(world, place, function, *arguments):
    def run(rank):
        try:
            return function(world.comms[rank], place(rank), rank, world.size, *arguments)
        except BaseException:
            leave(world, rank)  # or the others would wait for it
            raise

    return world.each(run)


def leave(world, rank):
    lib.gc_comm_free(world.comms[rank])
    world.comms[rank] = POINTER(Comm)()


@pytest.mark.parametrize("case", KINDS, ids=lambda case: f"{case.codec}, {case.values}")
def test_a_handle(group_size, place, case):
    with World(group_size) as world:
        compare(each(world, place, cases.steps_of_handle, case), expected_of_handle(group_size, case))


@pytest.fixture
def peers(group_size, pytestconfig):
    if not pytestconfig.cards:
        pytest.skip("no card: no peer memory")
    with World(group_size, "peers", devices=range(pytestconfig.cards)) as world:
        yield world


@pytest.mark.parametrize("case", KINDS, ids=lambda case: f"{case.codec}, {case.values}")
def test_a_handle_over_the_memory_of_peers(peers, place, case):
    compare(each(peers, place, cases.steps_of_handle, case), expected_of_handle(peers.size, case))


def test_large_tensors_are_those_of_a_group_on_the_cpu(group_size, place, pytestconfig):
    n = 2**25 + 3 if pytestconfig.cards else 2**20 + 3
    with World(group_size) as world, World(group_size) as on_cpu:
        found = each(world, place, cases.digest_of_handle, n, 3)
        assert found == each(on_cpu, lambda rank: cases.OnHost(), cases.digest_of_handle, n, 3)


def test_a_rank_that_is_freed_fails_the_others(group_size, place, pytestconfig):
    """And what they work on is left as it was."""
    with World(group_size) as world:

        def run(rank):
            if rank == group_size - 1:
                leave(world, rank)
                return None
            try:
                cases.steps_of_handle(world.comms[rank], place(rank), rank, group_size, cases.ONE)
            except Refused as refusal:
                return refusal.status, lib.gc_comm_async_error(world.comms[rank])
            finally:
                if pytestconfig.cards:
                    driver.synchronize()
            return None

        assert world.each(run) == [(Status.COMM, Status.COMM)] * (group_size - 1) + [None]
