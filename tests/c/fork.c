/* Forked children: a child's calls return, are correct and use the child's own threads, during any calls of the
 * parent's threads. Calls on CUDA fail. */
#define _GNU_SOURCE
#include "check.h"
#include "child.h"
#include "workers.h"

#include <dlfcn.h>
#include <pthread.h>

enum { ELEMENTS = 12 << 20, FORKS = 30, WORKERS = 3, LIMIT_S = 120 };

static unsigned char elements[ELEMENTS];
static const DLDevice cuda = {kDLCUDA, 0};
static DLManagedTensor *of_the_parent;

static int is_one(uint32_t element) { return element * 2654435761u >> 29 == 0; }

/* Packs all elements and checks the bytes. */
static void pack(unsigned char *bytes) {
    int64_t shape[1] = {ELEMENTS}, rows[2] = {1, ELEMENTS / 8};
    DLTensor src = view_of(elements, dtype_of(kDLBool, 8), 1, shape), dst = view_of(bytes, dtype_of(kDLUInt, 8), 2, rows);
    memset(bytes, 0xa5, ELEMENTS / 8);
    CHECK_OK(gc_pack_chunks_into(&src, GC_BIT_ORDER_BIG, &dst, NULL));
    for (uint32_t k = 0; k < ELEMENTS; k++)
        CHECK((bytes[k / 8] >> (7 - k % 8) & 1) == is_one(k));
}

static void pack_with_threads_of_its_own(void) {
    static unsigned char bytes[ELEMENTS / 8];
    cpu_set_t all;
    alarm(LIMIT_S);
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0 && workers_that_may_use(&all) == 0);
    pack(bytes);
    CHECK(workers_that_may_use(&all) == WORKERS - 1);
}

static int stop, calls; /* guarded by `lock` */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t called = PTHREAD_COND_INITIALIZER;

static int goes_on(void) {
    pthread_mutex_lock(&lock);
    int goes_on = !stop;
    calls++;
    pthread_cond_signal(&called);
    pthread_mutex_unlock(&lock);
    return goes_on;
}

static void *keep_packing(void *bytes) {
    do
        pack(bytes);
    while (goes_on());
    return NULL;
}

static gc_status_t make(int64_t size, DLManagedTensor **out) {
    return gc_tensor_empty(cuda, dtype_of(kDLUInt, 8), 1, &size, out);
}

static void *keep_making(void *unused) {
    int64_t size = 1 << 20;
    do {
        DLManagedTensor *tensor;
        CHECK_OK(make(size = size % (64 << 20) + (1 << 20), &tensor));
        gc_tensor_free(tensor);
    } while (goes_on());
    return unused;
}

/* CUDA does not work in a child: every call returns an error. */
static void be_refused(void) {
    DLManagedTensor *tensor;
    alarm(LIMIT_S);
    CHECK_STATUS(gc_trim(cuda), GC_STATUS_CUDA);
    CHECK_STATUS(make(1 << 20, &tensor), GC_STATUS_CUDA);
    CHECK_STATUS(gc_pack_chunks(of_the_parent, 1, &tensor), GC_STATUS_CUDA);
    gc_tensor_free(of_the_parent);
}

/* Forks FORKS children while threads run calls. */
static void fork_during(void *(*work)(void *), void (*in_child)(void)) {
    static unsigned char bytes[2][ELEMENTS / 8];
    pthread_t threads[2];
    stop = 0;
    for (int k = 0; k < 2; k++)
        CHECK(pthread_create(&threads[k], NULL, work, bytes[k]) == 0);
    for (int k = 0; k < FORKS; k++) {
        CHECK(returns_in_a_child(in_child));
        pthread_mutex_lock(&lock);
        for (int before = calls; calls == before;)
            pthread_cond_wait(&called, &lock);
        stop = k == FORKS - 1;
        pthread_mutex_unlock(&lock);
    }
    for (int k = 0; k < 2; k++)
        CHECK(pthread_join(threads[k], NULL) == 0);
}

int main(void) {
    char path[4096];
    for (uint32_t k = 0; k < ELEMENTS; k++)
        elements[k] = (unsigned char)is_one(k);
    CHECK_OK(gc_set_threads(WORKERS));
    fork_during(keep_packing, pack_with_threads_of_its_own); /* includes the process's first calls */
    if (getenv("GRADCODEC_DRIVERS") == NULL) {
        puts("fork: left out: CUDA calls, which take a driver without a GPU in GRADCODEC_DRIVERS");
        return 0;
    }
    snprintf(path, sizeof path, "%s/driver/libcuda.so.1", getenv("GRADCODEC_DRIVERS"));
    CHECK(dlopen(path, RTLD_NOW) != NULL);
    CHECK_OK(make(100, &of_the_parent));
    fork_during(keep_making, be_refused);
    gc_tensor_free(of_the_parent);
    CHECK_OK(gc_trim(cuda));
    puts("fork: ok");
    return 0;
}
