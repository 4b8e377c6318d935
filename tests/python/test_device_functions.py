"""Tests of the functions of gradcodec/device.cuh and kernels/sum.cuh, lane by lane on the CPU
(tests/fakes/cuda/functions.cpp), against docs/NUMERICS.md."""

import ctypes
import os

import numpy as np
import pytest

import block_model
import codec_model
from codecs_c import same
from stand_in import DRIVERS
from tiers import both

f32 = np.float32


@pytest.fixture(scope="session")
def device():
    library = ctypes.CDLL(os.path.join(DRIVERS, "driver/functions.so"))
    library.unit_sum_of_lanes.restype, library.fold_partials.restype = ctypes.c_float, ctypes.c_double
    return library


def at(array):
    return ctypes.c_void_p(array.ctypes.data)


def patterns_of(x):
    return np.ascontiguousarray(x, f32).view(np.uint32)


def test_every_float16_and_midpoint_is_rounded_as_specified(device):
    every = np.arange(2**16, dtype=np.uint32)
    half, out = codec_model.widen(every.astype(np.uint16).view(np.float16), "float16"), np.empty(2**16, np.uint32)
    device.numbers(0, ctypes.c_uint64(every.size), at(every), at(out))
    same(patterns_of(codec_model.canonical(out.view(f32))), patterns_of(codec_model.canonical(half)), "from float16")
    rng = np.random.default_rng(1)
    for kind, dtype, first in (1, "float16", patterns_of(half)), (2, "bfloat16", every << 16):
        step = 0x2000 if dtype == "float16" else 0x10000
        for beyond in (0, step // 2, rng.integers(0, step, 2**16).astype(np.uint32), step // 2 - 1, step // 2 + 1):
            x = (first + beyond).astype(np.uint32)
            device.numbers(kind, ctypes.c_uint64(x.size), at(x), at(out))
            same(out.astype(np.uint16), codec_model.narrow(x.view(f32), dtype).view(np.uint16), f"to {dtype}")


@pytest.mark.parametrize("order", (0, 1))
@pytest.mark.parametrize("each", (1, 2, 4, 8, 16))
def test_lanes_store_bits_and_load_them(device, each, order):
    rng = np.random.default_rng(each)
    for n in (1, 7, 8, 9, 32, 33, 64, 511, 512, 513, 1029):
        bits, room = rng.integers(0, 2, n).astype(np.uint8), np.full((n + 7) // 8 + 3, 0xA5, np.uint8)
        device.store_bits_of_lanes(each, at(bits), ctypes.c_uint64(n), order, at(room[1:]))
        same(room[1:-2], np.packbits(bits, bitorder=("big", "little")[order]), f"{n} bits")
        assert room[0] == 0xA5 and (room[-2:] == 0xA5).all(), "a call has written beside the bits"
        loaded, signs = np.empty(n, np.uint8), np.empty(n, f32)
        device.load_bits_and_signs(at(room[1:]), ctypes.c_uint64(n), order, ctypes.c_float(2.5), at(loaded), at(signs))
        same(loaded, bits, "loaded bits")
        same(signs, np.where(bits, f32(2.5), f32(-2.5)), "signs")


def test_sums_of_lanes_and_partials_follow_the_tree_of_the_specification(device):
    rng = np.random.default_rng(2)
    terms = (rng.standard_normal(1024) * 10.0 ** rng.integers(-6, 6, 1024)).astype(f32)
    expected = codec_model.scale_of(terms, codec_model.MEAN) * f32(1024)  # a power of two: exact
    for each in (1, 2, 4, 8):
        assert device.unit_sum_of_lanes(each, at(np.abs(terms))) == expected, each
    for n in (1, 2, 63, 64, 65, 127, 129, 1000, 1024, 1025, 1500, 2048, 3000, 70_000):
        for _ in range(3):
            partials = rng.standard_normal(n) * 2.0 ** rng.integers(0, 20, n)
            tree = partials.copy()
            while tree.size > 1:
                tree = np.concatenate([tree, np.zeros(tree.size % 2)])
                tree = tree[::2] + tree[1::2]
            assert device.fold_partials(at(partials), ctypes.c_uint64(n)) == tree[0], n


def numbers_of_blocks(codec, rng, count):
    """Returns numbers around a power of two: random ones, codes times the scale, ties between two codes, zeros."""
    block = block_model.FORMATS[codec].block
    size = 2.0 ** np.repeat(rng.integers(-145, 125, count // block), block)
    step = size / (block_model.FORMATS[codec].most or 1)
    codes = block_model.VALUES[codec][rng.integers(0, len(block_model.VALUES[codec]), count)].astype(np.float64)
    with np.errstate(all="ignore"):
        kinds = rng.uniform(-1, 1, count) * size, codes * step, rng.integers(-8, 9, count) * 0.5 * step, np.zeros(count), -0.0 * size
        x = np.choose(rng.choice(5, count, p=(0.4, 0.2, 0.2, 0.1, 0.1)), kinds).astype(f32)
    return np.where(np.abs(x) < f32(2.0**127), x, f32(1))


@pytest.mark.parametrize("each", (1, 2, 4, 8))
@pytest.mark.parametrize("codec", block_model.FORMATS)
def test_lanes_quantize_as_the_specification_says(device, codec, each):
    form, warps = block_model.FORMATS[codec], both(quick=100, all=2000)
    if form.block // each > 32:
        each = 2  # the fewest elements a lane for which a warp holds a block
    count = warps * 32 * each
    c = numbers_of_blocks(codec, np.random.default_rng(each), count)
    for wrong, block in ((2.0**127, 0), (np.inf, 1), (np.nan, 2)):
        c[block * form.block] = wrong
    scales, s = np.empty(warps * 32, np.uint32), np.empty(warps * 32, f32)
    codes, sent, back = np.empty(count, np.uint32), np.empty(count, f32), np.empty(count, f32)
    assert device.quantize_by_lanes(codec, each, warps, *map(at, (c, scales, s, codes, sent, back)))
    memory, expected, v, finite = block_model.quantize(codec, c)
    if form.scale:
        same(scales[:: form.block // each].astype(memory.dtype), memory, "scales")
    same(codes[finite], expected.reshape(-1)[finite].astype(np.uint32), "codes")
    same(sent[finite], v[finite], "what codes stand for")
    same(back[finite], v[finite], "what is read back")
    assert (~finite).sum() == 3 * form.block
