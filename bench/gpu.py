"""How fast the GPU packs and unpacks: every size and layout as a fraction of a device-to-device copy, beside CuPy.

The yardstick is cuMemcpyDtoDAsync of 4 GiB, bytes read and written, measured again and again in the same run. All
contenders take turns. Every call of a sample has memory of its own, and the cache is flushed before, so that nothing
comes from it; the calls are enqueued behind a kernel that spins, so that the device has them all when it begins.
bench/gpu_host.c makes the calls, `make gpu-bench` builds it. The samples go to a JSON file, of which bench/report.py
makes tables and a plot.
"""

import argparse
import ctypes
import datetime
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from ctypes import c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p

import report
from cpu import BFLOAT16, CODES, ROOT, DLTensor, Library, commit

SIZES = [2**k for k in range(10, 33, 2)]
QUICK_SIZES = [2**20, 2**26, 2**30]
SIDES = [4096, 16384]

YARDSTICK_BYTES = 4 << 30
ROTATED = 256 << 20  # bytes that a sample goes through before it touches memory again: four times an H200's L2
MOST_CALLS = 256  # in a sample: the queue of a stream takes a thousand
FEWEST, SAMPLES, BUDGET = 5, 21, 0.6  # a slow contender stops after so many seconds, though not before the fewest
N_CHUNKS = 8
HOST_ELEMENTS, HOST_CALLS = 2**20, 2000

PACK_CHUNKS, UNPACK_CHUNKS, PACK_SIGNS, PACK_BITS, UNPACK_BITS = range(5)  # as in gpu_host.c
CUDA = 2
AXIS_NONE = -(2**31)


def significant(seconds):
    return float(f"{seconds:.5g}")


# --- tensors ----------------------------------------------------------------------------------------------------------


