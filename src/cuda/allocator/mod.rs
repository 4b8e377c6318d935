//! The caching allocator: device memory of tensors, kept for reuse within a bound.
//!
//! Work that was enqueued before a block's release may still use it, on streams that the library has no handle of. A
//! released block is therefore pending until a *fence* has passed: cuMemFree waits for all work of the context, on any
//! stream. NVIDIA documents only that cuMemFree may wait. tests/spec/test_memory.py shows that it does, with driver 580.
//! Every other way to wait for all work breaks captures of other threads (measured with driver 580: cuCtxSynchronize
//! and cuCtxRecordEvent do). Fences are rare: only an allocation that finds much pending runs one.
//!
//! Calls that create tensors free memory beyond a share of the device's memory, the largest blocks first, but only a
//! few blocks per call: every cuMemFree waits for the work enqueued since the last one. No other call frees, so
//! launches never wait.
//!
//! Blocks come from cuMemAlloc and not from a driver pool: other processes can open them, and a pool orders a release
//! with one stream only.

pub mod blocks;

use crate::{
    dlpack::Owner,
    ffi::error::{Result, Status},
};

use super::queue::Queue;

use blocks::{Batch, Block, Cache, SMALLEST, capacity_for};

/// Largest number of blocks that a call frees to keep within the bound.
const FREES_PER_CALL: usize = 8;

/// Largest number of times that a call without memory waits for another thread that frees blocks or waits for a fence.
const MOST_WAITS: usize = 16;

impl Queue {
    /// Allocates `bytes` bytes, at least one, not initialized, aligned to 256 bytes at least.
    pub fn allocate(&mut self, bytes: i64) -> Result<Owner> {
        let context = self.current()?.id;
        self.keep_within_bound(context)?;
        self.free_retired()?;
        let cache = self.cache();
        let (bytes, capacity) = (bytes as usize, capacity_for(bytes as usize));
        if let Some(block) = cache.take(context, bytes, capacity)? {
            return Ok(block.into_owner());
        }
        if cache.lock().needs_fence(context) {
            self.fence(context)?;
            if let Some(block) = cache.take(context, bytes, capacity)? {
                return Ok(block.into_owner());
            }
        }
        let mut block = Block::new(capacity, context, cache);
        block.address = match self.allocate_anew(capacity, bytes) {
            Err(failure) if failure.status == Status::OutOfMemory => {
                // Retry with no more than the tensor needs, which may still be available.
                block.capacity = bytes.checked_next_multiple_of(SMALLEST).unwrap_or(bytes);
                self.with_memory(|queue| queue.allocate_anew(block.capacity, bytes))?
            }
            other => other?,
        };
        if let Err(failure) = cache.settle(&block) {
            let mut batch = cache.empty_batch();
            batch.add(block);
            self.free_largest(&mut batch)?;
            return Err(failure);
        }
        Ok(block.into_owner())
    }

    /// Calls `allocate`. If that gives OUT_OF_MEMORY, frees what the cache keeps, and calls it again.
    pub fn with_memory<T>(&mut self, allocate: impl Fn(&Self) -> Result<T>) -> Result<T> {
        let context = self.current()?.id;
        self.free_retired()?;
        let mut waits = 0;
        loop {
            match allocate(self) {
                Err(failure) if failure.status == Status::OutOfMemory => {
                    if !self.give_back(context, usize::MAX)? {
                        if waits == MOST_WAITS || !self.cache().wait_for_others() {
                            return Err(failure);
                        }
                        waits += 1;
                    }
                }
                other => return other,
            }
        }
    }

    /// Frees memory beyond the bound, the largest blocks first, a few blocks per call.
    fn keep_within_bound(&mut self, context: u64) -> Result<()> {
        for _ in 0..FREES_PER_CALL {
            if !self.cache().is_beyond_bound(context) || !self.give_back(context, 1)? {
                break;
            }
        }
        Ok(())
    }

