//! Addresses that threads share.

/// Address in memory that threads share. No thread writes where another one reads or writes.
#[derive(Clone, Copy)]
pub struct Address(pub *mut u8);

// SAFETY: this is only an address; unsafe code that reads or writes there must prove that it may.
unsafe impl Send for Address {}
// SAFETY: likewise.
unsafe impl Sync for Address {}

impl Address {
    pub fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}
