"""Kernels that are compiled at run time."""

from __future__ import annotations

import ctypes
import operator
import struct
from ctypes import byref, c_char_p, c_int32, c_size_t, c_void_p
from functools import partial
from typing import Any, Mapping, Sequence

from ._abi import DTYPES, K, VIEW, RunOptions
from ._arguments import INT32, _address, _arrays, _digits, _int32, _said, _text, _whole, _wholes
from ._lib import Library
from ._owned import _Owned
from ._reading import _about, _frame, _Note, _Number, _Ready
from ._tensors import Array


def _is_number(thing: Any) -> bool:
    """Returns whether an object is Python's number or NumPy's whole one; an array with one element is an array."""
    return isinstance(thing, (int, float)) or hasattr(thing, "__index__") and not hasattr(thing, "__dlpack__")


def _number(number: Any) -> _Number:
    if isinstance(number, float):
        return _Number(struct.unpack("q", struct.pack("d", number))[0], _FLOAT64)
    whole = operator.index(number)
    if not -(2**63) <= whole < 2**64:  # ctypes would cut it
        raise OverflowError(f"{_digits(whole)} is neither an int64 nor a uint64")
    return _Number(whole, _INT64) if whole < 2**63 else _Number(whole - 2**64, _UINT64)


_FLOAT64, _INT64, _UINT64 = (_about(*DTYPES[name]) for name in ("float64", "int64", "uint64"))
_INPUT, _OUTPUT, _WORKSPACE = _Note("input"), _Note("output", True), _Note("workspace", True, optional=True)
_LISTS = list, tuple
_PLAIN = {int, bool, type(None)}


