/* Calls in a floating-point environment that differs from the default: the results are the same, nothing traps,
 * callbacks run in the caller's environment, and a call restores it. */
#define _GNU_SOURCE
#include <fenv.h>
#include <math.h>
#include <signal.h>
#include <unistd.h>

#include "check.h"

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#define ALIGNED __attribute__((aligned(64)))

enum { N = 3000, MOST = 1 << 16 };

static const uint32_t SIGNALLING[] = {0x7f800001, 0xff800001};

/* Rounds upwards; on x86, also flushes results to zero and treats denormals as zero. No exception traps. */
static void odd_environment(void) {
    CHECK(fesetround(FE_UPWARD) == 0);
#ifdef __x86_64__
    _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
}

static unsigned environment(void) {
#ifdef __x86_64__
    return _mm_getcsr();
#else
    return (unsigned)fegetround();
#endif
}

static DLDataType float32(void) { return dtype_of(kDLFloat, 32); }

static DLTensor bytes_of(void *data, int64_t *bytes) { return view_of(data, dtype_of(kDLUInt, 8), 1, bytes); }

static gc_codec_t *codec_of(int32_t kind, float beta) {
    gc_codec_options_t options = {.struct_size = sizeof options, .codec = kind, .n_elements = N, .server = 1, .beta = beta};
    gc_codec_t *codec = NULL;
    CHECK_OK(gc_codec_create(&options, &codec));
    return codec;
}

static void traps(int signal) {
    (void)signal;
    static const char words[] = "a call trapped\n";
    if (write(2, words, sizeof words - 1) < 0)
        _exit(2);
    _exit(1);
}

/* Reads payloads and states whose scales are signalling NaNs, while invalid operations trap. */
static void signalling(int32_t kind) {
    static unsigned char payload[MOST] ALIGNED, reduced[MOST] ALIGNED, state[MOST] ALIGNED;
    static float values[N];
    gc_codec_t *codec = codec_of(kind, 0);
    int64_t n = N, bytes = gc_codec_payload_bytes(codec), kept = gc_codec_state_bytes(codec), one = 1;
    int64_t chunks_shape[2] = {1, bytes};
    CHECK(bytes <= MOST && kept <= MOST);
    DLTensor view = view_of(values, float32(), 1, &n), out = bytes_of(payload, &bytes), dst = bytes_of(reduced, &bytes);
    DLTensor chunks = view_of(payload, dtype_of(kDLUInt, 8), 2, chunks_shape), whole = bytes_of(state, &kept);
    const DLTensor *inputs[] = {&view};
    DLTensor *outputs[] = {&view};
    for (int i = 0; i < N; i++)
        values[i] = (float)(i % 7) - 3;
    CHECK_OK(gc_codec_encode(codec, inputs, 1, NULL, NULL, &out, NULL));
    CHECK_OK(gc_codec_state_out(codec, &whole, NULL));
    for (int i = 0; i < 2; i++) {
        gc_status_t expected = kind == GC_CODEC_SIGN ? GC_STATUS_CORRUPT : GC_STATUS_OK;
        memcpy(payload + 64, &SIGNALLING[i], 4);
        memcpy(state + 64, &SIGNALLING[i], 4);
        feclearexcept(FE_ALL_EXCEPT);
        CHECK(feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW) >= 0);
        CHECK_STATUS(gc_codec_decode(codec, &out, 1, NULL, GC_DECODE_SET, outputs, 1, NULL), expected);
        CHECK_STATUS(gc_codec_reduce(codec, 0, &chunks, &dst, NULL), expected);
        CHECK_STATUS(gc_codec_state_in(codec, &whole, NULL), expected);
        CHECK(fegetexcept() == (FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW) && fetestexcept(FE_INVALID) == 0);
        fedisableexcept(FE_ALL_EXCEPT);
    }
    gc_codec_free(codec);

    /* Uses the same scales in gc_unpack_signs_into. */
    unsigned char bits[N / 8] = {0};
    int64_t packed = N / 8;
    int64_t row[2] = {1, packed};
    DLTensor src = bytes_of(bits, &packed), rows = view_of(bits, src.dtype, 2, row);
    for (int i = 0; i < 2; i++)
        for (int size = 16; size <= 64; size *= 2) {
            static double room[N];
            float scale;
            memcpy(&scale, &SIGNALLING[i], 4);
            DLTensor scales = view_of(&scale, float32(), 1, &one);
            DLTensor to = view_of(room, dtype_of(kDLFloat, (uint8_t)size), 1, &n);
            CHECK(feenableexcept(FE_INVALID) >= 0);
            CHECK_OK(gc_unpack_signs_into(&rows, &scales, GC_BIT_ORDER_BIG, &to, NULL));
            fedisableexcept(FE_ALL_EXCEPT);
        }
}

