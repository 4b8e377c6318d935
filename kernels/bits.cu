// Packing and unpacking bits: contiguous memory at the speed of memory, any strides at the speed of their accesses.
// Names, arguments and items are in README.md beside this file, launch shapes in src/backend/cuda/module.rs.
//
// Contiguous memory is cut into tiles. Packing, a tile is a warp's: UNITS units of 1024 elements. A lane loads 2, 4, 8 or 16
// vectors of 16 bytes a unit, side by side across the warp; what bits they give become 32 words in the 32 lanes by an
// exchange of fields; one store writes 128 bytes. Unpacking, a tile is a block's, and each lane writes vectors of 16 bytes.
// The side that is written is aligned to whole cache lines by a *head* of less than one; the side that is read is then
// anywhere, and is read at aligned addresses and shifted. Nothing outside the operands is touched: a tile that would is
// *ragged* (tile.cuh) and has code of its own, and so are those of the block with the head.
#include "unpack.cuh"

// A byte of which only bit number i is set.
__device__ __forceinline__ unsigned bit_of_byte(unsigned i, unsigned order) {
    return order == ORDER_LITTLE ? 1u << i : 0x80u >> i;
}

// ---- Packing contiguous elements

// The bytes before the first whole line, at most 127, by the first block: 16 a warp, 4 elements a lane.
template <typename R, typename T = typename R::element>
__device__ __forceinline__ void pack_head(const T *__restrict__ src, unsigned char *__restrict__ dst, u64 elements,
                                          unsigned bytes, unsigned order) {
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, byte = warp * 16 + lane;
    const unsigned end = elements < bytes * 8 ? static_cast<unsigned>(elements) : bytes * 8;
    T x[4];
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        const unsigned i = warp * LINE + k * WARP + lane;
        x[k] = i < end ? src[i] : R::first_zero();
    }
    unsigned word = 0;
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        const unsigned bits = pack_warp(bit_of<R>(from_memory(x[k])));
        if (lane / 4 == k) word = bits;
    }
    if (lane < 16 && byte < bytes) dst[byte] = static_cast<unsigned char>(in_order(word, order) >> lane % 4 * 8);
}

// A warp's tile, which begins at byte number `byte` of dst; its first vector begins `shift` elements before it. A tile
// that is not WHOLE may reach over the ends of src and dst, and its warp takes part in the head.
template <typename R, unsigned UNITS, bool WHOLE, typename T = typename R::element>
__device__ __forceinline__ void pack_tile(const T *__restrict__ src, unsigned char *__restrict__ dst, u64 elements,
                                          u64 bytes, unsigned head, u64 byte, unsigned shift, unsigned order) {
    constexpr unsigned VECTORS = 2 * sizeof(T), A_VECTOR = 16 / sizeof(T), BEHIND = UNITS * UNIT;
    const unsigned lane = threadIdx.x % WARP;
    const u64 first = byte * 8;
    // A lane's vectors, and the one behind the tile, which a shift needs.
    const T *from = src + (first - shift);
    const auto place = [&](unsigned u, unsigned k) { return ((u * VECTORS + k) * WARP + lane) * A_VECTOR; };
    uint4 loaded[UNITS][VECTORS], last = make_uint4(0, 0, 0, 0);
    Extent inside = {0, 0};
    unsigned ends = 0;
    if (WHOLE) {
#pragma unroll
        for (unsigned u = 0; u < UNITS; u++) {
#pragma unroll
            for (unsigned k = 0; k < VECTORS; k++) loaded[u][k] = *reinterpret_cast<const uint4 *>(from + place(u, k));
        }
        if (shift) last = *reinterpret_cast<const uint4 *>(from + BEHIND);
    } else {
        inside = extent(static_cast<long long>(first - shift), BEHIND + A_VECTOR, elements);
#pragma unroll
        for (unsigned u = 0; u < UNITS; u++) {
#pragma unroll
            for (unsigned k = 0; k < VECTORS; k++) loaded[u][k] = load_inside(from, place(u, k), inside);
        }
        if (shift) last = load_inside(from, BEHIND, inside);
        const T end = load_end<R>(from, inside, lane);
        if (head) pack_head<R>(src, dst, elements, head, order);
        // Only now: it waits for memory, and what the head needs is to be under way by then.
        ends = pack_warp(bit_of<R>(from_memory(end)));
    }
    unsigned behind = 0;
    if (shift) {
        behind = pack_vector(last, R());
        if (!WHOLE) behind = bits_inside<A_VECTOR>(behind, BEHIND, inside, ends);
    }

    unsigned words[UNITS];
#pragma unroll
    for (unsigned u = 0; u < UNITS; u++) {
        unsigned fields = 0;
#pragma unroll
        for (unsigned k = 0; k < VECTORS; k++) fields |= pack_vector(loaded[u][k], R()) << k * A_VECTOR;
        if (!WHOLE) {
            unsigned kept = 0;
#pragma unroll
            for (unsigned k = 0; k < VECTORS; k++) {
                kept |= bits_inside<A_VECTOR>(fields >> k * A_VECTOR, place(u, k), inside, ends) << k * A_VECTOR;
            }
            fields = kept;
        }
        // Now lane g * VECTORS + k holds word g of vector k of all lanes: to the lane of its number.
        fields = transpose_fields<VECTORS>(fields, lane);
        words[u] = __shfl_sync(WHOLE_WARP, fields, lane % A_VECTOR * VECTORS + lane / A_VECTOR);
    }
#pragma unroll
    for (unsigned u = 0; u < UNITS; u++) {
        unsigned word = words[u];
        if (shift) {
            const unsigned beyond = u + 1 < UNITS ? __shfl_sync(WHOLE_WARP, words[u + 1 < UNITS ? u + 1 : 0], 0) : behind;
            const unsigned next = __shfl_down_sync(WHOLE_WARP, word, 1);
            word = __funnelshift_r(word, lane == WARP - 1 ? beyond : next, shift);
        }
        words[u] = in_order(word, order);
    }
    unsigned char *to = dst + byte;
    if (WHOLE) {
#pragma unroll
        for (unsigned u = 0; u < UNITS; u++) reinterpret_cast<unsigned *>(to)[u * WARP + lane] = words[u];
    } else {
        inside = extent(static_cast<long long>(byte), UNITS * LINE, bytes);
#pragma unroll
        for (unsigned u = 0; u < UNITS; u++) store_inside(to, u * LINE + lane * 4, inside, words[u]);
    }
}

