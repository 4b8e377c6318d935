"""Tensors of PyTorch, CuPy and JAX in, tensors of ours out to them, without a copy."""

import numpy as np
import pytest

import capi
import dlpack
import driver
import gpu
import layouts
from capi import ALIGNMENT, Managed, byref, lib
from capsules import LEGACY, VERSIONED
from dlpack import capsule, exporter
from gpu import check, pack_chunks, view_of

pytestmark = pytest.mark.gpu

TYPES = ("bool", "uint8", "int8", "int16", "int32", "int64")
both_forms = pytest.mark.parametrize("form", [LEGACY, VERSIONED], ids=["legacy", "versioned"])


class Torch:
    def __init__(self):
        self.module = pytest.importorskip("torch")

    def array(self, values):
        return self.module.from_numpy(values).cuda()

    def export(self, array, form):
        if form is VERSIONED:
            return array.__dlpack__(stream=1, max_version=(1, 0))
        return array.__dlpack__(stream=1)

    def take(self, owner, index=0):
        return self.module.from_dlpack(exporter(owner, index))

    def pointer(self, array):
        return array.data_ptr()

    def numpy(self, array):
        return array.cpu().numpy()


class CuPy(Torch):
    def __init__(self):
        self.module = pytest.importorskip("cupy")

    def array(self, values):
        return self.module.asarray(values)

    def pointer(self, array):
        return array.data.ptr

    def numpy(self, array):
        return self.module.asnumpy(array)


frameworks = pytest.mark.parametrize("framework", [Torch, CuPy])


@both_forms
@pytest.mark.parametrize("dtype", TYPES)
@frameworks
def test_arrays_of_a_framework_are_packed_where_they_are(framework, dtype, form):
    framework = framework()
    values = (np.random.default_rng(0).random((37, 101)) < 0.5).astype(dtype)
    whole = framework.array(values)
    for array, expected in (whole, values), (whole.T, values.T), (whole[3:, ::2], values[3:, ::2]):
        owner = framework.export(array, form)
        chunks = [gpu.take(chunk) for chunk in pack_chunks_of(owner, 3)]
        np.testing.assert_array_equal(np.stack(chunks), layouts.chunk_rows(expected, 3))
        assert dlpack.form_of(owner) in (LEGACY, VERSIONED), "the capsule is not consumed"


def pack_chunks_of(owner, n_chunks):
    out = (Managed * n_chunks)()
    check(lib.gc_pack_chunks(dlpack.managed(owner), n_chunks, out))
    return list(out)


@both_forms
@frameworks
def test_chunks_are_taken_without_a_copy_and_given_back(framework, form):
    framework = framework()
    truth = np.random.default_rng(1).random(10_001) < 0.5
    with driver.Memory(truth.size) as memory:
        driver.upload(memory.address, truth)
        chunks = pack_chunks(gpu.at(memory.address, truth.shape, "bool"), 3)
    addresses = [view_of(chunk).data for chunk in chunks]
    arrays = [framework.take(capsule(chunk, form)) for chunk in chunks]
    assert [framework.pointer(array) for array in arrays] == addresses
    found = np.stack([framework.numpy(array) for array in arrays])
    np.testing.assert_array_equal(found, layouts.chunk_rows(truth, 3))
    # Back in by the framework's own capsules.
    owners = [framework.export(array, form) for array in arrays]
    out = Managed()
    check(lib.gc_unpack_chunks((Managed * 3)(*map(dlpack.managed, owners)), 3, truth.size, byref(out)))
    address = view_of(out).data
    bits = framework.take(capsule(out, form))
    assert framework.pointer(bits) == address
    np.testing.assert_array_equal(framework.numpy(bits), truth)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "float64"])
@both_forms
@frameworks
def test_an_empty_tensor_is_written_by_a_framework_and_keeps_its_address(framework, form, dtype):
    framework = framework()
    tensor = gpu.empty((5, 7), dtype)
    address = view_of(tensor).data
    assert address % ALIGNMENT == 0
    array = framework.take(capsule(tensor, form))
    values = np.arange(35).reshape(5, 7).astype(dtype)
    array[...] = framework.array(values)
    assert framework.pointer(array) == address
    driver.synchronize()
    np.testing.assert_array_equal(driver.download(address, values.nbytes), values.reshape(-1).view(np.uint8))


def test_arrays_of_jax_go_in_and_chunks_come_out():
    pytest.importorskip("jax")
    gpu.run_child("jax", environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, silent=False)
