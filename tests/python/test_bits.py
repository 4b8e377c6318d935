"""Bits on the CPU: what tests/spec/test_parity.py does not have of a device. Large tensors, shapes that are narrow or in
short runs, numbers of threads, and memory that only the CPU has."""

import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import capi
from capi import (
    AXIS_NONE, BIG, COUNT_ALL, CUDA_HOST, DTYPES, LITTLE, Managed, Tensor, byref, check, lib, pack_chunks, take,
)  # fmt: skip
from layouts import PATTERN, HostBench, Layout, both_ways, chunk_rows
from models import ORDERS, UNPACKED
from tiers import both


@given(st.integers(0, 2**63 - 1), st.integers(1, 2**40))
@example(2**63 - 1, 1)
@example(2**63 - 1, 7)
@example(0, 1)
def test_chunk_bytes_is_the_formula(n_elements, n_chunks):
    assert lib.gc_chunk_bytes(n_elements, n_chunks) == capi.chunk_bytes(n_elements, n_chunks)


# What several threads have parts of.
@pytest.mark.parametrize("dtype", UNPACKED)
def test_large_tensors_are_packed_and_unpacked_whole(dtype):
    line = Layout(dtype, ((9 << 20) // np.dtype(DTYPES[dtype][0]).itemsize + 13,), shift=1)
    both_ways(HostBench(), line, 3, LITTLE, np.random.default_rng(11))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64"])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_results_are_written_past_the_caches_and_nowhere_else(dtype, threads, set_threads):
    set_threads(threads)
    size = np.dtype(dtype).itemsize
    memory, bits = np.empty((72 << 20) + 128, np.uint8), np.random.default_rng(8).integers(0, 256, (1, (9 << 20) // size), np.uint8)
    first = 64 - memory.ctypes.data % 64  # stores past the caches want aligned vectors
    elements = memory[first : first + (72 << 20)].view(dtype)
    for order, name in ORDERS.items():
        memory[:], packed = PATTERN, np.full_like(bits, PATTERN)
        check(lib.gc_unpack_chunks_into(Tensor(bits).view, order, Tensor(elements).view, None))
        assert np.array_equal(elements, np.unpackbits(bits, bitorder=name))
        assert (memory[:first] == PATTERN).all() and (memory[first + (72 << 20) :] == PATTERN).all()
        check(lib.gc_pack_chunks_into(Tensor(elements).view, order, Tensor(packed).view, None))
        assert np.array_equal(packed, bits)


@pytest.mark.parametrize("lie", [dict(order=(1, 0)), dict(steps=(-1, -1))], ids=["transposed", "backwards"])
@pytest.mark.parametrize("dtype", ["bool", "int32", "float64"])
def test_large_matrices_are_packed_and_unpacked_in_c_order(dtype, lie):
    both_ways(HostBench(), Layout(dtype, (1031, 2053), **lie), 2, BIG, np.random.default_rng(5))


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
@pytest.mark.parametrize("layout, axis", [("in one piece", AXIS_NONE), *both(
    quick=[(layout, axis) for k, layout in enumerate(list(LARGE)[1:]) for axis in (AXIS_NONE, k % 2)],
    all=[(layout, axis) for layout in list(LARGE)[1:] for axis in (AXIS_NONE, 0, 1)],
)])  # fmt: skip
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
    source.release_to(None)
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


def test_the_stream_is_ignored_for_cpu_tensors():
    source, target = np.ones(8, bool), np.zeros((1, 1), np.uint8)
    check(lib.gc_pack_chunks_into(Tensor(source).view, BIG, Tensor(target).view, ctypes.c_void_p(0xDEAD)))
    assert target[0, 0] == 255
