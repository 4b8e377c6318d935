// Reducing.
#ifndef GRADCODEC_REDUCE_CUH
#define GRADCODEC_REDUCE_CUH

#include "decode.cuh"
#include "step.cuh"

// The word of a lane among the bits of a unit, as it lies in memory; 0 where there are none.
__device__ __forceinline__ unsigned load_word(const unsigned char *unit, bool aligned, unsigned count, unsigned lane) {
    if (aligned) return lane * 32 < count ? reinterpret_cast<const unsigned *>(unit)[lane] : 0;
    unsigned word = 0;
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        const unsigned byte = lane * 4 + k;
        if (byte * 8 < count) word |= static_cast<unsigned>(unit[byte]) << 8 * k;
    }
    return word;
}

// The sum of all payloads' scales, each with the sign of its bit, in turn. Whether all of the scales are finite.
__device__ __forceinline__ bool sum_of_payloads(const gc_reduce &call, const gc_tile &tile, unsigned at, unsigned count,
                                                Lane<F32, 4> &sum, unsigned lane) {
    constexpr unsigned N = 4, AT_ONCE = 4;
    const gc_codec &codec = call.codec;
    const unsigned payloads = static_cast<unsigned>(call.payloads);
    const unsigned char *bits = call.chunks + tile.to + at / 8, *scales = call.chunks + HEADER + 4 * static_cast<u64>(tile.run);
    const bool aligned = misalignment(bits, 4) == 0;
    bool finite = true;
#pragma unroll
    for (unsigned k = 0; k < 32 / N; k++) {
#pragma unroll
        for (unsigned m = 0; m < N; m++) sum.vectors[k].words[m] = 0;
    }
#pragma unroll 1
    for (unsigned first = 0; first < payloads; first += AT_ONCE) {
        unsigned words[AT_ONCE];
        float q[AT_ONCE];
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; i++) {
            if (first + i >= payloads) continue;
            words[i] = load_word(bits + (first + i) * codec.stride, aligned, count, lane);
            q[i] = *reinterpret_cast<const float *>(scales + (first + i) * codec.stride);
        }
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; i++) {
            if (first + i >= payloads) continue;
            const float s = codec.kind == SIGN ? 1 : __fdiv_rn(q[i], static_cast<float>(payloads));
            finite = finite && is_finite(s);
            const unsigned fields = fields_of_unit<N>(in_order(words[i], ORDER_BIG), lane);
#pragma unroll
            for (unsigned k = 0; k < 32 / N; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    const float term = signed_scale(fields >> (k * N + m) & 1, s);
                    sum.vectors[k].words[m] = __float_as_uint(__fadd_rn(sum.at(k, m), term));
                }
            }
        }
    }
    return finite;
}

