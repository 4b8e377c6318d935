//! Encoding: gradients to blocks, and the code that reducing shares with it.

use std::marker::PhantomData;

use crate::{
    codec::{
        cpu::{
            Codec, WORKER,
            sources::{FINITE, Feedback},
            sum::Unit,
            tiles::Tile,
        },
        plan::{CodecPlan, NonFinite, Run, layout::Layout},
    },
    cpu::{
        InstructionSet,
        numbers::{Nothing, Number, is_kept, with_numbers},
    },
    dlpack::Address,
};

use super::{
    coding::LIMIT,
    kernels::{self, Functions},
    payload::{Coded, Payload, STEP},
};

/// Source of c of a tile.
pub trait Origin {
    /// Writes c of `count` elements from index `first` of the tile. Returns true if an input is not finite.
    ///
    /// # Safety
    /// The elements are in the memory that the source was made of, and the processor has the set's instructions.
    unsafe fn form(&self, set: InstructionSet, first: usize, unit: &mut Unit, count: usize) -> bool;
}

impl<G: Number, E: Number> Origin for Feedback<G, E> {
    unsafe fn form(&self, set: InstructionSet, first: usize, unit: &mut Unit, count: usize) -> bool {
        // SAFETY: the caller promises the elements and the instructions.
        unsafe { kernels::form(set, self, first, unit, count) }
    }
}

/// Parameters of the encoding of tiles.
pub struct Encoder<'a> {
    set: InstructionSet,
    functions: Functions,
    layout: &'a Layout,
    payload: Payload<'a>,
    zero: bool,
}

impl<'a> Encoder<'a> {
    pub fn new(set: InstructionSet, plan: &'a CodecPlan, payload: Payload<'a>) -> Self {
        let functions = Functions::of(plan.rules.kind);
        Self { set, functions, layout: &plan.layout, payload, zero: plan.rules.policy == NonFinite::Zero }
    }

    /// Encodes a tile of a run that is not raw. `old`, `new`: addresses of the tile's errors in the valid and the next
    /// state. Returns true if a number was not finite.
    ///
    /// # Safety
    /// The tile's elements are in the memory of `origin`, and its errors in `old` and `new` if errors are kept. The
    /// payload has the run. Nothing else writes the tile's errors, blocks and raw elements.
    pub unsafe fn tile<E: Number>(
        &self, run: &Run, tile: &Tile, origin: &impl Origin, old: *const u8, new: *mut u8,
    ) -> bool {
        let (set, block) = (self.set, self.layout.format.place as usize);
        let (mut unit, mut coded) = (Unit([0.0; _]), Coded::new());
        let mut nonfinite = false;
        for first in (0..tile.elements).step_by(STEP) {
            let count = (tile.elements - first).min(STEP);
            let blocks = count.div_ceil(block);
            let kept_at = |index: usize| (first + index) * size_of::<E::Bits>();
            // SAFETY: all accesses are to the tile's memory, as the caller promises; this processor has the set.
            unsafe {
                nonfinite |= origin.form(set, first, &mut unit, count);
                if self.zero {
                    nonfinite |= kernels::settle(set, &mut unit, count, LIMIT, true);
                }
                unit.0[count..blocks * block].fill(0.0);
                let wrong = (self.functions.quantize)(set, &mut unit, blocks, &mut coded, is_kept::<E>());
                if wrong != 0 {
                    nonfinite = true;
                    coded.clear_behind(count, self.layout);
                    for index in (0..count).filter(|index| wrong >> (index / block) & 1 != 0) {
                        // The kept errors of a block that is not finite stay as they were.
                        unit.0[index] = if is_kept::<E>() { E::load(old.add(kept_at(0)), index) } else { 0.0 };
                    }
                }
                if is_kept::<E>() {
                    kernels::keep::<E>(set, &unit, new.add(kept_at(0)), count);
                }
                self.payload.write_blocks(run, tile.first + first as i64, count, &coded);
            }
        }
        nonfinite
    }

    /// Encodes a tile of a raw run. Returns true if a number was not finite.
    ///
    /// # Safety
    /// See `tile`.
    pub unsafe fn raw_tile(&self, run: &Run, tile: &Tile, origin: &impl Origin) -> bool {
        let (mut unit, mut nonfinite) = (Unit([0.0; _]), false);
        for first in (0..tile.elements).step_by(STEP) {
            let count = (tile.elements - first).min(STEP);
            // SAFETY: all accesses are to the tile's memory, as the caller promises; this processor has the set.
            unsafe {
                nonfinite |= origin.form(self.set, first, &mut unit, count);
                nonfinite |= kernels::settle(self.set, &mut unit, count, FINITE + 1, self.zero);
                self.payload.write_raws(run, tile.first + first as i64, count, &unit);
            }
        }
        nonfinite
    }
}

impl Codec {
    /// Writes blocks, raw elements and state. Returns true if a number was not finite.
    pub fn encode_blocks(&self, plan: &CodecPlan, values: &[Address], factors: [f32; 2], payload: *mut u8) -> bool {
        let encoder = Encoder::new(self.set, plan, Payload::new(plan, payload, 0));
        with_numbers!(plan.rules.values, plan.rules.error, |G, E| {
            self.encode_tiles_of_blocks::<G, E>(plan, &encoder, values, factors)
        })
    }

    fn encode_tiles_of_blocks<G: Number, E: Number>(
        &self, plan: &CodecPlan, encoder: &Encoder<'_>, values: &[Address], factors: [f32; 2],
    ) -> bool {
        let beta = plan.rules.beta;
        let bytes = size_of::<G::Bits>() + encoder.layout.format.bits as usize / 8;
        self.for_each_tile::<E>(plan, WORKER, bytes, |run, tile, [old, new]| {
            let gradient: *const u8 = values[run.segment].at(tile.first as usize * size_of::<G::Bits>());
            // SAFETY: the tile lies within a segment, which has values and a place in the payload. If the segment is
            // not raw and errors are kept, it has a place in both states.
            unsafe {
                if run.raw {
                    return encoder.raw_tile(run, tile, &gradient_alone::<G>(gradient, factors));
                }
                // The state keeps the error itself, so the scale that is subtracted is 0.
                let types = PhantomData::<(G, E)>;
                let origin = Feedback { gradient, kept: old, scale: 0.0, factors, beta, zero: encoder.zero, types };
                encoder.tile::<E>(run, tile, &origin, old, new)
            }
        })
    }
}

/// Returns the source of a raw segment. Numbers that are not finite stay until the factor has been applied.
pub fn gradient_alone<G: Number>(gradient: *const u8, factors: [f32; 2]) -> Feedback<G, Nothing> {
    let types = PhantomData;
    Feedback { gradient, kept: gradient, scale: 0.0, factors, beta: 0.0, zero: false, types }
}
