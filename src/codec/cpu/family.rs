//! Operations that differ between the two families of codecs on the CPU.

use std::fmt::Arguments;

use crate::{
    codec::{
        call::Decoding,
        plan::{CodecPlan, Run},
    },
    dlpack::{Address, View},
    ffi::error::Result,
};

use super::{Codec, inputs::Inputs};

/// Work of a family. Functions that return a bool return true if they found a number that is not finite.
pub trait Family: Sync {
    /// Writes all of a payload but headers and padding, the next state of the worker, and the codec's scales.
    /// `values`: an address per segment. `factors`: gradients and errors are multiplied by them.
    fn encode(
        &self, codec: &mut Codec, plan: &CodecPlan, values: &[Address], factors: [f32; 2], payload: &View<'_>,
    ) -> bool;

    /// Reduces chunks of several payloads to chunks in `dst`, and writes the next state of the server.
    fn reduce(&self, codec: &mut Codec, plan: &CodecPlan, inputs: &Inputs<'_>, dst: &View<'_>) -> bool;

    /// Writes the mean, sum or majority of chunks to a shard, an address per segment. `room`: memory for a chunk.
    fn mean(&self, codec: &Codec, plan: &CodecPlan, inputs: &Inputs<'_>, room: &View<'_>, shard: &[Address]) -> bool;

    /// Encodes a shard plus the error to the chunk `number`, and writes the next state of the server.
    fn encode_shard(
        &self, codec: &mut Codec, plan: &CodecPlan, number: usize, shard: &[Address], dst: &View<'_>,
    ) -> bool;

    /// Decodes a payload to an address per segment.
    fn decode(
        &self, codec: &Codec, plan: &CodecPlan, payload: &View<'_>, by: &Decoding<'_>, values: &[Address],
    ) -> bool;

    /// Writes the scales of segments into a chunk, whose memory for them is zero.
    ///
    /// # Safety
    /// At `chunk` are `plan.stride()` bytes, aligned to 4.
    unsafe fn write_scales(&self, plan: &CodecPlan, chunk: *mut u8, number: usize, scale_of: &dyn Fn(&Run) -> f32);

    /// Refuses a chunk whose scales of segments no codec of this plan writes.
    ///
    /// # Safety
    /// At `chunk` are `plan.stride()` bytes, aligned to 4.
    unsafe fn check_scales(&self, plan: &CodecPlan, who: Arguments<'_>, chunk: *mut u8, number: usize) -> Result<()>;

    /// Refuses a state that no codec of this plan has. `state`: as many bytes as a state has.
    fn check_state(&self, plan: &CodecPlan, state: &View<'_>) -> Result<()>;

    /// Writes the errors of a run as float32.
    ///
    /// # Safety
    /// `scale` and `kept` belong to the run in a state, and `errors` has an element for each of the run.
    unsafe fn errors_of(&self, plan: &CodecPlan, run: &Run, scale: *mut f32, kept: *const u8, errors: *mut f32);

    /// Keeps errors of a run, rounded to the dtype of errors.
    ///
    /// # Safety
    /// `scale` and `kept` belong to the run in a state.
    unsafe fn keep(
        &self, plan: &CodecPlan, run: &Run, scale: *mut f32, kept: *mut u8, error: &dyn Fn(usize) -> f32,
    ) -> bool;
}
