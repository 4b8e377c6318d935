//! Who makes an exchange.

use crate::{
    backend::{Block, Queue},
    error::{Result, error},
    tensor::Device,
};

use super::{
    callbacks::Callbacks,
    exchange::{Exchange, Phases},
    group::Member,
    nccl::Nccl,
    peers::Peers,
};

/// A way to the other ranks.
#[expect(clippy::large_enum_variant, reason = "each communicator has one, which stays where it is")]
pub enum Transport {
    Callbacks(Callbacks),
    Group(Member),
    Nccl(Nccl),
    Peers(Peers),
}

impl Transport {
    /// Blocks until the other ranks come.
    pub fn exchange(&self, exchange: &Exchange<'_>) -> Result<()> {
        match self {
            Self::Callbacks(callbacks) => callbacks.exchange(exchange),
            Self::Group(member) => member.exchange(exchange),
            Self::Nccl(nccl) => nccl.exchange(exchange),
            Self::Peers(peers) => peers.exchange(exchange),
        }
    }

    /// Rejects memory that it cannot exchange, and blocks that are too large.
    pub fn check(&self, device: Device, memory: &Block, bytes: i64) -> Result<()> {
        match self {
            Self::Nccl(nccl) => nccl.check(device, memory),
            Self::Peers(peers) => peers.check(device, memory, bytes),
            Self::Callbacks(_) | Self::Group(_) => Ok(()),
        }
    }

    /// Failures that it knows of, without waiting.
    pub fn async_error(&self) -> Result<()> {
        match self {
            Self::Nccl(nccl) => nccl.async_error(),
            Self::Peers(peers) => peers.async_error(),
            Self::Callbacks(_) | Self::Group(_) => Ok(()),
        }
    }

    /// Whether a GPU's memory has to be copied to the host first.
    pub fn wants_host_memory(&self) -> bool {
        matches!(self, Self::Callbacks(callbacks) if callbacks.want_host_memory())
    }

    /// Whether threads of the host wait for each other in an exchange of a GPU's memory, which no graph can contain.
    fn waits_on_host(&self) -> bool {
        match self {
            Self::Callbacks(_) | Self::Nccl(_) => self.wants_host_memory(),
            Self::Group(_) => true,
            Self::Peers(peers) => peers.waits_on_host(),
        }
    }

    /// Rejects a stream that is being captured where threads of the host wait for each other.
    pub fn check_capture(&self, queue: &mut Queue) -> Result<()> {
        if self.waits_on_host() && queue.is_capturing()? {
            return Err(error!(
                InvalidArgument,
                "stream: it is being captured, and this communicator's ranks wait for each other on the host"
            ));
        }
        Ok(())
    }

    /// Before the first of a call's launches.
    pub fn begin(&self, queue: &mut Queue, phases: Phases) -> Result<()> {
        match (self, queue) {
            (Self::Peers(peers), Queue::Cuda(queue)) => peers.begin(queue, phases),
            _ => Ok(()),
        }
    }

    /// Behind the last of a call's launches.
    pub fn end(&self, queue: &mut Queue, phases: Phases) -> Result<()> {
        match (self, queue) {
            (Self::Peers(peers), Queue::Cuda(queue)) => peers.end(queue, phases),
            _ => Ok(()),
        }
    }

    /// Between two exchanges of one pattern within a call: where the second may overwrite what the first has brought.
    pub fn barrier(&self, queue: &mut Queue) -> Result<()> {
        match (self, queue) {
            (Self::Peers(peers), Queue::Cuda(queue)) => peers.barrier(queue),
            _ => Ok(()),
        }
    }

    /// The memory of the others, if that is what it exchanges over.
    pub fn peers(&self) -> Option<&Peers> {
        match self {
            Self::Peers(peers) => Some(peers),
            _ => None,
        }
    }

    /// The caller gives the communicator up, maybe while another thread is in a call on it: ends what waits, here and,
    /// over a group or peer memory, on the other ranks.
    pub fn end_waits(&self) -> Result<()> {
        match self {
            Self::Callbacks(_) => Ok(()), // which are the caller's to end
            Self::Group(member) => {
                member.abort();
                Ok(())
            }
            Self::Nccl(nccl) => nccl.abort(),
            Self::Peers(peers) => peers.end_meetings(),
        }
    }

    /// This rank will not come to the exchange that the others may be waiting in.
    pub fn abort(&self) {
        match self {
            Self::Callbacks(_) => {} // whose engine knows, or bounds its waiting
            Self::Group(member) => member.abort(),
            Self::Nccl(_) => {} // which has no way to tell the others
            Self::Peers(peers) => peers.abort(),
        }
    }
}
