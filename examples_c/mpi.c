/* MPI processes fit a line together, once by MPI_Allreduce in float32, once by gc_allreduce_run at one bit per element.
 *
 *   mpicc -std=c99 -O2 -Iinclude examples_c/mpi.c -Ltarget/release -lgradcodec -lm -o mpi
 *   LD_LIBRARY_PATH=target/release mpirun -n 4 ./mpi
 *
 * Each process has its own samples: features of +1 and -1, and the value of a linear function of them, with noise. A
 * step follows the mean of all gradients, with the same step size in both runs. gradcodec/mpi.h makes the communicator;
 * this program inserts a counter between the library and MPI.
 *
 * The exit status is 0 only if one bit ends within a tenth of float32's loss and all processes have the same bytes.
 * Also, it may send at most 1/32 of what a ring all-reduce of float32 sends, plus 128 bytes for each chunk. */

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gradcodec/mpi.h>

enum { WEIGHTS = 10003, STEPS = 120, EVERY = 20, POINTS = STEPS / EVERY + 1 };
enum { SAMPLES = 64 }; /* per process and step */
static const float step_size = 0.01f, noise = 0.1f;

static int rank, size;

static void die(const char *call, const char *why)
{
    fprintf(stderr, "mpi: rank %d: %s: %s\n", rank, call, why);
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
}

static void must(gc_status_t status, const char *call)
{
    if (status != GC_STATUS_OK)
        die(call, gc_last_error());
}

/* ---- the counter of sent bytes ----------------------------------------------------------------------------------- */

typedef struct {
    gc_transport_t real;
    uint64_t bytes; /* sent by this process */
} Counter;

static int32_t all_to_all(void *ctx, const void *send, void *recv, size_t bytes_per_rank, DLDevice device, void *stream)
{
    Counter *counter = ctx;
    counter->bytes += (uint64_t)(size - 1) * bytes_per_rank; /* a rank sends nothing to itself */
    return counter->real.all_to_all(counter->real.ctx, send, recv, bytes_per_rank, device, stream);
}

static int32_t all_gather(void *ctx, const void *send, void *recv, size_t bytes_per_rank, DLDevice device, void *stream)
{
    Counter *counter = ctx;
    counter->bytes += (uint64_t)(size - 1) * bytes_per_rank;
    return counter->real.all_gather(counter->real.ctx, send, recv, bytes_per_rank, device, stream);
}

/* ---- the samples, the same on every machine (splitmix64) --------------------------------------------------------- */

