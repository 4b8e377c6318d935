/*
 * gradcodec inside jax.jit: handlers of XLA's FFI, on the CPU and on CUDA. JAX's wheel has the headers that this needs
 * (jax.ffi.include_dir()); C++17. One file makes a library of them:
 *
 *     #include <gradcodec/xla.hpp>
 *
 *     GRADCODEC_XLA_HANDLERS();
 *
 * and Python gives them to JAX:
 *
 *     of = ctypes.CDLL("./libgradcodec_xla.so")
 *     on_cpu, on_cuda, prepare = map(
 *         jax.ffi.pycapsule, (of.gradcodec_pack_signs_cpu, of.gradcodec_pack_signs_cuda, of.gradcodec_prepare_cuda))
 *     jax.ffi.register_ffi_target("gradcodec_pack_signs", on_cpu, "cpu")
 *     jax.ffi.register_ffi_target("gradcodec_pack_signs", {"initialize": prepare, "execute": on_cuda}, "CUDA")
 *
 *     @jax.jit
 *     def step(gradient):
 *         chunks = jax.ShapeDtypeStruct((4, chunk_bytes), jnp.uint8)
 *         pack = jax.ffi.ffi_call("gradcodec_pack_signs", chunks, vmap_method="sequential")
 *         return pack(gradient, order=np.int32(0))
 *
 * A function has its name and what it refuses from gradcodec.h, `_into` left off: XLA allocates the results, whose
 * shapes the caller names. Operands and results are row-major, as ffi_call asks for unless it is told otherwise.
 *
 *     name              operands              results                     attributes, np.int32 but for turn
 *     pack_chunks       x                     chunks uint8 [k, bytes]     order
 *     pack_signs        x                     chunks uint8 [k, bytes]     order
 *     unpack_chunks     chunks                x of any shape              order
 *     unpack_signs      chunks[, scales]      x of any shape              order
 *     pack_bits         x                     uint8                       axis, order
 *     unpack_bits       bytes                 uint8, or another           axis, order
 *     vote_signs        ballots [v, bytes]    uint8 [bytes]               turn, np.uint64
 *     onebit_compress   gradient, error       chunks, scale [1], error,   rule
 *                                             workspace uint8
 *
 * onebit_compress is error feedback as JAX has state: the error comes in and the new one goes out. With
 * `input_output_aliases={1: 2}` it is updated in place where XLA need not keep the old one; otherwise it is copied.
 * (Codecs keep their errors themselves, which a function that is traced, repeated and reordered must not.) The
 * workspace, gc_onebit_workspace_bytes() long, is a result so that XLA provides the memory. unpack_signs with the scale
 * is the inverse.
 *
 * The turn of a vote is an attribute, and each value compiles anew. A traced step rolls the ballots instead,
 * jnp.roll(ballots, -step, axis=0), which gives the same.
 *
 * What is refused is a JaxRuntimeError with the library's sentence. Nothing here has a derivative: wrap it in
 * jax.custom_vjp, or stop the gradient. On CUDA the work goes to XLA's stream and can be captured in its command
 * buffers, for which gradcodec_prepare_cuda loads the kernels beforehand. (gcc refuses XLA's headers with -pedantic.)
 */
#ifndef GRADCODEC_XLA_HPP
#define GRADCODEC_XLA_HPP

#include "../gradcodec.h"

#include "xla/ffi/api/ffi.h"

#include <cstdint>

