/*
 * C++17 wrapper of gradcodec.h: owners instead of gc_tensor_free(), exceptions instead of statuses, and views of your
 * memory. Header-only; a program links the same library as a C program.
 *
 *     #include <gradcodec/gradcodec.hpp>
 *     #include <iostream>
 *
 *     int main() {
 *         const bool mask[1000] = {true, false, true};
 *         for (const gradcodec::Tensor& chunk : gradcodec::pack_chunks<4>(gradcodec::view(mask)))
 *             std::cout << chunk->shape[0] << " bytes, the first is " << int(*chunk.data<uint8_t>()) << "\n";
 *     }
 *
 * A function has its C name without `gc_`, takes the same inputs in the same order, and returns what C gives through
 * `out`. It throws `Error` if the C function fails. gradcodec.h documents what each function does, and its errors.
 * If C takes a pointer to a tensor, pass a Tensor, a View, a DLPack struct or a pointer to one. The library refuses
 * NULL and an empty Tensor. A C function that returns a number, or -1 if it fails, has no status: for these functions
 * status() is always GC_STATUS_INVALID_ARGUMENT, and what() has the reason.
 */
#ifndef GRADCODEC_HPP
#define GRADCODEC_HPP

#include "../gradcodec.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>
#if __has_include(<version>)
#include <version>
#endif
#ifdef __cpp_lib_span
#include <span>
#endif
#ifdef __STDCPP_FLOAT16_T__
#include <stdfloat>
#endif

