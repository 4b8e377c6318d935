/* hostile [CALLS [SEED]]: a million calls with arguments that nobody would write by hand: every exported function (those
 * of codecs: hostile_codec.c), with pointers that are NULL or unaligned, sizes and strides of every sign and magnitude,
 * dtypes, devices, axes, counts and flags that do not exist, and between them calls that are in order.
 *
 * What a call must do is worked out beforehand, by a model that is as simple as it gets. A call without a fault must
 * succeed, with the model's bytes; one with faults must be refused with the status of one of them, and change nothing:
 * both windows of memory are compared with a shadow after every call, whatever it was. The library's one condition is
 * kept: memory that a descriptor describes is there. So a descriptor either fits its window, or is refused by
 * arithmetic alone, or goes to functions that do not look at the memory; `there` makes sure. Windows begin or end at a
 * page that must not be touched, and so do many of the tensors in them.
 *
 * The same seed gives the same calls. At the end everything taken must have been released once, and the heap be what it
 * was. */
#define _DEFAULT_SOURCE
#include "hostile.h"

/* What tensors of ours hold: released once, by whoever. */
enum { ALIVE = 0x600d, DEAD = 0xdead };
typedef struct {
    int state;
} Owner;

static uint64_t owners_made, owners_released;
static pthread_mutex_t owners_lock = PTHREAD_MUTEX_INITIALIZER;

static Owner *make_owner(void) {
    Owner *owner = malloc(sizeof *owner);
    CHECK(owner != NULL);
    owner->state = ALIVE;
    owners_made++;
    return owner;
}

static void release_owner(void *ctx) {
    Owner *owner = ctx;
    CHECK(owner->state == ALIVE);
    owner->state = DEAD;
    free(owner);
    CHECK(pthread_mutex_lock(&owners_lock) == 0);
    owners_released++;
    CHECK(pthread_mutex_unlock(&owners_lock) == 0);
}

/* A tensor that comes from elsewhere, in either form. */
typedef struct {
    Argument a;
    struct DLManagedTensorVersioned versioned;
    Owner *owner;
} Foreign;

static void release_foreign(Foreign *foreign) {
    release_owner(foreign->owner);
    free(foreign);
}

static void delete_legacy(DLManagedTensor *tensor) {
    release_foreign(tensor->manager_ctx);
}

static void delete_versioned(struct DLManagedTensorVersioned *tensor) {
    release_foreign(tensor->manager_ctx);
}

/* ---- the functions, one after the other -------------------------------------------------------------------------- */

static void call_small_ones(void) {
    int32_t code = one_in(2) ? (int32_t)wild() : (int32_t)below(110);
    uint32_t threads = one_in(2) ? (uint32_t)below(5) : one_in(2) ? 0 : 1025 + (uint32_t)below(UINT32_MAX - 1025);
    static const int types[] = {kDLCPU, kDLCUDAHost, kDLCUDA, kDLCUDAManaged, kDLOpenCL, 0, -1};
    DLDevice device = {(DLDeviceType)types[below(7)], (int32_t)below(3) - 1};
    bool on_cpu = device.device_type == kDLCPU || device.device_type == kDLCUDAHost;
    bool on_card = device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged;
    Faults of_device = on_cpu ? 0 : on_card ? NO_CUDA : FAULT(UNSUPPORTED_DEVICE);
    unsigned char name[200]; /* of no kernel and no family: it begins with a byte that no name has */
    for (size_t i = 0; i < sizeof name; i++)
        name[i] = i == 0 ? 0xff : i == sizeof name - 1 ? 0 : (unsigned char)next();
    const char *text = NULL;
    const void *fatbin = NULL;
    size_t size = 0;
    switch (below(11)) {
    case 10:
        begin(f_gc_build_info);
        text = gc_build_info();
        EXPECT(strncmp(text, "gradcodec ", 10) == 0 && strlen(text) <= 1000);
        break;
    case 0:
        begin(f_gc_version);
        EXPECT(gc_version() == GRADCODEC_VERSION);
        break;
    case 1:
        begin(f_gc_version_string);
        text = gc_version_string();
        EXPECT(text != NULL && strlen(text) >= 5);
        break;
    case 2:
        begin(f_gc_status_name);
        text = gc_status_name(code);
        EXPECT(text != NULL && strncmp(text, "GC_STATUS_", 10) == 0);
        break;
    case 3:
        begin(f_gc_last_error);
        EXPECT(gc_last_error() != NULL);
        break;
    case 4:
        begin(f_gc_capsule_destructor); /* without a Python, whatever it is given */
        outcomes[f_gc_capsule_destructor][0]++;
        gc_capsule_destructor(one_in(2) ? NULL : &untouched);
        begin(f_gc_chunk_bytes); /* whose sentence replaces the one that stays behind */
        judge(gc_chunk_bytes(-1, 1) == -1 ? GC_STATUS_INVALID_ARGUMENT : GC_STATUS_OK, FAULT(INVALID_ARGUMENT));
        return;
    case 5:
        begin(f_gc_set_threads);
        judge(gc_set_threads(threads), threads > 1024 ? FAULT(INVALID_ARGUMENT) : 0);
        return;
    case 6:
        begin(f_gc_prepare);
        judge(gc_prepare(device), of_device);
        return;
    case 7:
        begin(f_gc_trim);
        judge(gc_trim(device), of_device);
        return;
    case 8:
        begin(f_gc_builtin_kernels);
        if (one_in(2)) {
            judge(gc_builtin_kernels("bits", &fatbin, &size), 0);
            EXPECT(fatbin != NULL && (uintptr_t)fatbin % 16 == 0 && size > 1000);
        } else {
            judge(gc_builtin_kernels(one_in(8) ? NULL : (char *)name, &fatbin, one_in(8) ? NULL : &size),
                  FAULT(INVALID_ARGUMENT));
            EXPECT(fatbin == NULL && size == 0);
        }
        return;
    case 9: {
        bool known = one_in(2), sized = !one_in(8), old = code < 75;
        gc_kernel_shape_t shape = {sized ? sizeof shape : threads % sizeof shape, 0, 0, 0, 0, {7, 7, 7}};
        begin(f_gc_builtin_kernel_shape);
        Faults faults = (known && sized ? 0 : FAULT(INVALID_ARGUMENT)) | (old ? FAULT(UNSUPPORTED_DEVICE) : 0);
        judge(gc_builtin_kernel_shape(known ? "gc_unpack_u8" : (char *)name, code, &shape), faults);
        EXPECT(faults ? shape.threads == 0 && shape.reserved[1] == 7 : shape.threads > 0 && shape.reserved[1] == 0);
        return;
    }
    }
    succeeded();
}

static void call_chunk_bytes(void) {
    int64_t elements = one_in(2) ? wild() : (int64_t)below(100000);
    uint64_t n_chunks = one_in(2) ? (uint64_t)wild() : below(100);
    Faults faults = elements < 0 || n_chunks == 0 ? FAULT(INVALID_ARGUMENT) : 0;
    begin(f_gc_chunk_bytes);
    int64_t got = gc_chunk_bytes(elements, n_chunks);
    EXPECT(got == (faults ? -1 : chunk_bytes(elements, n_chunks)));
    judge(faults ? GC_STATUS_INVALID_ARGUMENT : GC_STATUS_OK, faults);
}

