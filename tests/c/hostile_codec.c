/* hostile_codec [CALLS [SEED]]: what hostile.c does, to codecs and the plain form.
 *
 * What a call must do to its numbers is tests/python/test_codec.py's. Here: which calls are refused, that refused ones
 * change nothing, that others write to their outputs only, and that bytes of strangers are told from our own. */
#define _DEFAULT_SOURCE
#include "hostile.h"

enum { SEGMENTS = 3, SAVED = 32 << 10 };
static const DLDataType float32 = {kDLFloat, 32, 1};
static const DLDataType gradients[] = {{kDLFloat, 32, 1}, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1}};

typedef struct {
    gc_codec_t *handle;
    gc_codec_options_t options;
    int64_t sizes[SEGMENTS], chunk_bytes, elements, part_elements, state_bytes;
    unsigned char raw[SEGMENTS];
    int segments;
    int64_t n_chunks;
    bool pending; /* a step waits for its commit */
    bool has_payload, has_state;
    bool takes_any; /* it was given errors, which are not checked: its state may be one that is refused */
} Made;

static unsigned char saved_payload[SAVED], saved_state[SAVED];

/* docs/NUMERICS.md: elements that share a code's place, bits of a code, bytes of a scale there. */
static const struct {
    int64_t block, bits, scale;
} formats[] = {
    [GC_CODEC_ONEBIT] = {8, 1, 0}, [GC_CODEC_SIGN] = {8, 1, 0},
    [GC_CODEC_BF16] = {32, 16, 0}, [GC_CODEC_MXFP8] = {32, 8, 1}, [GC_CODEC_INT8] = {64, 8, 2},
    [GC_CODEC_INT4] = {32, 4, 2}, [GC_CODEC_MXFP4] = {32, 4, 1},
};

static bool has_blocks(const Made *m) {
    return m->options.codec >= GC_CODEC_BF16;
}

static bool keeps_errors(const Made *m) {
    return m->options.codec != GC_CODEC_SIGN && m->options.error != GC_ERROR_NONE;
}

static int64_t up(int64_t bytes, int64_t to) {
    return (bytes + to - 1) / to * to;
}

/* The sizes that docs/NUMERICS.md gives. */
static void measure(Made *m) {
    int64_t places[2] = {0}, first[2] = {0}, in_chunk[2], units = 0, of_segment, part;
    int64_t block = formats[m->options.codec].block, bits = formats[m->options.codec].bits;
    int64_t error = m->options.error == GC_ERROR_BFLOAT16 ? 2 : 4, scale = formats[m->options.codec].scale;
    bool server = m->options.server != 0;
    m->elements = m->part_elements = 0;
    for (int i = 0; i < m->segments; i++) {
        bool raw = m->options.raw != NULL && m->raw[i] != 0;
        m->elements += m->sizes[i];
        places[raw] += raw ? m->sizes[i] : up(m->sizes[i], block) / block;
        units += raw ? 0 : up(m->sizes[i], 1024);
    }
    for (int raw = 0; raw < 2; raw++)
        in_chunk[raw] = up(places[raw], m->n_chunks) / m->n_chunks;
    m->chunk_bytes = has_blocks(m) ? 64 + up(in_chunk[0] * scale, 16) : up(64 + 4 * m->segments, 16);
    m->chunk_bytes += up(in_chunk[0] * (block * bits / 8), 16) + up(in_chunk[1] * 4, 16);
    for (int i = 0; i < m->segments && server; i++) {
        bool raw = m->options.raw != NULL && m->raw[i] != 0;
        int64_t low = (int64_t)(m->options.server - 1) * in_chunk[raw], high = low + in_chunk[raw];
        int64_t size = raw ? 1 : block;
        of_segment = up(m->sizes[i], size) / size;
        low = low > first[raw] ? low : first[raw];
        high = high < first[raw] + of_segment ? high : first[raw] + of_segment;
        if (low < high) {
            part = high == first[raw] + of_segment ? m->sizes[i] - size * (low - first[raw]) : size * (high - low);
            m->part_elements += part;
            units += raw ? 0 : up(part, 1024);
        }
        first[raw] += of_segment;
    }
    m->state_bytes = has_blocks(m) ? 256 : up(64 + 4 * m->segments * (server ? 2 : 1), 256);
    m->state_bytes += keeps_errors(m) ? units * error : 0;
}

