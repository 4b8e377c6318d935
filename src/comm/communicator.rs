//! A communicator: the way to the other ranks, and the steps of the all-reduces over it.

use std::{
    ptr,
    sync::{Arc, OnceLock},
};

use crate::{
    backend::{
        Destination, Queue, Stream,
        cuda::{self, Pinned},
    },
    error::{Error, Result, Status, error},
    lock::Entered,
    ops::codec::Codec,
    tensor::{Device, View},
};

use super::{
    buffers::Buffers,
    callbacks::{self, Callbacks},
    exchange::{Pattern, Phases},
    group::Member,
    hierarchical::Hierarchical,
    hierarchical_setup::find_nodes,
    link::{Failures, Link, corrupt},
    nccl::Nccl,
    peers::Peers,
    peers_setup,
    topology::Topology,
    transport::Transport,
};

/// One of several ranks, and its way to the others.
pub struct Communicator {
    pub(super) topology: Topology,
    /// For `async_error`.
    pub(super) failures: Failures,
    /// Where GPUs write that something was corrupt: a uint32, not 0 then.
    report: OnceLock<Pinned>,
}

/// A call that is in a communicator.
pub struct Call<'a> {
    _links: [Option<Entered<'a, ()>>; 2],
}

impl Communicator {
    fn new(topology: Topology) -> Self {
        Self { topology, failures: Failures::default(), report: OnceLock::new() }
    }

    fn over(rank: usize, world: usize, transport: Transport) -> Result<Self> {
        Ok(Self::new(Topology::Flat(Arc::new(Link::new(rank, world, transport)))))
    }

    /// Over callbacks of the caller.
    pub fn over_callbacks(rank: i32, world: i32, callbacks: Callbacks) -> Result<Self> {
        let ranks = usize::try_from(world).ok().filter(|&ranks| ranks > 0);
        match (ranks, usize::try_from(rank)) {
            (Some(ranks), Ok(rank)) if rank < ranks => Self::over(rank, ranks, Transport::Callbacks(callbacks)),
            _ => Err(error!(InvalidArgument, "transport: rank {rank} of {world}: 0 <= rank < world_size expected")),
        }
    }

    /// Of a group in this process.
    pub fn over_group(member: Member) -> Result<Self> {
        let (rank, world) = member.place();
        Self::over(rank, world, Transport::Group(member))
    }

    /// Over NCCL.
    pub fn over_nccl(nccl: Nccl) -> Result<Self> {
        let (rank, world) = nccl.place();
        Self::over(rank, world, Transport::Nccl(nccl))
    }

    /// Over memory that the ranks reach.
    pub fn over_peers(peers: Peers) -> Result<Self> {
        let (rank, world) = peers.place();
        Self::over(rank, world, Transport::Peers(peers))
    }

    /// Over peer memory that is allocated and found over another communicator. Every rank comes here.
    pub fn open_peers(bootstrap: &Self, device: Result<Device>, bytes: i64, timeout_ms: u32) -> Result<Self> {
        let _call = bootstrap.enter()?;
        let peers = peers_setup::open(&bootstrap.topology, device, bytes, timeout_ms)?;
        let (rank, world) = peers.place();
        Self::over(rank, world, Transport::Peers(peers))
    }

    /// Of two levels. Every rank comes here, with what went wrong before, if that did.
    pub fn hierarchical(intra: &Self, inter: Option<&Self>, so_far: Result<()>) -> Result<Self> {
        let mut links = None;
        let so_far = so_far.and_then(|()| {
            if inter.is_some_and(|inter| ptr::eq(intra, inter)) {
                return Err(error!(InvalidArgument, "intra_node and inter_node are one communicator"));
            }
            links = Some((intra.link()?, inter.map(Self::link).transpose()?));
            Ok(())
        });
        let found = intra.enter().and_then(|_intra_call| {
            let (inter, _inter_call) = match inter.map(|inter| (inter, inter.enter())) {
                None => (None, None),
                Some((inter, Ok(call))) => (Some(inter), Some(call)),
                // Itself, or one that shares a transport with it.
                Some((_, Err(_))) if so_far.is_err() => (None, None),
                Some((_, Err(refusal))) => return Err(refusal),
            };
            find_nodes(&intra.topology, inter.map(|inter| &inter.topology), so_far)
        });
        if found.as_ref().is_err_and(|failure| failure.status != Status::Busy) {
            // The others may be waiting for this rank, over either.
            [Some(intra), inter].into_iter().flatten().for_each(|one| one.topology.abort());
        }
        let nodes = found??;
        let Some((intra, inter)) = links else { return Err(error!(Panic, "communicator: two levels without links")) };
        Ok(Self::new(Topology::Hierarchical(Hierarchical { intra, inter, nodes })))
    }

    pub fn rank(&self) -> usize {
        self.topology.rank()
    }

    pub fn world(&self) -> usize {
        self.topology.world()
    }

