// Kernels that unpack signs to a scale and its negative, and that count votes. Only the library launches them; launch
// shapes are in src/cuda/module.rs.
#include "divisor.cuh"
#include "unpack.cuh"
#include "vote.cuh"

// ---- Values

// Formats of an element that a scale is rounded to.
enum : unsigned { FORMAT_F16, FORMAT_BF16, FORMAT_F32, FORMAT_F64 };

// Values that the bits stand for; the host declares it as Signs in src/bits/signs/cuda.rs.
struct gc_signs {
    u64 zero, one;           // bit patterns of a 0 and of a 1, if there are no scales
    const unsigned char *scales;  // float32, at any address; or null
    gc_divisor chunk_bytes;  // bytes of bits per scale; by 0: one scale for all
    unsigned format;         // format of an element, if there are scales
    unsigned order;
};
SAME_LAYOUT(gc_signs)

// Cuts off the last `cut` bits of a value, at most 31, and rounds it to nearest, ties to even.
__device__ __forceinline__ unsigned rounded(unsigned value, unsigned cut) {
    return (value + ((1u << cut) / 2 - 1) + (value >> cut & 1)) >> cut;
}

// Converts the bits of a float32 to a format, rounded to nearest even: Inf past the format's largest number, and one
// pattern for any NaN. Integers give the same as on the CPU (src/bits/signs/plan.rs), and flush no denormal.
__device__ __forceinline__ u64 in_format(unsigned scale, unsigned format) {
    const unsigned sign = scale >> 31, size = scale & 0x7fffffff, infinity = 0x7f800000;
    if (format == FORMAT_F32) return size > infinity ? 0x7fc00000 : scale;
    if (format == FORMAT_BF16) return size > infinity ? 0x7fc0 : sign << 15 | rounded(size, 16);
    if (format == FORMAT_F16) {
        if (size > infinity) return 0x7e00;
        unsigned half;
        if (size >= 0x477ff000) {  // 65520: from here on float16 rounds to Inf
            half = 0x7c00;
        } else if (size >= 0x38800000) {  // 2^-14, the smallest normal float16
            half = rounded(size - (112u << 23), 13);
        } else {
            // The result is a multiple of 2^-24; less than half of that becomes 0.
            const unsigned cut = 126 - (size >> 23);
            half = cut > 24 ? 0 : rounded((size & 0x7fffff) | 0x800000, cut);
        }
        return sign << 15 | half;
    }
    if (size > infinity) return 0x7ff8000000000000;
    u64 wide = static_cast<u64>(size) << 29;
    if (size >= infinity) {
        wide |= 0x7ff0000000000000;
    } else if (size >= 0x800000) {
        wide += 896ull << 52;
    } else if (size != 0) {
        // The number is denormal in float32, not in float64: its first 1 becomes the implicit bit.
        const unsigned up = __clz(size) - 8;
        wide = (static_cast<u64>(size << up) << 29) + (static_cast<u64>(896 - up) << 52);
    }
    return static_cast<u64>(sign) << 63 | wide;
}

__device__ __forceinline__ unsigned load_scale(const unsigned char *from) {
    if (misalignment(from, 4) == 0) return *reinterpret_cast<const unsigned *>(from);
    return from[0] | from[1] << 8 | from[2] << 16 | static_cast<unsigned>(from[3]) << 24;
}

// Patterns of a 0 and of a 1 for one scale.
struct Patterns {
    u64 zero, one;
};
__device__ __forceinline__ Patterns patterns_of(const gc_signs &signs, u64 byte, unsigned size) {
    if (signs.scales == nullptr) return {signs.zero, signs.one};
    const u64 number = signs.chunk_bytes.by ? quotient(byte, signs.chunk_bytes) : 0;
    const unsigned scale = load_scale(signs.scales + number * 4);
    const u64 one = in_format(scale, signs.format);
    return {(scale & 0x7fffffff) > 0x7f800000 ? one : one ^ 1ull << (8 * size - 1), one};
}

__device__ __forceinline__ unsigned in_every_place(unsigned char x) { return x * 0x01010101u; }
__device__ __forceinline__ unsigned in_every_place(unsigned short x) { return x * 0x00010001u; }

