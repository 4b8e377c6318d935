//! Primitives of `job`: atomics, and words that threads sleep on.

pub use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering},
};
use std::{ops::Deref, ptr, sync::atomic::AtomicU32};

/// A number that threads can sleep on (a futex).
pub struct Word(AtomicU32);

impl Deref for Word {
    type Target = AtomicU32;

    fn deref(&self) -> &AtomicU32 {
        &self.0
    }
}

impl Word {
    pub const fn new(value: u32) -> Self {
        Self(AtomicU32::new(value))
    }

    /// Sleeps until this word is woken, unless its value is not `expected` any more. May return early.
    pub fn sleep(&self, expected: u32) {
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word outlives the call, and NULL is no time limit.
        unsafe { libc::syscall(libc::SYS_futex, self.as_ptr(), operation, expected, ptr::null::<libc::timespec>()) };
    }

    /// Wakes up to `count` threads that sleep on this word.
    pub fn wake(&self, count: usize) {
        let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word outlives the call.
        unsafe { libc::syscall(libc::SYS_futex, self.as_ptr(), operation, count as i32) };
    }
}
