//! Loom's atomics, and a futex made of loom's parts, in place of src/cpu/pool/sync.rs.

use std::ops::Deref;

use loom::sync::{Condvar, atomic::AtomicU32};
pub use loom::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering},
};

pub struct Word {
    value: AtomicU32,
    /// Stands for the kernel's lock of a futex queue: `sleep` checks the value under it.
    sleepers: Mutex<()>,
    woken: Condvar,
}

impl Deref for Word {
    type Target = AtomicU32;

    fn deref(&self) -> &AtomicU32 {
        &self.value
    }
}

impl Word {
    pub fn new(value: u32) -> Self {
        Self { value: AtomicU32::new(value), sleepers: Mutex::new(()), woken: Condvar::new() }
    }

    pub fn sleep(&self, expected: u32) {
        let sleepers = self.sleepers.lock().unwrap();
        if self.value.load(Ordering::Relaxed) == expected {
            drop(self.woken.wait(sleepers));
        }
    }

    pub fn wake(&self, count: usize) {
        let _sleepers = self.sleepers.lock().unwrap();
        (0..count).for_each(|_| self.woken.notify_one());
    }
}
