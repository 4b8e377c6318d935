"""Codecs through the C interface, and random cases of them, the same for the CPU and for CUDA.

A `Place` puts NumPy's arrays where a codec works and copies them back. `Checked` is a codec of the library and the
model of docs/NUMERICS.md: each of its methods calls both and compares every byte.
"""

import ctypes
import itertools
from ctypes import POINTER, byref, c_int64, c_uint8

import numpy as np

import block_model
import capi
import codec_model
from block_model import FORMATS, SUM, model_of
from capi import CUDA, CodecOptions, DLDevice, Status, Tensor, lib
from codec_model import MEAN, ONEBIT, PROPAGATE, RMS, SIGN, TRANSACTIONAL, ZERO

ERRORS = {"float32": 0, "bfloat16": 1, None: 2}
HOST_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
View = POINTER(capi.DLTensor)
OFFSETS = itertools.cycle(range(1, 8))  # elements behind an alignment, used in turn


class Host:
    """Memory of the CPU. Payloads have the required alignment, gradients any."""

    device = DLDevice(0, 0)

    def put(self, array, dtype=None, aligned=True):
        room = np.full(array.nbytes + 64, 0xA5, np.uint8)
        start = -room.ctypes.data % 16 + (0 if aligned else array.itemsize * next(OFFSETS))
        there = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        there[...] = array
        return Tensor(there, dtype)

    def get(self, tensor):
        return tensor.array.copy()


def views(tensors):
    return (View * max(1, len(tensors)))(*(t.view for t in tensors))


def or_null(tensor):
    return None if tensor is None else tensor.view


def dtype_name(array, dtype):
    return dtype if dtype == "bfloat16" else None


class Refused(Exception):
    def __init__(self, status, sentence):
        super().__init__(f"{Status(status).name}: {sentence}")
        self.status = status


def call(name, *arguments):
    status = getattr(lib, name)(*arguments)
    if status != Status.OK:
        raise Refused(status, capi.last_error())


def options_of(model, device):
    segments = (c_int64 * max(1, len(model.segments)))(*model.segments)
    if of_blocks := model.codec in FORMATS:
        # Any number but 0 means raw. Without raw segments, an odd number of them takes an array of 0, an even one NULL.
        raw = [number * 0x80 for number in model.raw]
        raw = (c_uint8 * max(1, len(raw)))(*raw) if any(raw) or len(raw) % 2 else None
    return CodecOptions(
        struct_size=ctypes.sizeof(CodecOptions), codec=model.codec, device=device,
        values=capi.dldtype(model.values), results=capi.dldtype(model.results), error=ERRORS[model.error],
        scale=0 if of_blocks else model.scale, reduction=model.reduction, raw=raw if of_blocks else None,
        nonfinite=model.nonfinite, beta=model.beta, segments=segments,
        n_segments=len(model.segments), n_chunks=model.n_chunks,
        server=0 if model.server is None else model.server + 1,
    )  # fmt: skip


def same(got, expected, what):
    got, expected = np.ascontiguousarray(got), np.ascontiguousarray(expected)
    assert got.shape == expected.shape, f"{what}: {got.shape}, expected {expected.shape}"
    one, other = got.view(np.uint8).reshape(-1), expected.view(np.uint8).reshape(-1)
    different = np.flatnonzero(one != other)
    if different.size:
        at = different[0]
        raise AssertionError(
            f"{what}: {different.size} of {one.size} bytes differ, the first at {at}: "
            f"{one[at:at + 8].tobytes().hex(' ')}, expected {other[at:at + 8].tobytes().hex(' ')}"
        )


