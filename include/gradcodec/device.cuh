// Device functions of GradCodec: elements to bits and bits to elements, inside kernels of your own.
//
// For nvcc, NVRTC and CuPy's RawModule; includes nothing. Compute capability 7.5 and up, C++14. The library's kernels
// are made of these functions (kernels/bits.cu). Two of them are all that most kernels need:
//
//     __global__ void step(const float *gradient, unsigned char *bits, unsigned long long n) {   // an epilogue
//         unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
//         float update = i < n ? ... : 0;              // no `if (i >= n) return;`: see below
//         gradcodec::store_bit(bits, i, n, gradcodec::sign(update), gradcodec::ORDER_BIG);       // by every lane
//     }
//
//     __global__ void apply(const unsigned char *bits, float *weight, unsigned long long n) {    // a prologue
//         unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
//         if (i < n) weight[i] += gradcodec::load_bit(bits, i, gradcodec::ORDER_BIG) ? 0.1f : -0.1f;
//     }
//
// All lanes of a warp must call store_bit(). If a lane has returned before, as after `if (i >= n) return;`, the
// behaviour is undefined: results may be wrong, or the kernel may hang. Lanes with i >= n store nothing. Any lane may
// call load_bit() alone.
//
// A *word* is 32 bits, of which the first is the least significant. Lanes exchange words; in_order() converts a word to
// the four bytes in memory, in either order.
#ifndef GRADCODEC_DEVICE_CUH
#define GRADCODEC_DEVICE_CUH

