/* Gives test_c10d.py functions of gradcodec/c10d.hpp: all-reduces over a group, groups that fail, and streams. */

#include <gradcodec/c10d.hpp>
#include <gradcodec/c10d.hpp>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int STEPS = 3;

gc_codec_options_t onebit()
{
    gc_codec_options_t options{};
    options.codec = GC_CODEC_ONEBIT;
    return options;
}

/* Returns the number of elements in a rank's shard. The bits of each tensor begin at a new byte. */
int64_t shard_of(const Tensors &tensors, int64_t rank, int64_t world)
{
    int64_t bits = 0, count = 0;
    for (const Tensor &tensor : tensors)
        bits += (tensor.numel() + 7) / 8 * 8;
    const int64_t shard = (bits / 8 + world - 1) / world * 8;
    bits = 0;
    for (const Tensor &tensor : tensors) {
        const int64_t first = std::max(bits, rank * shard), end = std::min(bits + tensor.numel(), (rank + 1) * shard);
        count += std::max<int64_t>(end - first, 0);
        bits += (tensor.numel() + 7) / 8 * 8;
    }
    return count;
}

/* Checks that a call increases a tensor's version: a backward pass that saved the tensor must notice the write. */
template <class Call> void counted(const Tensor &written, Call call)
{
    const auto before = written._version();
    call();
    TORCH_CHECK(written._version() == before + 1, "a tensor was written to, and its version is as before");
}

/* Runs the steps of one rank. Returns the means and the handle's errors after each step. */
template <class Comm> Tensors steps(Comm &comm, int64_t rank, int64_t world, const Tensors &gradients)
{
    auto allreduce = gradcodec::allreduce_create(comm, gradients, onebit());
    int64_t elements = 0;
    for (const Tensor &gradient : gradients)
        elements += gradient.numel();
    Tensors out;
    for (int step = 0; step < STEPS; step++) {
        for (const Tensor &gradient : gradients)
            out.push_back(gradient * (step + 1));
        counted(out.back(), [&] {
            gradcodec::allreduce_run(allreduce, at::TensorList(out).slice(out.size() - gradients.size()));
        });
        const Tensor worker = at::zeros({elements}), server = at::zeros({shard_of(gradients, rank, world)});
        DLTensor worker_view = gradcodec::view_to_write(worker), server_view = gradcodec::view_to_write(server);
        gradcodec::allreduce_errors_out(allreduce, worker_view, server_view);
        out.insert(out.end(), {worker, server});
    }
    /* The two halves must give the first step's result, as a new handle has no errors yet. */
    auto halves = gradcodec::allreduce_create(comm, gradients, onebit());
    const Tensor mean = at::zeros({shard_of(gradients, rank, world)});
    Tensors values;
    for (const Tensor &gradient : gradients)
        values.push_back(gradient.clone());
    counted(mean, [&] { gradcodec::allreduce_reduce_scatter(halves, values, mean); });
    counted(values.back(), [&] { gradcodec::allreduce_all_gather(halves, mean, values); });
    for (std::size_t i = 0; i < values.size(); i++)
        TORCH_CHECK(at::equal(values[i], out[i]), "the halves make another tensor ", i);
    gradcodec::comm_async_error(comm);
    return out;
}

Tensors over_group(const std::string &name, const Tensors &gradients)
{
    const auto group = c10d::resolve_process_group(name);
    auto comm = gradcodec::comm_from_process_group(group);
    return steps(comm, group->getRank(), group->getSize(), gradients);
}

Tensors over_backend(const std::string &name, const Tensors &gradients)
{
    const auto backend = c10d::resolve_process_group(name)->getDefaultBackend();
    auto comm = gradcodec::comm_from_process_group(backend);
    return steps(comm, backend->getRank(), backend->getSize(), gradients);
}

