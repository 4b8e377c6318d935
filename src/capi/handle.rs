//! Opaque objects that C holds by a pointer, once for all of them.

use std::ptr;

use crate::{
    error::{Result, error},
    tensor::Name,
};

use super::borrow;

/// Where C can hold an object: had before the object is made, by those for whom it is too late to fail afterwards.
pub struct Place<T>(Vec<T>);

impl<T> Place<T> {
    pub fn new() -> Result<Self> {
        let mut place = Vec::new();
        place
            .try_reserve_exact(1)
            .map_err(|_| error!(OutOfMemory, "{} bytes for a handle could not be had", size_of::<T>()))?;
        Ok(Self(place))
    }

    pub fn hand_out(mut self, object: T) -> *mut T {
        self.0.push(object);
        Box::into_raw(self.0.into_boxed_slice()).cast()
    }
}

/// Moves an object to where C can hold it.
pub fn hand_out<T>(object: T) -> Result<*mut T> {
    Ok(Place::new()?.hand_out(object))
}

/// Borrows an object.
///
/// # Safety
/// Unless NULL or unaligned, `handle` came from [`Place::hand_out`] and is not released for `'a`.
pub unsafe fn borrow<'a, T: Sync>(name: &'static str, handle: *const T) -> Result<&'a T> {
    borrow::check(&Name::new(name), handle)?;
    // SAFETY: not NULL, aligned, and by the caller's promise an object that stays; it is shared, which it can be.
    Ok(unsafe { &*handle })
}

/// Releases an object; NULL: nothing.
///
/// # Safety
/// Unless NULL, `handle` came from [`Place::hand_out`], and nothing uses it any more.
pub unsafe fn release<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: a boxed slice of one, by the caller's promise, which nobody else has.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(handle, 1)) });
    }
}
