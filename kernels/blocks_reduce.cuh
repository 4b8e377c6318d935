// Reduce kernels of the block codecs.
#ifndef GRADCODEC_BLOCKS_REDUCE_CUH
#define GRADCODEC_BLOCKS_REDUCE_CUH

#include "blocks_emit.cuh"
#include "staging.cuh"

// Divisor of a mean: the number of ranks whose values the payloads have. For a power of two the reciprocal is a factor
// instead. Up to 2^7 it may multiply scales without changing a bit: values of usual blocks are multiples of 2^-136, and
// no sum of them overflows.
struct Share {
    float ranks, reciprocal;
    bool divides;
    __device__ __forceinline__ Share(const gc_codec &codec, unsigned payloads)
        : ranks(static_cast<float>(payloads * codec.ranks)), reciprocal(1), divides(false) {
        if (codec.reduction == REDUCTION_SUM) return;
        const unsigned number = payloads * codec.ranks;
        divides = number > 128 || (number & (number - 1)) != 0;
        if (!divides) reciprocal = __uint_as_float(0x7f000000u - __float_as_uint(ranks));
    }
    __device__ __forceinline__ float of(float sum) const {
        return divides ? __fdiv_rn(sum, ranks) : __fmul_rn(sum, reciprocal);
    }
    // Returns true if quotient() gives the bits of a division of a usual sum. The remainder is exact. The quotient is
    // at least 2^-14 of its last place from the middle of two floats; the correction is wrong by less than 2^-20.
    // Denormal quotients are no exception: a sum is a multiple of 2^-136. A sum is never -0, and +0 gives +0.
    __device__ __forceinline__ bool has_quotient() const { return ranks < 8192; }
    // Returns 1 / ranks, or a float next to it.
    __device__ __forceinline__ float inverse() const {
#ifdef __CUDA_ARCH__
        float about;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(about) : "f"(ranks));
        return about;
#else
        return 1 / ranks;
#endif
    }
    __device__ __forceinline__ float quotient(float sum, float inverse) const {
        const float about = __fmul_rn(sum, inverse);
        return __fmaf_rn(__fmaf_rn(-ranks, about, sum), inverse, about);
    }
};

// Returns true if the sums are of usual blocks. For BF16 it checks the sums instead of all numbers, because a number
// that is not finite makes its sum non-finite.
template <unsigned C, unsigned N, unsigned ROWS>
__device__ __forceinline__ bool are_usual(const float (&c)[ROWS][N], const Rare<C> &rare) {
    bool usual = rare.none();
#pragma unroll
    for (unsigned k = 0; k < ROWS && C == CODEC_BF16; k++) {
        float zero = 0;
#pragma unroll
        for (unsigned m = 0; m < N; m++) zero = __fmaf_rn(c[k][m], 0, zero);
        usual = usual && zero == 0;
    }
    return __all_sync(WHOLE_WARP, usual);
}

// ---- Prefetch of payloads
//
// More bytes must be in flight than registers can hold. So from compute capability 8.0 on, payloads are copied to
// shared memory asynchronously, while earlier payloads are added: each warp has a ring for its unit of a few payloads.
// Before 8.0 the ring has one payload, which is copied when it is needed.

// Sizes of a unit of a payload in the ring, in bytes: header, scales and codes, in vectors. BF16 has no scales; the
// ring leaves its header out, so that three thread blocks fit on a multiprocessor with 100 KB of shared memory.
template <unsigned C>
struct Staged {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    enum : unsigned { PAYLOADS = C == CODEC_BF16 ? 2 : Block<C>::BITS == 8 ? 3 : 4 };
#else
    enum : unsigned { PAYLOADS = 1 };
#endif
    enum : unsigned {
        VECTOR = sizeof(uint4),
        ROW = WARP * VECTOR,  // a vector per lane
        // Scales have any alignment, so the head has a vector more than they fill.
        HEAD = C == CODEC_BF16 ? 0 : HEADER + UNIT / Block<C>::ELEMENTS * Block<C>::SCALE_BYTES + VECTOR,
        CODES = UNIT * Block<C>::BITS / 8,
        PAYLOAD = HEAD + CODES,
        RING = PAYLOADS * PAYLOAD,
    };
};
// Bytes of a warp's ring, for any codec.
enum : unsigned { RING = 4096 / 2 * Staged<CODEC_BF16>::PAYLOADS };

