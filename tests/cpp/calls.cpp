/* Checks the arguments that gradcodec.hpp passes to the C functions; every argument has another value. Linked with a
 * library that computes nothing and records its arguments (tests/fakes/recorder). The expected lines were written from
 * gradcodec.h. `t7`: the tensor at address 7; `h1`: the first handle. */
#include <gradcodec/gradcodec.hpp>

#include <cstdio>
#include <cstdlib>
#include <string>

extern "C" const char *recorded();

namespace gc = gradcodec;

static int failed;

/* Runs `call` and checks the calls that the library recorded. */
template <class Call> static void expect(Call call, const std::string &expected)
{
    recorded();
    call();
    const std::string found = recorded();
    if (found.rfind(expected + "\n", 0) != 0) { /* frees may follow */
        std::fprintf(stderr, "calls: FAILED: expected %s\n        got      %s", expected.c_str(), found.c_str());
        failed++;
    }
}

/* Returns a handle with the value 5; no library function is called. */
template <class Handle> static Handle made() { return Handle(reinterpret_cast<decltype(Handle().get())>(5)); }

static int32_t exchange(void *, const void *, void *, size_t, DLDevice, void *) { return 0; }
static void release(void *) {}

int main()
{
    DLManagedTensor managed[20] = {};
    for (size_t i = 0; i < 20; i++)
        managed[i].dl_tensor.data = reinterpret_cast<void *>(i);
    const auto m = [&](size_t i) { return &managed[i]; };
    const auto t = [&](size_t i) { return &managed[i].dl_tensor; };
    const auto s = reinterpret_cast<void *>(7); /* a stream */
    const int64_t strides[] = {8, 9};
    DLManagedTensor *const list[] = {m(1), m(2)};
    const std::array<gc::Source, 2> sources = {t(1), t(2)};

    expect([&] { gc::version(); }, "gc_version()");
    expect([&] { gc::version_string(); }, "gc_version_string()");
    expect([&] { gc::build_info(); }, "gc_build_info()");
    expect([&] { gc::status_name(9); }, "gc_status_name(9)");
    expect([&] { gc::last_error(); }, "gc_last_error()");
    expect([&] { gc::set_threads(5); }, "gc_set_threads(5)");
    expect([&] { gc::prepare({kDLCUDA, 3}); }, "gc_prepare(2:3)");
    expect([&] { gc::trim(gc::cuda(4)); }, "gc_trim(2:4)");
    expect([&] { gc::builtin_kernels("bits"); }, "gc_builtin_kernels('bits', out, out)");
    expect([&] { gc::builtin_kernel_shape("gc_x", 90); }, "gc_builtin_kernel_shape('gc_x', 90, out)");

    expect([&] { (void)gc::tensor_empty({kDLCUDA, 3}, gc::bfloat16, {4, 5}); }, "gc_tensor_empty(2:3, 4.16.1, 2, [4 5], out)");
    expect([&] { (void)gc::tensor_from_pointer(s, {kDLCUDA, 3}, gc::float16, {4, 5}, strides, release,
                                               reinterpret_cast<void *>(6)); },
           "gc_tensor_from_pointer(0x7, 2:3, 2.16.1, 2, [4 5], [8 9], f, 0x6, out)");
    {
        float memory[20];
        recorded();
        (void)gc::tensor_keeping(5, gc::view(memory, {4, 5}, strides, gc::cuda(3)));
        const std::string found = recorded();
        if (found.find(", 2:3, 2.32.1, 2, [4 5], [8 9], f, 0x") == std::string::npos)
            std::fprintf(stderr, "calls: FAILED: tensor_keeping: %s", found.c_str()), failed++;
    }
    expect([&] { gc::Tensor one(m(1)); (void)gc::tensor_to_versioned(std::move(one)); }, "gc_tensor_to_versioned(t1, out)");
    expect([&] { gc::Tensor one(m(1)); one.reset(m(2)); }, "gc_tensor_free(t1)\ngc_tensor_free(t2)");
    expect([&] { (void)gc::tensor_to_device(m(1), {kDLCUDA, 3}); }, "gc_tensor_to_device(t1, 2:3, out)");
    expect([&] { gc::copy_into(t(1), t(2), s); }, "gc_copy_into(t1, t2, 0x7)");

    expect([&] { gc::chunk_bytes(11, 7); }, "gc_chunk_bytes(11, 7)");
    expect([&] { gc::pack_chunks(m(1), 3); }, "gc_pack_chunks(t1, 3, out)");
    expect([&] { gc::pack_chunks<2>(m(1)); }, "gc_pack_chunks(t1, 2, out)");
    expect([&] { (void)gc::unpack_chunks(list, 2, 9); }, "gc_unpack_chunks([t1 t2], 2, 9, out)");
    expect([&] { (void)gc::pack_bits(m(1), 5, 1); }, "gc_pack_bits(t1, 5, 1, out)");
    expect([&] { (void)gc::unpack_bits(m(1), 5, 6, 1); }, "gc_unpack_bits(t1, 5, 6, 1, out)");
    expect([&] { gc::pack_chunks_into(t(1), 1, t(2), s); }, "gc_pack_chunks_into(t1, 1, t2, 0x7)");
    expect([&] { gc::unpack_chunks_into(t(1), 1, t(2), s); }, "gc_unpack_chunks_into(t1, 1, t2, 0x7)");
    expect([&] { gc::pack_bits_into(t(1), 5, 1, t(2), s); }, "gc_pack_bits_into(t1, 5, 1, t2, 0x7)");
    expect([&] { gc::unpack_bits_into(t(1), 5, 1, t(2), s); }, "gc_unpack_bits_into(t1, 5, 1, t2, 0x7)");

    expect([&] { gc::pack_signs(m(1), 3); }, "gc_pack_signs(t1, 3, out)");
    expect([&] { gc::pack_signs<2>(m(1)); }, "gc_pack_signs(t1, 2, out)");
    expect([&] { (void)gc::unpack_signs(list, 2, 9, gc::float16); }, "gc_unpack_signs([t1 t2], 2, 9, 2.16.1, out)");
    expect([&] { gc::pack_signs_into(t(1), 1, t(2), s); }, "gc_pack_signs_into(t1, 1, t2, 0x7)");
    expect([&] { gc::unpack_signs_into(t(1), 1, t(2), s); }, "gc_unpack_signs_into(t1, NULL, 1, t2, 0x7)");
    expect([&] { gc::unpack_signs_into(t(1), t(3), 1, t(2), s); }, "gc_unpack_signs_into(t1, t3, 1, t2, 0x7)");
    expect([&] { gc::vote_signs_into(t(1), 6, t(2), s); }, "gc_vote_signs_into(t1, 6, t2, 0x7)");

    const int64_t segments[] = {8, 9};
    gc_codec_options_t options = {};
    options.codec = 2, options.device = {kDLCUDA, 3}, options.values = gc::float16, options.results = gc::bfloat16;
    options.error = 1, options.scale = 1, options.nonfinite = 2, options.beta = 0.75f;
    options.segments = segments, options.n_segments = 2, options.n_elements = 17, options.n_chunks = 4, options.server = 5;
    const uint8_t raw[] = {0, 6};
    options.raw = raw, options.reduction = 1;
    const std::string of_options = "{codec=2 device=2:3 values=2.16.1 results=4.16.1 error=1 scale=1 nonfinite=2 beta=0.75 "
                                   "segments=[8 9] n_segments=2 n_elements=17 n_chunks=4 server=5 raw=[0 6] reduction=1}";
    expect([&] { gc::encode(m(1), 5); }, "gc_encode(t1, 5, out)");
    expect([&] { gc::decode(m(1), gc::float16); }, "gc_decode(t1, 2.16.1, out)");
    expect([&] { gc::codec_create(options); }, "gc_codec_create(" + of_options + ", out)");
    auto codec = made<gc::Codec>();
    expect([&] { gc::codec_payload_bytes(codec); }, "gc_codec_payload_bytes(h5)");
    expect([&] { gc::codec_exchanges(codec); }, "gc_codec_exchanges(h5)");
    expect([&] { gc::codec_encode(codec, sources, t(3), t(4), t(5), s); }, "gc_codec_encode(h5, [t1 t2], 2, t3, t4, t5, 0x7)");
    expect([&] { gc::codec_decode(codec, t(1), 6, t(4), 1, {t(2), t(3)}, s); },
           "gc_codec_decode(h5, t1, 6, t4, 1, [t2 t3], 2, 0x7)");
    expect([&] { gc::codec_reduce(codec, 6, t(1), t(2), s); }, "gc_codec_reduce(h5, 6, t1, t2, 0x7)");
    expect([&] { gc::codec_flags(codec, t(1), s); }, "gc_codec_flags(h5, t1, 0x7)");
    expect([&] { gc::codec_scales(codec, t(1), s); }, "gc_codec_scales(h5, t1, 0x7)");
    expect([&] { gc::codec_commit(codec, t(1), s); }, "gc_codec_commit(h5, t1, 0x7)");
    expect([&] { gc::codec_rollback(codec, s); }, "gc_codec_rollback(h5, 0x7)");
    expect([&] { gc::codec_reset(codec, s); }, "gc_codec_reset(h5, 0x7)");
    expect([&] { gc::codec_state_bytes(codec); }, "gc_codec_state_bytes(h5)");
    expect([&] { gc::codec_state_out(codec, t(1), s); }, "gc_codec_state_out(h5, t1, 0x7)");
    expect([&] { gc::codec_state_in(codec, t(1), s); }, "gc_codec_state_in(h5, t1, 0x7)");
    expect([&] { gc::codec_errors_out(codec, t(1), t(2), s); }, "gc_codec_errors_out(h5, t1, t2, 0x7)");
    expect([&] { gc::codec_errors_in(codec, t(1), t(2), s); }, "gc_codec_errors_in(h5, t1, t2, 0x7)");
    expect([&] { gc::codec_free(std::move(codec)); }, "gc_codec_free(h5)");

    expect([&] { gc::share_send(m(1), 5, 6, 70); }, "gc_share_send(t1, 5, 6, 70, out)");
    auto share = made<gc::Share>();
    expect([&] { gc::share_wait(share, 6); }, "gc_share_wait(h5, 6)");
    expect([&] { gc::share_free(std::move(share)); }, "gc_share_free(h5)");
    expect([&] { (void)gc::share_receive(5, {kDLCUDA, 3}, 70); }, "gc_share_receive(5, 2:3, 70, out)");

    const char *const texts[] = {"x", "y"};
    gc_elementwise_options_t elementwise = {};
    elementwise.flags = 3, elementwise.inputs = "i", elementwise.options = texts, elementwise.n_options = 2;
    expect([&] { gc::elementwise_create(elementwise); },
           "gc_elementwise_create({flags=3 inputs='i' options=['x' 'y'] n_options=2}, out)");
    gc_reduction_options_t reduction = {};
    reduction.flags = 3, reduction.map = "m", reduction.nvrtc = reinterpret_cast<void *>(9);
    expect([&] { gc::reduction_create(reduction); }, "gc_reduction_create({flags=3 map='m' nvrtc=0x9}, out)");
    auto kernel = made<gc::Kernel>();
    const int32_t axes[] = {5, 6};
    gc_run_options_t run = {};
    run.flags = 1, run.size = 8, run.axes = axes, run.n_axes = 2, run.workspace = t(4), run.capability = 9;
    const std::string of_run = "{flags=1 size=8 axes=[5 6] n_axes=2 workspace=t4 capability=9}";
    expect([&] { gc::kernel_run(kernel, sources, {t(3)}, run, s); },
           "gc_kernel_run(h5, [t1 t2], 2, [t3], 1, " + of_run + ", 0x7)");
    expect([&] { gc::kernel_prepare(kernel, sources, {t(3)}, run, s); },
           "gc_kernel_prepare(h5, [t1 t2], 2, [t3], 1, " + of_run + ", 0x7)");
    expect([&] { gc::kernel_workspace_bytes(kernel, sources, {t(3)}, run); },
           "gc_kernel_workspace_bytes(h5, [t1 t2], 2, [t3], 1, " + of_run + ")");
    expect([&] { gc::kernel_log(kernel); }, "gc_kernel_log(h5, out)");
    expect([&] { gc::kernel_free(std::move(kernel)); }, "gc_kernel_free(h5)");

    gc_transport_t transport = {};
    transport.rank = 2, transport.world_size = 5, transport.flags = 1, transport.ctx = s;
    transport.all_to_all = transport.all_gather = exchange;
    expect([&] { gc::comm_from_transport(transport); },
           "gc_comm_from_transport({rank=2 world_size=5 flags=1 ctx=0x7 all_to_all=f all_gather=f}, out)");
    expect([&] { gc::comm_group(3); }, "gc_comm_group(3, out)");
    expect([&] { gc::comm_from_nccl(s, 5, reinterpret_cast<void *>(6)); },
           "gc_comm_from_nccl({flags=5 comm=0x7 dl_handle=0x6}, out)");
    expect([&] { gc::comm_nccl_id(s); }, "gc_comm_nccl_id({dl_handle=0x7}, out)");
    std::array<uint8_t, 128> id{};
    id.front() = 3, id.back() = 4;
    expect([&] { gc::comm_from_nccl_id(id, 5, 8, {kDLCUDA, 6}, s); },
           "gc_comm_from_nccl_id({dl_handle=0x7}, 3-4, 5, 8, 2:6, out)");
    expect([&] { gc::allreduce_peers_bytes(options, 7); }, "gc_allreduce_peers_bytes(" + of_options + ", 7, 1)");
    expect([&] { gc::comm_from_peers(1, {kDLCUDA, 6}, 500, {s, s}, 70); },
           "gc_comm_from_peers({rank=1 world_size=2 timeout_ms=70 device=2:6 bytes=500 buffers=[0x7 0x7]}, out)");
    auto comm = made<gc::Communicator>();
    gc::Communicator between(reinterpret_cast<gc_comm_t *>(6));
    expect([&] { gc::comm_open_peers(comm, {kDLCUDA, 3}, 50, 60); }, "gc_comm_open_peers(h5, 2:3, 50, 60, out)");
    expect([&] { gc::comm_hierarchical(comm, between); }, "gc_comm_hierarchical(h5, h6, out)");
    expect([&] { gc::comm_rank(comm); }, "gc_comm_rank(h5)");
    expect([&] { gc::comm_world_size(comm); }, "gc_comm_world_size(h5)");
    expect([&] { gc::comm_async_error(comm); }, "gc_comm_async_error(h5)");
    expect([&] { gc::comm_abort(comm); }, "gc_comm_abort(h5)");

    expect([&] { gc::allreduce_create(comm, options); }, "gc_allreduce_create(h5, " + of_options + ", out)");
    auto allreduce = made<gc::AllReduce>();
    expect([&] { gc::allreduce_shard_elements(allreduce); }, "gc_allreduce_shard_elements(h5)");
    expect([&] { gc::allreduce_sent_bytes(allreduce); }, "gc_allreduce_sent_bytes(h5, out)");
    expect([&] { gc::allreduce_exchanges(allreduce); }, "gc_allreduce_exchanges(h5)");
    expect([&] { gc::allreduce_parts(allreduce, 6, 1); },
           "gc_allreduce_parts(h5, 6, 1, out, 0)\ngc_allreduce_parts(h5, 6, 1, out, 77)");
    expect([&] { gc::allreduce_run(allreduce, {t(1), t(2)}, t(3), t(4), s); },
           "gc_allreduce_run(h5, [t1 t2], 2, t3, t4, 0x7)");
    expect([&] { gc::allreduce_reduce_scatter(allreduce, sources, t(3), t(4), t(5), s); },
           "gc_allreduce_reduce_scatter(h5, [t1 t2], 2, t3, t4, t5, 0x7)");
    expect([&] { gc::allreduce_all_gather(allreduce, t(1), {t(2), t(3)}, s); },
           "gc_allreduce_all_gather(h5, t1, [t2 t3], 2, 0x7)");
    expect([&] { gc::allreduce_flags(allreduce, t(1), s); }, "gc_allreduce_flags(h5, t1, 0x7)");
    expect([&] { gc::allreduce_commit(allreduce, t(1), s); }, "gc_allreduce_commit(h5, t1, 0x7)");
    expect([&] { gc::allreduce_rollback(allreduce, s); }, "gc_allreduce_rollback(h5, 0x7)");
    expect([&] { gc::allreduce_reset(allreduce, s); }, "gc_allreduce_reset(h5, 0x7)");
    expect([&] { gc::allreduce_errors_out(allreduce, t(1), t(2), s); }, "gc_allreduce_errors_out(h5, t1, t2, 0x7)");
    expect([&] { gc::allreduce_errors_in(allreduce, t(1), t(2), s); }, "gc_allreduce_errors_in(h5, t1, t2, 0x7)");
    expect([&] { gc::allreduce_free(std::move(allreduce)); }, "gc_allreduce_free(h5)");
    expect([&] { gc::comm_free(std::move(comm)); }, "gc_comm_free(h5)");

    if (failed != 0)
        return 1;
    std::puts("calls: ok");
    return 0;
}
