//! What differs between the two families of codecs on CUDA.

use crate::{
    codec::{call::Decoding, plan::CodecPlan},
    cuda::{Queue, module::Module},
    dlpack::Dtype,
    ffi::error::Result,
};

use super::{
    Codec, To,
    layout::{Decode, Encode, Once, Reduce, Tiling, Twice},
};

/// The launches of a family.
pub trait Family: Sync {
    /// The module of its kernels, if they are not in the module that every codec uses.
    fn module(&self) -> Option<&'static Module>;

    /// How its tiles are numbered.
    fn tiling(&self) -> Tiling;

    /// Encodes a half of the codec, whose values have this dtype.
    fn encode(
        &self, codec: &mut Codec, queue: &mut Queue, plan: &CodecPlan, dtype: Dtype, call: Encode, to: To,
    ) -> Result<()>;

    fn reduce(&self, codec: &mut Codec, queue: &mut Queue, plan: &CodecPlan, call: Reduce, to: To) -> Result<()>;

    /// Reduces to a shard, without the error.
    fn mean(&self, codec: &Codec, queue: &mut Queue, call: Reduce) -> Result<()>;

    fn decode(&self, codec: &Codec, queue: &mut Queue, plan: &CodecPlan, by: &Decoding<'_>, call: Decode)
    -> Result<()>;

    /// Its kernels that do a whole all-reduce over peer memory, if it has such.
    fn fused(&self) -> Option<&dyn FusedKernels> {
        None
    }
}

/// All-reduces over peer memory in one launch.
pub trait FusedKernels {
    /// The module of these kernels, and of all others that write to peer memory.
    fn module(&self) -> &'static Module;

    /// Whether `two_shot` is no slower than three launches.
    fn fits_one_launch(&self, codec: &Codec, queue: &Queue, plan: &CodecPlan) -> bool;

    /// A one-shot all-reduce over peer memory, or a step of it, in one launch.
    fn one_shot(&self, queue: &mut Queue, plan: &CodecPlan, call: Once) -> Result<()>;

    /// A two-shot all-reduce over peer memory in one launch.
    fn two_shot(&self, queue: &mut Queue, call: Twice) -> Result<()>;
}
