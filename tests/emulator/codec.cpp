// The codecs' kernels on the CPU: every block, warp and lane of kernels/onebit.cu, against docs/NUMERICS.md as plain
// loops. Needs no GPU, and under AddressSanitizer finds each access outside the operands, which end where their memory
// does.
//
//     g++ -std=c++17 -O1 -ffp-contract=off -Iinclude -fsanitize=address,alignment tests/emulator/codec.cpp
#include "device.h"

#include "../../kernels/onebit.cu"

#include <string>

static u64 random_state = 0x9e3779b97f4a7c15;
static u64 random(u64 below) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return (random_state >> 11) % below;
}

static unsigned cases, wrong;
static void count(bool right, const std::string &what) {
    cases++;
    if (right || wrong++ > 20) return;
    printf("wrong: %s\n", what.c_str());
}

// Bytes at some address beyond a multiple of 128, that end where their memory does.
struct Memory {
    std::unique_ptr<unsigned char, void (*)(void *)> all;
    unsigned char *bytes;
    u64 size;
    static unsigned char *allocate(u64 size) {
        void *memory = nullptr;
        return posix_memalign(&memory, 128, size + !size) ? nullptr : static_cast<unsigned char *>(memory);
    }
    Memory(u64 size, unsigned char fill, u64 offset = 0) : all(allocate(offset + size), free), bytes(all.get() + offset), size(size) {
        memset(all.get(), fill, offset + size);
    }
    template <typename T>
    T &at(u64 offset) { return *reinterpret_cast<T *>(bytes + offset); }
    bool operator==(const Memory &other) const { return size == other.size && memcmp(bytes, other.bytes, size) == 0; }
};
typedef std::vector<unsigned char> Bytes;
template <typename T>
static void put_at(Bytes &bytes, u64 at, T x) { memcpy(&bytes[at], &x, sizeof x); }
template <typename T>
static T get_at(const unsigned char *bytes, u64 at) {
    T x;
    memcpy(&x, bytes + at, sizeof x);
    return x;
}

// ---- Numbers

enum Dtype { F32_ = 0, F16_ = 1, BF16_ = 2, NONE_ = 3 };
static const u64 SIZES[] = {4, 2, 2, 0};

static float nan_pattern(float x) { return x != x ? value_of<float>(0x7fc00000) : x; }
static bool finite(float x) { return std::isfinite(x); }
// Rounded by a search among all patterns of a 16-bit dtype: nothing of the kernels is in it.
static double value16(unsigned pattern, Dtype dtype) {
    if (dtype == BF16_) return value_of<float>(u64(pattern) << 16);
    const int exponent = pattern >> 10 & 31, mantissa = pattern & 1023;
    const double x = exponent == 0 ? std::ldexp(mantissa, -24) : exponent < 31 ? std::ldexp(1024 + mantissa, exponent - 25)
                     : mantissa ? NAN : INFINITY;
    return pattern >> 15 ? -x : x;
}
static unsigned round16(float x, Dtype dtype) {
    const unsigned inf = dtype == F16_ ? 0x7c00 : 0x7f80, sign = std::signbit(x) ? 0x8000 : 0;
    if (x != x) return dtype == F16_ ? 0x7e00 : 0x7fc0;
    const double magnitude = std::fabs(double(x));
    unsigned low = 0, high = inf;  // value(low) <= magnitude < value(high), or magnitude is past all
    while (high - low > 1) (value16((low + high) / 2, dtype) <= magnitude ? low : high) = (low + high) / 2;
    if (std::isinf(x)) return sign | inf;
    // Past the largest, the next step would be as far as the last one.
    const double below = value16(low, dtype), step = low + 1 == inf ? below - value16(low - 1, dtype) : value16(low + 1, dtype) - below;
    const double middle = below + step / 2;
    return sign | (magnitude > middle || (magnitude == middle && low % 2) ? low + 1 : low);
}
static float read(const unsigned char *at, u64 i, Dtype dtype) {
    if (dtype == NONE_) return 0;
    return dtype == F32_ ? get_at<float>(at, 4 * i) : float(value16(get_at<unsigned short>(at, 2 * i), dtype));
}
static float rounded(float x, Dtype dtype) { return dtype == F32_ || dtype == NONE_ ? nan_pattern(x) : float(value16(round16(x, dtype), dtype)); }
static void write(unsigned char *at, u64 i, Dtype dtype, float x) {
    const unsigned pattern = dtype == F32_ ? unsigned(pattern_of(nan_pattern(x))) : round16(x, dtype);
    memcpy(at + i * SIZES[dtype], &pattern, SIZES[dtype]);
}

// ---- docs/NUMERICS.md

static double sum_of_terms(const std::vector<float> &c, unsigned rule) {
    std::vector<double> sums;
    for (u64 first = 0; first < c.size(); first += 1024) {
        float x[1024] = {}, a[256];
        for (u64 i = first; i < first + 1024 && i < c.size(); i++) x[i - first] = rule == RMS ? c[i] * c[i] : std::fabs(c[i]);
        for (unsigned j = 0; j < 256; j++) a[j] = ((x[j] + x[256 + j]) + x[512 + j]) + x[768 + j];
        for (unsigned h = 128; h > 0; h /= 2) {
            for (unsigned j = 0; j < h; j++) a[j] = a[j] + a[j + h];
        }
        sums.push_back(a[0]);
    }
    for (; sums.size() > 1; sums.resize((sums.size() + 1) / 2)) {
        for (u64 i = 0; 2 * i < sums.size(); i++) sums[i] = sums[2 * i] + (2 * i + 1 < sums.size() ? sums[2 * i + 1] : 0);
    }
    return sums.empty() ? 0 : sums[0];
}
static float model_scale(const std::vector<float> &c, unsigned rule) {
    if (c.empty()) return 0;
    const double mean = sum_of_terms(c, rule) / double(c.size());
    return nan_pattern(float(rule == RMS ? std::sqrt(mean) : mean));
}
static float sigma(float x) { return x < 0 ? -1 : 1; }

struct Part { u64 segment, first, elements, byte, unit; };

struct Model {
    unsigned kind, rule, policy, n_chunks, server;
    Dtype values, results, error;
    float beta;
    std::vector<u64> segments;
    std::vector<Part> workers, servers;
    u64 bytes = 0, elements = 0, chunk_bytes, head, stride, state_bytes, units_at[2], scales_at[2];
    Bytes states[2];  // valid halves: states[valid[half]]
    unsigned valid[2] = {}, pending[2] = {}, flags = 0, since = 0;
    unsigned header[16] = {};

