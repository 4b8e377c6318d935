/*
 * DLPack 1.3, complete, for programs that have no dlpack.h of their own; gradcodec.h includes it.
 *
 * If a dlpack.h of DLPack 0.6 or later was included first, it is used as it is. If one is included later, the taken
 * guard makes it empty: so this file declares everything that it would, also what GradCodec never uses.
 *
 * The names, values and layouts are the ABI's and never change. The comments say what GradCodec emits and accepts.
 */
#ifndef GRADCODEC_DLPACK_H
#define GRADCODEC_DLPACK_H

/* Lets signatures use `struct DLManagedTensorVersioned *` also with a dlpack.h before 1.0, which lacks the type. */
struct DLManagedTensorVersioned;

#ifndef DLPACK_DLPACK_H_
#define DLPACK_DLPACK_H_

#include <stddef.h>
#include <stdint.h>

#define DLPACK_MAJOR_VERSION 1 /* another major version is another layout: only `deleter` may be used */
#define DLPACK_MINOR_VERSION 3 /* a higher minor version only adds constants */

#ifdef __cplusplus
#define DLPACK_EXTERN_C extern "C"
#else
#define DLPACK_EXTERN_C
#endif

/* Nothing here has this mark; users of another dlpack.h may expect it. */
#if defined(_WIN32) && defined(DLPACK_EXPORTS)
#define DLPACK_DLL __declspec(dllexport)
#elif defined(_WIN32)
#define DLPACK_DLL __declspec(dllimport)
#else
#define DLPACK_DLL
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version that a tensor was made for. GradCodec emits 1.0, which every importer takes, and accepts any 1.x. */
typedef struct {
  uint32_t major;
  uint32_t minor;
} DLPackVersion;

/* Kind of device that holds memory. C++ gets the width, so that a number from a newer DLPack is a valid value there
 * too; C picks an integer of the same width by itself. */
