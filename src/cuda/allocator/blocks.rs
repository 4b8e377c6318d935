//! Blocks of device memory that are kept for reuse. This file has the lists only; mod.rs calls the driver.
//!
//! ```text
//! in a tensor --release--> released --collect--> pending --fence--> ready --take--> in a tensor
//!                                     |             `-- beyond the bound: freed --'
//!                                     `-- given to another process --> exported --returned--> retired: freed
//! ```
//!
//! `live` lists the blocks in tensors, so that an export can distinguish this library's memory from others'. Any thread
//! may release a block at any time, without a lock and without a driver call (*released*). Work that was enqueued
//! before the release may still use a *pending* block. *Ready* blocks are free. Other processes may use *exported*
//! blocks. A *retired* block was exported and may still be mapped elsewhere, so it is never used again.

use std::{
    collections::{HashMap, hash_map::Entry},
    ffi::c_void,
    ptr,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
    },
};

use crate::{
    dlpack::Owner,
    ffi::error::{Result, error},
};

/// Bound of the memory kept per context: 1 / `SHARE` of the GPU's memory, but at least `AT_LEAST` bytes.
const SHARE: usize = 32;
const AT_LEAST: usize = 256 << 20;

/// Pending blocks, or pending bytes, of a context from which a fence is worth its wait.
const PENDING_BLOCKS: usize = 32;
const PENDING_BYTES: usize = 256 << 20;

/// Smallest block, in bytes: the driver's own granularity.
pub const SMALLEST: usize = 512;

/// Exports of a block to other processes.
#[derive(Clone, Copy, Default)]
struct Exports {
    /// True if the block was ever exported; it is then never used again.
    ever: bool,
    /// Number of exports that were not returned yet.
    users: usize,
}

/// A block of device memory.
pub struct Block {
    pub address: u64,
    pub capacity: usize,
    /// Id of the context that the block belongs to. The block is gone when the context is.
    pub context: u64,
    /// Exports at the time when the block's tensor was released.
    exports: Exports,
    home: &'static Cache,
    /// Next block of a [`List`].
    next: Option<Box<Block>>,
    /// Next block in the list of released blocks.
    next_released: AtomicPtr<Block>,
}

impl Block {
    /// Creates a block without memory.
    pub fn new(capacity: usize, context: u64, home: &'static Cache) -> Box<Self> {
        Box::new(Self {
            address: 0,
            capacity,
            context,
            exports: Exports::default(),
            home,
            next: None,
            next_released: AtomicPtr::default(),
        })
    }

    /// Turns the block into memory of a tensor, which releases the block when it is dropped.
    pub fn into_owner(self: Box<Self>) -> Owner {
        let data = self.address as usize as *mut u8;
        // SAFETY: `release` is called once, with a block that came out of a Box.
        unsafe { Owner::new(data, [Box::into_raw(self).cast(), ptr::null_mut()], release) }
    }
}

/// Releases a block. It runs on any thread, in a forked child and while the process ends: without driver and lock.
///
/// # Safety
/// `block` came out of a Box, and the caller does not use it afterwards.
unsafe fn release(_: *mut u8, [block, _]: [*mut c_void; 2]) {
    let block: *mut Block = block.cast();
    // SAFETY: the caller gave the block away, and only this call has it until the exchange below publishes it.
    let Block { home, capacity, next_released, .. } = unsafe { &*block };
    home.bytes.fetch_add(*capacity, Ordering::Relaxed);
    let mut head = home.released.load(Ordering::Relaxed);
    loop {
        next_released.store(head, Ordering::Relaxed);
        match home.released.compare_exchange_weak(head, block, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => head = now,
        }
    }
}

/// Cached memory of a GPU.
pub struct Cache {
    released: AtomicPtr<Block>,
    /// Bytes of all blocks that are neither in a tensor nor freed.
    bytes: AtomicUsize,
    bound: usize,
    /// True if blocks in tensors were exported to other processes.
    has_exported: AtomicBool,
    /// True if the lists have retired blocks.
    has_retired: AtomicBool,
    kept: Mutex<Lists>,
    /// Notified when a thread has put blocks back or freed them.
    changed: Condvar,
}

/// Lists of one GPU's blocks.
pub struct Lists {
    /// Free blocks: one list per size class, so that a search only visits blocks of about the wanted size.
    ready: [List; CLASSES],
    pending: List,
    exported: List,
    retired: List,
    /// Blocks in tensors, by address: their contexts and exports. Exports of memory that this library did not allocate
    /// are not recorded.
    live: HashMap<u64, Live>,
    /// Number of threads that have taken blocks out to free them or to wait for them.
    batches: usize,
}

