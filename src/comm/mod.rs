//! Ranks that exchange memory, and the all-reduces of gradients made small over them.
//!
//! - `transport`: the two exchanges that there are, and who makes them: `callbacks` of the caller, `group` for ranks that
//!   are threads of one process, `nccl`, `peers` for ranks that reach each other's memory, `two` of these for machines;
//! - `wire`: the memory that is exchanged;
//! - `plain`: the all-reduce whose errors are the caller's tensors; `allreduce`: the handle, which keeps its own.

mod allreduce;
mod callbacks;
mod group;
mod nccl;
mod peers;
mod plain;
mod rendezvous;
mod shared;
mod transport;
mod two;
mod wire;

use std::{
    ops::{Deref, DerefMut},
    sync::{
        Mutex, MutexGuard, OnceLock, TryLockError,
        atomic::{AtomicI32, Ordering},
    },
};

use crate::{
    backend::{
        Queue, Stream,
        cuda::{self, Pinned},
    },
    error::{Error, Result, Status, error},
    ops::codec::Codec,
    tensor::{Device, View},
};

pub use allreduce::AllReduce;
pub use callbacks::{Callback, Callbacks};
pub use group::group;
pub use nccl::{ID_BYTES as NCCL_ID_BYTES, Nccl};
pub use peers::{MOST_RANKS as MOST_PEERS, Peers, Places, open_peers, peers_bytes, ranks_of as check_peers_world};
pub use plain::{allreduce, shard_elements};
pub use shared::Shared;
pub use two::two;

use plain::Scratch;
use transport::{Exchange, Pattern, Span, Transport};
use wire::Wire;

/// One of several ranks, and its way to the others.
pub struct Communicator {
    rank: usize,
    world: usize,
    transport: Transport,
    /// Only ever tried: whoever finds it locked is told so. What the calls whose errors are the caller's work in: the last
    /// one is in use, those before it are outgrown.
    scratches: Mutex<Vec<Scratch>>,
    /// The status of what went wrong, 0: nothing.
    failed: AtomicI32,
    /// Where cards write that something was corrupt: a uint32, not 0 then.
    report: OnceLock<Pinned>,
}

impl Communicator {
    fn new(rank: usize, world: usize, transport: Transport) -> Self {
        Self {
            rank,
            world,
            transport,
            scratches: Mutex::new(Vec::new()),
            failed: AtomicI32::new(0),
            report: OnceLock::new(),
        }
    }

    /// Over callbacks of the caller.
    pub fn over_callbacks(rank: i32, world: i32, callbacks: Callbacks) -> Result<Self> {
        let ranks = usize::try_from(world).ok().filter(|&ranks| ranks > 0);
        match (ranks, usize::try_from(rank)) {
            (Some(ranks), Ok(rank)) if rank < ranks => Ok(Self::new(rank, ranks, Transport::Callbacks(callbacks))),
            _ => Err(error!(InvalidArgument, "transport: rank {rank} of {world}: 0 <= rank < world_size expected")),
        }
    }

    /// Over NCCL.
    pub fn over_nccl(nccl: Nccl) -> Self {
        let (rank, world) = nccl.place();
        Self::new(rank, world, Transport::Nccl(nccl))
    }

    /// Over memory that the ranks reach.
    pub fn over_peers(peers: Peers) -> Self {
        let (rank, world) = peers.place();
        Self::new(rank, world, Transport::Peers(peers))
    }

    /// Makes what calls with up to so many elements on this device work in.
    pub fn reserve(&self, device: Device, elements: i64) -> Result<()> {
        if elements < 0 {
            return Err(error!(InvalidArgument, "n_elements: {elements} is negative"));
        }
        let mut scratches = self.enter()?;
        if elements > 0 && Scratch::there(&mut scratches, device, elements).is_none() {
            Scratch::made(self, &mut scratches, device, elements)?;
        }
        Ok(())
    }