def describe(array, code=None):
    """A CuPy array as the library sees it; `code`: of a dtype that CuPy lacks."""
    dims = c_int64 * array.ndim
    strides = dims(*(stride // array.itemsize for stride in array.strides))
    code = CODES[array.dtype.kind] if code is None else code
    bits = 8 * array.itemsize
    return DLTensor(array.data.ptr, CUDA, 0, array.ndim, code, bits, 1, dims(*array.shape), strides, 0)


class Random:
    """Memory with random elements: a block of them, again and again."""

    BLOCK = 2**26

    def __init__(self, cp):
        self.cp = cp

    def __call__(self, shape, dtype):
        cp = self.cp
        count = math.prod(shape)
        size = min(count, self.BLOCK)
        if dtype == "float32":
            block = cp.random.standard_normal(size, dtype=cp.float32)
        elif dtype == "bfloat16":
            block = (cp.random.standard_normal(size, dtype=cp.float32).view(cp.uint32) >> 16).astype(cp.uint16)
        elif dtype == "uint8":
            block = cp.random.randint(0, 256, size, dtype=cp.int32).astype(cp.uint8)
        else:
            block = cp.random.randint(0, 2, size, dtype=cp.int32).astype(dtype)
        if count == size:
            return block.reshape(shape)
        array = cp.empty(count, block.dtype)
        for first in range(0, count, size):
            array[first : first + size] = block[: count - first]
        return array.reshape(shape)


# --- timing -----------------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, path, library, against):
        import cupy as cp

        self.cp, self.random = cp, Random(cp)
        self.host = ctypes.CDLL(str(path))
        self.library = Library(self.host, library)
        self.against = against and Library(self.host, against)
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.start, self.end = cp.cuda.Event(), cp.cuda.Event()
        self.scratch = cp.zeros(ROTATED // 8, cp.uint64)
        self.yardstick_memory = [cp.ones(YARDSTICK_BYTES, cp.uint8) for _ in range(2)]
        self.yardstick_samples = []
        source = r"""
            extern "C" __global__ void spin(unsigned long long nanoseconds) {
                unsigned long long start, now;
                asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
                do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
            }"""
        self.spin = cp.RawKernel(source, "spin")
        for library in filter(None, (self.library, self.against)):
            self.check(library.functions.gc_prepare(*self.device()), library)

    @staticmethod
    def device():
        class DLDevice(ctypes.Structure):
            _fields_ = [("device_type", c_int32), ("device_id", c_int32)]

        return (DLDevice(CUDA, 0),)

    def check(self, status, library):
        if status:
            raise RuntimeError(library.last_error())

    def on_device(self, enqueue, nanoseconds):
        """Seconds between two events around what `enqueue` enqueues, which the device finds complete."""
        self.scratch.sum()  # read, not written: what is left in the cache need not go back to memory
        self.spin((1,), (1,), (self.cp.uint64(nanoseconds),))
        self.start.record(self.stream)
        enqueue()
        self.end.record(self.stream)
        self.end.synchronize()
        return self.cp.cuda.get_elapsed_time(self.start, self.end) * 1e-3

    def copy_yardstick(self, samples):
        """The yardstick, a few times more."""
        to, source = (memory.data.ptr for memory in self.yardstick_memory)

        def copy():
            code = self.driver.cuMemcpyDtoDAsync_v2(
                c_uint64(to), c_uint64(source), c_size_t(YARDSTICK_BYTES), c_void_p(self.stream.ptr)
            )
            assert code == 0, f"cuMemcpyDtoDAsync: {code}"

        copy()
        for _ in range(samples):
            self.yardstick_samples.append(significant(self.on_device(copy, 100_000)))

    def ours(self, function, pairs, axis=AXIS_NONE, codes=(None, None)):
        """What enqueues one call for each pair of arrays. Its attribute `against` does so with the other library, if there
        is one."""
        sources = (DLTensor * len(pairs))(*(describe(src, codes[0]) for src, _ in pairs))
        targets = (DLTensor * len(pairs))(*(describe(dst, codes[1]) for _, dst in pairs))
        arguments = c_int32(function), c_int64(len(pairs)), sources, targets, c_int32(axis), c_void_p(self.stream.ptr)

        def of(library):
            return lambda: self.check(self.host.enqueue(library.handle, *arguments), library)

        enqueue = of(self.library)
        enqueue.kept = pairs, sources, targets
        enqueue.against = self.against and of(self.against)
        return enqueue

    def measure(self, contenders, calls):
        """Seconds a call of every sample, the contenders taking turns; None for one that fails, and why."""
        samples, spins, spent, failures = {}, {}, {}, {}
        if contenders["ours"].against:
            contenders = {**contenders, "against": contenders["ours"].against}
        for name, enqueue in contenders.items():
            try:
                enqueue()  # what is compiled and allocated once
                self.stream.synchronize()
                begin = time.perf_counter()
                enqueue()
                spins[name] = min(20e-3, 2 * (time.perf_counter() - begin) + 50e-6)
                self.stream.synchronize()
                samples[name], spent[name] = [], 0.0
            except (RuntimeError, OverflowError, MemoryError, ValueError) as error:
                if name == "ours":
                    raise
                failures[name] = f"{type(error).__name__}: {error}"[:120]
        for done in range(SAMPLES):
            for name in samples:
                if done >= FEWEST and spent[name] > BUDGET:
                    continue
                seconds = self.on_device(contenders[name], int(spins[name] * 1e9))
                spent[name] += seconds
                samples[name].append(significant(seconds / calls))
        return samples, failures


# --- what is measured -------------------------------------------------------------------------------------------------


def calls_for(bytes_moved):
    """How many calls with memory of their own a sample needs."""
    return max(1, min(MOST_CALLS, -(-ROTATED // bytes_moved)))


def compress_by_chunk(cp, truth, n_chunks):
    """DeepSpeed's: all elements to bytes, the bytes split into equal views, the stream synchronized."""
    chunks = cp.split(cp.packbits(truth), n_chunks)
    cp.cuda.get_current_stream().synchronize()
    return chunks


def sized(bench):
    """Kinds of work by name: dtype, function, CuPy's way, and what else there is."""
    cp = bench.cp

    def pack(dtype, function, peer, code=None):
        def make(elements):
            itemsize = {"bool": 1, "bfloat16": 2}.get(dtype, 4)
            moved = elements * itemsize + elements // 8
            calls = calls_for(moved)
            sources = bench.random((calls, elements), dtype)
            targets = cp.empty((calls, 1, elements // 8), cp.uint8)
            contenders = {"ours": bench.ours(function, list(zip(sources, targets)), codes=(code, None))}
            if peer:
                contenders["cupy"] = lambda: [peer(source) for source in sources]
            expected = (lambda: peer(sources[0])) if peer else None
            return moved, calls, contenders, targets[0].reshape(-1), expected

        return make

    def unpack(dtype, peer):
        def make(elements):
            moved = elements * cp.dtype(dtype).itemsize + elements // 8
            calls = calls_for(moved)
            sources = bench.random((calls, 1, elements // 8), "uint8")
            targets = cp.empty((calls, elements), dtype)
            contenders = {
                "ours": bench.ours(UNPACK_CHUNKS, list(zip(sources, targets))),
                "cupy": lambda: [peer(source) for source in sources],
            }
            return moved, calls, contenders, targets[0], lambda: peer(sources[0])

        return make

    return {
        "pack bool": pack("bool", PACK_CHUNKS, lambda x: cp.packbits(x)),
        "pack int32": pack("int32", PACK_CHUNKS, lambda x: cp.packbits(x)),
        "signs float32": pack("float32", PACK_SIGNS, lambda x: cp.packbits(~(x < 0))),
        "signs bfloat16": pack("bfloat16", PACK_SIGNS, None, BFLOAT16),
        "unpack uint8": unpack("uint8", lambda x: cp.unpackbits(x)),
        "unpack float32": unpack("float32", lambda x: cp.unpackbits(x).astype(cp.float32)),
    }


def layouts(bench):
    """Squares in other layouts, by name: function, axis, bytes of memory that a call moves, and its two arrays."""
    cp, rng = bench.cp, bench.random

    def rows(count):
        return cp.empty((1, -(-count // 8)), cp.uint8)

    def packed(count):
        return rng((1, -(-count // 8)), "uint8")

    def pack_from(memory_shape, view, touched, dtype="bool", function=PACK_CHUNKS):
        def make(side):
            memory = rng(memory_shape(side), dtype)
            src = view(memory, side)
            return function, AXIS_NONE, src.size * src.itemsize * touched + src.size // 8, src, rows(src.size)

        return make

    def unpack_to(memory_shape, view, touched, dtype="uint8"):
        def make(side):
            dst = view(cp.empty(memory_shape(side), dtype), side)
            # Bytes between the elements are read and written back with the lines that they lie in.
            moved = dst.size * dst.itemsize * (1 if touched == 1 else 2 * touched) + dst.size // 8
            return UNPACK_CHUNKS, AXIS_NONE, moved, packed(dst.size), dst

        return make

    def along(axis, width, unpacks):
        def make(side):
            shape = side, width(side)
            bits = tuple(-(-n // 8) if d == axis else n for d, n in enumerate(shape))
            moved = math.prod(shape) + math.prod(bits)
            if unpacks:
                return UNPACK_BITS, axis, moved, rng(bits, "uint8"), cp.empty(shape, cp.uint8)
            return PACK_BITS, axis, moved, rng(shape, "bool"), cp.empty(bits, cp.uint8)

        return make

    def square(side):
        return side, side

    def twice(side):
        return (2 * side * side,)

    def one_more(side):
        return (side * side + 1,)

    kinds = {}
    for unpacks in False, True:
        verb = "unpack" if unpacks else "pack"
        kinds[f"{verb} along axis 0"] = along(0, lambda side: side, unpacks)
        kinds[f"{verb} along axis 1"] = along(1, lambda side: side, unpacks)
        kinds[f"{verb} along axis 1, rows of one less"] = along(1, lambda side: side - 1, unpacks)
    kinds |= {
        "pack transposed": pack_from(square, lambda memory, side: memory.T, 1),
        "pack transposed int32": pack_from(square, lambda memory, side: memory.T, 1, "int32"),
        "pack every other": pack_from(twice, lambda memory, side: memory[::2], 2),
        "pack reversed": pack_from(lambda side: (side * side,), lambda memory, side: memory[::-1], 1),
        "pack x[1:]": pack_from(one_more, lambda memory, side: memory[1:], 1),
        "pack x[1:] int32": pack_from(one_more, lambda memory, side: memory[1:], 1, "int32"),
        "signs x[1:] float32": pack_from(one_more, lambda memory, side: memory[1:], 1, "float32", PACK_SIGNS),
        "unpack transposed": unpack_to(square, lambda memory, side: memory.T, 1),
        "unpack every other": unpack_to(twice, lambda memory, side: memory[::2], 2),
        "unpack x[1:]": unpack_to(one_more, lambda memory, side: memory[1:], 1),
        "unpack x[1:] float32": unpack_to(one_more, lambda memory, side: memory[1:], 1, "float32"),
    }
    return kinds


def size_row(bench, kind, make, elements):
    bench.copy_yardstick(1)
    moved, calls, contenders, found, expected = make(elements)
    if expected is not None and elements <= 2**26:
        contenders["ours"]()
        assert bool((found == expected()).all()), f"{kind}, {elements}: not what CuPy gives"
    samples, failures = bench.measure(contenders, calls)
    row = {"kind": kind, "elements": elements, "bytes": moved, "calls": calls, "seconds": samples, "failures": failures}
    if kind == "pack bool" and elements < 2**32:  # CuPy counts in 32 bits
        samples["compress_by_chunk"] = chunk_samples(bench, elements)
    return row


def chunk_samples(bench, elements):
    """compress_by_chunk waits for the device: its time is the caller's."""
    cp, samples = bench.cp, []
    truth = bench.random((elements,), "bool")
    for _ in range(SAMPLES + 2):
        bench.scratch.sum()
        bench.stream.synchronize()
        begin = time.perf_counter()
        compress_by_chunk(cp, truth, N_CHUNKS)
        samples.append(significant(time.perf_counter() - begin))
    return samples[2:]


def layout_row(bench, kind, make, side):
    bench.copy_yardstick(1)
    function, axis, moved, *_ = first = make(side)
    calls = calls_for(moved)
    pairs = [first[3:], *(make(side)[3:] for _ in range(calls - 1))]
    samples, _ = bench.measure({"ours": bench.ours(function, pairs, axis)}, calls)
    return {"kind": kind, "side": side, "bytes": moved, "calls": calls, "seconds": samples}


# --- the host ---------------------------------------------------------------------------------------------------------


def host(bench, calls):
    """Seconds a call of the host, at HOST_ELEMENTS bools."""
    cp, timer = bench.cp, bench.host
    truth = bench.random((HOST_ELEMENTS,), "bool")
    packed = cp.empty((N_CHUNKS, HOST_ELEMENTS // 8 // N_CHUNKS), cp.uint8)
    bits = cp.empty(HOST_ELEMENTS, cp.uint8)
    bench.stream.synchronize()
    cp.cuda.Device().synchronize()
    src, dst, out = describe(truth), describe(packed), describe(bits)
    synchronize = ctypes.cast(bench.driver.cuStreamSynchronize, c_void_p)
    stream = c_void_p(bench.stream.ptr)
    found = {}

    def in_c(name, function):
        for library, suffix in (bench.library, ""), (bench.against, ", against"):
            if library:
                seconds = (c_double * calls)()
                for _ in range(2):  # the first is to warm up
                    bench.check(function(library.handle, seconds), library)
                found[name + suffix] = [significant(s) for s in seconds]

    def into(function, source, target):
        tensors = ctypes.byref(source), ctypes.byref(target)
        return lambda library, seconds: timer.host_seconds(
            library, c_int32(function), c_int64(calls), seconds, *tensors, stream, synchronize
        )

    def pack_chunks(library, seconds):
        return timer.pack_chunks_seconds(library, c_int64(calls), seconds, ctypes.byref(src), c_int64(N_CHUNKS))

    in_c("gc_pack_chunks_into", into(PACK_CHUNKS, src, dst))
    in_c("gc_unpack_chunks_into", into(UNPACK_CHUNKS, dst, out))
    in_c("gc_pack_chunks and releases", pack_chunks)

    def in_python(name, function):
        for _ in range(20):
            function()
        samples = []
        for i in range(calls // 4):
            if i % 64 == 0:
                bench.stream.synchronize()
            begin = time.perf_counter()
            function()
            samples.append(significant(time.perf_counter() - begin))
        found[name] = samples

    def until_done():
        cp.packbits(truth)
        bench.stream.synchronize()

    in_python("cupy.packbits", lambda: cp.packbits(truth))
    in_python("cupy.packbits, until done", until_done)
    in_python("compress_by_chunk", lambda: compress_by_chunk(cp, truth, N_CHUNKS))
    return found


# --- memory that is kept ----------------------------------------------------------------------------------------------


def kept(bench):
    """MiB of the card that the library keeps when 20 GiB of its tensors have been released, and after each of some calls
    into memory of the caller."""
    functions, (device,) = bench.library.functions, bench.device()
    byte, shape, tensors = c_int32(1 | 8 << 8 | 1 << 16), (c_int64 * 1)(1 << 30), []
    truth = bench.random((HOST_ELEMENTS,), "bool")
    call = bench.ours(PACK_CHUNKS, [(truth, bench.cp.empty((1, HOST_ELEMENTS // 8), bench.cp.uint8))])
    call()
    bench.stream.synchronize()
    bench.check(functions.gc_trim(device), bench.library)
    free, _ = bench.cp.cuda.runtime.memGetInfo()
    for _ in range(20):
        tensor = c_void_p()
        bench.check(functions.gc_tensor_empty(device, byte, 1, shape, ctypes.byref(tensor)), bench.library)
        tensors.append(tensor)
    for tensor in tensors:
        functions.gc_tensor_free(tensor)
    left = [free - bench.cp.cuda.runtime.memGetInfo()[0]]
    for _ in range(4):
        call()
        bench.stream.synchronize()
        left.append(free - bench.cp.cuda.runtime.memGetInfo()[0])
    bench.check(functions.gc_trim(device), bench.library)
    return [size >> 20 for size in left]


# --- the first call of a process --------------------------------------------------------------------------------------


def first_call(path):
    """In a process of its own: seconds of CUDA's beginning, of loading the library, of gc_prepare and a first call."""
    times, last = {}, time.perf_counter()

    def lap(name):
        nonlocal last
        times[name], last = significant(time.perf_counter() - last), time.perf_counter()

    driver, context = ctypes.CDLL("libcuda.so.1"), c_void_p()
    assert driver.cuInit(0) == 0
    lap("cuInit")
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0 and driver.cuCtxSynchronize() == 0
    lap("context")
    library = ctypes.CDLL(path)
    library.gc_last_error.restype = ctypes.c_char_p
    lap("load the library")
    (device,) = Bench.device()
    assert library.gc_prepare(device) == 0, library.gc_last_error()
    lap("gc_prepare")
    boolean, tensor, chunk = c_int32(6 | 8 << 8 | 1 << 16), c_void_p(), c_void_p()
    shape = (c_int64 * 1)(HOST_ELEMENTS)
    assert library.gc_tensor_empty(device, boolean, 1, shape, ctypes.byref(tensor)) == 0, library.gc_last_error()
    lap("gc_tensor_empty")
    assert library.gc_pack_chunks(tensor, c_size_t(1), ctypes.byref(chunk)) == 0, library.gc_last_error()
    lap("gc_pack_chunks")
    print(json.dumps(times))


def first_calls(path, rounds):
    """The samples of first_call() with the driver's cache of compiled kernels off, empty, and full."""
    found = {}

    def run(name, **environment):
        command = [sys.executable, __file__, "--first-call", str(path)]
        child = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        if child.returncode:
            raise RuntimeError(f"first call: {child.stderr}")
        found.setdefault(name, []).append(json.loads(child.stdout))

    for _ in range(rounds):
        run("cache off", CUDA_CACHE_DISABLE="1")
        with tempfile.TemporaryDirectory() as folder:
            run("cache empty", CUDA_CACHE_DISABLE="0", CUDA_CACHE_PATH=folder)
            run("cache full", CUDA_CACHE_DISABLE="0", CUDA_CACHE_PATH=folder)
    return found


def about(bench):
    properties = bench.cp.cuda.runtime.getDeviceProperties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:
        driver = None
    return {
        "card": properties["name"].decode(),
        "capability": f"{properties['major']}.{properties['minor']}",
        "driver": driver,
        "cuda": bench.cp.cuda.runtime.driverGetVersion(),
        "cupy": bench.cp.__version__,
        "library": bench.library.functions.gc_version_string().decode(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def main():
    output = pathlib.Path(os.environ.get("BENCH_OUT") or ROOT / "build/bench/gpu.json")
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="fewer sizes, one side, fewer calls")
    options.add_argument("--only", metavar="KIND", help="kinds whose names begin so, and nothing else")
    options.add_argument("--output", metavar="FILE", type=pathlib.Path, default=output)
    options.add_argument("--host", metavar="FILE", default=ROOT / "build/bench/gpu_host.so", help="gpu_host.c, built")
    options.add_argument("--library", metavar="FILE", help="libgradcodec.so, to be timed")
    options.add_argument("--against", metavar="FILE", help="another build of it, to be timed in turns with the first")
    options.add_argument("--first-call", metavar="LIBRARY", help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.first_call:
        return first_call(options.first_call)

    everything = options.only is None
    only = options.only or ""
    # These first: their processes then do not wait for the memory that this one is about to take.
    first = first_calls(options.library, 1 if options.quick else 3) if everything else {}
    bench = Bench(options.host, options.library, options.against)
    pool = bench.cp.get_default_memory_pool()
    results = {"about": {**about(bench), "quick": options.quick}, "sizes": [], "layouts": [], "host": {}}
    results["first call"] = first
    bench.copy_yardstick(SAMPLES)
    if everything:
        results["host"] = host(bench, HOST_CALLS // 4 if options.quick else HOST_CALLS)
        results["kept"] = kept(bench)
    for kind, make in sized(bench).items():
        for elements in (QUICK_SIZES if options.quick else SIZES) if kind.startswith(only) else []:
            try:
                results["sizes"].append(size_row(bench, kind, make, elements))
            except bench.cp.cuda.memory.OutOfMemoryError as error:
                print(f"{kind}, {elements}: {error}", file=sys.stderr)
            pool.free_all_blocks()
    for kind, make in layouts(bench).items():
        for side in SIDES[:1] if options.quick else SIDES:
            if kind.startswith(only):
                results["layouts"].append(layout_row(bench, kind, make, side))
                pool.free_all_blocks()
    bench.copy_yardstick(5)
    results["yardstick"] = {"bytes": 2 * YARDSTICK_BYTES, "seconds": bench.yardstick_samples}

    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results) + "\n")
    print(report.gpu_tables(results))
    if options.against:
        print(report.against(results))
    spread = sorted(bench.yardstick_samples)
    print(
        f"\nyardstick: {statistics.median(spread) * 1e3:.3f} ms, from {spread[0] * 1e3:.3f} to {spread[-1] * 1e3:.3f}"
    )


if __name__ == "__main__":
    main()
