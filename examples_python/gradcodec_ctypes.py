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
    """A call that failed, in the library's words; `status` is one of GC_STATUS_*."""

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
    "gc_comm_open_peers": [G, Device, c_int64, c_uint32, POINTER(G)], "gc_comm_from_two": [G, G, POINTER(G)],
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
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


def _contents(capsule: Any) -> tuple[bytes, Any]:
    """The name of a capsule, and a pointer to its tensor, which it keeps."""
    name = _python.PyCapsule_GetName(capsule)
    if name not in FORMS:
        raise BufferError(f"no tensor to be had from a capsule named {name!r}")
    return name, ctypes.cast(_python.PyCapsule_GetPointer(capsule, name), FORMS[name][0])


class _Borrowed:
    """A tensor of somebody else. Its capsule, which is not consumed, owns it and goes with this object."""

    def __init__(self, source: Array, stream: int = 1, written: bool = False) -> None:
        # On a CPU there is no stream, and to name one is an error.
        ready = {"stream": stream} if source.__dlpack_device__()[0] in (CUDA, CUDA_MANAGED) else {}
        try:
            self.capsule = source.__dlpack__(max_version=(1, 0), **ready)
        except TypeError:  # older than DLPack 1.0
            self.capsule = source.__dlpack__(**ready)
        name, self._as_parameter_ = _contents(self.capsule)
        if name == VERSIONED:
            tensor = self._as_parameter_.contents
            if tensor.major != 1:
                raise BufferError(f"DLPack {tensor.major}.{tensor.minor} is not known here")
            if written and tensor.flags & 3:
                raise GradCodecError("dst: read-only, or a copy of what was meant", 5)
            self._as_parameter_ = ctypes.pointer(Managed(tensor.dl_tensor, None, None))
        self.view = byref(self._as_parameter_.contents.dl_tensor)


class Tensor:
    """A tensor of the library, for the from_dlpack() of one framework; released with this object if none takes it."""

    def __init__(self, library: "GradCodec", managed: Any) -> None:
        self._library, view = library, managed.contents.dl_tensor
        self._keep(LEGACY, managed)
        self.device, self.address = (view.device.device_type, view.device.device_id), view.data or 0
        self.shape: tuple[int, ...] = tuple(view.shape[: view.ndim])

    def _keep(self, name: bytes, tensor: Any) -> None:
        # A destructor in Python would disturb an exception that is on its way when the capsule goes.
        native = ctypes.cast(self._library.lib.gc_capsule_destructor, c_void_p)
        self._capsule = _python.PyCapsule_New(ctypes.cast(tensor, c_void_p), name, native)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
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
    """The library beside this file, as in the wheel, where the system finds it, or where a `make install` may put it."""
    beside = pathlib.Path(__file__).resolve().parent / "lib" / NAME
    if beside.exists():
        return ctypes.CDLL(str(beside))
    try:
        return ctypes.CDLL(NAME)
    except OSError as error:
        prefixes = pathlib.Path(__file__).resolve().parent.parent, sys.prefix, os.path.expanduser("~/.local")
        places = [os.path.join(prefix, "lib", NAME) for prefix in prefixes]
        for place in filter(os.path.exists, places):
            return ctypes.CDLL(place)
        raise OSError(
            f"{error}; nor is it one of {', '.join(places)}. Install GradCodec with `make install PREFIX=$HOME/.local`, "
            "or name the file: GradCodec(path), or GRADCODEC_LIBRARY in the environment"
        ) from None


