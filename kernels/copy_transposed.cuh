// Copies transposed matrices: the target is contiguous along x, the source along y. A thread block reads a tile line by
// line, along y, and writes it row by row, along x. Shared memory has the tile in the order of the target.
//
//     source    y ->               shared memory and target    x ->
//       x       line of tile         y   row of tile
//       |       line of tile         |   row of tile
#ifndef GRADCODEC_COPY_TRANSPOSED_CUH
#define GRADCODEC_COPY_TRANSPOSED_CUH

#include "copy.cuh"

// Sizes of a tile of elements of SIZE bytes in the target: SIDE in elements, PITCH in bytes from one row to the next.
// PITCH is an odd number of words, or of larger elements, so that elements below each other are in different banks.
template <unsigned SIZE, unsigned SIDE_>
struct Tile {
    enum : unsigned { SIDE = SIDE_, UNIT = SIZE < 4 ? 4 : SIZE, PITCH = SIDE * SIZE + UNIT, BYTES = SIDE * PITCH };
};

// A thread block's part of the matrix: addresses of its first element, and the number of existing lines and rows.
struct Matrix {
    const unsigned char *from;
    unsigned char *to;
    unsigned lines, rows;
};
__device__ __forceinline__ unsigned at_most_side(unsigned side, u64 count, u64 first) {
    return first >= count ? 0 : count - first < side ? static_cast<unsigned>(count - first) : side;
}
// Returns a thread block's part. x, the innermost loop, counts lines, y rows: tiles along x are `across`.
template <unsigned SIDE>
__device__ __forceinline__ Matrix matrix_of_block(const gc_copy &copy) {
    const CopyPlace place = place_of_block(copy);
    const u64 line = place.across * SIDE, row = place.along * SIDE;
    return {copy.src + place.src + static_cast<long long>(line) * copy.src_step
                + static_cast<long long>(row) * copy.row_src_stride,
            copy.dst + place.dst + static_cast<long long>(row) * copy.row_dst_stride
                + static_cast<long long>(line) * copy.dst_step,
            at_most_side(SIDE, copy.count, line), at_most_side(SIDE, copy.rows, row)};
}

// ---- Writing

// Stores bytes `first` to `end` of a word, the lowest at `to`, which is aligned.
__device__ __forceinline__ void store_part(unsigned char *to, unsigned first, unsigned end, unsigned word) {
    if (first == 0 && end == 4) {
        *reinterpret_cast<unsigned *>(to) = word;
        return;
    }
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        if (k >= first && k < end) to[k] = static_cast<unsigned char>(word >> 8 * k);
    }
}

// Stores small elements in aligned vectors, at any alignment of a row: with words the arithmetic took longer than
// memory. number(row) returns the place of a row in shared memory.
template <typename T, typename F>
__device__ __forceinline__ void store_vectors(const gc_copy &copy, const Matrix &matrix, const unsigned *tile, F number) {
    enum : unsigned { VECTORS = T::SIDE * sizeof(typename T::element) / 16, PITCH = T::PITCH / 4 };
    enum : unsigned { AT_ONCE = COPY_THREADS / VECTORS };
    const int bytes = static_cast<int>(matrix.lines * sizeof(typename T::element));
    const unsigned at = threadIdx.x % VECTORS;
#pragma unroll 2
    for (unsigned row = threadIdx.x / VECTORS; row < matrix.rows; row += AT_ONCE) {
        unsigned char *to = matrix.to + static_cast<long long>(row) * copy.row_dst_stride;
        const unsigned beyond = misalignment(to, 16);
        const unsigned *words = tile + number(row) * PITCH;
        // The first thread of a row also has the rest after the last whole vector.
#pragma unroll 1
        for (unsigned k = at; k < VECTORS + (beyond ? 1 : 0); k += at ? T::SIDE : +VECTORS) {
            const int begin = static_cast<int>(16 * k) - static_cast<int>(beyond), word = begin >> 2;
            const unsigned shift = 8 * (static_cast<unsigned>(begin) & 3);
            unsigned w[5];
            if (begin >= 0 && begin + 16 <= bytes) {
#pragma unroll
                for (unsigned m = 0; m < 5; m++) w[m] = words[word + m];
                *reinterpret_cast<uint4 *>(to + begin) =
                    make_uint4(__funnelshift_r(w[0], w[1], shift), __funnelshift_r(w[1], w[2], shift),
                               __funnelshift_r(w[2], w[3], shift), __funnelshift_r(w[3], w[4], shift));
                continue;
            }
#pragma unroll
            for (unsigned m = 0; m < 5; m++) {
                const int index = word + static_cast<int>(m);
                w[m] = index >= 0 && index < static_cast<int>(PITCH) ? words[index] : 0;
            }
#pragma unroll 1
            for (int place = begin; place < begin + 16; place += 4) {
                const int left = bytes - place, first = place < 0 ? -place : 0, end = left < 4 ? left : 4;
                if (first < end) {
                    store_part(to + place, static_cast<unsigned>(first), static_cast<unsigned>(end),
                               __funnelshift_r(w[0], w[1], shift));
                }
                w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = w[4];
            }
        }
    }
}

