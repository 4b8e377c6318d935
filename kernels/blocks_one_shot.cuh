// One-shot all-reduce in one launch, for launch-latency-bound calls: every rank gets every rank's whole payload and
// reduces all of it. The reduced chunks are encoded and decoded in registers, without being sent.
#ifndef GRADCODEC_BLOCKS_ONE_SHOT_CUH
#define GRADCODEC_BLOCKS_ONE_SHOT_CUH

#include "blocks_decode.cuh"
#include "blocks_encode.cuh"
#include "blocks_reduce.cuh"
#include "blocks_together.cuh"

// The host declares the same struct: src/codec/cuda/layout.rs.
struct gc_one_shot {
    gc_codec codec;
    const float *factor;      // m_g
    gc_peer_slot slot;        // this rank's payload in the first of two areas, the area of even barriers
    u64 apart;                // bytes from one payload to the next
    u64 turn;                 // bytes from the first area to the second
    u64 tiles;
    unsigned steps, reserved; // steps of the barrier: in two launches if ranks share a GPU
    const void *values[MOST_VALUES];
};
SAME_LAYOUT(gc_one_shot)

// Payloads that this rank has received.
struct Arrived {
    const gc_codec &codec;
    const unsigned char *chunks;
    u64 apart;
    unsigned many;
};

// Returns the flags of a chunk, from the flags that a warp has found in its copies.
__device__ __forceinline__ unsigned flags_of_chunk(unsigned met) {
    if (__any_sync(WHOLE_WARP, met & CORRUPT)) return CORRUPT;
    return __any_sync(WHOLE_WARP, met & NONFINITE) ? +NONFINITE : 0u;
}

// Encodes the numbers of a warp's blocks and decodes them again: codes and scales are rounded as if they were sent.
// `most`: result of look().
template <unsigned C, unsigned N, unsigned ROWS>
__device__ __forceinline__ void encode_and_decode(float (&c)[ROWS][N], unsigned most, unsigned lane) {
    const unsigned first_owner = lane / ROWS * ROWS;
    const unsigned wrong = __ballot_sync(WHOLE_WARP, most >= NOT_FINITE) >> first_owner & ((1u << ROWS) - 1);
    const BlockScale mine = scale_of_block<C>(most);
    const float read = scale_from_memory<C>(mine.memory);
#pragma unroll
    for (unsigned k = 0; k < ROWS; k++) {
        BlockScale scale = {0, 1, 1};
        float s = 1;
        if (Block<C>::SCALE_BYTES != 0) {
            scale.inverse = __shfl_sync(WHOLE_WARP, mine.inverse, first_owner + k);
            s = __shfl_sync(WHOLE_WARP, read, first_owner + k);
        }
        Codes<C, N> codes = quantize<C>(scale, c[k]);
        if (wrong >> k & 1) codes.poison();
        dequantize(codes, s, c[k]);
    }
}

