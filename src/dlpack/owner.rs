//! What keeps a tensor's memory alive.

use std::ffi::c_void;

/// Memory as a value: where it lies, and what gives it back once this is dropped, whoever that is: a backend, a caller, or
/// the producer of a tensor that was taken over.
pub struct Owner {
    data: *mut u8,
    words: [*mut c_void; 2],
    free: unsafe fn(data: *mut u8, words: [*mut c_void; 2]),
}

// SAFETY: `new` was promised that `free` may be called on any thread; the memory itself belongs to whoever has this.
unsafe impl Send for Owner {}

impl Owner {
    /// `data` is where the memory begins; NULL if there is none of it, or if that is told elsewhere. `words` are whatever
    /// `free` wants to know.
    ///
    /// # Safety
    /// `free` may be called with `data` and `words`, once, on any thread.
    pub unsafe fn new(
        data: *mut u8, words: [*mut c_void; 2], free: unsafe fn(data: *mut u8, words: [*mut c_void; 2]),
    ) -> Self {
        Self { data, words, free }
    }

    /// Memory of no bytes, which belongs to nobody.
    pub fn of_nothing() -> Self {
        fn nothing(_: *mut u8, _: [*mut c_void; 2]) {}
        // SAFETY: a function that does nothing.
        unsafe { Self::new(std::ptr::null_mut(), [std::ptr::null_mut(); 2], nothing) }
    }

    pub fn data(&self) -> *mut u8 {
        self.data
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: `new` was promised that this may be called once, which is here.
        unsafe { (self.free)(self.data, self.words) };
    }
}
