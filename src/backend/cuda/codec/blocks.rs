//! The calls of block codecs: a launch each.

use crate::{
    backend::{
        call::Decoding,
        cuda::{
            launch::argument,
            module::{BLOCKS, BLOCKS_PEERS},
            queue::Queue,
        },
    },
    error::{Result, error},
    tensor::Dtype,
};

use super::{
    Codec,
    layout::{Decode, Encode, Once, Reduce, Twice},
};

/// Threads of a block.
const THREADS: u64 = 256;
/// Blocks of kernels/blocks_lanes.cuh for which a multiprocessor has room.
const LANES_BLOCKS: u64 = 3;
/// Blocks that kernels/blocks_together.cuh can count.
const MOST_BLOCKS: u64 = 512;

impl Codec {
    pub(super) fn encode_blocks(&self, queue: &mut Queue, dtype: Dtype, mut call: Encode) -> Result<()> {
        let kept = usize::from(call.codec.error != 0);
        let kernels = if call.way.is_given() { &BLOCKS_PEERS.encode } else { &BLOCKS.encode };
        let kernel = &kernels[2 * usize::from(dtype.size == 2) + kept];
        let tiles = self.tiles[call.codec.half as usize];
        // SAFETY: the kernel's argument: memory of the codec, and of views whose sizes were checked against its plan;
        // or chunks of as many bytes in the buffers of ranks.
        unsafe { queue.launch(kernel, tiles, &mut argument(&mut call)) }
    }

    pub(super) fn decode_blocks(&self, queue: &mut Queue, by: &Decoding<'_>, mut call: Decode) -> Result<()> {
        // The kernel that adds takes half a tile a block.
        let (kernel, a_tile) = if by.add { (2, 2) } else { (usize::from(by.dtype.size == 2), 1) };
        let blocks = self.tiles[0].checked_mul(a_tile).ok_or_else(|| error!(SizeOverflow, "more than 2^64 blocks"))?;
        // SAFETY: the kernel's argument: memory of the codec, and of views whose sizes were checked against its plan.
        unsafe { queue.launch(&BLOCKS.decode[kernel], blocks, &mut argument(&mut call)) }
    }

    /// All blocks run at once.
    pub(super) fn blocks_once(&self, queue: &mut Queue, dtype: Dtype, mut call: Once) -> Result<()> {
        let room = room_of(queue);
        let kernel = &BLOCKS_PEERS.once[usize::from(dtype.size == 2)];
        // SAFETY: the kernel's argument: memory of the codec, and of views whose sizes were checked against its plan;
        // and whole payloads of as many bytes in the buffers of ranks.
        unsafe { queue.launch(kernel, call.tiles.min(room), &mut argument(&mut call)) }
    }

    /// Whether there is room for that.
    pub(super) fn has_a_block_for_each_tile(&self, queue: &Queue) -> bool {
        self.tiles.iter().all(|&tiles| tiles <= room_of(queue))
    }

    /// Launches one extra thread block for headers, if it fits, so that tiles do not wait for header checks.
    pub(super) fn blocks_twice(&self, queue: &mut Queue, mut call: Twice) -> Result<()> {
        let blocks = (call.decode.tiles.max(call.tiles) + 1).min(room_of(queue));
        // SAFETY: the kernel's argument: memory of the codec, and of views whose sizes were checked against its plan;
        // and chunks of as many bytes in the buffers of ranks.
        unsafe { queue.launch(&BLOCKS_PEERS.twice, blocks, &mut argument(&mut call)) }
    }

    /// Also to a shard, where `call` says so.
    pub(super) fn reduce_blocks(&self, queue: &mut Queue, mut call: Reduce) -> Result<()> {
        // A shard is what comes before the errors.
        let kept = usize::from(call.codec.error != 0 && call.shard == 0);
        let (kernel, blocks) = if call.way.is_given() {
            (&BLOCKS_PEERS.reduce[kept], self.tiles[1])
        } else if call.is_by_lanes() {
            let most = LANES_BLOCKS * queue.device.properties().multiprocessors;
            (&BLOCKS.reduce_by_lanes, self.tiles[1].min(most).max(1))
        } else {
            (&BLOCKS.reduce[kept], self.tiles[1])
        };
        // SAFETY: the kernel's argument: memory of the codec, and of views whose sizes were checked against its plan;
        // or chunks of as many bytes in the buffers of ranks.
        unsafe { queue.launch(kernel, blocks, &mut argument(&mut call)) }
    }
}

/// Blocks that run at once with room for others like them: an eighth of the GPU's threads.
fn room_of(queue: &Queue) -> u64 {
    (queue.device.properties().threads / 8 / THREADS).clamp(1, MOST_BLOCKS)
}
