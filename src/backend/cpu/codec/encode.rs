//! Encoding: gradients to a payload.

use std::{marker::PhantomData, sync::atomic::Ordering};

use crate::{
    backend::call::{Address, Skip},
    error::Result,
    plan::codec::{CodecPlan, Kind, NONFINITE, NonFinite, Run, ScaleRule},
    tensor::View,
};

use super::{
    Codec, Half, SERVER, WORKER,
    chunks::{self, Chunks},
    factor,
    kernels::{self, Sink, Treatment},
    numbers::{Number, is_kept, round_scale, with_numbers},
    sources::{Feedback, Source},
    state::scale_in,
    sum,
    tiles::{Met, Tile, Tiles},
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
        let (factors, size) = (factors.map(factor), plan.rules.values.size);
        let nonfinite = match &plan.blocks {
            Some(blocks) => self.encode_blocks(plan, blocks, values, factors, payload.data()),
            None => {
                let nonfinite = with_numbers!(plan.rules.values, plan.rules.error, |G, E| {
                    self.make_tiles::<E, _>(plan, WORKER, size, payload, |piece| Feedback::<G, E> {
                        gradient: values[piece.run.segment].at(piece.first * size),
                        kept: piece.kept,
                        scale: piece.kept_scale,
                        factors,
                        beta: plan.rules.beta,
                        zero: plan.rules.policy == NonFinite::Zero,
                        types: PhantomData,
                    })
                });
                let nonfinite = self.fold(plan, WORKER) | nonfinite;
                let (_, next) = self.buffers_of(self.worker);
                for (segment, scale) in self.scales.iter_mut().enumerate() {
                    // SAFETY: the state has a scale a segment.
                    *scale = unsafe { scale_in(plan, next, WORKER, segment).read() };
                }
                nonfinite
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

    /// The runs of a half of the state and their tiles.
    fn of_half<'a>(&'a self, plan: &'a CodecPlan, half: usize) -> (Half, &'a Tiles, &'a [Run]) {
        match half {
            WORKER => (self.worker, &self.worker_tiles, &plan.workers),
            _ => (self.server, &self.server_tiles, &plan.servers),
        }
    }

    /// Calls `work` with each tile of each run of a half, and where its elements are kept, now and from now on. `bytes`: what
    /// is touched of an element beside them. Tells whether it ever returned true.
    pub(super) fn for_each_tile<E: Number>(
        &self, plan: &CodecPlan, half: usize, bytes: usize, work: impl Fn(&Run, &Tile, [*mut u8; 2]) -> bool + Sync,
    ) -> bool {
        let (valid, tiles, runs) = self.of_half(plan, half);
        let (valid, next) = self.buffers_of(valid);
        let (valid, next) = (Address(valid), Address(next));
        let met = Met::default();
        tiles.for_each(runs, (2 * size_of::<E::Bits>() + bytes) as i64, |tile| {
            let run = &runs[tile.run];
            let kept = run.state as usize + tile.first as usize * size_of::<E::Bits>();
            met.note(work(run, &tile, [valid.at(if is_kept::<E>() { kept } else { 0 }), next.at(kept)]));
        });
        met.any()
    }

    /// Writes bits, state and partial sums of what `source_of` makes of each tile of a half. `bytes`: what it reads of an
    /// element, but for what is kept. `dst`: a payload, or the chunk that is reduced. Tells whether anything was not
    /// finite.
    pub(super) fn make_tiles<E: Number, C: Source<Kept = E>>(
        &self, plan: &CodecPlan, half: usize, bytes: usize, dst: &View<'_>, source_of: impl Fn(&Piece<'_>) -> C + Sync,
    ) -> bool {
        let (start, chunks) = match half {
            WORKER => (0, Chunks::of_payload(plan, dst.data())),
            _ => (
                plan.held_by(plan.server.unwrap_or(0)).start,
                Chunks::whole(dst.data().wrapping_add(plan.head as usize)),
            ),
        };
        let (state, _) = self.buffers_of(self.of_half(plan, half).0);
        let (state, set, partials) = (Address(state), self.set, &self.partials);
        let treatment = Treatment { sum: sum_of(plan), zero: plan.rules.policy == NonFinite::Zero };
        self.for_each_tile::<E>(plan, half, bytes, |run, tile, [kept, next]| {
            let byte = run.place - start + tile.first / 8;
            // SAFETY: the state has a scale a segment.
            let kept_scale = unsafe { scale_in(plan, state.at(0), half, run.segment).read() };
            let source = source_of(&Piece { run, first: tile.first as usize, byte, kept, kept_scale });
            let sink = Sink { kept: next, chunks, byte };
            // SAFETY: the tile lies within a segment, which has values, or within a part, which every payload has, or the
            // shard; and it has a place in both states and in the payload, or in the chunk.
            let outcome = unsafe { kernels::tile(set, &source, &sink, treatment, tile.elements) };
            partials[tile.number].store(outcome.sum.to_bits(), Ordering::Relaxed);
            outcome.nonfinite
        })
    }

    /// Makes the scales of the partial sums of a half, and keeps them. Tells whether one is not finite.
    pub(super) fn fold(&self, plan: &CodecPlan, half: usize) -> bool {
        let mut nonfinite = false;
        let (valid, tiles, runs) = self.of_half(plan, half);
        let (_, next) = self.buffers_of(valid);
        for (number, run) in runs.iter().enumerate() {
            let partials = tiles.of_run(number, &self.partials);
            let mut scale = match sum_of(plan) {
                Some(rule) => sum::scale(rule, sum::of_tiles(partials), run.elements),
                None if run.elements > 0 => 1.0,
                None => 0.0,
            };
            if half == SERVER {
                scale = round_scale(plan, scale);
            }
            if !scale.is_finite() {
                nonfinite = true;
                scale = if plan.rules.policy == NonFinite::Zero { 0.0 } else { scale };
            }
            // SAFETY: the state has a scale a segment.
            unsafe { scale_in(plan, next, half, run.segment).write(scale) };
        }
        nonfinite
    }
}

/// A tile of a run, which a source is made for.
pub(super) struct Piece<'a> {
    pub run: &'a Run,
    /// The number of its first element in the run.
    pub first: usize,
    /// The number of its first byte of bits in the payload, or in the chunk.
    pub byte: i64,
    /// What was kept of it, and the scale that belongs to that.
    pub kept: *const u8,
    pub kept_scale: f32,
}