/* A codec of a random description, which may have to be refused; or an all-reduce of it, where there is a `comm`. */
static bool make_codec(Made *m, gc_comm_t *comm) {
    gc_codec_options_t *o = &m->options;
    gc_codec_t *out[2] = {(gc_codec_t *)(void *)UNTOUCHED, (gc_codec_t *)(void *)UNTOUCHED}, **place = out;
    const gc_codec_options_t *passed = o;
    Faults faults = 0;
    memset(m, 0, sizeof *m);
    o->struct_size = sizeof *o;
    o->codec = one_in(2) ? GC_CODEC_BF16 + (int32_t)below(5) : one_in(3) ? GC_CODEC_SIGN : GC_CODEC_ONEBIT;
    o->error = o->codec == GC_CODEC_SIGN ? (one_in(2) ? GC_ERROR_NONE : 0) : (int32_t)below(3);
    o->scale = has_blocks(m) ? 0 : (int32_t)below(2);
    o->reduction = has_blocks(m) ? (int32_t)below(2) : 0;
    o->nonfinite = (int32_t)below(3);
    o->beta = one_in(2) ? 0.0f : 0.5f;
    o->device.device_type = one_in(2) ? 0 : one_in(2) ? kDLCPU : kDLCUDAHost;
    o->values = one_in(3) ? o->values : gradients[below(3)];
    o->results = one_in(3) ? o->results : gradients[below(3)];
    m->segments = one_in(3) ? 1 : (int)below(SEGMENTS + 1);
    for (int i = 0; i < m->segments; i++)
        m->sizes[i] = one_in(6) ? 0 : i == 0 && m->segments < 3 && one_in(10) ? 1025 : (int64_t)below(70);
    for (int i = 0; i < m->segments; i++)
        m->raw[i] = one_in(3) ? 1 + (unsigned char)below(255) : 0;
    if (has_blocks(m) && one_in(2))
        o->raw = m->raw;
    if (m->segments == 1 && one_in(2)) {
        o->n_elements = m->sizes[0];
    } else {
        o->segments = m->sizes;
        o->n_segments = (size_t)m->segments;
    }
    o->n_chunks = (size_t)below(5);
    m->n_chunks = o->n_chunks ? (int64_t)o->n_chunks : 1;
    o->server = below((uint64_t)m->n_chunks + 1);
    if (comm != NULL) {
        m->n_chunks = 1;
        o->n_chunks = (size_t)below(2);
        o->server = 0;
        memset(&o->results, 0, sizeof o->results);
        if (one_in(2))
            o->results = o->values;
        if (one_in(20)) { /* what all-reduces do not take */
            o->n_chunks = 2;
            faults |= FAULT(INVALID_ARGUMENT);
        }
    }
    while (one_in(4))
        switch (below(13)) {
        case 0: o->struct_size = one_in(2) ? (uint32_t)below(sizeof *o) : (uint32_t)sizeof *o + 1 + (uint32_t)below(7); faults |= FAULT(INVALID_ARGUMENT); break;
        case 1: o->codec = one_in(2) ? 0 : 8 + (int32_t)below(1000); faults |= FAULT(INVALID_ARGUMENT); break;
        case 2: o->error = 3 + (int32_t)below(100); faults |= FAULT(INVALID_ARGUMENT); break;
        case 3: o->scale = -1 - (int32_t)below(100); faults |= FAULT(INVALID_ARGUMENT); break;
        case 4: o->nonfinite = INT32_MAX; faults |= FAULT(INVALID_ARGUMENT); break;
        case 5: o->beta = one_in(2) ? HUGE_VALF : -HUGE_VALF; faults |= FAULT(INVALID_ARGUMENT); break;
        case 6: o->reserved[below(2)] = next() | 1; faults |= FAULT(INVALID_ARGUMENT); break;
        case 7: o->server = (uint64_t)m->n_chunks + 1 + below(9); faults |= FAULT(INVALID_ARGUMENT); break;
        case 8:
            *(one_in(2) ? &o->values : &o->results) = dtypes[below(INTEGERS)];
            faults |= FAULT(UNSUPPORTED_DTYPE);
            break;
        case 9:
            o->device.device_type = one_in(2) ? kDLCUDA : kDLOpenCL;
            o->device.device_id = 1000;
            faults |= NO_CUDA;
            break;
        case 10:
            if (one_in(2)) {
                passed = one_in(2) ? NULL : (const gc_codec_options_t *)(const void *)((const char *)o + 1 + below(7));
            } else {
                place = one_in(2) ? NULL : (gc_codec_t **)(void *)((char *)out + 1 + below(7));
            }
            faults |= FAULT(INVALID_ARGUMENT);
            break;
        case 11:
            if (o->segments == NULL && one_in(4)) {
                o->n_segments = (size_t)next() | 1;
                faults |= FAULT(INVALID_ARGUMENT);
            } else if (o->segments == NULL) {
                o->n_elements = one_in(2) ? -1 - (int64_t)below(9) : INT64_MAX - (int64_t)below(9);
                o->error = has_blocks(m) ? 0 : o->error; /* without errors, half a byte each would not be too much */
                faults |= FAULT(INVALID_ARGUMENT) | FAULT(SIZE_OVERFLOW) | FAULT(OUT_OF_MEMORY);
            } else if (one_in(2)) {
                o->n_elements = one_in(2) ? 1 : -1;
                faults |= FAULT(INVALID_ARGUMENT);
            } else if (one_in(2)) {
                o->n_segments = (size_t)1 << 60 | (size_t)next();
                faults |= FAULT(SIZE_OVERFLOW);
            } else if (m->segments > 0) {
                o->segments = (const int64_t *)(const void *)((const char *)m->sizes + 1 + below(7));
                faults |= FAULT(INVALID_ARGUMENT);
            }
            break;
        case 12: /* what the other family has, or none */
            if (one_in(4))
                *(one_in(2) ? &o->reserved_i : &o->reduction) = 2 + (int32_t)below(1000);
            else if (has_blocks(m))
                o->scale = GC_SCALE_MEAN;
            else if (one_in(2))
                o->reduction = GC_REDUCTION_SUM;
            else
                o->raw = m->raw;
            faults |= FAULT(INVALID_ARGUMENT);
            break;
        }
    bool made;
    if (comm == NULL) {
        begin(f_gc_codec_create);
        made = judge(gc_codec_create(passed, place), faults);
    } else {
        static const DLDataType none;
        if (memcmp(&o->results, &none, sizeof none) != 0 && memcmp(&o->results, &o->values, sizeof none) != 0)
            faults |= FAULT(INVALID_ARGUMENT);
        if (one_in(60)) {
            comm = one_in(2) ? NULL : (gc_comm_t *)(void *)((char *)comm + 1 + below(7));
            faults |= FAULT(INVALID_ARGUMENT);
        }
        begin(f_gc_allreduce_create);
        made = judge(gc_allreduce_create(comm, passed, (gc_allreduce_t **)(void *)place), faults);
    }
    EXPECT((out[0] == (gc_codec_t *)(void *)UNTOUCHED) == !made && out[1] == (gc_codec_t *)(void *)UNTOUCHED);
    if (!made)
        return false;
    m->handle = out[0];
    if (comm != NULL)
        o->server = 1; /* a rank that is alone reduces all there is */
    measure(m);
    return true;
}

/* Places a tensor behind the one before, as codecs want them; now and then anyhow, or spoilt. */
static void place(Argument *a, DLDataType dtype, int64_t elements, size_t alignment, int window, size_t *used) {
    DLTensor *t = &a->tensor.dl_tensor;
    const Window *w = &windows[window];
    int64_t shape[2] = {elements, 1};
    dtype = one_in(60) && (size_t)elements <= w->size / 8 ? dtypes[below(DTYPES)] : dtype;
    make(a, dtype, one_in(3) ? 2 : 1, shape, 0, w, true);
    size_t at = (*used + below(3) * alignment + alignment - 1) / alignment * alignment;
    if (elements > 0 && !one_in(40) && at + (size_t)elements * a->size <= w->size) {
        t->strides = NULL;
        t->byte_offset = one_in(4) ? at : 0;
        t->data = w->base + at - t->byte_offset;
        understand(a);
        *used = at + (size_t)elements * a->size;
    }
    if (one_in(8))
        spoil(a);
}

/* What is wrong with an argument of a codec on the CPU. */
static Faults faults_of(const Argument *a, const DLDataType *known, int n_known, int64_t elements, bool aligned) {
    const DLTensor *t = &a->tensor.dl_tensor;
    Faults faults = a->faults;
    bool taken = false;
    if (a->passed == NULL || unaligned(a->passed))
        return faults;
    for (int i = 0; i < n_known; i++)
        taken |= memcmp(&t->dtype, &known[i], sizeof *known) == 0;
    faults |= taken ? 0 : FAULT(UNSUPPORTED_DTYPE);
    faults |= faults & NO_CUDA ? FAULT(INVALID_ARGUMENT) : 0; /* another device than the codec's */
    if (!a->counted)
        return faults;
    faults |= a->elements == elements ? 0 : FAULT(SHAPE_MISMATCH);
    faults |= is_contiguous(a) ? 0 : FAULT(NOT_CONTIGUOUS);
    return faults | (aligned && ((uintptr_t)t->data + t->byte_offset) % 16 != 0 ? FAULT(INVALID_ARGUMENT) : 0);
}

/* The same where NULL is no argument. */
static Faults faults_of_optional(const Argument *a, const DLDataType *known, int n_known, int64_t elements) {
    return a->passed == NULL ? 0 : faults_of(a, known, n_known, elements, false);
}

