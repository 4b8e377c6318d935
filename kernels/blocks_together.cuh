// Launches whose blocks wait for each other, and for other ranks, in place of launches behind one another. All blocks
// run at once: no more of them than the GPU has room for beside others like this.
#ifndef GRADCODEC_BLOCKS_TOGETHER_CUH
#define GRADCODEC_BLOCKS_TOGETHER_CUH

#include "blocks.cuh"

// How the last block of a grid to arrive is found. Blocks that have arrived, those of them that have found something, and
// those that know that this rank has given up, in a word.
enum : unsigned { ARRIVED = 1, HAS_FOUND = 1 << 10, GAVE_UP = 1 << 20, MOST_BLOCKS_OF_ONCE = 512 };

// By all threads of a block that has written everything for other ranks. Returns whether it is the last one of its
// grid, which gets what all blocks have found; the word is then ready for the next launch.
__device__ __forceinline__ bool arrive_last(const gc_codec &codec, const gc_peers &peers, bool found, bool &any,
                                          bool &given_up) {
    bool last = false;
    unsigned all = 0;
    found = __syncthreads_or(found);
    if (threadIdx.x == 0) {
        // If some of this block's were not written for that, it has become so before.
        const bool gave_up = *static_cast<const volatile unsigned *>(&peers.broken) != 0;
        __threadfence_system();
        const unsigned own = ARRIVED + (found ? +HAS_FOUND : 0u) + (gave_up ? +GAVE_UP : 0u);
        all = atomicAdd(codec.counter, own) + own;
        last = all % HAS_FOUND == gridDim.x;
        if (last) {
            __threadfence();  // whoever signals then does so for the whole system
            *codec.counter = 0;
        }
    }
    last = __syncthreads_or(last);
    if (!last) return false;
    any = __syncthreads_or(all / HAS_FOUND % HAS_FOUND != 0);
    given_up = __syncthreads_or(all / GAVE_UP != 0);
    return true;
}

// Nearly always nothing is found, and headers that say so are right. By all warps, those of the last blocks first, which
// may have no tile.
template <unsigned PEERS>
__device__ __forceinline__ void store_frames(const Target<PEERS> &target) {
    const gc_codec &codec = target.codec;
    const Format format(codec.kind);
    const unsigned warps = gridDim.x * WARPS, copies = codec.chunks * target.copies();
#pragma unroll 1
    for (unsigned i = (gridDim.x - 1 - blockIdx.x) * WARPS + threadIdx.x / WARP; i < copies; i += warps) {
        unsigned number;
        unsigned char *chunk = copy_of(target, i, number);
        // The lane found anew: what is kept of it meanwhile takes a register that blocks_twice.cuh has not.
        store_frame(codec, format, chunk, number, 0, in_register(threadIdx.x % WARP));
    }
}
// What they say in place of that. By a block, when all have arrived.
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
