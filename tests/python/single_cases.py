"""gc_encode and gc_decode, one tensor in one call: cases for any place of codecs_c.py, against docs/NUMERICS.md."""

import ctypes
import struct
from ctypes import byref

import numpy as np

import capi
from capi import Managed, Status, dldtype, lib
from codec_model import MEAN, NONFINITE, ONEBIT, PROPAGATE, SIGN, SUM, TRANSACTIONAL
from codecs_c import Checked, Refused, call, dtype_name, gradient, model_of, same

CODECS = range(1, 8)
DTYPES = "float32", "float16", "bfloat16"
ELEMENTS, DIGEST = slice(32, 40), slice(48, 56)


def result_of(function, place, *arguments):
    """Returns the memory and the dtype of a function's tensor, which has one dimension, on the place's device."""
    out = Managed()
    call(function, *arguments, byref(out))
    try:
        view = out.contents.dl_tensor
        assert view.ndim == 1 and view.device.device_type == (place.device.device_type or capi.CPU)
        n_bytes = view.shape[0] * view.dtype.bits // 8
        return ctypes.string_at(view.data, n_bytes) if n_bytes else b"", (view.dtype.code, view.dtype.bits)
    finally:
        lib.gc_tensor_free(out)


def encoded(place, tensor, codec):
    memory, dtype = result_of("gc_encode", place, tensor.managed, codec)
    assert dtype == (1, 8)
    return np.frombuffer(memory, np.uint8)


def decoded(place, payload, dtype, aligned=True):
    memory, got = result_of("gc_decode", place, place.put(payload, aligned=aligned).managed, dldtype(dtype))
    assert got == (dldtype(dtype).code, dldtype(dtype).bits)
    return np.frombuffer(memory, np.uint16 if dtype == "bfloat16" else dtype)


def is_corrupt(place, payload):
    try:
        decoded(place, payload, "float32")
    except Refused as refusal:
        assert refusal.status == Status.CORRUPT, refusal
        return True
    return False


def model_for(codec, count, dtype, **options):
    options = dict(values=dtype, results=dtype, error=None, nonfinite=PROPAGATE, n_chunks=1) | options
    return model_of(codec, segments=[count], **options)


def digest_of(count):
    digest = 0xCBF29CE484222325
    for byte in struct.pack("<Q", count):
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return digest


def with_count(payload, count):
    """Returns the payload with a header of `count` elements, whose digest is right."""
    changed = payload.copy()
    changed[ELEMENTS] = np.frombuffer(struct.pack("<Q", count), np.uint8)
    changed[DIGEST] = np.frombuffer(struct.pack("<Q", digest_of(count)), np.uint8)
    return changed


def payloads_are_the_models(place, sizes, codecs=CODECS):
    """Compares payloads, and values of each dtype, to the byte; from any address, with and without NaN and Inf."""
    rng = np.random.default_rng(5)
    on_cuda = place.device.device_type == capi.CUDA
    for codec in codecs:
        for dtype in DTYPES:
            for count in sizes:
                numbers = gradient(rng, count, dtype, special=count % 2 == 1)
                model = model_for(codec, count, dtype)
                put = place.put(numbers, dtype_name(numbers, dtype), aligned=count % 4 != 3)
                payload = encoded(place, put, codec)
                same(payload, model.encode([numbers]), f"codec {codec}, {count} of {dtype}")
                same(place.get(put), numbers, "values")
                for to in DTYPES:
                    (expected,) = model.decode(payload, to, 1, 1.0, None, on_cuda)
                    got = decoded(place, payload, to, aligned=count % 2 == 0)
                    same(got, expected, f"codec {codec}, {count} of {dtype} to {to}")


def what_is_not_finite_is_flagged(place):
    for codec in CODECS:
        for bad in (np.nan, np.inf, -np.inf):
            payload = encoded(place, place.put(np.array([1, bad, -2], np.float32)), codec)
            assert payload[28] == NONFINITE and not is_corrupt(place, payload)
        assert encoded(place, place.put(np.ones(3, np.float32)), codec)[28] == 0