namespace gradcodec {

// Order of the bits in a byte: GC_BIT_ORDER_BIG (default of NumPy, CuPy and DeepSpeed) and GC_BIT_ORDER_LITTLE.
enum : unsigned { ORDER_BIG = 0, ORDER_LITTLE = 1 };

enum : unsigned { WARP = 32, WHOLE_WARP = 0xffffffffu };

// ---- The bit of one element. Any lane may call alone.

// Rule by which elements become bits. As unsigned integers of their width, first_zero ... first_zero + span give 0, all
// others 1. For truth, only 0 gives 0. For signs, the floats below zero give 0: as integers they are one range, from
// the smallest negative denormal to -inf. Zeros of either sign and NaN give 1. Integers also keep denormals, which some
// builds flush in floating point.
template <typename T, T FIRST_ZERO, T SPAN>
struct Rule {
    typedef T element;
    // These are functions, because compilers write a constant member into every program, as a variable of its own.
    static __device__ constexpr T first_zero() { return FIRST_ZERO; }
    static __device__ constexpr T span() { return SPAN; }
};
template <typename T>
using Truth = Rule<T, 0, 0>;
using SignF16 = Rule<unsigned short, 0x8001, 0xfc00 - 0x8001>;
using SignBF16 = Rule<unsigned short, 0x8001, 0xff80 - 0x8001>;
using SignF32 = Rule<unsigned, 0x80000001u, 0xff800000u - 0x80000001u>;
using SignF64 = Rule<unsigned long long, 0x8000000000000001ull, 0xfff0000000000000ull - 0x8000000000000001ull>;

// Returns whether x lies outside a rule's range.
template <typename T>
__device__ __forceinline__ bool outside(T x, T first_zero, T span) {
    return static_cast<T>(x - first_zero) > span;
}
template <typename R>
__device__ __forceinline__ bool bit_of(typename R::element x) {
    return outside<typename R::element>(x, R::first_zero(), R::span());
}

// Returns the sign of a value. A 16-bit float is its bit pattern: bit_of<SignF16>(pattern), bit_of<SignBF16>(pattern).
__device__ __forceinline__ bool sign(float x) {
    return bit_of<SignF32>(__float_as_uint(x));
}
__device__ __forceinline__ bool sign(double x) {
    return bit_of<SignF64>(static_cast<unsigned long long>(__double_as_longlong(x)));
}

// ---- Words and bytes. Any lane may call alone.

// Converts a word to its four bytes in memory, or back: the function is its own inverse.
__device__ __forceinline__ unsigned in_order(unsigned word, unsigned order) {
    // Selects the bytes of the word, or those of its mirror image in reverse, without a branch.
    return __byte_perm(word, __brev(word), order == ORDER_LITTLE ? 0x3210 : 0x4567);
}

// Returns bit number i of bits in memory. Any address; lanes that share a byte share the load.
__device__ __forceinline__ bool load_bit(const unsigned char *bits, unsigned long long i, unsigned order) {
    const unsigned at = static_cast<unsigned>(i) % 8;
    return (bits[i / 8] >> (order == ORDER_LITTLE ? at : 7 - at)) & 1;
}

// Returns four bits: whether each of four bytes is not zero.
__device__ __forceinline__ unsigned truth_of_bytes(unsigned bytes) {
    // The top bit of each byte is set by a carry out of the other seven, or was set before. The product adds copies 7
    // bits apart, which puts the four bits alone at the very top.
    const unsigned top = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
    return top * 0x00204081u >> 28;
}

// Returns four bits as four bytes of 0 and 1.
__device__ __forceinline__ unsigned bytes_of_bits(unsigned bits) {
    // Copies 7 bits apart put bit k at bit 8 k.
    return ((bits & 0xf) * 0x00204081u) & 0x01010101u;
}

// ---- Functions of a whole warp: all 32 lanes call together, with the same `order`. No lane may have returned before.
// Thread blocks have one dimension, a multiple of 32 threads.

// Returns to every lane a word whose bit i is lane i's bit.
__device__ __forceinline__ unsigned pack_warp(bool bit) {
    return __ballot_sync(WHOLE_WARP, bit);
}

// Stores bit number `i` of `n`: consecutive lanes hold consecutive i, lane 0 a multiple of 32. Lanes with i >= n take
// part too; past the last element bits are 0, and nothing is stored past byte (n - 1) / 8. `bits` may have any address.
__device__ __forceinline__ void store_bit(unsigned char *bits, unsigned long long i, unsigned long long n, bool bit,
                                          unsigned order) {
    const unsigned lane = static_cast<unsigned>(i) % WARP, word = in_order(pack_warp(bit && i < n), order);
    const unsigned long long byte = i / WARP * 4 + lane;
    if (lane < 4 && byte * 8 < n) bits[byte] = static_cast<unsigned char>(word >> 8 * lane);
}

// Stores the bits of N elements per lane, N: 2, 4, 8 or 16. Lane l holds the elements from i = first + l * N on; first
// is a multiple of 32 * N. The lowest bits of `field` are theirs, the first element's the least significant. Otherwise
// like store_bit(). An epilogue that has a float4 per lane:
//
//     unsigned field = gradcodec::sign(u.x) | gradcodec::sign(u.y) << 1;
//     field |= gradcodec::sign(u.z) << 2 | gradcodec::sign(u.w) << 3;
//     gradcodec::store_bits<4>(bits, i, n, field, gradcodec::ORDER_BIG);
template <unsigned N>
__device__ __forceinline__ void store_bits(unsigned char *bits, unsigned long long i, unsigned long long n,
                                           unsigned field, unsigned order) {
    field &= i >= n ? 0 : n - i >= N ? (1u << N) - 1 : (1u << (n - i)) - 1;
    // Combines the bits of lanes that share a byte.
    if (N == 2) field |= __shfl_down_sync(WHOLE_WARP, field, 1) << N;
    if (N < 8) field |= __shfl_down_sync(WHOLE_WARP, field, 4 / N) << 4;
    if (i % 8 != 0) return;
    const unsigned word = in_order(field, order);
#pragma unroll
    for (unsigned k = 0; k < (N + 7) / 8; k++) {
        if (i + 8 * k < n) bits[i / 8 + k] = static_cast<unsigned char>(word >> 8 * k);
    }
}

// Transposes fields across lanes: of each N lanes, lane j receives field j of every one of them, lane i's as field i. A
// field is 32 / N bits, field 0 the least significant. N: 2, 4, 8, 16 or 32.
template <unsigned N>
__device__ __forceinline__ unsigned transpose_fields(unsigned fields, unsigned lane) {
#pragma unroll
    for (unsigned distance = 1; distance < N; distance *= 2) {
        const unsigned width = distance * (32 / N);
        // The lower `width` bits of every 2 * width.
        const unsigned lower = 0xffffffffu / ((1u << width) + 1);
        const unsigned other = __shfl_xor_sync(WHOLE_WARP, fields, distance);
        fields = lane & distance ? (fields & ~lower) | ((other >> width) & lower)
                                 : (fields & lower) | ((other << width) & ~lower);
    }
    return fields;
}

// ---- Vectors of 16 bytes, the size of one access at full speed. Any lane may call alone.

// Returns the bits of a vector, its first element's the least significant: 16, 8, 4 or 2, by the size of an element.
__device__ __forceinline__ unsigned pack_vector(uint4 v, Truth<unsigned char>) {
    return truth_of_bytes(v.x) | truth_of_bytes(v.y) << 4 | truth_of_bytes(v.z) << 8 | truth_of_bytes(v.w) << 12;
}
// Forces a value into a register. Otherwise ptxas 12.9 keeps the bits of 16-bit elements in predicates, and gathers
// some of those in the wrong byte of a register (P2R.B1): bits 2 and 4 of a vector were lost.
__device__ __forceinline__ unsigned in_register(unsigned value) {
    asm("" : "+r"(value));
    return value;
}
template <unsigned short FIRST_ZERO, unsigned short SPAN>
__device__ __forceinline__ unsigned pack_vector(uint4 v, Rule<unsigned short, FIRST_ZERO, SPAN>) {
    // Compares in the upper half of 32 bits, with any lower half: arithmetic in 16 bits would cost a mask each.
    constexpr unsigned first_zero = static_cast<unsigned>(FIRST_ZERO) << 16, span = static_cast<unsigned>(SPAN) << 16;
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
    unsigned bits = 0;
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        bits |= in_register(outside(words[k] << 16, first_zero, span) ? 1u << 2 * k : 0);
        bits |= in_register(outside(words[k], first_zero, span | 0xffff) ? 2u << 2 * k : 0);
    }
    return bits;
}
template <unsigned FIRST_ZERO, unsigned SPAN>
__device__ __forceinline__ unsigned pack_vector(uint4 v, Rule<unsigned, FIRST_ZERO, SPAN>) {
    return unsigned(outside(v.x, FIRST_ZERO, SPAN)) | unsigned(outside(v.y, FIRST_ZERO, SPAN)) << 1
         | unsigned(outside(v.z, FIRST_ZERO, SPAN)) << 2 | unsigned(outside(v.w, FIRST_ZERO, SPAN)) << 3;
}
template <unsigned long long FIRST_ZERO, unsigned long long SPAN>
__device__ __forceinline__ unsigned pack_vector(uint4 v, Rule<unsigned long long, FIRST_ZERO, SPAN>) {
    return unsigned(outside(static_cast<unsigned long long>(v.y) << 32 | v.x, FIRST_ZERO, SPAN))
         | unsigned(outside(static_cast<unsigned long long>(v.w) << 32 | v.z, FIRST_ZERO, SPAN)) << 1;
}

