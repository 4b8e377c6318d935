"""Kernels compiled at run time, end to end without a GPU. g++ (tests/fakes/nvrtc/libnvrtc_gcc.c) compiles them for the
stand-in driver, which runs them lane by lane; a real NVRTC compiles, too. NumPy computes the expected results."""

import os
import re
import shutil
from ctypes.util import find_library
from pathlib import Path

import pytest

import stand_in
from tiers import both

GCC = str(Path(stand_in.DRIVERS or "") / "nvrtc_gcc" / "libnvrtc.so.12")
REAL = os.environ.get("GRADCODEC_REAL_NVRTC", "")

PRELUDE = """
    import kernels
    from kernels import Refused, bfloat16, elementwise, from_bfloat16, on_gpu, reduction, scalar

    rng = np.random.default_rng(1)
    DRIVER = driver()

    def normal(*shape, dtype="f4"):
        return rng.standard_normal(shape).astype(dtype)

    def integers(*shape, dtype="f4", low=-100, high=100):
        return rng.integers(low, high, shape).astype(dtype)

    def same(got, expected):
        np.testing.assert_array_equal(got, expected)

    def refuses(status, words, call, *arguments, **more):
        launches = DRIVER.fake_launches()
        try:
            call(*arguments, **more)
        except Refused as refusal:
            assert refusal.status == status and words in refusal.message, (refusal.status, refusal.message)
        else:
            raise AssertionError("not refused: " + words)
        assert DRIVER.fake_launches() == launches, "launched, and refused: " + words
"""


def run(script, nvrtc=GCC, **environment):
    lines = [line[4:] if line.startswith("    ") else line for line in script.strip("\n").split("\n")]
    script = "\n".join("    " + line for line in lines)
    return stand_in.run(PRELUDE + script, GRADCODEC_NVRTC=nvrtc, GRADCODEC_CACHE="0", **environment)


def test_cupys_first_example_works_unchanged():
    run("""
    kernel = elementwise("float32 x, float32 y", "float32 z", "if (x - 2 > y) { z = x * y; } else { z = x + y; }", "my_kernel")
    x, y, z = normal(2, 3), normal(3), np.zeros((2, 3), "f4")
    kernel([x, y], [z])
    same(z, np.where(x - 2 > y, x * y, x + y))
    kernel.free()
    """)


def test_elements_lie_anywhere():
    run("""
    kernel = elementwise("T x, T y", "T z", "z = x + y", "add")
    for shape in (1,), (7,), (4096,), (5000,), (33, 40), (33, 41), (2, 3, 4, 5), (1, 1):
        for view in (lambda a: a, lambda a: a.T, lambda a: a[::-1], lambda a: a[..., ::2], lambda a: a[..., 1:]):
            x, y, z = view(normal(*shape)), view(normal(*shape)), view(np.zeros(shape, "f4"))
            kernel([x, y], [z])
            same(z, x + y)
    for a, b in [((300, 400), (400,)), ((300, 400), (300, 1)), ((300, 401), (300, 1)), ((5, 1, 7), (6, 1)), ((3, 4), ())]:
        x, y = normal(*a), normal(*b)
        z = np.zeros((x + y).shape, "f4")
        kernel([x, y if b else on_gpu(y)], [z])
        same(z, x + y)
    many = normal(*[2] * 12).transpose(*range(0, 12, 2), *range(1, 12, 2))  # more loops than usual
    z = np.zeros([2] * 12, "f4")
    kernel([many, normal(1) * 0], [z])
    same(z, many)
    memory = np.zeros(4004, "u1")
    odd = memory[1:4001].view("f4")
    odd[:] = normal(1000)
    z = np.zeros(1000, "f4")
    kernel([odd, odd], [z])
    same(z, odd + odd)
    before = odd.copy()
    kernel([before, before], [odd])
    same(odd, before + before)
    z = np.full((0, 3), 1, "f4")
    kernel([np.zeros((0, 3), "f4"), np.zeros(3, "f4")], [z])
    """)


