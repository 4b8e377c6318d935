// Places of blocks and raw elements in chunks, the check of chunks, and the end of a launch.
#ifndef GRADCODEC_BLOCKS_CUH
#define GRADCODEC_BLOCKS_CUH

#include "step.cuh"

// ---- Places

__device__ __forceinline__ unsigned at_most_32_bits(u64 count) {
    return count < ~0u ? static_cast<unsigned>(count) : ~0u;
}

// Places of a tile. A *place* is a block, or an element of a raw segment. The first chunk holds `left` places of the
// tile, from place `number` on; each later chunk holds places from its beginning.
struct Places {
    const gc_codec &codec;
    u64 chunk, number;  // offset of the first chunk, in bytes; first place in it
    unsigned left;
    bool raw;
    unsigned first;     // number of the first chunk

    __device__ __forceinline__ unsigned per_chunk() const {
        return at_most_32_bits(raw ? codec.chunk_raws : codec.chunk_bytes);
    }
    // later() counts the chunks before the chunk of place j of the tile; number_of() returns its number in the chunk.
    __device__ __forceinline__ unsigned later(unsigned j) const { return j < left ? 0 : 1 + (j - left) / per_chunk(); }
    __device__ __forceinline__ u64 number_of(unsigned j, unsigned later) const {
        return later == 0 ? number + j : j - left - (later - 1) * per_chunk();
    }
};

// Returns a tile of a block codec: like tile_of(), with places instead of bytes. `serves`: true if the caller is sure
// that this is a server's half, where each tile lies in one chunk.
__device__ __forceinline__ gc_tile tile_of_blocks(const gc_codec &codec, unsigned number, bool serves = false) {
    if (codec.n_segments != 1) return codec.tiles[number];
    gc_tile tile;
    const bool raw = codec.only.raw;
    const u64 per_chunk = raw ? codec.chunk_raws : codec.chunk_bytes;
    tile.first = static_cast<u64>(number) * TILE;
    tile.unit = raw ? +NO_UNIT : static_cast<u64>(number) * WARPS;
    tile.byte = codec.only.byte + (raw ? tile.first : tile.first >> (codec.kind == CODEC_INT8 ? 6 : 5));
    tile.run = 0;
    const u64 left = codec.only.elements - tile.first;
    tile.count = left < TILE ? static_cast<unsigned>(left) : +TILE;
    u64 chunk = codec.chunk;
    const bool works = !serves && codec.half == WORKER;
    if (works && codec.n_chunks > 1) {
        chunk = __umul64hi(tile.byte, raw ? codec.raw_reciprocal : codec.reciprocal);  // the quotient, or one less
        if (tile.byte - chunk * per_chunk >= per_chunk && tile.count != 0) chunk++;
    }
    tile.to = tile.byte - chunk * per_chunk;
    tile.left = works ? at_most_32_bits(per_chunk - tile.to) : ~0u;
    tile.chunk = static_cast<unsigned>(chunk);
    return tile;
}

__device__ __forceinline__ Places places_of(const gc_codec &codec, const gc_tile &tile, bool serves = false) {
    const u64 chunk = (tile.chunk - (!serves && codec.half == WORKER ? 0 : codec.chunk)) * codec.stride;
    return {codec, chunk, tile.to, tile.left, tile.unit == NO_UNIT, tile.chunk};
}

// Format of a codec's blocks, without the meaning of codes. One kernel serves all codecs, because a kernel per codec
// would need four times as much code, and the branch is the same for a whole launch.
struct Format {
    unsigned elements, scale_bytes, bytes;
    __device__ __forceinline__ explicit Format(unsigned kind)
        : elements(kind == CODEC_INT8 ? 64 : 32),
          scale_bytes(kind == CODEC_BF16 ? 0 : kind == CODEC_MXFP8 || kind == CODEC_MXFP4 ? 1 : 2),
          bytes(kind == CODEC_BF16 || kind == CODEC_INT8 ? 64 : kind == CODEC_MXFP8 ? 32 : 16) {}
    // Returns the block of an element.
    __device__ __forceinline__ unsigned block(unsigned element) const { return element >> (elements == 64 ? 6 : 5); }
};

