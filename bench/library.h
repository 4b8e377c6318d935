/*
 * The library that is timed, loaded by its path: two builds of it can take turns in one process.
 */
#include <dlfcn.h>
#include <gradcodec.h>
#include <stdlib.h>

#define FUNCTIONS(X)                                                                                             \
    X(gc_last_error) X(gc_set_threads) X(gc_pack_chunks) X(gc_tensor_free) X(gc_pack_chunks_into)                 \
    X(gc_unpack_chunks_into) X(gc_pack_signs_into) X(gc_pack_bits_into) X(gc_unpack_bits_into)

/* NULL in a build of before codecs. */
#define CODEC_FUNCTIONS(X) \
    X(gc_codec_create) X(gc_codec_encode) X(gc_codec_decode) X(gc_codec_reduce) X(gc_onebit_compress_into)

/* NULL in a build of before all-reduces. */
#define ALL_REDUCE_FUNCTIONS(X)                                                                                  \
    X(gc_comm_group) X(gc_comm_nccl_id) X(gc_comm_from_nccl_id) X(gc_comm_free) X(gc_allreduce_create)            \
    X(gc_allreduce_run) X(gc_allreduce_free)

/* NULL in a build of before copies. */
#define COPY_FUNCTIONS(X) X(gc_copy_into)

/* NULL in a build of before compiled kernels. */
#define KERNEL_FUNCTIONS(X) X(gc_kernel_run)

#define MEMBER(name) __typeof__(&name) name;
typedef struct {
    FUNCTIONS(MEMBER)
    CODEC_FUNCTIONS(MEMBER)
    COPY_FUNCTIONS(MEMBER)
    ALL_REDUCE_FUNCTIONS(MEMBER)
    KERNEL_FUNCTIONS(MEMBER)
} Library;

/* NULL: not there, or without one of these functions. */
Library *load_library(const char *path)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    Library *library = handle ? malloc(sizeof *library) : NULL;
    if (!library)
        return NULL;
#define FIND(name)                                                  \
    if (!(*(void **)&library->name = dlsym(handle, #name)))          \
        return NULL;
    FUNCTIONS(FIND)
#define LOOK_FOR(name) *(void **)&library->name = dlsym(handle, #name);
    CODEC_FUNCTIONS(LOOK_FOR)
    COPY_FUNCTIONS(LOOK_FOR)
    ALL_REDUCE_FUNCTIONS(LOOK_FOR)
    KERNEL_FUNCTIONS(LOOK_FOR)
    return library;
}

const char *last_error(const Library *library)
{
    return library->gc_last_error();
}

int32_t set_threads(const Library *library, uint32_t n)
{
    return library->gc_set_threads(n);
}