// Values of a 0 and of a 1: the pattern of 0, and the bits that are different in the pattern of 1.
template <typename T>
struct Pair {
    T zero, changed;
    __device__ __forceinline__ uint4 vector(unsigned bits) const {
        uint4 v = unpack_vector(bits, changed);
        const unsigned word = in_every_place(zero);
        v.x ^= word, v.y ^= word, v.z ^= word, v.w ^= word;
        return v;
    }
    __device__ __forceinline__ T single(bool bit) const { return bit ? zero ^ changed : zero; }
};
template <>
__device__ __forceinline__ uint4 Pair<unsigned>::vector(unsigned bits) const {
    const unsigned one = zero ^ changed;
    return make_uint4(bits & 1 ? one : zero, bits & 2 ? one : zero, bits & 4 ? one : zero, bits & 8 ? one : zero);
}
template <>
__device__ __forceinline__ uint4 Pair<u64>::vector(unsigned bits) const {
    uint4 v = unpack_vector(bits, changed);
    const unsigned low = static_cast<unsigned>(zero), high = static_cast<unsigned>(zero >> 32);
    v.x ^= low, v.y ^= high, v.z ^= low, v.w ^= high;
    return v;
}

__device__ __forceinline__ unsigned chosen(unsigned mask, unsigned one, unsigned other) {
    return (one & mask) | (other & ~mask);
}

// Values for unpack.cuh. Elements are alike if their bits lie in one chunk.
template <typename T>
struct Signs {
    typedef T element;
    const gc_signs &signs;
    __device__ __forceinline__ Pair<T> at(u64 i) const {
        const Patterns patterns = patterns_of(signs, i / 8, sizeof(T));
        return {static_cast<T>(patterns.zero), static_cast<T>(patterns.zero ^ patterns.one)};
    }
    // Returns the number of elements from i on that lie in i's chunk.
    __device__ __forceinline__ u64 left_in_chunk(u64 i) const {
        return (quotient(i / 8, signs.chunk_bytes) + 1) * signs.chunk_bytes.by * 8 - i;
    }
    __device__ __forceinline__ bool alike(u64 first, u64 end) const {
        return signs.chunk_bytes.by == 0 || left_in_chunk(first) >= end - first;
    }
    __device__ __forceinline__ uint4 vector_at(unsigned bits, u64 first) const {
        constexpr unsigned A_VECTOR = 16 / sizeof(T);
        uint4 v = at(first).vector(bits);
        // A chunk has at least 8 elements, so a vector lies in at most two. 1-byte elements have no scales.
        if (sizeof(T) > 1 && !alike(first, first + A_VECTOR)) {
            const u64 left = left_in_chunk(first);
            const uint4 next = at(first + left).vector(bits);
            const uint4 mask = unpack_vector((1u << left) - 1, static_cast<T>(~T(0)));
            v.x = chosen(mask.x, v.x, next.x), v.y = chosen(mask.y, v.y, next.y);
            v.z = chosen(mask.z, v.z, next.z), v.w = chosen(mask.w, v.w, next.w);
        }
        return v;
    }
};

// ---- Unpacking to contiguous elements. Reads 1/8 and writes sizeof(T) bytes per element.

#define UNPACK_SIGNS(name, T) \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const unsigned char *src, T *dst, u64 elements, \
                                                               u64 bytes, const __grid_constant__ gc_signs signs) { \
        unpack<2>(src, dst, elements, bytes, Signs<T>{signs}, signs.order); \
    }
UNPACK_SIGNS(gc_unpack_signs_u8, unsigned char)
UNPACK_SIGNS(gc_unpack_signs_u16, unsigned short)
UNPACK_SIGNS(gc_unpack_signs_u32, unsigned)
UNPACK_SIGNS(gc_unpack_signs_u64, u64)

// ---- Unpacking to any strides. A thread unpacks one byte, whose elements may lie anywhere.

struct gc_sign_loop {
    gc_divisor count;
    long long stride;
};
SAME_LAYOUT(gc_sign_loop)

// The host declares this struct as Scattered in src/bits/signs/cuda.rs. Strides in bytes may be negative or 0.
struct gc_scattered_signs {
    const unsigned char *src;
    unsigned char *dst;       // the first element
    u64 elements, bytes;
    long long byte_stride;
    // Neighbouring threads should write to neighbouring memory: each thread's byte of bits is `across` bytes after the
    // byte of the thread before, `width` times; then the next byte begins a row. 1 and 1: the order of bits.
    gc_divisor across, width;
    gc_signs signs;
    unsigned size;            // bytes of an element: 1, 2, 4 or 8
    unsigned n_loops;
    gc_sign_loop loops[62];   // over the elements, outermost first
};
SAME_LAYOUT(gc_scattered_signs)

