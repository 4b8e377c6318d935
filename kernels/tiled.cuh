// Packs and unpacks bits of any layout that the kernels for contiguous memory do not take.
//
// Elements lie in *lines*, each at one stride, and each byte of bits is packed with the line that has its first bit.
// Lines either have bytes of their own, or are *joined*: the bits of a line follow the bits of the line before.
//
//     line 0      e e e e e e e e  e e e e                line 1     e e e e e e e e  e e e e
//     bytes       |   0    |   1    | its own             bytes      |   0    |   1    |
//     joined      |   0    |   1             ..            .. 1      |   2    |
//
// A thread block takes a *tile*: some lines, some bytes of each. The tile's bytes lie in shared memory between two
// steps, so that each step can follow the order of its own memory. When packing, neighbouring lanes first read
// neighbouring elements, of neighbouring lines (`across`) or of the same line. Then they write neighbouring bytes, of
// neighbouring lines (`bytes_across`) or of the same line. Unpacking takes the two steps in reverse order.
#ifndef GRADCODEC_TILED_CUH
#define GRADCODEC_TILED_CUH

#include "divisor.cuh"
#include "tile.cuh"

// Most bytes and lines of a tile, and bytes of padding after each line, which keep lanes in different banks.
enum : unsigned { MOST_TILE_BYTES = 4096, MOST_TILE_LINES = 256, PADDING = 4 };

struct gc_line_loop {
    gc_divisor count;
    long long element_stride, byte_stride;
};
SAME_LAYOUT(gc_line_loop)
struct gc_byte_loop {
    gc_divisor count;
    long long stride;
};
SAME_LAYOUT(gc_byte_loop)

// Argument of the kernels; the host declares it as Strided in src/bits/cuda/tiled.rs. Strides are in bytes and may be
// negative or 0. Loops are nested, outermost first; the product of their counts is `lines`, or the bytes of a line.
struct gc_strided_plan {
    const unsigned char *src;       // first element and first byte; packing reads the elements, unpacking the bytes
    unsigned char *dst;
    u64 lines, elements;            // number of lines; elements of a line
    u64 bytes;                      // bytes of a line; if joined, of all lines
    u64 first_byte;                 // number of bytes before them that are skipped
    long long element_stride;       // stride of the elements of a line
    long long byte_stride;          // stride of the bytes, if there are no loops over bytes
    u64 first_zero, span;           // packing: the range of Rule, in the width of an element
    u64 one;                        // unpacking: the bit pattern of 1
    gc_divisor tiles;               // tiles in the direction of neighbouring thread blocks, along or across lines
    unsigned size, order;           // bytes of an element: 1, 2, 4 or 8
    unsigned aligned;               // 1: every element's address is a multiple of its size
    unsigned joined;
    unsigned log_lines, log_bytes;  // lines and bytes of a tile, as powers of 2
    unsigned across, bytes_across;
    unsigned words;                 // 1: 1-byte elements, of which four lines make an aligned word
    unsigned reserved;
    unsigned n_line_loops, n_byte_loops;
    gc_line_loop line_loops[62];
    gc_byte_loop byte_loops[62];
};
SAME_LAYOUT(gc_strided_plan)

// Offsets of a line's first element and first byte. Joined lines have no bytes of their own.
struct Line {
    long long element, byte;
};
__device__ __forceinline__ Line line_at(const gc_strided_plan &plan, u64 number) {
    Line line = {0, 0};
#pragma unroll 1
    for (unsigned k = plan.n_line_loops; k-- > 0 && number != 0;) {
        // The outermost loop takes the rest.
        u64 index = number;
        if (k > 0) index = split(number, plan.line_loops[k].count);
        line.element += static_cast<long long>(index) * plan.line_loops[k].element_stride;
        line.byte += static_cast<long long>(index) * plan.line_loops[k].byte_stride;
    }
    return line;
}

__device__ __forceinline__ long long byte_at(const gc_strided_plan &plan, u64 number) {
    number += plan.first_byte;
    if (plan.n_byte_loops == 0) return static_cast<long long>(number) * plan.byte_stride;
    long long at = 0;
#pragma unroll 1
    for (unsigned k = plan.n_byte_loops; k-- > 0 && number != 0;) {
        u64 index = number;
        if (k > 0) index = split(number, plan.byte_loops[k].count);
        at += static_cast<long long>(index) * plan.byte_loops[k].stride;
    }
    return at;
}