// Returns 16 bytes of elements, 0 or `one`, by the lowest bits, as pack_vector() reads them, of the type of `one`.
__device__ __forceinline__ uint4 unpack_vector(unsigned bits, unsigned char one) {
    return make_uint4(bytes_of_bits(bits) * one, bytes_of_bits(bits >> 4) * one, bytes_of_bits(bits >> 8) * one,
                      bytes_of_bits(bits >> 12) * one);
}
__device__ __forceinline__ uint4 unpack_vector(unsigned bits, unsigned short one) {
    const unsigned low = one, high = low << 16;
    return make_uint4((bits & 1 ? low : 0) | (bits & 2 ? high : 0), (bits & 4 ? low : 0) | (bits & 8 ? high : 0),
                      (bits & 16 ? low : 0) | (bits & 32 ? high : 0), (bits & 64 ? low : 0) | (bits & 128 ? high : 0));
}
__device__ __forceinline__ uint4 unpack_vector(unsigned bits, unsigned one) {
    return make_uint4(bits & 1 ? one : 0, bits & 2 ? one : 0, bits & 4 ? one : 0, bits & 8 ? one : 0);
}
__device__ __forceinline__ uint4 unpack_vector(unsigned bits, unsigned long long one) {
    const unsigned low = static_cast<unsigned>(one), high = static_cast<unsigned>(one >> 32);
    return make_uint4(bits & 1 ? low : 0, bits & 1 ? high : 0, bits & 2 ? low : 0, bits & 2 ? high : 0);
}

// ---- Signs with error feedback. docs/NUMERICS.md is the specification: these functions give the library's bits,
// scales and errors to the last bit, also if the compiler contracts a * b + c. Do not use -ftz=true (--use_fast_math),
// which loses denormals.

enum : unsigned { UNIT = 1024 };

