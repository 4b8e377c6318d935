"""Compares copies and casts with NumPy's `dst[...] = src`; where NumPy leaves a cast undefined or has no bfloat16, with
a formula."""

import ctypes
import itertools
import math
from ctypes import byref
from fractions import Fraction

import numpy as np
import pytest
from capi import CPU, CUDA_HOST, DTYPES, FLOATS, INTEGERS, DLDataType, DLDevice, Managed, Tensor, check, lib, take
from layouts import HostBench, assert_written, case, random_bytes, random_layout, random_shape
from tiers import both

CASTS = ("bool", *INTEGERS, *FLOATS)
NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8000000000000}
# Bits of the significand, with the implied one, and the least and the largest exponent of a normal number.
FORMATS = {
    "float16": (11, -14, 15), "bfloat16": (8, -126, 127), "float32": (24, -126, 127), "float64": (53, -1022, 1023),
}


@pytest.fixture(autouse=True)
def default_threads():
    yield
    check(lib.gc_set_threads(0))


def of(name):
    return np.dtype(DTYPES[name][0])


def copy_into(src, dst, dtypes=(None, None)):
    check(lib.gc_copy_into(Tensor(src, dtypes[0]).view, Tensor(dst, dtypes[1]).view, None))


def numbers(array, name):
    """Returns the values of elements: bool is 0 and 1, bfloat16 is float32."""
    if name == "bool":
        return (array.view(np.uint8) != 0).astype(np.uint8)
    if name == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def rounded(value, name):
    """Returns the bits of the float that is nearest to a number, ties to even, calculated in whole numbers."""
    precision, least, most = FORMATS[name]
    sign = math.copysign(1, value) < 0 if isinstance(value, float) else value < 0
    width = of(name).itemsize * 8
    sign = int(sign) << (width - 1)
    infinity = (most - least + 2) << (precision - 1)
    if isinstance(value, float) and math.isnan(value):
        return NAN[name]
    if isinstance(value, float) and math.isinf(value):
        return sign | infinity
    size = abs(Fraction(value))
    if size == 0:
        return sign
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    exponent = max(exponent, least)
    count = round(size / Fraction(2) ** (exponent - precision + 1))  # Python's round is to even
    # A count of 2^(precision - 1) is the first of its exponent. Denormals have fewer, and a carry is right.
    return sign | min(count + ((exponent - least) << (precision - 1)), infinity)


@np.errstate(over="ignore", invalid="ignore")
def cast(array, source, target):
    """Returns the elements of `target` that the header promises."""
    if source == target:
        return array.copy()
    values = numbers(array, source)
    if target == "bool":
        return values != 0
    if target in INTEGERS and values.dtype.kind == "f":
        limits, whole = np.iinfo(target), np.trunc(values.astype(np.float64))
        above, below = whole >= float(limits.max) + 1, whole < float(limits.min)
        within = np.where(np.isnan(whole) | above | below, 0, whole).astype(target)
        return np.where(above, limits.max, np.where(below, limits.min, within)).astype(target)
    if target == "bfloat16":
        return np.array([rounded(value.item(), target) for value in values.flat], np.uint16).reshape(values.shape)
    result = values.astype(of(target))
    if target in FLOATS:
        result.view(f"u{result.itemsize}")[np.isnan(result)] = NAN[target]
    return result


def edges(name):
    """Returns elements at which casts go wrong."""
    random = np.random.default_rng(7)
    if name == "bool":
        return np.array([0, 1, 2, 255] * 20, np.uint8).view(np.bool_)
    if name in INTEGERS:
        bits, signed = of(name).itemsize * 8, name.startswith("int")
        values = {0, 1, 2, 3, 2**bits - 1, 2 ** (bits - 1)}
        for high in range(bits):
            # Numbers around powers of two, and around the middles between floats of 8, 11, 24 and 53 bits.
            digits_of = [digits for digits in (8, 9, 11, 12, 24, 25, 53, 54) if high >= digits]
            steps = [0] + [sign * 2 ** (high - digits) for digits in digits_of for sign in (1, 3)]
            values.update((1 << high) + step + near for step in steps for near in (-1, 0, 1))
        values |= {-value for value in values}
        least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        return np.array(sorted(value for value in values if least <= value <= most), name)
    width = of(name).itemsize * 8
    precision, _, _ = FORMATS[name]
    patterns = set(random.integers(0, 2**width, 300, np.uint64).tolist())
    # 0, denormals, Inf, NaN with other bits; numbers around integers and halves, and around the limits of other types.
    patterns |= {0, 1, 2, 3, (1 << (precision - 1)) - 1, 1 << (precision - 1), NAN[name], NAN[name] - 1, NAN[name] + 1}
    infinity = NAN[name] - (1 << (precision - 2))
    patterns |= {infinity - 1, infinity, infinity + 1, infinity + 5, 2 ** (width - 1) - 1}
    values = [n + part for n in range(9) for part in (0, 0.25, 0.5, 0.75)] + [2.0**k for k in range(-160, 129, 1)]
    for value in values + [65504, 65519, 65520, 65535.5, 2**24 + 1, 3.3895313892515355e38, 3.4028235677973366e38]:
        beyond = 0, 2.0**-8, 2.0**-9, 3 * 2.0**-9, 2.0**-11, 2.0**-12, 2.0**-24, 2.0**-25
        for factor in (1 + part for part in beyond):
            bits = rounded(value * factor, name)
            patterns |= {max(bits - 1, 0), bits, bits + 1}
    patterns |= {pattern ^ 1 << (width - 1) for pattern in patterns}
    return np.array(sorted(patterns), np.uint64).astype(f"u{width // 8}").view(of(name))


