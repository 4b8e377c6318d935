"""XLA's foreign functions in Python, through which a compiled program of gradcodec.jax calls the library.

XLA calls a handler with a frame, a struct of C whose layout is stable (xla/ffi/api/c_api.h of JAX's wheel, version 0):
the buffers of operands and results, the attributes, and on a GPU the stream. The handler is a function here, which
ctypes makes callable from C: there is nothing to compile, and the library needs nothing of XLA. A call takes the
interpreter's lock, except while the library works.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any, Callable

from ._abi import CPU, CUDA, DTYPES, SET
from ._codecs import Codec
from ._errors import GradCodecError, Status
from ._library import GradCodec
from ._reading import _WORDS, _about, _Frame, _frame

TARGET = "gradcodec"  # of ffi_call; its only attribute is `call`, which is read below
library = functools.cache(GradCodec)
jax: Any = importlib.import_module("jax")  # not all of its functions are typed

# --- the structs of XLA's interface, as far as they are used ----------------------------------------------------------


class _Version(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int)]


class _Api(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("version", _Version), ("internal", c_void_p),
        ("error_create", c_void_p), ("before_stream", c_void_p * 3), ("stream_get", c_void_p),
        ("before_ordinal", c_void_p * 12), ("device_ordinal_get", c_void_p)]  # fmt: skip


class _Buffer(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("dtype", c_int), ("data", c_void_p), ("rank", c_int64),
        ("dims", c_void_p)]  # fmt: skip


class _Values(ctypes.Structure):
    """Operands, or results."""

    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("count", c_int64), ("types", c_void_p),
        ("each", POINTER(c_void_p))]  # fmt: skip


class _Text(ctypes.Structure):
    _fields_ = [("at", c_void_p), ("bytes", c_size_t)]


class _Attributes(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("count", c_int64), ("types", c_void_p),
        ("names", c_void_p), ("each", POINTER(c_void_p))]  # fmt: skip


class _CallFrame(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("api", POINTER(_Api)), ("context", c_void_p),
        ("stage", c_int), ("operands", _Values), ("results", _Values), ("attributes", _Attributes)]  # fmt: skip


class _Metadata(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("version", _Version), ("traits", c_uint32)]


class _Extension(ctypes.Structure):
    """The extension by which XLA queries the version."""

    _fields_ = [("size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(_Metadata))]


class _ErrorCreate(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int)]


class _StreamGet(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("stream", c_void_p)]


class _OrdinalGet(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("ordinal", c_int32)]


_METADATA, _EXECUTE = 1, 3
_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED, _INTERNAL, _UNAVAILABLE = 3, 8, 13, 14
_CODES = {
    Status.OUT_OF_MEMORY: _RESOURCE_EXHAUSTED, Status.DRIVER_UNAVAILABLE: _UNAVAILABLE, Status.CUDA: _INTERNAL,
    Status.CONTEXT_LOST: _INTERNAL, Status.PANIC: _INTERNAL,
}  # fmt: skip
# Dtypes by XLA's numbers. The library refuses all others, with its own message.
_DTYPES = {
    1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64",
    10: "float16", 11: "float32", 12: "float64", 16: "bfloat16",
}  # fmt: skip
_ABOUTS = {number: _about(*DTYPES[name]) for number, name in _DTYPES.items()}
_OPAQUE = _about(3, 8, 1)
_Function = ctypes.CFUNCTYPE(c_void_p, c_void_p)

# --- operations -------------------------------------------------------------------------------------------------------


class _Call:
    """An operation of a codec, from a text that describes it. Each call has a handle for itself, which carries nothing
    to the next call: errors are passed in and out as arrays, so the same arrays give the same results."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._do: Callable[..., None] = getattr(self, "_" + about["do"])
        self._codec, self._segments, self._chunk = about["codec"], about["segments"], about.get("chunk", 0)
        self._options = about["options"]
        self._keeps = self._options["error"] != "none"
        # Handles by device and stream: a handle's work must be done before the next call, so it stays on its stream.
        self._idle: dict[tuple[int, int, int], list[Codec]] = {}

    def __call__(self, frame: _Frame, inputs: int, device: tuple[int, int], stream: int) -> None:
        idle = self._idle.setdefault((*device, stream), [])
        try:
            codec = idle.pop()  # no other thread gets the same
        except IndexError:
            codec = library().codec(self._codec, self._segments, device=device, **self._options)
        try:
            self._do(codec, frame, inputs, stream)
        finally:
            idle.append(codec)

    def _encode(self, codec: Codec, frame: _Frame, inputs: int, stream: int) -> None:
        raw, places, count = library()._raw, frame.places, len(self._segments)
        if self._keeps:
            codec._run(raw.gc_codec_errors_in, places[count], None, stream)
        codec._run(raw.gc_codec_encode, frame.list, count, None, None, places[inputs], stream)
        if self._keeps:
            codec._run(raw.gc_codec_errors_out, places[inputs + 1], None, stream)

    def _decode(self, codec: Codec, frame: _Frame, inputs: int, stream: int) -> None:
        values = frame.list + 8 * inputs, len(self._segments)
        codec._run(library()._raw.gc_codec_decode, frame.places[0], 0, None, SET, *values, stream)

    def _reduce(self, codec: Codec, frame: _Frame, inputs: int, stream: int) -> None:
        raw, places = library()._raw, frame.places
        if self._keeps:
            codec._run(raw.gc_codec_errors_in, None, places[1], stream)
        else:
            codec._run(raw.gc_codec_reset, stream)  # SIGN counts its turns
        codec._run(raw.gc_codec_reduce, self._chunk, places[0], places[inputs], stream)
        if self._keeps:
            codec._run(raw.gc_codec_errors_out, None, places[inputs + 1], stream)


