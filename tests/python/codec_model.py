"""docs/NUMERICS.md in NumPy: the results of codecs, to the last bit. Simple and slow; the library is compared with it.

Numbers are float32 arrays, for any dtype in memory. `narrow` and `widen` convert to and from memory, in which bfloat16
is uint16, as NumPy has none.
"""

import struct
from dataclasses import dataclass, field

import numpy as np

ONEBIT, SIGN = 1, 2
RMS, MEAN = 0, 1
SUM = 1  # value of `reduction`; 0: the mean
PROPAGATE, ZERO, TRANSACTIONAL = 0, 1, 2
CORRUPT, NONFINITE, TAKEN_BACK = 1, 2, 4
UNIT = 1024
NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2}
f32 = np.float32


def canonical(x):
    """Returns x, in which every NaN is 0x7fc00000."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000).view(f32), x).astype(f32)


def narrow(x, dtype):
    """Converts float32 to the memory of a dtype, rounded once to nearest even."""
    x = canonical(np.asarray(x, f32))
    if dtype == "float32":
        return x
    if dtype == "float16":
        with np.errstate(over="ignore"):
            half = x.astype(np.float16)
        return np.where(np.isnan(x), np.uint16(0x7E00), half.view(np.uint16)).view(np.float16)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def widen(memory, dtype):
    if dtype == "bfloat16":
        return (memory.astype(np.uint32) << 16).view(f32)
    return memory.astype(f32)


def rounded(x, dtype):
    return widen(narrow(x, dtype), dtype)


def bit(x):
    return ~(x < 0)


def sigma(x):
    return np.where(bit(x), f32(1), f32(-1))


def scale_of(c, rule):
    """Returns the scale of section 2."""
    if c.size == 0:
        return f32(0)
    with np.errstate(all="ignore"):
        x = np.abs(c) if rule == MEAN else c * c
        units = -(-c.size // UNIT)
        x = np.concatenate([x, np.zeros(units * UNIT - c.size, f32)]).reshape(units, 4, 256)
        a = ((x[:, 0] + x[:, 1]) + x[:, 2]) + x[:, 3]
        while a.shape[1] > 1:
            half = a.shape[1] // 2
            a = a[:, :half] + a[:, half:]
        sums = a[:, 0].astype(np.float64)
        while sums.size > 1:
            sums = np.concatenate([sums, np.zeros(sums.size % 2)])
            sums = sums[::2] + sums[1::2]
        mean = sums[0] / np.float64(c.size)
        return canonical(np.asarray(f32(mean if rule == MEAN else np.sqrt(mean))))[()]


@dataclass
class Handle:
    """Common part of the models of all codecs: the end of a step, the two halves of a reduce, flags."""

    codec: int
    segments: list
    values: str = "float32"
    results: str = "float32"
    error: str | None = "float32"
    nonfinite: int = PROPAGATE
    beta: float = 1.0
    n_chunks: int = 1
    server: int | None = None
    reduction: int = 0
    ranks: int = 0  # divisor of a mean; 0: the number of payloads
    flags: int = 0
    since_commit: int = 0
    pending: list = field(default_factory=lambda: [None, None])  # worker's and server's state that commit makes valid

    def header_of(self, counts, scale, block, n_bytes, chunk, flags, magic, turn):
        """Returns the header of section 6. `counts`: numbers in the digest."""
        digest = 0xCBF29CE484222325
        for byte in b"".join(struct.pack("<Q", n) for n in counts):
            digest = (digest ^ byte) * 0x100000001B3 % 2**64
        return magic + struct.pack(
            "<HHBBBBIIIIIqqQQ", 1, self.codec, NUMBERS[self.values], NUMBERS[self.results], scale, self.reduction,
            block,
            self.n_chunks, chunk, len(self.segments), flags, sum(self.segments), n_bytes, digest, turn,
        )  # fmt: skip

    def see(self, nonfinite):
        if np.any(nonfinite):
            self.met |= NONFINITE

    def note(self, flags):
        self.flags |= flags
        self.since_commit |= flags

    def write_half(self, which, new):
        if self.nonfinite == TRANSACTIONAL:
            self.pending[which] = new
        elif which == 0:
            self.worker = new
        else:
            self.reducer = new

    def commit_half(self, which):
        """Commits a pending step before encode (0) or reduce (1)."""
        if self.pending[which] is not None:
            self.commit()

    def commit(self, skip=False):
        if self.pending != [None, None]:
            if skip or self.since_commit & NONFINITE:
                self.flags |= TAKEN_BACK
            else:
                self.worker = self.worker if self.pending[0] is None else self.pending[0]
                self.reducer = self.reducer if self.pending[1] is None else self.pending[1]
        self.pending, self.since_commit = [None, None], 0

    def taken(self, errors):
        """Returns a caller's errors, rounded; non-finite ones become +0, and no commit takes a step back for them."""
        errors = rounded(canonical(errors), self.error)
        self.flags |= 0 if np.isfinite(errors).all() else NONFINITE
        return np.where(np.isfinite(errors), errors, f32(0))

    def part_sizes(self, chunk=None):
        """Returns the number of each segment's elements in a chunk, by default in the reduced one."""
        chunk = self.server if chunk is None else chunk
        if chunk is None:
            return []
        parts = [self.part(i, chunk) for i in range(len(self.segments))]
        return [p.stop - p.start if p else 0 for p in parts]

    def shard_elements(self):
        return sum(self.part_sizes())

    def shard_places(self):
        """Returns the places of the elements of a shard among those of all segments."""
        firsts = np.concatenate([[0], np.cumsum(self.segments)]).astype(int)
        parts = [self.part(i, self.server) for i in range(len(self.segments))]
        each = [np.arange(p.start, p.stop) + first for p, first in zip(parts, firsts) if p]
        return np.concatenate([np.zeros(0, int), *each])

    def reduce(self, chunks):
        """Reduces chunk `server` of several payloads, [W, stride]. Returns the outgoing chunk."""
        self.commit_half(1)
        if any(self.is_corrupt(chunk, self.server) for chunk in chunks):
            self.note(CORRUPT)
            return self.corrupt_chunk(self.server)
        self.met = 0
        return self.chunk_of(self.sums(chunks))

    def corrupt_chunk(self, number):
        return np.frombuffer(self.header(number, CORRUPT).ljust(self.stride, b"\0"), np.uint8)

    def mean(self, chunks, on_cuda=False):
        """Returns the shard of reduce's first half, in the order of segments. Corrupt chunks: None, on CUDA zeros."""
        if any(self.is_corrupt(chunk, self.server) for chunk in chunks):
            self.note(CORRUPT)
            return np.zeros(self.shard_elements(), f32) if on_cuda else None
        self.met = 0
        shard = canonical(np.concatenate([np.zeros(0, f32), *self.sums(chunks)]))
        self.note(self.met)
        return self.vote(shard, self.met)

    def vote(self, value, flags):
        """Returns the value, or NaN if a vote would hide that one was not finite."""
        return value * f32(np.nan) if self.codec == SIGN and self.nonfinite != ZERO and flags & NONFINITE else value

    def encode_shard(self, shard):
        """Returns the outgoing chunk of reduce's second half, for any shard."""
        self.commit_half(1)
        self.met = 0
        cuts = np.cumsum(self.part_sizes())[:-1]
        return self.chunk_of(np.split(shard, cuts) if self.segments else [])


