"""Every function with every bad argument: the status, the sentence, and that nothing changed.

`CALLS` holds a good call of each function. A row of the table puts a fault into it and says what comes of that: the
status, and the words that the sentence must hold, the argument's name and the number that is wrong among them.
"""

import ctypes
import re
import threading
from dataclasses import dataclass

import numpy as np
import pytest

import capi
from capi import (
    AXIS_NONE, BIG, CPU, CUDA, CUDA_MANAGED, READ_ONLY_FLAG, RELEASE, ROCM, DLDataType, DLDevice, Managed, Status,
    Tensor, VersionedTensor, c_uint64, check, dldtype, int64s, last_error, lib, says,
)  # fmt: skip

INVALID_ARGUMENT = Status.INVALID_ARGUMENT
UNSUPPORTED_DTYPE = Status.UNSUPPORTED_DTYPE
UNSUPPORTED_DEVICE = Status.UNSUPPORTED_DEVICE
SHAPE_MISMATCH = Status.SHAPE_MISMATCH
NOT_CONTIGUOUS = Status.NOT_CONTIGUOUS
SIZE_OVERFLOW = Status.SIZE_OVERFLOW
OUT_OF_MEMORY = Status.OUT_OF_MEMORY


def cuda_answer():
    """What a CUDA tensor gets here: no driver, or (see conftest.py) one that shows no card."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Status.DRIVER_UNAVAILABLE
    return UNSUPPORTED_DEVICE


NO_CUDA = cuda_answer()

PATTERN = 0xA5
SENTINEL = 0x5E471E15
MARGIN = 2048


@dataclass
class At:
    """The address of another argument's memory, and a distance to it."""

    name: str
    offset: int

    def address(self, arguments):
        return arguments[self.name].array.ctypes.data + self.offset


class Out:
    """Room for pointers, which hold a sentinel until a call succeeds; or for a struct that begins with its size."""

    def __init__(self, count=1, struct_size=None):
        self.memory = (c_uint64 * count)(*[SENTINEL] * count)
        if struct_size is not None:
            self.memory[0] = struct_size
        self.before = bytes(self.memory)

    def __repr__(self):
        return f"Out({[*self.memory]})"

    def untouched(self):
        return bytes(self.memory) == self.before


def elements(*shape, dtype="uint8"):
    """A tensor amid memory of its own: what is written where it should have been refused is seen, and harms nothing."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(n_bytes + 2 * MARGIN, PATTERN, np.uint8)
    return Tensor(memory[MARGIN : MARGIN + n_bytes].view(dtype).reshape(shape))


def memory_of(tensor):
    return tensor.array if tensor.array.base is None else tensor.array.base


# --- a good call of each function -------------------------------------------------------------------------------------

# Arguments in the order of the header. 400 elements are 50 bytes: 3 chunks of 17.
CALLS = {
    "gc_pack_chunks": lambda: dict(src=elements(400), n_chunks=3, out=Out(3)),
    "gc_unpack_chunks": lambda: dict(chunks=[elements(17) for _ in range(3)], n_chunks=3, n_elements=400, out=Out()),
    "gc_pack_bits": lambda: dict(src=elements(5, 80), axis=1, order=BIG, out=Out()),
    "gc_unpack_bits": lambda: dict(src=elements(5, 10), axis=1, count=77, order=BIG, out=Out()),
    "gc_pack_chunks_into": lambda: dict(src=elements(400), order=BIG, dst=elements(3, 17), stream=None),
    "gc_unpack_chunks_into": lambda: dict(src=elements(3, 17), order=BIG, dst=elements(400), stream=None),
    "gc_pack_signs_into": lambda: dict(
        src=elements(400, dtype="float32"), order=BIG, dst=elements(3, 17), stream=None
    ),
    "gc_pack_signs": lambda: dict(src=elements(400, dtype="float32"), n_chunks=3, out=Out(3)),
    "gc_unpack_signs": lambda: dict(
        chunks=[elements(17) for _ in range(3)], n_chunks=3, n_elements=400, dtype=dldtype("float32"), out=Out()
    ),
    "gc_unpack_signs_into": lambda: dict(
        src=elements(3, 17), scales=elements(3, dtype="float32"), order=BIG, dst=elements(400, dtype="float32"),
        stream=None,
    ),
    "gc_vote_signs_into": lambda: dict(src=elements(4, 17), turn=7, dst=elements(17), stream=None),
    "gc_pack_bits_into": lambda: dict(src=elements(5, 80), axis=1, order=BIG, dst=elements(5, 10), stream=None),
    "gc_unpack_bits_into": lambda: dict(src=elements(5, 10), axis=1, order=BIG, dst=elements(5, 80), stream=None),
    "gc_tensor_empty": lambda: dict(
        device=DLDevice(CPU, 0), dtype=dldtype("int32"), ndim=2, shape=[5, 80], out=Out()
    ),
    "gc_tensor_from_pointer": lambda: dict(
        data=elements(400), device=DLDevice(CPU, 0), dtype=dldtype("uint8"), ndim=2, shape=[5, 80], strides=[80, 1],
        release=RELEASE(released.append), ctx=None, out=Out(),
    ),
    "gc_tensor_to_versioned": lambda: dict(src=elements(400), out=Out()),
    "gc_tensor_from_versioned": lambda: dict(src=VersionedTensor(np.full(400, PATTERN, np.uint8)), out=Out()),
    "gc_set_threads": lambda: dict(n=0),
    "gc_prepare": lambda: dict(device=DLDevice(CPU, 0)),
    "gc_trim": lambda: dict(device=DLDevice(CPU, 0)),
    "gc_builtin_kernels": lambda: dict(family=b"bits", fatbin=Out(), size=Out()),
    "gc_builtin_kernel_shape": lambda: dict(
        kernel=b"gc_unpack_u8", compute_capability=75, out=Out(4, struct_size=32)
    ),
}  # fmt: skip

released = []  # by gc_tensor_from_pointer's callback


def set_field(tensor, field, value):
    """Puts a fault into a tensor's description; a shape comes with its ndim, and with compact strides."""
    view = tensor.struct.dl_tensor
    if field == "shape" and value is not None:
        view.ndim, view.shape, view.strides = len(value), int64s(value), None
    elif field == "dtype":
        view.dtype = value if isinstance(value, DLDataType) else DLDataType(*value)
    elif field == "device":
        view.device = DLDevice(value, 0)
    elif field in ("version", "flags"):
        setattr(tensor.struct, {"version": "major"}.get(field, field), value)
    else:
        setattr(view, field, int64s(value) if isinstance(value, tuple) else value)


