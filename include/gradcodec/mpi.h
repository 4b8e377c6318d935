/* gradcodec/mpi.h: a communicator of gradcodec.h over MPI. */

/*
 * Sends one bit per element where MPI_Allreduce sends a float, over any MPI that this is compiled with:
 *
 *     #include <gradcodec/mpi.h>
 *
 *     gc_mpi_t mpi;
 *     gc_comm_t *comm;
 *     if (gc_mpi_init(&mpi, MPI_COMM_WORLD) != MPI_SUCCESS)              // on every rank
 *         MPI_Abort(MPI_COMM_WORLD, 1);
 *     const gc_transport_t transport = gc_mpi_transport(&mpi);
 *     if (gc_comm_from_transport(&transport, &comm) != GC_STATUS_OK)
 *         fprintf(stderr, "%s\n", gc_last_error());
 *     // gc_allreduce_create(comm, ...)
 *     gc_comm_free(comm);
 *     gc_mpi_free(&mpi);                                                 // on every rank, before MPI_Finalize
 *
 * C99 or C++11, MPI 3.0 or newer. All of it is compiled into the program: the library does not use MPI. GPU tensors are
 * sent through host memory, so MPI need not support CUDA.
 *
 * Exchanges run on a duplicate of the communicator: they are separate from your messages, and return their errors with
 * any error handler. The thread that calls gradcodec calls MPI: only the main one may, unless MPI_Init_thread() gave
 * MPI_THREAD_SERIALIZED or more. examples_c/mpi.c is a complete program.
 */

#ifndef GRADCODEC_MPI_H
#define GRADCODEC_MPI_H

#include "../gradcodec.h"

#include <mpi.h>
#include <stddef.h>
#include <string.h>

#if MPI_VERSION < 3
#error "gradcodec/mpi.h needs MPI 3.0 or newer"
#endif

/* MPI counts in int: a longer block of a rank is sent in parts of this many bytes, at most INT_MAX. */
#ifndef GRADCODEC_MPI_PART
#define GRADCODEC_MPI_PART ((size_t)1 << 30)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Must not move until the last handle that was made over it is released. */
typedef struct gc_mpi_t {
    /* A duplicate: use it for nothing else. */
    MPI_Comm comm;
    int rank, size;
} gc_mpi_t;

/* Duplicates `comm`, of which every rank calls this. Returns MPI_SUCCESS, or MPI's error and nothing to free.
 * MPI_ERR_COMM: an intercommunicator. Errors before that go to `comm`'s error handler, which aborts by default. */
static inline int gc_mpi_init(gc_mpi_t *mpi, MPI_Comm comm)
{
    int between_groups = 0, code = MPI_Comm_test_inter(comm, &between_groups);
    mpi->comm = MPI_COMM_NULL;
    if (code == MPI_SUCCESS && between_groups)
        code = MPI_ERR_COMM;
    if (code == MPI_SUCCESS)
        code = MPI_Comm_dup(comm, &mpi->comm);
    if (code != MPI_SUCCESS)
        return code;
    code = MPI_Comm_set_errhandler(mpi->comm, MPI_ERRORS_RETURN);
    if (code == MPI_SUCCESS)
        code = MPI_Comm_rank(mpi->comm, &mpi->rank);
    if (code == MPI_SUCCESS)
        code = MPI_Comm_size(mpi->comm, &mpi->size);
    if (code != MPI_SUCCESS)
        MPI_Comm_free(&mpi->comm);
    return code;
}

/* Frees the duplicate. Every rank calls this, after gc_comm_free() and gc_allreduce_free(), before MPI_Finalize(). */
static inline int gc_mpi_free(gc_mpi_t *mpi)
{
    return mpi->comm == MPI_COMM_NULL ? MPI_SUCCESS : MPI_Comm_free(&mpi->comm);
}

/* MPI collective: MPI_Alltoall() or MPI_Allgather(). */
typedef int gc_mpi_collective_t(const void *send, int n_sent, MPI_Datatype sent, void *recv, int n_received,
                                MPI_Datatype received, MPI_Comm comm);

static inline int32_t gc_mpi_exchange(void *ctx, gc_mpi_collective_t *collective, const void *send, void *recv,
                                      size_t bytes_per_rank)
{
    const gc_mpi_t *mpi = (const gc_mpi_t *)ctx;
    size_t done = 0;
    if (bytes_per_rank <= GRADCODEC_MPI_PART)
        return collective(send, (int)bytes_per_rank, MPI_BYTE, recv, (int)bytes_per_rank, MPI_BYTE, mpi->comm);
    /* Exchanges a part of every block at a time; the parts lie a whole block apart. */
    while (done < bytes_per_rank) {
        const size_t left = bytes_per_rank - done, bytes = left < GRADCODEC_MPI_PART ? left : GRADCODEC_MPI_PART;
        MPI_Datatype dense = MPI_DATATYPE_NULL, part = MPI_DATATYPE_NULL;
        int code = MPI_Type_contiguous((int)bytes, MPI_BYTE, &dense);
        if (code == MPI_SUCCESS)
            code = MPI_Type_create_resized(dense, 0, (MPI_Aint)bytes_per_rank, &part);
        if (code == MPI_SUCCESS)
            code = MPI_Type_commit(&part);
        if (code == MPI_SUCCESS)
            code = collective((const char *)send + done, 1, part, (char *)recv + done, 1, part, mpi->comm);
        if (part != MPI_DATATYPE_NULL)
            MPI_Type_free(&part);
        if (dense != MPI_DATATYPE_NULL)
            MPI_Type_free(&dense);
        if (code != MPI_SUCCESS)
            return code;
        done += bytes;
    }
    return MPI_SUCCESS;
}

/* The two functions of a transport. */
static inline int32_t gc_mpi_all_to_all(void *ctx, const void *send, void *recv, size_t bytes_per_rank, DLDevice device,
                                        void *stream)
{
    (void)device, (void)stream; /* host memory always: GC_TRANSPORT_HOST */
    return gc_mpi_exchange(ctx, MPI_Alltoall, send, recv, bytes_per_rank);
}

static inline int32_t gc_mpi_all_gather(void *ctx, const void *send, void *recv, size_t bytes_per_rank, DLDevice device,
                                        void *stream)
{
    (void)device, (void)stream;
    return gc_mpi_exchange(ctx, MPI_Allgather, send, recv, bytes_per_rank);
}

/* Returns the transport for gc_comm_from_transport(). Its functions return MPI's error code, for gc_last_error(). */
static inline gc_transport_t gc_mpi_transport(gc_mpi_t *mpi)
{
    gc_transport_t transport;
    memset(&transport, 0, sizeof transport);
    transport.struct_size = sizeof transport;
    transport.rank = mpi->rank;
    transport.world_size = mpi->size;
    transport.flags = GC_TRANSPORT_HOST;
    transport.ctx = mpi;
    transport.all_to_all = gc_mpi_all_to_all;
    transport.all_gather = gc_mpi_all_gather;
    return transport;
}

#ifdef __cplusplus
}
#endif

#endif