class Checked:
    """A codec and its model."""

    def __init__(self, place, **options):
        self.place, self.model = place, model_of(**options)
        self.on_cuda = place.device.device_type == CUDA
        self.handle = POINTER(capi.Codec)()
        call("gc_codec_create", byref(options_of(self.model, place.device)), byref(self.handle))
        stride, chunks = self.model.stride, self.model.n_chunks
        assert lib.gc_codec_payload_bytes(self.handle) == stride * chunks
        assert lib.gc_codec_state_bytes(self.handle) == self.model.state().size
        # docs/NUMERICS.md 9: limits of one-shot for all ranks' payloads together, without peer memory.
        most = 1 << 22 if self.on_cuda and chunks == 2 else 1 << 20
        once = 1 < chunks and chunks * chunks * stride <= most and self.model.error is None and self.model.codec != SIGN
        assert lib.gc_codec_exchanges(self.handle) == (1 if once else 2)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        lib.gc_codec_free(self.handle)

    def factor(self, value):
        return None if value is None else self.place.put(np.array([value], np.float32))

    def encode(self, gradients, value_factor=None, error_factor=None, aligned=True):
        """Encodes gradients in memory's dtype. Returns the payload."""
        put = [self.place.put(g, dtype_name(g, self.model.values), aligned) for g in gradients]
        payload = self.place.put(np.full((self.model.n_chunks, self.model.stride), 0x5A, np.uint8))
        factors = [self.factor(value_factor), self.factor(error_factor)]
        call("gc_codec_encode", self.handle, views(put), len(put), *map(or_null, factors), payload.view, None)
        expected = self.model.encode(
            gradients, 1.0 if value_factor is None else value_factor, 1.0 if error_factor is None else error_factor
        )
        got = self.place.get(payload)
        same(got.reshape(-1), expected, "payload")
        for one, before in zip(put, gradients):
            same(self.place.get(one), before, "gradient")
        return got

    def decode(self, payload, dtype="float32", divisor=0, factor=None, add=False, aligned=True):
        """Returns one array a segment; compares with the model, also the places where nothing is written."""
        rng = np.random.default_rng(len(payload))
        old = [rng.standard_normal(n).astype(HOST_DTYPES[dtype]) for n in self.model.segments]
        return self.decode_onto(payload, old, dtype, divisor, factor, add, aligned)[1]

    def decode_onto(self, payload, old, dtype="float32", divisor=0, factor=None, add=False, aligned=True):
        """Decodes onto given values; returns the status and the values, compared with the model."""
        put = [self.place.put(o, dtype_name(o, dtype), aligned) for o in old]
        expected = self.model.decode(
            payload.reshape(-1), dtype, divisor or 1, 1.0 if factor is None else factor, old if add else None,
            self.on_cuda,
        )  # fmt: skip
        status = Status.OK
        try:
            call("gc_codec_decode", self.handle, self.place.put(payload).view, divisor, or_null(self.factor(factor)),
                 int(add), views(put), len(put), None)  # fmt: skip
        except Refused as refusal:
            status = refusal.status
        got = [self.place.get(one) for one in put]
        if expected is None:
            assert status == Status.CORRUPT, capi.last_error()
            expected = old
        else:
            assert status == Status.OK, capi.last_error()
        for index, (one, e) in enumerate(zip(got, expected)):
            same(one, e, f"values[{index}]")
        return status, got

    def reduce(self, chunks):
        """Reduces chunks, [W, stride]. Returns the outgoing chunk."""
        dst = self.place.put(np.full(self.model.stride, 0x5A, np.uint8))
        corrupt = any(self.model.is_corrupt(chunk, self.model.server) for chunk in chunks)
        status = Status.OK
        try:
            call("gc_codec_reduce", self.handle, self.model.server, self.place.put(chunks).view, dst.view, None)
        except Refused as refusal:
            status = refusal.status
        refused = corrupt and not self.on_cuda
        assert status == (Status.CORRUPT if refused else Status.OK), capi.last_error()
        got = self.place.get(dst)
        same(got, self.model.reduce(chunks), "reduced chunk")
        return got

    def commit(self, skip=None):
        put = None if skip is None else self.place.put(np.atleast_1d(skip))
        call("gc_codec_commit", self.handle, or_null(put), None)
        self.model.commit(bool(skip is not None and np.atleast_1d(skip)[0] != 0))

    def rollback(self):
        call("gc_codec_rollback", self.handle, None)
        self.model.commit(True)

    def reset(self):
        call("gc_codec_reset", self.handle, None)
        self.model.reset()

    def flags(self):
        dst = self.place.put(np.full(1, 0x77, np.uint32))
        call("gc_codec_flags", self.handle, dst.view, None)
        got, expected = int(self.place.get(dst)[0]), self.model.flags
        assert got == expected, f"flags {got}, expected {expected}"
        self.model.flags = 0
        return got

    def scales(self):
        dst = self.place.put(np.full(len(self.model.segments), 7, np.float32))
        call("gc_codec_scales", self.handle, dst.view, None)
        same(self.place.get(dst), np.array(self.model.last_scales, np.float32), "scales")

    def state(self):
        dst = self.place.put(np.full(self.model.state().size, 0x5A, np.uint8))
        call("gc_codec_state_out", self.handle, dst.view, None)
        got = self.place.get(dst)
        same(got, self.model.state(), "state")
        return got

    def errors(self):
        worker = self.place.put(np.full(sum(self.model.segments), 7, np.float32))
        server = None
        if self.model.server is not None:
            server = self.place.put(np.full(self.model.errors(1).size, 7, np.float32))
        call("gc_codec_errors_out", self.handle, worker.view, or_null(server), None)
        same(self.place.get(worker), self.model.errors(0), "worker's errors")
        if server is not None:
            same(self.place.get(server), self.model.errors(1), "server's errors")

    def errors_in(self, worker=None, server=None):
        """Sets the worker's errors of all segments, and the server's of all parts; None: not these."""
        put = [None if one is None else self.place.put(one) for one in (worker, server)]
        call("gc_codec_errors_in", self.handle, *map(or_null, put), None)
        for which, errors in enumerate((worker, server)):
            if errors is not None:
                self.model.take_errors(which, errors)

    def compare_all(self):
        """Compares everything that can be read."""
        self.flags()
        if self.model.codec not in FORMATS:
            self.scales()
        if self.model.pending == [None, None]:
            self.state()
            self.errors()