static Faults faults_of_overlap(const Argument *out, const Argument *in) {
    bool both = out->passed != NULL && in->passed != NULL && out->faults == 0 && in->faults == 0;
    return both && intersect(out, in) ? FAULT(INVALID_ARGUMENT) : 0;
}

/* A scalar, or NULL. */
static void place_optional(Argument *a, DLDataType dtype, int64_t elements, int window, size_t *used) {
    place(a, dtype, elements, 1, window, used);
    if (one_in(2)) {
        a->passed = NULL;
        understand(a);
    }
}

/* Fills a source with bytes: those given, those with one of them changed, or noise. Gives what the library
 * may say of them. `numbers`: bytes of a chunk in which any byte behind the header is right; 0: there is none. */
static Faults fill(const Argument *a, const unsigned char *bytes, size_t count, bool known,
                   int64_t numbers) {
    unsigned char *at = (unsigned char *)a->tensor.dl_tensor.data + a->tensor.dl_tensor.byte_offset;
    Faults faults = 0;
    if (!known || one_in(3)) {
        for (size_t i = 0; i < 64; i++) /* a header of ours may lie there */
            at[i] = (unsigned char)next();
        memcpy(shadow_of((uintptr_t)at), at, 64);
        return FAULT(CORRUPT);
    }
    memcpy(at, bytes, count);
    if (one_in(2)) {
        uint64_t place = one_in(2) ? below(64) : below(count);
        bool field = place < 28 || (place >= 32 && place < 56); /* behind flags; before zeros, or the turn of a state */
        at[place] ^= (unsigned char)(1 << below(8));
        faults = numbers && place % (uint64_t)numbers >= 64 ? 0 : FAULT(CORRUPT) | (field ? 0 : MAY_SUCCEED);
    }
    memcpy(shadow_of((uintptr_t)at), at, count);
    return faults;
}

/* What was written to is what the next calls begin with. */
static void accept(const Argument *a) {
    if (a->passed == NULL)
        return;
    Walk w = walk(a);
    for (int64_t i = 0; i < a->elements; i++, step(&w))
        memcpy(shadow_of(w.at), (const void *)w.at, a->size);
}

static Faults judged; /* the status of the last call, as a set */

static bool judge_codec(gc_status_t status, Faults faults) {
    judged = (Faults)1 << status;
    return judge(status, faults);
}

static gc_codec_t *random_handle(const Made *m, Faults *faults) {
    if (!one_in(60))
        return m->handle;
    *faults |= FAULT(INVALID_ARGUMENT);
    return one_in(2) ? NULL : (gc_codec_t *)(void *)((char *)m->handle + 1 + below(7));
}

static void place_values(const Made *m, DLDataType dtype, int window, size_t *used, const DLTensor **pointers) {
    for (int i = 0; i < m->segments; i++) {
        place(&chunk[i], dtype, m->sizes[i], 1, window, used);
        pointers[i] = chunk[i].passed;
    }
}

static size_t random_count(const Made *m, Faults *faults) {
    if (!one_in(60))
        return (size_t)m->segments;
    size_t count = one_in(2) || m->segments == 0 ? (size_t)1 << 61 | (size_t)next() : (size_t)m->segments - 1;
    *faults |= FAULT(INVALID_ARGUMENT) | FAULT(SIZE_OVERFLOW);
    return count;
}

static void call_encode(Made *m) {
    const DLTensor *values[SEGMENTS + 1] = {NULL};
    DLDataType dtype = m->options.values.bits ? m->options.values : float32;
    size_t in = 0, out = 0;
    Faults faults = 0;
    place_values(m, dtype, 0, &in, values);
    place(&dst, uint8, m->n_chunks * m->chunk_bytes, 16, one_in(16) ? 0 : 1, &out);
    place_optional(&chunk[4], float32, 1, 0, &in);
    place_optional(&chunk[5], float32, 1, 0, &in);
    for (int i = 0; i < m->segments; i++)
        faults |= faults_of(&chunk[i], &dtype, 1, m->sizes[i], false) | faults_of_overlap(&dst, &chunk[i]);
    for (int i = 4; i < 6; i++)
        faults |= faults_of_optional(&chunk[i], &float32, 1, 1) | faults_of_overlap(&dst, &chunk[i]);
    faults |= faults_of(&dst, &uint8, 1, m->n_chunks * m->chunk_bytes, true);
    gc_codec_t *handle = random_handle(m, &faults);
    size_t count = random_count(m, &faults);
    begin(f_gc_codec_encode);
    if (judge_codec(gc_codec_encode(handle, values, count, chunk[4].passed, chunk[5].passed, dst.passed,
                                    random_stream()), faults)) {
        accept(&dst);
        memcpy(saved_payload, (unsigned char *)dst.tensor.dl_tensor.data + dst.tensor.dl_tensor.byte_offset,
               (size_t)(m->n_chunks * m->chunk_bytes));
        m->has_payload = true;
        m->pending |= m->options.nonfinite == GC_NONFINITE_TRANSACTIONAL;
    }
}

static void call_decode(Made *m) {
    const DLTensor *values[SEGMENTS + 1] = {NULL};
    int32_t mode = one_in(40) ? (int32_t)wild() : (int32_t)below(2);
    int32_t divisor = one_in(40) ? (int32_t)wild() : (int32_t)below(5);
    DLDataType dtype = mode == GC_DECODE_ADD ? float32 : gradients[below(3)];
    size_t in = 0, out = 0;
    Faults faults = 0;
    place_values(m, dtype, 1, &out, values);
    place(&src, uint8, m->n_chunks * m->chunk_bytes, 16, one_in(16) ? 1 : 0, &in);
    place_optional(&chunk[4], float32, 1, 0, &in);
    for (int i = 0; i < m->segments; i++) {
        const DLDataType *known = mode == GC_DECODE_ADD ? &float32 : gradients;
        faults |= faults_of(&chunk[i], known, mode == GC_DECODE_ADD ? 1 : 3, m->sizes[i], false);
        faults |= faults_of_overlap(&chunk[i], &src) | faults_of_overlap(&chunk[i], &chunk[4]);
        for (int j = 0; j < i; j++)
            faults |= faults_of_overlap(&chunk[i], &chunk[j]);
        if (memcmp(&chunk[i].tensor.dl_tensor.dtype, &chunk[0].tensor.dl_tensor.dtype, sizeof dtype) != 0)
            faults |= FAULT(UNSUPPORTED_DTYPE);
    }
    faults |= faults_of_optional(&chunk[4], &float32, 1, 1);
    faults |= faults_of(&src, &uint8, 1, m->n_chunks * m->chunk_bytes, true);
    faults |= (mode == 0 || mode == 1) && divisor >= 0 ? 0 : FAULT(INVALID_ARGUMENT);
    gc_codec_t *handle = random_handle(m, &faults);
    size_t count = random_count(m, &faults);
    if (faults == 0)
        faults = fill(&src, saved_payload, (size_t)(m->n_chunks * m->chunk_bytes), m->has_payload,
                      has_blocks(m) ? m->chunk_bytes : 0);
    begin(f_gc_codec_decode);
    if (judge_codec(gc_codec_decode(handle, src.passed, divisor, chunk[4].passed, mode, (DLTensor *const *)values,
                                    count, random_stream()), faults))
        for (int i = 0; i < m->segments; i++)
            accept(&chunk[i]);
}

