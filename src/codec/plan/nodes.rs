//! The plan of a hierarchical all-reduce: how ranks sum their values within a node. docs/NUMERICS.md 12 specifies it.

use crate::{
    dlpack::Dtype,
    ffi::{error::Result, fallible},
};

use super::{
    CHUNK_FIELD, CodecPlan,
    sizes::{HEADER, too_large},
};

/// Offset of the sender's factor in a block, in bytes. The bytes before it are the same for every sender.
pub const FACTOR_AT: usize = 56;
/// Alignment of the size of a block, in bytes.
const ALIGNMENT: i64 = 16;
/// Largest number of elements in a tile.
pub const TILE: i64 = 8192;

/// Elements that lie side by side in a segment and in a block. kernels/nodes.cuh has the same struct.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tile {
    /// Index of the first element in the segment.
    pub first: u64,
    /// Offset of the first byte in the blocks that a rank sends, in bytes.
    pub to: u64,
    pub segment: u32,
    pub count: u32,
}

/// Blocks that a rank exchanges with the other ranks of its node.
pub struct NodePlan {
    /// Plans by which the ranks with the same part exchange it between nodes, one for each part.
    pub parts: Vec<CodecPlan>,
    /// Number of this rank's part.
    pub own: usize,
    pub values: Dtype,
    /// Header of the block for each part. The sender writes its factor into the header.
    pub headers: Vec<[u8; HEADER]>,
    pub block_bytes: i64,
    /// Bytes of the reduced chunks of the largest part.
    pub gathered_bytes: i64,
    /// Tiles that a rank copies to the blocks that it sends.
    pub tiles: Vec<Tile>,
}

impl NodePlan {
    /// Makes a plan. `whole`: all elements, a chunk for each rank of the node. `own`: this rank's number in the node.
    pub fn new(whole: &CodecPlan, nodes: usize, own: usize) -> Result<Self> {
        let mut parts = fallible::list(whole.n_chunks, "parts")?;
        for part in 0..whole.n_chunks {
            parts.push(whole.part_between_nodes(part, nodes, None, None)?);
        }
        let values = whole.rules.values;
        let bytes_of = |elements: i64| elements.checked_mul(values.size as i64).ok_or_else(too_large);
        let most = parts.iter().map(|part| part.elements).max().unwrap_or(0);
        let block_bytes = bytes_of(most)?.checked_add(HEADER as i64 + ALIGNMENT - 1).ok_or_else(too_large)?;
        let block_bytes = block_bytes / ALIGNMENT * ALIGNMENT;
        block_bytes.checked_mul(2 * parts.len() as i64).ok_or_else(too_large)?;
        let mut headers = fallible::list(parts.len(), "headers")?;
        let mut tiles = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            headers.push(header(whole, part, number, bytes_of(part.elements)?));
            let mut to = number as i64 * block_bytes + HEADER as i64;
            for (run, segment) in part.workers.iter().zip(&whole.workers) {
                fallible::reserve(&mut tiles, (run.elements as u64).div_ceil(TILE as u64) as usize, "tiles")?;
                for at in (0..run.elements).step_by(TILE as usize) {
                    let count = (run.elements - at).min(TILE);
                    let first = (run.row - segment.row + at) as u64;
                    tiles.push(Tile { first, to: to as u64, segment: run.segment as u32, count: count as u32 });
                    to += count * values.size as i64;
                }
            }
        }
        let gathered_bytes = parts.first().map_or(0, CodecPlan::payload_bytes);
        Ok(Self { parts, own, values, headers, block_bytes, gathered_bytes, tiles })
    }

    /// Returns the size of the largest block that a rank sends to another rank of its node, in bytes.
    pub fn largest_block(&self) -> i64 {
        self.block_bytes.max(self.gathered_bytes)
    }

    /// Returns the plan of this rank's part.
    pub fn own_part(&self) -> &CodecPlan {
        &self.parts[self.own]
    }
}

/// Returns a block's header without the factor: the header of the part's chunk 0 with another magic, dtype of values,
/// n_chunks, chunk and bytes.
fn header(whole: &CodecPlan, part: &CodecPlan, number: usize, bytes: i64) -> [u8; HEADER] {
    let mut header = part.header(0);
    header[..4].copy_from_slice(b"GCPV");
    header[8] = whole.header(0)[8];
    header[16..20].copy_from_slice(&(whole.n_chunks as u32).to_le_bytes());
    header[CHUNK_FIELD].copy_from_slice(&(number as u32).to_le_bytes());
    header[40..48].copy_from_slice(&bytes.to_le_bytes());
    header
}
