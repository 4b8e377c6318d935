/* Measures the stack that an encoding uses: the thread's stack is painted first, and the overwritten part is counted.
 * Also checks that prepared kernels and copies on CUDA allocate nothing on the host: this program's malloc() replaces
 * the C library's, for the library too. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

enum { KIB = 1024, TYPICAL = 14 * KIB, STACK = 1024 * KIB, N = 1 << 20, PAINT = 0xa5 };

static float elements[N], bytes[N];
static const DLDevice cuda = {kDLCUDA, 0};

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);

static __thread long allocations = -1; /* by the library on this thread; below 0: not counting */

static void note(const void *caller) {
    Dl_info about;
    if (allocations >= 0 && dladdr(caller, &about) != 0 && strstr(about.dli_fname, "libgradcodec") != NULL)
        allocations++;
}

void *malloc(size_t size) {
    note(__builtin_return_address(0));
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    note(__builtin_return_address(0));
    return __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size) {
    note(__builtin_return_address(0));
    return __libc_realloc(memory, size);
}

static void *encode(void *top) {
    gc_codec_options_t options = {.struct_size = sizeof options, .codec = GC_CODEC_INT8, .n_elements = N};
    int64_t length = N, payload;
    gc_codec_t *codec;
    unsigned char here;
    CHECK_OK(gc_codec_create(&options, &codec));
    payload = gc_codec_payload_bytes(codec);
    DLTensor src = view_of(elements, dtype_of(kDLFloat, 32), 1, &length), dst = view_of(bytes, dtype_of(kDLUInt, 8), 1, &payload);
    const DLTensor *values[] = {&src};
    CHECK_OK(gc_codec_encode(codec, values, 1, NULL, NULL, &dst, NULL));
    gc_codec_free(codec);
    *(uintptr_t *)top = (uintptr_t)&here;
    return NULL;
}

/* docs/API.md states the size. */
static void an_encoding_takes_the_stack_that_the_document_says(void) {
    pthread_attr_t attributes;
    pthread_t id;
    unsigned char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *deepest = stack;
    uintptr_t top;
    long bytes_of_stack;
    CHECK(stack != MAP_FAILED);
    memset(stack, PAINT, STACK);
    CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stack, STACK) == 0);
    CHECK(pthread_create(&id, &attributes, encode, &top) == 0 && pthread_join(id, NULL) == 0);
    while (*deepest == PAINT)
        deepest++;
    bytes_of_stack = (long)(top - (uintptr_t)deepest);
    printf("stack: gc_codec_encode() of INT8 took %ld bytes of stack\n", bytes_of_stack);
    CHECK(bytes_of_stack < 3 * TYPICAL / 2 && bytes_of_stack > TYPICAL / 2);
}

static void run(gc_kernel_t *add, gc_kernel_t *total) {
    int64_t length = N, one = 1, room = 1 << 16;
    double factor = 2;
    DLTensor x = view_of(elements, dtype_of(kDLFloat, 32), 1, &length), y = view_of(bytes, dtype_of(kDLFloat, 32), 1, &length);
    DLTensor a = view_of(&factor, dtype_of(kDLFloat, 64), 0, NULL), sum = view_of(bytes, dtype_of(kDLFloat, 32), 0, NULL);
    DLTensor workspace = view_of(bytes + 1024, dtype_of(kDLUInt, 8), 1, &room), whole = view_of(bytes, dtype_of(kDLInt, 32), 1, &length);
    const DLTensor *inputs[] = {&x, &x, &a}, *line = &x;
    DLTensor *output = &y, *result = &sum;
    gc_run_options_t with = {.struct_size = sizeof with, .workspace = &workspace};
    x.device = y.device = sum.device = workspace.device = whole.device = cuda;
    CHECK_OK(gc_kernel_run(add, inputs, 3, &output, 1, NULL, NULL));
    CHECK_OK(gc_kernel_run(total, &line, 1, &result, 1, &with, NULL));
    CHECK_OK(gc_copy_into(&x, &whole, NULL));
    x.strides = &one;
    length = N / 2;
    CHECK_OK(gc_copy_into(&x, &y, NULL));
}

/* Uses a driver that needs no GPU, and kernels from a compiler for the CPU. */
static void a_prepared_run_allocates_nothing(const char *drivers) {
    char path[4096];
    gc_elementwise_options_t texts = {.struct_size = sizeof texts, .inputs = "T x, raw T w, T a", .outputs = "T y",
                                      .operation = "y = a * x + w[i]"};
    gc_reduction_options_t sum = {.struct_size = sizeof sum, .inputs = "T x", .outputs = "T y", .map = "x", .reduce = "a + b",
                                  .post_map = "y = a", .identity = "0"};
    gc_kernel_t *add, *total;
    snprintf(path, sizeof path, "%s/driver/libcuda.so.1", drivers);
    CHECK(dlopen(path, RTLD_NOW) != NULL);
    snprintf(path, sizeof path, "%s/nvrtc_gcc/libnvrtc.so.12", drivers);
    CHECK(setenv("GRADCODEC_NVRTC", path, 1) == 0 && setenv("GRADCODEC_CACHE", "0", 1) == 0);
    CHECK_OK(gc_elementwise_create(&texts, &add));
    CHECK_OK(gc_reduction_create(&sum, &total));
    run(add, total); /* loads the kernels and compiles them */
    allocations = 0;
    run(add, total);
    printf("stack: prepared kernels and copies allocated %ld times on the host\n", allocations);
    CHECK(allocations == 0);
    allocations = -1;
    gc_kernel_free(add);
    gc_kernel_free(total);
}

int main(void) {
    an_encoding_takes_the_stack_that_the_document_says();
    if (getenv("GRADCODEC_DRIVERS") != NULL)
        a_prepared_run_allocates_nothing(getenv("GRADCODEC_DRIVERS"));
    else
        puts("stack: left out: prepared kernels, which take a driver without a GPU in GRADCODEC_DRIVERS");
    puts("stack: ok");
    return 0;
}
