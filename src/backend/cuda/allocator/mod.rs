//! Device memory, kept for reuse within a bound.
//!
//! A block that was released may still be in use by work that was enqueued before, on streams that nobody told us of. So it
//! is pending until a *fence* has passed: cuMemFree waits for all work of the context, on any stream, and unlike every
//! other way to wait for that, it breaks no capture of another thread (measured with driver 580: cuCtxSynchronize and
//! cuCtxRecordEvent do). NVIDIA's text only says that it may wait, so each context is tested for it (`probe`); where it does
//! not, nothing is used again. Fences are rare: only when much is pending is one waited for.
//!
//! What is kept beyond a share of the card goes back, the largest first, in whatever call comes that is not a codec's or a
//! communicator's, but few blocks a call: each cuMemFree waits for whatever was enqueued since the one before.
//!
//! Blocks come from cuMemAlloc, never from a pool of the driver's, so that other processes can be given them.

use std::ptr;

use crate::{
    backend::call::Stream,
    error::{Result, Status},
    tensor::Owner,
};

pub mod blocks;

use crate::backend::cuda::{context::Remembered, driver::NOT_READY, module::HOLD, queue::Queue};

use blocks::{Block, Reuse, SMALLEST, Taken, capacity_for};

/// The most blocks that a call frees to keep within the bound.
const FREES_A_CALL: usize = 8;

/// How long a stream is kept at work to try whether cuMemFree waits for it: many times what that takes otherwise.
const HELD_NANOSECONDS: u64 = 5_000_000;

/// Of each context, whether cuMemFree waits there for all that runs: 1 if so.
static FREEING_WAITS: Remembered = Remembered::nothing();

/// How often a call that finds no memory waits for another thread, which may have some in its hands.
const MOST_WAITS: usize = 16;

