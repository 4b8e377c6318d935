// Tiles that reach over an end of their operand, for all families of kernels.
//
// Contiguous memory is cut into tiles of aligned vectors of 16 bytes. At either end there may be a *ragged* tile, which has
// places where nothing is:
//
//     places   0        first                          end          most
//              |- - - - -|=====|=====|=====|=====|==|- -|- - - - - - -|
//                a vector that begins outside        one that ends outside
//
// Vectors that lie wholly inside are loaded like all others. The two that do not are put together from single elements, one
// a lane. All loads are under way before the first is used: a tile that goes round by round instead, waiting for memory
// in each, cost 3 to 8 us a call on an H200, where a small call takes 2.
#ifndef GRADCODEC_TILE_CUH
#define GRADCODEC_TILE_CUH

#include "gradcodec/device.cuh"

using namespace gradcodec;
typedef unsigned long long u64;

enum : unsigned { LINE = 128 };

// How far beyond a multiple of `size` an address lies.
__device__ __forceinline__ unsigned misalignment(const void *address, unsigned size) {
    return static_cast<unsigned>(reinterpret_cast<u64>(address)) % size;
}

// This thread among all threads of the launch.
__device__ __forceinline__ u64 thread_number() {
    return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// The places of a tile that exist.
struct Extent {
    unsigned first, end;
    // Whether `count` places from `at` on do.
    __device__ __forceinline__ bool has(unsigned at, unsigned count) const {
        return at >= first && at + count <= end;
    }
};

// Of a tile of `most` places that begins at number `begin` of an operand of `count`; below 0 it begins before it.
__device__ __forceinline__ Extent extent(long long begin, unsigned most, u64 count) {
    const long long left = static_cast<long long>(count) - begin;
    return {begin < 0 ? static_cast<unsigned>(-begin) : 0,
            left < 0 ? 0 : left < most ? static_cast<unsigned>(left) : most};
}

// The vector at these places, if it lies wholly inside; else zeros.
template <typename T>
__device__ __forceinline__ uint4 load_inside(const T *tile, unsigned at, Extent inside) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (inside.has(at, 16 / sizeof(T))) v = *reinterpret_cast<const uint4 *>(tile + at);
    return v;
}

// The bits of the vectors that lie inside in part, by a warp: of the first vector in the lower half, of the one that ends
// outside in the upper half. What is not there gives 0.
template <typename R, typename T = typename R::element>
__device__ __forceinline__ unsigned pack_ends(const T *tile, Extent inside, unsigned lane) {
    constexpr unsigned A_VECTOR = 16 / sizeof(T), HALF = WARP / 2;
    const unsigned at = lane < HALF ? lane : inside.end / A_VECTOR * A_VECTOR + lane % HALF;
    bool bit = false;
    if (lane % HALF < A_VECTOR && inside.has(at, 1)) bit = bit_of<R>(tile[at]);
    return pack_warp(bit);
}

// The bits of the vector of N elements at these places: `bits` if it lies wholly inside, else what pack_ends() gave.
template <unsigned N>
__device__ __forceinline__ unsigned bits_inside(unsigned bits, unsigned at, Extent inside, unsigned ends) {
    if (inside.has(at, N)) return bits & ((1u << N) - 1);
    return at == 0 ? ends & 0xffff : at == inside.end / N * N ? ends >> 16 : 0;
}

// Those of the four bytes of a word that lie inside.
__device__ __forceinline__ void store_inside(unsigned char *tile, unsigned at, Extent inside, unsigned word) {
    if (inside.has(at, 4)) {
        *reinterpret_cast<unsigned *>(tile + at) = word;
        return;
    }
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        if (inside.has(at + k, 1)) tile[at + k] = static_cast<unsigned char>(word >> 8 * k);
    }
}

#endif
