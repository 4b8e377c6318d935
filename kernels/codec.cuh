// Arguments of the codec kernels, and the places of a tile's elements, bits and state.
#ifndef GRADCODEC_CODEC_CUH
#define GRADCODEC_CODEC_CUH

#include "peers.cuh"
#include "sum.cuh"

enum : unsigned { WARPS = THREADS / WARP, HEADER = 64, HEADER_WORDS = HEADER / 4, MOST_VALUES = 16 };
enum : unsigned { TILE = WARPS * UNIT };  // elements
enum : unsigned { FLAGS_WORD = 7, CHUNK_WORD = 5, TURN_WORD = 14 };
enum : unsigned { CORRUPT = 1, NONFINITE = 2, TAKEN_BACK = 4 };
enum : unsigned { ONEBIT = 1, SIGN = 2 };  // block codecs: CODEC_BF16 and on, in device.cuh
enum : unsigned { REDUCTION_MEAN = 0, REDUCTION_SUM = 1 };
enum : unsigned { RMS = 0, MEAN = 1 };
enum : unsigned { PROPAGATE = 0, ZERO = 1, TRANSACTIONAL = 2 };
enum : unsigned { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };
enum : unsigned { WORKER = 0, SERVER = 1 };
enum : unsigned { NO_RUN = 0xffffffffu };
enum : u64 { NO_UNIT = ~0ull };

// The host declares the same structs: src/codec/cuda/.

struct gc_run {
    u64 elements;
    u64 byte;           // first byte in the payload's bits; block codecs: first *place*, a block or a raw element
    u64 base;           // worker: offset in a row of errors, in elements; server: elements of the earlier runs
    u64 first_tile;
    unsigned tiles, raw;
};
SAME_LAYOUT(gc_run)

struct alignas(16) gc_tile {
    u64 first;          // first element, counted within the run
    u64 unit;           // first unit, counted over all runs; NO_UNIT for a raw run
    u64 to;             // byte offset of its bits in the payload or reduced chunk; block codecs: place in the chunk
    u64 byte;           // first byte in the payload's bits; block codecs: first place
    unsigned run, count;  // count: elements; 0 for an empty run, and for a chunk with nothing but a header
    unsigned left;      // bytes of bits, or places, up to the end of the chunk; ~0u if more, and for servers
    unsigned chunk;
};
SAME_LAYOUT(gc_tile)

// State of a codec that only the device has.
struct gc_control {
    unsigned flags;     // flags since the host last took them
    unsigned since;     // flags since the last commit
    unsigned valid;     // bits WORKER and SERVER: index of the valid state of that half
    unsigned pending;   // bits WORKER and SERVER: 1 if the other state holds a pending step
    unsigned found;     // flags that the current launch has found
    unsigned accepted;  // result of gc_onebit_check_state: 1 if the state may be loaded
    unsigned broken;    // 1 after a rank missed an exchange: received data counts as NaN
    unsigned reserved;
};
SAME_LAYOUT(gc_control)

struct gc_codec {
    unsigned char *state[2];  // the two states; the same address twice if there is one state
    gc_control *control;
    double *partials;         // partial sums, one per tile
    unsigned *counter;        // thread blocks that have arrived in the current launch; 0 between launches
    const gc_tile *tiles;
    const gc_run *runs;       // runs to encode or reduce: one per segment, empty segments included
    const gc_run *segments;
    float *scales;            // scales of the last encode
    unsigned *report;         // host memory that becomes 1 when received data is corrupt; or NULL
    const void **addresses;   // addresses of the segments' values, if there are more than MOST_VALUES; or NULL
    u64 bytes, chunk_bytes;   // bytes of bits, of all and per chunk; block codecs: blocks
    u64 head, stride;
    u64 scales_at, units_at;  // offsets of these runs' scales and units in the state, in bytes
    unsigned n_segments, n_chunks, chunk, chunks;  // written chunks: `chunks` from number `chunk` on
    unsigned kind, rule, policy, results, half, reduction;
    float beta;
    unsigned error;           // bytes of an error's element; 0: no errors
    unsigned ranks, reserved; // ranks: number of ranks whose values a payload sums
    unsigned header[HEADER_WORDS];
    gc_run only;              // the run, if there is one segment
    u64 reciprocal;           // floor((2^64 - 1) / chunk_bytes), or 0
    // Block codecs: raw elements, of all and per chunk, their reciprocal; offsets of codes and raw elements in a chunk.
    u64 raws, chunk_raws, raw_reciprocal, codes_at, raws_at;
};
SAME_LAYOUT(gc_codec)

