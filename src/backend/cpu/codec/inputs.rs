//! The chunks that are reduced.

use crate::{
    backend::call::{Address, Received},
    error::Result,
    plan::codec::CodecPlan,
};

use super::{chunks, family::Family};

/// Chunks of several payloads, whose headers were checked.
pub struct Inputs<'a> {
    pub received: Received,
    /// The number of the first chunk.
    pub number: usize,
    plan: &'a CodecPlan,
}

impl<'a> Inputs<'a> {
    /// The chunks from `number` on, and the flags that they carry. Refuses a chunk that is corrupt.
    pub fn of(family: &dyn Family, plan: &'a CodecPlan, received: Received, number: usize) -> Result<(Self, u32)> {
        let mut flags = 0;
        for payload in 0..received.payloads {
            let who = format_args!("{}[{payload}]", received.name);
            for index in 0..plan.server_chunks {
                let chunk = received.at(payload).wrapping_add(index * plan.stride() as usize);
                // SAFETY: every payload has `server_chunks` chunks there.
                flags |= unsafe { chunks::check(family, plan, who, chunk, number + index) }?;
            }
        }
        Ok((Self { received, number, plan }, flags))
    }

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
