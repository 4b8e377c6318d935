"""Tests of one-shot, which small handles use if their reducer keeps nothing: the bytes of two-shot, which the model of
each rank and each chunk computes."""

import numpy as np
import pytest

from block_model import FORMATS, INT4, INT8, MXFP8
from capi import Status, lib
from codec_model import CORRUPT, NONFINITE, ONEBIT, PROPAGATE, TRANSACTIONAL, ZERO, f32
from codecs_c import Checked, Host, gradient, model_of, same, views
from comms import KEEP_NOTHING, CheckedRanks, Nodes, World, changed, is_one_shot, status_of, steps
from tiers import both

place = Host()
FEW = both(quick=[ONEBIT, INT8], all=KEEP_NOTHING)


@pytest.mark.parametrize("codec", both(quick=[INT8], all=KEEP_NOTHING))
@pytest.mark.parametrize("nodes", [2, 3])
def test_only_two_nodes_exchange_small_parts_by_one_shot(nodes, codec):
    """Checks that part 0 decides (docs/NUMERICS.md 12). In the last case part 1, a unit smaller, would fit."""
    rng, options = np.random.default_rng(nodes), dict(codec=codec, error=None)
    unit = FORMATS[codec].block if codec in FORMATS else 8
    most = largest(2, **options) // unit  # units of the largest part that two nodes exchange by one-shot
    for segments, once in (([300, 0, 7], True), ([0], True), ([2 * most * unit], True), ([(2 * most + 1) * unit], False)):
        exchanges = 1 if once and nodes == 2 else 2
        with Nodes([2] * nodes, "board", "board") as world, CheckedRanks(world, place, segments=segments, **options) as checked:
            for one in world.inter:
                one.board.calls.clear()
            checked.run([[gradient(rng, n, "float32", False) for n in segments] for _ in range(2 * nodes)])
            for rank, handle in enumerate(checked.handles):
                node, number = world.places[rank]
                names = [name for name, caller, *_ in world.inter[number].board.calls if caller == node]
                assert names == ["all_to_all", "all_gather"][-exchanges:], (segments, rank)
                assert lib.gc_allreduce_exchanges(handle) == exchanges
        if sum(segments) < 1000:
            with Nodes([2] * nodes, "board", "board") as world, CheckedRanks(world, place, segments=segments, **options) as checked:
                steps(rng, checked, {**options, "segments": segments, "values": "float32", "nonfinite": PROPAGATE}, 3)


def largest(size, **options):
    """Returns the elements of the largest segment for which ranks use one-shot."""
    low, high = 0, 1 << 26
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_one_shot(size, dict(segments=[middle], **options)) else (low, middle - 1)
    return low


@pytest.mark.parametrize("size", both(quick=[2, 5], all=[2, 3, 5, 9]))
@pytest.mark.parametrize("codec", FEW)
def test_from_a_number_of_bytes_on_two_shot_is_used(codec, size):
    options = dict(codec=codec, error=None, values="bfloat16", results="bfloat16")
    n = largest(size, **options)
    rng = np.random.default_rng(codec)
    with World(size, "board") as world:
        for elements, names in ((n, ["all_gather"]), (n + 4096 * size, ["all_to_all", "all_gather"])):
            with Checked(place, **options, segments=[elements], n_chunks=size) as codec:
                assert lib.gc_codec_exchanges(codec.handle) == len(names)
            stride = codec.model.stride
            with CheckedRanks(world, place, segments=[elements], **options) as ranks:
                world.board.calls.clear()
                ranks.run([[gradient(rng, elements, "bfloat16", False)] for _ in range(size)])
                sent = [(name, bytes) for name, rank, bytes, *_ in world.board.calls if rank == 0]
                assert sent == [(name, stride * size if len(names) == 1 else stride) for name in names]
                ranks.flags()


def test_one_shot_sends_the_payload_of_a_codec():
    rng, segments = np.random.default_rng(4), [1000, 0, 33]
    options = dict(codec=INT4, segments=segments, error=None, raw=[0, 0, 1])
    with World(3, "board") as world, CheckedRanks(world, place, **options) as ranks:
        sent = [None] * 3

        def keep(name, rank, bytes):
            sent[rank] = np.frombuffer(bytes, np.uint8)
            return bytes

        world.board.before = keep
        gradients = [[rng.standard_normal(n).astype(f32) for n in segments] for _ in range(3)]
        ranks.run(gradients)
        for rank, one in enumerate(sent):
            same(one, model_of(**options, n_chunks=3).encode(gradients[rank]), f"what rank {rank} sends")


