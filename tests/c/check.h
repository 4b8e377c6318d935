/* Shared by the test programs: checks that print the failed condition, and tensors on the stack. */
#ifndef CHECK_H
#define CHECK_H

#include <gradcodec.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n    last error: %s\n", __FILE__, __LINE__, #condition, gc_last_error()); \
            exit(1); \
        } \
    } while (0)

/* Checks the status of a call, and that a failed call sets an error message. */
#define CHECK_STATUS(call, expected) \
    do { \
        gc_status_t status_ = (call); \
        if (status_ != (expected) || (status_ != GC_STATUS_OK && !strlen(gc_last_error()))) { \
            fprintf(stderr, "%s:%d: %s\n    gives %s (%s), not %s\n", __FILE__, __LINE__, #call, \
                    gc_status_name(status_), gc_last_error(), gc_status_name(expected)); \
            exit(1); \
        } \
    } while (0)

#define CHECK_OK(call) CHECK_STATUS(call, GC_STATUS_OK)

/* Returns the size of a test: GRADCODEC_TESTS is `quick`, the default, or `all`. */
static inline uint64_t both(uint64_t quick, uint64_t all) {
    const char *tier = getenv("GRADCODEC_TESTS");
    if (tier != NULL && strcmp(tier, "all") == 0)
        return all;
    if (tier != NULL && *tier != 0 && strcmp(tier, "quick") != 0) {
        fprintf(stderr, "GRADCODEC_TESTS: quick or all expected, got \"%s\"\n", tier);
        exit(2);
    }
    return quick;
}

static inline DLDevice cpu(void) {
    DLDevice device = {kDLCPU, 0};
    return device;
}

static inline DLDataType dtype_of(uint8_t code, uint8_t bits) {
    DLDataType dtype;
    dtype.code = code;
    dtype.bits = bits;
    dtype.lanes = 1;
    return dtype;
}

/* Returns a compact view on the CPU; `shape` must outlive it. */
static inline DLTensor view_of(void *data, DLDataType dtype, int32_t ndim, int64_t *shape) {
    DLTensor view;
    view.data = data;
    view.device = cpu();
    view.ndim = ndim;
    view.dtype = dtype;
    view.shape = shape;
    view.strides = NULL;
    view.byte_offset = 0;
    return view;
}

/* Returns `view` as a borrowed managed tensor; its context and deleter are invalid and must not be used. */
static inline DLManagedTensor borrowed(DLTensor view) {
    DLManagedTensor tensor;
    memset(&tensor, 0xa5, sizeof tensor);
    tensor.dl_tensor = view;
    return tensor;
}

#endif
