//! The launches of ONEBIT and SIGN: one for the bits, and one for scales and headers, which need the sums of all tiles.

use crate::{
    codec::{call::Decoding, plan::CodecPlan},
    cuda::{
        Queue,
        launch::argument,
        module::{Module, ONEBIT},
    },
    dlpack::Dtype,
    ffi::error::Result,
};

use super::{
    ChunkDestination, Codec,
    family::Family,
    layout::{Decode, Encode, Finish, Half, Reduce, Tiling, index_of},
};

/// The family of ONEBIT and SIGN. Scales need the sums of all tiles, so no launch makes a whole payload.
pub struct Bits;

impl Bits {
    /// Launches the kernel that computes scales from the sums of the previous launch, and writes the headers of chunks.
    /// Before it the state has new elements and old scales.
    fn finish(&self, codec: &mut Codec, queue: &mut Queue, half: Half, to: ChunkDestination) -> Result<()> {
        let runs = u64::from(half.n_segments).max(1);
        let steps = to.steps.map_or(0, |steps| steps as u32);
        let mut call = Finish { codec: half, dst: to.dst, slot: to.slot, steps, reserved: 0 };
        codec.poisoned = true;
        // SAFETY: `call` is the kernel's struct, over memory that the previous launch, one of ours, wrote.
        unsafe { queue.launch_pdl(&ONEBIT.finish, runs, &mut argument(&mut call)) }?;
        (codec.poisoned, codec.pending) = (false, codec.transactional);
        Ok(())
    }
}

impl Family for Bits {
    fn module(&self) -> Option<&'static Module> {
        None
    }

    fn tiling(&self) -> Tiling {
        // `to` of a tile is a byte offset in the payload. The tile of an empty run writes the run's scale.
        let chunk_at = |plan: &CodecPlan, chunk| chunk * plan.stride() + plan.layout.scales_at;
        Tiling { chunk_at, tiles_of_empty_run: 1 }
    }

    fn encode(
        &self, codec: &mut Codec, queue: &mut Queue, plan: &CodecPlan, dtype: Dtype, mut call: Encode,
        to: ChunkDestination,
    ) -> Result<()> {
        let kernel = &ONEBIT.encode[index_of(dtype, plan.rules.error)];
        let tiles = codec.tiles[call.codec.half as usize];
        // SAFETY: `call` is the kernel's struct. Its addresses are in the codec's memory, in views whose sizes were
        // checked against the plan, or in chunks of as many bytes in the ranks' buffers.
        unsafe { queue.launch(kernel, tiles, &mut argument(&mut call)) }?;
        self.finish(codec, queue, call.codec, to)
    }

    fn reduce(
        &self, codec: &mut Codec, queue: &mut Queue, plan: &CodecPlan, mut call: Reduce, to: ChunkDestination,
    ) -> Result<()> {
        let kernel = &ONEBIT.reduce[index_of(Dtype::F32, plan.rules.error)];
        // SAFETY: `call` is the kernel's struct. Its addresses are in the codec's memory, or in views whose sizes were
        // checked against the plan.
        unsafe {
            // Over peer memory the previous launch is our own barrier, so this launch may begin before it ends.
            if to.steps.is_none() {
                queue.launch(kernel, codec.tiles[1], &mut argument(&mut call))
            } else {
                queue.launch_pdl(kernel, codec.tiles[1], &mut argument(&mut call))
            }
        }?;
        self.finish(codec, queue, call.codec, to)
    }

    fn mean(&self, codec: &Codec, queue: &mut Queue, mut call: Reduce) -> Result<()> {
        // SAFETY: `call` is the kernel's struct. Its addresses are in the codec's memory, or in views whose sizes were
        // checked against the plan.
        unsafe { queue.launch(&ONEBIT.mean, codec.tiles[1], &mut argument(&mut call)) }
    }

    fn decode(
        &self, _: &Codec, queue: &mut Queue, plan: &CodecPlan, by: &Decoding<'_>, mut call: Decode,
    ) -> Result<()> {
        let kernel = match (by.add, by.dtype.size) {
            (true, _) => 2,
            (false, 4) => 0,
            _ => 1,
        };
        let blocks = call.tiles + (plan.n_chunks as u64 - call.first_empty);
        // SAFETY: `call` is the kernel's struct. Its addresses are in the codec's memory, or in views whose sizes were
        // checked against the plan.
        unsafe {
            if by.behind_ours {
                queue.launch_pdl(&ONEBIT.decode[kernel], blocks, &mut argument(&mut call))
            } else {
                queue.launch(&ONEBIT.decode[kernel], blocks, &mut argument(&mut call))
            }
        }
    }
}