    void lay_out() {
        for (u64 count : segments) {
            workers.push_back({workers.size(), 0, count, bytes, 0});
            bytes += (count + 7) / 8, elements += count;
        }
        chunk_bytes = (bytes + n_chunks - 1) / n_chunks;
        const u64 S = segments.size();
        head = (64 + 4 * S + 15) / 16 * 16, stride = head + (chunk_bytes + 15) / 16 * 16;
        for (const Part &run : workers) {
            const u64 begin = std::max(run.byte, u64(server) * chunk_bytes);
            const u64 end = std::min(run.byte + (run.elements + 7) / 8, u64(server + 1) * chunk_bytes);
            Part part = {run.segment, 0, 0, begin, 0};
            if (begin < end) part.first = (begin - run.byte) * 8, part.elements = std::min((end - run.byte) * 8, run.elements) - part.first;
            servers.push_back(part);
        }
        u64 at = (64 + 8 * S + 255) / 256 * 256;
        scales_at[0] = 64, scales_at[1] = 64 + 4 * S;
        for (int half = 0; half < 2; half++) {
            units_at[half] = at;
            u64 unit = 0;
            for (Part &run : half ? servers : workers) run.unit = unit, unit += (run.elements + 1023) / 1024;
            at += unit * 1024 * SIZES[error];
        }
        state_bytes = at;
        const unsigned long long n = elements;
        header[0] = 0x4c504347, header[1] = 1 | kind << 16, header[2] = values | results << 8 | (kind == SIGN ? 0 : rule) << 16;
        header[4] = n_chunks, header[6] = unsigned(S), header[8] = unsigned(n), header[9] = unsigned(n >> 32);
        header[10] = unsigned(chunk_bytes), header[11] = unsigned(chunk_bytes >> 32);
        u64 hash = 0xcbf29ce484222325;
        for (u64 count : segments) for (int k = 0; k < 8; k++) hash = (hash ^ (count >> 8 * k & 255)) * 0x100000001b3;
        header[12] = unsigned(hash), header[13] = unsigned(hash >> 32);
        for (Bytes &state : states) {
            state.assign(state_bytes, 0);
            memcpy(state.data(), header, 64);
            memcpy(state.data(), "GCST", 4);
        }
    }
    bool holds(unsigned chunk, u64 segment) const {
        const Part &run = workers[segment];
        return run.elements && run.byte < (chunk + 1) * chunk_bytes && run.byte + (run.elements + 7) / 8 > chunk * chunk_bytes;
    }
    // Byte number b of the bits.
    u64 place(u64 b) const { return b / chunk_bytes * stride + head + b % chunk_bytes; }

    void commit(bool skip) {
        if (!pending[0] && !pending[1]) {
            since = 0;
            return;
        }
        if (skip || (since & NONFINITE)) flags |= TAKEN_BACK;
        else for (int half = 0; half < 2; half++) valid[half] ^= pending[half];
        pending[0] = pending[1] = since = 0;
    }
    // The state that a step of this half reads, and the one that it writes.
    std::pair<Bytes *, Bytes *> begin(int half) {
        if (policy != TRANSACTIONAL) return {&states[0], &states[0]};
        if (pending[half]) commit(false);
        return {&states[valid[half]], &states[valid[half] ^ 1]};
    }
    void flag(unsigned found) { flags |= found, since |= found; }

    // c^ of a run, kept; its scale.
    std::vector<float> keep(int half, const Part &run, Bytes &to, const std::vector<float> &c, unsigned &found) {
        std::vector<float> kept(c);
        for (u64 i = 0; i < c.size(); i++) {
            kept[i] = rounded(c[i], error);
            if (!finite(kept[i])) {
                found |= NONFINITE;
                if (policy == ZERO) kept[i] = 0;
            }
            if (error != NONE_) write(&to[units_at[half]], run.unit * 1024 + i, error, kept[i]);
        }
        float s = model_scale(kept, rule);
        if (half == SERVER && results != F32_) {
            if (results == F16_ && finite(s) && s > 65504) s = 65504;
            s = rounded(s, results);
        }
        if (kind == SIGN) s = run.elements ? 1 : 0;
        if (!finite(s)) {
            found |= NONFINITE;
            if (policy == ZERO) s = 0;
        }
        put_at(to, scales_at[half] + 4 * run.segment, s);
        return kept;
    }
    std::vector<float> errors(int half, const Part &run, const Bytes &from) const {
        std::vector<float> e(run.elements);
        const float s = get_at<float>(from.data(), scales_at[half] + 4 * run.segment);
        for (u64 i = 0; i < run.elements && error != NONE_; i++) {
            const float c = read(&from[units_at[half]], run.unit * 1024 + i, error);
            e[i] = c - s * sigma(c);
        }
        return e;
    }
    void write_header(unsigned char *chunk, unsigned number, unsigned chunk_flags) const {
        memcpy(chunk, header, 64);
        memcpy(chunk + 20, &number, 4);
        memcpy(chunk + 28, &chunk_flags, 4);
    }

