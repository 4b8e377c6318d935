// Copies rows that are contiguous on both sides. x counts vectors of the target, which begin at multiples of their
// size. If a row begins between two multiples, its first vector begins before it.
//
//     row           |=====================|
//     vectors   |-----|-----|-----|-----|-----|
//     x            0     1     2     3     4       0 and 4 are *ragged*: their elements are copied one by one
#ifndef GRADCODEC_COPY_ROWS_CUH
#define GRADCODEC_COPY_ROWS_CUH

#include "copy.cuh"

// Vectors per thread. All loads, or the loads of AT_ONCE rounds, are issued before the first is used.
enum : unsigned { ROW_ROUNDS = 4 };

template <typename T, unsigned N>
struct alignas(N * sizeof(T)) Elements {
    T at[N];
};

// Work on a vector: its first element, below 0 before the row, and the addresses of the row.
struct RowPiece {
    long long first;
    const unsigned char *from;
    unsigned char *to;
    bool exists, whole;
};
// Returns the work of a round on vectors of N elements of SIZE bytes.
template <unsigned N, unsigned SIZE>
__device__ __forceinline__ RowPiece row_piece(const gc_copy &copy, const CopyRounds &rounds, unsigned round) {
    const long long count = static_cast<long long>(copy.count);
    RowPiece piece;
    piece.from = rounds.from + round * rounds.more_from, piece.to = rounds.to + round * rounds.more_to;
    piece.first = static_cast<long long>((rounds.x + round * rounds.more_x) * N)
                - misalignment(piece.to, N * SIZE) / SIZE;
    piece.exists = rounds.y + round * rounds.more_y < copy.rows && piece.first < count;
    piece.whole = piece.exists && piece.first >= 0 && piece.first + N <= count;
    return piece;
}

// ---- Casts. Read one size and write the other.

template <typename C, bool ALIKE>
__device__ __forceinline__ void cast_vectors(const gc_copy &copy) {
    typedef typename C::From From;
    typedef typename C::To To;
    enum : unsigned { WIDER = sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To), N = 16 / WIDER };
    const CopyRounds rounds = rounds_of_thread<ROW_ROUNDS>(copy);
    const long long count = static_cast<long long>(copy.count);
    Elements<From, N> in[ROW_ROUNDS];
    To *to[ROW_ROUNDS];
    unsigned whole = 0, ragged = 0;
#pragma unroll
    for (unsigned r = 0; r < ROW_ROUNDS; r++) {
        const RowPiece piece = row_piece<N, sizeof(To)>(copy, rounds, r);
        const From *from = reinterpret_cast<const From *>(piece.from) + piece.first;
        to[r] = reinterpret_cast<To *>(piece.to) + piece.first;
        if (!piece.whole) {
            ragged |= piece.exists ? 1u << r : 0;
            continue;
        }
        whole |= 1u << r;
        if (ALIKE) {
            in[r] = *reinterpret_cast<const Elements<From, N> *>(from);
        } else {
#pragma unroll
            for (unsigned k = 0; k < N; k++) in[r].at[k] = from[k];
        }
    }
#pragma unroll 1
    for (unsigned r = 0; ragged >> r != 0; r++) {
        if (!(ragged >> r & 1)) continue;
        const RowPiece piece = row_piece<N, sizeof(To)>(copy, rounds, r);
        From x[N];
#pragma unroll
        for (unsigned k = 0; k < N; k++) {
            const long long at = piece.first + k;
            x[k] = at >= 0 && at < count ? reinterpret_cast<const From *>(piece.from)[at] : 0;
        }
#pragma unroll
        for (unsigned k = 0; k < N; k++) {
            const long long at = piece.first + k;
            if (at >= 0 && at < count) reinterpret_cast<To *>(piece.to)[at] = C::of(x[k]);
        }
    }
