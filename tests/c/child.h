/* Runs something in a child process, where no call was made before. Wants _POSIX_C_SOURCE. */
#ifndef CHILD_H
#define CHILD_H

#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

/* Whether it returns there. */
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
