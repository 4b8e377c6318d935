// Reduce kernels of ONEBIT and SIGN.
#ifndef GRADCODEC_REDUCE_CUH
#define GRADCODEC_REDUCE_CUH

#include "decode.cuh"
#include "staging.cuh"
#include "step.cuh"
#include "vote.cuh"

// Payloads to reduce, for one lane: a word of a unit's bits in each payload, and the scale.
struct Payloads {
    const unsigned *bits;          // first payload: the aligned word in which this lane's word begins
    const unsigned char *scales;
    u64 stride;
    unsigned many, beyond;         // number of payloads; bytes from `bits` to the lane's word
    unsigned divisor;              // divisor of the sum
    bool exists, low, high;        // true if it exists: the unit; this word of it; the next word, where it is needed

    __device__ __forceinline__ Payloads(const gc_reduce &call, const gc_tile &tile, unsigned at, unsigned count,
                                        unsigned lane) {
        const unsigned char *unit = call.chunks + tile.to + at / 8;
        beyond = misalignment(unit, 4), bits = reinterpret_cast<const unsigned *>(unit - beyond) + lane;
        scales = call.chunks + HEADER + 4 * static_cast<u64>(tile.run);
        stride = call.apart, many = static_cast<unsigned>(call.payloads);
        divisor = call.codec.reduction == REDUCTION_SUM ? 1 : many * call.codec.ranks;
        exists = count != 0, low = lane * 32 < count, high = beyond != 0 && (lane * 4 + 4 - beyond) * 8 < count;
    }
    // Returns the word as it lies in memory. Bits after the unit's last element are not used.
    __device__ __forceinline__ unsigned word(u64 payload) const {
        const unsigned *from = bits + payload * stride / 4;
        return put_together(low ? from[0] : 0, high ? from[1] : 0);
    }
    // Returns the word from the two aligned words that contain it.
    __device__ __forceinline__ unsigned put_together(unsigned first, unsigned next) const {
        return __funnelshift_r(first, next, beyond * 8);
    }
    __device__ __forceinline__ float scale(u64 payload) const {
        return exists ? *reinterpret_cast<const float *>(scales + payload * stride) : 0;
    }
};

// Adds q, or subtracts it if `below_zero` is not 0.
__device__ __forceinline__ void add_signed(float &sum, float q, unsigned below_zero) {
#ifdef __CUDA_ARCH__
    // Only one of these two instructions is executed. For `below_zero ? -q : q` ptxas makes more.
    asm("{\n\t"
        ".reg .pred below;\n\t"
        "setp.ne.u32 below, %2, 0;\n\t"
        "@below sub.rn.f32 %0, %0, %1;\n\t"
        "@!below add.rn.f32 %0, %0, %1;\n\t"
        "}"
        : "+f"(sum)
        : "f"(q), "r"(below_zero));
#else
    sum = below_zero ? sum - q : sum + q;
#endif
}

// Up to MOST payloads. load() loads this lane's words as they lie in memory, each as two aligned words, and scale i to
// lane i. receive() makes words with 1 where an element is below zero, and shares of the result.
struct Group {
    enum : unsigned { MOST = 8 };
    unsigned words[MOST], next[MOST];
    float share;