#pragma unroll
    for (unsigned r = 0; r < ROW_ROUNDS; r++) {
        if (!(whole >> r & 1)) continue;
        Elements<To, N> out;
#pragma unroll
        for (unsigned k = 0; k < N; k++) out.at[k] = C::of(in[r].at[k]);
        *reinterpret_cast<Elements<To, N> *>(to[r]) = out;
    }
}

template <typename C>
__device__ __forceinline__ void cast_rows(const gc_copy &copy) {
    if (copy.vectors) cast_vectors<C, true>(copy);
    else cast_vectors<C, false>(copy);
}

// Casts between elements of up to 4 bytes, if they have no kernel of their own, use vectors of four elements.
enum : unsigned { FOUR = 4, FOURS_ROUNDS = 2 };

__device__ __forceinline__ RowPiece piece_of_four(const gc_copy &copy, const CopyRounds &rounds, unsigned round) {
    switch (copy.cast.to_size) {
    case 1: return row_piece<FOUR, 1>(copy, rounds, round);
    case 2: return row_piece<FOUR, 2>(copy, rounds, round);
    default: return row_piece<FOUR, 4>(copy, rounds, round);
    }
}
__device__ __forceinline__ bool has(const RowPiece &piece, u64 count, unsigned k) {
    const long long at = piece.first + k;
    return piece.exists && at >= 0 && at < static_cast<long long>(count);
}

template <typename T>
__device__ __forceinline__ void load_fours(const gc_copy &copy, const RowPiece (&pieces)[FOURS_ROUNDS],
                                           u64 (&x)[FOURS_ROUNDS * FOUR]) {
    Elements<T, FOUR> in[FOURS_ROUNDS];
#pragma unroll
    for (unsigned r = 0; r < FOURS_ROUNDS; r++) {
        const T *from = reinterpret_cast<const T *>(pieces[r].from) + pieces[r].first;
        if (copy.vectors && pieces[r].whole) {
            in[r] = *reinterpret_cast<const Elements<T, FOUR> *>(from);
        } else {
#pragma unroll
            for (unsigned k = 0; k < FOUR; k++) in[r].at[k] = has(pieces[r], copy.count, k) ? from[k] : T(0);
        }
    }
#pragma unroll
    for (unsigned k = 0; k < FOURS_ROUNDS * FOUR; k++) x[k] = in[k / FOUR].at[k % FOUR];
}
template <typename T>
__device__ __forceinline__ void store_fours(const gc_copy &copy, const RowPiece (&pieces)[FOURS_ROUNDS],
                                            const u64 (&x)[FOURS_ROUNDS * FOUR]) {
#pragma unroll
    for (unsigned r = 0; r < FOURS_ROUNDS; r++) {
        T *to = reinterpret_cast<T *>(pieces[r].to) + pieces[r].first;
        if (pieces[r].whole) {
            Elements<T, FOUR> out;
#pragma unroll
            for (unsigned k = 0; k < FOUR; k++) out.at[k] = static_cast<T>(x[r * FOUR + k]);
            *reinterpret_cast<Elements<T, FOUR> *>(to) = out;
        } else {
#pragma unroll
            for (unsigned k = 0; k < FOUR; k++) {
                if (has(pieces[r], copy.count, k)) to[k] = static_cast<T>(x[r * FOUR + k]);
            }
        }
    }
}

__device__ __forceinline__ void cast_rows_any(const gc_copy &copy) {
    const CopyRounds rounds = rounds_of_thread<FOURS_ROUNDS>(copy);
    RowPiece pieces[FOURS_ROUNDS];
#pragma unroll
    for (unsigned r = 0; r < FOURS_ROUNDS; r++) pieces[r] = piece_of_four(copy, rounds, r);
    u64 x[FOURS_ROUNDS * FOUR];
    switch (copy.cast.from_size) {
    case 1: load_fours<unsigned char>(copy, pieces, x); break;
    case 2: load_fours<unsigned short>(copy, pieces, x); break;
    default: load_fours<unsigned>(copy, pieces, x);
    }
    convert(copy.cast, x);
    switch (copy.cast.to_size) {
    case 1: return store_fours<unsigned char>(copy, pieces, x);
    case 2: return store_fours<unsigned short>(copy, pieces, x);
    default: return store_fours<unsigned>(copy, pieces, x);
    }
}

