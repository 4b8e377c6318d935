/* A CUDA driver without hardware, for tests. Device memory is host memory, and a launch runs the kernel of that name
 * lane by lane (kernels.cpp). The driver tracks blocks of memory, contexts and streams. It refuses what would fail on a
 * GPU, with a message on stderr: memory that does not exist or belongs to another context, a grid of the wrong size,
 * memory that unfinished work of another stream uses, and destroyed events. A misaligned address ends the process. Work
 * is finished once a caller has waited for it. Environment variables choose the machine and the failures:
 *
 *   FAKE_VERSION   version of the driver, 12000 by default
 *   FAKE_DEVICES   number of devices, 2 by default
 *   FAKE_CAPABILITY  compute capability of all devices, 90 by default
 *   FAKE_FAILURES  "name=code name=code ...": these functions return these codes
 *   FAKE_MEMORY    bytes of memory of each device, unlimited by default
 *   FAKE_PEERS     0: no device can access another device's memory
 *   FAKE_FIRST     index on the machine of the GPU that is device 0; processes may see different GPUs
 *
 * Memory that is shared with another process is a file without a name, which both processes map. A memory handle holds
 * the owner's process id and its file descriptor there; an exported part is the file descriptor itself.
 *
 * -DWITHOUT_LIBRARIES leaves out the functions that drivers before 12.0 lack. fake_...() at the end are for tests. */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kernels.h"

typedef int Result;
typedef struct Context {
    int device;
    unsigned long long id;
} *Context;
typedef struct Stream {
    Context context;
    unsigned long long at_work; /* number of the stream's last work; 0: finished */
    int running;                /* number of running kernels */
    struct Stream *next;
} *Stream;

/* Returns 0 for the handles that every context has: NULL and 1 are the legacy stream, 2 the per-thread stream. */
static int is_created(Stream stream) { return (uintptr_t)stream > 2; }

enum { SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 100, INVALID_DEVICE, INVALID_CONTEXT = 201 };
enum { PEER_ACCESS_UNSUPPORTED = 217, INVALID_HANDLE = 400, NOT_READY = 600 };
enum { ILLEGAL_ADDRESS = 700, MISALIGNED_ADDRESS = 716 };
enum { DEVICES = 8, DEPTH = 16, BLOCKS = 5000 };

static struct Context primary[DEVICES];
static int retained[DEVICES];
static pid_t initialized; /* process that called cuInit; a forked child has no driver */
static long fail_at = -1; /* calls before the one that returns `fail_code`; -1: none */
static int fail_code;
static const char *failed_call = "";
static __thread Context stack[DEPTH];
static __thread int depth;
static __thread int capture_mode;
static size_t in_use[DEVICES];
/* Number of work that is enqueued now. cuEventRecord takes and increments it: work after the event has a higher one. */
static unsigned long long now = 1;
/* Use of memory by unfinished work of a stream. TOLD: an abort flag, which may be written while kernels poll it. */
enum { UNUSED, READ, WRITTEN, TOLD };
struct Use {
    const unsigned char *begin, *end;
    int how;
    Stream stream;
    Context user;
    unsigned long long number;
};
typedef struct Block {
    unsigned char *memory; /* NULL: unused entry */
    size_t bytes;
    Context context; /* NULL: mapped; `access` holds the devices that may use the memory */
    struct Use *uses;
    int in_use;   /* number of `uses` */
    int file;     /* descriptor once the block is shared; 0: not shared */
    int opened;   /* true if another process owns the memory */
    int physical; /* 1 + index in `physicals` of the mapped memory; 0: not mapped */
    unsigned access;
    int kind; /* PLAIN, or what fake_kind() has set */
} Block;
static Block blocks[BLOCKS], pinned_blocks[BLOCKS], reservations[BLOCKS];
enum { PLAIN, OF_POOL, MANAGED, OF_HOST };
static Stream streams; /* created streams */
static int reached[DEVICES][DEVICES]; /* [a][b]: kernels of device a may use memory of device b */
static int libraries, pinned, events, capturing;
static atomic_int hold_frees, held, hold_kernels, refused, held_wait;
static __thread long hold_wait_at = -1; /* calls of cuStreamWaitEvent in this thread before the held one */
static unsigned long long calls, launches, allocations, frees, waits;
static char last_launch[64];

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

static int peers_reach(void) { return number("FAKE_PEERS", 1) != 0; }

/* Returns the code that FAKE_FAILURES gives for a function; 0 if none. */
static Result failure(const char *function) {
    const char *text = getenv("FAKE_FAILURES");
    size_t length = strlen(function);
    for (; text && *text; text = strchr(text, ' '), text += text != NULL) {
        if (!strncmp(text, function, length) && text[length] == '=')
            return (int)strtol(text + length + 1, NULL, 10);
    }
    return 0;
}

/* Serializes the calls of all threads. A forked child does not lock: another thread of the parent may have held the
 * mutex, and the child has no driver. */
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

static int enter(void) { return initialized == getpid() ? pthread_mutex_lock(&one_at_a_time) : -1; }
static void leave(int *entered) {
    if (*entered == 0)
        pthread_mutex_unlock(&one_at_a_time);
}

static Result begin(const char *function) {
    calls++;
    Result said = failure(function);
    if (said)
        return said;
    if (initialized != getpid())
        return NOT_INITIALIZED;
    if (fail_at >= 0 && fail_at-- == 0) {
        failed_call = function;
        return fail_code;
    }
    return SUCCESS;
}

/* First line of a call: locks the driver until the call returns, and may fail here. */
#define MAY_FAIL \
    __attribute__((cleanup(leave))) int entered = enter(); \
    Result begun = begin(__func__); \
    if (begun) \
        return begun

static Context current(void) { return depth ? stack[depth - 1] : NULL; }

/* Like MAY_FAIL, for a call that needs a current context. */
#define MAY_FAIL_IN_CONTEXT \
    MAY_FAIL; \
    if (!current()) \
        return INVALID_CONTEXT

Result cuDriverGetVersion(int *version) {
    *version = (int)number("FAKE_VERSION", 12000);
    return failure(__func__);
}

Result cuInit(unsigned flags) {
    (void)flags;
    Result said = failure(__func__);
    if (said)
        return said;
    if (number("FAKE_DEVICES", 2) == 0)
        return NO_DEVICE;
    initialized = getpid();
    for (int k = 0; k < DEVICES; k++)
        primary[k] = (struct Context){k, 1 + (unsigned long long)k};
    return SUCCESS;
}

Result cuGetErrorName(Result code, const char **name) {
    *name = code == OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED"
            : code == 34              ? "CUDA_ERROR_STUB_LIBRARY"
            : code == 221             ? "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"
            : code == 223             ? "CUDA_ERROR_JIT_COMPILATION_DISABLED"
            : code == INVALID_HANDLE  ? "CUDA_ERROR_INVALID_HANDLE"
            : code == 700             ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : code == 719             ? "CUDA_ERROR_LAUNCH_FAILED"
                                      : NULL;
    return *name ? SUCCESS : INVALID_VALUE;
}

