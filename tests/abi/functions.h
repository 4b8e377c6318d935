/* The exported functions as agreed: name, result, parameters. Written by hand from the agreed interface, not from the
 * code: the header is derived from the definitions, so comparing these two finds no mistake that is in both. Every
 * other list is made from this one or compared with it: see tests/source/boundary.rs.
 *
 * A file that includes this header may define FUNCTION. If it does not, a pointer of exactly the agreed type takes the
 * address of each function of gradcodec.h, or the file does not compile. */
#ifndef FUNCTION
#define FUNCTION(name, result, parameters) result(*same_##name) parameters = name;
/* Types of the typedefs. */
int32_t *same_gc_status_t = (gc_status_t *)NULL;
int32_t *same_gc_bit_order_t = (gc_bit_order_t *)NULL;
int32_t *same_gc_decode_t = (gc_decode_t *)NULL;
#endif

FUNCTION(gc_version, uint32_t, (void))
FUNCTION(gc_version_string, const char *, (void))
FUNCTION(gc_build_info, const char *, (void))
FUNCTION(gc_status_name, const char *, (gc_status_t))
FUNCTION(gc_last_error, const char *, (void))
FUNCTION(gc_set_threads, gc_status_t, (uint32_t))
FUNCTION(gc_prepare, gc_status_t, (DLDevice))
FUNCTION(gc_trim, gc_status_t, (DLDevice))
FUNCTION(gc_builtin_kernels, gc_status_t, (const char *, const void **, size_t *))
FUNCTION(gc_builtin_kernel_shape, gc_status_t, (const char *, int32_t, gc_kernel_shape_t *))

FUNCTION(gc_chunk_bytes, int64_t, (int64_t, size_t))
FUNCTION(gc_pack_chunks, gc_status_t, (const DLManagedTensor *, size_t, DLManagedTensor **))
FUNCTION(gc_unpack_chunks, gc_status_t, (DLManagedTensor *const *, size_t, int64_t, DLManagedTensor **))
FUNCTION(gc_pack_bits, gc_status_t, (const DLManagedTensor *, int32_t, gc_bit_order_t, DLManagedTensor **))
FUNCTION(gc_unpack_bits, gc_status_t, (const DLManagedTensor *, int32_t, int64_t, gc_bit_order_t, DLManagedTensor **))
FUNCTION(gc_pack_chunks_into, gc_status_t, (const DLTensor *, gc_bit_order_t, DLTensor *, void *))
FUNCTION(gc_unpack_chunks_into, gc_status_t, (const DLTensor *, gc_bit_order_t, DLTensor *, void *))
FUNCTION(gc_pack_bits_into, gc_status_t, (const DLTensor *, int32_t, gc_bit_order_t, DLTensor *, void *))
FUNCTION(gc_unpack_bits_into, gc_status_t, (const DLTensor *, int32_t, gc_bit_order_t, DLTensor *, void *))

FUNCTION(gc_pack_signs, gc_status_t, (const DLManagedTensor *, size_t, DLManagedTensor **))
FUNCTION(gc_unpack_signs, gc_status_t, (DLManagedTensor *const *, size_t, int64_t, DLDataType, DLManagedTensor **))
FUNCTION(gc_pack_signs_into, gc_status_t, (const DLTensor *, gc_bit_order_t, DLTensor *, void *))
FUNCTION(gc_unpack_signs_into, gc_status_t, (const DLTensor *, const DLTensor *, gc_bit_order_t, DLTensor *, void *))
FUNCTION(gc_vote_signs_into, gc_status_t, (const DLTensor *, uint64_t, DLTensor *, void *))


FUNCTION(gc_encode, gc_status_t, (const DLManagedTensor *, int32_t, DLManagedTensor **))
FUNCTION(gc_decode, gc_status_t, (const DLManagedTensor *, DLDataType, DLManagedTensor **))
FUNCTION(gc_codec_create, gc_status_t, (const gc_codec_options_t *, gc_codec_t **))
FUNCTION(gc_codec_free, void, (gc_codec_t *))
FUNCTION(gc_codec_payload_bytes, int64_t, (const gc_codec_t *))
FUNCTION(gc_codec_exchanges, int32_t, (const gc_codec_t *))
FUNCTION(gc_codec_encode, gc_status_t, (gc_codec_t *, const DLTensor *const *, size_t, const DLTensor *,
                                        const DLTensor *, DLTensor *, void *))
