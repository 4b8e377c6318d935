// Decode kernels of the block codecs.
#ifndef GRADCODEC_BLOCKS_DECODE_CUH
#define GRADCODEC_BLOCKS_DECODE_CUH

#include "blocks.cuh"

// Computes fl(fl(v / divisor) * m). Usually divisor and m are 1.
struct Divided {
    float divisor, m;
    bool plain;
    __device__ __forceinline__ explicit Divided(const gc_decode &call) : divisor(call.divisor), m(factor(call.factor)) {
        plain = divisor == 1 && m == 1;
    }
    __device__ __forceinline__ float of(float v) const { return plain ? v : __fmul_rn(__fdiv_rn(v, divisor), m); }
};

// Rounds a result to 16 bits. A finite value becomes at most 65504 in magnitude in float16.
__device__ __forceinline__ unsigned short to_16(float x, unsigned dtype) {
    if (dtype == BFLOAT16) return to_bf16(x);
    if (is_finite(x)) x = fminf(fmaxf(x, -65504), 65504);
    return to_f16(x);
}
// Returns the bit pattern of a result; `finite` becomes true if the result is finite.
template <typename T>
__device__ __forceinline__ unsigned pattern_of(float x, unsigned dtype, bool &finite) {
    const unsigned pattern = sizeof(T) == 4 ? __float_as_uint(canonical(x)) : to_16(x, dtype);
    const unsigned infinity = sizeof(T) == 4 ? 0x7f800000u : dtype == BFLOAT16 ? 0x7f80 : 0x7c00;
    finite = (pattern & infinity) != infinity;
    return pattern;
}
// Returns 16 bytes of results that are finite.
__device__ __forceinline__ uint4 usual_results(const float (&v)[4], unsigned) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
}
__device__ __forceinline__ uint4 usual_results(const float (&v)[8], unsigned dtype) {
    if (dtype == BFLOAT16) {
        return make_uint4(to_bf16_pair(v[0], v[1]), to_bf16_pair(v[2], v[3]), to_bf16_pair(v[4], v[5]),
                          to_bf16_pair(v[6], v[7]));
    }
    float x[8];
#pragma unroll
    for (unsigned m = 0; m < 8; m++) x[m] = fminf(fmaxf(v[m], -65504), 65504);
    return make_uint4(to_f16_pair(x[0], x[1]), to_f16_pair(x[2], x[3]), to_f16_pair(x[4], x[5]), to_f16_pair(x[6], x[7]));
}

// Decodes raw elements `first` to `end` of a tile, one per thread, by chunks. Returns true if a result is not finite.
template <typename T, bool ADD>
__device__ __forceinline__ bool decode_raw(const gc_decode &call, const gc_tile &tile, const Divided &by, T *to,
                                           unsigned first, unsigned end, bool broken) {
    const gc_codec &codec = call.codec;
    const Places places = places_of(codec, tile);
    bool found = false;
#pragma unroll 1
    for (unsigned begin = first; begin < end;) {
        const unsigned later = places.later(begin), left = places.left + later * places.per_chunk() - begin;
        const unsigned last = left < end - begin ? begin + left : end;
        const unsigned char *chunk = call.payload + places.chunk + later * codec.stride;
        const unsigned char *raws = chunk + codec.raws_at + 4 * places.number_of(begin, later);
        const unsigned met = look_at_header(codec, chunk, tile.chunk + later, threadIdx.x % WARP);
        const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT) && !broken;
#pragma unroll 1
        for (unsigned i = begin + threadIdx.x; i < last && !(ADD && corrupt); i += THREADS) {
            float v = reinterpret_cast<const float *>(raws)[i - begin];
            v = by.of(broken ? __uint_as_float(0x7fc00000u) : v);
            if (corrupt) v = 0;
            if (ADD) v = __fadd_rn(__uint_as_float(to[i]), v);
            bool finite;
            to[i] = static_cast<T>(pattern_of<T>(v, call.dtype, finite));
            found |= !finite;
        }
        begin = last;
    }
    return found;
}

