/* Shows the effect of error feedback: one network, trained four times, with gradients of 32 bits or of one bit.
 *
 *   gcc -std=c99 -O2 -Iinclude examples_c/feedback.c -Ltarget/release -lgradcodec -lm -o feedback
 *   LD_LIBRARY_PATH=target/release ./feedback
 *
 * From another folder: ./feedback DIGITS.BIN PICTURE.SVG. It writes build/feedback.svg otherwise.
 *
 * Four workers, simulated one after the other in one process, learn handwritten digits. They average their gradients by
 * a two-shot all-reduce, as in digits.c. All runs use the same constant step size, except for signs:
 *
 *   fp32      the mean of four float32 gradients.
 *   signs     GC_CODEC_SIGN: the majority's sign. A sign has no magnitude, so signs have their own step size.
 *   lossy     GC_CODEC_ONEBIT with GC_ERROR_NONE: signs and one scale per tensor, without error feedback.
 *   feedback  GC_CODEC_ONEBIT: as lossy, but adds the error of a step to the next gradient, at the worker that
 *             encodes and at the one that reduces.
 *
 * Prints the losses and draws them as an SVG. The exit status is 0 only if feedback comes close to fp32, lossy and
 * signs end with larger losses, and at most a twentieth of fp32's bytes was sent. (The bits alone are a 32nd; for a
 * network as small as this, a third are headers.) */

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gradcodec.h>

enum { WORKERS = 4, BATCH = 32, STEPS = 1200, EVERY = 100, MODES = 4, POINTS = STEPS / EVERY + 1 };
static const char *const names[MODES] = { "fp32", "signs", "lossy", "feedback" };
static const char *const colours[MODES] = { "#444444", "#d08020", "#3070c0", "#20a050" };
static const float step_size[MODES] = { 0.3f, 0.004f, 0.3f, 0.3f };

/* The network: 64 pixels, 64 hidden ReLUs, 10 digits. Its four tensors, the codec's segments, follow one another. */
enum { PIXELS = 64, HIDDEN = 64, DIGITS = 10, TENSORS = 4 };
static const int64_t sizes[TENSORS] = { PIXELS * HIDDEN, HIDDEN, HIDDEN * DIGITS, DIGITS };
enum { B1 = PIXELS * HIDDEN, W2 = B1 + HIDDEN, B2 = W2 + HIDDEN * DIGITS, WEIGHTS = B2 + DIGITS };

enum { IMAGES = 1797, HELD_OUT = 360, TRAINING = IMAGES - HELD_OUT };
typedef struct {
    float pixel[PIXELS];
    int digit;
} Image;
static Image held_out[HELD_OUT], training[TRAINING];

static void must(gc_status_t status, const char *call)
{
    if (status != GC_STATUS_OK) {
        fprintf(stderr, "feedback: %s: %s: %s\n", call, gc_status_name(status), gc_last_error());
        exit(EXIT_FAILURE);
    }
}

static void *allocate(size_t bytes) /* malloc's memory is aligned to 16 bytes, as payloads must be */
{
    void *memory = calloc(bytes, 1);
    if (!memory) {
        fprintf(stderr, "feedback: no memory\n");
        exit(EXIT_FAILURE);
    }
    return memory;
}

static void load(const char *path)
{
    FILE *file = fopen(path, "rb");
    int tests = 0, trainings = 0;
    for (int i = 0; i < IMAGES; i++) {
        unsigned char record[PIXELS + 1];
        if (!file || fread(record, sizeof record, 1, file) != 1 || record[PIXELS] >= DIGITS) {
            fprintf(stderr, "feedback: %s: %s\n", path, file ? "not the file of images" : strerror(errno));
            exit(EXIT_FAILURE);
        }
        Image *image = i % 5 == 0 ? &held_out[tests++] : &training[trainings++];
        for (int p = 0; p < PIXELS; p++)
            image->pixel[p] = (float)record[p] / 16.0f;
        image->digit = record[PIXELS];
    }
    fclose(file);
}

