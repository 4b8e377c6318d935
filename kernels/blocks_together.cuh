// What block codecs write where a launch has several steps: together.cuh.
#ifndef GRADCODEC_BLOCKS_TOGETHER_CUH
#define GRADCODEC_BLOCKS_TOGETHER_CUH

#include "blocks.cuh"
#include "together.cuh"

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
// What they say in place of that. By a block, when all have come.
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
