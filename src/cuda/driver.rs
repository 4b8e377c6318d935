//! The CUDA driver: loaded on first use. Its results are kept as plain integers.
//!
//! cudarc declares the functions, and a compile-time check compares its declarations with ours. cudarc does not make
//! the calls: its wrappers panic if a library or a symbol is missing. They also return a Rust enum, for which an error
//! code of a newer driver is undefined behaviour.

use std::{
    ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void},
    fmt, ptr,
    sync::OnceLock,
};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute,
    CUipcMemHandle, CUjit_option, CUkernel, CUlaunchConfig, CUlibrary, CUlibraryOption, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp, CUmemGenericAllocationHandle,
    CUpointer_attribute, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus, CUuuid,
};

use crate::ffi::{
    dynamic::{self, table},
    error::{Error, Result, Status, error},
    fallible,
};

use super::allocator::blocks::Cache;

/// Oldest driver version: CUDA 12.0 (driver 525), the first that reads our fatbins and the PTX in them.
const OLDEST: c_int = 12000;
/// First version that accepts launches with early begin (PDL) in graphs.
const EARLY_IN_GRAPHS: c_int = 12030;

table! {
    /// The functions of the driver.
    Functions, declared in sys to answer CUresult,
    required {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut CUdevice, c_int);
        cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        cuDeviceTotalMem_v2(*mut usize, CUdevice);
        cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
        cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
        cuDevicePrimaryCtxGetState(CUdevice, *mut c_uint, *mut c_int);
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuCtxPushCurrent_v2(CUcontext);
        cuCtxPopCurrent_v2(*mut CUcontext);
        cuCtxGetCurrent(*mut CUcontext);
        cuCtxGetDevice(*mut CUdevice);
        cuCtxGetId(CUcontext, *mut c_ulonglong);
        cuCtxSynchronize();
        cuCtxEnablePeerAccess(CUcontext, c_uint);
        cuStreamCreate(*mut CUstream, c_uint);
        cuStreamDestroy_v2(CUstream);
        cuStreamGetCtx(CUstream, *mut CUcontext);
        cuStreamQuery(CUstream);
        cuStreamSynchronize(CUstream);
        cuStreamWaitEvent(CUstream, CUevent, c_uint);
        cuStreamIsCapturing(CUstream, *mut CUstreamCaptureStatus);
        cuEventCreate(*mut CUevent, c_uint);
        cuEventRecord(CUevent, CUstream);
        cuEventSynchronize(CUevent);
        cuEventDestroy_v2(CUevent);
        cuThreadExchangeStreamCaptureMode(*mut CUstreamCaptureMode);
        cuMemAlloc_v2(*mut CUdeviceptr, usize);
        cuMemFree_v2(CUdeviceptr);
        cuPointerGetAttribute(*mut c_void, CUpointer_attribute, CUdeviceptr);
        cuIpcGetMemHandle(*mut CUipcMemHandle, CUdeviceptr);
        cuIpcOpenMemHandle_v2(*mut CUdeviceptr, CUipcMemHandle, c_uint);
        cuIpcCloseMemHandle(CUdeviceptr);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemcpyHtoD_v2(CUdeviceptr, *const c_void, usize);
        cuMemcpyDtoH_v2(*mut c_void, CUdeviceptr, usize);
        cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuMemcpyPeerAsync(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream);
        cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        cuPointerGetAttributes(c_uint, *mut CUpointer_attribute, *mut *mut c_void, CUdeviceptr);
        cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr);
        cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
        cuMemRelease(CUmemGenericAllocationHandle);
        cuMemRetainAllocationHandle(*mut CUmemGenericAllocationHandle, *mut c_void);
        cuMemGetAllocationPropertiesFromHandle(*mut CUmemAllocationProp, CUmemGenericAllocationHandle);
        cuMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags);
        cuMemExportToShareableHandle(
            *mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong,
        );
        cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType);
        cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
        cuMemAddressFree(CUdeviceptr, usize);
        cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
        cuMemUnmap(CUdeviceptr, usize);
        cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
        cuLibraryLoadData(
            *mut CUlibrary, *const c_void, *mut CUjit_option, *mut *mut c_void, c_uint, *mut CUlibraryOption,
            *mut *mut c_void, c_uint,
        );
        cuLibraryUnload(CUlibrary);
        cuLibraryGetKernel(*mut CUkernel, CUlibrary, *const c_char);
        cuKernelGetFunction(*mut CUfunction, CUkernel);
        cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
        cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
            *mut *mut c_void,
        );
        cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
    }
    optional {
        /// Since 12.8. Without it, the device of a stream is found by making its context current.
        cuStreamGetDevice(CUstream, *mut CUdevice);
    }
}

/// Type of cuGetErrorName. It is not in the table, because the declaring crate has an enum for the code.
type GetErrorName = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