// Line of a tile, as far as its own bytes reach.
struct TileLine {
    long long element, byte;  // offsets of the first element that begins a byte, and of byte 0 of the line
    u64 count;                // elements from that one on
    u64 first, bytes;         // number of its first byte; number of its bytes
};

struct BitTile {
    TileLine lines[MOST_TILE_LINES];
    unsigned char bytes[MOST_TILE_BYTES + PADDING * MOST_TILE_LINES];
};

// Place of a thread block's tile: its first line, and its first byte of each line.
struct Corner {
    u64 line, byte;
};
__device__ __forceinline__ Corner corner(const gc_strided_plan &plan) {
    u64 slow = blockIdx.x;
    const u64 fast = split(slow, plan.tiles);
    return {(plan.across ? fast : slow) << plan.log_lines, (plan.across ? slow : fast) << plan.log_bytes};
}

// Fills in the lines of a tile. Lines after the last one have no bytes.
__device__ __forceinline__ void find_lines(const gc_strided_plan &plan, bool packs, u64 first, BitTile &tile) {
    for (unsigned k = threadIdx.x; k < 1u << plan.log_lines; k += THREADS) {
        const u64 number = first + k;
        TileLine line = {0, 0, 0, 0, 0};
        if (number < plan.lines) {
            const Line begin = line_at(plan, number);
            // Joined: the elements before the first whole byte are packed with the line before.
            const u64 bit = plan.joined ? number * plan.elements : 0, skipped = (8 - bit % 8) % 8;
            line.first = (bit + 7) / 8;
            const u64 end = plan.joined ? (bit + plan.elements + 7) / 8 : packs ? plan.bytes : (plan.elements + 7) / 8;
            line.bytes = end - line.first;
            line.count = plan.elements > skipped ? plan.elements - skipped : 0;
            line.element = begin.element + static_cast<long long>(skipped) * plan.element_stride;
            line.byte = begin.byte;
        }
        tile.lines[k] = line;
    }
}

// Place of a byte in a tile. place_of() returns the place of byte number k, counted across lines or along them.
struct Place {
    unsigned line, byte;
};
__device__ __forceinline__ Place place_of(const gc_strided_plan &plan, unsigned k, bool across) {
    if (across) return {k & ((1u << plan.log_lines) - 1), k >> plan.log_lines};
    return {k >> plan.log_bytes, k & ((1u << plan.log_bytes) - 1)};
}
__device__ __forceinline__ unsigned char &byte_of(const gc_strided_plan &plan, BitTile &tile, Place at) {
    return tile.bytes[at.line * ((1u << plan.log_bytes) + PADDING) + at.byte];
}

// ---- Elements: load, bit, store

template <typename T>
struct Aligned {
    typedef T element;
    T first_zero, span, one;
    __device__ __forceinline__ explicit Aligned(const gc_strided_plan &plan)
        : first_zero(static_cast<T>(plan.first_zero)), span(static_cast<T>(plan.span)), one(static_cast<T>(plan.one)) {}
    __device__ __forceinline__ T load(const unsigned char *from) const { return *reinterpret_cast<const T *>(from); }
    __device__ __forceinline__ bool bit(T x) const { return outside(x, first_zero, span); }
    __device__ __forceinline__ void store(unsigned char *to, bool bit) const {
        *reinterpret_cast<T *>(to) = bit ? one : T(0);
    }
};

// Elements at any address, accessed byte by byte.
struct Anywhere {
    typedef u64 element;
    u64 first_zero, span, one;
    unsigned size;
    __device__ __forceinline__ explicit Anywhere(const gc_strided_plan &plan)
        : first_zero(plan.first_zero), span(plan.span), one(plan.one), size(plan.size) {}
    __device__ __forceinline__ u64 load(const unsigned char *from) const {
        u64 x = 0;
#pragma unroll 1
        for (unsigned k = 0; k < size; k++) x |= static_cast<u64>(from[k]) << 8 * k;
        return x;
    }
    __device__ __forceinline__ bool bit(u64 x) const {
        // The mask gives an integer of the element's width: values below first_zero wrap around to above the span.
        return ((x - first_zero) & (~0ull >> (64 - 8 * size))) > span;
    }
    __device__ __forceinline__ void store(unsigned char *to, bool bit) const {
#pragma unroll 1
        for (unsigned k = 0; k < size; k++) to[k] = bit ? static_cast<unsigned char>(one >> 8 * k) : 0;
    }
};