def test_tiles_of_rows_columns_and_transposed_inputs():
    run("""
    numbered = elementwise("T x, T y, T w", "T z, int64 at", "z = x + y - w; at = i", "numbered")
    add = elementwise("T x, T y, T w", "T z", "z = x + y - w", "add")
    def transposed(*axes):  # a tensor of the shape whose memory is in another order
        order = np.argsort(axes)
        return lambda a: np.ascontiguousarray(a.transpose(axes)).transpose(order)
    for shape, ways in [
        ((131, 259), [transposed(1, 0)]), ((64, 96), [transposed(1, 0)]), ((1000, 9), [transposed(1, 0)]),
        ((5, 2000), [transposed(1, 0)]),
        ((3, 70, 77), [transposed(0, 2, 1), transposed(1, 2, 0), transposed(2, 1, 0)]),
        ((5, 3, 65, 67), [transposed(1, 0, 3, 2), transposed(3, 1, 0, 2)]),
    ]:
        for dtype in DTYPES:
            x, y, w = (integers(*shape, dtype=dtype, low=0, high=20) for _ in range(3))
            row, column = y[..., :1, :], y[..., :, :1]
            cases = [(x, row, w), (x, column, w), (row, x, column)]
            cases += [(x, way(y), w) for way in ways] + [(way(x), y, way(w)) for way in ways] + [(ways[0](x), row, w)]
            for one, two, three in cases:
                expected = one + two - three if dtype != "?" else (one.astype("i4") + two - three) != 0
                z, at = np.zeros(shape, dtype), np.zeros(shape, "i8")
                add([one, two, three], [z])
                same(z, expected)
                numbered([one, two, three], [z, at])
                same(z, expected)
                same(at, np.arange(at.size).reshape(shape))
    entered = lambda words: words in DRIVER.fake_last_launch().decode()
    x, z = integers(300, 301), np.zeros((300, 301), "f4")
    add([x, x[:1], x], [z])
    assert entered("add_tiles"), DRIVER.fake_last_launch()
    add([x, transposed(1, 0)(x), x], [z])
    assert entered("add_turned_tiles"), DRIVER.fake_last_launch()
    add([x[:3], x[:1], x[:3]], [z[:3]])  # most rows of a tile would be empty
    assert entered("add_elements"), DRIVER.fake_last_launch()
    turned = np.zeros((300, 301), "f4").T.copy().T
    before = turned.copy()
    numbered([x, turned, x], [turned, np.zeros((300, 301), "i8")])  # in place, if the output has this layout, too
    same(turned, before)
    """.replace("DTYPES", repr(both(quick=["f4", "u1"], all=["f4", "u1", "f8", "f2", "?"]))))


