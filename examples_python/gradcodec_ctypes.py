"""GradCodec from Python: one file to copy. It needs Python 3.10, the library, and nothing else.

    gradcodec = GradCodec()  # or GradCodec("/path/to/libgradcodec.so.0")
    chunks = gradcodec.pack_chunks(positive, 4)  # an array of NumPy, PyTorch, CuPy, JAX: of whatever has __dlpack__
    arrays = [numpy.from_dlpack(chunk) for chunk in chunks]  # or torch's, cupy's, jax.dlpack's; nothing is copied
    gradcodec.pack_signs_into(gradient, bits, stream=torch.cuda.current_stream())  # dst second, defaults behind it

What functions do, take and refuse is in gradcodec.h. `stream`: None or 1 for the legacy stream, 2 the per-thread one, a
handle, or an object that has one as `cuda_stream` (torch) or `ptr` (CuPy). It waits for what frameworks have enqueued
on the tensors; until it is done they must stay. JAX's arrays are immutable and cannot say so: do not write to them.
"""

import ctypes
import importlib
import math
import operator
import os
import pathlib
import sys
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32
from ctypes import c_uint64, c_void_p
from typing import Any, Callable, Protocol, Sequence

NAME = "libgradcodec.so.0"
BIG, LITTLE, AXIS_NONE, COUNT_ALL = 0, 1, -(2**31), -(2**63)  # which bit of a byte comes first, and as in the header
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
ONEBIT, SIGN, RMS, MEAN, PROPAGATE, ZERO, TRANSACTIONAL, SET, ADD = 1, 2, 0, 1, 0, 1, 2, 0, 1  # of codecs
DTYPES = {f"{k}{bits}": (code, bits, 1) for code, k in enumerate(("int", "uint", "float")) for bits in (8, 16, 32, 64)}
DTYPES.update(bool=(6, 8, 1), bfloat16=(4, 16, 1))


class GradCodecError(RuntimeError):
    """A call that failed, in the library's words; `status` is one of GC_STATUS_*: INVALID_ARGUMENT where C returns -1, as
    for a number of bytes, whatever the reason."""

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence)
        self.status = status