// Calls use(bit, offset) for each element of a byte that has fewer than 8 elements of its line: first for the line's
// last `left` elements, from offset `at` on, then, if lines are joined, for elements of the next lines.
template <typename Use>
__device__ __forceinline__ void for_each_element(const gc_strided_plan &plan, u64 line, long long at, u64 left,
                                                 Use use) {
#pragma unroll 1
    for (unsigned i = 0; i < 8; i++, left--, at += plan.element_stride) {
        if (left == 0) {
            if (!plan.joined || ++line >= plan.lines) return;
            at = line_at(plan, line).element, left = plan.elements;
        }
        use(i, at);
    }
}

// ---- Packing. Reads sizeof(T) and writes 1/8 byte per element.

template <typename E>
__device__ __forceinline__ unsigned pack_ragged(const gc_strided_plan &plan, u64 line, long long at, u64 left,
                                                const E &elements) {
    unsigned bits = 0;
    for_each_element(plan, line, at, left, [&](unsigned i, long long offset) {
        bits |= elements.bit(elements.load(plan.src + offset)) ? 1u << i : 0;
    });
    return bits;
}

// Packs the bits of a tile to shared memory.
template <typename E>
__device__ __forceinline__ void pack_tile_of(const gc_strided_plan &plan, Corner corner, BitTile &tile,
                                             const E &elements) {
    typedef typename E::element T;
    const unsigned all = 1u << (plan.log_lines + plan.log_bytes), lane = threadIdx.x % WARP;
    const long long stride = plan.element_stride;
    if (plan.across || plan.log_bytes < 2) {
        // Each thread packs a byte. All its loads are issued before the first is used.
#pragma unroll 1
        for (unsigned k = threadIdx.x; k < all; k += THREADS) {
            const Place place = place_of(plan, k, plan.across);
            const TileLine &line = tile.lines[place.line];
            const u64 byte = corner.byte + place.byte;
            if (byte >= line.bytes) continue;
            const long long at = line.element + static_cast<long long>(8 * byte) * stride;
            unsigned bits = 0;
            if (8 * byte + 8 <= line.count) {
                const unsigned char *from = plan.src + at;
                T x[8];
#pragma unroll
                for (unsigned i = 0; i < 8; i++, from += stride) x[i] = elements.load(from);
#pragma unroll
                for (unsigned i = 0; i < 8; i++) bits |= elements.bit(x[i]) ? 1u << i : 0;
            } else {
                const u64 left = line.count > 8 * byte ? line.count - 8 * byte : 0;
                bits = pack_ragged(plan, corner.line + place.line, at, left, elements);
            }
            byte_of(plan, tile, place) = static_cast<unsigned char>(in_order(bits, plan.order));
        }
        return;
    }
    // Each warp packs four bytes of a line, an element per lane, with TOGETHER such groups in flight.
    constexpr unsigned WARPS = THREADS / WARP, TOGETHER = 4;
#pragma unroll 1
    for (unsigned k = threadIdx.x / WARP * TOGETHER; k < all / 4; k += WARPS * TOGETHER) {
        T x[TOGETHER];
        bool is_there[TOGETHER];
#pragma unroll
        for (unsigned u = 0; u < TOGETHER; u++) {
            const Place place = place_of(plan, (k + u) * 4 < all ? (k + u) * 4 : 0, false);
            const TileLine &line = tile.lines[place.line];
            const u64 number = 8 * (corner.byte + place.byte) + lane;
            is_there[u] = number < line.count;
            x[u] = 0;
            if (is_there[u]) x[u] = elements.load(plan.src + line.element + static_cast<long long>(number) * stride);
        }
#pragma unroll
        for (unsigned u = 0; u < TOGETHER; u++) {
            const unsigned word = pack_warp(is_there[u] && elements.bit(from_memory(x[u])));
            if (lane >= 4 || (k + u) * 4 >= all) continue;
            Place place = place_of(plan, (k + u) * 4, false);
            place.byte += lane;
            const TileLine &line = tile.lines[place.line];
            const u64 byte = corner.byte + place.byte;
            if (byte >= line.bytes) continue;
            unsigned bits = word >> 8 * lane;
            if (plan.joined && 8 * byte + 8 > line.count) {
                const long long at = line.element + static_cast<long long>(8 * byte) * stride;
                const u64 left = line.count > 8 * byte ? line.count - 8 * byte : 0;
                bits = pack_ragged(plan, corner.line + place.line, at, left, elements);
            }
            byte_of(plan, tile, place) = static_cast<unsigned char>(in_order(bits & 0xff, plan.order));
        }
    }
}

