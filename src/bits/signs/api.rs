//! SIGNS
//!
//! Packs the sign of every element to a bit: bit = not (x < 0), so zeros of either sign and NaN give 1. The bits are in
//! chunks, as for gc_pack_chunks(). A step of signSGD with majority vote (Bernstein et al., 2018) on each rank:
//!
//! ```c
//! gc_pack_signs_into(&gradient, GC_BIT_ORDER_BIG, &chunks, stream);  // a chunk for every rank
//! all_to_all(chunks, ballots);                                       // yours; a row of ballots is a rank's
//! gc_vote_signs_into(&ballots, step, &verdict, stream);              // on the chunk that is this rank's
//! all_gather(verdict, verdicts);                                     // yours; a row of verdicts is a chunk
//! gc_unpack_signs_into(&verdicts, NULL, GC_BIT_ORDER_BIG, &gradient, stream);  // +1 and -1
//! ```
//!
//! With scales gc_unpack_signs_into() writes +scale and -scale, as 1-bit SGD and 1-bit Adam need.

use std::ffi::c_void;

use dlpark::ffi::{DLDataType, DLManagedTensor, DLTensor};

use crate::{
    bits::api::{gc_bit_order_t, to_order},
    cuda::Stream,
    dlpack::input,
    ffi::{
        api::gc_status_t,
        borrow::{self, Out},
        panics::boundary,
    },
};

use super::ops;

/// Packs the signs of floats to bits in equal chunks: gc_pack_chunks() for floats. The most significant bit of a byte
/// is first.
///
/// `src`: float16, bfloat16, float32 or float64, any shape and strides, flattened in C order. `out`: as for
/// gc_pack_chunks().
///
/// - GC_STATUS_INVALID_ARGUMENT: `n_chunks` is 0.
/// - GC_STATUS_UNSUPPORTED_DTYPE: `src` is bool or an integer; gc_pack_chunks() packs those.
/// - GC_STATUS_SIZE_OVERFLOW: there are more than 2^63 - 1 bytes, or pointers.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_pack_signs(
    src: *const DLManagedTensor, n_chunks: usize, out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor, and room for `n_chunks` pointers.
        let (src, out) = unsafe {
            (input::managed("src", src)?, Out::several("out", out, borrow::Count::of("n_chunks", n_chunks))?)
        };
        out.fill(ops::pack_signs(&src, n_chunks)?.into_raw());
        Ok(())
    })
}

/// Unpacks chunks of signs to one tensor, +1 where the bit is 1 and -1 where it is 0.
///
/// `chunks`: as for gc_unpack_chunks(). `dtype`: float16, bfloat16, float32, float64, or a signed integer. `*out`:
/// one-dimensional, of that dtype, `n_elements` long, yours to release.
///
/// - All errors of gc_unpack_chunks().
/// - GC_STATUS_UNSUPPORTED_DTYPE: `dtype` is bool or an unsigned integer, which have no -1.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_unpack_signs(
    chunks: *const *mut DLManagedTensor, n_chunks: usize, n_elements: i64, dtype: DLDataType,
    out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises `n_chunks` tensors, and room for a pointer.
        let (chunks, out) = unsafe {
            (input::managed_items("chunks", chunks, borrow::Count::of("n_chunks", n_chunks))?, Out::one("out", out)?)
        };
        out.fill(ops::unpack_signs(&chunks, n_elements, dtype)?.into_raw());
        Ok(())
    })
}

/// Packs like gc_pack_signs(), into your memory.
///
/// `src`: as for gc_pack_signs(). `dst`: as for gc_pack_chunks_into(). The errors are the same, but here bool and
/// integers in `src` are UNSUPPORTED_DTYPE.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_pack_signs_into(
    src: *const DLTensor, order: gc_bit_order_t, dst: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises that `src` does not change during the call and nothing else uses `dst`'s memory.
        let (src, dst) = unsafe { (input::tensor("src", src)?, input::tensor("dst", dst)?) };
        ops::pack_signs_into(&src, to_order(order)?, &dst, Stream::from_raw(stream))
    })
}

/// Unpacks chunks of signs to your memory, as +scale where the bit is 1 and -scale where it is 0.
///
/// `src`: uint8, C-contiguous, two-dimensional: [n_chunks, gc_chunk_bytes(n, n_chunks)]. `scales`: NULL for 1; or
/// float32 on the device of src, one-dimensional and contiguous, one for all chunks or one for each. They are read on
/// the stream, so the host need not wait for the work that writes them. `dst`: n elements, any shape and strides,
/// written in C order: float16, bfloat16, float32, float64; without scales a signed integer, too.
///
/// A scale is rounded once to the dtype of dst, to nearest even; beyond the dtype's largest value it becomes Inf. A
/// negative scale exchanges the signs. A NaN gives NaN for either bit, always the same one (0x7fc00000 in float32).
///
/// - GC_STATUS_INVALID_ARGUMENT: `order` is unknown, or `src` has no chunks.
/// - GC_STATUS_UNSUPPORTED_DTYPE: `src` is not uint8, `scales` is not float32, or `dst` is bool, an unsigned integer,
///   or with scales any integer.
/// - GC_STATUS_SHAPE_MISMATCH: `src` or `scales` has another shape than described.
/// - GC_STATUS_NOT_CONTIGUOUS: `src` or `scales` is not contiguous.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_unpack_signs_into(
    src: *const DLTensor, scales: *const DLTensor, order: gc_bit_order_t, dst: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises tensors that stay as they are during the call.
        let (src, scales) = unsafe { (input::tensor("src", src)?, input::optional("scales", scales)?) };
        // SAFETY: the caller promises a tensor whose memory nothing else uses meanwhile.
        let dst = unsafe { input::tensor("dst", dst)? };
        ops::unpack_signs_into(&src, scales.as_ref(), to_order(order)?, &dst, Stream::from_raw(stream))
    })
}

/// Takes a majority vote on every bit: the result is the bit that more than half of the voters have.
///
/// In a tie (of an even number of voters), the bit of voter (byte index + turn) mod n_voters decides, so that ties do
/// not push all weights the same way. Pass another `turn` in each step, such as the number of the step, and the same
/// one on all ranks that need the same result.
///
/// `src`: uint8, two-dimensional: [n_voters, n_bytes], the bytes of each voter side by side; any number of voters, at
/// any stride. `turn`: any number. `dst`: uint8, one-dimensional, contiguous: n_bytes. Padding bits are voted on
/// like the others. The order of bits does not matter.
///
/// - GC_STATUS_INVALID_ARGUMENT: there are no voters.
/// - GC_STATUS_UNSUPPORTED_DTYPE: `src` or `dst` is not uint8.
/// - GC_STATUS_SHAPE_MISMATCH: `src` is not two-dimensional, or `dst` has another shape than described.
/// - GC_STATUS_NOT_CONTIGUOUS: the bytes of a voter, or the bytes of `dst`, are not contiguous.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_vote_signs_into(
    src: *const DLTensor, turn: u64, dst: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises that `src` does not change during the call and nothing else uses `dst`'s memory.
        let (src, dst) = unsafe { (input::tensor("src", src)?, input::tensor("dst", dst)?) };
        ops::vote_signs_into(&src, turn, &dst, Stream::from_raw(stream))
    })
}