// Returns x, but every NaN as the one pattern that is written.
__device__ __forceinline__ float canonical(float x) {
    return x != x ? __uint_as_float(0x7fc00000u) : x;
}
__device__ __forceinline__ bool is_finite(float x) {
    return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

// Returns the value of a bit: +s, or -s if the bit is 0.
__device__ __forceinline__ float signed_scale(bool bit, float s) {
    return bit ? s : -s;
}

// Loads N neighbours from element i on, a multiple of N, as +s and -s. N: 1, 2, 4 or 8. Any lane may call alone.
template <unsigned N>
__device__ __forceinline__ void load_signs(const unsigned char *bits, unsigned long long i, unsigned order, float s,
                                           float (&signs)[N]) {
    const unsigned byte = in_order(bits[i / 8], order) >> i % 8;
#pragma unroll
    for (unsigned m = 0; m < N; m++) signs[m] = signed_scale(byte >> m & 1, s);
}

// Returns the error of a number that was sent as its sign and the scale s: c - s sigma(c).
__device__ __forceinline__ float error_of(float c, float s) {
    return __fsub_rn(c, c < 0 ? -s : s);
}

// Returns the number to keep for a gradient, in one step of the handle's form, before rounding to the errors' dtype.
// `kept`: the number kept before, and `s` the scale that it was sent with.
__device__ __forceinline__ float feedback(float gradient, float kept, float s, float m_g, float m_e, float beta) {
    return __fadd_rn(__fmul_rn(m_g, gradient), __fmul_rn(beta, __fmul_rn(m_e, error_of(kept, s))));
}

// Conversions of 16-bit floats, which are passed as bit patterns.
__device__ __forceinline__ float from_bf16(unsigned short pattern) {
    return __uint_as_float(static_cast<unsigned>(pattern) << 16);
}
__device__ __forceinline__ float from_f16(unsigned short pattern) {
#ifdef __CUDA_ARCH__
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(pattern));
    return x;
#else
    // The exponent is 112 too small. The product corrects that exactly, except for Inf and NaN.
    const unsigned magnitude = (pattern & 0x7fffu) << 13, sign = (pattern & 0x8000u) << 16;
    const unsigned larger = __float_as_uint(__fmul_rn(__uint_as_float(magnitude), __uint_as_float(0x77800000u)));
    return __uint_as_float((magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : larger) | sign);
#endif
}
// Rounds to float16 once, to nearest, ties to even: Inf past its range, and a NaN to 0x7e00.
__device__ __forceinline__ unsigned short to_f16(float x) {
#ifdef __CUDA_ARCH__
    unsigned short nearest;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(nearest) : "f"(x));
    return x != x ? static_cast<unsigned short>(0x7e00) : nearest;
#else
    const unsigned pattern = __float_as_uint(x), magnitude = pattern & 0x7fffffffu;
    unsigned rounded;
    if (magnitude > 0x7f800000u) return 0x7e00;
    if (magnitude >= 0x477ff000u) {
        rounded = 0x7c00;
    } else if (magnitude < 0x38800000u) {
        // The sum with 0.5 rounds a denormal: the last place of 0.5 is the smallest denormal.
        rounded = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3f000000u;
    } else {
        rounded = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    }
    return static_cast<unsigned short>(rounded | (pattern >> 16 & 0x8000u));
#endif
}
// Rounds to bfloat16 once, to nearest, ties to even; a NaN to 0x7fc0.
__device__ __forceinline__ unsigned short to_bf16(float x) {
    const unsigned pattern = __float_as_uint(x);
    const unsigned rounded = (pattern + 0x7fffu + (pattern >> 16 & 1)) >> 16;
    return static_cast<unsigned short>(x != x ? 0x7fc0u : rounded);
}
// Rounds two floats to bfloat16, the first in the lower half. A NaN stays one, but may get any pattern.
__device__ __forceinline__ unsigned to_bf16_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return to_bf16(first) | static_cast<unsigned>(to_bf16(second)) << 16;
#endif
}

// Rounds two floats to float16; neither may be a NaN.
__device__ __forceinline__ unsigned to_f16_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return to_f16(first) | static_cast<unsigned>(to_f16(second)) << 16;
#endif
}

