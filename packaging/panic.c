/* panic.c: checks that a panic in the shipped library becomes a status, with any linker and on any thread.
 *
 * No call of the library panics by itself. But Rust panics if the system's clock cannot be read, and this program makes
 * clock_gettime() fail: a program's functions override the C library's. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <gradcodec.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    (void)clock, (void)now;
    errno = EINVAL;
    return -1;
}

static int sockets[2];

/* Returns NULL if every panic is caught. */
static void *panics(void *unused)
{
    (void)unused;
    const DLDevice cpu = {kDLCPU, 0};
    for (int i = 0; i < 3; i++) {
        DLManagedTensor *tensor = NULL;
        gc_status_t status = gc_share_receive(sockets[0], cpu, 1000, &tensor);
        if (status != GC_STATUS_PANIC || tensor != NULL || strstr(gc_last_error(), ".rs:") == NULL) {
            fprintf(stderr, "status %d: %s\n", (int)status, gc_last_error());
            return sockets;
        }
        if (gc_chunk_bytes(8, 1) != 1) {
            fprintf(stderr, "it does not work afterwards: %s\n", gc_last_error());
            return sockets;
        }
    }
    return NULL;
}

int main(void)
{
    pthread_t thread;
    void *elsewhere = sockets;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0 || panics(NULL) != NULL ||
        pthread_create(&thread, NULL, panics, NULL) != 0 || pthread_join(thread, &elsewhere) != 0 || elsewhere != NULL)
        return 1;
    printf("panics are caught: %s\n", gc_last_error());
    return 0;
}