def _struct(name: str, /, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


# DLPack's structures, and the functions of gradcodec.h with their arguments.
Device = _struct("DLDevice", device_type=c_int32, device_id=c_int32)
DType = _struct("DLDataType", code=c_uint8, bits=c_uint8, lanes=c_uint16)
_LAYOUT = {"shape": POINTER(c_int64), "strides": POINTER(c_int64), "byte_offset": c_uint64}
DLTensor = _struct("DLTensor", data=c_void_p, device=Device, ndim=c_int32, dtype=DType, **_LAYOUT)
Managed = _struct("DLManagedTensor", dl_tensor=DLTensor, manager_ctx=c_void_p, deleter=c_void_p)
_HEAD = {"major": c_uint32, "minor": c_uint32, "manager_ctx": c_void_p, "deleter": c_void_p, "flags": c_uint64}
Versioned = _struct("DLManagedTensorVersioned", **_HEAD, dl_tensor=DLTensor)
_SHAPE = {"struct_size": c_uint32, "threads": c_uint32, "items_per_block": c_uint32, "shared_bytes": c_uint32}
KernelShape = _struct("gc_kernel_shape_t", **_SHAPE, cluster=c_uint32, reserved=c_uint32 * 3)
_DTYPES = {"values": DType, "results": DType, "error": c_int32, "scale": c_int32, "nonfinite": c_int32}
_SIZES = {"beta": c_float, "segments": POINTER(c_int64), "n_segments": c_size_t, "n_elements": c_int64}
_OPTIONS = {"struct_size": c_uint32, "codec": c_int32, "device": Device, **_DTYPES, **_SIZES, "n_chunks": c_size_t}
CodecOptions = _struct("gc_codec_options_t", **_OPTIONS, server=c_uint64, reserved=c_uint64 * 4)
CodecHandle, CommHandle, AllReduceHandle = _struct("gc_codec_t"), _struct("gc_comm_t"), _struct("gc_allreduce_t")
ShareHandle, KernelHandle = _struct("gc_share_t"), _struct("gc_kernel_t")
_LAST = {"options": POINTER(c_char_p), "n_options": c_size_t, "nvrtc": c_void_p, "reserved": c_uint64 * 4}
_TEXTS = {"struct_size": c_uint32, "flags": c_uint32, "inputs": c_char_p, "outputs": c_char_p}
_ELEMENT = dict.fromkeys(("operation", "name", "preamble", "loop_prep", "after_loop"), c_char_p)
_REDUCE = dict.fromkeys(("map", "reduce", "post_map", "identity", "name", "reduce_type", "preamble"), c_char_p)
ElementwiseOptions = _struct("gc_elementwise_options_t", **_TEXTS, **_ELEMENT, **_LAST)
ReductionOptions = _struct("gc_reduction_options_t", **_TEXTS, **_REDUCE, **_LAST)
_AXES = {"size": c_int64, "axes": POINTER(c_int32), "n_axes": c_size_t, "workspace": POINTER(DLTensor)}
_RUN = {"struct_size": c_uint32, "flags": c_uint32, **_AXES, "capability": c_int32, "reserved0": c_uint32}
RunOptions = _struct("gc_run_options_t", **_RUN, reserved=c_uint64 * 3)
Exchange = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_size_t, Device, c_void_p)
_RANK = {"struct_size": c_uint32, "rank": c_int32, "world_size": c_int32, "flags": c_uint32, "ctx": c_void_p}
Transport = _struct("gc_transport_t", **_RANK, all_to_all=Exchange, all_gather=Exchange)
NcclOptions = _struct("gc_nccl_options_t", struct_size=c_uint32, flags=c_uint32, comm=c_void_p, dl_handle=c_void_p)
_PLACE = {"struct_size": c_uint32, "rank": c_int32, "world_size": c_int32, "timeout_ms": c_uint32, "device": Device}
PeersOptions = _struct("gc_peers_options_t", **_PLACE, bytes=c_size_t, buffers=POINTER(c_void_p))
T, V, VIEW, SIZES = map(POINTER, (Managed, Versioned, DLTensor, c_int64))
C, G, R, VIEWS = *map(POINTER, (CodecHandle, CommHandle, AllReduceHandle)), POINTER(POINTER(DLTensor))
L, K = POINTER(ShareHandle), POINTER(KernelHandle)
OUT, INTO, ALONG = POINTER(T), [VIEW, c_int32, VIEW, c_void_p], [VIEW, c_int32, c_int32, VIEW, c_void_p]
SIGNATURES: dict[str, list[Any]] = {
    "gc_last_error": [], "gc_version_string": [], "gc_build_info": [], "gc_chunk_bytes": [c_int64, c_size_t],
    "gc_pack_chunks": [T, c_size_t, OUT], "gc_unpack_chunks": [OUT, c_size_t, c_int64, OUT],
    "gc_pack_bits": [T, c_int32, c_int32, OUT], "gc_unpack_bits": [T, c_int32, c_int64, c_int32, OUT],
    "gc_pack_chunks_into": INTO, "gc_unpack_chunks_into": INTO, "gc_pack_signs_into": INTO,
    "gc_pack_signs": [T, c_size_t, OUT], "gc_unpack_signs": [OUT, c_size_t, c_int64, DType, OUT],
    "gc_unpack_signs_into": [VIEW, *INTO], "gc_vote_signs_into": [VIEW, c_uint64, VIEW, c_void_p],
    "gc_pack_bits_into": ALONG, "gc_unpack_bits_into": ALONG,
    "gc_onebit_compress": [T, T, c_size_t, OUT, POINTER(c_float)], "gc_onebit_workspace_bytes": [c_int64],
    "gc_onebit_decompress": [OUT, c_size_t, POINTER(c_float), c_int64, DType, OUT],
    "gc_onebit_compress_into": [VIEW, VIEW, c_int32, VIEW, VIEW, VIEW, c_void_p],
    "gc_codec_create": [POINTER(CodecOptions), POINTER(C)], "gc_codec_free": [C],
    "gc_codec_payload_bytes": [C], "gc_codec_state_bytes": [C],
    "gc_codec_encode": [C, VIEWS, c_size_t, VIEW, VIEW, VIEW, c_void_p],
    "gc_codec_decode": [C, VIEW, c_int32, VIEW, c_int32, VIEWS, c_size_t, c_void_p],
    "gc_codec_reduce": [C, c_size_t, VIEW, VIEW, c_void_p], "gc_codec_commit": [C, VIEW, c_void_p],
    "gc_codec_flags": [C, VIEW, c_void_p], "gc_codec_scales": [C, VIEW, c_void_p],
    "gc_codec_rollback": [C, c_void_p], "gc_codec_reset": [C, c_void_p],
    "gc_codec_state_out": [C, VIEW, c_void_p], "gc_codec_state_in": [C, VIEW, c_void_p],
    "gc_codec_errors_out": [C, VIEW, VIEW, c_void_p], "gc_codec_errors_in": [C, VIEW, VIEW, c_void_p],
    "gc_comm_from_transport": [POINTER(Transport), POINTER(G)], "gc_comm_group": [c_int32, POINTER(G)],
    "gc_comm_from_nccl": [POINTER(NcclOptions), POINTER(G)],
    "gc_comm_nccl_id": [POINTER(NcclOptions), POINTER(c_uint8)],
    "gc_comm_from_nccl_id": [POINTER(NcclOptions), POINTER(c_uint8), c_int32, c_int32, Device, POINTER(G)],
    "gc_peers_bytes": [c_int64, c_int32], "gc_comm_from_peers": [POINTER(PeersOptions), POINTER(G)],
    "gc_comm_open_peers": [G, Device, c_int64, c_uint32, POINTER(G)], "gc_comm_hierarchical": [G, G, POINTER(G)],
    "gc_comm_reserve": [G, Device, c_int64], "gc_comm_async_error": [G], "gc_comm_free": [G],
    "gc_compressed_allreduce": [G, VIEW, VIEW, VIEW, c_void_p], "gc_shard_elements": [c_int64, c_int32],
    "gc_allreduce_create": [G, POINTER(CodecOptions), POINTER(R)], "gc_allreduce_free": [R],
    "gc_allreduce_run": [R, VIEWS, c_size_t, VIEW, VIEW, c_void_p], "gc_allreduce_flags": [R, VIEW, c_void_p],
    "gc_allreduce_reduce_scatter": [R, VIEWS, c_size_t, VIEW, VIEW, VIEW, c_void_p],
    "gc_allreduce_all_gather": [R, VIEW, VIEWS, c_size_t, c_void_p],
    "gc_allreduce_commit": [R, VIEW, c_void_p], "gc_allreduce_rollback": [R, c_void_p],
    "gc_allreduce_reset": [R, c_void_p], "gc_allreduce_errors_out": [R, VIEW, VIEW, c_void_p],
    "gc_allreduce_errors_in": [R, VIEW, VIEW, c_void_p],
    "gc_tensor_empty": [Device, DType, c_int32, SIZES, OUT],
    "gc_tensor_from_pointer": [c_void_p, Device, DType, c_int32, SIZES, SIZES, c_void_p, c_void_p, OUT],
    "gc_tensor_to_versioned": [T, POINTER(V)], "gc_tensor_from_versioned": [V, OUT],
    "gc_tensor_to_device": [T, Device, OUT], "gc_copy_into": [VIEW, VIEW, c_void_p],
    "gc_share_send": [T, c_int, c_uint32, c_int32, POINTER(L)], "gc_share_wait": [L, c_int32], "gc_share_free": [L],
    "gc_share_receive": [c_int, Device, c_int32, OUT],
    "gc_elementwise_create": [POINTER(ElementwiseOptions), POINTER(K)],
    "gc_reduction_create": [POINTER(ReductionOptions), POINTER(K)],
    "gc_kernel_run": [K, VIEWS, c_size_t, VIEWS, c_size_t, POINTER(RunOptions), c_void_p],
    "gc_kernel_prepare": [K, VIEWS, c_size_t, VIEWS, c_size_t, POINTER(RunOptions), c_void_p],
    "gc_kernel_workspace_bytes": [K, VIEWS, c_size_t, VIEWS, c_size_t, POINTER(RunOptions)],
    "gc_kernel_log": [K, POINTER(c_char_p)], "gc_kernel_save": [K, OUT], "gc_kernel_free": [K],
    "gc_kernel_load": [c_void_p, c_size_t, POINTER(K)],
    "gc_set_threads": [c_uint32], "gc_prepare": [Device], "gc_trim": [Device],
    "gc_builtin_kernels": [c_char_p, POINTER(c_void_p), POINTER(c_size_t)],
    "gc_builtin_kernel_shape": [c_char_p, c_int32, POINTER(KernelShape)],
}  # fmt: skip
_python = ctypes.PyDLL(None)  # as ctypes.pythonapi, whose declarations belong to everybody
_python.PyCapsule_New.restype, _python.PyCapsule_New.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]
_python.PyCapsule_GetPointer.restype, _python.PyCapsule_GetPointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_python.PyCapsule_GetName.restype, _python.PyCapsule_GetName.argtypes = c_char_p, [ctypes.py_object]
_python.PyCapsule_SetName.argtypes, _python.Py_IncRef.argtypes = [ctypes.py_object, c_char_p], [ctypes.py_object]
LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
USED = {LEGACY: b"used_dltensor", VERSIONED: b"used_dltensor_versioned"}  # the names once the tensor was taken
FORMS = {LEGACY: (T, "gc_tensor_from_versioned"), VERSIONED: (V, "gc_tensor_to_versioned")}  # what makes that form
for _name in (*USED, *USED.values()):
    _python.Py_IncRef(_name)  # a capsule has the address of its name only, and may outlive this module


class Array(Protocol):
    """Whatever has DLPack's two methods: arrays of NumPy, PyTorch, CuPy and JAX, and tensors of the library."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


# What is wrong with an argument is said here where C would take another number for it.


def _said(thing: Any) -> str:
    text = repr(thing)
    return text if thing is None or len(text) > 60 else f"{type(thing).__name__} {text}"


def _whole(name: str, number: Any, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    try:
        if isinstance(number, bool):
            raise TypeError
        value = operator.index(number)
    except TypeError:
        raise TypeError(f"{name}: a whole number expected, got {_said(number)}") from None
    if not least <= value <= most:
        raise ValueError(f"{name}: at {f'least {least}' if value < least else f'most {most}'} expected, got {value}")
    return value


def _count(name: str, number: Any) -> int:
    return _whole(name, number, 0)


INT32 = -(2**31), 2**31 - 1


def _int32(name: str, number: Any) -> int:
    return _whole(name, number, *INT32)


def _wholes(name: str, numbers: Any, least: int = -(2**63), most: int = 2**63 - 1) -> list[int]:
    try:
        each = list(numbers)
    except TypeError:
        raise TypeError(f"{name}: a sequence of whole numbers expected, got {_said(numbers)}") from None
    return [_whole(f"{name}[{index}]", number, least, most) for index, number in enumerate(each)]


def _address(name: str, address: Any) -> int | None:
    return None if address is None else _whole(name, address, 0, 2**64 - 1)


def _float32(name: str, number: Any) -> float:
    try:
        if isinstance(number, (bool, str, bytes)):
            raise TypeError
        value = float(number)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: a number expected, got {_said(number)}") from None
    if math.isinf(c_float(value).value) and not math.isinf(value):
        raise OverflowError(f"{name}: at most 3.4e38, the largest float32, expected, got {value}")
    return value


def _text(name: str, text: Any) -> bytes:
    if not isinstance(text, (str, bytes)):
        raise TypeError(f"{name}: a str expected, got {_said(text)}")
    encoded = text.encode() if isinstance(text, str) else text
    if b"\0" in encoded:
        raise ValueError(f"{name}: a str without NUL expected, got one at {encoded.index(0)} of {len(encoded)} bytes")
    return encoded


def _bytes(name: str, given: Any) -> bytes:
    try:
        return bytes(memoryview(given))
    except TypeError:
        raise TypeError(f"{name}: bytes expected, got {_said(given)}") from None


def _arrays(name: str, arrays: Any) -> list[Any]:
    try:
        return list(arrays)
    except TypeError:
        raise TypeError(f"{name}: a sequence of arrays expected, got {_said(arrays)}") from None


def _device(device: Any) -> Any:
    try:
        kind, number = device
    except (TypeError, ValueError):
        raise TypeError(f"device: a pair as (CPU, 0) or (CUDA, 1) expected, got {_said(device)}") from None
    return Device(_int32("device[0]", kind), _int32("device[1]", number))


def _dtype(dtype: Any) -> Any:
    """By name; NumPy's, torch's and jax.numpy's dtypes have one, too."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype: one of {', '.join(DTYPES)} expected, got {_said(dtype)}")
    return DType(*DTYPES[name])


