"""Calls of codecs, and of the plain form, for bench/cpu_codec.py and bench/gpu_codec.py: how many bytes they move, what
they work on, and whether they give what they should.

A *place* is where arrays lie: `np` is NumPy or CuPy, `device_type` DLPack's, `timer` the C functions of bench/codec.h;
`describe` makes a DLTensor of an array; `random` and `empty` make arrays, which begin at a cache line, bfloat16 as
uint16; `call` makes one call, and `wait` waits for what was called.
"""

import ctypes
import math
from collections import namedtuple
from ctypes import POINTER, c_int32, c_int64, c_void_p

from cpu import BFLOAT16, DLTensor

ENCODE, DECODE, ADD, REDUCE, COMPRESS = range(5)  # as in codec.h
FLOAT32_ERRORS, BFLOAT16_ERRORS, NO_ERRORS = range(3)  # as gc_error
WORLDS = 2, 4, 8  # payloads that are reduced
HEADER = 64

# `dtype` is that of the gradient, or of what is decoded. `bytes` are read and written for each element of the gradient:
# the gradient is read, the error read and written, the bit written; or the bit is read and the value written.
Kind = namedtuple("Kind", "function dtype error bytes world codec", defaults=[1, "onebit"])
KINDS = {
    "encode float32": Kind(ENCODE, "float32", FLOAT32_ERRORS, 4 + 2 * 4 + 1 / 8),
    "encode bfloat16": Kind(ENCODE, "bfloat16", BFLOAT16_ERRORS, 2 + 2 * 2 + 1 / 8),
    "encode bfloat16, float32 errors": Kind(ENCODE, "bfloat16", FLOAT32_ERRORS, 2 + 2 * 4 + 1 / 8),
    "decode float32": Kind(DECODE, "float32", NO_ERRORS, 4 + 1 / 8),
    "decode bfloat16": Kind(DECODE, "bfloat16", NO_ERRORS, 2 + 1 / 8),
    "decode and add float32": Kind(ADD, "float32", NO_ERRORS, 2 * 4 + 1 / 8),
    # The scale is needed before the error can be written: gradient and error are read twice.
    "plain float32": Kind(COMPRESS, "float32", FLOAT32_ERRORS, 2 * (4 + 4) + 4 + 1 / 8),
    # A rank's share of the elements: bits of each payload, the error, the bits that go out.
    **{f"reduce {w} float32": Kind(REDUCE, "float32", FLOAT32_ERRORS, (w / 8 + 2 * 4 + 1 / 8) / w, w) for w in WORLDS},
    **{f"reduce {w} bfloat16": Kind(REDUCE, "bfloat16", BFLOAT16_ERRORS, (w / 8 + 2 * 2 + 1 / 8) / w, w) for w in WORLDS},
}
# What a rank does before and after its share: payloads of a chunk for each rank.
STAGE_KINDS = {
    f"{stage} {w} {dtype}": KINDS[f"{stage} {dtype}"]._replace(world=w)
    for dtype in ("float32", "bfloat16")
    for w in WORLDS
    for stage in ("encode", "decode")
}
KINDS |= STAGE_KINDS

# Block codecs: number, elements of a block, bytes of its scale and its codes.
CODECS = {"onebit": 1, "bf16": 3, "mxfp8": 4, "int8": 5, "int4": 6, "mxfp4": 7}
BLOCKS = {"bf16": (32, 64), "mxfp8": (32, 33), "int8": (64, 66), "int4": (32, 18), "mxfp4": (32, 17)}


def block_kinds():
    dtypes = {"float32": 4, "bfloat16": 2}
    errors = {"no errors": (NO_ERRORS, 0), "float32 errors": (FLOAT32_ERRORS, 8), "bfloat16 errors": (BFLOAT16_ERRORS, 4)}
    for codec, (elements, size) in BLOCKS.items():
        sent = size / elements
        for dtype, bytes_of_value in dtypes.items():
            for name, (error, kept) in errors.items():
                yield f"blocks {codec} encode {dtype}, {name}", Kind(ENCODE, dtype, error, bytes_of_value + kept + sent, 1, codec)
        for dtype, bytes_of_value in dtypes.items():
            yield f"blocks {codec} decode {dtype}", Kind(DECODE, dtype, NO_ERRORS, bytes_of_value + sent, 1, codec)
        yield f"blocks {codec} decode and add float32", Kind(ADD, "float32", NO_ERRORS, 2 * 4 + sent, 1, codec)
        for w in WORLDS:
            yield f"blocks {codec} reduce {w}", Kind(REDUCE, "float32", NO_ERRORS, (w + 1) * sent / w, w, codec)


