// Rows whose elements lie side by side: element e of all rows is a *line* of memory, and lines may lie anywhere.
//
//     line 0     row 0 | row 1 | row 2 | ...
//     line 1     row 0 | row 1 | row 2 | ...
//
// The bytes of the rows lie side by side too (packing a matrix along its first axis): *columns*, where a thread turns
// the bits of 8 lines in its registers. Or each row's bytes do (flattening a transposed matrix): then the bytes of a
// tile are turned in shared memory, an eighth of its elements or less. x counts vectors of 16 bytes along a line, y
// groups of 8 lines.
#ifndef GRADCODEC_COLUMNS_CUH
#define GRADCODEC_COLUMNS_CUH

#include "strided.cuh"

// A byte for each of the rows of a vector: bit i is line i's.
template <typename T>
struct Bytes {
    enum : unsigned { ROWS = 16 / sizeof(T), WORDS = ROWS < 4 ? 1 : ROWS / 4 };
    unsigned words[WORDS];
};

// ---- Packing. Reads sizeof(T), writes 1/8 byte an element.

// Sets bit `i` of each byte to that of an element of a vector.
__device__ __forceinline__ void add_line(Bytes<unsigned char> &bytes, uint4 v, Range<unsigned char>, unsigned i) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        // As in truth_of_bytes(): the top bit of each byte that is not 0.
        const unsigned top = (((words[k] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | words[k]) & 0x80808080u;
        bytes.words[k] |= top >> (7 - i);
    }
}
__device__ __forceinline__ void add_line(Bytes<unsigned short> &bytes, uint4 v, Range<unsigned short> range,
                                         unsigned i) {
    const unsigned first_zero = static_cast<unsigned>(range.first_zero) << 16;
    const unsigned span = static_cast<unsigned>(range.span) << 16;
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        const unsigned place = 16 * (k % 2) + i;
        bytes.words[k / 2] |= in_register(outside(words[k] << 16, first_zero, span) ? 1u << place : 0)
                            | in_register(outside(words[k], first_zero, span | 0xffff) ? 0x100u << place : 0);
    }
}
__device__ __forceinline__ void add_line(Bytes<unsigned> &bytes, uint4 v, Range<unsigned> range, unsigned i) {
    bytes.words[0] |= in_register(range.bit(v.x) ? 1u << i : 0) | in_register(range.bit(v.y) ? 0x100u << i : 0)
                    | in_register(range.bit(v.z) ? 0x10000u << i : 0)
                    | in_register(range.bit(v.w) ? 0x1000000u << i : 0);
}
__device__ __forceinline__ void add_line(Bytes<u64> &bytes, uint4 v, Range<u64> range, unsigned i) {
    bytes.words[0] |= in_register(range.bit(static_cast<u64>(v.y) << 32 | v.x) ? 1u << i : 0)
                    | in_register(range.bit(static_cast<u64>(v.w) << 32 | v.z) ? 0x100u << i : 0);
}

// 16 bytes of elements as aligned words, where they do not lie at a multiple of 16: four, or five where an element is
// smaller than a word. To choose words from two vectors instead takes eleven instructions more; a processor of an H200
// has integer units for two such in a cycle, and they, not memory, are what rows of odd length wait for.
template <typename T>
struct Apart {
    enum : unsigned { WORDS = sizeof(T) < 4 ? 5 : 4 };
    unsigned words[WORDS], shift;
    __device__ __forceinline__ void load(const unsigned char *from) {
        const unsigned beyond = sizeof(T) < 4 ? misalignment(from, 4) : 0;
        shift = beyond * 8;
        const unsigned *aligned = reinterpret_cast<const unsigned *>(from - beyond);
#pragma unroll
        for (unsigned k = 0; k < WORDS; k++) words[k] = aligned[k];
    }
    __device__ __forceinline__ uint4 vector() const {
        if (sizeof(T) >= 4) return make_uint4(words[0], words[1], words[2], words[3]);
        return make_uint4(__funnelshift_r(words[0], words[1], shift), __funnelshift_r(words[1], words[2], shift),
                          __funnelshift_r(words[2], words[3], shift), __funnelshift_r(words[3], words[WORDS - 1], shift));
    }
};

