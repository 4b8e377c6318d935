/* Forked children: whatever threads of the parent were doing in the library, a child's calls return, are right, and have
 * threads of its own. First while a thread makes the first call of the process, then after a large call, then while
 * threads are in large calls, and in calls on CUDA, which is refused there; last a child with its parent's number, as the
 * first process of a PID namespace. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MIB = 1 << 20, LARGE = 64 * MIB, SMALL = 12 * MIB, PACKERS = 3, FORKS = 50, WORKERS = 3 };
enum { LIMIT_S = 120, TOO_LATE = 7, LEFT_OUT = 8 };

static unsigned char *elements;

static int is_one(int64_t element) {
    return (uint32_t)element * 2654435761u >> 29 == 0;
}

/* Packs the first `count` elements to `bytes`; tells whether the bytes are right. */
static int packs(int64_t count, unsigned char *bytes) {
    int64_t shape[1], rows[2] = {1, 0};
    DLTensor src = view_of(elements, dtype_of(kDLBool, 8), 1, shape);
    DLTensor dst = view_of(bytes, dtype_of(kDLUInt, 8), 2, rows);
    shape[0] = count;
    rows[1] = count / 8;
    memset(bytes, 0xa5, (size_t)rows[1]);
    CHECK_OK(gc_pack_chunks_into(&src, GC_BIT_ORDER_BIG, &dst, NULL));
    for (int64_t byte = 0; byte < rows[1]; byte++) {
        unsigned expected = 0;
        for (int bit = 0; bit < 8; bit++)
            expected = expected << 1 | (unsigned)is_one(8 * byte + bit);
        if (bytes[byte] != expected)
            return 0;
    }
    return 1;
}

static int threads_of_this_process(void) {
    DIR *tasks = opendir("/proc/self/task");
    int entries = 0;
    CHECK(tasks != NULL);
    while (readdir(tasks) != NULL)
        entries++;
    closedir(tasks);
    return entries - 2; /* . and .. */
}

/* A handler of its own, for the first process of a namespace is not ended by a signal. */
static void too_late(int signal) {
    (void)signal;
    _exit(TOO_LATE);
}

static void limit_time(void) {
    CHECK(signal(SIGALRM, too_late) != SIG_ERR);
    alarm(LIMIT_S);
}

/* Runs `body` in a child, which is to end with success in time; tells whether it was left out. */
static int in_child(void (*body)(void)) {
    int status;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        limit_time();
        body();
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) != TOO_LATE);
    CHECK(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == LEFT_OUT);
    return WEXITSTATUS(status) == LEFT_OUT;
}

/* ---- */

extern char **environ;
static int stop_in_getenv;
static pthread_barrier_t barrier; /* of the thread that makes the first call, and the one that forks */

/* In place of libc's, also for the library, which asks for GRADCODEC_CPU when it first chooses an instruction set. */
char *getenv(const char *name) {
    size_t length = strlen(name);
    if (stop_in_getenv) {
        stop_in_getenv = 0;
        pthread_barrier_wait(&barrier);
        pthread_barrier_wait(&barrier);
    }
    for (char **entry = environ; *entry != NULL; entry++)
        if (strncmp(*entry, name, length) == 0 && (*entry)[length] == '=')
            return *entry + length + 1;
    return NULL;
}

static void pack_little(void) {
    static unsigned char bytes[512];
    CHECK(packs(4096, bytes));
}

static void *make_first_call(void *unused) {
    static unsigned char bytes[512];
    stop_in_getenv = 1;
    CHECK(packs(4096, bytes));
    return unused;
}

static void fork_during_the_first_call(void) {
    pthread_t thread;
    CHECK(pthread_barrier_init(&barrier, NULL, 2) == 0);
    CHECK(pthread_create(&thread, NULL, make_first_call, NULL) == 0);
    pthread_barrier_wait(&barrier);
    in_child(pack_little);
    pthread_barrier_wait(&barrier);
    CHECK(pthread_join(thread, NULL) == 0);
}

/* ---- */

static void pack_with_own_threads(int64_t count) {
    static unsigned char bytes[LARGE / 8];
    CHECK(threads_of_this_process() == 1);
    CHECK(packs(count, bytes));
    CHECK(threads_of_this_process() == WORKERS);
}

static void pack_large(void) {
    pack_with_own_threads(LARGE);
}

static void pack_small(void) {
    pack_with_own_threads(SMALL);
}

static void fork_after_a_large_call(void) {
    static unsigned char bytes[LARGE / 8];
    CHECK(packs(LARGE, bytes));
    CHECK(threads_of_this_process() == WORKERS);
    in_child(pack_large);
    CHECK(packs(LARGE, bytes));
}

/* ---- */

static int stop; /* under `lock`, as are the calls that were made */
static int64_t calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t called = PTHREAD_COND_INITIALIZER;

