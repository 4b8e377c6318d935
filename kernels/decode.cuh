// Decode kernels of ONEBIT and SIGN, and the check of a chunk.
#ifndef GRADCODEC_DECODE_CUH
#define GRADCODEC_DECODE_CUH

#include "codec.cuh"

// Returns true if a scale is negative: -0 is, NaN is not.
__device__ __forceinline__ bool is_negative(unsigned pattern) {
    return pattern - 0x80000000u <= 0x7f800000u;
}

// Returns the flags for word `w` of a chunk, which is part of the header or the scale of a segment.
__device__ __forceinline__ unsigned look_at_word(const gc_codec &codec, const unsigned char *chunk, unsigned number,
                                                 unsigned w) {
    const unsigned x = reinterpret_cast<const unsigned *>(chunk)[w];
    if (w == FLAGS_WORD) return x & ~NONFINITE ? static_cast<unsigned>(CORRUPT) : x;
    if (w < HEADER_WORDS) return x == (w == CHUNK_WORD ? number : codec.header[w]) ? 0 : +CORRUPT;
    const bool held = holds(codec, number, segment_of(codec, w - HEADER_WORDS));
    const bool right = !held ? x == 0 : codec.kind == SIGN ? x == 0x3f800000u : !is_negative(x);
    return right ? 0 : +CORRUPT;
}

// Returns true if votes of a chunk with these flags count as NaN: a vote cannot show that a value was not finite.
__device__ __forceinline__ bool vote_is_nan(const gc_codec &codec, unsigned flags) {
    return codec.kind == SIGN && codec.policy != ZERO && flags & NONFINITE;
}

// Patterns of +s and -s for the bits; computed once per thread block.
struct Levels {
    unsigned plus, minus;
    bool corrupt;
};
// Returns the levels of chunk `number` and a segment; `run` may be NO_RUN. All threads of a thread block call it. One
// thread computes the levels, because the rest of the work is short.
__device__ __forceinline__ Levels levels_of(const gc_decode &call, unsigned number, unsigned run) {
    __shared__ unsigned shared[2][2];  // alternating, so that no thread waits for threads that still read
    const gc_codec &codec = call.codec;
    const unsigned char *chunk = call.payload + number * codec.stride;
    unsigned flags = 0;
    const bool broken = codec.control->broken;
#pragma unroll 1
    for (unsigned w = threadIdx.x; w < HEADER_WORDS + codec.n_segments; w += THREADS) {
        flags |= look_at_word(codec, chunk, number, w);
    }
    if (broken) flags = 0;
    if (threadIdx.x == 0 && run != NO_RUN) {
        const bool unknown = broken || vote_is_nan(codec, reinterpret_cast<const unsigned *>(chunk)[FLAGS_WORD]);
        const float s = unknown ? __uint_as_float(0x7fc00000) : reinterpret_cast<const float *>(chunk + HEADER)[run];
        const float v = canonical(__fmul_rn(__fdiv_rn(s, call.divisor), factor(call.factor)));
        unsigned plus = __float_as_uint(v), minus = __float_as_uint(canonical(-v)), infinity = 0x7f800000u;
        if (call.dtype == BFLOAT16) plus = to_bf16(v), minus = to_bf16(-v), infinity = 0x7f80;
        if (call.dtype == FLOAT16) plus = to_f16(v), minus = to_f16(-v), infinity = 0x7c00;
        if ((plus & infinity) == infinity) flags |= NONFINITE;
        shared[number % 2][0] = plus, shared[number % 2][1] = minus;
    }
    const bool corrupt = __syncthreads_or(flags & CORRUPT);
    // Other flags of a corrupt chunk do not count.
    if (corrupt) flags &= CORRUPT;
    if (flags) set_flags(codec, flags);
    if (corrupt) return {0, 0, true};
    return {shared[number % 2][0], shared[number % 2][1], false};
}

// Returns four or eight elements, from the highest bits of a byte.
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