// Returns the ring of this warp among the rings of its thread block.
__device__ __forceinline__ unsigned char *ring_of_warp(uint4 *rings) {
    return shared_in_register(reinterpret_cast<unsigned char *>(rings) + threadIdx.x / WARP * RING);
}

// Sums the numbers of a unit over all payloads, in order, times `factor`; BF16 ignores `factor`, since its sums may
// overflow. Returns true if the sums are of usual blocks; otherwise they are undefined. Every warp checks the header of
// every payload: `different` gets the bits that differ. `ring`: the warp's ring. `more`: c has sums of other blocks of
// the unit, to which this adds +0.
template <unsigned C, typename Call, unsigned N, unsigned ROWS>
__device__ __forceinline__ bool sum_payloads(const Call &call, const InChunk &blocks, unsigned chunk_number,
                                             unsigned many, unsigned lane, float factor, unsigned char *ring,
                                             float (&c)[ROWS][N], unsigned &different, bool more = false) {
    typedef Codes<C, N> Row;
    typedef Staged<C> S;
    static_assert(+S::RING <= +RING, "a ring has room");
    constexpr unsigned LANES = Block<C>::ELEMENTS / N, A_ROW = WARP / LANES, VECTORS = S::CODES / S::ROW;
    const unsigned char *chunk = call.chunks + blocks.chunk;
    // Each lane copies a vector of the head, of the header or of the scales, if the vector exists. Without a block
    // there are no vectors of scales.
    const unsigned beyond = blocks.end != 0 ? static_cast<unsigned>(blocks.scales<C>()) % S::VECTOR : 0;
    const bool of_header = lane < HEADER / S::VECTOR;
    const bool has_head = of_header || lane * S::VECTOR < HEADER + beyond + blocks.end * Block<C>::SCALE_BYTES;
    const unsigned char *head_from = chunk + (of_header ? 0 : blocks.scales<C>() - beyond - HEADER) + lane * S::VECTOR;
    const unsigned char *codes_from = chunk + blocks.codes<C>(call.codec) + lane * S::VECTOR;
    unsigned bytes[VECTORS];
#pragma unroll
    for (unsigned i = 0; i < VECTORS; i++) {
        bytes[i] = blocks.has((i * S::ROW + lane * S::VECTOR) / Block<C>::BYTES) ? +S::VECTOR : 0;
    }
    const auto stage = [&](unsigned at) {
        if (C != CODEC_BF16 && has_head) stage_cached<S::VECTOR>(ring + at + lane * S::VECTOR, head_from);
#pragma unroll
        for (unsigned i = 0; i < VECTORS; i++) {
            stage_codes(ring + at + S::HEAD + i * S::ROW + lane * S::VECTOR, codes_from + i * S::ROW, bytes[i]);
        }
    };
    const auto step = [&] { head_from += call.apart, codes_from += call.apart; };
    __syncwarp();  // all lanes have read the previous unit's data
#pragma unroll
    for (unsigned i = 0; i + 1 < S::PAYLOADS; i++) {
        if (i < many) stage(i * S::PAYLOAD);
        end_group();
        step();
    }
    if (!more) {
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
            for (unsigned m = 0; m < N; m++) c[k][m] = 0;
        }
    }
    // These are the addresses that the lane reads. A lane without a block reads the first block's scale.
    const unsigned block = blocks.has(lane) ? lane : blocks.begin;
    const unsigned char *const word_at = ring + lane % HEADER_WORDS * 4;
    const unsigned char *const scale_at = ring + HEADER + beyond + block * Block<C>::SCALE_BYTES;
    const unsigned char *const row_at = ring + S::HEAD + lane * Row::BYTES;
    const Header header(call.codec, chunk_number, lane);
    unsigned word = C == CODEC_BF16 ? Header::load(chunk, lane) : 0;
    Rare<C> rare;
    unsigned left = many, at = 0, before = S::RING - S::PAYLOAD;  // left >= 1; ring offsets: this one, the one before
