//! A communicator: the way to all other ranks, over one transport, or over one within the node and one between nodes.

use std::sync::{Arc, OnceLock};

use crate::{
    backend::{Block, Queue, Stream, cuda::Pinned},
    error::{Result, error},
    lock::Entered,
    ops::codec::Codec,
    tensor::Device,
};

use super::{
    hierarchical::{self, Hierarchical},
    link::{Failures, Link, corrupt},
    record::{Bytes, Record, Records, Subject},
    transport::{Exchange, Fused, Pattern, Phases, Staging, Transport, is_inside_callback},
};

/// One of several ranks, and its way to the others.
pub struct Communicator {
    way: Way,
    failures: Failures,
    /// Where GPUs write that something was corrupt: a uint32, not 0 then.
    report: OnceLock<Pinned>,
}

enum Way {
    Flat(Arc<Link>),
    Nodes(Hierarchical),
}

/// Memory that exchanges need besides both sides.
pub enum Workspace {
    Flat(Option<Staging>),
    Nodes(hierarchical::Workspace),
}

/// A call that is in a communicator.
pub struct Call<'a> {
    _links: [Option<Entered<'a, ()>>; 2],
}

impl Communicator {
    /// Over a transport.
    pub fn over(transport: impl Transport + 'static) -> Self {
        Self::new(Way::Flat(Arc::new(Link::new(transport))))
    }

    /// Of two levels.
    pub(super) fn of_nodes(nodes: Hierarchical) -> Self {
        Self::new(Way::Nodes(nodes))
    }

    fn new(way: Way) -> Self {
        Self { way, failures: Failures::default(), report: OnceLock::new() }
    }

    /// What one of two levels shares with it.
    pub(super) fn link(&self) -> Result<Arc<Link>> {
        match &self.way {
            Way::Flat(link) => Ok(link.clone()),
            Way::Nodes(_) => {
                Err(error!(InvalidArgument, "intra_node and inter_node: one of them is itself hierarchical"))
            }
        }
    }

    fn links(&self) -> impl Iterator<Item = &Link> {
        let (flat, both) = match &self.way {
            Way::Flat(link) => (Some(&**link), None),
            Way::Nodes(nodes) => (None, Some(nodes.links())),
        };
        flat.into_iter().chain(both.into_iter().flatten())
    }

    fn transports(&self) -> impl Iterator<Item = &dyn Transport> {
        self.links().map(|link| &*link.transport)
    }

    pub fn rank(&self) -> usize {
        match &self.way {
            Way::Flat(link) => link.rank,
            Way::Nodes(Hierarchical { intra, nodes, .. }) => nodes.own * nodes.ranks + intra.rank,
        }
    }

    pub fn world(&self) -> usize {
        match &self.way {
            Way::Flat(link) => link.world,
            Way::Nodes(Hierarchical { nodes, .. }) => nodes.count * nodes.ranks,
        }
    }

    /// Bytes that this rank sends to other ranks in exchanges of these patterns and blocks, and how many of them leave
    /// the node: None where the ranks do not know their nodes.
    pub(super) fn sent(&self, exchanges: &[(Pattern, i64)]) -> (i64, Option<i64>) {
        match &self.way {
            Way::Flat(link) => {
                let others = link.world as i64 - 1;
                (exchanges.iter().map(|(_, bytes)| others * bytes).sum(), None)
            }
            Way::Nodes(nodes) => {
                let sent = exchanges.iter().map(|&(pattern, bytes)| nodes.sent(pattern, bytes));
                let (within, between) = sent.fold((0, 0), |sum, each| (sum.0 + each.0, sum.1 + each.1));
                (within + between, Some(between))
            }
        }
    }

