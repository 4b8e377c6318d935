/* A call large enough for several threads, and a check of the library's threads' CPUs. Needs _GNU_SOURCE. */
#ifndef WORKERS_H
#define WORKERS_H

#include "check.h"

#include <dirent.h>
#include <sched.h>
#include <unistd.h>

static inline void pack_large(void) {
    enum { ELEMENTS = 16 << 20 };
    static unsigned char elements[ELEMENTS], bytes[ELEMENTS / 8];
    int64_t shape[1] = {ELEMENTS}, rows[2] = {1, ELEMENTS / 8};
    DLTensor src = view_of(elements, dtype_of(kDLBool, 8), 1, shape);
    DLTensor dst = view_of(bytes, dtype_of(kDLUInt, 8), 2, rows);
    CHECK_OK(gc_pack_chunks_into(&src, GC_BIT_ORDER_BIG, &dst, NULL));
}

/* Returns the number of workers; checks that each may use exactly the CPUs in `set`. */
static inline int workers_that_may_use(const cpu_set_t *set) {
    DIR *tasks = opendir("/proc/self/task");
    struct dirent *task;
    int workers = 0;
    CHECK(tasks != NULL);
    while ((task = readdir(tasks)) != NULL) {
        char path[300], name[32] = "";
        FILE *file;
        cpu_set_t of_task;
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        file = fopen(path, "r");
        if (file == NULL) /* ".", ".." or a finished thread */
            continue;
        if (fgets(name, sizeof name, file) != NULL && strcmp(name, "gradcodec\n") == 0) {
            CHECK(sched_getaffinity(atoi(task->d_name), sizeof of_task, &of_task) == 0);
            CHECK(CPU_EQUAL(&of_task, set));
            workers++;
        }
        fclose(file);
    }
    closedir(tasks);
    return workers;
}

#endif
