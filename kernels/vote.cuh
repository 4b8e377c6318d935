// Counts votes on bits, for all modules: signs.cu for packed bits, reduce.cuh for payloads of SIGN.
//
// A thread counts the votes on the bits of N words at once: plane p has bit p of the count of each.
//
//     votes on bit   0 1 2 3 ...          in an even number of voters the one in turn votes twice, so that there is
//     plane 0        1 0 1 1              no tie, and more than half of all votes is a majority
//     plane 1        0 1 1 0
//                    1 2 3 1  votes
#ifndef GRADCODEC_VOTE_CUH
#define GRADCODEC_VOTE_CUH

#include "tile.cuh"

// Bits of one voter.
template <unsigned N>
struct Ballot {
    unsigned word[N];
};

// Adds two bits to a third in place, and returns the carry.
__device__ __forceinline__ unsigned add_two(unsigned &sum, unsigned a, unsigned b) {
    const unsigned carry = (sum & a) | (sum & b) | (a & b);
    sum ^= a ^ b;
    return carry;
}

template <unsigned PLANES>
struct Count {
    unsigned plane[PLANES];
    // Adds votes to the count, from plane `from` on.
    __device__ __forceinline__ void add(unsigned votes, unsigned from) {
#pragma unroll
        for (unsigned p = 0; p < PLANES; p++) {
            if (p < from) continue;
            // Carries rarely go far.
            if (PLANES > 8 && votes == 0) break;
            const unsigned carry = plane[p] & votes;
            plane[p] ^= votes;
            votes = carry;
        }
    }
    __device__ __forceinline__ void add_eight(const unsigned *votes) {
        const unsigned twos[4] = {add_two(plane[0], votes[0], votes[1]), add_two(plane[0], votes[2], votes[3]),
                                  add_two(plane[0], votes[4], votes[5]), add_two(plane[0], votes[6], votes[7])};
        const unsigned fours[2] = {add_two(plane[1], twos[0], twos[1]), add_two(plane[1], twos[2], twos[3])};
        add(add_two(plane[2], fours[0], fours[1]), 3);
    }
    // Returns the bits whose count is `least` or more.
    __device__ __forceinline__ unsigned reaches(u64 least) const {
        unsigned reached = ~0u;
#pragma unroll
        for (unsigned p = 0; p < PLANES; p++) reached = least >> p & 1 ? plane[p] & reached : plane[p] | reached;
        return reached;
    }
};

// Returns the bits that more than half of all voters have. `ballot(v)` returns the bits of voter v. `turn` gets the
// ballots of all voters, and returns the second votes, if the number of voters is even.
template <unsigned PLANES, unsigned N, typename BallotOf, typename Turn>
__device__ __forceinline__ Ballot<N> elect(u64 voters, BallotOf ballot, Turn &turn) {
    Count<PLANES> counts[N];
#pragma unroll
    for (unsigned k = 0; k < N; k++) {
#pragma unroll
        for (unsigned p = 0; p < PLANES; p++) counts[k].plane[p] = 0;
    }
    const bool even = voters % 2 == 0;
#pragma unroll 1
    for (u64 first = 0; first < voters; first += 8) {
        Ballot<N> ballots[8];
#pragma unroll
        for (unsigned v = 0; v < 8; v++) {
            ballots[v] = Ballot<N>();
            if (first + v < voters) ballots[v] = ballot(first + v);
        }
#pragma unroll
        for (unsigned k = 0; k < N; k++) {
            unsigned votes[8];
#pragma unroll
            for (unsigned v = 0; v < 8; v++) votes[v] = ballots[v].word[k];
            counts[k].add_eight(votes);
        }
        if (even) {
#pragma unroll
            for (unsigned v = 0; v < 8; v++) turn.see(ballots[v]);
        }
    }
    if (even) {
        const Ballot<N> second = turn.votes();
#pragma unroll
        for (unsigned k = 0; k < N; k++) counts[k].add(second.word[k], 0);
    }
    Ballot<N> elected;
#pragma unroll
    for (unsigned k = 0; k < N; k++) elected.word[k] = counts[k].reaches(voters / 2 + 1);
    return elected;
}

// Second votes, read byte by byte, if they are few among all votes. `first()` returns the voter in turn at the first of
// BYTES bytes; the next voter is in turn at the next byte. `byte(v, k)` returns voter v's byte k.
template <unsigned BYTES, typename First, typename ByteOf>
struct TurnByByte {
    u64 voters;
    First first;
    ByteOf byte;
    __device__ __forceinline__ void see(const Ballot<1> &) {}
    __device__ __forceinline__ Ballot<1> votes() const {
        u64 voter = first();
        unsigned word = 0;
#pragma unroll
        for (unsigned k = 0; k < BYTES; k++) {
            word |= static_cast<unsigned>(byte(voter, k)) << 8 * k;
            if (++voter == voters) voter = 0;
        }
        return {{word}};
    }
};
template <unsigned BYTES, typename First, typename ByteOf>
__device__ __forceinline__ TurnByByte<BYTES, First, ByteOf> turn_by_byte(u64 voters, First first, ByteOf byte) {
    return {voters, first, byte};
}

#endif
