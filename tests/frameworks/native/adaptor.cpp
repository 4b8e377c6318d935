/* Gives test_adaptor.py each function of gradcodec/torch.hpp, and sends tensors through DLPack and our owners. */

#include <gradcodec/torch.hpp>
#include <gradcodec/torch.hpp>

#include <ATen/DLConvertor.h>
#include <ATen/ops/stack.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/library.h>

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace {

/* Returns data, device type and index, ndim and dtype of a view. Its sizes and strides must be the tensor's own. */
std::vector<int64_t> described(at::Tensor x) /* not const: no other view() may take it for a container */
{
    const DLTensor view = gradcodec::view(x);
    TORCH_CHECK(view.shape == x.sizes().data() && view.strides == x.strides().data() && view.byte_offset == 0,
                "the view has sizes or strides of its own");
    return {reinterpret_cast<int64_t>(view.data), view.device.device_type, view.device.device_id, view.ndim,
            view.dtype.code, view.dtype.bits, view.dtype.lanes};
}

int64_t written_at(const at::Tensor &x) { return reinterpret_cast<int64_t>(gradcodec::view_to_write(x).data); }
int64_t current_stream(const at::Tensor &x) { return reinterpret_cast<int64_t>(gradcodec::current_stream(x)); }

/* Converts torch's tensor to ours, to a versioned one and back, and to torch's again. */
at::Tensor through_dlpack(const at::Tensor &x)
{
    gradcodec::Tensor legacy(at::toDLPack(x));
    gradcodec::VersionedTensor versioned = gradcodec::tensor_to_versioned(std::move(legacy));
    return at::fromDLPack(gradcodec::tensor_from_versioned(std::move(versioned)).release());
}

/* Returns a tensor that the library has allocated as torch's, and its address in the library. */
std::pair<at::Tensor, int64_t> packed_by_the_library(const at::Tensor &x)
{
    gradcodec::Tensor tensor(at::toDLPack(x));
    gradcodec::Tensor packed = gradcodec::pack_bits(tensor);
    const auto address = reinterpret_cast<int64_t>(packed->data);
    return {at::fromDLPack(packed.release()), address};
}

/* Sent tensors by number. */
std::map<int64_t, gradcodec::TensorShare> shares;

int64_t kept(gradcodec::TensorShare share)
{
    static int64_t number;
    shares.emplace(++number, std::move(share));
    return number;
}

/* Makes `device` CUDA's current device for torch, without a driver. Torch keeps the guard, so it is never freed. */
void pretend_current(c10::Device device)
{
    static auto *guard = new c10::impl::FakeGuardImpl<c10::kCUDA>;
    guard->setDevice(device);
    c10::impl::registerDeviceGuard(c10::kCUDA, guard);
}

} // namespace

TORCH_LIBRARY(gradcodec_adaptor, m)
{
    using at::Tensor;
    m.def("described", [](const Tensor &x) { return described(x); });
    m.def("written_at", [](const Tensor &x) { return written_at(x); });
    m.def("current_stream", [](const Tensor &x) { return current_stream(x); });
    m.def("prepare", [](c10::Device device) { gradcodec::prepare(device); });
    m.def("pretend_current", [](c10::Device device) { pretend_current(device); });
    m.def("through_dlpack", [](const Tensor &x) { return through_dlpack(x); });
    m.def("packed_by_the_library", [](const Tensor &x) {
        auto [packed, address] = packed_by_the_library(x);
        return std::make_tuple(packed, address);
    });

    m.def("pack_chunks_into", [](const Tensor &x, int64_t order, const Tensor &out) {
        gradcodec::pack_chunks_into(x, static_cast<int32_t>(order), out);
    });
    m.def("pack_signs_into", [](const Tensor &x, int64_t order, const Tensor &out) {
        gradcodec::pack_signs_into(x, static_cast<int32_t>(order), out);
    });
    m.def("unpack_chunks_into", [](const Tensor &x, int64_t order, const Tensor &out) {
        gradcodec::unpack_chunks_into(x, static_cast<int32_t>(order), out);
    });
    m.def("copy_into", [](const Tensor &x, const Tensor &out) { gradcodec::copy_into(x, out); });
    m.def("tensor_to_device", [](const Tensor &x, c10::Device device) { return gradcodec::tensor_to_device(x, device); });
    m.def("share_send", [](const Tensor &x, int64_t socket, int64_t flags) {
        return kept(gradcodec::share_send(x, static_cast<int>(socket), static_cast<uint32_t>(flags)));
    });
    m.def("share_send_any", [](const Tensor &x, int64_t socket) { /* for dtypes that torch.hpp does not have */
        gradcodec::Tensor tensor(at::toDLPack(x));
        return kept({gradcodec::share_send(tensor, static_cast<int>(socket)), Tensor()});
    });
    m.def("share_wait", [](int64_t number) { gradcodec::share_wait(shares.at(number), 0); });
    m.def("share_keeps", [](int64_t number) { return shares.at(number).tensor.defined(); });
    m.def("share_free", [](int64_t number) { shares.erase(number); });
    m.def("share_receive", [](int64_t socket, c10::Device device) {
        return gradcodec::share_receive(static_cast<int>(socket), device, 0);
    });
    using Optional = std::optional<int64_t>; /* None becomes GC_AXIS_NONE or GC_COUNT_ALL */
    m.def("pack_bits", [](const Tensor &x, Optional axis, int64_t order) {
        return gradcodec::pack_bits(x, static_cast<int32_t>(axis.value_or(GC_AXIS_NONE)), static_cast<int32_t>(order));
    });
    m.def("unpack_bits", [](const Tensor &x, Optional axis, Optional count, int64_t order) {
        return gradcodec::unpack_bits(x, static_cast<int32_t>(axis.value_or(GC_AXIS_NONE)),
                                      count.value_or(GC_COUNT_ALL), static_cast<int32_t>(order));
    });

    /* Runs a step of two workers: writes the decoded mean to `out`, returns both payloads and the reduced one. */
    m.def("codec_step", [](const std::vector<Tensor> &ours, const std::vector<Tensor> &theirs, std::vector<Tensor> out,
                           const std::optional<Tensor> &factor) {
        gc_codec_options_t options{};
        options.codec = GC_CODEC_ONEBIT;
        options.server = 1;
        gradcodec::Codec codec = gradcodec::codec_create(ours, options);
        gradcodec::Codec other = gradcodec::codec_create(theirs, options);
        const Tensor first = gradcodec::codec_encode(codec, ours, factor.value_or(Tensor()));
        const Tensor second = gradcodec::codec_encode(other, theirs);
        const Tensor reduced = gradcodec::codec_reduce(codec, 0, at::stack({first, second}));
        gradcodec::codec_decode(codec, reduced, out);
        return std::make_tuple(first, second, reduced);
    });
}