// Writes the mean or sum of a warp's elements over all payloads to the values. Adds to the flags to set.
template <typename V>
__device__ __forceinline__ void receive_unit(const Arrived &from, const gc_tile &tile, unsigned at, unsigned count,
                                             unsigned char *ring, unsigned char *to, unsigned &flags) {
    typedef typename V::element T;
    constexpr unsigned N = V::SIZE == 2 ? 8 : 4, ROWS = 32 / N;
    typedef Unit<N, false, HERE> U;
    const gc_codec &codec = from.codec;
    const gc_peer_slot nowhere = {};
    const UnitBlocks blocks(codec, tile, at, count);
    const float factor = Share(codec, from.many).reciprocal;
    // Only the sum is computed a chunk at a time. If a chunk is corrupt or not usual, the loop begins again, and does
    // everything a chunk at a time: `apart`.
    bool apart = false;
#pragma unroll 1
    for (unsigned begin = 0, end = 0; begin < blocks.count;) {
        float c[ROWS][N];
        unsigned different = 0, found = 0;
        bool usual = true;
        unsigned lane = threadIdx.x % WARP;
#pragma unroll 1
        do {
            lane = in_register(lane);  // computed again: what each codec derives from it would take registers
            const InChunk piece(blocks, end);
            bool is_usual;
            BY_CODEC(codec.kind, is_usual = sum_payloads<C>(from, piece, tile.chunk + piece.later, from.many, lane,
                                                            factor, ring, c, different, end != begin))
            as_floats(c);
            usual = usual && is_usual;
            end = piece.end;
        } while (!apart && end < blocks.count);
        const unsigned met = Header::flags(different, lane);
        const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT);
        if (!apart && (corrupt || !usual)) {
            apart = true, end = begin;
            continue;
        }
        const U unit = {codec, blocks, lane, count, nullptr, nullptr, {codec, nullptr, nowhere}};
        const Share share(codec, in_register(from.many));  // computed again, because keeping it takes registers
        divide<U>(codec, share, c);
        // Only sums of blocks that are not usual can be non-finite.
        if (!usual && !corrupt) {
            const InChunk piece(blocks, begin);
            sum_exactly<U>(from, blocks, piece, from.many, lane, codec.policy == ZERO, share, c, found,
                           [&](unsigned element, unsigned j) { return element < count && piece.has(j); });
        }
        if (corrupt) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = 0;
            }
        }
        const unsigned most = unit.look(c, found, [](unsigned, float (&)[N]) {});
        BY_CODEC(codec.kind, encode_and_decode<C>(c, most, lane))
        // The lane stores its elements from number `first` to number `last`.
        const int first = static_cast<int>(begin * blocks.format.elements) - static_cast<int>(lane * N);
        const int behind = static_cast<int>(end * blocks.format.elements) - static_cast<int>(lane * N);
        const int left = left_of_lane<N>(lane, count), last = behind < left ? behind : left;
        const unsigned dtype = dtype_of_values<V>(codec);
        Lane<V, N> results;
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
            for (unsigned m = 0; m < N; m++) {
                bool finite;
                const unsigned x = pattern_of<T>(corrupt ? 0 : c[k][m], dtype, finite);
                const int number = static_cast<int>(k * WARP * N + m);
                if (!finite && number >= first && number < last) found |= NONFINITE;
                if (V::SIZE == 4) results.vectors[k].words[m] = x;
                else if (m % 2 == 0) results.vectors[k].words[m / 2] = x;
                else results.vectors[k].words[m / 2] |= x << 16;
            }
        }
        flags |= corrupt ? +CORRUPT : flags_of_chunk(met | found);
        const bool is_whole = count == UNIT && begin == 0 && end == blocks.count;
        begin = end;
        if (is_whole && misalignment(to, 16) == 0) {
            results.store_to(to, lane);
            continue;
        }
        T *elements = reinterpret_cast<T *>(to) + lane * N;
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
            for (unsigned m = 0; m < N; m++) {
                const int number = static_cast<int>(k * WARP * N + m);
                const unsigned word = results.vectors[k].words[V::SIZE == 4 ? m : m / 2];
                if (number >= first && number < last) {
                    elements[number] = static_cast<T>(V::SIZE == 4 ? word : word >> m % 2 * 16);
                }
            }
        }
    }
}

// Writes the mean or sum of raw elements, one per thread, a chunk at a time. Returns the flags to set.
template <typename V>
__device__ __forceinline__ unsigned receive_raw(const Arrived &from, const gc_tile &tile, unsigned char *to) {
    typedef typename V::element T;
    const gc_codec &codec = from.codec;
    const Places places = places_of(codec, tile);
    const unsigned lane = threadIdx.x % WARP, dtype = dtype_of_values<V>(codec);
    const bool zeros = codec.policy == ZERO;
    const unsigned many = in_register(from.many);
    const Share share(codec, many);
    unsigned flags = 0;
#pragma unroll 1
    for (unsigned begin = 0; begin < tile.count;) {
        const unsigned later = places.later(begin), left = places.left + later * places.per_chunk() - begin;
        const unsigned end = left < tile.count - begin ? begin + left : tile.count;
        const unsigned char *chunk = from.chunks + places.chunk + later * codec.stride;
        const unsigned char *raws = chunk + codec.raws_at + 4 * places.number_of(begin, later);
        unsigned met = 0, found = 0;
#pragma unroll 1
        for (unsigned r = 0; r < many; r++) {
            met |= look_at_header(codec, chunk + r * from.apart, tile.chunk + later, lane);
        }
        const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT);
#pragma unroll 1
        for (unsigned i = begin + threadIdx.x; i < end; i += THREADS) {
            float sum = 0;
#pragma unroll 4
            for (unsigned r = 0; r < many; r++) {
                float v = reinterpret_cast<const float *>(raws + r * from.apart)[i - begin];
                if (!is_finite(v)) {
                    found |= NONFINITE;
                    if (zeros) v = 0;
                }
                sum = __fadd_rn(sum, v);
            }
            sum = canonical(share.of(sum));
            if (!is_finite(sum)) {
                found |= NONFINITE;
                if (zeros) sum = 0;
            }
            bool finite;
            reinterpret_cast<T *>(to)[i] = static_cast<T>(pattern_of<T>(corrupt ? 0 : sum, dtype, finite));
            if (!finite) found |= NONFINITE;
        }
        __syncwarp();
        flags |= corrupt ? +CORRUPT : flags_of_chunk(met | found);
        begin = end;
    }
    return flags;
}

