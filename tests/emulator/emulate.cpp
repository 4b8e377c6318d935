// The kernels on the CPU: every block, warp and lane of kernels/, against a five-line model. Needs no GPU, and
// under AddressSanitizer finds each access outside the operands, which end where their memory does. What is compiled for
// 9.0 and up alone, cache hints and prefetches, is not seen here.
//
//     g++ -std=c++17 -O1 -Iinclude -fsanitize=address,alignment -fno-sanitize-recover=alignment tests/emulator/emulate.cpp
//         -Ltarget/fast -lgradcodec
//
// The library says how it launches each kernel: those shapes are tried, and compared with what a block does.
#include <gradcodec.h>
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>

#include "device.h"

#include "../../kernels/bits.cu"
#include "../../kernels/signs.cu"
#include "../../kernels/strided.cu"

// ---- The tests

static u64 state = 0x9e3779b97f4a7c15;
static u64 random(u64 below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (state >> 11) % below;
}
static long long between(long long low, long long high) { return low + (long long)random(high - low + 1); }

// As many elements as a few lanes, warps or blocks take, and a few more or fewer.
static u64 some_elements() {
    switch (random(4)) {
    case 0: return random(70);
    case 1: return 1024 * random(12) + random(3);
    case 2: return 8192 + random(600);
    default: return random(20000);
    }
}

// Some bytes at some alignment. They end where their memory does, so that one too many is seen; in front of them the
// sanitizer forbids all that is not in the same 8 bytes.
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
    // How many elements come before the first that begins a cache line.
    u64 head(u64 size) const { return -reinterpret_cast<u64>(bytes) % 128 / size; }
};

template <typename T>
static T load(const unsigned char *from) {
    T x;
    memcpy(&x, from, sizeof x);
    return x;
}

static unsigned cases, wrong;
static void count(const char *what, bool right, u64 elements, u64 bytes, unsigned order) {
    cases++;
    if (right || wrong++ > 20) return;
    printf("wrong: %s of %llu elements, %llu bytes, order %u\n", what, elements, bytes, order);
}

static unsigned mask(u64 i, unsigned order) { return order ? 1u << i % 8 : 0x80u >> i % 8; }

// Zeros, and both sides of each border that a float's sign has.
template <typename T>
static T some_pattern() {
    static const u64 borders[] = {0x8000, 0xfc00, 0xff80, 0x80000000, 0xff800000, 0x8000000000000000, 0xfff0000000000000};
    switch (random(3)) {
    case 0: return 0;
    case 1: return static_cast<T>(borders[random(7)] + random(3) - 1);
    default: return static_cast<T>(random(~0ull) << random(12));
    }
}

// As the library launches it.
static gc_kernel_shape_t shape_of(const char *name) {
    gc_kernel_shape_t shape = {};
    shape.struct_size = sizeof shape;
    if (gc_builtin_kernel_shape(name, 90, &shape) != GC_STATUS_OK) {
        printf("%s\n", gc_last_error());
        exit(1);
    }
    return shape;
}

// That the first of several blocks works on as many items as the library says. `written`: bytes of an item of `dst`.
template <typename Launch>
static void a_block_does_its_items(const char *name, const gc_kernel_shape_t &shape, const Memory &dst, u64 written,
                                   u64 all, Launch block) {
    launch(1, shape.threads, block);
    u64 items = 0;
    while (items < all && dst.bytes[items * written] != 0xa5) items++;
    count(name, items == shape.items_per_block, items, shape.items_per_block, 0);
}

template <typename T, typename Kernel, typename Model>
static void pack_matches(const char *name, Kernel pack, Model bit, unsigned rounds) {
    const gc_kernel_shape_t shape = shape_of(name);
    const u64 a_block = shape.items_per_block, all = 3 * a_block;
    Memory zeros(0, all * 8 * sizeof(T)), packed(0, all);
    memset(zeros.bytes, 0, all * 8 * sizeof(T));
    a_block_does_its_items(name, shape, packed, 1, all, [&] {
        pack(reinterpret_cast<T *>(zeros.bytes), packed.bytes, all * 8, all, 0);
    });
    for (unsigned round = 0; round < rounds; round++) {
        const u64 offset = random(2) ? random(140) : 0;
        // A fourth of the time whole tiles and hardly more.
        const u64 tiles = a_block * (1 + random(2)) + Memory(offset, 0).head(1);
        const u64 n = random(4) ? some_elements() : tiles * 8 + random(20), bytes = (n + 7) / 8 + (random(2) ? 0 : random(1500));
        const unsigned order = unsigned(random(2));
        if (bytes == 0) continue;
        Memory src((random(2) ? random(20) : 0) * sizeof(T), n * sizeof(T)), dst(offset, bytes);
        for (u64 i = 0; i < n; i++) reinterpret_cast<T *>(src.bytes)[i] = some_pattern<T>();
        launch((bytes + a_block - 1) / a_block, shape.threads,
               [&] { pack(reinterpret_cast<T *>(src.bytes), dst.bytes, n, bytes, order); });
        bool right = true;
        for (u64 byte = 0; byte < bytes; byte++) {
            unsigned expected = 0;
            for (u64 i = byte * 8; i < byte * 8 + 8 && i < n; i++) {
                if (bit(load<T>(src.bytes + i * sizeof(T)))) expected |= mask(i, order);
            }
            right &= dst.bytes[byte] == expected;
        }
        count(name, right, n, bytes, order);
    }
}

