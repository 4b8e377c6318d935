//! Exchanges over memory that the ranks of a node reach, by kernels of ours.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use crate::{
    codec::plan::sizes::LEAST_STRIDE,
    comm::record::{self, Bytes},
    cuda::{
        self,
        peers::{Once, Sending, Steps},
    },
    device::{Block, Queue},
    dlpack::Device,
    ffi::error::{Result, error},
};

use super::{
    exchange::{Exchange, Fused, Pattern, Phases, Transport, timeout},
    peer_memory::{self as memory, Area, MOST_RANKS},
    rendezvous::Rendezvous,
};

/// One rank's part.
pub struct Peers {
    rank: usize,
    memory: memory::Peers,
    timeout_ms: u32,
    /// Where ranks share a GPU within a process: all of the process arrive at the barrier before one waits in it, for
    /// kernels that wait may keep others from being launched.
    arrivals: Option<Arc<Rendezvous>>,
    /// An exchange was not enqueued as a whole: the others count one more.
    broken: AtomicBool,
    /// A rank of this process did not arrive.
    peer_lost: AtomicBool,
}

/// Where the buffers of all ranks are, as the caller has mapped them.
pub struct Places<'a> {
    pub rank: i32,
    pub device: Device,
    pub bytes: usize,
    /// By rank.
    pub buffers: &'a [u64],
    /// As for `timeout`.
    pub timeout_ms: u32,
}

/// Bytes of each rank's buffer for exchanges of blocks of up to so many bytes.
pub fn buffer_bytes(ranks: usize, block: i64) -> Option<i64> {
    memory::buffer_bytes(ranks as u64, block as u64).and_then(|bytes| i64::try_from(bytes).ok())
}

/// Bytes of the smallest buffers of `ranks` ranks, at most [`MOST_RANKS`]: for chunks with a header and no element,
/// which are larger than the records of a bootstrap.
pub fn least_buffer_bytes(ranks: usize) -> i64 {
    buffer_bytes(ranks, LEAST_STRIDE).unwrap_or(i64::MAX)
}

/// Checks that buffers have room for what every communicator exchanges.
pub fn check_buffer_bytes(name: &str, bytes: i64, ranks: usize) -> Result<u64> {
    let least = least_buffer_bytes(ranks);
    if bytes < least {
        return Err(error!(
            InvalidArgument,
            "{name}: buffers of {bytes} bytes; at least {least} expected for {ranks} ranks, and what \
             gc_allreduce_peers_bytes says of each all-reduce"
        ));
    }
    Ok(bytes as u64)
}

/// How many ranks a world has.
pub fn ranks_of(world: i32) -> Result<usize> {
    match usize::try_from(world) {
        Ok(ranks @ 1..=MOST_RANKS) => Ok(ranks),
        _ => Err(error!(InvalidArgument, "world_size: {world}; 1 to {MOST_RANKS} expected")),
    }
}

pub fn ordinal_of(device: Device) -> Result<i32> {
    match device {
        Device::Cuda(ordinal) => Ok(ordinal),
        Device::Cpu => Err(error!(UnsupportedDevice, "device: {device}; ranks reach each other's memory on CUDA")),
    }
}

fn area_of(pattern: Pattern) -> Area {
    match pattern {
        Pattern::AllToAll => Area::AllToAll,
        Pattern::AllGather => Area::AllGather,
    }
}

impl Peers {
    /// Over buffers of the caller's.
    pub fn new(places: &Places<'_>) -> Result<Self> {
        let ranks = places.buffers.len();
        let rank = usize::try_from(places.rank).ok().filter(|&rank| rank < ranks).ok_or_else(|| {
            error!(InvalidArgument, "options: rank {} of {ranks}: 0 <= rank < world_size expected", places.rank)
        })?;
        let ordinal = ordinal_of(places.device)?;
        let bytes = check_buffer_bytes("options", i64::try_from(places.bytes).unwrap_or(i64::MAX), ranks)?;
        for (number, &address) in places.buffers.iter().enumerate() {
            if let Some(other) = places.buffers[..number].iter().position(|&other| other == address) {
                return Err(error!(
                    InvalidArgument,
                    "options: buffers[{other}] and buffers[{number}] are both {address:#x}"
                ));
            }
            memory::check_buffer(ordinal, number, address, bytes, number == rank)?;
        }
        let timeout_ms = timeout(places.timeout_ms);
        let memory = memory::Peers::new(ordinal, rank, places.buffers, bytes, timeout_ms, Vec::new(), None)?;
        Ok(Self::over(rank, memory, timeout_ms, None))
    }

