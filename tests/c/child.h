/* Runs a function in a child process that has made no call before. Needs _POSIX_C_SOURCE. */
#ifndef CHILD_H
#define CHILD_H

#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

/* Returns true if `run` returns in a child. */
static inline int returns_in_a_child(void (*run)(void)) {
    int status;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        run();
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    return status == 0;
}

#endif
