/*
 * A communicator of gradcodec.h over a process group of torch.distributed (c10d): gloo, NCCL or any other.
 *
 *     #include <gradcodec/c10d.hpp>
 *
 *     auto comm = gradcodec::comm_from_process_group(group);                             // on every rank
 *     auto allreduce = gradcodec::allreduce_create(comm, gradients, options);
 *     gradcodec::allreduce_run(allreduce, gradients);                                    // each step: to their mean
 *
 * `group` is a c10::intrusive_ptr of a c10d::ProcessGroup or a c10d::Backend. c10d::resolve_process_group(name) returns
 * a group that was made in Python. examples_cpp/ddp.cpp is a complete program.
 *
 * MEMORY. NCCL exchanges GPU memory, on the stream of the call, and the host does not wait. All others exchange host
 * memory: GPU tensors are copied through it, and a call waits for its stream. A group with NCCL for GPUs and gloo for
 * the CPU, as init_process_group() makes on request, exchanges both without such copies.
 *
 * Exchanges are collectives of the group like any others: all ranks must make them in the same order, and they wait
 * until the group's timeout. A group of their own (new_group() in Python) keeps them apart from others.
 *
 * No exception passes through the library. If a group throws, its callback returns 1, which gc_last_error() names, and
 * the status is GC_STATUS_COMM; functions that take at::Tensor throw with torch's message.
 *
 * The group stays as long as its communicator and the handles over it. Release these (`comm = {}`) before
 * destroy_process_group(). A group of NCCL alone sends a new handle's few bytes through memory of the current device:
 * call set_device() before.
 *
 * NEEDS what gradcodec/torch.hpp does, which it includes, and a torch that was built with torch.distributed.
 */
#ifndef GRADCODEC_C10D_HPP
#define GRADCODEC_C10D_HPP

#include "torch.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradcodec {
namespace detail {

/* True if a group has the new names of two collectives, whose old names torch deprecates. */
template <class Group, class = void> struct Renamed : std::false_type {};
template <class Group>
struct Renamed<Group, std::void_t<decltype(&Group::all_gather_single), decltype(&Group::all_to_all_single)>>
    : std::true_type {};

/* Memory that a group exchanges: of GPUs, of the host. */
struct Takes {
    bool gpus, host;
};
inline Takes takes(const std::string &backend)
{
    const bool nccl = backend.find("nccl") != std::string::npos;
    return {nccl, !nccl};
}
inline Takes takes(c10d::Backend &group) { return takes(group.getBackendName()); }
inline Takes takes(c10d::ProcessGroup &group)
{
    Takes all{false, false};
    for (const c10::Device device : group.getDeviceTypes()) {
        all.host = all.host || device.is_cpu();
        all.gpus = all.gpus || (device.is_cuda() && takes(group.getBackend(c10::kCUDA)->getBackendName()).gpus);
    }
    if (!all.gpus && !all.host) /* a group made in Python, without backends */
        return takes(group.getBackendName());
    return all;
}

/* Returns the stream of a handle, which may be none of torch's. */
inline c10::Stream stream_of(c10::Device device, void *handle)
{
    const c10::Stream current = c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
    if (current.native_handle() == handle)
        return current;
    /* torch uses the handle of a foreign stream as its id. That is not documented, so check it. */
    const c10::Stream other =
        c10::Stream::unpack3(reinterpret_cast<c10::StreamId>(handle), device.index(), device.type());
    TORCH_CHECK(other.native_handle() == handle, "stream: torch cannot make it the current one of ", device);
    return other;
}

/* Object that the library's callbacks use. It must not move until the last handle over it is released. */
template <class Group> class GroupTransport {
public:
    explicit GroupTransport(c10::intrusive_ptr<Group> group)
        : group_(std::move(group)), takes_(takes(*group_)), rank_(group_->getRank()), size_(group_->getSize()) {}
    GroupTransport(const GroupTransport &) = delete;
    GroupTransport &operator=(const GroupTransport &) = delete;

    gc_transport_t functions() noexcept
    {
        gc_transport_t transport{};
        transport.struct_size = sizeof transport;
        transport.rank = rank_;
        transport.world_size = size_;
        transport.flags = takes_.gpus ? 0 : GC_TRANSPORT_HOST;
        transport.ctx = this;
        transport.all_to_all = [](void *ctx, const void *send, void *recv, size_t bytes, DLDevice device,
                                  void *stream) noexcept {
            auto &self = *static_cast<GroupTransport *>(ctx);
            return self.exchange(self.size_, send, recv, bytes, device, stream, &GroupTransport::all_to_all);
        };
        transport.all_gather = [](void *ctx, const void *send, void *recv, size_t bytes, DLDevice device,
                                  void *stream) noexcept {
            auto &self = *static_cast<GroupTransport *>(ctx);
            return self.exchange(1, send, recv, bytes, device, stream, &GroupTransport::all_gather);
        };
        return transport;
    }

private:
    using Collective = c10::intrusive_ptr<c10d::Work> (GroupTransport::*)(at::Tensor &recv, at::Tensor &send);

    /* Not asynchronous: NCCL then works on the current stream. */
    c10::intrusive_ptr<c10d::Work> all_to_all(at::Tensor &recv, at::Tensor &send)
    {
        c10d::AllToAllOptions options;
        options.asyncOp = false;
        std::vector<int64_t> same, parts; /* empty: equal parts */
        if constexpr (Renamed<Group>::value)
            return group_->all_to_all_single(recv, send, same, parts, options);
        else
            return group_->alltoall_base(recv, send, same, parts, options);
    }
    c10::intrusive_ptr<c10d::Work> all_gather(at::Tensor &recv, at::Tensor &send)
    {
        c10d::AllgatherOptions options;
        options.asyncOp = false;
        if constexpr (Renamed<Group>::value)
            return group_->all_gather_single(recv, send, options);
        else
            return group_->_allgather_base(recv, send, options);
    }

    int32_t exchange(int64_t blocks, const void *send, void *recv, size_t bytes, DLDevice device, void *stream,
                     Collective collective) noexcept
    {
        try {
            const auto block = static_cast<int64_t>(bytes);
            at::Tensor from = at_pointer(const_cast<void *>(send), blocks * block, device);
            at::Tensor to = at_pointer(recv, size_ * block, device);
            c10::OptionalStreamGuard guard;
            if (to.is_cuda())
                guard.reset_stream(stream_of(to.device(), stream));
            if (!to.is_cpu() || takes_.host) {
                run(collective, to, from);
            } else { /* the few bytes that create a handle: not worth pinned memory */
                at::Tensor received = at::empty_like(to, to.options().device(at::kCUDA)), sent = from.to(at::kCUDA);
                run(collective, received, sent);
                to.copy_(received);
            }
            return 0;
        } catch (const c10::Error &error) {
            failed(error.what_without_backtrace());
        } catch (const std::exception &error) {
            failed(error.what());
        } catch (...) {
            failed("an exception that is no std::exception");
        }
        return 1;
    }

    void run(Collective collective, at::Tensor &to, at::Tensor &from)
    {
        const c10::intrusive_ptr<c10d::Work> work = (this->*collective)(to, from);
        TORCH_CHECK(!work || work->wait(), "the group's work was aborted");
    }

    static at::Tensor at_pointer(void *data, int64_t bytes, DLDevice device)
    {
        c10::Device where(c10::kCPU);
        if (device.device_type == kDLCUDA)
            where = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device.device_id));
        const at::TensorOptions options = at::device(where).dtype(at::kByte);
        return at::for_blob(data, {bytes}).options(options).target_device(where).make_tensor();
    }

    static void failed(const char *why) noexcept
    {
        try {
            exchange_failure() = why;
        } catch (const std::exception &) { /* no memory for the message: the number must do */
        }
    }

    c10::intrusive_ptr<Group> group_;
    Takes takes_;
    int32_t rank_, size_; /* read once: a group made in Python may throw */
};

} // namespace detail

