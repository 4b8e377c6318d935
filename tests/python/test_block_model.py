"""The model of block codecs (docs/NUMERICS.md 11) against casts of ml_dtypes, integers of NumPy, other formulas, and
the page's examples."""

import struct

import ml_dtypes
import numpy as np
import pytest

import block_model
from block_cases import NAMES, all_magnitudes, example
from block_model import BF16, INT4, INT8, MXFP4, MXFP8, SUM, BlockModel, quantize
from codec_model import NONFINITE, TRANSACTIONAL, ZERO, f32, narrow, rounded, widen

CODECS = pytest.mark.parametrize("codec", NAMES, ids=NAMES.values())
CASTS = {MXFP8: ml_dtypes.float8_e4m3fn, MXFP4: ml_dtypes.float4_e2m1fn}


@CODECS
@pytest.mark.parametrize("seed", range(3))
def test_what_is_sent_and_what_is_kept_are_together_what_was_there(codec, seed):
    c = all_magnitudes(codec, seed)
    _, _, v, finite = quantize(codec, c)
    assert finite.all()
    e = c - v
    # As numbers, exactly: float64 holds both sums.
    np.testing.assert_array_equal(v.astype(np.float64) + e, c.astype(np.float64))


@pytest.mark.parametrize("codec", CASTS, ids=("mxfp8", "mxfp4"))
def test_codes_are_those_of_a_cast_to_the_format(codec):
    c, most = all_magnitudes(codec, 7), block_model.FORMATS[codec].most
    scales, codes, _, _ = quantize(codec, c)
    y = c.reshape(-1, 32) / 2.0 ** (scales.astype(np.float64)[:, None] - 127)
    expected = y.clip(-most, most).astype(f32).astype(CASTS[codec]).view(np.uint8)
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("codec", CASTS, ids=("mxfp8", "mxfp4"))
def test_all_codes_stand_for_what_the_format_says(codec):
    codes = np.arange(256 if codec == MXFP8 else 16).astype(np.uint8)
    np.testing.assert_array_equal(block_model.VALUES[codec], codes.view(CASTS[codec]).astype(np.float64))


