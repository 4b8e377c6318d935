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
    // As a loop: a division is long, and what is usual has none.
    template <unsigned N>
    __device__ __forceinline__ void apply(float (&v)[N]) const {
        if (plain) return;
#pragma unroll 1
        for (unsigned i = 0; i < N; i++) {
            const float first = of(v[0]);
#pragma unroll
            for (unsigned m = 0; m < N; m++) v[m] = m + 1 < N ? v[(m + 1) % N] : first;
        }
    }
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
        // As a loop, for it is rare: the next ones become the first.
        float x[8];
#pragma unroll
        for (unsigned m = 0; m < 8; m++) x[m] = v[m];
#pragma unroll 1
        for (unsigned k = 0; k < 4; k++) {
            const unsigned pair = to_16(x[0], dtype) | static_cast<unsigned>(to_16(x[1], dtype)) << 16;
#pragma unroll
            for (unsigned m = 0; m < 6; m++) x[m] = x[m + 2];
            pairs[0] = pairs[1], pairs[1] = pairs[2], pairs[2] = pairs[3], pairs[3] = pair;
        }
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Raw elements of the part of a tile that a block has, one a thread: a chunk's at a time, as blocks are.
template <typename T, bool ADD>
__device__ __forceinline__ bool decode_raw(const gc_decode &call, const gc_tile &tile, const Divided &by, T *to,
                                           unsigned first, unsigned end, bool broken) {
    const gc_codec &codec = call.codec;
    const Places places = places_of(codec, tile);
    bool found = false;
#pragma unroll 1
    for (unsigned begin = first; begin < end;) {
        const unsigned later = places.later(begin), left = places.left + later * places.per_chunk - begin;
        const unsigned last = left < end - begin ? begin + left : end;
        const unsigned char *chunk = call.payload + places.chunk + later * places.stride;
        const unsigned char *raws = chunk + codec.raws_at + 4 * places.number_of(begin, later);
        const unsigned met = look_at_header(codec, chunk, tile.chunk + later, threadIdx.x % WARP);
        const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT) && !broken;
#pragma unroll 1
        for (unsigned i = begin + threadIdx.x; i < last && !(ADD && corrupt); i += THREADS) {
            float v = reinterpret_cast<const float *>(raws)[i - begin];
            v = by.of(broken ? __uint_as_float(0x7fc00000u) : v);
            if (corrupt) v = 0;
            if (ADD) v = __fadd_rn(__uint_as_float(to[i]), v);
            const unsigned pattern = sizeof(T) == 4 ? __float_as_uint(canonical(v)) : to_16(v, call.dtype);
            const unsigned infinity = sizeof(T) == 4 ? 0x7f800000u : call.dtype == BFLOAT16 ? 0x7f80 : 0x7c00;
            found |= (pattern & infinity) == infinity;
            to[i] = static_cast<T>(pattern);
        }
        begin = last;
    }
    return found;
}

// Loads the codes of a lane's rows, as far as a piece has them, and makes numbers of them.
template <unsigned C, unsigned N, unsigned ROWS>
__device__ __forceinline__ void load_blocks(const unsigned char *codes_at, const InChunk &piece, unsigned memory,
                                            unsigned lane, float (&v)[ROWS][N]) {
    constexpr unsigned LANES = Block<C>::ELEMENTS / N, A_ROW = WARP / LANES, BYTES = Codes<C, N>::BYTES;
    Codes<C, N> codes[ROWS];
#pragma unroll
    for (unsigned k = 0; k < ROWS; k++) {
        codes[k] = Codes<C, N>();
        if (piece.has(k * A_ROW + lane / LANES)) codes[k].load(codes_at + (k * WARP + lane) * BYTES);
    }
    const float mine = scale_from_memory<C>(memory);
#pragma unroll
    for (unsigned k = 0; k < ROWS; k++) {
        const float s = Block<C>::SCALE_BYTES != 0 ? __shfl_sync(WHOLE_WARP, mine, k * A_ROW + lane / LANES) : mine;
        dequantize(codes[k], s, v[k]);
    }
}

