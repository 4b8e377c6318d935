//! The caching allocator: device memory of tensors, kept for reuse within a bound.
//!
//! Work that was enqueued before a block's release may still use it, on streams that are not known here. So a block is
//! pending until a *fence* has passed: cuMemFree waits for all work of the context, on any stream, and unlike every
//! other way to wait for that, it breaks no capture of another thread (measured with driver 580: cuCtxSynchronize and
//! cuCtxRecordEvent do). NVIDIA's text only says that it may wait, so each context is tested for it (`probe`); where it
//! is not seen to wait, no block is used again. Fences are rare: only a call that needs memory, with much pending, runs
//! one.
//!
//! Calls that make tensors give back what is kept beyond a share of the device's memory, the largest blocks first, but
//! few blocks each: every cuMemFree waits for whatever was enqueued since the one before. No other call frees, so
//! launches never wait.
//!
//! Blocks come from cuMemAlloc, not from a pool of the driver: other processes can open them, and a pool orders a
//! release with one stream only.

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

/// The most blocks that a call frees to keep within the bound.
const FREES_PER_CALL: usize = 8;

/// How long the trials of the probe keep a stream busy: many times what cuMemFree takes otherwise. To pass for one that
/// waits, a thread would have to stall in each of them, for that trial's time.
const SPINS: [Duration; 3] = [Duration::from_millis(5), Duration::from_millis(11), Duration::from_millis(5)];

/// What cuMemFree may take longer than the spin if it waits for it. Less than the spins differ by.
const SLACK: Duration = Duration::from_millis(5);

/// Unclear trials before a probe gives up for now, and those of a context before it is probed no more.
const UNCLEAR_PER_PROBE: usize = 8;
const MOST_UNCLEAR: usize = 40;

/// Per context, whether cuMemFree waits there for all running work: 0 if not, 1 if so, or `UNCLEAR` and the number of
/// trials that have been unclear.
static FREEING_WAITS: LossyCache = LossyCache::nothing();
const UNCLEAR: usize = 2;

/// How often a call that finds no memory waits for another thread that is freeing blocks or waiting for a fence.
const MOST_WAITS: usize = 16;

/// What one trial of the probe has shown.
enum Trial {
    /// cuMemFree took as long as the work on another stream.
    Waited,
    /// It returned while that work was running.
    DidNotWait,
    /// The thread was held up for another reason.
    Unclear,
    /// There was no memory for it.
    NoMemory,
}

impl Queue {
    /// Memory of `bytes` bytes, at least one, not initialized, aligned to 256 at least.
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
                    // No more than is needed, for that may be there.
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

    /// Frees what is kept beyond the bound, the largest first, but few blocks a call. Waits then.
    fn keep_within_bound(&mut self, context: u64) -> Result<()> {
        for _ in 0..FREES_PER_CALL {
            if !self.cache().is_beyond_bound() || !self.give_back(context, 1)? {
                break;
            }
        }
        Ok(())
    }

    /// Frees retired blocks: those that other processes were given, and that nobody uses any more.
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

    /// The same in the context that calls without a stream work in, if there is one.
    pub fn free_returned(&mut self) -> Result<()> {
        if self.cache().may_have_retired() && self.has_context()? { self.free_retired() } else { Ok(()) }
    }

    /// Frees all that is kept, in the context that calls without a stream work in, if there is one.
    pub fn trim(&mut self) -> Result<()> {
        // The driver is asked before a lock is taken: in a forked child it refuses, and another thread may have had the
        // lock.
        if self.has_context()? {
            let context = self.current()?.id;
            self.free_retired()?;
            self.give_back(context, usize::MAX)?;
        }
        Ok(())
    }

    /// Waits until all work of the context that was enqueued before is done, on any stream. Breaks no capture where
    /// freeing is known to wait.
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

    /// Frees a block of the batch; where freeing waits, all work of the context that was enqueued before is then done.
    fn free(&self, batch: &mut Batch, address: u64) -> Result<()> {
        // SAFETY: a block of the batch came from cuMemAlloc in this context, and is in no tensor any more.
        let code = unsafe { (self.device.driver.functions.cuMemFree_v2)(address) };
        self.device.driver.check(code, format_args!("cuMemFree on {}", self.device))?;
        batch.forget(address);
        Ok(())
    }

    /// Allocates the smallest block, for the batch: None if there is no memory even for that.
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

    /// Frees up to `most` blocks of a context, the largest first; tells whether there was one.
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
        if !self.freeing_waits(context)? {
            self.synchronize_context()?;
        }
        self.free(batch, address)
    }

    fn synchronize_context(&self) -> Result<()> {
        // SAFETY: cuCtxSynchronize takes no argument; the context is current.
        let code = unsafe { (self.device.driver.functions.cuCtxSynchronize)() };
        self.device.driver.check(code, format_args!("cuCtxSynchronize on {}", self.device))
    }

    /// Waits until all work of the context that was enqueued before is done: then what is pending now is ready. Where
    /// freeing is not known to wait for that, nothing becomes ready, and it has not waited.
    fn fence(&mut self, context: u64) -> Result<bool> {
        // Taken out first of all, so that no other thread waits for the same.
        let mut batch = self.cache().take_pending(context);
        if !self.freeing_waits(context)? {
            return Ok(false);
        }
        match self.add_smallest(&mut batch, context)? {
            Some(address) => self.free(&mut batch, address)?,
            // Then any block will do, if there is one.
            None if batch.largest().is_none() => return Ok(false),
            None => self.free_largest(&mut batch, context)?,
        }
        batch.make_ready();
        Ok(true)
    }

    /// Whether cuMemFree is known to wait for all work of this context. Probed when it is first asked, and again while
    /// the answer is unclear: until then it counts as no, which is safe.
    fn freeing_waits(&mut self, context: u64) -> Result<bool> {
        let unclear = match FREEING_WAITS.recall(context) {
            Some(known @ 0..UNCLEAR) => return Ok(known == 1),
            Some(unclear) if unclear >= UNCLEAR + MOST_UNCLEAR => return Ok(false),
            unclear => unclear.unwrap_or(UNCLEAR),
        };
        let known = self.probe(context, unclear)?;
        FREEING_WAITS.remember(context, known);
        Ok(known == 1)
    }

    /// Tries whether cuMemFree waits for work on another stream. `unclear`, and the result: as in [`FREEING_WAITS`].
    ///
    /// That the stream is idle once cuMemFree has returned proves nothing, for this thread may have lost the CPU
    /// meanwhile. So the time must follow the length of the work, in trials of different lengths. A stream that is
    /// still at work proves the opposite.
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

    /// Keeps a stream busy for a while, frees some memory, and looks how long that took.
    fn trial(&mut self, context: u64, stream: Stream, spin: Duration) -> Result<Trial> {
        let mut batch = self.cache().empty_batch();
        // The first is freed before the clock starts: where freeing waits, what others have enqueued is then done.
        let (Some(before), Some(address)) =
            (self.add_smallest(&mut batch, context)?, self.add_smallest(&mut batch, context)?)
        else {
            return Ok(Trial::NoMemory);
        };
        self.free(&mut batch, before)?;
        let mut other = Queue::of(self.device.ordinal as i32, stream)?;
        let mut nanoseconds = spin.as_nanos() as u64;
        let begin = Instant::now();
        // SAFETY: the kernel's only argument is a uint64, and it uses no memory.
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