struct gc_encode {
    gc_codec codec;
    const float *m_g, *m_e;
    unsigned char *dst;       // the payload; for a shard the chunk
    gc_peer_slot slot;        // or the buffers of the ranks that receive it
    const void *values[MOST_VALUES];
};
SAME_LAYOUT(gc_encode)
struct gc_finish {
    gc_codec codec;
    unsigned char *dst;       // first of the chunks to write
    gc_peer_slot slot;
    unsigned steps, reserved; // steps of the barrier after it; 0: no barrier
};
SAME_LAYOUT(gc_finish)
struct gc_reduce {
    gc_codec codec;
    const unsigned char *chunks;
    unsigned char *dst;       // the chunk; gc_onebit_mean: the shard
    gc_peer_slot slot;
    u64 payloads, apart;      // number of payloads; bytes from one payload to the next
    unsigned shard, reserved; // gc_blocks_reduce: shard is 1 if dst is the shard
};
SAME_LAYOUT(gc_reduce)
struct gc_decode {
    gc_codec codec;
    const unsigned char *payload;
    const float *factor;
    float divisor;
    unsigned dtype;
    u64 tiles;                // later thread blocks check the chunks without elements
    u64 first_empty;          // number of the first chunk without elements
    void *values[MOST_VALUES];
};
SAME_LAYOUT(gc_decode)

// ---- Tiles
//
// With one segment, a thread block needs no load before its first loads; with several, it needs one table entry. Each
// load that another load waits for costs a thread block about 10 % of its time.

__device__ __forceinline__ gc_run run_of(const gc_codec &codec, unsigned number) {
    return codec.n_segments == 1 ? codec.only : codec.runs[number];
}
__device__ __forceinline__ gc_run segment_of(const gc_codec &codec, unsigned number) {
    if (codec.n_segments != 1) return codec.segments[number];
    gc_run only = codec.only;
    // A server's run is a part of the segment; the header has the segment's elements.
    if (codec.half != WORKER) only.byte = 0, only.elements = static_cast<u64>(codec.header[9]) << 32 | codec.header[8];
    return only;
}

__device__ __forceinline__ gc_tile tile_of(const gc_codec &codec, unsigned number) {
    if (codec.n_segments != 1) return codec.tiles[number];
    gc_tile tile;
    tile.first = static_cast<u64>(number) * TILE;
    tile.unit = codec.only.raw ? +NO_UNIT : static_cast<u64>(number) * WARPS;
    tile.byte = codec.only.byte + tile.first / 8;
    tile.run = 0;
    const u64 left = codec.only.elements - tile.first;
    tile.count = left < TILE ? static_cast<unsigned>(left) : +TILE;
    u64 chunk = codec.chunk;
    if (codec.half == WORKER && codec.n_chunks > 1) {
        chunk = __umul64hi(tile.byte, codec.reciprocal);  // the quotient, or one less
        if (tile.byte - chunk * codec.chunk_bytes >= codec.chunk_bytes && tile.count != 0) chunk++;
    }
    const u64 at = tile.byte - chunk * codec.chunk_bytes, room = codec.chunk_bytes - at;
    tile.to = (codec.half == WORKER ? chunk * codec.stride : 0) + codec.head + at;
    tile.left = codec.half == WORKER && room < ~0u ? static_cast<unsigned>(room) : ~0u;
    tile.chunk = static_cast<unsigned>(chunk);
    return tile;
}

// Returns the number of the tile's elements in the unit that begins at element `at`.
__device__ __forceinline__ unsigned elements_of_unit(const gc_tile &tile, unsigned at) {
    return tile.count <= at ? 0 : tile.count - at < UNIT ? tile.count - at : UNIT;
}

// Returns the bytes of bits per chunk, limited to ~0u: a tile needs no more.
__device__ __forceinline__ unsigned chunk_bytes_of(const gc_codec &codec) {
    return codec.chunk_bytes < ~0u ? static_cast<unsigned>(codec.chunk_bytes) : ~0u;
}