def payloads_of_other_options_are_taken(place):
    """Decodes payloads of codecs with one segment that is not raw, one chunk, and any other options."""
    rng = np.random.default_rng(6)
    on_cuda = place.device.device_type == capi.CUDA
    for codec in CODECS:
        more = dict(scale=MEAN) if codec == ONEBIT else {}
        error, reduction = (None, 0) if codec == SIGN else ("float32", SUM)
        more |= dict(error=error, reduction=reduction)
        options = dict(values="float16", results="bfloat16", nonfinite=TRANSACTIONAL, **more)
        with Checked(place, codec=codec, segments=[100], **options) as handle:
            payload = handle.encode([gradient(rng, 100, "float16", False)]).reshape(-1)
            (expected,) = handle.model.decode(payload, "float32", 1, 1.0, None, on_cuda)
            same(decoded(place, payload, "float32"), expected, f"codec {codec}")


def payloads_of_more_are_corrupt(place):
    """Refuses payloads with two segments, two chunks or a raw segment, and states."""
    for codec in CODECS:
        error = None if codec == SIGN else "float32"
        for options in (dict(segments=[50, 50]), dict(segments=[100], n_chunks=2), dict(segments=[100], raw=[1])):
            if "raw" in options and codec in (ONEBIT, SIGN):
                continue
            with Checked(place, codec=codec, error=error, **options) as handle:
                payload = handle.encode([np.ones(n, np.float32) for n in options["segments"]])
                assert is_corrupt(place, payload.reshape(-1)), (codec, options)
        with Checked(place, codec=codec, error=error, segments=[100]) as handle:
            assert is_corrupt(place, np.ascontiguousarray(handle.model.state())), codec


def damaged_headers_are_corrupt(place, bits=(0x01, 0x02, 0x08, 0x80)):
    """Changes every byte of a header. Bytes 8 and 9 may have any of the three dtypes, byte 10 either scale rule of
    ONEBIT. Byte 11 may have either reduction but with SIGN, and byte 28 the flag NONFINITE."""
    for codec in CODECS:
        payload = encoded(place, place.put(np.arange(-16, 17, dtype=np.float32)), codec)
        for at in range(64):
            for bit in bits:
                changed = payload.copy()
                changed[at] ^= bit
                allowed = {
                    8: range(3), 9: range(3), 10: range(2 if codec == ONEBIT else 0), 11: range(0 if codec == SIGN else 2),
                    28: (0, NONFINITE),
                }  # fmt: skip
                assert is_corrupt(place, changed) == (changed[at] not in allowed.get(at, ())), (codec, at, bit)


def damaged_scales_are_corrupt(place):
    for codec, scales in ((ONEBIT, (-1.0, -0.0, -np.inf)), (SIGN, (1.5, 0.0, -1.0, np.nan))):
        payload = encoded(place, place.put(np.ones(20, np.float32)), codec)
        for scale in scales:
            changed = payload.copy()
            changed[64:68] = np.array([scale], np.float32).view(np.uint8)
            assert is_corrupt(place, changed), (codec, scale)


def other_lengths_are_corrupt(place):
    """Refuses too few bytes, too many, and headers of more elements than bytes; nothing is allocated for these."""
    for codec in CODECS:
        payload = encoded(place, place.put(np.ones(256, np.float32)), codec)
        for length in (0, 1, 63, 64, 79, payload.size - 16, payload.size - 1):
            assert length < payload.size and is_corrupt(place, payload[:length]), (codec, length)
        for more in (1, 16, 4096):
            assert is_corrupt(place, np.concatenate([payload, np.zeros(more, np.uint8)])), (codec, more)
        for count in (0, 127, 512, 2**31, 2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1):
            assert is_corrupt(place, with_count(payload, count)), (codec, count)
        assert not is_corrupt(place, with_count(payload, 256)), codec
