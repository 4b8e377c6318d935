/*
 * What bench/gpu.py, gpu_copy.py, gpu_codec.py and gpu_kernels.py call and time. In C, since a call through ctypes costs as much as the
 * library's own part of one.
 *
 * Functions return 0, or the status of a call that was refused (last_error() says why).
 */
#define _POSIX_C_SOURCE 200809L
#include "codec.h"
#include <time.h>

enum { PACK_CHUNKS, UNPACK_CHUNKS, PACK_SIGNS, PACK_BITS, UNPACK_BITS, COPY };

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
    case COPY:
        return library->gc_copy_into(src, dst, stream);
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

/*
 * An all-reduce of one rank, over NCCL or a group, of `n` elements of float32 on a device: what the library itself does
 * in one, and nothing else. The handle alone holds its communicator. NULL: refused (last_error() says why).
 */
gc_allreduce_t *make_all_reduce(const Library *library, int32_t device_type, int32_t over_nccl, int64_t n)
{
    gc_nccl_options_t nccl = { 0 };
    gc_codec_options_t options = { 0 };
    gc_comm_t *comm = NULL;
    gc_allreduce_t *handle = NULL;
    uint8_t id[128];
    nccl.struct_size = sizeof nccl;
    options.struct_size = sizeof options;
    options.codec = GC_CODEC_ONEBIT;
    options.device.device_type = (DLDeviceType)device_type;
    options.n_elements = n;
    gc_status_t status;
    if (!over_nccl)
        status = library->gc_comm_group(1, &comm);
    else if (!(status = library->gc_comm_nccl_id(&nccl, id)))
        status = library->gc_comm_from_nccl_id(&nccl, id, 0, 1, options.device, &comm);
    if (!status)
        status = library->gc_allreduce_create(comm, &options, &handle);
    library->gc_comm_free(comm);
    return status ? NULL : handle;
}

void free_all_reduce(const Library *library, gc_allreduce_t *handle)
{
    library->gc_allreduce_free(handle);
}

int32_t run_all_reduce(const Library *library, gc_allreduce_t *handle, DLTensor *values, void *stream)
{
    return library->gc_allreduce_run(handle, &values, 1, NULL, NULL, stream);
}

/* The host's seconds of each of `calls` times the same all-reduce, as host_seconds(). */
int32_t all_reduce_host_seconds(const Library *library, int64_t calls, double *seconds, gc_allreduce_t *handle,
                                DLTensor *values, void *stream, int (*synchronize)(void *stream))
{
    for (int64_t i = 0; i < calls; i++) {
        if (i % 128 == 0 && synchronize)
            synchronize(stream);
        const double start = now();
        gc_status_t status = run_all_reduce(library, handle, values, stream);
        seconds[i] = now() - start;
        if (status)
            return status;
    }
    if (synchronize)
        synchronize(stream);
    return GC_STATUS_OK;
}

/* The host's seconds of each of `calls` runs of a kernel that is prepared. */
int32_t kernel_host_seconds(const Library *library, int64_t calls, double *seconds, gc_kernel_t *kernel,
                            const DLTensor *const *inputs, size_t n_inputs, DLTensor *const *outputs, size_t n_outputs,
                            const gc_run_options_t *options, void *stream, int (*synchronize)(void *stream))
{
    for (int64_t i = 0; i < calls; i++) {
        if (i % 128 == 0)
            synchronize(stream);
        const double start = now();
        gc_status_t status = library->gc_kernel_run(kernel, inputs, n_inputs, outputs, n_outputs, options, stream);
        seconds[i] = now() - start;
        if (status)
            return status;
    }
    return synchronize(stream) ? -1 : GC_STATUS_OK;
}
