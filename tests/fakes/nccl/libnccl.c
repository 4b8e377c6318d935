/* A fake NCCL among the threads of one process, for tests. A rank is a thread; memory is that of the fake driver
 * (libcuda.c), whose rules for memory, contexts and streams apply here, too. An exchange runs when its group ends, and
 * waits for the other ranks' threads, at most SECONDS. For a non-blocking communicator a thread of its own waits.
 * Environment variables choose the version and the failures:
 *
 *   FAKE_NCCL_VERSION    value of ncclGetVersion, 22803 by default
 *   FAKE_NCCL_FAILURES   "name=code name=code ...": these functions return these codes
 *   FAKE_NCCL_POLLS      polls that give ncclInProgress once work is done; by default a caller's communicators block
 *   FAKE_NCCL_WAITS      1: ncclCommDestroy waits until all ranks have called it, as on one node
 *
 * fake_nccl_...() at the end are for tests. -DOLD leaves out what versions before 2.18 do not have. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int Result;
enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };
enum { RANKS = 16, OPS = 2 * RANKS, SECONDS = 20, UINT8 = 1 };

/* A send or a receive of one rank in a group, with a peer. */
typedef struct {
    const unsigned char *send;
    unsigned char *recv;
    size_t bytes;
    int peer;
} Op;
typedef struct World {
    int size, members, at_barrier, is_broken;
    unsigned long barriers;
    const Op *ops[RANKS];
    int n_ops[RANKS];
    int devices[RANKS];
    uint64_t id;
    struct World *child, *next;
} World;
typedef struct Id Id;
typedef struct Comm {
    World *world;
    int rank, device;
    long polls;    /* polls that still give ncclInProgress */
    Result result; /* result after these polls */
    struct Comm *made, **place; /* result of a split, and where to store it once that is done */
    int is_nonblocking, is_busy; /* busy: its thread works on these fields: */
    int is_made, n_ops;
    Op ops[OPS];
} Comm;
struct Id {
    char bytes[128];
};
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking;
} Config;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static World *worlds; /* being created */
static uint64_t ids;
static __thread char last_error[1024]; /* of this thread; NCCL has one, which mixes up ranks that fail together */
static atomic_int communicators, destroyed, aborted, calls, async_error;
static atomic_long fail_at = -1, fail_code; /* number of the call that fails, in each thread */
static atomic_long failures;                /* number of times that fail_at was set */
static void (*at_abort)(void);
static _Atomic(const char *) failed_call = "";
static __thread long calls_of_thread, failures_seen;
static __thread int depth, n_ops;
static __thread Result group_result;
static __thread Op ops[OPS];
static __thread Comm *group_comm;

/* libcuda.c */
int cuCtxGetDevice(int *device);
int cuCtxPopCurrent_v2(void **context);
int cuCtxPushCurrent_v2(void *context);
int cuDevicePrimaryCtxRetain(void **context, int device);
int fake_use(const void *memory, size_t bytes, int is_written, void *stream);

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

static Result fault(Result code, const char *what) {
    snprintf(last_error, sizeof last_error, "stand-in: %s", what);
    return code;
}

/* Returns the code that a test has set for a call; 0 if none. */
static Result failure(const char *function) {
    const char *text = getenv("FAKE_NCCL_FAILURES");
    size_t length = strlen(function);
    atomic_fetch_add(&calls, 1);
    for (; text && *text; text = strchr(text, ' '), text += text != NULL)
        if (!strncmp(text, function, length) && text[length] == '=')
            return fault((int)strtol(text + length + 1, NULL, 10), function);
    if (failures_seen != atomic_load(&failures))
        failures_seen = atomic_load(&failures), calls_of_thread = 0;
    if (calls_of_thread++ == atomic_load(&fail_at)) {
        atomic_store(&failed_call, function);
        return fault((int)atomic_load(&fail_code), function);
    }
    return 0;
}

#define MAY_FAIL \
    do { \
        Result said = failure(__func__); \
        if (said) \
            return said; \
    } while (0)

/* Refuses a communicator that does not exist or is at work. */
#define USABLE(comm) \
    do { \
        if (!(comm)) \
            return fault(INVALID_ARGUMENT, "no communicator"); \
        if ((comm)->polls > 0 || (comm)->is_busy) \
            return fault(INVALID_ARGUMENT, "used while it is at work"); \
    } while (0)

/* Selects a device like CUDA's runtime: its primary context replaces the current one. */
static Result choose(int device) {
    void *context;
    cuCtxPopCurrent_v2(&context);
    return cuDevicePrimaryCtxRetain(&context, 70 + device) || cuCtxPushCurrent_v2(context) ? CUDA_ERROR : SUCCESS;
}

