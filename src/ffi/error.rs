//! Errors: a status for the program, and a text for people.

use std::{
    ffi::CStr,
    fmt::{self, Write},
};

/// Outcome of a call. Codes are never reused.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// An argument that is not allowed, such as NULL, n_chunks 0, an axis out of range, a negative size, tensors that
    /// overlap or are on different devices.
    InvalidArgument = 1,
    /// A dtype that this function does not take.
    UnsupportedDtype = 2,
    /// A device type other than CPU, CUDA, CUDAHost and CUDAManaged, or a CUDA device that is not there.
    UnsupportedDevice = 3,
    /// A tensor of the wrong length or shape.
    ShapeMismatch = 4,
    /// The tensor is read-only, and the result could not be marked so.
    ReadOnly = 5,
    /// A tensor that must be C-contiguous is not.
    NotContiguous = 6,
    /// A size, count or extent does not fit in 64 bits.
    SizeOverflow = 7,
    /// Another thread's call on the same object is under way.
    Busy = 8,
    /// Data that this library did not write, or that is incomplete.
    Corrupt = 9,
    /// There is not enough memory.
    OutOfMemory = 10,
    /// A CUDA tensor without a usable CUDA driver: there is none, or it is older than CUDA 12.0.
    DriverUnavailable = 20,
    /// The CUDA driver reported an error.
    Cuda = 21,
    /// The CUDA context is lost: nothing on it works any more.
    ContextLost = 22,
    /// NVRTC, which compiles kernels, is not available.
    NvrtcUnavailable = 25,
    /// A kernel did not compile.
    Compile = 26,
    /// The communication library is not available.
    CommUnavailable = 30,
    /// Communication failed.
    Comm = 31,
    /// Sharing between processes failed.
    Share = 40,
    /// The other side did not answer in time.
    Timeout = 41,
    /// A defect of this library: see "Errors" in docs/API.md.
    Panic = 99,
}

impl Status {
    /// Returns the name of the status in the header.
    pub fn name(self) -> &'static CStr {
        status_name(self as i32)
    }
}

/// Returns the name in the header of the status with this code.
pub fn status_name(code: i32) -> &'static CStr {
    STATUS_NAMES.iter().find(|(status, _)| *status as i32 == code).map_or(c"GC_STATUS_UNKNOWN", |(_, name)| name)
}

/// Each status with its name in the header.
pub const STATUS_NAMES: [(Status, &CStr); 21] = [
    (Status::Ok, c"GC_STATUS_OK"),
    (Status::InvalidArgument, c"GC_STATUS_INVALID_ARGUMENT"),
    (Status::UnsupportedDtype, c"GC_STATUS_UNSUPPORTED_DTYPE"),
    (Status::UnsupportedDevice, c"GC_STATUS_UNSUPPORTED_DEVICE"),
    (Status::ShapeMismatch, c"GC_STATUS_SHAPE_MISMATCH"),
    (Status::ReadOnly, c"GC_STATUS_READ_ONLY"),
    (Status::NotContiguous, c"GC_STATUS_NOT_CONTIGUOUS"),
    (Status::SizeOverflow, c"GC_STATUS_SIZE_OVERFLOW"),
    (Status::Busy, c"GC_STATUS_BUSY"),
    (Status::Corrupt, c"GC_STATUS_CORRUPT"),
    (Status::OutOfMemory, c"GC_STATUS_OUT_OF_MEMORY"),
    (Status::DriverUnavailable, c"GC_STATUS_DRIVER_UNAVAILABLE"),
    (Status::Cuda, c"GC_STATUS_CUDA"),
    (Status::ContextLost, c"GC_STATUS_CONTEXT_LOST"),
    (Status::NvrtcUnavailable, c"GC_STATUS_NVRTC_UNAVAILABLE"),
    (Status::Compile, c"GC_STATUS_COMPILE"),
    (Status::CommUnavailable, c"GC_STATUS_COMM_UNAVAILABLE"),
    (Status::Comm, c"GC_STATUS_COMM"),
    (Status::Share, c"GC_STATUS_SHARE"),
    (Status::Timeout, c"GC_STATUS_TIMEOUT"),
    (Status::Panic, c"GC_STATUS_PANIC"),
];

/// A refusal or a failure.
#[derive(Debug)]
pub struct Error {
    pub status: Status,
    pub message: String,
}

pub type Result<T> = std::result::Result<T, Error>;

/// Longest message, in bytes: a hostile shape may have thousands of dimensions to print.
pub(crate) const MESSAGE_LIMIT: usize = 500;

impl Error {
    pub fn new(status: Status, text: fmt::Arguments<'_>) -> Self {
        Self { status, message: sentence(text) }
    }
}

/// Formats up to [`MESSAGE_LIMIT`] bytes. Without memory for them the text is shorter; the process does not abort.
pub fn sentence(text: fmt::Arguments<'_>) -> String {
    let mut message = Limited(String::new());
    // An error here means that the limit is reached or memory is lacking. The text is what was written so far.
    let _ = message.write_fmt(text);
    message.0
}

struct Limited(String);

impl Write for Limited {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = MESSAGE_LIMIT.saturating_sub(self.0.len());
        let cut = &text[..text.floor_char_boundary(room)];
        self.0.try_reserve(cut.len()).map_err(|_| fmt::Error)?;
        self.0.push_str(cut);
        if cut.len() == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

/// Creates an [`Error`] of a status: `error!(ShapeMismatch, "dst: {} expected", n)`.
macro_rules! error {
    ($status:ident, $($text:tt)+) => {
        $crate::ffi::error::Error::new($crate::ffi::error::Status::$status, format_args!($($text)+))
    };
}
pub(crate) use error;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_is_cut_at_the_limit_and_at_a_character() {
        let long = "é".repeat(MESSAGE_LIMIT);
        let cut = sentence(format_args!("x{long}"));
        assert_eq!(cut.len(), MESSAGE_LIMIT - 1);
        assert!(cut.ends_with('é'));
    }
}
