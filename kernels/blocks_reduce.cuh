// Reducing.
#ifndef GRADCODEC_BLOCKS_REDUCE_CUH
#define GRADCODEC_BLOCKS_REDUCE_CUH

#include "blocks_emit.cuh"

// MEAN: divided by the number of payloads. A power of two divides as its reciprocal multiplies.
struct Share {
    float payloads, reciprocal;
    bool divides, multiplies;
    __device__ __forceinline__ Share(const gc_codec &codec, u64 number)
        : payloads(static_cast<float>(number)), reciprocal(0), divides(false), multiplies(false) {
        if (codec.reduction == REDUCTION_SUM || number == 1) return;
        multiplies = (number & (number - 1)) == 0, divides = !multiplies;
        if (multiplies) reciprocal = __fdiv_rn(1, payloads);
    }
    __device__ __forceinline__ float of(float sum) const {
        return divides ? __fdiv_rn(sum, payloads) : multiplies ? __fmul_rn(sum, reciprocal) : sum;
    }
};

// The sum of all payloads' numbers of a unit, in turn. Two payloads are loaded at once.
template <unsigned C, unsigned N, unsigned ROWS>
__device__ __forceinline__ void sum_of_blocks(const gc_reduce &call, const InChunk &blocks, unsigned many, unsigned lane,
                                              float (&c)[ROWS][N]) {
    constexpr unsigned LANES = Block<C>::ELEMENTS / N, A_ROW = WARP / LANES, BYTES = Codes<C, N>::BYTES;
    Codes<C, N> codes[2][ROWS];
    unsigned scales[2];
    const auto load = [&](unsigned first) {
#pragma unroll
        for (unsigned i = 0; i < 2; i++) {
            // In place of one that is not there the first, which is not used: no branch, and nothing more from memory.
            const unsigned char *chunk = call.chunks + (first + i < many ? first + i : first) * call.apart;
            const unsigned char *from = chunk + blocks.codes + lane * BYTES;
            scales[i] = blocks.has(lane) ? load_scale(chunk + blocks.scales, Block<C>::SCALE_BYTES, lane) : 0;
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
                codes[i][k] = Codes<C, N>();
                if (blocks.has(k * A_ROW + lane / LANES)) codes[i][k].load(from + k * WARP * BYTES);
            }
        }
    };
    const auto add = [&] {
        const float mine = scale_from_memory<C>(scales[0]);
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
            const float s = Block<C>::SCALE_BYTES != 0 ? __shfl_sync(WHOLE_WARP, mine, k * A_ROW + lane / LANES) : 1;
            float v[N];
            dequantize(codes[0][k], s, v);
#pragma unroll
            for (unsigned m = 0; m < N; m++) c[k][m] = __fadd_rn(c[k][m], v[m]);
        }
    };
#pragma unroll
    for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
        for (unsigned m = 0; m < N; m++) c[k][m] = 0;
    }
#pragma unroll 1
    for (unsigned r = 0; r < many; r++) {
        if (r % 2 == 0) {
            load(r);
        } else {
            // The next one becomes the first, so that this is a loop.
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) codes[0][k] = codes[1][k];
            scales[0] = scales[1];
        }
        add();
    }
}

// Number m of N from one on, whose codes lie there: for what is rare.
template <unsigned C>
__device__ __forceinline__ float one_number(const unsigned char *codes, unsigned element, unsigned memory) {
    Codes<C, 1> code;
    const unsigned bit = element * Block<C>::BITS;
    code.load(codes + bit / 8);
    code.words[0] >>= bit % 8;
    float v[1];
    dequantize(code, scale_from_memory<C>(memory), v);
    return v[0];
}