// Stores larger elements one by one, side by side across threads.
template <typename T>
__device__ __forceinline__ void store_single(const gc_copy &copy, const Matrix &matrix, const unsigned char *tile) {
    typedef typename T::element Element;
    enum : unsigned { AT_ONCE = COPY_THREADS / T::SIDE };
    const unsigned line = threadIdx.x % T::SIDE;
    if (line >= matrix.lines) return;
#pragma unroll 4
    for (unsigned row = threadIdx.x / T::SIDE; row < matrix.rows; row += AT_ONCE) {
        Element *to = reinterpret_cast<Element *>(matrix.to + static_cast<long long>(row) * copy.row_dst_stride);
        to[line] = reinterpret_cast<const Element *>(tile + row * T::PITCH)[line];
    }
}

template <typename E, unsigned SIDE_>
struct TileOf : Tile<sizeof(E), SIDE_> {
    typedef E element;
};

template <typename T>
__device__ __forceinline__ void store_tile(const gc_copy &copy, const Matrix &matrix, const unsigned char *tile,
                                           unsigned char) {
    store_vectors<T>(copy, matrix, reinterpret_cast<const unsigned *>(tile), [](unsigned row) { return row; });
}
template <typename T>
__device__ __forceinline__ void store_tile(const gc_copy &copy, const Matrix &matrix, const unsigned char *tile,
                                           unsigned short) {
    store_vectors<T>(copy, matrix, reinterpret_cast<const unsigned *>(tile), [](unsigned row) { return row; });
}
template <typename T, typename E>
__device__ __forceinline__ void store_tile(const gc_copy &copy, const Matrix &matrix, const unsigned char *tile, E) {
    store_single<T>(copy, matrix, tile);
}

// ---- Casts of single elements, side by side. C: as in convert.cuh

__device__ __forceinline__ void store_pair(unsigned short *to, unsigned short first, unsigned short second) {
    *reinterpret_cast<unsigned *>(to) = first | static_cast<unsigned>(second) << 16;
}
template <typename T>
__device__ __forceinline__ void store_pair(T *to, T only, T) {
    *to = only;
}

template <typename C, unsigned SIDE>
__device__ __forceinline__ void turn_elements(const gc_copy &copy, unsigned char *tile) {
    typedef typename C::From From;
    typedef typename C::To To;
    typedef TileOf<To, SIDE> T;
    enum : unsigned { LOADS = SIDE * SIDE / COPY_THREADS, AT_ONCE = COPY_THREADS / SIDE };
    const Matrix matrix = matrix_of_block<SIDE>(copy);
    const unsigned row = threadIdx.x % SIDE, first = threadIdx.x / SIDE;
    // 2-byte elements go to shared memory in pairs: a thread has two neighbouring lines.
    enum : unsigned { PAIR = sizeof(To) == 2 ? 2 : 1 };
    if (row < matrix.rows) {
        From x[LOADS];
#pragma unroll
        for (unsigned k = 0; k < LOADS; k++) {
            const unsigned line = (first + k / PAIR * AT_ONCE) * PAIR + k % PAIR;
            const unsigned char *from = matrix.from + static_cast<long long>(line) * copy.src_step;
            x[k] = From();
            if (line < matrix.lines) x[k] = reinterpret_cast<const From *>(from)[row];
        }
#pragma unroll
        for (unsigned k = 0; k < LOADS; k += PAIR) {
            To *to = reinterpret_cast<To *>(tile + row * T::PITCH) + (first + k / PAIR * AT_ONCE) * PAIR;
            store_pair(to, C::of(x[k]), C::of(x[k + PAIR - 1]));
        }
    }
    __syncthreads();
    store_tile<T>(copy, matrix, tile, To());
}

template <typename C>
__device__ __forceinline__ void cast_transposed(const gc_copy &copy) {
    alignas(16) __shared__ unsigned char tile[Tile<sizeof(typename C::To), 64>::BYTES];
    turn_elements<C, 64>(copy, tile);
}

