"""gradcodec/device.cuh in users' own kernels: the kernels of kernels/README.md and of examples/python/cupy_kernels.py
must compile, for GPUs of every level."""

import ctypes
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REAL = os.environ.get("GRADCODEC_REAL_NVRTC", "")
KERNELS = re.findall(r"RawKernel\(r'''(.*?)'''", (ROOT / "kernels/README.md").read_text(), re.S)
KERNELS += re.findall(r'SOURCE = r"""(.*?)"""', (ROOT / "examples/python/cupy_kernels.py").read_text(), re.S)


@pytest.mark.parametrize("level", (75, 90))
@pytest.mark.parametrize("source", KERNELS, ids=("signs", "blocks", "example"))
def test_the_kernels_of_the_documents_compile(source, level):
    assert REAL, "GRADCODEC_REAL_NVRTC is the path of a real NVRTC's library"
    builtins = next(Path(REAL).parent.glob("libnvrtc-builtins.so.*"))
    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # NVRTC looks for this library by name
    nvrtc, program, size = ctypes.CDLL(REAL), ctypes.c_void_p(), ctypes.c_size_t()
    options = [b"--std=c++14", f"-I{ROOT / 'include'}".encode(), f"--gpu-architecture=compute_{level}".encode()]
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"readme.cu", 0, None, None) == 0
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert (status, log.value.decode()) == (0, "")