    Bytes encode(const std::vector<const unsigned char *> &g, float m_g, float m_e) {
        const auto [from, to] = begin(WORKER);
        Bytes payload(n_chunks * stride, 0);
        unsigned found = 0;
        for (const Part &run : workers) {
            const std::vector<float> e = errors(WORKER, run, *from);
            std::vector<float> c(run.elements);
            for (u64 i = 0; i < run.elements; i++) {
                float x = read(g[run.segment], i, values);
                if (!finite(x)) {
                    found |= NONFINITE;
                    if (policy == ZERO) x = 0;
                }
                const float product = m_g * x, old = beta * (m_e * e[i]);
                c[i] = error == NONE_ ? product : product + old;
            }
            const std::vector<float> kept = keep(WORKER, run, *to, c, found);
            for (u64 i = 0; i < run.elements; i++) {
                if (!(kept[i] < 0)) payload[place(run.byte + i / 8)] |= 0x80 >> i % 8;
            }
            for (unsigned k = 0; k < n_chunks; k++) {
                if (holds(k, run.segment)) memcpy(&payload[k * stride + 64 + 4 * run.segment], &(*to)[64 + 4 * run.segment], 4);
            }
        }
        for (unsigned k = 0; k < n_chunks; k++) write_header(&payload[k * stride], k, found);
        if (policy == TRANSACTIONAL) pending[WORKER] = 1;
        flag(found);
        return payload;
    }
    bool corrupt(const unsigned char *chunk, unsigned number) const {
        Bytes expected(64);
        const unsigned its = get_at<unsigned>(chunk, 28);
        write_header(expected.data(), number, its);
        if (memcmp(expected.data(), chunk, 64) || (its & ~NONFINITE)) return true;
        for (u64 k = 0; k < segments.size(); k++) {
            const unsigned s = get_at<unsigned>(chunk, 64 + 4 * k);
            if (!holds(number, k) ? s != 0 : kind == SIGN ? s != 0x3f800000 : s >= 0x80000000 && s <= 0xff800000) return true;
        }
        return false;
    }
    std::vector<std::vector<float>> decode(const Bytes &payload, int divisor, float m, Dtype dtype, const std::vector<std::vector<float>> *old,
                                           std::vector<std::vector<bool>> &untouched) {
        std::vector<std::vector<float>> out;
        untouched.clear();
        for (unsigned k = 0; k < n_chunks; k++) {
            const bool bad = corrupt(&payload[k * stride], k);
            flag(bad ? unsigned(CORRUPT) : get_at<unsigned>(&payload[k * stride], 28));
        }
        for (const Part &run : workers) {
            out.emplace_back(run.elements), untouched.emplace_back(run.elements);
            for (u64 i = 0; i < run.elements; i++) {
                const u64 b = run.byte + i / 8, k = b / chunk_bytes;
                if (corrupt(&payload[k * stride], unsigned(k))) {
                    untouched.back()[i] = old != nullptr;
                    continue;
                }
                const float s = get_at<float>(&payload[k * stride], 64 + 4 * run.segment);
                const float v = (s / float(divisor)) * m * (payload[place(b)] & 0x80 >> i % 8 ? 1 : -1);
                const float x = rounded(old ? (*old)[run.segment][i] + v : v, dtype);
                if (!finite(x)) flag(NONFINITE);
                out.back()[i] = nan_pattern(x);
            }
        }
        return out;
    }
    // What the payloads say of a part, without an error.
    std::vector<float> sum(const Bytes &chunks, unsigned payloads, const Part &part, u64 turn, unsigned &found) const {
        std::vector<float> d(part.elements);
        for (u64 i = 0; i < part.elements; i++) {
            const u64 b = part.byte + i / 8, at = head + b - server * chunk_bytes;
            auto bit = [&](u64 r) { return (chunks[r * stride + at] & 0x80 >> i % 8) != 0; };
            if (kind == SIGN) {
                unsigned ones = 0;
                for (unsigned r = 0; r < payloads; r++) ones += bit(r);
                d[i] = 2 * ones == payloads ? (bit((b + turn) % payloads) ? 1 : -1) : 2 * ones > payloads ? 1 : -1;
                continue;
            }
            for (unsigned r = 0; r < payloads; r++) {
                float q = get_at<float>(&chunks[r * stride], 64 + 4 * part.segment) / float(payloads);
                if (!finite(q)) {
                    found |= NONFINITE;
                    if (policy == ZERO) q = 0;
                }
                d[i] = d[i] + (bit(r) ? q : -q);
            }
        }
        return d;
    }
    // Of the valid state.
    u64 turn() const { return get_at<u64>(states[policy == TRANSACTIONAL ? valid[SERVER] : 0].data(), 56); }
    // The shard of all parts, one after the other.
    std::vector<float> mean(const Bytes &chunks, unsigned payloads) {
        std::vector<float> shard;
        unsigned found = 0;
        bool bad = false;
        for (unsigned r = 0; r < payloads; r++) {
            bad |= corrupt(&chunks[r * stride], server);
            found |= get_at<unsigned>(&chunks[r * stride], 28);
        }
        for (const Part &part : servers) {
            for (const float x : sum(chunks, payloads, part, turn(), found)) shard.push_back(bad ? 0 : nan_pattern(x));
        }
        flag(bad ? unsigned(CORRUPT) : found);
        return shard;
    }
    Bytes encode_shard(const std::vector<float> &shard) {
        u64 first = 0;
        return make_chunk(0, [&](const Part &part, unsigned &) {
            first += part.elements;
            return std::vector<float>(shard.begin() + long(first - part.elements), shard.begin() + long(first));
        });
    }
    Bytes reduce(const Bytes &chunks, unsigned payloads) {
        unsigned found = 0;
        for (unsigned r = 0; r < payloads; r++) {
            if (corrupt(&chunks[r * stride], server)) {
                begin(SERVER);
                Bytes out(stride, 0);
                write_header(out.data(), server, CORRUPT);
                flag(CORRUPT);
                return out;
            }
            found |= get_at<unsigned>(&chunks[r * stride], 28);
        }
        return make_chunk(found, [&](const Part &part, unsigned &met) {
            return sum(chunks, payloads, part, turn(), met);
        });
    }
    // The chunk of what `sums` says of each part, and the error.
    template <typename Sums>
    Bytes make_chunk(unsigned found, Sums sums) {
        const auto [from, to] = begin(SERVER);
        Bytes out(stride, 0);
        const u64 next = get_at<u64>(from->data(), 56) + 1;
        for (const Part &part : servers) {
            const std::vector<float> e = errors(SERVER, part, *from);
            std::vector<float> d = sums(part, found);
            for (u64 i = 0; i < part.elements && error != NONE_; i++) d[i] = d[i] + beta * e[i];
            const std::vector<float> kept = keep(SERVER, part, *to, d, found);
            for (u64 i = 0; i < part.elements; i++) {
                if (!(kept[i] < 0)) out[head + part.byte - server * chunk_bytes + i / 8] |= 0x80 >> i % 8;
            }
            memcpy(&out[64 + 4 * part.segment], &(*to)[scales_at[1] + 4 * part.segment], 4);
        }
        put_at(*to, 56, next);
        write_header(out.data(), server, found);
        if (policy == TRANSACTIONAL) pending[SERVER] = 1;
        flag(found);
        return out;
    }
};

// ---- The same on the device: the tables that the library makes (src/backend/cuda/codec/), and its launches.

struct Device {
    const Model &model;
    Memory state0, state1, control, partials[2], counter, scales, addresses;
    std::vector<gc_tile> tiles[2];
    std::vector<gc_run> runs[2];
    std::vector<const void *> table;
    gc_codec codecs[2];
    gc_peers peers;
    std::vector<Memory> copies;

