"""Bytes that ranks send, counted in the transport; elements of each rank's errors; sizes of peer buffers."""

import ctypes
from ctypes import POINTER, byref, c_int64

import numpy as np
import pytest

import capi
from block_model import BF16, INT8, MXFP4
from capi import lib
from codec_model import ONEBIT, SIGN
from codecs_c import Host, gradient
from comms import CheckedRanks, World, is_one_shot

SHARD = 1
MIB = 1 << 20
place = Host()


def said(handle):
    """Returns the bytes sent, the bytes sent between nodes, and the number of exchanges."""
    between = c_int64(-7)
    sent = lib.gc_allreduce_sent_bytes(handle, byref(between))
    assert sent == lib.gc_allreduce_sent_bytes(handle, None)
    return sent, between.value, lib.gc_allreduce_exchanges(handle)


def counted(board, rank):
    """Returns the bytes that a rank has sent to the others of a board, and the number of its exchanges."""
    mine = [size for _, caller, size, *_ in board.calls if caller == rank]
    return (board.world - 1) * sum(mine), len(mine)


def step(ranks, options, seed=1):
    rng = np.random.default_rng(seed)
    ranks.run([[gradient(rng, n, "float32", False) for n in options["segments"]] for _ in ranks.handles])


FLAT = [
    (dict(codec=INT8, error=None, segments=[1000, 33]), 1), (dict(codec=ONEBIT, error=None, segments=[1000]), 1),
    (dict(codec=INT8, error="float32", segments=[1000]), 2), (dict(codec=SIGN, error=None, segments=[100]), 2),
    (dict(codec=BF16, error=None, segments=[300_000]), 2), (dict(codec=MXFP4, error="bfloat16", segments=[5, 0]), 2),
]  # fmt: skip


@pytest.mark.parametrize("options, exchanges", FLAT, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_of_a_flat_world_sends_the_reported_bytes(size, options, exchanges):
    assert is_one_shot(size, options) == (exchanges == 1)
    with World(size, "board") as world, CheckedRanks(world, place, **options) as ranks:
        world.board.calls.clear()
        step(ranks, options)
        for rank, handle in enumerate(ranks.handles):
            sent, between, times = said(handle)
            assert (sent, times) == counted(world.board, rank) and (between, times) == (-1, exchanges)
            assert (lib.gc_comm_rank(world.comms[rank]), lib.gc_comm_world_size(world.comms[rank])) == (rank, size)


def test_a_single_rank_sends_nothing():
    with World(1) as world, CheckedRanks(world, place, codec=INT8, error=None, segments=[1000]) as ranks:
        assert said(ranks.handles[0]) == (0, -1, 2)
        assert (lib.gc_comm_rank(world.comms[0]), lib.gc_comm_world_size(world.comms[0])) == (0, 1)


def test_parts_are_busy_during_a_call():
    with World(2, "board") as world, CheckedRanks(world, place, codec=INT8, error="float32", segments=[100]) as ranks:
        told = []

        def before(name, rank, sent):
            told.append(lib.gc_allreduce_parts(ranks.handles[rank], rank, SHARD, None, 0))
            told.append(lib.gc_allreduce_sent_bytes(ranks.handles[rank], None))
            return sent

        world.board.before = before
        step(ranks, dict(segments=[100]))
        sent = said(ranks.handles[0])[0]
        assert sorted(told) == [-1] * 4 + [sent] * 4


def buffer_bytes(codec, elements, world, error):
    """Returns gc_allreduce_peers_bytes(), gc_codec_payload_bytes(), and True if ranks use one-shot."""
    fields = dict(struct_size=ctypes.sizeof(capi.CodecOptions), codec=codec, n_elements=elements, error=error)
    options = capi.CodecOptions(**fields, n_chunks=world)
    handle = POINTER(capi.Codec)()
    capi.check(lib.gc_codec_create(byref(options), byref(handle)))
    payload = lib.gc_codec_payload_bytes(handle)
    lib.gc_codec_free(handle)
    once = error == 2 and codec not in (ONEBIT, SIGN) and world > 1 and world * payload <= (17 * MIB // 2 if world <= 4 else MIB)
    return lib.gc_allreduce_peers_bytes(byref(options), world, 1), payload, once


@pytest.mark.parametrize("codec", [ONEBIT, INT8, BF16])
@pytest.mark.parametrize("error", [0, 2])
@pytest.mark.parametrize("world", [2, 4, 64])
def test_peer_buffers_have_the_size_in_the_header(codec, error, world):
    """Checks 2 P + 2 min(P, 8.5 MiB), one-shot 4 x world_size x P, at most 2 KiB more, at least 320 bytes a rank."""
    seen = set()
    for elements in (0, 1000, 100_000, 1_000_000, 10_000_000):
        got, payload, once = buffer_bytes(codec, elements, world, error)
        expected = 4 * world * payload if once else 2 * payload + 2 * min(payload, 17 * MIB // 2)
        assert max(expected, 320 * world) <= got <= max(expected, 320 * world) + 2048, (elements, got, expected)
        if once:
            assert got <= 34 * MIB + 2048
        seen.add((once, payload > 17 * MIB // 2))
    assert (False, True) in seen or codec == ONEBIT
