//! The boundary between callers and this library. Every call from outside runs through it: panics become errors, and a
//! failure becomes the thread's last error.

use std::{
    cell::{Cell, RefCell},
    ffi::{c_char, c_void},
    panic::{self, AssertUnwindSafe},
    ptr,
};

use super::{
    environment,
    error::{Error, MESSAGE_LIMIT, Result, Status, sentence},
};

/// Result of a function for C: its value on success, and the value that stands for failure.
pub trait CResult {
    type C;
    fn success(self) -> Self::C;
    fn failure(status: Status) -> Self::C;
}

macro_rules! c_results {
    ($($answer:ty: $c:ty, |$value:ident| $success:expr, |$status:pat_param| $failure:expr;)*) => {$(
        impl CResult for $answer {
            type C = $c;

            fn success(self) -> $c {
                let $value = self;
                $success
            }

            fn failure($status: Status) -> $c {
                $failure
            }
        }
    )*};
}
c_results! {
    (): i32, |_done| Status::Ok as i32, |status| status as i32;
    i32: i32, |value| value, |_| -1;
    i64: i64, |value| value, |_| -1;
    u32: u32, |value| value, |_| 0;
    *const c_char: *const c_char, |text| text, |_| c"".as_ptr();
    *mut c_void: *mut c_void, |pointer| pointer, |_| ptr::null_mut();
}

