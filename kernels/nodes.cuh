// Sums within a node: docs/NUMERICS.md 12. gc_nodes_pack writes the blocks that a rank sends to the ranks of its node;
// gc_nodes_sum adds the blocks that it has received.
#ifndef GRADCODEC_NODES_CUH
#define GRADCODEC_NODES_CUH

#include "codec.cuh"

enum : unsigned { FACTOR_WORD = 14 };     // in the header of a block
enum : unsigned { SUMS = 4 * THREADS };   // elements per thread block

// Elements that lie side by side in a segment and in a block. src/codec/plan/nodes.rs has the same struct.
struct gc_node_tile {
    u64 first;              // first element in the segment
    u64 to;                 // byte offset in the blocks of all ranks
    unsigned segment, count;
};
SAME_LAYOUT(gc_node_tile)

struct gc_node_pack {
    const gc_node_tile *tiles;
    const unsigned *headers;  // header of the block for each rank
    unsigned char *dst;
    const float *factor;
    const void **addresses;   // addresses of the segments' values, if there are more than MOST_VALUES; or NULL
    u64 n_tiles, block_bytes;
    unsigned size, reserved;  // bytes of an element
    const void *values[MOST_VALUES];
};
SAME_LAYOUT(gc_node_pack)

struct gc_node_sum {
    const unsigned char *blocks;
    float *to;
    gc_control *control;
    unsigned *report;
    u64 elements, block_bytes;
    unsigned ranks, dtype, zero, reserved;
    unsigned header[HEADER_WORDS];  // expected header of each block, except the factor
};
SAME_LAYOUT(gc_node_sum)

template <typename T>
__device__ __forceinline__ void copy_elements(unsigned char *to, const unsigned char *from, unsigned bytes) {
#pragma unroll 4
    for (unsigned i = threadIdx.x; i < bytes / sizeof(T); i += THREADS) {
        reinterpret_cast<T *>(to)[i] = reinterpret_cast<const T *>(from)[i];
    }
}

// Writes the blocks: a thread block per tile, and one per block for its header and the zeros after its values.
extern "C" __global__ void __launch_bounds__(THREADS) gc_nodes_pack(const __grid_constant__ gc_node_pack call) {
    if (blockIdx.x >= call.n_tiles) {
        const u64 rank = blockIdx.x - call.n_tiles;
        const unsigned *header = call.headers + rank * HEADER_WORDS;
        unsigned char *block = call.dst + rank * call.block_bytes;
        unsigned *words = reinterpret_cast<unsigned *>(block);
        if (threadIdx.x < HEADER_WORDS) {
            words[threadIdx.x] = threadIdx.x == FACTOR_WORD ? __float_as_uint(factor(call.factor)) : header[threadIdx.x];
        }
        const u64 elements = static_cast<u64>(header[9]) << 32 | header[8];
        for (u64 at = HEADER + elements * call.size + threadIdx.x; at < call.block_bytes; at += THREADS) block[at] = 0;
        return;
    }
    const gc_node_tile tile = call.tiles[blockIdx.x];
    const unsigned char *values = in_global_memory(
        call.addresses ? call.addresses[tile.segment] : call.values[tile.segment % MOST_VALUES]);
    const unsigned char *from = values + tile.first * call.size;
    unsigned char *to = call.dst + tile.to;
    const unsigned bytes = tile.count * call.size;
    // Vectors are copied if both addresses are multiples of 16, then the remaining elements.
    const unsigned whole = (reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to)) % 16 == 0 ? bytes / 16 * 16 : 0;
    copy_elements<uint4>(to, from, whole);
    if (call.size == 4) copy_elements<unsigned>(to + whole, from + whole, bytes - whole);
    else copy_elements<unsigned short>(to + whole, from + whole, bytes - whole);
}

// Loads four elements of a block from element `first` on; only the first `count` exist.
template <typename T>
__device__ __forceinline__ void load_values(const unsigned char *values, u64 first, unsigned count, unsigned dtype,
                                            float (&x)[4]) {
    const T *from = reinterpret_cast<const T *>(values) + first;
    T bits[4] = {};
    if (count == 4) {
        struct alignas(4 * sizeof(T)) Vector {
            T bits[4];
        };
        const Vector vector = *reinterpret_cast<const Vector *>(from);
#pragma unroll
        for (unsigned k = 0; k < 4; k++) bits[k] = vector.bits[k];
    } else {
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            if (k < count) bits[k] = from[k];
        }
    }
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        if (sizeof(T) == 4) x[k] = __uint_as_float(bits[k]);
        else x[k] = dtype == FLOAT16 ? from_f16(bits[k]) : from_bf16(bits[k]);
    }
}

// Adds the blocks of all ranks. A wrong header makes all sums +0; a lost rank makes all sums NaN.
template <typename T>
__device__ __forceinline__ void sum_blocks(const gc_node_sum &call) {
    unsigned wrong = 0;
    for (unsigned i = threadIdx.x; i < call.ranks * HEADER_WORDS; i += THREADS) {
        const unsigned rank = i / HEADER_WORDS, word = i % HEADER_WORDS;
        const unsigned got = reinterpret_cast<const unsigned *>(call.blocks + rank * call.block_bytes)[word];
        wrong |= word != FACTOR_WORD && got != call.header[word];
    }
    const bool lost = call.control->broken != 0, corrupt = __syncthreads_or(wrong) && !lost;
    const u64 first = static_cast<u64>(blockIdx.x) * SUMS + 4 * threadIdx.x;
    const u64 left = first < call.elements ? call.elements - first : 0;
    const unsigned count = left < 4 ? static_cast<unsigned>(left) : 4;
    float sums[4] = {};
    bool found = false;
    if (lost) {
#pragma unroll
        for (unsigned k = 0; k < 4; k++) sums[k] = __uint_as_float(0x7fc00000u);
    } else if (!corrupt && count != 0) {
#pragma unroll 4
        for (unsigned rank = 0; rank < call.ranks; rank++) {
            const unsigned char *block = call.blocks + rank * call.block_bytes;
            const float m = reinterpret_cast<const float *>(block)[FACTOR_WORD];
            float x[4];
            load_values<T>(block + HEADER, first, count, call.dtype, x);
#pragma unroll
            for (unsigned k = 0; k < 4; k++) {
                float v = __fmul_rn(m, x[k]);
                if (call.zero && !(is_finite(x[k]) && is_finite(v))) v = 0, found = true;
                sums[k] = rank == 0 ? v : __fadd_rn(sums[k], v);
            }
        }
    }
    if (count == 4) {
        struct alignas(16) Vector {
            float sums[4];
        };
        *reinterpret_cast<Vector *>(call.to + first) = Vector{{sums[0], sums[1], sums[2], sums[3]}};
    } else {
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            if (k < count) call.to[first + k] = sums[k];
        }
    }
    if (__any_sync(WHOLE_WARP, found) && threadIdx.x % WARP == 0) atomicOr(&call.control->found, +NONFINITE);
    if (corrupt && threadIdx.x == 0 && blockIdx.x == 0) {
        atomicOr(&call.control->found, +CORRUPT);
        if (call.report) *static_cast<volatile unsigned *>(call.report) = 1;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gc_nodes_sum(const __grid_constant__ gc_node_sum call) {
    if (call.dtype == FLOAT32) sum_blocks<unsigned>(call);
    else sum_blocks<unsigned short>(call);
}

#endif
