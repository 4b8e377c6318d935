"""Codecs, and what they share with all-reduces."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64, c_size_t, c_uint8, c_void_p
from functools import partial
from typing import Any, Callable, Sequence

from ._abi import C, ERRORS, CODECS, POLICIES, REDUCTIONS, SET, CodecOptions
from ._arguments import _arrays, _bools, _choice, _count, _device, _dtype, _float32, _int32, _named, _whole, _wholes
from ._lib import Library
from ._owned import _Owned
from ._reading import _MOST_KEPT, _Frame, _Note, _Ready, _frame
from ._tensors import Array

def _options(
    codec: int | str, segments: Sequence[int], *, values: Any = None, results: Any = None,
    error: int | str | None = None, scale: int | None = None, nonfinite: int | str | None = None, device: Any = None,
    beta: float | None = None, n_chunks: int | None = None, server: int | None = None,
    raw: Sequence[bool] | None = None, reduction: str | None = None,
) -> Any:  # fmt: skip
    """Returns a gc_codec_options_t. None leaves a field 0, its default."""
    counts = _wholes("segments", segments)
    sizes = (c_int64 * max(1, len(counts)))(*counts)
    options = CodecOptions(ctypes.sizeof(CodecOptions), _choice("codec", codec, CODECS))
    options.segments, options.n_segments = sizes, len(counts)
    if values is not None:
        options.values = _dtype(values)
    if results is not None:
        options.results = _dtype(results)
    if device is not None:
        options.device = _device(device)
    if error is not None:
        options.error = _choice("error", error, ERRORS)
    if nonfinite is not None:
        options.nonfinite = _choice("nonfinite", nonfinite, POLICIES)
    if scale is not None:
        options.scale = _int32("scale", scale)
    if reduction is not None:
        options.reduction = _named("reduction", reduction, REDUCTIONS)
    if raw is not None:
        flags = _bools("raw", raw)
        if len(flags) != len(counts):
            raise ValueError(f"raw: {len(counts)} bools expected, one for each segment, got {len(flags)}")
        options.raw = (c_uint8 * max(1, len(flags)))(*flags)
    if n_chunks is not None:
        options.n_chunks = _whole("n_chunks", n_chunks, 0, 2**64 - 1)
    if server is not None:
        options.server = _whole("server", server, 0, 2**64 - 1)
    if beta is not None:
        options.beta = _float32("beta", beta)
    return options


_INPUTS, _OUTPUTS = _Note("values"), _Note("values", True)
_FACTORS = [_Note("value_factor", optional=True), _Note("error_factor", optional=True)]
_ENCODE = [*_FACTORS, _Note("payload", True)]
_DECODE = [_Note("payload"), _Note("factor", optional=True)]
_REDUCE = _Note("chunks"), _Note("dst", True)
_SKIP, _DST, _SRC = (_Note("skip", optional=True),), (_Note("dst", True),), (_Note("src"),)
_ERRORS_OUT = _Note("worker", True, optional=True), _Note("server", True, optional=True)
_ERRORS_IN = _Note("worker", optional=True), _Note("server", optional=True)


class _Steps(_Owned):
    """Methods that codecs and all-reduces share."""

    _raw: Any
    _prefix: str
    _home: Any = None  # framework and device of the last call's stream, for calls without a tensor

    def _own(self, library: Library, handle: Any) -> None:
        super()._own(library, handle)
        self._raw = library._raw

    def _read(
        self, frame: _Frame, stream: Any, sources: Sequence[Any], notes: Sequence[_Note], listed: int = 0
    ) -> int:  # fmt: skip
        self._open()
        handle = frame.read(stream, sources, notes, listed, self._home)
        self._home = frame.home or self._home
        return handle

    def _over(
        self, function: Any, stream: Any, name: str, values: Sequence[Array], of_values: _Note,
        others: tuple[Array | None, ...], notes: list[_Note], arranged: Callable[..., Any] | None = None,
        numbers: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Calls a function on a list of arrays and a few others, in the order of C's arguments, unless `arranged`
        reorders the list, its length, the others, and `numbers`."""
        arrays = _arrays(name, values)
        n = len(arrays)

        def made(handle: c_void_p) -> _Ready:
            of_others = [note.written for note, other in zip(notes, others) if other is not None]
            ready = _Ready([of_values.written] * n + of_others, n)
            places = iter(ready.frame.places[n:])
            at = [None if other is None else c_void_p(next(places)) for other in others]
            arguments = (c_void_p(ready.frame.list), c_size_t(n), *at, *numbers)
            arguments = arranged(*arguments) if arranged else arguments
            ready.call = partial(function, handle, *arguments, ready.stream)
            return ready

        if stream is None and 0 < n <= _MOST_KEPT:
            given = [other for other in others if other is not None]
            key = function.__name__, n, numbers, *[other is None for other in others]
            ready = self._run_ready(key, made, [*arrays, *given])
            if ready is not None:
                self._home = ready.home or self._home
                return
        sources = [*arrays, *others]
        frame = _frame(n)
        try:
            handle = self._read(frame, stream, sources, [of_values] * n + notes, n)
            arguments = frame.list, n, *frame.addresses(sources, n), *numbers
            self._run(function, *(arranged(*arguments) if arranged else arguments), handle)
        finally:
            frame.release()

    def _call(self, name: str, stream: Any, sources: tuple[Array | None, ...], notes: tuple[_Note, ...]) -> None:
        frame = _frame()
        try:
            handle = self._read(frame, stream, sources, notes)
            self._run(getattr(self._raw, f"{self._prefix}_{name}"), *frame.addresses(sources), handle)
        finally:
            frame.release()

    def commit(self, skip: Array | None = None, stream: Any = None) -> None:
        """Ends a pending step (TRANSACTIONAL). Takes it back if `skip`, one bool on the device, is true, or if a value
        was not finite."""
        self._call("commit", stream, (skip,), _SKIP)

    def rollback(self, stream: Any = None) -> None:
        """Takes a pending step back: the errors are as they were before it."""
        self._call("rollback", stream, (), ())

    def reset(self, stream: Any = None) -> None:
        """Sets all errors to 0, as in a new object."""
        self._call("reset", stream, (), ())

    def flags(self, dst: Array, stream: Any = None) -> None:
        """Writes the flags since the last call to `dst`: one uint32 on the device, of the bits GC_FLAG_*."""
        self._call("flags", stream, (dst,), _DST)

    def errors_out(self, worker: Array | None = None, server: Array | None = None, stream: Any = None) -> None:
        """Copies the carried errors to `worker` and `server`, float32, for a checkpoint; None: does not copy them."""
        self._call("errors_out", stream, (worker, server), _ERRORS_OUT)