// Blocks of a warp's elements: `count` blocks, from block `before` of the tile on.
struct UnitBlocks {
    Format format;
    Places places;
    unsigned before, count;

    // `at`: the warp's first element in the tile. `elements`: number of the warp's elements.
    __device__ __forceinline__ UnitBlocks(const gc_codec &codec, const gc_tile &tile, unsigned at, unsigned elements,
                                          bool serves = false)
        : format(codec.kind), places(places_of(codec, tile, serves)), before(format.block(at)),
          count(format.block(elements + format.elements - 1)) {}
};
// Blocks `begin` to `end` of a warp, which lie in one chunk. `chunk`: offset of the chunk, in bytes. `number`: number
// in this chunk that the warp's block 0 has, or would have if it lay there too.
struct InChunk {
    unsigned begin, end, later;
    u64 chunk, number;

    // Takes all blocks of the warp, which must lie in the first chunk.
    __device__ __forceinline__ explicit InChunk(const UnitBlocks &blocks)
        : begin(0), end(blocks.count), later(0), chunk(blocks.places.chunk), number(blocks.places.number + blocks.before) {}
    __device__ __forceinline__ InChunk(const UnitBlocks &blocks, unsigned from)
        : begin(from), later(0), chunk(blocks.places.chunk), number(blocks.places.number + blocks.before) {
        const Places &places = blocks.places;
        const unsigned first = blocks.before + begin;
        unsigned left = places.left - first;
        if (first >= places.left) {
            later = places.later(first);
            left = places.left + later * places.per_chunk() - first;
            chunk += later * places.codec.stride, number = places.number_of(first, later) - begin;
        }
        end = left < blocks.count - begin ? begin + left : blocks.count;
    }
    // scales() and codes() return the offsets of the scale and the codes of the warp's block 0 in the chunk, in bytes.
    template <unsigned C>
    __device__ __forceinline__ u64 scales() const { return HEADER + number * Block<C>::SCALE_BYTES; }
    template <unsigned C>
    __device__ __forceinline__ u64 codes(const gc_codec &codec) const { return codec.codes_at + number * Block<C>::BYTES; }
    __device__ __forceinline__ bool has(unsigned j) const { return j - begin < end - begin; }
};

__device__ __forceinline__ unsigned load_scale(const unsigned char *scales, unsigned bytes, unsigned j) {
    if (bytes == 1) return scales[j];
    return bytes == 2 ? reinterpret_cast<const unsigned short *>(scales)[j] : 0;
}
__device__ __forceinline__ void store_scale(unsigned char *scales, unsigned bytes, unsigned j, unsigned scale) {
    if (bytes == 1) scales[j] = static_cast<unsigned char>(scale);
    if (bytes == 2) reinterpret_cast<unsigned short *>(scales)[j] = static_cast<unsigned short>(scale);
}

// Runs the statements `...` with the constant C, the codec of the launch.
#define BY_CODEC(kind, ...) \
    if (kind == CODEC_BF16) { \
        constexpr unsigned C = CODEC_BF16; \
        __VA_ARGS__; \
    } else if (kind == CODEC_MXFP8) { \
        constexpr unsigned C = CODEC_MXFP8; \
        __VA_ARGS__; \
    } else if (kind == CODEC_INT8) { \
        constexpr unsigned C = CODEC_INT8; \
        __VA_ARGS__; \
    } else if (kind == CODEC_INT4) { \
        constexpr unsigned C = CODEC_INT4; \
        __VA_ARGS__; \
    } else { \
        constexpr unsigned C = CODEC_MXFP4; \
        __VA_ARGS__; \
    }

// Returns the offset of raw element i of a tile, in bytes, counted like Places::chunk.
__device__ __forceinline__ u64 place_of_raw(const gc_codec &codec, const Places &places, unsigned i) {
    const unsigned later = places.later(i);
    return places.chunk + later * codec.stride + codec.raws_at + 4 * places.number_of(i, later);
}

// ---- Check of a chunk

