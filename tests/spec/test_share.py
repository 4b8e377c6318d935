"""Memory of a GPU in two processes, from every allocator: both sides read what either writes."""

import pathlib
import socket
import subprocess
import sys

import pytest

import capi
import driver
from capi import CUDA, CUDA_MANAGED, RELEASE, DLDevice, Managed, Status, byref, lib

pytestmark = pytest.mark.gpu

HERE = pathlib.Path(__file__).resolve().parent
two_devices = pytest.mark.two_devices


def two(sender, receiver, source, devices=(0, 0)):
    """Runs the two sides of shares.py; returns what they printed."""
    sockets = [socket.socketpair() for _ in range(2)]
    children = []
    for k, side in enumerate((sender, receiver)):
        numbers = [pair[k].fileno() for pair in sockets]
        command = [sys.executable, str(HERE / "shares.py"), side, source, *map(str, numbers), str(devices[k])]
        children.append(subprocess.Popen(
            command, pass_fds=numbers, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ))  # fmt: skip
    for pair in sockets:
        for end in pair:
            end.close()
    told = [child.communicate(timeout=300) for child in children]
    outcomes = [child.returncode for child in children]
    assert outcomes == [0, 0], "\n".join(f"exit {code}\n{out}{err}" for code, (out, err) in zip(outcomes, told))
    return "; ".join(out.strip() for out, _ in told if out)


SOURCES = ["torch", "torch, expandable", "cupy", "cuMemCreate", "cuMemAlloc", "gc_tensor_empty"]


@pytest.mark.parametrize("source", SOURCES)
def test_both_sides_read_the_writes_of_each_other(source):
    print(two("sender", "receiver", source))


@pytest.mark.parametrize("source", ["torch", "cuMemAlloc", "gc_tensor_empty"])
def test_small_allocations(source):
    two("small_sender", "small_receiver", source)


@two_devices
@pytest.mark.parametrize("devices", [(0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("source", ["torch", "torch, expandable", "cuMemCreate", "gc_tensor_empty"])
def test_both_sides_on_two_devices_read_the_writes_of_each_other(source, devices):
    print(two("sender", "receiver", source, devices))


@pytest.mark.parametrize("source", ["cupy, a pool of the driver", "torch, a pool of the driver", "cupy, managed"])
def test_memory_that_cannot_be_shared_is_refused_with_advice_and_copied(source):
    print(two("not_sender", "copy_receiver", source))


THOUSAND = ["torch", "torch, expandable", "torch, copied", "gc_tensor_empty", "gc_tensor_empty, new ones"]


@pytest.mark.parametrize("source", THOUSAND)
def test_a_thousand_shares_leak_no_descriptor_and_no_memory(source):
    two("thousand_sender", "thousand_receiver", source)


def test_managed_memory_by_its_address():
    with driver.Memory(1000, "managed") as memory:
        driver.fill(memory.address, 3, 1000)
        out, chunk, u8 = Managed(), Managed(), capi.DLDataType(1, 8, 1)
        made = memory.address, DLDevice(CUDA_MANAGED, 0), u8, 1, capi.int64s((1000,)), None, RELEASE(), None, byref(out)
        capi.check(lib.gc_tensor_from_pointer(*made))
        view = out.contents.dl_tensor
        assert (view.device.device_type, view.device.device_id, view.data) == (CUDA_MANAGED, 0, memory.address)
        capi.check(lib.gc_pack_chunks(out, 1, byref(chunk)))
        packed = chunk.contents.dl_tensor
        assert packed.device.device_type == CUDA
        driver.synchronize()
        assert (driver.download(packed.data, 125) == 0xFF).all()
        one, other = socket.socketpair()
        with one, other:
            assert lib.gc_share_send(out, one.fileno(), 0, 0, None) == Status.SHARE
            assert "GC_SHARE_COPY" in capi.last_error()
        lib.gc_tensor_free(chunk)
        lib.gc_tensor_free(out)
