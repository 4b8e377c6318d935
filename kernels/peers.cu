// Exchanges over memory that all ranks reach, in two steps: each rank pushes what it has for the others into their
// buffers, and then they meet. What was pushed before a meeting is seen after it. What a codec makes it pushes by
// itself (encode.cuh, reduce.cuh, finish.cuh; blocks_peers.cu); all else goes through these.
//
// Nothing is ever read from another GPU, for a write goes on its way where a read waits for the answer.
#include "peers.cuh"

enum : unsigned { VECTORS = 4 };  // of 16 bytes, a thread

// The structs are laid out by the host too: src/cuda/peers.rs, src/comm/transport/peers.rs.

struct gc_push {
    gc_way way;
    const unsigned char *from;  // a block for each rank, or one for all
    u64 vectors;                // of a block
    u64 apart;                  // bytes from what one rank gets to what the next one does; 0: the same
};
SAME_LAYOUT(gc_push)
struct gc_meet {
    gc_peers *peers;
    unsigned *mark;
    unsigned steps, reserved;
};
SAME_LAYOUT(gc_meet)

// Pushes a block to every rank. Reads and writes each byte once. Neighbouring blocks of threads push to different
// ranks, and each rank begins with the next one, so that no link has to wait for another. A rank that has given up
// pushes nothing, for the others do not know it yet.
extern "C" __global__ void __launch_bounds__(THREADS) gc_peers_push(const __grid_constant__ gc_push call) {
    const gc_peers &peers = *call.way.peers;
    if (peers.broken) return;
    const unsigned to = (blockIdx.x + peers.rank + 1) % peers.world;
    const u64 first = static_cast<u64>(blockIdx.x / peers.world) * (THREADS * VECTORS) + threadIdx.x;
    const uint4 *from = reinterpret_cast<const uint4 *>(call.from + to * call.apart);
    uint4 *place = reinterpret_cast<uint4 *>(peers.buffers[to] + call.way.at);
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

// A meeting: one block.
extern "C" __global__ void __launch_bounds__(MOST_RANKS) gc_peers_meet(const __grid_constant__ gc_meet call) {
    Meeting(call.peers, call.steps).hold(call.mark);
}

// Keeps a stream busy for so many nanoseconds: the allocator finds out with it whether cuMemFree waits for running
// work. Launch: 1 block of 1 thread.
extern "C" __global__ void gc_spin(u64 nanoseconds) {
    const u64 begin = nanoseconds_now();
    while (nanoseconds_now() - begin < nanoseconds) {}
}
