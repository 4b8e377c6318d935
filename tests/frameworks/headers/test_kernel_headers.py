"""Tests kernels that include the headers of NVIDIA and CuPy, with several NVRTCs; `make test-kernel-headers` installs
all of them with pip. GRADCODEC_HEADERS is a folder with one folder for each version of CUDA, and one for CuPy. The
kernels are only compiled, so no GPU is needed. GRADCODEC_TESTS=quick leaves the floats of 16 bits out."""

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest

from kernels import NO_DISK, Refused, elementwise, on_gpu
from tiers import both

FOLDER = Path(os.environ["GRADCODEC_HEADERS"]).absolute()
VERSIONS = sorted(path.name for path in FOLDER.iterdir() if path.name != "cupy")

# Every text of a kernel uses int64_t and similar names. They are the header's types if it declares them.
USES = """
__device__ int64_t of_preamble(const uint64_t *x, int8_t y) { return static_cast<int64_t>(x[0]) + y; }
"""
LOOP_PREP = "const uint32_t in_prep = static_cast<uint32_t>(n);"
OPERATION = """
const uint64_t counted = static_cast<uint64_t>(i) + in_prep;
const int64_t number = of_preamble(&counted, static_cast<int8_t>(1));
z = x + T(number);
"""

# Included headers, and the statements that they add to the operation. CuPy's bfloat16 has no +=.
CASES = {
    "nothing": ("", ""),
    "cuda_fp16.h": ("#include <cuda_fp16.h>", "z = z + __half2float(__float2half(float(x)));"),
    "cuda_bf16.h": ("#include <cuda_bf16.h>", "z = z + __bfloat162float(__float2bfloat16(float(x)));"),
    "curand_kernel.h": (
        "#include <curand_kernel.h>",
        "curandStatePhilox4_32_10_t state; curand_init(n, i, 0, &state); z = z + curand_uniform(&state);",
    ),
    "cooperative_groups.h": (
        "#include <cooperative_groups.h>\nnamespace cg = cooperative_groups;",
        "z = z + float(cg::this_thread_block().thread_rank());",
    ),
    "cub": (
        "#include <cub/block/block_reduce.cuh>\n#include <cub/warp/warp_scan.cuh>",
        "__shared__ typename cub::WarpScan<float>::TempStorage memory[8]; float sum;"
        "cub::WarpScan<float>(memory[threadIdx.x / 32]).InclusiveSum(float(x), sum); z = z + sum;",
    ),
    "cuda/std": (
        "#include <cuda/std/type_traits>\n#include <cuda/std/cstdint>\n#include <cuda/std/complex>",
        'static_assert(cuda::std::is_same<int64_t, cuda::std::int64_t>::value, "one type");'
        "cuda::std::complex<float> c(float(x), 1.0f); z = z + (c * c).real();",
    ),
    "cupy/cuda_workaround.h": ("#include <cupy/cuda_workaround.h>", "z = z + std::numeric_limits<float>::max();"),
    "cupy/carray.cuh": (
        "#include <cupy/carray.cuh>",
        "CArray<float, 1, true, true> *array = nullptr; if (array) z = z + float(array->size());",
    ),
    "cupy/atomics.cuh": ("#include <cupy/atomics.cuh>", "__shared__ double sum; atomicAdd(&sum, 1.0); z = z + float(sum);"),
    "all": (
        "#include <cupy/carray.cuh>\n#include <cupy/atomics.cuh>\n#include <cuda_fp16.h>\n#include <cuda/std/cstdint>\n"
        "#include <cub/warp/warp_scan.cuh>\n#include <curand_kernel.h>\n#include <cooperative_groups.h>",
        "z = z + float(i);",
    ),
}


def folders(version, with_cupy):
    nvidia = FOLDER / version / "nvidia"
    found = [*nvidia.glob("cu1?/include/cccl"), *nvidia.glob("*/include")]
    return [*([FOLDER / "cupy" / "cupy" / "_core" / "include"] if with_cupy else []), *found]


@pytest.mark.parametrize("dtype", both(quick=["float32"], all=["float32", "float16", "bfloat16"]))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_kernel_that_includes_the_headers_compiles(version, name, dtype):
    [nvrtc] = [file for lib in ("cuda_nvrtc", "cu13") for file in (FOLDER / version / "nvidia" / lib).glob("lib/libnvrtc.so.1?")]
    include, more = CASES[name]
    for with_cupy in [True] if "cupy" in include else [False, True]:
        kernel = elementwise(
            f"{dtype} x, raw T y", "T z", OPERATION + more, "k", preamble=include + USES, loop_prep=LOOP_PREP,
            nvrtc=ctypes.CDLL(str(nvrtc))._handle, flags=NO_DISK,
            options=["--std=c++17", *(f"-I{folder}" for folder in folders(version, with_cupy))],
        )  # fmt: skip
        of = lambda: on_gpu(np.zeros(3, {"float32": "f4"}.get(dtype, "u2")), dtype=dtype)  # noqa: E731
        try:
            kernel.prepare([of(), of()], [of()], capability=90)
        except Refused as refusal:
            raise AssertionError(f"{refusal}\n{kernel.log()}") from None
        finally:
            kernel.free()
