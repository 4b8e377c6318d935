// What follows an encode or a reduce: scales of the sums of tiles, and the chunks' headers. A launch of its own, for a
// block that has to tell others that it is done waits for all that it has written, which took a sixth of an encode's
// time.
#ifndef GRADCODEC_FINISH_CUH
#define GRADCODEC_FINISH_CUH

#include "codec.cuh"

// The scale of the sum of some elements' terms. By one thread.
__device__ __forceinline__ float scale_of(unsigned rule, double sum, u64 elements) {
    if (elements == 0) return 0;
    const double mean = __ddiv_rn(sum, static_cast<double>(elements));
    return canonical(__double2float_rn(rule == RMS ? __dsqrt_rn(mean) : mean));
}
// ---- The end of a run, and of all

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

// Chunks whose scales are being made. What it needs of memory it loads at once: of a small call this is a good part.
struct Finishing {
    const gc_codec &codec;
    unsigned char *to;        // the state that is written
    unsigned before, broken;  // flags of the launch before, and whether a rank did not come to an exchange
    bool serves, corrupt;     // then nothing but flags is written
    u64 turn;
    Chunks chunks;
    unsigned many;            // of a chunk that goes to all, each copy counts

    __device__ __forceinline__ Finishing(const gc_codec &its, unsigned char *dst, const gc_way &way)
        : codec(its), serves(its.half == SERVER), chunks(its, its.half, dst, way, 0) {
        const gc_control &control = *codec.control;
        const unsigned valid = valid_state(codec);
        const unsigned char *from = codec.state[valid];
        to = codec.state[codec.policy == TRANSACTIONAL ? valid ^ 1 : valid];
        before = *static_cast<const volatile unsigned *>(&control.found), broken = control.broken;
        turn = serves ? reinterpret_cast<const u64 *>(from)[TURN_WORD / 2] : 0;
        many = !way.peers ? codec.chunks : chunks.copies == 0 ? 0 : way.peers->world;
        // Other blocks may add flags, but never this one.
        corrupt = serves && before & CORRUPT;
    }
    __device__ __forceinline__ unsigned chunk_of(unsigned k) const { return serves ? codec.chunk : k; }
    __device__ __forceinline__ unsigned char *place_of(unsigned k) const {
        return chunks.base(codec, k, k) + (serves ? 0 : k * codec.stride);
    }
    // The scale of run number `number`, of the sum of its tiles. By one thread.
    __device__ __forceinline__ float scale(unsigned number, const gc_run &run, double sum, unsigned &found) const {
        const float s = corrupt ? 0 : scale_of_run(codec, sum, run.elements, found);
        if (!corrupt) {
            reinterpret_cast<float *>(to + codec.scales_at)[number] = s;
            if (codec.scales) codec.scales[number] = s;
        }
        return s;
    }
    // To all chunks, by `threads` threads, of which this is number `thread`.
    __device__ __forceinline__ void store_scale(unsigned number, float s, unsigned thread, unsigned threads) const {
        const gc_run segment = segment_of(codec, number);
#pragma unroll 1
        for (unsigned k = thread; k < many; k += threads) {
            const bool held = holds(codec, chunk_of(k), segment);
            reinterpret_cast<float *>(place_of(k) + HEADER)[number] = held ? s : 0;
        }
    }
    __device__ __forceinline__ void begin_next_turn() const {
        reinterpret_cast<u64 *>(to)[TURN_WORD / 2] = turn + 1;
    }
    // What is known of the state, with what all have found. By one thread. Gives the flags of the chunks.
    __device__ __forceinline__ unsigned conclude(unsigned found) const {
        gc_control &control = *codec.control;
        // What did not come was not kept, as what is corrupt, but it is not that.
        if (broken && found & CORRUPT) found = (found & ~static_cast<unsigned>(CORRUPT)) | NONFINITE;
        if (codec.policy == TRANSACTIONAL) {
            if (control.pending >> codec.half & 1) commit(control, false);
            if (!corrupt) control.pending |= 1u << codec.half;
        }
        if (found) tell(codec, found);
        if (serves && !corrupt) begin_next_turn();
        return corrupt ? found & (CORRUPT | NONFINITE) : found & NONFINITE;
    }
    // Of all chunks, and what fills these up. By all threads of a block.
    __device__ __forceinline__ void store_headers(unsigned flags) const {
        // Neighbouring threads have neighbouring words of a chunk's header, and of what is filled up.
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < many * HEADER_WORDS; i += THREADS) {
            const unsigned k = i / HEADER_WORDS, w = i % HEADER_WORDS, number = chunk_of(k);
            unsigned char *chunk = place_of(k);
            unsigned *words = reinterpret_cast<unsigned *>(chunk);
            words[w] = w == FLAGS_WORD ? flags : w == CHUNK_WORD ? number : codec.header[w];
#pragma unroll 1
            for (u64 at = HEADER / 4 + codec.n_segments + w; at < codec.head / 4; at += HEADER_WORDS) words[at] = 0;
            const u64 begin = number * codec.chunk_bytes, left = begin < codec.bytes ? codec.bytes - begin : 0;
            const u64 end = codec.head + (left < codec.chunk_bytes ? left : codec.chunk_bytes);
#pragma unroll 1
            for (u64 at = end + w; at < codec.stride; at += HEADER_WORDS) chunk[at] = 0;
        }
    }
};

#endif
