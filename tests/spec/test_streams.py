"""The stream tier under load: in its place on the stream, without waiting, without memory, in the right context; and
captured in a graph.

A closed gate is a kernel that runs until the host opens it. What is enqueued behind it cannot have run, and a call that
waited for the device would not come back before the gate gives up, which the tests see.
"""

import ctypes
import threading

import numpy as np
import pytest

import capi
import driver
import gpu
import layouts
from capi import BIG, Managed, byref, lib
from driver import LEGACY, PER_THREAD
from gpu import WORKS, Prepared, check

pytestmark = pytest.mark.gpu

works = pytest.mark.parametrize("name", WORKS)


@pytest.fixture(autouse=True, scope="module")
def prepared():
    driver.use(driver.primary())
    check(lib.gc_prepare(gpu.device()))


class Streams:
    """The streams there are, by name."""

    NAMES = ("NULL", "legacy", "per-thread", "non-blocking", "blocking")

    def __init__(self, name):
        self.own = driver.Stream(0 if name == "blocking" else 1) if "blocking" in name else None
        self.handle = {"NULL": None, "legacy": LEGACY, "per-thread": PER_THREAD}.get(name, self.own and self.own.handle)

    def __enter__(self):
        return self.handle

    def __exit__(self, *_):
        if self.own:
            self.own.destroy()


streams = pytest.mark.parametrize("kind", Streams.NAMES)


def in_thread(function):
    """Runs it on a thread of its own, where no context is current."""
    outcome = []

    def run():
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error:
        raise error
    return result


# --- order ------------------------------------------------------------------------------------------------------------


@streams
@works
def test_a_call_takes_its_place_on_the_stream_and_returns_at_once(name, kind, gate):
    with Prepared(name, seed=1) as work, Streams(kind) as stream:
        inputs, copied = driver.Memory(work.size), driver.Memory(work.out_size)
        driver.copy(inputs.address, work.source.address, work.size, LEGACY)
        driver.fill(work.source.address, 0x11, work.size)  # the inputs come behind the gate
        driver.fill(copied.address, 0, work.out_size)
        with gate.closed(stream):
            driver.copy(work.source.address, inputs.address, work.size, stream)
            check(work.call(stream))
            driver.copy(copied.address, work.target.address, work.out_size, stream)
            driver.copy(work.source.address, copied.address, min(work.size, work.out_size), stream)
            still_held = not driver.Event(stream).done()
        assert still_held, "the call waited for its stream"
        work.check(copied.address)
        inputs.free()
        copied.free()


@works
def test_a_call_does_not_wait_for_other_streams(name, gate, stream):
    with Prepared(name, seed=2) as work, driver.Stream() as other, gate.closed(other.handle):
        check(work.call(stream))
        driver.wait_for(stream)
        assert not driver.Event(other.handle).done(), "the call waited for a stream of others"
        work.check()


