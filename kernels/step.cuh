// Step of a unit: computes kept numbers, bits and sum from values and errors.
#ifndef GRADCODEC_STEP_CUH
#define GRADCODEC_STEP_CUH

#include "codec.cuh"

// ---- Elements

// Storage types of values and errors. A lane has N neighbours in a vector, in as many words as they take.
struct F32 {
    enum : unsigned { SIZE = 4 };
    typedef unsigned element;
    static __device__ __forceinline__ float of(element x) { return __uint_as_float(x); }
    static __device__ __forceinline__ float at(const unsigned *words, unsigned m) { return of(words[m]); }
};
struct F16 {
    enum : unsigned { SIZE = 2 };
    typedef unsigned short element;
    static __device__ __forceinline__ float of(element x) { return from_f16(x); }
    static __device__ __forceinline__ float at(const unsigned *words, unsigned m) {
        return of(static_cast<unsigned short>(words[m / 2] >> m % 2 * 16));
    }
};
struct BF16 {
    enum : unsigned { SIZE = 2 };
    typedef unsigned short element;
    static __device__ __forceinline__ float of(element x) { return from_bf16(x); }
    static __device__ __forceinline__ float at(const unsigned *words, unsigned m) {
        return __uint_as_float(m % 2 ? words[m / 2] & 0xffff0000u : words[m / 2] << 16);
    }
};
struct None {
    enum : unsigned { SIZE = 0 };
    typedef unsigned char element;
    static __device__ __forceinline__ float of(element) { return 0; }
    static __device__ __forceinline__ float at(const unsigned *, unsigned) { return 0; }
};

// Returns the number of neighbours of a lane: as many as both sides move in 16 bytes at most. A lane that wrote 32
// bytes as two vectors apart ran at half the speed.
template <typename V, typename E>
__device__ constexpr unsigned neighbours() {
    return V::SIZE == 2 && E::SIZE < 4 ? 8 : 4;
}

template <unsigned BYTES>
struct Words {
    unsigned words[BYTES < 4 ? 1 : BYTES / 4];
};
__device__ __forceinline__ void load(Words<16> &to, const void *from) {
    const uint4 v = *static_cast<const uint4 *>(from);
    to.words[0] = v.x, to.words[1] = v.y, to.words[2] = v.z, to.words[3] = v.w;
}
__device__ __forceinline__ void load(Words<8> &to, const void *from) {
    const uint2 v = *static_cast<const uint2 *>(from);
    to.words[0] = v.x, to.words[1] = v.y;
}
__device__ __forceinline__ void load(Words<0> &, const void *) {}
__device__ __forceinline__ void store(const Words<16> &from, void *to) {
    *static_cast<uint4 *>(to) = make_uint4(from.words[0], from.words[1], from.words[2], from.words[3]);
}
__device__ __forceinline__ void store(const Words<8> &from, void *to) {
    *static_cast<uint2 *>(to) = make_uint2(from.words[0], from.words[1]);
}
__device__ __forceinline__ void store(const Words<0> &, void *) {}

// Returns the end of a unit's first `count` elements, counted from a lane's first element. Callers compare it with
// constants.
template <unsigned N>
__device__ __forceinline__ int left_of_lane(unsigned lane, unsigned count) {
    return static_cast<int>(count) - static_cast<int>(lane * N);
}

