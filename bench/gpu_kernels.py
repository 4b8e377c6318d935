"""How fast kernels run that are compiled at run time, as a fraction of a device-to-device copy, and beside CuPy's.

Measured as in bench/gpu.py, beside ElementwiseKernel and ReductionKernel of the same text. Then what a prepared run
costs the host, and the first use of a kernel in a process: with nothing cached, from disk, and in memory.
bench/first_use.py measures ours without a GPU.
"""

import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from ctypes import c_double, c_int64, c_size_t, c_void_p

import gpu
import report
from cpu import ROOT
from gpu import SAMPLES, Bench, calls_for, significant

HOST_ELEMENTS = 2**10
FIRST_USES = 5

CHOICE = "if (x - 2 > y) { z = x * y; } else { z = x + y; }"
ADAM = """
    m = 0.9f * m + 0.1f * g;
    v = 0.999f * v + 0.001f * g * g;
    w -= 0.01f * m / (sqrt(v) + 1e-8f);
"""
SUM = "x", "a + b", "y = a", "0"
WITHOUT_FMA = ("--fmad=false",)  # as ours, unless asked for


# --- on the GPU ------------------------------------------------------------------------------------------------------


def works(quick):
    """What is run: a name, its shape in words, whether it reduces, the kernel's texts, the arguments of a run, the
    inputs and the outputs (of each a shape, a dtype and what views it), and the bytes that a run has to move."""
    many, side = (2**24, 4096) if quick else (2**28, 16384)

    def flat(n, dtype="float32"):
        return (n,), dtype, None

    two = ("float32 x, float32 y", "float32 z", CHOICE)
    for n in (many, many - 1, 2**20):
        yield "two inputs", f"{n}", False, two, {}, [flat(n)] * 2, [flat(n)], 12 * n
    later = (many + 1,), "float32", lambda x: x[1:]
    yield "two inputs", f"{many}, from [1:]", False, two, {}, [later] * 2, [later], 12 * many
    halves = ("float16 x, float16 y", "float16 z", CHOICE)
    half = flat(many, "float16")
    yield "two inputs of float16", f"{many}", False, halves, {}, [half] * 2, [half], 6 * many
    adam = ("float32 g", "float32 w, float32 m, float32 v", ADAM)
    yield "Adam in place", f"{many}", False, adam, {}, [flat(many)], [flat(many)] * 3, 28 * many
    for rows, columns in (side, side), (side - 1, side - 3):
        words, matrix = f"{rows} x {columns}", ((rows, columns), "float32", None)
        count = rows * columns
        yield "a row to a matrix", words, False, two, {}, [matrix, flat(columns)], [matrix], 8 * count
        column = (rows, 1), "float32", None
        yield "a column to a matrix", words, False, two, {}, [matrix, column], [matrix], 8 * count
        turned = (columns, rows), "float32", lambda x: x.T
        yield "a matrix and one transposed", words, False, two, {}, [matrix, turned], [matrix], 12 * count
        for dtype in "float32", "float16":
            texts = (f"{dtype} x", "float32 y", *SUM)
            of, size = "" if dtype == "float32" else f" of {dtype}", 4 if dtype == "float32" else 2
            for axis, result in (0, (columns,)), (1, (rows,)), (None, ()):
                name = f"sum{of} over {'all' if axis is None else f'axis {axis}'}"
                source, target = ((rows, columns), dtype, None), (result, "float32", None)
                yield name, words, True, texts, {"axis": axis}, [source], [target], size * count
    rows, columns, texts = many // 16, 17, ("float32 x", "float32 y", *SUM)
    narrow = (rows, columns), "float32", None
    for axis, count in (0, columns), (1, rows):
        name, words = f"sum over axis {axis}", f"{rows} x {columns}"
        yield name, words, True, texts, {"axis": axis}, [narrow], [flat(count)], 68 * rows


