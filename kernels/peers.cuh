// Peer memory, and barriers in it.
#ifndef GRADCODEC_PEERS_CUH
#define GRADCODEC_PEERS_CUH

#include "tile.cuh"

// The largest number of ranks.
enum : unsigned { MOST_RANKS = 64 };

// Data of a rank about all ranks, in its own memory. The host declares it too: src/comm/transport/peers.rs.
struct gc_peers {
    u64 barriers;                        // number of barriers so far
    unsigned broken;                     // 1 after a rank missed a barrier
    unsigned world, rank, reserved;
    u64 nanoseconds;                     // timeout of a barrier
    unsigned *failure;                   // in host memory; set with `broken`: to 2 if a rank has aborted, else to 1
    unsigned char *buffers[MOST_RANKS];  // buffers of all ranks, as they are mapped here
};
SAME_LAYOUT(gc_peers)
// A buffer begins with the signals to its rank: from each rank a number for even barriers, and one for odd barriers. A
// rank that aborts stores ABORTED, no barrier's number, in all of its signals, and signals nothing later.
enum : u64 { ABORTED = ~0ull };

// Place of this rank's slot in each buffer, for data to all ranks or to each rank.
struct gc_peer_slot {
    gc_peers *peers;  // NULL: nothing is sent
    u64 at;
};
SAME_LAYOUT(gc_peer_slot)
enum : unsigned { SIGNAL = 1, WAIT = 2 };

__device__ __forceinline__ void store_signal(u64 *to, u64 number) {
#ifdef __CUDA_ARCH__
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(number) : "memory");
#else
    __atomic_store_n(to, number, __ATOMIC_RELEASE);
#endif
}
__device__ __forceinline__ u64 load_signal(const u64 *from) {
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
    return nanoseconds_of_gpu();
#endif
}

// Barrier of all ranks. All threads of one or several thread blocks call its functions; a thread block has at least
// MOST_RANKS threads. This rank signals every rank, with release semantics, and waits until every rank has signaled
// this one. The kernel counts barriers, not the host, so that a graph can be launched again. A rank can be at most one
// barrier ahead, so two alternating signals are enough; a signal counts if it is the number of this barrier. Ranks that
// share a GPU signal in one launch and wait in another, and the host orders the launches.
struct Barrier {
    gc_peers *peers;
    u64 number, patience;
    u64 *to;          // a thread's signal from this rank to rank threadIdx.x
    const u64 *from;  // signal from that rank to this one
    unsigned steps;
    bool broken;

    // Loads all that the barrier needs. `known` may be NULL: the barrier then has no steps.
    __device__ __forceinline__ Barrier(gc_peers *known, unsigned what) : peers(known), steps(known ? what : 0) {
        number = 0, patience = 0, to = nullptr, from = nullptr, broken = false;
        if (steps == 0) return;
        number = peers->barriers + 1, patience = peers->nanoseconds, broken = peers->broken;
        const unsigned rank = threadIdx.x;
        if (rank >= peers->world) return;
        const u64 parity = number % 2 * MOST_RANKS;
        to = reinterpret_cast<u64 *>(peers->buffers[rank]) + parity + peers->rank;
        from = reinterpret_cast<const u64 *>(peers->buffers[peers->rank]) + parity + rank;
    }
    // Signals. A thread block calls it after all writes that other ranks will read, and after __syncthreads().
    __device__ __forceinline__ void signal() const {
        if (steps & SIGNAL && to && !broken) store_signal(to, number);
    }
    // Waits. Returns true if a rank has not signaled in time; `mark` is then set to 1, unless it is NULL.
    __device__ __forceinline__ bool wait(unsigned *mark) const {
        bool missing = broken, aborted = false;
        if (from && !broken) {
            const u64 begin = nanoseconds_now();
            for (u64 signal; !missing && (signal = load_signal(from)) != number;) {
                // GPU clocks may step back a little.
                const u64 since = nanoseconds_now() - begin;
                aborted = signal == ABORTED;
                missing = aborted || (static_cast<long long>(since) >= 0 && since > patience);
            }
        }
        missing = __syncthreads_or(missing);
        if (!missing) return false;
        aborted = __syncthreads_or(aborted);
        if (threadIdx.x != 0) return true;
        peers->broken = 1;
        if (mark) *static_cast<volatile unsigned *>(mark) = 1;
        if (!broken) *static_cast<volatile unsigned *>(peers->failure) = aborted ? 2 : 1;
        return true;
    }
    // Returns the next barrier of the same launch.
    __device__ __forceinline__ Barrier next() const {
        Barrier other = *this;
        const long long turn = number % 2 ? -static_cast<long long>(MOST_RANKS) : +MOST_RANKS;
        other.number++;
        if (to) other.to += turn, other.from += turn;
        return other;
    }
    // Counts this barrier. One thread calls it when no thread block will read the last number any more.
    __device__ __forceinline__ void count() const { peers->barriers = number; }
    // Does all steps. One thread block calls it.
    __device__ __forceinline__ void signal_and_wait(unsigned *mark) const {
        // The signal covers what all threads of this thread block have written.
        __syncthreads();
        signal();
        // All threads have signaled before one waits.
        __syncthreads();
        if (!(steps & WAIT)) return;
        wait(mark);
        if (threadIdx.x == 0) count();
    }
};

#endif