/// A block in a tensor.
struct Live {
    context: u64,
    exports: Exports,
}

impl Cache {
    /// Creates an empty cache for a GPU with `memory` bytes.
    pub fn of_device(memory: usize) -> Self {
        Self {
            released: AtomicPtr::default(),
            bytes: AtomicUsize::new(0),
            bound: (memory / SHARE).max(AT_LEAST),
            has_exported: AtomicBool::new(false),
            has_retired: AtomicBool::new(false),
            kept: Mutex::new(Lists {
                ready: [const { List(None) }; CLASSES],
                pending: List(None),
                exported: List(None),
                retired: List(None),
                live: HashMap::new(),
                batches: 0,
            }),
            changed: Condvar::new(),
        }
    }

    /// Returns true if more memory of a context is kept than the bound. Memory of other contexts, which may be gone,
    /// cannot be freed in this one.
    pub fn is_beyond_bound(&self, context: u64) -> bool {
        self.bytes.load(Ordering::Relaxed) > self.bound && self.lock().bytes_of(context) > self.bound
    }

    /// Locks the lists and moves released blocks into them. The lock must not be held during a driver call. A driver
    /// call may wait for work that ends only after another thread, of any device, has allocated memory and continued.
    pub fn lock(&self) -> MutexGuard<'_, Lists> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut released = self.released.swap(ptr::null_mut(), Ordering::Acquire);
        while !released.is_null() {
            // SAFETY: `release` put the block there, out of a Box, and after the swap only this thread has the list.
            let mut block = unsafe { Box::from_raw(released) };
            released = block.next_released.load(Ordering::Relaxed);
            if let Entry::Occupied(place) = kept.live.entry(block.address)
                && place.get().context == block.context
            {
                block.exports = place.remove().exports;
            }
            if block.exports.ever { self.put_exported(&mut kept, block) } else { kept.pending.push(block) }
        }
        kept
    }

    /// Lists a released block that was exported to other processes.
    fn put_exported(&self, kept: &mut Lists, block: Box<Block>) {
        self.bytes.fetch_sub(block.capacity, Ordering::Relaxed);
        kept.list_released(block);
        self.has_exported.store(kept.live.values().any(|place| place.exports.ever), Ordering::Relaxed);
        self.note_retired(kept);
    }

    /// Updates the flag that callers read without the lock.
    fn note_retired(&self, kept: &Lists) {
        self.has_retired.store(kept.retired.0.is_some(), Ordering::Relaxed);
    }

    /// Records that another process gets the memory that begins at `address`, and returns the context of its block. The
    /// block is not reused until that process returns it. None: this library did not allocate the memory.
    pub fn export(&self, address: u64) -> Option<u64> {
        let mut kept = self.lock();
        if let Some(Live { context, exports }) = kept.live.get_mut(&address) {
            *exports = Exports { ever: true, users: exports.users + 1 };
            self.has_exported.store(true, Ordering::Relaxed);
            return Some(*context);
        }
        // The tensor is released, but another process still has the block.
        let mut block = kept.exported.take(|block| block.address == address)?;
        block.exports.users += 1;
        let context = block.context;
        kept.exported.push(block);
        Some(context)
    }

    /// Records that a process is done with this block.
    pub fn returned(&self, address: u64, context: u64) {
        let mut kept = self.lock();
        if let Some(place) = kept.live.get_mut(&address)
            && place.context == context
        {
            place.exports.users = place.exports.users.saturating_sub(1);
            return;
        }
        let is_this = |block: &Block| block.address == address && block.context == context;
        let Some(mut block) = kept.exported.take(is_this) else { return };
        block.exports.users -= 1;
        kept.list_released(block);
        self.note_retired(&kept);
    }

    /// Returns true if there may be retired blocks.
    pub fn may_have_retired(&self) -> bool {
        let is_released = || !self.released.load(Ordering::Relaxed).is_null();
        self.has_retired.load(Ordering::Relaxed) || self.has_exported.load(Ordering::Relaxed) && is_released()
    }

    /// Takes one retired block of a context out, to be freed.
    pub fn take_retired(&'static self, context: u64) -> Option<Batch> {
        let mut kept = self.lock();
        let block = kept.retired.take(|block| block.context == context)?;
        self.note_retired(&kept);
        let mut taken = self.batch(&mut kept, List(None));
        taken.add(block);
        Some(taken)
    }

    /// Takes a free block of `bytes` to `capacity` bytes for a tensor.
    pub fn take(&self, context: u64, bytes: usize, capacity: usize) -> Result<Option<Box<Block>>> {
        let fits = |block: &Block| block.context == context && (bytes..=capacity).contains(&block.capacity);
        let mut kept = self.lock();
        kept.reserve()?;
        let Some(block) = kept.ready[class_of(capacity)].take(fits) else { return Ok(None) };
        kept.add_live(&block);
        self.bytes.fetch_sub(block.capacity, Ordering::Relaxed);
        Ok(Some(block))
    }

    /// Lists a block of new memory as one in a tensor.
    pub fn settle(&self, block: &Block) -> Result<()> {
        let mut kept = self.lock();
        kept.drop_stale_contexts(self, block.context, block.address, block.capacity);
        kept.reserve()?;
        kept.add_live(block);
        Ok(())
    }

    /// Takes the largest block of a context out, to be freed.
    pub fn take_largest(&'static self, context: u64) -> Option<Batch> {
        let mut kept = self.lock();
        let block = kept.take_largest(context)?;
        let mut blocks = List(None);
        blocks.push(block);
        Some(self.batch(&mut kept, blocks))
    }

    /// Returns an empty batch, to which blocks will be added.
    pub fn empty_batch(&'static self) -> Batch {
        self.batch(&mut self.lock(), List(None))
    }

    /// Takes all pending blocks of a context out, to be put back after a fence.
    pub fn take_pending(&'static self, context: u64) -> Batch {
        let (mut kept, mut blocks) = (self.lock(), List(None));
        kept.pending.move_to(&mut blocks, |block| block.context == context);
        self.batch(&mut kept, blocks)
    }

    fn batch(&'static self, kept: &mut Lists, blocks: List) -> Batch {
        kept.batches += 1;
        Batch { home: self, blocks }
    }

    /// If threads have blocks out, waits until one has put its blocks back or freed them. Returns true if it waited.
    pub fn wait_for_others(&self) -> bool {
        let kept = self.lock();
        let waits = kept.batches > 0;
        if waits {
            drop(self.changed.wait(kept).unwrap_or_else(PoisonError::into_inner));
        }
        waits
    }
}