    __device__ __forceinline__ void load(const Payloads &payloads, unsigned first, unsigned lane) {
        const unsigned *from = payloads.bits + first * payloads.stride / 4;
#pragma unroll
        for (unsigned i = 0; i < MOST; i++, from += payloads.stride / 4) {
            const bool given = first + i < payloads.many;
            words[i] = given && payloads.low ? from[0] : 0, next[i] = given && payloads.high ? from[1] : 0;
        }
        share = lane < MOST && first + lane < payloads.many ? payloads.scale(first + lane) : 0;
    }
    // Converts the loaded words and scale. A non-finite share sets `found`, and becomes 0 if `zero`.
    __device__ __forceinline__ void receive(const Payloads &payloads, bool zero, bool &found) {
#pragma unroll
        for (unsigned i = 0; i < MOST; i++) words[i] = ~in_order(payloads.put_together(words[i], next[i]), ORDER_BIG);
        // A product with the reciprocal of a power of two has the bits of the division.
        const float all = static_cast<float>(payloads.divisor);
        const bool divides = (payloads.divisor & (payloads.divisor - 1)) != 0;
        share = divides ? __fdiv_rn(share, all) : __fmul_rn(share, __uint_as_float(0x7f000000u - __float_as_uint(all)));
        if (is_finite(share)) return;
        found = true;
        if (zero) share = 0;
    }
    // Adds the shares of the first `count` payloads, at most MOST, to the lane's elements of a row: in order, with the
    // signs of the bits.
    __device__ __forceinline__ void add(float (&sums)[8], unsigned count, unsigned row, unsigned lane) const {
#pragma unroll
        for (unsigned i = 0; i < MOST; i++) {
            if (i >= count) break;
            const float q = __shfl_sync(WHOLE_WARP, share, i);
#pragma unroll
            for (unsigned j = 0; j < 2; j++) {
                // A lane's bits of vector k, 4 neighbours, are in word k * 4 + lane / 8.
                const unsigned bits = __shfl_sync(WHOLE_WARP, words[i], (row * 2 + j) * 4 + lane / 8) >> lane % 8 * 4;
#pragma unroll
                for (unsigned m = 0; m < 4; m++) add_signed(sums[j * 4 + m], q, bits & 1u << m);
            }
        }
    }
};

// Vectors of shared memory for a tile's sums or errors.
enum : unsigned { VECTORS_OF_SUMS = TILE * sizeof(float) / sizeof(uint4) };
// load_sums() and store_sums() keep a row's sums from group to group, if there are several. `kept`: the unit's sums.
__device__ __forceinline__ void load_sums(float (&sums)[8], const unsigned char *kept, unsigned row, unsigned lane) {
    Row<F32, 4> of_lane;
    of_lane.load_from(kept + row * of_lane.PLACES * F32::SIZE, lane);
#pragma unroll
    for (unsigned i = 0; i < 8; i++) sums[i] = of_lane.at(i / 4, i % 4);
}
__device__ __forceinline__ void store_sums(const float (&sums)[8], unsigned char *kept, unsigned row, unsigned lane) {
    Row<F32, 4> of_lane;
#pragma unroll
    for (unsigned i = 0; i < 8; i++) of_lane.vectors[i / 4].words[i % 4] = __float_as_uint(sums[i]);
    of_lane.store_to(kept + row * of_lane.PLACES * F32::SIZE, lane);
}

// Adds all groups but the last, and leaves the last one in `group`. Returns the payloads of the last group.
__device__ __forceinline__ unsigned add_earlier(const Payloads &payloads, Group &group, unsigned char *kept, bool zero, bool &found,
                                                unsigned lane) {
    unsigned first = 0;
#pragma unroll 1
    for (; payloads.many - first > Group::MOST; first += Group::MOST) {
#pragma unroll 1
        for (unsigned row = 0; row < 4; row++) {
            float sums[8] = {};
            if (first != 0) load_sums(sums, kept, row, lane);
            group.add(sums, Group::MOST, row, lane);
            store_sums(sums, kept, row, lane);
        }
        group.load(payloads, first + Group::MOST, lane);
        group.receive(payloads, zero, found);
    }
    return payloads.many - first;
}

// Returns the word of a lane in a vote of SIGN: the bits that more than half of the payloads have; in a tie, the bits
// of the payload in turn. `turn`: payload in turn at the word's first byte; `count`: elements of the word.
__device__ __forceinline__ unsigned vote_of_payloads(const Payloads &payloads, u64 turn, int count) {
    auto in_turn = turn_by_byte<4>(
        payloads.many, [&] { return turn; },
        [&](u64 payload, unsigned k) { return payloads.word(payload) >> 8 * k & 0xff; });
    const auto ballot = [&](u64 payload) { return Ballot<1>{{payloads.word(payload)}}; };
    const unsigned word = elect<32, 1>(payloads.many, ballot, in_turn).word[0];
    // Padding bits are 0, regardless of the payloads.
    return word & in_order(count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0, ORDER_BIG);
}

