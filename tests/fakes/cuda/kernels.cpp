// Kernels for the driver without a GPU (libcuda.c): runs the kernels of kernels/*.cu lane by lane. The look() functions
// derive from a kernel's arguments which memory a launch uses and how many blocks it needs.
#include "together.h"

#include "../../../kernels/bits.cu"
#include "../../../kernels/blocks.cu"
#include "../../../kernels/blocks_peers.cu"
#include "../../../kernels/copy.cu"
#include "../../../kernels/onebit.cu"
#include "../../../kernels/peers.cu"
#include "../../../kernels/signs.cu"
#include "kernels.h"

#include <string>
#include <unordered_map>

static u64 divide_up(u64 n, u64 by) { return (n + by - 1) / by; }

// Range of the addresses of an operand's elements, the lowest and the highest.
struct Reach {
    const unsigned char *low, *high;
    explicit Reach(const unsigned char *first) : low(first), high(first) {}
    void over(u64 count, long long stride) {
        if (count > 0) (stride < 0 ? low : high) += static_cast<long long>(count - 1) * stride;
    }
};

struct Look {
    const std::string name;
    const unsigned blocks, threads;
    Launch launch = {nullptr, {}, 0, 1, 0, 0};

    bool packs() const { return name.compare(0, 8, "gc_pack_") == 0; }
    void uses(bool is_written, const void *memory, u64 bytes, bool may_be_pinned = false) {
        if (bytes == 0) return;
        launch.ranges[launch.n_ranges++] = {static_cast<const unsigned char *>(memory), bytes, is_written, may_be_pinned};
    }
    void uses(bool is_written, const Reach &extent, u64 bytes) {
        uses(is_written, extent.low, static_cast<u64>(extent.high - extent.low) + bytes);
    }
    void takes(u64 expected) {
        if (blocks != expected) launch.fault = "more or fewer blocks than the work has";
        if (blocks > 1 << 13) launch.is_run = 0;
    }
    void scales(const gc_signs &signs, u64 elements) {
        const u64 by = signs.chunk_bytes.by;
        if (signs.scales) uses(false, signs.scales, by ? 4 * divide_up(elements, 8 * by) : 4);
    }
};

// ---- Bits

template <typename T>
static void look(Look &at, const T *src, unsigned char *dst, u64 elements, u64 bytes, unsigned) {
    at.uses(false, src, elements * sizeof(T));
    at.uses(true, dst, bytes);
    at.takes(divide_up(bytes, sizeof(T) == 1 ? 2048 : 1024));
}
template <typename T>
static void look(Look &at, const unsigned char *src, T *dst, u64 elements, u64 bytes, T, unsigned) {
    at.uses(false, src, bytes);
    at.uses(true, dst, elements * sizeof(T));
    at.takes(divide_up(elements, 8192 / sizeof(T)));
}
template <typename T>
static void look(Look &at, const unsigned char *src, T *dst, u64 elements, u64 bytes, gc_signs signs) {
    look<T>(at, src, dst, elements, bytes, T(), 0);
    at.scales(signs, elements);
}
static void look(Look &at, const gc_strided_plan &plan) {
    const bool packs = at.packs();
    Reach elements(packs ? plan.src : plan.dst), bytes(packs ? plan.dst : plan.src);
    for (unsigned k = 0; k < plan.n_line_loops; k++) {
        const gc_line_loop &loop = plan.line_loops[k];
        elements.over(loop.count.by, loop.element_stride);
        bytes.over(loop.count.by, loop.byte_stride);
    }
    elements.over(plan.elements, plan.element_stride);
    for (unsigned k = 0; k < plan.n_byte_loops; k++) bytes.over(plan.byte_loops[k].count.by, plan.byte_loops[k].stride);
    if (plan.n_byte_loops == 0) {
        bytes.low += static_cast<long long>(plan.first_byte) * plan.byte_stride;
        bytes.high += static_cast<long long>(plan.first_byte) * plan.byte_stride;
        bytes.over(plan.bytes, plan.byte_stride);
    }
    if (plan.elements) at.uses(!packs, elements, plan.size);
    if (plan.bytes) at.uses(packs, bytes, 1);
    const u64 line = packs && !plan.joined ? plan.bytes : divide_up(plan.elements, 8);
    if (plan.log_lines > 8 || plan.log_lines + plan.log_bytes > 12) at.launch.fault = "a tile that is too large";
    at.takes(divide_up(plan.lines, 1ull << plan.log_lines) * divide_up(line, 1ull << plan.log_bytes));
}

