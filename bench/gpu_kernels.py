"""How fast kernels run that are compiled at run time: as a fraction of a device-to-device copy, and beside CuPy.

    make build/bench/gpu_host.so
    GRADCODEC_LIBRARY=target/release/libgradcodec.so.0 python bench/gpu_kernels.py [--quick]

Each line: the work, GB/s of ours, the fraction of the copy's (read + written; reductions: of bytes read alone), the
time beside CuPy's (median of 21 alternated runs). Then the host's time of a prepared run, and of first uses beside
CuPy's: with nothing cached, from disk, and the second one. first_use.py measures ours without a card.
"""

import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "python"))

import cupy
import numpy as np

import capi
from kernels import elementwise, reduction

RUNS, QUICK = 21, "--quick" in sys.argv
SIDE = 4096 if QUICK else 16384
COUNT = 2**24 if QUICK else 2**28


def tensor(array):
    """A CuPy array, described by hand."""
    described = capi.Tensor.__new__(capi.Tensor)
    described.array = array
    dl = capi.DLTensor(
        array.data.ptr, capi.DLDevice(capi.CUDA, 0), array.ndim, capi.dldtype(array.dtype.name),
        capi.int64s(array.shape), capi.int64s([step // array.itemsize for step in array.strides]), 0,
    )  # fmt: skip
    described.struct = capi.DLManagedTensor(dl, None, capi.DELETER())
    return described


def workspace_of(kernel, inputs, outputs, **options):
    return tensor(cupy.empty(max(1, kernel.workspace_bytes(inputs, outputs, **options)), "u1"))


def milliseconds(enqueue, calls):
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(cupy.cuda.Stream.null)
    for _ in range(calls):
        enqueue()
    end.record(cupy.cuda.Stream.null)
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end) / calls


def alternated(*enqueues):
    """The medians, of runs that take turns."""
    calls = max(1, int(5 / max(1e-3, milliseconds(enqueues[0], 2))))
    samples = [[] for _ in enqueues]
    for enqueue in enqueues:
        milliseconds(enqueue, calls)
    for _ in range(RUNS):
        for enqueue, list_ in zip(enqueues, samples):
            list_.append(milliseconds(enqueue, calls))
    return [statistics.median(list_) for list_ in samples], samples


def works():
    rng = cupy.random.default_rng(1)
    x, y = rng.standard_normal(COUNT, dtype="f4"), rng.standard_normal(COUNT, dtype="f4")
    z, operation = cupy.empty_like(x), "if (x - 2 > y) { z = x * y; } else { z = x + y; }"
    ours = elementwise("float32 x, float32 y", "float32 z", operation, "ours")
    parameters = "float32 x, float32 y", "float32 z"
    theirs = cupy.ElementwiseKernel(*parameters, operation, "theirs", options=("--fmad=false",))
    yield f"two inputs, {COUNT}", ours, theirs, (x, y), z, {}, 3 * x.nbytes
    yield f"two inputs, {COUNT - 1}, from [1:]", ours, theirs, (x[1:], y[1:]), z[1:], {}, 3 * x.nbytes
    m, out = x[: SIDE * SIDE].reshape(SIDE, SIDE), z[: SIDE * SIDE].reshape(SIDE, SIDE)
    yield f"a row to {SIDE} x {SIDE}", ours, theirs, (m, y[:SIDE]), out, {}, 2 * m.nbytes
    yield f"a column to {SIDE} x {SIDE}", ours, theirs, (m, y[:SIDE].reshape(SIDE, 1)), out, {}, 2 * m.nbytes
    turned = y[: SIDE * SIDE].reshape(SIDE, SIDE).T
    yield f"transposed and not, {SIDE} x {SIDE}", ours, theirs, (m, turned), out, {}, 3 * m.nbytes
    sums = reduction("float32 x", "float32 y", "x", "a + b", "y = a", "0", "sums")
    cupy_sums = cupy.ReductionKernel("float32 x", "float32 y", "x", "a + b", "y = a", "0", "cupy_sums")
    for axis in 0, 1, None:
        out = cupy.empty(() if axis is None else SIDE, "f4")
        name = f"sum over {'all' if axis is None else f'axis {axis}'} of {SIDE} x {SIDE}"
        yield name, sums, cupy_sums, (m,), out, {"axis": axis}, m.nbytes
    halves = m.astype("f2")
    sums = reduction("float16 x", "float32 y", "x", "a + b", "y = a", "0", "sums16")
    cupy_sums = cupy.ReductionKernel("float16 x", "float32 y", "x", "a + b", "y = a", "0", "cupy_sums16")
    for axis in 0, 1:
        out = cupy.empty(SIDE, "f4")
        yield f"sum of float16 over axis {axis}", sums, cupy_sums, (halves,), out, {"axis": axis}, halves.nbytes


def main():
    source, target = cupy.empty(COUNT, "f4"), cupy.empty(COUNT, "f4")

    def copy():
        cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, 3, 0)

    results = []
    for name, ours, theirs, inputs, out, options, bytes_ in works():
        given = {} if not options else {"axes": options["axis"]}
        tensors, outputs = [tensor(array) for array in inputs], [tensor(out)]
        workspace = workspace_of(ours, tensors, outputs, **given) if options else None
        arguments = ours.arguments(tensors, outputs, ours.options(**given, workspace=workspace))

        def run():
            status = capi.lib.gc_kernel_run(*arguments, None)
            assert status == 0, capi.last_error()

        def run_cupy():
            theirs(*inputs, out, **options)

        run()
        mine = out.copy()
        run_cupy()
        different = float(cupy.abs(mine - out).max() / (1 + cupy.abs(out).max()))
        (of_copy, of_ours, of_cupy), samples = alternated(copy, run, run_cupy)
        rate = bytes_ / of_ours / (2 * source.nbytes / of_copy)
        print(f"{name:42} {bytes_ / of_ours / 1e6:7.0f} GB/s  {rate:5.3f} of the copy", end="  ")
        print(f"{of_ours / of_cupy:5.3f} of CuPy's time  differs by {different:.1e}", flush=True)
        results.append({"work": name, "bytes": bytes_, "copy": samples[0], "ours": samples[1], "cupy": samples[2]})
    host_times()
    if "--json" in sys.argv:
        print(json.dumps(results))