// Reads a code an element and a scale a block, writes an element, or reads and writes a float32. Block: a tile, a unit a
// warp, in rows of vectors of 16 bytes; or half of that. What comes before the first load is as long as some 16 elements. Codes, scales and a header are loaded at the same time.
template <typename T, bool ADD>
__device__ __forceinline__ void decode_blocks(const gc_decode &call) {
    constexpr unsigned N = 16 / sizeof(T), ROWS = ADD ? 4 : 32 / N, A_WARP = ROWS * WARP * N, A_BLOCK = WARPS * A_WARP;
    constexpr unsigned SPLIT = TILE / A_BLOCK;
    __shared__ uint4 stage[THREADS];
    const gc_codec &codec = call.codec;
    const gc_tile tile = tile_of_blocks(codec, blockIdx.x / SPLIT);
    const unsigned lane = threadIdx.x % WARP, first = blockIdx.x % SPLIT * A_BLOCK;
    const bool broken = codec.control->broken;
    const Divided by(call);
    T *to = nullptr;
    if (tile.count != 0) to = reinterpret_cast<T *>(values_of(codec, call.values, tile.run)) + tile.first;
    bool found = false;
    if (tile.unit == NO_UNIT) {
        found = decode_raw<T, ADD>(call, tile, by, to, first, tile.count < first + A_BLOCK ? tile.count : first + A_BLOCK, broken);
    } else {
        const unsigned at = first + threadIdx.x / WARP * A_WARP, left = tile.count > at ? tile.count - at : 0;
        const unsigned count = left < A_WARP ? left : A_WARP;
        const UnitBlocks blocks(codec, tile, at, count);
        to += at;
        const bool aligned = count == A_WARP && misalignment(to, 16) == 0;
        // What lies in a chunk at a time: nearly always all.
#pragma unroll 1
        for (unsigned begin = 0; begin < blocks.count;) {
            const InChunk piece(blocks, begin);
            begin = piece.end;
            const bool whole = piece.end - piece.begin == blocks.format.block(A_WARP) && aligned;
            unsigned memory = 0;
            if (piece.has(lane)) memory = load_scale(call.payload + piece.scales, blocks.format.scale_bytes, lane);
            uint4 old[ADD ? ROWS : 1];
            if (ADD && whole) {
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) old[ADD ? k : 0] = reinterpret_cast<const uint4 *>(to)[k * WARP + lane];
            } else if (ADD) {
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
            const unsigned met = look_at_header(codec, call.payload + piece.chunk, tile.chunk + piece.later, lane);
            float v[ROWS][N];
            BY_CODEC(codec.kind, load_blocks<C>(call.payload + piece.codes, piece, memory, lane, v))
            const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT) && !broken;
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
                if (broken || corrupt) {
#pragma unroll
                    for (unsigned m = 0; m < N; m++) v[k][m] = broken ? __uint_as_float(0x7fc00000u) : 0;
                }
                by.apply(v[k]);
                if (ADD) {
                    const uint4 x = old[ADD ? k : 0];
                    const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (unsigned m = 0; m < N; m++) v[k][m] = __fadd_rn(__uint_as_float(words[m % 4]), v[k][m]);
                }
                bool bad;
                const uint4 results = results_of(v[k], call.dtype, bad);
                if (ADD && corrupt) continue;
                // Which of the lane's elements are there; what fills a block up is not looked at.
                if (bad && piece.has(blocks.format.block((k * WARP + lane) * N))) {
                    uint4 words = results;
                    const unsigned infinity = N == 4 ? 0x7f800000u : call.dtype == BFLOAT16 ? 0x7f80 : 0x7c00;
#pragma unroll 1
                    for (unsigned m = 0; m < N; m++) {
                        found |= (k * WARP + lane) * N + m < count && (words.x & infinity) == infinity;
                        if (N == 4 || m % 2 == 1) words.x = words.y, words.y = words.z, words.z = words.w;
                        else words.x >>= 16;
                    }
                }
                if (whole) {
                    reinterpret_cast<uint4 *>(to)[k * WARP + lane] = results;
                    continue;
                }
                // Neighbouring lanes store neighbouring elements: vectors that are not aligned go through shared memory.
                stage[threadIdx.x] = results;
                __syncwarp();
                const T *staged = reinterpret_cast<const T *>(stage + threadIdx.x / WARP * WARP);
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    const unsigned element = k * WARP * N + m * WARP + lane;
                    if (element < count && piece.has(blocks.format.block(element))) to[element] = staged[m * WARP + lane];
                }
                __syncwarp();
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

#define BLOCKS_DECODE(name, T, ADD, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_decode call) { \
        decode_blocks<T, ADD>(call); \
    }
BLOCKS_DECODE(gc_blocks_decode_u32, unsigned, false, 3)
BLOCKS_DECODE(gc_blocks_decode_u16, unsigned short, false, 3)
BLOCKS_DECODE(gc_blocks_decode_add, unsigned, true, 3)

#endif
