//! ERRORS

use std::ffi::c_char;

use super::{
    error::status_name,
    panics::{boundary, last_error},
};
/// Status of a call: one of GC_STATUS_*.
pub type gc_status_t = i32;

/// Returns the name of a status in this header, such as "GC_STATUS_SHAPE_MISMATCH". A code that this version does not
/// have gives "GC_STATUS_UNKNOWN". The text is static, never NULL.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_status_name(status: gc_status_t) -> *const c_char {
    boundary(|| Ok(status_name(status).as_ptr()))
}

/// Returns a text about this thread's last failure. For example: "dst: 3 chunks of 17 bytes expected for 400 elements,
/// got shape [3, 16]". The text is "" before the first failure, and a call that succeeds does not change it. It is
/// UTF-8, at most 500 bytes, and stays until the next failure on this thread, or the thread's end.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_last_error() -> *const c_char {
    boundary(|| Ok(last_error()))
}
