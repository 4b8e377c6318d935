// What the kernels of strided.cu share: their argument, where a block finds its tile, and words and vectors that lie
// anywhere.
//
// What is written is written in aligned vectors or words, and what is not wholly inside, byte by byte. What is read is
// read at aligned addresses and shifted. That may touch memory between the elements of an operand, but never before its
// first or behind its last.
#ifndef GRADCODEC_STRIDED_CUH
#define GRADCODEC_STRIDED_CUH

#include "tile.cuh"

enum : unsigned { BLOCK = 256, LOG_BLOCK = 8 };

// Division of less than 2^31 by a constant: a multiplication and a shift, exact for every count up to 2^31.
struct gc_division {
    unsigned count, multiplier, shift, reserved;
};
SAME_LAYOUT(gc_division)

struct gc_tile_loop {
    long long element_stride, byte_stride;
    gc_division division;
};
SAME_LAYOUT(gc_tile_loop)

// How the bytes of a transposed matrix lie. TRANSPOSED: those of a row side by side. JOINED: so are the rows, and their
// bits follow each other even within a byte. Other kernels do not look.
enum : unsigned { COLUMNS, TRANSPOSED, JOINED };

// As the host lays it out: Tiles in src/backend/cuda/strided.rs. Strides are in bytes and may be negative. There is a
// row for every round of `rows` and `outer`.
struct gc_tiles {
    const unsigned char *src;           // the first element, and the first byte: one is read, the other written
    unsigned char *dst;
    const unsigned char *begin, *end;   // all that may be read
    u64 elements, bytes;                // of a row
    long long element_stride, byte_stride;
    u64 rows;                           // of the inner loop
    long long row_element_stride, row_byte_stride;
    u64 first_zero, span;               // packing: as in Rule, in the width of an element
    u64 one;                            // unpacking: the bit pattern of 1
    unsigned order, log_width;          // threads along x, as a power of 2
    unsigned mode;                      // how the bytes lie
    unsigned rounds;                    // pieces of work a thread
    unsigned n_outer;
    unsigned burst;                     // unpacking: blocks that read BURST bytes, if they do in turn; 0: they do not
    gc_division across, along;          // tiles along x and y
    gc_tile_loop outer[6];              // outermost first
};
SAME_LAYOUT(gc_tiles)

__device__ __forceinline__ unsigned split(unsigned &number, const gc_division &by) {
    const unsigned quotient = static_cast<unsigned>(static_cast<u64>(number) * by.multiplier >> by.shift);
    const unsigned rest = number - quotient * by.count;
    number = quotient;
    return rest;
}

// A block's tile: its number along x and y, and where its outer rows lie.
struct Place {
    unsigned across, along;
    long long element, byte;
};
__device__ __forceinline__ Place this_place(const gc_tiles &tiles) {
    unsigned block = blockIdx.x;
    const unsigned across = split(block, tiles.across), along = split(block, tiles.along);
    Place place = {across, along, 0, 0};
#pragma unroll 1
    for (unsigned k = tiles.n_outer; k-- > 0;) {
        const long long index = split(block, tiles.outer[k].division);
        place.element += index * tiles.outer[k].element_stride;
        place.byte += index * tiles.outer[k].byte_stride;
    }
    return place;
}

// A thread's piece of the work: its number along x and y, where its block has every 2^log_width-th of `rounds` along x.
struct Spot {
    u64 x, y;
};
__device__ __forceinline__ Spot this_spot(const gc_tiles &tiles, const Place &place) {
    const unsigned log_width = tiles.log_width;
    return {(static_cast<u64>(place.across) * tiles.rounds << log_width) + (threadIdx.x & ((1u << log_width) - 1)),
            (static_cast<u64>(place.along) << (LOG_BLOCK - log_width)) + (threadIdx.x >> log_width)};
}

// How many of `most` pieces from number `first` on there are.
__device__ __forceinline__ unsigned at_most(unsigned most, u64 pieces, u64 first) {
    return first >= pieces ? 0 : pieces - first < most ? static_cast<unsigned>(pieces - first) : most;
}

// ---- Bits in memory

// Stores those bytes of a word that exist, the lowest at `to`: any address.
__device__ __forceinline__ void store_bytes(unsigned char *to, Extent existing, unsigned word) {
    if (existing.has(0, 4) && misalignment(to, 4) == 0) {
        *reinterpret_cast<unsigned *>(to) = word;
        return;
    }
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        if (existing.has(k, 1)) to[k] = static_cast<unsigned char>(word >> 8 * k);
    }
}

__device__ __forceinline__ bool readable(const gc_tiles &tiles, const unsigned char *from, unsigned bytes) {
    return from >= tiles.begin && from + bytes <= tiles.end;
}

// Where 32 bits begin: `shift` bits behind an aligned address.
struct Bits {
    const unsigned char *from;
    unsigned shift;
};
// From number `bit` on behind an address.
__device__ __forceinline__ Bits bits_from(const unsigned char *bits, long long bit) {
    const unsigned char *from = bits + (bit >> 3);
    const unsigned before = misalignment(from, 4);
    return {from - before, before * 8 + (static_cast<unsigned>(bit) & 7)};
}
__device__ __forceinline__ unsigned bits_within(unsigned low, unsigned high, unsigned shift, unsigned order) {
    return __funnelshift_r(in_order(low, order), in_order(high, order), shift);
}
// Them as a word. Bits that may not be read are 0.
__device__ __forceinline__ unsigned load_word(const gc_tiles &tiles, Bits bits) {
    unsigned low = 0, high = 0;
    if (readable(tiles, bits.from, bits.shift ? 8 : 4)) {
        low = reinterpret_cast<const unsigned *>(bits.from)[0];
        if (bits.shift) high = reinterpret_cast<const unsigned *>(bits.from)[1];
    } else {
#pragma unroll 1
        for (unsigned k = 0; k < 8; k++) {
            const unsigned byte = readable(tiles, bits.from + k, 1) ? bits.from[k] : 0;
            (k < 4 ? low : high) |= byte << k % 4 * 8;
        }
    }
    return bits_within(low, high, bits.shift, tiles.order);
}

