#!/usr/bin/env python3
"""Host time of calls from Python, beside C's and the frameworks' own: build/bench/python_host.json and a table.

    python3 bench/python_host.py [--quick] [--library PATH]

What a call costs before the device has done anything: batches of calls on small arrays, the device idle before each and
waited for after it, outside of the time. On the CPU the work, of 1024 elements, is in it. All calls take turns. A row's
`C` is the C function, called by ctypes with arguments that were prepared, in the same turn: the least that Python could
take. Of each the median of the batches, and the least, which other processes on the machine disturb less.

With NumPy; with PyTorch and CuPy where they are, and on CUDA where there is a device. With JAX from the call of a
compiled function to its result, beside one of XLA's own.
"""

import argparse
import ctypes
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from ctypes import POINTER, byref, c_int32, c_int64, c_size_t, c_void_p

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import gradcodec  # noqa: E402 the path comes first
from common import commit  # noqa: E402
from gradcodec import CPU, CUDA, DTYPES, GradCodec, GradCodecError  # noqa: E402
from gradcodec._abi import Device, DLTensor, DType, RunOptions  # noqa: E402

ELEMENTS, TENSORS, OF_EACH = 1024, 100, 64
BATCH = 1e-3  # seconds that a batch takes: less than a process has a CPU for itself
MOST_CALLS = 100  # below the launches that a stream takes before it makes the host wait (1024)


class Place:
    """Where arrays lie, and how a framework makes them there."""

    def __init__(self, name, device, zeros, address, wait=lambda: None, stream=1, **own):
        self.name, self.device, self.zeros, self.address = name, device, zeros, address
        self.wait, self.stream, self.own = wait, stream, own

    def aligned(self, count):
        """Bytes that begin at 16, as payloads want it."""
        memory = self.zeros(count + 16, "uint8")
        start = -self.address(memory) % 16
        return memory[start : start + count]

    def view(self, array, dtype="float32"):
        """The same array for C, to be kept."""
        shape = (c_int64 * len(array.shape))(*array.shape)
        return DLTensor(self.address(array), Device(self.device, 0), len(shape), DType(*DTYPES[dtype]), shape, None, 0)


def places():
    def address(array):
        return array.ctypes.data

    a = np.ones(ELEMENTS, "f4")
    yield Place("NumPy", CPU, np.zeros, address, **{"numpy.add": lambda out=a.copy(): np.add(a, a, out)})
    try:
        import torch
    except ImportError:
        print("no PyTorch: left out")
    else:
        torch.set_num_threads(1)
        for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
            yield torch_place(torch, device)
    try:
        import cupy

        cupy.zeros(1)
    except Exception as error:
        print(f"no CuPy, or no device for it ({type(error).__name__}): left out")
    else:
        yield cupy_place(cupy)
    try:
        import jax
    except ImportError:
        print("no JAX: left out")
        return
    yield jax_place(jax, "cpu")
    try:
        jax.devices("cuda")
    except RuntimeError:
        print("no CUDA device for JAX: left out")
    else:
        yield jax_place(jax, "cuda")


def torch_place(torch, device):
    x, out = (torch.ones(ELEMENTS, device=device) for _ in range(2))
    own = {"torch.add": lambda: torch.add(x, x, out=out)}

    def zeros(shape, dtype="float32"):
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    def address(array):
        return array.data_ptr()

    if device == "cpu":
        return Place("PyTorch, CPU", CPU, zeros, address, **own)
    stream = torch.cuda.current_stream().cuda_stream or 1
    return Place("PyTorch, CUDA", CUDA, zeros, address, torch.cuda.synchronize, stream, **own)


def cupy_place(cupy):
    x, out = cupy.ones(ELEMENTS, "f4"), cupy.zeros(ELEMENTS, "f4")
    kernel = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x + x", "double_it")

    def wait():
        cupy.cuda.get_current_stream().synchronize()

    own = {"cupy.add": lambda: cupy.add(x, x, out), "cupy.ElementwiseKernel": lambda: kernel(x, out)}
    return Place("CuPy", CUDA, cupy.zeros, lambda array: array.data.ptr, wait, **own)


def jax_place(jax, platform):
    """Calls from within programs of XLA's: what a handler takes is their difference from the first."""
    import gradcodec.jax

    x = jax.device_put(np.ones(ELEMENTS, "f4"), jax.devices(platform)[0])
    codec = gradcodec.jax.Codec("int8", raw=(False,))
    functions = {
        "x + 1": lambda x: x + 1, "pack_signs": gradcodec.jax.pack_signs, "encode": lambda x: codec.encode(x)[0],
        "encode, decode": lambda x: codec.decode(codec.encode(x)[0], x),
    }  # fmt: skip
    compiled = {name: jax.jit(function) for name, function in functions.items()}
    own = {f"jit: {name}": lambda each=each: each(x).block_until_ready() for name, each in compiled.items()}
    return Place(f"JAX, {platform}", CUDA if platform == "cuda" else CPU, None, None, **own)


