/* Torch operators: torch.ops.gradcodec.pack_truth, pack_signs and unpack. For the CPU, CUDA, and torch.compile, which
 * gets shapes from the Meta kernels. Built by CMakeLists.txt or by torch_ops.py, which also uses it. */

#include <gradcodec/torch.hpp>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

namespace {

at::Tensor pack_truth(const at::Tensor &x, int64_t n_chunks) { return gradcodec::pack_chunks(x, n_chunks); }
at::Tensor pack_signs(const at::Tensor &x, int64_t n_chunks) { return gradcodec::pack_signs(x, n_chunks); }
at::Tensor unpack(const at::Tensor &chunks, at::IntArrayRef shape, at::ScalarType dtype)
{
    return gradcodec::unpack_chunks(chunks, shape, dtype);
}

/* Computes shapes only, also for symbolic sizes: the formula of gc_chunk_bytes(), in SymInt. */
at::Tensor chunks_meta(const at::Tensor &x, c10::SymInt n_chunks)
{
    TORCH_CHECK(n_chunks > 0, "n_chunks: at least 1 expected, got ", n_chunks);
    const c10::SymInt bytes = (x.sym_numel() + 7) / 8;
    return at::empty_symint({n_chunks, (bytes + n_chunks - 1) / n_chunks}, x.options().dtype(at::kByte));
}
at::Tensor unpack_meta(const at::Tensor &chunks, c10::SymIntArrayRef shape, at::ScalarType dtype)
{
    return at::empty_symint(shape, chunks.options().dtype(dtype));
}

} // namespace

TORCH_LIBRARY(gradcodec, m)
{
    /* The tag states that the operators have a Meta kernel, alias nothing and write to no argument. */
    const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
    m.def("pack_truth(Tensor x, SymInt n_chunks=1) -> Tensor", tags);
    m.def("pack_signs(Tensor x, SymInt n_chunks=1) -> Tensor", tags);
    m.def("unpack(Tensor chunks, SymInt[] shape, ScalarType dtype) -> Tensor", tags);
}

TORCH_LIBRARY_IMPL(gradcodec, CPU, m)
{
    m.impl("pack_truth", &pack_truth);
    m.impl("pack_signs", &pack_signs);
    m.impl("unpack", &unpack);
}

/* Uses the same functions: the library takes the device from the tensor. */
TORCH_LIBRARY_IMPL(gradcodec, CUDA, m)
{
    m.impl("pack_truth", &pack_truth);
    m.impl("pack_signs", &pack_signs);
    m.impl("unpack", &unpack);
}

TORCH_LIBRARY_IMPL(gradcodec, Meta, m)
{
    m.impl("pack_truth", &chunks_meta);
    m.impl("pack_signs", &chunks_meta);
    m.impl("unpack", &unpack_meta);
}