namespace gradcodec {
namespace xla {

namespace ffi = ::xla::ffi;

/* Where a handler works: the CPU, whose stream is NULL, or a GPU and XLA's stream there. */
struct Queue {
    DLDevice device;
    void *stream;
};

namespace detail {

inline ffi::ErrorCode code_of(gc_status_t status)
{
    switch (status) {
    case GC_STATUS_OUT_OF_MEMORY:
        return ffi::ErrorCode::kResourceExhausted;
    case GC_STATUS_DRIVER_UNAVAILABLE:
        return ffi::ErrorCode::kUnavailable;
    case GC_STATUS_CUDA:
    case GC_STATUS_CONTEXT_LOST:
    case GC_STATUS_PANIC:
        return ffi::ErrorCode::kInternal;
    default:
        return ffi::ErrorCode::kInvalidArgument;
    }
}

inline ffi::Error result_of(gc_status_t status)
{
    return status == GC_STATUS_OK ? ffi::Error::Success() : ffi::Error(code_of(status), gc_last_error());
}

/* The dtypes of gradcodec; of others none, which the library refuses in its own words. */
inline DLDataType dtype_of(ffi::DataType type)
{
    switch (type) {
    case ffi::PRED:
        return {kDLBool, 8, 1};
    case ffi::U8:
        return {kDLUInt, 8, 1};
    case ffi::S8:
        return {kDLInt, 8, 1};
    case ffi::U16:
        return {kDLUInt, 16, 1};
    case ffi::S16:
        return {kDLInt, 16, 1};
    case ffi::U32:
        return {kDLUInt, 32, 1};
    case ffi::S32:
        return {kDLInt, 32, 1};
    case ffi::U64:
        return {kDLUInt, 64, 1};
    case ffi::S64:
        return {kDLInt, 64, 1};
    case ffi::F16:
        return {kDLFloat, 16, 1};
    case ffi::BF16:
        return {kDLBfloat, 16, 1};
    case ffi::F32:
        return {kDLFloat, 32, 1};
    case ffi::F64:
        return {kDLFloat, 64, 1};
    case ffi::C64:
        return {kDLComplex, 64, 1};
    case ffi::C128:
        return {kDLComplex, 128, 1};
    default:
        return {kDLOpaqueHandle, 8, 1};
    }
}

} // namespace detail

/* A buffer of XLA's as DLPack, for any function of gradcodec.h: good during the call of the handler. */
inline DLTensor view(ffi::AnyBuffer buffer, const Queue &queue)
{
    const ffi::AnyBuffer::Dimensions shape = buffer.dimensions();
    return {buffer.untyped_data(), queue.device, static_cast<int32_t>(shape.size()),
            detail::dtype_of(buffer.element_type()), const_cast<int64_t *>(shape.begin()), nullptr, 0};
}

/* THE HANDLERS' WORK */

inline ffi::Error prepare(const Queue &queue) { return detail::result_of(gc_prepare(queue.device)); }

inline ffi::Error pack_chunks(const Queue &queue, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> chunks, int32_t order)
{
    const DLTensor src = view(x, queue);
    DLTensor dst = view(*chunks, queue);
    return detail::result_of(gc_pack_chunks_into(&src, order, &dst, queue.stream));
}

inline ffi::Error pack_signs(const Queue &queue, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> chunks, int32_t order)
{
    const DLTensor src = view(x, queue);
    DLTensor dst = view(*chunks, queue);
    return detail::result_of(gc_pack_signs_into(&src, order, &dst, queue.stream));
}

inline ffi::Error unpack_chunks(const Queue &queue, ffi::AnyBuffer chunks, ffi::Result<ffi::AnyBuffer> x, int32_t order)
{
    const DLTensor src = view(chunks, queue);
    DLTensor dst = view(*x, queue);
    return detail::result_of(gc_unpack_chunks_into(&src, order, &dst, queue.stream));
}

inline ffi::Error unpack_signs(const Queue &queue, ffi::AnyBuffer chunks, ffi::RemainingArgs scales,
                               ffi::Result<ffi::AnyBuffer> x, int32_t order)
{
    const DLTensor src = view(chunks, queue);
    DLTensor dst = view(*x, queue), factors{};
    if (scales.size() > 1)
        return ffi::Error::InvalidArgument("unpack_signs: chunks and scales expected, got more operands");
    if (scales.size() == 1) {
        const auto given = scales.get<ffi::AnyBuffer>(0);
        if (!given.has_value())
            return given.error();
        factors = view(given.value(), queue);
    }
    const DLTensor *factor = scales.size() == 1 ? &factors : nullptr;
    return detail::result_of(gc_unpack_signs_into(&src, factor, order, &dst, queue.stream));
}

inline ffi::Error pack_bits(const Queue &queue, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> bytes, int32_t axis,
                            int32_t order)
{
    const DLTensor src = view(x, queue);
    DLTensor dst = view(*bytes, queue);
    return detail::result_of(gc_pack_bits_into(&src, axis, order, &dst, queue.stream));
}

inline ffi::Error unpack_bits(const Queue &queue, ffi::AnyBuffer bytes, ffi::Result<ffi::AnyBuffer> x, int32_t axis,
                              int32_t order)
{
    const DLTensor src = view(bytes, queue);
    DLTensor dst = view(*x, queue);
    return detail::result_of(gc_unpack_bits_into(&src, axis, order, &dst, queue.stream));
}

inline ffi::Error vote_signs(const Queue &queue, ffi::AnyBuffer ballots, ffi::Result<ffi::AnyBuffer> verdict,
                             uint64_t turn)
{
    const DLTensor src = view(ballots, queue);
    DLTensor dst = view(*verdict, queue);
    return detail::result_of(gc_vote_signs_into(&src, turn, &dst, queue.stream));
}

inline ffi::Error onebit_compress(const Queue &queue, ffi::AnyBuffer gradient, ffi::AnyBuffer error,
                                  ffi::Result<ffi::AnyBuffer> chunks, ffi::Result<ffi::AnyBuffer> scale,
                                  ffi::Result<ffi::AnyBuffer> new_error, ffi::Result<ffi::AnyBuffer> workspace,
                                  int32_t rule)
{
    const DLTensor src = view(gradient, queue), old = view(error, queue);
    DLTensor dst = view(*chunks, queue), factor = view(*scale, queue);
    DLTensor carried = view(*new_error, queue), room = view(*workspace, queue);
    /* Which a copy would take: it broadcasts and casts. */
    if (error.element_type() != new_error->element_type() || !(error.dimensions() == new_error->dimensions()))
        return ffi::Error::InvalidArgument("onebit_compress: the new error must have the old one's dtype and shape");
    /* Where XLA has made them one, this copies nothing. */
    if (const gc_status_t status = gc_copy_into(&old, &carried, queue.stream); status != GC_STATUS_OK)
        return detail::result_of(status);
    return detail::result_of(gc_onebit_compress_into(&src, &carried, rule, &dst, &factor, &room, queue.stream));
}

} // namespace xla
} // namespace gradcodec

