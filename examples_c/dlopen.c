/* Uses the library without linking against it: the program loads it at run time, or runs without it.
 *
 *   gcc -std=c99 -Wall -Wextra -pedantic -Iinclude examples_c/dlopen.c -o dlopen
 *   ./dlopen target/release/libgradcodec.so.0
 *
 * No -lgradcodec; before glibc 2.34 -ldl. Without an argument it loads the library that is installed. */

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gradcodec/loader.h>

static gc_api_t gc; /* the functions of gradcodec.h, under their names */

static void must(gc_status_t status)
{
    if (status != GC_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", gc.gc_status_name(status), gc.gc_last_error());
        exit(EXIT_FAILURE);
    }
}

static void hold(const char *what, bool holds)
{
    printf("%s%s\n", holds ? "" : "WRONG: not true that ", what);
    if (!holds)
        exit(EXIT_FAILURE);
}

int main(int argc, char **argv)
{
    /* Loading a missing library gives an error message and no functions. A program can continue without it. */
    char why[256];
    const gc_status_t status = gc_load("/missing/libgradcodec.so.0", &gc, why, sizeof why);
    printf("refused: %s\n", why);
    hold("what is not there is refused", status == GC_STATUS_INVALID_ARGUMENT && gc.gc_pack_chunks == NULL);

    const char *path = argc > 1 ? argv[1] : NULL;
    if (gc_load(path, &gc, why, sizeof why) != GC_STATUS_OK) {
        fprintf(stderr, "%s\n", why);
        return EXIT_FAILURE;
    }
    printf("loaded: version %s\n", gc.gc_version_string());

    /* The rest is as with a linked library, with `gc.` before each function. */
    bool truth[20] = { 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0 };
    int64_t shape[] = { 20 };
    const DLTensor tensor = { truth, { kDLCPU, 0 }, 1, { kDLBool, 8, 1 }, shape, NULL, 0 };
    const DLManagedTensor source = { tensor, NULL, NULL };
    DLManagedTensor *chunks[2], *unpacked;
    must(gc.gc_pack_chunks(&source, 2, chunks));
    hold("the first chunk is as expected", memcmp(chunks[0]->dl_tensor.data, "\x81\xd0", 2) == 0);
    hold("the second chunk is as expected", memcmp(chunks[1]->dl_tensor.data, "\x20\x00", 2) == 0);

    must(gc.gc_unpack_chunks(chunks, 2, 20, &unpacked));
    hold("unpacked it is what it was", memcmp(unpacked->dl_tensor.data, truth, sizeof truth) == 0);

    gc.gc_tensor_free(unpacked);
    gc.gc_tensor_free(chunks[0]);
    gc.gc_tensor_free(chunks[1]);
    return EXIT_SUCCESS;
}