    fn link(&self) -> Result<Arc<Link>> {
        match &self.topology {
            Topology::Flat(link) => Ok(link.clone()),
            Topology::Hierarchical(_) => {
                Err(error!(InvalidArgument, "intra_node and inter_node: one of them is itself hierarchical"))
            }
        }
    }

    /// For a call that exchanges: one at a time, also over the communicators that share a transport with this one. COMM
    /// once this was aborted, or a part of it: over the other one the others may wait for this rank.
    pub fn enter(&self) -> Result<Call<'_>> {
        self.topology.check_aborted().inspect_err(|_| self.topology.abort())?;
        Ok(Call { _links: self.topology.enter()? })
    }

    /// The communication buffers of a codec, whose failures on a GPU this communicator hears of from now on.
    pub fn buffers(&self, device: Device, codec: &Codec) -> Result<Buffers> {
        let buffers = Buffers::new(&self.topology, device, codec)?;
        if let Queue::Cuda(mut queue) = buffers.memory().queue(Stream::LEGACY)? {
            self.listen_to(codec, &mut queue)?;
        }
        Ok(buffers)
    }

    /// Ends all waiting on it, on any thread, for good: later exchanges fail.
    pub fn abort(&self) -> Result<()> {
        if callbacks::is_inside() {
            return Err(error!(InvalidArgument, "comm: a transport's function cannot abort it"));
        }
        self.topology.end_waits()
    }

    /// Failures that are known, without waiting.
    pub fn async_error(&self) -> Result<()> {
        self.topology.check_aborted()?;
        self.topology.peer_lost()?; // which is why later exchanges fail
        self.failures.check(self.topology.rank())?;
        // SAFETY: four bytes that are there as long as this is, which a GPU may be writing.
        let reported = self.report.get().map_or(0, |word| unsafe { word.data().cast::<u32>().read_volatile() });
        if reported != 0 {
            return Err(corrupt(self.topology.rank()));
        }
        self.topology.async_error()
    }

    /// Lets `async_error` know when a codec on a GPU meets what is corrupt. On the CPU the calls themselves say so.
    fn listen_to(&self, codec: &Codec, queue: &mut cuda::Queue) -> Result<()> {
        if self.report.get().is_none() {
            // One call is in here at a time, so nobody else sets it meanwhile.
            let _ = self.report.set(Pinned::new(queue, size_of::<u32>() as i64)?);
        }
        self.report.get().map_or(Ok(()), |word| codec.report_to(word.data()))
    }

    /// The end of a call that has exchanged, if what followed that went well.
    pub fn end(&self, outcome: Result<()>, buffers: &Buffers, phases: Phases, stream: Stream) -> Result<()> {
        let ended = outcome.and_then(|()| self.topology.end(&mut buffers.memory().queue(stream)?, phases));
        if ended.is_err() {
            self.topology.desynchronized();
        }
        self.failures.note(ended)
    }

    /// Remembers a failure of a step that the others may be waiting for, and tells them.
    fn or_abort<T>(&self, outcome: Result<T>) -> Result<T> {
        if outcome.is_err() && self.topology.world() > 1 {
            self.topology.abort();
        }
        self.failures.note(outcome)
    }

    /// Where a codec puts what this rank sends: into the buffers, or straight to where the others receive it.
    fn destination<'a>(&self, pattern: Pattern, buffers: &'a Buffers) -> Destination<'a> {
        match (self.topology.direct(), pattern) {
            (Some(peers), _) => Destination::Peers(peers.sending(pattern, buffers.stride())),
            (None, Pattern::AllToAll) => Destination::Memory(buffers.payload()),
            (None, Pattern::AllGather) => Destination::Memory(buffers.chunk()),
        }
    }

    /// Brings what a codec has put there to the others.
    fn deliver(&self, pattern: Pattern, buffers: &Buffers, stream: Stream) -> Result<()> {
        match (self.topology.direct(), &mut buffers.memory().queue(stream)?) {
            (Some(peers), Queue::Cuda(queue)) => peers.arrive(queue, buffers.error_flag()),
            _ if self.topology.world() == 1 => Ok(()),
            _ => buffers.exchange(&self.topology, pattern, stream),
        }
    }

    /// Encodes this rank's values and sends each rank its chunk: the first step of an all-reduce.
    pub fn encode<'v>(
        &self, codec: &Codec, buffers: &Buffers, values: impl ExactSizeIterator<Item = Result<View<'v>>>,
        factors: &[Option<View<'_>>; 2], stream: Stream,
    ) -> Result<()> {
        let to = self.destination(Pattern::AllToAll, buffers);
        let was_torn = codec.is_torn(); // by an earlier call: then this one sends nothing
        let encoded = codec.encode(values, factors, to, stream);
        if encoded.is_err() && self.topology.direct().is_some() && !was_torn && codec.is_torn() {
            // A part of it is with the others.
            self.topology.abort();
        }
        encoded?;
        self.or_abort(self.deliver(Pattern::AllToAll, buffers, stream))
    }

    /// Reduces this rank's chunk and sends it to all: the second step. Gives the reduced chunks of all ranks.
    ///
    /// A chunk that is corrupt goes on, flagged, so that the others neither wait nor take it for good.
    pub fn reduce<'a>(&self, codec: &Codec, buffers: &'a Buffers, stream: Stream) -> Result<View<'a>> {
        let to = self.destination(Pattern::AllGather, buffers);
        let reduced = match codec.reduce(self.topology.rank(), &buffers.payloads(), to, stream) {
            Err(Error { status: Status::Corrupt, .. }) => Ok(()), // and so the decoding says
            outcome => outcome,
        };
        self.or_abort(reduced.and_then(|()| self.deliver(Pattern::AllGather, buffers, stream)))?;
        Ok(buffers.gathered())
    }

    /// Encodes this rank's values and sends all of them to every rank: the first step where ranks exchange once. Gives
    /// the payloads of all.
    pub fn encode_for_all<'a, 'v>(
        &self, codec: &Codec, buffers: &'a Buffers, values: impl ExactSizeIterator<Item = Result<View<'v>>>,
        factors: &[Option<View<'_>>; 2], stream: Stream,
    ) -> Result<View<'a>> {
        let encoded = codec.encode(values, factors, Destination::Memory(buffers.payload()), stream);
        if encoded.is_err() {
            self.topology.desynchronized(); // the others have met this rank before
        }
        encoded?;
        self.or_abort(buffers.exchange_whole(&self.topology, stream))
    }

    /// All steps where ranks exchange once over peer memory.
    pub fn exchange_once<'v>(
        &self, codec: &Codec, values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone,
        factor: Option<&View<'_>>, stream: Stream,
    ) -> Result<()> {
        let peers = self.topology.direct();
        let way = peers.and_then(|peers| Some((peers, peers.once(codec.plan().payload_bytes())?)));
        let (peers, once) = way.ok_or_else(|| error!(Panic, "communicator: no room for whole payloads"))?;
        let mut steps = peers.steps_once().iter();
        if let Some(&first) = steps.next() {
            codec.exchange_once(values.clone(), factor, once, first, stream)?;
        }
        for &step in steps {
            // The others have what they wait for; this rank would be a meeting behind.
            let come = peers.come().and_then(|()| codec.exchange_once(values.clone(), factor, once, step, stream));
            self.or_abort(come)?;
        }
        Ok(())
    }

    /// Whether all steps of two exchanges are one launch: not where ranks share a GPU, which speak in one and listen in
    /// another.
    pub fn takes_one_launch(&self, codec: &Codec) -> Result<bool> {
        match self.topology.direct() {
            Some(peers) if peers.steps_once().len() == 1 => codec.fits_one_launch(),
            _ => Ok(false),
        }
    }

    /// All steps where they are.
    pub fn exchange_twice<'v>(
        &self, codec: &Codec, buffers: &Buffers, values: impl ExactSizeIterator<Item = Result<View<'v>>>,
        factors: &[Option<View<'_>>; 2], stream: Stream,
    ) -> Result<()> {
        let peers = self.topology.direct().ok_or_else(|| error!(Panic, "communicator: no peer memory"))?;
        let [to_each, to_all] =
            [Pattern::AllToAll, Pattern::AllGather].map(|pattern| peers.sending(pattern, buffers.stride()).way);
        let (received, gathered) = (buffers.payloads(), buffers.gathered());
        codec.exchange_twice(values, factors, (to_each, &received), (to_all, &gathered), stream)
    }

    /// Instead of `reduce`: the mean of this rank's chunk, before the server's error.
    pub fn mean(&self, codec: &Codec, buffers: &Buffers, shard: &View<'_>, stream: Stream) -> Result<()> {
        match codec.mean(self.topology.rank(), &buffers.payloads(), &buffers.chunk(), shard, stream) {
            // The others have what they came for, and this rank can go on, too.
            outcome @ (Ok(()) | Err(Error { status: Status::Corrupt, .. })) => self.failures.note(outcome),
            outcome => self.or_abort(outcome),
        }
    }

    /// Encodes this rank's shard and sends it to all. Gives the reduced chunks of all ranks.
    pub fn gather<'a>(
        &self, codec: &Codec, buffers: &'a Buffers, shard: &View<'_>, stream: Stream,
    ) -> Result<View<'a>> {
        let encoded = codec.encode_shard(shard, self.destination(Pattern::AllGather, buffers), stream);
        self.or_abort(encoded.and_then(|()| self.deliver(Pattern::AllGather, buffers, stream)))?;
        Ok(buffers.gathered())
    }

    /// Sets values to what the ranks have reduced: the last step.
    pub fn decode<'v>(
        &self, codec: &Codec, reduced: &View<'_>, values: impl ExactSizeIterator<Item = Result<View<'v>>>,
        stream: Stream,
    ) -> Result<()> {
        codec.decode_reduced(reduced, self.topology.direct().is_some(), values, stream)
    }
}