def cases(library, place):
    """By name: the call from Python and the same from C."""

    def c(name, *arguments):
        """A call of C, all of whose arguments are there."""
        function = library.lib[name]
        function.restype = c_int32

        def call():
            if function(*arguments):
                raise RuntimeError(library.lib.gc_last_error().decode())

        return call

    stream, found = c_void_p(place.stream), {}
    x, y = place.zeros(ELEMENTS, "float32"), place.zeros(ELEMENTS, "float32")
    bits = place.zeros((1, ELEMENTS // 8), "uint8")
    of_x, of_y, of_bits = place.view(x), place.view(y), place.view(bits, "uint8")
    found["pack_signs_into"] = (
        lambda: library.pack_signs_into(x, bits),
        c("gc_pack_signs_into", byref(of_x), c_int32(0), byref(of_bits), stream),
    )
    for count, each in (1, ELEMENTS), (TENSORS, OF_EACH):
        codec = library.codec(gradcodec.ONEBIT, [each] * count, device=(place.device, 0))
        values = [place.zeros(each, "float32") for _ in range(count)]
        payload = place.aligned(codec.payload_bytes)
        views, of_payload = [place.view(value) for value in values], place.view(payload, "uint8")
        list_of = (POINTER(DLTensor) * count)(*map(ctypes.pointer, views))
        handle, n = c_void_p(codec._handle), c_size_t(count)
        found[f"encode of {count}"] = (
            lambda codec=codec, values=values, payload=payload: codec.encode(values, payload),
            c("gc_codec_encode", handle, list_of, n, None, None, byref(of_payload), stream),
        )
        found[f"decode of {count}"] = (
            lambda codec=codec, values=values, payload=payload: codec.decode(payload, values),
            c("gc_codec_decode", handle, byref(of_payload), c_int32(1), None, c_int32(0), list_of, n, stream),
        )
    if place.device == CUDA:
        try:
            found["a kernel"] = kernel_call(library, c, x, y, of_x, of_y, stream)
        except GradCodecError as error:
            print(f"{place.name}: no compiled kernel: {error}")
    return found


def kernel_call(library, c, x, y, of_x, of_y, stream):
    kernel = library.elementwise("float32 x", "float32 y", "y = x + x", "double_it")
    kernel([x], [y])
    lists = [(POINTER(DLTensor) * 1)(ctypes.pointer(view)) for view in (of_x, of_y)]
    options, handle, one = RunOptions(ctypes.sizeof(RunOptions)), c_void_p(kernel._handle), c_size_t(1)
    return (
        lambda: kernel([x], [y]),
        c("gc_kernel_run", handle, lists[0], one, lists[1], one, byref(options), stream),
    )


def batch(call, wait, count):
    """Seconds a call."""
    wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def measure(calls, wait, batches):
    """Microseconds a call by name, one value a batch; the calls take turns."""
    once = {name: min(batch(call, wait, 3) for _ in range(5)) for name, call in calls.items()}
    counts = {name: min(MOST_CALLS, max(1, round(BATCH / seconds))) for name, seconds in once.items()}
    times = {name: [] for name in calls}
    for _ in range(batches):
        for name, call in calls.items():
            times[name].append(batch(call, wait, counts[name]) * 1e6)
    wait()
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer batches")
    parser.add_argument("--library", help="of the library, if not the one that the package finds")
    arguments = parser.parse_args()
    if arguments.library:
        os.environ["GRADCODEC_LIBRARY"] = arguments.library  # for gradcodec.jax
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    batches, library = 20 if arguments.quick else 200, GradCodec(arguments.library)
    result = {"commit": commit(), "python": platform.python_version(), "elements": ELEMENTS, "microseconds": {}}
    for place in places():
        try:
            of_place = cases(library, place) if place.zeros else {}
        except GradCodecError as error:
            print(f"{place.name}: left out: {error}")
            continue
        calls = dict(place.own)
        for name, (python, c) in of_place.items():
            calls[name], calls[f"{name}, C"] = python, c
        times = measure(calls, place.wait, batches)
        print(f"{place.name}, us a call:\n{'':26}  median   least     C: median   least")
        for name in (*place.own, *of_place):
            numbers = [of(times[each]) for each in (name, f"{name}, C") if each in times for of in (statistics.median, min)]
            print(f"  {name:24}{numbers[0]:8.2f}{numbers[1]:8.2f}" + "".join(f"{each:11.2f}" for each in numbers[2:]))
        result["microseconds"][place.name] = times
    path = ROOT / "build" / "bench" / "python_host.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