class Codec(_Steps):
    """A codec (gc_codec_t), released by close(), at the end of a `with`, or with this object.

    GradCodec.codec() makes it. `codec`: "int8", "mxfp8", "bf16", "int4", "mxfp4", "onebit", "sign", or one of the
    constants. `segments`: the element counts of the tensors.

    The keywords are fields of gc_codec_options_t. None selects the default, which is the first value here:

        values, results  "float32", "float16", "bfloat16": what is encoded, what is decoded
        error            "float32", "bfloat16", "none": how errors are kept; SIGN keeps none
        nonfinite        "propagate", "zero", "transactional": what NaN and Inf do
        raw              no segment, or a bool for each: sent as float32; block codecs only
        reduction        "mean", "sum": what reduce() makes of chunks; not SIGN
        scale            RMS, MEAN: what the scale is; ONEBIT only
        device           "cpu", "cuda:0", or a pair as (CUDA, 0)
        beta             1.0, or another factor of the carried error in each step
        n_chunks         1, or another number of chunks of a payload
        server           0: reduces no chunk; k + 1: reduces chunk k, and keeps its error

    `exchanges`: 1 if an AllReduce with these options among `n_chunks` ranks is one-shot, 2 if it is two-shot; peer
    memory has other limits.
    """

    _prefix, _free = "gc_codec", "gc_codec_free"

    def __init__(self, library: Library, options: Any) -> None:
        made = C()
        library.lib.gc_codec_create(byref(options), byref(made))
        self._own(library, made)
        self.n_chunks: int = options.n_chunks or 1
        self.payload_bytes = int(library.lib.gc_codec_payload_bytes(made))
        self.exchanges = library._number(library.lib.gc_codec_exchanges, made)
        self.state_bytes = int(library.lib.gc_codec_state_bytes(made))

    def __repr__(self) -> str:
        return f"Codec(payload_bytes={self.payload_bytes}, n_chunks={self.n_chunks})"

    def encode(
        self, values: Sequence[Array], payload: Array, value_factor: Array | None = None,
        error_factor: Array | None = None, stream: Any = None,
    ) -> None:  # fmt: skip
        """Encodes a step's values, and keeps the error for the next step.

        `values`: one array per segment, C-contiguous, of the codec's dtype `values`. `payload`: uint8, `payload_bytes`
        long, aligned to 16. The factors, one float32 each on the device, multiply the values and the carried error.
        """
        others = value_factor, error_factor, payload
        self._over(self._raw.gc_codec_encode, stream, "values", values, _INPUTS, others, _ENCODE)

    def decode(
        self, payload: Array, values: Sequence[Array], divisor: int = 1, factor: Array | None = None, mode: int = SET,
        stream: Any = None,
    ) -> None:  # fmt: skip
        """Decodes a payload to `values`, one array per segment, of the codec's dtype `results`.

        The values are divided by `divisor` and multiplied by `factor`, one float32 on the device. `mode`: SET, or ADD
        to the present values.
        """
        ranks, how, others = _int32("divisor", divisor), _int32("mode", mode), (payload, factor)
        self._over(
            self._raw.gc_codec_decode, stream, "values", values, _OUTPUTS, others, _DECODE,
            lambda room, n, source, scalar, ranks, how: (source, ranks, scalar, how, room, n), (ranks, how),
        )  # fmt: skip

    def reduce(self, chunk: int, chunks: Array, dst: Array, stream: Any = None) -> None:
        """Reduces one chunk of several ranks, uint8, a row of `chunks` each, to its mean, sum or vote in `dst`, a
        chunk."""
        number, sources = _count("chunk", chunk), (chunks, dst)
        frame = _frame()
        try:
            handle = self._read(frame, stream, sources, _REDUCE)
            self._run(self._raw.gc_codec_reduce, number, *frame.addresses(sources), handle)
        finally:
            frame.release()

    def scales(self, dst: Array, stream: Any = None) -> None:
        """Writes the scales of the last payload of ONEBIT or SIGN to `dst`: float32, one per segment."""
        self._call("scales", stream, (dst,), _DST)

    def state_out(self, dst: Array, stream: Any = None) -> None:
        """Writes all state of the codec, for a checkpoint, to `dst`: uint8, `state_bytes` long, aligned to 16."""
        self._call("state_out", stream, (dst,), _DST)

    def state_in(self, src: Array, stream: Any = None) -> None:
        """Sets the state that state_out() of a codec like this one has written."""
        self._call("state_in", stream, (src,), _SRC)

    def errors_in(self, worker: Array | None = None, server: Array | None = None, stream: Any = None) -> None:
        """Sets errors that errors_out() has written, float32; None: keeps the present ones."""
        self._call("errors_in", stream, (worker, server), _ERRORS_IN)
