"""Tests of many threads at once, and of more than one GPU."""

import threading

import numpy as np
import pytest

import capi
import driver
import gpu
import layouts
from capi import BIG, CPU, CUDA_MANAGED, Managed, Status, byref, check, free_all, in_threads, lib
from gpu import WORKS, Prepared

THREADS, ROUNDS = 8, gpu.sized(gpu=60, quick=20, all=60)


def together(function, count=THREADS):
    """Runs function(k) on as many threads at once; raises the first error."""
    start = threading.Barrier(count)
    in_threads(count, lambda k: (start.wait(), function(k)))


def test_threads_with_separate_streams():
    def work(k):
        driver.use(driver.primary())
        with driver.Stream() as stream:
            for round in range(ROUNDS):
                with Prepared(list(WORKS)[(k + round) % len(WORKS)], seed=k * ROUNDS + round) as prepared:
                    check(prepared.call(stream.handle))
                    stream.synchronize()
                    prepared.check()

    together(work)


def test_threads_on_the_per_thread_stream_without_a_context():
    prepared = [Prepared(list(WORKS)[k], seed=k) for k in range(THREADS)]

    def work(k):
        for _ in range(ROUNDS):
            check(prepared[k].call(driver.PER_THREAD))
        assert driver.current() is None
        with driver.using(driver.primary()):
            driver.wait_for(driver.PER_THREAD)

    together(work)
    for one in prepared:
        one.check()
        one.free()


def test_threads_release_outputs_of_each_other():
    mailbox, lock = [], threading.Lock()

    def work(k):
        driver.use(driver.primary())
        rng = np.random.default_rng(k)
        truth = rng.random(40_000 + k) < 0.5
        rows = layouts.chunk_rows(truth, 3)
        with driver.Memory(truth.size) as memory:
            driver.upload(memory.address, truth)
            source = gpu.at(memory.address, truth.shape, "bool")
            for _ in range(ROUNDS):
                chunks, out = capi.pack_chunks(source, 3), Managed()
                check(lib.gc_unpack_chunks(capi.managed_array(chunks), 3, truth.size, byref(out)))
                np.testing.assert_array_equal(np.stack([gpu.read(chunk) for chunk in chunks]), rows)
                np.testing.assert_array_equal(gpu.read(out), truth)
                with lock:
                    mailbox.extend([*chunks, out])
                    others = [mailbox.pop(int(rng.integers(0, len(mailbox)))) for _ in range(min(4, len(mailbox)))]
                free_all(others)

    together(work)
    free_all(mailbox)


def test_threads_work_while_memory_is_trimmed():
    with Prepared("pack_chunks") as prepared:

        def work(k):
            driver.use(driver.primary())
            for _ in range(ROUNDS):
                if k == 0:
                    check(lib.gc_trim(gpu.device()))
                    continue
                chunks = capi.pack_chunks(prepared.src, 3)
                np.testing.assert_array_equal(np.stack([gpu.take(chunk) for chunk in chunks]), prepared.expected)

        together(work)


def test_preparing_twice_or_concurrently_works():
    together(lambda k: check(lib.gc_prepare(gpu.device())))
    assert driver.current() == driver.primary()


# --- kinds of memory --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_kernels_on_the_gpu_use_managed_memory():
    if not driver.supports_managed_memory():
        pytest.skip("the device has no managed memory")
    truth = np.random.default_rng(2).random(100_003) < 0.5
    expected = layouts.chunk_rows(truth, 2)
    with driver.Memory(truth.size, "managed") as memory, driver.Memory(expected.size, "managed") as rows:
        driver.upload(memory.address, truth)
        source = gpu.at(memory.address, truth.shape, "bool", kind=CUDA_MANAGED)
        chunks = capi.pack_chunks(source, 2)
        np.testing.assert_array_equal(np.stack([gpu.take(chunk) for chunk in chunks]), expected)  # their device is CUDA
        target = gpu.at(rows.address, expected.shape, kind=CUDA_MANAGED)
        for stream in None, driver.PER_THREAD:
            driver.fill(rows.address, 0, expected.size)
            check(lib.gc_pack_chunks_into(source.view, BIG, target.view, stream))
            driver.synchronize()
            np.testing.assert_array_equal(driver.download(rows.address, expected.size).reshape(2, -1), expected)
        with driver.Memory(expected.size) as plain:  # managed and plain memory of one GPU go together
            check(lib.gc_pack_chunks_into(source.view, BIG, gpu.at(plain.address, expected.shape).view, None))
            np.testing.assert_array_equal(driver.download(plain.address, expected.size).reshape(2, -1), expected)


