"""How fast the CPU copies and casts: layouts and dtypes beside memcpy over as many bytes and beside NumPy.

All contenders take turns in one run, as in bench/cpu.py; bench/bits.c does the timing, `make bench-copy` builds and runs
it. The samples go to a JSON file, of which bench/report.py makes a table.
"""

import json

import numpy as np

import cpu
import report

SIDES = [64, 256, 1024, 4096]
QUICK_SIDES = [64, 1024]


def values(shape, dtype):
    """Numbers that every dtype has; bool is 0 and 1."""
    array = cpu.empty(shape, dtype)
    array[...] = np.random.default_rng(1).integers(0, 2 if array.dtype == bool else 100, shape, np.uint8)
    return array


# A square of so many elements on a side: the memory that it lies in, and the view of it.
LAYOUTS = {
    "contiguous": (lambda n: (n, n), lambda memory: memory),
    "rows of a wider matrix": (lambda n: (n, n + 16), lambda memory: memory[:, :-16]),
    "transposed": (lambda n: (n, n), lambda memory: memory.T),
    "transposed, odd rows": (lambda n: (n, n + 1), lambda memory: memory[:, :-1].T),
    "every other element": (lambda n: (n, 2 * n), lambda memory: memory[:, ::2]),
    "every third element": (lambda n: (n, 3 * n), lambda memory: memory[:, ::3]),
    "reversed": (lambda n: (n, n), lambda memory: memory[::-1, ::-1]),
    "one row": (lambda n: (1, n), lambda memory: memory),
    "one column": (lambda n: (n, 1), lambda memory: memory),
    "channels last": (lambda n: (n * n // 4, 4), lambda memory: memory.T),
}
# Of which dtypes, from which layout and to which.
KINDS = [
    *((f"contiguous {name}", (name, name), "contiguous", "contiguous") for name in ("uint8", "float32")),
    *(
        (f"{layout}, {name}", (name, name), layout, "contiguous")
        for layout in list(LAYOUTS)[1:]
        for name in ("uint8", "int16", "float32", "float64")
    ),
    ("to transposed, float32", ("float32", "float32"), "contiguous", "transposed"),
    ("to every other element, float32", ("float32", "float32"), "contiguous", "every other element"),
    *(
        (f"cast {source} to {target}", (source, target), "contiguous", "contiguous")
        for source, target in [
            ("float32", "float16"), ("float16", "float32"), ("float32", "float64"), ("float64", "float32"),
            ("float64", "float16"), ("float32", "int32"), ("float32", "uint8"), ("float32", "int64"),
            ("float64", "int64"), ("int32", "float32"), ("uint8", "float32"), ("int64", "float32"),
            ("int64", "float64"), ("int64", "int32"), ("uint8", "int64"), ("bool", "float32"), ("float32", "bool"),
            ("uint64", "float32"), ("float32", "uint64"), ("int64", "float16"), ("int16", "int8"),
        ]
    ),
    ("cast float32 to float16, transposed", ("float32", "float16"), "transposed", "contiguous"),
    ("cast uint8 to float32, channels last", ("uint8", "float32"), "channels last", "contiguous"),
    ("cast int64 to float32, every other element", ("int64", "float32"), "every other element", "contiguous"),
    ("cast float32 to int32, every third element", ("float32", "int32"), "every third element", "contiguous"),
]  # fmt: skip
BFLOAT16_KINDS = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "bfloat16"), ("int64", "bfloat16")]


def timed(bench, threads, src, dst, codes=(None, None)):
    described = cpu.describe(src, codes[0]), cpu.describe(dst, codes[1])

    def of(library):
        def sample(calls):
            bench.timer.set_threads(library.handle, threads)
            try:
                return bench.seconds("copy_into", calls, library.handle, *map(cpu.ctypes.byref, described))
            except RuntimeError as error:
                raise RuntimeError(f"{error}: {library.last_error()}") from None

        return sample

    sample = of(bench.library)
    sample.against = bench.against and of(bench.against)
    return sample


def contenders(bench, src, dst, codes=(None, None)):
    moved = src.nbytes + dst.nbytes if 0 not in src.strides else dst.nbytes
    half = moved // 2 // 64 * 64
    blocks = cpu.empty((half,), np.uint8), cpu.empty((half,), np.uint8)
    pointers = [cpu.c_void_p(block.ctypes.data) for block in blocks]
    ours = timed(bench, 1, src, dst, codes)
    found = {
        "ours": ours,
        "ours x2": timed(bench, 2, src, dst, codes),
        "memcpy": lambda calls, _keep=blocks: bench.seconds("memcpy_loop", calls, *pointers, cpu.c_int64(half)),
    }
    if ours.against:
        found["against"] = ours.against
    return moved, found


def row(bench, kind, dtypes, of_source, to, side, budget):
    def view(layout, dtype):
        shape, of = LAYOUTS[layout]
        return of(values(shape(side), dtype))

    src, dst = view(of_source, dtypes[0]), view(to, dtypes[1])
    if of_source == "channels last":
        dst = cpu.empty(src.shape, dtypes[1])
    elif of_source in ("one row", "one column"):
        src = np.broadcast_to(src, dst.shape)
    moved, found = contenders(bench, src, dst)
    numpy = lambda: np.copyto(dst, src, casting="unsafe")  # noqa: E731
    found["ours"](1)
    result = dst.copy()
    dst[...] = 0
    numpy()
    assert np.array_equal(result, dst), f"{kind}, {side}: not what NumPy gives"
    found["numpy"] = cpu.numpy_calls(numpy)
    return {"kind": kind, "elements": dst.size, "bytes": moved, "seconds": cpu.measure(found, budget)}


def bfloat16_row(bench, source, target, side, budget):
    """NumPy has no such dtype: memcpy stands beside."""
    arrays = [values((side * side,), "uint16" if name == "bfloat16" else name) for name in (source, target)]
    codes = [cpu.BFLOAT16 if name == "bfloat16" else None for name in (source, target)]
    moved, found = contenders(bench, *arrays, codes)
    return {"kind": f"cast {source} to {target}", "elements": side * side, "bytes": moved, "seconds": cpu.measure(found, budget)}


def main():
    options = cpu.arguments(__doc__, "cpu_copy.json")
    bench = cpu.Bench(options.bits, options.library, options.against)
    results = {"about": {**cpu.about(bench), "of": "copies", "quick": options.quick}, "sizes": []}
    budget = 0.05 if options.quick else 0.5
    for side in QUICK_SIDES if options.quick else SIDES:
        for kind, *of in KINDS:
            if kind.startswith(options.only):
                results["sizes"].append(row(bench, kind, *of, side, budget))
        for source, target in BFLOAT16_KINDS:
            if f"cast {source} to {target}".startswith(options.only):
                results["sizes"].append(bfloat16_row(bench, source, target, side, budget))
    results["sizes"].sort(key=lambda found: found["kind"])  # stable: sizes stay in order
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results) + "\n")
    print(report.cpu_copy_tables(results))
    print(report.targets() or "")
    if options.against:
        print(report.against(results))


if __name__ == "__main__":
    main()