    pub fn over(rank: usize, memory: memory::Peers, timeout_ms: u32, arrivals: Option<Arc<Rendezvous>>) -> Self {
        let (broken, peer_lost) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { rank, memory, timeout_ms, arrivals, broken, peer_lost }
    }

    fn begin_on(&self, queue: &mut cuda::Queue, phases: Phases) -> Result<()> {
        if self.memory.is_broken() || self.broken.load(Ordering::Relaxed) {
            self.give_up(); // if others still wait on the host
            return Err(error!(
                Comm,
                "communicator: an earlier exchange of rank {} over peer memory was broken off; make another one",
                self.rank
            ));
        }
        if !queue.is_capturing()? {
            self.memory.begin(queue)?;
        }
        // The call before may have ended with reading what this one writes to.
        if phases == Phases::AllGather { self.barrier_on(queue) } else { Ok(()) }
    }

    fn end_on(&self, queue: &mut cuda::Queue, phases: Phases) -> Result<()> {
        // The next call may begin with writing to what this one has read.
        if phases == Phases::AllToAll {
            self.barrier_on(queue)?;
        }
        if queue.is_capturing()? { Ok(()) } else { self.memory.end(queue) }
    }

    /// Barrier without an error flag; the next barrier reports a lost rank.
    fn barrier_on(&self, queue: &mut cuda::Queue) -> Result<()> {
        if self.memory.world() == 1 {
            return Ok(());
        }
        let passed = self.barrier_of(queue, std::ptr::null_mut());
        if passed.is_err() {
            self.give_up();
        }
        passed
    }

    fn barrier_of(&self, queue: &mut cuda::Queue, error_flag: *mut u8) -> Result<()> {
        let Some(arrivals) = &self.arrivals else {
            // SAFETY: the flag is NULL or part of a codec, which lives until its work is done.
            return unsafe { self.memory.meet(queue, Steps::Both, error_flag) };
        };
        // SAFETY: the flag is NULL or part of a codec, which lives until its work is done.
        unsafe { self.memory.meet(queue, Steps::Speak, error_flag)? };
        self.wait(arrivals, queue, error_flag)
    }

    fn wait_for(&self, arrivals: &Rendezvous) -> Result<()> {
        arrivals.wait(self.timeout_ms).inspect_err(|_| {
            self.peer_lost.fetch_or(!arrivals.was_aborted(), Ordering::Relaxed);
        })
    }

    fn wait(&self, arrivals: &Rendezvous, queue: &mut cuda::Queue, error_flag: *mut u8) -> Result<()> {
        self.wait_for(arrivals)?;
        // SAFETY: the flag is NULL or part of a codec, which lives until its work is done.
        unsafe { self.memory.meet(queue, Steps::Listen, error_flag) }
    }

    fn gather(&self, queue: &mut cuda::Queue, own: &Bytes, all: &mut [Bytes]) -> Result<()> {
        let record = self.memory.write_record(own);
        // SAFETY: the record is memory of this communicator, which only the next call writes to, and this one waits
        // until it was read; `begin` has passed a barrier.
        unsafe { self.memory.push(queue, Area::AllGather, record, record::BYTES as u64)? };
        self.barrier_of(queue, std::ptr::null_mut())?;
        self.memory.read(queue, Area::AllGather, all.as_flattened_mut())?;
        self.end_on(queue, Phases::AllGather)?;
        self.lost_rank(self.rank)
    }
}

impl Transport for Peers {
    fn place(&self) -> (usize, usize) {
        (self.rank, self.memory.world())
    }

    fn exchange(&self, exchange: &Exchange<'_>) -> Result<*const u8> {
        let Queue::Cuda(mut queue) = exchange.queue()? else {
            return Err(error!(UnsupportedDevice, "{}: only CUDA has peer memory", exchange.device));
        };
        let area = area_of(exchange.pattern);
        // SAFETY: blocks whose size was checked when their memory was made; a barrier lies between this and what read
        // the receive slots last, on any rank: that of the exchange before, or one of `begin` or `end`.
        let pushed = unsafe { self.memory.push(&mut queue, area, exchange.send, exchange.bytes as u64) };
        pushed.and_then(|()| self.barrier_of(&mut queue, exchange.error_flag))?;
        Ok(self.memory.area(area))
    }

    /// The bootstrap all-gather. Waits for it.
    fn all_gather_records(&self, own: &Bytes, all: &mut [Bytes]) -> Result<()> {
        let mut queue = self.memory.own_queue()?;
        self.begin_on(&mut queue, Phases::AllGather)?;
        let gathered = self.gather(&mut queue, own, all);
        if gathered.is_err() {
            self.give_up();
        }
        gathered
    }