def _contents(capsule: Any) -> tuple[bytes, Any]:
    """The name of a capsule, and a pointer to its tensor, which it keeps."""
    name = _python.PyCapsule_GetName(capsule)
    if name not in FORMS:
        raise BufferError(f"no tensor to be had from a capsule named {name!r}")
    return name, ctypes.cast(_python.PyCapsule_GetPointer(capsule, name), FORMS[name][0])


class _Borrowed:
    """A tensor of somebody else. Its capsule, which is not consumed, owns it and goes with this object."""

    def __init__(self, source: Array, stream: int = 1, written: bool = False, name: str | None = None) -> None:
        what = name or ("output" if written else "input")
        if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
            hint = "" if written or source is None else "; numpy.asarray() makes one"
            raise TypeError(f"{what}: an array of NumPy, PyTorch, CuPy or JAX expected, got {_said(source)}{hint}")
        # On a CPU there is no stream, and to name one is an error.
        ready = {"stream": stream} if source.__dlpack_device__()[0] in (CUDA, CUDA_MANAGED) else {}
        try:
            self.capsule = source.__dlpack__(max_version=(1, 0), **ready)
        except TypeError:  # older than DLPack 1.0
            self.capsule = source.__dlpack__(**ready)
        form, self._as_parameter_ = _contents(self.capsule)
        if form == VERSIONED:
            tensor = self._as_parameter_.contents
            if tensor.major != 1:
                raise BufferError(f"DLPack {tensor.major}.{tensor.minor} is not known here")
            if written and tensor.flags & 3:
                raise GradCodecError(f"{what}: read-only, or a copy of what was meant", 5)
            self._as_parameter_ = ctypes.pointer(Managed(tensor.dl_tensor, None, None))
        self.view = byref(self._as_parameter_.contents.dl_tensor)