// Reads sizeof(T), writes 1/8 byte an element.
template <typename R, unsigned UNITS, typename T = typename R::element>
__device__ __forceinline__ void pack(const T *__restrict__ src, unsigned char *__restrict__ dst, u64 elements,
                                     u64 bytes, unsigned order) {
    u64 head = (LINE - misalignment(dst, LINE)) % LINE;
    if (head > bytes) head = bytes;
    const u64 byte = head + thread_number() / WARP * (UNITS * LINE), first = byte * 8;
    // The same for every tile: a tile begins a multiple of 16 bytes after the one before.
    const unsigned shift = misalignment(src + first, 16) / sizeof(T);
    const bool whole = byte + UNITS * LINE <= bytes && first >= shift
                    && first + UNITS * UNIT + (shift ? 16 / sizeof(T) : 0) <= elements;  // and the vector behind it
    // The first block has the head too.
    if (blockIdx.x > 0) head = 0;
    // Two copies of the code: with branches in one, small calls of whole tiles of bools took 4 % longer on an H200.
    if (whole && head == 0) {
        pack_tile<R, UNITS, true>(src, dst, elements, bytes, 0, byte, shift, order);
    } else if (head || byte < bytes) {
        pack_tile<R, UNITS, false>(src, dst, elements, bytes, static_cast<unsigned>(head), byte, shift, order);
    }
}

// Units and threads: the best measured on an H200. Two blocks at least: left to itself the compiler halves the loads that
// are under way to save registers, and spills.
#define PACK(name, rule, UNITS) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) name(const rule::element *src, unsigned char *dst, \
                                                                  u64 elements, u64 bytes, unsigned order) { \
        pack<rule, UNITS>(src, dst, elements, bytes, order); \
    }
PACK(gc_pack_truth_u8, Truth<unsigned char>, 2)
PACK(gc_pack_truth_u16, Truth<unsigned short>, 1)
PACK(gc_pack_truth_u32, Truth<unsigned>, 1)
PACK(gc_pack_truth_u64, Truth<u64>, 1)
PACK(gc_pack_signs_f16, SignF16, 1)
PACK(gc_pack_signs_bf16, SignBF16, 1)
PACK(gc_pack_signs_f32, SignF32, 1)
PACK(gc_pack_signs_f64, SignF64, 1)

// ---- Unpacking to contiguous elements: 0, or `one` (unpack.cuh)

