// Decoding, and what tells whether a chunk is right.
#ifndef GRADCODEC_DECODE_CUH
#define GRADCODEC_DECODE_CUH

#include "codec.cuh"

// Whether a scale is: -0 is, NaN is not.
__device__ __forceinline__ bool is_negative(unsigned pattern) {
    return pattern - 0x80000000u <= 0x7f800000u;
}

// The flags that word number `w` of a chunk gives: of its header, or the scale of a segment.
__device__ __forceinline__ unsigned look_at_word(const gc_codec &codec, const unsigned char *chunk, unsigned number, unsigned w) {
    const unsigned x = reinterpret_cast<const unsigned *>(chunk)[w];
    if (w == FLAGS_WORD) return x & ~NONFINITE ? static_cast<unsigned>(CORRUPT) : x;
    if (w < HEADER_WORDS) return x == (w == CHUNK_WORD ? number : codec.header[w]) ? 0 : +CORRUPT;
    const bool held = holds(codec, number, segment_of(codec, w - HEADER_WORDS));
    const bool right = !held ? x == 0 : codec.kind == SIGN ? x == 0x3f800000u : !is_negative(x);
    return right ? 0 : +CORRUPT;
}

// Reads 1/8 byte, writes an element of T's size, or reads and writes a float32. Block: a tile; thread: vectors of 16 bytes,
// THREADS apart. Bits, header and scale are loaded at the same time. +s and -s are made once a block.

// What bits become: the patterns of +s and -s.
struct Levels {
    unsigned plus, minus;
    bool corrupt;
};
// Of chunk number `number` and a segment, or none. By all threads of a block; one of them computes, for what follows is short.
__device__ __forceinline__ Levels levels_of(const gc_decode &call, unsigned number, unsigned run) {
    __shared__ unsigned shared[2][2];  // in turn, so that nobody waits for those who still read
    const gc_codec &codec = call.codec;
    const unsigned char *chunk = call.payload + number * codec.stride;
    unsigned flags = 0;
#pragma unroll 1
    for (unsigned w = threadIdx.x; w < HEADER_WORDS + codec.n_segments; w += THREADS) {
        flags |= look_at_word(codec, chunk, number, w);
    }
    if (threadIdx.x == 0 && run != NO_RUN) {
        const float s = reinterpret_cast<const float *>(chunk + HEADER)[run];
        const float v = canonical(__fmul_rn(__fdiv_rn(s, call.divisor), factor(call.factor)));
        unsigned plus = __float_as_uint(v), minus = __float_as_uint(canonical(-v)), infinity = 0x7f800000u;
        if (call.dtype == BFLOAT16) plus = to_bf16(v), minus = to_bf16(-v), infinity = 0x7f80;
        if (call.dtype == FLOAT16) plus = to_f16(v), minus = to_f16(-v), infinity = 0x7c00;
        if ((plus & infinity) == infinity) flags |= NONFINITE;
        shared[number % 2][0] = plus, shared[number % 2][1] = minus;
    }
    const bool corrupt = __syncthreads_or(flags & CORRUPT);
    // What a corrupt chunk says besides is not believed.
    if (corrupt) flags &= CORRUPT;
    if (flags) {
        atomicOr(&codec.control->flags, flags);
        atomicOr(&codec.control->since, flags);
    }
    if (corrupt) return {0, 0, true};
    return {shared[number % 2][0], shared[number % 2][1], false};
}

// Four or eight elements of the highest bits of a byte's worth.
__device__ __forceinline__ uint4 vector_of(const Levels &levels, unsigned bits, unsigned) {
    return make_uint4(bits & 128 ? levels.plus : levels.minus, bits & 64 ? levels.plus : levels.minus,
                      bits & 32 ? levels.plus : levels.minus, bits & 16 ? levels.plus : levels.minus);
}
__device__ __forceinline__ uint4 vector_of(const Levels &levels, unsigned bits, unsigned short) {
    const unsigned plus = levels.plus, minus = levels.minus, high_plus = plus << 16, high_minus = minus << 16;
    return make_uint4((bits & 128 ? plus : minus) | (bits & 64 ? high_plus : high_minus),
                      (bits & 32 ? plus : minus) | (bits & 16 ? high_plus : high_minus),
                      (bits & 8 ? plus : minus) | (bits & 4 ? high_plus : high_minus),
                      (bits & 2 ? plus : minus) | (bits & 1 ? high_plus : high_minus));
}

__device__ __forceinline__ float add_finite(float old, float v, bool &found) {
    const float sum = canonical(__fadd_rn(old, v));
    found |= !is_finite(sum);
    return sum;
}
__device__ __forceinline__ uint4 add_vector(uint4 old, uint4 v, bool &found) {
    const auto add = [&](unsigned a, unsigned b) {
        return __float_as_uint(add_finite(__uint_as_float(a), __uint_as_float(b), found));
    };
    return make_uint4(add(old.x, v.x), add(old.y, v.y), add(old.z, v.z), add(old.w, v.w));
}

// Element m of a vector.
__device__ __forceinline__ unsigned element_of(uint4 v, unsigned m, unsigned) {
    return m == 0 ? v.x : m == 1 ? v.y : m == 2 ? v.z : v.w;
}
__device__ __forceinline__ unsigned element_of(uint4 v, unsigned m, unsigned short) {
    return element_of(v, m / 2, 0u) >> m % 2 * 16;
}

