"""All-reduces by a handle, on the CPU and on the device, over each transport: every rank is compared with the model of
a codec. Streams, captures and memory are tested with ranks of one GPU."""

import os

import numpy as np
import pytest

import driver
import gpu
from arena import Arena
from block_model import FORMATS
from capi import Status
from codec_model import NONFINITE, ONEBIT, PROPAGATE, SIGN, TAKEN_BACK, TRANSACTIONAL, ZERO, f32
from codecs_c import Host, Refused, call, gradient, same, views
from comms import (
    KEEP_NOTHING, OF_FAMILIES, CheckedRanks, World, is_one_shot, of_family, random_handle, steps,
)  # fmt: skip
from tiers import both

ROOM = gpu.sized(gpu=64 << 20, quick=1 << 20, all=1 << 20)  # bytes of a rank's buffer, over peer memory
WAYS = {
    "cpu-group": ("group",), "cpu-board": ("board",),
    "cuda-group": ("group",), "cuda-host transport": ("board", 1), "cuda-peers": ("peers", 0, ROOM),
}  # fmt: skip


@pytest.fixture(params=WAYS)
def over(request):
    """Returns the place of operands, and a function that makes a world of a given size."""
    way = WAYS[request.param]
    if request.param.startswith("cpu"):
        return Host(), lambda size: World(size, *way)
    arena = request.getfixturevalue("memory")
    arena.start_again()
    return arena, lambda size: World(size, *way)


@pytest.fixture
def arena(memory):
    memory.start_again()
    return memory


def worlds(seeds, largest=9):
    """Returns a parameter: ways, sizes of a world, and seeds, each with all others; or a few, fewer over callbacks."""
    few = [(1, 0), (2, 1), (3, 2), (5, 3)]
    quick = [(way, *one) for way in WAYS for one in (few[1:3] if "board" in WAYS[way] else few)]
    every = [(way, size, seed) for way in WAYS for size in range(1, largest + 1) for seed in range(seeds)]
    return pytest.mark.parametrize("over, size, seed", both(quick=quick, all=every), indirect=["over"])


def handle_for(place, rng, seed):
    """Returns random options; on a GPU, for every second seed, with more elements."""
    options = random_handle(rng)
    if isinstance(place, Arena) and not driver.IS_STAND_IN and seed % 2:
        segments = [100_003, 0, 7, 200_000]
        options |= dict(segments=segments, **of_family(rng, options["codec"], segments))
    return options


def start_again(place):
    if isinstance(place, Arena):
        place.start_again()


@worlds(seeds=12)
def test_a_handle_is_a_codec_for_each_rank_and_two_exchanges(over, size, seed):
    rng = np.random.default_rng([seed, size])
    place, world_of = over
    options = handle_for(place, rng, seed)
    with world_of(size) as world, CheckedRanks(world, place, **options) as ranks:
        for step in range(5):
            start_again(place)
            special = rng.random() < 0.3
            dtype, segments = options["values"], options["segments"]
            gradients = [[gradient(rng, n, dtype, special) for n in segments] for _ in range(size)]
            factors = [float(f32(rng.choice([0.5, 2.0**-8, 3.0]))) if rng.random() < 0.3 else None for _ in "ge"]
            ranks.run(gradients, *factors, aligned=rng.random() < 0.7)
            if options["nonfinite"] == TRANSACTIONAL:
                skips = [None, np.array([rng.random() < 0.5]), np.array([3], np.int32), np.array([0], f32)]
                ranks.commit(skips[rng.integers(0, 4)])
            ranks.flags()
            ranks.errors()
        if options["nonfinite"] == TRANSACTIONAL:
            ranks.run(gradients)
            ranks.rollback()
            ranks.flags()
            ranks.errors()
        ranks.reset()
        workers, server = ranks.errors()
        assert not workers.any() and not server.any()