// Sum of a unit of 1024 elements. Lane l holds those at k * 32 * N + l * N and the N - 1 behind each, k = 0, 1, ... N:
// 1, 2, 4 or 8. The order of additions is prescribed, so that every machine gets the same sum:
//
//     UnitSum<4> sum;
//     for (k = 0; k < 8; k++) for (m = 0; m < 4; m++) sum.add(k, m, term);    unrolled; in the order of k
//     float all = sum.of_warp(lane);                                  by the whole warp; all lanes receive it
template <unsigned N>
struct UnitSum {
    // This lane's columns, of 256.
    float columns[8];
    __device__ __forceinline__ void add(unsigned k, unsigned m, float term) {
        const unsigned at = k % (8 / N) * N + m;
        columns[at] = k < 8 / N ? term : __fadd_rn(columns[at], term);
    }
    __device__ __forceinline__ float of_warp(unsigned lane) {
        // Adds halves that lie in the lane.
#pragma unroll
        for (unsigned n = 8; n > N; n /= 2) {
#pragma unroll
            for (unsigned i = 0; i < n / 2; i++) columns[i] = __fadd_rn(columns[i], columns[i + n / 2]);
        }
        // Adds halves that lie in other lanes. While a lane has several columns, each of two lanes gives one half of
        // them to the other.
        unsigned n = N;
#pragma unroll
        for (unsigned distance = 16; distance > 0; distance /= 2) {
            if (n > 1) {
                n /= 2;
                const bool upper = lane & distance;
#pragma unroll
                for (unsigned i = 0; i < (N + 1) / 2; i++) {  // no comparison with 0 where N is 1
                    if (i >= n) continue;
                    const float given = upper ? columns[i] : columns[i + n], kept = upper ? columns[i + n] : columns[i];
                    columns[i] = __fadd_rn(kept, __shfl_xor_sync(WHOLE_WARP, given, distance));
                }
            } else {
                columns[0] = __fadd_rn(columns[0], __shfl_xor_sync(WHOLE_WARP, columns[0], distance));
            }
        }
        // Adds the columns of one lane, which now lie in several lanes: the highest bit of a column's number is the
        // highest bit of the lane's.
#pragma unroll
        for (unsigned half = N / 2, distance = 16; half > 0; half /= 2, distance /= 2) {
            columns[0] = __fadd_rn(columns[0], __shfl_xor_sync(WHOLE_WARP, columns[0], distance));
        }
        return columns[0];
    }
};

// ---- Blocks: docs/NUMERICS.md 11. The bytes are the same on every GPU, with the compiler's options as above.
//
// The numbers c of a block have one scale. A lane has N of them, 1, 2, 4 or 8 neighbours, and their codes; all lanes of
// a block take part in the maximum:
//
//     const unsigned most = gradcodec::largest_of_block<gradcodec::CODEC_INT8, 2>(c);   // by the whole warp, 2 each
//     const gradcodec::BlockScale scale = gradcodec::scale_of_block<gradcodec::CODEC_INT8>(most);
//     float sent[2];
//     const gradcodec::Codes<gradcodec::CODEC_INT8, 2> codes = gradcodec::quantize<gradcodec::CODEC_INT8>(scale, c, sent);
//     codes.store(memory);                            // of this lane: N * BITS / 8 bytes, aligned to that
//     if (threadIdx.x % 32 == 0) scales[block] = scale.memory;       // unsigned short; of E8M0 unsigned char; BF16: none
//     error = c[k] - sent[k];                         // sent + error == c, unless most >= NOT_FINITE: then keep the old one
//
//     codes.load(memory);
//     gradcodec::dequantize(codes, gradcodec::scale_from_memory<gradcodec::CODEC_INT8>(scales[block]), sent);

// Values of GC_CODEC_BF16 and so on.
enum : unsigned { CODEC_BF16 = 3, CODEC_MXFP8 = 4, CODEC_INT8 = 5, CODEC_INT4 = 6, CODEC_MXFP4 = 7 };

template <unsigned CODEC>
struct Block {
    enum : unsigned {
        ELEMENTS = CODEC == CODEC_INT8 ? 64 : 32,
        BITS = CODEC == CODEC_BF16 ? 16 : CODEC == CODEC_MXFP8 || CODEC == CODEC_INT8 ? 8 : 4,  // of a code
        BYTES = ELEMENTS * BITS / 8,
        IS_E8M0 = CODEC == CODEC_MXFP8 || CODEC == CODEC_MXFP4,
        SCALE_BYTES = CODEC == CODEC_BF16 ? 0 : IS_E8M0 ? 1 : 2,
        MANTISSA = CODEC == CODEC_MXFP8 ? 3 : 1,  // of MXFP8 and MXFP4
    };
};

// Pattern of 2^127: a block with a number as large, or an Inf or a NaN, is not finite.
enum : unsigned { NOT_FINITE = 0x7f000000u };