extern "C" __global__ void __launch_bounds__(THREADS)
gc_unpack_signs_strided(const __grid_constant__ gc_scattered_signs plan) {
    u64 number = thread_number();
    if (number * 8 >= plan.elements) return;
    if (plan.width.by > 1) {
        const u64 row = quotient(number, plan.width), slab = quotient(row, plan.across);
        const u64 column = number - row * plan.width.by;
        number = (slab * plan.width.by + column) * plan.across.by + (row - slab * plan.across.by);
    }
    unsigned bits = 0;
    if (number < plan.bytes) {
        bits = in_order(plan.src[static_cast<long long>(number) * plan.byte_stride], plan.signs.order);
    }
    const Patterns patterns = patterns_of(plan.signs, number, plan.size);
    const u64 first = number * 8;
    const unsigned count = plan.elements - first < 8 ? static_cast<unsigned>(plan.elements - first) : 8;
#pragma unroll 1
    for (unsigned i = 0; i < count; i++) {
        u64 rest = first + i;
        unsigned char *to = plan.dst;
#pragma unroll 1
        for (unsigned k = plan.n_loops; k-- > 0 && rest != 0;) {
            const u64 round = quotient(rest, plan.loops[k].count);
            to += static_cast<long long>(rest - round * plan.loops[k].count.by) * plan.loops[k].stride;
            rest = round;
        }
        const u64 pattern = bits >> i & 1 ? patterns.one : patterns.zero;
        if (reinterpret_cast<u64>(to) % plan.size != 0) {
            for (unsigned k = 0; k < plan.size; k++) to[k] = static_cast<unsigned char>(pattern >> 8 * k);
        } else if (plan.size == 1) {
            *to = static_cast<unsigned char>(pattern);
        } else if (plan.size == 2) {
            *reinterpret_cast<unsigned short *>(to) = static_cast<unsigned short>(pattern);
        } else if (plan.size == 4) {
            *reinterpret_cast<unsigned *>(to) = static_cast<unsigned>(pattern);
        } else {
            *reinterpret_cast<u64 *>(to) = pattern;
        }
    }
}

// ---- Votes

// Argument of the vote kernels; the host declares it as Vote in src/bits/signs/cuda.rs.
struct gc_vote {
    const unsigned char *src;
    unsigned char *dst;
    gc_divisor voters;
    u64 bytes;                // bytes of each voter
    long long stride;         // bytes from one voter to the next
    u64 turn;                 // voter in turn at byte 0, below `voters`
    unsigned aligned;         // 1: src and dst are equally misaligned within vectors, for each voter
    unsigned reserved;
};
SAME_LAYOUT(gc_vote)

// Loads N words from any address. It reads whole vectors: up to 4 * N bytes after the words, and as many before.
__device__ __forceinline__ Ballot<1> load_words(const unsigned *from, unsigned beyond) {
    const unsigned low = from[0], high = beyond ? from[1] : 0;
    return {{__funnelshift_r(low, high, beyond * 8)}};
}
__device__ __forceinline__ Ballot<4> load_words(const uint4 *from, unsigned beyond) {
    const uint4 low = from[0];
    if (beyond == 0) return {{low.x, low.y, low.z, low.w}};
    const uint4 high = from[1];
    unsigned w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    // The shifts are by two words, by one word, and by bytes.
#pragma unroll
    for (unsigned k = 0; k < 6; k++) w[k] = beyond & 8 ? w[k + 2] : w[k];
#pragma unroll
    for (unsigned k = 0; k < 5; k++) w[k] = beyond & 4 ? w[k + 1] : w[k];
    Ballot<4> words;
#pragma unroll
    for (unsigned k = 0; k < 4; k++) words.word[k] = __funnelshift_r(w[k], w[k + 1], beyond % 4 * 8);
    return words;
}

// Returns the voter in turn at a byte.
__device__ __forceinline__ u64 in_turn(const gc_vote &vote, u64 byte) {
    const u64 voter = byte - quotient(byte, vote.voters) * vote.voters.by + vote.turn;
    return voter < vote.voters.by ? voter : voter - vote.voters.by;
}
__device__ __forceinline__ const unsigned char *row_of(const gc_vote &vote, u64 voter) {
    return vote.src + static_cast<long long>(voter) * vote.stride;
}

// Returns the second votes of BYTES bytes from `at` on.
template <unsigned BYTES>
__device__ __forceinline__ auto turn_at(const gc_vote &vote, u64 at) {
    return turn_by_byte<BYTES>(vote.voters.by, [&vote, at] { return in_turn(vote, at); },
                               [&vote, at](u64 voter, unsigned k) { return row_of(vote, voter)[at + k]; });
}

