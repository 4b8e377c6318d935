//! Memory of the host that GPUs reach, too.

use std::ptr;

use crate::ffi::error::{Result, error};

use super::{context::ContextRef, device::Device, queue::Queue};

/// So that every context may use it.
const PORTABLE: u32 = 1;

pub struct Pinned {
    device: Device,
    home: ContextRef,
    /// As a number, to be shared.
    address: usize,
}

impl Pinned {
    /// `bytes` bytes, at least 1, all 0.
    pub fn new(queue: &mut Queue, bytes: i64) -> Result<Self> {
        let size = usize::try_from(bytes).map_err(|_| error!(SizeOverflow, "{bytes} bytes of pinned memory"))?;
        let (device, mut place) = (queue.device, ptr::null_mut());
        let home = queue.home()?;
        // SAFETY: what the driver writes to is a local variable, which outlives the call.
        let code = unsafe { (device.driver.functions.cuMemHostAlloc)(&mut place, size, PORTABLE) };
        device.driver.check(code, format_args!("cuMemHostAlloc of {bytes} bytes on {device}"))?;
        // SAFETY: memory of so many bytes, which is ours alone.
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
            // SAFETY: from cuMemHostAlloc in this context, which is current; its user's work is done.
            unsafe { (self.device.driver.functions.cuMemFreeHost)(self.data().cast()) };
        });
    }
}
