// A device of host memory: what kernels use of CUDA, so that every block, warp and lane of them runs on the CPU.
//
// A lane is a context of its own. Lanes run one after the other up to their next exchange (a shuffle or a ballot),
// where each leaves its value and finds those of all others when it goes on. At a barrier a lane waits for all of its
// block. Blocks run one after the other, in an order of no meaning. What is compiled for some cards alone, cache hints,
// prefetches and instructions of their own, is not seen here.
#ifndef GRADCODEC_TESTS_DEVICE_H
#define GRADCODEC_TESTS_DEVICE_H

#include <time.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
[[maybe_unused]] static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct alignas(8) uint2 {
    unsigned x, y;
};
[[maybe_unused]] static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

static struct { unsigned x; } threadIdx, blockIdx, blockDim;

static const unsigned LANES = 32, MOST_THREADS = 256, STACK = 64 << 10;
static ucontext_t scheduler, lanes[MOST_THREADS];
static enum { RUNS, WAITS, HAS_FINISHED } states[MOST_THREADS];
static unsigned running, turn[MOST_THREADS];
static uint64_t left_behind[2][MOST_THREADS];
static bool any_of_block[2];
static unsigned barrier[MOST_THREADS];
static std::function<void()> kernel;

// The values that the lanes of this warp left behind.
static const uint64_t *exchange(uint64_t value) {
    const unsigned thread = running;
    uint64_t *values = left_behind[turn[thread]++ % 2];
    values[thread] = value;
    swapcontext(&lanes[thread], &scheduler);
    return values + thread / LANES * LANES;
}
template <typename T>
static uint64_t pattern_of(T x) {
    uint64_t pattern = 0;
    memcpy(&pattern, &x, sizeof x);
    return pattern;
}
template <typename T>
static T value_of(uint64_t pattern) {
    T x;
    memcpy(&x, &pattern, sizeof x);
    return x;
}
template <typename T>
static T __shfl_sync(unsigned, T value, unsigned from) {
    return value_of<T>(exchange(pattern_of(value))[from % LANES]);
}
template <typename T>
static T __shfl_xor_sync(unsigned, T value, unsigned mask) {
    const unsigned lane = running % LANES;
    return value_of<T>(exchange(pattern_of(value))[lane ^ mask]);
}
template <typename T>
static T __shfl_down_sync(unsigned, T value, unsigned by) {
    const unsigned lane = running % LANES;
    return value_of<T>(exchange(pattern_of(value))[lane + by < LANES ? lane + by : lane]);
}
[[maybe_unused]] static unsigned __ballot_sync(unsigned, bool bit) {
    const uint64_t *bits = exchange(bit);
    unsigned word = 0;
    for (unsigned lane = 0; lane < LANES; lane++) word |= unsigned(bits[lane]) << lane;
    return word;
}
[[maybe_unused]] static bool __any_sync(unsigned mask, bool bit) { return __ballot_sync(mask, bit) != 0; }
[[maybe_unused]] static bool __all_sync(unsigned mask, bool bit) { return __ballot_sync(mask, !bit) == 0; }
[[maybe_unused]] static void __syncthreads() {
    states[running] = WAITS;
    swapcontext(&lanes[running], &scheduler);
}
[[maybe_unused]] static bool __syncthreads_or(bool bit) {
    const unsigned thread = running, at = barrier[thread]++ % 2;
    any_of_block[at] |= bit;
    __syncthreads();
    const bool any = any_of_block[at];
    __syncthreads();
    any_of_block[at] = false;
    return any;
}
[[maybe_unused]] static uint64_t nanoseconds_of_card() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1000000000 + uint64_t(now.tv_nsec);
}
[[maybe_unused]] static void __threadfence() {}
[[maybe_unused]] static void __syncwarp() {}
[[maybe_unused]] static unsigned atomicOr(unsigned *to, unsigned bits) {
    const unsigned before = *to;
    *to |= bits;
    return before;
}
[[maybe_unused]] static unsigned atomicExch(unsigned *to, unsigned value) { return std::exchange(*to, value); }
[[maybe_unused]] static unsigned atomicInc(unsigned *to, unsigned most) {
    const unsigned before = *to;
    *to = before >= most ? 0 : before + 1;
    return before;
}

