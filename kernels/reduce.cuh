// Reducing.
#ifndef GRADCODEC_REDUCE_CUH
#define GRADCODEC_REDUCE_CUH

#include "decode.cuh"
#include "step.cuh"
#include "vote.cuh"

// The payloads that are reduced, as a lane sees them: a word of a unit's bits in each, and the scale.
struct Payloads {
    const unsigned *bits;          // of the first payload: the aligned word that this lane's begins in
    const unsigned char *scales;
    u64 stride;
    unsigned many, beyond;         // payloads; bytes from there to the lane's word
    bool exists, low, high;        // the tile, this word of a unit, and the word behind if it is needed

    __device__ __forceinline__ Payloads(const gc_reduce &call, const gc_tile &tile, unsigned at, unsigned count,
                                        unsigned lane) {
        const unsigned char *unit = call.chunks + tile.to + at / 8;
        beyond = misalignment(unit, 4), bits = reinterpret_cast<const unsigned *>(unit - beyond) + lane;
        scales = call.chunks + HEADER + 4 * static_cast<u64>(tile.run);
        stride = call.apart, many = static_cast<unsigned>(call.payloads);
        exists = tile.count != 0, low = lane * 32 < count, high = beyond != 0 && (lane * 4 + 4 - beyond) * 8 < count;
    }
    // The word as it lies in memory; what is in it past the unit's last element is not looked at.
    __device__ __forceinline__ unsigned word(u64 payload) const {
        const unsigned *from = bits + payload * stride / 4;
        const unsigned first = low ? from[0] : 0, next = high ? from[1] : 0;
        return __funnelshift_r(first, next, beyond * 8);
    }
    __device__ __forceinline__ float scale(u64 payload) const {
        return exists ? *reinterpret_cast<const float *>(scales + payload * stride) : 0;
    }
};

// The sums of the first payloads' scales, by the bits that an element has in them, bit r of the index in payload r: a
// look in a table takes the place of a sum for each element, and gives the same, for each sum is formed in turn.
struct Table {
    enum : unsigned { MOST = 8, LANE = 8 };   // payloads; words of a lane
    float sums[1 << MOST];
    uint4 indices[WARPS][WARP * LANE / 4];    // of the elements of a unit, a byte each

    // By all threads of a block, who meet before they look; each makes a sum. Gives whether a scale is not finite.
    __device__ __forceinline__ bool fill(const Payloads &payloads, bool zero, unsigned lane) {
        const unsigned few = payloads.many < MOST ? payloads.many : +MOST;
        float q = lane < few ? payloads.scale(lane) : 0;
        q = __fdiv_rn(q, static_cast<float>(payloads.many));
        const bool found = __any_sync(WHOLE_WARP, !is_finite(q));
        if (zero && !is_finite(q)) q = 0;
        float sum = 0;
#pragma unroll 1
        for (unsigned r = 0; r < few; r++) {
            // Its sign is turned where the bit is 0. +0 and -0 are +0.
            const unsigned term = __float_as_uint(__shfl_sync(WHOLE_WARP, q, r)) ^ (~(threadIdx.x >> r) << 31);
            sum = __fadd_rn(sum, __uint_as_float(term));
        }
        sums[threadIdx.x] = sum;
        return found;
    }
    // The sums of a lane's elements. `words`: those of the first payloads, of others anything.
    __device__ __forceinline__ void look(unsigned many, const unsigned (&words)[MOST], Lane<F32, 4> &sum, unsigned lane,
                                         unsigned warp) {
        if (many <= MOST / 2) put_indices<MOST / 2>(words, indices[warp] + lane * (LANE / 4));
        else put_indices<MOST>(words, indices[warp] + lane * (LANE / 4));
        __syncwarp();
        const unsigned *mine = reinterpret_cast<const unsigned *>(indices[warp]) + lane;
#pragma unroll
        for (unsigned k = 0; k < 8; k++) {
            const unsigned four = mine[k * WARP];
#pragma unroll
            for (unsigned m = 0; m < 4; m++) sum.vectors[k].words[m] = __float_as_uint(sums[four >> 8 * m & 0xff]);
        }
    }

private:
    // Bits i of every 2 * SHIFT go from the upper half of a to the lower half of b, and back.
    template <unsigned SHIFT>
    static __device__ __forceinline__ void swap_bits(unsigned &a, unsigned &b) {
        constexpr unsigned LOWER = 0xffffffffu / ((1u << SHIFT) + 1);
        const unsigned lower = (a & LOWER) | (b << SHIFT & ~LOWER), upper = (a >> SHIFT & LOWER) | (b & ~LOWER);
        a = lower, b = upper;
    }
    // Bytes k of four words become word k.
    static __device__ __forceinline__ void swap_bytes(unsigned (&words)[4], unsigned a, unsigned b, unsigned c,
                                                      unsigned d) {
        const unsigned ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
        const unsigned high_ab = __byte_perm(a, b, 0x7362), high_cd = __byte_perm(c, d, 0x7362);
        words[0] = __byte_perm(ab, cd, 0x5410), words[1] = __byte_perm(ab, cd, 0x7632);
        words[2] = __byte_perm(high_ab, high_cd, 0x5410), words[3] = __byte_perm(high_ab, high_cd, 0x7632);
    }
    // Bits r of eight words become those of a byte: 8 bits of each of as many payloads.
    template <unsigned N>
    static __device__ __forceinline__ void put_indices(const unsigned (&words)[MOST], uint4 *to) {
        unsigned bits[8];
#pragma unroll
        for (unsigned r = 0; r < 8; r++) bits[r] = r < N ? words[r] : 0;
#pragma unroll
        for (unsigned r = 0; r < 8; r += 2) swap_bits<1>(bits[r], bits[r + 1]);
#pragma unroll
        for (unsigned r = 0; r < 8; r++) {
            if (r % 4 < 2) swap_bits<2>(bits[r], bits[r + 2]);
        }
#pragma unroll
        for (unsigned r = 0; r < 4; r++) swap_bits<4>(bits[r], bits[r + 4]);
        // The most significant bit of a byte is its first element's.
        unsigned first[4], second[4];
        swap_bytes(first, bits[7], bits[6], bits[5], bits[4]);
        swap_bytes(second, bits[3], bits[2], bits[1], bits[0]);
        to[0] = make_uint4(first[0], second[0], first[1], second[1]);
        to[1] = make_uint4(first[2], second[2], first[3], second[3]);
    }
};

