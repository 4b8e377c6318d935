// Kernels that pack and unpack bits, in contiguous memory and in tiles of any layout. docs/ABI.md has their names,
// arguments and items; launch shapes are in src/cuda/module.rs.
//
// Contiguous memory is cut into tiles. Packing: each warp has a tile of UNITS units of 1024 elements. A lane loads 2,
// 4, 8 or 16 vectors of 16 bytes per unit, side by side across the warp. An exchange of fields turns their bits into 32
// words in the 32 lanes; one store writes 128 bytes. Unpacking: each thread block has a tile, and each lane writes
// vectors of 16 bytes. A *head* of less than a cache line aligns the written side to whole lines. The read side may
// have any alignment; it is read at aligned addresses and shifted. No access leaves the operands: a tile that reaches
// outside is *ragged* (tile.cuh) and has its own code, like the tiles of the thread block with the head.
#include "unpack.cuh"
#include "tiled.cuh"

// ---- Packing contiguous elements

// Packs the first thread block's head: at most 127 bytes before a whole line, 16 per warp, 4 elements per lane.
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

// Packs a warp's tile, which begins at byte number `byte` of dst; its first vector begins `shift` elements before it. A
// tile that is not WHOLE may reach over the ends of src and dst, and its warp takes part in the head.
template <typename R, unsigned UNITS, bool WHOLE, typename T = typename R::element>
__device__ __forceinline__ void pack_tile(const T *__restrict__ src, unsigned char *__restrict__ dst, u64 elements,
                                          u64 bytes, unsigned head, u64 byte, unsigned shift, unsigned order) {
    constexpr unsigned VECTORS = 2 * sizeof(T), A_VECTOR = 16 / sizeof(T), BEHIND = UNITS * UNIT;
    const unsigned lane = threadIdx.x % WARP;
    const u64 first = byte * 8;
    // A warp loads its vectors, and the vector after the tile, which a shift needs.
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
        // This waits for memory, so the loads of the head are issued before it.
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
        // Then lane g * VECTORS + k holds word g of vector k. The shuffle moves each word to the lane of its number.
        fields = transpose_fields<VECTORS>(fields, lane);
        words[u] = __shfl_sync(WHOLE_WARP, fields, lane % A_VECTOR * VECTORS + lane / A_VECTOR);
    }
#pragma unroll
    for (unsigned u = 0; u < UNITS; u++) {
        unsigned word = words[u];
        if (shift) {
            const unsigned following = words[u + 1 < UNITS ? u + 1 : 0];
            const unsigned beyond = u + 1 < UNITS ? __shfl_sync(WHOLE_WARP, following, 0) : behind;
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

// Reads sizeof(T) and writes 1/8 byte per element.
template <typename R, unsigned UNITS, typename T = typename R::element>
__device__ __forceinline__ void pack(const T *__restrict__ src, unsigned char *__restrict__ dst, u64 elements,
                                     u64 bytes, unsigned order) {
    u64 head = (LINE - misalignment(dst, LINE)) % LINE;
    if (head > bytes) head = bytes;
    const u64 byte = head + thread_number() / WARP * (UNITS * LINE), first = byte * 8;
    // The shift is the same for every tile, because a tile begins a multiple of 16 bytes after the one before.
    const unsigned shift = misalignment(src + first, 16) / sizeof(T);
    const bool whole = byte + UNITS * LINE <= bytes && first >= shift
                    && first + UNITS * UNIT + (shift ? 16 / sizeof(T) : 0) <= elements;  // and the vector after it
    // The first thread block also has the head.
    if (blockIdx.x > 0) head = 0;
    // The code exists twice: with branches in one copy, small calls of whole tiles of bools took 4 % longer on an H200.
    if (whole && head == 0) {
        pack_tile<R, UNITS, true>(src, dst, elements, bytes, 0, byte, shift, order);
    } else if (head || byte < bytes) {
        pack_tile<R, UNITS, false>(src, dst, elements, bytes, static_cast<unsigned>(head), byte, shift, order);
    }
}

// Units and threads are the best measured on an H200. The minimum of two thread blocks keeps the compiler from halving
// the loads in flight to save registers, and from spilling.
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

// Two stores are best: with one or four some widths or alignments are slower on an H200, by up to a tenth.
#define UNPACK(name, T) \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const unsigned char *src, T *dst, u64 elements, \
                                                               u64 bytes, T one, unsigned order) { \
        unpack<2>(src, dst, elements, bytes, Ones<T>{one}, order); \
    }
UNPACK(gc_unpack_u8, unsigned char)
UNPACK(gc_unpack_u16, unsigned short)
UNPACK(gc_unpack_u32, unsigned)
UNPACK(gc_unpack_u64, u64)

// ---- Any layout, for the library alone (tiled.cuh). Items: tiles

// The minimum of four thread blocks keeps enough loads in flight.
extern "C" __global__ void __launch_bounds__(THREADS, 4) gc_pack_strided(const __grid_constant__ gc_strided_plan plan) {
    pack_any(plan);
}
extern "C" __global__ void __launch_bounds__(THREADS, 4) gc_unpack_strided(const __grid_constant__ gc_strided_plan plan) {
    unpack_any(plan);
}
