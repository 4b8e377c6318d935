"""Bits, copies, codecs and compiled kernels on one GPU: beside a copy, CuPy and torch, or beside another build.

    python3 bench/gpu.py --library target/release/libgradcodec.so.0 [--against OLD.so] [--only PREFIX] [--quick]

The yardstick is cuMemcpyDtoDAsync of 4 GiB, bytes read and written, measured before every row. All contenders take
turns. Every call of a sample has memory of its own and the cache is flushed before, so that nothing comes from the
cache; the calls are enqueued behind a kernel that spins, so that the device has them all when it begins. With
`--against` only the two builds take turns; every row's results must be the same bytes, and the program prints the
speed of the new build over the old one and the rows below 0.90. Needs CuPy, torch for some columns. `make gpu-bench`
runs it and writes build/bench/gpu.json.
"""

import ctypes
import math
import statistics
import subprocess
import sys
import time
from ctypes import byref, c_double, c_size_t, c_uint64, c_void_p

import works
from common import (
    CUDA, DTYPES, Call, Library, about, arguments, c, described, medians, number, print_ratios, print_rows, save,
    significant, table, timer,
)  # fmt: skip

SIZES, QUICK_SIZES = [2**k for k in (10, 12, 16, 20, 24, 28, 30)], [2**12, 2**20, 2**26]
SHAPES, QUICK_SHAPES = [(2048, 2048), (12289, 6151), (16384, 16384)], [(2048, 2048)]
SIDES, QUICK_SIDES = [1024, 16383, 16384], [4096]
CODEC_SIZES, QUICK_CODEC_SIZES = [2**12, 2**16, 2**20, 2**24, 300 * 2**20], [2**16, 2**24]
KERNELS, QUICK_KERNELS = (2**28, 16384), (2**24, 4096)

YARDSTICK_BYTES = 4 << 30
ROTATED = 256 << 20  # bytes that a sample goes through before it touches memory again: four times an H200's L2
MOST_CALLS = 64  # in a sample; each codec of an encode has memory of its own
FEWEST, SAMPLES, BUDGET = 7, 21, 0.6  # rounds; a slow contender stops after so many seconds
PATIENCE = 1.0  # seconds: the longest wait until a copy is as fast as it was
HOST_CALLS = 2000