// Stores rows of vectors that are misaligned or incomplete, one row after the other.
template <typename T>
struct MovedRows {
    enum : unsigned { N = 16 / sizeof(T) };
    T *to;
    unsigned behind, lane;  // behind: misalignment of `to`, in bytes: whole elements
    uint4 last;             // last vector of the row before, in lane 0

    __device__ __forceinline__ MovedRows(T *at, unsigned bytes, unsigned number)
        : to(at), behind(bytes), lane(number), last() {}

    // Stores elements `begin` to `end` of a vector at an edge.
    __device__ __forceinline__ void some(T *at, uint4 v, unsigned begin, unsigned end) const {
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (unsigned m = 0; m < N; m++) {
            if (m >= begin && m < end) at[m] = static_cast<T>(words[m * sizeof(T) / 4] >> m * sizeof(T) * 8 % 32);
        }
    }
    // Stores the elements of an aligned row that are among the first `count` of all elements.
    __device__ __forceinline__ void first(unsigned row, uint4 v, unsigned count) const {
        const unsigned at = (row * WARP + lane) * N;
        if (at + N <= count) reinterpret_cast<uint4 *>(to)[row * WARP + lane] = v;
        else some(to + at, v, 0, at < count ? count - at : 0);
    }
    // Stores a misaligned row. A lane stores the aligned vector that has the end of its neighbour's vector and the
    // beginning of its own.
    __device__ __forceinline__ void store(unsigned row, uint4 own, bool is_last) {
        const unsigned from = (lane + WARP - 1) % WARP;
        const uint4 given = make_uint4(__shfl_sync(WHOLE_WARP, own.x, from), __shfl_sync(WHOLE_WARP, own.y, from),
                                       __shfl_sync(WHOLE_WARP, own.z, from), __shfl_sync(WHOLE_WARP, own.w, from));
        const uint4 before = lane == 0 ? last : given;
        last = given;
        // The last four words, shifted by 8, 4, 2 bytes, are the last `behind` bytes of `before`, then `own`.
        const bool eight = behind & 8;
        unsigned words[6] = {eight ? before.x : before.z, eight ? before.y : before.w, eight ? before.z : own.x,
                             eight ? before.w : own.y,    eight ? own.x : own.z,       eight ? own.y : own.w};
#pragma unroll
        for (unsigned i = 5; i > 0; i--) {
            if (behind & 4) words[i] = words[i - 1];
        }
        if (sizeof(T) == 2 && behind & 2) {
#pragma unroll
            for (unsigned i = 5; i > 1; i--) words[i] = __funnelshift_r(words[i - 1], words[i], 16);
        }
        const uint4 v = make_uint4(words[2], words[3], words[4], words[5]);
        const unsigned whole = (16 - behind) / sizeof(T);
        if (row == 0 && lane == 0) some(to, own, 0, whole);
        else reinterpret_cast<uint4 *>(reinterpret_cast<unsigned char *>(to) - behind)[row * WARP + lane] = v;
        if (is_last && lane == WARP - 1) some(to + (row * WARP + lane) * N, own, whole, N);
    }
};

// Decoder of a warp's elements: N neighbours per lane in each of ROWS rows.
template <typename T, bool ADD>
struct Decoder {
    enum : unsigned { N = 16 / sizeof(T), ROWS = ADD ? 4 : 32 / N, A_WARP = ROWS * WARP * N };
    const gc_decode &call;
    const UnitBlocks &blocks;
    const Divided &by;
    uint4 *stage;           // a vector per lane
    T *to;
    unsigned lane, count;   // elements
    bool broken;

    // Loads the existing values of a row. `whole`: as vectors.
    __device__ __forceinline__ void get(unsigned row, bool whole, float (&old)[4]) const {
        if (whole) {
            const uint4 x = reinterpret_cast<const uint4 *>(to)[row * WARP + lane];
            old[0] = __uint_as_float(x.x), old[1] = __uint_as_float(x.y);
            old[2] = __uint_as_float(x.z), old[3] = __uint_as_float(x.w);
            return;
        }
#pragma unroll
        for (unsigned m = 0; m < 4; m++) {
            const unsigned element = (row * WARP + lane) * N + m;
            old[m] = __uint_as_float(element < count ? to[element] : 0);
        }
    }

