"""What the library's results are held to, by NumPy, on the CPU and on CUDA; and the floats that matter to that."""

import numpy as np

from capi import BIG, DTYPES, FLOATS, INTEGERS, LITTLE

TRUTHS = ("bool", *INTEGERS)
UNPACKED = (*TRUTHS, *FLOATS)
ORDERS = {BIG: "big", LITTLE: "little"}


def bit_patterns(dtype):
    """The unsigned type of a float and the patterns that matter in it: exponent all ones or all zeros, and 1.0."""
    itemsize = np.dtype(DTYPES[dtype][0]).itemsize
    unsigned = np.dtype(f"uint{8 * itemsize}").type
    mantissa = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[dtype]
    top = 8 * itemsize - 1
    infinite = ((1 << (top - mantissa)) - 1) << mantissa
    quiet, one_pattern = infinite | 1 << (mantissa - 1), infinite >> 1 & infinite
    magnitudes = (0, 1, (1 << mantissa) - 1, 1 << mantissa, one_pattern, infinite - 1, infinite, quiet, infinite | 1)
    return unsigned, [unsigned(m | sign << top) for m in magnitudes for sign in (0, 1)]


def not_below_zero(array, dtype):
    """not (x < 0), by NumPy's comparison; bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return np.asarray(~(array < 0))