def test_every_type_letters_and_scalars():
    run("""
    kernel = elementwise("T x, T y", "T z", "z = x + y", "add")
    for dtype in DTYPES:
        x, y = integers(70, dtype=dtype, low=0), integers(70, dtype=dtype, low=0)
        z = np.zeros(70, dtype)
        kernel([x, y], [z])
        same(z, x + y)
    x, y = normal(1000), normal(1000)
    patterns, z = [bfloat16(x), bfloat16(y)], np.zeros(1000, "u2")
    kernel([capi_bf16(p) for p in patterns], [capi_bf16(z)])
    same(z, bfloat16(from_bfloat16(patterns[0]) + from_bfloat16(patterns[1])))
    cast = elementwise("float16 x, bfloat16 y", "bfloat16 v, float16 w", "v = x; w = y", "cast")
    v, w = np.zeros(1000, "u2"), np.zeros(1000, "f2")
    cast([x.astype("f2"), capi_bf16(patterns[1])], [capi_bf16(v), w])
    same(v, bfloat16(x.astype("f2")))
    same(w, from_bfloat16(patterns[1]).astype("f2"))
    step = elementwise("T g, T lr", "T w", "w -= lr * g", "sgd")
    w, g = normal(1001), normal(1001)
    before = w.copy()
    step([g, scalar(0.1, "f8")], [w])
    same(w, before - np.float32(0.1) * g)
    flag = elementwise("bool x, uint8 t", "bool z", "z = x == t", "truth")
    x, z = np.array([0, 1, 2, 255], "u1").view("?"), np.zeros(4, "?")
    flag([x, scalar(300, "i4") if False else scalar(1, "i4")], [z])
    same(z, [False, True, True, True])
    """.replace("capi_bf16(", "(lambda a: on_gpu(a, dtype='bfloat16'))(").replace("DTYPES", repr(both(
        quick=["?", "i1", "u4", "f2"], all=["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
    ))))


def test_raw_parameters_loops_and_unchanged_outputs():
    run("""
    x, y, z = normal(60), normal(6, 10)[:, ::-1], np.zeros(60, "f4")
    kernel = elementwise("T x, raw T y", "T z", "z = x + y[_ind.size() - i - 1] + y[n - 1 - i] + k",
                         "reverse", loop_prep="const int k = 3", after_loop="(void)k", preamble="#define NOTHING")
    kernel([x, y], [z])
    same(z, x + y.reshape(-1)[::-1] + y.reshape(-1)[::-1] + np.float32(3))
    at = elementwise("raw T y", "T z", "ptrdiff_t at[] = {y.shape()[0] - 1, i}; z = y[at] + y.size() + y.ndim", "at")
    z = np.zeros(10, "f4")
    at([y], [z])
    same(z, y[5] + np.float32(60) + np.float32(2))
    scatter = elementwise("raw T x", "raw T y", "y[n - 1 - i] = x[i]", "scatter")
    z = np.zeros(60, "f4")
    scatter([x], [z], size=60)
    same(z, x[::-1])
    some = elementwise("T x", "T z", "if (x > 0) z = x", "some")
    z = np.full(60, -1, "f4")
    some([x], [z])
    same(z, np.where(x > 0, x, -1))
    # Elements of one vector may differ, too.
    x = normal(1003)
    for word in "return", "continue", "break":
        ends = elementwise("T x, raw T y", "T z, raw T w", f"z = x; w[i] = x; if (x > 0) {word}; z = y[i] - 1; w[i] = -x",
                           "ends")
        z, w = np.zeros(1003, "f4"), np.zeros(1003, "f4")
        ends([x, x], [z, w])
        same(z, np.where(x > 0, x, x - np.float32(1)))
        same(w, np.abs(x))
        sums = reduction("T x", "T y", "x", "a + b", f"y = a; if (a > 0) {word}; y = -a", "0", "sums")
        m, y = normal(40, 30), np.zeros(40, "f4")
        sums([np.sign(m)], [y], axes=1)
        same(y, np.abs(np.sign(m).sum(axis=1)))
    numbers = elementwise("", "int64 z", "z = i", "numbers")
    z = np.zeros((30, 20), "i8").T
    numbers([], [z])
    same(z, np.arange(600).reshape(20, 30))
    """)


def test_a_macro_for_the_index_keeps_elements_in_order(tmp_path):
    header = tmp_path / "number.h"
    header.write_text("#define NUMBER i\n#define OF_REDUCTION _J\n")
    run(f"""
    for macro in dict(preamble='#include "{header}"'), dict(options=["-DNUMBER=i", "-DOF_REDUCTION=_J"]):
        number = elementwise("", "int64 z", "z = NUMBER", "number", **macro)
        z = np.zeros((30, 20), "i8").T
        number([], [z])
        same(z, np.arange(600).reshape(20, 30))
        weighed = reduction("int64 x", "int64 y", "x * OF_REDUCTION", "a + b", "y = a", "0", "weighed", **macro)
        x, y = integers(30, 20, dtype="i8").T, np.zeros((), "i8")
        weighed([x], [on_gpu(y)])
        same(y, (x.reshape(-1) * np.arange(600)).sum())
    """)


def test_reductions_over_any_axes():
    run("""
    sums = reduction("T x", "T y", "x", "a + b", "y = a", "0", "sums")
    for x in integers(3, 200, 130), integers(3, 200, 130).transpose(2, 0, 1)[::-1, :, ::2], integers(5, 5), integers(1, 7, 1):
        for axes in (0, 1, -1, (0, 1), (-1, 0), tuple(range(x.ndim)), (), None):
            for keepdims in False, True:
                expected = x.sum(axis=axes, keepdims=keepdims)
                y = np.zeros(expected.shape, "f4")
                sums([x], [y], axes=axes, keepdims=keepdims)
                same(y, expected)
    for x in integers(300001), integers(9000, 40), integers(40, 9000), integers(9001, 41), integers(60000)[::2], integers(60001)[1:]:
        for axes in 0, None:
            expected = x.sum(axis=axes, dtype="f8").astype("f4")
            y = np.zeros(expected.shape, "f4")
            assert axes == 0 or sums.workspace_bytes([x], [y], axes=axes) > 0 or x.size < 60000
            sums([x], [y], axes=axes)
            same(y, expected)
    y = np.ones(4, "f4")
    sums([np.zeros((0, 4), "f4")], [y], axes=0)
    same(y, np.zeros(4))
    # There is no element, although the product of the axes exceeds 64 bits.
    x, y, many = on_gpu(np.zeros((0, 2, 2), "f4")), np.zeros(0, "f4"), 0x7FFFFFFFFFFFFFFF
    x.struct.dl_tensor.shape[1] = x.struct.dl_tensor.shape[2] = many
    assert sums.workspace_bytes([x], [y], axes=(1, 2)) == 0
    sums([x], [y], axes=(1, 2))
    """)


def test_the_sum_of_floats_does_not_depend_on_where_they_lie():
    run("""
    sums = reduction("T x", "T y", "x", "a + b", "y = a", "0", "sums")
    x, results = normal(40007), set()
    for offset in range(5):
        memory = np.zeros(40007 + offset, "f4")
        memory[offset:] = x
        y = np.zeros((), "f4")
        sums([memory[offset:]], [on_gpu(y)])
        results.add(y.tobytes())
    assert len(results) == 1
    entered = set()
    for rows, columns in (300, 2), (300, 3), (515, 20), (200, 23), (129, 33), (40, 100), (9, 1001):
        x, results = normal(rows, columns), set()
        for offset, pitch in [(offset, columns) for offset in range(5)] + [(0, columns + 1)]:
            memory = np.zeros(rows * pitch + offset, "f4")
            at = memory[offset:].reshape(rows, pitch)[:, :columns]
            at[:] = x
            y = np.zeros(rows, "f4")
            sums([at], [y], axes=1)
            results.add(y.tobytes())
            entered.add(DRIVER.fake_last_launch().decode())
        assert len(results) == 1, (rows, columns)
        np.testing.assert_allclose(y, x.sum(axis=1), rtol=1e-3, atol=1e-3)
    assert entered == {"sums", "sums_row", "sums_short_rows"}, entered
    """)


def test_short_rows_one_after_the_other_long_ones_and_columns():
    run("""
    first = reduction("T x, U w", "T y, int64 at", "best<T>(x * w, _J)",
        "b.x > a.x || b.x == a.x && b.at < a.at ? b : a", "y = a.x; at = a.at", name="argmax", reduce_type="best<T>",
        preamble="template <typename T> struct best { T x; long long at; __device__ best() {} "
        "__device__ best(T x, long long at) : x(x), at(at) {} };")
    mean = reduction("T x", "float64 y", "x", "a + b", "y = a / _in_ind.size() * _out_ind.size()", "0", "mean",
        reduce_type="double")
    for rows, columns in (1, 3), (2, 3), (1000, 3), (257, 5), (129, 17), (500, 7), (300, 31), (20, 257), (50, 3000):
        for dtype in "u1", "f8":
            x = integers(rows, columns, dtype=dtype, low=0, high=9)
            w = integers(rows, columns, dtype="i4", low=1, high=3)
            y, at = np.zeros(rows, dtype), np.zeros(rows, "i8")
            first([x, w], [y, at], axes=1)
            same(y, (x * w).max(axis=1))
            same(at, (x * w).argmax(axis=1))
            first([x.T, w.T], [y, at], axes=0)
            same(at, (x * w).argmax(axis=1))
            m = np.zeros((rows, 1))
            mean([x], [m], axes=-1, keepdims=True)
            same(m[:, 0], x.sum(axis=1, dtype="f8") / (rows * columns) * rows)
    """)


def test_layouts_are_compiled_at_first_use_or_when_prepared(tmp_path):
    run("""
    def compiled():
        return len(open(os.environ["FAKE_NVRTC_LOG"]).readlines())
    odd = np.zeros(4 * 64 + 1, "u1")[1:].view("f4")
    odd[:] = x = normal(64)
    layouts = [x, x[:32], x[::2], x[1:], odd]
    def works(kernel):
        for view in layouts:
            z = np.zeros(len(view), "f4")
            kernel([view], [z])
            same(z, 2 * view)
    kernel = elementwise("T x", "T z", "z = 2 * x", "twice")
    for view, count in zip(layouts, [1, 1, 2, 2, 3]):
        kernel([view], [np.zeros(len(view), "f4")])
        assert compiled() == count, count
    assert "--fmad=false" in open(os.environ["FAKE_NVRTC_LOG"]).readline()
    works(kernel)
    prepared = elementwise("T x", "T z", "z = 2 * x", "twice")
    prepared.prepare([x], [x.copy()])
    assert compiled() == 4
    works(prepared)
    assert compiled() == 4
    sums = reduction("T x", "T y", "x", "a + b", "y = a", "0", "sums")
    x, before = integers(200, 400), compiled()
    for view, axes, count in (x, 1, 1), (x, 0, 2), (x[:, 1:], 1, 3), (x[:, 1:], 0, 4), (x[:50], 1, 4), (x, None, 5), (x, None, 5):
        y = np.zeros(view.sum(axis=axes).shape, "f4")
        sums([view], [y], axes=axes)
        same(y, view.sum(axis=axes))
        assert compiled() - before == count, (axes, count)
    for one in kernel, prepared, sums:
        one.free()
    assert DRIVER.fake_libraries() == 0
    """, FAKE_NVRTC_LOG=tmp_path / "log")


@pytest.mark.skipif(find_library("nvrtc") is not None, reason="this machine has an NVRTC, which would compile")
def test_a_machine_without_nvrtc_runs_kernels_of_another_machine(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    script = """
    kernel = elementwise("T x", "T z", "z = 2 * x", "twice")
    x = normal(64)
    for capability in 75, 90:
        kernel.prepare([x], [x.copy()], capability=capability)
    """
    stand_in.run(PRELUDE + script, GRADCODEC_NVRTC=GCC, GRADCODEC_CACHE_DIR=here)
    shutil.copytree(here, there)
    shutil.rmtree(here)
    script = """
    kernel = elementwise("T x", "T z", "z = 2 * x", "twice")
    x = normal(64)
    for view in x, x[::2], x[1:]:  # of a GPU of 9.0
        z = np.zeros(len(view), "f4")
        kernel([view], [z])
        same(z, 2 * view)
    kernel.prepare([x], [x.copy()], capability=75)
    for capability, dtype in (80, "f4"), (90, "f8"):
        y = x.astype(dtype)
        refuses(25, "NVRTC was not found", kernel.prepare, [y], [y.copy()], capability=capability)
    refuses(25, "NVRTC was not found", elementwise("T x", "T z", "z = 3 * x", "twice"), [x], [x.copy()])
    assert "libnvrtc" not in open("/proc/self/maps").read()
    """
    stand_in.run(PRELUDE + script, GRADCODEC_CACHE_DIR=there)
    # A file that is named is used, or the kernel is refused.
    script = """
    x = normal(64)
    refuses(25, "cannot load GRADCODEC_NVRTC", elementwise("T x", "T z", "z = 2 * x", "twice"), [x], [x.copy()])
    """
    stand_in.run(PRELUDE + script, GRADCODEC_NVRTC=tmp_path / "none.so", GRADCODEC_CACHE_DIR=there)


def test_wrong_arguments_are_refused_before_a_launch():
    run("""
    f = lambda *shape: np.zeros(shape, "f4")
    add = elementwise("T x, T y", "T z", "z = x + y", "add")
    refuses(4, "(y)", add, [f(3), f(4)], [f(3)])
    refuses(4, "(z)", add, [f(2, 3), f(3)], [f(3)])
    refuses(4, "(z)", add, [f(3), f(3)], [f(2, 3)])
    refuses(2, "float32 by inputs[0] (x), got float64", add, [f(3), f(3).astype("f8")], [f(3)])
    refuses(3, "on the CPU", add, [f(3), capi.Tensor(f(3))], [f(3)])
    refuses(3, "on the CPU", add, [f(3), f(3)], [capi.Tensor(f(3))])
    other = on_gpu(f(3))
    other.struct.dl_tensor.device.device_id = 1
    refuses(1, "cuda:1", add, [f(3), other], [f(3)])
    x = f(10)
    refuses(1, "intersect", add, [x[:9], x[:9]], [x[1:]])
    refuses(1, "intersect", add, [x, x[::-1]], [x])
    add([x, x], [x])
    raw = elementwise("raw T x", "T z", "z = x[i]", "raw")
    refuses(1, "intersect", raw, [x], [x])
    both = elementwise("T x", "T y, T z", "y = z = x", "both")
    refuses(1, "intersect", both, [f(3)], [x[:3], x[2:5]])
    refuses(1, "one place", add, [f(3), f(3)], [np.lib.stride_tricks.as_strided(x, (3,), (0,))])
    only = elementwise("raw T x", "raw T z", "z[i] = x[i]", "only")
    refuses(1, "size 0", only, [f(3)], [f(3)])
    refuses(1, "size 3", add, [f(3), f(3)], [f(3)], size=3)
    sums = reduction("T x", "T y", "x", "a + b", "y = a", None, "sums")
    refuses(1, "no identity", sums, [f(0, 4)], [f(4)], axes=0)
    refuses(1, "axes[0] is 2", sums, [f(3, 4)], [f(4)], axes=2)
    refuses(1, "the same axis as axes[0]", sums, [f(3, 4)], [f(4)], axes=(0, -2))
    refuses(4, "(y)", sums, [f(3, 4)], [f(3)], axes=0)
    refuses(1, "intersect", sums, [x], [x[:1].reshape(())])
    big = f(300000)
    assert sums.workspace_bytes([big], [f(1).reshape(())]) > 16
    refuses(4, "bytes at least expected", sums, [big], [f(1).reshape(())], workspace=on_gpu(np.zeros(16, "u1")))
    refuses(26, "operation", elementwise("T x", "T z", "z = q", "wrong"), [f(3)], [f(3)])
    before = DRIVER.fake_launches()
    add([f(3), f(3)], [f(3)])
    assert DRIVER.fake_launches() == before + 1  # that they are counted
    """)


FORMS = """
    f = lambda *shape, dtype="f4": np.zeros(shape, dtype)
    bf = lambda *shape: on_gpu(np.zeros(shape, "u2"), dtype="bfloat16")
    def prepare(kernel, inputs, outputs, **options):
        try:
            kernel.prepare(inputs, outputs, capability=CAPABILITY, **options)
        except Refused as refusal:
            raise AssertionError(f"{refusal}\\n{kernel.log()}")
        assert "warning" not in kernel.log(), kernel.log()
    prepare(elementwise("T x, raw T y, float32 c", "bool z, raw T w", "ptrdiff_t at[] = {0, i}; z = x + y[n - 1 - i] > c; w[at] = "
        "y.shape()[0] + _ind.size()", "raws"), [f(3, dtype="f8"), f(3, 3, dtype="f8"), scalar(2, "i4")], [f(3, dtype="?"), f(3, 3, dtype="f8")])
    for dtype in TYPES:
        prepare(elementwise("T x, T y", "T z", "z = x + y; z = min(z, x)", "types"), [f(3, dtype=dtype)] * 2, [f(3, dtype=dtype)])
    prepare(elementwise("float16 x, bfloat16 y", "bfloat16 z", "z = x * y + 1; z += x; z = max(z, bfloat16(0)); z = sqrt(z)", "halves"),
        [f(3, dtype="f2"), bf(3)], [bf(3)])
    prepare(elementwise("float16 x, bfloat16 y", "float16 v, bfloat16 w", "w = x; v = y; v = w = 0; v = 1.5; w = true; w = n; "
        "const bfloat16 k = y; w = k; w = min(x, y); w = i > 0 ? x : float16(0); v = i > 1 ? x : y", "other_halves"),
        [f(3, dtype="f2"), bf(3)], [f(3, dtype="f2"), bf(3)])
    prepare(reduction("T x, U y", "T z", "x * y", "a + b", "z = sqrt(a) / n", "0", "dots", reduce_type="float"),
        [f(3, 4, dtype="f2"), bf(4)], [f(3, dtype="f2")], axes=1)
    prepare(reduction("T x", "T y, int64 at", "best<T>(x, _J)", "a.x < b.x ? b : a", "y = a.x; at = a.at", name="argmax",
        reduce_type="best<T>", preamble="template <typename T> struct best { T x; long long at; __device__ best() {} "
        "__device__ best(T x, long long at) : x(x), at(at) {} };"), [f(3, 4)], [f(3), f(3, dtype="i8")], axes=1)
    refuses(26, "operation(2): error", elementwise("T x", "T z", "float a = x;\\nz = q + a", "wrong").prepare, [f(3)], [f(3)],
        capability=CAPABILITY)
    refuses(26, "aligned to at most 16", reduction("T x", "T y", "wide{x}", "a", "y = a.x", "wide{0}", "wide", reduce_type="wide",
        preamble="struct alignas(32) wide { float x; };").prepare, [f(3)], [f()], capability=CAPABILITY)
"""


@pytest.mark.parametrize("capability", both(quick=[90], all=[75, 90]))
def test_a_real_nvrtc_compiles_every_form(capability):
    assert REAL, "GRADCODEC_REAL_NVRTC is the path of a real NVRTC's library"
    every = ["?", *(f"{kind}{k}" for kind in "iu" for k in (1, 2, 4, 8)), "f2", "f4", "f8"]
    types = both(quick=["f2"], all=every)
    run(FORMS.replace("CAPABILITY", str(capability)).replace("TYPES", repr(types)), nvrtc=REAL)


def test_a_child_that_is_forked_while_a_kernel_is_compiled(tmp_path):
    """Forks in the middle of a call: the compiler signals that it has begun, and waits."""
    begun, go_on, compiler = tmp_path / "begun", tmp_path / "go_on", tmp_path / "compiler"
    os.mkfifo(begun), os.mkfifo(go_on)
    compiler.write_text(f'#!/bin/sh\necho >"{begun}"\nread -r word <"{go_on}"\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    run(
        """
    import signal, threading, traceback

    used, unused = (elementwise("float32 x", "float32 y", f"y = x + {k}", "k") for k in (1, 2))
    x, y = normal(8), np.zeros(8, "f4")

    def child():
        signal.alarm(20)
        for call in (used.log, lambda: used.prepare([x], [y]), unused.log):
            refuses(Status.INVALID_ARGUMENT, "kernel: was made before the process was forked", call)
        used.free(), unused.free()

    thread = threading.Thread(target=used.prepare, args=([x], [y]))
    thread.start()
    open(os.environ["BEGUN"]).read()
    forked = os.fork()
    if forked == 0:
        try:
            child()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, ended = os.waitpid(forked, 0)
    open(os.environ["GO_ON"], "w").write("go on")
    thread.join()
    assert ended == 0, ended
    used([x], [y])
    same(y, x + 1)
    """,
        CXX=compiler,
        BEGUN=begun,
        GO_ON=go_on,
    )


def test_the_program_of_the_page_prints_its_comments():
    page = (Path(__file__).parents[2] / "docs" / "KERNELS.md").read_text(encoding="utf-8")
    [program], [printed] = (re.findall(rf"```{kind}\n(.*?)```", page, re.S) for kind in ("python", "text"))
    package = f"sys.path.insert(0, {str(Path(__file__).parents[2] / 'python')!r})\n"
    assert stand_in.run(package + program, GRADCODEC_NVRTC=GCC, GRADCODEC_CACHE="0") == printed