SOURCE = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}"""


class Place:
    name, device_type = "cupy", CUDA

    def __init__(self, libraries):
        import cupy as cp

        try:
            import torch
        except ImportError:
            torch = None
        self.np, self.torch, self.library, self.timer = cp, torch, libraries[0], timer()
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.queue = cp.cuda.Stream(non_blocking=True)
        self.queue.use()
        if torch:
            torch.cuda.set_stream(torch.cuda.ExternalStream(self.queue.ptr))
        self.stream = c_void_p(self.queue.ptr).value
        self.start, self.end = cp.cuda.Event(), cp.cuda.Event()
        self.scratch = cp.zeros(ROTATED // 8, cp.uint64)
        self.yardstick = [cp.ones(YARDSTICK_BYTES, cp.uint8) for _ in range(2)]
        self.copies, self.fastest = [], math.inf
        self.spin = cp.RawModule(code=SOURCE).get_function("spin")
        for library in libraries:
            library.check(library.functions.gc_prepare(c.DLDevice(CUDA, 0)))

    def tensor(self, array, dtype):
        return described(array, dtype, CUDA)

    def empty(self, shape, dtype):
        return self.np.empty(shape, DTYPES[dtype][2])

    def random(self, shape, dtype):
        """Random elements: a block of them, repeated."""
        cp, count = self.np, math.prod(shape)
        size = min(count, 2**26)
        if dtype == "bfloat16":
            block = (cp.random.standard_normal(size, dtype=cp.float32).view(cp.uint32) >> 16).astype(cp.uint16)
        elif dtype.startswith(("float", "complex")):
            block = cp.random.standard_normal(size, dtype=cp.float32).astype(DTYPES[dtype][2])
        else:
            block = cp.random.randint(0, 256 if dtype in ("uint8", "uint16") else 2, size, dtype=cp.int32).astype(
                DTYPES[dtype][2]
            )
        array = cp.empty(count, block.dtype)
        for first in range(0, count, size):
            array[first : first + size] = block[: count - first]
        return array.reshape(shape)

    def run(self, library, call):
        library.check(self.timer.run_calls(1, byref(call)))
        self.queue.synchronize()

    # What stands beside ours.

    def copy_peers(self, src, dst, source, target):
        if (
            not self.torch
            or any(stride < 0 for array in (src, dst) for stride in array.strides)
            or "uint16" in (source, target)
        ):
            return {}
        torch = self.torch

        def tensor(array, dtype):
            if dtype != "bfloat16":
                return torch.from_dlpack(array)
            return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)

        of, to = tensor(src, source), tensor(dst, target)
        return {"torch": lambda: to.copy_(of)}

    def codec_peers(self, values, what, n):
        """torch's cast to int8 codes with a scale for each block of 64."""
        torch = self.torch
        if (
            not torch
            or (what.codec, what.dtype, what.error, n) != ("int8", "float32", works.NO_ERRORS, 1)
            or values[0].size % 64
        ):
            return {}
        blocks = torch.from_dlpack(values[0]).view(-1, 64)

        def run():
            scale = blocks.abs().amax(1, keepdim=True) / 127
            return (blocks / scale).round_().to(torch.int8), scale

        return {"torch": run}

    def kernel_peer(self, texts, axes, given, results):
        cp = self.np
        make = cp.ElementwiseKernel if axes is None else cp.ReductionKernel
        kernel = make(*texts, "theirs", options=("--fmad=false",))  # as ours, unless asked for
        more = {} if axes is None else {"axis": axes[0]}
        return lambda: kernel(*given, *results, **more)

    # Time.

    def on_device(self, enqueue, nanoseconds):
        """Seconds between two events around what `enqueue` enqueues, all of which is there when the device begins."""
        self.scratch.sum()  # read, not written: what is left in the cache need not go back to memory
        self.spin((1,), (1,), (self.np.uint64(nanoseconds),))
        self.start.record(self.queue)
        enqueue()
        self.end.record(self.queue)
        self.end.synchronize()
        return self.np.cuda.get_elapsed_time(self.start, self.end) * 1e-3

    def copy(self):
        to, source = (c_uint64(memory.data.ptr) for memory in self.yardstick)
        assert self.driver.cuMemcpyDtoDAsync_v2(to, source, c_size_t(YARDSTICK_BYTES), c_void_p(self.stream)) == 0

    def settle(self):
        """Waits until a copy is as fast as it was: for some tenths of a second after memory was freed it is a sixth
        slower."""
        begin = time.perf_counter()
        while (seconds := self.on_device(self.copy, 100_000)) > 1.01 * self.fastest:
            if time.perf_counter() - begin > PATIENCE:
                break
        self.fastest = min(self.fastest, seconds)
        self.copies.append(significant(seconds))

    def measure(self, contenders, calls):
        """Seconds a call of every sample; the contenders take turns. A peer that fails is left out and recorded."""
        samples, spins, spent, failures = {}, {}, {}, {}
        for name, enqueue in contenders.items():
            try:
                enqueue()  # what is compiled and allocated once
                self.queue.synchronize()
                begin = time.perf_counter()
                enqueue()
                spins[name] = min(20e-3, 2 * (time.perf_counter() - begin) + 50e-6)
                self.queue.synchronize()
                samples[name], spent[name] = [], 0.0
            except Exception as error:
                if name.startswith(("ours", "new")):
                    raise
                failures[name] = f"{type(error).__name__}: {error}"[:120]
        self.settle()
        for done in range(SAMPLES):
            for name in samples if done % 2 else reversed(samples):
                if done >= FEWEST and spent[name] > BUDGET:
                    continue
                seconds = self.on_device(contenders[name], int(spins[name] * 1e9))
                spent[name] += seconds
                samples[name].append(significant(seconds / calls))
        return samples, failures


def same_bytes(place, ones, calls, what):
    """What the first calls of all libraries write is the same, and is what CuPy gives."""
    one, cp, found = ones[0], place.np, []
    for library, of_library in calls.items():
        for result in one.results:
            result[...] = 0
        place.run(library, of_library[0])
        found.append([result.copy() for result in one.results])
    expected = one.expected() if one.expected and one.results and one.results[0].size <= 2**26 else None
    if expected is not None:
        assert bool((found[0][0] == expected).all()), f"{what}: not what CuPy gives"
    for other in found[1:]:
        for mine, theirs in zip(found[0], other):
            same = cp.array_equal(mine.ravel().view("u1"), theirs.ravel().view("u1"))
            assert bool(same), f"{what}: the two builds give different bytes"


