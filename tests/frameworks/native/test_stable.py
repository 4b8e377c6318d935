"""An extension on torch's stable ABI with gradcodec.hpp; and gradcodec/torch.hpp, which is refused for this ABI."""

import pathlib
import subprocess

import model
import pytest
import torch
import torch_ops
from torch.utils import cpp_extension

HERE = pathlib.Path(__file__).resolve().parent
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (2, 13), reason="the stable ABI gives streams from torch 2.13 on")
TARGET = "-DTORCH_TARGET_VERSION=0x020d000000000000"
INCLUDES = [f"-I{torch_ops.ROOT / 'include'}", *(f"-isystem{path}" for path in cpp_extension.include_paths())]


@pytest.fixture(scope="module")
def stable():
    torch_ops.build(HERE / "stable.cpp", name="gradcodec_stable", flags=[TARGET])
    return torch.ops.gradcodec_stable


@pytest.mark.parametrize("layout", model.LAYOUTS)
def test_signs_match_numpy(stable, device, layout):
    x = model.floats(torch.float32, device, layout)
    assert model.same(stable.pack_signs(x), model.chunks(model.signs(x), 1))


def test_torch_hpp_refuses_the_stable_abi(tmp_path):
    (tmp_path / "unit.cpp").write_text("#include <gradcodec/torch.hpp>\n")
    command = ["g++", "-std=c++20", "-fsyntax-only", TARGET, *INCLUDES, str(tmp_path / "unit.cpp")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode != 0
    first = next(line for line in run.stderr.splitlines() if "error" in line)
    assert "gradcodec/torch.hpp is for at::Tensor" in first
