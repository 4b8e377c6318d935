//! Detached threads of the library.

use std::{ffi::c_void, mem::MaybeUninit, ptr};

/// Function that a detached thread runs.
pub type Work = extern "C" fn(*mut c_void) -> *mut c_void;

/// Signals that an access or an instruction of the thread itself causes. Only the thread can handle them.
const FAULTS: [i32; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Starts a detached thread, unless the system refuses. The returned id is valid while the thread runs.
///
/// # Safety
/// `work` may be called with `argument` on another thread, at any time.
pub unsafe fn start(stack_bytes: usize, work: Work, argument: *mut c_void) -> Option<libc::pthread_t> {
    let (mut thread, mut attributes) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    let (mut blocked, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the first function that gets a variable initializes it. With these arguments only pthread_create can
    // fail. The caller promises that `work` may be called.
    unsafe {
        libc::pthread_attr_init(attributes.as_mut_ptr());
        libc::pthread_attr_setdetachstate(attributes.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), stack_bytes);
        // Block other signals, so that the host's handlers run on the host's threads. A new thread inherits the mask.
        libc::sigfillset(blocked.as_mut_ptr());
        for fault in FAULTS {
            libc::sigdelset(blocked.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), before.as_mut_ptr());
        let refusal = libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), work, argument);
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        (refusal == 0).then(|| thread.assume_init())
    }
}
