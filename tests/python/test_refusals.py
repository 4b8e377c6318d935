"""Tests every function with every bad argument: the status, the message, and that nothing changed.

`CALLS` has a good call of each function. A row of the table puts a fault into a call, and has the expected status and
words of the message. These are the argument's name and the wrong number.
"""

import ctypes
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pytest

import capi
from capi import (
    AXIS_NONE, BIG, CPU, CUDA, CUDA_HOST, CUDA_MANAGED, READ_ONLY_FLAG, RELEASE, ROCM, DLDataType, DLDevice, Managed, Status,
    Tensor, VersionedTensor, c_uint8, c_uint32, c_uint64, check, dldtype, int64s, last_error, lib, says,
)  # fmt: skip

INVALID_ARGUMENT = Status.INVALID_ARGUMENT
UNSUPPORTED_DTYPE = Status.UNSUPPORTED_DTYPE
UNSUPPORTED_DEVICE = Status.UNSUPPORTED_DEVICE
SHAPE_MISMATCH = Status.SHAPE_MISMATCH
NOT_CONTIGUOUS = Status.NOT_CONTIGUOUS
SIZE_OVERFLOW = Status.SIZE_OVERFLOW
OUT_OF_MEMORY = Status.OUT_OF_MEMORY


def cuda_answer():
    """Returns the status for a CUDA tensor here: no driver, or (see conftest.py) one that shows no GPU."""
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
    """Address in another argument's memory, at an offset in bytes."""

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

    def untouched(self):
        return bytes(self.memory) == self.before


