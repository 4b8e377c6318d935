// Division by numbers that the host knows, for all modules.
#ifndef GRADCODEC_DIVISOR_CUH
#define GRADCODEC_DIVISOR_CUH

#include "layout.cuh"

// A number to divide by, as the host lays it out: src/cuda/divisor.rs.
struct gc_divisor {
    unsigned long long by;
    unsigned long long reciprocal;  // floor((2^64 - 1) / by)
};
SAME_LAYOUT(gc_divisor)

// The quotient of a value below 2^63: a multiplication instead of the hundred instructions of a division.
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
