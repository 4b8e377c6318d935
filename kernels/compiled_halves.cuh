// float16 and bfloat16, if a parameter's dtype or a user's text needs them. They follow gradcodec/device.cuh and
// compiled.cuh. CuPy's headers have classes of these names, which are used where those headers may be included.

namespace _gc {

// Returns x if it is a float32, otherwise the one of the two float32 around it whose last bit is 1. Rounding the result
// to fewer bits is then the same as rounding x once.
__device__ __forceinline__ float to_odd(double x) {
    const float nearest = __double2float_rn(x);
    const double back = static_cast<double>(nearest);
    const unsigned pattern = __float_as_uint(nearest);
    if (back == x || x != x || pattern & 1) return nearest;
    const bool is_beyond = x < 0 ? back < x : back > x;
    return __uint_as_float(is_beyond ? pattern - 1 : pattern + 1);
}

// Defines a 16-bit float that is calculated with as float. TO and FROM are functions of device.cuh.
#define _GC_FLOAT_OF_16_BITS(NAME, TO, FROM)                                                                          \
    struct NAME {                                                                                                     \
        unsigned short bits;                                                                                          \
        NAME() = default;                                                                                             \
        __device__ __forceinline__ NAME(float x) : bits(TO(x)) {}                                                     \
        __device__ __forceinline__ NAME(double x) : bits(TO(_gc::to_odd(x))) {}                                       \
        __device__ __forceinline__ NAME(bool x) : bits(TO(static_cast<float>(x))) {}                                  \
        __device__ __forceinline__ NAME(int x) : bits(TO(_gc::to_odd(static_cast<double>(x)))) {}                     \
        __device__ __forceinline__ NAME(unsigned x) : bits(TO(_gc::to_odd(static_cast<double>(x)))) {}                \
        __device__ __forceinline__ NAME(long x) : bits(TO(_gc::to_odd(static_cast<double>(x)))) {}                    \
        __device__ __forceinline__ NAME(unsigned long x) : bits(TO(_gc::to_odd(static_cast<double>(x)))) {}           \
        __device__ __forceinline__ NAME(long long x) : bits(TO(_gc::to_odd(static_cast<double>(x)))) {}               \
        __device__ __forceinline__ NAME(unsigned long long x) : bits(TO(_gc::to_odd(static_cast<double>(x)))) {}      \
        __device__ __forceinline__ operator float() const { return FROM(bits); }                                      \
        template <typename _gc_T> __device__ __forceinline__ NAME &operator=(_gc_T x) { return *this = NAME(x); }     \
        template <typename _gc_T> __device__ __forceinline__ NAME &operator+=(_gc_T x) { return *this = *this + x; }  \
        template <typename _gc_T> __device__ __forceinline__ NAME &operator-=(_gc_T x) { return *this = *this - x; }  \
        template <typename _gc_T> __device__ __forceinline__ NAME &operator*=(_gc_T x) { return *this = *this * x; }  \
        template <typename _gc_T> __device__ __forceinline__ NAME &operator/=(_gc_T x) { return *this = *this / x; }  \
    };

}  // namespace _gc

namespace _gc_types {

#ifndef _GC_FLOAT16_IS_CUPYS
_GC_FLOAT_OF_16_BITS(float16, gradcodec::to_f16, gradcodec::from_f16)
__device__ __forceinline__ float16 min(float16 x, float16 y) { return x < y ? x : y; }
__device__ __forceinline__ float16 max(float16 x, float16 y) { return x < y ? y : x; }
#endif
#ifndef _GC_BFLOAT16_IS_CUPYS
_GC_FLOAT_OF_16_BITS(bfloat16, gradcodec::to_bf16, gradcodec::from_bf16)
__device__ __forceinline__ bfloat16 min(bfloat16 x, bfloat16 y) { return x < y ? x : y; }
__device__ __forceinline__ bfloat16 max(bfloat16 x, bfloat16 y) { return x < y ? y : x; }
#endif

}  // namespace _gc_types
