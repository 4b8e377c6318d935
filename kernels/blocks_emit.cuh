// From the numbers of a warp's blocks to scales, codes and errors: what an encode and a reduce share.
#ifndef GRADCODEC_BLOCKS_EMIT_CUH
#define GRADCODEC_BLOCKS_EMIT_CUH

#include "blocks.cuh"

// The errors of a unit: as words, for their dtype is known at run time. Lane l has N neighbours in each of 32 / N rows.
template <unsigned N>
struct Errors {
    enum : unsigned { ROWS = 32 / N };
    unsigned words[ROWS][N];

    // `size`: 4, 2 or 0 bytes an element.
    __device__ __forceinline__ void load_row(const unsigned char *from, unsigned size, unsigned k, unsigned row,
                                             unsigned lane) {
        const unsigned char *at = from + (row * WARP + lane) * N * size;
        if (size == 4) {
#pragma unroll
            for (unsigned m = 0; m < N; m += 4) {
                const uint4 v = reinterpret_cast<const uint4 *>(at)[m / 4];
                words[k][m] = v.x, words[k][m + 1] = v.y, words[k][m + 2] = v.z, words[k][m + 3] = v.w;
            }
        } else if (size == 2) {
            Words<2 * N> v;
            step_load(v, at);
#pragma unroll
            for (unsigned m = 0; m < N / 2; m++) words[k][m] = v.words[m];
        }
    }
    __device__ __forceinline__ void load(const unsigned char *from, unsigned size, unsigned lane) {
        if (size == 4) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) load_row(from, 4, k, k, lane);
        } else if (size == 2) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) load_row(from, 2, k, k, lane);
        }
    }
    static __device__ __forceinline__ void step_load(Words<2 * N> &to, const unsigned char *from) { ::load(to, from); }
    template <unsigned SIZE>
    __device__ __forceinline__ float at(unsigned k, unsigned m) const {
        if (SIZE == 4) return __uint_as_float(words[k][m]);
        return __uint_as_float(m % 2 ? words[k][m / 2] & 0xffff0000u : words[k][m / 2] << 16);
    }
};

// Stores a row of float32, N neighbours a lane. Vectors that a lane has two of lie apart, which runs at half the speed: so
// neighbouring lanes give each other one of them, and each store is of neighbouring vectors.
template <unsigned N>
__device__ __forceinline__ void store_floats(unsigned char *row_at, const float (&x)[N], unsigned lane) {
    uint4 *to = reinterpret_cast<uint4 *>(row_at);
    const auto vector = [&](unsigned m) {
        return make_uint4(__float_as_uint(x[m % N]), __float_as_uint(x[(m + 1) % N]), __float_as_uint(x[(m + 2) % N]),
                          __float_as_uint(x[(m + 3) % N]));
    };
    if (N == 4) {
        to[lane] = vector(0);
        return;
    }
    const bool odd = lane & 1;
    const uint4 first = vector(0), second = vector(4), given = odd ? first : second;
    const uint4 taken = make_uint4(__shfl_xor_sync(WHOLE_WARP, given.x, 1), __shfl_xor_sync(WHOLE_WARP, given.y, 1),
                                   __shfl_xor_sync(WHOLE_WARP, given.z, 1), __shfl_xor_sync(WHOLE_WARP, given.w, 1));
    // Vectors 4 p to 4 p + 3 are those of lanes 2 p and 2 p + 1.
    to[lane * 2 - odd] = odd ? taken : first;
    to[lane * 2 - odd + 2] = odd ? second : taken;
}

// What a warp's unit is made of and goes to. `C`: the codec.
template <unsigned C, unsigned N>
struct Unit {
    enum : unsigned { ROWS = 32 / N, LANES = Block<C>::ELEMENTS / N, A_ROW = WARP / LANES, BLOCKS = ROWS * A_ROW };
    const gc_codec &codec;
    UnitBlocks<C> blocks;
    unsigned lane, count;            // elements
    const unsigned char *from;       // old errors, and where new ones go
    unsigned char *to, *dst;

    // Whether element m of the lane's row k is there.
    __device__ __forceinline__ bool has(unsigned k, unsigned m) const {
        return static_cast<int>(k * WARP * N + m) < left_of_lane<N>(lane, count);
    }
    __device__ __forceinline__ unsigned most_of(const float (&c)[N]) const { return largest_of_block<C>(c); }