template <typename T, typename Kernel>
static void unpack_matches(const char *name, Kernel unpack, T one, unsigned rounds) {
    const gc_kernel_shape_t shape = shape_of(name);
    const u64 a_block = shape.items_per_block, all = 3 * a_block;
    Memory zeros(0, all / 8), unpacked(0, all * sizeof(T));
    memset(zeros.bytes, 0, all / 8);
    a_block_does_its_items(name, shape, unpacked, sizeof(T), all, [&] {
        unpack(zeros.bytes, reinterpret_cast<T *>(unpacked.bytes), all, all / 8, one, 0);
    });
    for (unsigned round = 0; round < rounds; round++) {
        const u64 offset = (random(2) ? random(140) : 0) * sizeof(T);
        const u64 tiles = a_block * (1 + random(2)) + Memory(offset, 0).head(sizeof(T));
        const u64 n = random(4) ? some_elements() : tiles + random(40), bytes = random(4) ? (n + 7) / 8 : random((n + 7) / 8 + 3);
        const unsigned order = unsigned(random(2));
        if (n == 0) continue;
        Memory src(random(2) ? random(20) : 0, bytes), dst(offset, n * sizeof(T));
        for (u64 byte = 0; byte < bytes; byte++) src.bytes[byte] = static_cast<unsigned char>(random(256));
        launch((n + a_block - 1) / a_block, shape.threads,
               [&] { unpack(src.bytes, reinterpret_cast<T *>(dst.bytes), n, bytes, one, order); });
        bool right = true;
        for (u64 i = 0; i < n; i++) {
            const bool bit = i / 8 < bytes && src.bytes[i / 8] & mask(i, order);
            right &= load<T>(dst.bytes + i * sizeof(T)) == (bit ? one : 0);
        }
        count(name, right, n, bytes, order);
    }
}

// ---- The kernels of walk.cuh

static gc_divisor divisor(u64 by) { return {by, by ? ~0ull / by : 0}; }
static u64 divided_up(u64 number, u64 by) { return (number + by - 1) / by; }

// Where a line begins, and where a byte of a row lies.
static long long line_place(const gc_strided_plan &plan, u64 number, bool bytes) {
    long long at = 0;
    for (unsigned k = plan.n_line_loops; k-- > 0; number /= plan.line_loops[k].count.by) {
        const gc_line_loop &loop = plan.line_loops[k];
        at += (long long)(number % loop.count.by) * (bytes ? loop.byte_stride : loop.element_stride);
    }
    return at;
}
static long long byte_place(const gc_strided_plan &plan, u64 number) {
    number += plan.first_byte;
    if (plan.n_byte_loops == 0) return (long long)number * plan.byte_stride;
    long long at = 0;
    for (unsigned k = plan.n_byte_loops; k-- > 0; number /= plan.byte_loops[k].count.by) {
        at += (long long)(number % plan.byte_loops[k].count.by) * plan.byte_loops[k].stride;
    }
    return at;
}

// Where element `i` of a line and its byte lie, and which bit of that is its own.
struct BitPlace {
    long long element, byte;
    u64 number;
};
static BitPlace place(const gc_strided_plan &plan, u64 line, u64 i) {
    const u64 bit = plan.joined ? line * plan.elements + i : i;
    return {line_place(plan, line, false) + (long long)i * plan.element_stride,
            line_place(plan, line, true) + byte_place(plan, bit / 8), bit};
}

// As many pieces as a line has at least.
static u64 pieces_of(const gc_strided_plan &plan, bool packing) {
    const u64 bytes = plan.joined ? divided_up(plan.elements, 8) : plan.bytes;
    return packing ? divided_up(bytes + plan.boundary - 1, plan.piece)
                   : divided_up(plan.elements + (plan.boundary - 1) / plan.size, 8 * plan.piece);
}