    Device(const Model &m)
        : model(m), state0(m.state_bytes, 0), state1(m.state_bytes, 0), control(sizeof(gc_control), 0xa5),
          partials{Memory(8 * 600, 0xa5), Memory(8 * 600, 0xa5)}, counter(4, 0),
          scales(4 * m.segments.size(), 0xa5), addresses(8 * m.segments.size(), 0xa5) {
        for (int half = 0; half < 2; half++) {
            u64 base = 0;
            for (const Part &run : half ? m.servers : m.workers) {
                const u64 n = run.elements, many = n ? (n + TILE - 1) / TILE : 1;
                runs[half].push_back({n, run.byte, base, tiles[half].size(), unsigned(many), 0});
                base += n;
                for (u64 k = 0; k < many; k++) {
                    const u64 b = run.byte + k * TILE / 8, chunk = m.chunk_bytes ? b / m.chunk_bytes : 0;
                    gc_tile tile = {k * TILE, run.unit + k * WARPS, 0, b, unsigned(run.segment), unsigned(std::min<u64>(n - k * TILE, TILE)), ~0u, unsigned(chunk)};
                    if (half) {
                        tile.to = m.head + b - m.server * m.chunk_bytes, tile.chunk = m.server;
                    } else {
                        tile.to = chunk * m.stride + m.head + b - chunk * m.chunk_bytes;
                        tile.left = unsigned((chunk + 1) * m.chunk_bytes - b);
                    }
                    tiles[half].push_back(tile);
                }
            }
            if (tiles[half].empty()) tiles[half].push_back({0, 0, 0, 0, NO_RUN, 0, ~0u, 0});
        }
        for (int half = 0; half < 2; half++) {
            gc_codec &c = codecs[half];
            memset(&c, 0, sizeof c);
            c.state[0] = state0.bytes, c.state[1] = m.policy == TRANSACTIONAL ? state1.bytes : state0.bytes;
            c.control = &control.at<gc_control>(0);
            c.partials = &partials[half].at<double>(0), c.counter = &counter.at<unsigned>(0);
            c.tiles = tiles[half].data(), c.runs = runs[half].data(), c.segments = runs[0].data();
            c.scales = half ? nullptr : &scales.at<float>(0);
            c.bytes = m.bytes, c.chunk_bytes = m.chunk_bytes, c.head = m.head, c.stride = m.stride;
            c.scales_at = m.scales_at[half], c.units_at = m.units_at[half];
            c.n_segments = unsigned(m.segments.size()), c.n_chunks = m.n_chunks;
            c.chunk = half ? m.server : 0, c.chunks = half ? 1 : m.n_chunks;
            c.kind = m.kind, c.rule = m.rule, c.policy = m.policy, c.results = m.results, c.half = unsigned(half);
            c.beta = m.beta, c.error = unsigned(SIZES[m.error]);
            memcpy(c.header, m.header, 64);
            // With one segment the tables are not looked at.
            if (runs[half].size() == 1) c.only = runs[half][0];
            c.reciprocal = m.chunk_bytes ? ~0ull / m.chunk_bytes : 0;
        }
        gc_state call = state_call();
        launch(1, THREADS, [&] { gc_onebit_reset(call); });
    }
    gc_state state_call() const {
        gc_state call = {};
        call.worker = codecs[0], call.server = codecs[1], call.size = model.state_bytes;
        return call;
    }
    // Half of the time through the table.
    void set_values(const void *(&inline_values)[MOST_VALUES], gc_codec &codec, const std::vector<const unsigned char *> &values) {
        codec.addresses = nullptr;
        if (values.size() > MOST_VALUES || random(2)) {
            codec.addresses = &addresses.at<const void *>(0);
            gc_addresses call = {};
            call.table = codec.addresses, call.count = values.size();
            for (u64 k = 0; k < values.size(); k++) call.values[k] = values[k];
            launch(1, THREADS, [&] { gc_onebit_addresses(call); });
        } else {
            for (u64 k = 0; k < values.size(); k++) inline_values[k] = values[k];
        }
    }
    void encode(const std::vector<const unsigned char *> &values, const float *m_g, const float *m_e, unsigned char *payload) {
        gc_encode call = {};
        call.codec = codecs[0], call.m_g = m_g, call.m_e = m_e;
        send(codecs[0], payload, call.dst, call.way);
        set_values(call.values, call.codec, values);
        void (*kernels[3][4])(gc_encode) = {
            {gc_onebit_encode_f32_f32, nullptr, gc_onebit_encode_f32_bf16, gc_onebit_encode_f32},
            {gc_onebit_encode_16_f32, nullptr, gc_onebit_encode_16_bf16, gc_onebit_encode_16},
            {gc_onebit_encode_16_f32, nullptr, gc_onebit_encode_16_bf16, gc_onebit_encode_16}};
        launch(tiles[0].size(), THREADS, [&] { kernels[model.values][model.error](call); });
        finish(call.codec, call.dst, call.way);
    }
    void encode_shard(const unsigned char *shard, unsigned char *dst) {
        gc_encode call = {};
        call.codec = codecs[1];
        send(codecs[1], dst, call.dst, call.way);
        std::vector<const unsigned char *> parts;
        for (const gc_run &run : runs[1]) parts.push_back(shard + 4 * run.base);
        set_values(call.values, call.codec, parts);
        void (*kernels[4])(gc_encode) = {gc_onebit_encode_f32_f32, nullptr, gc_onebit_encode_f32_bf16,
                                         gc_onebit_encode_f32};
        launch(tiles[1].size(), THREADS, [&] { kernels[model.error](call); });
        finish(call.codec, call.dst, call.way);
    }
    void mean(const unsigned char *chunks, u64 payloads, unsigned char *shard) {
        gc_reduce call = {};
        call.codec = codecs[1], call.chunks = chunks, call.dst = shard;
        call.payloads = payloads, call.apart = call.codec.stride;
        launch(tiles[1].size(), THREADS, [&] { gc_onebit_mean(call); });
    }
    void decode(const unsigned char *payload, int divisor, const float *factor, Dtype dtype, bool add, const std::vector<const unsigned char *> &values) {
        gc_decode call = {};
        call.codec = codecs[0], call.payload = payload, call.factor = factor, call.divisor = float(divisor), call.dtype = dtype;
        set_values(reinterpret_cast<const void *(&)[MOST_VALUES]>(call.values), call.codec, values);
        call.tiles = tiles[0].size();
        call.first_empty = model.chunk_bytes ? (model.bytes + model.chunk_bytes - 1) / model.chunk_bytes : 0;
        launch(call.tiles + model.n_chunks - call.first_empty, THREADS,
               [&] { add ? gc_onebit_decode_add(call) : dtype == F32_ ? gc_onebit_decode_u32(call) : gc_onebit_decode_u16(call); });
    }
    void reduce(const unsigned char *chunks, u64 payloads, unsigned char *dst) {
        gc_reduce call = {};
        call.codec = codecs[1], call.chunks = chunks, call.payloads = payloads, call.apart = call.codec.stride;
        send(codecs[1], dst, call.dst, call.way);
        void (*kernels[4])(gc_reduce) = {gc_onebit_reduce_f32, nullptr, gc_onebit_reduce_bf16, gc_onebit_reduce};
        launch(tiles[1].size(), THREADS, [&] { kernels[model.error](call); });
        finish(call.codec, call.dst, call.way);
    }
    // Sends chunks one behind the other, or to ranks: each to the buffer of one, or the same to all. What the ranks got is in
    // the same place afterwards: `finish` looks that it is the same.
    void send(const gc_codec &codec, unsigned char *place, unsigned char *&dst, gc_way &way) {
        dst = place, way = {};
        if (codec.chunks > MOST_RANKS || random(2)) return;
        dst = nullptr, way = {&peers, 48};
        peers = {};
        peers.world = codec.half == WORKER ? codec.chunks : 1 + static_cast<unsigned>(random(3));
        copies.clear();
        for (unsigned k = 0; k < peers.world; k++) {
            if (k != 0 && codec.half == SERVER) copies.emplace_back(codec.stride, 0x5a);
            unsigned char *block = codec.half == WORKER ? place + k * codec.stride : k == 0 ? place : copies[k - 1].bytes;
            peers.buffers[k] = block - way.at;
        }
    }
    void finish(const gc_codec &codec, unsigned char *dst, const gc_way &way) {
        const gc_finish call = {codec, dst, way, 0, 0};
        launch(std::max<u64>(model.segments.size(), 1), THREADS, [&] { gc_onebit_finish(call); });
        for (unsigned k = 1; way.peers && codec.half == SERVER && k < peers.world; k++) {
            count(memcmp(peers.buffers[0] + way.at, peers.buffers[k] + way.at, codec.stride) == 0, "a chunk that went to all ranks");
        }
    }
    void commit(unsigned kind, const void *skip) {
        gc_state call = state_call();
        call.skip = skip, call.skip_kind = kind;
        launch(1, THREADS, [&] { gc_onebit_commit(call); });
    }
};

