//! A lock that admits one call at a time to a handle. No call waits for the lock: if it is taken, the call is refused.

use std::{
    cell::UnsafeCell,
    ops::{Deref, DerefMut},
    sync::atomic::{AtomicU8, Ordering},
    thread,
};

use super::error::{Result, error};

/// Value for one call at a time.
pub struct Lock<T> {
    state: AtomicU8,
    what: &'static str,
    value: UnsafeCell<T>,
}

const FREE: u8 = 0;
const TAKEN: u8 = 1;
/// State after a panic has broken off a call.
const POISONED: u8 = 2;

// SAFETY: the lock gives out one reference at a time, so it is enough that the value can move between threads.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    /// Creates a lock. `what`: the name of the value in messages.
    pub const fn new(what: &'static str, value: T) -> Self {
        Self { state: AtomicU8::new(FREE), what, value: UnsafeCell::new(value) }
    }

    /// Takes the lock for a call. Returns BUSY while another call has it, and PANIC once a call was broken off.
    pub fn enter(&self) -> Result<Entered<'_, T>> {
        let what = self.what;
        match self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(Entered { lock: self, was_panicking: thread::panicking() }),
            Err(POISONED) => Err(error!(Panic, "{what}: an earlier call on it was broken off")),
            Err(_) => Err(error!(Busy, "{what}: another thread's call on it is under way")),
        }
    }
}

/// Guard of a call that has taken the lock.
pub struct Entered<'a, T> {
    lock: &'a Lock<T>,
    /// True if the thread was already unwinding when it took the lock: a destructor may make calls then. As with std's
    /// Mutex, a panic within such a call is not noticed.
    was_panicking: bool,
}

// SAFETY: a shared guard gives only a shared reference to the value, which is Sync.
unsafe impl<T: Sync> Sync for Entered<'_, T> {}

impl<T> Deref for Entered<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this is the only guard of the lock, and the reference borrows the guard.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Entered<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this is the only guard of the lock, and the reference borrows the guard mutably.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Entered<'_, T> {
    fn drop(&mut self) {
        let state = if thread::panicking() && !self.was_panicking { POISONED } else { FREE };
        self.lock.state.store(state, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::ffi::error::Status;

    #[test]
    fn one_call_at_a_time_and_none_after_a_panic() {
        let lock = Lock::new("thing", 1);
        let entered = lock.enter().unwrap();
        assert_eq!(lock.enter().err().unwrap().status, Status::Busy);
        drop(entered);
        *lock.enter().unwrap() += 1;
        assert_eq!(*lock.enter().unwrap(), 2);
        let broken_off = catch_unwind(AssertUnwindSafe(|| {
            let _entered = lock.enter();
            std::panic::resume_unwind(Box::new(()));
        }));
        assert!(broken_off.is_err());
        assert_eq!(lock.enter().err().unwrap().status, Status::Panic);
    }

    #[test]
    fn a_call_during_an_unwind_does_not_poison_the_lock() {
        struct Calls<'a>(&'a Lock<i32>);
        impl Drop for Calls<'_> {
            fn drop(&mut self) {
                *self.0.enter().unwrap() += 1;
            }
        }
        let lock = Lock::new("thing", 1);
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let _calls = Calls(&lock);
            std::panic::resume_unwind(Box::new(()));
        }));
        assert!(unwound.is_err());
        assert_eq!(*lock.enter().unwrap(), 2);
    }
}
