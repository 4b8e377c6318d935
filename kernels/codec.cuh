// What the kernels of codecs are given, and where a tile's elements, bits and state lie.
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

// The structs are laid out by the host too: src/codec/cuda/.

struct gc_run {
    u64 elements;
    u64 byte;           // its first among the payload's bits; of a block codec its first *place*: block, or raw element
    u64 base;           // of a worker's run: where it begins in a row of errors; of a server's: elements of the runs before it
    u64 first_tile;
    unsigned tiles, raw;
};
SAME_LAYOUT(gc_run)

struct alignas(16) gc_tile {
    u64 first;          // element of the run
    u64 unit;           // its first among the units of all runs; of a raw one NO_UNIT
    u64 to;             // where its bits begin: in the payload, or in the chunk that is reduced; or which place of the chunk
    u64 byte;           // its first among the payload's bits, or places
    unsigned run, count;  // elements; a tile without any is there so that its run ends
    unsigned left;      // bytes of bits, or places, to the end of the chunk, if they fit 32 bits
    unsigned chunk;
};
SAME_LAYOUT(gc_tile)

// What is known on the device alone.
struct gc_control {
    unsigned flags;     // since they were taken
    unsigned since;     // since the last commit
    unsigned valid;     // bit WORKER, bit SERVER: which of two states is valid
    unsigned pending;   // bit WORKER, bit SERVER: a step in the other one
    unsigned found;     // flags of the launch that runs
    unsigned accepted;  // by gc_codec_check_state
    unsigned broken;    // a rank did not come to an exchange: what was received counts as NaN
    unsigned reserved;
};
SAME_LAYOUT(gc_control)

struct gc_codec {
    unsigned char *state[2];  // the same one twice where there is one
    gc_control *control;
    double *partials;         // a tile
    unsigned *counter;        // of the runs that have their scale, while they get it
    const gc_tile *tiles;
    const gc_run *runs;       // what is encoded or reduced: a run for each segment, also an empty one
    const gc_run *segments;
    float *scales;            // of the last encode
    unsigned *report;         // in memory of the host: becomes 1 when something is corrupt; or NULL
    const void **addresses;   // of the segments' values, where there are more than MOST_VALUES
    u64 bytes, chunk_bytes;   // of bits; of a block codec blocks
    u64 head, stride;
    u64 scales_at, units_at;  // of these runs in the state
    unsigned n_segments, n_chunks, chunk, chunks;  // those that are written: `chunks` from `chunk` on
    unsigned kind, rule, policy, results, half, reduction;
    float beta;
    unsigned error;           // bytes of an error's element, 0: none
    unsigned ranks, reserved; // how many ranks' values a payload is the sum of
    unsigned header[HEADER_WORDS];
    gc_run only;              // where there is one segment: its run
    u64 reciprocal;           // floor((2^64 - 1) / chunk_bytes), or 0
    // Of a block codec: raw elements, those of a chunk, that reciprocal; and where codes and they begin in a chunk.
    u64 raws, chunk_raws, raw_reciprocal, codes_at, raws_at;
};
SAME_LAYOUT(gc_codec)

struct gc_encode {
    gc_codec codec;
    const float *m_g, *m_e;
    unsigned char *dst;       // a payload; of a shard a chunk
    gc_way way;               // or straight to the ranks that get it
    const void *values[MOST_VALUES];
};
SAME_LAYOUT(gc_encode)
struct gc_finish {
    gc_codec codec;
    unsigned char *dst;       // the first of the chunks that are written
    gc_way way;
    unsigned steps, reserved; // of the barrier behind it; 0: there is none
};
SAME_LAYOUT(gc_finish)
struct gc_reduce {
    gc_codec codec;
    const unsigned char *chunks;
    unsigned char *dst;       // a chunk; of gc_onebit_mean the shard
    gc_way way;
    u64 payloads, apart;      // bytes from payload to payload
    unsigned shard, reserved; // gc_blocks_reduce: whether dst is the shard
};
SAME_LAYOUT(gc_reduce)
struct gc_decode {
    gc_codec codec;
    const unsigned char *payload;
    const float *factor;
    float divisor;
    unsigned dtype;
    u64 tiles;                // the blocks behind them look at chunks without elements
    u64 first_empty;          // the first chunk without any
    void *values[MOST_VALUES];
};
SAME_LAYOUT(gc_decode)

// ---- Tiles
//
// What a block needs before its first loads is known without a load where there is one segment, and in one table entry
// where there are several: each load that another one waits for costs a block about a tenth of its time.

