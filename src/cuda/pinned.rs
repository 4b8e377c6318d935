//! Host memory that GPUs can access (pinned memory).

use std::ptr;

use crate::ffi::error::{Result, error};

use super::{context::ContextRef, device::Device, queue::Queue};

/// CU_MEMHOSTALLOC_PORTABLE: every context may use the memory.
const PORTABLE: u32 = 1;

pub struct Pinned {
    device: Device,
    home: ContextRef,
    /// Address as a number, so that threads can share it.
    address: usize,
}

impl Pinned {
    /// Allocates `bytes` bytes, at least 1, all 0.
    pub fn new(queue: &mut Queue, bytes: i64) -> Result<Self> {
        let size = usize::try_from(bytes).map_err(|_| error!(SizeOverflow, "{bytes} bytes of pinned memory"))?;
        let (device, mut place) = (queue.device, ptr::null_mut());
        let home = queue.home()?;
        // SAFETY: the driver writes to a local variable, which outlives the call.
        let code = unsafe { (device.driver.functions.cuMemHostAlloc)(&mut place, size, PORTABLE) };
        device.driver.check(code, format_args!("cuMemHostAlloc of {bytes} bytes on {device}"))?;
        // SAFETY: the new memory has `size` bytes, and only this call uses it.
        unsafe { place.cast::<u8>().write_bytes(0, size) };
        Ok(Self { device, home, address: place.expose_provenance() })
    }

    pub fn data(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.address)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.home.give_back(self.device, || {
            // SAFETY: cuMemHostAlloc allocated it in this context, which is current; its user's work is done.
            unsafe { (self.device.driver.functions.cuMemFreeHost)(self.data().cast()) };
        });
    }
}
