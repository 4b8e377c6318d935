"""Ownership of outputs and capsules, the callback of gc_tensor_from_pointer, and the promises of every output.

Releases are counted: gc_tensor_from_pointer calls back, so the list of contexts has the number of releases, for any
objects that the tensor passes through.
"""

import ctypes
import itertools
import os

import numpy as np
import pytest

import capi
from capi import (
    ALIGNMENT, CPU, DTYPES, RELEASE, DLDevice, Managed, Tensor, Versioned, VersionedTensor, byref, c_void_p,
    check, dldtype, free_all, from_versioned, int64s, lib, pack_chunks, read, take, to_versioned,
)  # fmt: skip
from capsules import (
    DESTRUCTOR, LEGACY, VERSIONED, Exporter, capsule_is_valid, capsule_new, capsule_pointer,
)  # fmt: skip

USED_VERSIONED = b"used_dltensor_versioned"


def capsule(tensor, form):
    """Returns a capsule of a tensor of the library; the capsule owns the tensor."""
    if form is VERSIONED:
        tensor = to_versioned(tensor)
    return capsule_new(ctypes.cast(tensor, c_void_p), form, DESTRUCTOR)


class Lent:
    """Memory lent to the library by gc_tensor_from_pointer; `releases` holds the context of every callback."""

    def __init__(self):
        self.releases = []
        self.callback = RELEASE(self.releases.append)

    def tensor(self, array, *, dtype=None, context=42, strides=None):
        out = Managed()
        check(
            lib.gc_tensor_from_pointer(
                array.ctypes.data, DLDevice(CPU, 0), dldtype(dtype or array.dtype.name), array.ndim,
                int64s(array.shape), int64s(strides) if strides else None, self.callback, context, byref(out),
            )
        )  # fmt: skip
        return out


both_forms = pytest.mark.parametrize("form", [LEGACY, VERSIONED], ids=["legacy", "versioned"])


# --- capsules ---------------------------------------------------------------------------------------------------------


@both_forms
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in ("bfloat16", "complex64")])
def test_numpy_imports_a_tensor_without_a_copy(form, dtype):
    memory = np.arange(24).astype(dtype).reshape(2, 3, 4)
    lent = Lent()
    array = np.from_dlpack(Exporter(capsule(lent.tensor(memory), form)))
    np.testing.assert_array_equal(array, memory)
    assert (array.dtype, array.ctypes.data) == (memory.dtype, memory.ctypes.data)
    assert array.flags.writeable == (form is VERSIONED)  # NumPy treats legacy tensors as read-only
    del array
    assert lent.releases == [42]


@both_forms
def test_numpy_imports_packed_chunks_and_exports_them(form):
    truth = np.random.default_rng(0).random(1001) < 0.5
    arrays = [np.from_dlpack(Exporter(capsule(c, form))) for c in pack_chunks(Tensor(truth), 3)]
    assert np.concatenate(arrays).tobytes() == np.packbits(truth).tobytes()  # 126 bytes, 42 in each
    # Pass the chunks back in NumPy's own capsules, which stay the owners.
    capsules = [array.__dlpack__(max_version=(1, 0)) for array in arrays]
    chunks = []
    for c in capsules:
        view = ctypes.cast(capsule_pointer(c, VERSIONED), Versioned).contents.dl_tensor
        chunks.append(ctypes.pointer(capi.DLManagedTensor(view)))
    out = Managed()
    check(lib.gc_unpack_chunks(capi.managed_array(chunks), 3, truth.size, byref(out)))
    np.testing.assert_array_equal(np.from_dlpack(Exporter(capsule(out, form))), truth)
    assert all(capsule_is_valid(c, VERSIONED) for c in capsules)


@both_forms
def test_a_capsule_that_is_not_consumed_releases_once(form):
    lent, memory = Lent(), np.zeros(4)
    owner = capsule(lent.tensor(memory), form)
    assert lent.releases == []
    del owner
    assert lent.releases == [42]


@both_forms
def test_a_consumed_capsule_releases_nothing(form):
    lent, memory = Lent(), np.zeros(4)
    owner = capsule(lent.tensor(memory), form)
    array = np.from_dlpack(Exporter(owner))
    del owner
    assert lent.releases == []
    piece = array[1:3]
    del array
    assert lent.releases == [], "the slice still uses the memory"
    del piece
    assert lent.releases == [42]


class GivesAway(Exporter):
    """Exporter that leaves its capsule to NumPy alone, which drops it with NumPy's own error already set."""

    def __dlpack__(self, **_requests):
        return self.__dict__.pop("capsule")


