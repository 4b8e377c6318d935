//! The errors of block codecs, saved and loaded for all elements of a run, raw or not.

use crate::{
    codec::plan::Run,
    cpu::numbers::{F32, Number, is_kept},
};

/// Writes the errors of a run; +0 if it is raw or no errors are kept.
///
/// # Safety
/// `kept` has the run's errors, if the state keeps any, and `errors` has a float32 for each element.
pub unsafe fn errors_of<E: Number>(run: &Run, kept: *const u8, errors: *mut f32) {
    for index in 0..run.elements as usize {
        // SAFETY: the caller promises the errors and as many float32; both may lie at any address.
        unsafe {
            let error = if is_kept::<E>() && !run.raw { E::load(kept, index) } else { 0.0 };
            F32::store(errors.cast(), index, error);
        }
    }
}

/// Keeps the errors of a run, rounded. Errors that are then not finite become +0. Returns true if there were any.
///
/// # Safety
/// `kept` has room for the run's errors, if the state keeps any.
pub unsafe fn keep<E: Number>(run: &Run, kept: *mut u8, error: impl Fn(usize) -> f32) -> bool {
    let mut nonfinite = false;
    if is_kept::<E>() && !run.raw {
        for index in 0..run.elements as usize {
            let error = E::round(error(index));
            nonfinite |= !error.is_finite();
            // SAFETY: the caller promises room for the errors of the run, at any address.
            unsafe { E::store(kept, index, if error.is_finite() { error } else { 0.0 }) };
        }
    }
    nonfinite
}
