"""Tests that functions which pass a tensor on accept every dtype and every device: they read the description alone.

The expected values are DLPack's codes, versions and flags, as in dlpack.h, and sizes counted by hand.
"""

import ctypes
from ctypes import byref, c_void_p

import numpy as np
import pytest

import capi
from capi import ALIGNMENT, CPU, CUDA, RELEASE, DLDataType, DLDevice, Managed, check, from_versioned, int64s, lib, to_versioned

OPENCL, VULKAN, METAL, ROCM, ONE_API, TRAINIUM = 4, 7, 8, 10, 14, 18

# Code, bits, lanes, and the lowest minor version of DLPack 1 that has the code.
DTYPES = [
    *((code, 8, 1, 0) for code in range(7)),
    *((code, 8, 1, 1) for code in range(7, 15)),  # float8
    (15, 6, 1, 1), (16, 6, 1, 1), (17, 4, 1, 1), (5, 64, 1, 0), (5, 128, 1, 0), (3, 64, 1, 0), (2, 32, 4, 0), (0, 4, 1, 0),
    (1, 1, 1, 0), (6, 1, 1, 0), (17, 4, 2, 1), (1, 255, 65535, 0), (200, 24, 3, 3),  # the last is a future DLPack's
]  # fmt: skip


class Lent:
    """A tensor over an address that is never read, with a release that is counted."""

    def __init__(self, dtype, device=(CPU, 0), shape=(3, 5), strides=None, address=0x1000):
        self.releases = []
        self.callback = RELEASE(lambda context: self.releases.append(context))
        self.out = Managed()
        strides = None if strides is None else int64s(strides)
        arguments = c_void_p(address), DLDevice(*device), DLDataType(*dtype), len(shape), int64s(shape), strides
        self.status = lib.gc_tensor_from_pointer(*arguments, self.callback, 42, byref(self.out))


def said(view):
    """Returns all fields of a description."""
    return (
        (view.dtype.code, view.dtype.bits, view.dtype.lanes),
        (view.device.device_type, view.device.device_id),
        tuple(view.shape[: view.ndim]),
        tuple(view.strides[: view.ndim]),
        (view.data, view.byte_offset),
    )


@pytest.mark.parametrize("code, bits, lanes, minor", DTYPES)
def test_every_dtype_goes_from_a_pointer_to_the_versioned_form_and_back(code, bits, lanes, minor):
    dtype = code, bits, lanes
    lent = Lent(dtype, strides=(-7, 3), address=1 << 40)
    check(lent.status)
    expected = dtype, (CPU, 0), (3, 5), (-7, 3), (1 << 40, 0)
    assert said(lent.out.contents.dl_tensor) == expected
    versioned = to_versioned(lent.out)
    version = versioned.contents.version
    assert (version.major, version.minor, versioned.contents.flags) == (1, minor, 0)
    assert said(versioned.contents.dl_tensor) == expected
    legacy = from_versioned(versioned)
    assert said(legacy.contents.dl_tensor) == expected and lent.releases == []
    lib.gc_tensor_free(legacy)
    assert lent.releases == [42]


@pytest.mark.parametrize("device", [(CUDA, 7), (OPENCL, 0), (VULKAN, 1), (METAL, 0), (ROCM, 2), (ONE_API, 0), (TRAINIUM, 9), (99, -1)])
def test_every_device_is_passed_on_without_a_driver(device):
    lent = Lent((5, 64, 1), device)
    check(lent.status)
    legacy = from_versioned(to_versioned(lent.out))
    assert said(legacy.contents.dl_tensor) == ((5, 64, 1), device, (3, 5), (5, 1), (0x1000, 0))
    lib.gc_tensor_free(legacy)
    assert lent.releases == [42]


@pytest.mark.parametrize("device, data, offset", [(CPU, 0x1040, 0), (CUDA, 0x1040, 0), (OPENCL, 0x1000, 64), (METAL, 0x1000, 64)])
def test_data_and_offset_are_added_only_if_data_is_an_address(device, data, offset):
    source = capi.VersionedTensor(np.zeros((3, 5), np.complex64))
    view = source.struct.dl_tensor
    view.data, view.byte_offset, view.device.device_type = 0x1000, 64, device
    legacy = from_versioned(source.managed)
    assert said(legacy.contents.dl_tensor)[-1] == (data, offset)
    lib.gc_tensor_free(legacy)
    assert source.releases == [1]


@pytest.mark.parametrize(
    "dtype, shape, strides, status",
    [
        ((17, 4, 1), (2**62,), None, 0),  # 2^61 bytes
        ((17, 4, 1), (2**62, 2), None, capi.Status.SIZE_OVERFLOW),  # the number of elements overflows
        ((2, 8, 1), (2**62,), None, 0),
        ((2, 32, 1), (2**62,), None, capi.Status.SIZE_OVERFLOW),
        ((1, 255, 65535), (2, 2), (2**62, 1), capi.Status.SIZE_OVERFLOW),
        ((1, 8, 1), (2,), (-0x1000,), 0),  # down to address 0
        ((1, 8, 1), (2,), (-0x1001,), capi.Status.SIZE_OVERFLOW),
        ((1, 4, 1), (2,), (-0x2000,), 0),
        ((1, 4, 1), (2,), (-0x2001,), capi.Status.SIZE_OVERFLOW),
    ],
)
def test_extents_beyond_memory_are_refused_in_bits(dtype, shape, strides, status):
    lent = Lent(dtype, shape=shape, strides=strides)
    assert lent.status == status, capi.last_error()
    if status == 0:
        lib.gc_tensor_free(lent.out)
    assert lent.releases == ([42] if status == 0 else [])


@pytest.mark.parametrize(
    "dtype, shape, n_bytes",
    [
        ((17, 4, 1), (5,), 3),  # two to a byte, and half of another
        ((1, 1, 1), (3, 7), 3),
        ((16, 6, 1), (4,), 3),
        ((17, 4, 2), (5,), 5),
        ((5, 128, 1), (100,), 1600),
        ((10, 8, 1), (1000,), 1000),
        ((2, 32, 4), (10,), 160),
        ((200, 24, 3), (2,), 18),
        ((17, 4, 1), (0, 9), 0),
    ],
)
def test_new_tensors_of_every_dtype_have_room_for_their_elements(dtype, shape, n_bytes):
    out = Managed()
    check(lib.gc_tensor_empty(DLDevice(CPU, 0), DLDataType(*dtype), len(shape), int64s(shape), byref(out)))
    view = out.contents.dl_tensor
    assert said(view)[:3] == (dtype, (CPU, 0), shape)
    assert bool(view.data) == (n_bytes > 0) and (view.data or 0) % ALIGNMENT == 0
    if n_bytes:
        ctypes.memset(view.data, 0xFF, n_bytes)
    lib.gc_tensor_free(out)
