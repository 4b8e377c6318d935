//! The errors of block codecs, out and in: of all elements of a run, raw or not.

use crate::{
    codec::plan::Run,
    cpu::numbers::{F32, Number, is_kept},
};

/// Writes the errors of a run, of which `kept` has those that are kept: +0 for a raw one.
pub fn errors_of<E: Number>(run: &Run, kept: *const u8, errors: *mut f32) {
    for index in 0..run.elements as usize {
        // SAFETY: a state's errors, unless it has none of the run, and a view of as many float32, at any address.
        unsafe {
            let error = if is_kept::<E>() && !run.raw { E::load(kept, index) } else { 0.0 };
            F32::store(errors.cast(), index, error);
        }
    }
}

/// Keeps errors of a run, rounded; what is not finite then becomes +0. Returns whether anything was.
pub fn keep<E: Number>(run: &Run, kept: *mut u8, error: impl Fn(usize) -> f32) -> bool {
    let mut nonfinite = false;
    if is_kept::<E>() && !run.raw {
        for index in 0..run.elements as usize {
            let error = E::round(error(index));
            nonfinite |= !error.is_finite();
            // SAFETY: as in `errors_of`.
            unsafe { E::store(kept, index, if error.is_finite() { error } else { 0.0 }) };
        }
    }
    nonfinite
}