/// Blocks that a thread has taken out. When the batch is dropped, the remaining blocks become pending, or retired if
/// they were exported.
pub struct Batch {
    home: &'static Cache,
    blocks: List,
}

impl Batch {
    pub fn largest(&self) -> Option<&Block> {
        self.blocks.iter().max_by_key(|block| block.capacity)
    }

    /// Adds a block that was not in a tensor.
    pub fn add(&mut self, block: Box<Block>) {
        self.home.bytes.fetch_add(block.capacity, Ordering::Relaxed);
        self.blocks.push(block);
    }

    /// Removes a block that was freed.
    pub fn forget(&mut self, address: u64) {
        if let Some(block) = self.blocks.take(|block| block.address == address) {
            self.home.bytes.fetch_sub(block.capacity, Ordering::Relaxed);
        }
    }

    /// Makes the blocks ready: all work that used them is done.
    pub fn make_ready(mut self) {
        let mut kept = self.home.lock();
        while let Some(block) = self.blocks.take(|_| true) {
            kept.ready[class_of(block.capacity)].push(block);
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        let mut kept = self.home.lock();
        while let Some(block) = self.blocks.take(|block| block.exports.ever) {
            self.home.bytes.fetch_sub(block.capacity, Ordering::Relaxed);
            kept.retired.push(block);
        }
        self.home.note_retired(&kept);
        self.blocks.move_to(&mut kept.pending, |_| true);
        kept.batches -= 1;
        drop(kept);
        self.home.changed.notify_all();
    }
}

impl Lists {
    /// Reserves room to list one more block.
    fn reserve(&mut self) -> Result<()> {
        let room = self.live.try_reserve(1);
        room.map_err(|_| error!(OutOfMemory, "cannot allocate a list of blocks in tensors"))
    }

    /// Lists a released block as exported if processes still use it, else as retired.
    fn list_released(&mut self, block: Box<Block>) {
        if block.exports.users > 0 { self.exported.push(block) } else { self.retired.push(block) }
    }

    /// Lists a block as live; room was reserved. It replaces an entry of a context that is gone.
    fn add_live(&mut self, block: &Block) {
        self.live.insert(block.address, Live { context: block.context, exports: Exports::default() });
    }