impl Queue {
    /// Memory of `bytes` bytes, at least one, not initialized, aligned to 256 at least.
    pub fn allocate(&mut self, bytes: i64) -> Result<Owner> {
        let context = self.current()?.id;
        self.keep_within_bound()?;
        self.free_spent()?;
        let reuse = self.reuse();
        let (bytes, capacity) = (bytes as usize, capacity_for(bytes as usize));
        if let Some(block) = reuse.take(context, bytes, capacity)? {
            return Ok(block.into_owner());
        }
        if reuse.lock().much_is_pending(context) {
            self.fence(context)?;
            if let Some(block) = reuse.take(context, bytes, capacity)? {
                return Ok(block.into_owner());
            }
        }
        let mut block = Block::new(capacity, context, reuse)?;
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
                    if waits >= MOST_WAITS || !reuse.wait_for_others() {
                        return Err(failure);
                    }
                }
                Err(failure) => return Err(failure),
            }
        }
        if let Err(failure) = reuse.settle(&block) {
            let mut taken = reuse.take_none();
            taken.add(block);
            self.free_largest(&mut taken, context)?;
            return Err(failure);
        }
        Ok(block.into_owner())
    }

    /// Frees what is kept beyond the bound, the largest first, but few blocks a call. Waits then.
    pub(in crate::backend::cuda) fn keep_within_bound(&mut self) -> Result<()> {
        if self.is_of_handle || !self.reuse().is_beyond_bound() {
            return Ok(());
        }
        let context = self.context()?.id;
        for _ in 0..FREES_A_CALL {
            if !self.reuse().is_beyond_bound() || !self.give_back(context, 1)? {
                break;
            }
        }
        Ok(())
    }

    /// Frees what was shared and that nobody has any more.
    fn free_spent(&mut self) -> Result<()> {
        if !self.reuse().may_have_spent() {
            return Ok(());
        }
        let context = self.current()?.id;
        while let Some(mut taken) = self.reuse().take_spent(context) {
            self.free_largest(&mut taken, context)?;
        }
        Ok(())
    }

    /// The same in the context that calls without a stream work in, if there is one.
    pub fn free_returned(&mut self) -> Result<()> {
        if self.reuse().may_have_spent() && self.has_context()? { self.free_spent() } else { Ok(()) }
    }

    /// Gives back what is kept, in the context that calls without a stream work in, if there is one.
    pub fn trim(&mut self) -> Result<()> {
        // The driver is asked before a lock is taken: in a forked child it refuses, and another thread may have had the lock.
        if self.has_context()? {
            let context = self.current()?.id;
            self.free_spent()?;
            self.give_back(context, usize::MAX)?;
        }
        Ok(())
    }

    /// Waits until all work of the context that was enqueued before is done, on any stream. Breaks no capture where freeing
    /// waits, too.
    pub(in crate::backend::cuda) fn finish(&mut self) -> Result<()> {
        let context = self.current()?.id;
        if self.fence(context)? {
            return Ok(());
        }
        // SAFETY: a context is current.
        let code = unsafe { (self.device.driver.functions.cuCtxSynchronize)() };
        self.device.driver.check(code, format_args!("cuCtxSynchronize on {}", self.device))
    }

    fn reuse(&self) -> &'static Reuse {
        &self.device.properties().reuse
    }

    fn allocate_anew(&self, capacity: usize, wanted: usize) -> Result<u64> {
        let (driver, mut address) = (self.device.driver, 0);
        // SAFETY: the place outlives the call.
        let code = unsafe { (driver.functions.cuMemAlloc_v2)(&mut address, capacity) };
        driver.check(code, format_args!("cuMemAlloc of {wanted} bytes on {}", self.device))?;
        Ok(address)
    }

    /// Frees memory; returns once all work of the context that was enqueued before is done.
    fn free(&self, address: u64) -> Result<()> {
        // SAFETY: memory of this context that came from cuMemAlloc and is in no tensor any more.
        let code = unsafe { (self.device.driver.functions.cuMemFree_v2)(address) };
        self.device.driver.check(code, format_args!("cuMemFree on {}", self.device))
    }

    /// Frees up to `most` blocks of a context, the largest first; tells whether there was one.
    fn give_back(&mut self, context: u64, most: usize) -> Result<bool> {
        let mut freed = 0;
        while freed < most
            && let Some(mut taken) = self.reuse().take_largest(context)
        {
            self.free_largest(&mut taken, context)?;
            freed += 1;
        }
        Ok(freed > 0)
    }

    fn free_largest(&mut self, taken: &mut Taken, context: u64) -> Result<()> {
        if let Some(&Block { address, .. }) = taken.largest() {
            if !self.freeing_waits(context)? {
                // SAFETY: a context is current.
                let code = unsafe { (self.device.driver.functions.cuCtxSynchronize)() };
                self.device.driver.check(code, format_args!("cuCtxSynchronize on {}", self.device))?;
            }
            self.free(address)?;
            taken.forget(address);
        }
        Ok(())
    }

    /// Waits until all work of the context that was enqueued before is done: then what is pending now is ready. Where
    /// nothing is known to wait for that without breaking captures, nothing becomes ready, and it has not waited.
    fn fence(&mut self, context: u64) -> Result<bool> {
        // Taken out first of all, so that no other thread waits for the same.
        let mut taken = self.reuse().take_pending(context);
        if !self.freeing_waits(context)? {
            return Ok(false);
        }
        let mut block = Block::new(SMALLEST, context, self.reuse())?;
        match self.allocate_anew(SMALLEST, SMALLEST) {
            Ok(address) => {
                block.address = address;
                taken.add(block);
                self.free(address)?;
                taken.forget(address);
            }
            // Not even for that: then any block will do, if there is one.
            Err(failure) if failure.status == Status::OutOfMemory => {
                if taken.largest().is_none() {
                    return Ok(false);
                }
                self.free_largest(&mut taken, context)?;
            }
            Err(failure) => return Err(failure),
        }
        taken.are_ready();
        Ok(true)
    }

    /// Whether cuMemFree waits for all work of this context. Tried when it is first asked.
    fn freeing_waits(&mut self, context: u64) -> Result<bool> {
        self.current()?;
        match FREEING_WAITS.recall(context) {
            Some(waits) => Ok(waits == 1),
            None => self.probe(context),
        }
    }

    /// Keeps a stream of its own at work, frees some memory, and looks whether the stream is still at work.
    fn probe(&mut self, context: u64) -> Result<bool> {
        const NON_BLOCKING: u32 = 1;
        let address = match self.allocate_anew(SMALLEST, SMALLEST) {
            Err(failure) if failure.status == Status::OutOfMemory => return Ok(false), // this time
            outcome => outcome?,
        };
        let mut block = Block::new(SMALLEST, context, self.reuse())?;
        block.address = address;
        let mut taken = self.reuse().take_none();
        taken.add(block);
        let (driver, mut stream) = (self.device.driver, ptr::null_mut());
        // SAFETY: a context is current, and the place outlives the call.
        let code = unsafe { (driver.functions.cuStreamCreate)(&mut stream, NON_BLOCKING) };
        driver.check(code, format_args!("cuStreamCreate on {}", self.device))?;
        let mut nanoseconds = HELD_NANOSECONDS;
        let mut arguments = [ptr::from_mut(&mut nanoseconds).cast()];
        // SAFETY: the kernel's argument, and the stream made above.
        let launched = unsafe { self.launch_on(Stream::from_raw(stream.cast()), &HOLD[0], 1, &mut arguments) };
        let freed = launched.and_then(|()| self.free(address));
        // SAFETY: the stream is alive until it is destroyed, and its work goes on to its end.
        let (code, destroyed) =
            unsafe { ((driver.functions.cuStreamQuery)(stream), (driver.functions.cuStreamDestroy_v2)(stream)) };
        freed?;
        taken.forget(address);
        if code != NOT_READY {
            driver.check(code, format_args!("cuStreamQuery on {}", self.device))?;
        }
        driver.check(destroyed, format_args!("cuStreamDestroy on {}", self.device))?;
        FREEING_WAITS.remember(context, usize::from(code == 0));
        Ok(code == 0)
    }
}