namespace gradcodec {

/* ERRORS */

/* An error of the library. what(): its message. */
class Error : public std::runtime_error {
public:
    explicit Error(gc_status_t status) : std::runtime_error(gc_last_error()), status_(status) {}
    gc_status_t status() const noexcept { return status_; }                   /* one of GC_STATUS_* */
    const char *name() const noexcept { return gc_status_name(status_); }     /* such as "GC_STATUS_SHAPE_MISMATCH" */

private:
    gc_status_t status_;
};

inline const char *status_name(gc_status_t status) noexcept { return gc_status_name(status); }
inline const char *last_error() noexcept { return gc_last_error(); }

namespace detail {

/* Throws an Error. Not inlined, so that a call compiles to the C call and a comparison. */
[[noreturn, gnu::cold, gnu::noinline]] inline void fail(gc_status_t status) { throw Error(status); }

inline void check(gc_status_t status)
{
    if (status != GC_STATUS_OK)
        fail(status);
}

} // namespace detail

/* VERSION */

inline uint32_t version() noexcept { return gc_version(); }
inline const char *version_string() noexcept { return gc_version_string(); }
inline const char *build_info() noexcept { return gc_build_info(); } /* valid until this thread's next call */

/* DEVICES AND DTYPES */

inline constexpr DLDevice cpu = {kDLCPU, 0};
constexpr DLDevice cuda(int32_t index = 0) noexcept { return {kDLCUDA, index}; }

/* Dtypes that C++17 has no types for. */
inline constexpr DLDataType float16 = {kDLFloat, 16, 1};
inline constexpr DLDataType bfloat16 = {kDLBfloat, 16, 1};

/* Returns the DLPack dtype of a C++ type: bool, integers, std::byte, float, double and those of <stdfloat>. */
template <class T> constexpr DLDataType dtype() noexcept
{
    using U = std::remove_cv_t<T>;
    constexpr auto bits = static_cast<uint8_t>(8 * sizeof(U));
    if constexpr (std::is_same_v<U, bool>)
        return {6, bits, 1}; /* kDLBool, which dlpack.h before 1.0 lacks */
    else if constexpr (std::is_same_v<U, std::byte>)
        return {kDLUInt, bits, 1};
    else if constexpr (std::is_integral_v<U>)
        return {std::is_signed_v<U> ? uint8_t{kDLInt} : uint8_t{kDLUInt}, bits, 1};
#ifdef __STDCPP_FLOAT16_T__
    else if constexpr (std::is_same_v<U, std::float16_t>)
        return float16;
#endif
#ifdef __STDCPP_BFLOAT16_T__
    else if constexpr (std::is_same_v<U, std::bfloat16_t>)
        return bfloat16;
#endif
    else {
        static_assert(std::is_same_v<U, float> || std::is_same_v<U, double>, "no DLPack dtype for this type");
        return {kDLFloat, bits, 1};
    }
}

/* TENSORS */

namespace detail {

inline void release(DLManagedTensor *tensor) noexcept { gc_tensor_free(tensor); }
#ifdef DLPACK_MAJOR_VERSION /* dlpack.h before 1.0 has no versioned form */
inline void release(DLManagedTensorVersioned *tensor) noexcept { gc_tensor_free_versioned(tensor); }
#endif

} // namespace detail

/* Unique owner of a DLPack tensor, of this library or another one. As large as a pointer; movable, not copyable. */
template <class Managed> class Owner {
public:
    Owner() noexcept = default;
    explicit Owner(Managed *taken) noexcept : tensor_(taken) {}
    Owner(Owner &&other) noexcept : tensor_(other.release()) {}
    Owner &operator=(Owner &&other) noexcept
    {
        reset(other.release());
        return *this;
    }
    ~Owner() { detail::release(tensor_); }

    Managed *get() const noexcept { return tensor_; }
    explicit operator bool() const noexcept { return tensor_ != nullptr; }

    /* Gives up ownership, for example to a capsule or another library. */
    [[nodiscard]] Managed *release() noexcept { return std::exchange(tensor_, nullptr); }
    void reset(Managed *taken = nullptr) noexcept { detail::release(std::exchange(tensor_, taken)); }

    const DLTensor *operator->() const noexcept { return &tensor_->dl_tensor; }
    const DLTensor &operator*() const noexcept { return tensor_->dl_tensor; }

    /* Returns the address of the first element. */
    template <class T> T *data() const noexcept
    {
        const DLTensor &tensor = tensor_->dl_tensor;
        return reinterpret_cast<T *>(static_cast<char *>(tensor.data) + tensor.byte_offset);
    }

private:
    Managed *tensor_ = nullptr;
};

using Tensor = Owner<DLManagedTensor>;
#ifdef DLPACK_MAJOR_VERSION
using VersionedTensor = Owner<DLManagedTensorVersioned>;
#endif

/*
 * Description of memory of yours, made by view(), with `N` lengths and strides inside. It cannot move, because DLPack
 * points at them. T is const if the memory is: such a view is no destination.
 */
template <class T, std::size_t N> class View {
public:
    View(const View &) = delete;
    View &operator=(const View &) = delete;
    View(T *data, DLDataType dtype, DLDevice device, int32_t ndim, const int64_t *shape,
         const int64_t *strides) noexcept
        : tensor_{{const_cast<std::remove_const_t<T> *>(data), device, ndim, dtype, const_cast<int64_t *>(shape),
                   const_cast<int64_t *>(strides), 0},
                  nullptr,
                  nullptr}
    {
        if constexpr (N > 0) {
            tensor_.dl_tensor.shape = keep(shape_, shape);
            if (strides != nullptr)
                tensor_.dl_tensor.strides = keep(strides_, strides);
        }
    }

    const DLManagedTensor *get() const noexcept { return &tensor_; }
    const DLTensor *operator->() const noexcept { return &tensor_.dl_tensor; }
    const DLTensor &operator*() const noexcept { return tensor_.dl_tensor; }

private:
    static int64_t *keep(std::array<int64_t, N> &inside, const int64_t *values) noexcept
    {
        for (std::size_t i = 0; i < N; i++)
            inside[i] = values[i];
        return inside.data();
    }

    DLManagedTensor tensor_;
    std::array<int64_t, N> shape_, strides_; /* strides_ is not used without strides */
};

/* view(data, {2, 10}): C order. view(data, {2, 10}, {1, 2}): strides in elements. */
template <class T, std::size_t N>
View<T, N> view(T *data, const int64_t (&shape)[N], DLDevice device = cpu) noexcept
{
    return {data, dtype<T>(), device, static_cast<int32_t>(N), shape, nullptr};
}
template <class T, std::size_t N>
View<T, N> view(T *data, const int64_t (&shape)[N], const int64_t (&strides)[N], DLDevice device = cpu) noexcept
{
    return {data, dtype<T>(), device, static_cast<int32_t>(N), shape, strides};
}

/* Makes a view whose dtype differs from the pointer's type: view(data, bfloat16, {2, 10}, cuda(0)). */
template <class T, std::size_t N>
View<T, N> view(T *data, DLDataType dtype, const int64_t (&shape)[N], DLDevice device = cpu) noexcept
{
    return {data, dtype, device, static_cast<int32_t>(N), shape, nullptr};
}
template <class T, std::size_t N>
View<T, N> view(T *data, DLDataType dtype, const int64_t (&shape)[N], const int64_t (&strides)[N],
                DLDevice device = cpu) noexcept
{
    return {data, dtype, device, static_cast<int32_t>(N), shape, strides};
}

/* Makes a one-dimensional view of a vector, array or span, which must outlive the view. */
template <class Elements>
auto view(Elements &&elements) noexcept -> View<std::remove_reference_t<decltype(*std::data(elements))>, 1>
{
    using T = std::remove_reference_t<decltype(*std::data(elements))>;
    const auto length = static_cast<int64_t>(std::size(elements));
    return {std::data(elements), dtype<T>(), cpu, 1, &length, nullptr};
}

/* Makes a view of one number, which must outlive the view. Kernels take it as a scalar. */
template <class T> View<const T, 0> scalar(const T &number) noexcept
{
    return {&number, dtype<T>(), cpu, 0, nullptr, nullptr};
}

#ifdef __cpp_lib_span
/* Makes a view whose number of dimensions is known at run time. The arrays of lengths and strides must outlive it. */
template <class T>
View<T, 0> view(T *data, DLDataType dtype, std::span<const int64_t> shape, std::span<const int64_t> strides = {},
                DLDevice device = cpu) noexcept
{
    return {data, dtype, device, static_cast<int32_t>(shape.size()), shape.data(),
            strides.empty() ? nullptr : strides.data()};
}
#endif

/* Returns a managed tensor that borrows a bare DLTensor, or that of a versioned tensor. Valid as long as `tensor`. */
inline DLManagedTensor borrowed(const DLTensor &tensor) noexcept { return {tensor, nullptr, nullptr}; }

/* Parameter types: pointers, which convert from tensors, views and DLPack structs. */

class Borrowed { /* DLManagedTensor to read: the simple tier */
public:
    Borrowed(const DLManagedTensor *tensor) noexcept : tensor_(tensor) {}
    Borrowed(const DLManagedTensor &tensor) noexcept : tensor_(&tensor) {}
    Borrowed(const Tensor &tensor) noexcept : tensor_(tensor.get()) {}
    template <class T, std::size_t N> Borrowed(const View<T, N> &view) noexcept : tensor_(view.get()) {}
    const DLManagedTensor *get() const noexcept { return tensor_; }

private:
    const DLManagedTensor *tensor_;
};

class Source { /* DLTensor to read: the stream tier */
public:
    Source(const DLTensor *tensor) noexcept : tensor_(tensor) {}
    Source(const DLTensor &tensor) noexcept : tensor_(&tensor) {}
    template <class Managed> Source(const Owner<Managed> &tensor) noexcept : tensor_(tensor ? &*tensor : nullptr) {}
    template <class T, std::size_t N> Source(const View<T, N> &view) noexcept : tensor_(&*view) {}
    const DLTensor *get() const noexcept { return tensor_; }

private:
    const DLTensor *tensor_;
};

class Target { /* DLTensor whose elements are written, but never its shape, strides or dtype. */
public:
    Target(DLTensor *tensor) noexcept : tensor_(tensor) {}
    Target(DLTensor &tensor) noexcept : tensor_(&tensor) {}
    Target(const Tensor &tensor) noexcept : tensor_(tensor ? &tensor.get()->dl_tensor : nullptr) {}
    template <class T, std::size_t N> Target(const View<T, N> &view) noexcept : tensor_(const_cast<DLTensor *>(&*view))
    {
        static_assert(!std::is_const_v<T>, "the destination is a view of const memory");
    }
    DLTensor *get() const noexcept { return tensor_; }

private:
    DLTensor *tensor_;
};

class Shape { /* lengths: {2, 10}, a vector, an array, a span */
public:
    Shape(std::initializer_list<int64_t> lengths) noexcept : ndim_(static_cast<int32_t>(lengths.size()))
    {
        lengths_ = lengths.begin(); /* valid until the end of the call that takes {2, 10} */
    }
    template <class Lengths, class = decltype(static_cast<const int64_t *>(std::data(std::declval<Lengths &>())))>
    Shape(const Lengths &lengths) noexcept
        : lengths_(std::data(lengths)), ndim_(static_cast<int32_t>(std::size(lengths))) {}
    const int64_t *data() const noexcept { return lengths_; }
    int32_t ndim() const noexcept { return ndim_; }

private:
    const int64_t *lengths_;
    int32_t ndim_;
};

inline Tensor tensor_empty(DLDevice device, DLDataType dtype, Shape shape)
{
    DLManagedTensor *out = nullptr;
    detail::check(gc_tensor_empty(device, dtype, shape.ndim(), shape.data(), &out));
    return Tensor(out);
}

/* `strides`: as many as `shape` has lengths, or NULL. */
inline Tensor tensor_from_pointer(void *data, DLDevice device, DLDataType dtype, Shape shape,
                                  const int64_t *strides = nullptr, void (*release)(void *) = nullptr,
                                  void *ctx = nullptr)
{
    DLManagedTensor *out = nullptr;
    detail::check(gc_tensor_from_pointer(data, device, dtype, shape.ndim(), shape.data(), strides, release, ctx, &out));
    return Tensor(out);
}

/* Returns a tensor of the memory of `view` that keeps `owner`, such as a vector or a shared_ptr, until its release. */
template <class Keep, class T, std::size_t N> Tensor tensor_keeping(Keep owner, const View<T, N> &view)
{
    static_assert(!std::is_const_v<T>, "a DLPack tensor cannot say that its memory is const");
    auto kept = std::make_unique<Keep>(std::move(owner));
    DLManagedTensor *out = nullptr;
    detail::check(gc_tensor_from_pointer(view->data, view->device, view->dtype, view->ndim, view->shape, view->strides,
                                         [](void *ctx) { delete static_cast<Keep *>(ctx); }, kept.get(), &out));
    static_cast<void>(kept.release());
    return Tensor(out);
}

#ifdef DLPACK_MAJOR_VERSION
/* Both functions take `src` if they succeed. If they throw, `src` is still yours. */
inline VersionedTensor tensor_to_versioned(Tensor &&src)
{
    DLManagedTensorVersioned *out = nullptr;
    detail::check(gc_tensor_to_versioned(src.get(), &out));
    static_cast<void>(src.release());
    return VersionedTensor(out);
}
inline Tensor tensor_from_versioned(VersionedTensor &&src)
{
    DLManagedTensor *out = nullptr;
    detail::check(gc_tensor_from_versioned(src.get(), &out));
    static_cast<void>(src.release());
    return Tensor(out);
}
#endif

inline void tensor_free(Tensor) noexcept {} /* releases it before its scope ends */
#ifdef DLPACK_MAJOR_VERSION
inline void tensor_free_versioned(VersionedTensor) noexcept {}
#endif

/* Destructor for PyCapsule_New, in the library: it stays valid when a module that includes this header is unloaded. */
inline const auto capsule_destructor = &gc_capsule_destructor;

/* COPIES */

inline Tensor tensor_to_device(Borrowed src, DLDevice device)
{
    DLManagedTensor *out = nullptr;
    detail::check(gc_tensor_to_device(src.get(), device, &out));
    return Tensor(out);
}
inline void copy_into(Source src, Target dst, void *stream = nullptr)
{
    detail::check(gc_copy_into(src.get(), dst.get(), stream));
}

/* BITS */

namespace detail {

/* An array of Tensor has the layout of an array of pointers, which C fills and reads in place. */
static_assert(sizeof(Tensor) == sizeof(DLManagedTensor *) && std::is_standard_layout_v<Tensor>);
inline DLManagedTensor **pointers(Tensor *tensors) noexcept { return reinterpret_cast<DLManagedTensor **>(tensors); }
inline DLManagedTensor *const *pointers(const Tensor *tensors) noexcept
{
    return reinterpret_cast<DLManagedTensor *const *>(tensors);
}

} // namespace detail

inline int64_t chunk_bytes(int64_t n_elements, std::size_t n_chunks)
{
    const int64_t bytes = gc_chunk_bytes(n_elements, n_chunks);
    if (bytes < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    return bytes;
}

/* `out`: room for n_chunks tensors, which must be empty: tensors that they hold would leak. */
inline void pack_chunks(Borrowed src, std::size_t n_chunks, Tensor *out)
{
    detail::check(gc_pack_chunks(src.get(), n_chunks, detail::pointers(out)));
}
#ifdef __cpp_lib_span
inline void pack_chunks(Borrowed src, std::span<Tensor> out) { pack_chunks(src, out.size(), out.data()); }
#endif
/* Returns an array, without an allocation, since the number of chunks is known at compile time. */
template <std::size_t N> std::array<Tensor, N> pack_chunks(Borrowed src)
{
    std::array<Tensor, N> chunks;
    pack_chunks(src, N, chunks.data());
    return chunks;
}
inline std::vector<Tensor> pack_chunks(Borrowed src, std::size_t n_chunks)
{
    std::vector<Tensor> chunks(n_chunks);
    pack_chunks(src, n_chunks, chunks.data());
    return chunks;
}

inline Tensor unpack_chunks(DLManagedTensor *const *chunks, std::size_t n_chunks, int64_t n_elements)
{
    DLManagedTensor *out = nullptr;
    detail::check(gc_unpack_chunks(chunks, n_chunks, n_elements, &out));
    return Tensor(out);
}
/* `chunks`: an array, a vector or a span of Tensor. */
template <class Tensors> auto unpack_chunks(const Tensors &chunks, int64_t n_elements)
    -> decltype(detail::pointers(std::data(chunks)), Tensor())
{
    const Tensor *tensors = std::data(chunks);
    return unpack_chunks(detail::pointers(tensors), std::size(chunks), n_elements);
}

inline Tensor pack_bits(Borrowed src, int32_t axis = GC_AXIS_NONE, gc_bit_order_t order = GC_BIT_ORDER_BIG)
{
    DLManagedTensor *out = nullptr;
    detail::check(gc_pack_bits(src.get(), axis, order, &out));
    return Tensor(out);
}
inline Tensor unpack_bits(Borrowed src, int32_t axis = GC_AXIS_NONE, int64_t count = GC_COUNT_ALL,
                          gc_bit_order_t order = GC_BIT_ORDER_BIG)
{
    DLManagedTensor *out = nullptr;
    detail::check(gc_unpack_bits(src.get(), axis, count, order, &out));
    return Tensor(out);
}

inline void pack_chunks_into(Source src, gc_bit_order_t order, Target dst, void *stream = nullptr)
{
    detail::check(gc_pack_chunks_into(src.get(), order, dst.get(), stream));
}
inline void unpack_chunks_into(Source src, gc_bit_order_t order, Target dst, void *stream = nullptr)
{
    detail::check(gc_unpack_chunks_into(src.get(), order, dst.get(), stream));
}
inline void pack_bits_into(Source src, int32_t axis, gc_bit_order_t order, Target dst, void *stream = nullptr)
{
    detail::check(gc_pack_bits_into(src.get(), axis, order, dst.get(), stream));
}
inline void unpack_bits_into(Source src, int32_t axis, gc_bit_order_t order, Target dst, void *stream = nullptr)
{
    detail::check(gc_unpack_bits_into(src.get(), axis, order, dst.get(), stream));
}

/* SIGNS */

/* `out`: see pack_chunks(). */
inline void pack_signs(Borrowed src, std::size_t n_chunks, Tensor *out)
{
    detail::check(gc_pack_signs(src.get(), n_chunks, detail::pointers(out)));
}
#ifdef __cpp_lib_span
inline void pack_signs(Borrowed src, std::span<Tensor> out) { pack_signs(src, out.size(), out.data()); }
#endif
template <std::size_t N> std::array<Tensor, N> pack_signs(Borrowed src)
{
    std::array<Tensor, N> chunks;
    pack_signs(src, N, chunks.data());
    return chunks;
}
inline std::vector<Tensor> pack_signs(Borrowed src, std::size_t n_chunks)
{
    std::vector<Tensor> chunks(n_chunks);
    pack_signs(src, n_chunks, chunks.data());
    return chunks;
}

inline Tensor unpack_signs(DLManagedTensor *const *chunks, std::size_t n_chunks, int64_t n_elements, DLDataType dtype)
{
    DLManagedTensor *out = nullptr;
    detail::check(gc_unpack_signs(chunks, n_chunks, n_elements, dtype, &out));
    return Tensor(out);
}
/* `chunks`: an array, a vector or a span of Tensor. */
template <class Tensors> auto unpack_signs(const Tensors &chunks, int64_t n_elements, DLDataType dtype)
    -> decltype(detail::pointers(std::data(chunks)), Tensor())
{
    const Tensor *tensors = std::data(chunks);
    return unpack_signs(detail::pointers(tensors), std::size(chunks), n_elements, dtype);
}

inline void pack_signs_into(Source src, gc_bit_order_t order, Target dst, void *stream = nullptr)
{
    detail::check(gc_pack_signs_into(src.get(), order, dst.get(), stream));
}
/* Unpacks to +1 and -1, or with `scales` to +scale and -scale. */
inline void unpack_signs_into(Source src, gc_bit_order_t order, Target dst, void *stream = nullptr)
{
    detail::check(gc_unpack_signs_into(src.get(), nullptr, order, dst.get(), stream));
}
inline void unpack_signs_into(Source src, Source scales, gc_bit_order_t order, Target dst, void *stream = nullptr)
{
    detail::check(gc_unpack_signs_into(src.get(), scales.get(), order, dst.get(), stream));
}
inline void vote_signs_into(Source src, uint64_t turn, Target dst, void *stream = nullptr)
{
    detail::check(gc_vote_signs_into(src.get(), turn, dst.get(), stream));
}

/* ONEBIT AND CODECS */

/* Several tensors, one for each segment: {view(a), view(b)}, a vector or an array of Source or of Target. */
template <class One> class Several {
public:
    Several(std::initializer_list<One> tensors) noexcept : count_(tensors.size())
    {
        first_ = tensors.begin(); /* valid until the end of the call that takes {a, b} */
    }
    template <class Tensors, class = decltype(static_cast<const One *>(std::data(std::declval<const Tensors &>())))>
    Several(const Tensors &tensors) noexcept : first_(std::data(tensors)), count_(std::size(tensors)) {}

    /* An array of One has the layout of an array of pointers, which C reads in place. */
    auto data() const noexcept
    {
        using Pointer = decltype(first_->get());
        static_assert(sizeof(One) == sizeof(Pointer) && std::is_standard_layout_v<One>);
        return reinterpret_cast<const Pointer *>(first_);
    }
    std::size_t size() const noexcept { return count_; }

private:
    const One *first_;
    std::size_t count_;
};
using Sources = Several<Source>;
using Targets = Several<Target>;

/* Encodes one tensor in one call. `codec`: one of GC_CODEC_*. */
inline Tensor encode(Borrowed values, int32_t codec)
{
    DLManagedTensor *payload = nullptr;
    detail::check(gc_encode(values.get(), codec, &payload));
    return Tensor(payload);
}
inline Tensor decode(Borrowed payload, DLDataType dtype = gradcodec::dtype<float>())
{
    DLManagedTensor *values = nullptr;
    detail::check(gc_decode(payload.get(), dtype, &values));
    return Tensor(values);
}

/* Unique owner of a handle of the library. As large as a pointer; movable, not copyable. */
template <class T, void (*free)(T *)> class Handle {
public:
    Handle() noexcept = default;
    explicit Handle(T *taken) noexcept : handle_(taken) {}
    Handle(Handle &&other) noexcept : handle_(other.release()) {}
    Handle &operator=(Handle &&other) noexcept
    {
        reset(other.release());
        return *this;
    }
    ~Handle() { free(handle_); }

    T *get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != nullptr; }
    [[nodiscard]] T *release() noexcept { return std::exchange(handle_, nullptr); }
    void reset(T *taken = nullptr) noexcept { free(std::exchange(handle_, taken)); }

private:
    T *handle_ = nullptr;
};
using Codec = Handle<gc_codec_t, gc_codec_free>;

/* `options`: all but struct_size, which is set here. */
inline Codec codec_create(gc_codec_options_t options)
{
    gc_codec_t *out = nullptr;
    options.struct_size = sizeof options;
    detail::check(gc_codec_create(&options, &out));
    return Codec(out);
}
inline void codec_free(Codec) noexcept {} /* releases it before its scope ends */

inline int64_t codec_payload_bytes(const Codec &codec)
{
    const int64_t bytes = gc_codec_payload_bytes(codec.get());
    if (bytes < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    return bytes;
}
inline int32_t codec_exchanges(const Codec &codec)
{
    const int32_t exchanges = gc_codec_exchanges(codec.get());
    if (exchanges < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    return exchanges;
}
/* Factors: nullptr for none. */
inline void codec_encode(Codec &codec, Sources values, Source value_factor, Source error_factor, Target payload,
                         void *stream = nullptr)
{
    detail::check(gc_codec_encode(codec.get(), values.data(), values.size(), value_factor.get(), error_factor.get(),
                                  payload.get(), stream));
}
inline void codec_decode(Codec &codec, Source payload, int32_t divisor, Source factor, gc_decode_t mode, Targets values,
                         void *stream = nullptr)
{
    detail::check(gc_codec_decode(codec.get(), payload.get(), divisor, factor.get(), mode, values.data(), values.size(),
                                  stream));
}
inline void codec_reduce(Codec &codec, std::size_t chunk, Source chunks, Target dst, void *stream = nullptr)
{
    detail::check(gc_codec_reduce(codec.get(), chunk, chunks.get(), dst.get(), stream));
}
inline void codec_flags(Codec &codec, Target dst, void *stream = nullptr)
{
    detail::check(gc_codec_flags(codec.get(), dst.get(), stream));
}
inline void codec_scales(Codec &codec, Target dst, void *stream = nullptr)
{
    detail::check(gc_codec_scales(codec.get(), dst.get(), stream));
}
inline void codec_commit(Codec &codec, Source skip = nullptr, void *stream = nullptr)
{
    detail::check(gc_codec_commit(codec.get(), skip.get(), stream));
}
inline void codec_rollback(Codec &codec, void *stream = nullptr)
{
    detail::check(gc_codec_rollback(codec.get(), stream));
}
inline void codec_reset(Codec &codec, void *stream = nullptr) { detail::check(gc_codec_reset(codec.get(), stream)); }

inline int64_t codec_state_bytes(const Codec &codec)
{
    const int64_t bytes = gc_codec_state_bytes(codec.get());
    if (bytes < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    return bytes;
}
inline void codec_state_out(Codec &codec, Target dst, void *stream = nullptr)
{
    detail::check(gc_codec_state_out(codec.get(), dst.get(), stream));
}
inline void codec_state_in(Codec &codec, Source src, void *stream = nullptr)
{
    detail::check(gc_codec_state_in(codec.get(), src.get(), stream));
}
inline void codec_errors_out(Codec &codec, Target worker, Target server = nullptr, void *stream = nullptr)
{
    detail::check(gc_codec_errors_out(codec.get(), worker.get(), server.get(), stream));
}
inline void codec_errors_in(Codec &codec, Source worker, Source server = nullptr, void *stream = nullptr)
{
    detail::check(gc_codec_errors_in(codec.get(), worker.get(), server.get(), stream));
}

/* SHARING */

using Share = Handle<gc_share_t, gc_share_free>;

/* Sends a tensor over a connected Unix socket. Wait for the Share until the receiver has released the tensor. On CUDA,
 * without GC_SHARE_COPY, the receiver uses the tensor's own memory, which must stay until then. */
inline Share share_send(Borrowed tensor, int socket, uint32_t flags = 0, int32_t timeout_ms = -1)
{
    gc_share_t *lease = nullptr;
    detail::check(gc_share_send(tensor.get(), socket, flags, timeout_ms, &lease));
    return Share(lease);
}
inline void share_wait(Share &lease, int32_t timeout_ms = -1)
{
    detail::check(gc_share_wait(lease.get(), timeout_ms));
}
inline void share_free(Share) noexcept {} /* releases it before its scope ends */
inline Tensor share_receive(int socket, DLDevice device = {kDLCPU, 0}, int32_t timeout_ms = -1)
{
    DLManagedTensor *out = nullptr;
    detail::check(gc_share_receive(socket, device, timeout_ms, &out));
    return Tensor(out);
}

/* KERNELS */

using Kernel = Handle<gc_kernel_t, gc_kernel_free>;

/* `options`: all but struct_size, which is set here. */
inline Kernel elementwise_create(gc_elementwise_options_t options)
{
    gc_kernel_t *out = nullptr;
    options.struct_size = sizeof options;
    detail::check(gc_elementwise_create(&options, &out));
    return Kernel(out);
}
inline Kernel reduction_create(gc_reduction_options_t options)
{
    gc_kernel_t *out = nullptr;
    options.struct_size = sizeof options;
    detail::check(gc_reduction_create(&options, &out));
    return Kernel(out);
}
inline void kernel_free(Kernel) noexcept {} /* releases it before its scope ends */
inline void kernel_run(Kernel &kernel, Sources inputs, Targets outputs, gc_run_options_t options = {}, void *stream = nullptr)
{
    options.struct_size = sizeof options;
    detail::check(gc_kernel_run(kernel.get(), inputs.data(), inputs.size(), outputs.data(), outputs.size(), &options, stream));
}
inline void kernel_prepare(Kernel &kernel, Sources inputs, Targets outputs, gc_run_options_t options = {},
                           void *stream = nullptr)
{
    options.struct_size = sizeof options;
    detail::check(
        gc_kernel_prepare(kernel.get(), inputs.data(), inputs.size(), outputs.data(), outputs.size(), &options, stream));
}
inline int64_t kernel_workspace_bytes(const Kernel &kernel, Sources inputs, Targets outputs, gc_run_options_t options = {})
{
    options.struct_size = sizeof options;
    const int64_t bytes = gc_kernel_workspace_bytes(kernel.get(), inputs.data(), inputs.size(), outputs.data(),
                                                    outputs.size(), &options);
    if (bytes < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    return bytes;
}
/* Returns NVRTC's errors and warnings. The text stays as long as the kernel. */
inline const char *kernel_log(const Kernel &kernel)
{
    const char *log = nullptr;
    detail::check(gc_kernel_log(kernel.get(), &log));
    return log;
}

/* COMMUNICATORS AND ALL-REDUCE */

using Communicator = Handle<gc_comm_t, gc_comm_free>;
using AllReduce = Handle<gc_allreduce_t, gc_allreduce_free>;

/* `transport`: all but struct_size, which is set here. */
inline Communicator comm_from_transport(gc_transport_t transport)
{
    gc_comm_t *out = nullptr;
    transport.struct_size = sizeof transport;
    detail::check(gc_comm_from_transport(&transport, &out));
    return Communicator(out);
}
/* Returns a communicator for each rank, in rank order. */
inline std::vector<Communicator> comm_group(int32_t world_size)
{
    static_assert(sizeof(Communicator) == sizeof(gc_comm_t *) && std::is_standard_layout_v<Communicator>);
    std::vector<Communicator> ranks(world_size > 0 ? static_cast<std::size_t>(world_size) : 0);
    detail::check(gc_comm_group(world_size, reinterpret_cast<gc_comm_t **>(ranks.data())));
    return ranks;
}
/* `comm`: an ncclComm_t. `dl_handle`: from dlopen(), needed if the process has several NCCL libraries. */
inline Communicator comm_from_nccl(void *comm, uint32_t flags = 0, void *dl_handle = nullptr, uint32_t timeout_ms = 0)
{
    gc_comm_t *out = nullptr;
    const gc_nccl_options_t options{sizeof(gc_nccl_options_t), flags, comm, dl_handle, timeout_ms, 0};
    detail::check(gc_comm_from_nccl(&options, &out));
    return Communicator(out);
}
/* Returns the id of a new NCCL world. One rank calls this, and sends the id to all others. */
inline std::array<uint8_t, GC_NCCL_ID_BYTES> comm_nccl_id(void *dl_handle = nullptr)
{
    std::array<uint8_t, GC_NCCL_ID_BYTES> id;
    const gc_nccl_options_t options{sizeof(gc_nccl_options_t), 0, nullptr, dl_handle, 0, 0};
    detail::check(gc_comm_nccl_id(&options, id.data()));
    return id;
}
inline Communicator comm_from_nccl_id(const std::array<uint8_t, GC_NCCL_ID_BYTES> &id, int32_t rank, int32_t world_size,
                                      DLDevice device, void *dl_handle = nullptr, uint32_t timeout_ms = 0)
{
    gc_comm_t *out = nullptr;
    const gc_nccl_options_t options{sizeof(gc_nccl_options_t), 0, nullptr, dl_handle, timeout_ms, 0};
    detail::check(gc_comm_from_nccl_id(&options, id.data(), rank, world_size, device, &out));
    return Communicator(out);
}
/* Returns the bytes of each rank's buffer for an all-reduce with these options: all but struct_size, which is set here.
 * For a hierarchical communicator, `nodes` is its number of nodes and `world_size` the ranks of one node. */
inline int64_t allreduce_peers_bytes(gc_codec_options_t options, int32_t world_size, int32_t nodes = 1)
{
    options.struct_size = sizeof options;
    const int64_t bytes = gc_allreduce_peers_bytes(&options, world_size, nodes);
    if (bytes < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    return bytes;
}
/* `buffers`: the buffers of all ranks, at their addresses in this process. */
inline Communicator comm_from_peers(int32_t rank, DLDevice device, std::size_t bytes, const std::vector<void *> &buffers,
                                    uint32_t timeout_ms = 0)
{
    gc_comm_t *out = nullptr;
    const gc_peers_options_t options{sizeof(gc_peers_options_t), rank,  static_cast<int32_t>(buffers.size()),
                                     timeout_ms,                 device, bytes, buffers.data()};
    detail::check(gc_comm_from_peers(&options, &out));
    return Communicator(out);
}
inline Communicator comm_open_peers(Communicator &bootstrap, DLDevice device, int64_t bytes, uint32_t timeout_ms = 0)
{
    gc_comm_t *out = nullptr;
    detail::check(gc_comm_open_peers(bootstrap.get(), device, bytes, timeout_ms, &out));
    return Communicator(out);
}
/* `intra_node`: the ranks of this node. `inter_node`: ranks of all nodes with this rank's number. Neither is empty. */
inline Communicator comm_hierarchical(Communicator &intra_node, Communicator &inter_node)
{
    gc_comm_t *out = nullptr;
    detail::check(gc_comm_hierarchical(intra_node.get(), inter_node.get(), &out));
    return Communicator(out);
}
inline void comm_free(Communicator) noexcept {} /* releases it before its scope ends */

inline int32_t comm_rank(const Communicator &comm)
{
    const int32_t rank = gc_comm_rank(comm.get());
    if (rank < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    return rank;
}
inline int32_t comm_world_size(const Communicator &comm)
{
    const int32_t ranks = gc_comm_world_size(comm.get());
    if (ranks < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    return ranks;
}
/* Throws the permanent failure of an earlier call, if there was one. */
inline void comm_async_error(const Communicator &comm) { detail::check(gc_comm_async_error(comm.get())); }
/* May be called on any thread, also during another thread's call on `comm`. */
inline void comm_abort(Communicator &comm) { detail::check(gc_comm_abort(comm.get())); }

/* `options`: all but struct_size, which is set here. */
inline AllReduce allreduce_create(Communicator &comm, gc_codec_options_t options)
{
    gc_allreduce_t *out = nullptr;
    options.struct_size = sizeof options;
    detail::check(gc_allreduce_create(comm.get(), &options, &out));
    return AllReduce(out);
}
inline void allreduce_free(AllReduce) noexcept {} /* releases it before its scope ends */
inline int64_t allreduce_shard_elements(const AllReduce &allreduce)
{
    const int64_t elements = gc_allreduce_shard_elements(allreduce.get());
    if (elements < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    return elements;
}

/* `between_nodes`: receives the bytes that leave the node, -1 if unknown; may be nullptr. */
inline int64_t allreduce_sent_bytes(const AllReduce &allreduce, int64_t *between_nodes = nullptr)
{
    const int64_t bytes = gc_allreduce_sent_bytes(allreduce.get(), between_nodes);
    if (bytes < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    return bytes;
}
inline int32_t allreduce_exchanges(const AllReduce &allreduce)
{
    const int32_t exchanges = gc_allreduce_exchanges(allreduce.get());
    if (exchanges < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    return exchanges;
}
/* `which`: GC_PART_WORKER or GC_PART_SHARD. */
inline std::vector<gc_part_t> allreduce_parts(const AllReduce &allreduce, int32_t rank, int32_t which)
{
    const int64_t pieces = gc_allreduce_parts(allreduce.get(), rank, which, nullptr, 0);
    if (pieces < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    std::vector<gc_part_t> parts(static_cast<std::size_t>(pieces));
    if (gc_allreduce_parts(allreduce.get(), rank, which, parts.data(), pieces) < 0)
        detail::fail(GC_STATUS_INVALID_ARGUMENT);
    return parts;
}

/* Factors: nullptr for none. */
inline void allreduce_run(AllReduce &allreduce, Targets values, Source value_factor = nullptr,
                          Source error_factor = nullptr, void *stream = nullptr)
{
    detail::check(gc_allreduce_run(allreduce.get(), values.data(), values.size(), value_factor.get(),
                                   error_factor.get(), stream));
}
inline void allreduce_reduce_scatter(AllReduce &allreduce, Sources values, Source value_factor, Source error_factor,
                                     Target shard, void *stream = nullptr)
{
    detail::check(gc_allreduce_reduce_scatter(allreduce.get(), values.data(), values.size(), value_factor.get(),
                                              error_factor.get(), shard.get(), stream));
}
inline void allreduce_all_gather(AllReduce &allreduce, Source shard, Targets values, void *stream = nullptr)
{
    detail::check(gc_allreduce_all_gather(allreduce.get(), shard.get(), values.data(), values.size(), stream));
}
inline void allreduce_flags(AllReduce &allreduce, Target dst, void *stream = nullptr)
{
    detail::check(gc_allreduce_flags(allreduce.get(), dst.get(), stream));
}
inline void allreduce_commit(AllReduce &allreduce, Source skip = nullptr, void *stream = nullptr)
{
    detail::check(gc_allreduce_commit(allreduce.get(), skip.get(), stream));
}
inline void allreduce_rollback(AllReduce &allreduce, void *stream = nullptr)
{
    detail::check(gc_allreduce_rollback(allreduce.get(), stream));
}
inline void allreduce_reset(AllReduce &allreduce, void *stream = nullptr)
{
    detail::check(gc_allreduce_reset(allreduce.get(), stream));
}
inline void allreduce_errors_out(AllReduce &allreduce, Target worker, Target server = nullptr, void *stream = nullptr)
{
    detail::check(gc_allreduce_errors_out(allreduce.get(), worker.get(), server.get(), stream));
}
inline void allreduce_errors_in(AllReduce &allreduce, Source workers, Source server = nullptr, void *stream = nullptr)
{
    detail::check(gc_allreduce_errors_in(allreduce.get(), workers.get(), server.get(), stream));
}

/* CPU THREADS AND DEVICES */

inline void set_threads(uint32_t n) { detail::check(gc_set_threads(n)); }
inline void prepare(DLDevice device) { detail::check(gc_prepare(device)); }
inline void trim(DLDevice device) { detail::check(gc_trim(device)); }

/* Returns the fatbin, whose data() is for cuModuleLoadData(). `family` must end with a NUL. */
inline std::string_view builtin_kernels(const char *family)
{
    const void *fatbin = nullptr;
    std::size_t size = 0;
    detail::check(gc_builtin_kernels(family, &fatbin, &size));
    return {static_cast<const char *>(fatbin), size};
}
inline gc_kernel_shape_t builtin_kernel_shape(const char *kernel, int32_t compute_capability)
{
    gc_kernel_shape_t shape{};
    shape.struct_size = sizeof shape;
    detail::check(gc_builtin_kernel_shape(kernel, compute_capability, &shape));
    return shape;
}

} // namespace gradcodec

#endif /* GRADCODEC_HPP */
