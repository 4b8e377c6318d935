// Kernels that commit, reset, write and load states and errors.
#ifndef GRADCODEC_STATE_CUH
#define GRADCODEC_STATE_CUH

#include "decode.cuh"

// Returns true for a block codec, which keeps plain errors and no scales.
__device__ __forceinline__ bool has_blocks(const gc_codec &codec) {
    return codec.kind >= CODEC_BF16;
}

struct gc_state {
    gc_codec worker, server;   // server.half 0: no server
    unsigned char *bytes;      // a state, or float32 errors of the half `half`, run after run
    const void *skip;          // gc_onebit_commit: a scalar of 1 byte, an int32, or a float32
    u64 size;                  // bytes of a state
    unsigned half, skip_kind;  // 0: never, 1: always, 2: bool, 3: int32, 4: float32
    // gc_onebit_errors_in: each element combines `rows` rows of `row` elements, as Rows of src/codec/call.rs defines
    // it. For the server's half, `row` is 0 if its parts follow one another; otherwise a row has all elements.
    u64 rows, row;
    float start, divisor, divisor_of_sum, factor;
};
SAME_LAYOUT(gc_state)

extern "C" __global__ void __launch_bounds__(THREADS) gc_onebit_commit(const __grid_constant__ gc_state call) {
    if (threadIdx.x != 0) return;
    bool skip = call.skip_kind == 1;
    if (call.skip_kind == 2) skip = *static_cast<const unsigned char *>(call.skip) != 0;
    if (call.skip_kind == 3) skip = *static_cast<const int *>(call.skip) != 0;
    if (call.skip_kind == 4) skip = *static_cast<const float *>(call.skip) != 0;
    commit(*call.worker.control, skip);
}

// Returns word `w` of a state's header, with turn 0.
__device__ __forceinline__ unsigned state_header_word(const gc_codec &codec, unsigned w) {
    return w == 0 ? 0x54534347u : w == CHUNK_WORD || w == FLAGS_WORD ? 0 : codec.header[w];  // "GCST"
}

// Initializes states whose memory is 0, and gc_control. Launch: one thread block.
extern "C" __global__ void __launch_bounds__(THREADS) gc_onebit_reset(const __grid_constant__ gc_state call) {
    const gc_codec &codec = call.worker;
    if (threadIdx.x < HEADER_WORDS) {
        for (unsigned k = 0; k < 2; k++) {
            reinterpret_cast<unsigned *>(codec.state[k])[threadIdx.x] = state_header_word(codec, threadIdx.x);
        }
    }
    if (threadIdx.x < sizeof(gc_control) / 4) reinterpret_cast<unsigned *>(codec.control)[threadIdx.x] = 0;
    for (unsigned k = threadIdx.x; k < codec.n_segments; k += THREADS) codec.scales[k] = 0;
}

// Writes the valid state, 4 bytes per thread.
extern "C" __global__ void __launch_bounds__(THREADS) gc_onebit_state_out(const __grid_constant__ gc_state call) {
    const u64 w = thread_number(), at = w * 4;
    if (at >= call.size) return;
    const gc_codec &server = call.server;
    const u64 scales_end = server.scales_at + 4 * static_cast<u64>(server.n_segments);
    // A server without segments also has a turn.
    const bool of_server = server.half != 0
                           && (w / 2 == TURN_WORD / 2 || at >= server.units_at
                               || (!has_blocks(server) && at >= server.scales_at && at < scales_end));
    const unsigned valid = call.worker.control->valid >> of_server & 1;
    reinterpret_cast<unsigned *>(call.bytes)[w] = reinterpret_cast<const unsigned *>(call.worker.state[valid])[w];
}

// Checks if a state may be loaded. Launch: one thread block.
extern "C" __global__ void __launch_bounds__(THREADS) gc_onebit_check_state(const __grid_constant__ gc_state call) {
    const unsigned *words = reinterpret_cast<const unsigned *>(call.bytes);
    bool wrong = false;
    if (threadIdx.x < TURN_WORD) wrong = words[threadIdx.x] != state_header_word(call.worker, threadIdx.x);
    const u64 scales = has_blocks(call.worker) ? 0 : static_cast<u64>(call.worker.n_segments) + call.server.n_segments;
    const u64 end = HEADER_WORDS + scales;
    for (u64 w = HEADER_WORDS + threadIdx.x; w < end; w += THREADS) wrong |= is_negative(words[w]);
    wrong = __syncthreads_or(wrong);
    if (threadIdx.x != 0) return;
    gc_control &control = *call.worker.control;
    control.accepted = !wrong;
    if (wrong) control.flags |= CORRUPT, control.since |= CORRUPT;
}

__device__ __forceinline__ float kept_at(const gc_codec &codec, const unsigned char *units, u64 i) {
    return codec.error == 4 ? reinterpret_cast<const float *>(units)[i]
                            : from_bf16(reinterpret_cast<const unsigned short *>(units)[i]);
}

// Returns an element, combined over all rows.
__device__ __forceinline__ float sum_of_rows(const gc_state &call, const float *errors, u64 i) {
    float sum = call.start;
    errors += i;
#pragma unroll 1
    for (u64 r = 0; r < call.rows; r++, errors += call.row) sum = __fadd_rn(sum, __fdiv_rn(*errors, call.divisor));
    return __fmul_rn(__fdiv_rn(sum, call.divisor_of_sum), call.factor);
}

