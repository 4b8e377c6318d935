/* A call uses less than 32 KiB of stack: each runs on a thread whose stack was painted before, and what was overwritten
 * is what it took. Each in a child, where it is also the first call; on every instruction set. And copies and prepared
 * kernels on CUDA allocate nothing on the host: this program's malloc() stands in place of the C library's, for the library
 * too. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { KIB = 1024, BOUND = 32 * KIB, STACK = 1024 * KIB, LARGE = 48 << 20, DIMS = 40, LOOPS = 22, PAINT = 0xa5 };

static unsigned char *elements, *bytes; /* LARGE each */

static DLTensor flat(void *data, DLDataType dtype, int64_t *length) {
    return view_of(data, dtype, 1, length);
}

/* ---- what is allocated */

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

static __thread long allocations = -1; /* by the library, on this thread; below 0 they are not counted */

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

int posix_memalign(void **memory, size_t alignment, size_t size) {
    note(__builtin_return_address(0));
    *memory = __libc_memalign(alignment, size);
    return *memory == NULL ? ENOMEM : 0;
}

static void none_was_made(const char *by) {
    if (allocations > 0) {
        printf("stack: FAILED: %s allocated %ld times on the host\n", by, allocations);
        exit(1);
    }
    allocations = -1;
}

/* ---- what is called; what it says or refuses is for other tests */

static void call_small(void) {
    int64_t length = 1001;
    DLManagedTensor src = borrowed(flat(elements, dtype_of(kDLBool, 8), &length)), *chunks[3], *unpacked;
    CHECK_OK(gc_pack_chunks(&src, 3, chunks));
    CHECK_OK(gc_unpack_chunks(chunks, 3, 1001, &unpacked));
    for (int i = 0; i < 3; i++)
        gc_tensor_free(chunks[i]);
    gc_tensor_free(unpacked);
}

static void call_large(void) {
    int64_t length = LARGE, rows[2] = {1, LARGE / 8};
    DLTensor src = flat(elements, dtype_of(kDLBool, 8), &length);
    DLTensor dst = view_of(bytes, dtype_of(kDLUInt, 8), 2, rows);
    CHECK_OK(gc_pack_chunks_into(&src, GC_BIT_ORDER_BIG, &dst, NULL));
    CHECK_OK(gc_unpack_chunks_into(&dst, GC_BIT_ORDER_LITTLE, &src, NULL));
}

static void call_large_with_threads(void) {
    CHECK_OK(gc_set_threads(4));
    call_large();
}

/* Rows, columns and both orders, of elements of every size, from memory that is strided or transposed. */
static void call_bits_of(int64_t rows, int64_t columns, uint8_t bits, int transposed) {
    int64_t shape[2], strides[2];
    DLManagedTensor src = borrowed(view_of(elements, dtype_of(kDLUInt, bits), 2, shape)), *packed, *unpacked;
    shape[0] = rows;
    shape[1] = columns;
    strides[0] = transposed ? 1 : 2 * columns;
    strides[1] = transposed ? rows : 2;
    src.dl_tensor.strides = strides;
    for (int32_t axis = 0; axis < 2; axis++)
        for (gc_bit_order_t order = GC_BIT_ORDER_BIG; order <= GC_BIT_ORDER_LITTLE; order++) {
            CHECK_OK(gc_pack_bits(&src, axis, order, &packed));
            CHECK_OK(gc_unpack_bits(packed, axis, shape[axis], order, &unpacked));
            gc_tensor_free(packed);
            gc_tensor_free(unpacked);
        }
}

static void call_bits(void) {
    for (uint8_t bits = 8; bits <= 64; bits = (uint8_t)(2 * bits))
        for (int transposed = 0; transposed < 2; transposed++) {
            call_bits_of(67, 131, bits, transposed);
            call_bits_of(5, 3, bits, transposed);
            call_bits_of(2000, 5, bits, transposed); /* narrow rows and columns */
        }
}

static void call_large_bits_with_threads(void) {
    CHECK_OK(gc_set_threads(4));
    call_bits_of(4096, 4096, 8, 1);
    call_bits_of(4000, 4001, 8, 0);
    call_bits_of(1500, 2001, 64, 1);
}

