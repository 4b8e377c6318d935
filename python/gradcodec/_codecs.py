"""Codecs, and what they share with all-reduces."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64, c_uint8
from typing import TYPE_CHECKING, Any, Sequence

from ._abi import C, ERRORS, KINDS, POLICIES, REDUCTIONS, SET, CodecOptions
from ._arguments import _arrays, _bools, _choice, _count, _device, _dtype, _float32, _int32, _named, _whole, _wholes
from ._tensors import Array, _Views

if TYPE_CHECKING:
    from ._library import GradCodec

_CHOICES = [
    "values", "results", "error", "scale", "nonfinite", "device", "beta", "n_chunks", "server", "raw", "reduction",
]  # fmt: skip


def _options(kind: int | str, segments: Sequence[int], options: dict[str, Any]) -> Any:
    counts = _wholes("segments", segments)
    for name in options:
        if name not in _CHOICES:
            raise TypeError(f"{name}: no option of a codec; those are {', '.join(_CHOICES)}")
    for name in {"values", "results"} & options.keys():
        options[name] = _dtype(options[name])
    if "device" in options:
        options["device"] = _device(options["device"])
    for name, known in (("error", ERRORS), ("nonfinite", POLICIES)):
        if name in options:
            options[name] = _choice(name, options[name], known)
    if "scale" in options:
        options["scale"] = _int32("scale", options["scale"])
    if "reduction" in options:
        options["reduction"] = _named("reduction", options["reduction"], REDUCTIONS)
    if options.get("raw") is not None:
        raw = _bools("raw", options["raw"])
        if len(raw) != len(counts):
            raise ValueError(f"raw: {len(counts)} bools expected, one for each segment, got {len(raw)}")
        options["raw"] = (c_uint8 * max(1, len(raw)))(*raw)
    for name in {"n_chunks", "server"} & options.keys():
        options[name] = _whole(name, options[name], 0, 2**64 - 1)
    if "beta" in options:
        options["beta"] = _float32("beta", options["beta"])
    sizes = (c_int64 * max(1, len(counts)))(*counts)
    own = {"segments": sizes, "n_segments": len(counts), **options}
    return CodecOptions(ctypes.sizeof(CodecOptions), _choice("kind", kind, KINDS), **own)


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
    """A codec (gc_codec_t), released with this object. `kind`: "int8", "mxfp8", "bf16", "int4", "mxfp4", "onebit", "sign",
    or one of the constants; `segments`: the element counts of the tensors. `options`: fields of gc_codec_options_t, as

        values, results  dtypes by their names; "float32"
        error            "float32", "bfloat16", "none": what it keeps of what it loses
        nonfinite        "propagate", "zero", "transactional"
        raw              a bool for each segment: whether it travels as float32 (block codecs)
        reduction        "mean", "sum" (block codecs)
        scale            RMS, MEAN (ONEBIT)
        device           "cpu", "cuda:0", or a pair as (CUDA, 0)
        beta, n_chunks, server
    """

    _prefix = "gc_codec"

    def __init__(self, library: GradCodec, kind: int | str, segments: Sequence[int], **options: Any) -> None:
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

        The values are divided by `divisor` and multiplied by `factor`, one float32 on the device. `mode`: SET, or ADD to
        what is there.
        """
        given = self._views(stream, payload, factor, name="payload")
        outputs = self._views(stream, *_arrays("values", values), written=True, name="values")
        source, scalar = given.pointers
        numbers = _int32("divisor", divisor), scalar, _int32("mode", mode)
        self._call("decode", stream, source, *numbers, outputs.pointers, len(outputs.pointers))

    def reduce(self, chunk: int, chunks: Array, dst: Array, stream: Any = 1) -> None:
        """The mean, the sum or the vote of one chunk of several ranks, uint8, a row of `chunks` each, to `dst` as a chunk."""
        given, to = self._views(stream, chunks, name="chunks"), self._views(stream, dst, written=True, name="dst")
        self._call("reduce", stream, _count("chunk", chunk), *given.pointers, *to.pointers)

    def scales(self, dst: Array, stream: Any = 1) -> None:
        """The scales of the last payload of ONEBIT or SIGN, to `dst`: float32, one per segment."""
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
