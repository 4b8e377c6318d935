/* A thread that is cancelled while it is in a call ends after the call, at a cancellation point of its own, and the
 * call has done its work. Each case in a child, where its call is the first one. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include "child.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/socket.h>

enum { LARGE = 32 << 20 };

static int returned, released;

/* What any cancellation point in a callback does. */
static void release(void *unused) {
    (void)unused;
    pthread_testcancel();
    released++;
}

/* The cancellation comes while the callback runs. */
static void release_and_be_cancelled(void *unused) {
    CHECK(pthread_cancel(pthread_self()) == 0);
    release(unused);
}

static void delete_tensor(DLManagedTensor *tensor) {
    release(tensor);
}

static void delete_versioned(DLManagedTensorVersioned *tensor) {
    release(tensor);
}

static void cancel_myself(void) {
    CHECK(pthread_cancel(pthread_self()) == 0);
}

static DLManagedTensor *tensor_with(void (*callback)(void *)) {
    static unsigned char byte;
    static int64_t length = 1;
    DLManagedTensor *tensor;
    CHECK_OK(gc_tensor_from_pointer(&byte, cpu(), dtype_of(kDLUInt, 8), 1, &length, NULL, callback, NULL, &tensor));
    return tensor;
}

static void a_first_large_call(void) {
    int64_t length = LARGE, rows[2] = {1, LARGE / 8};
    unsigned char *elements = malloc(LARGE), *bytes = malloc(LARGE / 8);
    DLTensor src = view_of(elements, dtype_of(kDLBool, 8), 1, &length), dst;
    CHECK(elements != NULL && bytes != NULL);
    for (int64_t i = 0; i < LARGE; i++)
        elements[i] = i % 3 == 0;
    dst = view_of(bytes, dtype_of(kDLUInt, 8), 2, rows);
    cancel_myself();
    CHECK_OK(gc_pack_chunks_into(&src, GC_BIT_ORDER_BIG, &dst, NULL));
    for (int64_t i = 0; i < LARGE / 8; i++)
        CHECK(bytes[i] == (i % 3 == 0 ? 0x92 : i % 3 == 1 ? 0x49 : 0x24));
    free(elements);
    free(bytes);
}

static void a_first_large_call_with_threads(void) {
    CHECK_OK(gc_set_threads(4));
    a_first_large_call();
}

static void a_preparation(void) {
    cancel_myself();
    CHECK_OK(gc_prepare(cpu()));
}

/* In place of libc's, for the library, which loads the CUDA driver: initializers of a driver may do anything. */
void *dlopen(const char *file, int mode) {
    (void)file;
    (void)mode;
    pthread_testcancel();
    return NULL;
}

char *dlerror(void) {
    static char reason[] = "there is none";
    return reason;
}

static void the_loading_of_a_driver(void) {
    DLDevice cuda = {kDLCUDA, 0};
    cancel_myself();
    CHECK_STATUS(gc_prepare(cuda), GC_STATUS_DRIVER_UNAVAILABLE);
}

static void a_release(void) {
    DLManagedTensor *tensor = tensor_with(release);
    cancel_myself();
    gc_tensor_free(tensor);
    CHECK(released == 1);
}

static void a_release_that_is_cancelled_within(void) {
    gc_tensor_free(tensor_with(release_and_be_cancelled));
    CHECK(released == 1);
}

static void the_deleter_of_another(void) {
    DLManagedTensor tensor;
    memset(&tensor, 0, sizeof tensor);
    tensor.deleter = delete_tensor;
    cancel_myself();
    gc_tensor_free(&tensor);
    CHECK(released == 1);
}

/* Tensors that were taken over, in either form. */
static void the_deleter_of_another_that_is_kept(void) {
    static unsigned char byte;
    int64_t length = 1;
    DLManagedTensor legacy, *ours;
    DLManagedTensorVersioned versioned, *ours_versioned;
    memset(&legacy, 0, sizeof legacy);
    memset(&versioned, 0, sizeof versioned);
    legacy.dl_tensor = versioned.dl_tensor = view_of(&byte, dtype_of(kDLUInt, 8), 1, &length);
    legacy.deleter = delete_tensor;
    versioned.deleter = delete_versioned;
    versioned.version.major = 1;
    CHECK_OK(gc_tensor_to_versioned(&legacy, &ours_versioned));
    CHECK_OK(gc_tensor_from_versioned(&versioned, &ours));
    cancel_myself();
    ours_versioned->deleter(ours_versioned);
    gc_tensor_free(ours);
    CHECK(released == 2);
}

/* A rank, and what came of its call. */
typedef struct {
    gc_comm_t *comm;
    gc_status_t status;
} Rank;