static void *keep_packing(void *bytes) {
    int64_t shape[1] = {SMALL}, rows[2] = {1, SMALL / 8};
    DLTensor src = view_of(elements, dtype_of(kDLBool, 8), 1, shape);
    DLTensor dst = view_of(bytes, dtype_of(kDLUInt, 8), 2, rows);
    int stopped = 0;
    while (!stopped) {
        CHECK_OK(gc_pack_chunks_into(&src, GC_BIT_ORDER_BIG, &dst, NULL));
        pthread_mutex_lock(&lock);
        stopped = stop;
        calls++;
        pthread_cond_signal(&called);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

/* Children again and again, each in the middle of some call. */
static void fork_during_calls(void (*body)(void)) {
    for (int i = 0; i < FORKS; i++) {
        int64_t before;
        in_child(body);
        pthread_mutex_lock(&lock);
        for (before = calls; calls == before;)
            pthread_cond_wait(&called, &lock);
        pthread_mutex_unlock(&lock);
    }
    pthread_mutex_lock(&lock);
    stop = 1;
    pthread_mutex_unlock(&lock);
}

/* The threads of the library may not have been started yet when the first forks come. */
static void fork_during_large_calls(void) {
    static unsigned char bytes[PACKERS][SMALL / 8];
    pthread_t threads[PACKERS];
    for (int i = 0; i < PACKERS; i++)
        CHECK(pthread_create(&threads[i], NULL, keep_packing, bytes[i]) == 0);
    fork_during_calls(pack_small);
    for (int i = 0; i < PACKERS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

/* ---- */

static const DLDevice cuda = {kDLCUDA, 0};
static DLManagedTensor *of_the_parent;

static gc_status_t make(int64_t size, DLManagedTensor **out) {
    return gc_tensor_empty(cuda, dtype_of(kDLUInt, 8), 1, &size, out);
}

static void *keep_making(void *unused) {
    int stopped = 0;
    for (int64_t size = MIB; !stopped; size = size % (64 * MIB) + MIB) {
        DLManagedTensor *tensor;
        CHECK_OK(make(size, &tensor));
        gc_tensor_free(tensor);
        pthread_mutex_lock(&lock);
        stopped = stop;
        calls++;
        pthread_cond_signal(&called);
        pthread_mutex_unlock(&lock);
    }
    return unused;
}

/* CUDA does not work in a child: every call says so, and returns. */
static void be_refused(void) {
    DLManagedTensor *tensor;
    CHECK_STATUS(gc_trim(cuda), GC_STATUS_CUDA);
    CHECK_STATUS(make(MIB, &tensor), GC_STATUS_CUDA);
    CHECK_STATUS(gc_pack_chunks(of_the_parent, 1, &tensor), GC_STATUS_CUDA);
    CHECK_STATUS(gc_prepare(cuda), GC_STATUS_CUDA);
    gc_tensor_free(of_the_parent);
}

/* With a CUDA driver that needs no GPU: the library takes the one that is loaded. */
static void fork_during_cuda_calls(void) {
    char path[4096];
    pthread_t thread;
    const char *drivers = getenv("GRADCODEC_DRIVERS");
    if (drivers == NULL)
        _exit(LEFT_OUT);
    snprintf(path, sizeof path, "%s/driver/libcuda.so.1", drivers);
    CHECK(dlopen(path, RTLD_NOW) != NULL);
    CHECK_OK(make(100, &of_the_parent));
    CHECK(pthread_create(&thread, NULL, keep_making, NULL) == 0);
    fork_during_calls(be_refused);
    CHECK(pthread_join(thread, NULL) == 0);
    gc_tensor_free(of_the_parent);
    CHECK_OK(gc_trim(cuda));
}

/* ---- */

static void pack_as_number_one(void) {
    CHECK(getpid() == 1);
    pack_large();
}

static void number_one_has_a_child(void) {
    pack_as_number_one();
    if (unshare(CLONE_NEWPID) != 0)
        _exit(LEFT_OUT);
    in_child(pack_as_number_one);
}

static void fork_to_the_same_number(void) {
    if (unshare(CLONE_NEWPID) != 0)
        _exit(LEFT_OUT);
    if (in_child(number_one_has_a_child))
        _exit(LEFT_OUT);
}

int main(void) {
    limit_time();
    elements = malloc(LARGE);
    CHECK(elements != NULL);
    for (int64_t i = 0; i < LARGE; i++)
        elements[i] = (unsigned char)is_one(i);

    /* Each in a child, where no call was made and no thread was started before. */
    in_child(fork_during_the_first_call);
    CHECK_OK(gc_set_threads(WORKERS));
    in_child(fork_after_a_large_call);
    in_child(fork_during_large_calls);
    if (in_child(fork_during_cuda_calls))
        puts("fork: left out: CUDA calls, which take a driver without a card in GRADCODEC_DRIVERS");
    if (in_child(fork_to_the_same_number))
        puts("fork: left out: a child with its parent's number, which takes the right to unshare PID namespaces");
    puts("fork: ok");
    free(elements);
    return 0;
}