// Packs 1-byte elements; a bit is 1 if the element is not 0. Each thread packs a byte of four neighbouring lines.
__device__ __forceinline__ void pack_tile_of_words(const gc_strided_plan &plan, Corner corner, BitTile &tile) {
    const unsigned all = 1u << (plan.log_lines + plan.log_bytes);
    const long long stride = plan.element_stride;
#pragma unroll 1
    for (unsigned k = 4 * threadIdx.x; k < all; k += 4 * THREADS) {
        const Place place = place_of(plan, k, true);
        const TileLine &line = tile.lines[place.line];
        const u64 byte = corner.byte + place.byte;
        if (byte >= line.bytes) continue;
        const unsigned char *from = plan.src + line.element + static_cast<long long>(8 * byte) * stride;
        unsigned x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (8 * byte + 8 <= line.count) {
#pragma unroll
            for (unsigned i = 0; i < 8; i++, from += stride) x[i] = *reinterpret_cast<const unsigned *>(from);
        } else {
#pragma unroll
            for (unsigned i = 0; i < 7; i++, from += stride) {
                if (8 * byte + i < line.count) x[i] = *reinterpret_cast<const unsigned *>(from);
            }
        }
        unsigned bits = 0;
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            // This sets the top bit of each byte that is not 0, as in truth_of_bytes().
            const unsigned top = (((x[i] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x[i]) & 0x80808080u;
            bits |= top >> (7 - i);
        }
        bits = in_order(bits, plan.order);
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            byte_of(plan, tile, {place.line + i, place.byte}) = static_cast<unsigned char>(bits >> 8 * i);
        }
    }
}

__device__ __forceinline__ void pack_any(const gc_strided_plan &plan) {
    __shared__ BitTile tile;
    const Corner at = corner(plan);
    find_lines(plan, true, at.line, tile);
    __syncthreads();
    if (plan.words) {
        pack_tile_of_words(plan, at, tile);
    } else if (!plan.aligned) {
        pack_tile_of(plan, at, tile, Anywhere(plan));
    } else if (plan.size == 1) {
        pack_tile_of(plan, at, tile, Aligned<unsigned char>(plan));
    } else if (plan.size == 2) {
        pack_tile_of(plan, at, tile, Aligned<unsigned short>(plan));
    } else if (plan.size == 4) {
        pack_tile_of(plan, at, tile, Aligned<unsigned>(plan));
    } else {
        pack_tile_of(plan, at, tile, Aligned<u64>(plan));
    }
    __syncthreads();
#pragma unroll 4
    for (unsigned k = threadIdx.x; k < 1u << (plan.log_lines + plan.log_bytes); k += THREADS) {
        const Place place = place_of(plan, k, plan.bytes_across);
        const TileLine &line = tile.lines[place.line];
        if (at.byte + place.byte >= line.bytes) continue;
        plan.dst[line.byte + byte_at(plan, line.first + at.byte + place.byte)] = byte_of(plan, tile, place);
    }
}

// ---- Unpacking. Reads 1/8 and writes sizeof(T) bytes per element.

template <typename E>
__device__ __forceinline__ void unpack_ragged(const gc_strided_plan &plan, u64 line, long long at, u64 left,
                                              unsigned bits, const E &elements) {
    for_each_element(plan, line, at, left, [&](unsigned i, long long offset) {
        elements.store(plan.dst + offset, bits >> i & 1);
    });
}