class Kernel(_Owned):
    """A kernel that is compiled at run time (gc_kernel_t), released by close(), at the end of a `with`, or with this
    object.

    GradCodec.elementwise and GradCodec.reduction make it, from texts like those of CuPy's ElementwiseKernel and
    ReductionKernel, and other fields of the options. Call it with one array for each parameter, outputs too; inputs may
    be Python numbers. A reduction needs as `workspace` uint8 on the device, of workspace_bytes() bytes, if that is not
    0. Keep it as long as its work is under way, or a graph has it: running code must not be unloaded.
    """

    def __init__(
        self, library: Library, create: Any, kind: Any, fields: Mapping[str, str | None], given: Sequence[str],
        flags: int, nvrtc: int | None,
    ) -> None:  # fmt: skip
        if isinstance(given, (str, bytes)):
            raise TypeError(f"options: a sequence of str expected, got {_said(given)}")
        options = [_text(f"options[{k}]", option) for k, option in enumerate(given)]
        numbers = {"flags": _whole("flags", flags, 0, 2**32 - 1), "nvrtc": _address("nvrtc", nvrtc) or 0}
        encoded = {name: text if text is None else _text(name, text) for name, text in fields.items()}
        self._kept = (c_char_p * max(1, len(options)))(*options)
        sizes = {"struct_size": ctypes.sizeof(kind), "options": self._kept, "n_options": len(options)}
        all_of_them, made = kind(**sizes, **numbers, **encoded), K()
        create(byref(all_of_them), byref(made))
        self._own(library, made)

    _free = "gc_kernel_free"

    def _own(self, library: Library, handle: Any) -> None:
        super()._own(library, handle)
        self._raw = library._raw

    def _runs(self, inputs: Any, outputs: Any, room: Array | None, options: tuple[Any, ...]) -> bool:
        """Runs the kernel on the current stream if the arguments are as in most calls; otherwise returns False."""
        if type(inputs) not in _LISTS or type(outputs) not in _LISTS:
            return False
        n, m, types = len(inputs), len(outputs), tuple(map(type, options))
        # Options of other types may change later, or compare equal to another value.
        if not _PLAIN.issuperset(types):
            return False

        def made(handle: c_void_p) -> _Ready:
            ready = _Ready([False] * n + [True] * (m + (room is not None)), 0)
            at, about = ready.frame.list, self._options(*options)
            if room is not None:
                about.workspace = ctypes.cast(ready.frame.places[n + m], VIEW)
            arguments = c_void_p(at), c_size_t(n), c_void_p(at + 8 * n), c_size_t(m), byref(about)
            ready.call = partial(self._raw.gc_kernel_run, handle, *arguments, ready.stream)
            return ready

        given = [_number(x) if type(x) is float or type(x) is int else x for x in inputs]
        sources = [*given, *outputs] if room is None else [*given, *outputs, room]
        return self._run_ready((n, m, room is None, options, types), made, sources) is not None

    def _call(
        self, function: Any, inputs: Any, outputs: Any, stream: Any, room: Array | None, options: tuple[Any, ...]
    ) -> Any:  # fmt: skip
        given = [_number(x) if _is_number(x) else x for x in _arrays("inputs", inputs)]
        to = _arrays("outputs", outputs)
        n, m = len(given), len(to)
        frame = _frame(n + m)
        try:
            notes = [_INPUT] * n + [_OUTPUT] * m + [_WORKSPACE]
            handle = frame.read(stream, [*given, *to, room], notes)
            about = self._options(*options)
            if room is not None:
                about.workspace = ctypes.cast(frame.places[n + m], VIEW)
            arguments = frame.list, n, frame.list + 8 * n, m, byref(about)
            if function is self._raw.gc_kernel_workspace_bytes:
                return self._call_with(function, *arguments)
            self._run(function, *arguments, handle)
        finally:
            frame.release()

    @staticmethod
    def _options(axes: int | Sequence[int] | None, keepdims: bool, size: int, capability: int) -> Any:
        numbers = [] if axes is None else [_int32("axes", axes)] if _is_number(axes) else _wholes("axes", axes, *INT32)
        values = None if axes is None else (c_int32 * max(1, len(numbers)))(*numbers)
        flags, elements = int(bool(keepdims)), _whole("size", size)
        options = RunOptions(ctypes.sizeof(RunOptions), flags, elements, values, len(numbers))
        options.capability = _int32("capability", capability)
        return options

    def __call__(
        self, inputs: Sequence[Any], outputs: Sequence[Array], stream: Any = None, *, workspace: Array | None = None,
        axes: int | Sequence[int] | None = None, keepdims: bool = False, size: int = 0, capability: int = 0,
    ) -> None:  # fmt: skip
        """Runs the kernel. `axes`, one or several, and `keepdims` are for a reduction; `size`: the number of elements
        if no array gives it; `capability`: of a GPU that is not here, for prepare()."""
        options = axes, keepdims, size, capability
        if stream is not None or not self._runs(inputs, outputs, workspace, options):
            self._call(self._raw.gc_kernel_run, inputs, outputs, stream, workspace, options)

    def prepare(
        self, inputs: Sequence[Any], outputs: Sequence[Array], stream: Any = None, *, workspace: Array | None = None,
        axes: int | Sequence[int] | None = None, keepdims: bool = False, size: int = 0, capability: int = 0,
    ) -> None:  # fmt: skip
        """Compiles and loads what the same call needs, so that it does neither, and can be captured in a graph."""
        options = axes, keepdims, size, capability
        self._call(self._raw.gc_kernel_prepare, inputs, outputs, stream, workspace, options)

    def workspace_bytes(
        self, inputs: Sequence[Any], outputs: Sequence[Array], *, axes: int | Sequence[int] | None = None,
        keepdims: bool = False, size: int = 0, capability: int = 0,
    ) -> int:  # fmt: skip
        """Returns the bytes of `workspace` that the same call needs: of a reduction; 0 otherwise."""
        options = axes, keepdims, size, capability
        needed = int(self._call(self._raw.gc_kernel_workspace_bytes, inputs, outputs, None, None, options))
        self._library._check(int(needed < 0))
        return needed

    def log(self) -> str:
        """Returns the compiler's last errors and warnings."""
        log = c_char_p()
        self._run(self._raw.gc_kernel_log, byref(log))
        return (log.value or b"").decode()
