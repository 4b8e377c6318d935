//! Where work on CUDA is enqueued.

use std::ffi::c_void;

/// Where work on CUDA is enqueued: as the caller names it. The CPU's work is done when a call returns.
#[derive(Clone, Copy)]
pub struct Stream(*mut c_void);

impl Stream {
    /// The one that simple-tier calls work on.
    pub const LEGACY: Self = Self(std::ptr::null_mut());

    /// NULL and 1: the legacy stream, 2: the per-thread one, anything else a CUstream.
    pub fn from_raw(stream: *mut c_void) -> Self {
        Self(stream)
    }

    /// The handle, for the driver, NCCL and callbacks: all of them take NULL, 1 and 2.
    pub fn as_raw(self) -> *mut c_void {
        self.0
    }

    /// The stream, if it is one that somebody created, and so belongs to a context.
    pub fn created(self) -> Option<*mut c_void> {
        (self.0.addr() > 2).then_some(self.0)
    }
}