def put(arguments, path, value):
    """`path`: src, src.shape, chunks[1], chunks[1].shape, ..."""
    name, index, field = re.fullmatch(r"(\w+)(?:\[(\d+)\])?(?:\.(\w+))?", path).groups()
    value = value.address(arguments) if isinstance(value, At) else value
    if field:
        set_field(arguments[name][int(index)] if index else arguments[name], field, value)
    elif index:
        arguments[name][int(index)] = value
    else:
        arguments[name] = value


def marshal(function, arguments):
    def as_c(value, kind):
        match value:
            case Out():
                return ctypes.cast(value.memory, kind)
            case Tensor() if kind is capi.View:
                return value.view
            case Tensor() if kind is ctypes.c_void_p:
                return value.array.ctypes.data
            case Tensor() | VersionedTensor():
                return value.managed
            case [*chunks] if kind is ctypes.POINTER(Managed):
                return capi.managed_array(chunks)
            case [*numbers]:
                return int64s(numbers)
            case _:
                return value

    return [as_c(value, kind) for value, kind in zip(arguments.values(), capi.SIGNATURES[function][1:], strict=True)]


def tensors_in(arguments):
    for value in arguments.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, (Tensor, VersionedTensor)):
                yield item


# --- the table --------------------------------------------------------------------------------------------------------

# Faults of any tensor that a function takes.
TENSOR_FAULTS = [
    ({"": None}, INVALID_ARGUMENT, "NULL"),
    ({".data": None}, INVALID_ARGUMENT, "NULL"),
    ({".shape": None}, INVALID_ARGUMENT, "NULL"),
    ({".ndim": -3}, INVALID_ARGUMENT, "-3"),
    ({".shape": (-17, 17)}, INVALID_ARGUMENT, "-17"),
    ({".dtype": (1, 8, 0)}, UNSUPPORTED_DTYPE, "0"),
]

# Faults of a tensor whose elements are read or written.
ELEMENT_FAULTS = [
    ({".dtype": (200, 8, 1)}, UNSUPPORTED_DTYPE, "200"),
    ({".dtype": (5, 64, 1)}, UNSUPPORTED_DTYPE, "5"),  # complex
    ({".dtype": (0, 7, 1)}, UNSUPPORTED_DTYPE, "7"),
    ({".dtype": (1, 128, 1)}, UNSUPPORTED_DTYPE, "128"),
    ({".dtype": (2, 8, 1)}, UNSUPPORTED_DTYPE, "8"),
    ({".dtype": (4, 32, 1)}, UNSUPPORTED_DTYPE, "32"),
    ({".dtype": (6, 1, 1)}, UNSUPPORTED_DTYPE, "1"),  # bools of one bit
    ({".dtype": (1, 8, 2)}, UNSUPPORTED_DTYPE, "2"),
    ({".device": ROCM}, UNSUPPORTED_DEVICE, "10"),
    ({".device": 0}, UNSUPPORTED_DEVICE, "0"),
]