static uint32_t random_below(uint64_t *state, uint32_t limit) /* splitmix64: the same on every machine */
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)((x ^ (x >> 31)) >> 32) % limit;
}

/* Returns the loss of an image; adds its gradient unless that is NULL. `*guess` receives the predicted digit. */
static float learn(const float *w, const Image *image, float *gradient, int *guess)
{
    float hidden[HIDDEN], out[DIGITS], sum = 0.0f;
    memcpy(hidden, w + B1, sizeof hidden);
    memcpy(out, w + B2, sizeof out);
    for (int p = 0; p < PIXELS; p++)
        for (int h = 0; h < HIDDEN; h++)
            hidden[h] += image->pixel[p] * w[p * HIDDEN + h];
    for (int h = 0; h < HIDDEN; h++)
        for (int d = 0; d < DIGITS && hidden[h] > 0.0f; d++)
            out[d] += hidden[h] * w[W2 + h * DIGITS + d];
    *guess = 0;
    for (int d = 1; d < DIGITS; d++)
        *guess = out[d] > out[*guess] ? d : *guess;
    const float largest = out[*guess], right = out[image->digit];
    for (int d = 0; d < DIGITS; d++)
        sum += out[d] = expf(out[d] - largest);
    for (int d = 0; d < DIGITS && gradient; d++) {
        out[d] = out[d] / sum - (float)(d == image->digit);
        gradient[B2 + d] += out[d];
    }
    for (int h = 0; h < HIDDEN && gradient; h++) {
        float back = 0.0f;
        for (int d = 0; d < DIGITS && hidden[h] > 0.0f; d++) {
            gradient[W2 + h * DIGITS + d] += hidden[h] * out[d];
            back += w[W2 + h * DIGITS + d] * out[d];
        }
        gradient[B1 + h] += back;
        for (int p = 0; p < PIXELS && back != 0.0f; p++)
            gradient[p * HIDDEN + h] += image->pixel[p] * back;
    }
    return logf(sum) + largest - right;
}

/* ---- the exchange between the workers ---------------------------------------------------------------------------- */

static DLTensor view(void *data, uint8_t code, uint8_t bits, int32_t ndim, int64_t *shape)
{
    const DLTensor tensor = { data, { kDLCPU, 0 }, ndim, { code, bits, 1 }, shape, NULL, 0 };
    return tensor;
}

/* Codecs and buffers of all workers. Worker k uses codec k to encode its gradient and to reduce the chunks k. */
typedef struct {
    gc_codec_t *codec[WORKERS];
    int64_t chunk_bytes;
    uint8_t *payload[WORKERS], *received, *reduced;
} Group;

static Group make(int mode)
{
    Group group;
    gc_codec_options_t options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.codec = mode == 1 ? GC_CODEC_SIGN : GC_CODEC_ONEBIT;
    options.error = mode == 3 ? GC_ERROR_FLOAT32 : GC_ERROR_NONE;
    options.segments = sizes;
    options.n_segments = TENSORS;
    options.n_chunks = WORKERS;
    for (int k = 0; k < WORKERS; k++) {
        options.server = (uint64_t)k + 1;
        must(gc_codec_create(&options, &group.codec[k]), "gc_codec_create");
    }
    group.chunk_bytes = gc_codec_payload_bytes(group.codec[0]) / WORKERS;
    for (int k = 0; k < WORKERS; k++)
        group.payload[k] = allocate((size_t)(WORKERS * group.chunk_bytes));
    group.received = allocate((size_t)(WORKERS * group.chunk_bytes));
    group.reduced = allocate((size_t)(WORKERS * group.chunk_bytes));
    return group;
}

static void drop(Group *group)
{
    for (int k = 0; k < WORKERS; k++) {
        gc_codec_free(group->codec[k]);
        free(group->payload[k]);
    }
    free(group->received);
    free(group->reduced);
}