class Work:
    """A kernel of ours and CuPy's on the same memory, in as many calls as a sample needs."""

    def __init__(self, bench, reduces, texts, options, inputs, outputs, bytes_):
        import kernels

        cp, self.calls, self.memory = bench.cp, calls_for(bytes_), []
        ours = (kernels.reduction if reduces else kernels.elementwise)(*texts, "ours")
        peer = cp.ReductionKernel if reduces else cp.ElementwiseKernel
        theirs = peer(*texts, "theirs", options=WITHOUT_FMA)

        def array(make, shape, dtype, view):
            memory = make(shape, "float32").astype(dtype, copy=False)
            return view(memory) if view else memory

        def positive(shape, dtype):
            return cp.abs(bench.random(shape, dtype))

        self.sets = []
        for _ in range(self.calls):
            given = [array(bench.random, *of) for of in inputs]
            # Several outputs are a state, which is read, too.
            results = [array(positive if len(outputs) > 1 else cp.zeros, *of) for of in outputs]
            self.sets.append((given, results))
        axes = {"axes": options["axis"]} if options else {}
        arguments = []
        for given, results in self.sets:
            tensors = [[kernels.of_cupy(x) for x in arrays] for arrays in (given, results)]
            needed = ours.workspace_bytes(*tensors, **axes)
            workspace = kernels.of_cupy(cp.empty(needed, "u1")) if needed else None
            arguments.append(ours.arguments(*tensors, ours.options(**axes, workspace=workspace)))
            self.memory.append((ours.kept, workspace))
        run, stream = kernels.lib.gc_kernel_run, c_void_p(bench.stream.ptr)

        def enqueue():
            for given in arguments:
                kernels.check(run(*given, stream))

        def enqueue_theirs():
            for given, results in self.sets:
                theirs(*given, *results, **options)

        self.ours, self.theirs, self.arguments = enqueue, enqueue_theirs, arguments

    def check(self, cp, what):
        """That the first call gives what CuPy's does, from the same results."""
        _, results = self.sets[0]
        before = [result.copy() for result in results]
        self.ours()
        mine = [result.copy() for result in results]
        for result, values in zip(results, before):
            result[...] = values
        self.theirs()
        for result, values in zip(results, mine):
            # Sums of random numbers, of another order.
            largest = max(1.0, float(cp.abs(result).max()))
            assert float(cp.abs(result - values).max()) <= 1e-4 * largest, f"{what}: not what CuPy gives"


def work_row(bench, kind, shape, reduces, texts, options, inputs, outputs, bytes_):
    bench.measure_yardsticks(1)
    work = Work(bench, reduces, texts, options, inputs, outputs, bytes_)
    work.check(bench.cp, f"{kind}, {shape}")
    samples, failures = bench.measure({"ours": work.ours, "cupy": work.theirs}, work.calls)
    row = {"kind": kind, "shape": shape, "bytes": bytes_, "calls": work.calls}
    return {**row, "seconds": samples, "failures": failures}


# --- the host ---------------------------------------------------------------------------------------------------------


