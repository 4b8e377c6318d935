"""docs/NUMERICS.md 11 in NumPy: the results of block codecs, to the last bit. Simple and slow.

Numbers are float32 arrays, as in codec_model. Exact calculations of the page use float64, which holds all digits.
"""

import struct
from dataclasses import dataclass

import numpy as np

from codec_model import CORRUPT, NONFINITE, SUM, UNIT, ZERO, Handle, Model, canonical, f32, narrow, rounded, widen

BF16, MXFP8, INT8, INT4, MXFP4 = 3, 4, 5, 6, 7
MEAN = 0
E8M0, BFLOAT16 = 2, 3


@dataclass(frozen=True)
class Format:
    """Row of the page's table."""

    block: int
    bits: int  # per code
    scale: int  # rule: 0, E8M0 or BFLOAT16
    most: float = 0  # M

    @property
    def scale_bytes(self):
        return {0: 0, E8M0: 1, BFLOAT16: 2}[self.scale]


FORMATS = {
    BF16: Format(32, 16, 0),
    MXFP8: Format(32, 8, E8M0, 448.0),
    INT8: Format(64, 8, BFLOAT16, 127.0),
    INT4: Format(32, 4, BFLOAT16, 7.0),
    MXFP4: Format(32, 4, E8M0, 6.0),
}
RECIPROCALS = {MXFP8: 0x3B124925, MXFP4: 0x3E2AAAAB}
# Exponent bits, mantissa bits, bias: OCP e4m3 and e2m1.
FLOATS = {MXFP8: (4, 3, 7), MXFP4: (2, 1, 1)}


def values_of(codec):
    """Returns the value of each code of a codec, as float64, by the formats' definitions."""
    if codec == BF16:
        with np.errstate(invalid="ignore"):
            return widen(np.arange(1 << 16).astype(np.uint16), "bfloat16").astype(np.float64)
    bits = FORMATS[codec].bits
    codes = np.arange(1 << bits)
    if codec in (INT8, INT4):
        return np.where(codes >> (bits - 1), codes - (1 << bits), codes).astype(np.float64)
    _, mantissa_bits, bias = FLOATS[codec]
    mantissa = codes % (1 << mantissa_bits)
    exponent = codes % (1 << (bits - 1)) >> mantissa_bits
    magnitude = np.where(
        exponent == 0,
        mantissa * 2.0 ** (1 - bias - mantissa_bits),
        (mantissa + (1 << mantissa_bits)) * 2.0 ** (exponent - bias - mantissa_bits),
    )
    if codec == MXFP8:
        magnitude = np.where(codes % 128 == 127, np.nan, magnitude)  # no Inf
    return np.where(codes >> (bits - 1), -magnitude, magnitude)


VALUES = {codec: values_of(codec) for codec in FORMATS}


def nearest_codes(codec, y):
    """Returns the codes of the values nearest to y: ties to an even mantissa, at most M, with y's sign, also of 0."""
    half = VALUES[codec][: 1 << (FORMATS[codec].bits - 1)]
    half = half[~np.isnan(half)]  # ascending, code by code
    magnitude = np.abs(y)
    above = np.searchsorted(half, magnitude).clip(1, half.size - 1)  # half[above - 1] < magnitude <= half[above]
    to_below, to_above = magnitude - half[above - 1], half[above] - magnitude
    code = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, above - 1)
    return code | np.signbit(y).astype(np.int64) << (FORMATS[codec].bits - 1)


