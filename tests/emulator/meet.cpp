// The kernels of kernels/peers.cu on the CPU, as emulate.cpp has the others: what is pushed arrives and nothing else is
// written; a rank that has not spoken is waited for, and so long only.
//
//     g++ -std=c++17 -O1 -Iinclude -fsanitize=address,alignment -fno-sanitize-recover=alignment tests/emulator/meet.cpp
#include "device.h"

#include "../../kernels/peers.cu"

static unsigned cases, wrong;

static void hold(bool is_so, const char *what, unsigned world, unsigned at) {
    cases++;
    if (is_so) return;
    wrong++;
    printf("FAILED: %s, %u ranks, %u\n", what, world, at);
}

struct Rank {
    std::vector<uint4> send, area;
    std::vector<u64> heard = std::vector<u64>(2 * MOST_RANKS);
    gc_peers peers = {};
    unsigned mark = 0, told = 0;
};

// What each rank knows, where its buffer is what it hears, or its area.
static void introduce(std::vector<Rank> &ranks, bool by_area) {
    for (unsigned r = 0; r < ranks.size(); r++) {
        gc_peers &peers = ranks[r].peers;
        peers.world = static_cast<unsigned>(ranks.size()), peers.rank = r, peers.told = &ranks[r].told;
        for (unsigned k = 0; k < ranks.size(); k++) {
            peers.buffers[k] = by_area ? reinterpret_cast<unsigned char *>(ranks[k].area.data())
                                       : reinterpret_cast<unsigned char *>(ranks[k].heard.data());
        }
    }
}

static void fill(std::vector<uint4> &vectors, unsigned seed) {
    for (auto &vector : vectors) vector = {seed = seed * 1664525 + 1013904223, seed ^ 7, seed + 1, seed >> 3};
}

// Every rank pushes blocks of so many vectors: one for each, or the same for all.
static void push(unsigned world, unsigned vectors, bool same) {
    std::vector<Rank> ranks(world);
    for (unsigned r = 0; r < world; r++) {
        ranks[r].send.resize(same ? vectors : world * vectors);
        ranks[r].area.resize(world * vectors + 1);
        fill(ranks[r].send, 5 + r);
        fill(ranks[r].area, 99);
    }
    const uint4 behind = ranks[0].area.back();
    introduce(ranks, true);
    for (unsigned r = 0; r < world; r++) {
        gc_push call = {};
        call.from = reinterpret_cast<const unsigned char *>(ranks[r].send.data());
        call.way = {&ranks[r].peers, 16 * r * vectors};
        call.vectors = vectors, call.apart = same ? 0 : 16 * vectors;
        const unsigned a_block = THREADS * VECTORS;
        launch(world * ((vectors + a_block - 1) / a_block), THREADS, [=] { gc_peers_push(call); });
    }
    for (unsigned to = 0; to < world; to++) {
        bool right = memcmp(&ranks[to].area.back(), &behind, 16) == 0;
        for (unsigned of = 0; of < world; of++) {
            const uint4 *sent = ranks[of].send.data() + (same ? 0 : to * vectors);
            right &= memcmp(ranks[to].area.data() + of * vectors, sent, 16 * vectors) == 0;
        }
        hold(right, same ? "the same for all" : "a block for each", world, vectors);
    }
}

static void meet(std::vector<Rank> &ranks, unsigned r, unsigned steps, u64 nanoseconds) {
    Rank &rank = ranks[r];
    rank.peers.nanoseconds = nanoseconds;
    const gc_meet call = {&rank.peers, &rank.mark, steps, 0};
    launch(1, MOST_RANKS, [=] { gc_peers_meet(call); });
}

static bool is_silent(const Rank &rank) { return rank.peers.broken && rank.mark && rank.told; }