def host(bench, calls):
    """Seconds a run of the host, of a kernel that is prepared."""
    import kernels

    n = HOST_ELEMENTS
    flat = (n,), "float32", None
    work = Work(bench, False, ("float32 x, float32 y", "float32 z", "z = x + y"), {}, [flat] * 2, [flat], 12 * n)
    kernel, inputs, n_inputs, outputs, n_outputs, options = work.arguments[0]
    work.ours()
    timer, found = bench.host, {}
    timer.kernel_host_seconds.argtypes = [
        c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p,
    ]  # fmt: skip
    synchronize = ctypes.cast(bench.driver.cuStreamSynchronize, c_void_p)

    def run(library, seconds):
        return timer.kernel_host_seconds(
            library.handle, len(seconds), seconds, kernel, ctypes.cast(inputs, c_void_p), n_inputs,
            ctypes.cast(outputs, c_void_p), n_outputs, options, c_void_p(bench.stream.ptr), synchronize,
        )  # fmt: skip

    # One library alone: the kernel is of it.
    seconds = (c_double * calls)()
    for _ in range(2):  # the first is to warm up
        kernels.check(run(bench.library, seconds))
    found["gc_kernel_run"] = [significant(s) for s in seconds]
    theirs = bench.cp.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = x + y", "theirs")
    (x, y), (z,) = work.sets[0]
    samples = []
    for i in range(calls // 4 + 20):
        if i % 64 == 0:
            bench.stream.synchronize()
        begin = time.perf_counter()
        theirs(x, y, z)
        samples.append(significant(time.perf_counter() - begin))
    found["cupy.ElementwiseKernel"] = samples[20:]
    return found


# --- the first use in a process ---------------------------------------------------------------------------------------

# Each in a process of its own, for both use the NVRTC that the process has loaded.
FIRST_USE = """
import sys, time
import cupy, kernels
# Nothing that CuPy would compile.
x = cupy.zeros(1024, "f4")
z = cupy.empty_like(x)
if sys.argv[2] == "in use":
    cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing").compile()
tensors = [kernels.of_cupy(x)], [kernels.of_cupy(z)]
make = kernels.elementwise if sys.argv[1] == "ours" else cupy.ElementwiseKernel
times, kept = [], []
for _ in range(2):
    cupy.cuda.Stream.null.synchronize()
    begin = time.perf_counter()
    kernel = make("float32 x", "float32 y", "y = x * 3 + 1", "first_use")
    kernel(*tensors) if sys.argv[1] == "ours" else kernel(x, z)
    cupy.cuda.Stream.null.synchronize()
    times.append(time.perf_counter() - begin)
    kept.append(kernel)
assert (z == 1).all()
print(*times)
"""


def first_uses(rounds):
    """Seconds until the first result of a kernel is there, and the second one's of the same text."""
    found = {}

    def use(words, folder, nvrtc):
        variables = {**os.environ, "PYTHONPATH": f"{ROOT}/tests/python:{os.environ.get('PYTHONPATH', '')}"}
        variables |= {"GRADCODEC_CACHE_DIR": f"{folder}/ours", "CUPY_CACHE_DIR": f"{folder}/cupy"}
        for whose in "ours", "cupy":
            command = [sys.executable, "-c", FIRST_USE, whose, nvrtc]
            done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
            first, second = (significant(float(word)) for word in done.stdout.split())
            found.setdefault(words, {}).setdefault(whose, []).append(first)
            found.setdefault("in memory", {}).setdefault(whose, []).append(second)

    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            use("nothing cached", folder, "not in use")
            use("from disk", folder, "not in use")
        with tempfile.TemporaryDirectory() as folder:
            use("nothing cached, NVRTC in use", folder, "in use")
    return found


def main():
    options = gpu.arguments(__doc__, pathlib.Path(ROOT / "build/bench/gpu_kernels.json"))
    os.environ["GRADCODEC_LIBRARY"] = str(pathlib.Path(options.library).absolute())
    sys.path.append(str(ROOT / "tests" / "python"))
    only = options.only or ""
    first = {} if options.only else first_uses(1 if options.quick else FIRST_USES)
    bench = Bench(options.host, options.library, None)
    pool = bench.cp.get_default_memory_pool()
    results = {"about": {**gpu.about(bench), "of": "kernels", "quick": options.quick}, "first use": first}
    results["clocks"] = [gpu.clocks()]
    bench.measure_yardsticks(SAMPLES)
    results["works"], results["host"], results["yardsticks"] = [], {}, bench.yardsticks
    for work in works(options.quick):
        if work[0].startswith(only):
            print(*work[:2], file=sys.stderr)
            results["works"].append(work_row(bench, *work))
            pool.free_all_blocks()
    if not options.only:
        results["host"] = host(bench, 2000)
    bench.measure_yardsticks(5)
    results["clocks"].append(gpu.clocks())
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results) + "\n")
    print(report.kernel_tables(results))
    print(report.targets() or "")
    print(f"\n{gpu.copy_spread(bench)}")


if __name__ == "__main__":
    main()
