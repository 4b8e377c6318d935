"""Golden results of the codecs: tests/golden_codecs.txt, which tests/golden.rs replays on every instruction set.

    GRADCODEC_LIBRARY=... build/venv/bin/python tests/python/golden.py        writes the file

A case is a line with its options and a line for each of its three steps: the calls of the step, ` = `, and their
results. The library and the model of docs/NUMERICS.md both compute the results and must agree. Numbers are drawn by a
formula that the file's readers have, too. `-`: not in this step.

    case CODEC VALUES RESULTS ERROR SCALE REDUCTION NONFINITE BETA N_CHUNKS SERVER SEGMENTS RAW SHARD
    step ENCODE DECODE REDUCE END RESET ERRORS = DECODED REDUCED PAYLOAD RESULTS KEPT

    ENCODE   SEED WILD VALUE_FACTOR ERROR_FACTOR, segment k draws from SEED + k
    DECODE   DTYPE DIVISOR FACTOR ADD FLIP, of the payload; FLIP: BYTE:BIT, flipped in the last chunk
    REDUCE   COUNT FLIP, of the server's chunk of the last payloads, newest first, cyclically
    END      commit0, commit1 (which skips) or rollback
    RESET    reset
    ERRORS   the seed of errors that are put in
    DECODED, REDUCED: statuses; PAYLOAD, RESULTS (values, reduced chunk), KEPT (flags, state, errors): digests of bytes
"""

import pathlib
import sys

import numpy as np

import codecs_c
from block_model import FORMATS
from codecs_c import HOST_DTYPES, Checked, Host, Status
from codec_model import SIGN, TRANSACTIONAL

PATH = pathlib.Path(__file__).parents[1] / "golden_codecs.txt"
CASES = 150
NAMES = ["float32", "float16", "bfloat16"]
u64 = np.uint64


def drawn(seed, count):
    """Returns splitmix64 of seed * 2^32 + i."""
    with np.errstate(over="ignore"):
        z = (u64(seed) << u64(32)) + np.arange(count, dtype=u64) + u64(0x9E3779B97F4A7C15)
        z = (z ^ z >> u64(30)) * u64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> u64(27)) * u64(0x94D049BB133111EB)
        return z ^ z >> u64(31)


def elements(seed, count, dtype, wild):
    """Returns patterns of a dtype: numbers between 2^-8 and 2^8; if wild, some of them special."""
    width, mantissa = {"float32": (32, 23), "float16": (16, 10), "bfloat16": (16, 7)}[dtype]
    z, sign = drawn(seed, count), 1 << (width - 1)
    infinity = sign - (1 << mantissa)
    first = (1 << (width - 2 - mantissa)) - 9
    bits = (z & u64(1)) << u64(width - 1) | ((z >> u64(1) & u64(15)) + u64(first)) << u64(mantissa) | z >> u64(8) & u64((1 << mantissa) - 1)
    if wild:
        special = [0, sign, 1, infinity, sign | infinity, infinity | 1 << (mantissa - 1), infinity - 1, infinity - (1 << mantissa)]
        bits = np.where((z >> u64(40)) % u64(97) == 0, np.array(special, u64)[z >> u64(50) & u64(7)], bits)
    return bits.astype(np.uint32 if width == 32 else np.uint16).view(HOST_DTYPES[dtype])


def digest(*arrays):
    """Returns the sum of all bytes, each plus one and times an odd number of its own."""
    data = np.frombuffer(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays), np.uint8)
    with np.errstate(over="ignore"):
        return f"{int(((data.astype(u64) + u64(1)) * (drawn(0, data.size) | u64(1))).sum(dtype=u64)):016x}"


def bits_of(x):
    return int(np.float32(x).view(np.uint32))


def flipped(chunk, flip):
    if flip:
        chunk[flip[0]] ^= 1 << flip[1]


def word_of(flip):
    return flip and f"{flip[0]}:{flip[1]}"