# --- two GPUs --------------------------------------------------------------------------------------------------------


@pytest.mark.two_devices
@pytest.mark.parametrize("name", WORKS)
def test_work_runs_on_the_device_of_the_tensor(name):
    with driver.using(driver.primary(1)):
        work, stream = Prepared(name, seed=1, index=1), driver.Stream()
    for current in driver.primary(0), driver.primary(1), None:
        for handle in (stream.handle, None, driver.LEGACY, driver.PER_THREAD):
            with driver.using(driver.primary(1)):
                work.poison()
            with driver.using(current):
                check(work.call(handle))
                assert driver.current() == current
            with driver.using(driver.primary(1)):
                driver.synchronize()
                work.check()
    with driver.using(driver.primary(1)):
        stream.destroy()
        work.free()


@pytest.mark.two_devices
def test_outputs_are_on_the_gpu_of_the_inputs_and_released_from_the_other():
    truth = np.random.default_rng(3).random(100_003) < 0.5
    check(lib.gc_prepare(gpu.device(1)))
    with driver.using(driver.primary(1)):
        memory = driver.Memory(truth.size)
        driver.upload(memory.address, truth)
    source = gpu.at(memory.address, truth.shape, "bool", index=1)
    for current in driver.primary(0), driver.primary(1), None:
        with driver.using(current):
            chunks = capi.pack_chunks(source, 2)
            assert driver.current() == current
        with driver.using(driver.primary(1)):
            found = np.stack([gpu.read(chunk, 1) for chunk in chunks])
        np.testing.assert_array_equal(found, layouts.chunk_rows(truth, 2))
        with driver.using(current):
            free_all(chunks)
            assert driver.current() == current
    tensor = capi.empty(1000, device=gpu.device(1))
    assert gpu.view_of(tensor).device.device_id == 1
    lib.gc_tensor_free(tensor)
    check(lib.gc_trim(gpu.device(1)))
    with driver.using(driver.primary(1)):
        memory.free()


@pytest.mark.two_devices
def test_tensors_on_two_gpus_are_refused():
    with driver.Memory(4096) as here:
        source, target = gpu.at(here.address, (64,), "bool"), gpu.at(0x7000_0000, (1, 8), index=1)
        status = lib.gc_pack_chunks_into(source.view, BIG, target.view, None)
        assert status == Status.INVALID_ARGUMENT, capi.last_error()
        out = Managed()
        chunks = gpu.at(here.address, (4,)), gpu.at(0x7000_0000, (4,), index=1)
        status = lib.gc_unpack_chunks(capi.managed_array(chunks), 2, 64, byref(out))
        assert status == Status.INVALID_ARGUMENT and not out


@pytest.mark.two_devices
def test_a_stream_of_another_gpu_is_refused():
    with driver.using(driver.primary(1)):
        stream = driver.Stream()
    with Prepared("pack_chunks") as work:
        status = work.call(stream.handle)
        assert status == Status.INVALID_ARGUMENT, f"{status}: {capi.last_error()}"
        assert capi.says(capi.last_error(), "stream") and driver.current() == driver.primary()
        check(work.call(None))
        work.check()
    with driver.using(driver.primary(1)):
        stream.destroy()


def test_tensors_on_the_cpu_and_on_the_gpu_are_refused():
    rows = np.zeros((1, 8), np.uint8)
    with driver.Memory(4096) as memory:
        source, target = gpu.at(memory.address, (64,), "bool"), capi.Tensor(rows)
        assert target.struct.dl_tensor.device.device_type == CPU
        assert lib.gc_pack_chunks_into(source.view, BIG, target.view, None) == Status.INVALID_ARGUMENT
        assert lib.gc_unpack_chunks_into(target.view, BIG, source.view, None) == Status.INVALID_ARGUMENT
        assert not rows.any()