    /// What is known to have gone wrong, without waiting for anything.
    pub fn async_error(&self) -> Result<()> {
        self.transport.late()?; // which is why later exchanges fail
        // SAFETY: four bytes that are there as long as this is, which a card may be writing.
        let reported = self.report.get().map_or(0, |word| unsafe { word.data().cast::<u32>().read_volatile() });
        match self.failed.load(Ordering::Relaxed) {
            code if code == Status::Comm as i32 => {
                Err(error!(Comm, "communicator: an exchange of rank {} failed", self.rank))
            }
            0 if reported == 0 => self.transport.async_error(),
            _ => Err(error!(Corrupt, "communicator: rank {} received what no rank of this version sends", self.rank)),
        }
    }

    /// Lets `async_error` know of what a codec meets on a card. On the CPU the calls themselves say it.
    fn listen_to(&self, codec: &Codec, queue: &mut cuda::Queue) -> Result<()> {
        if self.report.get().is_none() {
            // One call is in here at a time; another one would have made as good a place.
            let _ = self.report.set(Pinned::new(queue, size_of::<u32>() as i64)?);
        }
        self.report.get().map_or(Ok(()), |word| codec.report_to(word.data()))
    }

    /// The way to the others, if codecs reach their memory by themselves.
    fn reached(&self) -> Option<&Peers> {
        match &self.transport {
            Transport::Peers(peers) if self.world > 1 => Some(peers),
            _ => None,
        }
    }

    /// Makes this rank's payload, in `wire` or straight where its chunks go.
    fn encode<'v>(
        &self,
        codec: &Codec,
        wire: &Wire,
        values: impl ExactSizeIterator<Item = Result<View<'v>>>,
        factors: &[Option<View<'_>>; 2],
        stream: Stream,
    ) -> Result<()> {
        let Some(peers) = self.reached() else { return codec.encode(values, factors, &wire.payload(), stream) };
        let was_torn = codec.is_torn(); // by an earlier call: then this one sends nothing
        let encoded = codec.encode_to_peers(values, factors, peers.sending(Pattern::AllToAll, wire.stride()), stream);
        if encoded.is_err() && !was_torn && codec.is_torn() {
            // A part of it is with the others.
            self.transport.give_up();
        }
        encoded?;
        let arrived = self.arrive(peers, wire, stream);
        if arrived.is_err() {
            self.transport.give_up();
        }
        self.note(arrived)
    }

