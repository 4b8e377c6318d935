"""Fixtures of tests with frameworks. The same tests run on the CPU and, if there is one, on a GPU."""

import pathlib
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT / "examples" / "python")]
sys.path.append(str(ROOT / "tests" / "python"))  # codec_model: docs/NUMERICS.md in NumPy

import torch_ops  # noqa: E402 the path comes first

WITHOUT = "no CUDA device"


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(WITHOUT)
    return request.param


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip(WITHOUT)
    yield "cuda"
    torch.cuda.synchronize()


@pytest.fixture(scope="session")
def ops():
    return torch_ops.load()


@pytest.fixture(scope="session")
def adaptor():
    """Returns the functions of gradcodec/torch.hpp, without the additions of the operators."""
    torch_ops.build(HERE / "adaptor.cpp", name="gradcodec_adaptor")
    return torch.ops.gradcodec_adaptor
