"""Communicators of two levels, on the CPU: the same bytes as over one communicator, what each rank exchanges for that, and
what becomes of ranks that disagree, fail or are freed."""

import contextlib
import ctypes
import threading
from ctypes import POINTER, byref

import numpy as np
import pytest

import capi
from capi import AllReduce, CodecOptions, Comm, Status, last_error, lib, says
from codec_model import ONEBIT, TRANSACTIONAL, f32
from codecs_c import Host, gradient, same
from comms import CheckedRanks, DeepSpeed, Nodes, World, handle_on, random_handle, reference, run_on, shards, status_of
from test_comm import BASE, all_same, created
from tiers import both

place = Host()

# Ranks of each node, and how many of the first lead; None: all.
SHAPES = [
    ([1, 1], None), ([2], None), ([2, 2], None), ([1, 1, 1], None), ([3, 3], None), ([4, 4], None), ([4, 4], 1),
    ([3, 3, 3], 2), ([1, 1, 1, 1], None), ([8], None), ([2, 2, 2, 2], 1), ([4, 4], 3),
]  # fmt: skip
FEW_SHAPES = [([2], None), ([2, 2], None), ([3, 3, 3], 2), ([4, 4], 1), ([1, 1, 1, 1], None)]
SHAPED = pytest.mark.parametrize("ranks, leaders", both(quick=FEW_SHAPES, all=SHAPES), ids=str)
WAYS = pytest.mark.parametrize("ways", [("group", "board"), ("board", "group"), ("board", "board")], ids="-".join)


@WAYS
@SHAPED
def test_steps_are_deepspeeds_formula_to_the_bit(ranks, leaders, ways):
    size = sum(ranks)
    rng = np.random.default_rng(ranks)
    with Nodes(ranks, *ways, leaders) as world:
        for n in (40_003, 0, 1, 7, 1025, 1023):
            found = expected = [None, [np.zeros(n, f32)] * size, [np.zeros(s.stop - s.start, f32) for s in shards(n, size)]]
            with DeepSpeed(world, n, place) as steps:
                for step in range(3):
                    buffers = [rng.standard_normal(n).astype(f32) for _ in range(size)]
                    out, *errors = reference(buffers, *expected[1:])
                    found, expected = steps.step(buffers, *found[1:]), ([out] * size, *errors)
                    all_same(found, expected, f"{n} elements, step {step}")


@SHAPED
@pytest.mark.parametrize("seed", range(both(quick=1, all=3)))
def test_a_handle_and_its_halves_are_codecs_and_two_exchanges(seed, ranks, leaders):
    rng = np.random.default_rng([seed, *ranks])
    options, size = random_handle(rng), sum(ranks)
    dtype, segments, transactional = options["values"], options["segments"], options["nonfinite"] == TRANSACTIONAL
    with Nodes(ranks, "group", "board", leaders) as world, CheckedRanks(world, place, **options) as checked:
        for step in range(3):
            special = rng.random() < 0.3
            gradients = [[gradient(rng, n, dtype, special) for n in segments] for _ in range(size)]
            factors = [float(f32(rng.choice([0.5, 2.0**-8, 3.0]))) if rng.random() < 0.3 else None for _ in "ge"]
            if step % 2:
                checked.all_gather(checked.reduce_scatter(gradients, *factors))
            else:
                checked.run(gradients, *factors)
            if transactional:
                checked.commit()
            checked.flags()
            checked.errors()


def sent(world):
    """What each rank's functions were called for, intra-node and inter-node, by number of the rank: sizes by name."""
    found = []
    for kind in (world.intra, world.inter):
        calls = {}
        for number, one in enumerate(kind):
            for name, rank, size, *_ in one.board.calls:
                calls.setdefault((number, rank), []).append((name, size))
            one.board.calls.clear()
        found.append(calls)
    return found


def test_what_goes_where_if_every_rank_leads():
    # 3 nodes of 2: chunks of 80 bytes for the header and the scale, and 1200 / 8 / 6 = 25 of bits, up to 32.
    with Nodes([2, 2, 2], "board", "board") as world, CheckedRanks(world, place, codec=ONEBIT, segments=[1200]) as checked:
        sent(world)
        checked.run([[np.ones(1200, f32)]] * 6)
        intra, inter = sent(world)
        assert len(intra) == len(inter) == 6
        # A chunk for each rank there, and one's own to all: 2 * 2 + 1 * 2 chunks leave a rank, where over one communicator
        # 4 and 4 would.
        assert all(calls == [("all_to_all", 2 * 112), ("all_gather", 112)] for calls in inter.values()), inter
        assert all(calls == [("all_to_all", 3 * 112), ("all_gather", 3 * 112)] for calls in intra.values()), intra


