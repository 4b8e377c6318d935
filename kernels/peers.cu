// Exchanges over memory that all ranks reach, in two steps: each rank pushes what it has for the others into their
// buffers, and then they meet. What was pushed before a meeting is seen after it.
//
// Nothing is ever read from another card, for a write goes on its way where a read waits for the answer.
#include "tile.cuh"

// So many ranks' places are given with a launch.
enum : unsigned { MOST_RANKS = 64 };
enum : unsigned { THREADS = 256, VECTORS = 4 };  // of 16 bytes, a thread

// The structs are laid out by the host too: src/backend/cuda/peers.rs.

struct gc_push {
    const unsigned char *from;           // a block for each rank, or one for all
    u64 vectors;                         // of a block
    u64 apart;                           // bytes from what one rank gets to what the next one does; 0: the same
    const unsigned *broken;              // as gc_meet has it
    unsigned world, rank;
    unsigned char *places[MOST_RANKS];   // where each rank has this one's block
};
struct gc_meet {
    u64 *meetings;                       // how many there were; this rank's alone
    unsigned *broken;                    // whether a rank did not come; this rank's alone
    unsigned *marks[2];                  // what else becomes 1 then: NULL, or for what reads the blocks, and for the host
    u64 nanoseconds;                     // how long it waits
    unsigned world, steps;
    const u64 *heard;                    // what the others say, MOST_RANKS numbers for an even meeting and an odd one
    u64 *places[MOST_RANKS];             // where each rank hears this one
};
static_assert(sizeof(gc_push) == 40 + 8 * MOST_RANKS && sizeof(gc_meet) == 56 + 8 * MOST_RANKS,
              "the host lays them out too");
enum : unsigned { SPEAK = 1, LISTEN = 2 };

__device__ __forceinline__ void say(u64 *to, u64 number) {
#ifdef __CUDA_ARCH__
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(number) : "memory");
#else
    __atomic_store_n(to, number, __ATOMIC_RELEASE);
#endif
}
__device__ __forceinline__ u64 hear(const u64 *from) {
#ifdef __CUDA_ARCH__
    u64 number;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(number) : "l"(from) : "memory");
    return number;
#else
    return __atomic_load_n(from, __ATOMIC_ACQUIRE);
#endif
}
__device__ __forceinline__ u64 nanoseconds_now() {
#ifdef __CUDA_ARCH__
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
#else
    return nanoseconds_of_card();
#endif
}

// Pushes a block to every rank. Reads and writes each byte once. Neighbouring blocks of threads push to different ranks, and
// each rank begins with the next one, so that no link has to wait for another.
// A rank that has given up pushes nothing, for the others do not know it yet.
extern "C" __global__ void __launch_bounds__(THREADS) gc_peers_push(const __grid_constant__ gc_push call) {
    if (*call.broken) return;
    const unsigned to = (blockIdx.x + call.rank + 1) % call.world;
    const u64 first = static_cast<u64>(blockIdx.x / call.world) * (THREADS * VECTORS) + threadIdx.x;
    const uint4 *from = reinterpret_cast<const uint4 *>(call.from + to * call.apart);
    uint4 *place = reinterpret_cast<uint4 *>(call.places[to]);
    uint4 vectors[VECTORS];
#pragma unroll
    for (unsigned k = 0; k < VECTORS; k++) {
        if (first + k * THREADS < call.vectors) vectors[k] = from[first + k * THREADS];
    }
#pragma unroll
    for (unsigned k = 0; k < VECTORS; k++) {
        if (first + k * THREADS < call.vectors) place[first + k * THREADS] = vectors[k];
    }
}

// Tells every rank that this one has come, with all that it did before, and waits until all have: one block. The number of
// the meeting is counted here and not by the host, so that a graph can be launched again. A rank can be one meeting
// ahead, and no more, so it is heard in two places in turn; anything but the number that is due counts as silence. Where ranks
// share a card they speak in one launch and listen in another, which the host orders.
extern "C" __global__ void __launch_bounds__(MOST_RANKS) gc_peers_meet(const __grid_constant__ gc_meet call) {
    const unsigned rank = threadIdx.x;
    const u64 meeting = *call.meetings + 1, parity = meeting % 2 * MOST_RANKS;
    const bool broken = *call.broken;
    if (call.steps & SPEAK && rank < call.world && !broken) say(call.places[rank] + parity, meeting);
    // All have spoken before one listens.
    __syncthreads();
    if (!(call.steps & LISTEN)) return;
    bool silent = broken;
    if (rank < call.world && !broken) {
        const u64 begin = nanoseconds_now();
        while (!silent && hear(call.heard + parity + rank) != meeting) {
            // Clocks of cards may step back a little.
            const u64 since = nanoseconds_now() - begin;
            silent = static_cast<long long>(since) >= 0 && since > call.nanoseconds;
        }
    }
    silent = __syncthreads_or(silent);
    if (rank != 0) return;
    *call.meetings = meeting;
    if (!silent) return;
    *call.broken = 1;
#pragma unroll
    for (unsigned k = 0; k < 2; k++) {
        if (call.marks[k]) *static_cast<volatile unsigned *>(call.marks[k]) = 1;
    }
}
