/* What the hostile programs share: chance, memory, tensors and a model of what is wrong with them, and the judging of
 * calls. hostile.c says how they work. */
#ifndef HOSTILE_H
#define HOSTILE_H

#include "check.h"

#include <inttypes.h>
#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <unistd.h>

__extension__ typedef __int128 wide;

/* ---- chance ------------------------------------------------------------------------------------------------------ */

static uint64_t seed = 20240229, chance_state;

/* splitmix64. */
static inline uint64_t next(void) {
    uint64_t z = chance_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static inline uint64_t below(uint64_t limit) {
    return next() % limit;
}

static inline bool one_in(uint64_t times) {
    return below(times) == 0;
}

/* Numbers at which arithmetic breaks: around 0, around powers of two of either sign, the extremes, and any. */
static inline int64_t wild(void) {
    uint64_t number = one_in(4) ? next() : one_in(3) ? 0 : UINT64_C(1) << below(64);
    return (int64_t)((one_in(2) ? number : 0 - number) + below(5) - 2);
}

/* ---- what is called, and what came of it ------------------------------------------------------------------------- */

#define FUNCTION(name, result, parameters) f_##name,
enum {
#include "../abi/functions.h"
    FUNCTION_COUNT
};
#define FUNCTION(name, result, parameters) #name,
static const char *const function_names[] = {
#include "../abi/functions.h"
};
/* Why a function of the list is not called here, or cannot succeed: [f_gc_name] = "reason". */
static const char *const excuses[FUNCTION_COUNT] = {
    [f_gc_comm_from_nccl] = "wants NCCL: tests/python/test_nccl.py",
    [f_gc_comm_nccl_id] = "wants NCCL",
    [f_gc_comm_from_nccl_id] = "wants NCCL",
    [f_gc_comm_from_peers] = "wants memory of cards: tests/multi_gpu/test_peers.py",
    [f_gc_comm_open_peers] = "wants cards",
    [f_gc_share_send] = "wants a socket: tests/python/test_share.py",
    [f_gc_share_wait] = "wants a socket",
    [f_gc_share_free] = "wants a socket",
    [f_gc_share_receive] = "wants a socket",
    [f_gc_kernel_run] = "wants a card: tests/python/test_compiled.py",
    [f_gc_kernel_prepare] = "wants a compiler: there, too",
};

/* hostile_codec.c calls these, hostile.c all others; either may need a few of the other's. */
static inline bool is_of_codecs(int function) {
    static const char *const begins[] = {"gc_codec_", "gc_onebit_", "gc_comm_", "gc_allreduce_", "gc_compressed_", "gc_shard_",
                                         "gc_peers_"};
    for (size_t i = 0; i < sizeof begins / sizeof *begins; i++)
        if (strncmp(function_names[function], begins[i], strlen(begins[i])) == 0)
            return true;
    return false;
}

static const char *program = "hostile";

enum { STATUSES = 100 };
static uint64_t outcomes[FUNCTION_COUNT][STATUSES], calls;
static volatile int running; /* the function that is being called, for `stop` */

/* A set of statuses: those of the faults that a call has. Empty: it must succeed. */
typedef uint64_t Faults;
#define FAULT(status) ((Faults)1 << GC_STATUS_##status)
#define MAY_SUCCEED FAULT(OK)
#define NO_CUDA (FAULT(DRIVER_UNAVAILABLE) | FAULT(UNSUPPORTED_DEVICE))

/* ---- memory ------------------------------------------------------------------------------------------------------ */

enum { SMALL = 2 << 10, MEDIUM = 32 << 10, BIG = 16 << 20, PAGE = 64 << 10 };
/* Elements of the largest output, in ordinary calls and in big ones: those that several threads work on. */
enum { SMALL_LIMIT = 1 << 16, BIG_LIMIT = 16 << 20 };
enum { CALLS_A_BIG_ONE = 20000 };
/* No machine has this much memory: an output of so many bytes must be refused. Outputs between are not asked for. */
#define NOWHERE ((wide)1 << 47)

typedef struct {
    unsigned char *arena, *base, *shadow;
    size_t size;
} Window;

static Window windows[2];
static int64_t limit;

static inline void map_arenas(void) {
    for (int i = 0; i < 2; i++) {
        void *pages = mmap(NULL, BIG + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(pages != MAP_FAILED);
        windows[i].arena = (unsigned char *)pages + PAGE;
        CHECK(mprotect(windows[i].arena, BIG, PROT_READ | PROT_WRITE) == 0);
        CHECK((windows[i].shadow = malloc(BIG)) != NULL);
    }
}

/* New windows, at one end of their arenas, with new contents: noise, many zeros, and floats of both signs and zeros. */
static inline void prepare(size_t size) {
    uint64_t zeros = below(8), word;
    limit = size == BIG ? BIG_LIMIT : SMALL_LIMIT;
    for (int i = 0; i < 2; i++) {
        windows[i].size = size;
        windows[i].base = one_in(2) ? windows[i].arena : windows[i].arena + BIG - size;
        for (size_t at = 0; at < size; at += sizeof word) {
            word = next();
            if ((word & 7) < zeros)
                word = (word & 8) ? 0 : UINT64_C(1) << (word >> 58);
            else if ((word & 0x78) == 0)
                word = word >> 63 ? UINT64_C(0x8000000080008000) : UINT64_C(0xff800000fc00ff80);
            memcpy(windows[i].base + at, &word, sizeof word);
        }
        memcpy(windows[i].shadow, windows[i].base, size);
    }
}

static inline unsigned char *shadow_of(uintptr_t address) {
    Window *window = &windows[address - (uintptr_t)windows[0].base >= windows[0].size];
    return window->shadow + (address - (uintptr_t)window->base);
}

static inline bool unaligned(const void *pointer) {
    return (uintptr_t)pointer % 8 != 0;
}

/* ---- tensors, and what the model makes of them ------------------------------------------------------------------- */

enum { MAX_DIMS = 64 };

typedef struct {
    DLManagedTensor tensor;
    int64_t shape[MAX_DIMS + 1], strides[MAX_DIMS + 1];
    void *passed; /* what the library gets: the tensor, or an address that must be refused */
    /* The model's. */
    Faults faults;
    bool counted;    /* the sizes could be read and multiplied: `elements` holds */
    int64_t elements;
    bool passed_on;  /* nobody looks at the elements: any dtype and any device will do */
    wide bits;       /* of an element; 0 for a dtype that does not exist */
    size_t size;     /* bytes of an element that is looked at */
    bool is_float;
    int64_t steps[MAX_DIMS]; /* strides, worked out when there are none */
    wide low, high;  /* the addresses that the elements cover */
} Argument;

static const DLDataType dtypes[] = {
    {kDLBool, 8, 1},  {kDLUInt, 8, 1},  {kDLInt, 8, 1},    {kDLInt, 16, 1},   {kDLInt, 32, 1},   {kDLInt, 64, 1},
    {kDLUInt, 16, 1}, {kDLUInt, 32, 1}, {kDLUInt, 64, 1},  {kDLFloat, 16, 1}, {kDLFloat, 32, 1}, {kDLFloat, 64, 1},
    {kDLBfloat, 16, 1}};
enum { INTEGERS = 9, DTYPES = sizeof dtypes / sizeof dtypes[0] };
static const DLDataType uint8 = {kDLUInt, 8, 1};

static inline size_t size_of(DLDataType dtype) {
    for (int i = 0; i < DTYPES; i++)
        if (dtypes[i].code == dtype.code && dtypes[i].bits == dtype.bits && dtype.lanes == 1)
            return dtype.bits / 8;
    return 0;
}

/* The product of sizes that are not negative, cut at 2^63. */
static inline wide product(int ndim, const int64_t *sizes) {
    wide result = 1;
    for (int i = 0; i < ndim; i++)
        if (sizes[i] == 0)
            return 0;
    for (int i = 0; i < ndim && result <= INT64_MAX; i++)
        result *= sizes[i];
    return result <= INT64_MAX ? result : (wide)INT64_MAX + 1;
}

static inline Faults device_faults(const DLTensor *t) {
    if (t->device.device_type == kDLCUDA || t->device.device_type == kDLCUDAManaged)
        return NO_CUDA;
    return t->device.device_type == kDLCPU || t->device.device_type == kDLCUDAHost ? 0 : FAULT(UNSUPPORTED_DEVICE);
}

/* Whether data is an address there, to which the offset can be added. */
static inline bool has_addresses(const DLTensor *t) {
    return device_faults(t) != FAULT(UNSUPPORTED_DEVICE);
}

/* Works out what is wrong with a descriptor, as the library's header has it, or else where its elements lie. */
static inline void understand(Argument *a) {
    const DLTensor *t = &a->tensor.dl_tensor;
    a->faults = 0;
    a->counted = false;
    a->elements = 0;
    a->size = size_of(t->dtype);
    a->bits = a->passed_on ? t->dtype.bits * t->dtype.lanes : 8 * (int)a->size;
    a->is_float = t->dtype.code == kDLFloat || t->dtype.code == kDLBfloat;
    a->low = a->high = 0;
    if (a->passed == NULL || unaligned(a->passed)) {
        a->faults = FAULT(INVALID_ARGUMENT);
        return;
    }
    if (!a->passed_on)
        a->faults |= device_faults(t);
    if (a->bits == 0)
        a->faults |= FAULT(UNSUPPORTED_DTYPE);
    bool lengths = t->ndim == 0 || (t->shape != NULL && !unaligned(t->shape) && !unaligned(t->strides));
    for (int i = 0; lengths && i < t->ndim; i++)
        lengths = t->shape[i] >= 0;
    if (t->ndim < 0 || !lengths) {
        a->faults |= FAULT(INVALID_ARGUMENT);
        return;
    }
    wide elements = product(t->ndim, t->shape), step = 1;
    if (elements > INT64_MAX) {
        a->faults |= FAULT(SIZE_OVERFLOW);
        return;
    }
    a->counted = true;
    a->elements = (int64_t)elements;
    for (int i = t->ndim - 1; i >= 0 && elements > 0; step *= t->shape[i--])
        a->steps[i] = t->strides ? t->strides[i] : (int64_t)step;
    if (elements == 0 || a->bits == 0)
        return;
    if (t->data == NULL) {
        a->faults |= FAULT(INVALID_ARGUMENT);
        return;
    }
    a->low = 0;
    a->high = a->bits;
    for (int i = t->ndim - 1; i >= 0; i--) {
        wide reach = (wide)(t->shape[i] - 1) * a->steps[i];
        /* Beyond any address, and small enough to be multiplied and added up. */
        wide most = (wide)1 << 70;
        reach = (reach > most ? most : reach < -most ? -most : reach) * a->bits;
        *(reach < 0 ? &a->low : &a->high) += reach;
    }
    if (a->high - a->low > (wide)INT64_MAX * 8)
        a->faults |= FAULT(SIZE_OVERFLOW);
    /* From bits to whole bytes, downwards and upwards. */
    wide first = (wide)(uintptr_t)t->data + t->byte_offset;
    a->low = first + (a->low - (a->low < 0 ? 7 : 0)) / 8;
    a->high = first + (a->high + 7) / 8;
    if (has_addresses(t) && (a->low < 0 || a->high > (wide)UINT64_MAX))
        a->faults |= FAULT(SIZE_OVERFLOW);
}

/* Whether the memory that a tensor without faults describes is there. */
static inline bool there(const Argument *a) {
    for (int i = 0; i < 2; i++) {
        wide base = (wide)(uintptr_t)windows[i].base;
        if (a->low >= base && a->high <= base + (wide)windows[i].size)
            return true;
    }
    return a->elements == 0;
}

/* Walks the elements in C order. */
typedef struct {
    const Argument *a;
    uintptr_t at;
    int64_t index[MAX_DIMS];
} Walk;

static inline Walk walk(const Argument *a) {
    Walk w;
    w.a = a;
    w.at = (uintptr_t)a->tensor.dl_tensor.data + a->tensor.dl_tensor.byte_offset;
    memset(w.index, 0, sizeof w.index[0] * (size_t)a->tensor.dl_tensor.ndim);
    return w;
}

static inline void step(Walk *w) {
    const DLTensor *t = &w->a->tensor.dl_tensor;
    for (int i = t->ndim - 1; i >= 0; i--) {
        uintptr_t stride = (uintptr_t)w->a->steps[i] * w->a->size;
        w->at += stride;
        if (++w->index[i] < t->shape[i])
            return;
        w->at -= stride * (uintptr_t)t->shape[i];
        w->index[i] = 0;
    }
}

static inline bool intersect(const Argument *a, const Argument *b) {
    return a->low < b->high && b->low < a->high;
}

/* Whether two elements lie in one place. */
static inline bool overlaps_itself(const Argument *a) {
    static unsigned char taken[BIG];
    Walk w = walk(a);
    bool found = false;
    memset(taken, 0, (size_t)(a->high - a->low));
    for (int64_t i = 0; i < a->elements && !found; i++, step(&w)) {
        unsigned char *place = &taken[w.at - (uintptr_t)a->low];
        found = *place != 0;
        *place = 1;
    }
    return found;
}

/* Sizes of 1 may have any stride, and a tensor without elements always is. */
static inline bool is_contiguous(const Argument *a) {
    wide expected = 1;
    for (int i = a->tensor.dl_tensor.ndim - 1; i >= 0 && a->elements > 0; i--) {
        if (a->tensor.dl_tensor.shape[i] != 1 && a->steps[i] != expected)
            return false;
        expected *= a->tensor.dl_tensor.shape[i];
    }
    return true;
}

/* ---- making tensors ---------------------------------------------------------------------------------------------- */

static inline void random_shape(Argument *a, int64_t budget) {
    static const int64_t caps[] = {2, 3, 9, 20, 70, 600, INT64_MAX};
    static const int ndims[] = {0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 5, 6};
    int ndim = one_in(50) ? 1 + (int)below(MAX_DIMS) : ndims[below(16)];
    for (int i = 0; i < ndim; i++) {
        int64_t cap = ndim > 6 ? 1 + (int64_t)one_in(8) : caps[below(7)];
        cap = cap < budget ? cap : budget;
        a->shape[i] = limit == BIG_LIMIT && one_in(2) ? budget : 1 + (int64_t)below((uint64_t)cap);
        budget /= a->shape[i];
    }
    for (int i = ndim - 1; i > 0; i--) {
        int other = (int)below((uint64_t)i + 1);
        int64_t size = a->shape[i];
        a->shape[i] = a->shape[other];
        a->shape[other] = size;
    }
    /* Nothing at all, and how often: beside a 0, the other sizes have no limit, nor do they all together. */
    if (ndim > 0 && one_in(ndim > 6 ? 3 : 25)) {
        int kind = (int)below(3);
        for (int i = 0; i < ndim; i++)
            a->shape[i] = kind == 0 || one_in(2) ? 2 : kind == 1 ? wild() & INT64_MAX : a->shape[i];
        a->shape[one_in(2) ? (uint64_t)ndim - 1 : below((uint64_t)ndim)] = 0;
    }
    a->tensor.dl_tensor.ndim = ndim;
}

enum { COMPACT, APART, ANYHOW };

/* Strides of one of these kinds: C order; any order and direction, with gaps, never two elements in one place; any. */
static inline void random_strides(Argument *a, int kind) {
    int ndim = a->tensor.dl_tensor.ndim, order[MAX_DIMS];
    int64_t stride = 1;
    for (int i = 0; i < ndim; i++)
        order[i] = i;
    for (int i = ndim - 1; i >= 0; i--) {
        if (kind == APART) {
            int other = (int)below((uint64_t)i + 1), swapped = order[i];
            order[i] = order[other];
            order[other] = swapped;
            stride += one_in(3) ? (int64_t)below(3) : 0;
        }
        a->strides[order[i]] = kind == ANYHOW ? (int64_t)below(41) - 20 : kind == APART && one_in(3) ? -stride : stride;
        stride *= a->shape[order[i]];
        if (a->shape[order[i]] == 1 && one_in(4))
            a->strides[order[i]] = wild();
    }
}

/* The bytes that the elements cover, and how far below element 0 they begin. */
static inline wide covered(Argument *a, wide *below_first) {
    a->tensor.dl_tensor.data = a; /* any address in the middle of memory */
    a->tensor.dl_tensor.byte_offset = 0;
    understand(a);
    *below_first = (wide)(uintptr_t)a - a->low;
    return a->high - a->low;
}

/* A tensor that is in order, in a window. `ndim` -1: of any shape of at most `budget` elements. */
static inline void make(Argument *a, DLDataType dtype, int ndim, const int64_t *shape, int64_t budget,
                        const Window *window, bool output) {
    static const int kinds[2][8] = {{COMPACT, COMPACT, COMPACT, COMPACT, APART, APART, ANYHOW, ANYHOW},
                                    {COMPACT, COMPACT, COMPACT, COMPACT, APART, APART, APART, ANYHOW}};
    DLTensor *t = &a->tensor.dl_tensor;
    wide bytes, below_first;
    memset(&a->tensor, 0xa5, sizeof a->tensor);
    a->passed = &a->tensor;
    a->passed_on = false;
    t->device.device_type = one_in(8) ? kDLCUDAHost : kDLCPU;
    t->device.device_id = one_in(8) ? (int32_t)next() : 0;
    t->dtype = dtype;
    t->shape = a->shape;
    if (ndim < 0) {
        random_shape(a, budget);
    } else {
        t->ndim = ndim;
        memmove(a->shape, shape, sizeof *shape * (size_t)ndim);
    }
    if (t->ndim == 0 && one_in(2))
        t->shape = NULL;
    if (product(t->ndim, a->shape) == 0) {
        for (int i = 0; i < t->ndim; i++)
            a->strides[i] = wild();
        t->strides = one_in(2) ? NULL : a->strides;
        t->data = one_in(2) ? NULL : one_in(2) ? window->base : (void *)(uintptr_t)next();
        t->byte_offset = one_in(2) ? 0 : next();
        understand(a);
        return;
    }
    int kind = kinds[output][below(8)];
    t->strides = a->strides;
    random_strides(a, kind);
    while (kind != COMPACT && covered(a, &below_first) > (wide)window->size) {
        /* Strides near 0 fit sooner; those that must keep elements apart only fit without gaps. */
        if (kind == ANYHOW && !one_in(8))
            for (int i = 0; i < t->ndim; i++)
                a->strides[i] /= 2;
        else
            random_strides(a, kind = COMPACT);
    }
    if (kind == COMPACT && one_in(2))
        t->strides = NULL;
    bytes = covered(a, &below_first);
    CHECK(bytes <= (wide)window->size);
    /* At the window's beginning, at its end, or between. */
    uint64_t room = (uint64_t)((wide)window->size - bytes), gap = one_in(3) ? 0 : one_in(2) ? room : below(room + 1);
    uintptr_t first = (uintptr_t)window->base + gap + (uintptr_t)below_first;
    t->byte_offset = !one_in(4) ? 0 : one_in(8) ? first - 8 : below(first - (uintptr_t)window->base + 1);
    t->data = (void *)(first - t->byte_offset);
    understand(a);
    CHECK(a->faults == 0 && there(a));
}

/* Makes one thing different. Whether wrong, `understand` finds out. */
static inline void spoil_once(Argument *a) {
    static const int types[] = {kDLCUDA, kDLCUDAManaged, kDLOpenCL, kDLROCM, 0, -1, kDLCPU};
    DLTensor *t = &a->tensor.dl_tensor;
    int axis = t->ndim > 0 ? (int)below((uint64_t)t->ndim) : 0;
    switch (below(15)) {
    case 0: t->ndim = one_in(2) ? -1 : INT32_MIN + (int32_t)below(1000); break;
    case 1: t->shape = NULL; break;
    case 2: t->shape = (int64_t *)(void *)((char *)a->shape + 1 + below(7)); break;
    case 3: t->strides = (int64_t *)(void *)((char *)a->strides + 1 + below(7)); break;
    case 4: a->shape[axis] = wild(); break;
    case 5: t->data = NULL; break;
    case 6:
        t->dtype.code = one_in(2) ? t->dtype.code : (uint8_t)next();
        t->dtype.bits = one_in(2) ? t->dtype.bits : one_in(2) ? (uint8_t)(1 << below(8)) : (uint8_t)next();
        t->dtype.lanes = one_in(2) ? t->dtype.lanes : one_in(2) ? (uint16_t)below(5) : (uint16_t)next();
        break;
    case 7:
        t->device.device_type = one_in(8) ? (DLDeviceType)next() : (DLDeviceType)types[below(7)];
        t->device.device_id = 1000 + (int32_t)below(1000); /* a GPU that no machine has */
        break;
    case 8:
        if (t->strides == NULL && t->ndim >= 0)
            random_strides(a, COMPACT);
        t->strides = a->strides;
        a->strides[axis] = wild();
        break;
    case 9: t->byte_offset = one_in(2) ? next() : UINT64_MAX - below(100); break;
    case 10: t->ndim -= t->ndim > 0; break;
    case 11: a->shape[axis] += one_in(2) ? 1 : -1; break;
    case 12:
        if (t->ndim >= 0 && t->ndim < MAX_DIMS) {
            a->strides[t->ndim] = wild();
            a->shape[t->ndim++] = 1;
        }
        break;
    case 13: a->passed = NULL; break;
    case 14: a->passed = (char *)&a->tensor + 1 + below(7); break;
    }
    understand(a);
}

/* Spoils a tensor now and then, but never so that memory is missing behind a descriptor that holds together. */
static inline void spoil(Argument *a) {
    while (limit != BIG_LIMIT && one_in(6)) {
        Argument before = *a;
        spoil_once(a);
        if (a->faults == 0 && !there(a))
            *a = before;
    }
}

/* ---- the model of packing and unpacking -------------------------------------------------------------------------- */

static unsigned char *bits, *packed; /* one bit a byte; bytes */

/* x < 0, for any of the floats. */
static inline bool below_zero(const unsigned char *element, DLDataType dtype) {
    uint64_t word = 0;
    double number64;
    float number32;
    memcpy(&word, element, dtype.bits / 8u);
    if (dtype.bits == 64) {
        memcpy(&number64, &word, sizeof number64);
        return number64 < 0;
    }
    if (dtype.bits == 16 && dtype.code == kDLFloat) /* nan has more than infinity's 0x7c00, and zero nothing */
        return word >> 15 == 1 && (word & 0x7fff) != 0 && (word & 0x7fff) <= 0x7c00;
    uint32_t half = (uint32_t)(dtype.bits == 16 ? word << 16 : word); /* bfloat16 is the upper half of float32 */
    memcpy(&number32, &half, sizeof number32);
    return number32 < 0;
}

static inline void read_bits(const Argument *src, bool signs) {
    static const unsigned char zero[8];
    Walk w = walk(src);
    for (int64_t i = 0; i < src->elements; i++, step(&w)) {
        const unsigned char *element = (const unsigned char *)w.at;
        bits[i] = signs ? !below_zero(element, src->tensor.dl_tensor.dtype) : memcmp(element, zero, src->size) != 0;
    }
}

static inline void read_bytes(const Argument *src) {
    Walk w = walk(src);
    for (int64_t i = 0; i < src->elements; i++, step(&w))
        packed[i] = *(const unsigned char *)w.at;
}

static inline void write_bits(const Argument *dst) {
    static const double one64 = 1;
    static const float one32 = 1;
    unsigned char one[8] = {1, 0, 0, 0, 0, 0, 0, 0};
    DLDataType dtype = dst->tensor.dl_tensor.dtype;
    if (dst->is_float && dtype.bits == 64)
        memcpy(one, &one64, 8);
    else if (dst->is_float && dtype.bits == 32)
        memcpy(one, &one32, 4);
    else if (dst->is_float)
        memcpy(one, dtype.code == kDLFloat ? "\x00\x3c" : "\x80\x3f", 2);
    Walk w = walk(dst);
    for (int64_t i = 0; i < dst->elements; i++, step(&w)) {
        memset(shadow_of(w.at), 0, dst->size);
        if (bits[i])
            memcpy(shadow_of(w.at), one, dst->size);
    }
}

/* Whether there is a -1. */
static inline bool is_signed(DLDataType dtype) {
    return dtype.code == kDLFloat || dtype.code == kDLBfloat || dtype.code == kDLInt;
}

/* A scale, or minus it, in a dtype; of other scales than 1 only in float32 and float64. A NaN is always the same. */
static inline void write_sign(unsigned char *at, DLDataType dtype, bool bit, float scale) {
    if (dtype.code == kDLInt) {
        memset(at, bit ? 0 : 0xff, dtype.bits / 8);
        at[0] = bit ? 1 : 0xff;
    } else if (dtype.bits == 16) {
        memcpy(at, dtype.code == kDLFloat ? "\x00\x3c" : "\x80\x3f", 2);
        at[1] = (unsigned char)(at[1] | (bit ? 0 : 0x80));
    } else {
        uint32_t single;
        memcpy(&single, &scale, 4);
        bool nan = (single & 0x7fffffff) > 0x7f800000;
        double wide = bit ? scale : -scale;
        float narrow = bit ? scale : -scale;
        uint64_t quiet64 = 0x7ff8000000000000;
        uint32_t quiet32 = 0x7fc00000;
        void *as64 = nan ? (void *)&quiet64 : (void *)&wide, *as32 = nan ? (void *)&quiet32 : (void *)&narrow;
        memcpy(at, dtype.bits == 64 ? as64 : as32, dtype.bits / 8);
    }
}

static inline void write_bytes(const Argument *dst) {
    Walk w = walk(dst);
    for (int64_t i = 0; i < dst->elements; i++, step(&w))
        *shadow_of(w.at) = packed[i];
}

/* Rows of `n` bits and of `m` bytes, `inner` of them side by side, `outer` times. */
typedef struct {
    int64_t outer, inner, n, m;
} Rows;

static inline unsigned char bit_mask(int32_t order, int64_t bit) {
    return (unsigned char)(order == GC_BIT_ORDER_BIG ? 0x80 >> bit % 8 : 1 << bit % 8);
}

static inline void pack_model(Rows rows, int32_t order) {
    memset(packed, 0, (size_t)(rows.outer * rows.m * rows.inner));
    for (int64_t o = 0; o < rows.outer; o++)
        for (int64_t bit = 0; bit < rows.n; bit++)
            for (int64_t i = 0; i < rows.inner; i++)
                if (bits[(o * rows.n + bit) * rows.inner + i])
                    packed[(o * rows.m + bit / 8) * rows.inner + i] |= bit_mask(order, bit);
}

static inline void unpack_model(Rows rows, int32_t order) {
    for (int64_t o = 0; o < rows.outer; o++)
        for (int64_t bit = 0; bit < rows.n; bit++)
            for (int64_t i = 0; i < rows.inner; i++)
                bits[(o * rows.n + bit) * rows.inner + i] =
                    bit / 8 < rows.m &&
                    (packed[(o * rows.m + bit / 8) * rows.inner + i] & bit_mask(order, bit)) != 0;
}

static inline int64_t bytes_for(int64_t count) {
    return count / 8 + (count % 8 != 0);
}

static inline int64_t chunk_bytes(int64_t elements, uint64_t n_chunks) {
    uint64_t bytes = (uint64_t)bytes_for(elements);
    return (int64_t)(bytes / n_chunks + (bytes % n_chunks != 0));
}

/* ---- judging ----------------------------------------------------------------------------------------------------- */

static Argument src, dst, chunk[12];
static DLManagedTensor untouched;
#define UNTOUCHED (&untouched)

static inline void show(const char *name, const Argument *a) {
    const DLTensor *t = &a->tensor.dl_tensor;
    fprintf(stderr, "  %s at %p: data %p + %" PRIu64 ", device %d:%d, dtype %d %d %d, ndim %d, shape %p [", name,
            a->passed, t->data, t->byte_offset, (int)t->device.device_type, t->device.device_id, t->dtype.code,
            t->dtype.bits, t->dtype.lanes, t->ndim, (void *)t->shape);
    for (int i = 0; i < t->ndim; i++)
        fprintf(stderr, " %" PRId64, a->shape[i]);
    fprintf(stderr, " ], strides %p [", (void *)t->strides);
    for (int i = 0; i < t->ndim; i++)
        fprintf(stderr, " %" PRId64, a->strides[i]);
    fprintf(stderr, " ]\n");
}

static inline void fail(const char *why) {
    fprintf(stderr, "%s: call %" PRIu64 " of seed %" PRIu64 ", %s: %s\n  last error: %s\n", program, calls, seed,
            function_names[running], why, gc_last_error());
    show("src", &src);
    show("dst", &dst);
    for (int i = 0; i < 3; i++)
        show("chunk", &chunk[i]);
    exit(1);
}

#define EXPECT(condition) \
    do { \
        if (!(condition)) \
            fail(#condition); \
    } while (0)

/* A function is about to be called. */
static inline void begin(int function) {
    running = function;
    calls++;
    if (calls % 256 == 0)
        alarm(60); /* whoever takes longer than this for 256 calls is stuck */
}

/* It has returned: with a status of one of its faults, and a sentence, or in success. True for success. */
static inline bool judge(gc_status_t status, Faults faults) {
    static char last_error[512];
    char why[100];
    bool right = status >= 0 && status < 64 && (faults ? (faults >> status & 1) != 0 : status == GC_STATUS_OK);
    if (!right) {
        snprintf(why, sizeof why, "gives %s, not one of %#" PRIx64, gc_status_name(status), faults ? faults : 1);
        fail(why);
    }
    outcomes[running][status]++;
    size_t length = strlen(gc_last_error());
    EXPECT(length <= 500 && (status == GC_STATUS_OK || length > 0));
    EXPECT(status != GC_STATUS_OK || strcmp(last_error, gc_last_error()) == 0);
    memcpy(last_error, gc_last_error(), length + 1);
    return status == GC_STATUS_OK;
}

/* For functions that cannot fail. */
static inline void succeeded(void) {
    judge(GC_STATUS_OK, 0);
}

static inline void compare_windows(void) {
    for (int i = 0; i < 2; i++)
        EXPECT(memcmp(windows[i].base, windows[i].shadow, windows[i].size) == 0);
}

/* ---- what is kept for a while, and released in any order, here or on another thread ------------------------------ */

typedef struct {
    void *tensor;
    bool versioned;
} Kept;

enum { KEPT = 200, BATCH = 40 };
static Kept kept[KEPT], batch[BATCH];
static int kept_count, batch_count;
static bool batch_runs;
static pthread_t batch_thread;

static inline void release(Kept item) {
    if (!item.versioned)
        gc_tensor_free(item.tensor);
    else
        ((struct DLManagedTensorVersioned *)item.tensor)->deleter(item.tensor);
}

static inline void *release_batch(void *unused) {
    for (int i = 0; i < batch_count; i++)
        release(batch[i]);
    return unused;
}

static inline Kept take_kept(void) {
    int index = (int)below((uint64_t)kept_count);
    Kept item = kept[index];
    kept[index] = kept[--kept_count];
    return item;
}

static inline void end_batch(void) {
    if (batch_runs)
        CHECK(pthread_join(batch_thread, NULL) == 0);
    batch_runs = false;
}

/* Another thread releases while this one goes on. */
static inline void begin_batch(void) {
    end_batch();
    for (batch_count = 0; batch_count < BATCH && kept_count > 0; batch_count++)
        batch[batch_count] = take_kept();
    CHECK(pthread_create(&batch_thread, NULL, release_batch, NULL) == 0);
    batch_runs = true;
}

static inline void keep(void *tensor, bool versioned) {
    if (kept_count == KEPT) {
        begin(f_gc_tensor_free);
        release(take_kept());
        succeeded();
    }
    kept[kept_count].tensor = tensor;
    kept[kept_count++].versioned = versioned;
}

static inline void release_everything(void) {
    end_batch();
    while (kept_count > 0)
        release(take_kept());
}

/* ---- outputs ----------------------------------------------------------------------------------------------------- */

/* Everything that is said about a tensor of the library's own. */
static inline void check_output(const DLTensor *t, DLDataType dtype, int ndim, const int64_t *shape) {
    wide elements = product(ndim, shape), stride = 1;
    EXPECT(t->device.device_type == kDLCPU && t->device.device_id == 0 && t->byte_offset == 0);
    EXPECT(memcmp(&t->dtype, &dtype, sizeof dtype) == 0 && t->ndim == ndim);
    EXPECT(ndim == 0 || (t->shape != NULL && t->strides != NULL));
    EXPECT(ndim == 0 || memcmp(t->shape, shape, sizeof *shape * (size_t)ndim) == 0);
    EXPECT((t->data == NULL) == (elements == 0));
    for (int i = ndim - 1; i >= 0 && elements > 0; i--) {
        EXPECT(t->strides[i] == stride);
        stride *= shape[i];
    }
}

/* Whether an output of this shape can be asked for, adding the faults that it brings. */
static inline bool askable(int ndim, const int64_t *shape, wide bits, Faults *faults) {
    wide elements = product(ndim, shape), bytes = (elements * bits + 7) / 8;
    if (elements > INT64_MAX || bytes > INT64_MAX)
        *faults |= FAULT(SIZE_OVERFLOW) | (elements > INT64_MAX ? 0 : FAULT(OUT_OF_MEMORY));
    else if (bytes >= NOWHERE)
        *faults |= FAULT(OUT_OF_MEMORY) | FAULT(SIZE_OVERFLOW);
    else
        return bytes <= limit || *faults != 0;
    return true;
}

/* Where a result goes: in order, or not. */
static inline DLManagedTensor **random_out(DLManagedTensor **place, Faults *faults) {
    if (!one_in(60))
        return place;
    *faults |= FAULT(INVALID_ARGUMENT);
    return one_in(2) ? NULL : (DLManagedTensor **)(void *)((char *)place + 1 + below(7));
}

static inline int32_t random_order(Faults *faults) {
    int32_t order = one_in(30) ? (int32_t)wild() : (int32_t)below(2);
    *faults |= order == 0 || order == 1 ? 0 : FAULT(INVALID_ARGUMENT);
    return order;
}

static inline size_t random_size(void) {
    return one_in(40) ? MEDIUM : SMALL;
}

static inline DLDataType random_dtype(int from, int count) {
    return one_in(40) ? dtypes[below(DTYPES)] : dtypes[from + (int)below((uint64_t)count)];
}

/* A source of one of these dtypes; now and then of another. */
static inline void make_elements(int first, int count, size_t size) {
    DLDataType dtype = random_dtype(first, count);
    make(&src, dtype, -1, NULL, (int64_t)size / (dtype.bits / 8), &windows[0], false);
}

static inline int64_t random_chunks(void) {
    return one_in(30) ? (int64_t)below(600) : 1 + (int64_t)below(9);
}

static inline void *random_stream(void) {
    return one_in(2) ? NULL : (void *)(uintptr_t)below(3);
}

/* Where rows run, for an axis; its fault if there is no such axis. The output has the shape of `a`, changed there. */
static inline Faults random_axis(const Argument *a, int32_t *axis, int *changed) {
    int ndim = a->tensor.dl_tensor.ndim, most = ndim < 1 ? 1 : ndim;
    *axis = one_in(3)    ? GC_AXIS_NONE
            : one_in(20) ? (int32_t)wild()
                         : (int32_t)below(2 * (uint64_t)most) - most;
    *changed = *axis == GC_AXIS_NONE || ndim <= 0 ? -1 : *axis < 0 ? *axis + ndim : *axis;
    return *axis == GC_AXIS_NONE || (*axis >= -most && *axis < most) ? 0 : FAULT(INVALID_ARGUMENT);
}

/* How long `a` is along an axis, and, given how long the output is to be, its shape. -1: all as one. */
static inline int64_t length_along(const Argument *a, int axis) {
    return axis < 0 ? a->elements : a->tensor.dl_tensor.shape[axis];
}

static inline int shape_along(const Argument *a, int axis, int64_t length, int64_t *shape) {
    int ndim = axis < 0 ? 1 : a->tensor.dl_tensor.ndim;
    for (int i = 0; i < ndim; i++)
        shape[i] = i == axis || axis < 0 ? length : a->tensor.dl_tensor.shape[i];
    return ndim;
}

/* For tensors whose other side has elements; `n` and `m` are the caller's to say. */
static inline Rows rows_along(const Argument *a, int axis) {
    Rows rows = {1, 1, 0, 0};
    for (int i = 0; axis >= 0 && i < a->tensor.dl_tensor.ndim; i++)
        *(i < axis ? &rows.outer : i > axis ? &rows.inner : &rows.n) *= a->tensor.dl_tensor.shape[i];
    return rows;
}

/* The side that is a row a chunk, for the elements of the other. */
static inline Faults faults_of_rows(const Argument *rows, const Argument *elements) {
    const DLTensor *t = &rows->tensor.dl_tensor;
    Faults faults = memcmp(&t->dtype, &uint8, sizeof uint8) ? FAULT(UNSUPPORTED_DTYPE) : 0;
    if (!rows->counted || !elements->counted)
        return faults;
    if (t->ndim != 2)
        return faults | FAULT(SHAPE_MISMATCH);
    if (t->shape[0] == 0)
        return faults | FAULT(INVALID_ARGUMENT) | FAULT(SHAPE_MISMATCH);
    if (t->shape[1] != chunk_bytes(elements->elements, (uint64_t)t->shape[0]))
        faults |= FAULT(SHAPE_MISMATCH);
    if (!is_contiguous(rows))
        faults |= FAULT(NOT_CONTIGUOUS);
    return faults;
}

/* ---- the whole --------------------------------------------------------------------------------------------------- */

/* A call that does not come back, or takes the program down: says which it was. */
static inline void stop(int signal_number) {
    char text[200];
    int length = snprintf(text, sizeof text, "%s: signal %d in call %" PRIu64 " of seed %" PRIu64 ", %s\n",
                          program, signal_number, calls, seed, function_names[running]);
    (void)!write(2, text, (size_t)length);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static inline size_t heap(void) {
#if __GLIBC_PREREQ(2, 33)
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
#else
    return 0;
#endif
}

/* That every function of this program has succeeded. */
static inline void report(bool of_codecs) {
    uint64_t by_status[STATUSES] = {0};
    printf("%-26s %10s %10s\n", "", "calls", "successes");
    for (int f = 0; f < FUNCTION_COUNT; f++) {
        uint64_t all = 0;
        for (int s = 0; s < STATUSES; s++) {
            all += outcomes[f][s];
            by_status[s] += outcomes[f][s];
        }
        if (is_of_codecs(f) != of_codecs)
            continue;
        printf("%-26s %10" PRIu64 " %10" PRIu64 "\n", function_names[f], all, outcomes[f][0]);
        if (calls >= 100000 && (outcomes[f][0] > 0) == (excuses[f] != NULL)) {
            fprintf(stderr, "%s: %s: %s\n", program, function_names[f],
                    excuses[f] ? "it succeeds, and has an excuse" : "no call of it succeeded, and it has no excuse");
            exit(1);
        }
    }
    for (int s = 1; s < STATUSES; s++)
        if (by_status[s] > 0)
            printf("refused with %-30s %10" PRIu64 "\n", gc_status_name(s), by_status[s]);
}

/* `wanted` calls, unless the command line says how many, and the seed. */
static inline void run(int argc, char **argv, uint64_t wanted, bool of_codecs, void (*call_something)(size_t size)) {
    wanted = argc > 1 ? strtoull(argv[1], NULL, 10) : wanted;
    seed = chance_state = argc > 2 ? strtoull(argv[2], NULL, 10) : seed;
    program = of_codecs ? "hostile_codec" : "hostile";
    printf("%s: %" PRIu64 " calls, seed %" PRIu64 "\n", program, wanted, seed);
    fflush(stdout);
    setenv("CUDA_VISIBLE_DEVICES", "", 1); /* what is said to be a GPU's memory here is not */
    signal(SIGALRM, stop);
#ifndef __SANITIZE_ADDRESS__ /* which has more to say about it */
    signal(SIGSEGV, stop);
    signal(SIGBUS, stop);
#endif
    map_arenas();
    CHECK((bits = malloc(BIG_LIMIT)) != NULL && (packed = malloc(BIG_LIMIT)) != NULL);

    uint64_t next_big = 3000;
    size_t heap_before = 0, heap_after;
    bool warm = false;
    while (calls < wanted) {
        if (!warm && calls > wanted / 10) { /* what first calls set up is there by now */
            release_everything();
            heap_before = heap();
            warm = true;
        }
        if (calls < next_big) {
            call_something(random_size());
        } else {
            begin(f_gc_set_threads);
            judge(gc_set_threads(2 + (uint32_t)below(3)), 0);
            call_something(BIG);
            next_big += CALLS_A_BIG_ONE;
        }
        if (one_in(500))
            begin_batch();
    }
    release_everything();
    heap_after = heap();

    report(of_codecs);
    printf("heap: %+lld bytes since call %" PRIu64 "\n", (long long)heap_after - (long long)heap_before, wanted / 10);
    /* Freed memory that glibc holds ready for each thread counts as used: so much may come and go. */
    CHECK(!warm || heap_after < heap_before + (512 << 10));
    for (int i = 0; i < 2; i++) {
        CHECK(munmap(windows[i].arena - PAGE, BIG + 2 * PAGE) == 0);
        free(windows[i].shadow);
    }
    free(bits);
    free(packed);
}

#endif
