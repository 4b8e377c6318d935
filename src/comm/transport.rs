//! The two exchanges, and who makes them.

use crate::{
    backend::{Block, Queue, Stream},
    error::{Result, error},
    tensor::Device,
};

use super::{
    callbacks::Callbacks,
    group::Member,
    nccl::Nccl,
    peers::Peers,
    two::{Buffers, Two},
};

/// What goes where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Block k of what a rank sends is for rank k.
    AllToAll,
    /// What a rank sends is for every rank.
    AllGather,
}

/// Which exchanges a call makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    Both,
    AllToAll,
    AllGather,
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
    /// What both sides are part of, on a card.
    pub memory: Option<&'a Block>,
    /// On a card: where it is to be said, by a uint32 1, that a rank did not come; or NULL.
    pub mark: *mut u8,
    /// What exchanges by two work in.
    pub buffers: Option<&'a Buffers>,
}

impl Exchange<'_> {
    /// A queue in the context of the memory.
    pub fn queue(&self) -> Result<Queue> {
        self.memory.map_or(Ok(Queue::Cpu), |memory| memory.queue(self.stream))
    }
}

/// A way to the other ranks.
pub enum Transport {
    Callbacks(Callbacks),
    Group(Member),
    Nccl(Nccl),
    Peers(Peers),
    Two(Two),
}

impl Transport {
    /// Blocks until the other ranks come.
    pub fn exchange(&self, exchange: &Exchange<'_>) -> Result<()> {
        match self {
            Self::Callbacks(callbacks) => callbacks.exchange(exchange),
            Self::Group(member) => member.exchange(exchange),
            Self::Nccl(nccl) => nccl.exchange(exchange),
            Self::Peers(peers) => peers.exchange(exchange),
            Self::Two(two) => two.exchange(exchange),
        }
    }

    /// Refuses memory that it cannot exchange, and blocks that are too large.
    pub fn check(&self, device: Device, memory: &Block, bytes: i64) -> Result<()> {
        match self {
            Self::Nccl(nccl) => nccl.check(device, memory),
            Self::Peers(peers) => peers.check(device, memory, bytes),
            Self::Two(two) => two.check(device, memory, bytes),
            Self::Callbacks(_) | Self::Group(_) => Ok(()),
        }
    }

    /// What it knows to have gone wrong since, without waiting for anything.
    pub fn async_error(&self) -> Result<()> {
        match self {
            Self::Nccl(nccl) => nccl.async_error(),
            Self::Peers(peers) => peers.async_error(),
            Self::Two(two) => two.async_error(),
            Self::Callbacks(_) | Self::Group(_) => Ok(()),
        }
    }

    /// That a rank did not come in time, which is why later exchanges fail. Never waits.
    pub fn late(&self) -> Result<()> {
        match self {
            Self::Peers(peers) => peers.async_error(),
            Self::Two(two) => two.late(),
            Self::Callbacks(_) | Self::Group(_) | Self::Nccl(_) => Ok(()),
        }
    }

    /// Whether what is on a card has to be brought to the host first.
    pub fn wants_host_memory(&self) -> bool {
        matches!(self, Self::Callbacks(callbacks) if callbacks.want_host_memory())
    }

    /// Whether threads of the host wait for each other in an exchange of a card's memory, which no graph can hold.
    pub fn waits_on_host(&self) -> bool {
        match self {
            Self::Callbacks(_) | Self::Nccl(_) => self.wants_host_memory(),
            Self::Group(_) => true,
            Self::Peers(peers) => peers.waits_on_host(),
            Self::Two(two) => two.waits_on_host(),
        }
    }

    /// What exchanges of blocks with up to so many bytes work in, if it needs that.
    pub fn buffers(&self, queue: &mut Queue, bytes: i64) -> Result<Option<Buffers>> {
        match self {
            Self::Two(two) => two.buffers(queue, bytes).map(Some),
            _ => Ok(None),
        }
    }

    /// Between two exchanges of one kind within a call: where the second may write to what the first has brought, the ranks
    /// meet.
    pub fn part(&self, queue: &mut Queue) -> Result<()> {
        match (self, queue) {
            (Self::Peers(peers), Queue::Cuda(queue)) => peers.meet_alone(queue),
            _ => Ok(()),
        }
    }

    /// Where blocks arrive by each pattern, if it has places of its own for them.
    pub fn areas(&self) -> Option<[*mut u8; 2]> {
        match self {
            Self::Peers(peers) => Some(peers.areas()),
            _ => None,
        }
    }

    /// Before a call's first launch: refuses to become part of a graph where threads of the host wait for each other.
    pub fn begin(&self, queue: &mut Queue, span: Span) -> Result<()> {
        if let (Self::Peers(peers), Queue::Cuda(queue)) = (self, &mut *queue) {
            return peers.begin(queue, span);
        }
        if self.waits_on_host() && queue.is_capturing()? {
            return Err(error!(
                InvalidArgument,
                "stream: it is being captured, and this communicator's ranks wait for each other on the host"
            ));
        }
        if let Self::Two(two) = self {
            return two.begin(queue, span);
        }
        Ok(())
    }

    /// Behind a call's last launch.
    pub fn end(&self, queue: &mut Queue, span: Span) -> Result<()> {
        match (self, queue) {
            (Self::Peers(peers), Queue::Cuda(queue)) => peers.end(queue, span),
            (Self::Two(two), queue) => two.end(queue, span),
            _ => Ok(()),
        }
    }

    /// A call was broken off after an exchange: where ranks count what they do, this one is behind from now on.
    pub fn lose_count(&self) {
        match self {
            Self::Peers(peers) => peers.give_up(),
            Self::Two(two) => two.lose_count(),
            Self::Callbacks(_) | Self::Group(_) | Self::Nccl(_) => {}
        }
    }

    /// This rank will not come to the exchange that the others may be waiting in.
    pub fn give_up(&self) {
        match self {
            Self::Callbacks(_) => {} // whose engine knows, or bounds its waiting
            Self::Group(member) => member.give_up(),
            Self::Nccl(_) => {} // which has no way to tell the others
            Self::Peers(peers) => peers.give_up(),
            Self::Two(two) => two.give_up(),
        }
    }
}
