/* What the driver without a GPU (libcuda.c) asks of its kernels (kernels.cpp). */
#include <stddef.h>

enum { MOST_RANGES = 3 };

/* What a GPU of this driver has, and the blocks of 256 threads that are an eighth of its threads. */
enum { MULTIPROCESSORS = 3, THREADS_OF_ONE = 2048, MOST_TOGETHER = MULTIPROCESSORS * THREADS_OF_ONE / 8 / 256 };

/* What a launch is about to do, as its arguments have it. */
typedef struct {
    const char *fault; /* what a GPU would not survive, or NULL */
    struct {
        const unsigned char *memory;
        size_t bytes;
        int is_written, may_be_pinned;
    } ranges[MOST_RANGES];
    int n_ranges;
    int is_run;            /* 0: too long for a test, only looked at */
    size_t argument_bytes; /* of its only argument; else 0, and it is not put off or recorded */
    int has_barrier;       /* of the ranks: it is not put off */
} Launch;

#ifdef __cplusplus
extern "C" {
#endif
/* A compressed fatbin does not show its kernels, so these are those of all. */
int is_kernel(const char *name);
/* The kernel must be one of is_kernel(). */
Launch look_at_launch(const char *kernel, unsigned blocks, unsigned threads, void **arguments);
/* Runs it lane by lane. Several threads may do this at once. */
void run_kernel(const char *kernel, unsigned blocks, unsigned threads, void **arguments);
/* For tests. The time of GPUs stands still: no kernel has waited too long for another, however slow the host is. */
void fake_hold_clock(int hold);
#ifdef __cplusplus
}
#endif
