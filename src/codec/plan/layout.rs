//! The byte layout of a chunk, from one row of numbers per codec: docs/NUMERICS.md 6 and 11.
//!
//! ```text
//!     segments    |--- 0 ---|- 1, raw -|------- 2 -------|         elements
//!     places      |ppppppppp|ppppppppppppppppp|                    bytes of bits, or blocks, of segments not raw
//!     raw         |rrrrrrrrrr|                                     elements of segments that are raw
//!     chunks      each has an equal share of the places and of the raw elements
//!     a chunk     | header | scales | codes | raw |                each padded to a multiple of 16 bytes
//! ```

use crate::ffi::error::Result;

use super::sizes::{ALIGNMENT, HEADER, align, too_large};

/// Families of codecs. The code that writes headers, checks options or chooses a backend uses this type. All other code
/// uses the numbers of [`Format`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// A bit per element, and a scale per segment: ONEBIT and SIGN.
    Bits,
    /// Blocks of codes, each with a scale of its own: all other codecs.
    Blocks,
}

/// The row of a codec in the table of docs/NUMERICS.md 11. A byte of bits is a place of 8 elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    pub family: Family,
    /// Number of elements in a place: in a block, or in a byte of bits.
    pub place: i64,
    /// Number of bits in a code.
    pub bits: i64,
    /// Bytes of the scale of a block: 0, 1 or 2.
    pub scale_bytes: i64,
    /// Bytes of the scale of a segment, which every chunk contains: 0 or 4.
    pub segment_scale_bytes: i64,
    /// The field *block* of a header.
    pub block_field: u32,
    /// The field *scale rule* of a header. None: the option that the caller has chosen.
    pub scale_rule: Option<u8>,
}

impl Format {
    /// Returns the size of the codes of a place, in bytes.
    pub fn place_bytes(&self) -> i64 {
        self.place * self.bits / 8
    }
}

/// Layout of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub format: Format,
    /// Number of places of all segments that are not raw.
    pub places: i64,
    /// Number of elements of all segments that are raw.
    pub raws: i64,
    /// Numbers of places and raw elements in a chunk: U and V of the specification. The last chunks may have fewer.
    pub chunk_places: i64,
    pub chunk_raws: i64,
    /// Offsets in a chunk of the scales of blocks, the codes and the raw elements, in bytes. The scales of segments
    /// follow the header.
    pub scales_at: i64,
    pub codes_at: i64,
    pub raws_at: i64,
    /// Distance from chunk to chunk, in bytes.
    pub stride: i64,
}

impl Layout {
    /// Returns the layout of a payload with these numbers of places and raw elements, for `segments` segments.
    pub fn new(format: Format, [places, raws]: [i64; 2], segments: usize, n_chunks: usize) -> Result<Self> {
        // If there are more chunks than places, the last chunks are empty.
        let [chunk_places, chunk_raws] = [places, raws].map(|all| (all as u64).div_ceil(n_chunks as u64) as i64);
        let lay_out = || {
            let after = |at: i64, count: i64, bytes: i64| at.checked_add(align(count.checked_mul(bytes)?, ALIGNMENT)?);
            let scales_at = after(HEADER as i64, segments as i64, format.segment_scale_bytes)?;
            let codes_at = after(scales_at, chunk_places, format.scale_bytes)?;
            let raws_at = after(codes_at, chunk_places, format.place_bytes())?;
            let stride = after(raws_at, chunk_raws, 4)?;
            Some(Self { format, places, raws, chunk_places, chunk_raws, scales_at, codes_at, raws_at, stride })
        };
        lay_out().ok_or_else(too_large)
    }

    /// Returns the field *number of bytes* of a header.
    pub fn bytes_field(&self) -> i64 {
        match self.format.family {
            Family::Bits => self.chunk_places,
            Family::Blocks => self.stride - HEADER as i64,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        codec::plan::{CodecPlan, Kind, Rules, tests::rules},
        dlpack::Dtype,
    };

    fn plan(
        kind: Kind, error: Option<Dtype>, segments: &[i64], raw: &[u8], n_chunks: usize, server: Option<usize>,
    ) -> CodecPlan {
        let rules = Rules { kind, ..rules(error) };
        CodecPlan::new(rules, segments, raw, n_chunks, server).unwrap()
    }

    #[test]
    fn payloads_have_the_length_of_the_specification() {
        // The expected sizes are the examples by hand of docs/NUMERICS.md 11: three elements.
        for (kind, bytes) in
            [(Kind::Bf16, 64), (Kind::Mxfp8, 48), (Kind::Int8, 80), (Kind::Int4, 32), (Kind::Mxfp4, 32)]
        {
            let plan = plan(kind, None, &[3], &[], 1, None);
            assert_eq!(
                (plan.layout.bytes_field(), plan.stride(), plan.state_bytes),
                (bytes, 64 + bytes, 256),
                "{kind:?}"
            );
        }
    }

    #[test]
    fn blocks_and_raw_elements_are_split_separately() {
        // The segments are blocks 0..2, raw elements 0..5, block 2, and blocks 3..6.
        let segments = [33, 5, 7, 96];
        let parts = |chunk| {
            let plan = plan(Kind::Int4, Some(Dtype::F32), &segments, &[0, 1, 0, 0], 2, Some(chunk));
            assert_eq!((plan.layout.chunk_places, plan.layout.chunk_raws), (3, 3));
            assert_eq!((plan.layout.codes_at, plan.layout.raws_at, plan.stride()), (80, 128, 144));
            assert_eq!(plan.workers.iter().map(|run| run.state).collect::<Vec<_>>(), [256, 0, 4352, 8448]);
            let parts = plan.servers.iter().map(|run| (run.segment, run.first, run.elements, run.place, run.state));
            parts.collect::<Vec<_>>()
        };
        // The errors of parts follow one unit of each segment that is not raw.
        let at = 256 + 3 * 4096;
        assert_eq!(parts(0), [(0, 0, 33, 0, at), (1, 0, 3, 0, 0), (2, 0, 7, 2, at + 4096)]);
        assert_eq!(parts(1), [(1, 3, 2, 3, 0), (3, 0, 96, 3, at)]);
    }
}
