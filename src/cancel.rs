//! Puts off the cancellation of a thread (pthread_cancel).
//!
//! glibc ends a cancelled thread at a cancellation point, such as open(), by unwinding its stack. A frame that catches
//! panics stands in the way of that, and then the process aborts. Every call of this library has such a frame, so a
//! call puts cancellation off while it reaches a cancellation point itself or runs somebody else's code.

use std::{ffi::c_int, marker::PhantomData};

/// The value in glibc and in musl.
const PTHREAD_CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// While it lives, its thread is not cancelled. A cancellation that comes meanwhile acts at the next cancellation point
/// after it.
pub struct Delay {
    before: c_int,
    /// The state belongs to one thread: not to be sent to another.
    _of_this_thread: PhantomData<*mut ()>,
}

/// Puts cancellation of this thread off for as long as the result lives.
#[must_use]
pub fn delay() -> Delay {
    let mut before = PTHREAD_CANCEL_DISABLE;
    // SAFETY: a state that exists, and an integer that outlives the call.
    unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut before) };
    Delay { before, _of_this_thread: PhantomData }
}

impl Drop for Delay {
    fn drop(&mut self) {
        let mut delayed = 0;
        // SAFETY: the state that this thread had before, and an integer that outlives the call.
        unsafe { pthread_setcancelstate(self.before, &mut delayed) };
    }
}
