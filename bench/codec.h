/*
 * Calls of codecs and of the plain form: what bench/codec.py describes, and bits.c and gpu_host.c time.
 */
#include "library.h"

enum { ENCODE, DECODE, ADD, REDUCE, COMPRESS };

/* One call. codec.py has the same struct. */
typedef struct {
    int32_t function;
    gc_codec_t *codec;
    DLTensor **values; /* one for each segment; for COMPRESS the gradient and its error */
    int64_t n_values;
    DLTensor *payload; /* for COMPRESS the bits, for REDUCE the chunk that is made */
    DLTensor *chunks;  /* for REDUCE */
    DLTensor *scale, *workspace; /* for COMPRESS */
} CodecCall;

static gc_status_t call_codec(const Library *library, const CodecCall *call, void *stream)
{
    const DLTensor *const *read = (const DLTensor *const *)call->values;
    const size_t n_values = (size_t)call->n_values;
    switch (call->function) {
    case ENCODE:
        return library->gc_codec_encode(call->codec, read, n_values, NULL, NULL, call->payload, stream);
    case DECODE:
        return library->gc_codec_decode(call->codec, call->payload, 0, NULL, GC_DECODE_SET, call->values, n_values,
                                        stream);
    case ADD:
        return library->gc_codec_decode(call->codec, call->payload, 0, NULL, GC_DECODE_ADD, call->values, n_values,
                                        stream);
    case REDUCE:
        return library->gc_codec_reduce(call->codec, 0, call->chunks, call->payload, stream);
    default:
        return library->gc_onebit_compress_into(call->values[0], call->values[1], GC_SCALE_RMS, call->payload,
                                                call->scale, call->workspace, stream);
    }
}

/* One call of each of `count`, one after another. */
int32_t call_codecs(const Library *library, int64_t count, const CodecCall *calls, void *stream)
{
    for (int64_t i = 0; i < count; i++) {
        gc_status_t status = call_codec(library, calls + i, stream);
        if (status)
            return status;
    }
    return GC_STATUS_OK;
}

/*
 * A codec on device 0 of a type; `code` and `bits` are of the dtype of its values. It reduces chunk 0 if there are
 * several. NULL: refused (last_error() says why).
 */
gc_codec_t *make_codec(const Library *library, int32_t kind, int32_t device_type, int32_t code, int32_t bits,
                       int32_t error, const int64_t *segments, int64_t n_segments, int64_t n_chunks)
{
    gc_codec_options_t options = { 0 };
    options.struct_size = sizeof options;
    options.codec = kind;
    options.device.device_type = (DLDeviceType)device_type;
    options.values.code = (uint8_t)code;
    options.values.bits = (uint8_t)bits;
    options.values.lanes = 1;
    options.error = error;
    options.segments = segments;
    options.n_segments = (size_t)n_segments;
    options.n_chunks = (size_t)n_chunks;
    options.server = n_chunks > 1;
    gc_codec_t *codec = NULL;
    return library->gc_codec_create(&options, &codec) ? NULL : codec;
}
