/* Prints all that a dlpack.h declares. Compiled once with ours and once with a real one put before it by -include, as C
 * and as C++; the outputs must be the same. In C++ every line has the type as well. */
#include <stddef.h>
#include <stdio.h>

#ifdef __cplusplus
#include <type_traits>
#include <typeinfo>
#define NAME_OF(thing) typeid(thing).name()
#else
#define NAME_OF(thing) ""
#endif

#define QUOTED(text) #text
#define TEXT(macro) QUOTED(macro)
#define VALUE(name) printf("%s %lld %zu %s\n", #name, (long long)(name), sizeof(name), NAME_OF(name))
#define TYPE(type) printf("%s %zu %s\n", #type, sizeof(type), NAME_OF(type))
#define FIELD(type, field)                                                                                   \
  printf("%s.%s %zu %zu %s\n", #type, #field, offsetof(type, field), sizeof(((type *)0)->field),             \
         NAME_OF(((type *)0)->field))

int main(void) {
#include "values.h" /* VALUE(...) for every constant that either header has: written by order.sh */
  printf("DLPACK_EXTERN_C %s\n", TEXT(DLPACK_EXTERN_C));
  printf("DLPACK_DLL %s\n", TEXT(DLPACK_DLL));

  TYPE(DLPackVersion);
  FIELD(DLPackVersion, major);
  FIELD(DLPackVersion, minor);

  TYPE(DLDeviceType);
  TYPE(DLDataTypeCode);
#ifdef __cplusplus
  TYPE(std::underlying_type<DLDeviceType>::type);
  TYPE(std::underlying_type<DLDataTypeCode>::type);
#else
  printf("unsigned: %d %d\n", (DLDeviceType)-1 > 0, (DLDataTypeCode)-1 > 0);
#endif

  TYPE(DLDevice);
  FIELD(DLDevice, device_type);
  FIELD(DLDevice, device_id);

  TYPE(DLDataType);
  FIELD(DLDataType, code);
  FIELD(DLDataType, bits);
  FIELD(DLDataType, lanes);

  TYPE(DLTensor);
  FIELD(DLTensor, data);
  FIELD(DLTensor, device);
  FIELD(DLTensor, ndim);
  FIELD(DLTensor, dtype);
  FIELD(DLTensor, shape);
  FIELD(DLTensor, strides);
  FIELD(DLTensor, byte_offset);

  TYPE(DLManagedTensor);
  TYPE(struct DLManagedTensor);
  FIELD(DLManagedTensor, dl_tensor);
  FIELD(DLManagedTensor, manager_ctx);
  FIELD(DLManagedTensor, deleter);

  TYPE(DLManagedTensorVersioned);
  TYPE(struct DLManagedTensorVersioned);
  FIELD(DLManagedTensorVersioned, version);
  FIELD(DLManagedTensorVersioned, manager_ctx);
  FIELD(DLManagedTensorVersioned, deleter);
  FIELD(DLManagedTensorVersioned, flags);
  FIELD(DLManagedTensorVersioned, dl_tensor);

  TYPE(DLPackManagedTensorAllocator);
  TYPE(DLPackManagedTensorFromPyObjectNoSync);
  TYPE(DLPackDLTensorFromPyObjectNoSync);
  TYPE(DLPackCurrentWorkStream);
  TYPE(DLPackManagedTensorToPyObjectNoSync);

  TYPE(DLPackExchangeAPIHeader);
  TYPE(struct DLPackExchangeAPIHeader);
  FIELD(DLPackExchangeAPIHeader, version);
  FIELD(DLPackExchangeAPIHeader, prev_api);

  TYPE(DLPackExchangeAPI);
  TYPE(struct DLPackExchangeAPI);
  FIELD(DLPackExchangeAPI, header);
  FIELD(DLPackExchangeAPI, managed_tensor_allocator);
  FIELD(DLPackExchangeAPI, managed_tensor_from_py_object_no_sync);
  FIELD(DLPackExchangeAPI, managed_tensor_to_py_object_no_sync);
  FIELD(DLPackExchangeAPI, dltensor_from_py_object_no_sync);
  FIELD(DLPackExchangeAPI, current_work_stream);
  return 0;
}
