"""gc_encode and gc_decode: on the CPU, and on CUDA by the stand-in driver, which runs the kernels on the host."""

from ctypes import byref

import numpy as np
import pytest

import capi
import single_cases as cases
from capi import Managed, Status, Tensor, dldtype, lib
from codecs_c import Host, same
from test_codec_driver import PLACE
from stand_in import run
from tiers import both

SIZES = [0, 1, 7, 33, 100, 1023, 5000]
LARGE = [300_001]
OTHERS = [
    "what_is_not_finite_is_flagged", "payloads_of_other_options_are_taken", "payloads_of_more_are_corrupt",
    "damaged_headers_are_corrupt", "damaged_scales_are_corrupt", "other_lengths_are_corrupt",
]  # fmt: skip


@pytest.mark.parametrize("codec", cases.CODECS)
def test_payloads_are_the_models_on_the_cpu(codec):
    cases.payloads_are_the_models(Host(), SIZES + LARGE, [codec])


@pytest.mark.parametrize("case", OTHERS)
def test_on_the_cpu(case):
    getattr(cases, case)(Host())


@pytest.mark.parametrize("codec", both(quick=[1, 5], all=cases.CODECS))
def test_payloads_are_the_models_on_the_stand_in(codec):
    run(PLACE + f"import single_cases\nsingle_cases.payloads_are_the_models(Place(), {[0, 1, 33, 100, 1100]}, [{codec}])")


@pytest.mark.parametrize("case", OTHERS)
def test_on_the_stand_in(case):
    more = ", (0x02,)" if case == "damaged_headers_are_corrupt" else ""
    run(PLACE + f"import single_cases\nsingle_cases.{case}(Place(){more})")


def strided(dtype):
    """The same numbers laid out in other ways."""
    numbers = np.random.default_rng(8).standard_normal((6, 35)).astype(dtype)
    yield numbers, numbers.T.copy().T
    yield numbers, np.repeat(numbers, 2, 1)[:, ::2]
    yield numbers[::-1, ::-1].copy(), numbers[::-1, ::-1]
    yield np.broadcast_to(numbers[:1], (6, 35)).copy(), np.broadcast_to(numbers[:1], (6, 35))
    yield numbers.reshape(-1)[:1].copy(), numbers.reshape(-1)[0:1].reshape(())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_values_of_any_strides_are_read_in_c_order(dtype):
    place = Host()
    for codec in cases.CODECS:
        for plain, other in strided(dtype):
            same(cases.encoded(place, Tensor(other), codec), cases.encoded(place, Tensor(plain), codec), f"codec {codec}")


@pytest.mark.parametrize(
    "change, status",
    [
        (dict(dtype=dldtype("int8")), Status.UNSUPPORTED_DTYPE), (dict(shape=(2, 56)), Status.SHAPE_MISMATCH),
        (dict(shape=()), Status.SHAPE_MISMATCH), (dict(strides=(2,)), Status.NOT_CONTIGUOUS),
    ],
)  # fmt: skip
def test_a_payload_that_is_no_row_of_bytes_is_refused(change, status):
    payload = Tensor(np.zeros(256, np.uint8))
    view = payload.struct.dl_tensor
    view.ndim, view.shape = 1, capi.int64s((112,))
    for field, value in change.items():
        if field == "shape":
            view.ndim, view.shape, view.strides = len(value), capi.int64s(value) if value else None, None
        else:
            setattr(view, field, capi.int64s(value) if field == "strides" else value)
    out = Managed()
    assert lib.gc_decode(payload.managed, dldtype("float32"), byref(out)) == status, capi.last_error()
    assert not out and "payload" in capi.last_error()


def test_encode_refuses_other_dtypes_and_codecs():
    out = Managed()
    for dtype in ("int32", "float64", "bool", "uint8"):
        refused = lib.gc_encode(Tensor(np.zeros(3, dtype)).managed, 5, byref(out))
        assert refused == Status.UNSUPPORTED_DTYPE and "values" in capi.last_error()
    for codec in (-1, 0, 8, 2**31 - 1):
        assert lib.gc_encode(Tensor(np.zeros(3, np.float32)).managed, codec, byref(out)) == Status.INVALID_ARGUMENT
        assert "codec" in capi.last_error() and str(codec) in capi.last_error()
    for dtype in ("float64", "uint8"):
        payload = Tensor(cases.encoded(Host(), Tensor(np.zeros(3, np.float32)), 5).copy())
        assert lib.gc_decode(payload.managed, dldtype(dtype), byref(out)) == Status.UNSUPPORTED_DTYPE
    assert not out


def test_the_headers_example_is_what_encode_gives():
    """docs/NUMERICS.md 10: (1, -7) of ONEBIT."""
    payload = cases.encoded(Host(), Tensor(np.array([1, -7], np.float32)), 1)
    assert payload.size == 96 and payload[64:68].tobytes() == bytes.fromhex("0000a040") and payload[80] == 0x80
    assert cases.decoded(Host(), payload, "float32").tolist() == [5, -5]
