//! Ranks that exchange memory, and the all-reduces of gradients made small over them.
//!
//! - `transport`: the two exchanges that there are, and who makes them: `callbacks` of the caller, `group` for ranks that
//!   are threads of one process;
//! - `wire`: the memory that is exchanged;
//! - `plain`: the all-reduce whose errors are the caller's tensors; `allreduce`: the handle, which keeps its own.

mod allreduce;
mod callbacks;
mod group;
mod plain;
mod shared;
mod transport;
mod wire;

use std::sync::{
    Mutex, MutexGuard, TryLockError,
    atomic::{AtomicI32, Ordering},
};

use crate::{
    backend::Stream,
    error::{Error, Result, Status, error},
    ops::codec::Codec,
    tensor::{Device, View},
};

pub use allreduce::AllReduce;
pub use callbacks::{Callback, Callbacks};
pub use group::group;
pub use plain::{allreduce, shard_elements};
pub use shared::Shared;

use plain::Scratch;
use transport::{Exchange, Pattern, Transport};
use wire::Wire;

/// One of several ranks, and its way to the others.
pub struct Communicator {
    rank: usize,
    world: usize,
    transport: Transport,
    /// Only ever tried: whoever finds it locked is told so. What the calls whose errors are the caller's work in: the last
    /// one is in use, those before it are outgrown.
    scratches: Mutex<Vec<Scratch>>,
    /// The status of what went wrong for good or may have gone unnoticed, 0: nothing.
    failed: AtomicI32,
}

impl Communicator {
    fn new(rank: usize, world: usize, transport: Transport) -> Self {
        Self { rank, world, transport, scratches: Mutex::new(Vec::new()), failed: AtomicI32::new(0) }
    }

    /// Over callbacks of the caller.
    pub fn over_callbacks(rank: i32, world: i32, callbacks: Callbacks) -> Result<Self> {
        let ranks = usize::try_from(world).ok().filter(|&ranks| ranks > 0);
        match (ranks, usize::try_from(rank)) {
            (Some(ranks), Ok(rank)) if rank < ranks => Ok(Self::new(rank, ranks, Transport::Callbacks(callbacks))),
            _ => Err(error!(InvalidArgument, "transport: rank {rank} of {world}: 0 <= rank < world_size expected")),
        }
    }

    /// Makes what calls with up to so many elements on this device work in.
    pub fn reserve(&self, device: Device, elements: i64) -> Result<()> {
        if elements < 0 {
            return Err(error!(InvalidArgument, "n_elements: {elements} is negative"));
        }
        let mut scratches = self.enter()?;
        if elements > 0 {
            Scratch::of(self, &mut scratches, device, elements)?;
        }
        Ok(())
    }

    /// What is known to have gone wrong, without waiting for anything.
    pub fn async_error(&self) -> Result<()> {
        match self.failed.load(Ordering::Relaxed) {
            0 => Ok(()),
            code if code == Status::Corrupt as i32 => {
                Err(error!(Corrupt, "communicator: rank {} received what no rank of this version sends", self.rank))
            }
            _ => Err(error!(Comm, "communicator: an exchange of rank {} failed", self.rank)),
        }
    }

    /// One call at a time.
    fn enter(&self) -> Result<MutexGuard<'_, Vec<Scratch>>> {
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

    /// From this rank's payload, which lies in `wire`, to the reduced chunks of all ranks: the middle of an all-reduce.
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
            self.transport.give_up(self.rank);
        }
        self.note(outcome)?;
        Ok(wire.payload())
    }

    fn exchange_and_reduce(&self, codec: &Codec, wire: &Wire, stream: Stream) -> Result<()> {
        self.exchange(Pattern::AllToAll, &wire.payload(), &wire.payloads(), stream)?;
        match codec.reduce(self.rank, &wire.payloads(), &wire.chunk(), stream) {
            Err(Error { status: Status::Corrupt, .. }) => {} // and so the decoding says
            outcome => outcome?,
        }
        self.exchange(Pattern::AllGather, &wire.chunk(), &wire.payload(), stream)
    }

    fn exchange(&self, pattern: Pattern, send: &View<'_>, recv: &View<'_>, stream: Stream) -> Result<()> {
        let bytes = match pattern {
            Pattern::AllToAll => send.elements() / self.world as i64,
            Pattern::AllGather => send.elements(),
        };
        let exchange = Exchange {
            pattern,
            send: send.data(),
            recv: recv.data(),
            bytes: bytes as usize,
            device: send.device(),
            stream,
        };
        self.transport.exchange(self.rank, self.world, &exchange)
    }

    /// Tells every rank 64 bytes of each: `result` has room for those of all.
    fn tell(&self, own: &[u8; RECORD], all: &mut [[u8; RECORD]]) -> Result<()> {
        if self.world == 1 {
            all[0] = *own;
            return Ok(());
        }
        let exchange = Exchange {
            pattern: Pattern::AllGather,
            send: own.as_ptr(),
            recv: all.as_mut_ptr().cast(),
            bytes: RECORD,
            device: Device::Cpu,
            stream: Stream::LEGACY,
        };
        self.note(self.transport.exchange(self.rank, self.world, &exchange))
    }
}

/// Bytes that ranks tell each other when a handle is made.
const RECORD: usize = 64;
