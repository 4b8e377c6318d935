"""gc_encode and gc_decode: on the CPU, and on CUDA by the stand-in driver, which runs the kernels on the host."""

import numpy as np
import pytest

import single_cases as cases
from capi import Tensor
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
def test_payloads_match_the_model_on_the_cpu(codec):
    cases.payloads_are_the_models(Host(), SIZES + LARGE, [codec])


@pytest.mark.parametrize("case", OTHERS)
def test_calls_match_the_model_on_the_cpu(case):
    getattr(cases, case)(Host())


@pytest.mark.parametrize("codec", both(quick=[1, 5], all=cases.CODECS))
def test_payloads_match_the_model_on_the_stand_in(codec):
    run(PLACE + f"import single_cases\nsingle_cases.payloads_are_the_models(Place(), {[0, 1, 33, 100, 1100]}, [{codec}])")


@pytest.mark.parametrize("case", OTHERS)
def test_calls_match_the_model_on_the_stand_in(case):
    more = ", (0x02,)" if case == "damaged_headers_are_corrupt" else ""
    run(PLACE + f"import single_cases\nsingle_cases.{case}(Place(){more})")


def strided(dtype):
    """Yields numbers, and the same numbers in another layout."""
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
