"""Ranks that share a GPU: the compressed all-reduces there, against DeepSpeed's formula in NumPy and against the CPU."""

import ctypes
import os
from ctypes import POINTER, byref, c_int64

import numpy as np
import pytest

import capi
import driver
import gpu
from capi import CPU, CUDA, CodecOptions, DLDevice, Status, lib
from block_model import FORMATS
from card import Card
from codec_model import NONFINITE, TAKEN_BACK, TRANSACTIONAL
from codecs_c import Host, Refused, call, gradient, same, views
from comms import OF_FAMILIES, CheckedRanks, World, errors_go_on, random_handle, reference, shards
from tiers import both


@pytest.fixture(scope="module")
def card():
    driver.use(driver.primary())
    return Card(256 << 20)


@pytest.fixture(autouse=True)
def start_again(card):
    card.start_again()


class Streams:
    """One for each rank, not ordered with each other."""

    def __init__(self, count):
        self.streams = [driver.Stream() for _ in range(count)]

    def __enter__(self):
        return [stream.handle for stream in self.streams]

    def __exit__(self, *_):
        for stream in self.streams:
            stream.destroy()


def filled(server, n, world):
    return np.concatenate([server, np.full(lib.gc_shard_elements(n, world) - server.size, 7, "f4")])


@pytest.mark.parametrize("over", [("group",), ("board", 1), ("peers",)], ids=["group", "host transport", "peers"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_on_one_card_compute_deepspeeds_formula(card, size, over):
    rng = np.random.default_rng(size)
    with World(size, *over) as world, Streams(size) as streams:
        for n in 1_000_003, 0, 7, 8193, 100_000:
            card.start_again()
            workers = [np.zeros(n, "f4") for _ in range(size)]
            servers = [np.zeros(s.stop - s.start, "f4") for s in shards(n, size)]
            put_workers = [card.put(w) for w in workers]
            put_servers = [card.put(filled(s, n, size)) for s in servers]
            for step in range(4):
                buffers = [rng.standard_normal(n).astype("f4") for _ in range(size)]
                if step == 2 and n:
                    buffers[0][n // 3] = np.inf
                put = [card.put(b) for b in buffers]
                driver.synchronize()
                out, workers, servers = reference(buffers, workers, servers)

                def run(rank):
                    views = [x[rank].view for x in (put, put_workers, put_servers)]
                    call("gc_compressed_allreduce", world.comms[rank], *views, streams[rank])

                world.each(run)
                for rank in range(size):
                    same(card.get(put[rank]), out, f"{n}, {step}: buffer of {rank}")
                    same(card.get(put_workers[rank]), workers[rank], f"{n}, {step}: worker error of {rank}")
                    same(card.get(put_servers[rank]), filled(servers[rank], n, size), f"{n}, {step}: server error")


class Handles:
    """The same all-reduce on every rank of a world."""

    def __init__(self, world, device, segments, values="float32", error=0, codec=1, nonfinite=0):
        self.world = world
        counts = (c_int64 * len(segments))(*segments)
        options = CodecOptions(
            struct_size=ctypes.sizeof(CodecOptions), codec=codec, device=device, values=capi.dldtype(values), error=error,
            nonfinite=nonfinite, segments=counts, n_segments=len(segments),
        )  # fmt: skip

        def make(rank):
            handle = POINTER(capi.AllReduce)()
            call("gc_allreduce_create", world.comms[rank], byref(options), byref(handle))
            return handle

        self.handles = world.each(make)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            lib.gc_allreduce_free(handle)

    def run(self, values, streams):
        """`values[rank]`: a tensor for each segment."""

        def one(rank):
            call("gc_allreduce_run", self.handles[rank], views(values[rank]), len(values[rank]), None, None, streams[rank])

        self.world.each(one)


@pytest.mark.parametrize("values, error", [("float32", 0), ("bfloat16", 1), ("float16", 2)])
@pytest.mark.parametrize("codec", [1, 2], ids=["onebit", "sign"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_handle_on_the_card_is_that_on_the_cpu_to_the_bit(card, size, codec, values, error):
    rng = np.random.default_rng(size)
    segments = [100_003, 0, 7, 20_000]
    dtype = "bfloat16" if values == "bfloat16" else None
    error = 2 if codec == 2 else error
    cuda, cpu = DLDevice(CUDA, 0), DLDevice(CPU, 0)
    with World(size) as there, World(size) as here, Streams(size) as streams:
        with (
            Handles(there, cuda, segments, values, error, codec) as on_card,
            Handles(here, cpu, segments, values, error, codec) as on_cpu,
        ):
            for step in range(5):
                gradients = [[gradient(rng, n, values, step == 3) for n in segments] for _ in range(size)]
                put = [[card.put(g, dtype) for g in of_rank] for of_rank in gradients]
                expected = [[Host().put(g, dtype) for g in of_rank] for of_rank in gradients]
                driver.synchronize()
                on_card.run(put, streams)
                on_cpu.run(expected, [None] * size)
                for rank in range(size):
                    for got, want in zip(put[rank], expected[rank]):
                        same(card.get(got), want.array, f"step {step}, rank {rank}")


@pytest.mark.parametrize("values, error", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", None)])
@pytest.mark.parametrize("codec", [1, 2], ids=["onebit", "sign"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_halves_on_the_card_are_a_run_and_what_the_formula_says(card, size, codec, values, error):
    rng, segments = np.random.default_rng(size), [100_003, 0, 7, 200_000]
    error = None if codec == 2 else error
    options = dict(codec=codec, segments=segments, values=values, results=values, error=error, nonfinite=TRANSACTIONAL)
    with (
        World(size) as world,
        CheckedRanks(world, card, **options) as whole,
        CheckedRanks(world, card, **options) as halves,
    ):
        for step in range(6):
            card.start_again()
            gradients = [[gradient(rng, n, values, step == 2) for n in segments] for _ in range(size)]
            # Shards at an address that is not aligned to 16, too.
            shards, aligned = halves.reduce_scatter(gradients, aligned=step % 2 == 0), step % 2 == 0
            if step < 4:
                for one, other in zip(halves.all_gather(shards, aligned=aligned), whole.run(gradients)):
                    same(one, other, f"step {step}")
            else:  # what the optimizer made of them
                with np.errstate(all="ignore"):
                    halves.all_gather([np.float32(-0.1) * shard for shard in shards], aligned=aligned)
            halves.commit()
            halves.errors()
            if step < 4:
                whole.commit()
                assert halves.flags() == whole.flags()


@pytest.mark.parametrize("codec", [1, 2], ids=["onebit", "sign"])
def test_halves_without_segments_are_of_nothing(card, codec):
    options = dict(codec=codec, segments=[], values="float32", results="float32", error=None, nonfinite=TRANSACTIONAL)
    with World(2) as world, CheckedRanks(world, card, **options) as ranks:
        ranks.all_gather(ranks.reduce_scatter([[], []]))
        ranks.commit()
        ranks.flags()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_halves_of_block_codecs_on_the_card_are_a_run_and_what_the_page_says(card, size):
    for seed in range(both(quick=5, all=20)):
        rng = np.random.default_rng([seed, size])
        options = random_handle(rng, tuple(FORMATS))
        with (
            World(size) as world,
            CheckedRanks(world, card, **options) as whole,
            CheckedRanks(world, card, **options) as halves,
        ):
            for step in range(3):
                card.start_again()
                gradients = [
                    [gradient(rng, n, options["values"], step == 1) for n in options["segments"]] for _ in range(size)
                ]
                shards, aligned = halves.reduce_scatter(gradients, aligned=step % 2 == 0), step % 2 == 0
                for one, other in zip(halves.all_gather(shards, aligned=aligned), whole.run(gradients)):
                    same(one, other, f"seed {seed}, step {step}")
                if options["nonfinite"] == TRANSACTIONAL:
                    halves.commit()
                    whole.commit()
                halves.errors()
            assert halves.flags() == whole.flags(), f"seed {seed}"


@pytest.mark.parametrize("error", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_errors_go_on_in_a_world_of_any_size(card, family, error):
    for old, new in (2, 3), (3, 3), (4, 1):
        card.start_again()
        errors_go_on(card, old, new, error, family)


def test_a_step_that_is_not_finite_on_one_rank_is_taken_back_on_all(card):
    n, size = 50_000, 3
    rng = np.random.default_rng(5)
    g = [rng.standard_normal(n).astype("f4") for _ in range(size)]
    bad = [x.copy() for x in g]
    bad[1][77] = np.nan
    with World(size) as world, Streams(size) as streams:
        with Handles(world, DLDevice(CUDA, 0), [n], nonfinite=TRANSACTIONAL) as handles:

            def step(gradients):
                put = [[card.put(x)] for x in gradients]
                driver.synchronize()
                handles.run(put, streams)
                flags = [card.put(np.zeros(1, np.uint32)) for _ in range(size)]
                driver.synchronize()
                for handle, stream, to in zip(handles.handles, streams, flags):
                    call("gc_allreduce_commit", handle, None, stream)
                    call("gc_allreduce_flags", handle, to.view, stream)
                return [int(card.get(to)[0]) for to in flags]

            def errors():
                driver.synchronize()
                out = [card.put(np.zeros(n, "f4")) for _ in range(size)]
                for handle, stream, to in zip(handles.handles, streams, out):
                    call("gc_allreduce_errors_out", handle, to.view, None, stream)
                return [card.get(to) for to in out]

            assert step(g) == [0] * size
            before = errors()
            assert step(bad) == [NONFINITE | TAKEN_BACK] * size
            for one, other in zip(errors(), before):
                same(one, other, "errors")


def test_calls_return_while_the_card_is_at_work(card, gate):
    """Two ranks of one context, while a kernel runs: had they allocated or freed on the GPU, they would wait for it."""
    n, size = 300_001, 2
    rng = np.random.default_rng(6)
    buffers = [rng.standard_normal(n).astype("f4") for _ in range(size)]
    zeros = [np.zeros(n, "f4")] * size, [np.zeros(s.stop - s.start, "f4") for s in shards(n, size)]
    put = [[card.put(x) for x in (b, w, filled(s, n, size))] for b, w, s in zip(buffers, *zeros)]
    again = [card.put(b) for b in buffers]
    out, workers, servers = reference(buffers, *zeros)
    second, _, _ = reference(buffers, workers, servers)
    with World(size) as world, Streams(size) as streams:
        for comm in world.comms:
            call("gc_comm_reserve", comm, DLDevice(CUDA, 0), n)
        driver.synchronize()
        with gate.closed(streams[0]):

            def run(rank):
                call("gc_compressed_allreduce", world.comms[rank], *(x.view for x in put[rank]), streams[rank])
                call("gc_compressed_allreduce", world.comms[rank], again[rank].view, *(x.view for x in put[rank][1:]), streams[rank])

            world.each(run)
            assert not driver.Event(streams[0]).done(), "the gate was open"
        driver.synchronize()
        for rank in range(size):
            same(card.get(put[rank][0]), out, f"first call, rank {rank}")
            same(card.get(again[rank]), second, f"second call, rank {rank}")


def test_a_group_does_not_become_part_of_a_graph(card, stream):
    n = 1000
    tensors = [card.put(np.zeros(k, "f4")) for k in (n, n, lib.gc_shard_elements(n, 2))]
    with World(2) as world:
        call("gc_comm_reserve", world.comms[0], DLDevice(CUDA, 0), n)
        driver.synchronize()
        with driver.Graph(stream) as graph:
            with pytest.raises(Refused) as refusal:
                call("gc_compressed_allreduce", world.comms[0], *(t.view for t in tensors), stream)
        assert refusal.value.status == Status.INVALID_ARGUMENT and "captured" in str(refusal.value)
        assert graph.nodes() == []
        graph.destroy()


def test_a_thousand_runs_leave_the_memory_as_it_was(card):
    n, size = 10_000, 2
    with World(size) as world, Streams(size) as streams:
        put = [[card.put(np.ones(k, "f4")) for k in (n, n, lib.gc_shard_elements(n, size))] for _ in range(size)]
        driver.synchronize()

        def run(rank):
            for _ in range(500):
                call("gc_compressed_allreduce", world.comms[rank], *(t.view for t in put[rank]), streams[rank])
            driver.wait_for(streams[rank])

        world.each(run)
        before = driver.free_bytes(), len(os.listdir("/proc/self/fd"))
        world.each(run)
        assert (driver.free_bytes(), len(os.listdir("/proc/self/fd"))) == before
