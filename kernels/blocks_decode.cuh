// Decoding.
#ifndef GRADCODEC_BLOCKS_DECODE_CUH
#define GRADCODEC_BLOCKS_DECODE_CUH

#include "blocks.cuh"

// fl(fl(v / divisor) * m). What is usual is neither.
struct Divided {
    float divisor, m;
    bool plain;
    __device__ __forceinline__ explicit Divided(const gc_decode &call) : divisor(call.divisor), m(factor(call.factor)) {
        plain = divisor == 1 && m == 1;
    }
    __device__ __forceinline__ float of(float v) const { return plain ? v : __fmul_rn(__fdiv_rn(v, divisor), m); }
};

// A result of 16 bits. To float16 a finite value is at most 65504 in magnitude.
__device__ __forceinline__ unsigned short to_16(float x, unsigned dtype) {
    if (dtype == BFLOAT16) return to_bf16(x);
    if (is_finite(x)) x = fminf(fmaxf(x, -65504), 65504);
    return to_f16(x);
}
// Two of them; a NaN gets any pattern.
__device__ __forceinline__ unsigned to_16_pair(float first, float second, unsigned dtype) {
    if (dtype == BFLOAT16) return to_bf16_pair(first, second);
    return to_16(first, dtype) | static_cast<unsigned>(to_16(second, dtype)) << 16;
}

// A row's results of a lane: 16 bytes. `bad`: whether any of them is not finite, and then it is as it is to be.
__device__ __forceinline__ uint4 results_of(const float (&v)[4], unsigned, bool &bad) {
    float any = 0;
#pragma unroll
    for (unsigned m = 0; m < 4; m++) any = __fmaf_rn(v[m], 0, any);
    bad = any != any;
    if (bad) {
        return make_uint4(__float_as_uint(canonical(v[0])), __float_as_uint(canonical(v[1])),
                          __float_as_uint(canonical(v[2])), __float_as_uint(canonical(v[3])));
    }
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
}
__device__ __forceinline__ uint4 results_of(const float (&v)[8], unsigned dtype, bool &bad) {
    unsigned pairs[4], any = 0;
    // A carry out of an exponent of ones.
    const unsigned exponents = dtype == BFLOAT16 ? 0x7f807f80u : 0x7c007c00u, ones = dtype == BFLOAT16 ? 0x00800080u : 0x04000400u;
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        pairs[k] = to_16_pair(v[2 * k], v[2 * k + 1], dtype);
        any |= (pairs[k] & exponents) + ones;
    }
    bad = any & 0x80008000u;
    if (bad) {
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            pairs[k] = to_16(v[2 * k], dtype) | static_cast<unsigned>(to_16(v[2 * k + 1], dtype)) << 16;
        }
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Whether a chunk is corrupt, by a thread alone: where its neighbours look at others.
__device__ __forceinline__ bool is_corrupt(const gc_codec &codec, const unsigned char *chunk, unsigned number) {
    bool wrong = false;
#pragma unroll
    for (unsigned k = 0; k < HEADER_WORDS / 4; k++) {
        const uint4 v = reinterpret_cast<const uint4 *>(chunk)[k];
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (unsigned m = 0; m < 4; m++) {
            const unsigned w = k * 4 + m, expected = w == CHUNK_WORD ? number : codec.header[w];
            wrong |= w == FLAGS_WORD ? (words[m] & ~NONFINITE) != 0 : words[m] != expected;
        }
    }
    return wrong;
}

// Raw elements of a tile, from one to another, one a thread.
template <typename T, bool ADD>
__device__ __forceinline__ void decode_raw(const gc_decode &call, const gc_tile &tile, const Divided &by, T *to,
                                           unsigned first, unsigned end, bool broken, bool &found) {
    const Places places = places_of(call.codec, tile);
    unsigned known = ~0u;
    bool corrupt = false;
#pragma unroll 1
    for (unsigned i = first + threadIdx.x; i < end; i += THREADS) {
        const unsigned later = places.later(i);
        if (later != known) {
            const unsigned char *chunk = call.payload + places.chunk + later * places.stride;
            known = later, corrupt = !broken && is_corrupt(call.codec, chunk, tile.chunk + later);
        }
        if (ADD && corrupt) continue;
        float v = *reinterpret_cast<const float *>(call.payload + place_of_raw(call.codec, places, i));
        v = by.of(broken ? __uint_as_float(0x7fc00000u) : v);
        if (corrupt) v = 0;
        if (ADD) v = __fadd_rn(__uint_as_float(to[i]), v);
        const unsigned pattern = sizeof(T) == 4 ? __float_as_uint(canonical(v)) : to_16(v, call.dtype);
        const unsigned infinity = sizeof(T) == 4 ? 0x7f800000u : call.dtype == BFLOAT16 ? 0x7f80 : 0x7c00;
        found |= (pattern & infinity) == infinity;
        to[i] = static_cast<T>(pattern);
    }
}

