// Packing and unpacking bits at any strides, for the library alone: whatever has no class in strided.cu.
//
// Elements lie in *lines*: at one stride within a line, while lines may lie anywhere. The bits of a line begin with a
// byte of its own, or lines are *joined*: then the bits of each follow those of the line before, even within a byte.
//
//     elements    line 0                line 1                line 2
//                 |===|===|===|===|=|   |===|===|===|===|=|   |===|=== ...
//     bytes       |   |   |   |   |                              each line its own: the last is not full
//     bytes       |   |   |   |   |     ..|   |   |   |   |      joined: the last has elements of two lines
//
// A thread has a *piece* of a line, which it packs or unpacks alone: PIECE bytes, or one where there is little to do.
// A byte of joined lines is packed with the line that has its first bit.
#ifndef GRADCODEC_WALK_CUH
#define GRADCODEC_WALK_CUH

#include "divisor.cuh"
#include "tile.cuh"

enum : unsigned { PIECE = 4 };

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

// As the host lays it out: Strided in src/backend/cuda/walk.rs. Strides are in bytes and may be negative or 0. Loops
// are nested, outermost first; the product of their counts is `lines`, or the bytes of a row of bytes.
struct gc_strided_plan {
    const unsigned char *src;       // the first element, and the first byte: one is read, the other written
    unsigned char *dst;
    u64 lines, elements;            // elements: of a line
    u64 bytes;                      // of a line; joined: of all lines
    u64 first_byte;                 // how many bytes before them are not looked at
    long long element_stride;       // within a line
    long long byte_stride;          // where there are no loops over bytes
    u64 first_zero, span;           // packing: as in Rule, in the width of an element
    u64 one;                        // unpacking: the bit pattern of 1
    // Neighbouring threads should touch neighbouring memory. They have `width` lines side by side, which are `between`
    // lines apart, then the next of `pieces` pieces of those, and then the lines between.
    gc_divisor width, pieces, between;
    unsigned size, order;           // bytes of an element: 1, 2, 4 or 8
    unsigned aligned;               // 1: every element's address is a multiple of its size
    unsigned joined;
    unsigned piece;                 // bytes of a piece, 1 or PIECE
    unsigned boundary;              // what is written of a piece begins at a multiple of so many bytes
    unsigned n_line_loops, n_byte_loops;
    gc_line_loop line_loops[62];
    gc_byte_loop byte_loops[62];
};
SAME_LAYOUT(gc_strided_plan)

// Where a line begins. Joined lines have no bytes of their own.
struct Line {
    long long element, byte;
};
__device__ __forceinline__ Line line_at(const gc_strided_plan &plan, u64 number) {
    Line line = {0, 0};
#pragma unroll 1
    for (unsigned k = plan.n_line_loops; k-- > 0 && number != 0;) {
        // What is left is all the outermost loop's.
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

// This thread's piece.
struct Piece {
    u64 line, number;
};
__device__ __forceinline__ Piece this_piece(const gc_strided_plan &plan) {
    u64 rest = thread_number();
    const u64 across = plan.width.by > 1 ? split(rest, plan.width) : 0;
    const u64 number = split(rest, plan.pieces);
    const u64 between = plan.between.by > 1 ? split(rest, plan.between) : 0;
    return {(rest * plan.width.by + across) * plan.between.by + between, number};
}

// ---- Elements: how one is loaded, its bit, and how one is stored

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

// Byte by byte.
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
        // As an integer of its own width: what lies below first_zero wraps around to above the span.
        return ((x - first_zero) & (~0ull >> (64 - 8 * size))) > span;
    }
    __device__ __forceinline__ void store(unsigned char *to, bool bit) const {
#pragma unroll 1
        for (unsigned k = 0; k < size; k++) to[k] = bit ? static_cast<unsigned char>(one >> 8 * k) : 0;
    }
};

// How far beyond a boundary an address lies: misalignment() of a power of 2 that the compiler does not know.
__device__ __forceinline__ unsigned beyond(const void *address, unsigned boundary) {
    return static_cast<unsigned>(reinterpret_cast<u64>(address)) & (boundary - 1);
}

// ---- Packing. Reads sizeof(T), writes 1/8 byte an element.

