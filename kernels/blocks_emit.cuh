// Makes scales, codes and errors from the numbers of a warp's blocks, in an encode and in a reduce.
#ifndef GRADCODEC_BLOCKS_EMIT_CUH
#define GRADCODEC_BLOCKS_EMIT_CUH

#include "blocks.cuh"

// Errors of a unit, as words: their dtype is known at run time. A lane has N neighbours in each of 32 / N rows.
template <unsigned N>
struct Errors {
    enum : unsigned { ROWS = 32 / N };
    unsigned words[ROWS][N];

    __device__ __forceinline__ void load_row(const unsigned char *from, unsigned size, unsigned k, unsigned lane) {
        const unsigned char *at = from + (k * WARP + lane) * N * size;
        if (size == 4) {
#pragma unroll
            for (unsigned m = 0; m < N; m += 4) {
                const uint4 v = reinterpret_cast<const uint4 *>(at)[m / 4];
                words[k][m] = v.x, words[k][m + 1] = v.y, words[k][m + 2] = v.z, words[k][m + 3] = v.w;
            }
        } else {
            Words<2 * N> v;
            step_load(v, at);
#pragma unroll
            for (unsigned m = 0; m < N / 2; m++) words[k][m] = v.words[m];
        }
    }
    // Loads the errors. `size`: 4 or 2 bytes per element, or 0.
    __device__ __forceinline__ void load(const unsigned char *from, unsigned size, unsigned lane) {
        if (size == 4) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) load_row(from, 4, k, lane);
        } else if (size == 2) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) load_row(from, 2, k, lane);
        }
    }
    static __device__ __forceinline__ void step_load(Words<2 * N> &to, const unsigned char *from) { ::load(to, from); }
    // Converts the errors to float32.
    __device__ __forceinline__ void widen(unsigned size) {
        if (size != 2) return;
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
            for (unsigned m = N; m > 0; m -= 2) {
                const unsigned pair = words[k][m / 2 - 1];
                words[k][m - 2] = pair << 16, words[k][m - 1] = pair & 0xffff0000u;
            }
        }
    }
    __device__ __forceinline__ float at(unsigned k, unsigned m) const { return __uint_as_float(words[k][m]); }
};
// Returns one error as float32.
__device__ __forceinline__ float error_at(const unsigned char *errors, unsigned size, unsigned i) {
    return size == 4 ? reinterpret_cast<const float *>(errors)[i]
                     : from_bf16(reinterpret_cast<const unsigned short *>(errors)[i]);
}

// Stores a row of float32, N neighbours per lane. Two vectors of a lane lie apart from its neighbours' vectors, and
// storing them so runs at half the speed. So neighbouring lanes exchange a vector, and each store is of neighbouring
// vectors. `there`: true to store the lane's vectors; the neighbour has the same.
template <unsigned N>
__device__ __forceinline__ void store_floats(unsigned char *row_at, const float (&x)[N], unsigned lane, bool there) {
    uint4 *to = reinterpret_cast<uint4 *>(row_at);
    const auto vector = [&](unsigned m) {
        return make_uint4(__float_as_uint(x[m % N]), __float_as_uint(x[(m + 1) % N]), __float_as_uint(x[(m + 2) % N]),
                          __float_as_uint(x[(m + 3) % N]));
    };
    if (N == 4) {
        if (there) to[lane] = vector(0);
        return;
    }
    const bool odd = lane & 1;
    const uint4 first = vector(0), second = vector(4), given = odd ? first : second;
    const uint4 taken = make_uint4(__shfl_xor_sync(WHOLE_WARP, given.x, 1), __shfl_xor_sync(WHOLE_WARP, given.y, 1),
                                   __shfl_xor_sync(WHOLE_WARP, given.z, 1), __shfl_xor_sync(WHOLE_WARP, given.w, 1));
    // Vectors 4 p to 4 p + 3 belong to lanes 2 p and 2 p + 1.
    if (!there) return;
    to[lane * 2 - odd] = odd ? taken : first;
    to[lane * 2 - odd + 2] = odd ? second : taken;
}

// Copies the old errors of the rows that have a bit in `rows`. This is rare, so it copies 4 bytes at a time.
template <unsigned N>
__device__ __forceinline__ void keep_old(const unsigned char *from, unsigned char *to, unsigned size, unsigned rows,
                                         unsigned lane) {
#pragma unroll 1
    for (unsigned i = 0; i < 32 * size / 4; i++) {
        const unsigned row = i / (N * size / 4), at = (row * WARP + lane) * N * size + i % (N * size / 4) * 4;
        if (rows >> row & 1) *reinterpret_cast<unsigned *>(to + at) = *reinterpret_cast<const unsigned *>(from + at);
    }
}

