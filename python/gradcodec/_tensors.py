"""Tensors that cross the boundary: arrays of frameworks, borrowed for a call, and the library's own."""

from __future__ import annotations

import ctypes
import importlib
import sys
from ctypes import byref, c_void_p
from typing import Any, Protocol

from ._abi import CPU, CUDA, CUDA_MANAGED, DTYPES, FORMS, LEGACY, USED, VERSIONED, Managed, _python
from ._arguments import _said
from ._errors import GradCodecError, Status
from ._lib import Library


class Array(Protocol):
    """Any object with DLPack's two methods: arrays of NumPy, PyTorch, CuPy and JAX, and tensors of the library."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


def _contents(capsule: Any) -> tuple[bytes, Any]:
    """Returns the name of a capsule, and a pointer to its tensor, which the capsule keeps."""
    name = _python.PyCapsule_GetName(capsule)
    if name not in FORMS:
        why = "was taken before: a tensor is taken once" if name in USED.values() else "is none of DLPack's"
        raise BufferError(f"no tensor to be had: a capsule named {_said(name)} {why}")
    return name, ctypes.cast(_python.PyCapsule_GetPointer(capsule, name), FORMS[name][0])


def _exportable(source: Any, written: bool, what: str) -> Any:
    """Returns the tensor that a framework should export. PyTorch does not check whether a tensor may be written to, and
    drops the bit for negated elements; JAX does not flag read-only arrays."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if written and isinstance(source, getattr(jax, "Array", ())):
        of = "an array of JAX, which must not change; gradcodec.jax makes new ones"
        raise GradCodecError(f"{what}: {of}", Status.READ_ONLY)
    if torch is None or not isinstance(source, torch.Tensor):
        return source
    if source.is_neg():
        raise BufferError(f"{what}: a view whose elements are negated when they are read; resolve_neg() makes a tensor")
    if written and source.requires_grad and torch.is_grad_enabled():
        raise BufferError(f"{what}: requires grad, and gradients are recorded; torch.no_grad() and detach() allow it")
    if written:
        torch.autograd.graph.increment_version(source)  # as _Torch.read() does
    return source.detach() if source.requires_grad else source


class _Borrowed:
    """A tensor of another owner. Its capsule, which is not consumed, owns it and is released with this object."""

    def __init__(self, source: Array, stream: int = 1, written: bool = False, name: str | None = None) -> None:
        what = name or ("output" if written else "input")
        if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
            hint = "" if written or source is None else "; numpy.asarray() makes one"
            if isinstance(source, (bytes, bytearray, memoryview)):
                hint = "; numpy.frombuffer(it, numpy.uint8) makes one"
            raise TypeError(f"{what}: an array of NumPy, PyTorch, CuPy or JAX expected, got {_said(source)}{hint}")
        source = _exportable(source, written, what)
        # A CPU has no stream, and passing one is an error.
        ready = {"stream": stream} if source.__dlpack_device__()[0] in (CUDA, CUDA_MANAGED) else {}
        try:
            self.capsule = source.__dlpack__(max_version=(1, 0), **ready)
        except TypeError:  # older than DLPack 1.0
            self.capsule = source.__dlpack__(**ready)
        form, self._as_parameter_ = _contents(self.capsule)
        if form == VERSIONED:
            tensor = self._as_parameter_.contents
            version = tensor.version
            if version.major != 1:
                raise BufferError(f"DLPack {version.major}.{version.minor} is not known here")
            if written and tensor.flags & 3:
                raise GradCodecError(f"{what}: read-only, or a copy of what was meant", Status.READ_ONLY)
            self._as_parameter_ = ctypes.pointer(Managed(tensor.dl_tensor, None, None))


class Tensor:
    """A tensor of the library, for the from_dlpack() of one framework. If none takes it, it is released by close(), at
    the end of a `with`, or with this object.

    It has `shape`, `dtype` (a name), `device` (a pair, (CPU, 0) for example) and `address`. It can be given to any
    function that takes arrays until a framework has taken it; after that, give the framework's array.
    """

    def __init__(self, library: Library, managed: Any) -> None:
        self._library, view = library, managed.contents.dl_tensor
        self._keep(LEGACY, managed)
        self.device, self.address = (view.device.device_type, view.device.device_id), view.data or 0
        self.shape: tuple[int, ...] = tuple(view.shape[: view.ndim])
        dtype = view.dtype.code, view.dtype.bits, view.dtype.lanes
        self.dtype = next((name for name, known in DTYPES.items() if known == dtype), str(dtype))
        self._array: Any = None

    def close(self) -> None:
        """Releases the tensor now, unless a framework has taken it."""
        self._capsule = self._array = None

    def __enter__(self) -> Tensor:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Any:
        if self._capsule is None:
            raise ValueError("Tensor is closed")
        return self._capsule

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.dtype!r}, device={self.device})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without a dimension has no len()")
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Returns an array, for numpy.asarray(). The first call takes the tensor, like numpy.from_dlpack()."""
        if self.device[0] != CPU:
            raise TypeError(
                f"NumPy has no arrays on {self.device}: cupy.from_dlpack() and torch.from_dlpack() take this tensor, "
                "GradCodec.tensor_to_device() copies it to (CPU, 0)"
            )
        self._open()
        numpy: Any = importlib.import_module("numpy")
        if self._array is None:
            self._array = numpy.from_dlpack(self)
        return numpy.array(self._array, dtype, copy=copy)

    def _keep(self, name: bytes, tensor: Any) -> None:
        # A destructor in Python would disturb an exception that is being raised when the capsule is released.
        native = ctypes.cast(self._library.lib.gc_capsule_destructor, c_void_p)
        self._capsule = _python.PyCapsule_New(ctypes.cast(tensor, c_void_p), name, native)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns the kind of device and its number, as DLPack defines them."""
        return self.device

    def __dlpack__(self, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        """Returns a capsule with the tensor, in the form for `max_version`, as DLPack defines it."""
        # The stream has nothing to wait for: the work that made this tensor is done.
        if copy or dl_device not in (None, self.device):
            raise BufferError("this tensor is not copied, neither here nor to another device")
        name, tensor = _contents(self._open())
        wanted = VERSIONED if max_version and max_version[0] >= 1 else LEGACY
        if name != wanted:
            kind, convert = FORMS[wanted]
            out = kind()
            # The capsule is renamed first: a failure here may leak the tensor, but not release it twice.
            _python.PyCapsule_SetName(self._capsule, USED[name])
            getattr(self._library.lib, convert)(tensor, byref(out))
            self._keep(wanted, out)
        return self._capsule
