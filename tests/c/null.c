/* Passes NULL for every pointer of every function, and invalid addresses. Each call returns a status, names the
 * argument in the message, and writes nothing. */
#include "check.h"

static int64_t shape1[1] = {16};
static int64_t shape2[2] = {2, 1};
static unsigned char bools[16], bytes[2];
static float floats[16];

/* Initial value of every output; it must not change. */
static DLManagedTensor untouched_tensor;
static struct DLManagedTensorVersioned untouched_versioned;
#define UNTOUCHED (&untouched_tensor)

static void expect(gc_status_t status, gc_status_t expected, const char *argument) {
    if (status != expected || strncmp(gc_last_error(), argument, strlen(argument)) != 0) {
        fprintf(stderr, "%s expected and a sentence about '%s', got %s: %s\n", gc_status_name(expected), argument,
                gc_status_name(status), gc_last_error());
        exit(1);
    }
}

static void invalid(gc_status_t status, const char *argument) {
    expect(status, GC_STATUS_INVALID_ARGUMENT, argument);
}

/* Tests the gc_codec_* functions. */
static void codecs(void) {
    static float numbers[16] = {1, -1}, number;
    static uint64_t payload_memory[28], state_memory[2000];
    static int64_t one[1] = {1}, payload_shape[1], state_shape[1], sizes[2] = {8, 8};
    DLDataType uint8 = dtype_of(kDLUInt, 8), float32 = dtype_of(kDLFloat, 32);
    DLTensor grad = view_of(numbers, float32, 1, shape1), scalar = view_of(&number, float32, 1, one);
    DLTensor flags = view_of(&number, dtype_of(kDLUInt, 32), 1, one);
    DLTensor payload = view_of(NULL, uint8, 1, payload_shape), state = view_of(state_memory, uint8, 1, state_shape);
    DLManagedTensor managed = borrowed(grad), chunk = borrowed(view_of(bytes, uint8, 1, one)), *result = UNTOUCHED;
    const DLTensor *values[1] = {&grad}, *no_values[1] = {NULL};
    DLTensor *results[1] = {&grad}, *no_results[1] = {NULL};
    gc_codec_options_t options;
    gc_codec_t *codec = NULL, *untouched = (gc_codec_t *)(void *)UNTOUCHED, *out = untouched;

    /* Payloads and states are aligned to 16 bytes. */
    payload.data = (char *)payload_memory + (16 - (uintptr_t)payload_memory % 16) % 16;
    state.data = (char *)state_memory + (16 - (uintptr_t)state_memory % 16) % 16;

    invalid(gc_encode(NULL, GC_CODEC_INT8, &result), "values: NULL");
    invalid(gc_encode(&managed, 0, &result), "codec: 0");
    invalid(gc_encode(&managed, 8, &result), "codec: 8");
    invalid(gc_encode(&managed, GC_CODEC_INT8, NULL), "payload: NULL");
    invalid(gc_decode(NULL, float32, &result), "payload: NULL");
    invalid(gc_decode(&chunk, float32, NULL), "values: NULL");
    expect(gc_decode(&chunk, uint8, &result), GC_STATUS_UNSUPPORTED_DTYPE, "dtype: ");
    expect(gc_decode(&chunk, float32, &result), GC_STATUS_CORRUPT, "payload: 1 bytes");
    CHECK(result == UNTOUCHED);

    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.codec = GC_CODEC_ONEBIT;
    options.nonfinite = GC_NONFINITE_TRANSACTIONAL;
    options.n_elements = 16;
    options.server = 1;
    invalid(gc_codec_create(NULL, &out), "options: NULL");
    invalid(gc_codec_create((gc_codec_options_t *)(void *)((char *)&options + 1), &out), "options: address");
    invalid(gc_codec_create(&options, NULL), "out: NULL");
    options.codec = 0;
    invalid(gc_codec_create(&options, &out), "options: codec 0");
    options.codec = GC_CODEC_ONEBIT;
    options.segments = sizes;
    options.n_segments = SIZE_MAX;
    expect(gc_codec_create(&options, &out), GC_STATUS_SIZE_OVERFLOW,
           "options: n_segments: 18446744073709551615 items at options: segments");
    options.segments = (int64_t *)(void *)((char *)sizes + 1);
    options.n_segments = 2;
    invalid(gc_codec_create(&options, &out), "options: segments: address");
    CHECK(out == untouched);
    options.segments = NULL;
    invalid(gc_codec_create(&options, &out), "options: n_segments 2");
    options.n_segments = 0;
    CHECK_OK(gc_codec_create(&options, &codec));

    payload_shape[0] = gc_codec_payload_bytes(codec);
    state_shape[0] = gc_codec_state_bytes(codec);
    CHECK(payload_shape[0] + 16 <= (int64_t)sizeof payload_memory);
    CHECK(state_shape[0] + 16 <= (int64_t)sizeof state_memory);
    CHECK(gc_codec_payload_bytes(NULL) == -1 && strcmp(gc_last_error(), "codec: NULL") == 0);
    CHECK(gc_codec_exchanges(NULL) == -1 && strcmp(gc_last_error(), "codec: NULL") == 0);
    CHECK(gc_codec_state_bytes(NULL) == -1 && strcmp(gc_last_error(), "codec: NULL") == 0);
    gc_codec_free(NULL);

    invalid(gc_codec_encode(NULL, values, 1, NULL, NULL, &payload, NULL), "codec: NULL");
    invalid(gc_codec_encode(codec, NULL, 1, NULL, NULL, &payload, NULL), "values: NULL");
    invalid(gc_codec_encode(codec, no_values, 1, NULL, NULL, &payload, NULL), "values[0]: NULL");
    invalid(gc_codec_encode(codec, values, 1, NULL, NULL, NULL, NULL), "payload: NULL");
    invalid(gc_codec_encode(codec, values, 0, NULL, NULL, &payload, NULL), "n_values: 1 expected");
    expect(gc_codec_encode(codec, values, SIZE_MAX, NULL, NULL, &payload, NULL), GC_STATUS_SIZE_OVERFLOW,
           "n_values: 18446744073709551615 items at values");
    invalid(gc_codec_decode(NULL, &payload, 1, NULL, GC_DECODE_SET, results, 1, NULL), "codec: NULL");
    invalid(gc_codec_decode(codec, NULL, 1, NULL, GC_DECODE_SET, results, 1, NULL), "payload: NULL");
    invalid(gc_codec_decode(codec, &payload, -1, NULL, GC_DECODE_SET, results, 1, NULL), "divisor: -1");
    invalid(gc_codec_decode(codec, &payload, 1, NULL, 2, results, 1, NULL), "mode: 2");
    invalid(gc_codec_decode(codec, &payload, 1, NULL, GC_DECODE_SET, NULL, 1, NULL), "values: NULL");
    invalid(gc_codec_decode(codec, &payload, 1, NULL, GC_DECODE_SET, no_results, 1, NULL), "values[0]: NULL");
    invalid(gc_codec_reduce(NULL, 0, &payload, &payload, NULL), "codec: NULL");
    invalid(gc_codec_reduce(codec, 1, &payload, &payload, NULL), "chunk: 1");
    invalid(gc_codec_reduce(codec, 0, NULL, &payload, NULL), "chunks: NULL");
    invalid(gc_codec_reduce(codec, 0, &payload, NULL, NULL), "dst: NULL");
    invalid(gc_codec_flags(NULL, &flags, NULL), "codec: NULL");
    invalid(gc_codec_flags(codec, NULL, NULL), "dst: NULL");
    invalid(gc_codec_scales(NULL, &scalar, NULL), "codec: NULL");
    invalid(gc_codec_scales(codec, NULL, NULL), "dst: NULL");
    invalid(gc_codec_commit(NULL, NULL, NULL), "codec: NULL");
    invalid(gc_codec_rollback(NULL, NULL), "codec: NULL");
    invalid(gc_codec_reset(NULL, NULL), "codec: NULL");
    invalid(gc_codec_state_out(NULL, &state, NULL), "codec: NULL");
    invalid(gc_codec_state_out(codec, NULL, NULL), "dst: NULL");
    invalid(gc_codec_state_in(NULL, &state, NULL), "codec: NULL");
    invalid(gc_codec_state_in(codec, NULL, NULL), "src: NULL");
    invalid(gc_codec_errors_out(NULL, &grad, &grad, NULL), "codec: NULL");
    invalid(gc_codec_errors_in(NULL, &grad, &grad, NULL), "codec: NULL");
    /* NULL is allowed here: nothing is read or written. */
    CHECK_OK(gc_codec_errors_out(codec, NULL, NULL, NULL));
    CHECK_OK(gc_codec_errors_in(codec, NULL, NULL, NULL));
    CHECK_OK(gc_codec_commit(codec, NULL, NULL));
    gc_codec_free(codec);
}

