//! Reducing: one chunk of several payloads to a chunk for everybody.

use std::{marker::PhantomData, sync::atomic::Ordering};

use crate::{
    backend::{Address, Skip, cpu::signs},
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
    environment::in_default,
    kernels::{self, Sink, Treatment},
    numbers::{Number, is_kept, round_scale, with_numbers},
    sources::Parts,
    state::{scale_in, turn},
    sum,
    tiles::Met,
};

impl Codec {
    /// Reduces `chunks`, one a payload, to `dst`. If one is corrupt, `dst` says so, and the state stays as it was.
    pub fn reduce(&mut self, plan: &CodecPlan, chunks: &View<'_>, dst: &View<'_>) -> Result<()> {
        let Some(number) = plan.server else { return Ok(()) }; // which the operation has refused
        if self.server.pending {
            self.commit(Skip::Never)?;
        }
        let payloads = (chunks.elements() / plan.stride) as usize;
        let mut flags = 0;
        for payload in 0..payloads {
            let chunk = chunks.data().wrapping_add(payload * plan.stride as usize);
            // SAFETY: the view has so many chunks.
            match unsafe { chunks::check(plan, format_args!("{}[{payload}]", chunks.name()), chunk, number) } {
                Ok(carried) => flags |= carried,
                Err(failure) => return Err(self.refuse(plan, number, dst, failure)),
            }
        }
        let inputs = Inputs { plan, first: Address(chunks.data()), payloads, start: plan.held_by(number).start };
        let nonfinite = if plan.rules.kind == Kind::Sign {
            self.vote(&inputs, dst);
            false
        } else {
            with_numbers!(plan.rules.values, plan.rules.error, |_G, E| self.add_up::<E>(&inputs, dst))
        };
        let (valid, next) = self.buffers_of(self.server);
        // SAFETY: both are states.
        unsafe { turn(next).write(turn(valid).read().wrapping_add(1)) };
        if in_default(|| self.fold_parts(plan)) | nonfinite {
            flags |= NONFINITE;
        }
        let scale_of = |part: &Run| {
            // SAFETY: the state has a scale a segment.
            unsafe { scale_in(plan, next, 1, part.segment).read() }
        };
        // SAFETY: the view is a chunk.
        unsafe { chunks::write_frame(plan, dst.data(), number, flags, scale_of) };
        self.server.pending = self.transactional;
        self.raise(flags);
        Ok(())
    }

    /// Says in `dst` that it was made of a corrupt chunk.
    fn refuse(&mut self, plan: &CodecPlan, number: usize, dst: &View<'_>, failure: Error) -> Error {
        // SAFETY: the view is a chunk.
        unsafe {
            dst.data().write_bytes(0, plan.stride as usize);
            chunks::write_frame(plan, dst.data(), number, CORRUPT, |_| 0.0);
        }
        self.raise(CORRUPT);
        failure
    }

    /// Writes bits, state and partial sums. Tells whether anything was not finite.
    fn add_up<E: Number>(&self, inputs: &Inputs<'_>, dst: &View<'_>) -> bool {
        let plan = inputs.plan;
        let (valid, next) = self.buffers_of(self.server);
        let (valid, next) = (Address(valid), Address(next));
        let chunks = Chunks::whole(dst.data().wrapping_add(plan.head as usize));
        let zero = plan.rules.policy == NonFinite::Zero;
        let (set, partials) = (self.set, &self.partials);
        let met = Met::default();
        // Two bytes a payload, for the work with its bits.
        let bytes = (2 * size_of::<E::Bits>() + 2 * inputs.payloads) as i64;
        self.server_tiles.for_each(&plan.servers, bytes, |tile| {
            let run = &plan.servers[tile.run];
            let byte = run.byte - inputs.start + tile.first / 8;
            let kept = run.state as usize + tile.first as usize * size_of::<E::Bits>();
            let source = Parts::<E> {
                bits: inputs.bits(byte),
                scale: scale_at(inputs.first.at(0), run.segment).cast(),
                stride: plan.stride as usize,
                payloads: inputs.payloads,
                kept: valid.at(if is_kept::<E>() { kept } else { 0 }),
                // SAFETY: the state has a scale a segment.
                kept_scale: unsafe { scale_in(plan, valid.at(0), 1, run.segment).read() },
                beta: plan.rules.beta,
                zero,
                types: PhantomData,
            };
            let sink = Sink { kept: next.at(kept), chunks, byte };
            let treatment = Treatment { sum: sum_of(plan), zero };
            // SAFETY: the tile lies within a part, which every payload has, and which has a place in both states and
            // in the chunk.
            let outcome = unsafe { kernels::tile(set, &source, &sink, treatment, tile.elements) };
            partials[tile.number].store(outcome.sum.to_bits(), Ordering::Relaxed);
            met.note(outcome.nonfinite);
        });
        met.any()
    }

    /// Writes bits. Parts lie side by side, so it is one poll of all of them; what fills up a part's last byte is nobody's
    /// vote.
    fn vote(&self, inputs: &Inputs<'_>, dst: &View<'_>) {
        let plan = inputs.plan;
        let behind = |part: &Run| part.byte - inputs.start + bytes_for(part.elements);
        let bytes = plan.servers.last().map_or(0, behind);
        let (valid, _) = self.buffers_of(self.server);
        // SAFETY: a state.
        let turn = unsafe { turn(valid).read() };
        let voters = inputs.payloads as u64;
        let turn = (inputs.start as u64 % voters + turn % voters) % voters;
        let dst = dst.data().wrapping_add(plan.head as usize);
        signs::vote_with(self.set, &Poll { voters, bytes, stride: plan.stride, turn }, inputs.bits(0), dst);
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

/// The chunks that are reduced, one behind the other.
struct Inputs<'a> {
    plan: &'a CodecPlan,
    first: Address,
    payloads: usize,
    /// The number of the chunk's first byte.
    start: i64,
}

impl Inputs<'_> {
    /// A byte of the first payload's bits, counted from the chunk's first.
    fn bits(&self, byte: i64) -> *mut u8 {
        self.first.at((self.plan.head + byte) as usize)
    }
}
