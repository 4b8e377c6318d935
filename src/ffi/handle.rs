//! Opaque objects that C holds by a pointer, once for all of them.
//!
//! An object belongs to the process that made it. A forked child has a copy of it in which another thread of the parent may
//! have been at work: there every call on it is refused, and releasing it does nothing.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::{
    borrow,
    error::{Result, error},
    name::Name,
    panics::boundary,
};

/// What C holds: a pointer to an object is a pointer to this.
#[repr(C)]
struct Owned<T> {
    object: T,
    /// Of the process that made it: [`forks`].
    forks: u32,
}

/// Moves an object to where C can hold it.
pub fn hand_out<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(Owned { object, forks: forks() })).cast()
}

/// Borrows an object. INVALID_ARGUMENT: NULL, not aligned, or of another process.
///
/// # Safety
/// Unless NULL or unaligned, `handle` came from [`hand_out`] and is not released for `'a`.
pub unsafe fn borrow<'a, T: Sync>(name: &'static str, handle: *const T) -> Result<&'a T> {
    let handle = handle.cast::<Owned<T>>();
    borrow::check(&Name::new(name), handle)?;
    // SAFETY: not NULL, aligned, and by the caller's promise an object that stays; it is shared, which it can be.
    let Owned { object, forks: made } = unsafe { &*handle };
    if *made != forks() {
        return Err(error!(InvalidArgument, "{name}: was made before the process was forked"));
    }
    Ok(object)
}

/// Releases an object; NULL, or one of another process: nothing.
///
/// # Safety
/// Unless NULL, `handle` came from [`hand_out`], and nothing uses it any more.
pub unsafe fn release<T>(handle: *mut T) {
    let handle = handle.cast::<Owned<T>>();
    // SAFETY: by the caller's promise a box of `hand_out`, which nobody else has.
    unsafe {
        if !handle.is_null() && (*handle).forks == forks() {
            drop(Box::from_raw(handle));
        }
    }
}

/// How often the process was forked, counted in each child: another number than in the process that it was forked from.
/// It costs no system call, and is never used again, unlike a process's number.
fn forks() -> u32 {
    static FORKS: AtomicU32 = AtomicU32::new(0);
    static COUNTED: AtomicBool = AtomicBool::new(false);
    extern "C" fn count() {
        boundary(|| {
            FORKS.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
    }
    // Before the first object is made, so that no child misses it. Where there is no memory for it, the next call tries.
    // SAFETY: a function that can be called in a forked child.
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
        // SAFETY: from `hand_out`, not released.
        assert!(unsafe { borrow("thing", handle) }.is_ok());
        let made = Box::new(Owned { object: Loud, forks: forks().wrapping_sub(1) });
        let other = Box::into_raw(made).cast::<Loud>();
        // SAFETY: as from `hand_out` in the process that this one was forked from.
        let refusal = unsafe { borrow("thing", other) }.err().unwrap();
        assert_eq!(refusal.message, "thing: was made before the process was forked");
        // SAFETY: likewise. Both stay.
        unsafe {
            release(other);
            release(std::ptr::null_mut::<Loud>());
            drop(Box::from_raw(other.cast::<std::mem::ManuallyDrop<Owned<Loud>>>()));
            drop(Box::from_raw(handle.cast::<std::mem::ManuallyDrop<Owned<Loud>>>()));
        }
    }
}
