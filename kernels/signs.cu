// Signs: unpacking them to a scale and minus it, and counting votes. For the library alone; launch shapes are in
// src/cuda/module.rs.
#include "divisor.cuh"
#include "unpack.cuh"
#include "vote.cuh"

// ---- Values

// The formats of an element that a scale is rounded to.
enum : unsigned { FORMAT_F16, FORMAT_BF16, FORMAT_F32, FORMAT_F64 };

// What the bits stand for, as the host lays it out: Signs in src/bits/signs/cuda.rs.
struct gc_signs {
    u64 zero, one;           // the bit patterns of a 0 and of a 1, where there are no scales
    const unsigned char *scales;  // float32, at any address; or null
    gc_divisor chunk_bytes;  // bytes of bits of one scale; by 0: there is one for all
    unsigned format;         // of an element, where there are scales
    unsigned order;
};
SAME_LAYOUT(gc_signs)

// A value cut off after `cut` bits, at most 31, rounded to nearest, to even in the middle.
__device__ __forceinline__ unsigned rounded(unsigned value, unsigned cut) {
    return (value + ((1u << cut) / 2 - 1) + (value >> cut & 1)) >> cut;
}

// A float32 in a format, by its bits: rounded to nearest even, past the largest of the format infinite, any NaN the
// one. In integers, so that the CPU gives the same (src/bits/signs/plan.rs) and no denormal is flushed.
__device__ __forceinline__ u64 in_format(unsigned scale, unsigned format) {
    const unsigned sign = scale >> 31, size = scale & 0x7fffffff, infinity = 0x7f800000;
    if (format == FORMAT_F32) return size > infinity ? 0x7fc00000 : scale;
    if (format == FORMAT_BF16) return size > infinity ? 0x7fc0 : sign << 15 | rounded(size, 16);
    if (format == FORMAT_F16) {
        if (size > infinity) return 0x7e00;
        unsigned half;
        if (size >= 0x477ff000) {  // 65520, from where on it is nearer to what would be the next
            half = 0x7c00;
        } else if (size >= 0x38800000) {  // 2^-14, the least that is normal
            half = rounded(size - (112u << 23), 13);
        } else {
            // A multiple of 2^-24; less than half of that is 0.
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
        // Denormal here, not there: the first one moves to where it is not written.
        const unsigned up = __clz(size) - 8;
        wide = (static_cast<u64>(size << up) << 29) + (static_cast<u64>(896 - up) << 52);
    }
    return static_cast<u64>(sign) << 63 | wide;
}

__device__ __forceinline__ unsigned load_scale(const unsigned char *from) {
    if (misalignment(from, 4) == 0) return *reinterpret_cast<const unsigned *>(from);
    return from[0] | from[1] << 8 | from[2] << 16 | static_cast<unsigned>(from[3]) << 24;
}

// Both patterns of one scale.
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

// Two values.
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

// The values of unpack.cuh. Elements are alike where their bits are of one chunk.
template <typename T>
struct Signs {
    typedef T element;
    const gc_signs &signs;
    __device__ __forceinline__ Pair<T> at(u64 i) const {
        const Patterns patterns = patterns_of(signs, i / 8, sizeof(T));
        return {static_cast<T>(patterns.zero), static_cast<T>(patterns.zero ^ patterns.one)};
    }
    // How many elements from i on are of its chunk.
    __device__ __forceinline__ u64 left_in_chunk(u64 i) const {
        return (quotient(i / 8, signs.chunk_bytes) + 1) * signs.chunk_bytes.by * 8 - i;
    }
    __device__ __forceinline__ bool alike(u64 first, u64 end) const {
        return signs.chunk_bytes.by == 0 || left_in_chunk(first) >= end - first;
    }
    __device__ __forceinline__ uint4 vector_at(unsigned bits, u64 first) const {
        constexpr unsigned A_VECTOR = 16 / sizeof(T);
        uint4 v = at(first).vector(bits);
        // A chunk has 8 elements at least, so a vector lies in two at most. Bytes have no scales.
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

// ---- Unpacking to contiguous elements. Reads 1/8, writes sizeof(T) bytes an element.

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

// As the host lays it out: Scattered in src/bits/signs/cuda.rs. Strides are in bytes, and may be negative or 0.
struct gc_scattered_signs {
    const unsigned char *src;
    unsigned char *dst;       // the first element
    u64 elements, bytes;
    long long byte_stride;
    // Neighbouring threads should write to neighbouring memory: thread `across` bytes of bits after the one before,
    // `width` times, and so on from the next byte. 1 and 1: in the order of bits.
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

// As the host lays it out: Vote in src/bits/signs/cuda.rs.
struct gc_vote {
    const unsigned char *src;
    unsigned char *dst;
    gc_divisor voters;
    u64 bytes;                // of each voter
    long long stride;         // from voter to voter
    u64 turn;                 // who is in turn at byte 0: below `voters`
    unsigned aligned;         // 1: src is as far beyond 16 bytes as dst is, for each voter
    unsigned reserved;
};
SAME_LAYOUT(gc_vote)

// N words from any address. Whole vectors are read: up to 4 * N bytes behind it, and as many before.
__device__ __forceinline__ Ballot<1> load_words(const unsigned *from, unsigned beyond) {
    const unsigned low = from[0], high = beyond ? from[1] : 0;
    return {{__funnelshift_r(low, high, beyond * 8)}};
}
__device__ __forceinline__ Ballot<4> load_words(const uint4 *from, unsigned beyond) {
    const uint4 low = from[0];
    if (beyond == 0) return {{low.x, low.y, low.z, low.w}};
    const uint4 high = from[1];
    unsigned w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    // By two words, by one, by bytes.
#pragma unroll
    for (unsigned k = 0; k < 6; k++) w[k] = beyond & 8 ? w[k + 2] : w[k];
#pragma unroll
    for (unsigned k = 0; k < 5; k++) w[k] = beyond & 4 ? w[k + 1] : w[k];
    Ballot<4> words;
#pragma unroll
    for (unsigned k = 0; k < 4; k++) words.word[k] = __funnelshift_r(w[k], w[k + 1], beyond % 4 * 8);
    return words;
}

// The voter in turn at a byte.
__device__ __forceinline__ u64 in_turn(const gc_vote &vote, u64 byte) {
    const u64 voter = byte - quotient(byte, vote.voters) * vote.voters.by + vote.turn;
    return voter < vote.voters.by ? voter : voter - vote.voters.by;
}
__device__ __forceinline__ const unsigned char *row_of(const gc_vote &vote, u64 voter) {
    return vote.src + static_cast<long long>(voter) * vote.stride;
}

// Second votes of some bytes from `at` on.
template <unsigned BYTES>
__device__ __forceinline__ auto turn_at(const gc_vote &vote, u64 at) {
    return turn_by_byte<BYTES>(vote.voters.by, [&vote, at] { return in_turn(vote, at); },
                               [&vote, at](u64 voter, unsigned k) { return row_of(vote, voter)[at + k]; });
}

// Second votes kept of the rows as they come by. The bytes at which a voter is in turn are one further up than those of
// the voter before, every `voters` bytes.
template <unsigned N>
struct TurnByMask {
    Ballot<N> mask, kept;
    unsigned last;            // the voter in turn at byte 0 has its byte once this many have passed
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

// How the bytes of dst fall into vectors of 4 * N that are aligned there. Those at the ends, fewer than 64, are the
// first block's, one a thread; where src is not aligned alike these are also bytes beside which a vector cannot be
// read.
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

// The byte at the ends that is this thread's, if there is one.
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

// Up to 30 voters: a count, with the second vote, fits 5 planes. Reads `voters` bytes, writes one.
// Launch: one block for the ends, and one for every 256 vectors of 16 bytes.
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

// Any number of voters. Launch: one block for the ends, and one for every 256 words.
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
