"""Tests of communicators of two levels, on the CPU: each rank's exchanges, to the byte; each rank's elements; damaged
blocks; ranks that disagree, fail or are freed. tests/spec/test_nodes.py compares results with the model."""

import contextlib
import ctypes
import itertools
import threading
from ctypes import POINTER, byref, c_int64

import numpy as np
import pytest

import capi
from block_model import INT4, INT8
from capi import AllReduce, CodecOptions, Comm, Status, free_all, last_error, lib, says
from codec_model import NONFINITE, ONEBIT, SIGN, TAKEN_BACK, TRANSACTIONAL, f32
from codecs_c import Host, gradient, same, views
from comms import (
    KEEP_NOTHING, SEGMENTS, CheckedRanks, Nodes, World, handle_on, of_family, parts_of, run_on, status_of,
)  # fmt: skip
from test_comm import BASE, created
from tiers import both

place = Host()
GRIDS = [(2, 2), (3, 2), (2, 3), (4, 4)]


def gradients_of(rng, size, options, special=False):
    return [[gradient(rng, n, options.get("values", "float32"), special) for n in options["segments"]] for _ in range(size)]


# --- bytes that ranks send, and elements that they keep ---------------------------------------------------------------


def places_of(pieces, segments):
    """Returns the places of pieces among the elements of all segments."""
    firsts = np.concatenate([[0], np.cumsum(segments)]).astype(int)
    each = [np.arange(first, first + count) + firsts[segment] for segment, first, count in pieces]
    return np.concatenate([np.zeros(0, int), *each])


@pytest.mark.parametrize("nodes, ranks", [(1, 1), (1, 3), *both(quick=GRIDS[:3], all=GRIDS)])
def test_parts_match_the_specification(nodes, ranks):
    rng = np.random.default_rng([nodes, ranks])
    for codec in (ONEBIT, INT8, INT4, *([SIGN] if nodes == 1 else [])):
        for segments in (*SEGMENTS, [1, 1, 1, 64, 64], [33, 0, 130, 2]):
            of_codec = dict(error=None if codec == SIGN else "float32", **of_family(rng, codec, segments))
            everything = np.arange(sum(segments))
            with Nodes([ranks] * nodes, "group", "group") as world, CheckedRanks(
                world, place, codec=codec, segments=segments, **of_codec
            ) as checked:
                for handle in checked.handles[: both(quick=2, all=16)]:
                    for rank, model in enumerate(checked.models):
                        own = everything if nodes == 1 else model.worker_places()
                        same(places_of(parts_of(handle, rank, 0), segments), own, f"part of rank {rank}")
                        same(places_of(parts_of(handle, rank, 1), segments), model.shard_places(), f"shard of rank {rank}")
                found = np.concatenate([places_of(parts_of(handle, rank, 1), segments) for rank in range(world.size)])
                assert sorted(found) == everything.tolist()


class Sent:
    """Bytes that ranks send over the boards of a world: lists of (name, bytes), by rank, within and between nodes."""

    def __init__(self, world):
        self.within, self.between = ([[] for _ in range(world.size)] for _ in "wb")
        for node, one in enumerate(world.intra):
            one.board.before = self.keep(self.within, [rank for rank, (on, _) in enumerate(world.places) if on == node])
        for number, one in enumerate(world.inter):
            one.board.before = self.keep(self.between, [rank for rank, (_, of) in enumerate(world.places) if of == number])

    def keep(self, sent, ranks):
        def before(name, rank, data):
            sent[ranks[rank]].append((name, data))
            return data

        return before


def is_one_shot(model):
    """Returns True if all ranks use one-shot between nodes, without peer memory, by the payloads of part 0."""
    payloads = model.nodes * model.nodes * model.layouts[0].stride
    return model.step_3.error is None and model.nodes == 2 and payloads <= 1 << 20


