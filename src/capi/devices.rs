//! DEVICES
//!
//! Needed only where a first call must not wait, as in a graph capture, and where other libraries want the memory that
//! this one keeps.

use std::ffi::c_char;

use dlpark::ffi::DLDevice;

use crate::{
    backend::cuda,
    ops::devices,
    panics::boundary,
    tensor::{Device, Name},
};

use super::{borrow::Out, status::gc_status_t};

/// Does up front what the first calls on a device would do: finds the driver, makes the device's primary context unless
/// your current one is on the device, and loads the kernels into it, which takes half a second unless the driver's cache
/// has them. Call it before a first `_into` inside a graph capture, in the context that captures. Other threads may be
/// capturing meanwhile. For a CPU: counts the CPUs and chooses the instruction set.
///
/// UNSUPPORTED_DEVICE: also a compute capability below 7.5.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_prepare(device: DLDevice) -> gc_status_t {
    boundary(|| devices::prepare(Device::from_dlpack(&Name::new("device"), device)?))
}

/// Gives back the device memory that is kept for new tensors: what was released in the context that gc_prepare() would
/// choose. Waits until the work that was enqueued there before is done. For a CPU: nothing, for nothing is kept.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_trim(device: DLDevice) -> gc_status_t {
    boundary(|| devices::trim(Device::from_dlpack(&Name::new("device"), device)?))
}

/// The PTX of this library's kernels for devices of a compute capability, to load and launch by yourself; names,
/// arguments and launch shapes are in kernels/README.md, which is installed beside the licences. Needs no driver.
///
/// `compute_capability`: that of the device, 90 for 9.0. `*ptx`: static text with a NUL at its end, `*size`: its bytes
/// without that NUL.
///
/// UNSUPPORTED_DEVICE: below 75.
///
/// # Safety
/// The pointers have room for what they receive.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_kernel_image(
    compute_capability: i32,
    ptx: *mut *const c_char,
    size: *mut usize,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises room.
        let (ptx, size) = unsafe { (Out::one("ptx", ptx)?, Out::one("size", size)?) };
        let text = cuda::ptx(compute_capability)?;
        ptx.fill([text.as_ptr()]);
        size.fill([text.count_bytes()]);
        Ok(())
    })
}