// All speak, then all listen, again and again.
static void meetings(unsigned world) {
    std::vector<Rank> ranks(world);
    introduce(ranks, false);
    for (unsigned meeting = 1; meeting < 6; meeting++) {
        for (unsigned r = 0; r < world; r++) meet(ranks, r, SPEAK, 0);
        for (unsigned r = 0; r < world; r++) {
            meet(ranks, r, LISTEN, 0);
            hold(ranks[r].peers.meetings == meeting && !ranks[r].peers.broken && !ranks[r].mark, "a meeting", world, r);
        }
    }
    // A rank that is one ahead is heard of twice.
    for (unsigned r = 0; r < world; r++) meet(ranks, r, SPEAK, 0);
    for (unsigned r = 1; r < world; r++) {
        meet(ranks, r, LISTEN, 0);
        meet(ranks, r, SPEAK, 0);
    }
    meet(ranks, 0, LISTEN, 0);
    hold(!ranks[0].peers.broken, "behind all others", world, 0);
    // Now rank 0 does not come.
    for (unsigned r = 1; r < world; r++) {
        meet(ranks, r, LISTEN, 1000000);
        hold(is_silent(ranks[r]) && ranks[r].peers.meetings == 7, "a rank that does not come", world, r);
    }
    // It comes at last; the others have gone, and say nothing any more.
    const std::vector<u64> before = ranks[0].heard;
    for (unsigned r = 1; r < world; r++) {
        ranks[r].mark = 0;
        meet(ranks, r, SPEAK | LISTEN, ~0ull);
        hold(is_silent(ranks[r]) && ranks[0].heard == before, "for good", world, r);
    }
}

// A rank that has given up pushes nothing.
static void broken() {
    uint4 from = {1, 2, 3, 4}, to = {5, 6, 7, 8};
    gc_peers peers = {};
    peers.world = 1, peers.broken = 1, peers.buffers[0] = reinterpret_cast<unsigned char *>(&to);
    gc_push call = {};
    call.from = reinterpret_cast<const unsigned char *>(&from), call.way.peers = &peers, call.vectors = 1;
    launch(1, THREADS, [=] { gc_peers_push(call); });
    hold(to.x == 5 && to.w == 8, "a push of a rank that has given up", 1, 0);
}

// A number that nobody said.
static void garbage() {
    for (u64 number : {0ull, 2ull, 3ull, ~0ull, 1ull << 32}) {
        std::vector<Rank> ranks(2);
        introduce(ranks, false);
        meet(ranks, 0, SPEAK, 0);
        ranks[0].heard[MOST_RANKS + 1] = number;  // the first meeting is odd
        meet(ranks, 0, LISTEN, 1000000);
        hold(is_silent(ranks[0]), "a number that is not due", 2, static_cast<unsigned>(number));
    }
}

// A rank that aborts is not waited for, however long others are, and nobody takes that for its time having passed.
static void aborted() {
    std::vector<Rank> ranks(3);
    introduce(ranks, false);
    for (u64 &number : ranks[0].heard) number = ABORTED;
    meet(ranks, 1, SPEAK, 0);  // one comes after that, and one never
    meet(ranks, 0, SPEAK | LISTEN, ~0ull);
    hold(is_silent(ranks[0]) && ranks[0].told == 2, "a rank that aborts", 3, 0);
    meet(ranks, 0, LISTEN, ~0ull);
    hold(ranks[0].told == 2, "for good", 3, 0);
    meet(ranks, 1, LISTEN, 1000000);
    hold(is_silent(ranks[1]) && ranks[1].told == 1, "a rank that does not come", 3, 1);
}

int main() {
    for (unsigned world : {1u, 2u, 3u, 8u, 64u}) {
        for (unsigned vectors : {1u, 4u, 255u, 1024u, 1025u, 3000u}) {
            if (world == 64 && vectors > 4) continue;
            push(world, vectors, false);
            push(world, vectors, true);
        }
        meetings(world);
    }
    broken();
    garbage();
    aborted();
    printf("%u cases of peer memory, %u wrong\n", cases, wrong);
    return wrong != 0;
}
