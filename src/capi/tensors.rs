//! TENSORS
//!
//! Makes tensors: new ones, ones over memory of yours, and each form of DLPack from the other. The *legacy* form is
//! DLManagedTensor, which the other functions take and JAX imports. The *versioned* form is DLManagedTensorVersioned of
//! DLPack 1.0 and later, which can say that a tensor is read-only.
//!
//! ```c
//! float values[1000];
//! int64_t shape[] = {1000};
//! DLManagedTensor *tensor;
//! gc_tensor_from_pointer(values, (DLDevice){kDLCPU, 0}, (DLDataType){kDLFloat, 32, 1}, 1, shape, NULL, NULL, NULL,
//!                        &tensor);                            // compact; values stay yours
//! gc_tensor_free(tensor);
//! ```

use std::ffi::c_void;

use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor};

use crate::{
    ops::tensors,
    panics::boundary,
    tensor::{self, Described, Device, Name, Release, Shape},
};

use super::{
    borrow::{self, Count, Out},
    status::gc_status_t,
};

/// A new compact tensor; its elements are not initialized.
///
/// `dtype`: any; elements of less than a byte are packed, their bytes rounded up. `shape`: `ndim` sizes, copied; may be
/// NULL when `ndim` is 0. `*out`: yours to release.
///
/// UNSUPPORTED_DTYPE: 0 bits or 0 lanes. SIZE_OVERFLOW: more than 2^63 - 1 bytes.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_tensor_empty(
    device: DLDevice, dtype: DLDataType, ndim: i32, shape: *const i64, out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises `ndim` sizes and room for a pointer.
        let (shape, out) =
            unsafe { (borrow::items("shape", shape, Count::of_signed("ndim", ndim)?)?, Out::one("out", out)?) };
        let device = Device::from_dlpack(&Name::new("device"), device)?;
        out.fill(tensors::empty(device, dtype, Shape::of(shape))?.into_raw());
        Ok(())
    })
}

/// A tensor over your memory. Nothing is copied, and no element is read.
///
/// `data`: element 0; NULL only if there is no element. `device`, `dtype`: any. `shape`: `ndim` sizes. `strides`: as
/// many strides in elements, NULL for compact. Both are copied. `release`, unless NULL, is called once with `ctx` when
/// the last user of the tensor has released it, on that user's thread; it must not throw or longjmp. It is not called
/// when this function fails. `*out`: yours to release.
///
/// The device is not checked and no driver is asked, so memory of another process or of another GPU is valid here. Name
/// the device that is to work on it, and make sure that this device can reach it. It need not be the one that the
/// driver reports for the pointer, which varies for memory that another process has mapped. `*out` names the device as
/// you did. Pinned memory is CUDAHost, and the CPU works on it, or CUDA, if the device can reach it (it can where
/// cuMemHostAlloc made it). Managed memory is CUDAManaged: the device with its number works on it, as on CUDA. If
/// others use it on the CPU or on another device, it is up to you to order that.
///
/// UNSUPPORTED_DTYPE: 0 bits or 0 lanes.
///
/// # Safety
/// The pointers are as described, and the memory stays until `release` is called.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_tensor_from_pointer(
    data: *mut c_void, device: DLDevice, dtype: DLDataType, ndim: i32, shape: *const i64, strides: *const i64,
    release: Option<unsafe extern "C" fn(ctx: *mut c_void)>, ctx: *mut c_void, out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        let described = DLTensor {
            data,
            device,
            ndim,
            dtype,
            shape: shape.cast_mut(),
            strides: strides.cast_mut(),
            byte_offset: 0,
        };
        // SAFETY: the caller promises `ndim` sizes and strides, memory that they describe, and room for a pointer.
        let (described, out) =
            unsafe { (Described::from_dlpack(&Name::new("tensor"), &described)?, Out::one("out", out)?) };
        out.fill(tensor::from_pointer(&described, Release { function: release, context: ctx })?.into_raw());
        Ok(())
    })
}

/// Releases a tensor: calls its deleter. NULL is ignored, and so is a tensor whose deleter is NULL.
///
/// # Safety
/// `tensor` is NULL or yours, and not used afterwards.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_tensor_free(tensor: *mut DLManagedTensor) {
    boundary(|| {
        // SAFETY: the caller gives the tensor away.
        unsafe { tensor::release(tensor) };
        Ok(())
    });
}

/// Releases a tensor in DLPack's versioned form, as gc_tensor_free().
///
/// # Safety
/// `tensor` is NULL or yours, and not used afterwards.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_tensor_free_versioned(tensor: *mut DLManagedTensorVersioned) {
    boundary(|| {
        // SAFETY: the caller gives the tensor away.
        unsafe { tensor::release(tensor) };
        Ok(())
    });
}

/// Converts a tensor to DLPack's versioned form, which NumPy imports as writable. (It imports the legacy form as
/// read-only.) The version is the lowest 1.x that knows the dtype; there are no flags.
///
/// `src`: of any dtype and device, since no element is read. On success it belongs to `*out`; when the call fails it is
/// still yours. If it has no deleter, the struct need not outlive the call, but its memory must stay. `*out`: yours to
/// release, by gc_tensor_free_versioned() or its own deleter. On devices that this library does not work on, `data` and
/// `byte_offset` are passed on as they are.
///
/// UNSUPPORTED_DTYPE: 0 bits or 0 lanes.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_tensor_to_versioned(
    src: *mut DLManagedTensor, out: *mut *mut DLManagedTensorVersioned,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor of its own, and room for a pointer.
        unsafe {
            let (described, out) = (borrow::described("src", src)?, Out::one("out", out)?);
            out.fill(tensor::to_versioned(&described, src)?.into_raw());
            Ok(())
        }
    })
}

/// Converts a tensor to DLPack's legacy form, which JAX and all other functions take.
///
/// `src`: any version 1.x. On success it belongs to `*out`, as in gc_tensor_to_versioned(). `*out`: yours to release.
///
/// READ_ONLY: the legacy form cannot say that a tensor is read-only. (To read it, borrow it: `{ v->dl_tensor, NULL,
/// NULL }`.) UNSUPPORTED_DTYPE: nor can it say that elements of less than a byte are padded to one
/// (IS_SUBBYTE_TYPE_PADDED); 0 bits or 0 lanes. INVALID_ARGUMENT: another major version.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_tensor_from_versioned(
    src: *mut DLManagedTensorVersioned, out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor of its own, and room for a pointer.
        unsafe {
            let (described, out) = (borrow::versioned("src", src)?, Out::one("out", out)?);
            out.fill(tensor::from_versioned(&described, src)?.into_raw());
            Ok(())
        }
    })
}

/// Releases the tensor of a Python capsule that nobody consumed. It is a destructor for PyCapsule_New from ctypes or
/// cffi.
///
/// Works for both names, "dltensor" and "dltensor_versioned"; a consumed capsule ("used_dltensor" ...) is left alone.
/// NULL is no capsule: that sets the last error, and nothing else happens. Finds Python in the process that calls it:
/// this library does not link against it. Pass its address only: to call it yourself you would have to hold the GIL,
/// which ctypes.CDLL gives up.
///
/// # Safety
/// `py_capsule` is a PyCapsule, and the caller holds the GIL, as Python does when it calls a destructor.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_capsule_destructor(py_capsule: *mut c_void) {
    boundary(|| {
        // SAFETY: `py_capsule` is a PyCapsule, and the caller holds the GIL.
        unsafe { tensor::release_capsule(py_capsule) }
    });
}