// Result of the checks of all chunks to reduce. All threads of a thread block call look_at_payloads().
struct Heads {
    bool broken, corrupt, nonfinite;
};
__device__ __forceinline__ Heads look_at_payloads(const gc_reduce &call, unsigned many, unsigned lane, unsigned warp) {
    const gc_codec &codec = call.codec;
    unsigned met = 0;
    const unsigned broken = codec.control->broken;  // loaded together with the headers
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

// Returns the word of a lane in a vote at the turn that a state has.
__device__ __forceinline__ unsigned vote_of_unit(const Payloads &payloads, const gc_tile &tile,
                                                 const unsigned char *state, unsigned at, unsigned count,
                                                 unsigned lane) {
    const u64 byte = tile.byte + at / 8 + lane * 4, turn = reinterpret_cast<const u64 *>(state)[TURN_WORD / 2];
    return vote_of_payloads(payloads, (byte % payloads.many + turn % payloads.many) % payloads.many,
                            static_cast<int>(count) - static_cast<int>(lane * 32));
}

// Reads 1/8 byte of each payload and an error, and writes an error and 1/8 byte, per element. A thread block reduces a
// tile, a warp a unit. SIGN has no errors.
template <typename E>
__device__ __forceinline__ void reduce(const gc_reduce &call) {
    constexpr unsigned N = 4;
    const gc_codec &codec = call.codec;
    wait_for_launch_before();
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, at = warp * UNIT;
    const gc_tile tile = tile_of(codec, blockIdx.x);
    const unsigned valid = valid_state(codec);
    const unsigned char *from = codec.state[valid];
    unsigned char *to = in_global_memory(codec.state[codec.policy == TRANSACTIONAL ? valid ^ 1 : valid]);
    const unsigned count = elements_of_unit(tile, at);
    const u64 kept_at = codec.units_at + (tile.unit * UNIT + at) * E::SIZE;
    const Payloads payloads(call, tile, at, count, lane);
    const bool zero = codec.policy == ZERO;
    // From compute capability 8.0 on, errors are copied to shared memory, and a row is read when it is needed: more
    // bytes are in flight than registers can hold. With more payloads than a group has, this memory holds sums instead.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    const bool staged = E::SIZE != 0 && payloads.many <= Group::MOST;
#else
    constexpr bool staged = false;
#endif
    __shared__ uint4 place[VECTORS_OF_SUMS];
    unsigned char *const errors = reinterpret_cast<unsigned char *>(place) + at * E::SIZE;
    unsigned char *const earlier = reinterpret_cast<unsigned char *>(place) + at * F32::SIZE;
    float t = 0;
    if (count != 0) {
        if (staged) {
            constexpr unsigned A_VECTOR = E::SIZE == 0 ? 4 : N * E::SIZE;
#pragma unroll
            for (unsigned k = 0; k < UNIT / (WARP * N); k++) {
                const unsigned vector = (k * WARP + lane) * A_VECTOR;
                stage_cached<A_VECTOR>(errors + vector, from + kept_at + vector);
            }
            end_group();
        }
        t = reinterpret_cast<const float *>(from + codec.scales_at)[tile.run];
    }
    Group group;
    group.load(payloads, 0, lane);

    let_next_launch_begin();
    const Heads heads = look_at_payloads(call, payloads.many, lane, warp);
    // A missing payload also leaves the errors as they were.
    const bool corrupt = heads.corrupt || heads.broken;
    if (threadIdx.x == 0 && (corrupt || heads.nonfinite)) {
        atomicOr(&codec.control->found, corrupt ? CORRUPT : NONFINITE);
    }

    // The rest also runs for a corrupt chunk, but is not stored. So the compiler can rely on converged lanes in a warp,
    // and makes no second code for diverged lanes.
    float all = 0;
    unsigned word;
    if (E::SIZE == 0 && codec.kind == SIGN) {
        word = vote_of_unit(payloads, tile, from, at, count, lane);
    } else {
        const Rules rules = {codec.rule == RMS, zero, false};
        bool found = false;
        group.receive(payloads, zero, found);
        const unsigned left = add_earlier(payloads, group, earlier, zero, found, lane);
        wait_for_groups<0>();
        const auto load_row = [&](unsigned row, float (&sums)[8], Row<E, N> &old) {
            const unsigned before = row * old.PLACES * E::SIZE;
            // A unit without elements has undefined values here, which are not used.
            if (staged) old.load_from(errors + before, lane);
            else if (count != 0) old.load_from(from + kept_at + before, lane);
            else old = {};
#pragma unroll
            for (unsigned i = 0; i < 8; i++) sums[i] = 0;
            if (payloads.many > Group::MOST) load_sums(sums, earlier, row, lane);
            group.add(sums, left, row, lane);
        };
        unsigned char *const kept = count != 0 && !corrupt ? to + kept_at : nullptr;
        unsigned below_zero;
        // The usual case takes fewer instructions.
        if (rules.rms && codec.beta == 1) {
            const Rules usual = {true, zero, false};
            all = step_by_rows<E, N, E>(usual, Carried<false>{t, 1}, load_row, kept, below_zero, found, lane, count);
        } else {
            all = step_by_rows<E, N, E>(rules, Carried<true>{t, codec.beta}, load_row, kept, below_zero, found, lane, count);
        }
        if (found && !corrupt) atomicOr(&codec.control->found, NONFINITE);
        word = word_of_unit<N>(below_zero, lane);
    }
    // The tile is computed again, because keeping it would take registers.
    const gc_tile same = tile_of(codec, in_register(blockIdx.x));
    store_words(codec, same, Chunks(codec, SERVER, call.dst, call.slot, 0), at / 8, corrupt ? 0 : word, lane);
    // The sum reuses the rows' memory, so that two thread blocks fit into the 64 KB of compute capability 7.5.
    __syncthreads();
    leave_sum(codec.partials + blockIdx.x, all, reinterpret_cast<double *>(place));
}

#define REDUCE(name, E, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ gc_reduce call) { \
        reduce<E>(call); \
    }
