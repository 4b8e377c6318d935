//! Opaque objects that C holds by a pointer: the common code for all of them.
//!
//! An object belongs to the process that made it. A forked child has a copy, which another thread of the parent may
//! have been using at the fork. In the child every call on it is refused, and releasing it does nothing.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::{
    borrow,
    error::{Result, error},
    name::Name,
    panics::boundary,
};

/// Object as C holds it: a pointer to the object is a pointer to this struct.
#[repr(C)]
struct Owned<T> {
    object: T,
    /// Result of [`forks`] in the process that made the object.
    forks: u32,
}

/// Moves an object to the heap, where C can hold it.
pub fn hand_out<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(Owned { object, forks: forks() })).cast()
}

/// Borrows an object. Returns INVALID_ARGUMENT if it is NULL, not aligned, or of another process.
///
/// # Safety
/// Unless NULL or unaligned, `handle` came from [`hand_out`] and is not released for `'a`.
pub unsafe fn borrow<'a, T: Sync>(name: &'static str, handle: *const T) -> Result<&'a T> {
    let handle = handle.cast::<Owned<T>>();
    borrow::check(&Name::new(name), handle)?;
    // SAFETY: the pointer is non-NULL and aligned; the caller promises an object that stays; `T` is Sync.
    let Owned { object, forks: made } = unsafe { &*handle };
    if *made != forks() {
        return Err(error!(InvalidArgument, "{name}: was made before the process was forked"));
    }
    Ok(object)
}

/// Releases an object. Does nothing if it is NULL or of another process.
///
/// # Safety
/// Unless NULL, `handle` came from [`hand_out`], and nothing uses it any more.
pub unsafe fn release<T>(handle: *mut T) {
    let handle = handle.cast::<Owned<T>>();
    // SAFETY: the caller promises a box from `hand_out` that nothing else has.
    unsafe {
        if !handle.is_null() && (*handle).forks == forks() {
            drop(Box::from_raw(handle));
        }
    }
}

/// Returns a number that is higher in a forked child than in its parent. It needs no system call, and is never reused,
/// unlike a process id.
fn forks() -> u32 {
    static FORKS: AtomicU32 = AtomicU32::new(0);
    static COUNTED: AtomicBool = AtomicBool::new(false);
    extern "C" fn count() {
        boundary(|| {
            FORKS.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
    }
    // Register before the first object is made, so that every child counts. Without memory the next call tries again.
    // SAFETY: `count` can be called in a forked child.
    if !COUNTED.load(Ordering::Relaxed) && unsafe { libc::pthread_atfork(None, None, Some(count)) } == 0 {
        COUNTED.store(true, Ordering::Relaxed);
    }
    FORKS.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Loud;
    impl Drop for Loud {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    #[test]
    fn an_object_of_another_process_is_refused_and_not_dropped() {
        let handle = hand_out(Loud);
        // SAFETY: the handle came from `hand_out`, and is not released.
        assert!(unsafe { borrow("thing", handle) }.is_ok());
        let made = Box::new(Owned { object: Loud, forks: forks().wrapping_sub(1) });
        let other = Box::into_raw(made).cast::<Loud>();
        // SAFETY: the pointer is as from `hand_out` in the process that this one was forked from.
        let refusal = unsafe { borrow("thing", other) }.err().unwrap();
        assert_eq!(refusal.message, "thing: was made before the process was forked");
        // SAFETY: the same holds here. Both boxes stay until they are freed below.
        unsafe {
            release(other);
            release(std::ptr::null_mut::<Loud>());
            drop(Box::from_raw(other.cast::<std::mem::ManuallyDrop<Owned<Loud>>>()));
            drop(Box::from_raw(handle.cast::<std::mem::ManuallyDrop<Owned<Loud>>>()));
        }
    }
}
