#include "cost.h"

int32_t cost_pack_signs_into(const float *gradient, int64_t n, uint8_t *chunks, int64_t bytes, void *stream)
{
    using gradcodec::view;
    gradcodec::pack_signs_into(view(gradient, {n}), GC_BIT_ORDER_BIG, view(chunks, {4, bytes}), stream);
    return GC_STATUS_OK;
}

int32_t cost_unpack_chunks_into(const uint8_t *chunks, int64_t bytes, float *out, int64_t n, void *stream)
{
    using gradcodec::view;
    gradcodec::unpack_chunks_into(view(chunks, {4, bytes}), GC_BIT_ORDER_BIG, view(out, {n}), stream);
    return GC_STATUS_OK;
}

int64_t cost_pack_bits(const DLManagedTensor *source)
{
    return gradcodec::pack_bits(source)->shape[0];
}