    /// Ends the barriers of all ranks, those in which ranks wait and later ones.
    fn abort(&self) -> Result<()> {
        if let Some(arrivals) = &self.arrivals {
            arrivals.abort();
        }
        self.give_up();
        self.memory.end_meetings()
    }

    /// The others find out when they have waited long enough.
    fn give_up(&self) {
        self.broken.store(true, Ordering::Relaxed);
        match &self.arrivals {
            Some(arrivals) if self.memory.was_ended() => arrivals.abort(), // the others may not have the abort flag yet
            Some(arrivals) => arrivals.give_up(),
            None => {}
        }
    }

    fn out_of_step(&self) {
        self.give_up();
    }

    fn check(&self, device: Device, memory: &Block, bytes: i64) -> Result<()> {
        let own = Device::Cuda(self.memory.ordinal());
        match memory {
            Block::Cpu(_) => Err(error!(
                UnsupportedDevice,
                "device: {device}; the communicator, over peer memory, exchanges memory of {own}"
            )),
            Block::Cuda(_) if device != own => {
                Err(error!(InvalidArgument, "device: {device}; the communicator, over peer memory, is on {own}"))
            }
            Block::Cuda(memory) if !self.memory.is_in_context_of(memory) => Err(error!(
                InvalidArgument,
                "the current context is not the one that the communicator, over peer memory of {own}, was made in"
            )),
            Block::Cuda(_) if self.memory.world() > 1 && bytes as u64 > self.memory.most_bytes() => Err(error!(
                InvalidArgument,
                "{bytes} bytes from each rank; the communicator's buffers have room for {}: gc_allreduce_peers_bytes \
                 says how large they must be",
                self.memory.most_bytes()
            )),
            Block::Cuda(_) => Ok(()),
        }
    }

    fn lost_rank(&self, rank: usize) -> Result<()> {
        // Read the timeout flag before the abort flag, so that an abort is not reported as a timeout.
        let is_late = self.memory.is_broken() || self.peer_lost.load(Ordering::Relaxed);
        if self.memory.was_ended() {
            return Err(error!(Comm, "communicator: a rank has aborted it over peer memory, as rank {rank} has heard"));
        }
        if is_late {
            return Err(error!(
                Timeout,
                "communicator: rank {rank} waited {} ms over peer memory for a rank that did not come", self.timeout_ms
            ));
        }
        Ok(())
    }

    /// Whether threads of this process wait for each other.
    fn waits_on_host(&self) -> bool {
        self.arrivals.is_some()
    }

    fn begin(&self, queue: &mut Queue, phases: Phases) -> Result<()> {
        on_cuda(queue, |queue| self.begin_on(queue, phases))
    }

    fn end(&self, queue: &mut Queue, phases: Phases) -> Result<()> {
        on_cuda(queue, |queue| self.end_on(queue, phases))
    }

    fn fused(&self) -> Option<&dyn Fused> {
        Some(self)
    }
}

impl Fused for Peers {
    fn receive_slots(&self) -> [*mut u8; 2] {
        [Area::AllToAll, Area::AllGather].map(|area| self.memory.area(area))
    }

    fn sending(&self, pattern: Pattern, bytes: i64) -> Sending {
        let steps = if self.arrivals.is_some() { Steps::Speak } else { Steps::Both };
        Sending { way: self.memory.way(area_of(pattern), bytes as u64), steps }
    }

    fn arrive(&self, queue: &mut cuda::Queue, error_flag: *mut u8) -> Result<()> {
        self.arrivals.as_ref().map_or(Ok(()), |arrivals| self.wait(arrivals, queue, error_flag))
    }

    fn once(&self, bytes: i64) -> Option<Once> {
        self.memory.once(bytes as u64)
    }

    fn steps_once(&self) -> &'static [Steps] {
        if self.arrivals.is_some() { &[Steps::Speak, Steps::Listen] } else { &[Steps::Both] }
    }

    fn arrive_all(&self) -> Result<()> {
        self.arrivals.as_ref().map_or(Ok(()), |arrivals| self.wait_for(arrivals))
    }
}

fn on_cuda(queue: &mut Queue, work: impl FnOnce(&mut cuda::Queue) -> Result<()>) -> Result<()> {
    match queue {
        Queue::Cpu => Ok(()),
        Queue::Cuda(queue) => work(queue),
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        // Only then is it known how that has ended.
        self.memory.settle();
        if self.memory.is_broken() || self.broken.load(Ordering::Relaxed) {
            // A rank that arrives late, or has not seen the failure yet, writes there.
            self.memory.keep();
        }
    }
}
