/* Four ranks, threads of one process, fit a model together and average their gradients at one bit per element.
 *
 *   gcc -std=c99 -O2 -Iinclude examples_c/allreduce.c -Ltarget/release -lgradcodec -lm -pthread -o allreduce
 *   LD_LIBRARY_PATH=target/release ./allreduce
 *
 * Least squares: each rank has its own 250 equations in 400 unknowns, all with the solution `truth`. Each rank computes
 * its own gradient, and a step follows the mean of the four. One run uses the mean of float32, the other
 * gc_allreduce_run(). The handle adds the compression error of a gradient to the next one.
 *
 * Between processes only gc_comm_group() changes: gc_comm_from_transport() takes two functions over MPI, gloo or
 * sockets. The exit status is 0 only if all ranks end with the same weights, byte for byte, and close enough to the
 * truth. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gradcodec.h>

enum { RANKS = 4, ROWS = 250, UNKNOWNS = 400, STEPS = 200, EVERY = 25 };
static const float step_size = 0.2f;

static float truth[UNKNOWNS], rows[RANKS][ROWS][UNKNOWNS], sides[RANKS][ROWS];

typedef struct {
    int rank;
    gc_comm_t *comm;
    float weights[UNKNOWNS];
    double distance[STEPS / EVERY + 1]; /* from the truth, relative to the initial distance */
} Rank;

static void must(gc_status_t status, const char *call)
{
    if (status != GC_STATUS_OK) {
        fprintf(stderr, "allreduce: %s: %s: %s\n", call, gc_status_name(status), gc_last_error());
        exit(EXIT_FAILURE); /* the other ranks would wait for this one */
    }
}

/* Returns pseudo-random numbers from -1 to 1, the same on every machine. */
static float chance(void)
{
    static uint64_t state = 1;
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (float)(int32_t)(state >> 32) / 2147483648.0f;
}

static void make_equations(void)
{
    const float width = sqrtf(3.0f / (RANKS * ROWS)); /* makes the mean gradient about as large as the distance */
    for (int i = 0; i < UNKNOWNS; i++)
        truth[i] = chance();
    for (int r = 0; r < RANKS; r++)
        for (int j = 0; j < ROWS; j++)
            for (int i = 0; i < UNKNOWNS; i++) {
                rows[r][j][i] = width * chance();
                sides[r][j] += rows[r][j][i] * truth[i];
            }
}

/* Computes a rank's gradient times the number of ranks, so that the mean is the sum over all equations. */
static void find_gradient(int rank, const float *weights, float *gradient)
{
    memset(gradient, 0, UNKNOWNS * sizeof *gradient);
    for (int j = 0; j < ROWS; j++) {
        const float *row = rows[rank][j];
        float left = -sides[rank][j];
        for (int i = 0; i < UNKNOWNS; i++)
            left += row[i] * weights[i];
        for (int i = 0; i < UNKNOWNS; i++)
            gradient[i] += (float)RANKS * left * row[i];
    }
}

static double distance(const float *weights)
{
    double sum = 0, of_truth = 0;
    for (int i = 0; i < UNKNOWNS; i++) {
        sum += ((double)weights[i] - (double)truth[i]) * ((double)weights[i] - (double)truth[i]);
        of_truth += (double)truth[i] * (double)truth[i];
    }
    return sqrt(sum / of_truth);
}

/* Trains as one rank; runs on its own thread. */
static void *train(void *argument)
{
    Rank *rank = argument;
    float gradient[UNKNOWNS];
    int64_t length = UNKNOWNS;
    DLTensor tensor = {gradient, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, &length, NULL, 0}, *values = &tensor;
    gc_codec_options_t options = {.struct_size = sizeof options, .codec = GC_CODEC_ONEBIT, .n_elements = UNKNOWNS};
    gc_allreduce_t *allreduce;
    must(gc_allreduce_create(rank->comm, &options, &allreduce), "gc_allreduce_create");
    for (int step = 0; step <= STEPS; step++) {
        if (step % EVERY == 0)
            rank->distance[step / EVERY] = distance(rank->weights);
        find_gradient(rank->rank, rank->weights, gradient);
        must(gc_allreduce_run(allreduce, &values, 1, NULL, NULL, NULL), "gc_allreduce_run");
        for (int i = 0; i < UNKNOWNS; i++)
            rank->weights[i] -= step_size * gradient[i];
    }
    gc_allreduce_free(allreduce);
    return NULL;
}

/* Trains with the mean of float32, on this thread alone. */
static void train_in_float32(Rank *all)
{
    float gradient[UNKNOWNS], mean[UNKNOWNS];
    for (int step = 0; step <= STEPS; step++) {
        if (step % EVERY == 0)
            all->distance[step / EVERY] = distance(all->weights);
        memset(mean, 0, sizeof mean);
        for (int r = 0; r < RANKS; r++) {
            find_gradient(r, all->weights, gradient);
            for (int i = 0; i < UNKNOWNS; i++)
                mean[i] += gradient[i] / (float)RANKS;
        }
        for (int i = 0; i < UNKNOWNS; i++)
            all->weights[i] -= step_size * mean[i];
    }
}

int main(void)
{
    static Rank ranks[RANKS], all;
    pthread_t threads[RANKS];
    gc_comm_t *comms[RANKS];
    const int last = STEPS / EVERY;

    make_equations();
    train_in_float32(&all);
    must(gc_comm_group(RANKS, comms), "gc_comm_group");
    for (int r = 0; r < RANKS; r++) {
        ranks[r].rank = r;
        ranks[r].comm = comms[r];
        if (pthread_create(&threads[r], NULL, train, &ranks[r]) != 0) {
            fprintf(stderr, "allreduce: no thread for rank %d\n", r);
            return EXIT_FAILURE;
        }
    }
    for (int r = 0; r < RANKS; r++)
        pthread_join(threads[r], NULL);
    for (int r = 0; r < RANKS; r++)
        gc_comm_free(comms[r]);

    puts(" step  distance from the truth");
    puts("       float32    one bit");
    for (int i = 0; i <= last; i++)
        printf("%5d  %.2e   %.2e\n", i * EVERY, all.distance[i], ranks[0].distance[i]);
    for (int r = 1; r < RANKS; r++)
        if (memcmp(ranks[r].weights, ranks[0].weights, sizeof all.weights) != 0) {
            fprintf(stderr, "allreduce: ranks 0 and %d have other weights\n", r);
            return EXIT_FAILURE;
        }
    if (!(ranks[0].distance[last] < 1e-3 && all.distance[last] < 1e-3)) {
        fprintf(stderr, "allreduce: that is too far away\n");
        return EXIT_FAILURE;
    }
    printf("all %d ranks have the same weights\n", RANKS);
    return EXIT_SUCCESS;
}