thread_local! {
    /// Text of the last failure, with a NUL. It has no destructor, so it stays as long as the thread.
    static LAST_ERROR: RefCell<[u8; MESSAGE_LIMIT + 1]> = const { RefCell::new([0; MESSAGE_LIMIT + 1]) };
    /// Number of boundaries that this thread is inside of: a deleter may run within a call.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Text that the panic hook got about a panic inside.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs the body of a function for C. A panic silently becomes a status, and a failure becomes the thread's last error.
/// No code of this library runs in the caller's floating-point environment.
pub fn boundary<T: CResult>(body: impl FnOnce() -> Result<T>) -> T::C {
    let _environment = environment::Default::enter();
    // In a C library the panic hook belongs to the library. In a Rust program it belongs to the program.
    #[cfg(feature = "capi")]
    keep_panics_silent();
    let failure = match Error::catch(body) {
        Ok(Ok(value)) => return value.success(),
        Ok(Err(failure)) | Err(failure) => failure,
    };
    set_last_error(&failure);
    T::failure(failure.status)
}

/// Panics as errors: a panic caught on one thread can continue on another, and reaches its boundary unchanged.
impl Error {
    /// Runs work within a call. A panic silently becomes an error that names its place.
    pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T> {
        let outcome = DEPTH.with(|depth| {
            depth.set(depth.get() + 1);
            let outcome = panic::catch_unwind(AssertUnwindSafe(work));
            depth.set(depth.get() - 1);
            outcome
        });
        outcome.map_err(|payload| {
            let mut words = PANIC.try_with(RefCell::take).unwrap_or_default();
            if words.is_empty() {
                // The hook that ran was not ours.
                let text = payload.downcast_ref::<&str>().copied();
                let text = text.or(payload.downcast_ref::<String>().map(String::as_str));
                words = sentence(format_args!("{DEFECT}: {}", text.unwrap_or("a panic")));
            }
            Self { status: Status::Panic, message: words }
        })
    }

    /// Continues a panic that was caught.
    pub fn resume(self) -> ! {
        let _ = PANIC.try_with(|words| words.replace(self.message));
        panic::resume_unwind(Box::new(()))
    }
}

/// Returns the text of this thread's last failure.
pub fn last_error() -> *const c_char {
    LAST_ERROR.with(|text| text.as_ptr().cast::<c_char>().cast_const())
}

fn set_last_error(failure: &Error) {
    LAST_ERROR.with_borrow_mut(|text| {
        // C ends the text at a NUL, so the copy ends there, too; `sentence` keeps the limit. Without memory for a text,
        // the status's name replaces it.
        let message =
            if failure.message.is_empty() { failure.status.name().to_bytes() } else { failure.message.as_bytes() };
        let words = message.iter().copied().take_while(|&byte| byte != 0).take(MESSAGE_LIMIT);
        let length = words.zip(text.iter_mut()).map(|(byte, slot)| *slot = byte).count();
        text[length] = 0;
    });
}

/// Beginning of the message of a panic.
const DEFECT: &str = "a defect of this library, caught";

/// Installs a panic hook that keeps its text for [`Error::catch`]. Panics elsewhere go to the previous hook.
#[cfg(feature = "capi")]
fn keep_panics_silent() {
    use std::{
        panic::PanicHookInfo,
        sync::{
            OnceLock,
            atomic::{AtomicBool, Ordering},
        },
        thread,
    };
    type Hook = dyn Fn(&PanicHookInfo<'_>) + Send + Sync;
    static DONE: AtomicBool = AtomicBool::new(false);
    static PREVIOUS: OnceLock<Box<Hook>> = OnceLock::new();
    // The hook is a function without captures, so installing it allocates nothing.
    fn hook(info: &PanicHookInfo<'_>) {
        if DEPTH.get() > 0 {
            let words = sentence(format_args!("{DEFECT}: {info}"));
            let _ = PANIC.try_with(|panic| panic.replace(words));
        } else if let Some(previous) = PREVIOUS.get() {
            previous(info);
        }
    }
    // A thread that unwinds may not change the hook; the next call does. No call waits for one that installs it, or a
    // forked child could wait forever. The load comes first: a swap takes longer than all the rest of a small call.
    if !DONE.load(Ordering::Relaxed) && !thread::panicking() && !DONE.swap(true, Ordering::Relaxed) {
        let _ = PREVIOUS.set(panic::take_hook());
        panic::set_hook(Box::new(hook));
    }
}

#[cfg(test)]
mod tests {
    use std::{ffi::CStr, process::Command, thread};

    use super::*;
    use crate::ffi::error::error;

    fn last_error_text() -> String {
        // SAFETY: `last_error` points at this thread's text, which ends with a NUL.
        unsafe { CStr::from_ptr(last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status_that_names_its_place() {
        let status = boundary(|| -> Result<()> { panic!("seven is {}", 7) });
        assert_eq!(status, 99);
        assert!(last_error_text().contains("panics.rs"), "{}", last_error_text());
        assert!(last_error_text().contains("seven is 7"), "{}", last_error_text());
    }

    #[test]
    fn success_does_not_change_the_last_error() {
        assert_eq!(last_error_text(), "");
        assert_eq!(boundary(|| -> Result<()> { Err(error!(Busy, "one\0two")) }), 8);
        assert_eq!(boundary(|| Ok(())), 0);
        assert_eq!(last_error_text(), "one");
        std::thread::scope(|scope| scope.spawn(|| assert_eq!(last_error_text(), "")).join().unwrap());
    }

    #[test]
    fn a_shorter_error_replaces_a_longer_one_completely() {
        boundary(|| -> Result<()> { Err(error!(Busy, "{}", "x".repeat(2 * MESSAGE_LIMIT))) });
        assert_eq!(last_error_text().len(), MESSAGE_LIMIT);
        boundary(|| -> Result<()> { Err(error!(Busy, "short")) });
        assert_eq!(last_error_text(), "short");
    }

    /// Runs in a child process of the next test, because the panic hook belongs to the process.
    #[test]
    fn one_panic_inside_and_one_outside() {
        if std::env::var_os("GRADCODEC_TEST_PANICS").is_some() {
            boundary(|| -> Result<()> { panic!("not to be printed") });
            panic!("to be printed");
        }
    }

    /// Returns what a test of this module prints to stderr in a child process.
    fn stderr_of(test: &str) -> String {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", &format!("ffi::panics::tests::{test}")])
            .env("GRADCODEC_TEST_PANICS", "1")
            .output()
            .unwrap();
        String::from_utf8(child.stderr).unwrap()
    }

    #[test]
    fn panics_inside_are_silent_and_others_are_not() {
        let stderr = stderr_of("one_panic_inside_and_one_outside");
        assert!(stderr.contains("\nto be printed"), "{stderr}");
        assert!(!stderr.contains("not to be printed"), "{stderr}");
    }

    /// Runs in a child process of the next test, where these are the first calls.
    #[test]
    fn first_calls_while_a_panic_unwinds() {
        struct Calls;
        impl Drop for Calls {
            fn drop(&mut self) {
                assert!(thread::panicking());
                assert_eq!(boundary(|| Ok(())), 0);
                assert_eq!(boundary(|| -> Result<()> { panic!("while unwinding") }), 99);
                eprintln!("the calls returned: {}", last_error_text());
            }
        }
        if std::env::var_os("GRADCODEC_TEST_PANICS").is_some() {
            assert!(
                panic::catch_unwind(|| {
                    let _calls = Calls;
                    panic!("of the caller");
                })
                .is_err()
            );
            assert_eq!(boundary(|| -> Result<()> { panic!("not to be printed") }), 99);
            eprintln!("the hook is there: {}", last_error_text());
        }
    }

    #[test]
    fn the_first_call_works_while_a_panic_unwinds() {
        let stderr = stderr_of("first_calls_while_a_panic_unwinds");
        assert!(stderr.contains("the calls returned: a defect of this library, caught: while unwinding"), "{stderr}");
        assert!(stderr.contains("the hook is there: a defect of this library, caught: "), "{stderr}");
        assert_eq!(stderr.matches("not to be printed").count(), 1, "in the last error alone: {stderr}");
    }

    #[test]
    fn a_panic_keeps_its_place_when_another_thread_resumes_it() {
        let status = boundary(|| -> Result<()> {
            let caught: Result<()> =
                thread::scope(|scope| scope.spawn(|| Error::catch(|| panic!("elsewhere"))).join().unwrap());
            caught.or_else(|failure| failure.resume())
        });
        assert_eq!(status, 99);
        assert!(last_error_text().contains("panics.rs"), "{}", last_error_text());
        assert!(last_error_text().contains("elsewhere"), "{}", last_error_text());
    }
}
