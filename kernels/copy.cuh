// Common parts of the kernels of copy.cu: their argument, and the work of a thread block and of a thread.
//
// A copy is nested loops over elements, each with a stride on either side. The innermost loop counts x, another one y
// (its *rows*). A thread block has a tile of the two and one round of all other loops.
#ifndef GRADCODEC_COPY_CUH
#define GRADCODEC_COPY_CUH

#include "convert.cuh"
#include "divisor.cuh"

struct gc_copy_loop {
    gc_divisor count;
    long long dst_stride, src_stride;
};
SAME_LAYOUT(gc_copy_loop)

// The host declares this struct as Tiles in src/copy/cuda/launch.rs. Strides are in bytes.
struct gc_copy {
    const unsigned char *src;           // addresses of the first round, on either side
    unsigned char *dst;
    const unsigned char *begin, *end;   // range that may be read
    u64 count;                          // rounds of the innermost loop
    long long dst_step, src_step;       // its strides, if they are not the element's size
    u64 rows;                           // rounds of the loop that y counts
    long long row_dst_stride, row_src_stride;
    gc_divisor across, along;           // number of tiles along x and along y
    gc_divisor period;                  // copy_gather.cuh: rounds of the innermost of two loops that x counts, or 0
    long long wrap;                     // bytes that its end adds to the source's step
    gc_cast cast;                       // without a cast: both sizes are the element's
    unsigned log_width;                 // threads along x, as a power of 2
    unsigned down;                      // 1: a thread's rounds are consecutive along y; 0: along x
    unsigned vectors;                   // 1: source and target are equally aligned in vectors, or words
    unsigned aligned;                   // 1: every element's address is a multiple of its size
    unsigned n_outer;
    unsigned joined;                    // 1: y counts rounds of outer loops; `down`: each has a thread's rounds of rows
    gc_copy_loop outer[60];             // outermost first
};
SAME_LAYOUT(gc_copy)

enum : unsigned { COPY_THREADS = 256, LOG_COPY_THREADS = 8 };

// Tile of a thread block: its number along x and y, and the offsets of its round of the outer loops.
struct CopyPlace {
    u64 across, along;
    long long dst, src;
};
// Adds the offsets of a round of the outer loops.
__device__ __forceinline__ void add_round(const gc_copy &copy, u64 round, long long &dst, long long &src) {
#pragma unroll 1
    for (unsigned k = copy.n_outer; k-- > 0;) {
        const long long index = static_cast<long long>(split(round, copy.outer[k].count));
        dst += index * copy.outer[k].dst_stride;
        src += index * copy.outer[k].src_stride;
    }
}
__device__ __forceinline__ CopyPlace place_of_block(const gc_copy &copy) {
    u64 block = blockIdx.x;
    const u64 across = split(block, copy.across), along = split(block, copy.along);
    CopyPlace place = {across, along, 0, 0};
    if (!copy.joined) add_round(copy, block, place.dst, place.src);
    return place;
}
// Rounds of a thread: number of the first along x and y, addresses of its row, and what each further round adds.
struct CopyRounds {
    u64 x, y;
    const unsigned char *from;
    unsigned char *to;
    unsigned more_x, more_y;
    long long more_from, more_to;
};
template <unsigned ROUNDS>
__device__ __forceinline__ CopyRounds rounds_of_thread(const gc_copy &copy) {
    const CopyPlace place = place_of_block(copy);
    const unsigned width = 1u << copy.log_width, height = COPY_THREADS >> copy.log_width;
    const u64 x = (place.across * (copy.down ? 1 : +ROUNDS) << copy.log_width) + (threadIdx.x & (width - 1));
    const u64 y = place.along * (copy.down && !copy.joined ? +ROUNDS : 1) * height + (threadIdx.x >> copy.log_width);
    const long long row = copy.joined ? 0 : static_cast<long long>(y);
    long long dst = place.dst + row * copy.row_dst_stride, src = place.src + row * copy.row_src_stride;
    if (copy.joined) add_round(copy, y, dst, src);
    CopyRounds rounds = {x, y, copy.src + src, copy.dst + dst, width, 0, 0, 0};
    if (copy.down) {
        const unsigned apart = copy.joined ? 1 : height;
        rounds.more_x = 0, rounds.more_y = copy.joined ? 0 : height;
        rounds.more_from = apart * copy.row_src_stride, rounds.more_to = apart * copy.row_dst_stride;
    }
    return rounds;
}

__device__ __forceinline__ bool readable(const gc_copy &copy, const unsigned char *from, unsigned bytes) {
    return from >= copy.begin && from + bytes <= copy.end;
}

#endif
