/*
 * What bench/cpu.py, bench/cpu_codec.py and bench/cpu_copy.py time. In C, since a call through ctypes costs as much as
 * packing 2^16 elements does.
 *
 * Every function makes one call that is not timed, then `calls` that are, and returns the seconds of these; -1 when a
 * call was refused (last_error() says why).
 */
#define _POSIX_C_SOURCE 200809L
#include "codec.h"
#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

#define RETURN_SECONDS_OF(call)                \
    do {                                       \
        if (call)                              \
            return -1;                         \
        const double start = now();            \
        for (int64_t i = 0; i < calls; i++)    \
            if (call)                          \
                return -1;                     \
        return now() - start;                  \
    } while (0)

/* 64 bytes at any address: one register with AVX-512, several without. */
typedef uint64_t vector __attribute__((vector_size(64), aligned(1), may_alias));
/* Vectors in flight: 2 were slower, 8 and 16 no faster, from every level of cache and from memory (Zen 5). */
enum { UNROLLED = 4 };

/* Loads and adds up: the least that a function which reads everything does. */
static __attribute__((noinline)) int read_all(const vector *from, int64_t vectors)
{
    vector sums[UNROLLED] = { { 0 } };
    for (int64_t i = 0; i < vectors; i += UNROLLED)
#pragma GCC unroll 4
        for (int k = 0; k < UNROLLED; k++)
            sums[k] += from[i + k];
#pragma GCC unroll 4
    for (int k = 1; k < UNROLLED; k++)
        sums[0] += sums[k];
    __asm__ volatile("" : : "m"(sums[0]) : "memory"); /* the sum is wanted, and again in every call */
    return 0;
}

static __attribute__((noinline)) int write_all(vector *to, int64_t vectors)
{
    vector ones = { 0 };
    __asm__("" : "+m"(ones)); /* a value that the compiler does not know: no call of memset */
    for (int64_t i = 0; i < vectors; i += UNROLLED)
#pragma GCC unroll 4
        for (int k = 0; k < UNROLLED; k++)
            to[i + k] = ones;
    __asm__ volatile("" : : : "memory");
    return 0;
}

/* `bytes`: a multiple of 256, as every size here is. */
double read_loop(int64_t calls, const void *from, int64_t bytes)
{
    RETURN_SECONDS_OF(read_all(from, bytes / (int64_t)sizeof(vector)));
}

double write_loop(int64_t calls, void *to, int64_t bytes)
{
    RETURN_SECONDS_OF(write_all(to, bytes / (int64_t)sizeof(vector)));
}

double pack_chunks(int64_t calls, const Library *library, const DLTensor *src, DLTensor *dst)
{
    RETURN_SECONDS_OF(library->gc_pack_chunks_into(src, GC_BIT_ORDER_BIG, dst, NULL));
}

double pack_signs(int64_t calls, const Library *library, const DLTensor *src, DLTensor *dst)
{
    RETURN_SECONDS_OF(library->gc_pack_signs_into(src, GC_BIT_ORDER_BIG, dst, NULL));
}

double unpack_chunks(int64_t calls, const Library *library, const DLTensor *src, DLTensor *dst)
{
    RETURN_SECONDS_OF(library->gc_unpack_chunks_into(src, GC_BIT_ORDER_BIG, dst, NULL));
}

double pack_bits(int64_t calls, const Library *library, const DLTensor *src, DLTensor *dst, int32_t axis)
{
    RETURN_SECONDS_OF(library->gc_pack_bits_into(src, axis, GC_BIT_ORDER_BIG, dst, NULL));
}

double unpack_bits(int64_t calls, const Library *library, const DLTensor *src, DLTensor *dst, int32_t axis)
{
    RETURN_SECONDS_OF(library->gc_unpack_bits_into(src, axis, GC_BIT_ORDER_BIG, dst, NULL));
}

double copy_into(int64_t calls, const Library *library, const DLTensor *src, DLTensor *dst)
{
    RETURN_SECONDS_OF(library->gc_copy_into(src, dst, NULL));
}

/* What the C library's memcpy takes for as many bytes. */
static __attribute__((noinline)) int copy_all(void *to, const void *from, int64_t bytes)
{
    memcpy(to, from, (size_t)bytes);
    return 0;
}

double memcpy_loop(int64_t calls, const void *from, void *to, int64_t bytes)
{
    RETURN_SECONDS_OF(copy_all(to, from, bytes));
}

double codec_call(int64_t calls, const Library *library, const CodecCall *call)
{
    RETURN_SECONDS_OF(call_codec(library, call, NULL));
}
