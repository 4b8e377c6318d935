//! TENSORS
//!
//! Creates tensors in new memory or over your memory, and converts between the two forms of DLPack. The *legacy* form
//! is DLManagedTensor, which the other functions take and JAX imports. The *versioned* form is DLManagedTensorVersioned
//! of DLPack 1.0 and later, which can mark a tensor as read-only.
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
    dlpack,
    ffi::{api::gc_status_t, borrow::Out, name::Name, panics::boundary},
};

use super::{Described, Release, input};

/// Makes a tensor over your memory. Nothing is copied, and no element is read.
///
/// `data`: element 0; NULL only if there is no element. `device`, `dtype`: any. `shape`: `ndim` sizes. `strides`: as
/// many strides in elements, NULL for compact. Both are copied. `release`, unless NULL, is called once with `ctx` when
/// the last user of the tensor has released it, on that user's thread; it must not throw or longjmp. It is not called
/// when this function fails. `*out`: yours to release.
///
/// The device is not checked and no driver is called, so memory of another process or of another GPU is valid here.
/// Pass the device that will do the work, which must be able to access the memory. It may differ from the device that
/// the driver reports for the pointer. Pinned memory is CUDAHost (the CPU does the work), or CUDA if the device can
/// access it, as it can after cuMemHostAlloc. Managed memory is CUDAManaged: the device with its number does the work.
/// You must order other uses of managed memory, on the CPU or on another device, yourself.
///
/// - GC_STATUS_UNSUPPORTED_DTYPE: the dtype has 0 bits or 0 lanes.
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
        out.fill(dlpack::from_pointer(&described, Release { function: release, context: ctx })?.into_raw());
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
        unsafe { dlpack::release(tensor) };
        Ok(())
    });
}

/// Releases a tensor in DLPack's versioned form, like gc_tensor_free().
///
/// # Safety
/// `tensor` is NULL or yours, and not used afterwards.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_tensor_free_versioned(tensor: *mut DLManagedTensorVersioned) {
    boundary(|| {
        // SAFETY: the caller gives the tensor away.
        unsafe { dlpack::release(tensor) };
        Ok(())
    });
}

/// Converts a tensor to DLPack's versioned form, which NumPy imports as writable. (It imports the legacy form as
/// read-only.) The version is the lowest 1.x that has the dtype; there are no flags.
///
/// `src`: of any dtype and device, since no element is read. On success it belongs to `*out`; when the call fails it is
/// still yours. If it has no deleter, the struct need not outlive the call, but its memory must stay. `*out`: yours to
/// release, by gc_tensor_free_versioned() or its own deleter. On devices that this library does not work on, `data` and
/// `byte_offset` stay as they are. An empty tensor gets NULL and 0.
///
/// - GC_STATUS_UNSUPPORTED_DTYPE: the dtype has 0 bits or 0 lanes.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_tensor_to_versioned(
    src: *mut DLManagedTensor, out: *mut *mut DLManagedTensorVersioned,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor of its own, and room for a pointer.
        unsafe {
            let (described, out) = (input::described("src", src)?, Out::one("out", out)?);
            out.fill(dlpack::to_versioned(&described, src)?.into_raw());
            Ok(())
        }
    })
}

/// Converts a tensor to DLPack's legacy form, which JAX and all other functions take.
///
/// `src`: any version 1.x. On success it belongs to `*out`, as in gc_tensor_to_versioned(). `*out`: yours to release.
///
/// - GC_STATUS_READ_ONLY: the tensor is read-only, which the legacy form cannot express. (To read it, borrow it:
///   `{ v->dl_tensor, NULL, NULL }`.)
/// - GC_STATUS_UNSUPPORTED_DTYPE: the dtype has 0 bits or 0 lanes, or elements of less than a byte that are padded to a
///   byte (IS_SUBBYTE_TYPE_PADDED), which the legacy form cannot express.
/// - GC_STATUS_INVALID_ARGUMENT: the tensor has another major version of DLPack.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_tensor_from_versioned(
    src: *mut DLManagedTensorVersioned, out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor of its own, and room for a pointer.
        unsafe {
            let (described, out) = (input::versioned("src", src)?, Out::one("out", out)?);
            out.fill(dlpack::from_versioned(&described, src)?.into_raw());
            Ok(())
        }
    })
}

/// Releases the tensor of a Python capsule that was not consumed: a destructor for PyCapsule_New from ctypes or cffi.
///
/// Works for both names, "dltensor" and "dltensor_versioned"; a consumed capsule ("used_dltensor" ...) is left alone.
/// NULL only sets the last error. The function looks up Python in the calling process. Pass its address only: a caller
/// must hold the GIL, which ctypes.CDLL releases.
///
/// # Safety
/// `py_capsule` is a PyCapsule, and the caller holds the GIL, as Python does when it calls a destructor.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_capsule_destructor(py_capsule: *mut c_void) {
    boundary(|| {
        // SAFETY: `py_capsule` is a PyCapsule, and the caller holds the GIL.
        unsafe { dlpack::release_capsule(py_capsule) }
    });
}
