// Exchanges over peer memory, in two steps: each rank pushes its blocks into the buffers of the others, and then all
// ranks wait at a barrier. Data pushed before a barrier can be read after it. The codec kernels push chunks themselves
// (encode.cuh, reduce.cuh, finish.cuh; blocks_peers.cu); these kernels push everything else.
//
// No kernel reads from another GPU: a read waits for the answer, a write does not.
#include "peers.cuh"

enum : unsigned { VECTORS = 4 };  // vectors of 16 bytes per thread

// The host declares the same structs: src/cuda/peers.rs, src/comm/transport/peers.rs.

struct gc_push {
    gc_peer_slot slot;
    const unsigned char *from;  // a block for each rank, or one for all
    u64 vectors;                // 16-byte vectors of a block
    u64 apart;                  // bytes from one rank's block to the next; 0: all ranks get the same block
};
SAME_LAYOUT(gc_push)
struct gc_barrier {
    gc_peers *peers;
    unsigned *mark;
    unsigned steps, reserved;
};
SAME_LAYOUT(gc_barrier)

// Pushes a block to every rank. Reads and writes each byte once. Neighbouring thread blocks push to different ranks,
// and each rank begins with the next rank, so that no link waits for another. After a failed barrier this rank pushes
// nothing, because the others may not have noticed yet.
extern "C" __global__ void __launch_bounds__(THREADS) gc_peers_push(const __grid_constant__ gc_push call) {
    const gc_peers &peers = *call.slot.peers;
    if (peers.broken) return;
    const unsigned to = (blockIdx.x + peers.rank + 1) % peers.world;
    const u64 first = static_cast<u64>(blockIdx.x / peers.world) * (THREADS * VECTORS) + threadIdx.x;
    const uint4 *from = reinterpret_cast<const uint4 *>(call.from + to * call.apart);
    uint4 *place = reinterpret_cast<uint4 *>(peers.buffers[to] + call.slot.at);
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

// Runs a barrier of the ranks. Launch: one thread block.
extern "C" __global__ void __launch_bounds__(MOST_RANKS) gc_peers_barrier(const __grid_constant__ gc_barrier call) {
    Barrier(call.peers, call.steps).signal_and_wait(call.mark);
}