// Reads 1/8 byte of each payload and an error, writes an error and 1/8 byte an element. Block: a tile, a unit a warp.
template <typename E>
__device__ __forceinline__ void reduce(const gc_reduce &call) {
    constexpr unsigned N = 4;
    const gc_codec &codec = call.codec;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, at = warp * UNIT;
    const unsigned payloads = static_cast<unsigned>(call.payloads);
    const gc_tile tile = tile_of(codec, blockIdx.x);
    const unsigned valid = valid_state(codec);
    const unsigned char *from = codec.state[valid];
    unsigned char *to = codec.state[codec.policy == TRANSACTIONAL ? valid ^ 1 : valid];
    const unsigned count = elements_of_unit(tile, at);
    const u64 kept_at = codec.units_at + (tile.unit * UNIT + at) * E::SIZE;
    Lane<E, N> old;
    if (count != 0) old.load_from(from + kept_at, lane);

    unsigned met = 0;
#pragma unroll 1
    for (unsigned r = warp; r < payloads; r += WARPS) {
#pragma unroll 1
        for (unsigned w = lane; w < HEADER_WORDS + codec.n_segments; w += WARP) {
            met |= look_at_word(codec, call.chunks + r * codec.stride, codec.chunk, w);
        }
    }
    const bool corrupt = __syncthreads_or(met & CORRUPT), told = __syncthreads_or(met & NONFINITE);
    if (threadIdx.x == 0 && (corrupt || told)) atomicOr(&codec.control->found, corrupt ? CORRUPT : NONFINITE);

    float all = 0;
    if (count != 0) {
        unsigned below_zero = ~0u;
        if (!corrupt) {
            const Rules rules = {codec.rule == RMS, codec.policy == ZERO, false};
            const Handle form = {reinterpret_cast<const float *>(from + codec.scales_at)[tile.run], 1, 1, codec.beta};
            // A majority that may be a tie is not a sum alone.
            bool done = codec.kind == ONEBIT || payloads % 2 != 0;
            if (done) {
                Lane<F32, N> sum;
                done = sum_of_payloads(call, tile, at, count, sum, lane);
                Lane<E, N> kept;
                all = step(rules, form, sum, old, kept, below_zero, lane, which_exist<N>(lane, count));
                done = done && is_finite(all);
                if (done) kept.store_to(to + kept_at, lane);
            }
            if (!done) {
                // In a tie it is this payload's bit, for the first byte of the unit, and the next one's for the next.
                const u64 turn = reinterpret_cast<const u64 *>(from)[TURN_WORD / 2];
                const unsigned in_turn = static_cast<unsigned>(((tile.byte + at / 8) % payloads + turn % payloads) % payloads);
                bool found = false;
                const auto load_row = [&](unsigned row, float (&sum)[8], float (&olds)[8]) {
                    load_kept_row<E, N>(olds, from + kept_at, row, lane);
                    // The lane's elements are in two bytes, of which it has one half each.
                    unsigned byte[2];
#pragma unroll
                    for (unsigned j = 0; j < 2; j++) byte[j] = ((row * 2 + j) * WARP + lane) * N / 8;
                    const unsigned shift = lane % 2 * 4;
#pragma unroll
                    for (unsigned i = 0; i < 8; i++) sum[i] = 0;
#pragma unroll 1
                    for (unsigned first = 0; first < payloads; first += WARP) {
                        // The scales, a lane one.
                        float mine = 0;
                        if (first + lane < payloads) {
                            const float s = reinterpret_cast<const float *>(call.chunks + (first + lane) * codec.stride + HEADER)[tile.run];
                            mine = codec.kind == SIGN ? 1 : __fdiv_rn(s, static_cast<float>(payloads));
                            if (!is_finite(mine)) {
                                found = true;
                                if (rules.zero) mine = 0;
                            }
                        }
                        const unsigned many = payloads - first < WARP ? payloads - first : static_cast<unsigned>(WARP);
#pragma unroll 2
                        for (unsigned r = 0; r < many; r++) {
                            const float q = __shfl_sync(WHOLE_WARP, mine, r);
                            const unsigned char *bits = call.chunks + (first + r) * codec.stride + tile.to + at / 8;
#pragma unroll
                            for (unsigned j = 0; j < 2; j++) {
                                const unsigned half = byte[j] * 8 < count ? static_cast<unsigned>(bits[byte[j]]) << shift : 0;
#pragma unroll
                                for (unsigned m = 0; m < N; m++) {
                                    sum[j * N + m] = __fadd_rn(sum[j * N + m], signed_scale(half & 128 >> m, q));
                                }
                            }
                        }
                    }
                    if (codec.kind == SIGN && payloads % 2 == 0) {
#pragma unroll
                        for (unsigned j = 0; j < 2; j++) {
                            const unsigned r = (in_turn + byte[j]) % payloads;
                            const unsigned char *bits = call.chunks + r * codec.stride + tile.to + at / 8;
                            const unsigned half = byte[j] * 8 < count ? static_cast<unsigned>(bits[byte[j]]) << shift : 0;
#pragma unroll
                            for (unsigned m = 0; m < N; m++) {
                                if (sum[j * N + m] == 0) sum[j * N + m] = half & 128 >> m ? 1 : -1;
                            }
                        }
                    }
                };
                all = step_exactly<E, N, E>(rules, form, load_row, to + kept_at, below_zero, found, lane, count);
                if (found) atomicOr(&codec.control->found, NONFINITE);
            }
        }
        store_words(codec, tile, call.dst, at / 8, word_of_unit<N>(below_zero, lane), lane);
    }
    leave_sum(codec.partials + blockIdx.x, all);
}

#define REDUCE(name, E) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) name(const __grid_constant__ gc_reduce call) { reduce<E>(call); }
REDUCE(gc_onebit_reduce_f32, F32)
REDUCE(gc_onebit_reduce_bf16, BF16)
REDUCE(gc_onebit_reduce, None)

#endif
