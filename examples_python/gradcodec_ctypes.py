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
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, Callable, Protocol, Sequence

NAME = "libgradcodec.so.0"
BIG, LITTLE, AXIS_NONE, COUNT_ALL = 0, 1, -(2**31), -(2**63)  # which bit of a byte comes first, and as in the header
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
DTYPES = {f"{k}{bits}": (code, bits, 1) for code, k in enumerate(("int", "uint", "float")) for bits in (8, 16, 32, 64)}
DTYPES.update(bool=(6, 8, 1), bfloat16=(4, 16, 1))


class GradCodecError(RuntimeError):
    """A call that failed, in the library's words; `status` is one of GC_STATUS_*."""

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence)
        self.status = status


def _struct(name: str, **fields: Any) -> Any:
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
T, V, VIEW, SIZES = map(POINTER, (Managed, Versioned, DLTensor, c_int64))
OUT, INTO, ALONG = POINTER(T), [VIEW, c_int32, VIEW, c_void_p], [VIEW, c_int32, c_int32, VIEW, c_void_p]
SIGNATURES: dict[str, list[Any]] = {
    "gc_last_error": [], "gc_version_string": [], "gc_chunk_bytes": [c_int64, c_size_t],
    "gc_pack_chunks": [T, c_size_t, OUT], "gc_unpack_chunks": [OUT, c_size_t, c_int64, OUT],
    "gc_pack_bits": [T, c_int32, c_int32, OUT], "gc_unpack_bits": [T, c_int32, c_int64, c_int32, OUT],
    "gc_pack_chunks_into": INTO, "gc_unpack_chunks_into": INTO, "gc_pack_signs_into": INTO,
    "gc_pack_signs": [T, c_size_t, OUT], "gc_unpack_signs": [OUT, c_size_t, c_int64, DType, OUT],
    "gc_unpack_signs_into": [VIEW, *INTO], "gc_vote_signs_into": [VIEW, c_uint64, VIEW, c_void_p],
    "gc_pack_bits_into": ALONG, "gc_unpack_bits_into": ALONG,
    "gc_tensor_empty": [Device, DType, c_int32, SIZES, OUT],
    "gc_tensor_from_pointer": [c_void_p, Device, DType, c_int32, SIZES, SIZES, c_void_p, c_void_p, OUT],
    "gc_tensor_to_versioned": [T, POINTER(V)], "gc_tensor_from_versioned": [V, OUT],
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
    """The library where the system finds it, or where `make install` with a PREFIX may have put it."""
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
        self.lib.gc_last_error.restype = self.lib.gc_version_string.restype = c_char_p
        self.lib.gc_chunk_bytes.restype = c_int64
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
    def builtin_kernels(self, family: str) -> bytes:
        fatbin, size = c_void_p(), c_size_t()
        self.lib.gc_builtin_kernels(family.encode(), byref(fatbin), byref(size))
        return ctypes.string_at(fatbin, size.value)
    def builtin_kernel_shape(self, kernel: str, compute_capability: int) -> Any:
        shape = KernelShape(ctypes.sizeof(KernelShape))
        self.lib.gc_builtin_kernel_shape(kernel.encode(), compute_capability, byref(shape))
        return shape
