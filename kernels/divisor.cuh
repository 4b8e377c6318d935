// Division by numbers of the host, for all modules.
#ifndef GRADCODEC_DIVISOR_CUH
#define GRADCODEC_DIVISOR_CUH

#include "layout.cuh"

// Number to divide by; the host declares the same struct: src/cuda/divisor.rs.
struct gc_divisor {
    unsigned long long by;
    unsigned long long reciprocal;  // floor((2^64 - 1) / by)
};
SAME_LAYOUT(gc_divisor)

// Returns the quotient of a value below 2^63, by a multiplication instead of the 100 instructions of a division.
__device__ __forceinline__ unsigned long long quotient(unsigned long long value, const gc_divisor &divisor) {
    const unsigned long long low = __umul64hi(value, divisor.reciprocal);  // the quotient, or one less
    return value - low * divisor.by >= divisor.by ? low + 1 : low;
}

// Divides in place and returns the remainder.
__device__ __forceinline__ unsigned long long split(unsigned long long &value, const gc_divisor &divisor) {
    unsigned long long low = __umul64hi(value, divisor.reciprocal), rest = value - low * divisor.by;
    if (rest >= divisor.by) low++, rest -= divisor.by;
    value = low;
    return rest;
}

#endif