// Keeps numbers as floats only: otherwise the compiler carries them through a loop as integers too, each twice.
template <unsigned N, unsigned ROWS>
__device__ __forceinline__ void as_floats(float (&c)[ROWS][N]) {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
        for (unsigned m = 0; m < N; m++) asm("" : "+f"(c[k][m]));
    }
#else
    static_cast<void>(c);
#endif
}

// Unit of a warp: its blocks, errors and target. KEPT: with errors, if the codec keeps any. PEERS: to other ranks.
// SERVES: all blocks go to one chunk.
template <unsigned N, bool KEPT, unsigned PEERS, bool SERVES = false>
struct Unit {
    enum : unsigned { ROWS = 32 / N };
    const gc_codec &codec;
    UnitBlocks blocks;
    unsigned lane, count;            // elements
    const unsigned char *from;       // addresses of the old and the new errors
    unsigned char *to;
    Target<PEERS> target;

    // Returns true if element m of the lane's row k exists.
    __device__ __forceinline__ bool has(unsigned k, unsigned m) const {
        return static_cast<int>(k * WARP * N + m) < left_of_lane<N>(lane, count);
    }

    // Finds the addresses of the old and the new errors. `unit`: number among the units of all runs.
    __device__ __forceinline__ void find_errors(u64 unit) {
        const unsigned valid = valid_state(codec);
        const u64 kept_at = codec.units_at + unit * UNIT * codec.error;
        from = codec.state[valid] + kept_at;
        to = codec.state[codec.policy == TRANSACTIONAL ? valid ^ 1 : valid] + kept_at;
    }

    // Calls of(row, x) for each row, which may change x. This is a loop: the next row becomes the first.
    template <typename Of>
    static __device__ __forceinline__ void each_row(float (&c)[ROWS][N], Of of) {
#pragma unroll 1
        for (unsigned row = 0; row < ROWS; row++) {
            float x[N];
#pragma unroll
            for (unsigned m = 0; m < N; m++) x[m] = c[0][m];
            of(row, x);
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = k + 1 < ROWS ? c[(k + 1) % ROWS][m] : x[m];
            }
        }
        as_floats(c);
    }

    // Returns the largest magnitude of one block: the block in row lane % ROWS that has elements of this lane. With
    // blocks of 64 elements, two lanes have the same one.
    __device__ __forceinline__ unsigned look_once(const float (&c)[ROWS][N]) const {
        unsigned most[ROWS];
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) most[k] = largest(c[k]);
        // A block of 32 elements lies in ROWS lanes. In each round, two lanes exchange half of their rows.