static void call_tensor_empty(void) {
    DLManagedTensor *out[2] = {UNTOUCHED, UNTOUCHED};
    prepare(SMALL);
    make(&src, dtypes[below(DTYPES)], -1, NULL, SMALL / 8, &windows[0], false);
    src.passed_on = true;
    if (one_in(4))
        spoil_once(&src);
    /* Only device, dtype, ndim and shape count. */
    DLTensor *t = &src.tensor.dl_tensor;
    src.passed = &src.tensor;
    t->data = windows[0].base;
    t->strides = NULL;
    t->byte_offset = 0;
    understand(&src);
    Faults faults = src.faults | device_faults(t);
    if (src.counted && src.bits != 0 && !askable(t->ndim, t->shape, src.bits, &faults))
        return;
    DLManagedTensor **place = random_out(out, &faults);
    begin(f_gc_tensor_empty);
    if (judge(gc_tensor_empty(t->device, t->dtype, t->ndim, t->shape, place), faults)) {
        check_output(&out[0]->dl_tensor, t->dtype, t->ndim, t->shape);
        EXPECT((uintptr_t)out[0]->dl_tensor.data % 256 == 0 && out[0]->deleter != NULL);
        if (src.elements > 0)
            memset(out[0]->dl_tensor.data, 0x5a, (size_t)((src.bits * src.elements + 7) / 8));
        keep(out[0], false);
        out[0] = UNTOUCHED;
    }
    EXPECT(out[0] == UNTOUCHED && out[1] == UNTOUCHED);
}

/* A tensor that nobody looks into: it may lie anywhere. */
static void make_anywhere(Argument *a) {
    make(a, dtypes[below(DTYPES)], -1, NULL, one_in(4) ? BIG / 8 : 100, &windows[0], false);
    a->passed_on = true;
    while (one_in(3))
        spoil_once(a);
}

/* That `t` shows what `a` shows. */
static void check_same(const DLTensor *t, const Argument *a) {
    const DLTensor *s = &a->tensor.dl_tensor;
    bool joined = a->elements == 0 || has_addresses(s);
    EXPECT(t->ndim == s->ndim && memcmp(&t->dtype, &s->dtype, sizeof t->dtype) == 0);
    EXPECT(t->device.device_type == s->device.device_type && t->device.device_id == s->device.device_id);
    EXPECT(t->ndim == 0 || memcmp(t->shape, s->shape, sizeof *t->shape * (size_t)t->ndim) == 0);
    EXPECT(t->byte_offset == (joined ? 0 : s->byte_offset));
    EXPECT((uintptr_t)t->data == (a->elements == 0 ? 0 : (uintptr_t)s->data + (joined ? s->byte_offset : 0)));
    for (int i = 0; i < t->ndim && a->elements > 0; i++)
        EXPECT(t->strides[i] == a->steps[i]);
}

static void call_tensor_from_pointer(void) {
    DLManagedTensor *out[2] = {UNTOUCHED, UNTOUCHED};
    Owner *owner = one_in(4) ? NULL : make_owner();
    windows[0].base = windows[0].arena;
    windows[0].size = BIG;
    make_anywhere(&src);
    DLTensor *t = &src.tensor.dl_tensor;
    src.passed = &src.tensor;
    t->data = t->data == NULL ? NULL : (void *)((uintptr_t)t->data + t->byte_offset);
    t->byte_offset = 0;
    understand(&src);
    Faults faults = src.faults;
    DLManagedTensor **place = random_out(out, &faults);
    begin(f_gc_tensor_from_pointer);
    gc_status_t status = gc_tensor_from_pointer(t->data, t->device, t->dtype, t->ndim, t->shape, t->strides,
                                                owner ? release_owner : NULL, owner, place);
    if (judge(status, faults)) {
        check_same(&out[0]->dl_tensor, &src);
        EXPECT(out[0]->deleter != NULL && (owner == NULL || owner->state == ALIVE));
        keep(out[0], false);
        out[0] = UNTOUCHED;
    } else if (owner) {
        release_owner(owner);
    }
    EXPECT(out[0] == UNTOUCHED && out[1] == UNTOUCHED);
}

static void call_tensor_free(void) {
    DLManagedTensor nobodys;
    begin(f_gc_tensor_free);
    if (one_in(4)) {
        memset(&nobodys, 0xa5, sizeof nobodys);
        nobodys.deleter = NULL;
        gc_tensor_free(one_in(2) ? NULL : &nobodys);
    } else if (kept_count > 0) {
        release(take_kept());
    }
    succeeded();
}

static void call_tensor_free_versioned(void) {
    struct DLManagedTensorVersioned nobodys;
    begin(f_gc_tensor_free_versioned);
    memset(&nobodys, 0xa5, sizeof nobodys);
    nobodys.deleter = NULL;
    gc_tensor_free_versioned(one_in(2) ? NULL : &nobodys);
    succeeded();
}

/* From one form to the other: of what is kept, or of what comes from elsewhere. */
static void call_convert_kept(void) {
    DLManagedTensor *legacy = UNTOUCHED;
    struct DLManagedTensorVersioned *versioned = NULL;
    if (kept_count == 0)
        return;
    Kept item = take_kept();
    DLManagedTensor *old = item.tensor;
    struct DLManagedTensorVersioned *old_versioned = item.tensor;
    DLTensor before = item.versioned ? old_versioned->dl_tensor : old->dl_tensor;
    gc_status_t status;
    begin(item.versioned ? f_gc_tensor_from_versioned : f_gc_tensor_to_versioned);
    status = item.versioned ? gc_tensor_from_versioned(old_versioned, &legacy)
                            : gc_tensor_to_versioned(old, &versioned);
    judge(status, 0);
    const DLTensor *after = item.versioned ? &legacy->dl_tensor : &versioned->dl_tensor;
    EXPECT(after->data == before.data && after->ndim == before.ndim && after->byte_offset == before.byte_offset);
    if (item.versioned)
        keep(legacy, false);
    else
        keep(versioned, true);
}

static void call_convert_foreign(void) {
    bool from_versioned = one_in(2);
    DLManagedTensor *legacy[2] = {UNTOUCHED, UNTOUCHED};
    struct DLManagedTensorVersioned *versioned[2] = {(void *)UNTOUCHED, (void *)UNTOUCHED};
    Foreign *foreign = malloc(sizeof *foreign);
    CHECK(foreign != NULL);
    windows[0].base = windows[0].arena;
    windows[0].size = BIG;
    make_anywhere(&foreign->a);
    Faults faults = foreign->a.faults;
    src = foreign->a; /* for `show` */
    foreign->owner = make_owner();
    foreign->a.tensor.manager_ctx = foreign->versioned.manager_ctx = foreign;
    foreign->a.tensor.deleter = delete_legacy;
    foreign->versioned.deleter = delete_versioned;
    foreign->versioned.dl_tensor = foreign->a.tensor.dl_tensor;
    foreign->versioned.version.major = one_in(20) ? (uint32_t)wild() : 1;
    foreign->versioned.version.minor = one_in(2) ? (uint32_t)below(4) : (uint32_t)next();
    foreign->versioned.flags = one_in(2) ? 0 : one_in(2) ? below(8) : next();
    bool right_address = foreign->a.passed == &foreign->a.tensor;
    bool succeeds;
    if (from_versioned) {
        if (right_address && foreign->versioned.version.major != 1)
            faults = FAULT(INVALID_ARGUMENT);
        else if (right_address && (foreign->versioned.flags & DLPACK_FLAG_BITMASK_READ_ONLY))
            faults |= FAULT(READ_ONLY);
        else if (right_address && (foreign->versioned.flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED))
            faults |= FAULT(UNSUPPORTED_DTYPE);
        char *passed = foreign->a.passed == NULL ? NULL
                                                 : (char *)&foreign->versioned + (right_address ? 0 : 1 + below(7));
        DLManagedTensor **place = random_out(legacy, &faults);
        begin(f_gc_tensor_from_versioned);
        succeeds = judge(gc_tensor_from_versioned((void *)passed, place), faults);
    } else {
        void *place = random_out((DLManagedTensor **)(void *)versioned, &faults);
        begin(f_gc_tensor_to_versioned);
        succeeds = judge(gc_tensor_to_versioned(foreign->a.passed, place), faults);
    }
    EXPECT(foreign->owner->state == ALIVE);
    if (!succeeds) {
        release_foreign(foreign);
    } else if (from_versioned) {
        check_same(&legacy[0]->dl_tensor, &foreign->a);
        EXPECT(legacy[0]->deleter != NULL);
        keep(legacy[0], false);
        legacy[0] = UNTOUCHED;
    } else {
        check_same(&versioned[0]->dl_tensor, &foreign->a);
        uint8_t code = foreign->a.tensor.dl_tensor.dtype.code;
        uint32_t minor = code <= kDLBool ? 0 : code <= kDLFloat4_e2m1fn ? 1 : DLPACK_MINOR_VERSION;
        EXPECT(versioned[0]->version.major == 1 && versioned[0]->version.minor == minor && versioned[0]->flags == 0);
        EXPECT(versioned[0]->deleter != NULL);
        keep(versioned[0], true);
        versioned[0] = (void *)UNTOUCHED;
    }
    EXPECT(legacy[0] == UNTOUCHED && legacy[1] == UNTOUCHED);
    EXPECT(versioned[0] == (void *)UNTOUCHED && versioned[1] == (void *)UNTOUCHED);
}