// ---- Signs and votes

static void look(Look &at, const gc_scattered_signs &plan) {
    Reach elements(plan.dst), bytes(plan.src);
    for (unsigned k = 0; k < plan.n_loops; k++) elements.over(plan.loops[k].count.by, plan.loops[k].stride);
    bytes.over(plan.bytes, plan.byte_stride);
    at.uses(true, elements, plan.size);
    if (plan.bytes) at.uses(false, bytes, 1);
    at.scales(plan.signs, plan.elements);
    at.takes(divide_up(plan.elements, 8 * 256));
}
static void look(Look &at, const gc_vote &vote) {
    const bool few = at.name == "gc_vote_few";
    Reach ballots(vote.src);
    ballots.over(vote.voters.by, vote.stride);
    at.uses(false, ballots, vote.bytes);
    at.uses(true, vote.dst, vote.bytes);
    if (vote.turn >= vote.voters.by || (few && vote.voters.by > 30)) at.launch.fault = "a vote that is none";
    at.takes(divide_up(vote.bytes, few ? 4096 : 1024) + 1);
}

// ---- Copies and peers: for written memory, only the first byte is declared

static void look(Look &at, const gc_copy &copy) {
    at.uses(false, copy.begin, static_cast<u64>(copy.end - copy.begin), true);
    at.uses(true, copy.dst, 1, true);
}
static void look(Look &at, const gc_push &push) {
    const unsigned world = push.slot.peers->world;
    at.launch.has_barrier = 1;
    at.uses(false, push.from, 16 * push.vectors + push.apart * (world - 1), true);
    if (reinterpret_cast<u64>(push.from) % 16) at.launch.fault = "vectors that are not aligned";
    at.takes(world * divide_up(push.vectors, THREADS * VECTORS));
}
static void look(Look &at, const gc_barrier &) {
    at.launch.has_barrier = 1;
    at.takes(1);
    if (at.threads != MOST_RANKS) at.launch.fault = "more or fewer threads than ranks";
}
// The blocks wait for each other, so at most the number that a GPU runs at once beside other kernels.
static void look(Look &at, const gc_one_shot &call) {
    at.launch.has_barrier = 1;
    if (at.blocks > MOST_TOGETHER || at.blocks > call.tiles) at.launch.fault = "blocks that would wait for ever, or for nothing";
}
static void look(Look &at, const gc_two_shot &call) {
    at.launch.has_barrier = 1;
    const u64 least = std::max(call.decode.tiles, call.tiles);  // one more for the headers, if it fits
    if (at.blocks > MOST_TOGETHER || at.blocks < least || at.blocks > least + 1) {
        at.launch.fault = "blocks that would wait for ever, or tiles that have none";
    }
}
static void look(Look &at, const gc_finish &call) {
    if (call.slot.peers && call.steps) at.launch.has_barrier = 1;
}
template <typename Call>
static void look(Look &, const Call &) {}  // kernels of codecs

// ---- All kernels

struct Entry {
    std::function<void(void **)> run;
    std::function<void(Look &, void **)> look;
};
template <typename... Arguments, size_t... K>
static Entry entry(void (*kernel)(Arguments...), std::index_sequence<K...>) {
    return {[kernel](void **given) { kernel(*static_cast<std::decay_t<Arguments> *>(given[K])...); },
            [](Look &at, void **given) {
                at.launch.argument_bytes = sizeof...(K) == 1 ? (sizeof(std::decay_t<Arguments>) + ...) : 0;
                look(at, *static_cast<std::decay_t<Arguments> *>(given[K])...);
            }};
}
template <typename... Arguments>
static Entry entry(void (*kernel)(Arguments...)) {
    return entry(kernel, std::index_sequence_for<Arguments...>());
}
typedef std::unordered_map<std::string, Entry> Entries;
// Not inlined, so that no caller's stack holds all entries; tests/c/stack.c measures the stack.
template <typename Kernel>
static __attribute__((noinline)) void add(Entries &entries, const char *name, Kernel *kernel) {
    entries.emplace(name, entry(kernel));
}
#define KERNEL(name) add(entries, #name, name)
#define WIDTHS(name) KERNEL(name##_u8), KERNEL(name##_u16), KERNEL(name##_u32), KERNEL(name##_u64)