BLOCK_KINDS = dict(block_kinds())
ALL_KINDS = KINDS | BLOCK_KINDS


class Call(ctypes.Structure):
    """CodecCall in codec.h."""

    _fields_ = [
        ("function", c_int32),
        ("codec", c_void_p),
        ("values", POINTER(POINTER(DLTensor))),
        ("n_values", c_int64),
        ("payload", POINTER(DLTensor)),
        ("chunks", POINTER(DLTensor)),
        ("scale", POINTER(DLTensor)),
        ("workspace", POINTER(DLTensor)),
    ]


class Codec:
    def __init__(self, place, library, dtype, error, segments, n_chunks=1, codec="onebit"):
        make = place.timer.make_codec
        make.restype = c_void_p
        code, bits = (BFLOAT16, 16) if dtype == "bfloat16" else (2, 32)
        self.library = library
        counts = (c_int64 * len(segments))(*segments)
        options = map(c_int32, (CODECS[codec], place.device_type, code, bits, error))
        self.handle = make(library.handle, *options, counts, c_int64(len(segments)), c_int64(n_chunks))
        if not self.handle:
            raise RuntimeError(library.last_error())
        payload_bytes = library.functions.gc_codec_payload_bytes
        payload_bytes.restype, payload_bytes.argtypes = c_int64, [c_void_p]
        self.payload_bytes = payload_bytes(self.handle)

    def free(self):
        self.library.functions.gc_codec_free(c_void_p(self.handle))