// Returns the larger magnitude; a NaN if one is.
__device__ __forceinline__ float larger(float a, float b) {
    a = fabsf(a), b = fabsf(b);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
#else
    return __float_as_uint(a) > __float_as_uint(b) ? a : b;
#endif
}
// Returns the largest magnitude, as a pattern: above NOT_FINITE also if there is a NaN.
template <unsigned N>
__device__ __forceinline__ unsigned largest(const float (&c)[N]) {
    float most = fabsf(c[0]);
#pragma unroll
    for (unsigned m = 1; m < N; m++) most = larger(most, c[m]);
    return __float_as_uint(most);
}
// Returns the largest value of LANES neighbouring lanes, a power of two. All lanes of the warp call this.
template <unsigned LANES>
__device__ __forceinline__ unsigned largest_of_lanes(unsigned most) {
#pragma unroll
    for (unsigned distance = 1; distance < LANES; distance *= 2) {
        const unsigned other = __shfl_xor_sync(WHOLE_WARP, most, distance);
        most = other > most ? other : most;
    }
    return most;
}
// Returns the largest of a block whose numbers lie in neighbouring lanes, N in each. All lanes of the warp call this.
template <unsigned CODEC, unsigned N>
__device__ __forceinline__ unsigned largest_of_block(const float (&c)[N]) {
    return largest_of_lanes<Block<CODEC>::ELEMENTS / N>(largest(c));
}

struct BlockScale {
    unsigned memory;    // as it is stored, in SCALE_BYTES bytes
    float s, inverse;   // factors from codes to numbers, and from numbers to codes
};

// Returns the scale of a block by its largest magnitude. BF16 has none: 1.
template <unsigned CODEC>
__device__ __forceinline__ BlockScale scale_of_block(unsigned most) {
    BlockScale scale = {0, 1, 1};
    if (Block<CODEC>::IS_E8M0) {
        const unsigned reciprocal = CODEC == CODEC_MXFP8 ? 0x3b124925u : 0x3e2aaaabu;  // of the largest code
        const unsigned d = __float_as_uint(__fmul_rn(__uint_as_float(most), __uint_as_float(reciprocal)));
        const unsigned exponent = d >> 23, mantissa = d & 0x7fffffu;
        scale.memory = exponent + (exponent != 0 ? mantissa != 0 : mantissa > 0x400000u);
        scale.s = __uint_as_float(scale.memory != 0 ? scale.memory << 23 : 0x400000u);
        scale.inverse = __uint_as_float((254 - scale.memory) << 23);
    } else if (CODEC != CODEC_BF16) {
        const float d = __fdiv_rn(__uint_as_float(most), CODEC == CODEC_INT8 ? 127.0f : 7.0f);
        scale.memory = most < 0x0d800000u ? 0 : (__float_as_uint(d) + 0xffffu) >> 16;  // below 2^-100 it is 0
        scale.s = __uint_as_float(scale.memory << 16);
        scale.inverse = scale.memory != 0 ? __fdiv_rn(1, scale.s) : 0;
    }
    if (CODEC != CODEC_BF16 && most >= NOT_FINITE) {
        scale.memory = Block<CODEC>::IS_E8M0 ? 0xff : 0x7fc0;
        scale.s = __uint_as_float(0x7fc00000u), scale.inverse = 0;
    }
    return scale;
}
// Returns the value of a scale in memory; every bit pattern is valid.
template <unsigned CODEC>
__device__ __forceinline__ float scale_from_memory(unsigned memory) {
    if (CODEC == CODEC_BF16) return 1;
    if (!Block<CODEC>::IS_E8M0) return __uint_as_float(memory << 16);
    return __uint_as_float(memory == 255 ? 0x7fc00000u : memory != 0 ? memory << 23 : 0x400000u);
}

// Codes of N neighbours, as they lie in memory.
template <unsigned CODEC, unsigned N>
struct Codes {
    enum : unsigned { BYTES = (N * Block<CODEC>::BITS + 7) / 8, WORDS = (BYTES + 3) / 4 };
    unsigned words[WORDS];

    __device__ __forceinline__ void load(const void *from) {
        if (BYTES == 16) {
            const uint4 v = *static_cast<const uint4 *>(from);
            words[0] = v.x, words[1 % WORDS] = v.y, words[2 % WORDS] = v.z, words[3 % WORDS] = v.w;
        } else if (BYTES == 8) {
            const uint2 v = *static_cast<const uint2 *>(from);
            words[0] = v.x, words[1 % WORDS] = v.y;
        } else if (BYTES == 4) {
            words[0] = *static_cast<const unsigned *>(from);
        } else if (BYTES == 2) {
            words[0] = *static_cast<const unsigned short *>(from);
        } else {
            words[0] = *static_cast<const unsigned char *>(from);
        }
    }
    __device__ __forceinline__ void store(void *to) const {
        if (BYTES == 16) {
            *static_cast<uint4 *>(to) = make_uint4(words[0], words[1 % WORDS], words[2 % WORDS], words[3 % WORDS]);
        } else if (BYTES == 8) {
            *static_cast<uint2 *>(to) = make_uint2(words[0], words[1 % WORDS]);
        } else if (BYTES == 4) {
            *static_cast<unsigned *>(to) = words[0];
        } else if (BYTES == 2) {
            *static_cast<unsigned short *>(to) = static_cast<unsigned short>(words[0]);
        } else {
            *static_cast<unsigned char *>(to) = static_cast<unsigned char>(words[0]);
        }
    }
    // Sets the codes of a block that is not finite.
    __device__ __forceinline__ void poison() {
#pragma unroll
        for (unsigned k = 0; k < WORDS; k++) words[k] = CODEC == CODEC_BF16 ? N == 1 ? 0x7fc0u : 0x7fc07fc0u : 0;
    }
};