@worlds(seeds=8)
def test_the_two_halves_with_the_same_shard_are_bit_identical_to_a_run(over, size, seed):
    rng = np.random.default_rng([1, seed, size])
    place, world_of = over
    options = handle_for(place, rng, seed)
    dtype, segments, transactional = options["values"], options["segments"], options["nonfinite"] == TRANSACTIONAL
    with (
        world_of(size) as world,
        CheckedRanks(world, place, **options) as whole,
        CheckedRanks(world, place, **options) as halves,
    ):
        for step in range(both(quick=3, all=5)):
            start_again(place)
            special = rng.random() < 0.3
            gradients = [[gradient(rng, n, dtype, special) for n in segments] for _ in range(size)]
            factors = [float(f32(rng.choice([0.5, 2.0**-8, 3.0]))) if rng.random() < 0.3 else None for _ in "ge"]
            expected = whole.run(gradients, *factors)
            aligned = rng.random() < 0.5
            got = halves.all_gather(halves.reduce_scatter(gradients, *factors, aligned=aligned), aligned=aligned)
            for one, other in zip(got, expected):
                same(one, other, f"step {step}")
            if transactional and rng.random() < 0.7:  # otherwise the next step commits
                skip = [None, np.array([rng.random() < 0.5])][rng.integers(0, 2)]
                for ranks in (whole, halves):
                    ranks.commit(skip)
            if not transactional or step % 2:
                assert whole.flags() == halves.flags()
        if transactional:
            for ranks in (whole, halves):
                ranks.commit()
        assert whole.flags() == halves.flags()
        for one, other in zip(whole.errors(), halves.errors()):
            same(one, other, "errors")


def optimizer(rng, special):
    """Returns a function that changes a shard before it is sent to all, as its owner's step does."""

    def step(shard):
        changed = shard * f32(-0.1) + f32(0.01) * rng.standard_normal(shard.size).astype(f32)
        if special and shard.size:
            changed[rng.integers(0, shard.size)] = rng.choice(np.array([np.inf, -np.inf, np.nan, 3e38, -0.0], f32))
        return changed

    with np.errstate(all="ignore"):
        return step


@worlds(seeds=8)
def test_halves_match_the_formula_for_any_shard_and_order(over, size, seed):
    rng = np.random.default_rng([2, seed, size])
    place, world_of = over
    options = handle_for(place, rng, seed)
    dtype, segments, transactional = options["values"], options["segments"], options["nonfinite"] == TRANSACTIONAL
    with world_of(size) as world, CheckedRanks(world, place, **options) as ranks:
        shards = [np.ones(model.shard_elements(), f32) for model in ranks.models]
        for _ in range(14):
            start_again(place)
            call_it, special, aligned = rng.integers(0, 5 + transactional), rng.random() < 0.2, rng.random() < 0.5
            gradients = [[gradient(rng, n, dtype, special) for n in segments] for _ in range(size)]
            if call_it == 0:
                if transactional:  # the halves that stay pending differ for one-shot
                    ranks.commit()
                ranks.run(gradients, aligned=aligned)
                if transactional:
                    ranks.commit()
            elif call_it <= 2:
                with np.errstate(all="ignore"):
                    shards = list(map(optimizer(rng, special), ranks.reduce_scatter(gradients, aligned=aligned)))
            elif call_it <= 4:
                ranks.all_gather(shards, aligned=aligned)
            elif rng.random() < 0.3:
                ranks.rollback()
            else:
                ranks.commit()
            if all(model.pending == [None, None] for model in ranks.models):
                ranks.errors()
            ranks.flags()


@pytest.mark.parametrize("codec", [ONEBIT, SIGN])
def test_halves_without_segments_do_nothing(over, codec):
    place, world_of = over
    options = dict(codec=codec, segments=[], values="float32", results="float32", error=None, nonfinite=TRANSACTIONAL)
    with world_of(2) as world, CheckedRanks(world, place, **options) as ranks:
        ranks.all_gather(ranks.reduce_scatter([[], []]))
        ranks.commit()
        ranks.flags()