Result cuDeviceGetCount(int *count) {
    MAY_FAIL;
    *count = (int)number("FAKE_DEVICES", 2);
    return SUCCESS;
}

/* Returns a handle that differs from the ordinal, so that tests find code that mixes up the two. */
Result cuDeviceGet(int *device, int ordinal) {
    MAY_FAIL;
    *device = 70 + ordinal;
    return SUCCESS;
}

Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    MAY_FAIL;
    if (device < 70)
        return INVALID_DEVICE;
    enum { MULTIPROCESSOR_COUNT = 16, MAX_THREADS_PER_MULTIPROCESSOR = 39, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };
    int capability = (int)number("FAKE_CAPABILITY", 90);
    switch (attribute) {
    case MULTIPROCESSOR_COUNT: *value = MULTIPROCESSORS; break;
    case MAX_THREADS_PER_MULTIPROCESSOR: *value = THREADS_OF_ONE; break;
    case CAPABILITY_MAJOR: *value = capability / 10; break;
    case CAPABILITY_MINOR: *value = capability % 10; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

Result cuDeviceTotalMem_v2(size_t *bytes, int device) {
    MAY_FAIL;
    if (device < 70)
        return INVALID_DEVICE;
    *bytes = (size_t)number("FAKE_MEMORY", (long)64 << 30);
    return SUCCESS;
}

Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    MAY_FAIL;
    if (device < 70)
        return INVALID_DEVICE;
    *flags = 0, *active = retained[device - 70] > 0;
    return SUCCESS;
}

Result cuDevicePrimaryCtxRetain(Context *context, int device) {
    MAY_FAIL;
    retained[device - 70]++;
    *context = &primary[device - 70];
    return SUCCESS;
}

Result cuCtxGetCurrent(Context *context) {
    MAY_FAIL;
    *context = current();
    return SUCCESS;
}

Result cuCtxPushCurrent_v2(Context context) {
    MAY_FAIL;
    if (depth == DEPTH)
        return INVALID_VALUE;
    stack[depth++] = context;
    return SUCCESS;
}

Result cuCtxPopCurrent_v2(Context *context) {
    MAY_FAIL;
    if (!depth)
        return INVALID_CONTEXT;
    *context = stack[--depth];
    return SUCCESS;
}

Result cuCtxGetDevice(int *device) {
    MAY_FAIL_IN_CONTEXT;
    *device = 70 + current()->device;
    return SUCCESS;
}

/* Work that runs as late as its stream allows, if a test asks for it: when a caller waits for it, or for an event
 * behind it. A caller that does not wait reads the old bytes. */
typedef struct Late {
    Context context;
    Stream stream;
    unsigned long long number;
    void *to, *from; /* of a copy; NULL: a launch */
    size_t bytes;
    char kernel[64];
    unsigned blocks, threads;
    struct Late *next;
    _Alignas(16) unsigned char argument[];
} Late;
static Late *late_work;
static int is_late;

static void do_work(Late *work) {
    if (work->to)
        memcpy(work->to, work->from, work->bytes);
    else
        run_kernel(work->kernel, work->blocks, work->threads, (void *[]){work->argument});
    free(work);
}

/* Runs the late work of a context, or of one of its streams, up to number `until`. */
static void catch_up(Context context, int all, Stream stream, unsigned long long until) {
    for (Late **place = &late_work; *place;) {
        Late *work = *place;
        if (work->context == context && (all || work->stream == stream) && work->number <= until) {
            *place = work->next;
            do_work(work);
        } else {
            place = &work->next;
        }
    }
}

static void forget_uses(Context context, int all, Stream stream, unsigned long long until) {
    for (int k = 0; k < BLOCKS; k++) {
        int left = 0;
        for (int i = 0; i < blocks[k].in_use; i++) {
            const struct Use *one = &blocks[k].uses[i];
            Context of = is_created(one->stream) ? one->stream->context : one->user; /* `user` may be a copy's source */
            if (of != context || !(all || one->stream == stream) || one->number > until)
                blocks[k].uses[left++] = *one;
        }
        blocks[k].in_use = left;
    }
    for (Stream other = streams; other; other = other->next)
        if (other->context == context && (all || other == stream) && other->at_work <= until)
            other->at_work = 0;
}

/* Finishes all work of a context, or of one of its streams. */
static void finish(Context context, int all, Stream stream) {
    catch_up(context, all, stream, now);
    forget_uses(context, all, stream, now);
}

static Stream new_stream(Context context) {
    Stream stream = malloc(sizeof *stream);
    *stream = (struct Stream){.context = context, .next = streams};
    return streams = stream;
}

Result cuCtxSynchronize(void) {
    MAY_FAIL_IN_CONTEXT;
    waits++;
    finish(current(), 1, NULL);
    return SUCCESS;
}

Result cuStreamGetCtx(Stream stream, Context *context) {
    MAY_FAIL;
    *context = stream->context;
    return SUCCESS;
}

Result cuStreamSynchronize(Stream stream) {
    MAY_FAIL;
    if (!is_created(stream) && !current())
        return INVALID_CONTEXT;
    waits++;
    finish(is_created(stream) ? stream->context : current(), 0, stream);
    return SUCCESS;
}

Result cuStreamCreate(Stream *stream, unsigned flags) {
    (void)flags;
    MAY_FAIL_IN_CONTEXT;
    *stream = new_stream(current());
    return SUCCESS;
}

Result cuStreamQuery(Stream stream) {
    MAY_FAIL;
    if ((uintptr_t)stream <= 2) /* at_work is not tracked for the legacy and the per-thread stream */
        return SUCCESS;
    return stream->at_work ? NOT_READY : SUCCESS;
}

Result cuStreamIsCapturing(Stream stream, int *status) {
    (void)stream;
    MAY_FAIL;
    *status = capturing;
    return SUCCESS;
}

Result cuStreamDestroy_v2(Stream stream) {
    MAY_FAIL;
    finish(stream->context, 0, stream); /* afterwards no call could wait for the stream's work */
    Stream *place = &streams;
    while (*place != stream)
        place = &(*place)->next;
    *place = stream->next;
    free(stream);
    return SUCCESS;
}

