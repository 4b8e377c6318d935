// Launch after an encode or a reduce: makes scales from the sums of tiles, and the chunks' headers. In one launch, a
// thread block would have to wait for its writes before it signals, which took 1/6 of an encode's time.
#ifndef GRADCODEC_FINISH_CUH
#define GRADCODEC_FINISH_CUH

#include "codec.cuh"

// Returns the scale for the sum of the terms of some elements. One thread calls it.
__device__ __forceinline__ float scale_of(unsigned rule, double sum, u64 elements) {
    if (elements == 0) return 0;
    const double mean = __ddiv_rn(sum, static_cast<double>(elements));
    return canonical(__double2float_rn(rule == RMS ? __dsqrt_rn(mean) : mean));
}
// ---- The end of a run, and of the launch

__device__ __forceinline__ float to_results(float t, unsigned results) {
    if (results == BFLOAT16) return from_bf16(to_bf16(t));
    if (results == FLOAT16) return is_finite(t) ? from_f16(to_f16(t > 65504 ? 65504 : t)) : canonical(t);
    return t;
}

__device__ __forceinline__ float scale_of_run(const gc_codec &codec, double sum, u64 elements, unsigned &found) {
    if (codec.kind == SIGN) return elements != 0;
    float s = scale_of(codec.rule, sum, elements);
    if (codec.half == SERVER) s = to_results(s, codec.results);
    if (!is_finite(s)) {
        found |= NONFINITE;
        if (codec.policy == ZERO) s = 0;
    }
    return s;
}

// Folds the sums of a run's tiles to its scale, a thread block per run. The last thread block writes the headers of the
// chunks and runs the barrier. All loads are issued at once: they are a good part of a small call's time.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gc_onebit_finish(const __grid_constant__ gc_finish call) {
    __shared__ float shared_scale;
    __shared__ unsigned shared_flags;
    const gc_codec &codec = call.codec;
    wait_for_launch_before();
    gc_control &control = *codec.control;
    const unsigned valid = valid_state(codec);
    const unsigned char *from = codec.state[valid];
    unsigned char *to = codec.state[codec.policy == TRANSACTIONAL ? valid ^ 1 : valid];
    const bool serves = codec.half == SERVER;
    const unsigned before = *static_cast<const volatile unsigned *>(&control.found), broken = control.broken;
    const u64 turn = serves ? reinterpret_cast<const u64 *>(from)[TURN_WORD / 2] : 0;
    const Chunks chunks(codec, codec.half, call.dst, call.slot, 0);
    const Barrier barrier(call.slot.peers, call.steps);
    // With a corrupt payload only flags are written to the state. Other thread blocks may add flags, but never CORRUPT.
    const bool corrupt = serves && before & CORRUPT;
    // Each copy of a chunk that goes to all ranks counts.
    const unsigned many = !call.slot.peers ? codec.chunks : chunks.copies == 0 ? 0 : call.slot.peers->world;
    const auto chunk_of = [&](unsigned k) { return serves ? codec.chunk : k; };
    const auto place_of = [&](unsigned k) { return chunks.base(codec, k, k) + (serves ? 0 : k * codec.stride); };
    unsigned found = 0;
    if (codec.n_segments != 0) {
        const unsigned number = blockIdx.x;
        const gc_run run = run_of(codec, number);
        const double sum = fold(codec.partials + run.first_tile, run.tiles);
        if (threadIdx.x == 0) {
            const float s = corrupt ? 0 : scale_of_run(codec, sum, run.elements, found);
            if (!corrupt) {
                reinterpret_cast<float *>(to + codec.scales_at)[number] = s;
                if (codec.scales) codec.scales[number] = s;
            }
            shared_scale = s;
            if (found && codec.n_segments > 1) atomicOr(&control.found, found);
        }
        __syncthreads();
        const gc_run segment = segment_of(codec, number);
#pragma unroll 1
        for (unsigned k = threadIdx.x; k < many; k += THREADS) {
            const bool held = holds(codec, chunk_of(k), segment);
            reinterpret_cast<float *>(place_of(k) + HEADER)[number] = held ? shared_scale : 0;
        }
        if (codec.n_segments > 1 && !is_last(codec.counter, codec.n_segments)) return;
    }
    if (threadIdx.x == 0) {
        if (codec.n_segments > 1) {
            found = atomicExch(&control.found, 0);
        } else {
            found |= before;
            if (before) control.found = 0;
        }
        // A missing payload leaves the state as it was, like a corrupt one, but the flag is NONFINITE.
        if (broken && found & CORRUPT) found = (found & ~static_cast<unsigned>(CORRUPT)) | NONFINITE;
        if (codec.policy == TRANSACTIONAL) {
            if (control.pending >> codec.half & 1) commit(control, false);
            if (!corrupt) control.pending |= 1u << codec.half;
        }
        if (found) set_flags(codec, found);
        shared_flags = corrupt ? found & (CORRUPT | NONFINITE) : found & CORRUPT ? +CORRUPT : found & NONFINITE;
        if (serves && !corrupt) reinterpret_cast<u64 *>(to)[TURN_WORD / 2] = turn + 1;
    }
    __syncthreads();
    // Neighbouring threads write neighbouring words of a chunk's header, and neighbouring padding.
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < many * HEADER_WORDS; i += THREADS) {
        const unsigned k = i / HEADER_WORDS, w = i % HEADER_WORDS, number = chunk_of(k);
        unsigned char *chunk = place_of(k);
        unsigned *words = reinterpret_cast<unsigned *>(chunk);
        words[w] = w == FLAGS_WORD ? shared_flags : w == CHUNK_WORD ? number : codec.header[w];
#pragma unroll 1
        for (u64 at = HEADER / 4 + codec.n_segments + w; at < codec.head / 4; at += HEADER_WORDS) words[at] = 0;
        const u64 begin = number * codec.chunk_bytes, left = begin < codec.bytes ? codec.bytes - begin : 0;
        const u64 end = codec.head + (left < codec.chunk_bytes ? left : codec.chunk_bytes);
#pragma unroll 1
        for (u64 at = end + w; at < codec.stride; at += HEADER_WORDS) chunk[at] = 0;
    }
    if (call.slot.peers && call.steps) barrier.signal_and_wait(&control.broken);
}

#endif
