/* hostile [CALLS [SEED]]: a million calls with arguments that nobody would write by hand: every exported function, with
 * pointers that are NULL or unaligned, sizes and strides of every sign and magnitude, dtypes, devices, axes, counts and
 * flags that do not exist, and between them calls that are in order.
 *
 * What a call must do is worked out beforehand, by a model that is as simple as it gets. A call without a fault must
 * succeed, with the model's bytes; one with faults must be refused with the status of one of them, and change nothing:
 * both windows of memory are compared with a shadow after every call, whatever it was. The library's one condition is
 * kept: memory that a descriptor describes is there. So a descriptor either fits its window, or is refused by
 * arithmetic alone, or goes to functions that do not look at the memory; `there` makes sure. Windows begin or end at a
 * page that must not be touched, and so do many of the tensors in them.
 *
 * The same seed gives the same calls. At the end everything taken must have been released once, and the heap be what it
 * was. */
#define _DEFAULT_SOURCE
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
static uint64_t next(void) {
    uint64_t z = chance_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static uint64_t below(uint64_t limit) {
    return next() % limit;
}

static bool one_in(uint64_t times) {
    return below(times) == 0;
}

/* Numbers at which arithmetic breaks: around 0, around powers of two of either sign, the extremes, and any. */
static int64_t wild(void) {
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
};

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

static void map_arenas(void) {
    for (int i = 0; i < 2; i++) {
        void *pages = mmap(NULL, BIG + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(pages != MAP_FAILED);
        windows[i].arena = (unsigned char *)pages + PAGE;
        CHECK(mprotect(windows[i].arena, BIG, PROT_READ | PROT_WRITE) == 0);
        CHECK((windows[i].shadow = malloc(BIG)) != NULL);
    }
}

/* New windows, at one end of their arenas, with new contents: noise, many zeros, and floats of both signs and zeros. */
static void prepare(size_t size) {
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

static unsigned char *shadow_of(uintptr_t address) {
    Window *window = &windows[address - (uintptr_t)windows[0].base >= windows[0].size];
    return window->shadow + (address - (uintptr_t)window->base);
}

static bool unaligned(const void *pointer) {
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

static size_t size_of(DLDataType dtype) {
    for (int i = 0; i < DTYPES; i++)
        if (dtypes[i].code == dtype.code && dtypes[i].bits == dtype.bits && dtype.lanes == 1)
            return dtype.bits / 8;
    return 0;
}

/* The product of sizes that are not negative, cut at 2^63. */
static wide product(int ndim, const int64_t *sizes) {
    wide result = 1;
    for (int i = 0; i < ndim; i++)
        if (sizes[i] == 0)
            return 0;
    for (int i = 0; i < ndim && result <= INT64_MAX; i++)
        result *= sizes[i];
    return result <= INT64_MAX ? result : (wide)INT64_MAX + 1;
}

static Faults device_faults(const DLTensor *t) {
    if (t->device.device_type == kDLCUDA || t->device.device_type == kDLCUDAManaged)
        return NO_CUDA;
    return t->device.device_type == kDLCPU || t->device.device_type == kDLCUDAHost ? 0 : FAULT(UNSUPPORTED_DEVICE);
}

/* Whether data is an address there, to which the offset can be added. */
static bool has_addresses(const DLTensor *t) {
    return device_faults(t) != FAULT(UNSUPPORTED_DEVICE);
}

/* Works out what is wrong with a descriptor, as the library's header has it, or else where its elements lie. */
static void understand(Argument *a) {
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
static bool there(const Argument *a) {
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

static Walk walk(const Argument *a) {
    Walk w;
    w.a = a;
    w.at = (uintptr_t)a->tensor.dl_tensor.data + a->tensor.dl_tensor.byte_offset;
    memset(w.index, 0, sizeof w.index[0] * (size_t)a->tensor.dl_tensor.ndim);
    return w;
}

static void step(Walk *w) {
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

static bool intersect(const Argument *a, const Argument *b) {
    return a->low < b->high && b->low < a->high;
}

/* Whether two elements lie in one place. */
static bool overlaps_itself(const Argument *a) {
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
static bool is_contiguous(const Argument *a) {
    wide expected = 1;
    for (int i = a->tensor.dl_tensor.ndim - 1; i >= 0 && a->elements > 0; i--) {
        if (a->tensor.dl_tensor.shape[i] != 1 && a->steps[i] != expected)
            return false;
        expected *= a->tensor.dl_tensor.shape[i];
    }
    return true;
}

/* ---- making tensors ---------------------------------------------------------------------------------------------- */

static void random_shape(Argument *a, int64_t budget) {
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
static void random_strides(Argument *a, int kind) {
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
static wide covered(Argument *a, wide *below_first) {
    a->tensor.dl_tensor.data = a; /* any address in the middle of memory */
    a->tensor.dl_tensor.byte_offset = 0;
    understand(a);
    *below_first = (wide)(uintptr_t)a - a->low;
    return a->high - a->low;
}

/* A tensor that is in order, in a window. `ndim` -1: of any shape of at most `budget` elements. */
static void make(Argument *a, DLDataType dtype, int ndim, const int64_t *shape, int64_t budget, const Window *window,
                 bool output) {
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
static void spoil_once(Argument *a) {
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
        t->device.device_id = 1000 + (int32_t)below(1000); /* a card that no machine has */
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
static void spoil(Argument *a) {
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
static bool below_zero(const unsigned char *element, DLDataType dtype) {
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

static void read_bits(const Argument *src, bool signs) {
    static const unsigned char zero[8];
    Walk w = walk(src);
    for (int64_t i = 0; i < src->elements; i++, step(&w)) {
        const unsigned char *element = (const unsigned char *)w.at;
        bits[i] = signs ? !below_zero(element, src->tensor.dl_tensor.dtype) : memcmp(element, zero, src->size) != 0;
    }
}

static void read_bytes(const Argument *src) {
    Walk w = walk(src);
    for (int64_t i = 0; i < src->elements; i++, step(&w))
        packed[i] = *(const unsigned char *)w.at;
}

static void write_bits(const Argument *dst) {
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
static bool is_signed(DLDataType dtype) {
    return dtype.code == kDLFloat || dtype.code == kDLBfloat || dtype.code == kDLInt;
}

/* A scale, or minus it, in a dtype; of other scales than 1 only in float32 and float64. A NaN is always the same. */
static void write_sign(unsigned char *at, DLDataType dtype, bool bit, float scale) {
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
        memcpy(at, dtype.bits == 64 ? (nan ? (void *)&quiet64 : (void *)&wide) : (nan ? (void *)&quiet32 : (void *)&narrow),
               dtype.bits / 8);
    }
}

static void write_bytes(const Argument *dst) {
    Walk w = walk(dst);
    for (int64_t i = 0; i < dst->elements; i++, step(&w))
        *shadow_of(w.at) = packed[i];
}

/* Rows of `n` bits and of `m` bytes, `inner` of them side by side, `outer` times. */
typedef struct {
    int64_t outer, inner, n, m;
} Rows;

static unsigned char bit_mask(int32_t order, int64_t bit) {
    return (unsigned char)(order == GC_BIT_ORDER_BIG ? 0x80 >> bit % 8 : 1 << bit % 8);
}

static void pack_model(Rows rows, int32_t order) {
    memset(packed, 0, (size_t)(rows.outer * rows.m * rows.inner));
    for (int64_t o = 0; o < rows.outer; o++)
        for (int64_t bit = 0; bit < rows.n; bit++)
            for (int64_t i = 0; i < rows.inner; i++)
                if (bits[(o * rows.n + bit) * rows.inner + i])
                    packed[(o * rows.m + bit / 8) * rows.inner + i] |= bit_mask(order, bit);
}

static void unpack_model(Rows rows, int32_t order) {
    for (int64_t o = 0; o < rows.outer; o++)
        for (int64_t bit = 0; bit < rows.n; bit++)
            for (int64_t i = 0; i < rows.inner; i++)
                bits[(o * rows.n + bit) * rows.inner + i] =
                    bit / 8 < rows.m &&
                    (packed[(o * rows.m + bit / 8) * rows.inner + i] & bit_mask(order, bit)) != 0;
}

static int64_t bytes_for(int64_t count) {
    return count / 8 + (count % 8 != 0);
}

static int64_t chunk_bytes(int64_t elements, uint64_t n_chunks) {
    uint64_t bytes = (uint64_t)bytes_for(elements);
    return (int64_t)(bytes / n_chunks + (bytes % n_chunks != 0));
}

/* ---- judging ----------------------------------------------------------------------------------------------------- */

static Argument src, dst, chunk[12];
static DLManagedTensor untouched;
#define UNTOUCHED (&untouched)

static void show(const char *name, const Argument *a) {
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

static void fail(const char *why) {
    fprintf(stderr, "hostile: call %" PRIu64 " of seed %" PRIu64 ", %s: %s\n  last error: %s\n", calls, seed,
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
static void begin(int function) {
    running = function;
    calls++;
    if (calls % 256 == 0)
        alarm(60); /* whoever takes longer than this for 256 calls is stuck */
}

/* It has returned: with a status of one of its faults, and a sentence, or in success. True for success. */
static bool judge(gc_status_t status, Faults faults) {
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
static void succeeded(void) {
    judge(GC_STATUS_OK, 0);
}

static void compare_windows(void) {
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

static void release(Kept item) {
    if (!item.versioned)
        gc_tensor_free(item.tensor);
    else
        ((struct DLManagedTensorVersioned *)item.tensor)->deleter(item.tensor);
}

static void *release_batch(void *unused) {
    for (int i = 0; i < batch_count; i++)
        release(batch[i]);
    return unused;
}

static Kept take_kept(void) {
    int index = (int)below((uint64_t)kept_count);
    Kept item = kept[index];
    kept[index] = kept[--kept_count];
    return item;
}

static void end_batch(void) {
    if (batch_runs)
        CHECK(pthread_join(batch_thread, NULL) == 0);
    batch_runs = false;
}

/* Another thread releases while this one goes on. */
static void begin_batch(void) {
    end_batch();
    for (batch_count = 0; batch_count < BATCH && kept_count > 0; batch_count++)
        batch[batch_count] = take_kept();
    CHECK(pthread_create(&batch_thread, NULL, release_batch, NULL) == 0);
    batch_runs = true;
}

static void keep(void *tensor, bool versioned) {
    if (kept_count == KEPT) {
        begin(f_gc_tensor_free);
        release(take_kept());
        succeeded();
    }
    kept[kept_count].tensor = tensor;
    kept[kept_count++].versioned = versioned;
}

static void release_everything(void) {
    end_batch();
    while (kept_count > 0)
        release(take_kept());
}

/* What tensors of ours hold: released once, by whoever. */
enum { ALIVE = 0x600d, DEAD = 0xdead };
typedef struct {
    int state;
} Owner;

static uint64_t owners_made, owners_released;
static pthread_mutex_t owners_lock = PTHREAD_MUTEX_INITIALIZER;

static Owner *make_owner(void) {
    Owner *owner = malloc(sizeof *owner);
    CHECK(owner != NULL);
    owner->state = ALIVE;
    owners_made++;
    return owner;
}

static void release_owner(void *ctx) {
    Owner *owner = ctx;
    CHECK(owner->state == ALIVE);
    owner->state = DEAD;
    free(owner);
    CHECK(pthread_mutex_lock(&owners_lock) == 0);
    owners_released++;
    CHECK(pthread_mutex_unlock(&owners_lock) == 0);
}

/* A tensor that comes from elsewhere, in either form. */
typedef struct {
    Argument a;
    struct DLManagedTensorVersioned versioned;
    Owner *owner;
} Foreign;

static void release_foreign(Foreign *foreign) {
    release_owner(foreign->owner);
    free(foreign);
}

static void delete_legacy(DLManagedTensor *tensor) {
    release_foreign(tensor->manager_ctx);
}

static void delete_versioned(struct DLManagedTensorVersioned *tensor) {
    release_foreign(tensor->manager_ctx);
}

/* ---- outputs ----------------------------------------------------------------------------------------------------- */

/* Everything that is said about a tensor of the library's own. */
static void check_output(const DLTensor *t, DLDataType dtype, int ndim, const int64_t *shape) {
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
static bool askable(int ndim, const int64_t *shape, wide bits, Faults *faults) {
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
static DLManagedTensor **random_out(DLManagedTensor **place, Faults *faults) {
    if (!one_in(60))
        return place;
    *faults |= FAULT(INVALID_ARGUMENT);
    return one_in(2) ? NULL : (DLManagedTensor **)(void *)((char *)place + 1 + below(7));
}

static int32_t random_order(Faults *faults) {
    int32_t order = one_in(30) ? (int32_t)wild() : (int32_t)below(2);
    *faults |= order == 0 || order == 1 ? 0 : FAULT(INVALID_ARGUMENT);
    return order;
}

static size_t random_size(void) {
    return one_in(40) ? MEDIUM : SMALL;
}

static DLDataType random_dtype(int from, int count) {
    return one_in(40) ? dtypes[below(DTYPES)] : dtypes[from + (int)below((uint64_t)count)];
}

/* A source of one of these dtypes; now and then of another. */
static void make_elements(int first, int count, size_t size) {
    DLDataType dtype = random_dtype(first, count);
    make(&src, dtype, -1, NULL, (int64_t)size / (dtype.bits / 8), &windows[0], false);
}

static int64_t random_chunks(void) {
    return one_in(30) ? (int64_t)below(600) : 1 + (int64_t)below(9);
}

static void *random_stream(void) {
    return one_in(2) ? NULL : (void *)(uintptr_t)below(3);
}

/* Where rows run, for an axis; its fault if there is no such axis. The output has the shape of `a`, changed there. */
static Faults random_axis(const Argument *a, int32_t *axis, int *changed) {
    int ndim = a->tensor.dl_tensor.ndim, most = ndim < 1 ? 1 : ndim;
    *axis = one_in(3)    ? GC_AXIS_NONE
            : one_in(20) ? (int32_t)wild()
                         : (int32_t)below(2 * (uint64_t)most) - most;
    *changed = *axis == GC_AXIS_NONE || ndim <= 0 ? -1 : *axis < 0 ? *axis + ndim : *axis;
    return *axis == GC_AXIS_NONE || (*axis >= -most && *axis < most) ? 0 : FAULT(INVALID_ARGUMENT);
}

/* How long `a` is along an axis, and, given how long the output is to be, its shape. -1: all as one. */
static int64_t length_along(const Argument *a, int axis) {
    return axis < 0 ? a->elements : a->tensor.dl_tensor.shape[axis];
}

static int shape_along(const Argument *a, int axis, int64_t length, int64_t *shape) {
    int ndim = axis < 0 ? 1 : a->tensor.dl_tensor.ndim;
    for (int i = 0; i < ndim; i++)
        shape[i] = i == axis || axis < 0 ? length : a->tensor.dl_tensor.shape[i];
    return ndim;
}

/* For tensors whose other side has elements; `n` and `m` are the caller's to say. */
static Rows rows_along(const Argument *a, int axis) {
    Rows rows = {1, 1, 0, 0};
    for (int i = 0; axis >= 0 && i < a->tensor.dl_tensor.ndim; i++)
        *(i < axis ? &rows.outer : i > axis ? &rows.inner : &rows.n) *= a->tensor.dl_tensor.shape[i];
    return rows;
}

/* ---- the functions, one after the other -------------------------------------------------------------------------- */

static void call_small_ones(void) {
    int32_t code = one_in(2) ? (int32_t)wild() : (int32_t)below(110);
    uint32_t threads = one_in(2) ? (uint32_t)below(5) : one_in(2) ? 0 : 1025 + (uint32_t)below(UINT32_MAX - 1025);
    static const int types[] = {kDLCPU, kDLCUDAHost, kDLCUDA, kDLCUDAManaged, kDLOpenCL, 0, -1};
    DLDevice device = {(DLDeviceType)types[below(7)], (int32_t)below(3) - 1};
    bool on_cpu = device.device_type == kDLCPU || device.device_type == kDLCUDAHost;
    bool on_card = device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged;
    Faults of_device = on_cpu ? 0 : on_card ? NO_CUDA : FAULT(UNSUPPORTED_DEVICE);
    unsigned char name[200]; /* of no kernel and no family: it begins with a byte that no name has */
    for (size_t i = 0; i < sizeof name; i++)
        name[i] = i == 0 ? 0xff : i == sizeof name - 1 ? 0 : (unsigned char)next();
    const char *text = NULL;
    const void *fatbin = NULL;
    size_t size = 0;
    switch (below(10)) {
    case 0:
        begin(f_gc_version);
        EXPECT(gc_version() == GRADCODEC_VERSION);
        break;
    case 1:
        begin(f_gc_version_string);
        text = gc_version_string();
        EXPECT(text != NULL && strlen(text) >= 5);
        break;
    case 2:
        begin(f_gc_status_name);
        text = gc_status_name(code);
        EXPECT(text != NULL && strncmp(text, "GC_STATUS_", 10) == 0);
        break;
    case 3:
        begin(f_gc_last_error);
        EXPECT(gc_last_error() != NULL);
        break;
    case 4:
        begin(f_gc_capsule_destructor); /* without a Python, whatever it is given */
        outcomes[f_gc_capsule_destructor][0]++;
        gc_capsule_destructor(one_in(2) ? NULL : &untouched);
        begin(f_gc_chunk_bytes); /* whose sentence replaces the one that stays behind */
        judge(gc_chunk_bytes(-1, 1) == -1 ? GC_STATUS_INVALID_ARGUMENT : GC_STATUS_OK, FAULT(INVALID_ARGUMENT));
        return;
    case 5:
        begin(f_gc_set_threads);
        judge(gc_set_threads(threads), threads > 1024 ? FAULT(INVALID_ARGUMENT) : 0);
        return;
    case 6:
        begin(f_gc_prepare);
        judge(gc_prepare(device), of_device);
        return;
    case 7:
        begin(f_gc_trim);
        judge(gc_trim(device), of_device);
        return;
    case 8:
        begin(f_gc_builtin_kernels);
        if (one_in(2)) {
            judge(gc_builtin_kernels("bits", &fatbin, &size), 0);
            EXPECT(fatbin != NULL && (uintptr_t)fatbin % 16 == 0 && size > 1000);
        } else {
            judge(gc_builtin_kernels(one_in(8) ? NULL : (char *)name, &fatbin, one_in(8) ? NULL : &size),
                  FAULT(INVALID_ARGUMENT));
            EXPECT(fatbin == NULL && size == 0);
        }
        return;
    case 9: {
        bool known = one_in(2), sized = !one_in(8), old = code < 75;
        gc_kernel_shape_t shape = {sized ? sizeof shape : threads % sizeof shape, 0, 0, 0, 0, {7, 7, 7}};
        begin(f_gc_builtin_kernel_shape);
        Faults faults = (known && sized ? 0 : FAULT(INVALID_ARGUMENT)) | (old ? FAULT(UNSUPPORTED_DEVICE) : 0);
        judge(gc_builtin_kernel_shape(known ? "gc_unpack_u8" : (char *)name, code, &shape), faults);
        EXPECT(faults ? shape.threads == 0 && shape.reserved[1] == 7 : shape.threads > 0 && shape.reserved[1] == 0);
        return;
    }
    }
    succeeded();
}

static void call_chunk_bytes(void) {
    int64_t elements = one_in(2) ? wild() : (int64_t)below(100000);
    uint64_t n_chunks = one_in(2) ? (uint64_t)wild() : below(100);
    Faults faults = elements < 0 || n_chunks == 0 ? FAULT(INVALID_ARGUMENT) : 0;
    begin(f_gc_chunk_bytes);
    int64_t got = gc_chunk_bytes(elements, n_chunks);
    EXPECT(got == (faults ? -1 : chunk_bytes(elements, n_chunks)));
    judge(faults ? GC_STATUS_INVALID_ARGUMENT : GC_STATUS_OK, faults);
}

static void call_tensor_empty(void) {
    DLManagedTensor *out[2] = {UNTOUCHED, UNTOUCHED};
    prepare(SMALL);
    make(&src, dtypes[below(DTYPES)], -1, NULL, SMALL / 8, &windows[0], false);
    src.passed_on = true;
    if (one_in(4))
        spoil_once(&src);
    /* Only device, dtype, ndim and shape count. */
    DLTensor *t = &src.tensor.dl_tensor;
    src.passed = &src.tensor;
    t->data = windows[0].base;
    t->strides = NULL;
    t->byte_offset = 0;
    understand(&src);
    Faults faults = src.faults | device_faults(t);
    if (src.counted && src.bits != 0 && !askable(t->ndim, t->shape, src.bits, &faults))
        return;
    DLManagedTensor **place = random_out(out, &faults);
    begin(f_gc_tensor_empty);
    if (judge(gc_tensor_empty(t->device, t->dtype, t->ndim, t->shape, place), faults)) {
        check_output(&out[0]->dl_tensor, t->dtype, t->ndim, t->shape);
        EXPECT((uintptr_t)out[0]->dl_tensor.data % 256 == 0 && out[0]->deleter != NULL);
        if (src.elements > 0)
            memset(out[0]->dl_tensor.data, 0x5a, (size_t)((src.bits * src.elements + 7) / 8));
        keep(out[0], false);
        out[0] = UNTOUCHED;
    }
    EXPECT(out[0] == UNTOUCHED && out[1] == UNTOUCHED);
}

/* A tensor that nobody looks into: it may lie anywhere. */
static void make_anywhere(Argument *a) {
    make(a, dtypes[below(DTYPES)], -1, NULL, one_in(4) ? BIG / 8 : 100, &windows[0], false);
    a->passed_on = true;
    while (one_in(3))
        spoil_once(a);
}

/* That `t` shows what `a` shows. */
static void check_same(const DLTensor *t, const Argument *a) {
    const DLTensor *s = &a->tensor.dl_tensor;
    bool joined = a->elements == 0 || has_addresses(s);
    EXPECT(t->ndim == s->ndim && memcmp(&t->dtype, &s->dtype, sizeof t->dtype) == 0);
    EXPECT(t->device.device_type == s->device.device_type && t->device.device_id == s->device.device_id);
    EXPECT(t->ndim == 0 || memcmp(t->shape, s->shape, sizeof *t->shape * (size_t)t->ndim) == 0);
    EXPECT(t->byte_offset == (joined ? 0 : s->byte_offset));
    EXPECT((uintptr_t)t->data == (a->elements == 0 ? 0 : (uintptr_t)s->data + (joined ? s->byte_offset : 0)));
    for (int i = 0; i < t->ndim && a->elements > 0; i++)
        EXPECT(t->strides[i] == a->steps[i]);
}

static void call_tensor_from_pointer(void) {
    DLManagedTensor *out[2] = {UNTOUCHED, UNTOUCHED};
    Owner *owner = one_in(4) ? NULL : make_owner();
    windows[0].base = windows[0].arena;
    windows[0].size = BIG;
    make_anywhere(&src);
    DLTensor *t = &src.tensor.dl_tensor;
    src.passed = &src.tensor;
    t->data = t->data == NULL ? NULL : (void *)((uintptr_t)t->data + t->byte_offset);
    t->byte_offset = 0;
    understand(&src);
    Faults faults = src.faults;
    DLManagedTensor **place = random_out(out, &faults);
    begin(f_gc_tensor_from_pointer);
    gc_status_t status = gc_tensor_from_pointer(t->data, t->device, t->dtype, t->ndim, t->shape, t->strides,
                                                owner ? release_owner : NULL, owner, place);
    if (judge(status, faults)) {
        check_same(&out[0]->dl_tensor, &src);
        EXPECT(out[0]->deleter != NULL && (owner == NULL || owner->state == ALIVE));
        keep(out[0], false);
        out[0] = UNTOUCHED;
    } else if (owner) {
        release_owner(owner);
    }
    EXPECT(out[0] == UNTOUCHED && out[1] == UNTOUCHED);
}

static void call_tensor_free(void) {
    DLManagedTensor nobodys;
    begin(f_gc_tensor_free);
    if (one_in(4)) {
        memset(&nobodys, 0xa5, sizeof nobodys);
        nobodys.deleter = NULL;
        gc_tensor_free(one_in(2) ? NULL : &nobodys);
    } else if (kept_count > 0) {
        release(take_kept());
    }
    succeeded();
}

/* From one form to the other: of what is kept, or of what comes from elsewhere. */
static void call_convert_kept(void) {
    DLManagedTensor *legacy = UNTOUCHED;
    struct DLManagedTensorVersioned *versioned = NULL;
    if (kept_count == 0)
        return;
    Kept item = take_kept();
    DLManagedTensor *old = item.tensor;
    struct DLManagedTensorVersioned *old_versioned = item.tensor;
    DLTensor before = item.versioned ? old_versioned->dl_tensor : old->dl_tensor;
    gc_status_t status;
    begin(item.versioned ? f_gc_tensor_from_versioned : f_gc_tensor_to_versioned);
    status = item.versioned ? gc_tensor_from_versioned(old_versioned, &legacy)
                            : gc_tensor_to_versioned(old, &versioned);
    judge(status, 0);
    const DLTensor *after = item.versioned ? &legacy->dl_tensor : &versioned->dl_tensor;
    EXPECT(after->data == before.data && after->ndim == before.ndim && after->byte_offset == before.byte_offset);
    if (item.versioned)
        keep(legacy, false);
    else
        keep(versioned, true);
}

static void call_convert_foreign(void) {
    bool from_versioned = one_in(2);
    DLManagedTensor *legacy[2] = {UNTOUCHED, UNTOUCHED};
    struct DLManagedTensorVersioned *versioned[2] = {(void *)UNTOUCHED, (void *)UNTOUCHED};
    Foreign *foreign = malloc(sizeof *foreign);
    CHECK(foreign != NULL);
    windows[0].base = windows[0].arena;
    windows[0].size = BIG;
    make_anywhere(&foreign->a);
    Faults faults = foreign->a.faults;
    src = foreign->a; /* for `show` */
    foreign->owner = make_owner();
    foreign->a.tensor.manager_ctx = foreign->versioned.manager_ctx = foreign;
    foreign->a.tensor.deleter = delete_legacy;
    foreign->versioned.deleter = delete_versioned;
    foreign->versioned.dl_tensor = foreign->a.tensor.dl_tensor;
    foreign->versioned.version.major = one_in(20) ? (uint32_t)wild() : 1;
    foreign->versioned.version.minor = one_in(2) ? (uint32_t)below(4) : (uint32_t)next();
    foreign->versioned.flags = one_in(2) ? 0 : one_in(2) ? below(8) : next();
    bool right_address = foreign->a.passed == &foreign->a.tensor;
    bool succeeds;
    if (from_versioned) {
        if (right_address && foreign->versioned.version.major != 1)
            faults = FAULT(INVALID_ARGUMENT);
        else if (right_address && (foreign->versioned.flags & DLPACK_FLAG_BITMASK_READ_ONLY))
            faults |= FAULT(READ_ONLY);
        else if (right_address && (foreign->versioned.flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED))
            faults |= FAULT(UNSUPPORTED_DTYPE);
        char *passed = foreign->a.passed == NULL ? NULL
                                                 : (char *)&foreign->versioned + (right_address ? 0 : 1 + below(7));
        DLManagedTensor **place = random_out(legacy, &faults);
        begin(f_gc_tensor_from_versioned);
        succeeds = judge(gc_tensor_from_versioned((void *)passed, place), faults);
    } else {
        void *place = random_out((DLManagedTensor **)(void *)versioned, &faults);
        begin(f_gc_tensor_to_versioned);
        succeeds = judge(gc_tensor_to_versioned(foreign->a.passed, place), faults);
    }
    EXPECT(foreign->owner->state == ALIVE);
    if (!succeeds) {
        release_foreign(foreign);
    } else if (from_versioned) {
        check_same(&legacy[0]->dl_tensor, &foreign->a);
        EXPECT(legacy[0]->deleter != NULL);
        keep(legacy[0], false);
        legacy[0] = UNTOUCHED;
    } else {
        check_same(&versioned[0]->dl_tensor, &foreign->a);
        uint8_t code = foreign->a.tensor.dl_tensor.dtype.code;
        uint32_t minor = code <= kDLBool ? 0 : code <= kDLFloat4_e2m1fn ? 1 : DLPACK_MINOR_VERSION;
        EXPECT(versioned[0]->version.major == 1 && versioned[0]->version.minor == minor && versioned[0]->flags == 0);
        EXPECT(versioned[0]->deleter != NULL);
        keep(versioned[0], true);
        versioned[0] = (void *)UNTOUCHED;
    }
    EXPECT(legacy[0] == UNTOUCHED && legacy[1] == UNTOUCHED);
    EXPECT(versioned[0] == (void *)UNTOUCHED && versioned[1] == (void *)UNTOUCHED);
}

static void unpack_again(DLManagedTensor **chunks, size_t n_chunks, int64_t elements) {
    DLManagedTensor *out = UNTOUCHED;
    begin(f_gc_unpack_chunks);
    judge(gc_unpack_chunks(chunks, n_chunks, elements, &out), 0);
    check_output(&out->dl_tensor, dtypes[0], 1, &elements);
    EXPECT(elements == 0 || memcmp(out->dl_tensor.data, bits, (size_t)elements) == 0);
    keep(out, false);
}

static void call_pack_chunks(int function, size_t size) {
    bool signs = function == f_gc_pack_signs;
    static DLManagedTensor *out[601];
    uint64_t n_chunks = (uint64_t)random_chunks();
    prepare(size);
    if (signs)
        make_elements(INTEGERS, DTYPES - INTEGERS, size);
    else
        make_elements(0, INTEGERS, size);
    spoil(&src);
    /* So many that their headers alone are more than any memory: never written, so no room for them is needed. */
    if (one_in(50))
        n_chunks = (uint64_t)NOWHERE + (next() >> below(17));
    Faults faults = src.faults | (src.is_float == signs ? 0 : FAULT(UNSUPPORTED_DTYPE));
    faults |= n_chunks == 0 ? FAULT(INVALID_ARGUMENT) : 0;
    faults |= n_chunks > 600 ? FAULT(OUT_OF_MEMORY) | FAULT(SIZE_OVERFLOW) : 0;
    DLManagedTensor **place = random_out(out, &faults);
    int64_t bytes = src.counted && n_chunks > 0 ? chunk_bytes(src.elements, n_chunks) : 0;
    if (faults == 0 && !askable(1, &src.elements, 8, &faults))
        return;
    for (int k = 0; k <= 600; k++)
        out[k] = UNTOUCHED;
    begin(function);
    if (judge(signs ? gc_pack_signs(src.passed, n_chunks, place) : gc_pack_chunks(src.passed, n_chunks, place), faults)) {
        Rows rows = {1, 1, src.elements, bytes * (int64_t)n_chunks};
        read_bits(&src, signs);
        pack_model(rows, GC_BIT_ORDER_BIG);
        unsigned char *first = out[0]->dl_tensor.data;
        for (size_t k = 0; k < n_chunks; k++) {
            check_output(&out[k]->dl_tensor, uint8, 1, &bytes);
            EXPECT(out[k]->deleter != NULL);
            EXPECT(bytes == 0 || out[k]->dl_tensor.data == first + (int64_t)k * bytes);
        }
        EXPECT((uintptr_t)first % 256 == 0 && (rows.m == 0 || memcmp(first, packed, (size_t)rows.m) == 0));
        if (one_in(2))
            unpack_again(out, n_chunks, src.elements);
        for (size_t k = 0; k < n_chunks; k++) {
            if (n_chunks > 10)
                gc_tensor_free(out[k]);
            else
                keep(out[k], false);
            out[k] = UNTOUCHED;
        }
    }
    for (int k = 0; k <= 600; k++)
        EXPECT(out[k] == UNTOUCHED);
    compare_windows();
}

static void call_unpack_chunks(int function, size_t size) {
    bool signs = function == f_gc_unpack_signs;
    DLDataType dtype = signs ? dtypes[below(DTYPES)] : dtypes[0];
    DLManagedTensor *out[2] = {UNTOUCHED, UNTOUCHED}, *chunks[13];
    uint64_t n_chunks = 1 + below(12);
    prepare(size);
    int64_t elements = (int64_t)below(size / (signs ? 80 : 24)), bytes = chunk_bytes(elements, n_chunks), length;
    Faults faults = 0;
    for (uint64_t k = 0; k < n_chunks; k++) {
        length = bytes;
        if (one_in(100))
            length += one_in(2) ? 1 : bytes > 0 ? -1 : 0;
        make(&chunk[k], one_in(200) ? dtypes[below(DTYPES)] : uint8, 1, &length, 0, &windows[below(2)], false);
        if (one_in(6))
            spoil(&chunk[k]);
        chunks[k] = chunk[k].passed;
    }
    if (one_in(20))
        elements = wild();
    else if (one_in(4) && bytes > 0) /* as many as give the same bytes */
        elements = bytes * (int64_t)n_chunks * 8 - (int64_t)below(8);
    uint64_t count = one_in(50) ? 0 : one_in(50) ? ((uint64_t)1 << 61) + (next() >> 3) : n_chunks;
    if (elements < 0 || count == 0)
        faults |= FAULT(INVALID_ARGUMENT);
    else
        bytes = chunk_bytes(elements, count);
    if (count > 12)
        faults |= FAULT(SIZE_OVERFLOW); /* more pointers than addresses: none of them is looked at */
    for (uint64_t k = 0; count == n_chunks && k < count; k++) {
        const DLTensor *t = &chunk[k].tensor.dl_tensor;
        faults |= chunk[k].faults;
        if (memcmp(&t->dtype, &uint8, sizeof uint8) != 0)
            faults |= FAULT(UNSUPPORTED_DTYPE);
        if (chunk[k].counted && (t->ndim != 1 || t->shape[0] != bytes))
            faults |= FAULT(SHAPE_MISMATCH);
        if (chunk[k].faults & NO_CUDA) /* on another device than the others */
            faults |= FAULT(INVALID_ARGUMENT);
    }
    if (signs && !is_signed(dtype))
        faults |= FAULT(UNSUPPORTED_DTYPE);
    if (faults == 0 && !askable(1, &elements, dtype.bits, &faults))
        return;
    DLManagedTensor **place = random_out(out, &faults), **from = chunks;
    if (one_in(60)) {
        faults |= FAULT(INVALID_ARGUMENT);
        from = one_in(2) ? NULL : (DLManagedTensor **)(void *)((char *)chunks + 1 + below(7));
    }
    begin(function);
    if (judge(signs ? gc_unpack_signs(from, count, elements, dtype, place)
                    : gc_unpack_chunks(from, count, elements, place), faults)) {
        Rows rows = {1, 1, elements, bytes * (int64_t)count};
        unsigned char *all = packed;
        for (uint64_t k = 0; k < count; k++, packed += bytes)
            read_bytes(&chunk[k]);
        packed = all;
        unpack_model(rows, GC_BIT_ORDER_BIG);
        check_output(&out[0]->dl_tensor, dtype, 1, &elements);
        if (signs) {
            const unsigned char *found = out[0]->dl_tensor.data;
            unsigned char expected[8];
            for (int64_t i = 0; i < elements; i++) {
                write_sign(expected, dtype, bits[i], 1);
                EXPECT(memcmp(found + i * (dtype.bits / 8), expected, dtype.bits / 8) == 0);
            }
        } else {
            EXPECT(elements == 0 || memcmp(out[0]->dl_tensor.data, bits, (size_t)elements) == 0);
        }
        keep(out[0], false);
        out[0] = UNTOUCHED;
    }
    EXPECT(out[0] == UNTOUCHED && out[1] == UNTOUCHED);
    compare_windows();
}

static void call_pack_bits(size_t size) {
    DLManagedTensor *out[2] = {UNTOUCHED, UNTOUCHED};
    int64_t shape[MAX_DIMS + 1];
    int32_t axis;
    int along, ndim = 0;
    prepare(size);
    make_elements(0, INTEGERS, size);
    spoil(&src);
    Faults faults = src.faults | (src.is_float ? FAULT(UNSUPPORTED_DTYPE) : 0);
    Faults axis_fault = random_axis(&src, &axis, &along);
    faults |= axis_fault;
    int32_t order = random_order(&faults);
    if (src.counted && axis_fault == 0) {
        ndim = shape_along(&src, along, bytes_for(length_along(&src, along)), shape);
        if (!askable(ndim, shape, 8, &faults))
            return;
    }
    DLManagedTensor **place = random_out(out, &faults);
    begin(f_gc_pack_bits);
    if (judge(gc_pack_bits(src.passed, axis, order, place), faults)) {
        if (src.elements > 0) {
            Rows rows = rows_along(&src, along);
            rows.n = length_along(&src, along);
            rows.m = bytes_for(rows.n);
            read_bits(&src, false);
            pack_model(rows, order);
            EXPECT(memcmp(out[0]->dl_tensor.data, packed, (size_t)(rows.outer * rows.m * rows.inner)) == 0);
        }
        check_output(&out[0]->dl_tensor, uint8, ndim, shape);
        keep(out[0], false);
        out[0] = UNTOUCHED;
    }
    EXPECT(out[0] == UNTOUCHED && out[1] == UNTOUCHED);
    compare_windows();
}

/* A source of bytes. Now and then it repeats a row more often than anyone could read: some of it must do. */
static void make_bytes(size_t size) {
    make(&src, one_in(60) ? dtypes[below(DTYPES)] : uint8, -1, NULL, (int64_t)size / 64, &windows[0], false);
    DLTensor *t = &src.tensor.dl_tensor;
    if (t->ndim > 0 && t->strides != NULL && src.elements > 0 && one_in(16)) {
        int axis = (int)below((uint64_t)t->ndim);
        src.shape[axis] = (int64_t)1 << (30 + below(30));
        src.strides[axis] = 0;
        understand(&src);
        if (src.faults != 0 || !there(&src))
            make(&src, uint8, -1, NULL, (int64_t)size / 64, &windows[0], false);
    }
}

static void call_unpack_bits(size_t size) {
    DLManagedTensor *out[2] = {UNTOUCHED, UNTOUCHED};
    int64_t shape[MAX_DIMS + 1], bytes = 0, length = 0, count;
    int32_t axis;
    int along, ndim = 0;
    prepare(size);
    make_bytes(size);
    spoil(&src);
    Faults faults = src.faults;
    faults |= memcmp(&src.tensor.dl_tensor.dtype, &uint8, sizeof uint8) ? FAULT(UNSUPPORTED_DTYPE) : 0;
    Faults axis_fault = random_axis(&src, &axis, &along);
    faults |= axis_fault;
    int32_t order = random_order(&faults);
    if (src.counted && axis_fault == 0)
        bytes = length_along(&src, along);
    if (one_in(3))
        count = GC_COUNT_ALL;
    else if (one_in(20))
        count = wild();
    else if (one_in(2) || bytes > SMALL)
        count = (int64_t)below(bytes > SMALL ? 20 : 8 * (uint64_t)bytes + 20);
    else
        count = -(int64_t)below(8 * (uint64_t)bytes + 2);
    if (count >= 0)
        length = count;
    else if (bytes > INT64_MAX / 8)
        faults |= FAULT(SIZE_OVERFLOW);
    else
        length = 8 * bytes + (count == GC_COUNT_ALL ? 0 : count);
    bool known = src.counted && axis_fault == 0;
    if (known && length < 0) {
        faults |= FAULT(INVALID_ARGUMENT);
    } else if (known) {
        ndim = shape_along(&src, along, length, shape);
        if (!askable(ndim, shape, 8, &faults))
            return;
    }
    DLManagedTensor **place = random_out(out, &faults);
    begin(f_gc_unpack_bits);
    if (judge(gc_unpack_bits(src.passed, axis, count, order, place), faults)) {
        check_output(&out[0]->dl_tensor, uint8, ndim, shape);
        wide elements = product(ndim, shape);
        if (elements > 0 && src.elements <= limit) {
            Rows rows = rows_along(&src, along);
            rows.m = bytes;
            rows.n = length;
            read_bytes(&src);
            unpack_model(rows, order);
            EXPECT(memcmp(out[0]->dl_tensor.data, bits, (size_t)elements) == 0);
        }
        keep(out[0], false);
        out[0] = UNTOUCHED;
    }
    EXPECT(out[0] == UNTOUCHED && out[1] == UNTOUCHED);
    compare_windows();
}

/* What may be wrong between a source and an output that are both in order by themselves. */
static Faults faults_between(void) {
    bool src_on_card = (src.faults & NO_CUDA) != 0, dst_on_card = (dst.faults & NO_CUDA) != 0;
    Faults faults = src.faults | dst.faults;
    if (src_on_card || dst_on_card)
        faults |= FAULT(INVALID_ARGUMENT); /* different devices */
    if (faults == 0 && (intersect(&src, &dst) || overlaps_itself(&dst)))
        faults = FAULT(INVALID_ARGUMENT);
    return faults;
}

/* The side that is a row a chunk, for the elements of the other. */
static Faults faults_of_rows(const Argument *rows, const Argument *elements) {
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

/* The window of an output: now and then the one of its source. */
static const Window *output_window(void) {
    return &windows[one_in(16) ? 0 : 1];
}

static void call_pack_rows(int function, size_t size) {
    bool signs = function == f_gc_pack_signs_into;
    int64_t shape[2];
    prepare(size);
    if (signs)
        make_elements(INTEGERS, DTYPES - INTEGERS, size);
    else
        make_elements(0, INTEGERS, size);
    shape[0] = random_chunks();
    shape[1] = shape[0] == 0 ? (int64_t)below(3) : chunk_bytes(src.elements, (uint64_t)shape[0]);
    make(&dst, uint8, 2, shape, 0, output_window(), true);
    spoil(&src);
    spoil(&dst);
    Faults faults = faults_between();
    faults |= src.is_float == signs ? 0 : FAULT(UNSUPPORTED_DTYPE);
    faults |= faults_of_rows(&dst, &src);
    int32_t order = random_order(&faults);
    if (faults == 0) {
        Rows rows = {1, 1, src.elements, dst.elements};
        read_bits(&src, signs);
        pack_model(rows, order);
        write_bytes(&dst);
    }
    begin(function);
    void *stream = random_stream();
    judge(signs ? gc_pack_signs_into(src.passed, order, dst.passed, stream)
                : gc_pack_chunks_into(src.passed, order, dst.passed, stream),
          faults);
    compare_windows();
}

static void call_unpack_rows(size_t size) {
    int64_t shape[2];
    prepare(size);
    make(&dst, dtypes[below(DTYPES)], -1, NULL, (int64_t)size / 8, output_window(), true);
    shape[0] = random_chunks();
    shape[1] = shape[0] == 0 ? (int64_t)below(3) : chunk_bytes(dst.elements, (uint64_t)shape[0]);
    make(&src, uint8, 2, shape, 0, &windows[0], one_in(2));
    spoil(&src);
    spoil(&dst);
    Faults faults = faults_between() | faults_of_rows(&src, &dst);
    int32_t order = random_order(&faults);
    if (faults == 0) {
        Rows rows = {1, 1, dst.elements, src.elements};
        read_bytes(&src);
        unpack_model(rows, order);
        write_bits(&dst);
    }
    begin(f_gc_unpack_chunks_into);
    judge(gc_unpack_chunks_into(src.passed, order, dst.passed, random_stream()), faults);
    compare_windows();
}

static void call_unpack_sign_rows(size_t size) {
    static Argument scales;
    bool scaled = one_in(2);
    int64_t shape[2], count;
    prepare(size);
    /* What a scale becomes in 16 bits is not for this model to say. */
    DLDataType dtype = dtypes[scaled && !one_in(20) ? INTEGERS + 1 + below(2) : below(DTYPES)];
    if (scaled && dtype.bits == 16 && dtype.code != kDLInt && dtype.code != kDLUInt)
        scaled = false;
    make(&dst, dtype, -1, NULL, (int64_t)size / 8, output_window(), true);
    shape[0] = random_chunks();
    shape[1] = shape[0] == 0 ? (int64_t)below(3) : chunk_bytes(dst.elements, (uint64_t)shape[0]);
    make(&src, uint8, 2, shape, 0, &windows[0], one_in(2));
    count = one_in(2) ? 1 : one_in(30) ? (int64_t)below(4) : shape[0];
    scaled = scaled && count * 4 < (int64_t)size / 8;
    if (scaled) {
        make(&scales, one_in(30) ? dtypes[below(DTYPES)] : dtypes[INTEGERS + 1], 1, &count, 0, &windows[0], false);
        spoil(&scales);
        scaled = scales.passed != NULL;
    }
    spoil(&src);
    spoil(&dst);
    dtype = dst.tensor.dl_tensor.dtype;
    if (dtype.bits == 16 && dtype.code != kDLInt && dtype.code != kDLUInt)
        scaled = false; /* spoilt to that */
    Faults faults = src.faults | dst.faults | (scaled ? scales.faults : 0) | faults_of_rows(&src, &dst);
    if (!is_signed(dtype))
        faults |= FAULT(UNSUPPORTED_DTYPE);
    if (((src.faults | dst.faults | (scaled ? scales.faults : 0)) & NO_CUDA) != 0)
        faults |= FAULT(INVALID_ARGUMENT); /* different devices */
    if (scaled) {
        const DLTensor *s = &scales.tensor.dl_tensor;
        if (!dst.is_float || memcmp(&s->dtype, &dtypes[INTEGERS + 1], sizeof s->dtype) != 0)
            faults |= FAULT(UNSUPPORTED_DTYPE);
        if (scales.counted && (s->ndim != 1 || (s->shape[0] != 1 && src.counted && src.tensor.dl_tensor.ndim > 0 && s->shape[0] != src.tensor.dl_tensor.shape[0])))
            faults |= FAULT(SHAPE_MISMATCH);
        if (scales.counted && !is_contiguous(&scales))
            faults |= FAULT(NOT_CONTIGUOUS);
    }
    if (faults == 0 && (intersect(&src, &dst) || (scaled && intersect(&scales, &dst)) || overlaps_itself(&dst)))
        faults = FAULT(INVALID_ARGUMENT);
    int32_t order = random_order(&faults);
    if (faults == 0) {
        Rows rows = {1, 1, dst.elements, src.elements};
        const DLTensor *s = &scales.tensor.dl_tensor;
        read_bytes(&src);
        unpack_model(rows, order);
        Walk w = walk(&dst);
        for (int64_t i = 0; i < dst.elements; i++, step(&w)) {
            float scale = 1;
            if (scaled)
                memcpy(&scale, (const char *)s->data + s->byte_offset + (s->shape[0] > 1 ? 4 * (i / 8 / shape[1]) : 0), 4);
            write_sign(shadow_of(w.at), dtype, bits[i], scale);
        }
    }
    begin(f_gc_unpack_signs_into);
    judge(gc_unpack_signs_into(src.passed, scaled ? scales.passed : NULL, order, dst.passed, random_stream()), faults);
    compare_windows();
}

static void call_vote(size_t size) {
    int64_t shape[2];
    prepare(size);
    shape[0] = one_in(30) ? 0 : 1 + (int64_t)below(one_in(4) ? 80 : 9);
    shape[1] = (int64_t)below(size / (16 + 8 * (uint64_t)shape[0]));
    make(&src, uint8, 2, shape, 0, &windows[0], one_in(2));
    make(&dst, uint8, 1, shape + 1, 0, output_window(), true);
    spoil(&src);
    spoil(&dst);
    const DLTensor *s = &src.tensor.dl_tensor, *d = &dst.tensor.dl_tensor;
    uint64_t turn = one_in(2) ? below(10) : next();
    Faults faults = faults_between();
    if (memcmp(&s->dtype, &uint8, sizeof uint8) != 0 || memcmp(&d->dtype, &uint8, sizeof uint8) != 0)
        faults |= FAULT(UNSUPPORTED_DTYPE);
    if (src.counted && s->ndim != 2)
        faults |= FAULT(SHAPE_MISMATCH);
    if (src.counted && s->ndim == 2 && s->shape[0] == 0)
        faults |= FAULT(INVALID_ARGUMENT);
    if (src.counted && s->ndim == 2 && s->shape[1] > 1 && src.steps[1] != 1)
        faults |= FAULT(NOT_CONTIGUOUS);
    if (src.counted && dst.counted && (d->ndim != 1 || s->ndim != 2 || d->shape[0] != s->shape[1]))
        faults |= FAULT(SHAPE_MISMATCH);
    if (dst.counted && !is_contiguous(&dst))
        faults |= FAULT(NOT_CONTIGUOUS);
    if (faults == 0) {
        int64_t voters = s->shape[0], n = s->shape[1];
        read_bytes(&src);
        unsigned char *all = packed, *verdict = bits;
        for (int64_t i = 0; i < n; i++) {
            uint64_t voter = ((uint64_t)i % (uint64_t)voters + turn % (uint64_t)voters) % (uint64_t)voters;
            verdict[i] = 0;
            for (int bit = 0; bit < 8; bit++) {
                int64_t votes = 0;
                for (int64_t v = 0; v < voters; v++)
                    votes += all[v * n + i] >> bit & 1;
                int up = 2 * votes == voters ? all[(int64_t)voter * n + i] >> bit & 1 : 2 * votes > voters;
                verdict[i] = (unsigned char)(verdict[i] | up << bit);
            }
        }
        memcpy(packed, verdict, (size_t)n);
        write_bytes(&dst);
    }
    begin(f_gc_vote_signs_into);
    judge(gc_vote_signs_into(src.passed, turn, dst.passed, random_stream()), faults);
    compare_windows();
}

static bool same_shape(const Argument *a, int ndim, const int64_t *shape) {
    return a->tensor.dl_tensor.ndim == ndim &&
           (ndim == 0 || memcmp(a->tensor.dl_tensor.shape, shape, sizeof *shape * (size_t)ndim) == 0);
}

static void call_bits_into(int function, size_t size) {
    bool packs = function == f_gc_pack_bits_into;
    int64_t shape[MAX_DIMS + 1], length;
    int32_t axis;
    int along, ndim = 0;
    prepare(size);
    if (packs)
        make_elements(0, INTEGERS, size);
    else
        make_bytes(size);
    Faults axis_fault = random_axis(&src, &axis, &along);
    length = axis_fault ? 0 : length_along(&src, along);
    if (packs)
        length = bytes_for(length);
    else if (length <= SMALL)
        length = one_in(2) ? length * 8 : (int64_t)below((uint64_t)length * 8 + 9);
    else
        length = (int64_t)below(20);
    ndim = axis_fault ? 0 : shape_along(&src, along, length, shape);
    DLDataType dtype = packs ? uint8 : dtypes[below(DTYPES)];
    wide elements = product(ndim, shape);
    if (elements > (wide)size / (dtype.bits / 8))
        return; /* no room for this much */
    make(&dst, dtype, ndim, shape, 0, output_window(), true);
    spoil(&src);
    spoil(&dst);
    /* Spoiling the source may have changed what its axis is. */
    int dims = src.tensor.dl_tensor.ndim, most = dims < 1 ? 1 : dims;
    axis_fault = axis == GC_AXIS_NONE || (axis >= -most && axis < most) ? 0 : FAULT(INVALID_ARGUMENT);
    along = axis == GC_AXIS_NONE || dims <= 0 ? -1 : axis < 0 ? axis + dims : axis;
    Faults faults = faults_between() | axis_fault;
    if (packs && src.is_float)
        faults |= FAULT(UNSUPPORTED_DTYPE);
    if (memcmp(packs ? &dst.tensor.dl_tensor.dtype : &src.tensor.dl_tensor.dtype, &uint8, sizeof uint8) != 0)
        faults |= FAULT(UNSUPPORTED_DTYPE);
    if (src.counted && dst.counted && axis_fault == 0) {
        int out_axis = along < 0 ? 0 : along;
        length = packs                                     ? bytes_for(length_along(&src, along))
                 : out_axis < dst.tensor.dl_tensor.ndim    ? dst.tensor.dl_tensor.shape[out_axis]
                                                           : 0;
        ndim = shape_along(&src, along, length, shape);
        if (!same_shape(&dst, ndim, shape))
            faults |= FAULT(SHAPE_MISMATCH);
    }
    int32_t order = random_order(&faults);
    if (faults == 0 && dst.elements > 0) {
        Rows rows = rows_along(&src, along);
        rows.n = packs ? length_along(&src, along) : length;
        rows.m = packs ? length : length_along(&src, along);
        if (packs) {
            read_bits(&src, false);
            pack_model(rows, order);
            write_bytes(&dst);
        } else if (src.elements <= limit) {
            read_bytes(&src);
            unpack_model(rows, order);
            write_bits(&dst);
        }
    }
    begin(function);
    void *stream = random_stream();
    judge(packs ? gc_pack_bits_into(src.passed, axis, order, dst.passed, stream)
                : gc_unpack_bits_into(src.passed, axis, order, dst.passed, stream),
          faults);
    /* Beyond the limit the model has not said what is written. */
    if (faults != 0 || packs || src.elements <= limit)
        compare_windows();
}

/* ---- codecs ------------------------------------------------------------------------------------------------------ */

/* What a call must do to its numbers is tests/python/test_codec.py's. Here: which calls are refused, that refused ones
 * change nothing, that others write to their outputs only, and that bytes of strangers are told from our own. */

enum { SEGMENTS = 3, SAVED = 32 << 10 };
static const DLDataType float32 = {kDLFloat, 32, 1};
static const DLDataType gradients[] = {{kDLFloat, 32, 1}, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1}};

typedef struct {
    gc_codec_t *handle;
    gc_codec_options_t options;
    int64_t sizes[SEGMENTS], chunk_bytes, elements, part_elements, state_bytes;
    int segments;
    int64_t n_chunks;
    bool pending; /* a step waits for its commit */
    bool has_payload, has_state;
} Made;

static unsigned char saved_payload[SAVED], saved_state[SAVED];

/* The sizes that docs/NUMERICS.md gives. */
static int64_t up(int64_t bytes, int64_t to) {
    return (bytes + to - 1) / to * to;
}

static void measure(Made *m) {
    int64_t bytes = 0, units = 0, first = 0, error = m->options.error == GC_ERROR_BFLOAT16 ? 2 : 4;
    bool server = m->options.server != 0;
    m->elements = m->part_elements = 0;
    for (int i = 0; i < m->segments; i++) {
        m->elements += m->sizes[i];
        bytes += bytes_for(m->sizes[i]);
        units += up(m->sizes[i], 1024);
    }
    int64_t in_chunk = bytes / m->n_chunks + (bytes % m->n_chunks != 0);
    m->chunk_bytes = up(64 + 4 * m->segments, 16) + up(in_chunk, 16);
    for (int i = 0; i < m->segments && server; first += bytes_for(m->sizes[i++])) {
        int64_t low = (int64_t)(m->options.server - 1) * in_chunk, high = low + in_chunk, part;
        int64_t last = first + bytes_for(m->sizes[i]);
        low = low > first ? low : first;
        high = high < last ? high : last;
        if (low < high) {
            part = high == last ? m->sizes[i] - 8 * (low - first) : 8 * (high - low);
            m->part_elements += part;
            units += up(part, 1024);
        }
    }
    if (m->options.codec == GC_CODEC_SIGN || m->options.error == GC_ERROR_NONE)
        units = 0;
    m->state_bytes = up(64 + 4 * m->segments * (server ? 2 : 1), 256) + units * error;
}

/* A codec of a random description, which may have to be refused; or an all-reduce of it, where there is a `comm`. */
static bool make_codec(Made *m, gc_comm_t *comm) {
    gc_codec_options_t *o = &m->options;
    gc_codec_t *out[2] = {(gc_codec_t *)(void *)UNTOUCHED, (gc_codec_t *)(void *)UNTOUCHED}, **place = out;
    const gc_codec_options_t *passed = o;
    Faults faults = 0;
    memset(m, 0, sizeof *m);
    o->struct_size = sizeof *o;
    o->codec = one_in(3) ? GC_CODEC_SIGN : GC_CODEC_ONEBIT;
    o->error = o->codec == GC_CODEC_SIGN ? (one_in(2) ? GC_ERROR_NONE : 0) : (int32_t)below(3);
    o->scale = (int32_t)below(2);
    o->nonfinite = (int32_t)below(3);
    o->beta = one_in(2) ? 0.0f : 0.5f;
    o->device.device_type = one_in(2) ? 0 : one_in(2) ? kDLCPU : kDLCUDAHost;
    o->values = one_in(3) ? o->values : gradients[below(3)];
    o->results = one_in(3) ? o->results : gradients[below(3)];
    m->segments = one_in(3) ? 1 : (int)below(SEGMENTS + 1);
    for (int i = 0; i < m->segments; i++)
        m->sizes[i] = one_in(6) ? 0 : i == 0 && m->segments < 3 && one_in(10) ? 1025 : (int64_t)below(70);
    if (m->segments == 1 && one_in(2)) {
        o->n_elements = m->sizes[0];
        o->n_segments = one_in(2) ? 0 : (size_t)next(); /* of no account where there are no segments */
    } else {
        o->segments = m->sizes;
        o->n_segments = (size_t)m->segments;
    }
    o->n_chunks = (size_t)below(5);
    m->n_chunks = o->n_chunks ? (int64_t)o->n_chunks : 1;
    o->server = below((uint64_t)m->n_chunks + 1);
    if (comm != NULL) {
        m->n_chunks = 1;
        o->n_chunks = (size_t)below(2);
        o->server = 0;
        memset(&o->results, 0, sizeof o->results);
        if (one_in(2))
            o->results = o->values;
        if (one_in(20)) { /* what all-reduces do not take */
            o->n_chunks = 2;
            faults |= FAULT(INVALID_ARGUMENT);
        }
    }
    while (one_in(4))
        switch (below(12)) {
        case 0: o->struct_size = (uint32_t)below(sizeof *o); faults |= FAULT(INVALID_ARGUMENT); break;
        case 1: o->codec = one_in(2) ? 0 : 3 + (int32_t)below(1000); faults |= FAULT(INVALID_ARGUMENT); break;
        case 2: o->error = 3 + (int32_t)below(100); faults |= FAULT(INVALID_ARGUMENT); break;
        case 3: o->scale = -1 - (int32_t)below(100); faults |= FAULT(INVALID_ARGUMENT); break;
        case 4: o->nonfinite = INT32_MAX; faults |= FAULT(INVALID_ARGUMENT); break;
        case 5: o->beta = one_in(2) ? HUGE_VALF : -HUGE_VALF; faults |= FAULT(INVALID_ARGUMENT); break;
        case 6: o->reserved[below(4)] = next() | 1; faults |= FAULT(INVALID_ARGUMENT); break;
        case 7: o->server = (uint64_t)m->n_chunks + 1 + below(9); faults |= FAULT(INVALID_ARGUMENT); break;
        case 8:
            *(one_in(2) ? &o->values : &o->results) = dtypes[below(INTEGERS)];
            faults |= FAULT(UNSUPPORTED_DTYPE);
            break;
        case 9:
            o->device.device_type = one_in(2) ? kDLCUDA : kDLOpenCL;
            o->device.device_id = 1000;
            faults |= NO_CUDA;
            break;
        case 10:
            if (one_in(2)) {
                passed = one_in(2) ? NULL : (const gc_codec_options_t *)(const void *)((const char *)o + 1 + below(7));
            } else {
                place = one_in(2) ? NULL : (gc_codec_t **)(void *)((char *)out + 1 + below(7));
            }
            faults |= FAULT(INVALID_ARGUMENT);
            break;
        case 11:
            if (o->segments == NULL) {
                o->n_elements = one_in(2) ? -1 - (int64_t)below(9) : INT64_MAX - (int64_t)below(9);
                faults |= FAULT(INVALID_ARGUMENT) | FAULT(SIZE_OVERFLOW) | FAULT(OUT_OF_MEMORY);
            } else if (one_in(2)) {
                o->n_elements = one_in(2) ? 1 : -1;
                faults |= FAULT(INVALID_ARGUMENT);
            } else if (one_in(2)) {
                o->n_segments = (size_t)1 << 60 | (size_t)next();
                faults |= FAULT(SIZE_OVERFLOW);
            } else if (m->segments > 0) {
                o->segments = (const int64_t *)(const void *)((const char *)m->sizes + 1 + below(7));
                faults |= FAULT(INVALID_ARGUMENT);
            }
            break;
        }
    bool made;
    if (comm == NULL) {
        begin(f_gc_codec_create);
        made = judge(gc_codec_create(passed, place), faults);
    } else {
        static const DLDataType none;
        if (memcmp(&o->results, &none, sizeof none) != 0 && memcmp(&o->results, &o->values, sizeof none) != 0)
            faults |= FAULT(INVALID_ARGUMENT);
        if (one_in(60)) {
            comm = one_in(2) ? NULL : (gc_comm_t *)(void *)((char *)comm + 1 + below(7));
            faults |= FAULT(INVALID_ARGUMENT);
        }
        begin(f_gc_allreduce_create);
        made = judge(gc_allreduce_create(comm, passed, (gc_allreduce_t **)(void *)place), faults);
    }
    EXPECT((out[0] == (gc_codec_t *)(void *)UNTOUCHED) == !made && out[1] == (gc_codec_t *)(void *)UNTOUCHED);
    if (!made)
        return false;
    m->handle = out[0];
    if (comm != NULL)
        o->server = 1; /* a rank that is alone reduces all there is */
    measure(m);
    return true;
}

/* Places a tensor behind the one before, as codecs want them; now and then anyhow, or spoilt. */
static void place(Argument *a, DLDataType dtype, int64_t elements, size_t alignment, int window, size_t *used) {
    DLTensor *t = &a->tensor.dl_tensor;
    const Window *w = &windows[window];
    int64_t shape[2] = {elements, 1};
    dtype = one_in(60) && (size_t)elements <= w->size / 8 ? dtypes[below(DTYPES)] : dtype;
    make(a, dtype, one_in(3) ? 2 : 1, shape, 0, w, true);
    size_t at = (*used + below(3) * alignment + alignment - 1) / alignment * alignment;
    if (elements > 0 && !one_in(40) && at + (size_t)elements * a->size <= w->size) {
        t->strides = NULL;
        t->byte_offset = one_in(4) ? at : 0;
        t->data = w->base + at - t->byte_offset;
        understand(a);
        *used = at + (size_t)elements * a->size;
    }
    if (one_in(8))
        spoil(a);
}

/* What is wrong with an argument of a codec on the CPU. */
static Faults faults_of(const Argument *a, const DLDataType *known, int n_known, int64_t elements, bool aligned) {
    const DLTensor *t = &a->tensor.dl_tensor;
    Faults faults = a->faults;
    bool taken = false;
    if (a->passed == NULL || unaligned(a->passed))
        return faults;
    for (int i = 0; i < n_known; i++)
        taken |= memcmp(&t->dtype, &known[i], sizeof *known) == 0;
    faults |= taken ? 0 : FAULT(UNSUPPORTED_DTYPE);
    faults |= faults & NO_CUDA ? FAULT(INVALID_ARGUMENT) : 0; /* another device than the codec's */
    if (!a->counted)
        return faults;
    faults |= a->elements == elements ? 0 : FAULT(SHAPE_MISMATCH);
    faults |= is_contiguous(a) ? 0 : FAULT(NOT_CONTIGUOUS);
    return faults | (aligned && ((uintptr_t)t->data + t->byte_offset) % 16 != 0 ? FAULT(INVALID_ARGUMENT) : 0);
}

/* The same where NULL is no argument. */
static Faults faults_of_optional(const Argument *a, const DLDataType *known, int n_known, int64_t elements) {
    return a->passed == NULL ? 0 : faults_of(a, known, n_known, elements, false);
}

static Faults faults_of_overlap(const Argument *out, const Argument *in) {
    bool both = out->passed != NULL && in->passed != NULL && out->faults == 0 && in->faults == 0;
    return both && intersect(out, in) ? FAULT(INVALID_ARGUMENT) : 0;
}

/* A scalar, or NULL. */
static void place_optional(Argument *a, DLDataType dtype, int64_t elements, int window, size_t *used) {
    place(a, dtype, elements, 1, window, used);
    if (one_in(2)) {
        a->passed = NULL;
        understand(a);
    }
}

/* Fills a source with bytes: those given, those with one of them changed, or noise. Gives what the library
 * may say of them. */
static Faults fill(const Argument *a, const unsigned char *bytes, size_t count, bool known) {
    unsigned char *at = (unsigned char *)a->tensor.dl_tensor.data + a->tensor.dl_tensor.byte_offset;
    Faults faults = 0;
    if (!known || one_in(3)) {
        for (size_t i = 0; i < 64; i++) /* a header of ours may lie there */
            at[i] = (unsigned char)next();
        memcpy(shadow_of((uintptr_t)at), at, 64);
        return FAULT(CORRUPT);
    }
    memcpy(at, bytes, count);
    if (one_in(2)) {
        uint64_t place = one_in(2) ? below(64) : below(count);
        bool field = place < 28 || (place >= 32 && place < 56); /* behind flags; before zeros, or the turn of a state */
        at[place] ^= (unsigned char)(1 << below(8));
        faults = FAULT(CORRUPT) | (field ? 0 : MAY_SUCCEED);
    }
    memcpy(shadow_of((uintptr_t)at), at, count);
    return faults;
}

/* What was written to is what the next calls begin with. */
static void accept(const Argument *a) {
    if (a->passed == NULL)
        return;
    Walk w = walk(a);
    for (int64_t i = 0; i < a->elements; i++, step(&w))
        memcpy(shadow_of(w.at), (const void *)w.at, a->size);
}

static Faults judged; /* the status of the last call, as a set */

static bool judge_codec(gc_status_t status, Faults faults) {
    judged = (Faults)1 << status;
    return judge(status, faults);
}

static gc_codec_t *random_handle(const Made *m, Faults *faults) {
    if (!one_in(60))
        return m->handle;
    *faults |= FAULT(INVALID_ARGUMENT);
    return one_in(2) ? NULL : (gc_codec_t *)(void *)((char *)m->handle + 1 + below(7));
}

static void place_values(const Made *m, DLDataType dtype, int window, size_t *used, const DLTensor **pointers) {
    for (int i = 0; i < m->segments; i++) {
        place(&chunk[i], dtype, m->sizes[i], 1, window, used);
        pointers[i] = chunk[i].passed;
    }
}

static size_t random_count(const Made *m, Faults *faults) {
    if (!one_in(60))
        return (size_t)m->segments;
    size_t count = one_in(2) || m->segments == 0 ? (size_t)1 << 61 | (size_t)next() : (size_t)m->segments - 1;
    *faults |= FAULT(INVALID_ARGUMENT) | FAULT(SIZE_OVERFLOW);
    return count;
}

static void call_encode(Made *m) {
    const DLTensor *values[SEGMENTS + 1] = {NULL};
    DLDataType dtype = m->options.values.bits ? m->options.values : float32;
    size_t in = 0, out = 0;
    Faults faults = 0;
    place_values(m, dtype, 0, &in, values);
    place(&dst, uint8, m->n_chunks * m->chunk_bytes, 16, one_in(16) ? 0 : 1, &out);
    place_optional(&chunk[4], float32, 1, 0, &in);
    place_optional(&chunk[5], float32, 1, 0, &in);
    for (int i = 0; i < m->segments; i++)
        faults |= faults_of(&chunk[i], &dtype, 1, m->sizes[i], false) | faults_of_overlap(&dst, &chunk[i]);
    for (int i = 4; i < 6; i++)
        faults |= faults_of_optional(&chunk[i], &float32, 1, 1) | faults_of_overlap(&dst, &chunk[i]);
    faults |= faults_of(&dst, &uint8, 1, m->n_chunks * m->chunk_bytes, true);
    gc_codec_t *handle = random_handle(m, &faults);
    size_t count = random_count(m, &faults);
    begin(f_gc_codec_encode);
    if (judge_codec(gc_codec_encode(handle, values, count, chunk[4].passed, chunk[5].passed, dst.passed,
                                    random_stream()), faults)) {
        accept(&dst);
        memcpy(saved_payload, (unsigned char *)dst.tensor.dl_tensor.data + dst.tensor.dl_tensor.byte_offset,
               (size_t)(m->n_chunks * m->chunk_bytes));
        m->has_payload = true;
        m->pending |= m->options.nonfinite == GC_NONFINITE_TRANSACTIONAL;
    }
}

static void call_decode(Made *m) {
    const DLTensor *values[SEGMENTS + 1] = {NULL};
    int32_t mode = one_in(40) ? (int32_t)wild() : (int32_t)below(2);
    int32_t divisor = one_in(40) ? (int32_t)wild() : (int32_t)below(5);
    DLDataType dtype = mode == GC_DECODE_ADD ? float32 : gradients[below(3)];
    size_t in = 0, out = 0;
    Faults faults = 0;
    place_values(m, dtype, 1, &out, values);
    place(&src, uint8, m->n_chunks * m->chunk_bytes, 16, one_in(16) ? 1 : 0, &in);
    place_optional(&chunk[4], float32, 1, 0, &in);
    for (int i = 0; i < m->segments; i++) {
        const DLDataType *known = mode == GC_DECODE_ADD ? &float32 : gradients;
        faults |= faults_of(&chunk[i], known, mode == GC_DECODE_ADD ? 1 : 3, m->sizes[i], false);
        faults |= faults_of_overlap(&chunk[i], &src) | faults_of_overlap(&chunk[i], &chunk[4]);
        for (int j = 0; j < i; j++)
            faults |= faults_of_overlap(&chunk[i], &chunk[j]);
        if (memcmp(&chunk[i].tensor.dl_tensor.dtype, &chunk[0].tensor.dl_tensor.dtype, sizeof dtype) != 0)
            faults |= FAULT(UNSUPPORTED_DTYPE);
    }
    faults |= faults_of_optional(&chunk[4], &float32, 1, 1);
    faults |= faults_of(&src, &uint8, 1, m->n_chunks * m->chunk_bytes, true);
    faults |= (mode == 0 || mode == 1) && divisor >= 0 ? 0 : FAULT(INVALID_ARGUMENT);
    gc_codec_t *handle = random_handle(m, &faults);
    size_t count = random_count(m, &faults);
    if (faults == 0)
        faults = fill(&src, saved_payload, (size_t)(m->n_chunks * m->chunk_bytes), m->has_payload);
    begin(f_gc_codec_decode);
    if (judge_codec(gc_codec_decode(handle, src.passed, divisor, chunk[4].passed, mode, (DLTensor *const *)values,
                                    count, random_stream()), faults))
        for (int i = 0; i < m->segments; i++)
            accept(&chunk[i]);
}

static void call_reduce(Made *m) {
    int64_t rows = 1 + (int64_t)below(4), shape[2] = {rows, m->chunk_bytes};
    uint64_t number = m->options.server ? m->options.server - 1 : below(3);
    size_t in = 0, out = 0;
    place(&src, uint8, rows * m->chunk_bytes, 16, 0, &in);
    bool whole = src.passed == &src.tensor && src.faults == 0 && src.elements == rows * m->chunk_bytes &&
                 is_contiguous(&src) && src.tensor.dl_tensor.ndim <= 2;
    if (whole && !one_in(20)) {
        memcpy(src.shape, shape, sizeof shape);
        src.tensor.dl_tensor.shape = src.shape;
        src.tensor.dl_tensor.ndim = 2;
        src.tensor.dl_tensor.strides = NULL;
        understand(&src);
    }
    place(&dst, uint8, m->chunk_bytes, 16, one_in(16) ? 0 : 1, &out);
    const DLTensor *t = &src.tensor.dl_tensor;
    Faults faults = faults_of(&src, &uint8, 1, src.elements, true);
    faults |= faults_of(&dst, &uint8, 1, m->chunk_bytes, true) | faults_of_overlap(&dst, &src);
    if (src.counted && (t->ndim != 2 || t->shape[0] == 0 || t->shape[1] != m->chunk_bytes))
        faults |= FAULT(SHAPE_MISMATCH) | FAULT(INVALID_ARGUMENT);
    number = one_in(20) ? (uint64_t)wild() : number;
    if (m->options.server == 0 || number != m->options.server - 1)
        faults |= FAULT(INVALID_ARGUMENT);
    gc_codec_t *handle = random_handle(m, &faults);
    if (faults == 0) {
        rows = t->shape[0];
        for (int64_t r = 0; r < rows; r++) {
            Argument row = src;
            row.tensor.dl_tensor.data = (unsigned char *)t->data + r * m->chunk_bytes;
            faults |= fill(&row, saved_payload + number * (uint64_t)m->chunk_bytes, (size_t)m->chunk_bytes,
                           m->has_payload);
        }
        if ((faults & FAULT(CORRUPT)) && rows > 1)
            faults |= MAY_SUCCEED;
    }
    bool right = (faults & ~(FAULT(CORRUPT) | MAY_SUCCEED)) == 0;
    begin(f_gc_codec_reduce);
    judge_codec(gc_codec_reduce(handle, number, src.passed, dst.passed, random_stream()), faults);
    if (right) {
        accept(&dst); /* what is corrupt goes out, too, and is marked */
        EXPECT(judged != FAULT(CORRUPT) ||
               (((unsigned char *)dst.tensor.dl_tensor.data + dst.tensor.dl_tensor.byte_offset)[28] & 1) != 0);
        bool steps = m->options.nonfinite == GC_NONFINITE_TRANSACTIONAL;
        m->pending |= steps;
        if (steps && judged != FAULT(OK)) { /* a step from before may wait, or none */
            begin(f_gc_codec_rollback);
            judge(gc_codec_rollback(m->handle, NULL), 0);
            m->pending = false;
        }
    }
}

/* Flags, scales, and the end of a step. */
static void call_small_results(Made *m) {
    static const DLDataType scalars[] = {{kDLBool, 8, 1}, {kDLInt, 32, 1}, {kDLFloat, 32, 1}};
    static const DLDataType uint32 = {kDLUInt, 32, 1};
    size_t out = 0;
    bool scales = one_in(2);
    Faults faults = 0;
    gc_codec_t *handle = random_handle(m, &faults);
    Faults no_step = m->options.nonfinite == GC_NONFINITE_TRANSACTIONAL ? 0 : FAULT(INVALID_ARGUMENT);
    switch (below(5)) {
    case 0: case 1:
        place(&dst, scales ? float32 : uint32, scales ? m->segments : 1, 1, 1, &out);
        faults |= faults_of(&dst, scales ? &float32 : &uint32, 1, scales ? m->segments : 1, false);
        begin(scales ? f_gc_codec_scales : f_gc_codec_flags);
        if (judge_codec(scales ? gc_codec_scales(handle, dst.passed, random_stream())
                               : gc_codec_flags(handle, dst.passed, random_stream()), faults))
            accept(&dst);
        return;
    case 2:
        place_optional(&src, scalars[below(3)], 1, 0, &out);
        faults |= faults_of_optional(&src, scalars, 3, 1) | no_step;
        begin(f_gc_codec_commit);
        judge_codec(gc_codec_commit(handle, src.passed, random_stream()), faults);
        break;
    case 3:
        begin(f_gc_codec_rollback);
        faults |= no_step;
        judge_codec(gc_codec_rollback(handle, random_stream()), faults);
        break;
    case 4:
        begin(f_gc_codec_reset);
        judge_codec(gc_codec_reset(handle, random_stream()), faults);
        break;
    }
    if (faults == 0)
        m->pending = false;
}

static void call_state(Made *m) {
    bool outwards = one_in(2), errors = one_in(2), kept = m->options.codec == GC_CODEC_ONEBIT &&
                                                          m->options.error != GC_ERROR_NONE;
    size_t used = 0;
    Faults faults = m->pending ? FAULT(INVALID_ARGUMENT) : 0;
    gc_codec_t *handle = random_handle(m, &faults);
    Argument *one = outwards ? &dst : &src, *other = &chunk[4];
    if (errors) {
        place_optional(one, float32, m->elements, outwards, &used);
        place_optional(other, float32, m->part_elements, outwards, &used);
        faults |= faults_of_optional(one, &float32, 1, m->elements);
        faults |= faults_of_optional(other, &float32, 1, m->part_elements);
        faults |= outwards ? faults_of_overlap(one, other) : 0;
        faults |= m->options.server == 0 && other->passed != NULL ? FAULT(INVALID_ARGUMENT) : 0;
        faults |= !outwards && !kept ? FAULT(INVALID_ARGUMENT) : 0;
        begin(outwards ? f_gc_codec_errors_out : f_gc_codec_errors_in);
        bool done = judge_codec(outwards ? gc_codec_errors_out(handle, one->passed, other->passed, random_stream())
                                         : gc_codec_errors_in(handle, one->passed, other->passed, random_stream()),
                                faults);
        if (done && outwards) {
            accept(one);
            accept(other);
        }
        return;
    }
    place(one, uint8, m->state_bytes, 16, outwards, &used);
    faults |= faults_of(one, &uint8, 1, m->state_bytes, true);
    if (!outwards && faults == 0)
        faults = fill(one, saved_state, (size_t)m->state_bytes, m->has_state);
    begin(outwards ? f_gc_codec_state_out : f_gc_codec_state_in);
    if (judge_codec(outwards ? gc_codec_state_out(handle, one->passed, random_stream())
                             : gc_codec_state_in(handle, one->passed, random_stream()), faults) && outwards) {
        accept(one);
        memcpy(saved_state, (unsigned char *)one->tensor.dl_tensor.data + one->tensor.dl_tensor.byte_offset,
               (size_t)m->state_bytes);
        m->has_state = true;
    }
}

static void call_codec(void) {
    Made m;
    prepare(MEDIUM);
    if (!make_codec(&m, NULL))
        return;
    begin(f_gc_codec_payload_bytes);
    EXPECT(gc_codec_payload_bytes(m.handle) == m.n_chunks * m.chunk_bytes);
    succeeded();
    begin(f_gc_codec_state_bytes);
    EXPECT(gc_codec_state_bytes(m.handle) == m.state_bytes);
    succeeded();
    for (int steps = 4 + (int)below(20); steps > 0; steps--) {
        switch (below(6)) {
        case 0: case 1: call_encode(&m); break;
        case 2: call_decode(&m); break;
        case 3: call_reduce(&m); break;
        case 4: call_small_results(&m); break;
        case 5: call_state(&m); break;
        }
        compare_windows();
    }
    begin(f_gc_codec_free);
    gc_codec_free(m.handle);
    succeeded();
}

/* ---- all-reduces of a rank that is alone ------------------------------------------------------------------------- */

static int32_t never(void *ctx, const void *send, void *recv, size_t bytes, DLDevice device, void *stream) {
    (void)ctx, (void)send, (void)recv, (void)bytes, (void)device, (void)stream;
    EXPECT(!"a rank that is alone exchanges something");
    return 1;
}

/* The handle, or what is none. */
static void *spoilt(void *handle, Faults *faults) {
    if (!one_in(60))
        return handle;
    *faults |= FAULT(INVALID_ARGUMENT);
    return one_in(2) ? NULL : (char *)handle + 1 + below(7);
}

static gc_comm_t *make_comm(void) {
    gc_comm_t *out[3] = {NULL}, **place = out;
    gc_transport_t transport, *passed = &transport;
    Faults faults = 0;
    if (one_in(2)) {
        int32_t ranks = one_in(8) ? -(int32_t)below(INT32_MAX) : 1 + (int32_t)below(3);
        place = one_in(40) ? NULL : out;
        faults = ranks < 1 || place == NULL ? FAULT(INVALID_ARGUMENT) : 0;
        begin(f_gc_comm_group);
        bool made = judge(gc_comm_group(ranks, place), faults);
        for (int i = 0; i < 3; i++)
            EXPECT((out[i] != NULL) == (made && i < ranks));
        for (int i = made && ranks == 1 ? 1 : 0; i < 3; i++)
            gc_comm_free(out[i]);
        return made && ranks == 1 ? out[0] : NULL;
    }
    memset(&transport, 0, sizeof transport);
    transport.struct_size = sizeof transport;
    transport.world_size = 1;
    transport.flags = (uint32_t)below(2);
    transport.all_to_all = transport.all_gather = never;
    while (one_in(4)) {
        faults = FAULT(INVALID_ARGUMENT);
        switch (below(6)) {
        case 0: transport.struct_size = (uint32_t)below(sizeof transport); break;
        case 1: transport.rank = one_in(2) ? 1 : -1 - (int32_t)below(INT32_MAX); break;
        case 2: transport.world_size = -(int32_t)below(INT32_MAX); break;
        case 3: transport.flags |= 2u << below(31); break;
        case 4: *(one_in(2) ? &transport.all_to_all : &transport.all_gather) = NULL; break;
        case 5: passed = one_in(2) ? NULL : (gc_transport_t *)(void *)((char *)&transport + 1 + below(7)); break;
        }
    }
    begin(f_gc_comm_from_transport);
    bool made = judge(gc_comm_from_transport(passed, place), faults);
    EXPECT((out[0] != NULL) == made && out[1] == NULL);
    return out[0];
}

/* The form whose errors are the caller's. */
static void call_plain_allreduce(gc_comm_t *comm) {
    static const int types[] = {kDLCPU, kDLCUDAHost, kDLCUDA, kDLOpenCL};
    DLDevice device = {(DLDeviceType)types[below(4)], 1000};
    int64_t count = one_in(3) ? INT64_MIN + (int64_t)below(INT64_MAX) : (int64_t)below(5000);
    int64_t elements = (int64_t)below(600);
    size_t used = 0;
    Faults faults = count < 0 ? FAULT(INVALID_ARGUMENT) : 0;
    faults |= device.device_type == kDLCUDA && count != 0 ? NO_CUDA : 0;
    faults |= device.device_type == kDLOpenCL ? FAULT(UNSUPPORTED_DEVICE) : 0;
    void *handle = spoilt(comm, &faults);
    begin(f_gc_comm_reserve);
    judge(gc_comm_reserve(handle, device, count), faults);

    faults = 0;
    handle = spoilt(comm, &faults);
    place(&chunk[0], float32, elements, 1, 1, &used);
    elements = chunk[0].counted ? chunk[0].elements : elements;
    int64_t shard = gc_shard_elements(elements, 1);
    place(&chunk[1], float32, elements < 600 ? elements : 600, 1, one_in(20) ? 0 : 1, &used);
    place(&chunk[2], float32, shard >= 0 && shard < 600 ? shard : 600, 1, 1, &used);
    faults |= faults_of(&chunk[0], &float32, 1, elements, false) | faults_of(&chunk[1], &float32, 1, elements, false) |
              faults_of(&chunk[2], &float32, 1, shard, false) | (shard < 0 ? FAULT(SIZE_OVERFLOW) : 0);
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < i; j++)
            faults |= faults_of_overlap(&chunk[i], &chunk[j]);
    begin(f_gc_compressed_allreduce);
    if (judge(gc_compressed_allreduce(handle, chunk[0].passed, chunk[1].passed, chunk[2].passed, random_stream()),
              faults))
        for (int i = 0; i < 3; i++)
            accept(&chunk[i]);
    begin(f_gc_comm_async_error);
    judge(gc_comm_async_error(comm), 0);
}

static void call_run(Made *m, gc_allreduce_t *allreduce) {
    const DLTensor *values[SEGMENTS + 1] = {NULL};
    DLDataType dtype = m->options.values.bits ? m->options.values : float32;
    size_t in = 0, out = 0;
    Faults faults = 0;
    place_values(m, dtype, 1, &out, values);
    place_optional(&chunk[4], float32, 1, one_in(16) ? 1 : 0, &in);
    place_optional(&chunk[5], float32, 1, 0, &in);
    for (int i = 0; i < m->segments; i++) {
        faults |= faults_of(&chunk[i], &dtype, 1, m->sizes[i], false);
        for (int j = 0; j < 6; j++)
            faults |= j < i || j > 3 ? faults_of_overlap(&chunk[i], &chunk[j]) : 0;
    }
    for (int i = 4; i < 6; i++)
        faults |= faults_of_optional(&chunk[i], &float32, 1, 1);
    void *handle = spoilt(allreduce, &faults);
    size_t count = random_count(m, &faults);
    begin(f_gc_allreduce_run);
    if (judge(gc_allreduce_run(handle, (DLTensor *const *)values, count, chunk[4].passed, chunk[5].passed,
                               random_stream()), faults)) {
        for (int i = 0; i < m->segments; i++)
            accept(&chunk[i]);
        m->pending |= m->options.nonfinite == GC_NONFINITE_TRANSACTIONAL;
    }
}

static void call_allreduce_errors(const Made *m, gc_allreduce_t *allreduce) {
    bool outwards = one_in(2), kept = m->options.codec == GC_CODEC_ONEBIT && m->options.error != GC_ERROR_NONE;
    int64_t rows = outwards ? 1 : 1 + (int64_t)below(3);
    size_t used = 0;
    Faults faults = m->pending ? FAULT(INVALID_ARGUMENT) : 0;
    void *handle = spoilt(allreduce, &faults);
    Argument *one = outwards ? &dst : &src, *other = &chunk[4];
    place_optional(one, float32, rows * m->elements, outwards, &used);
    place_optional(other, float32, m->elements, outwards, &used);
    faults |= faults_of_optional(one, &float32, 1, rows * m->elements);
    faults |= faults_of_optional(other, &float32, 1, m->elements);
    if (outwards) {
        faults |= faults_of_overlap(one, other);
        begin(f_gc_allreduce_errors_out);
        if (judge(gc_allreduce_errors_out(handle, one->passed, other->passed, random_stream()), faults)) {
            accept(one);
            accept(other);
        }
        return;
    }
    if (one->passed == &one->tensor && one->faults == 0 && !one_in(20)) { /* in rows */
        one->tensor.dl_tensor.ndim = 2;
        one->tensor.dl_tensor.shape = one->shape;
        one->shape[0] = rows;
        one->shape[1] = m->elements;
        one->tensor.dl_tensor.strides = NULL;
        understand(one);
        faults = (faults & ~(FAULT(SHAPE_MISMATCH) | FAULT(NOT_CONTIGUOUS))) |
                 faults_of_optional(one, &float32, 1, rows * m->elements) |
                 faults_of_optional(other, &float32, 1, m->elements);
    } else if (one->passed != NULL && (one->tensor.dl_tensor.ndim != 2 || one->faults != 0 ||
                                       one->shape[0] != rows || one->shape[1] != m->elements)) {
        faults |= FAULT(SHAPE_MISMATCH);
    }
    faults |= kept ? 0 : FAULT(INVALID_ARGUMENT);
    begin(f_gc_allreduce_errors_in);
    judge(gc_allreduce_errors_in(handle, one->passed, other->passed, random_stream()), faults);
}

static void call_allreduce(void) {
    static const DLDataType uint32 = {kDLUInt, 32, 1}, int32 = {kDLInt, 32, 1};
    int64_t elements = one_in(2) ? wild() : (int64_t)below(100000), ranks = 1 + (int64_t)below(9);
    Faults faults = elements < 0 ? FAULT(INVALID_ARGUMENT) : 0;
    faults |= elements > INT64_MAX - 8 * ranks ? FAULT(SIZE_OVERFLOW) | MAY_SUCCEED : 0;
    Made m;
    prepare(MEDIUM);
    begin(f_gc_shard_elements);
    int64_t shard = gc_shard_elements(elements, (int32_t)ranks);
    EXPECT(shard == -1 || shard == 8 * chunk_bytes(elements, (uint64_t)ranks));
    judge(shard >= 0 ? GC_STATUS_OK : elements < 0 ? GC_STATUS_INVALID_ARGUMENT : GC_STATUS_SIZE_OVERFLOW, faults);
    gc_comm_t *comm = make_comm();
    if (comm == NULL)
        return;
    for (int steps = 1 + (int)below(4); steps > 0; steps--) {
        call_plain_allreduce(comm);
        compare_windows();
    }
    bool made = make_codec(&m, comm);
    gc_allreduce_t *allreduce = made ? (gc_allreduce_t *)(void *)m.handle : NULL;
    begin(f_gc_comm_free);
    gc_comm_free(comm);
    succeeded();
    for (int steps = made ? 4 + (int)below(20) : 0; steps > 0; steps--) {
        Faults no_step = m.options.nonfinite == GC_NONFINITE_TRANSACTIONAL ? 0 : FAULT(INVALID_ARGUMENT);
        size_t used = 0;
        faults = 0;
        void *handle = spoilt(allreduce, &faults);
        switch (below(8)) {
        case 0: case 1: case 2: call_run(&m, allreduce); break;
        case 3:
            place(&dst, uint32, 1, 1, 1, &used);
            faults |= faults_of(&dst, &uint32, 1, 1, false);
            begin(f_gc_allreduce_flags);
            if (judge(gc_allreduce_flags(handle, dst.passed, random_stream()), faults))
                accept(&dst);
            break;
        case 4:
            place_optional(&src, int32, 1, 0, &used);
            faults |= no_step | faults_of_optional(&src, &int32, 1, 1);
            faults |= src.passed && src.tensor.dl_tensor.dtype.code != kDLInt ? MAY_SUCCEED : 0; /* takes others, too */
            begin(f_gc_allreduce_commit);
            m.pending &= !judge(gc_allreduce_commit(handle, src.passed, random_stream()), faults);
            break;
        case 5:
            begin(f_gc_allreduce_rollback);
            m.pending &= !judge(gc_allreduce_rollback(handle, random_stream()), faults | no_step);
            break;
        case 6:
            begin(f_gc_allreduce_reset);
            m.pending &= !judge(gc_allreduce_reset(handle, random_stream()), faults);
            break;
        case 7: call_allreduce_errors(&m, allreduce); break;
        }
        compare_windows();
    }
    begin(f_gc_allreduce_free);
    gc_allreduce_free(allreduce);
    succeeded();
}

static void call_onebit_bytes(void) {
    int64_t elements = one_in(2) ? wild() : (int64_t)below(100000);
    Faults faults = elements < 0 ? FAULT(INVALID_ARGUMENT) : 0;
    begin(f_gc_onebit_workspace_bytes);
    int64_t got = gc_onebit_workspace_bytes(elements);
    EXPECT(faults ? got == -1 : got >= 64 && got <= 96 + elements / 500);
    judge(faults ? GC_STATUS_INVALID_ARGUMENT : GC_STATUS_OK, faults);
}

/* The plain form. Without an error the bits are the gradient's own signs. */
static void call_onebit(size_t size) {
    static const DLDataType errors[] = {{kDLFloat, 32, 1}, {kDLBfloat, 16, 1}};
    DLManagedTensor *out[12] = {NULL};
    DLDataType dtype = gradients[below(3)];
    int64_t elements = limit == BIG_LIMIT ? (int64_t)size / 8 : (int64_t)below(size / 16), shape[2];
    float scale = 7, *of_scale = &scale;
    size_t in = 0, outs = 0;
    prepare(size);
    place(&src, dtype, elements, 1, 0, &in);
    place_optional(&chunk[4], errors[below(2)], elements, one_in(16) ? 0 : 1, &outs);
    Faults faults = faults_of(&src, gradients, 3, src.elements, false) |
                    faults_of_optional(&chunk[4], errors, 2, src.elements) | faults_of_overlap(&chunk[4], &src);
    if (one_in(2)) {
        uint64_t n_chunks = one_in(40) ? 0 : 1 + below(9);
        faults |= n_chunks == 0 ? FAULT(INVALID_ARGUMENT) : 0;
        if (one_in(60)) {
            of_scale = one_in(2) ? NULL : (float *)(void *)((char *)&scale + 1 + below(3));
            faults |= FAULT(INVALID_ARGUMENT);
        }
        for (int i = 0; i < 12; i++)
            out[i] = UNTOUCHED;
        begin(f_gc_onebit_compress);
        uint64_t done = 0;
        if (judge(gc_onebit_compress(src.passed, chunk[4].passed, n_chunks, out, of_scale), faults)) {
            Rows rows = {1, 1, src.elements, chunk_bytes(src.elements, n_chunks) * (int64_t)n_chunks};
            accept(&chunk[4]);
            read_bits(&src, true);
            pack_model(rows, GC_BIT_ORDER_BIG);
            for (; done < n_chunks; done++) {
                const DLTensor *t = &out[done]->dl_tensor;
                shape[0] = chunk_bytes(src.elements, n_chunks);
                check_output(t, uint8, 1, shape);
                EXPECT(chunk[4].passed != NULL || shape[0] == 0 ||
                       memcmp(t->data, packed + done * (uint64_t)shape[0], (size_t)shape[0]) == 0);
                keep(out[done], false);
            }
        }
        EXPECT(done > 0 || scale == 7);
        for (; done < 12; done++)
            EXPECT(out[done] == UNTOUCHED);
        compare_windows();
        return;
    }
    int32_t rule = one_in(40) ? (int32_t)wild() : (int32_t)below(2);
    int64_t workspace = gc_onebit_workspace_bytes(src.counted ? src.elements : 0);
    shape[0] = random_chunks();
    shape[0] = shape[0] == 0 ? 1 : shape[0];
    shape[1] = chunk_bytes(elements, (uint64_t)shape[0]);
    if (shape[0] * shape[1] > (int64_t)size / 4 || workspace > (int64_t)size / 4)
        return;
    make(&dst, uint8, 2, shape, 0, &windows[1], true);
    if (!one_in(20)) { /* behind the error */
        outs += shape[0] * shape[1] + outs <= size ? 0 : size;
        if (outs < size && dst.elements > 0) {
            dst.tensor.dl_tensor.strides = NULL;
            dst.tensor.dl_tensor.byte_offset = 0;
            dst.tensor.dl_tensor.data = windows[1].base + outs;
            understand(&dst);
            outs += (size_t)dst.elements;
        }
    }
    place(&chunk[5], float32, 1, 1, 1, &outs);
    place(&chunk[6], uint8, workspace, 16, 1, &outs);
    faults |= faults_of_rows(&dst, &src) | dst.faults | faults_of(&chunk[5], &float32, 1, 1, false) |
              faults_of(&chunk[6], &uint8, 1, chunk[6].elements, true);
    faults |= chunk[6].counted && chunk[6].elements < workspace ? FAULT(SHAPE_MISMATCH) : 0;
    faults |= rule == 0 || rule == 1 ? 0 : FAULT(INVALID_ARGUMENT);
    Argument *outputs[] = {&chunk[4], &dst, &chunk[5], &chunk[6]};
    for (int i = 0; i < 4; i++) {
        faults |= faults_of_overlap(outputs[i], &src);
        for (int j = 0; j < i; j++)
            faults |= faults_of_overlap(outputs[i], outputs[j]);
    }
    if ((src.faults | dst.faults) & NO_CUDA)
        faults |= FAULT(INVALID_ARGUMENT);
    begin(f_gc_onebit_compress_into);
    if (judge(gc_onebit_compress_into(src.passed, chunk[4].passed, rule, dst.passed, chunk[5].passed, chunk[6].passed,
                                      random_stream()), faults)) {
        Rows rows = {1, 1, src.elements, dst.elements};
        for (int i = 0; i < 4; i++)
            accept(outputs[i]);
        if (chunk[4].passed == NULL) {
            read_bits(&src, true);
            pack_model(rows, GC_BIT_ORDER_BIG);
            write_bytes(&dst);
        }
    }
    compare_windows();
}

static void call_something(size_t size) {
    uint64_t from = size == BIG ? 7 : 0; /* only where memory is looked at */
    if (size != BIG && one_in(25)) { /* a call of this is a dozen */
        one_in(3) ? call_allreduce() : call_codec();
        return;
    }
    if (one_in(12)) {
        call_onebit(size);
        return;
    }
    switch (from + below(24 - from)) {
    case 0: call_small_ones(); break;
    case 1: one_in(2) ? call_chunk_bytes() : call_onebit_bytes(); break;
    case 2: call_tensor_empty(); break;
    case 3: call_tensor_from_pointer(); break;
    case 4: call_tensor_free(); break;
    case 5: call_convert_kept(); break;
    case 6: call_convert_foreign(); break;
    case 7: call_pack_chunks(f_gc_pack_chunks, size); break;
    case 8: call_unpack_chunks(f_gc_unpack_chunks, size); break;
    case 9: case 10: call_pack_bits(size); break;
    case 11: case 12: call_unpack_bits(size); break;
    case 13: call_pack_rows(f_gc_pack_chunks_into, size); break;
    case 14: call_pack_rows(f_gc_pack_signs_into, size); break;
    case 15: call_unpack_rows(size); break;
    case 16: case 17: call_bits_into(f_gc_pack_bits_into, size); break;
    case 18: case 19: call_bits_into(f_gc_unpack_bits_into, size); break;
    case 20: call_pack_chunks(f_gc_pack_signs, size); break;
    case 21: call_unpack_chunks(f_gc_unpack_signs, size); break;
    case 22: call_unpack_sign_rows(size); break;
    case 23: call_vote(size); break;
    }
}

/* ---- the whole --------------------------------------------------------------------------------------------------- */

/* A call that does not come back, or takes the program down: says which it was. */
static void stop(int signal_number) {
    char text[200];
    int length = snprintf(text, sizeof text, "hostile: signal %d in call %" PRIu64 " of seed %" PRIu64 ", %s\n",
                          signal_number, calls, seed, function_names[running]);
    (void)!write(2, text, (size_t)length);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static size_t heap(void) {
#if __GLIBC_PREREQ(2, 33)
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
#else
    return 0;
#endif
}

static void report(void) {
    uint64_t by_status[STATUSES] = {0};
    printf("%-26s %10s %10s\n", "", "calls", "successes");
    for (int f = 0; f < FUNCTION_COUNT; f++) {
        uint64_t all = 0;
        for (int s = 0; s < STATUSES; s++) {
            all += outcomes[f][s];
            by_status[s] += outcomes[f][s];
        }
        printf("%-26s %10" PRIu64 " %10" PRIu64 "\n", function_names[f], all, outcomes[f][0]);
        if (calls >= 100000 && (outcomes[f][0] > 0) == (excuses[f] != NULL)) {
            fprintf(stderr, "hostile: %s: %s\n", function_names[f],
                    excuses[f] ? "it succeeds, and has an excuse" : "no call of it succeeded, and it has no excuse");
            exit(1);
        }
    }
    for (int s = 1; s < STATUSES; s++)
        if (by_status[s] > 0)
            printf("refused with %-30s %10" PRIu64 "\n", gc_status_name(s), by_status[s]);
}

int main(int argc, char **argv) {
    uint64_t wanted = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000;
    seed = chance_state = argc > 2 ? strtoull(argv[2], NULL, 10) : seed;
    printf("hostile: %" PRIu64 " calls, seed %" PRIu64 "\n", wanted, seed);
    fflush(stdout);
    setenv("CUDA_VISIBLE_DEVICES", "", 1); /* what is said to be a card's memory here is not */
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

    report();
    printf("owners: %" PRIu64 " made, %" PRIu64 " released; heap: %+lld bytes since call %" PRIu64 "\n", owners_made,
           owners_released, (long long)heap_after - (long long)heap_before, wanted / 10);
    CHECK(owners_made == owners_released);
    /* Freed memory that glibc holds ready for each thread counts as used: so much may come and go. */
    CHECK(!warm || heap_after < heap_before + (512 << 10));
    for (int i = 0; i < 2; i++) {
        CHECK(munmap(windows[i].arena - PAGE, BIG + 2 * PAGE) == 0);
        free(windows[i].shadow);
    }
    free(bits);
    free(packed);
    puts("hostile: ok");
    return 0;
}
