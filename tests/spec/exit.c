/*
 * Makes outputs on the GPU and ends: `exit never|first|last|thread`, for when they are released.
 *
 * never: not at all. first: by a handler that was registered after CUDA had begun, and so runs before CUDA ends. last:
 * by one that was registered before the first call, and so runs when CUDA's own handlers have run. thread: on a thread
 * that still works when main returns.
 */
#define _POSIX_C_SOURCE 200809L
#include <gradcodec.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNKS = 3 };
static DLManagedTensor *source, *chunks[CHUNKS];
static pthread_barrier_t started;

static int fails(gc_status_t status) {
    if (status != GC_STATUS_OK)
        fprintf(stderr, "%s: %s\n", gc_status_name(status), gc_last_error());
    return status != GC_STATUS_OK;
}

static void release(void) {
    int k;
    for (k = 0; k < CHUNKS; k++)
        gc_tensor_free(chunks[k]);
    gc_tensor_free(source);
}

static void *at_work(void *unused) {
    DLManagedTensor *made[CHUNKS];
    int k;
    (void)unused;
    pthread_barrier_wait(&started);
    for (;;) {
        if (gc_pack_chunks(source, CHUNKS, made) != GC_STATUS_OK)
            return NULL; /* the driver has ended */
        for (k = 0; k < CHUNKS; k++)
            gc_tensor_free(made[k]);
    }
}

int main(int argc, char **argv) {
    const DLDevice device = {kDLCUDA, 0};
    const DLDataType dtype = {kDLBool, 8, 1};
    const int64_t length = 1000003;
    const char *when = argc > 1 ? argv[1] : "never";

    if (!strcmp(when, "last"))
        atexit(release);
    if (fails(gc_tensor_empty(device, dtype, 1, &length, &source)) || fails(gc_pack_chunks(source, CHUNKS, chunks)))
        return 1;
    if (!strcmp(when, "first"))
        atexit(release);
    if (!strcmp(when, "thread")) {
        pthread_t thread;
        pthread_barrier_init(&started, NULL, 2);
        if (pthread_create(&thread, NULL, at_work, NULL))
            return 1;
        pthread_barrier_wait(&started);
    }
    return 0;
}