class Tensor:
    """A tensor of the library, for the from_dlpack() of one framework; released with this object if none takes it.

    It has `shape`, `dtype` (a name), `device` (a pair, (CPU, 0) for example) and `address`. It can be given to any
    function that takes arrays until a framework has taken it; after that, give what the framework made.
    """

    def __init__(self, library: "GradCodec", managed: Any) -> None:
        self._library, view = library, managed.contents.dl_tensor
        self._keep(LEGACY, managed)
        self.device, self.address = (view.device.device_type, view.device.device_id), view.data or 0
        self.shape: tuple[int, ...] = tuple(view.shape[: view.ndim])
        dtype = view.dtype.code, view.dtype.bits, view.dtype.lanes
        self.dtype = next((name for name, known in DTYPES.items() if known == dtype), str(dtype))
        self._array: Any = None

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.dtype!r}, device={self.device})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without a dimension has no len()")
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """For numpy.asarray() and NumPy's functions. The first call takes the tensor, as numpy.from_dlpack() does."""
        if self.device[0] != CPU:
            raise TypeError(
                f"NumPy has no arrays on {self.device}: cupy.from_dlpack() and torch.from_dlpack() take this tensor, "
                "GradCodec.tensor_to_device() copies it to (CPU, 0)"
            )
        numpy: Any = importlib.import_module("numpy")
        if self._array is None:
            self._array = numpy.from_dlpack(self)
        return numpy.array(self._array, dtype, copy=copy)

    def _keep(self, name: bytes, tensor: Any) -> None:
        # A destructor in Python would disturb an exception that is on its way when the capsule goes.
        native = ctypes.cast(self._library.lib.gc_capsule_destructor, c_void_p)
        self._capsule = _python.PyCapsule_New(ctypes.cast(tensor, c_void_p), name, native)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's: the kind of device and its number."""
        return self.device

    def __dlpack__(self, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        """DLPack's: a capsule with the tensor, in the form that `max_version` asks for."""
        # The stream has nothing to wait for: what made this tensor was complete.
        if copy or dl_device not in (None, self.device):
            raise BufferError("this tensor is not copied, neither here nor to another device")
        name, tensor = _contents(self._capsule)
        wanted = VERSIONED if max_version and max_version[0] >= 1 else LEGACY
        if name != wanted:
            kind, convert = FORMS[wanted]
            out = kind()
            # Renamed first: a failure here may lose the tensor, but not release it twice.
            _python.PyCapsule_SetName(self._capsule, USED[name])
            getattr(self._library.lib, convert)(tensor, byref(out))
            self._keep(wanted, out)
        return self._capsule


def _installed() -> ctypes.CDLL:
    """The library beside this file, as in the wheel; where the system finds it; where `make install` may put it."""
    here = pathlib.Path(__file__).resolve().parent
    beside = [str(folder / NAME) for folder in (here, here / "lib")]
    prefixes = here.parent, sys.prefix, os.path.expanduser("~/.local"), "/usr/local"
    places = [os.path.join(prefix, "lib", NAME) for prefix in prefixes]
    for place in filter(os.path.exists, beside):
        return ctypes.CDLL(place)
    try:
        return ctypes.CDLL(NAME)
    except OSError as error:
        for place in filter(os.path.exists, places):
            return ctypes.CDLL(place)
        raise OSError(
            f"{error}; nor is it one of {', '.join(beside + places)}. Install GradCodec with `make install "
            "PREFIX=$HOME/.local`, or name the file: GradCodec(path), or GRADCODEC_LIBRARY in the environment"
        ) from None


def _loaded(path: str | os.PathLike[str] | None) -> ctypes.CDLL:
    named = path or os.environ.get("GRADCODEC_LIBRARY")
    if not named:
        return _installed()
    try:
        return ctypes.CDLL(os.fspath(named))
    except OSError as error:
        raise OSError(f"{'path' if path else 'GRADCODEC_LIBRARY'} names {os.fspath(named)!r}: {error}") from None


class GradCodec:
    """The library: the file at `path`, or that GRADCODEC_LIBRARY names, or the libgradcodec.so.0 that is installed.

    Functions have their names from gradcodec.h, which says in full what they do. Arrays are borrowed for the call; what
    is called `dst` is written to. New tensors are yours, on the device of the input. What is refused is a GradCodecError
    with the library's sentence; what cannot be an argument at all is a TypeError or a ValueError.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.lib = _loaded(path)
        for name, arguments in SIGNATURES.items():
            if not hasattr(self.lib, name):
                raise OSError(f"{self.lib._name}: no function {name}: older than this client, or not GradCodec")
            function = getattr(self.lib, name)
            function.argtypes, function.restype = arguments, self._check
        for name in ("last_error", "version_string", "build_info"):
            getattr(self.lib, f"gc_{name}").restype = c_char_p
        numbers = "chunk_bytes", "onebit_workspace_bytes", "codec_payload_bytes", "codec_state_bytes", "shard_elements"
        for name in (*numbers, "peers_bytes", "kernel_workspace_bytes"):
            getattr(self.lib, f"gc_{name}").restype = c_int64
        for name in ("codec", "comm", "allreduce", "share", "kernel"):
            getattr(self.lib, f"gc_{name}_free").restype = None

    def __repr__(self) -> str:
        return f"GradCodec({self.lib._name!r}), version {self.version}"

    def _check(self, status: int) -> None:
        if status != 0:
            raise GradCodecError(self.lib.gc_last_error().decode(), status)

    def make(self, function: Any, *arguments: Any) -> Tensor:
        """The tensor that a function of `lib` gives through its last argument, `out`; for those without a method."""
        out = T()
        function(*arguments, byref(out))
        return Tensor(self, out)

    def _number(self, function: Any, *arguments: int) -> int:
        number = int(function(*arguments))
        self._check(int(number < 0))
        return number

    @staticmethod
    def _handle(stream: Any) -> int:
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
        try:
            return 1 if handle is None else _whole("stream", handle, 0, 2**64 - 1) or 1
        except TypeError:
            raise TypeError(
                f"stream: None, a number, or an object with cuda_stream or ptr expected, got {_said(stream)}"
            ) from None

    def _into(self, function: Any, src: Array, dst: Array, stream: Any, *numbers: Any) -> None:
        handle = self._handle(stream)
        source, target = _Borrowed(src, handle, name="src"), _Borrowed(dst, handle, written=True, name="dst")
        function(source.view, *numbers, target.view, handle)

    def _pack(self, function: Any, src: Array, n_chunks: int) -> list[Tensor]:
        out = (T * _count("n_chunks", n_chunks))()
        function(_Borrowed(src, name="src"), len(out), out)
        return [Tensor(self, tensor) for tensor in out]

    def _unpack(self, function: Any, chunks: Sequence[Array], *arguments: Any) -> Tensor:
        sources = [_Borrowed(chunk, name=f"chunks[{k}]") for k, chunk in enumerate(_arrays("chunks", chunks))]
        pointers = (T * len(sources))(*(source._as_parameter_ for source in sources))
        return self.make(function, pointers, len(sources), *arguments)

    # --- version, workers, devices

    @property
    def version(self) -> str:
        """The library's, "0.1.0" for example."""
        return bytes(self.lib.gc_version_string()).decode()

    def build_info(self) -> str:
        """What a bug report should include: version, commit, compiler, processor, and which libraries are loaded."""
        return bytes(self.lib.gc_build_info()).decode()

    def set_threads(self, n: int) -> None:
        """How many threads large tensors of the CPU are worked on by; 0: as many as the process may use CPUs."""
        self.lib.gc_set_threads(_whole("n", n, 0, 2**32 - 1))

    def prepare(self, device: tuple[int, int]) -> None:
        """Loads what a device needs, (CUDA, 0) for example, so that calls on streams allocate and wait for nothing."""
        self.lib.gc_prepare(_device(device))

    def trim(self, device: tuple[int, int]) -> None:
        """Gives a device the memory back that is kept for new tensors."""
        self.lib.gc_trim(_device(device))

    # --- bits: non-zero is 1

    def chunk_bytes(self, n_elements: int, n_chunks: int) -> int:
        """Bytes of one chunk: ceil(ceil(n_elements / 8) / n_chunks)."""
        given = _whole("n_elements", n_elements), _count("n_chunks", n_chunks)
        return self._number(self.lib.gc_chunk_bytes, *given)

    def pack_chunks(self, src: Array, n_chunks: int) -> list[Tensor]:
        """Bools or integers of any shape to bits, a byte's highest first: n_chunks tensors, uint8 [chunk_bytes]."""
        return self._pack(self.lib.gc_pack_chunks, src, n_chunks)

    def unpack_chunks(self, chunks: Sequence[Array], n_elements: int) -> Tensor:
        """The inverse: bool [n_elements] of chunks, uint8 [chunk_bytes] each."""
        return self._unpack(self.lib.gc_unpack_chunks, chunks, _whole("n_elements", n_elements))

    def pack_bits(self, src: Array, axis: int | None = AXIS_NONE, order: int = BIG) -> Tensor:
        """numpy.packbits: bools or integers along an axis, or flattened, to a uint8 tensor."""
        return self.make(self.lib.gc_pack_bits, _Borrowed(src, name="src"), *self._along(axis), self._order(order))

    def unpack_bits(
        self, src: Array, axis: int | None = AXIS_NONE, count: int | None = COUNT_ALL, order: int = BIG
    ) -> Tensor:
        """numpy.unpackbits: uint8 to 0 and 1, `count` of them along the axis; a negative count leaves some off."""
        bits = COUNT_ALL if count is None else _whole("count", count)
        source = _Borrowed(src, name="src")
        return self.make(self.lib.gc_unpack_bits, source, *self._along(axis), bits, self._order(order))

    def pack_chunks_into(self, src: Array, dst: Array, order: int = BIG, stream: Any = 1) -> None:
        """pack_chunks() to `dst`: uint8 [n_chunks, chunk_bytes], C-contiguous; a row is a chunk."""
        self._into(self.lib.gc_pack_chunks_into, src, dst, stream, self._order(order))

    def unpack_chunks_into(self, src: Array, dst: Array, order: int = BIG, stream: Any = 1) -> None:
        """Chunks, uint8 [n_chunks, chunk_bytes], to 0 and 1 in `dst`: any shape; bool, integers or floats."""
        self._into(self.lib.gc_unpack_chunks_into, src, dst, stream, self._order(order))

    def pack_bits_into(
        self, src: Array, dst: Array, axis: int | None = AXIS_NONE, order: int = BIG, stream: Any = 1
    ) -> None:
        """pack_bits() to `dst`, uint8 of the shape that it would give."""
        self._into(self.lib.gc_pack_bits_into, src, dst, stream, *self._along(axis), self._order(order))

    def unpack_bits_into(
        self, src: Array, dst: Array, axis: int | None = AXIS_NONE, order: int = BIG, stream: Any = 1
    ) -> None:
        """unpack_bits() to `dst`: its length along the axis is the count; bool, integers or floats."""
        self._into(self.lib.gc_unpack_bits_into, src, dst, stream, *self._along(axis), self._order(order))

    @staticmethod
    def _along(axis: Any) -> tuple[int]:
        return (AXIS_NONE if axis is None else _int32("axis", axis),)

    @staticmethod
    def _order(order: Any) -> int:
        try:
            return _int32("order", order)
        except TypeError:
            raise TypeError(f"order: BIG or LITTLE expected, got {_said(order)}") from None

    # --- signs: 1 unless below zero

    def pack_signs(self, src: Array, n_chunks: int) -> list[Tensor]:
        """The signs of floats of any shape to bits, in n_chunks tensors of uint8 [chunk_bytes]."""
        return self._pack(self.lib.gc_pack_signs, src, n_chunks)

    def unpack_signs(self, chunks: Sequence[Array], n_elements: int, dtype: Any = "float32") -> Tensor:
        """The inverse: +1 and -1, [n_elements] of `dtype`, a float or a signed integer."""
        return self._unpack(self.lib.gc_unpack_signs, chunks, _whole("n_elements", n_elements), _dtype(dtype))

    def pack_signs_into(self, src: Array, dst: Array, order: int = BIG, stream: Any = 1) -> None:
        """pack_signs() to `dst`: uint8 [n_chunks, chunk_bytes], C-contiguous; a row is a chunk."""
        self._into(self.lib.gc_pack_signs_into, src, dst, stream, self._order(order))

    def unpack_signs_into(
        self, src: Array, dst: Array, scales: Array | None = None, order: int = BIG, stream: Any = 1
    ) -> None:
        """Chunks, uint8 [n_chunks, chunk_bytes], to +scale and -scale in `dst`, floats of any shape.

        `scales`: none for +1 and -1 (a signed integer `dst` will do, then); or float32, one for all or one per chunk.
        """
        factors = _Borrowed(scales, self._handle(stream), name="scales") if scales is not None else None
        self._into(self.lib.gc_unpack_signs_into, src, dst, stream, factors and factors.view, self._order(order))

    def vote_signs_into(self, src: Array, dst: Array, turn: int, stream: Any = 1) -> None:
        """What most rows of `src`, uint8 [voters, bytes], have in each bit, to `dst`, uint8 [bytes].

        `turn`, the number of the step for example, says whose bit counts in a tie.
        """
        self._into(self.lib.gc_vote_signs_into, src, dst, stream, _whole("turn", turn, 0, 2**64 - 1))

    # --- tensors and copies

    def tensor_empty(self, shape: Sequence[int], dtype: Any, device: tuple[int, int] = (CPU, 0)) -> Tensor:
        """A new C-contiguous tensor, aligned to 256 bytes; what is in it is undefined."""
        lengths = _wholes("shape", shape)
        about = _device(device), _dtype(dtype), len(lengths), (c_int64 * len(lengths))(*lengths)
        return self.make(self.lib.gc_tensor_empty, *about)

    def tensor_to_device(self, src: Array, device: tuple[int, int]) -> Tensor:
        """A compact copy on that device, of any dtype, also where `src` is there already."""
        return self.make(self.lib.gc_tensor_to_device, _Borrowed(src, name="src"), _device(device))

    def copy_into(self, src: Array, dst: Array, stream: Any = 1) -> None:
        """Copies `src`, broadcast as by NumPy and cast, to `dst`, of any strides, also between devices."""
        self._into(self.lib.gc_copy_into, src, dst, stream)

    # --- kernels

    def builtin_kernels(self, family: str) -> bytes:
        """The fatbin of a family, "bits" for example, to be loaded by cuModuleLoadData or cupy.RawModule."""
        fatbin, size = c_void_p(), c_size_t()
        self.lib.gc_builtin_kernels(_text("family", family), byref(fatbin), byref(size))
        return ctypes.string_at(fatbin, size.value)

    def builtin_kernel_shape(self, kernel: str, compute_capability: int) -> Any:
        """How to launch one of them on a card of 90, for example: a struct with threads, items_per_block and so on."""
        shape = KernelShape(ctypes.sizeof(KernelShape))
        capability = _int32("compute_capability", compute_capability)
        self.lib.gc_builtin_kernel_shape(_text("kernel", kernel), capability, byref(shape))
        return shape

    # fmt: off
    def elementwise(self, inputs: str, outputs: str, operation: str, name: str = "kernel", **more: Any) -> "Kernel":
        """A kernel of CUDA code for each element, as CuPy's ElementwiseKernel takes it; see Kernel."""
        texts = {"inputs": inputs, "outputs": outputs, "operation": operation, "name": name, **more}
        return Kernel(self, self.lib.gc_elementwise_create, ElementwiseOptions, texts)
    def reduction(
        self, inputs: str, outputs: str, map: str, reduce: str, post_map: str, identity: str | None = None,
        name: str = "kernel", **more: Any,
    ) -> "Kernel":
        """A reduction in CUDA code, as CuPy's ReductionKernel takes it; see Kernel."""
        texts = {"inputs": inputs, "outputs": outputs, "map": map, "reduce": reduce, "post_map": post_map, **more}
        texts.update(identity=identity, name=name)
        return Kernel(self, self.lib.gc_reduction_create, ReductionOptions, texts)
    def load_kernel(self, saved: bytes) -> "Kernel":  # code, trusted as such
        """What Kernel.save() gave. It is code: load none that you would not run."""
        return Kernel._of(self, saved)
    # fmt: on

    # --- error feedback

    def onebit_workspace_bytes(self, n_elements: int) -> int:
        """Bytes of the workspace that onebit_compress_into() wants."""
        return self._number(self.lib.gc_onebit_workspace_bytes, _whole("n_elements", n_elements))

    def onebit_compress(self, grad: Array, error: Array | None, n_chunks: int) -> tuple[list[Tensor], float]:
        """Signs of gradient plus error, in n_chunks tensors of uint8 [chunk_bytes], and their scale.

        `grad`: float32, float16 or bfloat16. `error`: float32 or bfloat16, as many elements; what is lost now is
        written to it. None: it is not kept.
        """
        out, scale = (T * _count("n_chunks", n_chunks))(), c_float()
        carried = _Borrowed(error, written=True, name="error") if error is not None else None
        self.lib.gc_onebit_compress(_Borrowed(grad, name="grad"), carried, len(out), out, byref(scale))
        return [Tensor(self, tensor) for tensor in out], scale.value

    def onebit_decompress(
        self, chunks: Sequence[Array], scales: Sequence[float], n_elements: int, dtype: Any = "float32"
    ) -> Tensor:
        """The inverse, less what was lost: [n_elements] of `dtype`; `scales`: numbers, one per chunk."""
        chunks, factors = _arrays("chunks", chunks), _arrays("scales", scales)
        if len(factors) != len(chunks):
            raise ValueError(f"scales: {len(chunks)} expected, one per chunk, got {len(factors)}")
        numbers = [_float32(f"scales[{k}]", factor) for k, factor in enumerate(factors)]
        of_chunks, about = (c_float * len(numbers))(*numbers), _dtype(dtype)
        elements = _whole("n_elements", n_elements)
        return self._unpack(self.lib.gc_onebit_decompress, chunks, of_chunks, elements, about)

    def onebit_compress_into(
        self, grad: Array, error: Array | None, dst: Array, scale: Array, workspace: Array, rule: int = RMS,
        stream: Any = 1,
    ) -> None:  # fmt: skip
        """onebit_compress() to `dst`, uint8 [n_chunks, chunk_bytes], and `scale`, float32 [1].

        `workspace`: uint8, onebit_workspace_bytes() long, aligned to 16. `rule`: RMS or MEAN.
        """
        handle = self._handle(stream)
        source = _Borrowed(grad, handle, name="grad")
        to = _Views([error, dst, scale, workspace], handle, written=True)
        of_error, *outputs = to.pointers
        self.lib.gc_onebit_compress_into(source.view, of_error, _int32("rule", rule), *outputs, handle)

    def codec(self, kind: int, segments: Sequence[int], **options: Any) -> "Codec":
        """A codec, ONEBIT or SIGN, for tensors of so many elements each; see Codec."""
        return Codec(self, kind, segments, **options)

    # --- other processes, and all-reduces

    def share_send(self, tensor: Array, socket: int, flags: int = 0, timeout_ms: int = -1) -> "Share":
        """Sends a tensor over a connected Unix socket (its fileno()) to share_receive() in another process."""
        return Share(self, tensor, socket, flags, timeout_ms)

    def share_receive(self, socket: int, device: tuple[int, int] = (CPU, 0), timeout_ms: int = -1) -> Tensor:
        """The tensor that comes next over a socket. Its release is what the sender waits for."""
        given = _int32("socket", socket), _device(device), _int32("timeout_ms", timeout_ms)
        return self.make(self.lib.gc_share_receive, *given)

    def shard_elements(self, n_elements: int, world_size: int) -> int:
        """Elements of a rank's part in an all-reduce of n_elements."""
        given = _whole("n_elements", n_elements), _int32("world_size", world_size)
        return self._number(self.lib.gc_shard_elements, *given)

    def communicator(
        self, rank: int, world_size: int, all_to_all: "Exchanger", all_gather: "Exchanger"
    ) -> "Communicator":
        """A communicator over two functions of yours; see Communicator."""
        return Communicator(self, rank, world_size, all_to_all, all_gather)

    def group(self, world_size: int) -> list["Communicator"]:
        """Communicators among threads of this process, by rank: one for each thread."""
        ranks = _int32("world_size", world_size)
        comms = (G * max(0, ranks))()
        self.lib.gc_comm_group(ranks, comms)
        return [Communicator._of(self, comm) for comm in comms]

    def nccl(self, comm: int, split: bool = False, dl_handle: int | None = None) -> "Communicator":
        """A communicator over an ncclComm_t, by its address, which must outlive it unless it is split."""
        addresses = _address("comm", comm), _address("dl_handle", dl_handle)
        made, options = G(), NcclOptions(ctypes.sizeof(NcclOptions), int(bool(split)), *addresses)
        self.lib.gc_comm_from_nccl(byref(options), byref(made))
        return Communicator._of(self, made)

    def nccl_id(self, dl_handle: int | None = None) -> bytes:
        """The 128 bytes by which ranks find each other: made on one of them, for nccl_world() on all."""
        made, handle = (c_uint8 * 128)(), _address("dl_handle", dl_handle)
        options = NcclOptions(ctypes.sizeof(NcclOptions), 0, None, handle)
        self.lib.gc_comm_nccl_id(byref(options), made)
        return bytes(made)

    def nccl_world(
        self, of_all: bytes, rank: int, world_size: int, device: int, dl_handle: int | None = None
    ) -> "Communicator":
        """A communicator over NCCL, made anew; `of_all`: what nccl_id() gave on one rank. Every rank calls this."""
        shown = _bytes("of_all", of_all)
        if len(shown) != 128:
            raise ValueError(f"of_all: the 128 bytes of nccl_id() expected, got {len(shown)}")
        made, options = G(), NcclOptions(ctypes.sizeof(NcclOptions), 0, None, _address("dl_handle", dl_handle))
        given, numbers = (c_uint8 * 128)(*shown), (_int32("rank", rank), _int32("world_size", world_size))
        self.lib.gc_comm_from_nccl_id(byref(options), given, *numbers, _device((CUDA, device)), byref(made))
        return Communicator._of(self, made)

    def peers_bytes(self, n_elements: int, world_size: int) -> int:
        """Bytes of each rank's buffer for peers()."""
        given = _whole("n_elements", n_elements), _int32("world_size", world_size)
        return self._number(self.lib.gc_peers_bytes, *given)

    def peers(
        self, rank: int, buffers: Sequence[int], size: int, device: int, timeout_ms: int = 0
    ) -> "Communicator":  # fmt: skip
        """A communicator over memory that the cards of one machine reach.

        `buffers`: the address of every rank's buffer as it is mapped here, `size` bytes each. Keep them as long.
        """
        addresses = _wholes("buffers", buffers, 0, 2**64 - 1)
        given, world_size = (c_void_p * len(addresses))(*addresses), len(addresses)
        wait = _whole("timeout_ms", timeout_ms, 0, 2**32 - 1)
        about = _int32("rank", rank), world_size, wait, _device((CUDA, device)), _count("size", size), given
        made, options = G(), PeersOptions(ctypes.sizeof(PeersOptions), *about)
        self.lib.gc_comm_from_peers(byref(options), byref(made))
        return Communicator._of(self, made)

    def open_peers(
        self, bootstrap: "Communicator", device: int, n_elements: int, timeout_ms: int = 0
    ) -> "Communicator":  # fmt: skip
        """The same over memory of the library's own; the ranks find each other over any communicator, `bootstrap`."""
        made, wait = G(), _whole("timeout_ms", timeout_ms, 0, 2**32 - 1)
        about = _device((CUDA, device)), _whole("n_elements", n_elements), wait
        bootstrap._run(self.lib.gc_comm_open_peers, bootstrap._comm, *about, byref(made))
        return Communicator._of(self, made)

    def two(self, inside: "Communicator", between: "Communicator | None") -> "Communicator":
        """One communicator of two: among the ranks of a machine, and among those that stand for machines."""
        two = Communicator._of(self, G())
        two._parts = [part for part in (inside, between) if part]  # whose functions are called
        two._run(self.lib.gc_comm_hierarchical, inside._comm, between and between._comm, byref(two._comm))
        return two


class _Views:
    """Views of several tensors, NULL for None; good as long as this object."""

    def __init__(
        self, sources: Sequence[Array | None], stream: int = 1, written: bool = False, name: str | None = None
    ) -> None:
        self._borrowed = [None if source is None else _Borrowed(source, stream, written, name) for source in sources]
        views = [one and ctypes.pointer(one._as_parameter_.contents.dl_tensor) for one in self._borrowed]
        self.pointers = (POINTER(DLTensor) * len(views))(*views)


_CHOICES = [*_DTYPES, "device", "beta", "n_chunks", "server"]


def _options(kind: int, segments: Sequence[int], options: dict[str, Any]) -> Any:
    counts = _wholes("segments", segments)
    for name in options:
        if name not in _CHOICES:
            raise TypeError(f"{name}: no option of a codec; those are {', '.join(_CHOICES)}")
    for name in {"values", "results"} & options.keys():
        options[name] = _dtype(options[name])
    if "device" in options:
        options["device"] = _device(options["device"])
    for name in {"error", "scale", "nonfinite"} & options.keys():
        options[name] = _int32(name, options[name])
    for name in {"n_chunks", "server"} & options.keys():
        options[name] = _whole(name, options[name], 0, 2**64 - 1)
    if "beta" in options:
        options["beta"] = _float32("beta", options["beta"])
    sizes = (c_int64 * max(1, len(counts)))(*counts)
    own = {"segments": sizes, "n_segments": len(counts), **options}
    return CodecOptions(ctypes.sizeof(CodecOptions), _int32("kind", kind), **own)


class _Steps:
    """What codecs and all-reduces share. Released with this object."""

    _library: GradCodec
    _lib: Any
    _handle: Any
    _prefix: str

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            getattr(self._lib, f"{self._prefix}_free")(self._handle)

    def _views(
        self, stream: Any, *tensors: Array | None, written: bool = False, name: str | None = None
    ) -> _Views:
        return _Views(tensors, self._library._handle(stream), written, name)

    def _call(self, name: str, stream: Any, *arguments: Any) -> None:
        getattr(self._lib, f"{self._prefix}_{name}")(self._handle, *arguments, self._library._handle(stream))

    def _read(self, name: str, stream: Any, *tensors: Array | None) -> None:
        given = self._views(stream, *tensors)
        self._call(name, stream, *given.pointers)

    def _write(self, name: str, stream: Any, *tensors: Array | None) -> None:
        to = self._views(stream, *tensors, written=True)
        self._call(name, stream, *to.pointers)

    def commit(self, skip: Array | None = None, stream: Any = 1) -> None:
        """Ends a pending step (TRANSACTIONAL). It is taken back if `skip`, one bool on the device, is true, or if
        something was not finite."""
        self._read("commit", stream, skip)

    def rollback(self, stream: Any = 1) -> None:
        """Takes a pending step back: the errors are as they were before it."""
        self._call("rollback", stream)

    def reset(self, stream: Any = 1) -> None:
        """All errors to 0, as in a new one."""
        self._call("reset", stream)

    def flags(self, dst: Array, stream: Any = 1) -> None:
        """What happened since the last call, to `dst`: one uint32 on the device, of the bits GC_FLAG_*."""
        self._write("flags", stream, dst)

    def errors_out(self, worker: Array | None = None, server: Array | None = None, stream: Any = 1) -> None:
        """Copies the carried errors to `worker` and `server`, float32, for a checkpoint; None: not that one."""
        self._write("errors_out", stream, worker, server)


class Codec(_Steps):
    """A codec (gc_codec_t), released with this object. `kind`: ONEBIT or SIGN; `segments`: the element counts of the
    tensors; `options`: fields of gc_codec_options_t, dtypes by their names and the device as a pair of numbers."""

    _prefix = "gc_codec"

    def __init__(self, library: GradCodec, kind: int, segments: Sequence[int], **options: Any) -> None:
        all_of_them = _options(kind, segments, options)
        self._library, self._lib, self._handle = library, library.lib, C()
        self._lib.gc_codec_create(byref(all_of_them), byref(self._handle))
        self.n_chunks: int = all_of_them.n_chunks or 1
        self.payload_bytes = int(self._lib.gc_codec_payload_bytes(self._handle))
        self.state_bytes = int(self._lib.gc_codec_state_bytes(self._handle))

    def __repr__(self) -> str:
        return f"Codec(payload_bytes={self.payload_bytes}, n_chunks={self.n_chunks})"

    def encode(
        self, values: Sequence[Array], payload: Array, value_factor: Array | None = None,
        error_factor: Array | None = None, stream: Any = 1,
    ) -> None:  # fmt: skip
        """Encodes a step's values, and keeps what that loses for the next one.

        `values`: one array per segment, C-contiguous, of the codec's dtype `values`. `payload`: uint8, `payload_bytes`
        long, aligned to 16. The factors, one float32 each on the device, multiply the values and the carried error.
        """
        inputs = self._views(stream, *_arrays("values", values), name="values")
        factors = self._views(stream, value_factor, error_factor)
        to = self._views(stream, payload, written=True, name="payload")
        self._call("encode", stream, inputs.pointers, len(inputs.pointers), *factors.pointers, *to.pointers)

    def decode(
        self, payload: Array, values: Sequence[Array], divisor: int = 1, factor: Array | None = None, mode: int = SET,
        stream: Any = 1,
    ) -> None:  # fmt: skip
        """Decodes a payload to `values`, one array per segment, of the codec's dtype `results`.

        What comes is divided by `divisor` and multiplied by `factor`, one float32 on the device. `mode`: SET, or ADD to
        what is there.
        """
        given = self._views(stream, payload, factor, name="payload")
        outputs = self._views(stream, *_arrays("values", values), written=True, name="values")
        source, scalar = given.pointers
        numbers = _int32("divisor", divisor), scalar, _int32("mode", mode)
        self._call("decode", stream, source, *numbers, outputs.pointers, len(outputs.pointers))

    def reduce(self, chunk: int, chunks: Array, dst: Array, stream: Any = 1) -> None:
        """The mean, or the vote, of one chunk of several ranks, uint8, a row of `chunks` each, to `dst` as a chunk."""
        given, to = self._views(stream, chunks, name="chunks"), self._views(stream, dst, written=True, name="dst")
        self._call("reduce", stream, _count("chunk", chunk), *given.pointers, *to.pointers)

    def scales(self, dst: Array, stream: Any = 1) -> None:
        """The scales of the last payload, to `dst`: float32, one per segment."""
        self._write("scales", stream, dst)

    def state_out(self, dst: Array, stream: Any = 1) -> None:
        """All that the codec keeps, for a checkpoint, to `dst`: uint8, `state_bytes` long, aligned to 16."""
        self._write("state_out", stream, dst)

    def state_in(self, src: Array, stream: Any = 1) -> None:
        """Takes what state_out() of a codec like this one gave."""
        self._read("state_in", stream, src)

    def errors_in(self, worker: Array | None = None, server: Array | None = None, stream: Any = 1) -> None:
        """Takes errors as errors_out() gave them, float32; None: those stay as they are."""
        self._read("errors_in", stream, worker, server)


Exchanger = Callable[[memoryview, memoryview], Any]


def _exchange(function: Exchanger, world_size: int, blocks: int, failures: list[BaseException]) -> Any:
    def exchange(_: Any, send: int, recv: int, size: int, device: Any, stream: Any) -> int:
        try:
            given = (c_uint8 * (blocks * size)).from_address(send)
            room = (c_uint8 * (world_size * size)).from_address(recv)
            function(memoryview(given).cast("B"), memoryview(room).cast("B"))
            return 0
        except BaseException as failure:  # C knows no exceptions
            failures.append(failure)
            return 1

    return Exchange(exchange)


class Share:
    """The sender's side of a tensor that was sent to another process (gc_share_t), released with this object. On CUDA
    the other process has the tensor's own memory: keep this until `wait` has returned, and it keeps the tensor."""

    def __init__(self, library: GradCodec, tensor: Array, socket: int, flags: int, timeout_ms: int) -> None:
        self._lib, self._handle, self._tensor = library.lib, L(), tensor
        numbers = _int32("socket", socket), _whole("flags", flags, 0, 2**32 - 1), _int32("timeout_ms", timeout_ms)
        self._lib.gc_share_send(_Borrowed(tensor, name="tensor"), *numbers, byref(self._handle))

    def wait(self, timeout_ms: int = -1) -> None:
        """Until the other process has released the tensor; -1: however long that takes."""
        self._lib.gc_share_wait(self._handle, _int32("timeout_ms", timeout_ms))

    def __del__(self) -> None:
        self._lib.gc_share_free(self._handle)


def _is_number(thing: Any) -> bool:
    """Python's numbers, and NumPy's whole ones; an array with one element is an array."""
    return isinstance(thing, (int, float)) or hasattr(thing, "__index__") and not hasattr(thing, "__dlpack__")


class _Number:
    """A Python number as a tensor of the CPU without a dimension, which kernels take as a scalar."""

    def __init__(self, number: Any) -> None:
        self._memory: c_int64 | ctypes.c_uint64 | ctypes.c_double
        if not isinstance(number, float):
            number = operator.index(number)
        if isinstance(number, float):
            self._memory, dtype = ctypes.c_double(number), "float64"
        elif -(2**63) <= number < 2**63:  # ctypes would cut larger ones
            self._memory, dtype = c_int64(number), "int64"
        elif 0 <= number < 2**64:
            self._memory, dtype = ctypes.c_uint64(number), "uint64"
        else:
            raise OverflowError(f"{number} is neither an int64 nor a uint64")
        data, device = ctypes.cast(byref(self._memory), c_void_p), Device(CPU, 0)
        self.view = byref(DLTensor(data, device, 0, DType(*DTYPES[dtype]), None, None, 0))


class Kernel:
    """A kernel that is compiled at run time (gc_kernel_t), released with this object: GradCodec.elementwise and
    GradCodec.reduction make it, of texts as CuPy's ElementwiseKernel and ReductionKernel take them, and other fields of
    the options. Called with one array for each parameter, outputs too; inputs may be Python numbers. A reduction wants
    as `workspace` uint8 on the device, of workspace_bytes() bytes, where that is not 0. Keep it as long as its work is
    under way, or a graph has it: code that runs is not to be unloaded."""

    def __init__(self, library: GradCodec, create: Any, kind: Any, fields: dict[str, Any]) -> None:
        self._library, self._lib, self._handle = library, library.lib, K()
        given = fields.pop("options", ())
        if isinstance(given, (str, bytes)):
            raise TypeError(f"options: a sequence of str expected, got {_said(given)}")
        options = [_text(f"options[{k}]", option) for k, option in enumerate(given)]
        numbers = {"flags": _whole("flags", fields.pop("flags", 0), 0, 2**32 - 1)}
        numbers["nvrtc"] = _address("nvrtc", fields.pop("nvrtc", None)) or 0
        texts = [name for name, of in kind._fields_ if of is c_char_p]
        for name in fields.keys() - set(texts):
            raise TypeError(f"{name}: no option of a kernel; those are {', '.join(texts)}, options, flags, nvrtc")
        encoded = {name: text if text is None else _text(name, text) for name, text in fields.items()}
        self._kept = (c_char_p * max(1, len(options)))(*options)
        sizes = {"struct_size": ctypes.sizeof(kind), "options": self._kept, "n_options": len(options)}
        all_of_them = kind(**sizes, **numbers, **encoded)
        create(byref(all_of_them), byref(self._handle))

    @classmethod
    def _of(cls, library: GradCodec, saved: bytes) -> "Kernel":
        made = cls.__new__(cls)
        made._library, made._lib, made._handle = library, library.lib, K()
        code = _bytes("saved", saved)
        library.lib.gc_kernel_load(code, len(code), byref(made._handle))
        return made

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._lib.gc_kernel_free(self._handle)

    def _call(
        self, function: Any, inputs: Sequence[Any], outputs: Sequence[Array], stream: Any, workspace: Array | None = None,
        axes: int | Sequence[int] | None = None, keepdims: bool = False, size: int = 0, capability: int = 0,
    ) -> Any:
        handle = self._library._handle(stream)
        given = [_Number(x) if _is_number(x) else _Borrowed(x, handle) for x in _arrays("inputs", inputs)]
        to = [_Borrowed(x, handle, written=True) for x in _arrays("outputs", outputs)]
        room = _Borrowed(workspace, handle, written=True) if workspace is not None else None
        numbers = [] if axes is None else [_int32("axes", axes)] if _is_number(axes) else _wholes("axes", axes, *INT32)
        values = None if axes is None else (c_int32 * max(1, len(numbers)))(*numbers)
        flags, elements = int(bool(keepdims)), _whole("size", size)
        options = RunOptions(ctypes.sizeof(RunOptions), flags, elements, values, len(numbers))
        options.capability = _int32("capability", capability)
        if room is not None:
            options.workspace = ctypes.pointer(room._as_parameter_.contents.dl_tensor)
        arrays = [(POINTER(DLTensor) * max(1, len(of)))(*(ctypes.cast(x.view, VIEW) for x in of)) for of in (given, to)]
        arguments = [self._handle, arrays[0], len(given), arrays[1], len(to), byref(options)]
        return function(*arguments) if function == self._lib.gc_kernel_workspace_bytes else function(*arguments, handle)

    # fmt: off
    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Array], stream: Any = 1, **options: Any) -> None:
        self._call(self._lib.gc_kernel_run, inputs, outputs, stream, **options)
    def prepare(self, inputs: Sequence[Any], outputs: Sequence[Array], stream: Any = 1, **options: Any) -> None:
        self._call(self._lib.gc_kernel_prepare, inputs, outputs, stream, **options)
    def workspace_bytes(self, inputs: Sequence[Any], outputs: Sequence[Array], **options: Any) -> int:
        size = int(self._call(self._lib.gc_kernel_workspace_bytes, inputs, outputs, 1, **options))
        self._library._check(int(size < 0))
        return size
    def log(self) -> str:
        log = c_char_p()
        self._lib.gc_kernel_log(self._handle, byref(log))
        return (log.value or b"").decode()
    def save(self) -> bytes:
        saved = self._library.make(self._lib.gc_kernel_save, self._handle)
        return ctypes.string_at(saved.address, saved.shape[0])


