/* Shows failing calls: a status to branch on, a message to print, and an untouched output.
 *
 *   gcc -std=c99 -Wall -Wextra -pedantic -Iinclude examples_c/errors.c -Ltarget/release -lgradcodec -o errors
 *   LD_LIBRARY_PATH=target/release ./errors */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gradcodec.h>

static int wrong = 0;

static void expect(gc_status_t got, gc_status_t expected)
{
    if (got == GC_STATUS_OK)
        printf("%s\n", gc_status_name(got));
    else
        printf("%s: %s\n", gc_status_name(got), gc_last_error());
    if (got != expected) {
        printf("    WRONG: %s expected\n", gc_status_name(expected));
        wrong = 1;
    }
}

static void hold(const char *what, int holds)
{
    printf("    %s%s\n", holds ? "" : "WRONG: not true that ", what);
    wrong |= !holds;
}

int main(void)
{
    float gradient[20] = { 1.0f, -1.0f };
    int8_t flags[20] = { 1 };
    uint8_t bytes[3] = { 7, 7, 7 };
    int64_t elements[] = { 20 }, one_chunk[] = { 1, 3 }, too_short[] = { 1, 2 };
    const DLTensor floats = { gradient, { kDLCPU, 0 }, 1, { kDLFloat, 32, 1 }, elements, NULL, 0 };
    const DLTensor truth = { flags, { kDLCPU, 0 }, 1, { kDLInt, 8, 1 }, elements, NULL, 0 };
    const DLManagedTensor of_floats = { floats, NULL, NULL }, of_truth = { truth, NULL, NULL };
    DLTensor packed = { bytes, { kDLCPU, 0 }, 2, { kDLUInt, 8, 1 }, too_short, NULL, 0 };
    DLManagedTensor anything, *out = &anything;

    hold("there is no last error before the first", strcmp(gc_last_error(), "") == 0);

    /* A float has no truth value: its sign can be packed, its truth cannot. */
    expect(gc_pack_chunks(&of_floats, 1, &out), GC_STATUS_UNSUPPORTED_DTYPE);
    hold("out is as it was", out == &anything);

    expect(gc_pack_chunks(&of_truth, 0, &out), GC_STATUS_INVALID_ARGUMENT);
    expect(gc_pack_chunks(NULL, 1, &out), GC_STATUS_INVALID_ARGUMENT);
    hold("out is as it was", out == &anything);

    /* The stream tier checks everything before it writes the first byte. */
    expect(gc_pack_signs_into(&floats, GC_BIT_ORDER_BIG, &packed, NULL), GC_STATUS_SHAPE_MISMATCH);
    hold("no byte was written", memcmp(bytes, "\7\7\7", 3) == 0);

    packed.shape = one_chunk;
    expect(gc_pack_signs_into(&floats, 2, &packed, NULL), GC_STATUS_INVALID_ARGUMENT);
    hold("no byte was written", memcmp(bytes, "\7\7\7", 3) == 0);

    /* Functions that return a number return -1 on failure; gc_last_error() has the reason, as for a status. */
    hold("0 chunks have no size", gc_chunk_bytes(20, 0) == -1);
    char reason[256];
    snprintf(reason, sizeof reason, "%s", gc_last_error()); /* a copy: the next failure replaces the message */
    printf("    %s\n", reason);

    /* Success does not clear the last error, so check the status, not the message. */
    expect(gc_pack_signs_into(&floats, GC_BIT_ORDER_BIG, &packed, NULL), GC_STATUS_OK);
    hold("the signs are there", memcmp(bytes, "\xbf\xff\xf0", 3) == 0);
    hold("the last error is still the last one", strcmp(gc_last_error(), reason) == 0);

    hold("a status from the future has a name too", strlen(gc_status_name(123456)) > 0);
    return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}