#pragma unroll 1
    do {
        __syncwarp();  // all lanes have read the payload before
        if (left >= S::PAYLOADS) stage(before);
        end_group();
        step();
        wait_for_groups<S::PAYLOADS - 1>();
        __syncwarp();
        if (C != CODEC_BF16) word = *reinterpret_cast<const unsigned *>(word_at + at);
        different |= header.different(word);
        if (C == CODEC_BF16 && left > 1) word = Header::load(chunk += call.apart, lane);
        const unsigned memory = load_scale(scale_at + at, Block<C>::SCALE_BYTES, 0);
        rare.look_at(memory);
        const Usual<C, N> mine(memory, factor);
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
            Row row;
            row.load(row_at + at + k * WARP * Row::BYTES);
            if (C != CODEC_BF16) rare.look_at(row);
            mine.of_lane(k * A_ROW + lane / LANES).each(row, [&](unsigned m, float x, float scale) {
                c[k][m] = __fmaf_rn(x, scale, c[k][m]);
            });
        }
        before = at;
        at = at + S::PAYLOAD == S::RING ? 0 : at + S::PAYLOAD;
    } while (--left != 0);
    return are_usual(c, rare);
}

// Decodes one element of any block, with any code.
template <unsigned C>
__device__ __forceinline__ float one_number(const unsigned char *codes, unsigned element, unsigned memory) {
    Codes<C, 1> code;
    const unsigned bit = element * Block<C>::BITS;
    code.load(codes + bit / 8);
    code.words[0] >>= bit % 8;
    float v[1];
    dequantize(code, scale_from_memory<C>(memory), v);
    return v[0];
}

// Computes again a sum that is not of usual blocks. Sets `found` if a number is not finite; with `zeros` such a number
// counts as +0. `there(element, block)`: true if the element exists.
template <typename U, typename Call, unsigned N, unsigned ROWS, typename There>
__device__ __forceinline__ void sum_exactly(const Call &call, const UnitBlocks &unit, const InChunk &blocks,
                                            unsigned many, unsigned lane, bool zeros, const Share &share,
                                            float (&c)[ROWS][N], unsigned &found, There there) {
    const gc_codec &codec = call.codec;
    const unsigned char *scales = call.chunks + blocks.chunk + HEADER + blocks.number * unit.format.scale_bytes;
    const unsigned char *codes = call.chunks + blocks.chunk + codec.codes_at + blocks.number * unit.format.bytes;
    U::each_row(c, [&](unsigned row, float (&x)[N]) {
#pragma unroll 1
        for (unsigned i = 0; i < N; i++) {
            const unsigned element = (row * WARP + lane) * N + i, j = unit.format.block(element);
            float sum = 0;
#pragma unroll 1
            for (unsigned r = 0; r < many && there(element, j); r++) {
                const u64 at = r * call.apart;
                float v;
                BY_CODEC(codec.kind, v = one_number<C>(codes + at, element,
                         load_scale(scales + at, Block<C>::SCALE_BYTES, j)))
                if (!is_finite(v)) {
                    found |= NONFINITE;
                    if (zeros) v = 0;
                }
                sum = __fadd_rn(sum, v);
            }
            sum = canonical(share.of(sum));
#pragma unroll
            for (unsigned m = 0; m < N; m++) x[m] = m + 1 < N ? x[(m + 1) % N] : sum;
        }
    });
}

