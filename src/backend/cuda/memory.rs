//! Device memory, kept for reuse.
//!
//! A block that was released may still be in use by work that was enqueued before, on streams that nobody told us of. So it
//! is *pending* until a fence has passed: cuMemFree waits for all work of the context, on any stream, and unlike every
//! other way to wait for that, it breaks no capture of another thread (measured with driver 580: cuCtxSynchronize and
//! cuCtxRecordEvent do). Fences are rare: only when much is pending is one waited for. What was of no use from one fence to
//! the next goes back to the driver, so that what is kept is what a program uses again.
//!
//! Blocks come from cuMemAlloc, never from a pool of the driver's, so that other processes can be given them.

use std::{
    alloc::{self, Layout},
    ffi::c_void,
    ptr,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicPtr, Ordering},
    },
};

use crate::{
    error::{Result, Status, error},
    tensor::Owner,
};

use super::queue::Queue;

/// What may be pending in a context before a fence is worth its wait: so many blocks, or so many bytes.
const PENDING_BLOCKS: usize = 32;
const PENDING_BYTES: usize = 256 << 20;

struct Block {
    address: u64,
    capacity: usize,
    /// The id of the context that it belongs to: with that it is gone.
    context: u64,
    /// The number of its device.
    device: usize,
    /// Ready since before the last fence.
    idle: bool,
    /// In a [`List`].
    next: Option<Box<Block>>,
    /// Among [`RELEASED`].
    next_released: AtomicPtr<Block>,
}

/// Blocks that nobody has looked at since their release.
static RELEASED: AtomicPtr<Block> = AtomicPtr::new(ptr::null_mut());

impl Block {
    /// The block as memory of a tensor, which gives it back when it is dropped.
    fn into_owner(self: Box<Self>) -> Owner {
        let data = self.address as usize as *mut u8;
        // SAFETY: `release` is called once, with a block that came out of a Box.
        unsafe { Owner::new(data, [Box::into_raw(self).cast(), ptr::null_mut()], release) }
    }
}

/// Runs on any thread, in a forked child, and while the process ends: so no driver and no lock here.
///
/// # Safety
/// `block` came out of a Box and is given away.
unsafe fn release(_: *mut u8, [block, _]: [*mut c_void; 2]) {
    let block: *mut Block = block.cast();
    let mut head = RELEASED.load(Ordering::Relaxed);
    loop {
        // SAFETY: the caller gave it away, and it stays this call's until the exchange below gives it away in turn.
        unsafe { (*block).next_released.store(head, Ordering::Relaxed) };
        match RELEASED.compare_exchange_weak(head, block, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => head = now,
        }
    }
}

/// Blocks for reuse.
struct Kept {
    /// Free.
    ready: List,
    /// Released, and perhaps still in use by the device.
    pending: List,
}

static KEPT: Mutex<Kept> = Mutex::new(Kept { ready: List(None), pending: List(None) });

impl Kept {
    /// Not to be held while the driver is called: that may wait for work which ends only once another thread, of this
    /// device or of another, has its memory and goes on.
    fn lock() -> MutexGuard<'static, Self> {
        KEPT.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over what was released.
    fn collect(&mut self) {
        let mut released = RELEASED.swap(ptr::null_mut(), Ordering::Acquire);
        while !released.is_null() {
            // SAFETY: `release` put it there, out of a Box, and the swap made it ours alone.
            let block = unsafe { Box::from_raw(released) };
            released = block.next_released.load(Ordering::Relaxed);
            self.pending.push(block);
        }
    }

    fn has_any_of(&mut self, device: usize) -> bool {
        self.collect();
        self.ready.iter().chain(self.pending.iter()).any(|block| block.device == device)
    }

    fn much_is_pending(&self, context: u64) -> bool {
        let (blocks, bytes) = self
            .pending
            .iter()
            .filter(|block| block.context == context)
            .fold((0, 0), |(blocks, bytes), block| (blocks + 1, bytes + block.capacity));
        blocks >= PENDING_BLOCKS || bytes >= PENDING_BYTES
    }
}

impl Queue {
    /// Memory of `bytes` bytes, at least one, not initialized, aligned to 256 at least.
    pub fn allocate(&mut self, bytes: i64) -> Result<Owner> {
        let context = self.current()?.id;
        let capacity = capacity_for(bytes as usize);
        let fits = |block: &Block| block.context == context && (bytes as usize..=capacity).contains(&block.capacity);
        let mut kept = Kept::lock();
        kept.collect();
        if let Some(block) = kept.ready.take(fits) {
            return Ok(block.into_owner());
        }
        let much_is_pending = kept.much_is_pending(context);
        drop(kept);
        if much_is_pending {
            self.fence(context)?;
            if let Some(block) = Kept::lock().ready.take(fits) {
                return Ok(block.into_owner());
            }
        }
        let mut block = new_block(capacity, context, self.device.ordinal)?;
        block.address = match self.allocate_anew(capacity, bytes) {
            Err(failure) if failure.status == Status::OutOfMemory => {
                self.give_back(context)?;
                block.capacity = bytes as usize;
                self.allocate_anew(block.capacity, bytes)?
            }
            outcome => outcome?,
        };
        Ok(block.into_owner())
    }

    /// Gives back what is kept, in the context that calls without a stream work in.
    pub fn trim(&mut self) -> Result<()> {
        // A device that was never used must not get a context for this.
        if !Kept::lock().has_any_of(self.device.ordinal) {
            return Ok(());
        }
        let context = self.current()?.id;
        self.give_back(context)
    }