// Puts the first `count` elements of a vector, or adds them.
template <bool ADD, typename T>
__device__ __forceinline__ void put_each(T *to, uint4 v, unsigned count, bool &found) {
    constexpr unsigned A_VECTOR = 16 / sizeof(T);
    T elements[A_VECTOR];
#pragma unroll
    for (unsigned m = 0; m < A_VECTOR; m++) elements[m] = ADD && m < count ? to[m] : 0;
    if (ADD) v = add_vector(make_uint4(elements[0], elements[1], elements[2], elements[3]), v, found);
#pragma unroll
    for (unsigned m = 0; m < A_VECTOR; m++) {
        if (m < count) to[m] = static_cast<T>(element_of(v, m, T()));
    }
}

__device__ __forceinline__ void tell_nonfinite(const gc_codec &codec) {
    atomicOr(&codec.control->flags, NONFINITE);
    atomicOr(&codec.control->since, NONFINITE);
}

// A tile with an end, at an odd address or in several chunks, chunk by chunk.
template <typename T, bool ADD>
__device__ __forceinline__ bool decode_ragged(const gc_decode &call, const gc_tile &tile, T *to) {
    constexpr unsigned A_VECTOR = 16 / sizeof(T), STORES = TILE / (THREADS * A_VECTOR), APART = THREADS * A_VECTOR / 8;
    const bool aligned = misalignment(to, 16) == 0;
    const unsigned end = (tile.count + 7) / 8, shift = threadIdx.x * A_VECTOR % 8;
    bool found = false;
#pragma unroll 1
    for (unsigned byte = 0; byte < end;) {
        unsigned next = tile.left, chunk = tile.chunk;
        if (byte >= next) {
            const unsigned chunk_bytes = chunk_bytes_of(call.codec), later = 1 + (byte - next) / chunk_bytes;
            chunk += later, next += later * chunk_bytes;
        }
        if (next > end) next = end;
        const unsigned char *from = call.payload + place_of_byte(call.codec, tile, byte) - byte;
        // All bits are under way before the first is used; a byte of them a vector.
        u64 bits = 0;
#pragma unroll
        for (unsigned s = 0; s < STORES; s++) {
            const unsigned at = s * APART + threadIdx.x * A_VECTOR / 8;
            if (at >= byte && at < next) bits |= static_cast<u64>(load_bits(from + at)) << 8 * s;
        }
        const Levels levels = levels_of(call, chunk, tile.run);
#pragma unroll 1
        for (unsigned s = 0; s < STORES && !(ADD && levels.corrupt); s++, bits >>= 8) {
            const unsigned at = s * APART + threadIdx.x * A_VECTOR / 8, first = (s * THREADS + threadIdx.x) * A_VECTOR;
            if (at < byte || at >= next || first >= tile.count) continue;
            const uint4 v = vector_of(levels, static_cast<unsigned>(bits & 0xff) << shift, T());
            if (!ADD && aligned && first + A_VECTOR <= tile.count) store_vector(reinterpret_cast<uint4 *>(to + first), v);
            else put_each<ADD>(to + first, v, tile.count - first, found);
        }
        byte = next;
    }
    return found;
}

template <typename T, bool ADD>
__device__ __forceinline__ void decode(const gc_decode &call) {
    constexpr unsigned A_VECTOR = 16 / sizeof(T), STORES = TILE / (THREADS * A_VECTOR), APART = THREADS * A_VECTOR / 8;
    const gc_codec &codec = call.codec;
    if (blockIdx.x >= call.tiles) {
        levels_of(call, static_cast<unsigned>(call.first_empty + (blockIdx.x - call.tiles)), NO_RUN);
        return;
    }
#if __CUDA_ARCH__ >= 900
    prefetch_burst<TILE / 8>(call.payload, codec.n_chunks * codec.stride);
#endif
    const gc_tile tile = tile_of(codec, blockIdx.x);
    if (tile.count == 0) return;
    T *to = reinterpret_cast<T *>(values_of(codec, call.values, tile.run)) + tile.first;
    if (tile.count < TILE || tile.left < TILE / 8 || misalignment(to, 16) != 0) {
        if (decode_ragged<T, ADD>(call, tile, to)) tell_nonfinite(codec);
        return;
    }
    const unsigned char *from = call.payload + tile.to + threadIdx.x * A_VECTOR / 8;
    uint4 *vectors = reinterpret_cast<uint4 *>(to) + threadIdx.x, old[ADD ? STORES : 1];
    unsigned bits[STORES];
#pragma unroll
    for (unsigned s = 0; s < STORES; s++) {
        bits[s] = load_bits(from + s * APART);
        if (ADD) old[ADD ? s : 0] = vectors[s * THREADS];
    }
    const Levels levels = levels_of(call, tile.chunk, tile.run);
    const unsigned shift = threadIdx.x * A_VECTOR % 8;
    if (ADD && levels.corrupt) return;
    bool found = false;
#pragma unroll
    for (unsigned s = 0; s < STORES; s++) {
        const uint4 v = vector_of(levels, bits[s] << shift, T());
        if (ADD) vectors[s * THREADS] = add_vector(old[ADD ? s : 0], v, found);
        else store_vector(vectors + s * THREADS, v);
    }
    if (found) tell_nonfinite(codec);
}

#define DECODE(name, T, ADD, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_decode call) { \
        decode<T, ADD>(call); \
    }
DECODE(gc_onebit_decode_u32, unsigned, false, 4)
DECODE(gc_onebit_decode_u16, unsigned short, false, 4)
DECODE(gc_onebit_decode_add, unsigned, true, 3)

#endif
