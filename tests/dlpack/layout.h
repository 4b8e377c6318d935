/* Checks the ABI's sizes, offsets and values on 64-bit machines, whichever dlpack.h a unit has included. Written from
 * the ABI, not from either header. */
#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
#define CHECK(what) static_assert(what, #what)
#elif __STDC_VERSION__ >= 201112L
#define CHECK(what) _Static_assert(what, #what)
#else /* C99 has no assertions: an array of negative size fails to compile */
#define CHECK(what) extern char checked[(what) ? 1 : -1]
#endif

#define AT(type, field, offset) CHECK(offsetof(type, field) == offset)

CHECK(sizeof(DLDeviceType) == 4);
CHECK(sizeof(DLDevice) == 8);
AT(DLDevice, device_type, 0);
AT(DLDevice, device_id, 4);

CHECK(sizeof(DLDataType) == 4);
AT(DLDataType, code, 0);
AT(DLDataType, bits, 1);
AT(DLDataType, lanes, 2);

CHECK(sizeof(DLTensor) == 48);
AT(DLTensor, data, 0);
AT(DLTensor, device, 8);
AT(DLTensor, ndim, 16);
AT(DLTensor, dtype, 20);
AT(DLTensor, shape, 24);
AT(DLTensor, strides, 32);
AT(DLTensor, byte_offset, 40);

CHECK(sizeof(DLManagedTensor) == 64);
CHECK(sizeof(struct DLManagedTensor) == 64);
AT(DLManagedTensor, dl_tensor, 0);
AT(DLManagedTensor, manager_ctx, 48);
AT(DLManagedTensor, deleter, 56);

CHECK(kDLCPU == 1);
CHECK(kDLCUDA == 2);
CHECK(kDLCUDAHost == 3);
CHECK(kDLOpenCL == 4);
CHECK(kDLVulkan == 7);
CHECK(kDLMetal == 8);
CHECK(kDLVPI == 9);
CHECK(kDLROCM == 10);
CHECK(kDLROCMHost == 11);
CHECK(kDLExtDev == 12);
CHECK(kDLCUDAManaged == 13);

CHECK(kDLInt == 0);
CHECK(kDLUInt == 1);
CHECK(kDLFloat == 2);
CHECK(kDLOpaqueHandle == 3);
CHECK(kDLBfloat == 4);
CHECK(kDLComplex == 5);

/* The checks below are grouped by DLPack version; a header older than 1.0 defines neither macro. */
#ifndef DLPACK_MAJOR_VERSION
#define VERSION 0
#else
#define VERSION (DLPACK_MAJOR_VERSION * 100 + DLPACK_MINOR_VERSION)
#endif

#if VERSION >= 100
CHECK(sizeof(DLPackVersion) == 8);
AT(DLPackVersion, major, 0);
AT(DLPackVersion, minor, 4);

CHECK(sizeof(struct DLManagedTensorVersioned) == 80);
AT(struct DLManagedTensorVersioned, version, 0);
AT(struct DLManagedTensorVersioned, manager_ctx, 8);
AT(struct DLManagedTensorVersioned, deleter, 16);
AT(struct DLManagedTensorVersioned, flags, 24);
AT(struct DLManagedTensorVersioned, dl_tensor, 32);

CHECK(kDLOneAPI == 14);
CHECK(kDLWebGPU == 15);
CHECK(kDLHexagon == 16);
CHECK(kDLMAIA == 17);
CHECK(kDLBool == 6);
CHECK(DLPACK_FLAG_BITMASK_READ_ONLY == 1);
CHECK(DLPACK_FLAG_BITMASK_IS_COPIED == 2);
#endif

#if VERSION >= 101
CHECK(kDLFloat8_e3m4 == 7);
CHECK(kDLFloat8_e4m3 == 8);
CHECK(kDLFloat8_e4m3b11fnuz == 9);
CHECK(kDLFloat8_e4m3fn == 10);
CHECK(kDLFloat8_e4m3fnuz == 11);
CHECK(kDLFloat8_e5m2 == 12);
CHECK(kDLFloat8_e5m2fnuz == 13);
CHECK(kDLFloat8_e8m0fnu == 14);
CHECK(kDLFloat6_e2m3fn == 15);
CHECK(kDLFloat6_e3m2fn == 16);
CHECK(kDLFloat4_e2m1fn == 17);
CHECK(DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED == 4);
#endif

#if VERSION >= 102
CHECK(kDLTrn == 18);
CHECK(sizeof(DLManagedTensorVersioned) == 80); /* C, too, has the typedef */

CHECK(sizeof(DLPackExchangeAPIHeader) == 16);
AT(DLPackExchangeAPIHeader, version, 0);
AT(DLPackExchangeAPIHeader, prev_api, 8);

CHECK(sizeof(DLPackExchangeAPI) == 56);
AT(DLPackExchangeAPI, header, 0);
AT(DLPackExchangeAPI, managed_tensor_allocator, 16);
AT(DLPackExchangeAPI, managed_tensor_from_py_object_no_sync, 24);
AT(DLPackExchangeAPI, managed_tensor_to_py_object_no_sync, 32);
AT(DLPackExchangeAPI, dltensor_from_py_object_no_sync, 40);
AT(DLPackExchangeAPI, current_work_stream, 48);
#endif

/* Signatures of the kinds that gradcodec.h has, and a function that uses both tensor types. */
int borrows(const DLManagedTensor *source, DLManagedTensor *const *chunks, DLManagedTensor **out);
int views(const DLTensor *source, DLTensor *destination, void *stream);
int values(DLDevice device, DLDataType dtype);
int versioned(DLManagedTensor *source, struct DLManagedTensorVersioned **out);
#if VERSION >= 100
void ends(struct DLManagedTensorVersioned *tensor);
void ends(struct DLManagedTensorVersioned *tensor) {
  if (tensor->deleter && !(tensor->flags & DLPACK_FLAG_BITMASK_READ_ONLY)) tensor->deleter(tensor);
}
#endif
