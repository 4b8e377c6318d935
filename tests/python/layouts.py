"""Strided arrays inside buffers, on the CPU and on CUDA, and NumPy's packed and unpacked bits of them.

A `Layout` is a strided array inside a buffer that is full of a pattern. NumPy writes the expected result into a twin of
the buffer, and then every byte of the two must be equal: around, between and under the elements.
"""

import contextlib
import os
from dataclasses import dataclass

import numpy as np

import capi
from capi import AXIS_NONE, BIG, COUNT_ALL, DTYPES, FLOATS, Managed, Tensor, byref, lib
from models import ORDERS, bit_patterns, not_below_zero

PATTERN = 0xA5
MARGIN = 64  # bytes on both sides of the elements that no call may write
# Under AddressSanitizer (tests/sanitize.sh) memory ends with the elements.
EXACT = bool(os.environ.get("GRADCODEC_DRIVERS")) and "asan" in os.environ.get("LD_PRELOAD", "")


@contextlib.contextmanager
def case(**what):
    """Adds the case of a table or of a seed to an exception."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {what}")
        raise


@dataclass(frozen=True)
class Layout:
    """Places of elements: dimensions in memory from the outermost in (`order`), a step for each (0: broadcast,
    negative: backwards), and `shift` bytes before the first, so that elements need not be aligned."""

    dtype: str
    shape: tuple
    order: tuple = None
    steps: tuple = None
    shift: int = 0
    odd: int = 1  # stride, in elements, of dimensions of one element, where no step is ever taken
    null_strides: bool = False  # True: strides are a NULL pointer, if the elements are in C order
    byte_offset: int = 0
    row: int = 0  # elements of memory behind each line of the innermost dimension

    @property
    def numpy(self):
        return np.dtype(DTYPES[self.dtype][0])

    @property
    def _steps(self):
        return self.steps or (1,) * len(self.shape)

    @property
    def _order(self):
        return range(len(self.shape)) if self.order is None else self.order

    def _extents(self):
        return [1 if step == 0 else size * abs(step) for size, step in zip(self.shape, self._steps)]

    def _memory(self):
        """Returns the shape of the memory, from the outermost dimension in."""
        extents = self._extents()
        return [extents[d] + self.row * (d == self._order[-1]) for d in self._order]

    def _bytes(self):
        return int(np.prod(self._memory(), dtype=np.int64)) * self.numpy.itemsize

    def buffer(self):
        return np.full(MARGIN + self.shift + self._bytes() + (0 if EXACT else MARGIN), PATTERN, np.uint8)

    def carve(self, buffer):
        """Returns the array of this layout in a buffer of its size."""
        memory = buffer[MARGIN + self.shift :][: self._bytes()].view(self.numpy).reshape(self._memory())
        if self.row:
            memory = memory[..., : -self.row]
        whole = memory.transpose(np.argsort(self._order).astype(int))
        picked = whole[(..., *(slice(None, None, step or None) for step in self._steps))]
        return picked if picked.shape == self.shape else np.broadcast_to(picked, self.shape)

    def describe(self, buffer):
        """Returns the array in a buffer as a tensor on the host."""
        array = self.carve(buffer)
        strides = None if array.flags.c_contiguous and self.null_strides else "explicit"
        tensor = Tensor(array, self.dtype, strides=strides, byte_offset=self.byte_offset)
        if strides:
            for d, size in enumerate(self.shape):
                if size == 1 or array.size == 0:
                    tensor.struct.dl_tensor.strides[d] = self.odd
        return tensor


def move(tensor, host, address, where):
    """Changes a description of a host array to one of the same array in a copy of its buffer at `address`."""
    view = tensor.struct.dl_tensor
    view.data = (view.data or 0) + address - host
    view.device = where
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
    """Returns a C-contiguous uint8 side, which need not be aligned."""
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
    """Returns a buffer of integers or bools, about half of them zero, the others often with bits in one byte only."""
    buffer = layout.buffer()
    kept = rng.random(buffer.size) < 1 - 0.5 ** (1 / layout.numpy.itemsize)
    buffer[:] = np.where(kept, rng.integers(1, 256, buffer.size), 0)
    return buffer


def random_bytes(rng, layout):
    buffer = layout.buffer()
    buffer[:] = rng.integers(0, 256, buffer.size)
    return buffer


def random_floats(rng, layout):
    """Returns a buffer of random bits, half of the elements special ones."""
    unsigned, special = bit_patterns(layout.dtype)
    buffer = random_bytes(rng, layout)
    memory = buffer[MARGIN + layout.shift :]
    memory = memory[: memory.size // layout.numpy.itemsize * layout.numpy.itemsize].view(unsigned)
    memory[:] = np.where(rng.random(memory.size) < 0.5, memory, rng.choice(special, memory.size))
    return buffer


def assert_written(target, buffer, expected):
    """Checks that the buffer holds `expected` in this layout and its pattern everywhere else."""
    twin = target.buffer()
    target.carve(twin)[...] = expected
    if not np.array_equal(buffer, twin):
        at = np.flatnonzero(buffer != twin)
        raise AssertionError(
            f"{at.size} bytes of {twin.size} differ, the first at {at[0]}: {buffer[at[0]]:#x}, "
            f"not {twin[at[0]]:#x}; the last at {at[-1]}; elements begin at {MARGIN + target.shift}"
        )


# --- models -----------------------------------------------------------------------------------------------------------


def numpy_axis(axis):
    return None if axis == AXIS_NONE else axis


def chunk_rows(truth, n_chunks, order=BIG):
    """Returns [n_chunks, gc_chunk_bytes]: the bytes of numpy.packbits, and zeros behind them."""
    size = capi.chunk_bytes(truth.size, n_chunks)
    rows = np.zeros(n_chunks * size, np.uint8)
    bits = np.packbits(np.ascontiguousarray(truth).reshape(-1), bitorder=ORDERS[order])
    rows[: bits.size] = bits
    return rows.reshape(n_chunks, size)


def unpackbits(array, axis, count, order=BIG):
    """Returns numpy.unpackbits(), but zeros where NumPy does not set memory: an empty array and a positive count."""
    bits = np.unpackbits(
        array, axis=numpy_axis(axis), count=None if count == COUNT_ALL else count, bitorder=ORDERS[order]
    )
    return bits if array.size else np.zeros_like(bits)


def truth_of(array):
    """Returns True for non-zero elements. A bool is a byte to the library, and any byte but 0 is true."""
    return (array.view(np.uint8) if array.dtype == np.bool_ else array) != 0


def one(dtype):
    """Returns the 1 of a type as it is in NumPy's memory: bfloat16 is in uint16."""
    return np.uint16(0x3F80) if dtype == "bfloat16" else np.dtype(DTYPES[dtype][0]).type(1)