/* Owner of an object that calls back into a process group, and of that group: a communicator, or a handle over one. It
 * converts to a reference to that object. Movable, not copyable. */
template <class Owner> class OverGroup {
public:
    OverGroup() noexcept = default;
    OverGroup(std::shared_ptr<void> transport, Owner owner) noexcept
        : transport_(std::move(transport)), owner_(std::move(owner)) {}
    OverGroup(OverGroup &&) noexcept = default;
    OverGroup &operator=(OverGroup &&other) noexcept
    {
        owner_ = std::move(other.owner_); /* releases the old object first, while its transport exists */
        transport_ = std::move(other.transport_);
        return *this;
    }

    operator Owner &() noexcept { return owner_; }
    operator const Owner &() const noexcept { return owner_; }
    auto *get() const noexcept { return owner_.get(); }
    explicit operator bool() const noexcept { return static_cast<bool>(owner_); }
    const std::shared_ptr<void> &transport() const noexcept { return transport_; }

private:
    std::shared_ptr<void> transport_; /* declared before its user: members are destroyed in reverse order */
    Owner owner_;
};
using GroupCommunicator = OverGroup<Communicator>;
using GroupAllReduce = OverGroup<AllReduce>;

/* Creates a communicator. Every rank of `group`, a c10d::ProcessGroup or a c10d::Backend, calls this. */
template <class Group> GroupCommunicator comm_from_process_group(c10::intrusive_ptr<Group> group)
{
    using Base = std::conditional_t<std::is_base_of_v<c10d::Backend, Group>, c10d::Backend, c10d::ProcessGroup>;
    TORCH_CHECK(group.defined(), "group: a process group expected, got none");
    auto transport = std::make_shared<detail::GroupTransport<Base>>(c10::intrusive_ptr<Base>(std::move(group)));
    const gc_transport_t functions = transport->functions();
    gc_comm_t *out = nullptr;
    detail::torch_check(gc_comm_from_transport(&functions, &out));
    return {std::move(transport), Communicator(out)};
}

/* Creates an all-reduce as over any communicator; the handle keeps the group. */
inline GroupAllReduce allreduce_create(GroupCommunicator &comm, at::TensorList like, gc_codec_options_t options)
{
    return {comm.transport(), allreduce_create(static_cast<Communicator &>(comm), like, options)};
}
inline GroupAllReduce allreduce_create(GroupCommunicator &comm, gc_codec_options_t options)
{
    return {comm.transport(), allreduce_create(static_cast<Communicator &>(comm), options)};
}

} // namespace gradcodec

#endif /* GRADCODEC_C10D_HPP */