static void call_signs(void) {
    static const uint8_t codes[] = {kDLFloat, kDLBfloat, kDLFloat, kDLFloat}, sizes[] = {16, 16, 32, 64};
    for (int i = 0; i < 4; i++)
        for (int transposed = 0; transposed < 2; transposed++) {
            int64_t shape[2] = {300, 100}, strides[2], row[2] = {1, 300 * 100 / 8};
            DLTensor src = view_of(elements, dtype_of(codes[i], sizes[i]), 2, shape);
            DLTensor dst = view_of(bytes, dtype_of(kDLUInt, 8), 2, row);
            strides[0] = transposed ? 1 : 301;
            strides[1] = transposed ? 300 : 3;
            src.strides = strides;
            CHECK_OK(gc_pack_signs_into(&src, GC_BIT_ORDER_BIG, &dst, NULL));
        }
}

/* Every function of a codec, on tensors of so many elements each. */
static void call_codec_of(int32_t kind, int64_t length, int32_t error, uint8_t code, uint8_t bits) {
    int64_t sizes[3], payload_shape[1], chunk_shape[2] = {1, 0}, state_shape[1], one[1] = {1}, all[1];
    int64_t scales_shape[1] = {3};
    unsigned char *room = bytes; /* aligned to 16, as all that malloc gives */
    float factor = 1, scales[3];
    uint32_t flags;
    uint8_t raw[3] = {0, 1, 0};
    gc_codec_options_t options;
    gc_codec_t *codec;
    DLTensor values[3], payload, chunk, state, worker, server;
    DLTensor scalar = view_of(&factor, dtype_of(kDLFloat, 32), 1, one);
    DLTensor of_flags = view_of(&flags, dtype_of(kDLUInt, 32), 1, one);
    DLTensor of_scales = view_of(scales, dtype_of(kDLFloat, 32), 1, scales_shape);
    const DLTensor *inputs[3] = {&values[0], &values[1], &values[2]};
    DLTensor *outputs[3] = {&values[0], &values[1], &values[2]};
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.codec = kind;
    options.error = error;
    options.values = dtype_of(code, bits);
    options.nonfinite = GC_NONFINITE_TRANSACTIONAL;
    options.segments = sizes;
    options.n_segments = 3;
    options.raw = kind < GC_CODEC_BF16 ? NULL : raw;
    options.server = 1;
    for (int i = 0; i < 3; i++) {
        sizes[i] = length;
        values[i] = view_of(elements + (size_t)(i * length * bits / 8), options.values, 1, &sizes[i]);
    }
    CHECK_OK(gc_codec_create(&options, &codec));
    payload_shape[0] = chunk_shape[1] = gc_codec_payload_bytes(codec);
    state_shape[0] = gc_codec_state_bytes(codec);
    payload = view_of(room, dtype_of(kDLUInt, 8), 1, payload_shape);
    chunk = view_of(room, dtype_of(kDLUInt, 8), 2, chunk_shape);
    room += (payload_shape[0] + 15) / 16 * 16;
    state = view_of(room, dtype_of(kDLUInt, 8), 1, state_shape);
    CHECK(room + state_shape[0] <= bytes + LARGE);
    all[0] = 3 * length;
    worker = view_of(elements, dtype_of(kDLFloat, 32), 1, all);
    server = view_of(elements + (size_t)(12 * length), dtype_of(kDLFloat, 32), 1, all);
    CHECK(24 * length <= LARGE);
    CHECK_OK(gc_codec_encode(codec, inputs, 3, &scalar, &scalar, &payload, NULL));
    CHECK_STATUS(gc_codec_reduce(codec, 0, &chunk, &state, NULL), GC_STATUS_SHAPE_MISMATCH);
    state_shape[0] = payload_shape[0];
    CHECK_OK(gc_codec_reduce(codec, 0, &chunk, &state, NULL));
    state_shape[0] = gc_codec_state_bytes(codec);
    CHECK_OK(gc_codec_commit(codec, NULL, NULL));
    CHECK_OK(gc_codec_decode(codec, &payload, 2, &scalar, GC_DECODE_SET, outputs, 3, NULL));
    CHECK_OK(gc_codec_flags(codec, &of_flags, NULL));
    CHECK_STATUS(gc_codec_scales(codec, &of_scales, NULL), kind < GC_CODEC_BF16 ? GC_STATUS_OK : GC_STATUS_INVALID_ARGUMENT);
    CHECK_OK(gc_codec_state_out(codec, &state, NULL));
    CHECK_OK(gc_codec_state_in(codec, &state, NULL));
    CHECK_OK(gc_codec_errors_out(codec, &worker, &server, NULL));
    if (kind != GC_CODEC_SIGN)
        CHECK_OK(gc_codec_errors_in(codec, &worker, &server, NULL));
    CHECK_OK(gc_codec_rollback(codec, NULL));
    memset(bytes, 0, 64); /* no payload any more: the refusal looks at every field */
    CHECK_STATUS(gc_codec_decode(codec, &payload, 2, &scalar, GC_DECODE_SET, outputs, 3, NULL), GC_STATUS_CORRUPT);
    CHECK_OK(gc_codec_reset(codec, NULL));
    gc_codec_free(codec);
}

