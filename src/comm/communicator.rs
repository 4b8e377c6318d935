//! A communicator: one link to all ranks, or one to the ranks of this node and one to the other nodes.

use std::sync::Arc;

use crate::ffi::{
    error::{Result, error},
    lock::Entered,
};

use super::{
    link::Link,
    record::{Bytes, Record, Records, Subject},
    transport::{Transport, is_inside_callback},
};

/// Links of a rank to the other ranks.
pub enum Communicator {
    Flat(Arc<Link>),
    /// Links over N nodes of R ranks, both at least 2.
    Nodes {
        intra: Arc<Link>,
        inter: Arc<Link>,
    },
}

/// Guard of a call that has entered a communicator.
pub struct Call<'a> {
    _links: [Option<Entered<'a, ()>>; 2],
}

impl Communicator {
    /// Creates a flat communicator over a transport.
    pub fn over(transport: impl Transport + 'static) -> Self {
        Self::Flat(Arc::new(Link::new(transport)))
    }

    /// Returns the link that a hierarchical communicator shares with this one.
    pub(super) fn link(&self) -> Result<Arc<Link>> {
        match self {
            Self::Flat(link) => Ok(link.clone()),
            Self::Nodes { .. } => {
                Err(error!(InvalidArgument, "intra_node and inter_node: one of them is itself hierarchical"))
            }
        }
    }

    /// Returns the link over which codecs exchange chunks.
    pub(super) fn of_chunks(&self) -> &Link {
        match self {
            Self::Flat(link) => link,
            Self::Nodes { inter, .. } => inter,
        }
    }

    /// Returns the link to the ranks of this node, which sum their values up before codecs exchange chunks.
    pub(super) fn within_node(&self) -> Option<&Arc<Link>> {
        match self {
            Self::Flat(_) => None,
            Self::Nodes { intra, .. } => Some(intra),
        }
    }

    fn links(&self) -> impl Iterator<Item = &Link> {
        [self.within_node().map(|link| &**link), Some(self.of_chunks())].into_iter().flatten()
    }

    pub fn rank(&self) -> usize {
        match self {
            Self::Flat(link) => link.rank,
            Self::Nodes { intra, inter } => inter.rank * intra.world + intra.rank,
        }
    }

    pub fn world(&self) -> usize {
        self.links().map(|link| link.world).product()
    }

    /// Enters the communicator for a call that exchanges: one at a time, also over communicators that share a transport
    /// with this one. Returns COMM once a link is aborted, and ends the waits of other ranks over both links.
    pub(super) fn enter(&self) -> Result<Call<'_>> {
        let rank = self.rank();
        self.links().try_for_each(|link| link.check_aborted(rank)).inspect_err(|_| self.give_up())?;
        let mut links = [None, None];
        for (place, link) in links.iter_mut().zip(self.links()) {
            *place = Some(link.enter()?);
        }
        Ok(Call { _links: links })
    }

    /// Ends all waits on the communicator, on every thread, for good: later exchanges fail.
    pub fn abort(&self) -> Result<()> {
        if is_inside_callback() {
            return Err(error!(InvalidArgument, "comm: a transport's function cannot abort it"));
        }
        self.links().map(Link::abort).fold(Ok(()), Result::and)
    }

    /// Returns a known failure without waiting.
    pub fn async_error(&self) -> Result<()> {
        let rank = self.rank();
        self.links().try_for_each(|link| link.check_aborted(rank))?;
        self.links().try_for_each(|link| link.async_error(rank))
    }

    /// Returns true if exchanges may never end, so that their memory must not be freed.
    pub(super) fn may_hang(&self) -> bool {
        self.links().any(|link| link.transport.may_hang())
    }

    /// Ends the waits of the other ranks: this rank skips the exchange that they may wait in.
    pub(super) fn give_up(&self) {
        self.links().for_each(|link| link.transport.give_up());
    }

    /// Performs the bootstrap all-gather of 64 bytes per rank. If it fails, ends the waits of the other ranks.
    pub(super) fn all_gather_bytes(&self, own: &Bytes) -> Result<Records> {
        let gathered = Records::with_room(self.world()).and_then(|mut all| {
            match self {
                Self::Flat(link) => link.all_gather(own, &mut all.0)?,
                Self::Nodes { intra, inter } => {
                    let mut of_node = Records::with_room(intra.world)?;
                    intra.all_gather(own, &mut of_node.0)?;
                    // All ranks of a node have the same records. Each sends them to its own number on other nodes.
                    let mut of_rank = Records::with_room(inter.world)?;
                    for (rank, record) in of_node.0.iter().enumerate() {
                        inter.all_gather(record, &mut of_rank.0)?;
                        for (node, record) in of_rank.0.iter().enumerate() {
                            all.0[node * intra.world + rank] = *record;
                        }
                    }
                }
            }
            Ok(all)
        });
        if gathered.is_err() {
            self.give_up();
        }
        gathered
    }

    /// Gathers the records of all ranks, and checks that these are of one world and create the same kind of object.
    pub(super) fn all_gather_records(&self, subject: Subject, own: Record) -> Result<Records> {
        let all = self.all_gather_bytes(&own.of_rank(self.rank(), self.world()))?;
        all.check(subject)?;
        Ok(all)
    }
}