@both_forms
def test_a_release_in_python_may_run_during_an_exception(form):
    lent, memory = Lent(), np.zeros(4, np.uint16)
    exporter = GivesAway(capsule(lent.tensor(memory, dtype="bfloat16"), form))
    with pytest.raises((BufferError, RuntimeError)):
        np.from_dlpack(exporter)
    assert lent.releases == [42]


@pytest.mark.parametrize("name", [b"used_dltensor", USED_VERSIONED, b"dltensor_", b"another"])
def test_the_destructor_leaves_capsules_of_other_names_alone(name):
    source = Tensor(np.zeros(4))
    owner = capsule_new(ctypes.addressof(source.struct), name, DESTRUCTOR)
    del owner
    assert source.releases == []


@both_forms
@pytest.mark.parametrize("deleters", [0, 1])
def test_the_destructor_calls_a_deleter_of_another_library_if_there_is_one(form, deleters):
    source = (Tensor if form is LEGACY else VersionedTensor)(np.zeros(4))
    if not deleters:
        source.release_to(None)
    owner = capsule_new(ctypes.addressof(source.struct), form, DESTRUCTOR)
    del owner
    assert source.releases == [1] * deleters


# --- versioned and back -----------------------------------------------------------------------------------------------


def test_tensors_of_others_become_versioned_and_are_released_once():
    source = Tensor(np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::-2], byte_offset=64)
    versioned = to_versioned(source.managed)
    assert source.releases == []
    owner = capsule_new(ctypes.cast(versioned, c_void_p), VERSIONED, DESTRUCTOR)
    array = np.from_dlpack(Exporter(owner))
    np.testing.assert_array_equal(array, source.array)
    del owner, array
    assert source.releases == [1]


@pytest.mark.parametrize("version", [(1, 0), (1, 3), (1, 99)])
@pytest.mark.parametrize("flags", [0, 2])
def test_versioned_tensors_of_others_become_legacy_and_are_released_once(version, flags):
    source = VersionedTensor(np.arange(12, dtype=np.int16).reshape(3, 4).T, version=version, flags=flags)
    tensor = from_versioned(source.managed)
    assert source.releases == []
    array = np.from_dlpack(Exporter(capsule(tensor, LEGACY)))
    np.testing.assert_array_equal(array, source.array)
    del array
    assert source.releases == [1]


def test_a_tensor_may_change_its_form_many_times():
    lent, memory = Lent(), np.arange(5)
    tensor = lent.tensor(memory)
    for _ in range(200_000):  # a recursive release would need more than a stack
        tensor = from_versioned(to_versioned(tensor))
    np.testing.assert_array_equal(read(tensor), memory)
    assert lent.releases == []
    lib.gc_tensor_free(tensor)
    assert lent.releases == [42]


@pytest.mark.parametrize("kind", [Tensor, VersionedTensor])
def test_a_tensor_without_a_deleter_is_not_kept(kind):
    array = np.arange(4)
    source = kind(array)
    source.release_to(None)
    taken = to_versioned(source.managed) if kind is Tensor else from_versioned(source.managed)
    # The struct is freed. Its memory now holds other data, which must not be called as a deleter.
    ctypes.memset(ctypes.addressof(source.struct), 0, ctypes.sizeof(source.struct))
    source.release_to(lambda _: source.releases.append(1))
    tensor = from_versioned(taken) if kind is Tensor else taken
    np.testing.assert_array_equal(read(tensor), array)
    lib.gc_tensor_free(tensor)
    assert source.releases == []


# --- releases ---------------------------------------------------------------------------------------------------------


def test_the_release_function_receives_its_context_once():
    lent, memory = Lent(), np.zeros(3)
    first, second = (lent.tensor(memory, context=context) for context in (7, 8))
    lib.gc_tensor_free(second)
    assert lent.releases == [8]
    capi.DELETER(first.contents.deleter)(first)
    assert lent.releases == [8, 7]


def test_a_tensor_from_a_pointer_needs_no_release():
    memory, out = np.arange(3), Managed()
    arguments = memory.ctypes.data, DLDevice(CPU, 0), dldtype("int64"), 1, int64s([3]), None, RELEASE(), None
    check(lib.gc_tensor_from_pointer(*arguments, byref(out)))
    assert take(out).tolist() == [0, 1, 2]


def test_freeing_null_does_nothing():
    lib.gc_tensor_free(None)
    source = Tensor(np.zeros(4))
    source.release_to(None)
    lib.gc_tensor_free(source.managed)
    assert source.releases == []


