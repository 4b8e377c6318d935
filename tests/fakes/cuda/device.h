// The parts of CUDA that kernels use, on the CPU and in host memory: runs each block, warp and lane.
//
// Each lane has its own context. A lane runs until its next exchange (a shuffle or a ballot), stores its value there,
// and reads the other lanes' values when it continues. At a barrier a lane waits for its block. Blocks run one after
// the other in random order; blocks that wait for each other run in parallel, each on its own thread (together.h). All
// state is thread-local, so several threads may run kernels at once. Not covered: code for some GPUs only, cache hints
// and prefetches.
#ifndef GRADCODEC_TESTS_DEVICE_H
#define GRADCODEC_TESTS_DEVICE_H

#include <sched.h>
#include <time.h>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

#include <atomic>
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
#define __shared__ static thread_local

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
[[maybe_unused]] static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct alignas(8) uint2 {
    unsigned x, y;
};
[[maybe_unused]] static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

static thread_local struct { unsigned x; } threadIdx, blockIdx, blockDim, gridDim;

static const unsigned LANES = 32, MOST_THREADS = 256, STACK = 64 << 10;

// ---- Switching stacks. A context is a stack pointer; the callee-saved registers are pushed below it. swapcontext()
// would also work, but sets the signal mask at each switch; this system call took three quarters of the tests' time.
// The control words of the floating-point unit (MXCSR, x87, FPCR) are not switched: no kernel changes them, so all
// lanes compute in the environment of the launching thread, as under swapcontext().
#if defined(__x86_64__) || defined(__aarch64__)
typedef void *Context;
// Stores this context at `from` and continues the context `to`. Local to each object file that includes this header.
extern "C" __attribute__((visibility("hidden"))) void switch_stack(Context *from, Context to);
#if defined(__x86_64__)
enum { ENTRY_WORD = 6, FRAME_WORDS = 8 };  // at a function's entry, the stack is 8 bytes off an alignment of 16
asm(R"(.text
switch_stack:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
)");
#else
enum { ENTRY_WORD = 11, FRAME_WORDS = 20 };
asm(R"(.text
switch_stack:
    stp x19, x20, [sp, #-160]!
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp d14, d15, [sp, #144]
    ldp d12, d13, [sp, #128]
    ldp d10, d11, [sp, #112]
    ldp d8, d9, [sp, #96]
    ldp x29, x30, [sp, #80]
    ldp x27, x28, [sp, #64]
    ldp x25, x26, [sp, #48]
    ldp x23, x24, [sp, #32]
    ldp x21, x22, [sp, #16]
    ldp x19, x20, [sp], #160
    ret
)");
#endif
static void make_context(Context &context, char *stack, void (*entry)()) {
    void **frame = reinterpret_cast<void **>(stack + STACK) - FRAME_WORDS;
    memset(frame, 0, FRAME_WORDS * sizeof *frame);
    frame[ENTRY_WORD] = reinterpret_cast<void *>(entry);
    context = frame;
}
static void switch_context(Context &from, Context &to) { switch_stack(&from, to); }
#else
typedef ucontext_t Context;
// Not inlined, because a context may return to where it was made.
static __attribute__((noinline)) void make_context(Context &context, char *stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack, context.uc_stack.ss_size = STACK;
    makecontext(&context, entry, 0);
}
static void switch_context(Context &from, Context &to) { swapcontext(&from, &to); }
#endif

// Informs AddressSanitizer, if present, which stack is in use.
extern "C" __attribute__((weak)) void __sanitizer_start_switch_fiber(void **, const void *, size_t);
extern "C" __attribute__((weak)) void __sanitizer_finish_switch_fiber(void *, const void **, size_t *);
extern "C" __attribute__((weak)) void __asan_unpoison_memory_region(const volatile void *, size_t);

static thread_local Context scheduler, lanes[MOST_THREADS];
static thread_local const void *stack_of_scheduler;
static thread_local size_t bytes_of_scheduler;
static thread_local char *stacks;  // stacks of all lanes
static thread_local enum { RUNS, WAITS, HAS_FINISHED } states[MOST_THREADS];
static thread_local unsigned running, turn[MOST_THREADS];
static thread_local uint64_t left_behind[2][MOST_THREADS];
static thread_local bool any_of_block[2];
static thread_local unsigned barrier[MOST_THREADS];
static thread_local std::function<void()> kernel;

// Continues a lane until it waits or has finished.
static void continue_lane(unsigned thread) {
    void *fake_stack = nullptr;
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&fake_stack, stacks + thread * STACK, STACK);
    switch_context(scheduler, lanes[thread]);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}
// Leaves a lane; a finished lane is never continued.
static void leave_lane(unsigned thread) {
    void *fake_stack = nullptr;
    if (__sanitizer_start_switch_fiber) {
        __sanitizer_start_switch_fiber(states[thread] == HAS_FINISHED ? nullptr : &fake_stack, stack_of_scheduler,
                                       bytes_of_scheduler);
    }
    switch_context(lanes[thread], scheduler);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

// Stores a value, waits for the other lanes of this warp, and returns the values of all lanes.
static const uint64_t *exchange(uint64_t value) {
    const unsigned thread = running;
    uint64_t *values = left_behind[turn[thread]++ % 2];
    values[thread] = value;
    leave_lane(thread);
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
    leave_lane(running);
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
// Clock of the GPUs: its delay behind the host's clock, and the time at which a test stopped it, or 0; in nanoseconds.
static struct { std::atomic<uint64_t> behind, held_at; } clock_of_gpus;
[[maybe_unused]] static uint64_t nanoseconds_of_host() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1000000000 + uint64_t(now.tv_nsec);
}
[[maybe_unused]] static void hold_clock(bool holds) {
    if (holds == (clock_of_gpus.held_at != 0)) return;
    const uint64_t now = nanoseconds_of_host() - clock_of_gpus.behind;
    if (!holds) clock_of_gpus.behind += now - clock_of_gpus.held_at;
    clock_of_gpus.held_at = holds ? now : 0;
}
// Called by a kernel that waits for another thread's kernel. The clock stops for at most 60 s, so that a test whose
// rank waits in vain ends.
[[maybe_unused]] static uint64_t nanoseconds_of_gpu() {
    sched_yield();
    const uint64_t held_at = clock_of_gpus.held_at, now = nanoseconds_of_host() - clock_of_gpus.behind;
    return held_at && now - held_at < 60000000000 ? held_at : now;
}
[[maybe_unused]] static void __threadfence() {}
[[maybe_unused]] static void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
[[maybe_unused]] static void __syncwarp() { exchange(0); }

// Asynchronous copies to shared memory. Each runs as late as allowed: when its lane waits for its group.
struct Copying {
    char *to;
    const char *from;
    size_t bytes, zeros;  // `zeros`: number of bytes at the end that are set to 0
    unsigned group;
};
static thread_local std::vector<Copying> copying[MOST_THREADS];
static thread_local unsigned groups[MOST_THREADS];
[[maybe_unused]] static void __pipeline_memcpy_async(void *to, const void *from, size_t bytes, size_t zeros) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes != 0) abort();
    // Two pending copies to one address may finish in any order.
    for (const Copying &other : copying[running]) {
        if (static_cast<char *>(to) < other.to + other.bytes && other.to < static_cast<char *>(to) + bytes) abort();
    }
    copying[running].push_back({static_cast<char *>(to), static_cast<const char *>(from), bytes, zeros, groups[running]});
}
[[maybe_unused]] static void __pipeline_commit() { groups[running]++; }
[[maybe_unused]] static void __pipeline_wait_prior(unsigned later) {
    std::vector<Copying> &of_lane = copying[running];
    size_t done = 0;
    for (; done < of_lane.size() && of_lane[done].group + later < groups[running]; done++) {
        const Copying &copy = of_lane[done];
        memcpy(copy.to, copy.from, copy.bytes - copy.zeros);
        memset(copy.to + copy.bytes - copy.zeros, 0, copy.zeros);
    }
    of_lane.erase(of_lane.begin(), of_lane.begin() + long(done));
}
[[maybe_unused]] static unsigned atomicOr(unsigned *to, unsigned bits) {
    return __atomic_fetch_or(to, bits, __ATOMIC_SEQ_CST);
}
[[maybe_unused]] static unsigned atomicAdd(unsigned *to, unsigned by) {
    return __atomic_fetch_add(to, by, __ATOMIC_SEQ_CST);
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
// Built without contraction, so each operation rounds. A GPU's NaN is always 0x7fffffff; other processors keep the
// sign.
static float of_gpu(float x) { return x != x ? value_of<float>(0x7fffffff) : x; }
[[maybe_unused]] static float __fadd_rn(float a, float b) { return of_gpu(a + b); }
[[maybe_unused]] static float __fsub_rn(float a, float b) { return of_gpu(a - b); }
[[maybe_unused]] static float __fmul_rn(float a, float b) { return of_gpu(a * b); }
[[maybe_unused]] static float __fdiv_rn(float a, float b) { return of_gpu(a / b); }
[[maybe_unused]] static float __fmaf_rn(float a, float b, float c) { return of_gpu(std::fmaf(a, b, c)); }
[[maybe_unused]] static double __dadd_rn(double a, double b) { return a + b; }
[[maybe_unused]] static double __ddiv_rn(double a, double b) { return a / b; }
[[maybe_unused]] static double __dsqrt_rn(double a) { return std::sqrt(a); }
[[maybe_unused]] static float __double2float_rn(double a) { return float(a); }

static void run_lane() {
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(nullptr, &stack_of_scheduler, &bytes_of_scheduler);
    }
    kernel();
    states[running] = HAS_FINISHED;
    leave_lane(running);
}

// Prepares this thread to run blocks of a kernel.
template <typename Call>
static void begin_launch(uint64_t blocks, unsigned threads, Call call) {
    static thread_local const std::unique_ptr<char[]> memory(new char[MOST_THREADS * STACK + 16]);
    stacks = memory.get() + (16 - reinterpret_cast<uintptr_t>(memory.get()) % 16);
    kernel = call;
    blockDim = {threads}, gridDim = {unsigned(blocks)};
}

static void run_block(unsigned block, unsigned threads) {
    blockIdx = {block};
    for (unsigned thread = 0; thread < threads; thread++) {
        make_context(lanes[thread], stacks + thread * STACK, run_lane);
        // Clears AddressSanitizer's marks of the previous lane's frames, which were never left by returning.
        if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(stacks + (thread + 1) * STACK - 4096, 4096);
        states[thread] = RUNS;
        turn[thread] = barrier[thread] = groups[thread] = 0;
        copying[thread].clear();
    }
    // A warp runs until each of its lanes waits or has finished. When no lane of the block can run, the barrier opens.
    for (bool waiting = true; waiting;) {
        waiting = false;
        for (unsigned warp = 0; warp < threads; warp += LANES) {
            for (bool any = true; any;) {
                any = false;
                for (unsigned thread = warp; thread < warp + LANES; thread++) {
                    if (states[thread] != RUNS) continue;
                    running = thread;
                    threadIdx = {thread};
                    continue_lane(thread);
                    any = true;
                }
            }
        }
        for (unsigned thread = 0; thread < threads; thread++) {
            if (states[thread] == WAITS) states[thread] = RUNS, waiting = true;
        }
    }
}

template <typename Call>
static void launch(uint64_t blocks, unsigned threads, Call call) {
    static thread_local unsigned seed = 1;
    begin_launch(blocks, threads, call);
    std::vector<unsigned> order(blocks);
    for (unsigned k = 0; k < blocks; k++) {
        order[k] = k;
        std::swap(order[k], order[(seed = seed * 1664525 + 1013904223) / 64 % (k + 1)]);
    }
    for (unsigned block : order) run_block(block, threads);
}

#endif
