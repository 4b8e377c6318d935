"""Legacy capsules, through ctypes: for the frameworks that know no other, and what they cannot say.

    python3 examples_python/numpy_ctypes_legacy.py

The capsule named "dltensor" is DLPack before 1.0. It needs one structure less than numpy_ctypes.py, which the rest of
this example is taken from, but has no place for "read-only": so NumPy makes none of a read-only array, takes every one
that it gets for read-only, and a read-only versioned tensor is not turned into a legacy one.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_void_p

import numpy as np
from numpy_ctypes import DESTRUCTOR, VERSIONED, Tensor, VersionedTensor, capsule_get, capsule_new, check, lib

READ_ONLY = 5
LEGACY, USED = b"dltensor", b"used_dltensor_versioned"

lib.gc_tensor_from_versioned.argtypes = VersionedTensor, POINTER(Tensor)

capsule_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))


class LegacyOutput:
    """A tensor of the library on its way to NumPy, or to any other that takes legacy capsules."""

    def __init__(self, tensor):
        view = tensor.contents.dl_tensor
        self.device = view.device_type, view.device_id
        self.capsule = capsule_new(ctypes.cast(tensor, c_void_p), LEGACY, DESTRUCTOR)

    def __dlpack__(self, **_requests):
        return self.capsule

    def __dlpack_device__(self):
        return self.device


def pack_chunks(array, n_chunks):
    capsule, out = array.__dlpack__(), (Tensor * n_chunks)()  # the capsule stays the owner of the input
    check(lib.gc_pack_chunks(ctypes.cast(capsule_get(capsule, LEGACY), Tensor), n_chunks, out))
    return [np.from_dlpack(LegacyOutput(tensor)) for tensor in out]


def to_legacy(array):
    """The array's tensor as a legacy one, without a copy; here the library does take it over."""
    capsule, out = array.__dlpack__(max_version=(1, 0)), Tensor()
    status = lib.gc_tensor_from_versioned(ctypes.cast(capsule_get(capsule, VERSIONED), VersionedTensor), byref(out))
    if status == READ_ONLY:
        raise ValueError(lib.gc_last_error().decode())  # the capsule is the owner still, and releases
    check(status)
    capsule_rename(capsule, USED)  # taken: DLPack's way of telling the capsule that it owns nothing any more
    return LegacyOutput(out)


def main():
    positive = np.random.default_rng(1).standard_normal(1000, np.float32) >= 0
    chunks = pack_chunks(positive, 5)
    print(f"{len(chunks)} chunks of {chunks[0].size} bytes, writable: {chunks[0].flags.writeable}")
    assert np.array_equal(np.concatenate(chunks), np.packbits(positive))

    array = np.arange(6)
    same = np.from_dlpack(to_legacy(array))
    array[0] = 42
    print(f"versioned to legacy, the same memory: {same.tolist()}")
    assert same.tolist() == [42, 1, 2, 3, 4, 5]

    array.flags.writeable = False
    try:
        to_legacy(array)
    except ValueError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("a legacy tensor cannot say that it is read-only")


if __name__ == "__main__":
    main()