// A lane's elements of a unit, or of a few vectors: element (k, m) is number k * 32 * N + lane * N + m.
template <typename T, unsigned N, unsigned VECTORS = 32 / N>
struct Lane {
    enum : unsigned { PLACES = VECTORS * WARP * N };
    Words<T::SIZE * N> vectors[VECTORS];
    __device__ __forceinline__ float at(unsigned k, unsigned m) const { return T::at(vectors[k].words, m); }
    // Loads whole aligned vectors. `from`: the unit's first element.
    __device__ __forceinline__ void load_from(const unsigned char *from, unsigned lane) {
#pragma unroll
        for (unsigned k = 0; k < VECTORS; k++) load(vectors[k], from + (k * WARP + lane) * N * T::SIZE);
    }
    __device__ __forceinline__ void store_to(unsigned char *to, unsigned lane) const {
#pragma unroll
        for (unsigned k = 0; k < VECTORS; k++) store(vectors[k], to + (k * WARP + lane) * N * T::SIZE);
    }
    // Loads the first `count` elements one by one, from any element address; the others become 0.
    __device__ __forceinline__ void load_each(const unsigned char *from, unsigned lane, unsigned count) {
        const typename T::element *elements = reinterpret_cast<const typename T::element *>(from) + lane * N;
        const int left = left_of_lane<N>(lane, count);
#pragma unroll
        for (unsigned k = 0; k < VECTORS; k++) {
#pragma unroll
            for (unsigned m = 0; m < N; m++) {
                const unsigned at = k * WARP * N + m, x = static_cast<int>(at) < left ? elements[at] : 0;
                if (T::SIZE == 4) vectors[k].words[m] = x;
                else if (m % 2 == 0) vectors[k].words[m / 2] = x;
                else vectors[k].words[m / 2] |= x << 16;
            }
        }
    }
    // Loads the first `count` elements, from any element address; the others become 0. Single loads are hardly slower
    // than vectors: each brings its neighbours into the L1 cache.
    __device__ __forceinline__ void load_anywhere(const unsigned char *from, unsigned lane, unsigned count) {
        if (T::SIZE == 0) return;
        if (count >= PLACES && misalignment(from, T::SIZE * N + (T::SIZE == 0)) == 0) load_from(from, lane);
        else load_each(from, lane, count);
    }
    // Stores the first `count` elements, to any element address, as vectors or one by one.
    __device__ __forceinline__ void store_anywhere(unsigned char *to, unsigned lane, unsigned count) const {
        if (count >= PLACES && misalignment(to, T::SIZE * N) == 0) {
            store_to(to, lane);
            return;
        }
        typename T::element *elements = reinterpret_cast<typename T::element *>(to) + lane * N;
        const int left = left_of_lane<N>(lane, count);
#pragma unroll
        for (unsigned k = 0; k < VECTORS; k++) {
#pragma unroll
            for (unsigned m = 0; m < N; m++) {
                const unsigned at = k * WARP * N + m;
                if (static_cast<int>(at) < left) elements[at] = vectors[k].words[m];
            }
        }
    }
};

// Elements of a lane that are added to different columns of a unit's sum.
template <typename T, unsigned N>
using Row = Lane<T, N, 8 / N>;

// ---- Values

// 16-bit values. The call's dtype selects float16 or bfloat16, so one kernel serves both.
struct Half {
    enum : unsigned { SIZE = 2 };
    typedef unsigned short element;
    static __device__ __forceinline__ float of(element x, unsigned dtype) {
        return dtype == BFLOAT16 ? from_bf16(x) : from_f16(x);
    }
};
struct Float : F32 {
    static __device__ __forceinline__ float of(element x, unsigned) { return F32::of(x); }
};

// Returns a lane's values as float32.
template <unsigned N>
__device__ __forceinline__ Lane<F32, N> widened(const Lane<Float, N> &lane, unsigned) {
    Lane<F32, N> wide;
#pragma unroll
    for (unsigned k = 0; k < 32 / N; k++) {
#pragma unroll
        for (unsigned m = 0; m < N; m++) wide.vectors[k].words[m] = lane.vectors[k].words[m];
    }
    return wide;
}
template <typename V, unsigned N>
__device__ __forceinline__ void widen(Lane<F32, N> &wide, const Lane<Half, N> &lane) {
#pragma unroll
    for (unsigned k = 0; k < 32 / N; k++) {
#pragma unroll
        for (unsigned m = 0; m < N; m++) wide.vectors[k].words[m] = __float_as_uint(V::at(lane.vectors[k].words, m));
    }
}
template <unsigned N>
__device__ __forceinline__ Lane<F32, N> widened(const Lane<Half, N> &lane, unsigned dtype) {
    Lane<F32, N> wide;
    if (dtype == BFLOAT16) widen<BF16>(wide, lane);
    else widen<F16>(wide, lane);
    return wide;
}