static void call_codecs(void) {
    static const uint8_t codes[] = {kDLFloat, kDLFloat, kDLBfloat}, sizes[] = {32, 16, 16};
    for (int i = 0; i < 3; i++)
        for (int32_t kind = GC_CODEC_ONEBIT; kind <= GC_CODEC_MXFP4; kind++)
            call_codec_of(kind, 5001, kind == GC_CODEC_SIGN ? GC_ERROR_NONE : i % 2, codes[i], sizes[i]);
}

static void call_large_codec_with_threads(void) {
    CHECK_OK(gc_set_threads(4));
    call_codec_of(GC_CODEC_ONEBIT, 1 << 20, GC_ERROR_FLOAT32, kDLFloat, 32);
    call_codec_of(GC_CODEC_INT8, 1 << 20, GC_ERROR_FLOAT32, kDLFloat, 32);
}

/* Both all-reduces, of a rank that is alone. */
static void call_allreduces_by(int32_t kind) {
    int64_t length = 5001, shard = gc_shard_elements(length, 1), sizes[3] = {5000, 0, 1}, one[1] = {1};
    int64_t rows[2] = {1, 5001};
    uint32_t flags;
    gc_codec_options_t options;
    gc_comm_t *comm;
    gc_allreduce_t *allreduce;
    DLDevice host = {kDLCPU, 0};
    DLTensor buffer = flat(elements, dtype_of(kDLFloat, 32), &length);
    DLTensor worker = flat(elements + 32 * 1024, dtype_of(kDLFloat, 32), &length);
    DLTensor server = flat(elements + 64 * 1024, dtype_of(kDLFloat, 32), &shard), values[3];
    DLTensor all_workers = view_of(elements + 32 * 1024, dtype_of(kDLFloat, 32), 2, rows);
    DLTensor dst = view_of(&flags, dtype_of(kDLUInt, 32), 1, one);
    DLTensor *results[3] = {&values[0], &values[1], &values[2]};
    CHECK_OK(gc_comm_group(1, &comm));
    CHECK_OK(gc_comm_reserve(comm, host, 100));
    CHECK_OK(gc_compressed_allreduce(comm, &buffer, &worker, &server, NULL));
    CHECK_OK(gc_comm_async_error(comm));
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.codec = kind;
    options.nonfinite = GC_NONFINITE_TRANSACTIONAL;
    options.segments = sizes;
    options.n_segments = 3;
    for (int i = 0; i < 3; i++)
        values[i] = flat(elements + 32 * 1024 * i, dtype_of(kDLFloat, 32), &sizes[i]);
    CHECK_OK(gc_allreduce_create(comm, &options, &allreduce));
    CHECK_OK(gc_allreduce_run(allreduce, results, 3, NULL, NULL, NULL));
    CHECK_OK(gc_allreduce_commit(allreduce, NULL, NULL));
    CHECK_OK(gc_allreduce_flags(allreduce, &dst, NULL));
    shard = length; /* without the elements that fill up the last byte */
    server = flat(elements + 96 * 1024, dtype_of(kDLFloat, 32), &shard);
    CHECK_OK(gc_allreduce_reduce_scatter(allreduce, (const DLTensor *const *)results, 3, NULL, NULL, &server, NULL));
    CHECK_OK(gc_allreduce_all_gather(allreduce, &server, results, 3, NULL));
    CHECK_OK(gc_allreduce_commit(allreduce, NULL, NULL));
    CHECK_OK(gc_allreduce_errors_out(allreduce, &worker, &server, NULL));
    CHECK_OK(gc_allreduce_errors_in(allreduce, &all_workers, &server, NULL));
    CHECK_OK(gc_allreduce_rollback(allreduce, NULL));
    CHECK_OK(gc_allreduce_reset(allreduce, NULL));
    gc_allreduce_free(allreduce);
    gc_comm_free(comm);
}

