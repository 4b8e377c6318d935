// Reducing.
#ifndef GRADCODEC_BLOCKS_REDUCE_CUH
#define GRADCODEC_BLOCKS_REDUCE_CUH

#include "blocks_emit.cuh"

// MEAN: divided by the number of payloads. A power of two divides as its reciprocal multiplies; up to 2^7 that may be
// done to scales, and changes no bit: numbers of usual blocks are multiples of 2^-136, and no sum of them overflows.
struct Share {
    float payloads, reciprocal;
    bool divides;
    __device__ __forceinline__ Share(const gc_codec &codec, unsigned number)
        : payloads(static_cast<float>(number)), reciprocal(1), divides(false) {
        if (codec.reduction == REDUCTION_SUM) return;
        divides = number > 128 || (number & (number - 1)) != 0;
        if (!divides) reciprocal = __uint_as_float(0x7f000000u - __float_as_uint(payloads));
    }
    __device__ __forceinline__ float of(float sum) const {
        return divides ? __fdiv_rn(sum, payloads) : __fmul_rn(sum, reciprocal);
    }
};

// Whether sums are of usual blocks. Of BF16 they are looked at in place of all numbers: one that is not finite makes a
// sum that is not.
template <unsigned C, unsigned N, unsigned ROWS>
__device__ __forceinline__ bool are_usual(const float (&c)[ROWS][N], const Rare<C> &rare) {
    bool usual = rare.none();
#pragma unroll
    for (unsigned k = 0; k < ROWS && C == CODEC_BF16; k++) {
        float zero = 0;
#pragma unroll
        for (unsigned m = 0; m < N; m++) zero = __fmaf_rn(c[k][m], 0, zero);
        usual = usual && zero == 0;
    }
    return __all_sync(WHOLE_WARP, usual);
}

// The sum of all payloads' numbers of a unit, in turn, times `factor`; but for BF16, whose sums may overflow. Gives
// whether they are usual: if not, the sum is anything. `different`: bits of headers, too. With a payload is loaded what
// tells whether it is right: by every warp. Where a row has been added, the next payload's is loaded in its place, so
// that some are always on their way, in registers that leave room for three blocks of a processor.
template <unsigned C, typename Call, unsigned N, unsigned ROWS>
__device__ __forceinline__ bool sum_by_rows(const Call &call, const InChunk &blocks, unsigned chunk_number,
                                            unsigned many, unsigned lane, float factor, float (&c)[ROWS][N],
                                            unsigned &different) {
    typedef Codes<C, N> Row;
    constexpr unsigned LANES = Block<C>::ELEMENTS / N, A_ROW = WARP / LANES;
    const unsigned char *chunk = call.chunks + blocks.chunk;
    const unsigned char *from = chunk + blocks.codes<C>(call.codec) + lane * Row::BYTES;
    const unsigned char *scale_from = chunk + blocks.scales<C>() + lane * Block<C>::SCALE_BYTES;
    const unsigned char *header_from = chunk + lane % HEADER_WORDS * 4;
    const bool has_scale = blocks.has(lane);
    unsigned has_rows = 0, memory = 0, word = 0;
    Row codes[ROWS];
    const auto load_row = [&](unsigned k) {
        if (has_rows >> k & 1) codes[k].load(from + k * WARP * Row::BYTES);
    };
    const auto load_head = [&] {
        word = *reinterpret_cast<const unsigned *>(header_from);
        if (has_scale) memory = load_scale(scale_from, Block<C>::SCALE_BYTES, 0);
    };
    load_head();
#pragma unroll
    for (unsigned k = 0; k < ROWS; k++) {
        has_rows |= blocks.has(k * A_ROW + lane / LANES) ? 1u << k : 0;
        codes[k] = Row();
        load_row(k);
#pragma unroll
        for (unsigned m = 0; m < N; m++) c[k][m] = 0;
    }
    const Header header(call.codec, chunk_number, lane);
    Rare<C> rare;
    unsigned left = many;  // 1 at least
#pragma unroll 1
    do {
        const bool more = left > 1;
        different |= header.different(word);
        rare.look_at(memory);
        const Usual<C, N> mine(memory, factor);
        header_from += call.apart, from += call.apart, scale_from += call.apart;
        if (more) load_head();
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
            if (C != CODEC_BF16) rare.look_at(codes[k]);
            mine.of_lane(k * A_ROW + lane / LANES).each(codes[k], [&](unsigned m, float x, float scale) {
                c[k][m] = __fmaf_rn(x, scale, c[k][m]);
            });
            if (more) load_row(k);
        }
    } while (--left != 0);
    return are_usual(c, rare);
}

