//! ONEBIT and SIGN on the CPU.
//!
//! The elements of a run are divided into tiles of 64 units. A thread takes tiles, and reads the memory of each once,
//! unit by unit: it computes c, its bits, and the sum of its terms. The sum of a tile is a node of the tree. The caller
//! adds the tiles' sums at the end, and writes the scales.
//!
//! - `kernels`: the loops, for each instruction set;
//! - `encode`, `reduce`, `decode`: the operations;
//! - `scales`: scales of segments, and the errors that belong to them.

mod decode;
mod encode;
mod kernels;
mod reduce;
mod scales;

use std::{fmt::Arguments, marker::PhantomData};

use crate::{
    codec::{
        call::Decoding,
        plan::{CodecPlan, Kind, NonFinite, Run},
    },
    cpu::numbers::with_numbers,
    dlpack::{Address, View},
    ffi::error::Result,
};

use super::{
    Codec, SERVER, WORKER,
    chunks::scale_at,
    family::Family,
    inputs::Inputs,
    sources::Feedback,
    state::{check_kept, scale_in},
};

/// The family of ONEBIT and SIGN.
pub struct Bits;

impl Family for Bits {
    fn encode(
        &self, codec: &mut Codec, plan: &CodecPlan, values: &[Address], factors: [f32; 2], payload: &View<'_>,
    ) -> bool {
        let size = plan.rules.values.size;
        let nonfinite = with_numbers!(plan.rules.values, plan.rules.error, |G, E| {
            codec.make_tiles::<E, _>(plan, WORKER, size, payload, |piece| Feedback::<G, E> {
                gradient: values[piece.run.segment].at(piece.first * size),
                kept: piece.kept,
                scale: piece.kept_scale,
                factors,
                beta: plan.rules.beta,
                zero: plan.rules.policy == NonFinite::Zero,
                types: PhantomData,
            })
        });
        let nonfinite = codec.fold(plan, WORKER) | nonfinite;
        let (_, next) = codec.buffers_of(codec.worker);
        for (segment, scale) in codec.scales.iter_mut().enumerate() {
            // SAFETY: the state has a scale per segment.
            *scale = unsafe { scale_in(plan, next, WORKER, segment).read() };
        }
        nonfinite
    }

    fn reduce(&self, codec: &mut Codec, plan: &CodecPlan, inputs: &Inputs<'_>, dst: &View<'_>) -> bool {
        let nonfinite = if plan.rules.kind == Kind::Sign {
            codec.vote(plan, inputs, dst);
            false
        } else {
            with_numbers!(plan.rules.values, plan.rules.error, |_G, E| codec.add_up::<E>(plan, inputs, dst))
        };
        codec.fold(plan, SERVER) | nonfinite
    }

    fn mean(&self, codec: &Codec, plan: &CodecPlan, inputs: &Inputs<'_>, room: &View<'_>, shard: &[Address]) -> bool {
        if plan.rules.kind == Kind::Sign {
            codec.vote(plan, inputs, room);
            codec.spread(plan, inputs, room, shard);
            return false;
        }
        codec.add_up_without_error(plan, inputs, shard)
    }

    fn encode_shard(
        &self, codec: &mut Codec, plan: &CodecPlan, _number: usize, shard: &[Address], dst: &View<'_>,
    ) -> bool {
        let nonfinite =
            with_numbers!(plan.rules.values, plan.rules.error, |_G, E| codec.bits_of_shard::<E>(plan, shard, dst));
        codec.fold(plan, SERVER) | nonfinite
    }

    fn decode(
        &self, codec: &Codec, plan: &CodecPlan, payload: &View<'_>, by: &Decoding<'_>, values: &[Address],
    ) -> bool {
        codec.decode_bits(plan, payload, by, values)
    }

    unsafe fn write_scales(&self, plan: &CodecPlan, chunk: *mut u8, number: usize, scale_of: &dyn Fn(&Run) -> f32) {
        for part in scales::parts(plan, number) {
            // SAFETY: the caller promises a chunk, which has a scale per segment.
            unsafe { scale_at(chunk, part.segment).write(scale_of(&part).to_bits()) };
        }
    }

    unsafe fn check_scales(&self, plan: &CodecPlan, who: Arguments<'_>, chunk: *mut u8, number: usize) -> Result<()> {
        // SAFETY: the caller promises `plan.stride()` bytes at `chunk`, aligned to 4.
        unsafe { scales::check_chunk(plan, who, chunk, number) }
    }

    fn check_state(&self, plan: &CodecPlan, state: &View<'_>) -> Result<()> {
        for half in 0..plan.state_halves() {
            scales::check_half(plan, half, state)?;
        }
        match plan.rules.policy {
            NonFinite::Propagate => Ok(()),
            _ => check_kept(plan, state, "a codec that is not of GC_NONFINITE_PROPAGATE"),
        }
    }

    unsafe fn errors_of(&self, plan: &CodecPlan, run: &Run, scale: *mut f32, kept: *const u8, errors: *mut f32) {
        let count = run.elements as usize;
        // SAFETY: the caller promises the run's scale and errors in a state, and room for them in `errors`.
        unsafe {
            with_numbers!(plan.rules.values, plan.rules.error, |_G, E| scales::errors_of::<E>(
                scale, kept, errors, count
            ))
        };
    }

    unsafe fn keep(
        &self, plan: &CodecPlan, run: &Run, scale: *mut f32, kept: *mut u8, error: &dyn Fn(usize) -> f32,
    ) -> bool {
        let count = run.elements as usize;
        // SAFETY: the caller promises the run's scale and errors in a state.
        unsafe {
            with_numbers!(plan.rules.values, plan.rules.error, |_G, E| scales::keep::<E>(scale, kept, count, error))
        }
    }
}