def test_freeing_calls_the_deleter_of_the_tensor():
    source = Tensor(np.zeros(4))
    lib.gc_tensor_free(source.managed)
    assert source.releases == [1]


def scribble(n_bytes, kept):
    """Allocates memory of this size, as an allocator would reuse memory that was freed too early, and fills it."""
    tensor = capi.empty(n_bytes)
    ctypes.memset(tensor.contents.dl_tensor.data, 0x5A, n_bytes)
    kept.append(tensor)


@pytest.mark.parametrize("n_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk_size", [8, 40_000])
def test_chunks_go_in_any_order_and_the_last_one_keeps_the_memory(n_chunks, chunk_size):
    truth = np.random.default_rng(n_chunks).random(8 * chunk_size * n_chunks) < 0.5
    rows = np.packbits(truth).reshape(n_chunks, chunk_size)
    for order in itertools.permutations(range(n_chunks)):
        chunks, kept = dict(enumerate(pack_chunks(Tensor(truth), n_chunks))), []
        for index in order:
            np.testing.assert_array_equal(np.stack([read(c) for c in chunks.values()]), rows[list(chunks)])
            lib.gc_tensor_free(chunks.pop(index))
            scribble(n_chunks * chunk_size, kept)
        free_all(kept)


def test_outputs_outlive_their_inputs():
    truth = np.random.default_rng(6).random(80_000) < 0.5
    expected = np.packbits(truth)
    source = truth.copy()
    (chunk,) = pack_chunks(Tensor(source), 1)
    source[:] = False
    del source
    out = Managed()
    check(lib.gc_unpack_chunks(capi.managed_array([chunk]), 1, truth.size, byref(out)))
    np.testing.assert_array_equal(take(chunk), expected)
    kept = []
    scribble(expected.size, kept)
    np.testing.assert_array_equal(take(out), truth)
    lib.gc_tensor_free(*kept)


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_released_memory_is_freed():
    truth = np.ones(2**22, bool)

    def work(rounds):
        for _ in range(rounds):
            chunks = pack_chunks(Tensor(truth), 4)  # half a MiB
            out = Managed()
            check(lib.gc_unpack_chunks(capi.managed_array(chunks), 4, truth.size, byref(out)))  # four MiB
            free_all([*chunks, out])

    work(4)
    before = resident_bytes()
    work(128)
    assert resident_bytes() - before < 32 * 2**20, "a leak of either would be 64 MiB or more"


# --- promises of every output: read() checks the rest -----------------------------------------------------------------


@pytest.mark.parametrize("n_elements, n_chunks", [(1, 1), (400, 3), (2049, 4), (10**6, 7), (3, 9)])
def test_chunks_lie_side_by_side_and_the_first_is_aligned(n_elements, n_chunks):
    chunks = pack_chunks(Tensor(np.ones(n_elements, bool)), n_chunks)
    size = capi.chunk_bytes(n_elements, n_chunks)
    addresses = [c.contents.dl_tensor.data for c in chunks]
    assert addresses[0] % ALIGNMENT == 0
    assert addresses == [addresses[0] + k * size for k in range(n_chunks)]
    assert [take(c).shape for c in chunks] == [(size,)] * n_chunks


def test_a_tensor_of_no_dimensions_needs_no_shape():
    out = Managed()
    check(lib.gc_tensor_empty(DLDevice(CPU, 0), dldtype("float32"), 0, None, byref(out)))
    assert take(out).shape == ()
    lent, memory = Lent(), np.array(2.5)
    arguments = DLDevice(CPU, 0), dldtype("float64"), 0, None, None, lent.callback, 42
    check(lib.gc_tensor_from_pointer(memory.ctypes.data, *arguments, byref(out)))
    assert take(out) == 2.5 and lent.releases == [42]


def test_all_outputs_are_aligned():
    out, source = Managed(), Tensor(np.ones((3, 50), np.uint8))
    for call in (
        lambda: lib.gc_pack_bits(source.managed, 1, 0, byref(out)),
        lambda: lib.gc_unpack_bits(source.managed, 0, 17, 0, byref(out)),
        lambda: lib.gc_unpack_chunks(capi.managed_array([Tensor(np.ones(50, np.uint8))]), 1, 399, byref(out)),
    ):
        for _ in range(5):
            check(call())
            assert out.contents.dl_tensor.data % ALIGNMENT == 0
            lib.gc_tensor_free(out)