static void *reduce(void *argument) {
    Rank *rank = argument;
    float buffer[8] = {1, -1}, worker[8] = {0}, server[8] = {0};
    int64_t eight = 8;
    DLTensor tensors[3];
    tensors[0] = view_of(buffer, dtype_of(kDLFloat, 32), 1, &eight);
    tensors[1] = view_of(worker, dtype_of(kDLFloat, 32), 1, &eight);
    tensors[2] = view_of(server, dtype_of(kDLFloat, 32), 1, &eight);
    rank->status = gc_compressed_allreduce(rank->comm, &tensors[0], &tensors[1], &tensors[2], NULL);
    return NULL;
}

static int32_t engine(void *ctx, const void *send, void *recv, size_t bytes, DLDevice device, void *stream) {
    (void)send, (void)recv, (void)bytes, (void)device, (void)stream;
    release(ctx);
    return 7;
}

static void an_engine_that_is_cancelled_within(void) {
    gc_transport_t transport;
    Rank rank;
    memset(&transport, 0, sizeof transport);
    transport.struct_size = sizeof transport;
    transport.world_size = 2;
    transport.all_to_all = transport.all_gather = engine;
    CHECK_OK(gc_comm_from_transport(&transport, &rank.comm));
    cancel_myself();
    reduce(&rank);
    CHECK(rank.status == GC_STATUS_COMM && released == 1);
    gc_comm_free(rank.comm);
}

/* Whichever rank comes first waits; the other one is not cancelled. */
static void ranks_that_wait_for_each_other(void) {
    gc_comm_t *comms[2];
    Rank ranks[2];
    pthread_t other;
    int state;
    CHECK_OK(gc_comm_group(2, comms));
    ranks[0].comm = comms[0];
    ranks[1].comm = comms[1];
    CHECK(pthread_create(&other, NULL, reduce, &ranks[1]) == 0);
    cancel_myself();
    reduce(&ranks[0]);
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state) == 0); /* pthread_join is a cancellation point */
    CHECK(state == PTHREAD_CANCEL_ENABLE && pthread_join(other, NULL) == 0);
    CHECK(ranks[0].status == GC_STATUS_OK && ranks[1].status == GC_STATUS_OK);
    gc_comm_free(comms[0]);
    gc_comm_free(comms[1]);
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state) == 0);
}

/* poll(), sendmsg() and recvmsg() are cancellation points, and so is close(). */
static void a_tensor_for_another_process(void) {
    DLDevice host = {kDLCPU, 0};
    DLManagedTensor *tensor = tensor_with(NULL), *received;
    gc_share_t *lease;
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    cancel_myself();
    CHECK_STATUS(gc_share_receive(ends[1], host, 1, &received), GC_STATUS_TIMEOUT);
    CHECK_OK(gc_share_send(tensor, ends[0], 0, -1, &lease));
    CHECK_STATUS(gc_share_wait(lease, 1), GC_STATUS_TIMEOUT);
    CHECK_OK(gc_share_receive(ends[1], host, -1, &received));
    received->deleter(received);
    CHECK_OK(gc_share_wait(lease, -1));
    gc_share_free(lease);
    gc_tensor_free(tensor);
}

static void (*call)(void);

static void *thread(void *unused) {
    int state;
    call();
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state) == 0);
    CHECK(state == PTHREAD_CANCEL_ENABLE);
    returned = 1;
    pthread_testcancel();
    return unused;
}

static void in_a_thread_that_is_cancelled(void) {
    pthread_t cancelled;
    void *result;
    CHECK(pthread_create(&cancelled, NULL, thread, NULL) == 0);
    CHECK(pthread_join(cancelled, &result) == 0);
    CHECK(returned && result == PTHREAD_CANCELED);
}

/* A thread that cannot be cancelled stays so. */
static void check_that_the_state_is_kept(void) {
    int state;
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state) == 0);
    gc_tensor_free(tensor_with(release));
    CHECK(pthread_setcancelstate(state, &state) == 0);
    CHECK(state == PTHREAD_CANCEL_DISABLE);
}

int main(void) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"a first large call", a_first_large_call},
        {"a first large call with threads", a_first_large_call_with_threads},
        {"gc_prepare", a_preparation},
        {"the loading of a driver", the_loading_of_a_driver},
        {"a release", a_release},
        {"a release that is cancelled within", a_release_that_is_cancelled_within},
        {"the deleter of another", the_deleter_of_another},
        {"the deleter of another that is kept", the_deleter_of_another_that_is_kept},
        {"an engine that is cancelled within", an_engine_that_is_cancelled_within},
        {"ranks that wait for each other", ranks_that_wait_for_each_other},
        {"a tensor for another process", a_tensor_for_another_process},
    };
    int failed = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        call = cases[i].run;
        if (!returns_in_a_child(in_a_thread_that_is_cancelled)) {
            fprintf(stderr, "cancel: FAILED: %s\n", cases[i].name);
            failed = 1;
        }
    }
    check_that_the_state_is_kept();
    if (!failed)
        puts("cancel: ok");
    return failed;
}
