"""Bits in every layout against numpy.packbits and numpy.unpackbits.

A `Layout` is a strided array inside a buffer. The `_into` forms write into one whose buffer is full of a pattern;
what is expected is written by NumPy into a twin of it, and then the two buffers must be equal, every byte of them:
around, between and under the elements.
"""

import ctypes
import itertools
import os
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import capi
from capi import (
    AXIS_NONE, BIG, COUNT_ALL, CUDA_HOST, DTYPES, FLOATS, LITTLE, Managed, Tensor, byref, check, lib,
    pack_chunks, read, take,
)  # fmt: skip
from models import ORDERS, TRUTHS, UNPACKED, bit_patterns, not_below_zero
from tiers import both

PATTERN = 0xA5


# --- layouts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where the elements lie: dimensions in memory from the outermost in (`order`), a step for each (0: broadcast,
    negative: backwards), and `shift` bytes before the first, so that elements need not be aligned."""

    dtype: str
    shape: tuple
    order: tuple
    steps: tuple
    shift: int
    odd: int  # stands as the stride, in elements, where no step is ever taken: dimensions of one element
    null_strides: bool  # where the elements are in C order: strides may be a NULL pointer
    byte_offset: int

    @property
    def numpy(self):
        return np.dtype(DTYPES[self.dtype][0])

    def buffer(self):
        return np.full(self.shift + self._extent_bytes() + 16, PATTERN, np.uint8)

    def _extents(self):
        return [1 if step == 0 else size * abs(step) for size, step in zip(self.shape, self.steps)]

    def _extent_bytes(self):
        return int(np.prod(self._extents(), dtype=np.int64)) * self.numpy.itemsize

    def carve(self, buffer):
        """The array of this layout in a buffer of its size."""
        extents = self._extents()
        memory = buffer[self.shift : self.shift + self._extent_bytes()].view(self.numpy)
        whole = memory.reshape([extents[d] for d in self.order]).transpose(np.argsort(self.order).astype(int))
        picked = whole[(..., *(slice(None, None, step or None) for step in self.steps))]
        return picked if picked.shape == self.shape else np.broadcast_to(picked, self.shape)

    def describe(self, array):
        """The same array to the library."""
        compact = array.flags.c_contiguous
        strides = None if compact and self.null_strides else "explicit"
        tensor = Tensor(array, self.dtype, strides=strides, byte_offset=self.byte_offset)
        if strides:
            for d, size in enumerate(self.shape):
                if size == 1 or array.size == 0:
                    tensor.struct.dl_tensor.strides[d] = self.odd
        return tensor


def shapes():
    small = st.one_of(st.lists(st.integers(0, 6), max_size=3), st.lists(st.integers(0, 3), max_size=5)).map(tuple)
    line = st.integers(0, 2100).map(lambda n: (n,))
    sheet = st.tuples(st.integers(1, 5), st.integers(0, 300))
    return st.one_of(small, line, sheet, st.permutations([1, 3, 130]).map(tuple))


@st.composite
def layouts(draw, dtypes, *, shape=None, writable=False):
    shape = draw(shapes()) if shape is None else shape
    plain = draw(st.booleans())
    steps = st.sampled_from((1, 1, 2, 3, -1, -2) if writable else (1, 1, 2, 3, -1, -2, 0))
    return Layout(
        dtype=draw(st.sampled_from(dtypes)),
        shape=shape,
        order=tuple(range(len(shape)) if plain else draw(st.permutations(range(len(shape))))),
        steps=tuple(1 if plain else draw(steps) for _ in shape),
        shift=draw(st.sampled_from((0, 0, 1, 4, 13))),
        odd=draw(st.sampled_from((0, 1, -7, 2**40))),
        null_strides=draw(st.booleans()),
        byte_offset=draw(st.sampled_from((0, 0, 1, 256))),
    )


@st.composite
def truths(draw, dtypes=TRUTHS, shape=None):
    """A Tensor of integers or bools, about half of them zero and the others often in one byte only; and its truth."""
    layout = draw(layouts(dtypes, shape=shape))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    buffer = layout.buffer()
    kept = rng.random(buffer.size) < 1 - 0.5 ** (1 / layout.numpy.itemsize)
    buffer[:] = np.where(kept, rng.integers(1, 256, buffer.size), 0)
    array = layout.carve(buffer)
    # A bool is a byte to us, and any byte but 0 is true.
    return layout.describe(array), (array.view(np.uint8) if layout.dtype == "bool" else array) != 0


@st.composite
def packed(draw, shape=None):
    """A Tensor of random bytes in any layout, and its values."""
    layout = draw(layouts(("uint8",), shape=shape))
    buffer = layout.buffer()
    buffer[:] = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(0, 256, buffer.size)
    array = layout.carve(buffer)
    return layout.describe(array), array


@st.composite
def chunk_sets(draw):
    """n_elements and the chunks for them, each with a layout of its own, their padding bits random like the others."""
    n_elements = draw(st.integers(0, 2100))
    n_chunks = draw(st.integers(1, 9))
    shape = (capi.chunk_bytes(n_elements, n_chunks),)
    return n_elements, [draw(packed(shape)) for _ in range(n_chunks)]


orders = st.sampled_from((BIG, LITTLE))


def draw_axis(data, ndim):
    """Each axis there is, from either end; a 0-dimensional tensor counts as one of one dimension."""
    return data.draw(st.sampled_from((AXIS_NONE, *range(-max(1, ndim), max(1, ndim)))), label="axis")


def numpy_axis(axis):
    return None if axis == AXIS_NONE else axis


def padded(array, size):
    return np.concatenate([array, np.zeros(size - array.size, array.dtype)])


def chunk_rows(truth, n_chunks, order=BIG):
    """[n_chunks, gc_chunk_bytes]: the bytes of numpy.packbits, zeros behind them."""
    size = capi.chunk_bytes(truth.size, n_chunks)
    bits = np.packbits(np.ascontiguousarray(truth).reshape(-1), bitorder=ORDERS[order])
    return padded(bits, n_chunks * size).reshape(n_chunks, size)


def unpackbits(array, axis, count, order):
    """numpy.unpackbits, but zeros where NumPy leaves memory as it found it: an empty array and a positive count."""
    axis, order = numpy_axis(axis), ORDERS[order]
    if count == COUNT_ALL:
        return np.unpackbits(array, axis=axis, bitorder=order)
    bits = np.unpackbits(array, axis=axis, count=count, bitorder=order)
    return bits if array.size else np.zeros_like(bits)


def one(dtype):
    """The 1 of a type as it lies in NumPy's memory: bfloat16 is in uint16."""
    return np.uint16(0x3F80) if dtype == "bfloat16" else np.dtype(DTYPES[dtype][0]).type(1)


