//! The scales of segments, in chunks and in states, and the errors that belong to them.

use std::fmt::Arguments;

use crate::{
    codec::{
        cpu::{chunks::scale_at, state::scale_in},
        plan::{CodecPlan, Kind, NonFinite, Run},
    },
    cpu::numbers::{F32, Number, is_kept, signed},
    dlpack::View,
    ffi::error::{Result, error},
};

/// Returns the parts of segments that a chunk holds, in order.
pub fn parts(plan: &CodecPlan, chunk: usize) -> impl Iterator<Item = Run> {
    let held = plan.held_by(chunk);
    let first = plan.workers.partition_point(|run| run.place + run.places() <= held.start);
    let runs = plan.workers[first..].iter().take_while(move |run| run.place < held.end);
    runs.filter_map(move |run| plan.part(run.segment, chunk))
}

/// Returns true if a scale is below zero, or -0.
fn is_negative(scale: f32) -> bool {
    scale.is_sign_negative() && !scale.is_nan()
}

/// Refuses a chunk with a scale that no codec of this plan writes.
///
/// # Safety
/// At `chunk` are `plan.stride()` bytes, aligned to 4.
pub unsafe fn check_chunk(plan: &CodecPlan, who: Arguments<'_>, chunk: *mut u8, number: usize) -> Result<()> {
    let mut parts = parts(plan, number).peekable();
    for segment in 0..plan.workers.len() {
        let holds = parts.next_if(|part| part.segment == segment).is_some();
        // SAFETY: `chunk` has a scale for each segment.
        let scale = f32::from_bits(unsafe { scale_at(chunk, segment).read() });
        let expected = match plan.rules.kind {
            _ if !holds => Some(0.0f32),
            Kind::Sign => Some(1.0),
            _ => None,
        };
        match expected {
            Some(expected) if scale.to_bits() != expected.to_bits() => {
                return Err(error!(Corrupt, "{who}: scale {expected} of segment {segment} expected, got {scale:?}"));
            }
            None if is_negative(scale) => {
                return Err(error!(Corrupt, "{who}: scale {scale:?} of segment {segment} is negative"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Refuses scales that no codec of this plan has, in half 0 or 1 of a state.
pub fn check_half(plan: &CodecPlan, half: usize, state: &View<'_>) -> Result<()> {
    let mut runs = [&plan.workers, &plan.servers][half].iter().peekable();
    for segment in 0..plan.workers.len() {
        let at = scale_in(plan, state.data(), half, segment);
        // SAFETY: `state` has the bytes of a state, with a scale per segment in each half, at any address.
        let scale = unsafe { at.read_unaligned() };
        let run = runs.next_if(|run| run.segment == segment);
        // Scales are 0 in a new state (of a SIGN codec, too) and after errors were loaded.
        let is_known = scale.to_bits() == 0
            || run.is_some_and(|run| run.elements > 0)
                && match plan.rules.kind {
                    Kind::Sign => scale == 1.0,
                    _ => !is_negative(scale) && (plan.rules.policy == NonFinite::Propagate || scale.is_finite()),
                };
        if !is_known {
            let half = ["a worker", "a server"][half];
            return Err(error!(
                Corrupt,
                "{}: scale {scale:?} of segment {segment}, which the state of such {half} never has",
                state.name()
            ));
        }
    }
    Ok(())
}

/// Writes the errors of a run.
///
/// # Safety
/// `scale` and the `count` elements at `kept` belong to a state, and `errors` has `count` float32.
pub unsafe fn errors_of<E: Number>(scale: *mut f32, kept: *const u8, errors: *mut f32, count: usize) {
    // SAFETY: the caller promises a scale, `count` elements of a state, and as many float32.
    unsafe {
        let scale = scale.read();
        for index in 0..count {
            let kept = E::load(kept, index);
            let error = if is_kept::<E>() { kept - signed(scale, kept) } else { 0.0 };
            F32::store(errors.cast(), index, error);
        }
    }
}

/// Keeps the errors of a run. Errors that are not finite become +0. Returns true if there were any.
///
/// # Safety
/// `scale` and the `count` elements at `kept` belong to a state.
pub unsafe fn keep<E: Number>(scale: *mut f32, kept: *mut u8, count: usize, error: &dyn Fn(usize) -> f32) -> bool {
    let mut nonfinite = false;
    if !is_kept::<E>() {
        return nonfinite;
    }
    // SAFETY: the caller promises a scale and `count` elements of a state.
    unsafe {
        scale.write(0.0);
        for index in 0..count {
            let error = E::round(error(index));
            nonfinite |= !error.is_finite();
            E::store(kept, index, if error.is_finite() { error } else { 0.0 });
        }
    }
    nonfinite
}
