//! Environment variables.

use std::ffi::CStr;

/// Returns the value of an environment variable; None if it is unset or empty, or if the program has privileges that
/// its caller lacks (AT_SECURE).
pub fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: getauxval() reads a table that does not change.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return None;
    }
    // std::env::var_os() is not used here because it allocates.
    // SAFETY: `name` ends with a NUL. The value does not change until a program sets the variable again, which
    // docs/ENVIRONMENT.md rules out during a call.
    let text = unsafe { libc::getenv(name.as_ptr()).as_ref().map(|text| CStr::from_ptr(text)) };
    text.filter(|text| !text.is_empty())
}