REDUCE(gc_onebit_reduce_f32, F32, 4)
REDUCE(gc_onebit_reduce_bf16, BF16, 4)
REDUCE(gc_onebit_reduce, None, 3)

// Writes the shard that reduce() would add the error to: the mean, or the majority as +1 and -1 or NaN, one part after
// the other. Reads 1/8 byte of each payload and writes a float32 per element: +0 if a payload is corrupt. `dst`: the
// shard. The state is only read: the call that encodes the shard advances the turn.
extern "C" __global__ void __launch_bounds__(THREADS, 3) gc_onebit_mean(const __grid_constant__ gc_reduce call) {
    constexpr unsigned N = 4;
    const gc_codec &codec = call.codec;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, at = warp * UNIT;
    const gc_tile tile = tile_of(codec, blockIdx.x);
    const unsigned count = elements_of_unit(tile, at);
    const Payloads payloads(call, tile, at, count, lane);
    Group group;
    group.load(payloads, 0, lane);
    const Heads heads = look_at_payloads(call, payloads.many, lane, warp);
    bool found = heads.nonfinite;
    const bool unknown = heads.broken || (!heads.corrupt && vote_is_nan(codec, heads.nonfinite ? +NONFINITE : 0));
    const bool zero = codec.policy == ZERO, votes = codec.kind == SIGN;
    if (votes) {
        const unsigned char *state = codec.state[codec.control->valid >> SERVER & 1];
        group.words[0] = ~in_order(vote_of_unit(payloads, tile, state, at, count, lane), ORDER_BIG), group.share = 1;
    } else {
        group.receive(payloads, zero, found);
    }
    __shared__ uint4 place[VECTORS_OF_SUMS];
    unsigned char *const kept = reinterpret_cast<unsigned char *>(place) + at * F32::SIZE;
    const unsigned left = votes ? 1 : add_earlier(payloads, group, kept, zero, found, lane);
    u64 first = at;
    if (count != 0) first += run_of(codec, tile.run).base + tile.first;  // without segments there is no run
#pragma unroll 1
    for (unsigned row = 0; row < 4; row++) {
        float sums[8] = {};
        if (!votes && payloads.many > Group::MOST) load_sums(sums, kept, row, lane);
        group.add(sums, left, row, lane);
        Row<F32, N> means;
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            const unsigned pattern = heads.corrupt ? 0 : __float_as_uint(canonical(sums[i]));
            means.vectors[i / N].words[i % N] = unknown ? 0x7fc00000 : pattern;
        }
        const unsigned before = row * means.PLACES;
        if (before < count) means.store_anywhere(call.dst + (first + before) * 4, lane, count - before);
    }
    if (__any_sync(WHOLE_WARP, heads.broken || heads.corrupt || found) && lane == 0) {
        set_flags(codec, heads.corrupt && !heads.broken ? CORRUPT : NONFINITE);
    }
}

#endif