# --- random cases -----------------------------------------------------------------------------------------------------

SIZES = (0, 1, 7, 8, 1023, 1024, 1025, 8191, 8193)
SPECIAL = (
    0.0, -0.0, 1e-45, -1e-42, 6e17, -6e17, 1.9e19, -1.9e19, np.inf, -np.inf, np.nan, 65504.0, 7e4, 1.7014117e38, 2.0**127,
)  # fmt: skip


def gradient(rng, count, dtype, special):
    """Returns numbers of several magnitudes, a few of them out of SPECIAL."""
    with np.errstate(over="ignore"):
        x = (rng.standard_normal(count) * 10.0 ** rng.integers(-4, 3)).astype(np.float32)
        if special and count:
            where = rng.integers(0, count, rng.integers(1, 4))
            x[where] = rng.choice(np.array(SPECIAL[: rng.integers(5, len(SPECIAL) + 1)], np.float32), where.size)
    return codec_model.narrow(x, dtype)


def random_options(rng, most):
    """Returns options of ONEBIT or SIGN."""
    codec = int(rng.choice([ONEBIT, ONEBIT, ONEBIT, SIGN]))
    options = of_both(rng, most)
    error = None if codec == SIGN else [None, "float32", "float32", "bfloat16"][rng.integers(0, 4)]
    reduction = int(rng.spawn(1)[0].integers(0, 2)) if codec == ONEBIT else 0  # does not change later draws of `rng`
    return dict(codec=codec, error=error, scale=int(rng.choice([RMS, MEAN])), reduction=reduction, **options)


def random_block_options(rng, most):
    options = of_both(rng, most)
    raw = [bool(rng.random() < 0.3) for _ in options["segments"]] if rng.random() < 0.5 else None
    return dict(
        codec=int(rng.choice(list(FORMATS))), error=[None, "float32", "float32", "bfloat16"][rng.integers(0, 4)],
        reduction=int(rng.choice([block_model.MEAN, SUM])), raw=raw, **options,
    )  # fmt: skip


