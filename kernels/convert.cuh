// Casts of single elements between all dtypes: the same bits as on the CPU.
//
// An element is held as 64 bits: an integer extended by its sign or by zeros, a bool as 0 or 1, float16 and bfloat16 as
// the float32 with their value, float32 and float64 as their patterns. widen() makes this form from what was read. The
// narrow functions make what is written from it; the lowest bytes are stored.
//
// Floats become integers by truncation, and saturate; a NaN becomes 0. Integers wrap. A bool is 1 if the value is not
// 0. Floats are rounded once, to nearest, ties to even. If float32 is an intermediate step, the number is rounded to
// *odd* first: the last bit then records if anything was lost. A NaN that is written has one pattern.
#ifndef GRADCODEC_CONVERT_CUH
#define GRADCODEC_CONVERT_CUH

#include "tile.cuh"

enum : unsigned { IS_UINT, IS_INT, IS_BOOL, IS_F16, IS_BF16, IS_F32, IS_F64 };

// The host declares this struct as Cast in src/copy/cuda/launch.rs. Sizes are bytes of an element.
struct gc_cast {
    unsigned from, from_size, to, to_size;
};
SAME_LAYOUT(gc_cast)

enum : unsigned { NAN_F32 = 0x7fc00000u, NAN_BF16 = 0x7fc0 };

__device__ __forceinline__ double double_of(u64 pattern) {
    return __longlong_as_double(static_cast<long long>(pattern));
}
__device__ __forceinline__ u64 pattern_of_double(double x) {
    return x != x ? 0x7ff8000000000000ull : static_cast<u64>(__double_as_longlong(x));
}
__device__ __forceinline__ float single_of(u64 pattern) {
    return __uint_as_float(static_cast<unsigned>(pattern));
}
__device__ __forceinline__ unsigned pattern_of_single(float x) {
    return __float_as_uint(canonical(x));
}

// Returns x if it is a float32, otherwise the one of the two float32 around it whose last bit is 1.
__device__ __forceinline__ float to_odd(double x) {
    const float nearest = __double2float_rn(x);
    const double back = static_cast<double>(nearest);
    const unsigned pattern = __float_as_uint(nearest);
    if (back == x || x != x || pattern & 1) return nearest;
    const bool is_beyond = x < 0 ? back < x : back > x;
    return __uint_as_float(is_beyond ? pattern - 1 : pattern + 1);
}
__device__ __forceinline__ float to_odd(u64 x) {
    const unsigned high = static_cast<unsigned>(x >> 32);
    const unsigned zeros = high ? __clz(high) : 32 + __clz(static_cast<unsigned>(x));
    if (zeros < 40) {  // more than the 24 bits of a float32
        const unsigned shift = 40 - zeros;
        const u64 kept = x >> shift;
        x = (kept | (kept << shift != x ? 1 : 0)) << shift;
    }
    return static_cast<float>(x);
}

// highest_signed() and highest_unsigned() return the largest integers of `size` bytes.
__device__ __forceinline__ long long highest_signed(unsigned size) {
    return static_cast<long long>(0x7fffffffffffffffull >> (64 - 8 * size));
}
__device__ __forceinline__ u64 highest_unsigned(unsigned size) {
    return ~0ull >> (64 - 8 * size);
}
// Truncates, and saturates at both limits. T: float or double, which hold the limits.
template <typename T>
__device__ __forceinline__ u64 to_signed(T x, unsigned size) {
    const long long highest = highest_signed(size), lowest = -highest - 1;
    if (x != x) return 0;
    if (x >= static_cast<T>(9223372036854775808.0)) return static_cast<u64>(highest);
    if (x < static_cast<T>(-9223372036854775808.0)) return static_cast<u64>(lowest);
    const long long whole = static_cast<long long>(x);
    return static_cast<u64>(whole > highest ? highest : whole < lowest ? lowest : whole);
}
template <typename T>
__device__ __forceinline__ u64 to_unsigned(T x, unsigned size) {
    const u64 highest = highest_unsigned(size);
    if (!(x > 0)) return 0;  // a NaN, too
    if (x >= static_cast<T>(18446744073709551616.0)) return highest;
    const u64 whole = static_cast<u64>(x);
    return whole > highest ? highest : whole;
}

template <unsigned N, typename F>
__device__ __forceinline__ void each(u64 (&x)[N], F of) {
#pragma unroll
    for (unsigned k = 0; k < N; k++) x[k] = of(x[k]);
}

// Widens what was read. Only the lowest bytes count; the bytes above are 0.
template <unsigned N>
__device__ __forceinline__ void widen(const gc_cast &cast, u64 (&x)[N]) {
    const unsigned beyond = 64 - 8 * cast.from_size;
    switch (cast.from) {
    case IS_INT:
        return each(x, [=](u64 v) { return static_cast<u64>(static_cast<long long>(v << beyond) >> beyond); });
    case IS_BOOL: return each(x, [](u64 v) -> u64 { return v != 0; });
    case IS_F16: return each(x, [](u64 v) -> u64 { return __float_as_uint(from_f16(static_cast<unsigned short>(v))); });
    case IS_BF16: return each(x, [](u64 v) { return v << 16; });
    default: return;
    }
}