class _Plain:
    """A function of the library without a state: its name, and its arguments except the stream. A text stands for an
    operand ("i0") or a result ("o0")."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._name, self._arguments = about["function"], about["arguments"]

    def __call__(self, frame: _Frame, inputs: int, device: tuple[int, int], stream: int) -> None:
        def place(argument: Any) -> Any:
            if not isinstance(argument, str):
                return argument
            return frame.places[int(argument[1:]) + (inputs if argument[0] == "o" else 0)]

        status = getattr(library()._raw, self._name)(*map(place, self._arguments), stream)
        if status:
            library()._check(status)


@functools.cache
def _call_of(text: bytes) -> _Call | _Plain:
    about = json.loads(text)
    return _Plain(about) if "function" in about else _Call(about)


# --- the handlers -----------------------------------------------------------------------------------------------------


def _describe(frame: _Frame, first: int, buffers: _Values, device: int) -> None:
    """Writes buffers as DLTensors, from place `first` on; their shapes stay where they are."""
    words = frame.words
    for k in range(buffers.count):
        buffer, at = _Buffer.from_address(buffers.each[k] or 0), (first + k) * _WORDS
        words[at], words[at + 1] = buffer.data or 0, device
        words[at + 2] = _ABOUTS.get(buffer.dtype, _OPAQUE) | buffer.rank
        words[at + 3], words[at + 4], words[at + 5] = buffer.dims or 0, 0, 0


def _asked(api: _Api, name: str, asked: Any) -> Any:
    """Calls one of XLA's functions, which fills `asked`; returns `asked`."""
    error = _Function(getattr(api, name))(ctypes.addressof(asked))
    if error:
        raise RuntimeError(f"XLA did not answer {name}")
    return asked


def _failed(api: _Api, failure: BaseException) -> int:
    code = _CODES.get(getattr(failure, "status", None), _INVALID_ARGUMENT)  # type: ignore[arg-type]
    if not isinstance(failure, (GradCodecError, ValueError, TypeError, OverflowError)):
        code = _INTERNAL
    words = str(failure) or type(failure).__name__
    about = _ErrorCreate(ctypes.sizeof(_ErrorCreate), None, words.encode(errors="replace"), code)
    return _Function(api.error_create)(ctypes.addressof(about)) or 0


def _handled(call: _CallFrame, on_gpu: bool) -> None:
    api = call.api.contents
    if call.extension:
        asked = _Extension.from_address(call.extension)
        if asked.type == _METADATA:
            about = asked.metadata.contents
            # All minor versions of this size have what is used here; XLA refuses those that it no longer supports.
            about.version = _Version(ctypes.sizeof(_Version), None, 0, api.version.minor)
            about.traits = 0  # not for command buffers: those may run two calls at once, which one handle cannot
            return
    if call.stage != _EXECUTE:
        return
    if api.version.major or on_gpu and api.size < ctypes.sizeof(_Api):
        raise GradCodecError(f"XLA's interface {api.version.major}.{api.version.minor} is not known here")
    device, stream = (CPU, 0), 0
    if on_gpu:
        size = ctypes.sizeof
        number = _asked(api, "device_ordinal_get", _OrdinalGet(size(_OrdinalGet), None, call.context)).ordinal
        device = CUDA, number
        stream = _asked(api, "stream_get", _StreamGet(size(_StreamGet), None, call.context)).stream or 0
    text = _Text.from_address(call.attributes.each[0] or 0)
    todo = _call_of(ctypes.string_at(text.at or 0, text.bytes))
    operands, results = call.operands, call.results
    frame = _frame(operands.count + results.count)
    try:
        _describe(frame, 0, operands, device[0] | device[1] << 32)
        _describe(frame, operands.count, results, device[0] | device[1] << 32)
        todo(frame, operands.count, device, stream)
    finally:
        frame.release()


def _handler(on_gpu: bool) -> Any:
    def handle(address: int) -> int | None:
        call = _CallFrame.from_address(address)
        try:
            _handled(call, on_gpu)
        except BaseException as failure:  # nothing may unwind into XLA
            return _failed(call.api.contents, failure)
        return None

    return _Function(handle)


_ON = {"cpu": _handler(False), "CUDA": _handler(True)}  # must stay alive as long as XLA may call them
for _platform, _function in _ON.items():
    _address = ctypes.cast(_function, c_void_p).value
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_address), _platform)


def call(results: Any, operands: Any, about: dict[str, Any], aliases: dict[int, int] | None = None) -> list[Any]:
    """Adds the operation to a program that JAX traces."""
    options: dict[str, Any] = {"vmap_method": "sequential", "input_output_aliases": aliases}
    made = jax.ffi.ffi_call(TARGET, results, **options)(*operands, call=json.dumps(about, sort_keys=True))
    return list(made)