def test_what_goes_where_if_the_first_of_each_node_lead():
    # Chunks of 80 bytes for the header and the scale, and 1200 / 8 / 6 = 25 of bits up to 32: 112, of which 2 leaders have
    # 56 up to 64.
    with Nodes([3, 3], "board", "board", 2) as world, CheckedRanks(world, place, codec=ONEBIT, segments=[1200]) as checked:
        sent(world)
        checked.run([[np.ones(1200, f32)]] * 6)
        intra, inter = sent(world)
        assert len(intra) == 6 and len(inter) == 4
        assert all(calls == [("all_to_all", 9 * 64), ("all_gather", 3 * 64)] for calls in inter.values()), inter
        expected = [("all_to_all", 6 * 64)] * 2 + [("all_gather", 112), ("all_gather", 6 * 64)]
        assert all(calls == expected for calls in intra.values()), intra


# --- ranks that disagree ----------------------------------------------------------------------------------------------


class Parts(Nodes):
    """The communicators alone: what is made of them is up to the test."""

    def join(self, rank):
        pass

    def make(self, parts=None):
        """Statuses and sentences of gc_comm_hierarchical(), by rank; what was made is released."""

        def one(rank):
            comm = POINTER(Comm)()
            found = status_of(lib.gc_comm_hierarchical, *(parts or self.parts)(rank), byref(comm))
            assert bool(comm) == (found[0] == Status.OK)
            lib.gc_comm_free(comm)
            return found

        return self.each(one)


@pytest.mark.parametrize("ranks, leaders", [([2, 1], 1), ([1, 2], 1), ([3, 2], 2), ([2, 2, 1], 1), ([5, 3], 3)])
@pytest.mark.parametrize("alone", [False, True])
def test_nodes_with_different_numbers_of_ranks(ranks, leaders, alone):
    """Every rank is told the two numbers, whether those without a partner pass NULL or a world of their own."""
    with Parts(ranks, leaders=leaders) as world, World(1, "group") as one:

        def parts(rank):
            intra, inter = world.parts(rank)
            # A rank of the larger node that is the only one with its number there.
            last = max(range(world.size), key=lambda other: world.places[other][1])
            return (intra, one.comms[0]) if alone and rank == last else (intra, inter)

        found = world.make(parts)
        assert [status for status, _ in found] == [Status.INVALID_ARGUMENT] * world.size, found
        for _, sentence in found:
            assert says(sentence, f"{max(ranks)} ranks", f"has {min(ranks)}") or says(
                sentence, f"{min(ranks)} ranks", f"has {max(ranks)}"
            ), found


def all_refused(world, words, parts=None):
    """Each rank refuses; `words`: by rank, what its sentence says."""
    found = world.make(parts)
    assert [status for status, _ in found] == [Status.INVALID_ARGUMENT] * world.size, found
    for rank, expected in words.items():
        assert says(found[rank][1], *expected), (rank, found[rank])
    assert world.make() == [(Status.OK, "")] * world.size  # the two go on working


def test_a_rank_without_an_inter_node_before_one_that_has_it():
    with Parts([3, 3]) as world:

        def without(*numbers):
            """The ranks with these numbers on their nodes have none."""
            return lambda rank: (world.parts(rank)[0], None if rank % 3 in numbers else world.parts(rank)[1])

        all_refused(world, dict.fromkeys(range(6), ("intra_node", "rank 0", "no inter_node")), without(0))
        all_refused(world, dict.fromkeys(range(6), ("intra_node", "rank 0", "no inter_node")), without(0, 1, 2))
        all_refused(world, dict.fromkeys(range(6), ("intra_node", "rank 2", "one before it has none")), without(1))


def test_nodes_that_have_another_number_of_leaders():
    with Parts([2, 2], leaders=1) as world, World(1, "group") as alone:
        # Rank 1 leads in a world of its own.
        def parts(rank):
            return (world.parts(rank)[0], alone.comms[0]) if rank == 1 else world.parts(rank)

        words = {0: ("inter_node", "rank 1 of intra_node", 1, 2), 2: ("inter_node", "rank 0", "rejected")}
        all_refused(world, words, parts)
    with Parts([2, 2, 2], leaders=1) as world, World(2, "group") as pair:
        # Nodes 0 and 1 have two leaders, which agree that there are three nodes, as far as they can.
        def parts(rank):
            place = world.places[rank]
            return world.parts(rank)[0], pair.comms[place[0]] if place[1] and rank < 4 else world.parts(rank)[1]

        words = {0: ("inter_node", "rank 1 of intra_node", 2, 3), 4: ("inter_node", "rank 0", "rejected")}
        all_refused(world, words, parts)


