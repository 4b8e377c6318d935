//! Addresses that threads share.

/// Where something begins in memory that threads share, each in places of its own.
#[derive(Clone, Copy)]
pub struct Address(pub *mut u8);

// SAFETY: an address; who reads and writes there promises that it may be done.
unsafe impl Send for Address {}
// SAFETY: likewise.
unsafe impl Sync for Address {}

impl Address {
    pub fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}
