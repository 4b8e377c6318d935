// Reducing codes of 4 bits without errors, of one segment: there instructions are what takes time, not memory.
#ifndef GRADCODEC_BLOCKS_LANES_CUH
#define GRADCODEC_BLOCKS_LANES_CUH

#include "blocks_reduce.cuh"

// A lane has a block of its own, so that none asks another one. A warp has its unit of tile after tile, from number
// `tile` on, as long as units are whole and usual: what is the same for all is found once, and payloads of the next unit
// are on their way while this one is encoded. Gives the first tile that is left. `ring`: of the warp.
template <unsigned C>
__device__ __forceinline__ unsigned reduce_by_lanes(const gc_reduce &call, unsigned tile, unsigned many, float factor,
                                                    unsigned char *ring) {
    enum : unsigned { N = 8, ROWS = Block<C>::ELEMENTS / N, CODES = Block<C>::BYTES, SCALE = Block<C>::SCALE_BYTES };
    // Of a payload each lane's codes, and the word that has its scale. It reads what it has copied: none waits.
    enum : unsigned { WORD = 4, PAYLOAD = WARP * (CODES + WORD), PAYLOADS = RING / PAYLOAD };
    const gc_codec &codec = call.codec;
    const unsigned lane = threadIdx.x % WARP;
    // Tiles whose unit is whole.
    const unsigned end = static_cast<unsigned>((codec.only.elements / UNIT + WARPS - 1 - threadIdx.x / WARP) / WARPS);
    // Where the lane's block of a tile is in a chunk, which begins with the first one.
    const auto number = [](unsigned of) { return of * static_cast<u64>(THREADS) + threadIdx.x; };
    const auto codes_at = [&](unsigned of) { return codec.codes_at + number(of) * CODES; };
    const auto scale_at = [&](unsigned of) { return HEADER + number(of) * SCALE; };
    const unsigned beyond = lane * SCALE % WORD;

    // What is copied next.
    unsigned next = tile, left = many;
    const unsigned char *codes_from, *word_from;
    const auto find = [&] {
        codes_from = call.chunks + codes_at(next), word_from = call.chunks + scale_at(next) - beyond;
    };
    unsigned char *const codes_in = ring + lane * CODES, *const word_in = ring + WARP * CODES + lane * WORD;
    const auto stage = [&](unsigned at) {
        if (next < end) {
            stage_codes(codes_in + at, codes_from, CODES);
            stage_cached<WORD>(word_in + at, word_from);
            codes_from += call.apart, word_from += call.apart;
            if (--left == 0) next += gridDim.x, left = many, find();
        }
        end_group();
    };
    find();
#pragma unroll
    for (unsigned i = 0; i + 1 < PAYLOADS; i++) stage(i * PAYLOAD);
    unsigned at = 0, before = (PAYLOADS - 1) * PAYLOAD;
#pragma unroll 1
    while (tile < end) {
        float c[ROWS][N] = {};
        Rare<C> rare;
        unsigned r = many;  // 1 at least
#pragma unroll 1
        do {
            stage(before);
            wait_for_groups<PAYLOADS - 1>();
            const unsigned memory = load_scale(word_in + beyond + at, SCALE, 0);
            Words<CODES> codes;
            load(codes, codes_in + at);
            rare.look_at(memory);
            const Usual<C, N> usual(memory, factor);
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
                usual.each(Codes<C, N>{codes.words[k]}, [&](unsigned m, float x, float scale) {
                    c[k][m] = __fmaf_rn(x, scale, c[k][m]);
                });
            }
            before = at;
            at = at + PAYLOAD == PAYLOADS * PAYLOAD ? 0 : at + PAYLOAD;
        } while (--r != 0);
        // Of such scales no sum of 4 bits is beyond 2^127.
        if (!__all_sync(WHOLE_WARP, rare.none())) break;
        unsigned most = 0;
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
            const unsigned of_row = largest(c[k]);
            most = of_row > most ? of_row : most;
        }
        const BlockScale scale = scale_of_block<C>(most);
        store_scale(call.dst + scale_at(tile), SCALE, 0, scale.memory);
        Words<CODES> codes;
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) codes.words[k] = quantize<C>(scale, c[k]).words[0];
        store(codes, call.dst + codes_at(tile));
        tile += gridDim.x;
    }
    wait_for_groups<0>();  // for the ring is used anew
    return tile;
}

// Block: tiles that are as far apart as there are blocks. What reduce_by_lanes() leaves is done as by all other codecs:
// the last tile, and what is rare.
extern "C" __global__ void __launch_bounds__(THREADS, 3) gc_blocks_reduce_by_lanes(const __grid_constant__ gc_reduce call) {
    __shared__ uint4 rings[WARPS * RING / sizeof(uint4)];
    const gc_codec &codec = call.codec;
    const unsigned lane = threadIdx.x % WARP, many = static_cast<unsigned>(call.payloads);
    const unsigned broken = codec.control->broken;
    const Share share(codec, many);
    const Header header(codec, codec.chunk, lane);
    unsigned different = broken;
#pragma unroll 1
    for (unsigned r = 0; r < many; r++) different |= header.different(Header::load(call.chunks + r * call.apart, lane));
    unsigned tile = blockIdx.x, found = 0;
    if (__all_sync(WHOLE_WARP, different == 0) && !share.divides) {
        unsigned char *ring = ring_of_warp(rings);
        tile = codec.kind == CODEC_INT4 ? reduce_by_lanes<CODEC_INT4>(call, tile, many, share.reciprocal, ring)
                                        : reduce_by_lanes<CODEC_MXFP4>(call, tile, many, share.reciprocal, ring);
    }
    const Target<HERE> target = {codec, call.dst, call.way};
#pragma unroll 1
    for (; static_cast<u64>(tile) * TILE < codec.only.elements; tile += gridDim.x) {
        gc_tile part = tile_of_blocks(codec, tile, true);
        part.chunk = codec.chunk;  // as it is: known to the compiler it takes no registers, which are wanted
        reduce_tile<false, HERE>(call, target, part, broken, false, rings, found, [] {});
    }
    const unsigned number = come(codec, found);
    if (threadIdx.x < WARP) finish_blocks(target, number);
}

#endif
