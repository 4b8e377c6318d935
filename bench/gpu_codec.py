"""How fast the GPU encodes, decodes and reduces: as a fraction of a device-to-device copy, beside DeepSpeed's chain.

It measures as bench/gpu.py does, whose yardsticks and rules these are; bench/codec.py says how many bytes count. Beside
encoding stands what DeepSpeed's worker did, in torch and CuPy (bench/deepspeed_worker.py), where torch is there. A row
that fails is recorded with its reason, and the others go on. `make gpu-bench-codec` runs it. The samples go to a JSON
file, of which bench/report.py makes tables.
"""

import ctypes
import itertools
import json
import sys
import time
import types
from ctypes import POINTER, byref, c_int32, c_int64, c_size_t, c_void_p

import numpy as np

import deepspeed_worker
import gpu
import report
from codec import ALL_KINDS, COMPRESS, ENCODE, STAGE_KINDS, Call, Codec, Work
from cpu import ROOT, DLTensor, Library

LARGE = 300 * 2**20
SIZES = [2**k for k in range(10, 25, 2)]
QUICK_SIZES = [2**12, 2**20]
SIZE_KINDS = ["encode float32", "encode bfloat16", "decode float32"]
RAGGED_KINDS = [*SIZE_KINDS, "encode bfloat16, float32 errors", "decode bfloat16", "plain float32"]
SEGMENT_KINDS = ["encode float32", "encode bfloat16", "decode float32"]
SEGMENT_KINDS += [f"blocks {codec} {rest}" for codec in ("int8", "int4") for rest in ("encode float32, no errors", "decode float32")]
RAGGED_KINDS += [
    f"blocks {codec} {rest}"
    for codec in ("bf16", "mxfp8", "int8", "int4", "mxfp4")
    for rest in ("encode float32, float32 errors", "encode bfloat16, no errors", "decode float32", "decode bfloat16")
]
# A model's layers: sizes between 2^14 and 2^20, as many between each power of two and the next.
SEGMENTS = [int(size) for size in 2 ** np.random.default_rng(0).uniform(14, 20, 200)]
ALL_REDUCE_SIZES = [2**10, 2**20]
MOST_CALLS = 64  # in a sample: each has a codec, and memory that the driver allocates for it


class Bench(gpu.Bench):
    device_type = gpu.CUDA
    describe = staticmethod(gpu.describe)

    def __init__(self, options):
        super().__init__(options.host, options.library, options.against)
        self.np, self.timer, self.works = self.cp, self.host, []
        if self.against and not hasattr(self.against.functions, "gc_codec_create"):
            print(f"{options.against}: of before codecs, so not timed", file=sys.stderr)
            self.against = None
        try:
            import torch

            self.torch = torch
            self.torch_stream = torch.cuda.ExternalStream(self.stream.ptr)
        except Exception as error:
            print(f"no torch, so nothing of DeepSpeed's: {error}", file=sys.stderr)
            self.torch = None

    # What a Work asks of its place.

    def empty(self, shape, dtype):
        return self.cp.empty(shape, "uint16" if dtype == "bfloat16" else dtype)

    def call(self, library, call):
        stream = c_void_p(self.stream.ptr)
        self.check(self.host.call_codecs(library.handle, c_int64(1), byref(call), stream), library)

    def wait(self):
        self.stream.synchronize()

    # Contenders.

    def work(self, kind, groups, off=0):
        """What enqueues a call for each group; its attribute `memory` has the Work of each library."""
        first = Work(self, self.library, kind, groups, off)
        self.works.append(first)
        works = {self.library: first}
        if self.against:
            works[self.against] = Work(self, self.against, kind, groups, off, like=first)
            self.works.append(works[self.against])
        return self.calls_of(works, len(groups))

    def calls_of(self, works, count):
        """The first so many calls."""

        def of(library):
            arguments = library.handle, c_int64(count), works[library].calls, c_void_p(self.stream.ptr)
            return lambda: self.check(self.host.call_codecs(*arguments), library)

        return self.kept(works, of(self.library), self.against and of(self.against))

    def release(self):
        """Frees what was made for a row."""
        try:
            self.wait()
        finally:
            while self.works:
                self.works.pop().free()
            self.cp.get_default_memory_pool().free_all_blocks()
            if self.torch:
                self.torch.cuda.empty_cache()

    def chains(self, work):
        """DeepSpeed's worker on the gradient of a first call, as contenders; nothing without torch."""
        torch = self.torch
        kind = work.kind
        alike = kind.function in (ENCODE, COMPRESS) and (kind.dtype, kind.world, kind.codec) == ("float32", 1, "onebit")
        if not torch or not alike:
            return {}
        gradient = work.values[0][0]

        def of(name):
            with torch.cuda.stream(self.torch_stream):
                shared = torch.from_dlpack(gradient)
                worker = deepspeed_worker.Worker(torch, gradient.size, "cuda", deepspeed_worker.cupy_pack)
                step = getattr(worker, name)
                bits, _ = step(shared)
                assert bool((bits == self.cp.packbits(~(gradient < 0))).all()), f"{name}: bits are not the signs"

            def enqueue():
                with torch.cuda.stream(self.torch_stream):
                    step(shared)

            return enqueue

        return {"deepspeed": of("step"), "lean": of("lean")}


