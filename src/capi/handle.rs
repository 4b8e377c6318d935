//! Opaque objects that C holds by a pointer, once for all of them.

use std::mem::MaybeUninit;

use crate::{error::Result, fallible, tensor::Name};

use super::borrow;

/// Storage that C will hold an object in: reserved by those who may not fail once they have the object.
pub struct Place<T>(Box<MaybeUninit<T>>);

impl<T> Place<T> {
    pub fn new() -> Result<Self> {
        fallible::place().map(Self)
    }

    pub fn hand_out(self, object: T) -> *mut T {
        Box::into_raw(Box::write(self.0, object))
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
        // SAFETY: by the caller's promise a box of `Place::hand_out`, which nobody else has.
        drop(unsafe { Box::from_raw(handle) });
    }
}