// Expected header of a chunk, a word per lane of a half-warp. The two half-warps may check different chunks.
struct Header {
    unsigned expected;
    __device__ __forceinline__ Header(const gc_codec &codec, unsigned number, unsigned lane)
        : expected(codec.header[lane % HEADER_WORDS]) {
        if (lane % HEADER_WORDS == CHUNK_WORD) expected = number;
        if (lane % HEADER_WORDS == FLAGS_WORD) expected = 0;
    }
    static __device__ __forceinline__ unsigned load(const unsigned char *chunk, unsigned lane) {
        return reinterpret_cast<const unsigned *>(chunk)[lane % HEADER_WORDS];
    }
    // different() returns the bits that differ; flags() the flags for the differing bits of one or more chunks.
    __device__ __forceinline__ unsigned different(unsigned word) const { return word ^ expected; }
    static __device__ __forceinline__ unsigned flags(unsigned different, unsigned lane) {
        const unsigned may_differ = lane % HEADER_WORDS == FLAGS_WORD ? +NONFINITE : 0u;
        return different & ~may_differ ? +CORRUPT : different;
    }
};
__device__ __forceinline__ unsigned look_at_header(const gc_codec &codec, const unsigned char *chunk, unsigned number,
                                                   unsigned lane) {
    return Header::flags(Header(codec, number, lane).different(Header::load(chunk, lane)), lane);
}

// ---- Usual blocks
//
// A finite block that encode has written is *usual* if its scale is below 2^100. The value of a code is then x * scale,
// with floats that are quick to compute. The product is exact, so it may be part of a fused multiply-add.

// Detects a block that is not usual among all that look_at() was called for.
template <unsigned C>
struct Rare {
    unsigned scale, bits;  // largest magnitude of a scale, as stored; carries
    __device__ __forceinline__ Rare() : scale(0), bits(0) {}
    __device__ __forceinline__ void look_at(unsigned memory) {
        const unsigned magnitude = Block<C>::SCALE_BYTES == 1 ? memory : memory & 0x7fff;
        if (C != CODEC_BF16) scale = magnitude > scale ? magnitude : scale;
    }
    template <unsigned N>
    __device__ __forceinline__ void look_at(const Codes<C, N> &codes) {
#pragma unroll
        for (unsigned k = 0; k < Codes<C, N>::WORDS; k++) {
            // The sum carries if an exponent is all ones (BF16), or if all bits but the sign are ones (MXFP8).
            if (C == CODEC_BF16) bits |= (codes.words[k] & 0x7f807f80u) + 0x00800080u;
            if (C == CODEC_MXFP8) bits |= (codes.words[k] & 0x7f7f7f7fu) + 0x01010101u;
        }
    }
    __device__ __forceinline__ bool none() const {
        constexpr unsigned LIMIT = Block<C>::SCALE_BYTES == 1 ? 227 : 0x7180;
        constexpr unsigned CARRIES = C == CODEC_BF16 ? 0x80008000u : 0x80808080u;
        return scale < LIMIT && (bits & CARRIES) == 0;
    }
};
// Returns a & mask ^ other in one instruction. ptxas would use two if mask and other are both constants.
__device__ __forceinline__ unsigned masked_xor(unsigned a, unsigned mask, unsigned other) {
#ifdef __CUDA_ARCH__
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(a), "r"(mask), "r"(other));
    return result;
#else
    return (a & mask) ^ other;
#endif
}

// Converts one of two adjacent float16. The pair is computed once for both, which the compiler would not do by itself.
__device__ __forceinline__ float half_of(unsigned pair, unsigned upper) {
    return from_f16(static_cast<unsigned short>(in_register(pair) >> 16 * upper));
}

