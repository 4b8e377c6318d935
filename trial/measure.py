"""Old beside new in one process, on the same memory, taking turns: fractions of a copy, and whether results have the same bits."""
import importlib, math, os, statistics, sys, time
from ctypes import c_void_p
begun = time.monotonic()
HERE = os.path.dirname(os.path.abspath(__file__))
FAKE = os.environ.get("FAKE") == "1"
os.environ["GRADCODEC_CACHE"] = "0"
sys.path.insert(0, os.path.join(HERE, "tests", "python"))
if FAKE:
    import numpy as cp
    SHRINK = 2**16
else:
    import cupy as cp
    SHRINK = 1

def load(path):
    os.environ["GRADCODEC_LIBRARY"] = os.path.join(HERE, path)
    for name in "capi", "kernels":
        sys.modules.pop(name, None)
    return importlib.import_module("kernels")

LIBRARIES = {"old": load("old.so"), "new": load("try.so")}

if FAKE:
    class Stream:
        ptr = None
    stream = Stream()
    sync = lambda: None
    def timed(calls):
        at = time.perf_counter()
        for call in calls: call()
        return (time.perf_counter() - at) / len(calls)
    free = lambda: None
    def random(n): return np_random.standard_normal(n).astype("f4")
    np_random = cp.random.default_rng(1)
    tensor = lambda k, x: k.on_card(x)
    def copy(): return 1e9
else:
    stream = cp.cuda.Stream(non_blocking=True); stream.use()
    start, end = cp.cuda.Event(), cp.cuda.Event()
    sync = lambda: cp.cuda.Device().synchronize()
    scratch = cp.zeros(2**26, "f4")
    def timed(calls):
        global scratch
        scratch += 1  # flushes the cache, and keeps the device busy while calls are enqueued
        scratch += 1
        start.record(stream)
        for call in calls: call()
        end.record(stream); end.synchronize()
        return cp.cuda.get_elapsed_time(start, end) / 1e3 / len(calls)
    free = lambda: cp.get_default_memory_pool().free_all_blocks()
    cp.random.seed(1)
    def random(n): return cp.random.standard_normal(n, dtype=cp.float32)
    tensor = lambda k, x: k.of_cupy(x)
    def copy():
        one, two = (cp.ones(2**30, "u1") for _ in range(2))
        call = lambda: cp.cuda.runtime.memcpyAsync(two.data.ptr, one.data.ptr, 2**30, 3, stream.ptr)
        timed([call])
        return 2 * 2**30 / statistics.median(timed([call] * 4) for _ in range(7))

