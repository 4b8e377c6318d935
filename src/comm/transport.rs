//! The two exchanges, and who makes them.

use crate::{backend::Stream, error::Result, tensor::Device};

use super::{callbacks::Callbacks, group::Member};

/// What goes where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Block k of what a rank sends is for rank k.
    AllToAll,
    /// What a rank sends is for every rank.
    AllGather,
}

/// One rank's part in an exchange. In both patterns it receives a block from each rank, its own too, in ranks' order.
#[derive(Clone, Copy)]
pub struct Exchange {
    pub pattern: Pattern,
    /// A block for each rank, or one for all.
    pub send: *const u8,
    /// Room for a block of each rank.
    pub recv: *mut u8,
    /// Of a block: at least 1.
    pub bytes: usize,
    pub device: Device,
    pub stream: Stream,
}

/// A way to the other ranks.
pub enum Transport {
    Callbacks(Callbacks),
    Group(Member),
}

impl Transport {
    /// Blocks until the other ranks come.
    pub fn exchange(&self, rank: usize, world: usize, exchange: &Exchange) -> Result<()> {
        match self {
            Self::Callbacks(callbacks) => callbacks.exchange(exchange),
            Self::Group(member) => member.exchange(rank, world, exchange),
        }
    }

    /// This rank will not come to the exchange that the others may be waiting in.
    pub fn give_up(&self, rank: usize) {
        match self {
            Self::Callbacks(_) => {} // whose engine knows, or bounds its waiting
            Self::Group(member) => member.give_up(rank),
        }
    }
}
