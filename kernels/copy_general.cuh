// Copies elements at any strides, also with rare casts: single elements, side by side along x.
#ifndef GRADCODEC_COPY_GENERAL_CUH
#define GRADCODEC_COPY_GENERAL_CUH

#include "copy.cuh"

// Elements per thread. Casts issue all loads before the first is used.
enum : unsigned { ELEMENT_ROUNDS = 8 };

// Addresses of a round's element, if it exists.
struct ElementPiece {
    const unsigned char *from;
    unsigned char *to;
    bool exists;
};
__device__ __forceinline__ ElementPiece element_piece(const gc_copy &copy, const CopyRounds &rounds, unsigned round) {
    const u64 x = rounds.x + round * rounds.more_x;
    const long long at = static_cast<long long>(x);
    return {rounds.from + round * rounds.more_from + at * copy.src_step,
            rounds.to + round * rounds.more_to + at * copy.dst_step,
            x < copy.count && rounds.y + round * rounds.more_y < copy.rows};
}

// AT_ONCE: number of rounds whose loads are in flight together.
template <typename T, unsigned AT_ONCE>
__device__ __forceinline__ void copy_elements(const gc_copy &copy) {
    const CopyRounds rounds = rounds_of_thread<ELEMENT_ROUNDS>(copy);
#pragma unroll 1
    for (unsigned begin = 0; begin < ELEMENT_ROUNDS; begin += AT_ONCE) {
        T x[AT_ONCE];
#pragma unroll
        for (unsigned r = 0; r < AT_ONCE; r++) {
            const ElementPiece piece = element_piece(copy, rounds, begin + r);
            if (piece.exists) x[r] = *reinterpret_cast<const T *>(piece.from);
        }
#pragma unroll
        for (unsigned r = 0; r < AT_ONCE; r++) {
            const ElementPiece piece = element_piece(copy, rounds, begin + r);
            if (piece.exists) *reinterpret_cast<T *>(piece.to) = x[r];
        }
    }
}

__device__ __forceinline__ void copy_general(const gc_copy &copy) {
    switch (copy.cast.to_size) {
    case 1: return copy_elements<unsigned char, 8>(copy);
    case 2: return copy_elements<unsigned short, 8>(copy);
    case 4: return copy_elements<unsigned, 8>(copy);
    case 8: return copy_elements<u64, 4>(copy);
    default: return copy_elements<uint4, 2>(copy);
    }
}

// ---- Casts

template <typename T>
__device__ __forceinline__ void load_elements(const ElementPiece (&pieces)[ELEMENT_ROUNDS], u64 (&x)[ELEMENT_ROUNDS]) {
    T in[ELEMENT_ROUNDS];
#pragma unroll
    for (unsigned r = 0; r < ELEMENT_ROUNDS; r++) {
        in[r] = pieces[r].exists ? *reinterpret_cast<const T *>(pieces[r].from) : T(0);
    }
#pragma unroll
    for (unsigned r = 0; r < ELEMENT_ROUNDS; r++) x[r] = in[r];
}
template <typename T>
__device__ __forceinline__ void store_elements(const ElementPiece (&pieces)[ELEMENT_ROUNDS],
                                               const u64 (&x)[ELEMENT_ROUNDS]) {
#pragma unroll
    for (unsigned r = 0; r < ELEMENT_ROUNDS; r++) {
        if (pieces[r].exists) *reinterpret_cast<T *>(pieces[r].to) = static_cast<T>(x[r]);
    }
}

// load_anywhere() and store_anywhere() access elements at any address, byte by byte.
__device__ __forceinline__ void load_anywhere(const ElementPiece (&pieces)[ELEMENT_ROUNDS], unsigned size,
                                              u64 (&x)[ELEMENT_ROUNDS]) {
#pragma unroll
    for (unsigned r = 0; r < ELEMENT_ROUNDS; r++) {
        x[r] = 0;
#pragma unroll 1
        for (unsigned k = 0; pieces[r].exists && k < size; k++) x[r] |= static_cast<u64>(pieces[r].from[k]) << 8 * k;
    }
}
__device__ __forceinline__ void store_anywhere(const ElementPiece (&pieces)[ELEMENT_ROUNDS], unsigned size,
                                               const u64 (&x)[ELEMENT_ROUNDS]) {
#pragma unroll
    for (unsigned r = 0; r < ELEMENT_ROUNDS; r++) {
#pragma unroll 1
        for (unsigned k = 0; pieces[r].exists && k < size; k++) {
            pieces[r].to[k] = static_cast<unsigned char>(x[r] >> 8 * k);
        }
    }
}

__device__ __forceinline__ void cast_general(const gc_copy &copy) {
    const CopyRounds rounds = rounds_of_thread<ELEMENT_ROUNDS>(copy);
    ElementPiece pieces[ELEMENT_ROUNDS];
#pragma unroll
    for (unsigned r = 0; r < ELEMENT_ROUNDS; r++) pieces[r] = element_piece(copy, rounds, r);
    u64 x[ELEMENT_ROUNDS];
    const unsigned from_size = copy.cast.from_size, to_size = copy.cast.to_size;
    switch (copy.aligned ? from_size : 0) {
    case 0: load_anywhere(pieces, from_size, x); break;
    case 1: load_elements<unsigned char>(pieces, x); break;
    case 2: load_elements<unsigned short>(pieces, x); break;
    case 4: load_elements<unsigned>(pieces, x); break;
    default: load_elements<u64>(pieces, x);
    }
    convert(copy.cast, x);
    switch (copy.aligned ? to_size : 0) {
    case 0: return store_anywhere(pieces, to_size, x);
    case 1: return store_elements<unsigned char>(pieces, x);
    case 2: return store_elements<unsigned short>(pieces, x);
    case 4: return store_elements<unsigned>(pieces, x);
    default: return store_elements<u64>(pieces, x);
    }
}

#endif