/* A callback that must not be called. */
static int32_t never(void *ctx, const void *send, void *recv, size_t bytes, DLDevice device, void *stream) {
    (void)ctx, (void)send, (void)recv, (void)bytes, (void)device, (void)stream;
    abort();
}

/* Tests the gc_comm_* and gc_allreduce_* functions. */
static void communicators(void) {
    static float numbers[16], errors[16], sums[16], number;
    static int64_t one[1] = {1}, both[2] = {1, 16};
    DLDataType float32 = dtype_of(kDLFloat, 32);
    DLTensor buffer = view_of(numbers, float32, 1, shape1), worker = view_of(errors, float32, 1, shape1);
    DLTensor server = view_of(sums, float32, 1, shape1), workers = view_of(errors, float32, 2, both);
    DLTensor flags = view_of(&number, dtype_of(kDLUInt, 32), 1, one);
    DLTensor *values[1] = {&buffer}, *no_values[1] = {NULL};
    const DLTensor *sources[1] = {&buffer}, *no_sources[1] = {NULL};
    DLDevice cuda = {kDLCUDA, 0};
    gc_nccl_options_t nccl = {0};
    gc_peers_options_t peers = {0, 0, 1, 0, {kDLCUDA, 0}, 0, NULL};
    uint8_t id[128] = {0};
    gc_transport_t transport;
    gc_codec_options_t options;
    gc_comm_t *comm, *untouched_comm = (gc_comm_t *)(void *)UNTOUCHED, *comms[2], *out = untouched_comm;
    gc_allreduce_t *allreduce, *untouched = (gc_allreduce_t *)(void *)UNTOUCHED, *made = untouched;
    gc_part_t part = {-7, -7, -7};

    memset(&transport, 0, sizeof transport);
    transport.struct_size = sizeof transport;
    transport.world_size = 1;
    transport.all_to_all = transport.all_gather = never;
    invalid(gc_comm_from_transport(NULL, &out), "transport: NULL");
    invalid(gc_comm_from_transport((gc_transport_t *)(void *)((char *)&transport + 1), &out), "transport: address");
    invalid(gc_comm_from_transport(&transport, NULL), "out: NULL");
    transport.all_gather = NULL;
    invalid(gc_comm_from_transport(&transport, &out), "transport: all_gather is NULL");
    transport.all_gather = never;
    transport.all_to_all = NULL;
    invalid(gc_comm_from_transport(&transport, &out), "transport: all_to_all is NULL");
    transport.all_to_all = never;
    transport.rank = 1;
    invalid(gc_comm_from_transport(&transport, &out), "transport: rank 1 of 1");
    transport.rank = 0;
    invalid(gc_comm_group(0, &out), "world_size: 0");
    invalid(gc_comm_group(2, NULL), "out: NULL");
    invalid(gc_comm_group(2, (gc_comm_t **)(void *)((char *)comms + 1)), "out: address");
    nccl.struct_size = sizeof nccl;
    invalid(gc_comm_from_nccl(NULL, &out), "options: NULL");
    invalid(gc_comm_from_nccl(&nccl, NULL), "out: NULL");
    invalid(gc_comm_from_nccl(&nccl, &out), "options: comm is NULL");
    invalid(gc_comm_nccl_id(NULL, id), "options: NULL");
    invalid(gc_comm_nccl_id(&nccl, NULL), "id: NULL");
    invalid(gc_comm_from_nccl_id(NULL, id, 0, 1, cuda, &out), "options: NULL");
    invalid(gc_comm_from_nccl_id(&nccl, NULL, 0, 1, cuda, &out), "id: NULL");
    invalid(gc_comm_from_nccl_id(&nccl, id, 0, 1, cuda, NULL), "out: NULL");
    invalid(gc_comm_from_nccl_id(&nccl, id, 1, 1, cuda, &out), "rank 1 of 1");
    CHECK(out == untouched_comm);
    peers.struct_size = sizeof peers;
    invalid(gc_comm_from_peers(NULL, &out), "options: NULL");
    invalid(gc_comm_from_peers(&peers, NULL), "out: NULL");
    invalid(gc_comm_from_peers(&peers, &out), "options: buffers: NULL");
    invalid(gc_comm_open_peers(NULL, cuda, 16, 0, &out), "bootstrap: NULL");
    CHECK_OK(gc_comm_group(1, comms));
    invalid(gc_comm_hierarchical(NULL, comms[0], &out), "intra_node: NULL");
    invalid(gc_comm_hierarchical(comms[0], NULL, &out), "intra_node: rank 0 has no inter_node");
    invalid(gc_comm_hierarchical(comms[0], comms[0], &out), "intra_node and inter_node are one communicator");
    CHECK_OK(gc_comm_group(1, comms + 1));
    invalid(gc_comm_hierarchical(comms[0], comms[1], NULL), "out: NULL");
    invalid(gc_comm_hierarchical(comms[0], (gc_comm_t *)(void *)((char *)comms[1] + 1), &out), "inter_node: address");
    CHECK_OK(gc_comm_hierarchical(comms[0], comms[1], &comm));
    gc_comm_free(comms[0]);
    gc_comm_free(comm);
    gc_comm_free(comms[1]);
    CHECK(gc_allreduce_peers_bytes(NULL, 2, 1) == -1 && strstr(gc_last_error(), "options: NULL"));

    CHECK_OK(gc_comm_group(2, comms));
    gc_comm_free(comms[1]);
    gc_comm_free(comms[0]);
    gc_comm_free(NULL);
    CHECK_OK(gc_comm_from_transport(&transport, &comm));
    CHECK(gc_comm_rank(NULL) == -1 && strcmp(gc_last_error(), "comm: NULL") == 0);
    CHECK(gc_comm_world_size(NULL) == -1 && strcmp(gc_last_error(), "comm: NULL") == 0);
    invalid(gc_comm_async_error(NULL), "comm: NULL");
    invalid(gc_comm_abort(NULL), "comm: NULL");
    CHECK_OK(gc_comm_async_error(comm));

    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.codec = GC_CODEC_ONEBIT;
    options.n_elements = 16;
    options.nonfinite = GC_NONFINITE_TRANSACTIONAL;
    invalid(gc_allreduce_create(NULL, &options, &made), "comm: NULL");
    invalid(gc_allreduce_create(comm, NULL, &made), "options: NULL");
    invalid(gc_allreduce_create(comm, &options, NULL), "out: NULL");
    options.codec = 0;
    invalid(gc_allreduce_create(comm, &options, &made), "options: codec 0");
    options.codec = GC_CODEC_ONEBIT;
    CHECK(made == untouched);
    CHECK_OK(gc_allreduce_create(comm, &options, &allreduce));
    gc_allreduce_free(NULL);
    invalid(gc_allreduce_run(NULL, values, 1, NULL, NULL, NULL), "allreduce: NULL");
    invalid(gc_allreduce_run(allreduce, NULL, 1, NULL, NULL, NULL), "values: NULL");
    invalid(gc_allreduce_run(allreduce, no_values, 1, NULL, NULL, NULL), "values[0]: NULL");
    invalid(gc_allreduce_run(allreduce, values, 0, NULL, NULL, NULL), "n_values: 1 expected");
    expect(gc_allreduce_run(allreduce, values, SIZE_MAX, NULL, NULL, NULL), GC_STATUS_SIZE_OVERFLOW,
           "n_values: 18446744073709551615 items at values");
    invalid(gc_allreduce_reduce_scatter(NULL, sources, 1, NULL, NULL, &server, NULL), "allreduce: NULL");
    invalid(gc_allreduce_reduce_scatter(allreduce, NULL, 1, NULL, NULL, &server, NULL), "values: NULL");
    invalid(gc_allreduce_reduce_scatter(allreduce, no_sources, 1, NULL, NULL, &server, NULL), "values[0]: NULL");
    invalid(gc_allreduce_reduce_scatter(allreduce, sources, 1, NULL, NULL, NULL, NULL), "shard: NULL");
    invalid(gc_allreduce_reduce_scatter(allreduce, sources, 1, NULL, NULL, &buffer, NULL), "shard: its bytes");
    invalid(gc_allreduce_all_gather(NULL, &server, values, 1, NULL), "allreduce: NULL");
    invalid(gc_allreduce_all_gather(allreduce, NULL, values, 1, NULL), "shard: NULL");
    invalid(gc_allreduce_all_gather(allreduce, &server, NULL, 1, NULL), "values: NULL");
    invalid(gc_allreduce_all_gather(allreduce, &server, no_values, 1, NULL), "values[0]: NULL");
    invalid(gc_allreduce_all_gather(allreduce, &buffer, values, 1, NULL), "values[0]: its bytes");
    CHECK(gc_allreduce_shard_elements(NULL) == -1 && strcmp(gc_last_error(), "allreduce: NULL") == 0);
    CHECK(gc_allreduce_sent_bytes(NULL, NULL) == -1 && strcmp(gc_last_error(), "allreduce: NULL") == 0);
    CHECK(gc_allreduce_sent_bytes(allreduce, NULL) == 0);
    CHECK(gc_allreduce_exchanges(NULL) == -1 && strcmp(gc_last_error(), "allreduce: NULL") == 0);
    CHECK(gc_allreduce_parts(NULL, 0, GC_PART_WORKER, &part, 1) == -1);
    CHECK(strcmp(gc_last_error(), "allreduce: NULL") == 0);
    CHECK(gc_allreduce_parts(allreduce, 0, GC_PART_WORKER, NULL, 1) == -1);
    CHECK(strcmp(gc_last_error(), "parts: NULL") == 0);
    CHECK(gc_allreduce_parts(allreduce, 1, GC_PART_WORKER, &part, 1) == -1 && strstr(gc_last_error(), "rank: 1"));
    CHECK(gc_allreduce_parts(allreduce, 0, 2, &part, 1) == -1 && strstr(gc_last_error(), "which: 2"));
    CHECK(gc_allreduce_parts(allreduce, 0, GC_PART_SHARD, &part, -1) == -1 && strstr(gc_last_error(), "room: -1"));
    CHECK(part.segment == -7 && gc_allreduce_parts(allreduce, 0, GC_PART_SHARD, NULL, 0) == 1);
    invalid(gc_allreduce_flags(NULL, &flags, NULL), "allreduce: NULL");
    invalid(gc_allreduce_flags(allreduce, NULL, NULL), "dst: NULL");
    invalid(gc_allreduce_commit(NULL, NULL, NULL), "allreduce: NULL");
    invalid(gc_allreduce_rollback(NULL, NULL), "allreduce: NULL");
    invalid(gc_allreduce_reset(NULL, NULL), "allreduce: NULL");
    invalid(gc_allreduce_errors_out(NULL, &worker, &server, NULL), "allreduce: NULL");
    invalid(gc_allreduce_errors_in(NULL, &workers, &server, NULL), "allreduce: NULL");
    /* NULL is allowed here: there are no errors to read or write. */
    CHECK_OK(gc_allreduce_errors_out(allreduce, NULL, NULL, NULL));
    CHECK_OK(gc_allreduce_errors_in(allreduce, NULL, NULL, NULL));
    CHECK_OK(gc_allreduce_commit(allreduce, NULL, NULL));
    gc_comm_free(comm);
    gc_allreduce_free(allreduce);
    for (int i = 0; i < 16; i++)
        CHECK(numbers[i] == 0 && errors[i] == 0 && sums[i] == 0);
    CHECK(number == 0);
}

