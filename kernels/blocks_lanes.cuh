// Reduce kernel for one segment without errors. Instructions limit its speed, not memory.
#ifndef GRADCODEC_BLOCKS_LANES_CUH
#define GRADCODEC_BLOCKS_LANES_CUH

#include "blocks_reduce.cuh"

// Reduces the warp's units of tile after tile, from number `tile` on, while units are whole and usual. A lane has its
// own vectors of codes, each a block or a part of one; lanes exchange only a block's largest magnitude. Values that are
// the same for all tiles are computed once, and payloads of the next unit are prefetched while a unit is encoded.
// Returns the first tile that is left: `tile` if are_right(), called after the first prefetches, finds an invalid
// payload. `many`: number of payloads, an even number for 4-bit codes. `ring`: the warp's ring.
template <unsigned C, typename AreRight>
__device__ __forceinline__ unsigned reduce_by_lanes(const gc_reduce &call, unsigned tile, unsigned many, float factor,
                                                    unsigned char *ring, AreRight are_right) {
    typedef Codes<C, 8> Row;
    enum : unsigned { VECTOR = sizeof(uint4), ROWS = VECTOR / Row::BYTES, OF_WARP = WARP * VECTOR, SCALE = Block<C>::SCALE_BYTES };
    // LANES of a block; VECTORS of a lane in a unit; bytes from the scale of one vector to the scale of the next.
    enum : unsigned { LANES = Block<C>::BYTES / VECTOR, VECTORS = UNIT * Block<C>::BITS / 8 / OF_WARP, APART = WARP / LANES * SCALE };
    // A slot of the ring is what is copied and added at once, payloads or parts of one: each lane's codes, and the
    // words with their scales. A lane reads only what it has copied, so no lane waits for another.
    enum : unsigned { WORD = 4, PARTS = 2, AT_ONCE = PARTS / VECTORS, SLOT = PARTS * (OF_WARP + WARP * WORD), SLOTS = RING / SLOT };
    const gc_codec &codec = call.codec;
    const unsigned lane = threadIdx.x % WARP;
    // `end`: number of tiles whose unit is whole.
    const unsigned end = static_cast<unsigned>((codec.only.elements / UNIT + WARPS - 1 - threadIdx.x / WARP) / WARPS);
    // These are offsets of the lane's codes and scales of a tile in a chunk, which begins with tile 0.
    const auto unit = [](unsigned of) { return of * static_cast<u64>(WARPS) + threadIdx.x / WARP; };
    const auto codes_at = [&](unsigned of) { return codec.codes_at + unit(of) * (VECTORS * OF_WARP) + lane * VECTOR; };
    const auto scale_at = [&](unsigned of) { return HEADER + unit(of) * (VECTORS * APART) + lane / LANES * SCALE; };
    const unsigned beyond = lane / LANES * SCALE % WORD;

    // These describe the next copy.
    unsigned next = tile, left = many;
    const unsigned char *codes_from, *word_from;
    const auto find = [&] {
        codes_from = call.chunks + codes_at(next), word_from = call.chunks + scale_at(next) - beyond;
    };
    unsigned char *const codes_in = ring + lane * VECTOR, *const word_in = ring + PARTS * OF_WARP + lane * WORD;
    const auto stage = [&](unsigned at) {
        if (next < end) {
#pragma unroll
            for (unsigned i = 0; i < PARTS; i++) {
                const unsigned v = i % VECTORS;
                stage_codes(codes_in + at + i * OF_WARP, codes_from + v * OF_WARP, VECTOR);
                stage_cached<WORD>(word_in + at + i * WARP * WORD, word_from + v * APART);
                if (v + 1 == VECTORS) codes_from += call.apart, word_from += call.apart;
            }
            if ((left -= AT_ONCE) == 0) next += gridDim.x, left = many, find();
        }
        end_group();
    };
    find();
#pragma unroll
    for (unsigned i = 0; i + 1 < SLOTS; i++) stage(i * SLOT);
    unsigned at = 0, before = (SLOTS - 1) * SLOT;
    const bool goes_on = are_right();
#pragma unroll 1
    while (goes_on && tile < end) {
        float c[VECTORS][ROWS][8] = {};
        Rare<C> rare;
        unsigned r = many;  // a multiple of AT_ONCE, not 0
#pragma unroll 1
        do {
            stage(before);
            wait_for_groups<SLOTS - 1>();
#pragma unroll
            for (unsigned i = 0; i < PARTS; i++) {
                const unsigned memory = load_scale(word_in + at + i * WARP * WORD + beyond, SCALE, 0);
                Words<VECTOR> codes;
                load(codes, codes_in + at + i * OF_WARP);
                rare.look_at(memory);
                const Usual<C, 8> usual(memory, factor);
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) {
                    Row row;
#pragma unroll
                    for (unsigned w = 0; w < Row::WORDS; w++) row.words[w] = codes.words[k * Row::WORDS + w];
                    rare.look_at(row);
                    float (&sums)[8] = c[i % VECTORS][k];
                    usual.each(row, [&](unsigned m, float x, float scale) { sums[m] = __fmaf_rn(x, scale, sums[m]); });
                }
            }
            before = at;
            at = at + SLOT == SLOTS * SLOT ? 0 : at + SLOT;
        } while ((r -= AT_ONCE) != 0);
        // With such scales no sum of 2^16 payloads exceeds 2^127.
        if (!__all_sync(WHOLE_WARP, rare.none())) break;
#pragma unroll
        for (unsigned v = 0; v < VECTORS; v++) {
            unsigned most = 0;
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
                const unsigned of_row = largest(c[v][k]);
                most = of_row > most ? of_row : most;
            }
            const BlockScale scale = scale_of_block<C>(largest_of_lanes<LANES>(most));
            if (lane % LANES == 0) store_scale(call.dst + scale_at(tile) + v * APART, SCALE, 0, scale.memory);
            Words<VECTOR> codes;
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
                const Row row = quantize<C>(scale, c[v][k]);
#pragma unroll
                for (unsigned i = 0; i < Row::WORDS; i++) codes.words[k * Row::WORDS + i] = row.words[i];
            }
            store(codes, call.dst + codes_at(tile) + v * OF_WARP);
        }
        tile += gridDim.x;
    }
    wait_for_groups<0>();  // the ring will be reused
    return tile;
}

