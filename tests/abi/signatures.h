/* The functions of gradcodec.h as they were promised: a pointer of exactly this type takes the address of each, or what
 * includes this does not compile. Written by hand. tests/signatures.rs has the same for the library's side, and sees to
 * it that no function is missing here. */
#define SAME(function, result, parameters) result(*same_##function) parameters = function;

SAME(gc_version, uint32_t, (void))
SAME(gc_version_string, const char *, (void))
SAME(gc_status_name, const char *, (gc_status_t))
SAME(gc_last_error, const char *, (void))
SAME(gc_set_threads, gc_status_t, (uint32_t))
SAME(gc_prepare, gc_status_t, (DLDevice))
SAME(gc_trim, gc_status_t, (DLDevice))
SAME(gc_kernel_image, gc_status_t, (int32_t, const char **, size_t *))

SAME(gc_chunk_bytes, int64_t, (int64_t, size_t))
SAME(gc_pack_chunks, gc_status_t, (const DLManagedTensor *, size_t, DLManagedTensor **))
SAME(gc_unpack_chunks, gc_status_t, (DLManagedTensor *const *, size_t, int64_t, DLManagedTensor **))
SAME(gc_pack_bits, gc_status_t, (const DLManagedTensor *, int32_t, gc_bit_order_t, DLManagedTensor **))
SAME(gc_unpack_bits, gc_status_t, (const DLManagedTensor *, int32_t, int64_t, gc_bit_order_t, DLManagedTensor **))
SAME(gc_pack_chunks_into, gc_status_t, (const DLTensor *, gc_bit_order_t, DLTensor *, void *))
SAME(gc_unpack_chunks_into, gc_status_t, (const DLTensor *, gc_bit_order_t, DLTensor *, void *))
SAME(gc_pack_signs_into, gc_status_t, (const DLTensor *, gc_bit_order_t, DLTensor *, void *))
SAME(gc_pack_bits_into, gc_status_t, (const DLTensor *, int32_t, gc_bit_order_t, DLTensor *, void *))
SAME(gc_unpack_bits_into, gc_status_t, (const DLTensor *, int32_t, gc_bit_order_t, DLTensor *, void *))

SAME(gc_tensor_empty, gc_status_t, (DLDevice, DLDataType, int32_t, const int64_t *, DLManagedTensor **))
SAME(gc_tensor_from_pointer, gc_status_t, (void *, DLDevice, DLDataType, int32_t, const int64_t *, const int64_t *,
                                           void (*)(void *), void *, DLManagedTensor **))
SAME(gc_tensor_to_versioned, gc_status_t, (DLManagedTensor *, struct DLManagedTensorVersioned **))
SAME(gc_tensor_from_versioned, gc_status_t, (struct DLManagedTensorVersioned *, DLManagedTensor **))
SAME(gc_tensor_free, void, (DLManagedTensor *))
SAME(gc_capsule_destructor, void, (void *))

/* And what the typedefs among them are. */
int32_t *same_gc_status_t = (gc_status_t *)NULL;
int32_t *same_gc_bit_order_t = (gc_bit_order_t *)NULL;