// Reads 1/8 byte and writes a T, or reads and writes a float32. A thread block decodes a tile, a thread vectors of 16
// bytes, THREADS apart. Bits, header and scale are loaded at the same time. A tile is *ragged* if it is incomplete,
// misaligned or in several chunks. It is decoded by chunks: a *head* of single elements up to the first aligned vector,
// vectors, whose bits may lie in two bytes, and single elements at the end, one per thread.
template <typename T, bool ADD>
__device__ __forceinline__ void decode(const gc_decode &call) {
    constexpr unsigned A_VECTOR = 16 / sizeof(T), STORES = TILE / (THREADS * A_VECTOR), APART = THREADS * A_VECTOR;
    const gc_codec &codec = call.codec;
    wait_for_launch_before();
    // Thread blocks after the tiles only check chunks without elements.
    gc_tile tile = {};
    tile.run = NO_RUN, tile.left = ~0u;
    tile.chunk = static_cast<unsigned>(call.first_empty + (blockIdx.x - call.tiles));
    T *to = nullptr;
    if (blockIdx.x < call.tiles) {
#if __CUDA_ARCH__ >= 900
        prefetch_burst<TILE / 8>(call.payload, codec.n_chunks * codec.stride);
#endif
        tile = tile_of(codec, blockIdx.x);
        if (tile.count == 0) return;
        to = reinterpret_cast<T *>(values_of(codec, call.values, tile.run)) + tile.first;
    }
    const bool ragged = tile.count < TILE || tile.left < TILE / 8 || misalignment(to, 16) != 0;
    const unsigned end = (tile.count + 7) / 8;
    bool found = false;
    unsigned byte = 0;
#pragma unroll 1
    do {
        unsigned bits[STORES], chunk = tile.chunk, begin = threadIdx.x * A_VECTOR, single = 0;
        const unsigned char *from = call.payload + tile.to;
        uint4 old[ADD ? STORES : 1];
        int left = TILE;
        bool exists = false, bit = false;
        T old_single = 0;
        // All loads are issued before the first is used.
        if (!ragged) {
            byte = end;
#pragma unroll
            for (unsigned s = 0; s < STORES; s++) {
                bits[s] = load_bits(from + begin / 8 + s * APART / 8);
                if (ADD) old[ADD ? s : 0] = reinterpret_cast<uint4 *>(to + begin)[s * THREADS];
            }
        } else {
            unsigned next = tile.left;
            if (byte >= next) {
                const unsigned chunk_bytes = chunk_bytes_of(codec), later = 1 + (byte - next) / chunk_bytes;
                chunk += later, next += later * chunk_bytes;
            }
            if (next > end) next = end;
            from = call.payload + place_of_byte(codec, tile, byte) - byte;
            const unsigned first = byte * 8, last = next * 8 < tile.count ? next * 8 : tile.count;
            byte = next;
            unsigned head = (16 - misalignment(to + first, 16)) % 16 / sizeof(T);
            if (head > last - first) head = last - first;
            const unsigned filled = first + head + (last - first - head) / A_VECTOR * A_VECTOR;
            begin += first + head;
            // There is no branch: an absent vector is read from the payload's beginning, and not used. The test if
            // vector number s exists is a comparison with a constant.
            left = static_cast<int>(filled) - static_cast<int>(begin);
#pragma unroll
            for (unsigned s = 0; s < STORES; s++) {
                const bool inside = static_cast<int>(s * APART) < left;
                bits[s] = load_bits(inside ? from + begin / 8 + s * APART / 8 : call.payload);
            }
            // The first threads have the head, the next ones the end.
            single = threadIdx.x < A_VECTOR ? first + threadIdx.x : filled + threadIdx.x - A_VECTOR;
            exists = threadIdx.x < A_VECTOR ? threadIdx.x < head : single < last;
            bit = exists && load_bit(from, single, ORDER_BIG);
            if (ADD && exists) old_single = to[single];
        }
        const Levels levels = levels_of(call, chunk, tile.run);
        if (ADD && levels.corrupt) continue;
        uint4 *vectors = reinterpret_cast<uint4 *>(to + begin);
        if (!ragged) {
#pragma unroll
            for (unsigned s = 0; s < STORES; s++) {
                const uint4 v = vector_of(levels, bits[s] << begin % 8, T());
                if (ADD) vectors[s * THREADS] = add_vector(old[ADD ? s : 0], v, found);
                else store_vector(vectors + s * THREADS, v);
            }
            break;
        }
        // The second byte is in the L1 cache, because another thread has loaded it as its first byte.
        const unsigned apart = begin % 8 + A_VECTOR > 8;
#pragma unroll
        for (unsigned s = 0; s < STORES; s++) {
            const bool inside = static_cast<int>(s * APART) < left;
            bits[s] = bits[s] << 8 | load_bits(inside ? from + (begin / 8 + apart) + s * APART / 8 : call.payload);
            // The old values are loaded only here, because there are not enough registers before.
            if (ADD) old[ADD ? s : 0] = make_uint4(0, 0, 0, 0);
            if (ADD && inside) old[ADD ? s : 0] = vectors[s * THREADS];
        }
#pragma unroll
        for (unsigned s = 0; s < STORES; s++) {
            if (static_cast<int>(s * APART) >= left) continue;
            const uint4 v = vector_of(levels, bits[s] << begin % 8 >> 8, T());
            if (ADD) vectors[s * THREADS] = add_vector(old[ADD ? s : 0], v, found);
            else store_vector(vectors + s * THREADS, v);
        }
        if (exists) {
            const unsigned pattern = bit ? levels.plus : levels.minus;
            if (ADD) {
                const float sum = add_finite(__uint_as_float(old_single), __uint_as_float(pattern), found);
                to[single] = static_cast<T>(__float_as_uint(sum));
            } else {
                to[single] = static_cast<T>(pattern);
            }
        }
    } while (byte < end);
    if (found) set_flags(codec, NONFINITE);
}

#define DECODE(name, T, ADD, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_decode call) { \
        decode<T, ADD>(call); \
    }
DECODE(gc_onebit_decode_u32, unsigned, false, 4)
DECODE(gc_onebit_decode_u16, unsigned short, false, 4)
DECODE(gc_onebit_decode_add, unsigned, true, 3)

#endif
