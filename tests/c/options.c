/* Structs that begin with struct_size, as programs of other versions and faulty programs pass them. Each lies at the
 * end of a page; the page behind it is not accessible. */
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

static unsigned char *page_end;

/* Copies a struct, cut or padded with zeros to `bytes` bytes, to the end of the page. */
static void *at_end(const void *given, size_t size, size_t bytes) {
    unsigned char *place = page_end - bytes;
    memset(place, 0, bytes);
    memcpy(place, given, size < bytes ? size : bytes);
    return place;
}

static gc_status_t codec(void *options) {
    gc_codec_t *made = NULL;
    gc_status_t status = gc_codec_create(options, &made);
    if (status == GC_STATUS_OK)
        CHECK(gc_codec_payload_bytes(made) > 0);
    gc_codec_free(made);
    return status;
}

static gc_status_t allreduce(void *options) {
    gc_comm_t *comm = NULL;
    gc_allreduce_t *made = NULL;
    CHECK_OK(gc_comm_group(1, &comm));
    gc_status_t status = gc_allreduce_create(comm, options, &made);
    gc_allreduce_free(made);
    gc_comm_free(comm);
    return status;
}

static int32_t exchange(void *ctx, const void *send, void *recv, size_t bytes, DLDevice device, void *stream) {
    (void)ctx, (void)device, (void)stream;
    memcpy(recv, send, bytes);
    return 0;
}

static gc_status_t transport(void *options) {
    gc_comm_t *made = NULL;
    gc_status_t status = gc_comm_from_transport(options, &made);
    gc_comm_free(made);
    return status;
}

static gc_status_t nccl(void *options) {
    gc_comm_t *made = NULL;
    gc_status_t status = gc_comm_from_nccl(options, &made);
    CHECK(made == NULL);
    return status;
}

static gc_status_t nccl_id(void *options) {
    unsigned char id[128];
    return gc_comm_nccl_id(options, id);
}

static gc_status_t peers(void *options) {
    gc_comm_t *made = NULL;
    gc_status_t status = gc_comm_from_peers(options, &made);
    CHECK(made == NULL);
    return status;
}

static gc_status_t elementwise(void *options) {
    gc_kernel_t *made = NULL;
    gc_status_t status = gc_elementwise_create(options, &made);
    gc_kernel_free(made);
    return status;
}

static gc_status_t reduction(void *options) {
    gc_kernel_t *made = NULL;
    gc_status_t status = gc_reduction_create(options, &made);
    gc_kernel_free(made);
    return status;
}

static gc_status_t run(void *options) {
    gc_elementwise_options_t plain = {.struct_size = sizeof plain, .inputs = "T x", .outputs = "T y", .operation = "y = x"};
    gc_kernel_t *kernel = NULL;
    CHECK_OK(gc_elementwise_create(&plain, &kernel));
    gc_status_t status = gc_kernel_run(kernel, NULL, 0, NULL, 0, options, NULL); /* a parameter is missing */
    CHECK(status == GC_STATUS_INVALID_ARGUMENT);
    status = strncmp(gc_last_error(), "n_inputs", 8) == 0 ? GC_STATUS_OK : status;
    gc_kernel_free(kernel);
    return status;
}

static gc_status_t shape(void *out) {
    return gc_builtin_kernel_shape("gc_unpack_u8", 90, out);
}

static void every_size(const char *name, gc_status_t (*call)(void *), const void *given, size_t size) {
    const uint32_t refused[] = {0, 3, 4, 8, (uint32_t)size - 8, (uint32_t)size - 1, (uint32_t)size + 4, 4097, 4104,
                                (uint32_t)1 << 31, UINT32_MAX};
    char said[80];
    /* The struct as it is, and longer ones of a later version whose additional fields are 0. */
    gc_status_t expected = call(at_end(given, size, size));
    for (size_t more = size; more <= 4096; more += more < size + 64 ? 8 : 512) {
        uint32_t *longer = at_end(given, size, more);
        *longer = (uint32_t)more;
        CHECK_STATUS(call(longer), expected);
        CHECK(*longer == more);
        if (call != shape && more > size) { /* an unknown field is not 0: the error states its offset and value */
            ((unsigned char *)longer)[more - 1] = 200;
            CHECK_STATUS(call(longer), GC_STATUS_INVALID_ARGUMENT);
            snprintf(said, sizeof said, "offset %zu is 200", more - 1);
            CHECK(strstr(gc_last_error(), said));
        }
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        /* Only the first 8 bytes of the struct are accessible. */
        uint32_t *first = at_end(given, size, 8);
        *first = refused[i];
        CHECK_STATUS(call(first), GC_STATUS_INVALID_ARGUMENT);
        snprintf(said, sizeof said, "struct_size %u;", (unsigned)refused[i]);
        if (strstr(gc_last_error(), said) == NULL)
            fprintf(stderr, "%s: ", name);
        CHECK(strstr(gc_last_error(), said));
        CHECK(*first == refused[i]);
    }
}

int main(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED && page >= 4096 && mprotect(pages + page, page, PROT_NONE) == 0);
    page_end = pages + page;

    gc_codec_options_t codecs = GC_CODEC_OPTIONS_INIT;
    codecs.codec = GC_CODEC_ONEBIT, codecs.n_elements = 100;
    gc_transport_t transports = {.struct_size = sizeof transports, .world_size = 1, .all_to_all = exchange,
                                 .all_gather = exchange};
    gc_nccl_options_t nccls = {.struct_size = sizeof nccls};
    gc_peers_options_t memories = {.struct_size = sizeof memories, .world_size = 1};
    gc_elementwise_options_t maps = {.struct_size = sizeof maps, .inputs = "T x", .outputs = "T y", .operation = "y = x"};
    gc_reduction_options_t sums = {.struct_size = sizeof sums, .inputs = "T x", .outputs = "T y", .map = "x",
                                   .reduce = "a + b", .post_map = "y = a"};
    gc_run_options_t runs = {.struct_size = sizeof runs};
    gc_kernel_shape_t shapes = {.struct_size = sizeof shapes};

    every_size("gc_codec_create", codec, &codecs, sizeof codecs);
    every_size("gc_allreduce_create", allreduce, &codecs, sizeof codecs);
    every_size("gc_comm_from_transport", transport, &transports, sizeof transports);
    every_size("gc_comm_from_nccl", nccl, &nccls, sizeof nccls);
    every_size("gc_comm_nccl_id", nccl_id, &nccls, sizeof nccls);
    every_size("gc_comm_from_peers", peers, &memories, sizeof memories);
    every_size("gc_elementwise_create", elementwise, &maps, sizeof maps);
    every_size("gc_reduction_create", reduction, &sums, sizeof sums);
    every_size("gc_kernel_run", run, &runs, sizeof runs);
    every_size("gc_builtin_kernel_shape", shape, &shapes, sizeof shapes);

    /* Bytes behind the fields of this version are not written. */
    uint32_t *longer = at_end(&shapes, sizeof shapes, sizeof shapes + 16);
    *longer = sizeof shapes + 16;
    memset(page_end - 16, 0x5a, 16);
    CHECK_OK(shape(longer));
    for (int i = 1; i <= 16; i++)
        CHECK(page_end[-i] == 0x5a);
    CHECK(longer[0] == sizeof shapes + 16 && longer[1] > 0);
    return 0;
}
