"""Tests which GPUs count as linked by NVLink, with a stand-in driver and a stand-in NVML."""

import ctypes
import types

import pytest
import torch
from gradcodec import _torch_nvlink

SEEN = [bytes([number] * 16) for number in (1, 2, 3)]
UNSEEN = bytes(range(16))
UNSEEN_TEXT = b"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
OWN_TEXT = b"GPU-01010101-0101-0101-0101-010101010101"


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    def properties(device):
        return types.SimpleNamespace(uuid=types.SimpleNamespace(bytes=list(SEEN[device])))

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(SEEN))


@pytest.fixture
def libraries(monkeypatch):
    """Returns the libraries that ctypes.CDLL() opens, by file."""
    known = {}

    def opened(name):
        if name not in known:
            raise OSError(f"{name}: cannot open shared object file")
        return known[name]

    monkeypatch.setattr(ctypes, "CDLL", opened)
    return known


def driver(linked):
    def attribute(value, which, device, other):
        assert which == 3
        value._obj.value = (device, other) in linked
        return 0

    return types.SimpleNamespace(cuDeviceGetP2PAttribute=attribute)


def nvml(status):
    handles = {OWN_TEXT: 11, UNSEEN_TEXT: 22}

    def handle(text, place):
        place._obj.value = handles[text.value]
        return 0

    def p2p(first, second, which, answer):
        assert (first.value, second.value, which) == (11, 22, 2)
        answer._obj.value = status
        return 0

    nothing = lambda: 0  # noqa: E731
    return types.SimpleNamespace(
        nvmlInit_v2=nothing, nvmlShutdown=nothing, nvmlDeviceGetHandleByUUID=handle, nvmlDeviceGetP2PStatus=p2p
    )


def test_gpus_that_this_process_sees(libraries):
    libraries["libcuda.so.1"] = driver({(0, 1)})
    assert _torch_nvlink.are_linked([SEEN[0], SEEN[1]], 0)
    assert not _torch_nvlink.are_linked([SEEN[0], SEEN[1], SEEN[2]], 0)


def test_ranks_on_one_gpu(libraries):
    assert _torch_nvlink.are_linked([SEEN[2], SEEN[2]], 2)


@pytest.mark.parametrize("status, answer", [(0, True), (4, False)])
def test_a_gpu_that_another_process_sees(libraries, status, answer):
    libraries["libnvidia-ml.so.1"] = nvml(status)
    assert _torch_nvlink.are_linked([SEEN[0], UNSEEN], 0) is answer


def test_without_nvml_links_are_unknown(libraries):
    assert not _torch_nvlink.are_linked([SEEN[0], UNSEEN], 0)