static void call_reduce(Made *m) {
    int64_t rows = 1 + (int64_t)below(4), shape[2] = {rows, m->chunk_bytes};
    uint64_t number = m->options.server ? m->options.server - 1 : below(3);
    size_t in = 0, out = 0;
    place(&src, uint8, rows * m->chunk_bytes, 16, 0, &in);
    bool whole = src.passed == &src.tensor && src.faults == 0 && src.elements == rows * m->chunk_bytes &&
                 is_contiguous(&src) && src.tensor.dl_tensor.ndim <= 2;
    if (whole && !one_in(20)) {
        memcpy(src.shape, shape, sizeof shape);
        src.tensor.dl_tensor.shape = src.shape;
        src.tensor.dl_tensor.ndim = 2;
        src.tensor.dl_tensor.strides = NULL;
        understand(&src);
    }
    place(&dst, uint8, m->chunk_bytes, 16, one_in(16) ? 0 : 1, &out);
    const DLTensor *t = &src.tensor.dl_tensor;
    Faults faults = faults_of(&src, &uint8, 1, src.elements, true);
    faults |= faults_of(&dst, &uint8, 1, m->chunk_bytes, true) | faults_of_overlap(&dst, &src);
    if (src.counted && (t->ndim != 2 || t->shape[0] == 0 || t->shape[1] != m->chunk_bytes))
        faults |= FAULT(SHAPE_MISMATCH) | FAULT(INVALID_ARGUMENT);
    number = one_in(20) ? (uint64_t)wild() : number;
    if (m->options.server == 0 || number != m->options.server - 1)
        faults |= FAULT(INVALID_ARGUMENT);
    gc_codec_t *handle = random_handle(m, &faults);
    if (faults == 0) {
        rows = t->shape[0];
        for (int64_t r = 0; r < rows; r++) {
            Argument row = src;
            row.tensor.dl_tensor.data = (unsigned char *)t->data + r * m->chunk_bytes;
            faults |= fill(&row, saved_payload + number * (uint64_t)m->chunk_bytes, (size_t)m->chunk_bytes,
                           m->has_payload, has_blocks(m) ? m->chunk_bytes : 0);
        }
        if ((faults & FAULT(CORRUPT)) && rows > 1)
            faults |= MAY_SUCCEED;
    }
    bool right = (faults & ~(FAULT(CORRUPT) | MAY_SUCCEED)) == 0;
    begin(f_gc_codec_reduce);
    judge_codec(gc_codec_reduce(handle, number, src.passed, dst.passed, random_stream()), faults);
    if (right) {
        accept(&dst); /* what is corrupt goes out, too, and is marked */
        EXPECT(judged != FAULT(CORRUPT) ||
               (((unsigned char *)dst.tensor.dl_tensor.data + dst.tensor.dl_tensor.byte_offset)[28] & 1) != 0);
        bool steps = m->options.nonfinite == GC_NONFINITE_TRANSACTIONAL;
        m->pending |= steps;
        if (steps && judged != FAULT(OK)) { /* a step from before may wait, or none */
            begin(f_gc_codec_rollback);
            judge(gc_codec_rollback(m->handle, NULL), 0);
            m->pending = false;
        }
    }
}

/* Flags, scales, and the end of a step. */
static void call_small_results(Made *m) {
    static const DLDataType scalars[] = {{kDLBool, 8, 1}, {kDLInt, 32, 1}, {kDLFloat, 32, 1}};
    static const DLDataType uint32 = {kDLUInt, 32, 1};
    size_t out = 0;
    bool scales = one_in(2);
    Faults faults = 0;
    gc_codec_t *handle = random_handle(m, &faults);
    Faults no_step = m->options.nonfinite == GC_NONFINITE_TRANSACTIONAL ? 0 : FAULT(INVALID_ARGUMENT);
    switch (below(5)) {
    case 0: case 1:
        place(&dst, scales ? float32 : uint32, scales ? m->segments : 1, 1, 1, &out);
        faults |= faults_of(&dst, scales ? &float32 : &uint32, 1, scales ? m->segments : 1, false);
        faults |= scales && has_blocks(m) ? FAULT(INVALID_ARGUMENT) : 0;
        begin(scales ? f_gc_codec_scales : f_gc_codec_flags);
        if (judge_codec(scales ? gc_codec_scales(handle, dst.passed, random_stream())
                               : gc_codec_flags(handle, dst.passed, random_stream()), faults))
            accept(&dst);
        return;
    case 2:
        place_optional(&src, scalars[below(3)], 1, 0, &out);
        faults |= faults_of_optional(&src, scalars, 3, 1) | no_step;
        begin(f_gc_codec_commit);
        judge_codec(gc_codec_commit(handle, src.passed, random_stream()), faults);
        break;
    case 3:
        begin(f_gc_codec_rollback);
        faults |= no_step;
        judge_codec(gc_codec_rollback(handle, random_stream()), faults);
        break;
    case 4:
        begin(f_gc_codec_reset);
        judge_codec(gc_codec_reset(handle, random_stream()), faults);
        break;
    }
    if (faults == 0)
        m->pending = false;
}

static void call_state(Made *m) {
    bool outwards = one_in(2), errors = one_in(2);
    size_t used = 0;
    Faults faults = m->pending ? FAULT(INVALID_ARGUMENT) : 0;
    gc_codec_t *handle = random_handle(m, &faults);
    Argument *one = outwards ? &dst : &src, *other = &chunk[4];
    if (errors) {
        place_optional(one, float32, m->elements, outwards, &used);
        place_optional(other, float32, m->part_elements, outwards, &used);
        faults |= faults_of_optional(one, &float32, 1, m->elements);
        faults |= faults_of_optional(other, &float32, 1, m->part_elements);
        faults |= outwards ? faults_of_overlap(one, other) : 0;
        faults |= m->options.server == 0 && other->passed != NULL ? FAULT(INVALID_ARGUMENT) : 0;
        faults |= !outwards && !keeps_errors(m) ? FAULT(INVALID_ARGUMENT) : 0;
        begin(outwards ? f_gc_codec_errors_out : f_gc_codec_errors_in);
        bool done = judge_codec(outwards ? gc_codec_errors_out(handle, one->passed, other->passed, random_stream())
                                         : gc_codec_errors_in(handle, one->passed, other->passed, random_stream()),
                                faults);
        if (done && outwards) {
            accept(one);
            accept(other);
        } else if (done) {
            m->takes_any |= !has_blocks(m) && m->options.nonfinite != GC_NONFINITE_PROPAGATE;
        }
        return;
    }
    place(one, uint8, m->state_bytes, 16, outwards, &used);
    faults |= faults_of(one, &uint8, 1, m->state_bytes, true);
    if (!outwards && faults == 0)
        faults = fill(one, saved_state, (size_t)m->state_bytes, m->has_state, 0);
    if (!outwards && faults == 0 && m->takes_any)
        faults = MAY_SUCCEED | FAULT(CORRUPT);
    begin(outwards ? f_gc_codec_state_out : f_gc_codec_state_in);
    if (judge_codec(outwards ? gc_codec_state_out(handle, one->passed, random_stream())
                             : gc_codec_state_in(handle, one->passed, random_stream()), faults) && outwards) {
        accept(one);
        memcpy(saved_state, (unsigned char *)one->tensor.dl_tensor.data + one->tensor.dl_tensor.byte_offset,
               (size_t)m->state_bytes);
        m->has_state = true;
    }
}

