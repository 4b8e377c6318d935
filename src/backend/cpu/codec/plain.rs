//! The plain form: a gradient and its error to bits and a scale, in two passes.

use std::{
    marker::PhantomData,
    slice,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    backend::{Address, cpu::dispatch::InstructionSet},
    error::Result,
    plan::{bits::bytes_for, codec::ScaleRule},
    tensor::View,
};

use super::{
    chunks::Chunks,
    environment::in_default,
    kernels::{self, Sink, Treatment},
    numbers::{Number, is_kept, with_numbers},
    sources::Plain,
    sum,
    tiles::{self, tiles_of},
};

/// Compresses `grad` plus `error` to signs and their scale, and updates `error`, unless the scale is not finite.
/// `workspace`: 8 bytes for each 65,536 elements at least, aligned to 8.
pub fn compress(
    grad: &View<'_>,
    error: Option<&View<'_>>,
    rule: ScaleRule,
    dst: &View<'_>,
    scale: &View<'_>,
    workspace: &View<'_>,
) -> Result<()> {
    compress_with(InstructionSet::chosen(), grad, error, rule, dst, scale, workspace);
    Ok(())
}

pub(super) fn compress_with(
    set: InstructionSet,
    grad: &View<'_>,
    error: Option<&View<'_>>,
    rule: ScaleRule,
    dst: &View<'_>,
    scale: &View<'_>,
    workspace: &View<'_>,
) {
    let elements = grad.elements();
    let used = bytes_for(elements) as usize;
    // SAFETY: a view of at least so many bytes; the bits come below.
    unsafe { dst.data().wrapping_add(used).write_bytes(0, dst.elements() as usize - used) };
    let partials: &[AtomicU64] = match tiles_of(elements) {
        0 => &[],
        // SAFETY: the workspace has room for them, aligned, and is this call's alone; any bytes are an integer.
        tiles => unsafe {
            workspace.data().write_bytes(0, 8 * tiles);
            slice::from_raw_parts(workspace.data().cast(), tiles)
        },
    };
    let job =
        Job { set, elements, grad: Address(grad.data()), error: error.map(|error| Address(error.data())), partials };
    let of_error = error.map(View::dtype);
    let found = with_numbers!(grad.dtype(), of_error, |G, E| job.compress::<G, E>(rule, dst));
    // SAFETY: a view of one float32, at any address.
    unsafe { scale.data().cast::<f32>().write_unaligned(found) };
}

struct Job<'a> {
    set: InstructionSet,
    elements: i64,
    grad: Address,
    error: Option<Address>,
    partials: &'a [AtomicU64],
}

impl Job<'_> {
    fn compress<G: Number, E: Number>(&self, rule: ScaleRule, dst: &View<'_>) -> f32 {
        let chunks = Chunks::whole(dst.data());
        let sizes = [size_of::<G::Bits>(), size_of::<E::Bits>()];
        let error_at =
            |first: usize| self.error.as_ref().map_or(std::ptr::null_mut(), |error| error.at(first * sizes[1]));
        let source = |first: i64| Plain::<G, E> {
            gradient: self.grad.at(first as usize * sizes[0]),
            error: error_at(first as usize),
            types: PhantomData,
        };
        let bytes = (sizes[0] + sizes[1]) as i64;
        tiles::for_each_of(self.elements, bytes, |tile| {
            let sink = Sink { kept: std::ptr::null_mut(), chunks, byte: tile.first / 8 };
            let treatment = Treatment { sum: Some(rule), zero: false };
            // SAFETY: the tile lies within the views, and the bits within that of their bytes.
            let outcome = unsafe { kernels::tile(self.set, &source(tile.first), &sink, treatment, tile.elements) };
            self.partials[tile.number].store(outcome.sum.to_bits(), Ordering::Relaxed);
        });
        let scale = in_default(|| sum::scale(rule, sum::of_tiles(self.partials), self.elements));
        if is_kept::<E>() && scale.is_finite() {
            tiles::for_each_of(self.elements, bytes + sizes[1] as i64, |tile| {
                let error = error_at(tile.first as usize);
                // SAFETY: the tile lies within the views.
                unsafe { kernels::error(self.set, &source(tile.first), error, scale, tile.elements) };
            });
        }
        scale
    }
}