@dataclass
class Model(Handle):
    """ONEBIT or SIGN: section 4 and on."""

    scale: int = RMS

    def __post_init__(self):
        self.byte_counts = [-(-n // 8) for n in self.segments]
        self.first_bytes = np.concatenate([[0], np.cumsum(self.byte_counts)]).astype(int).tolist()
        self.chunk_bytes = -(-self.first_bytes[-1] // self.n_chunks)
        self.head = -(-(64 + 4 * len(self.segments)) // 16) * 16
        self.stride = self.head + -(-self.chunk_bytes // 16) * 16
        self.reset()

    def reset(self):
        empty = [np.zeros(n, f32) for n in self.segments], [f32(0)] * len(self.segments)
        self.worker = empty
        self.reducer = [np.zeros(n, f32) for n in self.part_sizes()], [f32(0)] * len(self.part_sizes()), 0
        self.pending, self.flags, self.since_commit = [None, None], 0, 0
        self.last_scales = [f32(0)] * len(self.segments)

    def part(self, segment, chunk):
        """Returns the elements of a segment that a chunk holds, as a slice; None if it holds none."""
        first, end = self.first_bytes[segment], self.first_bytes[segment + 1]
        begin, stop = max(first, chunk * self.chunk_bytes), min(end, (chunk + 1) * self.chunk_bytes)
        if begin >= stop:
            return None
        return slice((begin - first) * 8, min((stop - first) * 8, self.segments[segment]))

    def header(self, chunk, flags=0, magic=b"GCPL", turn=0):
        scale = 0 if self.codec == SIGN else self.scale
        return self.header_of(self.segments, scale, 0, self.chunk_bytes, chunk, flags, magic, turn)

    def chunk(self, number, flags, scales, bits):
        """Returns a chunk with these bytes of bits."""
        scales = [s if self.part(i, number) else f32(0) for i, s in enumerate(scales)]
        head = self.header(number, flags) + b"".join(f32(s).tobytes() for s in scales)
        return (head.ljust(self.head, b"\0") + bytes(bits)).ljust(self.stride, b"\0")

    def feed_back(self, g, kept, s, factor):
        """Returns c^ of one segment: gradient (or the sum of payloads) plus the error that is kept."""
        with np.errstate(all="ignore"):
            if self.error is None:
                c = canonical(g)
            else:
                e = kept - s * sigma(kept)
                c = rounded(g + f32(self.beta) * (factor * e), self.error)
        if self.nonfinite == ZERO:
            self.see(~np.isfinite(c))
            c = np.where(np.isfinite(c), c, f32(0))
        return c

    def scale_or_zero(self, c, dtype="float32"):
        """Returns the scale, rounded to a dtype, or 0. In float16 a finite scale stays finite."""
        if self.codec == SIGN:
            self.see(~np.isfinite(c))
            return f32(1 if c.size else 0)
        s = scale_of(c, self.scale)
        if dtype == "float16" and np.isfinite(s):
            s = min(s, f32(65504))
        s = rounded(s, dtype)[()]
        self.see(not np.isfinite(s))
        return f32(0) if self.nonfinite == ZERO and not np.isfinite(s) else s

    def encode(self, gradients, value_factor=1.0, error_factor=1.0, met=0):
        """Returns the payload of one array a segment, in memory's dtype. `met`: flags that all chunks get."""
        self.commit_half(0)
        self.met = met
        kept, scales = self.worker
        new, s_new, packed = [], [], []
        for g, c, s in zip(gradients, kept, scales):
            g = widen(g, self.values)
            if self.nonfinite == ZERO:
                self.see(~np.isfinite(g))
                g = np.where(np.isfinite(g), g, f32(0))
            with np.errstate(all="ignore"):
                c = self.feed_back(f32(value_factor) * g, c, s, f32(error_factor))
            new.append(c)
            s_new.append(self.scale_or_zero(c))
            packed.append(np.packbits(bit(c)).tobytes())
        self.note(self.met)
        self.last_scales = s_new
        self.write_half(0, (new, s_new))
        bits = b"".join(packed).ljust(self.chunk_bytes * self.n_chunks, b"\0")
        cut = [bits[k * self.chunk_bytes : (k + 1) * self.chunk_bytes] for k in range(self.n_chunks)]
        return np.frombuffer(b"".join(self.chunk(k, self.met, s_new, cut[k]) for k in range(self.n_chunks)), np.uint8)

    def is_corrupt(self, chunk, number):
        """Returns True if this codec would not have written this chunk."""
        chunk = chunk.tobytes()
        flags = struct.unpack_from("<I", chunk, 28)[0]
        if chunk[:64] != self.header(number, flags) or flags & ~NONFINITE:
            return True
        for i, s in enumerate(np.frombuffer(chunk[64 : 64 + 4 * len(self.segments)], f32)):
            if self.part(i, number) is None:
                wrong = s.view(np.uint32) != 0
            elif self.codec == SIGN:
                wrong = s != 1
            else:
                wrong = bool(np.signbit(s)) and not np.isnan(s)
            if wrong:
                return True
        return False

    def read_chunk(self, chunk):
        """Returns flags, scales and signs (bit is 1) of all bytes of a chunk."""
        chunk = chunk.tobytes()
        scales = np.frombuffer(chunk[64 : 64 + 4 * len(self.segments)], f32)
        bits = np.unpackbits(np.frombuffer(chunk[self.head : self.head + self.chunk_bytes], np.uint8)).astype(bool)
        return struct.unpack_from("<I", chunk, 28)[0], scales, bits

    def of_part(self, bits, segment, number):
        """Returns the bits of a segment in a chunk."""
        part = self.part(segment, number)
        first = (self.first_bytes[segment] - number * self.chunk_bytes) * 8 + part.start
        return bits[first : first + part.stop - part.start]

    def decode(self, payload, dtype="float32", divisor=1, factor=1.0, add=None, on_cuda=False):
        """Returns one array a segment, in memory's dtype; except on CUDA, None for a corrupt chunk. `add`: summands."""
        chunks = payload.reshape(self.n_chunks, self.stride)
        corrupt = [self.is_corrupt(chunk, k) for k, chunk in enumerate(chunks)]
        if any(corrupt) and not on_cuda:
            self.note(CORRUPT)
            return None
        out = [np.zeros(n, f32) for n in self.segments]
        there = [np.zeros(n, bool) for n in self.segments]
        met = CORRUPT if any(corrupt) else 0
        for k, chunk in enumerate(chunks):
            if corrupt[k]:
                continue
            flags, scales, bits = self.read_chunk(chunk)
            met |= flags
            for i, s in enumerate(scales):
                if part := self.part(i, k):
                    with np.errstate(all="ignore"):
                        v = f32(f32(self.vote(s, flags) / f32(divisor)) * f32(factor))
                        out[i][part] = v * np.where(self.of_part(bits, i, k), f32(1), f32(-1))
                        there[i][part] = True
        if add is not None:
            with np.errstate(all="ignore"):
                out = [np.where(t, canonical(old + v), old) for old, v, t in zip(add, out, there)]
        memory = [narrow(v, dtype) for v in out]
        if not all(np.isfinite(widen(m, dtype)[t]).all() for m, t in zip(memory, there)):
            met |= NONFINITE
        self.note(met)
        return memory

    def sums(self, chunks):
        """Returns, for each segment's part, the sum of the payloads, or their votes as +1 and -1."""
        k, w, turn = self.server, len(chunks), self.reducer[2]
        read = [self.read_chunk(chunk) for chunk in chunks]
        for flags, _, _ in read:
            self.met |= flags
        sums = []
        for i in range(len(self.segments)):
            part = self.part(i, k)
            if part is None:
                sums.append(np.zeros(0, f32))
                continue
            signs = [self.of_part(b, i, k) for _, _, b in read]
            d = np.zeros(part.stop - part.start, f32)
            if self.codec == SIGN:
                votes = np.sum(signs, axis=0)
                byte = self.first_bytes[i] + part.start // 8 + np.arange(d.size) // 8
                whose = (byte + turn) % w
                tie = np.asarray(signs)[whose, np.arange(whose.size)]
                sums.append(np.where(np.where(2 * votes == w, tie, 2 * votes > w), f32(1), f32(-1)))
                continue
            for (_, s, _), sign in zip(read, signs):
                with np.errstate(all="ignore"):
                    q = s[i] if self.reduction == SUM else f32(s[i] / f32(self.ranks or w))
                    if self.nonfinite == ZERO and not np.isfinite(q):
                        self.met |= NONFINITE
                        q = f32(0)
                    self.see(not np.isfinite(q))
                    d = d + q * np.where(sign, f32(1), f32(-1))
            sums.append(d)
        return sums

    def chunk_of(self, sums):
        """Returns the chunk of these sums and the server's error."""
        k, (kept, scales, turn) = self.server, self.reducer
        new, t_new = [], []
        bits = np.zeros(self.chunk_bytes * 8, bool)
        for i, d in enumerate(sums):
            part = self.part(i, k)
            if part is None:
                new.append(np.zeros(0, f32))
                t_new.append(f32(0))
                continue
            first = (self.first_bytes[i] - k * self.chunk_bytes) * 8 + part.start
            d = self.feed_back(d, kept[i], scales[i], f32(1))
            new.append(d)
            t_new.append(self.scale_or_zero(d, self.results))
            bits[first : first + d.size] = bit(d)
        self.note(self.met)
        self.write_half(1, (new, t_new, turn + 1))
        return np.frombuffer(self.chunk(k, self.met, t_new, np.packbits(bits).tobytes()), np.uint8)

    def state(self):
        reduces = self.server is not None
        turn = self.reducer[2] if reduces else 0
        scales = [*self.worker[1], *(self.reducer[1] if reduces else [])]
        head = self.header(0, magic=b"GCST", turn=turn) + b"".join(f32(s).tobytes() for s in scales)
        text = head.ljust(-(-len(head) // 256) * 256, b"\0")
        if self.error is not None:
            size = narrow(np.zeros(1), self.error).itemsize
            for c in [*self.worker[0], *(self.reducer[0] if reduces else [])]:
                text += narrow(c, self.error).tobytes().ljust(-(-c.size // UNIT) * UNIT * size, b"\0")
        return np.frombuffer(text, np.uint8)

    def errors(self, which):
        """Returns the worker's (0) or the server's (1) errors: all segments, one after the other."""
        kept, scales = (self.worker, self.reducer[:2])[which]
        with np.errstate(all="ignore"):
            each = [canonical(c - s * sigma(c)) for c, s in zip(kept, scales)]
        if self.error is None:
            each = [np.zeros_like(e) for e in each]
        return np.concatenate(each) if each else np.zeros(0, f32)

    def take_errors(self, which, errors):
        """Replaces the errors of all segments, one after the other, by these, kept with a scale of 0."""
        kept = (self.worker, self.reducer)[which][0]
        cuts = np.cumsum([c.size for c in kept])[:-1] if kept else []
        new = [self.taken(part) for part in np.split(errors, cuts)] if kept else []
        if which == 0:
            self.worker = new, [f32(0)] * len(new)
        else:
            self.reducer = new, [f32(0)] * len(new), self.reducer[2]
