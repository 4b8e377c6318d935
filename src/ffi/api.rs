//! ERRORS

use std::ffi::c_char;

use super::{
    error::status_name,
    panics::{boundary, last_error},
};
/// The status of a call: one of GC_STATUS_*.
pub type gc_status_t = i32;

/// The name of a status as it stands in this header, such as "GC_STATUS_SHAPE_MISMATCH". A code that this version does
/// not have is "GC_STATUS_UNKNOWN". Static text, never NULL.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_status_name(status: gc_status_t) -> *const c_char {
    boundary(|| Ok(status_name(status).as_ptr()))
}

/// This thread's last failure in words. For example: "dst: 3 chunks of 17 bytes expected for 400 elements, got shape
/// [3, 16]". It is "" before the first failure, and a call that succeeds leaves it alone. The text is UTF-8, at most
/// 500 bytes, and stays as it is until the next failure on this thread, or its end.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_last_error() -> *const c_char {
    boundary(|| Ok(last_error()))
}