static void unpack_again(DLManagedTensor **chunks, size_t n_chunks, int64_t elements) {
    DLManagedTensor *out = UNTOUCHED;
    begin(f_gc_unpack_chunks);
    judge(gc_unpack_chunks(chunks, n_chunks, elements, &out), 0);
    check_output(&out->dl_tensor, dtypes[0], 1, &elements);
    EXPECT(elements == 0 || memcmp(out->dl_tensor.data, bits, (size_t)elements) == 0);
    keep(out, false);
}

static void call_pack_chunks(int function, size_t size) {
    bool signs = function == f_gc_pack_signs;
    static DLManagedTensor *out[601];
    uint64_t n_chunks = (uint64_t)random_chunks();
    prepare(size);
    if (signs)
        make_elements(INTEGERS, DTYPES - INTEGERS, size);
    else
        make_elements(0, INTEGERS, size);
    spoil(&src);
    /* So many that their headers alone are more than any memory: never written, so no room for them is needed. */
    if (one_in(50))
        n_chunks = (uint64_t)NOWHERE + (next() >> below(17));
    Faults faults = src.faults | (src.is_float == signs ? 0 : FAULT(UNSUPPORTED_DTYPE));
    faults |= n_chunks == 0 ? FAULT(INVALID_ARGUMENT) : 0;
    faults |= n_chunks > 600 ? FAULT(OUT_OF_MEMORY) | FAULT(SIZE_OVERFLOW) : 0;
    DLManagedTensor **place = random_out(out, &faults);
    int64_t bytes = src.counted && n_chunks > 0 ? chunk_bytes(src.elements, n_chunks) : 0;
    if (faults == 0 && !askable(1, &src.elements, 8, &faults))
        return;
    for (int k = 0; k <= 600; k++)
        out[k] = UNTOUCHED;
    begin(function);
    if (judge(signs ? gc_pack_signs(src.passed, n_chunks, place) : gc_pack_chunks(src.passed, n_chunks, place), faults)) {
        Rows rows = {1, 1, src.elements, bytes * (int64_t)n_chunks};
        read_bits(&src, signs);
        pack_model(rows, GC_BIT_ORDER_BIG);
        unsigned char *first = out[0]->dl_tensor.data;
        for (size_t k = 0; k < n_chunks; k++) {
            check_output(&out[k]->dl_tensor, uint8, 1, &bytes);
            EXPECT(out[k]->deleter != NULL);
            EXPECT(bytes == 0 || out[k]->dl_tensor.data == first + (int64_t)k * bytes);
        }
        EXPECT((uintptr_t)first % 256 == 0 && (rows.m == 0 || memcmp(first, packed, (size_t)rows.m) == 0));
        if (one_in(2))
            unpack_again(out, n_chunks, src.elements);
        for (size_t k = 0; k < n_chunks; k++) {
            if (n_chunks > 10)
                gc_tensor_free(out[k]);
            else
                keep(out[k], false);
            out[k] = UNTOUCHED;
        }
    }
    for (int k = 0; k <= 600; k++)
        EXPECT(out[k] == UNTOUCHED);
    compare_windows();
}

static void call_unpack_chunks(int function, size_t size) {
    bool signs = function == f_gc_unpack_signs;
    DLDataType dtype = signs ? dtypes[below(DTYPES)] : dtypes[0];
    DLManagedTensor *out[2] = {UNTOUCHED, UNTOUCHED}, *chunks[13];
    uint64_t n_chunks = 1 + below(12);
    prepare(size);
    int64_t elements = (int64_t)below(size / (signs ? 80 : 24)), bytes = chunk_bytes(elements, n_chunks), length;
    Faults faults = 0;
    for (uint64_t k = 0; k < n_chunks; k++) {
        length = bytes;
        if (one_in(100))
            length += one_in(2) ? 1 : bytes > 0 ? -1 : 0;
        make(&chunk[k], one_in(200) ? dtypes[below(DTYPES)] : uint8, 1, &length, 0, &windows[below(2)], false);
        if (one_in(6))
            spoil(&chunk[k]);
        chunks[k] = chunk[k].passed;
    }
    if (one_in(20))
        elements = wild();
    else if (one_in(4) && bytes > 0) /* as many as give the same bytes */
        elements = bytes * (int64_t)n_chunks * 8 - (int64_t)below(8);
    uint64_t count = one_in(50) ? 0 : one_in(50) ? ((uint64_t)1 << 61) + (next() >> 3) : n_chunks;
    if (elements < 0 || count == 0)
        faults |= FAULT(INVALID_ARGUMENT);
    else
        bytes = chunk_bytes(elements, count);
    if (count > 12)
        faults |= FAULT(SIZE_OVERFLOW); /* more pointers than addresses: none of them is looked at */
    for (uint64_t k = 0; count == n_chunks && k < count; k++) {
        const DLTensor *t = &chunk[k].tensor.dl_tensor;
        faults |= chunk[k].faults;
        if (memcmp(&t->dtype, &uint8, sizeof uint8) != 0)
            faults |= FAULT(UNSUPPORTED_DTYPE);
        if (chunk[k].counted && (t->ndim != 1 || t->shape[0] != bytes))
            faults |= FAULT(SHAPE_MISMATCH);
        if (chunk[k].faults & NO_CUDA) /* on another device than the others */
            faults |= FAULT(INVALID_ARGUMENT);
    }
    if (signs && !is_signed(dtype))
        faults |= FAULT(UNSUPPORTED_DTYPE);
    if (faults == 0 && !askable(1, &elements, dtype.bits, &faults))
        return;
    DLManagedTensor **place = random_out(out, &faults), **from = chunks;
    if (one_in(60)) {
        faults |= FAULT(INVALID_ARGUMENT);
        from = one_in(2) ? NULL : (DLManagedTensor **)(void *)((char *)chunks + 1 + below(7));
    }
    begin(function);
    if (judge(signs ? gc_unpack_signs(from, count, elements, dtype, place)
                    : gc_unpack_chunks(from, count, elements, place), faults)) {
        Rows rows = {1, 1, elements, bytes * (int64_t)count};
        unsigned char *all = packed;
        for (uint64_t k = 0; k < count; k++, packed += bytes)
            read_bytes(&chunk[k]);
        packed = all;
        unpack_model(rows, GC_BIT_ORDER_BIG);
        check_output(&out[0]->dl_tensor, dtype, 1, &elements);
        if (signs) {
            const unsigned char *found = out[0]->dl_tensor.data;
            unsigned char expected[8];
            for (int64_t i = 0; i < elements; i++) {
                write_sign(expected, dtype, bits[i], 1);
                EXPECT(memcmp(found + i * (dtype.bits / 8), expected, dtype.bits / 8) == 0);
            }
        } else {
            EXPECT(elements == 0 || memcmp(out[0]->dl_tensor.data, bits, (size_t)elements) == 0);
        }
        keep(out[0], false);
        out[0] = UNTOUCHED;
    }
    EXPECT(out[0] == UNTOUCHED && out[1] == UNTOUCHED);
    compare_windows();
}

