//! DEVICES
//!
//! Call gc_prepare() if a first call must not wait, as in a graph capture, and gc_trim() if other libraries need the
//! memory that this one keeps. The other functions are for programs that launch the library's kernels themselves.

use std::ffi::{c_char, c_void};

use dlpark::ffi::DLDevice;

use crate::{
    device::devices,
    dlpack::Device,
    ffi::{
        api::gc_status_t,
        borrow::{self, Out, OutStruct},
        name::Name,
        panics::boundary,
    },
};

/// Does the work of the first calls on a device in advance. It loads the driver, makes the device's primary context
/// unless your current one is on the device, and loads all kernels into it. That takes 1 to 2 ms if the library has
/// machine code for the device (see gc_builtin_kernels()), and up to 1 s if the driver compiles it. Call it before a
/// first `_into` inside a graph capture, in the context that captures. Other threads may be capturing meanwhile. For a
/// CPU it counts the CPUs and chooses the instruction set.
///
/// - GC_STATUS_UNSUPPORTED_DEVICE: also if the compute capability is below 7.5.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_prepare(device: DLDevice) -> gc_status_t {
    boundary(|| devices::prepare(Device::from_dlpack(&Name::new("device"), device)?))
}

/// Frees the device memory that is kept for new tensors. That is the memory released in the context that gc_prepare()
/// would choose, and the pinned staging buffer of gc_copy_into() there. It waits for the work that was enqueued there
/// before. For a CPU it does nothing.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_trim(device: DLDevice) -> gc_status_t {
    boundary(|| devices::trim(Device::from_dlpack(&Name::new("device"), device)?))
}

/// Returns CUDA kernels of the library as a *fatbin*, for you to load and launch. A family has machine code for GPUs of
/// compute capability 8.x, 9.0 and 10.0 (all but "blocks_peers" also for 7.5 and 12.0), and PTX for all others from 7.5
/// on. cuModuleLoadData() takes it from memory, CuPy's RawModule as a file. docs/ABI.md lists the kernels of "bits" that
/// are stable, with their arguments and their items; all other kernels are unstable. This needs no driver.
///
/// `family`: "bits"; the message of the error names all others. `*fatbin`: static memory, aligned to 16 bytes. `*size`:
/// its size in bytes.
///
/// - INVALID_ARGUMENT: the library has no such family.
///
/// # Safety
/// The pointers have room for what they receive, and `family` ends with a NUL.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_builtin_kernels(
    family: *const c_char, fatbin: *mut *const c_void, size: *mut usize,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a text, and room for a pointer and a number.
        let (family, fatbin, size) =
            unsafe { (borrow::text("family", family)?, Out::one("fatbin", fatbin)?, Out::one("size", size)?) };
        let bytes = devices::builtin_kernels(family)?;
        fatbin.fill([bytes.as_ptr().cast()]);
        size.fill([bytes.len()]);
        Ok(())
    })
}

/// Launch shape of a kernel: ceil(items / items_per_block) thread blocks of `threads` threads, both in one dimension.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gc_kernel_shape_t {
    /// Set by you: sizeof(gc_kernel_shape_t).
    pub struct_size: u32,
    /// Threads of a thread block.
    pub threads: u32,
    /// Items that a thread block works on: bytes of bits, or elements, as docs/ABI.md says for the kernel.
    pub items_per_block: u32,
    /// Bytes of dynamic shared memory of a thread block.
    pub shared_bytes: u32,
    /// Thread blocks of a cluster; 1 if the kernel is launched without clusters.
    pub cluster: u32,
    /// Reserved; written as 0.
    pub reserved: [u32; 3],
}

// SAFETY: the fields are numbers, without padding.
unsafe impl borrow::Extensible for gc_kernel_shape_t {
    const FIRST_SIZE: usize = 32;
}

/// Returns the launch shape of a kernel on GPUs of a compute capability. This needs no driver. The program that
/// launches the kernel should call this: the next version may have another shape.
///
/// `kernel`: a name in docs/ABI.md. `compute_capability`: that of the device, 90 for 9.0. `out`: you set struct_size,
/// the other fields are written.
///
/// - INVALID_ARGUMENT: docs/ABI.md has no such kernel, or struct_size is invalid.
/// - UNSUPPORTED_DEVICE: the compute capability is below 75.
///
/// # Safety
/// `kernel` ends with a NUL, and `out` is a struct.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_builtin_kernel_shape(
    kernel: *const c_char, compute_capability: i32, out: *mut gc_kernel_shape_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a text, and a struct.
        let (kernel, out) = unsafe { (borrow::text("kernel", kernel)?, OutStruct::new("out", out)?) };
        let shape = devices::kernel_shape(kernel, compute_capability)?;
        out.fill(gc_kernel_shape_t {
            struct_size: size_of::<gc_kernel_shape_t>() as u32,
            threads: shape.threads,
            items_per_block: shape.items_per_block,
            shared_bytes: shape.shared_bytes,
            cluster: 1,
            reserved: [0; 3],
        });
        Ok(())
    })
}