// The bits of the next `count` elements of a line, all 8 or fewer. All loads are under way before the first is used.
template <bool ALL, typename T>
__device__ __forceinline__ unsigned pack_next(const Aligned<T> &elements, const unsigned char *from, long long stride,
                                              unsigned count) {
    T x[8];
#pragma unroll
    for (unsigned i = 0; i < 8; i++, from += stride) {
        x[i] = elements.first_zero;
        if (ALL || i < count) x[i] = elements.load(from);
    }
    unsigned bits = 0;
#pragma unroll
    for (unsigned i = 0; i < 8; i++) bits |= elements.bit(ALL ? x[i] : from_memory(x[i])) ? 1u << i : 0;
    return bits;
}
// The next `bytes` whole bytes of a line as a word, or, if that is 0, its next `count` elements.
template <typename T>
__device__ __forceinline__ unsigned pack_run(const gc_strided_plan &plan, const unsigned char *from, unsigned bytes,
                                             unsigned count) {
    const Aligned<T> elements(plan);
    const long long stride = plan.element_stride;
    if (bytes == 0) return pack_next<false>(elements, from, stride, count);
    unsigned word = 0;
#pragma unroll 1
    for (unsigned k = 0; k < bytes; k++, from += 8 * stride) {
        word |= pack_next<true>(elements, from, stride, 8) << 8 * k;
    }
    return word;
}
__device__ __forceinline__ unsigned pack_run(const gc_strided_plan &plan, const unsigned char *from, unsigned bytes,
                                             unsigned count) {
    if (plan.aligned) {
        switch (plan.size) {
        case 1: return pack_run<unsigned char>(plan, from, bytes, count);
        case 2: return pack_run<unsigned short>(plan, from, bytes, count);
        case 4: return pack_run<unsigned>(plan, from, bytes, count);
        default: return pack_run<u64>(plan, from, bytes, count);
        }
    }
    const Anywhere elements(plan);
    unsigned word = 0;
    if (bytes != 0) count = 8 * bytes;
#pragma unroll 1
    for (unsigned i = 0; i < count; i++, from += plan.element_stride) {
        word |= unsigned(elements.bit(elements.load(from))) << i;
    }
    return word;
}

__device__ __forceinline__ void pack_walk(const gc_strided_plan &plan) {
    const Piece piece = this_piece(plan);
    if (piece.line >= plan.lines) return;
    const u64 first_bit = plan.joined ? piece.line * plan.elements : 0;
    const u64 begin = (first_bit + 7) / 8, end = plan.joined ? (first_bit + plan.elements + 7) / 8 : plan.bytes;
    const Line line = line_at(plan, piece.line);
    unsigned char *to = plan.dst + line.byte;
    // A piece begins at the boundary before, but for the first of a line. Bytes side by side alone have boundaries.
    const unsigned back = plan.boundary > 1 ? beyond(to + begin + plan.first_byte, plan.boundary) : 0;
    const u64 at = begin + piece.number * plan.piece, first = piece.number == 0 ? at : at - back;
    const u64 behind = at - back + plan.piece, last = behind < end ? behind : end;
    if (first >= last) return;
    const unsigned count = static_cast<unsigned>(last - first);

    u64 number = first * 8 - first_bit, in_line = piece.line;
    if (number > plan.elements) number = plan.elements;
    const unsigned char *from = plan.src + line.element + static_cast<long long>(number) * plan.element_stride;
    unsigned word = 0;
#pragma unroll 1
    for (unsigned done = 0; done < 8 * count;) {
        const u64 left = plan.elements - number;
        if (left == 0) {
            if (!plan.joined || ++in_line == plan.lines) break;
            number = 0, from = plan.src + line_at(plan, in_line).element;
            continue;
        }
        const unsigned wanted = 8 * count - done, there = left < wanted ? static_cast<unsigned>(left) : wanted;
        // To the end of a byte of two lines, then whole bytes, then what is left of the line.
        const unsigned in_byte = 8 - done % 8, bytes = in_byte == 8 ? there / 8 : 0;
        const unsigned next = bytes != 0 ? 8 * bytes : there < in_byte ? there : in_byte;
        word |= pack_run(plan, from, bytes, next) << done;
        done += next, number += next, from += static_cast<long long>(next) * plan.element_stride;
    }
    word = in_order(word, plan.order);
    if (count == PIECE && plan.n_byte_loops == 0 && plan.byte_stride == 1) {
        unsigned char *place = to + first + plan.first_byte;
        if (misalignment(place, 4) == 0) {
            *reinterpret_cast<unsigned *>(place) = word;
            return;
        }
    }
#pragma unroll 1
    for (unsigned k = 0; k < count; k++) to[byte_at(plan, first + k)] = static_cast<unsigned char>(word >> 8 * k);
}

// ---- Unpacking. Reads 1/8, writes sizeof(T) bytes an element.

