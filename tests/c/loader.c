/* gradcodec/loader.h: loads the library and fills every member. Rejected libraries are named and unloaded.
 *
 * GRADCODEC_LIBRARY names the library; this program reads the variable, the loader does not. If unset, the loader
 * searches for libgradcodec.so.0. Needs no -lgradcodec. */
#define _POSIX_C_SOURCE 200112L
#include <dlfcn.h>
#include <stdint.h>

/* The loader calls find() instead of dlsym(); find() can hide a function or change the version. */
static const char *hidden = "";
static uint32_t version;
static void *find(void *library, const char *name);
#define dlsym find
#include <gradcodec/loader.h>
#include <gradcodec/loader.h>
#undef dlsym

/* CHECK prints it in place of gc_last_error(): this program is not linked against the library. */
static char why[512];
#define gc_last_error() why
#include "check.h"

enum { MEMBERS = sizeof(gc_api_t) / sizeof(void *) };

static uint32_t other_version(void) {
    return version;
}

static void *find(void *library, const char *name) {
    uint32_t (*other)(void) = other_version;
    void *address = dlsym(library, name);
    if (strcmp(name, hidden) == 0)
        return NULL;
    if (version != 0 && strcmp(name, "gc_version") == 0)
        memcpy(&address, &other, sizeof address);
    return address;
}

/* Returns the number of members that are not NULL. */
static int filled(const gc_api_t *api) {
    void *members[MEMBERS];
    int count = 0;
    memcpy(members, api, sizeof members);
    for (int i = 0; i < MEMBERS; i++)
        count += members[i] != NULL;
    return count;
}

/* Checks that gc_load rejects `path`, that the message contains both words, and that every member is NULL. */
static void refused(const char *path, const char *word, const char *other) {
    gc_api_t api;
    memset(&api, 0xa5, sizeof api);
    CHECK(gc_load(path, &api, why, sizeof why) == GC_STATUS_INVALID_ARGUMENT);
    CHECK(strstr(why, word) != NULL && strstr(why, other) != NULL);
    CHECK(filled(&api) == 0);
}

static void packs(const gc_api_t *gc) {
    unsigned char truth[20] = {1, 0, 0, 0, 0, 0, 0, 1, 1, 1}, bytes[4];
    int64_t elements[1] = {20}, shape[2] = {2, 2};
    DLTensor tensor = view_of(truth, dtype_of(kDLBool, 8), 1, elements);
    DLTensor packed = view_of(bytes, dtype_of(kDLUInt, 8), 2, shape);
    DLManagedTensor src = borrowed(tensor), *chunks[2], *unpacked;
    CHECK(gc->gc_chunk_bytes(20, 2) == 2);
    CHECK(gc->gc_pack_chunks(&src, 2, chunks) == GC_STATUS_OK);
    CHECK(gc->gc_unpack_chunks(chunks, 2, 20, &unpacked) == GC_STATUS_OK);
    CHECK(memcmp(unpacked->dl_tensor.data, truth, sizeof truth) == 0);
    CHECK(gc->gc_pack_chunks_into(&tensor, GC_BIT_ORDER_BIG, &packed, NULL) == GC_STATUS_OK);
    CHECK(memcmp(bytes, "\x81\xc0\0\0", 4) == 0);
    gc->gc_tensor_free(unpacked);
    gc->gc_tensor_free(chunks[0]);
    gc->gc_tensor_free(chunks[1]);
    CHECK(strcmp(gc->gc_status_name(GC_STATUS_BUSY), "GC_STATUS_BUSY") == 0);
    CHECK(gc->gc_pack_chunks(NULL, 2, chunks) == GC_STATUS_INVALID_ARGUMENT);
    CHECK(strncmp((gc->gc_last_error)(), "src: NULL", 9) == 0);
}

/* Checks that gc_load rejects the library if gc_version returns `pretended`. */
static void refused_version(const char *path, uint32_t pretended, const char *words) {
    version = pretended;
    refused(path, "libgradcodec.so", words);
    version = 0;
}

int main(void) {
    const char *path = getenv("GRADCODEC_LIBRARY");
    char words[64], by_name[sizeof why], shortest[8];
    gc_api_t gc, again;

    /* Before the library is loaded, RTLD_NOLOAD shows whether a file stays loaded. libanl is a part of glibc. */
    refused("/nowhere/libgradcodec.so.0", "/nowhere/libgradcodec.so.0", "No such file");
    refused("/proc/self/status", "/proc/self/status", "ELF");
    refused("libc.so.6", "libc.so.6", "gc_version");
    CHECK(dlopen("libanl.so.1", RTLD_NOW | RTLD_NOLOAD) == NULL);
    refused("libanl.so.1", "libanl.so.1", "gc_version");
    CHECK(dlopen("libanl.so.1", RTLD_NOW | RTLD_NOLOAD) == NULL);
    refused("", "path", "empty");
    CHECK(gc_load(path, NULL, why, sizeof why) == GC_STATUS_INVALID_ARGUMENT && strcmp(why, "api: NULL") == 0);

    /* The library loads with all functions, loads again, and loads without a buffer for messages. */
    CHECK(gc_load(path, &gc, why, sizeof why) == GC_STATUS_OK);
    CHECK(strcmp(why, "") == 0 && filled(&gc) == MEMBERS);
    CHECK(gc.gc_version() >= GRADCODEC_VERSION);
    packs(&gc);
    CHECK(gc_load(path, &again, NULL, 0) == GC_STATUS_OK);
    CHECK(memcmp(&gc, &again, sizeof gc) == 0);

    /* Other versions are rejected, and libraries without the last function or one in between. */
    snprintf(words, sizeof words, "expected, got %d.2.3", GRADCODEC_VERSION_MAJOR + 1);
    refused_version(path, (GRADCODEC_VERSION_MAJOR + 1) * 65536u + 2 * 256 + 3, words);
    snprintf(words, sizeof words, "version %d.%d or a later", GRADCODEC_VERSION_MAJOR, GRADCODEC_VERSION_MINOR);
    refused_version(path, GRADCODEC_VERSION_MAJOR * 65536u + GRADCODEC_VERSION_MINOR * 256u - 1, words);
    version = GRADCODEC_VERSION_MAJOR * 65536u + 255 * 256;
    CHECK(gc_load(path, &gc, why, sizeof why) == GC_STATUS_OK && filled(&gc) == MEMBERS);
    version = 0;
    hidden = "gc_unpack_chunks";
    refused(path, "libgradcodec.so", "no function gc_unpack_chunks:");
    hidden = "gc_set_threads";
    refused(path, "libgradcodec.so", "no function gc_set_threads:");
    CHECK(gc_load(path, &gc, shortest, sizeof shortest) != GC_STATUS_OK);
    CHECK(strlen(shortest) == sizeof shortest - 1 && strncmp(shortest, why, strlen(shortest)) == 0);
    CHECK(gc_load(path, &gc, NULL, sizeof why) != GC_STATUS_OK && filled(&gc) == 0);
    hidden = "";

    /* The loader ignores the environment. (setenv() may free the string at `path`.) */
    const gc_status_t status = gc_load(NULL, &gc, by_name, sizeof by_name);
    CHECK(setenv("GRADCODEC_LIBRARY", "/nowhere/libgradcodec.so.0", 1) == 0);
    CHECK(gc_load(NULL, &gc, why, sizeof why) == status && strcmp(why, by_name) == 0);

    /* The functions loaded first still work. */
    packs(&again);
    puts("loader: ok");
    return 0;
}