TENSORS = {
    "gc_pack_chunks": ["src"],
    "gc_unpack_chunks": ["chunks[0]", "chunks[2]"],
    "gc_pack_bits": ["src"],
    "gc_unpack_bits": ["src"],
    "gc_pack_chunks_into": ["src", "dst"],
    "gc_unpack_chunks_into": ["src", "dst"],
    "gc_pack_signs_into": ["src", "dst"],
    "gc_pack_signs": ["src"],
    "gc_unpack_signs": ["chunks[0]", "chunks[2]"],
    "gc_unpack_signs_into": ["src", "scales", "dst"],
    "gc_vote_signs_into": ["src", "dst"],
    "gc_pack_bits_into": ["src", "dst"],
    "gc_unpack_bits_into": ["src", "dst"],
    "gc_tensor_to_versioned": ["src"],
    "gc_tensor_from_versioned": ["src"],
}

PASSING = ("gc_tensor_to_versioned", "gc_tensor_from_versioned")  # whatever the elements are, nobody looks at them

WITH_AXIS = [name for name, make in CALLS.items() if "axis" in make()]
WITH_ORDER = [name for name, make in CALLS.items() if "order" in make()]
WITH_OUT = [name for name, make in CALLS.items() if "out" in make()]
INTO = [name for name, make in CALLS.items() if "dst" in make()]


def conway_guy(count):
    """Strides with 2^count different sums of some of them, though none is wider than the narrower ones together."""
    bounds = [0, 1]
    for n in range(1, count):
        bounds.append(2 * bounds[n] - bounds[n - int(0.5 + (2 * n) ** 0.5)])
    return tuple(bounds[count] - bounds[count - 1 - k] for k in range(count))


TANGLED = conway_guy(17)
assert len({sum(s for k, s in enumerate(TANGLED) if i >> k & 1) for i in range(2**17)}) == 2**17
FAR_AWAY = 2**40  # no memory at all: what a refused call must not touch