def assert_written(layout, buffer, expected):
    """That the buffer holds `expected` in this layout and its pattern everywhere else."""
    twin = layout.buffer()
    layout.carve(twin)[...] = expected
    np.testing.assert_array_equal(buffer, twin)


def call_into(function, source, *between, layout):
    """The buffer of `layout` after the call, which must succeed."""
    buffer = layout.buffer()
    target = layout.describe(layout.carve(buffer))
    check(function(source.view, *between, target.view, None))
    assert not source.releases and not target.releases
    return buffer


# --- chunks -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**63 - 1), st.integers(1, 2**40))
@example(2**63 - 1, 1)
@example(2**63 - 1, 7)
@example(0, 1)
def test_chunk_bytes_is_the_formula(n_elements, n_chunks):
    assert lib.gc_chunk_bytes(n_elements, n_chunks) == capi.chunk_bytes(n_elements, n_chunks)


@given(truths(), st.integers(1, 9))
def test_pack_chunks_is_packbits_split(source, n_chunks):
    tensor, truth = source
    expected = chunk_rows(truth, n_chunks)
    chunks = [take(chunk) for chunk in pack_chunks(tensor, n_chunks)]
    assert [c.dtype for c in chunks] == [np.uint8] * n_chunks
    np.testing.assert_array_equal(np.stack(chunks), expected)


@given(truths(), st.integers(1, 9), orders, st.data())
def test_pack_chunks_into_writes_its_rows_and_nothing_else(source, n_chunks, order, data):
    tensor, truth = source
    expected = chunk_rows(truth, n_chunks, order)
    layout = data.draw(rows(expected.shape))
    assert_written(layout, call_into(lib.gc_pack_chunks_into, tensor, order, layout=layout), expected)


