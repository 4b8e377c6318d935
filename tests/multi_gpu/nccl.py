"""NCCL through ctypes: communicators that a program has itself, and what it exchanges over them."""

import ctypes
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_void_p

UINT8, FLOAT32, BFLOAT16 = 1, 7, 9
SUM = 0


class Id(ctypes.Structure):
    _fields_ = [("bytes", c_char * 128)]


SIGNATURES = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(Id)],
    "ncclCommInitRank": [POINTER(c_void_p), c_int, Id, c_int],
    "ncclCommDestroy": [c_void_p],
    "ncclCommAbort": [c_void_p],
    "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclAllGather": [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p],
    "ncclSend": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclRecv": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}


class Nccl:
    """The one that is loaded, as torch does it; else the system's."""

    def __init__(self):
        self.library = ctypes.CDLL("libnccl.so.2")
        self.library.ncclGetErrorString.restype = c_char_p
        for name, arguments in SIGNATURES.items():
            getattr(self.library, name).argtypes = arguments

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self.library.ncclGetErrorString(code).decode()} ({code})")

    def has(self, name):
        return hasattr(self.library, name)

    def version(self):
        version = c_int()
        self.call("ncclGetVersion", byref(version))
        return f"{version.value // 10000}.{version.value % 10000 // 100}.{version.value % 100}"

    def communicator(self, here):
        """Of all ranks, each with the GPU that is current."""
        id, comm = Id(), c_void_p()
        if here.rank == 0:
            self.call("ncclGetUniqueId", byref(id))
        id = Id.from_buffer_copy(here.gather(bytes(id))[0])
        self.call("ncclCommInitRank", byref(comm), here.world, id, here.rank)
        return comm

    def all_to_all(self, comm, send, recv, size, world, stream):
        """Block k of `send` goes to rank k; bytes at addresses."""
        self.call("ncclGroupStart")
        for peer in range(world):
            self.call("ncclSend", send + peer * size, size, UINT8, peer, comm, stream)
            self.call("ncclRecv", recv + peer * size, size, UINT8, peer, comm, stream)
        self.call("ncclGroupEnd")

    def all_gather(self, comm, send, recv, size, stream):
        self.call("ncclAllGather", send, recv, size, UINT8, comm, stream)

    def all_reduce(self, comm, send, recv, count, dtype, stream):
        self.call("ncclAllReduce", send, recv, count, dtype, SUM, comm, stream)