Result cuThreadExchangeStreamCaptureMode(int *mode) {
    MAY_FAIL;
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

/* Prints an error that would make a GPU's context unusable, and returns its code. */
static Result fault(Result code, const char *what) {
    fprintf(stderr, "libcuda: %s\n", what);
    return code;
}

enum { PAGE = 4096 };

static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static Block *new_block(Block *all) {
    for (int k = 0; k < BLOCKS; k++)
        if (!all[k].memory)
            return &all[k];
    return NULL;
}

static uint64_t start(const Block *block) { return (uint64_t)(uintptr_t)block->memory; }

/* Returns the block that contains an address; NULL if none. */
static Block *among(Block *all, uint64_t address) {
    for (int k = 0; k < BLOCKS; k++)
        if (all[k].memory && address - start(&all[k]) < all[k].bytes)
            return &all[k];
    return NULL;
}

static Block *block_at(uint64_t address) { return among(blocks, address); }

/* Returns the live block that begins at an address; NULL if none. */
static Block *block_from(uint64_t address) {
    Block *block = block_at(address);
    return block && start(block) == address ? block : NULL;
}

static void forget(Block *block) {
    free(block->uses);
    *block = (Block){0};
}

/* Allocates whole pages, which shared memory needs. With EXACT, for AddressSanitizer, allocates just `bytes` bytes. */
static void *device_memory(size_t bytes) {
#ifdef EXACT
    void *memory = NULL;
    return posix_memalign(&memory, 256, bytes) == 0 ? memory : NULL;
#else
    return bytes < PTRDIFF_MAX - PAGE ? aligned_alloc(PAGE, whole_pages(bytes)) : NULL;
#endif
}

Result cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    MAY_FAIL_IN_CONTEXT;
    int device = current()->device;
    if (bytes > (size_t)number("FAKE_MEMORY", INT64_MAX) - in_use[device]) {
        atomic_fetch_add(&refused, 1);
        return OUT_OF_MEMORY;
    }
    Block *block = new_block(blocks);
    void *memory = block ? device_memory(bytes) : NULL;
    if (!memory)
        return OUT_OF_MEMORY;
    *block = (Block){.memory = memory, .bytes = bytes, .context = current()};
    in_use[device] += bytes;
    allocations++;
    *address = (uint64_t)(uintptr_t)memory;
    return SUCCESS;
}

