// The kernels of kernels/copy.cu on the CPU, as emulate.cpp has the others: against a model that goes through the loops one
// by one, and casts in long double, which holds every element exactly.
//
//     g++ -std=c++17 -O1 -Iinclude -fsanitize=address,alignment -fno-sanitize-recover=alignment tests/emulator/copy.cpp
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <string>

#include "device.h"

#include "../../kernels/copy.cu"

static u64 state = 0x9e3779b97f4a7c15;
static u64 random(u64 below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (state >> 11) % below;
}
static long long between(long long low, long long high) { return low + (long long)random(high - low + 1); }

static unsigned cases, wrong;

// ---- The model of a cast

struct Dtype {
    const char *name;
    unsigned number, size;
    int precision, least;  // of floats: bits of the significand, the exponent of the least normal number
};
static const Dtype DTYPES[] = {
    {"bool", IS_BOOL, 1, 0, 0},       {"int8", IS_INT, 1, 0, 0},        {"int16", IS_INT, 2, 0, 0},
    {"int32", IS_INT, 4, 0, 0},       {"int64", IS_INT, 8, 0, 0},       {"uint8", IS_UINT, 1, 0, 0},
    {"uint16", IS_UINT, 2, 0, 0},     {"uint32", IS_UINT, 4, 0, 0},     {"uint64", IS_UINT, 8, 0, 0},
    {"float16", IS_F16, 2, 11, -14},  {"bfloat16", IS_BF16, 2, 8, -126}, {"float32", IS_F32, 4, 24, -126},
    {"float64", IS_F64, 8, 53, -1022},
};
static const unsigned N_DTYPES = sizeof DTYPES / sizeof *DTYPES;

static bool is_float(const Dtype &dtype) { return dtype.precision != 0; }
static u64 lowest(u64 bits, unsigned size) { return size == 8 ? bits : bits & ((1ull << 8 * size) - 1); }

// The value of a pattern; a NaN's is one.
static long double value_of(const Dtype &dtype, u64 bits) {
    switch (dtype.number) {
    case IS_BOOL: return bits != 0;
    case IS_UINT: return bits;
    case IS_INT: return (long long)(bits << (64 - 8 * dtype.size)) >> (64 - 8 * dtype.size);
    }
    const int fraction_bits = dtype.precision - 1;
    const u64 fraction = bits & ((1ull << fraction_bits) - 1), sign = bits >> (8 * dtype.size - 1);
    const int exponents = 8 * int(dtype.size) - 1 - fraction_bits;
    const int exponent = int(bits >> fraction_bits & ((1u << exponents) - 1));
    long double value;
    if (exponent == (1 << exponents) - 1) value = fraction ? NAN : INFINITY;
    else if (exponent == 0) value = ldexpl(fraction, dtype.least - fraction_bits);
    else value = ldexpl(fraction | 1ull << fraction_bits, dtype.least - fraction_bits + exponent - 1);
    return sign ? -value : value;
}

static u64 pattern_of(const Dtype &dtype, long double x, u64 bits, const Dtype &from) {
    if (dtype.number == IS_BOOL) return x != 0;
    if (dtype.number == IS_INT || dtype.number == IS_UINT) {
        if (!is_float(from)) {  // wraps, with the sign before it
            const u64 wide = from.number == IS_BOOL ? bits != 0 : from.number == IS_INT ? u64((long long)x) : bits;
            return lowest(wide, dtype.size);
        }
        if (std::isnan(x)) return 0;
        const bool is_signed = dtype.number == IS_INT;
        const long double highest = ldexpl(1, 8 * int(dtype.size) - is_signed) - 1;
        const long double least = is_signed ? -highest - 1 : 0;
        x = truncl(x);
        x = x > highest ? highest : x < least ? least : x;
        return lowest(x < 0 ? u64((long long)x) : u64(x), dtype.size);
    }
    const int fraction_bits = dtype.precision - 1, exponents = 8 * int(dtype.size) - 1 - fraction_bits;
    const u64 infinity = ((1ull << exponents) - 1) << fraction_bits, sign = u64(std::signbit(x)) << (8 * dtype.size - 1);
    if (std::isnan(x)) return infinity | 1ull << (fraction_bits - 1);
    if (std::isinf(x)) return sign | infinity;
    if (x == 0) return sign;
    int exponent;
    frexpl(x, &exponent);
    exponent = std::max(exponent - 1, dtype.least);
    const u64 count = u64(rintl(ldexpl(fabsl(x), fraction_bits - exponent)));
    return sign | std::min(count + (u64(exponent - dtype.least) << fraction_bits), infinity);
}

