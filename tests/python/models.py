"""NumPy's models of the library's results, on the CPU and on CUDA; and the floats that matter for them."""

import numpy as np

from capi import BIG, DTYPES, FLOATS, INTEGERS, LITTLE

TRUTHS = ("bool", *INTEGERS)
UNPACKED = (*TRUTHS, *FLOATS)
SIGNED = (*(dtype for dtype in INTEGERS if dtype.startswith("int")), *FLOATS)  # dtypes with the value -1
ORDERS = {BIG: "big", LITTLE: "little"}


def bit_patterns(dtype):
    """Returns the unsigned type of a float and its special patterns: exponent all ones or all zeros, and 1.0."""
    itemsize = np.dtype(DTYPES[dtype][0]).itemsize
    unsigned = np.dtype(f"uint{8 * itemsize}").type
    mantissa = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[dtype]
    top = 8 * itemsize - 1
    infinite = ((1 << (top - mantissa)) - 1) << mantissa
    quiet, one_pattern = infinite | 1 << (mantissa - 1), infinite >> 1 & infinite
    magnitudes = (0, 1, (1 << mantissa) - 1, 1 << mantissa, one_pattern, infinite - 1, infinite, quiet, infinite | 1)
    return unsigned, [unsigned(m | sign << top) for m in magnitudes for sign in (0, 1)]


def not_below_zero(array, dtype):
    """Returns not (x < 0), by NumPy's comparison; bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return np.asarray(~(array < 0))


# The library writes no other NaN.
NANS = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8000000000000}


def scaled_signs(bits, dtype, scales=1.0):
    """Returns +scale where the bit is 1, else -scale, rounded by NumPy to nearest even; bfloat16 by a formula."""
    if dtype not in FLOATS:
        return np.where(bits, 1, -1).astype(dtype)
    scales = np.asarray(scales, np.float32)
    signed = np.where(bits, scales, -scales).astype(np.float32)
    if dtype == "bfloat16":
        patterns = signed.view(np.uint32).astype(np.uint64)
        patterns = (patterns + 0x7FFF + (patterns >> 16 & 1) >> 16).astype(np.uint16)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            patterns = signed.astype(dtype).view(f"uint{8 * np.dtype(dtype).itemsize}")
    patterns = np.where(np.isnan(signed), patterns.dtype.type(NANS[dtype]), patterns)
    return patterns.view(DTYPES[dtype][0])


def majority(rows, turn):
    """Returns each bit's majority of the rows; in a tie the bit of row (byte index + turn) mod n_voters."""
    voters, size = rows.shape
    in_turn = rows[(np.arange(size) + turn % voters) % voters, np.arange(size)]
    votes = np.zeros(8 * size, np.int64)
    for row in rows:  # row by row: the bits of all as numbers may be more than memory holds
        votes += np.unpackbits(row)
    return np.packbits(np.where(2 * votes == voters, np.unpackbits(in_turn), 2 * votes > voters))


# Scales at and around every border of rounding: zeros, denormals of each dtype, halves, the largest, infinities, NaNs.
SCALES = np.array(
    [
        0, 0x80000000, 1, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x33000000, 0x33000001, 0x33800000, 0x33C00000, 0x387FC000,
        0x387FE000, 0x387FFFFF, 0x38800000, 0x3F800000, 0xBF800000, 0x3F801000, 0x3F803000, 0x3F808000, 0x3F818000,
        0x477FEFFF, 0x477FF000, 0xC77FF000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001,
        0xFFC00001, 0x7FFFFFFF,
    ],
    np.uint32,
).view(np.float32)  # fmt: skip
