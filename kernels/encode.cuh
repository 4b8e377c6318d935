// Encoding.
#ifndef GRADCODEC_ENCODE_CUH
#define GRADCODEC_ENCODE_CUH

#include "step.cuh"

// Reads a value and an error, writes an error and 1/8 byte an element. Block: a tile, a unit a warp. All that the first
// loads need is there from the start, and what else comes from memory comes meanwhile. With the server's half it makes
// the chunk of a shard, whose parts are the values: what is not finite in them stays until the error is added, as in
// reduce().
template <typename V, typename E>
__device__ __forceinline__ void encode(const gc_encode &call) {
    constexpr unsigned N = neighbours<V, E>();
    const gc_codec &codec = call.codec;
    const gc_tile tile = tile_of(codec, blockIdx.x);
    const unsigned lane = threadIdx.x % WARP, at = threadIdx.x / WARP * UNIT, count = elements_of_unit(tile, at);
    const unsigned char *values = nullptr, *from = nullptr;
    unsigned char *to = nullptr;
    const Chunks chunks(codec, codec.half, call.dst, call.way, tile.chunk);
    u64 kept_at = 0;
    Lane<V, N> fresh = {};
    Lane<E, N> old = {}, kept;
    float s = 0;
    // Beyond this all warps do the same, also those without a unit: the compiler knows then that their lanes are
    // together, and has no other code for lanes that are not.
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
    // All loads are under way: left to itself ptxas puts the last ones behind the first uses.
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

// BLOCKS: that fit a processor, if each lane has registers for all that it loads: with fewer the compiler puts the last
// loads behind the first uses, and a block waits twice.
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