EDGES = {name: edges(name) for name in CASTS}


@pytest.mark.parametrize("target", CASTS)
@pytest.mark.parametrize("source", CASTS)
def test_casts_match_numpy_or_the_header(source, target):
    src = EDGES[source]
    expected = cast(src, source, target)
    dst = np.zeros(src.shape, of(target))
    copy_into(src, dst, (source, target))
    as_bits = f"u{dst.itemsize}"
    found, wanted = dst.view(as_bits), expected.view(as_bits)
    assert np.array_equal(found, wanted), np.flatnonzero(found != wanted)
    # Copy elements that are not contiguous, too, on either side.
    spread = np.repeat(src, 3)[::3]
    apart = np.zeros((len(src), 2), of(target))
    copy_into(spread, apart[:, 1], (source, target))
    assert np.array_equal(apart[:, 1].view(as_bits), expected.view(as_bits)) and not apart[:, 0].any()


@pytest.mark.parametrize("block", range(4))
def test_elements_go_where_numpy_puts_them_and_nowhere_else(block):
    count, bench = both(quick=150, all=1500), HostBench()
    for seed in range(block * count, (block + 1) * count):
        rng = np.random.default_rng(seed)
        shape = random_shape(rng)
        source = random_layout(rng, (*CASTS, "complex64"), shape)
        as_it_is = source.dtype == "complex64" or rng.random() < 0.5
        targets = [source.dtype] if as_it_is else [name for name in CASTS if name != "bfloat16"]  # its formula is slow
        target, buffer = random_layout(rng, targets, shape, writable=True), random_bytes(rng, source)
        with case(seed=seed, source=source, target=target):
            elements = source.carve(buffer)
            found = bench.into(lib.gc_copy_into, source, buffer, target=target)
            assert_written(target, found, cast(elements.reshape((1, *shape)), source.dtype, target.dtype)[0, ...])
            compact = bench.new(lib.gc_tensor_to_device, source, buffer, DLDevice(CPU, 0))
            assert compact.shape == shape and compact.tobytes() == elements.tobytes()


@pytest.mark.parametrize("size", (3, 6, 12, 24, 40))
def test_elements_of_any_size_are_copied_as_they_are(size):
    element = np.dtype((np.void, size))
    memory = np.random.default_rng(3).integers(0, 256, (20, 31, size), np.uint8).view(element)[..., 0]
    for src in (memory, memory.T, memory[::2, ::-1]):
        dst = np.zeros(src.shape, element)
        sides = []
        for array in (src, dst):
            side = Tensor(array, "uint8")
            side.struct.dl_tensor.dtype = DLDataType(3, 8, size)  # an opaque handle with `size` lanes
            sides.append(side)
        check(lib.gc_copy_into(sides[0].view, sides[1].view, None))
        assert dst.tobytes() == src.tobytes()