// The words of the first payloads, loaded at once, and not looked at meanwhile. Nothing for a warp without elements.
struct Group {
    unsigned first[Table::MOST], next[Table::MOST];
    __device__ __forceinline__ explicit Group(const Payloads &payloads) {
        const unsigned *from = payloads.bits;
        const auto load = [&](unsigned r) {
            // In place of one that is not there the last, which is not used: no branch, nothing more from memory.
            if (r != 0) from += r < payloads.many ? payloads.stride / 4 : 0;
            first[r] = payloads.low ? from[0] : 0, next[r] = payloads.high ? from[1] : 0;
        };
#pragma unroll
        for (unsigned r = 0; r < Table::MOST; r++) first[r] = 0, next[r] = 0;
#pragma unroll
        for (unsigned r = 0; r < Table::MOST / 2; r++) load(r);
        if (payloads.many <= Table::MOST / 2) return;
#pragma unroll
        for (unsigned r = Table::MOST / 2; r < Table::MOST; r++) load(r);
    }
    __device__ __forceinline__ unsigned word(const Payloads &payloads, unsigned r) const {
        return __funnelshift_r(from_memory(first[r]), from_memory(next[r]), payloads.beyond * 8);
    }
};

// The sum of all payloads' scales, each with the sign of its bit, in turn. `group`: the words of the first of them,
// whose sums the table has. What is not finite is told, or zeroed.
__device__ __forceinline__ void sum_of_payloads(const Payloads &payloads, const Group &group, Table &table, bool zero,
                                                bool &found, Lane<F32, 4> &sum, unsigned lane, unsigned warp) {
    unsigned words[Table::MOST];
#pragma unroll
    for (unsigned r = 0; r < Table::MOST; r++) words[r] = group.word(payloads, r);
    table.look(payloads.many, words, sum, lane, warp);
#pragma unroll 1
    for (unsigned r = Table::MOST; r < payloads.many; r++) {
        const unsigned fields = fields_of_unit<4>(in_order(payloads.word(r), ORDER_BIG), lane);
        float q = __fdiv_rn(payloads.scale(r), static_cast<float>(payloads.many));
        if (!is_finite(q)) {
            found = true;
            if (zero) q = 0;
        }
#pragma unroll
        for (unsigned i = 0; i < 32; i++) {
            // Its sign is turned where the bit is 0. Not `bit ? q : -q`: ptxas divides by -W again for that.
            const unsigned term = __float_as_uint(q) ^ (~fields << (31 - i) & 0x80000000u);
            unsigned &word = sum.vectors[i / 4].words[i % 4];
            word = __float_as_uint(__fadd_rn(__uint_as_float(word), __uint_as_float(term)));
        }
    }
}