// Second votes, collected from the rows in order. A voter is in turn every `voters` bytes, one byte further up than the
// voter before.
template <unsigned N>
struct TurnByMask {
    Ballot<N> mask, kept;
    unsigned last;            // rows to pass before the row of the voter in turn at byte 0
    __device__ __forceinline__ TurnByMask(const gc_vote &vote, u64 at) {
        const unsigned voters = static_cast<unsigned>(vote.voters.by), first = static_cast<unsigned>(in_turn(vote, at));
        last = first;
#pragma unroll
        for (unsigned k = 0; k < N; k++) mask.word[k] = kept.word[k] = 0;
#pragma unroll 1
        for (unsigned byte = first == 0 ? 0 : voters - first; byte < 4 * N; byte += voters) {
#pragma unroll
            for (unsigned k = 0; k < N; k++) {
                if (byte / 4 == k) mask.word[k] |= 0xffu << byte % 4 * 8;
            }
        }
    }
    __device__ __forceinline__ void see(const Ballot<N> &row) {
#pragma unroll
        for (unsigned k = 0; k < N; k++) kept.word[k] |= row.word[k] & mask.word[k];
        last--;
#pragma unroll
        for (unsigned k = N; k-- > 1;) mask.word[k] = __funnelshift_r(mask.word[k - 1], mask.word[k], 24);
        mask.word[0] = mask.word[0] << 8 | (last == 0 ? 0xff : 0);
    }
    __device__ __forceinline__ Ballot<N> votes() const { return kept; }
};

// Split of the bytes of dst into aligned vectors of 4 * N bytes. The first thread block has the bytes at the ends,
// fewer than 64, one per thread. If src and dst are not equally aligned, the ends also have the bytes beside which a
// vector cannot be read.
template <unsigned N>
struct Vectors {
    u64 first, count;
    __device__ __forceinline__ explicit Vectors(const gc_vote &vote) {
        const unsigned size = 4 * N, margin = vote.aligned ? 0 : size;
        first = (size - misalignment(vote.dst, size)) % size + margin;
        count = vote.bytes > first + margin ? (vote.bytes - first - margin) / size : 0;
    }
};

template <unsigned PLANES>
__device__ __forceinline__ void vote_byte(const gc_vote &vote, u64 at) {
    auto turn = turn_at<1>(vote, at);
    const auto row = [&](u64 voter) { return Ballot<1>{{row_of(vote, voter)[at]}}; };
    vote.dst[at] = static_cast<unsigned char>(elect<PLANES, 1>(vote.voters.by, row, turn).word[0]);
}

// Votes on this thread's byte at the ends, if it has one.
template <unsigned PLANES>
__device__ __forceinline__ void vote_ends(const gc_vote &vote, u64 first, u64 inside) {
    const u64 number = threadIdx.x, at = number < first ? number : number + inside;
    if (at < vote.bytes) vote_byte<PLANES>(vote, at);
}

template <unsigned N, typename Vector>
__device__ __forceinline__ Ballot<N> load_row(const gc_vote &vote, u64 voter, u64 at) {
    const unsigned char *from = row_of(vote, voter) + at;
    const unsigned beyond = misalignment(from, sizeof(Vector));
    return load_words(reinterpret_cast<const Vector *>(from - beyond), beyond);
}

// Counts the votes of up to 30 voters: a count, with the second vote, fits into 5 planes. Reads `voters` bytes and
// writes one. Launch: one thread block for the ends, and one for every 256 vectors of 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS) gc_vote_few(const __grid_constant__ gc_vote vote) {
    const Vectors<4> vectors(vote);
    if (blockIdx.x == 0) return vote_ends<5>(vote, vectors.first, vectors.count * 16);
    const u64 number = thread_number() - THREADS, at = vectors.first + number * 16;
    if (number >= vectors.count) return;
    TurnByMask<4> turn(vote, at);
    const auto row = [&](u64 voter) { return load_row<4, uint4>(vote, voter, at); };
    const Ballot<4> elected = elect<5, 4>(vote.voters.by, row, turn);
    *reinterpret_cast<uint4 *>(vote.dst + at) =
        make_uint4(elected.word[0], elected.word[1], elected.word[2], elected.word[3]);
}

// Counts the votes of any number of voters. Launch: one thread block for the ends, and one for every 256 words.
extern "C" __global__ void __launch_bounds__(THREADS) gc_vote_many(const __grid_constant__ gc_vote vote) {
    const Vectors<1> vectors(vote);
    if (blockIdx.x == 0) return vote_ends<64>(vote, vectors.first, vectors.count * 4);
    const u64 number = thread_number() - THREADS, at = vectors.first + number * 4;
    if (number >= vectors.count) return;
    auto turn = turn_at<4>(vote, at);
    const auto row = [&](u64 voter) { return load_row<1, unsigned>(vote, voter, at); };
    const Ballot<1> elected = elect<64, 1>(vote.voters.by, row, turn);
    *reinterpret_cast<unsigned *>(vote.dst + at) = elected.word[0];
}
