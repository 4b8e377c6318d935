// Rows of their own: contiguous on both sides, though elements may lie backwards, or elements at any one stride.
#ifndef GRADCODEC_ROWS_CUH
#define GRADCODEC_ROWS_CUH

#include "strided.cuh"

// ---- Contiguous rows. x: words or vectors of a row, of which a thread has every 2^log_width-th of `rounds`; y: rows.

// Reads sizeof(T), writes 1/8 byte an element. A thread packs 4, 2 or 1 bytes of 32 or 64 bytes at once: its neighbours
// read the same cache lines, and nothing is exchanged. It stores them at an aligned address: where a row of bytes
// begins between such, the first thread's begin before it.
template <typename T>
__device__ __forceinline__ void pack_tile_of_rows(const gc_tiles &tiles) {
    enum : unsigned { BYTES = sizeof(T) < 4 ? 4 / sizeof(T) : 1, ROOM = 8 * BYTES, A_VECTOR = 16 / sizeof(T) };
    enum : unsigned { VECTORS = ROOM / A_VECTOR };
    enum : long long { SIZE = sizeof(T) };
    const Place place = this_place(tiles);
    const Spot spot = this_spot(tiles, place);
    if (spot.y >= tiles.rows) return;
    const unsigned char *src = tiles.src + place.element + static_cast<long long>(spot.y) * tiles.row_element_stride;
    unsigned char *dst = tiles.dst + place.byte + static_cast<long long>(spot.y) * tiles.row_byte_stride;
    const bool backwards = tiles.element_stride < 0;
    const Range<T> range(tiles);
    const long long bytes = static_cast<long long>(tiles.bytes), elements = static_cast<long long>(tiles.elements);
    long long byte = static_cast<long long>(spot.x * BYTES) - misalignment(dst, BYTES);
#pragma unroll 1
    for (unsigned round = 0; round < tiles.rounds && byte < bytes; round++, byte += BYTES << tiles.log_width) {
        // The lowest address: backwards, the last element's.
        const unsigned char *from = backwards ? src - (byte * 8 + ROOM - 1) * SIZE : src + byte * 8 * SIZE;
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
        const long long left = elements - byte * 8;
        if (left < 32) word &= left < 0 ? 0 : (1u << left) - 1;
        const Extent existing = extent(byte, BYTES, tiles.bytes);
        word = in_order(word, tiles.order);
        if (BYTES == 4 || !existing.has(0, BYTES)) {
            store_bytes(dst + byte, existing, word);
        } else if (BYTES == 2) {
            *reinterpret_cast<unsigned short *>(dst + byte) = static_cast<unsigned short>(word);
        } else {
            dst[byte] = static_cast<unsigned char>(word);
        }
    }
}

// Two words, as load_word() loads one.
__device__ __forceinline__ void load_two(const gc_tiles &tiles, Bits one, Bits other, unsigned (&words)[2]) {
    if (readable(tiles, one.from, 8) && readable(tiles, other.from, 8)) {
        const unsigned *from[2] = {reinterpret_cast<const unsigned *>(one.from),
                                   reinterpret_cast<const unsigned *>(other.from)};
        const unsigned more = one.shift ? 1 : 0;
        const unsigned low[2] = {load_bits(from[0]), load_bits(from[1])};
        const unsigned high[2] = {load_bits(from[0] + more), load_bits(from[1] + more)};
#pragma unroll
        for (unsigned k = 0; k < 2; k++) words[k] = bits_within(low[k], high[k], one.shift, tiles.order);
    } else {
        words[1] = 0;
#pragma unroll 1
        for (unsigned k = 0; k < 2; k++) {
            words[0] = words[1];
            words[1] = load_word(tiles, k == 0 ? one : other);
        }
    }
}

// Reads 1/8, writes sizeof(T) bytes an element.
template <typename T>
__device__ __forceinline__ void unpack_tile_of_rows(const gc_tiles &tiles) {
    enum : unsigned { A_VECTOR = 16 / sizeof(T) };
    prefetch_burst(tiles);
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
    // Two loads are under way at once.
#pragma unroll 1
    for (unsigned round = 0; round < tiles.rounds && at < static_cast<long long>(count); round += 2) {
        const Bits next = {bits.from + (backwards ? -step : step), bits.shift};
        const long long next_at = at + (16u << tiles.log_width);
        const bool two = round + 1 < tiles.rounds && next_at < static_cast<long long>(count);
        unsigned words[2];
        load_two(tiles, bits, two ? next : bits, words);
#pragma unroll 1
        for (unsigned k = 0; k < (two ? 2 : 1); k++, at = next_at, words[0] = words[1]) {
            const unsigned word = backwards ? __brev(words[0]) >> (32 - A_VECTOR) : words[0];
            store_vector(dst + at, at, count, unpack_vector(word, one));
        }
        at = next_at + (16u << tiles.log_width);
        bits.from = next.from + (backwards ? -step : step);
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
