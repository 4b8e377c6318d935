// Copies elements of up to 8 bytes that are contiguous only in the target: a thread gathers a word of them, or a larger
// element, and writes it at once.
//
//     source    |a| | |b| | |c| | |d|          channels last to first: steps of 3
//     target    |a|b|c|d|
//
// If a short innermost loop, for example of channels, and the loop around it are contiguous in the target, x counts the
// rounds of both. `period` is then the count of the innermost loop, and its end adds `wrap` to the source's step.
#ifndef GRADCODEC_COPY_GATHER_CUH
#define GRADCODEC_COPY_GATHER_CUH

#include "copy_rows.cuh"

// Words per thread. All loads are issued before the first is used.
enum : unsigned { GATHER_ROUNDS = 4 };

template <typename T>
__device__ __forceinline__ void copy_gathered(const gc_copy &copy) {
    enum : unsigned { N = sizeof(T) < 4 ? 4 / sizeof(T) : 1, ALL = (1u << N) - 1 };
    const CopyRounds rounds = rounds_of_thread<GATHER_ROUNDS>(copy);
    const long long count = static_cast<long long>(copy.count);
    const unsigned period = static_cast<unsigned>(copy.period.by);
    Elements<T, N> x[GATHER_ROUNDS];
    unsigned there[GATHER_ROUNDS];  // a bit for each element that exists
#pragma unroll
    for (unsigned r = 0; r < GATHER_ROUNDS; r++) {
        const RowPiece piece = row_piece<N, sizeof(T)>(copy, rounds, r);
        const u64 first = piece.first < 0 ? 0 : static_cast<u64>(piece.first);
        u64 turn = first;
        unsigned place = 0;
        if (period != 0) place = static_cast<unsigned>(split(turn, copy.period));
        else turn = 0;
        const unsigned char *from = piece.from + static_cast<long long>(first) * copy.src_step
                                  + static_cast<long long>(turn) * copy.wrap;
        there[r] = 0;
#pragma unroll
        for (unsigned k = 0; k < N; k++) {
            const long long at = piece.first + k;
            if (!piece.exists || at < 0 || at >= count) continue;
            x[r].at[k] = *reinterpret_cast<const T *>(from);
            there[r] |= 1u << k;
            from += copy.src_step;
            if (++place == period) place = 0, from += copy.wrap;
        }
    }
#pragma unroll
    for (unsigned r = 0; r < GATHER_ROUNDS; r++) {
        if (there[r] == 0) continue;
        const RowPiece piece = row_piece<N, sizeof(T)>(copy, rounds, r);
        T *to = reinterpret_cast<T *>(piece.to) + piece.first;
        if (there[r] == ALL) {
            *reinterpret_cast<Elements<T, N> *>(to) = x[r];
            continue;
        }
#pragma unroll
        for (unsigned k = 0; k < N; k++) {
            if (there[r] >> k & 1) to[k] = x[r].at[k];
        }
    }
}

#endif
