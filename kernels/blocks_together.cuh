// Barriers across the grid, for a launch that replaces consecutive launches: its thread blocks wait for each other and
// for other ranks. All of them must run at once, beside other such launches, which limits their number.
#ifndef GRADCODEC_BLOCKS_TOGETHER_CUH
#define GRADCODEC_BLOCKS_TOGETHER_CUH

#include "blocks.cuh"

// Fields of the counter that detects the last thread block of a grid: thread blocks that have arrived, that have found
// flags, and that have read `broken` as 1.
enum : unsigned { ARRIVED = 1, HAS_FOUND = 1 << 10, GAVE_UP = 1 << 20, MOST_ONE_SHOT_BLOCKS = 512 };

// Returns true in the last thread block of a grid, with what all thread blocks have found. All threads call it, after
// all writes of their thread block to other ranks. The counter is then 0 for the next launch.
__device__ __forceinline__ bool arrive_last(const gc_codec &codec, const gc_peers &peers, bool found, bool &any,
                                          bool &given_up) {
    bool last = false;
    unsigned all = 0;
    found = __syncthreads_or(found);
    if (threadIdx.x == 0) {
        // If `broken` has prevented writes of this thread block, it was set before this read.
        const bool gave_up = *static_cast<const volatile unsigned *>(&peers.broken) != 0;
        __threadfence_system();
        const unsigned own = ARRIVED + (found ? +HAS_FOUND : 0u) + (gave_up ? +GAVE_UP : 0u);
        all = atomicAdd(codec.counter, own) + own;
        last = all % HAS_FOUND == gridDim.x;
        if (last) {
            __threadfence();  // makes the signal, which is for the whole system, cover all thread blocks' writes
            *codec.counter = 0;
        }
    }
    last = __syncthreads_or(last);
    if (!last) return false;
    any = __syncthreads_or(all / HAS_FOUND % HAS_FOUND != 0);
    given_up = __syncthreads_or(all / GAVE_UP != 0);
    return true;
}

// Writes headers without flags, nearly always the right ones, and padding. All warps call it. The last thread blocks,
// which may have no tile, write first.
template <unsigned PEERS>
__device__ __forceinline__ void store_frames(const Target<PEERS> &target) {
    const gc_codec &codec = target.codec;
    const Format format(codec.kind);
    const unsigned warps = gridDim.x * WARPS, copies = codec.chunks * target.copies();
#pragma unroll 1
    for (unsigned i = (gridDim.x - 1 - blockIdx.x) * WARPS + threadIdx.x / WARP; i < copies; i += warps) {
        unsigned number;
        unsigned char *chunk = copy_of(target, i, number);
        // The lane is computed again: keeping it would take a register, and blocks_two_shot.cuh has none left.
        store_frame(codec, format, chunk, number, 0, in_register(threadIdx.x % WARP));
    }
}
// Stores other flags in the headers. A thread block calls it when all have arrived.
template <unsigned PEERS>
__device__ __forceinline__ void store_flags(const Target<PEERS> &target, unsigned flags) {
    const unsigned copies = target.codec.chunks * target.copies();
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < copies; i += THREADS) {
        unsigned number;
        unsigned char *chunk = copy_of(target, i, number);
        reinterpret_cast<unsigned *>(chunk)[FLAGS_WORD] = flags;
    }
}

#endif