def from_c(arguments):
    """Microseconds of the host, the median of 10000 runs, by bench/gpu_host.c."""
    host = ctypes.CDLL(str(HERE.parent / "build" / "bench" / "gpu_host.so"))
    host.load_library.restype = ctypes.c_void_p
    library, seconds = host.load_library(os.environ["GRADCODEC_LIBRARY"].encode()), (ctypes.c_double * 10000)()
    synchronize = ctypes.CDLL("libcuda.so.1").cuStreamSynchronize
    host.kernel_host_seconds.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    kernel, inputs, n_inputs, outputs, n_outputs, options = arguments
    status = host.kernel_host_seconds(
        library, len(seconds), seconds, kernel, ctypes.cast(inputs, ctypes.c_void_p), n_inputs,
        ctypes.cast(outputs, ctypes.c_void_p), n_outputs, options, None,
        ctypes.cast(synchronize, ctypes.c_void_p),
    )  # fmt: skip
    assert status == 0, capi.last_error()
    return statistics.median(seconds) * 1e6


def host_times():
    x = cupy.zeros(1024, "f4")
    kernel = elementwise("float32 x, float32 y", "float32 z", "z = x + y", "small")
    tensors, outputs = [tensor(x), tensor(x + 1)], [tensor(cupy.empty_like(x))]
    arguments = kernel.arguments(tensors, outputs, kernel.options())
    start = time.perf_counter()
    kernel.prepare(tensors, outputs)
    print(f"first use, cache as it was: {(time.perf_counter() - start) * 1e3:.1f} ms")
    run = capi.lib.gc_kernel_run
    best = []
    for _ in range(50):
        cupy.cuda.Stream.null.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            run(*arguments, None)
        best.append((time.perf_counter() - start) / 100)
    print(f"2^10, one prepared run through ctypes: {min(best) * 1e6:.1f} us of the host")
    print(f"2^10, one prepared run from C: {from_c(arguments):.1f} us of the host")
    first_uses()


# Each in a process of its own, for both use the NVRTC that the process has loaded.
FIRST_USE = """
import sys, time
whose, sys.argv = sys.argv[1], ["x"]
import gpu_kernels as g, cupy
x = cupy.zeros(1024, "f4")
texts = "float32 x", "float32 y", "y = x * 3 + 1", "cold"
cupy.cuda.Stream.null.synchronize()
make = g.elementwise if whose == "ours" else cupy.ElementwiseKernel
given = ([g.tensor(x)], [g.tensor(x + 1)]) if whose == "ours" else (x,)
cupy.cuda.Stream.null.synchronize()
kernel, times = None, []
for _ in range(2):
    start = time.perf_counter()
    kernel = kernel or make(*texts)
    kernel(*given)
    cupy.cuda.Stream.null.synchronize()
    times.append((time.perf_counter() - start) * 1e3)
print(*times)
"""


def first_uses():
    with tempfile.TemporaryDirectory() as folder:
        folders = {"GRADCODEC_CACHE_DIR": folder + "/ours", "CUPY_CACHE_DIR": folder + "/cupy", "PYTHONPATH": str(HERE)}
        variables = {**os.environ, **folders}
        for words in "nothing cached", "from disk":
            times = {}
            for whose in "ours", "cupy":
                command = [sys.executable, "-c", FIRST_USE, whose]
                done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
                times[whose] = [float(word) for word in done.stdout.split()]
            (ours, again), (theirs, theirs_again) = times["ours"], times["cupy"]
            print(f"first use, {words}: {ours:.1f} ms, CuPy {theirs:.1f} ms; again: {again:.2f} ms, CuPy {theirs_again:.2f} ms")


if __name__ == "__main__":
    main()
