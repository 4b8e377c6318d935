"""Every function of bits and signs against NumPy, on the CPU and on the device."""

import contextlib
import itertools
from dataclasses import replace

import numpy as np
import pytest

import capi
import driver
import gpu
from capi import AXIS_NONE, BIG, COUNT_ALL, DTYPES, FLOATS, Managed, byref, check, lib
from layouts import (
    HostBench, Layout, along_axes, as_written, assert_written, both_ways, case, chunk_rows, numpy_axis, random_bytes,
    random_floats, random_layout, random_rows, random_shape, random_truth, truth_of, unpackbits, zeros_and_ones,
)  # fmt: skip
from models import (
    ORDERS, SCALES, SIGNED, TRUTHS, UNPACKED, bit_patterns, majority, not_below_zero, scaled_signs,
)  # fmt: skip

CHUNKS = (1, 2, 3, 7, 100)
BLOCKS = gpu.sized(gpu=4, quick=1, all=4)  # tests of random cases, bench.cases in each

LONG_VOTE = gpu.sized(gpu=20_000, quick=900, all=2000)  # bytes

blocks = pytest.mark.parametrize("block", range(BLOCKS))


@pytest.fixture(scope="module")
def gpu_bench():
    driver.use(driver.primary())
    bench = gpu.Bench()
    yield bench
    bench.source.free()
    bench.target.free()


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def bench(request):
    return HostBench() if request.param == "cpu" else request.getfixturevalue("gpu_bench")


def seeded(bench, block):
    """Yields the seed and a generator for each random case of a block."""
    for seed in range(block * bench.cases, (block + 1) * bench.cases):
        yield seed, np.random.default_rng(seed)


def any_order(rng):
    return int(rng.integers(0, 2))