def test_each_half_of_a_step_is_committed_or_taken_back_separately(over):
    place, world_of = over
    rng, segments = np.random.default_rng(13), [300, 7, 2000]
    options = dict(codec=ONEBIT, segments=segments, error="float32", nonfinite=TRANSACTIONAL)
    with world_of(3) as world, CheckedRanks(world, place, **options) as ranks:

        def scatter():
            return ranks.reduce_scatter([[rng.standard_normal(n).astype(f32) for n in segments] for _ in range(3)])

        shards = scatter()
        ranks.all_gather(shards)
        ranks.commit()
        workers, server = ranks.errors()
        for end, kept in ((ranks.rollback, True), (ranks.commit, False)):
            scatter()
            end()
            new_workers, new_server = ranks.errors()
            same(new_server, server, "the server's errors after the first half")
            assert np.array_equal(new_workers, workers) == kept
        workers = new_workers
        for end, kept in ((ranks.rollback, True), (ranks.commit, False)):
            ranks.all_gather(shards)
            end()
            new_workers, new_server = ranks.errors()
            same(new_workers, workers, "the workers' errors after the second half")
            assert np.array_equal(new_server, server) == kept
        server = new_server
        ranks.all_gather(scatter())
        ranks.rollback()
        for one, before in zip(ranks.errors(), (workers, server)):
            same(one, before, "errors after both halves")


@pytest.mark.parametrize("codec", [ONEBIT, SIGN, *FORMATS])
def test_an_infinity_on_one_rank_takes_the_step_back_on_all(over, codec):
    place, world_of = over
    rng, segments = np.random.default_rng(5), [300, 2000]
    error = None if codec == SIGN else "float32"
    options = dict(codec=codec, segments=segments, error=error, nonfinite=TRANSACTIONAL)
    with world_of(3) as world, CheckedRanks(world, place, **options) as ranks:

        def step(infinite):
            gradients = [[rng.standard_normal(n).astype(f32) for n in segments] for _ in range(3)]
            if infinite:
                gradients[1][0][17] = np.inf
            ranks.run(gradients)

        step(False)
        ranks.commit()
        assert ranks.flags() == [0] * 3
        before = ranks.errors()
        step(True)
        ranks.commit()
        assert ranks.flags() == [NONFINITE | TAKEN_BACK] * 3
        for one, other in zip(ranks.errors(), before):
            same(one, other, "errors of the step before")
        step(False)
        ranks.commit(np.array([True]))
        assert ranks.flags() == [TAKEN_BACK] * 3
        for one, other in zip(ranks.errors(), before):
            same(one, other, "errors of the step before")


@pytest.mark.parametrize("old, new, error", both(
    quick=[(2, 3, "float32"), (3, 3, "bfloat16"), (4, 1, "float32")],
    all=[(*sizes, error) for sizes in ((3, 3), (2, 3), (4, 1), (1, 3), (3, 5)) for error in ("float32", "bfloat16")],
))  # fmt: skip
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_errors_are_kept_in_a_world_of_any_size(over, old, new, error, family):
    """Hands errors of `old` ranks over to `new` ranks."""
    (place, world_of), rng, segments = over, np.random.default_rng(6), [100, 0, 1500, 70]
    options = dict(segments=segments, error=error, **OF_FAMILIES[family])

    def gradients(size):
        return [[rng.standard_normal(n).astype(f32) for n in segments] for _ in range(size)]

    with world_of(old) as world, CheckedRanks(world, place, **options) as ranks:
        for _ in range(3):
            ranks.run(gradients(old))
        workers, server = ranks.errors()
    with world_of(new) as world, CheckedRanks(world, place, **options) as ranks:
        ranks.run(gradients(new))  # errors_in() replaces these errors
        ranks.errors_in(workers, server)
        got_workers, got_server = ranks.errors()
        if error == "float32":
            same(got_server, server, "the server's errors, cut anew")
            expected = np.stack([ranks.model.of_rows(workers, rank) for rank in range(new)])
            same(got_workers, expected, "the workers' errors")
        ranks.run(gradients(new))
        ranks.errors()
        kept = ranks.errors()[0]
        ranks.errors_in(None, server)
        if error == "float32":
            same(ranks.errors()[0], kept, "the workers' errors, where only the server's are put in")


