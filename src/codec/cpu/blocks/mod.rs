//! Block codecs on the CPU: docs/NUMERICS.md 11, bit for bit.
//!
//! Threads take tiles of a run, as for ONEBIT, and process a tile in steps. A step computes c, in float32 on the stack,
//! then scales, codes and errors, and copies them to the payload and the state. Reading reverses these steps. So loops
//! do not access a payload, which may be another process's memory: its bytes are only copied, each once.
//!
//! - `coding`: meaning of codes and scales; `kernels`: the loops, for each instruction set;
//! - `payload`: places of blocks and raw elements in chunks;
//! - `encode`, `decode`, `reduce` and its halves, `errors`: the operations.

mod coding;
mod decode;
mod encode;
mod errors;
mod kernels;
mod payload;
mod reduce;

use std::fmt::Arguments;

use crate::{
    codec::{
        call::Decoding,
        plan::{CodecPlan, Run},
    },
    cpu::numbers::with_numbers,
    dlpack::{Address, View},
    ffi::error::Result,
};

use super::{Codec, family::Family, inputs, state::check_kept};

/// The family of all block codecs.
pub struct Blocks;

impl Family for Blocks {
    fn encode(
        &self, codec: &mut Codec, plan: &CodecPlan, values: &[Address], factors: [f32; 2], payload: &View<'_>,
    ) -> bool {
        codec.encode_blocks(plan, values, factors, payload.data())
    }

    fn reduce(&self, codec: &mut Codec, plan: &CodecPlan, inputs: &inputs::Inputs<'_>, dst: &View<'_>) -> bool {
        codec.reduce_blocks(plan, inputs.number, inputs.received, dst.data())
    }

    fn mean(
        &self, codec: &Codec, plan: &CodecPlan, inputs: &inputs::Inputs<'_>, _room: &View<'_>, shard: &[Address],
    ) -> bool {
        codec.mean_of_blocks(plan, inputs.number, inputs.received, shard)
    }

    fn encode_shard(
        &self, codec: &mut Codec, plan: &CodecPlan, number: usize, shard: &[Address], dst: &View<'_>,
    ) -> bool {
        codec.encode_blocks_of_shard(plan, number, shard, dst.data())
    }

    fn decode(
        &self, codec: &Codec, plan: &CodecPlan, payload: &View<'_>, by: &Decoding<'_>, values: &[Address],
    ) -> bool {
        codec.decode_blocks(plan, payload.data(), by, values)
    }

    // Blocks have scales of their own: there are no scales of segments to write, and no scale makes a chunk corrupt.
    unsafe fn write_scales(&self, _: &CodecPlan, _: *mut u8, _: usize, _: &dyn Fn(&Run) -> f32) {}

    unsafe fn check_scales(&self, _: &CodecPlan, _: Arguments<'_>, _: *mut u8, _: usize) -> Result<()> {
        Ok(())
    }

    fn check_state(&self, plan: &CodecPlan, state: &View<'_>) -> Result<()> {
        // The errors of a block that is not finite stay as they were, so a block codec keeps finite errors only.
        check_kept(plan, state, "a block codec")
    }

    unsafe fn errors_of(&self, plan: &CodecPlan, run: &Run, _: *mut f32, kept: *const u8, errors: *mut f32) {
        // SAFETY: the caller promises the run's errors in a state, and room for them in `errors`.
        unsafe {
            with_numbers!(plan.rules.values, plan.rules.error, |_G, E| errors::errors_of::<E>(run, kept, errors))
        };
    }

    unsafe fn keep(
        &self, plan: &CodecPlan, run: &Run, _: *mut f32, kept: *mut u8, error: &dyn Fn(usize) -> f32,
    ) -> bool {
        // SAFETY: the caller promises the run's errors in a state.
        unsafe { with_numbers!(plan.rules.values, plan.rules.error, |_G, E| errors::keep::<E>(run, kept, error)) }
    }
}
