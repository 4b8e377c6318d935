#include "cost.h"

int32_t cost_pack_signs_into(const float *gradient, int64_t n, uint8_t *chunks, int64_t bytes, void *stream)
{
    int64_t length[] = {n}, rows[] = {4, bytes};
    const DLTensor src = {(void *)gradient, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, length, NULL, 0};
    DLTensor dst = {chunks, {kDLCPU, 0}, 2, {kDLUInt, 8, 1}, rows, NULL, 0};
    return gc_pack_signs_into(&src, GC_BIT_ORDER_BIG, &dst, stream);
}

int32_t cost_unpack_chunks_into(const uint8_t *chunks, int64_t bytes, float *out, int64_t n, void *stream)
{
    int64_t rows[] = {4, bytes}, length[] = {n};
    const DLTensor src = {(void *)chunks, {kDLCPU, 0}, 2, {kDLUInt, 8, 1}, rows, NULL, 0};
    DLTensor dst = {out, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, length, NULL, 0};
    return gc_unpack_chunks_into(&src, GC_BIT_ORDER_BIG, &dst, stream);
}

int64_t cost_pack_bits(const DLManagedTensor *source)
{
    DLManagedTensor *out = NULL;
    if (gc_pack_bits(source, GC_AXIS_NONE, GC_BIT_ORDER_BIG, &out) != GC_STATUS_OK)
        return -1;
    const int64_t bytes = out->dl_tensor.shape[0];
    gc_tensor_free(out);
    return bytes;
}