static Entries all_kernels() {
    Entries entries;
    WIDTHS(gc_pack_truth), WIDTHS(gc_unpack), WIDTHS(gc_unpack_signs),
    KERNEL(gc_pack_signs_f16), KERNEL(gc_pack_signs_bf16), KERNEL(gc_pack_signs_f32), KERNEL(gc_pack_signs_f64),
    KERNEL(gc_pack_strided), KERNEL(gc_unpack_strided), KERNEL(gc_unpack_signs_strided),
    KERNEL(gc_vote_few), KERNEL(gc_vote_many),
    KERNEL(gc_onebit_encode_f32_f32), KERNEL(gc_onebit_encode_f32_bf16), KERNEL(gc_onebit_encode_f32),
    KERNEL(gc_onebit_encode_16_f32), KERNEL(gc_onebit_encode_16_bf16), KERNEL(gc_onebit_encode_16),
    KERNEL(gc_onebit_decode_u32), KERNEL(gc_onebit_decode_u16), KERNEL(gc_onebit_decode_add),
    KERNEL(gc_onebit_reduce_f32), KERNEL(gc_onebit_reduce_bf16), KERNEL(gc_onebit_reduce),
    KERNEL(gc_onebit_commit), KERNEL(gc_onebit_reset), KERNEL(gc_onebit_state_out), KERNEL(gc_onebit_check_state),
    KERNEL(gc_onebit_state_in), KERNEL(gc_onebit_errors_in), KERNEL(gc_onebit_errors_out), KERNEL(gc_onebit_addresses),
    KERNEL(gc_onebit_finish), KERNEL(gc_onebit_mean), KERNEL(gc_nodes_pack), KERNEL(gc_nodes_sum),
    KERNEL(gc_blocks_encode_f32), KERNEL(gc_blocks_encode_f32_kept), KERNEL(gc_blocks_encode_16),
    KERNEL(gc_blocks_encode_16_kept), KERNEL(gc_blocks_decode_u32), KERNEL(gc_blocks_decode_u16),
    KERNEL(gc_blocks_decode_add), KERNEL(gc_blocks_reduce), KERNEL(gc_blocks_reduce_by_lanes), KERNEL(gc_blocks_reduce_kept),
    KERNEL(gc_blocks_encode_f32_peers), KERNEL(gc_blocks_encode_f32_kept_peers), KERNEL(gc_blocks_encode_16_peers),
    KERNEL(gc_blocks_encode_16_kept_peers), KERNEL(gc_blocks_reduce_peers), KERNEL(gc_blocks_reduce_kept_peers),
    KERNEL(gc_blocks_one_shot_f32), KERNEL(gc_blocks_one_shot_16), KERNEL(gc_blocks_two_shot),
    KERNEL(gc_copy_rows_u32), KERNEL(gc_copy_rows_u64), KERNEL(gc_cast_rows),
    KERNEL(gc_copy_rows), KERNEL(gc_cast_rows_f32_bf16), KERNEL(gc_cast_rows_f32_f16), KERNEL(gc_cast_rows_bf16_f32),
    KERNEL(gc_cast_rows_f16_f32), KERNEL(gc_cast_rows_f64_f32), KERNEL(gc_cast_rows_f32_f64),
    WIDTHS(gc_copy_transposed), KERNEL(gc_copy_transposed_u128), KERNEL(gc_cast_transposed),
    KERNEL(gc_cast_transposed_f32_bf16), KERNEL(gc_cast_transposed_f32_f16),
    KERNEL(gc_cast_transposed_bf16_f32), KERNEL(gc_cast_transposed_f16_f32),
    WIDTHS(gc_copy_gathered), KERNEL(gc_copy_general), KERNEL(gc_cast_general),
    KERNEL(gc_peers_push), KERNEL(gc_peers_barrier);
    return entries;
}

static const Entry *find(const char *name) {
    static const Entries kernels = all_kernels();
    const auto found = kernels.find(name);
    return found == kernels.end() ? nullptr : &found->second;
}

void fake_hold_clock(int hold) { hold_clock(hold); }

int is_kernel(const char *name) { return find(name) != nullptr; }

Launch look_at_launch(const char *kernel, unsigned blocks, unsigned threads, void **arguments) {
    Look at = {kernel, blocks, threads};
    find(kernel)->look(at, arguments);
    return at.launch;
}

void run_kernel(const char *kernel, unsigned blocks, unsigned threads, void **arguments) {
    const Entry *found = find(kernel);
    const auto run = [=] { found->run(arguments); };
    if (strncmp(kernel, "gc_blocks_one_shot", 18) && strncmp(kernel, "gc_blocks_two_shot", 18)) launch(blocks, threads, run);
    else launch_together(blocks, threads, run);
}