#pragma unroll
        for (unsigned rows = ROWS / 2; rows > 0; rows /= 2) {
            const bool upper = lane & rows;
#pragma unroll
            for (unsigned i = 0; i < ROWS / 2; i++) {
                if (i >= rows) continue;
                const unsigned given = upper ? most[i] : most[i + rows], kept = upper ? most[i + rows] : most[i];
                const unsigned other = __shfl_xor_sync(WHOLE_WARP, given, rows);
                most[i] = other > kept ? other : kept;
            }
        }
        if (codec.kind == CODEC_INT8) {
            const unsigned other = __shfl_xor_sync(WHOLE_WARP, most[0], +ROWS);
            most[0] = other > most[0] ? other : most[0];
        }
        return most[0];
    }

    // Returns look_once(), and sets `found` if a number is not finite. Such numbers become +0 with the policy ZERO:
    // again(row, x) then computes a row again, with non-finite inputs as +0. The whole warp calls it.
    template <typename Again>
    __device__ __forceinline__ unsigned look(float (&c)[ROWS][N], unsigned &found, Again again) const {
        if (count < UNIT) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    if (!has(k, m)) c[k][m] = 0;
                }
            }
        }
        const unsigned most = look_once(c);
        if (!__any_sync(WHOLE_WARP, most >= NOT_FINITE)) return most;
        found |= NONFINITE;
        if (codec.policy != ZERO) return most;
        each_row(c, [&](unsigned row, float (&x)[N]) {
            again(row, x);
#pragma unroll
            for (unsigned m = 0; m < N; m++) {
                const bool wrong = (__float_as_uint(x[m]) & 0x7fffffffu) >= NOT_FINITE;
                if (wrong || !has(row, m)) x[m] = 0;
            }
        });
        return look_once(c);
    }

    // Stores scales, codes and errors of the numbers that look() has checked. `corrupt`: numbers are +0, and errors
    // stay. `most`: result of look().
    __device__ __forceinline__ void emit(float (&c)[ROWS][N], unsigned most, bool corrupt = false) const {
        // Bit k is set if the lane's block in row k is not finite: its errors stay.
        const unsigned wrong = __ballot_sync(WHOLE_WARP, most >= NOT_FINITE) >> lane / ROWS * ROWS & ((1u << ROWS) - 1);
        BY_CODEC(codec.kind, encode<C>(c, most, wrong))
        const unsigned size = KEPT && count != 0 && !corrupt ? codec.error : 0;
        if (size == 0) return;
        if (size == 4) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) store_floats<N>(to + k * WARP * N * 4, c[k], lane, !(wrong >> k & 1));
        } else {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
                Words<2 * N> e;
#pragma unroll
                for (unsigned m = 0; m < N; m += 2) e.words[m / 2] = to_bf16_pair(c[k][m], c[k][m + 1]);
                if (!(wrong >> k & 1)) store(e, to + (k * WARP + lane) * N * 2);
            }
        }
        if (wrong != 0 && from != to) keep_old<N>(from, to, size, wrong, lane);
    }

    // Stores scales and codes; c becomes the errors. Each lane makes the scale of the block whose largest magnitude it
    // has, and passes it to the block's lanes: a division in each lane of a block would cost more than all else.
    template <unsigned C>
    __device__ __forceinline__ void encode(float (&c)[ROWS][N], unsigned most, unsigned wrong) const {
        constexpr unsigned OWNERS = Block<C>::ELEMENTS / 32;
        const unsigned first_owner = lane / ROWS * ROWS;
        const BlockScale mine = scale_of_block<C>(most);
        // If codes have 2 bytes per row, neighbouring lanes exchange them: each has a word of one of two rows.
        constexpr unsigned TOGETHER = Codes<C, N>::BYTES == 2 ? 2 : 1;
        const unsigned odd = TOGETHER == 2 ? lane & 1 : 0;
        Codes<C, TOGETHER * N> whole[ROWS / TOGETHER];
#pragma unroll
        for (unsigned k = 0; k < ROWS; k += TOGETHER) {
            Codes<C, N> codes[TOGETHER];
#pragma unroll
            for (unsigned i = 0; i < TOGETHER; i++) {
                BlockScale scale = {0, 1, 1};
                if (Block<C>::SCALE_BYTES != 0) {
                    if (KEPT) scale.s = __shfl_sync(WHOLE_WARP, mine.s, first_owner + k + i);
                    scale.inverse = __shfl_sync(WHOLE_WARP, mine.inverse, first_owner + k + i);
                }
                if (KEPT) {
                    float sent[N];
                    codes[i] = quantize<C>(scale, c[k + i], sent);
#pragma unroll
                    for (unsigned m = 0; m < N; m++) c[k + i][m] = __fsub_rn(c[k + i][m], sent[m]);
                } else {
                    codes[i] = quantize<C>(scale, c[k + i]);
                }
                if (wrong >> (k + i) & 1) codes[i].poison();
            }
            Codes<C, TOGETHER * N> &row = whole[k / TOGETHER];
            if (TOGETHER == 2) {
                const unsigned low = codes[0].words[0], high = codes[TOGETHER - 1].words[0];
                const unsigned other = __shfl_xor_sync(WHOLE_WARP, odd ? low : high, 1);
                row.words[0] = odd ? other | high << 16 : low | other << 16;
            } else {
#pragma unroll
                for (unsigned i = 0; i < Codes<C, N>::WORDS; i++) row.words[i] = codes[0].words[i];
            }
        }
        if (C == CODEC_BF16 && count < UNIT) {
            // Absent elements have code 0, also in a block that is not finite.
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    if (!has(k, m)) whole[k / TOGETHER].words[m / 2 % Codes<C, N>::WORDS] &= m % 2 ? 0xffffu : 0xffff0000u;
                }
            }
        }
        const unsigned first = (odd * WARP + lane / TOGETHER * TOGETHER) * N;  // the lane's first element
        const unsigned own = (lane % ROWS * N + lane / ROWS) / OWNERS;           // block whose scale the lane has
        const unsigned copies = target.copies();
#pragma unroll 1
        for (unsigned begin = 0, copy = 0; begin < blocks.count && copies != 0;) {
            const InChunk piece = SERVES ? InChunk(blocks) : InChunk(blocks, begin);
            unsigned char *const dst = target.base(blocks.places.first + piece.later, copy, piece.chunk);
            if (!PEERS || ++copy == copies) begin = piece.end, copy = 0;
            if (piece.has(own) && lane / ROWS % OWNERS == 0) {
                store_scale(dst + piece.chunk + piece.template scales<C>(), Block<C>::SCALE_BYTES, own, mine.memory);
            }
            unsigned char *at = dst + piece.chunk + piece.template codes<C>(codec) + first * Block<C>::BITS / 8;
#pragma unroll
            for (unsigned k = 0; k < ROWS; k += TOGETHER) {
                if (piece.has((first + k * WARP * N) / Block<C>::ELEMENTS)) {
                    whole[k / TOGETHER].store(at + k * WARP * N * Block<C>::BITS / 8);
                }
            }
        }
    }
};

#endif
