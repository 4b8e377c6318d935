"""How fast the CPU packs and unpacks: every size and layout beside a plain loop over the same memory and beside NumPy.

All contenders take turns in one run, so that a machine that slows down slows down all of them. bench/bits.c does the
timing, `make bench` builds it. The samples go to a JSON file, of which bench/report.py makes tables and a plot.
"""

import argparse
import ctypes
import datetime
import functools
import itertools
import json
import math
import os
import pathlib
import platform
import random
import re
import subprocess
import time
from ctypes import c_double, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p

import numpy as np

import report

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZES = [2**k for k in range(10, 29, 2)]
SIDES = [256, 257, 1024, 1001, 4096, 4001]

# A sample is a batch of calls that takes at least this long, or one call.
SAMPLE_SECONDS = 200e-6
# Rounds end when the time for a row is spent, but not before and not after so many.
FEWEST, MOST = 5, 101


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
BFLOAT16 = 4


def describe(array, code=None):
    """A NumPy array as the library sees it."""
    dims = c_int64 * array.ndim
    strides = dims(*(stride // array.itemsize for stride in array.strides))
    code = CODES[array.dtype.kind] if code is None else code
    return DLTensor(array.ctypes.data, 1, 0, array.ndim, code, 8 * array.itemsize, 1, dims(*array.shape), strides, 0)


def empty(shape, dtype=np.bool_):
    """An array that begins at a cache line, its pages there."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.full(size + 64, 0, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size].view(dtype).reshape(shape)


def packed_rows(elements):
    return empty((1, -(-elements // 8)), np.uint8)


class Library:
    """A build of the library, which bench/library.h loads."""

    def __init__(self, timer, path):
        self.timer, self.path = timer, path
        self.functions = ctypes.CDLL(path)
        self.functions.gc_version_string.restype = ctypes.c_char_p
        timer.load_library.restype, timer.last_error.restype = c_void_p, ctypes.c_char_p
        self.handle = c_void_p(timer.load_library(str(path).encode()))
        assert self.handle, f"{path}: not a library that can be timed"

    def last_error(self):
        return self.timer.last_error(self.handle).decode()


class Bench:
    """The functions of bench/bits.c as functions of the number of calls, which return seconds."""

    def __init__(self, path, library, against):
        self.timer = ctypes.CDLL(path)
        self.library = Library(self.timer, library)
        self.against = against and Library(self.timer, against)

    def loop(self, name, array):
        """`read_loop` or `write_loop` over a contiguous array."""
        return lambda calls: self.seconds(name, calls, c_void_p(array.ctypes.data), c_int64(array.nbytes))

    def ours(self, threads, name, src, dst, *axis, code=None):
        """One of the others, from an array to an array; `code`: of a dtype that NumPy lacks. Its attribute `against` is
        the same with the other library, if there is one."""
        arrays = [(src, describe(src, code)), (dst, describe(dst))]

        def of(library):
            def sample(calls):
                self.timer.set_threads(library.handle, threads)
                tensors = [ctypes.byref(tensor) for _, tensor in arrays]
                try:
                    return self.seconds(name, calls, library.handle, *tensors, *map(c_int32, axis))
                except RuntimeError as error:
                    raise RuntimeError(f"{error}: {library.last_error()}") from None

            return sample

        sample = of(self.library)
        sample.against = self.against and of(self.against)
        return sample

    def seconds(self, name, calls, *arguments):
        function = getattr(self.timer, name)
        function.restype = c_double
        seconds = function(c_int64(calls), *arguments)
        if seconds < 0:
            raise RuntimeError(name)
        return seconds


def numpy_calls(function):
    """The same for a call of NumPy, whose result is allocated in it, as its users have it."""

    def sample(calls):
        function()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return time.perf_counter() - start

    return sample


def measure(contenders, budget, least=SAMPLE_SECONDS):
    """Seconds a call of every sample, each of which takes at least `least`. The contenders take turns, in an order that
    changes from round to round. A sample of one call comes after another: what the contender before left in the caches,
    or in those of other cores, made one of two equal libraries 1.8 times as fast."""
    order, turns = list(contenders.items()), random.Random(1)
    batches, samples = {}, {name: [] for name in contenders}
    for name, sample in contenders.items():
        calls = 1
        while (taken := sample(calls)) < least:
            calls = max(2 * calls, min(64 * calls, int(calls * least / taken)))
        batches[name] = calls
    end = time.monotonic() + budget
    for done in range(MOST):
        if done >= FEWEST and time.monotonic() > end:
            break
        turns.shuffle(order)
        for name, sample in order:
            if batches[name] == 1:
                sample(1)
            samples[name].append(float(f"{sample(batches[name]) / batches[name]:.5g}"))
    return samples


def random_bools(shape):
    array = empty(shape)
    array[...] = np.random.default_rng(1).integers(0, 2, shape, np.uint8)
    return array


def random_floats(elements):
    array = empty((elements,), np.float32)
    np.random.default_rng(1).standard_normal(dtype=np.float32, out=array)
    return array


def random_bytes(shape):
    array = empty(shape, np.uint8)
    array[...] = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    return array


def sized(bench):
    """Kinds of work by name: of a number of elements each makes the elements, what is written, and the contenders."""

    def pack(function, src, numpy=None, code=None):
        dst = packed_rows(src.size)
        return src, dst, numpy, {
            "read": bench.loop("read_loop", src),
            "ours": bench.ours(1, function, src, dst, code=code),
            "ours x2": bench.ours(2, function, src, dst, code=code),
        }  # fmt: skip

    def unpack(elements, dtype, numpy):
        src, dst = random_bytes((1, elements // 8)), empty((elements,), dtype)
        return dst, dst, lambda: numpy(src), {
            "write": bench.loop("write_loop", dst),
            "ours": bench.ours(1, "unpack_chunks", src, dst),
            "ours x2": bench.ours(2, "unpack_chunks", src, dst),
        }  # fmt: skip

    def pack_bool(elements):
        src = random_bools((elements,))
        return pack("pack_chunks", src, lambda: np.packbits(src))

    def pack_int32(elements):
        src = empty((elements,), np.int32)
        src[:] = random_bools((elements,))
        return pack("pack_chunks", src, lambda: np.packbits(src))

    def signs_float32(elements):
        src = random_floats(elements)
        return pack("pack_signs", src, lambda: np.packbits(~(src < 0)))

    def signs_bfloat16(elements):
        src = empty((elements,), np.uint16)
        src[:] = random_floats(elements).view(np.uint16)[1::2]
        return pack("pack_signs", src, code=BFLOAT16)

    return {
        "pack bool": pack_bool,
        "pack int32": pack_int32,
        "signs float32": signs_float32,
        "signs bfloat16": signs_bfloat16,
        "unpack bool": lambda elements: unpack(elements, np.bool_, np.unpackbits),
        "unpack float32": lambda elements: unpack(
            elements, np.float32, lambda src: np.unpackbits(src).astype(np.float32)
        ),
    }


# Layouts of a square of bools: a view of it inside memory of some other shape, and the bytes of memory that each of its
# elements takes up (a cache line is read or written whole).
LAYOUTS = {
    "every other element": (lambda side: (2 * side * side,), lambda memory, side: memory[::2], 2),
    "reversed": (lambda side: (side * side,), lambda memory, side: memory[::-1], 1),
    "transposed": (lambda side: (side, side), lambda memory, side: memory.T, 1),
    "rows of a wider matrix": (lambda side: (side, side + 64), lambda memory, side: memory[:, :side], 1),
    "contiguous, 16 bytes past a cache line": (lambda side: (side * side + 16,), lambda memory, side: memory[16:], 1),
}


def strided(bench):
    """Layouts by name: the bytes that an element touches, and what makes the same of the side of a square."""

    def pack_layout(layout, side):
        memory, view, _ = LAYOUTS[layout]
        src = view(random_bools(memory(side)), side)
        return "pack_chunks", src, packed_rows(side * side), (), lambda: np.packbits(src)

    def unpack_layout(layout, side):
        memory, view, _ = LAYOUTS[layout]
        dst = view(empty(memory(side)), side)
        src = random_bytes((1, -(-side * side // 8)))
        unpacked = functools.partial(np.unpackbits, src, count=side * side)
        return "unpack_chunks", src, dst, (), lambda: np.copyto(dst, unpacked().view(np.bool_).reshape(dst.shape))

    def pack_axis(axis, side):
        src, packed = random_bools((side, side)), -(-side // 8)
        dst = empty((packed, side) if axis == 0 else (side, packed), np.uint8)
        return "pack_bits", src, dst, (axis,), lambda: np.packbits(src, axis=axis)

    def unpack_axis(axis, side):
        packed = -(-side // 8)
        src = random_bytes((packed, side) if axis == 0 else (side, packed))
        dst = empty((side, side), np.uint8)
        return "unpack_bits", src, dst, (axis,), lambda: np.unpackbits(src, axis=axis, count=side)

    def contenders(make, argument, side):
        name, src, dst, axis, numpy = make(argument, side)
        unpacks = name.startswith("unpack")
        flat = empty((side * side,))
        if unpacks:
            fast = bench.ours(1, "unpack_chunks", random_bytes((1, -(-flat.size // 8))), flat)
        else:
            flat[:] = src.reshape(-1)
            fast = bench.ours(1, "pack_chunks", flat, packed_rows(flat.size))
        return dst if unpacks else src, dst, numpy, {
            "fast path": fast,
            "ours": bench.ours(1, name, src, dst, *axis),
            "ours x2": bench.ours(2, name, src, dst, *axis),
        }  # fmt: skip

    kinds = {}
    for verb, preposition, layouts, along in (
        ("pack", "from", pack_layout, pack_axis),
        ("unpack", "to", unpack_layout, unpack_axis),
    ):
        for layout, (_, _, touched) in LAYOUTS.items():
            kinds[f"{verb} {preposition} {layout}"] = touched, functools.partial(contenders, layouts, layout)
        for axis in 0, 1:
            kinds[f"{verb} along axis {axis}"] = 1, functools.partial(contenders, along, axis)
    return kinds


def row(kind, make, argument, budget, least=SAMPLE_SECONDS, **more):
    """A row of the results; what is timed is compared with NumPy first, which returns it or writes it to `dst`."""
    elements, dst, numpy, contenders = make(argument)
    if numpy is not None:
        contenders["ours"](1)
        ours = dst.copy()
        expected = numpy()
        expected = dst if expected is None else expected
        assert np.array_equal(ours.reshape(expected.shape), expected), f"{kind}, {argument}: not what NumPy gives"
        del ours, expected
        contenders["numpy"] = numpy_calls(numpy)
    if contenders["ours"].against:
        contenders["against"] = contenders["ours"].against
    return {
        "kind": kind,
        "elements": elements.size,
        "bytes": elements.size * elements.itemsize,
        **more,
        "seconds": measure(contenders, budget, least),
    }


# The narrow grid: (outer, middle, inner) elements in one piece, packed and unpacked along each axis.
INNER = range(1, 18)
MIDDLE = [8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64]
NARROW_ELEMENTS = [2**18, 2**12]
# Rows of so many elements, flattened: of so many rows of so many, the shape of the memory and the view of it.
RUNS = range(2, 18)
NARROW_ROWS = {
    "wider rows": (lambda rows, run: (rows, run + 1), lambda memory, run: memory[:, :run]),
    "far wider rows": (lambda rows, run: (rows, run + 64), lambda memory, run: memory[:, :run]),
    "every other row": (lambda rows, run: (2 * rows, run), lambda memory, run: memory[::2]),
    "rows backwards": (lambda rows, run: (rows, run), lambda memory, run: memory[:, ::-1]),
    "every other element": (lambda rows, run: (rows, 2 * run + 1), lambda memory, run: memory[:, : 2 * run : 2]),
    "rows of planes": (lambda rows, run: (rows // 8, 9, run + 1), lambda memory, run: memory[:, :8, :run]),
    "columns": (lambda rows, run: (run, rows), lambda memory, run: memory.T),
    "columns of planes": (lambda rows, run: (rows // 8, run, 8), lambda memory, run: memory.transpose(0, 2, 1)),
}


def narrow(bench, quick):
    """Points of the grid: every one, or a few that no step of the lists leaves out."""

    def contenders(kind, shape, axis):
        verb, dtype = kind.split()
        counts = list(shape)
        counts[axis] = -(-counts[axis] // 8)
        if verb == "pack":
            src, dst = empty(shape, dtype), empty(counts, np.uint8)
            src[...] = random_bools(shape)
            numpy = functools.partial(np.packbits, src, axis=axis)
        else:
            src, dst = random_bytes(tuple(counts)), empty(shape, dtype)
            numpy = functools.partial(np.unpackbits, src, axis=axis, count=shape[axis])
        return src if verb == "pack" else dst, dst, numpy, {"ours": bench.ours(1, f"{verb}_bits", src, dst, axis)}

    def flattened(kind, rows, run, where):
        verb, dtype = kind.split()
        shape, view = NARROW_ROWS[where]
        memory = empty(shape(rows, run), dtype)
        elements = view(memory, run)
        packed = random_bytes((1, -(-elements.size // 8)))
        if verb == "pack":
            memory[...] = random_bools(memory.shape)
            src, dst, numpy = elements, packed, functools.partial(np.packbits, elements)
        else:
            unpacked = functools.partial(np.unpackbits, packed, count=elements.size)
            src, dst = packed, elements
            numpy = lambda: np.copyto(elements, unpacked().reshape(elements.shape), casting="unsafe")  # noqa: E731
        return elements, dst, numpy, {"ours": bench.ours(1, f"{verb}_chunks", src, dst)}

    points = []
    for kind in "pack bool", "pack uint8", "pack int32", "unpack uint8":
        for elements, inner, middle, axis in itertools.product(NARROW_ELEMENTS, INNER, MIDDLE, range(3)):
            shape = (max(1, elements // (middle * inner)), middle, inner)
            make = functools.partial(contenders, kind, shape, axis)
            points.append((f"narrow {kind}", make, {"shape": shape, "axis": axis}))
    for kind in "pack bool", "pack uint8", "pack int32", "unpack bool", "unpack uint8", "unpack int32":
        for elements, run, where in itertools.product(NARROW_ELEMENTS, RUNS, NARROW_ROWS):
            rows = elements // run // 8 * 8
            make = functools.partial(flattened, kind, rows, run, where)
            points.append((f"flattened {kind}", make, {"shape": (rows, run), "of": where}))
    return points[::11] if quick else points


def narrow_row(kind, make, more):
    """A row of the narrow grid: some ms, and more where it seems slower than NumPy."""
    found = row(kind, lambda _: make(), None, 0, least=50e-6, **more)
    if report.times_numpy(found) > report.MOST_TIMES_NUMPY:
        found = row(kind, lambda _: make(), None, 0.05, **more)
    return found


def commit():
    """The commit that this was built of: as `make dist` wrote it down, or that of the work tree."""
    written = ROOT / "COMMIT"
    if written.exists():
        return written.read_text().strip() or None
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:
        return None


def processor():
    """What the first one says of itself."""
    info = pathlib.Path("/proc/cpuinfo").read_text()
    return dict(re.findall(r"^(\S[^\t]*)\t*: (.*)$", info.split("\n\n")[0], re.MULTILINE))


def paths_of(flags):
    """What GRADCODEC_CPU can name, the best first."""
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        return ["avx512", "avx2", "portable"]
    return ["avx2", "portable"] if "avx2" in flags else ["portable"]


def about(bench):
    """What the figures hold for."""
    first = processor()
    flags = set(first.get("flags", "").split())
    paths = paths_of(flags)
    wanted = os.environ.get("GRADCODEC_CPU")
    caches = [
        [(folder / name).read_text().strip() for name in ("level", "type", "size")]
        for folder in sorted(pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    ]
    return {
        "processor": first.get("model name", platform.machine()),
        "family": first.get("cpu family"),
        "model": first.get("model"),
        "flags": sorted(flag for flag in flags if flag.startswith(("avx2", "avx512"))),
        "caches": {f"L{level}{kind[0].lower()}": size for level, kind, size in caches if kind != "Instruction"},
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "library": bench.library.functions.gc_version_string().decode(),
        "path": wanted if wanted in paths else paths[0],
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def arguments(text, name):
    options = argparse.ArgumentParser(description=text.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="fewer rounds: a minute in all")
    options.add_argument("--only", metavar="KIND", default="", help="kinds whose names begin so")
    options.add_argument("--output", metavar="FILE", type=pathlib.Path, default=ROOT / "build/bench" / name)
    options.add_argument("--bits", metavar="FILE", default=ROOT / "build/bench/bits.so", help="bench/bits.c, built")
    options.add_argument("--library", metavar="FILE", required=True, help="libgradcodec.so, to be timed")
    options.add_argument("--against", metavar="FILE", help="another build of it, to be timed in turns with the first")
    return options.parse_args()


def main():
    options = arguments(__doc__, "cpu.json")
    bench = Bench(options.bits, options.library, options.against)
    results = {"about": {**about(bench), "quick": options.quick}, "sizes": [], "layouts": [], "narrow": []}
    for kind, make in sized(bench).items():
        for elements in SIZES if kind.startswith(options.only) else []:
            budget = 0.1 if options.quick else 2
            results["sizes"].append(row(kind, make, elements, budget))
    for kind, (touched, make) in strided(bench).items():
        for side in SIDES if kind.startswith(options.only) else []:
            budget = 0.04 if options.quick else 0.5
            results["layouts"].append(row(kind, make, side, budget, side=side, touched=touched))
    for kind, *point in narrow(bench, options.quick):
        if kind.startswith(options.only):
            results["narrow"].append(narrow_row(kind, *point))

    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results) + "\n")
    print(report.tables(results))
    print(report.targets() or "")
    if options.against:
        print(report.against(results))


if __name__ == "__main__":
    main()