// ---- Copies without a cast. Elements below 4 bytes are read in words, and transposed in registers first: shared
// memory stores a word per lane as fast as a byte.

// Transposes a square of elements that fill a word each way.
__device__ __forceinline__ void turn_square(unsigned (&words)[4]) {
    const unsigned a = __byte_perm(words[0], words[1], 0x5140), b = __byte_perm(words[2], words[3], 0x5140);
    const unsigned c = __byte_perm(words[0], words[1], 0x7362), d = __byte_perm(words[2], words[3], 0x7362);
    words[0] = __byte_perm(a, b, 0x5410), words[1] = __byte_perm(a, b, 0x7632);
    words[2] = __byte_perm(c, d, 0x5410), words[3] = __byte_perm(c, d, 0x7632);
}
__device__ __forceinline__ void turn_square(unsigned (&words)[2]) {
    const unsigned a = words[0], b = words[1];
    words[0] = __byte_perm(a, b, 0x5410), words[1] = __byte_perm(a, b, 0x7632);
}

template <typename E, unsigned SIDE>
__device__ __forceinline__ void turn_words(const gc_copy &copy, unsigned char *tile) {
    typedef TileOf<E, SIDE> T;
    enum : unsigned { SQUARE = 4 / sizeof(E), SQUARES = SIDE / SQUARE, LOG_SQUARES = 5, PITCH = T::PITCH / 4 };
    enum : unsigned { AT_ONCE = COPY_THREADS / SQUARES, ROUNDS = SQUARES / AT_ONCE };
    static_assert(SQUARES == 1u << LOG_SQUARES, "a warp has the squares of a line");
    const Matrix matrix = matrix_of_block<SIDE>(copy);
    // Rows of squares lie SQUARES apart, so that the lanes of a warp write to different banks.
    const unsigned x = threadIdx.x % SQUARES, y = threadIdx.x / SQUARES, row = x * SQUARE;
    unsigned *words_of_tile = reinterpret_cast<unsigned *>(tile);
    if (row < matrix.rows) {
        const unsigned exist = matrix.rows - row < SQUARE ? matrix.rows - row : +SQUARE;
        const unsigned char *from = matrix.from + row * sizeof(E);
        // An absent line is replaced by the last one, and not used.
        const auto line_at = [&](unsigned round, unsigned k) {
            const unsigned line = (y + round * AT_ONCE) * SQUARE + k;
            return from + static_cast<long long>(line < matrix.lines ? line : matrix.lines - 1) * copy.src_step;
        };
        const long long last = static_cast<long long>(matrix.lines - 1) * copy.src_step;
        const unsigned char *low = from + (last < 0 ? last : 0), *high = from + (last < 0 ? 0 : last);
        unsigned words[ROUNDS][SQUARE];
        if (exist == SQUARE && copy.vectors) {
#pragma unroll
            for (unsigned r = 0; r < ROUNDS; r++) {
#pragma unroll
                for (unsigned k = 0; k < SQUARE; k++) {
                    words[r][k] = *reinterpret_cast<const unsigned *>(line_at(r, k));
                }
            }
        } else if (exist == SQUARE && low - misalignment(low, 4) >= copy.begin
                   && high - misalignment(high, 4) + (misalignment(high, 4) ? 8 : 4) <= copy.end) {
            // At an aligned address the second word is not needed.
#pragma unroll
            for (unsigned r = 0; r < ROUNDS; r++) {
                unsigned next[SQUARE];
#pragma unroll
                for (unsigned k = 0; k < SQUARE; k++) {
                    const unsigned char *at = line_at(r, k);
                    const unsigned *aligned = reinterpret_cast<const unsigned *>(at - misalignment(at, 4));
                    words[r][k] = aligned[0], next[k] = aligned[misalignment(at, 4) ? 1 : 0];
                }
#pragma unroll
                for (unsigned k = 0; k < SQUARE; k++) {
                    words[r][k] = __funnelshift_r(words[r][k], next[k], 8 * misalignment(line_at(r, k), 4));
                }
            }
        } else {
#pragma unroll
            for (unsigned r = 0; r < ROUNDS; r++) {
#pragma unroll
                for (unsigned k = 0; k < SQUARE; k++) {
                    const E *at = reinterpret_cast<const E *>(line_at(r, k));
                    words[r][k] = 0;
#pragma unroll
                    for (unsigned m = 0; m < SQUARE; m++) {
                        if (m < exist) words[r][k] |= static_cast<unsigned>(at[m]) << 8 * sizeof(E) * m;
                    }
                }
            }
        }
#pragma unroll
        for (unsigned r = 0; r < ROUNDS; r++) {
            turn_square(words[r]);
#pragma unroll
            for (unsigned k = 0; k < SQUARE; k++) {
                words_of_tile[(k * SQUARES + x) * PITCH + y + r * AT_ONCE] = words[r][k];
            }
        }
    }
    __syncthreads();
    store_vectors<T>(copy, matrix, words_of_tile,
                   [](unsigned row) { return row % SQUARE * SQUARES + row / SQUARE; });
}

