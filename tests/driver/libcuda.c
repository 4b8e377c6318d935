/* A CUDA driver of host memory, for tests of what ours does with a driver's answers. It has devices without any hardware:
 * contexts and streams are numbers, memory is malloc's, and a launch only counts. What goes wrong is said in the environment:
 *
 *   FAKE_VERSION   of the driver, 12000 unless said
 *   FAKE_DEVICES   how many, 2 unless said
 *   FAKE_CAPABILITY  of all devices, 90 unless said
 *   FAKE_FAILURES  "name=code name=code ...": these functions answer that
 *   FAKE_MEMORY    bytes a device has, unlimited unless said
 *
 * -DWITHOUT_LIBRARIES leaves out what drivers before 12.0 do not have. fake_...() at the end are for the tests. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef struct Context {
    int device;
    unsigned long long id;
} *Context;
typedef struct Stream {
    Context context;
} *Stream;

/* The handles that every context has: NULL and 1 stand for the legacy stream, 2 for the thread's own. */
static int is_created(Stream stream) { return (uintptr_t)stream > 2; }

enum { SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 100, INVALID_DEVICE, INVALID_CONTEXT = 201 };
enum { DEVICES = 8, DEPTH = 16, BLOCKS = 4096 };

static struct Context primary[DEVICES];
static int retained[DEVICES];
static int initialized;
static __thread Context stack[DEPTH];
static __thread int depth;
static __thread int capture_mode;
static size_t in_use[DEVICES];
static struct {
    void *memory;
    size_t bytes;
    int device;
} blocks[BLOCKS];
static int libraries;
static atomic_int hold_frees, held;
static unsigned long long calls, launches, allocations, frees, waits;
static char last_launch[64];

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

/* What FAKE_FAILURES says of a function; 0 if nothing. */
static Result failure(const char *function) {
    const char *text = getenv("FAKE_FAILURES");
    size_t length = strlen(function);
    for (; text && *text; text = strchr(text, ' '), text += text != NULL) {
        if (!strncmp(text, function, length) && text[length] == '=')
            return (int)strtol(text + length + 1, NULL, 10);
    }
    return 0;
}

#define MAY_FAIL \
    do { \
        calls++; \
        Result said = failure(__func__); \
        if (said) \
            return said; \
        if (!initialized) \
            return NOT_INITIALIZED; \
    } while (0)

Result cuDriverGetVersion(int *version) {
    *version = (int)number("FAKE_VERSION", 12000);
    return failure(__func__);
}

Result cuInit(unsigned flags) {
    (void)flags;
    Result said = failure(__func__);
    if (said)
        return said;
    if (number("FAKE_DEVICES", 2) == 0)
        return NO_DEVICE;
    initialized = 1;
    for (int k = 0; k < DEVICES; k++)
        primary[k] = (struct Context){k, 1 + (unsigned long long)k};
    return SUCCESS;
}

Result cuGetErrorName(Result code, const char **name) {
    *name = code == OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED"
            : code == 34              ? "CUDA_ERROR_STUB_LIBRARY"
            : code == 400             ? "CUDA_ERROR_INVALID_HANDLE"
            : code == 700             ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : code == 719             ? "CUDA_ERROR_LAUNCH_FAILED"
                                      : NULL;
    return *name ? SUCCESS : INVALID_VALUE;
}

Result cuDeviceGetCount(int *count) {
    MAY_FAIL;
    *count = (int)number("FAKE_DEVICES", 2);
    return SUCCESS;
}

/* Handles are not the numbers, so that what mixes them up is seen. */
Result cuDeviceGet(int *device, int ordinal) {
    MAY_FAIL;
    *device = 70 + ordinal;
    return SUCCESS;
}

Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    MAY_FAIL;
    if (device < 70)
        return INVALID_DEVICE;
    int capability = (int)number("FAKE_CAPABILITY", 90);
    *value = attribute == 75 ? capability / 10 : capability % 10;
    return SUCCESS;
}

Result cuDevicePrimaryCtxRetain(Context *context, int device) {
    MAY_FAIL;
    retained[device - 70]++;
    *context = &primary[device - 70];
    return SUCCESS;
}

Result cuCtxGetCurrent(Context *context) {
    MAY_FAIL;
    *context = depth ? stack[depth - 1] : NULL;
    return SUCCESS;
}

Result cuCtxPushCurrent_v2(Context context) {
    MAY_FAIL;
    if (depth == DEPTH)
        return INVALID_VALUE;
    stack[depth++] = context;
    return SUCCESS;
}

Result cuCtxPopCurrent_v2(Context *context) {
    MAY_FAIL;
    if (!depth)
        return INVALID_CONTEXT;
    *context = stack[--depth];
    return SUCCESS;
}

static Context current(void) { return depth ? stack[depth - 1] : NULL; }

Result cuCtxGetDevice(int *device) {
    MAY_FAIL;
    if (!current())
        return INVALID_CONTEXT;
    *device = 70 + current()->device;
    return SUCCESS;
}

