// From the numbers of a warp's blocks to scales, codes and errors: what an encode and a reduce share.
#ifndef GRADCODEC_BLOCKS_EMIT_CUH
#define GRADCODEC_BLOCKS_EMIT_CUH

#include "blocks.cuh"

// The errors of a unit: as words, for their dtype is known at run time. Lane l has N neighbours in each of 32 / N rows.
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
    // `size`: 4 or 2 bytes an element, or 0.
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
    // As float32.
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
// One of them.
__device__ __forceinline__ float error_at(const unsigned char *errors, unsigned size, unsigned i) {
    return size == 4 ? reinterpret_cast<const float *>(errors)[i]
                     : from_bf16(reinterpret_cast<const unsigned short *>(errors)[i]);
}

// Stores a row of float32, N neighbours a lane. Vectors that a lane has two of lie apart, which runs at half the speed:
// so neighbouring lanes give each other one of them, and each store is of neighbouring vectors.
// `there`: whether the lane's are to be stored, and so its neighbour's.
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
    // Vectors 4 p to 4 p + 3 are those of lanes 2 p and 2 p + 1.
    if (!there) return;
    to[lane * 2 - odd] = odd ? taken : first;
    to[lane * 2 - odd + 2] = odd ? second : taken;
}

// Copies the errors of a lane's rows, of which there are bits, as they were. For it is rare, as bytes of 4.
template <unsigned N>
__device__ __forceinline__ void keep_old(const unsigned char *from, unsigned char *to, unsigned size, unsigned rows,
                                         unsigned lane) {
#pragma unroll 1
    for (unsigned i = 0; i < 32 * size / 4; i++) {
        const unsigned row = i / (N * size / 4), at = (row * WARP + lane) * N * size + i % (N * size / 4) * 4;
        if (rows >> row & 1) *reinterpret_cast<unsigned *>(to + at) = *reinterpret_cast<const unsigned *>(from + at);
    }
}

// Floats and nothing else: the compiler carries them through a loop as integers, too, and so has each twice.
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

// What a warp's unit is made of and goes to. KEPT: with errors, if the codec keeps any. PEERS: to other ranks. SERVES:
// all of it goes to one chunk.
template <unsigned N, bool KEPT, unsigned PEERS, bool SERVES = false>
struct Unit {
    enum : unsigned { ROWS = 32 / N };
    const gc_codec &codec;
    UnitBlocks blocks;
    unsigned lane, count;            // elements
    const unsigned char *from;       // old errors, and where new ones go
    unsigned char *to;
    Target<PEERS> target;

    // Whether element m of the lane's row k is there.
    __device__ __forceinline__ bool has(unsigned k, unsigned m) const {
        return static_cast<int>(k * WARP * N + m) < left_of_lane<N>(lane, count);
    }

    // Finds the old errors and the place of the new ones. `unit`: of all runs.
    __device__ __forceinline__ void find_errors(u64 unit) {
        const unsigned valid = valid_state(codec);
        const u64 kept_at = codec.units_at + unit * UNIT * codec.error;
        from = codec.state[valid] + kept_at;
        to = codec.state[codec.policy == TRANSACTIONAL ? valid ^ 1 : valid] + kept_at;
    }

    // A row at a time, as a loop: the next row becomes the first. `of(row, x)` changes it.
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

    // The largest magnitude of a block, one a lane: of row lane % ROWS the block that this lane has elements of. Of 64
    // elements two lanes have it.
    __device__ __forceinline__ unsigned look_once(const float (&c)[ROWS][N]) const {
        unsigned most[ROWS];
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) most[k] = largest(c[k]);
        // A block of 32 lies in as many lanes as there are rows. Of two of them each gives the other one half of its
        // rows.
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

    // By the whole warp; sets `found` for what is not finite. That becomes +0 if the policy says so: `again(row, x)`
    // makes a row of what it is made of, once more, where that is +0, too. Gives what look_once() does.
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

    // Scales, codes and errors of what look() has looked at. Of corrupt payloads the numbers are +0, and errors stay.
    // `most`: what look() gave.
    __device__ __forceinline__ void emit(float (&c)[ROWS][N], unsigned most, bool corrupt = false) const {
        // Row k as bit k: the lane's block is not finite, and its errors stay.
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

    // Scales and codes; c becomes the errors. Each lane makes the scale of the block whose largest magnitude it has, as
    // a division for each lane of a block would cost more than all else, and hands it to those who have its elements.
    template <unsigned C>
    __device__ __forceinline__ void encode(float (&c)[ROWS][N], unsigned most, unsigned wrong) const {
        constexpr unsigned OWNERS = Block<C>::ELEMENTS / 32;
        const unsigned first_owner = lane / ROWS * ROWS;
        const BlockScale mine = scale_of_block<C>(most);
        // Two neighbours that have 2 bytes each of two rows have a word of one.
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
            // Of a block that is not finite, too, what is not there is 0.
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    if (!has(k, m)) whole[k / TOGETHER].words[m / 2 % Codes<C, N>::WORDS] &= m % 2 ? 0xffffu : 0xffff0000u;
                }
            }
        }
        const unsigned first = (odd * WARP + lane / TOGETHER * TOGETHER) * N;  // the lane's first element
        const unsigned own = (lane % ROWS * N + lane / ROWS) / OWNERS;           // the block whose scale it has
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
