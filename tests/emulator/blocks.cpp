// What device.cuh has of block codecs for kernels of users' own, on the CPU: each code against a search among all that the
// format has, each scale against its definition in docs/NUMERICS.md 11. Needs no GPU.
//
//     g++ -std=c++17 -O1 -ffp-contract=off -Iinclude -fsanitize=address,alignment tests/emulator/blocks.cpp
#include "device.h"

#include "gradcodec/device.cuh"

#include <string>

using namespace gradcodec;

static uint64_t random_state = 0x9e3779b97f4a7c15;
static uint64_t random(uint64_t below) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return (random_state >> 11) % below;
}

static unsigned cases, wrong;
static void count(bool right, const std::string &what) {
    cases++;
    if (!right && wrong++ < 20) printf("wrong: %s\n", what.c_str());
}

static const char *const NAMES[] = {"", "", "", "bf16", "mxfp8", "int8", "int4", "mxfp4"};
static const double MOST[] = {0, 0, 0, 0, 448, 127, 7, 6};

// What a code stands for, by the formats' definitions.
static double value_of_code(unsigned codec, unsigned code) {
    if (codec == CODEC_BF16) return value_of<float>(uint64_t(code) << 16);
    if (codec == CODEC_INT8) return int8_t(code);
    if (codec == CODEC_INT4) return code < 8 ? int(code) : int(code) - 16;
    const int mantissa_bits = codec == CODEC_MXFP8 ? 3 : 1, bias = codec == CODEC_MXFP8 ? 7 : 1;
    const unsigned sign = codec == CODEC_MXFP8 ? code >> 7 : code >> 3, magnitude = code & (codec == CODEC_MXFP8 ? 127 : 7);
    if (codec == CODEC_MXFP8 && magnitude == 127) return NAN;
    const int exponent = magnitude >> mantissa_bits, mantissa = magnitude & ((1 << mantissa_bits) - 1);
    const double x = exponent ? std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
                              : std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign ? -x : x;
}

// Of the largest magnitude: as memory has it, and s.
static unsigned scale_in_memory(unsigned codec, float most, double &s) {
    if (codec == CODEC_BF16) return s = 1, 0;
    if (codec == CODEC_MXFP8 || codec == CODEC_MXFP4) {
        const float d = most * value_of<float>(codec == CODEC_MXFP8 ? 0x3b124925 : 0x3e2aaaab);
        // The smallest power of two that is not below d, but for what lies between 0 and 2^-127.
        int byte = 0;
        while (std::ldexp(1, byte - 127) < double(d)) byte++;
        return s = std::ldexp(1, byte - 127), unsigned(byte);
    }
    unsigned memory = 0;
    const float d = most / float(MOST[codec]);
    if (most >= std::ldexp(1.0f, -100)) {
        memory = unsigned(pattern_of(d) >> 16);
        while (value_of<float>(uint64_t(memory) << 16) < d) memory++;
    }
    return s = value_of<float>(uint64_t(memory) << 16), memory;
}

// The nearest of all codes, a tie to the one whose last bit is 0; the sign is c's.
static unsigned nearest_code(unsigned codec, float c, double s) {
    if (codec == CODEC_INT8 || codec == CODEC_INT4) {
        const float y = s == 0 ? 0 : c * (1 / float(s));
        return unsigned(int(std::nearbyint(y))) & (codec == CODEC_INT8 ? 0xff : 0xf);
    }
    const unsigned bits = codec == CODEC_BF16 ? 16 : codec == CODEC_MXFP8 ? 8 : 4, half = 1u << (bits - 1);
    const double y = std::fabs(double(c) / s);
    unsigned low = 0, high = codec == CODEC_BF16 ? 0x7f80 : codec == CODEC_MXFP8 ? 126 : 7;
    if (codec != CODEC_BF16 && y >= MOST[codec]) return high | (std::signbit(c) ? half : 0);
    while (high - low > 1) (value_of_code(codec, (low + high) / 2) <= y ? low : high) = (low + high) / 2;
    const double below = y - value_of_code(codec, low), above = value_of_code(codec, high) - y;
    return (above < below || (above == below && high % 2 == 0) ? high : low) | (std::signbit(c) ? half : 0);
}

// Numbers of a block that lie around 2^exponent: random ones, codes times the scale, ties between them, zeros.
static float some_number(unsigned codec, int exponent, double s) {
    const unsigned codes = codec == CODEC_BF16 ? 0x10000 : codec == CODEC_INT4 || codec == CODEC_MXFP4 ? 16 : 256;
    const double of_code = value_of_code(codec, unsigned(random(codes)));
    switch (random(5)) {
    case 0: return random(2) ? 0.0f : -0.0f;
    case 1: return codec == CODEC_BF16 || of_code != of_code ? 0 : float(of_code * s);
    case 2: return float((int(random(17)) - 8) * 0.5 * s);
    default: return float(std::ldexp(double(random(1 << 24)) - (1 << 23), exponent - 23));
    }
}