// Reads a code an element and a scale a block, writes an element, or reads and writes a float32. Block: a part of a tile;
// a warp has ROWS rows of vectors of 16 bytes, side by side. Codes, scales and a header are loaded at the same time.
template <unsigned C, typename T, bool ADD>
__device__ __forceinline__ void decode_blocks(const gc_decode &call) {
    constexpr unsigned N = 16 / sizeof(T), ROWS = ADD ? 1 : 2, A_WARP = ROWS * WARP * N, A_BLOCK = WARPS * A_WARP;
    constexpr unsigned LANES = Block<C>::ELEMENTS / N, A_ROW = WARP / LANES, BLOCKS = ROWS * A_ROW, SPLIT = TILE / A_BLOCK;
    __shared__ uint4 stage[THREADS];
    const gc_codec &codec = call.codec;
    const gc_tile tile = tile_of_blocks<C>(codec, blockIdx.x / SPLIT);
    const unsigned lane = threadIdx.x % WARP, first = blockIdx.x % SPLIT * A_BLOCK, at = first + threadIdx.x / WARP * A_WARP;
    const bool broken = codec.control->broken;
    const Divided by(call);
    T *to = nullptr;
    bool found = false;
    if (tile.run != NO_RUN) to = reinterpret_cast<T *>(values_of(codec, call.values, tile.run)) + tile.first;
    const unsigned left = tile.count > at ? tile.count - at : 0, count = left < A_WARP ? left : A_WARP;
    if (tile.run != NO_RUN && tile.unit == NO_UNIT) {
        const unsigned end = tile.count < first + A_BLOCK ? tile.count : first + A_BLOCK;
        decode_raw<T, ADD>(call, tile, by, to, first, end, broken, found);
    } else if (tile.run != NO_RUN && count != 0) {
        const UnitBlocks<C> blocks(codec, tile, at, count);
        const bool whole = count == A_WARP && blocks.together, aligned = misalignment(to, 16) == 0;
        Codes<C, N> codes[ROWS];
        unsigned memory = 0, corrupt = 0;  // of row k as bit k
        uint4 old[ADD ? ROWS : 1];
        to += at;
        if (lane < BLOCKS && lane < blocks.count) memory = load_scale<C>(call.payload + blocks.scale(lane));
        if (whole) {
            const unsigned char *from = call.payload + blocks.codes(0) + lane * Codes<C, N>::BYTES;
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) codes[k].load(from + k * WARP * Codes<C, N>::BYTES);
        } else {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
                const unsigned element = (k * WARP + lane) * N, j = element / Block<C>::ELEMENTS;
                codes[k] = Codes<C, N>();
                if (j >= blocks.count) continue;
                codes[k].load(call.payload + blocks.codes(j) + element % Block<C>::ELEMENTS * Block<C>::BITS / 8);
            }
        }
        if (ADD) {
            if (whole && aligned) {
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) old[ADD ? k : 0] = reinterpret_cast<const uint4 *>(to)[k * WARP + lane];
            } else {
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) {
                    unsigned words[4];
#pragma unroll
                    for (unsigned m = 0; m < 4; m++) {
                        const unsigned element = (k * WARP + lane) * N + m;
                        words[m] = element < count ? to[element] : 0;
                    }
                    old[ADD ? k : 0] = make_uint4(words[0], words[1], words[2], words[3]);
                }
            }
        }
        if (blocks.together) {
            const unsigned char *chunk = call.payload + blocks.places.chunk;
            const unsigned met = look_at_header(codec, chunk, tile.chunk, lane);
            if (__any_sync(WHOLE_WARP, met & CORRUPT)) corrupt = ~0u;
        } else {
#pragma unroll 1
            for (unsigned k = 0; k < ROWS; k++) {
                const unsigned j = (k * WARP + lane) * N / Block<C>::ELEMENTS;
                if (j >= blocks.count) continue;
                const unsigned later = blocks.places.later(blocks.before + j);
                const unsigned char *chunk = call.payload + blocks.places.chunk + later * blocks.places.stride;
                corrupt |= static_cast<unsigned>(is_corrupt(codec, chunk, tile.chunk + later)) << k;
            }
        }
        if (broken) corrupt = 0;
        const float mine = broken ? __uint_as_float(0x7fc00000u) : scale_from_memory<C>(memory);
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
            const float s = Block<C>::SCALE_BYTES != 0 ? __shfl_sync(WHOLE_WARP, mine, k * A_ROW + lane / LANES) : mine;
            float v[N];
            dequantize(codes[k], s, v);
            if (C == CODEC_BF16 && broken) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) v[m] = s;
            }
            if (!by.plain) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) v[m] = by.of(v[m]);
            }
            if (corrupt >> k & 1) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) v[m] = 0;
            }
            if (ADD) {
                const uint4 x = old[ADD ? k : 0];
                const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (unsigned m = 0; m < N; m++) v[m] = __fadd_rn(__uint_as_float(words[m % 4]), v[m]);
            }
            bool bad;
            const uint4 results = results_of(v, call.dtype, bad);
            const bool skips = ADD && corrupt >> k & 1;
            if (whole && aligned) {
                if (!skips) reinterpret_cast<uint4 *>(to)[k * WARP + lane] = results;
            } else {
                // Neighbouring lanes store neighbouring elements: vectors that are not aligned go through shared memory.
                stage[threadIdx.x] = skips ? old[ADD ? k : 0] : results;
                __syncwarp();
                const T *staged = reinterpret_cast<const T *>(stage + threadIdx.x / WARP * WARP);
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    const unsigned element = m * WARP + lane;
                    if (k * WARP * N + element < count) to[k * WARP * N + element] = staged[element];
                }
                __syncwarp();
            }
            // What fills a block up is not looked at.
            if (bad && !skips) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    const unsigned words[4] = {results.x, results.y, results.z, results.w};
                    const unsigned pattern = N == 4 ? words[m % 4] : words[m / 2 % 4] >> m % 2 * 16 & 0xffff;
                    const unsigned infinity = N == 4 ? 0x7f800000u : call.dtype == BFLOAT16 ? 0x7f80 : 0x7c00;
                    found |= (k * WARP + lane) * N + m < count && (pattern & infinity) == infinity;
                }
            }
        }
    }
    if (found) tell(codec, NONFINITE);
    // Each chunk's header is looked at once for what it says, also of those without elements.
    if (broken) return;