def elements(*shape, dtype="uint8"):
    """Returns a tensor amid memory of its own: a write beyond its elements is detected, and harms nothing."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(n_bytes + 2 * MARGIN, PATTERN, np.uint8)
    return Tensor(memory[MARGIN : MARGIN + n_bytes].view(dtype).reshape(shape))


def memory_of(tensor):
    return tensor.array if tensor.array.base is None else tensor.array.base


# --- a good call of each function -------------------------------------------------------------------------------------

def aligned(*shape):
    """Returns `elements`, at an address that payloads and states may have."""
    n_bytes = int(np.prod(shape))
    memory = np.full(n_bytes + 2 * MARGIN + 16, PATTERN, np.uint8)
    start = MARGIN + -(memory.ctypes.data + MARGIN) % 16
    return Tensor(memory[start : start + n_bytes].reshape(shape))


def options(**changed):
    """Returns options of two tensors, 100 and 5 by 60 elements, in 2 chunks, of which the codec reduces the second.

    A chunk: 64 + 8 bytes, padded to 80, and half of 51 bytes of bits, padded to 32: 112. The second chunk begins with
    byte 13 of the second tensor, which leaves 300 - 8 * 13 elements of it. The state: 64 + 16, padded to 256, and units
    of 4096 bytes, 1 + 1 of the encoder and 1 of the reducer."""
    sizes = int64s((100, 300))
    fields = dict(
        struct_size=ctypes.sizeof(capi.CodecOptions), codec=1, segments=sizes, n_segments=2, n_chunks=2, server=2,
    )  # fmt: skip
    made = capi.CodecOptions(**{**fields, **changed})
    made.sizes = sizes
    return made


PAYLOAD, CHUNK, STATE, PART = 224, 112, 256 + 3 * 4096, 300 - 8 * 13


class Handle:
    """Handle of this kind, which a function makes of these arguments, released with this object."""

    def __init__(self, kind, function, *arguments):
        self.pointer, self.release, self.kept = ctypes.POINTER(kind)(), FREES[kind], arguments
        check(function(*arguments, ctypes.byref(self.pointer)))

    def __del__(self):
        self.release(self.pointer)


FREES = {
    capi.DLManagedTensor: lib.gc_tensor_free, capi.DLManagedTensorVersioned: lib.gc_tensor_free_versioned,
    capi.Codec: lib.gc_codec_free, capi.Comm: lib.gc_comm_free, capi.AllReduce: lib.gc_allreduce_free,
    capi.Share: lib.gc_share_free, capi.Kernel: lib.gc_kernel_free,
}  # fmt: skip


def codec_of(**changed):
    return Handle(capi.Codec, lib.gc_codec_create, ctypes.byref(options(**changed)))


def sockets():
    """Returns both ends, which stay open until the process ends, so that no number is used again."""
    KEPT.append(socket.socketpair())
    return KEPT[-1]


KEPT = []


def lease(released=True):
    """Returns the lease of a tensor that was sent to `to`, and released there."""
    (one, other), out = sockets(), Managed()
    made = Handle(capi.Share, lib.gc_share_send, elements(4).managed, one.fileno(), 0, 0)
    made.to = other.fileno()
    if released:
        check(lib.gc_share_receive(made.to, DLDevice(CPU, 0), 0, ctypes.byref(out)))
        lib.gc_tensor_free(out)
    return made


def alone():
    """Returns a communicator that is alone in its world, over functions that are never called."""
    return Handle(capi.Comm, lib.gc_comm_from_transport, ctypes.byref(transport()))


def allreduce_of(**changed):
    """Returns an all-reduce of these options, but with a chunk for each rank, of which there is one."""
    comm = alone()
    return Handle(capi.AllReduce, lib.gc_allreduce_create, comm.pointer, ctypes.byref(options(**ALONE, **changed)))


ALONE = dict(n_chunks=0, server=0)
never = capi.EXCHANGE(lambda *_: 1 / 0)


def transport(**changed):
    fields = dict(struct_size=ctypes.sizeof(capi.Transport), world_size=1, all_to_all=never, all_gather=never)
    return capi.Transport(**{**fields, **changed})


def payload_of(codec, like):
    """Fills a tensor with a payload that the codec takes."""
    ones = [elements(100, dtype="float32"), elements(5, 60, dtype="float32")]
    whole = aligned(PAYLOAD)
    views = (capi.View * 2)(*(one.view for one in ones))
    check(lib.gc_codec_encode(codec.pointer, views, 2, None, None, whole.view, None))
    like.array.reshape(-1)[:] = whole.array[PAYLOAD - like.array.size :]
    return like


def payload_of_one():
    """Returns a payload of gc_encode()."""
    out = Managed()
    check(lib.gc_encode(floats(5, 80).managed, 5, ctypes.byref(out)))
    view = out.contents.dl_tensor
    made = aligned(view.shape[0])
    ctypes.memmove(made.array.ctypes.data, view.data, view.shape[0])
    lib.gc_tensor_free(out)
    return made


def state_of(codec, like):
    check(lib.gc_codec_state_out(codec.pointer, like.view, None))
    return like


def floats(*shape):
    return elements(*shape, dtype="float32")


TRANSACTIONAL = dict(nonfinite=2)
CODEC_CALLS = {
    "gc_encode": lambda: dict(values=floats(5, 80), codec=5, payload=Out()),
    "gc_decode": lambda: dict(payload=payload_of_one(), dtype=DLDataType(2, 32, 1), values=Out()),
    "gc_codec_create": lambda: dict(options=options(), out=Out()),
    "gc_codec_encode": lambda: dict(
        codec=codec_of(), values=[floats(100), floats(5, 60)], n_values=2, value_factor=floats(1),
        error_factor=floats(1), payload=aligned(PAYLOAD), stream=None,
    ),
    "gc_codec_decode": lambda: dict(
        codec=(codec := codec_of()), payload=payload_of(codec, aligned(PAYLOAD)), divisor=2, factor=floats(1), mode=0,
        values=[floats(100), floats(5, 60)], n_values=2, stream=None,
    ),
    "gc_codec_reduce": lambda: dict(
        codec=(codec := codec_of()), chunk=1, chunks=payload_of(codec, aligned(1, CHUNK)), dst=aligned(CHUNK),
        stream=None,
    ),
    "gc_codec_flags": lambda: dict(codec=codec_of(), dst=elements(1, dtype="uint32"), stream=None),
    "gc_codec_scales": lambda: dict(codec=codec_of(), dst=floats(2), stream=None),
    "gc_codec_commit": lambda: dict(codec=codec_of(**TRANSACTIONAL), skip=elements(1, dtype="int32"), stream=None),
    "gc_codec_rollback": lambda: dict(codec=codec_of(**TRANSACTIONAL), stream=None),
    "gc_codec_reset": lambda: dict(codec=codec_of(), stream=None),
    "gc_codec_state_out": lambda: dict(codec=codec_of(), dst=aligned(STATE), stream=None),
    "gc_codec_state_in": lambda: dict(codec=(codec := codec_of()), src=state_of(codec, aligned(STATE)), stream=None),
    "gc_codec_errors_out": lambda: dict(codec=codec_of(), worker=floats(400), server=floats(PART), stream=None),
    "gc_codec_errors_in": lambda: dict(codec=codec_of(), worker=floats(400), server=floats(PART), stream=None),
}  # fmt: skip

COMM_CALLS = {
    "gc_comm_from_transport": lambda: dict(transport=transport(), out=Out()),
    "gc_comm_group": lambda: dict(world_size=2, out=Out(2)),
    "gc_comm_hierarchical": lambda: dict(intra_node=alone(), inter_node=alone(), out=Out()),
    "gc_comm_async_error": lambda: dict(comm=alone()),
    "gc_comm_abort": lambda: dict(comm=alone()),
    "gc_allreduce_create": lambda: dict(comm=alone(), options=options(**ALONE), out=Out()),
    "gc_allreduce_run": lambda: dict(
        allreduce=allreduce_of(), values=[floats(100), floats(5, 60)], n_values=2, value_factor=floats(1),
        error_factor=floats(1), stream=None,
    ),
    "gc_allreduce_reduce_scatter": lambda: dict(
        allreduce=allreduce_of(), values=[floats(100), floats(5, 60)], n_values=2, value_factor=floats(1),
        error_factor=floats(1), shard=floats(400), stream=None,
    ),
    "gc_allreduce_all_gather": lambda: dict(
        allreduce=allreduce_of(), shard=floats(400), values=[floats(100), floats(5, 60)], n_values=2, stream=None
    ),
    "gc_allreduce_flags": lambda: dict(allreduce=allreduce_of(), dst=elements(1, dtype="uint32"), stream=None),
    "gc_allreduce_commit": lambda: dict(
        allreduce=allreduce_of(**TRANSACTIONAL), skip=elements(1, dtype="int32"), stream=None
    ),
    "gc_allreduce_rollback": lambda: dict(allreduce=allreduce_of(**TRANSACTIONAL), stream=None),
    "gc_allreduce_reset": lambda: dict(allreduce=allreduce_of(), stream=None),
    "gc_allreduce_errors_out": lambda: dict(
        allreduce=allreduce_of(), worker=floats(400), server=floats(400), stream=None
    ),
    "gc_allreduce_errors_in": lambda: dict(
        allreduce=allreduce_of(), workers=floats(3, 400), server=floats(400), stream=None
    ),
}  # fmt: skip

def elementwise_options(**changed):
    fields = dict(struct_size=ctypes.sizeof(capi.ElementwiseOptions), inputs=b"T x", outputs=b"T y", operation=b"y = x")
    return capi.ElementwiseOptions(**{**fields, **changed})


def reduction_options(**changed):
    fields = dict(
        struct_size=ctypes.sizeof(capi.ReductionOptions), inputs=b"T x", outputs=b"T y", map=b"x", reduce=b"a + b",
        post_map=b"y = a", identity=b"0",
    )  # fmt: skip
    return capi.ReductionOptions(**{**fields, **changed})


def run_options(axes=None, **changed):
    numbers = None if axes is None else (ctypes.c_int32 * max(1, len(axes)))(*axes)
    fields = dict(struct_size=ctypes.sizeof(capi.RunOptions), axes=numbers, n_axes=len(axes or ()))
    made = capi.RunOptions(**{**fields, **changed})
    made.numbers = numbers
    return made


def compiled(given=None):
    """Returns a kernel of these options, which is compiled when it is run."""
    given = given or elementwise_options()
    elementwise = isinstance(given, capi.ElementwiseOptions)
    create = lib.gc_elementwise_create if elementwise else lib.gc_reduction_create
    return Handle(capi.Kernel, create, ctypes.byref(given))


def kernel_call(stream=True, **options):
    """Returns a call for a GPU that need not be here; the call checks all but devices."""
    call = dict(
        kernel=compiled(), inputs=[floats(5, 80)], n_inputs=1, outputs=[floats(5, 80)], n_outputs=1,
        options=run_options(**options),
    )  # fmt: skip
    return {**call, "stream": None} if stream else call


KERNEL_CALLS = {
    "gc_elementwise_create": lambda: dict(options=elementwise_options(), out=Out()),
    "gc_reduction_create": lambda: dict(options=reduction_options(), out=Out()),
    "gc_kernel_log": lambda: dict(kernel=compiled(), log=Out()),
}

def of_int8(**fields):
    return capi.CodecOptions(**dict(struct_size=ctypes.sizeof(capi.CodecOptions), codec=5, n_elements=100) | fields)


# Calls that return -1 if they are refused; and calls that succeed with a GPU, or a compiler.
ELSEWHERE = {
    "gc_chunk_bytes": lambda: dict(n_elements=8, n_chunks=1),
    "gc_kernel_workspace_bytes": lambda: kernel_call(stream=False, capability=90),
    "gc_codec_payload_bytes": lambda: dict(codec=codec_of()),
    "gc_codec_state_bytes": lambda: dict(codec=codec_of()),
    "gc_codec_exchanges": lambda: dict(codec=codec_of()),
    "gc_comm_rank": lambda: dict(comm=alone()),
    "gc_comm_world_size": lambda: dict(comm=alone()),
    "gc_allreduce_shard_elements": lambda: dict(allreduce=allreduce_of()),
    "gc_allreduce_exchanges": lambda: dict(allreduce=allreduce_of()),
    "gc_allreduce_sent_bytes": lambda: dict(allreduce=allreduce_of(), between_nodes=None),
    "gc_allreduce_parts": lambda: dict(allreduce=allreduce_of(), rank=0, which=0, parts=Out(3), room=1),
    "gc_allreduce_peers_bytes": lambda: dict(options=of_int8(), world_size=2, nodes=1),
    "gc_kernel_run": lambda: kernel_call(),
    "gc_kernel_prepare": lambda: kernel_call(capability=90),
}

NUMBERS = [name for name in ELSEWHERE if name not in ("gc_kernel_run", "gc_kernel_prepare")]

# Arguments in the order of the header. 400 elements are 50 bytes: 3 chunks of 17.
CALLS = {
    **KERNEL_CALLS,
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
    "gc_copy_into": lambda: dict(src=elements(5, 80), dst=elements(3, 5, 80, dtype="float32"), stream=None),
    "gc_tensor_to_device": lambda: dict(src=elements(5, 80), device=DLDevice(CPU, 0), out=Out()),
    **CODEC_CALLS,
    **COMM_CALLS,
    "gc_tensor_empty": lambda: dict(
        device=DLDevice(CPU, 0), dtype=dldtype("int32"), ndim=2, shape=[5, 80], out=Out()
    ),
    "gc_tensor_from_pointer": lambda: dict(
        data=elements(400), device=DLDevice(CPU, 0), dtype=dldtype("uint8"), ndim=2, shape=[5, 80], strides=[80, 1],
        release=RELEASE(released.append), ctx=None, out=Out(),
    ),
    "gc_tensor_to_versioned": lambda: dict(src=elements(400), out=Out()),
    "gc_tensor_from_versioned": lambda: dict(src=VersionedTensor(np.full(400, PATTERN, np.uint8)), out=Out()),
    "gc_share_send": lambda: dict(
        tensor=elements(5, 80), socket=sockets()[0].fileno(), flags=1, timeout_ms=0, lease=Out()
    ),
    "gc_share_wait": lambda: dict(lease=lease(), timeout_ms=0),
    "gc_share_receive": lambda: dict(socket=lease(released=False).to, device=DLDevice(CPU, 0), timeout_ms=0, out=Out()),
    "gc_set_threads": lambda: dict(n=0),
    "gc_prepare": lambda: dict(device=DLDevice(CPU, 0)),
    "gc_trim": lambda: dict(device=DLDevice(CPU, 0)),
    "gc_builtin_kernels": lambda: dict(family=b"bits", fatbin=Out(), size=Out()),
    "gc_builtin_kernel_shape": lambda: dict(
        kernel=b"gc_unpack_u8", compute_capability=75, out=Out(4, struct_size=32)
    ),
}  # fmt: skip

released = []  # filled by gc_tensor_from_pointer's callback


def set_field(tensor, field, value):
    """Puts a fault into a tensor's description; a shape sets ndim and compact strides, too."""
    view = tensor.struct.dl_tensor
    if field == "shape" and isinstance(value, tuple):
        view.ndim, view.shape, view.strides = len(value), int64s(value), None
    elif field == "dtype":
        view.dtype = value if isinstance(value, DLDataType) else DLDataType(*value)
    elif field == "device":
        view.device = DLDevice(value, 0)
    elif field in ("version", "flags"):
        setattr(*(tensor.struct.version, "major") if field == "version" else (tensor.struct, field), value)
    else:
        setattr(view, field, int64s(value) if isinstance(value, tuple) else value)


