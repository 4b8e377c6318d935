"""Kernels compiled at run time, on a GPU; expected results are CuPy's, or NumPy's where results are equal to the bit.

    GRADCODEC_LIBRARY=target/release/libgradcodec.so.0 python -m pytest -q tests/spec/test_kernels.py
"""

import concurrent.futures
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

import driver

try:
    import cupy
except ImportError:
    if driver.device_count() > 0:  # without CuPy nothing would be tested, and the run would pass
        raise
    pytest.skip("no CUDA device, and no CuPy", allow_module_level=True)
import numpy as np

import capi
from kernels import Refused, elementwise, reduction, scalar
from kernels import of_cupy as tensor

pytestmark = pytest.mark.gpu

def run(kernel, inputs, outputs, **options):
    tensors = [x if isinstance(x, capi.Tensor) else tensor(x) for x in inputs]
    results = [tensor(x) for x in outputs]
    needed = kernel.workspace_bytes(tensors, results, **options)
    workspace = tensor(cupy.empty(needed, "u1")) if needed else None
    given = kernel.options(**options, workspace=workspace)
    status = capi.lib.gc_kernel_run(*kernel.arguments(tensors, results, given), None)
    if status != 0:
        raise Refused(status)
    return outputs[0]


def normal(*shape, dtype="f4", seed=0):
    return cupy.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


LAYOUTS = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.T,
    "every other": lambda x: x[::2, ::3],
    "backwards": lambda x: x[::-1, ::-1],
    "from [1:]": lambda x: x.reshape(-1)[1:],
    "odd rows": lambda x: x[:, :-1],
    "one row": lambda x: x[:1],
    "empty": lambda x: x[:0],
    "a number": lambda x: x[0, 0],
}
DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(7, 5), (130, 260), (1000, 1003)])
def test_elements_are_bit_identical_to_numpy_in_any_layout(layout, shape):
    of = LAYOUTS[layout]
    x, y = of(normal(*shape)), of(normal(*shape, seed=1))
    z = of(cupy.full(shape, 7, "f4"))
    run(elementwise("T x, T y", "T z", "z = sqrt(abs(x)) / y + x * y - y", "bits"), [x, y], [z])
    a, b = x.get(), y.get()
    np.testing.assert_array_equal(z.get(), np.sqrt(np.abs(a)) / b + a * b - b)


