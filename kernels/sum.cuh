// Sums that are the same on every machine: docs/NUMERICS.md, section 2. A unit's is formed by a warp (UnitSum in device.cuh).
// Above units neighbours are added in float64; an absent one is +0.
//
//     units     u0 u1 ... u7 | u8 ...           a warp each
//     partials       p0      |   p1   ...       a block each: a node of the tree, for a block has a power of two of units
//     runs                   s                  by the last block of a run to come
#ifndef GRADCODEC_SUM_CUH
#define GRADCODEC_SUM_CUH

#include "tile.cuh"

// The sum of a power of two of neighbours.
template <unsigned N>
__device__ __forceinline__ double sum_of(const double (&values)[N]) {
    double halves[N / 2];
#pragma unroll
    for (unsigned i = 0; i < N / 2; i++) halves[i] = __dadd_rn(values[2 * i], values[2 * i + 1]);
    return sum_of(halves);
}
template <>
__device__ __forceinline__ double sum_of(const double (&values)[1]) {
    return values[0];
}

// The sums of 64 * ROUNDS partials each, by all threads of a block, a warp at a time. `step`: how far they are apart; a sum
// takes the place of the first. Lane l loads numbers 64 k + 2 l and 2 l + 1 for each round k, all before the first is used.
template <unsigned ROUNDS>
__device__ __forceinline__ void fold_once(double *partials, u64 count, u64 step) {
    constexpr unsigned A_ROUND = 2 * WARP, A_WARP = ROUNDS * A_ROUND;
    const unsigned lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
#pragma unroll 1
    for (u64 first = static_cast<u64>(threadIdx.x / WARP) * A_WARP; first < count; first += warps * A_WARP) {
        double values[ROUNDS][2];
#pragma unroll
        for (unsigned k = 0; k < ROUNDS; k++) {
#pragma unroll
            for (unsigned i = 0; i < 2; i++) {
                const u64 at = first + k * A_ROUND + lane * 2 + i;
                values[k][i] = at < count ? partials[at * step] : 0;
            }
        }
        // Neighbouring lanes are added. While a lane has several rounds, each of two gives the other one half of them.
        double sums[ROUNDS];
#pragma unroll
        for (unsigned k = 0; k < ROUNDS; k++) sums[k] = __dadd_rn(values[k][0], values[k][1]);
        unsigned rounds = ROUNDS;
#pragma unroll
        for (unsigned distance = 1; distance < WARP; distance *= 2) {
            if (rounds > 1) {
                rounds /= 2;
                const bool upper = lane & distance;
#pragma unroll
                for (unsigned k = 0; k < ROUNDS / 2; k++) {
                    if (k >= rounds) continue;
                    const double given = upper ? sums[k] : sums[k + rounds], kept = upper ? sums[k + rounds] : sums[k];
                    sums[k] = __dadd_rn(kept, __shfl_xor_sync(WHOLE_WARP, given, distance));
                }
            } else {
                sums[0] = __dadd_rn(sums[0], __shfl_xor_sync(WHOLE_WARP, sums[0], distance));
            }
        }
        // Neighbouring rounds: the lowest bit of their number is in the lanes' bit that was used last.
#pragma unroll
        for (unsigned distance = ROUNDS / 2; distance > 0; distance /= 2) {
            sums[0] = __dadd_rn(sums[0], __shfl_xor_sync(WHOLE_WARP, sums[0], distance));
        }
        if (lane == 0) partials[first * step] = sums[0];
    }
    __syncthreads();
}

// The sum of a run's partials, which an earlier launch wrote, by all threads of a block. It destroys them.
__device__ __forceinline__ double fold(double *partials, u64 count) {
    constexpr unsigned FEW = 2, MANY = 32;
    u64 step = 1;
    for (u64 left = count; left > 1;) {
        const unsigned rounds = left > 8 * FEW * 2 * WARP ? MANY : FEW;
        if (rounds == MANY) fold_once<MANY>(partials, left, step);
        else fold_once<FEW>(partials, left, step);
        step *= rounds * 2 * WARP;
        left = (left + rounds * 2 * WARP - 1) / (rounds * 2 * WARP);
    }
    return count ? *partials : 0;
}

// Whether this block is the last of `count` that come to a counter, which is 0 before and afterwards. By all threads; what
// any of them has written before is seen by the last block.
__device__ __forceinline__ bool is_last(unsigned *counter, unsigned count) {
    __shared__ unsigned before;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicInc(counter, count - 1);
        __threadfence();
    }
    __syncthreads();
    return before == count - 1;
}

#endif
