/* Workers run on the CPUs that the process may use, whichever thread calls first: its own affinity mask does not count
 * for them, those of all threads of the process do. Each case in a child, where no call was made before. */
#define _GNU_SOURCE
#include "check.h"
#include "child.h"
#include "workers.h"

#include <pthread.h>
#include <sys/mman.h>

static cpu_set_t all, one;
static int *usual; /* workers of a process that may use all CPUs, which a quota may make fewer */

static void hold_this_thread_to(const cpu_set_t *set) {
    CHECK(sched_setaffinity(0, sizeof *set, set) == 0);
}

static void a_process_that_nobody_holds(void) {
    pack_large();
    *usual = workers_that_may_use(&all);
}

static void a_first_caller_on_one_cpu_who_may_use_all_of_them_later(void) {
    hold_this_thread_to(&one);
    pack_large();
    CHECK(workers_that_may_use(&one) == 0);
    hold_this_thread_to(&all);
    pack_large();
    CHECK(workers_that_may_use(&all) == *usual);
}

static void *pack_on_one_cpu(void *unused) {
    cpu_set_t still;
    hold_this_thread_to(&one);
    pack_large();
    CHECK(sched_getaffinity(0, sizeof still, &still) == 0 && CPU_EQUAL(&still, &one));
    return unused;
}

static void pack_on_a_thread_on_one_cpu(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, pack_on_one_cpu, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

static void a_thread_on_one_cpu_of_a_process_that_may_use_all_of_them(void) {
    pack_on_a_thread_on_one_cpu();
    CHECK(workers_that_may_use(&all) == *usual);
}

static void two_workers_for_a_thread_on_one_cpu(void) {
    CHECK_OK(gc_set_threads(2));
    pack_on_a_thread_on_one_cpu();
    CHECK(workers_that_may_use(&all) == 1);
}

static void workers_that_were_started_for_a_process_on_one_cpu(void) {
    hold_this_thread_to(&one);
    CHECK_OK(gc_set_threads(3));
    pack_large();
    CHECK(workers_that_may_use(&one) == 2);
    hold_this_thread_to(&all);
    pack_large();
    CHECK(workers_that_may_use(&all) == 2);
}

/* As taskset does: the process stays where it is held, also by its workers. */
static void a_process_on_one_cpu(void) {
    hold_this_thread_to(&one);
    pack_large();
    pack_large();
    CHECK(workers_that_may_use(&one) == 0);
}

static void a_process_that_is_held_to_one_cpu_later(void) {
    CHECK_OK(gc_set_threads(2));
    pack_large();
    CHECK(workers_that_may_use(&all) == 1);
    hold_this_thread_to(&one);
    CHECK_OK(gc_set_threads(2)); /* counts again */
    pack_large();
    CHECK(workers_that_may_use(&one) == 1);
}

static void pack_on_all(void) {
    pack_large();
    CHECK(workers_that_may_use(&all) == *usual);
}

static void a_child_that_is_forked_after_a_count_on_one_cpu(void) {
    hold_this_thread_to(&one);
    pack_large();
    hold_this_thread_to(&all);
    CHECK(returns_in_a_child(pack_on_all));
}

int main(void) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"a process that nobody holds", a_process_that_nobody_holds},
        {"a first caller on one CPU, who may use all of them later",
         a_first_caller_on_one_cpu_who_may_use_all_of_them_later},
        {"a thread on one CPU of a process that may use all of them",
         a_thread_on_one_cpu_of_a_process_that_may_use_all_of_them},
        {"two workers for a thread on one CPU", two_workers_for_a_thread_on_one_cpu},
        {"workers that were started for a process on one CPU", workers_that_were_started_for_a_process_on_one_cpu},
        {"a process on one CPU", a_process_on_one_cpu},
        {"a process that is held to one CPU later", a_process_that_is_held_to_one_cpu_later},
        {"a child that is forked after a count on one CPU", a_child_that_is_forked_after_a_count_on_one_cpu},
    };
    int failed = 0, first = 0;
    usual = mmap(NULL, sizeof *usual, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(usual != MAP_FAILED && sched_getaffinity(0, sizeof all, &all) == 0);
    while (!CPU_ISSET(first, &all))
        first++;
    CPU_SET(first, &one);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (!returns_in_a_child(cases[i].run)) {
            fprintf(stderr, "affinity: FAILED: %s\n", cases[i].name);
            failed = 1;
        }
    }
    if (*usual == 0)
        puts("affinity: this process may use one CPU: not shown that others are used");
    printf("affinity: %s, on %d CPUs\n", failed ? "FAILED" : "ok", CPU_COUNT(&all));
    return failed;
}