/* Runs a world in one process. `gradients` are the tensors of all ranks, rank by rank; so are the results. */
Tensors in_one_process(int64_t world, const Tensors &gradients)
{
    const auto ranks = static_cast<std::size_t>(world), count = gradients.size() / ranks;
    std::vector<gradcodec::Communicator> group = gradcodec::comm_group(static_cast<int32_t>(world));
    std::vector<Tensors> results(ranks);
    std::exception_ptr failure;
    std::once_flag failed;
    std::vector<std::thread> threads;
    for (std::size_t k = 0; k < ranks; k++)
        threads.emplace_back([&, k] {
            try {
                const auto first = gradients.begin() + static_cast<std::ptrdiff_t>(k * count);
                const Tensors mine(first, first + static_cast<std::ptrdiff_t>(count));
                results[k] = steps(group[k], static_cast<int64_t>(k), world, mine);
            } catch (...) {
                std::call_once(failed, [&] { failure = std::current_exception(); });
                group[k] = {}; /* or the other ranks would wait for this one */
            }
        });
    for (std::thread &thread : threads)
        thread.join();
    if (failure)
        std::rethrow_exception(failure);
    Tensors all;
    for (const Tensors &of_a_rank : results)
        all.insert(all.end(), of_a_rank.begin(), of_a_rank.end());
    return all;
}

/* Runs a reduce-scatter in a world of one rank, to test the checks of its tensors. */
void reduce_scatter(const Tensors &values, const Tensor &shard)
{
    std::vector<gradcodec::Communicator> group = gradcodec::comm_group(1);
    auto allreduce = gradcodec::allreduce_create(group[0], values, onebit());
    gradcodec::allreduce_reduce_scatter(allreduce, values, shard);
}

/* Runs a handle after its communicator was released and both were moved. The group must end with the handle. */
Tensors outlived(const std::string &name, const Tensors &gradients)
{
    const auto group = c10d::resolve_process_group(name);
    const auto users = group.use_count();
    Tensors out;
    {
        gradcodec::GroupAllReduce allreduce;
        {
            auto made = gradcodec::comm_from_process_group(group);
            gradcodec::GroupCommunicator comm(std::move(made));
            auto handle = gradcodec::allreduce_create(comm, gradients, onebit());
            comm = gradcodec::comm_from_process_group(group); /* releases the communicator before */
            allreduce = std::move(handle);
        }
        TORCH_CHECK(group.use_count() == users + 1, "the handle keeps the group ", group.use_count() - users, " times");
        for (const Tensor &gradient : gradients)
            out.push_back(gradient.clone());
        gradcodec::allreduce_run(allreduce, out);
    }
    TORCH_CHECK(group.use_count() == users, "something still keeps the group");
    return out;
}

/* A group of two ranks without a second rank. It has torch's newer and older names of the collectives. */
class Fake : public c10d::Backend {
public:
    Fake() : Backend(0, 2) {}
    virtual c10::intrusive_ptr<c10d::Work> exchange(const Tensor &to, const Tensor &from, bool asynchronous) = 0;

    using Work = c10::intrusive_ptr<c10d::Work>;
    using Sizes = std::vector<int64_t>;
    Work all_to_all_single(Tensor &to, Tensor &from, Sizes &, Sizes &, const c10d::AllToAllOptions &options)
    {
        return exchange(to, from, options.asyncOp);
    }
    Work alltoall_base(Tensor &to, Tensor &from, Sizes &, Sizes &, const c10d::AllToAllOptions &options)
    {
        return exchange(to, from, options.asyncOp);
    }
    Work all_gather_single(Tensor &to, Tensor &from, const c10d::AllgatherOptions &options)
    {
        return exchange(to, from, options.asyncOp);
    }
    Work _allgather_base(Tensor &to, Tensor &from, const c10d::AllgatherOptions &options)
    {
        return exchange(to, from, options.asyncOp);
    }
};

class FailedWork : public c10d::Work {
public:
    explicit FailedWork(bool throws) : throws_(throws) {}
    bool wait(std::chrono::milliseconds) override
    {
        TORCH_CHECK(!throws_, "the cable is cut");
        return false;
    }

private:
    bool throws_;
};

class Failing : public Fake {
public:
    explicit Failing(std::string how) : how_(std::move(how)) {}
    const std::string getBackendName() const override { return "failing"; }
    Work exchange(const Tensor &, const Tensor &, bool) override
    {
        TORCH_CHECK(how_ != "torch", "the cable is cut");
        if (how_ == "standard")
            throw std::runtime_error("the cable is cut");
        if (how_ == "other")
            throw 7;
        return c10::make_intrusive<FailedWork>(how_ == "late");
    }

private:
    std::string how_;
};

/* Returns, for a group that fails, the status and message of the C function, the status that the communicator
 * reports later, and the message of the function on tensors. */