TABLE = [
    # every tensor, every output, every axis and every order of every function
    *(
        (function, {name + path: value for path, value in fault.items()}, status, name, *words)
        for function, names in TENSORS.items()
        for name in names
        for fault, status, *words in TENSOR_FAULTS + (ELEMENT_FAULTS if function not in PASSING else [])
        if (name, fault) != ("scales", {"": None})  # those may be missing
    ),
    *((function, {"out": None}, INVALID_ARGUMENT, "out", "NULL") for function in WITH_OUT),
    *((function, {"order": order}, INVALID_ARGUMENT, "order", order) for function in WITH_ORDER for order in (2, -1)),
    *(
        (function, {"axis": axis}, INVALID_ARGUMENT, "axis", axis)
        for function in WITH_AXIS
        for axis in (2, -3, 2**31 - 1, AXIS_NONE + 1)
    ),
    # devices: CUDA where no card is shown, and tensors on different ones
    *(
        (function, {f"{name}.device": device for name in {n.partition("[")[0] for n in names}}, NO_CUDA)
        for function, names in TENSORS.items()
        if function not in ("gc_unpack_chunks", "gc_unpack_signs", *PASSING)
        for device in (CUDA, CUDA_MANAGED)
    ),
    *(
        (function, {f"chunks[{k}].device": CUDA for k in range(3)}, NO_CUDA)
        for function in ("gc_unpack_chunks", "gc_unpack_signs")
    ),
    *(
        (function, {"device": DLDevice(device, 0)}, NO_CUDA)
        for function in ("gc_tensor_empty", "gc_prepare", "gc_trim")
        for device in (CUDA, CUDA_MANAGED)
    ),
    *((function, {"dst.device": CUDA}, INVALID_ARGUMENT, "dst") for function in INTO),
    ("gc_unpack_chunks", {"chunks[1].device": CUDA}, INVALID_ARGUMENT, "chunks[1]"),
    # counts and lengths
    ("gc_pack_chunks", {"n_chunks": 0}, INVALID_ARGUMENT, "n_chunks", 0),
    ("gc_pack_chunks", {"n_chunks": 2**61}, SIZE_OVERFLOW, 2**61),
    ("gc_pack_chunks", {"n_chunks": 2**64 - 1}, SIZE_OVERFLOW, 2**64 - 1),
    ("gc_unpack_chunks", {"n_chunks": 0}, INVALID_ARGUMENT, "n_chunks", 0),
    ("gc_unpack_chunks", {"n_chunks": 2**61}, SIZE_OVERFLOW, 2**61),
    ("gc_unpack_chunks", {"n_elements": -1}, INVALID_ARGUMENT, "n_elements", -1),
    ("gc_unpack_chunks", {"n_elements": -(2**63)}, INVALID_ARGUMENT, "n_elements", -(2**63)),
    ("gc_unpack_chunks", {"n_elements": 409}, SHAPE_MISMATCH, "chunks[0]", 409, 18, 17),
    ("gc_unpack_chunks", {"n_elements": 2**63 - 1}, SHAPE_MISMATCH, "chunks[0]", 2**63 - 1, 17),
    ("gc_unpack_chunks", {"chunks": None}, INVALID_ARGUMENT, "chunks", "NULL"),
    ("gc_unpack_chunks", {"chunks[1].shape": (16,)}, SHAPE_MISMATCH, "chunks[1]", 17, 16),
    ("gc_unpack_chunks", {"chunks[1].shape": (18,)}, SHAPE_MISMATCH, "chunks[1]", 17, 18),
    ("gc_unpack_chunks", {"chunks[2].shape": (1, 17)}, SHAPE_MISMATCH, "chunks[2]", 17),
    ("gc_unpack_chunks", {"chunks[2].shape": ()}, SHAPE_MISMATCH, "chunks[2]", 17),
    ("gc_unpack_bits", {"count": -81}, INVALID_ARGUMENT, "count", -81, 80),
    ("gc_unpack_bits", {"count": -(2**63) + 1}, INVALID_ARGUMENT, "count", -(2**63) + 1, 80),
    ("gc_unpack_bits", {"axis": AXIS_NONE, "count": -401}, INVALID_ARGUMENT, "count", -401, 400),
    ("gc_unpack_bits", {"count": 2**62}, SIZE_OVERFLOW, 2**62),
    ("gc_unpack_bits", {"count": 2**60}, OUT_OF_MEMORY, 5 * 2**60),
    ("gc_pack_chunks_into", {"dst.shape": (3, 16)}, SHAPE_MISMATCH, "dst", 17, 16, 400),
    ("gc_pack_chunks_into", {"dst.shape": (2, 17)}, SHAPE_MISMATCH, "dst", 25, 17, 400),
    ("gc_pack_chunks_into", {"dst.shape": (0, 17)}, INVALID_ARGUMENT, 0),
    ("gc_unpack_chunks_into", {"src.shape": (0, 17)}, INVALID_ARGUMENT, 0),
    ("gc_pack_chunks_into", {"dst.shape": (51,)}, SHAPE_MISMATCH, "dst", 51),
    ("gc_pack_chunks_into", {"dst.shape": (3, 17, 1)}, SHAPE_MISMATCH, "dst", 17),
    ("gc_pack_signs_into", {"dst.shape": (3, 16)}, SHAPE_MISMATCH, "dst", 17, 16, 400),
    ("gc_pack_signs_into", {"src.shape": (409,)}, SHAPE_MISMATCH, "dst", 18, 17, 409),
    ("gc_unpack_chunks_into", {"src.shape": (3, 16)}, SHAPE_MISMATCH, "src", 17, 16, 400),
    ("gc_unpack_chunks_into", {"src.shape": (51,)}, SHAPE_MISMATCH, "src", 51),
    ("gc_unpack_chunks_into", {"dst.shape": (5, 82)}, SHAPE_MISMATCH, "src", 18, 17, 410),
    ("gc_pack_bits_into", {"dst.shape": (5, 9)}, SHAPE_MISMATCH, "dst", 10, 9),
    ("gc_pack_bits_into", {"dst.shape": (4, 10)}, SHAPE_MISMATCH, "dst", 5, 4),
    ("gc_pack_bits_into", {"dst.shape": (50,)}, SHAPE_MISMATCH, "dst", 50),
    ("gc_pack_bits_into", {"axis": 0}, SHAPE_MISMATCH, "dst", 1, 80),
    ("gc_pack_bits_into", {"axis": AXIS_NONE}, SHAPE_MISMATCH, "dst", 50),
    ("gc_unpack_bits_into", {"dst.shape": (4, 80)}, SHAPE_MISMATCH, "dst", 5, 4),
    ("gc_unpack_bits_into", {"dst.shape": (400,)}, SHAPE_MISMATCH, "dst", 400),
    ("gc_unpack_bits_into", {"axis": 0}, SHAPE_MISMATCH, "dst", 10, 80),
    ("gc_unpack_bits_into", {"axis": AXIS_NONE}, SHAPE_MISMATCH, "dst", 5, 80),
    ("gc_pack_signs", {"n_chunks": 0}, INVALID_ARGUMENT, "n_chunks", 0),
    ("gc_pack_signs", {"n_chunks": 2**61}, SIZE_OVERFLOW, 2**61),
    ("gc_unpack_signs", {"n_chunks": 0}, INVALID_ARGUMENT, "n_chunks", 0),
    ("gc_unpack_signs", {"n_elements": -1}, INVALID_ARGUMENT, "n_elements", -1),
    ("gc_unpack_signs", {"n_elements": 409}, SHAPE_MISMATCH, "chunks[0]", 409, 18, 17),
    ("gc_unpack_signs", {"chunks[1].shape": (16,)}, SHAPE_MISMATCH, "chunks[1]", 17, 16),
    ("gc_unpack_signs", {"chunks[1].device": CUDA}, INVALID_ARGUMENT, "chunks[1]"),
    ("gc_unpack_signs_into", {"src.shape": (3, 16)}, SHAPE_MISMATCH, "src", 17, 16, 400),
    ("gc_unpack_signs_into", {"src.shape": (0, 17)}, INVALID_ARGUMENT, 0),
    ("gc_unpack_signs_into", {"scales.shape": (2,)}, SHAPE_MISMATCH, "scales", 2, 3),
    ("gc_unpack_signs_into", {"scales.shape": (0,)}, SHAPE_MISMATCH, "scales", 0, 3),
    ("gc_unpack_signs_into", {"scales.shape": (3, 1)}, SHAPE_MISMATCH, "scales", 3, 1),
    ("gc_unpack_signs_into", {"scales.shape": ()}, SHAPE_MISMATCH, "scales", 3),
    ("gc_unpack_signs_into", {"scales.device": CUDA}, INVALID_ARGUMENT, "scales"),
    ("gc_vote_signs_into", {"src.shape": (0, 17)}, INVALID_ARGUMENT, "src", 0),
    ("gc_vote_signs_into", {"src.shape": (0, 0), "dst.shape": (0,)}, INVALID_ARGUMENT, "src", 0),
    ("gc_vote_signs_into", {"src.shape": (17,)}, SHAPE_MISMATCH, "src", 17),
    ("gc_vote_signs_into", {"src.shape": (2, 2, 17)}, SHAPE_MISMATCH, "src", 2, 17),
    ("gc_vote_signs_into", {"src.shape": ()}, SHAPE_MISMATCH, "src"),
    ("gc_vote_signs_into", {"dst.shape": (16,)}, SHAPE_MISMATCH, "dst", 17, 16),
    ("gc_vote_signs_into", {"dst.shape": (1, 17)}, SHAPE_MISMATCH, "dst", 17, 1),
    # sizes that no machine has; a stride of 0 needs no memory
    *(
        (function, {f"{name}.shape": (2**40, 2**40)}, SIZE_OVERFLOW, name, 2**40)
        for function, names in TENSORS.items()
        for name in names
        if function not in ("gc_unpack_chunks", "gc_unpack_signs", *PASSING)
    ),
    *(
        (function, {f"{name}.shape": shape, f"{name}.strides": strides}, SIZE_OVERFLOW, name, 2**62)
        for function, name in [("gc_pack_chunks", "src"), ("gc_pack_bits", "src"), ("gc_unpack_bits", "src")]
        for shape, strides in [((5,), (2**62,)), ((5,), (-(2**62),))]
    ),
    *(
        (function, {"src.shape": (5,), "src.strides": (2**62,)}, SIZE_OVERFLOW, "src", 2**62)
        for function in ("gc_tensor_to_versioned", "gc_tensor_from_versioned")
    ),
    ("gc_pack_chunks", {"src.byte_offset": 2**64 - 1}, SIZE_OVERFLOW, "src", 2**64 - 1),
    ("gc_pack_chunks", {"src.shape": (2**62,), "src.strides": (0,)}, OUT_OF_MEMORY, 3 * -(-(2**59) // 3)),
    ("gc_pack_bits", {"src.shape": (2**62, 1), "src.strides": (0, 0)}, OUT_OF_MEMORY, 2**62),
    ("gc_tensor_empty", {"shape": [2**40, 2**40]}, SIZE_OVERFLOW, "shape", 2**40),
    ("gc_tensor_empty", {"shape": [1, 2**62]}, SIZE_OVERFLOW, "shape", 2**62),
    ("gc_tensor_empty", {"shape": [1, 2**60]}, OUT_OF_MEMORY, 2**62),
    # dtypes
    *(
        (function, {"src.dtype": dldtype(dtype)}, UNSUPPORTED_DTYPE, "src", dtype)
        for function in ("gc_pack_chunks", "gc_pack_bits", "gc_pack_chunks_into", "gc_pack_bits_into")
        for dtype in capi.FLOATS
    ),
    *(
        (function, {"src.dtype": dldtype(dtype)}, UNSUPPORTED_DTYPE, "src", dtype)
        for function in ("gc_pack_signs", "gc_pack_signs_into")
        for dtype in ("bool", *capi.INTEGERS)
    ),
    *(
        (function, {path: dldtype(dtype)}, UNSUPPORTED_DTYPE, name, dtype)
        for function, name, path in [
            ("gc_unpack_signs", "dtype", "dtype"), ("gc_unpack_signs_into", "dst", "dst.dtype"),
        ]
        for dtype in ("bool", "uint8", "uint16", "uint32", "uint64")
    ),
    ("gc_unpack_signs", {"dtype": DLDataType(2, 32, 2)}, UNSUPPORTED_DTYPE, "dtype", 2),
    *(
        ("gc_unpack_signs_into", {"dst.dtype": dldtype(dtype)}, UNSUPPORTED_DTYPE, "dst", "scales", dtype)
        for dtype in ("int8", "int16", "int32")
    ),
    *(
        ("gc_unpack_signs_into", {"scales.dtype": dldtype(dtype)}, UNSUPPORTED_DTYPE, "scales", dtype)
        for dtype in ("int32", "float16", "bfloat16", "uint8")
    ),
    *(
        (function, {f"{name}.dtype": dldtype(dtype)}, UNSUPPORTED_DTYPE, name, dtype)
        for function, name in [
            ("gc_unpack_chunks", "chunks[1]"), ("gc_unpack_bits", "src"), ("gc_unpack_bits_into", "src"),
            ("gc_unpack_chunks_into", "src"), ("gc_pack_chunks_into", "dst"), ("gc_pack_signs_into", "dst"),
            ("gc_pack_bits_into", "dst"), ("gc_unpack_signs", "chunks[1]"), ("gc_unpack_signs_into", "src"),
            ("gc_vote_signs_into", "src"), ("gc_vote_signs_into", "dst"),
        ]
        for dtype in ("bool", "int8", "uint16", "float32")
    ),
    # the packed side of chunks and signs is contiguous
    ("gc_pack_chunks_into", {"dst.strides": (1, 3)}, NOT_CONTIGUOUS, "dst", 1, 3),
    ("gc_pack_signs_into", {"dst.strides": (1, 3)}, NOT_CONTIGUOUS, "dst", 1, 3),
    ("gc_unpack_chunks_into", {"src.strides": (1, 3)}, NOT_CONTIGUOUS, "src", 1, 3),
    ("gc_unpack_chunks_into", {"src.strides": (-17, 1), "src.byte_offset": 34}, NOT_CONTIGUOUS, "src", -17),
    ("gc_unpack_chunks_into", {"src.strides": (0, 1)}, NOT_CONTIGUOUS, "src", 0),
    ("gc_unpack_signs_into", {"src.strides": (1, 3)}, NOT_CONTIGUOUS, "src", 1, 3),
    ("gc_unpack_signs_into", {"scales.strides": (2,)}, NOT_CONTIGUOUS, "scales", 2),
    ("gc_unpack_signs_into", {"scales.strides": (0,)}, NOT_CONTIGUOUS, "scales", 0),
    ("gc_vote_signs_into", {"src.strides": (1, 4)}, NOT_CONTIGUOUS, "src", 1, 4),
    ("gc_vote_signs_into", {"src.strides": (17, -1), "src.byte_offset": 16}, NOT_CONTIGUOUS, "src", -1),
    ("gc_vote_signs_into", {"dst.strides": (2,)}, NOT_CONTIGUOUS, "dst", 2),
    ("gc_unpack_signs_into", {"dst.data": At("scales", 8)}, INVALID_ARGUMENT, "dst", "scales"),
    # an output that lies on an input, by a byte at either end or in between its elements, or on itself
    *(
        (function, {"dst.data": At("src", offset)}, INVALID_ARGUMENT, "dst", "src")
        for function, source_bytes, target_bytes in [
            ("gc_pack_chunks_into", 400, 51), ("gc_unpack_chunks_into", 51, 400), ("gc_pack_signs_into", 1600, 51),
            ("gc_pack_bits_into", 400, 50), ("gc_unpack_bits_into", 50, 400), ("gc_unpack_signs_into", 51, 1600),
            ("gc_vote_signs_into", 68, 17),
        ]
        for offset in (0, source_bytes - 1, 1 - target_bytes)
    ),
    (
        "gc_pack_bits_into",
        {
            "src.shape": (5, 8), "src.strides": (16, 2),
            "dst.data": At("src", 1), "dst.shape": (5, 1), "dst.strides": (16, 2),
        },
        INVALID_ARGUMENT, "dst", "src",
    ),
    ("gc_unpack_chunks_into", {"dst.strides": (0,)}, INVALID_ARGUMENT, "dst", 0),
    ("gc_unpack_chunks_into", {"dst.shape": (20, 20), "dst.strides": (10, 1)}, INVALID_ARGUMENT, "dst", 10),
    ("gc_unpack_chunks_into", {"dst.shape": (20, 20), "dst.strides": (19, -1), "dst.byte_offset": 19},
     INVALID_ARGUMENT, "dst", 19, -1),
    ("gc_pack_bits_into", {"dst.strides": (0, 1)}, INVALID_ARGUMENT, "dst", 0),
    ("gc_pack_bits_into", {"dst.strides": (1, 1)}, INVALID_ARGUMENT, "dst", 1),
    ("gc_unpack_bits_into", {"dst.strides": (80, 0)}, INVALID_ARGUMENT, "dst", 0),
    # no two of these elements overlap, but to find that out takes too long; of the others there are more than places
    (
        "gc_unpack_chunks_into",
        {"src": elements(1, 2**14), "dst.shape": (2,) * 17, "dst.strides": TANGLED, "dst.data": FAR_AWAY},
        INVALID_ARGUMENT, "dst", "tangled", TANGLED[0],
    ),
    (
        "gc_unpack_chunks_into",
        {
            "src": elements(1, 2**14), "dst.shape": (2,) * 17, "dst.strides": tuple(s // 5 + 1 for s in TANGLED),
            "dst.data": FAR_AWAY,
        },
        INVALID_ARGUMENT, "dst", "one place",
    ),
    # tensors from nothing, from pointers, from and to the versioned form
    *(
        (function, {"ndim": -3}, INVALID_ARGUMENT, "ndim", -3)
        for function in ("gc_tensor_empty", "gc_tensor_from_pointer")
    ),
    *(
        (function, {"shape": None}, INVALID_ARGUMENT, "shape", "NULL")
        for function in ("gc_tensor_empty", "gc_tensor_from_pointer")
    ),
    *(
        (function, {"shape": [5, -17]}, INVALID_ARGUMENT, -17)
        for function in ("gc_tensor_empty", "gc_tensor_from_pointer")
    ),
    *(
        (function, {"device": DLDevice(ROCM, 0)}, UNSUPPORTED_DEVICE, "device", 10)
        for function in ("gc_tensor_empty", "gc_prepare", "gc_trim")
    ),
    *(
        (function, {"dtype": DLDataType(*dtype)}, UNSUPPORTED_DTYPE, word)
        for function in ("gc_tensor_empty", "gc_tensor_from_pointer")
        for dtype, word in [((1, 8, 0), 0), ((17, 0, 2), 0)]
    ),
    ("gc_tensor_from_pointer", {"data": None}, INVALID_ARGUMENT, "data", "NULL"),
    *(
        ("gc_builtin_kernels", {place: None}, INVALID_ARGUMENT, place, "NULL")
        for place in ("family", "fatbin", "size")
    ),
    ("gc_builtin_kernels", {"family": b""}, INVALID_ARGUMENT, "family", "bits"),
    ("gc_builtin_kernels", {"family": b"bit"}, INVALID_ARGUMENT, "family", "bit", "bits"),
    ("gc_builtin_kernels", {"family": b"bits\xff"}, INVALID_ARGUMENT, "family", r"bits\xff", "bits"),
    # However long it is, the families that there are have room behind it.
    ("gc_builtin_kernels", {"family": b"bits" * 100_000}, INVALID_ARGUMENT, "family", "bits" * 16, "bits"),
    *(("gc_builtin_kernel_shape", {place: None}, INVALID_ARGUMENT, place, "NULL") for place in ("kernel", "out")),
    *(
        ("gc_builtin_kernel_shape", {"kernel": kernel}, INVALID_ARGUMENT, "kernel", word)
        for kernel, word in [
            (b"gc_unpack_u9", "gc_unpack_u9"),
            (b"gc_pack_strided", "gc_pack_strided"),  # which is internal
            (b"\xf0\x28", r"\xf0("),
            (b"u" * 100_000, "u" * 64),
        ]
    ),
    *(
        ("gc_builtin_kernel_shape", {"out": Out(4, struct_size=size)}, INVALID_ARGUMENT, "out", "struct_size", size, 32)
        for size in (0, 4, 31, 33, 2**32 - 1)
    ),
    ("gc_tensor_from_pointer", {"shape": [2**40, 2**40], "strides": None}, SIZE_OVERFLOW, "shape", 2**40),
    ("gc_tensor_from_pointer", {"shape": [5, 5], "strides": [2**62, 1]}, SIZE_OVERFLOW, 2**62),
    *(("gc_set_threads", {"n": n}, INVALID_ARGUMENT, "n", n, 1024) for n in (1025, 2**32 - 1)),
    *(
        ("gc_builtin_kernel_shape", {"compute_capability": n}, UNSUPPORTED_DEVICE, said, "7.5")
        for n, said in [(74, "7.4"), (0, "0.0"), (-5, "-0.5"), (-(2**31), "-214748364.8")]
    ),
    ("gc_tensor_from_versioned", {"src.version": 2}, INVALID_ARGUMENT, "src", 2),
    ("gc_tensor_from_versioned", {"src.flags": READ_ONLY_FLAG}, Status.READ_ONLY, "src"),
    ("gc_tensor_from_versioned", {"src.flags": READ_ONLY_FLAG | 2 | 4}, Status.READ_ONLY, "src"),
    ("gc_tensor_from_versioned", {"src.flags": 4, "src.dtype": (17, 4, 1)}, UNSUPPORTED_DTYPE, "src", 4),
    ("gc_tensor_empty", {"shape": [2**60, 2], "dtype": DLDataType(5, 128, 4)}, SIZE_OVERFLOW, 2**60, 512),
]  # fmt: skip


def is_sentence(text):
    """One line in words: who and what, with nothing of the language it was written in."""
    return re.fullmatch(r"\S.{,498}\S", text) and not re.search(r"Some\(|Err\(|None|unwrap|panicked|[{}]|0x0\b", text)


@pytest.mark.parametrize("function", CALLS)
def test_the_calls_of_the_table_are_good_without_a_fault(function):
    arguments = CALLS[function]()
    check(getattr(lib, function)(*marshal(function, arguments)))
    if function == "gc_tensor_to_versioned":
        (out,) = arguments["out"].memory
        ctypes.cast(out, capi.Versioned).contents.deleter(ctypes.cast(out, capi.Versioned))
    elif "out" in arguments and function != "gc_builtin_kernel_shape":
        for out in arguments["out"].memory:
            lib.gc_tensor_free(ctypes.cast(out, Managed))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}-{row[1]}-{row[2].name}")
def test_a_refusal_says_what_was_wrong_and_changes_nothing(row):
    function, faults, status, *words = row
    released.clear()
    arguments = CALLS[function]()
    tensors, outs = list(tensors_in(arguments)), [v for v in arguments.values() if isinstance(v, Out)]
    for path, value in faults.items():
        put(arguments, path, value)
    before = [memory_of(tensor).copy() for tensor in tensors]

    got = getattr(lib, function)(*marshal(function, arguments))
    sentence = last_error()

    assert got == status, f"status {got}: {sentence}"
    assert is_sentence(sentence), sentence
    missing = [word for word in words if not says(sentence, word)]
    assert not missing, f"{missing} not in: {sentence}"
    assert all(out.untouched() for out in outs), "an output pointer was written"
    assert all(np.array_equal(memory_of(tensor), memory) for tensor, memory in zip(tensors, before)), "memory changed"
    assert not any(tensor.releases for tensor in tensors) and not released, "an input was released"


@pytest.mark.parametrize(
    "n_elements, n_chunks, words",
    [(8, 0, ("n_chunks", 0)), (0, 0, ("n_chunks", 0)), (-5, 3, ("n_elements", -5)), (-(2**63), 1, (-(2**63),))],
)
def test_chunk_bytes_that_cannot_be_are_minus_one(n_elements, n_chunks, words):
    assert lib.gc_chunk_bytes(n_elements, n_chunks) == -1
    assert is_sentence(last_error()) and says(last_error(), *words), last_error()


def test_the_last_error_is_the_threads_own_and_success_leaves_it_alone():
    assert lib.gc_chunk_bytes(-77, 1) == -1
    mine = last_error()
    seen = []

    def elsewhere():
        seen.append(last_error())
        lib.gc_chunk_bytes(-88, 1)
        seen.append(last_error())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert lib.gc_chunk_bytes(8, 1) == 1
    assert seen[0] == "" and says(seen[1], -88)
    assert last_error() == mine and says(mine, -77)


def test_every_status_has_a_name_of_its_own():
    names = {status: lib.gc_status_name(status).decode() for status in Status}
    assert all(status.name in name for status, name in names.items()), names
    assert len(set(names.values())) == len(Status)
    assert lib.gc_status_name(12345), "a code that does not exist has some text too"


def test_the_version_is_the_same_number_twice():
    packed = lib.gc_version()
    assert f"{packed >> 16}.{packed >> 8 & 0xFF}.{packed & 0xFF}" == lib.gc_version_string().decode().split("-")[0]