// Fills a tile with NaN if a payload is missing. Returns the flags to set.
template <typename V>
__device__ __forceinline__ unsigned lose_tile(const gc_codec &codec, const gc_tile &tile, unsigned char *to) {
    typedef typename V::element T;
    bool finite;
    const T nan = static_cast<T>(pattern_of<T>(__uint_as_float(0x7fc00000u), dtype_of_values<V>(codec), finite));
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < tile.count; i += THREADS) reinterpret_cast<T *>(to)[i] = nan;
    return tile.count != 0 ? +NONFINITE : 0u;
}

// Reads and writes values; writes a payload to each rank, and reads a payload of each rank. There is one barrier. Even
// and odd barriers have an area each, so an area that is read after a barrier is written to only when all ranks have
// arrived at the next barrier.
template <typename V>
__device__ __forceinline__ void one_shot(const gc_one_shot &call) {
    __shared__ uint4 rings[WARPS * RING / sizeof(uint4)];
    unsigned char *ring = ring_of_warp(rings);
    const gc_codec &codec = call.codec;
    const gc_peers &peers = *call.slot.peers;
    const Barrier barrier(call.slot.peers, call.steps);
    const u64 turn = barrier.number % 2 * call.turn;
    const unsigned lane = threadIdx.x % WARP, world = peers.world;
    const unsigned warp = blockIdx.x * WARPS + threadIdx.x / WARP, warps = gridDim.x * WARPS;
    const bool signals = call.steps & SIGNAL, waits = call.steps & WAIT;
    const gc_peer_slot slot = {call.slot.peers, call.slot.at + turn};
    const Target<WHOLE> target = {codec, nullptr, slot};
    unsigned found = 0;
    if (signals) {
        const Factors by = {::factor(call.factor), 1, codec.beta};
#pragma unroll 1
        for (unsigned number = blockIdx.x; number < call.tiles; number += gridDim.x) {
            encode_tile<V, false>(target, tile_of_blocks(codec, number), by, call.values, found, [] {});
        }
        store_frames(target);
    }
    bool any = false, given_up = false;
    if (arrive_last(codec, peers, found != 0, any, given_up)) {
        if (signals && threadIdx.x == 0) {
            gc_control &control = *codec.control;
            if (codec.policy == TRANSACTIONAL) {
                if (control.pending >> codec.half & 1) commit(control, false);
                control.pending |= 1u << codec.half;
            }
            if (any) set_flags(codec, NONFINITE);
        }
        if (signals && any) store_flags(target, NONFINITE);
        __syncthreads();
        if (!given_up) barrier.signal();
        // All thread blocks have read the number of the last barrier.
        if (waits && threadIdx.x == 0) barrier.count();
    }
    if (!waits) return;
    const auto values_of_tile = [&](const gc_tile &tile) {
        return values_of(codec, call.values, tile.run) + tile.first * V::SIZE;
    };
    unsigned flags = 0;
    if (barrier.wait(&codec.control->broken)) {
#pragma unroll 1
        for (unsigned number = blockIdx.x; number < call.tiles; number += gridDim.x) {
            const gc_tile tile = tile_of_blocks(codec, number);
            if (tile.count != 0) flags |= lose_tile<V>(codec, tile, values_of_tile(tile));
        }
        if (flags != 0 && lane == 0) set_flags(codec, flags);
        return;
    }
    const unsigned char *first = peers.buffers[peers.rank] + slot.at - peers.rank * call.apart;
    const Arrived from = {codec, in_global_memory(first), call.apart, world};
#pragma unroll 1
    for (unsigned number = blockIdx.x; number < call.tiles; number += gridDim.x) {
        const gc_tile tile = tile_of_blocks(codec, number);
        if (tile.count == 0) continue;
        unsigned char *to = values_of_tile(tile);
        const unsigned at = in_register(threadIdx.x) / WARP * UNIT;
        if (tile.unit == NO_UNIT) flags |= receive_raw<V>(from, tile, to);
        else receive_unit<V>(from, tile, at, elements_of_unit(tile, at), ring, to + at * V::SIZE, flags);
    }
    // Chunks without elements are checked here.
#pragma unroll 1
    for (u64 k = warp; k < codec.n_chunks; k += warps) {
        if (k * codec.chunk_bytes < codec.bytes || k * codec.chunk_raws < codec.raws) continue;
        unsigned met = 0;
#pragma unroll 1
        for (unsigned r = 0; r < world; r++) {
            const unsigned char *chunk = from.chunks + r * call.apart + k * codec.stride;
            met |= look_at_header(codec, chunk, static_cast<unsigned>(k), lane);
        }
        flags |= flags_of_chunk(met);
    }
    if (flags != 0 && lane == 0) set_flags(codec, flags);
}

// BLOCKS: thread blocks that fit on a multiprocessor.
#define BLOCKS_ONE_SHOT(name, V, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_one_shot call) { \
        one_shot<V>(call); \
    }

#endif