class Communicator:
    """A rank's way to the others (gc_comm_t), released with this object. `all_to_all` and `all_gather` take what to
    send and room to receive, host memory both, as mpi4py's comm.Alltoall and comm.Allgather do. What they raise is the
    cause of the exception that a call raises then."""

    def __init__(
        self, library: GradCodec, rank: int, world_size: int, all_to_all: Exchanger, all_gather: Exchanger
    ) -> None:
        self._keep(library, G())
        rank, world_size = _int32("rank", rank), _int32("world_size", world_size)
        to_all = _exchange(all_to_all, world_size, world_size, self._failures)
        gather, host = _exchange(all_gather, world_size, 1, self._failures), 1
        self._transport = Transport(ctypes.sizeof(Transport), rank, world_size, host, None, to_all, gather)
        library.lib.gc_comm_from_transport(byref(self._transport), byref(self._comm))

    def _keep(self, library: GradCodec, comm: Any) -> None:
        self._library, self._comm, self._failures = library, comm, list[BaseException]()
        self._parts: list[Communicator] = []

    @classmethod
    def _of(cls, library: GradCodec, comm: Any) -> "Communicator":
        made = cls.__new__(cls)
        made._keep(library, comm)
        return made

    def __del__(self) -> None:
        if getattr(self, "_comm", None):
            self._library.lib.gc_comm_free(self._comm)

    def _raised(self) -> list[list[BaseException]]:
        """What functions of Python have raised, of this communicator and of those that it is made of."""
        return [self._failures, *(raised for part in self._parts for raised in part._raised())]

    def _run(self, function: Any, *arguments: Any) -> None:
        for raised in self._raised():
            raised.clear()
        try:
            function(*arguments)
        except GradCodecError as error:
            raise error from next((failure for raised in self._raised() for failure in raised), None)

    def reserve(self, n_elements: int, device: tuple[int, int] = (CPU, 0)) -> None:
        """Allocates for all-reduces of so many elements now, so that they allocate nothing."""
        self._library.lib.gc_comm_reserve(self._comm, _device(device), _whole("n_elements", n_elements))

    def async_error(self) -> None:
        """Raises what went wrong in work that was enqueued."""
        self._library.lib.gc_comm_async_error(self._comm)

    def compressed_allreduce(self, buffer: Array, worker_error: Array, server_error: Array, stream: Any = 1) -> None:
        """The mean of `buffer` over all ranks, in place, at one bit per element: DeepSpeed's compressed_allreduce.

        All float32 and contiguous. `worker_error`: as many elements as `buffer`; `server_error`: shard_elements() of
        them. Both begin as zeros and are kept by you. Every rank calls this.
        """
        handle = self._library._handle(stream)
        tensors = _Views([buffer, worker_error, server_error], handle, written=True)
        self._run(self._library.lib.gc_compressed_allreduce, self._comm, *tensors.pointers, handle)

    def allreduce(self, kind: int, segments: Sequence[int], **options: Any) -> "AllReduce":
        """An all-reduce of tensors with these element counts, which keeps its errors; `options` as for a Codec."""
        return AllReduce(self, kind, segments, **options)


