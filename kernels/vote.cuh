// The majority of votes on bits, for all modules: signs.cu votes on packed bits, reduce.cuh on payloads of
// SIGN.
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

// What a voter has.
template <unsigned N>
struct Ballot {
    unsigned word[N];
};

// Adds two bits and a third in place; the carry is what is returned.
__device__ __forceinline__ unsigned add_two(unsigned &sum, unsigned a, unsigned b) {
    const unsigned carry = (sum & a) | (sum & b) | (a & b);
    sum ^= a ^ b;
    return carry;
}

template <unsigned PLANES>
struct Count {
    unsigned plane[PLANES];
    // Adds to the count from a plane on.
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
    // Where it is `least` or more.
    __device__ __forceinline__ unsigned reaches(u64 least) const {
        unsigned reached = ~0u;
#pragma unroll
        for (unsigned p = 0; p < PLANES; p++) reached = least >> p & 1 ? plane[p] & reached : plane[p] | reached;
        return reached;
    }
};

// The bits that more than half of all voters have. `ballot(v)`: what voter v has; `turn`: sees the ballots of all
// voters, and has the second votes in an even number of them.
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

// Second votes read by themselves, a byte each, where they are few among all. `first()`: the voter in turn at the first
// of BYTES bytes; the next byte's is the next voter. `byte(v, k)`: what voter v has there at byte k.
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
