//! CUDA streams as callers name them.

use std::ffi::c_void;

/// Stream on which CUDA work is enqueued, as the caller names it. CPU work is done when a call returns.
#[derive(Clone, Copy)]
pub struct Stream(*mut c_void);

impl Stream {
    /// Legacy stream, used by calls without a stream.
    pub const LEGACY: Self = Self(std::ptr::null_mut());

    /// Makes a stream from NULL or 1 (legacy), 2 (per-thread), or any CUstream.
    pub fn from_raw(stream: *mut c_void) -> Self {
        Self(stream)
    }

    /// Returns the handle, for the driver, NCCL and callbacks: all of them accept NULL, 1 and 2.
    pub fn as_raw(self) -> *mut c_void {
        self.0
    }

    /// Returns the stream if the program created it, so that it belongs to a context.
    pub fn created(self) -> Option<*mut c_void> {
        (self.0.addr() > 2).then_some(self.0)
    }
}