static void call_pack_bits(size_t size) {
    DLManagedTensor *out[2] = {UNTOUCHED, UNTOUCHED};
    int64_t shape[MAX_DIMS + 1];
    int32_t axis;
    int along, ndim = 0;
    prepare(size);
    make_elements(0, INTEGERS, size);
    spoil(&src);
    Faults faults = src.faults | (src.is_float ? FAULT(UNSUPPORTED_DTYPE) : 0);
    Faults axis_fault = random_axis(&src, &axis, &along);
    faults |= axis_fault;
    int32_t order = random_order(&faults);
    if (src.counted && axis_fault == 0) {
        ndim = shape_along(&src, along, bytes_for(length_along(&src, along)), shape);
        if (!askable(ndim, shape, 8, &faults))
            return;
    }
    DLManagedTensor **place = random_out(out, &faults);
    begin(f_gc_pack_bits);
    if (judge(gc_pack_bits(src.passed, axis, order, place), faults)) {
        if (src.elements > 0) {
            Rows rows = rows_along(&src, along);
            rows.n = length_along(&src, along);
            rows.m = bytes_for(rows.n);
            read_bits(&src, false);
            pack_model(rows, order);
            EXPECT(memcmp(out[0]->dl_tensor.data, packed, (size_t)(rows.outer * rows.m * rows.inner)) == 0);
        }
        check_output(&out[0]->dl_tensor, uint8, ndim, shape);
        keep(out[0], false);
        out[0] = UNTOUCHED;
    }
    EXPECT(out[0] == UNTOUCHED && out[1] == UNTOUCHED);
    compare_windows();
}

/* A source of bytes. Now and then it repeats a row more often than anyone could read: some of it must do. */
static void make_bytes(size_t size) {
    make(&src, one_in(60) ? dtypes[below(DTYPES)] : uint8, -1, NULL, (int64_t)size / 64, &windows[0], false);
    DLTensor *t = &src.tensor.dl_tensor;
    if (t->ndim > 0 && t->strides != NULL && src.elements > 0 && one_in(16)) {
        int axis = (int)below((uint64_t)t->ndim);
        src.shape[axis] = (int64_t)1 << (30 + below(30));
        src.strides[axis] = 0;
        understand(&src);
        if (src.faults != 0 || !there(&src))
            make(&src, uint8, -1, NULL, (int64_t)size / 64, &windows[0], false);
    }
}

static void call_unpack_bits(size_t size) {
    DLManagedTensor *out[2] = {UNTOUCHED, UNTOUCHED};
    int64_t shape[MAX_DIMS + 1], bytes = 0, length = 0, count;
    int32_t axis;
    int along, ndim = 0;
    prepare(size);
    make_bytes(size);
    spoil(&src);
    Faults faults = src.faults;
    faults |= memcmp(&src.tensor.dl_tensor.dtype, &uint8, sizeof uint8) ? FAULT(UNSUPPORTED_DTYPE) : 0;
    Faults axis_fault = random_axis(&src, &axis, &along);
    faults |= axis_fault;
    int32_t order = random_order(&faults);
    if (src.counted && axis_fault == 0)
        bytes = length_along(&src, along);
    if (one_in(3))
        count = GC_COUNT_ALL;
    else if (one_in(20))
        count = wild();
    else if (one_in(2) || bytes > SMALL)
        count = (int64_t)below(bytes > SMALL ? 20 : 8 * (uint64_t)bytes + 20);
    else
        count = -(int64_t)below(8 * (uint64_t)bytes + 2);
    if (count >= 0)
        length = count;
    else if (bytes > INT64_MAX / 8)
        faults |= FAULT(SIZE_OVERFLOW);
    else
        length = 8 * bytes + (count == GC_COUNT_ALL ? 0 : count);
    bool known = src.counted && axis_fault == 0;
    if (known && length < 0) {
        faults |= FAULT(INVALID_ARGUMENT);
    } else if (known) {
        ndim = shape_along(&src, along, length, shape);
        if (!askable(ndim, shape, 8, &faults))
            return;
    }
    DLManagedTensor **place = random_out(out, &faults);
    begin(f_gc_unpack_bits);
    if (judge(gc_unpack_bits(src.passed, axis, count, order, place), faults)) {
        check_output(&out[0]->dl_tensor, uint8, ndim, shape);
        wide elements = product(ndim, shape);
        if (elements > 0 && src.elements <= limit) {
            Rows rows = rows_along(&src, along);
            rows.m = bytes;
            rows.n = length;
            read_bytes(&src);
            unpack_model(rows, order);
            EXPECT(memcmp(out[0]->dl_tensor.data, bits, (size_t)elements) == 0);
        }
        keep(out[0], false);
        out[0] = UNTOUCHED;
    }
    EXPECT(out[0] == UNTOUCHED && out[1] == UNTOUCHED);
    compare_windows();
}

/* What may be wrong between a source and an output that are both in order by themselves. */
static Faults faults_between(void) {
    bool src_on_card = (src.faults & NO_CUDA) != 0, dst_on_card = (dst.faults & NO_CUDA) != 0;
    Faults faults = src.faults | dst.faults;
    if (src_on_card || dst_on_card)
        faults |= FAULT(INVALID_ARGUMENT); /* different devices */
    if (faults == 0 && (intersect(&src, &dst) || overlaps_itself(&dst)))
        faults = FAULT(INVALID_ARGUMENT);
    return faults;
}

/* The window of an output: now and then the one of its source. */
static const Window *output_window(void) {
    return &windows[one_in(16) ? 0 : 1];
}

static void call_pack_rows(int function, size_t size) {
    bool signs = function == f_gc_pack_signs_into;
    int64_t shape[2];
    prepare(size);
    if (signs)
        make_elements(INTEGERS, DTYPES - INTEGERS, size);
    else
        make_elements(0, INTEGERS, size);
    shape[0] = random_chunks();
    shape[1] = shape[0] == 0 ? (int64_t)below(3) : chunk_bytes(src.elements, (uint64_t)shape[0]);
    make(&dst, uint8, 2, shape, 0, output_window(), true);
    spoil(&src);
    spoil(&dst);
    Faults faults = faults_between();
    faults |= src.is_float == signs ? 0 : FAULT(UNSUPPORTED_DTYPE);
    faults |= faults_of_rows(&dst, &src);
    int32_t order = random_order(&faults);
    if (faults == 0) {
        Rows rows = {1, 1, src.elements, dst.elements};
        read_bits(&src, signs);
        pack_model(rows, order);
        write_bytes(&dst);
    }
    begin(function);
    void *stream = random_stream();
    judge(signs ? gc_pack_signs_into(src.passed, order, dst.passed, stream)
                : gc_pack_chunks_into(src.passed, order, dst.passed, stream),
          faults);
    compare_windows();
}

