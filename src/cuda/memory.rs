//! Device memory that a handle owns as long as it lives. The allocator's cache never has it.

use std::ptr;

use crate::ffi::error::{Result, error};

use super::{context::ContextRef, device::Device, queue::Queue, stream::Stream};

/// Alignment of the parts of a block, in bytes.
const ALIGNMENT: u64 = 256;

/// Block of device memory.
pub struct Memory {
    device: Device,
    pub home: ContextRef,
    address: u64,
    bytes: u64,
}

impl Memory {
    /// Allocates `bytes` bytes in the queue's context. Later work on its stream finds them set to 0.
    pub fn new(queue: &mut Queue, bytes: u64) -> Result<Self> {
        let home = queue.home()?;
        let size = usize::try_from(bytes).map_err(|_| error!(SizeOverflow, "{bytes} bytes for a codec"))?;
        let address = queue.with_memory(|queue| queue.allocate_anew(size, size))?;
        let memory = Self { device: queue.device, home, address, bytes };
        memory.clear(queue, 0, bytes)?;
        Ok(memory)
    }

    /// Makes a queue on a stream of the memory's context.
    pub fn queue(&self, stream: Stream) -> Result<Queue> {
        Queue::at(self.device, stream, self.home)
    }

    pub fn at(&self, offset: u64) -> u64 {
        self.address + offset
    }

    /// Sets a part of the memory to 0.
    pub fn clear(&self, queue: &mut Queue, offset: u64, bytes: u64) -> Result<()> {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        if bytes == 0 {
            return Ok(());
        }
        let at = ptr::with_exposed_provenance_mut(self.at(offset) as usize);
        // SAFETY: the range lies within this memory (asserted), and the queue's stream is in its context.
        unsafe { queue.clear(at, bytes as usize) }
    }

    /// Copies a table into the memory, and waits for the copy.
    pub fn put<T: Copy>(&self, offset: u64, table: &[T]) -> Result<()> {
        let bytes = size_of_val(table) as u64;
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        if bytes == 0 {
            return Ok(());
        }
        let driver = self.device.driver;
        // SAFETY: within this memory (asserted), its context is current, and the synchronous copy reads `table`.
        let code =
            unsafe { (driver.functions.cuMemcpyHtoD_v2)(self.address + offset, table.as_ptr().cast(), bytes as usize) };
        driver.check(code, format_args!("cuMemcpyHtoD of {bytes} bytes on {}", self.device))
    }

    /// Copies bytes of the host into the memory, after the work enqueued on the legacy stream, and waits for the copy.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let mut queue = self.queue(Stream::LEGACY)?;
        queue.current()?;
        self.put(offset, from)
    }

    /// Copies a part of the memory to the host, after the work enqueued on the legacy stream, and waits for the copy.
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        assert!(offset.checked_add(to.len() as u64).is_some_and(|end| end <= self.bytes));
        // SAFETY: the range lies within this memory (asserted), and the queue works in its context.
        unsafe { self.queue(Stream::LEGACY)?.copy_to_host(to, self.address + offset) }
    }

    /// Returns true if the memory is in the device's primary context.
    pub fn is_in_primary(&self) -> bool {
        self.home.is_primary
    }

    /// Copies a part of the memory to memory of the device, or to pinned memory of the host.
    ///
    /// # Safety
    /// `to` is device or pinned memory of `bytes` bytes, which nothing else uses until the copy is done.
    pub unsafe fn copy_to(&self, queue: &mut Queue, offset: u64, to: *mut u8, bytes: u64) -> Result<()> {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        if bytes == 0 {
            return Ok(());
        }
        let from = ptr::with_exposed_provenance(self.at(offset) as usize);
        // SAFETY: the range lies within this memory (asserted), and the stream is in its context. The caller promises
        // `to`.
        unsafe { queue.copy(to, from, bytes as usize) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.home.give_back(self.device, || {
            // SAFETY: cuMemAlloc allocated it in this context, which is current; the handle's work is done.
            unsafe { (self.device.driver.functions.cuMemFree_v2)(self.address) };
        });
    }
}

/// Assigns offsets to the parts of a block.
#[derive(Default)]
pub struct Parts {
    pub bytes: u64,
}

impl Parts {
    /// Returns the offset of the next part, which has `count` items of `size` bytes.
    pub fn add(&mut self, count: usize, size: usize) -> Result<u64> {
        let begin = self.bytes;
        let bytes = (count as u64).checked_mul(size as u64).and_then(|bytes| bytes.checked_next_multiple_of(ALIGNMENT));
        self.bytes = bytes
            .and_then(|bytes| begin.checked_add(bytes))
            .ok_or_else(|| error!(SizeOverflow, "a codec would have more than 2^64 - 1 bytes of memory"))?;
        Ok(begin)
    }
}