/// Driver of this machine, initialized.
pub struct Driver {
    pub functions: Functions,
    error_name: GetErrorName,
    /// True if a launch may begin while the one before it ends, also in a graph.
    pub supports_early_launch: bool,
    /// Devices that the driver shows, by their numbers.
    pub devices: Vec<Properties>,
}

/// Properties of a device, and the state that this process keeps of it.
pub struct Properties {
    pub handle: CUdevice,
    /// Compute capability: 90 for 9.0.
    pub compute_capability: i32,
    pub multiprocessors: u64,
    /// Number of threads that all multiprocessors run at once.
    pub threads: u64,
    /// Primary context as a number, so that threads can share it. Set on first use, and then kept for good.
    pub primary: OnceLock<usize>,
    /// Cache of device memory.
    pub cache: Cache,
}

impl Driver {
    /// Returns the driver. The first call that finds one loads and initializes it.
    pub fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        match DRIVER.get() {
            Some(driver) => Ok(driver),
            // Two threads may load the driver at the same time; one of the two equal tables stays.
            None => Self::load().map(|driver| DRIVER.get_or_init(|| driver)),
        }
    }

    fn load() -> Result<Self> {
        // libcuda.so.1 is the name that NVIDIA's driver packages install and that CUDA's runtime loads. libcuda.so may
        // be a toolkit's stub.
        let library = dynamic::load(c"libcuda.so.1")
            .ok_or_else(|| error!(DriverUnavailable, "cannot load the CUDA driver: {}", dynamic::failure()))?;
        // Drivers older than 12.0 lack some functions.
        let missing = |name: &CStr| -> Error {
            error!(DriverUnavailable, "the CUDA driver has no {}: 12.0 is needed (driver 525)", name.to_string_lossy())
        };
        // SAFETY: libcuda.so.1 is the driver and stays loaded; its reference gives cuGetErrorName this signature.
        let (functions, error_name) = unsafe {
            const NAME: &CStr = c"cuGetErrorName";
            let error_name = dynamic::address(library, NAME).ok_or_else(|| missing(NAME))?;
            (Functions::of(library).map_err(missing)?, std::mem::transmute::<*mut c_void, GetErrorName>(error_name))
        };
        let unavailable = |failure| Error { status: Status::DriverUnavailable, ..failure };
        let mut driver = Self { functions, error_name, supports_early_launch: false, devices: Vec::new() };
        let (mut version, mut count) = (0, 0);
        // SAFETY: the integers outlive the calls, and these functions may be called at any time.
        unsafe {
            // Check the version before cuInit, because cuInit of an old driver may fail for any reason.
            driver
                .check((driver.functions.cuDriverGetVersion)(&mut version), format_args!("cuDriverGetVersion"))
                .map_err(unavailable)?;
            if version < OLDEST {
                return Err(error!(
                    DriverUnavailable,
                    "the CUDA driver is of CUDA {}.{}; 12.0 is needed (driver 525)",
                    version / 1000,
                    version % 1000 / 10
                ));
            }
            driver.supports_early_launch = version >= EARLY_IN_GRAPHS;
            match (driver.functions.cuInit)(0) {
                // The driver works but has no device, so no device number exists.
                NO_DEVICE => return Ok(driver),
                code => driver.check(code, format_args!("cuInit")).map_err(unavailable)?,
            }
            driver.check((driver.functions.cuDeviceGetCount)(&mut count), format_args!("cuDeviceGetCount"))?;
        }
        driver.devices = fallible::list(usize::try_from(count).unwrap_or(0), "CUDA devices")?;
        for ordinal in 0..count {
            let properties = driver.properties(ordinal)?;
            driver.devices.push(properties);
        }
        Ok(driver)
    }

    fn properties(&self, ordinal: c_int) -> Result<Properties> {
        use CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR as THREADS_OF_ONE,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
        };
        let (mut handle, mut major, mut minor, mut memory) = (0, 0, 0, 0);
        let (mut multiprocessors, mut threads_of_one) = (0, 0);
        // SAFETY: the integers outlive the calls, and the driver is initialized.
        unsafe {
            self.check(
                (self.functions.cuDeviceGet)(&mut handle, ordinal),
                format_args!("cuDeviceGet of cuda:{ordinal}"),
            )?;
            for (value, attribute) in [
                (&mut major, MAJOR),
                (&mut minor, MINOR),
                (&mut multiprocessors, MULTIPROCESSORS),
                (&mut threads_of_one, THREADS_OF_ONE),
            ] {
                let code = (self.functions.cuDeviceGetAttribute)(value, attribute, handle);
                self.check(code, format_args!("cuDeviceGetAttribute of cuda:{ordinal}"))?;
            }
            let code = (self.functions.cuDeviceTotalMem_v2)(&mut memory, handle);
            self.check(code, format_args!("cuDeviceTotalMem of cuda:{ordinal}"))?;
        }
        let multiprocessors = u64::from(multiprocessors.unsigned_abs());
        Ok(Properties {
            handle,
            compute_capability: 10 * major + minor,
            multiprocessors,
            threads: multiprocessors * u64::from(threads_of_one.unsigned_abs()),
            primary: OnceLock::new(),
            cache: Cache::of_device(memory),
        })
    }

    /// Converts the code of a driver call to a result. `call`: the function and its object, for the message.
    #[inline]
    pub fn check(&self, code: c_int, call: fmt::Arguments<'_>) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.failure(code, call)) }
    }

    #[cold]
    fn failure(&self, code: c_int, call: fmt::Arguments<'_>) -> Error {
        let mut name = ptr::null();
        // SAFETY: cuGetErrorName takes any code and leaves NULL for an unknown one.
        let known = unsafe { (self.error_name)(code, &mut name) } == 0 && !name.is_null();
        // SAFETY: the name is a text of the driver that is never freed.
        let name = if known { unsafe { CStr::from_ptr(name) } } else { c"an error of a newer driver" };
        let status = status_of(code);
        let consequence = match code {
            NOT_INITIALIZED | DEINITIALIZED => "; CUDA does not work in a forked child, nor while a process ends",
            NO_COMPILER => {
                "; the library has no machine code for this GPU, and the driver's PTX compiler is not installed"
            }
            COMPILER_DISABLED => {
                "; the library has no machine code for this GPU, and CUDA_DISABLE_PTX_JIT keeps the driver from \
                 compiling PTX"
            }
            _ if status == Status::ContextLost => {
                "; nothing on this context works any more, and its outputs are undefined"
            }
            _ => "",
        };
        Error::new(status, format_args!("{call}: {} ({code}){consequence}", name.to_string_lossy()))
    }
}