// The kinds are the same for a whole launch, so each choice is made once for all N.
template <unsigned N>
__device__ __forceinline__ void narrow_integers(const gc_cast &cast, u64 (&x)[N]) {
    const bool is_signed = cast.from == IS_INT;
    const auto odd = [=](u64 v) {
        const bool is_negative = is_signed && static_cast<long long>(v) < 0;
        const float magnitude = to_odd(is_negative ? 0 - v : v);
        return is_negative ? -magnitude : magnitude;
    };
    switch (cast.to) {
    case IS_BOOL: return each(x, [](u64 v) -> u64 { return v != 0; });
    case IS_F16: return each(x, [=](u64 v) -> u64 { return to_f16(odd(v)); });
    case IS_BF16: return each(x, [=](u64 v) -> u64 { return to_bf16(odd(v)); });
    case IS_F32:
        return each(x, [=](u64 v) -> u64 {
            return __float_as_uint(is_signed ? static_cast<float>(static_cast<long long>(v)) : static_cast<float>(v));
        });
    case IS_F64:
        return each(x, [=](u64 v) -> u64 {
            return pattern_of_double(is_signed ? static_cast<double>(static_cast<long long>(v)) : static_cast<double>(v));
        });
    default: return;
    }
}
template <unsigned N>
__device__ __forceinline__ void narrow_singles(const gc_cast &cast, u64 (&x)[N]) {
    const unsigned size = cast.to_size;
    switch (cast.to) {
    case IS_UINT: return each(x, [=](u64 v) { return to_unsigned(single_of(v), size); });
    case IS_INT: return each(x, [=](u64 v) { return to_signed(single_of(v), size); });
    case IS_BOOL: return each(x, [](u64 v) -> u64 { return single_of(v) != 0; });
    case IS_F16: return each(x, [](u64 v) -> u64 { return to_f16(single_of(v)); });
    case IS_BF16: return each(x, [](u64 v) -> u64 { return to_bf16(single_of(v)); });
    case IS_F32: return each(x, [](u64 v) -> u64 { return pattern_of_single(single_of(v)); });
    default: return each(x, [](u64 v) { return pattern_of_double(static_cast<double>(single_of(v))); });
    }
}
template <unsigned N>
__device__ __forceinline__ void narrow_doubles(const gc_cast &cast, u64 (&x)[N]) {
    const unsigned size = cast.to_size;
    switch (cast.to) {
    case IS_UINT: return each(x, [=](u64 v) { return to_unsigned(double_of(v), size); });
    case IS_INT: return each(x, [=](u64 v) { return to_signed(double_of(v), size); });
    case IS_BOOL: return each(x, [](u64 v) -> u64 { return double_of(v) != 0; });
    case IS_F16: return each(x, [](u64 v) -> u64 { return to_f16(to_odd(double_of(v))); });
    case IS_BF16: return each(x, [](u64 v) -> u64 { return to_bf16(to_odd(double_of(v))); });
    case IS_F32: return each(x, [](u64 v) -> u64 { return pattern_of_single(__double2float_rn(double_of(v))); });
    default: return;
    }
}

template <unsigned N>
__device__ __forceinline__ void convert(const gc_cast &cast, u64 (&x)[N]) {
    widen(cast, x);
    if (cast.from == IS_F64) narrow_doubles(cast, x);
    else if (cast.from >= IS_F16) narrow_singles(cast, x);
    else narrow_integers(cast, x);
}

// Cast that changes nothing.
template <typename T>
struct Same {
    typedef T From;
    typedef T To;
    static __device__ __forceinline__ T of(T x) { return x; }
};

// Common casts, which have their own kernels.
struct F32ToBF16 {
    typedef unsigned From;
    typedef unsigned short To;
    static __device__ __forceinline__ To of(From x) { return to_bf16(__uint_as_float(x)); }
};
struct F32ToF16 {
    typedef unsigned From;
    typedef unsigned short To;
    static __device__ __forceinline__ To of(From x) { return to_f16(__uint_as_float(x)); }
};
struct BF16ToF32 {
    typedef unsigned short From;
    typedef unsigned To;
    static __device__ __forceinline__ To of(From x) { return pattern_of_single(from_bf16(x)); }
};
struct F16ToF32 {
    typedef unsigned short From;
    typedef unsigned To;
    static __device__ __forceinline__ To of(From x) { return pattern_of_single(from_f16(x)); }
};
struct F64ToF32 {
    typedef u64 From;
    typedef unsigned To;
    static __device__ __forceinline__ To of(From x) { return pattern_of_single(__double2float_rn(double_of(x))); }
};
struct F32ToF64 {
    typedef unsigned From;
    typedef u64 To;
    static __device__ __forceinline__ To of(From x) {
        return pattern_of_double(static_cast<double>(__uint_as_float(x)));
    }
};

#endif