/* Waits until all ranks of a world are here. Needs the mutex. */
static Result barrier(World *world) {
    struct timespec end;
    unsigned long number = world->barriers;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += SECONDS;
    if (++world->at_barrier == world->size) {
        world->at_barrier = 0, world->barriers++;
        pthread_cond_broadcast(&moved);
    }
    while (world->barriers == number && !world->is_broken) {
        if (pthread_cond_timedwait(&moved, &mutex, &end)) {
            fprintf(stderr, "libnccl: a rank waited %d seconds for another\n", SECONDS);
            world->is_broken = 1;
            pthread_cond_broadcast(&moved);
        }
    }
    return world->barriers == number ? fault(REMOTE_ERROR, "another rank is gone") : SUCCESS;
}

static Comm *new_comm(World *world, int rank, int device) {
    Comm *comm = calloc(1, sizeof *comm);
    *comm = (Comm){.world = world, .rank = rank, .device = device};
    world->members++;
    atomic_fetch_add(&communicators, 1);
    return comm;
}

/* Returns a result, or ncclInProgress if a non-blocking communicator shall give the result later. */
static Result later(Comm *comm, Result result) {
    long polls = number("FAKE_NCCL_POLLS", 0);
    if (polls <= 0)
        return result;
    comm->polls = polls, comm->result = result;
    return IN_PROGRESS;
}

Result ncclGetVersion(int *version) {
    MAY_FAIL;
    *version = (int)number("FAKE_NCCL_VERSION", 22803);
    return SUCCESS;
}

const char *ncclGetErrorString(Result code) {
    static const char *const names[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return code >= 0 && code < 8 ? names[code] : "unknown result code";
}

const char *ncclGetLastError(Comm *comm) {
    (void)comm;
    return last_error;
}

Result ncclGetUniqueId(Id *id) {
    MAY_FAIL;
    pthread_mutex_lock(&mutex);
    uint64_t own = ++ids;
    pthread_mutex_unlock(&mutex);
    for (size_t k = 0; k < sizeof id->bytes; k++)
        id->bytes[k] = (char)(own + 3 * k + 0x85); /* each of the 128 bytes is checked */
    return SUCCESS;
}

/* Returns the world of an id; the first rank creates it. Needs the mutex. */
static World *world_of(uint64_t id, int size) {
    for (World *world = worlds; world; world = world->next)
        if (world->id == id)
            return world;
    World *world = calloc(1, sizeof *world);
    *world = (World){.size = size, .id = id, .next = worlds};
    return worlds = world;
}

/* Waits for all ranks, and checks their devices. Needs the mutex. */
static Result meet(Comm *comm) {
    World *world = comm->world;
    Result result = barrier(world);
    for (int other = 0; other < world->size && !result; other++)
        if (other != comm->rank && world->devices[other] == comm->device)
            result = fault(INVALID_USAGE, "Duplicate GPU detected");
    for (World **place = &worlds; *place; place = &(*place)->next) {
        if (*place == world) {
            *place = world->next;
            break;
        }
    }
    return result;
}

static Result exchange(Comm *comm, const Op *ops, int n_ops);

static void *work(void *argument) {
    Comm *comm = argument;
    pthread_mutex_lock(&mutex);
    comm->result = comm->is_made ? exchange(comm, comm->ops, comm->n_ops) : meet(comm);
    comm->is_made = 1, comm->is_busy = 0;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&mutex);
    return NULL;
}

/* Starts a thread for the work. Needs the mutex. */
static Result begin(Comm *comm) {
    pthread_t thread;
    comm->is_busy = 1, comm->polls = number("FAKE_NCCL_POLLS", 0);
    if (pthread_create(&thread, NULL, work, comm))
        abort();
    pthread_detach(thread);
    return IN_PROGRESS;
}

static Result init(Comm **comm, int size, int rank, const Id *id, int device, int is_nonblocking) {
    pthread_mutex_lock(&mutex);
    World *world = world_of((unsigned char)id->bytes[0], size);
    Comm *made = new_comm(world, rank, device);
    Result result = world->size == size ? SUCCESS : fault(INVALID_ARGUMENT, "another size");
    world->devices[rank] = device;
    *comm = made;
    if (!result && is_nonblocking) {
        made->is_nonblocking = 1;
        result = begin(made);
        pthread_mutex_unlock(&mutex);
        return result;
    }
    if (!result)
        result = meet(made);
    made->is_made = 1;
    pthread_mutex_unlock(&mutex);
    return later(made, result);
}

static int is_nonblocking(const Config *config) { return config->size >= 20 && config->magic == 0xcafebeef && !config->blocking; }

