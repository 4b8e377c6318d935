"""Signs and votes on the CPU that several threads share, against NumPy. tests/spec/test_parity.py has the others."""

import numpy as np
import pytest

import capi
from capi import BIG, DTYPES, FLOATS, Tensor, check, lib
from layouts import as_written
from models import SIGNED, majority, scaled_signs


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


def ballots(rng, voters, size):
    """Rows near a tie, or most bits would be decided alike, with a gap behind each."""
    memory = rng.integers(0, 256, voters * (size + 3), np.uint8).reshape(voters, size + 3)
    array = memory[:, :size]
    noise = rng.integers(0, 256, (3, voters, size), np.uint8)
    array[:] = array[0] ^ (np.arange(voters) % 2 * 255).astype(np.uint8)[:, None] ^ (noise[0] & noise[1] & noise[2])
    return array


@pytest.mark.parametrize("voters", [2, 3, 16, 70])
def test_a_large_vote_is_shared_by_threads_with_the_same_result(voters):
    array = ballots(np.random.default_rng(voters), voters, 700_001)
    target = np.zeros(700_001, np.uint8)
    check(lib.gc_vote_signs_into(Tensor(array).view, 5, Tensor(target).view, None))
    np.testing.assert_array_equal(target, majority(array, 5))