// Divides sums that are no means yet. DIVIDES: share.divides may be true.
template <typename U, bool DIVIDES = true, unsigned N, unsigned ROWS>
__device__ __forceinline__ void divide(const gc_codec &codec, const Share &share, float (&c)[ROWS][N]) {
    if (DIVIDES && share.divides) {
        // Each of 32 divisions would wait for a branch, and call a function if any lane's sum is 0, which is common
        // with codes of few bits. quotient() is three instructions, and the 32 do not wait for each other.
        if (share.has_quotient()) {
            const float inverse = share.inverse();
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = share.quotient(c[k][m], inverse);
            }
            as_floats(c);
            return;
        }
        U::each_row(c, [&](unsigned, float (&x)[N]) {
#pragma unroll
            for (unsigned m = 0; m < N; m++) x[m] = share.of(x[m]);
        });
    } else if (codec.kind == CODEC_BF16) {
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
            for (unsigned m = 0; m < N; m++) c[k][m] = __fmul_rn(c[k][m], share.reciprocal);
        }
    }
}

// Reduces a tile. `broken`: not 0 if a rank missed an earlier barrier. `to_shard`: true to write the sum or mean to a
// shard. `rings`: shared memory of the thread block. `arrive`: all threads call it when they have found all flags,
// before they have stored everything; not called for a shard. DIVIDES: the mean may need a division by Share.
template <bool KEPT, unsigned PEERS, bool DIVIDES = true, typename Arrive>
__device__ __forceinline__ void reduce_tile(const gc_reduce &call, const Target<PEERS> &target, const gc_tile &tile,
                                            unsigned broken, bool to_shard, uint4 *rings, unsigned &found, Arrive arrive) {
    constexpr unsigned N = 8, ROWS = 32 / N;
    typedef Unit<N, KEPT, PEERS, true> U;
    const gc_codec &codec = call.codec;
    const unsigned lane = threadIdx.x % WARP, at = threadIdx.x / WARP * UNIT, count = elements_of_unit(tile, at);
    const unsigned many = static_cast<unsigned>(call.payloads);
    const bool raw = tile.unit == NO_UNIT, zeros = codec.policy == ZERO;
    const auto shard_of = [&](const gc_tile &its) {
        // The shard may be NULL if it has no elements.
        float *shard = reinterpret_cast<float *>(call.dst);
        return its.count != 0 ? shard + run_of(codec, its.run).base + its.first : shard;
    };
    // A missing payload leaves the errors as they were, like a corrupt one. A shard gets NaN in its place.
    const auto nothing = [&] { return to_shard && codec.control->broken != 0 ? __uint_as_float(0x7fc00000u) : 0; };
    unsigned met = broken != 0 ? +CORRUPT : 0u;
    if (raw) {
        const Places places = places_of(codec, tile, true);
        const unsigned char *chunks = call.chunks + places.chunk;
#pragma unroll 1
        for (unsigned r = 0; r < many; r++) met |= look_at_header(codec, chunks + r * call.apart, tile.chunk, lane);
        const Share share(codec, many);
        const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT);
        float *shard = to_shard ? shard_of(tile) : nullptr;
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < tile.count; i += THREADS) {
            const unsigned char *from = call.chunks + place_of_raw(codec, places, i);
            float sum = 0;
#pragma unroll 4
            for (unsigned r = 0; r < many; r++) {
                float v = *reinterpret_cast<const float *>(from + r * call.apart);
                if (!is_finite(v)) {
                    found |= NONFINITE;
                    if (zeros) v = 0;
                }
                sum = __fadd_rn(sum, v);
            }
            sum = corrupt ? nothing() : share.of(sum);
            if (to_shard) shard[i] = canonical(sum);
            else store_raw(target, places, i, sum, found);
        }
        found |= met;
        if (!to_shard) arrive();
    } else {
        U unit = {codec, UnitBlocks(codec, tile, at, count, true), lane, count, nullptr, nullptr, target};
        const InChunk blocks(unit.blocks);
        if (KEPT && count != 0) {
            unit.find_errors(tile.unit + threadIdx.x / WARP);
            // The prefetch takes no registers. With more payloads enough bytes are in flight without it.
            if (lane == 0 && many == 2 && codec.error != 0) prefetch(unit.from, UNIT * codec.error);
        }
        float c[ROWS][N];
        bool usual;
        unsigned different = broken != 0 ? ~0u : 0;
        const float factor = Share(codec, many).reciprocal;
        unsigned char *ring = ring_of_warp(rings);
        BY_CODEC(codec.kind, usual = sum_payloads<C>(call, blocks, tile.chunk, many, lane, factor, ring, c, different))
        met = Header::flags(different, lane);
        const Share share(codec, in_register(many));  // computed again, because keeping it takes registers
        const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT);
        divide<U, DIVIDES>(codec, share, c);
        // Only sums of blocks that are not usual can be non-finite.
        if (!usual && !corrupt) {
            sum_exactly<U>(call, unit.blocks, blocks, many, lane, zeros, share, c, found,
                           [&](unsigned element, unsigned) { return element < count; });
        }
        found |= met;
        if (corrupt) {
            const float x = nothing();
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                for (unsigned m = 0; m < N; m++) c[k][m] = x;
            }
        }
        if (to_shard) {
            // Parts have any alignment: the shard is stored by vectors, or element by element with neighbours in the
            // same lines. The tile is computed again, because keeping it would take registers.
            float *to = shard_of(tile_of_blocks(codec, in_register(blockIdx.x), true)) + at;
            const bool aligned = count == UNIT && misalignment(to, 16) == 0;
            U::each_row(c, [&](unsigned row, float (&x)[N]) {
                if (aligned) {
                    store_floats<N>(reinterpret_cast<unsigned char *>(to + row * WARP * N), x, lane, true);
                    return;
                }
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    if (unit.has(row, m)) to[(row * WARP + lane) * N + m] = x[m];
                }
            });
        } else {
            if (KEPT && count != 0 && !corrupt) {
                Errors<N> old = {};
                old.load(unit.from, codec.error, lane);
                old.widen(codec.error);
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) {
#pragma unroll
                    for (unsigned m = 0; m < N; m++) c[k][m] = __fadd_rn(c[k][m], __fmul_rn(codec.beta, old.at(k, m)));
                }
            }
            const unsigned most = unit.look(c, found, [](unsigned, float (&)[N]) {});
            arrive();
            unit.emit(c, most, corrupt);
        }
    }
}