// Returns the offset of a part in a row of all elements, in elements. The part must not be raw.
__device__ __forceinline__ u64 place_in_row(const gc_state &call, const gc_codec &codec, unsigned number) {
    gc_run segment = segment_of(codec, number);
    if (codec.n_segments == 1) segment.base = call.worker.only.base;
    const unsigned elements = has_blocks(codec) ? codec.header[3] : 8;  // elements per block, or per byte of bits
    return segment.base + (run_of(codec, number).byte - segment.byte) * elements;
}

// Loads one half, a tile per thread block: errors if ERRORS, else a state that gc_onebit_check_state accepted.
template <bool ERRORS>
__device__ __forceinline__ void take_in(const gc_state &call) {
    const gc_codec &codec = call.half == SERVER ? call.server : call.worker;
    gc_control &control = *codec.control;
    if (!ERRORS && !control.accepted) return;
    unsigned char *to = codec.state[control.valid >> codec.half & 1];
    const gc_tile tile = tile_of(codec, blockIdx.x);
    if (!ERRORS && blockIdx.x == 0 && threadIdx.x == 0 && codec.half == SERVER) {
        reinterpret_cast<u64 *>(to)[TURN_WORD / 2] = reinterpret_cast<const u64 *>(call.bytes)[TURN_WORD / 2];
    }
    if (tile.run == NO_RUN || tile.unit == NO_UNIT) return;
    if (tile.first == 0 && threadIdx.x == 0 && !has_blocks(codec)) {
        const float s = ERRORS ? 0 : reinterpret_cast<const float *>(call.bytes + codec.scales_at)[tile.run];
        reinterpret_cast<float *>(to + codec.scales_at)[tile.run] = canonical(s);
    }
    if (codec.error == 0) return;
    const u64 at = codec.units_at + tile.unit * UNIT * codec.error;
    const bool cuts = codec.half == SERVER && call.row != 0;
    const u64 base = cuts ? place_in_row(call, codec, tile.run) : run_of(codec, tile.run).base;
    const float *errors = reinterpret_cast<const float *>(call.bytes) + base + tile.first;
    bool found = false;
    for (unsigned i = threadIdx.x; i < (tile.count + UNIT - 1) / UNIT * UNIT; i += THREADS) {
        float c = 0;
        if (i < tile.count) {
            c = canonical(ERRORS ? sum_of_rows(call, errors, i) : kept_at(codec, call.bytes + at, i));
            // An error of a block codec is never loaded as a non-finite number, nor as one that becomes non-finite by
            // rounding. ONEBIT loads non-finite numbers only from a state.
            if ((ERRORS || has_blocks(codec)) && !is_finite(codec.error == 4 ? c : from_bf16(to_bf16(c)))) c = 0, found = true;
        }
        if (codec.error == 4) reinterpret_cast<float *>(to + at)[i] = c;
        else reinterpret_cast<unsigned short *>(to + at)[i] = to_bf16(c);
    }
    // This load is no part of a step, so its flag must not make a commit take a step back.
    if (found) atomicOr(&control.flags, NONFINITE);
}
extern "C" __global__ void __launch_bounds__(THREADS) gc_onebit_state_in(const __grid_constant__ gc_state call) {
    take_in<false>(call);
}
extern "C" __global__ void __launch_bounds__(THREADS) gc_onebit_errors_in(const __grid_constant__ gc_state call) {
    take_in<true>(call);
}

// Writes the errors of one half, a tile per thread block.
extern "C" __global__ void __launch_bounds__(THREADS) gc_onebit_errors_out(const __grid_constant__ gc_state call) {
    const gc_codec &codec = call.half == SERVER ? call.server : call.worker;
    const unsigned char *from = codec.state[codec.control->valid >> codec.half & 1];
    const gc_tile tile = tile_of(codec, blockIdx.x);
    if (tile.run == NO_RUN) return;
    const bool is_raw = tile.unit == NO_UNIT;
    const float s = has_blocks(codec) ? 0 : reinterpret_cast<const float *>(from + codec.scales_at)[tile.run];
    float *errors = reinterpret_cast<float *>(call.bytes) + run_of(codec, tile.run).base + tile.first;
    const unsigned char *units = from + codec.units_at + tile.unit * UNIT * codec.error;
    for (unsigned i = threadIdx.x; i < tile.count; i += THREADS) {
        errors[i] = codec.error == 0 || is_raw ? 0 : canonical(error_of(kept_at(codec, units, i), s));
    }
}

// Writes up to MOST_ADDRESSES consecutive addresses of segments to the codec's table.
enum : unsigned { MOST_ADDRESSES = 448 };
struct gc_addresses {
    const void **table;
    u64 count;
    const void *values[MOST_ADDRESSES];
};
SAME_LAYOUT(gc_addresses)
extern "C" __global__ void __launch_bounds__(THREADS) gc_onebit_addresses(const __grid_constant__ gc_addresses call) {
    for (unsigned k = threadIdx.x; k < call.count; k += THREADS) call.table[k] = call.values[k];
}

#endif