static Result init_rank(Comm **comm, int size, Id id, int rank, int is_nonblocking) {
    int device;
    for (size_t k = 0; k < sizeof id.bytes; k++)
        if (id.bytes[k] != (char)((unsigned char)id.bytes[0] + 3 * k))
            return fault(INVALID_ARGUMENT, "not an id");
    if (size < 1 || size > RANKS || rank < 0 || rank >= size)
        return fault(INVALID_ARGUMENT, "no such rank");
    if (cuCtxGetDevice(&device))
        return fault(CUDA_ERROR, "no current context");
    return choose(device - 70) ? CUDA_ERROR : init(comm, size, rank, &id, device - 70, is_nonblocking);
}

Result ncclCommInitRank(Comm **comm, int size, Id id, int rank) {
    *comm = NULL;
    MAY_FAIL;
    return init_rank(comm, size, id, rank, 0);
}

Result ncclCommInitRankConfig(Comm **comm, int size, Id id, int rank, const Config *config) {
    *comm = NULL;
    MAY_FAIL;
    return init_rank(comm, size, id, rank, is_nonblocking(config));
}

#ifndef OLD
Result ncclCommSplit(Comm *comm, int color, int key, Comm **place, const Config *config) {
    *place = NULL;
    MAY_FAIL;
    USABLE(comm);
    if (color != 0 || key != comm->rank || !is_nonblocking(config))
        return fault(INVALID_ARGUMENT, "a split that is not expected");
    pthread_mutex_lock(&mutex);
    Result result = barrier(comm->world);
    if (!result && !comm->world->child) {
        comm->world->child = calloc(1, sizeof(World));
        comm->world->child->size = comm->world->size;
    }
    Comm *made = result ? NULL : new_comm(comm->world->child, comm->rank, comm->device);
    if (made)
        made->is_nonblocking = made->is_made = 1;
    if (!result)
        result = barrier(comm->world);
    comm->world->child = NULL; /* all ranks have it */
    if (!result)
        result = barrier(comm->world);
    pthread_mutex_unlock(&mutex);
    if (number("FAKE_NCCL_POLLS", 0) <= 0) {
        *place = made;
        return result;
    }
    /* The new communicator is stored when the old one is done, and is then at work itself. */
    comm->made = made, comm->place = place;
    if (made)
        later(made, SUCCESS);
    return later(comm, result);
}
#endif

static void release(Comm *comm) {
    pthread_mutex_lock(&mutex);
    if (--comm->world->members == 0)
        free(comm->world);
    pthread_mutex_unlock(&mutex);
    atomic_fetch_sub(&communicators, 1);
    free(comm);
}

Result ncclCommDestroy(Comm *comm) {
    MAY_FAIL;
    USABLE(comm);
    if (number("FAKE_NCCL_WAITS", 0)) {
        pthread_mutex_lock(&mutex);
        barrier(comm->world);
        pthread_mutex_unlock(&mutex);
    }
    atomic_fetch_add(&destroyed, 1);
    release(comm);
    return SUCCESS;
}

Result ncclCommAbort(Comm *comm) {
    MAY_FAIL;
    if (!comm)
        return fault(INVALID_ARGUMENT, "no communicator");
    pthread_mutex_lock(&mutex);
    comm->world->is_broken = 1;
    pthread_cond_broadcast(&moved);
    while (comm->is_busy)
        pthread_cond_wait(&moved, &mutex);
    pthread_mutex_unlock(&mutex);
    if (at_abort)
        at_abort();
    release(comm);
    atomic_fetch_add(&aborted, 1); /* a test may wait for it, and then count communicators */
    return SUCCESS;
}

Result ncclCommCount(Comm *comm, int *count) {
    MAY_FAIL;
    USABLE(comm);
    *count = comm->world->size;
    return SUCCESS;
}

Result ncclCommCuDevice(Comm *comm, int *device) {
    MAY_FAIL;
    USABLE(comm);
    *device = comm->device;
    return SUCCESS;
}

Result ncclCommUserRank(Comm *comm, int *rank) {
    MAY_FAIL;
    USABLE(comm);
    *rank = comm->rank;
    return SUCCESS;
}

Result ncclCommGetAsyncError(Comm *comm, Result *state) {
    MAY_FAIL;
    if (!comm)
        return fault(INVALID_ARGUMENT, "no communicator");
    pthread_mutex_lock(&mutex); /* wait up to 20 ms, so that tests poll equally often */
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_nsec += 20000000, end.tv_sec += end.tv_nsec / 1000000000, end.tv_nsec %= 1000000000;
    while (comm->is_busy && !pthread_cond_timedwait(&moved, &mutex, &end)) {}
    int is_busy = comm->is_busy;
    pthread_mutex_unlock(&mutex);
    if (is_busy || (comm->polls > 0 && --comm->polls > 0)) {
        *state = IN_PROGRESS;
        return SUCCESS;
    }
    if (comm->place)
        *comm->place = comm->made;
    comm->place = NULL;
    *state = atomic_load(&async_error) ? atomic_load(&async_error) : comm->result;
    return SUCCESS;
}

