//! The caching allocator: device memory of tensors, kept for reuse within a bound.
//!
//! Work that was enqueued before a block's release may still use it, on streams that the library has no handle of. A
//! released block is therefore pending until a *fence* has passed: cuMemFree waits for all work of the context, on any
//! stream. Every other way to wait for all work breaks captures of other threads (measured with driver 580:
//! cuCtxSynchronize and cuCtxRecordEvent do). NVIDIA documents only that cuMemFree may wait, so `probe` tests each
//! context. Where cuMemFree does not wait, no block is used again. Fences are rare: only an allocation that finds much
//! pending runs one.
//!
//! Calls that create tensors free memory beyond a share of the device's memory, the largest blocks first, but only a
//! few blocks per call: every cuMemFree waits for the work enqueued since the last one. No other call frees, so
//! launches never wait.
//!
//! Blocks come from cuMemAlloc and not from a driver pool: other processes can open them, and a pool orders a release
//! with one stream only.

pub mod blocks;

use std::time::{Duration, Instant};

use crate::{
    dlpack::Owner,
    ffi::error::{Result, Status},
};

use super::{
    context::LossyCache,
    launch::argument,
    module::{PEERS, PEERS_MODULE},
    own_stream::OwnStream,
    queue::Queue,
    stream::Stream,
};

use blocks::{Batch, Block, Cache, SMALLEST, capacity_for};

/// Largest number of blocks that a call frees to keep within the bound.
const FREES_PER_CALL: usize = 8;

/// Durations for which the probe's trials keep a stream busy: many times what cuMemFree takes otherwise. A cuMemFree
/// that does not wait passes only if the thread stalls in each trial for that trial's duration.
const SPINS: [Duration; 3] = [Duration::from_millis(5), Duration::from_millis(11), Duration::from_millis(5)];

/// Tolerance beyond the spin of a cuMemFree that waits. Less than the difference between the spins.
const SLACK: Duration = Duration::from_millis(5);

/// Largest numbers of unclear trials: in one probe, and of a context before it is probed no more.
const UNCLEAR_PER_PROBE: usize = 8;
const MOST_UNCLEAR: usize = 40;

/// Result per context: 1 if cuMemFree waits for all running work, 0 if not, else `UNCLEAR` plus the number of unclear
/// trials so far.
static FREEING_WAITS: LossyCache = LossyCache::nothing();
const UNCLEAR: usize = 2;

/// Largest number of times that a call without memory waits for another thread that frees blocks or waits for a fence.
const MOST_WAITS: usize = 16;

