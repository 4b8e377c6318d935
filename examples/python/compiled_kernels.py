"""Kernels compiled at run time, as CuPy's ElementwiseKernel and ReductionKernel: CuPy's first example, an optimizer
step in place, and softmax over an axis.

    PYTHONPATH=python python3 examples/python/compiled_kernels.py

With a GPU, torch and CuPy, inputs are torch tensors and outputs CuPy arrays. Without a GPU kernels are only compiled,
for compute capability 9.0, if there is NVRTC (for example pip's nvidia-cuda-nvrtc-cu12).
"""

import numpy as np
from gradcodec import GradCodec, GradCodecError

NVRTC_UNAVAILABLE = 25

ADAM = """
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    w -= lr * (m / c1) / (sqrt(v / c2) + eps);
"""


class Kernels:
    def __init__(self, gradcodec):
        self.first = gradcodec.elementwise(
            "float32 x, float32 y", "float32 z", "if (x - 2 > y) { z = x * y; } else { z = x + y; }", "my_kernel"
        )
        # Takes one pass over memory: the outputs w, m and v are also read.
        self.adam = gradcodec.elementwise(
            "T g, T lr, T beta1, T beta2, T c1, T c2, T eps", "T w, T m, T v", ADAM, "adam"
        )
        self.most = gradcodec.reduction("T x", "T y", "x", "max(a, b)", "y = a", name="row_max")
        self.sum = gradcodec.reduction("T x, T m", "T y", "exp(x - m)", "a + b", "y = a", "0", "sum_of_exp")
        self.softmax = gradcodec.elementwise("T x, T m, T s", "T y", "y = exp(x - m) / s", "softmax")


def numbers(step, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8):
    return lr, beta1, beta2, 1 - beta1**step, 1 - beta2**step, eps


def adam_of_numpy(g, w, m, v, step):
    lr, beta1, beta2, c1, c2, eps = numbers(step)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    return w - lr * (m / c1) / (np.sqrt(v / c2) + eps), m, v


def softmax_of_numpy(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def compiled(kernels):
    """Compiles all kernels for a GPU that is not present."""
    x = np.zeros((2, 3), np.float32)
    row, vector = np.zeros((2, 1), np.float32), np.zeros(5, np.float32)
    along = dict(axes=1, keepdims=True, capability=90)
    kernels.first.prepare([x, x[0]], [x.copy()], capability=90)
    kernels.adam.prepare([vector, *numbers(1)], [vector.copy(), vector.copy(), vector.copy()], capability=90)
    kernels.most.prepare([x], [row], **along)
    kernels.sum.prepare([x, row], [row.copy()], **along)
    kernels.softmax.prepare([x, row, row], [x.copy()], capability=90)
    print("compiled for compute capability 9.0")


def run(kernels, put, put_there, empty, get):
    """Runs and checks the kernels. `put` converts inputs from NumPy, `put_there` outputs; `get` converts back."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 3), np.float32), rng.standard_normal(3, np.float32)
    z = empty((2, 3))
    kernels.first([put(x), put(y)], [z])
    good = (get(z) == np.where(x - 2 > y, x * y, x + y)).all()
    print(f"x of shape (2, 3), y of shape (3): {good}")
    assert good

    w, m, v = rng.standard_normal(1003, np.float32), np.zeros(1003, np.float32), np.zeros(1003, np.float32)
    theirs = [empty(1003) for _ in range(3)]
    theirs[0] += put_there(w)
    expected = [part.astype(np.float64) for part in (w, m, v)]
    for step in 1, 2, 3:
        g = rng.standard_normal(1003, np.float32)
        kernels.adam([put(g), *numbers(step)], theirs)
        expected = adam_of_numpy(g, *expected, step)
    good = all(np.allclose(get(part), of, atol=1e-5) for part, of in zip(theirs, expected))
    print(f"three steps of Adam in place: {good}")
    assert good

    x = rng.standard_normal((17, 1000), np.float32)
    data, most, total, out = put(x), empty((17, 1)), empty((17, 1)), empty((17, 1000))
    along = dict(axes=1, keepdims=True)
    room = empty(max(1, kernels.sum.workspace_bytes([data, most], [total], **along)), "uint8")
    kernels.most([data], [most], workspace=room, **along)
    kernels.sum([data, most], [total], workspace=room, **along)
    kernels.softmax([data, most, total], [out])
    good = np.allclose(get(out), softmax_of_numpy(x), atol=1e-6)
    print(f"softmax over axis 1 of (17, 1000): {good}")
    assert good


def main():
    kernels = Kernels(GradCodec())
    try:
        import cupy

        cupy.cuda.Device().compute_capability
    except (ImportError, RuntimeError) as why:
        print(f"SKIPPED: no GPU, so kernels are compiled only: {why}")
        try:
            compiled(kernels)
        except GradCodecError as refusal:
            if refusal.status != NVRTC_UNAVAILABLE:
                raise
            print(f"SKIPPED: no compiler: {refusal}")
        return
    try:
        import torch
    except ImportError:
        put = cupy.asarray
        print("CuPy in, CuPy out")
    else:
        put = lambda array: torch.from_numpy(array).cuda()
        print("torch in, CuPy out")
    run(kernels, put, cupy.asarray, lambda shape, dtype="float32": cupy.zeros(shape, dtype), cupy.asnumpy)


if __name__ == "__main__":
    main()