/* Frees memory that cuMemAlloc has made, shared or not. */
static void free_block(Block *block) {
    if (block->file) { /* other processes keep their mappings */
        mmap(block->memory, whole_pages(block->bytes), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        close(block->file);
    }
    free(block->memory);
    in_use[block->context->device] -= block->bytes;
    forget(block);
}

/* Creates a context and makes it current. */
void *fake_enter(int device, unsigned long long id) {
    Context context = malloc(sizeof *context);
    *context = (struct Context){device, id};
    return stack[depth++] = context;
}

/* Creates a context beside the primary ones and makes it current. cuCtxDestroy does not free a context, so its address
 * is not reused, and cuCtxGetId refuses it. */
Result cuCtxCreate_v2(Context *context, unsigned flags, int device) {
    static unsigned long long created = 1000;
    (void)flags;
    MAY_FAIL;
    if (device < 70 || depth == DEPTH)
        return INVALID_DEVICE;
    *context = fake_enter(device - 70, created++);
    return SUCCESS;
}

Result cuCtxDestroy_v2(Context context) {
    MAY_FAIL;
    finish(context, 1, NULL);
    for (int k = 0; k < BLOCKS; k++)
        if (blocks[k].memory && blocks[k].context == context && !blocks[k].opened)
            free_block(&blocks[k]);
    depth -= current() == context;
    context->id = 0;
    return SUCCESS;
}

Result cuMemFree_v2(uint64_t address) {
    MAY_FAIL;
    while (atomic_load(&hold_frees)) { /* like a busy device; other threads' calls go on */
        atomic_store(&held, 1);
        leave(&entered);
        entered = enter();
    }
    if (!current())
        return INVALID_CONTEXT;
    Block *block = block_from(address);
    if (!block || block->opened || block->physical)
        return INVALID_VALUE;
    if (block->context != current())
        return fault(INVALID_VALUE, "freed in another context");
    finish(current(), 1, NULL);
    if (block->in_use)
        return fault(ILLEGAL_ADDRESS, "freed while in use");
    free_block(block);
    frees++;
    return SUCCESS;
}

/* Registers host memory as pinned memory, which GPUs can access. */
void fake_register(void *memory, size_t bytes) {
    *new_block(pinned_blocks) = (Block){.memory = memory, .bytes = bytes};
}

/* Allocates pinned host memory, which kernels access directly. */
Result cuMemHostAlloc(void **place, size_t bytes, unsigned flags) {
    (void)flags;
    MAY_FAIL_IN_CONTEXT;
    void *memory = malloc(bytes);
    if (!memory)
        return OUT_OF_MEMORY;
    fake_register(memory, bytes);
    *place = memory, pinned++;
    return SUCCESS;
}

Result cuMemFreeHost(void *place) {
    MAY_FAIL;
    forget(among(pinned_blocks, (uint64_t)(uintptr_t)place));
    free(place);
    pinned--;
    return SUCCESS;
}

/* An event follows the work of one stream; a wait for the event finishes that work. */
typedef struct Event {
    Context context, of;
    Stream stream;
    unsigned long long number; /* of the last work before the event */
    int is_destroyed;
    struct Event *next; /* next destroyed event; events are never freed, so that uses of destroyed ones are found */
} *Event;
static Event destroyed;

static Result check_event(Event event) {
    return event->is_destroyed ? fault(INVALID_HANDLE, "an event that was destroyed") : SUCCESS;
}

/* Finishes the work before an event. */
static Result reach(Event event) {
    Result result = check_event(event);
    if (result || !event->of)
        return result;
    catch_up(event->of, 0, event->stream, event->number);
    forget_uses(event->of, 0, event->stream, event->number);
    return SUCCESS;
}

Result cuEventCreate(Event *event, unsigned flags) {
    (void)flags;
    MAY_FAIL_IN_CONTEXT;
    *event = malloc(sizeof **event);
    **event = (struct Event){.context = current()};
    events++;
    return SUCCESS;
}

Result cuEventRecord(Event event, Stream stream) {
    MAY_FAIL;
    Context context = is_created(stream) ? stream->context : current();
    Result result = check_event(event);
    if (result)
        return result;
    if (context != event->context)
        return fault(INVALID_VALUE, "an event of another context");
    event->of = context, event->stream = (uintptr_t)stream == 1 ? NULL : stream, event->number = now++;
    return SUCCESS;
}

Result cuStreamWaitEvent(Stream stream, Event event, unsigned flags) {
    (void)stream, (void)flags;
    MAY_FAIL;
    if (hold_wait_at >= 0 && hold_wait_at-- == 0) {
        atomic_store(&held_wait, 1);
        leave(&entered);
        while (atomic_load(&held_wait))
            sched_yield();
        entered = enter();
    }
    return reach(event);
}

Result cuEventSynchronize(Event event) {
    MAY_FAIL_IN_CONTEXT;
    waits++;
    return reach(event);
}

Result cuEventDestroy_v2(Event event) {
    MAY_FAIL;
    Result result = check_event(event);
    if (result)
        return result;
    event->is_destroyed = 1, event->next = destroyed;
    destroyed = event;
    events--;
    return SUCCESS;
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

static int is_on_device(uint64_t address) { return block_at(address) != NULL; }

typedef struct {
    Context context;
    Stream stream;
    int is_copy; /* true: the range is exact; false: a launch, which counts as a use of the whole block */
} Place;

/* Returns the context and the stream of work that is enqueued now. */
static Place place_of(Stream stream, int is_copy) {
    if (is_created(stream))
        stream->at_work = now;
    return (Place){is_created(stream) ? stream->context : current(), (uintptr_t)stream == 1 ? NULL : stream, is_copy};
}

/* Returns whether kernels of another context may use a block. Peer access to a context covers the memory that
 * cuMemAlloc has made there, but not that of pools. */
static int is_reached(Context context, const Block *block) {
    return reached[context->device][block->context->device] && block->kind != OF_POOL;
}

enum { MOST_USES = 64 }; /* uses of a block that are tracked apart; beyond that they are merged */

/* Records a use of a range of a block. Fails if unfinished work of another stream uses it and one of both writes. */
static Result note_use(Place place, int how, Block *block, const unsigned char *begin, size_t bytes) {
    const unsigned char *end = begin + bytes;
    struct Use *own = NULL;
    if (how == TOLD)
        return SUCCESS;
    for (int i = 0; i < block->in_use; i++) {
        struct Use *one = &block->uses[i];
        if (one->stream != place.stream && (one->how == WRITTEN || how == WRITTEN) && begin < one->end && one->begin < end)
            return fault(ILLEGAL_ADDRESS, "memory that unfinished work of another stream uses");
        if (one->stream != place.stream || one->user != place.context || one->how != how)
            continue;
        /* Two uses merge if they touch. With an event between them, the later one must cover the earlier. */
        int meets = begin <= one->end && one->begin <= end, covers = begin <= one->begin && one->end <= end;
        if ((one->number == now ? meets : covers) || block->in_use >= MOST_USES)
            own = one;
    }
    if (own) {
        own->begin = begin < own->begin ? begin : own->begin;
        own->end = end > own->end ? end : own->end;
        own->number = now;
        return SUCCESS;
    }
    block->uses = realloc(block->uses, (size_t)(block->in_use + 1) * sizeof *block->uses);
    block->uses[block->in_use++] = (struct Use){begin, end, how, place.stream, place.context, now};
    return SUCCESS;
}

/* Records a use of memory, which must exist, be accessible, and not be used by unfinished work of other streams. */
static Result use(Place place, int how, const unsigned char *memory, size_t bytes) {
    for (int k = 0; k < BLOCKS; k++) {
        Block *block = &blocks[k];
        if (!block->memory || memory < block->memory || memory >= block->memory + block->bytes)
            continue;
        size_t here = (size_t)(block->memory + block->bytes - memory);
        if (bytes > here && !block->physical)
            continue;
        if (bytes > here) { /* the range goes on in the next mapped block */
            Result result = use(place, how, memory + here, bytes - here);
            if (result)
                return result;
        }
        if (block->physical ? !(block->access >> place.context->device & 1)
                            : block->context != place.context && !is_reached(place.context, block))
            return fault(ILLEGAL_ADDRESS, "memory of another context");
        if (!place.is_copy)
            return note_use(place, how, block, block->memory, block->bytes);
        return note_use(place, how, block, memory, bytes > here ? here : bytes);
    }
    return fault(ILLEGAL_ADDRESS, "memory that is not there");
}

static Late *append(Late **end, Place place, size_t bytes) {
    Late *work = calloc(1, sizeof *work + bytes);
    *work = (Late){.context = place.context, .stream = place.stream, .number = now};
    while (*end)
        end = &(*end)->next;
    return *end = work;
}
static Late *append_launch(Late **end, Place place, const char *kernel, unsigned blocks, unsigned threads,
                           const void *argument, size_t bytes) {
    Late *work = append(end, place, bytes);
    work->blocks = blocks, work->threads = threads;
    snprintf(work->kernel, sizeof work->kernel, "%s", kernel);
    memcpy(work->argument, argument, bytes);
    return work;
}

/* A captured graph: launches that were recorded instead of run. */
typedef struct {
    Late *work;
} Graph;
static Graph *recording;

/* Kernels that were compiled for the host at run time. A kernel's handle points to its name. */
enum { HOST_KERNELS = 1000 };
static struct {
    char name[64];
    void (*run)(unsigned blocks, unsigned threads, void **arguments);
} host_kernel[HOST_KERNELS];
static int host_kernels;

Result cuLaunchKernel(const char *kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                      unsigned shared, Stream stream, void **arguments, void **extra) {
    (void)shared, (void)extra;
    MAY_FAIL;
    if (!is_created(stream) && !current()) /* a kernel of a library takes its context from a stream that has one */
        return INVALID_CONTEXT;
    if (!x || x > INT32_MAX || y != 1 || z != 1 || !threads || ty != 1 || tz != 1)
        return INVALID_VALUE;
    launches++;
    snprintf(last_launch, sizeof last_launch, "%s", kernel);
    Place place = place_of(stream, 0);
    for (int k = 0; k < host_kernels; k++) {
        if (kernel == host_kernel[k].name) {
            catch_up(place.context, 0, place.stream, now);
            host_kernel[k].run(x, threads, arguments);
            return SUCCESS;
        }
    }
    Launch launch = look_at_launch(kernel, x, threads, arguments);
    if (launch.fault)
        return fault(INVALID_VALUE, launch.fault);
    for (int k = 0; k < launch.n_ranges; k++) {
        const unsigned char *memory = launch.ranges[k].memory;
        if (launch.ranges[k].may_be_pinned && !is_on_device((uint64_t)(uintptr_t)memory))
            continue;
        Result result = use(place, launch.ranges[k].is_written ? WRITTEN : READ, memory, launch.ranges[k].bytes);
        if (result)
            return result;
    }
    if (recording && !launch.argument_bytes)
        return fault(INVALID_VALUE, "a launch that cannot be recorded");
    if (recording || (is_late && launch.argument_bytes && !launch.has_barrier)) {
        append_launch(recording ? &recording->work : &late_work, place, kernel, x, threads, arguments[0],
                      launch.argument_bytes);
        return SUCCESS;
    }
    catch_up(place.context, 0, place.stream, now);
    /* Unlocks the driver meanwhile: the kernel may wait for another rank's kernel. */
    if (is_created(stream))
        stream->running++;
    leave(&entered);
    while (is_created(stream) && atomic_load(&hold_kernels)) /* as if queued behind other work */
        sched_yield();
    if (launch.is_run)
        run_kernel(kernel, x, threads, arguments);
    entered = enter();
    if (is_created(stream) && --stream->running == 0)
        catch_up(place.context, 0, place.stream, now);
    return SUCCESS;
}

/* Arguments of a launch that may begin before the previous one ends, and waits for it. Here launches run one by one. */
typedef struct {
    unsigned x, y, z, threads, ty, tz, shared;
    Stream stream;
    const struct {
        int id;
        char pad[4];
        union {
            char bytes[64];
            int allowed;
        } value;
    } *attributes;
    unsigned count;
} LaunchConfig;

Result cuLaunchKernelEx(const LaunchConfig *config, const char *kernel, void **arguments, void **extra) {
    enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
    if (config->count != 1 || config->attributes->id != PROGRAMMATIC_STREAM_SERIALIZATION
        || config->attributes->value.allowed != 1)
        return INVALID_VALUE;
    return cuLaunchKernel(kernel, config->x, config->y, config->z, config->threads, config->ty, config->tz,
                          config->shared, config->stream, arguments, extra);
}

Result cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, Stream stream) {
    MAY_FAIL_IN_CONTEXT;
    void *to = (void *)(uintptr_t)address;
    Place place = place_of(stream, 1);
    Result result = use(place, WRITTEN, to, bytes);
    catch_up(place.context, 0, place.stream, now);
    if (result == SUCCESS)
        memset(to, value, bytes);
    return result;
}

/* Returns whether a copy writes an abort flag (all bytes 0xff), which running kernels poll. */
static int is_told(const unsigned char *from, size_t bytes) {
    for (size_t k = 0; k < bytes; k++)
        if (from[k] != 0xff)
            return 0;
    return 1;
}

static void copy_late(Place place, uint64_t to, uint64_t from, size_t bytes) {
    Late *work = append(&late_work, place, 0);
    work->to = (void *)(uintptr_t)to, work->from = (void *)(uintptr_t)from, work->bytes = bytes;
}

Result cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, Stream stream) {
    MAY_FAIL_IN_CONTEXT;
    Place place = place_of(stream, 1);
    if (!is_on_device(from) && is_on_device(to) && is_told((void *)(uintptr_t)from, bytes)) {
        Result result = use(place, TOLD, (void *)(uintptr_t)to, bytes);
        if (result == SUCCESS && is_created(stream) && stream->running) /* queue the copy behind the running kernel */
            copy_late(place, to, from, bytes);
        else if (result == SUCCESS)
            memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
        return result;
    }
    Result result = is_on_device(from) ? use(place, READ, (void *)(uintptr_t)from, bytes) : SUCCESS;
    if (result == SUCCESS && is_on_device(to)) /* else pinned memory */
        result = use(place, WRITTEN, (void *)(uintptr_t)to, bytes);
    if (result == SUCCESS && is_late)
        copy_late(place, to, from, bytes);
    else if (result == SUCCESS)
        memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
    return result;
}

