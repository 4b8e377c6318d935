/*
 * The timed loops of bench/cpu.py and bench/gpu.py. They are in C because one call through ctypes takes as long as
 * packing 2^16 elements.
 *
 * A Call is a function of the library and its arguments. All benchmarked functions take integers and pointers and return
 * a status, so on x86-64 and aarch64 one function type with ten 64-bit arguments can call them all.
 */
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef int32_t (*Function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

/* bench/common.py declares the same struct. */
typedef struct {
    Function function;
    uint64_t arguments[10];
} Call;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int32_t run(const Call *call)
{
    const uint64_t *a = call->arguments;
    return call->function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
}

/* Runs `n` calls once each, in order. Returns the first status that is not 0. */
int32_t run_calls(int64_t n, const Call *calls)
{
    for (int64_t i = 0; i < n; i++) {
        int32_t status = run(calls + i);
        if (status)
            return status;
    }
    return 0;
}

/* Runs one call once untimed and then `times` times. Returns the seconds of the timed ones, or -1 after a failure. */
double call_seconds(int64_t times, const Call *call)
{
    if (run(call))
        return -1;
    const double start = now();
    for (int64_t i = 0; i < times; i++)
        if (run(call))
            return -1;
    return now() - start;
}

/* 64 bytes at any address: one register with AVX-512, several without. */
typedef uint64_t vector __attribute__((vector_size(64), aligned(1), may_alias));
/* Vectors in flight: 2 were slower, 8 and 16 no faster, from every level of cache and from memory (Zen 5). */
enum { UNROLLED = 4 };

/* Loads and adds all vectors: the least work of a function that reads them. */
static __attribute__((noinline)) void read_all(const vector *from, int64_t vectors)
{
    vector sums[UNROLLED] = { { 0 } };
    for (int64_t i = 0; i < vectors; i += UNROLLED)
#pragma GCC unroll 4
        for (int k = 0; k < UNROLLED; k++)
            sums[k] += from[i + k];
#pragma GCC unroll 4
    for (int k = 1; k < UNROLLED; k++)
        sums[0] += sums[k];
    __asm__ volatile("" : : "m"(sums[0]) : "memory"); /* the compiler must form the sum again in every call */
}

static __attribute__((noinline)) void write_all(vector *to, int64_t vectors)
{
    vector ones = { 0 };
    __asm__("" : "+m"(ones)); /* an unknown value: the compiler cannot call memset */
    for (int64_t i = 0; i < vectors; i += UNROLLED)
#pragma GCC unroll 4
        for (int k = 0; k < UNROLLED; k++)
            to[i + k] = ones;
    __asm__ volatile("" : : : "memory");
}

enum { READ, WRITE, COPY };

/* Runs a loop over `bytes`, a multiple of 256, once untimed and then `times` times. Returns the seconds of these. */
double loop_seconds(int64_t times, int32_t loop, void *to, const void *from, int64_t bytes)
{
    const int64_t vectors = bytes / (int64_t)sizeof(vector);
    double start = 0;
    for (int64_t i = -1; i < times; i++) {
        if (i == 0)
            start = now();
        if (loop == READ)
            read_all(from, vectors);
        else if (loop == WRITE)
            write_all(to, vectors);
        else
            memcpy(to, from, (size_t)bytes);
        __asm__ volatile("" : : : "memory");
    }
    return now() - start;
}
