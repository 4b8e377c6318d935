"""The C interface as ctypes calls it, and tensors described by hand.

The functions are called with the pointers that they take, so that a test can pass a wrong one. `Tensor` describes a
NumPy array to the library from the array's own address, shape and strides, without NumPy's DLPack. `read` copies a
tensor of the library back in the same way.
"""

import ctypes
import enum
import importlib.util
import os
import pathlib
import re
import threading
from ctypes import POINTER, byref, c_char_p, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p  # noqa: F401

import numpy as np


class Status(enum.IntEnum):
    OK = 0
    INVALID_ARGUMENT = 1
    UNSUPPORTED_DTYPE = 2
    UNSUPPORTED_DEVICE = 3
    SHAPE_MISMATCH = 4
    READ_ONLY = 5
    NOT_CONTIGUOUS = 6
    SIZE_OVERFLOW = 7
    BUSY = 8
    CORRUPT = 9
    OUT_OF_MEMORY = 10
    DRIVER_UNAVAILABLE = 20
    CUDA = 21
    CONTEXT_LOST = 22
    NVRTC_UNAVAILABLE = 25
    COMPILE = 26
    COMM_UNAVAILABLE = 30
    COMM = 31
    SHARE = 40
    TIMEOUT = 41


BIG, LITTLE = 0, 1
AXIS_NONE = -(2**31)
COUNT_ALL = -(2**63)

CPU, CUDA, CUDA_HOST, ROCM, CUDA_MANAGED = 1, 2, 3, 10, 13
READ_ONLY_FLAG = 1
ALIGNMENT = 256


# Declarations of the Python client, loaded without it; test_declarations.py compares them with tests/abi/functions.h.
_spec = importlib.util.spec_from_file_location(
    "_declarations", pathlib.Path(__file__).parents[2] / "python" / "gradcodec" / "_declarations.py"
)
declared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(declared)

DLDevice, DLDataType, DLTensor = declared.DLDevice, declared.DLDataType, declared.DLTensor
DLManagedTensor, DLManagedTensorVersioned = declared.DLManagedTensor, declared.DLManagedTensorVersioned
CodecOptions, Codec, KernelShape = declared.gc_codec_options_t, declared.gc_codec_t, declared.gc_kernel_shape_t
Transport, NcclOptions, PeersOptions = declared.gc_transport_t, declared.gc_nccl_options_t, declared.gc_peers_options_t
Comm, AllReduce, Part, Share = declared.gc_comm_t, declared.gc_allreduce_t, declared.gc_part_t, declared.gc_share_t
ElementwiseOptions, ReductionOptions = declared.gc_elementwise_options_t, declared.gc_reduction_options_t
Kernel, RunOptions = declared.gc_kernel_t, declared.gc_run_options_t
EXCHANGE = dict(Transport._fields_)["all_to_all"]
DELETER = RELEASE = ctypes.CFUNCTYPE(None, c_void_p)

Managed, Versioned, View = POINTER(DLManagedTensor), POINTER(DLManagedTensorVersioned), POINTER(DLTensor)

lib = ctypes.CDLL(os.environ.get("GRADCODEC_LIBRARY", "libgradcodec.so.0"))
for _name, (_result, _arguments) in declared.FUNCTIONS.items():
    _function = getattr(lib, _name)
    _function.restype, _function.argtypes = _result, _arguments

# Name: the NumPy type that holds it, and DLPack's code and bits. bfloat16 is stored as uint16.
DTYPES = {
    "bool": (np.bool_, 6, 8),
    "int8": (np.int8, 0, 8),
    "int16": (np.int16, 0, 16),
    "int32": (np.int32, 0, 32),
    "int64": (np.int64, 0, 64),
    "uint8": (np.uint8, 1, 8),
    "uint16": (np.uint16, 1, 16),
    "uint32": (np.uint32, 1, 32),
    "uint64": (np.uint64, 1, 64),
    "float16": (np.float16, 2, 16),
    "float32": (np.float32, 2, 32),
    "float64": (np.float64, 2, 64),
    "bfloat16": (np.uint16, 4, 16),
    "complex64": (np.complex64, 5, 64),
}
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")


def dldtype(name):
    return DLDataType(DTYPES[name][1], DTYPES[name][2], 1)


def int64s(values):
    return (c_int64 * len(values))(*values)


