// Two exchanges of ONEBIT in one launch, for small calls with errors, which wait for launches and not for bytes: what an
// encode, a reduce and a decode do, and what makes scales behind the first two, with the same bytes in the same places.
// So it does not matter which of both the other ranks do.
#ifndef GRADCODEC_ONEBIT_TWICE_CUH
#define GRADCODEC_ONEBIT_TWICE_CUH

#include "decode.cuh"
#include "encode.cuh"
#include "finish.cuh"
#include "reduce.cuh"
#include "together.cuh"

// The sum of a run's partials as fold() has it, by a warp: one for each block at most.
__device__ __forceinline__ double fold_few(const double *partials, unsigned count, unsigned lane) {
    constexpr unsigned A_LANE = MOST_BLOCKS_OF_ONCE / WARP;
    double values[A_LANE];
#pragma unroll
    for (unsigned i = 0; i < A_LANE; i++) values[i] = lane * A_LANE + i < count ? partials[lane * A_LANE + i] : 0;
    double sum = sum_of(values);
#pragma unroll
    for (unsigned distance = 1; distance < WARP; distance *= 2) {
        sum = __dadd_rn(sum, __shfl_xor_sync(WHOLE_WARP, sum, distance));
    }
    return sum;
}

// By all blocks, when each has left the sum of its tile: the last one to come makes scales of them and the chunks'
// headers, and speaks for all. Gives whether this is the last one.
__device__ __forceinline__ bool hand_over(const gc_codec &codec, const gc_way &way, const Meeting &meeting) {
    __shared__ unsigned shared_flags;
    bool any, given_up;
    if (!come_last(codec, *way.peers, false, any, given_up)) return false;
    const Finishing finishing(codec, nullptr, way);
    const unsigned lane = threadIdx.x % WARP;
    unsigned found = 0;
#pragma unroll 1
    for (unsigned number = threadIdx.x / WARP; number < codec.n_segments; number += WARPS) {
        const gc_run run = run_of(codec, number);
        const double sum = fold_few(codec.partials + run.first_tile, run.tiles, lane);
        const float s = lane == 0 ? finishing.scale(number, run, sum, found) : 0;
        finishing.store_scale(number, __shfl_sync(WHOLE_WARP, s, 0), lane, WARP);
    }
    const unsigned flags = finishing.before | (__syncthreads_or(found) ? +NONFINITE : 0u);
    // What others do not wait for comes behind the speaking. Of two states the blocks look up behind the meeting which is
    // valid.
    const bool waits = flags != 0 || codec.policy == TRANSACTIONAL;
    if (threadIdx.x == 0) {
        shared_flags = 0;
        if (finishing.before) codec.control->found = 0;
        if (waits) shared_flags = finishing.conclude(flags);
    }
    __syncthreads();
    finishing.store_headers(shared_flags);
    __syncthreads();
    if (!given_up) meeting.speak();
    if (!waits && threadIdx.x == 0 && finishing.serves) finishing.begin_next_turn();
    return true;
}

// Reads and writes values and errors; writes a chunk to each rank, reads one of each, writes one to all, and reads all.
// A block has a tile at most of each. One kernel for all values and errors, for a call that is this small does not see
// the branches.
extern "C" __global__ void __launch_bounds__(THREADS, 2) gc_onebit_twice(const __grid_constant__ gc_twice call) {
    const gc_encode &encode = call.encode;
    const gc_reduce &reduce = call.reduce;
    const gc_decode &decode = call.decode;
    unsigned *mark = &encode.codec.control->broken;
    const bool in_words = decode.dtype == FLOAT32, has_words = encode.codec.error == F32::SIZE;
    // No launch behind this one begins before it is over: its blocks would keep the room of those that wait.
    const auto nothing = [] {};
    if (blockIdx.x < decode.tiles) {
        if (in_words && has_words) encode_tile<Float, F32>(encode, nothing);
        else if (in_words) encode_tile<Float, BF16>(encode, nothing);
        else if (has_words) encode_tile<Half, F32>(encode, nothing);
        else encode_tile<Half, BF16>(encode, nothing);
    }
    const Meeting first(encode.way.peers, SPEAK | LISTEN);
    hand_over(encode.codec, encode.way, first);
    // All of the block know what it gave, and write nothing to ranks then.
    if (first.listen(mark)) __syncthreads();
    if (blockIdx.x < call.tiles) {
        if (has_words) reduce_tile<F32>(reduce, nothing);
        else reduce_tile<BF16>(reduce, nothing);
    }
    const Meeting second = Meeting(reduce.way.peers, SPEAK | LISTEN).next();
    // All have looked at the number of the last meeting.
    if (hand_over(reduce.codec, reduce.way, second) && threadIdx.x == 0) second.count();
    if (second.listen(mark)) __syncthreads();
    if (blockIdx.x >= decode.tiles + (decode.codec.n_chunks - decode.first_empty)) return;
    if (in_words) decode_tile<unsigned, false>(decode);
    else decode_tile<unsigned short, false>(decode);
}

#endif