// Decodes N neighbouring codes, 4 or 8, of a usual block.
template <unsigned C, unsigned N>
struct Usual {
    float s;
    // `memory`: scale as stored. `factor`: a power of two from 2^-7 to 1 for all values; ignored for BF16.
    __device__ __forceinline__ Usual(unsigned memory, float factor) : s(1) {
        // An E8M0 scale is only an exponent. MORE compensates for codes read as float16. The result is never denormal.
        constexpr unsigned MORE = C == CODEC_MXFP8 ? 8 : 14;
        if (Block<C>::IS_E8M0) s = __uint_as_float((memory << 23) + (__float_as_uint(factor) - ((127 - MORE) << 23)));
        else if (C != CODEC_BF16) s = __fmul_rn(scale_from_memory<C>(memory), factor);
    }
    // Returns this decoder with the scale of lane `from`. The whole warp calls it.
    __device__ __forceinline__ Usual of_lane(unsigned from) const {
        Usual other = *this;
        if (C != CODEC_BF16) other.s = __shfl_sync(WHOLE_WARP, s, from);
        return other;
    }
    // Calls of(m, x, scale) for each code; the value of code m is x * scale.
    template <typename Of>
    __device__ __forceinline__ void each(const Codes<C, N> &codes, Of of) const {
#pragma unroll
        for (unsigned m = 0; m < N; m++) {
            if (C == CODEC_BF16) {
                const unsigned word = codes.words[m / 2 % Codes<C, N>::WORDS];
                of(m, __uint_as_float(m % 2 ? word & 0xffff0000u : word << 16), 1);
            } else if (C == CODEC_INT8) {
                // The bits of 2^23 joined with a number of few bits are their sum.
                const unsigned word = codes.words[m / 4 % Codes<C, N>::WORDS] ^ 0x80808080u;
                of(m, __fsub_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650 | m % 4)), 8388736), s);
            } else if (C == CODEC_INT4) {
                // The nibble stays where it lies: in a float of 2^(23 - at) its last bit counts 1.
                const unsigned word = m < 4 ? codes.words[0] : codes.words[0] >> 16, at = m % 4 * 4;
                const unsigned sum = masked_xor(word, 0xfu << at, (150u - at) << 23 | 8u << at);
                of(m, __fsub_rn(__uint_as_float(sum), static_cast<float>((0x800000u >> at) + 8u)), s);
            } else if (C == CODEC_MXFP8) {
                // These are the fields of float16, 2^8 times too small. The instruction that converts two of them is
                // not used: ptxas 12.9 lets the next instruction read its result a cycle too early.
                const unsigned word = codes.words[m / 4 % Codes<C, N>::WORDS], high = m % 2 ? word : word << 8;
                of(m, half_of((high & 0x80008000u) | (high >> 1 & 0x3f803f80u), m % 4 / 2), s);
            } else {
                // These are fields of float16, 2^14 times too small, with nibbles m and m + 4 side by side.
                const unsigned word = codes.words[0], at = m % 4 * 4;
                const unsigned fields = at < 12 ? word << (9 - at % 12) : word >> 3;
                of(m, half_of((word << (12 - at) & 0x80008000u) | (fields & 0x0e000e00u), m / 4), s);
            }
        }
    }
};

// ---- Destination of chunks

// HERE: consecutive memory. AWAY: each chunk to its rank, or one chunk to all ranks. WHOLE: consecutive chunks, to all
// ranks. Target computes addresses at each store: an encode has no registers to keep them.
//
// There is no fence here; blocks_together.cuh has it. Stores to other ranks' memory are complete when their launch is.
// The next launch signals with release semantics for the whole system, and each rank acquires the signal before it
// reads. There is a barrier between a rank's reads of an area and the next writes to it (peers.rs), so no rank reads
// what is being written.
enum : unsigned { HERE = 0, AWAY = 1, WHOLE = 2 };
template <unsigned PEERS>
struct Target {
    const gc_codec &codec;
    unsigned char *dst;
    const gc_peer_slot &slot;

