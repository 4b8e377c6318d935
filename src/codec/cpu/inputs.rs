//! The chunks that are reduced.

use crate::{
    codec::{call::Received, plan::CodecPlan},
    dlpack::Address,
};

/// Chunks of several payloads, whose headers were checked.
pub struct Inputs<'a> {
    pub received: Received,
    /// The number of the first chunk.
    pub number: usize,
    /// Those of all chunks.
    pub flags: u32,
    pub plan: &'a CodecPlan,
}

impl Inputs<'_> {
    pub fn payloads(&self) -> usize {
        self.received.payloads
    }

    /// The number of the first byte of bits of the first chunk.
    pub fn start(&self) -> i64 {
        self.plan.held_by(self.number).start
    }

    /// A byte of the first payload's bits, counted from the first byte of the chunk.
    pub fn bits(&self, byte: i64) -> *mut u8 {
        self.received.first.at((self.plan.layout.scales_at + byte) as usize)
    }

    /// The address of the first chunk of the first payload.
    pub fn first(&self) -> Address {
        self.received.first
    }
}