static u64 some_count() {
    static const u64 counts[] = {0, 1, 7, 8, 31, 1023, 1024, 1025, 8191, 8192, 8193, 16384, 20000};
    return random(3) ? counts[random(13)] : random(20000);
}
static float some_number(bool hostile) {
    static const float borders[] = {0, -0.0f, 1e-45f, -1e-45f, 6e17f, -6e17f};
    static const float worse[] = {1.9e19f, -1.9e19f, INFINITY, -INFINITY, NAN, -NAN, 3.4e38f, -3.4e38f};
    if (hostile && random(3000) == 0) return worse[random(8)];
    if (random(hostile ? 50 : 20) == 0) return borders[random(hostile ? 6 : 4)];
    return float((double(random(1 << 24)) / (1 << 23) - 1) * std::ldexp(1, int(random(8))));
}

static void handle_matches(unsigned rounds) {
    for (unsigned round = 0; round < rounds; round++) {
        Model m;
        m.kind = random(4) ? ONEBIT : SIGN, m.rule = unsigned(random(2)), m.policy = unsigned(random(3));
        m.values = Dtype(random(3)), m.results = Dtype(random(3));
        m.error = m.kind == SIGN ? NONE_ : random(4) == 0 ? NONE_ : random(2) ? F32_ : BF16_;
        m.beta = random(2) ? 1 : 0.75f, m.n_chunks = unsigned(random(3) ? 1 + random(5) : 1 + random(40));
        m.server = unsigned(random(m.n_chunks));
        for (u64 n = random(20) ? random(3) ? 1 + random(9) : 1 : random(2) * 20; n > 0; n--) {
            const u64 count = some_count();
            m.segments.push_back(m.segments.size() > 3 && count > 3000 ? count % 3000 : count);
        }
        m.lay_out();
        Device device(m);
        const std::string what = "round " + std::to_string(round) + ", kind " + std::to_string(m.kind) + ", values " + std::to_string(m.values)
                                 + ", error " + std::to_string(m.error) + ", policy " + std::to_string(m.policy) + ", "
                                 + std::to_string(m.segments.size()) + " segments, " + std::to_string(m.n_chunks) + " chunks";
        const bool hostile = random(2);
        auto states_are_equal = [&](const char *after) {
            bool right = true;
            for (int k = 0; k < (m.policy == TRANSACTIONAL ? 2 : 1); k++) {
                // What is not valid may be anything.
                for (int half = 0; half < 2; half++) {
                    if (m.policy == TRANSACTIONAL && m.valid[half] != unsigned(k) && !m.pending[half]) continue;
                    const u64 begin = m.units_at[half], end = half ? m.state_bytes : m.units_at[1];
                    const u64 S = 4 * m.segments.size();
                    const unsigned char *ours = (k ? device.state1 : device.state0).bytes;
                    right &= !memcmp(ours + begin, &m.states[k][begin], end - begin);
                    right &= !memcmp(ours + m.scales_at[half], &m.states[k][m.scales_at[half]], S);
                    if (half) right &= !memcmp(ours + 56, &m.states[k][56], 8);
                    right &= !memcmp(ours, m.states[k].data(), 56);
                }
            }
            const gc_control &control = device.control.at<gc_control>(0);
            count(right, std::string(after) + ": state; " + what);
            count(control.flags == m.flags && control.since == m.since && control.found == 0, std::string(after) + ": flags; " + what);
            if (m.policy == TRANSACTIONAL) {
                count(control.valid == (m.valid[0] | m.valid[1] << 1) && control.pending == (m.pending[0] | m.pending[1] << 1),
                      std::string(after) + ": valid and pending; " + what);
            }
        };
        states_are_equal("reset");
        std::vector<Bytes> payloads;
        for (unsigned step = 0; step < 4; step++) {
            std::vector<Memory> values;
            std::vector<const unsigned char *> addresses;
            for (u64 n : m.segments) {
                values.emplace_back(n * SIZES[m.values], 0, (random(2) ? random(17) : 0) * SIZES[m.values]);
                for (u64 i = 0; i < n; i++) write(values.back().bytes, i, m.values, some_number(hostile));
                addresses.push_back(values.back().bytes);
            }
            float m_g = random(3) ? 1 : 0.5f, m_e = random(3) ? 1 : 3;
            const Bytes expected = m.encode(addresses, m_g, m_e);
            Memory payload(expected.size(), 0xa5);
            device.encode(addresses, m_g == 1 && random(2) ? nullptr : &m_g, m_e == 1 && random(2) ? nullptr : &m_e, payload.bytes);
            count(!memcmp(payload.bytes, expected.data(), expected.size()), "encode: payload; " + what);
            states_are_equal("encode");
            payloads.push_back(expected);

            Bytes heard = expected;
            if (random(3) == 0) {
                const u64 k = random(m.n_chunks), at = random(64 + 4 * m.segments.size());
                heard[k * m.stride + at] ^= 1 << random(8);
            }
            const bool add = random(3) == 0;
            const Dtype dtype = add ? F32_ : Dtype(random(3));
            std::vector<Memory> decoded;
            std::vector<const unsigned char *> places;
            std::vector<std::vector<float>> old;
            for (u64 n : m.segments) {
                decoded.emplace_back(n * SIZES[dtype], 0xa5, (random(2) ? random(17) : 0) * SIZES[dtype]);
                places.push_back(decoded.back().bytes);
                old.emplace_back(n);
                for (float &x : old.back()) x = some_number(false);
                if (add) memcpy(decoded.back().bytes, old.back().data(), n * 4);
            }
            const int divisor = int(1 + random(3));
            float factor = random(2) ? 1 : -0.3f;
            std::vector<std::vector<bool>> untouched;
            const auto results = m.decode(heard, divisor, factor, dtype, add ? &old : nullptr, untouched);
            Memory received(heard.size(), 0);
            memcpy(received.bytes, heard.data(), heard.size());
            device.decode(received.bytes, divisor, factor == 1 && random(2) ? nullptr : &factor, dtype, add, places);
            bool right = true;
            for (u64 k = 0; k < m.segments.size(); k++) {
                for (u64 i = 0; i < m.segments[k]; i++) {
                    unsigned char expected_bytes[4];
                    write(expected_bytes, 0, dtype, untouched[k][i] ? old[k][i] : results[k][i]);
                    right &= !memcmp(places[k] + i * SIZES[dtype], expected_bytes, SIZES[dtype]);
                }
            }
            count(right, "decode to " + std::to_string(dtype) + (add ? ", added; " : "; ") + what);
            states_are_equal("decode");

            const unsigned many = unsigned(1 + random(random(4) ? 9 : 40));
            Bytes chunks;
            for (unsigned r = 0; r < many; r++) {
                const Bytes &from = payloads[random(payloads.size())];
                chunks.insert(chunks.end(), &from[m.server * m.stride], &from[m.server * m.stride] + m.stride);
            }
            // Bits that fill up a byte may be anything, and scales not finite, or so small that what is kept of them in
            // bfloat16 is 0 or -0.
            for (const Part &run : m.workers) {
                const u64 b = run.byte + run.elements / 8, in_chunk = b - m.server * m.chunk_bytes;
                if (run.elements % 8 == 0 || b < m.server * m.chunk_bytes || in_chunk >= m.chunk_bytes) continue;
                for (unsigned r = 0; r < many; r++) chunks[r * m.stride + m.head + in_chunk] |= 0xff >> run.elements % 8;
            }
            for (u64 k = 0; m.kind == ONEBIT && k < m.segments.size(); k++) {
                if (random(8) || !m.holds(m.server, k)) continue;
                const float bad = random(2) ? INFINITY : NAN;
                if (random(2)) put_at(chunks, random(many) * m.stride + 64 + 4 * k, bad);
                else for (unsigned r = 0; r < many; r++) put_at(chunks, r * m.stride + 64 + 4 * k, 1e-41f);
            }
            if (random(6) == 0) chunks[random(many) * m.stride + random(64 + 4 * m.segments.size())] ^= 1 << random(8);
            Memory src(chunks.size(), 0), dst(m.stride, 0xa5);
            memcpy(src.bytes, chunks.data(), chunks.size());
            if (random(2)) {
                const std::vector<float> mean = m.mean(chunks, many);
                // At any float32: vectors if it is aligned to 16, elements otherwise.
                const u64 off = random(2) ? 4 * random(4) : 0;
                Memory shard(4 * mean.size(), 0xa5, off);
                device.mean(src.bytes, many, shard.bytes);
                bool before = true;
                for (u64 k = 0; k < off; k++) before &= shard.all.get()[k] == 0xa5;
                const bool right = before && !memcmp(shard.bytes, mean.data(), shard.size);
                count(right, "mean of " + std::to_string(many) + "; " + what);
                states_are_equal("mean");
                // What was made of it since.
                std::vector<float> changed(mean);
                for (float &x : changed) x = random(3) ? x * -0.1f : some_number(hostile);
                memcpy(shard.bytes, changed.data(), shard.size);
                const Bytes of_shard = m.encode_shard(changed);
                Memory chunk(m.stride, 0xa5);
                device.encode_shard(shard.bytes, chunk.bytes);
                count(!memcmp(chunk.bytes, of_shard.data(), of_shard.size()), "chunk of a shard; " + what);
                states_are_equal("chunk of a shard");
            }
            const Bytes reduced = m.reduce(chunks, many);
            device.reduce(src.bytes, many, dst.bytes);
            count(!memcmp(dst.bytes, reduced.data(), reduced.size()), "reduce of " + std::to_string(many) + "; " + what);
            states_are_equal("reduce");

            if (m.policy == TRANSACTIONAL && random(2)) {
                float skip = random(2) ? 0 : random(2) ? NAN : 2;
                const unsigned kind = unsigned(random(5));
                const int whole = skip == skip ? int(skip) : 0;
                m.commit(kind == 1 || (kind == 4 && skip != 0) || (kind == 3 && whole) || (kind == 2 && (whole & 255)));
                device.commit(kind, kind == 4 ? static_cast<const void *>(&skip) : &whole);
                states_are_equal("commit");
                // What is met without a step, as by a decode, takes no later one back.
                gc_control &control = device.control.at<gc_control>(0);
                control.flags |= NONFINITE, control.since |= NONFINITE;
                m.flag(NONFINITE);
                m.commit(false);
                device.commit(0, nullptr);
                states_are_equal("commit of no step");
            }
        }
        // The state, out and into another handle.
        Memory bytes(m.state_bytes, 0xa5), again(m.state_bytes, 0xa5);
        gc_state call = device.state_call();
        call.bytes = bytes.bytes;
        const u64 blocks = (m.state_bytes / 4 + THREADS - 1) / THREADS;
        launch(blocks, THREADS, [&] { gc_onebit_state_out(call); });
        bool right = true;
        for (int half = 0; half < 2; half++) {
            const Bytes &valid = m.states[m.policy == TRANSACTIONAL ? m.valid[half] : 0];
            const u64 begin = m.units_at[half], end = half ? m.state_bytes : m.units_at[1];
            right &= !memcmp(bytes.bytes + begin, &valid[begin], end - begin);
            right &= !memcmp(bytes.bytes + m.scales_at[half], &valid[m.scales_at[half]], 4 * m.segments.size());
            if (half) right &= !memcmp(bytes.bytes + 56, &valid[56], 8);
        }
        count(right, "state_out; " + what);
        Device other(m);
        auto take_in = [&] {
            call = other.state_call();
            call.bytes = bytes.bytes;
            launch(1, THREADS, [&] { gc_onebit_check_state(call); });
            for (unsigned half = 0; half < 2; half++) {
                call.half = half;
                launch(other.tiles[half].size(), THREADS, [&] { gc_onebit_state_in(call); });
            }
            call.bytes = again.bytes;
            launch(blocks, THREADS, [&] { gc_onebit_state_out(call); });
        };
        bytes.bytes[random(56)] ^= 4;
        take_in();
        count(!(again == bytes) && other.control.at<gc_control>(0).flags == CORRUPT, "state_in of another's; " + what);
        memcpy(bytes.bytes, m.states[0].data(), 56);
        other.control.at<gc_control>(0).flags = 0;
        take_in();
        count(again == bytes && other.control.at<gc_control>(0).flags == 0, "state_in; " + what);
        // Errors, out and in.
        for (int half = 0; half < 2; half++) {
            u64 n = 0;
            for (const Part &run : half ? m.servers : m.workers) n += run.elements;
            Memory errors(n * 4, 0xa5);
            call = device.state_call();
            call.half = unsigned(half), call.bytes = errors.bytes;
            launch(device.tiles[half].size(), THREADS, [&] { gc_onebit_errors_out(call); });
            right = true;
            Bytes expected(m.state_bytes);
            for (const Part &run : half ? m.servers : m.workers) {
                const Bytes &valid = m.states[m.policy == TRANSACTIONAL ? m.valid[half] : 0];
                const std::vector<float> e = m.errors(half, run, valid);
                for (u64 i = 0; i < e.size(); i++) {
                    const u64 at = device.runs[half][run.segment].base + i;
                    unsigned char pattern[4];
                    write(pattern, 0, F32_, e[i]);
                    right &= !memcmp(errors.bytes + 4 * at, pattern, 4);
                    if (m.error != NONE_) write(&expected[m.units_at[half]], run.unit * 1024 + i, m.error, e[i]);
                }
            }
            count(right, "errors_out; " + what);
            call = other.state_call();
            call.half = unsigned(half), call.bytes = errors.bytes;
            launch(other.tiles[half].size(), THREADS, [&] { gc_onebit_errors_in(call); });
            const u64 begin = m.units_at[half], end = half ? m.state_bytes : m.units_at[1];
            right = !memcmp(other.state0.bytes + begin, &expected[begin], end - begin);
            right &= !memcmp(other.state0.bytes + m.scales_at[half], &Bytes(4 * m.segments.size() + 1)[0], 4 * m.segments.size());
            count(right, "errors_in; " + what);
        }
    }
}

