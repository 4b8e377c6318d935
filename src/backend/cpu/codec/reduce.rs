//! Reducing: one chunk of several payloads to a chunk for everybody.

use std::{marker::PhantomData, ptr, sync::atomic::Ordering};

use crate::{
    backend::{
        call::{Address, Received, Skip},
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
    Codec,
    chunks::{self, Chunks, scale_at},
    encode::sum_of,
    kernels::{self, Sink, Treatment},
    numbers::{Number, is_kept, round_scale, with_numbers},
    sources::{Parts, Source},
    state::{scale_in, turn},
    sum,
    tiles::Met,
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
        if nonfinite | (plan.blocks.is_none() && self.fold_parts(plan)) {
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
        self.make_parts::<E, _>(plan, 2 * inputs.payloads(), dst, |part| Parts {
            kept: part.kept,
            kept_scale: part.kept_scale,
            beta: plan.rules.beta,
            ..inputs.parts::<E>(part.run, part.byte)
        })
    }

    /// Writes bits, state and partial sums of what `source_of` makes of a piece of a part. `bytes`: what it reads of an
    /// element, but for what is kept. Tells whether anything was not finite.
    pub(super) fn make_parts<E: Number, C: Source<Kept = E>>(
        &self, plan: &CodecPlan, bytes: usize, dst: &View<'_>, source_of: impl Fn(&Piece<'_>) -> C + Sync,
    ) -> bool {
        let (valid, next) = self.buffers_of(self.server);
        let (valid, next) = (Address(valid), Address(next));
        let start = plan.held_by(plan.server.unwrap_or(0)).start;
        let chunks = Chunks::whole(dst.data().wrapping_add(plan.head as usize));
        let zero = plan.rules.policy == NonFinite::Zero;
        let (set, partials) = (self.set, &self.partials);
        let met = Met::default();
        self.server_tiles.for_each(&plan.servers, (2 * size_of::<E::Bits>() + bytes) as i64, |tile| {
            let run = &plan.servers[tile.run];
            let byte = run.place - start + tile.first / 8;
            let kept = run.state as usize + tile.first as usize * size_of::<E::Bits>();
            let source = source_of(&Piece {
                run,
                first: tile.first as usize,
                byte,
                kept: valid.at(if is_kept::<E>() { kept } else { 0 }),
                // SAFETY: the state has a scale a segment.
                kept_scale: unsafe { scale_in(plan, valid.at(0), 1, run.segment).read() },
            });
            let sink = Sink { kept: next.at(kept), chunks, byte };
            let treatment = Treatment { sum: sum_of(plan), zero };
            // SAFETY: the tile lies within a part, which every payload has, or the shard, and which has a place in both
            // states and in the chunk.
            let outcome = unsafe { kernels::tile(set, &source, &sink, treatment, tile.elements) };
            partials[tile.number].store(outcome.sum.to_bits(), Ordering::Relaxed);
            met.note(outcome.nonfinite);
        });
        met.any()
    }

    /// Writes bits. Parts lie side by side, so it is one poll of all of them; what fills up a part's last byte is nobody's
    /// vote.
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

    /// Makes the scales of the partial sums, and keeps them. Tells whether one is not finite.
    fn fold_parts(&self, plan: &CodecPlan) -> bool {
        let (_, next) = self.buffers_of(self.server);
        let mut nonfinite = false;
        for (number, run) in plan.servers.iter().enumerate() {
            let partials = self.server_tiles.of_run(number, &self.partials);
            let mut scale = match sum_of(plan) {
                Some(rule) => round_scale(plan, sum::scale(rule, sum::of_tiles(partials), run.elements)),
                None => 1.0,
            };
            if !scale.is_finite() {
                nonfinite = true;
                scale = if plan.rules.policy == NonFinite::Zero { 0.0 } else { scale };
            }
            // SAFETY: the state has a scale a segment.
            unsafe { scale_in(plan, next, 1, run.segment).write(scale) };
        }
        nonfinite
    }
}

/// A tile of a part, which a source is made for.
pub(super) struct Piece<'a> {
    pub run: &'a Run,
    /// The number of its first element in the part.
    pub first: usize,
    /// The number of its first byte of bits in the chunk.
    pub byte: i64,
    /// What was kept of it, and the scale that belongs to that.
    pub kept: *const u8,
    pub kept_scale: f32,
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
