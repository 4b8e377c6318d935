/* Workers run on the CPUs that callers may use. Each case runs in a child that has made no call before. */
#define _GNU_SOURCE
#include "check.h"
#include "child.h"
#include "workers.h"

static cpu_set_t all, one;

static void hold_to(const cpu_set_t *set) { CHECK(sched_setaffinity(0, sizeof *set, set) == 0); }

static void a_first_caller_on_one_cpu_who_may_use_all_of_them_later(void) {
    hold_to(&one);
    pack_large();
    CHECK(workers_that_may_use(&one) == 0);
    hold_to(&all);
    pack_large();
    CHECK(workers_that_may_use(&all) > 0 || CPU_COUNT(&all) == 1);
}

static void workers_that_are_asked_for_on_one_cpu(void) {
    hold_to(&one);
    CHECK_OK(gc_set_threads(3));
    pack_large();
    CHECK(workers_that_may_use(&one) == 2);
    hold_to(&all);
    pack_large();
    CHECK(workers_that_may_use(&all) == 2);
    hold_to(&one);
    CHECK_OK(gc_set_threads(3)); /* counts the CPUs again */
    pack_large();
    CHECK(workers_that_may_use(&one) == 2);
}

int main(void) {
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    for (int cpu = 0; CPU_COUNT(&one) == 0; cpu++)
        if (CPU_ISSET(cpu, &all))
            CPU_SET(cpu, &one);
    CHECK(returns_in_a_child(a_first_caller_on_one_cpu_who_may_use_all_of_them_later));
    CHECK(returns_in_a_child(workers_that_are_asked_for_on_one_cpu));
    printf("affinity: ok, on %d CPUs\n", CPU_COUNT(&all));
    return 0;
}