    // What is not finite becomes +0. `row_of(row, c)` gives a row again, with +0 for what it is made of.
    template <typename RowOf>
    __device__ __forceinline__ void zero(float (&c)[ROWS][N], unsigned (&most)[ROWS], RowOf row_of) const {
#pragma unroll 1
        for (unsigned row = 0; row < ROWS; row++) {
            float x[N];
            row_of(row, x);
#pragma unroll
            for (unsigned m = 0; m < N; m++) {
                const bool wrong = (__float_as_uint(x[m]) & 0x7fffffffu) >= NOT_FINITE;
                if (wrong || !has(row, m)) x[m] = 0;
            }
            // The next row becomes the first, so that this is a loop.
            const unsigned new_most = most_of(x);
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
                most[k] = k + 1 < ROWS ? most[(k + 1) % ROWS] : new_most;
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = k + 1 < ROWS ? c[(k + 1) % ROWS][m] : x[m];
            }
        }
    }

    // The largest magnitudes of the blocks that the rows are of. By the whole warp; tells what is not finite.
    template <typename RowOf>
    __device__ __forceinline__ void look(float (&c)[ROWS][N], unsigned (&most)[ROWS], unsigned &found, RowOf row_of) const {
        if (count < UNIT) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    if (!has(k, m)) c[k][m] = 0;
                }
            }
        }
        unsigned all = 0;
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
            most[k] = most_of(c[k]);
            all = most[k] > all ? most[k] : all;
        }
        if (!__any_sync(WHOLE_WARP, all >= NOT_FINITE)) return;
        found |= NONFINITE;
        if (codec.policy == ZERO) zero(c, most, row_of);
    }

    // Scales, codes and errors of what look() has looked at. Each lane makes the scale of one block of the unit, as a
    // division for each lane of a block would cost more than all else, and hands it to those who have its elements. Of
    // corrupt payloads the numbers are +0, and errors stay.
    __device__ __forceinline__ void emit(const float (&c)[ROWS][N], const unsigned (&most)[ROWS], bool corrupt = false) const {
        BlockScale mine = {0, 1, 1};
        if (Block<C>::SCALE_BYTES != 0) {
            unsigned of_block = 0;
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
                const unsigned given = __shfl_sync(WHOLE_WARP, most[k], lane % A_ROW * LANES);
                if (lane / A_ROW == k) of_block = given;
            }
            mine = scale_of_block<C>(of_block);
            if (lane < BLOCKS && lane < blocks.count) store_scale<C>(dst + blocks.scale(lane), mine.memory);
        }
        Codes<C, N> codes[ROWS];
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
            BlockScale scale = {0, 1, 1};
            if (Block<C>::SCALE_BYTES != 0) {
                const unsigned owner = k * A_ROW + lane / LANES;
                scale.s = __shfl_sync(WHOLE_WARP, mine.s, owner);
                scale.inverse = __shfl_sync(WHOLE_WARP, mine.inverse, owner);
            }
            const bool finite = most[k] < NOT_FINITE;
            float sent[N];
            codes[k] = quantize<C>(scale, c[k], sent);
            if (!finite) {
                codes[k].poison();
                if (C == CODEC_BF16) {
#pragma unroll
                    for (unsigned m = 0; m < N; m++) {
                        if (!has(k, m)) codes[k].words[m / 2 % Codes<C, N>::WORDS] &= m % 2 ? 0xffffu : 0xffff0000u;
                    }
                }
            }
            if (codec.error == 0 || count == 0 || corrupt) continue;
            // Of a block that is not finite they stay.
            Errors<N> old;
            if (!finite) old.load_row(from, codec.error, 0, k, lane);
            unsigned char *row_at = to + k * WARP * N * codec.error;
            if (codec.error == 4) {
                float e[N];
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    e[m] = finite ? __fsub_rn(c[k][m], sent[m]) : old.template at<4>(0, m);
                }
                store_floats<N>(row_at, e, lane);
            } else {
                Words<2 * N> e;
#pragma unroll
                for (unsigned m = 0; m < N; m += 2) {
                    const unsigned pair = to_bf16_pair(__fsub_rn(c[k][m], sent[m]), __fsub_rn(c[k][m + 1], sent[m + 1]));
                    e.words[m / 2] = finite ? pair : old.words[0][m / 2];
                }
                store(e, row_at + lane * 2 * N);
            }
        }
        store_codes(codes);
    }

    __device__ __forceinline__ void store_codes(const Codes<C, N> (&codes)[ROWS]) const {
        constexpr unsigned BYTES = Codes<C, N>::BYTES;
        // Two neighbours that have 2 bytes each of two rows have a word of one.
        constexpr unsigned TOGETHER = BYTES == 2 ? 2 : 1;
        const unsigned odd = TOGETHER == 2 ? lane & 1 : 0;
#pragma unroll
        for (unsigned k = 0; k < ROWS; k += TOGETHER) {
            Codes<C, TOGETHER * N> whole;
            if (TOGETHER == 2) {
                const unsigned low = codes[k].words[0], high = codes[(k + 1) % ROWS].words[0];
                const unsigned other = __shfl_xor_sync(WHOLE_WARP, odd ? low : high, 1);
                whole.words[0] = odd ? other | high << 16 : low | other << 16;
            } else {
#pragma unroll
                for (unsigned i = 0; i < Codes<C, N>::WORDS; i++) whole.words[i] = codes[k].words[i];
            }
            const unsigned element = ((k + odd) * WARP + lane / TOGETHER * TOGETHER) * N, j = element / Block<C>::ELEMENTS;
            if (j >= blocks.count) continue;
            whole.store(dst + blocks.codes(j) + element % Block<C>::ELEMENTS * Block<C>::BITS / 8);
        }
    }
};

// Stores a raw element, and tells if it is not finite.
__device__ __forceinline__ void store_raw(const gc_codec &codec, const Places &places, unsigned char *dst, unsigned i,
                                          float x, unsigned &found) {
    x = canonical(x);
    if (!is_finite(x)) {
        found |= NONFINITE;
        if (codec.policy == ZERO) x = 0;
    }
    *reinterpret_cast<float *>(dst + place_of_raw(codec, places, i)) = x;
}

#endif
