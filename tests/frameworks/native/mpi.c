/* Tests gradcodec/mpi.h with 4 processes, or any other number. Every rank has the bytes of a group of threads in one
 * process, for any size of a part. Messages of the program's own do not mix with the library's. Errors are returned. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gradcodec/mpi.h>

enum { MOST_RANKS = 64, STEPS = 3 };
static int rank, size;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "rank %d, %s:%d: %s; %s\n", rank, __FILE__, __LINE__, #condition, gc_last_error());       \
            MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);                                                                   \
        }                                                                                                              \
    } while (0)

/* State of a rank: `n` floats of gradient and of worker error, and the server error of its shard. */
typedef struct {
    gc_comm_t *comm;
    int rank;
    int64_t n;
    int64_t shard;
    float *values, *worker, *server;
} Rank;

static DLTensor view(float *data, int64_t *length)
{
    DLTensor tensor;
    memset(&tensor, 0, sizeof tensor);
    tensor.data = data;
    tensor.device.device_type = kDLCPU;
    tensor.ndim = 1;
    tensor.dtype.code = kDLFloat;
    tensor.dtype.bits = 32;
    tensor.dtype.lanes = 1;
    tensor.shape = length;
    return tensor;
}

static void fill(float *values, const Rank *it, int step)
{
    uint32_t state = (uint32_t)(it->rank * 7919 + step * 104729) + (uint32_t)it->n;
    for (int64_t i = 0; i < it->n; i++) {
        state = state * 1664525 + 1013904223;
        values[i] = (float)(int32_t)state / 65536.0f;
    }
}

static float *zeros(int64_t n)
{
    float *memory = calloc((size_t)n + 1, sizeof *memory); /* an extra element, since calloc(0) may be NULL */
    CHECK(memory);
    return memory;
}

/* Runs some steps and hands out the errors that they leave. */
static void *run(void *argument)
{
    Rank *it = argument;
    int64_t n = it->n;
    gc_codec_options_t options;
    gc_allreduce_t *allreduce;

    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.codec = GC_CODEC_ONEBIT;
    options.n_elements = n;
    CHECK(gc_allreduce_create(it->comm, &options, &allreduce) == GC_STATUS_OK);
    it->shard = gc_allreduce_shard_elements(allreduce);
    CHECK(it->shard >= 0);
    it->values = zeros(n), it->worker = zeros(n), it->server = zeros(it->shard);
    DLTensor gradient = view(it->values, &n), worker = view(it->worker, &n), server = view(it->server, &it->shard);
    DLTensor *values[] = { &gradient };
    for (int step = 0; step < STEPS; step++) {
        fill(it->values, it, step);
        CHECK(gc_allreduce_run(allreduce, values, 1, NULL, NULL, NULL) == GC_STATUS_OK);
    }
    CHECK(gc_allreduce_errors_out(allreduce, &worker, &server, NULL) == GC_STATUS_OK);
    gc_allreduce_free(allreduce);
    return NULL;
}

static void drop(Rank *it)
{
    free(it->values), free(it->worker), free(it->server);
}

static int same(const float *a, const float *b, int64_t n)
{
    return memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

/* Compares a rank over MPI with a group of threads. Each process has the whole group and compares memory. */
static void as_a_group(gc_comm_t *comm, int64_t n)
{
    static gc_comm_t *group[MOST_RANKS];
    static Rank threads[MOST_RANKS];
    pthread_t ids[MOST_RANKS];
    Rank ours;
    memset(&ours, 0, sizeof ours);
    ours.comm = comm, ours.rank = rank, ours.n = n;
    run(&ours);
    CHECK(gc_comm_group(size, group) == GC_STATUS_OK);
    for (int k = 0; k < size; k++) {
        threads[k] = ours;
        threads[k].comm = group[k], threads[k].rank = k;
        CHECK(pthread_create(&ids[k], NULL, run, &threads[k]) == 0);
    }
    for (int k = 0; k < size; k++)
        CHECK(pthread_join(ids[k], NULL) == 0);
    CHECK(same(ours.values, threads[rank].values, n));
    CHECK(same(ours.worker, threads[rank].worker, n));
    CHECK(ours.shard == threads[rank].shard && same(ours.server, threads[rank].server, ours.shard));
    CHECK(same(ours.values, threads[0].values, n));
    CHECK(n == 0 || ours.values[0] != 0.0f);
    for (int k = 0; k < size; k++) {
        gc_comm_free(group[k]);
        drop(&threads[k]);
    }
    drop(&ours);
}

/* Checks that an open receive of any message gets only this program's own message. */
static void beside_other_messages(gc_comm_t *comm)
{
    const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    int got = -1;
    MPI_Request request;
    CHECK(MPI_Irecv(&got, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &request) == MPI_SUCCESS);
    as_a_group(comm, 1000);
    CHECK(got == -1);
    CHECK(MPI_Barrier(MPI_COMM_WORLD) == MPI_SUCCESS); /* no rank sends before all have checked `got` */
    CHECK(MPI_Send(&rank, 1, MPI_INT, next, 7, MPI_COMM_WORLD) == MPI_SUCCESS);
    CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS);
    CHECK(got == previous);
}

static void refused_between_groups(void)
{
    gc_mpi_t mpi;
    MPI_Comm half, between;
    if (size < 2)
        return;
    CHECK(MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half) == MPI_SUCCESS);
    CHECK(MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 1, &between) == MPI_SUCCESS);
    CHECK(gc_mpi_init(&mpi, between) == MPI_ERR_COMM);
    CHECK(gc_mpi_free(&mpi) == MPI_SUCCESS); /* nothing to free */
    MPI_Comm_free(&between);
    MPI_Comm_free(&half);
}

int main(int argc, char **argv)
{
    static const int64_t counts[] = { 0, 1, 7, 1023, 1025, 40003 };
    gc_mpi_t mpi;
    gc_comm_t *comm;
    MPI_Errhandler handler;
    MPI_Init(&argc, &argv);
    CHECK(gc_mpi_init(&mpi, MPI_COMM_WORLD) == MPI_SUCCESS);
    rank = mpi.rank, size = mpi.size;
    CHECK(size <= MOST_RANKS);
    CHECK(MPI_Comm_get_errhandler(mpi.comm, &handler) == MPI_SUCCESS && handler == MPI_ERRORS_RETURN);

    const gc_transport_t transport = gc_mpi_transport(&mpi);
    CHECK(gc_comm_from_transport(&transport, &comm) == GC_STATUS_OK);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        as_a_group(comm, counts[i]);
    beside_other_messages(comm);
    refused_between_groups();
    gc_comm_free(comm);
    CHECK(gc_mpi_free(&mpi) == MPI_SUCCESS);
    CHECK(gc_mpi_free(&mpi) == MPI_SUCCESS); /* a second call does no harm */
    if (rank == 0)
        printf("ok: %d ranks over MPI as %d threads, parts of %zu bytes\n", size, size, (size_t)GRADCODEC_MPI_PART);
    MPI_Finalize();
    return EXIT_SUCCESS;
}
