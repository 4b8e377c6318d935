// The plain form: bits and sums, then the scale, then the errors. The error is read twice, and the caller's.
#ifndef GRADCODEC_PLAIN_CUH
#define GRADCODEC_PLAIN_CUH

#include "finish.cuh"
#include "step.cuh"

struct gc_compress {
    const unsigned char *grad;
    unsigned char *error;      // or null
    unsigned char *dst;
    float *scale;
    double *partials;          // a tile of WARPS units each
    u64 elements, bytes;       // bytes of dst
    unsigned rule, values;     // the dtype of grad
};
SAME_LAYOUT(gc_compress)

// Reads a value and an error, writes 1/8 byte an element. Block: a tile, a unit a warp. What is not finite needs no
// care: a NaN that a GPU has computed has no sign, so its bit is 1, and the unit's sum shows it.
template <typename V, typename E>
__device__ __forceinline__ void compress(const gc_compress &call) {
    constexpr unsigned N = neighbours<V, E>();
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u64 first = (static_cast<u64>(blockIdx.x) * WARPS + warp) * UNIT;
    const u64 left = first < call.elements ? call.elements - first : 0;
    const unsigned count = left < UNIT ? static_cast<unsigned>(left) : +UNIT;
    Lane<V, N> fresh;
    Lane<E, N> old;
    Lane<None, N> nothing;
    fresh.load_anywhere(call.grad + first * V::SIZE, lane, count);
    old.load_anywhere(call.error + first * E::SIZE, lane, count);
    const Rules rules = {call.rule == RMS, false, false};
    unsigned below_zero;
    const Lane<F32, N> wide = widened(fresh, call.values);
    const float sum = step(rules, Plain(), wide, old, nothing, below_zero, lane, which_exist<N>(lane, count));
    // As a tile without ends.
    gc_codec codec;
    codec.stride = codec.chunk_bytes = ~0ull;
    const gc_tile tile = {0, 0, first / 8, 0, 0, count, ~0u, 0};
    store_words(codec, tile, Chunks(codec, WORKER, call.dst, {nullptr, 0}, 0), 0, word_of_unit<N>(below_zero, lane), lane);
    __shared__ double sums[WARPS];
    leave_sum(call.partials + blockIdx.x, sum, sums);
}

#define COMPRESS(name, V, E, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_compress call) { \
        compress<V, E>(call); \
    }
COMPRESS(gc_onebit_compress_f32_f32, Float, F32, 3)
COMPRESS(gc_onebit_compress_f32_bf16, Float, BF16, 3)
COMPRESS(gc_onebit_compress_f32, Float, None, 4)
COMPRESS(gc_onebit_compress_16_f32, Half, F32, 3)
COMPRESS(gc_onebit_compress_16_bf16, Half, BF16, 3)
COMPRESS(gc_onebit_compress_16, Half, None, 4)

// The scale, and the bytes behind the bits. One block.
extern "C" __global__ void __launch_bounds__(THREADS)
gc_onebit_compress_scale(const __grid_constant__ gc_compress call) {
    const u64 bits = call.elements / 8 + (call.elements % 8 != 0);
    for (u64 at = bits + threadIdx.x; at < call.bytes; at += THREADS) call.dst[at] = 0;
    const double sum = fold(call.partials, (call.elements + WARPS * UNIT - 1) / (WARPS * UNIT));
    if (threadIdx.x == 0) *call.scale = scale_of(call.rule, sum, call.elements);
}

// Reads a value and an error, writes the error. Block: a tile, a unit a warp, counted from the first error at which a
// vector can be written. The *head* before it, and what fills no vector at the end, are single elements, one a lane.
template <typename V, typename E>
__device__ __forceinline__ void compress_errors(const gc_compress &call) {
    constexpr unsigned N = neighbours<V, E>(), A_VECTOR = N * E::SIZE, HALF = WARP / 2;
    const unsigned lane = threadIdx.x % WARP, unit = blockIdx.x * WARPS + threadIdx.x / WARP;
    unsigned head = (A_VECTOR - misalignment(call.error, A_VECTOR)) % A_VECTOR / E::SIZE;
    if (head > call.elements) head = static_cast<unsigned>(call.elements);
    const u64 first = head + static_cast<u64>(unit) * UNIT, left = first < call.elements ? call.elements - first : 0;
    const unsigned count = left < UNIT ? static_cast<unsigned>(left) : +UNIT, filled = count / N * N;
    const unsigned char *values = call.grad + first * V::SIZE;
    unsigned char *errors = call.error + first * E::SIZE;
    Lane<V, N> fresh;
    Lane<E, N> old;
    fresh.load_anywhere(values, lane, filled);
    old.load_inside(errors, lane, filled);
    // The lower half of a warp has the end, the upper half the head.
    const bool of_head = lane >= HALF;
    const int single = static_cast<int>(of_head ? lane - HALF - head : filled + lane);
    const bool exists = of_head ? unit == 0 && single < 0 : single < static_cast<int>(count);
    const typename V::element *g = reinterpret_cast<const typename V::element *>(values) + single;
    typename E::element *e = reinterpret_cast<typename E::element *>(errors) + single;
    const float of_single = exists ? __fadd_rn(V::of(*g, call.values), E::of(*e)) : 0, s = *call.scale;
    if (!is_finite(s)) return;
    const Lane<F32, N> wide = widened(fresh, call.values);
#pragma unroll
    for (unsigned k = 0; k < 32 / N; k++) {
        float error[N];
#pragma unroll
        for (unsigned m = 0; m < N; m++) error[m] = error_of(__fadd_rn(wide.at(k, m), old.at(k, m)), s);
        keep(E(), old.vectors[k], error);
    }
    old.store_inside(errors, lane, filled);
    if (exists) {
        const float error = error_of(of_single, s);
        *e = static_cast<typename E::element>(E::SIZE == 4 ? __float_as_uint(error) : to_bf16(error));
    }
}

#define COMPRESS_ERRORS(name, V, E) \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) name(const __grid_constant__ gc_compress call) { \
        compress_errors<V, E>(call); \
    }
COMPRESS_ERRORS(gc_onebit_compress_errors_f32_f32, Float, F32)
COMPRESS_ERRORS(gc_onebit_compress_errors_f32_bf16, Float, BF16)
COMPRESS_ERRORS(gc_onebit_compress_errors_16_f32, Half, F32)
COMPRESS_ERRORS(gc_onebit_compress_errors_16_bf16, Half, BF16)

#endif