// The same where two blocks of a processor are all that fit, for errors take registers: two payloads are loaded at
// once.
template <unsigned C, unsigned N, unsigned ROWS>
__device__ __forceinline__ bool sum_by_pairs(const gc_reduce &call, const InChunk &blocks, unsigned chunk_number,
                                             unsigned many, unsigned lane, float factor, float (&c)[ROWS][N],
                                             unsigned &different) {
    typedef Codes<C, N> Row;
    constexpr unsigned LANES = Block<C>::ELEMENTS / N, A_ROW = WARP / LANES, AHEAD = 2;
    const unsigned char *first = call.chunks + blocks.chunk;
    const unsigned char *from = first + blocks.codes<C>(call.codec) + lane * Row::BYTES;
    const unsigned char *scale_from = first + blocks.scales<C>();
    const bool has_scale = blocks.has(lane);
    unsigned has_rows = 0;
#pragma unroll
    for (unsigned k = 0; k < ROWS; k++) {
        has_rows |= blocks.has(k * A_ROW + lane / LANES) ? 1u << k : 0;
#pragma unroll
        for (unsigned m = 0; m < N; m++) c[k][m] = 0;
    }
    const Header header(call.codec, chunk_number, lane);
    Rare<C> rare;
    Row codes[AHEAD][ROWS];
    unsigned scales[AHEAD];
#pragma unroll 1
    for (unsigned r = 0, ahead = 0; r < many; r++, ahead--) {
        if (ahead == 0) {
            ahead = AHEAD;
            const unsigned payload = r + lane / HEADER_WORDS;
            const unsigned word = Header::load(first + (payload < many ? payload : r) * call.apart, lane);
#pragma unroll
            for (unsigned i = 0; i < AHEAD; i++) {
                // In place of one that is not there the first, which is not used: no branch, no more bytes.
                const u64 at = (r + i < many ? r + i : r) * call.apart;
                scales[i] = has_scale ? load_scale(scale_from + at, Block<C>::SCALE_BYTES, lane) : 0;
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) {
                    codes[i][k] = Row();
                    if (has_rows >> k & 1) codes[i][k].load(from + at + k * WARP * Row::BYTES);
                }
            }
            different |= header.different(word);
        }
        rare.look_at(scales[0]);
        const Usual<C, N> mine(scales[0], factor);
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
            if (C != CODEC_BF16) rare.look_at(codes[0][k]);
            mine.of_lane(k * A_ROW + lane / LANES).each(codes[0][k], [&](unsigned m, float x, float scale) {
                c[k][m] = __fmaf_rn(x, scale, c[k][m]);
            });
        }
        // The next one becomes the first, so that this is a loop.
#pragma unroll
        for (unsigned i = 0; i + 1 < AHEAD; i++) {
            scales[i] = scales[i + 1];
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) codes[i][k] = codes[i + 1][k];
        }
    }
    return are_usual(c, rare);
}

// Any number, whatever its block and its code.
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