std::tuple<int64_t, std::string, int64_t, std::string> failure(const std::string &how)
{
    auto comm = gradcodec::comm_from_process_group(c10::make_intrusive<Failing>(how));
    gc_codec_options_t options = onebit();
    options.struct_size = sizeof options;
    options.n_elements = 100;
    gc_allreduce_t *allreduce = nullptr;
    const gc_status_t status = gc_allreduce_create(comm.get(), &options, &allreduce);
    const std::string sentence = gc_last_error();
    const gc_status_t later = gc_comm_async_error(comm.get());
    std::string thrown;
    try {
        gradcodec::allreduce_create(comm, at::ones({100}), onebit());
    } catch (const c10::Error &error) {
        thrown = error.what_without_backtrace();
    }
    TORCH_CHECK(allreduce == nullptr, "a failed call has made a handle");
    return {status, sentence, later, thrown};
}

/* Streams of a GPU that does not exist. As in torch, the number of an external stream is its handle; torch's own
 * streams have odd numbers. */
struct Streams final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return c10::kCUDA; }
    c10::Device exchangeDevice(c10::Device device) const override { return std::exchange(device_, device); }
    c10::Device getDevice() const override { return device_; }
    void setDevice(c10::Device device) const override { device_ = device; }
    void uncheckedSetDevice(c10::Device device) const noexcept override { device_ = device; }
    c10::Stream getStream(c10::Device) const override { return stream_; }
    c10::Stream exchangeStream(c10::Stream stream) const override { return std::exchange(stream_, stream); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void *getStreamNativeHandle(const c10::Stream stream) const override
    {
        return reinterpret_cast<void *>(stream.id() % 2 == 0 ? stream.id() : 1000 + stream.id());
    }

    mutable c10::Device device_{c10::kCUDA, 0};
    mutable c10::Stream stream_ = c10::Stream::unpack3(1, 0, c10::kCUDA);
};

class Recording : public Fake {
public:
    const std::string getBackendName() const override { return "nccl"; }
    Work exchange(const Tensor &to, const Tensor &from, bool asynchronous) override
    {
        const c10::Stream stream = c10::impl::getDeviceGuardImpl(c10::kCUDA)->getStream(to.device());
        seen = {reinterpret_cast<int64_t>(to.data_ptr()), reinterpret_cast<int64_t>(from.data_ptr()), to.numel(),
                from.numel(), to.is_cuda() && from.is_cuda(), asynchronous, stream.id()};
        return {};
    }
    std::vector<int64_t> seen;
};

/* Calls a transport's function with memory of a GPU and `stream`. Returns what the group received, the status, the
 * transport's flags, and the number of the stream that is current afterwards. */
std::vector<int64_t> on_stream(int64_t stream, bool gather)
{
    static Streams *const streams = [] { /* torch keeps the guard, so it is never freed */
        auto *made = new Streams;
        c10::impl::registerDeviceGuard(c10::kCUDA, made);
        return made;
    }();
    const auto group = c10::make_intrusive<Recording>();
    gradcodec::detail::GroupTransport<c10d::Backend> over(group);
    const gc_transport_t transport = over.functions();
    const auto exchange = gather ? transport.all_gather : transport.all_to_all;
    const int32_t code = exchange(transport.ctx, reinterpret_cast<void *>(4096), reinterpret_cast<void *>(8192), 48,
                                  {kDLCUDA, 0}, reinterpret_cast<void *>(stream));
    std::vector<int64_t> seen = group->seen;
    seen.insert(seen.end(), {code, transport.flags, streams->stream_.id()});
    return seen;
}

} // namespace

TORCH_LIBRARY(gradcodec_c10d, m)
{
    m.def("over_group", [](const std::string &name, const Tensors &gradients) { return over_group(name, gradients); });
    m.def("over_backend",
          [](const std::string &name, const Tensors &gradients) { return over_backend(name, gradients); });
    m.def("in_one_process", [](int64_t world, const Tensors &gradients) { return in_one_process(world, gradients); });
    m.def("reduce_scatter", [](const Tensors &values, const Tensor &shard) { reduce_scatter(values, shard); });
    m.def("outlived", [](const std::string &name, const Tensors &gradients) { return outlived(name, gradients); });
    m.def("failure", [](const std::string &how) { return failure(how); });
    m.def("on_stream", [](int64_t stream, bool gather) { return on_stream(stream, gather); });
}