// `g_off`, `e_off`: how many elements beyond a cache line gradient and error begin.
static void plain_form_matches(Dtype values, Dtype error, u64 n, u64 g_off, u64 e_off) {
    const unsigned rule = unsigned(random(2));
    const bool hostile = random(2);
    Memory grad(n * SIZES[values], 0, g_off * SIZES[values]);
    Memory errors(n * SIZES[error], 0xa5, e_off * SIZES[error]);
    std::vector<float> c(n);
    for (u64 i = 0; i < n; i++) {
        write(grad.bytes, i, values, some_number(hostile));
        if (error != NONE_) write(errors.bytes, i, error, some_number(false));
        c[i] = read(grad.bytes, i, values) + read(errors.bytes, i, error);
    }
    const u64 bytes = (n + 7) / 8 + random(40), tiles = (n + TILE - 1) / TILE;
    Memory dst(bytes, 0xa5, random(20)), workspace(8 * tiles, 0xa5), scale(4, 0xa5);
    Bytes bits(bytes), expected(n * SIZES[error] + 1);
    memcpy(expected.data(), errors.bytes, n * SIZES[error]);
    const float s = model_scale(c, rule);
    for (u64 i = 0; i < n; i++) {
        if (!(c[i] < 0)) bits[i / 8] |= 0x80 >> i % 8;
        if (finite(s) && error != NONE_) write(expected.data(), i, error, c[i] - s * sigma(c[i]));
    }
    gc_compress call = {grad.bytes, errors.bytes, dst.bytes, &scale.at<float>(0), &workspace.at<double>(0), n, bytes, rule,
                        unsigned(values)};
    void (*first[3][4])(gc_compress) = {
        {gc_onebit_compress_f32_f32, nullptr, gc_onebit_compress_f32_bf16, gc_onebit_compress_f32},
        {gc_onebit_compress_16_f32, nullptr, gc_onebit_compress_16_bf16, gc_onebit_compress_16},
        {gc_onebit_compress_16_f32, nullptr, gc_onebit_compress_16_bf16, gc_onebit_compress_16}};
    void (*second[3][3])(gc_compress) = {
        {gc_onebit_compress_errors_f32_f32, nullptr, gc_onebit_compress_errors_f32_bf16},
        {gc_onebit_compress_errors_16_f32, nullptr, gc_onebit_compress_errors_16_bf16},
        {gc_onebit_compress_errors_16_f32, nullptr, gc_onebit_compress_errors_16_bf16}};
    launch(tiles, THREADS, [&] { first[values][error](call); });
    launch(1, THREADS, [&] { gc_onebit_compress_scale(call); });
    if (error != NONE_) launch(tiles, THREADS, [&] { second[values][error](call); });
    const std::string what = std::to_string(n) + " elements of " + std::to_string(values) + ", errors "
                             + std::to_string(error) + ", off by " + std::to_string(g_off) + " and "
                             + std::to_string(e_off);
    count(!memcmp(dst.bytes, bits.data(), bytes), "compress: bits of " + what);
    count(!memcmp(scale.bytes, &s, 4), "compress: scale of " + what);
    count(!memcmp(errors.bytes, expected.data(), n * SIZES[error]), "compress: errors of " + what);
    bool before = true;
    for (u64 k = 0; k < e_off * SIZES[error]; k++) before &= errors.all.get()[k] == 0xa5;
    count(before, "compress: before errors of " + what);
}