    // Loads a row of codes, the lane's from `from` on. A block with an element has all of its codes.
    template <typename OfRow>
    __device__ __forceinline__ void load_what_is_there(OfRow &codes, const unsigned char *from, unsigned row) const {
        codes = OfRow();
        if ((row * WARP + lane) * N < count) codes.load(from + row * WARP * OfRow::BYTES);
    }

    // Prefetches to the L2 cache, once per thread block, the bytes 2 MiB after its codes: nearly always codes of a
    // later thread block. Few reads among many writes cost more than their bytes. `codes`: this lane's codes.
    template <unsigned C>
    __device__ __forceinline__ void bring_what_comes(const unsigned char *codes) const {
        constexpr unsigned AHEAD = 2 << 20, BYTES = WARPS * A_WARP * Block<C>::BITS / 8;
        if (threadIdx.x != 0) return;
        const unsigned char *from = codes + AHEAD;  // whole vectors, like all codes of a unit
        if (from + BYTES <= call.payload + call.codec.n_chunks * call.codec.stride) prefetch_as_loaded(from, BYTES);
    }

    // Decodes if all blocks lie in one chunk, or whole rows in two; the chunks are right; the blocks are usual; and
    // divisor and factor are 1. Otherwise it does nothing and returns false. All loads are issued before the first is
    // waited for.
    template <unsigned C>
    __device__ __forceinline__ bool decode(const InChunk &piece, unsigned chunk_number, bool &found) const {
        constexpr unsigned LANES = Block<C>::ELEMENTS / N, A_ROW = WARP / LANES, BYTES = Codes<C, N>::BYTES;
        const unsigned char *chunk = call.payload + piece.chunk, *from = chunk + piece.codes<C>(call.codec) + lane * BYTES;
        if (!ADD) bring_what_comes<C>(from);
        const unsigned behind = misalignment(to, 16);
        const bool whole = count == A_WARP;
        if (!whole && behind != 0) return false;
        unsigned header, memory = 0;
        Codes<C, N> codes[ROWS];
        float old[ADD ? +ROWS : 1][4];
        if (piece.end != blocks.count) {
            const InChunk rest(blocks, piece.end);
            if (!whole || rest.end != blocks.count) return false;
            const unsigned char *const second = call.payload + rest.chunk;
            // The upper half of the warp checks the header of the second chunk.
            header = Header::load(lane < HEADER_WORDS ? chunk : second, lane);
            if (lane >= HEADER_WORDS) chunk_number += rest.later - piece.later;
            const unsigned char *const scales = lane < piece.end ? chunk + piece.scales<C>() : second + rest.scales<C>();
            if (lane < rest.end) memory = load_scale(scales, Block<C>::SCALE_BYTES, lane);
            const unsigned char *const others = second + rest.codes<C>(call.codec) + lane * BYTES;
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
                codes[k].load((k * A_ROW + lane / LANES < piece.end ? from : others) + k * WARP * BYTES);
                if (ADD) get(k, behind == 0, old[ADD ? k : 0]);
            }
        } else {
            header = Header::load(chunk, lane);
            if (piece.has(lane)) memory = load_scale(chunk + piece.scales<C>(), Block<C>::SCALE_BYTES, lane);
            if (whole) {
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) {
                    codes[k].load(from + k * WARP * BYTES);
                    if (ADD) get(k, behind == 0, old[ADD ? k : 0]);
                }
            } else {
#pragma unroll
                for (unsigned k = 0; k < ROWS; k++) load_what_is_there(codes[k], from, k);
            }
        }
        const unsigned different = Header(call.codec, chunk_number, lane).different(header);
        const bool corrupt = Header::flags(different, lane) & CORRUPT;
        Rare<C> rare;
        rare.look_at(memory);
