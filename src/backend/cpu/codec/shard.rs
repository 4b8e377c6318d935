//! The two halves of reducing, with a shard of float32 between them: the mean of what payloads say, and the chunk that
//! is made of a shard and the error.

use std::marker::PhantomData;

use crate::{
    backend::call::{Address, Received},
    error::Result,
    plan::codec::{CORRUPT, CodecPlan, Kind, NONFINITE},
    tensor::View,
};

use super::{
    Codec, SERVER,
    kernels::{self, Values},
    numbers::{F32, Nothing, Number, with_numbers},
    reduce::Inputs,
    sources::Feedback,
};

impl Codec {
    /// Writes the mean (or sum) of `chunks`, one a payload, or the majority as +1 and -1, to the parts of a shard, an address a
    /// segment. If a chunk is corrupt, nothing is written. `room`: for a chunk. The state is only read.
    pub fn mean(&mut self, plan: &CodecPlan, chunks: &View<'_>, room: &View<'_>, shard: &[Address]) -> Result<()> {
        let Some(number) = plan.server else { return Ok(()) }; // which the operation has refused
        let received = Received::of(chunks, plan.stride);
        let (inputs, flags) = Inputs::of(plan, received, number).inspect_err(|_| self.raise(CORRUPT))?;
        let nonfinite = match &plan.blocks {
            Some(blocks) => self.mean_of_blocks(plan, blocks, number, received, shard),
            None if plan.rules.kind == Kind::Sign => {
                self.vote(&inputs, room);
                self.spread(plan, number, room, shard);
                false
            }
            None => self.add_up_without_error(plan, number, &inputs, shard),
        };
        self.raise(flags | if nonfinite { NONFINITE } else { 0 });
        Ok(())
    }

    /// Tells whether a payload's share was not finite.
    fn add_up_without_error(&self, plan: &CodecPlan, number: usize, inputs: &Inputs<'_>, shard: &[Address]) -> bool {
        let (set, start) = (self.set, plan.held_by(number).start);
        let bytes = size_of::<f32>() + 2 * inputs.payloads();
        self.for_each_tile::<Nothing>(plan, SERVER, bytes, |run, tile, _| {
            let source = inputs.parts::<Nothing>(run, run.place - start + tile.first / 8);
            let dst = shard[run.segment].at(tile.first as usize * size_of::<f32>());
            // SAFETY: the tile lies within a part, which every payload and the shard have.
            unsafe { kernels::write(set, &source, dst, tile.elements) }
        })
    }

    /// Makes values of the bits of a chunk.
    fn spread(&self, plan: &CodecPlan, number: usize, chunk: &View<'_>, shard: &[Address]) {
        let (set, bits) = (self.set, Address(chunk.data().wrapping_add(plan.head as usize)));
        let start = plan.held_by(number).start;
        self.server_tiles.for_each(&plan.servers, size_of::<f32>() as i64, |tile| {
            let run = &plan.servers[tile.run];
            let bits = bits.at((run.place - start + tile.first / 8) as usize);
            let dst = shard[run.segment].at(tile.first as usize * size_of::<f32>());
            let values = Values::<F32> { plus: F32::narrow(1.0), minus: F32::narrow(-1.0) };
            // SAFETY: the tile lies within a part, which the chunk and the shard have.
            unsafe { kernels::set_values(set, bits, &values, dst, tile.elements) };
        });
    }

    /// Makes the chunk of a shard and the error, as `reduce` does of the mean.
    pub fn encode_shard(&mut self, plan: &CodecPlan, shard: &[Address], dst: &View<'_>) -> Result<()> {
        let Some(number) = plan.server else { return Ok(()) }; // which the operation has refused
        self.commit_pending_reduce()?;
        let nonfinite = if let Some(blocks) = &plan.blocks {
            self.encode_blocks_of_shard(plan, blocks, number, shard, dst.data())
        } else {
            with_numbers!(plan.rules.values, plan.rules.error, |_G, E| {
                self.make_tiles::<E, _>(plan, SERVER, size_of::<f32>(), dst, |part| Feedback::<F32, E> {
                    gradient: shard[part.run.segment].at(part.first * size_of::<f32>()),
                    kept: part.kept,
                    scale: part.kept_scale,
                    factors: [1.0; 2],
                    beta: plan.rules.beta,
                    // What is not finite stays until the error is added, as the mean does in `reduce`.
                    zero: false,
                    types: PhantomData,
                })
            })
        };
        self.finish_chunks(plan, number, 0, nonfinite, dst);
        Ok(())
    }
}
