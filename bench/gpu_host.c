/*
 * What bench/gpu.py and bench/gpu_codec.py call and time. In C, since a call through ctypes costs as much as the
 * library's own part of one.
 *
 * Functions return 0, or the status of a call that was refused (last_error() says why).
 */
#define _POSIX_C_SOURCE 200809L
#include "codec.h"
#include <time.h>

enum { PACK_CHUNKS, UNPACK_CHUNKS, PACK_SIGNS, PACK_BITS, UNPACK_BITS };

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static gc_status_t call(const Library *library, int32_t function, const DLTensor *src, DLTensor *dst, int32_t axis, void *stream)
{
    switch (function) {
    case PACK_CHUNKS:
        return library->gc_pack_chunks_into(src, GC_BIT_ORDER_BIG, dst, stream);
    case UNPACK_CHUNKS:
        return library->gc_unpack_chunks_into(src, GC_BIT_ORDER_BIG, dst, stream);
    case PACK_SIGNS:
        return library->gc_pack_signs_into(src, GC_BIT_ORDER_BIG, dst, stream);
    case PACK_BITS:
        return library->gc_pack_bits_into(src, axis, GC_BIT_ORDER_BIG, dst, stream);
    default:
        return library->gc_unpack_bits_into(src, axis, GC_BIT_ORDER_BIG, dst, stream);
    }
}

/* One call for each of `count` pairs, one after another. */
int32_t enqueue(const Library *library, int32_t function, int64_t count, const DLTensor *src, DLTensor *dst, int32_t axis,
                void *stream)
{
    for (int64_t i = 0; i < count; i++) {
        gc_status_t status = call(library, function, src + i, dst + i, axis, stream);
        if (status)
            return status;
    }
    return GC_STATUS_OK;
}

/*
 * The host's seconds of each of `calls` calls. `synchronize`, which is not timed, keeps the stream from filling up: a
 * launch on a full one waits for the device.
 */
int32_t host_seconds(const Library *library, int32_t function, int64_t calls, double *seconds, const DLTensor *src,
                     DLTensor *dst, void *stream, int (*synchronize)(void *stream))
{
    for (int64_t i = 0; i < calls; i++) {
        if (i % 128 == 0)
            synchronize(stream);
        const double start = now();
        gc_status_t status = call(library, function, src, dst, GC_AXIS_NONE, stream);
        seconds[i] = now() - start;
        if (status)
            return status;
    }
    synchronize(stream);
    return GC_STATUS_OK;
}

enum { MOST_CHUNKS = 64 };

/* The seconds of each of `calls` times gc_pack_chunks() and the release of what it made. */
int32_t pack_chunks_seconds(const Library *library, int64_t calls, double *seconds, const DLTensor *src,
                            int64_t n_chunks)
{
    DLManagedTensor borrowed = { *src, NULL, NULL }, *chunks[MOST_CHUNKS];
    if (n_chunks > MOST_CHUNKS)
        return GC_STATUS_INVALID_ARGUMENT;
    for (int64_t i = 0; i < calls; i++) {
        const double start = now();
        gc_status_t status = library->gc_pack_chunks(&borrowed, (size_t)n_chunks, chunks);
        if (status)
            return status;
        for (int64_t k = 0; k < n_chunks; k++)
            library->gc_tensor_free(chunks[k]);
        seconds[i] = now() - start;
    }
    return GC_STATUS_OK;
}

/* The host's seconds of each of `calls` times the same call, as host_seconds(). */
int32_t codec_host_seconds(const Library *library, int64_t calls, double *seconds, const CodecCall *call, void *stream,
                           int (*synchronize)(void *stream))
{
    for (int64_t i = 0; i < calls; i++) {
        if (i % 128 == 0)
            synchronize(stream);
        const double start = now();
        gc_status_t status = call_codec(library, call, stream);
        seconds[i] = now() - start;
        if (status)
            return status;
    }
    synchronize(stream);
    return GC_STATUS_OK;
}
