// Tiles that reach over an end of their operand, for all modules.
//
// Contiguous memory is cut into tiles of aligned vectors of 16 bytes. At either end there may be a *ragged* tile, some
// of whose places do not exist:
//
//     places   0        first                          end          most
//              |- - - - -|=====|=====|=====|=====|==|- -|- - - - - - -|
//                a vector that begins outside        one that ends outside
//
// Vectors that lie wholly inside are loaded as in any tile. The two that lie inside only in part are put together from
// single elements, one per lane. All loads are issued before the first is used: a loop over elements, which waits for
// memory in every round, cost 2 to 6 us per call on an H200, where a whole small call takes 2.5 us.
#ifndef GRADCODEC_TILE_CUH
#define GRADCODEC_TILE_CUH

#include "gradcodec/device.cuh"
#include "layout.cuh"

using namespace gradcodec;
typedef unsigned long long u64;

enum : unsigned { LINE = 128, THREADS = 256 };  // bytes of a cache line; threads of a thread block, except in copies

// Waits for all writes of the launch before this one. With Queue::launch_pdl a launch may begin while the launch before
// it ends: its thread blocks then wait here. Before this call a thread block reads nothing that a launch writes.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next launch, if enqueued by launch_pdl(), start thread blocks where there is room, once all of this launch
// have begun. A launch that waits for other GPUs must not call it: the next launch would occupy room that another
// launch may need to end that wait.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Returns an address modulo `size`, in bytes.
__device__ __forceinline__ unsigned misalignment(const void *address, unsigned size) {
    return static_cast<unsigned>(reinterpret_cast<u64>(address)) % size;
}

// Returns the number of this thread among all threads of the launch.
__device__ __forceinline__ u64 thread_number() {
    return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Range of the places of a tile that exist.
struct Extent {
    unsigned first, end;
    // Returns true if the `count` places from `at` on exist.
    __device__ __forceinline__ bool has(unsigned at, unsigned count) const {
        return at >= first && at + count <= end;
    }
};

// Returns the extent of a tile of `most` places, whose first one is place `begin` of `count`; below 0: before place 0.
__device__ __forceinline__ Extent extent(long long begin, unsigned most, u64 count) {
    const long long left = static_cast<long long>(count) - begin;
    return {begin < 0 ? static_cast<unsigned>(-begin) : 0,
            left < 0 ? 0 : left < most ? static_cast<unsigned>(left) : most};
}

// Returns the vector from a place on if it lies wholly inside, else zeros.
template <typename T>
__device__ __forceinline__ uint4 load_inside(const T *tile, unsigned at, Extent inside) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (inside.has(at, 16 / sizeof(T))) v = *reinterpret_cast<const uint4 *>(tile + at);
    return v;
}

// Marks the first use of a value that was loaded under a condition. Without this the compiler moves the first step of
// the use, the subtraction of a rule, into the branch that loads; there it waits for memory, and delays every later
// load. On an H200 that cost signs 1.2 us per call if the destination began a byte after a cache line.
template <typename T>
__device__ __forceinline__ T from_memory(T x) {
    return static_cast<T>(in_register(x));
}
__device__ __forceinline__ u64 from_memory(u64 x) {
    return static_cast<u64>(in_register(static_cast<unsigned>(x >> 32))) << 32 | in_register(static_cast<unsigned>(x));
}

// Loads this lane's element of the vectors that lie inside only in part: the lower half of a warp loads the first
// vector, the upper half the one that ends outside. A lane without an element gets one whose bit is 0. pack_warp()
// makes the *ends* of their bits.
template <typename R, typename T = typename R::element>
__device__ __forceinline__ T load_end(const T *tile, Extent inside, unsigned lane) {
    constexpr unsigned A_VECTOR = 16 / sizeof(T), HALF = WARP / 2;
    const unsigned at = lane < HALF ? lane : inside.end / A_VECTOR * A_VECTOR + lane % HALF;
    return lane % HALF < A_VECTOR && inside.has(at, 1) ? tile[at] : R::first_zero();
}

// Returns the bits of the vector of N elements from a place on: `bits` if the vector lies wholly inside, else the half
// of `ends` with the vector's bits, else 0.
template <unsigned N>
__device__ __forceinline__ unsigned bits_inside(unsigned bits, unsigned at, Extent inside, unsigned ends) {
    if (inside.has(at, N)) return bits & ((1u << N) - 1);
    return at == 0 ? ends & 0xffff : at == inside.end / N * N ? ends >> 16 : 0;
}

// Stores the bytes of a word that lie inside.
__device__ __forceinline__ void store_inside(unsigned char *tile, unsigned at, Extent inside, unsigned word) {
    if (inside.has(at, 4)) {
        *reinterpret_cast<unsigned *>(tile + at) = word;
        return;
    }
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        if (inside.has(at + k, 1)) tile[at + k] = static_cast<unsigned char>(word >> 8 * k);
    }
}

// These functions access the bits to unpack and the unpacked elements. A few reads among many writes cost far more than
// their bytes, because memory changes direction for each. So from compute capability 9.0 on, bursts of prefetches bring
// the bits to the L2 cache. The bits stay there until they are read; written lines are evicted first.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u64 leaves_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ u64 leaves_last() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
#endif
__device__ __forceinline__ void prefetch(const unsigned char *from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;"
                 :: "l"(from), "r"(bytes), "l"(leaves_last()));
#else
    static_cast<void>(from), static_cast<void>(bytes);
#endif
}
// Prefetches with the eviction priority of plain loads.
__device__ __forceinline__ void prefetch_as_loaded(const unsigned char *from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes));
#else
    static_cast<void>(from), static_cast<void>(bytes);
#endif
}
__device__ __forceinline__ unsigned load_bits(const unsigned *from) {
#if __CUDA_ARCH__ >= 900
    unsigned word;
    asm("ld.global.nc.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(word) : "l"(from), "l"(leaves_first()));
    return word;
#else
    return *from;
#endif
}
__device__ __forceinline__ unsigned load_bits(const unsigned char *from) {
#if __CUDA_ARCH__ >= 900
    unsigned byte;
    asm("ld.global.nc.L2::cache_hint.u8 %0, [%1], %2;" : "=r"(byte) : "l"(from), "l"(leaves_first()));
    return byte;
#else
    return *from;
#endif
}
__device__ __forceinline__ void store_vector(uint4 *to, uint4 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
                 :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(leaves_first()) : "memory");
#else
    *to = v;
#endif
}

// Prefetches to the L2 cache the bits of the next group of thread blocks; the first thread blocks of a group do this at
// once. On an H200 that raised unpacking from 0.93 of a copy's speed to 0.99 for bytes and 1.05 for float32; bursts of
// half or twice the size, by fewer thread blocks or by each warp for itself gain less.
#if __CUDA_ARCH__ >= 900
template <unsigned BYTES_A_BLOCK>
__device__ __forceinline__ void prefetch_burst(const unsigned char *src, u64 bytes) {
    constexpr unsigned BURST = 4 << 20, BLOCKS = 512, SHARE = BURST / BLOCKS, GROUP = BURST / BYTES_A_BLOCK;
    const unsigned number = blockIdx.x % GROUP;
    if (threadIdx.x != 0 || number >= BLOCKS) return;
    const u64 at = (blockIdx.x / GROUP + 1ull) * BURST + number * SHARE + (16 - misalignment(src, 16)) % 16;
    if (at + SHARE > bytes) return;
    prefetch(src + at, SHARE);
}
#endif

#endif