// 8 elements that lie side by side, at a multiple of 16 bytes or of all 8.
__device__ __forceinline__ void store_eight(unsigned char *to, unsigned bits, unsigned char one) {
    *reinterpret_cast<uint2 *>(to) = make_uint2(bytes_of_bits(bits) * one, bytes_of_bits(bits >> 4) * one);
}
template <typename T>
__device__ __forceinline__ void store_eight(unsigned char *to, unsigned bits, T one) {
    enum : unsigned { A_VECTOR = 16 / sizeof(T) };
#pragma unroll
    for (unsigned k = 0; k < 8; k += A_VECTOR) {
        reinterpret_cast<uint4 *>(to)[k / A_VECTOR] = unpack_vector(bits >> k, one);
    }
}

// 8 elements, where they lie at a boundary.
template <typename T>
__device__ __forceinline__ void unpack_eight(const Aligned<T> &elements, unsigned char *to, unsigned bits) {
    store_eight(to, bits, elements.one);
}
__device__ __forceinline__ void unpack_eight(const Anywhere &, unsigned char *, unsigned) {}

// The elements of a line from `at` on, of which those from `first` to `last` exist.
template <typename E>
__device__ __forceinline__ void unpack_piece(const gc_strided_plan &plan, unsigned char *line, long long at,
                                             long long first, long long last, u64 bits, const E &elements) {
    const long long stride = plan.element_stride;
    bits <<= first - at;
    unsigned char *to = line + at * stride;
#pragma unroll 1
    for (; at < last; at += 8, to += 8 * stride, bits >>= 8) {
        const unsigned eight = static_cast<unsigned>(bits);
        if (at >= first && at + 8 <= last) {
            if (plan.boundary > 1) {
                unpack_eight(elements, to, eight);
            } else {
#pragma unroll
                for (unsigned i = 0; i < 8; i++) elements.store(to + i * stride, eight >> i & 1);
            }
        } else {
#pragma unroll 1
            for (unsigned i = 0; i < 8; i++) {
                if (at + i >= first && at + i < last) elements.store(to + i * stride, eight >> i & 1);
            }
        }
    }
}

__device__ __forceinline__ void unpack_walk(const gc_strided_plan &plan) {
    const Piece piece = this_piece(plan);
    if (piece.line >= plan.lines) return;
    const Line line = line_at(plan, piece.line);
    unsigned char *to = plan.dst + line.element;
    // A piece begins at the boundary before, but for the first of a line.
    const long long back = plan.boundary > 1 ? beyond(to, plan.boundary) / plan.size : 0, size = plan.piece * 8;
    const long long elements = static_cast<long long>(plan.elements);
    const long long at = static_cast<long long>(piece.number) * size - back;
    const long long first = at < 0 ? 0 : at, last = at + size < elements ? at + size : elements;
    if (first >= last) return;

    // Its bits, which begin within a byte, and then so many bytes more.
    const u64 bit = (plan.joined ? piece.line * plan.elements : 0) + static_cast<u64>(first), byte = bit / 8;
    const unsigned shift = static_cast<unsigned>(bit) % 8;
    const unsigned needed = (shift + static_cast<unsigned>(last - first) + 7) / 8;
    const u64 there = byte < plan.bytes ? plan.bytes - byte : 0;
    const unsigned count = there < needed ? static_cast<unsigned>(there) : needed;
    const unsigned char *from = plan.src + line.byte;
    u64 bits = 0;
    if (plan.n_byte_loops == 0) {
        unsigned loaded[PIECE + 1];
        from += byte_at(plan, byte);
#pragma unroll
        for (unsigned k = 0; k <= PIECE; k++, from += plan.byte_stride) loaded[k] = k < count ? *from : 0;
#pragma unroll
        for (unsigned k = 0; k <= PIECE; k++) bits |= static_cast<u64>(in_order(loaded[k], plan.order) & 0xff) << 8 * k;
    } else {
#pragma unroll 1
        for (unsigned k = 0; k < count; k++) {
            bits |= static_cast<u64>(in_order(from[byte_at(plan, byte + k)], plan.order) & 0xff) << 8 * k;
        }
    }
    bits >>= shift;
    if (!plan.aligned) return unpack_piece(plan, to, at, first, last, bits, Anywhere(plan));
    switch (plan.size) {
    case 1: return unpack_piece(plan, to, at, first, last, bits, Aligned<unsigned char>(plan));
    case 2: return unpack_piece(plan, to, at, first, last, bits, Aligned<unsigned short>(plan));
    case 4: return unpack_piece(plan, to, at, first, last, bits, Aligned<unsigned>(plan));
    default: return unpack_piece(plan, to, at, first, last, bits, Aligned<u64>(plan));
    }
}

#endif