/* Averages four gradients through payloads; memcpy() stands for sending. Returns the bytes sent. */
static int64_t exchange(Group *group, float gradient[WORKERS][WEIGHTS], float *result)
{
    int64_t lengths[TENSORS], whole[1] = { WORKERS * group->chunk_bytes }, one[1] = { group->chunk_bytes };
    int64_t rows[2] = { WORKERS, group->chunk_bytes };
    DLTensor values[TENSORS], payload, *results[TENSORS];
    const DLTensor *sources[TENSORS];
    memcpy(lengths, sizes, sizeof lengths);
    for (int k = 0; k < WORKERS; k++) {
        int64_t first = 0;
        for (int t = 0; t < TENSORS; first += sizes[t++]) {
            values[t] = view(gradient[k] + first, kDLFloat, 32, 1, &lengths[t]);
            sources[t] = &values[t];
        }
        payload = view(group->payload[k], kDLUInt, 8, 1, whole);
        must(gc_codec_encode(group->codec[k], sources, TENSORS, NULL, NULL, &payload, NULL), "gc_codec_encode");
    }
    /* First exchange: worker k gets chunk k of all workers. Second: all workers get the reduced chunks. */
    for (int k = 0; k < WORKERS; k++) {
        for (int from = 0; from < WORKERS; from++)
            memcpy(group->received + from * group->chunk_bytes, group->payload[from] + k * group->chunk_bytes,
                   (size_t)group->chunk_bytes);
        const DLTensor chunks = view(group->received, kDLUInt, 8, 2, rows);
        DLTensor reduced = view(group->reduced + k * group->chunk_bytes, kDLUInt, 8, 1, one);
        must(gc_codec_reduce(group->codec[k], (size_t)k, &chunks, &reduced, NULL), "gc_codec_reduce");
    }
    /* All workers would decode the same bytes, so one decoding is enough. */
    int64_t first = 0;
    for (int t = 0; t < TENSORS; first += sizes[t++]) {
        values[t] = view(result + first, kDLFloat, 32, 1, &lengths[t]);
        results[t] = &values[t];
    }
    payload = view(group->reduced, kDLUInt, 8, 1, whole);
    must(gc_codec_decode(group->codec[0], &payload, 1, NULL, GC_DECODE_SET, results, TENSORS, NULL), "gc_codec_decode");
    return 2 * WORKERS * (WORKERS - 1) * group->chunk_bytes;
}