// SIGN: the word of a lane, of the bits that more than half of the payloads have, in a tie of the one in turn. `turn`:
// whose it is at the word's first byte; `count`: elements of the word.
__device__ __forceinline__ unsigned vote_of_payloads(const Payloads &payloads, u64 turn, int count) {
    auto in_turn = turn_by_byte<4>(
        payloads.many, [&] { return turn; },
        [&](u64 payload, unsigned k) { return payloads.word(payload) >> 8 * k & 0xff; });
    const auto ballot = [&](u64 payload) { return Ballot<1>{{payloads.word(payload)}}; };
    const unsigned word = elect<32, 1>(payloads.many, ballot, in_turn).word[0];
    // Bits that fill up are 0, whatever the payloads have there.
    return word & in_order(count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0, ORDER_BIG);
}

// What the chunks that are reduced tell of themselves. By all threads of a block.
struct Told {
    bool broken, corrupt, nonfinite;
};
__device__ __forceinline__ Told look_at_payloads(const gc_reduce &call, unsigned many, unsigned lane, unsigned warp) {
    const gc_codec &codec = call.codec;
    unsigned met = 0;
    const unsigned broken = codec.control->broken;  // on its way with the headers
#pragma unroll 1
    for (unsigned r = warp; r < many; r += WARPS) {
#pragma unroll 1
        for (unsigned w = lane; w < HEADER_WORDS + codec.n_segments; w += WARP) {
            met |= look_at_word(codec, call.chunks + r * call.apart, codec.chunk, w);
        }
    }
    const bool corrupt = __syncthreads_or(met & CORRUPT), nonfinite = __syncthreads_or(met & NONFINITE);
    return {broken != 0, corrupt, nonfinite};
}

// The word of a lane that most payloads have there, at the turn that a state says.
__device__ __forceinline__ unsigned vote_of_unit(const Payloads &payloads, const gc_tile &tile,
                                                 const unsigned char *state, unsigned at, unsigned count,
                                                 unsigned lane) {
    const u64 byte = tile.byte + at / 8 + lane * 4, turn = reinterpret_cast<const u64 *>(state)[TURN_WORD / 2];
    return vote_of_payloads(payloads, (byte % payloads.many + turn % payloads.many) % payloads.many,
                            static_cast<int>(count) - static_cast<int>(lane * 32));
}

// Reads 1/8 byte of each payload and an error, writes an error and 1/8 byte an element. Block: a tile, a unit a warp.
// SIGN has no errors.
template <typename E>
__device__ __forceinline__ void reduce(const gc_reduce &call) {
    constexpr unsigned N = 4;
    const gc_codec &codec = call.codec;
    wait_for_launch_before();
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, at = warp * UNIT;
    const gc_tile tile = tile_of(codec, blockIdx.x);
    const unsigned valid = valid_state(codec);
    const unsigned char *from = codec.state[valid];
    unsigned char *to = codec.state[codec.policy == TRANSACTIONAL ? valid ^ 1 : valid];
    const unsigned count = elements_of_unit(tile, at);
    const u64 kept_at = codec.units_at + (tile.unit * UNIT + at) * E::SIZE;
    const Payloads payloads(call, tile, at, count, lane);
    Lane<E, N> old = {};
    __shared__ Table table;
    float t = 0;
    if (count != 0) {
        old.load_from(from + kept_at, lane);
        t = reinterpret_cast<const float *>(from + codec.scales_at)[tile.run];
    }
    const Group group(payloads);
    bool found = table.fill(payloads, codec.policy == ZERO, lane);

    let_next_launch_begin();
    const Told told = look_at_payloads(call, payloads.many, lane, warp);
    // What did not come leaves the error as it was, too.
    const bool corrupt = told.corrupt || told.broken;
    if (threadIdx.x == 0 && (corrupt || told.nonfinite)) atomicOr(&codec.control->found, corrupt ? CORRUPT : NONFINITE);

    // What follows is done with a corrupt chunk too, but not stored: the compiler knows then that the lanes of a warp
    // are together, and has no other code for lanes that are not.
    float all = 0;
    unsigned word;
    if (E::SIZE == 0 && codec.kind == SIGN) {
        word = vote_of_unit(payloads, tile, from, at, count, lane);
    } else {
        const Rules rules = {codec.rule == RMS, codec.policy == ZERO, false};
        const Carried<true> form = {t, codec.beta};
        unsigned below_zero;
        Lane<F32, N> sum;
        Lane<E, N> kept;
        sum_of_payloads(payloads, group, table, rules.zero, found, sum, lane, warp);
        found = found && count != 0;  // what there is none of is not stored again
        // What is usual costs a third less: reduce() is where instructions count, and not memory alone.
        if (codec.rule == RMS && codec.beta == 1 && tile.count == TILE) {
            const Rules usual = {true, false, false};
            all = step(usual, Carried<false>{t, 1}, sum, old, kept, below_zero, lane, ~0u);
        } else {
            all = step(rules, form, sum, old, kept, below_zero, lane, which_exist<N>(lane, count));
        }
        if (__all_sync(WHOLE_WARP, corrupt || (!found && is_finite(all)))) {
            if (count != 0 && !corrupt) kept.store_to(to + kept_at, lane);
        } else {
            const auto load_row = [&](unsigned row, float (&sums)[8], float (&olds)[8]) {
                load_kept_row<E, N>(olds, from + kept_at, row, lane);
#pragma unroll
                for (unsigned i = 0; i < 8; i++) sums[i] = sum.at(i / N, i % N);
                // The next row becomes the first.
#pragma unroll
                for (unsigned k = 8 / N; k < 32 / N; k++) sum.vectors[k - 8 / N] = sum.vectors[k];
            };
            all = step_exactly<E, N, E>(rules, form, load_row, to + kept_at, below_zero, found, lane, count);
            if (found) atomicOr(&codec.control->found, NONFINITE);
        }
        word = word_of_unit<N>(below_zero, lane);
    }
    // Found anew: what is kept of it meanwhile takes registers that are wanted.
    const gc_tile same = tile_of(codec, in_register(blockIdx.x));
    store_words(codec, same, Chunks(codec, SERVER, call.dst, call.way, 0), at / 8, corrupt ? 0 : word, lane);
    leave_sum(codec.partials + blockIdx.x, all);
}

