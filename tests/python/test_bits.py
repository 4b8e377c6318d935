"""Tests of bits on the CPU, beside tests/spec/test_parity.py: large tensors, shapes that are narrow or in short runs,
numbers of threads, and memory that only the CPU has."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import capi
from capi import (
    BIG, COUNT_ALL, DTYPES, FLOATS, LITTLE, Managed, Tensor, byref, check, lib, pack_chunks, take,
)  # fmt: skip
from layouts import PATTERN, HostBench, Layout, along_axes, as_written, both_ways
from models import ORDERS, SIGNED, majority, scaled_signs
from tiers import both


@given(st.integers(0, 2**63 - 1), st.integers(1, 2**40))
@example(2**63 - 1, 1)
@example(2**63 - 1, 7)
@example(0, 1)
def test_chunk_bytes_matches_the_formula(n_elements, n_chunks):
    assert lib.gc_chunk_bytes(n_elements, n_chunks) == capi.chunk_bytes(n_elements, n_chunks)


@pytest.fixture
def set_threads():
    yield lambda n: check(lib.gc_set_threads(n))
    check(lib.gc_set_threads(0))


@pytest.mark.parametrize("dtype, threads", [("uint8", 3), ("uint16", 1), ("int64", 3)])
def test_large_results_are_written_past_the_caches_and_nowhere_else(dtype, threads, set_threads):
    set_threads(threads)
    size = np.dtype(dtype).itemsize
    memory, bits = np.empty((72 << 20) + 128, np.uint8), np.random.default_rng(8).integers(0, 256, (1, (9 << 20) // size), np.uint8)
    first = 64 - memory.ctypes.data % 64  # non-temporal stores need aligned vectors
    elements = memory[first : first + (72 << 20)].view(dtype)
    for order, name in ORDERS.items():
        memory[:], packed = PATTERN, np.full_like(bits, PATTERN)
        check(lib.gc_unpack_chunks_into(Tensor(bits).view, order, Tensor(elements).view, None))
        assert np.array_equal(elements, np.unpackbits(bits, bitorder=name))
        assert (memory[:first] == PATTERN).all() and (memory[first + (72 << 20) :] == PATTERN).all()
        check(lib.gc_pack_chunks_into(Tensor(elements).view, order, Tensor(packed).view, None))
        assert np.array_equal(packed, bits)


# Tests about 5,000 elements: more than one pass through the stack takes.
@pytest.mark.parametrize("inner", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 57, 63, 64, 65])
@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_narrow_dimensions_are_packed_and_unpacked_along_every_axis(dtype, inner):
    rng = np.random.default_rng(inner)
    for middle in 2, 7, 8, 9, 17, 64:
        shape = 5000 // (middle * inner) + 1, middle, inner
        for order, more in (BIG, {}), (LITTLE, dict(row=3)), (LITTLE, dict(row=3, steps=(-1, 1, 1))):
            along_axes(HostBench(), Layout(dtype, shape, **more), order, rng)


# Layouts of `rows` runs of `run` elements.
SHORT_RUNS = {
    "of wider rows": lambda rows, run: dict(shape=(rows, run), row=3),
    "of far wider rows": lambda rows, run: dict(shape=(rows, run), row=90, steps=(-1, 1)),
    "backwards": lambda rows, run: dict(shape=(rows, run), steps=(1, -1)),
    "every third": lambda rows, run: dict(shape=(rows, run), steps=(1, 3), row=1),
    "of planes": lambda rows, run: dict(shape=(rows // 5, 5, run), steps=(1, 2, 1), row=2),
    "transposed": lambda rows, run: dict(shape=(rows, run), order=(1, 0)),
    "transposed in planes": lambda rows, run: dict(shape=(rows // 20, 20, run), order=(0, 2, 1)),
    "turned round": lambda rows, run: dict(shape=(4, 2, rows // 9, 3, run), order=(3, 4, 0, 2, 1)),
}


@pytest.mark.parametrize("where", SHORT_RUNS)
@pytest.mark.parametrize("dtype", ["bool", "int8", "int16", "int32", "int64"])
def test_short_runs_are_flattened_and_written_in_c_order(dtype, where):
    rng = np.random.default_rng(7)
    for run in [*range(2, 23), 31, 32, 33, 63, 64, 65, 128, 129, 1029]:
        line = Layout(dtype, **SHORT_RUNS[where](3000 // run + 20, run))
        for chunks, order in (1, BIG), (3, LITTLE):
            both_ways(HostBench(), line, chunks, order, rng)


# Sizes for four workers, which get 4 MiB of elements each. The sizes are odd, so that a worker's part ends at any place
# of a row, of a byte and of a vector. Each layout has about n elements.
LARGE = {
    "in one piece": lambda n: dict(shape=(n + 13,), shift=1),
    "rows of a wider matrix": lambda n: dict(shape=(n // 4099 + 1, 4099), row=12),
    "transposed": lambda n: dict(shape=(4099, n // 4099 + 1), order=(1, 0)),
    "few long rows": lambda n: dict(shape=(67, n // 67 | 1)),
    "every other column, from the end": lambda n: dict(shape=(n // 1001 + 1, 1001), steps=(1, -2)),
}


@pytest.mark.parametrize("layout, dtype", [
    ("in one piece", "bool"), *((layout, "int32") for layout in LARGE), ("transposed", "float64"),
])  # fmt: skip
def test_any_number_of_workers_gives_the_same_bits(layout, dtype, set_threads):
    rng, bench = np.random.default_rng(17), HostBench()
    line = Layout(dtype, **LARGE[layout]((17 << 20) // np.dtype(DTYPES[dtype][0]).itemsize))
    for n_threads in both(quick=(3,), all=(1, 2, 3, 4)):
        set_threads(n_threads)
        both_ways(bench, line, 3, n_threads % 2, rng)
        if len(line.shape) > 1 and dtype == "int32":
            along_axes(bench, line, n_threads % 2, rng)


@pytest.mark.parametrize("shape, axis", [((0, *(2,) * 63), 0), ((*(2,) * 63, 0), 63), ((2**62, 2**62, 0, 5), 2)])
def test_sizes_beside_a_0_are_not_limited(shape, axis):
    source, out = Tensor(np.empty(0, np.uint8)), Managed()
    strides = [2**index for index in range(len(shape))]  # no two dimensions can be merged
    source.struct.dl_tensor = capi.DLTensor(
        None, source.struct.dl_tensor.device, len(shape), capi.dldtype("uint8"), capi.int64s(shape), capi.int64s(strides)
    )
    for function, arguments in [(lib.gc_pack_bits, ()), (lib.gc_unpack_bits, (COUNT_ALL,))]:
        check(function(source.managed, axis, *arguments, BIG, byref(out)))
        assert capi.shape_of(out) == shape
        lib.gc_tensor_free(out)


def test_inputs_without_a_deleter_are_inputs():
    (source := Tensor(np.ones(16, bool))).release_to(None)
    assert [take(c).tolist() for c in pack_chunks(source, 1)] == [[255, 255]]


def test_outputs_may_interleave_without_overlap():
    # Strides of 2 and 3 over 3 and 2 elements give 0, 3, 2, 5, 4, 7: no place twice, though no stride spans the other.
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


# --- signs and votes that several threads share -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype, n_chunks", [*zip(SIGNED, [1, 3, 7, 1, 3, 7, 1, 3])])
def test_several_threads_compute_the_same_bits_of_a_large_tensor(dtype, n_chunks):
    n = 3_000_003
    rng = np.random.default_rng(n_chunks)
    source = rng.integers(0, 256, (n_chunks, capi.chunk_bytes(n, n_chunks)), np.uint8)
    scales = rng.standard_normal(n_chunks, np.float32) if dtype in FLOATS else None
    for target in (np.zeros(n, DTYPES[dtype][0]), np.zeros((2, n), DTYPES[dtype][0]).T[:, 1]):
        check(
            lib.gc_unpack_signs_into(
                Tensor(source).view, scales is not None and Tensor(scales).view or None, BIG,
                Tensor(target, dtype).view, None,
            )
        )  # fmt: skip
        bits = np.unpackbits(source.reshape(-1))[:n]
        each = np.repeat(scales, 8 * source.shape[1])[:n] if scales is not None else 1
        np.testing.assert_array_equal(as_written(target), as_written(scaled_signs(bits, dtype, each)))


def ballots(rng, voters, size):
    """Returns rows near a tie, so that bits are not all decided alike, with a gap behind each."""
    memory = rng.integers(0, 256, voters * (size + 3), np.uint8).reshape(voters, size + 3)
    array = memory[:, :size]
    noise = rng.integers(0, 256, (3, voters, size), np.uint8)
    array[:] = array[0] ^ (np.arange(voters) % 2 * 255).astype(np.uint8)[:, None] ^ (noise[0] & noise[1] & noise[2])
    return array


@pytest.mark.parametrize("voters", [2, 3, 16, 70])
def test_several_threads_compute_the_same_large_vote(voters):
    array = ballots(np.random.default_rng(voters), voters, 700_001)
    target = np.zeros(700_001, np.uint8)
    check(lib.gc_vote_signs_into(Tensor(array).view, 5, Tensor(target).view, None))
    np.testing.assert_array_equal(target, majority(array, 5))