static void call_allreduces(void) {
    call_allreduces_by(GC_CODEC_ONEBIT);
    call_allreduces_by(GC_CODEC_INT4);
}

/* Answers as if both of two ranks sent the same, but in what they tell each other at creation: 64 bytes, with the rank at
 * 4 and the size of its world at 8. `ctx`: how far apart the two are in the world of four. */
static int32_t echo(void *ctx, const void *send, void *recv, size_t bytes, DLDevice device, void *stream) {
    unsigned char *other = (unsigned char *)recv + bytes;
    (void)device, (void)stream;
    memcpy(recv, send, bytes);
    memcpy(other, send, bytes);
    if (bytes == 64)
        other[4] = (unsigned char)(other[4] + (other[8] == 2 ? 1 : *(const int *)ctx));
    return 0;
}

/* Of two nodes of two ranks each, as one of them sees it. */
static void call_allreduce_of_nodes(void) {
    int next = 1, after_next = 2;
    int64_t length = 5001, shard = gc_shard_elements(length, 4);
    DLTensor buffer = flat(elements, dtype_of(kDLFloat, 32), &length);
    DLTensor worker = flat(elements + 32 * 1024, dtype_of(kDLFloat, 32), &length);
    DLTensor server = flat(elements + 64 * 1024, dtype_of(kDLFloat, 32), &shard);
    gc_transport_t transport;
    gc_comm_t *intra_node, *inter_node, *comm;
    memset(&transport, 0, sizeof transport);
    transport.struct_size = sizeof transport;
    transport.world_size = 2;
    transport.all_to_all = transport.all_gather = echo;
    transport.ctx = &next;
    CHECK_OK(gc_comm_from_transport(&transport, &intra_node));
    transport.ctx = &after_next;
    CHECK_OK(gc_comm_from_transport(&transport, &inter_node));
    CHECK_OK(gc_comm_hierarchical(intra_node, inter_node, &comm));
    gc_comm_free(intra_node);
    gc_comm_free(inter_node);
    CHECK_STATUS(gc_compressed_allreduce(comm, &buffer, &worker, &server, NULL), GC_STATUS_CORRUPT); /* not four ranks' */
    gc_comm_free(comm);
}

static void call_onebit(void) {
    int64_t length = 100001, shape[2], workspace_shape[1], one[1] = {1};
    float scale, scales[2] = {1, 2};
    DLTensor grad = flat(elements, dtype_of(kDLFloat, 32), &length);
    DLTensor error = flat(elements + 4 * 100001, dtype_of(kDLBfloat, 16), &length);
    DLTensor of_scale = view_of(&scale, dtype_of(kDLFloat, 32), 1, one), dst, workspace;
    DLManagedTensor managed = borrowed(grad), managed_error = borrowed(error), *chunks[2], *back;
    shape[0] = 2;
    shape[1] = gc_chunk_bytes(length, 2);
    workspace_shape[0] = gc_onebit_workspace_bytes(length);
    workspace = view_of(bytes, dtype_of(kDLUInt, 8), 1, workspace_shape);
    dst = view_of(bytes + workspace_shape[0], dtype_of(kDLUInt, 8), 2, shape);
    CHECK_OK(gc_onebit_compress_into(&grad, &error, GC_SCALE_MEAN, &dst, &of_scale, &workspace, NULL));
    CHECK_OK(gc_onebit_compress(&managed, &managed_error, 2, chunks, &scale));
    CHECK_OK(gc_onebit_decompress(chunks, 2, scales, length, dtype_of(kDLBfloat, 16), &back));
    gc_tensor_free(back);
    gc_tensor_free(chunks[0]);
    gc_tensor_free(chunks[1]);
}

/* Dimensions that cannot be joined: each is a loop. */
static void call_with_many_dimensions(void) {
    int64_t shape[DIMS], strides[DIMS], step = 1;
    DLManagedTensor src = borrowed(view_of(elements, dtype_of(kDLBool, 8), DIMS, shape)), *packed, *unpacked;
    for (int axis = 0; axis < DIMS; axis++) {
        shape[axis] = axis < LOOPS ? 2 : 1;
        strides[axis] = step;
        step = axis < LOOPS ? 2 * step + 1 : step;
    }
    src.dl_tensor.strides = strides;
    CHECK_OK(gc_pack_chunks(&src, 1, &packed));
    gc_tensor_free(packed);
    CHECK_OK(gc_pack_bits(&src, LOOPS / 2, GC_BIT_ORDER_LITTLE, &packed));
    CHECK_OK(gc_unpack_bits(packed, LOOPS / 2, 2, GC_BIT_ORDER_LITTLE, &unpacked));
    gc_tensor_free(packed);
    gc_tensor_free(unpacked);
}