static uint64_t random_bits(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static float random_float(uint64_t *state) /* in [-1, 1) */
{
    return (float)(random_bits(state) >> 40) / (float)(1 << 23) - 1.0f;
}

/* Computes the gradient of the mean squared error of this process's samples of a step; training moves w to `truth`. */
static void learn(const float *w, const float *truth, int step, float *gradient)
{
    uint64_t state = (uint64_t)step * 1000003 + (uint64_t)rank + 1;
    memset(gradient, 0, WEIGHTS * sizeof *gradient);
    for (int i = 0; i < SAMPLES; i++) {
        static float feature[WEIGHTS];
        float too_much = noise * random_float(&state);
        uint64_t signs = 0;
        for (int k = 0; k < WEIGHTS; k++, signs >>= 1) {
            if (k % 64 == 0)
                signs = random_bits(&state);
            feature[k] = signs & 1 ? 1.0f : -1.0f;
            too_much += feature[k] * (w[k] - truth[k]);
        }
        for (int k = 0; k < WEIGHTS; k++)
            gradient[k] += feature[k] * too_much / SAMPLES;
    }
}

/* The expected squared error of a new sample without noise: its features are independent, and their squares 1. */
static double loss(const float *w, const float *truth)
{
    double sum = 0.0;
    for (int k = 0; k < WEIGHTS; k++)
        sum += (double)(w[k] - truth[k]) * (w[k] - truth[k]);
    return sum;
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

/* Replaces a gradient by the mean over all processes: by `allreduce`, or by MPI if that is NULL. */
static void average(gc_allreduce_t *allreduce, float *gradient)
{
    int64_t length[] = { WEIGHTS };
    DLTensor tensor = { gradient, { kDLCPU, 0 }, 1, { kDLFloat, 32, 1 }, length, NULL, 0 }, *values[] = { &tensor };
    if (allreduce) {
        must(gc_allreduce_run(allreduce, values, 1, NULL, NULL, NULL), "gc_allreduce_run");
        return;
    }
    MPI_Allreduce(MPI_IN_PLACE, gradient, WEIGHTS, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    for (int k = 0; k < WEIGHTS; k++)
        gradient[k] /= (float)size;
}

static void train(gc_allreduce_t *allreduce, const float *truth, float *w, double losses[POINTS])
{
    static float gradient[WEIGHTS];
    memset(w, 0, WEIGHTS * sizeof *w);
    for (int step = 0; step <= STEPS; step++) {
        if (step % EVERY == 0)
            losses[step / EVERY] = loss(w, truth);
        if (step == STEPS)
            break;
        learn(w, truth, step, gradient);
        average(allreduce, gradient);
        for (int k = 0; k < WEIGHTS; k++)
            w[k] -= step_size * gradient[k];
    }
}

/* Returns 1 if all processes have the same bytes as the first. */
static int the_same(const float *w)
{
    static float first[WEIGHTS];
    int same;
    memcpy(first, w, sizeof first);
    MPI_Bcast(first, WEIGHTS, MPI_FLOAT, 0, MPI_COMM_WORLD);
    same = memcmp(first, w, sizeof first) == 0;
    MPI_Allreduce(MPI_IN_PLACE, &same, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return same;
}

int main(int argc, char **argv)
{
    static float truth[WEIGHTS], w[WEIGHTS];
    double plain[POINTS], onebit[POINTS];
    gc_mpi_t mpi;
    Counter counter;
    gc_transport_t counted;
    gc_comm_t *comm;
    gc_allreduce_t *allreduce;
    const gc_codec_options_t options = {
        .struct_size = sizeof options, .codec = GC_CODEC_ONEBIT, .n_elements = WEIGHTS
    };
    uint64_t state = 0;

    MPI_Init(&argc, &argv);
    if (gc_mpi_init(&mpi, MPI_COMM_WORLD) != MPI_SUCCESS)
        die("gc_mpi_init", "MPI failed");
    rank = mpi.rank, size = mpi.size;
    counter.real = counted = gc_mpi_transport(&mpi);
    counter.bytes = 0;
    counted.ctx = &counter;
    counted.all_to_all = all_to_all;
    counted.all_gather = all_gather;
    must(gc_comm_from_transport(&counted, &comm), "gc_comm_from_transport");
    must(gc_allreduce_create(comm, &options, &allreduce), "gc_allreduce_create");

    for (int k = 0; k < WEIGHTS; k++) /* so that the initial loss is about 1 */
        truth[k] = random_float(&state) * sqrtf(3.0f / WEIGHTS);
    train(NULL, truth, w, plain);
    train(allreduce, truth, w, onebit);
    const int same = the_same(w);

    /* A ring sends 2 * (size - 1) parts of the gradient; a two-shot all-reduce sends as many chunks. */
    const uint64_t hops = 2 * (uint64_t)(size - 1) * STEPS;
    const double ring = (double)hops / size * sizeof(float) * WEIGHTS, most = ring / 32 + 128.0 * (double)hops;
    const int good = same && onebit[POINTS - 1] < 1.1 * plain[POINTS - 1] && (double)counter.bytes <= most;
    if (rank == 0) {
        printf("%5s %10s %10s\n", "step", "float32", "one bit");
        for (int i = 0; i < POINTS; i++)
            printf("%5d %10.5f %10.5f\n", i * EVERY, plain[i], onebit[i]);
        printf("%d ranks, the same bytes: %s\n", size, same ? "yes" : "no");
        printf("bytes that a rank sent: float32 in a ring %.0f, one bit %" PRIu64 ", at most %.0f\n", ring,
               counter.bytes, most);
        printf("RESULT fp32=%.5f onebit=%.5f bytes_fp32=%.0f bytes_onebit=%" PRIu64 "\n", plain[POINTS - 1],
               onebit[POINTS - 1], ring, counter.bytes);
        fflush(stdout);
    }

    gc_allreduce_free(allreduce);
    gc_comm_free(comm);
    gc_mpi_free(&mpi);
    MPI_Finalize();
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
