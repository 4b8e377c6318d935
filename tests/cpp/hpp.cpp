/* Tests of gradcodec.hpp: ownership, default arguments, and the state after an error. A model gives the expected
 * values. calls.cpp tests how arguments are passed on. */

#include <gradcodec/gradcodec.hpp>
#include <gradcodec/gradcodec.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

using gradcodec::Error;
using gradcodec::Tensor;
using gradcodec::VersionedTensor;
using gradcodec::view;

#define HOLD(what)                                                                                                     \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #what);                                  \
            std::abort();                                                                                              \
        }                                                                                                              \
    } while (0)

/* Returns the status that a call throws; OK if it throws nothing. */
template <class Call> static gc_status_t status(Call call)
{
    try {
        call();
    } catch (const Error &error) {
        HOLD(std::strlen(error.what()) > 0);
        HOLD(std::string(error.what()) == gradcodec::last_error());
        HOLD(std::string(error.name()) == gradcodec::status_name(error.status()));
        return error.status();
    }
    return GC_STATUS_OK;
}

#ifndef OTHER_UNIT
static std::size_t news; /* calls of operator new by this program */
/* None is inlined: gcc 12 warns if it sees only one function of such a pair. */
[[gnu::noinline]] void *operator new(std::size_t size)
{
    news++;
    if (void *memory = std::malloc(size))
        return memory;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void *memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void *memory, std::size_t) noexcept { std::free(memory); }
#else /* compiled a second time into the program, to be linked with the first */
static std::size_t news;
#endif

/* Returns the bits of `n` elements, the first the highest, padded with zeros to n_chunks * chunk_bytes bytes. */
template <class Bit> static std::vector<uint8_t> model(int64_t n, std::size_t n_chunks, Bit bit)
{
    std::vector<uint8_t> bytes(n_chunks * static_cast<std::size_t>(gradcodec::chunk_bytes(n, n_chunks)));
    for (int64_t i = 0; i < n; i++)
        bytes[static_cast<std::size_t>(i / 8)] |= static_cast<uint8_t>(bit(i) << (7 - i % 8));
    return bytes;
}

static bool same(const Tensor &tensor, const uint8_t *bytes, std::size_t size)
{
    return tensor->ndim == 1 && tensor->shape[0] == static_cast<int64_t>(size) &&
           (size == 0 || std::memcmp(tensor.data<uint8_t>(), bytes, size) == 0);
}

static bool element(int64_t i) { return i % 3 == 0 || i % 7 == 2; }

static void counts(void *releases) { ++*static_cast<int *>(releases); }

static void versions()
{
    HOLD(gradcodec::version() >> 16 == GRADCODEC_VERSION_MAJOR);
    HOLD(std::strstr(gradcodec::version_string(), "0.") == gradcodec::version_string());
}