#pragma unroll
        for (unsigned k = 0; k < ROWS; k++) rare.look_at(codes[k]);
        if (!__all_sync(WHOLE_WARP, by.plain && !broken && !corrupt && rare.none())) return false;
        const Usual<C, N> mine(memory, 1);
        const auto results = [&](unsigned row, const Codes<C, N> &of_row, const float (&there)[4]) {
            float v[N];
            mine.of_lane(row * A_ROW + lane / LANES).each(of_row, [&](unsigned m, float x, float scale) {
                v[m] = __fmul_rn(x, scale);
            });
            if (ADD) {
                float any = 0;
#pragma unroll
                for (unsigned m = 0; m < N; m++) {
                    v[m] = __fadd_rn(there[m % 4], v[m]);
                    any = __fmaf_rn(v[m], 0, any);
                }
                if (any != any) {
                    found = true;
#pragma unroll
                    for (unsigned m = 0; m < N; m++) v[m] = canonical(v[m]);
                }
            }
            return usual_results(v, call.dtype);
        };
        if (whole && behind == 0) {
#pragma unroll
            for (unsigned k = 0; k < ROWS; k++) {
                uint4 *const at = &reinterpret_cast<uint4 *>(to)[k * WARP + lane];
                if (ADD) *at = results(k, codes[k], old[ADD ? k : 0]);
                else store_vector(at, results(k, codes[k], old[0]));
            }
            return true;
        }
        // The code is long, so this is a loop: the next row becomes the first.
        MovedRows<T> rows(to, behind, lane);
#pragma unroll 1
        for (unsigned row = 0; row < ROWS; row++) {
            if (ADD && !whole) get(row, false, old[0]);
            const uint4 v = results(row, codes[0], old[0]);
            if (behind != 0) rows.store(row, v, row + 1 == ROWS);
            else rows.first(row, v, count);
#pragma unroll
            for (unsigned k = 0; k + 1 < ROWS; k++) {
                codes[k] = codes[k + 1];
#pragma unroll
                for (unsigned m = 0; m < 4 && ADD; m++) old[k][m] = old[(k + 1) % ROWS][m];
            }
        }
        return true;
    }

    // Decodes any blocks, a row at a time. Returns true if a result is not finite.
    __device__ __forceinline__ bool decode_any(const InChunk &piece, bool corrupt) const {
        const unsigned char *chunk = call.payload + piece.chunk;
        const T *staged = reinterpret_cast<const T *>(stage);
        bool found = false;
#pragma unroll 1
        for (unsigned row = 0; row < ROWS; row++) {
            const unsigned j = blocks.format.block((row * WARP + lane) * N);
            float v[N] = {}, old[4];
            if (ADD) get(row, false, old);
            if (piece.has(j)) {
                BY_CODEC(call.codec.kind, Codes<C, N> codes;
                         codes.load(chunk + piece.codes<C>(call.codec) + (row * WARP + lane) * Codes<C, N>::BYTES);
                         const unsigned memory = load_scale(chunk + piece.scales<C>(), Block<C>::SCALE_BYTES, j);
                         dequantize(codes, scale_from_memory<C>(memory), v))
            }
            unsigned words[4] = {};
#pragma unroll
            for (unsigned m = 0; m < N; m++) {
                float x = corrupt && !broken ? 0 : by.of(broken ? __uint_as_float(0x7fc00000u) : v[m]);
                if (ADD) x = __fadd_rn(old[m % 4], x);
                bool finite;
                words[m * sizeof(T) / 4] |= pattern_of<T>(x, call.dtype, finite) << m * sizeof(T) * 8 % 32;
                // Padding of a block does not count.
                found |= !finite && piece.has(j) && (row * WARP + lane) * N + m < count;
            }
            // Neighbouring lanes store neighbouring elements.
            stage[lane] = make_uint4(words[0], words[1], words[2], words[3]);
            __syncwarp();
#pragma unroll
            for (unsigned m = 0; m < N; m++) {
                const unsigned element = row * WARP * N + m * WARP + lane;
                if (element < count && piece.has(blocks.format.block(element))) to[element] = staged[m * WARP + lane];
            }
            __syncwarp();
        }
        return found;
    }
};

