/* Many threads at once: on one input, each with its own outputs and last error. Threads free tensors that another
 * thread made, and chunks that share an allocation. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>

enum { THREADS = 8, ROUNDS = 400, ELEMENTS = 4099, CHUNKS = 5 };

static unsigned char input[ELEMENTS], truth[ELEMENTS];
static DLManagedTensor *handed_over[THREADS][CHUNKS];
static pthread_barrier_t barrier;
static int releases;
static pthread_mutex_t releases_lock = PTHREAD_MUTEX_INITIALIZER;

static void count_release(void *ctx) {
    pthread_mutex_lock(&releases_lock);
    *(int *)ctx += 1;
    pthread_mutex_unlock(&releases_lock);
}

static void check_bits(DLManagedTensor *const *chunks) {
    int64_t bytes = gc_chunk_bytes(ELEMENTS, CHUNKS);
    const unsigned char *first = chunks[0]->dl_tensor.data;
    for (int64_t element = 0; element < ELEMENTS; element++)
        CHECK((first[element / 8] >> (7 - element % 8) & 1) == truth[element]);
    for (int k = 0; k < CHUNKS; k++)
        CHECK(chunks[k]->dl_tensor.data == first + k * bytes && chunks[k]->dl_tensor.shape[0] == bytes);
}

static void *work(void *argument) {
    int self = *(int *)argument, next = (self + 1) % THREADS;
    int64_t shape[1] = {ELEMENTS};
    DLManagedTensor src = borrowed(view_of(input, dtype_of(kDLBool, 8), 1, shape));
    char expected[32];
    for (int round = 0; round < ROUNDS; round++) {
        DLManagedTensor *unpacked, *mine;
        CHECK_OK(gc_pack_chunks(&src, CHUNKS, handed_over[self]));
        check_bits(handed_over[self]);
        CHECK_OK(gc_unpack_chunks(handed_over[self], CHUNKS, ELEMENTS, &unpacked));
        CHECK(memcmp(unpacked->dl_tensor.data, truth, ELEMENTS) == 0);
        gc_tensor_free(unpacked);

        /* Each thread has its own last error. */
        CHECK_STATUS(gc_pack_chunks(&src, (size_t)-1 >> 1, &unpacked), GC_STATUS_SIZE_OVERFLOW);
        CHECK(gc_chunk_bytes(-(int64_t)self - 1, 1) == -1);
        snprintf(expected, sizeof expected, "n_elements: -%d is", self + 1);
        CHECK(strncmp(gc_last_error(), expected, strlen(expected)) == 0);

        CHECK_OK(gc_tensor_from_pointer(input, cpu(), dtype_of(kDLBool, 8), 1, shape, NULL, count_release, &releases,
                                        &mine));
        gc_tensor_free(mine);

        /* Frees the neighbour's last and first chunk while the neighbour frees the others. */
        pthread_barrier_wait(&barrier);
        gc_tensor_free(handed_over[next][CHUNKS - 1]);
        for (int k = 1; k < CHUNKS - 1; k++)
            gc_tensor_free(handed_over[self][k]);
        gc_tensor_free(handed_over[next][0]);
        pthread_barrier_wait(&barrier);
    }
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    int numbers[THREADS];
    for (int i = 0; i < ELEMENTS; i++) {
        truth[i] = ((unsigned)i * 2654435761u >> 13 & 3) == 0;
        input[i] = truth[i] ? (unsigned char)(i | 1) : 0;
    }
    CHECK(pthread_barrier_init(&barrier, NULL, THREADS) == 0);
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        CHECK(pthread_create(&threads[i], NULL, work, &numbers[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(releases == THREADS * ROUNDS);
    puts("threads: ok");
    return 0;
}
