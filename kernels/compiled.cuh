// Beginning of every kernel that is compiled at run time (src/jit/source.rs). For NVRTC 11.2 and up, C++14; includes
// nothing. The library's names begin with an underscore, which a user's parameters cannot.

// NVIDIA's headers have the same type if NVRTC compiles them.
#ifndef _GC_INT64
#define _GC_INT64 long long
#endif

// Types that a user's texts may name without a header. A header may declare them too: the same type again is no
// conflict, and ::int64_t is then the header's type.
namespace _gc_types {

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef _GC_INT64 int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned _GC_INT64 uint64_t;
typedef _GC_INT64 intptr_t;
typedef unsigned _GC_INT64 uintptr_t;

}  // namespace _gc_types
using namespace _gc_types;

#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1107
#define _GC_ARGUMENT const
#else
#define _GC_ARGUMENT const __grid_constant__
#endif

namespace _gc {

typedef unsigned long long u64;
typedef long long i64;

// The name is not THREADS: a user's macro may have that name, and code after the preamble uses this one.
enum : unsigned { _gc_THREADS = 256 };

// Type of an element in memory. A bool in memory is true if it is not 0.
template <typename T>
struct Element {
    typedef T Stored;
};
template <>
struct Element<bool> {
    typedef unsigned char Stored;
};
template <typename T>
struct Read {
    static __device__ __forceinline__ T of(T stored) { return stored; }
};
template <>
struct Read<bool> {
    static __device__ __forceinline__ bool of(unsigned char stored) { return stored != 0; }
};

// Returns a scalar from the host's bytes, which begin with the lowest.
template <typename T>
__device__ __forceinline__ T scalar(const u64 &bytes) {
    return Read<T>::of(*reinterpret_cast<const typename Element<T>::Stored *>(&bytes));
}

template <typename T, unsigned N>
struct alignas(sizeof(T) * N) Vector {
    T of[N];
};

// by_bytes() and to_bytes() access an element at any address, byte by byte. This is rare, so the code is short.
template <typename S>
__device__ __forceinline__ S by_bytes(const char *from) {
    u64 bytes = 0;
#pragma unroll 1
    for (unsigned k = 0; k < sizeof(S); k++) bytes |= static_cast<u64>(static_cast<unsigned char>(from[k])) << 8 * k;
    return *reinterpret_cast<const S *>(&bytes);
}
template <typename S>
__device__ __forceinline__ void to_bytes(char *to, const S &x) {
    u64 bytes = 0;
    *reinterpret_cast<S *>(&bytes) = x;
#pragma unroll 1
    for (unsigned k = 0; k < sizeof(S); k++) to[k] = static_cast<char>(bytes >> 8 * k);
}

// load_one() and store_one() access an element. `bytes`: it may have any address.
template <typename T>
__device__ __forceinline__ T load_one(const char *from, bool bytes) {
    typedef typename Element<T>::Stored Stored;
    return Read<T>::of(bytes ? by_bytes<Stored>(from) : *reinterpret_cast<const Stored *>(from));
}
template <typename T>
__device__ __forceinline__ void store_one(const T &x, char *to, bool bytes) {
    typedef typename Element<T>::Stored Stored;
    if (bytes) to_bytes(to, static_cast<Stored>(x));
    else *reinterpret_cast<Stored *>(to) = static_cast<Stored>(x);
}

// N neighbours of an input, at a multiple of their size: words of memory, which become elements on access. If all are
// `one` element, load() loads the first; spread() copies it after all loads of a thread have been issued.
template <typename T, unsigned N, bool SEPARATE>
struct Neighbours {
    typedef typename Element<T>::Stored Stored;
    enum : unsigned { BYTES = N * sizeof(Stored), WORDS = (BYTES + 3) / 4 };
    unsigned words[WORDS];