class GradCodec:
    """The library: the file at `path`, or that GRADCODEC_LIBRARY names, or the libgradcodec.so.0 that is installed."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        named = path or os.environ.get("GRADCODEC_LIBRARY")
        self.lib = ctypes.CDLL(os.fspath(named)) if named else _installed()
        for name, arguments in SIGNATURES.items():
            function = getattr(self.lib, name)
            function.argtypes, function.restype = arguments, self._check
        for name in ("last_error", "version_string", "build_info"):
            getattr(self.lib, f"gc_{name}").restype = c_char_p
        numbers = "chunk_bytes", "onebit_workspace_bytes", "codec_payload_bytes", "codec_state_bytes", "shard_elements"
        for name in (*numbers, "peers_bytes", "kernel_workspace_bytes"):
            getattr(self.lib, f"gc_{name}").restype = c_int64
        for name in ("codec", "comm", "allreduce", "share", "kernel"):
            getattr(self.lib, f"gc_{name}_free").restype = None
        self.set_threads: Callable[[int], None] = self.lib.gc_set_threads
        self.prepare: Callable[[tuple[int, int]], None] = lambda device: self.lib.gc_prepare(Device(*device))
        self.trim: Callable[[tuple[int, int]], None] = lambda device: self.lib.gc_trim(Device(*device))

    def _check(self, status: int) -> None:
        if status != 0:
            raise GradCodecError(self.lib.gc_last_error().decode(), status)

    def make(self, function: Any, *arguments: Any) -> Tensor:  # for those whose last argument is one `out`
        out = T()
        function(*arguments, byref(out))
        return Tensor(self, out)

    @staticmethod
    def _handle(stream: Any) -> int:
        return int(getattr(stream, "cuda_stream", getattr(stream, "ptr", stream)) or 1)

    def _into(self, function: Any, src: Array, dst: Array, stream: Any, *numbers: Any) -> None:
        handle = self._handle(stream)
        source, target = _Borrowed(src, handle), _Borrowed(dst, handle, written=True)
        function(source.view, *numbers, target.view, handle)

    # fmt: off
    def build_info(self) -> str:  # for bug reports
        return bytes(self.lib.gc_build_info()).decode()
    def chunk_bytes(self, n_elements: int, n_chunks: int) -> int:
        size = int(self.lib.gc_chunk_bytes(n_elements, n_chunks))
        self._check(int(size < 0))
        return size
    def pack_chunks(self, src: Array, n_chunks: int) -> list[Tensor]:
        return self._pack(self.lib.gc_pack_chunks, src, n_chunks)
    def pack_signs(self, src: Array, n_chunks: int) -> list[Tensor]:
        return self._pack(self.lib.gc_pack_signs, src, n_chunks)
    def _pack(self, function: Any, src: Array, n_chunks: int) -> list[Tensor]:
        out = (T * n_chunks)()
        function(_Borrowed(src), n_chunks, out)
        return [Tensor(self, tensor) for tensor in out]
    def unpack_chunks(self, chunks: Sequence[Array], n_elements: int) -> Tensor:
        return self._unpack(self.lib.gc_unpack_chunks, chunks, n_elements)
    def unpack_signs(self, chunks: Sequence[Array], n_elements: int, dtype: str = "float32") -> Tensor:
        return self._unpack(self.lib.gc_unpack_signs, chunks, n_elements, DType(*DTYPES[dtype]))
    def _unpack(self, function: Any, chunks: Sequence[Array], *arguments: Any) -> Tensor:
        sources = [_Borrowed(chunk) for chunk in chunks]
        pointers = (T * len(sources))(*(source._as_parameter_ for source in sources))
        return self.make(function, pointers, len(sources), *arguments)
    def pack_bits(self, src: Array, axis: int = AXIS_NONE, order: int = BIG) -> Tensor:
        return self.make(self.lib.gc_pack_bits, _Borrowed(src), axis, order)
    def unpack_bits(self, src: Array, axis: int = AXIS_NONE, count: int = COUNT_ALL, order: int = BIG) -> Tensor:
        return self.make(self.lib.gc_unpack_bits, _Borrowed(src), axis, count, order)
    def pack_chunks_into(self, src: Array, dst: Array, order: int = BIG, stream: Any = 1) -> None:
        self._into(self.lib.gc_pack_chunks_into, src, dst, stream, order)
    def unpack_chunks_into(self, src: Array, dst: Array, order: int = BIG, stream: Any = 1) -> None:
        self._into(self.lib.gc_unpack_chunks_into, src, dst, stream, order)
    def pack_signs_into(self, src: Array, dst: Array, order: int = BIG, stream: Any = 1) -> None:
        self._into(self.lib.gc_pack_signs_into, src, dst, stream, order)
    def unpack_signs_into(
        self, src: Array, dst: Array, scales: Array | None = None, order: int = BIG, stream: Any = 1
    ) -> None:  # scales: none for +1 and -1; or float32, one or one per chunk
        factors = _Borrowed(scales, self._handle(stream)) if scales is not None else None
        self._into(self.lib.gc_unpack_signs_into, src, dst, stream, factors and factors.view, order)
    def vote_signs_into(self, src: Array, dst: Array, turn: int, stream: Any = 1) -> None:
        self._into(self.lib.gc_vote_signs_into, src, dst, stream, turn)
    def pack_bits_into(self, src: Array, dst: Array, axis: int = AXIS_NONE, order: int = 0, stream: Any = 1) -> None:
        self._into(self.lib.gc_pack_bits_into, src, dst, stream, axis, order)
    def unpack_bits_into(self, src: Array, dst: Array, axis: int = AXIS_NONE, order: int = 0, stream: Any = 1) -> None:
        self._into(self.lib.gc_unpack_bits_into, src, dst, stream, axis, order)
    def tensor_empty(self, shape: Sequence[int], dtype: str, device: tuple[int, int] = (CPU, 0)) -> Tensor:
        about = Device(*device), DType(*DTYPES[dtype]), len(shape), (c_int64 * len(shape))(*shape)
        return self.make(self.lib.gc_tensor_empty, *about)
    def tensor_to_device(self, src: Array, device: tuple[int, int]) -> Tensor:
        return self.make(self.lib.gc_tensor_to_device, _Borrowed(src), Device(*device))
    def copy_into(self, src: Array, dst: Array, stream: Any = 1) -> None:
        self._into(self.lib.gc_copy_into, src, dst, stream)
    def builtin_kernels(self, family: str) -> bytes:
        fatbin, size = c_void_p(), c_size_t()
        self.lib.gc_builtin_kernels(family.encode(), byref(fatbin), byref(size))
        return ctypes.string_at(fatbin, size.value)
    def builtin_kernel_shape(self, kernel: str, compute_capability: int) -> Any:
        shape = KernelShape(ctypes.sizeof(KernelShape))
        self.lib.gc_builtin_kernel_shape(kernel.encode(), compute_capability, byref(shape))
        return shape
    def onebit_workspace_bytes(self, n_elements: int) -> int:
        size = int(self.lib.gc_onebit_workspace_bytes(n_elements))
        self._check(int(size < 0))
        return size
    def onebit_compress(self, grad: Array, error: Array | None, n_chunks: int) -> tuple[list[Tensor], float]:
        out, scale = (T * n_chunks)(), c_float()
        carried = _Borrowed(error, written=True) if error is not None else None
        self.lib.gc_onebit_compress(_Borrowed(grad), carried, n_chunks, out, byref(scale))
        return [Tensor(self, tensor) for tensor in out], scale.value
    def onebit_decompress(
        self, chunks: Sequence[Array], scales: Sequence[float], n_elements: int, dtype: str = "float32"
    ) -> Tensor:  # scales: one per chunk
        if len(scales) != len(chunks):
            raise ValueError(f"scales: {len(chunks)} expected, one per chunk, got {len(scales)}")
        of_chunks, about = (c_float * len(scales))(*scales), DType(*DTYPES[dtype])
        return self._unpack(self.lib.gc_onebit_decompress, chunks, of_chunks, n_elements, about)
    def onebit_compress_into(
        self, grad: Array, error: Array | None, dst: Array, scale: Array, workspace: Array, rule: int = RMS,
        stream: Any = 1,
    ) -> None:
        handle = self._handle(stream)
        source, to = _Borrowed(grad, handle), _Views([error, dst, scale, workspace], handle, written=True)
        of_error, *outputs = to.pointers
        self.lib.gc_onebit_compress_into(source.view, of_error, rule, *outputs, handle)
    def share_send(self, tensor: Array, socket: int, flags: int = 0, timeout_ms: int = -1) -> "Share":  # socket.fileno()
        return Share(self, tensor, socket, flags, timeout_ms)
    def share_receive(self, socket: int, device: tuple[int, int] = (CPU, 0), timeout_ms: int = -1) -> Tensor:
        return self.make(self.lib.gc_share_receive, socket, Device(*device), timeout_ms)
    def elementwise(self, inputs: str, outputs: str, operation: str, name: str = "kernel", **more: Any) -> "Kernel":
        texts = {"inputs": inputs, "outputs": outputs, "operation": operation, "name": name, **more}
        return Kernel(self, self.lib.gc_elementwise_create, ElementwiseOptions, texts)
    def reduction(
        self, inputs: str, outputs: str, map: str, reduce: str, post_map: str, identity: str | None = None,
        name: str = "kernel", **more: Any,
    ) -> "Kernel":
        texts = {"inputs": inputs, "outputs": outputs, "map": map, "reduce": reduce, "post_map": post_map, **more}
        return Kernel(self, self.lib.gc_reduction_create, ReductionOptions, {**texts, "identity": identity, "name": name})
    def load_kernel(self, saved: bytes) -> "Kernel":  # code, trusted as such
        return Kernel._of(self, saved)
    def codec(self, kind: int, segments: Sequence[int], **options: Any) -> "Codec":
        return Codec(self, kind, segments, **options)
    def shard_elements(self, n_elements: int, world_size: int) -> int:
        elements = int(self.lib.gc_shard_elements(n_elements, world_size))
        self._check(int(elements < 0))
        return elements
    def communicator(
        self, rank: int, world_size: int, all_to_all: "Exchanger", all_gather: "Exchanger"
    ) -> "Communicator":
        return Communicator(self, rank, world_size, all_to_all, all_gather)
    def group(self, world_size: int) -> list["Communicator"]:  # by rank, for a thread each
        comms = (G * max(0, world_size))()
        self.lib.gc_comm_group(world_size, comms)
        return [Communicator._of(self, comm) for comm in comms]
    def nccl(self, comm: int, split: bool = False, dl_handle: int | None = None) -> "Communicator":  # an ncclComm_t
        made, options = G(), NcclOptions(ctypes.sizeof(NcclOptions), int(split), comm, dl_handle)
        self.lib.gc_comm_from_nccl(byref(options), byref(made))
        return Communicator._of(self, made)
    def nccl_id(self, dl_handle: int | None = None) -> bytes:  # on one rank, for all
        made, options = (c_uint8 * 128)(), NcclOptions(ctypes.sizeof(NcclOptions), 0, None, dl_handle)
        self.lib.gc_comm_nccl_id(byref(options), made)
        return bytes(made)
    def nccl_world(
        self, of_all: bytes, rank: int, world_size: int, device: int, dl_handle: int | None = None
    ) -> "Communicator":
        made, options = G(), NcclOptions(ctypes.sizeof(NcclOptions), 0, None, dl_handle)
        given = (c_uint8 * 128)(*of_all)
        self.lib.gc_comm_from_nccl_id(byref(options), given, rank, world_size, Device(CUDA, device), byref(made))
        return Communicator._of(self, made)
    def peers_bytes(self, n_elements: int, world_size: int) -> int:
        size = int(self.lib.gc_peers_bytes(n_elements, world_size))
        self._check(int(size < 0))
        return size
    def peers(
        self, rank: int, buffers: Sequence[int], size: int, device: int, timeout_ms: int = 0
    ) -> "Communicator":  # addresses of every rank's buffer as they are mapped here; to be kept alive
        given, world_size = (c_void_p * len(buffers))(*buffers), len(buffers)
        about = ctypes.sizeof(PeersOptions), rank, world_size, timeout_ms, Device(CUDA, device), size, given
        made, options = G(), PeersOptions(*about)
        self.lib.gc_comm_from_peers(byref(options), byref(made))
        return Communicator._of(self, made)
    def open_peers(
        self, bootstrap: "Communicator", device: int, n_elements: int, timeout_ms: int = 0
    ) -> "Communicator":
        made = G()
        self.lib.gc_comm_open_peers(bootstrap._comm, Device(CUDA, device), n_elements, timeout_ms, byref(made))
        return Communicator._of(self, made)
    def two(self, inside: "Communicator", between: "Communicator | None") -> "Communicator":
        made = G()
        inside._run(self.lib.gc_comm_from_two, inside._comm, between and between._comm, byref(made))
        two = Communicator._of(self, made)
        two._parts = inside, between  # whose functions are called
        return two


class _Views:
    """Views of several tensors, NULL for None; good as long as this object."""

    def __init__(self, sources: Sequence[Array | None], stream: int = 1, written: bool = False) -> None:
        self._borrowed = [None if source is None else _Borrowed(source, stream, written) for source in sources]
        views = [one and ctypes.pointer(one._as_parameter_.contents.dl_tensor) for one in self._borrowed]
        self.pointers = (POINTER(DLTensor) * len(views))(*views)


def _options(kind: int, segments: Sequence[int], options: dict[str, Any]) -> Any:
    for name in {"values", "results"} & options.keys():
        options[name] = DType(*DTYPES[options[name]])
    if "device" in options:
        options["device"] = Device(*options["device"])
    sizes = (c_int64 * max(1, len(segments)))(*segments)
    own = {"segments": sizes, "n_segments": len(segments), **options}
    return CodecOptions(ctypes.sizeof(CodecOptions), kind, **own)


class _Steps:
    """What codecs and all-reduces share. Released with this object."""

    _library: GradCodec
    _lib: Any
    _handle: Any
    _prefix: str

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            getattr(self._lib, f"{self._prefix}_free")(self._handle)

    def _views(self, stream: Any, *tensors: Array | None, written: bool = False) -> _Views:
        return _Views(tensors, self._library._handle(stream), written)

    # fmt: off
    def _call(self, name: str, stream: Any, *arguments: Any) -> None:
        getattr(self._lib, f"{self._prefix}_{name}")(self._handle, *arguments, self._library._handle(stream))
    def commit(self, skip: Array | None = None, stream: Any = 1) -> None:
        self._read("commit", stream, skip)
    def rollback(self, stream: Any = 1) -> None:
        self._call("rollback", stream)
    def reset(self, stream: Any = 1) -> None:
        self._call("reset", stream)
    def _read(self, name: str, stream: Any, *tensors: Array | None) -> None:
        given = self._views(stream, *tensors)
        self._call(name, stream, *given.pointers)
    def _write(self, name: str, stream: Any, *tensors: Array | None) -> None:
        to = self._views(stream, *tensors, written=True)
        self._call(name, stream, *to.pointers)
    def flags(self, dst: Array, stream: Any = 1) -> None:
        self._write("flags", stream, dst)
    def errors_out(self, worker: Array | None = None, server: Array | None = None, stream: Any = 1) -> None:
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

    # fmt: off
    def encode(
        self, values: Sequence[Array], payload: Array, value_factor: Array | None = None,
        error_factor: Array | None = None, stream: Any = 1,
    ) -> None:
        inputs, factors = self._views(stream, *values), self._views(stream, value_factor, error_factor)
        to = self._views(stream, payload, written=True)
        self._call("encode", stream, inputs.pointers, len(values), *factors.pointers, *to.pointers)
    def decode(
        self, payload: Array, values: Sequence[Array], divisor: int = 1, factor: Array | None = None, mode: int = SET,
        stream: Any = 1,
    ) -> None:
        given, outputs = self._views(stream, payload, factor), self._views(stream, *values, written=True)
        source, scalar = given.pointers
        self._call("decode", stream, source, divisor, scalar, mode, outputs.pointers, len(values))
    def reduce(self, chunk: int, chunks: Array, dst: Array, stream: Any = 1) -> None:
        given, to = self._views(stream, chunks), self._views(stream, dst, written=True)
        self._call("reduce", stream, chunk, *given.pointers, *to.pointers)
    def scales(self, dst: Array, stream: Any = 1) -> None:
        self._write("scales", stream, dst)
    def state_out(self, dst: Array, stream: Any = 1) -> None:
        self._write("state_out", stream, dst)
    def state_in(self, src: Array, stream: Any = 1) -> None:
        self._read("state_in", stream, src)
    def errors_in(self, worker: Array | None = None, server: Array | None = None, stream: Any = 1) -> None:
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
        self._lib.gc_share_send(_Borrowed(tensor), socket, flags, timeout_ms, byref(self._handle))

    def wait(self, timeout_ms: int = -1) -> None:
        self._lib.gc_share_wait(self._handle, timeout_ms)

    def __del__(self) -> None:
        self._lib.gc_share_free(self._handle)


class _Number:
    """A Python number as a tensor of the CPU without a dimension, which kernels take as a scalar."""

    def __init__(self, number: float) -> None:
        self._memory: c_int64 | ctypes.c_uint64 | ctypes.c_double
        if not isinstance(number, int):
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
    as `workspace` uint8 on the device, of workspace_bytes() bytes, where that is not 0."""

    def __init__(self, library: GradCodec, create: Any, kind: Any, fields: dict[str, Any]) -> None:
        self._library, self._lib, self._handle = library, library.lib, K()
        options = [option.encode() for option in fields.pop("options", ())]
        texts = {name: text.encode() if isinstance(text, str) else text for name, text in fields.items()}
        self._kept = (c_char_p * max(1, len(options)))(*options)
        all_of_them = kind(struct_size=ctypes.sizeof(kind), options=self._kept, n_options=len(options), **texts)
        create(byref(all_of_them), byref(self._handle))

    @classmethod
    def _of(cls, library: GradCodec, saved: bytes) -> "Kernel":
        made = cls.__new__(cls)
        made._library, made._lib, made._handle = library, library.lib, K()
        library.lib.gc_kernel_load(saved, len(saved), byref(made._handle))
        return made

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._lib.gc_kernel_free(self._handle)

    def _call(
        self, function: Any, inputs: Sequence[Any], outputs: Sequence[Array], stream: Any, workspace: Array | None = None,
        axes: int | Sequence[int] | None = None, keepdims: bool = False, size: int = 0, capability: int = 0,
    ) -> Any:
        handle = self._library._handle(stream)
        given = [_Number(x) if isinstance(x, (int, float)) else _Borrowed(x, handle) for x in inputs]
        to = [_Borrowed(x, handle, written=True) for x in outputs]
        room = _Borrowed(workspace, handle, written=True) if workspace is not None else None
        numbers = (axes,) if isinstance(axes, int) else axes
        values = None if numbers is None else (c_int32 * max(1, len(numbers)))(*numbers)
        options = RunOptions(ctypes.sizeof(RunOptions), int(keepdims), size, values, len(numbers or ()))
        options.capability = capability
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
        to_all = _exchange(all_to_all, world_size, world_size, self._failures)
        gather, host = _exchange(all_gather, world_size, 1, self._failures), 1
        self._transport = Transport(ctypes.sizeof(Transport), rank, world_size, host, None, to_all, gather)
        library.lib.gc_comm_from_transport(byref(self._transport), byref(self._comm))

    def _keep(self, library: GradCodec, comm: Any) -> None:
        self._library, self._comm, self._failures = library, comm, list[BaseException]()
        self._parts: Any = None

    @classmethod
    def _of(cls, library: GradCodec, comm: Any) -> "Communicator":
        made = cls.__new__(cls)
        made._keep(library, comm)
        return made

    def __del__(self) -> None:
        if getattr(self, "_comm", None):
            self._library.lib.gc_comm_free(self._comm)

    def _run(self, function: Any, *arguments: Any) -> None:
        self._failures.clear()
        try:
            function(*arguments)
        except GradCodecError as error:
            raise error from next(iter(self._failures), None)

    # fmt: off
    def reserve(self, n_elements: int, device: tuple[int, int] = (CPU, 0)) -> None:
        self._library.lib.gc_comm_reserve(self._comm, Device(*device), n_elements)
    def async_error(self) -> None:
        self._library.lib.gc_comm_async_error(self._comm)
    def compressed_allreduce(self, buffer: Array, worker_error: Array, server_error: Array, stream: Any = 1) -> None:
        handle = self._library._handle(stream)
        tensors = _Views([buffer, worker_error, server_error], handle, written=True)
        self._run(self._library.lib.gc_compressed_allreduce, self._comm, *tensors.pointers, handle)
    def allreduce(self, kind: int, segments: Sequence[int], **options: Any) -> "AllReduce":
        return AllReduce(self, kind, segments, **options)