static void an_owner_releases_once()
{
    static_assert(sizeof(Tensor) == sizeof(void *) && !std::is_copy_constructible_v<Tensor>);
    static_assert(std::is_nothrow_move_constructible_v<Tensor> && std::is_nothrow_move_assignable_v<Tensor>);
    uint8_t memory[6] = {};
    int releases = 0;
    const auto make = [&] {
        return gradcodec::tensor_from_pointer(memory, gradcodec::cpu, gradcodec::dtype<uint8_t>(), {2, 3}, nullptr,
                                              counts, &releases);
    };
    {
        Tensor first = make();
        HOLD(first.data<uint8_t>() == memory && first->shape[1] == 3);
        Tensor second = std::move(first);
        HOLD(!first && second && releases == 0);
        Tensor &itself = second;
        second = std::move(itself);
        HOLD(second && releases == 0);
        second = make();
        HOLD(releases == 1);
    }
    HOLD(releases == 2);
    make().reset();
    HOLD(releases == 3);
    gradcodec::tensor_free(make());
    HOLD(releases == 4);
    Tensor handed_on = make();
    DLManagedTensor *raw = handed_on.release();
    HOLD(!handed_on && releases == 4);
    Tensor taken(raw);
    taken.reset();
    HOLD(releases == 5);

    /* A negative length: the call took nothing, so nothing is released. */
    HOLD(status([&] {
             gradcodec::tensor_from_pointer(memory, gradcodec::cpu, gradcodec::dtype<uint8_t>(), {-1}, nullptr, counts,
                                            &releases);
         }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(releases == 5);

    /* A tensor without a deleter has nothing to release. */
    DLManagedTensor bare = gradcodec::borrowed(*view(memory));
    Tensor(&bare).reset();
}

static void conversions_take_what_they_convert()
{
    float memory[6] = {};
    int releases = 0;
    const int64_t strides[] = {1, 2};
    Tensor legacy = gradcodec::tensor_from_pointer(memory, gradcodec::cpu, gradcodec::dtype<float>(), {2, 3}, strides,
                                                   counts, &releases);
    VersionedTensor versioned = gradcodec::tensor_to_versioned(std::move(legacy));
    HOLD(!legacy && versioned->data == memory && versioned->strides[1] == 2);

    versioned.get()->flags |= DLPACK_FLAG_BITMASK_READ_ONLY;
    HOLD(status([&] { gradcodec::tensor_from_versioned(std::move(versioned)); }) == GC_STATUS_READ_ONLY);
    HOLD(versioned && releases == 0);
    versioned.get()->flags = 0;

    /* The DLTensor in a versioned tensor is read like any other. */
    uint8_t bits[1][1];
    gradcodec::pack_signs_into(versioned, GC_BIT_ORDER_BIG, view(&bits[0][0], {1, 1}));
    HOLD(bits[0][0] == 0xfc);

    legacy = gradcodec::tensor_from_versioned(std::move(versioned));
    HOLD(legacy && !versioned && legacy->data == memory && releases == 0);
    versioned = gradcodec::tensor_to_versioned(std::move(legacy));
    versioned.reset();
    HOLD(releases == 1);
}

static void a_tensor_keeps_what_it_was_given()
{
    auto values = std::make_shared<std::vector<int32_t>>(100, 1);
    const std::weak_ptr<std::vector<int32_t>> watched = values;
    Tensor tensor = gradcodec::tensor_keeping(values, view(*values));
    HOLD(tensor.data<int32_t>() == values->data() && tensor->shape[0] == 100 && tensor->dtype.bits == 32);
    values.reset();
    HOLD(!watched.expired());
    tensor.reset();
    HOLD(watched.expired());
}

static void a_view_says_what_the_type_says()
{
    const std::vector<double> doubles(5);
    const auto one = view(doubles);
    HOLD(one->data == doubles.data() && one->ndim == 1 && one->shape[0] == 5 && one->strides == nullptr);
    HOLD(one->dtype.code == kDLFloat && one->dtype.bits == 64 && one->device.device_type == kDLCPU);
    const auto strided = view(doubles.data() + 4, {5}, {-1}, gradcodec::cuda(3));
    HOLD(strided->strides[0] == -1 && strided->device.device_type == kDLCUDA && strided->device.device_id == 3);
    uint16_t halves[4] = {};
    HOLD(view(halves, gradcodec::bfloat16, {2, 2})->dtype.code == kDLBfloat);
    HOLD(view(halves, gradcodec::float16, {2}, {2})->dtype.code == kDLFloat);
    void *anything = halves;
    HOLD(view(anything, gradcodec::float16, {4})->data == halves);
    HOLD(gradcodec::dtype<bool>().code == 6 && gradcodec::dtype<char16_t>().bits == 16);
    HOLD(gradcodec::dtype<signed char>().code == kDLInt && gradcodec::dtype<std::byte>().code == kDLUInt);
#ifdef __STDCPP_BFLOAT16_T__
    HOLD(gradcodec::dtype<std::bfloat16_t>().code == kDLBfloat);
#endif
#ifdef __cpp_lib_span
    const std::vector<int64_t> shape{1, 5};
    const auto spanned = view(doubles.data(), gradcodec::dtype<double>(), shape);
    HOLD(spanned->ndim == 2 && spanned->shape == shape.data() && spanned->strides == nullptr);
#endif
}

static void chunks()
{
    constexpr int64_t n = 999;
    bool mask[n];
    for (int64_t i = 0; i < n; i++)
        mask[i] = element(i);
    const std::vector<uint8_t> expected = model(n, 4, element);
    const auto size = static_cast<std::size_t>(gradcodec::chunk_bytes(n, 4));
    HOLD(size == 32);

    news = 0;
    const std::array<Tensor, 4> array = gradcodec::pack_chunks<4>(view(mask));
    const Tensor of_array = gradcodec::unpack_chunks(array, n);
    uint8_t rows[4][32];
    gradcodec::pack_chunks_into(view(mask), GC_BIT_ORDER_BIG, view(&rows[0][0], {4, 32}));
    HOLD(news == 0); /* no memory but the library's own */
    HOLD(std::memcmp(rows, expected.data(), sizeof rows) == 0);

    const std::vector<Tensor> vector = gradcodec::pack_chunks(view(mask, {27, 37}), 4);
    Tensor room[4];
    gradcodec::pack_chunks(view(mask), 4, room);
    for (std::size_t k = 0; k < 4; k++) {
        HOLD(same(array[k], &expected[k * size], size));
        HOLD(same(vector[k], &expected[k * size], size));
        HOLD(same(room[k], &expected[k * size], size));
    }
    const Tensor of_vector = gradcodec::unpack_chunks(vector, n);
    const Tensor of_room = gradcodec::unpack_chunks(room, n);
    DLManagedTensor *raw[4] = {room[0].get(), room[1].get(), room[2].get(), room[3].get()};
    const Tensor of_raw = gradcodec::unpack_chunks(raw, 4, n);
    for (const Tensor *back : {&of_array, &of_vector, &of_room, &of_raw})
        HOLD((*back)->dtype.code == 6 && same(*back, reinterpret_cast<const uint8_t *>(mask), sizeof mask));
#ifdef __cpp_lib_span
    HOLD(gradcodec::unpack_chunks(std::span<const Tensor>(vector), n)->shape[0] == n);
    std::vector<Tensor> spanned(4);
    gradcodec::pack_chunks(view(mask), std::span(spanned));
    HOLD(same(spanned[3], &expected[3 * size], size));
#endif

    double values[n];
    gradcodec::unpack_chunks_into(view(&rows[0][0], {4, 32}), GC_BIT_ORDER_BIG, view(values));
    for (int64_t i = 0; i < n; i++)
        HOLD(values[i] == (element(i) ? 1.0 : 0.0));
}

static void signs()
{
    const float infinite = std::numeric_limits<float>::infinity();
    const float values[] = {0.0f, -0.0f, 1.0f, -1.0f, std::nanf(""), infinite, -infinite, -1e-45f, 2.0f};
    uint8_t bits[1][2];
    gradcodec::pack_signs_into(view(values), GC_BIT_ORDER_BIG, view(&bits[0][0], {1, 2}));
    const std::vector<uint8_t> expected = model(9, 1, [&](int64_t i) { return !(values[i] < 0); });
    HOLD(std::memcmp(bits, expected.data(), 2) == 0);
}

static void bits_along_an_axis()
{
    const uint8_t truth[2][3] = {{1, 0, 2}, {0, 3, 0}};
    const auto source = view(&truth[0][0], {2, 3});
    HOLD(same(gradcodec::pack_bits(source), reinterpret_cast<const uint8_t *>("\xa8"), 1));
    const Tensor columns = gradcodec::pack_bits(source, 0, GC_BIT_ORDER_LITTLE);
    HOLD(columns->ndim == 2 && columns->shape[1] == 3 && std::memcmp(columns.data<char>(), "\1\2\1", 3) == 0);
    uint8_t into[3];
    gradcodec::pack_bits_into(source, 0, GC_BIT_ORDER_LITTLE, view(into, {1, 3}));
    HOLD(std::memcmp(into, "\1\2\1", 3) == 0);

    const Tensor back = gradcodec::unpack_bits(columns, 0, 2, GC_BIT_ORDER_LITTLE);
    HOLD(back->shape[0] == 2 && std::memcmp(back.data<char>(), "\1\0\1\0\1\0", 6) == 0);
    HOLD(gradcodec::unpack_bits(columns)->shape[0] == 24);
    float floats[6];
    gradcodec::unpack_bits_into(columns, 0, GC_BIT_ORDER_LITTLE, view(floats, {2, 3}));
    HOLD(floats[0] == 1 && floats[1] == 0 && floats[4] == 1);
}

/* Memory aligned to 16, as payloads, states and workspaces are. */
struct alignas(16) Block {
    uint8_t bytes[16];
};

static void a_codec_goes_there_and_back()
{
    using gradcodec::Codec;
    const int64_t sizes[] = {2, 3};
    gc_codec_options_t options = GC_CODEC_OPTIONS_INIT;
    options.codec = GC_CODEC_ONEBIT;
    options.segments = sizes;
    options.n_segments = 2;
    options.n_chunks = 1;
    options.server = 1;
    options.nonfinite = GC_NONFINITE_TRANSACTIONAL;
    Codec codec = gradcodec::codec_create(options);

    float first[2] = {1, -7}, second[3] = {2, -2, 2}, back[5] = {}, factor = 2;
    std::vector<Block> memory(static_cast<std::size_t>(gradcodec::codec_payload_bytes(codec)) / 16);
    const auto payload = view(memory[0].bytes, {static_cast<int64_t>(16 * memory.size())});
    gradcodec::codec_encode(codec, {view(first), view(second)}, nullptr, nullptr, payload);
    gradcodec::codec_decode(codec, payload, 1, nullptr, GC_DECODE_SET, {view(back, {2}), view(back + 2, {3})});
    const float sent[5] = {5, -5, 2, -2, 2};
    HOLD(std::memcmp(back, sent, sizeof sent) == 0);
    gradcodec::codec_decode(codec, payload, 2, view(&factor, {1}), GC_DECODE_ADD,
                            {view(back, {2}), view(back + 2, {3})});
    HOLD(back[1] == -10 && back[2] == 4);

    gradcodec::codec_commit(codec);

    float worker[5], server[5];
    gradcodec::codec_errors_out(codec, view(worker), view(server));
    HOLD(worker[0] == -4 && worker[1] == -2 && worker[2] == 0 && server[0] == 0);
    gradcodec::codec_reset(codec);
    gradcodec::codec_errors_in(codec, view(worker));
    gradcodec::codec_errors_out(codec, view(worker));
    HOLD(worker[0] == -4);

    static_assert(sizeof(Codec) == sizeof(void *) && !std::is_copy_constructible_v<Codec>);
    static_assert(std::is_nothrow_move_constructible_v<Codec> && std::is_nothrow_move_assignable_v<Codec>);
    Codec &itself = codec;
    codec = std::move(itself);
    HOLD(codec);
    Codec moved = std::move(codec);
    HOLD(moved && !codec && status([&] { gradcodec::codec_reset(codec); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::codec_payload_bytes(codec); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::codec_exchanges(codec); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::codec_state_bytes(codec); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::codec_encode(moved, {view(first)}, nullptr, nullptr, payload); }) ==
         GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([] { gradcodec::codec_create({}); }) == GC_STATUS_INVALID_ARGUMENT);
    codec = Codec(moved.release());
    HOLD(codec && !moved);
    codec.reset();
    gradcodec::codec_free(gradcodec::codec_create(options));
}

static void ranks_reduce_to_the_same_mean()
{
    using gradcodec::AllReduce, gradcodec::Communicator;
    std::vector<Communicator> ranks = gradcodec::comm_group(2);
    float gradients[2][2] = {{1, -7}, {5, 5}}, workers[2][2] = {}, reduced[2] = {};
    gc_codec_options_t onebit = {};
    onebit.codec = GC_CODEC_ONEBIT, onebit.n_elements = 2;
    std::vector<std::thread> threads;
    for (std::size_t k = 0; k < 2; k++)
        threads.emplace_back([&, k] {
            AllReduce allreduce = gradcodec::allreduce_create(ranks[k], onebit);
            gradcodec::allreduce_run(allreduce, {view(gradients[k])});
            HOLD(gradcodec::allreduce_shard_elements(allreduce) == (k == 0 ? 2 : 0));
            if (k == 0)
                gradcodec::allreduce_errors_out(allreduce, view(workers[k]), view(reduced));
            else
                gradcodec::allreduce_errors_out(allreduce, view(workers[k]));
        });
    for (std::thread &thread : threads)
        thread.join();
    /* Signs (+, -) of scale 5 and (+, +) of scale 5: their mean is (5, 0), whose root mean square is sent. */
    const float sent = std::sqrt(12.5f);
    for (const auto &gradient : gradients)
        HOLD(gradient[0] == sent && gradient[1] == sent);
    HOLD(workers[0][0] == -4 && workers[0][1] == -2 && workers[1][0] == 0 && reduced[0] == 5 - sent);
    gradcodec::comm_async_error(ranks[1]);

    /* A communicator of two: one node of one rank, which is flat. */
    std::vector<Communicator> inside = gradcodec::comm_group(1), between = gradcodec::comm_group(1);
    Communicator none, two = gradcodec::comm_hierarchical(inside[0], between[0]);
    inside.clear();
    between.clear();
    float gradient[2] = {3, -3};
    AllReduce of_two = gradcodec::allreduce_create(two, onebit);
    gradcodec::allreduce_run(of_two, {view(gradient)});
    HOLD(gradient[0] == 3 && gradient[1] == -3);
    HOLD(status([&] { gradcodec::comm_hierarchical(none, two); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::comm_hierarchical(two, none); }) == GC_STATUS_INVALID_ARGUMENT);

    /* NCCL need not be installed here. */
    HOLD(status([] { gradcodec::comm_from_nccl(nullptr); }) == GC_STATUS_INVALID_ARGUMENT);
    gc_codec_options_t int8 = {};
    int8.codec = GC_CODEC_INT8, int8.n_elements = 1000;
    HOLD(gradcodec::allreduce_peers_bytes(int8, 2) > 2 * 1000);
    HOLD(status([&] { gradcodec::allreduce_peers_bytes(int8, 65); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([] { gradcodec::comm_from_peers(2, {kDLCUDA, 0}, 4096, {nullptr, nullptr}); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([] { gradcodec::comm_from_nccl_id({}, 1, 1, {kDLCUDA, 0}); }) == GC_STATUS_INVALID_ARGUMENT);
    const gc_status_t id = status([] { gradcodec::comm_nccl_id(); });
    HOLD(id == GC_STATUS_OK || id == GC_STATUS_COMM_UNAVAILABLE || id == GC_STATUS_COMM);

    /* A single rank, over a transport that is never called. */
    gc_transport_t transport{};
    transport.world_size = 1;
    HOLD(status([&] { gradcodec::comm_from_transport(transport); }) == GC_STATUS_INVALID_ARGUMENT);
    transport.all_to_all = transport.all_gather =
        [](void *, const void *, void *, std::size_t, DLDevice, void *) { return int32_t{1}; };
    Communicator alone = gradcodec::comm_from_transport(transport);
    gc_codec_options_t options{};
    options.codec = GC_CODEC_ONEBIT;
    options.n_elements = 2;
    options.nonfinite = GC_NONFINITE_TRANSACTIONAL;
    AllReduce allreduce = gradcodec::allreduce_create(alone, options);
    gradcodec::comm_free(std::move(alone));
    float values[2] = {1, -7}, worker[2], server[2], both[1][2] = {{3, 4}};
    gradcodec::allreduce_run(allreduce, {view(values)});
    gradcodec::allreduce_commit(allreduce);
    HOLD(values[0] == 5 && values[1] == -5);
    gradcodec::allreduce_errors_out(allreduce, view(worker), view(server));
    HOLD(worker[0] == -4 && worker[1] == -2 && server[0] == 0);
    gradcodec::allreduce_errors_in(allreduce, view(&both[0][0], {1, 2}));
    gradcodec::allreduce_errors_out(allreduce, view(worker));
    HOLD(worker[0] == 3 && worker[1] == 4);

    AllReduce moved = std::move(allreduce);
    HOLD(moved && !allreduce);
    HOLD(status([&] { gradcodec::allreduce_reset(allreduce); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::comm_async_error(alone); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::allreduce_create(alone, options); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([] { gradcodec::comm_group(-1); }) == GC_STATUS_INVALID_ARGUMENT);
    gradcodec::allreduce_free(std::move(moved));
}

static void a_refusal_throws_and_leaves_nothing()
{
    const float floats[8] = {};
    uint8_t bytes[3];
    HOLD(status([&] { gradcodec::pack_bits(view(floats)); }) == GC_STATUS_UNSUPPORTED_DTYPE);
    HOLD(status([&] { gradcodec::pack_bits(Tensor()); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::pack_signs_into(VersionedTensor(), GC_BIT_ORDER_BIG, view(bytes, {1, 3})); }) ==
         GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::pack_signs_into(view(floats), GC_BIT_ORDER_BIG, Tensor()); }) ==
         GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::pack_signs_into(view(floats), GC_BIT_ORDER_BIG, view(bytes, {1, 3})); }) ==
         GC_STATUS_SHAPE_MISMATCH);
    HOLD(status([&] { gradcodec::pack_signs_into(view(floats), 2, view(bytes, {1, 1})); }) ==
         GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::unpack_chunks(std::vector<Tensor>(), 8); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([] { gradcodec::chunk_bytes(-1, 1); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([] { gradcodec::chunk_bytes(1, 0); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([] { gradcodec::set_threads(100000); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([] { gradcodec::builtin_kernels("bit"); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([] { gradcodec::builtin_kernel_shape("gc_unpack_u9", 90); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([] { gradcodec::builtin_kernel_shape("gc_unpack_u8", 50); }) == GC_STATUS_UNSUPPORTED_DEVICE);
    HOLD(status([] { gradcodec::prepare({kDLOpenCL, 0}); }) == GC_STATUS_UNSUPPORTED_DEVICE);
    HOLD(status([] { gradcodec::trim({kDLOpenCL, 0}); }) == GC_STATUS_UNSUPPORTED_DEVICE);
    HOLD(status([] { gradcodec::tensor_empty(gradcodec::cpu, gradcodec::bfloat16, {1, -1}); }) ==
         GC_STATUS_INVALID_ARGUMENT);
    Tensor empty;
    HOLD(status([&] { gradcodec::tensor_to_versioned(std::move(empty)); }) == GC_STATUS_INVALID_ARGUMENT);

    Tensor room[2];
    HOLD(status([&] { gradcodec::pack_chunks(view(floats), 2, room); }) == GC_STATUS_UNSUPPORTED_DTYPE);
    HOLD(!room[0] && !room[1]);
}

static void compiled_kernels()
{
    using gradcodec::scalar;
    gc_elementwise_options_t texts{};
    texts.inputs = "T x, T a", texts.outputs = "T y", texts.operation = "y = a * x";
    gradcodec::Kernel kernel = gradcodec::elementwise_create(texts);
    const float x[3] = {1, 2, 3};
    float y[3] = {};
    const double a = 2;
    gc_run_options_t there{};
    there.capability = 90;
    HOLD(gradcodec::kernel_workspace_bytes(kernel, {view(x), scalar(a)}, {view(y)}, there) == 0);
    HOLD(status([&] { gradcodec::kernel_workspace_bytes(kernel, {view(x)}, {view(y)}); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::kernel_run(kernel, {view(x), scalar(a)}, {view(y)}); }) == GC_STATUS_UNSUPPORTED_DEVICE);
    HOLD(status([&] { gradcodec::kernel_run(kernel, {view(x)}, {view(y)}); }) == GC_STATUS_INVALID_ARGUMENT);
    HOLD(status([&] { gradcodec::kernel_prepare(kernel, {view(x), scalar(a)}, {view(y, {1})}, there); }) ==
         GC_STATUS_SHAPE_MISMATCH);
    HOLD(y[0] == 0 && *gradcodec::kernel_log(kernel) == '\0');
    gradcodec::kernel_free(std::move(kernel));
    texts.operation = nullptr;
    HOLD(status([&] { gradcodec::elementwise_create(texts); }) == GC_STATUS_INVALID_ARGUMENT);

    gc_reduction_options_t sum{};
    sum.inputs = "T x", sum.outputs = "T y", sum.map = "x", sum.reduce = "a + b", sum.post_map = "y = a", sum.identity = "0";
    const gradcodec::Kernel sums = gradcodec::reduction_create(sum);
    const std::vector<float> many(1 << 20);
    const int32_t axis = 1;
    there.axes = &axis, there.n_axes = 1;
    HOLD(gradcodec::kernel_workspace_bytes(sums, {view(many.data(), {1, 1 << 20})}, {view(y, {1})}, there) > 0);
    HOLD(gradcodec::kernel_workspace_bytes(sums, {view(many.data(), {1, 100})}, {view(y, {1})}, there) == 0);
    sum.identity = nullptr, sum.reduce = nullptr;
    HOLD(status([&] { gradcodec::reduction_create(sum); }) == GC_STATUS_INVALID_ARGUMENT);
}

static void the_rest()
{
    gradcodec::prepare(gradcodec::cpu);
    gradcodec::trim(gradcodec::cpu);
    gradcodec::set_threads(1);
    gradcodec::set_threads(0);
    const std::string_view fatbin = gradcodec::builtin_kernels("bits");
    HOLD(fatbin.size() > 1000 && fatbin.substr(0, 4) == "\x50\xed\x55\xba");
    const gc_kernel_shape_t launch = gradcodec::builtin_kernel_shape("gc_unpack_u8", 90);
    HOLD(launch.threads > 0 && launch.items_per_block > 0 && launch.struct_size == sizeof launch);
    HOLD(gradcodec::capsule_destructor == &gc_capsule_destructor);
    const std::vector<int64_t> shape{3, 5};
    const std::vector<float> numbers{1.5f, -2, 300};
    std::vector<uint8_t> whole(6);
    gradcodec::copy_into(view(numbers), gradcodec::view(whole.data(), {2, 3}));
    HOLD((whole == std::vector<uint8_t>{1, 0, 255, 1, 0, 255}));
    const Tensor copy = gradcodec::tensor_to_device(view(numbers), gradcodec::cpu);
    HOLD(copy->data != numbers.data() && static_cast<const float *>(copy->data)[2] == 300);
    HOLD(status([&] { gradcodec::copy_into(view(whole), gradcodec::view(whole.data(), {3})); }) ==
         GC_STATUS_SHAPE_MISMATCH);
    HOLD(status([&] { gradcodec::tensor_to_device(view(numbers), {kDLCUDAHost, 0}); }) ==
         GC_STATUS_UNSUPPORTED_DEVICE);
    const Tensor empty = gradcodec::tensor_empty(gradcodec::cpu, gradcodec::bfloat16, shape);
    HOLD(empty->shape[1] == 5 && empty->dtype.code == kDLBfloat && empty->data != nullptr);
    HOLD(gradcodec::tensor_empty(gradcodec::cpu, gradcodec::dtype<bool>(), {})->ndim == 0);
}

int main()
{
    versions();
    an_owner_releases_once();
    conversions_take_what_they_convert();
    a_tensor_keeps_what_it_was_given();
    a_view_says_what_the_type_says();
    chunks();
    signs();
    bits_along_an_axis();
    a_codec_goes_there_and_back();
    ranks_reduce_to_the_same_mean();
    a_refusal_throws_and_leaves_nothing();
    compiled_kernels();
    the_rest();
    std::puts("hpp: ok");
    return EXIT_SUCCESS;
}