def of_both(rng, most):
    n_segments = int(rng.integers(1, 10)) if rng.random() < 0.6 else 1
    if rng.random() < 0.08:
        n_segments = int(rng.choice([0, 20]))

    def size():
        if n_segments > 9:
            return int(rng.integers(0, 300))
        return int(rng.choice(SIZES)) if rng.random() < 0.6 else int(rng.integers(0, most // n_segments))

    n_chunks = int(rng.integers(1, 9 if rng.random() < 0.9 else 41)) if rng.random() < 0.7 else 1
    return dict(
        segments=[size() for _ in range(n_segments)],
        values=str(rng.choice(["float32", "float16", "bfloat16"])),
        results=str(rng.choice(["float32", "float16", "bfloat16"])),
        nonfinite=int(rng.choice([PROPAGATE, ZERO, TRANSACTIONAL])),
        beta=float(np.float32(rng.choice([1.0, 0.95, 0.5]))),
        n_chunks=n_chunks,
        server=int(rng.integers(0, n_chunks)) if rng.random() < 0.7 else None,
    )


def forged_chunks(rng, model, chunks):
    """Changes chunks for a reduce to what no encoder writes: bits behind the last element of a segment, scales that are
    not finite or so small that their error is rounded to 0, a wrong bit in a header."""
    if model.codec not in FORMATS:
        for first, n in zip(model.first_bytes, model.segments):
            at = first + n // 8 - model.server * model.chunk_bytes
            if n % 8 and 0 <= at < model.chunk_bytes:
                chunks[:, model.head + at] |= 0xFF >> n % 8
        for k in range(len(model.segments)):
            if model.codec == ONEBIT and model.part(k, model.server) and rng.random() < 0.1:
                wrong = np.float32([np.inf, np.nan, 1e-41][rng.integers(0, 3)])
                which = slice(None) if np.isfinite(wrong) else int(rng.integers(0, len(chunks)))
                chunks[which, 64 + 4 * k : 68 + 4 * k] = wrong.reshape(1).view(np.uint8)
    if rng.random() < 0.15:
        chunks[rng.integers(0, len(chunks)), rng.integers(0, 64)] ^= 1 << rng.integers(0, 8)
    return chunks


def one_case(place, seed, most, options_of_case=random_options):
    """Runs a few steps of a random codec; compares every byte. Returns the options, for the message of a failure."""
    rng = np.random.default_rng(seed)
    options = options_of_case(rng, most)
    with Checked(place, **options) as codec:
        model = codec.model
        for _ in range(int(rng.integers(1, 4))):
            special = rng.random() < 0.3
            gradients = [gradient(rng, n, model.values, special) for n in model.segments]
            factors = [float(np.float32(rng.choice([0.5, 2.0**-8, 3.0]))) if rng.random() < 0.3 else None for _ in "ge"]
            payload = codec.encode(gradients, *factors, aligned=rng.random() < 0.7)
            add = bool(rng.random() < 0.3)
            sent = payload.copy()
            if rng.random() < 0.15:
                sent[rng.integers(0, model.n_chunks), rng.integers(0, 64)] ^= 1 << rng.integers(0, 8)
            codec.decode(
                sent, "float32" if add else str(rng.choice(["float32", "float16", "bfloat16"])),
                divisor=int(rng.integers(0, 5)), factor=0.25 if rng.random() < 0.3 else None, add=add,
                aligned=rng.random() < 0.7,
            )  # fmt: skip
            if model.server is not None:
                chunks = [payload[model.server]]
                for _ in range(int(rng.integers(0, 4))):
                    g = [gradient(rng, n, model.values, special) for n in model.segments]
                    other = model_of(**{**options, "server": None})
                    chunks.append(other.encode(g).reshape(model.n_chunks, -1)[model.server])
                count = int(rng.integers(1, 10 if rng.random() < 0.8 else 41))
                codec.reduce(forged_chunks(rng, model, np.stack([chunks[k % len(chunks)] for k in range(count)])))
            if model.nonfinite == TRANSACTIONAL and rng.random() < 0.7:
                skip = [None, np.array([rng.random() < 0.5]), np.array([0, 3][rng.integers(0, 2)], np.int32),
                        np.array([0.0, 0.5][rng.integers(0, 2)], np.float32)][rng.integers(0, 4)]  # fmt: skip
                codec.commit(skip)
                if rng.random() < 0.3:  # flags of a decode must not take a later step back
                    codec.decode(payload)
                    codec.commit()
            if model.error and model.pending == [None, None] and rng.random() < 0.2:
                halves = [rng.standard_normal(model.errors(k).size).astype(np.float32) for k in (0, 1)]
                given = [one if rng.random() < 0.7 else None for one in halves]
                codec.errors_in(given[0], given[1] if model.server is not None else None)
            codec.compare_all()
        if model.nonfinite == TRANSACTIONAL:
            codec.rollback()
            codec.compare_all()
        state = codec.state()
        with Checked(place, **options) as other:
            call("gc_codec_state_in", other.handle, place.put(state).view, None)
            other.model.worker, other.model.reducer = model.worker, model.reducer
            other.state()
    return options


# --- payloads of other senders ----------------------------------------------------------------------------------------


def corruptions(model, payload):
    """Yields the name of a fault, and a payload with this fault alone."""
    for at in range(64):
        changed = payload.copy()
        changed[-1, at] ^= 0x10
        yield f"byte {at} of a header", changed
    for name, bits in [("CORRUPT", codec_model.CORRUPT), ("an unknown flag", 8)]:
        changed = payload.copy()
        changed[0, 28] |= bits
        yield name, changed
    minus = -1.0 if model.codec == ONEBIT else 1.5
    for value in [minus, -0.0, -np.inf]:
        changed = payload.copy()
        changed[0, 64:68] = np.array([value], np.float32).view(np.uint8)
        yield f"scale {value}", changed
    changed = payload.copy()
    changed[0, 68:72] = np.array([1.0], np.float32).view(np.uint8)
    yield "a scale where there are no elements", changed


def invalid_payloads(place, kind):
    """Checks that each corrupt payload is reported, and that it writes nothing (on CUDA zeros)."""
    rng = np.random.default_rng(2)
    error = None if kind == SIGN else "float32"
    with Checked(place, codec=kind, segments=[64, 0, 300], n_chunks=2, error=error, server=0) as codec:
        payload = codec.encode([gradient(rng, n, "float32", False) for n in codec.model.segments])
        for what, changed in corruptions(codec.model, payload):
            assert codec.model.is_corrupt(changed[0], 0) or codec.model.is_corrupt(changed[1], 1), what
            codec.decode(changed)
            codec.decode(changed, add=True)
            codec.reduce(np.stack([payload[0], changed[0]]))  # chunk 1 is not read
        codec.compare_all()