template <unsigned SIZE>
struct Transposition;
template <>
struct Transposition<1> {
    enum : unsigned { SIDE = 128 };
    static __device__ __forceinline__ void run(const gc_copy &copy, unsigned char *tile) {
        turn_words<unsigned char, SIDE>(copy, tile);
    }
};
template <>
struct Transposition<2> {
    enum : unsigned { SIDE = 64 };
    static __device__ __forceinline__ void run(const gc_copy &copy, unsigned char *tile) {
        turn_words<unsigned short, SIDE>(copy, tile);
    }
};
template <>
struct Transposition<4> {
    enum : unsigned { SIDE = 64 };
    static __device__ __forceinline__ void run(const gc_copy &copy, unsigned char *tile) {
        turn_elements<Same<unsigned>, SIDE>(copy, tile);
    }
};
template <>
struct Transposition<8> {
    enum : unsigned { SIDE = 32 };
    static __device__ __forceinline__ void run(const gc_copy &copy, unsigned char *tile) {
        turn_elements<Same<u64>, SIDE>(copy, tile);
    }
};
template <>
struct Transposition<16> {
    enum : unsigned { SIDE = 32 };
    static __device__ __forceinline__ void run(const gc_copy &copy, unsigned char *tile) {
        turn_elements<Same<uint4>, SIDE>(copy, tile);
    }
};

template <unsigned SIZE>
__device__ __forceinline__ void copy_transposed(const gc_copy &copy) {
    typedef Transposition<SIZE> T;
    alignas(16) __shared__ unsigned char tile[Tile<SIZE, T::SIDE>::BYTES];
    T::run(copy, tile);
}

// ---- Any cast. Tiles of 32 x 32

template <typename T, unsigned N>
__device__ __forceinline__ void load_column(const gc_copy &copy, const Matrix &matrix, unsigned row, unsigned first,
                                            unsigned apart, u64 (&x)[N]) {
    T in[N];
#pragma unroll
    for (unsigned k = 0; k < N; k++) {
        const unsigned line = first + k * apart;
        const unsigned char *from = matrix.from + static_cast<long long>(line) * copy.src_step;
        in[k] = line < matrix.lines ? reinterpret_cast<const T *>(from)[row] : T(0);
    }
#pragma unroll
    for (unsigned k = 0; k < N; k++) x[k] = in[k];
}

template <typename T>
__device__ __forceinline__ void store_cast(const gc_copy &copy, const Matrix &matrix, unsigned char *tile, unsigned row,
                                           unsigned first, unsigned apart, const u64 (&x)[4]) {
    typedef TileOf<T, 32> Shape;
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        reinterpret_cast<T *>(tile + row * Shape::PITCH)[first + k * apart] = static_cast<T>(x[k]);
    }
    __syncthreads();
    store_tile<Shape>(copy, matrix, tile, T());
}

__device__ __forceinline__ void cast_transposed_any(const gc_copy &copy) {
    enum : unsigned { SIDE = 32, APART = COPY_THREADS / SIDE };
    alignas(16) __shared__ unsigned char tile[Tile<8, SIDE>::BYTES];
    const Matrix matrix = matrix_of_block<SIDE>(copy);
    const unsigned row = threadIdx.x % SIDE, first = threadIdx.x / SIDE;
    u64 x[4] = {0, 0, 0, 0};
    if (row < matrix.rows) {
        switch (copy.cast.from_size) {
        case 1: load_column<unsigned char>(copy, matrix, row, first, APART, x); break;
        case 2: load_column<unsigned short>(copy, matrix, row, first, APART, x); break;
        case 4: load_column<unsigned>(copy, matrix, row, first, APART, x); break;
        default: load_column<u64>(copy, matrix, row, first, APART, x);
        }
    }
    convert(copy.cast, x);
    switch (copy.cast.to_size) {
    case 1: return store_cast<unsigned char>(copy, matrix, tile, row, first, APART, x);
    case 2: return store_cast<unsigned short>(copy, matrix, tile, row, first, APART, x);
    case 4: return store_cast<unsigned>(copy, matrix, tile, row, first, APART, x);
    default: return store_cast<u64>(copy, matrix, tile, row, first, APART, x);
    }
}

#endif
