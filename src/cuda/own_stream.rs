//! Streams that the library creates.

use std::ptr;

use cudarc::driver::sys::CUstream;

use crate::ffi::error::Result;

use super::{context::ContextRef, device::Device, queue::Queue, stream::Stream};

/// Non-blocking stream: it does not wait for the legacy stream.
pub struct OwnStream {
    device: Device,
    home: ContextRef,
    /// CUstream as a number, so that threads can share it.
    handle: usize,
}

impl OwnStream {
    /// Creates a stream in the context that the queue works in.
    pub fn new(queue: &mut Queue) -> Result<Self> {
        const NON_BLOCKING: u32 = 1;
        let (device, mut handle) = (queue.device, ptr::null_mut());
        let home = queue.home()?;
        // SAFETY: a context is current, and `handle` outlives the call.
        let code = unsafe { (device.driver.functions.cuStreamCreate)(&mut handle, NON_BLOCKING) };
        device.driver.check(code, format_args!("cuStreamCreate on {device}"))?;
        Ok(Self { device, home, handle: handle.expose_provenance() })
    }

    /// Returns true if the stream is in the context that a queue works in.
    pub fn is_of(&self, queue: &mut Queue) -> Result<bool> {
        Ok(queue.context()?.id == self.home.id)
    }

    pub fn stream(&self) -> Stream {
        Stream::from_raw(ptr::with_exposed_provenance_mut(self.handle))
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        self.home.give_back(self.device, || {
            let handle: CUstream = ptr::with_exposed_provenance_mut(self.handle);
            // SAFETY: cuStreamCreate made it in this context, which is current; its enqueued work still completes.
            unsafe { (self.device.driver.functions.cuStreamDestroy_v2)(handle) };
        });
    }
}