/* Records an operation for the end of the group, which has one communicator here. */
static Result add(Comm *comm, Op op, int type, void *stream) {
    USABLE(comm);
    if (depth == 0)
        return fault(INVALID_USAGE, "outside of a group");
    if (type != UINT8 || op.peer < 0 || op.peer >= comm->world->size || n_ops == OPS)
        return fault(INVALID_ARGUMENT, "no such type or peer");
    if (fake_use(op.send ? op.send : op.recv, op.bytes, !op.send, stream))
        return fault(CUDA_ERROR, "memory that cannot be used there");
    if (group_comm && group_comm != comm)
        return fault(INVALID_USAGE, "a group of several communicators");
    group_comm = comm;
    ops[n_ops++] = op;
    return SUCCESS;
}

/* Posts this rank's operations, copies what is sent to it, and waits until all ranks have done so. Needs the mutex. */
static Result exchange(Comm *comm, const Op *ops, int n_ops) {
    World *world = comm->world;
    world->ops[comm->rank] = ops, world->n_ops[comm->rank] = n_ops;
    Result result = barrier(world);
    for (int k = 0; k < n_ops && !result; k++) {
        const Op *from = NULL;
        if (!ops[k].recv)
            continue;
        for (int other = 0; other < world->n_ops[ops[k].peer] && !from; other++) {
            const Op *op = &world->ops[ops[k].peer][other];
            if (op->send && op->peer == comm->rank)
                from = op;
        }
        if (!from || from->bytes != ops[k].bytes)
            result = fault(INVALID_USAGE, "a rank receives what none sends");
        else
            memcpy(ops[k].recv, from->send, ops[k].bytes);
    }
    Result all_took = barrier(world);
    return result ? result : all_took;
}

Result ncclGroupStart(void) {
    MAY_FAIL;
    if (depth++ == 0)
        n_ops = 0, group_comm = NULL, group_result = SUCCESS;
    return SUCCESS;
}

static Result end(void) {
    Comm *comm = group_comm;
    if (--depth > 0)
        return SUCCESS;
    if (group_result || !comm)
        return group_result;
    if (choose(comm->device))
        return later(comm, CUDA_ERROR);
    pthread_mutex_lock(&mutex);
    Result result;
    if (comm->is_nonblocking) {
        memcpy(comm->ops, ops, sizeof ops), comm->n_ops = n_ops;
        result = begin(comm);
    } else {
        result = exchange(comm, ops, n_ops);
    }
    pthread_mutex_unlock(&mutex);
    return comm->is_nonblocking ? result : later(comm, result);
}

Result ncclGroupEnd(void) {
    Result said = failure(__func__);
    if (depth == 0)
        return fault(INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    if (said) {
        depth--;
        return said;
    }
    return end();
}

Result ncclSend(const void *send, size_t count, int type, int peer, Comm *comm, void *stream) {
    Result said = failure(__func__);
    if (!said)
        said = add(comm, (Op){send, NULL, count, peer}, type, stream);
    return group_result = said ? said : group_result, said;
}

Result ncclRecv(void *recv, size_t count, int type, int peer, Comm *comm, void *stream) {
    Result said = failure(__func__);
    if (!said)
        said = add(comm, (Op){NULL, recv, count, peer}, type, stream);
    return group_result = said ? said : group_result, said;
}

Result ncclAllGather(const void *send, void *recv, size_t count, int type, Comm *comm, void *stream) {
    MAY_FAIL;
    USABLE(comm);
    if (depth++ == 0)
        n_ops = 0, group_comm = NULL, group_result = SUCCESS;
    for (int peer = 0; peer < comm->world->size && !group_result; peer++) {
        group_result = add(comm, (Op){send, NULL, count, peer}, type, stream);
        unsigned char *to = (unsigned char *)recv + (size_t)peer * count;
        if (!group_result)
            group_result = add(comm, (Op){NULL, to, count, peer}, type, stream);
    }
    return end();
}

/* Functions for tests. */
int fake_nccl_calls(void) { return atomic_load(&calls); }
int fake_nccl_communicators(void) { return atomic_load(&communicators); } /* that exist */
int fake_nccl_destroyed(void) { return atomic_load(&destroyed); }
void fake_nccl_at_abort(void (*called)(void)) { at_abort = called; }
int fake_nccl_aborted(void) { return atomic_load(&aborted); }
int fake_nccl_depth(void) { return depth; } /* of groups of this thread */
/* Makes, in each thread, the call after the next `after` calls return `code`. */
void fake_nccl_fail_call(long after, int code) {
    atomic_store(&fail_at, after), atomic_store(&fail_code, code), atomic_store(&failed_call, "");
    atomic_fetch_add(&failures, 1);
}
const char *fake_nccl_failed_call(void) { return atomic_load(&failed_call); }
void fake_nccl_async_error(int code) { atomic_store(&async_error, code); }