// Decodes a thread block's elements of a tile, from number `first` on. `stage`: shared memory of the thread block.
// Returns true if a result is not finite.
template <typename T, bool ADD>
__device__ __forceinline__ bool decode_tile(const gc_decode &call, const gc_tile &tile, unsigned first, uint4 *stage,
                                            bool broken) {
    typedef Decoder<T, ADD> D;
    constexpr unsigned A_WARP = D::A_WARP, A_BLOCK = WARPS * A_WARP;
    const gc_codec &codec = call.codec;
    const unsigned lane = threadIdx.x % WARP;
    const Divided by(call);
    T *to = nullptr;
    if (tile.count != 0) to = reinterpret_cast<T *>(values_of(codec, call.values, tile.run)) + tile.first;
    bool found = false;
    if (tile.unit == NO_UNIT) {
        const unsigned end = tile.count < first + A_BLOCK ? tile.count : first + A_BLOCK;
        found = decode_raw<T, ADD>(call, tile, by, to, first, end, broken);
    } else {
        const unsigned at = first + threadIdx.x / WARP * A_WARP, left = tile.count > at ? tile.count - at : 0;
        const unsigned count = left < A_WARP ? left : A_WARP;
        const UnitBlocks blocks(codec, tile, at, count);
        to += at;
        const D decoder = {call, blocks, by, stage + threadIdx.x / WARP * WARP, to, lane, count, broken};
        if (count == 0) return found;
        // Nearly always all blocks lie in one chunk and are usual.
        const InChunk all(blocks, 0);
        bool done;
        BY_CODEC(codec.kind, done = decoder.template decode<C>(all, tile.chunk + all.later, found))
        // Otherwise the loop decodes a chunk at a time.
#pragma unroll 1
        for (unsigned begin = 0; !done && begin < blocks.count;) {
            const InChunk piece(blocks, begin);
            begin = piece.end;
            const unsigned number = tile.chunk + piece.later;
            const unsigned met = look_at_header(codec, call.payload + piece.chunk, number, lane);
            const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT);
            if (!(ADD && corrupt && !broken)) found |= decoder.decode_any(piece, corrupt);
        }
    }
    return found;
}

// Checks each chunk's header once and sets its flags, also if it has no elements. `block`: this thread block's number.
__device__ __forceinline__ void check_headers(const gc_decode &call, unsigned block) {
    const gc_codec &codec = call.codec;
    const unsigned lane = threadIdx.x % WARP;
#pragma unroll 1
    for (u64 k = static_cast<u64>(block) * WARPS + threadIdx.x / WARP; k < codec.n_chunks; k += gridDim.x * WARPS) {
        const unsigned met = look_at_header(codec, call.payload + k * codec.stride, static_cast<unsigned>(k), lane);
        const bool corrupt = __any_sync(WHOLE_WARP, met & CORRUPT), nonfinite = __any_sync(WHOLE_WARP, met & NONFINITE);
        if (lane == 0 && (corrupt || nonfinite)) set_flags(codec, corrupt ? CORRUPT : NONFINITE);
    }
}

// Reads a code per element and a scale per block; writes an element, or reads and writes a float32. A thread block
// decodes a tile, a warp a unit, in rows of 16-byte vectors; with ADD half of that.
template <typename T, bool ADD>
__device__ __forceinline__ void decode_blocks(const gc_decode &call) {
    constexpr unsigned A_BLOCK = WARPS * Decoder<T, ADD>::A_WARP, SPLIT = TILE / A_BLOCK;
    __shared__ uint4 stage[THREADS];
    const gc_codec &codec = call.codec;
    const gc_tile tile = tile_of_blocks(codec, blockIdx.x / SPLIT);
    const bool broken = codec.control->broken;
    if (decode_tile<T, ADD>(call, tile, blockIdx.x % SPLIT * A_BLOCK, stage, broken)) set_flags(codec, NONFINITE);
    if (!broken) check_headers(call, blockIdx.x);
}

#define BLOCKS_DECODE(name, T, ADD, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_decode call) { \
        decode_blocks<T, ADD>(call); \
    }

#endif
