"""Tensors on the device, described by hand, and models of what the library makes of them.

A `Layout` is a strided array inside a buffer. Host and device have the same buffer: NumPy works on the one, the library
on the other, and then every byte of the two must be equal: around, between and under the elements.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
from ctypes import byref
from dataclasses import dataclass

import numpy as np

import capi
import driver
from capi import AXIS_NONE, BIG, COUNT_ALL, CUDA, DTYPES, LITTLE, DLDevice, Managed, Tensor, lib
from models import ORDERS, bit_patterns, not_below_zero
from tiers import both

PATTERN = 0xA5
HERE = pathlib.Path(__file__).resolve().parent


def status_name(status):
    return lib.gc_status_name(status).decode()


def check(status):
    assert status == 0, f"{status_name(status)}: {capi.last_error()}"


def device(index=0, kind=CUDA):
    return DLDevice(kind, index)


@contextlib.contextmanager
def case(**what):
    """Says which case of a table or of a seed failed."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {what}")
        raise


def run_child(name, *arguments, environment=None, silent=True):
    """A function of children.py in a process of its own, which must end well and say nothing on stderr."""
    child = subprocess.run(
        [sys.executable, str(HERE / "children.py"), name, *arguments],
        capture_output=True, text=True, timeout=120, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    good = child.returncode == 0 and not (silent and child.stderr)
    assert good, f"exit {child.returncode}\n{child.stdout}{child.stderr}"
    return child.stdout


def sized(*, card, quick, all):
    """How much of something is tried on a GPU; and on the stand-in driver, which is slow, by tier."""
    return both(quick=quick, all=all) if driver.IS_STAND_IN else card


# --- models -----------------------------------------------------------------------------------------------------------


def numpy_axis(axis):
    return None if axis == AXIS_NONE else axis


def chunk_rows(truth, n_chunks, order=BIG):
    """[n_chunks, gc_chunk_bytes]: the bytes of numpy.packbits, zeros behind them."""
    size = capi.chunk_bytes(truth.size, n_chunks)
    rows = np.zeros(n_chunks * size, np.uint8)
    bits = np.packbits(np.ascontiguousarray(truth).reshape(-1), bitorder=ORDERS[order])
    rows[: bits.size] = bits
    return rows.reshape(n_chunks, size)


def unpackbits(array, axis, count, order=BIG):
    """numpy.unpackbits, but zeros where NumPy leaves memory as it found it: an empty array and a positive count."""
    bits = np.unpackbits(
        array, axis=numpy_axis(axis), count=None if count == COUNT_ALL else count, bitorder=ORDERS[order]
    )
    return bits if array.size else np.zeros_like(bits)


def truth_of(array):
    """Non-zero is true; a bool is a byte to us, and any byte but 0 is true."""
    return (array.view(np.uint8) if array.dtype == np.bool_ else array) != 0


def one(dtype):
    """The 1 of a type as it lies in NumPy's memory: bfloat16 is in uint16."""
    return np.uint16(0x3F80) if dtype == "bfloat16" else np.dtype(DTYPES[dtype][0]).type(1)


def zeros_and_ones(bits, dtype):
    return np.where(bits, one(dtype), np.dtype(DTYPES[dtype][0]).type(0))


# --- layouts ----------------------------------------------------------------------------------------------------------

MARGIN = 64  # bytes on both sides of the elements that no call may write
# Under AddressSanitizer (tests/sanitize.sh) memory ends with the elements.
EXACT = driver.IS_STAND_IN and "asan" in os.environ.get("LD_PRELOAD", "")


@dataclass(frozen=True)
class Layout:
    """Where the elements lie: dimensions in memory from the outermost in (`order`), a step for each (0: broadcast,
    negative: backwards), and `shift` bytes before the first, so that elements need not be aligned."""

    dtype: str
    shape: tuple
    order: tuple = None
    steps: tuple = None
    shift: int = 0
    odd: int = 1  # stands as the stride, in elements, where no step is ever taken: dimensions of one element
    null_strides: bool = False  # where the elements are in C order: strides may be a NULL pointer
    byte_offset: int = 0

    @property
    def numpy(self):
        return np.dtype(DTYPES[self.dtype][0])

    @property
    def _steps(self):
        return self.steps or (1,) * len(self.shape)

    def _extents(self):
        return [1 if step == 0 else size * abs(step) for size, step in zip(self.shape, self._steps)]

    def _bytes(self):
        return int(np.prod(self._extents(), dtype=np.int64)) * self.numpy.itemsize

    def buffer(self):
        return np.full(MARGIN + self.shift + self._bytes() + (0 if EXACT else MARGIN), PATTERN, np.uint8)

    def carve(self, buffer):
        """The array of this layout in a buffer of its size."""
        extents = self._extents()
        order = range(len(extents)) if self.order is None else self.order
        memory = buffer[MARGIN + self.shift :][: self._bytes()].view(self.numpy)
        whole = memory.reshape([extents[d] for d in order]).transpose(np.argsort(order).astype(int))
        picked = whole[(..., *(slice(None, None, step or None) for step in self._steps))]
        return picked if picked.shape == self.shape else np.broadcast_to(picked, self.shape)

    def describe(self, buffer):
        """The array in a buffer to the library, on the host."""
        array = self.carve(buffer)
        strides = None if array.flags.c_contiguous and self.null_strides else "explicit"
        tensor = Tensor(array, self.dtype, strides=strides, byte_offset=self.byte_offset)
        if strides:
            for d, size in enumerate(self.shape):
                if size == 1 or array.size == 0:
                    tensor.struct.dl_tensor.strides[d] = self.odd
        return tensor


def random_layout(rng, dtypes, shape, writable=False):
    plain = rng.random() < 0.4
    steps = (1, 1, 2, 3, -1, -2) if writable else (1, 1, 2, 3, -1, -2, 0)
    ndim = len(shape)
    return Layout(
        dtype=str(rng.choice(dtypes)),
        shape=shape,
        order=tuple(range(ndim)) if plain else tuple(int(d) for d in rng.permutation(ndim)),
        steps=tuple(1 if plain else int(rng.choice(steps)) for _ in shape),
        shift=int(rng.choice((0, 0, 1, 4, 8, 13))),
        odd=int(rng.choice((0, 1, -7, 2**40))),
        null_strides=bool(rng.random() < 0.5),
        byte_offset=int(rng.choice((0, 0, 1, 256))),
    )


def random_rows(rng, shape):
    """A C-contiguous uint8 side, which need not be aligned."""
    return Layout(
        "uint8", shape, shift=int(rng.integers(0, 18)), odd=int(rng.choice((1, -7, 2**40))),
        null_strides=bool(rng.random() < 0.5), byte_offset=int(rng.choice((0, 3))),
    )  # fmt: skip


def random_shape(rng):
    kind = rng.integers(0, 8)
    if kind == 0:
        return tuple(int(n) for n in rng.integers(0, 4, rng.integers(0, 6)))
    if kind == 1:
        return tuple(int(n) for n in rng.integers(0, 40, rng.integers(0, 4)))
    if kind in (2, 3):
        return (int(rng.integers(0, 6000)),)
    if kind == 4:
        return int(rng.integers(1, 6)), int(rng.integers(0, 700))
    if kind == 5:
        return int(rng.integers(0, 700)), int(rng.integers(1, 40))
    if kind == 6:
        return tuple(int(n) for n in rng.permutation([rng.integers(1, 9), rng.integers(1, 70), rng.integers(1, 140)]))
    return int(rng.integers(60, 300)), int(rng.integers(60, 300))


def random_truth(rng, layout):
    """A buffer of integers or bools, about half of them zero and the others often in one byte only."""
    buffer = layout.buffer()
    kept = rng.random(buffer.size) < 1 - 0.5 ** (1 / layout.numpy.itemsize)
    buffer[:] = np.where(kept, rng.integers(1, 256, buffer.size), 0)
    return buffer


def random_bytes(rng, layout):
    buffer = layout.buffer()
    buffer[:] = rng.integers(0, 256, buffer.size)
    return buffer


def random_floats(rng, layout):
    """A buffer of random bits, half of the elements special ones."""
    unsigned, special = bit_patterns(layout.dtype)
    buffer = random_bytes(rng, layout)
    memory = buffer[MARGIN + layout.shift :]
    memory = memory[: memory.size // layout.numpy.itemsize * layout.numpy.itemsize].view(unsigned)
    memory[:] = np.where(rng.random(memory.size) < 0.5, memory, rng.choice(special, memory.size))
    return buffer


# --- the device -------------------------------------------------------------------------------------------------------


def move(tensor, host, address, where=None):
    """Makes a description of a host array one of the same array in a copy of its buffer at `address`."""
    view = tensor.struct.dl_tensor
    view.data = (view.data or 0) + address - host
    view.device = where or device()
    return tensor


class Bench:
    """Two pieces of device memory, for what goes in and what comes out."""

    def __init__(self, size=96 << 20):
        self.source, self.target = driver.Memory(size), driver.Memory(size)

    def place(self, layout, buffer, memory):
        if EXACT:
            memory.resize(buffer.size)
        assert buffer.size <= memory.size
        driver.upload(memory.address, buffer)
        return move(layout.describe(buffer), buffer.ctypes.data, memory.address)

    def into(self, function, source, source_buffer, *between, target, stream=None):
        """The buffer of the layout `target` after the call, which must succeed."""
        src = self.place(source, source_buffer, self.source)
        buffer = target.buffer()
        dst = self.place(target, buffer, self.target)
        check(function(src.view, *between, dst.view, stream))
        if stream not in (None, driver.LEGACY):
            driver.wait_for(stream)
        assert not src.releases and not dst.releases
        return driver.download(self.target.address, buffer.size)

    def new(self, function, source, source_buffer, *between):
        """What a function of the simple tier makes, copied to the host and released."""
        src = self.place(source, source_buffer, self.source)
        out = Managed()
        check(function(src.managed, *between, byref(out)))
        assert not src.releases
        return take(out)


def assert_written(target, buffer, expected):
    """That the buffer holds `expected` in this layout and its pattern everywhere else."""
    twin = target.buffer()
    target.carve(twin)[...] = expected
    if not np.array_equal(buffer, twin):
        at = np.flatnonzero(buffer != twin)
        raise AssertionError(
            f"{at.size} bytes of {twin.size} differ, the first at {at[0]}: {buffer[at[0]]:#x}, "
            f"not {twin[at[0]]:#x}; the last at {at[-1]}; elements begin at {MARGIN + target.shift}"
        )


def view_of(tensor):
    return tensor.contents.dl_tensor


def read(tensor, index=0):
    """A copy of a tensor of the library, after a look at everything it promises of its outputs."""
    managed = tensor.contents
    view = managed.dl_tensor
    shape = capi.shape_of(tensor)
    dtype = next(np.dtype(d) for d, code, bits in DTYPES.values() if (code, bits) == (view.dtype.code, view.dtype.bits))
    count = int(np.prod(shape, dtype=np.int64))
    assert managed.deleter, "an output has a deleter, always"
    assert (view.device.device_type, view.device.device_id, view.dtype.lanes) == (CUDA, index, 1)
    assert view.byte_offset == 0
    assert view.ndim == 0 or view.strides, "an output's strides are explicit"
    assert bool(view.data) == (count > 0), "an empty output has no data, any other has"
    if count == 0:
        return np.empty(shape, dtype)
    assert all(n == 1 or s == c for n, s, c in zip(shape, view.strides[: view.ndim], capi.c_strides(shape)))
    return driver.download(view.data, count * dtype.itemsize).view(dtype).reshape(shape)


def take(tensor, index=0):
    """A copy of a tensor of the library, which is released."""
    array = read(tensor, index)
    lib.gc_tensor_free(tensor)
    return array


def at(address, shape, dtype="uint8", *, strides=None, index=0, kind=CUDA, byte_offset=0):
    """A tensor at an address; as a capi.Tensor it has `view`, `managed` and counts its releases."""
    tensor = Tensor(np.empty((), DTYPES[dtype][0]), dtype)
    view = tensor.struct.dl_tensor
    view.data, view.device, view.ndim = address, device(index, kind), len(shape)
    view.shape = capi.int64s(shape)
    view.strides = None if strides is None else capi.int64s(strides)
    view.byte_offset = byte_offset
    return tensor


def pack_chunks(source, n_chunks):
    """The pointers to the chunks, the caller's."""
    out = (Managed * n_chunks)()
    check(lib.gc_pack_chunks(source.managed, n_chunks, out))
    return list(out)


def empty(shape, dtype="uint8", index=0):
    out = Managed()
    check(lib.gc_tensor_empty(device(index), capi.dldtype(dtype), len(shape), capi.int64s(shape), byref(out)))
    return out


# --- work -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """One call of the stream tier: from elements of `source` to `target`, and what NumPy makes of the same."""

    call: object  # of both views and the stream
    source: Layout
    make: object  # a source buffer of a generator and a layout
    target: Layout
    model: object  # of the source array


SIDES = 301, 413
COUNT = SIDES[0] * SIDES[1]
_packed = Layout("uint8", (3, capi.chunk_bytes(COUNT, 3)))

# Every function of the stream tier, on memory in one piece and on memory that is not.
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
    "pack_signs, backwards": Work(
        lambda src, dst, stream: lib.gc_pack_signs_into(src, BIG, dst, stream),
        Layout("bfloat16", SIDES, steps=(1, -1)), random_floats, _packed,
        lambda array: chunk_rows(not_below_zero(array, "bfloat16"), 3),
    ),
    "pack_bits": Work(
        lambda src, dst, stream: lib.gc_pack_bits_into(src, 0, BIG, dst, stream),
        Layout("int16", SIDES), random_truth, Layout("uint8", (-(-SIDES[0] // 8), SIDES[1])),
        lambda array: np.packbits(truth_of(array), axis=0),
    ),
    "pack_bits, last axis": Work(
        lambda src, dst, stream: lib.gc_pack_bits_into(src, -1, BIG, dst, stream),
        Layout("bool", SIDES), random_truth, Layout("uint8", (SIDES[0], -(-SIDES[1] // 8))),
        lambda array: np.packbits(truth_of(array), axis=1),
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
    """A piece of work on memory of its own in the current context, its inputs there; check() holds it to the model."""

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
        """The status."""
        return self.work.call(self.src.view, self.dst.view, stream)

    def poison(self):
        driver.upload(self.target.address, self.work.target.buffer())

    def check(self, address=None):
        """Of the target, or of a copy of it."""
        found = driver.download(address or self.target.address, self.out_size)
        assert_written(self.work.target, found, self.expected)

    def free(self):
        self.source.free()
        self.target.free()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()
