"""Actions of tests in a process of its own: `python children.py NAME ARGUMENTS...`; success is 0 and no stderr."""

import ctypes
import os
import pathlib
import sys
import threading
import warnings

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

import numpy as np  # noqa: E402 the path comes first

import capi  # noqa: E402
import driver  # noqa: E402
import gpu  # noqa: E402
from capi import BIG, Managed, Status, byref, free_all, lib  # noqa: E402


def first_call_while_capturing(first, mode):
    """Uses the library for the first time while a stream is captured: on another thread, or on this one."""
    assert driver.device_count()
    driver.use(driver.primary())
    work = gpu.Prepared("pack_chunks", seed=1)
    other = gpu.Prepared("pack_bits", seed=2)
    filled, stream, side = driver.Memory(4096), driver.Stream(), driver.Stream()
    driver.fill(filled.address, 1, 4096)
    driver.synchronize()
    failures = []

    def use_the_library():
        try:
            if first == "prepare":
                capi.check(lib.gc_prepare(gpu.device()))
            elif first == "into":
                capi.check(work.call(side.handle))
            elif first == "simple":
                chunks = capi.pack_chunks(work.src, 3)
                failures.append(chunks)
        except BaseException as error:
            failures.append(error)

    with driver.Graph(stream.handle, getattr(driver, mode)) as graph:
        driver.call(
            "cuMemsetD8Async", ctypes.c_uint64(filled.address), ctypes.c_ubyte(7), ctypes.c_size_t(4096),
            ctypes.c_void_p(stream.handle),
        )  # fmt: skip
        if first == "prepare_here":
            capi.check(lib.gc_prepare(gpu.device()))
            capi.check(other.call(stream.handle))
        else:
            thread = threading.Thread(target=use_the_library)
            thread.start()
            thread.join()
    results = [failure for failure in failures if not isinstance(failure, list)]
    assert not results, results
    assert (driver.download(filled.address, 4096) == 1).all(), "captured work has run"
    graph.replay(stream.handle)
    stream.synchronize()
    side.synchronize()
    assert (driver.download(filled.address, 4096) == 7).all()
    if first == "prepare_here":
        other.check()
    elif first == "into":
        work.check()
    elif first == "simple":
        np.testing.assert_array_equal(np.stack([gpu.take(chunk) for chunk in failures[0]]), work.expected)
    # Calls work afterwards.
    capi.check(other.call(side.handle))
    side.synchronize()
    other.check()


def outputs():
    """Returns some outputs of every kind, in the primary context."""
    assert driver.device_count()
    driver.use(driver.primary())
    with gpu.Prepared("pack_chunks") as work:
        made = [*capi.pack_chunks(work.src, 3), *capi.pack_chunks(work.src, 2)]
    made.append(capi.empty(1000, dtype="float32", device=gpu.device()))
    out = Managed()
    capi.check(lib.gc_unpack_chunks((Managed * 2)(*made[3:5]), 2, gpu.COUNT, byref(out)))
    return [*made, out]


def the_cpu_works():
    truth = np.random.default_rng(0).random(1000) < 0.5
    return capi.take(capi.pack_chunks(capi.Tensor(truth), 1)[0]).tobytes() == np.packbits(truth).tobytes()


def exit_with_outputs_alive():
    sys.modules["kept alive"] = outputs()


def release_after_python():
    """Releases tensors in deleters that exit() calls: then Python is finalized."""
    at_exit = ctypes.CDLL(None).__getattr__("__cxa_atexit")
    free = ctypes.cast(lib.gc_tensor_free, ctypes.c_void_p)
    for tensor in outputs():
        assert at_exit(free, ctypes.cast(tensor, ctypes.c_void_p), None) == 0


def exit_while_threads_work():
    """Ends the process while daemon threads are in the middle of calls."""
    assert driver.device_count()
    driver.use(driver.primary())
    work, started = gpu.Prepared("pack_chunks"), threading.Barrier(5)

    def forever():
        started.wait()
        while True:
            free_all(capi.pack_chunks(work.src, 3))

    for _ in range(4):
        threading.Thread(target=forever, daemon=True).start()
    started.wait()
    for _ in range(100):
        capi.check(work.call(None))
    os._exit(0)