// Reduces where the host selects it (`Reduce::can_reduce_by_lanes`). A thread block has every gridDim.x-th tile.
// reduce_tile() does what reduce_by_lanes() leaves: the last tile, unusual blocks, all tiles if a payload is invalid.
extern "C" __global__ void __launch_bounds__(THREADS, 3) gc_blocks_reduce_by_lanes(const __grid_constant__ gc_reduce call) {
    __shared__ uint4 rings[WARPS * RING / sizeof(uint4)];
    const gc_codec &codec = call.codec;
    const unsigned lane = threadIdx.x % WARP, many = static_cast<unsigned>(call.payloads);
    const Share share(codec, many);
    // The lower half of a warp checks one payload, the upper half the next one.
    const auto are_right = [&] {
        const Header header(codec, codec.chunk, lane);
        unsigned different = codec.control->broken;
#pragma unroll 4
        for (unsigned r = 0; r < many; r += 2) {
            const unsigned payload = r + lane / HEADER_WORDS < many ? r + lane / HEADER_WORDS : r;
            different |= header.different(Header::load(call.chunks + payload * call.apart, lane));
        }
        return __all_sync(WHOLE_WARP, different == 0) != 0;
    };
    unsigned tile = blockIdx.x, found = 0;
    unsigned char *ring = ring_of_warp(rings);
    BY_CODEC(codec.kind, if (Block<C>::BITS == 8 || Block<C>::BITS == 4) {
        // reduce_by_lanes() does not support BF16.
        tile = reduce_by_lanes<C == CODEC_BF16 ? +CODEC_MXFP8 : C>(call, tile, many, share.reciprocal, ring, are_right);
    })
    const Target<HERE> target = {codec, call.dst, call.slot};
#pragma unroll 1
    for (; static_cast<u64>(tile) * TILE < codec.only.elements; tile += gridDim.x) {
        gc_tile part = tile_of_blocks(codec, tile, true);
        part.chunk = codec.chunk;  // no change, but the compiler then needs no registers for it
        reduce_tile<false, HERE, false>(call, target, part, codec.control->broken, false, rings, found, [] {});
    }
    const unsigned number = arrive(codec, found);
    if (threadIdx.x < WARP) finish_blocks(target, number);
}

#endif
