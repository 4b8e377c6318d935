//! A link is a transport with its rank and world. A communicator has one or two links.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, AtomicI32, Ordering},
};

use crate::{
    codec::ops::Codec,
    cuda::{Pinned, Stream},
    device::{Block, Queue},
    dlpack::Device,
    ffi::{
        error::{Error, Result, Status, error},
        lock::{Entered, Lock},
    },
};

use super::{
    record::Bytes,
    transport::{Exchange, Fused, Pattern, Phases, Staging, Transport},
};

/// Pinned uint32 that GPUs set to a number other than 0 when data is corrupt. All-reduces share it, since their
/// launches may end after the link is gone.
pub type Report = Arc<Pinned>;

pub struct Link {
    pub rank: usize,
    pub world: usize,
    pub transport: Box<dyn Transport>,
    calls: Lock<()>,
    failures: Failures,
    /// True once the link is aborted.
    aborted: AtomicBool,
    report: OnceLock<Report>,
}

/// Status of the last failed exchange; 0: none.
#[derive(Default)]
struct Failures(AtomicI32);

impl Failures {
    /// Records failures for gc_comm_async_error().
    fn note<T>(&self, outcome: Result<T>) -> Result<T> {
        if let Err(Error { status: status @ (Status::Comm | Status::Corrupt | Status::Timeout), .. }) = outcome {
            self.0.store(status as i32, Ordering::Relaxed);
        }
        outcome
    }

    fn check(&self, rank: usize) -> Result<()> {
        match self.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            code if code == Status::Comm as i32 => Err(error!(Comm, "communicator: an exchange of rank {rank} failed")),
            code if code == Status::Timeout as i32 => {
                Err(error!(Timeout, "communicator: rank {rank} waited too long for another rank"))
            }
            _ => Err(corrupt(rank)),
        }
    }
}

impl Link {
    pub fn new(transport: impl Transport + 'static) -> Self {
        let ((rank, world), transport) = (transport.place(), Box::new(transport));
        let (calls, failures) = (Lock::new("communicator", ()), Failures::default());
        Self { rank, world, transport, calls, failures, aborted: AtomicBool::new(false), report: OnceLock::new() }
    }

