/* Encodes the gradients of a small model with every block codec, and prints their bytes and errors.
 *
 *   gcc -std=c99 -O2 -Iinclude examples_c/blocks.c -Ltarget/release -lgradcodec -lm -o blocks
 *   LD_LIBRARY_PATH=target/release ./blocks
 *
 * The model is y = W x + b. b is sent as float32: it is small, and an error in b would shift all of y. The rows of W
 * have gradients of very different sizes, as layers do. One scale for all rows would lose the small ones; a scale per
 * block of elements does not. Then runs 100 steps with INT4, with and without error feedback: with it, the errors
 * cancel over time. The exit status is 0 only if all errors are within the limits of gradcodec.h. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gradcodec.h>

enum { ROWS = 16, COLUMNS = 256, WEIGHTS = ROWS * COLUMNS, STEPS = 100 };

static void must(gc_status_t status, const char *call)
{
    if (status != GC_STATUS_OK) {
        fprintf(stderr, "blocks: %s: %s: %s\n", call, gc_status_name(status), gc_last_error());
        exit(EXIT_FAILURE);
    }
}

/* Returns pseudo-random numbers from -1 to 1, the same on every machine. */
static float chance(void)
{
    static uint64_t state = 1;
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (float)(int32_t)(state >> 32) / 2147483648.0f;
}

/* Fills W's gradient, where row k has a size of about 4^-k, and b's gradient. */
static void find_gradients(float *weights, float *bias)
{
    for (int i = 0; i < WEIGHTS; i++)
        weights[i] = ldexpf(chance(), -2 * (i / COLUMNS));
    for (int k = 0; k < ROWS; k++)
        bias[k] = chance();
}

/* Encodes and decodes the gradients of W and b once. */
static void send_over(gc_codec_t *codec, float *const given[2], float *const got[2])
{
    int64_t sizes[2] = {WEIGHTS, ROWS}, bytes = gc_codec_payload_bytes(codec);
    DLTensor tensors[4];
    DLTensor *in[2] = {&tensors[0], &tensors[1]}, *out[2] = {&tensors[2], &tensors[3]};
    for (int i = 0; i < 4; i++) {
        const DLTensor one = {i < 2 ? given[i] : got[i - 2], {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, &sizes[i % 2], NULL, 0};
        tensors[i] = one;
    }
    DLManagedTensor *payload; /* aligned as payloads must be */
    must(gc_tensor_empty((DLDevice){kDLCPU, 0}, (DLDataType){kDLUInt, 8, 1}, 1, &bytes, &payload),
         "gc_tensor_empty");
    must(gc_codec_encode(codec, (const DLTensor *const *)in, 2, NULL, NULL, &payload->dl_tensor, NULL),
         "gc_codec_encode");
    must(gc_codec_decode(codec, &payload->dl_tensor, 1, NULL, GC_DECODE_SET, out, 2, NULL), "gc_codec_decode");
    gc_tensor_free(payload);
}

static gc_codec_t *make(int32_t kind, int32_t error)
{
    static const int64_t sizes[2] = {WEIGHTS, ROWS};
    static const uint8_t raw[2] = {0, 1};
    const gc_codec_options_t options = {
        .struct_size = sizeof options, .codec = kind, .error = error, .segments = sizes, .n_segments = 2, .raw = raw
    };
    gc_codec_t *codec;
    must(gc_codec_create(&options, &codec), "gc_codec_create");
    return codec;
}

int main(void)
{
    static float weights[WEIGHTS], bias[ROWS], weights_got[WEIGHTS], bias_got[ROWS];
    static double sums[2][WEIGHTS], given_sum[WEIGHTS];
    float *const given[2] = {weights, bias}, *const got[2] = {weights_got, bias_got};
    static const struct {
        const char *name;
        int32_t kind;
        double most; /* largest error, relative to the largest element of the block */
    } codecs[] = {
        {"bf16", GC_CODEC_BF16, 1.0 / 256}, {"mxfp8", GC_CODEC_MXFP8, 1.0 / 16}, {"int8", GC_CODEC_INT8, 1.0 / 252},
        {"int4", GC_CODEC_INT4, 1.0 / 13},  {"mxfp4", GC_CODEC_MXFP4, 1.0 / 4},
    };

    find_gradients(weights, bias);
    printf("%d weights and %d of a bias, %d bytes in float32\n\n", WEIGHTS, ROWS, 4 * (WEIGHTS + ROWS));
    printf("codec    bytes   off by, of the largest in its row: first row, last row\n");
    for (size_t k = 0; k < sizeof codecs / sizeof *codecs; k++) {
        gc_codec_t *codec = make(codecs[k].kind, GC_ERROR_NONE);
        double off[ROWS] = {0};
        send_over(codec, given, got);
        for (int row = 0; row < ROWS; row++) {
            double largest = 0;
            for (int i = row * COLUMNS; i < (row + 1) * COLUMNS; i++) {
                largest = fmax(largest, fabs((double)weights[i]));
                off[row] = fmax(off[row], fabs((double)weights_got[i] - (double)weights[i]));
            }
            off[row] /= largest;
            if (off[row] > codecs[k].most) {
                fprintf(stderr, "blocks: %s: row %d is off by %g\n", codecs[k].name, row, off[row]);
                return EXIT_FAILURE;
            }
        }
        if (memcmp(bias, bias_got, sizeof bias) != 0) {
            fprintf(stderr, "blocks: %s: the bias did not travel as it is\n", codecs[k].name);
            return EXIT_FAILURE;
        }
        printf("%-6s %7lld   %.4f %.4f\n", codecs[k].name, (long long)gc_codec_payload_bytes(codec), off[0],
               off[ROWS - 1]);
        gc_codec_free(codec);
    }

    /* Encodes the same gradient with a little noise repeatedly: error feedback sends a step's error in a later step. */
    gc_codec_t *both[2] = {make(GC_CODEC_INT4, GC_ERROR_NONE), make(GC_CODEC_INT4, GC_ERROR_FLOAT32)};
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < WEIGHTS; i++)
            given_sum[i] += (double)weights[i];
        for (int k = 0; k < 2; k++) {
            send_over(both[k], given, got);
            for (int i = 0; i < WEIGHTS; i++)
                sums[k][i] += (double)weights_got[i];
        }
        weights[step % WEIGHTS] += 0.01f * chance();
    }
    double off[2] = {0, 0};
    for (int i = 0; i < COLUMNS; i++)
        for (int k = 0; k < 2; k++)
            off[k] = fmax(off[k], fabs(sums[k][i] - given_sum[i]) / STEPS);
    printf("\nint4, the mean of %d steps is off by up to %.4f without errors, by %.4f with them\n", STEPS, off[0], off[1]);
    gc_codec_free(both[0]);
    gc_codec_free(both[1]);
    return off[1] < off[0] / 10 ? EXIT_SUCCESS : EXIT_FAILURE;
}