    // Returns the number of copies of a chunk: 0 after a failed barrier, which other ranks may not have noticed.
    __device__ __forceinline__ unsigned copies() const {
        if (!PEERS) return 1;
        return slot.peers->broken ? 0 : PEERS == WHOLE || codec.half == SERVER ? slot.peers->world : 1;
    }
    // Returns the base address of offsets, `chunk` bytes before the chunk begins. `number`: the chunk's number.
    __device__ __forceinline__ unsigned char *base(unsigned number, unsigned copy, u64 chunk) const {
        if (!PEERS) return dst;
        // Each rank begins with the next rank, so that no link waits for another.
        const gc_peers &peers = *slot.peers;
        if (PEERS == WHOLE) return in_global_memory(peers.buffers[(peers.rank + 1 + copy) % peers.world]) + slot.at;
        return in_global_memory(peers.buffers[codec.half == SERVER ? copy : number]) + slot.at - chunk;
    }
    // Returns this thread block's tile. If chunks go to different ranks, neighbouring thread blocks have tiles of
    // different chunks, so that no link waits for another.
    __device__ __forceinline__ unsigned tile() const {
        if (!PEERS || codec.half == SERVER) return blockIdx.x;
        const unsigned each = gridDim.x / codec.n_chunks, turn = blockIdx.x / codec.n_chunks;
        return turn < each ? blockIdx.x % codec.n_chunks * each + turn : blockIdx.x;
    }
};

// ---- The end of a launch

// Makes the first warp of a thread block wait for all other warps, which continue.
__device__ __forceinline__ void wait_in_first_warp() {
#ifdef __CUDA_ARCH__
    if (threadIdx.x < WARP) asm volatile("bar.sync 1, %0;" : : "n"(+THREADS) : "memory");
    else asm volatile("bar.arrive 1, %0;" : : "n"(+THREADS) : "memory");
#else
    __syncthreads();
#endif
}

// Records the flags that a warp has found, nearly always none. A warp calls it before its thread block arrives.
__device__ __forceinline__ void note(const gc_codec &codec, unsigned found) {
    if (__any_sync(WHOLE_WARP, found != 0)) {
        const bool corrupt = __any_sync(WHOLE_WARP, found & CORRUPT), nonfinite = __any_sync(WHOLE_WARP, found & NONFINITE);
        if (threadIdx.x % WARP == 0) {
            atomicOr(&codec.control->found, (corrupt ? +CORRUPT : 0u) | (nonfinite ? +NONFINITE : 0u));
            __threadfence();
        }
        __syncwarp();
    }
}

// Counts a thread block as arrived; returns to thread 0 how many arrived before it. All threads call it when the thread
// block has found all its flags; it may still have to store.
__device__ __forceinline__ unsigned arrive(const gc_codec &codec, unsigned found) {
    note(codec, found);
    wait_in_first_warp();
    return threadIdx.x == 0 ? atomicInc(codec.counter, gridDim.x - 1) : 0;
}

// Zeroes bytes `begin` to `end` of a chunk. A warp calls it.
__device__ __forceinline__ void clear(unsigned char *chunk, u64 begin, u64 end, unsigned lane) {
#pragma unroll 1
    for (u64 at = begin + lane; at < end; at += WARP) chunk[at] = 0;
}

// Writes all of a chunk except its scales, codes and raw elements. A warp calls it.
__device__ __forceinline__ void store_frame(const gc_codec &codec, const Format &format, unsigned char *chunk,
                                            unsigned chunk_number, unsigned flags, unsigned lane) {
    if (lane < HEADER_WORDS) {
        reinterpret_cast<unsigned *>(chunk)[lane] =
            lane == FLAGS_WORD ? flags : lane == CHUNK_WORD ? chunk_number : codec.header[lane];
    }
    const auto held = [=](u64 all, u64 per_chunk) {
        const u64 begin = chunk_number * per_chunk, left = begin < all ? all - begin : 0;
        return left < per_chunk ? left : per_chunk;
    };
    const u64 blocks = held(codec.bytes, codec.chunk_bytes), raws = held(codec.raws, codec.chunk_raws);
    clear(chunk, HEADER + blocks * format.scale_bytes, codec.codes_at, lane);
    clear(chunk, codec.codes_at + blocks * format.bytes, codec.raws_at, lane);
    clear(chunk, codec.raws_at + raws * 4, codec.stride, lane);
}