static void call_unpack_rows(size_t size) {
    int64_t shape[2];
    prepare(size);
    make(&dst, dtypes[below(DTYPES)], -1, NULL, (int64_t)size / 8, output_window(), true);
    shape[0] = random_chunks();
    shape[1] = shape[0] == 0 ? (int64_t)below(3) : chunk_bytes(dst.elements, (uint64_t)shape[0]);
    make(&src, uint8, 2, shape, 0, &windows[0], one_in(2));
    spoil(&src);
    spoil(&dst);
    Faults faults = faults_between() | faults_of_rows(&src, &dst);
    int32_t order = random_order(&faults);
    if (faults == 0) {
        Rows rows = {1, 1, dst.elements, src.elements};
        read_bytes(&src);
        unpack_model(rows, order);
        write_bits(&dst);
    }
    begin(f_gc_unpack_chunks_into);
    judge(gc_unpack_chunks_into(src.passed, order, dst.passed, random_stream()), faults);
    compare_windows();
}

static void call_unpack_sign_rows(size_t size) {
    static Argument scales;
    bool scaled = one_in(2);
    int64_t shape[2], count;
    prepare(size);
    /* What a scale becomes in 16 bits is not for this model to say. */
    DLDataType dtype = dtypes[scaled && !one_in(20) ? INTEGERS + 1 + below(2) : below(DTYPES)];
    if (scaled && dtype.bits == 16 && dtype.code != kDLInt && dtype.code != kDLUInt)
        scaled = false;
    make(&dst, dtype, -1, NULL, (int64_t)size / 8, output_window(), true);
    shape[0] = random_chunks();
    shape[1] = shape[0] == 0 ? (int64_t)below(3) : chunk_bytes(dst.elements, (uint64_t)shape[0]);
    make(&src, uint8, 2, shape, 0, &windows[0], one_in(2));
    count = one_in(2) ? 1 : one_in(30) ? (int64_t)below(4) : shape[0];
    scaled = scaled && count * 4 < (int64_t)size / 8;
    if (scaled) {
        make(&scales, one_in(30) ? dtypes[below(DTYPES)] : dtypes[INTEGERS + 1], 1, &count, 0, &windows[0], false);
        spoil(&scales);
        scaled = scales.passed != NULL;
    }
    spoil(&src);
    spoil(&dst);
    dtype = dst.tensor.dl_tensor.dtype;
    if (dtype.bits == 16 && dtype.code != kDLInt && dtype.code != kDLUInt)
        scaled = false; /* spoilt to that */
    Faults faults = src.faults | dst.faults | (scaled ? scales.faults : 0) | faults_of_rows(&src, &dst);
    if (!is_signed(dtype))
        faults |= FAULT(UNSUPPORTED_DTYPE);
    if (((src.faults | dst.faults | (scaled ? scales.faults : 0)) & NO_CUDA) != 0)
        faults |= FAULT(INVALID_ARGUMENT); /* different devices */
    if (scaled) {
        const DLTensor *s = &scales.tensor.dl_tensor;
        if (!dst.is_float || memcmp(&s->dtype, &dtypes[INTEGERS + 1], sizeof s->dtype) != 0)
            faults |= FAULT(UNSUPPORTED_DTYPE);
        if (scales.counted && (s->ndim != 1 || (s->shape[0] != 1 && src.counted && src.tensor.dl_tensor.ndim > 0 && s->shape[0] != src.tensor.dl_tensor.shape[0])))
            faults |= FAULT(SHAPE_MISMATCH);
        if (scales.counted && !is_contiguous(&scales))
            faults |= FAULT(NOT_CONTIGUOUS);
    }
    if (faults == 0 && (intersect(&src, &dst) || (scaled && intersect(&scales, &dst)) || overlaps_itself(&dst)))
        faults = FAULT(INVALID_ARGUMENT);
    int32_t order = random_order(&faults);
    if (faults == 0) {
        Rows rows = {1, 1, dst.elements, src.elements};
        const DLTensor *s = &scales.tensor.dl_tensor;
        read_bytes(&src);
        unpack_model(rows, order);
        Walk w = walk(&dst);
        for (int64_t i = 0; i < dst.elements; i++, step(&w)) {
            float scale = 1;
            if (scaled)
                memcpy(&scale, (const char *)s->data + s->byte_offset + (s->shape[0] > 1 ? 4 * (i / 8 / shape[1]) : 0), 4);
            write_sign(shadow_of(w.at), dtype, bits[i], scale);
        }
    }
    begin(f_gc_unpack_signs_into);
    judge(gc_unpack_signs_into(src.passed, scaled ? scales.passed : NULL, order, dst.passed, random_stream()), faults);
    compare_windows();
}

static void call_vote(size_t size) {
    int64_t shape[2];
    prepare(size);
    shape[0] = one_in(30) ? 0 : 1 + (int64_t)below(one_in(4) ? 80 : 9);
    shape[1] = (int64_t)below(size / (16 + 8 * (uint64_t)shape[0]));
    make(&src, uint8, 2, shape, 0, &windows[0], one_in(2));
    make(&dst, uint8, 1, shape + 1, 0, output_window(), true);
    spoil(&src);
    spoil(&dst);
    const DLTensor *s = &src.tensor.dl_tensor, *d = &dst.tensor.dl_tensor;
    uint64_t turn = one_in(2) ? below(10) : next();
    Faults faults = faults_between();
    if (memcmp(&s->dtype, &uint8, sizeof uint8) != 0 || memcmp(&d->dtype, &uint8, sizeof uint8) != 0)
        faults |= FAULT(UNSUPPORTED_DTYPE);
    if (src.counted && s->ndim != 2)
        faults |= FAULT(SHAPE_MISMATCH);
    if (src.counted && s->ndim == 2 && s->shape[0] == 0)
        faults |= FAULT(INVALID_ARGUMENT);
    if (src.elements > 0 && s->ndim == 2 && s->shape[1] > 1 && src.steps[1] != 1)
        faults |= FAULT(NOT_CONTIGUOUS);
    if (src.counted && dst.counted && (d->ndim != 1 || s->ndim != 2 || d->shape[0] != s->shape[1]))
        faults |= FAULT(SHAPE_MISMATCH);
    if (dst.counted && !is_contiguous(&dst))
        faults |= FAULT(NOT_CONTIGUOUS);
    if (faults == 0) {
        int64_t voters = s->shape[0], n = s->shape[1];
        read_bytes(&src);
        unsigned char *all = packed, *verdict = bits;
        for (int64_t i = 0; i < n; i++) {
            uint64_t voter = ((uint64_t)i % (uint64_t)voters + turn % (uint64_t)voters) % (uint64_t)voters;
            verdict[i] = 0;
            for (int bit = 0; bit < 8; bit++) {
                int64_t votes = 0;
                for (int64_t v = 0; v < voters; v++)
                    votes += all[v * n + i] >> bit & 1;
                int up = 2 * votes == voters ? all[(int64_t)voter * n + i] >> bit & 1 : 2 * votes > voters;
                verdict[i] = (unsigned char)(verdict[i] | up << bit);
            }
        }
        memcpy(packed, verdict, (size_t)n);
        write_bytes(&dst);
    }
    begin(f_gc_vote_signs_into);
    judge(gc_vote_signs_into(src.passed, turn, dst.passed, random_stream()), faults);
    compare_windows();
}

/* An element as a number that casts of C start from, where C says what comes of it. */
typedef struct {
    bool is_float;
    double real;
    uint64_t whole; /* two's complement */
} Element;

