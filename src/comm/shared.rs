//! A value with several owners, as an Arc, whose memory may be refused.

use std::{
    ops::Deref,
    ptr::{self, NonNull},
    sync::atomic::{AtomicUsize, Ordering, fence},
};

use crate::error::{Result, error};

pub struct Shared<T>(NonNull<Counted<T>>);

struct Counted<T> {
    owners: AtomicUsize,
    value: T,
}

// SAFETY: as an Arc: what owners share is read by all of them, and dropped by any.
unsafe impl<T: Send + Sync> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

/// Where a value can be shared: had before the value is made, by those for whom it is too late to fail afterwards.
pub struct Room<T>(Vec<Counted<T>>);

impl<T> Room<T> {
    pub fn new() -> Result<Self> {
        let mut place = Vec::new();
        place
            .try_reserve_exact(1)
            .map_err(|_| error!(OutOfMemory, "{} bytes of host memory could not be had", size_of::<Counted<T>>()))?;
        Ok(Self(place))
    }

    pub fn fill(mut self, value: T) -> Shared<T> {
        self.0.push(Counted { owners: AtomicUsize::new(1), value });
        Shared(NonNull::from(Box::leak(self.0.into_boxed_slice())).cast())
    }
}

impl<T> Shared<T> {
    pub fn new(value: T) -> Result<Self> {
        Ok(Room::new()?.fill(value))
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        // SAFETY: this owner keeps it.
        unsafe { self.0.as_ref() }.owners.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this owner keeps it.
        &unsafe { self.0.as_ref() }.value
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: this owner kept it till now.
        if unsafe { self.0.as_ref() }.owners.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            // SAFETY: a boxed slice of one, which the last owner gives up.
            drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(self.0.as_ptr(), 1)) });
        }
    }
}
