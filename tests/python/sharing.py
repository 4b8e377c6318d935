"""Common parts of the tests of sharing: the calls, and a sender of hand-made messages."""

import ctypes
import fcntl
import os
import socket
import struct
from ctypes import byref

import numpy as np

import capi
from capi import CPU, DLDevice, Managed, Share, check, expect, lib

HOST = DLDevice(CPU, 0)
COPY = 1
LONG = 60_000  # milliseconds, longer than any test waits
GRANULE = 2 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

LAYOUTS = {
    "compact": lambda a: a,
    "transposed": lambda a: a.transpose(2, 0, 1),
    "every other": lambda a: a[::2, :, 1::3],
    "reversed": lambda a: a[::-1, ::-2],
    "broadcast": lambda a: np.broadcast_to(a[:, :1, :1], a.shape),
    "empty": lambda a: a[:, 3:3],
    "one element": lambda a: a[1, 2, 3:4].reshape(()),
}


def managed(tensor):
    return tensor.managed if isinstance(tensor, capi.Tensor) else tensor


def send(tensor, to, flags=0, timeout=LONG):
    lease = ctypes.POINTER(Share)()
    check(lib.gc_share_send(managed(tensor), to.fileno(), flags, timeout, byref(lease)))
    return lease


def receive(at, device, timeout=LONG):
    out = Managed()
    check(lib.gc_share_receive(at.fileno(), device, timeout, byref(out)))
    return out


def refused(at, device, timeout=LONG):
    out = Managed()
    status = lib.gc_share_receive(at.fileno(), device, timeout, byref(out))
    assert not out
    return status


def ended(lease, timeout=LONG, status=0, *words):
    """Checks that the lease ends with this status, and frees it."""
    expect(lib.gc_share_wait(lease, timeout), status, *words)
    lib.gc_share_free(lease)


def sealed(n_bytes, seals=SEALS, pages=True, flags=0):
    """Returns memory as the library sends it from the CPU."""
    file = os.memfd_create("gradcodec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.posix_fallocate(file, 0, n_bytes) if pages and not flags else os.truncate(file, n_bytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def host_message(shape=(10,), n_bytes=40, dtype=(2, 32, 1), magic=b"GCSH", version=1, device=1, ndim=None, length=None, rest=b""):
    ndim = len(shape) if ndim is None else ndim
    length = 32 + 8 * len(shape) + len(rest) if length is None else length
    head = struct.pack("=4sIIIiBBHq", magic, version, length, ndim, device, *dtype, n_bytes)
    return head + struct.pack(f"={len(shape)}q", *shape) + rest


def gpu_message(strides=(1,), offset=0, handle=b"", uuid=b"stand-in GPU \0\0\0", parts=(GRANULE, GRANULE), **fields):
    rest = struct.pack(f"={len(strides)}q", *strides) + struct.pack("=Q64s16s", offset, handle, uuid)
    return host_message(**dict(n_bytes=2 * GRANULE, device=2) | fields, rest=rest + struct.pack(f"={len(parts)}Q", *parts))


class UntrustedSender:
    """Sends bytes and descriptors to `end`, and keeps the end that receives the answer."""

    def __init__(self):
        (self.at, self.end), (self.mine, self.theirs) = socket.socketpair(), socket.socketpair()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for end in self.at, self.end, self.mine, self.theirs:
            end.close()

    def send(self, text, files):
        """Sends the text and the files, and closes the files. The socket for the answer is sent last."""
        numbers = [*files, self.theirs.fileno()]
        for begin in range(0, len(numbers), 250):
            last = begin + 250 >= len(numbers)
            socket.send_fds(self.at, [text if last else text[:1]], numbers[begin : begin + 250])
            text = text[1:]
        for file in set(files):
            os.close(file)

    def answer(self):
        self.theirs.close()
        return self.mine.recv(10)