// Rounds to the errors' dtype, puts the results into a vector, and returns them as rounded.
template <unsigned N>
__device__ __forceinline__ void keep(F32, Words<4 * N> &kept, float (&c)[N]) {
#pragma unroll
    for (unsigned m = 0; m < N; m++) kept.words[m] = __float_as_uint(c[m]);
}
template <unsigned N>
__device__ __forceinline__ void keep(BF16, Words<2 * N> &kept, float (&c)[N]) {
#pragma unroll
    for (unsigned m = 0; m < N; m += 2) {
        kept.words[m / 2] = to_bf16_pair(c[m], c[m + 1]);
        c[m] = BF16::at(kept.words, m), c[m + 1] = BF16::at(kept.words, m + 1);
    }
}
template <unsigned N>
__device__ __forceinline__ void keep(None, Words<0> &, float (&)[N]) {}

// ---- The bits of a unit

// Returns word `lane` of a unit as it lies in memory, most significant bits first. `below_zero`: bit 31 - (k * N + m)
// is 1 if element (k, m) is below zero; the bits were shifted in from the right.
template <unsigned N>
__device__ __forceinline__ unsigned word_of_unit(unsigned below_zero, unsigned lane) {
    constexpr unsigned VECTORS = 32 / N;
    // Lane j of each VECTORS lanes receives field j of all of them, the field of vector VECTORS - 1 - j.
    unsigned word = transpose_fields<VECTORS>(~below_zero, lane);
    word = __shfl_sync(WHOLE_WARP, word, lane % N * VECTORS + (VECTORS - 1 - lane / N));
    // Fields of 8 bits are bytes. Fields of 4 bits are swapped within their bytes.
    return N == 8 ? word : (word & 0x0f0f0f0fu) << 4 | ((word >> 4) & 0x0f0f0f0fu);
}

// Stores the words of a unit, which begins at byte number `at` of its tile.
__device__ __forceinline__ void store_words(const gc_codec &codec, const gc_tile &tile, const Chunks &chunks,
                                            unsigned at, unsigned word, unsigned lane) {
    const unsigned bytes = (tile.count + 7) / 8;
    unsigned char *base = chunks.first;
    const bool whole = at + UNIT / 8 <= bytes && at + UNIT / 8 <= tile.left && misalignment(base + tile.to + at, 4) == 0;
#pragma unroll 1
    for (unsigned copy = 0; copy < chunks.copies; copy++) {
        if (copy != 0) base = chunks.base(codec, tile.chunk, copy);
        if (whole) {
            reinterpret_cast<unsigned *>(base + tile.to + at)[lane] = word;
            continue;
        }
        // Otherwise neighbouring lanes store neighbouring bytes.
#pragma unroll 1
        for (unsigned number = lane; number < UNIT / 8; number += WARP) {
            const unsigned byte = __shfl_sync(WHOLE_WARP, word, number / 4) >> number % 4 * 8;
            if (at + number >= bytes) continue;
            const unsigned later = chunks_to_byte(codec, tile, at + number);
            unsigned char *from = later == 0 ? base : chunks.base(codec, tile.chunk + later, copy);
            from[place_of_byte(codec, tile, at + number)] = static_cast<unsigned char>(byte);
        }
    }
}

// ---- A step of a unit

// Rules that are the same for all elements of a launch.
struct Rules {
    bool rms, zero, zero_values;  // sum squares, not magnitudes; non-finite numbers become +0; non-finite values, too
};