def test_many_calls_in_flight_keep_their_order(gate, stream):
    # Each packs what the one before has unpacked; the chain is right only if none overtakes another.
    rng = np.random.default_rng(3)
    count, rounds = 100_000, 200
    packed = rng.integers(0, 256, count // 8, np.uint8)
    with driver.Memory(count) as bits, driver.Memory(2 * (count // 8)) as rows:
        driver.upload(rows.address, packed)
        src, dst = gpu.at(rows.address, (1, count // 8)), gpu.at(rows.address + count // 8, (1, count // 8))
        elements = gpu.at(bits.address, (count,), "bool")
        with gate.closed(stream):
            for _ in range(rounds):
                check(lib.gc_unpack_chunks_into(src.view, BIG, elements.view, stream))
                check(lib.gc_pack_chunks_into(elements.view, 1, dst.view, stream))  # bits of a byte turned round
                src, dst = dst, src
        turned = np.packbits(np.unpackbits(packed), bitorder="little")
        found = driver.download(rows.address, 2 * packed.size)
        np.testing.assert_array_equal(found[: packed.size], packed)  # an even number of turns
        np.testing.assert_array_equal(found[packed.size :], turned)


def test_the_simple_tier_waits_for_the_legacy_stream_and_is_complete(gate, stream):
    with Prepared("pack_chunks", seed=4) as work:
        inputs = driver.Memory(work.size)
        driver.copy(inputs.address, work.source.address, work.size, LEGACY)
        driver.fill(work.source.address, 0x11, work.size)
        gate.close(LEGACY, seconds=0.5)  # opens by itself, while the call waits
        driver.copy(work.source.address, inputs.address, work.size, LEGACY)
        chunks = gpu.pack_chunks(work.src, 3)
        size, packed = capi.chunk_bytes(gpu.COUNT, 3), driver.Memory(work.out_size)
        driver.copy(packed.address, gpu.view_of(chunks[0]).data, 3 * size, stream)  # not ordered with it: complete
        driver.wait_for(stream)
        found = driver.download(packed.address, 3 * size).reshape(3, size)
        np.testing.assert_array_equal(found, work.expected)
        for chunk in chunks:
            lib.gc_tensor_free(chunk)
        inputs.free()
        packed.free()


# --- memory -----------------------------------------------------------------------------------------------------------


@streams
@works
def test_a_call_allocates_nothing(name, kind, gate):
    with Prepared(name) as work, Streams(kind) as stream:
        check(work.call(stream))
        driver.synchronize()
        with gate.closed(stream):
            before = driver.free_bytes()
            for _ in range(20):
                check(work.call(stream))
            assert driver.free_bytes() == before
        work.check()


# --- contexts ---------------------------------------------------------------------------------------------------------


@streams
@works
def test_the_current_context_stays(name, kind):
    with Prepared(name, seed=5) as work, Streams(kind) as stream:
        check(work.call(stream))
        assert driver.current() == driver.primary()
        driver.synchronize()
        work.check()


@pytest.mark.parametrize("kind", [kind for kind in Streams.NAMES])
@works
def test_a_thread_without_a_context_works_and_stays_without(name, kind):
    with Prepared(name, seed=6) as work, Streams(kind) as stream:

        def call():
            assert driver.current() is None
            status = work.call(stream)
            assert driver.current() is None
            with driver.using(driver.primary()):  # the per-thread stream is this thread's
                driver.synchronize()
            return status

        check(in_thread(call))
        work.check()


@works
def test_the_stream_of_a_context_of_the_callers_own_is_followed_there(name):
    with driver.own_context() as own:
        with Prepared(name, seed=7) as work, driver.Stream() as stream:
            for current in own, driver.primary(), None:
                work.poison()
                driver.synchronize()
                with driver.using(current):
                    before = driver.current()  # None uncovers what lay below on the thread's stack
                    check(work.call(stream.handle))
                    assert driver.current() == before
                stream.synchronize()
                work.check()
            work.poison()
            check(in_thread(lambda: work.call(stream.handle)))
            stream.synchronize()
            work.check()


@pytest.mark.parametrize("stream", [None, LEGACY, PER_THREAD], ids=["NULL", "legacy", "per-thread"])
@works
def test_the_default_streams_are_those_of_the_current_context(name, stream):
    with driver.own_context() as own, Prepared(name, seed=8) as work:
        check(work.call(stream))
        assert driver.current() == own
        driver.synchronize()
        work.check()


def test_threads_work_on_streams_of_one_green_context_and_make_it_nobodys():
    errors = []
    with driver.green_context() as green:
        streams = [ctypes.c_void_p() for _ in range(2)]
        for stream in streams:
            driver.call("cuGreenCtxStreamCreate", byref(stream), green, 1, 0)

        def pack(stream, seed):
            try:
                assert driver.current() is None
                work = works_of[seed]
                for _ in range(200):
                    check(work.call(stream.value))
                assert driver.current() is None
                driver.call("cuStreamSynchronize", stream)
            except BaseException as error:
                errors.append(error)

        works_of = [Prepared("pack_chunks", seed=seed) for seed in range(2)]
        driver.synchronize()
        threads = [threading.Thread(target=pack, args=(stream, seed)) for seed, stream in enumerate(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        for work in works_of:
            work.check()
            work.free()
        for stream in streams:
            driver.call("cuStreamDestroy_v2", stream)


def test_contexts_come_and_go():
    # A new context may lie where the last one lay; nothing of the last may be taken for its own.
    for round in range(6):
        with driver.own_context(), Prepared("pack_chunks", seed=round) as work, driver.Stream() as stream:
            check(work.call(stream.handle))
            stream.synchronize()
            work.check()
            work.poison()
            check(work.call(None))
            driver.synchronize()
            work.check()
            chunks = gpu.pack_chunks(work.src, 3)
            np.testing.assert_array_equal(np.stack([gpu.take(chunk) for chunk in chunks]), work.expected)
        with Prepared("unpack_chunks", seed=round) as work:
            check(work.call(None))
            work.check()


SIMPLE = {
    "pack_chunks": lambda src, out: lib.gc_pack_chunks(src, 1, out),
    "pack_bits": lambda src, out: lib.gc_pack_bits(src, 0, BIG, out),
    "unpack_bits": lambda src, out: lib.gc_unpack_bits(src, 0, capi.COUNT_ALL, BIG, out),
    "unpack_chunks": lambda src, out: lib.gc_unpack_chunks((Managed * 1)(src), 1, 8000, out),
}


@pytest.mark.parametrize("name", SIMPLE)
def test_the_simple_tier_leaves_the_current_context_alone(name):
    values = np.random.default_rng(9).integers(0, 2, 1000, np.uint8)
    expected = np.packbits(values) if name.startswith("pack") else np.unpackbits(values)

    def make():
        before, out = driver.current(), Managed()
        check(SIMPLE[name](source.managed, byref(out)))
        assert driver.current() == before
        return out

    def hold(out):
        np.testing.assert_array_equal(gpu.read(out).view(np.uint8), expected)
        before = driver.current()
        lib.gc_tensor_free(out)
        assert driver.current() == before

    with driver.Memory(1000) as memory:
        driver.upload(memory.address, values)
        source = gpu.at(memory.address, (1000,))
        hold(make())
        hold(in_thread(make))
    with driver.own_context(), driver.Memory(1000) as memory:
        driver.upload(memory.address, values)
        source = gpu.at(memory.address, (1000,))
        hold(make())  # made and released while this context is current


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["per-thread", "non-blocking", "blocking"])
@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
@works
def test_a_call_is_captured_and_replayed(name, mode, kind):
    with Prepared(name, seed=10) as work, Streams(kind) as stream:
        driver.synchronize()
        with driver.Graph(stream, getattr(driver, mode)) as graph:
            check(work.call(stream))
        found = driver.download(work.target.address, work.out_size)
        assert np.array_equal(found, work.work.target.buffer()), "nothing has run yet"
        kinds = graph.nodes()
        assert kinds and set(kinds) <= {driver.NODE_KERNEL, driver.NODE_SET, driver.NODE_COPY}, kinds

        for seed in 10, 11, 12:
            buffer = work.work.make(np.random.default_rng(seed), work.work.source)
            driver.upload(work.source.address, buffer)
            work.poison()
            graph.replay(stream)
            driver.wait_for(stream)
            work.expected = work.work.model(work.work.source.carve(buffer))
            work.check()
        graph.destroy()


def test_a_graph_of_many_calls_is_replayed_in_order(stream):
    works = [Prepared(name, seed=13) for name in WORKS]
    driver.synchronize()
    with driver.Graph(stream) as graph:
        for work in works:
            check(work.call(stream))
    for _ in range(3):
        for work in works:
            work.poison()
        graph.replay(stream)
        driver.wait_for(stream)
        for work in works:
            work.check()
    graph.destroy()
    for work in works:
        work.free()


def test_a_refused_call_leaves_the_capture_sound(stream):
    with Prepared("pack_chunks", seed=14) as work, Prepared("unpack_chunks", seed=14) as other:
        driver.synchronize()
        with driver.Graph(stream) as graph:
            assert lib.gc_pack_chunks_into(work.src.view, BIG, other.src.view, stream) == 0
            assert lib.gc_pack_signs_into(work.src.view, BIG, work.dst.view, stream) == capi.Status.UNSUPPORTED_DTYPE
            assert lib.gc_pack_chunks_into(work.src.view, 2, work.dst.view, stream) == capi.Status.INVALID_ARGUMENT
            check(work.call(stream))
        graph.replay(stream)
        driver.wait_for(stream)
        work.check()
        graph.destroy()


def test_calls_are_captured_by_torch():
    torch = pytest.importorskip("torch")
    truth = torch.zeros(1_000_003, dtype=torch.bool, device="cuda")
    packed = torch.zeros((4, capi.chunk_bytes(truth.numel(), 4)), dtype=torch.uint8, device="cuda")
    bits = torch.zeros(truth.numel(), dtype=torch.float32, device="cuda")
    src, rows = gpu.at(truth.data_ptr(), truth.shape, "bool"), gpu.at(packed.data_ptr(), packed.shape)
    dst = gpu.at(bits.data_ptr(), bits.shape, "float32")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        check(lib.gc_pack_chunks_into(src.view, BIG, rows.view, stream))
        check(lib.gc_unpack_chunks_into(rows.view, BIG, dst.view, stream))
    for seed in range(3):
        torch.manual_seed(seed)
        truth.copy_(torch.rand(truth.shape, device="cuda") < 0.5)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits, truth.float())
        expected = layouts.chunk_rows(truth.cpu().numpy(), 4)
        np.testing.assert_array_equal(packed.cpu().numpy(), expected)


def test_calls_follow_torchs_side_stream_under_load():
    torch = pytest.importorskip("torch")
    side = torch.cuda.Stream()
    truth = torch.zeros(2**22, dtype=torch.bool, device="cuda")
    other = torch.rand(2**22, device="cuda") < 0.5
    packed = torch.zeros((1, 2**19), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        truth.copy_(other)
        src, dst = gpu.at(truth.data_ptr(), truth.shape, "bool"), gpu.at(packed.data_ptr(), packed.shape)
        check(lib.gc_pack_chunks_into(src.view, BIG, dst.view, side.cuda_stream))
        copied = packed.clone()
    side.synchronize()
    np.testing.assert_array_equal(copied.cpu().numpy()[0], np.packbits(other.cpu().numpy()))


# --- first calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
@pytest.mark.parametrize("first", ["prepare", "into", "simple", "prepare_here"])
def test_a_first_call_of_a_process_leaves_the_capture_of_another_thread_sound(first, mode):
    gpu.run_child("first_call_while_capturing", first, mode)