def put(arguments, path, value):
    """Puts a value into arguments. `path`: src, src.shape, chunks[1], chunks[1].shape, ..."""
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
            case Handle():
                return value.pointer
            case capi.CodecOptions() | capi.Transport():
                return ctypes.pointer(value)
            case capi.ElementwiseOptions() | capi.ReductionOptions() | capi.RunOptions():
                return ctypes.pointer(value)
            case bytes() if kind is ctypes.c_void_p:
                return ctypes.cast(ctypes.c_char_p(value), kind)
            case [*views] if kind is ctypes.POINTER(capi.View):
                return (capi.View * len(views))(*(view and view.view for view in views))
            case [*chunks] if kind is ctypes.POINTER(Managed):
                return capi.managed_array(chunks)
            case [*numbers]:
                return int64s(numbers)
            case _:
                return value

    return [as_c(value, kind) for value, kind in zip(arguments.values(), capi.declared.FUNCTIONS[function][1], strict=True)]


def tensors_in(arguments):
    for value in arguments.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, (Tensor, VersionedTensor)):
                yield item


# --- the table --------------------------------------------------------------------------------------------------------

FAR_AWAY = 2**40  # the memory does not exist, so a call that reads it before it refuses its arguments crashes
UNALIGNED = ctypes.cast(FAR_AWAY + 1, ctypes.POINTER(ctypes.c_int64))

# Faults of any tensor argument.
TENSOR_FAULTS = [
    ({"": None}, INVALID_ARGUMENT, "NULL"),
    ({".data": None}, INVALID_ARGUMENT, "NULL"),
    ({".shape": None}, INVALID_ARGUMENT, "NULL"),
    ({".ndim": -3}, INVALID_ARGUMENT, "-3"),
    ({".shape": (-17, 17)}, INVALID_ARGUMENT, "-17"),
    ({".shape": UNALIGNED}, INVALID_ARGUMENT, "unaligned"),
    ({".strides": UNALIGNED}, INVALID_ARGUMENT, "strides", "not aligned"),
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
    "gc_copy_into": ["src", "dst"],
    "gc_tensor_to_device": ["src"],
    "gc_encode": ["values"],
    "gc_decode": ["payload"],
    "gc_tensor_to_versioned": ["src"],
    "gc_tensor_from_versioned": ["src"],
}

CODEC_TENSORS = {
    "gc_codec_encode": ["values[0]", "values[1]", "payload", "value_factor", "error_factor"],
    "gc_codec_decode": ["values[0]", "values[1]", "payload", "factor"],
    "gc_codec_reduce": ["chunks", "dst"],
    "gc_codec_flags": ["dst"],
    "gc_codec_scales": ["dst"],
    "gc_codec_commit": ["skip"],
    "gc_codec_state_out": ["dst"],
    "gc_codec_state_in": ["src"],
    "gc_codec_errors_out": ["worker", "server"],
    "gc_codec_errors_in": ["worker", "server"],
    "gc_allreduce_run": ["values[0]", "values[1]", "value_factor", "error_factor"],
    "gc_allreduce_reduce_scatter": ["values[0]", "values[1]", "shard", "value_factor", "error_factor"],
    "gc_allreduce_all_gather": ["values[0]", "values[1]", "shard"],
    "gc_allreduce_flags": ["dst"],
    "gc_allreduce_commit": ["skip"],
    "gc_allreduce_errors_out": ["worker", "server"],
    "gc_allreduce_errors_in": ["workers", "server"],
}
EACH_CODEC_TENSOR = [(function, name) for function, names in CODEC_TENSORS.items() for name in names]
EACH_TENSOR = [(function, name) for function, names in TENSORS.items() for name in names] + EACH_CODEC_TENSOR
OPTIONAL = ("scales", "value_factor", "error_factor", "factor", "skip", "worker", "workers", "server")  # may be NULL
# A tensor argument of each kind: a tensor, a tensor in a list, the versioned form, a view, a view in a list, an
# optional view. These get every fault, and all others a few.
EACH_WAY = [
    ("gc_pack_chunks", "src"), ("gc_unpack_chunks", "chunks[2]"), ("gc_tensor_from_versioned", "src"),
    ("gc_copy_into", "dst"), ("gc_codec_encode", "values[1]"), ("gc_codec_errors_in", "server"),
]  # fmt: skip
PASSING = ("gc_tensor_to_versioned", "gc_tensor_from_versioned")  # these functions do not read the elements


def faults_of(function, name):
    """Returns the faults with which this tensor of a function is tested."""
    of_device = [row for row in ELEMENT_FAULTS if ".device" in row[0]]
    of_elements = {"gc_tensor_to_device": of_device, **dict.fromkeys(PASSING, [])}.get(function, ELEMENT_FAULTS)
    few = {"": None}, {".ndim": -3}, {".dtype": (1, 8, 2)}, {".device": ROCM}
    faults = [row for row in TENSOR_FAULTS + of_elements if row[0] in few or (function, name) in EACH_WAY]
    return faults[name in OPTIONAL :]  # the first fault is NULL


OF_CODECS = [name for name in CODEC_CALLS if isinstance(CODEC_CALLS[name]().get("codec"), Handle)]
def pointers_of(function):
    """Returns the pointer arguments that need an alignment: handles, descriptors, options, outputs."""
    call = {**CALLS, **ELSEWHERE}[function]()
    kinds = dict(zip(call, capi.declared.FUNCTIONS[function][1], strict=True))
    return [name for name, kind in kinds.items() if hasattr(kind, "contents") and ctypes.alignment(kind._type_) > 1]


# Arguments that may be NULL, but for tensors.
NULL_IS_NONE = [
    ("gc_share_send", "lease"), ("gc_tensor_from_pointer", "strides"), ("gc_comm_hierarchical", "inter_node"),
    ("gc_allreduce_sent_bytes", "between_nodes"),
    *((f"gc_kernel_{call}", "options") for call in ("run", "prepare", "workspace_bytes")),
]  # fmt: skip

WITH_AXIS = [name for name, make in CALLS.items() if "axis" in make()]
WITH_ORDER = [name for name, make in CALLS.items() if "order" in make()]
INTO = [name for name, make in CALLS.items() if "dst" in make()]


def conway_guy(count):
    """Returns strides whose 2^count partial sums all differ, though none is wider than the narrower ones together."""
    bounds = [0, 1]
    for n in range(1, count):
        bounds.append(2 * bounds[n] - bounds[n - int(0.5 + (2 * n) ** 0.5)])
    return tuple(bounds[count] - bounds[count - 1 - k] for k in range(count))


TANGLED = conway_guy(17)
assert len({sum(s for k, s in enumerate(TANGLED) if i >> k & 1) for i in range(2**17)}) == 2**17

