"""Compares the model of block codecs (docs/NUMERICS.md 11) with casts of ml_dtypes, integers of NumPy and other
formulas. block_cases.py has the page's examples."""

import ml_dtypes
import numpy as np
import pytest

import block_model
from block_cases import NAMES, all_magnitudes
from block_model import BF16, INT4, INT8, MXFP4, MXFP8, BlockModel, quantize
from codec_model import NONFINITE, f32, narrow, rounded, widen

CODECS = pytest.mark.parametrize("codec", NAMES, ids=NAMES.values())
CASTS = {MXFP8: ml_dtypes.float8_e4m3fn, MXFP4: ml_dtypes.float4_e2m1fn}


@pytest.mark.parametrize("codec", CASTS, ids=("mxfp8", "mxfp4"))
def test_codes_match_a_cast_to_the_format(codec):
    c, most = all_magnitudes(codec, 7), block_model.FORMATS[codec].most
    scales, codes, _, _ = quantize(codec, c)
    y = c.reshape(-1, 32) / 2.0 ** (scales.astype(np.float64)[:, None] - 127)
    expected = y.clip(-most, most).astype(f32).astype(CASTS[codec]).view(np.uint8)
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("codec", CASTS, ids=("mxfp8", "mxfp4"))
def test_all_codes_have_the_values_of_the_format(codec):
    codes = np.arange(256 if codec == MXFP8 else 16).astype(np.uint8)
    np.testing.assert_array_equal(block_model.VALUES[codec], codes.view(CASTS[codec]).astype(np.float64))


def test_bfloat16_codes_match_a_cast():
    c = all_magnitudes(BF16, 3)
    np.testing.assert_array_equal(quantize(BF16, c)[1].reshape(-1), c.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize("codec", CASTS, ids=("mxfp8", "mxfp4"))
def test_the_e8m0_byte_is_the_smallest_power_of_two_that_holds_the_block(codec):
    """Calculates this another way: exact rationals, with the float32 product with which the rule begins."""
    c, most = all_magnitudes(codec, 5), block_model.FORMATS[codec].most
    scales, _, _, _ = quantize(codec, c)
    for block, byte in zip(c.reshape(-1, 32), scales):
        product = float(f32(f32(np.abs(block).max()) * f32(1 / most)))
        if product == 0 or byte == 0:
            assert product <= 2.0**-127
            continue
        assert 2.0 ** (int(byte) - 128) < product <= 2.0 ** (int(byte) - 127)


@pytest.mark.parametrize("codec, most", ((INT8, 127), (INT4, 7)), ids=("int8", "int4"))
def test_integer_blocks_are_within_half_a_step_of_the_values(codec, most):
    c = all_magnitudes(codec, 11)
    scales, codes, v, _ = quantize(codec, c)
    s = widen(scales, "bfloat16").astype(np.float64)[:, None]
    blocks = c.reshape(s.size, -1).astype(np.float64)
    small = np.abs(blocks).max(axis=1) < 2.0**-100
    assert (scales[small] == 0).all() and (codes[small] == 0).all() and (scales[~small] != 0).all()
    signed = np.where(codes >= 1 << (3 if codec == INT4 else 7), codes.astype(int) - (1 << (4 if codec == INT4 else 8)), codes)
    assert np.abs(signed).max() == most
    # The largest element is never clipped: the scale is rounded up. 2^-20 allows for the three roundings on the way.
    assert (np.abs(blocks - signed * s)[~small] <= (s * (0.5 + 2.0**-20) * np.ones_like(blocks))[~small]).all()
    np.testing.assert_array_equal((signed * s).reshape(-1), v)


@CODECS
def test_sent_values_and_errors_add_up_to_the_gradient(codec):
    """Checks numbers exactly, as float64 holds the sum; and that decoded values are as near as the header promises."""
    c = all_magnitudes(codec, 3)
    model = BlockModel(codec, [c.size])
    v = model.decode(model.encode([c]))[0].astype(np.float64)
    np.testing.assert_array_equal(v + model.errors(0), c.astype(np.float64))
    blocks = c.reshape(-1, block_model.FORMATS[codec].block).astype(np.float64)
    largest, off = np.abs(blocks).max(axis=1, keepdims=True), np.abs(v.reshape(blocks.shape) - blocks)
    of_itself, of_largest = {
        BF16: (2.0**-8, 2.0**-33), MXFP8: (1 / 16, 1 / 229_000), INT8: (0, 1 / 252), INT4: (0, 1 / 13), MXFP4: (1 / 4, 1 / 12),
    }[codec]  # fmt: skip
    bound = np.maximum(of_itself * np.abs(blocks), of_largest * largest)
    assert (off <= bound)[largest[:, 0] >= 2.0**-100].all()


@CODECS
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("error", ("float32", "bfloat16", None))
def test_errors_are_rounded_once(codec, dtype, error):
    g = narrow(np.random.default_rng(1).standard_normal(100), dtype)
    model = BlockModel(codec, [100], values=dtype, results=dtype, error=error)
    out = model.decode(model.encode([g]))[0]
    e = np.zeros(100, f32) if error is None else rounded(widen(g, dtype) - out, error)
    np.testing.assert_array_equal(model.errors(0), e)


def test_codes_and_scales_of_any_bytes_are_numbers():
    model = BlockModel(INT8, [64], error=None)
    payload = model.encode([np.ones(64, f32)]).copy()
    payload[64:66] = np.frombuffer(np.uint16(0xC000).tobytes(), np.uint8)  # -2
    payload[80] = 0x80
    assert model.decode(payload)[0][0] == 256
    model = BlockModel(MXFP8, [32], error=None)
    payload = model.encode([np.ones(32, f32)]).copy()
    payload[64], payload[80], payload[81] = 0, 0x38, 0x7F
    out = model.decode(payload)[0]
    assert out[0] == 2.0**-127 and np.isnan(out[1]) and model.flags == NONFINITE
