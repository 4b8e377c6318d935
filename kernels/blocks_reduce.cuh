// Reducing.
#ifndef GRADCODEC_BLOCKS_REDUCE_CUH
#define GRADCODEC_BLOCKS_REDUCE_CUH

#include "blocks_emit.cuh"

// MEAN: divided by the number of payloads. A power of two divides as its reciprocal multiplies.
struct Share {
    float payloads, reciprocal;
    bool divides, multiplies;
    __device__ __forceinline__ Share(const gc_codec &codec, u64 number)
        : payloads(static_cast<float>(number)), reciprocal(0), divides(false), multiplies(false) {
        if (codec.reduction == REDUCTION_SUM || number == 1) return;
        multiplies = (number & (number - 1)) == 0, divides = !multiplies;
        if (multiplies) reciprocal = __fdiv_rn(1, payloads);
    }
    __device__ __forceinline__ float of(float sum) const {
        return divides ? __fdiv_rn(sum, payloads) : multiplies ? __fmul_rn(sum, reciprocal) : sum;
    }
};

// What is loaded at once: codes of a warp's unit and scales in some payloads from one on.
template <unsigned C, unsigned N>
struct CodeGroup {
    enum : unsigned { MOST = 2, ROWS = 32 / N };
    Codes<C, N> codes[MOST][ROWS];
    unsigned scales[MOST];
    // `whole`: all blocks are there; else those that are not are 0.
    __device__ __forceinline__ void load(const gc_reduce &call, const UnitBlocks<C> &blocks, unsigned first, unsigned many,
                                         bool whole, unsigned lane) {
        constexpr unsigned BYTES = Codes<C, N>::BYTES;
#pragma unroll
        for (unsigned i = 0; i < MOST; i++) {
            // In place of one that is not there the first, which is not used: no branch, and nothing more from memory.
            const unsigned char *chunk = call.chunks + (first + i < many ? first + i : first) * call.codec.stride;
            const unsigned char *from = chunk + blocks.codes(0) + lane * BYTES;
            scales[i] = lane < blocks.count ? load_scale<C>(chunk + blocks.scale(0) + lane * Block<C>::SCALE_BYTES) : 0;
            if (whole) {
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) codes[i][k].load(from + k * WARP * BYTES);
            } else {
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) {
                    codes[i][k] = Codes<C, N>();
                    const bool there = (k * WARP + lane) * N / Block<C>::ELEMENTS < blocks.count;
                    if (there) codes[i][k].load(from + k * WARP * BYTES);
                }
            }
        }
    }
};

// Reads a code an element and a scale a block of each payload, and an error; writes an error, a code and a scale. Block: a
// tile, a unit a warp. With `shard` it writes the sum or mean in place of all that: the first half.
template <unsigned C>
__device__ __forceinline__ void reduce_blocks(const gc_reduce &call) {
    constexpr unsigned N = 8, ROWS = 32 / N, LANES = Block<C>::ELEMENTS / N, A_ROW = WARP / LANES;
    const gc_codec &codec = call.codec;
    const gc_tile tile = tile_of_blocks<C>(codec, blockIdx.x);
    const unsigned lane = threadIdx.x % WARP, at = threadIdx.x / WARP * UNIT, count = elements_of_unit(tile, at);
    const unsigned many = static_cast<unsigned>(call.payloads);
    const Share share(codec, call.payloads);
    const bool raw = tile.unit == NO_UNIT || tile.run == NO_RUN, zeros = codec.policy == ZERO;
    const UnitBlocks<C> blocks(codec, tile, at, count);
    CodeGroup<C, N> group = {};
    Errors<N> old = {};
    Unit<C, N> unit = {codec, blocks, lane, count, nullptr, nullptr, call.dst};
    if (!raw && count != 0) {
        group.load(call, blocks, 0, many, count == UNIT, lane);
        if (codec.error != 0 && !call.shard) {
            const unsigned valid = valid_state(codec);
            const u64 kept_at = codec.units_at + (tile.unit * UNIT + at) * codec.error;
            unit.from = codec.state[valid] + kept_at;
            unit.to = codec.state[codec.policy == TRANSACTIONAL ? valid ^ 1 : valid] + kept_at;
            old.load(unit.from, codec.error, lane);
        }
    }
    // What the chunks tell of themselves: every warp looks at all of them, two at a time.
    unsigned met = 0;
#pragma unroll 1
    for (unsigned r = lane / HEADER_WORDS; r < (many + 1) / 2 * 2; r += 2) {
        const unsigned payload = r < many ? r : many - 1;
        met |= look_at_header(codec, call.chunks + payload * codec.stride, codec.chunk, lane);
    }
    const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT), nonfinite = __any_sync(WHOLE_WARP, met & NONFINITE);
    unsigned found = corrupt ? +CORRUPT : nonfinite ? +NONFINITE : 0, number = 0;
    float *shard = nullptr;
    if (call.shard && tile.run != NO_RUN) {
        shard = reinterpret_cast<float *>(call.dst) + run_of(codec, tile.run).base + tile.first;
    }
    if (raw) {
        if (tile.run != NO_RUN) {
            const Places places = places_of(codec, tile);
#pragma unroll 1
            for (unsigned i = threadIdx.x; i < tile.count; i += THREADS) {
                const u64 place = place_of_raw(codec, places, i);
                float sum = 0;
#pragma unroll 4
                for (unsigned r = 0; r < many; r++) {
                    float v = *reinterpret_cast<const float *>(call.chunks + r * codec.stride + place);
                    if (!is_finite(v)) {
                        found |= corrupt ? 0 : +NONFINITE;
                        if (zeros) v = 0;
                    }
                    sum = __fadd_rn(sum, v);
                }
                sum = share.of(sum);
                unsigned of_sum = 0;
                if (shard) shard[i] = corrupt ? 0 : canonical(sum);
                else store_raw(codec, places, call.dst, i, corrupt ? 0 : sum, of_sum);
                found |= of_sum;
            }
        }
        if (!call.shard) number = come(codec, found);
    } else {
        float c[ROWS][N];
        const auto add = [&](unsigned i, bool first) {
            const float mine = scale_from_memory<C>(group.scales[i]);
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
                const float s = Block<C>::SCALE_BYTES != 0 ? __shfl_sync(WHOLE_WARP, mine, k * A_ROW + lane / LANES) : 1;
                float v[N];
                dequantize(group.codes[i][k], s, v);
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = __fadd_rn(first ? 0 : c[k][m], v[m]);
            }
        };
        add(0, true);
        if (many > 1) add(1, false);