@pytest.mark.parametrize(
    "source, target",
    [
        ((), (3, 4)), ((4,), (3, 4)), ((1,), (3, 4)), ((3, 1), (3, 4)), ((1, 4), (3, 4)), ((1, 1, 3, 4), (3, 4)),
        ((1,), ()), ((2, 1, 5), (3, 2, 7, 5)), ((1,), (0,)), ((3, 1), (3, 0)), ((600, 1), (600, 700)),
        ((700,), (600, 700)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("int16", "float64"), ("float64", "bool")])
def test_the_source_is_broadcast_as_by_numpy(source, target, dtypes):
    src = np.arange(math.prod(source), dtype=dtypes[0]).reshape(source)
    for dst in np.zeros(target, dtypes[1]), np.zeros(target[::-1], dtypes[1]).T:
        expected = np.zeros(target, dtypes[1])
        expected[...] = src
        copy_into(src, dst)
        assert np.array_equal(dst, expected)


@pytest.mark.parametrize("bits, shape", [(4, (7, 3)), (1, (1000,)), (12, (5, 3)), (4, ()), (4, (0, 3))])
def test_elements_that_share_bytes_are_copied_whole(bits, shape):
    count = -(-math.prod(shape) * bits // 8)
    src = np.random.default_rng(5).integers(0, 256, count + 8, np.uint8)
    dst = np.zeros(count + 8, np.uint8)
    sides = []
    for memory in (src, dst):
        side = Tensor(np.zeros(shape, np.uint8), "uint8")
        side.struct.dl_tensor.data, side.memory = memory.ctypes.data, memory
        side.struct.dl_tensor.dtype = DLDataType(1, bits, 1)
        sides.append(side)
    check(lib.gc_copy_into(sides[0].view, sides[1].view, None))
    def bits_of(memory):
        return int.from_bytes(memory.tobytes(), "little") & (1 << math.prod(shape) * bits) - 1

    assert bits_of(dst) == bits_of(src) and not dst[count:].any()
    out = Managed()
    check(lib.gc_tensor_to_device(sides[0].managed, DLDevice(CPU, 0), byref(out)))
    copy = out.contents.dl_tensor
    assert (copy.dtype.bits, tuple(copy.shape[: copy.ndim])) == (bits, shape)
    assert ctypes.string_at(copy.data, count) == src[:count].tobytes() if count else not copy.data
    lib.gc_tensor_free(out)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 5, 7, 8, 9, 201])
def test_bits_after_the_last_element_stay(bits, count):
    size = (count * bits + 7) // 8
    for filled, around in [(0xFF, 0), (0, 0xFF), (0x5A, 0xA5)]:
        src, dst = Tensor(np.full(size, filled, np.uint8)), Tensor(np.full(size + 1, around, np.uint8))
        for side in (src, dst):
            side.struct.dl_tensor.dtype = DLDataType(1, bits, 1)
            side.struct.dl_tensor.shape[0] = count
        check(lib.gc_copy_into(src.view, dst.view, None))
        mask = (1 << count * bits) - 1  # the first element of a byte has its lowest bits
        before, given = (int.from_bytes(bytes([byte]) * (size + 1), "little") for byte in (around, filled))
        assert int.from_bytes(dst.array.tobytes(), "little") == given & mask | before & ~mask


LARGE = [(1 << 22,), (3001, 1501), (7, 1 << 19), (1 << 19, 7), (130, 170, 190)]


@pytest.mark.parametrize(
    "shape, threads", both(quick=[(LARGE[1], 3)], all=itertools.product(LARGE, (1, 3)))
)
def test_large_copies_are_split_correctly(shape, threads):
    check(lib.gc_set_threads(threads))
    random = np.random.default_rng(9)
    flat = random.integers(0, 2**32, math.prod(shape), np.uint32).view(np.float32)
    flat[np.isnan(flat)] = 0
    for src in (flat.reshape(shape), flat.reshape(shape[::-1]).T, flat.reshape(shape)[..., ::-1]):
        for target in ("float32", "float16", "int64"):
            dst = np.zeros(shape, target)
            copy_into(src, dst)
            expected = np.zeros(shape, target)
            if target == "int64":
                expected = cast(np.ascontiguousarray(src), "float32", target)
            else:
                with np.errstate(over="ignore"):
                    expected[...] = src
            assert np.array_equal(dst, expected), (src.strides, target)
        apart = np.zeros((*shape, 2), np.float32)
        copy_into(src, apart[..., 0])
        assert np.array_equal(apart[..., 0], src) and not apart[..., 1].any()


def test_a_copy_onto_itself_changes_nothing():
    memory = np.arange(60, dtype=np.int32).reshape(6, 10)
    for array in (memory, memory.T, memory[::2, ::-3]):
        copy_into(array, array)
        copy_into(array, array, ("int32", "uint32"))  # has the same bytes
    assert np.array_equal(memory, np.arange(60).reshape(6, 10))


def test_memory_of_cuda_host_is_memory_of_the_cpu():
    src, dst = np.arange(5.0), np.zeros(5, np.float32)
    check(lib.gc_copy_into(Tensor(src, device=CUDA_HOST).view, Tensor(dst).view, ctypes.c_void_p(0x1234)))
    assert np.array_equal(dst, src)
    out = Managed()
    check(lib.gc_tensor_to_device(Tensor(src, device=CUDA_HOST).managed, DLDevice(CPU, 0), byref(out)))
    assert np.array_equal(take(out), src)