// Of 8 lines, `count` of which exist: the last one takes the place of those that do not. SHIFTED: they do not lie at
// multiples of 16 bytes, and are read in two turns.
template <typename T, bool SHIFTED>
__device__ __forceinline__ Bytes<T> bytes_of_lines(const unsigned char *from, long long stride, unsigned count,
                                                   Range<T> range) {
    enum : unsigned { WORDS = Bytes<T>::WORDS, AT_ONCE = SHIFTED ? 4 : 8 };
    Bytes<T> bytes = {};
#pragma unroll 1
    for (unsigned done = 0; done < 8; done += AT_ONCE) {
        uint4 v[AT_ONCE];
        Apart<T> apart[AT_ONCE];
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; i++) {
            if (SHIFTED) apart[i].load(from);
            else v[i] = *reinterpret_cast<const uint4 *>(from);
            from += done + i + 1 < count ? stride : 0;
        }
#pragma unroll
        for (unsigned k = 0; k < WORDS; k++) bytes.words[k] >>= AT_ONCE % 8;
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; i++) {
            add_line(bytes, SHIFTED ? apart[i].vector() : v[i], range, 8 - AT_ONCE + i);
        }
    }
    return bytes;
}

// The same of what may be read, one by one: for the rare vectors at an end of memory.
template <typename T>
__device__ __forceinline__ Bytes<T> bytes_one_by_one(const gc_tiles &tiles, const unsigned char *from, unsigned count,
                                                     Range<T> range) {
    enum : unsigned { ROWS = Bytes<T>::ROWS, WORDS = Bytes<T>::WORDS };
    Bytes<T> bytes = {};
#pragma unroll 1
    for (unsigned number = 0; number < 8 * ROWS; number++) {
        const unsigned i = number / ROWS, row = number % ROWS;
        const unsigned char *at = from + static_cast<long long>(i) * tiles.element_stride + row * sizeof(T);
        if (i >= count || !readable(tiles, at, sizeof(T)) || !range.bit(*reinterpret_cast<const T *>(at))) continue;
#pragma unroll
        for (unsigned k = 0; k < WORDS; k++) bytes.words[k] |= row / 4 == k ? 1u << (8 * (row % 4) + i) : 0;
    }
    return bytes;
}

// The bytes of a group of 8 lines, of which `count` exist, for the rows from an address on. Bits of lines that do not
// are 0.
template <typename T>
__device__ __forceinline__ Bytes<T> pack_group(const gc_tiles &tiles, const unsigned char *from, unsigned count) {
    const Range<T> range(tiles);
    const long long stride = tiles.element_stride, last = (static_cast<long long>(count) - 1) * stride;
    const unsigned char *low = from + (last < 0 ? last : 0), *high = from + (last < 0 ? 0 : last);
    const bool shifted = misalignment(from, 16) != 0 || stride % 16 != 0;
    Bytes<T> bytes;
    if (low - misalignment(low, 16) < tiles.begin || high - misalignment(high, 16) + (shifted ? 32 : 16) > tiles.end) {
        return bytes_one_by_one<T>(tiles, from, count, range);
    } else if (shifted) {
        bytes = bytes_of_lines<T, true>(from, stride, count, range);
    } else {
        bytes = bytes_of_lines<T, false>(from, stride, count, range);
    }
#pragma unroll
    for (unsigned k = 0; k < Bytes<T>::WORDS; k++) bytes.words[k] &= ((1u << count) - 1) * 0x01010101u;
    return bytes;
}

