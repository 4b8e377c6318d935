//! Who uses a handle: one call at a time or several, also after a fork.
//!
//! Nobody waits for a lock: a call that finds it taken is refused. A child that is forked while another thread is in a
//! call has the handle as it was, and no thread that would ever leave it; so handles know in which process a call came.

use std::{
    cell::UnsafeCell,
    mem::ManuallyDrop,
    ops::{Deref, DerefMut},
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    thread,
};

use crate::{
    error::{Error, Result, error},
    panics::boundary,
};

/// How many calls are in something, in the low half, and in which process the first of them came, in the high half.
#[derive(Default)]
pub struct Users(AtomicU64);

/// In the place of a number of users: a call was broken off by a panic.
const BROKEN_OFF: u32 = u32::MAX;

impl Users {
    /// Counts a call that begins, unless `most` are there. `what` is named in the refusal.
    fn enter(&self, most: u32, what: &str) -> Result<()> {
        let process = process();
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            let (of, users) = ((word >> 32) as u32, word as u32);
            match users {
                0 => {}
                BROKEN_OFF => return Err(error!(Panic, "{what}: an earlier call on it was broken off")),
                _ if of != process => return Err(forked(what)),
                _ if users >= most => return Err(error!(Busy, "{what}: another thread's call on it is under way")),
                _ => {}
            }
            let next = u64::from(process) << 32 | u64::from(users + 1);
            match self.0.compare_exchange_weak(word, next, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => word = now,
            }
        }
    }

    /// Counts a call as long as what is returned lives, beside however many others.
    pub fn count(&self, what: &str) -> Result<Counted<'_>> {
        self.enter(BROKEN_OFF - 1, what)?;
        Ok(Counted(self))
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// INVALID_ARGUMENT if calls were under way when this process was forked. Never waits, and refuses nothing else.
    fn check_process(&self, what: &str) -> Result<()> {
        if self.were_abandoned() { Err(forked(what)) } else { Ok(()) }
    }

    /// Whether calls were under way in the parent when this process was forked: they never end here.
    fn were_abandoned(&self) -> bool {
        let word = self.0.load(Ordering::Acquire);
        !matches!(word as u32, 0 | BROKEN_OFF) && (word >> 32) as u32 != process()
    }
}

fn forked(what: &str) -> Error {
    error!(InvalidArgument, "{what}: was in use when the process was forked")
}

/// A call that is counted.
pub struct Counted<'a>(&'a Users);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// A value for one call at a time.
pub struct Lock<T> {
    users: Users,
    what: &'static str,
    value: ManuallyDrop<UnsafeCell<T>>,
}

// SAFETY: the lock gives out one reference at a time, so that threads need only be able to hand the value on.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    /// `what` the caller knows it as.
    pub const fn new(what: &'static str, value: T) -> Self {
        let value = ManuallyDrop::new(UnsafeCell::new(value));
        Self { users: Users(AtomicU64::new(0)), what, value }
    }

    /// BUSY while another call is in, INVALID_ARGUMENT if that was when the process was forked.
    pub fn enter(&self) -> Result<Entered<'_, T>> {
        self.users.enter(1, self.what)?;
        Ok(Entered(self))
    }

    /// INVALID_ARGUMENT if a call was in when the process was forked. For what may be asked beside a call.
    pub fn check_process(&self) -> Result<()> {
        self.users.check_process(self.what)
    }
}

impl<T> Drop for Lock<T> {
    fn drop(&mut self) {
        // What the parent's thread was changing is left alone.
        if !self.users.were_abandoned() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A call that is in.
pub struct Entered<'a, T>(&'a Lock<T>);

// SAFETY: it is shared as the reference to the value that it gives.
unsafe impl<T: Sync> Sync for Entered<'_, T> {}

impl<T> Deref for Entered<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this is the only call that is in, and it borrows itself.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Entered<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this is the only call that is in, and it borrows itself mutably.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Entered<'_, T> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.users.0.store(BROKEN_OFF.into(), Ordering::Release);
        } else {
            self.0.users.leave();
        }
    }
}

/// A value for any number of calls at a time.
pub struct Shared<T> {
    users: Users,
    what: &'static str,
    value: ManuallyDrop<T>,
}

impl<T> Shared<T> {
    /// `what` the caller knows it as.
    pub const fn new(what: &'static str, value: T) -> Self {
        Self { users: Users(AtomicU64::new(0)), what, value: ManuallyDrop::new(value) }
    }

    /// INVALID_ARGUMENT if a call was in when the process was forked.
    pub fn enter(&self) -> Result<Used<'_, T>> {
        Ok(Used { _counted: self.users.count(self.what)?, value: &self.value })
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        if !self.users.were_abandoned() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A call that is in, beside others.
pub struct Used<'a, T> {
    _counted: Counted<'a>,
    value: &'a T,
}

impl<T> Deref for Used<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value
    }
}

/// A number that differs between this process and the one that it was forked from: how often that has happened. It
/// costs no system call, and is never reused as a process's own number is.
fn process() -> u32 {
    static FORKS: AtomicU32 = AtomicU32::new(0);
    static COUNTED: AtomicBool = AtomicBool::new(false);
    extern "C" fn count() {
        boundary(|| {
            FORKS.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
    }
    // Before anything is taken, so that no child misses it. Where there is no memory for it, the next one tries.
    // SAFETY: a function that can be called in a forked child.
    if !COUNTED.load(Ordering::Relaxed) && unsafe { libc::pthread_atfork(None, None, Some(count)) } == 0 {
        COUNTED.store(true, Ordering::Relaxed);
    }
    FORKS.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::error::Status;

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
    fn so_many_calls_at_a_time() {
        let users = Users::default();
        assert!((0..3).all(|_| users.enter(3, "thing").is_ok()));
        assert_eq!(users.enter(3, "thing").unwrap_err().status, Status::Busy);
        users.leave();
        assert!(users.enter(3, "thing").is_ok());
    }

    struct Loud;
    impl Drop for Loud {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    #[test]
    fn several_calls_at_a_time_until_a_fork() {
        let shared = Shared::new("thing", Loud);
        let calls = [shared.enter().unwrap(), shared.enter().unwrap()];
        drop(calls);
        assert!(shared.enter().is_ok());
        let elsewhere = u64::from(process().wrapping_sub(1)) << 32;
        shared.users.0.store(elsewhere | 2, Ordering::Relaxed);
        assert_eq!(shared.enter().err().unwrap().status, Status::InvalidArgument);
        drop(shared);
    }

    #[test]
    fn what_was_in_use_at_a_fork_is_refused_and_not_dropped() {
        let lock = Lock::new("thing", Loud);
        let elsewhere = u64::from(process().wrapping_sub(1)) << 32;
        lock.users.0.store(elsewhere | 1, Ordering::Relaxed);
        let refusal = lock.enter().err().unwrap();
        assert_eq!(
            (refusal.status, &*refusal.message),
            (Status::InvalidArgument, "thing: was in use when the process was forked")
        );
        drop(lock);
        // One that was free is as any other.
        let free = Lock::new("thing", 7);
        free.users.0.store(elsewhere, Ordering::Relaxed);
        assert_eq!(*free.enter().unwrap(), 7);
    }
}
