"""GradCodec inside custom kernels, and the library's kernels launched directly, by CuPy's RawModule.

    PYTHONPATH=python python3 examples/python/cupy_kernels.py

Headers are searched in the folder GRADCODEC_INCLUDE, or else in ../../include. docs/ABI.md lists names and arguments of
the library's kernels.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
from gradcodec import BIG, ONEBIT, Codec, GradCodec

INCLUDE = os.environ.get("GRADCODEC_INCLUDE", Path(__file__).resolve().parents[2] / "include")

# The kernel that computes an update also packs its signs, and the kernel that applies them also unpacks them: the bits
# need no extra pass over memory.
SOURCE = r"""
#include "gradcodec/device.cuh"

extern "C" __global__ void momentum(const float *gradient, float *state, unsigned char *bits, unsigned long long n) {
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    float update = 0;
    if (i < n) {
        update = 0.9f * state[i] + 0.1f * gradient[i];
        state[i] = update;
    }
    // Outside the condition: all lanes of a warp take part.
    gradcodec::store_bit(bits, i, n, gradcodec::sign(update), gradcodec::ORDER_BIG);
}

extern "C" __global__ void descend(const unsigned char *bits, float *weight, float rate, unsigned long long n) {
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) weight[i] -= gradcodec::load_bit(bits, i, gradcodec::ORDER_BIG) ? rate : -rate;
}