static void plain_forms_match(unsigned rounds) {
    for (unsigned round = 0; round < rounds; round++) {
        const Dtype values = Dtype(random(3)), error = random(4) == 0 ? NONE_ : random(2) ? F32_ : BF16_;
        const u64 n = random(4) ? some_count() : 8192 * 520 * (random(40) == 0);
        plain_form_matches(values, error, n, random(2) ? random(17) : 0, random(2) ? random(17) : 0);
    }
    // Every address, of either and of both; no whole vector, ends in the first and in a later tile.
    for (const u64 n : {3, 8192, 8192 + 1029}) {
        for (const Dtype values : {F32_, F16_, BF16_}) {
            for (const Dtype error : {F32_, BF16_, NONE_}) {
                for (u64 off = 1; off < 8; off++) {
                    plain_form_matches(values, error, n, off, 0);
                    if (error == NONE_) continue;
                    plain_form_matches(values, error, n, 0, off);
                    plain_form_matches(values, error, n, off, off);
                }
            }
        }
    }
}

// Decoding to every address: v = fl(fl(s / divisor) m) sigma, by docs/NUMERICS.md. Of one chunk, and of several, whose
// borders are in the middle of vectors then.
static void decoding_to_any_address_matches() {
    for (const u64 n : {5, 8192, 2 * 8192 + 11}) {
        for (const unsigned n_chunks : {1, 3}) {
            Model m;
            m.kind = ONEBIT, m.rule = RMS, m.policy = PROPAGATE, m.values = F32_, m.results = F32_, m.error = NONE_;
            m.beta = 1, m.n_chunks = n_chunks, m.server = 0, m.segments = {n};
            m.lay_out();
            Device device(m);
            Memory payload(m.n_chunks * m.stride, 0), gradient(4 * n, 0);
            std::vector<float> c(n);
            for (u64 i = 0; i < n; i++) gradient.at<float>(4 * i) = c[i] = some_number(false);
            device.encode({gradient.bytes}, nullptr, nullptr, payload.bytes);
            const float s = model_scale(c, RMS), factor = -0.3f, v = (s / 3) * factor;
            for (unsigned kind = 0; kind < 4; kind++) {
                const Dtype dtype = kind == 3 ? F32_ : Dtype(kind);
                const bool add = kind == 3;
                for (u64 off = 0; off < 16 / SIZES[dtype]; off++) {
                    Memory to(n * SIZES[dtype], 0xa5, off * SIZES[dtype]);
                    std::vector<float> old(n);
                    for (u64 i = 0; i < n && add; i++) to.at<float>(4 * i) = old[i] = some_number(false);
                    device.decode(payload.bytes, 3, &factor, dtype, add, {to.bytes});
                    bool right = true;
                    for (u64 i = 0; i < n; i++) {
                        unsigned char expected[4];
                        write(expected, 0, dtype, add ? old[i] + v * sigma(c[i]) : v * sigma(c[i]));
                        right &= !memcmp(to.bytes + i * SIZES[dtype], expected, SIZES[dtype]);
                    }
                    for (u64 k = 0; k < off * SIZES[dtype]; k++) right &= to.all.get()[k] == 0xa5;
                    count(right, "decode of " + std::to_string(n) + " elements in " + std::to_string(n_chunks)
                                     + " chunks to " + std::to_string(dtype) + (add ? ", added" : "") + ", off by "
                                     + std::to_string(off));
                }
            }
        }
    }
}

// Every float16, and what lies between two: the conversions that are not a GPU's instruction.
static void conversions_match() {
    bool right = true;
    for (unsigned pattern = 0; pattern < 0x10000; pattern++) {
        const float x = from_f16(static_cast<unsigned short>(pattern));
        right &= pattern_of(nan_pattern(x)) == pattern_of(nan_pattern(float(value16(pattern, F16_))));
        for (u64 k = 0; k < 4; k++) {
            const float y = value_of<float>(pattern_of(x) + random(0x4000) * (k & 1) + 0x1000 * (k >> 1));
            right &= to_f16(y) == round16(y, F16_);
            const float z = value_of<float>(u64(pattern) << 16 | (k & 1 ? random(0x10000) : 0x8000 * (k >> 1)));
            right &= to_bf16(z) == round16(z, BF16_);
        }
    }
    count(right, "conversions");
}

