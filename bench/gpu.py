"""How fast the GPU packs and unpacks: every size and layout as a fraction of a device-to-device copy, beside CuPy.

The yardstick is cuMemcpyDtoDAsync of 4 GiB, bytes read and written, measured again and again in the same run. Beside it
stand a sum that only reads, and a memset. All contenders take turns. Every call of a sample has memory of its own, and
the cache is flushed before, so that nothing comes from it; the calls are enqueued behind a kernel that spins, so that
the device has them all when it begins. bench/gpu_host.c makes the calls, `make gpu-bench` builds it. The samples go to
a JSON file, of which bench/report.py makes tables and a plot.
"""

import argparse
import ctypes
import datetime
import itertools
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
# Elements: a size that whole tiles make up, and an odd one beside it.
ODD_SIZES = {2**k: 2**k - 1 for k in range(12, 25, 2)} | {61 * 2**14: 1_000_003}
QUICK_ODD_SIZES = {2**20: 2**20 - 1}
SMALL_SIZES = [2**12, 2**20]
SHAPES = [(2048, 2048), (12289, 6151), (16384, 16384)]

YARDSTICK_BYTES = 4 << 30
ROTATED = 256 << 20  # bytes that a sample goes through before it touches memory again: four times an H200's L2
MOST_CALLS = 256  # in a sample: the queue of a stream takes a thousand
FEWEST, SAMPLES, BUDGET = 5, 21, 0.6  # a slow contender stops after so many seconds, though not before the fewest
PATIENCE = 1.0  # seconds: the longest wait until a copy is as fast as it was
N_CHUNKS = 8
HOST_ELEMENTS, HOST_CALLS = 2**20, 2000

PACK_CHUNKS, UNPACK_CHUNKS, PACK_SIGNS, PACK_BITS, UNPACK_BITS, COPY = range(6)  # as in gpu_host.c
CPU, CUDA, CUDA_HOST = 1, 2, 3
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


