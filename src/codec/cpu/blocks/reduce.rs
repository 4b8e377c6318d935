//! Reducing: chunks of several payloads to chunks for all ranks, at once or in halves.

use std::marker::PhantomData;

use crate::{
    codec::{
        call::Received,
        cpu::{Codec, SERVER, sources::Feedback, sum::Unit, tiles::Tile},
        plan::{CodecPlan, NonFinite, Run},
    },
    cpu::{
        InstructionSet,
        numbers::{F32, Nothing, Number, is_kept, with_numbers},
    },
    dlpack::Address,
};

use super::{
    decode::Reader,
    encode::{Encoder, Origin, gradient_alone},
    kernels,
    payload::{Coded, Payload, STEP},
};

/// The chunks that are reduced.
struct Inputs<'a> {
    plan: &'a CodecPlan,
    reader: Reader,
    received: Received,
    /// Number of the first chunk.
    number: usize,
}

/// Sum of the payloads' values of a tile of a part, plus the error.
struct Sums<'a, E> {
    inputs: &'a Inputs<'a>,
    run: &'a Run,
    /// Index of the tile's first element in the part.
    first: i64,
    kept: *const u8,
    types: PhantomData<E>,
}

impl<E: Number> Origin for Sums<'_, E> {
    unsafe fn form(&self, set: InstructionSet, first: usize, unit: &mut Unit, count: usize) -> bool {
        let Inputs { plan, reader, received, number } = self.inputs;
        let (mut values, mut coded) = (Unit([0.0; _]), Coded::new());
        let mut nonfinite = false;
        let zero = plan.rules.policy == NonFinite::Zero;
        unit.0[..count].fill(0.0);
        for payload in 0..received.payloads {
            let payload = Payload::new(plan, received.at(payload), *number);
            // SAFETY: every payload has these elements, and the processor has the set's instructions.
            nonfinite |= unsafe {
                reader.read(&payload, self.run, self.first + first as i64, count, &mut coded, &mut values);
                kernels::add(set, unit, &values, count, zero)
            };
        }
        let divisor = plan.rules.divisor(received.payloads);
        if divisor != 1.0 || is_kept::<E>() {
            let kept = self.kept.wrapping_add(first * size_of::<E::Bits>());
            // SAFETY: if errors are kept, `kept` has the errors of these elements.
            unsafe { kernels::finish::<E>(set, unit, count, divisor, kept, plan.rules.beta) };
        }
        nonfinite
    }
}

impl<'a> Inputs<'a> {
    fn sums<E>(&'a self, run: &'a Run, tile: &Tile, kept: *const u8) -> Sums<'a, E> {
        Sums { inputs: self, run, first: tile.first, kept, types: PhantomData }
    }
}

impl Codec {
    /// Reduces chunks of payloads from `number` on: writes blocks, raw elements and state. Returns true if a number was
    /// not finite.
    pub fn reduce_blocks(&self, plan: &CodecPlan, number: usize, received: Received, dst: *mut u8) -> bool {
        let inputs = self.inputs(plan, number, received);
        let encoder = Encoder::new(self.set, plan, Payload::new(plan, dst, number));
        with_numbers!(plan.rules.values, plan.rules.error, |_G, E| self.reduce_tiles::<E>(&inputs, &encoder))
    }

    fn reduce_tiles<E: Number>(&self, inputs: &Inputs<'_>, encoder: &Encoder<'_>) -> bool {
        self.for_each_tile::<E>(inputs.plan, SERVER, 2 * inputs.received.payloads, |run, tile, [old, new]| {
            // SAFETY: the tile lies within a part, which every payload has, and which has a place in the chunk. If the
            // part is not raw and errors are kept, it has a place in both states.
            unsafe {
                if run.raw {
                    encoder.raw_tile(run, tile, &inputs.sums::<Nothing>(run, tile, old))
                } else {
                    encoder.tile::<E>(run, tile, &inputs.sums::<E>(run, tile, old), old, new)
                }
            }
        })
    }

    /// Writes the sum or the mean of the payloads' values to the parts of a shard, an address per segment. Returns true
    /// if a payload has a value that is not finite.
    pub fn mean_of_blocks(&self, plan: &CodecPlan, number: usize, received: Received, shard: &[Address]) -> bool {
        let (set, inputs) = (self.set, self.inputs(plan, number, received));
        self.for_each_tile::<Nothing>(plan, SERVER, received.payloads * 2, |run, tile, [old, _]| {
            let (origin, mut unit) = (inputs.sums::<Nothing>(run, tile, old), Unit([0.0; _]));
            let dst = shard[run.segment].at(tile.first as usize * size_of::<f32>());
            let mut nonfinite = false;
            for first in (0..tile.elements).step_by(STEP) {
                let count = (tile.elements - first).min(STEP);
                // SAFETY: the tile lies within a part, which every payload and the shard have.
                unsafe {
                    nonfinite |= origin.form(set, first, &mut unit, count);
                    kernels::keep::<F32>(set, &unit, dst.add(first * size_of::<f32>()), count);
                }
            }
            nonfinite
        })
    }

    /// Encodes a shard, an address per segment, and writes the state. Returns true if a number was not finite.
    pub fn encode_blocks_of_shard(&self, plan: &CodecPlan, number: usize, shard: &[Address], dst: *mut u8) -> bool {
        let encoder = Encoder::new(self.set, plan, Payload::new(plan, dst, number));
        with_numbers!(plan.rules.values, plan.rules.error, |_G, E| self.shard_tiles::<E>(plan, &encoder, shard))
    }

    fn shard_tiles<E: Number>(&self, plan: &CodecPlan, encoder: &Encoder<'_>, shard: &[Address]) -> bool {
        let beta = plan.rules.beta;
        self.for_each_tile::<E>(plan, SERVER, size_of::<f32>(), |run, tile, [old, new]| {
            let gradient = shard[run.segment].at(tile.first as usize * size_of::<f32>());
            // SAFETY: the tile lies within a part, which the shard has, and which has a place in the chunk. If the part
            // is not raw and errors are kept, it has a place in both states.
            unsafe {
                if run.raw {
                    return encoder.raw_tile(run, tile, &gradient_alone::<F32>(gradient, [1.0; 2]));
                }
                // A number that is not finite stays until the error is added, as in the mean of `reduce`.
                let (factors, zero, types) = ([1.0; 2], false, PhantomData::<(F32, E)>);
                let origin = Feedback { gradient, kept: old, scale: 0.0, factors, beta, zero, types };
                encoder.tile::<E>(run, tile, &origin, old, new)
            }
        })
    }

    fn inputs<'a>(&self, plan: &'a CodecPlan, number: usize, received: Received) -> Inputs<'a> {
        Inputs { plan, reader: Reader::new(self.set, plan), received, number }
    }
}