// Formula of an encode: computes c, before rounding, from a value and the kept number.
struct Handle {
    enum : bool { GIVES_MINUS_ZERO = true };  // before rounding
    float s, m_g, m_e, beta;
    template <typename E>
    __device__ __forceinline__ float make(float g, float kept) const {
        return E::SIZE != 0 ? feedback(g, kept, s, m_g, m_e, beta) : __fmul_rn(m_g, g);
    }
};
// Formula of a reduce, which has no factors. `g` is a sum that began with +0, so it is never -0; nor is c, because a
// sum is -0 only if both numbers are. DECAYS: beta may differ from 1. ptxas would not omit a product with 1.
template <bool DECAYS>
struct Carried {
    enum : bool { GIVES_MINUS_ZERO = false };
    float s, beta;
    template <typename E>
    __device__ __forceinline__ float make(float g, float kept) const {
        if (E::SIZE == 0) return g;
        const float error = error_of(kept, s);
        return __fadd_rn(g, DECAYS ? __fmul_rn(beta, error) : error);
    }
};

// term_of() returns a term of the scale; top_of() a word with the sign on top. -0 is not below zero: it becomes +0.
__device__ __forceinline__ float term_of(const Rules &rules, float c) {
    return rules.rms ? __fmul_rn(c, c) : fabsf(c);
}
__device__ __forceinline__ unsigned top_of(float c) {
    return __float_as_uint(__fadd_rn(c, 0.0f));
}

// Returns the lane's elements that are among a unit's first `count`, numbered like fields of bits: the highest bits.
template <unsigned N>
__device__ __forceinline__ unsigned which_exist(unsigned lane, unsigned count) {
    if (count >= UNIT) return ~0u;
    const int left = left_of_lane<N>(lane, count), apart = WARP * N;
    if (left <= 0) return 0;
    // `vectors` are whole vectors; `rest` reaches into the next one.
    const unsigned vectors = static_cast<unsigned>(left) / apart, rest = static_cast<unsigned>(left) % apart;
    return ~static_cast<unsigned>(0xffffffffull >> (vectors * N + (rest < N ? rest : N)));
}

// Computes the numbers to keep as K, the bits and the sum of a unit. Absent elements become +0, and their bits 0. A
// finite sum means that all numbers are finite; otherwise the caller must compute the unit again.
template <typename K, unsigned N, typename V, typename E>
__device__ __forceinline__ float step(const Rules &rules, const Handle &form, const Lane<V, N> &fresh,
                                      const Lane<E, N> &old, Lane<K, N> &kept, unsigned &below_zero, unsigned lane,
                                      unsigned exist) {
    UnitSum<N> sum;
    below_zero = 0;
#pragma unroll
    for (unsigned k = 0; k < 32 / N; k++) {
        float c[N];
#pragma unroll
        for (unsigned m = 0; m < N; m++) {
            c[m] = form.make<E>(fresh.at(k, m), old.at(k, m));
            if (!(exist & 0x80000000u >> (k * N + m))) c[m] = 0;
        }
        keep(K(), kept.vectors[k], c);
#pragma unroll
        for (unsigned m = 0; m < N; m++) {
            sum.add(k, m, term_of(rules, c[m]));
            below_zero = __funnelshift_l(top_of(c[m]), below_zero, 1);
        }
    }
    below_zero |= ~exist;
    return sum.of_warp(lane);
}

// Puts the element to keep into its word or half word.
template <typename K>
__device__ __forceinline__ void put(unsigned *words, unsigned m, float c) {
    if (K::SIZE == 4) words[m] = __float_as_uint(c);
    else if (K::SIZE == 2 && m % 2 == 0) words[m / 2] = __float_as_uint(c) >> 16;
    else if (K::SIZE == 2) words[m / 2] |= __float_as_uint(c) & 0xffff0000u;
}