// Two stores: with one or four some widths or alignments are slower on an H200, by up to a tenth.
#define UNPACK(name, T) \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const unsigned char *src, T *dst, u64 elements, u64 bytes, \
                                                               T one, unsigned order) { \
        unpack<2>(src, dst, elements, bytes, Ones<T>{one}, order); \
    }
UNPACK(gc_unpack_u8, unsigned char)
UNPACK(gc_unpack_u16, unsigned short)
UNPACK(gc_unpack_u32, unsigned)
UNPACK(gc_unpack_u64, u64)

// ---- Any strides, for the library alone
//
// A thread packs one byte, or unpacks one byte's elements and writes nothing beside them: rows * bytes threads for
// packing, rows * ceil(elements / 8) for unpacking.

struct gc_loop {
    long long count, element_stride, byte_stride;
};

// As the host lays it out: Strided in src/backend/cuda/bits.rs. Each set of loops is nested, outermost first; the
// product of its counts is `rows`, `elements` or `bytes`; where that is 0 or 1 there may be none. Strides are in bytes
// and may be negative or 0; row loops use both, the others their own.
struct gc_strided_plan {
    const unsigned char *src;           // the first element, and the first byte: one is read, the other written
    unsigned char *dst;
    u64 rows, elements, bytes;          // rows; elements and bytes of each
    u64 first_zero, span;               // packing: as in Rule, in the width of an element
    u64 one;                            // unpacking: the bit pattern of 1
    unsigned size, order;               // bytes of an element: 1, 2, 4 or 8
    unsigned aligned;                   // 1: every element's address is a multiple of its size
    unsigned rows_first;                // neighbouring threads take: 1: neighbouring rows, 0: bytes of a row; the
                                        // wrong choice costs a factor of three to ten
    unsigned n_row_loops, n_element_loops, n_byte_loops, reserved;
    gc_loop loops[124];                 // those over rows, then over a row's elements, then over its bytes
};
static_assert(sizeof(gc_strided_plan) == 3072, "the host lays it out too, and parameters hold 4096 bytes");

// Divides in place and returns the remainder; in 32 bits, several times as fast, where both fit.
__device__ __forceinline__ u64 divide(u64 &value, u64 by) {
    if ((value | by) >> 32 == 0) {
        const unsigned a = static_cast<unsigned>(value), b = static_cast<unsigned>(by);
        value = a / b;
        return a % b;
    }
    const u64 quotient = value / by, rest = value - quotient * by;
    value = quotient;
    return rest;
}

// Where round number `round` of some loops lies.
struct Offsets {
    long long element, byte;
};
__device__ __forceinline__ Offsets decode(const gc_loop *loops, unsigned count, u64 round) {
    Offsets at = {0, 0};
    for (unsigned k = count; k-- > 0 && round != 0;) {
        const long long index = divide(round, loops[k].count);
        at.element += index * loops[k].element_stride;
        at.byte += index * loops[k].byte_stride;
    }
    return at;
}

// The group of 8 elements and their byte that is this thread's, among `groups` a row.
struct Group {
    u64 row, number;
    bool exists;
};
__device__ __forceinline__ Group this_group(const gc_strided_plan &plan, u64 groups) {
    u64 rest = thread_number();
    if (plan.rows_first) {
        const u64 row = divide(rest, plan.rows);
        return {row, rest, rest < groups};
    }
    const u64 number = divide(rest, groups);
    return {rest, number, rest < plan.rows};
}

// Where a byte of a row lies, from the row's first.
__device__ __forceinline__ long long byte_offset(const gc_strided_plan &plan, u64 number) {
    return decode(plan.loops + plan.n_row_loops + plan.n_element_loops, plan.n_byte_loops, number).byte;
}

// How many elements a group has: 8 before the end, none past it.
__device__ __forceinline__ unsigned elements_of(const gc_strided_plan &plan, u64 number) {
    const u64 first = number * 8;
    return first >= plan.elements ? 0 : plan.elements - first < 8 ? static_cast<unsigned>(plan.elements - first) : 8;
}

// The elements of a row from one on, as far as they lie at one stride.
struct Run {
    long long offset, stride;
    u64 length;
};
__device__ __forceinline__ Run run_from(const gc_strided_plan &plan, u64 element) {
    if (plan.n_element_loops == 0) return {0, 0, 1};
    const gc_loop *loops = plan.loops + plan.n_row_loops, &inner = loops[plan.n_element_loops - 1];
    const u64 at = divide(element, inner.count);
    const long long offset = decode(loops, plan.n_element_loops - 1, element).element;
    return {offset + static_cast<long long>(at) * inner.element_stride, inner.element_stride, inner.count - at};
}