@pytest.mark.parametrize("dtype", ["int16", "float32", "float64"])
def test_broadcast_inputs_may_have_any_alignment(dtype):
    """Tests an element, a row and a column at no multiple of their size, beside an operand read in vectors."""
    rng, size = np.random.default_rng(0), np.dtype(dtype).itemsize
    x = cupy.asarray(rng.integers(-99, 100, (64, 256)).astype(dtype))
    for shape in (), (256,), (64, 1):
        y = np.asarray(rng.integers(-99, 100, shape)).astype(dtype)
        room = cupy.zeros((y.size + 1) * size, "u1")
        room[1 : 1 + y.nbytes] = cupy.asarray(np.frombuffer(y.tobytes(), "u1"))
        moved = tensor(cupy.ndarray(shape, dtype, room.data))
        moved.struct.dl_tensor.byte_offset = 1
        z = run(elementwise("T x, T y", "T z", "z = x + y", "moved"), [x, moved], [cupy.empty_like(x)])
        np.testing.assert_array_equal(z.get(), x.get() + y)
        for axes in 0, 1, None:
            total = reduction("T x, T y", "float64 z", "(double)(x + y)", "a + b", "z = a", "0", "total", reduce_type="double")
            expected = (x.get() + y).astype("f8").sum(axis=axes)
            out = run(total, [x, moved], [cupy.empty(expected.shape, "f8")], axes=axes)
            np.testing.assert_array_equal(out.get(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcasts_and_sums_of_every_type_match_cupy(dtype):
    high, rng = 2 if dtype == "bool" else 100, np.random.default_rng(0)
    x = cupy.asarray(rng.integers(0, high, (33, 1, 70)).astype(dtype))
    y = cupy.asarray(rng.integers(0, high, (5, 1)).astype(dtype))
    z = cupy.empty((33, 5, 70), dtype)
    texts = "T x, T y", "T z", "z = x + y"
    expected = cupy.ElementwiseKernel(*texts, "theirs")(x, y)
    assert (run(elementwise(*texts, "ours"), [x, y], [z]) == expected).all()
    for axes in (0, 1, (0, 2), (1,), None):
        expected = z.astype("f8").sum(axis=axes)
        out = cupy.empty(expected.shape, "f8")
        sums = reduction("T x", "float64 y", "x", "a + b", "y = a", "0", "sums", reduce_type="double")
        run(sums, [z], [out], axes=axes)
        assert cupy.allclose(out, expected), axes


def test_raw_parameters_scalars_and_code_around_the_loop():
    x, y = normal(1000), normal(10, 100, seed=1)[:, ::-1]
    texts = "T x, raw T y, float32 c", "T z", "z = x + y[_ind.size() - i - 1] * c + k"
    prep = "const int k = 3;"
    expected = cupy.ElementwiseKernel(*texts, "theirs", loop_prep=prep, options=("--fmad=false",))(x, y, 2.5)
    ours = elementwise(*texts, "ours", loop_prep=prep)
    assert (run(ours, [x, y, scalar(2.5, "f8")], [cupy.empty_like(x)]) == expected).all()
    reverse = elementwise("raw T x", "raw T y", "y[n - 1 - i] = x[i]", "reverse")
    assert (run(reverse, [x], [cupy.empty_like(x)], size=1000) == x[::-1]).all()


LARGE = [(16384, 1024), (64, 1 << 20), (1 << 20, 64), (3, 1 << 22), (1 << 23, 3), (257, 1009, 31)]


@pytest.mark.parametrize("shape", LARGE)
def test_large_reductions_are_right_and_the_same_every_time(shape):
    x = cupy.asarray(np.random.default_rng(0).integers(-9, 10, shape).astype("f4"))  # sums are exact
    sums = reduction("T x", "T y", "x", "a + b", "y = a", "0", "sums")
    for axes in [None, *range(len(shape)), -1]:
        expected = x.sum(axis=axes, dtype="f8").astype("f4")
        assert (run(sums, [x], [cupy.empty(expected.shape, "f4")], axes=axes) == expected).all(), axes
    y = normal(*shape)
    results = {run(sums, [y], [cupy.empty((), "f4")]).get().tobytes() for _ in range(5)}
    assert len(results) == 1


def test_a_prepared_kernel_is_captured_and_another_refused():
    x, z = normal(4096), cupy.empty(4096, "f4")
    kernel = elementwise("T x", "T z", "z = 2 * x", "captured")
    stream = cupy.cuda.Stream(non_blocking=True)
    tensors, outputs = [tensor(x)], [tensor(z)]
    stream.begin_capture()
    with pytest.raises(Refused, match="gc_kernel_prepare"):
        kernel(tensors, outputs, stream=stream.ptr)
    stream.end_capture()
    kernel.prepare(tensors, outputs, stream=stream.ptr)
    stream.begin_capture()
    kernel(tensors, outputs, stream=stream.ptr)
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert (z == 2 * x).all()


def test_threads_share_a_kernel():
    x, kernel = normal(5000), elementwise("T x", "T z", "z = x + 1", "shared")

    def work():
        z = cupy.empty_like(x)
        for _ in range(20):
            run(kernel, [x], [z])
        cupy.cuda.Device().synchronize()
        np.testing.assert_array_equal(z.get(), x.get() + np.float32(1))

    cupy.cuda.Device().synchronize()  # x must be complete for every thread's stream
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result(timeout=120)
