"""Bits, copies and codecs on the CPU: beside plain loops, memcpy and NumPy, or beside another build of the library.

    python3 bench/cpu.py --library target/release/libgradcodec.so.0 [--against OLD.so] [--only PREFIX] [--quick]

All contenders of a row take turns, so that a machine that slows down slows down all of them; memory is warm. With
`--against` only the two builds take turns, on one thread and on two; every row's results must be the same bytes, and
the program prints the speed of the new build over the old one and the rows below 0.90. `make bench` runs it and
writes build/bench/cpu.json. `loop` reads the elements (packing) or writes them (unpacking); `memcpy` copies as many
bytes.
"""

import math
import random
import time
from ctypes import byref

import numpy as np
import works
from common import CPU, DTYPES, Library, about, parser, print_ratios, print_rows, save, significant

SIZES, QUICK_SIZES = [2**k for k in range(10, 29, 2)], [2**12, 2**20, 2**24]
SHAPES = [(side, side) for side in (256, 257, 1024, 1001, 4096, 4001)]
QUICK_SHAPES = [(257, 257), (1024, 1024)]
SIDES, QUICK_SIDES = [64, 1024, 4096], [64, 1024]
CODEC_SIZES, QUICK_CODEC_SIZES = [2**k for k in (12, 16, 20, 24, 26)], [2**16, 2**20]

READ, WRITE, COPY = range(3)  # as in bench/calls.c
SAMPLE_SECONDS = 200e-6  # a sample is a batch of calls that takes at least this long, or one call
FEWEST, MOST = 7, 101  # rounds, independent of the time left


class Place(works.Place):
    np, name, device_type = np, "numpy", CPU

    @staticmethod
    def empty(shape, dtype):
        """Returns an array that begins at a cache line, its pages mapped."""
        dtype = np.dtype(DTYPES[dtype][2])
        size = math.prod(shape) * dtype.itemsize
        memory = np.zeros(size + 64, np.uint8)
        memory[::4096] = 0
        first = -memory.ctypes.data % 64
        return memory[first : first + size].view(dtype).reshape(shape)


def of_python(function):
    """Returns a timer of a Python function. NumPy's result is allocated in the call, as its users have it."""

    def sample(calls):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return time.perf_counter() - start

    return sample


def of_call(place, library, call, threads):
    def sample(calls):
        library.set_threads(threads)
        seconds = place.timer.call_seconds(calls, byref(call))
        if seconds < 0:
            raise RuntimeError(library.last_error())
        return seconds

    return sample


def measure(contenders, budget):
    """Returns the seconds a call of every sample. The contenders take turns, in an order that changes in each round. A
    sample of one call comes after an untimed one: the previous contender's cache contents made equal builds differ."""
    order, turns = list(contenders.items()), random.Random(1)
    batches, samples = {}, {name: [] for name in contenders}
    for name, sample in order:
        calls = 1
        sample(1)
        while (taken := sample(calls)) < SAMPLE_SECONDS:
            calls = max(2 * calls, min(64 * calls, int(calls * SAMPLE_SECONDS / max(taken, 1e-9))))
        batches[name] = calls
    end = time.monotonic() + budget
    for done in range(MOST):
        if done >= FEWEST and time.monotonic() > end:
            break
        turns.shuffle(order)
        for name, sample in order:
            samples[name].append(significant(sample(batches[name]) / batches[name]))
    return samples


def measured(place, work, libraries, budget):
    one = work.make()
    try:
        calls = {library: one.call(library) for library in libraries}
        works.same_bytes(place, one, calls, f"{work.kind}, {work.case}")
        contenders = {}
        for library, which in zip(libraries, ("", ", old")):
            for threads in 1, 2:
                name = ("new" if len(libraries) > 1 else "ours") + (" x2" if threads > 1 else "")
                contenders[name + which] = of_call(place, library, calls[library], threads)
        if len(libraries) == 1:
            contenders |= {name: of_python(peer) for name, peer in one.peers.items()} | loops(place, work)
        return {**work._asdict(), "make": None, "seconds": measure(contenders, budget)}
    finally:
        one.close()


def loops(place, work):
    """Returns a loop that reads or writes as many bytes, or a copy of half as many."""
    copies = work.group in ("copies", "codecs")
    size = max(256, work.bytes // (2 if copies else 1) // 256 * 256)
    to = place.empty((size,), "uint8")
    of = place.empty((size,), "uint8") if copies else to
    loop = COPY if copies else WRITE if "unpack" in work.kind else READ
    run = place.timer.loop_seconds  # the function below keeps the memory
    return {"memcpy" if copies else "loop": lambda calls: run(calls, loop, to.ctypes.data, of.ctypes.data, size)}


def main():
    options = parser(__doc__, "cpu.json", "against", "only").parse_args()
    libraries = [Library(path) for path in (options.library, options.against) if path]
    place, quick = Place(libraries), options.quick
    budget = (0.05 if quick else 0.5) if options.against else (0.1 if quick else 1)
    rows = [
        *works.bits(place, QUICK_SIZES if quick else SIZES),
        *works.layouts(place, QUICK_SHAPES if quick else SHAPES),
        *works.copies(place, QUICK_SIDES if quick else SIDES),
        *works.codecs(place, QUICK_CODEC_SIZES if quick else CODEC_SIZES),
    ]
    results = {"about": about(libraries, of="cpu", numpy=np.__version__, quick=quick), "rows": []}
    for work in rows:
        if f"{work.group} {work.kind}".startswith(options.only):
            results["rows"].append(measured(place, work, libraries, budget))
            save(options.output, results)
    print(results["about"])
    (print_ratios if options.against else print_rows)(results["rows"])
    print(f"\n{options.output}")


if __name__ == "__main__":
    main()