def test_bfloat16_codes_are_those_of_a_cast():
    c = all_magnitudes(BF16, 3)
    np.testing.assert_array_equal(quantize(BF16, c)[1].reshape(-1), c.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize("codec", CASTS, ids=("mxfp8", "mxfp4"))
def test_the_e8m0_byte_is_the_smallest_power_of_two_that_holds_the_block(codec):
    """By another way: exact rationals, with the float32 product that the rule begins with."""
    c, most = all_magnitudes(codec, 5), block_model.FORMATS[codec].most
    scales, _, _, _ = quantize(codec, c)
    for block, byte in zip(c.reshape(-1, 32), scales):
        product = float(f32(f32(np.abs(block).max()) * f32(1 / most)))
        if product == 0 or byte == 0:
            assert product <= 2.0**-127
            continue
        assert 2.0 ** (int(byte) - 128) < product <= 2.0 ** (int(byte) - 127)


@pytest.mark.parametrize("codec", CASTS, ids=("mxfp8", "mxfp4"))
def test_the_e8m0_byte_is_what_a_logarithm_gives_but_just_above_a_power_of_two(codec):
    """As torchao's to_mx rounds up (RCEIL), whose float32 logarithm may lose what is up to 40 ulps above."""
    c, most = all_magnitudes(codec, 9), f32(block_model.FORMATS[codec].most)
    scales, _, _, _ = quantize(codec, c)
    quotients = np.abs(c.reshape(-1, 32)).max(axis=1) / most
    normal = quotients >= f32(2.0**-126)
    by_logarithm = np.ceil(np.log2(quotients[normal])).astype(int) + 127
    less, above = scales[normal] - by_logarithm, quotients[normal].view(np.uint32) & 0x7FFFFF
    assert set(less[above > 40]) == {0} and set(less) <= {0, 1} and (above > 40).sum() > 250


@pytest.mark.parametrize("codec, most", ((INT8, 127), (INT4, 7)), ids=("int8", "int4"))
def test_integer_blocks_are_within_half_a_step_of_what_they_stand_for(codec, most):
    c = all_magnitudes(codec, 11)
    scales, codes, v, _ = quantize(codec, c)
    s = widen(scales, "bfloat16").astype(np.float64)[:, None]
    blocks = c.reshape(s.size, -1).astype(np.float64)
    small = np.abs(blocks).max(axis=1) < 2.0**-100
    assert (scales[small] == 0).all() and (codes[small] == 0).all() and (scales[~small] != 0).all()
    signed = np.where(codes >= 1 << (3 if codec == INT4 else 7), codes.astype(int) - (1 << (4 if codec == INT4 else 8)), codes)
    assert np.abs(signed).max() == most
    # The largest is never clipped: the scale is rounded up. 2^-20 is for the three roundings on the way.
    assert (np.abs(blocks - signed * s)[~small] <= (s * (0.5 + 2.0**-20) * np.ones_like(blocks))[~small]).all()
    np.testing.assert_array_equal((signed * s).reshape(-1), v)


@CODECS
def test_a_block_that_is_not_finite_decodes_to_nan_and_keeps_its_errors(codec):
    block = block_model.FORMATS[codec].block
    for wrong in (np.nan, np.inf, -np.inf, 2.0**127, -(2.0**127)):
        model = BlockModel(codec, [2 * block + 3])
        model.worker = [np.full(2 * block + 3, f32(0.3))]
        g = np.ones(2 * block + 3, f32)
        g[block + 2] = wrong
        out = model.decode(model.encode([g]))[0]
        here = np.arange(g.size) // block == 1
        assert np.isnan(out[here]).all() and np.isfinite(out[~here]).all() and model.flags == NONFINITE
        assert (model.worker[0][here] == f32(0.3)).all() and (model.worker[0][~here] != f32(0.3)).any()


@CODECS
def test_zero_counts_what_is_not_finite_as_zero(codec):
    model = BlockModel(codec, [5], nonfinite=ZERO, error=None)
    payload = model.encode([f32([1, np.nan, -np.inf, 2.0**127, 1])])
    out = model.decode(payload)[0]
    np.testing.assert_array_equal(out[1:4], 0)
    np.testing.assert_allclose(out[[0, 4]], 1, rtol=0.01)
    assert model.flags == NONFINITE


@CODECS
@pytest.mark.parametrize("world", (1, 2, 3, 5))
def test_an_all_reduce_with_errors_loses_nothing(codec, world):
    """Sums of what was given and of what came: apart by the errors that are kept, and by roundings."""
    random, segments, raw = np.random.default_rng(world), [70, 1, 0, 333, 40], [0, 1, 0, 0, 1]
    ranks = [BlockModel(codec, segments, raw=raw, n_chunks=world, server=k) for k in range(world)]
    given, came = np.zeros(sum(segments)), np.zeros(sum(segments))
    for _ in range(20):
        gradients = [[random.standard_normal(n).astype(f32) for n in segments] for _ in ranks]
        payloads = [rank.encode(g).reshape(world, -1) for rank, g in zip(ranks, gradients)]
        reduced = np.concatenate([rank.reduce([p[k] for p in payloads]) for k, rank in enumerate(ranks)])
        outs = [np.concatenate(rank.decode(reduced)) for rank in ranks]
        assert all((out == outs[0]).all() for out in outs)
        given += np.mean([np.concatenate(g) for g in gradients], axis=0)
        came += outs[0]
    kept = np.mean([rank.errors(0) for rank in ranks], axis=0)
    for rank in ranks:
        where = np.concatenate([
            np.arange(n)[rank.part(i, rank.server)] + sum(segments[:i]) for i, n in enumerate(segments)
        ])  # fmt: skip
        kept[where.astype(int)] += rank.errors(1)
    np.testing.assert_allclose(came + kept, given, rtol=0, atol=1e-4)
    raw_ones = np.repeat(np.array(raw, bool), segments)
    assert (kept[raw_ones] == 0).all()


def test_a_sum_is_not_divided():
    model = BlockModel(INT8, [3], error=None, reduction=SUM, n_chunks=1, server=0)
    payloads = [model.encode([f32([1, 2, 3]) * k]) for k in (1, 2)]
    np.testing.assert_allclose(model.decode(model.reduce(payloads))[0], [3, 6, 9], rtol=0.01)


def test_a_step_that_is_taken_back_leaves_the_errors():
    model = BlockModel(INT4, [3], nonfinite=TRANSACTIONAL)
    model.encode([f32([1, 2, 3.3])])
    model.commit()
    before = model.errors(0)
    model.encode([f32([1, np.nan, 3])])
    model.commit()
    np.testing.assert_array_equal(model.errors(0), before)


@CODECS
def test_the_example_of_the_page(codec):
    behind, values = example(codec)
    model, block = BlockModel(codec, [3], error=None), block_model.FORMATS[codec].block
    payload = model.encode([f32([1, -7, 3.5])])
    assert payload[64:].tobytes() == behind
    header = struct.unpack_from("<4sHHBBBBIIIIIqq", payload)
    assert header[:8] == (b"GCPL", 1, codec, 0, 0, {BF16: 0, MXFP8: 2, MXFP4: 2}.get(codec, 3), 0, block)
    assert header[8:] == (1, 0, 1, 0, 3, payload.size - 64)
    np.testing.assert_array_equal(model.decode(payload)[0], values)


@CODECS
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("error", ("float32", "bfloat16", None))
def test_errors_are_rounded_once(codec, dtype, error):
    g = narrow(np.random.default_rng(1).standard_normal(100), dtype)
    model = BlockModel(codec, [100], values=dtype, results=dtype, error=error)
    out = model.decode(model.encode([g]))[0]
    e = np.zeros(100, f32) if error is None else rounded(widen(g, dtype) - out, error)
    np.testing.assert_array_equal(model.errors(0), e)


def test_a_strangers_codes_and_scales_are_numbers():
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