// Returns byte number BYTE, 0 or 3, of four words side by side: the words from `first` on, `step` apart.
template <unsigned BYTE, unsigned N>
__device__ __forceinline__ unsigned gather_bytes(const unsigned (&x)[N], unsigned first, unsigned step) {
    constexpr unsigned SELECTOR = BYTE == 0 ? 0x0040 : 0x0073;
    const unsigned low = __byte_perm(x[first % N], x[(first + step) % N], SELECTOR);
    const unsigned high = __byte_perm(x[(first + 2 * step) % N], x[(first + 3 * step) % N], SELECTOR);
    return __byte_perm(low, high, 0x5410);
}
// Packs the lowest 4 bits of words, those of even words into the lower half of a byte.
template <unsigned N>
__device__ __forceinline__ unsigned pack_nibbles(const unsigned (&x)[N]) {
    if (N < 4) return (x[0] & 0xf) | (N == 2 ? (x[1 % N] & 0xf) << 4 : 0);
    constexpr unsigned mask = N == 8 ? 0x0f0f0f0fu : 0x0f0fu;
    return (gather_bytes<0>(x, 0, 2) & mask) | (gather_bytes<0>(x, 1, 2) & mask) << 4;
}
// Packs the signs of numbers, each as bit 3 of a nibble.
template <unsigned N>
__device__ __forceinline__ unsigned pack_signs_of(const float (&c)[N]) {
    unsigned x[N];
#pragma unroll
    for (unsigned m = 0; m < N; m++) x[m] = __float_as_uint(c[m]);
    if (N < 4) return (x[0] >> 28 & 8) | (N == 2 ? x[1 % N] >> 24 & 0x80 : 0);
    constexpr unsigned mask = N == 8 ? 0x80808080u : 0x8080u;
    return (gather_bytes<3>(x, 0, 2) & mask) >> 4 | (gather_bytes<3>(x, 1, 2) & mask);
}

// Returns in the lowest bits the code of the nearest number of e4m3 or e2m1, without its sign, and that number in `d`.
// The addition of a large number rounds y: the last place of the sum is the format's step there. The large number also
// contains the steps that correct the exponent's bias.
template <unsigned CODEC>
__device__ __forceinline__ unsigned nearest_of(float y, float &d) {
    constexpr unsigned M = Block<CODEC>::MANTISSA, LEAST = CODEC == CODEC_MXFP8 ? 121u : 127u;  // exponent of the last step
    const float magnitude = fabsf(y);
    constexpr unsigned STEPS = (0u - (LEAST << M)) & 0x7f;
    const unsigned exponent = __float_as_uint(fmaxf(magnitude, __uint_as_float(LEAST << 23))) & 0x7f800000u;
    const float large = static_cast<float>((1u << (23 - M)) + (STEPS >> M));
    const float sum = __fmaf_rn(__uint_as_float(exponent), large, magnitude);
    d = __fmaf_rn(__uint_as_float(exponent), -large, sum);
    return __float_as_uint(sum) + (exponent >> (23 - M));
}

