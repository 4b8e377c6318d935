// Rows whose elements lie side by side: element e of all rows is a *line* of memory, and lines may lie anywhere.
//
//     line 0     row 0 | row 1 | row 2 | ...
//     line 1     row 0 | row 1 | row 2 | ...
//
// The bytes of the rows lie side by side too (packing a matrix along its first axis), or each row's bytes do
// (flattening a transposed matrix). A tile is some neighbouring rows of some lines; x counts vectors of 16 bytes along
// a line. The bits of a tile, an eighth of its elements or less, are turned in shared memory.
#ifndef GRADCODEC_COLUMNS_CUH
#define GRADCODEC_COLUMNS_CUH

#include "strided.cuh"

// Packing. Reads sizeof(T), writes 1/8 byte an element.
//
// A thread loads a vector of each of LINES lines, and neighbours exchange their bits so that a word has 32 rows of one
// line. A line that begins `shift` rows behind an aligned vector has its bits so much later, and one vector more. Then
// a warp turns 32 lines of 32 rows at a time: words of 32 elements of a row.
//
// In JOINED rows a byte has the end of one row and the beginning of the next, and belongs to the latter. Tiles overlap
// by 8 lines, so that every byte lies wholly in one; the lines before line 0 are the last ones of the row before.
template <typename T>
__device__ __forceinline__ void pack_tile_of_columns(const gc_tiles &tiles) {
    enum : unsigned { ROWS = 16 / sizeof(T), TURNED = 2 * sizeof(T), LINES = TURNED < 8 ? 8 : TURNED, BATCH = 8 };
    enum : unsigned { FIELDS = LINES / TURNED, LOG_TURNED = TURNED == 2 ? 1 : TURNED == 4 ? 2 : TURNED == 8 ? 3 : 4 };
    // Words of 32 rows, a line after the other; words of 32 lines, a row after the other. One more each than there are:
    // for what is shifted in, and so that neighbours lie in different banks.
    __shared__ unsigned of_lines[512 * FIELDS], of_rows[8 * ROWS * LINES + 32 * ROWS];
    const unsigned log_x = tiles.log_width, x = threadIdx.x & ((1u << log_x) - 1), y = threadIdx.x >> log_x;
    const unsigned n_lines = LINES << (LOG_BLOCK - log_x), n_rows = ROWS << log_x;
    const unsigned log_words = log_x - LOG_TURNED, pitch = (1u << log_words) + 1, row_pitch = n_lines / 32 + 1;
    const bool joined = tiles.mode == JOINED;
    const unsigned overlap = joined ? 8 : 0;
    const Place place = this_place(tiles);
    const u64 first_row = static_cast<u64>(place.across) * n_rows;
    const long long elements = static_cast<long long>(tiles.elements);
    const long long first_line = static_cast<long long>(place.along) * (n_lines - overlap) - overlap;
    const unsigned wide = at_most(n_rows, tiles.rows, first_row) * sizeof(T);
    const Range<T> range(tiles);

    // Addresses behind the vector in which all memory begins: where lines begin, and the vectors that may be read.
    const unsigned char *memory = tiles.begin - misalignment(tiles.begin, 16);
    const u64 src = tiles.src - memory + place.element + first_row * sizeof(T), stride = tiles.element_stride;
    const u64 before = stride * tiles.elements - sizeof(T);
    const u64 low = memory == tiles.begin ? 0 : 16, high = static_cast<u64>(tiles.end - memory) / 16 * 16;
    const auto line_at = [&](long long line) { return src + line * stride + (line < 0 ? before : 0); };
    const auto vector_at = [](u64 line, unsigned x) { return (line & ~15ull) + 16 * x; };
    // Whether that vector has something of the tile, and whether it may be read.
    const auto has = [&](u64 line, unsigned x) { return 16 * x < wide + static_cast<unsigned>(line) % 16; };
    const auto is_whole = [&](u64 vector) { return vector - low < high - low; };
    const auto bits_at = [&](u64 vector) {
        if (!is_whole(vector)) return bits_one_by_one<T>(tiles, memory + vector);
        return bits_of_vector(*reinterpret_cast<const uint4 *>(memory + vector), range);
    };

    unsigned fields[FIELDS];
#pragma unroll
    for (unsigned j = 0; j < FIELDS; j++) fields[j] = 0;
#pragma unroll 1
    for (unsigned batch = 0; batch < LINES && 16 * x < wide + 15; batch += BATCH) {
        const long long first = first_line + y * LINES + batch;
        const unsigned count = first < 0 ? BATCH : at_most(BATCH, tiles.elements, first);
        if (count == 0) break;
        const u64 begin = line_at(first), last = begin + (count - 1) * stride;
        if (is_whole(vector_at(begin, x)) && is_whole(vector_at(last, x))) {
            uint4 v[BATCH];
            u64 line = begin;
#pragma unroll
            for (unsigned i = 0; i < BATCH; i++, line += i < count ? stride : 0) {
                v[i] = *reinterpret_cast<const uint4 *>(memory + vector_at(line, x));
            }
#pragma unroll
            for (unsigned i = 0; i < BATCH; i++) {
                const unsigned bits = bits_of_vector(v[i], range) & in_register(i < count ? ~0u : 0);
                fields[FIELDS == 1 ? 0 : i / TURNED] |= bits << (FIELDS == 1 ? batch + i : i) % TURNED * ROWS;
            }
            continue;
        }
        // Near the beginning or the end of memory.
        u64 line = begin;
#pragma unroll 1
        for (unsigned i = 0; i < count; i++, line += stride) {
            const unsigned bits = has(line, x) ? bits_at(vector_at(line, x)) << (batch + i) % TURNED * ROWS : 0;
#pragma unroll
            for (unsigned j = 0; j < FIELDS; j++) fields[j] |= j == (batch + i) / TURNED ? bits : 0;
        }
    }
#pragma unroll
    for (unsigned j = 0; j < FIELDS; j++) {
        const unsigned line = y * LINES + j * TURNED + x % TURNED;
        of_lines[line * pitch + x / TURNED] = transpose_fields<TURNED>(fields[j], threadIdx.x % WARP);
    }
    // The vector behind, of lines that begin between vectors.
#pragma unroll 1
    for (unsigned number = threadIdx.x; number < n_lines; number += BLOCK) {
        const u64 line = line_at(first_line + number);
        const bool exists = first_line + number < elements && has(line, 1u << log_x);
        of_lines[number * pitch + pitch - 1] = exists ? bits_at(vector_at(line, 1u << log_x)) : 0;
    }
    __syncthreads();

    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll 1
    for (unsigned k = 0; k < FIELDS; k++) {
        const unsigned turn = k * (BLOCK / WARP) + warp, group = turn >> log_words, at = turn & ((1u << log_words) - 1);
        const unsigned number = group * 32 + lane, row = at * 32 + lane;
        const unsigned *words = of_lines + number * pitch + at;
        const unsigned shift = static_cast<unsigned>(line_at(first_line + number)) % 16 / sizeof(T);
        const unsigned word = transpose_fields<32>(__funnelshift_r(words[0], words[1], shift), lane);
        if (tiles.mode != COLUMNS) {
            of_rows[row * row_pitch + group] = word;
        } else if (row * sizeof(T) < wide) {
            const u64 byte = static_cast<u64>(first_line) / 8 + group * 4;
            const unsigned bytes = in_order(word, tiles.order), count = at_most(4, tiles.bytes, byte);
            unsigned char *to = tiles.dst + place.byte + first_row + row
                              + static_cast<long long>(byte) * tiles.byte_stride;
#pragma unroll
            for (unsigned j = 0; j < 4; j++, to += tiles.byte_stride) {
                if (j < count) *to = static_cast<unsigned char>(bytes >> 8 * j);
            }
        }
    }
    if (tiles.mode == COLUMNS) return;
    __syncthreads();

    // A thread stores 4 bytes of some rows. The first byte of a row that lies wholly in the tile begins at its line
    // `begin`.
    const unsigned log_row = LOG_BLOCK - 5 - log_x + (LINES == 8 ? 3 : 4), at = threadIdx.x & ((1u << log_row) - 1);
    const unsigned most = at_most(4, (n_lines - overlap) / 8, at * 4), step = BLOCK >> log_row;
    const int left = static_cast<int>(at_most(2 * n_lines, elements - first_line, 0)) - static_cast<int>(at * 32);
    unsigned number = threadIdx.x >> log_row;
    u64 bit = joined ? (first_row + number) * tiles.elements : 0;
    unsigned char *row = tiles.dst + place.byte + (first_line >> 3) + at * 4
                       + (joined ? 0 : static_cast<long long>(first_row + number) * tiles.row_byte_stride);
#pragma unroll 1
    for (unsigned k = 0; k < ROWS * LINES / 32 && number * sizeof(T) < wide; k++, number += step) {
        const unsigned begin = -static_cast<unsigned>(bit) % 8;
        const unsigned *words = of_rows + number * row_pitch + at;
        const unsigned word = __funnelshift_r(words[0], words[1], begin);
        // The last byte of a joined row is the next row's, if that has a part of it; and what begins 8 lines before the
        // first is the row's before.
        const bool is_shared = joined && first_row + number + 1 < tiles.rows;
        const int bytes = (left - static_cast<int>(begin) + (is_shared ? 0 : 7)) >> 3;
        const Extent existing = {first_line < 0 && begin == 0 && at == 0 ? 1u : 0,
                                 bytes < 0 ? 0 : bytes < static_cast<int>(most) ? static_cast<unsigned>(bytes) : most};
        store_bytes(row + ((bit + begin) >> 3), existing, in_order(word, tiles.order));
        bit += joined ? step * tiles.elements : 0;
        row += joined ? 0 : step * tiles.row_byte_stride;
    }
}