// Bytes that lie anywhere, as words. Those that may not be read are 0.
template <unsigned N>
__device__ __forceinline__ void load_words(const gc_tiles &tiles, const unsigned char *from, unsigned (&words)[N]) {
    const unsigned beyond = misalignment(from, 4);
    const unsigned *aligned = reinterpret_cast<const unsigned *>(from - beyond);
    if (readable(tiles, from - beyond, 4 * N + (beyond ? 4 : 0))) {
        unsigned loaded[N + 1];
#pragma unroll
        for (unsigned k = 0; k <= N; k++) loaded[k] = load_bits(aligned + (k < N ? k : beyond ? N : 0));
#pragma unroll
        for (unsigned k = 0; k < N; k++) words[k] = __funnelshift_r(loaded[k], loaded[k + 1], beyond * 8);
        return;
    }
#pragma unroll
    for (unsigned k = 0; k < N; k++) words[k] = 0;
#pragma unroll 1
    for (unsigned at = 0; at < 4 * N; at++) {
        const unsigned byte = readable(tiles, from + at, 1) ? from[at] : 0;
#pragma unroll
        for (unsigned k = 0; k < N; k++) words[k] |= at / 4 == k ? byte << at % 4 * 8 : 0;
    }
}

// The first blocks that read a burst's bytes bring the next one's to the L2 cache, as in bits.cu.
__device__ __forceinline__ void prefetch_burst(const gc_tiles &tiles) {
    constexpr unsigned BURST = 4 << 20, BLOCKS = 512, SHARE = BURST / BLOCKS;
    if (threadIdx.x != 0 || tiles.burst == 0) return;
    const unsigned number = blockIdx.x % tiles.burst;
    const unsigned before = (16 - misalignment(tiles.begin, 16)) % 16;
    const u64 at = (blockIdx.x / tiles.burst + 1ull) * BURST + number * SHARE + before;
    if (number >= BLOCKS || tiles.begin + at + SHARE > tiles.end) return;
    prefetch(tiles.begin + at, SHARE);
}

// ---- Vectors of elements

// A rule whose range the host says. Bytes are only ever packed by truth.
template <typename T>
struct Range {
    T first_zero, span;
    __device__ __forceinline__ explicit Range(const gc_tiles &tiles)
        : first_zero(static_cast<T>(tiles.first_zero)), span(static_cast<T>(tiles.span)) {}
    __device__ __forceinline__ bool bit(T x) const { return outside(x, first_zero, span); }
};

// As pack_vector() of device.cuh.
__device__ __forceinline__ unsigned bits_of_vector(uint4 v, Range<unsigned char>) {
    return pack_vector(v, Truth<unsigned char>());
}
__device__ __forceinline__ unsigned bits_of_vector(uint4 v, Range<unsigned short> range) {
    const unsigned first_zero = static_cast<unsigned>(range.first_zero) << 16;
    const unsigned span = static_cast<unsigned>(range.span) << 16;
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
    unsigned bits = 0;
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        bits |= in_register(outside(words[k] << 16, first_zero, span) ? 1u << 2 * k : 0);
        bits |= in_register(outside(words[k], first_zero, span | 0xffff) ? 2u << 2 * k : 0);
    }
    return bits;
}
__device__ __forceinline__ unsigned bits_of_vector(uint4 v, Range<unsigned> range) {
    return in_register(range.bit(v.x) ? 1 : 0) | in_register(range.bit(v.y) ? 2 : 0)
         | in_register(range.bit(v.z) ? 4 : 0) | in_register(range.bit(v.w) ? 8 : 0);
}
__device__ __forceinline__ unsigned bits_of_vector(uint4 v, Range<u64> range) {
    return in_register(range.bit(static_cast<u64>(v.y) << 32 | v.x) ? 1 : 0)
         | in_register(range.bit(static_cast<u64>(v.w) << 32 | v.z) ? 2 : 0);
}

// The same of the elements of a vector in memory that may be read, one by one. For the rare vector at an end.
template <typename T>
__device__ __forceinline__ unsigned bits_one_by_one(const gc_tiles &tiles, const unsigned char *from) {
    const Range<T> range(tiles);
    unsigned bits = 0;
#pragma unroll 1
    for (unsigned k = 0; k < 16 / sizeof(T); k++, from += sizeof(T)) {
        if (readable(tiles, from, sizeof(T)) && range.bit(*reinterpret_cast<const T *>(from))) bits |= 1u << k;
    }
    return bits;
}

// Stores those bytes of a vector that exist, at an aligned address. The vector begins `begin` bytes behind the first of
// `count`.
__device__ __forceinline__ void store_vector(unsigned char *to, long long begin, u64 count, uint4 v) {
    if (begin >= 0 && static_cast<u64>(begin) + 16 <= count) {
        store_vector(reinterpret_cast<uint4 *>(to), v);
        return;
    }
    const Extent existing = extent(begin, 16, count);
#pragma unroll 1
    for (unsigned at = 0; at < 16; at += 4) {
        store_inside(to, at, existing, v.x);
        v = make_uint4(v.y, v.z, v.w, 0);
    }
}

#endif