#pragma unroll 1
    for (u64 k = static_cast<u64>(blockIdx.x) * WARPS + threadIdx.x / WARP; k < codec.n_chunks; k += gridDim.x * WARPS) {
        const unsigned met = look_at_header(codec, call.payload + k * codec.stride, static_cast<unsigned>(k), lane);
        const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT), nonfinite = __any_sync(WHOLE_WARP, met & NONFINITE);
        if (lane == 0 && (corrupt || nonfinite)) tell(codec, corrupt ? CORRUPT : NONFINITE);
    }
}

#define BLOCKS_DECODE(name, C, T, ADD) \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ gc_decode call) { \
        decode_blocks<C, T, ADD>(call); \
    }
BLOCKS_DECODE(gc_blocks_decode_bf16_u32, CODEC_BF16, unsigned, false)
BLOCKS_DECODE(gc_blocks_decode_bf16_u16, CODEC_BF16, unsigned short, false)
BLOCKS_DECODE(gc_blocks_decode_bf16_add, CODEC_BF16, unsigned, true)
BLOCKS_DECODE(gc_blocks_decode_mxfp8_u32, CODEC_MXFP8, unsigned, false)
BLOCKS_DECODE(gc_blocks_decode_mxfp8_u16, CODEC_MXFP8, unsigned short, false)
BLOCKS_DECODE(gc_blocks_decode_mxfp8_add, CODEC_MXFP8, unsigned, true)
BLOCKS_DECODE(gc_blocks_decode_int8_u32, CODEC_INT8, unsigned, false)
BLOCKS_DECODE(gc_blocks_decode_int8_u16, CODEC_INT8, unsigned short, false)
BLOCKS_DECODE(gc_blocks_decode_int8_add, CODEC_INT8, unsigned, true)
BLOCKS_DECODE(gc_blocks_decode_int4_u32, CODEC_INT4, unsigned, false)
BLOCKS_DECODE(gc_blocks_decode_int4_u16, CODEC_INT4, unsigned short, false)
BLOCKS_DECODE(gc_blocks_decode_int4_add, CODEC_INT4, unsigned, true)
BLOCKS_DECODE(gc_blocks_decode_mxfp4_u32, CODEC_MXFP4, unsigned, false)
BLOCKS_DECODE(gc_blocks_decode_mxfp4_u16, CODEC_MXFP4, unsigned short, false)
BLOCKS_DECODE(gc_blocks_decode_mxfp4_add, CODEC_MXFP4, unsigned, true)

#endif