class AllReduce(_Steps):
    """An all-reduce that keeps its errors (gc_allreduce_t), made on every rank with what makes a Codec; released with
    this object."""

    _prefix = "gc_allreduce"

    def __init__(self, comm: Communicator, kind: int, segments: Sequence[int], **options: Any) -> None:
        self._library, self._lib, self._comm, self._handle = comm._library, comm._library.lib, comm, R()
        all_of_them = _options(kind, segments, options)
        comm._run(self._lib.gc_allreduce_create, comm._comm, byref(all_of_them), byref(self._handle))

    def run(
        self, values: Sequence[Array], value_factor: Array | None = None, error_factor: Array | None = None,
        stream: Any = 1,
    ) -> None:  # fmt: skip
        """The mean of `values` over all ranks, in place: one array per segment. The factors: as for Codec.encode()."""
        outputs = self._views(stream, *_arrays("values", values), written=True, name="values")
        factors, handle = self._views(stream, value_factor, error_factor), self._library._handle(stream)
        given = outputs.pointers, len(outputs.pointers), *factors.pointers
        self._comm._run(self._lib.gc_allreduce_run, self._handle, *given, handle)

    def reduce_scatter(
        self, values: Sequence[Array], shard: Array, value_factor: Array | None = None,
        error_factor: Array | None = None, stream: Any = 1,
    ) -> None:  # fmt: skip
        """The first half of run(): the mean of this rank's part to `shard`, shard_elements() long; `values` stay."""
        inputs = self._views(stream, *_arrays("values", values), name="values")
        factors, handle = self._views(stream, value_factor, error_factor), self._library._handle(stream)
        to = self._views(stream, shard, written=True, name="shard")
        given = inputs.pointers, len(inputs.pointers), *factors.pointers, *to.pointers
        self._comm._run(self._lib.gc_allreduce_reduce_scatter, self._handle, *given, handle)

    def all_gather(self, shard: Array, values: Sequence[Array], stream: Any = 1) -> None:
        """The second half of run(): the shards of all ranks, compressed, to `values`."""
        given, handle = self._views(stream, shard, name="shard"), self._library._handle(stream)
        outputs = self._views(stream, *_arrays("values", values), written=True, name="values")
        to = outputs.pointers, len(outputs.pointers)
        self._comm._run(self._lib.gc_allreduce_all_gather, self._handle, *given.pointers, *to, handle)

    def errors_in(self, workers: Array | None = None, server: Array | None = None, stream: Any = 1) -> None:
        """Takes errors that errors_out() gave, float32, also in a world of another size: `workers` has a row for each
        rank, `server` the shards one after the other."""
        self._read("errors_in", stream, workers, server)