// The 8 elements of a run as a byte. All loads are under way before the first is used.
template <typename T>
__device__ __forceinline__ unsigned pack_run(const gc_strided_plan &plan, const unsigned char *from, long long stride) {
    T x[8];
#pragma unroll
    for (unsigned i = 0; i < 8; i++) x[i] = *reinterpret_cast<const T *>(from + i * stride);
    unsigned bits = 0;
#pragma unroll
    for (unsigned i = 0; i < 8; i++) {
        bits |= unsigned(outside(x[i], static_cast<T>(plan.first_zero), static_cast<T>(plan.span))) << i;
    }
    return in_order(bits, plan.order) & 0xff;
}

// One element, wherever it lies.
__device__ __forceinline__ bool pack_element(const gc_strided_plan &plan, const unsigned char *from) {
    u64 x = 0;
    for (unsigned k = 0; k < plan.size; k++) x |= static_cast<u64>(from[k]) << 8 * k;
    // As an integer of its own width: what lies below first_zero wraps around to above the span.
    return ((x - plan.first_zero) & (~0ull >> (64 - 8 * plan.size))) > plan.span;
}

extern "C" __global__ void __launch_bounds__(THREADS) gc_pack_strided(const __grid_constant__ gc_strided_plan plan) {
    const Group group = this_group(plan, plan.bytes);
    if (!group.exists) return;
    const Offsets row = decode(plan.loops, plan.n_row_loops, group.row);
    const unsigned char *from = plan.src + row.element;
    const unsigned count = elements_of(plan, group.number);
    unsigned byte = 0;
    Run run = run_from(plan, group.number * 8);
    if (count == 8 && run.length >= 8 && plan.aligned) {
        from += run.offset;
        switch (plan.size) {
        case 1: byte = pack_run<unsigned char>(plan, from, run.stride); break;
        case 2: byte = pack_run<unsigned short>(plan, from, run.stride); break;
        case 4: byte = pack_run<unsigned>(plan, from, run.stride); break;
        default: byte = pack_run<u64>(plan, from, run.stride); break;
        }
    } else {
#pragma unroll 1
        for (unsigned i = 0; i < count; i++) {
            if (pack_element(plan, from + run.offset)) byte |= bit_of_byte(i, plan.order);
            run.offset += run.stride;
            if (--run.length == 0 && i + 1 < count) run = run_from(plan, group.number * 8 + i + 1);
        }
    }
    plan.dst[row.byte + byte_offset(plan, group.number)] = static_cast<unsigned char>(byte);
}

// The bits of a word to the 8 elements of a run.
template <typename T>
__device__ __forceinline__ void unpack_run(const gc_strided_plan &plan, unsigned bits, unsigned char *to, long long stride) {
#pragma unroll
    for (unsigned i = 0; i < 8; i++) {
        *reinterpret_cast<T *>(to + i * stride) = bits >> i & 1 ? static_cast<T>(plan.one) : T(0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gc_unpack_strided(const __grid_constant__ gc_strided_plan plan) {
    const Group group = this_group(plan, plan.elements / 8 + (plan.elements % 8 != 0));
    if (!group.exists) return;
    const Offsets row = decode(plan.loops, plan.n_row_loops, group.row);
    unsigned bits = 0;
    if (group.number < plan.bytes) bits = in_order(plan.src[row.byte + byte_offset(plan, group.number)], plan.order);
    unsigned char *to = plan.dst + row.element;
    const unsigned count = elements_of(plan, group.number);
    Run run = run_from(plan, group.number * 8);
    if (count == 8 && run.length >= 8 && plan.aligned) {
        to += run.offset;
        switch (plan.size) {
        case 1: return unpack_run<unsigned char>(plan, bits, to, run.stride);
        case 2: return unpack_run<unsigned short>(plan, bits, to, run.stride);
        case 4: return unpack_run<unsigned>(plan, bits, to, run.stride);
        default: return unpack_run<u64>(plan, bits, to, run.stride);
        }
    }
#pragma unroll 1
    for (unsigned i = 0; i < count; i++) {
        for (unsigned k = 0; k < plan.size; k++) {
            to[run.offset + k] = bits >> i & 1 ? static_cast<unsigned char>(plan.one >> 8 * k) : 0;
        }
        run.offset += run.stride;
        if (--run.length == 0 && i + 1 < count) run = run_from(plan, group.number * 8 + i + 1);
    }
}