// Bits at which casts go wrong: around powers of two and the middles of what other types can say, zeros, Inf, NaN.
static u64 some_bits(const Dtype &dtype) {
    const unsigned bits = 8 * dtype.size;
    u64 x = random(~0ull) << 20 ^ random(~0ull);
    if (random(2)) {
        const Dtype &other = DTYPES[random(N_DTYPES)];
        const int high = int(random(200)) - 60;
        long double value = ldexpl(1, high);
        if (is_float(other)) value *= 1 + ldexpl(between(-3, 3), -other.precision - int(random(2)));
        else value += between(-3, 3) * 0.5L;
        x = pattern_of(dtype, random(2) ? value : -value, u64((long long)value), DTYPES[11]) + between(-1, 1);
    } else if (is_float(dtype) && random(4) == 0) {
        static const u64 tops[] = {0, 1, 0x7e00, 0x7c00, 0x7c01, 0xfc00, 0x7f80, 0x7f81, 0xff80, 0x7fff, 0xffff};
        x = tops[random(11)] << (bits - 16);
    } else if (random(4) == 0) {
        x = random(3);
    }
    return lowest(x, dtype.size);
}

// ---- Memory

struct Memory {
    static unsigned char *allocate(u64 size) {
        void *memory = nullptr;
        return posix_memalign(&memory, 128, size + !size) ? nullptr : static_cast<unsigned char *>(memory);
    }
    std::unique_ptr<unsigned char, void (*)(void *)> all;
    unsigned char *bytes;
    Memory(u64 offset, u64 size) : all(allocate(offset + size), free), bytes(all.get() + offset) {
        memset(all.get(), 0xa5, offset + size);
        ASAN_POISON_MEMORY_REGION(all.get(), offset / 8 * 8);
    }
};

static gc_divisor divisor(u64 by) { return {by, by ? ~0ull / by : 0}; }
static u64 divided_up(u64 number, u64 by) { return (number + by - 1) / by; }

// ---- A copy in loops

enum Kind { ROWS, TRANSPOSED, GENERAL, GATHERED };

struct Loop {
    u64 count;
    long long dst, src;
};