/* Strides of which each reaches into the next: whether elements overlap is searched for, and the sentence is long. */
static void call_to_be_refused(void) {
    int64_t shape[DIMS], strides[DIMS], rows[2] = {1, 1};
    DLTensor src = view_of(bytes, dtype_of(kDLUInt, 8), 2, rows);
    DLTensor dst = view_of(elements, dtype_of(kDLBool, 8), DIMS, shape);
    DLManagedTensor *out;
    for (int axis = 0; axis < DIMS; axis++) {
        shape[axis] = axis < LOOPS ? 2 : 1;
        strides[axis] = 1000 + 7 * axis;
    }
    dst.strides = strides;
    CHECK(gc_unpack_chunks_into(&src, GC_BIT_ORDER_BIG, &dst, NULL) != GC_STATUS_OK);
    for (int axis = 0; axis < DIMS; axis++)
        shape[axis] = INT64_MAX;
    CHECK(gc_tensor_empty(cpu(), dtype_of(kDLUInt, 8), DIMS, shape, &out) != GC_STATUS_OK);
    CHECK(gc_chunk_bytes(-1, 0) == -1);
}

/* Without a cast and with those that take blocks of the stack, of every order of loops, by one thread and by several. */
static void call_copies(void) {
    static const uint8_t codes[] = {kDLFloat, kDLInt, kDLBfloat, kDLFloat}, bits[] = {32, 64, 16, 64};
    int64_t shape[DIMS], strides[2][DIMS], n = 1 << 18, square[2] = {512, 512}, across[2] = {1, 512}, apart[2] = {1024, 2};
    for (uint32_t threads = 1; threads <= 4; threads += 3)
        for (int from = 0; from < 4; from++)
            for (int to = 0; to < 4; to++) {
                DLTensor src = view_of(elements, dtype_of(codes[from], bits[from]), 1, &n);
                DLTensor dst = view_of(bytes, dtype_of(codes[to], bits[to]), 1, &n);
                CHECK_OK(gc_set_threads(threads));
                CHECK_OK(gc_copy_into(&src, &dst, NULL));
                src.ndim = dst.ndim = 2;
                src.shape = dst.shape = square;
                src.strides = across;
                CHECK_OK(gc_copy_into(&src, &dst, NULL));
                dst.strides = apart;
                CHECK_OK(gc_copy_into(&src, &dst, NULL));
                for (int axis = 0; axis < DIMS; axis++) {
                    shape[axis] = axis < LOOPS / 2 ? 2 : 1;
                    strides[0][axis] = 3 << axis % 16;
                    strides[1][axis] = 1 << axis % 16;
                }
                src.ndim = dst.ndim = DIMS;
                src.shape = dst.shape = shape;
                src.strides = strides[0];
                dst.strides = strides[1];
                CHECK_OK(gc_copy_into(&src, &dst, NULL));
            }
}

/* On a GPU, on a driver that needs none: whole, in rows, transposed, of any strides in as many loops as there can be; as
 * they are and cast; and from memory of the host. */
