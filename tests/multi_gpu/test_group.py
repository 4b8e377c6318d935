"""Ranks as threads of this process, each with a GPU of its own, as far as there are; otherwise ranks share GPUs."""

from ctypes import POINTER

import pytest

import cases
from capi import Comm, lib
from cases import compare, expected_of_handle
from comms import World
from test_processes import KINDS, name


@pytest.fixture
def place(pytestconfig):
    """Returns a function that makes the place of a rank, for the rank's thread."""
    return lambda rank: cases.OnGpu(rank % pytestconfig.gpus) if pytestconfig.gpus else cases.OnHost()


def each(world, place, function, *arguments):
    def run(rank):
        try:
            return function(world.comms[rank], place(rank), rank, world.size, *arguments)
        except BaseException:
            lib.gc_comm_free(world.comms[rank])  # or the other ranks would wait for this one
            world.comms[rank] = POINTER(Comm)()
            raise

    return world.each(run)


@pytest.mark.parametrize("case", KINDS, ids=name)
def test_a_handle(group_size, place, case):
    with World(group_size) as world:
        compare(each(world, place, cases.steps_of_handle, case), expected_of_handle(group_size, case))


@pytest.fixture
def peers(group_size, pytestconfig):
    if not pytestconfig.gpus:
        pytest.skip("no GPU: no peer memory")
    with World(group_size, "peers", devices=range(pytestconfig.gpus)) as world:
        yield world


@pytest.mark.parametrize("case", KINDS, ids=name)
def test_a_handle_over_the_memory_of_peers(peers, place, case):
    compare(each(peers, place, cases.steps_of_handle, case), expected_of_handle(peers.size, case))