static void copy_matches(const char *name, void (*kernel)(gc_copy), Kind kind, const Dtype *from, const Dtype *to,
                         unsigned bytes, unsigned side, unsigned rounds, bool fours = false) {
    const unsigned before = cases;
    // Some rounds are too large to be run, and where there are few, all may be.
    for (unsigned round = 0; round < rounds || (cases == before && round < rounds + 1000); round++) {
        const unsigned to_size = to ? to->size : bytes, from_size = from ? from->size : bytes;
        // Where elements need not be aligned, rows of bytes and the general cast, they often are not.
        const bool anywhere = (kind == ROWS && !to) || (kind == GENERAL && to);
        const long long dst_unit = anywhere && random(2) ? 1 : to_size;
        const long long src_unit = anywhere && random(2) ? 1 : from_size;
        const auto padded = [](long long span, long long unit) {
            return (span + unit - 1) / unit * unit + (random(2) ? (long long)random(20) * unit : 0);
        };
        std::vector<Loop> outer(random(3));
        Loop inner = {1 + random(kind == ROWS ? 3000 : 300), to_size, from_size};
        Loop rows = {1 + random(random(2) ? 5 : 140), 0, 0};
        if (kind == GENERAL) inner.dst *= between(1, 3), inner.src *= between(-2, 3);
        // A loop that follows the innermost one in the target.
        Loop within = {1, 0, 0};
        if (kind == GATHERED) {
            inner.src *= between(-2, 3);
            if (random(2)) {
                inner.count = 1 + random(9), within.count = 1 + random(90);
                within.dst = inner.dst * (long long)inner.count;
                within.src = padded(std::abs(inner.src) * inner.count + from_size, src_unit);
                if (random(2)) std::swap(within.src, inner.src), inner.src = std::abs(inner.src);
            }
        }
        if (kind == TRANSPOSED) {
            rows.src = from_size, inner.src = padded(rows.count * from_size, src_unit);
            rows.dst = padded(inner.count * to_size, dst_unit);
            if (random(3) == 0) inner.src = -inner.src;
        } else {
            const long long dst_span = std::abs(inner.dst) * (long long)(inner.count * within.count);
            const long long src_span = std::abs(inner.src) * (long long)inner.count
                                     + std::abs(within.src) * (long long)within.count + from_size;
            rows.dst = padded(dst_span, dst_unit);
            rows.src = random(8) ? padded(src_span, src_unit) : 0;
            if (random(3) == 0) rows.src = -rows.src;
        }
        long long dst_span = rows.dst * rows.count;
        long long src_span = std::max(std::abs(rows.src) * rows.count,
                                      std::abs(inner.src) * inner.count + std::abs(within.src) * within.count);
        src_span = padded(src_span + from_size, src_unit), dst_span = padded(dst_span, dst_unit);
        for (Loop &loop : outer) {
            loop = {1 + random(3), dst_span, random(4) ? random(2) ? src_span : -src_span : 0};
            dst_span = padded(dst_span * loop.count, dst_unit), src_span = padded(src_span * loop.count, src_unit);
        }
        std::vector<Loop> all(outer.rbegin(), outer.rend());
        all.push_back(rows), all.push_back(within), all.push_back(inner);
        long long low[2] = {0, 0}, high[2] = {to_size, from_size};
        u64 elements = 1;
        for (const Loop &loop : all) {
            elements *= loop.count;
            for (int k = 0; k < 2; k++) {
                const long long reach = (k ? loop.src : loop.dst) * (long long)(loop.count - 1);
                (reach < 0 ? low : high)[k] += reach;
            }
        }
        Memory dst(random(40) * dst_unit, high[0] - low[0]), src(random(40) * src_unit, high[1] - low[1]);
        if (elements > 60000) continue;

        gc_copy copy;
        memset(&copy, 0xee, sizeof copy);
        copy.src = src.bytes - low[1], copy.dst = dst.bytes - low[0];
        copy.begin = src.bytes, copy.end = src.bytes + (high[1] - low[1]);
        copy.count = inner.count, copy.dst_step = inner.dst, copy.src_step = inner.src;
        copy.rows = rows.count, copy.row_dst_stride = rows.dst, copy.row_src_stride = rows.src;
        copy.cast = {from ? from->number : +IS_UINT, from_size, to ? to->number : +IS_UINT, to_size};
        copy.joined = copy.down = copy.vectors = copy.log_width = 0;
        u64 a_vector = 1;
        if (kind == GATHERED) {
            a_vector = std::max(1u, 4 / to_size);
            copy.count *= within.count;
            copy.period = divisor(within.count > 1 ? inner.count : 0);
            copy.wrap = within.src - (long long)inner.count * inner.src;
        }
        const bool in_bytes = kind == ROWS && !to;
        if (in_bytes) copy.count *= bytes;
        const auto alike = [&](auto of) {
            bool is = of((long long)copy.dst, (long long)copy.src);
            for (const Loop &loop : all) is &= &loop == &all.back() || of(loop.dst, loop.src);
            return is;
        };
        if (kind == ROWS) {
            const unsigned t = in_bytes ? 1 : to_size, f = in_bytes ? 1 : from_size;
            a_vector = fours ? +FOUR : 16 / std::max(t, f);
            copy.vectors = alike([=](long long d, long long s) { return (s / f - d / t) % (long long)a_vector == 0; });
        } else if (kind == TRANSPOSED) {
            copy.vectors = (u64)copy.src % 4 == 0 && inner.src % 4 == 0;
            for (const Loop &loop : outer) copy.vectors &= loop.src % 4 == 0;
        }
        if (random(8) == 0) copy.vectors = 0;
        copy.aligned = alike([=](long long d, long long s) { return d % to_size == 0 && s % from_size == 0; })
                     && inner.dst % to_size == 0 && inner.src % from_size == 0;
        copy.n_outer = unsigned(outer.size());
        for (unsigned k = 0; k < outer.size(); k++) copy.outer[k] = {divisor(all[k].count), all[k].dst, all[k].src};

        u64 across, along, blocks = 1;
        if (kind == TRANSPOSED) {
            across = divided_up(inner.count, side), along = divided_up(rows.count, side);
        } else {
            const u64 at_once = fours              ? +FOURS_ROUNDS
                              : kind == ROWS     ? +ROW_ROUNDS
                              : kind == GATHERED ? +GATHER_ROUNDS
                                                 : +ELEMENT_ROUNDS;
            copy.down = unsigned(random(2)), copy.log_width = unsigned(random(9));
            if (random(4) == 0) {
                // With `down` each round of y has a thread's rounds of rows.
                copy.joined = 1, copy.down &= rows.count % at_once == 0;
                const u64 a_round = copy.down ? at_once : 1;
                copy.outer[copy.n_outer++] = {divisor(rows.count / a_round), rows.dst * (long long)a_round,
                                              rows.src * (long long)a_round};
                copy.rows /= a_round;
                for (const Loop &loop : outer) copy.rows *= loop.count;
                if (!copy.down) copy.row_dst_stride = copy.row_src_stride = 0;
            }
            const u64 pieces = divided_up(copy.count + a_vector - 1, a_vector);
            across = divided_up(pieces, (copy.down ? 1 : at_once) << copy.log_width);
            along = divided_up(copy.rows, (COPY_THREADS >> copy.log_width) * (copy.down && !copy.joined ? at_once : 1));
        }
        copy.across = divisor(across), copy.along = divisor(along);
        if (!copy.joined) for (const Loop &loop : outer) blocks *= loop.count;
        blocks *= across * along;
        if (blocks > 300) continue;

        for (long long k = 0; k < high[1] - low[1]; k++) src.bytes[k] = (unsigned char)random(256);
        std::vector<unsigned char> expected(dst.bytes, dst.bytes + (high[0] - low[0]));
        for (unsigned fill = 0; fill < 2; fill++) {  // first all edge values, then what is made of them
            for (u64 n = 0; n < elements; n++) {
                u64 rest = n;
                long long at[2] = {-low[0], -low[1]};
                for (size_t k = all.size(); k-- > 0; rest /= all[k].count) {
                    at[0] += all[k].dst * (long long)(rest % all[k].count);
                    at[1] += all[k].src * (long long)(rest % all[k].count);
                }
                u64 x = 0;
                if (!to) {
                    if (fill) memcpy(&expected[at[0]], src.bytes + at[1], bytes);
                } else if (!fill) {
                    x = some_bits(*from);
                    memcpy(src.bytes + at[1], &x, from_size);
                } else {
                    memcpy(&x, src.bytes + at[1], from_size);
                    x = pattern_of(*to, value_of(*from, x), x, *from);
                    memcpy(&expected[at[0]], &x, to_size);
                }
            }
        }
        launch(blocks, COPY_THREADS, [&] { kernel(copy); });
        cases++;
        const auto found = std::mismatch(expected.begin(), expected.end(), dst.bytes);
        if (found.first == expected.end() || wrong++ > 20) continue;
        printf("wrong: %s of %s to %s, %llu x %llu, the first at byte %ld of %zu: %02x, not %02x\n", name,
               from ? from->name : "bytes", to ? to->name : "bytes", copy.rows, copy.count,
               long(found.first - expected.begin()), expected.size(), *found.second, *found.first);
    }
    if (cases == before) {
        printf("%s was never run\n", name);
        wrong++;
    }
}