    /// Enters the link for a call: one at a time, over all communicators that share the link.
    pub fn enter(&self) -> Result<Entered<'_, ()>> {
        self.calls.enter()
    }

    /// Ends all waits on the link, on every thread, for good.
    pub fn abort(&self) -> Result<()> {
        self.aborted.store(true, Ordering::Release);
        self.transport.abort()
    }

    /// Returns COMM once the link is aborted. `rank`: this rank in the communicator that the caller passed.
    pub fn check_aborted(&self, rank: usize) -> Result<()> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(error!(Comm, "communicator: was aborted on rank {rank}"));
        }
        Ok(())
    }

    /// Returns a known failure without waiting. `rank`: see `check_aborted`.
    pub fn async_error(&self, rank: usize) -> Result<()> {
        self.check_aborted(rank)?;
        self.transport.lost_rank(rank)?; // a lost rank is the cause of later failures
        self.failures.check(rank)?;
        // SAFETY: `report` owns the four bytes; a GPU may write them, so the read is volatile.
        let reported = self.report.get().map_or(0, |word| unsafe { word.data().cast::<u32>().read_volatile() });
        if reported != 0 {
            return Err(corrupt(rank));
        }
        self.transport.async_error(rank)
    }

    /// Makes `async_error` report corrupt data that a codec finds on a GPU. On the CPU the calls themselves return it.
    /// `memory`: on the codec's device. The codec's launches write to the returned report.
    pub fn report_corrupt(&self, codec: &Codec, memory: &Block) -> Result<Option<Report>> {
        let Queue::Cuda(mut queue) = memory.queue(Stream::LEGACY)? else { return Ok(None) };
        if self.report.get().is_none() {
            // Only one call at a time gets here, so no other call sets the report meanwhile.
            let _ = self.report.set(Arc::new(Pinned::new(&mut queue, size_of::<u32>() as i64)?));
        }
        let report = self.report.get().cloned();
        report.as_ref().map_or(Ok(()), |word| codec.report_to(word.data()))?;
        Ok(report)
    }

    /// Returns the exchanges within a codec's launches, if the transport has them.
    pub fn fused(&self) -> Option<&dyn Fused> {
        if self.world > 1 { self.transport.fused() } else { None }
    }

    /// Begins a call. Must be called before its first launch. Rejects a stream that is being captured if host threads
    /// wait for each other.
    pub fn begin(&self, queue: &mut Queue, phases: Phases) -> Result<()> {
        self.check_capture(queue)?;
        self.transport.begin(queue, phases)
    }

    pub fn check_capture(&self, queue: &mut Queue) -> Result<()> {
        if self.transport.waits_on_host() && queue.is_capturing()? {
            return Err(error!(
                InvalidArgument,
                "stream: it is being captured, and this communicator's ranks wait for each other on the host"
            ));
        }
        Ok(())
    }

    /// Ends a call. Must be called after its last launch. `outcome`: the result of the work after its exchanges.
    pub fn end(&self, outcome: Result<()>, queue: Result<Queue>, phases: Phases) -> Result<()> {
        let ended = outcome.and(queue).and_then(|mut queue| self.transport.end(&mut queue, phases));
        if ended.is_err() {
            self.transport.out_of_step();
        }
        self.note(ended)
    }

    /// Records a failure for `async_error`.
    pub fn note<T>(&self, outcome: Result<T>) -> Result<T> {
        self.failures.note(outcome)
    }

    /// Records a failure of a step that the other ranks may wait for, and ends their wait.
    pub fn or_unblock_peers<T>(&self, outcome: Result<T>) -> Result<T> {
        if outcome.is_err() && self.world > 1 {
            self.transport.give_up();
        }
        self.note(outcome)
    }

    /// Allocates a pinned staging buffer for blocks of up to `bytes` bytes, if the transport needs one.
    pub fn staging(&self, queue: &mut Queue, bytes: i64) -> Result<Option<Staging>> {
        match queue {
            Queue::Cuda(queue) if self.world > 1 && self.transport.wants_host_memory() => {
                Staging::new(queue, self.world as i64 * bytes).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Exchanges blocks, and returns the address of the received ones. In a world of one that is `send`.
    pub fn exchange(&self, exchange: &Exchange<'_>, staging: Option<&Staging>) -> Result<*const u8> {
        if self.world == 1 {
            return Ok(exchange.send);
        }
        self.failures.note(self.check_aborted(self.rank).and_then(|()| match staging {
            None => self.transport.exchange(exchange),
            Some(staging) => self.exchange_on_host(exchange, staging),
        }))
    }

    fn exchange_on_host(&self, exchange: &Exchange<'_>, staging: &Staging) -> Result<*const u8> {
        let all = self.world * exchange.bytes;
        let own = if exchange.pattern == Pattern::AllToAll { all } else { exchange.bytes };
        // SAFETY: each half of the staging buffer has room for a block of each rank, as `staging` allocated it. The
        // wait after this copy covers copies of an earlier exchange out of the buffer, too.
        unsafe { copy(exchange, staging.send(), exchange.send, own, true)? };
        self.transport.exchange(&Exchange {
            send: staging.send(),
            recv: staging.recv(),
            device: Device::Cpu,
            stream: Stream::LEGACY,
            memory: None,
            ..*exchange
        })?;
        // SAFETY: both sides have room for a block of each rank; the staging buffer is written to only after the next
        // wait.
        unsafe { copy(exchange, exchange.recv, staging.recv(), all, false)? };
        Ok(exchange.recv)
    }

    /// Performs the bootstrap all-gather of 64 bytes from each rank. `all`: by rank.
    pub fn all_gather(&self, own: &Bytes, all: &mut [Bytes]) -> Result<()> {
        if self.world == 1 {
            all[0] = *own;
            return Ok(());
        }
        let gathered = self.check_aborted(self.rank).and_then(|()| self.transport.all_gather_records(own, all));
        // Bytes that arrive while the communicator is aborted are not what a rank has sent.
        self.failures.note(self.check_aborted(self.rank).and(gathered))
    }
}

/// Returns the error of a rank that has received corrupt data.
pub fn corrupt(rank: usize) -> Error {
    error!(Corrupt, "communicator: rank {rank} received what no rank of this version sends")
}

/// Copies to or from pinned memory on an exchange's stream. The caller's context is current again when it returns.
///
/// # Safety
/// Both sides have `bytes` bytes, and stay until the stream has done the copy.
unsafe fn copy(exchange: &Exchange<'_>, to: *mut u8, from: *const u8, bytes: usize, wait: bool) -> Result<()> {
    let Queue::Cuda(mut queue) = exchange.queue()? else { return Ok(()) };
    // SAFETY: the caller promises `bytes` bytes on both sides until the stream has passed this.
    unsafe { queue.copy(to, from, bytes)? };
    if wait { queue.wait() } else { Ok(()) }
}