// The same with error feedback: a warp takes a unit of 1024 elements, 32 side by side at a time. `kept` and `s` are
// what the last step left; the scale of this one is made of the units' sums (docs/NUMERICS.md).
extern "C" __global__ void feedback(const float *gradient, float *state, float *kept, float s, unsigned char *bits,
                                    float *sums, unsigned long long n) {
    unsigned lane = threadIdx.x % 32;
    unsigned long long unit = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    gradcodec::UnitSum<1> sum;
    #pragma unroll
    for (unsigned k = 0; k < 32; k++) {
        unsigned long long i = unit * gradcodec::UNIT + k * 32 + lane;
        float c = 0;
        if (i < n) {
            float update = __fadd_rn(__fmul_rn(0.9f, state[i]), __fmul_rn(0.1f, gradient[i]));
            state[i] = update;
            kept[i] = c = gradcodec::canonical(gradcodec::feedback(update, kept[i], s, 1, 1, 1));
        }
        gradcodec::store_bit(bits, i, n, gradcodec::sign(c), gradcodec::ORDER_BIG);
        sum.add(k, 0, __fmul_rn(c, c));
    }
    float all = sum.of_warp(lane);
    if (lane == 0 && unit * gradcodec::UNIT < n) sums[unit] = all;
}
"""


def fused(cupy, n):
    """Packs in the epilogue of one kernel, and unpacks in the prologue of another."""
    module = cupy.RawModule(code=SOURCE, options=("--std=c++14", f"-I{INCLUDE}"))
    random = cupy.random.default_rng(1)
    gradient, state = random.standard_normal(n, cupy.float32), random.standard_normal(n, cupy.float32)
    weight, bits = cupy.zeros(n, cupy.float32), cupy.empty(-(-n // 8), cupy.uint8)
    grid, block = (-(-n // 256),), (256,)  # whole warps
    module.get_function("momentum")(grid, block, (gradient, state, bits, np.uint64(n)))
    module.get_function("descend")(grid, block, (bits, weight, np.float32(0.5), np.uint64(n)))
    good = bool((bits == cupy.packbits(state >= 0)).all())
    print(f"cupy: packed in an epilogue: {good}; applied in a prologue: {bool((abs(weight) == 0.5).all())}")
    assert good and bool((weight == cupy.where(state >= 0, -0.5, 0.5)).all())


def scale_of(sums, n):
    """Returns the root of the mean square from the sums of units: adds neighbours in float64 until one is left."""
    sums = sums.get().astype(np.float64)
    while sums.size > 1:
        sums = np.append(sums, np.zeros(sums.size % 2))
        sums = sums[::2] + sums[1::2]
    return np.float32(np.sqrt(sums[0] / n))


def fed_back(cupy, gradcodec, n):
    """Checks an optimizer step that also packs bits: it is bit-identical to a codec that encodes the update."""
    step = cupy.RawModule(code=SOURCE, options=("--std=c++14", f"-I{INCLUDE}")).get_function("feedback")
    random, units = cupy.random.default_rng(3), -(-n // 1024)
    state, kept, sums = cupy.zeros(n, cupy.float32), cupy.zeros(n, cupy.float32), cupy.empty(units, cupy.float32)
    bits, s, good = cupy.empty(-(-n // 8), cupy.uint8), np.float32(0), True
    codec = Codec(gradcodec, ONEBIT, [n], device=(2, cupy.cuda.Device().id))
    payload, scale = cupy.empty(codec.payload_bytes, cupy.uint8), cupy.empty(1, cupy.float32)
    for _ in range(3):
        gradient = random.standard_normal(n, cupy.float32)
        step((-(-units // 8),), (256,), (gradient, state, kept, s, bits, sums, np.uint64(n)))
        s = scale_of(sums, n)
        codec.encode([state], payload)
        codec.scales(scale)
        good &= bool((payload[80 : 80 + bits.size] == bits).all()) and float(scale[0]) == float(s)
    print(f"cupy: a step with error feedback is a codec's: {good}")
    assert good


def by_name(cupy, gradcodec, n):
    """Launches the library's own kernels."""
    capability = int(cupy.cuda.Device().compute_capability)
    with tempfile.NamedTemporaryFile(suffix=".fatbin") as file:
        file.write(gradcodec.builtin_kernels("bits"))
        file.flush()
        module = cupy.RawModule(path=file.name)
        functions = {name: module.get_function(name) for name in ("gc_pack_signs_f32", "gc_unpack_u8")}

    def launch(name, items, arguments):
        shape = gradcodec.builtin_kernel_shape(name, capability)
        blocks = -(-items // shape.items_per_block)
        functions[name]((blocks,), (shape.threads,), arguments, shared_mem=shape.shared_bytes)

    values = cupy.random.default_rng(2).standard_normal(n, cupy.float32)
    bits, truth = cupy.empty(-(-n // 8), cupy.uint8), cupy.empty(n, cupy.uint8)
    sizes = np.uint64(n), np.uint64(bits.size)
    launch("gc_pack_signs_f32", bits.size, (values, bits, *sizes, np.uint32(BIG)))
    launch("gc_unpack_u8", n, (bits, truth, *sizes, np.uint8(1), np.uint32(BIG)))
    good = bool((bits == cupy.packbits(values >= 0)).all()) and bool((truth == (values >= 0)).all())
    print(f"cupy: gc_pack_signs_f32 and gc_unpack_u8 launched by name: {good}")
    assert good


def main():
    gradcodec = GradCodec()
    shape = gradcodec.builtin_kernel_shape("gc_unpack_u8", 90)
    print(f"{len(gradcodec.builtin_kernels('bits'))} bytes of kernels for all GPUs")
    print(f"gc_unpack_u8 on 9.0: blocks of {shape.threads} threads for {shape.items_per_block} elements each")
    try:
        import cupy
    except ImportError:
        print("SKIPPED: no CuPy here, so no kernel was launched")
        raise SystemExit
    try:
        cupy.cuda.Device().compute_capability
    except cupy.cuda.runtime.CUDARuntimeError:
        print("SKIPPED: no CUDA device, so no kernel was launched")
        raise SystemExit
    for n in 1, 1000, 1_000_003:
        fused(cupy, n)
        fed_back(cupy, gradcodec, n)
        by_name(cupy, gradcodec, n)


if __name__ == "__main__":
    main()