def fault():
    """Lets a kernel of this program write to an invalid address: from then on nothing works in this process."""
    assert driver.device_count()
    driver.use(driver.primary())
    work = gpu.Prepared("pack_chunks")
    made = outputs()
    with driver.Stream() as side:
        capi.check(work.call(side.handle))
        side.synchronize()
        driver.launch(driver.kernel(driver.load(driver.PTX), "wild"), 1, 1, side.handle)
        code = driver.raw("cuStreamSynchronize", ctypes.c_void_p(side.handle))
        assert code != 0, "the wild write went through"
        side.handle = None
    name, out, new = driver.error_name(code), (Managed * 3)(), Managed()
    calls = {
        "stream tier": lambda: work.call(None),
        "simple tier": lambda: lib.gc_pack_chunks(work.src.managed, 3, out),
        "gc_tensor_empty": lambda: lib.gc_tensor_empty(
            gpu.device(), capi.dldtype("uint8"), 1, capi.int64s([2**20]), byref(new)
        ),
    }
    for what, call in calls.items():
        for _ in range(3):
            status, words = call(), capi.last_error()
            assert status in (Status.CUDA, Status.CONTEXT_LOST), f"{what}: {status}"
            assert name in words, f"{what}: {words!r} does not name {name}"
            assert not any(out) and not new, what
    free_all(made)
    lib.gc_trim(gpu.device())
    lib.gc_prepare(gpu.device())
    assert the_cpu_works()


def no_devices():
    """Calls the library with an empty CUDA_VISIBLE_DEVICES."""
    assert driver.device_count() == 0
    allowed = (Status.DRIVER_UNAVAILABLE, Status.UNSUPPORTED_DEVICE)
    out = Managed()
    source, rows = gpu.at(0x10000, (64,), "bool"), gpu.at(0x20000, (1, 8))
    calls = {
        "gc_pack_chunks": lambda: lib.gc_pack_chunks(source.managed, 1, byref(out)),
        "gc_pack_bits": lambda: lib.gc_pack_bits(source.managed, 0, BIG, byref(out)),
        "gc_pack_chunks_into": lambda: lib.gc_pack_chunks_into(source.view, BIG, rows.view, None),
        "gc_unpack_chunks_into": lambda: lib.gc_unpack_chunks_into(rows.view, BIG, source.view, None),
        "with a stream": lambda: lib.gc_pack_chunks_into(source.view, BIG, rows.view, 0x1234),
        "gc_tensor_empty": lambda: lib.gc_tensor_empty(
            gpu.device(), capi.dldtype("uint8"), 1, capi.int64s([8]), byref(out)
        ),
        "gc_prepare": lambda: lib.gc_prepare(gpu.device()),
        "managed": lambda: lib.gc_pack_chunks(
            gpu.at(0x10000, (64,), "bool", kind=capi.CUDA_MANAGED).managed, 1, byref(out)
        ),
    }
    for what, call in calls.items():
        for _ in range(2):
            status = call()
            assert status in allowed, f"{what}: {lib.gc_status_name(status).decode()}: {capi.last_error()}"
            assert capi.last_error() and not out, what
    lib.gc_trim(gpu.device())
    assert the_cpu_works()
    fatbin, size = ctypes.c_void_p(), ctypes.c_size_t()
    capi.check(lib.gc_builtin_kernels(b"bits", byref(fatbin), byref(size)))  # needs no driver


def packs():
    """Makes the first call of a process."""
    assert driver.device_count()
    driver.use(driver.primary())
    work = gpu.Prepared("pack_chunks", seed=1)
    capi.check(work.call(None))
    driver.synchronize()
    work.check()


def after_fork():
    """Forks after CUDA was used, and checks that the CPU works in the child."""
    kept = outputs()
    warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of the driver's threads
    child = os.fork()
    if child == 0:
        os._exit(0 if the_cpu_works() else 1)
    assert os.waitpid(child, 0)[1] == 0
    free_all(kept)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