// ---- Copies without a cast, for any size of an element: `count` is in bytes. Each byte is read and written once.
// Words at multiples of their size that are not equally aligned in vectors are elements, with a cast to the same type.

// 16 bytes at any address, as aligned words: four, and a fifth if the address is not aligned.
struct Shifted {
    unsigned words[5], shift;
    __device__ __forceinline__ void load(const unsigned char *from) {
        const unsigned beyond = misalignment(from, 4);
        shift = beyond * 8;
        const unsigned *aligned = reinterpret_cast<const unsigned *>(from - beyond);
#pragma unroll
        for (unsigned k = 0; k < 5; k++) words[k] = aligned[k < 4 || beyond ? k : 3];
    }
    __device__ __forceinline__ uint4 vector() const {
        return make_uint4(__funnelshift_r(words[0], words[1], shift), __funnelshift_r(words[1], words[2], shift),
                          __funnelshift_r(words[2], words[3], shift), __funnelshift_r(words[3], words[4], shift));
    }
};

// AT_ONCE: number of rounds whose loads are in flight together. Words take more registers than vectors.
template <bool ALIKE, unsigned AT_ONCE>
__device__ __forceinline__ void copy_vectors(const gc_copy &copy) {
    const CopyRounds rounds = rounds_of_thread<ROW_ROUNDS>(copy);
    const long long count = static_cast<long long>(copy.count);
#pragma unroll 1
    for (unsigned begin = 0; begin < ROW_ROUNDS; begin += AT_ONCE) {
        uint4 in[AT_ONCE];
        Shifted shifted[AT_ONCE];
        unsigned char *to[AT_ONCE];
        unsigned whole = 0, ragged = 0;
#pragma unroll
        for (unsigned r = 0; r < AT_ONCE; r++) {
            const RowPiece piece = row_piece<16, 1>(copy, rounds, begin + r);
            const unsigned char *from = piece.from + piece.first;
            to[r] = piece.to + piece.first;
            bool is_whole = piece.whole;
            if (!ALIKE) {  // the words around must be readable
                const unsigned beyond = misalignment(from, 4);
                is_whole = is_whole && readable(copy, from - beyond, beyond ? 20 : 16);
            }
            if (is_whole) {
                whole |= 1u << r;
                if (ALIKE) in[r] = *reinterpret_cast<const uint4 *>(from);
                else shifted[r].load(from);
            } else if (piece.exists) {
                ragged |= 1u << r;
            }
        }
#pragma unroll 1
        for (unsigned r = 0; ragged >> r != 0; r++) {
            if (!(ragged >> r & 1)) continue;
            const RowPiece piece = row_piece<16, 1>(copy, rounds, begin + r);
            unsigned char x[16];
#pragma unroll
            for (unsigned k = 0; k < 16; k++) {
                const long long at = piece.first + k;
                x[k] = at >= 0 && at < count ? piece.from[at] : 0;
            }
#pragma unroll
            for (unsigned k = 0; k < 16; k++) {
                const long long at = piece.first + k;
                if (at >= 0 && at < count) piece.to[at] = x[k];
            }
        }
#pragma unroll
        for (unsigned r = 0; r < AT_ONCE; r++) {
            if (whole >> r & 1) *reinterpret_cast<uint4 *>(to[r]) = ALIKE ? in[r] : shifted[r].vector();
        }
    }
}

__device__ __forceinline__ void copy_rows(const gc_copy &copy) {
    if (copy.vectors) copy_vectors<true, ROW_ROUNDS>(copy);
    else copy_vectors<false, ROW_ROUNDS / 2>(copy);
}

#endif