// A sum that is not usual: all once more. Tells what is not finite, or counts it as +0. `there`: whether an element of
// a block is.
template <typename U, typename Call, unsigned N, unsigned ROWS, typename There>
__device__ __forceinline__ void sum_exactly(const Call &call, const UnitBlocks &unit, const InChunk &blocks,
                                            unsigned many, unsigned lane, bool zeros, const Share &share,
                                            float (&c)[ROWS][N], unsigned &found, There there) {
    const gc_codec &codec = call.codec;
    const unsigned char *scales = call.chunks + blocks.chunk + HEADER + blocks.number * unit.format.scale_bytes;
    const unsigned char *codes = call.chunks + blocks.chunk + codec.codes_at + blocks.number * unit.format.bytes;
    U::each_row(c, [&](unsigned row, float (&x)[N]) {
#pragma unroll 1
        for (unsigned i = 0; i < N; i++) {
            const unsigned element = (row * WARP + lane) * N + i, j = unit.format.block(element);
            float sum = 0;
#pragma unroll 1
            for (unsigned r = 0; r < many && there(element, j); r++) {
                const u64 at = r * call.apart;
                float v;
                BY_CODEC(codec.kind, v = one_number<C>(codes + at, element,
                         load_scale(scales + at, Block<C>::SCALE_BYTES, j)))
                if (!is_finite(v)) {
                    found |= NONFINITE;
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

// The mean of a sum, where it is not one yet.
template <typename U, unsigned N, unsigned ROWS>
__device__ __forceinline__ void divide(const gc_codec &codec, const Share &share, float (&c)[ROWS][N]) {
    if (share.divides) {
        U::each_row(c, [&](unsigned, float (&x)[N]) {
#pragma unroll
            for (unsigned m = 0; m < N; m++) x[m] = share.of(x[m]);
        });
    } else if (codec.kind == CODEC_BF16) {
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
            for (unsigned m = 0; m < N; m++) c[k][m] = __fmul_rn(c[k][m], share.reciprocal);
        }
    }
}

// A tile's. `broken`: what should have come has not. `to_shard`: the sum or mean goes there. `come`: what all threads do
// when they have met what they meet, before they store all of it; to a shard nobody does.
template <bool KEPT, unsigned PEERS, typename Come>
__device__ __forceinline__ void reduce_tile(const gc_reduce &call, const Target<PEERS> &target, const gc_tile &tile,
                                            unsigned broken, bool to_shard, unsigned &found, Come come) {
    constexpr unsigned N = 8, ROWS = 32 / N;
    typedef Unit<N, KEPT, PEERS, true> U;
    const gc_codec &codec = call.codec;
    const unsigned lane = threadIdx.x % WARP, at = threadIdx.x / WARP * UNIT, count = elements_of_unit(tile, at);
    const unsigned many = static_cast<unsigned>(call.payloads);
    const bool raw = tile.unit == NO_UNIT, zeros = codec.policy == ZERO;
    const auto shard_of = [&](const gc_tile &its) {
        // Without elements a shard may be NULL.
        float *shard = reinterpret_cast<float *>(call.dst);
        return its.count != 0 ? shard + run_of(codec, its.run).base + its.first : shard;
    };
    // What did not come leaves the errors as they were, as what is corrupt does; a shard has NaN in its place.
    const auto nothing = [&] { return to_shard && codec.control->broken != 0 ? __uint_as_float(0x7fc00000u) : 0; };
    unsigned met = broken != 0 ? +CORRUPT : 0u;
    if (raw) {
        const Places places = places_of(codec, tile, true);
        const unsigned char *chunks = call.chunks + places.chunk;
#pragma unroll 1
        for (unsigned r = 0; r < many; r++) met |= look_at_header(codec, chunks + r * call.apart, tile.chunk, lane);
        const Share share(codec, many);
        const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT);
        float *shard = to_shard ? shard_of(tile) : nullptr;
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
            sum = corrupt ? nothing() : share.of(sum);
            if (to_shard) shard[i] = canonical(sum);
            else store_raw(target, places, i, sum, found);
        }
        found |= met;
        if (!to_shard) come();
    } else {
        U unit = {codec, UnitBlocks(codec, tile, at, count, true), lane, count, nullptr, nullptr, target};
        const InChunk blocks(unit.blocks);
        if (KEPT && count != 0) {
            unit.find_errors(tile.unit + threadIdx.x / WARP);
            // They come meanwhile, and take no registers. Of more payloads there is enough on its way without them.
            if (lane == 0 && many == 2 && codec.error != 0) prefetch(unit.from, UNIT * codec.error);
        }
        float c[ROWS][N];
        bool usual;
        unsigned different = broken != 0 ? ~0u : 0;
        const float factor = Share(codec, many).reciprocal;
        BY_CODEC(codec.kind, usual = KEPT ? sum_by_pairs<C>(call, blocks, tile.chunk, many, lane, factor, c, different)
                                          : sum_by_rows<C>(call, blocks, tile.chunk, many, lane, factor, c, different))
        met = Header::flags(different, lane);
        const Share share(codec, in_register(many));  // anew: kept meanwhile it takes registers
        const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT);
        divide<U>(codec, share, c);
        // Only what is not usual may not be finite.
        if (!usual && !corrupt) {
            sum_exactly<U>(call, unit.blocks, blocks, many, lane, zeros, share, c, found,
                           [&](unsigned element, unsigned) { return element < count; });
        }
        found |= met;
        if (corrupt) {
            const float x = nothing();
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = x;
            }
        }
        if (to_shard) {
            // By vectors, or element by element, for parts begin anywhere; neighbours lie in the same lines.
            // The tile found anew: what is kept of it meanwhile takes registers that are wanted.
            float *to = shard_of(tile_of_blocks(codec, in_register(blockIdx.x), true)) + at;
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
            if (KEPT && count != 0 && !corrupt) {
                Errors<N> old = {};
                old.load(unit.from, codec.error, lane);
                old.widen(codec.error);
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                    for (unsigned m = 0; m < N; m++) c[k][m] = __fadd_rn(c[k][m], __fmul_rn(codec.beta, old.at(k, m)));
                }
            }
            const unsigned most = unit.look(c, found, [](unsigned, float (&)[N]) {});
            come();
            unit.emit(c, most, corrupt);
        }
    }
}

