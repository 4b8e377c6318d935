// Rows of their own: contiguous on both sides, though elements may lie backwards, or elements at any one stride.
#ifndef GRADCODEC_ROWS_CUH
#define GRADCODEC_ROWS_CUH

#include "strided.cuh"

// ---- Contiguous rows. x: words or vectors of a row, of which a thread has every 2^log_width-th of `rounds`; y: rows.

struct Spot {
    u64 x, y;
};
__device__ __forceinline__ Spot this_spot(const gc_tiles &tiles, const Place &place) {
    const unsigned log_width = tiles.log_width;
    return {(static_cast<u64>(place.across) * tiles.rounds << log_width) + (threadIdx.x & ((1u << log_width) - 1)),
            (static_cast<u64>(place.along) << (LOG_BLOCK - log_width)) + (threadIdx.x >> log_width)};
}

// Reads sizeof(T), writes 1/8 byte an element. A thread packs 4, 2 or 1 bytes of 32 or 64 bytes at once: its neighbours
// read the same cache lines, and nothing is exchanged.
template <typename T>
__device__ __forceinline__ void pack_tile_of_rows(const gc_tiles &tiles) {
    enum : unsigned { BYTES = sizeof(T) < 4 ? 4 / sizeof(T) : 1, ROOM = 8 * BYTES, A_VECTOR = 16 / sizeof(T) };
    enum : unsigned { VECTORS = ROOM / A_VECTOR };
    const Place place = this_place(tiles);
    const Spot spot = this_spot(tiles, place);
    if (spot.y >= tiles.rows) return;
    const unsigned char *src = tiles.src + place.element + static_cast<long long>(spot.y) * tiles.row_element_stride;
    unsigned char *dst = tiles.dst + place.byte + static_cast<long long>(spot.y) * tiles.row_byte_stride;
    const bool backwards = tiles.element_stride < 0;
    const Range<T> range(tiles);
    u64 byte = spot.x * BYTES;
#pragma unroll 1
    for (unsigned round = 0; round < tiles.rounds && byte < tiles.bytes; round++, byte += BYTES << tiles.log_width) {
        // The lowest address: backwards, the last element's.
        const unsigned char *from = backwards ? src - (byte * 8 + ROOM - 1) * sizeof(T) : src + byte * 8 * sizeof(T);
        const unsigned beyond = misalignment(from, 16), behind = beyond ? VECTORS : VECTORS - 1;
        from -= beyond;
        u64 bits = 0;
        if (readable(tiles, from, 16 * behind + 16)) {
            uint4 v[VECTORS + 1];
#pragma unroll
            for (unsigned k = 0; k <= VECTORS; k++) {
                // Where there is nothing behind, the last one once more.
                v[k] = reinterpret_cast<const uint4 *>(from)[k < VECTORS ? k : behind];
            }
#pragma unroll
            for (unsigned k = 0; k <= VECTORS; k++) {
                bits |= static_cast<u64>(bits_of_vector(v[k], range)) << k * A_VECTOR;
            }
        } else {
#pragma unroll 1
            for (unsigned k = 0; k <= VECTORS; k++) {
                bits |= static_cast<u64>(bits_one_by_one<T>(tiles, from + 16 * k)) << k * A_VECTOR;
            }
        }
        unsigned word = static_cast<unsigned>(bits >> beyond / sizeof(T));
        if (backwards) word = __brev(word) >> (32 - ROOM);
        const unsigned count = at_most(ROOM, tiles.elements, byte * 8);
        if (count < 32) word &= (1u << count) - 1;
        store_bytes(dst + byte, {0, at_most(BYTES, tiles.bytes, byte)}, in_order(word, tiles.order));
    }
}