__device__ __forceinline__ void store_whole(unsigned char *to, const Bytes<unsigned char> &bytes) {
    const unsigned *words = bytes.words;
    *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ void store_whole(unsigned char *to, const Bytes<unsigned short> &bytes) {
    *reinterpret_cast<u64 *>(to) = static_cast<u64>(bytes.words[1]) << 32 | bytes.words[0];
}
__device__ __forceinline__ void store_whole(unsigned char *to, const Bytes<unsigned> &bytes) {
    *reinterpret_cast<unsigned *>(to) = bytes.words[0];
}
__device__ __forceinline__ void store_whole(unsigned char *to, const Bytes<u64> &bytes) {
    *reinterpret_cast<unsigned short *>(to) = static_cast<unsigned short>(bytes.words[0]);
}

// Columns. A thread packs a group of lines for as many rows as a vector has, and stores their bytes at once, at an
// aligned address: where a row of bytes begins between such, the first thread's vector begins before it.
template <typename T>
__device__ __forceinline__ void pack_tile_of_columns(const gc_tiles &tiles) {
    enum : unsigned { ROWS = Bytes<T>::ROWS, WORDS = Bytes<T>::WORDS };
    const Place place = this_place(tiles);
    const Spot spot = this_spot(tiles, place);
    const unsigned count = at_most(8, tiles.elements, spot.y * 8);
    unsigned char *to = tiles.dst + place.byte + static_cast<long long>(spot.y) * tiles.byte_stride;
    const long long row = static_cast<long long>(spot.x * ROWS) - misalignment(to, ROWS);
    const long long rows = static_cast<long long>(tiles.rows);
    if (count == 0 || row >= rows) return;
    const unsigned char *from = tiles.src + place.element + static_cast<long long>(spot.y) * 8 * tiles.element_stride
                              + row * static_cast<long long>(sizeof(T));
    Bytes<T> bytes = pack_group<T>(tiles, from, count);
#pragma unroll
    for (unsigned k = 0; k < WORDS; k++) bytes.words[k] = in_order(bytes.words[k], tiles.order);
    if (row >= 0 && row + ROWS <= rows) {
        store_whole(to + row, bytes);
        return;
    }
    const Extent existing = extent(row, ROWS, tiles.rows);
#pragma unroll
    for (unsigned k = 0; k < ROWS; k++) {
        if (existing.has(k, 1)) to[row + k] = static_cast<unsigned char>(bytes.words[k / 4] >> 8 * (k % 4));
    }
}

// Transposed. A thread packs `rounds` groups of lines, 1, 2 or 4, which are bytes of the rows of its vectors.
//
// In JOINED rows a byte has the end of one row and the beginning of the next, and belongs to the latter. Tiles overlap
// by 8 lines, so that every byte lies wholly in one; the lines before line 0 are the last ones of the row before.
template <typename T>
__device__ __forceinline__ void pack_transposed_tile(const gc_tiles &tiles) {
    enum : unsigned { ROWS = Bytes<T>::ROWS };
    // The words of each row, and 4 more: for what is shifted in, and so that neighbours lie in different banks. Row
    // x * ROWS + k is number (k << log_x) + x, for the same reason.
    __shared__ unsigned of_rows[384 * ROWS];
    unsigned char *bytes_of_rows = reinterpret_cast<unsigned char *>(of_rows);
    const unsigned log_x = tiles.log_width, x = threadIdx.x & ((1u << log_x) - 1), y = threadIdx.x >> log_x;
    const unsigned rounds = tiles.rounds, log_words = LOG_BLOCK - 2 - log_x + rounds / 2, n_words = 1u << log_words;
    const unsigned n_lines = 32 * n_words, n_rows = ROWS << log_x, pitch = n_words + 4;
    const bool joined = tiles.mode == JOINED;
    const unsigned overlap = joined ? 8 : 0;
    const Place place = this_place(tiles);
    const u64 first_row = static_cast<u64>(place.across) * n_rows;
    const long long elements = static_cast<long long>(tiles.elements), stride = tiles.element_stride;
    const long long first_line = static_cast<long long>(place.along) * (n_lines - overlap) - overlap;
    const unsigned wide = at_most(n_rows, tiles.rows, first_row);
    const unsigned char *src = tiles.src + place.element + (first_row + x * ROWS) * sizeof(T);

#pragma unroll 1
    for (unsigned round = 0; round < rounds && x * ROWS < wide; round++) {
        const unsigned group = y * rounds + round;
        const long long line = first_line + group * 8;
        const unsigned count = line < 0 ? 8 : at_most(8, tiles.elements, line);
        Bytes<T> bytes = {};
        if (count != 0) {
            const long long before = line < 0 ? stride * elements - static_cast<long long>(sizeof(T)) : 0;
            bytes = pack_group<T>(tiles, src + line * stride + before, count);
        }
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
            const unsigned number = (k << log_x) + x;
            bytes_of_rows[number * pitch * 4 + group] = static_cast<unsigned char>(bytes.words[k / 4] >> 8 * (k % 4));
        }
    }
    __syncthreads();

    // A thread stores 4 bytes of some rows, at an aligned address: the first one of a row has what comes before that,
    // and what is left at the end.
    const unsigned at = threadIdx.x & (n_words - 1), step = BLOCK >> log_words;
#pragma unroll 1
    for (unsigned number = threadIdx.x >> log_words; number < wide; number += step) {
        const u64 row = first_row + number, bit = joined ? row * tiles.elements : 0;
        // The first byte that lies wholly in the tile begins at this line of it.
        const unsigned begin = -static_cast<unsigned>(bit) % 8;
        unsigned char *to = tiles.dst + place.byte + (first_line >> 3) + static_cast<long long>((bit + begin) >> 3)
                          + (joined ? 0 : static_cast<long long>(row) * tiles.row_byte_stride);
        // The last byte of a joined row is the next row's, if that has a part of it; and what begins 8 lines before the
        // first is the row's before.
        const bool is_shared = joined && row + 1 < tiles.rows;
        const long long left = (elements - first_line - begin + (is_shared ? 0 : 7)) >> 3;
        const unsigned most = (n_lines - overlap) / 8;
        const unsigned end = left < 0 ? 0 : left < most ? static_cast<unsigned>(left) : most;
        const unsigned first = first_line < 0 && begin == 0 ? 1 : 0;
        const unsigned *words = of_rows + ((number % ROWS << log_x) + number / ROWS) * pitch;
        const unsigned beyond = misalignment(to, 4);
        unsigned byte = at != 0 ? 4 * at - beyond : 0, count = at != 0 ? 4 : 4 - beyond;
#pragma unroll 1
        while (byte < end) {
            const unsigned place = byte * 8 + begin;
            const unsigned word = __funnelshift_r(words[place / 32], words[place / 32 + 1], place % 32);
            const Extent existing = {first > byte ? first - byte : 0, end - byte < count ? end - byte : count};
            store_bytes(to + byte, existing, in_order(word, tiles.order));
            if (count == 4) break;
            byte = byte == 0 ? 4 * n_words - beyond : end, count = beyond;
        }
    }
}

