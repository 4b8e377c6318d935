/* Packs and unpacks a bool tensor of 2^33 elements in a sparse mapping, with ones on both sides of 2^31 and 2^32 and at
 * the end. Takes 9 GiB of memory, because unpacking writes every byte. Huge pages, where the system offers them, save
 * millions of page faults. */
#define _DEFAULT_SOURCE
#include "check.h"

#include <sys/mman.h>

#define ELEMENTS ((int64_t)1 << 33)
#define CHUNKS 4

static const int64_t ones[] = {
    0, ((int64_t)1 << 31) - 1, (int64_t)1 << 31, ((int64_t)1 << 31) + 1, ((int64_t)1 << 32) - 1,
    (int64_t)1 << 32, ((int64_t)1 << 32) + 9, ELEMENTS - 1};
enum { ONES = sizeof ones / sizeof ones[0] };

/* Counts non-zero bytes; skips zero pages by comparing them with a page of zeros. */
static int64_t count_nonzero(const unsigned char *bytes, int64_t length) {
    static const unsigned char zeros[1 << 16];
    int64_t count = 0;
    for (int64_t start = 0; start < length; start += sizeof zeros) {
        int64_t stretch = length - start < (int64_t)sizeof zeros ? length - start : (int64_t)sizeof zeros;
        if (memcmp(bytes + start, zeros, (size_t)stretch) != 0)
            for (int64_t i = 0; i < stretch; i++)
                count += bytes[start + i] != 0;
    }
    return count;
}

static unsigned char *map_elements(void) {
    void *elements =
        mmap(NULL, (size_t)ELEMENTS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(elements != MAP_FAILED);
    (void)madvise(elements, (size_t)ELEMENTS, MADV_HUGEPAGE);
    return elements;
}

int main(void) {
    int64_t shape[1] = {ELEMENTS}, rows[2] = {CHUNKS, ELEMENTS / 8 / CHUNKS};
    unsigned char *elements = map_elements();
    for (int i = 0; i < ONES; i++)
        elements[ones[i]] = 1;

    DLManagedTensor src = borrowed(view_of(elements, dtype_of(kDLBool, 8), 1, shape));
    DLManagedTensor *chunks[CHUNKS];
    CHECK_OK(gc_pack_chunks(&src, CHUNKS, chunks));
    CHECK(gc_chunk_bytes(ELEMENTS, CHUNKS) == ELEMENTS / 8 / CHUNKS);
    const unsigned char *bytes = chunks[0]->dl_tensor.data;
    unsigned char expected;
    for (int i = 0; i < ONES; i++) {
        expected = 0;
        for (int j = 0; j < ONES; j++)
            if (ones[j] / 8 == ones[i] / 8)
                expected |= (unsigned char)(0x80 >> ones[j] % 8);
        CHECK(bytes[ones[i] / 8] == expected);
    }
    /* 2^31 and its upper neighbour share a byte. */
    CHECK(count_nonzero(bytes, ELEMENTS / 8) == ONES - 1);
    CHECK(munmap(elements, (size_t)ELEMENTS) == 0);

    unsigned char *again = map_elements();
    DLTensor packed = view_of(chunks[0]->dl_tensor.data, dtype_of(kDLUInt, 8), 2, rows);
    DLTensor unpacked = view_of(again, dtype_of(kDLBool, 8), 1, shape);
    CHECK_OK(gc_unpack_chunks_into(&packed, GC_BIT_ORDER_BIG, &unpacked, NULL));
    for (int i = 0; i < ONES; i++)
        CHECK(again[ones[i]] == 1);
    CHECK(count_nonzero(again, ELEMENTS) == ONES);
    CHECK(munmap(again, (size_t)ELEMENTS) == 0);
    for (int k = 0; k < CHUNKS; k++)
        gc_tensor_free(chunks[k]);
    puts("huge: ok");
    return 0;
}