static void strided_matches(unsigned rounds) {
    for (unsigned round = 0; round < rounds; round++) {
        static gc_strided_plan plan;
        memset(&plan, 0, sizeof plan);
        const bool packing = random(2), sign = random(2);
        plan.size = 1u << random(4), plan.order = unsigned(random(2)), plan.aligned = unsigned(random(2));
        plan.joined = unsigned(random(2)), plan.piece = random(2) ? 1u : unsigned(PIECE), plan.boundary = 1;
        plan.n_line_loops = unsigned(random(3)) + plan.joined, plan.lines = 1;
        plan.elements = random(2) ? random(9) : random(300);
        if (plan.joined) plan.elements += plan.elements == 0;
        for (unsigned k = 0; k < plan.n_line_loops; k++) {
            plan.line_loops[k].count = divisor(2 + random(random(2) ? 3 : 20));
            plan.lines *= plan.line_loops[k].count.by;
        }
        const u64 needed = divided_up(plan.elements * (plan.joined ? plan.lines : 1), 8);
        plan.bytes = packing ? needed + (plan.joined ? 0 : random(4) ? 0 : random(50))
                   : random(4) ? needed : random(needed + 2);
        plan.first_byte = random(3) ? 0 : random(9);
        if (random(3) == 0) {
            plan.n_byte_loops = 2;
            const u64 outer = 2 + random(3), inner = divided_up(plan.bytes + plan.first_byte, outer) + 1;
            plan.byte_loops[0].count = divisor(outer), plan.byte_loops[1].count = divisor(inner);
        }
        // What is written must not overlap: each loop steps over all that the loops before it cover, in a random order.
        // Number n is of the elements of a line; those above are of the bytes of a row.
        const unsigned n = plan.n_line_loops;
        const long long unit = plan.aligned ? plan.size : 1;
        long long covered[2] = {plan.size, 1};
        std::vector<unsigned> order(n + 1 + std::max(plan.n_byte_loops, 1u));
        const bool in_turn = random(2);
        for (unsigned k = 0; k < order.size(); k++) order[k] = k, std::swap(order[k], order[random(k + 1)]);
        // Half of the time elements and bytes lie side by side in a line, as they usually do.
        if (in_turn) for (unsigned k = 0; k < order.size(); k++) order[k] = unsigned(order.size()) - 1 - k;
        for (unsigned k : order) {
            const u64 count = k < n ? plan.line_loops[k].count.by : k == n ? plan.elements
                            : plan.n_byte_loops ? plan.byte_loops[k - n - 1].count.by : plan.bytes + plan.first_byte;
            for (int side = 0; side < 2; side++) {
                if (side == 0 ? k > n : k == n || (k < n && plan.joined)) continue;
                const long long units = side ? 1 : unit, gap = in_turn && k >= n ? 0 : (long long)random(3) * units;
                const long long stride = random(4) || in_turn ? covered[side] : -covered[side];
                covered[side] = covered[side] * (long long)(count + !count) + gap;
                (k == n ? plan.element_stride
                 : k < n ? (side ? plan.line_loops[k].byte_stride : plan.line_loops[k].element_stride)
                 : plan.n_byte_loops ? plan.byte_loops[k - n - 1].stride : plan.byte_stride) = stride;
            }
        }
        if (covered[0] > 1 << 20 || covered[1] > 1 << 20 || plan.lines * plan.elements > 1 << 15) continue;
        // What is read may overlap, and be the same again and again.
        if (packing && random(4) == 0) plan.element_stride = between(-3, 3) * unit;
        if (!packing && random(4) == 0) plan.byte_stride = between(-3, 3);

        long long low[2] = {0, 0}, high[2] = {1, 1};
        const auto reach = [&](int side, long long at, long long size) {
            low[side] = std::min(low[side], at), high[side] = std::max(high[side], at + size);
        };
        for (u64 line = 0; line < plan.lines; line++) {
            for (u64 i = 0; i < plan.elements; i++) reach(0, place(plan, line, i).element, plan.size);
            for (u64 i = 0; i < plan.bytes; i++) reach(1, line_place(plan, line, true) + byte_place(plan, i), 1);
        }
        Memory elements(plan.aligned ? random(3) * plan.size : random(8), u64(high[0] - low[0]));
        Memory bytes(random(8), u64(high[1] - low[1]));
        // Aligned memory begins with an aligned element.
        unsigned char *element = elements.bytes - low[0], *byte = bytes.bytes - low[1];
        if (plan.aligned && reinterpret_cast<u64>(element) % plan.size) continue;
        for (long long i = 0; i < high[0] - low[0]; i++) {
            elements.bytes[i] = static_cast<unsigned char>(random(3) ? 0 : random(2) ? 0x80 : random(256));
        }
        for (long long i = 0; i < high[1] - low[1]; i++) bytes.bytes[i] = static_cast<unsigned char>(random(256));
        const u64 top = 1ull << (8 * plan.size - 1);
        plan.first_zero = sign ? top + 1 : 0, plan.span = sign ? top / 2 : 0, plan.one = top / 2 + 1;
        plan.src = packing ? element : byte, plan.dst = packing ? byte : element;

        // The order of threads: any loop's lines side by side.
        plan.width = plan.between = divisor(1);
        if (n > 0 && random(3)) {
            u64 between = 1;
            unsigned k = n - 1;
            for (; k > 0 && random(2); k--) between *= plan.line_loops[k].count.by;
            plan.width = plan.line_loops[k].count, plan.between = divisor(between);
            if (!plan.joined && random(2)) plan.width = divisor(plan.lines), plan.between = divisor(1);
        }
        const bool bytes_in_turn = plan.n_byte_loops == 0 && plan.byte_stride == 1;
        if (packing && plan.piece == PIECE && bytes_in_turn && random(4)) plan.boundary = 4;
        if (!packing && plan.aligned && plan.element_stride == plan.size && random(4)) {
            plan.boundary = plan.size == 1 ? 8 : 16;
        }
        plan.pieces = divisor(pieces_of(plan, packing) + random(2));

        const unsigned char *written = packing ? bytes.bytes : elements.bytes;
        std::vector<unsigned char> expected(written, written + (high[packing] - low[packing]));
        for (u64 line = 0; line < plan.lines; line++) {
            if (packing && (!plan.joined || line == 0)) {
                for (u64 i = 0; i < plan.bytes; i++) {
                    expected[line_place(plan, line, true) + byte_place(plan, i) - low[1]] = 0;
                }
            }
        }
        for (u64 line = 0; line < plan.lines; line++) {
            for (u64 i = 0; i < plan.elements; i++) {
                const BitPlace at = place(plan, line, i);
                u64 x = 0;
                memcpy(&x, element + at.element, plan.size);
                if (packing) {
                    const bool zero = x >= plan.first_zero && x <= plan.first_zero + plan.span;
                    if (!zero) expected[at.byte - low[1]] |= static_cast<unsigned char>(mask(at.number, plan.order));
                } else {
                    const bool bit = at.number / 8 < plan.bytes && byte[at.byte] & mask(at.number, plan.order);
                    const u64 pattern = bit ? plan.one : 0;
                    memcpy(&expected[at.element - low[0]], &pattern, plan.size);
                }
            }
        }
        launch(divided_up(plan.lines * plan.pieces.by, THREADS), THREADS,
               [&] { packing ? gc_pack_strided(plan) : gc_unpack_strided(plan); });
        const bool right = memcmp(written, expected.data(), expected.size()) == 0;
        count(packing ? "gc_pack_strided" : "gc_unpack_strided", right, plan.elements, plan.bytes, plan.order);
    }
}

