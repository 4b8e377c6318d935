/* gradcodec as a module of tvm-ffi: NumPy, PyTorch, CuPy and, inside jit, JAX can call one library. tvm_ops.py builds
 * and uses it. Tensors are views of the caller's memory, and work goes to the caller's current stream. */

#include <gradcodec.h>

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

namespace {

void *stream_of(const DLTensor *tensor)
{
    return TVMFFIEnvGetStream(tensor->device.device_type, tensor->device.device_id);
}

void check(gc_status_t status)
{
    if (status != GC_STATUS_OK)
        TVM_FFI_THROW(ValueError) << gc_last_error();
}

void pack_chunks(DLTensor *src, DLTensor *dst)
{
    check(gc_pack_chunks_into(src, GC_BIT_ORDER_BIG, dst, stream_of(src)));
}
void pack_signs(DLTensor *src, DLTensor *dst)
{
    check(gc_pack_signs_into(src, GC_BIT_ORDER_BIG, dst, stream_of(src)));
}
void unpack_chunks(DLTensor *src, DLTensor *dst)
{
    check(gc_unpack_chunks_into(src, GC_BIT_ORDER_BIG, dst, stream_of(src)));
}
void unpack_signs(DLTensor *src, DLTensor *dst)
{
    check(gc_unpack_signs_into(src, nullptr, GC_BIT_ORDER_BIG, dst, stream_of(src)));
}
void vote_signs(DLTensor *src, int64_t turn, DLTensor *dst)
{
    check(gc_vote_signs_into(src, static_cast<uint64_t>(turn), dst, stream_of(src)));
}

} // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack_chunks, pack_chunks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack_signs, pack_signs);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unpack_chunks, unpack_chunks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unpack_signs, unpack_signs);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(vote_signs, vote_signs);