const NOT_INITIALIZED: c_int = 3;
const DEINITIALIZED: c_int = 4;
const NO_DEVICE: c_int = 100;
/// Code for a stream with unfinished work.
pub const NOT_READY: c_int = 600;
/// Code for a query of the current context if there is none.
pub const INVALID_CONTEXT: c_int = 201;

/// Codes for a GPU without machine code in a fatbin: the driver's PTX compiler is missing (221) or disabled (223).
const NO_COMPILER: c_int = 221;
const COMPILER_DISABLED: c_int = 223;

/// Returns the status for an error code of the driver.
fn status_of(code: c_int) -> Status {
    match code {
        2 => Status::OutOfMemory,
        // After these codes the context is unusable: uncorrectable ECC and NVLink errors; a context destroyed or lost
        // to a kernel's illegal address, timeout, assertion, stack error, illegal instruction, misaligned address,
        // address space, program counter, or failed launch; the end of an MPS server or client; an external device's
        // error.
        214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 806 | 810 | 911 => Status::ContextLost,
        _ => Status::Cuda,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_codes_have_the_status_of_their_remedy() {
        for (code, status) in [
            (CUresult::CUDA_ERROR_OUT_OF_MEMORY, Status::OutOfMemory),
            (CUresult::CUDA_ERROR_NOT_INITIALIZED, Status::Cuda),
            (CUresult::CUDA_ERROR_DEINITIALIZED, Status::Cuda),
            (CUresult::CUDA_ERROR_ECC_UNCORRECTABLE, Status::ContextLost),
            (CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE, Status::ContextLost),
            (CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, Status::ContextLost),
            (CUresult::CUDA_ERROR_LAUNCH_TIMEOUT, Status::ContextLost),
            (CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED, Status::ContextLost),
            (CUresult::CUDA_ERROR_ASSERT, Status::ContextLost),
            (CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR, Status::ContextLost),
            (CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION, Status::ContextLost),
            (CUresult::CUDA_ERROR_MISALIGNED_ADDRESS, Status::ContextLost),
            (CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE, Status::ContextLost),
            (CUresult::CUDA_ERROR_INVALID_PC, Status::ContextLost),
            (CUresult::CUDA_ERROR_LAUNCH_FAILED, Status::ContextLost),
            (CUresult::CUDA_ERROR_MPS_RPC_FAILURE, Status::ContextLost),
            (CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED, Status::ContextLost),
            (CUresult::CUDA_ERROR_EXTERNAL_DEVICE, Status::ContextLost),
            (CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, Status::Cuda),
            (CUresult::CUDA_ERROR_INVALID_HANDLE, Status::Cuda),
            (CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, Status::Cuda),
            (CUresult::CUDA_ERROR_UNKNOWN, Status::Cuda),
        ] {
            assert_eq!(status_of(code as c_int), status, "{code:?}");
        }
        assert_eq!(status_of(123_456), Status::Cuda);
    }
}
