"""What the first use of a kernel costs that is compiled at run time, without a GPU: compiled for one that is not here.

    GRADCODEC_LIBRARY=target/release/libgradcodec.so.0 python bench/first_use.py [--capability 90] [--runs 5]

NVRTC is found as always, or named by GRADCODEC_NVRTC. Each line: the kernel; milliseconds of gc_kernel_prepare(), the
least of several processes each: with nothing cached; with nothing cached in a process that has compiled another kernel;
from disk; in memory. An empty kernel shows what NVRTC itself takes. A run without gc_kernel_prepare() compiles less: one or
two of the six or twelve kernels.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "python"))

import numpy as np

from kernels import elementwise, on_card, reduction


def zeros(*shape, dtype="f4"):
    return np.zeros(shape, dtype)


def bfloat16(*shape):
    return on_card(zeros(*shape, dtype="u2"), dtype="bfloat16")


SUM = "x", "a + b", "y = a", "0"
BEST = """
template <typename T> struct best {
    T x; long long at;
    __device__ best() {} __device__ best(T x, long long at) : x(x), at(at) {}
};"""
# Arguments of a kernel, inputs, outputs, axes.
WORKS = {
    "empty": (elementwise, ("", "float32 z", ";"), [], [zeros(4)], None),
    "two float32": (
        elementwise, ("float32 x, float32 y", "float32 z", "if (x - 2 > y) { z = x * y; } else { z = x + y; }"),
        [zeros(2, 3), zeros(3)], [zeros(2, 3)], None,
    ),
    "two float16": (elementwise, ("T x, T y", "T z", "z = x * y"), [zeros(4, dtype="f2")] * 2, [zeros(4, dtype="f2")], None),
    "six dtypes": (
        elementwise,
        ("int8 a, float16 b, bfloat16 c, int64 d, float64 e, bool f", "float32 y, bfloat16 z",
         "y = a + b + c + d + e + f; z = y"),
        [zeros(4, dtype="i1"), zeros(4, dtype="f2"), bfloat16(4), zeros(4, dtype="i8"), zeros(4, dtype="f8"),
         zeros(4, dtype="?")], [zeros(4), bfloat16(4)], None,
    ),
    "raw": (elementwise, ("T x, raw T y", "T z", "z = x + y[i]"), [zeros(4), zeros(4)], [zeros(4)], None),
    "sum": (reduction, ("T x", "T y", *SUM), [zeros(3, 4)], [zeros(3)], 1),
    "sum of float16": (reduction, ("float16 x", "float32 y", *SUM), [zeros(3, 4, dtype="f2")], [zeros(3)], 1),
    "softmax's sum": (
        reduction, ("T x, T m", "float32 y", "exp(x - m)", *SUM[1:]), [zeros(3, 4), zeros(3, 1)], [zeros(3)], 1,
    ),
    "argmax": (
        reduction,
        ("T x", "T y, int64 at", "best<T>(x, _J)", "a.x < b.x || (a.x == b.x && a.at > b.at) ? b : a",
         "y = a.x; at = a.at", None, "kernel"),
        [zeros(3, 4)], [zeros(3), zeros(3, dtype="i8")], 1, dict(reduce_type="best<T>", preamble=BEST),
    ),
}  # fmt: skip


def prepare(work, capability):
    """Milliseconds of a new kernel, and of the same again."""
    make, texts, inputs, outputs, axes, *more = WORKS[work]
    kernel, times = make(*texts, **(more[0] if more else {})), []
    for _ in range(2):
        start = time.perf_counter()
        kernel.prepare(inputs, outputs, axes=axes, capability=capability)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def in_process(capability, folder, *works):
    """The times of the last of these kernels, in a process of their own."""
    command = [sys.executable, __file__, "--capability", str(capability), "--here", *works]
    variables = {**os.environ, "GRADCODEC_CACHE_DIR": folder, "GRADCODEC_CACHE": "1"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--here", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        for work in arguments.here:
            times = prepare(work, arguments.capability)
        print(*times)
        return
    print(f"{'ms':16} {'cached: nothing':>16} {'NVRTC loaded':>14} {'on disk':>10} {'in memory':>10}")
    for work in WORKS:
        samples = []
        for _ in range(arguments.runs):
            with tempfile.TemporaryDirectory() as folder:
                cold, _ = in_process(arguments.capability, folder, work)
                disk, memory = in_process(arguments.capability, folder, work)
            with tempfile.TemporaryDirectory() as folder:
                other = "raw" if work == "empty" else "empty"
                warm, _ = in_process(arguments.capability, folder, other, work)
            samples.append((cold, warm, disk, memory))
        cold, warm, disk, memory = (min(column) for column in zip(*samples))
        print(f"{work:16} {cold:16.1f} {warm:14.1f} {disk:10.2f} {memory:10.3f}", flush=True)


if __name__ == "__main__":
    main()
