//! VERSION
//!
//! GRADCODEC_VERSION is the version that you compile against, gc_version() the version that you run with.

use std::ffi::{CStr, c_char};

use crate::{about, ffi::panics::boundary};

/// Version of the package, as text.
const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("the package version has no NUL"),
};

/// Returns the version of the loaded library: major << 16 | minor << 8 | patch.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_version() -> u32 {
    boundary(|| {
        Ok(number(env!("CARGO_PKG_VERSION_MAJOR")) << 16
            | number(env!("CARGO_PKG_VERSION_MINOR")) << 8
            | number(env!("CARGO_PKG_VERSION_PATCH")))
    })
}

/// Returns the version of the loaded library as text, such as "0.1.0". The text is static.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_version_string() -> *const c_char {
    boundary(|| Ok(VERSION.as_ptr()))
}

/// Returns what a bug report should include, in lines of text. It has the version and commit ("unknown" if built
/// without git, followed by "-dirty" if built from other sources), compiler and target. It has the instruction set in
/// use, those of this processor, and the version and file of each CUDA driver, NCCL and NVRTC that is loaded in this
/// process. The call loads and starts nothing; it only chooses the instruction set, as a first call does. The text is
/// for people and may change. It is UTF-8, at most 1000 bytes, and stays until this thread calls this again, or ends;
/// "" without memory.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_build_info() -> *const c_char {
    boundary(|| about::text(VERSION))
}

/// Returns the value of a decimal number.
const fn number(digits: &str) -> u32 {
    let (digits, mut value, mut index) = (digits.as_bytes(), 0, 0);
    while index < digits.len() {
        value = value * 10 + (digits[index] - b'0') as u32;
        index += 1;
    }
    value
}
