/* Versions of the library and of tensors, legacy or versioned. Also memory that is released after its last use.
 *
 *   gcc -std=c99 -Wall -Wextra -pedantic -Iinclude examples_c/versions.c -Ltarget/release -lgradcodec -o versions
 *   LD_LIBRARY_PATH=target/release ./versions */

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

static void hold(const char *what, int holds)
{
    printf("%s%s\n", holds ? "" : "WRONG: not true that ", what);
    if (!holds)
        exit(EXIT_FAILURE);
}

static void count(void *releases)
{
    ++*(int *)releases;
}

int main(void)
{
    /* Compares the header of this program with the library that runs: the same major version means the same ABI, and a
     * library at least as new has every function of the header. */
    const uint32_t version = gc_version();
    printf("header %d.%d.%d, library %s\n", GRADCODEC_VERSION_MAJOR, GRADCODEC_VERSION_MINOR, GRADCODEC_VERSION_PATCH,
           gc_version_string());
    hold("the major versions agree", version >> 16 == GRADCODEC_VERSION_MAJOR);
    hold("the library is not older than the header", version >= GRADCODEC_VERSION);
    char numbers[16];
    snprintf(numbers, sizeof numbers, "%u.%u.%u", (unsigned)version >> 16, (unsigned)version >> 8 & 255,
             (unsigned)version & 255);
    hold("gc_version() and gc_version_string() agree", strncmp(gc_version_string(), numbers, strlen(numbers)) == 0);

    /* A tensor over this program's memory: nothing is copied, and `count` runs when the tensor is freed. */
    float memory[6] = { 0.0f };
    int releases = 0;
    const int64_t shape[] = { 2, 3 };
    const DLDevice cpu = { kDLCPU, 0 };
    const DLDataType float32 = { kDLFloat, 32, 1 };
    DLManagedTensor *legacy;
    must(gc_tensor_from_pointer(memory, cpu, float32, 2, shape, NULL, count, &releases, &legacy));
    hold("the tensor is the memory", legacy->dl_tensor.data == memory);

    /* Each conversion consumes its tensor and returns another one for the same memory. */
    struct DLManagedTensorVersioned *versioned;
    must(gc_tensor_to_versioned(legacy, &versioned));
    hold("it is of DLPack 1", versioned->version.major == 1);
    hold("it is still the memory", versioned->dl_tensor.data == memory);

    /* A legacy tensor has no read-only flag, so a read-only versioned tensor is refused and stays the caller's. */
    versioned->flags |= DLPACK_FLAG_BITMASK_READ_ONLY;
    hold("read-only is refused", gc_tensor_from_versioned(versioned, &legacy) == GC_STATUS_READ_ONLY);
    versioned->flags = 0;

    must(gc_tensor_from_versioned(versioned, &legacy));
    hold("there and back it is the memory", legacy->dl_tensor.data == memory && legacy->dl_tensor.shape[1] == 3);
    hold("nothing was released on the way", releases == 0);

    gc_tensor_free(legacy);
    hold("it was released once", releases == 1);
    return EXIT_SUCCESS;
}