static void call_copies_on_cuda(void) {
    static const struct {
        int64_t shape[2], strides[2];
    } layouts[] = {{{64, 64}, {64, 1}}, {{64, 60}, {64, 1}}, {{64, 64}, {1, 64}}, {{64, 30}, {64, 2}}, {{3, 64}, {1, 3}},
                   {{600, 4000}, {1, 600}}};
    static const DLDevice cuda = {kDLCUDA, 0};
    const char *drivers = getenv("GRADCODEC_DRIVERS");
    char path[4096];
    int64_t bytes_there = 600 * 4000 * 4;
    DLManagedTensor *from, *to;
    if (drivers == NULL)
        return;
    snprintf(path, sizeof path, "%s/driver/libcuda.so.1", drivers);
    CHECK(dlopen(path, RTLD_NOW) != NULL);
    CHECK_OK(gc_set_threads(4));
    CHECK_OK(gc_tensor_empty(cuda, dtype_of(kDLUInt, 8), 1, &bytes_there, &from));
    CHECK_OK(gc_tensor_empty(cuda, dtype_of(kDLUInt, 8), 1, &bytes_there, &to));
    for (int again = 0; again < 2; again++) { /* the first time what is loaded and kept comes */
        allocations = again ? 0 : -1;
        for (size_t i = 0; i <= sizeof layouts / sizeof *layouts; i++)
            for (int cast = 0; cast < 2; cast++) {
                int64_t shape[DIMS], strides[DIMS];
                int32_t ndim = i < sizeof layouts / sizeof *layouts ? 2 : DIMS;
                DLTensor src = view_of(from->dl_tensor.data, dtype_of(kDLFloat, 32), ndim, shape);
                DLTensor dst = view_of(to->dl_tensor.data, dtype_of(cast ? kDLInt : kDLFloat, 32), ndim, shape);
                for (int axis = 0; axis < ndim; axis++) {
                    shape[axis] = ndim == 2 ? layouts[i].shape[axis] : axis < LOOPS / 2 ? 2 : 1;
                    strides[axis] = ndim == 2 ? layouts[i].strides[axis] : 3 << axis % 16;
                }
                src.strides = strides;
                src.device = dst.device = cuda;
                CHECK_OK(gc_copy_into(&src, &dst, NULL));
                src.data = elements;
                src.device = cpu();
                CHECK_OK(gc_copy_into(&src, &dst, NULL));
                CHECK_OK(gc_copy_into(&dst, &src, NULL));
            }
    }
    none_was_made("copies on CUDA");
    gc_tensor_free(from);
    gc_tensor_free(to);
}

static void release(void *unused) {
    (void)unused;
}

static void call_for_tensors(void) {
    int64_t length = 1000;
    DLManagedTensor *tensor;
    DLManagedTensorVersioned *versioned;
    CHECK_OK(gc_tensor_from_pointer(elements, cpu(), dtype_of(kDLUInt, 8), 1, &length, NULL, release, NULL, &tensor));
    CHECK_OK(gc_tensor_to_versioned(tensor, &versioned));
    CHECK_OK(gc_tensor_from_versioned(versioned, &tensor));
    gc_tensor_free(tensor);
    CHECK_OK(gc_tensor_empty(cpu(), dtype_of(kDLUInt, 8), 1, &length, &tensor));
    gc_tensor_free(tensor);
}

/* To a socket that nobody listens to, and back. */
static void call_to_share(void) {
    int ends[2];
    int64_t shape[DIMS], strides[DIMS];
    DLManagedTensor src = borrowed(view_of(elements, dtype_of(kDLUInt, 8), DIMS, shape)), *received;
    gc_share_t *lease;
    for (int axis = 0; axis < DIMS; axis++) {
        shape[axis] = axis < LOOPS / 2 ? 2 : 1;
        strides[axis] = 3 << axis % 16;
    }
    src.dl_tensor.strides = strides;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    CHECK_OK(gc_share_send(&src, ends[0], 0, 0, &lease));
    CHECK_STATUS(gc_share_wait(lease, 0), GC_STATUS_TIMEOUT);
    CHECK_OK(gc_share_receive(ends[1], cpu(), 0, &received));
    gc_tensor_free(received);
    CHECK_OK(gc_share_wait(lease, 0));
    gc_share_free(lease);
    CHECK(write(ends[0], ends, 1) == 1 && close(ends[0]) == 0);
    CHECK_STATUS(gc_share_receive(ends[1], cpu(), 0, &received), GC_STATUS_SHARE);
    close(ends[1]);
}

static void call_for_a_capsule(void) {
    gc_capsule_destructor(&elements); /* no capsule: Python is looked for first, and there is none */
}