template <unsigned CODEC, unsigned N>
static void blocks_of_lanes_match(unsigned rounds) {
    constexpr unsigned ELEMENTS = Block<CODEC>::ELEMENTS, LANES_OF_BLOCK = ELEMENTS / N, BLOCKS = 32 * N / ELEMENTS;
    if (LANES_OF_BLOCK > 32) return;
    typedef Codes<CODEC, N> C;
    bool right = true;
    for (unsigned round = 0; round < rounds; round++) {
        std::vector<float> c(32 * N);
        const int exponent = int(random(270)) - 145;
        double guess;
        scale_in_memory(CODEC, std::ldexp(1.0f, exponent), guess);
        for (float &x : c) {
            x = some_number(CODEC, exponent, guess);
            if (!(std::fabs(x) < std::ldexp(1.0f, 127))) x = 1;
        }
        alignas(16) unsigned char memory[32 * 16] = {};
        launch(1, 32, [&] {
            const unsigned lane = threadIdx.x;
            float mine[N], sent[N], back[N];
            for (unsigned m = 0; m < N; m++) mine[m] = c[lane * N + m];
            const BlockScale scale = scale_of_block<CODEC>(largest_of_block<CODEC>(mine));
            float most = 0;
            for (unsigned i = 0; i < ELEMENTS; i++) most = std::max(most, std::fabs(c[lane / LANES_OF_BLOCK * ELEMENTS + i]));
            double s;
            right &= scale.memory == scale_in_memory(CODEC, most, s) && scale.s == float(s);
            right &= scale_from_memory<CODEC>(scale.memory) == scale.s;
            const C codes = quantize<CODEC>(scale, mine, sent);
            for (unsigned m = 0; m < N; m++) {
                const unsigned at = m * Block<CODEC>::BITS, mask = (1u << Block<CODEC>::BITS) - 1;
                const unsigned code = codes.words[at / 32] >> at % 32 & mask, expected = nearest_code(CODEC, mine[m], s);
                const float v = float(value_of_code(CODEC, expected) * s);
                right &= code == expected && pattern_of(sent[m]) == pattern_of(v);
                // With float32 errors they are together what was there.
                right &= double(sent[m]) + double(__fsub_rn(mine[m], sent[m])) == double(mine[m]);
            }
            if (C::BYTES * 8 == N * Block<CODEC>::BITS) codes.store(memory + lane * C::BYTES);
            C loaded;
            if (C::BYTES * 8 == N * Block<CODEC>::BITS) loaded.load(memory + lane * C::BYTES);
            else loaded = codes;
            dequantize(loaded, scale.s, back);
            for (unsigned m = 0; m < N; m++) right &= pattern_of(back[m]) == pattern_of(sent[m]);
        });
    }
    count(right, std::string(NAMES[CODEC]) + ", " + std::to_string(N) + " a lane, " + std::to_string(BLOCKS) + " blocks");
}

template <unsigned CODEC>
static void codec_matches(unsigned rounds) {
    blocks_of_lanes_match<CODEC, 1>(rounds), blocks_of_lanes_match<CODEC, 2>(rounds);
    blocks_of_lanes_match<CODEC, 4>(rounds), blocks_of_lanes_match<CODEC, 8>(rounds);
    // Any code, with scales of a stranger.
    bool right = true;
    for (const float s : {1.0f, 0.0f, -0.0f, -2.5f, 1e38f, 1e-45f, INFINITY}) {
        for (unsigned code = 0; code < 1u << Block<CODEC>::BITS; code++) {
            Codes<CODEC, 1> one = {{code}};
            float v[1];
            dequantize(one, s, v);
            const float expected = float(value_of_code(CODEC, code)) * (CODEC == CODEC_BF16 ? 1 : s);
            right &= v[0] != v[0] ? expected != expected : pattern_of(v[0]) == pattern_of(expected);
        }
    }
    count(right, std::string(NAMES[CODEC]) + ": every code");
    for (const float most : {std::ldexp(1.0f, 127), INFINITY, NAN}) {
        const float c[1] = {most};
        const BlockScale scale = scale_of_block<CODEC>(largest(c));
        const unsigned expected = CODEC == CODEC_BF16 ? 0 : Block<CODEC>::IS_E8M0 ? 0xff : 0x7fc0;
        count(largest(c) >= NOT_FINITE && scale.memory == expected, std::string(NAMES[CODEC]) + ": a block that is not finite");
    }
}

int main(int argc, char **argv) {
    const unsigned rounds = rounds_of(argc, argv, 4000);
    codec_matches<CODEC_BF16>(rounds), codec_matches<CODEC_MXFP8>(rounds), codec_matches<CODEC_INT8>(rounds);
    codec_matches<CODEC_INT4>(rounds), codec_matches<CODEC_MXFP4>(rounds);
    printf("%u cases, %u wrong\n", cases, wrong);
    return wrong != 0;
}
