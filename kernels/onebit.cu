// The codecs ONEBIT and SIGN: docs/NUMERICS.md says what is computed, src/backend/cuda/codec/ how it is launched.
//
// A *run* is what shares a scale: a segment where it is encoded, a part where it is reduced. It is cut into *units* of
// 1024 elements, a warp's at a time, and *tiles*, a block's: an aligned power of two of units of one run, or what is
// left of it. Of several segments a table on the device says where every tile lies, so that many small ones are one
// launch.
//
// An encoder reads gradient and state, writes state and bits, and leaves the tile's sum. A launch behind it
// (finish.cuh) folds the sums of each run to its scale, and writes the chunks' headers. Which of two states is the
// valid one is looked up on the device: a graph can be launched again.
#include "decode.cuh"
#include "encode.cuh"
#include "finish.cuh"
#include "plain.cuh"
#include "reduce.cuh"
#include "state.cuh"

ENCODE(gc_onebit_encode_f32_f32, Float, F32, 2)
ENCODE(gc_onebit_encode_f32_bf16, Float, BF16, 2)
ENCODE(gc_onebit_encode_f32, Float, None, 4)
ENCODE(gc_onebit_encode_16_f32, Half, F32, 2)
ENCODE(gc_onebit_encode_16_bf16, Half, BF16, 3)
ENCODE(gc_onebit_encode_16, Half, None, 4)
DECODE(gc_onebit_decode_u32, unsigned, false, 4)
DECODE(gc_onebit_decode_u16, unsigned short, false, 4)
DECODE(gc_onebit_decode_add, unsigned, true, 3)
REDUCE(gc_onebit_reduce_f32, F32, 2)
REDUCE(gc_onebit_reduce_bf16, BF16, 3)
REDUCE(gc_onebit_reduce, None, 3)

// The shard that a reduce would add the error to: the mean, or the majority as +1 and -1, one part after the other.
// Reads 1/8 byte of each payload, writes a float32 an element: +0 if a payload is corrupt. `dst`: the shard. The state
// is only read: whoever makes a chunk of a shard goes on to the next turn.
extern "C" __global__ void __launch_bounds__(THREADS, 3) gc_onebit_mean(const __grid_constant__ gc_reduce call) {
    constexpr unsigned N = 4;
    const gc_codec &codec = call.codec;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, at = warp * UNIT;
    const gc_tile tile = tile_of(codec, blockIdx.x);
    const unsigned count = elements_of_unit(tile, at);
    const Payloads payloads(call, tile, at, count, lane);
    Group group;
    group.load(payloads, 0);
    const Told told = look_at_payloads(call, payloads.many, lane, warp);
    Lane<F32, N> sum;
    bool found = told.nonfinite;
    if (codec.kind == SIGN) {
        const unsigned char *state = codec.state[codec.control->valid >> SERVER & 1];
        const unsigned word = vote_of_unit(payloads, tile, state, at, count, lane);
        const unsigned fields = fields_of_unit<N>(in_order(word, ORDER_BIG), lane);
#pragma unroll
        for (unsigned i = 0; i < 32; i++) {
            sum.vectors[i / N].words[i % N] = 0x3f800000u | (~fields << (31 - i) & 0x80000000u);
        }
    } else {
        sum_of_payloads(payloads, group, codec.policy == ZERO, found, sum, lane);
    }
    if (lane == 0 && (told.broken || told.corrupt || found)) {
        tell(codec, told.corrupt && !told.broken ? CORRUPT : NONFINITE);
    }
    if (count == 0) return;
#pragma unroll
    for (unsigned i = 0; i < 32; i++) {
        const float mean = sum.at(i / N, i % N);
        const unsigned pattern = told.corrupt ? 0 : __float_as_uint(canonical(mean));
        sum.vectors[i / N].words[i % N] = told.broken ? 0x7fc00000 : pattern;
    }
    const u64 first = run_of(codec, tile.run).base + tile.first + at;
    sum.store_anywhere(call.dst + first * 4, lane, count);
}

// A block for each run, which folds the sums of its tiles to its scale. The last of all writes the headers of the
// chunks, and meets the other ranks.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gc_onebit_finish(const __grid_constant__ gc_finish call) {
    __shared__ float shared_scale;
    __shared__ unsigned shared_flags;
    const gc_codec &codec = call.codec;
    wait_for_launch_before();
    gc_control &control = *codec.control;
    const Finishing finishing(codec, call.dst, call.way);
    const Meeting meeting(call.way.peers, call.steps);
    unsigned found = 0;
    if (codec.n_segments != 0) {
        const unsigned number = blockIdx.x;
        const gc_run run = run_of(codec, number);
        const double sum = fold(codec.partials + run.first_tile, run.tiles);
        if (threadIdx.x == 0) {
            shared_scale = finishing.scale(number, run, sum, found);
            if (found && codec.n_segments > 1) atomicOr(&control.found, found);
        }
        __syncthreads();
        finishing.store_scale(number, shared_scale, threadIdx.x, THREADS);
        if (codec.n_segments > 1 && !is_last(codec.counter, codec.n_segments)) return;
    }
    if (threadIdx.x == 0) {
        if (codec.n_segments > 1) {
            found = atomicExch(&control.found, 0);
        } else {
            found |= finishing.before;
            if (finishing.before) control.found = 0;
        }
        shared_flags = finishing.conclude(found);
    }
    __syncthreads();
    finishing.store_headers(shared_flags);
    if (call.way.peers && call.steps) meeting.hold(&control.broken);
}
