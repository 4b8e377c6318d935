/* The CUDA driver, but for one function: a stream that is asked for always has work left. So the library, which tries in
 * each context whether cuMemFree waits for a stream, finds that it does not. REAL_DRIVER is the path of the driver. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

enum { NOT_READY = 600 };
int cuStreamQuery(void *stream) {
    (void)stream;
    return NOT_READY;
}

/* All others go on to the driver, whatever their arguments are. */
#define FORWARDED(X) \
    X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetAttribute) \
    X(cuDeviceTotalMem_v2) X(cuDevicePrimaryCtxGetState) X(cuDevicePrimaryCtxRetain) X(cuCtxPushCurrent_v2) \
    X(cuCtxPopCurrent_v2) X(cuCtxGetDevice) X(cuCtxGetId) X(cuCtxGetCurrent) X(cuCtxSynchronize) X(cuStreamCreate) \
    X(cuStreamDestroy_v2) \
    X(cuStreamGetCtx) X(cuStreamGetDevice) X(cuStreamSynchronize) X(cuThreadExchangeStreamCaptureMode) \
    X(cuMemAlloc_v2) X(cuMemFree_v2) X(cuLibraryLoadData) X(cuMemcpyHtoD_v2) X(cuMemcpyDtoH_v2) X(cuMemcpyAsync) \
    X(cuMemsetD8Async) X(cuLibraryUnload) X(cuLibraryGetKernel) X(cuKernelGetFunction) X(cuFuncGetAttribute) \
    X(cuLaunchKernel) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuEventCreate) X(cuEventRecord) X(cuEventDestroy_v2) \
    X(cuStreamWaitEvent) X(cuStreamIsCapturing) X(cuDeviceCanAccessPeer) X(cuDeviceGetUuid_v2) \
    X(cuCtxEnablePeerAccess) X(cuEventSynchronize) X(cuPointerGetAttribute) X(cuIpcGetMemHandle) \
    X(cuIpcOpenMemHandle_v2) X(cuIpcCloseMemHandle) X(cuMemcpyPeerAsync) X(cuPointerGetAttributes) \
    X(cuMemGetAddressRange_v2) X(cuMemCreate) X(cuMemRelease) X(cuMemRetainAllocationHandle) \
    X(cuMemGetAllocationPropertiesFromHandle) X(cuMemGetAllocationGranularity) X(cuMemExportToShareableHandle) \
    X(cuMemImportFromShareableHandle) X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemMap) X(cuMemUnmap) \
    X(cuMemSetAccess) X(cuLaunchKernelEx)
#define DEFINE(name) \
    static void *real_##name __attribute__((used)); \
    __attribute__((naked)) void name(void) { __asm__("jmp *real_" #name "(%rip)"); }
FORWARDED(DEFINE)

#define FIND(name) \
    if (!(real_##name = dlsym(driver, #name))) { \
        fprintf(stderr, "the driver has no " #name "\n"); \
        exit(1); \
    }
__attribute__((constructor)) static void find(void) {
    void *driver = dlopen(getenv("REAL_DRIVER"), RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    FORWARDED(FIND)
}