// Counts the tile's chunks before the one with byte `at` of its bits; place_of_byte() returns the byte's offset.
__device__ __forceinline__ unsigned chunks_to_byte(const gc_codec &codec, const gc_tile &tile, unsigned at) {
    return at < tile.left ? 0 : 1 + (at - tile.left) / chunk_bytes_of(codec);
}
__device__ __forceinline__ u64 place_of_byte(const gc_codec &codec, const gc_tile &tile, unsigned at) {
    return tile.to + at + chunks_to_byte(codec, tile, at) * (codec.stride - codec.chunk_bytes);
}

// Marks an address as one in global memory, which the compiler cannot infer for an address that was loaded.
__device__ __forceinline__ unsigned char *in_global_memory(const void *found) {
#ifdef __CUDA_ARCH__
    u64 global;
    asm("cvta.to.global.u64 %0, %1;" : "=l"(global) : "l"(found));
    found = __cvta_global_to_generic(global);
#endif
    return static_cast<unsigned char *>(const_cast<void *>(found));
}

// Returns the address of a run's values.
__device__ __forceinline__ unsigned char *values_of(const gc_codec &codec, const void *const (&values)[MOST_VALUES],
                                                    unsigned run) {
    return in_global_memory(codec.addresses ? codec.addresses[run] : values[run % MOST_VALUES]);
}

__device__ __forceinline__ float factor(const float *m) {
    return m ? *m : 1;
}

// ---- Chunks

// Destination of chunks: consecutive memory; or the buffer of each chunk's rank; or one chunk to the buffers of all
// ranks. A rank whose barrier has failed writes to no buffer, because the other ranks may not have noticed yet.
struct Chunks {
    unsigned char *dst, *first;
    gc_peer_slot slot;
    unsigned copies;
    bool all;                 // true: all ranks get the same chunk

    // `chunk`: the chunk that `first` is for. `half`: the half of the codec. Issues all its loads at once.
    __device__ __forceinline__ Chunks(const gc_codec &codec, unsigned half, unsigned char *to, const gc_peer_slot &by,
                                      unsigned chunk)
        : dst(to), first(to), slot(by), copies(1), all(half == SERVER) {
        if (!slot.peers) return;
        const unsigned world = slot.peers->world;
        copies = slot.peers->broken ? 0 : all ? world : 1;
        first = base(codec, chunk, 0);
    }
    // Returns the address from which offsets of chunk `chunk` count in a copy. If each rank gets another chunk, offsets
    // count as if all chunks lay in the buffer of this chunk's rank.
    __device__ __forceinline__ unsigned char *base(const gc_codec &codec, unsigned chunk, unsigned copy) const {
        if (!slot.peers) return dst;
        return all ? slot.peers->buffers[copy] + slot.at : slot.peers->buffers[chunk] + slot.at - chunk * codec.stride;
    }
};

// ---- Flags

__device__ __forceinline__ void set_flags(const gc_codec &codec, unsigned flags) {
    atomicOr(&codec.control->flags, flags);
    atomicOr(&codec.control->since, flags);
    if (flags & CORRUPT && codec.report) *static_cast<volatile unsigned *>(codec.report) = 1;
}

// ---- The valid state

// Returns the bits of `valid` after the commit of a pending step.
__device__ __forceinline__ unsigned valid_after_commit(const gc_control &control) {
    return control.since & NONFINITE ? control.valid : control.valid ^ control.pending;
}
// Returns the state that a step of this half reads: the valid one after the commit of this half's pending step.
__device__ __forceinline__ unsigned valid_state(const gc_codec &codec) {
    if (codec.policy != TRANSACTIONAL) return 0;
    const gc_control &control = *codec.control;
    const bool commits = control.pending >> codec.half & 1;
    return (commits ? valid_after_commit(control) : control.valid) >> codec.half & 1;
}
__device__ __forceinline__ void commit(gc_control &control, bool skip) {
    if (control.pending == 0) {
        control.since = 0;
        return;
    }
    if (skip || (control.since & NONFINITE)) control.flags |= TAKEN_BACK;
    else control.valid ^= control.pending;
    control.pending = control.since = 0;
}

// Returns true if a chunk holds elements of a segment.
__device__ __forceinline__ bool holds(const gc_codec &codec, unsigned chunk, const gc_run &segment) {
    const u64 begin = chunk * codec.chunk_bytes, end = segment.byte + (segment.elements + 7) / 8;
    return segment.elements != 0 && begin < end && segment.byte < begin + codec.chunk_bytes;
}

#endif
