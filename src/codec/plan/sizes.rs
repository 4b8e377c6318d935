//! Sizes that the payloads and states of all codecs have in common.

use crate::ffi::error::{Error, error};

/// Bytes of the header of a chunk or of a state.
pub const HEADER: usize = 64;

/// Alignment of payloads and states, in bytes.
pub const ALIGNMENT: i64 = 16;

/// Bytes of a chunk that has a header, the scale of one segment and no element.
pub const LEAST_STRIDE: i64 = 80;

/// Returns the error for a size that does not fit.
pub fn too_large() -> Error {
    error!(SizeOverflow, "segments: payload and state would have more than 2^63 - 1 bytes")
}

/// Returns the next multiple of `to`, a power of two. None: it does not fit.
pub fn align(bytes: i64, to: i64) -> Option<i64> {
    Some(bytes.checked_add(to - 1)? & -to)
}
