"""Signs and votes against NumPy. Packing into memory of the caller, and layouts, are test_bits.py's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import capi
from capi import BIG, DTYPES, FLOATS, LITTLE, Managed, Tensor, byref, check, lib, take
from models import ORDERS, SCALES, SIGNED, majority, scaled_signs
from test_bits import chunk_rows, chunk_sets, floats, layouts, orders, rows

TURNS = st.one_of(st.integers(0, 100), st.integers(0, 2**64 - 1))


def as_written(array):
    """An array whose NaNs compare by their patterns."""
    return np.ascontiguousarray(array).view(f"uint{8 * array.dtype.itemsize}")


@given(floats(), st.integers(1, 9))
def test_pack_signs_is_packbits_of_not_below_zero_split(source, n_chunks):
    tensor, bits = source
    out = (Managed * n_chunks)()
    check(lib.gc_pack_signs(tensor.managed, n_chunks, out))
    assert not tensor.releases
    np.testing.assert_array_equal(np.stack([take(chunk) for chunk in out]), chunk_rows(bits, n_chunks))


@given(chunk_sets(), st.sampled_from(SIGNED))
def test_unpack_signs_is_plus_and_minus_one(chunk_set, dtype):
    n_elements, chunks = chunk_set
    out = Managed()
    tensors = [tensor for tensor, _ in chunks]
    check(lib.gc_unpack_signs(capi.managed_array(tensors), len(chunks), n_elements, capi.dldtype(dtype), byref(out)))
    assert not any(tensor.releases for tensor in tensors)
    about = out.contents.dl_tensor.dtype
    assert (about.code, about.bits, about.lanes) == (*DTYPES[dtype][1:], 1)
    bits = np.unpackbits(np.concatenate([values for _, values in chunks]))[:n_elements]
    np.testing.assert_array_equal(as_written(take(out)), as_written(scaled_signs(bits, dtype)))


@given(layouts(SIGNED, writable=True), st.integers(1, 9), orders, st.integers(0, 2**32 - 1), st.data())
def test_unpack_signs_into_writes_scales_and_minus_them_and_nothing_else(layout, n_chunks, order, seed, data):
    n_elements = int(np.prod(layout.shape, dtype=np.int64))
    rng = np.random.default_rng(seed)
    source = data.draw(rows((n_chunks, capi.chunk_bytes(n_elements, n_chunks))))
    source_buffer = source.buffer()
    source_buffer[:] = rng.integers(0, 256, source_buffer.size)
    bytes_in = source.carve(source_buffer)
    bits = np.unpackbits(bytes_in.reshape(-1), bitorder=ORDERS[order])[:n_elements]
    # Of integers there are no scaled ones.
    wanted = data.draw(st.sampled_from((0, 1, n_chunks)), label="scales") if layout.dtype in FLOATS else 0
    scales, each = None, np.float32(1)
    if wanted:
        values = rng.choice(np.concatenate([SCALES, rng.standard_normal(30, np.float32)]), wanted)
        memory = np.zeros(4 * wanted + 3, np.uint8)
        shift = data.draw(st.integers(0, 3), label="shift of scales")
        memory = memory[shift : shift + 4 * wanted]
        memory[:] = values.view(np.uint8)
        scales = Tensor(memory.view(np.float32))
        each = np.repeat(values, 8 * bytes_in.shape[1])[:n_elements] if wanted > 1 else values[0]
    buffer = layout.buffer()
    source_tensor, target = source.describe(bytes_in), layout.describe(layout.carve(buffer))
    check(lib.gc_unpack_signs_into(source_tensor.view, scales and scales.view, order, target.view, None))
    expected = scaled_signs(bits, layout.dtype, each).reshape(layout.shape)
    twin = layout.buffer()
    layout.carve(twin).view(f"uint{8 * layout.numpy.itemsize}")[...] = as_written(expected)
    np.testing.assert_array_equal(buffer, twin)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_scale_is_rounded_once_and_any_nan_is_the_one(dtype):
    scales = np.concatenate([SCALES, (np.arange(0, 2**32, 65537, np.uint64)).astype(np.uint32).view(np.float32)])
    for bits, byte in ((np.ones(8, bool), 0xFF), (np.zeros(8, bool), 0x00)):
        source = np.full((scales.size, 1), byte, np.uint8)
        target = np.zeros(8 * scales.size, DTYPES[dtype][0])
        check(
            lib.gc_unpack_signs_into(
                Tensor(source).view, Tensor(scales).view, LITTLE, Tensor(target, dtype).view, None
            )
        )
        expected = scaled_signs(np.tile(bits, scales.size), dtype, np.repeat(scales, 8))
        np.testing.assert_array_equal(as_written(target), as_written(expected))


@pytest.mark.parametrize("n_chunks", [1, 3, 7])
@pytest.mark.parametrize("dtype", SIGNED)
def test_large_tensors_are_worked_on_by_several_threads_with_the_same_result(dtype, n_chunks):
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


# --- votes ------------------------------------------------------------------------------------------------------------


def ballots(rng, voters, size, gap=0, shift=0):
    """Rows near a tie, or most bits would be decided alike, with a gap behind each."""
    memory = rng.integers(0, 256, shift + voters * (size + gap), np.uint8)[shift:].reshape(voters, size + gap)
    array = memory[:, :size]
    noise = rng.integers(0, 256, (3, voters, size), np.uint8)
    array[:] = array[0] ^ (np.arange(voters) % 2 * 255).astype(np.uint8)[:, None] ^ (noise[0] & noise[1] & noise[2])
    return array


@given(st.integers(1, 40), st.integers(0, 700), TURNS, st.integers(0, 20), st.integers(0, 2**32 - 1), st.data())
def test_a_vote_is_what_more_than_half_have_and_ties_go_by_turns(voters, size, turn, shift, seed, data):
    rng = np.random.default_rng(seed)
    array = ballots(rng, voters, size, gap=data.draw(st.integers(0, 5)), shift=data.draw(st.integers(0, 17)))
    if data.draw(st.booleans(), label="backwards"):
        array = array[::-1]
    target = np.full(size + shift + 9, 0xA5, np.uint8)
    check(lib.gc_vote_signs_into(Tensor(array).view, turn, Tensor(target[shift : shift + size]).view, None))
    expected = np.full_like(target, 0xA5)
    expected[shift : shift + size] = majority(array, turn)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("voters", [63, 64, 65, 66, 127, 128, 255, 256, 1000, 65_535, 65_536, 65_537])
def test_any_number_of_voters_is_counted_right(voters):
    rng = np.random.default_rng(voters)
    array = ballots(rng, voters, 37)
    for turn in (0, voters - 1, 2**64 - 1):
        target = np.zeros(37, np.uint8)
        check(lib.gc_vote_signs_into(Tensor(array).view, turn, Tensor(target).view, None))
        np.testing.assert_array_equal(target, majority(array, turn))


@pytest.mark.parametrize("voters", [2, 3, 16, 70])
def test_a_large_vote_is_shared_by_threads_with_the_same_result(voters):
    array = ballots(np.random.default_rng(voters), voters, 700_001, gap=3)
    target = np.zeros(700_001, np.uint8)
    check(lib.gc_vote_signs_into(Tensor(array).view, 5, Tensor(target).view, None))
    np.testing.assert_array_equal(target, majority(array, 5))


def test_one_row_that_is_seen_by_all_voters_wins():
    row = np.arange(50, dtype=np.uint8)
    target = np.zeros(50, np.uint8)
    everybody = np.broadcast_to(row, (6, 50))
    check(lib.gc_vote_signs_into(Tensor(everybody).view, 3, Tensor(target).view, None))
    np.testing.assert_array_equal(target, row)