FUNCTION(gc_codec_decode, gc_status_t, (gc_codec_t *, const DLTensor *, int32_t, const DLTensor *, gc_decode_t,
                                        DLTensor *const *, size_t, void *))
FUNCTION(gc_codec_reduce, gc_status_t, (gc_codec_t *, size_t, const DLTensor *, DLTensor *, void *))
FUNCTION(gc_codec_flags, gc_status_t, (gc_codec_t *, DLTensor *, void *))
FUNCTION(gc_codec_scales, gc_status_t, (gc_codec_t *, DLTensor *, void *))
FUNCTION(gc_codec_commit, gc_status_t, (gc_codec_t *, const DLTensor *, void *))
FUNCTION(gc_codec_rollback, gc_status_t, (gc_codec_t *, void *))
FUNCTION(gc_codec_reset, gc_status_t, (gc_codec_t *, void *))
FUNCTION(gc_codec_state_bytes, int64_t, (const gc_codec_t *))
FUNCTION(gc_codec_state_out, gc_status_t, (gc_codec_t *, DLTensor *, void *))
FUNCTION(gc_codec_state_in, gc_status_t, (gc_codec_t *, const DLTensor *, void *))
FUNCTION(gc_codec_errors_out, gc_status_t, (gc_codec_t *, DLTensor *, DLTensor *, void *))
FUNCTION(gc_codec_errors_in, gc_status_t, (gc_codec_t *, const DLTensor *, const DLTensor *, void *))

FUNCTION(gc_comm_from_transport, gc_status_t, (const gc_transport_t *, gc_comm_t **))
FUNCTION(gc_allreduce_peers_bytes, int64_t, (const gc_codec_options_t *, int32_t, int32_t))
FUNCTION(gc_comm_from_peers, gc_status_t, (const gc_peers_options_t *, gc_comm_t **))
FUNCTION(gc_comm_open_peers, gc_status_t, (gc_comm_t *, DLDevice, int64_t, uint32_t, gc_comm_t **))
FUNCTION(gc_comm_hierarchical, gc_status_t, (gc_comm_t *, gc_comm_t *, gc_comm_t **))
FUNCTION(gc_comm_from_nccl, gc_status_t, (const gc_nccl_options_t *, gc_comm_t **))
FUNCTION(gc_comm_nccl_id, gc_status_t, (const gc_nccl_options_t *, uint8_t *))
FUNCTION(gc_comm_from_nccl_id, gc_status_t, (const gc_nccl_options_t *, const uint8_t *, int32_t, int32_t, DLDevice,
                                             gc_comm_t **))
FUNCTION(gc_comm_group, gc_status_t, (int32_t, gc_comm_t **))
FUNCTION(gc_comm_rank, int32_t, (const gc_comm_t *))
FUNCTION(gc_comm_world_size, int32_t, (const gc_comm_t *))
FUNCTION(gc_comm_async_error, gc_status_t, (const gc_comm_t *))
FUNCTION(gc_comm_abort, gc_status_t, (gc_comm_t *))
FUNCTION(gc_comm_free, void, (gc_comm_t *))
FUNCTION(gc_allreduce_create, gc_status_t, (gc_comm_t *, const gc_codec_options_t *, gc_allreduce_t **))
FUNCTION(gc_allreduce_free, void, (gc_allreduce_t *))
FUNCTION(gc_allreduce_shard_elements, int64_t, (const gc_allreduce_t *))
FUNCTION(gc_allreduce_sent_bytes, int64_t, (const gc_allreduce_t *, int64_t *))
FUNCTION(gc_allreduce_exchanges, int32_t, (const gc_allreduce_t *))
FUNCTION(gc_allreduce_parts, int64_t, (const gc_allreduce_t *, int32_t, int32_t, gc_part_t *, int64_t))
FUNCTION(gc_allreduce_run, gc_status_t, (gc_allreduce_t *, DLTensor *const *, size_t, const DLTensor *, const DLTensor *, void *))
FUNCTION(gc_allreduce_reduce_scatter, gc_status_t, (gc_allreduce_t *, const DLTensor *const *, size_t, const DLTensor *,
    const DLTensor *, DLTensor *, void *))