// Reads 1/8, writes sizeof(T) bytes an element.
template <typename T>
__device__ __forceinline__ void unpack_tile_of_rows(const gc_tiles &tiles) {
    enum : unsigned { A_VECTOR = 16 / sizeof(T) };
    const Place place = this_place(tiles);
    const Spot spot = this_spot(tiles, place);
    if (spot.y >= tiles.rows) return;
    const unsigned char *src = tiles.src + place.byte + static_cast<long long>(spot.y) * tiles.row_byte_stride;
    unsigned char *dst = tiles.dst + place.element + static_cast<long long>(spot.y) * tiles.row_element_stride;
    const long long size = sizeof(T), elements = static_cast<long long>(tiles.elements);
    const bool backwards = tiles.element_stride < 0;
    // The lowest address: backwards, the last element's.
    if (backwards) dst -= (elements - 1) * size;
    const unsigned beyond = misalignment(dst, 16);
    const T one = static_cast<T>(tiles.one);
    // A vector begins `at` bytes behind the lowest address. All vectors of a thread have their bits at one shift.
    long long at = static_cast<long long>(spot.x * 16) - beyond;
    const long long first = at / size;
    Bits bits = bits_from(src, backwards ? elements - first - A_VECTOR : first);
    const int step = (A_VECTOR << tiles.log_width) / 8;
    const u64 count = tiles.elements * size;
#pragma unroll 1
    for (unsigned round = 0; round < tiles.rounds && at < static_cast<long long>(count); round++) {
        const unsigned word = load_word(tiles, bits);
        store_vector(dst + at, at, count, unpack_vector(backwards ? __brev(word) >> (32 - A_VECTOR) : word, one));
        at += 16u << tiles.log_width;
        bits.from += backwards ? -step : step;
    }
}

// ---- One stride between the elements of a row, whatever it is, and bytes that follow each other. x: warps, of which
// each has 1024 elements; y: rows.
//
// Lane i takes element i, so a warp reads or writes as little memory at once as there can be.

// Reads sizeof(T) bytes an element and what lies between, writes 1/8.
template <typename T>
__device__ __forceinline__ void pack_tile_of_steps(const gc_tiles &tiles) {
    const Place place = this_place(tiles);
    const unsigned lane = threadIdx.x % WARP;
    const u64 first = (static_cast<u64>(place.across) * (BLOCK / WARP) + threadIdx.x / WARP) * 1024;
    if (first / 8 >= tiles.bytes) return;
    const Range<T> range(tiles);
    const unsigned char *from = tiles.src + place.element
                              + static_cast<long long>(place.along) * tiles.row_element_stride
                              + static_cast<long long>(first + lane) * tiles.element_stride;
    const long long step = WARP * tiles.element_stride;
    const unsigned count = at_most(1024, tiles.elements, first);
    unsigned word = 0;
    // So many loads are under way at once.
    enum : unsigned { LOADS = sizeof(T) == 8 ? 8 : 16 };
#pragma unroll 1
    for (unsigned done = 0; done < 1024; done += LOADS * WARP) {
        T x[LOADS];
#pragma unroll
        for (unsigned k = 0; k < LOADS; k++, from += step) {
            x[k] = done + k * WARP + lane < count ? *reinterpret_cast<const T *>(from) : T(0);
        }
#pragma unroll
        for (unsigned k = 0; k < LOADS; k++) {
            const unsigned bits = pack_warp(done + k * WARP + lane < count && range.bit(x[k]));
            if (lane == done / WARP + k) word = bits;
        }
    }
    const u64 byte = first / 8 + lane * 4;
    unsigned char *to = tiles.dst + place.byte + static_cast<long long>(place.along) * tiles.row_byte_stride + byte;
    store_bytes(to, {0, at_most(4, tiles.bytes, byte)}, in_order(word, tiles.order));
}

// Reads 1/8, writes sizeof(T) bytes an element.
template <typename T>
__device__ __forceinline__ void unpack_tile_of_steps(const gc_tiles &tiles) {
    const Place place = this_place(tiles);
    const unsigned lane = threadIdx.x % WARP;
    const u64 first = (static_cast<u64>(place.across) * (BLOCK / WARP) + threadIdx.x / WARP) * 1024;
    if (first >= tiles.elements) return;
    const unsigned char *from = tiles.src + place.byte + static_cast<long long>(place.along) * tiles.row_byte_stride;
    const unsigned word = load_word(tiles, bits_from(from, static_cast<long long>(first + lane * 32)));
    unsigned char *to = tiles.dst + place.element + static_cast<long long>(place.along) * tiles.row_element_stride
                      + static_cast<long long>(first + lane) * tiles.element_stride;
    const long long step = WARP * tiles.element_stride;
    const T one = static_cast<T>(tiles.one);
    const unsigned count = at_most(1024, tiles.elements, first);
#pragma unroll 4
    for (unsigned k = 0; k < WARP; k++, to += step) {
        const unsigned bits = __shfl_sync(WHOLE_WARP, word, k);
        if (k * WARP + lane < count) *reinterpret_cast<T *>(to) = bits >> lane & 1 ? one : T(0);
    }
}

#endif
