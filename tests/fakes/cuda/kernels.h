/* The interface between the driver without a GPU (libcuda.c) and its kernels (kernels.cpp). */
#include <stddef.h>

enum { MOST_RANGES = 3 };

/* Size of the fake GPU. MOST_TOGETHER: number of blocks of 256 threads that take an eighth of its threads. */
enum { MULTIPROCESSORS = 3, THREADS_OF_ONE = 2048, MOST_TOGETHER = MULTIPROCESSORS * THREADS_OF_ONE / 8 / 256 };

/* Description of a launch, derived from its arguments. */
typedef struct {
    const char *fault; /* a fault that would crash or hang a GPU, or NULL */
    struct {
        const unsigned char *memory;
        size_t bytes;
        int is_written, may_be_pinned;
    } ranges[MOST_RANGES];
    int n_ranges;
    int is_run;            /* 0: takes too long for a test and is only checked */
    size_t argument_bytes; /* size of the only argument; 0: several, so the launch cannot be deferred or recorded */
    int has_barrier;       /* includes a barrier of the ranks and cannot be deferred */
} Launch;

#ifdef __cplusplus
extern "C" {
#endif
/* Returns true if any fatbin has this kernel: a compressed fatbin does not show its own kernels. */
int is_kernel(const char *name);
/* Checks a launch. is_kernel(kernel) must be true. */
Launch look_at_launch(const char *kernel, unsigned blocks, unsigned threads, void **arguments);
/* Runs a kernel lane by lane. Several threads may call this at once. */
void run_kernel(const char *kernel, unsigned blocks, unsigned threads, void **arguments);
/* For tests. Stops the GPUs' clock, so that no kernel's wait times out, however slow the host is. */
void fake_hold_clock(int hold);
#ifdef __cplusplus
}
#endif