// Unpacks the elements of a tile from bits in shared memory.
template <typename E>
__device__ __forceinline__ void unpack_tile_of(const gc_strided_plan &plan, Corner corner, BitTile &tile,
                                               const E &elements) {
    const unsigned all = 1u << (plan.log_lines + plan.log_bytes), lane = threadIdx.x % WARP;
    const long long stride = plan.element_stride;
    // Each thread unpacks a byte; if elements are neighbours along a line, each warp four bytes, an element per lane.
    const bool by_bytes = plan.across || plan.log_bytes < 2;
    const unsigned first = by_bytes ? threadIdx.x : threadIdx.x / WARP * 4;
#pragma unroll 1
    for (unsigned k = first; k < all; k += by_bytes ? THREADS : THREADS / WARP * 4) {
        Place place = place_of(plan, k, plan.across);
        const TileLine &line = tile.lines[place.line];
        if (!by_bytes) place.byte += lane / 8;
        const u64 byte = corner.byte + place.byte;
        if (byte >= line.bytes) continue;
        const unsigned bits = byte_of(plan, tile, place);
        const long long at = line.element + static_cast<long long>(8 * byte) * stride;
        if (8 * byte + 8 > line.count) {
            const u64 left = line.count > 8 * byte ? line.count - 8 * byte : 0;
            if (by_bytes || lane % 8 == 0) unpack_ragged(plan, corner.line + place.line, at, left, bits, elements);
        } else if (by_bytes) {
            unsigned char *to = plan.dst + at;
#pragma unroll
            for (unsigned i = 0; i < 8; i++, to += stride) elements.store(to, bits >> i & 1);
        } else {
            elements.store(plan.dst + at + static_cast<long long>(lane % 8) * stride, bits >> lane % 8 & 1);
        }
    }
}

// Unpacks 1-byte elements. Each thread unpacks a byte of four neighbouring lines.
__device__ __forceinline__ void unpack_tile_of_words(const gc_strided_plan &plan, Corner corner, BitTile &tile) {
    const unsigned all = 1u << (plan.log_lines + plan.log_bytes), one = static_cast<unsigned char>(plan.one);
    const long long stride = plan.element_stride;
#pragma unroll 1
    for (unsigned k = 4 * threadIdx.x; k < all; k += 4 * THREADS) {
        const Place place = place_of(plan, k, true);
        const TileLine &line = tile.lines[place.line];
        const u64 byte = corner.byte + place.byte;
        if (byte >= line.bytes) continue;
        unsigned bits = 0;
#pragma unroll
        for (unsigned i = 0; i < 4; i++) bits |= byte_of(plan, tile, {place.line + i, place.byte}) << 8 * i;
        unsigned char *to = plan.dst + line.element + static_cast<long long>(8 * byte) * stride;
#pragma unroll
        for (unsigned i = 0; i < 8; i++, to += stride) {
            if (8 * byte + i < line.count) *reinterpret_cast<unsigned *>(to) = (bits >> i & 0x01010101u) * one;
        }
    }
}

__device__ __forceinline__ void unpack_any(const gc_strided_plan &plan) {
    __shared__ BitTile tile;
    const Corner at = corner(plan);
    find_lines(plan, false, at.line, tile);
    __syncthreads();
#pragma unroll 4
    for (unsigned k = threadIdx.x; k < 1u << (plan.log_lines + plan.log_bytes); k += THREADS) {
        const Place place = place_of(plan, k, plan.bytes_across);
        const TileLine &line = tile.lines[place.line];
        const u64 number = line.first + at.byte + place.byte;
        // Bytes after the last one count as 0.
        unsigned bits = 0;
        const bool is_there = at.byte + place.byte < line.bytes && number < plan.bytes;
        if (is_there) bits = plan.src[line.byte + byte_at(plan, number)];
        byte_of(plan, tile, place) = static_cast<unsigned char>(in_order(bits, plan.order));
    }
    __syncthreads();
    if (plan.words) {
        unpack_tile_of_words(plan, at, tile);
    } else if (!plan.aligned) {
        unpack_tile_of(plan, at, tile, Anywhere(plan));
    } else if (plan.size == 1) {
        unpack_tile_of(plan, at, tile, Aligned<unsigned char>(plan));
    } else if (plan.size == 2) {
        unpack_tile_of(plan, at, tile, Aligned<unsigned short>(plan));
    } else if (plan.size == 4) {
        unpack_tile_of(plan, at, tile, Aligned<unsigned>(plan));
    } else {
        unpack_tile_of(plan, at, tile, Aligned<u64>(plan));
    }
}

#endif
