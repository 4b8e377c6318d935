"""Finds whether GPUs are linked by NVLink."""

import contextlib
import ctypes
from ctypes import byref, c_char_p, c_int, c_void_p
from typing import Any, Sequence

import torch

NATIVE_ATOMIC_SUPPORTED = 3  # of CUdevice_P2PAttribute: supported over NVLink, and not over PCIe
CAPS_NVLINK = 2  # of nvmlGpuP2PCapsIndex_t


def uuid_of(device: int) -> bytes:
    """Returns the 16 bytes of a visible GPU's UUID."""
    properties: Any = torch.cuda.get_device_properties(device)
    return bytes(properties.uuid.bytes)


def are_linked(uuids: Sequence[bytes], device: int) -> bool:
    """Returns whether this GPU is, or has NVLink to, each of the GPUs with these UUIDs.

    The driver answers for GPUs that this process sees, NVML for all. A GPU that neither finds has no link.
    """
    own, seen = uuid_of(device), {uuid_of(each): each for each in range(torch.cuda.device_count())}
    others = set(uuids) - {own}
    return all(_by_driver(device, seen[each]) if each in seen else _by_nvml(own, each) for each in others)


def _by_driver(device: int, other: int) -> bool:
    value = c_int()
    with contextlib.suppress(AttributeError, OSError):
        driver: Any = ctypes.CDLL("libcuda.so.1")
        if driver.cuDeviceGetP2PAttribute(byref(value), NATIVE_ATOMIC_SUPPORTED, device, other) == 0:
            return value.value != 0
    return False


def _by_nvml(own: bytes, other: bytes) -> bool:
    with contextlib.suppress(AttributeError, OSError):
        nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return False
        try:
            first, second, status = c_void_p(), c_void_p(), c_int(-1)
            for uuid, place in ((own, first), (other, second)):
                if nvml.nvmlDeviceGetHandleByUUID(c_char_p(_text(uuid)), byref(place)) != 0:
                    return False
            answer = nvml.nvmlDeviceGetP2PStatus(first, second, CAPS_NVLINK, byref(status))
            return bool(answer == 0 and status.value == 0)
        finally:
            nvml.nvmlShutdown()
    return False


def _text(uuid: bytes) -> bytes:
    """Returns a UUID as text: GPU-, and the bytes in hexadecimal in groups of 4, 2, 2, 2 and 6."""
    digits = uuid.hex()
    return "-".join(["GPU", digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]]).encode()
