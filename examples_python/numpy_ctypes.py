"""GradCodec from Python with no binding at all: ctypes, NumPy, and DLPack capsules in and out.

    python3 examples_python/numpy_ctypes.py

loads the libgradcodec.so.0 that is installed, or the file that GRADCODEC_LIBRARY names. Wants NumPy 2.2.5, since which
imported arrays are writable, or newer.
All above main() is there to be copied: keep the functions you call, drop the others.
"""

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

import numpy as np

# --- DLPack's structures, and the functions of gradcodec.h that are called here ---------------------------------------


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32),
        ("dtype_code", c_uint8), ("dtype_bits", c_uint8), ("dtype_lanes", c_uint16),
        ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)), ("byte_offset", c_uint64),
    ]  # fmt: skip


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", DLTensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32), ("minor", c_uint32), ("manager_ctx", c_void_p), ("deleter", c_void_p),
        ("flags", c_uint64), ("dl_tensor", DLTensor),
    ]  # fmt: skip


Tensor, VersionedTensor = POINTER(DLManagedTensor), POINTER(DLManagedTensorVersioned)
BIG, LITTLE = 0, 1  # the first bit of a byte is its most, or its least significant

lib = ctypes.CDLL(os.environ.get("GRADCODEC_LIBRARY", "libgradcodec.so.0"))
lib.gc_last_error.restype = c_char_p
lib.gc_pack_chunks.argtypes = Tensor, c_size_t, POINTER(Tensor)
lib.gc_unpack_chunks.argtypes = POINTER(Tensor), c_size_t, c_int64, POINTER(Tensor)
lib.gc_pack_bits.argtypes = Tensor, c_int32, c_int32, POINTER(Tensor)
lib.gc_unpack_bits.argtypes = Tensor, c_int32, c_int64, c_int32, POINTER(Tensor)
lib.gc_tensor_to_versioned.argtypes = Tensor, POINTER(VersionedTensor)


def check(status):
    if status != 0:
        raise RuntimeError(lib.gc_last_error().decode())


# --- capsules ---------------------------------------------------------------------------------------------------------

# A capsule keeps the address of its name, not a copy, so the name must stay; and its destructor is native code,
# because one written in Python would disturb an exception that is on its way when the capsule goes.
VERSIONED = b"dltensor_versioned"
DESTRUCTOR = ctypes.cast(lib.gc_capsule_destructor, c_void_p)

capsule_new = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
capsule_get = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


class Input:
    """An array as the library reads it: borrowed, without a copy. Its capsule keeps it, and goes with this object."""

    def __init__(self, array):
        self.capsule = array.__dlpack__(max_version=(1, 0))
        versioned = ctypes.cast(capsule_get(self.capsule, VERSIONED), VersionedTensor)
        # An input is only looked at: its shape, its strides, its data. A description without an owner will do.
        self.tensor = ctypes.pointer(DLManagedTensor(versioned.contents.dl_tensor, None, None))


class Output:
    """A tensor of the library on its way to NumPy. Its capsule owns it from here on: taken or not, it is released."""

    def __init__(self, tensor):
        view = tensor.contents.dl_tensor
        self.device = view.device_type, view.device_id
        versioned = VersionedTensor()
        check(lib.gc_tensor_to_versioned(tensor, byref(versioned)))
        self.capsule = capsule_new(ctypes.cast(versioned, c_void_p), VERSIONED, DESTRUCTOR)

    def __dlpack__(self, **_requests):
        return self.capsule

    def __dlpack_device__(self):
        return self.device


# --- the functions, from arrays to arrays -----------------------------------------------------------------------------


def pack_chunks(array, n_chunks):
    source, out = Input(array), (Tensor * n_chunks)()
    check(lib.gc_pack_chunks(source.tensor, n_chunks, out))
    return [np.from_dlpack(Output(tensor)) for tensor in out]


def unpack_chunks(chunks, n_elements):
    sources, out = [Input(chunk) for chunk in chunks], Tensor()
    pointers = (Tensor * len(chunks))(*(source.tensor for source in sources))
    check(lib.gc_unpack_chunks(pointers, len(chunks), n_elements, byref(out)))
    return np.from_dlpack(Output(out))


def pack_bits(array, axis, order=BIG):
    source, out = Input(array), Tensor()
    check(lib.gc_pack_bits(source.tensor, axis, order, byref(out)))
    return np.from_dlpack(Output(out))


def unpack_bits(array, axis, count, order=BIG):
    source, out = Input(array), Tensor()
    check(lib.gc_unpack_bits(source.tensor, axis, count, order, byref(out)))
    return np.from_dlpack(Output(out))


def main():
    gradient = np.random.default_rng(1).standard_normal((25, 40), np.float32)
    positive = gradient >= 0

    chunks = pack_chunks(positive, 4)  # for 4 ranks; 1000 bits are 125 bytes, so the last chunk ends in 3 zeros
    print(f"{gradient.nbytes} bytes of gradient, {len(chunks)} chunks of {chunks[0].size} bytes of signs")
    assert np.concatenate(chunks).tobytes() == np.packbits(positive).tobytes() + bytes(3)

    back = unpack_chunks(chunks, positive.size)
    print(f"unpacked: {back.size} of {back.dtype}, as they were: {np.array_equal(back, positive.ravel())}")
    assert np.array_equal(back, positive.ravel())

    columns = pack_bits(positive.T, axis=1, order=LITTLE)  # any strides: the transpose is not copied
    print(f"packed along an axis: {positive.T.shape} to {columns.shape}")
    assert np.array_equal(columns, np.packbits(positive.T, axis=1, bitorder="little"))
    assert np.array_equal(unpack_bits(columns, axis=1, count=25, order=LITTLE), positive.T)

    columns[:] = 0  # the memory is NumPy's now: writable, and freed with the array
    try:
        pack_bits(positive, axis=2)
    except RuntimeError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("an array of two dimensions has no axis 2")


if __name__ == "__main__":
    main()
