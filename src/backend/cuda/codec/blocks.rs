//! The calls of block codecs: a launch each.

use crate::{
    backend::{
        call::Decoding,
        cuda::{
            launch::argument,
            module::{BLOCKS, Kernel},
            queue::Queue,
        },
    },
    error::{Result, error},
    plan::codec::Kind,
    tensor::Dtype,
};

use super::{
    Codec,
    layout::{Decode, Encode, Reduce, TILE},
};

/// Elements of a block of the kernels that decode, in bytes of results: two rows of 16 bytes a lane, to which is added one.
const SET_BYTES: u64 = 2 * 16 * 256;
const ADD_BYTES: u64 = 16 * 256;

/// The kernel of a codec.
fn of(kernels: &'static [Kernel; 5], kind: Kind) -> Result<&'static Kernel> {
    let index = (kind as usize).checked_sub(Kind::Bf16 as usize);
    index.and_then(|index| kernels.get(index)).ok_or_else(|| error!(InvalidArgument, "codec: {kind:?} has no blocks"))
}

impl Codec {
    pub(super) fn encode_blocks(&self, queue: &mut Queue, kind: Kind, dtype: Dtype, mut call: Encode) -> Result<()> {
        let kernel = of(if dtype.size == 4 { &BLOCKS.encode_f32 } else { &BLOCKS.encode_16 }, kind)?;
        let tiles = self.tiles[call.codec.half as usize];
        // SAFETY: the kernel's argument: memory of the codec, and of views whose sizes were checked against its plan.
        unsafe { queue.launch(kernel, tiles, &mut argument(&mut call)) }
    }

    pub(super) fn decode_blocks(
        &self,
        queue: &mut Queue,
        kind: Kind,
        by: &Decoding<'_>,
        mut call: Decode,
    ) -> Result<()> {
        let (kernels, bytes) = match (by.add, by.dtype.size) {
            (true, _) => (&BLOCKS.decode_add, ADD_BYTES),
            (false, 4) => (&BLOCKS.decode_u32, SET_BYTES),
            _ => (&BLOCKS.decode_u16, SET_BYTES),
        };
        let a_tile = TILE as u64 * by.dtype.size as u64 / bytes;
        let blocks = self.tiles[0].checked_mul(a_tile).ok_or_else(|| error!(SizeOverflow, "more than 2^64 blocks"))?;
        // SAFETY: the kernel's argument: memory of the codec, and of views whose sizes were checked against its plan.
        unsafe { queue.launch(of(kernels, kind)?, blocks, &mut argument(&mut call)) }
    }

    /// Also to a shard, where `call` says so.
    pub(super) fn reduce_blocks(&self, queue: &mut Queue, kind: Kind, mut call: Reduce) -> Result<()> {
        let kernel = of(&BLOCKS.reduce, kind)?;
        // SAFETY: the kernel's argument: memory of the codec, and of views whose sizes were checked against its plan.
        unsafe { queue.launch(kernel, self.tiles[1], &mut argument(&mut call)) }
    }
}