/* Up to the compiler, which has its own bound (docs/KERNELS.md). */
static void call_compiled_kernels(void) {
    int64_t shape[DIMS], strides[DIMS], length = 1 << 20, one = 1;
    double factor = 2;
    DLTensor x = view_of(elements, dtype_of(kDLFloat, 32), DIMS, shape), y = view_of(bytes, dtype_of(kDLFloat, 32), DIMS, shape);
    DLTensor a = view_of(&factor, dtype_of(kDLFloat, 64), 0, NULL), line = view_of(elements, dtype_of(kDLFloat, 32), 1, &length);
    const DLTensor *inputs[] = {&x, &a}, *lines[] = {&line};
    DLTensor *output = &y;
    gc_elementwise_options_t texts = {.struct_size = sizeof texts, .inputs = "T x, T a", .outputs = "T y",
                                      .operation = "y = a * x + i"};
    gc_reduction_options_t sum = {.struct_size = sizeof sum, .inputs = "T x", .outputs = "T y", .map = "x", .reduce = "a + b",
                                  .post_map = "y = a", .identity = "0"};
    gc_run_options_t there = {.struct_size = sizeof there, .capability = 90};
    gc_kernel_t *kernel;
    for (int i = 0; i < DIMS; i++) {
        shape[i] = i < LOOPS / 2 ? 2 : 1;
        strides[i] = 1 << i % LOOPS;
    }
    x.strides = strides;
    CHECK(setenv("GRADCODEC_NVRTC", "/nowhere", 1) == 0);
    CHECK_OK(gc_elementwise_create(&texts, &kernel));
    CHECK(gc_kernel_workspace_bytes(kernel, inputs, 2, &output, 1, &there) == 0);
    CHECK(gc_kernel_prepare(kernel, inputs, 2, &output, 1, &there, NULL) == GC_STATUS_NVRTC_UNAVAILABLE);
    CHECK(gc_kernel_run(kernel, inputs, 2, &output, 1, NULL, NULL) == GC_STATUS_UNSUPPORTED_DEVICE);
    gc_kernel_free(kernel);
    CHECK_OK(gc_reduction_create(&sum, &kernel));
    y = view_of(bytes, dtype_of(kDLFloat, 32), 1, &one);
    there.axes = (const int32_t[]){0}, there.n_axes = 1, there.flags = GC_RUN_KEEPDIMS;
    CHECK(gc_kernel_workspace_bytes(kernel, lines, 1, &output, 1, &there) > 0);
    CHECK(gc_kernel_prepare(kernel, lines, 1, &output, 1, &there, NULL) == GC_STATUS_NVRTC_UNAVAILABLE);
    gc_kernel_free(kernel);
}

/* Of tensors on a GPU, on a driver that needs none, by kernels that a compiler for the CPU made: in as many loops as there
 * can be, raw, scalar, as a reduction of one launch and of two. */
static gc_kernel_t *add, *total;

static void call_kernels(void) {
    static const DLDevice cuda = {kDLCUDA, 0};
    int64_t shape[DIMS], strides[DIMS], row = 16, length = 1 << 16, room = 1 << 16;
    double factor = 2;
    DLTensor x = view_of(elements, dtype_of(kDLFloat, 32), DIMS, shape), y = view_of(bytes, dtype_of(kDLFloat, 32), DIMS, shape);
    DLTensor w = view_of(elements, dtype_of(kDLFloat, 32), 1, &length), a = view_of(&factor, dtype_of(kDLFloat, 64), 0, NULL);
    DLTensor one = view_of(bytes, dtype_of(kDLFloat, 32), 0, NULL);
    DLTensor workspace = view_of(bytes + (1 << 20), dtype_of(kDLUInt, 8), 1, &room);
    const DLTensor *inputs[] = {&x, &w, &a}, *line = &w;
    DLTensor *output = &y, *result = &one;
    gc_run_options_t with = {.struct_size = sizeof with, .workspace = &workspace};
    for (int i = 0; i < DIMS; i++) {
        shape[i] = i < LOOPS / 2 ? 2 : 1;
        strides[i] = 1 << 2 * (i % (LOOPS / 2));
    }
    x.strides = strides;
    x.device = y.device = w.device = one.device = workspace.device = cuda;
    CHECK_OK(gc_kernel_run(add, inputs, 3, &output, 1, NULL, NULL));
    x.ndim = y.ndim = 1;
    x.strides = NULL;
    x.shape = y.shape = &row;
    CHECK_OK(gc_kernel_run(add, inputs, 3, &output, 1, NULL, NULL));
    CHECK_OK(gc_kernel_run(total, &line, 1, &result, 1, &with, NULL));
    length = 16;
    CHECK_OK(gc_kernel_run(total, &line, 1, &result, 1, NULL, NULL));
}

static void *run_kernels(void *unused) {
    gc_elementwise_options_t texts = {.struct_size = sizeof texts, .inputs = "T x, raw T w, T a", .outputs = "T y",
                                      .operation = "y = a * x + w[i]"};
    gc_reduction_options_t sum = {.struct_size = sizeof sum, .inputs = "T x", .outputs = "T y", .map = "x", .reduce = "a + b",
                                  .post_map = "y = a", .identity = "0"};
    (void)unused;
    CHECK_OK(gc_elementwise_create(&texts, &add));
    CHECK_OK(gc_reduction_create(&sum, &total));
    call_kernels();
    allocations = 0;
    call_kernels();
    none_was_made("prepared kernels");
    gc_kernel_free(add);
    gc_kernel_free(total);
    return NULL;
}

