/*
 * gradcodec on at::Tensor, for LibTorch programs and C++ extensions: tensors in, tensors out, on the current stream.
 *
 *     #include <gradcodec/torch.hpp>
 *
 *     at::Tensor chunks = gradcodec::pack_signs(gradient, 4);           // uint8 [4, chunk_bytes], on gradient's device
 *     at::Tensor signs = gradcodec::unpack_signs(chunks, gradient.sizes());     // float32: +1 and -1
 *
 * Nothing is copied and no DLPack capsule is made: the views point into the tensor's own sizes and strides. The only
 * allocation is the output's, by torch. A refused call throws a c10::Error (a RuntimeError in Python) with the
 * library's message. Nothing here records gradients. gradcodec.h documents each function under its name.
 *
 * STREAMS. Work is enqueued on the current stream of the tensor's device, as by torch's own operators, and torch reuses
 * freed memory in the order of that same stream. So no record_stream() is needed, unless the caller passes a tensor of
 * another stream without waiting. No device guard is needed either: a stream has its device. Call prepare(device)
 * before a first call inside a graph capture.
 *
 * All-reduces are here, too; gradcodec/c10d.hpp makes their communicators over process groups of torch.distributed.
 *
 * NEEDS torch 2.11, for c10::Stream::native_handle(): it gives the cudaStream_t without a CUDA header or library, so
 * that this compiles with a CPU-only torch, too. C++17, or the version that torch's headers need.
 *
 * NOT for extensions on torch's stable ABI (TORCH_TARGET_VERSION, TORCH_STABLE_ONLY): at::Tensor, c10::Stream and every
 * header included here are outside of it and stop there with an #error. Use gradcodec.h or gradcodec.hpp alone there:
 * fill a DLTensor from sizes(), strides() and const_data_ptr() or mutable_data_ptr() of a torch::stable::Tensor. The
 * stream, from torch 2.13 on, is torch::stable::accelerator::getCurrentStream(index).nativeHandle().
 */
#ifndef GRADCODEC_TORCH_HPP
#define GRADCODEC_TORCH_HPP

#if defined(TORCH_TARGET_VERSION) || defined(TORCH_STABLE_ONLY)
#error "gradcodec/torch.hpp is for at::Tensor, which is not part of torch's stable ABI: use gradcodec.h there"
#endif

#include "gradcodec.hpp"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <optional>
#include <string>
#include <tuple>

#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11)
#error "gradcodec/torch.hpp needs torch 2.11 or newer, for c10::Stream::native_handle()"
#endif

