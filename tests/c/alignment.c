/* Memory of the library is aligned to 256, also where the functions that allocate aligned memory do not align: those of
 * this program stand in place of the C library's, for the library too. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

enum { TENSORS = 8, ALIGNMENT = 256 };

int posix_memalign(void **memory, size_t alignment, size_t size);
void *aligned_alloc(size_t alignment, size_t size);
void *memalign(size_t alignment, size_t size);

int posix_memalign(void **memory, size_t alignment, size_t size) {
    (void)alignment;
    *memory = malloc(size);
    return *memory == NULL;
}

void *aligned_alloc(size_t alignment, size_t size) {
    (void)alignment;
    return malloc(size);
}

void *memalign(size_t alignment, size_t size) {
    return aligned_alloc(alignment, size);
}

/* Checks the tensor's address, and writes to every byte of it. */
static void check(const DLManagedTensor *tensor, int64_t bytes) {
    if ((size_t)tensor->dl_tensor.data % ALIGNMENT != 0) {
        fprintf(stderr, "alignment: %ld bytes lie at %p\n", (long)bytes, tensor->dl_tensor.data);
        exit(1);
    }
    memset(tensor->dl_tensor.data, 0xa5, (size_t)bytes);
}

static void free_all(DLManagedTensor **tensors) {
    for (int i = 0; i < TENSORS; i++)
        gc_tensor_free(tensors[i]);
}

/* Several at a time, so that they lie at different addresses. */
static void check_size(int64_t bytes) {
    DLManagedTensor *made[TENSORS], *packed[TENSORS];
    for (int i = 0; i < TENSORS; i++) {
        CHECK_OK(gc_tensor_empty(cpu(), dtype_of(kDLUInt, 8), 1, &bytes, &made[i]));
        check(made[i], bytes);
    }
    for (int i = 0; i < TENSORS; i++) {
        CHECK_OK(gc_pack_chunks(made[i], 1, &packed[i]));
        check(packed[i], gc_chunk_bytes(bytes, 1));
    }
    free_all(made);
    for (int i = 0; i < TENSORS; i++) {
        CHECK_OK(gc_unpack_bits(packed[i], 0, bytes, GC_BIT_ORDER_BIG, &made[i]));
        check(made[i], bytes);
    }
    free_all(made);
    free_all(packed);
}

int main(void) {
    static const int64_t sizes[] = {1, 8, 16, 255, 256, 257, 1000, 4096, 100000, 1 << 20, (8 << 20) + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        check_size(sizes[i]);
    puts("alignment: ok");
    return 0;
}