class Script:
    """A case as it is run; `lines` has its lines of the file."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        codec = seed % 7 + 1
        make = codecs_c.random_block_options if codec in FORMATS else codecs_c.random_options
        options = make(rng, 2500) | {"codec": codec}
        options["n_chunks"], options["segments"] = min(options["n_chunks"], 9), [n % 3000 for n in options["segments"]]
        if seed < 7:  # enough for several threads
            options["segments"], options["raw" if codec in FORMATS else "scale"] = [700_037, 5], [0, 1] if codec in FORMATS else 0
        elif codec in FORMATS and options["raw"]:
            options["raw"] = options["raw"][: len(options["segments"])]
        options["server"] = int(rng.integers(0, options["n_chunks"])) if rng.random() < 0.8 else None
        if codec == SIGN:
            options["error"], options["reduction"] = None, 0
        self.rng, self.options, self.lines, self.payloads = rng, options, [], []
        with Checked(Host(), **options) as self.codec:
            self.model = self.codec.model
            self.run()

    def flip(self, size, chance):
        return (int(self.rng.integers(0, size)), int(self.rng.integers(0, 8))) if self.rng.random() < chance else None

    def run(self):
        model = self.model
        is_block = model.codec in FORMATS
        words = (
            model.codec, NAMES.index(model.values), NAMES.index(model.results), codecs_c.ERRORS[model.error],
            0 if is_block else model.scale, model.reduction, model.nonfinite, bits_of(model.beta), model.n_chunks,
            0 if model.server is None else model.server + 1, ",".join(map(str, model.segments)) or "-",
            ",".join(str(int(raw)) for raw in model.raw) if is_block and any(model.raw) else "-",
            "-" if model.server is None else model.errors(1).size,
        )  # fmt: skip
        self.lines.append(" ".join(map(str, ("case", *words))))
        for number in range(3):
            words, results = self.step(number)
            self.lines.append(" ".join("-" if word is None else str(word) for word in ("step", *words, "=", *results)))

    def step(self, number):
        """Runs a step; returns its words and those of its results."""
        rng, model, codec = self.rng, self.model, self.codec
        seed, wild = int(rng.integers(1, 2**31)), int(rng.random() < 0.4)
        gradients = [elements(seed + k, n, model.values, wild) for k, n in enumerate(model.segments)]
        factors = [[None, 0.5, 3.0][rng.integers(0, 3)] for _ in "ge"]
        self.payloads.insert(0, codec.encode(gradients, *factors))

        dtype, add = NAMES[rng.integers(0, 3)], rng.random() < 0.3
        dtype, sent, flip = "float32" if add else dtype, self.payloads[0].copy(), self.flip(64, 0.2)
        flipped(sent[-1], flip)
        divisor, factor = int(rng.integers(1, 5)), [None, 0.25][rng.integers(0, 2)]
        before = model.flags
        old = [elements(seed + 1000 + k, n, dtype, False) for k, n in enumerate(model.segments)]
        decoded, values = codec.decode_onto(sent, old, dtype, divisor, factor, add)
        assert decoded == Status.OK or model.flags != before or before & 1
        words = [seed, wild, *factors, NAMES.index(dtype), divisor, factor, int(add), word_of(flip)]

        count = flip = None
        status, results = Status.OK, values
        if model.server is not None:
            count, flip = int(rng.integers(1, 12)), self.flip(64, 0.2)
            chunks = np.stack([self.payloads[k % len(self.payloads)][model.server] for k in range(count)])
            flipped(chunks[-1], flip)
            status = Status.CORRUPT if any(model.is_corrupt(chunk, model.server) for chunk in chunks) else Status.OK
            results = [*values, codec.reduce(chunks)]
        words += [count, word_of(flip), *self.end_of(number)]
        return words, [int(decoded), int(status), digest(self.payloads[0]), digest(*results), digest(*self.kept())]

    def end_of(self, number):
        rng, model, codec = self.rng, self.model, self.codec
        end = reset = seed = None
        if model.nonfinite == TRANSACTIONAL:
            skip = int(rng.integers(0, 2))
            if rng.random() < 0.2:
                codec.rollback()
                end = "rollback"
            else:
                codec.commit(np.array([skip], np.int32))
                end = f"commit{skip}"
        if number == 1 and rng.random() < 0.2:
            codec.reset()
            reset = "reset"
        if model.error and rng.random() < 0.3:
            seed = int(rng.integers(1, 2**31))
            codec.errors_in(*(elements(seed + k, model.errors(k).size, "float32", True) if k == 0 or model.server is not None
                              else None for k in (0, 1)))  # fmt: skip
        return end, reset, seed

    def kept(self):
        """Returns flags, state and errors."""
        model, codec = self.model, self.codec
        flags, state = np.array([codec.flags()], np.uint32), codec.state()
        codec.errors()
        return flags, state, *(model.errors(k).astype(np.float32) for k in ((0, 1) if model.server is not None else (0,)))


def text(cases=range(CASES)):
    return "".join(line + "\n" for seed in cases for line in Script(seed).lines)


if __name__ == "__main__":
    PATH.write_text(text())
    print(f"{PATH}: {CASES} cases")
    sys.exit()
