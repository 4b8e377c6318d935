// Unpacks to contiguous elements, for all modules.
//
// The *values*, a type, define what is written for a bit. The type has
//
//     element                    the type of an element
//     at(i)                      the values of element i and its neighbours, with
//         vector(bits)               the elements of one vector
//         single(bit)                one element
//     alike(first, end)          true if at(first) is valid for all elements from first to end
//     vector_at(bits, first)     the vector of the elements from first on, which need not be alike
#ifndef GRADCODEC_UNPACK_CUH
#define GRADCODEC_UNPACK_CUH

#include "tile.cuh"

// Values 0, and `one` where the bit is 1.
template <typename T>
struct Ones {
    typedef T element;
    T one;
    __device__ __forceinline__ Ones at(u64) const { return *this; }
    __device__ __forceinline__ bool alike(u64, u64) const { return true; }
    __device__ __forceinline__ uint4 vector(unsigned bits) const { return unpack_vector(bits, one); }
    __device__ __forceinline__ uint4 vector_at(unsigned bits, u64) const { return vector(bits); }
    __device__ __forceinline__ T single(bool bit) const { return bit ? one : T(0); }
};

// Unpacks a ragged tile of a thread block, which begins at element `first`, and the head. Bits are read as bytes, at
// most three per vector; absent bytes count as 0.
template <unsigned STORES, typename V, typename T = typename V::element>
__device__ __forceinline__ void unpack_ragged(const unsigned char *__restrict__ src, T *__restrict__ dst, u64 elements,
                                              u64 bytes, unsigned head, u64 first, V values, unsigned order) {
    constexpr unsigned A_VECTOR = 16 / sizeof(T), TILE = STORES * THREADS * A_VECTOR;
    constexpr unsigned BYTES = (7 + A_VECTOR + 7) / 8;  // bytes with a vector's bits, wherever they begin
    u64 begin[STORES];
    unsigned loaded[STORES][BYTES];
#pragma unroll
    for (unsigned s = 0; s < STORES; s++) {
        begin[s] = first + (s * THREADS + threadIdx.x) * A_VECTOR;
#pragma unroll
        for (unsigned k = 0; k < BYTES; k++) loaded[s][k] = begin[s] / 8 + k < bytes ? src[begin[s] / 8 + k] : 0;
    }
    // The first 128 threads have single elements of the head, the next ones what fills no vector at the end.
    const u64 left = elements > first ? elements - first : 0;
    const u64 end = first + (left < TILE ? left : TILE), filled = end - left % A_VECTOR;
    const bool of_head = threadIdx.x < LINE;
    const u64 single = of_head ? threadIdx.x : filled + (threadIdx.x - LINE);
    const bool exists = single < elements && (of_head ? threadIdx.x < head : left < TILE);
    const bool bit = exists && single / 8 < bytes && load_bit(src, single, order);

#pragma unroll
    for (unsigned s = 0; s < STORES; s++) {
        unsigned word = 0;
#pragma unroll
        for (unsigned k = 0; k < BYTES; k++) word |= loaded[s][k] << 8 * k;
        const unsigned bits = in_order(word, order) >> static_cast<unsigned>(begin[s]) % 8;
        if (begin[s] + A_VECTOR <= elements) {
            store_vector(reinterpret_cast<uint4 *>(dst + begin[s]), values.vector_at(bits, begin[s]));
        }
    }
    if (exists) dst[single] = values.at(single).single(bit);
}

// Reads 1/8 and writes sizeof(T) bytes per element. A thread block has a tile of STORES * THREADS vectors, a thread
// STORES vectors that are THREADS apart, so that neighbouring threads write neighbouring vectors. A vector's bits are
// in one or two words, shared with neighbours. With so few bytes per thread the instructions before the first load
// matter, so rare cases are handled elsewhere.
template <unsigned STORES, typename V, typename T = typename V::element>
__device__ __forceinline__ void unpack(const unsigned char *__restrict__ src, T *__restrict__ dst, u64 elements,
                                       u64 bytes, V values, unsigned order) {
    constexpr unsigned A_VECTOR = 16 / sizeof(T), TILE = STORES * THREADS * A_VECTOR;
#if __CUDA_ARCH__ >= 900
    prefetch_burst<TILE / 8>(src, bytes);
#endif
    const unsigned head = (LINE - misalignment(dst, LINE)) % LINE / sizeof(T);
    // Bits count from the word with the first byte. Unless `before` and `head` are 0, a vector may need two words.
    const unsigned before = misalignment(src, 4);
    const bool apart = before || head;
    const u64 first = head + static_cast<u64>(blockIdx.x) * TILE, end = first + TILE;
    // Words are read whole: up to 8 bytes past the last, and 3 before the first.
    const bool whole = end <= elements && end / 8 + (apart ? 8 : 0) <= bytes && (blockIdx.x > 0 || before == 0);
    if (!whole || (blockIdx.x == 0 && head) || !values.alike(first, end)) {
        // The first thread block also has the head.
        return unpack_ragged<STORES>(src, dst, elements, bytes, blockIdx.x == 0 ? head : 0, first, values, order);
    }

    const u64 position = first + before * 8 + threadIdx.x * A_VECTOR;
    const unsigned shift = static_cast<unsigned>(position) % 32;
    const unsigned *from = reinterpret_cast<const unsigned *>(src - before) + position / 32;
    const auto here = values.at(first);
    unsigned words[STORES];
#pragma unroll
    for (unsigned s = 0; s < STORES; s++) {
        words[s] = in_order(load_bits(from + s * (THREADS * A_VECTOR / 32)), order) >> shift;
    }
    if (apart) {
#pragma unroll
        for (unsigned s = 0; s < STORES; s++) {
            // Two shifts are needed: a shift by 32 is not defined.
            words[s] |= in_order(load_bits(from + s * (THREADS * A_VECTOR / 32) + 1), order) << 1 << (31 - shift);
        }
    }
    uint4 *to = reinterpret_cast<uint4 *>(dst + first) + threadIdx.x;
#pragma unroll
    for (unsigned s = 0; s < STORES; s++) store_vector(to + s * THREADS, here.vector(words[s]));
}

#endif
