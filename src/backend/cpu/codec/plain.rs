//! The plain form: a gradient and its error to bits and a scale, in two passes.

use std::{
    marker::PhantomData,
    slice,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    backend::{
        call::{Address, Compression},
        cpu::{dispatch::InstructionSet, memory},
    },
    plan::{bits::bytes_for, codec::ScaleRule},
    tensor::View,
};

use super::{
    chunks::Chunks,
    kernels::{self, Sink, Treatment},
    numbers::{Number, is_kept, with_numbers},
    sources::Plain,
    sum,
    tiles::{self, tiles_of},
};

/// Compresses a gradient plus its error to signs and their scale. The workspace has 8 bytes for each 65,536 elements at
/// least, aligned to 8.
pub fn compress(call: &Compression<'_>) {
    compress_with(InstructionSet::chosen(), call);
}

pub(super) fn compress_with(set: InstructionSet, call: &Compression<'_>) {
    let Compression { grad, dst, scale, workspace, .. } = call;
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
    let job = Job::of(set, call);
    with_numbers!(grad.dtype(), call.error.map(View::dtype), |G, E| job.pack::<G, E>(call.rule, dst, partials));
    let found = sum::scale(call.rule, sum::of_tiles(partials), elements);
    // SAFETY: a view of one float32, at any address.
    unsafe { scale.data().cast::<f32>().write_unaligned(found) };
}

/// Writes what the signs and their scale, which `compress` has written, have lost to the error, unless the scale is not
/// finite.
pub fn carry(call: &Compression<'_>) {
    carry_with(InstructionSet::chosen(), call);
}

pub(super) fn carry_with(set: InstructionSet, call: &Compression<'_>) {
    let scale = memory::read(call.scale);
    if scale.is_finite() {
        let job = Job::of(set, call);
        with_numbers!(call.grad.dtype(), call.error.map(View::dtype), |G, E| job.carry::<G, E>(scale));
    }
}

struct Job {
    set: InstructionSet,
    elements: i64,
    grad: Address,
    error: Option<Address>,
}

impl Job {
    fn of(set: InstructionSet, call: &Compression<'_>) -> Self {
        let error = call.error.map(|error| Address(error.data()));
        Self { set, elements: call.grad.elements(), grad: Address(call.grad.data()), error }
    }

    fn error_at<E: Number>(&self, first: i64) -> *mut u8 {
        self.error.map_or(std::ptr::null_mut(), |error| error.at(first as usize * size_of::<E::Bits>()))
    }

    fn source<G: Number, E: Number>(&self, first: i64) -> Plain<G, E> {
        Plain {
            gradient: self.grad.at(first as usize * size_of::<G::Bits>()),
            error: self.error_at::<E>(first),
            types: PhantomData,
        }
    }

    /// Writes bits and the sums of tiles.
    fn pack<G: Number, E: Number>(&self, rule: ScaleRule, dst: &View<'_>, partials: &[AtomicU64]) {
        let chunks = Chunks::whole(dst.data());
        let bytes = size_of::<G::Bits>() + size_of::<E::Bits>();
        tiles::for_each_of(self.elements, bytes as i64, |tile| {
            let sink = Sink { kept: std::ptr::null_mut(), chunks, byte: tile.first / 8 };
            let treatment = Treatment { sum: Some(rule), zero: false };
            let source = self.source::<G, E>(tile.first);
            // SAFETY: the tile lies within the views, and the bits within that of their bytes.
            let outcome = unsafe { kernels::tile(self.set, &source, &sink, treatment, tile.elements) };
            partials[tile.number].store(outcome.sum.to_bits(), Ordering::Relaxed);
        });
    }

    /// Writes the error.
    fn carry<G: Number, E: Number>(&self, scale: f32) {
        if !is_kept::<E>() {
            return;
        }
        let bytes = size_of::<G::Bits>() + 2 * size_of::<E::Bits>();
        tiles::for_each_of_backwards(self.elements, bytes as i64, |tile| {
            let (source, error) = (self.source::<G, E>(tile.first), self.error_at::<E>(tile.first));
            // SAFETY: the tile lies within the views.
            unsafe { kernels::error(self.set, &source, error, scale, tile.elements) };
        });
    }
}