static void kernels(void) {
    gc_elementwise_options_t options = {.struct_size = sizeof options, .inputs = "T x", .outputs = "T y", .operation = "y = x"};
    gc_reduction_options_t sums = {.struct_size = sizeof sums, .inputs = "T x", .outputs = "T y", .map = "x",
                                   .reduce = "a + b", .post_map = "y = a"};
    gc_kernel_t *kernel = NULL;
    const char *log = NULL;

    invalid(gc_elementwise_create(NULL, &kernel), "options: NULL");
    invalid(gc_elementwise_create(&options, NULL), "out: NULL");
    invalid(gc_reduction_create(NULL, &kernel), "options: NULL");
    invalid(gc_reduction_create(&sums, NULL), "out: NULL");
    options.outputs = NULL;
    invalid(gc_elementwise_create(&options, &kernel), "outputs");
    options.outputs = "T y", options.n_options = 1;
    invalid(gc_elementwise_create(&options, &kernel), "options: options: NULL");
    options.n_options = 0, options.reserved[1] = 1;
    invalid(gc_elementwise_create(&options, &kernel), "options: the byte at offset");
    options.reserved[1] = 0, options.struct_size--;
    invalid(gc_elementwise_create(&options, &kernel), "options");
    options.struct_size++;
    CHECK(kernel == NULL);
    CHECK_OK(gc_elementwise_create(&options, &kernel));

    invalid(gc_kernel_run(NULL, NULL, 0, NULL, 0, NULL, NULL), "kernel: NULL");
    invalid(gc_kernel_run(kernel, NULL, 1, NULL, 0, NULL, NULL), "inputs: NULL");
    invalid(gc_kernel_run(kernel, NULL, 0, NULL, 1, NULL, NULL), "outputs: NULL");
    invalid(gc_kernel_run(kernel, NULL, 0, NULL, 0, NULL, NULL), "n_inputs: 1 expected, got 0");
    invalid(gc_kernel_prepare(NULL, NULL, 0, NULL, 0, NULL, NULL), "kernel: NULL");
    CHECK(gc_kernel_workspace_bytes(NULL, NULL, 0, NULL, 0, NULL) == -1 && strstr(gc_last_error(), "kernel: NULL"));
    invalid(gc_kernel_log(NULL, &log), "kernel: NULL");
    invalid(gc_kernel_log(kernel, NULL), "log: NULL");
    CHECK_OK(gc_kernel_log(kernel, &log));
    CHECK(*log == '\0');
    gc_kernel_free(kernel);
    gc_kernel_free(NULL);
}