// Advances a server's turn in the state that is written. One thread calls it.
__device__ __forceinline__ void begin_next_turn(const gc_codec &codec, unsigned valid, unsigned to) {
    const u64 turn = reinterpret_cast<const u64 *>(codec.state[valid])[TURN_WORD / 2];
    reinterpret_cast<u64 *>(codec.state[to])[TURN_WORD / 2] = turn + 1;
}

// Ends the state's step; returns the flags for the chunks. One thread calls it after all thread blocks have arrived.
__device__ __forceinline__ unsigned conclude(const gc_codec &codec) {
    gc_control &control = *codec.control;
    __threadfence();
    const unsigned found = atomicExch(&control.found, 0), valid = valid_state(codec);
    const bool corrupt = found & CORRUPT;
    if (codec.policy == TRANSACTIONAL) {
        if (control.pending >> codec.half & 1) commit(control, false);
        if (!(corrupt && codec.half == SERVER)) control.pending |= 1u << codec.half;
    }
    // A missing payload leaves the state as it was, like a corrupt one, but the flag is NONFINITE.
    const unsigned flags = corrupt && !control.broken ? +CORRUPT : corrupt ? +NONFINITE : found & NONFINITE;
    if (flags) set_flags(codec, flags);
    if (codec.half == SERVER && !corrupt) begin_next_turn(codec, valid, codec.policy == TRANSACTIONAL ? valid ^ 1 : valid);
    return flags;
}

// Returns the address of copy i, counted over all chunks and ranks, and its chunk's number in `number`.
template <unsigned PEERS>
__device__ __forceinline__ unsigned char *copy_of(const Target<PEERS> &target, unsigned i, unsigned &number) {
    const gc_codec &codec = target.codec;
    const unsigned k = i % codec.chunks;
    const u64 at = k * codec.stride;
    number = codec.chunk + k;
    return target.base(number, i / codec.chunks, at) + at;
}

// Writes headers, padding and gc_control, in the last thread block to arrive. The first warp of every thread block
// calls it with the number that arrive() returned.
template <unsigned PEERS>
__device__ __forceinline__ void finish_blocks(const Target<PEERS> &target, unsigned number) {
    const gc_codec &codec = target.codec;
    if (__shfl_sync(WHOLE_WARP, number, 0) != gridDim.x - 1) return;
    const Format format(codec.kind);
    const unsigned lane = threadIdx.x % WARP;
    unsigned flags = lane == 0 ? conclude(codec) : 0;
    flags = __shfl_sync(WHOLE_WARP, flags, 0);
    const unsigned copies = target.copies();
#pragma unroll 1
    for (unsigned i = 0; i < codec.chunks * copies; i++) {
        const unsigned k = PEERS ? i / copies : i, chunk_number = codec.chunk + k;
        unsigned char *chunk = target.base(chunk_number, PEERS ? i % copies : 0, k * codec.stride) + k * codec.stride;
        store_frame(codec, format, chunk, chunk_number, flags, lane);
    }
}

// ---- Raw elements

template <typename V>
__device__ __forceinline__ float value_of(const unsigned char *values, unsigned i, unsigned dtype) {
    return V::of(reinterpret_cast<const typename V::element *>(values)[i], dtype);
}

// Stores a raw element, and sets a flag if it is not finite.
template <unsigned PEERS>
__device__ __forceinline__ void store_raw(const Target<PEERS> &target, const Places &places, unsigned i, float x,
                                          unsigned &found) {
    const gc_codec &codec = target.codec;
    x = canonical(x);
    if (!is_finite(x)) {
        found |= NONFINITE;
        if (codec.policy == ZERO) x = 0;
    }
    const u64 at = place_of_raw(codec, places, i);
    if (!PEERS) {
        *reinterpret_cast<float *>(target.dst + at) = x;
        return;
    }
    const unsigned later = places.later(i), copies = target.copies();
    const u64 chunk = places.chunk + later * codec.stride;
#pragma unroll 1
    for (unsigned copy = 0; copy < copies; copy++) {
        *reinterpret_cast<float *>(target.base(places.first + later, copy, chunk) + at) = x;
    }
}

#endif
