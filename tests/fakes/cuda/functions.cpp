// Functions of gradcodec/device.cuh and kernels/sum.cuh, from which users' kernels and ours are built. They run lane by
// lane on the CPU, for tests/python/test_device_functions.py.
#include "device.h"

#include "../../../kernels/sum.cuh"

using namespace gradcodec;

extern "C" void numbers(unsigned kind, uint64_t n, const unsigned *from, unsigned *to) {
    for (uint64_t i = 0; i < n; i++) {
        const float x = value_of<float>(from[i]);
        to[i] = kind == 0 ? unsigned(pattern_of(from_f16(static_cast<unsigned short>(from[i])))) : kind == 1 ? to_f16(x) : to_bf16(x);
    }
}

// Stores the bits of `set`, N elements per lane, in blocks of 64 threads.
template <unsigned N>
static void store(const unsigned char *set, uint64_t n, unsigned order, unsigned char *bits) {
    launch((n + 64 * N - 1) / (64 * N), 64, [=] {
        const uint64_t i = (uint64_t(blockIdx.x) * 64 + threadIdx.x) * N;
        unsigned field = 0;
        for (unsigned m = 0; m < N; m++) field |= unsigned(i + m < n ? set[i + m] : 1) << m;
        if constexpr (N == 1) store_bit(bits, i, n, field, order);
        else store_bits<N>(bits, i, n, field, order);
    });
}

extern "C" void store_bits_of_lanes(unsigned each, const unsigned char *set, uint64_t n, unsigned order, unsigned char *bits) {
    each == 1 ? store<1>(set, n, order, bits) : each == 2 ? store<2>(set, n, order, bits) : each == 4 ? store<4>(set, n, order, bits)
        : each == 8 ? store<8>(set, n, order, bits) : store<16>(set, n, order, bits);
}

extern "C" void load_bits_and_signs(const unsigned char *bits, uint64_t n, unsigned order, float s, unsigned char *set, float *signs) {
    for (uint64_t i = 0; i < n; i++) {
        float one[1];
        load_signs<1>(bits, i, order, s, one);
        set[i] = load_bit(bits, i, order), signs[i] = one[0];
    }
}

template <unsigned N>
static float unit_sum(const float *terms) {
    float sums[32];
    launch(1, 32, [&] {
        const unsigned lane = threadIdx.x;
        UnitSum<N> sum;
        for (unsigned k = 0; k < 32 / N; k++) {
            for (unsigned m = 0; m < N; m++) sum.add(k, m, terms[(k * 32 + lane) * N + m]);
        }
        sums[lane] = sum.of_warp(lane);
    });
    for (const float sum : sums) if (pattern_of(sum) != pattern_of(sums[0])) return NAN;
    return sums[0];
}

extern "C" float unit_sum_of_lanes(unsigned each, const float *terms) {
    return each == 1 ? unit_sum<1>(terms) : each == 2 ? unit_sum<2>(terms) : each == 4 ? unit_sum<4>(terms) : unit_sum<8>(terms);
}

extern "C" double fold_partials(double *partials, uint64_t n) {
    double sum = NAN;
    launch(1, 256, [&] { sum = fold(partials, n); });
    return sum;
}

// Quantizes the elements of `warps` warps, N per lane. Returns the scale of each lane's block, and each element's code,
// its decoded value and the value read back from memory. False if blocks of this codec take more lanes than a warp has.
template <unsigned CODEC, unsigned N>
static bool quantize_of(unsigned warps, const float *c, unsigned *scales, float *s, unsigned *codes, float *sent, float *back) {
    typedef Codes<CODEC, N> C;
    constexpr bool WHOLE_BYTES = C::BYTES * 8 == N * Block<CODEC>::BITS;
    if constexpr (Block<CODEC>::ELEMENTS / N <= 32) {
        launch(warps, 32, [=] {
            const unsigned lane = blockIdx.x * 32 + threadIdx.x;
            const BlockScale scale = scale_of_block<CODEC>(largest_of_block<CODEC>(*reinterpret_cast<const float(*)[N]>(c + lane * N)));
            float mine[N], v[N], again[N];
            for (unsigned m = 0; m < N; m++) mine[m] = c[lane * N + m];
            C made = quantize<CODEC>(scale, mine, v), loaded = made;
            alignas(16) unsigned char memory[16] = {};
            if (WHOLE_BYTES) made.store(memory), loaded.load(memory);
            dequantize(loaded, scale_from_memory<CODEC>(scale.memory), again);
            scales[lane] = scale.memory, s[lane] = scale.s;
            for (unsigned m = 0; m < N; m++) {
                const unsigned at = m * Block<CODEC>::BITS;
                codes[lane * N + m] = made.words[at / 32] >> at % 32 & ((1u << Block<CODEC>::BITS) - 1);
                sent[lane * N + m] = v[m], back[lane * N + m] = again[m];
            }
        });
        return true;
    }
    return false;
}

template <unsigned CODEC>
static bool quantize_in(unsigned each, unsigned warps, const float *c, unsigned *scales, float *s, unsigned *codes, float *sent, float *back) {
    return each == 1 ? quantize_of<CODEC, 1>(warps, c, scales, s, codes, sent, back)
        : each == 2  ? quantize_of<CODEC, 2>(warps, c, scales, s, codes, sent, back)
        : each == 4  ? quantize_of<CODEC, 4>(warps, c, scales, s, codes, sent, back)
                     : quantize_of<CODEC, 8>(warps, c, scales, s, codes, sent, back);
}

extern "C" bool quantize_by_lanes(unsigned codec, unsigned each, unsigned warps, const float *c, unsigned *scales, float *s,
                                  unsigned *codes, float *sent, float *back) {
    return codec == CODEC_BF16   ? quantize_in<CODEC_BF16>(each, warps, c, scales, s, codes, sent, back)
         : codec == CODEC_MXFP8 ? quantize_in<CODEC_MXFP8>(each, warps, c, scales, s, codes, sent, back)
         : codec == CODEC_INT8  ? quantize_in<CODEC_INT8>(each, warps, c, scales, s, codes, sent, back)
         : codec == CODEC_INT4  ? quantize_in<CODEC_INT4>(each, warps, c, scales, s, codes, sent, back)
                                : quantize_in<CODEC_MXFP4>(each, warps, c, scales, s, codes, sent, back);
}