def measured(place, work, libraries):
    n = max(1, min(MOST_CALLS, -(-ROTATED // work.bytes)))
    ones = []
    try:
        for _ in range(n):
            ones.append(work.make())
        calls = {}
        for library in libraries:
            made = [one.call(library) for one in ones]
            calls[library] = (Call * n)(*made)
            calls[library].kept = made
        same_bytes(place, ones, calls, f"{work.kind}, {work.case}")

        def of(library):
            return lambda: library.check(place.timer.run_calls(n, calls[library]))

        if len(libraries) > 1:
            contenders = {"new": of(libraries[0]), "new, old": of(libraries[1])}
        else:
            contenders = {"ours": of(libraries[0])}
            for name in ones[0].peers:
                contenders[name] = lambda name=name: [one.peers[name]() for one in ones]
            if work.bytes < 2**25:
                contenders["ours, graph"] = in_graph(place, contenders["ours"])
        samples, failures = place.measure(contenders, n)
        return {**work._asdict(), "make": None, "calls": n, "seconds": samples, "failures": failures}
    finally:
        place.queue.synchronize()
        for one in ones:
            one.close()
        ones.clear()


def in_graph(place, enqueue):
    """The same calls in one CUDA graph."""
    enqueue()
    place.queue.synchronize()
    place.queue.begin_capture()
    try:
        enqueue()
    finally:
        graph = place.queue.end_capture()
    return lambda: graph.launch(place.queue)


HOST = {
    "gc_pack_chunks_into": lambda place: next(works.bits(place, [2**20 + 8])),
    "gc_codec_encode, int8": lambda place: of_codec(place, "int8 encode float32, no errors"),
    "gc_codec_decode, int8": lambda place: of_codec(place, "int8 decode float32"),
    "gc_codec_reduce, int8": lambda place: of_codec(place, "int8 reduce 4"),
    "gc_codec_encode, int8, 200 tensors": lambda place: of_codec(place, "int8 encode float32, no errors", 200),
    "gc_copy_into": lambda place: next(works.copies(place, [1024])),
    "gc_kernel_run": lambda place: next(works.kernels(place, 2**20, 1024)),
}


def of_codec(place, kind, tensors=0):
    found = works.codecs(place, [2**20], [2**14] * tensors)
    return next(work for work in found if work.kind == kind and (not tensors or "tensors" in work.case))


def host(place, libraries):
    """Microseconds that the host takes for a call that only enqueues; the builds take turns in ten rounds."""
    synchronize, rows = ctypes.cast(place.driver.cuStreamSynchronize, c_void_p), []
    for name, work in HOST.items():
        one, samples = work(place).make(), {}
        try:
            for round in range(11):
                for library, which in zip(libraries, ("", ", old")):
                    seconds = (c_double * (HOST_CALLS // 10))()
                    arguments = len(seconds), byref(one.call(library)), seconds, synchronize, place.stream
                    library.check(place.timer.host_seconds(*arguments))
                    if round:
                        samples.setdefault(("new" if len(libraries) > 1 else "ours") + which, []).extend(
                            map(significant, seconds)
                        )
        finally:
            place.queue.synchronize()
            one.close()
        rows.append({"group": "host", "kind": name, "case": "a call", "bytes": 0, "seconds": samples})
    return rows


def of_card(*fields, card=0):
    """What nvidia-smi says of the GPU, or nothing."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={card}"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        answer = ""
    return dict(zip(fields, answer.split(", "))) if answer else {}


def main():
    options = arguments(__doc__, "gpu.json")
    libraries = [Library(path) for path in (options.library, options.against) if path]
    place, quick = Place(libraries), options.quick
    segments = [2 ** (14 + i % 7) for i in range(200)]
    rows = [
        *works.bits(place, QUICK_SIZES if quick else SIZES),
        *works.layouts(place, QUICK_SHAPES if quick else SHAPES),
        *works.copies(place, QUICK_SIDES if quick else SIDES),
        *works.codecs(place, QUICK_CODEC_SIZES if quick else CODEC_SIZES, segments),
        *works.kernels(place, *(QUICK_KERNELS if quick else KERNELS)),
    ]
    name = place.np.cuda.runtime.getDeviceProperties(0)["name"].decode()
    more = {
        "of": "gpu",
        "card": name,
        "cupy": place.np.__version__,
        "quick": quick,
        **of_card("driver_version", "clocks.sm", "clocks.mem"),
    }
    results = {"about": about(libraries, **more), "rows": [], "failed": {}, "yardstick": {"bytes": 2 * YARDSTICK_BYTES}}
    begin = time.monotonic()
    for work in rows:
        if not f"{work.group} {work.kind}".startswith(options.only):
            continue
        try:
            results["rows"].append(measured(place, work, libraries))
        except Exception as error:
            results["failed"][f"{work.group} {work.kind}, {work.case}"] = f"{type(error).__name__}: {error}"[:400]
            print(f"FAILED: {work.group} {work.kind}, {work.case}: {error}", file=sys.stderr)
        place.np.get_default_memory_pool().free_all_blocks()
        if place.torch:
            place.torch.cuda.empty_cache()
        results["yardstick"]["seconds"] = place.copies
        save(options.output, results)
    if "host".startswith(options.only):
        results["rows"] += host(place, libraries)
        save(options.output, results)
    print(results["about"], f"{time.monotonic() - begin:.0f} s")
    copy = statistics.median(place.copies)
    rates = [2 * YARDSTICK_BYTES / seconds / 1e9 for seconds in (copy, max(place.copies))]
    print(f"the copy: {rates[0]:.0f} GB/s, slowest {rates[1]:.0f}")
    if options.against:
        print_ratios(results["rows"])
    else:
        print_rows([row for row in results["rows"] if row["bytes"]])
        print("\nhost time, us a call: median")
        table(
            ["", "ours"],
            [[row["kind"], number(medians(row)["ours"] * 1e6)] for row in results["rows"] if not row["bytes"]],
        )
    for name, why in results["failed"].items():
        print(f"FAILED: {name}: {why}")
    print(f"\n{options.output}")
    raise SystemExit(bool(results["failed"]))


if __name__ == "__main__":
    main()