/* Copies between devices, with or without peer access. */
Result cuMemcpyPeerAsync(uint64_t to, Context to_context, uint64_t from, Context from_context, size_t bytes, Stream stream) {
    MAY_FAIL_IN_CONTEXT;
    Place there = {from_context, stream, 1}, here = place_of(stream, 1);
    Result result = to_context == here.context ? use(there, READ, (void *)(uintptr_t)from, bytes) : INVALID_VALUE;
    if (result == SUCCESS)
        result = use(here, WRITTEN, (void *)(uintptr_t)to, bytes);
    if (result == SUCCESS)
        memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
    return result;
}

Result cuCtxEnablePeerAccess(Context other, unsigned flags) {
    MAY_FAIL_IN_CONTEXT;
    if (flags || other->device == current()->device)
        return INVALID_VALUE;
    if (!peers_reach())
        return PEER_ACCESS_UNSUPPORTED;
    int *is_reached = &reached[current()->device][other->device];
    if (*is_reached)
        return 704;
    *is_reached = 1;
    return SUCCESS;
}

/* Answers the memory type, device, range or access of an address. */
Result cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
    enum { MEMORY_TYPE = 2, DEVICE_ORDINAL = 9, RANGE_START = 11, RANGE_SIZE = 12, ACCESS_FLAGS = 16 };
    MAY_FAIL;
    Block *block = block_at(address);
    if (attribute == ACCESS_FLAGS && block && current()) {
        int may = block->physical ? (int)(block->access >> current()->device & 1)
                                  : block->context == current() || is_reached(current(), block);
        return *(int *)value = may ? 3 : 0, SUCCESS;
    }
    const Block *host = among(pinned_blocks, address);
    if (attribute == RANGE_START && host)
        return *(uint64_t *)value = start(host), SUCCESS;
    if (attribute == RANGE_SIZE && host)
        return *(uint64_t *)value = host->bytes, SUCCESS;
    if (attribute == DEVICE_ORDINAL && block)
        return *(int *)value = block->context->device, SUCCESS;
    if (attribute != MEMORY_TYPE || !(host || block))
        return INVALID_VALUE;
    return *(int *)value = host ? 1 : 2, SUCCESS;
}

/* Both copies are synchronous, and first finish the late work of the context. */
Result cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
    MAY_FAIL_IN_CONTEXT;
    catch_up(current(), 1, NULL, now);
    Result result = use(place_of(NULL, 1), WRITTEN, (void *)(uintptr_t)to, bytes);
    if (result == SUCCESS)
        memcpy((void *)(uintptr_t)to, from, bytes);
    return result;
}

Result cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
    MAY_FAIL_IN_CONTEXT;
    catch_up(current(), 1, NULL, now);
    Result result = use(place_of(NULL, 1), READ, (void *)(uintptr_t)from, bytes);
    if (result == SUCCESS)
        memcpy(to, (void *)(uintptr_t)from, bytes);
    return result;
}

/* ---- memory of several processes --------------------------------------------------------------------------------- */

enum { ALREADY_MAPPED = 208, OPERATING_SYSTEM = 304, NOT_SUPPORTED = 801 };
enum { GRANULE = 2 << 20, PHYSICALS = 1 << 13 };

/* Contents of a memory handle, 64 bytes: names the file of a block. */
typedef struct {
    char magic[8];
    pid_t process;
    int file, device;
    uint64_t inode, bytes;
    char rest[24];
} Name;
_Static_assert(sizeof(Name) == 64, "a handle");

/* Memory of cuMemCreate, which has no address. Its handle is 1000 + its index here. */
static struct Physical {
    int file, device, handles, mappings;
    unsigned types;
    size_t bytes;
} physicals[PHYSICALS];

static int first_gpu(void) { return (int)number("FAKE_FIRST", 0); }

typedef struct {
    char bytes[16];
} Uuid;

Result cuDeviceGetUuid_v2(Uuid *uuid, int device) {
    MAY_FAIL;
    if (device < 70)
        return INVALID_DEVICE;
    *uuid = (Uuid){"stand-in GPU "};
    uuid->bytes[14] = (char)(first_gpu() + device - 70);
    return SUCCESS;
}