def any_chunks(rng, n_elements):
    return int(rng.choice((*CHUNKS, n_elements // 8 + 5)))


def any_axis(rng, ndim):
    """Returns any axis, from either end, or none; a 0-dimensional tensor counts as one of one dimension."""
    return int(rng.choice((AXIS_NONE, *range(-max(1, ndim), max(1, ndim)))))


def any_count(rng, array, axis):
    total = 8 * (array.size if axis == AXIS_NONE else array.shape[axis] if array.ndim else 1)
    return int(rng.choice((0, total, rng.integers(-total, total + 1), rng.integers(total, total + 70))))


def assert_patterns(layout, buffer, expected):
    """Checks as assert_written() does, for floats whose NaNs are compared, too."""
    twin = layout.buffer()
    layout.carve(twin).view(f"uint{8 * expected.dtype.itemsize}")[...] = as_written(expected)
    np.testing.assert_array_equal(buffer, twin)


# --- random layouts ---------------------------------------------------------------------------------------------------


@blocks
@pytest.mark.parametrize("packed", ["chunks", "signs"])
def test_chunks_and_signs_are_packed_to_rows_and_nothing_else_is_written(bench, packed, block):
    new, into = getattr(lib, f"gc_pack_{packed}"), getattr(lib, f"gc_pack_{packed}_into")
    for seed, rng in seeded(bench, block):
        source = random_layout(rng, TRUTHS if packed == "chunks" else FLOATS, random_shape(rng))
        buffer, order = (random_truth if packed == "chunks" else random_floats)(rng, source), any_order(rng)
        array = source.carve(buffer)
        bits = truth_of(array) if packed == "chunks" else not_below_zero(array, source.dtype)
        n_chunks = any_chunks(rng, bits.size)
        expected = chunk_rows(bits, n_chunks, order)
        target = random_rows(rng, expected.shape)
        with case(seed=seed, source=source, target=target, order=order):
            assert_written(target, bench.into(into, source, buffer, order, target=target), expected)
            chunks = [bench.take(chunk) for chunk in bench.pack(new, source, buffer, n_chunks)]
            np.testing.assert_array_equal(np.stack(chunks), chunk_rows(bits, n_chunks))


@blocks
def test_unpack_chunks_into_writes_ones_and_zeros_and_nothing_else(bench, block):
    for seed, rng in seeded(bench, block):
        target = random_layout(rng, UNPACKED, random_shape(rng), writable=True)
        count = int(np.prod(target.shape, dtype=np.int64))
        n_chunks, order = any_chunks(rng, count), any_order(rng)
        source = random_rows(rng, (n_chunks, capi.chunk_bytes(count, n_chunks)))
        buffer = random_bytes(rng, source)
        bits = unpackbits(source.carve(buffer), AXIS_NONE, count, order).reshape(target.shape)
        with case(seed=seed, source=source, target=target, order=order):
            found = bench.into(lib.gc_unpack_chunks_into, source, buffer, order, target=target)
            assert_written(target, found, zeros_and_ones(bits, target.dtype))


@blocks
def test_unpack_signs_into_writes_scales_and_minus_them_and_nothing_else(bench, block):
    for seed, rng in seeded(bench, block):
        target = random_layout(rng, SIGNED, random_shape(rng), writable=True)
        count = int(np.prod(target.shape, dtype=np.int64))
        n_chunks, order = any_chunks(rng, count), any_order(rng)
        source = random_rows(rng, (n_chunks, capi.chunk_bytes(count, n_chunks)))
        buffer = random_bytes(rng, source)
        n_scales = int(rng.choice((0, 1, n_chunks))) if target.dtype in FLOATS else 0
        values = rng.choice(np.concatenate([SCALES, rng.standard_normal(30, np.float32)]), n_scales)
        each = np.float32(1) if not n_scales else values[0] if n_scales == 1 else np.repeat(values, 8 * source.shape[1])[:count]
        bits = unpackbits(source.carve(buffer), AXIS_NONE, count, order)
        expected = scaled_signs(bits, target.dtype, each).reshape(target.shape)
        operand = bench.operand(values, int(rng.integers(0, 4))) if n_scales else contextlib.nullcontext()
        with case(seed=seed, source=source, target=target, order=order, scales=n_scales), operand as scales:
            # These arguments of into() are between the source and the order.
            found = bench.into(lib.gc_unpack_signs_into, source, buffer, scales and scales.view, order, target=target)
            assert_patterns(target, found, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_scale_is_rounded_once_and_every_nan_is_canonical(bench, dtype):
    scales = np.concatenate([SCALES, np.arange(0, 2**32, 65537, np.uint64).astype(np.uint32).view(np.float32)])
    source, target = Layout("uint8", (scales.size, 1)), Layout(dtype, (8 * scales.size,))
    buffer = random_bytes(np.random.default_rng(0), source)
    bits = unpackbits(source.carve(buffer), AXIS_NONE, 8 * scales.size, BIG)
    with bench.operand(scales) as operand:
        found = bench.into(lib.gc_unpack_signs_into, source, buffer, operand.view, BIG, target=target)
    assert_patterns(target, found, scaled_signs(bits, dtype, np.repeat(scales, 8)))


def votes(bench, rng, source, turns):
    """Votes on rows near a tie, so that bits are not all decided alike."""
    buffer = random_bytes(rng, source)
    rows = source.carve(buffer)
    if rows.strides[0]:  # every voter has a row
        rows[1::2] = ~rows[: rows.shape[0] // 2 * 2 : 2] ^ (rng.integers(0, 256, rows[1::2].shape, np.uint8) & 0x11)
    target = random_rows(rng, (source.shape[1],))
    for turn in turns:
        with case(source=source, target=target, turn=turn):
            found = bench.into(lib.gc_vote_signs_into, source, buffer, turn, target=target)
            assert_written(target, found, majority(rows, turn))


@blocks
def test_vote_signs_into_is_the_majority_and_ties_alternate(bench, block):
    for seed, rng in seeded(bench, block):
        voters = int(rng.integers(1, rng.choice((8, 31, 200))))
        rows = random_rows(rng, (voters, int(rng.integers(0, rng.choice((70, 700, LONG_VOTE))))))
        # Each row has a gap after it, the last row is first, or all voters have one row.
        rows = replace(rows, steps=(int(rng.choice((1, 1, 2, -1, 0))), 1))
        with case(seed=seed):
            votes(bench, rng, rows, [int(rng.integers(0, 2**63))])


@pytest.mark.parametrize("voters", [63, 64, 65, 128, 255, 256, 1000, 65_536, 70_001])
def test_any_number_of_voters_is_counted_correctly(bench, voters):
    votes(bench, np.random.default_rng(voters), Layout("uint8", (voters, 33)), (0, voters - 1, 2**64 - 1))


@blocks
def test_chunks_with_layouts_of_their_own_are_unpacked_to_bits_and_signs(bench, block):
    for seed, rng in seeded(bench, block):
        count, n_chunks = int(rng.integers(0, 20_000)), int(rng.choice((1, 2, 3, 9)))
        sources = [random_layout(rng, ("uint8",), (capi.chunk_bytes(count, n_chunks),)) for _ in range(n_chunks)]
        buffers = [random_bytes(rng, source) for source in sources]
        arrays = [source.carve(buffer) for source, buffer in zip(sources, buffers)]
        bits, dtype, out = np.unpackbits(np.concatenate(arrays))[:count], str(rng.choice(SIGNED)), Managed()
        with case(seed=seed, sources=sources, count=count, dtype=dtype):
            tensors = bench.sources_of(sources, buffers)
            chunks = capi.managed_array(tensors)
            check(lib.gc_unpack_chunks(chunks, n_chunks, count, byref(out)))
            found = bench.take(out)
            assert found.dtype == np.bool_
            np.testing.assert_array_equal(found.view(np.uint8), bits)  # compared as bytes: a bool is 0 or 1
            check(lib.gc_unpack_signs(chunks, n_chunks, count, capi.dldtype(dtype), byref(out)))
            about = out.contents.dl_tensor.dtype
            assert (about.code, about.bits, about.lanes) == (*DTYPES[dtype][1:], 1)
            np.testing.assert_array_equal(as_written(bench.take(out)), as_written(scaled_signs(bits, dtype)))
            assert not any(tensor.releases for tensor in tensors)


@blocks
def test_pack_bits_is_packbits_and_nothing_else_is_written(bench, block):
    for seed, rng in seeded(bench, block):
        source = random_layout(rng, TRUTHS, random_shape(rng))
        buffer, order = random_truth(rng, source), any_order(rng)
        truth = truth_of(source.carve(buffer))
        axis = any_axis(rng, truth.ndim)
        expected = np.packbits(truth, axis=numpy_axis(axis), bitorder=ORDERS[order])
        target = random_layout(rng, ("uint8",), expected.shape, writable=True)
        with case(seed=seed, source=source, target=target, axis=axis, order=order):
            found = bench.into(lib.gc_pack_bits_into, source, buffer, axis, order, target=target)
            assert_written(target, found, expected)
            found = bench.new(lib.gc_pack_bits, source, buffer, axis, order)
            assert (found.shape, found.dtype) == (expected.shape, np.uint8)
            np.testing.assert_array_equal(found, expected)


@blocks
def test_unpack_bits_is_unpackbits_and_nothing_else_is_written(bench, block):
    for seed, rng in seeded(bench, block):
        source = random_layout(rng, ("uint8",), random_shape(rng))
        buffer, order = random_bytes(rng, source), any_order(rng)
        array = source.carve(buffer)
        axis = any_axis(rng, array.ndim)
        count = any_count(rng, array, axis)
        expected = unpackbits(array, axis, count, order)
        target = random_layout(rng, UNPACKED, expected.shape, writable=True)
        with case(seed=seed, source=source, target=target, axis=axis, count=count, order=order):
            found = bench.into(lib.gc_unpack_bits_into, source, buffer, axis, order, target=target)
            assert_written(target, found, zeros_and_ones(expected, target.dtype))
            for count in count, COUNT_ALL:
                expected = unpackbits(array, axis, count, order)
                found = bench.new(lib.gc_unpack_bits, source, buffer, axis, count, order)
                assert (found.shape, found.dtype) == (expected.shape, np.uint8)
                np.testing.assert_array_equal(found, expected)


# --- tables -----------------------------------------------------------------------------------------------------------

POWERS = range(8, gpu.sized(gpu=18, quick=12, all=14))
SHORT = [n for n in range(131) if n < 35 or n % 8 in gpu.sized(gpu=range(8), quick=(0, 1, 7), all=range(8))]
LENGTHS = [*SHORT, *sorted({2**k + d for k in POWERS for d in (-9, -8, -1, 0, 1, 7, 8, 9)})]


@pytest.mark.parametrize("dtype", UNPACKED)
def test_every_length_around_a_vector_and_a_block(bench, dtype):
    rng, order = np.random.default_rng(13), list(ORDERS)[UNPACKED.index(dtype) % 2]
    for count in LENGTHS:
        both_ways(bench, Layout(dtype, (count,), shift=count % 7), 1, order, rng, row_shift=count % 5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", UNPACKED)
def test_every_length_around_a_large_power_of_two(gpu_bench, dtype):
    rng = np.random.default_rng(14)
    for count in (2**18 + 1, 2**20 - 1, 2**20, 2**22 + 1 + 8 * 257):
        both_ways(gpu_bench, Layout(dtype, (count,)), 1, BIG, rng)


@pytest.mark.parametrize("dtype", ["bool", "int16", "int32", "uint64", "bfloat16", "float32", "float64"])
def test_every_address_on_both_sides(gpu_bench, dtype):
    rng = np.random.default_rng(15)
    addresses = gpu.sized(gpu=range(16), quick=(0, 1, 3, 8, 15), all=range(16))
    for shift, row_shift in itertools.product(addresses, repeat=2):
        for count in (1, 130, 4099):
            both_ways(gpu_bench, Layout(dtype, (count,), shift=shift), 1, BIG, rng, row_shift=row_shift)


# Shapes in memory whose tiles are of several kinds: words of four bools, lines that are not a multiple of four, more lines
# than a tile has, long lines, and narrow ones.
TILES = [(3, 41, 152), (2, 9, 301), (70, 2, 40), (1, 3000, 3), (4, 5, 700)]


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64"])
@pytest.mark.parametrize("lie", [dict(), dict(order=(2, 1, 0)), dict(steps=(1, -1, 1))], ids=["C", "turned", "backwards"])
def test_tiles_of_every_kind_are_packed_and_unpacked_along_every_axis(gpu_bench, lie, dtype):
    rng = np.random.default_rng(18)
    for shape in TILES:
        along_axes(gpu_bench, Layout(dtype, shape[::-1] if "order" in lie else shape, **lie), BIG, rng)


@pytest.mark.parametrize("dtype, order", [("bool", 1), ("int16", 0), ("float64", 1)])
@pytest.mark.parametrize("shape", gpu.sized(
    gpu=[(19, 67, 131), (5, 33, 18, 70), (3, 64, 129, 16)], quick=[(5, 33, 35)], all=[(5, 33, 35), (3, 9, 18, 16)]
), ids=str)  # fmt: skip
def test_dimensions_in_any_order_are_read_and_written_in_c_order(bench, shape, order, dtype):
    rng = np.random.default_rng(6)
    for axes in itertools.permutations(range(len(shape))):
        both_ways(bench, Layout(dtype, shape, order=axes), 3, order, rng)


LARGE = {
    "transposed": dict(shape=(1031, 2053), order=(1, 0)),
    "transposed, rows of whole bytes": dict(shape=(1031, 2056), order=(1, 0)),
    "transposed, whole vectors": dict(shape=(1040, 1928), order=(1, 0)),
    "transposed in threes": dict(shape=(3, 131, 640), order=(0, 2, 1)),
    "transposed, lines from the last": dict(shape=(515, 1027), order=(1, 0), steps=(1, -1)),
    "transposed, of a wider matrix": dict(shape=(1027, 515), order=(1, 0), steps=(2, 1)),
    "transposed, tall": dict(shape=(20, 50_001), order=(1, 0)),
    "transposed, flat": dict(shape=(50_001, 20), order=(1, 0)),
    "dimensions the other way round": dict(shape=(64, 33, 257), order=(2, 1, 0)),
    "dimensions the other way round, whole bytes": dict(shape=(33, 65, 264), order=(2, 1, 0)),
    "backwards": dict(shape=(1031, 2053), steps=(-1, -1)),
    "every other": dict(shape=(2_000_003,), steps=(2,)),
    "every third, from the end": dict(shape=(999, 1001), steps=(1, -3)),
    "rows of a wider matrix": dict(shape=(1500, 1303), steps=(2, 1)),
    "few long rows, one byte off": dict(shape=(7, 300_001), steps=(-1, 1), shift=1),
    "transposed, short rows": dict(shape=(400, 10), order=(1, 0)),
    "dimensions the other way round, rows that share bytes": dict(shape=(83, 9, 61), order=(2, 1, 0)),
    "columns first, odd address": dict(shape=(127, 64, 129), order=(2, 0, 1), shift=3),
}


def cut(size):
    """Returns a smaller dimension for the stand-in driver: the rest beside whole words stays."""
    return size if size < 200 else 192 + size % 64


if driver.IS_STAND_IN:
    LARGE = {name: {**layout, "shape": tuple(map(cut, layout["shape"]))} for name, layout in LARGE.items()}


@pytest.mark.parametrize("dtype, order", [("bool", 0), ("int32", 1), ("bfloat16", 0), ("float64", 1)])
@pytest.mark.parametrize("name", LARGE)
def test_large_layouts_are_packed_and_unpacked_whole(gpu_bench, name, dtype, order):
    # A single chunk has no padding, three chunks may have.
    for n_chunks in 1, 3:
        both_ways(gpu_bench, Layout(dtype, **LARGE[name]), n_chunks, order, np.random.default_rng(5))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_value_of_sixteen_bits_has_the_sign_of_the_rule(bench, dtype):
    source = Layout(dtype, (2**16,))
    buffer = source.buffer()
    source.carve(buffer).view(np.uint16)[:] = np.arange(2**16)
    expected = chunk_rows(not_below_zero(source.carve(buffer), dtype), 1)
    target = Layout("uint8", expected.shape)
    assert_written(target, bench.into(lib.gc_pack_signs_into, source, buffer, BIG, target=target), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_special_value_has_the_sign_of_the_rule_in_every_place(bench, dtype):
    unsigned, special = bit_patterns(dtype)
    n = len(special)
    # Pairs of both signs: 0, six magnitudes from the smallest denormal to infinity, two NaNs.
    bits = [1, 1, *[1, 0] * 6, 1, 1, 1, 1]
    for at in range(70):  # places in a vector and in the tail behind it
        source = Layout(dtype, (70 + n,))
        buffer = source.buffer()
        values = source.carve(buffer).view(unsigned)
        values[:], expected = special[2], np.ones(70 + n, bool)
        values[at : at + n], expected[at : at + n] = special, bits
        rows = chunk_rows(expected, 1)
        target = Layout("uint8", rows.shape)
        with case(at=at):
            assert_written(target, bench.into(lib.gc_pack_signs_into, source, buffer, BIG, target=target), rows)


@pytest.mark.parametrize("shape, axis, count", [((0,), 0, 9), ((3, 0), 1, 5), ((0, 3), 0, 17), ((0,), AXIS_NONE, 1)])
def test_a_count_for_an_empty_tensor_returns_zeros(bench, shape, axis, count):
    expected = list(shape) if axis != AXIS_NONE else [0]
    expected[0 if axis == AXIS_NONE else axis] = count
    source = Layout("uint8", shape)
    found = bench.new(lib.gc_unpack_bits, source, source.buffer(), axis, count, BIG)
    np.testing.assert_array_equal(found, np.zeros(expected, np.uint8))


def test_empty_tensors_have_no_data_and_return_none(bench):
    out = Managed()
    with bench.operand(np.empty((3, 0), np.int32)) as source:
        source.struct.dl_tensor.data = None
        chunks = (Managed * 4)()
        check(lib.gc_pack_chunks(source.managed, 4, chunks))
    check(lib.gc_unpack_chunks(chunks, 4, 0, byref(out)))
    assert [bench.take(tensor).shape for tensor in (*chunks, out)] == [(0,)] * 5  # take() checks that data is NULL


def strided_views():
    """Yields lines of bytes, and arrays that are views of them."""
    rng = np.random.default_rng(2)
    line, short = rng.integers(0, 2, 4000, np.uint8), rng.integers(0, 2, 2**8, np.uint8)
    yield line, np.lib.stride_tricks.sliding_window_view(line, 900)
    yield short, short.reshape((1,) * 28 + (2,) * 8 + (1,) * 28).transpose(range(63, -1, -1))


@pytest.mark.parametrize("line, array", list(strided_views()), ids=["windows that overlap", "64 dimensions"])
def test_views_are_read_in_their_layout(bench, line, array):
    with bench.operand(line) as source:
        dl = source.struct.dl_tensor
        dl.ndim, dl.shape, dl.strides = array.ndim, capi.int64s(array.shape), capi.int64s(array.strides)
        out = (Managed * 1)()
        check(lib.gc_pack_chunks(source.managed, 1, out))
    np.testing.assert_array_equal(bench.take(out[0]), np.packbits(array))


def test_many_dimensions_that_do_not_merge_are_read_in_c_order(gpu_bench):
    # Twelve dimensions in an order in which no two can be merged: more than a kernel may have built in.
    shape = (2, 3) * 6
    order = (*range(1, 12, 2), *range(0, 12, 2))
    both_ways(gpu_bench, Layout("int16", shape, order=order[::-1]), 2, BIG, np.random.default_rng(9))
    both_ways(gpu_bench, Layout("bool", shape, order=order, steps=(1, -1) * 6), 2, BIG, np.random.default_rng(10))