def in_blocks(x, block):
    """Returns x as [blocks, block]; absent elements are +0."""
    blocks = -(-x.size // block)
    return np.concatenate([x, np.zeros(blocks * block - x.size, x.dtype)]).reshape(blocks, block)


def scales_of(codec, largest):
    """Returns the scales of blocks with these largest magnitudes, below 2^127: as memory has them, and as numbers."""
    if FORMATS[codec].scale == E8M0:
        d = (largest * np.uint32(RECIPROCALS[codec]).view(f32)).view(np.uint32)
        exponent, mantissa = d >> 23, d & 0x7FFFFF
        up = np.where(exponent > 0, mantissa != 0, mantissa > 0x400000)
        memory = (exponent + up).astype(np.uint8)
        return memory, 2.0 ** (memory.astype(np.float64) - 127)
    bits = f32(largest / f32(FORMATS[codec].most)).view(np.uint32)
    memory = ((bits >> 16) + (bits % 65536 != 0)).astype(np.uint16)
    memory = np.where(largest < f32(2.0**-100), 0, memory).astype(np.uint16)
    return memory, widen(memory, "bfloat16").astype(np.float64)


def quantize(codec, c):
    """Quantizes a segment in blocks. Returns the scales and codes as memory has them, the values v of the codes, and
    True for each element of a finite block. In other blocks v is NaN."""
    form = FORMATS[codec]
    blocks = in_blocks(c, form.block)
    there = in_blocks(np.ones(c.size, bool), form.block)
    with np.errstate(all="ignore"):
        finite = (np.abs(blocks) < f32(2.0**127)).all(axis=1)
        x = np.where(finite[:, None], blocks, f32(0))
        if codec == BF16:
            scales, codes = np.zeros(0, np.uint8), narrow(x, "bfloat16").reshape(x.shape)
            codes = np.where(there, np.where(finite[:, None], codes, 0x7FC0), 0).astype(np.uint16)
            v = widen(codes, "bfloat16").astype(np.float64)
        else:
            scales, s = scales_of(codec, np.abs(x).max(axis=1, initial=0).astype(f32))
            if form.scale == E8M0:
                codes = np.where(there, nearest_codes(codec, x.astype(np.float64) / s[:, None]), 0)
            else:
                inverse = np.where(s > 0, f32(1) / s.astype(f32), f32(0)).astype(f32)
                q = np.rint(x * inverse[:, None]).clip(-form.most, form.most).astype(np.int64)
                codes = q & ((1 << form.bits) - 1)
            v = VALUES[codec][codes] * s[:, None]
            codes = np.where(finite[:, None], codes, 0)
            scales = np.where(finite, scales, 0xFF if form.scale == E8M0 else 0x7FC0).astype(scales.dtype)
    v = np.where(finite[:, None], v, np.nan).astype(f32)
    return scales, codes, v.reshape(-1)[: c.size], np.repeat(finite, form.block)[: c.size]


def packed(codec, codes):
    """Packs codes to bytes, two of 4 bits in one, the even one in the low half."""
    codes = codes.reshape(-1)
    if FORMATS[codec].bits == 4:
        return (codes[::2] | codes[1::2] << 4).astype(np.uint8).tobytes()
    return codes.astype("<u2" if FORMATS[codec].bits == 16 else np.uint8).tobytes()


def unpacked(codec, data):
    if FORMATS[codec].bits == 4:
        pairs = np.frombuffer(data, np.uint8)
        return np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)
    return np.frombuffer(data, "<u2" if FORMATS[codec].bits == 16 else np.uint8)