Result cuDeviceCanAccessPeer(int *can, int device, int peer) {
    MAY_FAIL;
    if (device < 70 || peer < 70 || device == peer)
        return INVALID_DEVICE;
    *can = peers_reach();
    return SUCCESS;
}

Result cuPointerGetAttributes(unsigned count, const int *attributes, void **data, uint64_t address) {
    MAY_FAIL;
    Block *block = block_at(address);
    for (unsigned k = 0; k < count; k++) {
        int kind = block ? block->kind : PLAIN, value = 0;
        uint64_t pool = kind == OF_POOL;
        if (attributes[k] == 17) { /* pool */
            memcpy(data[k], &pool, sizeof pool);
            continue;
        }
        if (attributes[k] == 8 || attributes[k] == 10) { /* managed; shareable by a 64-byte handle */
            int is_legacy = kind == PLAIN && block && !block->physical;
            *(unsigned char *)data[k] = (unsigned char)(attributes[k] == 8 ? kind == MANAGED : is_legacy);
            continue;
        }
        if (block && attributes[k] == 2) /* type */
            value = kind == OF_HOST ? 1 : 2;
        if (block && attributes[k] == 9) /* device: the owner's for mapped memory, the opener's for an opened handle */
            value = block->physical ? physicals[block->physical - 1].device - first_gpu() : block->context->device;
        memcpy(data[k], &value, sizeof value);
    }
    return SUCCESS;
}

Result cuMemGetAddressRange_v2(uint64_t *first, size_t *bytes, uint64_t address) {
    MAY_FAIL;
    Block *block = block_at(address);
    if (!block)
        return INVALID_VALUE;
    *first = start(block), *bytes = block->bytes;
    return SUCCESS;
}

/* Returns the descriptor of a new memory file, whose link in /proc shows `name`; -1 if that failed. */
static int new_file(const char *name, size_t bytes) {
    int file = memfd_create(name, MFD_CLOEXEC);
    if (file >= 0 && ftruncate(file, (off_t)bytes) != 0)
        close(file), file = -1;
    return file;
}

Result cuIpcGetMemHandle(Name *name, uint64_t address) {
    MAY_FAIL;
    Block *block = block_from(address);
    if (!block || block->opened || block->physical || block->kind)
        return INVALID_VALUE;
    if (block->in_use)
        return fault(INVALID_VALUE, "shared while work on it is unfinished");
    size_t bytes = whole_pages(block->bytes);
    if (!block->file) { /* moves the bytes to a file that is mapped at the same address */
        int file = new_file("stand-in block", bytes);
        if (file < 0)
            return OUT_OF_MEMORY;
        if (pwrite(file, block->memory, block->bytes, 0) != (ssize_t)block->bytes
            || mmap(block->memory, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
            close(file);
            return OUT_OF_MEMORY;
        }
        block->file = file;
    }
    struct stat about;
    fstat(block->file, &about);
    int device = first_gpu() + block->context->device;
    *name = (Name){"stand-in", getpid(), block->file, device, about.st_ino, block->bytes, ""};
    return SUCCESS;
}

Result cuIpcOpenMemHandle_v2(uint64_t *address, Name name, unsigned flags) {
    MAY_FAIL;
    if (!current() || name.process == getpid())
        return INVALID_CONTEXT;
    char path[64];
    struct stat about;
    if (memcmp(name.magic, "stand-in", 8))
        return INVALID_VALUE;
    if (name.device != first_gpu() + current()->device && (!peers_reach() || !(flags & 1)))
        return PEER_ACCESS_UNSUPPORTED;
    for (int k = 0; k < BLOCKS; k++)
        if (blocks[k].memory && blocks[k].opened && fstat(blocks[k].file, &about) == 0 && about.st_ino == name.inode)
            return ALREADY_MAPPED;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)name.process, name.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return INVALID_VALUE;
    Block *block = new_block(blocks);
    if (!block || fstat(file, &about) != 0 || about.st_ino != name.inode || about.st_size < (off_t)name.bytes) {
        close(file);
        return INVALID_VALUE;
    }
    void *memory = mmap(NULL, whole_pages(name.bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
        close(file);
        return OUT_OF_MEMORY;
    }
    *block = (Block){
        .memory = memory, .bytes = name.bytes, .context = current(), .file = file, .opened = 1};
    *address = (uint64_t)(uintptr_t)memory;
    return SUCCESS;
}

Result cuIpcCloseMemHandle(uint64_t address) {
    MAY_FAIL;
    Block *block = block_from(address);
    if (!block || !block->opened)
        return INVALID_VALUE;
    if (block->context != current())
        return fault(INVALID_CONTEXT, "closed in another context");
    if (block->in_use)
        return fault(ILLEGAL_ADDRESS, "closed while work on it is unfinished");
    munmap(block->memory, whole_pages(block->bytes));
    close(block->file);
    forget(block);
    return SUCCESS;
}

typedef struct {
    unsigned type, types, where;
    int device;
    void *rest[2];
} Properties;

static struct Physical *physical_of(uint64_t handle) {
    struct Physical *physical = handle - 1000 < PHYSICALS ? &physicals[handle - 1000] : NULL;
    return physical && physical->handles ? physical : NULL;
}

static Result new_physical(uint64_t *handle, int file, size_t bytes, int device, unsigned types) {
    for (int k = 0; file >= 0 && k < PHYSICALS; k++) {
        if (!physicals[k].bytes) {
            physicals[k] = (struct Physical){file, device, 1, 0, types, bytes};
            *handle = 1000 + (uint64_t)k;
            return SUCCESS;
        }
    }
    if (file >= 0)
        close(file);
    return OUT_OF_MEMORY;
}

static void forget_unused(struct Physical *physical) {
    if (!physical->handles && !physical->mappings) {
        close(physical->file);
        physical->bytes = 0;
    }
}

Result cuMemGetAllocationGranularity(size_t *bytes, const Properties *properties, int option) {
    (void)option;
    MAY_FAIL;
    *bytes = GRANULE;
    return properties->where == 1 ? SUCCESS : INVALID_VALUE;
}

Result cuMemCreate(uint64_t *handle, size_t bytes, const Properties *properties, unsigned long long flags) {
    (void)flags;
    MAY_FAIL;
    if (!bytes || bytes % GRANULE || properties->type != 1 || properties->where != 1)
        return INVALID_VALUE;
    if (bytes > (size_t)number("FAKE_MEMORY", INT64_MAX) - in_use[properties->device])
        return OUT_OF_MEMORY;
    char name[64];
    int device = first_gpu() + properties->device;
    snprintf(name, sizeof name, "stand-in part %d %u", device, properties->types);
    return new_physical(handle, new_file(name, bytes), bytes, device, properties->types);
}

Result cuMemRelease(uint64_t handle) {
    MAY_FAIL;
    struct Physical *physical = physical_of(handle);
    if (!physical)
        return fault(INVALID_VALUE, "released once more");
    physical->handles--;
    forget_unused(physical);
    return SUCCESS;
}

Result cuMemRetainAllocationHandle(uint64_t *handle, void *address) {
    MAY_FAIL;
    Block *block = block_at((uint64_t)(uintptr_t)address);
    if (!block || !block->physical)
        return INVALID_VALUE;
    physicals[block->physical - 1].handles++;
    *handle = 1000 + (uint64_t)block->physical - 1;
    return SUCCESS;
}

Result cuMemGetAllocationPropertiesFromHandle(Properties *properties, uint64_t handle) {
    MAY_FAIL;
    struct Physical *physical = physical_of(handle);
    if (!physical)
        return INVALID_VALUE;
    *properties = (Properties){1, physical->types, 1, physical->device - first_gpu(), {NULL, NULL}};
    return SUCCESS;
}

Result cuMemExportToShareableHandle(int *file, uint64_t handle, int type, unsigned long long flags) {
    (void)flags;
    MAY_FAIL;
    struct Physical *physical = physical_of(handle);
    if (!physical || type != 1 || !(physical->types & 1))
        return INVALID_VALUE;
    for (int k = 0; k < BLOCKS; k++)
        if (blocks[k].memory && blocks[k].physical == physical - physicals + 1 && blocks[k].in_use)
            return fault(INVALID_VALUE, "shared while work on it is unfinished");
    *file = dup(physical->file);
    return *file < 0 ? OPERATING_SYSTEM : SUCCESS;
}

Result cuMemImportFromShareableHandle(uint64_t *handle, void *file, int type) {
    MAY_FAIL;
    char path[64], target[100] = "";
    int device;
    unsigned types;
    struct stat about;
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)file);
    if (type != 1 || readlink(path, target, sizeof target - 1) < 0 || fstat((int)(intptr_t)file, &about) != 0
        || sscanf(target, "/memfd:stand-in part %d %u", &device, &types) != 2)
        return INVALID_VALUE;
    return new_physical(handle, dup((int)(intptr_t)file), (size_t)about.st_size, device, types);
}

