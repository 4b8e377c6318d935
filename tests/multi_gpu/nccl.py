"""NCCL through ctypes: communicators that a program makes itself."""

import ctypes
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_void_p


class Id(ctypes.Structure):
    _fields_ = [("bytes", c_char * 128)]


SIGNATURES = {
    "ncclGetUniqueId": [POINTER(Id)],
    "ncclCommInitRank": [POINTER(c_void_p), c_int, Id, c_int],
    "ncclCommDestroy": [c_void_p],
    "ncclCommAbort": [c_void_p],
}


class Nccl:
    """The loaded library, which is torch's; else the system's."""

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

    def communicator(self, here):
        """Returns a communicator of all ranks, each with its current GPU."""
        id, comm = Id(), c_void_p()
        if here.rank == 0:
            self.call("ncclGetUniqueId", byref(id))
        id = Id.from_buffer_copy(here.gather(bytes(id))[0])
        self.call("ncclCommInitRank", byref(comm), here.world, id, here.rank)
        return comm