static void call_codec(void) {
    Made m;
    prepare(MEDIUM);
    if (!make_codec(&m, NULL))
        return;
    begin(f_gc_codec_payload_bytes);
    EXPECT(gc_codec_payload_bytes(m.handle) == m.n_chunks * m.chunk_bytes);
    succeeded();
    begin(f_gc_codec_state_bytes);
    EXPECT(gc_codec_state_bytes(m.handle) == m.state_bytes);
    succeeded();
    for (int steps = 4 + (int)below(20); steps > 0; steps--) {
        switch (below(6)) {
        case 0: case 1: call_encode(&m); break;
        case 2: call_decode(&m); break;
        case 3: call_reduce(&m); break;
        case 4: call_small_results(&m); break;
        case 5: call_state(&m); break;
        }
        compare_windows();
    }
    begin(f_gc_codec_free);
    gc_codec_free(m.handle);
    succeeded();
}

/* ---- all-reduces of a rank that is alone ------------------------------------------------------------------------- */

static int32_t never(void *ctx, const void *send, void *recv, size_t bytes, DLDevice device, void *stream) {
    (void)ctx, (void)send, (void)recv, (void)bytes, (void)device, (void)stream;
    EXPECT(!"a rank that is alone exchanges something");
    return 1;
}

/* The handle, or what is none. */
static void *spoilt(void *handle, Faults *faults) {
    if (!one_in(60))
        return handle;
    *faults |= FAULT(INVALID_ARGUMENT);
    return one_in(2) ? NULL : (char *)handle + 1 + below(7);
}

static gc_comm_t *make_comm(void) {
    gc_comm_t *out[3] = {NULL}, **place = out;
    gc_transport_t transport, *passed = &transport;
    Faults faults = 0;
    if (one_in(2)) {
        int32_t ranks = one_in(8) ? -(int32_t)below(INT32_MAX) : 1 + (int32_t)below(3);
        place = one_in(40) ? NULL : out;
        faults = ranks < 1 || place == NULL ? FAULT(INVALID_ARGUMENT) : 0;
        begin(f_gc_comm_group);
        bool made = judge(gc_comm_group(ranks, place), faults);
        for (int i = 0; i < 3; i++)
            EXPECT((out[i] != NULL) == (made && i < ranks));
        for (int i = made && ranks == 1 ? 1 : 0; i < 3; i++)
            gc_comm_free(out[i]);
        return made && ranks == 1 ? out[0] : NULL;
    }
    memset(&transport, 0, sizeof transport);
    transport.struct_size = sizeof transport;
    transport.world_size = 1;
    transport.flags = (uint32_t)below(2);
    transport.all_to_all = transport.all_gather = never;
    while (one_in(4)) {
        faults = FAULT(INVALID_ARGUMENT);
        switch (below(6)) {
        case 0: transport.struct_size = (uint32_t)below(sizeof transport); break;
        case 1: transport.rank = one_in(2) ? 1 : -1 - (int32_t)below(INT32_MAX); break;
        case 2: transport.world_size = -(int32_t)below(INT32_MAX); break;
        case 3: transport.flags |= 2u << below(31); break;
        case 4: *(one_in(2) ? &transport.all_to_all : &transport.all_gather) = NULL; break;
        case 5: passed = one_in(2) ? NULL : (gc_transport_t *)(void *)((char *)&transport + 1 + below(7)); break;
        }
    }
    begin(f_gc_comm_from_transport);
    bool made = judge(gc_comm_from_transport(passed, place), faults);
    EXPECT((out[0] != NULL) == made && out[1] == NULL);
    return out[0];
}

/* The form whose errors are the caller's. */
static void call_plain_allreduce(gc_comm_t *comm) {
    static const int types[] = {kDLCPU, kDLCUDAHost, kDLCUDA, kDLOpenCL};
    DLDevice device = {(DLDeviceType)types[below(4)], 1000};
    int64_t count = one_in(3) ? INT64_MIN + (int64_t)below(INT64_MAX) : (int64_t)below(5000);
    int64_t elements = (int64_t)below(600);
    size_t used = 0;
    Faults faults = count < 0 ? FAULT(INVALID_ARGUMENT) : 0;
    faults |= device.device_type == kDLCUDA && count != 0 ? NO_CUDA : 0;
    faults |= device.device_type == kDLOpenCL ? FAULT(UNSUPPORTED_DEVICE) : 0;
    void *handle = spoilt(comm, &faults);
    begin(f_gc_comm_reserve);
    judge(gc_comm_reserve(handle, device, count), faults);

    faults = 0;
    handle = spoilt(comm, &faults);
    place(&chunk[0], float32, elements, 1, 1, &used);
    elements = chunk[0].counted ? chunk[0].elements : elements;
    int64_t shard = gc_shard_elements(elements, 1);
    place(&chunk[1], float32, elements < 600 ? elements : 600, 1, one_in(20) ? 0 : 1, &used);
    place(&chunk[2], float32, shard >= 0 && shard < 600 ? shard : 600, 1, 1, &used);
    faults |= faults_of(&chunk[0], &float32, 1, elements, false) | faults_of(&chunk[1], &float32, 1, elements, false) |
              faults_of(&chunk[2], &float32, 1, shard, false) | (shard < 0 ? FAULT(SIZE_OVERFLOW) : 0);
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < i; j++)
            faults |= faults_of_overlap(&chunk[i], &chunk[j]);
    begin(f_gc_compressed_allreduce);
    if (judge(gc_compressed_allreduce(handle, chunk[0].passed, chunk[1].passed, chunk[2].passed, random_stream()),
              faults))
        for (int i = 0; i < 3; i++)
            accept(&chunk[i]);
    begin(f_gc_comm_async_error);
    judge(gc_comm_async_error(comm), 0);
}

