//! The launches of block codecs: one per call.

use crate::{
    codec::{call::Decoding, plan::CodecPlan},
    cuda::{
        Queue,
        launch::argument,
        module::{BLOCKS, BLOCKS_MODULE, BLOCKS_PEERS, BLOCKS_PEERS_MODULE, Module},
    },
    dlpack::Dtype,
    ffi::error::{Result, error},
};

use super::{
    ChunkDestination, Codec,
    family::{Family, FusedKernels},
    layout::{Decode, Encode, OneShot, Reduce, Tiling, TwoShot},
};

/// Threads of a thread block.
const THREADS: u64 = 256;
/// Thread blocks of kernels/blocks_lanes.cuh for which a multiprocessor has room.
const LANES_BLOCKS: u64 = 3;
/// The most thread blocks that kernels/blocks_together.cuh can count.
const MOST_BLOCKS: u64 = 512;

/// The family of all block codecs.
pub struct Blocks;

impl Family for Blocks {
    fn module(&self) -> Option<&'static Module> {
        Some(&BLOCKS_MODULE)
    }

    fn tiling(&self) -> Tiling {
        // `to` of a tile is the index of its first place in the chunk. Nothing is written for an empty run.
        Tiling { chunk_at: |_, _| 0, tiles_of_empty_run: 0 }
    }

    fn encode(
        &self, codec: &mut Codec, queue: &mut Queue, _: &CodecPlan, dtype: Dtype, mut call: Encode,
        to: ChunkDestination,
    ) -> Result<()> {
        let kept = usize::from(call.codec.error != 0);
        let kernels = if call.slot.is_given() { &BLOCKS_PEERS.encode } else { &BLOCKS.encode };
        let kernel = &kernels[2 * usize::from(dtype.size == 2) + kept];
        let tiles = codec.tiles[call.codec.half as usize];
        // SAFETY: `call` is the kernel's struct. Its addresses are in the codec's memory, in views whose sizes were
        // checked against the plan, or in chunks of as many bytes in the ranks' buffers.
        unsafe { queue.launch(kernel, tiles, &mut argument(&mut call)) }?;
        codec.barrier(queue, to)
    }

    fn reduce(
        &self, codec: &mut Codec, queue: &mut Queue, _: &CodecPlan, call: Reduce, to: ChunkDestination,
    ) -> Result<()> {
        reduce(codec, queue, call)?;
        codec.barrier(queue, to)
    }

    fn mean(&self, codec: &Codec, queue: &mut Queue, call: Reduce) -> Result<()> {
        reduce(codec, queue, call)
    }

    fn decode(
        &self, codec: &Codec, queue: &mut Queue, _: &CodecPlan, by: &Decoding<'_>, mut call: Decode,
    ) -> Result<()> {
        // The kernel that adds takes half a tile per thread block.
        let (kernel, per_tile) = if by.add { (2, 2) } else { (usize::from(by.dtype.size == 2), 1) };
        let blocks =
            codec.tiles[0].checked_mul(per_tile).ok_or_else(|| error!(SizeOverflow, "more than 2^64 blocks"))?;
        // SAFETY: `call` is the kernel's struct. Its addresses are in the codec's memory or in views of checked sizes.
        unsafe { queue.launch(&BLOCKS.decode[kernel], blocks, &mut argument(&mut call)) }
    }

    fn fused(&self) -> Option<&dyn FusedKernels> {
        Some(self)
    }
}

impl FusedKernels for Blocks {
    fn module(&self) -> &'static Module {
        &BLOCKS_PEERS_MODULE
    }

    /// Returns true if the codec keeps errors and the grid has room for a thread block per tile.
    fn fits_one_launch(&self, codec: &Codec, queue: &Queue, plan: &CodecPlan) -> bool {
        plan.rules.error.is_some() && codec.tiles.iter().all(|&tiles| tiles <= room_of(queue))
    }

    /// Launches no more thread blocks than run at the same time.
    fn one_shot(&self, queue: &mut Queue, plan: &CodecPlan, mut call: OneShot) -> Result<()> {
        let kernel = &BLOCKS_PEERS.one_shot[usize::from(plan.rules.values.size == 2)];
        let blocks = call.tiles.min(room_of(queue));
        // SAFETY: `call` is the kernel's struct. Its addresses are in the codec's memory, in views whose sizes were
        // checked against the plan, or in whole payloads in the ranks' buffers.
        unsafe { queue.launch(kernel, blocks, &mut argument(&mut call)) }
    }

    /// Launches one extra thread block for headers, if it fits, so tiles do not wait for header checks.
    fn two_shot(&self, queue: &mut Queue, mut call: TwoShot) -> Result<()> {
        let blocks = (call.decode.tiles.max(call.tiles) + 1).min(room_of(queue));
        // SAFETY: `call` is the kernel's struct. Its addresses are in the codec's memory, in views whose sizes were
        // checked against the plan, or in chunks of as many bytes in the ranks' buffers.
        unsafe { queue.launch(&BLOCKS_PEERS.two_shot, blocks, &mut argument(&mut call)) }
    }
}

/// Reduces to chunks, or to a shard if `call.shard` is 1.
fn reduce(codec: &Codec, queue: &mut Queue, mut call: Reduce) -> Result<()> {
    // A shard has no error yet.
    let kept = usize::from(call.codec.error != 0 && call.shard == 0);
    let (kernel, blocks) = if call.slot.is_given() {
        (&BLOCKS_PEERS.reduce[kept], codec.tiles[1])
    } else if call.can_reduce_by_lanes() {
        let most = LANES_BLOCKS * queue.device.properties().multiprocessors;
        (&BLOCKS.reduce_by_lanes, codec.tiles[1].min(most).max(1))
    } else {
        (&BLOCKS.reduce[kept], codec.tiles[1])
    };
    // SAFETY: `call` is the kernel's struct. Its addresses are in the codec's memory, in views whose sizes were checked
    // against the plan, or in chunks of as many bytes in the ranks' buffers.
    unsafe { queue.launch(kernel, blocks, &mut argument(&mut call)) }
}

/// Returns the number of thread blocks that fit beside as many of other ranks: an eighth of the GPU's threads.
fn room_of(queue: &Queue) -> u64 {
    (queue.device.properties().threads / 8 / THREADS).clamp(1, MOST_BLOCKS)
}
