//! ONEBIT
//!
//! Signs with *error feedback*: a gradient becomes one bit per element and one scale, and what that loses, the error,
//! is added to the next gradient. Here the error is a tensor of yours. With c = gradient + error, in float32:
//!
//! ```text
//! bit = not (c < 0)      scale s = root of the mean of c * c      new error = c - (+s where the bit is 1, else -s)
//! ```
//!
//! This is DeepSpeed's formula; docs/NUMERICS.md says it to the last bit. A codec (above) does the same in one pass
//! over memory instead of two, keeps the error itself, and takes several tensors at once.

use std::ffi::c_void;

use dlpark::ffi::{DLDataType, DLManagedTensor, DLTensor};

use crate::{
    backend::{Compression, Stream},
    error::{Result, error},
    ops::onebit,
    panics::boundary,
    plan::codec::ScaleRule,
};

use super::{
    borrow::{self, Out},
    status::gc_status_t,
};

/// What a scale is: one of GC_SCALE_*.
pub type gc_scale_t = i32;

fn to_rule(code: gc_scale_t) -> Result<ScaleRule> {
    match code {
        0 => Ok(ScaleRule::Rms),
        1 => Ok(ScaleRule::Mean),
        _ => Err(error!(InvalidArgument, "rule: {code} is neither GC_SCALE_RMS 0 nor GC_SCALE_MEAN 1")),
    }
}

/// Compresses a gradient to signs and one scale, and updates its error.
///
/// `grad`: float32, float16 or bfloat16, C-contiguous. `error`: float32 or bfloat16, C-contiguous, as many elements, on
/// the same device; written to. NULL: no error is carried. `out_chunks`: room for `n_chunks` pointers, which receive
/// chunks as from gc_pack_chunks(). `*out_scale`: s. It is not finite if the gradient or the error is not, or if
/// squares overflow; then the error is unchanged.
///
/// INVALID_ARGUMENT: n_chunks 0; error and gradient overlap. UNSUPPORTED_DTYPE, NOT_CONTIGUOUS. SHAPE_MISMATCH: an
/// error of another size. A call that fails leaves the error unchanged; on CUDA it may be the new one if the driver
/// fails at the end, in the wait for its work.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_onebit_compress(
    grad: *const DLManagedTensor, error: *mut DLManagedTensor, n_chunks: usize, out_chunks: *mut *mut DLManagedTensor,
    out_scale: *mut f32,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises tensors, and room for `n_chunks` pointers and a number.
        let (grad, error, chunks, scale) = unsafe {
            (
                borrow::managed("grad", grad)?,
                borrow::optional_managed("error", error)?,
                Out::several("out_chunks", out_chunks, borrow::Count::of("n_chunks", n_chunks))?,
                Out::one("out_scale", out_scale)?,
            )
        };
        let (packed, s) = onebit::compress(&grad, error.as_ref(), n_chunks)?;
        chunks.fill(packed.into_raw());
        scale.fill([s]);
        Ok(())
    })
}

/// Decompresses chunks to one tensor: +s where the bit is 1 and -s where it is 0. To write to your memory instead, use
/// gc_unpack_signs_into().
///
/// `chunks`: as for gc_unpack_chunks(). `scales`: `n_chunks` numbers in host memory, s of each chunk: all the same for
/// those of one gc_onebit_compress(). `dtype`: float32, float16 or bfloat16. `*out`: one-dimensional, of that dtype,
/// `n_elements` long, on the device of the chunks, yours to release.
///
/// A scale may be anything. It is rounded to the dtype once, to nearest even; past the largest of the dtype it is
/// infinite, and a NaN gives NaN for either bit.
///
/// As gc_unpack_chunks(); and INVALID_ARGUMENT: scales NULL. UNSUPPORTED_DTYPE: another dtype.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_onebit_decompress(
    chunks: *const *mut DLManagedTensor, n_chunks: usize, scales: *const f32, n_elements: i64, dtype: DLDataType,
    out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        let count = borrow::Count::of("n_chunks", n_chunks);
        // SAFETY: the caller promises `n_chunks` tensors and as many numbers, and room for a pointer.
        let (chunks, scales, out) = unsafe {
            (
                borrow::managed_items("chunks", chunks, count)?,
                borrow::items("scales", scales, count)?,
                Out::one("out", out)?,
            )
        };
        out.fill(onebit::decompress(&chunks, scales, n_elements, dtype)?.into_raw());
        Ok(())
    })
}

/// gc_onebit_compress() into your memory.
///
/// `rule`: one of GC_SCALE_*. `dst`: uint8, C-contiguous, [n_chunks, gc_chunk_bytes(n, n_chunks)]; a row is a chunk,
/// bits most significant first, every byte written. `scale`: float32, one element. `workspace`: uint8, C-contiguous, at
/// least gc_onebit_workspace_bytes(n) bytes, aligned to 16; whatever is in it, it is written to. All on the gradient's
/// device.
///
/// As gc_onebit_compress(), and INVALID_ARGUMENT: an unknown rule. SHAPE_MISMATCH, NOT_CONTIGUOUS: dst, scale,
/// workspace.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_onebit_compress_into(
    grad: *const DLTensor, error: *mut DLTensor, rule: gc_scale_t, dst: *mut DLTensor, scale: *mut DLTensor,
    workspace: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises tensors that stay as they are during the call, whose memory nothing else uses
        // meanwhile where it is written.
        let (grad, error, dst, scale, workspace) = unsafe {
            (
                borrow::tensor("grad", grad)?,
                borrow::optional("error", error)?,
                borrow::tensor("dst", dst)?,
                borrow::tensor("scale", scale)?,
                borrow::tensor("workspace", workspace)?,
            )
        };
        let (grad, error, rule, dst) = (&grad, error.as_ref(), to_rule(rule)?, &dst);
        let call = Compression { grad, error, rule, dst, scale: &scale, workspace: &workspace };
        onebit::compress_into(&call, Stream::from_raw(stream))
    })
}

/// Bytes of the workspace of gc_onebit_compress_into(): about 1/4096 of a float32 gradient's. -1, and the last error,
/// for a negative n_elements.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_onebit_workspace_bytes(n_elements: i64) -> i64 {
    boundary(|| onebit::workspace_bytes(n_elements))
}
