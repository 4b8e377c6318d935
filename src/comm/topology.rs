//! The way to all other ranks: one transport, or one for the ranks of a node and one between nodes.

use std::sync::Arc;

use crate::{
    backend::{Block, Queue},
    error::{Result, error},
    lock::Entered,
    tensor::Device,
};

use super::{
    exchange::{Exchange, Pattern, Phases, Staging},
    hierarchical::{self, Hierarchical},
    link::Link,
    peers::Peers,
    record::{Bytes, Record, Records, Subject},
    transport::Transport,
};

pub enum Topology {
    Flat(Arc<Link>),
    Hierarchical(Hierarchical),
}

/// Memory that exchanges need besides both sides.
pub enum Workspace {
    Flat(Option<Staging>),
    Hierarchical(hierarchical::Workspace),
}

impl Topology {
    fn links(&self) -> impl Iterator<Item = &Link> {
        let (flat, both) = match self {
            Self::Flat(link) => (Some(&**link), None),
            Self::Hierarchical(hierarchical) => (None, Some(hierarchical.links())),
        };
        flat.into_iter().chain(both.into_iter().flatten())
    }

    fn peers(&self) -> impl Iterator<Item = &Peers> {
        self.links().filter_map(|link| link.transport.peers())
    }

    pub fn rank(&self) -> usize {
        match self {
            Self::Flat(link) => link.rank,
            Self::Hierarchical(Hierarchical { intra, nodes, .. }) => nodes.own * nodes.ranks + intra.rank,
        }
    }

    pub fn world(&self) -> usize {
        match self {
            Self::Flat(link) => link.world,
            Self::Hierarchical(Hierarchical { nodes, .. }) => nodes.count * nodes.ranks,
        }
    }

    /// Bytes that this rank sends to other ranks in exchanges of these patterns and blocks, and how many of them leave
    /// the node: None where the ranks do not know their nodes.
    pub fn sent(&self, exchanges: &[(Pattern, i64)]) -> (i64, Option<i64>) {
        match self {
            Self::Flat(link) => {
                let others = link.world as i64 - 1;
                (exchanges.iter().map(|(_, bytes)| others * bytes).sum(), None)
            }
            Self::Hierarchical(hierarchical) => {
                let sent = exchanges.iter().map(|&(pattern, bytes)| hierarchical.sent(pattern, bytes));
                let (within, between) = sent.fold((0, 0), |sum, each| (sum.0 + each.0, sum.1 + each.1));
                (within + between, Some(between))
            }
        }
    }

    /// One call at a time, also over the communicators that share a transport with this one.
    pub fn enter(&self) -> Result<[Option<Entered<'_, ()>>; 2]> {
        let mut entered = [None, None];
        for (place, link) in entered.iter_mut().zip(self.links()) {
            *place = Some(link.enter()?);
        }
        Ok(entered)
    }

    /// Ends all waiting on every link, on any thread, for good; the first failure of that.
    pub fn end_waits(&self) -> Result<()> {
        self.links().map(Link::abort).fold(Ok(()), Result::and)
    }

    /// COMM once it was aborted, or a part of it.
    pub fn check_aborted(&self) -> Result<()> {
        self.links().try_for_each(Link::check_aborted)
    }

    /// Whether NCCL was aborted, or its owner is to do so, or was waited for too long: when its kernels end is not known.
    pub fn may_hang(&self) -> bool {
        self.links().any(|link| match &link.transport {
            Transport::Nccl(nccl) => link.is_aborted() || nccl.hangs(),
            _ => false,
        })
    }

    pub fn check(&self, device: Device, memory: &Block, bytes: i64) -> Result<()> {
        match self {
            Self::Flat(link) => link.transport.check(device, memory, bytes),
            Self::Hierarchical(hierarchical) => hierarchical.check(device, memory, bytes),
        }
    }

    /// For exchanges of blocks with up to so many bytes.
    pub fn workspace(&self, queue: &mut Queue, bytes: i64) -> Result<Workspace> {
        match self {
            Self::Flat(link) => link.staging(queue, bytes).map(Workspace::Flat),
            Self::Hierarchical(hierarchical) => hierarchical.workspace(queue, bytes).map(Workspace::Hierarchical),
        }
    }

    pub fn exchange(&self, exchange: &Exchange<'_>, workspace: &Workspace) -> Result<()> {
        match (self, workspace) {
            (Self::Flat(link), Workspace::Flat(staging)) => link.exchange(exchange, staging.as_ref()).map(|_| ()),
            (Self::Hierarchical(hierarchical), Workspace::Hierarchical(workspace)) => {
                hierarchical.exchange(exchange, workspace)
            }
            _ => Err(error!(Panic, "communicator: a workspace of another topology")),
        }
    }

    /// Before the first of a call's launches.
    pub fn begin(&self, queue: &mut Queue, phases: Phases) -> Result<()> {
        self.links().try_for_each(|link| link.transport.check_capture(queue))?;
        for (index, link) in self.links().enumerate() {
            let begun = link.transport.begin(queue, phases);
            if begun.is_err() && index > 0 {
                self.desynchronized(); // the first has begun
            }
            begun?;
        }
        Ok(())
    }

    /// Behind the last of a call's launches.
    pub fn end(&self, queue: &mut Queue, phases: Phases) -> Result<()> {
        self.links().try_for_each(|link| link.transport.end(queue, phases))
    }

    /// A call broke off after an exchange: where ranks count what they do, this one is out of step from now on.
    pub fn desynchronized(&self) {
        self.peers().for_each(Peers::abort);
    }

    /// This rank will not come to the exchange that the others may be waiting in.
    pub fn abort(&self) {
        self.links().for_each(|link| link.transport.abort());
    }

    /// TIMEOUT if a rank did not come in time, COMM if one aborted, which is why later exchanges fail. Never waits.
    pub fn peer_lost(&self) -> Result<()> {
        self.peers().try_for_each(Peers::async_error)
    }

    pub fn async_error(&self) -> Result<()> {
        self.links().try_for_each(Link::async_error)
    }

    /// The memory of the others, if codecs write there without an exchange.
    pub fn direct(&self) -> Option<&Peers> {
        match self {
            Self::Flat(link) if link.world > 1 => link.transport.peers(),
            _ => None,
        }
    }

    /// The bootstrap all-gather: 64 bytes of each rank, by rank. If it fails, the others do not wait.
    pub fn all_gather_bytes(&self, own: &Bytes) -> Result<Records> {
        let gathered = Records::with_room(self.world()).and_then(|mut all| {
            match self {
                Self::Flat(link) => link.all_gather(own, &mut all.0)?,
                Self::Hierarchical(hierarchical) => hierarchical.all_gather_bytes(own, &mut all.0)?,
            }
            Ok(all)
        });
        if gathered.is_err() {
            self.abort();
        }
        gathered
    }

    /// The records of all ranks, which are of one world and create the same thing.
    pub fn all_gather_records(&self, subject: Subject, own: Record) -> Result<Records> {
        let all = self.all_gather_bytes(&own.of_rank(self.rank(), self.world()))?;
        all.check(subject)?;
        Ok(all)
    }
}