def describe_host(array, kind, code=None):
    """A NumPy array likewise, on CPU or CUDA_HOST."""
    dims = c_int64 * array.ndim
    strides = dims(*(stride // array.itemsize for stride in array.strides))
    code = CODES[array.dtype.kind] if code is None else code
    return DLTensor(array.ctypes.data, kind, 0, array.ndim, code, 8 * array.itemsize, 1, dims(*array.shape), strides, 0)


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
        self.fastest = math.inf  # seconds of the fastest copy so far
        self.yardsticks = {
            "copy": {"bytes": 2 * YARDSTICK_BYTES, "seconds": []},
            "sum": {"bytes": YARDSTICK_BYTES, "seconds": []},
            "memset": {"bytes": YARDSTICK_BYTES, "seconds": []},
        }
        source = r"""
            extern "C" __global__ void sum(const uint4 *from, unsigned *to) {
                from += blockIdx.x * 2048ull + threadIdx.x;
                uint4 v[8];
                for (int k = 0; k < 8; k++) v[k] = from[k * 256];
                unsigned sum = 0;
                for (int k = 0; k < 8; k++) sum += v[k].x + v[k].y + v[k].z + v[k].w;
                if (sum == 1) *to = sum;  // it is not: the bytes are all alike
            }
            extern "C" __global__ void spin(unsigned long long nanoseconds) {
                unsigned long long start, now;
                asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
                do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
            }"""
        kernels = cp.RawModule(code=source)
        self.spin, self.sum = (kernels.get_function(name) for name in ("spin", "sum"))
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

    def done(self, code):
        assert code == 0, f"the driver answers {code}"

    def copy(self):
        to, source = (c_uint64(memory.data.ptr) for memory in self.yardstick_memory)
        self.done(self.driver.cuMemcpyDtoDAsync_v2(to, source, c_size_t(YARDSTICK_BYTES), c_void_p(self.stream.ptr)))

    def settle(self):
        """Waits until a copy is as fast as it was. For some tenths of a second after memory was freed it is a sixth slower;
        the driver seems to clear it meanwhile."""
        begin = time.perf_counter()
        while (seconds := self.on_device(self.copy, 100_000)) > 1.01 * self.fastest:
            if time.perf_counter() - begin > PATIENCE:
                break
        self.fastest = min(self.fastest, seconds)

    def measure_yardsticks(self, samples):
        """So many samples of the copy; where they are several, as many of the others."""
        self.settle()
        to, stream = c_uint64(self.yardstick_memory[0].data.ptr), c_void_p(self.stream.ptr)
        ways = {
            "copy": self.copy,
            "sum": lambda: self.sum((YARDSTICK_BYTES >> 15,), (256,), tuple(self.yardstick_memory)),
            "memset": lambda: self.done(self.driver.cuMemsetD8Async(to, 1, c_size_t(YARDSTICK_BYTES), stream)),
        }
        for name, way in ways.items():
            if name == "copy" or samples > 1:
                way()
                for _ in range(samples):
                    self.yardsticks[name]["seconds"].append(significant(self.on_device(way, 100_000)))

    def ours(self, function, pairs, axis=AXIS_NONE, codes=(None, None)):
        """What enqueues one call for each pair of arrays. Its attribute `against` does so with the other library, if there
        is one."""
        sources = (DLTensor * len(pairs))(*(describe(src, codes[0]) for src, _ in pairs))
        targets = (DLTensor * len(pairs))(*(describe(dst, codes[1]) for _, dst in pairs))
        arguments = c_int32(function), c_int64(len(pairs)), sources, targets, c_int32(axis), c_void_p(self.stream.ptr)

        def of(library):
            return lambda: self.check(self.host.enqueue(library.handle, *arguments), library)

        enqueue, against = (library and of(library) for library in (self.library, self.against))
        return self.kept((pairs, sources, targets), enqueue, against)

    @staticmethod
    def kept(memory, enqueue, against):
        enqueue.memory, enqueue.against = memory, against
        return enqueue

    def in_graph(self, enqueue):
        """The same calls as one graph."""

        def of(enqueue):
            self.stream.begin_capture()
            try:
                enqueue()
            finally:
                graph = self.stream.end_capture()
            return lambda: graph.launch(self.stream)

        return self.kept(enqueue.memory, of(enqueue), enqueue.against and of(enqueue.against))

    def measure(self, contenders, calls):
        """Seconds a call of every sample, the contenders taking turns; None for one that fails, and why."""
        samples, spins, spent, failures = {}, {}, {}, {}
        others = {report.other(name): getattr(enqueue, "against", None) for name, enqueue in contenders.items()}
        contenders = contenders | {name: enqueue for name, enqueue in others.items() if enqueue}
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
        self.settle()
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


# Kinds of work by name: dtype of the elements, function, CuPy's way, and the code of a dtype that CuPy lacks.
def kinds(cp):
    return {
        "pack bool": ("bool", PACK_CHUNKS, lambda x: cp.packbits(x), None),
        "pack int32": ("int32", PACK_CHUNKS, lambda x: cp.packbits(x), None),
        "signs float32": ("float32", PACK_SIGNS, lambda x: cp.packbits(~(x < 0)), None),
        "signs bfloat16": ("bfloat16", PACK_SIGNS, None, BFLOAT16),
        "unpack uint8": ("uint8", UNPACK_CHUNKS, lambda x: cp.unpackbits(x), None),
        "unpack float32": ("float32", UNPACK_CHUNKS, lambda x: cp.unpackbits(x).astype(cp.float32), None),
    }


class Work:
    """Calls of one kind on so many contiguous elements; the source or the destination may lie so many of its elements
    beyond a cache line."""

    def __init__(self, bench, kind, elements, source_off=0, target_off=0):
        dtype, function, peer, code = kinds(bench.cp)[kind]
        packs, n_bytes = function != UNPACK_CHUNKS, -(-elements // 8)
        itemsize = {"bool": 1, "uint8": 1, "bfloat16": 2}.get(dtype, 4)
        self.bytes = elements * itemsize + n_bytes
        self.calls = calls_for(self.bytes)

        def rows(make, dtype, count, off):
            # Every row begins at a cache line, but for `off`.
            return make((self.calls, -(-(count + off) // 128) * 128), dtype)[:, off : off + count]

        source = (dtype, elements) if packs else ("uint8", n_bytes)
        target = ("uint8", n_bytes) if packs else (dtype, elements)
        self.sources, self.targets = rows(bench.random, *source, source_off), rows(bench.cp.empty, *target, target_off)
        bits = self.targets if packs else self.sources
        bits = bits.reshape(self.calls, 1, n_bytes)
        pairs = zip(self.sources, bits) if packs else zip(bits, self.targets)
        self.ours = bench.ours(function, list(pairs), codes=(code, None))
        self.peer = peer and (lambda: [peer(source) for source in self.sources])
        self.expected = peer and (lambda: peer(self.sources[0])[: self.targets.shape[1]])

    def check(self, what):
        """That the first call gives what CuPy's does."""
        if self.expected is not None:
            self.ours()
            assert bool((self.targets[0] == self.expected()).all()), f"{what}: not what CuPy gives"


def layouts(bench):
    """Matrices in other layouts, by name: functions of a shape, which give the function of the library, the axis, the
    bytes of memory that a call moves, and the pair of arrays."""
    cp, rng = bench.cp, bench.random
    # The shape of the memory, the view of it, how much of the memory a call touches for each element, and the axis; for
    # unpacking, how many rows of bytes are missing. The last two go through the kernel that takes any strides.
    views = {
        "along axis 0": (lambda shape: shape, lambda memory: memory, 1, 0),
        "along axis 1": (lambda shape: shape, lambda memory: memory, 1, 1),
        "transposed": (lambda shape: shape, lambda memory: memory.T, 1, AXIS_NONE),
        "every other": (lambda shape: (2 * math.prod(shape),), lambda memory: memory[::2], 2, AXIS_NONE),
        "reversed": (lambda shape: (math.prod(shape),), lambda memory: memory[::-1], 1, AXIS_NONE),
        "x[1:]": (lambda shape: (math.prod(shape) + 1,), lambda memory: memory[1:], 1, AXIS_NONE),
        # Rows neither of whole bytes nor at one stride with each other.
        "every other, odd rows": (
            lambda shape: (shape[0], 2 * (shape[1] - 1) - 1), lambda memory: memory[:, ::2], 2, AXIS_NONE,
        ),
        "along axis 0, bits missing": (lambda shape: shape, lambda memory: memory, 1, 0, 1),
    }  # fmt: skip

    def of(dtype, unpacks, memory_shape, view, touched, axis, missing=0):
        def make(shape):
            if unpacks:
                elements = view(cp.empty(memory_shape(shape), dtype))
            else:
                elements = view(rng(memory_shape(shape), dtype))
            if axis == AXIS_NONE:
                bits_shape = (1, -(-elements.size // 8))
                function = UNPACK_CHUNKS if unpacks else PACK_SIGNS if dtype == "float32" else PACK_CHUNKS
            else:
                bits_shape = tuple(-(-n // 8) - missing if d == axis else n for d, n in enumerate(elements.shape))
                function = UNPACK_BITS if unpacks else PACK_BITS
            bits = rng(bits_shape, "uint8") if unpacks else cp.empty(bits_shape, cp.uint8)
            # What lies between elements that are written is read and written back with the lines that it lies in.
            lines = 2 * touched if unpacks and touched > 1 else touched
            moved = elements.nbytes * lines + bits.size
            return function, axis, moved, (bits, elements) if unpacks else (elements, bits)

        return make

    verbs = [("pack", "bool"), ("pack", "int32"), ("signs", "float32"), ("unpack", "uint8"), ("unpack", "float32")]
    return {
        f"{verb} {name} {dtype}": of(dtype, verb == "unpack", *view)
        for name, view in views.items()
        for verb, dtype in verbs
        # There is no function for signs along an axis, and packing has all bits.
        if (verb != "signs" or view[3] == AXIS_NONE) and (verb == "unpack" or len(view) == 4)
    }


def size_row(bench, kind, elements):
    bench.measure_yardsticks(1)
    work = Work(bench, kind, elements)
    if elements <= 2**26:
        work.check(f"{kind}, {elements}")
    contenders = {"ours": work.ours} | ({"cupy": work.peer} if work.peer else {})
    samples, failures = bench.measure(contenders, work.calls)
    row = {"kind": kind, "elements": elements, "bytes": work.bytes, "calls": work.calls}
    if kind == "pack bool" and elements < 2**32:  # CuPy counts in 32 bits
        samples["compress_by_chunk"] = chunk_samples(bench, elements)
    return {**row, "seconds": samples, "failures": failures}


def ragged_row(bench, kind, even, odd):
    """Whole tiles beside what is not: all in turns."""
    works = {
        "ours": Work(bench, kind, even),
        "odd": Work(bench, kind, odd),
        "source off": Work(bench, kind, even, source_off=1),
        "destination off": Work(bench, kind, even, target_off=1),
    }
    for name, work in works.items():
        work.check(f"{kind}, {even}, {name}")
    whole = works["ours"]
    samples, _ = bench.measure({name: work.ours for name, work in works.items()}, whole.calls)
    row = {"kind": kind, "elements": even, "odd": odd, "bytes": whole.bytes, "calls": whole.calls}
    return {**row, "seconds": samples}


def small_row(bench, kind, elements):
    """Calls back to back, the same calls in a graph, and one call alone."""
    work = Work(bench, kind, elements)
    samples, _ = bench.measure({"ours": work.ours, "graph": bench.in_graph(work.ours)}, work.calls)
    pairs, *_ = work.ours.memory
    dtype, function, _, code = kinds(bench.cp)[kind]
    alone, _ = bench.measure({"alone": bench.ours(function, pairs[:1], codes=(code, None))}, 1)
    return {"kind": kind, "elements": elements, "bytes": work.bytes, "calls": work.calls, "seconds": samples | alone}


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


def layout_row(bench, kind, make, shape):
    bench.measure_yardsticks(1)
    function, axis, moved, pair = make(shape)
    calls = calls_for(moved)
    pairs = [pair, *(make(shape)[-1] for _ in range(calls - 1))]
    samples, _ = bench.measure({"ours": bench.ours(function, pairs, axis)}, calls)
    return {"kind": kind, "shape": shape, "bytes": moved, "calls": calls, "seconds": samples}


# --- the host ---------------------------------------------------------------------------------------------------------


def host_seconds(bench, found, name, calls, function):
    """Puts into `found` what a function of gpu_host.c measures, with each library."""
    for library, suffix in (bench.library, ""), (bench.against, ", against"):
        if library:
            seconds = (c_double * calls)()
            for _ in range(2):  # the first is to warm up
                bench.check(function(library, seconds), library)
            found[name + suffix] = [significant(s) for s in seconds]


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
        host_seconds(bench, found, name, calls, function)

    def into(function, source, target):
        tensors = ctypes.byref(source), ctypes.byref(target)
        return lambda library, seconds: timer.host_seconds(
            library.handle, c_int32(function), c_int64(calls), seconds, *tensors, stream, synchronize
        )

    def pack_chunks(library, seconds):
        return timer.pack_chunks_seconds(library.handle, c_int64(calls), seconds, ctypes.byref(src), c_int64(N_CHUNKS))

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
    """MiB of the GPU that the library keeps when 20 GiB of its tensors have been released, and after each of some calls
    that return a new tensor."""
    functions, (device,) = bench.library.functions, bench.device()
    byte, tensors = c_int32(1 | 8 << 8 | 1 << 16), []

    def make(elements):
        shape, tensor = (c_int64 * 1)(elements), c_void_p()
        bench.check(functions.gc_tensor_empty(device, byte, 1, shape, ctypes.byref(tensor)), bench.library)
        return tensor

    functions.gc_tensor_free(make(1000))
    bench.check(functions.gc_trim(device), bench.library)
    free, _ = bench.cp.cuda.runtime.memGetInfo()
    for _ in range(20):
        tensors.append(make(1 << 30))
    for tensor in tensors:
        functions.gc_tensor_free(tensor)
    left = [free - bench.cp.cuda.runtime.memGetInfo()[0]]
    for _ in range(4):
        functions.gc_tensor_free(make(1000))
        left.append(free - bench.cp.cuda.runtime.memGetInfo()[0])
    bench.check(functions.gc_trim(device), bench.library)
    return [size >> 20 for size in left]


# --- the first call of a process --------------------------------------------------------------------------------------


def laps():
    """Seconds of CUDA's beginning, in a new process, and a function that adds those since the last."""
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
    return times, lap


def first_call(path):
    """In a process of its own: seconds of CUDA's beginning, of loading the library, of gc_prepare and a first call."""
    times, lap = laps()
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


def first_calls(script, options, rounds):
    """The samples of first_call() with the driver's cache of compiled kernels off, empty, and full."""
    found = {}

    def run(name, **environment):
        command = [sys.executable, script, "--first-call", str(options.library), "--host", str(options.host)]
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


def of_card(*fields, card=0):
    """What nvidia-smi says of the GPU, or nothing."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={card}"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        answer = ""
    return dict(zip(fields, answer.split(", "))) if answer else {}


def clocks(card=0):
    return of_card("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", card=card)


def about(bench):
    runtime = bench.cp.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    memory_clock, bus_width = (runtime.deviceGetAttribute(attribute, 0) for attribute in (36, 37))  # kHz, bits
    return {
        "card": properties["name"].decode(),
        "capability": f"{properties['major']}.{properties['minor']}",
        "theoretical": 2 * memory_clock * 1000 * bus_width // 8,
        "driver": of_card("driver_version").get("driver_version"),
        "cuda": runtime.driverGetVersion(),
        "cupy": bench.cp.__version__,
        "library": bench.library.functions.gc_version_string().decode(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def arguments(text, output):
    options = argparse.ArgumentParser(description=text.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="fewer sizes, one shape, fewer calls")
    options.add_argument("--only", metavar="KIND", help="kinds whose names begin so, and nothing else")
    options.add_argument("--output", metavar="FILE", type=pathlib.Path, default=output)
    options.add_argument("--host", metavar="FILE", default=ROOT / "build/bench/gpu_host.so", help="gpu_host.c, built")
    options.add_argument("--library", metavar="FILE", help="libgradcodec.so, to be timed")
    options.add_argument("--against", metavar="FILE", help="another build of it, to be timed in turns with the first")
    options.add_argument("--first-call", metavar="LIBRARY", help=argparse.SUPPRESS)
    return options.parse_args()


def copy_spread(bench):
    spread = sorted(bench.yardsticks["copy"]["seconds"])
    return f"the copy: {statistics.median(spread) * 1e3:.3f} ms, {spread[0] * 1e3:.3f} to {spread[-1] * 1e3:.3f}"


def main():
    options = arguments(__doc__, pathlib.Path(os.environ.get("BENCH_OUT") or ROOT / "build/bench/gpu.json"))
    if options.first_call:
        return first_call(options.first_call)

    everything = options.only is None
    only = options.only or ""
    # These first: their processes then do not wait for the memory that this one is about to take.
    first = first_calls(__file__, options, 1 if options.quick else 3) if everything else {}
    bench = Bench(options.host, options.library, options.against)
    pool = bench.cp.get_default_memory_pool()
    results = {"about": {**about(bench), "quick": options.quick}, "host": {}}
    results["first call"] = first
    results["clocks"] = [clocks()]
    bench.measure_yardsticks(SAMPLES)
    if everything:
        results["host"] = host(bench, HOST_CALLS // 4 if options.quick else HOST_CALLS)
        results["kept"] = kept(bench)

    def measure(group, row, of_kinds, cases):
        begin = time.perf_counter()
        results[group] = []
        for kind, case in itertools.product(of_kinds, cases):
            if kind.startswith(only):
                try:
                    results[group].append(row(kind, case))
                except bench.cp.cuda.memory.OutOfMemoryError as error:
                    print(f"{kind}, {case}: {error}", file=sys.stderr)
                pool.free_all_blocks()
        print(f"{group}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)

    quick, of_kinds, of_layouts = options.quick, kinds(bench.cp), layouts(bench)
    measure("sizes", lambda kind, size: size_row(bench, kind, size), of_kinds, QUICK_SIZES if quick else SIZES)
    pairs = QUICK_ODD_SIZES if quick else ODD_SIZES
    measure("ragged", lambda kind, even: ragged_row(bench, kind, even, pairs[even]), of_kinds, pairs)
    measure("small", lambda kind, size: small_row(bench, kind, size), of_kinds, SMALL_SIZES)
    shapes = SHAPES[:1] if quick else SHAPES
    measure("layouts", lambda kind, shape: layout_row(bench, kind, of_layouts[kind], shape), of_layouts, shapes)
    bench.measure_yardsticks(5)
    results["clocks"].append(clocks())
    results["yardsticks"] = bench.yardsticks

    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results) + "\n")
    print(report.gpu_tables(results))
    print(report.targets() or "")
    if options.against:
        print(report.against(results))
    print(f"\n{copy_spread(bench)}")


if __name__ == "__main__":
    main()