TABLE = [
    # every tensor, every output, every axis and every order of every function
    *(
        (function, {name + path: value for path, value in fault.items()}, status, name, *words)
        for function, name in EACH_TENSOR
        for fault, status, *words in faults_of(function, name)
    ),
    *(
        (function, {name: None}, -1 if function in NUMBERS else INVALID_ARGUMENT, name, "NULL")
        for function in {**CALLS, **ELSEWHERE}
        for name in pointers_of(function)
        if name not in OPTIONAL and (function, name) not in NULL_IS_NONE
    ),
    *((function, {"order": order}, INVALID_ARGUMENT, "order", order) for function in WITH_ORDER for order in (2, -1)),
    *(
        (function, {"axis": axis}, INVALID_ARGUMENT, "axis", axis)
        for function in WITH_AXIS
        for axis in (2, -3, 2**31 - 1, AXIS_NONE + 1)
    ),
    # devices: CUDA where no GPU is shown, and tensors on different ones
    *(
        (function, {f"{name}.device": device for name in dict.fromkeys(n.partition("[")[0] for n in names)}, NO_CUDA)
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
    *((function, {"dst.device": CUDA}, INVALID_ARGUMENT, "dst") for function in INTO if function != "gc_copy_into"),
    *(("gc_copy_into", {f"{name}.device": CUDA}, NO_CUDA) for name in ("src", "dst")),
    *(("gc_tensor_to_device", {"device": DLDevice(CUDA, 0), **more}, NO_CUDA) for more in ({}, {"src.device": CUDA})),
    *(
        ("gc_tensor_to_device", {"device": DLDevice(device, 0)}, UNSUPPORTED_DEVICE, "device", device)
        for device in (CUDA_HOST, CUDA_MANAGED, ROCM)
    ),
    ("gc_unpack_chunks", {"chunks[1].device": CUDA}, INVALID_ARGUMENT, "chunks[1]"),
    # counts and lengths
    ("gc_pack_chunks", {"n_chunks": 0}, INVALID_ARGUMENT, "n_chunks", 0),
    ("gc_pack_chunks", {"n_chunks": 2**64 - 1}, SIZE_OVERFLOW, 2**64 - 1),
    ("gc_unpack_chunks", {"n_chunks": 0}, INVALID_ARGUMENT, "n_chunks", 0),
    ("gc_unpack_chunks", {"n_chunks": 2**61}, SIZE_OVERFLOW, 2**61),
    ("gc_unpack_chunks", {"n_elements": -1}, INVALID_ARGUMENT, "n_elements", -1),
    ("gc_unpack_chunks", {"n_elements": 409}, SHAPE_MISMATCH, "chunks[0]", 409, 18, 17),
    ("gc_unpack_chunks", {"n_elements": 2**63 - 1}, SHAPE_MISMATCH, "chunks[0]", 2**63 - 1, 17),
    ("gc_unpack_chunks", {"chunks[1].shape": (16,)}, SHAPE_MISMATCH, "chunks[1]", 17, 16),
    ("gc_unpack_chunks", {"chunks[2].shape": (1, 17)}, SHAPE_MISMATCH, "chunks[2]", 17),
    ("gc_unpack_chunks", {"chunks[2].shape": ()}, SHAPE_MISMATCH, "chunks[2]", 17),
    ("gc_unpack_bits", {"count": -81}, INVALID_ARGUMENT, "count", -81, 80),
    ("gc_unpack_bits", {"axis": AXIS_NONE, "count": -401}, INVALID_ARGUMENT, "count", -401, 400),
    ("gc_unpack_bits", {"count": 2**62}, SIZE_OVERFLOW, 2**62),
    ("gc_unpack_bits", {"count": 2**60}, OUT_OF_MEMORY, 5 * 2**60),
    ("gc_pack_chunks_into", {"dst.shape": (3, 16)}, SHAPE_MISMATCH, "dst", 17, 16, 400),
    ("gc_pack_chunks_into", {"dst.shape": (2, 17)}, SHAPE_MISMATCH, "dst", 25, 17, 400),
    ("gc_pack_chunks_into", {"dst.shape": (0, 17)}, INVALID_ARGUMENT, 0),
    ("gc_unpack_chunks_into", {"src.shape": (0, 17)}, INVALID_ARGUMENT, 0),
    ("gc_pack_chunks_into", {"dst.shape": (3, 17, 1)}, SHAPE_MISMATCH, "dst", 17),
    ("gc_pack_signs_into", {"dst.shape": (3, 16)}, SHAPE_MISMATCH, "dst", 17, 16, 400),
    ("gc_unpack_chunks_into", {"src.shape": (3, 16)}, SHAPE_MISMATCH, "src", 17, 16, 400),
    ("gc_unpack_chunks_into", {"dst.shape": (5, 82)}, SHAPE_MISMATCH, "src", 18, 17, 410),
    ("gc_pack_bits_into", {"dst.shape": (5, 9)}, SHAPE_MISMATCH, "dst", 10, 9),
    ("gc_pack_bits_into", {"dst.shape": (4, 10)}, SHAPE_MISMATCH, "dst", 5, 4),
    ("gc_pack_bits_into", {"axis": 0}, SHAPE_MISMATCH, "dst", 1, 80),
    ("gc_pack_bits_into", {"axis": AXIS_NONE}, SHAPE_MISMATCH, "dst", 50),
    ("gc_unpack_bits_into", {"dst.shape": (4, 80)}, SHAPE_MISMATCH, "dst", 5, 4),
    ("gc_unpack_bits_into", {"axis": 0}, SHAPE_MISMATCH, "dst", 10, 80),
    ("gc_unpack_bits_into", {"axis": AXIS_NONE}, SHAPE_MISMATCH, "dst", 5, 80),
    ("gc_pack_signs", {"n_chunks": 0}, INVALID_ARGUMENT, "n_chunks", 0),
    ("gc_unpack_signs", {"n_chunks": 0}, INVALID_ARGUMENT, "n_chunks", 0),
    ("gc_unpack_signs", {"n_elements": 409}, SHAPE_MISMATCH, "chunks[0]", 409, 18, 17),
    ("gc_unpack_signs", {"n_elements": -1}, INVALID_ARGUMENT, "n_elements", -1),
    ("gc_unpack_signs", {"chunks[1].shape": (16,)}, SHAPE_MISMATCH, "chunks[1]", 17, 16),
    ("gc_unpack_signs", {"chunks[1].device": CUDA}, INVALID_ARGUMENT, "chunks[1]"),
    ("gc_unpack_signs_into", {"src.shape": (3, 16)}, SHAPE_MISMATCH, "src", 17, 16, 400),
    ("gc_unpack_signs_into", {"src.shape": (0, 17)}, INVALID_ARGUMENT, 0),
    ("gc_unpack_signs_into", {"scales.shape": (2,)}, SHAPE_MISMATCH, "scales", 2, 3),
    ("gc_unpack_signs_into", {"scales.shape": ()}, SHAPE_MISMATCH, "scales", 3),
    ("gc_unpack_signs_into", {"scales.device": CUDA}, INVALID_ARGUMENT, "scales"),
    ("gc_vote_signs_into", {"src.shape": (0, 17)}, INVALID_ARGUMENT, "src", 0),
    ("gc_vote_signs_into", {"src.shape": (0, 0), "dst.shape": (0,)}, INVALID_ARGUMENT, "src", 0),
    ("gc_vote_signs_into", {"src.shape": (2, 2, 17)}, SHAPE_MISMATCH, "src", 2, 17),
    ("gc_vote_signs_into", {"src.shape": ()}, SHAPE_MISMATCH, "src"),
    ("gc_vote_signs_into", {"dst.shape": (16,)}, SHAPE_MISMATCH, "dst", 17, 16),
    ("gc_vote_signs_into", {"dst.shape": (1, 17)}, SHAPE_MISMATCH, "dst", 17, 1),
    # shapes that cannot be broadcast; dtypes that cannot be cast; elements that share bytes
    *(
        ("gc_copy_into", {"src.shape": shape}, SHAPE_MISMATCH, "src", "dst", shape[0], 3, 80)
        for shape in ((4, 80), (2, 5, 80), (79,), (0,), (5, 1, 80), (2, 1, 5, 80))
    ),
    ("gc_copy_into", {"dst.shape": ()}, SHAPE_MISMATCH, "src", "dst", 5, 80),
    ("gc_copy_into", {"dst.shape": (5, 1)}, SHAPE_MISMATCH, "src", 80, 1),
    ("gc_copy_into", {"src.shape": (3, 0, 80), "dst.shape": (3, 1, 80)}, SHAPE_MISMATCH, "src", 0, 1),
    *(
        ("gc_copy_into", {"src.dtype": source, "dst.dtype": target}, UNSUPPORTED_DTYPE, "src", "dst", *words)
        for source, target, words in [
            ((5, 64, 1), (2, 32, 1), ("float32", 5, 64)),
            ((2, 32, 1), (5, 64, 1), ("float32", 5, 64)),
            ((5, 64, 1), (5, 128, 1), (64, 128)),
            ((10, 8, 1), (2, 32, 1), (10, "float32")),
            ((2, 16, 2), (2, 32, 1), ("float32", 16, 2)),
            ((1, 4, 1), (1, 8, 1), (4, "uint8")),
        ]
    ),
    *(
        ("gc_copy_into", {"src.dtype": (1, bits, 1), "dst.dtype": (1, bits, 1), **more}, status, name, bits)
        for bits in (1, 4, 12)
        for more, status, name in [
            ({}, SHAPE_MISMATCH, "src"),
            ({"dst.shape": (5, 80), "dst.strides": (81, 1)}, NOT_CONTIGUOUS, "dst"),
            ({"dst.shape": (5, 80), "src.strides": (1, 5)}, NOT_CONTIGUOUS, "src"),
        ]
    ),
    ("gc_tensor_to_device", {"src.dtype": (1, 4, 1), "src.strides": (1, 5)}, NOT_CONTIGUOUS, "src", 4, 1, 5),
    ("gc_tensor_to_device", {"src.shape": (2**62, 1), "src.strides": (0, 0)}, OUT_OF_MEMORY, 2**62),
    ("gc_tensor_to_device", {"src.shape": (2**62, 1), "src.strides": (0, 0), "src.device": CUDA}, NO_CUDA),
    ("gc_tensor_to_device", {"src.dtype": (5, 64, 1), "src.shape": (2**61,), "src.strides": (0,)}, SIZE_OVERFLOW, "src", 2**61),
    ("gc_copy_into", {"dst.dtype": dldtype("float64"), "dst.shape": (2,), "dst.strides": (2**60,), "src.shape": ()},
     SIZE_OVERFLOW, "dst", 2**60),
    ("gc_copy_into", {"src.dtype": dldtype("float64"), "src.shape": (2,), "src.strides": (2**60,)},
     SIZE_OVERFLOW, "src", 2**60),
    ("gc_copy_into", {"dst.strides": (400, 80, 0)}, INVALID_ARGUMENT, "dst", 0),
    ("gc_copy_into", {"dst.shape": (5, 80), "dst.strides": (40, 1)}, INVALID_ARGUMENT, "dst", 40),
    ("gc_copy_into", {"src.shape": (), "dst.shape": (2,) * 17, "dst.strides": TANGLED, "dst.data": FAR_AWAY},
     INVALID_ARGUMENT, "dst", "interleaved"),
    # equal memory, but other elements
    *(
        ("gc_copy_into", {"src.dtype": dldtype("float32"), "dst.data": At("src", 0), "dst.shape": (5, 80), **more},
         INVALID_ARGUMENT, "dst", "src")
        for more in [
            {"dst.strides": (1, 5)}, {"src.dtype": dldtype("int32")}, {"dst.byte_offset": 4}, {"dst.shape": (3, 5, 80)},
            {"src.shape": (80,)}, {"src.dtype": dldtype("float64")}, {"src.strides": (160, 2)},
        ]
    ),
    # sizes that no machine has; a stride of 0 needs no memory
    *(
        (function, {f"{name}.shape": (2**40, 2**40)}, SIZE_OVERFLOW, name, 2**40)
        for function, name in EACH_TENSOR
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
        for dtype in ("float32", "bfloat16")
    ),
    *(
        (function, {"src.dtype": dldtype(dtype)}, UNSUPPORTED_DTYPE, "src", dtype)
        for function in ("gc_pack_signs", "gc_pack_signs_into")
        for dtype in ("bool", "int8", "uint64")
    ),
    *(
        (function, {path: dldtype(dtype)}, UNSUPPORTED_DTYPE, name, dtype)
        for function, name, path in [
            ("gc_unpack_signs", "dtype", "dtype"), ("gc_unpack_signs_into", "dst", "dst.dtype"),
        ]
        for dtype in ("bool", "uint8", "uint64")
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
        for dtype in ("bool", "int8")
    ),
    # the packed side of chunks and signs is contiguous
    ("gc_pack_chunks_into", {"dst.strides": (1, 3)}, NOT_CONTIGUOUS, "dst", 1, 3),
    ("gc_pack_signs_into", {"dst.strides": (1, 3)}, NOT_CONTIGUOUS, "dst", 1, 3),
    ("gc_unpack_chunks_into", {"src.strides": (1, 3)}, NOT_CONTIGUOUS, "src", 1, 3),
    ("gc_unpack_chunks_into", {"src.strides": (-17, 1), "src.byte_offset": 34}, NOT_CONTIGUOUS, "src", -17),
    ("gc_unpack_signs_into", {"src.strides": (1, 3)}, NOT_CONTIGUOUS, "src", 1, 3),
    ("gc_unpack_signs_into", {"scales.strides": (2,)}, NOT_CONTIGUOUS, "scales", 2),
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
            ("gc_vote_signs_into", 68, 17), ("gc_copy_into", 400, 4800),
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
    ("gc_pack_bits_into", {"dst.strides": (1, 1)}, INVALID_ARGUMENT, "dst", 1),
    ("gc_unpack_bits_into", {"dst.strides": (80, 0)}, INVALID_ARGUMENT, "dst", 0),
    # no two of these elements overlap, but the check takes too long; the second tensor has more elements than places
    (
        "gc_unpack_chunks_into",
        {"src": elements(1, 2**14), "dst.shape": (2,) * 17, "dst.strides": TANGLED, "dst.data": FAR_AWAY},
        INVALID_ARGUMENT, "dst", "interleaved", TANGLED[0],
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
    ("gc_builtin_kernels", {"family": None}, INVALID_ARGUMENT, "family", "NULL"),
    ("gc_builtin_kernels", {"family": b""}, INVALID_ARGUMENT, "family", "bits"),
    ("gc_builtin_kernels", {"family": b"bit"}, INVALID_ARGUMENT, "family", "bit", "bits"),
    ("gc_builtin_kernels", {"family": b"bits\xff"}, INVALID_ARGUMENT, "family", r"bits\xff", "bits"),
    # The families that exist have room behind a name of any length.
    ("gc_builtin_kernels", {"family": b"bits" * 100_000}, INVALID_ARGUMENT, "family", "bits" * 16, "bits"),
    ("gc_builtin_kernel_shape", {"kernel": None}, INVALID_ARGUMENT, "kernel", "NULL"),
    *(
        ("gc_builtin_kernel_shape", {"kernel": kernel}, INVALID_ARGUMENT, "kernel", word)
        for kernel, word in [
            (b"gc_unpack_u9", "gc_unpack_u9"),
            (b"gc_pack_strided", "gc_pack_strided"),  # an internal kernel
            (b"\xf0\x28", r"\xf0("),
            (b"u" * 100_000, "u" * 64),
        ]
    ),
    ("gc_builtin_kernel_shape", {"out": Out(4, struct_size=24)}, INVALID_ARGUMENT, "out", "struct_size", 24, 32),
    ("gc_tensor_from_pointer", {"shape": [2**40, 2**40], "strides": None}, SIZE_OVERFLOW, "shape", 2**40),
    ("gc_tensor_from_pointer", {"shape": [5, 5], "strides": [2**62, 1]}, SIZE_OVERFLOW, 2**62),
    *(("gc_set_threads", {"n": n}, INVALID_ARGUMENT, "n", n, 1024) for n in (1025, 2**32 - 1)),
    *(
        ("gc_builtin_kernel_shape", {"compute_capability": n}, UNSUPPORTED_DEVICE, said, "7.5")
        for n, said in [(74, "7.4"), (0, "0.0"), (-5, "-0.5"), (-(2**31), "-214748364.8")]
    ),
    ("gc_tensor_from_versioned", {"src.version": 2}, INVALID_ARGUMENT, "src", 2),
    ("gc_tensor_from_versioned", {"src.flags": READ_ONLY_FLAG | 2 | 4}, Status.READ_ONLY, "src"),
    ("gc_tensor_from_versioned", {"src.flags": 4, "src.dtype": (17, 4, 1)}, UNSUPPORTED_DTYPE, "src", 4),
    ("gc_tensor_empty", {"shape": [2**60, 2], "dtype": DLDataType(5, 128, 4)}, SIZE_OVERFLOW, 2**60, 512),
]  # fmt: skip

TABLE += [
    # another device, another number of elements, another dtype, strides
    *(
        (function, {f"{name}.device": device}, INVALID_ARGUMENT, name)
        for function, name in EACH_CODEC_TENSOR
        if function in OF_CODECS or "allreduce" in function
        for device in (CUDA, CUDA_MANAGED)
    ),
    *(
        (function, {f"{name}.shape": shape}, SHAPE_MISMATCH, name, *words)
        for function, name, shape, *words in [
            ("gc_codec_encode", "values[0]", (99,), 100, 99),
            ("gc_codec_encode", "payload", (2, 111), 224, 222),
            ("gc_codec_encode", "error_factor", (2,), 1, 2),
            ("gc_codec_encode", "value_factor", (0,), 1, 0),
            ("gc_codec_decode", "values[1]", (60, 6), 300, 360),
            ("gc_codec_decode", "payload", (223,), 224, 223),
            ("gc_codec_decode", "factor", (1, 2), 1, 2),
            ("gc_codec_reduce", "chunks", (112,), 112),
            ("gc_codec_reduce", "chunks", (1, 111), 112, 111),
            ("gc_codec_reduce", "dst", (111,), 112, 111),
            ("gc_codec_flags", "dst", (2,), 1, 2),
            ("gc_codec_scales", "dst", (1,), 2, 1),
            ("gc_codec_commit", "skip", (0,), 1, 0),
            ("gc_codec_state_out", "dst", (STATE - 16,), STATE, STATE - 16),
            ("gc_codec_state_in", "src", (STATE + 1,), STATE, STATE + 1),
            *(
                (f"gc_codec_errors_{way}", name, (n + 1,), n, n + 1)
                for way in ("out", "in")
                for name, n in (("worker", 400), ("server", PART))
            ),
            ("gc_allreduce_run", "values[1]", (60, 6), 300, 360),
            ("gc_allreduce_run", "value_factor", (2,), 1, 2),
            ("gc_allreduce_reduce_scatter", "values[0]", (99,), 100, 99),
            ("gc_allreduce_reduce_scatter", "shard", (399,), 400, 399),
            ("gc_allreduce_all_gather", "values[1]", (60, 6), 300, 360),
            ("gc_allreduce_all_gather", "shard", (401,), 400, 401),
            ("gc_allreduce_flags", "dst", (2,), 1, 2),
            ("gc_allreduce_errors_out", "server", (399,), 400, 399),
            ("gc_allreduce_errors_in", "workers", (2, 399), 400, 399),
            ("gc_allreduce_errors_in", "workers", (400,), 400),
            ("gc_allreduce_errors_in", "workers", (0, 400), 400, 0),
            ("gc_allreduce_errors_in", "server", (401,), 400, 401),
        ]
    ),
    *(
        (function, {f"{name}.dtype": dldtype(dtype)}, UNSUPPORTED_DTYPE, name, dtype)
        for function, name in EACH_CODEC_TENSOR
        for dtype in ("int8", "uint16", "float64")
    ),
    *(
        (function, {f"{name}.dtype": dldtype(dtype)}, UNSUPPORTED_DTYPE, name, dtype)
        for function, name, dtype in [
            ("gc_codec_encode", "values[1]", "float16"), ("gc_codec_decode", "values[1]", "int32"),
            ("gc_codec_flags", "dst", "int32"), ("gc_codec_commit", "skip", "uint8"),
            ("gc_allreduce_run", "values[0]", "bfloat16"), ("gc_allreduce_flags", "dst", "float32"),
            ("gc_allreduce_commit", "skip", "float16"),
        ]
    ),
    *(
        (function, {f"{name}.shape": (count, 1), f"{name}.strides": (2, 1)}, NOT_CONTIGUOUS, name, 2)
        for function, name, count in [
            ("gc_codec_encode", "values[0]", 100), ("gc_codec_encode", "payload", PAYLOAD),
            ("gc_codec_decode", "values[1]", 300), ("gc_codec_decode", "payload", PAYLOAD),
            ("gc_codec_reduce", "dst", CHUNK), ("gc_codec_scales", "dst", 2),
            ("gc_codec_state_out", "dst", STATE), ("gc_codec_state_in", "src", STATE),
            ("gc_codec_errors_out", "worker", 400), ("gc_codec_errors_in", "server", PART),
            ("gc_allreduce_run", "values[0]", 100),
            ("gc_allreduce_errors_out", "worker", 400), ("gc_allreduce_errors_in", "server", 400),
        ]
    ),
    ("gc_codec_reduce", {"chunks.shape": (2, CHUNK), "chunks.strides": (1, 2)}, NOT_CONTIGUOUS, "chunks"),
    # addresses
    *(
        (function, {f"{name}.byte_offset": offset}, INVALID_ARGUMENT, name, 16)
        for function, name in [
            ("gc_codec_encode", "payload"), ("gc_codec_decode", "payload"),
            ("gc_codec_reduce", "chunks"), ("gc_codec_reduce", "dst"), ("gc_codec_state_out", "dst"),
            ("gc_codec_state_in", "src"),
        ]
        for offset in (1, 8)
    ),
    *(
        (function, {f"{out}.data": At(within, offset)}, INVALID_ARGUMENT, out, within)
        for function, out, within, offset in [
            ("gc_codec_encode", "payload", "value_factor", -208), ("gc_codec_reduce", "dst", "chunks", 96),
            ("gc_codec_errors_out", "server", "worker", 1596),
            ("gc_allreduce_errors_out", "server", "worker", 1596),
            ("gc_allreduce_run", "values[0]", "value_factor", -396),
            ("gc_allreduce_run", "values[1]", "error_factor", 0),
        ]
    ),
    # numbers
    *(
        (function, {"n_values": n}, INVALID_ARGUMENT, "n_values", 2, n)
        for function in ("gc_codec_encode", "gc_codec_decode")
        for n in (0, 1)
    ),
    *(
        (function, {"n_values": 2**61}, SIZE_OVERFLOW, "n_values", 2**61)
        for function in ("gc_codec_encode", "gc_codec_decode")
    ),
    *(("gc_codec_decode", {"divisor": n}, INVALID_ARGUMENT, "divisor", n) for n in (-1, -(2**31))),
    *(("gc_codec_decode", {"mode": n}, INVALID_ARGUMENT, "mode", n) for n in (-1, 2)),
    ("gc_codec_decode", {"mode": 1, "values[0].dtype": dldtype("float16")}, UNSUPPORTED_DTYPE, "values[0]", "float16"),
    *(("gc_codec_reduce", {"chunk": n}, INVALID_ARGUMENT, "chunk", n, 1) for n in (0, 2, 2**64 - 1)),
    ("gc_codec_reduce", {"chunks.shape": (0, CHUNK)}, INVALID_ARGUMENT, "chunks", 0),
    ("gc_share_send", {"tensor.device": CUDA}, NO_CUDA),
    ("gc_share_send", {"tensor.device": ROCM}, UNSUPPORTED_DEVICE, "tensor", 10),
    ("gc_share_send", {"tensor.dtype": DLDataType(1, 0, 1)}, UNSUPPORTED_DTYPE, "tensor", 0),
    ("gc_share_send", {"tensor.shape": (1,) * 65}, INVALID_ARGUMENT, "tensor", 65, 64),
    *(("gc_share_send", {"flags": n}, INVALID_ARGUMENT, "flags", f"{n:#x}") for n in (2, 3, 2**31)),
    *((name, {"socket": -1}, INVALID_ARGUMENT, "socket", -1) for name in ("gc_share_send", "gc_share_receive")),
    ("gc_share_receive", {"device": DLDevice(CUDA, 3)}, INVALID_ARGUMENT, "device", "cuda:3", "cpu"),
    ("gc_share_receive", {"device": DLDevice(ROCM, 0)}, UNSUPPORTED_DEVICE, "device", 10),
    ("gc_allreduce_run", {"n_values": 1}, INVALID_ARGUMENT, "n_values", 2, 1),
    ("gc_allreduce_run", {"n_values": 2**61}, SIZE_OVERFLOW, "n_values", 2**61),
    *(("gc_comm_group", {"world_size": n}, INVALID_ARGUMENT, "world_size", n) for n in (0, -1, -(2**31))),
    ("gc_comm_hierarchical", {"inter_node": None}, INVALID_ARGUMENT, "intra_node", "rank 0", "no inter_node"),
    *(
        ("gc_comm_from_transport", {"transport": transport(**fields)}, INVALID_ARGUMENT, "transport", *words)
        for fields, *words in [
            ({"struct_size": 39}, "struct_size", 40, 39),
            *(({"rank": rank, "world_size": size}, rank, size) for rank, size in [
                (0, 0), (0, -1), (-1, 4), (4, 4), (2**31 - 1, 2**31 - 1), (-(2**31), -(2**31)),
            ]),
            *(({"flags": flags}, hex(flags)) for flags in (2, 3, 2**31)),
            ({"all_to_all": capi.EXCHANGE()}, "all_to_all", "NULL"),
            ({"all_gather": capi.EXCHANGE()}, "all_gather", "NULL"),
        ]
    ),
    # operations that a codec's options do not allow
    *(
        (function, {"allreduce": allreduce_of()}, INVALID_ARGUMENT, "GC_NONFINITE_TRANSACTIONAL")
        for function in ("gc_allreduce_commit", "gc_allreduce_rollback")
    ),
    *(
        ("gc_allreduce_errors_in", {"allreduce": allreduce_of(**without)}, INVALID_ARGUMENT)
        for without in (dict(error=2), dict(codec=2))
    ),
    ("gc_allreduce_create", {"options": options(n_chunks=2, server=0)}, INVALID_ARGUMENT, "n_chunks", 2, 1),
    ("gc_allreduce_create", {"options": options(n_chunks=1, server=1)}, INVALID_ARGUMENT, "server", 1),
    (
        "gc_allreduce_create", {"options": options(**ALONE, results=dldtype("float16"))}, INVALID_ARGUMENT,
        "results", "float16", "float32",
    ),
    ("gc_allreduce_create", {"options": options(**ALONE, codec=8)}, INVALID_ARGUMENT, "codec", 8),
    *(
        (function, {"codec": codec_of()}, INVALID_ARGUMENT, "codec", "GC_NONFINITE_TRANSACTIONAL")
        for function in ("gc_codec_commit", "gc_codec_rollback")
    ),
    *(
        (function, {"codec": codec_of(server=0)}, INVALID_ARGUMENT, "server")
        for function in ("gc_codec_errors_out", "gc_codec_errors_in")
    ),
    ("gc_codec_reduce", {"codec": codec_of(server=0)}, INVALID_ARGUMENT, "chunk", 1),
    ("gc_codec_errors_in", {"codec": codec_of(error=2)}, INVALID_ARGUMENT, "codec"),
    ("gc_codec_errors_in", {"codec": codec_of(codec=2)}, INVALID_ARGUMENT, "codec"),
    ("gc_codec_encode", {"codec": codec_of(values=dldtype("float16"))}, UNSUPPORTED_DTYPE, "values[0]", "float32"),
    # bytes of another codec
    ("gc_codec_decode", {"codec": codec_of(codec=2)}, Status.CORRUPT, "payload", "GC_CODEC_SIGN", "GC_CODEC_ONEBIT"),
    ("gc_codec_decode", {"payload": aligned(PAYLOAD)}, Status.CORRUPT, "payload"),
    ("gc_codec_state_in", {"src": aligned(STATE)}, Status.CORRUPT, "src"),
    ("gc_codec_state_in", {"codec": codec_of(segments=int64s((101, 299)))}, Status.CORRUPT, "src", "digest"),
    # kernels that are compiled when they are run
    *(
        (f"gc_{name}_create", {"options": make(**fields)}, status, *words)
        for name, make in [("elementwise", elementwise_options), ("reduction", reduction_options)]
        for fields, status, *words in [
            ({"struct_size": 112}, INVALID_ARGUMENT, "struct_size", 112),
            *(({"flags": n}, INVALID_ARGUMENT, "flags", hex(n), "GC_KERNEL_NO_DISK") for n in (4, 7, 2**31)),
            ({"reserved": (c_uint64 * 4)(0, 0, 0, 1)}, INVALID_ARGUMENT, "options", "offset", 1),
            ({"inputs": b"\xff"}, INVALID_ARGUMENT, "inputs", "UTF-8"),
            ({"inputs": b"float x"}, INVALID_ARGUMENT, "inputs", "float", "float32"),
            ({"inputs": b"T x, T x"}, INVALID_ARGUMENT, "inputs", "x"),
            ({"inputs": b"T x", "outputs": b"T x"}, INVALID_ARGUMENT, "outputs", "x"),
            ({"outputs": b""}, INVALID_ARGUMENT, "outputs"),
            ({"outputs": None}, INVALID_ARGUMENT, "outputs"),
            ({"outputs": b"T i"}, INVALID_ARGUMENT, "outputs", "i"),
            ({"outputs": b"T y" + b", T y" * 40}, INVALID_ARGUMENT, "outputs"),
            ({"name": b"a b"}, INVALID_ARGUMENT, "name", "a b"),
            ({"n_options": 1}, INVALID_ARGUMENT, "options", "NULL"),
            ({"n_options": 1, "options": (ctypes.c_char_p * 1)(None)}, INVALID_ARGUMENT, "options", "NULL"),
            ({"n_options": 1, "options": (ctypes.c_char_p * 1)(b"\xc3")}, INVALID_ARGUMENT, "options", "UTF-8"),
            ({"n_options": 64, "options": (ctypes.c_char_p * 64)(*64 * [b"-G"])}, INVALID_ARGUMENT, "options", 64, 63),
        ]
    ),
    ("gc_elementwise_create", {"options": elementwise_options(operation=None)}, INVALID_ARGUMENT, "operation"),
    *(
        ("gc_reduction_create", {"options": reduction_options(**{name: b" "})}, INVALID_ARGUMENT, name)
        for name in ("map", "reduce", "post_map")
    ),
    ("gc_reduction_create", {"options": reduction_options(inputs=b"raw T x")}, INVALID_ARGUMENT, "inputs", "raw"),
    ("gc_reduction_create", {"options": reduction_options(outputs=b"raw T y")}, INVALID_ARGUMENT, "outputs", "raw"),
    ("gc_reduction_create", {"options": reduction_options(reduce_type=b"U")}, INVALID_ARGUMENT, "reduce_type", "U"),
    *(
        (function, faults, status, *words)
        for function in ("gc_kernel_run", "gc_kernel_prepare")
        for faults, status, *words in [
            ({"n_inputs": 0}, INVALID_ARGUMENT, "n_inputs", 1, 0),
            ({"n_outputs": 2**61}, SIZE_OVERFLOW, "n_outputs", 2**61),
            ({"options": run_options(flags=2, capability=90)}, INVALID_ARGUMENT, "flags", "0x2"),
            ({"options": run_options(struct_size=71, capability=90)}, INVALID_ARGUMENT, "struct_size", 72, 71),
            ({"options": run_options(reserved0=1)}, INVALID_ARGUMENT, "offset"),
            ({"options": run_options(n_axes=1, capability=90)}, INVALID_ARGUMENT, "n_axes", 1, "NULL"),
            ({"inputs[0].device": ROCM}, UNSUPPORTED_DEVICE, "inputs[0]", 10),
        ]
    ),
    *(
        ("gc_kernel_prepare", faults, status, *words)
        for faults, status, *words in [
            ({"inputs[0].dtype": dldtype("float64")}, UNSUPPORTED_DTYPE, "float32", "float64"),
            ({"inputs[0].dtype": DLDataType(2, 32, 2)}, UNSUPPORTED_DTYPE, "inputs[0]", 2),
            ({"inputs[0].shape": (5, 79)}, SHAPE_MISMATCH, "outputs[0]"),
            ({"outputs[0].shape": (80,)}, SHAPE_MISMATCH, "outputs[0]"),
            ({"options": run_options(size=3, capability=90)}, INVALID_ARGUMENT, "size", 3),
            ({"options": run_options(axes=[0], capability=90)}, INVALID_ARGUMENT, "axes"),
            ({"options": run_options(capability=-1)}, INVALID_ARGUMENT, "capability", -1),
            ({"options": run_options(capability=9)}, INVALID_ARGUMENT, "capability", 9, "90 for 9.0"),
            (
                {"kernel": compiled(reduction_options()), "options": run_options(axes=[2], capability=90)},
                INVALID_ARGUMENT, "axes[0]", 2,
            ),
            (
                {"kernel": compiled(reduction_options()), "options": run_options(axes=[1, -1], capability=90)},
                INVALID_ARGUMENT, "axes[1]", -1, "axes[0]",
            ),
        ]
    ),
    ("gc_kernel_run", {}, UNSUPPORTED_DEVICE, "inputs[0]"),
    ("gc_kernel_run", {"inputs[0].device": CUDA, "outputs[0].device": CUDA}, NO_CUDA),
    # options
    ("gc_codec_create", {"options": options(struct_size=104)}, INVALID_ARGUMENT, "struct_size", 112, 104),
    *(
        ("gc_codec_create", {"options": options(**fields)}, status, *words)
        for fields, status, *words in [
            *(({"codec": n}, INVALID_ARGUMENT, "codec", n) for n in (-1, 0, 8, 15)),
            *(({"error": n}, INVALID_ARGUMENT, "error", n) for n in (-1, 3)),
            *(({"scale": n}, INVALID_ARGUMENT, "scale", n) for n in (-1, 2)),
            *(({"nonfinite": n}, INVALID_ARGUMENT, "nonfinite", n) for n in (-1, 3)),
            *(({"beta": n}, INVALID_ARGUMENT, "beta") for n in (np.inf, -np.inf, np.nan)),
            ({"codec": 2, "error": 1}, INVALID_ARGUMENT, "error", "GC_CODEC_SIGN"),
            ({"reserved": (c_uint32 * 5)(0, 1 << 8)}, INVALID_ARGUMENT, "offset", 97, 1),
            ({"reserved": (c_uint32 * 5)(7)}, INVALID_ARGUMENT, "offset", 92, 7),
            *(({"reduction": n}, INVALID_ARGUMENT, "reduction", n) for n in (-1, 2)),
            *(
                ({"codec": n, "raw": (c_uint8 * 2)()}, INVALID_ARGUMENT, "raw", name)
                for n, name in ((1, "GC_CODEC_ONEBIT"), (2, "GC_CODEC_SIGN"))
            ),
            ({"codec": 2, "error": 2, "reduction": 1}, INVALID_ARGUMENT, "reduction", "GC_CODEC_SIGN"),
            *(
                ({"codec": n, "scale": 1}, INVALID_ARGUMENT, "scale", f"GC_CODEC_{name}", 1)
                for n, name in enumerate(("BF16", "MXFP8", "INT8", "INT4", "MXFP4"), 3)
            ),
            ({"segments": int64s((100, -7))}, INVALID_ARGUMENT, "segment", 1, -7),
            ({"segments": int64s((2**62, 2**62))}, SIZE_OVERFLOW),
            ({"segments": int64s((2**60, 0))}, OUT_OF_MEMORY),
            ({"n_segments": 2**60}, SIZE_OVERFLOW, "n_segments", 2**60),
            ({"n_elements": 400}, INVALID_ARGUMENT, "n_elements", 400),
            ({"segments": None, "n_segments": 0, "n_elements": -5}, INVALID_ARGUMENT, -5),
            ({"segments": None}, INVALID_ARGUMENT, "n_segments", 2),
            ({"n_chunks": 2**32}, SIZE_OVERFLOW, 2**32),
            ({"server": 3}, INVALID_ARGUMENT, "server", 3, 2),
            ({"server": 2**64 - 1}, INVALID_ARGUMENT, "server", 2**64 - 1, 2),
            *(
                ({name: dldtype(dtype)}, UNSUPPORTED_DTYPE, name, dtype)
                for name in ("values", "results")
                for dtype in ("bool", "float64", "int32")
            ),
            ({"values": DLDataType(2, 32, 2)}, UNSUPPORTED_DTYPE, "values", 2),
            ({"device": DLDevice(ROCM, 0)}, UNSUPPORTED_DEVICE, "device", 10),
            ({"device": DLDevice(0, 1)}, UNSUPPORTED_DEVICE, "device", 0),
            *(({"device": DLDevice(device, 0)}, NO_CUDA) for device in (CUDA, CUDA_MANAGED)),
        ]
    ),
    # gc_encode and gc_decode
    *(("gc_encode", {"values.dtype": dldtype(dtype)}, UNSUPPORTED_DTYPE, "values", dtype) for dtype in ("int32", "float64")),
    *(("gc_encode", {"codec": n}, INVALID_ARGUMENT, "codec", n) for n in (-1, 0, 8, 2**31 - 1)),
    *(("gc_decode", {"dtype": dldtype(dtype)}, UNSUPPORTED_DTYPE, "dtype", dtype) for dtype in ("float64", "uint8")),
    ("gc_decode", {"payload.dtype": dldtype("int8")}, UNSUPPORTED_DTYPE, "payload", "int8"),
    *(("gc_decode", {"payload.shape": shape}, SHAPE_MISMATCH, "payload") for shape in ((), (2, 56))),
    ("gc_decode", {"payload.strides": (2,)}, NOT_CONTIGUOUS, "payload"),
    # functions that return a number, or -1
    ("gc_chunk_bytes", {"n_chunks": 0}, -1, "n_chunks", 0),
    *(("gc_chunk_bytes", {"n_elements": n}, -1, "n_elements", n) for n in (-5, -(2**63))),
    ("gc_kernel_workspace_bytes", {"n_inputs": 0}, -1, "n_inputs", 1, 0),
    ("gc_kernel_workspace_bytes", {"inputs[0].shape": (5, 79)}, -1, "outputs[0]"),
    ("gc_kernel_workspace_bytes", {"options": run_options(flags=8)}, -1, "flags", "0x8"),
    *(
        ("gc_allreduce_parts", {name: n}, -1, name, n)
        for name, n in [("rank", 1), ("rank", -1), ("which", 2), ("which", -1), ("room", -1), ("room", 2**61)]
    ),
    *(("gc_allreduce_peers_bytes", {"world_size": n}, -1, "world_size", n) for n in (0, 65)),
    *(("gc_allreduce_peers_bytes", {"nodes": n}, -1, "nodes", n) for n in (0, -3)),
    *(
        ("gc_allreduce_peers_bytes", {"options": given}, -1, *words)
        for given, *words in [
            (of_int8(n_elements=-5), "segment 0", -5), (of_int8(scale=1), "scale", 1),
            (of_int8(results=dldtype("bfloat16")), "results", "bfloat16", "float32"),
            (of_int8(n_elements=2**62), "2^63 - 1"), (of_int8(struct_size=8), "struct_size", 8),
        ]
    ),
]  # fmt: skip


def is_sentence(text):
    """Returns True if the text is a line in words: who and what, with nothing of Rust's syntax."""
    return re.fullmatch(r"\S.{,498}\S", text) and not re.search(r"Some\(|Err\(|None|unwrap|panicked|[{}]|0x0\b", text)


@pytest.mark.parametrize("function", CALLS)
def test_the_calls_of_the_table_succeed_without_a_fault(function):
    arguments = CALLS[function]()
    check(getattr(lib, function)(*marshal(function, arguments)))
    for value, kind in zip(arguments.values(), capi.declared.FUNCTIONS[function][1], strict=True):
        made = getattr(kind, "_type_", None)
        if isinstance(value, Out) and (free := FREES.get(getattr(made, "_type_", None))):
            for out in value.memory:
                free(ctypes.cast(out, made))


# The ids have no addresses, so that a case has the same name in every process.
@pytest.mark.parametrize("row", TABLE, ids=lambda row: re.sub(" at 0x[0-9a-f]+", "", f"{row[0]}-{row[1]}-{row[2]}"))
def test_a_refusal_says_what_was_wrong_and_changes_nothing(row):
    function, faults, status, *words = row
    released.clear()
    arguments = {**CALLS, **ELSEWHERE}[function]()
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


@pytest.mark.parametrize("function, name", [(function, name) for function in CALLS for name in pointers_of(function)])
def test_a_pointer_that_is_not_aligned_is_refused(function, name):
    arguments = CALLS[function]()
    marshalled = marshal(function, arguments)
    index = list(arguments).index(name)
    address = ctypes.cast(marshalled[index], ctypes.c_void_p).value
    assert address is not None
    marshalled[index] = ctypes.cast(address + 1, capi.declared.FUNCTIONS[function][1][index])
    assert getattr(lib, function)(*marshalled) == INVALID_ARGUMENT
    assert name in last_error() and "aligned" in last_error(), last_error()


def test_the_last_error_belongs_to_a_thread_and_success_keeps_it():
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


def test_every_status_has_its_own_name():
    names = {status: lib.gc_status_name(status).decode() for status in Status}
    assert all(status.name in name for status, name in names.items()), names
    assert len(set(names.values())) == len(Status)
    assert lib.gc_status_name(12345), "a code that does not exist has some text too"


def test_the_version_is_the_same_number_twice():
    packed = lib.gc_version()
    assert f"{packed >> 16}.{packed >> 8 & 0xFF}.{packed & 0xFF}" == lib.gc_version_string().decode().split("-")[0]


def info_of_another_process(program, **environment):
    """Returns the lines of gc_build_info() in a process that runs `program` first; `lib` is the library there."""
    start = "import ctypes, os\nlib = ctypes.CDLL(os.environ['GRADCODEC_LIBRARY'])\n"
    end = "\nlib.gc_build_info.restype = ctypes.c_char_p\nprint(lib.gc_build_info().decode(), end='')"
    end += "\nmaps = open('/proc/self/maps').read()\nprint(any(f'lib{name}.so' in maps for name in ('cuda', 'nccl', 'nvrtc')))"
    environment = {**os.environ, **environment}
    lines = subprocess.run([sys.executable, "-c", start + program + end], env=environment, check=True, capture_output=True)
    *lines, others = lines.stdout.decode().splitlines()
    return lines, others == "True"


def test_build_info_has_the_data_for_a_bug_report_and_loads_nothing():
    lines, others = info_of_another_process("")
    version = lib.gc_version_string().decode()
    assert re.fullmatch(rf"gradcodec {version}, commit (unknown|[0-9a-f]{{12}}(-dirty)?)", lines[0]), lines
    assert re.fullmatch(r"built by rustc 1\..* for \w+-unknown-linux-gnu", lines[1]), lines
    assert re.fullmatch(r"instruction set: (\w+), of( \w+)* portable", lines[2]), lines
    assert lines[3:] == ["CUDA driver: not loaded", "NCCL: not loaded", "NVRTC: not loaded"]
    assert not others, "it has loaded one of them"
    lines, _ = info_of_another_process("", GRADCODEC_CPU="portable")
    assert lines[2].startswith("instruction set: portable, of "), lines


def test_build_info_has_the_versions_and_files_of_loaded_libraries(tmp_path):
    # Two NVRTCs are loaded at once. A file with none of NVRTC's functions has no version.
    source = tmp_path / "other.c"
    for name, text in {
        "libcuda.so.1": "int cuDriverGetVersion(int *v) { *v = 12040; return 0; }",
        "libnccl.so.2": "int ncclGetVersion(int *v) { *v = 22703; return 0; }",
        "libnvrtc.so.12": "int nvrtcVersion(int *a, int *b) { *a = 12; *b = 9; return 0; }",
        "libnvrtc.so.11.2": "int nothing;",
    }.items():
        source.write_text(text)
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", tmp_path / name], check=True)
    lines, _ = info_of_another_process(f"for name in sorted(os.listdir({str(tmp_path)!r})):\n"
                                       f"    if '.so' in name: ctypes.CDLL({str(tmp_path)!r} + '/' + name)")
    assert lines[3:] == [
        f"CUDA driver: 12.4 ({tmp_path}/libcuda.so.1)",
        f"NCCL: 2.27.3 ({tmp_path}/libnccl.so.2)",
        f"NVRTC: of unknown version ({tmp_path}/libnvrtc.so.11.2), 12.9 ({tmp_path}/libnvrtc.so.12)",
    ]  # fmt: skip
