"""GradCodec for JAX: codecs as pure functions of arrays, inside jit and shard_map, on the CPU and on CUDA.

    def step(parameters, errors, batch):  # inside of shard_map over the axis "data"
        gradients = jax.grad(loss)(parameters, batch)
        gradients, errors = gradcodec.jax.all_reduce(gradients, "data", "int4", errors)
        ...

Values are any tree of arrays of one dtype: float32, float16 or bfloat16. Errors are arrays, passed in and returned. It
needs JAX and no compiler. Nothing here has a derivative. `import gradcodec` does not import this module.

XLA calls the library through Python: about 20 microseconds of CPU time for each operation, 40 on CUDA. There the work
goes to XLA's stream, but is not captured in command buffers. Each operation keeps a codec per stream, whose state lies
outside of XLA's pool: 4 bytes per element and more if it keeps errors, else 256 bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from typing import Any, NamedTuple, Sequence

from . import _jax_ffi
from ._abi import AXIS_NONE, BIG, CODECS, ERRORS, POLICIES, REDUCTIONS, RMS, SIGNS
from ._arguments import _bools, _choice, _float32, _int32, _named, _said, _whole

__all__ = [
    "all_reduce", "Codec", "Errors", "pack_signs", "unpack_signs", "vote_signs", "pack_bits", "unpack_bits",
    "pack_chunks", "unpack_chunks",
]  # fmt: skip

jax: Any = importlib.import_module("jax")  # not all of its functions are typed
jnp: Any = importlib.import_module("jax.numpy")
lax: Any = jax.lax
_DTYPES = "float32", "float16", "bfloat16"
_SMALL = 1024  # elements
# XLA's collectives exchange here, so there is no communicator of the library that gives the parts.
_UNITS = dict(onebit=8, sign=8, bf16=32, mxfp8=32, int8=64, int4=32, mxfp4=32)  # elements of a byte, or of a block


class Errors(NamedTuple):
    """Errors that were not sent yet: float32, one dimension each.

    `worker`: errors of this rank's values, one leaf after the other. `server`: errors of the chunk that this rank
    reduces, padded with zeros to the length that all ranks have. Codec.errors() makes the first ones.
    """

    worker: Any
    server: Any


class _Leaves(NamedTuple):
    """A tree of values: its arrays, their element counts, which of them are raw segments, and their dtype."""

    each: list[Any]
    tree: Any
    counts: tuple[int, ...]
    raw: tuple[bool, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Codec:
    """A description of a compression, without state, which may be a static argument of jit.

    `codec`: "int8", "mxfp8", "bf16", "int4", "mxfp4", "onebit" or "sign". `error`: "float32", "bfloat16" or "none";
    None: "none" for bf16, mxfp8, int8 and sign, else "float32". `raw`: a bool for each leaf, whether it is sent as
    float32; None: those with fewer than two dimensions or fewer than 1,024 elements (block codecs). `reduction`: "mean"
    or "sum". `nonfinite`: "propagate" or "zero". `scale`: RMS or MEAN (onebit). `beta`: the decay of errors.

    An option that does not exist is a ValueError.
    """

    codec: str = "int8"
    error: str | None = None
    raw: tuple[bool, ...] | None = None
    reduction: str = "mean"
    nonfinite: str = "propagate"
    scale: int = RMS
    beta: float = 1.0

    def __post_init__(self) -> None:
        def known(name: str, of: dict[str, int]) -> None:
            _named(name, getattr(self, name), of)

        known("codec", CODECS)
        if self.error is None:
            object.__setattr__(self, "error", "none" if self.codec in ("bf16", "mxfp8", "int8", "sign") else "float32")
        known("error", ERRORS)
        known("reduction", REDUCTIONS)
        known("nonfinite", POLICIES)
        if self.nonfinite == "transactional":
            raise ValueError(
                "nonfinite: 'propagate' or 'zero' expected, got 'transactional': a pure function has no step to take "
                "back; keep the errors that went in"
            )
        if self.codec == "sign" and self.error != "none":
            raise ValueError(f"error: 'none' expected with sign, got {self.error!r}")
        if self.codec == "sign" and self.reduction != "mean":
            raise ValueError(f"reduction: 'mean' expected with sign, which is its majority, got {self.reduction!r}")
        if self.raw is not None:
            object.__setattr__(self, "raw", tuple(map(bool, _bools("raw", self.raw))))
        object.__setattr__(self, "scale", _int32("scale", self.scale))
        object.__setattr__(self, "beta", _float32("beta", self.beta))

    @property
    def keeps_errors(self) -> bool:
        """True if the codec takes and returns errors."""
        return self.error != "none"

    def errors(self, values: Any, world_size: int = 1) -> Errors | None:
        """Returns errors of zero for all ranks of an all-reduce of such values: arrays, or their shapes and dtype.

        Both have a part for each rank, one after the other, so that PartitionSpec(axis) gives each rank its own. None:
        the codec keeps none.
        """
        if not self.keeps_errors:
            return None
        leaves, ranks = self._leaves(values), _whole("world_size", world_size, 1)
        server = max(_part(self.codec, leaves, chunk, ranks) for chunk in range(ranks))
        return Errors(*(jnp.zeros(ranks * each, jnp.float32) for each in (sum(leaves.counts), server)))

    def encode(self, values: Any, worker: Any = None, n_chunks: int = 1) -> tuple[Any, Any]:
        """Encodes values plus the errors of earlier values.

        `worker`: these errors, float32, as many as `values` has elements; None if the codec keeps none.

        Returns the payload, uint8 [n_chunks, bytes of a chunk], and the new errors.
        """
        leaves, chunks = self._leaves(values), _whole("n_chunks", n_chunks, 1)
        self._check_errors("worker", worker, sum(leaves.counts))
        payload = jax.ShapeDtypeStruct((chunks, self._plan(leaves, chunks)[0]), jnp.uint8)
        about = self._about("encode", leaves, chunks)
        if not self.keeps_errors:
            (made,) = _jax_ffi.call([payload], leaves.each, about)
            return made, None
        kept = jax.ShapeDtypeStruct(worker.shape, jnp.float32)
        made, errors = _jax_ffi.call([payload, kept], [*leaves.each, worker], about, {len(leaves.each): 1})
        return made, errors

    def decode(self, payload: Any, like: Any) -> Any:
        """Returns the values of a payload, uint8 [n_chunks, bytes of a chunk], in the shapes and dtype of `like`."""
        leaves = self._leaves(like)
        if getattr(payload, "ndim", 0) != 2 or payload.dtype != jnp.uint8:
            raise ValueError(f"payload: uint8 [n_chunks, bytes] expected, got {_shape(payload)}")
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in leaves.each]
        about = self._about("decode", leaves, payload.shape[0])
        return jax.tree.unflatten(leaves.tree, _jax_ffi.call(shapes, [payload.reshape(-1)], about) if shapes else [])

    def reduce(
        self, chunk: int, chunks: Any, like: Any, server: Any = None, *, n_chunks: int = 1, turn: Any = 0
    ) -> tuple[Any, Any]:  # fmt: skip
        """Reduces one chunk of several payloads, each of `n_chunks` chunks, of values like `like`.

        `chunk`: its number, which is not traced. `chunks`: uint8 [payloads, bytes]. `server`: errors of this chunk,
        float32, as many as in Errors, or as the chunk has elements; None if the codec keeps none. `turn` may be traced:
        in a tie of SIGN, payload `turn` decides the first byte of the bits, the next one the second.

        Returns uint8 [bytes], a chunk to decode, and the new errors.
        """
        leaves, parts = self._leaves(like), _whole("n_chunks", n_chunks, 1)
        number = _whole("chunk", chunk, 0, parts - 1)
        if getattr(chunks, "ndim", 0) != 2 or chunks.dtype != jnp.uint8:
            raise ValueError(f"chunks: uint8 [payloads, bytes] expected, got {_shape(chunks)}")
        if self.codec == "sign":
            chunks = _turned(chunks, turn)
        about = self._about("reduce", leaves, parts, number)
        reduced = jax.ShapeDtypeStruct(chunks.shape[1:], jnp.uint8)
        if not self.keeps_errors:
            self._check_errors("server", server, 0)
            (made,) = _jax_ffi.call([reduced], [chunks], about)
            return made, None
        elements = _part(self.codec, leaves, number, parts)
        self._check_errors("server", server, elements, exactly=False)
        kept = jax.ShapeDtypeStruct((elements,), jnp.float32)
        made, errors = _jax_ffi.call([reduced, kept], [chunks, server[:elements]], about, {1: 1})
        return made, jnp.pad(errors, (0, server.shape[0] - elements))

    # --- shared by the operations

    def _leaves(self, values: Any) -> _Leaves:
        paths, tree = jax.tree_util.tree_flatten_with_path(values)
        for path, leaf in paths:
            name = f"values{jax.tree_util.keystr(path)}"
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise TypeError(f"{name}: an array expected, got {_said(leaf)}")
            if str(leaf.dtype) not in _DTYPES:
                raise TypeError(f"{name}: {', '.join(_DTYPES)} expected, got {leaf.dtype}")
            if leaf.dtype != paths[0][1].dtype:
                first = f"values{jax.tree_util.keystr(paths[0][0])}"
                raise TypeError(
                    f"{name}: {paths[0][1].dtype} expected, as {first} is, got {leaf.dtype}; astype() makes them alike"
                )
        each = [leaf for _, leaf in paths]
        if self.codec in SIGNS:
            if self.raw is not None and any(self.raw):
                raise ValueError(f"raw: nothing travels as it is with {self.codec}")
            raw = (False,) * len(each)
        elif self.raw is None:
            raw = tuple(len(leaf.shape) < 2 or math.prod(leaf.shape) < _SMALL for leaf in each)
        elif len(self.raw) != len(each):
            raise ValueError(f"raw: {len(each)} bools expected, one for each leaf, got {len(self.raw)}")
        else:
            raw = self.raw
        dtype = str(each[0].dtype) if each else "float32"
        return _Leaves(each, tree, tuple(math.prod(leaf.shape) for leaf in each), raw, dtype)

    def _options(self, leaves: _Leaves, n_chunks: int) -> dict[str, Any]:
        options: dict[str, Any] = {
            "error": self.error, "nonfinite": self.nonfinite, "values": leaves.dtype, "results": leaves.dtype,
            "n_chunks": n_chunks,
        }  # fmt: skip
        if self.beta != 1:
            options["beta"] = self.beta
        options["reduction"] = self.reduction
        return {**options, **({"scale": self.scale} if self.codec in SIGNS else {"raw": leaves.raw})}

    def _about(self, do: str, leaves: _Leaves, n_chunks: int, chunk: int | None = None) -> dict[str, Any]:
        options = self._options(leaves, n_chunks)
        about: dict[str, Any] = {"do": do, "codec": self.codec, "segments": leaves.counts, "options": options}
        if chunk is not None:
            options["server"] = chunk + 1
            about["chunk"] = chunk
        elif do == "decode":
            options["error"] = "none"
        return about

    def _plan(self, leaves: _Leaves, n_chunks: int) -> tuple[int, int]:
        return _plan_of(self.codec, leaves.counts, None if self.codec in SIGNS else leaves.raw, n_chunks)

    def _check_errors(self, name: str, errors: Any, elements: int, exactly: bool = True) -> None:
        if not self.keeps_errors:
            if errors is not None:
                raise ValueError(f"{name}: None expected, because {self.codec} keeps no errors (error='none')")
            return
        if errors is None:
            raise ValueError(f"{name}: {self.codec} keeps errors: give those of the last step, at first Codec.errors()")
        right = getattr(errors, "ndim", 0) == 1 and errors.dtype == jnp.float32
        if not right or errors.shape[0] < elements or exactly and errors.shape[0] != elements:
            least = "" if exactly else ", or more,"
            raise ValueError(f"{name}: float32 [{elements}]{least} expected, got {_shape(errors)}")


def _turned(ballots: Any, turn: Any) -> Any:
    """Rotates the ballots so that voter `turn` is first: `turn` may be unsigned, so it has no negative."""
    voters = max(ballots.shape[0], 1)
    return jnp.roll(ballots, voters - turn % voters, axis=0)


def _shape(array: Any) -> str:
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        return _said(array)
    return f"{array.dtype} {list(array.shape)}"


@functools.lru_cache(maxsize=1024)
def _plan_of(name: str, counts: tuple[int, ...], raw: tuple[bool, ...] | None, n_chunks: int) -> tuple[int, int]:
    """Returns the bytes of a chunk, and the number of exchanges without errors. Creates a codec without errors, which
    needs no memory for them."""
    with _jax_ffi.library().codec(name, counts, error="none", n_chunks=n_chunks, raw=raw) as codec:
        return codec.payload_bytes // n_chunks, codec.exchanges


def _part(name: str, leaves: _Leaves, chunk: int, n_chunks: int) -> int:
    """Returns the number of elements of a chunk: in its blocks or bytes, and raw ones."""

    def between(counts: Sequence[int], unit: int) -> int:
        units = [-(-count // unit) for count in counts]
        each = -(-sum(units) // n_chunks)
        first, elements, at = chunk * each, 0, 0
        for count, own in zip(counts, units):
            low, high = max(first - at, 0), min(first + each - at, own)
            elements += max(0, min(high * unit, count) - min(low * unit, count)) if high > low else 0
            at += own
        return elements

    blocks = [count for count, raw in zip(leaves.counts, leaves.raw) if not raw]
    raws = [count for count, raw in zip(leaves.counts, leaves.raw) if raw]
    return between(blocks, _UNITS[name]) + between(raws, 1)


def all_reduce(
    values: Any, axis_name: Any, codec: str | Codec = "int8", errors: Errors | None = None, *, turn: Any = 0
) -> tuple[Any, Errors | None]:  # fmt: skip
    """Returns the mean of all ranks' values over a mapped axis, compressed on the way: for shard_map(...,
    check_vma=False). With Codec(reduction="sum") returns the sum, with "sign" the majority.

    `values`: a tree of arrays, alike on all ranks. `axis_name`: as lax.psum() takes it. `codec`: a name, or a Codec.
    `errors`: this rank's part of Codec.errors(values, ranks), then the result of the last step; None if the codec keeps
    none. `turn`: decides ties of SIGN, for example the number of the step, which may be traced.

    Returns the values, the same bytes on all ranks, and the new errors.

    The all-reduce is two-shot: lax.all_to_all of chunks, and lax.all_gather of the reduced chunks. It is one-shot,
    lax.all_gather of all payloads, where an all-reduce of the library on the CPU is: payloads are small, and the codec
    keeps no errors. lax.switch chooses the chunk that a rank reduces, and a GPU's host waits for that choice.

    ValueError: errors that are missing, or are not the codec's. TypeError: a leaf that is not float32, float16 or
    bfloat16, or has another dtype than the first one.
    """
    how = codec if isinstance(codec, Codec) else Codec(codec)
    if how.keeps_errors and not (isinstance(errors, tuple) and len(errors) == 2):
        raise ValueError(
            f"errors: {how.codec} keeps errors: give those of the last step, at first Codec.errors(values, ranks); "
            f"got {_said(errors)}"
        )
    if not how.keeps_errors and errors is not None:
        raise ValueError(
            f"errors: None expected, because {how.codec} keeps no errors (error='none'), got {_said(errors)}"
        )
    worker, server = errors if errors is not None else (None, None)
    ranks = lax.axis_size(axis_name)
    payload, worker = how.encode(values, worker, ranks)
    _, exchanges = how._plan(how._leaves(values), ranks)
    if not how.keeps_errors and exchanges == 1:
        of_all = lax.all_gather(payload, axis_name)
        chunks = [how.reduce(k, of_all[:, k], values, n_chunks=ranks)[0] for k in range(ranks)]
        return how.decode(jnp.stack(chunks), values), None
    mine = lax.all_to_all(payload, axis_name, 0, 0, tiled=True)

    def reducer(chunk: int) -> Any:
        return lambda: how.reduce(chunk, mine, values, server, n_chunks=ranks, turn=turn)

    reduced, server = lax.switch(lax.axis_index(axis_name), [reducer(chunk) for chunk in range(ranks)])
    decoded = how.decode(lax.all_gather(reduced, axis_name), values)
    return decoded, Errors(worker, server) if how.keeps_errors else None


# --- bits and signs ---------------------------------------------------------------------------------------------------


def _plain(function: str, result: Any, operands: Sequence[Any], *arguments: Any) -> Any:
    (made,) = _jax_ffi.call([result], operands, {"function": function, "arguments": arguments})
    return made


def _chunks(x: Any, n_chunks: int) -> Any:
    chunks, packed = _whole("n_chunks", n_chunks, 1), -(-x.size // 8)
    return jax.ShapeDtypeStruct((chunks, -(-packed // chunks)), jnp.uint8)


def pack_signs(x: Any, n_chunks: int = 1, order: int = BIG) -> Any:
    """Packs the signs of floats to uint8 [n_chunks, bytes]: a bit is 0 if its element is below zero."""
    return _plain("gc_pack_signs_into", _chunks(x, n_chunks), [x], "i0", _int32("order", order), "o0")


def unpack_signs(chunks: Any, like: Any, scales: Any = None, order: int = BIG) -> Any:
    """Unpacks signs to +1 and -1, in the shape and dtype of `like`; with `scales`, float32 [n_chunks], multiplies the
    values of a chunk by its scale."""
    result = jax.ShapeDtypeStruct(like.shape, like.dtype)
    given = [chunks] if scales is None else [chunks, scales]
    return _plain("gc_unpack_signs_into", result, given, "i0", None if scales is None else "i1",
        _int32("order", order), "o0")  # fmt: skip


def pack_chunks(x: Any, n_chunks: int = 1, order: int = BIG) -> Any:
    """Packs booleans or integers to bits, uint8 [n_chunks, bytes]: 1 if an element is not zero."""
    return _plain("gc_pack_chunks_into", _chunks(x, n_chunks), [x], "i0", _int32("order", order), "o0")


def unpack_chunks(chunks: Any, like: Any, order: int = BIG) -> Any:
    """Unpacks the result of pack_chunks() to zeros and ones, in the shape and dtype of `like`."""
    result = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return _plain("gc_unpack_chunks_into", result, [chunks], "i0", _int32("order", order), "o0")


def pack_bits(x: Any, axis: int | None = None, order: int = BIG) -> Any:
    """Packs like numpy.packbits(): eight elements of an axis, or of all in a row, to a byte."""
    if axis is None:
        shape: tuple[int, ...] = (-(-x.size // 8),)
    else:
        at = _whole("axis", axis, -x.ndim, x.ndim - 1) % x.ndim
        shape = *x.shape[:at], -(-x.shape[at] // 8), *x.shape[at + 1 :]
    result, number = jax.ShapeDtypeStruct(shape, jnp.uint8), AXIS_NONE if axis is None else axis
    return _plain("gc_pack_bits_into", result, [x], "i0", number, _int32("order", order), "o0")


def unpack_bits(x: Any, like: Any, axis: int | None = None, order: int = BIG) -> Any:
    """Unpacks like numpy.unpackbits(), in the shape and dtype of `like`, without the padding bits."""
    result, number = jax.ShapeDtypeStruct(like.shape, like.dtype), AXIS_NONE if axis is None else _int32("axis", axis)
    return _plain("gc_unpack_bits_into", result, [x], "i0", number, _int32("order", order), "o0")


def vote_signs(ballots: Any, turn: Any = 0) -> Any:
    """Returns the majority of the ballots for each bit: uint8 [voters, bytes] to [bytes]. In a tie voter `turn`, which
    may be traced, decides byte 0, the next one byte 1."""
    result = jax.ShapeDtypeStruct(ballots.shape[1:], jnp.uint8)
    return _plain("gc_vote_signs_into", result, [_turned(ballots, turn)], "i0", 0, "o0")


for _each in (Codec, Errors):
    _each.__module__ = __name__