Result cuCtxSynchronize(void) {
    MAY_FAIL;
    waits++;
    return SUCCESS;
}

Result cuStreamGetCtx(Stream stream, Context *context) {
    MAY_FAIL;
    *context = stream->context;
    return SUCCESS;
}

Result cuStreamSynchronize(Stream stream) {
    (void)stream;
    MAY_FAIL;
    waits++;
    return SUCCESS;
}

Result cuThreadExchangeStreamCaptureMode(int *mode) {
    MAY_FAIL;
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

Result cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    MAY_FAIL;
    if (!current())
        return INVALID_CONTEXT;
    int device = current()->device;
    if (bytes > (size_t)number("FAKE_MEMORY", INT64_MAX) - in_use[device])
        return OUT_OF_MEMORY;
    for (int k = 0; k < BLOCKS; k++) {
        if (!blocks[k].memory) {
            void *memory = aligned_alloc(512, (bytes + 511) / 512 * 512);
            if (!memory)
                return OUT_OF_MEMORY;
            blocks[k].memory = memory, blocks[k].bytes = bytes, blocks[k].device = device;
            in_use[device] += bytes;
            allocations++;
            *address = (uint64_t)(uintptr_t)memory;
            return SUCCESS;
        }
    }
    return OUT_OF_MEMORY;
}

Result cuMemFree_v2(uint64_t address) {
    MAY_FAIL;
    while (atomic_load(&hold_frees)) /* as when the device is at work */
        atomic_store(&held, 1);
    if (!current())
        return INVALID_CONTEXT;
    for (int k = 0; k < BLOCKS; k++) {
        if (blocks[k].memory && (uint64_t)(uintptr_t)blocks[k].memory == address) {
            free(blocks[k].memory);
            blocks[k].memory = NULL;
            in_use[blocks[k].device] -= blocks[k].bytes;
            frees++;
            return SUCCESS;
        }
    }
    return INVALID_VALUE;
}

Result cuLaunchKernel(const char *kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                      unsigned shared, Stream stream, void **arguments, void **extra) {
    (void)y, (void)z, (void)ty, (void)tz, (void)shared, (void)arguments, (void)extra;
    MAY_FAIL;
    if (!is_created(stream) && !current()) /* a kernel of a library takes its context from a stream that has one */
        return INVALID_CONTEXT;
    if (!x || !threads)
        return INVALID_VALUE;
    launches++;
    snprintf(last_launch, sizeof last_launch, "%s", kernel);
    return SUCCESS;
}

#ifndef WITHOUT_LIBRARIES
Result cuCtxGetId(Context context, unsigned long long *id) {
    MAY_FAIL;
    if (!context)
        context = current();
    if (!context)
        return INVALID_CONTEXT;
    *id = context->id;
    return SUCCESS;
}

Result cuLibraryLoadData(void **library, const void *code, int *o, void **ov, unsigned on, int *p, void **pv, unsigned pn) {
    (void)o, (void)ov, (void)on, (void)p, (void)pv, (void)pn;
    MAY_FAIL;
    if (!strstr(code, ".version 8.0") || capture_mode != 2)
        return INVALID_VALUE;
    *library = (void *)code;
    libraries++;
    return SUCCESS;
}

Result cuLibraryUnload(void *library) {
    (void)library;
    MAY_FAIL;
    libraries--;
    return SUCCESS;
}

Result cuLibraryGetKernel(const char **kernel, void *library, const char *name) {
    MAY_FAIL;
    char entry[100];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    if (!strstr(library, entry))
        return 500;
    *kernel = name;
    return SUCCESS;
}

Result cuKernelGetFunction(void **function, void *kernel) {
    MAY_FAIL;
    *function = kernel;
    return SUCCESS;
}

Result cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)attribute, (void)function;
    MAY_FAIL;
    *value = 32;
    return SUCCESS;
}
#endif

/* What a test asks of it. */
unsigned long long fake_calls(void) { return calls; }
unsigned long long fake_launches(void) { return launches; }
unsigned long long fake_allocations(void) { return allocations; }
unsigned long long fake_frees(void) { return frees; }
unsigned long long fake_waits(void) { return waits; }
void fake_hold_frees(int hold) { atomic_store(&hold_frees, hold); }
int fake_held(void) { return atomic_load(&held); }
int fake_libraries(void) { return libraries; }
int fake_depth(void) { return depth; }
int fake_capture_mode(void) { return capture_mode; }
int fake_retained(int device) { return retained[device]; }
const char *fake_last_launch(void) { return last_launch; }

/* A context of the caller's own, current afterwards; and a stream of a device's primary context. */
void *fake_enter(int device, unsigned long long id) {
    Context context = malloc(sizeof *context);
    *context = (struct Context){device, id};
    stack[depth++] = context;
    return context;
}
void fake_leave(void) { free(stack[--depth]); }
void *fake_stream(int device) {
    Stream stream = malloc(sizeof *stream);
    stream->context = &primary[device];
    return stream;
}
