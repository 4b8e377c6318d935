"""Tests of the CUDA kernels that the library hands out, without a GPU: tests/spec/test_image.py launches them."""

import ctypes
import pathlib
import re
import struct

import pytest

import capi
from capi import KernelShape, Status, byref, lib

KERNELS = pathlib.Path(__file__).parents[2] / "kernels"
PTX, MACHINE_CODE = 1, 2
LZ4 = 0x2000  # drivers from 525 read this compression, and only those from 550 the other


def fatbin(family):
    address, size = ctypes.c_void_p(), ctypes.c_size_t()
    capi.check(lib.gc_builtin_kernels(family.encode(), byref(address), byref(size)))
    assert address.value % 16 == 0
    return ctypes.string_at(address, size.value)


def entries(image):
    """Yields (kind, compute capability, flags) of the entries of a fatbin, each a header and its contents."""
    magic, _, at, size = struct.unpack_from("<IHHQ", image)
    assert (magic, at + size) == (0xBA55ED50, len(image))
    while at < len(image):
        kind, _, header, size, _, _, capability, _, _, flags = struct.unpack_from("<HHIQQIIIIQ", image, at)
        yield kind, capability, flags
        at += header + size


def test_a_fatbin_has_machine_code_and_ptx_for_all_other_gpus():
    found = list(entries(fatbin("bits")))
    assert sorted(c for kind, c, _ in found if kind == MACHINE_CODE) == [75, 80, 90, 100, 120]
    assert sorted(c for kind, c, _ in found if kind == PTX) == [75]
    assert all(flags & LZ4 for _, _, flags in found)


def test_a_fatbin_of_the_library_is_the_file_in_the_tree():
    assert fatbin("bits") == (KERNELS / "fatbin" / "bits.fatbin").read_bytes()


def promised_kernels():
    """Yields the names in docs/ABI.md's table, where `_u16` after `gc_pack_truth_u8` means `gc_pack_truth_u16`."""
    for cell in re.findall(r"(?m)^\| (`gc_(?:un)?pack_.*?) \|", (KERNELS.parent / "docs/ABI.md").read_text()):
        first, *others = re.findall(r"`(\w+)`", cell)
        yield from [first, *(first.rsplit("_", 1)[0] + other for other in others)]


def test_exactly_the_stable_kernels_have_a_shape():
    promised = set(promised_kernels())
    there = set(re.findall(r"\bgc_\w+", (KERNELS / "bits.cu").read_text()))
    assert len(promised) == 12 and promised < there
    for name in there:
        shape = KernelShape(ctypes.sizeof(KernelShape))
        status = lib.gc_builtin_kernel_shape(name.encode(), 90, byref(shape))
        assert status == (Status.OK if name in promised else Status.INVALID_ARGUMENT), name


@pytest.mark.parametrize("capability", [75, 80, 86, 87, 89, 90, 100, 103, 120, 121, 999])
def test_a_shape_is_complete_on_every_gpu_from_7_5_on(capability):
    shape = KernelShape(ctypes.sizeof(KernelShape), *[99] * 4, (99, 99, 99))
    capi.check(lib.gc_builtin_kernel_shape(b"gc_unpack_u8", capability, byref(shape)))
    assert shape.struct_size == ctypes.sizeof(KernelShape)
    assert shape.threads % 32 == 0 and 0 < shape.threads <= 1024
    assert 0 < shape.items_per_block < 2**20 and shape.shared_bytes <= 48 << 10 and shape.cluster == 1
    assert list(shape.reserved) == [0, 0, 0]
