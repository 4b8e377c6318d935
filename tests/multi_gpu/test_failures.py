"""Ranks that exit or are missing: the others get a status, and continue."""

import pytest

import cases
from capi import Status
from cases import compare, expected_of_handle
from ranks import Ranks

# NCCL does not notice the end of a process that it reaches through memory; over sockets it does.
OVER_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}


def test_the_exit_of_a_rank_is_reported_to_the_others(pytestconfig, on, usual):
    world = max(pytestconfig.worlds)
    if world == 1:
        pytest.skip("two GPUs needed, one found")
    with Ranks(world, OVER_SOCKETS) as ranks:
        *others, last = ranks.outcomes(cases.last_rank_exits, on, usual, 60)
        assert (last.kind, last.value) == ("gone", 7)
        for other in others:
            assert other.kind == "done", other
            status, sentence, later, works = other.value
            assert (status, later, works) == (Status.COMM, Status.COMM, True), other
            assert sentence


def test_without_one_rank_the_others_abort_and_all_continue(ranks, on):
    """Shows with one GPU, where no rank waits, only that an aborted communicator can be freed."""
    if on == "cpu":
        pytest.skip("no GPU: no communicator of NCCL's")
    waited, found = zip(*ranks.call(cases.a_rank_does_not_come, seconds=90))
    assert list(waited) == [False] + [True] * (ranks.world - 1)
    compare(found, expected_of_handle(ranks.world, cases.ONE))
