// Memory that all ranks reach, and how they meet.
#ifndef GRADCODEC_PEERS_CUH
#define GRADCODEC_PEERS_CUH

#include "tile.cuh"

// Of so many ranks at most.
enum : unsigned { MOST_RANKS = 64 };

// What a rank knows of the others, in memory of its own. The host lays it out too: src/comm/transport/peers.rs.
struct gc_peers {
    u64 meetings;                        // how many there were
    unsigned broken;                     // whether a rank did not come to one
    unsigned world, rank, reserved;
    u64 nanoseconds;                     // how long this one waits
    unsigned *told;                      // in memory of the host, becomes 1 with `broken`, or 2: a rank has aborted
    unsigned char *buffers[MOST_RANKS];  // of all ranks, as they are mapped here
};
SAME_LAYOUT(gc_peers)
// A buffer begins with what its rank hears of the others: a number of each for an even meeting, and for an odd one. A
// rank that aborts says a number to all, in all places, that is never due; others may say theirs over it, but it says
// no other.
enum : u64 { ABORTED = ~0ull };

// Where this rank's block lies in each buffer, of what it sends to all or to each.
struct gc_way {
    gc_peers *peers;  // NULL: nothing goes to others
    u64 at;
};
SAME_LAYOUT(gc_way)
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

// A meeting, by all threads of a block, MOST_RANKS or more, or of several blocks: tells every rank that this one has
// come, with all that it did before, and waits until all have. The number of the meeting is counted here and not by the
// host, so that a graph can be launched again. A rank can be one meeting ahead, and no more, so it is heard in two
// places in turn; anything but the number that is due counts as silence. Where ranks share a GPU they speak in one
// launch and listen in another, which the host orders.
struct Meeting {
    gc_peers *peers;
    u64 number, patience;
    u64 *place;         // where a rank, one a thread, hears this one
    const u64 *heard;   // and is heard
    unsigned steps;
    bool broken;

    // Loads what it needs. `peers` may be NULL where there are no steps.
    __device__ __forceinline__ Meeting(gc_peers *known, unsigned what) : peers(known), steps(known ? what : 0) {
        number = 0, patience = 0, place = nullptr, heard = nullptr, broken = false;
        if (steps == 0) return;
        number = peers->meetings + 1, patience = peers->nanoseconds, broken = peers->broken;
        const unsigned rank = threadIdx.x;
        if (rank >= peers->world) return;
        const u64 parity = number % 2 * MOST_RANKS;
        place = reinterpret_cast<u64 *>(peers->buffers[rank]) + parity + peers->rank;
        heard = reinterpret_cast<const u64 *>(peers->buffers[peers->rank]) + parity + rank;
    }
    // By a block that knows what this rank did before, its own threads' at a barrier.
    __device__ __forceinline__ void speak() const {
        if (steps & SPEAK && place && !broken) say(place, number);
    }
    // Gives whether a rank does not come; then `mark` becomes 1, if there is one.
    __device__ __forceinline__ bool listen(unsigned *mark) const {
        bool silent = broken, aborted = false;
        if (heard && !broken) {
            const u64 begin = nanoseconds_now();
            for (u64 said; !silent && (said = hear(heard)) != number;) {
                // Clocks of GPUs may step back a little.
                const u64 since = nanoseconds_now() - begin;
                aborted = said == ABORTED;
                silent = aborted || (static_cast<long long>(since) >= 0 && since > patience);
            }
        }
        silent = __syncthreads_or(silent);
        if (!silent) return false;
        aborted = __syncthreads_or(aborted);
        if (threadIdx.x != 0) return true;
        peers->broken = 1;
        if (mark) *static_cast<volatile unsigned *>(mark) = 1;
        if (!broken) *static_cast<volatile unsigned *>(peers->told) = aborted ? 2 : 1;
        return true;
    }
    // The one behind it, of the same launch.
    __device__ __forceinline__ Meeting next() const {
        Meeting other = *this;
        const long long turn = number % 2 ? -static_cast<long long>(MOST_RANKS) : +MOST_RANKS;
        other.number++;
        if (place) other.place += turn, other.heard += turn;
        return other;
    }
    // By one thread, when nobody will look at the last number any more.
    __device__ __forceinline__ void count() const { peers->meetings = number; }
    // All of it, by one block.
    __device__ __forceinline__ void hold(unsigned *mark) const {
        // What this block has written before is told, too.
        __syncthreads();
        speak();
        // All have spoken before one listens.
        __syncthreads();
        if (!(steps & LISTEN)) return;
        listen(mark);
        if (threadIdx.x == 0) count();
    }
};

#endif