// Memory that is there when it is touched, so that sizes and strides may be of more than 32 bits.
struct Vast {
    u64 size;
    unsigned char *bytes;
    explicit Vast(u64 size)
        : size(size), bytes(static_cast<unsigned char *>(mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
        if (bytes == MAP_FAILED) puts("no vast memory"), exit(1);
    }
    Vast(const Vast &) = delete;
    ~Vast() { munmap(bytes, size); }
};

// A block far out among 2^33 lines of 3 bytes, and lines of elements that lie 4 GiB and more apart.
static void vast_strided_matches() {
    const u64 lines = 1ull << 33, inner = 1ull << 21;
    for (unsigned round = 0; round < 24; round++) {
        static gc_strided_plan plan;
        memset(&plan, 0, sizeof plan);
        const bool packing = round % 2, many = round / 2 % 2;
        Vast elements(many ? 3 * lines : 24ull << 32), bytes(3 * lines / 8);
        plan.src = packing ? elements.bytes : bytes.bytes, plan.dst = packing ? bytes.bytes : elements.bytes;
        plan.size = plan.aligned = plan.one = plan.byte_stride = plan.boundary = 1;
        plan.piece = random(2) ? 1u : unsigned(PIECE);
        plan.width = plan.between = divisor(1), plan.lines = 3, plan.elements = 9 + random(4);
        plan.bytes = 2, plan.element_stride = (1ll << 32) + 8, plan.n_line_loops = 1;
        plan.line_loops[0] = {divisor(3), (1ll << 32) * 5 + 1, 7};
        u64 block = 0;
        if (many) {
            plan.joined = 1, plan.lines = lines, plan.elements = 3, plan.element_stride = 1, plan.bytes = 3 * lines / 8;
            plan.n_line_loops = 2;
            plan.line_loops[0] = {divisor(lines / inner), (long long)(3 * inner), 0};
            plan.line_loops[1] = {divisor(inner), 3, 0};
            if (random(2)) plan.width = divisor(inner);
            block = random(4) ? lines / THREADS - 1 - random(random(2) ? 3 : lines / THREADS) : random(4);
        }
        plan.pieces = divisor(pieces_of(plan, packing));
        const u64 first = block * THREADS, end = std::min(first + THREADS, plan.lines);
        for (u64 line = first; line < std::min(end + 3, plan.lines); line++) {
            for (u64 i = 0; i < plan.elements; i++) {
                elements.bytes[place(plan, line, i).element] = packing ? random(2) : 7;
                bytes.bytes[place(plan, line, i).byte] = static_cast<unsigned char>(random(256));
            }
        }
        launch(1, THREADS, [&] {
            blockIdx = {unsigned(block)};
            packing ? gc_pack_strided(plan) : gc_unpack_strided(plan);
        });
        bool right = true;
        for (u64 line = first; line < end; line++) {
            for (u64 i = 0; i < plan.elements; i++) {
                const BitPlace at = place(plan, line, i);
                const bool bit = bytes.bytes[at.byte] & mask(at.number, 0);
                // A byte is packed with the line that its first bit is of.
                if (packing && plan.joined && at.number / 8 * 8 < first * plan.elements) continue;
                right &= elements.bytes[at.element] == bit;
            }
        }
        count(packing ? "gc_pack_strided, vast" : "gc_unpack_strided, vast", right, plan.lines, plan.elements, many);
    }
}

// ---- Signs

// The value of a scale in a format, by the processor's own conversions, and a NaN of ours for any.
static u64 model_of_scale(float scale, unsigned format) {
    u64 pattern = 0;
    if (format == FORMAT_F32) {
        if (scale != scale) return 0x7fc00000;
        memcpy(&pattern, &scale, 4);
    } else if (format == FORMAT_F64) {
        if (scale != scale) return 0x7ff8000000000000;
        const double wide = scale;
        memcpy(&pattern, &wide, 8);
    } else if (format == FORMAT_F16) {
        if (scale != scale) return 0x7e00;
        const _Float16 half = static_cast<_Float16>(scale);
        memcpy(&pattern, &half, 2);
    } else {
        if (scale != scale) return 0x7fc0;
        // The nearer of two neighbours, in the arithmetic of doubles.
        unsigned bits;
        memcpy(&bits, &scale, 4);
        const unsigned low = bits >> 16;
        const auto value = [](unsigned upper) {
            const unsigned whole = upper << 16;
            float x;
            memcpy(&x, &whole, 4);
            return (upper & 0x7fff) == 0x7f80 ? std::ldexp(upper >> 15 ? -1.0 : 1.0, 128) : double(x);
        };
        const double exact = (low & 0x7fff) == 0x7f80 ? value(low) : double(scale);
        const double below = std::fabs(exact - value(low)), above = std::fabs(value(low + 1) - exact);
        const bool up = (low & 0x7fff) != 0x7f80 && (above < below || (above == below && low % 2));
        pattern = up ? low + 1 : low;
    }
    return pattern;
}

static float some_scale() {
    static const unsigned special[] = {0, 0x80000000, 1, 0x807fffff, 0x00800000, 0x33000000, 0x33000001, 0x33800000,
        0x387fc000, 0x387fe000, 0x387fffff, 0x38800000, 0x477fefff, 0x477ff000, 0xc77ff000, 0x7f7fffff, 0x7f7f8000,
        0x7f7f7fff, 0x7f800000, 0xff800000, 0x7f800001, 0xffc00000, 0x3f800000, 0x3f808000, 0x3f818000, 0x3f801000, 0x3f803000};
    const unsigned bits = random(2) ? special[random(sizeof special / 4)]
                        : random(2) ? unsigned(random(1ull << 32)) : 0x33000000u + unsigned(random(0x15000000));
    float scale;
    memcpy(&scale, &bits, 4);
    return scale;
}

static void scales_match(unsigned rounds) {
    for (unsigned round = 0; round < 500 * rounds; round++) {
        const unsigned format = unsigned(random(4)), size = format == FORMAT_F32 ? 4 : format == FORMAT_F64 ? 8 : 2;
        const float scale = some_scale();
        gc_signs signs = {0, 0, reinterpret_cast<const unsigned char *>(&scale), divisor(0), format, 0};
        const Patterns patterns = patterns_of(signs, 0, size);
        const u64 one = model_of_scale(scale, format), sign = scale == scale ? 1ull << (8 * size - 1) : 0;
        count("a scale", patterns.one == one && patterns.zero == (one ^ sign), format, size, 0);
    }
}

// Scales in chunks, or two values, and what they give for bit number i.
struct SomeSigns {
    u64 chunk_bytes;
    Memory scales;
    gc_signs signs;
    unsigned size;
    SomeSigns(unsigned size, u64 bytes)
        : chunk_bytes(size > 1 && random(2) ? 1 + random(random(2) ? 3 : bytes + 1) : 0),
          scales(random(3), chunk_bytes ? (bytes + chunk_bytes - 1) / chunk_bytes * 4 : 4), size(size) {
        const u64 mask = ~0ull >> (64 - 8 * size);
        signs = {random(~0ull) & mask, random(~0ull) & mask, nullptr, divisor(0), 0, unsigned(random(2))};
        if (size == 1 || (chunk_bytes == 0 && random(3) == 0)) return;
        const u64 count = chunk_bytes ? (bytes + chunk_bytes - 1) / chunk_bytes : 1;
        for (u64 k = 0; k < count; k++) {
            const float scale = some_scale();
            memcpy(scales.bytes + 4 * k, &scale, 4);
        }
        signs.scales = scales.bytes, signs.chunk_bytes = divisor(chunk_bytes);
        signs.format = size == 4 ? FORMAT_F32 : size == 8 ? FORMAT_F64 : random(2) ? FORMAT_F16 : FORMAT_BF16;
    }
    u64 expected(u64 i, bool bit) const {
        if (signs.scales == nullptr) return bit ? signs.one : signs.zero;
        float scale;
        memcpy(&scale, signs.scales + (chunk_bytes ? i / 8 / chunk_bytes * 4 : 0), 4);
        const u64 one = model_of_scale(scale, signs.format);
        return bit || scale != scale ? one : one ^ 1ull << (8 * size - 1);
    }
};

template <typename T, typename Kernel>
static void unpack_signs_matches(const char *name, Kernel unpack, unsigned rounds) {
    const u64 a_block = 2 * THREADS * 16 / sizeof(T);
    for (unsigned round = 0; round < rounds; round++) {
        const u64 offset = (random(2) ? random(140) : 0) * sizeof(T);
        const u64 tiles = a_block * (1 + random(2)) + Memory(offset, 0).head(sizeof(T));
        const u64 n = random(4) ? some_elements() : tiles + random(40), bytes = (n + 7) / 8 + (random(2) ? 0 : random(30));
        if (n == 0) continue;
        const SomeSigns some(sizeof(T), bytes);
        Memory src(random(2) ? random(20) : 0, bytes), dst(offset, n * sizeof(T));
        for (u64 byte = 0; byte < bytes; byte++) src.bytes[byte] = static_cast<unsigned char>(random(256));
        launch((n + a_block - 1) / a_block, THREADS,
               [&] { unpack(src.bytes, reinterpret_cast<T *>(dst.bytes), n, bytes, some.signs); });
        bool right = true;
        for (u64 i = 0; i < n; i++) {
            right &= load<T>(dst.bytes + i * sizeof(T)) == T(some.expected(i, src.bytes[i / 8] & mask(i, some.signs.order)));
        }
        count(name, right, n, bytes, some.signs.order);
    }
}

static void scattered_signs_match(unsigned rounds) {
    for (unsigned round = 0; round < rounds; round++) {
        static gc_scattered_signs plan;
        memset(&plan, 0, sizeof plan);
        plan.size = 1u << random(4), plan.n_loops = unsigned(random(4)), plan.elements = 1;
        const long long unit = random(2) ? plan.size : 1;
        long long covered = plan.size, low = 0, high = 0;
        std::vector<unsigned> order(plan.n_loops);
        for (unsigned k = 0; k < plan.n_loops; k++) order[k] = k, std::swap(order[k], order[random(k + 1)]);
        for (unsigned k : order) {
            const u64 times = u64(between(2, random(2) ? 5 : 40));
            plan.loops[k].count = divisor(times), plan.elements *= times;
            plan.loops[k].stride = random(4) ? covered : -covered;
            covered = covered * (long long)times + (random(2) ? unit : 0);
            const long long span = (long long)(times - 1) * plan.loops[k].stride;
            (span < 0 ? low : high) += span;
        }
        if (covered > 1 << 19) continue;
        // The order of threads: any loop's, if what is inside it covers whole bytes.
        plan.across = plan.width = divisor(1);
        u64 inside = 1;
        for (unsigned k = plan.n_loops; k-- > 0; inside *= plan.loops[k].count.by) {
            if (inside % 8 == 0 && random(2)) plan.across = divisor(inside / 8), plan.width = plan.loops[k].count;
        }
        plan.bytes = (plan.elements + 7) / 8, plan.byte_stride = between(-3, 3);
        const SomeSigns some(plan.size, plan.bytes);
        plan.signs = some.signs;
        const u64 reach = (plan.bytes - 1) * u64(std::llabs(plan.byte_stride));
        Memory src(random(9), reach + 1), dst(unit == 1 ? random(8) : 0, u64(high - low) + plan.size);
        for (u64 i = 0; i <= reach; i++) src.bytes[i] = static_cast<unsigned char>(random(256));
        plan.src = src.bytes + (plan.byte_stride < 0 ? reach : 0), plan.dst = dst.bytes - low;
        launch((plan.bytes + THREADS - 1) / THREADS, THREADS, [&] { gc_unpack_signs_strided(plan); });
        bool right = true;
        for (u64 i = 0; i < plan.elements; i++) {
            long long at = 0;
            for (u64 rest = i, k = plan.n_loops; k-- > 0; rest /= plan.loops[k].count.by) {
                at += (long long)(rest % plan.loops[k].count.by) * plan.loops[k].stride;
            }
            u64 found = 0;
            memcpy(&found, plan.dst + at, plan.size);
            right &= found == some.expected(i, plan.src[(long long)(i / 8) * plan.byte_stride] & mask(i, some.signs.order));
        }
        count("gc_unpack_signs_strided", right, plan.elements, plan.bytes, some.signs.order);
    }
}

template <typename Kernel>
static void votes_match(const char *name, Kernel vote, u64 most_voters, u64 items, unsigned rounds) {
    for (unsigned round = 0; round < rounds; round++) {
        const u64 voters = 1 + random(random(2) ? 6 : most_voters), gap = random(2) ? 0 : random(40);
        const u64 bytes = random(3) ? 1 + random(random(2) ? 70 : 600) : items + random(200), alike = random(2) * 16;
        const u64 stride = alike ? (bytes + gap + 15) / 16 * 16 : bytes + gap, offset = random(3) ? random(20) : 0;
        Memory src(alike ? offset : random(20), (voters - 1) * stride + bytes), dst(offset, bytes);
        // Near a tie, or most bits would be decided alike.
        for (u64 byte = 0; byte < stride; byte++) {
            const unsigned same = unsigned(random(256));
            for (u64 v = 0; v < voters && v * stride + byte < (voters - 1) * stride + bytes; v++) {
                src.bytes[v * stride + byte] = static_cast<unsigned char>(same ^ (v % 2 ? 255 : 0) ^ (random(256) & random(256) & random(256)));
            }
        }
        const u64 turn = random(voters);
        const bool backward = random(4) == 0;
        const unsigned char *first = backward ? src.bytes + (voters - 1) * stride : src.bytes;
        gc_vote plan = {first, dst.bytes, divisor(voters), bytes, backward ? -(long long)stride : (long long)stride, turn,
                        0, 0};
        plan.aligned = (reinterpret_cast<u64>(first) - reinterpret_cast<u64>(dst.bytes)) % 16 == 0 && stride % 16 == 0;
        launch((bytes + items - 1) / items + 1, THREADS, [&] { vote(plan); });
        bool right = true;
        for (u64 byte = 0; byte < bytes; byte++) {
            const auto has = [&](u64 v, unsigned bit) { return plan.src[(long long)v * plan.stride + (long long)byte] >> bit & 1; };
            for (unsigned bit = 0; bit < 8; bit++) {
                u64 votes = 0;
                for (u64 v = 0; v < voters; v++) votes += u64(has(v, bit));
                const bool expected = 2 * votes == voters ? has((byte + turn) % voters, bit) : 2 * votes > voters;
                right &= (dst.bytes[byte] >> bit & 1) == expected;
            }
        }
        count(name, right, voters, bytes, plan.aligned);
    }
}

// ---- The kernels of strided.cu

static gc_division division(u64 count) {
    unsigned shift = 31;
    while (1ull << (shift - 31) < count) shift++;
    return {unsigned(count), unsigned(((1ull << shift) + count - 1) / count), shift, 0};
}

enum Tiled { IN_COLUMNS, IN_TRANSPOSED, IN_JOINED, IN_ROWS, IN_STEPS };

template <typename T>
static void tiles_match(const char *name, Tiled kind, bool packing, void (*call)(gc_tiles), unsigned rounds) {
    const long long size = sizeof(T);
    const bool side_by_side = kind == IN_COLUMNS || kind == IN_TRANSPOSED || kind == IN_JOINED;
    for (unsigned round = 0; round < rounds; round++) {
        gc_tiles tiles = {};
        tiles.order = unsigned(random(2)), tiles.n_outer = unsigned(random(3)), tiles.rounds = 1;
        tiles.mode = kind == IN_JOINED ? JOINED : kind == IN_TRANSPOSED ? TRANSPOSED : COLUMNS;
        tiles.elements = 1 + random(random(2) ? 40 : 700), tiles.rows = 1 + random(random(2) ? 40 : 150);
        if (side_by_side) tiles.elements += kind == IN_COLUMNS ? 0 : 63, tiles.rows += 15;
        // The last word of a row lacks one bit: there a mask that is off by one keeps a bit of what lies behind the row.
        if (kind == IN_ROWS && random(4) == 0) tiles.elements = tiles.elements / 32 * 32 + 31;
        if (kind == IN_JOINED && tiles.rows * tiles.elements % 8) tiles.n_outer = 0;
        if (kind == IN_STEPS) tiles.elements = 1 + random(3000), tiles.rows = 1 + random(3);
        tiles.bytes = (tiles.elements + 7) / 8;
        // Rows may have more bytes than they need: zeros.
        if (!side_by_side && random(4) == 0) tiles.bytes += random(100);
        // Half of the time all is aligned, as whole vectors are.
        const bool aligned = random(2);
        const long long wide = aligned ? 32 : size, wide_byte = aligned ? 16 : 1;
        auto padded = [](long long span, long long unit) {
            return (span + unit - 1) / unit * unit + (random(2) ? (long long)random(3) * unit : 0);
        };
        long long element_span, byte_span;
        if (side_by_side) {
            tiles.row_element_stride = size, tiles.element_stride = padded(tiles.rows * size, wide);
            element_span = padded(tiles.elements * tiles.element_stride, wide);
        } else {
            tiles.element_stride = kind == IN_STEPS ? size * between(1, 3) : size;
            tiles.row_element_stride = padded(tiles.elements * tiles.element_stride, wide);
            element_span = padded(tiles.rows * tiles.row_element_stride, wide);
        }
        if (kind == IN_COLUMNS) {
            tiles.row_byte_stride = 1, tiles.byte_stride = padded(tiles.rows, wide_byte);
            byte_span = padded(tiles.bytes * tiles.byte_stride, wide_byte);
        } else if (kind == IN_JOINED) {
            byte_span = (tiles.rows * tiles.elements + 7) / 8;
        } else {
            tiles.byte_stride = 1, tiles.row_byte_stride = padded(tiles.bytes, wide_byte);
            byte_span = padded(tiles.rows * tiles.row_byte_stride, wide_byte);
        }
        // The inner one of outer loops comes last.
        u64 outer = 1;
        for (unsigned k = tiles.n_outer; k-- > 0;) {
            const u64 count = 2 + random(2);
            const bool joined = kind == IN_JOINED;
            tiles.outer[k] = {random(2) ? element_span : -element_span, joined || random(2) ? byte_span : -byte_span,
                              division(count)};
            element_span *= count, byte_span *= count, outer *= count;
        }
        if (random(2)) tiles.element_stride *= -1;
        if (random(2)) tiles.byte_stride *= kind == IN_COLUMNS ? -1 : 1;
        if (random(2)) tiles.row_element_stride *= side_by_side ? 1 : -1;
        if (random(2)) tiles.row_byte_stride *= kind == IN_COLUMNS ? 1 : -1;

        auto element_at = [&](u64 number, u64 row, u64 i) {
            long long at = (long long)row * tiles.row_element_stride + (long long)i * tiles.element_stride;
            for (unsigned k = tiles.n_outer; k-- > 0; number /= tiles.outer[k].division.count) {
                at += (long long)(number % tiles.outer[k].division.count) * tiles.outer[k].element_stride;
            }
            return at;
        };
        // Of bit i of a row.
        auto bit_at = [&](u64 number, u64 row, u64 i) {
            long long at = (long long)row * tiles.row_byte_stride + (long long)(i / 8) * tiles.byte_stride;
            if (kind == IN_JOINED) at = (long long)(row * tiles.elements + i) / 8;
            for (unsigned k = tiles.n_outer; k-- > 0; number /= tiles.outer[k].division.count) {
                at += (long long)(number % tiles.outer[k].division.count) * tiles.outer[k].byte_stride;
            }
            return std::pair<long long, unsigned>(at, unsigned(kind == IN_JOINED ? row * tiles.elements + i : i) % 8);
        };
        auto each = [&](auto visit) {
            for (u64 number = 0; number < outer; number++) {
                for (u64 row = 0; row < tiles.rows; row++) visit(number, row);
            }
        };
        // Padding of a joined row is the next row's.
        const u64 bits = kind == IN_JOINED ? tiles.elements : tiles.bytes * 8;
        long long low[2] = {0, 0}, high[2] = {0, 0};
        each([&](u64 number, u64 row) {
            auto reach = [&](int side, long long at, long long end) {
                low[side] = std::min(low[side], at), high[side] = std::max(high[side], end);
            };
            for (u64 i : {u64(0), tiles.elements - 1}) {
                reach(0, element_at(number, row, i), element_at(number, row, i) + size);
            }
            for (u64 i : {u64(0), bits - 1}) reach(1, bit_at(number, row, i).first, bit_at(number, row, i).first + 1);
        });
        const u64 n_element_bytes = u64(high[0] - low[0]), n_bytes = u64(high[1] - low[1]);
        if (side_by_side && (packing ? n_element_bytes : n_bytes) < 64) continue;
        Memory elements(aligned ? (32 - u64(-low[0]) % 32) % 32 : random(9) * size, n_element_bytes);
        Memory bytes(aligned ? (16 - u64(-low[1]) % 16) % 16 : random(17), n_bytes);
        unsigned char *element = elements.bytes - low[0], *byte = bytes.bytes - low[1];
        tiles.src = packing ? element : byte, tiles.dst = packing ? byte : element;
        tiles.begin = packing ? elements.bytes : bytes.bytes;
        tiles.end = tiles.begin + (packing ? n_element_bytes : n_bytes);
        const u64 top = 1ull << (8 * size - 1);
        const bool sign = size > 1 && random(2);
        tiles.first_zero = sign ? top + 1 : 0, tiles.span = sign ? top / 2 : 0, tiles.one = size == 1 ? 1 : top / 2 + 1;

        // What is read is random, and what is written has the pattern of fresh memory.
        std::vector<unsigned char> expected(packing ? n_bytes : n_element_bytes, 0xa5);
        if (packing) {
            for (u64 i = 0; i < n_element_bytes / size; i++) {
                const T x = some_pattern<T>();
                memcpy(elements.bytes + i * size, &x, size);
            }
        } else {
            for (u64 i = 0; i < n_bytes; i++) bytes.bytes[i] = static_cast<unsigned char>(random(256));
        }
        each([&](u64 number, u64 row) {
            for (u64 i = 0; i < (packing ? bits : tiles.elements); i++) {
                const std::pair<long long, unsigned> at = bit_at(number, row, i);
                const unsigned place = mask(at.second, tiles.order);
                unsigned char *from = element + element_at(number, row, i);
                if (!packing) {
                    const T x = byte[at.first] & place ? T(tiles.one) : T(0);
                    memcpy(&expected[from - elements.bytes], &x, size);
                    continue;
                }
                unsigned char &out = expected[byte + at.first - bytes.bytes];
                if (at.second == 0) out = 0;
                if (i >= tiles.elements) continue;
                const T x = load<T>(from);
                if (!(x >= tiles.first_zero && x <= tiles.first_zero + tiles.span)) out |= place;
            }
        });
        u64 across, along;
        if (kind == IN_COLUMNS) {
            tiles.log_width = unsigned(between(0, 8));
            across = divided_up(divided_up(tiles.rows * size + (aligned ? 0 : 16 - size), 16), 1ull << tiles.log_width);
            along = divided_up(divided_up(tiles.elements, 8), BLOCK >> tiles.log_width);
        } else if (side_by_side) {
            tiles.log_width = unsigned(between(1, 5)), tiles.rounds = 1u << random(3);
            const u64 lines = tiles.rounds * 8 << (LOG_BLOCK - tiles.log_width);
            const u64 overlap = packing && kind == IN_JOINED ? 8 : 0;
            const u64 before = packing || aligned ? 0 : 16 - size;
            across = divided_up(divided_up(tiles.rows * size + before, 16), 1ull << tiles.log_width);
            along = divided_up(tiles.elements + overlap, lines - overlap);
        } else if (kind == IN_STEPS) {
            across = divided_up(tiles.elements > tiles.bytes * 8 || !packing ? tiles.elements : tiles.bytes * 8, 8192);
            along = tiles.rows;
        } else {
            tiles.rounds = random(2) ? 1 : unsigned(between(2, 4));
            tiles.log_width = unsigned(between(tiles.rounds == 1 ? 0 : 5, 8));
            const u64 bytes_at_once = size < 4 ? 4 / size : 1;
            const u64 vectors = divided_up(tiles.elements * size + 15, 16);
            const u64 pieces = packing ? divided_up(tiles.bytes + bytes_at_once - 1, bytes_at_once) : vectors;
            across = divided_up(pieces, u64(tiles.rounds) << tiles.log_width);
            along = divided_up(tiles.rows, BLOCK >> tiles.log_width);
        }
        tiles.across = division(across), tiles.along = division(along);
        const u64 blocks = outer * across * along;
        if (blocks > 1500) continue;
        launch(blocks, BLOCK, [&] { call(tiles); });
        const bool right = memcmp(packing ? bytes.bytes : elements.bytes, expected.data(), expected.size()) == 0;
        count(name, right, tiles.elements, tiles.bytes, tiles.order);
    }
}

static __attribute__((noinline)) void own_kernels_match() {
    for (u64 n : {1, 7, 32, 33, 1000}) {
        for (unsigned order = 0; order < 2; order++) {
            Memory src(0, n * 4), bits(3, (n + 7) / 8);
            float *x = reinterpret_cast<float *>(src.bytes);
            for (u64 i = 0; i < n; i++) x[i] = random(4) ? float(random(200)) - 100 : -0.0f;
            bool right = true;
            launch((n + 95) / 96, 96, [&] {
                const u64 i = thread_number();
                gradcodec::store_bit(bits.bytes, i, n, gradcodec::sign(i < n ? x[i] : 0.0f), order);
            });
            launch((n + 95) / 96, 96, [&] {
                const u64 i = thread_number();
                if (i < n) right &= gradcodec::load_bit(bits.bytes, i, order) == !(x[i] < 0);
            });
            for (u64 i = n; i < (n + 7) / 8 * 8; i++) right &= !(bits.bytes[i / 8] & mask(i, order));
            count("store_bit and load_bit", right, n, (n + 7) / 8, order);
        }
    }
}

// Whether a 16-bit float is not below zero, by its value.
template <unsigned EXPONENT_BITS>
static bool not_below_zero(unsigned short pattern) {
    const unsigned magnitude = pattern & 0x7fff, infinity = ((1u << EXPONENT_BITS) - 1) << (15 - EXPONENT_BITS);
    return !(pattern >> 15 && magnitude != 0 && magnitude <= infinity);
}
template <typename Float, typename Pattern>
static bool float_not_below_zero(Pattern pattern) {
    Float x;
    memcpy(&x, &pattern, sizeof x);
    return !(x < 0);
}

int main(int argc, char **argv) {
    const unsigned rounds = rounds_of(argc, argv, 200);
    pack_matches<unsigned char>("gc_pack_truth_u8", gc_pack_truth_u8, [](unsigned char x) { return x != 0; }, rounds);
    pack_matches<unsigned short>("gc_pack_truth_u16", gc_pack_truth_u16, [](unsigned short x) { return x != 0; }, rounds);
    pack_matches<unsigned>("gc_pack_truth_u32", gc_pack_truth_u32, [](unsigned x) { return x != 0; }, rounds);
    pack_matches<u64>("gc_pack_truth_u64", gc_pack_truth_u64, [](u64 x) { return x != 0; }, rounds);
    pack_matches<unsigned short>("gc_pack_signs_f16", gc_pack_signs_f16, not_below_zero<5>, rounds);
    pack_matches<unsigned short>("gc_pack_signs_bf16", gc_pack_signs_bf16, not_below_zero<8>, rounds);
    pack_matches<unsigned>("gc_pack_signs_f32", gc_pack_signs_f32, float_not_below_zero<float, unsigned>, rounds);
    pack_matches<u64>("gc_pack_signs_f64", gc_pack_signs_f64, float_not_below_zero<double, u64>, rounds);
    unpack_matches<unsigned char>("gc_unpack_u8", gc_unpack_u8, 1, rounds);
    unpack_matches<unsigned short>("gc_unpack_u16", gc_unpack_u16, 0x3f80, rounds);
    unpack_matches<unsigned>("gc_unpack_u32", gc_unpack_u32, 0x3f800000, rounds);
    unpack_matches<u64>("gc_unpack_u64", gc_unpack_u64, 0x3ff0000000000000, rounds);
    strided_matches(5 * rounds);
    vast_strided_matches();
    scales_match(rounds);
    unpack_signs_matches<unsigned char>("gc_unpack_signs_u8", gc_unpack_signs_u8, rounds);
    unpack_signs_matches<unsigned short>("gc_unpack_signs_u16", gc_unpack_signs_u16, rounds);
    unpack_signs_matches<unsigned>("gc_unpack_signs_u32", gc_unpack_signs_u32, rounds);
    unpack_signs_matches<u64>("gc_unpack_signs_u64", gc_unpack_signs_u64, rounds);
    scattered_signs_match(5 * rounds);
    votes_match("gc_vote_few", gc_vote_few, 30, 4096, rounds);
    votes_match("gc_vote_many", gc_vote_many, 300, 1024, rounds / 2);
#define TILES_MATCH(kernel, kind, packing) \
    tiles_match<unsigned char>(#kernel "_u8 " #kind, kind, packing, kernel##_u8, rounds / 2); \
    tiles_match<unsigned short>(#kernel "_u16 " #kind, kind, packing, kernel##_u16, rounds / 2); \
    tiles_match<unsigned>(#kernel "_u32 " #kind, kind, packing, kernel##_u32, rounds / 2); \
    tiles_match<u64>(#kernel "_u64 " #kind, kind, packing, kernel##_u64, rounds / 2);
    TILES_MATCH(gc_pack_columns, IN_COLUMNS, true)
    TILES_MATCH(gc_pack_transposed, IN_TRANSPOSED, true)
    TILES_MATCH(gc_pack_transposed, IN_JOINED, true)
    TILES_MATCH(gc_unpack_columns, IN_COLUMNS, false)
    TILES_MATCH(gc_unpack_transposed, IN_TRANSPOSED, false)
    TILES_MATCH(gc_unpack_transposed, IN_JOINED, false)
    TILES_MATCH(gc_pack_rows, IN_ROWS, true)
    TILES_MATCH(gc_unpack_rows, IN_ROWS, false)
    TILES_MATCH(gc_pack_steps, IN_STEPS, true)
    TILES_MATCH(gc_unpack_steps, IN_STEPS, false)
    own_kernels_match();
    printf("%u cases, %u wrong\n", cases, wrong);
    return wrong != 0;
}
