// Encode kernels of ONEBIT and SIGN.
#ifndef GRADCODEC_ENCODE_CUH
#define GRADCODEC_ENCODE_CUH

#include "step.cuh"

// Reads a value and an error, and writes an error and 1/8 byte, per element. A thread block encodes a tile, a warp a
// unit. The first loads depend on no other load; other loads overlap with them. The server's half encodes a shard to
// its chunk: parts are the values, and non-finite values stay until the error is added, as in reduce().
template <typename V, typename E>
__device__ __forceinline__ void encode(const gc_encode &call) {
    constexpr unsigned N = neighbours<V, E>();
    const gc_codec &codec = call.codec;
    const gc_tile tile = tile_of(codec, blockIdx.x);
    const unsigned lane = threadIdx.x % WARP, at = threadIdx.x / WARP * UNIT, count = elements_of_unit(tile, at);
    const unsigned char *values = nullptr, *from = nullptr;
    unsigned char *to = nullptr;
    const Chunks chunks(codec, codec.half, call.dst, call.slot, tile.chunk);
    u64 kept_at = 0;
    Lane<V, N> fresh = {};
    Lane<E, N> old = {}, kept;
    float s = 0;
    // After this branch all warps do the same, also those without a unit. So the compiler can rely on converged lanes
    // in a warp, and makes no second code for diverged lanes.
    if (count != 0) {
        values = values_of(codec, call.values, tile.run) + (tile.first + at) * V::SIZE;
        fresh.load_anywhere(values, lane, count);
        const unsigned valid = valid_state(codec);
        from = codec.state[valid];
        to = codec.state[codec.policy == TRANSACTIONAL ? valid ^ 1 : valid];
        kept_at = codec.units_at + (tile.unit * UNIT + at) * E::SIZE;
        old.load_from(from + kept_at, lane);
        s = reinterpret_cast<const float *>(from + codec.scales_at)[tile.run];
    }
    // All loads are issued by now. Without this, ptxas moves the last loads behind the first uses.
    __syncwarp();
    let_next_launch_begin();
    const Rules rules = {codec.rule == RMS && codec.kind == ONEBIT, codec.policy == ZERO,
                         codec.policy == ZERO && codec.half == WORKER};
    const Handle form = {s, factor(call.m_g), factor(call.m_e), codec.beta};
    unsigned below_zero;
    const unsigned dtype = codec.header[2] & 0xff;
    const Lane<F32, N> wide = widened(fresh, dtype);
    float sum = step(rules, form, wide, old, kept, below_zero, lane, which_exist<N>(lane, count));
    if (__all_sync(WHOLE_WARP, is_finite(sum))) {
        if (count != 0) kept.store_to(to + kept_at, lane);
    } else {
        bool found = false;
        const auto load_row = [&](unsigned row, float (&news)[8], Row<E, N> &olds) {
            load_row_each<V, N>(news, values, row, lane, count, dtype);
            olds.load_from(from + kept_at + row * olds.PLACES * E::SIZE, lane);
        };
        sum = step_by_rows<E, N, E>(rules, form, load_row, to + kept_at, below_zero, found, lane, count);
        if (found) atomicOr(&codec.control->found, NONFINITE);
    }
    store_words(codec, tile, chunks, at / 8, word_of_unit<N>(below_zero, lane), lane);
    __shared__ double sums[WARPS];
    leave_sum(codec.partials + blockIdx.x, sum, sums);
}

// BLOCKS: thread blocks that fit on a multiprocessor if each lane has registers for all its loads. With fewer registers
// the compiler moves the last loads behind the first uses, and a thread block waits twice.
#define ENCODE(name, V, E, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_encode call) { \
        encode<V, E>(call); \
    }
ENCODE(gc_onebit_encode_f32_f32, Float, F32, 2)
ENCODE(gc_onebit_encode_f32_bf16, Float, BF16, 2)
ENCODE(gc_onebit_encode_f32, Float, None, 4)
ENCODE(gc_onebit_encode_16_f32, Half, F32, 2)
ENCODE(gc_onebit_encode_16_bf16, Half, BF16, 3)
ENCODE(gc_onebit_encode_16, Half, None, 4)

#endif