static Element read_element(const unsigned char *at, DLDataType dtype) {
    Element e = {dtype.code == kDLFloat, 0, 0};
    float single;
    memcpy(&e.whole, at, dtype.bits / 8u);
    if (dtype.code == kDLBool)
        e.whole = e.whole != 0;
    if (dtype.code == kDLInt && dtype.bits < 64 && e.whole >> (dtype.bits - 1))
        e.whole |= UINT64_MAX << dtype.bits;
    if (e.is_float && dtype.bits == 64)
        memcpy(&e.real, at, 8);
    if (e.is_float && dtype.bits == 32) {
        memcpy(&single, at, 4);
        e.real = single;
    }
    return e;
}

/* Whether this model knows what becomes of such elements: floats of 16 bits are tests/python/test_copy.py's. */
static bool is_modelled(DLDataType from, DLDataType to) {
    bool narrow = (from.bits == 16 && from.code != kDLInt && from.code != kDLUInt) ||
                  (to.bits == 16 && to.code != kDLInt && to.code != kDLUInt);
    return !narrow || memcmp(&from, &to, sizeof from) == 0;
}

static void write_element(unsigned char *at, const unsigned char *element, DLDataType from, DLDataType to) {
    if (memcmp(&from, &to, sizeof from) == 0) {
        memcpy(at, element, to.bits / 8u);
        return;
    }
    Element e = read_element(element, from);
    bool negative = from.code == kDLInt && e.whole >> 63;
    if (to.code == kDLBool) {
        *at = e.is_float ? e.real != 0 : e.whole != 0;
    } else if (to.code == kDLFloat) {
        double real = e.is_float ? e.real : negative ? (double)(int64_t)e.whole : (double)e.whole;
        float single = e.is_float ? (float)e.real : negative ? (float)(int64_t)e.whole : (float)e.whole;
        uint64_t quiet64 = 0x7ff8000000000000;
        uint32_t quiet32 = 0x7fc00000;
        const void *as64 = real != real ? (void *)&quiet64 : (void *)&real;
        memcpy(at, to.bits == 64 ? as64 : single != single ? (void *)&quiet32 : (void *)&single, to.bits / 8u);
    } else {
        if (e.is_float) {
            bool is_signed = to.code == kDLInt;
            double most = ldexp(1, to.bits - is_signed), least = is_signed ? -most : 0, real = trunc(e.real);
            e.whole = real != real  ? 0
                      : real >= most ? UINT64_MAX >> (64 - to.bits + is_signed)
                      : real < least ? (is_signed ? UINT64_C(1) << (to.bits - 1) : 0)
                      : real < 0     ? (uint64_t)(int64_t)real
                                     : (uint64_t)real;
        }
        memcpy(at, &e.whole, to.bits / 8u); /* its lowest bytes */
    }
}

/* A source for the destination: its shape, or one that is broadcast to it. */
static void make_source_of(DLDataType dtype, size_t size) {
    int64_t shape[MAX_DIMS + 1];
    int ndim = dst.tensor.dl_tensor.ndim, skipped = 0, more = 0;
    if (one_in(3)) {
        skipped = (int)below((uint64_t)ndim + 1);
        more = skipped == 0 && ndim < MAX_DIMS - 3 ? (int)below(3) : 0;
    }
    for (int i = 0; i < more; i++)
        shape[i] = 1;
    for (int i = skipped; i < ndim; i++)
        shape[more + i - skipped] = one_in(6) ? 1 : dst.shape[i];
    ndim += more - skipped;
    if (product(ndim, shape) * dtype.bits / 8 > (wide)size)
        ndim = 0;
    make(&src, dtype, ndim, shape, 0, &windows[0], false);
}

/* The strides of the source along the dimensions of the destination; false if it cannot be broadcast. */
static bool broadcast(int64_t *steps) {
    const DLTensor *s = &src.tensor.dl_tensor, *d = &dst.tensor.dl_tensor;
    for (int i = 0; i < s->ndim || i < d->ndim; i++) {
        int64_t from = i < s->ndim ? s->shape[s->ndim - 1 - i] : 1, to = i < d->ndim ? d->shape[d->ndim - 1 - i] : 1;
        if (from != to && from != 1)
            return false;
        if (i < d->ndim)
            steps[d->ndim - 1 - i] = from == 1 || src.elements == 0 ? 0 : src.steps[s->ndim - 1 - i];
    }
    return true;
}

static void call_copy_into(size_t size) {
    int64_t steps[MAX_DIMS + 1];
    prepare(size);
    DLDataType from = dtypes[below(DTYPES)], to = one_in(3) ? from : dtypes[below(DTYPES)];
    make(&dst, to, -1, NULL, (int64_t)size / 8, output_window(), true);
    make_source_of(from, size);
    if (one_in(30)) { /* onto itself */
        src = dst;
        src.tensor.dl_tensor.shape = dst.tensor.dl_tensor.shape ? src.shape : NULL;
        src.tensor.dl_tensor.strides = dst.tensor.dl_tensor.strides ? src.strides : NULL;
        src.passed = &src.tensor;
    }
    spoil(&src);
    spoil(&dst);
    from = src.tensor.dl_tensor.dtype;
    to = dst.tensor.dl_tensor.dtype;
    if (memcmp(&from, &to, sizeof from) == 0 && size_of(from) == 0)
        return; /* copied as it is, whatever it is: its memory is not there */
    Faults faults = src.faults | dst.faults;
    if (src.bits == 0 || dst.bits == 0) /* elements as large as they say */
        faults |= FAULT(SIZE_OVERFLOW) | FAULT(INVALID_ARGUMENT);
    bool fits = src.counted && dst.counted && broadcast(steps), stays = false;
    if (src.counted && dst.counted && !fits)
        faults |= FAULT(SHAPE_MISMATCH);
    if (faults == 0 && dst.elements > 0) {
        const DLTensor *s = &src.tensor.dl_tensor, *d = &dst.tensor.dl_tensor;
        bool integers = from.code <= kDLUInt && to.code <= kDLUInt;
        stays = (char *)s->data + s->byte_offset == (char *)d->data + d->byte_offset &&
                (memcmp(&from, &to, sizeof from) == 0 || (integers && from.bits == to.bits));
        for (int i = 0; i < d->ndim; i++)
            stays = stays && (d->shape[i] == 1 || steps[i] == dst.steps[i]);
        if (intersect(&src, &dst) && !stays)
            faults |= FAULT(INVALID_ARGUMENT);
    }
    if (dst.faults == 0 && dst.elements > 0 && overlaps_itself(&dst))
        faults |= FAULT(INVALID_ARGUMENT);
    bool modelled = is_modelled(from, to);
    if (faults == 0 && !stays && modelled) {
        Walk w = walk(&dst), r = walk(&src);
        Argument shaped = dst; /* of its shape, with the source's strides */
        memcpy(shaped.steps, steps, sizeof steps[0] * (size_t)dst.tensor.dl_tensor.ndim);
        shaped.size = src.size;
        uintptr_t first = r.at;
        r = walk(&shaped);
        r.at = first;
        for (int64_t i = 0; i < dst.elements; i++, step(&w), step(&r))
            write_element(shadow_of(w.at), (const unsigned char *)r.at, from, to);
    }
    begin(f_gc_copy_into);
    judge(gc_copy_into(src.passed, dst.passed, random_stream()), faults);
    if (faults != 0 || modelled)
        compare_windows();
}