#pragma unroll 1
        for (unsigned r = 2; r < many; r += 2) {
            if (count != 0) group.load(call, blocks, r, many, count == UNIT, lane);
            add(0, false);
            if (r + 1 < many) add(1, false);
        }
        if (share.divides) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = __fdiv_rn(c[k][m], share.payloads);
            }
        } else if (share.multiplies) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = __fmul_rn(c[k][m], share.reciprocal);
            }
        }
        // A row again, element by element: +0 for a v that is not finite, if the policy says so. Tells of those.
        bool any = false;
        const auto sum_again = [&](unsigned row, float (&x)[N]) {
            const unsigned element = (row * WARP + lane) * N, j = element / Block<C>::ELEMENTS;
#pragma unroll
            for (unsigned m = 0; m < N; m++) x[m] = 0;
            if (j >= blocks.count) return;
#pragma unroll 1
            for (unsigned r = 0; r < many; r++) {
                const unsigned char *chunk = call.chunks + r * codec.stride;
                Codes<C, N> codes;
                codes.load(chunk + blocks.codes(j) + element % Block<C>::ELEMENTS * Block<C>::BITS / 8);
                float v[N];
                dequantize(codes, scale_from_memory<C>(load_scale<C>(chunk + blocks.scale(j))), v);
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    const bool wrong = !is_finite(v[m]);
                    any |= wrong && unit.has(row, m);
                    x[m] = __fadd_rn(x[m], wrong && zeros ? 0 : v[m]);
                }
            }
#pragma unroll
            for (unsigned m = 0; m < N; m++) x[m] = share.of(x[m]);
        };
        if (call.shard) {
            bool finite = true;
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) finite &= is_finite(c[k][m]);
            }
            if (!finite) {
#pragma unroll 1
                for (unsigned row = 0; row < ROWS; row++) {
                    float x[N];
                    sum_again(row, x);
#pragma unroll
                    for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                        for (unsigned m = 0; m < N; m++) c[k][m] = k + 1 < ROWS ? c[(k + 1) % ROWS][m] : canonical(x[m]);
                    }
                }
                if (any && !corrupt) found |= NONFINITE;
            }
            // Element by element, for parts begin anywhere; neighbours lie in the same lines.
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    if (corrupt) c[k][m] = 0;
                }
                float *to = shard + at + k * WARP * N;
                if (count == UNIT && misalignment(shard, 16) == 0) {
                    store_floats<N>(reinterpret_cast<unsigned char *>(to), c[k], lane);
                } else {
#pragma unroll
                    for (unsigned m = 0; m < N; m++) {
                        if (unit.has(k, m)) to[lane * N + m] = c[k][m];
                    }
                }
            }
        } else {
            const auto with_error = [&](float d, float e) { return __fadd_rn(d, __fmul_rn(codec.beta, e)); };
            if (codec.error == 4) {
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                    for (unsigned m = 0; m < N; m++) c[k][m] = with_error(c[k][m], old.template at<4>(k, m));
                }
            } else if (codec.error == 2) {
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                    for (unsigned m = 0; m < N; m++) c[k][m] = with_error(c[k][m], old.template at<2>(k, m));
                }
            }
            if (corrupt) {
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                    for (unsigned m = 0; m < N; m++) c[k][m] = 0;
                }
            }
            unsigned most[ROWS];
            unit.look(c, most, found, [&](unsigned row, float (&x)[N]) {
                sum_again(row, x);
                if (codec.error == 0 || count == 0) return;
                Errors<N> e = {};
                e.load_row(unit.from, codec.error, 0, row, lane);
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    x[m] = with_error(x[m], codec.error == 4 ? e.template at<4>(0, m) : e.template at<2>(0, m));
                }
            });
            number = come(codec, found);
            unit.emit(c, most, corrupt);
        }
    }
    if (call.shard) {
        const bool wrong = __any_sync(WHOLE_WARP, found & CORRUPT), any_found = __any_sync(WHOLE_WARP, found != 0);
        if (lane == 0 && any_found) tell(codec, wrong ? CORRUPT : NONFINITE);
    } else if (threadIdx.x < WARP) {
        finish_blocks<C>(codec, call.dst, number, lane);
    }
}

#define BLOCKS_REDUCE(name, C) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) name(const __grid_constant__ gc_reduce call) { \
        reduce_blocks<C>(call); \
    }
BLOCKS_REDUCE(gc_blocks_reduce_bf16, CODEC_BF16)
BLOCKS_REDUCE(gc_blocks_reduce_mxfp8, CODEC_MXFP8)
BLOCKS_REDUCE(gc_blocks_reduce_int8, CODEC_INT8)
BLOCKS_REDUCE(gc_blocks_reduce_int4, CODEC_INT4)
BLOCKS_REDUCE(gc_blocks_reduce_mxfp4, CODEC_MXFP4)

#endif
