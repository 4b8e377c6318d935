//! Launches that differ between the two families of codecs on CUDA.

use crate::{
    codec::{call::Decoding, plan::CodecPlan},
    cuda::{Queue, module::Module},
    dlpack::Dtype,
    ffi::error::Result,
};

use super::{
    ChunkDestination, Codec,
    layout::{Decode, Encode, OneShot, Reduce, Tiling, TwoShot},
};

/// The launches of a family.
pub trait Family: Sync {
    /// Returns the module of the family's kernels; None if they are in the module that every codec uses.
    fn module(&self) -> Option<&'static Module>;

    /// Returns the numbering of the family's tiles.
    fn tiling(&self) -> Tiling;

    /// Encodes a half of the codec, whose values have this dtype.
    fn encode(
        &self, codec: &mut Codec, queue: &mut Queue, plan: &CodecPlan, dtype: Dtype, call: Encode, to: ChunkDestination,
    ) -> Result<()>;

    fn reduce(
        &self, codec: &mut Codec, queue: &mut Queue, plan: &CodecPlan, call: Reduce, to: ChunkDestination,
    ) -> Result<()>;

    /// Reduces to a shard, without the error.
    fn mean(&self, codec: &Codec, queue: &mut Queue, call: Reduce) -> Result<()>;

    fn decode(&self, codec: &Codec, queue: &mut Queue, plan: &CodecPlan, by: &Decoding<'_>, call: Decode)
    -> Result<()>;

    /// Returns the family's kernels that run a whole all-reduce over peer memory, if there are any.
    fn fused(&self) -> Option<&dyn FusedKernels> {
        None
    }
}

/// All-reduces over peer memory in one launch.
pub trait FusedKernels {
    /// Returns the module of these kernels, and of all others that write to peer memory.
    fn module(&self) -> &'static Module;

    /// Returns true if `two_shot` is no slower than three launches.
    fn fits_one_launch(&self, codec: &Codec, queue: &Queue, plan: &CodecPlan) -> bool;

    /// Runs a one-shot all-reduce over peer memory, or a step of it, in one launch.
    fn one_shot(&self, queue: &mut Queue, plan: &CodecPlan, call: OneShot) -> Result<()>;

    /// Runs a two-shot all-reduce over peer memory in one launch.
    fn two_shot(&self, queue: &mut Queue, call: TwoShot) -> Result<()>;
}
