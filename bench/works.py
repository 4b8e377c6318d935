"""Rows that bench/cpu.py and bench/gpu.py time: bits, layouts, copies, codecs and compiled kernels, on either device.

A Work is one row: the bytes that a call reads and writes, and `make()`, which returns one set of memory (a One). A One
returns a Call for each library; calls of two libraries use the same memory, and must write the same bytes.
"""

import ctypes
import functools
import math
from collections import namedtuple
from ctypes import POINTER, byref, c_int64, c_void_p, pointer

from common import CPU, DTYPES, c, count, described, timer

BIG, AXIS_NONE = 0, -(2**31)
FLOAT32_ERRORS, BFLOAT16_ERRORS, NO_ERRORS = range(3)  # gc_error
HEADER = 64

Work = namedtuple("Work", "group kind case bytes make")


class Place:
    """Device of arrays. `np`: NumPy or CuPy; `device_type`: DLPack's number; `stream`: a handle or None; `empty(shape,
    dtype)` makes an array that begins at a cache line."""

    stream = None

    def __init__(self, libraries):
        self.library, self.timer = libraries[0], timer()

    def tensor(self, array, dtype):
        return described(array, dtype, self.device_type)

    def random(self, shape, dtype):
        """Returns random elements: a block of them, repeated."""
        import numpy

        array, rng = self.empty(shape, dtype), numpy.random.default_rng(1)
        size = min(array.size, 2**22)
        if dtype == "bfloat16":
            block = (rng.standard_normal(size, dtype=numpy.float32).view(numpy.uint32) >> 16).astype(numpy.uint16)
        elif dtype.startswith(("float", "complex")):
            block = rng.standard_normal(size, dtype=numpy.float32)
        else:
            block = rng.integers(0, 256 if dtype in ("uint8", "uint16") else 2, size)
        block, flat = self.np.asarray(block).astype(array.dtype), array.reshape(-1)
        for first in range(0, array.size, size):
            flat[first : first + size] = block[: array.size - first]
        return array

    def run(self, library, call):
        library.check(self.timer.run_calls(1, byref(call)))
        self.wait()

    def wait(self):
        pass

    def copy_peers(self, src, dst, source, target):
        return {}

    def kernel_peer(self, texts, axes, given, results):
        return None


def same_bytes(place, one, calls, what):
    """Checks that the calls of all libraries write the same, and what NumPy or CuPy gives."""
    np, found = place.np, []
    for library, call in calls.items():
        for result in one.results:
            result[...] = 0
        place.run(library, call)
        found.append([result.copy() for result in one.results])
    if one.expected and one.results and (place.device_type == CPU or one.results[0].size <= 2**26):
        assert np.array_equal(found[0][0], one.expected()), f"{what}: not what {place.name} gives"
    for other in found[1:]:
        for mine, theirs in zip(found[0], other):
            same = np.array_equal(mine.ravel().view("u1"), theirs.ravel().view("u1"))
            assert same, f"{what}: the two builds give different bytes"


class One:
    """`call(library)` returns a Call. `results`: the arrays that it writes. `expected`: computes the first of them."""

    def __init__(self, call, results, expected=None, peers=None, close=lambda: None):
        self.call, self.results, self.expected, self.peers, self.close = call, results, expected, peers or {}, close


def itemsize(dtype):
    return DTYPES[dtype][1] // 8


# --- bits -------------------------------------------------------------------------------------------------------------

VERBS = [("pack", "bool"), ("pack", "int32"), ("signs", "float32"), ("signs", "bfloat16"), ("unpack", "uint8"),
         ("unpack", "float32")]  # fmt: skip