// Reads a code an element and a scale a block of each payload, and an error; writes an error, a code and a scale. Block: a
// tile, a unit a warp. With `shard` it writes the sum or mean in place of all that: the first half.
extern "C" __global__ void __launch_bounds__(THREADS, 2) gc_blocks_reduce(const __grid_constant__ gc_reduce call) {
    constexpr unsigned N = 8, ROWS = 32 / N;
    typedef Unit<N, true> U;
    const gc_codec &codec = call.codec;
    const gc_tile tile = tile_of_blocks(codec, blockIdx.x);
    const unsigned lane = threadIdx.x % WARP, at = threadIdx.x / WARP * UNIT, count = elements_of_unit(tile, at);
    const unsigned many = static_cast<unsigned>(call.payloads);
    const bool raw = tile.unit == NO_UNIT, zeros = codec.policy == ZERO;
    // Without elements a shard may be NULL.
    const bool to_shard = call.shard != 0;
    float *shard = reinterpret_cast<float *>(call.dst);
    if (to_shard && tile.count != 0) shard += run_of(codec, tile.run).base + tile.first;
    // What the tile's chunks tell of themselves: every warp looks at all of them, two at a time.
    const unsigned char *chunks = call.chunks + places_of(codec, tile).chunk;
    unsigned met = 0;
#pragma unroll 1
    for (unsigned r = lane / HEADER_WORDS; r < (many + 1) / 2 * 2; r += 2) {
        const unsigned payload = r < many ? r : many - 1;
        met |= look_at_header(codec, chunks + payload * call.apart, tile.chunk, lane);
    }
    const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT), nonfinite = __any_sync(WHOLE_WARP, met & NONFINITE);
    const Share share(codec, call.payloads);
    unsigned found = corrupt ? +CORRUPT : nonfinite ? +NONFINITE : 0, number = 0;
    if (raw) {
        const Places places = places_of(codec, tile);
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < tile.count; i += THREADS) {
            const unsigned char *from = call.chunks + place_of_raw(codec, places, i);
            float sum = 0;
#pragma unroll 4
            for (unsigned r = 0; r < many; r++) {
                float v = *reinterpret_cast<const float *>(from + r * call.apart);
                if (!is_finite(v)) {
                    found |= NONFINITE;
                    if (zeros) v = 0;
                }
                sum = __fadd_rn(sum, v);
            }
            sum = corrupt ? 0 : share.of(sum);
            if (to_shard) shard[i] = canonical(sum);
            else store_raw(codec, places, call.dst, i, sum, found);
        }
        if (!to_shard) number = come(codec, found);
    } else {
        U unit = {codec, UnitBlocks(codec, tile, at, count), lane, count, nullptr, nullptr, call.dst};
        const InChunk blocks(unit.blocks, 0);  // one chunk has all of a tile
        float c[ROWS][N];
        BY_CODEC(codec.kind, sum_of_blocks<C>(call, blocks, many, lane, c))
        if (share.multiplies) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = __fmul_rn(c[k][m], share.reciprocal);
            }
        } else if (share.divides) {
            U::each_row(c, [&](unsigned, float (&x)[N]) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) x[m] = share.of(x[m]);
            });
        }
        // A v that is not finite is told, or counts as +0: if any is, it shows in a sum. All once more, then.
        if (zeros || to_shard) {
            float any = 0;
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) any = __fmaf_rn(c[k][m], 0, any);
            }
            if (any != any) {
                U::each_row(c, [&](unsigned row, float (&x)[N]) {
#pragma unroll 1
                    for (unsigned i = 0; i < N; i++) {
                        const unsigned element = (row * WARP + lane) * N + i, j = unit.blocks.format.block(element);
                        float sum = 0;
#pragma unroll 1
                        for (unsigned r = 0; r < many && element < count; r++) {
                            const unsigned char *chunk = call.chunks + r * call.apart, *codes = chunk + blocks.codes;
                            const unsigned memory = load_scale(chunk + blocks.scales, unit.blocks.format.scale_bytes, j);
                            float v;
                            BY_CODEC(codec.kind, v = one_number<C>(codes, element, memory))
                            if (!is_finite(v)) {
                                if (!corrupt) found |= NONFINITE;
                                if (zeros) v = 0;
                            }
                            sum = __fadd_rn(sum, v);
                        }
                        sum = canonical(share.of(sum));
#pragma unroll
                        for (unsigned m = 0; m < N; m++) x[m] = m + 1 < N ? x[(m + 1) % N] : sum;
                    }
                });
            }
        }
        if (corrupt) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = 0;
            }
        }
        if (to_shard) {
            // By vectors, or element by element, for parts begin anywhere; neighbours lie in the same lines.
            float *to = shard + at;
            const bool aligned = count == UNIT && misalignment(to, 16) == 0;
            U::each_row(c, [&](unsigned row, float (&x)[N]) {
                if (aligned) {
                    store_floats<N>(reinterpret_cast<unsigned char *>(to + row * WARP * N), x, lane, true);
                    return;
                }
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    if (unit.has(row, m)) to[(row * WARP + lane) * N + m] = x[m];
                }
            });
        } else {
            if (codec.error != 0 && count != 0) unit.find_errors(tile.unit + threadIdx.x / WARP);
            if (codec.error != 0 && count != 0 && !corrupt) {
                Errors<N> old = {};
                old.load(unit.from, codec.error, lane);
                old.widen(codec.error);
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                    for (unsigned m = 0; m < N; m++) c[k][m] = __fadd_rn(c[k][m], __fmul_rn(codec.beta, old.at(k, m)));
                }
            }
            unsigned most[ROWS];
            unit.look(c, most, found, [](unsigned, float (&)[N]) {});
            number = come(codec, found);
            unit.emit(c, most, corrupt);
        }
    }
    if (to_shard) {
        const bool wrong = __any_sync(WHOLE_WARP, found & CORRUPT), any = __any_sync(WHOLE_WARP, found != 0);
        if (lane == 0 && any) tell(codec, wrong ? CORRUPT : NONFINITE);
    } else if (threadIdx.x < WARP) {
        finish_blocks(codec, call.dst, number);
    }
}

#endif