// What is in device.cuh for kernels of users' own.
template <unsigned N>
static void bits_of_lanes_match() {
    for (u64 n : {1, 7, 8, 9, 64, 511, 512, 513, 1029}) {
        for (unsigned order = 0; order < 2; order++) {
            std::vector<bool> set(n);
            for (u64 k = 0; k < n; k++) set[k] = random(2);
            Memory bits((n + 7) / 8, 0xa5, 3);
            launch((n + 64 * N - 1) / (64 * N), 64, [&] {
                const u64 i = thread_number() * N;
                unsigned field = 0;
                for (unsigned m = 0; m < N; m++) field |= unsigned(i + m < n ? bool(set[i + m]) : true) << m;
                gradcodec::store_bits<N>(bits.bytes, i, n, field, order);
            });
            bool right = true, signs_right = true;
            for (u64 k = 0; k < (n + 7) / 8 * 8; k++) {
                const unsigned bit = bits.bytes[k / 8] >> (order ? k % 8 : 7 - k % 8) & 1;
                right &= bit == (k < n && set[k]);
                float sign[1];
                gradcodec::load_signs<1>(bits.bytes, k, order, 2.5f, sign);
                signs_right &= sign[0] == (k < n && set[k] ? 2.5f : -2.5f);
            }
            count(right, "store_bits of " + std::to_string(N) + " a lane, " + std::to_string(n) + " elements");
            count(signs_right, "load_signs of " + std::to_string(n) + " elements");
        }
    }
}

template <unsigned N>
static void sums_of_lanes_match() {
    std::vector<float> c(1024);
    for (float &x : c) x = some_number(false);
    bool right = true;
    const double expected = sum_of_terms(c, MEAN);
    launch(1, 32, [&] {
        const unsigned lane = threadIdx.x;
        gradcodec::UnitSum<N> sum;
        for (unsigned k = 0; k < 32 / N; k++) {
            for (unsigned m = 0; m < N; m++) sum.add(k, m, std::fabs(c[(k * 32 + lane) * N + m]));
        }
        right &= sum.of_warp(lane) == expected;
    });
    count(right, "UnitSum<" + std::to_string(N) + ">");
}

// The tree of docs/NUMERICS.md, section 2, over all partials of a run: neighbours are added, an absent one is +0. Runs of
// more than 1024 are folded by sixteen rounds a lane. Another order of additions may give the same sum, but not of eight.
static void sums_of_partials_are_trees() {
    for (const u64 n : {1, 2, 63, 64, 65, 127, 129, 1000, 1024, 1025, 1500, 2048, 3000, 70000}) {
        bool right = true;
        for (unsigned draw = 0; draw < 8; draw++) {
            Memory partials(8 * n, 0);
            std::vector<double> tree(n);
            for (u64 k = 0; k < n; k++) {
                tree[k] = (double(random(1ull << 53)) - std::exp2(52)) * std::exp2(double(random(20)));
                partials.at<double>(8 * k) = tree[k];
            }
            while (tree.size() > 1) {
                for (u64 k = 0; 2 * k < tree.size(); k++) {
                    tree[k] = tree[2 * k] + (2 * k + 1 < tree.size() ? tree[2 * k + 1] : 0);
                }
                tree.resize((tree.size() + 1) / 2);
            }
            launch(1, THREADS, [&] { right &= fold(&partials.at<double>(0), n) == tree[0]; });
        }
        count(right, "the sum of " + std::to_string(n) + " partials");
    }
}

// What a scalar skips: anything but 0, and -0.0 is 0.
static void scalars_skip() {
    const struct {
        unsigned kind;
        u64 pattern;
        bool skips;
    } scalars[] = {{0, 1, false}, {1, 0, true}, {2, 0x100, false}, {2, 1, true}, {2, 0x80, true},
                   {3, 0, false}, {3, 256, true}, {3, 0x80000000, true}, {3, 1ull << 32, false},
                   {4, 0, false}, {4, 0x80000000, false}, {4, 1, true}, {4, 0x7fc00000, true}, {4, 0x3f000000, true}};
    for (const auto &scalar : scalars) {
        gc_control control = {};
        control.pending = 1;
        gc_state call = {};
        call.worker.control = &control, call.skip = &scalar.pattern, call.skip_kind = scalar.kind;
        launch(1, THREADS, [&] { gc_onebit_commit(call); });
        const bool right = control.pending == 0 && control.valid == !scalar.skips
                        && control.flags == (scalar.skips ? unsigned(TAKEN_BACK) : 0);
        count(right, "a commit with a scalar of kind " + std::to_string(scalar.kind) + ", " + std::to_string(scalar.pattern));
    }
}

// Chunks of a rank that did not come, whatever is left in its place, make a result that is not finite; without that
// rank's silence they are corrupt. Neither changes the state.
static void late_ranks_are_not_corrupt() {
    for (const unsigned broken : {0, 1}) {
        Model m;
        m.kind = ONEBIT, m.rule = RMS, m.policy = PROPAGATE, m.values = F32_, m.results = F32_, m.error = F32_;
        m.beta = 1, m.n_chunks = 1, m.server = 0, m.segments = {5000};
        m.lay_out();
        Device device(m);
        Memory chunks(2 * m.stride, 0x5a), reduced(m.stride, 0xa5);
        const Bytes before(device.state0.bytes, device.state0.bytes + m.state_bytes);
        gc_control &control = device.control.at<gc_control>(0);
        control.broken = broken;
        device.reduce(chunks.bytes, 2, reduced.bytes);
        const unsigned expected = broken ? NONFINITE : CORRUPT;
        const std::string what = broken ? "of a late rank" : "that are corrupt";
        count(control.flags == expected, "flags after chunks " + what);
        count(get_at<unsigned>(reduced.bytes, 4 * FLAGS_WORD) == expected, "the flags of a chunk made of chunks " + what);
        count(!memcmp(device.state0.bytes, before.data(), before.size()), "the state after chunks " + what);
    }
}

int main(int argc, char **argv) {
    const unsigned rounds = rounds_of(argc, argv, 60);
    conversions_match();
    bits_of_lanes_match<2>(), bits_of_lanes_match<4>(), bits_of_lanes_match<8>(), bits_of_lanes_match<16>();
    sums_of_lanes_match<1>(), sums_of_lanes_match<2>(), sums_of_lanes_match<4>(), sums_of_lanes_match<8>();
    sums_of_partials_are_trees();
    scalars_skip();
    late_ranks_are_not_corrupt();
    handle_matches(rounds);
    plain_forms_match(2 * rounds);
    decoding_to_any_address_matches();
    printf("%u cases, %u wrong\n", cases, wrong);
    return wrong != 0;
}