static int64_t average(float gradient[WORKERS][WEIGHTS], float *result)
{
    for (int i = 0; i < WEIGHTS; i++) {
        result[i] = 0.0f;
        for (int k = 0; k < WORKERS; k++)
            result[i] += gradient[k][i] / WORKERS;
    }
    return 2 * (WORKERS - 1) * WEIGHTS * (int64_t)sizeof *result;
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

typedef struct {
    float loss[POINTS]; /* over all training images */
    float accuracy;     /* on held-out images */
    int64_t bytes;
} Run;

static Run train(int mode)
{
    static float w[WEIGHTS], gradient[WORKERS][WEIGHTS], result[WEIGHTS];
    uint64_t start = 1, choice = 2;
    Run run = { { 0.0f }, 0.0f, 0 };
    Group group;
    int guess;
    if (mode > 0)
        group = make(mode);
    for (int i = 0; i < WEIGHTS; i++) /* variance 1 / 64, as both layers have 64 inputs; no bias */
        w[i] = i < B1 || (i >= W2 && i < B2) ? ((float)random_below(&start, 2001) / 1000.0f - 1.0f) * 0.2165f : 0.0f;
    for (int step = 0; step <= STEPS; step++) {
        if (step % EVERY == 0)
            for (int i = 0; i < TRAINING; i++)
                run.loss[step / EVERY] += learn(w, &training[i], NULL, &guess) / TRAINING;
        if (step == STEPS)
            break;
        memset(gradient, 0, sizeof gradient);
        for (int k = 0; k < WORKERS; k++) {
            for (int i = 0; i < BATCH; i++)
                learn(w, &training[random_below(&choice, TRAINING)], gradient[k], &guess);
            for (int i = 0; i < WEIGHTS; i++)
                gradient[k][i] /= BATCH;
        }
        run.bytes += mode == 0 ? average(gradient, result) : exchange(&group, gradient, result);
        for (int i = 0; i < WEIGHTS; i++)
            w[i] -= step_size[mode] * result[i];
    }
    if (mode > 0)
        drop(&group);
    for (int i = 0; i < HELD_OUT; i++) {
        learn(w, &held_out[i], NULL, &guess);
        run.accuracy += (float)(guess == held_out[i].digit) / HELD_OUT;
    }
    return run;
}

/* Draws the losses over the steps; the axis of losses is logarithmic, from 10 to 0.0001. */
static void draw(const char *path, const Run runs[MODES])
{
    FILE *file = fopen(path, "w");
    if (!file) {
        printf("no drawing: %s: %s\n", path, strerror(errno));
        return;
    }
    fprintf(file, "<svg xmlns='http://www.w3.org/2000/svg' width='640' height='400' font-family='sans-serif' "
                  "font-size='12'>\n<rect width='640' height='400' fill='white'/>\n");
    for (int power = 1; power >= -4; power--)
        fprintf(file, "<path d='M60 %d H540' stroke='#dddddd'/><text x='52' y='%d' text-anchor='end'>1e%d</text>\n",
                30 + 64 * (1 - power), 34 + 64 * (1 - power), power);
    fprintf(file, "<text x='300' y='385' text-anchor='middle'>%d steps; loss on the training images</text>\n", STEPS);
    for (int mode = 0; mode < MODES; mode++) {
        float y = 0.0f;
        fprintf(file, "<polyline fill='none' stroke-width='2' stroke='%s' points='", colours[mode]);
        for (int i = 0; i < POINTS; i++) {
            y = 30.0f + 64.0f * (1.0f - log10f(fmaxf(runs[mode].loss[i], 1e-4f)));
            fprintf(file, "%.1f,%.1f ", 60.0 + 480.0 * i / (POINTS - 1), (double)y);
        }
        fprintf(file, "'/>\n<text x='546' y='%.1f' fill='%s'>%s</text>\n", (double)y + 4.0, colours[mode], names[mode]);
    }
    fprintf(file, "</svg>\n");
    printf(fclose(file) == 0 ? "drawn: %s\n" : "no drawing: %s\n", path);
}

int main(int argc, char **argv)
{
    Run runs[MODES];
    load(argc > 1 ? argv[1] : "examples_c/data/digits.bin");
    for (int mode = 0; mode < MODES; mode++)
        runs[mode] = train(mode);

    printf("%5s", "step");
    for (int mode = 0; mode < MODES; mode++)
        printf(" %10s", names[mode]);
    for (int i = 0; i < POINTS; i++) {
        printf("\n%5d", i * EVERY);
        for (int mode = 0; mode < MODES; mode++)
            printf(" %10.5f", (double)runs[mode].loss[i]);
    }
    printf("\n%5s", "read");
    for (int mode = 0; mode < MODES; mode++)
        printf(" %10.4f", (double)runs[mode].accuracy);
    printf("\n");
    draw(argc > 2 ? argv[2] : "build/feedback.svg", runs);

    const float *last[MODES];
    for (int mode = 0; mode < MODES; mode++)
        last[mode] = &runs[mode].loss[POINTS - 1];
    const int good = *last[3] < 1.2f * *last[0] && *last[1] > 2.0f * *last[3] && *last[2] > 1.25f * *last[3] &&
                     fabsf(runs[3].accuracy - runs[0].accuracy) < 0.02f && runs[0].bytes > 20 * runs[3].bytes;
    printf("RESULT fp32=%.5f signs=%.5f lossy=%.5f feedback=%.5f bytes_fp32=%" PRId64 " bytes_feedback=%" PRId64 "\n",
           (double)*last[0], (double)*last[1], (double)*last[2], (double)*last[3], runs[0].bytes, runs[3].bytes);
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
