//! Encoding: gradients to a payload.

use std::{marker::PhantomData, sync::atomic::Ordering};

use crate::{
    backend::call::{Address, Skip},
    error::Result,
    plan::codec::{CodecPlan, Kind, NONFINITE, NonFinite, ScaleRule},
    tensor::View,
};

use super::{
    Codec,
    chunks::{self, Chunks},
    factor,
    kernels::{self, Sink, Treatment},
    numbers::{Number, is_kept, with_numbers},
    sources::Feedback,
    state::scale_in,
    sum,
    tiles::Met,
};

/// Which sum a codec makes, if any.
pub fn sum_of(plan: &CodecPlan) -> Option<ScaleRule> {
    (plan.rules.kind == Kind::Onebit).then_some(plan.rules.scale)
}

impl Codec {
    /// Encodes a gradient, an address a segment. `factors`: what gradients and errors are multiplied by.
    pub fn encode(
        &mut self, plan: &CodecPlan, values: &[Address], factors: [Option<&View<'_>>; 2], payload: &View<'_>,
    ) -> Result<()> {
        if self.worker.pending {
            self.commit(Skip::Never)?;
        }
        let factors = factors.map(factor);
        let nonfinite = match &plan.blocks {
            Some(blocks) => self.encode_blocks(plan, blocks, values, factors, payload.data()),
            None => {
                let nonfinite = with_numbers!(plan.rules.values, plan.rules.error, |G, E| {
                    self.encode_tiles::<G, E>(plan, values, factors, payload)
                });
                self.fold(plan) | nonfinite
            }
        };
        let flags = if nonfinite { NONFINITE } else { 0 };
        for chunk in 0..plan.n_chunks {
            let at = payload.data().wrapping_add(chunk * plan.stride as usize);
            // SAFETY: the payload has so many chunks.
            unsafe { chunks::write_frame(plan, at, chunk, flags, |part| self.scales[part.segment]) };
        }
        (self.worker.pending, self.begun) = (self.transactional, self.transactional);
        self.raise(flags);
        Ok(())
    }

    /// Writes bits, state and partial sums. Tells whether anything was not finite.
    fn encode_tiles<G: Number, E: Number>(
        &self, plan: &CodecPlan, values: &[Address], factors: [f32; 2], payload: &View<'_>,
    ) -> bool {
        let (valid, next) = self.buffers_of(self.worker);
        let (valid, next) = (Address(valid), Address(next));
        let chunks = Chunks::of_payload(plan, payload.data());
        let zero = plan.rules.policy == NonFinite::Zero;
        let (set, partials) = (self.set, &self.partials);
        let met = Met::default();
        let bytes = (size_of::<G::Bits>() + 2 * size_of::<E::Bits>()) as i64;
        self.worker_tiles.for_each(&plan.workers, bytes, |tile| {
            let run = &plan.workers[tile.run];
            let kept = run.state as usize + tile.first as usize * size_of::<E::Bits>();
            let source = Feedback::<G, E> {
                gradient: values[tile.run].at(tile.first as usize * size_of::<G::Bits>()),
                kept: valid.at(if is_kept::<E>() { kept } else { 0 }),
                // SAFETY: the state has a scale a segment.
                scale: unsafe { scale_in(plan, valid.at(0), 0, run.segment).read() },
                factors,
                beta: plan.rules.beta,
                zero,
                types: PhantomData,
            };
            let sink = Sink { kept: next.at(kept), chunks, byte: run.place + tile.first / 8 };
            let treatment = Treatment { sum: sum_of(plan), zero };
            // SAFETY: the tile lies within a segment, which has values and a place in both states and in the payload.
            let outcome = unsafe { kernels::tile(set, &source, &sink, treatment, tile.elements) };
            partials[tile.number].store(outcome.sum.to_bits(), Ordering::Relaxed);
            met.note(outcome.nonfinite);
        });
        met.any()
    }

    /// Makes the scales of the partial sums, and keeps them. Tells whether one is not finite.
    fn fold(&mut self, plan: &CodecPlan) -> bool {
        let (_, next) = self.buffers_of(self.worker);
        let mut nonfinite = false;
        for (number, run) in plan.workers.iter().enumerate() {
            let partials = self.worker_tiles.of_run(number, &self.partials);
            let mut scale = match sum_of(plan) {
                Some(rule) => sum::scale(rule, sum::of_tiles(partials), run.elements),
                None if run.elements > 0 => 1.0,
                None => 0.0,
            };
            if !scale.is_finite() {
                nonfinite = true;
                scale = if plan.rules.policy == NonFinite::Zero { 0.0 } else { scale };
            }
            self.scales[run.segment] = scale;
            // SAFETY: the state has a scale a segment.
            unsafe { scale_in(plan, next, 0, run.segment).write(scale) };
        }
        nonfinite
    }
}