    /// Returns true if enough blocks or bytes of a context are pending for a fence to be worth its wait.
    pub fn needs_fence(&self, context: u64) -> bool {
        let of_context = self.pending.iter().filter(|block| block.context == context);
        let (blocks, bytes) = of_context.fold((0, 0), |(blocks, bytes), block| (blocks + 1, bytes + block.capacity));
        blocks >= PENDING_BLOCKS || bytes >= PENDING_BYTES
    }

    /// Returns the bytes of a context's blocks that could be freed.
    fn bytes_of(&self, context: u64) -> usize {
        let lists = self.ready.iter().chain([&self.pending]).flat_map(List::iter);
        lists.filter(|block| block.context == context).map(|block| block.capacity).sum()
    }

    fn take_largest(&mut self, context: u64) -> Option<Box<Block>> {
        let Self { ready, pending, .. } = self;
        let lists = ready.iter_mut().chain([pending]);
        let (_, list) =
            lists.filter_map(|list| Some((list.largest_of(context)?, list))).max_by_key(|&(size, _)| size)?;
        let largest = list.largest_of(context)?;
        list.take(|block| block.context == context && block.capacity == largest)
    }

    /// Drops the blocks of contexts that are gone. New memory of `context` overlaps their blocks, and no two live
    /// contexts have memory at one address.
    fn drop_stale_contexts(&mut self, home: &Cache, context: u64, address: u64, capacity: usize) {
        while let Some(gone) = self.overlapped(context, address, capacity) {
            let mut blocks = List(None);
            for list in self.ready.iter_mut().chain([&mut self.pending]) {
                list.move_to(&mut blocks, |block| block.context == gone);
            }
            home.bytes.fetch_sub(blocks.iter().map(|block| block.capacity).sum(), Ordering::Relaxed);
            for list in [&mut self.exported, &mut self.retired] {
                list.move_to(&mut blocks, |block| block.context == gone);
            }
            home.note_retired(self);
            while blocks.take(|_| true).is_some() {} // iterative: dropping a list at once would recurse
        }
    }