@pytest.mark.parametrize("codec, error, nodes, ranks", both(
    quick=[*itertools.product(KEEP_NOTHING, [None, "float32"], [2], [2]), (ONEBIT, "float32", 3, 2), (INT4, None, 2, 3)],
    all=[(codec, error, *grid) for codec in KEEP_NOTHING for error in (None, "float32") for grid in GRIDS],
))  # fmt: skip
def test_every_step_sends_the_bytes_of_the_model(codec, error, nodes, ranks):
    rng = np.random.default_rng([codec, nodes, ranks])
    for segments in ([1000, 0, 33, 640], [1, 1, 64, 64], [3, 4]):
        dtype = str(rng.choice(["float32", "float16", "bfloat16"]))
        options = dict(codec=codec, segments=segments, error=error, values=dtype, results=dtype)
        options |= of_family(rng, codec, segments)
        with Nodes([ranks] * nodes, "board", "board") as world, CheckedRanks(world, place, **options) as checked:
            sent = Sent(world)
            checked.run(gradients_of(rng, world.size, options), [0.5, *[None] * (world.size - 1)])
            expected = checked.model.sent
            for rank, model in enumerate(checked.models):
                values, gathered = sent.within[rank]
                assert (values[0], gathered[0]) == ("all_to_all", "all_gather")
                assert len(values[1]) == ranks * model.block_bytes and len(gathered[1]) == model.gathered_bytes
                for to in set(range(ranks)) - {model.number}:
                    block = values[1][to * model.block_bytes :][: model.block_bytes]
                    same(np.frombuffer(block, np.uint8), np.frombuffer(expected["values"][rank][to], np.uint8), f"to {to}")
                chunks = np.concatenate([expected["reduced"][other] for other in checked.model.across(rank)])
                same(np.frombuffer(gathered[1], np.uint8)[: chunks.size], chunks, "reduced chunks")
                assert not any(gathered[1][chunks.size :])
                payload = expected["encoded"][rank].reshape(-1)
                if is_one_shot(model):
                    (name, data), = sent.between[rank]
                    assert name == "all_gather"
                    same(np.frombuffer(data, np.uint8), payload, "payload")
                else:
                    (first, encoded), (second, reduced) = sent.between[rank]
                    assert (first, second) == ("all_to_all", "all_gather")
                    own = slice(model.node * model.step_3.stride, (model.node + 1) * model.step_3.stride)
                    of_others = np.delete(np.frombuffer(encoded, np.uint8), own)
                    same(of_others, np.delete(payload, own), "payload")
                    same(np.frombuffer(reduced, np.uint8), expected["reduced"][rank], "reduced chunk")
                between = c_int64(-7)
                total = lib.gc_allreduce_sent_bytes(checked.handles[rank], byref(between))
                assert lib.gc_allreduce_exchanges(checked.handles[rank]) == len(sent.between[rank])
                crossed = (nodes - 1) * sum(len(data) // (nodes if name == "all_to_all" else 1) for name, data in sent.between[rank])
                assert between.value == crossed
                assert total == crossed + (ranks - 1) * (model.block_bytes + model.gathered_bytes)


def test_the_first_half_flags_ranks_of_its_part_and_the_second_half_all():
    rng, options = np.random.default_rng(9), dict(segments=[1280], values="float32")
    with Nodes([2, 2], "group", "group") as world, CheckedRanks(
        world, place, codec=INT8, nonfinite=TRANSACTIONAL, **options
    ) as ranks:
        gradients = gradients_of(rng, 4, options)
        gradients[0][0][1279] = np.nan  # an element of part 1
        shards = ranks.reduce_scatter(gradients)
        assert ranks.flags() == [0, NONFINITE, 0, NONFINITE]
        ranks.all_gather(shards)
        ranks.commit()
        assert ranks.flags() == [TAKEN_BACK | NONFINITE] * 4
        workers, server = ranks.errors()
        assert not workers.any() and not server.any()


# --- damage -----------------------------------------------------------------------------------------------------------


def damaged(world, step, sender, receiver, index):
    """Changes a byte between two ranks in a step's all_to_all. Returns the model's function for the same change."""
    (node, number), (to_node, to_number) = (divmod(rank, world.shape[1]) for rank in (sender, receiver))
    if step == "values":
        assert node == to_node
        board, place, to = world.intra[node].board, number, to_number
    else:
        assert number == to_number
        board, place, to = world.inter[number].board, node, to_node

    def before(name, rank, sent):
        if (name, rank) != ("all_to_all", place):
            return sent
        changed = bytearray(sent)
        changed[to * (len(sent) // board.world) + index] ^= 0x40
        return bytes(changed)

    def of_model(name, one, other, data):
        changed = bytearray(data)
        if (name, one, other) == (step, sender, receiver):
            changed[index] ^= 0x40
        return bytes(changed)

    board.before = before
    return of_model


HEADER_BYTES = [0, 3, 4, 6, 8, 9, 10, 11, 12, 16, 20, 24, 28, 31, 32, 40, 48, 55, 60, 63]


@pytest.mark.parametrize("step, sender, receiver", [("values", 1, 0), ("values", 2, 3), ("encoded", 0, 2), ("encoded", 3, 1)])
@pytest.mark.parametrize("codec", [ONEBIT, INT8])
def test_a_damaged_header_is_corrupt_on_all_ranks_and_the_step_can_be_taken_back(codec, step, sender, receiver):
    rng, options = np.random.default_rng(3), dict(segments=[1000, 50], values="float32")
    sound = lambda name, *given: given[-1]  # noqa: E731
    handle = dict(codec=codec, nonfinite=TRANSACTIONAL, error="float32", **options)
    with Nodes([2, 2], "board", "board") as world, CheckedRanks(world, place, **handle) as ranks:
        for half in (False, True):
            for index in both(quick=HEADER_BYTES[::4], all=HEADER_BYTES):
                ranks.run(gradients_of(rng, 4, options))
                ranks.commit()
                before, gradients = ranks.errors(), gradients_of(rng, 4, options)
                ranks.flags()
                ranks.model.before = damaged(world, step, sender, receiver, index)
                put = [[place.put(g) for g in each] for each in gradients]
                to = [place.put(np.full(model.shard_elements(), 7, f32)) for model in ranks.models]
                if half:
                    found = world.each(lambda rank: status_of(
                        lib.gc_allreduce_reduce_scatter, ranks.handles[rank], views(put[rank]), 2, None, None, to[rank].view, None
                    ))  # fmt: skip
                    expected = ranks.model.reduce_scatter(gradients)
                else:
                    found = world.each(lambda rank: status_of(
                        lib.gc_allreduce_run, ranks.handles[rank], views(put[rank]), 2, None, None, None
                    ))  # fmt: skip
                    expected = ranks.model.run(gradients)
                    assert expected == [None] * 4
                told = [Status.OK if one is not None else Status.CORRUPT for one in expected]
                assert [status for status, _ in found] == told, (index, found)
                for each, of_rank in zip(put, gradients):
                    for one, g in zip(each, of_rank):
                        same(place.get(one), g, "values")
                for one, shard in zip(to, expected if half else [None] * 4):
                    same(place.get(one), np.full(one.array.size, 7, f32) if shard is None else shard, "shard")
                ranks.flags()
                ranks.rollback()
                for one in (*world.intra, *world.inter):
                    one.board.before = sound
                ranks.model.before = sound
                for model in ranks.models:
                    model.flags = 0
                world.each(lambda rank: lib.gc_allreduce_flags(ranks.handles[rank], place.put(np.zeros(1, np.uint32)).view, None))
                for one, other in zip(ranks.errors(), before):
                    same(one, other, "errors of the step before")


# --- ranks that disagree ----------------------------------------------------------------------------------------------


class Parts(Nodes):
    """Communicators of both levels, which a test joins itself."""

    def join(self, rank):
        pass

    def make(self, parts=None):
        """Returns statuses and messages of gc_comm_hierarchical(), by rank; releases the communicators."""

        def one(rank):
            comm = POINTER(Comm)()
            found = status_of(lib.gc_comm_hierarchical, *(parts or self.parts)(rank), byref(comm))
            assert bool(comm) == (found[0] == Status.OK)
            lib.gc_comm_free(comm)
            return found

        return self.each(one)


@pytest.mark.parametrize("ranks", [[2, 1], [1, 2], [2, 2, 1]], ids=str)
@pytest.mark.parametrize("alone", [False, True])
def test_nodes_with_different_numbers_of_ranks(ranks, alone):
    """Checks that every rank gets both numbers, whether ranks without a partner pass NULL or their own world."""
    with Parts(ranks) as world, World(1, "group") as one:

        def parts(rank):
            intra, inter = world.parts(rank)
            # `last` is the only rank of the larger node with its number.
            last = max(range(world.size), key=lambda other: world.places[other][1])
            return (intra, one.comms[0]) if alone and rank == last else (intra, inter)

        found = world.make(parts)
        assert [status for status, _ in found] == [Status.INVALID_ARGUMENT] * world.size, found
        for _, sentence in found:
            assert says(sentence, f"{max(ranks)} ranks", f"has {min(ranks)}") or says(
                sentence, f"{min(ranks)} ranks", f"has {max(ranks)}"
            ), found


def all_refused(world, words, parts=None):
    """Checks that each rank refuses. `words`: by rank, words of its message."""
    found = world.make(parts)
    assert [status for status, _ in found] == [Status.INVALID_ARGUMENT] * world.size, found
    for rank, expected in words.items():
        assert says(found[rank][1], *expected), (rank, found[rank])
    assert world.make() == [(Status.OK, "")] * world.size  # both levels still work


def without(world, numbers, nodes):
    """Returns parts in which the ranks with these numbers on these nodes have no inter_node."""

    def parts(rank):
        node, number = world.places[rank]
        return world.parts(rank)[0], None if number in numbers and node in nodes else world.parts(rank)[1]

    return parts


@pytest.mark.parametrize("numbers", [(0,), (1, 2)], ids=str)
def test_ranks_without_an_inter_node_on_every_node_are_refused_everywhere(numbers):
    with Parts([3, 3]) as world:
        words = dict.fromkeys(range(6), (f"rank {numbers[0]}", "no inter_node"))
        all_refused(world, words, without(world, numbers, (0, 1)))


@pytest.mark.parametrize("number", [0, 2])
def test_one_rank_without_an_inter_node_communicator_is_refused_on_all_ranks(number):
    """Uses a short timeout: ranks with this number on other nodes wait as long as their transport does."""
    with Parts([3, 3]) as world:
        for one in world.inter:
            one.board.barrier = threading.Barrier(2, timeout=1)
        found = world.make(without(world, (number,), (1,)))
        for status, sentence in found[3:]:
            assert status == Status.INVALID_ARGUMENT and says(sentence, f"rank {number}", "no inter_node"), found
        assert all(status in (Status.INVALID_ARGUMENT, Status.COMM) for status, _ in found[:3]), found


def test_ranks_with_the_wrong_number_or_node_are_refused():
    with Parts([2, 2]) as world:
        # Exchange ranks 0 and 1 of node 1.
        def crossed(rank):
            intra, _ = world.parts(rank)
            node, number = world.places[rank]
            return intra, world.inter[number if node == 0 else 1 - number].comms[node]

        words = {0: ("inter_node", "rank 1 is rank 1", "0"), 3: ("inter_node", "rank 0 is rank 0", "1")}
        all_refused(world, words, crossed)
    with Parts([2, 2]) as one, Parts([2, 2]) as other:
        # Exchange the second nodes of two worlds, but only for ranks 1.
        def parts(rank):
            world, partner = (one, other) if rank < 4 else (other, one)
            intra, inter = world.parts(rank % 4)
            return (intra, partner.parts(3)[1]) if rank % 4 == 3 else (intra, inter)

        both = Parts.__new__(Parts)
        both.size = 8
        found = both.make(parts)
        assert [status for status, _ in found] == [Status.INVALID_ARGUMENT] * 8, found
        assert says(found[0][1], "intra_node", "rank 1", "other nodes"), found
        for world in (one, other):
            assert world.make() == [(Status.OK, "")] * 4


def test_a_repeated_or_hierarchical_part_is_refused():
    with Parts([3]) as world:
        all_refused(world, {1: ("intra_node and inter_node", "one communicator")}, lambda rank: (world.intra[0].comms[rank],) * 2)
    with Parts([4]) as world, Nodes([2, 2]) as made:
        all_refused(
            world, dict.fromkeys(range(4), ("itself hierarchical",)), lambda rank: (made.comms[rank], world.parts(rank)[1])
        )
        # A world of one node has one level.
        with Parts([2]) as pair, Nodes([2]) as one:
            found = pair.make(lambda rank: (one.comms[rank], pair.parts(rank)[1]))
            assert found == [(Status.OK, "")] * 2


def test_a_rank_with_a_null_result_makes_all_fail():
    with Parts([2, 2, 2]) as world:

        def one(rank):
            comm = POINTER(Comm)()
            return status_of(lib.gc_comm_hierarchical, *world.parts(rank), None if rank == 3 else byref(comm))

        found = world.each(one)
        assert [status for status, _ in found] == [Status.INVALID_ARGUMENT] * 6, found
        assert says(found[3][1], "out", "NULL") and says(found[2][1], "rank 1", "rejected"), found
        assert world.make() == [(Status.OK, "")] * 6


def test_handles_with_other_options_are_refused_across_nodes():
    with Nodes([2, 2]) as world:
        results = created(world, [BASE, BASE, BASE, {**BASE, "n_elements": 101}])
        assert [status for status, _ in results] == [Status.INVALID_ARGUMENT] * 4
        for rank, (_, sentence) in enumerate(results):
            other, expected, got = (0, 101, 100) if rank == 3 else (3, 100, 101)
            assert sentence == f"handle: rank {other}: {expected} elements expected, got {got}"
        assert created(world, [BASE] * 4) == [(Status.OK, "")] * 4


def test_a_vote_is_refused_on_all_ranks_of_all_nodes_and_not_on_one_level():
    options = dict(codec=SIGN, error=2, n_elements=100)
    with Nodes([2, 2]) as world:
        found = created(world, [options] * 4)
        assert [status for status, _ in found] == [Status.INVALID_ARGUMENT] * 4
        assert all(says(sentence, "GC_CODEC_SIGN") for _, sentence in found), found
        assert created(world, [BASE] * 4) == [(Status.OK, "")] * 4
    for ranks in ([2], [1, 1]):
        with Nodes(ranks) as world:
            assert created(world, [options] * 2) == [(Status.OK, "")] * 2


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("where", ["intra", "inter"])
def test_a_failure_of_one_level_fails_the_communicator(where, name):
    ways = ("board", "group") if where == "intra" else ("group", "board")
    with Nodes([2, 2], *ways) as world:
        handles = world.each(lambda rank: handle_on(world.comms[rank], 1000))
        failing = getattr(world, where)
        for one in failing:
            one.board.answer = lambda called, rank: 7 if called == name else 0
        before = np.random.default_rng(11).standard_normal(1000).astype(f32)
        values = [capi.Tensor(before.copy()) for _ in range(4)]
        results = world.each(lambda rank: run_on(handles[rank], values[rank]))
        assert [status for status, _ in results] == [Status.COMM] * 4, results
        assert any(says(sentence, name, 7) for _, sentence in results), results
        for handle, one in zip(handles, values):
            same(one.array, before, "a call that failed")
            lib.gc_allreduce_free(handle)
        for rank, comm in enumerate(world.comms):
            # The message has the rank's number in the world, not in a part.
            assert lib.gc_comm_async_error(comm) == Status.COMM and says(last_error(), f"rank {rank}"), last_error()
            assert [lib.gc_comm_async_error(part) for part in world.parts(rank)] == [Status.COMM] * 2  # both aborted


def test_a_rank_that_fails_leaves_no_rank_of_a_group_waiting():
    with Nodes([2, 2], "group", "group") as world:
        handles = world.each(lambda rank: handle_on(world.comms[rank], 100))

        def run(rank):
            if rank < 3:
                return run_on(handles[rank], capi.Tensor(np.ones(100, f32)))
            free_all([world.comms[3], *world.parts(3)])
            lib.gc_allreduce_free(handles.pop())

        found = world.each(run)
        for rank in range(3):
            assert found[rank][0] == Status.COMM, found
            assert lib.gc_comm_async_error(world.comms[rank]) == Status.COMM
        free_all(handles)
        world.comms[3] = POINTER(Comm)()
        world.intra[1].comms[1] = world.inter[1].comms[1] = POINTER(Comm)()


@pytest.mark.parametrize("creates", ["the whole", "an all-reduce"])
@pytest.mark.parametrize("where", ["intra", "inter"])
def test_an_abort_of_one_level_leaves_no_rank_waiting_on_the_other(where, creates):
    with (Parts if creates == "the whole" else Nodes)([2, 2], "group", "group") as nodes:
        assert lib.gc_comm_abort(nodes.parts(0)[where == "inter"]) == Status.OK
        options = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=ONEBIT, device=Host.device, n_elements=100)

        def create(rank):
            if creates == "the whole":
                return lib.gc_comm_hierarchical(*nodes.parts(rank), byref(POINTER(Comm)()))
            return lib.gc_allreduce_create(nodes.comms[rank], byref(options), byref(POINTER(AllReduce)()))

        assert nodes.each(create) == [Status.COMM] * 4


def test_the_communicator_reports_the_errors_of_both_levels():
    with Nodes([2, 2], "board", "group") as world:
        board = world.intra[0].board
        board.answer = lambda called, rank: 5
        assert [status for status, _ in created(world.intra[0], [BASE] * 2)] == [Status.COMM] * 2
        board.answer = lambda called, rank: 0
        assert [lib.gc_comm_async_error(comm) for comm in world.comms] == [Status.COMM, Status.COMM, Status.OK, Status.OK]


def test_both_levels_are_busy_during_a_call_and_usable_afterwards():
    options = dict(codec=ONEBIT, segments=[500])
    with (
        Nodes([2, 2], "board", "board") as world,
        CheckedRanks(world, place, **options) as whole,
        contextlib.ExitStack() as stack,
    ):
        parts = [stack.enter_context(CheckedRanks(one, place, **options)) for one in (*world.intra, *world.inter)]
        # Handles of rank 0: over the whole, within the node, and between nodes.
        handles = [ranks.handles[0] for ranks in (whole, parts[0], parts[len(world.intra)])]
        within, go_on, found = threading.Event(), threading.Event(), []

        def hold(name, rank, sent):
            if rank == 0 and name == "all_to_all" and not go_on.is_set():
                within.set()
                assert go_on.wait(60)
            return sent

        world.intra[0].board.before = hold

        def meanwhile():
            assert within.wait(60)
            found.extend(run_on(handle, capi.Tensor(np.ones(500, f32)))[0] for handle in handles)
            go_on.set()

        other = threading.Thread(target=meanwhile)
        other.start()
        rng = np.random.default_rng(2)
        whole.run([[rng.standard_normal(500).astype(f32)] for _ in range(4)])
        other.join()
        assert found == [Status.BUSY] * 3
        for ranks in parts:
            ranks.run([[rng.standard_normal(500).astype(f32)] for _ in range(2)])


@pytest.mark.parametrize("first", ["the two", "the whole"])
def test_communicators_may_be_freed_in_any_order(first):
    world = Nodes([2, 2], "group", "group")
    options = dict(codec=ONEBIT, segments=[100, 7])
    with CheckedRanks(world, place, **options) as ranks:
        if first == "the two":
            for one in (*world.intra, *world.inter):
                one.__exit__()
        else:
            free_all(world.comms)
        rng = np.random.default_rng(5)
        ranks.run([[rng.standard_normal(n).astype(f32) for n in (100, 7)] for _ in range(4)])
        ranks.errors()
    free_all(world.comms if first == "the two" else [comm for one in (*world.intra, *world.inter) for comm in one.comms])