// ---- Unpacking. Reads 1/8, writes sizeof(T) bytes an element.

// A byte for each of the rows of a vector.
template <typename T>
struct Bytes {
    enum : unsigned { ROWS = 16 / sizeof(T), WORDS = ROWS < 4 ? 1 : ROWS / 4 };
    unsigned words[WORDS];
};

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

// A thread writes a vector of each of 8 lines, of which it finds 8 bits a row in shared memory. Lines are cut at
// multiples of 32 bytes, a sector of the L2 cache: one that begins behind such an address has what lies between in the
// tile, too.
template <typename T>
__device__ __forceinline__ void unpack_tile_of_columns(const gc_tiles &tiles) {
    enum : unsigned { ROWS = Bytes<T>::ROWS, WORDS = Bytes<T>::WORDS, SECTOR = 32, BEFORE = SECTOR / sizeof(T) };
    // Bytes of all rows of the tile and of BEFORE more in front, one group of 8 lines after the other.
    __shared__ unsigned groups[128 * ROWS + 128];
    const unsigned log_x = tiles.log_width, x = threadIdx.x & ((1u << log_x) - 1), y = threadIdx.x >> log_x;
    const unsigned n_groups = BLOCK >> log_x, n_rows = (ROWS << log_x) + BEFORE, pitch = n_rows + 4;
    const Place place = this_place(tiles);
    const long long first_row = (static_cast<long long>(place.across) << log_x) * ROWS, all = first_row - BEFORE;
    const u64 first_group = static_cast<u64>(place.along) * n_groups, group = first_group + y;
    const unsigned count = at_most(8, tiles.elements, group * 8);

    const unsigned char *src = tiles.src + place.byte;
    unsigned char *bytes_of_groups = reinterpret_cast<unsigned char *>(groups);
    if (tiles.mode == COLUMNS) {
        const unsigned char *from = src + static_cast<long long>(group) * tiles.byte_stride + all;
#pragma unroll 1
        for (unsigned row = 4 * x; row < n_rows && count; row += 4u << log_x) {
            // Bytes beside each other in either order of bits: the bits of each are turned alone.
            groups[(y * pitch + row) / 4] = load_word(tiles, bits_from(from + row, 0));
        }
    } else {
        const unsigned log_row = LOG_BLOCK - 2 - log_x;
#pragma unroll 1
        for (unsigned piece = threadIdx.x; piece < n_rows << log_row; piece += BLOCK) {
            const unsigned number = piece >> log_row, at = (piece & ((1u << log_row) - 1)) * 4;
            const long long row = all + number;
            if (row < 0) continue;
            if (row >= static_cast<long long>(tiles.rows)) break;
            const bool joined = tiles.mode == JOINED;
            const long long bit = (joined ? row * static_cast<long long>(tiles.elements) : 0)
                                + static_cast<long long>(first_group + at) * 8;
            const unsigned word = load_word(tiles, bits_from(src + (joined ? 0 : row * tiles.row_byte_stride), bit));
#pragma unroll
            for (unsigned k = 0; k < 4; k++) {
                bytes_of_groups[(at + k) * pitch + number] = static_cast<unsigned char>(word >> 8 * k);
            }
        }
    }
    __syncthreads();

    const T one = static_cast<T>(tiles.one);
    unsigned char *line = tiles.dst + place.element + static_cast<long long>(group) * 8 * tiles.element_stride
                        + first_row * static_cast<long long>(sizeof(T));
#pragma unroll 1
    for (unsigned i = 0; i < count; i++, line += tiles.element_stride) {
        const unsigned beyond = misalignment(line, SECTOR);
        // The first row of this thread's vector, in the tile.
        const unsigned at = y * pitch + BEFORE + x * ROWS - beyond / sizeof(T);
        Bytes<T> bytes;
        unsigned words[WORDS + 1];
#pragma unroll
        for (unsigned k = 0; k <= WORDS; k++) words[k] = groups[at / 4 + k];
#pragma unroll
        for (unsigned k = 0; k < WORDS; k++) bytes.words[k] = __funnelshift_r(words[k], words[k + 1], at % 4 * 8);
        const long long begin = (first_row + x * ROWS) * static_cast<long long>(sizeof(T)) - beyond;
        store_vector(line - beyond + 16 * x, begin, tiles.rows * sizeof(T), vector_of(bytes, i, one));
    }
}

#endif
