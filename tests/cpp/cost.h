/* The same calls from C and from C++, for cost.sh to compare: what a program would write in each. */
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#include <gradcodec/gradcodec.hpp>
#else
#include <gradcodec.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif
/* Memory of the caller's, both ways. */
int32_t cost_pack_signs_into(const float *gradient, int64_t n, uint8_t *chunks, int64_t bytes, void *stream);
int32_t cost_unpack_chunks_into(const uint8_t *chunks, int64_t bytes, float *out, int64_t n, void *stream);
/* A tensor in, a tensor out, released. */
int64_t cost_pack_bits(const DLManagedTensor *source);
#ifdef __cplusplus
}
#endif