def c_strides(shape):
    """Returns the strides, in elements, of a compact tensor in C order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


def last_error():
    return lib.gc_last_error().decode()


def kernel_shape(kernel, compute_capability):
    shape = KernelShape(ctypes.sizeof(KernelShape))
    check(lib.gc_builtin_kernel_shape(kernel.encode(), compute_capability, byref(shape)))
    return shape


def check(status):
    """Checks that a call has succeeded."""
    assert status == Status.OK, f"{lib.gc_status_name(status).decode()}: {last_error()}"


def expect(status, code, *words):
    """Checks that a call has returned this status, with these words in its error."""
    assert status == code, (status, last_error())
    for word in words:
        assert str(word) in last_error(), (word, last_error())


class Tensor:
    """NumPy array, described to the library by hand; `releases` records the calls of its deleter: none expected."""

    def __init__(self, array, dtype=None, *, strides="explicit", byte_offset=0, device=CPU):
        """`strides`: "explicit" as the array has them, None for a NULL pointer, or a tuple of element strides."""
        interface = array.__array_interface__
        shape = interface["shape"]
        if strides == "explicit":
            in_bytes = interface["strides"] or tuple(s * array.itemsize for s in c_strides(shape))
            assert all(s % array.itemsize == 0 for s in in_bytes), "DLPack counts strides in elements"
            strides = tuple(s // array.itemsize for s in in_bytes)
        self.array = array  # keeps the memory as long as the description
        self.releases = []
        self.struct = DLManagedTensor(
            DLTensor(
                data=interface["data"][0] - byte_offset,
                device=DLDevice(device, 0),
                ndim=len(shape),
                dtype=dldtype(dtype or array.dtype.name),
                shape=int64s(shape),
                strides=None if strides is None else int64s(strides),
                byte_offset=byte_offset,
            ),
        )
        self.release_to(lambda _, releases=self.releases: releases.append(1))
        self.struct.array = array  # pointers to the struct keep it, too

    def release_to(self, function):
        """Sets the deleter; None: no deleter."""
        self.deleter = DELETER(function) if function else None
        self.struct.deleter = ctypes.cast(self.deleter, c_void_p) if function else None
        self.struct.kept = self.deleter

    @property
    def managed(self):
        return ctypes.pointer(self.struct)

    @property
    def view(self):
        return ctypes.pointer(self.struct.dl_tensor)


class VersionedTensor:
    """NumPy array in DLPack's versioned form. Unlike with Tensor, a test may expect a release."""

    release_to = Tensor.release_to

    def __init__(self, array, *, version=(1, 0), flags=0):
        self.described = Tensor(array)
        self.array, self.releases = array, []
        self.struct = DLManagedTensorVersioned(version, None, None, flags, self.described.struct.dl_tensor)
        self.release_to(lambda _, releases=self.releases: releases.append(1))

    @property
    def managed(self):
        return ctypes.pointer(self.struct)


def managed_array(tensors):
    """Returns the tensors as C's DLManagedTensor *const *."""
    return (Managed * max(1, len(tensors)))(*(t.managed if isinstance(t, Tensor) else t for t in tensors))


def shape_of(tensor):
    view = tensor.contents.dl_tensor
    return tuple(view.shape[: view.ndim]) if view.ndim else ()


def read(tensor, device=(CPU, 0), bytes_at=ctypes.string_at):
    """Returns a copy of a tensor of the library, and checks all that it promises of its outputs."""
    managed = tensor.contents
    view = managed.dl_tensor
    shape = shape_of(tensor)
    dtype = next(np.dtype(d) for d, code, bits in DTYPES.values() if (code, bits) == (view.dtype.code, view.dtype.bits))
    count = int(np.prod(shape, dtype=np.int64))
    assert managed.deleter, "an output has no deleter"
    assert (view.device.device_type, view.device.device_id, view.dtype.lanes) == (*device, 1)
    assert view.byte_offset == 0
    assert view.ndim == 0 or view.strides, "an output has no strides"
    assert bool(view.data) == (count > 0), "exactly an empty output has no data"
    if count == 0:
        return np.empty(shape, dtype)
    assert all(n == 1 or s == c for n, s, c in zip(shape, view.strides[: view.ndim], c_strides(shape)))
    return np.frombuffer(bytes_at(view.data, count * dtype.itemsize), dtype).reshape(shape)


def take(tensor):
    """Returns a copy of a tensor of the library, which is released."""
    array = read(tensor)
    lib.gc_tensor_free(tensor)
    return array


def chunk_bytes(n_elements, n_chunks):
    """Returns the bytes of a chunk by the formula of the header, not by the library."""
    packed = -(-n_elements // 8)
    return -(-packed // n_chunks)


def pack_chunks(source, n_chunks):
    """Returns pointers to the chunks of a Tensor; the caller owns them."""
    out = (Managed * n_chunks)()
    check(lib.gc_pack_chunks(source.managed, n_chunks, out))
    assert not source.releases
    return list(out)


def empty(*shape, dtype="uint8", device=DLDevice(CPU, 0)):
    """Returns a tensor of the library's own memory, whose bytes are not set."""
    out = Managed()
    check(lib.gc_tensor_empty(device, dldtype(dtype), len(shape), int64s(shape), byref(out)))
    return out


def to_versioned(tensor):
    """Returns the tensor in the versioned form, which takes it over."""
    out = Versioned()
    check(lib.gc_tensor_to_versioned(tensor, byref(out)))
    return out


def from_versioned(tensor):
    """Returns the tensor in the legacy form, which takes it over."""
    out = Managed()
    check(lib.gc_tensor_from_versioned(tensor, byref(out)))
    return out


def free_all(things):
    """Releases tensors, communicators, handles of all-reduces or leases."""
    functions = {Managed: lib.gc_tensor_free, POINTER(Comm): lib.gc_comm_free, POINTER(AllReduce): lib.gc_allreduce_free,
                 POINTER(Share): lib.gc_share_free}
    for thing in things:
        functions[type(thing)](thing)


def in_threads(count, function):
    """Calls function(k) in `count` threads; returns the results by k, or raises an exception of a thread."""
    results, failures = [None] * count, []

    def run(k):
        try:
            results[k] = function(k)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def says(sentence, *words):
    """Returns True if each word is in the sentence as a whole word: 17 is not in 170, "-3" is in "got -3"."""
    return all(re.search(rf"(?<![\w]){re.escape(str(w))}(?![\w])", sentence) for w in words)
