// Encode kernels of the block codecs.
#ifndef GRADCODEC_BLOCKS_ENCODE_CUH
#define GRADCODEC_BLOCKS_ENCODE_CUH

#include "blocks_emit.cuh"

// Factors that are the same for all elements.
struct Factors {
    float m_g, m_e, beta;
    __device__ __forceinline__ float make(float g) const { return __fmul_rn(m_g, g); }
    __device__ __forceinline__ float make(float g, float e) const {
        return __fadd_rn(make(g), __fmul_rn(beta, __fmul_rn(m_e, e)));
    }
};

// Returns the dtype of the values. The header has the dtype of 16-bit values.
template <typename V>
__device__ __forceinline__ unsigned dtype_of_values(const gc_codec &codec) {
    return V::SIZE == 2 ? codec.header[2] & 0xff : +FLOAT32;
}

// Encodes a tile. `arrive`: all threads call it when they have found all flags, before they have stored everything.
template <typename V, bool KEPT, unsigned PEERS, typename Arrive>
__device__ __forceinline__ void encode_tile(const Target<PEERS> &target, const gc_tile &tile, const Factors &by,
                                            const void *const (&all)[MOST_VALUES], unsigned &found, Arrive arrive) {
    constexpr unsigned N = V::SIZE == 2 ? 8 : 4, ROWS = 32 / N;
    const gc_codec &codec = target.codec;
    const unsigned lane = threadIdx.x % WARP, at = threadIdx.x / WARP * UNIT;
    const unsigned dtype = dtype_of_values<V>(codec);
    const unsigned char *tensor = nullptr;
    if (tile.count != 0) tensor = values_of(codec, all, tile.run) + tile.first * V::SIZE;
    if (tile.unit == NO_UNIT) {
        const Places places = places_of(codec, tile);
#pragma unroll 4
        for (unsigned i = threadIdx.x; i < tile.count; i += THREADS) {
            store_raw(target, places, i, by.make(value_of<V>(tensor, i, dtype)), found);
        }
        arrive();
    } else {
        const unsigned count = elements_of_unit(tile, at);
        const unsigned char *values = tensor + at * V::SIZE;
        Unit<N, KEPT, PEERS> unit = {codec, UnitBlocks(codec, tile, at, count), lane, count, nullptr, nullptr, target};
        Lane<V, N> fresh = {};
        Errors<N> old = {};
        if (count != 0) {
            fresh.load_anywhere(values, lane, count);
            if (KEPT) {
                unit.find_errors(tile.unit + threadIdx.x / WARP);
                old.load(unit.from, codec.error, lane);
            }
        }
        // All loads are issued by now.
        __syncwarp();
        const Lane<F32, N> wide = widened(fresh, dtype);
        float c[ROWS][N];
        if (KEPT) old.widen(codec.error);
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
            for (unsigned m = 0; m < N; m++) c[k][m] = KEPT ? by.make(wide.at(k, m), old.at(k, m)) : wide.at(k, m);
        }
        // A factor of 1 changes nothing. A signaling NaN may stay, but its block is not finite in any case.
        if (!KEPT && by.m_g != 1) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = by.make(c[k][m]);
            }
        }
        const unsigned most = unit.look(c, found, [&](unsigned row, float (&x)[N]) {
#pragma unroll 1
            for (unsigned i = 0; i < N; i++) {
                float next = 0;
                const unsigned element = (row * WARP + lane) * N + i;
                if (element < count) {
                    const float g = value_of<V>(values, element, dtype), finite = codec.half == WORKER && !is_finite(g) ? 0 : g;
                    next = KEPT ? by.make(finite, error_at(unit.from, codec.error, element)) : by.make(finite);
                }
                // The row is shifted: the next element becomes the first.
#pragma unroll
                for (unsigned m = 0; m < N; m++) x[m] = m + 1 < N ? x[(m + 1) % N] : next;
            }
        });
        arrive();
        unit.emit(c, most);
    }
}

// Reads a value and an error, and writes an error and a code, per element; writes a scale per block. A thread block
// encodes a tile, a warp a unit. The server's half encodes a shard to its chunk: parts are the values, and non-finite
// values stay until the error is added, as in a reduce. KEPT: with errors. PEERS: to other ranks.
template <typename V, bool KEPT, unsigned PEERS>
__device__ __forceinline__ void encode_blocks(const gc_encode &call) {
    const gc_codec &codec = call.codec;
    const Target<PEERS> target = {codec, call.dst, call.slot};
    const Factors by = {factor(call.m_g), factor(call.m_e), codec.beta};
    unsigned found = 0, number = 0;
    encode_tile<V, KEPT>(target, tile_of_blocks(codec, target.tile()), by, call.values, found,
                         [&] { number = arrive(codec, found); });
    if (threadIdx.x < WARP) finish_blocks(target, number);
}

// BLOCKS: thread blocks that fit on a multiprocessor.
#define BLOCKS_ENCODE(name, V, KEPT, PEERS, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_encode call) { \
        encode_blocks<V, KEPT, PEERS>(call); \
    }

#endif
