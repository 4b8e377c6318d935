"""The C interface as ctypes sees it, and tensors described by hand.

Nothing here is convenient: the functions are called with the pointers they take, so that a test can hand them a
wrong one. `Tensor` describes a NumPy array to the library from the array's own address, shape and strides, without
NumPy's DLPack; `read` copies a tensor of the library back in the same way.
"""

import ctypes
import enum
import os
import pathlib
import re
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32
from ctypes import c_uint64, c_void_p

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


class DLDevice(ctypes.Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]

    def __repr__(self):
        return f"device({self.device_type}, {self.device_id})"


class DLDataType(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]

    def __repr__(self):
        return f"dtype({self.code}, {self.bits}, {self.lanes})"


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", DLDevice),
        ("ndim", c_int32),
        ("dtype", DLDataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    pass


class DLManagedTensorVersioned(ctypes.Structure):
    pass


DELETER = ctypes.CFUNCTYPE(None, POINTER(DLManagedTensor))
DELETER_VERSIONED = ctypes.CFUNCTYPE(None, POINTER(DLManagedTensorVersioned))
RELEASE = ctypes.CFUNCTYPE(None, c_void_p)

DLManagedTensor._fields_ = [("dl_tensor", DLTensor), ("manager_ctx", c_void_p), ("deleter", DELETER)]
DLManagedTensorVersioned._fields_ = [
    ("major", c_uint32),
    ("minor", c_uint32),
    ("manager_ctx", c_void_p),
    ("deleter", DELETER_VERSIONED),
    ("flags", c_uint64),
    ("dl_tensor", DLTensor),
]


class KernelShape(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("threads", c_uint32),
        ("items_per_block", c_uint32),
        ("shared_bytes", c_uint32),
        ("cluster", c_uint32),
        ("reserved", c_uint32 * 3),
    ]


KernelShape.__name__ = "gc_kernel_shape_t"  # as functions.h has it


class CodecOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("codec", c_int32),
        ("device", DLDevice),
        ("values", DLDataType),
        ("results", DLDataType),
        ("error", c_int32),
        ("scale", c_int32),
        ("nonfinite", c_int32),
        ("beta", c_float),
        ("segments", POINTER(c_int64)),
        ("n_segments", c_size_t),
        ("n_elements", c_int64),
        ("n_chunks", c_size_t),
        ("server", c_uint64),
        ("raw", POINTER(c_uint8)),
        ("reduction", c_int32),
        ("reserved", c_uint32 * 5),
    ]


CodecOptions.__name__ = "gc_codec_options_t"


class Codec(ctypes.Structure):
    """Opaque."""


Codec.__name__ = "gc_codec_t"

EXCHANGE = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_size_t, DLDevice, c_void_p)


class Transport(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("world_size", c_int32),
        ("flags", c_uint32),
        ("ctx", c_void_p),
        ("all_to_all", EXCHANGE),
        ("all_gather", EXCHANGE),
    ]


class NcclOptions(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("comm", c_void_p), ("dl_handle", c_void_p),
                ("timeout_ms", c_uint32), ("reserved", c_uint32)]


NcclOptions.__name__ = "gc_nccl_options_t"


class PeersOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("world_size", c_int32),
        ("timeout_ms", c_uint32),
        ("device", DLDevice),
        ("bytes", c_size_t),
        ("buffers", POINTER(c_void_p)),
    ]


PeersOptions.__name__ = "gc_peers_options_t"


class Comm(ctypes.Structure):
    """Opaque."""


class AllReduce(ctypes.Structure):
    """Opaque."""


class Part(ctypes.Structure):
    _fields_ = [("segment", c_int64), ("first", c_int64), ("count", c_int64)]


Part.__name__ = "gc_part_t"


class Share(ctypes.Structure):
    """Opaque."""


class Kernel(ctypes.Structure):
    """Opaque."""


class ElementwiseOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("inputs", c_char_p),
        ("outputs", c_char_p),
        ("operation", c_char_p),
        ("name", c_char_p),
        ("preamble", c_char_p),
        ("loop_prep", c_char_p),
        ("after_loop", c_char_p),
        ("options", POINTER(c_char_p)),
        ("n_options", c_size_t),
        ("nvrtc", c_void_p),
        ("reserved", c_uint64 * 4),
    ]


class ReductionOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("inputs", c_char_p),
        ("outputs", c_char_p),
        ("map", c_char_p),
        ("reduce", c_char_p),
        ("post_map", c_char_p),
        ("identity", c_char_p),
        ("name", c_char_p),
        ("reduce_type", c_char_p),
        ("preamble", c_char_p),
        ("options", POINTER(c_char_p)),
        ("n_options", c_size_t),
        ("nvrtc", c_void_p),
        ("reserved", c_uint64 * 4),
    ]


class RunOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("size", c_int64),
        ("axes", POINTER(c_int32)),
        ("n_axes", c_size_t),
        ("workspace", POINTER(DLTensor)),
        ("capability", c_int32),
        ("reserved0", c_uint32),
        ("reserved", c_uint64 * 3),
    ]


Kernel.__name__, RunOptions.__name__ = "gc_kernel_t", "gc_run_options_t"
ElementwiseOptions.__name__, ReductionOptions.__name__ = "gc_elementwise_options_t", "gc_reduction_options_t"
Share.__name__ = "gc_share_t"
Transport.__name__, Comm.__name__, AllReduce.__name__ = "gc_transport_t", "gc_comm_t", "gc_allreduce_t"

Managed = POINTER(DLManagedTensor)
Versioned = POINTER(DLManagedTensorVersioned)
View = POINTER(DLTensor)

NUMBERS = {
    "int": c_int, "int32_t": c_int32, "uint8_t": c_uint8, "uint32_t": c_uint32, "uint64_t": c_uint64,
    "int64_t": c_int64, "size_t": c_size_t,
    "gc_status_t": c_int32, "gc_bit_order_t": c_int32, "gc_decode_t": c_int32, "float": c_float,
}  # fmt: skip
STRUCTS = (
    DLDevice, DLDataType, DLTensor, DLManagedTensor, DLManagedTensorVersioned, KernelShape, CodecOptions, Codec,
    Transport, NcclOptions, PeersOptions, Comm, AllReduce, Part, Share, Kernel, ElementwiseOptions, ReductionOptions,
    RunOptions,
)  # fmt: skip


def signatures(structs, callback):
    """The return type and the arguments of every function in tests/abi/functions.h, with these ctypes structures."""
    known = {"void": None, "void *": c_void_p, "char *": c_char_p, "void (*)(void *)": callback, **NUMBERS}
    known.update((struct.__name__, struct) for struct in structs)

    def of(text):
        text = " ".join(re.sub(r"\b(const|struct)\b", "", text).split()).replace("* *", "**")
        if text in known:
            return known[text]
        if not text.endswith("*"):
            raise ValueError(f"tests/abi/functions.h: what {text!r} is to ctypes is not in tests/python/capi.py")
        return POINTER(of(text[:-1]))

    promises = pathlib.Path(__file__).parents[1].joinpath("abi", "functions.h").read_text()
    return {
        name: (of(result), *(of(part) for part in re.split(r",(?![^()]*\))", parameters) if part != "void"))
        for name, result, parameters in re.findall(r"^FUNCTION\((\w+), (.*?), \((.*?)\)\)$", promises, re.M | re.S)
    }


# gc_capsule_destructor wants the GIL, which CDLL gives up: only its address is of use.
SIGNATURES = signatures(STRUCTS, RELEASE)

lib = ctypes.CDLL(os.environ.get("GRADCODEC_LIBRARY", "libgradcodec.so.0"))
for _name, (_result, *_arguments) in SIGNATURES.items():
    _function = getattr(lib, _name)
    _function.restype, _function.argtypes = _result, _arguments

# name: the NumPy type that holds it, and DLPack's code and bits. bfloat16 lies in uint16.
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
    """Strides in elements of a compact tensor in C order."""
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
    """For a call that must succeed."""
    assert status == Status.OK, f"status {status}: {last_error()}"


