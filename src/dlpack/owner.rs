//! Owners of tensors' memory.

use std::ffi::c_void;

/// Owner of memory: its address, and the function that frees it when the owner is dropped. A backend, a caller, or the
/// producer of a tensor that was taken over provides the function.
pub struct Owner {
    data: *mut u8,
    words: [*mut c_void; 2],
    free: unsafe fn(data: *mut u8, words: [*mut c_void; 2]),
}

// SAFETY: the caller of `new` promised that `free` may be called on any thread; the owner alone has the memory.
unsafe impl Send for Owner {}

impl Owner {
    /// Makes an owner. `data`: address of the memory; NULL if there is none, or if the address is kept elsewhere.
    /// `words`: arguments of `free`.
    ///
    /// # Safety
    /// `free` may be called with `data` and `words`, once, on any thread.
    pub unsafe fn new(
        data: *mut u8, words: [*mut c_void; 2], free: unsafe fn(data: *mut u8, words: [*mut c_void; 2]),
    ) -> Self {
        Self { data, words, free }
    }

    /// Makes an owner of no memory.
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
        // SAFETY: the caller of `new` promised that `free` may be called once, and a value is dropped once.
        unsafe { (self.free)(self.data, self.words) };
    }
}