__device__ __forceinline__ gc_run run_of(const gc_codec &codec, unsigned number) {
    return codec.n_segments == 1 ? codec.only : codec.runs[number];
}
__device__ __forceinline__ gc_run segment_of(const gc_codec &codec, unsigned number) {
    if (codec.n_segments != 1) return codec.segments[number];
    gc_run only = codec.only;
    // What is reduced is a part of the segment, which the header counts.
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

// How many of a tile's elements lie in the unit that begins at `at`.
__device__ __forceinline__ unsigned elements_of_unit(const gc_tile &tile, unsigned at) {
    return tile.count <= at ? 0 : tile.count - at < UNIT ? tile.count - at : UNIT;
}

// A chunk's bytes of bits, as far as a tile needs them.
__device__ __forceinline__ unsigned chunk_bytes_of(const gc_codec &codec) {
    return codec.chunk_bytes < ~0u ? static_cast<unsigned>(codec.chunk_bytes) : ~0u;
}

// How many chunks behind the tile's first one byte number `at` of its bits lies, and where.
__device__ __forceinline__ unsigned chunks_to_byte(const gc_codec &codec, const gc_tile &tile, unsigned at) {
    return at < tile.left ? 0 : 1 + (at - tile.left) / chunk_bytes_of(codec);
}
__device__ __forceinline__ u64 place_of_byte(const gc_codec &codec, const gc_tile &tile, unsigned at) {
    return tile.to + at + chunks_to_byte(codec, tile, at) * (codec.stride - codec.chunk_bytes);
}

// An address in global memory, which the compiler does not find out of one that it has loaded.
__device__ __forceinline__ unsigned char *in_global_memory(const void *found) {
#ifdef __CUDA_ARCH__
    u64 global;
    asm("cvta.to.global.u64 %0, %1;" : "=l"(global) : "l"(found));
    found = __cvta_global_to_generic(global);
#endif
    return static_cast<unsigned char *>(const_cast<void *>(found));
}

// The address of a run's values.
__device__ __forceinline__ unsigned char *values_of(const gc_codec &codec, const void *const (&values)[MOST_VALUES],
                                                    unsigned run) {
    return in_global_memory(codec.addresses ? codec.addresses[run] : values[run % MOST_VALUES]);
}

__device__ __forceinline__ float factor(const float *m) {
    return m ? *m : 1;
}

// ---- Chunks

// Where chunks are written: one behind the other; or each to the buffer of the rank that it is for; or one to those of
// all ranks. A rank that has given up writes to none, for the others do not know it yet.
struct Chunks {
    unsigned char *dst, *first;
    gc_way way;
    unsigned copies;
    bool all;                 // get the same

    // `chunk`: the one that `first` is for, `half`: of the codec. Loads what it needs at once.
    __device__ __forceinline__ Chunks(const gc_codec &codec, unsigned half, unsigned char *to, const gc_way &by,
                                      unsigned chunk)
        : dst(to), first(to), way(by), copies(1), all(half == SERVER) {
        if (!way.peers) return;
        const unsigned world = way.peers->world;
        copies = way.peers->broken ? 0 : all ? world : 1;
        first = base(codec, chunk, 0);
    }
    // What a place in a chunk is counted from, in a copy: for what is not sent to all, as if all chunks lay where this
    // one does.
    __device__ __forceinline__ unsigned char *base(const gc_codec &codec, unsigned chunk, unsigned copy) const {
        if (!way.peers) return dst;
        return all ? way.peers->buffers[copy] + way.at : way.peers->buffers[chunk] + way.at - chunk * codec.stride;
    }
};

// ---- Flags

__device__ __forceinline__ void set_flags(const gc_codec &codec, unsigned flags) {
    atomicOr(&codec.control->flags, flags);
    atomicOr(&codec.control->since, flags);
    if (flags & CORRUPT && codec.report) *static_cast<volatile unsigned *>(codec.report) = 1;
}

// ---- Which state is valid

// Which of two states is valid once a pending step has been committed.
__device__ __forceinline__ unsigned valid_after_commit(const gc_control &control) {
    return control.since & NONFINITE ? control.valid : control.valid ^ control.pending;
}
// The one that a step of this half reads: a step that is pending there is committed first.
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

// Whether a chunk holds elements of a segment.
__device__ __forceinline__ bool holds(const gc_codec &codec, unsigned chunk, const gc_run &segment) {
    const u64 begin = chunk * codec.chunk_bytes, end = segment.byte + (segment.elements + 7) / 8;
    return segment.elements != 0 && begin < end && segment.byte < begin + codec.chunk_bytes;
}

#endif
