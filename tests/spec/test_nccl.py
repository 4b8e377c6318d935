"""All-reduces over NCCL itself on streams: the bytes of a group on the CPU. One GPU does for some of it; with several, ranks
are threads with a GPU each. tests/multi_gpu has graphs, and communicators of the caller and of PyTorch."""

import ctypes
import threading
import time
from ctypes import POINTER, byref, c_uint8

import numpy as np
import pytest

import capi
import driver
import gpu
from capi import AllReduce, CodecOptions, Comm, NcclOptions, lib
from codecs_c import call, same, views

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")  # which brings an NCCL, and has it loaded

RANKS = min(4, driver.device_count())
SIZES = [300_001, 0, 5]
STEPS = 6


def options(**fields):
    return NcclOptions(struct_size=ctypes.sizeof(NcclOptions), **fields)


def each(size, function):
    """Calls function(rank) in a thread for each rank, with the rank's GPU; the results by rank."""
    results, failures, end = [None] * size, [], time.monotonic() + 120

    def run(rank):
        try:
            driver.use(driver.primary(rank) if driver.device_count() else None)
            results[rank] = function(rank)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not failures and time.monotonic() < end:
            thread.join(0.1)  # the others wait for ever for one that has failed
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
    return results


class World:
    """Of an id, with a GPU for each rank."""

    def __init__(self, size):
        self.size, self.comms, id = size, [POINTER(Comm)() for _ in range(size)], (c_uint8 * 128)()
        call("gc_comm_nccl_id", byref(options()), id)
        each(size, lambda rank: call(
            "gc_comm_from_nccl_id", byref(options()), id, rank, size, gpu.device(rank), byref(self.comms[rank])
        ))  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        each(self.size, lambda rank: lib.gc_comm_free(self.comms[rank]))


class Group(World):
    """On the CPU."""

    def __init__(self, size):
        self.size, self.comms = size, (POINTER(Comm) * size)()
        call("gc_comm_group", size, self.comms)


class Cpu:
    device = gpu.device(0, capi.CPU)

    def __init__(self, rank):
        pass

    def put(self, array):
        return capi.Tensor(array.copy())

    def set(self, tensor, array):
        tensor.array[...] = array

    def get(self, tensor):
        return tensor.array.copy()


class Card:
    """Memory of the current context. It is left to the end of the process."""

    def __init__(self, rank):
        self.rank, self.device = rank, gpu.device(rank)

    def put(self, array):
        memory = driver.Memory(max(1, array.nbytes))
        tensor = gpu.at(memory.address, array.shape, array.dtype.name, index=self.rank)
        tensor.what = array
        self.set(tensor, array)
        return tensor

    def set(self, tensor, array):
        driver.upload(tensor.struct.dl_tensor.data, array)

    def get(self, tensor):
        driver.synchronize()
        what = tensor.what
        return driver.download(tensor.struct.dl_tensor.data, what.nbytes).view(what.dtype).reshape(what.shape)


def gradient(rank, step, n):
    return np.random.default_rng([rank, step, n]).standard_normal(n).astype(np.float32)


def handle_of(world, rank, device):
    handle, segments = POINTER(AllReduce)(), capi.int64s(SIZES)
    what = CodecOptions(
        struct_size=ctypes.sizeof(CodecOptions), codec=1, device=device, segments=segments, n_segments=len(SIZES)
    )
    call("gc_allreduce_create", world.comms[rank], byref(what), byref(handle))
    return handle


def results_of(handle, place, values):
    worker = place.put(np.zeros(sum(SIZES), np.float32))
    call("gc_allreduce_errors_out", handle, worker.view, None, None)
    results = [place.get(tensor) for tensor in (*values, worker)]
    lib.gc_allreduce_free(handle)
    return results


def compare(got, expected):
    for rank, (one, other) in enumerate(zip(got, expected)):
        for k, (a, b) in enumerate(zip(one, other)):
            same(a, b, f"array {k} of rank {rank}")


class NoStream:
    handle = None

    def synchronize(self):
        pass


def in_turns(worlds, place_of, streams):
    """Values and worker errors of each rank after some steps of a handle for each world, enqueued one after the other, each
    on a stream of its own."""

    def work(rank):
        place = place_of(rank)
        made = [handle_of(world, rank, place.device) for world in worlds]
        values = [[place.put(gradient(rank, k, n)) for n in SIZES] for k in range(len(worlds))]
        for _ in range(STEPS):
            for handle, tensors, stream in zip(made, values, streams[rank]):
                call("gc_allreduce_run", handle, views(tensors), len(tensors), None, None, stream.handle)
        for stream in streams[rank]:
            stream.synchronize()
        return [array for handle, tensors in zip(made, values) for array in results_of(handle, place, tensors)]

    return each(worlds[0].size, work)


@pytest.mark.parametrize("size", [1, pytest.param(RANKS, marks=pytest.mark.two_devices)])
def test_handles_on_streams_of_their_own_do_not_disturb_each_other(size):
    with World(size) as one, World(size) as other, Group(size) as group:
        on_cards = each(size, lambda rank: [driver.Stream() for _ in range(2)])
        compare(in_turns([one, other], Card, on_cards), in_turns([group, group], Cpu, [[NoStream()] * 2] * size))


@pytest.mark.two_devices
def test_a_call_on_a_stream_does_not_wait_for_it():
    with World(2) as world:

        def work(rank):
            place, gate = Card(rank), driver.Gate()
            handle = handle_of(world, rank, place.device)
            values = [place.put(gradient(rank, 0, n)) for n in SIZES]
            call("gc_allreduce_run", handle, views(values), len(values), None, None, None)  # NCCL connects
            driver.synchronize()
            with driver.Stream() as stream:
                gate.close(stream.handle)
                call("gc_allreduce_run", handle, views(values), len(values), None, None, stream.handle)
                closed = driver.raw("cuStreamQuery", ctypes.c_void_p(stream.handle)) == driver.NOT_READY
                gate.open()
                stream.synchronize()
            lib.gc_allreduce_free(handle)
            return closed

        assert each(2, work) == [True, True]
