//! Reducing of ONEBIT and SIGN: bits of several payloads, or a shard, to the bits of a chunk.

use std::{marker::PhantomData, ptr};

use crate::{
    bits::{
        plan::bytes_for,
        signs::{cpu::vote_with, plan::Poll},
    },
    codec::{
        cpu::{
            Codec, SERVER,
            chunks::scale_at,
            inputs::Inputs,
            sources::{Feedback, Parts},
            state::turn,
        },
        plan::{CodecPlan, NonFinite, Run},
    },
    cpu::numbers::{F32, Nothing, Number},
    dlpack::{Address, View},
};

use super::kernels::{self, Values};

/// Returns the payloads' shares of a part, from a byte of the chunk on, without an error.
fn parts<E>(plan: &CodecPlan, inputs: &Inputs<'_>, run: &Run, byte: i64) -> Parts<E> {
    Parts {
        bits: inputs.bits(byte),
        scale: scale_at(inputs.first().at(0), run.segment).cast(),
        stride: inputs.received.apart as usize,
        payloads: inputs.payloads(),
        divisor: plan.rules.divisor(inputs.payloads()),
        kept: ptr::null(),
        kept_scale: 0.0,
        beta: 0.0,
        zero: plan.rules.policy == NonFinite::Zero,
        types: PhantomData,
    }
}

impl Codec {
    /// Writes bits, state and partial sums. Returns true if a number was not finite.
    pub fn add_up<E: Number>(&self, plan: &CodecPlan, inputs: &Inputs<'_>, dst: &View<'_>) -> bool {
        // The work on the bits counts as two bytes per payload.
        self.make_tiles::<E, _>(plan, SERVER, 2 * inputs.payloads(), dst, |part| Parts {
            kept: part.kept,
            kept_scale: part.kept_scale,
            beta: plan.rules.beta,
            ..parts::<E>(plan, inputs, part.run, part.byte)
        })
    }

    /// Writes the bits of the majority. Parts are contiguous, so one poll takes all of them. The padding bits of a
    /// part's last byte become 0.
    pub fn vote(&self, plan: &CodecPlan, inputs: &Inputs<'_>, dst: &View<'_>) {
        let behind = |part: &Run| part.place - inputs.start() + bytes_for(part.elements);
        let bytes = plan.servers.last().map_or(0, behind);
        let (valid, _) = self.buffers_of(self.server);
        // SAFETY: `valid` is a state of this codec.
        let turn = unsafe { turn(valid).read() };
        let voters = inputs.payloads() as u64;
        let turn = (inputs.start() as u64 % voters + turn % voters) % voters;
        let dst = dst.data().wrapping_add(plan.layout.scales_at as usize);
        vote_with(self.set, &Poll { voters, bytes, stride: inputs.received.apart, turn }, inputs.bits(0), dst);
        for part in plan.servers.iter().filter(|part| part.elements % 8 != 0) {
            // SAFETY: the chunk has all bytes of the part.
            unsafe { *dst.add(behind(part) as usize - 1) &= 0xff << (8 - part.elements % 8) };
        }
    }

    /// Writes the mean to a shard. Returns true if the share of a payload was not finite.
    pub fn add_up_without_error(&self, plan: &CodecPlan, inputs: &Inputs<'_>, shard: &[Address]) -> bool {
        let (set, start) = (self.set, inputs.start());
        let bytes = size_of::<f32>() + 2 * inputs.payloads();
        self.for_each_tile::<Nothing>(plan, SERVER, bytes, |run, tile, _| {
            let source = parts::<Nothing>(plan, inputs, run, run.place - start + tile.first / 8);
            let dst = shard[run.segment].at(tile.first as usize * size_of::<f32>());
            // SAFETY: the tile lies within a part, which every payload and the shard have.
            unsafe { kernels::write(set, &source, dst, tile.elements) }
        })
    }

    /// Writes the bits of a chunk to a shard, as +1 and -1 or as NaN.
    pub fn spread(&self, plan: &CodecPlan, inputs: &Inputs<'_>, chunk: &View<'_>, shard: &[Address]) {
        let (set, bits) = (self.set, Address(chunk.data().wrapping_add(plan.layout.scales_at as usize)));
        let (start, one) = (inputs.start(), plan.value_of_vote(1.0, inputs.flags));
        self.server_tiles.for_each(&plan.servers, size_of::<f32>() as i64, |tile| {
            let run = &plan.servers[tile.run];
            let bits = bits.at((run.place - start + tile.first / 8) as usize);
            let dst = shard[run.segment].at(tile.first as usize * size_of::<f32>());
            let values = Values::<F32> { plus: F32::narrow(one), minus: F32::narrow(-one) };
            // SAFETY: the tile lies within a part, which the chunk and the shard have.
            unsafe { kernels::set_values(set, bits, &values, dst, tile.elements) };
        });
    }

    /// Writes bits, state and partial sums of a shard plus the error. Returns true if a number was not finite.
    pub fn bits_of_shard<E: Number>(&self, plan: &CodecPlan, shard: &[Address], dst: &View<'_>) -> bool {
        self.make_tiles::<E, _>(plan, SERVER, size_of::<f32>(), dst, |part| Feedback::<F32, E> {
            gradient: shard[part.run.segment].at(part.first * size_of::<f32>()),
            kept: part.kept,
            scale: part.kept_scale,
            factors: [1.0; 2],
            beta: plan.rules.beta,
            // A number that is not finite stays until the error is added, as in the mean of `reduce`.
            zero: false,
            types: PhantomData,
        })
    }
}
