//! Reducing: one chunk of several payloads to a chunk for everybody.

use std::{marker::PhantomData, ptr};

use crate::{
    backend::{
        call::{Received, Skip},
        cpu::signs,
    },
    error::{Error, Result},
    plan::{
        bits::bytes_for,
        codec::{CORRUPT, CodecPlan, Kind, NONFINITE, NonFinite, Run},
        signs::Poll,
    },
    tensor::View,
};

use super::{
    Codec, SERVER,
    chunks::{self, scale_at},
    numbers::{Number, with_numbers},
    sources::Parts,
    state::{scale_in, turn},
};

impl Codec {
    /// Reduces chunks of each payload to as many in `dst`. If one is corrupt, `dst` says so, and the state stays as it was.
    pub fn reduce(&mut self, plan: &CodecPlan, received: Received, dst: &View<'_>) -> Result<()> {
        let Some(number) = plan.server else { return Ok(()) }; // which the operation has refused
        self.commit_pending_reduce()?;
        let (inputs, flags) = match Inputs::of(plan, received, number) {
            Ok(sound) => sound,
            Err(failure) => return Err(self.refuse(plan, number, dst, failure)),
        };
        let nonfinite = match &plan.blocks {
            Some(blocks) => self.reduce_blocks(plan, blocks, number, received, dst.data()),
            None if plan.rules.kind == Kind::Sign => {
                self.vote(&inputs, dst);
                false
            }
            None => with_numbers!(plan.rules.values, plan.rules.error, |_G, E| self.add_up::<E>(&inputs, dst)),
        };
        self.finish_chunks(plan, number, flags, nonfinite, dst);
        Ok(())
    }

    /// As an encode does with a step of its own that is pending.
    pub(super) fn commit_pending_reduce(&mut self) -> Result<()> {
        if self.server.pending { self.commit(Skip::Never) } else { Ok(()) }
    }

    /// Makes scales of the sums, and all of the chunks but their bits; goes on to the next turn.
    pub(super) fn finish_chunks(
        &mut self, plan: &CodecPlan, number: usize, mut flags: u32, nonfinite: bool, dst: &View<'_>,
    ) {
        let (valid, next) = self.buffers_of(self.server);
        // SAFETY: both are states.
        unsafe { turn(next).write(turn(valid).read().wrapping_add(1)) };
        if nonfinite | (plan.blocks.is_none() && self.fold(plan, SERVER)) {
            flags |= NONFINITE;
        }
        let scale_of = |part: &Run| {
            // SAFETY: the state has a scale a segment.
            unsafe { scale_in(plan, next, 1, part.segment).read() }
        };
        for index in 0..plan.server_chunks {
            // SAFETY: the view has as many chunks.
            unsafe { chunks::write_frame(plan, chunk_of(plan, dst, index), number + index, flags, scale_of) };
        }
        (self.server.pending, self.begun) = (self.transactional, self.transactional);
        self.raise(flags);
    }

    /// Says in `dst` that it was made of a corrupt chunk. A step has begun all the same: a GPU's host cannot know better.
    fn refuse(&mut self, plan: &CodecPlan, number: usize, dst: &View<'_>, failure: Error) -> Error {
        for index in 0..plan.server_chunks {
            let chunk = chunk_of(plan, dst, index);
            // SAFETY: the view has as many chunks.
            unsafe {
                chunk.write_bytes(0, plan.stride as usize);
                chunks::write_frame(plan, chunk, number + index, CORRUPT, |_| 0.0);
            }
        }
        self.raise(CORRUPT);
        self.begun = self.transactional;
        failure
    }

    /// Writes bits, state and partial sums. Tells whether anything was not finite.
    fn add_up<E: Number>(&self, inputs: &Inputs<'_>, dst: &View<'_>) -> bool {
        let plan = inputs.plan;
        // Two bytes a payload, for the work with its bits.
        self.make_tiles::<E, _>(plan, SERVER, 2 * inputs.payloads(), dst, |part| Parts {
            kept: part.kept,
            kept_scale: part.kept_scale,
            beta: plan.rules.beta,
            ..inputs.parts::<E>(part.run, part.byte)
        })
    }

    /// Writes bits. Parts lie side by side, so one vote covers all of them; padding of a part's last byte is ignored.
    pub(super) fn vote(&self, inputs: &Inputs<'_>, dst: &View<'_>) {
        let plan = inputs.plan;
        let behind = |part: &Run| part.place - inputs.start + bytes_for(part.elements);
        let bytes = plan.servers.last().map_or(0, behind);
        let (valid, _) = self.buffers_of(self.server);
        // SAFETY: a state.
        let turn = unsafe { turn(valid).read() };
        let voters = inputs.payloads() as u64;
        let turn = (inputs.start as u64 % voters + turn % voters) % voters;
        let dst = dst.data().wrapping_add(plan.head as usize);
        signs::vote_with(self.set, &Poll { voters, bytes, stride: inputs.received.apart, turn }, inputs.bits(0), dst);
        for part in plan.servers.iter().filter(|part| part.elements % 8 != 0) {
            // SAFETY: the chunk has all bytes of the part.
            unsafe { *dst.add(behind(part) as usize - 1) &= 0xff << (8 - part.elements % 8) };
        }
    }
}

/// Where one of the chunks is that are written.
fn chunk_of(plan: &CodecPlan, dst: &View<'_>, index: usize) -> *mut u8 {
    dst.data().wrapping_add(index * plan.stride as usize)
}

/// The chunks that are reduced.
pub(super) struct Inputs<'a> {
    plan: &'a CodecPlan,
    received: Received,
    /// The number of the chunk's first byte.
    start: i64,
}

impl<'a> Inputs<'a> {
    /// Chunks of several payloads, from `number` on, and the flags that they carry. Refuses one that is corrupt.
    pub fn of(plan: &'a CodecPlan, received: Received, number: usize) -> Result<(Self, u32)> {
        let mut flags = 0;
        for payload in 0..received.payloads {
            let who = format_args!("{}[{payload}]", received.name);
            for index in 0..plan.server_chunks {
                let chunk = received.at(payload).wrapping_add(index * plan.stride as usize);
                // SAFETY: every payload has so many chunks there.
                flags |= unsafe { chunks::check(plan, who, chunk, number + index) }?;
            }
        }
        Ok((Self { plan, received, start: plan.held_by(number).start }, flags))
    }

    pub fn payloads(&self) -> usize {
        self.received.payloads
    }

    /// What they have of a part from a byte of the chunk on, without an error.
    pub fn parts<E>(&self, run: &Run, byte: i64) -> Parts<E> {
        Parts {
            bits: self.bits(byte),
            scale: scale_at(self.received.at(0), run.segment).cast(),
            stride: self.received.apart as usize,
            payloads: self.payloads(),
            kept: ptr::null(),
            kept_scale: 0.0,
            beta: 0.0,
            zero: self.plan.rules.policy == NonFinite::Zero,
            types: PhantomData,
        }
    }

    /// A byte of the first payload's bits, counted from the chunk's first.
    fn bits(&self, byte: i64) -> *mut u8 {
        self.received.first.at((self.plan.head + byte) as usize)
    }
}