    /// Returns another context with a block that overlaps this memory.
    fn overlapped(&self, context: u64, address: u64, capacity: usize) -> Option<u64> {
        let overlaps = |block: &&Block| {
            let (end, other_end) = (address + capacity as u64, block.address + block.capacity as u64);
            block.context != context && block.address < end && address < other_end
        };
        let lists = self.ready.iter().chain([&self.pending, &self.exported, &self.retired]);
        lists.into_iter().find_map(|list| list.iter().find(overlaps).map(|block| block.context))
    }
}

/// Returns the capacity of a block for `bytes` bytes: at most an eighth more, so that similar sizes share blocks.
pub fn capacity_for(bytes: usize) -> usize {
    const LARGEST_STEP: usize = 2 << 20;
    let step = (bytes.checked_next_power_of_two().unwrap_or(usize::MAX) / 16).clamp(SMALLEST, LARGEST_STEP);
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

/// Number of size classes: eight to each power of two from [`SMALLEST`] on.
const CLASSES: usize = 8 * (usize::BITS as usize - 9);

/// Returns the size class of a capacity.
fn class_of(capacity: usize) -> usize {
    let power = capacity.max(SMALLEST).ilog2() as usize;
    8 * (power - 9) + (capacity >> (power - 3) & 7)
}

/// Linked list that allocates nothing.
struct List(Option<Box<Block>>);

impl List {
    fn push(&mut self, mut block: Box<Block>) {
        block.next = self.0.take();
        self.0 = Some(block);
    }

    /// Removes the first block for which `wanted` is true.
    fn take(&mut self, wanted: impl Fn(&Block) -> bool) -> Option<Box<Block>> {
        let mut place = &mut self.0;
        while place.as_ref().is_some_and(|block| !wanted(block)) {
            place = &mut place.as_mut()?.next;
        }
        let mut block = place.take()?;
        *place = block.next.take();
        Some(block)
    }

    /// Moves the blocks for which `wanted` is true to another list.
    fn move_to(&mut self, other: &mut Self, wanted: impl Fn(&Block) -> bool) {
        while let Some(block) = self.take(&wanted) {
            other.push(block);
        }
    }

    /// Returns the capacity of the largest block of a context in this list.
    fn largest_of(&self, context: u64) -> Option<usize> {
        self.iter().filter(|block| block.context == context).map(|block| block.capacity).max()
    }

    fn iter(&self) -> impl Iterator<Item = &Block> {
        std::iter::successors(self.0.as_deref(), |block| block.next.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a device's cache, which is never freed. A static keeps it reachable, so no leak checker reports it.
    fn of_device() -> &'static Cache {
        static CACHES: Mutex<Vec<&'static Cache>> = Mutex::new(Vec::new());
        let cache: &Cache = Box::leak(Box::new(Cache::of_device(1 << 30)));
        CACHES.lock().unwrap().push(cache);
        cache
    }

    /// Creates a block in a tensor.
    fn live_block(home: &'static Cache, context: u64, address: u64, capacity: usize) -> Owner {
        let mut block = Block::new(capacity, context, home);
        block.address = address;
        home.settle(&block).unwrap();
        block.into_owner()
    }

    /// Creates a block and releases its tensor.
    fn released(home: &'static Cache, context: u64, address: u64, capacity: usize) {
        drop(live_block(home, context, address, capacity));
    }

    /// Takes a free block, drops it and returns its address.
    fn taken(home: &'static Cache, context: u64, bytes: usize, capacity: usize) -> Option<u64> {
        home.take(context, bytes, capacity).unwrap().map(|block| block.address)
    }

    /// Takes all blocks of a context out and returns their addresses, the largest block first.
    fn addresses(home: &'static Cache, context: u64) -> Vec<u64> {
        let mut found = Vec::new();
        while let Some(mut blocks) = home.take_largest(context) {
            let address = blocks.largest().unwrap().address;
            blocks.forget(address);
            found.push(address);
        }
        found
    }

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
    fn a_class_has_an_eighth_of_a_power_of_two_and_there_are_enough() {
        assert_eq!([512, 575, 576, 1023, 1024].map(class_of), [0, 0, 1, 7, 8]);
        assert_eq!(class_of(usize::MAX), CLASSES - 1);
        for capacity in (9..60).flat_map(|k| (8..16).map(move |eighths: usize| eighths << (k - 3))) {
            assert_eq!(class_of(capacity), class_of(capacity + capacity / 16));
            assert!(class_of(capacity) > class_of(capacity - 1) || capacity == 512);
        }
    }

    #[test]
    fn a_block_of_a_destroyed_context_is_not_returned() {
        let home = of_device();
        let gone = live_block(home, 7, 4096, 1024);
        assert_eq!(home.export(4096), Some(7));
        let owner = live_block(home, 8, 4096, 1024);
        home.returned(4096, 7);
        drop(gone);
        assert_eq!(home.export(4096), Some(8));
        drop(owner);
        assert!(home.take_retired(8).is_none(), "one receiver still has it");
        home.returned(4096, 8);
        assert_eq!(home.take_retired(8).unwrap().largest().unwrap().address, 4096);
    }

    #[test]
    fn a_block_at_a_freed_address_can_be_exported() {
        let home = of_device();
        let owner = live_block(home, 7, 4096, 1024);
        home.export(4096);
        drop(owner);
        home.returned(4096, 7);
        let mut freed = home.take_retired(7).unwrap();
        // The driver has freed the block and gives its address to another thread, which exports the new block twice.
        let owner = live_block(home, 7, 4096, 1024);
        home.export(4096);
        freed.forget(4096);
        drop(freed);
        home.export(4096);
        drop(owner);
        home.take_pending(7).make_ready();
        assert!(taken(home, 7, 1000, 1024).is_none());
        home.returned(4096, 7);
        assert!(home.take_retired(7).is_none(), "one receiver still has it");
        home.returned(4096, 7);
        let mut freed = home.take_retired(7).unwrap();
        home.returned(4096, 7); // one return too many
        freed.forget(4096);
        drop(freed);
        assert!(!home.may_have_retired());
        assert_eq!(home.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn taken_blocks_that_are_not_freed_are_pending_again() {
        let home = of_device();
        released(home, 7, 4096, 1024);
        drop(home.take_pending(7));
        drop(home.take_largest(7));
        assert_eq!(addresses(home, 7), [4096]);
    }

    #[test]
    fn blocks_of_a_destroyed_context_are_dropped_when_their_address_is_reused() {
        let home = of_device();
        released(home, 7, 0x10000, 0x1000);
        released(home, 7, 0x90000, 0x1000);
        released(home, 8, 0x20000, 0x1000);
        home.take_pending(7).make_ready();
        home.lock().drop_stale_contexts(home, 9, 0x11000, 0x1000);
        assert_eq!(home.bytes.load(Ordering::Relaxed), 0x3000, "side by side");
        home.lock().drop_stale_contexts(home, 9, 0x10800, 0x1000);
        assert_eq!((addresses(home, 7), addresses(home, 8)), (vec![], vec![0x20000]));
        assert_eq!(home.bytes.load(Ordering::Relaxed), 0);
    }
}
