//! The function `gc_tensor_empty` of the header's section TENSORS.

use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensor};

use crate::{
    device::tensors,
    dlpack::{Device, Shape},
    ffi::{
        api::gc_status_t,
        borrow::{self, Count, Out},
        name::Name,
        panics::boundary,
    },
};

/// Creates a compact tensor. Its elements are not initialized.
///
/// `dtype`: any; elements smaller than a byte are packed, and the size is rounded up to bytes. `shape`: `ndim` sizes,
/// copied; may be NULL when `ndim` is 0. `*out`: yours to release.
///
/// - GC_STATUS_UNSUPPORTED_DTYPE: the dtype has 0 bits or 0 lanes.
/// - GC_STATUS_SIZE_OVERFLOW: there are more than 2^63 - 1 bytes.
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