CHOICE = "if (x - 2 > y) { z = x * y; } else { z = x + y; }"
two = ("float32 x, float32 y", "float32 z", CHOICE)
add = ("T x, T y", "T z", "z = x + y")
adam = ("float32 g", "float32 w, float32 m, float32 v", "m = 0.9f * m + 0.1f * g; v = 0.999f * v + 0.001f * g * g; w -= 0.01f * m / (sqrt(v) + 1e-8f);")
SUM = ("x", "a + b", "y = a", "0")
f, h, u, d = "float32", "float16", "uint8", "float64"
if FAKE: A, B, S, N, K = 163, 161, 164, 2**14, 2**10
else: A, B, S, N, K = 16383, 16381, 16384, 2**28, 1
T = lambda x: x.T
few = lambda n: max(n // K, 3)

TILES = {"8_5": (8, 5), "4_5": (4, 5), "8_6": (8, 6), "16_5": (16, 5), "16_6": (16, 6)}
def variants(names):
    found = [("old", "old", {})]
    for name in names:
        if name.startswith("short"): found.append((name, "new", {"TRY_SHORT": name[5:]}))
        else: found.append((name, "new", {"TRY_ROUNDS": str(TILES[name][0]), "TRY_TURNED": str(TILES[name][1])}))
    return found
BOTH, ROW, ALL, SHORT = ["8_5"], ["8_5", "4_5", "16_5"], list(TILES), ["short8", "short4"]

def works():
    m, n = ((A, B), f, None), A * B
    yield "x + y.T f32 odd", two, [m, ((B, A), f, T)], [m], 12 * n, {}, ALL
    yield "row f32 odd", two, [m, ((B,), f, None)], [m], 8 * n, {}, ROW
    yield "column f32 odd", two, [m, ((A, 1), f, None)], [m], 8 * n, {}, ROW
    q = ((S, S), f, None)
    yield "x + y.T f32", two, [q, ((S, S), f, T)], [q], 12 * S * S, {}, ALL
    for r, c in (few(2**24), 17), (few(2**26), 3), (few(2**24), 7), (few(2**23), 31):
        yield f"sum rows {r}x{c}", ("float32 x", "float32 y", *SUM), [((r, c), f, None)], [((r,), f, None)], 4 * r * c + 4 * r, {"axes": 1}, SHORT
    yield f"sum rows f16 {few(2**24)}x17", ("float16 x", "float32 y", *SUM), [((few(2**24), 17), h, None)], [((few(2**24),), f, None)], few(2**24) * 38, {"axes": 1}, SHORT
    yield "two", two, [((N,), f, None)] * 2, [((N,), f, None)], 12 * N, {}, BOTH
    yield "two from [1:]", two, [((N + 1,), f, lambda x: x[1:])] * 2, [((N + 1,), f, lambda x: x[1:])], 12 * N, {}, BOTH
    yield "two f16", ("float16 x, float16 y", "float16 z", CHOICE), [((N,), h, None)] * 2, [((N,), h, None)], 6 * N, {}, BOTH
    yield "Adam", adam, [((N,), f, None)], [((N,), f, None)] * 3, 28 * N, {}, BOTH
    yield "row f32", two, [q, ((S,), f, None)], [q], 8 * S * S, {}, BOTH
    yield "column f32", two, [q, ((S, 1), f, None)], [q], 8 * S * S, {}, BOTH
    for r, c, what in (S, S, ""), (A, B, " odd"):
        for axis in 0, 1, None:
            out = ((), (c,), (r,))[0 if axis is None else axis + 1]
            options = {} if axis is None else {"axes": axis}
            yield f"sum {axis}{what}", ("float32 x", "float32 y", *SUM), [((r, c), f, None)], [(out, f, None)], 4 * r * c, options, ["short8"]
    yield "row f16 odd", add, [((A, B), h, None), ((B,), h, None)], [((A, B), h, None)], 4 * n, {}, ROW
    yield "x + y.T f16 odd", add, [((A, B), h, None), ((B, A), h, T)], [((A, B), h, None)], 6 * n, {}, ALL
    yield "x + y.T u8 odd", add, [((A, B), u, None), ((B, A), u, T)], [((A, B), u, None)], 3 * n, {}, ALL
    a, b = few(8191), few(8193)
    yield "x + y.T f64 odd", add, [((a, b), d, None), ((b, a), d, T)], [((a, b), d, None)], 24 * a * b, {}, ALL
    for r, c in (few(2**24), 17), (few(2**26), 3), (few(2**21), 129), (3, few(2**26) + 1), (1001, 1003):
        yield f"row {r}x{c}", two, [((r, c), f, None), ((c,), f, None)], [((r, c), f, None)], 8 * r * c, {}, ROW
    m = ((few(4096), 256, 49), f, None)
    yield "bias 4096x256x49", two, [m, ((256, 1), f, None)], [m], 8 * few(4096) * 256 * 49, {}, ROW
    yield "x + y.T 1001x1003", two, [((1001, 1003), f, None), ((1003, 1001), f, T)], [((1001, 1003), f, None)], 12 * 1001 * 1003, {}, ALL
    a = few(129)
    yield "x + y(2,0,1) 129x1029x1031", two, [((a, 1029 // min(K, 30), 1031 // min(K, 30)), f, None), ((1029 // min(K, 30), 1031 // min(K, 30), a), f, lambda x: x.transpose(2, 0, 1))], [((a, 1029 // min(K, 30), 1031 // min(K, 30)), f, None)], 12 * a * 1029 * 1031, {}, ALL

def make(shape, dtype, view, positive=False):
    count = math.prod(shape)
    base = random(min(max(count, 1), 2**24))
    if dtype == u: base = (base * 10).astype("i4")
    if positive: base = abs(base)
    base = base.astype(dtype)
    x = cp.empty(count, base.dtype)
    for first in range(0, count, base.size):
        x[first : first + base.size] = base[: count - first]
    x = x.reshape(shape)
    return view(x) if view else x

def bits(x):
    return cp.ascontiguousarray(x).reshape(-1).view(f"u{x.itemsize}")

best, table, failures = copy(), [], 0
LABELS = ["old", *TILES, "short8", "short4"]
print(f"copy {best / 1e9:.0f} GB/s\n{'of the copy':28}" + "".join(f"{label:>8}" for label in LABELS), flush=True)
for name, texts, inputs, outputs, moved, options, names in works():
    if time.monotonic() - begun > (600 if FAKE else 72):
        print("out of time before", name); break
    reduces = len(texts) > 3
    given, results = [make(*x) for x in inputs], [make(*x, len(outputs) > 1) for x in outputs]
    before = [x.copy() for x in results]
    expected, calls, kept = None, {}, []
    for label, library, environment in variants(names):
        os.environ.update(environment)
        k = LIBRARIES[library]
        kernel = (k.reduction if reduces else k.elementwise)(*texts, "ours")
        tensors = [[tensor(k, x) for x in xs] for xs in (given, results)]
        needed = kernel.workspace_bytes(*tensors, **options) if reduces else 0
        memory = cp.empty(needed + 16, "u1") if needed else None
        workspace = None
        if needed:
            first = -(memory.ctypes.data if FAKE else memory.data.ptr) % 16
            workspace = tensor(k, memory[first : first + needed])
        arguments = kernel.arguments(*tensors, kernel.options(**options, workspace=workspace))
        kept.append((kernel, kernel.kept, tensors, memory, workspace))
        call = lambda k=k, arguments=arguments, environment=environment: k.check(k.lib.gc_kernel_run(*arguments, c_void_p(stream.ptr)))
        for x, value in zip(results, before): x[...] = value
        call(); sync()
        got = [bits(x).copy() for x in results]
        if expected is None: expected = got
        elif not all(bool((one == other).all()) for one, other in zip(got, expected)):
            failures += 1
            print("DIFFERENT BITS:", name, label, flush=True)
        calls[label] = (call, environment)
        del got
    seconds = {label: [] for label in calls}
    count = max(3, min(40, 2**30 // moved))
    for _ in range(1 if FAKE else 5):
        for label, (call, environment) in calls.items():
            os.environ.update(environment)  # the launch asks for it, too
            seconds[label].append(timed([call] * (1 if FAKE else count)))
    row = {label: moved / statistics.median(values) / best for label, values in seconds.items()}
    print(f"{name:28}" + "".join(f"{row[label]:8.3f}" if label in row else f"{'-':>8}" for label in LABELS), flush=True)
    del given, results, before, expected, calls, kept, tensors, memory, workspace, call
    free()
print(f"copy at the end {copy() / 1e9:.0f} GB/s, {failures} differ, {time.monotonic() - begun:.0f} s")