class Tensor:
    """A NumPy array, described to the library by hand; `releases` counts the calls of its deleter: none, ever."""

    def __init__(self, array, dtype=None, *, strides="explicit", byte_offset=0, device=CPU):
        """`strides`: "explicit" as the array has them, None for a NULL pointer, or a tuple of element strides."""
        interface = array.__array_interface__
        shape = interface["shape"]
        if strides == "explicit":
            in_bytes = interface["strides"] or tuple(s * array.itemsize for s in c_strides(shape))
            assert all(s % array.itemsize == 0 for s in in_bytes), "DLPack counts strides in elements"
            strides = tuple(s // array.itemsize for s in in_bytes)
        self.array = array  # the memory stays while the description does
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
            None,
            DELETER(lambda _, releases=self.releases: releases.append(1)),
        )

        self.struct.array = array  # pointers to the struct keep it, too

    @property
    def managed(self):
        return ctypes.pointer(self.struct)

    @property
    def view(self):
        return ctypes.pointer(self.struct.dl_tensor)


class VersionedTensor:
    """The same in DLPack's versioned form; here a release is for the test to expect."""

    def __init__(self, array, *, version=(1, 0), flags=0):
        self.described = Tensor(array)
        self.array = array
        self.releases = []
        self.struct = DLManagedTensorVersioned(
            *version,
            None,
            DELETER_VERSIONED(lambda _, releases=self.releases: releases.append(1)),
            flags,
            self.described.struct.dl_tensor,
        )

    @property
    def managed(self):
        return ctypes.pointer(self.struct)


def managed_array(tensors):
    """What C calls DLManagedTensor *const *."""
    return (Managed * max(1, len(tensors)))(*(t.managed if isinstance(t, Tensor) else t for t in tensors))


def shape_of(tensor):
    view = tensor.contents.dl_tensor
    return tuple(view.shape[: view.ndim]) if view.ndim else ()


def read(tensor, device=(CPU, 0), bytes_at=ctypes.string_at):
    """A copy of a tensor of the library, after a look at everything it promises of its outputs."""
    managed = tensor.contents
    view = managed.dl_tensor
    shape = shape_of(tensor)
    dtype = next(np.dtype(d) for d, code, bits in DTYPES.values() if (code, bits) == (view.dtype.code, view.dtype.bits))
    count = int(np.prod(shape, dtype=np.int64))
    assert managed.deleter, "an output has a deleter, always"
    assert (view.device.device_type, view.device.device_id, view.dtype.lanes) == (*device, 1)
    assert view.byte_offset == 0
    assert view.ndim == 0 or view.strides, "an output's strides are explicit"
    assert bool(view.data) == (count > 0), "an empty output has no data, any other has"
    if count == 0:
        return np.empty(shape, dtype)
    assert all(n == 1 or s == c for n, s, c in zip(shape, view.strides[: view.ndim], c_strides(shape)))
    return np.frombuffer(bytes_at(view.data, count * dtype.itemsize), dtype).reshape(shape)


def take(tensor):
    """A copy of a tensor of the library, which is released."""
    array = read(tensor)
    lib.gc_tensor_free(tensor)
    return array


def chunk_bytes(n_elements, n_chunks):
    """The formula of the header, not the library's word."""
    packed = -(-n_elements // 8)
    return -(-packed // n_chunks)


def pack_chunks(source, n_chunks):
    """The pointers to the chunks of a Tensor, the caller's."""
    out = (Managed * n_chunks)()
    check(lib.gc_pack_chunks(source.managed, n_chunks, out))
    assert not source.releases
    return list(out)


def empty(*shape, dtype="uint8"):
    """A tensor of the library's own memory, its bytes not set."""
    out = Managed()
    check(lib.gc_tensor_empty(DLDevice(CPU, 0), dldtype(dtype), len(shape), int64s(shape), byref(out)))
    return out


def to_versioned(tensor):
    """The tensor in the other form, which takes it over."""
    out = Versioned()
    check(lib.gc_tensor_to_versioned(tensor, byref(out)))
    return out


def from_versioned(tensor):
    """And back."""
    out = Managed()
    check(lib.gc_tensor_from_versioned(tensor, byref(out)))
    return out


def says(sentence, *words):
    """Whether each word stands in the sentence as a word of its own: 17 is not in 170, "-3" is in "got -3"."""
    return all(re.search(rf"(?<![\w]){re.escape(str(w))}(?![\w])", sentence) for w in words)