def bits(place, sizes):
    """Yields rows of contiguous elements; for 2^20 also an odd number, and elements one beyond a cache line."""
    for verb, dtype in VERBS:
        for n in sizes:
            for off, odd in ((0, 0), (1, 0), (0, 1)) if n == 2**20 else ((0, 0),):
                case = f"{count(n)}{' from [1:]' if off else ''}{' less 1' if odd else ''}"
                memory, view = (n - odd + off,), lambda memory, off=off: memory[off:]
                make = functools.partial(bits_of, place, verb, dtype, memory, view, AXIS_NONE)
                yield Work("bits", f"{verb} {dtype}", case, (n - odd) * itemsize(dtype) + -(-(n - odd) // 8), make)


# The shape of the memory of a matrix, the view of it, memory touched for each element, the axis packed along.
LAYOUTS = {
    "along axis 0": (lambda shape: shape, lambda memory: memory, 1, 0),
    "along axis 1": (lambda shape: shape, lambda memory: memory, 1, 1),
    "transposed": (lambda shape: shape[::-1], lambda memory: memory.T, 1, AXIS_NONE),
    "every other": (lambda shape: (2 * math.prod(shape),), lambda memory: memory[::2], 2, AXIS_NONE),
    "reversed": (lambda shape: (math.prod(shape),), lambda memory: memory[::-1], 1, AXIS_NONE),
    "rows of a wider matrix": (lambda shape: (shape[0], shape[1] + 64), lambda memory: memory[:, :-64], 1, AXIS_NONE),
}


def layouts(place, shapes):
    for name, (memory, view, touched, axis) in LAYOUTS.items():
        for verb, dtype in VERBS:
            if dtype == "bfloat16" or (verb == "signs" and axis != AXIS_NONE):
                continue
            for shape in shapes:
                # A cache line that is written in part is read, too.
                lines = 2 * touched if verb == "unpack" and touched > 1 else touched
                moved = math.prod(shape) * (itemsize(dtype) * lines + 1 / 8)
                make = functools.partial(bits_of, place, verb, dtype, memory(shape), view, axis)
                yield Work("strided bits", f"{verb} {dtype} {name}", f"{shape[0]} x {shape[1]}", math.ceil(moved), make)


def bits_of(place, verb, dtype, memory, view, axis):
    np, unpacks = place.np, verb == "unpack"
    elements = view((place.empty if unpacks else place.random)(memory, dtype))
    if axis == AXIS_NONE:
        shape = 1, -(-elements.size // 8)
        function = "gc_pack_signs_into" if verb == "signs" else f"gc_{verb}_chunks_into"
    else:
        shape = tuple(-(-n // 8) if d == axis else n for d, n in enumerate(elements.shape))
        function = f"gc_{verb}_bits_into"
    packed = (place.random if unpacks else place.empty)(shape, "uint8")
    ours, theirs = place.tensor(elements, dtype), place.tensor(packed, "uint8")
    tensors = [theirs, ours] if unpacks else [ours, theirs]
    given = [tensors[0], *([axis] if axis != AXIS_NONE else []), BIG, tensors[1], place.stream]
    along = {} if axis == AXIS_NONE else {"axis": axis}

    def expected(cast=True):
        if not unpacks:
            truth = ~(elements < 0) if verb == "signs" else elements
            return np.packbits(truth if along else truth.reshape(-1), **along).reshape(packed.shape)
        found = np.unpackbits(packed if along else packed.reshape(-1), **along)
        found = found[tuple(map(slice, elements.shape))] if along else found[: elements.size].reshape(elements.shape)
        return found.astype(elements.dtype, copy=False) if cast else found

    def unpack_into_strided():
        elements[...] = expected(cast=False)

    on_cpu, is_contiguous = place.name == "numpy", elements.flags.c_contiguous
    known = dtype != "bfloat16" and (on_cpu or axis == AXIS_NONE)  # CuPy has no axis
    peer = unpack_into_strided if unpacks and not is_contiguous else expected
    peers = {place.name: peer} if known and (on_cpu or is_contiguous) else {}
    results = [elements if unpacks else packed]
    return One(lambda library: library.call(function, *given), results, expected if known else None, peers)


# --- copies -----------------------------------------------------------------------------------------------------------

WHOLE = (lambda shape: shape), (lambda memory: memory), 1
VIEWS = {
    "transposed": ((lambda shape: shape[::-1]), (lambda memory: memory.T), 1),
    "every other": ((lambda shape: (shape[0], 2 * shape[1])), (lambda memory: memory[:, ::2]), 2),
    "every third": ((lambda shape: (shape[0], 3 * shape[1])), (lambda memory: memory[:, ::3]), 3),
    "reversed": (WHOLE[0], (lambda memory: memory[::-1, ::-1]), 1),
    "rows": ((lambda shape: (shape[0] + 1, shape[1] + 1)), (lambda memory: memory[1:, 1:]), 1),
    "from [1:]": ((lambda shape: (math.prod(shape) + 1,)), (lambda memory: memory[1:]), 1),
}
CASTS = [
    ("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16"), ("float16", "float32"),
    ("float64", "float32"), ("float32", "float64"), ("int32", "float32"), ("int64", "float32"), ("uint8", "float32"),
    ("float32", "uint8"), ("int64", "int32"), ("uint8", "int16"), ("float64", "bfloat16"), ("bool", "float32"),
]  # fmt: skip


def copies(place, sides):
    kinds = [(f"contiguous {dtype}", dtype, dtype, WHOLE, WHOLE) for dtype in ("uint8", "float32")]
    kinds += [(f"cast {a} to {b}", a, b, WHOLE, WHOLE) for a, b in CASTS]
    for name, view in VIEWS.items():
        dtypes = ("uint8", "int16", "float32", "float64") if name == "transposed" else ("uint8", "float32")
        kinds += [(f"{name} {dtype}", dtype, dtype, view, WHOLE) for dtype in dtypes]
    kinds += [
        ("to transposed float32", "float32", "float32", WHOLE, VIEWS["transposed"]),
        ("to every other float32", "float32", "float32", WHOLE, VIEWS["every other"]),
        ("cast transposed float32 to float16", "float32", "float16", VIEWS["transposed"], WHOLE),
        ("cast transposed float32 to bfloat16", "float32", "bfloat16", VIEWS["transposed"], WHOLE),
        ("cast rows float32 to bfloat16", "float32", "bfloat16", VIEWS["rows"], WHOLE),
        ("cast every other int64 to float32", "int64", "float32", VIEWS["every other"], WHOLE),
    ]
    for kind, source, target, of_source, of_target in kinds:
        for side in sides:
            shape = side, side
            written = 1 if of_target[2] == 1 else 2 * of_target[2]
            moved = side * side * (itemsize(source) * of_source[2] + itemsize(target) * written)
            make = functools.partial(copy_of, place, shape, source, target, of_source, of_target)
            yield Work("copies", kind, f"{side} x {side}", moved, make)


def copy_of(place, shape, source, target, of_source, of_target):
    np = place.np
    src = of_source[1](place.random(of_source[0](shape), source))
    dst = of_target[1](place.empty(of_target[0](shape), target))
    if src.ndim == 1:
        src = src.reshape(shape)
    tensors = place.tensor(src, source), place.tensor(dst, target)

    def run():
        if place.name == "numpy":
            np.copyto(dst, src, casting="unsafe")
        else:
            dst[...] = src

    def expected():
        return src.astype(dst.dtype)

    known = "bfloat16" not in (source, target) and not (source.startswith("float") and target == "uint8")
    peers = {place.name: run} if known else {}
    call = lambda library: library.call("gc_copy_into", *tensors, place.stream)  # noqa: E731
    return One(call, [dst], expected if known else None, peers | place.copy_peers(src, dst, source, target))


# --- codecs -----------------------------------------------------------------------------------------------------------

# The number, the elements of a block, the bytes of a block.
CODECS = {"onebit": (1, 8, 1), "bf16": (3, 32, 64), "mxfp8": (4, 32, 33), "int8": (5, 64, 66), "int4": (6, 32, 18),
          "mxfp4": (7, 32, 17)}  # fmt: skip
Codec = namedtuple("Codec", "codec function dtype error bytes world")
ERRORS = {"no errors": (NO_ERRORS, 0), "float32 errors": (FLOAT32_ERRORS, 8), "bfloat16 errors": (BFLOAT16_ERRORS, 4)}


def codec_kinds():
    """Yields kinds. `bytes` per element: values are read or written, errors read and written, codes written or read."""
    for codec, (_, block, size) in CODECS.items():
        sent = size / block
        for dtype, value in ("float32", 4), ("bfloat16", 2):
            for name, (error, kept) in ERRORS.items():
                if error != BFLOAT16_ERRORS or dtype == "bfloat16":
                    what = Codec(codec, "encode", dtype, error, value + kept + sent, 1)
                    yield f"{codec} encode {dtype}, {name}", what
            yield f"{codec} decode {dtype}", Codec(codec, "decode", dtype, NO_ERRORS, value + sent, 1)
        yield f"{codec} decode and add float32", Codec(codec, "add", "float32", NO_ERRORS, 8 + sent, 1)
        for w in 2, 4, 8:
            yield f"{codec} reduce {w}", Codec(codec, "reduce", "float32", NO_ERRORS, (w + 1) * sent / w, w)
    of_reduce = Codec("onebit", "reduce", "float32", FLOAT32_ERRORS, (4 / 8 + 8 + 1 / 8) / 4, 4)
    yield "onebit reduce 4, float32 errors", of_reduce


def codecs(place, sizes, segments=()):
    """Yields the rows. `segments`: the sizes of many tensors in one handle, for a few kinds."""
    for kind, what in codec_kinds():
        cases = [(count(n), (n,), 0) for n in sizes]
        some = what.codec in ("onebit", "int8", "int4") and what.dtype == "float32"
        if some and what.function in ("encode", "decode"):
            cases += [("1M less 1", (2**20 - 1,), 0), ("1M from [1:]", (2**20,), 1)]
            cases += [(f"{len(segments)} tensors", segments, 0)] if segments else []
        for case, of, off in cases:
            make = functools.partial(codec_of, place, what, of, off)
            yield Work("codecs", kind, case, math.ceil(what.bytes * sum(of)), make)


def codec_of(place, what, segments, off):
    made, counts = {}, (c_int64 * len(segments))(*segments)

    def handle(library):
        """Returns a codec of this library, created for its first call."""
        if library not in made:
            options = c.gc_codec_options_t(ctypes.sizeof(c.gc_codec_options_t), CODECS[what.codec][0])
            code, bits_of_value, _ = DTYPES[what.dtype]
            options.device, options.values = c.DLDevice(place.device_type, 0), c.DLDataType(code, bits_of_value, 1)
            options.error, options.segments, options.n_segments = what.error, counts, len(segments)
            options.n_chunks, options.server = what.world, what.world > 1
            made[library] = POINTER(c.gc_codec_t)()
            library.check(library.functions.gc_codec_create(byref(options), byref(made[library])))
        return made[library]

    def close():
        while made:
            library, each = made.popitem()
            library.functions.gc_codec_free(each)

    library = place.library
    size = library.functions.gc_codec_payload_bytes
    size.restype = c_int64
    payload_bytes = size(handle(library))
    values = [place.random((n + off,), what.dtype)[off:] for n in segments]
    payload = place.empty((payload_bytes,), "uint8")

    def list_of(arrays):
        return (POINTER(c.DLTensor) * len(arrays))(*(pointer(place.tensor(a, what.dtype)) for a in arrays))

    of_values, of_payload, n = list_of(values), place.tensor(payload, "uint8"), len(segments)

    def encode(library):
        return library.call("gc_codec_encode", handle(library), of_values, n, None, None, of_payload, place.stream)

    if what.function == "encode":
        return One(encode, [payload], close=close)
    place.run(library, encode(library))
    assert bytes(payload[:4].tolist()) == b"GCPL" and int(payload[HEADER:4096].max()) > 0, "not a payload of values"
    if what.function == "reduce":
        stride = payload_bytes // what.world
        chunks, chunk = place.empty((what.world, stride), "uint8"), place.empty((stride,), "uint8")
        for row in chunks:
            row[...] = payload[:stride]
        tensors = place.tensor(chunks, "uint8"), place.tensor(chunk, "uint8")
        call = lambda library: library.call("gc_codec_reduce", handle(library), 0, *tensors, place.stream)  # noqa: E731
        return One(call, [chunk], close=close)
    results = [place.empty((m + off,), what.dtype)[off:] for m in segments]
    for result in results:
        result[...] = 0
    adds = what.function == "add"
    given = of_payload, 0, None, int(adds), list_of(results), n, place.stream
    decode = lambda library: library.call("gc_codec_decode", handle(library), *given)  # noqa: E731
    return One(decode, [] if adds else results, close=close)


# --- compiled kernels -------------------------------------------------------------------------------------------------

CHOICE = "if (x - 2 > y) { z = x * y; } else { z = x + y; }"
ADAM = "m = 0.9f * m + 0.1f * g; v = 0.999f * v + 0.001f * g * g; w -= 0.01f * m / (sqrt(v) + 1e-8f);"


def kernels(place, n, side):
    """Yields elementwise kernels and reductions, beside CuPy's of the same text."""
    flat = lambda n, dtype="float32": ((n,), dtype, None)  # noqa: E731
    two = "float32 x, float32 y", "float32 z", CHOICE
    half = "float16 x, float16 y", "float16 z", CHOICE
    adam = "float32 g", "float32 w, float32 m, float32 v", ADAM
    later = (n + 1,), "float32", lambda x: x[1:]
    kinds = [
        ("two inputs", count(n), two, None, [flat(n)] * 2, [flat(n)], 12 * n),
        ("two inputs", f"{count(n)} less 1", two, None, [flat(n - 1)] * 2, [flat(n - 1)], 12 * (n - 1)),
        ("two inputs", f"{count(n)} from [1:]", two, None, [later] * 2, [later], 12 * n),
        ("two inputs", "1M", two, None, [flat(2**20)] * 2, [flat(2**20)], 12 * 2**20),
        ("two inputs of float16", count(n), half, None, [flat(n, "float16")] * 2, [flat(n, "float16")], 6 * n),
        ("Adam in place", count(n), adam, None, [flat(n)], [flat(n)] * 3, 28 * n),
    ]
    for rows, columns in (side, side), (side - 1, side - 3):
        words, matrix, size = f"{rows} x {columns}", ((rows, columns), "float32", None), rows * columns
        turned = (columns, rows), "float32", lambda x: x.T
        kinds += [
            ("a row to a matrix", words, two, None, [matrix, flat(columns)], [matrix], 8 * size),
            ("a column to a matrix", words, two, None, [matrix, ((rows, 1), "float32", None)], [matrix], 8 * size),
            ("a matrix and one transposed", words, two, None, [matrix, turned], [matrix], 12 * size),
        ]
        for axis, result in (0, (columns,)), (1, (rows,)), (None, ()):
            texts = "float32 x", "float32 y", "x", "a + b", "y = a", "0"
            name = f"sum over {'all' if axis is None else f'axis {axis}'}"
            kinds.append((name, words, texts, (axis,), [matrix], [(result, "float32", None)], 4 * size))
    for kind, case, texts, axes, inputs, outputs, moved in kinds:
        yield Work("kernels", kind, case, moved, functools.partial(kernel_of, place, texts, axes, inputs, outputs))


@functools.cache
def compiled(library, texts, reduces):
    """Returns a kernel of a library, kept: it is compiled once in a run."""
    struct = c.gc_reduction_options_t if reduces else c.gc_elementwise_options_t
    names = ("map", "reduce", "post_map", "identity") if reduces else ("operation",)
    options, handle = struct(ctypes.sizeof(struct)), POINTER(c.gc_kernel_t)()
    for name, text in zip(("inputs", "outputs", *names, "name"), (*texts, "ours")):
        setattr(options, name, text.encode())
    create = library.functions["gc_reduction_create" if reduces else "gc_elementwise_create"]
    library.check(create(byref(options), byref(handle)))
    return handle


def kernel_of(place, texts, axes, inputs, outputs):
    reduces = axes is not None

    def array(make, shape, dtype, view):
        memory = make(shape, dtype)
        return view(memory) if view else memory

    given = [array(place.random, *of) for of in inputs]
    results = [array(place.empty, *of) for of in outputs]
    for result in results:
        result[...] = 1 if len(outputs) > 1 else 0  # several outputs are a state, which is read, too
    lists = [
        (POINTER(c.DLTensor) * len(arrays))(*(pointer(place.tensor(a, of[1])) for a, of in zip(arrays, ofs)))
        for arrays, ofs in ((given, inputs), (results, outputs))
    ]
    options = c.gc_run_options_t(ctypes.sizeof(c.gc_run_options_t))
    if reduces and axes[0] is not None:
        options.kept = (ctypes.c_int32 * 1)(axes[0])
        options.axes, options.n_axes = options.kept, 1
    tensors = lists[0], len(given), lists[1], len(results), options

    def call(library):
        handle = compiled(library, texts, reduces)
        size = library.functions.gc_kernel_workspace_bytes
        size.restype = c_int64
        size.argtypes = [c_void_p, c_void_p, ctypes.c_size_t, c_void_p, ctypes.c_size_t, c_void_p]
        needed = size(handle, lists[0], len(given), lists[1], len(results), byref(options))
        if needed > 0 and not options.workspace:
            options.memory = place.tensor(place.empty((max(needed, 1 << 20),), "uint8"), "uint8")
            options.workspace = pointer(options.memory)
        return library.call("gc_kernel_run", handle, *tensors, place.stream)

    peer = place.kernel_peer(texts, axes, given, results)
    state = len(outputs) > 1  # a second run would give other bytes
    return One(call, [] if state else results, peers={"cupy": peer} if peer else {})