@st.composite
def rows(draw, shape):
    """A C-contiguous uint8 side, which need not be aligned."""
    return Layout(
        "uint8", shape, tuple(range(len(shape))), (1,) * len(shape), draw(st.integers(0, 17)),
        draw(st.sampled_from((1, -7, 2**40))), draw(st.booleans()), draw(st.sampled_from((0, 3))),
    )  # fmt: skip


@given(chunk_sets())
def test_unpack_chunks_is_unpackbits_of_all_chunks(chunk_set):
    n_elements, chunks = chunk_set
    out = Managed()
    tensors = [tensor for tensor, _ in chunks]
    check(lib.gc_unpack_chunks(capi.managed_array(tensors), len(chunks), n_elements, byref(out)))
    assert not any(tensor.releases for tensor in tensors)
    expected = np.unpackbits(np.concatenate([values for _, values in chunks]))[:n_elements]
    bits = take(out)
    assert bits.dtype == np.bool_
    np.testing.assert_array_equal(bits.view(np.uint8), expected)  # as bytes: a bool is 0 or 1


@given(layouts(UNPACKED, writable=True), st.integers(1, 9), orders, st.integers(0, 2**32 - 1), st.data())
def test_unpack_chunks_into_writes_ones_and_zeros_and_nothing_else(layout, n_chunks, order, seed, data):
    n_elements = int(np.prod(layout.shape, dtype=np.int64))
    source = data.draw(rows((n_chunks, capi.chunk_bytes(n_elements, n_chunks))))
    source_buffer = source.buffer()
    source_buffer[:] = np.random.default_rng(seed).integers(0, 256, source_buffer.size)
    bytes_in = source.carve(source_buffer)
    buffer = call_into(lib.gc_unpack_chunks_into, source.describe(bytes_in), order, layout=layout)
    bits = np.unpackbits(bytes_in.reshape(-1), bitorder=ORDERS[order])[:n_elements].reshape(layout.shape)
    assert_written(layout, buffer, np.where(bits, one(layout.dtype), layout.numpy.type(0)))


# --- signs ------------------------------------------------------------------------------------------------------------