// ---- Unpacking. Reads 1/8, writes sizeof(T) bytes an element.

// Bit i of each byte as a vector.
__device__ __forceinline__ uint4 vector_of(const Bytes<unsigned char> &bytes, unsigned i, unsigned char one) {
    const unsigned *words = bytes.words;
    return make_uint4((words[0] >> i & 0x01010101u) * one, (words[1] >> i & 0x01010101u) * one,
                      (words[2] >> i & 0x01010101u) * one, (words[3] >> i & 0x01010101u) * one);
}
__device__ __forceinline__ uint4 vector_of(const Bytes<unsigned short> &bytes, unsigned i, unsigned short one) {
    unsigned pairs[4];
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        const unsigned bits = bytes.words[k / 2] >> (16 * (k % 2) + i);
        pairs[k] = (bits & 1) * one + (bits >> 8 & 1) * (static_cast<unsigned>(one) << 16);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
__device__ __forceinline__ uint4 vector_of(const Bytes<unsigned> &bytes, unsigned i, unsigned one) {
    const unsigned bits = bytes.words[0] >> i;
    return make_uint4(bits & 1 ? one : 0, bits >> 8 & 1 ? one : 0, bits >> 16 & 1 ? one : 0, bits >> 24 & 1 ? one : 0);
}
__device__ __forceinline__ uint4 vector_of(const Bytes<u64> &bytes, unsigned i, u64 one) {
    const unsigned bits = bytes.words[0] >> i;
    const unsigned low = static_cast<unsigned>(one), high = static_cast<unsigned>(one >> 32);
    return make_uint4(bits & 1 ? low : 0, bits & 1 ? high : 0, bits >> 8 & 1 ? low : 0, bits >> 8 & 1 ? high : 0);
}

// The bytes of a vector's rows, and of as many before: those that a vector needs that begins up to a vector earlier.
template <typename T>
struct Window {
    enum : unsigned { WORDS = Bytes<T>::WORDS, N = 2 * WORDS, LOADED = sizeof(T) == 8 ? 1 : 2 * WORDS };
    unsigned words[N];

    // Of those bytes, which are two of either for elements of 8 bytes.
    __device__ __forceinline__ explicit Window(const unsigned (&loaded)[LOADED]) {
#pragma unroll
        for (unsigned k = 0; k < LOADED; k++) words[k] = loaded[k];
        if (LOADED == 1) words[0] = loaded[0] << 16, words[1] = loaded[0] >> 16;
    }
    // Those of the rows from `back` earlier on.
    __device__ __forceinline__ Bytes<T> earlier(unsigned back) const {
        unsigned all[2 * WORDS];
#pragma unroll
        for (unsigned k = 0; k < 2 * WORDS; k++) all[k] = words[k];
#pragma unroll
        for (unsigned step = WORDS / 2; step > 0; step /= 2) {
#pragma unroll
            for (unsigned k = 2 * WORDS - 1; k >= step; k--) all[k] = back & 4 * step ? all[k - step] : all[k];
        }
        Bytes<T> bytes;
#pragma unroll
        for (unsigned k = 0; k < WORDS; k++) {
            bytes.words[k] = __funnelshift_l(all[WORDS + k - 1], all[WORDS + k], back % 4 * 8);
        }
        return bytes;
    }
};

// Writes the elements of a window's rows to `count` lines, the first at an address. `at`: in bytes from the first row. By
// all lanes of a warp, also those that have nothing: what is not wholly inside a line its warp writes together, a lane a
// line. When one lane did so alone the others waited, and of rows of 6,151 bytes two warps of thirteen have such.
template <typename T>
__device__ __forceinline__ void store_lines(const gc_tiles &tiles, unsigned char *line, unsigned count, long long at,
                                            const Window<T> &window) {
    const T one = static_cast<T>(tiles.one);
    const long long stride = tiles.element_stride, size = static_cast<long long>(tiles.rows * sizeof(T));
    bool left = false;
    if (count == 8 && misalignment(line, 16) == 0 && stride % 16 == 0 && at + 16 <= size) {
        const Bytes<T> bytes = window.earlier(0);
        unsigned char *to = line + at;
#pragma unroll 2
        for (unsigned i = 0; i < 8; i++, to += stride) {
            store_vector(reinterpret_cast<uint4 *>(to), vector_of(bytes, i, one));
        }
    } else if (at >= 16 && at + 16 <= size) {
        // Each line begins its vectors elsewhere.
        unsigned char *to = line + at;
#pragma unroll 1
        for (unsigned i = 0; i < count; i++, to += stride) {
            const unsigned beyond = misalignment(to, 16);  // and the line: `at` is a multiple of 16
            store_vector(reinterpret_cast<uint4 *>(to - beyond), vector_of(window.earlier(beyond / sizeof(T)), i, one));
        }
    } else {
        left = count != 0 && at < size + 16;
    }
#pragma unroll 1
    for (unsigned lanes = __ballot_sync(WHOLE_WARP, left); lanes != 0; lanes &= lanes - 1) {
        const unsigned lane = 31 - __clz(lanes & (0 - lanes)), i = threadIdx.x % WARP;
        Window<T> its = window;
#pragma unroll
        for (unsigned k = 0; k < Window<T>::N; k++) its.words[k] = __shfl_sync(WHOLE_WARP, window.words[k], lane);
        const u64 first = __shfl_sync(WHOLE_WARP, reinterpret_cast<u64>(line), lane);
        const long long begin = __shfl_sync(WHOLE_WARP, at, lane);
        if (i < __shfl_sync(WHOLE_WARP, count, lane)) {
            unsigned char *to = reinterpret_cast<unsigned char *>(first) + static_cast<long long>(i) * stride;
            const unsigned beyond = misalignment(to, 16);
            const uint4 v = vector_of(its.earlier(beyond / sizeof(T)), i, one);
            store_vector(to + begin - beyond, begin - beyond, size, v);
        }
    }
}

// Columns. A thread writes a vector of each of 8 lines.
template <typename T>
__device__ __forceinline__ void unpack_tile_of_columns(const gc_tiles &tiles) {
    enum : unsigned { ROWS = Bytes<T>::ROWS };
    prefetch_burst(tiles);
    const Place place = this_place(tiles);
    const Spot spot = this_spot(tiles, place);
    const unsigned count = at_most(8, tiles.elements, spot.y * 8);
    const unsigned char *from = tiles.src + place.byte + static_cast<long long>(spot.y) * tiles.byte_stride
                              + (static_cast<long long>(spot.x) - 1) * ROWS;
    unsigned char *line = tiles.dst + place.element + static_cast<long long>(spot.y) * 8 * tiles.element_stride;
    unsigned loaded[Window<T>::LOADED] = {};
    // Bytes beside each other in either order of bits: the bits of each are turned alone.
    if (count != 0) load_words(tiles, from, loaded);
#pragma unroll
    for (unsigned k = 0; k < Window<T>::LOADED; k++) loaded[k] = in_order(loaded[k], tiles.order);
    store_lines<T>(tiles, line, count, static_cast<long long>(spot.x * 16), Window<T>(loaded));
}

// Transposed. A thread writes a vector of each of 8 lines `rounds` times, 1, 2 or 4.
template <typename T>
__device__ __forceinline__ void unpack_transposed_tile(const gc_tiles &tiles) {
    enum : unsigned { ROWS = Bytes<T>::ROWS, BEFORE = ROWS < 4 ? 4 : ROWS, LOADS = 4 };
    // Bytes of all rows of the tile and of BEFORE more in front, one group of 8 lines after the other: and a word, so
    // that neighbours lie in different banks.
    __shared__ unsigned groups[256 * ROWS + 128 * (BEFORE + 4)];
    unsigned char *bytes_of_groups = reinterpret_cast<unsigned char *>(groups);
    const unsigned log_x = tiles.log_width, x = threadIdx.x & ((1u << log_x) - 1), y = threadIdx.x >> log_x;
    const unsigned n_rows = (ROWS << log_x) + BEFORE, pitch = n_rows + 4;
    const unsigned log_words = LOG_BLOCK - 2 - log_x + tiles.rounds / 2, n_groups = 4u << log_words;
    const Place place = this_place(tiles);
    const long long first_row = (static_cast<long long>(place.across) << log_x) * ROWS;
    const long long rows = static_cast<long long>(tiles.rows), elements = static_cast<long long>(tiles.elements);
    const u64 first_group = static_cast<u64>(place.along) * n_groups;
    const unsigned char *src = tiles.src + place.byte;
    const bool joined = tiles.mode == JOINED;

    // A piece is a word of a row. Rows and words that are not there: others in their place, which nobody looks at.
    const unsigned last = (n_rows << log_words) - 1;
    const auto bits_of = [&](unsigned piece) {
        long long row = first_row - BEFORE + (piece >> log_words);
        row = row < 0 ? 0 : row < rows ? row : rows - 1;
        const u64 group = first_group + (piece & ((1u << log_words) - 1)) * 4;
        return bits_from(src + (joined ? 0 : row * tiles.row_byte_stride),
                         (joined ? row * elements : 0) + static_cast<long long>(group) * 8);
    };
    const auto put = [&](unsigned piece, unsigned word) {
        unsigned char *to = bytes_of_groups + (piece & ((1u << log_words) - 1)) * 4 * pitch + (piece >> log_words);
#pragma unroll
        for (unsigned j = 0; j < 4; j++) to[j * pitch] = static_cast<unsigned char>(word >> 8 * j);
    };
#pragma unroll 1
    for (unsigned done = threadIdx.x; done <= last; done += LOADS * BLOCK) {
        unsigned pieces[LOADS];
        Bits bits[LOADS];
        bool all = true;
#pragma unroll
        for (unsigned k = 0; k < LOADS; k++) {
            pieces[k] = done + k * BLOCK < last ? done + k * BLOCK : last;
            bits[k] = bits_of(pieces[k]);
            all &= readable(tiles, bits[k].from, 8);
        }
        if (all) {
            unsigned low[LOADS], high[LOADS];
#pragma unroll
            for (unsigned k = 0; k < LOADS; k++) {
                const unsigned *words = reinterpret_cast<const unsigned *>(bits[k].from);
                low[k] = words[0], high[k] = words[bits[k].shift ? 1 : 0];
            }
#pragma unroll
            for (unsigned k = 0; k < LOADS; k++) {
                put(pieces[k], bits_within(low[k], high[k], bits[k].shift, tiles.order));
            }
        } else {
#pragma unroll 1
            for (unsigned piece = done; piece <= last && piece < done + LOADS * BLOCK; piece += BLOCK) {
                put(piece, load_word(tiles, bits_of(piece)));
            }
        }
    }
    __syncthreads();

    const long long at = first_row * static_cast<long long>(sizeof(T)) + x * 16;
#pragma unroll 1
    for (unsigned round = 0; round < tiles.rounds; round++) {
        const unsigned number = (round << (LOG_BLOCK - log_x)) + y;
        const u64 group = first_group + number;
        const unsigned count = at_most(8, tiles.elements, group * 8);
        unsigned loaded[Window<T>::LOADED];
        const unsigned char *from = bytes_of_groups + number * pitch + BEFORE - ROWS + x * ROWS;
        if (ROWS == 2) {
            const unsigned short *pairs = reinterpret_cast<const unsigned short *>(from);
            loaded[0] = pairs[0] | static_cast<unsigned>(pairs[1]) << 16;
        } else {
#pragma unroll
            for (unsigned k = 0; k < Window<T>::LOADED; k++) loaded[k] = reinterpret_cast<const unsigned *>(from)[k];
        }
        unsigned char *line = tiles.dst + place.element + static_cast<long long>(group) * 8 * tiles.element_stride;
        store_lines<T>(tiles, line, count, at, Window<T>(loaded));
    }
}

#endif