#define REDUCE(name, E, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_reduce call) { \
        reduce<E>(call); \
    }
REDUCE(gc_onebit_reduce_f32, F32, 2)
REDUCE(gc_onebit_reduce_bf16, BF16, 3)
REDUCE(gc_onebit_reduce, None, 3)

// The shard that reduce() would add the error to: the mean, or the majority as +1 and -1, one part after the other.
// Reads 1/8 byte of each payload, writes a float32 an element: +0 if a payload is corrupt. `dst`: the shard. The state
// is only read: whoever makes a chunk of a shard goes on to the next turn.
extern "C" __global__ void __launch_bounds__(THREADS, 3) gc_onebit_mean(const __grid_constant__ gc_reduce call) {
    constexpr unsigned N = 4;
    const gc_codec &codec = call.codec;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, at = warp * UNIT;
    const gc_tile tile = tile_of(codec, blockIdx.x);
    const unsigned count = elements_of_unit(tile, at);
    const Payloads payloads(call, tile, at, count, lane);
    __shared__ Table table;
    const Group group(payloads);
    bool found = table.fill(payloads, codec.policy == ZERO, lane);
    const Told told = look_at_payloads(call, payloads.many, lane, warp);
    Lane<F32, N> sum;
    found = found || told.nonfinite;
    if (codec.kind == SIGN) {
        const unsigned char *state = codec.state[codec.control->valid >> SERVER & 1];
        const unsigned word = vote_of_unit(payloads, tile, state, at, count, lane);
        const unsigned fields = fields_of_unit<N>(in_order(word, ORDER_BIG), lane);
#pragma unroll
        for (unsigned i = 0; i < 32; i++) {
            sum.vectors[i / N].words[i % N] = 0x3f800000u | (~fields << (31 - i) & 0x80000000u);
        }
    } else {
        sum_of_payloads(payloads, group, table, codec.policy == ZERO, found, sum, lane, warp);
    }
    if (lane == 0 && (told.broken || told.corrupt || found)) {
        tell(codec, told.corrupt && !told.broken ? CORRUPT : NONFINITE);
    }
    if (count == 0) return;
#pragma unroll
    for (unsigned i = 0; i < 32; i++) {
        const float mean = sum.at(i / N, i % N);
        const unsigned pattern = told.corrupt ? 0 : __float_as_uint(canonical(mean));
        sum.vectors[i / N].words[i % N] = told.broken ? 0x7fc00000 : pattern;
    }
    const u64 first = run_of(codec, tile.run).base + tile.first + at;
    sum.store_anywhere(call.dst + first * 4, lane, count);
}

#endif