@pytest.mark.parametrize("codec", KEEP_NOTHING)
def test_a_value_that_one_rank_sends_as_zero_is_flagged_on_all(codec):
    """Checks the header's flag: the values that arrive are finite."""
    with World(3) as world, CheckedRanks(world, place, codec=codec, segments=[300, 2000], error=None, nonfinite=ZERO) as ranks:
        gradients = [[np.ones(n, f32) for n in (300, 2000)] for _ in range(3)]
        gradients[1][1][-1] = np.inf
        ranks.run(gradients)
        assert ranks.flags() == [NONFINITE] * 3


@pytest.mark.parametrize("of_chunk", [None, 0, 2])
@pytest.mark.parametrize("index", [0, 20, 48])
@pytest.mark.parametrize("codec", [ONEBIT, INT8, MXFP8])
def test_an_invalid_payload_is_corrupt_on_every_rank_and_changes_nothing(codec, index, of_chunk):
    rng = np.random.default_rng(8)
    options = dict(codec=codec, segments=[1000, 50], error=None, nonfinite=TRANSACTIONAL)
    with World(3, "board") as world, CheckedRanks(world, place, **options) as ranks:
        gradients = [[rng.standard_normal(n).astype(f32) for n in (1000, 50)] for _ in range(3)]
        put = [[place.put(g) for g in each] for each in gradients]
        sound, world.board.before = world.board.before, changed(1, index, of_chunk)
        found = world.each(lambda rank: status_of(
            lib.gc_allreduce_run, ranks.handles[rank], views(put[rank]), 2, None, None, None
        ))  # fmt: skip
        assert [status for status, _ in found] == [Status.CORRUPT] * 3, found
        for rank, (each, model) in enumerate(zip(put, ranks.models)):
            for tensor, g in zip(each, gradients[rank]):
                same(place.get(tensor), g, "values of a step that failed")
            assert lib.gc_comm_async_error(world.comms[rank]) == Status.CORRUPT
            model.flags |= CORRUPT
        ranks.flags()
        ranks.rollback()
        for model in ranks.models:
            model.flags = 0
        # No rank has timed out.
        world.board.before = sound
        ranks.run(gradients)
        ranks.commit()


def test_a_failed_callback_fails_its_call_but_not_the_next_call():
    with World(3, "board") as world, CheckedRanks(world, place, codec=INT8, segments=[70], error=None) as ranks:
        world.board.answer = lambda name, rank: 7 if rank == 1 else 0
        put = [[place.put(np.ones(70, f32))] for _ in range(3)]
        found = world.each(lambda rank: status_of(
            lib.gc_allreduce_run, ranks.handles[rank], views(put[rank]), 1, None, None, None
        ))  # fmt: skip
        assert [status for status, _ in found] == [Status.OK, Status.COMM, Status.OK], found
        assert found[1][1] == "all_gather: the transport's function returned 7"
        world.board.answer = lambda name, rank: 0
        ranks.run([[np.ones(70, f32)] for _ in range(3)])


def test_a_half_during_a_run_is_an_error_on_both_ranks():
    """Calls the first half on one rank and a run on the other: over a group both errors name the difference."""
    with World(2) as world, CheckedRanks(world, place, codec=INT8, segments=[300], error=None) as ranks:
        put = [place.put(np.ones(300, f32)) for _ in range(2)]
        shard = place.put(np.ones(ranks.models[1].shard_elements(), f32))

        def one(rank):
            mine = ranks.handles[rank], views([put[rank]]), 1, None, None
            if rank:
                return status_of(lib.gc_allreduce_reduce_scatter, *mine, shard.view, None)
            return status_of(lib.gc_allreduce_run, *mine, None)

        found = world.each(one)
        assert [status for status, _ in found] == [Status.COMM] * 2, found
        assert "AllGather" in found[0][1] and "AllToAll" in found[1][1] and "same order" in found[0][1], found


def test_if_one_rank_cannot_use_one_shot_no_rank_does():
    options = dict(codec=INT8, segments=[300, 40], error=None)
    with World(3, "board") as world:

        def unable(name, rank, sent):
            record = bytearray(sent)
            assert record[38] == 1  # after the bytes that ranks compare
            record[38] = rank != 2
            return bytes(record)

        sound, world.board.before = world.board.before, unable
        with CheckedRanks(world, place, **options) as ranks:
            world.board.before = sound
            world.board.calls.clear()
            rng = np.random.default_rng(2)
            for _ in range(2):
                ranks.run([[rng.standard_normal(n).astype(f32) for n in (300, 40)] for _ in range(3)])
            names = [name for name, rank, *_ in world.board.calls if rank == 0]
            assert names == ["all_to_all", "all_gather"] * 2
