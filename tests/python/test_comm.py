"""Tests of the compressed all-reduce on the CPU: against DeepSpeed's formula in NumPy and the codecs' model, with bad
input, ranks that fail, and numbers that are not finite."""

import ctypes
import os
import threading
from ctypes import POINTER, byref
from itertools import product

import numpy as np
import pytest

import capi
from block_model import INT4, INT8
from capi import AllReduce, CodecOptions, Comm, Status, Tensor, free_all, last_error, lib, says
from codec_model import CORRUPT, NONFINITE, ONEBIT, RMS, SIGN, TAKEN_BACK, TRANSACTIONAL, f32, scale_of, sigma
from codecs_c import Host, call, gradient, same, views
from comms import OF_FAMILIES, CheckedRanks, World, handle_on, run_on, status_of
from tiers import both

place = Host()
BOTH = pytest.mark.parametrize("over", ["group", "board"])


def worlds(largest):
    """Returns a parameter: sizes with what ranks exchange over, all with all, or each a few times."""
    few = [(1, "group"), (2, "board"), (3, "group"), (5, "group"), (5, "board")]
    every = product(range(1, largest + 1), ["group", "board"])
    return pytest.mark.parametrize("size, over", both(quick=few, all=every))


NAN = 0x7FC00000


# --- with the errors in tensors of the caller -------------------------------------------------------------------------