def to_16(n_bytes):
    return -(-n_bytes // 16) * 16


@dataclass
class BlockModel(Handle):
    """Handle with a block codec. `raw`: True for each raw segment."""

    raw: list | None = None

    def __post_init__(self):
        self.format = FORMATS[self.codec]
        self.raw = [bool(r) for r in self.raw] if self.raw is not None else [False] * len(self.segments)
        counts = [0 if raw else -(-n // self.format.block) for n, raw in zip(self.segments, self.raw)]
        self.first_block = np.concatenate([[0], np.cumsum(counts)]).astype(int).tolist()
        raws = [n if raw else 0 for n, raw in zip(self.segments, self.raw)]
        self.first_raw = np.concatenate([[0], np.cumsum(raws)]).astype(int).tolist()
        self.blocks = -(-self.first_block[-1] // self.n_chunks)  # U: blocks of a chunk
        self.raws = -(-self.first_raw[-1] // self.n_chunks)  # V: raw elements of a chunk
        self.codes_at = to_16(64 + self.blocks * self.format.scale_bytes)
        self.raw_at = to_16(self.codes_at + self.blocks * self.format.block * self.format.bits // 8)
        self.stride = to_16(self.raw_at + 4 * self.raws)
        self.reset()

    def reset(self):
        self.worker = [np.zeros(n, f32) for n in self.segments]
        self.reducer = [np.zeros(n, f32) for n in self.part_sizes()], 0
        self.pending, self.flags, self.since_commit = [None, None], 0, 0

    def part(self, segment, chunk):
        """Returns the elements of a segment that a chunk holds, as a slice."""
        n, unit = self.segments[segment], 1 if self.raw[segment] else self.format.block
        first = (self.first_raw if self.raw[segment] else self.first_block)[segment]
        each = self.raws if self.raw[segment] else self.blocks
        begin, end = ((chunk + k) * each - first for k in (0, 1))
        return slice(min(max(begin, 0) * unit, n), min(max(end, 0) * unit, n))

    def header(self, chunk, flags=0, magic=b"GCPL", turn=0):
        counts = [n | raw << 63 for n, raw in zip(self.segments, self.raw)]
        of_blocks = self.format.scale, self.format.block, self.stride - 64
        return self.header_of(counts, *of_blocks, chunk, flags, magic, turn)

    def zeroed(self, x, bound=np.inf):
        """Returns x; under the policy ZERO, elements that are not finite, or not below a bound, become +0."""
        wrong = ~(np.abs(x) < f32(bound))
        if self.nonfinite == ZERO:
            self.see(wrong)
            x = np.where(wrong, f32(0), x)
        return x

    def coded(self, c, kept):
        """Returns scales, codes and kept errors for c of a segment or a part."""
        c = self.zeroed(c, 2.0**127)
        scales, codes, v, finite = quantize(self.codec, c)
        self.see(~finite)
        with np.errstate(all="ignore"):
            e = rounded(c - v, self.error) if self.error else kept
        return scales, codes, np.where(finite, e, kept)

    def travelling(self, x):
        """Returns raw elements as a payload or a reduced chunk has them."""
        x = self.zeroed(canonical(x))
        self.see(~np.isfinite(x))
        return x

    def chunk(self, number, flags, scales, codes, raw):
        """Returns a chunk of these blocks and raw elements, padded."""
        head = self.header(number, flags) + scales.tobytes()
        body = head.ljust(self.codes_at, b"\0") + packed(self.codec, codes)
        return (body.ljust(self.raw_at, b"\0") + raw.tobytes()).ljust(self.stride, b"\0")

    def encode(self, gradients, value_factor=1.0, error_factor=1.0, met=0):
        self.commit_half(0)
        self.met = met
        scales, codes, raws, new = [], [], [], []
        for g, e, raw in zip(gradients, self.worker, self.raw):
            with np.errstate(all="ignore"):
                g = self.zeroed(widen(g, self.values)) if not raw else widen(g, self.values)
                c = f32(value_factor) * g
                if raw:
                    raws.append(self.travelling(c))
                    new.append(e)
                    continue
                if self.error:
                    c = c + f32(self.beta) * (f32(error_factor) * e)
            s, q, e = self.coded(canonical(c), e)
            scales.append(s), codes.append(q), new.append(e)
        self.note(self.met)
        self.write_half(0, new)
        return np.frombuffer(b"".join(self.cut(scales, codes, raws, range(self.n_chunks))), np.uint8)

    def cut(self, scales, codes, raws, numbers):
        """Yields the chunks of all segments' scales, codes and raw elements."""
        block = self.format.block
        wide = {0: np.uint8, E8M0: np.uint8, BFLOAT16: np.dtype("<u2")}[self.format.scale]
        scales = np.concatenate([np.zeros(0, wide), *scales]).astype(wide)
        codes = np.concatenate([np.zeros((0, block), np.int64), *[c.astype(np.int64) for c in codes]])
        raws = np.concatenate([np.zeros(0, f32), *raws]).astype("<f4")
        u, v = self.blocks, self.raws
        for k in numbers:
            at = k - numbers[0]
            each = codes[at * u : (at + 1) * u]
            each = np.concatenate([each, np.zeros((u - len(each), block), np.int64)])
            yield self.chunk(k, self.met, scales[at * u : (at + 1) * u], each, raws[at * v : (at + 1) * v])

    def is_corrupt(self, chunk, number):
        """Returns True if the header is corrupt. Every scale and every code is valid."""
        chunk = chunk.tobytes()
        flags = struct.unpack_from("<I", chunk, 28)[0]
        return chunk[:64] != self.header(number, flags) or bool(flags & ~NONFINITE)

    def read_chunk(self, chunk):
        """Returns a chunk's flags, v of all its blocks, and its raw elements."""
        chunk = chunk.tobytes()
        codes = unpacked(self.codec, chunk[self.codes_at :][: self.blocks * self.format.block * self.format.bits // 8])
        with np.errstate(all="ignore"):
            v = VALUES[self.codec][codes].reshape(self.blocks, self.format.block).astype(f32)
            if self.format.scale == E8M0:
                s = np.frombuffer(chunk, np.uint8, self.blocks, 64)
                s = np.where(s == 255, np.nan, 2.0 ** (s.astype(np.float64) - 127)).astype(f32)
                v = v * s[:, None]
            elif self.format.scale == BFLOAT16:
                v = v * widen(np.frombuffer(chunk, "<u2", self.blocks, 64), "bfloat16")[:, None]
        raw = np.frombuffer(chunk, "<f4", self.raws, self.raw_at).astype(f32)
        return struct.unpack_from("<I", chunk, 28)[0], v.astype(f32), raw

    def of_part(self, v, raw, segment, number):
        """Returns the elements of a segment in a chunk."""
        part = self.part(segment, number)
        if self.raw[segment]:
            first = self.first_raw[segment] + part.start - number * self.raws
            return raw[first:][: part.stop - part.start]
        first = (self.first_block[segment] - number * self.blocks) * self.format.block + part.start
        return v.reshape(-1)[first if part.stop > part.start else 0 :][: part.stop - part.start]

    def decode(self, payload, dtype="float32", divisor=1, factor=1.0, add=None, on_cuda=False):
        """Returns one array a segment, in memory's dtype; except on CUDA, None for a corrupt chunk. `add`: summands."""
        chunks = payload.reshape(self.n_chunks, self.stride)
        corrupt = [self.is_corrupt(chunk, k) for k, chunk in enumerate(chunks)]
        if any(corrupt) and not on_cuda:
            self.note(CORRUPT)
            return None
        out = [np.zeros(n, f32) if add is None else old.copy() for n, old in zip(self.segments, add or self.segments)]
        met = CORRUPT if any(corrupt) else 0
        for k, chunk in enumerate(chunks):
            if corrupt[k]:
                continue
            flags, v, raw = self.read_chunk(chunk)
            met |= flags
            for i in range(len(self.segments)):
                part = self.part(i, k)
                with np.errstate(all="ignore"):
                    x = f32(self.of_part(v, raw, i, k) / f32(divisor)) * f32(factor)
                    x = x if add is None else canonical(add[i][part] + x)
                if dtype == "float16":
                    x = np.where(np.isfinite(x), x.clip(-65504, 65504), x)
                out[i][part] = rounded(x, dtype)
                if not np.isfinite(out[i][part]).all():
                    met |= NONFINITE
        self.note(met)
        return [narrow(x, dtype) for x in out]

    def sums(self, chunks):
        """Returns, for each segment's part, the sum or mean of the payloads."""
        read = [self.read_chunk(chunk) for chunk in chunks]
        for flags, _, _ in read:
            self.met |= flags
        sums = []
        for i, n in enumerate(self.part_sizes()):
            d = np.zeros(n, f32)
            for _, v, raw in read:
                v = self.of_part(v, raw, i, self.server)
                self.see(~np.isfinite(v))
                with np.errstate(all="ignore"):
                    d = d + (np.where(np.isfinite(v), v, f32(0)) if self.nonfinite == ZERO else v)
            with np.errstate(all="ignore"):
                sums.append(d / f32(self.ranks or len(chunks)) if self.reduction == MEAN else d)
        return sums

    def chunk_of(self, sums):
        """Returns the chunk of these sums and the reducer's errors."""
        kept, turn = self.reducer
        scales, codes, raws, new = [], [], [], []
        for d, e, raw in zip(sums, kept, self.raw):
            if raw:
                raws.append(self.travelling(d))
                new.append(e)
                continue
            with np.errstate(all="ignore"):
                d = d + f32(self.beta) * e if self.error else d
            s, q, e = self.coded(canonical(d), e)
            scales.append(s), codes.append(q), new.append(e)
        self.note(self.met)
        self.write_half(1, (new, turn + 1))
        return np.frombuffer(next(self.cut(scales, codes, raws, range(self.server, self.server + 1))), np.uint8)

    def state(self):
        turn = self.reducer[1] if self.server is not None else 0
        text = self.header(0, magic=b"GCST", turn=turn).ljust(256, b"\0")
        if self.error is not None:
            size = narrow(np.zeros(1), self.error).itemsize
            both = [self.worker, self.reducer[0] if self.server is not None else []]
            for e in [e for half in both for e, raw in zip(half, self.raw) if not raw]:
                text += narrow(e, self.error).tobytes().ljust(-(-e.size // UNIT) * UNIT * size, b"\0")
        return np.frombuffer(text, np.uint8)

    def errors(self, which):
        """Returns the worker's (0) or the reducer's (1) errors: all segments, one after the other, +0 for raw ones."""
        kept = self.worker if which == 0 else self.reducer[0]
        return np.concatenate([np.zeros(0, f32), *kept])

    def take_errors(self, which, errors):
        kept = self.worker if which == 0 else self.reducer[0]
        new = []
        for part, raw in zip(np.split(errors, np.cumsum([e.size for e in kept])[:-1]) if kept else [], self.raw):
            new.append(np.zeros(part.size, f32) if raw else self.taken(part))
        if which == 0:
            self.worker = new
        else:
            self.reducer = new, self.reducer[1]


def model_of(codec, **options):
    return (BlockModel if codec in FORMATS else Model)(codec, **options)
