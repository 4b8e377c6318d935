/* OMP_PROC_BIND holds each thread of an OpenMP program, also the main thread, to a CPU of its own. A large call of the
 * main thread uses all of them, when the first parallel region has started the others. */
#define _GNU_SOURCE
#include "check.h"
#include "workers.h"

#include <omp.h>

int main(int argc, char **argv) {
    const char *usual = getenv("GRADCODEC_TEST_WORKERS");
    cpu_set_t all, mine;
    int threads = 0;
    (void)argc;
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    if (usual == NULL) {
        /* What OpenMP reads when the program starts, and how many workers there are without that. */
        char cpus[32], workers[32];
        snprintf(cpus, sizeof cpus, "%d", CPU_COUNT(&all));
        pack_large();
        snprintf(workers, sizeof workers, "%d", workers_that_may_use(&all));
        CHECK(setenv("OMP_PROC_BIND", "true", 1) == 0 && setenv("OMP_PLACES", "threads", 1) == 0);
        CHECK(setenv("OMP_NUM_THREADS", cpus, 1) == 0 && unsetenv("OMP_DYNAMIC") == 0);
        CHECK(setenv("GRADCODEC_TEST_WORKERS", workers, 1) == 0);
        execv("/proc/self/exe", argv);
        CHECK(!"execv");
    }
    CPU_ZERO(&all);
#pragma omp parallel
    {
        cpu_set_t own;
        CHECK(sched_getaffinity(0, sizeof own, &own) == 0);
#pragma omp critical
        {
            CPU_OR(&all, &all, &own);
            threads++;
        }
    }
    CHECK(threads == atoi(getenv("OMP_NUM_THREADS")) && CPU_COUNT(&all) == threads);
    CHECK(sched_getaffinity(0, sizeof mine, &mine) == 0);
    CHECK(CPU_COUNT(&mine) < threads || threads == 1); /* a core's CPUs may count as one place */

    pack_large();
    CHECK(workers_that_may_use(&all) == atoi(usual));
    if (threads == 1)
        puts("openmp: this process may use one CPU: not shown that others are used");
    printf("openmp: ok, %s workers beside the main thread, on %d CPUs\n", usual, threads);
    return 0;
}