class AllReduce(_Steps):
    """An all-reduce that keeps its errors (gc_allreduce_t), made on every rank with what makes a Codec; released with
    this object."""

    _prefix = "gc_allreduce"

    def __init__(self, comm: Communicator, kind: int, segments: Sequence[int], **options: Any) -> None:
        self._library, self._lib, self._comm, self._handle = comm._library, comm._library.lib, comm, R()
        all_of_them = _options(kind, segments, options)
        comm._run(self._lib.gc_allreduce_create, comm._comm, byref(all_of_them), byref(self._handle))

    # fmt: off
    def run(
        self, values: Sequence[Array], value_factor: Array | None = None, error_factor: Array | None = None,
        stream: Any = 1,
    ) -> None:
        outputs, factors = self._views(stream, *values, written=True), self._views(stream, value_factor, error_factor)
        handle = self._library._handle(stream)
        self._comm._run(
            self._lib.gc_allreduce_run, self._handle, outputs.pointers, len(values), *factors.pointers, handle
        )
    def reduce_scatter(
        self, values: Sequence[Array], shard: Array, value_factor: Array | None = None,
        error_factor: Array | None = None, stream: Any = 1,
    ) -> None:
        inputs, factors = self._views(stream, *values), self._views(stream, value_factor, error_factor)
        to, handle = self._views(stream, shard, written=True), self._library._handle(stream)
        self._comm._run(
            self._lib.gc_allreduce_reduce_scatter, self._handle, inputs.pointers, len(values), *factors.pointers,
            *to.pointers, handle,
        )
    def all_gather(self, shard: Array, values: Sequence[Array], stream: Any = 1) -> None:
        given, outputs = self._views(stream, shard), self._views(stream, *values, written=True)
        handle = self._library._handle(stream)
        self._comm._run(
            self._lib.gc_allreduce_all_gather, self._handle, *given.pointers, outputs.pointers, len(values), handle
        )
    def errors_in(self, workers: Array | None = None, server: Array | None = None, stream: Any = 1) -> None:
        self._read("errors_in", stream, workers, server)
