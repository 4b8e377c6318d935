"""The kernels for programs that launch them: by names and arguments of docs/ABI.md, in the shapes asked for."""

import ctypes

import numpy as np
import pytest

import capi
import driver
import gpu
import layouts
from capi import BIG, LITTLE, byref, check, lib

pytestmark = pytest.mark.gpu

KERNELS = [
    *(f"gc_pack_truth_{size}" for size in ("u8", "u16", "u32", "u64")),
    *(f"gc_pack_signs_{dtype}" for dtype in ("f16", "bf16", "f32", "f64")),
    *(f"gc_unpack_{size}" for size in ("u8", "u16", "u32", "u64")),
]


def fatbin():
    address, size = ctypes.c_void_p(), ctypes.c_size_t()
    check(lib.gc_builtin_kernels(b"bits", byref(address), byref(size)))
    return ctypes.string_at(address, size.value)


def shape_here(kernel):
    return capi.kernel_shape(kernel, driver.compute_capability())


def blocks(shape, items):
    return -(-items // shape.items_per_block)


@pytest.mark.parametrize("order", [BIG, LITTLE])
@pytest.mark.parametrize("elements", [1, 8, 1001, 2048 * 8, 2**20 + 5])
def test_a_kernel_is_launched_by_name_through_the_driver(elements, order):
    function, shape = driver.kernel(driver.load(fatbin()), "gc_pack_truth_u8"), shape_here("gc_pack_truth_u8")
    truth = np.random.default_rng(elements).random(elements) < 0.5
    expected = layouts.chunk_rows(truth, 1, order)[0]
    size = expected.size + 3  # the bytes after the last element are zeroed
    with driver.Memory(elements) as source, driver.Memory(size + 8) as target:
        driver.upload(source.address, truth)
        driver.fill(target.address, layouts.PATTERN, size + 8)
        arguments = [ctypes.c_uint64(n) for n in (source.address, target.address, elements, size)]
        driver.launch(function, blocks(shape, size), shape.threads, None, *arguments, ctypes.c_uint32(order))
        found = driver.download(target.address, size + 8)
    np.testing.assert_array_equal(found, [*expected, 0, 0, 0, *[layouts.PATTERN] * 8])


def test_every_stable_kernel_loads_and_has_a_shape():
    module = driver.load(fatbin())
    for name in KERNELS:
        assert driver.kernel(module, name)
        assert shape_here(name).threads % 32 == 0


@pytest.mark.parametrize("environment", [{"CUDA_DISABLE_PTX_JIT": "1"}, {"CUDA_FORCE_PTX_JIT": "1"}])
def test_the_library_works_from_machine_code_alone_and_from_ptx_alone(environment):
    gpu.run_child("packs", environment={**environment, "CUDA_CACHE_DISABLE": "1"})
