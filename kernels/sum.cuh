// Sums that are the same on every machine: docs/NUMERICS.md, section 2. A warp computes a unit's sum (UnitSum in
// device.cuh). Above units, neighbours are added in float64; an absent one is +0.
//
//     units     u0 u1 ... u7 | u8 ...           one per warp
//     partials       p0      |   p1   ...       one per thread block: a node of the tree, with a power of two of units
//     runs                   s                  by the thread block of a run in finish.cuh
#ifndef GRADCODEC_SUM_CUH
#define GRADCODEC_SUM_CUH

#include "tile.cuh"

// Returns the sum of N neighbours, a power of two.
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

// Replaces each 64 * ROUNDS neighbours by their sum; sum k becomes number k. All threads of a thread block call it;
// each warp makes a sum at a time. For each round r, lane l loads numbers 64 r + 2 l and 64 r + 2 l + 1, all before the
// first is used. Returns the first sum to all threads.
template <unsigned ROUNDS>
__device__ __forceinline__ double fold_once(double *partials, u64 count) {
    __shared__ double first_sum;
    constexpr unsigned A_ROUND = 2 * WARP, A_WARP = ROUNDS * A_ROUND, WARPS = 8;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll 1
    for (u64 number = warp; __any_sync(WHOLE_WARP, number - warp < (count + A_WARP - 1) / A_WARP); number += WARPS) {
        const u64 first = number * A_WARP + lane * 2;
        const long long left = static_cast<long long>(count) - static_cast<long long>(first);
        const int inside = left < static_cast<int>(A_WARP) ? static_cast<int>(left < 0 ? 0 : left) : +A_WARP;
        const double *from = partials + first;
        double sums[ROUNDS];
#pragma unroll
        for (unsigned r = 0; r < ROUNDS; r++) {
            const int at = r * A_ROUND;
            const double one = at < inside ? from[at] : 0, other = at + 1 < inside ? from[at + 1] : 0;
            sums[r] = __dadd_rn(one, other);
        }
        // Neighbouring lanes are added. While a lane has several rounds, two lanes exchange half of them.
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
        // Neighbouring rounds are added: the lowest bit of a round's number is the lane's bit that was used last.
#pragma unroll
        for (unsigned distance = ROUNDS / 2; distance > 0; distance /= 2) {
            sums[0] = __dadd_rn(sums[0], __shfl_xor_sync(WHOLE_WARP, sums[0], distance));
        }
        // All threads have read the old partial sums.
        __syncthreads();
        if (lane == 0 && number * A_WARP < count) partials[number] = sums[0];
        if (threadIdx.x == 0 && number == 0) first_sum = sums[0];
    }
    __syncthreads();
    return first_sum;
}

// Returns the sum of a run's partials, which an earlier launch wrote; overwrites them. All threads of a block call it.
__device__ __forceinline__ double fold(double *partials, u64 count) {
    constexpr unsigned FEW = 2, MANY = 16;
    double sum = 0;
    for (u64 left = count; left > 0;) {
        const unsigned rounds = left > 8 * FEW * 2 * WARP ? MANY : FEW;
        sum = rounds == MANY ? fold_once<MANY>(partials, left) : fold_once<FEW>(partials, left);
        left = left > rounds * 2 * WARP ? (left + rounds * 2 * WARP - 1) / (rounds * 2 * WARP) : 0;
    }
    return sum;
}

// Returns true in the last of `count` thread blocks that reach a counter, which is 0 before and afterwards. All threads
// call it; the last thread block can read everything that they have written before.
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