static void call_run(Made *m, gc_allreduce_t *allreduce) {
    const DLTensor *values[SEGMENTS + 1] = {NULL};
    DLDataType dtype = m->options.values.bits ? m->options.values : float32;
    size_t in = 0, out = 0;
    Faults faults = 0;
    place_values(m, dtype, 1, &out, values);
    place_optional(&chunk[4], float32, 1, one_in(16) ? 1 : 0, &in);
    place_optional(&chunk[5], float32, 1, 0, &in);
    for (int i = 0; i < m->segments; i++) {
        faults |= faults_of(&chunk[i], &dtype, 1, m->sizes[i], false);
        for (int j = 0; j < 6; j++)
            faults |= j < i || j > 3 ? faults_of_overlap(&chunk[i], &chunk[j]) : 0;
    }
    for (int i = 4; i < 6; i++)
        faults |= faults_of_optional(&chunk[i], &float32, 1, 1);
    void *handle = spoilt(allreduce, &faults);
    size_t count = random_count(m, &faults);
    begin(f_gc_allreduce_run);
    if (judge(gc_allreduce_run(handle, (DLTensor *const *)values, count, chunk[4].passed, chunk[5].passed,
                               random_stream()), faults)) {
        for (int i = 0; i < m->segments; i++)
            accept(&chunk[i]);
        m->pending |= m->options.nonfinite == GC_NONFINITE_TRANSACTIONAL;
    }
}

static void call_reduce_scatter(Made *m, gc_allreduce_t *allreduce) {
    const DLTensor *values[SEGMENTS + 1] = {NULL};
    DLDataType dtype = m->options.values.bits ? m->options.values : float32;
    size_t in = 0, out = 0;
    Faults faults = 0;
    place_values(m, dtype, 0, &in, values);
    place(&dst, float32, m->elements, 1, one_in(16) ? 0 : 1, &out);
    place_optional(&chunk[4], float32, 1, 0, &in);
    place_optional(&chunk[5], float32, 1, 0, &in);
    for (int i = 0; i < m->segments; i++)
        faults |= faults_of(&chunk[i], &dtype, 1, m->sizes[i], false) | faults_of_overlap(&dst, &chunk[i]);
    for (int i = 4; i < 6; i++)
        faults |= faults_of_optional(&chunk[i], &float32, 1, 1) | faults_of_overlap(&dst, &chunk[i]);
    faults |= faults_of(&dst, &float32, 1, m->elements, false);
    void *handle = spoilt(allreduce, &faults);
    size_t count = random_count(m, &faults);
    begin(f_gc_allreduce_reduce_scatter);
    if (judge(gc_allreduce_reduce_scatter(handle, values, count, chunk[4].passed, chunk[5].passed, dst.passed,
                                          random_stream()), faults)) {
        accept(&dst);
        m->pending |= m->options.nonfinite == GC_NONFINITE_TRANSACTIONAL;
    }
}

static void call_all_gather(Made *m, gc_allreduce_t *allreduce) {
    const DLTensor *values[SEGMENTS + 1] = {NULL};
    DLDataType dtype = m->options.values.bits ? m->options.values : float32;
    size_t in = 0, out = 0;
    Faults faults = 0;
    place_values(m, dtype, 1, &out, values);
    place(&src, float32, m->elements, 1, one_in(16) ? 1 : 0, &in);
    faults |= faults_of(&src, &float32, 1, m->elements, false);
    for (int i = 0; i < m->segments; i++) {
        faults |= faults_of(&chunk[i], &dtype, 1, m->sizes[i], false) | faults_of_overlap(&chunk[i], &src);
        for (int j = 0; j < i; j++)
            faults |= faults_of_overlap(&chunk[i], &chunk[j]);
    }
    void *handle = spoilt(allreduce, &faults);
    size_t count = random_count(m, &faults);
    begin(f_gc_allreduce_all_gather);
    if (judge(gc_allreduce_all_gather(handle, src.passed, (DLTensor *const *)values, count, random_stream()),
              faults)) {
        for (int i = 0; i < m->segments; i++)
            accept(&chunk[i]);
        m->pending |= m->options.nonfinite == GC_NONFINITE_TRANSACTIONAL;
    }
}

static void call_allreduce_errors(const Made *m, gc_allreduce_t *allreduce) {
    bool outwards = one_in(2);
    int64_t rows = outwards ? 1 : 1 + (int64_t)below(3);
    size_t used = 0;
    Faults faults = m->pending ? FAULT(INVALID_ARGUMENT) : 0;
    void *handle = spoilt(allreduce, &faults);
    Argument *one = outwards ? &dst : &src, *other = &chunk[4];
    place_optional(one, float32, rows * m->elements, outwards, &used);
    place_optional(other, float32, m->elements, outwards, &used);
    faults |= faults_of_optional(one, &float32, 1, rows * m->elements);
    faults |= faults_of_optional(other, &float32, 1, m->elements);
    if (outwards) {
        faults |= faults_of_overlap(one, other);
        begin(f_gc_allreduce_errors_out);
        if (judge(gc_allreduce_errors_out(handle, one->passed, other->passed, random_stream()), faults)) {
            accept(one);
            accept(other);
        }
        return;
    }
    bool fits = faults_of_optional(one, &float32, 1, rows * m->elements) == 0; /* or its memory may be less */
    if (one->passed == &one->tensor && one->faults == 0 && fits && !one_in(20)) { /* in rows */
        one->tensor.dl_tensor.ndim = 2;
        one->tensor.dl_tensor.shape = one->shape;
        one->shape[0] = rows;
        one->shape[1] = m->elements;
        one->tensor.dl_tensor.strides = NULL;
        understand(one);
        faults = (faults & ~(FAULT(SHAPE_MISMATCH) | FAULT(NOT_CONTIGUOUS))) |
                 faults_of_optional(one, &float32, 1, rows * m->elements) |
                 faults_of_optional(other, &float32, 1, m->elements);
    } else if (one->passed != NULL && (one->tensor.dl_tensor.ndim != 2 || one->faults != 0 ||
                                       one->shape[0] != rows || one->shape[1] != m->elements)) {
        faults |= FAULT(SHAPE_MISMATCH);
    }
    faults |= keeps_errors(m) ? 0 : FAULT(INVALID_ARGUMENT);
    begin(f_gc_allreduce_errors_in);
    judge(gc_allreduce_errors_in(handle, one->passed, other->passed, random_stream()), faults);
}

/* A communicator of a machine that is alone, where that can be made. */
static gc_comm_t *make_of_two(gc_comm_t *inside) {
    gc_comm_t *between = make_comm(), *out = NULL;
    bool wrong = one_in(8);
    begin(f_gc_comm_hierarchical);
    bool made = judge(gc_comm_hierarchical(inside, between, wrong ? NULL : &out),
                      wrong || between == NULL ? FAULT(INVALID_ARGUMENT) : 0);
    EXPECT(made == (out != NULL));
    gc_comm_free(between);
    if (!made)
        return inside;
    gc_comm_t *again = NULL;
    begin(f_gc_comm_hierarchical);
    judge(gc_comm_hierarchical(out, inside, &again), FAULT(INVALID_ARGUMENT)); /* itself made of two */
    gc_comm_free(inside);
    return out;
}