// Returns the codes of numbers of a finite block, and their values in `sent`: exact, so that c - sent is one rounding.
template <unsigned CODEC, unsigned N>
__device__ __forceinline__ Codes<CODEC, N> quantize(const BlockScale &scale, const float (&c)[N], float (&sent)[N]) {
    typedef Codes<CODEC, N> Result;
    Result codes;
    if (CODEC == CODEC_BF16) {
#pragma unroll
        for (unsigned m = 0; m < N; m += 2) {
            const unsigned pair = N == 1 ? to_bf16(c[m]) : to_bf16_pair(c[m], c[(m + 1) % N]);
            codes.words[m / 2 % Result::WORDS] = pair;
            sent[(m + 1) % N] = __uint_as_float(pair & 0xffff0000u), sent[m] = __uint_as_float(pair << 16);
        }
    } else {
        unsigned low[N];
#pragma unroll
        for (unsigned m = 0; m < N; m++) {
            const float y = __fmul_rn(c[m], scale.inverse);
            if (CODEC == CODEC_INT8 || CODEC == CODEC_INT4) {
                const float large = 12582912, sum = __fadd_rn(y, large);  // 1.5 * 2^23: the last place of a sum is 1
                low[m] = __float_as_uint(sum), sent[m] = __fmul_rn(__fsub_rn(sum, large), scale.s);
            } else {
                const unsigned sign = __float_as_uint(c[m]) & 0x80000000u;
                float d;
                low[m] = nearest_of<CODEC>(y, d);
                if (CODEC == CODEC_MXFP8) low[m] = (low[m] & 0x7f) | sign >> 24;
                sent[m] = __fmul_rn(__uint_as_float(__float_as_uint(d) | sign), scale.s);
            }
        }
        if (Block<CODEC>::BITS == 4) {
            codes.words[0] = pack_nibbles(low) | (CODEC == CODEC_MXFP4 ? pack_signs_of(c) : 0);
        } else {
#pragma unroll
            for (unsigned k = 0; k < Result::WORDS; k++) {
                codes.words[k] = gather_bytes<0>(low, 4 * k, 1) & (N == 1 ? 0xffu : N == 2 ? 0xffffu : ~0u);
            }
        }
    }
    return codes;
}

// Returns the codes alone.
template <unsigned CODEC, unsigned N>
__device__ __forceinline__ Codes<CODEC, N> quantize(const BlockScale &scale, const float (&c)[N]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    if (CODEC == CODEC_MXFP8 && N % 2 == 0) {
        Codes<CODEC, N> codes;
#pragma unroll
        for (unsigned m = 0; m < N; m += 2) {
            unsigned short pair;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
                : "=h"(pair)
                : "f"(__fmul_rn(c[(m + 1) % N], scale.inverse)), "f"(__fmul_rn(c[m], scale.inverse)));
            unsigned &word = codes.words[m / 4];
            word = m % 4 == 0 ? pair : word | static_cast<unsigned>(pair) << 16;
        }
        return codes;
    }
#endif
    float sent[N];
    return quantize<CODEC>(scale, c, sent);
}

// Returns the value of code number m, without the scale: of any code, also one that quantize() does not give.
template <unsigned CODEC, unsigned N>
__device__ __forceinline__ float number_of_code(const Codes<CODEC, N> &codes, unsigned m) {
    constexpr unsigned BITS = Block<CODEC>::BITS, A_WORD = 32 / BITS;
    const unsigned word = codes.words[m / A_WORD], at = m % A_WORD * BITS;
    if (CODEC == CODEC_BF16) return __uint_as_float(m % 2 ? word & 0xffff0000u : word << 16);
    // The bits of 2^23 and of a small number, side by side, are their sum.
    if (CODEC == CODEC_INT8) return __fsub_rn(__uint_as_float(((word ^ 0x80808080u) >> at & 0xff) | 0x4b000000u), 8388736);
    if (CODEC == CODEC_INT4) return __fsub_rn(__uint_as_float(((word ^ 0x88888888u) >> at & 0xf) | 0x4b000000u), 8388616);
    // The format's fields, in place of float32's, give a number too small by a power of two, denormals too.
    if (CODEC == CODEC_MXFP4) {
        const unsigned fields = (word >> at & 7) << 22;
        const float d = __fmul_rn(__uint_as_float(fields), __uint_as_float(0x7e800000u));
        return __uint_as_float(__float_as_uint(d) | (word >> at & 8) << 28);
    }
    const unsigned fields = (word >> at & 0x7f) << 20;
    const float d = fields == 0x7f00000u ? __uint_as_float(0x7fc00000u)
                                         : __fmul_rn(__uint_as_float(fields), __uint_as_float(0x7b800000u));
    return __uint_as_float(__float_as_uint(d) | (word >> at & 0x80) << 24);
}

// Writes the values of codes. Each is a rounded product, also with a scale that another program wrote.
template <unsigned CODEC, unsigned N>
__device__ __forceinline__ void dequantize(const Codes<CODEC, N> &codes, float s, float (&v)[N]) {
#pragma unroll
    for (unsigned m = 0; m < N; m++) {
        v[m] = CODEC == CODEC_BF16 ? number_of_code(codes, m) : __fmul_rn(number_of_code(codes, m), s);
    }
}

}  // namespace gradcodec

#endif
