//! Sizes that payloads and states have in common, whatever the codec.

use crate::ffi::error::{Error, error};

/// Bytes of a chunk's header, and of a state's.
pub const HEADER: usize = 64;

/// What payloads and states are aligned to.
pub const ALIGNMENT: i64 = 16;

/// Bytes of a chunk that has a header, the scale of one segment and no element.
pub const LEAST_STRIDE: i64 = 80;

/// What a size that does not fit is.
pub fn too_large() -> Error {
    error!(SizeOverflow, "segments: payload and state would have more than 2^63 - 1 bytes")
}

/// The next multiple of a power of two.
pub fn align(bytes: i64, to: i64) -> Option<i64> {
    Some(bytes.checked_add(to - 1)? & -to)
}
