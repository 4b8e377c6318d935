// Two exchanges in one launch, for small calls with errors, which wait for launches and not for bytes. Each rank
// encodes to those that reduce, meets them, reduces, sends that to all, meets them again and decodes: what an encode, a
// reduce, a decode and two meetings do, one after the other, with the same bytes in the same places. So it does not
// matter which of both the other ranks do.
#ifndef GRADCODEC_BLOCKS_TWICE_CUH
#define GRADCODEC_BLOCKS_TWICE_CUH

#include "blocks_decode.cuh"
#include "blocks_encode.cuh"
#include "blocks_reduce.cuh"
#include "blocks_together.cuh"

// Laid out by the host too: src/codec/cuda/layout.rs.
struct gc_twice {
    gc_encode encode;
    gc_reduce reduce;
    gc_decode decode;
    u64 tiles;  // that are reduced
};
SAME_LAYOUT(gc_twice)

// By all blocks, with what each has found and written to ranks: the last one to come tells of it, and speaks for all.
// Gives whether this is the last one. What others do not wait for comes behind that.
__device__ __forceinline__ bool hand_over(const Target<AWAY> &target, unsigned found, const Meeting &meeting) {
    const gc_codec &codec = target.codec;
    store_frames(target);
    note(codec, found);
    bool any, given_up;
    if (!come_last(codec, *target.way.peers, found != 0, any, given_up)) return false;
    // Of two states the blocks look up behind the meeting which is valid.
    const bool waits = any || codec.policy == TRANSACTIONAL;
    if (waits) {
        const unsigned flags = threadIdx.x == 0 ? conclude(codec) : 0;
        const bool corrupt = __syncthreads_or(flags & CORRUPT), nonfinite = __syncthreads_or(flags & NONFINITE);
        if (corrupt || nonfinite) store_flags(target, (corrupt ? +CORRUPT : 0u) | (nonfinite ? +NONFINITE : 0u));
        __syncthreads();
    }
    if (!given_up) meeting.speak();
    if (!waits && threadIdx.x == 0 && codec.half == SERVER) begin_next_turn(codec, 0, 0);
    return true;
}

// A block's tile, if it has one.
template <typename V>
__device__ __forceinline__ void encode_for_each(const gc_encode &call, u64 tiles, unsigned &found) {
    if (blockIdx.x >= tiles) return;
    const Target<AWAY> target = {call.codec, nullptr, call.way};
    const Factors by = {factor(call.m_g), factor(call.m_e), call.codec.beta};
    encode_tile<V, true>(target, tile_of_blocks(call.codec, blockIdx.x), by, call.values, found, [] {});
}

template <typename T>
__device__ __forceinline__ void decode_for_block(const gc_decode &call, uint4 *stage) {
    if (blockIdx.x >= call.tiles) return;
    const gc_tile tile = tile_of_blocks(call.codec, blockIdx.x);
    if (decode_tile<T, false>(call, tile, 0, stage, call.codec.control->broken)) tell(call.codec, NONFINITE);
}

// Reads and writes values and errors; writes a chunk to each rank, reads one of each, writes one to all, and reads all.
// A block has a tile at most of each; one without tiles has the headers, which others wait for then. One kernel for all
// values, for a call that is this small does not see the branch.
extern "C" __global__ void __launch_bounds__(THREADS, 2) gc_blocks_twice(const __grid_constant__ gc_twice call) {
    __shared__ uint4 stage[WARPS * RING / sizeof(uint4)];
    const gc_encode &encode = call.encode;
    const gc_reduce &reduce = call.reduce;
    const gc_decode &decode = call.decode;
    unsigned found = 0;
    const Target<AWAY> to_each = {encode.codec, nullptr, encode.way}, to_all = {reduce.codec, nullptr, reduce.way};
    if (decode.dtype == FLOAT32) encode_for_each<Float>(encode, decode.tiles, found);
    else encode_for_each<Half>(encode, decode.tiles, found);
    // What a meeting needs is loaded here, for it would take registers before.
    const Meeting first(encode.way.peers, SPEAK | LISTEN);
    hand_over(to_each, found, first);
    // All of the block know what it gave, and write nothing to ranks then.
    if (first.listen(&encode.codec.control->broken)) __syncthreads();
    found = 0;
    if (blockIdx.x < call.tiles) {
        const gc_tile tile = tile_of_blocks(reduce.codec, blockIdx.x, true);
        reduce_tile<true, AWAY>(reduce, to_all, tile, reduce.codec.control->broken, false, stage, found, [] {});
    }
    const Meeting second = Meeting(reduce.way.peers, SPEAK | LISTEN).next();
    // All have looked at the number of the last meeting.
    if (hand_over(to_all, found, second) && threadIdx.x == 0) second.count();
    if (second.listen(&encode.codec.control->broken)) __syncthreads();
    if (decode.dtype == FLOAT32) decode_for_block<unsigned>(decode, stage);
    else decode_for_block<unsigned short>(decode, stage);
    if (decode.codec.control->broken == 0) tell_of_headers(decode, gridDim.x - 1 - blockIdx.x);
}

#endif