static void call_to_device(size_t size) {
    DLManagedTensor *out[2] = {UNTOUCHED, UNTOUCHED};
    static const int types[] = {kDLCUDA, kDLCUDAHost, kDLCUDAManaged, kDLROCM, 0};
    DLDevice device = {one_in(8) ? (DLDeviceType)types[below(5)] : kDLCPU, 1000};
    prepare(size);
    make_elements(0, DTYPES, size);
    src.passed_on = true;
    spoil(&src);
    understand(&src);
    const DLTensor *t = &src.tensor.dl_tensor;
    Faults faults = src.faults;
    if (src.passed == &src.tensor)
        faults |= device_faults(t);
    if (device.device_type != kDLCPU)
        faults |= device.device_type == kDLCUDA ? NO_CUDA : FAULT(UNSUPPORTED_DEVICE);
    if (src.counted && src.bits % 8 != 0 && !is_contiguous(&src))
        faults |= FAULT(NOT_CONTIGUOUS);
    if (src.counted && !askable(t->ndim, t->shape, src.bits, &faults))
        return;
    DLManagedTensor **place = random_out(out, &faults);
    begin(f_gc_tensor_to_device);
    if (judge(gc_tensor_to_device(src.passed, device, place), faults)) {
        check_output(&out[0]->dl_tensor, t->dtype, t->ndim, t->shape);
        const unsigned char *found = out[0]->dl_tensor.data;
        src.size = (size_t)(src.bits / 8);
        if (src.bits % 8 != 0) {
            wide bytes = (src.elements * src.bits + 7) / 8;
            EXPECT(bytes == 0 || memcmp(found, (char *)t->data + t->byte_offset, (size_t)bytes) == 0);
        } else {
            Walk w = walk(&src);
            for (int64_t i = 0; i < src.elements; i++, step(&w))
                EXPECT(memcmp(found + (size_t)i * src.size, (const void *)w.at, src.size) == 0);
        }
        keep(out[0], false);
        out[0] = UNTOUCHED;
    }
    EXPECT(out[0] == UNTOUCHED && out[1] == UNTOUCHED);
    compare_windows();
}

static bool same_shape(const Argument *a, int ndim, const int64_t *shape) {
    return a->tensor.dl_tensor.ndim == ndim &&
           (ndim == 0 || memcmp(a->tensor.dl_tensor.shape, shape, sizeof *shape * (size_t)ndim) == 0);
}

static void call_bits_into(int function, size_t size) {
    bool packs = function == f_gc_pack_bits_into;
    int64_t shape[MAX_DIMS + 1], length;
    int32_t axis;
    int along, ndim = 0;
    prepare(size);
    if (packs)
        make_elements(0, INTEGERS, size);
    else
        make_bytes(size);
    Faults axis_fault = random_axis(&src, &axis, &along);
    length = axis_fault ? 0 : length_along(&src, along);
    if (packs)
        length = bytes_for(length);
    else if (length <= SMALL)
        length = one_in(2) ? length * 8 : (int64_t)below((uint64_t)length * 8 + 9);
    else
        length = (int64_t)below(20);
    ndim = axis_fault ? 0 : shape_along(&src, along, length, shape);
    DLDataType dtype = packs ? uint8 : dtypes[below(DTYPES)];
    wide elements = product(ndim, shape);
    if (elements > (wide)size / (dtype.bits / 8))
        return; /* no room for this much */
    make(&dst, dtype, ndim, shape, 0, output_window(), true);
    spoil(&src);
    spoil(&dst);
    /* Spoiling the source may have changed what its axis is. */
    int dims = src.tensor.dl_tensor.ndim, most = dims < 1 ? 1 : dims;
    axis_fault = axis == GC_AXIS_NONE || (axis >= -most && axis < most) ? 0 : FAULT(INVALID_ARGUMENT);
    along = axis == GC_AXIS_NONE || dims <= 0 ? -1 : axis < 0 ? axis + dims : axis;
    Faults faults = faults_between() | axis_fault;
    if (packs && src.is_float)
        faults |= FAULT(UNSUPPORTED_DTYPE);
    if (memcmp(packs ? &dst.tensor.dl_tensor.dtype : &src.tensor.dl_tensor.dtype, &uint8, sizeof uint8) != 0)
        faults |= FAULT(UNSUPPORTED_DTYPE);
    if (src.counted && dst.counted && axis_fault == 0) {
        int out_axis = along < 0 ? 0 : along;
        length = packs                                     ? bytes_for(length_along(&src, along))
                 : out_axis < dst.tensor.dl_tensor.ndim    ? dst.tensor.dl_tensor.shape[out_axis]
                                                           : 0;
        ndim = shape_along(&src, along, length, shape);
        if (!same_shape(&dst, ndim, shape))
            faults |= FAULT(SHAPE_MISMATCH);
    }
    int32_t order = random_order(&faults);
    if (faults == 0 && dst.elements > 0) {
        Rows rows = rows_along(&src, along);
        rows.n = packs ? length_along(&src, along) : length;
        rows.m = packs ? length : length_along(&src, along);
        if (packs) {
            read_bits(&src, false);
            pack_model(rows, order);
            write_bytes(&dst);
        } else if (src.elements <= limit) {
            read_bytes(&src);
            unpack_model(rows, order);
            write_bits(&dst);
        }
    }
    begin(function);
    void *stream = random_stream();
    judge(packs ? gc_pack_bits_into(src.passed, axis, order, dst.passed, stream)
                : gc_unpack_bits_into(src.passed, axis, order, dst.passed, stream),
          faults);
    /* Beyond the limit the model has not said what is written. */
    if (faults != 0 || packs || src.elements <= limit)
        compare_windows();
}

/* ---- kernels that are compiled at run time: up to the compiler, of which there is none here -------------------------- */

static gc_kernel_t *kernel; /* of one input and one output */

static const char *random_text(void) {
    static const char *const texts[] = {"T x", "T y", "float32 x", "raw T x, U y", "x", "y = x", "a + b", "y = a", "0", "k",
                                        "", ",", "T x,", "float x", "T i", "T x, T x", "raw raw T x", "\xff", "#include",
                                        "bfloat16 x, float16 h", "T _x", "1", "T"};
    return one_in(4) ? NULL : texts[below(sizeof texts / sizeof *texts)];
}

/* A reserved byte, the size, or a flag that is none. */
static Faults spoil_options(uint32_t *size, uint32_t *flags, void *reserved, size_t bytes) {
    *flags = (uint32_t)below(4);
    switch (below(30)) {
    case 0: *size = (uint32_t)below(*size); return FAULT(INVALID_ARGUMENT);
    case 1: *flags |= 4u << below(30); return FAULT(INVALID_ARGUMENT);
    case 2: ((unsigned char *)reserved)[below(bytes)] = (unsigned char)(1 + below(255)); return FAULT(INVALID_ARGUMENT);
    default: return 0;
    }
}

