/* An extension on torch's stable ABI, with gradcodec.hpp, as gradcodec/torch.hpp recommends for this ABI. */

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <gradcodec/gradcodec.hpp>

using torch::stable::Tensor;

/* Packs the signs of float32 in any strides to uint8 [1, chunk_bytes]. */
Tensor pack_signs(const Tensor &x)
{
    const bool cuda = x.is_cuda();
    const DLDevice device = cuda ? gradcodec::cuda(x.get_device_index()) : gradcodec::cpu;
    const auto sizes = x.sizes(), strides = x.strides();
    const DLTensor src = {const_cast<void *>(x.const_data_ptr()), device, static_cast<int32_t>(x.dim()),
                          gradcodec::dtype<float>(), const_cast<int64_t *>(sizes.data()),
                          const_cast<int64_t *>(strides.data()), 0};
    const int64_t bytes = gradcodec::chunk_bytes(x.numel(), 1);
    Tensor out = torch::stable::new_empty(x, {1, bytes}, torch::headeronly::ScalarType::Byte);
    void *stream = cuda ? torch::stable::accelerator::getCurrentStream(x.get_device_index()).nativeHandle() : nullptr;
    auto *data = static_cast<uint8_t *>(out.mutable_data_ptr());
    gradcodec::pack_signs_into(src, GC_BIT_ORDER_BIG, gradcodec::view(data, {1, bytes}, device), stream);
    return out;
}

STABLE_TORCH_LIBRARY(gradcodec_stable, m)
{
    m.def("pack_signs(Tensor x) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(gradcodec_stable, CompositeExplicitAutograd, m)
{
    m.impl("pack_signs", TORCH_BOX(&pack_signs));
}
