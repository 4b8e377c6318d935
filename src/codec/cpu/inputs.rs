//! The chunks that are reduced.

use crate::{
    codec::{call::Received, plan::CodecPlan},
    dlpack::Address,
};

/// Chunks of several payloads, whose headers were checked.
pub struct Inputs<'a> {
    pub received: Received,
    /// Number of the first chunk.
    pub number: usize,
    /// Flags of all chunks.
    pub flags: u32,
    pub plan: &'a CodecPlan,
}

impl Inputs<'_> {
    pub fn payloads(&self) -> usize {
        self.received.payloads
    }

    /// Returns the index of the first chunk's first byte of bits, counted before the bits are cut into chunks.
    pub fn start(&self) -> i64 {
        self.plan.held_by(self.number).start
    }

    /// Returns the address of a byte of the first payload's bits, counted from the chunk's first byte of bits.
    pub fn bits(&self, byte: i64) -> *mut u8 {
        self.received.first.at((self.plan.layout.scales_at + byte) as usize)
    }

    /// Returns the address of the first chunk of the first payload.
    pub fn first(&self) -> Address {
        self.received.first
    }
}