static void call_allreduce(void) {
    static const DLDataType uint32 = {kDLUInt, 32, 1}, int32 = {kDLInt, 32, 1};
    int64_t elements = one_in(2) ? wild() : (int64_t)below(100000), ranks = 1 + (int64_t)below(9);
    Faults faults = elements < 0 ? FAULT(INVALID_ARGUMENT) : 0;
    faults |= elements > INT64_MAX - 8 * ranks ? FAULT(SIZE_OVERFLOW) | MAY_SUCCEED : 0;
    Made m;
    prepare(MEDIUM);
    begin(f_gc_shard_elements);
    int64_t shard = gc_shard_elements(elements, (int32_t)ranks);
    EXPECT(shard == -1 || shard == 8 * chunk_bytes(elements, (uint64_t)ranks));
    judge(shard >= 0 ? GC_STATUS_OK : elements < 0 ? GC_STATUS_INVALID_ARGUMENT : GC_STATUS_SIZE_OVERFLOW, faults);
    int64_t n_ranks = one_in(4) ? ranks * 64 : ranks;
    begin(f_gc_peers_bytes);
    int64_t bytes = gc_peers_bytes(elements, (int32_t)n_ranks);
    EXPECT(bytes == -1 || bytes > elements / 4);
    judge(bytes >= 0 ? GC_STATUS_OK : GC_STATUS_INVALID_ARGUMENT,
          elements < 0 || n_ranks > 64 ? FAULT(INVALID_ARGUMENT) : 0);
    gc_comm_t *comm = make_comm();
    if (comm == NULL)
        return;
    for (int steps = 1 + (int)below(4); steps > 0; steps--) {
        call_plain_allreduce(comm);
        compare_windows();
    }
    if (one_in(2))
        comm = make_of_two(comm);
    bool made = make_codec(&m, comm);
    gc_allreduce_t *allreduce = made ? (gc_allreduce_t *)(void *)m.handle : NULL;
    if (made) {
        const gc_codec_options_t *given = one_in(8) ? NULL : &m.options;
        begin(f_gc_allreduce_peers_bytes);
        bytes = gc_allreduce_peers_bytes(given, (int32_t)n_ranks);
        EXPECT(bytes == -1 || bytes >= gc_peers_bytes(0, (int32_t)n_ranks));
        judge(bytes >= 0 ? GC_STATUS_OK : GC_STATUS_INVALID_ARGUMENT,
              given == NULL || n_ranks > 64 ? FAULT(INVALID_ARGUMENT) : 0);
    }
    if (!made && comm != NULL && one_in(4)) {
        faults = 0;
        void *handle = spoilt(comm, &faults);
        begin(f_gc_comm_abort);
        if (judge(gc_comm_abort(handle), faults)) {
            begin(f_gc_comm_async_error);
            judge(gc_comm_async_error(comm), FAULT(COMM));
        }
    }
    begin(f_gc_comm_free);
    gc_comm_free(comm);
    succeeded();
    for (int steps = made ? 4 + (int)below(20) : 0; steps > 0; steps--) {
        Faults no_step = m.options.nonfinite == GC_NONFINITE_TRANSACTIONAL ? 0 : FAULT(INVALID_ARGUMENT);
        size_t used = 0;
        faults = 0;
        void *handle = spoilt(allreduce, &faults);
        switch (below(11)) {
        case 0: case 1: case 2: call_run(&m, allreduce); break;
        case 8: case 9: call_reduce_scatter(&m, allreduce); break;
        case 10: call_all_gather(&m, allreduce); break;
        case 3:
            place(&dst, uint32, 1, 1, 1, &used);
            faults |= faults_of(&dst, &uint32, 1, 1, false);
            begin(f_gc_allreduce_flags);
            if (judge(gc_allreduce_flags(handle, dst.passed, random_stream()), faults))
                accept(&dst);
            break;
        case 4:
            place_optional(&src, int32, 1, 0, &used);
            faults |= no_step | faults_of_optional(&src, &int32, 1, 1);
            faults |= src.passed && src.tensor.dl_tensor.dtype.code != kDLInt ? MAY_SUCCEED : 0; /* takes others, too */
            begin(f_gc_allreduce_commit);
            m.pending &= !judge(gc_allreduce_commit(handle, src.passed, random_stream()), faults);
            break;
        case 5:
            begin(f_gc_allreduce_rollback);
            m.pending &= !judge(gc_allreduce_rollback(handle, random_stream()), faults | no_step);
            break;
        case 6:
            begin(f_gc_allreduce_reset);
            m.pending &= !judge(gc_allreduce_reset(handle, random_stream()), faults);
            break;
        case 7: call_allreduce_errors(&m, allreduce); break;
        }
        compare_windows();
    }
    begin(f_gc_allreduce_shard_elements);
    int64_t own = gc_allreduce_shard_elements(allreduce);
    EXPECT(own >= -1);
    judge(own >= 0 ? GC_STATUS_OK : GC_STATUS_INVALID_ARGUMENT, allreduce ? 0 : FAULT(INVALID_ARGUMENT));
    begin(f_gc_allreduce_free);
    gc_allreduce_free(allreduce);
    succeeded();
}

static void call_onebit_bytes(void) {
    int64_t elements = one_in(2) ? wild() : (int64_t)below(100000);
    Faults faults = elements < 0 ? FAULT(INVALID_ARGUMENT) : 0;
    begin(f_gc_onebit_workspace_bytes);
    int64_t got = gc_onebit_workspace_bytes(elements);
    EXPECT(faults ? got == -1 : got >= 64 && got <= 96 + elements / 500);
    judge(faults ? GC_STATUS_INVALID_ARGUMENT : GC_STATUS_OK, faults);
}