Result cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wanted,
                           unsigned long long flags) {
    (void)alignment, (void)wanted, (void)flags;
    MAY_FAIL;
    if (!bytes || bytes % GRANULE)
        return INVALID_VALUE;
    Block *place = new_block(reservations);
    void *memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!place || memory == MAP_FAILED)
        return OUT_OF_MEMORY;
    *place = (Block){.memory = memory, .bytes = bytes};
    *address = start(place);
    return SUCCESS;
}

static int overlaps(const Block *block, uint64_t address, size_t bytes) {
    return block->memory && start(block) < address + bytes && address < start(block) + block->bytes;
}

Result cuMemAddressFree(uint64_t address, size_t bytes) {
    MAY_FAIL;
    for (int k = 0; k < BLOCKS; k++)
        if (overlaps(&blocks[k], address, bytes))
            return fault(INVALID_VALUE, "addresses given back where something is mapped");
    Block *place = among(reservations, address);
    if (!place || start(place) != address || place->bytes != bytes)
        return fault(INVALID_VALUE, "addresses given back that were not reserved so");
    munmap(place->memory, bytes);
    forget(place);
    return SUCCESS;
}

Result cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)flags;
    MAY_FAIL;
    struct Physical *physical = physical_of(handle);
    Block *block = new_block(blocks);
    const Block *reserved = among(reservations, address);
    int is_reserved = reserved && address + bytes <= start(reserved) + reserved->bytes;
    for (int k = 0; k < BLOCKS; k++)
        if (overlaps(&blocks[k], address, bytes))
            return fault(INVALID_VALUE, "mapped where something is");
    if (!physical || !block || offset || !bytes || bytes % GRANULE || bytes > physical->bytes || !is_reserved)
        return INVALID_VALUE;
    void *memory = (void *)(uintptr_t)address;
    if (mmap(memory, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->file, 0) == MAP_FAILED)
        return OUT_OF_MEMORY;
    physical->mappings++;
    *block = (Block){.memory = memory, .bytes = bytes, .physical = (int)(physical - physicals) + 1};
    return SUCCESS;
}

Result cuMemUnmap(uint64_t address, size_t bytes) {
    MAY_FAIL;
    Block *block = block_from(address);
    if (!block || !block->physical || block->bytes != bytes)
        return fault(INVALID_VALUE, "unmapped what was not mapped so");
    if (block->in_use)
        return fault(ILLEGAL_ADDRESS, "unmapped while work on it is unfinished");
    mmap(block->memory, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    struct Physical *physical = &physicals[block->physical - 1];
    physical->mappings--;
    forget_unused(physical);
    forget(block);
    return SUCCESS;
}

typedef struct {
    unsigned where;
    int device;
    unsigned flags;
} Access;

Result cuMemSetAccess(uint64_t address, size_t bytes, const Access *access, size_t count) {
    MAY_FAIL;
    for (size_t k = 0; k < count; k++)
        if (access[k].where != 1 || access[k].flags != 3 || access[k].device < 0 || access[k].device >= DEVICES)
            return INVALID_VALUE;
    for (size_t done = 0; done < bytes;) {
        Block *block = block_from(address + done);
        if (!block || !block->physical)
            return INVALID_VALUE;
        for (size_t k = 0; k < count; k++) {
            if (first_gpu() + access[k].device != physicals[block->physical - 1].device && !peers_reach())
                return NOT_SUPPORTED;
            block->access |= 1u << access[k].device;
        }
        mprotect(block->memory, block->bytes, PROT_READ | PROT_WRITE);
        done += block->bytes;
    }
    return SUCCESS;
}

#ifndef WITHOUT_LIBRARIES
static int host_images;

Result cuCtxGetId(Context context, unsigned long long *id) {
    MAY_FAIL;
    if (!context)
        context = current();
    if (!context || !context->id)
        return INVALID_CONTEXT;
    *id = context->id;
    return SUCCESS;
}

/* Image that libnvrtc_gcc.c makes: a shared object behind this header. */
struct HostImage {
    char magic[8];
    uint64_t bytes;
    char object[];
};

static Result load_host_image(void **library, const struct HostImage *image) {
    char path[64];
    int file = memfd_create("image", MFD_CLOEXEC);
    if (file < 0 || write(file, image->object, image->bytes) != (ssize_t)image->bytes)
        return INVALID_VALUE;
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    *library = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* the file stays open: dlopen takes the same path for the same object */
    if (!*library)
        fprintf(stderr, "%s\n", dlerror());
    libraries += *library != NULL;
    host_images++;
    return *library ? SUCCESS : INVALID_VALUE;
}

Result cuLibraryLoadData(void **library, const void *code, int *o, void **ov, unsigned on, int *p, void **pv, unsigned pn) {
    (void)o, (void)ov, (void)on, (void)p, (void)pv, (void)pn;
    MAY_FAIL;
    if (capture_mode == 2 && !memcmp(code, "host.so", 8))
        return load_host_image(library, code);
    if (*(const uint32_t *)code != 0xba55ed50 || capture_mode != 2) /* magic number of a fatbin */
        return INVALID_VALUE;
    *library = (void *)code;
    libraries++;
    return SUCCESS;
}

Result cuLibraryUnload(void *library) {
    (void)library;
    MAY_FAIL;
    libraries--;
    return SUCCESS;
}

Result cuLibraryGetKernel(const char **kernel, void *library, const char *name) {
    MAY_FAIL;
    char entry[100];
    snprintf(entry, sizeof entry, "_gc_emulate_%s", name);
    void (*run)(unsigned, unsigned, void **) = NULL;
    if (host_images && *(const uint32_t *)library != 0xba55ed50)
        *(void **)&run = dlsym(library, entry); /* POSIX's form; ISO C does not convert void * to a function pointer */
    if (run) {
        if (host_kernels == HOST_KERNELS)
            return 500;
        host_kernel[host_kernels].run = run;
        snprintf(host_kernel[host_kernels].name, sizeof host_kernel[0].name, "%s", name);
        *kernel = host_kernel[host_kernels++].name;
        return SUCCESS;
    }
    if (!library || !is_kernel(name))
        return 500;
    *kernel = name;
    return SUCCESS;
}

Result cuKernelGetFunction(void **function, void *kernel) {
    MAY_FAIL;
    *function = kernel;
    return SUCCESS;
}

Result cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)attribute, (void)function;
    MAY_FAIL;
    *value = 32;
    return SUCCESS;
}
#endif

