// Reducing.
#ifndef GRADCODEC_REDUCE_CUH
#define GRADCODEC_REDUCE_CUH

#include "decode.cuh"
#include "step.cuh"
#include "vote.cuh"

__device__ __forceinline__ void prefetch_l2(const void *from) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#else
    (void)from;
#endif
}

// The payloads that are reduced, as a lane sees them: a word of a unit's bits in each, and the scale.
struct Payloads {
    const unsigned *bits;          // of the first payload: the aligned word that this lane's begins in
    const unsigned char *scales;
    u64 stride;
    unsigned many, beyond;         // payloads; bytes from there to the lane's word
    bool exists, low, high;        // the unit, this word of it, and the word behind, as far as it is needed

    __device__ __forceinline__ Payloads(const gc_reduce &call, const gc_tile &tile, unsigned at, unsigned count,
                                        unsigned lane) {
        const unsigned char *unit = call.chunks + tile.to + at / 8;
        beyond = misalignment(unit, 4), bits = reinterpret_cast<const unsigned *>(unit - beyond) + lane;
        scales = call.chunks + HEADER + 4 * static_cast<u64>(tile.run);
        stride = call.apart, many = static_cast<unsigned>(call.payloads);
        exists = count != 0, low = lane * 32 < count, high = beyond != 0 && (lane * 4 + 4 - beyond) * 8 < count;
    }
    // The word as it lies in memory; what is in it past the unit's last element is not looked at.
    __device__ __forceinline__ unsigned word(u64 payload) const {
        const unsigned *from = bits + payload * stride / 4;
        const unsigned first = low ? from[0] : 0, next = high ? from[1] : 0;
        return __funnelshift_r(first, next, beyond * 8);
    }
    // So that words of the first 8 payloads are in the L2 cache when they are wanted: a sector a lane.
    __device__ __forceinline__ void prefetch(unsigned count, unsigned lane) const {
        const unsigned payload = lane / 4, sector = lane % 4;
        if (payload < many && sector * 256 < count) prefetch_l2(bits - lane + sector * 8 + payload * stride / 4);
    }
    __device__ __forceinline__ float scale(u64 payload) const {
        return exists ? *reinterpret_cast<const float *>(scales + payload * stride) : 0;
    }
};

// What is loaded at once: words and scales of some payloads from one on. Nothing for a warp without elements.
struct Group {
    enum : unsigned { MOST = 2 };
    unsigned words[MOST];
    float scales[MOST];
    __device__ __forceinline__ void load(const Payloads &payloads, unsigned first) {
#pragma unroll
        for (unsigned i = 0; i < MOST; i++) {
            // In place of one that is not there the first, which is not used: no branch, and nothing more from memory.
            const unsigned payload = first + i < payloads.many ? first + i : first;
            words[i] = payloads.word(payload);
            scales[i] = payloads.scale(payload);
        }
    }
    // The next one becomes the first: so the loop over them is not unrolled.
    __device__ __forceinline__ void next() {
#pragma unroll
        for (unsigned i = 1; i < MOST; i++) words[i - 1] = words[i], scales[i - 1] = scales[i];
    }
};

// Adds a payload's scale, with the sign of each bit. FIRST: to +0. `word`: the lane's word of its bits.
template <bool FIRST>
__device__ __forceinline__ void add_payload(Lane<F32, 4> &sum, float q, unsigned word, unsigned lane) {
    constexpr unsigned N = 4;
    const unsigned fields = fields_of_unit<N>(in_order(word, ORDER_BIG), lane), scale = __float_as_uint(q);
    // +0 and -0 are +0.
    const unsigned sign = FIRST && q == 0 ? 0 : 0x80000000u;
#pragma unroll
    for (unsigned k = 0; k < 32 / N; k++) {
#pragma unroll
        for (unsigned m = 0; m < N; m++) {
            // Its sign is turned where the bit is 0. Not `bit ? q : -q`: ptxas divides by -W again for that.
            const unsigned term = scale ^ (~fields << (31 - (k * N + m)) & sign);
            sum.vectors[k].words[m] = FIRST ? term : __float_as_uint(__fadd_rn(sum.at(k, m), __uint_as_float(term)));
        }
    }
}

// The sum of all payloads' scales, each with the sign of its bit, in turn. `group`: the first of them. What is not
// finite is told, or zeroed.
__device__ __forceinline__ void sum_of_payloads(const Payloads &payloads, Group &group, bool zero, bool &found,
                                                Lane<F32, 4> &sum, unsigned lane) {
    // A power of two divides as its reciprocal multiplies.
    const float all = static_cast<float>(payloads.many), reciprocal = __uint_as_float(0x7f000000u - __float_as_uint(all));
    const bool divides = (payloads.many & (payloads.many - 1)) != 0;
    const auto share = [&] {
        const float q = divides ? __fdiv_rn(group.scales[0], all) : __fmul_rn(group.scales[0], reciprocal);
        if (is_finite(q)) return q;
        found = true;
        return zero ? 0 : q;
    };
    add_payload<true>(sum, share(), group.words[0], lane);
#pragma unroll 1
    for (unsigned r = 1; r < payloads.many; r++) {
        group.next();
        if (r % Group::MOST == 0) group.load(payloads, r);
        add_payload<false>(sum, share(), group.words[0], lane);
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
    payloads.prefetch(count, lane);
    Lane<E, N> old = {};
    Group group;
    float t = 0;
    if (count != 0) {
        old.load_from(from + kept_at, lane);
        t = reinterpret_cast<const float *>(from + codec.scales_at)[tile.run];
    }
    group.load(payloads, 0);

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
        bool found = false;
        sum_of_payloads(payloads, group, rules.zero, found, sum, lane);
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
    payloads.prefetch(count, lane);
    Group group;
    group.load(payloads, 0);
    const Told told = look_at_payloads(call, payloads.many, lane, warp);
    Lane<F32, N> sum;
    bool found = told.nonfinite;
    if (codec.kind == SIGN) {
        const unsigned char *state = codec.state[codec.control->valid >> SERVER & 1];
        const unsigned word = vote_of_unit(payloads, tile, state, at, count, lane);
        const unsigned fields = fields_of_unit<N>(in_order(word, ORDER_BIG), lane);
#pragma unroll
        for (unsigned i = 0; i < 32; i++) {
            sum.vectors[i / N].words[i % N] = 0x3f800000u | (~fields << (31 - i) & 0x80000000u);
        }
    } else {
        sum_of_payloads(payloads, group, codec.policy == ZERO, found, sum, lane);
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
