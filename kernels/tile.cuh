// Tiles that reach over an end of their operand, for all families of kernels.
//
// Contiguous memory is cut into tiles of aligned vectors of 16 bytes. At either end there may be a *ragged* tile, some
// of whose places do not exist:
//
//     places   0        first                          end          most
//              |- - - - -|=====|=====|=====|=====|==|- -|- - - - - - -|
//                a vector that begins outside        one that ends outside
//
// Vectors that lie wholly inside are loaded as in any tile. The two that lie inside only in part are put together from
// single elements, one a lane. All loads are under way before the first is used: a loop over elements, which waits for
// memory in every round, cost 2 to 6 us a call on an H200, where a whole small call takes 2.5.
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

// Those of a tile of `most` places, the first of which is number `begin` of an operand of `count`. Below 0: before it.
__device__ __forceinline__ Extent extent(long long begin, unsigned most, u64 count) {
    const long long left = static_cast<long long>(count) - begin;
    return {begin < 0 ? static_cast<unsigned>(-begin) : 0,
            left < 0 ? 0 : left < most ? static_cast<unsigned>(left) : most};
}

// The vector from a place on if it lies wholly inside, else zeros.
template <typename T>
__device__ __forceinline__ uint4 load_inside(const T *tile, unsigned at, Extent inside) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (inside.has(at, 16 / sizeof(T))) v = *reinterpret_cast<const uint4 *>(tile + at);
    return v;
}

// This lane's element of the vectors that lie inside only in part: the lower half of a warp has those of the first
// vector, the upper half those of the one that ends outside. A lane without one gets an element whose bit is 0.
// pack_warp() makes the *ends* of their bits.
template <typename R, typename T = typename R::element>
__device__ __forceinline__ T load_end(const T *tile, Extent inside, unsigned lane) {
    constexpr unsigned A_VECTOR = 16 / sizeof(T), HALF = WARP / 2;
    const unsigned at = lane < HALF ? lane : inside.end / A_VECTOR * A_VECTOR + lane % HALF;
    return lane % HALF < A_VECTOR && inside.has(at, 1) ? tile[at] : R::first_zero();
}

// The bits of the vector of N elements from a place on: `bits` if it lies wholly inside, else the half of `ends` that
// has them, if any does.
template <unsigned N>
__device__ __forceinline__ unsigned bits_inside(unsigned bits, unsigned at, Extent inside, unsigned ends) {
    if (inside.has(at, N)) return bits & ((1u << N) - 1);
    return at == 0 ? ends & 0xffff : at == inside.end / N * N ? ends >> 16 : 0;
}

// Stores those bytes of a word that lie inside.
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
