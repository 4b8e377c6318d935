"""GradCodec from Python: one file to copy. It needs Python 3.9, the library, and nothing else.

    gradcodec = GradCodec()  # or GradCodec("/path/to/libgradcodec.so.0")
    chunks = gradcodec.pack_chunks(positive, 4)  # an array of NumPy, PyTorch, CuPy, JAX: of whatever has __dlpack__
    arrays = [numpy.from_dlpack(chunk) for chunk in chunks]  # or torch's, cupy's, jax.dlpack's; nothing is copied
    gradcodec.pack_signs_into(gradient, bits, stream=torch.cuda.current_stream())  # into memory that you have

What functions do, take and refuse is in gradcodec.h. `stream`: None or 1 for the legacy default stream, 2 for the
per-thread one, a handle, or an object that has one as `cuda_stream` (torch) or `ptr` (CuPy). It waits for what the
frameworks have enqueued on the tensors; nobody waits for it, and until it is done the tensors must stay, temporary
ones too. JAX's arrays are immutable and cannot say so: do not write to them.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, Protocol, Sequence

BIG, LITTLE = 0, 1  # the first bit of a byte is its most, or its least significant
AXIS_NONE, COUNT_ALL = -(2**31), -(2**63)
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
KINDS = enumerate(("int", "uint", "float"))
DTYPES = {f"{kind}{bits}": (code, bits, 1) for code, kind in KINDS for bits in (8, 16, 32, 64)}
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
T, V, VIEW, SIZES = map(POINTER, (Managed, Versioned, DLTensor, c_int64))
OUT, INTO, ALONG = POINTER(T), [VIEW, c_int32, VIEW, c_void_p], [VIEW, c_int32, c_int32, VIEW, c_void_p]
SIGNATURES: dict[str, list[Any]] = {
    "gc_last_error": [], "gc_version_string": [], "gc_chunk_bytes": [c_int64, c_size_t],
    "gc_pack_chunks": [T, c_size_t, OUT], "gc_unpack_chunks": [OUT, c_size_t, c_int64, OUT],
    "gc_pack_bits": [T, c_int32, c_int32, OUT], "gc_unpack_bits": [T, c_int32, c_int64, c_int32, OUT],
    "gc_pack_chunks_into": INTO, "gc_unpack_chunks_into": INTO, "gc_pack_signs_into": INTO,
    "gc_pack_bits_into": ALONG, "gc_unpack_bits_into": ALONG,
    "gc_tensor_empty": [Device, DType, c_int32, SIZES, OUT],
    "gc_tensor_from_pointer": [c_void_p, Device, DType, c_int32, SIZES, SIZES, c_void_p, c_void_p, OUT],
    "gc_tensor_to_versioned": [T, POINTER(V)], "gc_tensor_from_versioned": [V, OUT],
    "gc_set_threads": [c_uint32], "gc_prepare": [Device], "gc_trim": [Device],
    "gc_kernel_image": [c_int32, POINTER(c_char_p), POINTER(c_size_t)],
}  # fmt: skip


def _python(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_new = _python("PyCapsule_New", ctypes.py_object, c_void_p, c_char_p, c_void_p)
_pointer = _python("PyCapsule_GetPointer", c_void_p, ctypes.py_object, c_char_p)
_name = _python("PyCapsule_GetName", c_char_p, ctypes.py_object)
_rename = _python("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, c_char_p)
# What a capsule of a name has, and its name when that was taken.
FORMS = {b"dltensor": (T, b"used_dltensor"), b"dltensor_versioned": (V, b"used_dltensor_versioned")}
for _text in (*FORMS, *(used for _, used in FORMS.values())):
    _python("Py_IncRef", None, ctypes.py_object)(_text)  # a capsule has its name's address only, and may outlive us


class SupportsDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


def _contents(capsule: Any) -> tuple[bytes, Any]:
    """The name of a capsule, and a pointer to its tensor, which it keeps."""
    name = _name(capsule)
    if name not in FORMS:
        raise BufferError(f"no tensor to be had from a capsule named {name!r}")
    return name, ctypes.cast(_pointer(capsule, name), FORMS[name][0])


class _Borrowed:
    """A tensor of somebody else. Its capsule, which is not consumed, owns it and goes with this object."""

    def __init__(self, source: SupportsDLPack, stream: int = 1, written: bool = False) -> None:
        # On a CPU there is no stream, and to name one is an error.
        ready = {"stream": stream} if source.__dlpack_device__()[0] in (CUDA, CUDA_MANAGED) else {}
        try:
            self.capsule = source.__dlpack__(max_version=(1, 0), **ready)
        except TypeError:  # older than DLPack 1.0
            self.capsule = source.__dlpack__(**ready)
        name, self.managed = _contents(self.capsule)
        if name == b"dltensor_versioned":
            tensor = self.managed.contents
            if tensor.major != 1:
                raise BufferError(f"DLPack {tensor.major}.{tensor.minor} is not known here")
            if written and tensor.flags & 3:
                raise GradCodecError("dst: read-only, or a copy of what was meant", 5)
            self.managed = ctypes.pointer(Managed(tensor.dl_tensor, None, None))
        self.view = byref(self.managed.contents.dl_tensor)


class Tensor:
    """A tensor of the library, for the from_dlpack() of one framework; released with this object if none takes it."""

    def __init__(self, library: GradCodec, managed: Any) -> None:
        self._library, view = library, managed.contents.dl_tensor
        # A destructor in Python would disturb an exception that is on its way when the capsule goes; ours is native.
        self._capsule = _new(ctypes.cast(managed, c_void_p), b"dltensor", library.destructor)
        self.device, self.address = (view.device.device_type, view.device.device_id), view.data or 0
        self.shape: tuple[int, ...] = tuple(view.shape[: view.ndim])

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        # No stream has to wait: what made this tensor was complete when it returned.
        if copy or dl_device not in (None, self.device):
            raise BufferError("this tensor is not copied, neither here nor to another device")
        name, tensor = _contents(self._capsule)
        wanted = b"dltensor_versioned" if max_version and max_version[0] >= 1 else b"dltensor"
        if name != wanted:
            out = FORMS[wanted][0]()
            _rename(self._capsule, FORMS[name][1])  # first: an interrupt may lose the tensor, not release it twice
            try:
                convert = "gc_tensor_to_versioned" if wanted == b"dltensor_versioned" else "gc_tensor_from_versioned"
                getattr(self._library.lib, convert)(tensor, byref(out))
            except GradCodecError:
                _rename(self._capsule, name)
                raise
            self._capsule = _new(ctypes.cast(out, c_void_p), wanted, self._library.destructor)
        return self._capsule


class GradCodec:
    """The library: the file at `path`, or that GRADCODEC_LIBRARY names, or the libgradcodec.so.0 that is installed."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.lib = ctypes.CDLL(os.fspath(path or os.environ.get("GRADCODEC_LIBRARY") or "libgradcodec.so.0"))
        for name, arguments in SIGNATURES.items():
            function = getattr(self.lib, name)
            function.argtypes, function.restype = arguments, self._check
        self.lib.gc_last_error.restype = self.lib.gc_version_string.restype = c_char_p
        self.lib.gc_chunk_bytes.restype = c_int64
        self.destructor = ctypes.cast(self.lib.gc_capsule_destructor, c_void_p)

    def _check(self, status: int) -> None:
        if status != 0:
            raise GradCodecError(self.lib.gc_last_error().decode(), status)

    def make(self, function: Any, *arguments: Any) -> Tensor:
        """What a function makes whose last argument is `DLManagedTensor **out`."""
        out = T()
        function(*arguments, byref(out))
        return Tensor(self, out)

    def _into(self, function: Any, src: SupportsDLPack, between: tuple[int, ...], dst: SupportsDLPack, stream: Any) -> None:
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream)) or 1
        source, target = _Borrowed(src, handle), _Borrowed(dst, handle, written=True)
        function(source.view, *between, target.view, handle)

    def version(self) -> str:
        return str(self.lib.gc_version_string().decode())

    def chunk_bytes(self, n_elements: int, n_chunks: int) -> int:
        size = self.lib.gc_chunk_bytes(n_elements, n_chunks)
        self._check(size < 0)
        return int(size)

    def pack_chunks(self, src: SupportsDLPack, n_chunks: int) -> list[Tensor]:
        out = (T * n_chunks)()
        self.lib.gc_pack_chunks(_Borrowed(src).managed, n_chunks, out)
        return [Tensor(self, tensor) for tensor in out]

    def unpack_chunks(self, chunks: Sequence[SupportsDLPack], n_elements: int) -> Tensor:
        sources = [_Borrowed(chunk) for chunk in chunks]
        pointers = (T * len(sources))(*(source.managed for source in sources))
        return self.make(self.lib.gc_unpack_chunks, pointers, len(sources), n_elements)

    def pack_bits(self, src: SupportsDLPack, axis: int = AXIS_NONE, order: int = BIG) -> Tensor:
        return self.make(self.lib.gc_pack_bits, _Borrowed(src).managed, axis, order)

    def unpack_bits(self, src: SupportsDLPack, axis: int = AXIS_NONE, count: int = COUNT_ALL, order: int = BIG) -> Tensor:
        return self.make(self.lib.gc_unpack_bits, _Borrowed(src).managed, axis, count, order)

    def pack_chunks_into(self, src: SupportsDLPack, dst: SupportsDLPack, order: int = BIG, stream: Any = None) -> None:
        self._into(self.lib.gc_pack_chunks_into, src, (order,), dst, stream)

    def tensor_empty(self, shape: Sequence[int], dtype: str, device: tuple[int, int] = (CPU, 0)) -> Tensor:
        sizes = (c_int64 * len(shape))(*shape)
        return self.make(self.lib.gc_tensor_empty, Device(*device), DType(*DTYPES[dtype]), len(shape), sizes)

    def prepare(self, device: tuple[int, int]) -> None:
        self.lib.gc_prepare(Device(*device))

    def kernel_image(self, compute_capability: int) -> bytes:
        ptx, size = c_char_p(), c_size_t()
        self.lib.gc_kernel_image(compute_capability, byref(ptx), byref(size))
        return ctypes.string_at(ptx, size.value)
