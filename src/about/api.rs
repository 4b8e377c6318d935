//! VERSION
//!
//! GRADCODEC_VERSION is what you compile against, gc_version() what you run with.

use std::ffi::{CStr, c_char};

use crate::{about, ffi::panics::boundary};

/// The version text, for every place that needs it.
const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("the package version has no NUL"),
};

/// The version of the loaded library: major << 16 | minor << 8 | patch.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_version() -> u32 {
    boundary(|| {
        Ok(number(env!("CARGO_PKG_VERSION_MAJOR")) << 16
            | number(env!("CARGO_PKG_VERSION_MINOR")) << 8
            | number(env!("CARGO_PKG_VERSION_PATCH")))
    })
}

/// The version of the loaded library as text, such as "0.1.0". Static text.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_version_string() -> *const c_char {
    boundary(|| Ok(VERSION.as_ptr()))
}

/// What a bug report should include, in lines of text. Version and commit ("unknown" if it was built without git,
/// "-dirty" behind it if from other sources), compiler and target, the instruction set in use and those that this
/// processor has, and the version and file of each CUDA driver, NCCL and NVRTC that is loaded in this process. Nothing
/// is loaded or started for it; only the instruction set is chosen, as by a first call. The words are for people and
/// may change. UTF-8, at most 1000 bytes, and unchanged until this thread calls this again, or its end; "" without
/// memory.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_build_info() -> *const c_char {
    boundary(|| about::text(VERSION))
}

/// A decimal number.
const fn number(digits: &str) -> u32 {
    let (digits, mut value, mut index) = (digits.as_bytes(), 0, 0);
    while index < digits.len() {
        value = value * 10 + (digits[index] - b'0') as u32;
        index += 1;
    }
    value
}
