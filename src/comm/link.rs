//! One transport, with its rank and world: what communicators are made of.

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

/// Where GPUs write that something was corrupt: a uint32, not 0 then. All-reduces share it, since their launches may end
/// after the link is gone.
pub type Report = Arc<Pinned>;

pub struct Link {
    pub rank: usize,
    pub world: usize,
    pub transport: Box<dyn Transport>,
    calls: Lock<()>,
    failures: Failures,
    /// By gc_comm_abort().
    aborted: AtomicBool,
    report: OnceLock<Report>,
}

/// The status of the last failure of an exchange, 0: none.
#[derive(Default)]
struct Failures(AtomicI32);

impl Failures {
    /// Remembers failures for gc_comm_async_error().
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

    /// One call at a time, over whichever communicator.
    pub fn enter(&self) -> Result<Entered<'_, ()>> {
        self.calls.enter()
    }

    /// Ends all waiting on it, on any thread, for good.
    pub fn abort(&self) -> Result<()> {
        self.aborted.store(true, Ordering::Release);
        self.transport.abort()
    }

    /// COMM once it was aborted. `rank`: this rank in the communicator that the caller passed.
    pub fn check_aborted(&self, rank: usize) -> Result<()> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(error!(Comm, "communicator: was aborted on rank {rank}"));
        }
        Ok(())
    }

    /// `rank`: as for `check_aborted`.
    pub fn async_error(&self, rank: usize) -> Result<()> {
        self.check_aborted(rank)?;
        self.transport.lost_rank(rank)?; // which is why later exchanges fail
        self.failures.check(rank)?;
        // SAFETY: four bytes that are there as long as this is, which a GPU may be writing.
        let reported = self.report.get().map_or(0, |word| unsafe { word.data().cast::<u32>().read_volatile() });
        if reported != 0 {
            return Err(corrupt(rank));
        }
        self.transport.async_error(rank)
    }

    /// Makes `async_error` report what a codec on a GPU finds corrupt. On the CPU the calls themselves return it.
    /// `memory`: on the codec's device. The codec's launches write to what this returns.
    pub fn report_corrupt(&self, codec: &Codec, memory: &Block) -> Result<Option<Report>> {
        let Queue::Cuda(mut queue) = memory.queue(Stream::LEGACY)? else { return Ok(None) };
        if self.report.get().is_none() {
            // One call is in here at a time, so no other one sets it meanwhile.
            let _ = self.report.set(Arc::new(Pinned::new(&mut queue, size_of::<u32>() as i64)?));
        }
        let report = self.report.get().cloned();
        report.as_ref().map_or(Ok(()), |word| codec.report_to(word.data()))?;
        Ok(report)
    }

    /// The exchanges that are part of a codec's launches, if the transport has such.
    pub fn fused(&self) -> Option<&dyn Fused> {
        if self.world > 1 { self.transport.fused() } else { None }
    }

    /// Before the first of a call's launches. Rejects a stream that is being captured where threads of the host wait
    /// for each other.
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

    /// Behind the last of a call's launches, if what followed its exchanges went well.
    pub fn end(&self, outcome: Result<()>, queue: Result<Queue>, phases: Phases) -> Result<()> {
        let ended = outcome.and(queue).and_then(|mut queue| self.transport.end(&mut queue, phases));
        if ended.is_err() {
            self.transport.out_of_step();
        }
        self.note(ended)
    }

    /// Remembers a failure for `async_error`.
    pub fn note<T>(&self, outcome: Result<T>) -> Result<T> {
        self.failures.note(outcome)
    }

    /// Remembers a failure of a step that the others may be waiting for, and ends their wait.
    pub fn or_give_up<T>(&self, outcome: Result<T>) -> Result<T> {
        if outcome.is_err() && self.world > 1 {
            self.transport.give_up();
        }
        self.note(outcome)
    }

    /// Pinned memory for exchanges of blocks with up to `bytes` bytes, where the transport needs it.
    pub fn staging(&self, queue: &mut Queue, bytes: i64) -> Result<Option<Staging>> {
        match queue {
            Queue::Cuda(queue) if self.world > 1 && self.transport.wants_host_memory() => {
                Staging::new(queue, self.world as i64 * bytes).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Exchanges, and returns where the received blocks lie. A world of one receives what it sends where that is.
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
        // SAFETY: each half of the staging memory has room for a block of each rank, as `staging` allocated it; the
        // wait behind this copy also ends what an earlier exchange still copied out of it.
        unsafe { copy(exchange, staging.send(), exchange.send, own, true)? };
        self.transport.exchange(&Exchange {
            send: staging.send(),
            recv: staging.recv(),
            device: Device::Cpu,
            stream: Stream::LEGACY,
            memory: None,
            ..*exchange
        })?;
        // SAFETY: room for a block of each rank on both sides; the staging memory is written to only after the next
        // wait.
        unsafe { copy(exchange, exchange.recv, staging.recv(), all, false)? };
        Ok(exchange.recv)
    }

    /// The bootstrap all-gather: 64 bytes of each rank, by rank.
    pub fn all_gather(&self, own: &Bytes, all: &mut [Bytes]) -> Result<()> {
        if self.world == 1 {
            all[0] = *own;
            return Ok(());
        }
        let gathered = self.check_aborted(self.rank).and_then(|()| self.transport.all_gather_records(own, all));
        // What arrives while the communicator is aborted is nothing that a rank has sent.
        self.failures.note(self.check_aborted(self.rank).and(gathered))
    }
}

/// What a rank received is corrupt.
pub fn corrupt(rank: usize) -> Error {
    error!(Corrupt, "communicator: rank {rank} received what no rank of this version sends")
}

/// Copies to or from pinned memory on an exchange's stream. The caller's context is current again when it returns.
///
/// # Safety
/// Both sides have so many bytes, and stay until the stream has done it.
unsafe fn copy(exchange: &Exchange<'_>, to: *mut u8, from: *const u8, bytes: usize, wait: bool) -> Result<()> {
    let Queue::Cuda(mut queue) = exchange.queue()? else { return Ok(()) };
    // SAFETY: the caller's promise: `bytes` bytes on both sides, until the stream has passed this.
    unsafe { queue.copy(to, from, bytes)? };
    if wait { queue.wait() } else { Ok(()) }
}
