// Copies to shared memory that a lane issues and waits for itself: bytes in flight take no registers. They are
// asynchronous from compute capability 8.0 on.
#ifndef GRADCODEC_STAGING_CUH
#define GRADCODEC_STAGING_CUH

#include "tile.cuh"

// Keeps an address in shared memory in a register; ptxas would compute it again at each use.
template <typename T>
__device__ __forceinline__ T *shared_in_register(T *shared) {
#ifdef __CUDA_ARCH__
    void *found = __cvta_shared_to_generic(in_register(static_cast<unsigned>(__cvta_generic_to_shared(shared))));
    shared = static_cast<T *>(found);
#endif
    return shared;
}

// Copies BYTES bytes, 16, 8 or 4, which are there after the lane has waited for its group. The copy uses the L1 cache,
// for data that neighbours read too.
template <unsigned BYTES>
__device__ __forceinline__ void stage_cached(void *to, const void *from) {
#if __CUDA_ARCH__ >= 800
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(at), "l"(from), "n"(BYTES) : "memory");
#elif defined(__CUDA_ARCH__)
    if (BYTES == 16) *static_cast<uint4 *>(to) = *static_cast<const uint4 *>(from);
    else if (BYTES == 8) *static_cast<uint2 *>(to) = *static_cast<const uint2 *>(from);
    else *static_cast<unsigned *>(to) = *static_cast<const unsigned *>(from);
#else
    __pipeline_memcpy_async(to, from, BYTES, 0);
#endif
}
// Copies 16 bytes past the L1 cache. `bytes`: 16, or 0 for zeros instead.
__device__ __forceinline__ void stage_codes(unsigned char *to, const unsigned char *from, unsigned bytes) {
#if __CUDA_ARCH__ >= 800
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(bytes) : "memory");
#elif defined(__CUDA_ARCH__)
    *reinterpret_cast<uint4 *>(to) = bytes != 0 ? *reinterpret_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
#else
    __pipeline_memcpy_async(to, from, 16, 16 - bytes);
#endif
}
__device__ __forceinline__ void end_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#elif !defined(__CUDA_ARCH__)
    __pipeline_commit();
#endif
}
// Waits for all of the lane's groups except the last LATER groups.
template <unsigned LATER>
__device__ __forceinline__ void wait_for_groups() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(LATER) : "memory");
#elif !defined(__CUDA_ARCH__)
    __pipeline_wait_prior(LATER);
#endif
}

#endif