/* gradcodec_NAME_cpu and gradcodec_NAME_cuda, by the function of that name; `bound`: its arguments after the queue. */
#define GRADCODEC_XLA_HANDLER(name, bound)                                                                             \
    XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                                     \
        gradcodec_##name##_cpu,                                                                                        \
        [](auto... arguments) { return ::gradcodec::xla::name({{kDLCPU, 0}, nullptr}, arguments...); },                \
        ::xla::ffi::Ffi::Bind() bound);                                                                                \
    XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                                     \
        gradcodec_##name##_cuda,                                                                                       \
        [](int32_t gpu, void *stream, auto... arguments) {                                                             \
            return ::gradcodec::xla::name({{kDLCUDA, gpu}, stream}, arguments...);                                     \
        },                                                                                                             \
        ::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::DeviceOrdinal>().Ctx<::xla::ffi::PlatformStream<void *>>() bound,      \
        {::xla::ffi::Traits::kCmdBufferCompatible})

#define GRADCODEC_XLA_ARG .Arg<::xla::ffi::AnyBuffer>()
#define GRADCODEC_XLA_RET .Ret<::xla::ffi::AnyBuffer>()
#define GRADCODEC_XLA_INT(name) .Attr<int32_t>(name)

/* All of them, as exported C symbols; once in a library. */
#define GRADCODEC_XLA_HANDLERS()                                                                                       \
    XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                                     \
        gradcodec_prepare_cuda,                                                                                        \
        [](int32_t gpu) { return ::gradcodec::xla::prepare({{kDLCUDA, gpu}, nullptr}); },                              \
        ::xla::ffi::Ffi::BindInitialize().Ctx<::xla::ffi::DeviceOrdinal>());                                           \
    GRADCODEC_XLA_HANDLER(pack_chunks, GRADCODEC_XLA_ARG GRADCODEC_XLA_RET GRADCODEC_XLA_INT("order"));                \
    GRADCODEC_XLA_HANDLER(pack_signs, GRADCODEC_XLA_ARG GRADCODEC_XLA_RET GRADCODEC_XLA_INT("order"));                 \
    GRADCODEC_XLA_HANDLER(unpack_chunks, GRADCODEC_XLA_ARG GRADCODEC_XLA_RET GRADCODEC_XLA_INT("order"));              \
    GRADCODEC_XLA_HANDLER(unpack_signs,                                                                                \
                          GRADCODEC_XLA_ARG.RemainingArgs() GRADCODEC_XLA_RET GRADCODEC_XLA_INT("order"));             \
    GRADCODEC_XLA_HANDLER(pack_bits, GRADCODEC_XLA_ARG GRADCODEC_XLA_RET GRADCODEC_XLA_INT("axis")                     \
                                         GRADCODEC_XLA_INT("order"));                                                  \
    GRADCODEC_XLA_HANDLER(unpack_bits, GRADCODEC_XLA_ARG GRADCODEC_XLA_RET GRADCODEC_XLA_INT("axis")                   \
                                           GRADCODEC_XLA_INT("order"));                                                \
    GRADCODEC_XLA_HANDLER(vote_signs, GRADCODEC_XLA_ARG GRADCODEC_XLA_RET.Attr<uint64_t>("turn"));                     \
    GRADCODEC_XLA_HANDLER(onebit_compress,                                                                             \
                          GRADCODEC_XLA_ARG GRADCODEC_XLA_ARG GRADCODEC_XLA_RET GRADCODEC_XLA_RET GRADCODEC_XLA_RET    \
                              GRADCODEC_XLA_RET GRADCODEC_XLA_INT("rule"))

#endif /* GRADCODEC_XLA_HPP */
