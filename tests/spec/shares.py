"""Side of a tensor that two processes share: `python shares.py SIDE SOURCE SOCKET GATE DEVICE`.

The tensor passes through the socket, and words through the gate, so that they do not mix with messages.
"""

import ctypes
import os
import pathlib
import socket
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

import numpy as np  # noqa: E402 the path comes first

import capi  # noqa: E402
import driver  # noqa: E402
from capi import CUDA, DLDataType, DLDevice, Managed, Share, Status, byref, check, lib  # noqa: E402

COPY, PATIENCE = 1, 60_000
F32 = DLDataType(2, 32, 1)
MIB = 1 << 20


def over(address, shape, device=0, strides=None, release=None):
    """Returns a float32 tensor at an address."""
    out = Managed()
    check(lib.gc_tensor_from_pointer(
        address, DLDevice(CUDA, device), F32, len(shape), capi.int64s(shape), strides and capi.int64s(strides),
        capi.RELEASE(), None, byref(out),
    ))  # fmt: skip
    return out


def send(tensor, end, flags=0):
    lease = ctypes.POINTER(Share)()
    check(lib.gc_share_send(tensor, end.fileno(), flags, PATIENCE, byref(lease)))
    return lease


def receive(end, device=0):
    out = Managed()
    check(lib.gc_share_receive(end.fileno(), DLDevice(CUDA, device), PATIENCE, byref(out)))
    return out


def ended(lease):
    check(lib.gc_share_wait(lease, PATIENCE))
    lib.gc_share_free(lease)


def notify(gate, word):
    gate.sendall(word.encode() + b"\n")


def await_text(gate, word=None):
    text = b""
    while not text.endswith(b"\n"):
        byte = gate.recv(1)
        assert byte, f"the other side has ended; {word} expected"
        text += byte
    assert word is None or text == word.encode() + b"\n", text
    return text.decode().strip()


def parts_of(address, n_bytes):
    """Returns the number of parts of memory, mapped one behind the other."""
    count, at = 0, address
    while at < address + n_bytes:
        first, size = ctypes.c_uint64(), ctypes.c_size_t()
        driver.call("cuMemGetAddressRange_v2", byref(first), byref(size), ctypes.c_uint64(at))
        at, count = first.value + size.value, count + 1
    return count


class Properties(ctypes.Structure):
    NAMES = "type", "types", "where", "device"
    _fields_ = [*((name, ctypes.c_uint) for name in NAMES), ("rest", ctypes.c_void_p * 2)]


def mapped(n_bytes, parts, device=0):
    """Returns memory from cuMemCreate, parts of whole granules, which stays until the process ends."""
    size, address, handle = n_bytes // parts, ctypes.c_uint64(), ctypes.c_uint64()
    properties, access = Properties(1, 1, 1, device), (ctypes.c_uint * 3)(1, device, 3)
    zero, size_t = ctypes.c_uint64(0), ctypes.c_size_t
    driver.call("cuMemAddressReserve", byref(address), size_t(n_bytes), size_t(0), zero, zero)
    for k in range(parts):
        at = ctypes.c_uint64(address.value + k * size)
        driver.call("cuMemCreate", byref(handle), size_t(size), byref(properties), zero)
        driver.call("cuMemMap", at, size_t(size), size_t(0), handle, zero)
        driver.call("cuMemRelease", handle)
    driver.call("cuMemSetAccess", address, size_t(n_bytes), access, size_t(1))
    return address.value


def memory_of(source, n_bytes, device=0):
    """Returns the address of memory of this kind, and the object that keeps it."""
    if source.startswith("torch"):
        import torch

        tensor = torch.empty(n_bytes, dtype=torch.uint8, device=f"cuda:{device}")
        return tensor.data_ptr(), tensor
    if source.startswith("cupy"):
        import cupy

        with cupy.cuda.Device(device):
            array = cupy.empty(n_bytes, cupy.uint8)
            if source == "cupy, a pool of the driver":
                array = cupy.ndarray((n_bytes,), cupy.uint8, cupy.cuda.malloc_async(n_bytes))
            if source == "cupy, managed":
                array = cupy.ndarray((n_bytes,), cupy.uint8, cupy.cuda.malloc_managed(n_bytes))
        return array.data.ptr, array
    if source == "cuMemCreate":
        return mapped(n_bytes, 5 if n_bytes == 100 * MIB else 2, device), None
    if source == "cuMemAlloc":
        memory = driver.Memory(n_bytes)
        return memory.address, memory
    out = Managed()
    shape = capi.int64s((n_bytes,))
    check(lib.gc_tensor_empty(DLDevice(CUDA, device), DLDataType(1, 8, 1), 1, shape, byref(out)))
    return out.contents.dl_tensor.data, out


# --- sides --------------------------------------------------------------------------------------------------------------


def sender(source, end, gate, device):
    """Checks that both sides read what either writes."""
    n = 25 * MIB  # 100 MiB: five segments of torch's
    address, kept = memory_of(source, 4 * n, device)
    if source in ("torch, expandable", "cuMemCreate"):
        parts = parts_of(address, 4 * n)
        assert parts > 1, "one tensor over several parts"
        print(f"{source}: {parts} parts")
    driver.upload(address, np.arange(n, dtype="f4"))
    backwards = over(address + 4 * (n - 1), (9, 7), device, (-1000, -3))
    leases = [send(over(address, (n,), device), end), send(backwards, end)]
    notify(gate, "sent")
    await_text(gate, "written there")
    seen = driver.download(address, 4 * n)
    assert (seen == 7).all()
    driver.fill(address, 9, 4 * n)
    notify(gate, "written here")
    for lease in leases:
        ended(lease)