    fn allocate_anew(&self, capacity: usize, wanted: i64) -> Result<u64> {
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

    /// Frees blocks, as far as it goes: those that are left were not.
    fn free_all(&self, blocks: &mut List) -> Result<()> {
        while let Some(block) = blocks.take(|_| true) {
            if let Err(failure) = self.free(block.address) {
                blocks.push(block);
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Waits until all work of the context that was enqueued before is done: then what is pending now is ready. What has
    /// been ready, and of no use, since the fence before goes back to the driver.
    fn fence(&self, context: u64) -> Result<()> {
        const SMALLEST: usize = 512;
        let (mut pending, mut idle) = (List(None), List(None));
        let mut kept = Kept::lock();
        kept.pending.move_to(&mut pending, |block| block.context == context);
        kept.ready.move_to(&mut idle, |block| block.context == context && block.idle);
        kept.ready.for_each(|block| block.idle |= block.context == context);
        drop(kept);
        let outcome = if idle.0.is_some() {
            self.free_all(&mut idle)
        } else {
            match self.allocate_anew(SMALLEST, SMALLEST as i64) {
                Ok(address) => self.free(address),
                // Not even for that: then any block will do, for there are many.
                Err(failure) if failure.status == Status::OutOfMemory => self.free_all(&mut pending),
                Err(failure) => Err(failure),
            }
        };
        let mut kept = Kept::lock();
        let Kept { ready, pending: still_pending } = &mut *kept;
        idle.move_to(ready, |_| true);
        pending.for_each(|block| block.idle = false);
        pending.move_to(if outcome.is_ok() { ready } else { still_pending }, |_| true);
        outcome
    }

    fn give_back(&self, context: u64) -> Result<()> {
        let mut blocks = List(None);
        let mut kept = Kept::lock();
        kept.collect();
        kept.ready.move_to(&mut blocks, |block| block.context == context);
        kept.pending.move_to(&mut blocks, |block| block.context == context);
        drop(kept);
        let outcome = self.free_all(&mut blocks);
        blocks.move_to(&mut Kept::lock().pending, |_| true); // not lost: perhaps another time
        outcome
    }
}

/// How large a block is made, so that sizes that are nearly the same share it: an eighth more at most.
fn capacity_for(bytes: usize) -> usize {
    const SMALLEST: usize = 512;
    const LARGEST_STEP: usize = 2 << 20;
    let step = (bytes.checked_next_power_of_two().unwrap_or(usize::MAX) / 16).clamp(SMALLEST, LARGEST_STEP);
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

fn new_block(capacity: usize, context: u64, device: usize) -> Result<Box<Block>> {
    let layout = Layout::new::<Block>();
    // SAFETY: the layout's size is not zero.
    let place = unsafe { alloc::alloc(layout) }.cast::<Block>();
    if place.is_null() {
        return Err(error!(OutOfMemory, "{} bytes of host memory could not be had", layout.size()));
    }
    // SAFETY: allocated as Box does, with the layout of a Block, which it is made to hold.
    unsafe {
        place.write(Block {
            address: 0,
            capacity,
            context,
            device,
            idle: false,
            next: None,
            next_released: AtomicPtr::default(),
        });
        Ok(Box::from_raw(place))
    }
}

/// A list that allocates nothing.
struct List(Option<Box<Block>>);

impl List {
    fn push(&mut self, mut block: Box<Block>) {
        block.next = self.0.take();
        self.0 = Some(block);
    }

    /// Removes the first that is wanted.
    fn take(&mut self, wanted: impl Fn(&Block) -> bool) -> Option<Box<Block>> {
        let mut place = &mut self.0;
        while place.as_ref().is_some_and(|block| !wanted(block)) {
            place = &mut place.as_mut()?.next;
        }
        let mut block = place.take()?;
        *place = block.next.take();
        Some(block)
    }

    /// Moves what is wanted to another list.
    fn move_to(&mut self, other: &mut Self, wanted: impl Fn(&Block) -> bool) {
        while let Some(block) = self.take(&wanted) {
            other.push(block);
        }
    }

    fn for_each(&mut self, mut work: impl FnMut(&mut Block)) {
        let mut next = self.0.as_deref_mut();
        while let Some(block) = next {
            work(block);
            next = block.next.as_deref_mut();
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Block> {
        std::iter::successors(self.0.as_deref(), |block| block.next.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_an_eighth_larger_at_most_and_aligned() {
        for bytes in (1..10_000).chain((10..40).flat_map(|k| [(1 << k) - 1, 1 << k, (1 << k) + 1, 3 << k])) {
            let capacity = capacity_for(bytes);
            assert!(capacity >= bytes && capacity - bytes <= (bytes / 8).max(511), "{bytes}: {capacity}");
            assert_eq!(capacity % 512, 0, "{bytes}: {capacity}");
        }
        assert_eq!(capacity_for(usize::MAX), usize::MAX);
        assert_eq!(capacity_for(i64::MAX as usize) % 2, 0);
    }

    #[test]
    fn a_list_gives_what_is_wanted_and_keeps_the_rest() {
        let mut list = List(None);
        for capacity in 1..=4 {
            list.push(new_block(capacity, 7, 0).unwrap());
        }
        assert_eq!(list.take(|block| block.capacity == 2).map(|block| block.capacity), Some(2));
        assert!(list.take(|block| block.capacity == 2).is_none());
        assert_eq!(list.iter().map(|block| block.capacity).collect::<Vec<_>>(), [4, 3, 1]);
    }
}