/* The plain form. Without an error the bits are the gradient's own signs. */
static void call_onebit(size_t size) {
    static const DLDataType errors[] = {{kDLFloat, 32, 1}, {kDLBfloat, 16, 1}};
    DLManagedTensor *out[12] = {NULL};
    DLDataType dtype = gradients[below(3)];
    int64_t elements = limit == BIG_LIMIT ? (int64_t)size / 8 : (int64_t)below(size / 16), shape[2];
    float scale = 7, *of_scale = &scale;
    size_t in = 0, outs = 0;
    prepare(size);
    place(&src, dtype, elements, 1, 0, &in);
    place_optional(&chunk[4], errors[below(2)], elements, one_in(16) ? 0 : 1, &outs);
    Faults faults = faults_of(&src, gradients, 3, src.elements, false) |
                    faults_of_optional(&chunk[4], errors, 2, src.elements) | faults_of_overlap(&chunk[4], &src);
    if (one_in(2)) {
        uint64_t n_chunks = one_in(40) ? 0 : 1 + below(9);
        faults |= n_chunks == 0 ? FAULT(INVALID_ARGUMENT) : 0;
        if (one_in(60)) {
            of_scale = one_in(2) ? NULL : (float *)(void *)((char *)&scale + 1 + below(3));
            faults |= FAULT(INVALID_ARGUMENT);
        }
        for (int i = 0; i < 12; i++)
            out[i] = UNTOUCHED;
        begin(f_gc_onebit_compress);
        uint64_t done = 0;
        if (judge(gc_onebit_compress(src.passed, chunk[4].passed, n_chunks, out, of_scale), faults)) {
            Rows rows = {1, 1, src.elements, chunk_bytes(src.elements, n_chunks) * (int64_t)n_chunks};
            accept(&chunk[4]);
            read_bits(&src, true);
            pack_model(rows, GC_BIT_ORDER_BIG);
            for (; done < n_chunks; done++) {
                const DLTensor *t = &out[done]->dl_tensor;
                shape[0] = chunk_bytes(src.elements, n_chunks);
                check_output(t, uint8, 1, shape);
                EXPECT(chunk[4].passed != NULL || shape[0] == 0 ||
                       memcmp(t->data, packed + done * (uint64_t)shape[0], (size_t)shape[0]) == 0);
                keep(out[done], false);
            }
        }
        EXPECT(done > 0 || scale == 7);
        for (; done < 12; done++)
            EXPECT(out[done] == UNTOUCHED);
        compare_windows();
        return;
    }
    int32_t rule = one_in(40) ? (int32_t)wild() : (int32_t)below(2);
    int64_t workspace = gc_onebit_workspace_bytes(src.counted ? src.elements : 0);
    shape[0] = random_chunks();
    shape[0] = shape[0] == 0 ? 1 : shape[0];
    shape[1] = chunk_bytes(elements, (uint64_t)shape[0]);
    if (shape[0] * shape[1] > (int64_t)size / 4 || workspace > (int64_t)size / 4)
        return;
    make(&dst, uint8, 2, shape, 0, &windows[1], true);
    if (!one_in(20)) { /* behind the error */
        outs += shape[0] * shape[1] + outs <= size ? 0 : size;
        if (outs < size && dst.elements > 0) {
            dst.tensor.dl_tensor.strides = NULL;
            dst.tensor.dl_tensor.byte_offset = 0;
            dst.tensor.dl_tensor.data = windows[1].base + outs;
            understand(&dst);
            outs += (size_t)dst.elements;
        }
    }
    place(&chunk[5], float32, 1, 1, 1, &outs);
    place(&chunk[6], uint8, workspace, 16, 1, &outs);
    faults |= faults_of_rows(&dst, &src) | dst.faults | faults_of(&chunk[5], &float32, 1, 1, false) |
              faults_of(&chunk[6], &uint8, 1, chunk[6].elements, true);
    faults |= chunk[6].counted && chunk[6].elements < workspace ? FAULT(SHAPE_MISMATCH) : 0;
    faults |= rule == 0 || rule == 1 ? 0 : FAULT(INVALID_ARGUMENT);
    Argument *outputs[] = {&chunk[4], &dst, &chunk[5], &chunk[6]};
    for (int i = 0; i < 4; i++) {
        faults |= faults_of_overlap(outputs[i], &src);
        for (int j = 0; j < i; j++)
            faults |= faults_of_overlap(outputs[i], outputs[j]);
    }
    if ((src.faults | dst.faults) & NO_CUDA)
        faults |= FAULT(INVALID_ARGUMENT);
    begin(f_gc_onebit_compress_into);
    if (judge(gc_onebit_compress_into(src.passed, chunk[4].passed, rule, dst.passed, chunk[5].passed, chunk[6].passed,
                                      random_stream()), faults)) {
        Rows rows = {1, 1, src.elements, dst.elements};
        for (int i = 0; i < 4; i++)
            accept(outputs[i]);
        if (chunk[4].passed == NULL) {
            read_bits(&src, true);
            pack_model(rows, GC_BIT_ORDER_BIG);
            write_bytes(&dst);
        }
    }
    compare_windows();
}

/* The inverse of the plain form. What 16 bits round scales to is tests/python/test_codec.py's: here they are 1. */
static void call_decompress(size_t size) {
    DLDataType dtype = one_in(6) ? dtypes[below(DTYPES)] : gradients[below(3)];
    DLManagedTensor *out[2] = {UNTOUCHED, UNTOUCHED}, *chunks[12];
    uint64_t n_chunks = 1 + below(12);
    float scales[13];
    prepare(size);
    int64_t elements = (int64_t)below(size / 40), bytes = chunk_bytes(elements, n_chunks), length;
    Faults faults = 0;
    for (uint64_t k = 0; k < n_chunks; k++) {
        uint32_t pattern = (uint32_t)next();
        scales[k] = 1;
        if (dtype.bits == 32)
            memcpy(&scales[k], &pattern, 4);
        length = bytes + (one_in(100) ? 1 : 0);
        make(&chunk[k], one_in(200) ? dtypes[below(DTYPES)] : uint8, 1, &length, 0, &windows[below(2)], false);
        if (one_in(6))
            spoil(&chunk[k]);
        chunks[k] = chunk[k].passed;
    }
    if (one_in(20))
        elements = wild();
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
    bool known = false;
    for (int i = 0; i < 3; i++)
        known |= memcmp(&dtype, &gradients[i], sizeof dtype) == 0;
    faults |= known ? 0 : FAULT(UNSUPPORTED_DTYPE);
    if (faults == 0 && !askable(1, &elements, dtype.bits, &faults))
        return;
    DLManagedTensor **room = random_out(out, &faults), **from = chunks;
    const float *of_chunks = scales;
    if (one_in(60)) {
        faults |= FAULT(INVALID_ARGUMENT);
        from = one_in(2) ? NULL : (DLManagedTensor **)(void *)((char *)chunks + 1 + below(7));
    }
    if (count > 0 && one_in(60)) {
        faults |= FAULT(INVALID_ARGUMENT);
        of_chunks = one_in(2) ? NULL : (const float *)(const void *)((const char *)scales + 1 + below(3));
    }
    begin(f_gc_onebit_decompress);
    if (judge(gc_onebit_decompress(from, count, of_chunks, elements, dtype, room), faults)) {
        Rows rows = {1, 1, elements, bytes * (int64_t)count};
        unsigned char *all = packed, expected[8];
        for (uint64_t k = 0; k < count; k++, packed += bytes)
            read_bytes(&chunk[k]);
        packed = all;
        unpack_model(rows, GC_BIT_ORDER_BIG);
        check_output(&out[0]->dl_tensor, dtype, 1, &elements);
        const unsigned char *found = out[0]->dl_tensor.data;
        for (int64_t i = 0; i < elements; i++) {
            write_sign(expected, dtype, bits[i], scales[i / 8 / bytes]);
            EXPECT(memcmp(found + i * (dtype.bits / 8), expected, dtype.bits / 8) == 0);
        }
        keep(out[0], false);
        out[0] = UNTOUCHED;
    }
    EXPECT(out[0] == UNTOUCHED && out[1] == UNTOUCHED);
    compare_windows();
}

static void call_something(size_t size) {
    if (size != BIG && one_in(3)) /* a call of this is a dozen */
        one_in(3) ? call_allreduce() : call_codec();
    else if (size != BIG && one_in(12))
        call_onebit_bytes();
    else if (one_in(3))
        call_decompress(size);
    else
        call_onebit(size);
}

int main(int argc, char **argv) {
    run(argc, argv, both(100000, 500000), true, call_something);
    puts("hostile_codec: ok");
    return 0;
}