def receiver(source, end, gate, device):
    n = 25 * MIB
    await_text(gate, "sent")
    tensor, other = receive(end, device), receive(end, device)
    view, its = tensor.contents.dl_tensor, other.contents.dl_tensor
    assert (view.device.device_type, view.device.device_id) == (CUDA, device)
    assert its.strides[:2] == [-1000, -3]
    if source != "torch, expandable" and source != "cuMemCreate":
        assert its.data == view.data + 4 * (n - 1), "one mapping"
    whole = driver.download(view.data, 4 * n).view("f4")
    assert (whole == np.arange(n, dtype="f4")).all()
    assert driver.download(its.data - 4 * 1000, 4).view("f4")[0] == n - 1001
    driver.fill(view.data, 7, 4 * n)
    notify(gate, "written there")
    await_text(gate, "written here")
    assert (driver.download(view.data, 4 * n) == 9).all()
    lib.gc_tensor_free(tensor)
    assert (driver.download(its.data, 4) == 9).all(), "the other tensor is still valid"
    lib.gc_tensor_free(other)


def small_sender(source, end, gate, device):
    """Shares small allocations, which lie side by side in one block of the driver's."""
    memory = [memory_of(source, 1000) for _ in range(9)]
    for k, (address, _) in enumerate(memory):
        driver.fill(address, k, 1000)
    leases = [send(over(address, (250,)), end) for address, _ in memory]
    for lease in leases:
        ended(lease)


def small_receiver(source, end, gate, device):
    tensors = [receive(end) for _ in range(9)]
    for k, tensor in enumerate(tensors):
        assert (driver.download(tensor.contents.dl_tensor.data, 1000) == k).all(), k
    for k, tensor in enumerate(tensors):
        assert (driver.download(tensor.contents.dl_tensor.data, 1000) == k).all(), "earlier tensors are still mapped"
        lib.gc_tensor_free(tensor)


def not_sender(source, end, gate, device):
    """Checks that memory that cannot be shared is refused with advice, and that a copy of it passes."""
    address, kept = memory_of(source, 4 * MIB)
    driver.upload(address, np.arange(MIB, dtype="f4"))
    tensor = over(address, (MIB,))
    status = lib.gc_share_send(tensor, end.fileno(), 0, 0, None)
    assert status == Status.SHARE and "GC_SHARE_COPY" in capi.last_error(), (status, capi.last_error())
    print(capi.last_error())
    check(lib.gc_share_send(tensor, end.fileno(), COPY, PATIENCE, None))
    driver.fill(address, 0, 4 * MIB)
    notify(gate, "sent")
    await_text(gate, "done")
    assert (driver.download(address, 4 * MIB) == 0).all()


def copy_receiver(source, end, gate, device):
    await_text(gate, "sent")
    tensor = receive(end)
    address = tensor.contents.dl_tensor.data
    assert (driver.download(address, 4 * MIB).view("f4") == np.arange(MIB)).all()
    driver.fill(address, 1, 4 * MIB)
    lib.gc_tensor_free(tensor)
    notify(gate, "done")


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def thousand_sender(source, end, gate, device):
    """Checks that no more descriptors and memory are taken after the 1,000th share than after the 10th."""
    address, kept = memory_of(source, 64 * MIB)
    if source == "gc_tensor_empty, new ones":
        lib.gc_tensor_free(kept)
    for k in range(1, 1001):
        if source == "gc_tensor_empty, new ones":
            address, kept = memory_of(source, 4 * MIB)
        tensor = over(address, (MIB,))
        lease = send(tensor, end, COPY if source == "torch, copied" else 0)
        lib.gc_tensor_free(tensor)
        if source == "gc_tensor_empty, new ones":
            lib.gc_tensor_free(kept)
        ended(lease)
        if k in (10, 1000):
            notify(gate, "ended")
            await_text(gate, "measured")
            now = descriptors(), driver.free_bytes()
            notify(gate, "measured")
            if k == 10:
                before = now
    assert now == before, f"descriptors and free memory: {before} after 10, {now} after 1,000"


def thousand_receiver(source, end, gate, device):
    for k in range(1, 1001):
        lib.gc_tensor_free(receive(end))
        if k in (10, 1000):
            await_text(gate, "ended")
            now = descriptors(), driver.free_bytes()
            notify(gate, "measured")
            await_text(gate, "measured")
            if k == 10:
                before = now
    assert now == before, f"descriptors and free memory: {before} after 10, {now} after 1,000"


if __name__ == "__main__":
    side, source, end, gate, device = sys.argv[1:]
    if source == "torch, expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if source == "torch, a pool of the driver":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"
    assert driver.device_count()
    driver.use(driver.primary(int(device)))
    globals()[side](source, socket.socket(fileno=int(end)), socket.socket(fileno=int(gate)), int(device))
    sys.stdout.flush()
    os._exit(0)  # skips the frameworks' work at exit