/* Stores the results of three codec steps and casts: payloads, reduced chunks, decoded values, bfloat16s. */
static void compute(int odd, unsigned char *results, size_t *count) {
    static unsigned char payload[MOST] ALIGNED, reduced[MOST] ALIGNED;
    static float values[N], decoded[N];
    static uint16_t halves[N];
    gc_codec_t *codec;
    unsigned before = environment();
    if (odd)
        odd_environment();
    unsigned within = environment();
    codec = codec_of(GC_CODEC_ONEBIT, 1e-41f); /* a denormal, so not 0 */
    if (odd)
        CHECK(environment() == within);
    int64_t n = N, bytes = gc_codec_payload_bytes(codec), chunks_shape[2] = {1, bytes};
    DLTensor view = view_of(values, float32(), 1, &n), out = bytes_of(payload, &bytes), dst = bytes_of(reduced, &bytes);
    DLTensor chunks = view_of(payload, dtype_of(kDLUInt, 8), 2, chunks_shape), back = view_of(decoded, float32(), 1, &n);
    DLTensor half = view_of(halves, dtype_of(kDLBfloat, 16), 1, &n);
    const DLTensor *inputs[] = {&view};
    DLTensor *outputs[] = {&back};
    *count = 0;
    for (uint32_t step = 0; step < 3; step++) {
        for (uint32_t i = 0; i < N; i++) { /* every other value is a denormal */
            uint32_t bits = (i + 1) * 2654435761u + step * 40503u;
            bits &= i % 2 ? 0x807fffffu : 0xbfffffffu;
            memcpy(&values[i], &bits, 4);
        }
        CHECK_OK(gc_codec_encode(codec, inputs, 1, NULL, NULL, &out, NULL));
        CHECK_OK(gc_codec_reduce(codec, 0, &chunks, &dst, NULL));
        CHECK_OK(gc_codec_decode(codec, &dst, 16777217, NULL, GC_DECODE_SET, outputs, 1, NULL));
        CHECK_OK(gc_copy_into(&view, &half, NULL));
        memcpy(results + *count, payload, (size_t)bytes), *count += (size_t)bytes;
        memcpy(results + *count, reduced, (size_t)bytes), *count += (size_t)bytes;
        memcpy(results + *count, decoded, sizeof decoded), *count += sizeof decoded;
        memcpy(results + *count, halves, sizeof halves), *count += sizeof halves;
    }
    gc_codec_free(codec);
    CHECK(environment() == within); /* the calls left no exception flags in the caller's environment */
    CHECK(fesetround(FE_TONEAREST) == 0);
#ifdef __x86_64__
    _mm_setcsr(before);
#endif
}

static unsigned seen;

/* Records the environment, which is the caller's, and changes it. */
static void release(void *ctx) {
    (void)ctx;
    seen = environment();
    fesetround(FE_DOWNWARD);
}

static int32_t exchange(void *ctx, const void *send, void *recv, size_t bytes, DLDevice device, void *stream) {
    (void)ctx, (void)device, (void)stream;
    for (size_t rank = 0; rank < 2; rank++)
        memcpy((char *)recv + rank * bytes, send, bytes);
    seen = environment();
    return fesetround(FE_DOWNWARD);
}

static void callbacks(void) {
    float number = 1;
    int64_t one = 1;
    DLManagedTensor *tensor = NULL;
    CHECK_OK(gc_tensor_from_pointer(&number, cpu(), float32(), 1, &one, NULL, release, NULL, &tensor));
    fesetround(FE_UPWARD);
    unsigned ours = environment();
    gc_tensor_free(tensor);
    CHECK(seen == ours && fegetround() == FE_DOWNWARD);

    gc_transport_t transport = {.struct_size = sizeof transport, .world_size = 2, .all_to_all = exchange,
                                .all_gather = exchange};
    gc_comm_t *comm = NULL;
    gc_codec_options_t options = {.struct_size = sizeof options, .codec = GC_CODEC_ONEBIT, .n_elements = 8};
    gc_allreduce_t *allreduce = NULL;
    CHECK_OK(gc_comm_from_transport(&transport, &comm));
    fesetround(FE_UPWARD);
    ours = environment();
    seen = 0;
    /* `exchange` copies this rank's data, so both ranks appear to have the same number. */
    CHECK_STATUS(gc_allreduce_create(comm, &options, &allreduce), GC_STATUS_INVALID_ARGUMENT);
    CHECK(seen != 0 && fegetround() == FE_DOWNWARD);
    fesetround(FE_TONEAREST);
    gc_comm_free(comm);
}

int main(void) {
    static unsigned char results[2][3 * (2 * MOST + 6 * N)];
    size_t counts[2];
    signal(SIGFPE, traps);
    signalling(GC_CODEC_ONEBIT);
    signalling(GC_CODEC_SIGN);
    for (int odd = 0; odd < 2; odd++)
        compute(odd, results[odd], &counts[odd]);
    CHECK(counts[0] == counts[1] && memcmp(results[0], results[1], counts[0]) == 0);
    callbacks();
    return 0;
}
