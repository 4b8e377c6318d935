//! Encoding of ONEBIT and SIGN: tiles of a gradient, or of reduced payloads, to bits, state and scales.

use std::sync::atomic::Ordering;

use crate::{
    codec::{
        cpu::{Codec, SERVER, WORKER, chunks::Chunks, sources::Source, state::scale_in, sum},
        plan::{CodecPlan, Kind, NonFinite, Run, ScaleRule},
    },
    cpu::numbers::{BF16, F16, F32, Number},
    dlpack::{Address, Dtype, View},
};

use super::kernels::{self, Sink, Treatment};

/// Returns the rule of the sum that the codec computes, if any.
pub fn sum_of(plan: &CodecPlan) -> Option<ScaleRule> {
    (plan.rules.kind == Kind::Onebit).then_some(plan.rules.scale)
}

impl Codec {
    /// Writes bits, state and partial sums of the source that `source_of` makes of each tile of a half. `bytes`: bytes
    /// per element that the source reads beside the errors. `dst`: a payload, or the chunk that is reduced. Returns
    /// true if a number was not finite.
    pub fn make_tiles<E: Number, C: Source<Kept = E>>(
        &self, plan: &CodecPlan, half: usize, bytes: usize, dst: &View<'_>, source_of: impl Fn(&Piece<'_>) -> C + Sync,
    ) -> bool {
        let (start, chunks) = match half {
            WORKER => (0, Chunks::of_payload(plan, dst.data())),
            _ => (
                plan.held_by(plan.server.unwrap_or(0)).start,
                Chunks::whole(dst.data().wrapping_add(plan.layout.scales_at as usize)),
            ),
        };
        let (state, _) = self.buffers_of(self.of_half(plan, half).0);
        let (state, set, partials) = (Address(state), self.set, &self.partials);
        let treatment = Treatment { sum: sum_of(plan), zero: plan.rules.policy == NonFinite::Zero };
        self.for_each_tile::<E>(plan, half, bytes, |run, tile, [kept, next]| {
            let byte = run.place - start + tile.first / 8;
            // SAFETY: the state has a scale per segment.
            let kept_scale = unsafe { scale_in(plan, state.at(0), half, run.segment).read() };
            let source = source_of(&Piece { run, first: tile.first as usize, byte, kept, kept_scale });
            let sink = Sink { kept: next, chunks, byte };
            // SAFETY: the tile lies within a segment, which has values, or within a part, which every payload or the
            // shard has. It has a place in both states, and in the payload or the chunk.
            let outcome = unsafe { kernels::tile(set, &source, &sink, treatment, tile.elements) };
            partials[tile.number].store(outcome.sum.to_bits(), Ordering::Relaxed);
            outcome.nonfinite
        })
    }

    /// Computes a half's scales from the partial sums into the next state. Returns true if one is not finite.
    pub fn fold(&self, plan: &CodecPlan, half: usize) -> bool {
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
            // SAFETY: the state has a scale per segment.
            unsafe { scale_in(plan, next, half, run.segment).write(scale) };
        }
        nonfinite
    }
}

/// Tile of a run, for which a source is made.
pub struct Piece<'a> {
    pub run: &'a Run,
    /// Index of the tile's first element in the run.
    pub first: usize,
    /// Index of the tile's first byte of bits in the payload, or in the chunk.
    pub byte: i64,
    /// Address of the tile's kept elements, and their scale.
    pub kept: *const u8,
    pub kept_scale: f32,
}

/// Rounds a scale to the dtype of results. A finite scale stays finite in float16.
fn round_scale(plan: &CodecPlan, scale: f32) -> f32 {
    match plan.rules.results {
        Dtype::F16 => F16::widen(F16::narrow_finite(scale)),
        Dtype::BF16 => BF16::round(scale),
        _ => F32::round(scale),
    }
}
