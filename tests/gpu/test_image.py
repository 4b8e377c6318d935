"""The kernels as PTX, for programs that launch them: by the names, arguments and shapes of kernels/README.md."""

import ctypes

import numpy as np
import pytest

import capi
import driver
import gpu
from capi import BIG, LITTLE, lib
from gpu import check


def image(capability):
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    check(lib.gc_kernel_image(capability, ctypes.byref(text), ctypes.byref(size)))
    found = ctypes.string_at(ctypes.cast(text, ctypes.c_void_p), size.value)
    assert found == text.value, "a NUL ends it, which is not counted"
    return found


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
def test_there_is_ptx_for_every_capability_from_7_5_on(capability):
    text = image(capability)
    target = next(line for line in text.decode().splitlines() if line.startswith(".target"))
    assert 75 <= int(target.split("sm_")[1].split(",")[0].rstrip("af")) <= capability
    assert b".entry gc_pack_truth_u8" in text
    assert image(capability) == text


@pytest.mark.parametrize("capability", [74, 70, 9, 7, 0, -1])
def test_there_is_none_for_older_ones(capability):
    text, size = ctypes.c_char_p(b"untouched"), ctypes.c_size_t(123)
    status = lib.gc_kernel_image(capability, ctypes.byref(text), ctypes.byref(size))
    assert status == capi.Status.UNSUPPORTED_DEVICE and "7.5" in capi.last_error()
    assert (text.value, size.value) == (b"untouched", 123)


def test_null_is_refused():
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    assert lib.gc_kernel_image(90, None, ctypes.byref(size)) == capi.Status.INVALID_ARGUMENT
    assert lib.gc_kernel_image(90, ctypes.byref(text), None) == capi.Status.INVALID_ARGUMENT


THREADS, BYTES = 256, 2048  # of a block: see kernels/README.md


def blocks(packed):
    return -(-packed // BYTES)


@pytest.mark.parametrize("order", [BIG, LITTLE])
@pytest.mark.parametrize("elements", [1, 8, 1001, 2048 * 8, 2**20 + 5])
def test_a_kernel_is_launched_by_name_through_the_driver(elements, order):
    capability = driver.compute_capability()
    function = driver.kernel(driver.load(image(capability)), "gc_pack_truth_u8")
    truth = np.random.default_rng(elements).random(elements) < 0.5
    expected = gpu.chunk_rows(truth, 1, order)[0]
    size = expected.size + 3  # the bytes behind the last element are zeroed
    with driver.Memory(elements) as source, driver.Memory(size + 8) as target:
        driver.upload(source.address, truth)
        driver.fill(target.address, gpu.PATTERN, size + 8)
        arguments = [ctypes.c_uint64(n) for n in (source.address, target.address, elements, size)]
        driver.launch(function, blocks(size), THREADS, None, *arguments, ctypes.c_uint32(order))
        found = driver.download(target.address, size + 8)
    np.testing.assert_array_equal(found, [*expected, 0, 0, 0, *[gpu.PATTERN] * 8])


def test_a_kernel_is_launched_by_name_through_cupy(tmp_path):
    cupy = pytest.importorskip("cupy")
    path = tmp_path / "gradcodec.ptx"
    path.write_bytes(image(driver.compute_capability()))
    kernel = cupy.RawModule(path=str(path)).get_function("gc_pack_truth_u8")
    values = cupy.random.random(1_000_003) < 0.5
    packed = cupy.full(-(-values.size // 8), gpu.PATTERN, cupy.uint8)
    arguments = values, packed, np.uint64(values.size), np.uint64(packed.size), np.uint32(BIG)
    kernel((blocks(packed.size),), (THREADS,), arguments)
    np.testing.assert_array_equal(cupy.asnumpy(packed), np.packbits(cupy.asnumpy(values)))


def test_every_kernel_of_the_image_loads():
    capability = driver.compute_capability()
    text = image(capability)
    names = [
        line.split(b".entry ")[1].split(b"(")[0].strip().decode() for line in text.splitlines() if b".entry " in line
    ]
    assert names and all(name.startswith("gc_") for name in names)
    module = driver.load(text)
    for name in names:
        assert driver.kernel(module, name)