    __device__ __forceinline__ void load(const char *from, bool one, bool) {
        if (one) {
            const Stored x = *reinterpret_cast<const Stored *>(from);
            u64 bytes = 0;
            *reinterpret_cast<Stored *>(&bytes) = x;
            words[0] = static_cast<unsigned>(bytes);
            if (sizeof(Stored) > 4) words[WORDS > 1] = static_cast<unsigned>(bytes >> 32);
        } else if (BYTES == 2) {
            words[0] = *reinterpret_cast<const unsigned short *>(from);
        } else {
            const Vector<unsigned, WORDS> x = *reinterpret_cast<const Vector<unsigned, WORDS> *>(from);
#pragma unroll
            for (unsigned k = 0; k < WORDS; k++) words[k] = x.of[k];
        }
    }
    __device__ __forceinline__ void spread(bool one) {
        const unsigned first = words[0], second = words[WORDS > 1];
        const unsigned word = sizeof(Stored) == 1 ? (first & 0xff) * 0x01010101u
                            : sizeof(Stored) == 2 ? __byte_perm(first, 0, 0x1010) : first;
#pragma unroll
        for (unsigned k = 0; k < WORDS; k++) {
            if (one) words[k] = sizeof(Stored) == 8 && k % 2 ? second : word;
        }
    }
    __device__ __forceinline__ void set(unsigned, const T &) {}
    __device__ __forceinline__ T operator[](unsigned m) const {
        const unsigned at = m * sizeof(Stored);
        u64 bytes = words[at / 4] >> at % 4 * 8;
        if (sizeof(Stored) == 8) bytes |= static_cast<u64>(words[WORDS > 1 ? at / 4 + 1 : 0]) << 32;
        return Read<T>::of(*reinterpret_cast<const Stored *>(&bytes));
    }
};
// Neighbours that are loaded one by one.
template <typename T, unsigned N>
struct Neighbours<T, N, true> {
    T of[N];
    __device__ __forceinline__ void load(const char *from, bool, bool bytes) { of[0] = load_one<T>(from, bytes); }
    __device__ __forceinline__ void spread(bool) {}
    __device__ __forceinline__ void set(unsigned m, const T &x) { of[m] = x; }
    __device__ __forceinline__ T operator[](unsigned m) const { return of[m]; }
};

// load() and store() access N neighbours of an output, at a multiple of their size.
template <typename T, unsigned N>
__device__ __forceinline__ void load(T (&to)[N], const char *from) {
    typedef typename Element<T>::Stored Stored;
    const Vector<Stored, N> x = *reinterpret_cast<const Vector<Stored, N> *>(from);
#pragma unroll
    for (unsigned m = 0; m < N; m++) to[m] = Read<T>::of(x.of[m]);
}
template <typename T, unsigned N>
__device__ __forceinline__ void store(const T (&from)[N], char *to) {
    typedef typename Element<T>::Stored Stored;
    Vector<Stored, N> x;
#pragma unroll
    for (unsigned m = 0; m < N; m++) x.of[m] = static_cast<Stored>(from[m]);
    *reinterpret_cast<Vector<Stored, N> *>(to) = x;
}

// Loop: a count to divide by (src/jit/loops.rs), and the strides of all tensors in bytes.
template <unsigned TENSORS>
struct Loop {
    u64 count, reciprocal;  // floor((2^64 - 1) / count)
    i64 strides[TENSORS];
};
template <unsigned TENSORS>
struct Offsets {
    i64 of[TENSORS];