def deepspeed(buffers, workers, server):
    """Returns new buffers and errors of DeepSpeed's compressed all-reduce, as docs/ALLREDUCE.md makes it of a handle:
    errors go in before a step and out after it. Server errors are those of all elements."""
    world, n = len(buffers), buffers[0].size
    share = 8 * -(-(-(-n // 8)) // world)
    c = [b + e for b, e in zip(buffers, workers)]
    s = [scale_of(x, RMS) for x in c]
    out, kept = np.zeros(n, f32), np.zeros(n, f32)
    for shard in (slice(min(n, k * share), min(n, (k + 1) * share)) for k in range(world)):
        total = np.zeros(shard.stop - shard.start, f32)
        for scale, x in zip(s, c):
            total = total + f32(scale / f32(world)) * sigma(x[shard])
        d = total + server[shard]
        out[shard] = scale_of(d, RMS) * sigma(d)
        kept[shard] = d - out[shard]
    return out, np.stack([x - y * sigma(x) for x, y in zip(c, s)]), kept


@worlds(9)
def test_fifty_steps_are_bit_identical_to_deepspeeds_formula(size, over):
    rng = np.random.default_rng(size)
    with World(size, over) as world:
        for n in (0, 1, 7, 1023, 1025, 40_003):
            workers, server = np.zeros((size, n), f32), np.zeros(n, f32)
            with CheckedRanks(world, place, codec=ONEBIT, segments=[n], nonfinite=TRANSACTIONAL) as ranks:
                for step in range(50 if n == 1025 else 3):
                    buffers = [rng.standard_normal(n).astype(f32) for _ in range(size)]
                    ranks.errors_in(workers, server)
                    (found,) = ranks.run([[buffer] for buffer in buffers])
                    ranks.commit()
                    out, workers, server = deepspeed(buffers, workers, server)
                    for one, other in zip((found, *ranks.errors()), (out, workers, server)):
                        same(one, other, f"{n} elements, step {step}")


@BOTH
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_a_non_finite_error_becomes_zero_and_takes_no_step_back(family, over):
    rng, segments = np.random.default_rng(4), [100, 0, 1500, 70]
    options = dict(segments=segments, error="float32", nonfinite=TRANSACTIONAL, **OF_FAMILIES[family])
    with World(2, over) as world, CheckedRanks(world, place, **options) as ranks:
        for reads_flags in (False, True):
            workers, server = rng.standard_normal((2, 1670)).astype(f32), rng.standard_normal(1670).astype(f32)
            workers[0, [5, 105]], server[[4, 104]] = np.nan, -np.inf  # two segments, each raw in a family
            ranks.errors_in(workers, server)
            if reads_flags:
                assert NONFINITE in ranks.flags()
            before = ranks.errors()
            assert not before[0][0, [5, 105]].any() and not before[1][[4, 104]].any()
            ranks.run([[gradient(rng, n, "float32", False) for n in segments] for _ in range(2)])
            ranks.commit()
            assert not any(flags & TAKEN_BACK for flags in ranks.flags())
            assert (ranks.errors()[0] != before[0]).any()


# --- the halves of a step ---------------------------------------------------------------------------------------------


def test_each_half_is_one_exchange_and_a_single_rank_has_none():
    for size, expected in ((1, []), (2, ["all_to_all"] * 2 + ["all_gather"] * 2)):
        with World(size, "board") as world, CheckedRanks(world, place, codec=ONEBIT, segments=[17]) as ranks:
            world.board.calls.clear()  # drops the calls that made the handles
            ranks.all_gather(ranks.reduce_scatter([[np.ones(17, f32)]] * size))
            assert [name for name, *_ in world.board.calls] == expected


# --- steps of a handle ------------------------------------------------------------------------------------------------


BASE = dict(codec=ONEBIT, n_elements=100)
OF_BLOCKS = dict(codec=INT8, segments=capi.int64s((40, 60)), n_segments=2)
OTHERS = [
    (BASE, dict(codec=SIGN, error=2), "codec {} expected, got {}", "GC_CODEC_ONEBIT", "GC_CODEC_SIGN"),
    (BASE, dict(values=capi.dldtype("float16")), "values {} expected, got {}", "float32", "float16"),
    (BASE, dict(error=1), "error {} expected, got {}", "GC_ERROR_FLOAT32", "GC_ERROR_BFLOAT16"),
    (BASE, dict(scale=1), "scale {} expected, got {}", "GC_SCALE_RMS", "GC_SCALE_MEAN"),
    (BASE, dict(nonfinite=1), "nonfinite {} expected, got {}", "GC_NONFINITE_PROPAGATE", "GC_NONFINITE_ZERO"),
    (BASE, dict(beta=0.5), "beta {} expected, got {}", 1, 0.5),
    (BASE, dict(n_elements=101), "{} elements expected, got {}", 100, 101),
    (BASE, dict(segments=capi.int64s((40, 60)), n_segments=2, n_elements=0), "{} segments expected, got {}", 1, 2),
    (OF_BLOCKS, dict(codec=INT4), "codec {} expected, got {}", "GC_CODEC_INT8", "GC_CODEC_INT4"),
    (OF_BLOCKS, dict(reduction=1), "reduction {} expected, got {}", "GC_REDUCTION_MEAN", "GC_REDUCTION_SUM"),
    (OF_BLOCKS, dict(raw=(ctypes.c_uint8 * 2)(0, 1)), "its segments have other counts of elements, or others are raw", 0, 0),
]


def created(world, each):
    """Creates a handle with each rank's options. Returns statuses and messages; releases the handles."""
    handles = [POINTER(AllReduce)() for _ in each]

    def create(rank):
        options = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), **each[rank])
        return status_of(lib.gc_allreduce_create, world.comms[rank], byref(options), byref(handles[rank]))

    results = world.each(create)
    for handle, (status, _) in zip(handles, results):
        assert bool(handle) == (status == Status.OK)
        lib.gc_allreduce_free(handle)
    return results


@BOTH
@pytest.mark.parametrize("base, other, sentence, here, there", OTHERS)
def test_ranks_with_other_options_get_no_handle_and_then_one(base, other, sentence, here, there, over):
    with World(3, over) as world:
        results = created(world, [base, base, {**base, **other}])
        assert [status for status, _ in results] == [Status.INVALID_ARGUMENT] * 3
        # The others name the rank that differs; this rank names the first that differs from it.
        for (_, told), rank in zip(results, (2, 2, 0)):
            expected, got = (here, there) if rank == 2 else (there, here)
            assert told == f"handle: rank {rank}: " + sentence.format(expected, got)
        assert created(world, [{**base, **other}] * 3) == [(Status.OK, "")] * 3


def test_any_byte_but_0_is_raw():
    with World(2) as world:
        same_raw = [dict(raw=(ctypes.c_uint8 * 2)(0, byte)) for byte in (1, 0xFF)]
        assert created(world, [{**OF_BLOCKS, **one} for one in same_raw]) == [(Status.OK, "")] * 2


@BOTH
@pytest.mark.parametrize(
    "refused, words",
    [
        (dict(codec=9), ("codec", 9)),
        (dict(n_elements=-1), (-1,)),
        (dict(n_chunks=2), ("n_chunks", 2, 3)),
        (dict(server=2), ("server", 2)),
        (dict(results=capi.dldtype("bfloat16")), ("results", "bfloat16", "float32")),
        (dict(reserved=(ctypes.c_uint32 * 5)(0, 1)), ("offset",)),
    ],
)  # fmt: skip
def test_a_rank_whose_options_are_refused_makes_all_fail(refused, words, over):
    with World(3, over) as world:
        results = created(world, [BASE, {**BASE, **refused}, BASE])
        assert [status for status, _ in results] == [Status.INVALID_ARGUMENT] * 3
        assert says(results[1][1], *words), results[1]
        for rank in (0, 2):
            assert says(results[rank][1], "rank 1") and "could not create" in results[rank][1], results[rank]
        assert created(world, [BASE] * 3) == [(Status.OK, "")] * 3


def test_an_explicit_number_of_chunks_matches_the_default():
    with World(3) as world:
        explicit = {**BASE, "n_chunks": 3, "values": capi.dldtype("float32"), "results": capi.dldtype("float32")}
        assert created(world, [BASE, explicit, {**BASE, "beta": 1.0}]) == [(Status.OK, "")] * 3


# --- bad input, and ranks that fail -----------------------------------------------------------------------------------


def test_a_concurrent_second_call_is_refused_without_effect():
    options = dict(codec=ONEBIT, segments=[64])
    with World(2, "board") as world, CheckedRanks(world, place, **options) as ranks, \
            CheckedRanks(world, place, **options) as others:  # fmt: skip
        within, go_on, inside = threading.Event(), threading.Event(), []

        def hold(name, rank, sent):
            if rank == 0 and name == "all_to_all":
                within.set()
                assert go_on.wait(60)
            return sent

        world.board.before = hold
        comm, handle = world.comms[0], ranks.handles[0]

        def meanwhile():
            assert within.wait(60)
            within.clear()
            try:
                values, options, made = Tensor(np.ones(64, f32)), CodecOptions(112, **BASE), POINTER(AllReduce)()
                shard = Tensor(np.ones(32, f32))
                inside.append([
                    status_of(lib.gc_allreduce_create, comm, byref(options), byref(made)),
                    status_of(lib.gc_allreduce_run, handle, views([values]), 1, None, None, None),
                    status_of(
                        lib.gc_allreduce_reduce_scatter, handle, views([values]), 1, None, None, shard.view, None
                    ),
                    status_of(lib.gc_allreduce_all_gather, handle, shard.view, views([values]), 1, None),
                    status_of(lib.gc_allreduce_reset, handle, None),
                    status_of(lib.gc_comm_async_error, comm),
                ])  # fmt: skip
            finally:
                go_on.set()

        def against(run):
            go_on.clear()
            other = threading.Thread(target=meanwhile)
            other.start()
            run()
            other.join()
            return inside.pop()

        rng = np.random.default_rng(8)
        gradients = [[rng.standard_normal(64).astype(f32)] for _ in range(2)]
        *busy, handle_reset, quiet = against(lambda: others.run(gradients))  # run() compares with the model
        assert [status for status, _ in busy] == [Status.BUSY] * 4 and quiet == (Status.OK, "")
        assert all(says(sentence, "communicator") for _, sentence in busy), busy
        assert handle_reset == (Status.OK, "")  # the handle itself was idle

        *busy, quiet = against(lambda: ranks.run(gradients))
        assert [status for status, _ in busy] == [Status.BUSY] * 5 and quiet == (Status.OK, "")
        assert all(says(sentence, "handle") for _, sentence in busy[1:]), busy
        ranks.run(gradients)
        ranks.errors()


def tampered(world, rank, change):
    """Passes what rank `rank` sends in all_to_all through `change`, which is called with the chunk for each rank."""

    def before(name, sender, sent):
        if name != "all_to_all" or sender != rank:
            return sent
        chunks = [bytearray(c.tobytes()) for c in np.frombuffer(sent, np.uint8).reshape(world.size, -1)]
        for to, chunk in enumerate(chunks):
            change(to, chunk)
        return b"".join(chunks)

    world.board.before = before


def another_version(to, chunk):
    chunk[4] += 1


def another_count(to, chunk):
    chunk[32] ^= 1


def only_for_rank_0(to, chunk):
    if to == 0:
        chunk[0] ^= 0xFF


def fail_in(name):
    return lambda world: setattr(world.board, "answer", lambda called, rank: 7 if called == name else 0)


def marked(world, rank):
    """Makes rank `rank` send another version in the second exchange."""

    def before(name, sender, sent):
        chunk = bytearray(sent)
        chunk[4] += name == "all_gather" and sender == rank
        return bytes(chunk)

    world.board.before = before


@pytest.mark.parametrize("codec", [ONEBIT, SIGN])
@pytest.mark.parametrize(
    "step, statuses, spoil",
    [
        ("run", [Status.CORRUPT] * 3, lambda world: tampered(world, 1, another_version)),
        ("run", [Status.CORRUPT] * 3, lambda world: tampered(world, 1, another_count)),
        ("run", [Status.CORRUPT] * 3, lambda world: tampered(world, 1, only_for_rank_0)),
        ("run", [Status.COMM] * 3, fail_in("all_to_all")),
        ("run", [Status.COMM] * 3, fail_in("all_gather")),
        ("reduce_scatter", [Status.CORRUPT] * 3, lambda world: tampered(world, 1, another_version)),
        ("reduce_scatter", [Status.CORRUPT, Status.OK, Status.OK], lambda world: tampered(world, 1, only_for_rank_0)),
        ("reduce_scatter", [Status.COMM] * 3, fail_in("all_to_all")),
        ("all_gather", [Status.CORRUPT] * 3, lambda world: marked(world, 1)),
        ("all_gather", [Status.COMM] * 3, fail_in("all_gather")),
    ],
)
def test_a_step_or_a_half_that_fails_writes_nothing_and_can_be_taken_back(step, statuses, spoil, codec):
    rng, segments, error = np.random.default_rng(10), [1000, 50], "float32" if codec == ONEBIT else None
    options = dict(codec=codec, segments=segments, error=error, nonfinite=TRANSACTIONAL)
    with World(3, "board") as world, CheckedRanks(world, place, **options) as ranks:
        gradients = [[rng.standard_normal(n).astype(f32) for n in segments] for _ in range(3)]
        shards = ranks.reduce_scatter(gradients)
        if step != "all_gather":
            ranks.all_gather(shards)
            ranks.commit()
        ranks.flags()
        put = [[place.put(g) for g in each] for each in gradients]
        own = [place.put(shard) for shard in shards]
        sound = world.board.before, world.board.answer
        spoil(world)

        def call(rank):
            handle, values = ranks.handles[rank], views(put[rank])
            if step == "run":
                return status_of(lib.gc_allreduce_run, handle, values, 2, None, None, None)
            if step == "reduce_scatter":
                return status_of(lib.gc_allreduce_reduce_scatter, handle, values, 2, None, None, own[rank].view, None)
            return status_of(lib.gc_allreduce_all_gather, handle, own[rank].view, values, 2, None)

        results = world.each(call)
        assert [status for status, _ in results] == statuses, results
        for rank, (model, status) in enumerate(zip(ranks.models, statuses)):
            for got, e in zip((*put[rank], own[rank]), (*gradients[rank], shards[rank])):
                if status != Status.OK:
                    same(place.get(got), e, "values and shard of a call that failed")
            if status != Status.OK:
                assert lib.gc_comm_async_error(world.comms[rank]) == status and says(last_error(), "rank")
            model.flags |= CORRUPT if status == Status.CORRUPT else 0
            # The failed call has begun a step.
            which, half = (1, model.reducer) if step == "all_gather" else (0, model.worker)
            model.pending[which] = half
        # No rank has timed out. Run the second half with the ranks' shards, and then another step.
        world.board.before, world.board.answer = sound
        if step == "reduce_scatter":
            ranks.all_gather([place.get(shard) for shard in own])
        ranks.rollback()
        ranks.flags()
        ranks.errors()
        ranks.run(gradients)  # the turn of votes is as before, too
        ranks.commit()
        ranks.errors()


@pytest.mark.parametrize("name, failing", [("all_to_all", (0, 1, 2)), ("all_gather", (0, 1, 2)), ("all_gather", (1,))])
def test_a_function_that_returns_7_fails_the_call_of_its_rank_with_that_number(name, failing):
    with World(3, "board") as world, CheckedRanks(world, place, codec=ONEBIT, segments=[1000]) as ranks:
        before = np.random.default_rng(11).standard_normal(1000).astype(f32)
        values = [Tensor(before.copy()) for _ in range(3)]
        world.board.answer = lambda called, rank: 7 if called == name and rank in failing else 0
        results = world.each(lambda rank: run_on(ranks.handles[rank], values[rank]))
        for rank, (status, sentence) in enumerate(results):
            if rank in failing:
                assert status == Status.COMM and says(sentence, name, 7), sentence
                same(values[rank].array, before, f"rank {rank}")
                assert lib.gc_comm_async_error(world.comms[rank]) == Status.COMM and says(last_error(), f"rank {rank}")
            else:
                assert status == Status.OK and lib.gc_comm_async_error(world.comms[rank]) == Status.OK


@pytest.mark.parametrize("codec", [ONEBIT, INT8])
@pytest.mark.parametrize("name, n", [("all_to_all", 2_000_000), ("all_gather", 2_000_000), ("all_gather", 1000)])
def test_a_skipped_exchange_is_corrupt_and_never_the_previous_step(name, n, codec):
    with World(3, "board") as world:
        handles = world.each(lambda rank: handle_on(world.comms[rank], n, codec=codec))
        drawn = np.random.default_rng(12).standard_normal((3, n)).astype(f32)
        first = world.each(lambda rank: run_on(handles[rank], Tensor(drawn[rank].copy())))
        assert [status for status, _ in first] == [Status.OK] * 3
        world.board.skips = lambda called, rank: (called, rank) == (name, 1)
        values = [Tensor(drawn[rank].copy()) for rank in range(3)]
        results = world.each(lambda rank: run_on(handles[rank], values[rank]))
        others = Status.OK if name == "all_gather" else Status.CORRUPT  # the others receive the reduced chunk
        assert [status for status, _ in results] == [others, Status.CORRUPT, others], results
        same(values[1].array, drawn[1], "rank 1")
        free_all(handles)


def test_a_failed_exchange_of_options_creates_no_handle():
    with World(2, "board") as world:
        world.board.answer = lambda called, rank: -(2**31)
        results = created(world, [BASE] * 2)
        assert [status for status, _ in results] == [Status.COMM] * 2
        assert all(says(sentence, "all_gather", -(2**31)) for _, sentence in results)


def test_a_rank_that_is_freed_does_not_leave_the_others_waiting():
    with World(3) as world:
        handles = world.each(lambda rank: handle_on(world.comms[rank], 100))
        before = np.random.default_rng(12).standard_normal(100).astype(f32)
        values, gone = [Tensor(before.copy()) for _ in range(2)], world.comms[2]

        def run(rank):
            if rank < 2:
                return run_on(handles[rank], values[rank])
            lib.gc_comm_free(gone)
            lib.gc_allreduce_free(handles[2])
            handles[2] = POINTER(AllReduce)()

        for _ in range(2):  # the second time the others do not wait at all
            for status, sentence in world.each(run)[:2]:
                assert status == Status.COMM and says(sentence, "rank 2"), sentence
            gone = None
            assert [lib.gc_comm_async_error(world.comms[rank]) for rank in (0, 1)] == [Status.COMM] * 2
        for one in values:
            same(one.array, before, "a world without rank 2")
        world.comms[2] = POINTER(Comm)()
        free_all(handles)


def test_ranks_of_a_group_that_run_different_handles_get_an_error():
    with World(2) as world:
        few, many = (world.each(lambda rank: handle_on(world.comms[rank], n)) for n in (100, 3000))
        handles, before = (few[0], many[1]), [np.ones(n, f32) for n in (100, 3000)]
        values = [Tensor(array.copy()) for array in before]
        results = world.each(lambda rank: run_on(handles[rank], values[rank]))
        # Chunks have 80 + 7 and 80 + 188 bytes, rounded up to a multiple of 16.
        assert [status for status, _ in results] == [Status.COMM] * 2
        for rank, (own, other) in enumerate([(96, 272), (272, 96)]):
            assert says(results[rank][1], f"rank {rank}", own, f"rank {1 - rank}", other), results[rank]
            same(values[rank].array, before[rank], "ranks that disagree")
        free_all([*few, *many])


# --- leaks ------------------------------------------------------------------------------------------------------------


def in_use():
    """Returns the bytes that are mapped, and the number of open files."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def test_a_thousand_runs_leak_nothing():
    def steps(world, count):
        def work(rank):
            tensor, handle = Tensor(np.ones(30_000, f32)), handle_on(world.comms[rank], 30_000)
            for _ in range(count):
                assert run_on(handle, tensor) == (Status.OK, "")
            lib.gc_allreduce_free(handle)

        world.each(work)

    with World(2) as world:
        steps(world, 30)
        steps(world, 30)
        memory, files = in_use()
        steps(world, 1000)
        after, files_after = in_use()
    # A byte per element and run would be 60 MB.
    assert after - memory < 8 << 20 and files_after == files
