// Two-shot all-reduce in one launch, for small calls with errors, which are latency-bound. Each rank encodes a chunk
// for each rank, waits at a barrier, reduces, sends the reduced chunk to all ranks, waits at a second barrier and
// decodes. An encode, a reduce, a decode and two barriers in separate launches write the same bytes to the same places,
// so each rank may do either.
#ifndef GRADCODEC_BLOCKS_TWO_SHOT_CUH
#define GRADCODEC_BLOCKS_TWO_SHOT_CUH

#include "blocks_decode.cuh"
#include "blocks_encode.cuh"
#include "blocks_reduce.cuh"
#include "blocks_together.cuh"

// The host declares the same struct: src/codec/cuda/layout.rs.
struct gc_two_shot {
    gc_encode encode;
    gc_reduce reduce;
    gc_decode decode;
    u64 tiles;  // tiles to reduce
};
SAME_LAYOUT(gc_two_shot)

// Ends the writes to other ranks. All thread blocks call it, with the flags that they have found. The last one sets the
// flags, signals, and then does what other ranks do not wait for. Returns true in the last thread block.
__device__ __forceinline__ bool hand_over(const Target<AWAY> &target, unsigned found, const Barrier &barrier) {
    const gc_codec &codec = target.codec;
    store_frames(target);
    note(codec, found);
    bool any, given_up;
    if (!arrive_last(codec, *target.slot.peers, found != 0, any, given_up)) return false;
    // After the barrier the thread blocks read which of two states is valid.
    const bool waits = any || codec.policy == TRANSACTIONAL;
    if (waits) {
        const unsigned flags = threadIdx.x == 0 ? conclude(codec) : 0;
        const bool corrupt = __syncthreads_or(flags & CORRUPT), nonfinite = __syncthreads_or(flags & NONFINITE);
        if (corrupt || nonfinite) store_flags(target, (corrupt ? +CORRUPT : 0u) | (nonfinite ? +NONFINITE : 0u));
        __syncthreads();
    }
    if (!given_up) barrier.signal();
    if (!waits && threadIdx.x == 0 && codec.half == SERVER) begin_next_turn(codec, 0, 0);
    return true;
}

// Encodes this thread block's tile, if it has one.
template <typename V>
__device__ __forceinline__ void encode_for_each(const gc_encode &call, u64 tiles, unsigned &found) {
    if (blockIdx.x >= tiles) return;
    const Target<AWAY> target = {call.codec, nullptr, call.slot};
    const Factors by = {factor(call.m_g), factor(call.m_e), call.codec.beta};
    encode_tile<V, true>(target, tile_of_blocks(call.codec, blockIdx.x), by, call.values, found, [] {});
}

template <typename T>
__device__ __forceinline__ void decode_for_block(const gc_decode &call, uint4 *stage) {
    if (blockIdx.x >= call.tiles) return;
    const gc_tile tile = tile_of_blocks(call.codec, blockIdx.x);
    if (decode_tile<T, false>(call, tile, 0, stage, call.codec.control->broken)) set_flags(call.codec, NONFINITE);
}

// Reads and writes values and errors; writes a chunk to each rank, reads a chunk of each, writes a chunk to all, and
// reads all. A thread block has at most one tile of each step; one without tiles writes the headers, for which other
// ranks wait. One kernel takes all dtypes of values, because the branch costs nothing in so small a call.
extern "C" __global__ void __launch_bounds__(THREADS, 2) gc_blocks_two_shot(const __grid_constant__ gc_two_shot call) {
    __shared__ uint4 stage[WARPS * RING / sizeof(uint4)];
    const gc_encode &encode = call.encode;
    const gc_reduce &reduce = call.reduce;
    const gc_decode &decode = call.decode;
    unsigned found = 0;
    const Target<AWAY> to_each = {encode.codec, nullptr, encode.slot}, to_all = {reduce.codec, nullptr, reduce.slot};
    if (decode.dtype == FLOAT32) encode_for_each<Float>(encode, decode.tiles, found);
    else encode_for_each<Half>(encode, decode.tiles, found);
    // The barrier's fields are loaded here, because they would take registers before.
    const Barrier first(encode.slot.peers, SIGNAL | WAIT);
    hand_over(to_each, found, first);
    // After a failed wait this makes `broken` visible to all threads, so that they write nothing to other ranks.
    if (first.wait(&encode.codec.control->broken)) __syncthreads();
    found = 0;
    if (blockIdx.x < call.tiles) {
        const gc_tile tile = tile_of_blocks(reduce.codec, blockIdx.x, true);
        reduce_tile<true, AWAY>(reduce, to_all, tile, reduce.codec.control->broken, false, stage, found, [] {});
    }
    const Barrier second = Barrier(reduce.slot.peers, SIGNAL | WAIT).next();
    // All thread blocks have read the number of the last barrier.
    if (hand_over(to_all, found, second) && threadIdx.x == 0) second.count();
    if (second.wait(&encode.codec.control->broken)) __syncthreads();
    if (decode.dtype == FLOAT32) decode_for_block<unsigned>(decode, stage);
    else decode_for_block<unsigned short>(decode, stage);
    if (decode.codec.control->broken == 0) check_headers(decode, gridDim.x - 1 - blockIdx.x);
}

#endif
