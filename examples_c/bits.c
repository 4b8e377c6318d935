/* Packs booleans to bits and unpacks them: into chunks, along an axis, and in the caller's memory.
 *
 *   gcc -std=c99 -Wall -Wextra -pedantic -Iinclude examples_c/bits.c -Ltarget/release -lgradcodec -o bits
 *   LD_LIBRARY_PATH=target/release ./bits */

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gradcodec.h>

static void must(gc_status_t status)
{
    if (status != GC_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", gc_status_name(status), gc_last_error());
        exit(EXIT_FAILURE);
    }
}

static void expect(const char *what, const void *got, const void *expected, size_t size)
{
    const bool same = memcmp(got, expected, size) == 0;
    printf("%-12s %s\n", what, same ? "as expected" : "WRONG");
    if (!same)
        exit(EXIT_FAILURE);
}

int main(void)
{
    /* A tensor describes memory: address, dtype and shape. One on the stack, without a deleter, is enough. */
    bool truth[2][10] = { { 1, 0, 0, 0, 0, 0, 0, 1, 1, 1 }, { 0, 1, 0, 0, 0, 0, 0, 0, 1, 0 } };
    int64_t shape[] = { 2, 10 };
    const DLTensor tensor = { truth, { kDLCPU, 0 }, 2, { kDLBool, 8, 1 }, shape, NULL, 0 };
    const DLManagedTensor source = { tensor, NULL, NULL };

    /* Two chunks. 20 bits fill 3 bytes, so a chunk has 2. The rows follow each other without a gap, and the first
     * element is the highest bit. */
    DLManagedTensor *chunks[2], *unpacked, *rows;
    must(gc_pack_chunks(&source, 2, chunks));
    const uint8_t first[] = { 0x81, 0xd0 }, second[] = { 0x20, 0x00 };
    expect("chunk 0", chunks[0]->dl_tensor.data, first, sizeof first);
    expect("chunk 1", chunks[1]->dl_tensor.data, second, sizeof second);

    must(gc_unpack_chunks(chunks, 2, 20, &unpacked));
    expect("unpacked", unpacked->dl_tensor.data, truth, sizeof truth);

    /* Along axis 1 every row begins its own byte: 2 rows of 2 bytes, and here the first element is the lowest bit. */
    must(gc_pack_bits(&source, 1, GC_BIT_ORDER_LITTLE, &rows));
    const uint8_t by_row[2][2] = { { 0x81, 0x03 }, { 0x02, 0x01 } };
    expect("by row", rows->dl_tensor.data, by_row, sizeof by_row);

    /* Packs the same chunks into this program's memory: nothing is allocated, so nothing is freed. */
    uint8_t bytes[2][2];
    int64_t bytes_shape[] = { 2, gc_chunk_bytes(20, 2) };
    DLTensor packed = { bytes, { kDLCPU, 0 }, 2, { kDLUInt, 8, 1 }, bytes_shape, NULL, 0 };
    must(gc_pack_chunks_into(&tensor, GC_BIT_ORDER_BIG, &packed, NULL));
    expect("packed into", bytes, "\x81\xd0\x20\x00", 4);

    float zeros_and_ones[20], expected[20];
    int64_t floats_shape[] = { 20 };
    DLTensor floats = { zeros_and_ones, { kDLCPU, 0 }, 1, { kDLFloat, 32, 1 }, floats_shape, NULL, 0 };
    must(gc_unpack_chunks_into(&packed, GC_BIT_ORDER_BIG, &floats, NULL));
    for (int i = 0; i < 20; i++)
        expected[i] = truth[i / 10][i % 10] ? 1.0f : 0.0f;
    expect("floats", zeros_and_ones, expected, sizeof expected);

    gc_tensor_free(rows);
    gc_tensor_free(unpacked);
    gc_tensor_free(chunks[0]); /* the chunks share one allocation, freed with the last of them, in any order */
    gc_tensor_free(chunks[1]);
    return EXIT_SUCCESS;
}
