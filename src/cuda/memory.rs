//! Memory of a handle: its own from creation to the end, never the cache's.

use std::ptr;

use crate::ffi::error::{Result, error};

use super::{context::ContextRef, device::Device, queue::Queue, stream::Stream};

/// What parts of it are aligned to.
const ALIGNMENT: u64 = 256;

/// A block of device memory.
pub struct Memory {
    device: Device,
    pub home: ContextRef,
    address: u64,
    bytes: u64,
}

impl Memory {
    /// So much memory in the queue's context, all 0 for what follows on its stream.
    pub fn new(queue: &mut Queue, bytes: u64) -> Result<Self> {
        let (device, driver) = (queue.device, queue.device.driver);
        let home = queue.home()?;
        let size = usize::try_from(bytes).map_err(|_| error!(SizeOverflow, "{bytes} bytes for a codec"))?;
        let mut address = 0;
        // SAFETY: what the driver writes to is a local variable, which outlives the call.
        let code = unsafe { (driver.functions.cuMemAlloc_v2)(&mut address, size) };
        driver.check(code, format_args!("cuMemAlloc of {bytes} bytes on {device}"))?;
        let memory = Self { device, home, address, bytes };
        memory.clear(queue, 0, bytes)?;
        Ok(memory)
    }

    /// A queue on a stream of the context that this is in.
    pub fn queue(&self, stream: Stream) -> Result<Queue> {
        Queue::at(self.device, stream, self.home)
    }

    pub fn at(&self, offset: u64) -> u64 {
        self.address + offset
    }

    /// Sets some of it to 0.
    pub fn clear(&self, queue: &mut Queue, offset: u64, bytes: u64) -> Result<()> {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        if bytes == 0 {
            return Ok(());
        }
        let at = ptr::with_exposed_provenance_mut(self.at(offset) as usize);
        // SAFETY: within this memory, as was asserted, on a stream of its context.
        unsafe { queue.clear(at, bytes as usize) }
    }

    /// Copies a table into it, and waits for that.
    pub fn put<T: Copy>(&self, offset: u64, table: &[T]) -> Result<()> {
        let bytes = size_of_val(table) as u64;
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        if bytes == 0 {
            return Ok(());
        }
        let driver = self.device.driver;
        // SAFETY: within this memory, as was asserted, whose context is current; the table is there until it is copied.
        let code =
            unsafe { (driver.functions.cuMemcpyHtoD_v2)(self.address + offset, table.as_ptr().cast(), bytes as usize) };
        driver.check(code, format_args!("cuMemcpyHtoD of {bytes} bytes on {}", self.device))
    }

    /// Copies bytes of the host into it, behind what was enqueued on the legacy stream, and waits for that.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let mut queue = self.queue(Stream::LEGACY)?;
        queue.current()?;
        self.put(offset, from)
    }

    /// Copies some of it to the host, behind what was enqueued on the legacy stream, and waits for that.
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        assert!(offset.checked_add(to.len() as u64).is_some_and(|end| end <= self.bytes));
        // SAFETY: from within this memory, as was asserted, and in its context.
        unsafe { self.queue(Stream::LEGACY)?.copy_to_host(to, self.address + offset) }
    }

    /// Whether it is in the device's primary context.
    pub fn is_in_primary(&self) -> bool {
        self.home.is_primary
    }

    /// Copies some of it to memory of the device, or to pinned memory of the host.
    ///
    /// # Safety
    /// `to` is such memory, of so many bytes, which nobody else uses until that is done.
    pub unsafe fn copy_to(&self, queue: &mut Queue, offset: u64, to: *mut u8, bytes: u64) -> Result<()> {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        if bytes == 0 {
            return Ok(());
        }
        let from = ptr::with_exposed_provenance(self.at(offset) as usize);
        // SAFETY: from within this memory, as was asserted, on a stream of its context; the rest is the caller's
        // promise.
        unsafe { queue.copy(to, from, bytes as usize) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.home.give_back(self.device, || {
            // SAFETY: memory of this context, which is current, from cuMemAlloc; the handle's work is done.
            unsafe { (self.device.driver.functions.cuMemFree_v2)(self.address) };
        });
    }
}

/// Gives parts of a block their places.
#[derive(Default)]
pub struct Parts {
    pub bytes: u64,
}

impl Parts {
    /// Where the next part begins, of `count` things of `size` bytes.
    pub fn add(&mut self, count: usize, size: usize) -> Result<u64> {
        let begin = self.bytes;
        let bytes = (count as u64).checked_mul(size as u64).and_then(|bytes| bytes.checked_next_multiple_of(ALIGNMENT));
        self.bytes = bytes
            .and_then(|bytes| begin.checked_add(bytes))
            .ok_or_else(|| error!(SizeOverflow, "a codec would have more than 2^64 - 1 bytes of memory"))?;
        Ok(begin)
    }
}