    /// Sets values to what the ranks have reduced.
    fn decode<'v>(
        &self,
        codec: &Codec,
        reduced: &View<'_>,
        values: impl ExactSizeIterator<Item = Result<View<'v>>>,
        stream: Stream,
    ) -> Result<()> {
        codec.decode_reduced(reduced, self.reached().is_some(), values, stream)
    }

    /// Behind what a codec has sent by itself.
    fn arrive(&self, peers: &Peers, wire: &Wire, stream: Stream) -> Result<()> {
        match &mut wire.memory().queue(stream)? {
            Queue::Cuda(queue) => peers.arrive(queue, wire.mark()),
            Queue::Cpu => Ok(()),
        }
    }

    /// The end of a call that has exchanged, if what followed that went well.
    fn end(&self, outcome: Result<()>, wire: &Wire, span: Span, stream: Stream) -> Result<()> {
        let ended = outcome.and_then(|()| self.transport.end(&mut wire.memory().queue(stream)?, span));
        if ended.is_err() {
            self.transport.lose_count();
        }
        self.note(ended)
    }

    /// One call at a time, also on those that this one is made of.
    fn enter(&self) -> Result<Entered<'_>> {
        let own = self.enter_alone()?;
        let parts = if let Transport::Two(two) = &self.transport { two.parts() } else { [None, None] };
        let [one, other] = parts.map(|part| part.map(Self::enter_alone).transpose());
        Ok(Entered { own, _parts: [one?, other?] })
    }

    fn enter_alone(&self) -> Result<MutexGuard<'_, Vec<Scratch>>> {
        match self.scratches.try_lock() {
            Ok(scratches) => Ok(scratches),
            Err(TryLockError::WouldBlock) => {
                Err(error!(Busy, "communicator: another thread's call on it is under way"))
            }
            Err(TryLockError::Poisoned(_)) => Err(error!(Panic, "communicator: an earlier call on it was broken off")),
        }
    }

    fn note<T>(&self, outcome: Result<T>) -> Result<T> {
        if let Err(Error { status: status @ (Status::Comm | Status::Corrupt), .. }) = outcome {
            self.failed.store(status as i32, Ordering::Relaxed);
        }
        outcome
    }

    /// From this rank's payload, which `encode` has made, to the reduced chunks of all ranks: the middle of an all-reduce.
    ///
    /// A chunk that is corrupt goes on, marked, so that the others neither wait nor take it for good.
    fn reduce_among_ranks<'a>(&self, codec: &Codec, wire: &'a Wire, stream: Stream) -> Result<View<'a>> {
        if self.world == 1 {
            codec.reduce(0, &wire.payloads(), &wire.chunk(), stream)?;
            return Ok(wire.chunk());
        }
        let outcome = self.exchange_and_reduce(codec, wire, stream);
        if outcome.is_err() {
            // The others may be waiting for this rank.
            self.transport.give_up();
        }
        self.note(outcome)?;
        Ok(wire.gathered())
    }

    fn exchange_and_reduce(&self, codec: &Codec, wire: &Wire, stream: Stream) -> Result<()> {
        if let Some(peers) = self.reached() {
            let sending = peers.sending(Pattern::AllGather, wire.stride());
            codec.reduce_to_peers(self.rank, &wire.payloads(), sending, stream)?;
            return self.arrive(peers, wire, stream);
        }
        self.exchange(Pattern::AllToAll, wire, &wire.payload(), &wire.payloads(), stream)?;
        match codec.reduce(self.rank, &wire.payloads(), &wire.chunk(), stream) {
            Err(Error { status: Status::Corrupt, .. }) => {} // and so the decoding says
            outcome => outcome?,
        }
        self.exchange(Pattern::AllGather, wire, &wire.chunk(), &wire.gathered(), stream)
    }

    /// From this rank's payload, which `encode` has made, to the mean of all ranks' in its shard: the middle of an
    /// all-reduce up to the server's error.
    fn mean_among_ranks(&self, codec: &Codec, wire: &Wire, shard: &View<'_>, stream: Stream) -> Result<()> {
        let exchanged = if self.world == 1 || self.reached().is_some() {
            Ok(())
        } else {
            self.exchange(Pattern::AllToAll, wire, &wire.payload(), &wire.payloads(), stream)
        };
        let outcome = exchanged.and_then(|()| codec.mean(self.rank, &wire.payloads(), &wire.chunk(), shard, stream));
        match outcome {
            // The others have what they came for, and this rank can go on, too.
            Ok(()) | Err(Error { status: Status::Corrupt, .. }) => {}
            Err(_) => self.transport.give_up(),
        }
        self.note(outcome)
    }

    /// From this rank's shard to the reduced chunks of all ranks: the rest of the middle.
    fn gather_among_ranks<'a>(
        &self,
        codec: &Codec,
        wire: &'a Wire,
        shard: &View<'_>,
        stream: Stream,
    ) -> Result<View<'a>> {
        if self.world == 1 {
            codec.encode_shard(shard, &wire.chunk(), stream)?;
            return Ok(wire.chunk());
        }
        let outcome = match self.reached() {
            Some(peers) => codec
                .encode_shard_to_peers(shard, peers.sending(Pattern::AllGather, wire.stride()), stream)
                .and_then(|()| self.arrive(peers, wire, stream)),
            None => codec
                .encode_shard(shard, &wire.chunk(), stream)
                .and_then(|()| self.exchange(Pattern::AllGather, wire, &wire.chunk(), &wire.gathered(), stream)),
        };
        if outcome.is_err() {
            // The others may be waiting for this rank.
            self.transport.give_up();
        }
        self.note(outcome)?;
        Ok(wire.gathered())
    }

    fn exchange(&self, pattern: Pattern, wire: &Wire, send: &View<'_>, recv: &View<'_>, stream: Stream) -> Result<()> {
        let bytes = match pattern {
            Pattern::AllToAll => send.elements() / self.world as i64,
            Pattern::AllGather => send.elements(),
        };
        let (bytes, device, memory) = (bytes as usize, send.device(), Some(wire.memory()));
        let (send, recv, mark) = (send.data(), recv.data(), wire.mark());
        let buffers = wire.buffers();
        let exchange = Exchange { pattern, send, recv, bytes, device, stream, memory, mark, buffers };
        self.exchange_by(&exchange, wire.on_host())
    }

    /// `on_host`: room for what is sent and for what is received, where the transport wants that on the host.
    fn exchange_by(&self, exchange: &Exchange<'_>, on_host: Option<[*mut u8; 2]>) -> Result<()> {
        let Some([sent, received]) = on_host else {
            return self.transport.exchange(exchange);
        };
        let all = self.world * exchange.bytes;
        let own = if exchange.pattern == Pattern::AllToAll { all } else { exchange.bytes };
        // SAFETY: memory of the exchange and pinned memory with room for a chunk for each rank, twice; what an earlier
        // exchange still copies out of that is done once the stream is.
        unsafe { copy(exchange, sent, exchange.send, own, true)? };
        let on_host = Exchange {
            send: sent,
            recv: received,
            device: Device::Cpu,
            stream: Stream::LEGACY,
            memory: None,
            ..*exchange
        };
        self.transport.exchange(&on_host)?;
        // SAFETY: as above; that memory is written to only after the next wait.
        unsafe { copy(exchange, exchange.recv, received, all, false) }
    }

    /// Tells every rank 64 bytes of each: those of all, by rank.
    fn tell_all(&self, own: &[u8; RECORD]) -> Result<Vec<[u8; RECORD]>> {
        let (world, mut records) = (self.world, Vec::new());
        let told = match records.try_reserve_exact(world) {
            Ok(()) => {
                records.resize(world, [0; RECORD]);
                self.tell(own, &mut records)
            }
            Err(_) => Err(error!(OutOfMemory, "{world} records of {RECORD} bytes could not be had")),
        };
        if told.is_err() {
            // The others may be waiting for this rank.
            self.transport.give_up();
        }
        told.map(|()| records)
    }

    /// The same into room for those of all.
    fn tell(&self, own: &[u8; RECORD], all: &mut [[u8; RECORD]]) -> Result<()> {
        if self.world == 1 {
            all[0] = *own;
            return Ok(());
        }
        if let Transport::Nccl(nccl) = &self.transport {
            return self.note(nccl.tell(own, all));
        }
        if let Transport::Peers(peers) = &self.transport {
            return self.note(peers.tell(own, all));
        }
        if let Transport::Two(two) = &self.transport {
            return self.note(two.tell(own, all));
        }
        let exchange = Exchange {
            pattern: Pattern::AllGather,
            send: own.as_ptr(),
            recv: all.as_mut_ptr().cast(),
            bytes: RECORD,
            device: Device::Cpu,
            stream: Stream::LEGACY,
            memory: None,
            mark: std::ptr::null_mut(),
            buffers: None,
        };
        self.note(self.transport.exchange(&exchange))
    }
}

/// A call that is let in, and what its communicator has for it.
struct Entered<'a> {
    own: MutexGuard<'a, Vec<Scratch>>,
    _parts: [Option<MutexGuard<'a, Vec<Scratch>>>; 2],
}

impl Deref for Entered<'_> {
    type Target = Vec<Scratch>;

    fn deref(&self) -> &Vec<Scratch> {
        &self.own
    }
}

impl DerefMut for Entered<'_> {
    fn deref_mut(&mut self) -> &mut Vec<Scratch> {
        &mut self.own
    }
}

/// Copies to or from pinned memory on an exchange's stream. The caller's context is current again when it returns.
///
/// # Safety
/// Both sides have so many bytes, and stay until the stream has done it.
unsafe fn copy(exchange: &Exchange<'_>, to: *mut u8, from: *const u8, bytes: usize, wait: bool) -> Result<()> {
    let Queue::Cuda(mut queue) = exchange.queue()? else { return Ok(()) };
    // SAFETY: the caller's promise.
    unsafe { queue.copy(to, from, bytes)? };
    if wait { queue.wait() } else { Ok(()) }
}

/// Bytes that ranks tell each other when a handle is made.
const RECORD: usize = 64;