    /// For a call that exchanges: one at a time, also over the communicators that share a transport with this one. COMM
    /// once this was aborted, or a part of it: over the other one the others may wait for this rank.
    pub(super) fn enter(&self) -> Result<Call<'_>> {
        self.check_aborted().inspect_err(|_| self.give_up())?;
        let mut links = [None, None];
        for (place, link) in links.iter_mut().zip(self.links()) {
            *place = Some(link.enter()?);
        }
        Ok(Call { _links: links })
    }

    /// Ends all waiting on it, on any thread, for good: later exchanges fail.
    pub fn abort(&self) -> Result<()> {
        if is_inside_callback() {
            return Err(error!(InvalidArgument, "comm: a transport's function cannot abort it"));
        }
        self.links().map(Link::abort).fold(Ok(()), Result::and)
    }

    /// COMM once it was aborted, or a part of it.
    fn check_aborted(&self) -> Result<()> {
        self.links().try_for_each(Link::check_aborted)
    }

    /// Failures that are known, without waiting.
    pub fn async_error(&self) -> Result<()> {
        self.check_aborted()?;
        self.transports().try_for_each(Transport::lost_rank)?; // which is why later exchanges fail
        self.failures.check(self.rank())?;
        // SAFETY: four bytes that are there as long as this is, which a GPU may be writing.
        let reported = self.report.get().map_or(0, |word| unsafe { word.data().cast::<u32>().read_volatile() });
        if reported != 0 {
            return Err(corrupt(self.rank()));
        }
        self.links().try_for_each(Link::async_error)
    }

    /// Lets `async_error` know when a codec on a GPU finds something corrupt. On the CPU the calls themselves say so.
    /// `memory`: on the codec's device.
    pub(super) fn listen_to(&self, codec: &Codec, memory: &Block) -> Result<()> {
        let Queue::Cuda(mut queue) = memory.queue(Stream::LEGACY)? else { return Ok(()) };
        if self.report.get().is_none() {
            // One call is in here at a time, so no other one sets it meanwhile.
            let _ = self.report.set(Pinned::new(&mut queue, size_of::<u32>() as i64)?);
        }
        self.report.get().map_or(Ok(()), |word| codec.report_to(word.data()))
    }

    /// Whether exchanges may go on for ever, so that their memory must not be freed.
    pub(super) fn may_hang(&self) -> bool {
        self.transports().any(Transport::may_hang)
    }

    pub(super) fn check(&self, device: Device, memory: &Block, bytes: i64) -> Result<()> {
        match &self.way {
            Way::Flat(link) => link.transport.check(device, memory, bytes),
            Way::Nodes(nodes) => nodes.check(device, memory, bytes),
        }
    }

    /// For exchanges of blocks with up to so many bytes.
    pub(super) fn workspace(&self, queue: &mut Queue, bytes: i64) -> Result<Workspace> {
        match &self.way {
            Way::Flat(link) => link.staging(queue, bytes).map(Workspace::Flat),
            Way::Nodes(nodes) => nodes.workspace(queue, bytes).map(Workspace::Nodes),
        }
    }

    pub(super) fn exchange(&self, exchange: &Exchange<'_>, workspace: &Workspace) -> Result<()> {
        match (&self.way, workspace) {
            (Way::Flat(link), Workspace::Flat(staging)) => link.exchange(exchange, staging.as_ref()).map(|_| ()),
            (Way::Nodes(nodes), Workspace::Nodes(workspace)) => nodes.exchange(exchange, workspace),
            _ => Err(error!(Panic, "communicator: a workspace of another communicator")),
        }
    }

    /// The exchanges that are part of a codec's launches, if the transport has such.
    pub(super) fn fused(&self) -> Option<&dyn Fused> {
        match &self.way {
            Way::Flat(link) if link.world > 1 => link.transport.fused(),
            _ => None,
        }
    }

    /// Before the first of a call's launches. Rejects a stream that is being captured where threads of the host wait for
    /// each other.
    pub(super) fn begin(&self, queue: &mut Queue, phases: Phases) -> Result<()> {
        if self.transports().any(Transport::waits_on_host) && queue.is_capturing()? {
            return Err(error!(
                InvalidArgument,
                "stream: it is being captured, and this communicator's ranks wait for each other on the host"
            ));
        }
        for (index, transport) in self.transports().enumerate() {
            let begun = transport.begin(queue, phases);
            if begun.is_err() && index > 0 {
                self.out_of_step(); // the first has begun
            }
            begun?;
        }
        Ok(())
    }

    /// Behind the last of a call's launches, if what followed its exchanges went well.
    pub(super) fn end(&self, outcome: Result<()>, queue: Result<Queue>, phases: Phases) -> Result<()> {
        let ended = outcome
            .and(queue)
            .and_then(|mut queue| self.transports().try_for_each(|transport| transport.end(&mut queue, phases)));
        if ended.is_err() {
            self.out_of_step();
        }
        self.note(ended)
    }

    /// A call broke off after an exchange: where ranks count what they do, this one is out of step from now on.
    pub(super) fn out_of_step(&self) {
        self.transports().for_each(Transport::out_of_step);
    }

    /// This rank will not come to the exchange that the others may be waiting in.
    pub(super) fn give_up(&self) {
        self.transports().for_each(Transport::give_up);
    }

    /// Remembers a failure for `async_error`.
    pub(super) fn note<T>(&self, outcome: Result<T>) -> Result<T> {
        self.failures.note(outcome)
    }

    /// Remembers a failure of a step that the others may be waiting for, and tells them.
    pub(super) fn or_give_up<T>(&self, outcome: Result<T>) -> Result<T> {
        if outcome.is_err() && self.world() > 1 {
            self.give_up();
        }
        self.note(outcome)
    }

    /// The bootstrap all-gather: 64 bytes of each rank, by rank. If it fails, the others do not wait.
    pub(super) fn all_gather_bytes(&self, own: &Bytes) -> Result<Records> {
        let gathered = Records::with_room(self.world()).and_then(|mut all| {
            match &self.way {
                Way::Flat(link) => link.all_gather(own, &mut all.0)?,
                Way::Nodes(nodes) => nodes.all_gather_bytes(own, &mut all.0)?,
            }
            Ok(all)
        });
        if gathered.is_err() {
            self.give_up();
        }
        gathered
    }

    /// The records of all ranks, which are of one world and create the same thing.
    pub(super) fn all_gather_records(&self, subject: Subject, own: Record) -> Result<Records> {
        let all = self.all_gather_bytes(&own.of_rank(self.rank(), self.world()))?;
        all.check(subject)?;
        Ok(all)
    }
}