def calls_for(kind, elements):
    return min(MOST_CALLS, gpu.calls_for(int(ALL_KINDS[kind].bytes * elements) + 1))


def attempt(failures, name, function):
    """Its contenders, or none and why."""
    try:
        return function()
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"[:200]
        return {}


# --- rows -------------------------------------------------------------------------------------------------------------


def large_row(bench, kind, elements):
    bench.measure_yardsticks(1)
    calls, failures = calls_for(kind, elements), {}
    ours = bench.work(kind, [[elements]] * calls)
    work = ours.memory[bench.library]
    work.check()
    chains = attempt(failures, "deepspeed", lambda: bench.chains(work))
    samples, failed = bench.measure({"ours": ours, **chains}, calls)
    row = {"kind": kind, "elements": elements, "bytes": work.bytes // calls, "calls": calls}
    return {**row, "seconds": samples, "failures": failures | failed}


def segments_row(bench, kind, segments):
    """Many tensors: in one call, and a codec and a call for each."""
    bench.measure_yardsticks(1)
    ours, separate = bench.work(kind, [segments]), bench.work(kind, [[n] for n in segments])
    work = ours.memory[bench.library]
    work.check()
    samples, failures = bench.measure({"ours": ours, "separate": separate}, 1)
    row = {"kind": kind, "elements": sum(segments), "segments": len(segments), "bytes": work.bytes, "calls": 1}
    return {**row, "seconds": samples, "failures": failures}


def size_row(bench, kind, elements):
    """Calls back to back, the same calls in a graph; one call alone, and DeepSpeed's chain alone."""
    bench.measure_yardsticks(1)
    calls, failures = calls_for(kind, elements), {}
    ours = bench.work(kind, [[elements]] * calls)
    work = ours.memory[bench.library]
    work.check()
    graph = attempt(failures, "graph", lambda: {"graph": bench.in_graph(ours)})
    samples, failed = bench.measure({"ours": ours, **graph}, calls)
    chains = attempt(failures, "deepspeed", lambda: bench.chains(work))
    alone, failed_alone = bench.measure({"alone": bench.calls_of(ours.memory, 1), **chains}, 1)
    row = {"kind": kind, "elements": elements, "bytes": work.bytes // calls, "calls": calls}
    return {**row, "seconds": samples | alone, "failures": failures | failed | failed_alone}


def ragged_row(bench, kind, sizes):
    """Whole tiles beside what is not, and beside tensors that begin one element beyond a cache line: all in turns."""
    even, odd = sizes
    calls = calls_for(kind, even)
    works = {
        "ours": bench.work(kind, [[even]] * calls),
        "odd": bench.work(kind, [[odd]] * calls),
        "off": bench.work(kind, [[even]] * calls, off=1),
    }
    for work in works.values():
        work.memory[bench.library].check()
    samples, failures = bench.measure(works, calls)
    whole = works["ours"].memory[bench.library].bytes // calls
    row = {"kind": kind, "elements": even, "odd": odd, "bytes": whole, "calls": calls}
    return {**row, "seconds": samples, "failures": failures}


def host(bench, calls, failures, only):
    """Seconds a call of the host."""
    synchronize = ctypes.cast(bench.driver.cuStreamSynchronize, c_void_p)
    one = [gpu.HOST_ELEMENTS]
    found = {}
    cases = {
        "gc_codec_encode": ("encode float32", one),
        f"gc_codec_encode, {len(SEGMENTS)} segments": ("encode float32", SEGMENTS),
        "gc_codec_decode": ("decode float32", one),
        "gc_codec_reduce": ("reduce 4 float32", one),
        "gc_onebit_compress_into": ("plain float32", one),
        "gc_codec_encode, int8": ("blocks int8 encode float32, float32 errors", one),
        f"gc_codec_encode, int8, {len(SEGMENTS)} segments": ("blocks int8 encode float32, float32 errors", SEGMENTS),
        "gc_codec_decode, int8": ("blocks int8 decode float32", one),
        "gc_codec_reduce, int8": ("blocks int8 reduce 4", one),
    }
    cases = {name: case for name, case in cases.items() if case[0].startswith(only)}
    for name, (kind, segments) in cases.items():

        def measured():
            works = bench.work(kind, [segments]).memory
            bench.wait()

            def seconds_of(library, seconds):
                what = works[library].calls, c_void_p(bench.stream.ptr), synchronize
                return bench.host.codec_host_seconds(library.handle, c_int64(calls), seconds, *what)

            gpu.host_seconds(bench, found, name, calls, seconds_of)

        attempt(failures, name, measured)
        attempt(failures, f"{name}, freed", bench.release)
    return found


class AllReduce:
    """One of a single rank, and a tensor for it."""

    def __init__(self, place, library, over_nccl, elements):
        make = place.timer.make_all_reduce
        make.restype = c_void_p
        self.place, self.library = place, library
        if not hasattr(library.functions, "gc_allreduce_run"):
            raise RuntimeError(f"{library.path}: of before all-reduces")
        options = map(c_int32, (place.device_type, over_nccl))
        handle = make(library.handle, *options, c_int64(elements))
        if not handle:
            raise RuntimeError(library.last_error())
        self.handle = c_void_p(handle)
        self.memory = place.random((elements,), "float32")
        self.values = place.describe(self.memory)

    def run(self, stream):
        status = self.place.timer.run_all_reduce(self.library.handle, self.handle, byref(self.values), stream)
        if status:
            raise RuntimeError(self.library.last_error())

    def host_seconds(self, calls, seconds, stream, synchronize):
        what = self.handle, byref(self.values), stream, synchronize
        return self.place.timer.all_reduce_host_seconds(self.library.handle, c_int64(calls), seconds, *what)

    def free(self):
        self.place.timer.free_all_reduce(self.library.handle, self.handle)


def count_nodes(driver, stream, enqueue):
    """How many kernels, copies and others `enqueue` puts on a stream: the nodes of a graph of it."""
    graph, count = c_void_p(), c_size_t()

    def done(code):
        if code:
            raise RuntimeError(f"the driver answers {code}")

    done(driver.cuStreamBeginCapture_v2(stream, c_int32(1)))  # of this thread
    try:
        enqueue()
    finally:
        code = driver.cuStreamEndCapture(stream, byref(graph))
    done(code)
    done(driver.cuGraphGetNodes(graph, None, byref(count)))
    nodes, found = (c_void_p * max(1, count.value))(), {}
    if count.value:
        done(driver.cuGraphGetNodes(graph, nodes, byref(count)))
    for node in nodes[: count.value]:
        kind = c_int32()
        done(driver.cuGraphNodeGetType(c_void_p(node), byref(kind)))
        name = {0: "kernels", 1: "copies", 2: "sets"}.get(kind.value, "others")
        found[name] = found.get(name, 0) + 1
    done(driver.cuGraphDestroy(graph))
    return found


def all_reduces(bench, calls, results):
    """The host's seconds of gc_allreduce_run() of one rank, and what it enqueues."""
    synchronize = ctypes.cast(bench.driver.cuStreamSynchronize, c_void_p)
    stream = c_void_p(bench.stream.ptr)
    # torch brings an NCCL; a group cannot be captured, so that its nodes are not counted.
    for over, elements in itertools.product(("NCCL", "a group") if bench.torch else ("a group",), ALL_REDUCE_SIZES):
        name = f"gc_allreduce_run over {over}, {report.count(elements)}"

        def measured():
            made = {}
            try:
                for library in filter(None, (bench.library, bench.against)):
                    made[library] = AllReduce(bench, library, over == "NCCL", elements)
                bench.wait()

                def seconds_of(library, seconds):
                    return made[library].host_seconds(calls, seconds, stream, synchronize)

                gpu.host_seconds(bench, results["host"], name, calls, seconds_of)
                if over == "NCCL":
                    run = made[bench.library].run
                    launch = f"gc_allreduce_run of {report.count(elements)} elements, one rank over {over}"
                    results["launches"][launch] = count_nodes(bench.driver, stream, lambda: run(stream))
            finally:
                bench.wait()
                for one in made.values():
                    one.free()
            return {}

        attempt(results["failed"], name, measured)


# --- the first call of a process --------------------------------------------------------------------------------------


def first_call(path, host_path):
    """In a process of its own: as gpu.first_call(), with a codec and without gc_prepare."""
    times, lap = gpu.laps()
    host = ctypes.CDLL(str(host_path))
    library = Library(host, path)
    lap("load the library")
    place = types.SimpleNamespace(timer=host, device_type=gpu.CUDA)
    codec = Codec(place, library, "float32", 0, [gpu.HOST_ELEMENTS])
    lap("gc_codec_create")

    def empty(bits, code, count):
        tensor, dtype = c_void_p(), c_int32(code | bits << 8 | 1 << 16)
        shape = (c_int64 * 1)(count)
        status = library.functions.gc_tensor_empty(*gpu.Bench.device(), dtype, 1, shape, byref(tensor))
        assert status == 0, library.last_error()
        return ctypes.cast(tensor, POINTER(DLTensor))  # which a managed tensor begins with

    gradient, payload = empty(32, 2, gpu.HOST_ELEMENTS), empty(8, 1, codec.payload_bytes)
    lap("gc_tensor_empty, twice")
    call = Call(ENCODE, codec.handle, (POINTER(DLTensor) * 1)(gradient), 1, payload)
    assert host.call_codecs(library.handle, c_int64(1), byref(call), None) == 0, library.last_error()
    lap("gc_codec_encode")
    print(json.dumps(times))


def main():
    options = gpu.arguments(__doc__, ROOT / "build/bench/gpu_codec.json")
    if options.first_call:
        return first_call(options.first_call, options.host)

    everything, quick, only = options.only is None, options.quick, options.only or ""
    results = {"about": {}, "host": {}, "launches": {}, "first call": {}, "failed": {}}
    if everything:
        # First: these processes then do not wait for the memory that this one is about to take.
        rounds = 1 if quick else 3
        calls = attempt(results["failed"], "first call", lambda: gpu.first_calls(__file__, options, rounds))
        results["first call"] = calls
    bench = Bench(options)
    results["about"] = {**gpu.about(bench), "of": "codec", "quick": quick}
    results["about"]["torch"] = bench.torch and bench.torch.__version__
    results["clocks"] = [gpu.clocks()]
    results["yardsticks"] = bench.yardsticks
    bench.measure_yardsticks(gpu.SAMPLES)
    options.output.parent.mkdir(parents=True, exist_ok=True)

    def save():
        """After every row: what was measured stays when the run is cut short."""
        options.output.write_text(json.dumps(results) + "\n")

    def measure(group, row, kinds, cases):
        begin = time.perf_counter()
        results[group] = []
        for kind, case in itertools.product(kinds, cases):
            if not kind.startswith(only):
                continue
            try:
                found = row(bench, kind, case)
            except Exception as error:
                found = {"kind": kind, "failed": f"{type(error).__name__}: {error}"[:400]}
                found["elements"] = case if isinstance(case, int) else sum(case) if group == "segments" else case[0]
                print(f"{group}, {kind}, {found['elements']}: {found['failed']}", file=sys.stderr)
            results[group].append(found)
            attempt(results["failed"], f"{group}, {kind}: release", lambda: bench.release() or {})
            save()
        print(f"{group}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)

    measure("large", large_row, [kind for kind in ALL_KINDS if kind not in STAGE_KINDS], [LARGE])
    measure("stages", large_row, STAGE_KINDS, [LARGE])
    measure("segments", segments_row, SEGMENT_KINDS, [SEGMENTS])
    n_calls = gpu.HOST_CALLS // 4 if quick else gpu.HOST_CALLS
    if everything or only == "blocks":
        results["host"] = host(bench, n_calls, results["failed"], only)
        save()
    if everything:
        all_reduces(bench, n_calls, results)
        save()
    measure("sizes", size_row, SIZE_KINDS, QUICK_SIZES if quick else SIZES)
    pairs = gpu.QUICK_ODD_SIZES if quick else gpu.ODD_SIZES
    measure("ragged", ragged_row, RAGGED_KINDS, pairs.items())
    attempt(results["failed"], "yardsticks", lambda: bench.measure_yardsticks(5) or {})
    results["clocks"].append(gpu.clocks())
    save()

    print(report.gpu_codec_tables(results))
    print(report.targets() or "")
    if options.against:
        print(report.against(results))
    print(f"\n{gpu.copy_spread(bench)}")


if __name__ == "__main__":
    main()