def test_columns_of_ranks_with_other_numbers_or_of_other_nodes():
    with Parts([2, 2]) as world:
        # Leaders 0 and 1 of node 1 are exchanged.
        def crossed(rank):
            intra, _ = world.parts(rank)
            node, number = world.places[rank]
            return intra, world.inter[number if node == 0 else 1 - number].comms[node]

        words = {0: ("inter_node", "rank 1 is rank 1", "0"), 3: ("inter_node", "rank 0 is rank 0", "1")}
        all_refused(world, words, crossed)
    with Parts([2, 2]) as one, Parts([2, 2]) as other:
        # The second nodes of two worlds are exchanged, but only for leaders 1.
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


def test_one_of_the_two_twice_and_one_that_is_hierarchical():
    with Parts([3]) as world:
        all_refused(world, {1: ("intra_node and inter_node", "one communicator")}, lambda rank: (world.intra[0].comms[rank],) * 2)
        with Nodes([3]) as made:
            # A node of three, of which only the first leads, alone.
            def parts(rank):
                return made.comms[rank], None if rank else world.inter[0].comms[0]

            all_refused(world, dict.fromkeys(range(3), ("itself hierarchical",)), parts)


def test_a_rank_without_room_for_the_result_makes_all_fail():
    with Parts([2, 2, 2], leaders=1) as world:

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


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("where", ["intra", "inter"])
def test_a_failure_of_either_is_one_of_the_whole(where, name):
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
            assert lib.gc_comm_async_error(comm) == Status.COMM and says(last_error(), f"rank {rank}"), last_error()
            assert Status.COMM in [lib.gc_comm_async_error(part) for part in world.parts(rank)]


def test_a_rank_that_fails_leaves_nobody_of_a_group_waiting():
    with Nodes([2, 2], "group", "group") as world:
        handles = world.each(lambda rank: handle_on(world.comms[rank], 100))

        def run(rank):
            if rank < 3:
                return run_on(handles[rank], capi.Tensor(np.ones(100, f32)))
            for comm in (world.comms[3], *world.parts(3)):
                lib.gc_comm_free(comm)
            lib.gc_allreduce_free(handles.pop())

        found = world.each(run)
        for rank in range(3):
            assert found[rank][0] == Status.COMM, found
            assert lib.gc_comm_async_error(world.comms[rank]) == Status.COMM
        for handle in handles:
            lib.gc_allreduce_free(handle)
        world.comms[3] = POINTER(Comm)()
        world.intra[1].comms[1] = world.inter[1].comms[1] = POINTER(Comm)()


@pytest.mark.parametrize("creates", ["the whole", "an all-reduce"])
@pytest.mark.parametrize("where", ["intra", "inter"])
def test_a_rank_whose_part_was_aborted_leaves_nobody_waiting_over_the_other(where, creates):
    with (Parts if creates == "the whole" else Nodes)([2, 2], "group", "group") as nodes:
        assert lib.gc_comm_abort(nodes.parts(0)[where == "inter"]) == Status.OK
        options = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=ONEBIT, device=Host.device, n_elements=100)

        def create(rank):
            if creates == "the whole":
                return lib.gc_comm_hierarchical(*nodes.parts(rank), byref(POINTER(Comm)()))
            return lib.gc_allreduce_create(nodes.comms[rank], byref(options), byref(POINTER(AllReduce)()))

        assert nodes.each(create) == [Status.COMM] * 4


def test_what_one_of_the_two_knows_the_whole_says():
    with Nodes([2, 2], "board", "group") as world:
        board = world.intra[0].board
        board.answer = lambda called, rank: 5
        assert [status for status, _ in created(world.intra[0], [BASE] * 2)] == [Status.COMM] * 2
        board.answer = lambda called, rank: 0
        assert [lib.gc_comm_async_error(comm) for comm in world.comms] == [Status.COMM, Status.COMM, Status.OK, Status.OK]


def test_calls_on_the_two_are_busy_meanwhile_and_go_on_afterwards():
    options = dict(codec=ONEBIT, segments=[500])
    with (
        Nodes([2, 2], "board", "board") as world,
        CheckedRanks(world, place, **options) as whole,
        contextlib.ExitStack() as stack,
    ):
        parts = [stack.enter_context(CheckedRanks(one, place, **options)) for one in (*world.intra, *world.inter)]
        # Of rank 0: over the whole, within the node, and between nodes.
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
def test_whatever_is_freed_first(first):
    world = Nodes([2, 2], "group", "group")
    options = dict(codec=ONEBIT, segments=[100, 7])
    with CheckedRanks(world, place, **options) as ranks:
        if first == "the two":
            for one in (*world.intra, *world.inter):
                one.__exit__()
        else:
            for comm in world.comms:
                lib.gc_comm_free(comm)
        rng = np.random.default_rng(5)
        ranks.run([[rng.standard_normal(n).astype(f32) for n in (100, 7)] for _ in range(4)])
        ranks.errors()
    for one in world.comms if first == "the two" else [comm for one in (*world.intra, *world.inter) for comm in one.comms]:
        lib.gc_comm_free(one)
