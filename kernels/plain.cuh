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
    unsigned rule, reserved;
};
static_assert(sizeof(gc_compress) == 64, "the host lays it out too");

// Reads a value and an error, writes 1/8 byte an element.
template <typename V, typename E>
__device__ __forceinline__ void compress(const gc_compress &call) {
    constexpr unsigned N = neighbours<V, E>();
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u64 first = (static_cast<u64>(blockIdx.x) * WARPS + warp) * UNIT;
    float sum = 0;
    if (first < call.elements) {
        const unsigned count = call.elements - first < UNIT ? static_cast<unsigned>(call.elements - first) : UNIT;
        const unsigned char *values = call.grad + first * V::SIZE, *errors = call.error + first * E::SIZE;
        const Rules rules = {call.rule == RMS, false, false};
        unsigned below_zero;
        bool done = false, found = false;
        if (count == UNIT && misalignment(values, V::SIZE * N) == 0
            && (E::SIZE == 0 || misalignment(errors, E::SIZE * N + (E::SIZE == 0)) == 0)) {
            Lane<V, N> fresh;
            Lane<E, N> old;
            Lane<None, N> nothing;
            fresh.load_from(values, lane);
            old.load_from(errors, lane);
            sum = step(rules, Plain(), fresh, old, nothing, below_zero, lane, ~0u);
            done = is_finite(sum);
        }
        if (!done) {
            const auto load_row = [&](unsigned row, float (&news)[8], float (&olds)[8]) {
                load_row_each<V, N>(news, values, row, lane, count);
                load_row_each<E, N>(olds, errors, row, lane, count);
            };
            sum = step_exactly<None, N, E>(rules, Plain(), load_row, nullptr, below_zero, found, lane, count);
        }
        // As a tile without ends.
        gc_codec codec;
        codec.stride = codec.chunk_bytes = ~0ull;
        const gc_tile tile = {0, 0, first / 8, 0, 0, count, ~0u, 0};
        store_words(codec, tile, call.dst, 0, word_of_unit<N>(below_zero, lane), lane);
    }
    leave_sum(call.partials + blockIdx.x, sum);
}

#define COMPRESS(name, V, E, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_compress call) { \
        compress<V, E>(call); \
    }
COMPRESS(gc_onebit_compress_f32_f32, F32, F32, 3)
COMPRESS(gc_onebit_compress_f32_bf16, F32, BF16, 3)
COMPRESS(gc_onebit_compress_f32, F32, None, 4)
COMPRESS(gc_onebit_compress_f16_f32, F16, F32, 3)
COMPRESS(gc_onebit_compress_f16_bf16, F16, BF16, 4)
COMPRESS(gc_onebit_compress_f16, F16, None, 4)
COMPRESS(gc_onebit_compress_bf16_f32, BF16, F32, 3)
COMPRESS(gc_onebit_compress_bf16_bf16, BF16, BF16, 4)
COMPRESS(gc_onebit_compress_bf16, BF16, None, 4)

// The scale, and the bytes behind the bits. One block.
extern "C" __global__ void __launch_bounds__(THREADS) gc_onebit_compress_scale(const __grid_constant__ gc_compress call) {
    for (u64 at = call.elements / 8 + (call.elements % 8 != 0) + threadIdx.x; at < call.bytes; at += THREADS) call.dst[at] = 0;
    const double sum = fold(call.partials, (call.elements + WARPS * UNIT - 1) / (WARPS * UNIT));
    if (threadIdx.x == 0) *call.scale = scale_of(call.rule, sum, call.elements);
}

// Reads a value and an error, writes the error. A lane takes the elements that it has in the first pass.
template <typename V, typename E>
__device__ __forceinline__ void compress_errors(const gc_compress &call) {
    constexpr unsigned N = neighbours<V, E>();
    const float s = *call.scale;
    if (!is_finite(s)) return;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u64 first = (static_cast<u64>(blockIdx.x) * WARPS + warp) * UNIT;
    if (first >= call.elements) return;
    const unsigned count = call.elements - first < UNIT ? static_cast<unsigned>(call.elements - first) : UNIT;
    const unsigned char *values = call.grad + first * V::SIZE;
    unsigned char *errors = call.error + first * E::SIZE;
    if (count == UNIT && misalignment(values, V::SIZE * N) == 0 && misalignment(errors, E::SIZE * N) == 0) {
        Lane<V, N> fresh;
        Lane<E, N> old;
        fresh.load_from(values, lane);
        old.load_from(errors, lane);
#pragma unroll
        for (unsigned k = 0; k < 32 / N; k++) {
            float e[N];
#pragma unroll
            for (unsigned m = 0; m < N; m++) e[m] = error_of(__fadd_rn(fresh.at(k, m), old.at(k, m)), s);
            keep(old, k, e);
        }
        old.store_to(errors, lane);
        return;
    }
    const typename V::element *g = reinterpret_cast<const typename V::element *>(values);
    typename E::element *e = reinterpret_cast<typename E::element *>(errors);
    for (unsigned i = lane; i < count; i += WARP) {
        const float error = error_of(__fadd_rn(V::of(g[i]), E::of(e[i])), s);
        e[i] = static_cast<typename E::element>(E::SIZE == 4 ? __float_as_uint(error) : to_bf16(error));
    }
}

#define COMPRESS_ERRORS(name, V, E) \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ gc_compress call) { \
        compress_errors<V, E>(call); \
    }
COMPRESS_ERRORS(gc_onebit_compress_errors_f32_f32, F32, F32)
COMPRESS_ERRORS(gc_onebit_compress_errors_f32_bf16, F32, BF16)
COMPRESS_ERRORS(gc_onebit_compress_errors_f16_f32, F16, F32)
COMPRESS_ERRORS(gc_onebit_compress_errors_f16_bf16, F16, BF16)
COMPRESS_ERRORS(gc_onebit_compress_errors_bf16_f32, BF16, F32)
COMPRESS_ERRORS(gc_onebit_compress_errors_bf16_bf16, BF16, BF16)

#endif
