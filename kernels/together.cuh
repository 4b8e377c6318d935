// Launches whose blocks wait for each other, and for other ranks, in place of launches behind one another. All blocks
// run at once: no more of them than the GPU has room for beside others like this.
#ifndef GRADCODEC_TOGETHER_CUH
#define GRADCODEC_TOGETHER_CUH

#include "codec.cuh"

// Two exchanges. Laid out by the host too: src/backend/cuda/codec/layout.rs.
struct gc_twice {
    gc_encode encode;
    gc_reduce reduce;
    gc_decode decode;
    u64 tiles;  // that are reduced
};
SAME_LAYOUT(gc_twice)

// How a block is known that comes last of its grid. Blocks that have come, those of them that have found something, and
// those that know that this rank has given up, in a word.
enum : unsigned { COMES = 1, HAS_FOUND = 1 << 10, GAVE_UP = 1 << 20, MOST_BLOCKS_OF_ONCE = 512 };

// By all threads of a block, with all that it has written to other ranks. Gives whether it is the last one, and what
// all have told; the word is ready for the next launch then.
__device__ __forceinline__ bool come_last(const gc_codec &codec, const gc_peers &peers, bool found, bool &any,
                                          bool &given_up) {
    bool last = false;
    unsigned all = 0;
    found = __syncthreads_or(found);
    if (threadIdx.x == 0) {
        // If some of this block's were not written for that, it has become so before.
        const bool gave_up = *static_cast<const volatile unsigned *>(&peers.broken) != 0;
        __threadfence_system();
        const unsigned own = COMES + (found ? +HAS_FOUND : 0u) + (gave_up ? +GAVE_UP : 0u);
        all = atomicAdd(codec.counter, own) + own;
        last = all % HAS_FOUND == gridDim.x;
        if (last) {
            __threadfence();  // whoever speaks then does so for the whole system
            *codec.counter = 0;
        }
    }
    last = __syncthreads_or(last);
    if (!last) return false;
    any = __syncthreads_or(all / HAS_FOUND % HAS_FOUND != 0);
    given_up = __syncthreads_or(all / GAVE_UP != 0);
    return true;
}

#endif
