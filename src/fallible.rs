//! Lists, boxes and shared values whose allocation can fail with a status, where std's would abort.
//!
//! The storage can be allocated before the value exists: for callers who may not fail once they have the value.

use std::{
    alloc::{self, Layout},
    fmt::Display,
    mem::MaybeUninit,
    ops::Deref,
    ptr::NonNull,
    sync::atomic::{AtomicUsize, Ordering, fence},
};

use crate::error::{Result, error};

/// An empty list with room for `count` items. `what`: what these are, for the message.
pub fn list<T>(count: usize, what: impl Display) -> Result<Vec<T>> {
    let mut list = Vec::new();
    let room = list.try_reserve_exact(count);
    room.map_err(|_| error!(OutOfMemory, "cannot allocate a list of {count} {what}")).map(|()| list)
}

/// Makes room in a list for so many items more.
pub fn reserve<T>(list: &mut Vec<T>, more: usize, what: impl Display) -> Result<()> {
    let all = list.len().saturating_add(more);
    list.try_reserve(more).map_err(|_| error!(OutOfMemory, "cannot allocate a list of {all} {what}"))
}

/// Storage for one value: `Box::write` fills it.
pub fn place<T>() -> Result<Box<MaybeUninit<T>>> {
    const { assert!(size_of::<T>() > 0) };
    // SAFETY: a layout of more than 0 bytes, as was asserted.
    let data = unsafe { alloc::alloc(Layout::new::<T>()) };
    if data.is_null() {
        return Err(error!(OutOfMemory, "cannot allocate {} bytes of host memory", size_of::<T>()));
    }
    // SAFETY: memory of the global allocator with T's layout, which MaybeUninit<T> shares, and any bytes are one.
    Ok(unsafe { Box::from_raw(data.cast()) })
}

/// A value with several owners, as std's Arc.
pub struct Arc<T>(NonNull<Counted<T>>);

struct Counted<T> {
    owners: AtomicUsize,
    value: T,
}

// SAFETY: as for std's Arc: the value is read by all owners and dropped by any of them.
unsafe impl<T: Send + Sync> Send for Arc<T> {}
// SAFETY: an owner that is shared gives away no more than one that is sent.
unsafe impl<T: Send + Sync> Sync for Arc<T> {}

/// Storage for a value that is to be shared.
pub struct Place<T>(Box<MaybeUninit<Counted<T>>>);

impl<T> Place<T> {
    pub fn new() -> Result<Self> {
        place().map(Self)
    }

    pub fn fill(self, value: T) -> Arc<T> {
        let counted = Box::write(self.0, Counted { owners: AtomicUsize::new(1), value });
        Arc(NonNull::from(Box::leak(counted)))
    }
}

impl<T> Arc<T> {
    pub fn new(value: T) -> Result<Self> {
        Ok(Place::new()?.fill(value))
    }

    fn counted(&self) -> &Counted<T> {
        // SAFETY: from a leaked box, which the last owner frees.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Clone for Arc<T> {
    fn clone(&self) -> Self {
        self.counted().owners.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl<T> Deref for Arc<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.counted().value
    }
}

impl<T> Drop for Arc<T> {
    fn drop(&mut self) {
        if self.counted().owners.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            // SAFETY: a leaked box, and no other owner is left to use it.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}
