//! The two exchanges that there are, as every transport is asked for them.

use crate::{
    backend::{Block, Queue, Stream, cuda, cuda::Pinned},
    error::Result,
    tensor::Device,
};

/// How long a rank waits for the others: what the caller says, or 10 minutes for 0.
pub fn timeout(milliseconds: u32) -> u32 {
    if milliseconds == 0 { 600_000 } else { milliseconds }
}

/// Which block goes to which rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Block k of what a rank sends is for rank k.
    AllToAll,
    /// What a rank sends is for every rank.
    AllGather,
}

/// Which exchanges a call makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phases {
    Both,
    AllToAll,
    AllGather,
    /// One of whole payloads over peer memory.
    Once,
}

/// One rank's part in an exchange. In both patterns it receives a block from each rank, its own too, in ranks' order.
#[derive(Clone, Copy)]
pub struct Exchange<'a> {
    pub pattern: Pattern,
    /// A block for each rank, or one for all.
    pub send: *const u8,
    /// Room for a block of each rank.
    pub recv: *mut u8,
    /// Of a block: at least 1.
    pub bytes: usize,
    pub device: Device,
    pub stream: Stream,
    /// What both sides are part of, on a GPU.
    pub memory: Option<&'a Block>,
    /// On a GPU: a uint32 that becomes 1 if a rank is lost; or NULL.
    pub error_flag: *mut u8,
}

impl Exchange<'_> {
    /// A queue in the context of the memory.
    pub fn queue(&self) -> Result<Queue> {
        self.memory.map_or(Ok(Queue::Cpu), |memory| memory.queue(self.stream))
    }
}

/// Pinned memory for what is sent and what is received, for transports that take host memory only.
pub struct Staging {
    memory: Pinned,
    half: usize,
}

impl Staging {
    pub fn new(queue: &mut cuda::Queue, half: i64) -> Result<Self> {
        Ok(Self { memory: Pinned::new(queue, 2 * half)?, half: half as usize })
    }

    pub fn send(&self) -> *mut u8 {
        self.memory.data()
    }

    pub fn recv(&self) -> *mut u8 {
        self.memory.data().wrapping_add(self.half)
    }
}
