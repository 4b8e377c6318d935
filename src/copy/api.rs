//! COPIES
//!
//! Copies any tensor to any other, with other strides, another dtype or another device, like NumPy's `dst[...] = src`,
//! CuPy's asarray() and asnumpy(), and torch's copy_().
//!
//! ```c
//! DLDevice gpu = {kDLCUDA, 0};
//! gc_tensor_to_device(array, gpu, &copy);         // a new tensor, compact
//! gc_copy_into(&float32_matrix, &bfloat16_transposed, stream);  // cast and transposed in one pass
//! ```
//!
//! `src` is broadcast to the shape of `dst` by NumPy's rule: sizes are aligned at the last one, and where src has a
//! size of 1, or none, its element is repeated.
//!
//! Elements of the same dtype are copied as they are, byte for byte: any dtype, lanes included. Casts are between bool,
//! integers, float16, bfloat16, float32 and float64. Their results are the same on every device, to the last bit:
//!
//! - integer to integer: the lowest bits, extended by the sign or by zeros: 300 is 44 in uint8, -1 is 255;
//! - float to integer: towards 0; values beyond the integer's range become its least or greatest, NaN becomes 0;
//! - to bool: 1 unless the element is 0 or -0.0, so 1 for NaN; from bool: 1 for every byte but 0;
//! - to a float: rounded once, to nearest even, also from float64 to bfloat16 or from int64 to float16; values that
//!   round beyond the largest become Inf; denormals are kept;
//! - NaN to a float: 0x7fc00000 in float32, 0x7fc0 in bfloat16, 0x7e00 in float16, 0x7ff8000000000000 in float64.
//!
//! If NumPy defines a cast, astype() gives the same result, except for the bits of NaN.

use std::ffi::c_void;

use dlpark::ffi::{DLDevice, DLManagedTensor, DLTensor};

use crate::{
    cuda::Stream,
    dlpack::input,
    ffi::{api::gc_status_t, borrow::Out, panics::boundary},
};

use super::ops;

/// Makes a new compact copy of a tensor, on the device that you name.
///
/// `src`: any dtype and strides, on CPU, CUDAHost, CUDA or CUDAManaged; elements of less than a byte must be
/// C-contiguous. `device`: CPU (1) or CUDA (2); it may be that of src. `*out`: of the same dtype and shape, yours to
/// release.
///
/// - GC_STATUS_UNSUPPORTED_DEVICE: `device` is CUDAHost or CUDAManaged. Allocate such memory yourself and use
///   gc_copy_into().
/// - GC_STATUS_SIZE_OVERFLOW: there are more than 2^63 - 1 bytes.
/// - GC_STATUS_NOT_CONTIGUOUS: elements of less than a byte are not C-contiguous.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_tensor_to_device(
    src: *const DLManagedTensor, device: DLDevice, out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor, and room for a pointer.
        let (src, out) = unsafe { (input::managed_elements("src", src)?, Out::one("out", out)?) };
        out.fill(ops::to_device(&src, device)?.into_raw());
        Ok(())
    })
}

/// Copies a tensor into another one, with any strides and dtypes. Both may be on CPU, CUDAHost, CUDA or CUDAManaged.
///
/// `src`: broadcast to the shape of dst. `dst`: written; bytes between its elements are not. Behind a last element of
/// less than a byte, the bits of its byte are kept between CPU tensors, and overwritten if a GPU takes part. `stream`:
/// of dst's device, or of src's where dst is on CPU or CUDAHost; ignored where both are.
///
/// Between CPU and CUDA the copy is complete when this returns, and it cannot be captured. Between CUDAHost and CUDA it
/// is enqueued on the stream, like a copy between two CUDA tensors, and both must stay until the stream has done it.
/// The first copy between CPU and a device allocates 8 MiB of pinned memory, also after gc_prepare(), and keeps it
/// until gc_trim(). CPU memory that is pinned, in one piece, is copied without it.
///
/// Between two CUDA devices the stream is one of dst's device: work of other streams on src must be done before, or
/// this stream must wait for it. The device of dst is given access to the memory of src's device if possible. If it
/// still cannot read src, which may be memory of a pool or mapped memory, a copy to another layout or dtype goes
/// through the CPU: it is complete when this returns, allocates and cannot be captured, like a copy between CPU and
/// CUDA. src is read from another context than its own, so if this library has allocated it, release it only when the
/// stream has done the copy.
///
/// Every element may be copied onto itself: if the two are the same memory with the same strides and dtype, nothing is
/// done. Otherwise the bytes from the first to the last of dst must not intersect those from the first to the last of
/// src, whether elements share them or not: INVALID_ARGUMENT.
///
/// - GC_STATUS_SHAPE_MISMATCH: `src` cannot be broadcast to `dst`. Elements of less than a byte are not broadcast.
/// - GC_STATUS_UNSUPPORTED_DTYPE: the cast is from or to another dtype than those above.
/// - GC_STATUS_NOT_CONTIGUOUS: elements are not a whole number of bytes, and not C-contiguous on both sides.
/// - GC_STATUS_INVALID_ARGUMENT: the stream is being captured, and the copy would be complete when this returns.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_copy_into(src: *const DLTensor, dst: *mut DLTensor, stream: *mut c_void) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor that stays as it is during the call.
        let src = unsafe { input::elements("src", src)? };
        // SAFETY: the caller promises a tensor whose memory nothing else uses meanwhile.
        let dst = unsafe { input::elements("dst", dst)? };
        ops::copy_into(&src, &dst, Stream::from_raw(stream))
    })
}