#ifdef __cplusplus
typedef enum : int32_t {
#else
typedef enum {
#endif
  kDLCPU = 1,
  kDLCUDA = 2,
  kDLCUDAHost = 3,     /* pinned host memory; GradCodec treats it as the CPU's and returns CPU tensors */
  kDLOpenCL = 4,       /* from here on GradCodec accepts kDLCUDAManaged only */
  kDLVulkan = 7,
  kDLMetal = 8,
  kDLVPI = 9,          /* Verilog simulator */
  kDLROCM = 10,
  kDLROCMHost = 11,    /* pinned host memory of ROCm */
  kDLExtDev = 12,      /* whatever two parties agree on, for experiments */
  kDLCUDAManaged = 13, /* unified memory; GradCodec works on it on the GPU that `device_id` names */
  kDLOneAPI = 14,
  kDLWebGPU = 15,
  kDLHexagon = 16,     /* Qualcomm */
  kDLMAIA = 17,        /* Microsoft */
  kDLTrn = 18          /* AWS Trainium */
} DLDeviceType;

typedef struct {
  DLDeviceType device_type;
  int32_t device_id; /* number of the GPU, from 0; 0 for the CPU and pinned memory */
} DLDevice;

/* Kinds of numbers; the size is in DLDataType.bits. GradCodec reads and writes bool, integers, float and bfloat. */
typedef enum {
  kDLInt = 0,
  kDLUInt = 1, /* also packed bits, 8 bits wide */
  kDLFloat = 2,
  kDLOpaqueHandle = 3,
  kDLBfloat = 4,
  kDLComplex = 5, /* `bits` counts both parts */
  kDLBool = 6,    /* 8 bits, a byte per element */
  kDLFloat8_e3m4 = 7,
  kDLFloat8_e4m3 = 8,
  kDLFloat8_e4m3b11fnuz = 9,
  kDLFloat8_e4m3fn = 10,
  kDLFloat8_e4m3fnuz = 11,
  kDLFloat8_e5m2 = 12,
  kDLFloat8_e5m2fnuz = 13,
  kDLFloat8_e8m0fnu = 14,
  kDLFloat6_e2m3fn = 15, /* these three share bytes, lowest bits first, unless the flag below says padded */
  kDLFloat6_e3m2fn = 16,
  kDLFloat4_e2m1fn = 17
} DLDataTypeCode;

/* An element, in the byte order of the machine: float32 is { kDLFloat, 32, 1 }. */
typedef struct {
  uint8_t code;   /* a DLDataTypeCode in one byte */
  uint8_t bits;   /* of one lane */
  uint16_t lanes; /* 1, or the width of a vector element */
} DLDataType;

/* A view of memory that something else owns. */
typedef struct {
  /* Emitted: the first element, NULL when there are none. Accepted: any alignment; NULL when there are none. */
  void *data;
  DLDevice device;
  int32_t ndim; /* 0 for a scalar */
  DLDataType dtype;
  int64_t *shape; /* `ndim` lengths; may be NULL when ndim is 0 */
  /* Steps in elements, not bytes. Emitted: always, when ndim > 0. Accepted: also NULL for C order, negative steps, and
   * any value where the length is 1. */
  int64_t *strides;
  uint64_t byte_offset; /* from `data` to the first element. Emitted: 0. Accepted: any. */
} DLTensor;

/* A view with its owner: what a Python capsule named "dltensor" holds. */
typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void *manager_ctx; /* private to the producer */
  /* Releases the tensor, this struct included; the last holder calls it once, on any thread. Emitted: always. Accepted:
   * also NULL, with nothing to do. An importer that fails does not call it. */
  void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;

/* The bits of DLManagedTensorVersioned.flags; the others are 0. GradCodec emits none. */
#define DLPACK_FLAG_BITMASK_READ_ONLY 1UL              /* the consumer must not write */
#define DLPACK_FLAG_BITMASK_IS_COPIED 2UL              /* made for this consumer, which alone uses the memory */
#define DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED 4UL /* elements below 8 bits have a byte each */

/* The successor of DLManagedTensor: what a capsule named "dltensor_versioned" holds. Everything up to `flags` stays in
 * place in later major versions, so that `deleter` can always be called. */
typedef struct DLManagedTensorVersioned {
  DLPackVersion version; /* check this before the rest */
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self); /* see DLManagedTensor */
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

/*
 * The C exchange API. A framework's tensor type (not its tensors) has an attribute `__dlpack_c_exchange_api__`: a
 * capsule named "dlpack_exchange_api" around a DLPackExchangeAPI that lives as long as the process. With it C code
 * reads a Python tensor without calling a Python method. GradCodec has no such table. With a framework's table a
 * program can allocate outputs for GradCodec's `_into` functions there, on the framework's own stream.
 *
 * All functions return 0, or -1 with a Python exception set, unless documented otherwise. None waits for a stream or
 * throws a C++ exception. Functions that handle Python objects need the GIL.
 */

/* Allocates a tensor like `prototype` (device, dtype and shape) in `*out`. Reports a failure to `SetError`, with the
 * exception's name as `kind`, instead of a Python exception: `SetError` takes the GIL if it needs it. */
typedef int (*DLPackManagedTensorAllocator)(DLTensor *prototype, DLManagedTensorVersioned **out, void *error_ctx,
                                            void (*SetError)(void *error_ctx, const char *kind, const char *message));

/* Exports the Python tensor `py_object` as an owned tensor in `*out`: the caller runs its deleter. */
typedef int (*DLPackManagedTensorFromPyObjectNoSync)(void *py_object, DLManagedTensorVersioned **out);

/* Exports the Python tensor `py_object` as a view in the caller's `*out`, valid until the framework runs again. */
typedef int (*DLPackDLTensorFromPyObjectNoSync)(void *py_object, DLTensor *out);

/* Returns the framework's current stream, to be passed as GradCodec's `stream`. NULL for the CPU. */
typedef int (*DLPackCurrentWorkStream)(DLDeviceType device_type, int32_t device_id, void **out_current_stream);

/* Makes a Python tensor in `*out_py_object` that takes `tensor` over. */
typedef int (*DLPackManagedTensorToPyObjectNoSync)(DLManagedTensorVersioned *tensor, void **out_py_object);

/* Header of every table, of any version. With an unknown major version, follow `prev_api` to an older table. */
typedef struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  struct DLPackExchangeAPIHeader *prev_api; /* NULL at the end */
} DLPackExchangeAPIHeader;

typedef struct DLPackExchangeAPI {
  DLPackExchangeAPIHeader header;
  DLPackManagedTensorAllocator managed_tensor_allocator;
  DLPackManagedTensorFromPyObjectNoSync managed_tensor_from_py_object_no_sync;
  DLPackManagedTensorToPyObjectNoSync managed_tensor_to_py_object_no_sync;
  DLPackDLTensorFromPyObjectNoSync dltensor_from_py_object_no_sync; /* the only one that may be NULL */
  DLPackCurrentWorkStream current_work_stream;
} DLPackExchangeAPI;

#ifdef __cplusplus
}
#endif

#endif /* DLPACK_DLPACK_H_ */
#endif /* GRADCODEC_DLPACK_H */