static const Dtype *dtype_of(const std::string &name) {
    for (const Dtype &dtype : DTYPES) {
        if (name == dtype.name) return &dtype;
    }
    exit(1);
}

int main(int argc, char **argv) {
    const unsigned rounds = rounds_of(argc, argv, 40);
    for (unsigned bytes : {1, 2, 3, 4, 8, 16}) {
        copy_matches("gc_copy_rows", gc_copy_rows, ROWS, nullptr, nullptr, bytes, 0, rounds);
        if (bytes == 3) continue;
        copy_matches("gc_copy_general", gc_copy_general, GENERAL, nullptr, nullptr, bytes, 0, rounds);
    }
#define GATHERED_MATCH(bits) \
    copy_matches("gc_copy_gathered_u" #bits, gc_copy_gathered_u##bits, GATHERED, nullptr, nullptr, bits / 8, 0, 2 * rounds);
    GATHERED_MATCH(8)
    GATHERED_MATCH(16)
    GATHERED_MATCH(32)
    GATHERED_MATCH(64)
#define TRANSPOSED_MATCH(bits, side) \
    copy_matches("gc_copy_transposed_u" #bits, gc_copy_transposed_u##bits, TRANSPOSED, nullptr, nullptr, bits / 8, side, \
                 rounds);
    TRANSPOSED_MATCH(8, 128)
    TRANSPOSED_MATCH(16, 64)
    TRANSPOSED_MATCH(32, 64)
    TRANSPOSED_MATCH(64, 32)
    TRANSPOSED_MATCH(128, 32)
#define CAST_MATCH(short_from, from, short_to, to) \
    copy_matches("gc_cast_rows", gc_cast_rows_##short_from##_##short_to, ROWS, dtype_of(from), dtype_of(to), 0, 0, 2 * rounds);
#define CASTS_MATCH(short_from, from, short_to, to) \
    CAST_MATCH(short_from, from, short_to, to) \
    copy_matches("gc_cast_transposed", gc_cast_transposed_##short_from##_##short_to, TRANSPOSED, dtype_of(from), \
                 dtype_of(to), 0, 64, rounds);
    CASTS_MATCH(f32, "float32", bf16, "bfloat16")
    CASTS_MATCH(f32, "float32", f16, "float16")
    CASTS_MATCH(bf16, "bfloat16", f32, "float32")
    CASTS_MATCH(f16, "float16", f32, "float32")
    CAST_MATCH(f64, "float64", f32, "float32")
    CAST_MATCH(f32, "float32", f64, "float64")
    copy_matches("gc_copy_rows_u32", gc_copy_rows_u32, ROWS, dtype_of("uint32"), dtype_of("uint32"), 0, 0, 2 * rounds);
    copy_matches("gc_copy_rows_u64", gc_copy_rows_u64, ROWS, dtype_of("uint64"), dtype_of("uint64"), 0, 0, 2 * rounds);
    for (const Dtype &from : DTYPES) {
        for (const Dtype &to : DTYPES) {
            if (&from == &to) continue;
            if (from.size <= 4 && to.size <= 4) {
                copy_matches("gc_cast_rows", gc_cast_rows, ROWS, &from, &to, 0, 0, rounds / 10 + 1, true);
            }
            copy_matches("gc_cast_general", gc_cast_general, GENERAL, &from, &to, 0, 0, rounds / 10 + 1);
            copy_matches("gc_cast_transposed", gc_cast_transposed, TRANSPOSED, &from, &to, 0, 32, rounds / 20 + 1);
        }
    }
    printf("%u cases, %u wrong\n", cases, wrong);
    return wrong != 0;
}
