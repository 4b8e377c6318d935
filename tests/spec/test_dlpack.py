"""Tensors of PyTorch, CuPy and JAX in, tensors of ours out to them, without a copy; and who releases what."""

import ctypes
import gc
import threading

import numpy as np
import pytest

import capi
import dlpack
import driver
import gpu
import layouts
from capi import ALIGNMENT, BIG, RELEASE, Managed, Versioned, byref, lib
from capsules import LEGACY, VERSIONED, capsule_pointer, capsule_set_name
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


class Lent:
    """Device memory lent to the library; `releases` holds the context of every call back."""

    def __init__(self, size):
        self.releases, self.memory = [], driver.Memory(size)
        self.callback = RELEASE(self.releases.append)

    def tensor(self, shape, dtype, strides=None, context=42):
        out = Managed()
        check(
            lib.gc_tensor_from_pointer(
                self.memory.address, gpu.device(), capi.dldtype(dtype), len(shape), capi.int64s(shape),
                capi.int64s(strides) if strides else None, self.callback, context, byref(out),
            )
        )  # fmt: skip
        return out


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


@both_forms
@frameworks
def test_memory_that_was_lent_is_let_go_by_the_last_user(framework, form):
    framework, lent = framework(), Lent(4096)
    driver.upload(lent.memory.address, np.arange(1024, dtype=np.int32))
    owner = capsule(lent.tensor((10, 3), "int32", strides=(3, 1)), form)
    array = framework.take(owner)
    assert framework.pointer(array) == lent.memory.address
    np.testing.assert_array_equal(framework.numpy(array), np.arange(30).reshape(10, 3))
    del owner
    assert lent.releases == []
    piece = array[2:4]
    del array
    gc.collect()
    assert lent.releases == []
    del piece
    gc.collect()
    assert lent.releases == [42]
    lent.memory.free()


def test_every_new_tensor_is_aligned_and_chunks_are_adjacent():
    with driver.Memory(2**20) as memory:
        driver.fill(memory.address, 1, memory.size)
        for count in (1, 7, 100, 4097, 2**20):
            for n_chunks in (1, 2, 3, 7, 100):
                chunks = pack_chunks(gpu.at(memory.address, (count,), "bool"), n_chunks)
                first, size = view_of(chunks[0]).data, capi.chunk_bytes(count, n_chunks)
                assert first % ALIGNMENT == 0
                assert [view_of(chunk).data - first for chunk in chunks] == [k * size for k in range(n_chunks)]
                for chunk in reversed(chunks):
                    lib.gc_tensor_free(chunk)
        out = Managed()
        for make in (
            lambda: lib.gc_unpack_bits(gpu.at(memory.address, (100,)).managed, 0, 77, BIG, byref(out)),
            lambda: lib.gc_pack_bits(gpu.at(memory.address, (100,)).managed, 0, BIG, byref(out)),
        ):
            check(make())
            assert view_of(out).data % ALIGNMENT == 0
            lib.gc_tensor_free(out)


def test_torchs_tensor_is_taken_and_let_go_on_another_thread():
    torch = pytest.importorskip("torch")
    array = torch.arange(1000, device="cuda", dtype=torch.uint8) % 3
    expected = np.packbits(array.cpu().numpy())
    torch.cuda.synchronize()
    owner = array.__dlpack__(stream=1, max_version=(1, 0))
    if dlpack.form_of(owner) is VERSIONED:
        tensor = Managed()
        struct = ctypes.cast(capsule_pointer(owner, VERSIONED), Versioned)
        check(lib.gc_tensor_from_versioned(struct, byref(tensor)))
        capsule_set_name(owner, b"used_dltensor_versioned")
    else:
        tensor = ctypes.cast(capsule_pointer(owner, LEGACY), Managed)
        capsule_set_name(owner, b"used_dltensor")
    del owner, array
    out = (Managed * 1)()
    check(lib.gc_pack_chunks(tensor, 1, out))
    thread = threading.Thread(target=lib.gc_tensor_free, args=(tensor,))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(gpu.take(out[0]), expected)


def test_arrays_of_jax_go_in_and_chunks_come_out():
    pytest.importorskip("jax")
    gpu.run_child("jax", environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, silent=False)