@pytest.mark.parametrize("policy", [PROPAGATE, ZERO, TRANSACTIONAL])
def test_non_finite_values_in_a_shard_match_the_mean(over, policy):
    (place, world_of), rng, segments = over, np.random.default_rng(2), [1500, 3, 9000]
    for kind, error in (ONEBIT, "bfloat16"), (SIGN, None):
        start_again(place)
        options = dict(codec=kind, segments=segments, error=error, nonfinite=policy)
        with world_of(2) as world, CheckedRanks(world, place, **options) as ranks:
            for value in 1, np.inf, -np.inf, np.nan, 3e38, 1:
                shards = ranks.reduce_scatter([[rng.standard_normal(n).astype(f32) for n in segments] for _ in range(2)])
                shards[1][1000] = value
                ranks.all_gather(shards)
                if policy == TRANSACTIONAL:
                    ranks.commit()
                ranks.flags()
                ranks.errors()


@pytest.mark.parametrize("size, seed", both(
    quick=[(2, 0), (3, 1), (5, 2)], all=[(size, seed) for size in range(2, 10) for seed in range(12)]
))  # fmt: skip
def test_one_shot_and_two_shot_compute_the_same_bytes(over, size, seed):
    place, world_of = over
    rng = np.random.default_rng([seed, size])
    options = {**random_handle(rng, KEEP_NOTHING), "error": None}
    assert is_one_shot(size, options)
    with world_of(size) as world, CheckedRanks(world, place, **options) as ranks:
        steps(rng, ranks, options)


# --- ranks of one GPU -------------------------------------------------------------------------------------------------


def streams_of(size):
    return [driver.Stream() for _ in range(size)]


def run(ranks, put, streams, rank):
    call("gc_allreduce_run", ranks.handles[rank], views([put[rank]]), 1, None, None, streams[rank].handle)


def test_calls_return_while_the_gpu_works(arena, gate):
    """Runs two ranks of a context while a kernel runs: an allocation or release on the GPU would wait for it."""
    n, size, rng, streams = 300_001, 2, np.random.default_rng(6), streams_of(2)
    gradients = [[rng.standard_normal(n).astype(f32)] for _ in range(size)]
    with World(size) as world, CheckedRanks(world, arena, codec=ONEBIT, segments=[n]) as ranks:
        put = [[arena.put(of_rank[0]) for of_rank in gradients] for _ in range(2)]
        driver.synchronize()
        with gate.closed(streams[0].handle):
            for of_step in put:
                world.each(lambda rank: run(ranks, of_step, streams, rank))
            assert not driver.Event(streams[0].handle).done(), "the gate was open"
        driver.synchronize()
        for of_step in put:
            ranks.decoded([[one] for one in of_step], ranks.reduced(gradients))
    for stream in streams:
        stream.destroy()


@pytest.mark.gpu
def test_a_group_does_not_become_part_of_a_graph(arena, stream):
    with World(2) as world, CheckedRanks(world, arena, codec=ONEBIT, segments=[1000]) as ranks:
        values = arena.put(np.zeros(1000, f32))
        driver.synchronize()
        with driver.Graph(stream) as graph:
            with pytest.raises(Refused) as refusal:
                call("gc_allreduce_run", ranks.handles[0], views([values]), 1, None, None, stream)
        assert refusal.value.status == Status.INVALID_ARGUMENT and "captured" in str(refusal.value)
        assert graph.nodes() == []
        graph.destroy()


@pytest.mark.gpu
def test_a_thousand_runs_leave_the_memory_as_it_was(arena):
    streams = streams_of(2)
    with World(2) as world, CheckedRanks(world, arena, codec=ONEBIT, segments=[10_000]) as ranks:
        put = [arena.put(np.ones(10_000, f32)) for _ in range(2)]
        driver.synchronize()

        def runs(rank):
            for _ in range(500):
                run(ranks, put, streams, rank)
            driver.wait_for(streams[rank].handle)

        world.each(runs)
        before = driver.free_bytes(), len(os.listdir("/proc/self/fd"))
        world.each(runs)
        assert (driver.free_bytes(), len(os.listdir("/proc/self/fd"))) == before
    for stream in streams:
        stream.destroy()
