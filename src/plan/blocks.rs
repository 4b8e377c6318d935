//! What payloads of block codecs look like: docs/NUMERICS.md 11.
//!
//! ```text
//!     segments    |--- 0 ---|- 1, raw -|------- 2 -------|         elements
//!     blocks      |bbbbbbbbb|bbbbbbbbbbbbbbbbb|                    of segments that are not raw, in order
//!     raw         |rrrrrrrrrr|                                     elements of those that are
//!     chunks      an equal share of blocks and of raw elements each
//!     a chunk     | header | scales | codes | raw |                each to a multiple of 16 bytes
//! ```

use crate::error::Result;

use super::sizes::{ALIGNMENT, HEADER, align, too_large};

/// A row of the table of docs/NUMERICS.md 11.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Elements that share a scale.
    pub block: i64,
    /// Of a code.
    pub bits: i64,
    /// Of a scale: 0, 1 or 2.
    pub scale_bytes: i64,
    /// As headers give it.
    pub scale_rule: u8,
}

impl Format {
    /// Bytes of the codes of a block.
    pub fn block_bytes(&self) -> i64 {
        self.block * self.bits / 8
    }
}

/// How chunks are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    pub format: Format,
    /// Of all segments that are not raw.
    pub blocks: i64,
    /// Elements of all segments that are.
    pub raws: i64,
    /// Of a chunk: U and V of the specification. The last chunks may have fewer that are there.
    pub chunk_blocks: i64,
    pub chunk_raws: i64,
    /// Where they begin in a chunk; scales begin behind the header.
    pub codes_at: i64,
    pub raws_at: i64,
    /// Of a chunk, behind its header.
    pub bytes: i64,
}

impl Blocks {
    /// For so many blocks and raw elements.
    pub fn new(format: Format, [blocks, raws]: [i64; 2], n_chunks: usize) -> Result<Self> {
        let [chunk_blocks, chunk_raws] = [blocks, raws].map(|all| (all as u64).div_ceil(n_chunks as u64) as i64);
        let lay_out = || {
            let after = |at: i64, count: i64, bytes: i64| at.checked_add(align(count.checked_mul(bytes)?, ALIGNMENT)?);
            let codes_at = after(HEADER as i64, chunk_blocks, format.scale_bytes)?;
            let raws_at = after(codes_at, chunk_blocks, format.block_bytes())?;
            let bytes = after(raws_at, chunk_raws, 4)? - HEADER as i64;
            Some(Self { format, blocks, raws, chunk_blocks, chunk_raws, codes_at, raws_at, bytes })
        };
        lay_out().ok_or_else(too_large)
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        plan::codec::{CodecPlan, Kind, Rules, tests::rules},
        tensor::Dtype,
    };

    fn plan(
        kind: Kind, error: Option<Dtype>, segments: &[i64], raw: &[u8], n_chunks: usize, server: Option<usize>,
    ) -> CodecPlan {
        let rules = Rules { kind, ..rules(error) };
        CodecPlan::new(rules, segments, raw, n_chunks, server).unwrap()
    }

    #[test]
    fn payloads_are_as_long_as_those_of_the_specification() {
        // docs/NUMERICS.md 11, the examples by hand: three elements.
        for (kind, bytes) in
            [(Kind::Bf16, 64), (Kind::Mxfp8, 48), (Kind::Int8, 80), (Kind::Int4, 32), (Kind::Mxfp4, 32)]
        {
            let plan = plan(kind, None, &[3], &[], 1, None);
            assert_eq!((plan.chunk_bytes, plan.stride, plan.state_bytes), (bytes, 64 + bytes, 256), "{kind:?}");
        }
    }

    #[test]
    fn blocks_and_raw_elements_are_shared_out_each_by_itself() {
        // Blocks 0..2, then raw 0..5, then block 2, then 3..6.
        let segments = [33, 5, 7, 96];
        let parts = |chunk| {
            let plan = plan(Kind::Int4, Some(Dtype::F32), &segments, &[0, 1, 0, 0], 2, Some(chunk));
            assert_eq!(plan.blocks.map(|it| (it.chunk_blocks, it.chunk_raws)), Some((3, 3)));
            assert_eq!(plan.blocks.map(|it| (it.codes_at, it.raws_at, it.bytes)), Some((80, 128, 80)));
            assert_eq!(plan.workers.iter().map(|run| run.state).collect::<Vec<_>>(), [256, 0, 4352, 8448]);
            let parts = plan.servers.iter().map(|run| (run.segment, run.first, run.elements, run.place, run.state));
            parts.collect::<Vec<_>>()
        };
        // Behind a unit of each segment that is not raw.
        let at = 256 + 3 * 4096;
        assert_eq!(parts(0), [(0, 0, 33, 0, at), (1, 0, 3, 0, 0), (2, 0, 7, 2, at + 4096)]);
        assert_eq!(parts(1), [(1, 3, 2, 3, 0), (3, 0, 96, 3, at)]);
    }
}