FUNCTION(gc_allreduce_all_gather, gc_status_t, (gc_allreduce_t *, const DLTensor *, DLTensor *const *, size_t, void *))
FUNCTION(gc_allreduce_flags, gc_status_t, (gc_allreduce_t *, DLTensor *, void *))
FUNCTION(gc_allreduce_commit, gc_status_t, (gc_allreduce_t *, const DLTensor *, void *))
FUNCTION(gc_allreduce_rollback, gc_status_t, (gc_allreduce_t *, void *))
FUNCTION(gc_allreduce_reset, gc_status_t, (gc_allreduce_t *, void *))
FUNCTION(gc_allreduce_errors_out, gc_status_t, (gc_allreduce_t *, DLTensor *, DLTensor *, void *))
FUNCTION(gc_allreduce_errors_in, gc_status_t, (gc_allreduce_t *, const DLTensor *, const DLTensor *, void *))

FUNCTION(gc_tensor_empty, gc_status_t, (DLDevice, DLDataType, int32_t, const int64_t *, DLManagedTensor **))
FUNCTION(gc_tensor_from_pointer, gc_status_t, (void *, DLDevice, DLDataType, int32_t, const int64_t *, const int64_t *,
                                               void (*)(void *), void *, DLManagedTensor **))
FUNCTION(gc_tensor_to_versioned, gc_status_t, (DLManagedTensor *, struct DLManagedTensorVersioned **))
FUNCTION(gc_tensor_from_versioned, gc_status_t, (struct DLManagedTensorVersioned *, DLManagedTensor **))
FUNCTION(gc_tensor_free, void, (DLManagedTensor *))
FUNCTION(gc_tensor_free_versioned, void, (struct DLManagedTensorVersioned *))
FUNCTION(gc_capsule_destructor, void, (void *))

FUNCTION(gc_tensor_to_device, gc_status_t, (const DLManagedTensor *, DLDevice, DLManagedTensor **))
FUNCTION(gc_copy_into, gc_status_t, (const DLTensor *, DLTensor *, void *))

FUNCTION(gc_share_send, gc_status_t, (const DLManagedTensor *, int, uint32_t, int32_t, gc_share_t **))
FUNCTION(gc_share_wait, gc_status_t, (gc_share_t *, int32_t))
FUNCTION(gc_share_free, void, (gc_share_t *))
FUNCTION(gc_share_receive, gc_status_t, (int, DLDevice, int32_t, DLManagedTensor **))

FUNCTION(gc_elementwise_create, gc_status_t, (const gc_elementwise_options_t *, gc_kernel_t **))
FUNCTION(gc_reduction_create, gc_status_t, (const gc_reduction_options_t *, gc_kernel_t **))
FUNCTION(gc_kernel_run, gc_status_t, (gc_kernel_t *, const DLTensor *const *, size_t, DLTensor *const *, size_t,
                                      const gc_run_options_t *, void *))
FUNCTION(gc_kernel_prepare, gc_status_t, (gc_kernel_t *, const DLTensor *const *, size_t, DLTensor *const *, size_t,
                                          const gc_run_options_t *, void *))
FUNCTION(gc_kernel_workspace_bytes, int64_t, (const gc_kernel_t *, const DLTensor *const *, size_t, DLTensor *const *, size_t,
                                              const gc_run_options_t *))
FUNCTION(gc_kernel_log, gc_status_t, (const gc_kernel_t *, const char **))
FUNCTION(gc_kernel_free, void, (gc_kernel_t *))

#undef FUNCTION
