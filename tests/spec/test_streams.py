"""Tests of the stream tier under load: calls take their place on the stream, without waiting, without memory, in the
right context; and are captured in a graph.

A closed gate is a kernel that runs until the host opens it. Work that is enqueued behind it cannot have run. A call
that waited for the device would not return before the gate gives up, which the tests notice.
"""

import numpy as np
import pytest

import capi
import driver
import gpu
from capi import BIG, check, free_all, in_threads, lib
from driver import LEGACY, PER_THREAD
from gpu import WORKS, Prepared

pytestmark = pytest.mark.gpu

works = pytest.mark.parametrize("name", WORKS)


@pytest.fixture(autouse=True, scope="module")
def prepared():
    driver.use(driver.primary())
    check(lib.gc_prepare(gpu.device()))


class Streams:
    """Streams by name."""

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
    """Runs a function on a thread of its own, where no context is current."""
    return in_threads(1, lambda _: function())[0]


# --- order ------------------------------------------------------------------------------------------------------------


@streams
@works
def test_a_call_is_enqueued_on_its_stream_and_returns_at_once(name, kind, gate):
    with Prepared(name, seed=1) as work, Streams(kind) as stream:
        inputs, copied = driver.Memory(work.size), driver.Memory(work.out_size)
        driver.copy(inputs.address, work.source.address, work.size, LEGACY)
        driver.fill(work.source.address, 0x11, work.size)  # the inputs are copied behind the gate
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


def test_the_simple_tier_waits_for_the_legacy_stream_and_is_complete(gate, stream):
    with Prepared("pack_chunks", seed=4) as work:
        inputs = driver.Memory(work.size)
        driver.copy(inputs.address, work.source.address, work.size, LEGACY)
        driver.fill(work.source.address, 0x11, work.size)
        gate.close(LEGACY, seconds=0.5)  # opens by itself, while the call waits
        driver.copy(work.source.address, inputs.address, work.size, LEGACY)
        chunks = capi.pack_chunks(work.src, 3)
        size, packed = capi.chunk_bytes(gpu.COUNT, 3), driver.Memory(work.out_size)
        driver.copy(packed.address, gpu.view_of(chunks[0]).data, 3 * size, stream)  # unordered with the call: complete
        driver.wait_for(stream)
        found = driver.download(packed.address, 3 * size).reshape(3, size)
        np.testing.assert_array_equal(found, work.expected)
        free_all(chunks)
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


@pytest.mark.parametrize("kind", [kind for kind in Streams.NAMES])
@works
def test_a_thread_without_a_context_works_and_gets_none(name, kind):
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
def test_a_stream_of_the_callers_context_is_used_in_that_context(name):
    with driver.own_context() as own:
        with Prepared(name, seed=7) as work, driver.Stream() as stream:
            for current in own, driver.primary(), None:
                work.poison()
                driver.synchronize()
                with driver.using(current):
                    before = driver.current()  # None uncovers the context below on the thread's stack
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
def test_the_default_streams_belong_to_the_current_context(name, stream):
    with driver.own_context() as own, Prepared(name, seed=8) as work:
        check(work.call(stream))
        assert driver.current() == own
        driver.synchronize()
        work.check()


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


def test_a_refused_call_keeps_the_capture_valid(stream):
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


# --- first calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
@pytest.mark.parametrize("first", ["prepare", "into", "simple", "prepare_here"])
def test_a_first_call_keeps_the_capture_of_another_thread_valid(first, mode):
    gpu.run_child("first_call_while_capturing", first, mode)