/* Functions for tests. */
unsigned long long fake_calls(void) { return calls; }
unsigned long long fake_launches(void) { return launches; }
unsigned long long fake_allocations(void) { return allocations; }
unsigned long long fake_frees(void) { return frees; }
unsigned long long fake_waits(void) { return waits; }
/* Makes the driver call after the next `calls` calls return `code`. */
void fake_fail_call(long calls, int code) { fail_at = calls, fail_code = code, failed_call = ""; }
long fake_left(void) { return fail_at; } /* calls before the failing one */
const char *fake_failed_call(void) { return failed_call; }
void fake_hold_frees(int hold) { atomic_store(&hold_frees, hold); }
size_t fake_in_use(int device) { return in_use[device]; }
int fake_refused(void) { return atomic_load(&refused); } /* allocations refused for lack of memory */
void fake_hold_kernels(int hold) { atomic_store(&hold_kernels, hold); } /* on created streams */
int fake_held(void) { return atomic_load(&held); }
/* Holds the cuStreamWaitEvent of this thread after the next `calls` ones until fake_go_on(), as if the thread were
 * preempted. One at a time. */
void fake_hold_wait(long calls) { hold_wait_at = calls; }
int fake_held_wait(void) { return atomic_load(&held_wait); }
void fake_go_on(void) { atomic_store(&held_wait, 0); }
int fake_libraries(void) { return libraries; }
int fake_pinned(void) { return pinned; }
int fake_events(void) { return events; }
/* Returns the number of streams on which a kernel runs. */
int fake_running(void) {
    int count = 0;
    for (Stream stream = streams; stream; stream = stream->next)
        count += stream->running != 0;
    return count;
}
/* Counts: blocks opened from other processes, reserved address ranges, and physical memory that is not released. */
int fake_opened(void) {
    int count = 0;
    for (int k = 0; k < BLOCKS; k++)
        count += blocks[k].memory && blocks[k].opened;
    return count;
}
int fake_reservations(void) {
    int count = 0;
    for (int k = 0; k < BLOCKS; k++)
        count += reservations[k].memory != NULL;
    return count;
}
int fake_physicals(void) {
    int count = 0;
    for (int k = 0; k < PHYSICALS; k++)
        count += physicals[k].bytes > 0;
    return count;
}
/* Sets the origin of a block: 1 from a pool, 2 managed, 3 of the host. */
void fake_kind(uint64_t address, int kind) { block_at(address)->kind = kind; }
void fake_capture(int status) { capturing = status; }
/* Records all launches from here on, until fake_recorded() returns them. Meanwhile only launches may be enqueued. */
void fake_record(void) {
    capturing = 1;
    recording = calloc(1, sizeof *recording);
}
Graph *fake_recorded(void) {
    Graph *graph = recording;
    capturing = 0, recording = NULL;
    return graph;
}
/* Runs the launches of a graph in this thread. */
void fake_replay(const Graph *graph) {
    for (Late *work = graph->work; work; work = work->next)
        run_kernel(work->kernel, work->blocks, work->threads, (void *[]){work->argument});
}
void fake_forget(Graph *graph) {
    for (Late *work = graph->work, *next; work; work = next) {
        next = work->next;
        free(work);
    }
    free(graph);
}
int fake_depth(void) { return depth; }
int fake_capture_mode(void) { return capture_mode; }
int fake_retained(int device) { return retained[device]; }
const char *fake_last_launch(void) { return last_launch; }

void fake_leave(void) { free(stack[--depth]); }
void fake_destroy(void) {
    for (int k = 0; k < BLOCKS; k++)
        if (blocks[k].memory && blocks[k].context == current() && !blocks[k].opened)
            free_block(&blocks[k]);
    fake_leave();
}
/* Finishes all work. */
void fake_finish(void) {
    __attribute__((cleanup(leave), unused)) int entered = enter();
    while (late_work)
        finish(late_work->context, 1, NULL);
    for (int k = 0; k < BLOCKS; k++)
        blocks[k].in_use = 0;
    for (Stream stream = streams; stream; stream = stream->next)
        stream->at_work = 0;
}
/* Sets whether work runs as late as possible. Finishes the work that was put off. */
void fake_late(int late) {
    fake_finish();
    is_late = late;
}
/* Returns the number of blocks that unfinished work uses. */
int fake_pending(void) {
    int pending = 0;
    for (int k = 0; k < BLOCKS; k++)
        pending += blocks[k].memory && blocks[k].in_use;
    return pending;
}
/* Records that work which a library enqueues uses memory. */
Result fake_use(const void *memory, size_t bytes, int is_written, Stream stream) {
    __attribute__((cleanup(leave), unused)) int entered = enter();
    if (!is_created(stream) && !current())
        return INVALID_CONTEXT;
    return use(place_of(stream, 1), is_written ? WRITTEN : READ, memory, bytes);
}
void *fake_stream_here(void) { return new_stream(current()); }
void *fake_stream(int device) { return new_stream(&primary[device]); } /* of the primary context */