// Computes what step() does, a row of the unit's sum at a time, in a loop that needs few registers. The result is
// always valid: every NaN gets its one pattern, and a non-finite number sets `found`, and becomes 0 if the rules say
// so. load_row() loads the values and the kept numbers of a row. `to`: address for the new kept numbers, or null.
template <typename K, unsigned N, typename E, typename Form, typename LoadRow>
__device__ __forceinline__ float step_by_rows(const Rules &rules, const Form &form, LoadRow load_row, unsigned char *to,
                                              unsigned &below_zero, bool &found, unsigned lane, unsigned count) {
    UnitSum<N> sum;
    below_zero = 0;
#pragma unroll
    for (unsigned i = 0; i < 8; i++) sum.columns[i] = 0;  // terms are never -0, so this adds nothing
#pragma unroll 1
    for (unsigned row = 0; row < 4; row++) {
        const int left = left_of_lane<N>(lane, count) - static_cast<int>(row * 8 * WARP);
        float values[8], c[8 / N][N], magnitude = 0;
        Row<E, N> old;
        Row<K, N> kept;
        load_row(row, values, old);
#pragma unroll
        for (unsigned i = 0; i < 8; i++) c[i / N][i % N] = form.template make<E>(values[i], old.at(i / N, i % N));
        if (count != UNIT) {
#pragma unroll
            for (unsigned i = 0; i < 8; i++) {
                if (static_cast<int>(i / N * WARP * N + i % N) >= left) c[i / N][i % N] = 0;
            }
        }
#pragma unroll
        for (unsigned j = 0; j < 8 / N; j++) {
            keep(K(), kept.vectors[j], c[j]);
#pragma unroll
            for (unsigned m = 0; m < N; m++) magnitude = __fadd_rn(magnitude, fabsf(c[j][m]));
        }
        if (!__all_sync(WHOLE_WARP, is_finite(magnitude))) {
#pragma unroll
            for (unsigned i = 0; i < 8; i++) {
                const unsigned j = i / N, m = i % N;
                const bool exists = static_cast<int>(j * WARP * N + m) < left;
                float &x = c[j][m];
                if (exists && rules.zero_values && !is_finite(values[i])) {
                    found = true;
                    x = form.template make<E>(0, old.at(j, m));
                    if (K::SIZE == 2) x = from_bf16(to_bf16(x));
                }
                if (!is_finite(x)) {
                    found = true;
                    x = rules.zero ? 0 : canonical(x);
                }
                put<K>(kept.vectors[j].words, m, x);
            }
        }
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            const float x = c[i / N][i % N];
            sum.columns[i] = __fadd_rn(sum.columns[i], term_of(rules, x));
            const bool plain = !Form::GIVES_MINUS_ZERO && K::SIZE != 2;  // rounding to 16 bits may give -0
            below_zero = __funnelshift_l(plain ? __float_as_uint(x) : top_of(x), below_zero, 1);
        }
        if (to) kept.store_to(to + row * kept.PLACES * K::SIZE, lane);
    }
    // Padding bits become 0.
    below_zero |= ~which_exist<N>(lane, count);
    return sum.of_warp(lane);
}

// Loads the existing elements of a row one by one, from any element address.
template <typename V, unsigned N>
__device__ __forceinline__ void load_row_each(float (&values)[8], const unsigned char *from, unsigned row,
                                              unsigned lane, unsigned count, unsigned dtype) {
    const unsigned first = row * 8 * WARP + lane * N;
    const typename V::element *elements = reinterpret_cast<const typename V::element *>(from) + first;
    const int left = static_cast<int>(count) - static_cast<int>(first);
#pragma unroll
    for (unsigned i = 0; i < 8; i++) {
        const unsigned at = i / N * WARP * N + i % N;
        values[i] = V::SIZE != 0 && static_cast<int>(at) < left ? V::of(elements[at], dtype) : 0;
    }
}

// Stores the sum of a tile: the sum of the unit sums of its warps. `shared`: room for one sum per warp.
__device__ __forceinline__ void leave_sum(double *partial, float sum, double *shared) {
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    double warps[WARPS];
#pragma unroll
    for (unsigned w = 0; w < WARPS; w++) warps[w] = shared[w];
    *partial = sum_of(warps);
}

#endif