def zeros_and_ones(bits, dtype):
    return np.where(bits, one(dtype), np.dtype(DTYPES[dtype][0]).type(0))


def as_written(array):
    """Returns the array as integers, so that NaNs compare by their patterns."""
    return np.ascontiguousarray(array).view(f"uint{8 * array.dtype.itemsize}")


# --- calls ------------------------------------------------------------------------------------------------------------


class HostBench:
    """Calls on memory of the CPU. gpu.Bench has the same methods for a device."""

    cases = 100
    take = staticmethod(capi.take)

    def source_of(self, layout, buffer):
        return layout.describe(buffer)

    def sources_of(self, layouts, buffers):
        return [self.source_of(layout, buffer) for layout, buffer in zip(layouts, buffers)]

    def operand(self, array, shift=0):
        """Returns a context with a tensor of an array's elements, `shift` bytes beyond an alignment."""
        memory = np.zeros(array.nbytes + shift, np.uint8)[shift:].view(array.dtype)
        memory[...] = array.reshape(-1)
        return contextlib.nullcontext(Tensor(memory.reshape(array.shape)))

    def into(self, function, source, source_buffer, *between, target):
        """Returns the buffer of the layout `target` after the call, which must succeed."""
        buffer = target.buffer()
        src, dst = source.describe(source_buffer), target.describe(buffer)
        capi.check(function(src.view, *between, dst.view, None))
        assert not src.releases and not dst.releases
        return buffer

    def new(self, function, source, source_buffer, *between):
        """Returns the result of a function of the simple tier, copied and released."""
        src, out = self.source_of(source, source_buffer), Managed()
        capi.check(function(src.managed, *between, byref(out)))
        assert not src.releases
        return self.take(out)

    def pack(self, function, source, source_buffer, n_chunks):
        """Returns the pointers to the chunks that a function of the simple tier packs; the caller owns them."""
        src, out = self.source_of(source, source_buffer), (Managed * n_chunks)()
        capi.check(function(src.managed, n_chunks, out))
        assert not src.releases
        return list(out)


def both_ways(bench, line, n_chunks, order, rng, *, row_shift=0):
    """Packs and unpacks in a layout."""
    function, make, bits_of = lib.gc_pack_chunks_into, random_truth, truth_of
    if line.dtype in FLOATS:
        function, make = lib.gc_pack_signs_into, random_floats
        bits_of = lambda array: not_below_zero(array, line.dtype)  # noqa: E731
    buffer = make(rng, line)
    expected = chunk_rows(bits_of(line.carve(buffer)), n_chunks, order)
    rows = Layout("uint8", expected.shape, shift=row_shift)
    with case(line=line, rows=rows, order=order, way="pack"):
        assert_written(rows, bench.into(function, line, buffer, order, target=rows), expected)
    buffer = random_bytes(rng, rows)
    count = int(np.prod(line.shape, dtype=np.int64))
    bits = unpackbits(rows.carve(buffer), AXIS_NONE, count, order).reshape(line.shape)
    with case(line=line, rows=rows, order=order, way="unpack"):
        found = bench.into(lib.gc_unpack_chunks_into, rows, buffer, order, target=line)
        assert_written(line, found, zeros_and_ones(bits, line.dtype))


def along_axes(bench, line, order, rng):
    """Packs and unpacks in a layout along each axis."""
    for axis in range(len(line.shape)):
        buffer = random_truth(rng, line)
        expected = np.packbits(truth_of(line.carve(buffer)), axis, ORDERS[order])
        with case(line=line, axis=axis, order=order):
            assert np.array_equal(bench.new(lib.gc_pack_bits, line, buffer, axis, order), expected)
            rows = Layout("uint8", expected.shape)
            buffer = random_bytes(rng, rows)
            bits = np.unpackbits(rows.carve(buffer), axis, line.shape[axis], ORDERS[order])
            found = bench.into(lib.gc_unpack_bits_into, rows, buffer, axis, order, target=line)
            assert_written(line, found, zeros_and_ones(bits, line.dtype))
