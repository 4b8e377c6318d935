"""Tensors on the device, described by hand. Host and device have the same buffer (tests/python/layouts.py): NumPy works
on the one, the library on the other."""

import contextlib
import os
import pathlib
import subprocess
import sys
from dataclasses import dataclass

import numpy as np

import capi
import driver
import layouts
from capi import AXIS_NONE, BIG, CUDA, DTYPES, LITTLE, DLDevice, Tensor, check, lib
from layouts import (
    EXACT, HostBench, Layout, assert_written, chunk_rows, random_bytes, random_floats, random_truth, truth_of, unpackbits,
    zeros_and_ones,
)  # fmt: skip
from models import not_below_zero
from tiers import both

HERE = pathlib.Path(__file__).resolve().parent


def device(index=0, kind=CUDA):
    return DLDevice(kind, index)


def run_child(name, *arguments, environment=None, silent=True):
    """Runs a function of children.py in a process of its own, which must succeed and write nothing to stderr."""
    child = subprocess.run(
        [sys.executable, str(HERE / "children.py"), name, *arguments],
        capture_output=True, text=True, timeout=120, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    good = child.returncode == 0 and not (silent and child.stderr)
    assert good, f"exit {child.returncode}\n{child.stdout}{child.stderr}"
    return child.stdout


def sized(*, gpu, quick, all):
    """Returns how much is tested: `gpu` on a GPU; on the stand-in driver, which is slow, an amount by tier."""
    return both(quick=quick, all=all) if driver.IS_STAND_IN else gpu


# --- the device -------------------------------------------------------------------------------------------------------


def move(tensor, host, address, where=None):
    return layouts.move(tensor, host, address, where or device())


class Bench(HostBench):
    """Calls on two pieces of device memory, one for inputs and one for outputs."""

    def __init__(self, size=96 << 20):
        self.source, self.target = driver.Memory(size), driver.Memory(size)
        self.cases = sized(gpu=200, quick=25, all=50)

    def take(self, tensor):
        return take(tensor)

    def place(self, layout, buffer, memory):
        if EXACT:
            memory.resize(buffer.size)
        assert buffer.size <= memory.size
        driver.upload(memory.address, buffer)
        return move(layout.describe(buffer), buffer.ctypes.data, memory.address)

    def source_of(self, layout, buffer):
        return self.place(layout, buffer, self.source)

    @contextlib.contextmanager
    def operand(self, array, shift=0):
        with driver.Memory(max(1, array.nbytes) + shift) as memory:
            driver.upload(memory.address + shift, array.reshape(-1).view(np.uint8))
            yield at(memory.address + shift, array.shape, array.dtype.name)

    def sources_of(self, layouts, buffers):
        if EXACT:
            self.source.resize(sum(buffer.size for buffer in buffers))
        tensors, address = [], self.source.address
        for layout, buffer in zip(layouts, buffers):
            driver.upload(address, buffer)
            tensors.append(move(layout.describe(buffer), buffer.ctypes.data, address))
            address += buffer.size
        return tensors

    def into(self, function, source, source_buffer, *between, target):
        src = self.source_of(source, source_buffer)
        buffer = target.buffer()
        dst = self.place(target, buffer, self.target)
        check(function(src.view, *between, dst.view, None))
        assert not src.releases and not dst.releases
        return driver.download(self.target.address, buffer.size)


def view_of(tensor):
    return tensor.contents.dl_tensor


def read(tensor, index=0):
    """Returns a copy of a tensor of the library, and checks all that it promises of its outputs."""
    return capi.read(tensor, (CUDA, index), driver.download)


def take(tensor, index=0):
    """Returns a copy of a tensor of the library, which is released."""
    array = read(tensor, index)
    lib.gc_tensor_free(tensor)
    return array


def at(address, shape, dtype="uint8", *, strides=None, index=0, kind=CUDA, byte_offset=0):
    """Returns a tensor at an address; as a capi.Tensor it has `view` and `managed`, and counts its releases."""
    tensor = Tensor(np.empty((), DTYPES[dtype][0]), dtype)
    view = tensor.struct.dl_tensor
    view.data, view.device, view.ndim = address, device(index, kind), len(shape)
    view.shape = capi.int64s(shape)
    view.strides = None if strides is None else capi.int64s(strides)
    view.byte_offset = byte_offset
    return tensor


# --- work -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A call of the stream tier, from elements of `source` to `target`, and NumPy's result of the same operation."""

    call: object  # function of both views and the stream
    source: Layout
    make: object  # function of a generator and a layout, which makes a source buffer
    target: Layout
    model: object  # function of the source array


SIDES = 301, 413
COUNT = SIDES[0] * SIDES[1]
_packed = Layout("uint8", (3, capi.chunk_bytes(COUNT, 3)))

# Every function of the stream tier, on contiguous memory and on other memory.
WORKS = {
    "pack_chunks": Work(
        lambda src, dst, stream: lib.gc_pack_chunks_into(src, BIG, dst, stream),
        Layout("bool", SIDES), random_truth, _packed, lambda array: chunk_rows(truth_of(array), 3),
    ),
    "pack_chunks, transposed": Work(
        lambda src, dst, stream: lib.gc_pack_chunks_into(src, LITTLE, dst, stream),
        Layout("int32", SIDES, order=(1, 0), shift=4), random_truth, _packed,
        lambda array: chunk_rows(truth_of(array), 3, LITTLE),
    ),
    "unpack_chunks": Work(
        lambda src, dst, stream: lib.gc_unpack_chunks_into(src, BIG, dst, stream),
        _packed, random_bytes, Layout("float32", SIDES),
        lambda array: zeros_and_ones(unpackbits(array, AXIS_NONE, COUNT).reshape(SIDES), "float32"),
    ),
    "unpack_chunks, every other": Work(
        lambda src, dst, stream: lib.gc_unpack_chunks_into(src, BIG, dst, stream),
        _packed, random_bytes, Layout("bool", SIDES, steps=(-1, 2)),
        lambda array: zeros_and_ones(unpackbits(array, AXIS_NONE, COUNT).reshape(SIDES), "bool"),
    ),
    "pack_signs": Work(
        lambda src, dst, stream: lib.gc_pack_signs_into(src, BIG, dst, stream),
        Layout("float32", SIDES), random_floats, _packed, lambda array: chunk_rows(not_below_zero(array, "float32"), 3),
    ),
    "pack_bits": Work(
        lambda src, dst, stream: lib.gc_pack_bits_into(src, 0, BIG, dst, stream),
        Layout("int16", SIDES), random_truth, Layout("uint8", (-(-SIDES[0] // 8), SIDES[1])),
        lambda array: np.packbits(truth_of(array), axis=0),
    ),
    "unpack_bits": Work(
        lambda src, dst, stream: lib.gc_unpack_bits_into(src, 1, LITTLE, dst, stream),
        Layout("uint8", (SIDES[0], 52)), random_bytes, Layout("uint8", (SIDES[0], 430)),
        lambda array: unpackbits(array, 1, 430, LITTLE),
    ),
    "unpack_bits, first axis": Work(
        lambda src, dst, stream: lib.gc_unpack_bits_into(src, 0, BIG, dst, stream),
        Layout("uint8", (38, SIDES[1])), random_bytes, Layout("float16", SIDES),
        lambda array: zeros_and_ones(unpackbits(array, 0, SIDES[0]), "float16"),
    ),
}  # fmt: skip


class Prepared:
    """Work on memory of its own in the current context, with its inputs; check() compares it with the model."""

    def __init__(self, name, seed=0, index=0):
        self.work = WORKS[name]
        rng = np.random.default_rng(seed)
        buffer, target = self.work.make(rng, self.work.source), self.work.target.buffer()
        self.size, self.out_size = buffer.size, target.size
        self.expected = self.work.model(self.work.source.carve(buffer))
        self.source, self.target = driver.Memory(self.size), driver.Memory(self.out_size)
        driver.upload(self.source.address, buffer)
        driver.upload(self.target.address, target)
        where = device(index)
        self.src = move(self.work.source.describe(buffer), buffer.ctypes.data, self.source.address, where)
        self.dst = move(self.work.target.describe(target), target.ctypes.data, self.target.address, where)

    def call(self, stream):
        """Runs the work on a stream; returns the status."""
        return self.work.call(self.src.view, self.dst.view, stream)

    def poison(self):
        driver.upload(self.target.address, self.work.target.buffer())

    def check(self, address=None):
        """Checks the target, or a copy of it."""
        found = driver.download(address or self.target.address, self.out_size)
        assert_written(self.work.target, found, self.expected)

    def free(self):
        self.source.free()
        self.target.free()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()