class Work:
    """One call of a kind for each group of segments, each with a codec and memory of its own. `off`: gradients, or what
    is decoded, lie so many elements beyond a cache line."""

    def __init__(self, place, library, kind, groups, off=0, like=None):
        """`like`: another Work of the same, whose gradients are taken."""
        if not hasattr(library.functions, "gc_codec_create"):
            raise RuntimeError(f"{library.path}: of before codecs")
        self.place, self.library, self.kind, self.groups, self.off = place, library, ALL_KINDS[kind], groups, off
        self.bytes = math.ceil(self.kind.bytes * sum(map(sum, groups)))
        self.codecs, self.memory, self.payloads, self.values = [], [], [], []
        try:
            self.calls = (Call * len(groups))()
            for i, segments in enumerate(groups):
                self.calls[i] = self.call(segments, like and like.values[i])
        except BaseException:
            self.free()
            raise

    def free(self):
        """The device must be done."""
        while self.codecs:
            self.codecs.pop().free()

    def arrays(self, make, segments, dtype):
        return [make((n + self.off,), dtype)[self.off :] for n in segments]

    def tensor(self, array, dtype=None):
        """A pointer to its description."""
        tensor = self.place.describe(array, BFLOAT16 if dtype == "bfloat16" else None)
        self.memory.append((array, tensor))
        return ctypes.pointer(tensor)

    def tensors(self, arrays, dtype=None):
        pointers = (POINTER(DLTensor) * len(arrays))(*(self.tensor(array, dtype) for array in arrays))
        self.memory.append(pointers)
        return ctypes.cast(pointers, POINTER(POINTER(DLTensor)))

    def zeros(self, shape, dtype="uint8"):
        array = self.place.empty(shape, dtype)
        array[...] = 0
        return array

    def codec(self, *options):
        self.codecs.append(Codec(self.place, self.library, *options))
        return self.codecs[-1]

    def call(self, segments, values):
        kind, place = self.kind, self.place
        if kind.function == COMPRESS:
            (n,) = segments
            values = values or self.arrays(place.random, segments, kind.dtype)
            error, bits, scale = self.zeros((n,), "float32"), self.zeros((1, -(-n // 8))), self.zeros((1,), "float32")
            workspace_bytes = self.library.functions.gc_onebit_workspace_bytes
            workspace_bytes.restype, workspace_bytes.argtypes = c_int64, [c_int64]
            workspace = self.zeros((workspace_bytes(n),))
            self.values.append(values)
            self.payloads.append((bits, scale))
            both = self.tensors([*values, error])
            return Call(COMPRESS, None, both, 2, self.tensor(bits), None, self.tensor(scale), self.tensor(workspace))

        decodes = kind.function in (DECODE, ADD)
        dtype = "float32" if decodes else kind.dtype
        # It reduces chunk 0, if there are several.
        codec = self.codec(dtype, kind.error, segments, kind.world, kind.codec)
        gradients = values if values and not decodes else self.arrays(place.random, segments, dtype)
        payload = self.zeros((codec.payload_bytes,))
        encode = Call(ENCODE, codec.handle, self.tensors(gradients, dtype), len(segments), self.tensor(payload))
        self.values.append(gradients)
        self.payloads.append(payload)
        if kind.function == ENCODE:
            return encode
        if kind.function == REDUCE:
            stride = codec.payload_bytes // kind.world
            chunks, chunk = self.zeros((kind.world, stride)), self.zeros((stride,))
            for row in chunks:
                place.call(self.library, encode)
                row[...] = payload[:stride]
            self.payloads[-1] = chunk
            return Call(REDUCE, codec.handle, None, 0, self.tensor(chunk), self.tensor(chunks))
        place.call(self.library, encode)
        self.values[-1] = self.arrays(self.zeros, segments, kind.dtype)
        results = self.tensors(self.values[-1], kind.dtype)
        return Call(kind.function, codec.handle, results, len(segments), self.tensor(payload))

    def check(self):
        """That the first call, the codecs new, gives what it should: NumPy or CuPy say what, of the first segment."""
        place, np = self.place, self.place.np
        place.call(self.library, self.calls[0])
        place.wait()
        (n, *_), (values, *_) = self.groups[0], self.values[0]
        if self.kind.codec != "onebit":
            return self.check_blocks()
        if self.kind.function == COMPRESS:
            bits, scale = self.payloads[0]
            bits, scale = bits[0], float(scale[0])
        else:
            payload = self.payloads[0]
            magic, flags = bytes(payload[:4].tolist()), int(payload[28:32].view(np.uint32)[0])
            assert magic == b"GCPL" and flags == 0, f"a payload that begins with {magic} and has the flags {flags}"
            head = -(-(HEADER + 4 * len(self.groups[0])) // 16) * 16
            scale = float(payload[HEADER : HEADER + 4].view(np.float32)[0])
            n_chunks = 1 if self.kind.function == REDUCE else self.kind.world
            chunk_bytes = -(-sum(-(-count // 8) for count in self.groups[0]) // n_chunks)
            bits = payload.reshape(n_chunks, -1)[:, head : head + chunk_bytes].reshape(-1)[: -(-n // 8)]
        assert math.isfinite(scale) and scale > 0, f"the scale is {scale}"
        if self.kind.function == REDUCE:
            return
        narrow = self.kind.dtype == "bfloat16"
        x = (values.astype(np.uint32) << 16).view(np.float32) if narrow else values
        assert bool((np.packbits(~(x < 0)) == bits).all()), "bits are not the signs"
        if self.kind.function in (DECODE, ADD):
            near = 2**-8 if narrow else 1e-6
            assert bool((abs(abs(x) - np.float32(scale)) <= near * scale).all()), f"values are not {scale} and -{scale}"
        else:
            expected = math.sqrt(float((x.astype(np.float64) ** 2).mean()))
            assert abs(scale - expected) <= 1e-5 * expected, f"the scale is {scale}, expected {expected}"

    def check_blocks(self):
        """The same of a block codec: tests hold every byte; here it is that the call was made at all."""
        payload, np = self.payloads[0], self.place.np
        magic, flags = bytes(payload[:4].tolist()), int(payload[28:32].view(np.uint32)[0])
        assert magic == b"GCPL" and flags == 0, f"a payload that begins with {magic} and has the flags {flags}"
        assert int(payload[64:4096].max()) > 0, "a payload of zeros"
        if self.kind.function in (DECODE, ADD):
            x = self.values[0][0]
            x = (x.astype(np.uint32) << 16).view(np.float32) if self.kind.dtype == "bfloat16" else x
            mean = float(abs(x).mean())
            assert 0.1 < mean < 10, f"values of mean magnitude {mean}"