    __device__ __forceinline__ char *at(void *const *data, unsigned tensor) const {
        return static_cast<char *>(data[tensor]) + of[tensor];
    }
};

// Adds the offsets of round number `round` of these loops, outermost first. The outermost loop takes the rest. The loop
// is not unrolled: mostly there are one or two loops, and compiling code for more takes longer than all else.
template <unsigned TENSORS>
__device__ __forceinline__ void go(Offsets<TENSORS> &offsets, const Loop<TENSORS> *loops, unsigned n, u64 round) {
    if (n == 0) return;
    u64 rest = round;
#pragma unroll 1
    for (unsigned d = n - 1; d > 0; d--) {
        u64 above = __umul64hi(rest, loops[d].reciprocal), at = rest - above * loops[d].count;
        if (at >= loops[d].count) above++, at -= loops[d].count;
#pragma unroll
        for (unsigned k = 0; k < TENSORS; k++) offsets.of[k] += static_cast<i64>(at) * loops[d].strides[k];
        rest = above;
    }
#pragma unroll
    for (unsigned k = 0; k < TENSORS; k++) offsets.of[k] += static_cast<i64>(rest) * loops[0].strides[k];
}

// Adds the offsets in a single loop of vectors of `at_once`: for EACH rounds from `number` on, then for EACH rounds
// `step` further, and so on.
template <unsigned EACH, unsigned TENSORS, unsigned ROUNDS>
__device__ __forceinline__ void go_straight(Offsets<TENSORS> (&offsets)[ROUNDS], const Loop<TENSORS> &loop, u64 number,
                                            unsigned step, unsigned at_once) {
#pragma unroll
    for (unsigned k = 0; k < TENSORS; k++) {
        const i64 stride = loop.strides[k] / at_once, from = static_cast<i64>(number) * stride, next = step * stride;
#pragma unroll
        for (unsigned r = 0; r < ROUNDS; r++) offsets[r].of[k] += from + r / EACH * next + r % EACH * stride;
    }
}

// Adds the offsets of rounds number `first` + more[r] of these loops; each `more` is small. `first` is the same in a
// whole thread block, which divides it once for all threads. There is at least one loop; its strides may be 0.
template <unsigned TENSORS, unsigned ROUNDS>
__device__ __forceinline__ void go_rounds(Offsets<TENSORS> (&offsets)[ROUNDS], unsigned (&more)[ROUNDS],
                                          const Loop<TENSORS> *loops, unsigned n, u64 first) {
#pragma unroll 1
    for (unsigned d = n; d > 1; d--) {
        const Loop<TENSORS> &loop = loops[d - 1];
        u64 above = __umul64hi(first, loop.reciprocal), at = first - above * loop.count;
        if (at >= loop.count) above++, at -= loop.count;
        first = above;
        // In a loop of 2^31 rounds or more, more[r] passes the end at most once.
        const u64 count = loop.count;
        const unsigned factor = count < 0x80000000ull ? static_cast<unsigned>(loop.reciprocal >> 32) : 0;
#pragma unroll
        for (unsigned r = 0; r < ROUNDS; r++) {
            u64 own_at = at + more[r];
            more[r] = __umulhi(static_cast<unsigned>(own_at), factor);
            own_at -= more[r] * count;
            if (own_at >= count) more[r]++, own_at -= count;
#pragma unroll
            for (unsigned k = 0; k < TENSORS; k++) offsets[r].of[k] += static_cast<i64>(own_at) * loop.strides[k];
        }
    }
#pragma unroll
    for (unsigned k = 0; k < TENSORS; k++) {
        const i64 stride = loops[0].strides[k], from = static_cast<i64>(first) * stride;
#pragma unroll
        for (unsigned r = 0; r < ROUNDS; r++) offsets[r].of[k] += from + more[r] * stride;
    }
}

// Returns the offsets of element number `number` in loops of which the innermost counts vectors of 2^log elements.
template <unsigned TENSORS>
__device__ __forceinline__ Offsets<TENSORS> offsets_of(const Loop<TENSORS> *loops, unsigned n, u64 number,
                                                       unsigned log) {
    Offsets<TENSORS> offsets = Offsets<TENSORS>();
    go(offsets, loops, n, number >> log);
    const i64 within = static_cast<i64>(number & ((1u << log) - 1));
    if (within == 0) return offsets;
#pragma unroll
    for (unsigned k = 0; k < TENSORS; k++) offsets.of[k] += within * (loops[n - 1].strides[k] >> log);
    return offsets;
}

// Share of a thread block: units side by side, of which number `first` is the first.
struct Line {
    u64 first;
    unsigned units;

    __device__ __forceinline__ unsigned unit(unsigned round) const { return threadIdx.x + round * _gc_THREADS; }
    __device__ __forceinline__ bool has(unsigned round) const { return unit(round) < units; }
    __device__ __forceinline__ u64 number(unsigned round) const { return first + unit(round); }
    __device__ __forceinline__ bool is_turned(unsigned) const { return false; }
    template <typename N>
    __device__ __forceinline__ void turn(N &, const void *, unsigned) const {}
};

// Raw parameter. Its elements are accessed by number in C order, or by indices.
template <typename T, unsigned NDIM, bool CONTIGUOUS>
struct Raw {
    T *_data;
    i64 _size, _shape[NDIM ? NDIM : 1], _strides[NDIM ? NDIM : 1];  // in bytes
    enum : unsigned { ndim = NDIM };

    __device__ __forceinline__ ptrdiff_t size() const { return _size; }
    __device__ __forceinline__ const i64 *shape() const { return _shape; }
    __device__ __forceinline__ const i64 *strides() const { return _strides; }
    __device__ __forceinline__ T &at(i64 offset) const {
        return *reinterpret_cast<T *>(reinterpret_cast<u64>(_data) + offset);
    }
    template <typename I>
    __device__ __forceinline__ T &operator[](const I (&index)[NDIM ? NDIM : 1]) const {
        i64 offset = 0;
#pragma unroll
        for (unsigned d = 0; d < NDIM; d++) offset += static_cast<i64>(index[d]) * _strides[d];
        return at(offset);
    }
    __device__ __forceinline__ T &operator[](ptrdiff_t number) const {
        if (CONTIGUOUS) return _data[number];
        i64 offset = 0, rest = number;
#pragma unroll
        for (unsigned d = NDIM; d-- > 0;) {
            offset += rest % _shape[d] * _strides[d];
            rest /= _shape[d];
        }
        return at(offset);
    }
};

// Type of `_ind` and the like.
struct Indexer {
    i64 _size;
    __device__ __forceinline__ ptrdiff_t size() const { return _size; }
};

}  // namespace _gc