static void call_kernel_create(void) {
    const char *options[3] = {"-DX", random_text(), "-I/x"};
    gc_kernel_t *untouched = (gc_kernel_t *)UNTOUCHED, *out[2] = {untouched, untouched};
    Faults faults = MAY_SUCCEED | FAULT(INVALID_ARGUMENT), none = faults;
    void *place = random_out((DLManagedTensor **)out, &faults);
    bool usual = one_in(2), good;
    if (one_in(2)) {
        gc_elementwise_options_t given = {.struct_size = sizeof given, .inputs = random_text(), .outputs = random_text(),
            .operation = random_text(), .name = random_text(), .preamble = random_text(), .loop_prep = random_text(),
            .after_loop = random_text(), .options = one_in(9) ? NULL : options, .n_options = below(3)};
        if (usual)
            given.inputs = "T x", given.outputs = "T y", given.operation = "y = x", given.name = NULL;
        none = spoil_options(&given.struct_size, &given.flags, given.reserved, sizeof given.reserved);
        begin(f_gc_elementwise_create);
        good = judge(gc_elementwise_create(one_in(60) ? NULL : &given, place), faults);
    } else {
        gc_reduction_options_t given = {.struct_size = sizeof given, .inputs = random_text(), .outputs = random_text(),
            .map = random_text(), .reduce = random_text(), .post_map = random_text(), .identity = random_text(),
            .name = random_text(), .reduce_type = random_text(), .preamble = random_text(),
            .options = one_in(9) ? NULL : options, .n_options = below(3)};
        if (usual) {
            given.inputs = "T x", given.outputs = "T y", given.map = "x", given.reduce = "a + b", given.post_map = "y = a";
            given.name = given.reduce_type = NULL;
        }
        none = spoil_options(&given.struct_size, &given.flags, given.reserved, sizeof given.reserved);
        begin(f_gc_reduction_create);
        good = judge(gc_reduction_create(one_in(60) ? NULL : &given, place), faults);
    }
    EXPECT(!good || (none == 0 && place == (void *)out));
    EXPECT((out[0] != untouched) == good && out[1] == untouched);
    if (good && one_in(2)) {
        begin(f_gc_kernel_free);
        gc_kernel_free(kernel);
        succeeded();
        kernel = NULL;
        const char *log = NULL;
        begin(f_gc_kernel_log);
        judge(gc_kernel_log(out[0], &log), 0);
        EXPECT(*log == '\0');
        if (!usual)
            gc_kernel_free(out[0]);
        else
            kernel = out[0];
    } else if (good) {
        gc_kernel_free(out[0]);
    }
}

/* What was saved is loaded; with a byte that is another, or without the last ones, it is not. */
static void call_kernel_load(void) {
    DLManagedTensor *saved[2] = {UNTOUCHED, UNTOUCHED};
    gc_kernel_t *untouched = (gc_kernel_t *)UNTOUCHED, *out[2] = {untouched, untouched};
    Faults faults = kernel == NULL ? FAULT(INVALID_ARGUMENT) : 0;
    DLManagedTensor **place = random_out(saved, &faults);
    begin(f_gc_kernel_save);
    if (!judge(gc_kernel_save(kernel, place), faults))
        return;
    unsigned char *bytes = saved[0]->dl_tensor.data;
    size_t size = (size_t)saved[0]->dl_tensor.shape[0];
    faults = 0;
    if (one_in(3)) {
        bytes[below(size)] ^= (unsigned char)(1 + below(255));
        faults = FAULT(CORRUPT);
    } else if (one_in(3)) {
        size = below(size);
        faults = FAULT(CORRUPT);
    }
    void *to = random_out((DLManagedTensor **)out, &faults);
    begin(f_gc_kernel_load);
    bool good = judge(gc_kernel_load(bytes, size, to), faults);
    EXPECT((out[0] != untouched) == good && out[1] == untouched);
    gc_kernel_free(good ? out[0] : NULL);
    gc_tensor_free(saved[0]);
}

static void call_kernel(size_t size) {
    const Faults any = FAULT(INVALID_ARGUMENT) | FAULT(UNSUPPORTED_DTYPE) | FAULT(SHAPE_MISMATCH) | FAULT(SIZE_OVERFLOW) |
                       FAULT(NOT_CONTIGUOUS) | FAULT(NVRTC_UNAVAILABLE) | NO_CUDA;
    int32_t axes[3] = {(int32_t)below(4) - 2, (int32_t)below(4) - 2, (int32_t)wild()};
    gc_run_options_t options = {.struct_size = sizeof options, .axes = one_in(2) ? axes : NULL, .capability = 90};
    prepare(size);
    make_elements(0, DTYPES, size);
    const DLTensor *like = &src.tensor.dl_tensor;
    wide count = 1;
    for (int i = 0; i < like->ndim; i++)
        count *= like->shape[i];
    bool alike = !one_in(3) && count <= (wide)size / 64; /* room for steps, too */
    make(&dst, one_in(9) ? dtypes[below(DTYPES)] : like->dtype, alike ? like->ndim : -1, alike ? like->shape : NULL,
         (int64_t)size / 8, output_window(), true);
    spoil(&src);
    spoil(&dst);
    Faults spoiled = spoil_options(&options.struct_size, &options.flags, &options.reserved0, 4 + sizeof options.reserved);
    options.flags &= ~2u;
    options.size = one_in(9) ? wild() : 0;
    options.n_axes = options.axes ? below(4) : one_in(20);
    options.workspace = one_in(9) ? (const DLTensor *)dst.passed : NULL;
    if (one_in(2))
        options.capability = one_in(3) ? (int32_t)wild() : 0;
    const DLTensor *inputs[2] = {(const DLTensor *)src.passed, NULL};
    DLTensor *outputs[2] = {(DLTensor *)dst.passed, NULL};
    size_t n_inputs = one_in(20) ? below(3) : 1, n_outputs = one_in(20) ? below(3) : 1;
    const DLTensor *const *in = one_in(60) ? NULL : inputs;
    const gc_run_options_t *given = one_in(20) && spoiled == 0 ? NULL : &options;
    switch (below(3)) {
    case 0:
        begin(f_gc_kernel_workspace_bytes);
        judge(gc_kernel_workspace_bytes(kernel, in, n_inputs, outputs, n_outputs, given) < 0 ? GC_STATUS_INVALID_ARGUMENT : 0,
              MAY_SUCCEED | any);
        break;
    case 1:
        begin(f_gc_kernel_prepare);
        judge(gc_kernel_prepare(kernel, in, n_inputs, outputs, n_outputs, given, random_stream()), any);
        break;
    default:
        begin(f_gc_kernel_run);
        judge(gc_kernel_run(kernel, in, n_inputs, outputs, n_outputs, given, random_stream()), any);
    }
    compare_windows();
}

static void call_something(size_t size) {
    uint64_t from = size == BIG ? 7 : 0; /* only where memory is looked at */
    switch (from + below(30 - from)) {
    case 0: call_small_ones(); break;
    case 1: call_chunk_bytes(); break;
    case 2: call_tensor_empty(); break;
    case 3: call_tensor_from_pointer(); break;
    case 4: one_in(2) ? call_tensor_free() : call_tensor_free_versioned(); break;
    case 5: call_convert_kept(); break;
    case 6: call_convert_foreign(); break;
    case 7: call_pack_chunks(f_gc_pack_chunks, size); break;
    case 8: call_unpack_chunks(f_gc_unpack_chunks, size); break;
    case 9: case 10: call_pack_bits(size); break;
    case 11: case 12: call_unpack_bits(size); break;
    case 13: call_pack_rows(f_gc_pack_chunks_into, size); break;
    case 14: call_pack_rows(f_gc_pack_signs_into, size); break;
    case 15: call_unpack_rows(size); break;
    case 16: case 17: call_bits_into(f_gc_pack_bits_into, size); break;
    case 18: case 19: call_bits_into(f_gc_unpack_bits_into, size); break;
    case 20: call_pack_chunks(f_gc_pack_signs, size); break;
    case 21: call_unpack_chunks(f_gc_unpack_signs, size); break;
    case 22: call_unpack_sign_rows(size); break;
    case 23: call_vote(size); break;
    case 24: case 25: call_copy_into(size); break;
    case 26: call_to_device(size); break;
    case 27: call_kernel_create(); break;
    case 28: call_kernel_load(); break;
    case 29: call_kernel(size); break;
    }
}

int main(int argc, char **argv) {
    setenv("GRADCODEC_NVRTC", "/nowhere", 1);
    setenv("GRADCODEC_CACHE", "0", 1);
    run(argc, argv, both(100000, 1000000), false, call_something);
    gc_kernel_free(kernel);
    printf("owners: %" PRIu64 " made, %" PRIu64 " released\n", owners_made, owners_released);
    CHECK(owners_made == owners_released);
    puts("hostile: ok");
    return 0;
}