// Reads a code an element and a scale a block of each payload, and an error; writes an error, a code and a scale.
// Block: a tile, a unit a warp. With `shard` it writes the sum or mean in place of all that: the first half. KEPT: with
// errors. PEERS: to all ranks.
template <bool KEPT, unsigned PEERS>
__device__ __forceinline__ void reduce_blocks(const gc_reduce &call) {
    const gc_codec &codec = call.codec;
    const Target<PEERS> target = {codec, call.dst, call.way};
    const gc_tile tile = tile_of_blocks(codec, blockIdx.x, true);
    const unsigned lane = threadIdx.x % WARP;
    const bool to_shard = !KEPT && !PEERS && call.shard != 0;
    const unsigned broken = codec.control->broken;  // on its way with the codes
    unsigned found = 0, number = 0;
    reduce_tile<KEPT, PEERS>(call, target, tile, broken, to_shard, found, [&] { number = come(codec, found); });
    if (to_shard) {
        const bool wrong = __any_sync(WHOLE_WARP, found & CORRUPT), any = __any_sync(WHOLE_WARP, found != 0);
        if (lane == 0 && any) tell(codec, wrong && codec.control->broken == 0 ? CORRUPT : NONFINITE);
    } else if (threadIdx.x < WARP) {
        finish_blocks(target, number);
    }
}

// BLOCKS: that fit a processor.
#define BLOCKS_REDUCE(name, KEPT, PEERS, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_reduce call) { \
        reduce_blocks<KEPT, PEERS>(call); \
    }

#endif