int main(void) {
    DLDataType boolean = dtype_of(kDLBool, 8), uint8 = dtype_of(kDLUInt, 8), float32 = dtype_of(kDLFloat, 32);
    DLTensor elements = view_of(bools, boolean, 1, shape1);
    DLTensor reals = view_of(floats, float32, 1, shape1);
    DLTensor packed = view_of(bytes, uint8, 2, shape2);
    DLManagedTensor src = borrowed(elements), chunk = borrowed(packed), real = borrowed(reals);
    DLManagedTensor *out = UNTOUCHED, *outs[3] = {UNTOUCHED, UNTOUCHED, UNTOUCHED};
    struct DLManagedTensorVersioned *versioned = &untouched_versioned;
    DLManagedTensor *chunks[2] = {NULL, NULL};
    DLManagedTensor **odd_out = (DLManagedTensor **)(void *)((char *)outs + 1);
    const DLManagedTensor *odd_src = (const DLManagedTensor *)(const void *)((const char *)&src + 4);
    const DLTensor *odd_tensor = (const DLTensor *)(const void *)((const char *)&reals + 4);
    const void *fatbin = NULL;
    gc_share_t *lease = NULL;
    gc_kernel_shape_t shape = {sizeof(gc_kernel_shape_t), 7, 7, 7, 7, {7, 7, 7}};
    gc_kernel_shape_t *odd_struct = (gc_kernel_shape_t *)(void *)((char *)&shape + 1);
    size_t size = 0;
    const int64_t *odd_shape = (const int64_t *)(const void *)((const char *)shape2 + 1);

    invalid(gc_tensor_empty(cpu(), boolean, 1, NULL, &out), "shape: NULL");
    invalid(gc_tensor_empty(cpu(), boolean, 1, odd_shape, &out), "shape: address");
    invalid(gc_tensor_empty(cpu(), boolean, 1, shape1, NULL), "out: NULL");
    invalid(gc_tensor_empty(cpu(), boolean, -1, shape1, &out), "ndim: -1");
    CHECK_OK(gc_tensor_empty(cpu(), boolean, 0, NULL, &out));
    gc_tensor_free(out);
    out = UNTOUCHED;

    invalid(gc_tensor_from_pointer(NULL, cpu(), boolean, 1, shape1, NULL, NULL, NULL, &out), "tensor: data is NULL");
    invalid(gc_tensor_from_pointer(bools, cpu(), boolean, 1, NULL, NULL, NULL, NULL, &out), "tensor: shape is NULL");
    invalid(gc_tensor_from_pointer(bools, cpu(), boolean, 1, odd_shape, NULL, NULL, NULL, &out), "tensor: shape");
    invalid(gc_tensor_from_pointer(bools, cpu(), boolean, 1, shape1, odd_shape, NULL, NULL, &out), "tensor: strides");
    invalid(gc_tensor_from_pointer(bools, cpu(), boolean, 1, shape1, NULL, NULL, NULL, NULL), "out: NULL");
    invalid(gc_tensor_from_pointer(bools, cpu(), boolean, -7, shape1, NULL, NULL, NULL, &out), "tensor: ndim -7");

    invalid(gc_builtin_kernels(NULL, &fatbin, &size), "family: NULL");
    invalid(gc_builtin_kernels("bits", NULL, &size), "fatbin: NULL");
    invalid(gc_builtin_kernels("bits", &fatbin, NULL), "size: NULL");
    invalid(gc_builtin_kernels("", &fatbin, &size), "family: \"\"");
    CHECK(fatbin == NULL && size == 0);
    invalid(gc_builtin_kernel_shape(NULL, 90, &shape), "kernel: NULL");
    invalid(gc_builtin_kernel_shape("gc_unpack_u8", 90, NULL), "out: NULL");
    invalid(gc_builtin_kernel_shape("gc_unpack_u8", 90, odd_struct), "out: address");
    invalid(gc_builtin_kernel_shape("", 90, &shape), "kernel: \"\"");
    shape.struct_size = 4;
    invalid(gc_builtin_kernel_shape("gc_unpack_u8", 90, &shape), "out: struct_size 4; a multiple of 8 from 32");
    CHECK(shape.struct_size == 4 && shape.threads == 7 && shape.cluster == 7 && shape.reserved[2] == 7);

    gc_tensor_free(NULL);
    gc_tensor_free_versioned(NULL);
    invalid(gc_share_send(NULL, 0, 0, 0, &lease), "tensor: NULL");
    invalid(gc_share_send(&src, -1, 0, 0, NULL), "socket: -1");
    invalid(gc_share_wait(NULL, 0), "lease: NULL");
    invalid(gc_share_receive(0, cpu(), 0, NULL), "out: NULL");
    gc_share_free(NULL);
    CHECK(lease == NULL);
    gc_capsule_destructor(NULL);
    CHECK(strcmp(gc_last_error(), "py_capsule: NULL") == 0);

    invalid(gc_tensor_to_device(NULL, cpu(), &out), "src: NULL");
    invalid(gc_tensor_to_device(odd_src, cpu(), &out), "src: address");
    invalid(gc_tensor_to_device(&src, cpu(), NULL), "out: NULL");
    invalid(gc_copy_into(NULL, &elements, NULL), "src: NULL");
    invalid(gc_copy_into(odd_tensor, &elements, NULL), "src: address");
    invalid(gc_copy_into(&elements, NULL, NULL), "dst: NULL");

    invalid(gc_tensor_to_versioned(NULL, &versioned), "src: NULL");
    invalid(gc_tensor_to_versioned(&src, NULL), "out: NULL");
    invalid(gc_tensor_from_versioned(NULL, &out), "src: NULL");

    CHECK(gc_chunk_bytes(-1, 1) == -1 && strstr(gc_last_error(), "n_elements: -1"));
    CHECK(gc_chunk_bytes(1, 0) == -1 && strstr(gc_last_error(), "n_chunks: at least 1 expected, got 0"));

    invalid(gc_pack_chunks(NULL, 2, outs), "src: NULL");
    invalid(gc_pack_chunks(odd_src, 2, outs), "src: address");
    invalid(gc_pack_chunks(&src, 0, outs), "n_chunks: at least 1 expected, got 0");
    invalid(gc_pack_chunks(&src, 2, NULL), "out: NULL");
    invalid(gc_pack_chunks(&src, 2, odd_out), "out: address");
    expect(gc_pack_chunks(&src, SIZE_MAX, outs), GC_STATUS_SIZE_OVERFLOW,
           "n_chunks: 18446744073709551615 items at out");

    invalid(gc_unpack_chunks(NULL, 2, 16, &out), "chunks: NULL");
    invalid(gc_unpack_chunks(chunks, 2, 16, &out), "chunks[0]: NULL");
    chunks[0] = chunks[1] = &chunk;
    invalid(gc_unpack_chunks(chunks, 0, 16, &out), "n_chunks: at least 1 expected, got 0");
    invalid(gc_unpack_chunks(chunks, 2, -16, &out), "n_elements: -16");
    invalid(gc_unpack_chunks(chunks, 2, 16, NULL), "out: NULL");
    expect(gc_unpack_chunks(chunks, SIZE_MAX, 16, &out), GC_STATUS_SIZE_OVERFLOW,
           "n_chunks: 18446744073709551615 items at chunks");

    invalid(gc_pack_signs(NULL, 2, outs), "src: NULL");
    invalid(gc_pack_signs(&real, 0, outs), "n_chunks: at least 1 expected, got 0");
    invalid(gc_pack_signs(&real, 2, NULL), "out: NULL");
    invalid(gc_unpack_signs(NULL, 2, 16, float32, &out), "chunks: NULL");
    invalid(gc_unpack_signs(chunks, 0, 16, float32, &out), "n_chunks: at least 1 expected, got 0");
    invalid(gc_unpack_signs(chunks, 2, -16, float32, &out), "n_elements: -16");
    invalid(gc_unpack_signs(chunks, 2, 16, float32, NULL), "out: NULL");

    invalid(gc_pack_bits(NULL, 0, GC_BIT_ORDER_BIG, &out), "src: NULL");
    invalid(gc_pack_bits(&src, 0, GC_BIT_ORDER_BIG, NULL), "out: NULL");
    invalid(gc_pack_bits(&src, 0, -1, &out), "order: -1");
    invalid(gc_pack_bits(&src, 1, GC_BIT_ORDER_BIG, &out), "axis: 1");
    invalid(gc_unpack_bits(NULL, 0, GC_COUNT_ALL, GC_BIT_ORDER_BIG, &out), "src: NULL");
    invalid(gc_unpack_bits(&chunk, 0, GC_COUNT_ALL, GC_BIT_ORDER_BIG, NULL), "out: NULL");
    invalid(gc_unpack_bits(&chunk, 0, GC_COUNT_ALL, 2, &out), "order: 2");
    invalid(gc_unpack_bits(&chunk, -3, GC_COUNT_ALL, GC_BIT_ORDER_BIG, &out), "axis: -3");
    invalid(gc_unpack_bits(&chunk, 0, -17, GC_BIT_ORDER_BIG, &out), "count: -17");

    invalid(gc_pack_chunks_into(NULL, GC_BIT_ORDER_BIG, &packed, NULL), "src: NULL");
    invalid(gc_pack_chunks_into(&elements, GC_BIT_ORDER_BIG, NULL, NULL), "dst: NULL");
    invalid(gc_pack_chunks_into(&elements, 2, &packed, NULL), "order: 2");
    invalid(gc_unpack_chunks_into(NULL, GC_BIT_ORDER_BIG, &elements, NULL), "src: NULL");
    invalid(gc_unpack_chunks_into(&packed, GC_BIT_ORDER_BIG, NULL, NULL), "dst: NULL");
    invalid(gc_unpack_chunks_into(&packed, 2, &elements, NULL), "order: 2");
    invalid(gc_pack_signs_into(NULL, GC_BIT_ORDER_BIG, &packed, NULL), "src: NULL");
    invalid(gc_pack_signs_into(&reals, GC_BIT_ORDER_BIG, NULL, NULL), "dst: NULL");
    invalid(gc_pack_signs_into(&reals, 2, &packed, NULL), "order: 2");
    invalid(gc_unpack_signs_into(NULL, NULL, GC_BIT_ORDER_BIG, &reals, NULL), "src: NULL");
    invalid(gc_unpack_signs_into(&packed, NULL, GC_BIT_ORDER_BIG, NULL, NULL), "dst: NULL");
    invalid(gc_unpack_signs_into(&packed, NULL, 2, &reals, NULL), "order: 2");
    invalid(gc_unpack_signs_into(&packed, odd_tensor, GC_BIT_ORDER_BIG, &reals, NULL), "scales: address");
    invalid(gc_vote_signs_into(NULL, 0, &packed, NULL), "src: NULL");
    invalid(gc_vote_signs_into(&packed, 0, NULL, NULL), "dst: NULL");
    invalid(gc_pack_bits_into(NULL, 0, GC_BIT_ORDER_BIG, &packed, NULL), "src: NULL");
    invalid(gc_pack_bits_into(&elements, 0, GC_BIT_ORDER_BIG, NULL, NULL), "dst: NULL");
    invalid(gc_pack_bits_into(&elements, 0, 2, &packed, NULL), "order: 2");
    invalid(gc_pack_bits_into(&elements, 5, GC_BIT_ORDER_BIG, &packed, NULL), "axis: 5");
    invalid(gc_unpack_bits_into(NULL, 0, GC_BIT_ORDER_BIG, &elements, NULL), "src: NULL");
    invalid(gc_unpack_bits_into(&packed, 0, GC_BIT_ORDER_BIG, NULL, NULL), "dst: NULL");
    invalid(gc_unpack_bits_into(&packed, 0, 2, &elements, NULL), "order: 2");
    invalid(gc_unpack_bits_into(&packed, 2, GC_BIT_ORDER_BIG, &elements, NULL), "axis: 2");

    codecs();
    communicators();
    kernels();

    CHECK(out == UNTOUCHED && outs[0] == UNTOUCHED && outs[1] == UNTOUCHED && outs[2] == UNTOUCHED);
    CHECK(versioned == &untouched_versioned);
    CHECK(bytes[0] == 0 && bytes[1] == 0);
    CHECK(strcmp(gc_status_name(-12345), "GC_STATUS_UNKNOWN") == 0);
    puts("null: ok");
    return 0;
}