@st.composite
def floats(draw):
    layout = draw(layouts(FLOATS))
    unsigned, special = bit_patterns(layout.dtype)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    buffer = layout.buffer()
    buffer[:] = rng.integers(0, 256, buffer.size)
    memory = buffer[layout.shift :]
    memory = memory[: memory.size // layout.numpy.itemsize * layout.numpy.itemsize].view(unsigned)
    memory[:] = np.where(rng.random(memory.size) < 0.5, memory, rng.choice(special, memory.size))
    array = layout.carve(buffer)
    return layout.describe(array), not_below_zero(array, layout.dtype)


@given(floats(), st.integers(1, 9), orders, st.data())
def test_signs_are_not_below_zero(source, n_chunks, order, data):
    tensor, bits = source
    expected = chunk_rows(bits, n_chunks, order)
    layout = data.draw(rows(expected.shape))
    assert_written(layout, call_into(lib.gc_pack_signs_into, tensor, order, layout=layout), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_special_value_has_the_sign_of_the_rule(dtype):
    unsigned, special = bit_patterns(dtype)
    n = len(special)
    # Pairs of both signs: 0, six magnitudes from the smallest denormal to infinity, two NaNs.
    bits = [1, 1, *[1, 0] * 6, 1, 1, 1, 1]
    assert not_below_zero(np.array(special, unsigned).view(DTYPES[dtype][0]), dtype).tolist() == bits
    for at in range(70):  # in every place of a vector and of the tail behind it
        values, expected = np.full(70 + n, special[2], unsigned), np.ones(70 + n, bool)
        values[at : at + n], expected[at : at + n] = special, bits
        target = np.zeros((1, capi.chunk_bytes(70 + n, 1)), np.uint8)
        check(lib.gc_pack_signs_into(Tensor(values, dtype).view, BIG, Tensor(target).view, None))
        np.testing.assert_array_equal(target[0], np.packbits(expected))


# --- numpy.packbits and numpy.unpackbits ------------------------------------------------------------------------------


@given(truths(), orders, st.data())
def test_pack_bits_is_packbits(source, order, data):
    tensor, truth = source
    axis = draw_axis(data, truth.ndim)
    out = Managed()
    check(lib.gc_pack_bits(tensor.managed, axis, order, byref(out)))
    assert not tensor.releases
    expected = np.packbits(truth, axis=numpy_axis(axis), bitorder=ORDERS[order])
    bits = take(out)
    assert (bits.shape, bits.dtype) == (expected.shape, np.uint8)
    np.testing.assert_array_equal(bits, expected)


@given(truths(), orders, st.data())
def test_pack_bits_into_writes_packbits_and_nothing_else(source, order, data):
    tensor, truth = source
    axis = draw_axis(data, truth.ndim)
    expected = np.packbits(truth, axis=numpy_axis(axis), bitorder=ORDERS[order])
    layout = data.draw(layouts(("uint8",), shape=expected.shape, writable=True), label="destination")
    assert_written(layout, call_into(lib.gc_pack_bits_into, tensor, axis, order, layout=layout), expected)


def draw_count(data, array, axis):
    total = 8 * (array.size if axis == AXIS_NONE else array.shape[axis] if array.ndim else 1)
    some = st.one_of(st.just(0), st.just(total), st.integers(-total, total), st.integers(total, total + 70))
    return data.draw(some, label="count")


@given(packed(), orders, st.data())
def test_unpack_bits_is_unpackbits(source, order, data):
    tensor, values = source
    axis = draw_axis(data, values.ndim)
    count = data.draw(st.just(COUNT_ALL)) if data.draw(st.booleans()) else draw_count(data, values, axis)
    out = Managed()
    check(lib.gc_unpack_bits(tensor.managed, axis, count, order, byref(out)))
    assert not tensor.releases
    expected = unpackbits(values, axis, count, order)
    bits = take(out)
    assert (bits.shape, bits.dtype) == (expected.shape, np.uint8)
    np.testing.assert_array_equal(bits, expected)


@given(packed(), orders, st.data())
def test_unpack_bits_into_writes_unpackbits_and_nothing_else(source, order, data):
    tensor, values = source
    axis = draw_axis(data, values.ndim)
    count = draw_count(data, values, axis)
    expected = unpackbits(values, axis, count, order)  # the destination's length along the axis says the count
    layout = data.draw(layouts(UNPACKED, shape=expected.shape, writable=True), label="destination")
    buffer = call_into(lib.gc_unpack_bits_into, tensor, axis, order, layout=layout)
    assert_written(layout, buffer, np.where(expected, one(layout.dtype), layout.numpy.type(0)))


@pytest.mark.parametrize("shape, axis, count", [((0,), 0, 9), ((3, 0), 1, 5), ((0, 3), 0, 17), ((0,), AXIS_NONE, 1)])
def test_a_count_for_an_empty_tensor_gives_zeros(shape, axis, count):
    out = Managed()
    check(lib.gc_unpack_bits(Tensor(np.empty(shape, np.uint8)).managed, axis, count, BIG, byref(out)))
    expected = list(shape) if axis != AXIS_NONE else [0]
    expected[0 if axis == AXIS_NONE else axis] = count
    np.testing.assert_array_equal(take(out), np.zeros(expected, np.uint8))


# --- what the layouts above do not reach ------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", UNPACKED)
def test_every_length_around_a_vector_is_packed_and_unpacked(dtype, order):
    function, truth = lib.gc_pack_chunks_into, lambda array: array != 0
    if dtype in FLOATS:
        function, truth = lib.gc_pack_signs_into, lambda array: not_below_zero(array, dtype)
    rng = np.random.default_rng(13)
    for n_elements in (*range(280), *range(505, 520), *range(1020, 1030)):
        line = Layout(dtype, (n_elements,), (0,), (1,), n_elements % 7, 1, False, 0)
        shape = (1, capi.chunk_bytes(n_elements, 1))
        row = Layout("uint8", shape, (0, 1), (1, 1), n_elements % 5, 1, False, 0)
        memory = line.buffer()
        memory[:] = np.where(rng.random(memory.size) < 0.5, rng.integers(0, 256, memory.size), 0)
        if dtype == "bool":
            memory[memory > 1] = 1
        array = line.carve(memory)
        expected = chunk_rows(truth(array), 1, order)
        assert_written(row, call_into(function, line.describe(array), order, layout=row), expected)
        bits = np.unpackbits(expected, bitorder=ORDERS[order])[:n_elements]
        buffer = call_into(lib.gc_unpack_chunks_into, Tensor(expected), order, layout=line)
        assert_written(line, buffer, np.where(bits, one(dtype), line.numpy.type(0)))


@pytest.mark.parametrize("dtype", TRUTHS)
@pytest.mark.parametrize("n_elements", [2**20 + 8, 2**21 + 13])
def test_large_tensors_are_packed_and_unpacked_whole(dtype, n_elements):
    truth = np.random.default_rng(n_elements).random(n_elements) < 0.5
    chunks = pack_chunks(Tensor(truth.astype(DTYPES[dtype][0])), 3)
    np.testing.assert_array_equal(np.stack([read(c) for c in chunks]), chunk_rows(truth, 3))
    out = Managed()
    check(lib.gc_unpack_chunks(capi.managed_array(chunks), 3, n_elements, byref(out)))
    for chunk in chunks:
        lib.gc_tensor_free(chunk)
    np.testing.assert_array_equal(take(out), truth)


@pytest.mark.parametrize("dtype", UNPACKED)
def test_large_tensors_are_unpacked_into_any_type(dtype):
    source = np.random.default_rng(7).integers(0, 256, (1, 2**17 + 1), np.uint8)
    target = np.full(8 * source.size - 3, PATTERN, np.uint8).astype(DTYPES[dtype][0])
    check(lib.gc_unpack_chunks_into(Tensor(source).view, LITTLE, Tensor(target, dtype).view, None))
    bits = np.unpackbits(source, bitorder="little")[: target.size]
    np.testing.assert_array_equal(target, np.where(bits, one(dtype), target.dtype.type(0)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_tensors_give_all_their_signs(dtype):
    values = np.random.default_rng(11).standard_normal(2**21 + 13, np.float32)
    array = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(dtype)
    target = np.zeros((5, capi.chunk_bytes(values.size, 5)), np.uint8)
    check(lib.gc_pack_signs_into(Tensor(array, dtype).view, BIG, Tensor(target).view, None))
    np.testing.assert_array_equal(target, chunk_rows(not_below_zero(array, dtype), 5))


@pytest.mark.parametrize("transposed", [False, True])
def test_large_transposes_are_read_in_c_order(transposed):
    truth = np.random.default_rng(5).random((1031, 2053)) < 0.5
    source = truth.T if transposed else truth[::-1, ::-1]
    chunks = [take(c) for c in pack_chunks(Tensor(source), 2)]
    np.testing.assert_array_equal(np.stack(chunks), chunk_rows(source, 2))


@pytest.mark.parametrize("dtype", ["bool", "int16"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(19, 67, 131), (5, 33, 18, 70), (3, 64, 129, 16)])
def test_dimensions_in_any_order_are_read_and_written_in_c_order(shape, order, dtype):
    memory = (np.random.default_rng(6).random(shape) < 0.5).astype(dtype)
    for axes in itertools.permutations(range(len(shape))):
        target = np.full_like(memory, 1)
        source, unpacked = memory.transpose(axes), target.transpose(axes)
        expected = chunk_rows(source, 3, order)
        written = np.full_like(expected, PATTERN)
        check(lib.gc_pack_chunks_into(Tensor(source).view, order, Tensor(written).view, None))
        assert np.array_equal(written, expected), axes
        check(lib.gc_unpack_chunks_into(Tensor(expected).view, order, Tensor(unpacked).view, None))
        assert np.array_equal(target, memory), axes


# Of some 5,000 elements: more than pass through the stack at once.
@pytest.mark.parametrize("inner", [*range(1, 20), 31, 33, 57, 58, 63, 64, 65])
@pytest.mark.parametrize("dtype", ["bool", "int8", "int32"])
def test_narrow_dimensions_are_packed_and_unpacked_along_every_axis(dtype, inner):
    rng = np.random.default_rng(inner)
    for middle in 2, 7, 8, 9, 17, 64:
        memory = rng.integers(0, 2, (5000 // (middle * inner) + 1, middle, inner + 3)).astype(DTYPES[dtype][0])
        for elements in memory[:, :, :inner].copy(), memory[:, :, 3:], memory[::-1, :, :inner]:
            for axis, order in itertools.product(range(3), ORDERS):
                expected = np.packbits(elements.view(np.uint8) if dtype == "bool" else elements, axis, ORDERS[order])
                written = np.full_like(expected, PATTERN)
                check(lib.gc_pack_bits_into(Tensor(elements, dtype).view, axis, order, Tensor(written).view, None))
                assert np.array_equal(written, expected), (middle, axis)
                target = np.full_like(memory, 1)
                unpacked = target[:, :, 3:]
                check(lib.gc_unpack_bits_into(Tensor(expected).view, axis, order, Tensor(unpacked, dtype).view, None))
                assert np.array_equal(unpacked, elements != 0), (middle, axis)
                assert (target[:, :, :3] == 1).all(), (middle, axis)


# Where runs of a few elements lie: of so many rows of so many, the shape of the memory and the view of it.
SHORT_RUNS = {
    "of wider rows": (lambda rows, run: (rows, run + 3), lambda memory, run: memory[:, 1 : run + 1]),
    "of far wider rows": (lambda rows, run: (rows, run + 90), lambda memory, run: memory[::-1, :run]),
    "backwards": (lambda rows, run: (rows, run), lambda memory, run: memory[:, ::-1]),
    "every third": (lambda rows, run: (rows, 3 * run + 1), lambda memory, run: memory[:, : 3 * run : 3]),
    "of planes": (lambda rows, run: (rows // 5, 7, run + 2), lambda memory, run: memory[:, :5, :run]),
    "transposed": (lambda rows, run: (run, rows), lambda memory, run: memory.T),
    "transposed in planes": (lambda rows, run: (rows // 20, run, 20), lambda memory, run: memory.transpose(0, 2, 1)),
    "turned round": (lambda rows, run: (3, run, 4, rows // 9, 2), lambda memory, run: memory.transpose(2, 4, 3, 0, 1)),
}


@pytest.mark.parametrize("where", SHORT_RUNS)
@pytest.mark.parametrize("dtype", ["bool", "int8", "int16", "int32", "int64"])
def test_short_runs_are_flattened_and_written_in_c_order(dtype, where):
    rng = np.random.default_rng(7)
    shape, view = SHORT_RUNS[where]
    for run in [*range(2, 23), 31, 32, 33, 63, 64, 65, 128, 129]:
        memory = rng.integers(0, 2, shape(3000 // run + 20, run)).astype(DTYPES[dtype][0])
        elements = view(memory, run)
        for chunks, order in itertools.product((1, 3), ORDERS):
            expected = chunk_rows(elements != 0, chunks, order)
            written = np.full_like(expected, PATTERN)
            check(lib.gc_pack_chunks_into(Tensor(elements, dtype).view, order, Tensor(written).view, None))
            assert np.array_equal(written, expected), (run, chunks)
            target = np.full_like(memory, 3 if dtype != "bool" else 1)
            wanted = target.copy()
            view(wanted, run)[...] = elements
            check(lib.gc_unpack_chunks_into(Tensor(expected).view, order, Tensor(view(target, run), dtype).view, None))
            assert np.array_equal(target, wanted), (run, chunks)


# Enough for four workers, who get 4 MiB of elements each. Odd sizes: where one worker's part ends and the next begins
# lies at any place of a row, of a byte and of a vector.
# name: for about n elements, the shape of the memory that they are in; and how they lie there.
LARGE = {
    "in one piece": (lambda n: (n + 13,), lambda memory: memory),
    "rows of a wider matrix": (lambda n: (n // 4099 + 1, 4111), lambda memory: memory[:, 5:-7]),
    "transposed": (lambda n: (n // 4099 + 1, 4099), lambda memory: memory.T),
    "few long rows": (lambda n: (67, n // 67 | 1), lambda memory: memory),
    "every other column, from the end": (lambda n: (n // 1001 + 1, 2 * 1001), lambda memory: memory[:, ::-2]),
}


@pytest.fixture
def set_threads():
    yield lambda n: check(lib.gc_set_threads(n))
    check(lib.gc_set_threads(0))


@pytest.mark.parametrize("dtype", both(quick=["int32"], all=["bool", "int32"]))
@pytest.mark.parametrize(
    "layout, axis",
    [("in one piece", AXIS_NONE), *((layout, axis) for layout in list(LARGE)[1:] for axis in (AXIS_NONE, 0, 1))],
)
def test_any_number_of_workers_gives_the_same_bits(layout, dtype, axis, set_threads):
    memory_shape, lie = LARGE[layout]
    shape = memory_shape((17 << 20) // np.dtype(dtype).itemsize)
    rng = np.random.default_rng(17)
    memory = rng.integers(0, 256, int(np.prod(shape)), np.uint8).reshape(shape)
    memory = np.where(memory < 128, 0, memory.astype(np.uint8 if dtype == "bool" else np.int32) << (dtype != "bool"))
    target = np.empty_like(memory)
    source, unpacked = Tensor(lie(memory), dtype), Tensor(lie(target), dtype)
    truth = lie(memory) != 0

    for order in ORDERS:
        if axis == AXIS_NONE:
            expected = chunk_rows(truth, 3, order)
            written = np.empty_like(expected)
        else:
            expected = np.packbits(truth, axis=axis, bitorder=ORDERS[order])
            written = np.empty((expected.shape[0], 2 * expected.shape[1]), np.uint8)[:, ::2]
        bits, bytes_in = Tensor(written), Tensor(expected)
        twin = np.full_like(memory, PATTERN)
        lie(twin)[...] = truth

        for n_threads in (1, 3) if order == BIG else (2, 4):
            set_threads(n_threads)
            written[...] = PATTERN
            target[...] = PATTERN
            out = Managed()
            if axis == AXIS_NONE:
                check(lib.gc_pack_chunks_into(source.view, order, bits.view, None))
                check(lib.gc_unpack_chunks_into(bytes_in.view, order, unpacked.view, None))
            else:
                check(lib.gc_pack_bits_into(source.view, axis, order, bits.view, None))
                check(lib.gc_unpack_bits_into(bytes_in.view, axis, order, unpacked.view, None))
            assert np.array_equal(written, expected), f"{n_threads} threads, order {order}"
            assert np.array_equal(target, twin), f"{n_threads} threads, order {order}"

            if axis != AXIS_NONE:
                check(lib.gc_pack_bits(source.managed, axis, order, byref(out)))
                assert np.array_equal(take(out), expected), f"{n_threads} threads, order {order}"
                count = truth.shape[axis]
                check(lib.gc_unpack_bits(bytes_in.managed, axis, count, order, byref(out)))
                assert np.array_equal(take(out), truth), f"{n_threads} threads, order {order}"
            elif order == BIG:
                chunks = pack_chunks(source, 3)
                check(lib.gc_unpack_chunks(capi.managed_array(chunks), 3, truth.size, byref(out)))
                assert np.array_equal(np.stack([take(c) for c in chunks]), expected), f"{n_threads} threads"
                assert np.array_equal(take(out), truth.reshape(-1)), f"{n_threads} threads"


def test_windows_that_overlap_are_read_as_they_are():
    line = np.random.default_rng(2).integers(0, 2, 40, np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(line, 9)
    chunks = [take(c) for c in pack_chunks(Tensor(windows), 1)]
    np.testing.assert_array_equal(chunks[0], np.packbits(windows))


def test_a_tensor_may_have_sixty_four_dimensions():
    line = np.random.default_rng(3).integers(0, 2, 2**8, np.uint8)
    source = line.reshape((1,) * 28 + (2,) * 8 + (1,) * 28).transpose(range(63, -1, -1))
    chunks = [take(c) for c in pack_chunks(Tensor(source), 1)]
    np.testing.assert_array_equal(chunks[0], np.packbits(source))


def test_empty_tensors_have_no_data_and_give_none():
    source = Tensor(np.empty((3, 0), np.int32))
    source.struct.dl_tensor.data = None
    chunks = pack_chunks(source, 4)
    assert [read(c).shape for c in chunks] == [(0,)] * 4  # read() looks that data is NULL
    out = Managed()
    check(lib.gc_unpack_chunks(capi.managed_array(chunks), 4, 0, byref(out)))
    assert take(out).shape == (0,)
    for chunk in chunks:
        lib.gc_tensor_free(chunk)


@pytest.mark.parametrize("shape, axis", [((0, *(2,) * 63), 0), ((*(2,) * 63, 0), 63), ((2**62, 2**62, 0, 5), 2)])
def test_sizes_beside_a_0_may_be_as_many_and_as_large_as_they_like(shape, axis):
    source, out = Tensor(np.empty(0, np.uint8)), Managed()
    strides = [2**index for index in range(len(shape))]  # no two dimensions are one
    source.struct.dl_tensor = capi.DLTensor(
        None, source.struct.dl_tensor.device, len(shape), capi.dldtype("uint8"), capi.int64s(shape), capi.int64s(strides)
    )
    for function, arguments in [(lib.gc_pack_bits, ()), (lib.gc_unpack_bits, (COUNT_ALL,))]:
        check(function(source.managed, axis, *arguments, BIG, byref(out)))
        assert capi.shape_of(out) == shape
        lib.gc_tensor_free(out)


def test_inputs_without_a_deleter_are_inputs():
    source = Tensor(np.ones(16, bool))
    source.struct.deleter = capi.DELETER()
    assert [take(c).tolist() for c in pack_chunks(source, 1)] == [[255, 255]]


def test_pinned_host_memory_is_the_cpus_work():
    truth = np.random.default_rng(4).random(100) < 0.5
    source = Tensor(truth, device=CUDA_HOST)
    chunks = [take(c) for c in pack_chunks(source, 2)]  # read() looks that they say CPU
    np.testing.assert_array_equal(np.stack(chunks), chunk_rows(truth, 2))
    target = np.zeros((2, 7), np.uint8)
    check(lib.gc_pack_chunks_into(source.view, BIG, Tensor(target).view, None))
    np.testing.assert_array_equal(target, chunk_rows(truth, 2))


def test_outputs_may_interleave_without_touching():
    # Strides of 2 and 3 over 3 and 2 elements: 0, 3, 2, 5, 4, 7. No place twice, though neither stride spans the other.
    source, memory = Tensor(np.array([[0b10110100]], np.uint8)), np.full(10, PATTERN, np.uint8)
    target = np.lib.stride_tricks.as_strided(memory, (3, 2), (2, 3))
    check(lib.gc_unpack_chunks_into(source.view, BIG, Tensor(target).view, None))
    assert target.tolist() == [[1, 0], [1, 1], [0, 1]]
    assert memory.tolist() == [1, PATTERN, 1, 0, 0, 1, PATTERN, 1, PATTERN, PATTERN]


def test_a_chunk_that_begins_where_another_ends_may_have_a_stride():
    memory = np.random.default_rng(3).integers(0, 256, 100, np.uint8)
    parts = memory[0:20], memory[20:40], memory[40:80:2]
    out = Managed()
    check(lib.gc_unpack_chunks(capi.managed_array([Tensor(part) for part in parts]), 3, 480, byref(out)))
    np.testing.assert_array_equal(take(out), np.unpackbits(np.concatenate(parts)))


def test_one_buffer_may_hold_both_sides_next_to_each_other():
    memory = np.concatenate([np.ones(64, np.uint8), np.zeros(8, np.uint8), np.ones(64, np.uint8)])
    rows_between = memory[64:72].reshape(1, 8)
    check(lib.gc_pack_chunks_into(Tensor(memory[:64]).view, BIG, Tensor(rows_between).view, None))
    assert memory.tolist() == [1] * 64 + [255] * 8 + [1] * 64
    check(lib.gc_unpack_chunks_into(Tensor(rows_between).view, BIG, Tensor(memory[72:]).view, None))
    assert memory.tolist() == [1] * 64 + [255] * 8 + [1] * 64


def test_threads_pack_and_unpack_at_the_same_time():
    results = {}

    def work(seed):
        truth = np.random.default_rng(seed).random(100_003) < 0.5
        rows_out = chunk_rows(truth, 4)
        good = True
        for _ in range(20):
            chunks = pack_chunks(Tensor(truth), 4)
            out = Managed()
            check(lib.gc_unpack_chunks(capi.managed_array(chunks), 4, truth.size, byref(out)))
            good &= np.array_equal(np.stack([take(c) for c in chunks]), rows_out) and np.array_equal(take(out), truth)
        results[seed] = good

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


def test_a_forked_child_packs_as_its_parent_did():
    truth = np.random.default_rng(8).random(2**22) < 0.5
    expected = chunk_rows(truth, 2)

    def packs():
        return np.array_equal(np.stack([take(c) for c in pack_chunks(Tensor(truth), 2)]), expected)

    assert packs()
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if packs() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_the_stream_is_ignored_for_cpu_tensors():
    source, target = np.ones(8, bool), np.zeros((1, 1), np.uint8)
    check(lib.gc_pack_chunks_into(Tensor(source).view, BIG, Tensor(target).view, ctypes.c_void_p(0xDEAD)))
    assert target[0, 0] == 255