    /// Frees retired blocks, which no process uses any more.
    fn free_retired(&mut self) -> Result<()> {
        if !self.cache().may_have_retired() {
            return Ok(());
        }
        let context = self.current()?.id;
        while let Some(mut batch) = self.cache().take_retired(context) {
            self.free_largest(&mut batch)?;
        }
        Ok(())
    }

    /// Like `free_retired`, in the context that calls without a stream use, if there is one.
    pub fn free_returned(&mut self) -> Result<()> {
        if self.cache().may_have_retired() && self.has_context()? { self.free_retired() } else { Ok(()) }
    }

    /// Frees all cached blocks in the context that calls without a stream use, if there is one.
    pub fn trim(&mut self) -> Result<()> {
        // Ask the driver before taking a lock: in a forked child it refuses, and another thread may have held the lock.
        if self.has_context()? {
            let context = self.current()?.id;
            self.free_retired()?;
            self.give_back(context, usize::MAX)?;
        }
        Ok(())
    }

    /// Waits until all work that was enqueued in the context before is done, on any stream. Breaks no capture unless
    /// the device has no memory left.
    pub fn finish(&mut self) -> Result<()> {
        let context = self.current()?.id;
        if self.fence(context)? { Ok(()) } else { self.synchronize_context() }
    }

    fn cache(&self) -> &'static Cache {
        &self.device.properties().cache
    }

    /// Allocates memory that is not of the cache.
    pub fn allocate_anew(&self, capacity: usize, wanted: usize) -> Result<u64> {
        let (driver, mut address) = (self.device.driver, 0);
        // SAFETY: `address` outlives the call.
        let code = unsafe { (driver.functions.cuMemAlloc_v2)(&mut address, capacity) };
        driver.check(code, format_args!("cuMemAlloc of {wanted} bytes on {}", self.device))?;
        Ok(address)
    }

    /// Frees a block of the batch. All work that was enqueued in the context before is then done.
    fn free(&self, batch: &mut Batch, address: u64) -> Result<()> {
        // SAFETY: a block of the batch came from cuMemAlloc in this context, and is in no tensor any more.
        let code = unsafe { (self.device.driver.functions.cuMemFree_v2)(address) };
        self.device.driver.check(code, format_args!("cuMemFree on {}", self.device))?;
        batch.forget(address);
        Ok(())
    }

    /// Frees up to `most` blocks of a context, the largest first. Returns true if there was one.
    fn give_back(&mut self, context: u64, most: usize) -> Result<bool> {
        let mut freed = 0;
        while freed < most
            && let Some(mut batch) = self.cache().take_largest(context)
        {
            self.free_largest(&mut batch)?;
            freed += 1;
        }
        Ok(freed > 0)
    }

    fn free_largest(&self, batch: &mut Batch) -> Result<()> {
        match batch.largest().map(|block| block.address) {
            Some(address) => self.free(batch, address),
            None => Ok(()),
        }
    }

    fn synchronize_context(&self) -> Result<()> {
        // SAFETY: cuCtxSynchronize takes no argument; the context is current.
        let code = unsafe { (self.device.driver.functions.cuCtxSynchronize)() };
        self.device.driver.check(code, format_args!("cuCtxSynchronize on {}", self.device))
    }

    /// Waits until all work that was enqueued in the context before is done, and makes the blocks pending now ready.
    /// Returns false, without a wait, if there was no block to free.
    fn fence(&mut self, context: u64) -> Result<bool> {
        // Take the blocks out first, so that no other thread waits for the same ones.
        let mut batch = self.cache().take_pending(context);
        let freed = match self.allocate_anew(SMALLEST, SMALLEST) {
            Ok(address) => {
                let mut block = Block::new(SMALLEST, context, self.cache());
                block.address = address;
                batch.add(block);
                address
            }
            // The device has no memory for a small block: free a block of the batch instead.
            Err(failure) if failure.status == Status::OutOfMemory => match batch.largest() {
                Some(block) => block.address,
                None => return Ok(false),
            },
            Err(failure) => return Err(failure),
        };
        self.free(&mut batch, freed)?;
        batch.make_ready();
        Ok(true)
    }
}
