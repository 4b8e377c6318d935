"""Kernels that are compiled at run time."""

from __future__ import annotations

import ctypes
import operator
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Any, Sequence

from ._abi import CPU, DTYPES, K, VIEW, DLTensor, DType, Device, RunOptions
from ._arguments import INT32, _address, _arrays, _bytes, _int32, _said, _text, _whole, _wholes
from ._tensors import Array, _Borrowed

if TYPE_CHECKING:
    from ._library import GradCodec


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
    def _of(cls, library: GradCodec, saved: bytes) -> Kernel:
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
