// Encoding.
#ifndef GRADCODEC_BLOCKS_ENCODE_CUH
#define GRADCODEC_BLOCKS_ENCODE_CUH

#include "blocks_emit.cuh"

// What is common to all elements.
struct Factors {
    float m_g, m_e, beta;
    __device__ __forceinline__ float make(float g) const { return __fmul_rn(m_g, g); }
    __device__ __forceinline__ float make(float g, float e) const {
        return __fadd_rn(make(g), __fmul_rn(beta, __fmul_rn(m_e, e)));
    }
};

// Reads a value and an error, writes an error and a code an element, and a scale a block. Block: a tile, a unit a warp. With
// the server's half it makes the chunk of a shard, whose parts are the values: what is not finite there stays until the
// error is added, as in a reduce.
template <unsigned C, typename V>
__device__ __forceinline__ void encode_blocks(const gc_encode &call) {
    constexpr unsigned N = V::SIZE == 2 ? 8 : 4, ROWS = 32 / N;
    const gc_codec &codec = call.codec;
    const gc_tile tile = tile_of_blocks<C>(codec, blockIdx.x);
    const unsigned lane = threadIdx.x % WARP, at = threadIdx.x / WARP * UNIT, count = elements_of_unit(tile, at);
    const unsigned dtype = codec.half == WORKER ? codec.header[2] & 0xff : +FLOAT32;
    unsigned found = 0, number;
    if (tile.unit == NO_UNIT || tile.run == NO_RUN) {
        if (tile.run != NO_RUN) {
            const Places places = places_of(codec, tile);
            const float m_g = factor(call.m_g);
            const typename V::element *values =
                reinterpret_cast<const typename V::element *>(values_of(codec, call.values, tile.run)) + tile.first;
#pragma unroll 4
            for (unsigned i = threadIdx.x; i < tile.count; i += THREADS) {
                store_raw(codec, places, call.dst, i, __fmul_rn(m_g, V::of(values[i], dtype)), found);
            }
        }
        number = come(codec, found);
    } else {
        const unsigned char *values = nullptr;
        Unit<C, N> unit = {codec, UnitBlocks<C>(codec, tile, at, count), lane, count, nullptr, nullptr, call.dst};
        Lane<V, N> fresh = {};
        Errors<N> old = {};
        if (count != 0) {
            values = values_of(codec, call.values, tile.run) + (tile.first + at) * V::SIZE;
            fresh.load_anywhere(values, lane, count);
            if (codec.error != 0) {
                const unsigned valid = valid_state(codec);
                const u64 kept_at = codec.units_at + (tile.unit * UNIT + at) * codec.error;
                unit.from = codec.state[valid] + kept_at;
                unit.to = codec.state[codec.policy == TRANSACTIONAL ? valid ^ 1 : valid] + kept_at;
                old.load(unit.from, codec.error, lane);
            }
        }
        // All loads are under way.
        __syncwarp();
        const Factors by = {factor(call.m_g), factor(call.m_e), codec.beta};
        const Lane<F32, N> wide = widened(fresh, dtype);
        float c[ROWS][N];
        if (codec.error == 4) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = by.make(wide.at(k, m), old.template at<4>(k, m));
            }
        } else if (codec.error == 2) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = by.make(wide.at(k, m), old.template at<2>(k, m));
            }
        } else {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = by.make(wide.at(k, m));
            }
        }
        unsigned most[ROWS];
        unit.look(c, most, found, [&](unsigned row, float (&x)[N]) {
            Errors<N> e = {};
            if (codec.error != 0 && count != 0) e.load_row(unit.from, codec.error, 0, row, lane);
#pragma unroll
            for (unsigned m = 0; m < N; m++) {
                float g = 0;
                if (unit.has(row, m)) {
                    g = V::of(reinterpret_cast<const typename V::element *>(values)[(row * WARP + lane) * N + m], dtype);
                }
                if (codec.half == WORKER && !is_finite(g)) g = 0;
                x[m] = codec.error == 0 ? by.make(g)
                                        : by.make(g, codec.error == 4 ? e.template at<4>(0, m) : e.template at<2>(0, m));
            }
        });
        number = come(codec, found);
        unit.emit(c, most);
    }
    if (threadIdx.x < WARP) finish_blocks<C>(codec, call.dst, number, lane);
}

#define BLOCKS_ENCODE(name, C, V, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_encode call) { \
        encode_blocks<C, V>(call); \
    }
BLOCKS_ENCODE(gc_blocks_encode_bf16_f32, CODEC_BF16, Float, 2)
BLOCKS_ENCODE(gc_blocks_encode_bf16_16, CODEC_BF16, Half, 2)
BLOCKS_ENCODE(gc_blocks_encode_mxfp8_f32, CODEC_MXFP8, Float, 2)
BLOCKS_ENCODE(gc_blocks_encode_mxfp8_16, CODEC_MXFP8, Half, 2)
BLOCKS_ENCODE(gc_blocks_encode_int8_f32, CODEC_INT8, Float, 2)
BLOCKS_ENCODE(gc_blocks_encode_int8_16, CODEC_INT8, Half, 2)
BLOCKS_ENCODE(gc_blocks_encode_int4_f32, CODEC_INT4, Float, 2)
BLOCKS_ENCODE(gc_blocks_encode_int4_16, CODEC_INT4, Half, 2)
BLOCKS_ENCODE(gc_blocks_encode_mxfp4_f32, CODEC_MXFP4, Float, 2)
BLOCKS_ENCODE(gc_blocks_encode_mxfp4_16, CODEC_MXFP4, Half, 2)

#endif
