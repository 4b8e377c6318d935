/* Functions of gradcodec.h: a pointer of exactly this type must take the address, whichever dlpack.h is in force. */
#define SAME(function, result, parameters) result(*same_##function) parameters = function;
SAME(gc_pack_chunks, gc_status_t, (const DLManagedTensor *, size_t, DLManagedTensor **))
SAME(gc_unpack_chunks, gc_status_t, (DLManagedTensor *const *, size_t, int64_t, DLManagedTensor **))
SAME(gc_pack_bits, gc_status_t, (const DLManagedTensor *, int32_t, gc_bit_order_t, DLManagedTensor **))
SAME(gc_pack_chunks_into, gc_status_t, (const DLTensor *, gc_bit_order_t, DLTensor *, void *))
SAME(gc_onebit_compress, gc_status_t, (const DLManagedTensor *, DLManagedTensor *, size_t, DLManagedTensor **, float *))
SAME(gc_tensor_empty, gc_status_t, (DLDevice, DLDataType, int32_t, const int64_t *, DLManagedTensor **))
SAME(gc_tensor_to_device, gc_status_t, (const DLManagedTensor *, DLDevice, DLManagedTensor **))
SAME(gc_tensor_to_versioned, gc_status_t, (DLManagedTensor *, struct DLManagedTensorVersioned **))
SAME(gc_tensor_from_versioned, gc_status_t, (struct DLManagedTensorVersioned *, DLManagedTensor **))
SAME(gc_tensor_free, void, (DLManagedTensor *))
SAME(gc_prepare, gc_status_t, (DLDevice))