/* On a thread of its own: the compiler, and kernels on the CPU, take stack that is not the library's. */
static void call_prepared_kernels(void) {
    const char *drivers = getenv("GRADCODEC_DRIVERS");
    char path[4096];
    pthread_t id;
    if (drivers == NULL)
        return;
    snprintf(path, sizeof path, "%s/driver/libcuda.so.1", drivers);
    CHECK(dlopen(path, RTLD_NOW) != NULL);
    snprintf(path, sizeof path, "%s/nvrtc_gcc/libnvrtc.so.12", drivers);
    CHECK(setenv("GRADCODEC_NVRTC", path, 1) == 0 && setenv("GRADCODEC_CACHE", "0", 1) == 0);
    CHECK(pthread_create(&id, NULL, run_kernels, NULL) == 0 && pthread_join(id, NULL) == 0);
}

static void call_to_prepare(void) {
    CHECK_OK(gc_prepare(cpu()));
    CHECK_OK(gc_trim(cpu()));
}

/* ---- */

struct run {
    void (*call)(void);
    unsigned char *top; /* of what the call can take of the stack */
};

static void *thread(void *argument) {
    struct run *run = argument;
    unsigned char here;
    run->top = &here;
    run->call();
    return NULL;
}

/* The bytes of stack that a call takes, with the functions of this file, which take little. */
static long depth_of(void (*call)(void)) {
    struct run run = {NULL, NULL};
    pthread_attr_t attributes;
    pthread_t id;
    unsigned char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *deepest;
    CHECK(stack != MAP_FAILED);
    memset(stack, PAINT, STACK);
    run.call = call;
    CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stack, STACK) == 0);
    CHECK(pthread_create(&id, &attributes, thread, &run) == 0 && pthread_join(id, NULL) == 0);
    for (deepest = stack; *deepest == PAINT; deepest++)
        ;
    return run.top - deepest;
}

int main(void) {
    static const struct {
        const char *name;
        void (*call)(void);
    } calls[] = {
        {"small tensors", call_small},
        {"large tensors", call_large},
        {"large tensors, 4 threads", call_large_with_threads},
        {"bits along an axis", call_bits},
        {"large bits along an axis, 4 threads", call_large_bits_with_threads},
        {"signs", call_signs},
        {"codecs", call_codecs},
        {"large codecs, 4 threads", call_large_codec_with_threads},
        {"all-reduces", call_allreduces},
        {"an all-reduce of nodes", call_allreduce_of_nodes},
        {"the plain form", call_onebit},
        {"copies", call_copies},
        {"copies on CUDA", call_copies_on_cuda},
        {"many dimensions", call_with_many_dimensions},
        {"refusals", call_to_be_refused},
        {"tensors", call_for_tensors},
        {"a share", call_to_share},
        {"a capsule", call_for_a_capsule},
        {"compiled kernels", call_compiled_kernels},
        {"prepared kernels", call_prepared_kernels},
        {"gc_prepare", call_to_prepare},
    };
    static const char *const sets[] = {"portable", "avx2", "avx512"};
    long *depth = mmap(NULL, sizeof *depth, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int failed = 0;
    elements = calloc(LARGE, 1);
    bytes = calloc(LARGE, 1);
    CHECK(depth != MAP_FAILED && elements != NULL && bytes != NULL);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        printf("%6s", "");
        for (size_t set = 0; set < sizeof sets / sizeof *sets; set++) {
            int status;
            pid_t child;
            fflush(stdout);
            child = fork();
            CHECK(child >= 0);
            if (child == 0) {
                CHECK(setenv("GRADCODEC_CPU", sets[set], 1) == 0);
                *depth = depth_of(calls[i].call);
                _exit(0);
            }
            CHECK(waitpid(child, &status, 0) == child && status == 0);
            printf("%6ld", *depth);
            failed |= *depth >= BOUND;
        }
        printf(" bytes of stack (%s, %s, %s): %s\n", sets[0], sets[1], sets[2], calls[i].name);
    }
    free(elements);
    free(bytes);
    printf(failed ? "stack: FAILED: %d bytes and more\n" : "stack: ok, all less than %d bytes\n", BOUND);
    return failed;
}