/// Result of one trial of the probe.
enum Trial {
    /// cuMemFree took as long as the work on another stream.
    Waited,
    /// cuMemFree returned while the work was running.
    DidNotWait,
    /// The thread was delayed for another reason.
    Unclear,
    /// The device has no memory for a trial.
    NoMemory,
}

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
        for waits in 0.. {
            match self.allocate_anew(block.capacity, bytes) {
                Ok(address) => {
                    block.address = address;
                    break;
                }
                Err(failure) if failure.status == Status::OutOfMemory => {
                    // Retry with no more than the tensor needs, which may still be available.
                    block.capacity = bytes.checked_next_multiple_of(SMALLEST).unwrap_or(bytes);
                    let gave_back = self.give_back(context, usize::MAX)?;
                    if capacity > block.capacity && waits == 0 || gave_back {
                        continue;
                    }
                    if waits >= MOST_WAITS || !cache.wait_for_others() {
                        return Err(failure);
                    }
                }
                Err(failure) => return Err(failure),
            }
        }
        if let Err(failure) = cache.settle(&block) {
            let mut batch = cache.empty_batch();
            batch.add(block);
            self.free_largest(&mut batch, context)?;
            return Err(failure);
        }
        Ok(block.into_owner())
    }

    /// Frees memory beyond the bound, the largest blocks first, a few blocks per call. Each cuMemFree may wait.
    fn keep_within_bound(&mut self, context: u64) -> Result<()> {
        for _ in 0..FREES_PER_CALL {
            if !self.cache().is_beyond_bound() || !self.give_back(context, 1)? {
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
            self.free_largest(&mut batch, context)?;
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

    /// Waits until all work that was enqueued in the context before is done, on any stream. Breaks no capture if
    /// cuMemFree is known to wait.
    pub fn finish(&mut self) -> Result<()> {
        let context = self.current()?.id;
        if self.fence(context)? { Ok(()) } else { self.synchronize_context() }
    }

    fn cache(&self) -> &'static Cache {
        &self.device.properties().cache
    }

    fn allocate_anew(&self, capacity: usize, wanted: usize) -> Result<u64> {
        let (driver, mut address) = (self.device.driver, 0);
        // SAFETY: `address` outlives the call.
        let code = unsafe { (driver.functions.cuMemAlloc_v2)(&mut address, capacity) };
        driver.check(code, format_args!("cuMemAlloc of {wanted} bytes on {}", self.device))?;
        Ok(address)
    }

    /// Frees a block of the batch. If cuMemFree waits, all work that was enqueued in the context before is then done.
    fn free(&self, batch: &mut Batch, address: u64) -> Result<()> {
        // SAFETY: a block of the batch came from cuMemAlloc in this context, and is in no tensor any more.
        let code = unsafe { (self.device.driver.functions.cuMemFree_v2)(address) };
        self.device.driver.check(code, format_args!("cuMemFree on {}", self.device))?;
        batch.forget(address);
        Ok(())
    }

    /// Allocates a block of the smallest size for the batch. None: the device has no memory even for that.
    fn add_smallest(&self, batch: &mut Batch, context: u64) -> Result<Option<u64>> {
        let mut block = Block::new(SMALLEST, context, self.cache());
        match self.allocate_anew(SMALLEST, SMALLEST) {
            Ok(address) => {
                block.address = address;
                batch.add(block);
                Ok(Some(address))
            }
            Err(failure) if failure.status == Status::OutOfMemory => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Frees up to `most` blocks of a context, the largest first. Returns true if there was one.
    fn give_back(&mut self, context: u64, most: usize) -> Result<bool> {
        let mut freed = 0;
        while freed < most
            && let Some(mut batch) = self.cache().take_largest(context)
        {
            self.free_largest(&mut batch, context)?;
            freed += 1;
        }
        Ok(freed > 0)
    }

    fn free_largest(&mut self, batch: &mut Batch, context: u64) -> Result<()> {
        let Some(address) = batch.largest().map(|block| block.address) else { return Ok(()) };
        if !self.free_is_fence(context)? {
            self.synchronize_context()?;
        }
        self.free(batch, address)
    }

    fn synchronize_context(&self) -> Result<()> {
        // SAFETY: cuCtxSynchronize takes no argument; the context is current.
        let code = unsafe { (self.device.driver.functions.cuCtxSynchronize)() };
        self.device.driver.check(code, format_args!("cuCtxSynchronize on {}", self.device))
    }

    /// Waits until all work that was enqueued in the context before is done, and makes the blocks pending now ready.
    /// Returns false, without a wait and without a ready block, if cuMemFree is not known to wait or no block could be
    /// freed.
    fn fence(&mut self, context: u64) -> Result<bool> {
        // Take the blocks out first, so that no other thread waits for the same ones.
        let mut batch = self.cache().take_pending(context);
        if !self.free_is_fence(context)? {
            return Ok(false);
        }
        match self.add_smallest(&mut batch, context)? {
            Some(address) => self.free(&mut batch, address)?,
            // The device has no memory for a small block: free any block of the batch instead.
            None if batch.largest().is_none() => return Ok(false),
            None => self.free_largest(&mut batch, context)?,
        }
        batch.make_ready();
        Ok(true)
    }

    /// Returns true if cuMemFree is known to wait for all work of this context. The first call probes the context;
    /// later calls probe again while the result is unclear. An unclear result counts as false, which is safe.
    fn free_is_fence(&mut self, context: u64) -> Result<bool> {
        let unclear = match FREEING_WAITS.recall(context) {
            Some(known @ 0..UNCLEAR) => return Ok(known == 1),
            Some(unclear) if unclear >= UNCLEAR + MOST_UNCLEAR => return Ok(false),
            unclear => unclear.unwrap_or(UNCLEAR),
        };
        let known = self.probe(context, unclear)?;
        FREEING_WAITS.remember(context, known);
        Ok(known == 1)
    }

    /// Tests if cuMemFree waits for work on another stream. `unclear` and the result: as in [`FREEING_WAITS`].
    ///
    /// An idle stream after cuMemFree proves nothing, because the thread may have lost the CPU meanwhile. The elapsed
    /// time must therefore follow the length of the work, in trials of different lengths. A stream that is still busy
    /// proves that cuMemFree did not wait.
    #[cold]
    fn probe(&mut self, context: u64, mut unclear: usize) -> Result<usize> {
        self.current()?;
        self.put_into_context(&PEERS_MODULE)?;
        let stream = OwnStream::new(self)?;
        let last = unclear + UNCLEAR_PER_PROBE;
        for spin in SPINS {
            loop {
                match self.trial(context, stream.stream(), spin)? {
                    Trial::Waited => break,
                    Trial::DidNotWait => return Ok(0),
                    Trial::Unclear if unclear < last => unclear += 1,
                    Trial::Unclear | Trial::NoMemory => return Ok(unclear),
                }
            }
        }
        Ok(1)
    }

    /// Keeps a stream busy for `spin`, frees a block, and measures how long cuMemFree took.
    fn trial(&mut self, context: u64, stream: Stream, spin: Duration) -> Result<Trial> {
        let mut batch = self.cache().empty_batch();
        // The first block is freed before the clock starts: if cuMemFree waits, other threads' work is then done.
        let (Some(before), Some(address)) =
            (self.add_smallest(&mut batch, context)?, self.add_smallest(&mut batch, context)?)
        else {
            return Ok(Trial::NoMemory);
        };
        self.free(&mut batch, before)?;
        let mut other = Queue::of(self.device.ordinal as i32, stream)?;
        let mut nanoseconds = spin.as_nanos() as u64;
        let begin = Instant::now();
        // SAFETY: the kernel's only argument is a uint64, and the kernel uses no memory.
        unsafe { other.launch(&PEERS.spin, 1, &mut argument(&mut nanoseconds))? };
        self.free(&mut batch, address)?;
        let elapsed = begin.elapsed();
        Ok(match other.is_done()? {
            false => Trial::DidNotWait,
            true if (spin..spin + SLACK).contains(&elapsed) => Trial::Waited,
            true => Trial::Unclear,
        })
    }
}