namespace gradcodec {
namespace detail {

inline void torch_check(gc_status_t status) { TORCH_CHECK(status == GC_STATUS_OK, gc_last_error()); }

inline DLDevice device_of(const char *name, c10::Device device)
{
    TORCH_CHECK(device.is_cpu() || device.is_cuda(), name, ": a tensor on the CPU or on CUDA expected, got ", device);
    return {device.is_cpu() ? kDLCPU : kDLCUDA, device.is_cpu() ? 0 : device.index()};
}

struct Dtype {
    at::ScalarType torch;
    DLDataType dlpack;
};
inline constexpr Dtype dtypes[] = {
    {at::kBool, dtype<bool>()},       {at::kByte, dtype<uint8_t>()},    {at::kChar, dtype<int8_t>()},
    {at::kUInt16, dtype<uint16_t>()}, {at::kShort, dtype<int16_t>()},   {at::kUInt32, dtype<uint32_t>()},
    {at::kInt, dtype<int32_t>()},     {at::kUInt64, dtype<uint64_t>()}, {at::kLong, dtype<int64_t>()},
    {at::kHalf, float16},             {at::kBFloat16, bfloat16},        {at::kFloat, dtype<float>()},
    {at::kDouble, dtype<double>()},
};

inline DLDataType dtype_of(const char *name, at::ScalarType type)
{
    for (const Dtype &known : dtypes)
        if (known.torch == type)
            return known.dlpack;
    TORCH_CHECK(false, name, ": ", type, " is not supported");
}

inline at::ScalarType type_of(const char *name, DLDataType dtype)
{
    for (const Dtype &known : dtypes)
        if (known.dlpack.code == dtype.code && known.dlpack.bits == dtype.bits && known.dlpack.lanes == dtype.lanes)
            return known.torch;
    TORCH_CHECK(false, name, ": DLPack's dtype (", int(dtype.code), ", ", int(dtype.bits), ", ", dtype.lanes,
                ") is not supported");
}

/* DLPack has no const and no lazy negation. The dispatcher resolves the latter before it calls an operator. */
inline DLTensor describe(const char *name, const at::Tensor &tensor, const void *data)
{
    TORCH_CHECK(!tensor.is_neg(), name, ": a lazily negated view; call resolve_neg() on it");
    return {const_cast<void *>(data), device_of(name, tensor.device()), static_cast<int32_t>(tensor.dim()),
            dtype_of(name, tensor.scalar_type()), const_cast<int64_t *>(tensor.sizes().data()),
            const_cast<int64_t *>(tensor.strides().data()), 0};
}

inline void check_dense(const char *name, const at::Tensor &tensor)
{
    TORCH_CHECK(tensor.defined(), name, ": an undefined tensor");
    TORCH_CHECK(tensor.layout() == at::kStrided, name, ": a dense tensor expected, got layout ", tensor.layout());
}

} // namespace detail

/*
 * Describes a tensor as DLPack, for any function of gradcodec.h or gradcodec.hpp. Valid while the tensor is alive and
 * has this shape. Only view_to_write() copies memory that torch shares until it is written to.
 */
inline DLTensor view(const at::Tensor &src)
{
    detail::check_dense("src", src);
    return detail::describe("src", src, src.const_data_ptr());
}
inline DLTensor view_to_write(const at::Tensor &dst)
{
    detail::check_dense("dst", dst);
    return detail::describe("dst", dst, dst.mutable_data_ptr());
}

/* Returns the current stream of a tensor's device, to be passed as `stream`; NULL on the CPU. */
inline void *current_stream(const at::Tensor &tensor)
{
    const c10::Device device = tensor.device();
    if (!device.is_cuda())
        return nullptr;
    return c10::impl::getDeviceGuardImpl(device.type())->getStream(device).native_handle();
}

namespace detail {

/* Returns a device with an index: in torch a device without one is the current one. */
inline c10::Device with_index(c10::Device device)
{
    if (device.is_cuda() && !device.has_index())
        return c10::impl::getDeviceGuardImpl(device.type())->getDevice();
    return device;
}

} // namespace detail

inline void prepare(c10::Device device)
{
    detail::torch_check(gc_prepare(detail::device_of("device", detail::with_index(device))));
}

/* INTO TENSORS OF YOURS */

namespace detail {

/* Refuses a tensor whose version counter cannot move, before it is written to. Like torch's in-place operators, a write
 * moves the counter, so that a backward pass that has saved the tensor refuses it. */
inline void check_version(const char *name, const at::Tensor &tensor)
{
    TORCH_CHECK(tensor.unsafeGetTensorImpl()->version_counter().enabled() || c10::InferenceMode::is_enabled(), name,
                ": an inference tensor is written to in inference mode only");
}
inline void bump_version(const at::Tensor &tensor) { tensor.unsafeGetTensorImpl()->bump_version(); }

template <class Call> void into(const at::Tensor &src, const at::Tensor &dst, Call call)
{
    const DLTensor from = view(src);
    DLTensor to = view_to_write(dst);
    check_version("dst", dst);
    torch_check(call(&from, &to, current_stream(src)));
    bump_version(dst);
}

} // namespace detail

/* Writes the elements that dst.copy_(src) gives, by the rules of gradcodec.h, on the stream of dst, or of src if dst is
 * on the CPU. Between GPUs, copy_() also joins the current stream of src's GPU; here only dst's stream is used. It must
 * wait for the work that makes src, and src must not change until the copy is done. */
inline void copy_into(const at::Tensor &src, const at::Tensor &dst)
{
    const DLTensor from = view(src);
    DLTensor to = view_to_write(dst);
    detail::check_version("dst", dst);
    detail::torch_check(gc_copy_into(&from, &to, current_stream(dst.is_cpu() ? src : dst)));
    detail::bump_version(dst);
}
inline void pack_chunks_into(const at::Tensor &src, gc_bit_order_t order, const at::Tensor &dst)
{
    detail::into(src, dst, [order](const DLTensor *from, DLTensor *to, void *stream) {
        return gc_pack_chunks_into(from, order, to, stream);
    });
}
inline void pack_signs_into(const at::Tensor &src, gc_bit_order_t order, const at::Tensor &dst)
{
    detail::into(src, dst, [order](const DLTensor *from, DLTensor *to, void *stream) {
        return gc_pack_signs_into(from, order, to, stream);
    });
}
/* `scales`: none for +1 and -1; or float32, one or one per chunk. */
inline void unpack_signs_into(const at::Tensor &src, const std::optional<at::Tensor> &scales, gc_bit_order_t order,
                              const at::Tensor &dst)
{
    const DLTensor factors = scales ? view(*scales) : DLTensor{};
    detail::into(src, dst, [&](const DLTensor *from, DLTensor *to, void *stream) {
        return gc_unpack_signs_into(from, scales ? &factors : nullptr, order, to, stream);
    });
}
inline void vote_signs_into(const at::Tensor &src, uint64_t turn, const at::Tensor &dst)
{
    detail::into(src, dst, [turn](const DLTensor *from, DLTensor *to, void *stream) {
        return gc_vote_signs_into(from, turn, to, stream);
    });
}
inline void unpack_chunks_into(const at::Tensor &src, gc_bit_order_t order, const at::Tensor &dst)
{
    detail::into(src, dst, [order](const DLTensor *from, DLTensor *to, void *stream) {
        return gc_unpack_chunks_into(from, order, to, stream);
    });
}
inline void pack_bits_into(const at::Tensor &src, int32_t axis, gc_bit_order_t order, const at::Tensor &dst)
{
    detail::into(src, dst, [axis, order](const DLTensor *from, DLTensor *to, void *stream) {
        return gc_pack_bits_into(from, axis, order, to, stream);
    });
}
inline void unpack_bits_into(const at::Tensor &src, int32_t axis, gc_bit_order_t order, const at::Tensor &dst)
{
    detail::into(src, dst, [axis, order](const DLTensor *from, DLTensor *to, void *stream) {
        return gc_unpack_bits_into(from, axis, order, to, stream);
    });
}

/* TO NEW TENSORS, on the device of the first */

namespace detail {

inline at::Tensor empty(const at::Tensor &src, at::IntArrayRef shape, at::ScalarType dtype)
{
    check_dense("src", src);
    return at::empty(shape, src.options().dtype(dtype));
}

inline at::Tensor chunks_for(const at::Tensor &src, int64_t n_chunks)
{
    TORCH_CHECK(n_chunks > 0, "n_chunks: at least 1 expected, got ", n_chunks);
    return empty(src, {n_chunks, gc_chunk_bytes(src.numel(), static_cast<std::size_t>(n_chunks))}, at::kByte);
}

/* Returns the lengths of `src`, with `length(n)` for the n along the axis; one-dimensional without an axis. */
template <class Length> c10::DimVector along(const at::Tensor &src, int32_t axis, Length length)
{
    c10::DimVector shape;
    if (axis == GC_AXIS_NONE) { /* not `return {length(...)}`: if it throws, some compilers destroy an unmade object */
        shape.push_back(length(src.numel()));
        return shape;
    }
    shape.append(src.sizes().begin(), src.sizes().end());
    int64_t &size = shape[at::maybe_wrap_dim(axis, src.dim(), /*wrap_scalar=*/false)];
    size = length(size);
    return shape;
}

} // namespace detail

/* Packs to uint8 [n_chunks, gc_chunk_bytes()]: a row is a chunk. */
inline at::Tensor pack_chunks(const at::Tensor &src, int64_t n_chunks = 1, gc_bit_order_t order = GC_BIT_ORDER_BIG)
{
    const at::Tensor dst = detail::chunks_for(src, n_chunks);
    pack_chunks_into(src, order, dst);
    return dst;
}
inline at::Tensor pack_signs(const at::Tensor &src, int64_t n_chunks = 1, gc_bit_order_t order = GC_BIT_ORDER_BIG)
{
    const at::Tensor dst = detail::chunks_for(src, n_chunks);
    pack_signs_into(src, order, dst);
    return dst;
}

/* Unpacks the chunks of both to 0 and 1 in a tensor of `shape`. */
inline at::Tensor unpack_chunks(const at::Tensor &chunks, at::IntArrayRef shape, at::ScalarType dtype = at::kBool,
                                gc_bit_order_t order = GC_BIT_ORDER_BIG)
{
    const at::Tensor dst = detail::empty(chunks, shape, dtype);
    unpack_chunks_into(chunks, order, dst);
    return dst;
}

/* Unpacks the chunks of pack_signs() to numbers: +1 and -1, or +scale and -scale. */
inline at::Tensor unpack_signs(const at::Tensor &chunks, at::IntArrayRef shape, at::ScalarType dtype = at::kFloat,
                               const std::optional<at::Tensor> &scales = std::nullopt,
                               gc_bit_order_t order = GC_BIT_ORDER_BIG)
{
    const at::Tensor dst = detail::empty(chunks, shape, dtype);
    unpack_signs_into(chunks, scales, order, dst);
    return dst;
}

/* Returns the majority of the rows for each bit; in a tie, the bit of the row in turn. */
inline at::Tensor vote_signs(const at::Tensor &src, uint64_t turn)
{
    detail::check_dense("src", src);
    TORCH_CHECK(src.dim() == 2, "src: two dimensions, voters and bytes, expected, got ", src.dim());
    const at::Tensor dst = detail::empty(src, {src.size(1)}, at::kByte);
    vote_signs_into(src, turn, dst);
    return dst;
}

/* Pack and unpack like numpy.packbits and numpy.unpackbits. */
inline at::Tensor pack_bits(const at::Tensor &src, int32_t axis = GC_AXIS_NONE, gc_bit_order_t order = GC_BIT_ORDER_BIG)
{
    const auto shape = detail::along(src, axis, [](int64_t n) { return n / 8 + (n % 8 != 0); });
    const at::Tensor dst = detail::empty(src, shape, at::kByte);
    pack_bits_into(src, axis, order, dst);
    return dst;
}
inline at::Tensor unpack_bits(const at::Tensor &src, int32_t axis = GC_AXIS_NONE, int64_t count = GC_COUNT_ALL,
                              gc_bit_order_t order = GC_BIT_ORDER_BIG)
{
    const auto shape = detail::along(src, axis, [count](int64_t n) {
        TORCH_CHECK(count == GC_COUNT_ALL || count >= -8 * n, "count: ", count, " leaves off more than the ", 8 * n,
                    " bits there are");
        return count == GC_COUNT_ALL ? 8 * n : count < 0 ? 8 * n + count : count;
    });
    const at::Tensor dst = detail::empty(src, shape, at::kByte);
    unpack_bits_into(src, axis, order, dst);
    return dst;
}

/* TO OTHER DEVICES AND PROCESSES */

namespace detail {

inline void wait_for_stream_of(const at::Tensor &tensor)
{
    c10::impl::getDeviceGuardImpl(tensor.device().type())->getStream(tensor.device()).synchronize();
}

/* Takes a tensor of the library, and releases it if torch does not take it. */
inline at::Tensor tensor_of(const char *name, Tensor &&tensor, c10::Device device)
{
    const at::ScalarType type = type_of(name, tensor->dtype);
    const auto ndim = static_cast<std::size_t>(tensor->ndim);
    const at::IntArrayRef sizes(tensor->shape, ndim), strides(tensor->strides, ndim);
    void *data = tensor->data;
    return at::for_blob(data, sizes)
        .strides(strides)
        .context(tensor.release(), [](void *taken) { gc_tensor_free(static_cast<DLManagedTensor *>(taken)); })
        .options(at::TensorOptions().dtype(type).device(device))
        .target_device(device)
        .make_tensor();
}

} // namespace detail

/* Returns a compact copy on this device, in torch's memory, also if `src` is there already. Runs on the current stream,
 * like copy_into(); between two GPUs it waits for both current streams, and is done when this returns. */
inline at::Tensor tensor_to_device(const at::Tensor &src, c10::Device device)
{
    detail::check_dense("src", src);
    const at::Tensor dst = at::empty(src.sizes(), src.options().device(device));
    const bool between_cards = src.is_cuda() && dst.is_cuda() && src.device() != dst.device();
    if (between_cards)
        detail::wait_for_stream_of(src);
    copy_into(src, dst);
    if (between_cards)
        detail::wait_for_stream_of(dst);
    return dst;
}

/* A tensor that was sent. If the other process uses its memory, on CUDA without GC_SHARE_COPY, this keeps it until
 * share_wait() has seen its release there. Freed before, torch could reuse memory that the other process reads. */
struct TensorShare {
    Share lease;
    at::Tensor tensor;
};

/* Sends a tensor over a connected Unix socket. Waits for earlier work on its device, on any stream. */
inline TensorShare share_send(const at::Tensor &src, int socket, uint32_t flags = 0, int32_t timeout_ms = -1)
{
    const bool is_lent = src.defined() && src.is_cuda() && (flags & GC_SHARE_COPY) == 0;
    const DLManagedTensor tensor{is_lent ? view_to_write(src) : view(src), nullptr, nullptr};
    gc_share_t *lease = nullptr;
    detail::torch_check(gc_share_send(&tensor, socket, flags, timeout_ms, &lease));
    return {Share(lease), is_lent ? src : at::Tensor()};
}
inline void share_wait(TensorShare &share, int32_t timeout_ms = -1)
{
    const gc_status_t status = gc_share_wait(share.lease.get(), timeout_ms);
    if (status == GC_STATUS_OK || status == GC_STATUS_SHARE) /* the receiver no longer has it */
        share.tensor.reset();
    detail::torch_check(status);
}

/* Receives the next tensor, without a copy. The sender waits until torch releases it. */
inline at::Tensor share_receive(int socket, c10::Device device, int32_t timeout_ms = -1)
{
    device = detail::with_index(device);
    DLManagedTensor *out = nullptr;
    detail::torch_check(gc_share_receive(socket, detail::device_of("device", device), timeout_ms, &out));
    return detail::tensor_of("the tensor that came", Tensor(out), device);
}

/* CODECS */

namespace detail {

/* Views of several tensors, and the pointers that C takes. */
class Described {
public:
    template <class View> Described(at::TensorList tensors, View of)
    {
        views_.reserve(tensors.size()); /* the pointers point to them */
        for (const at::Tensor &tensor : tensors) {
            views_.push_back(of(tensor));
            pointers_.push_back(&views_.back());
        }
    }
    DLTensor *const *data() const noexcept { return pointers_.data(); }
    std::size_t size() const noexcept { return pointers_.size(); }

private:
    std::vector<DLTensor> views_;
    std::vector<DLTensor *> pointers_;
};

/* Tensors that a call writes to. The constructor checks that this is allowed; bump() makes torch see the writes. */
class Written {
public:
    Written(const char *name, at::TensorList tensors) : tensors_(tensors), views_(tensors, view_to_write)
    {
        for (const at::Tensor &tensor : tensors)
            check_version(name, tensor);
    }
    DLTensor *const *data() const noexcept { return views_.data(); }
    std::size_t size() const noexcept { return views_.size(); }
    void bump() const
    {
        for (const at::Tensor &tensor : tensors_)
            bump_version(tensor);
    }

private:
    at::TensorList tensors_;
    Described views_;
};

/* An argument that may be an undefined tensor, which becomes NULL. */
class OptionalView {
public:
    explicit OptionalView(const at::Tensor &tensor) : there_(tensor.defined())
    {
        if (there_)
            view_ = view(tensor);
    }
    const DLTensor *get() const noexcept { return there_ ? &view_ : nullptr; }

private:
    DLTensor view_{};
    bool there_;
};

inline at::Tensor bytes_beside(const at::Tensor &tensor, int64_t bytes)
{
    return at::empty({bytes}, tensor.options().dtype(at::kByte));
}

} // namespace detail

namespace detail {

/* Calls `create` with options for tensors like these, as far as `options` leave that open. */
template <class Create> auto create_like(at::TensorList like, gc_codec_options_t options, Create create)
{
    TORCH_CHECK(!like.empty(), "like: at least one tensor expected, to know dtype and device");
    std::vector<int64_t> sizes;
    for (const at::Tensor &tensor : like)
        sizes.push_back(tensor.numel());
    options.struct_size = sizeof options;
    options.device = device_of("like", like[0].device());
    options.values = dtype_of("like", like[0].scalar_type());
    if (options.results.bits == 0)
        options.results = options.values;
    options.segments = sizes.data();
    options.n_segments = sizes.size();
    return create(options);
}

} // namespace detail

/*
 * Creates a codec for tensors like these: with their element counts, dtype and device, which `options` need not have.
 * It decodes to their dtype, too, unless `options` name another.
 */
inline Codec codec_create(at::TensorList like, gc_codec_options_t options)
{
    return detail::create_like(like, options, [](const gc_codec_options_t &complete) {
        gc_codec_t *out = nullptr;
        detail::torch_check(gc_codec_create(&complete, &out));
        return Codec(out);
    });
}

/* Returns the payload, uint8: gc_codec_payload_bytes() bytes. Factors: float32, one element; undefined for none. */
inline at::Tensor codec_encode(Codec &codec, at::TensorList gradients, const at::Tensor &value_factor = {},
                               const at::Tensor &error_factor = {})
{
    TORCH_CHECK(!gradients.empty(), "gradients: at least one tensor expected, to know the device");
    const detail::Described values(gradients, [](const at::Tensor &tensor) { return view(tensor); });
    const detail::OptionalView of_values(value_factor), of_errors(error_factor);
    const at::Tensor payload = detail::bytes_beside(gradients[0], codec_payload_bytes(codec));
    DLTensor to = view_to_write(payload);
    detail::torch_check(gc_codec_encode(codec.get(), values.data(), values.size(), of_values.get(), of_errors.get(),
                                        &to, current_stream(payload)));
    return payload;
}

/* Writes, or with GC_DECODE_ADD adds, to tensors of yours: one for each segment. */
inline void codec_decode(Codec &codec, const at::Tensor &payload, at::TensorList values, int32_t divisor = 1,
                         gc_decode_t mode = GC_DECODE_SET, const at::Tensor &factor = {})
{
    const detail::Written outputs("values", values);
    const detail::OptionalView of_factor(factor);
    const DLTensor from = view(payload);
    detail::torch_check(gc_codec_decode(codec.get(), &from, divisor, of_factor.get(), mode, outputs.data(),
                                        outputs.size(), current_stream(payload)));
    outputs.bump();
}

/* Reduces chunk number `chunk` of several payloads: a row of `chunks` each. Returns the chunk to send. */
inline at::Tensor codec_reduce(Codec &codec, int64_t chunk, const at::Tensor &chunks)
{
    const DLTensor from = view(chunks);
    const at::Tensor dst = detail::bytes_beside(chunks, chunks.dim() == 2 ? chunks.size(1) : 0);
    DLTensor to = view_to_write(dst);
    detail::torch_check(gc_codec_reduce(codec.get(), static_cast<std::size_t>(chunk), &from, &to, current_stream(dst)));
    return dst;
}

/* ALL-REDUCE, over communicators of gradcodec.hpp, and of gradcodec/c10d.hpp */

namespace detail {

/* Torch's message for the last failed exchange over a process group, on this thread, like gc_last_error(). */
inline std::string &exchange_failure() noexcept
{
    static thread_local std::string words;
    return words;
}

/* Checks a call that exchanges, like torch_check(), and adds torch's message. */
template <class Call> void exchange(Call call)
{
    std::string &failure = exchange_failure();
    failure.clear();
    const gc_status_t status = call();
    TORCH_CHECK(status == GC_STATUS_OK, gc_last_error(), failure.empty() ? "" : ": ", failure);
}

} // namespace detail

/* Creates a handle for tensors like these; see codec_create(). Every rank calls this. */
inline AllReduce allreduce_create(Communicator &comm, at::TensorList like, gc_codec_options_t options)
{
    return detail::create_like(like, options, [&](const gc_codec_options_t &complete) {
        gc_allreduce_t *out = nullptr;
        detail::exchange([&] { return gc_allreduce_create(comm.get(), &complete, &out); });
        return AllReduce(out);
    });
}

/* Replaces `values`, one for each segment, by their mean over the ranks. Factors: see codec_encode(). */
inline void allreduce_run(AllReduce &allreduce, at::TensorList values, const at::Tensor &value_factor = {},
                          const at::Tensor &error_factor = {})
{
    TORCH_CHECK(!values.empty(), "values: at least one tensor expected, to know the device");
    const detail::Written views("values", values);
    const detail::OptionalView of_values(value_factor), of_errors(error_factor);
    detail::exchange([&] {
        return gc_allreduce_run(allreduce.get(), views.data(), views.size(), of_values.get(), of_errors.get(),
                                current_stream(values[0]));
    });
    views.bump();
}

/* Runs the first half of allreduce_run(): writes this rank's shard of the mean, in float32. */
inline void allreduce_reduce_scatter(AllReduce &allreduce, at::TensorList values, const at::Tensor &shard,
                                     const at::Tensor &value_factor = {}, const at::Tensor &error_factor = {})
{
    const detail::Described views(values, [](const at::Tensor &tensor) { return view(tensor); });
    const detail::Written to("shard", shard);
    const detail::OptionalView of_values(value_factor), of_errors(error_factor);
    detail::exchange([&] {
        return gc_allreduce_reduce_scatter(allreduce.get(), views.data(), views.size(), of_values.get(),
                                           of_errors.get(), *to.data(), current_stream(shard));
    });
    to.bump();
}

/* Runs the second half: decodes the shards of all ranks to `values`. */
inline void allreduce_all_gather(AllReduce &allreduce, const at::Tensor &shard, at::TensorList values)
{
    const DLTensor from = view(shard);
    const detail::Written views("values", values);
    detail::exchange([&] {
        return gc_allreduce_all_gather(allreduce.get(), &from, views.data(), views.size(), current_stream(shard));
    });
    views.bump();
}

} // namespace gradcodec

#endif /* GRADCODEC_TORCH_HPP */