[[maybe_unused]] static unsigned __brev(unsigned x) {
    unsigned mirrored = 0;
    for (unsigned k = 0; k < 32; k++) mirrored |= (x >> k & 1) << (31 - k);
    return mirrored;
}
[[maybe_unused]] static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    unsigned chosen = 0;
    for (unsigned k = 0; k < 4; k++) chosen |= unsigned(bytes >> 8 * (selector >> 4 * k & 7) & 0xff) << 8 * k;
    return chosen;
}
[[maybe_unused]] static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return unsigned((uint64_t(high) << 32 | low) >> by % 32);
}
[[maybe_unused]] static unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return unsigned((uint64_t(high) << 32 | low) << by % 32 >> 32);
}
[[maybe_unused]] static unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
[[maybe_unused]] static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
[[maybe_unused]] static unsigned __clz(unsigned x) { return x ? unsigned(__builtin_clz(x)) : 32; }
[[maybe_unused]] static unsigned __float_as_uint(float x) { return unsigned(pattern_of(x)); }
[[maybe_unused]] static float __uint_as_float(unsigned x) { return value_of<float>(x); }
[[maybe_unused]] static long long __double_as_longlong(double x) { return (long long)pattern_of(x); }
[[maybe_unused]] static double __longlong_as_double(long long x) { return value_of<double>(uint64_t(x)); }
// Built without contraction, so that each is rounded. A card's NaN is 0x7fffffff, whatever it was made of; other
// processors keep a sign.
static float of_card(float x) { return x != x ? value_of<float>(0x7fffffff) : x; }
[[maybe_unused]] static float __fadd_rn(float a, float b) { return of_card(a + b); }
[[maybe_unused]] static float __fsub_rn(float a, float b) { return of_card(a - b); }
[[maybe_unused]] static float __fmul_rn(float a, float b) { return of_card(a * b); }
[[maybe_unused]] static float __fdiv_rn(float a, float b) { return of_card(a / b); }
[[maybe_unused]] static double __dadd_rn(double a, double b) { return a + b; }
[[maybe_unused]] static double __ddiv_rn(double a, double b) { return a / b; }
[[maybe_unused]] static double __dsqrt_rn(double a) { return std::sqrt(a); }
[[maybe_unused]] static float __double2float_rn(double a) { return float(a); }

static void enter() {
    kernel();
    states[running] = HAS_FINISHED;
    swapcontext(&lanes[running], &scheduler);
}

// By itself: a context may come back to where it was made.
[[maybe_unused]] static __attribute__((noinline)) void make_lane(unsigned thread, char *stack) {
    getcontext(&lanes[thread]);
    lanes[thread].uc_stack.ss_sp = stack;
    lanes[thread].uc_stack.ss_size = STACK;
    makecontext(&lanes[thread], enter, 0);
    states[thread] = RUNS;
    turn[thread] = barrier[thread] = 0;
}

template <typename Call>
static void launch(uint64_t blocks, unsigned threads, Call call) {
    static std::vector<char> stacks(MOST_THREADS * STACK);
    static unsigned seed = 1;
    kernel = call;
    blockDim = {threads};
    std::vector<unsigned> order(blocks);
    for (unsigned k = 0; k < blocks; k++) {
        order[k] = k;
        std::swap(order[k], order[(seed = seed * 1664525 + 1013904223) / 64 % (k + 1)]);
    }
    for (unsigned block : order) {
        blockIdx = {block};
        for (unsigned thread = 0; thread < threads; thread++) {
            make_lane(thread, &stacks[thread * STACK]);
        }
        // A warp runs until each of its lanes waits or has finished; when all do, the barrier opens.
        for (bool waiting = true; waiting;) {
            waiting = false;
            for (unsigned warp = 0; warp < threads; warp += LANES) {
                for (bool any = true; any;) {
                    any = false;
                    for (unsigned thread = warp; thread < warp + LANES; thread++) {
                        if (states[thread] != RUNS) continue;
                        running = thread;
                        threadIdx = {thread};
                        swapcontext(&scheduler, &lanes[thread]);
                        any = true;
                    }
                }
            }
            for (unsigned thread = 0; thread < threads; thread++) {
                if (states[thread] == WAITS) states[thread] = RUNS, waiting = true;
            }
        }
    }
}

#endif
