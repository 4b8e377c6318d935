"""Bits, copies, codecs and compiled kernels on one GPU: beside a copy, CuPy and torch, or beside another build.

    python3 bench/gpu.py --library target/release/libgradcodec.so.0 [--against OLD.so] [--only PREFIX] [--quick]

The yardstick is cuMemcpyDtoDAsync of 4 GiB, bytes read and written, measured before every row. All contenders take
turns. Every call of a sample has memory of its own and the cache is flushed before, so that nothing is in the cache;
the calls are enqueued behind a kernel that spins, so that the device has them all when it begins. With `--against` only
the two builds take turns; every row's results must be the same bytes, and the program prints the speed of the new build
over the old one and the rows below 0.90. Needs CuPy and PyTorch. `make gpu-bench` runs it and writes
build/bench/gpu.json.
"""

import ctypes
import math
import statistics
import sys
import time
from ctypes import c_size_t, c_uint64, c_void_p

import cupy as cp
import torch
import works
from common import CUDA, DTYPES, Call, Library, about, c, parser, print_ratios, print_rows, save, significant

SIZES, QUICK_SIZES = [2**k for k in (10, 12, 16, 20, 24, 28, 30)], [2**12, 2**20, 2**26]
SHAPES, QUICK_SHAPES = [(2048, 2048), (12289, 6151), (16384, 16384)], [(2048, 2048)]
SIDES, QUICK_SIDES = [1024, 16383, 16384], [4096]
CODEC_SIZES, QUICK_CODEC_SIZES = [2**12, 2**16, 2**20, 2**24, 300 * 2**20], [2**16, 2**24]
KERNELS, QUICK_KERNELS = (2**28, 16384), (2**24, 4096)

YARDSTICK_BYTES = 4 << 30
ROTATED = 256 << 20  # bytes that a sample uses before it uses memory again: four times an H200's L2
MOST_CALLS = 64  # in a sample
FEWEST, SAMPLES, BUDGET = 7, 21, 0.6  # rounds; a slow contender stops after BUDGET seconds
PATIENCE = 1.0  # seconds: the longest wait until a copy is as fast as it was

SOURCE = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}"""


class Place(works.Place):
    np, name, device_type = cp, "cupy", CUDA

    def __init__(self, libraries):
        super().__init__(libraries)
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.queue = cp.cuda.Stream(non_blocking=True)
        self.queue.use()
        torch.cuda.set_stream(torch.cuda.ExternalStream(self.queue.ptr))
        self.stream = c_void_p(self.queue.ptr).value
        self.start, self.end = cp.cuda.Event(), cp.cuda.Event()
        self.scratch = cp.zeros(ROTATED // 8, cp.uint64)
        self.yardstick = [cp.ones(YARDSTICK_BYTES, cp.uint8) for _ in range(2)]
        self.copies, self.fastest = [], math.inf
        self.spin = cp.RawModule(code=SOURCE).get_function("spin")
        for library in libraries:
            library.check(library.functions.gc_prepare(c.DLDevice(CUDA, 0)))

    def empty(self, shape, dtype):
        return self.np.empty(shape, DTYPES[dtype][2])

    def wait(self):
        self.queue.synchronize()

    # The contenders beside the library.

    def copy_peers(self, src, dst, source, target):
        if any(stride < 0 for array in (src, dst) for stride in array.strides):
            return {}  # torch has no negative strides

        def tensor(array, dtype):
            if dtype != "bfloat16":
                return torch.from_dlpack(array)
            return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)

        of, to = tensor(src, source), tensor(dst, target)
        return {"torch": lambda: to.copy_(of)}

    def kernel_peer(self, texts, axes, given, results):
        make = cp.ElementwiseKernel if axes is None else cp.ReductionKernel
        kernel = make(*texts, "theirs", options=("--fmad=false",))  # the library's default
        more = {} if axes is None else {"axis": axes[0]}
        return lambda: kernel(*given, *results, **more)

    # Timing.

    def on_device(self, enqueue, nanoseconds):
        """Returns seconds between two events around `enqueue`, whose work is all enqueued when the device begins."""
        self.scratch.sum()  # reads, so that the cache need not be written back to memory
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
        """Waits until a copy is as fast as before: for a few tenths of a second after memory was freed it is a sixth
        slower."""
        begin = time.perf_counter()
        while (seconds := self.on_device(self.copy, 100_000)) > 1.01 * self.fastest:
            if time.perf_counter() - begin > PATIENCE:
                break
        self.fastest = min(self.fastest, seconds)
        self.copies.append(significant(seconds))

    def measure(self, contenders, calls):
        """Returns the seconds a call of every sample; contenders take turns. A peer that fails is recorded."""
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
        first = {library: of_library[0] for library, of_library in calls.items()}
        works.same_bytes(place, ones[0], first, f"{work.kind}, {work.case}")

        def of(library):
            return lambda: library.check(place.timer.run_calls(n, calls[library]))

        if len(libraries) > 1:
            contenders = {"new": of(libraries[0]), "new, old": of(libraries[1])}
        else:
            contenders = {"ours": of(libraries[0])}
            for name in ones[0].peers:
                contenders[name] = lambda name=name: [one.peers[name]() for one in ones]
        samples, failures = place.measure(contenders, n)
        return {**work._asdict(), "make": None, "calls": n, "seconds": samples, "failures": failures}
    finally:
        place.queue.synchronize()
        for one in ones:
            one.close()
        ones.clear()


def main():
    options = parser(__doc__, "gpu.json", "against", "only").parse_args()
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
    about_run = about(libraries, of="gpu", card=name, cupy=place.np.__version__, quick=quick)
    results = {"about": about_run, "rows": [], "failed": {}, "yardstick": {"bytes": 2 * YARDSTICK_BYTES}}
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
        torch.cuda.empty_cache()
        results["yardstick"]["seconds"] = place.copies
        save(options.output, results)
    print(results["about"], f"{time.monotonic() - begin:.0f} s")
    copy = statistics.median(place.copies)
    rates = [2 * YARDSTICK_BYTES / seconds / 1e9 for seconds in (copy, max(place.copies))]
    print(f"the copy: {rates[0]:.0f} GB/s, slowest {rates[1]:.0f}")
    (print_ratios if options.against else print_rows)(results["rows"])
    for name, why in results["failed"].items():
        print(f"FAILED: {name}: {why}")
    print(f"\n{options.output}")
    raise SystemExit(bool(results["failed"]))


if __name__ == "__main__":
    main()
