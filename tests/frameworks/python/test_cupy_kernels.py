"""Functions of cupyx.scipy.ndimage and signal on our kernels give what they give on CuPy's: cupy_on_gradcodec.py puts ours
in their place. Each way is a process of its own, since modules and CuPy's caches keep kernels."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

FUNCTIONS = {
    "ndimage": {
        "gaussian_filter": lambda f, x: f(x, 1.5),
        "uniform_filter": lambda f, x: f(x, 5),
        "median_filter": lambda f, x: f(x, 3),
        "rank_filter": lambda f, x: f(x, 2, 3),
        "minimum_filter": lambda f, x: f(x, 3),
        "maximum_filter": lambda f, x: f(x, (3, 5), mode="wrap"),
        "correlate": lambda f, x: f(x, x[:3, :4], mode="mirror"),
        "sobel": lambda f, x: f(x),
        "laplace": lambda f, x: f(x, mode="constant", cval=2),
        "grey_dilation": lambda f, x: f(x, (3, 3)),
        "binary_erosion": lambda f, x: f(x > 0),
        "map_coordinates": lambda f, x: f(x, x[:20, :20].reshape(2, -1) + 9, order=1),
        "rotate": lambda f, x: f(x, 30, order=3),
        "shift": lambda f, x: f(x, 2.5, order=1, mode="nearest"),
        "zoom": lambda f, x: f(x, 1.5, order=1),
        "spline_filter": lambda f, x: f(x),
        "label": lambda f, x: f(x > 0)[0],
        "distance_transform_edt": lambda f, x: f(x > 0),
    },
    "signal": {
        "sawtooth": lambda f, x: f(x.astype("f8"), 0.5),  # CuPy itself takes no float32 here
        "square": lambda f, x: f(x.astype("f8"), 0.3),
        "gausspulse": lambda f, x: f(x, fc=5),
        "chirp": lambda f, x: f(abs(x), 1, 2, 3, "quadratic"),
        "firwin": lambda f, x: f(31, 0.3),
        "gauss_spline": lambda f, x: f(x, 3),
        "convolve2d": lambda f, x: f(x, x[:5, :5]),
        "medfilt2d": lambda f, x: f(x, 3),
        "wiener": lambda f, x: f(x, 3),
    },
    "signal.windows": {
        "hamming": lambda f, x: f(101), "kaiser": lambda f, x: f(101, 5.0), "gaussian": lambda f, x: f(101, 7.0),
        "tukey": lambda f, x: f(101), "taylor": lambda f, x: f(101), "parzen": lambda f, x: f(101),
    },
}  # fmt: skip
CASES = [(module, function) for module, functions in FUNCTIONS.items() for function in functions]


def results(path, plugin):
    """Writes what the functions give; a function that failed gives its error."""
    import importlib

    import cupy

    if plugin:
        import cupy_on_gradcodec

        cupy_on_gradcodec.put()
    x, found = cupy.asarray(np.random.default_rng(1).standard_normal((60, 70)).astype("f4")), {}
    for module, function in CASES:
        of = getattr(importlib.import_module(f"cupyx.scipy.{module}"), function)
        try:
            found[function] = cupy.asnumpy(FUNCTIONS[module][function](of, x))
        except Exception as failure:
            found[function] = np.array(f"{type(failure).__name__}: {failure}"[:2000])
    runs = cupy_on_gradcodec.runs["ours"] if plugin else 0
    np.savez(path, runs=runs, **found)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    cupy = pytest.importorskip("cupy", reason="no CuPy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as failure:
        pytest.skip(f"no CUDA device: {failure}")
    found = []
    for plugin in "", "ours":
        path = tmp_path_factory.mktemp("cupy") / "results.npz"
        subprocess.run([sys.executable, __file__, str(path), plugin], check=True, cwd=pathlib.Path(__file__).parent)
        found.append(np.load(path))
    return found


def test_ours_ran(both):
    theirs, ours = both
    assert (theirs["runs"], ours["runs"] > len(CASES) // 2) == (0, True), ours["runs"]


@pytest.mark.parametrize("module, function", CASES)
def test_it_gives_what_it_gives_on_cupys_kernels(both, module, function):
    theirs, ours = (of[function] for of in both)
    if theirs.dtype.kind == "U":
        pytest.fail(f"CuPy itself: {theirs}")
    assert ours.dtype == theirs.dtype, ours
    np.testing.assert_allclose(ours, theirs, rtol=1e-5 if theirs.dtype == np.float32 else 1e-12, atol=1e-6)


if __name__ == "__main__":
    results(sys.argv[1], bool(sys.argv[2]))