// Reads a code per element and a scale per block of each payload, and an error; writes an error, a code and a scale. A
// thread block reduces a tile, a warp a unit. With `shard` it writes the sum or mean instead: the first half of a
// reduce. KEPT: with errors. PEERS: to all ranks.
template <bool KEPT, unsigned PEERS>
__device__ __forceinline__ void reduce_blocks(const gc_reduce &call) {
    __shared__ uint4 rings[WARPS * RING / sizeof(uint4)];
    const gc_codec &codec = call.codec;
    const Target<PEERS> target = {codec, call.dst, call.slot};
    const gc_tile tile = tile_of_blocks(codec, blockIdx.x, true);
    const unsigned lane = threadIdx.x % WARP;
    const bool to_shard = !KEPT && !PEERS && call.shard != 0;
    const unsigned broken = codec.control->broken;  // loaded together with the codes
    unsigned found = 0, number = 0;
    reduce_tile<KEPT, PEERS>(call, target, tile, broken, to_shard, rings, found, [&] { number = arrive(codec, found); });
    if (to_shard) {
        const bool wrong = __any_sync(WHOLE_WARP, found & CORRUPT), any = __any_sync(WHOLE_WARP, found != 0);
        if (lane == 0 && any) set_flags(codec, wrong && codec.control->broken == 0 ? CORRUPT : NONFINITE);
    } else if (threadIdx.x < WARP) {
        finish_blocks(target, number);
    }
}

// BLOCKS: thread blocks that fit on a multiprocessor.
#define BLOCKS_REDUCE(name, KEPT, PEERS, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_reduce call) { \
        reduce_blocks<KEPT, PEERS>(call); \
    }

#endif
