//! Exchanges over peer memory, by the kernels in kernels/peers.cu. `peer_buffers` describes the buffers of the ranks,
//! and why the barriers here suffice.

use std::{
    mem::{self, offset_of},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    comm::record::{self, Bytes},
    cuda::{
        self, Event, Memory, Pinned, Stream,
        context::ContextRef,
        launch::argument,
        layout::kernel_structs,
        module::{PEERS, PEERS_MODULE},
        own_stream::OwnStream,
        peers::{OneShot, PeerDestination, PeerSlot, Steps},
    },
    device::{Block, Queue},
    dlpack::Device,
    ffi::{
        error::{Error, Result, error},
        fallible,
    },
};

use super::{
    exchange::{Exchange, Fused, Pattern, Phases, Transport, timeout},
    peer_buffers::{Areas, Buffer, MOST_RANKS, Mapped, SIGNALS, check_buffer, check_buffer_bytes, ordinal_of},
    rendezvous::Rendezvous,
};

/// Largest number of bytes that a thread block pushes: 256 threads with 4 vectors of 16 bytes each.
const PUSHED: u64 = 256 * 4 * 16;

/// Offset of the record in pinned memory, in bytes. Offset 0 has a uint32 that a GPU sets when a barrier fails: to
/// [`ABORTED`] if a rank has aborted, to 1 if a rank did not arrive.
const RECORD: usize = 64;
/// Offset of signals that no barrier waits for, in bytes. An abort copies them over the signals of all ranks.
const ABORT_SIGNALS: usize = 128;
const PINNED_BYTES: usize = ABORT_SIGNALS + SIGNALS as usize;

const ABORTED: u32 = 2;

kernel_structs! {
    /// Struct in this rank's device memory that the kernels read about the ranks.
    #[derive(Clone, Copy)]
    struct PeerTable: gc_peers {
        barriers: u64,
        broken: u32,
        world: u32,
        rank: u32,
        reserved: u32,
        nanoseconds: u64,
        failure: u64,
        buffers: [u64; MOST_RANKS],
    }

    struct Push: gc_push {
        slot: PeerSlot,
        from: *const u8,
        vectors: u64,
        apart: u64,
    }
}

/// Peer-memory transport of one rank.
pub struct Peers {
    rank: usize,
    device: cuda::device::Device,
    home: ContextRef,
    areas: Areas,
    /// Addresses of the buffers as mapped here, by rank.
    buffers: Vec<u64>,
    timeout_ms: u32,
    /// Address of [`PeerTable`] in `memory`, which is None only during the drop.
    known: u64,
    memory: Option<Memory>,
    pinned: Pinned,
    /// Event at the end of the last call.
    ended: Event,
    /// Stream of the bootstrap all-gather.
    stream: OwnStream,
    /// Stream for aborts alone: a barrier may be waiting on `stream`.
    aborts: OwnStream,
    /// Buffers of other ranks and of this rank, if the library allocated them.
    _mapped: Vec<Mapped>,
    own: Option<Memory>,
    /// Rendezvous of a process in which ranks share a GPU. All its ranks signal in a barrier before one waits in it,
    /// because kernels that wait may keep others from being launched.
    arrivals: Option<Arc<Rendezvous>>,
    /// True once an exchange was enqueued only in part: the other ranks then count one barrier more.
    broken: AtomicBool,
    /// True once a rank of this process did not arrive.
    peer_lost: AtomicBool,
}

/// Buffers of all ranks, as the caller has mapped them.
pub struct MappedBuffers<'a> {
    pub rank: i32,
    pub device: Device,
    pub bytes: usize,
    /// Addresses of the buffers, by rank.
    pub buffers: &'a [u64],
    /// Timeout of a barrier in milliseconds; 0: 10 minutes.
    pub timeout_ms: u32,
}

impl Peers {
    /// Creates a transport over the caller's buffers.
    pub fn new(places: &MappedBuffers<'_>) -> Result<Self> {
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
            check_buffer(ordinal, number, address, bytes, number == rank)?;
        }
        let queue = cuda::Queue::of(ordinal, Stream::LEGACY)?;
        Self::over(queue, rank, places.buffers, bytes, timeout(places.timeout_ms))
    }

    /// Creates a transport over buffers of `bytes` bytes that are mapped in the queue's context. `given`: by rank.
    fn over(mut queue: cuda::Queue, rank: usize, given: &[u64], bytes: u64, timeout_ms: u32) -> Result<Self> {
        queue.put_into_context(&PEERS_MODULE)?;
        let memory = Memory::new(&mut queue, size_of::<PeerTable>() as u64)?;
        let (pinned, ended) = (Pinned::new(&mut queue, PINNED_BYTES as i64)?, Event::new(&mut queue)?);
        let (stream, aborts) = (OwnStream::new(&mut queue)?, OwnStream::new(&mut queue)?);
        queue.wait()?;
        let mut buffers = fallible::list(given.len(), "buffers")?;
        buffers.extend_from_slice(given);
        // SAFETY: the range lies within the PINNED_BYTES bytes of `pinned`, which nothing else uses yet.
        unsafe { pinned.data().add(ABORT_SIGNALS).write_bytes(0xff, SIGNALS as usize) };
        let mut known = PeerTable {
            barriers: 0,
            broken: 0,
            world: given.len() as u32,
            rank: rank as u32,
            reserved: 0,
            nanoseconds: u64::from(timeout_ms) * 1_000_000,
            failure: pinned.data() as u64,
            buffers: [0; MOST_RANKS],
        };
        known.buffers[..given.len()].copy_from_slice(given);
        memory.put(0, &[known])?;
        Ok(Self {
            rank,
            device: queue.device,
            home: memory.home,
            areas: Areas::of(bytes),
            buffers,
            timeout_ms,
            known: memory.at(0),
            memory: Some(memory),
            pinned,
            ended,
            stream,
            aborts,
            _mapped: Vec::new(),
            own: None,
            arrivals: None,
            broken: AtomicBool::new(false),
            peer_lost: AtomicBool::new(false),
        })
    }

    /// Creates a transport over buffers that the ranks allocated; dropping it closes `mapped`. Call `take` next.
    pub fn over_own(
        own: &Buffer, rank: usize, buffers: &[u64], timeout_ms: u32, mapped: Vec<Mapped>,
        arrivals: Option<Arc<Rendezvous>>,
    ) -> Result<Self> {
        let mut peers = Self::over(own.queue()?, rank, buffers, own.bytes(), timeout_ms)?;
        (peers._mapped, peers.arrivals) = (mapped, arrivals);
        Ok(peers)
    }

    /// Takes ownership of this rank's buffer.
    pub fn take(&mut self, own: Buffer) {
        self.own = Some(own.into_memory());
    }

    fn world(&self) -> usize {
        self.buffers.len()
    }

    /// Returns the largest size of a block in an exchange, in bytes.
    fn most_bytes(&self) -> u64 {
        self.areas.exchange / self.world() as u64
    }

    /// Returns the address of the area in which blocks arrive.
    fn area(&self, pattern: Pattern) -> u64 {
        self.buffers[self.rank] + self.areas.start(pattern)
    }

    /// Returns where this rank's block lies in each buffer. `bytes`: the size of a block, a multiple of 16.
    fn slot(&self, pattern: Pattern, bytes: u64) -> PeerSlot {
        assert!(bytes.is_multiple_of(16) && bytes <= self.most_bytes());
        PeerSlot { peers: self.known, at: self.areas.start(pattern) + self.rank as u64 * bytes }
    }

    fn queue_on(&self, stream: &OwnStream) -> Result<cuda::Queue> {
        cuda::Queue::at(self.device, stream.stream(), self.home)
    }

    /// Returns the word that a GPU sets when a barrier fails; 0: no barrier has failed.
    fn barrier_failure(&self) -> u32 {
        // SAFETY: `pinned` owns the four bytes; a GPU may write them, so the read is volatile.
        unsafe { self.pinned.data().cast::<u32>().read_volatile() }
    }

    fn is_broken(&self) -> bool {
        self.barrier_failure() != 0 || self.broken.load(Ordering::Relaxed)
    }

    fn begin_on(&self, queue: &mut cuda::Queue, phases: Phases) -> Result<()> {
        if self.is_broken() {
            self.give_up(); // ends waits of other ranks on the host
            return Err(broken_off(self.rank));
        }
        if !queue.is_capturing()? {
            // Order this call after the previous one, which may have used another stream.
            // SAFETY: `self` keeps the event alive.
            unsafe { self.ended.handle().make_stream_wait(queue)? };
        }
        // On another rank the previous call may still read the area that this call writes to first.
        if phases == Phases::AllGather { self.barrier_on(queue) } else { Ok(()) }
    }

    fn end_on(&self, queue: &mut cuda::Queue, phases: Phases) -> Result<()> {
        // The next call may begin with a write to the area that this call has read.
        if phases == Phases::AllToAll {
            self.barrier_on(queue)?;
        }
        if queue.is_capturing()? {
            return Ok(());
        }
        // SAFETY: `self` keeps the event alive, and the event belongs to the context of the queue.
        unsafe { self.ended.handle().record(queue) }
    }

    /// Barrier without an error flag; the next barrier reports a lost rank.
    fn barrier_on(&self, queue: &mut cuda::Queue) -> Result<()> {
        if self.world() == 1 {
            return Ok(());
        }
        let passed = self.barrier(queue, ptr::null_mut());
        if passed.is_err() {
            self.give_up();
        }
        passed
    }

    fn barrier(&self, queue: &mut cuda::Queue, error_flag: *mut u8) -> Result<()> {
        let Some(arrivals) = &self.arrivals else { return self.launch_barrier(queue, Steps::Both, error_flag) };
        self.launch_barrier(queue, Steps::Signal, error_flag)?;
        self.wait(arrivals, queue, error_flag)
    }

    /// Launches a barrier. `error_flag`: NULL or part of a codec, which lives until its work is done.
    fn launch_barrier(&self, queue: &mut cuda::Queue, steps: Steps, error_flag: *mut u8) -> Result<()> {
        // SAFETY: the buffers are mapped here; `self` and the codec live until the stream has passed the barrier.
        unsafe { PeerSlot { peers: self.known, at: 0 }.barrier(queue, steps, error_flag) }
    }

    fn wait_for(&self, arrivals: &Rendezvous) -> Result<()> {
        arrivals.wait(self.timeout_ms).inspect_err(|_| {
            self.peer_lost.fetch_or(!arrivals.was_aborted(), Ordering::Relaxed);
        })
    }

    fn wait(&self, arrivals: &Rendezvous, queue: &mut cuda::Queue, error_flag: *mut u8) -> Result<()> {
        self.wait_for(arrivals)?;
        self.launch_barrier(queue, Steps::Wait, error_flag)
    }

    /// Pushes blocks of `bytes` bytes, a multiple of 16: one for each rank, or one for all.
    ///
    /// # Safety
    /// The blocks lie at `from`, aligned to 16 bytes, in memory that this device reads, and stay until the stream has
    /// passed this. No rank still reads the area.
    unsafe fn push(&self, queue: &mut cuda::Queue, pattern: Pattern, from: *const u8, bytes: u64) -> Result<()> {
        let apart = if pattern == Pattern::AllToAll { bytes } else { 0 };
        let mut call = Push { slot: self.slot(pattern, bytes), from, vectors: bytes / 16, apart };
        let blocks = self.world() as u64 * bytes.div_ceil(PUSHED);
        // SAFETY: `call` is the kernel's argument. Its buffers are mapped here and have room in each area for a block
        // of each rank, as `slot` asserts; the caller promises the memory at `from`.
        unsafe { queue.launch(&PEERS.push, blocks, &mut argument(&mut call)) }
    }

    fn gather(&self, queue: &mut cuda::Queue, own: &Bytes, all: &mut [Bytes]) -> Result<()> {
        let (record, all) = (self.pinned.data().wrapping_add(RECORD), all.as_flattened_mut());
        assert!(all.len() as u64 <= self.areas.exchange);
        // SAFETY: only this function writes to the record in pinned memory, and it waits until the GPU has read it.
        // `begin_on` has passed a barrier, so no rank still reads the area.
        unsafe {
            record.copy_from_nonoverlapping(own.as_ptr(), own.len());
            self.push(queue, Pattern::AllGather, record, record::BYTES as u64)?;
        }
        self.barrier(queue, ptr::null_mut())?;
        queue.current()?;
        queue.wait()?;
        // SAFETY: the bytes lie within an area of this rank's buffer, as asserted above.
        unsafe { queue.copy_to_host(all, self.area(Pattern::AllGather))? };
        self.end_on(queue, Phases::AllGather)?;
        self.lost_rank(self.rank)
    }

    /// Makes current and later barriers fail on all ranks. This rank signals in no barrier that begins from now on. If
    /// it has just signalled, that barrier may pass. The next one then fails, since even and odd barriers have separate
    /// signals.
    fn end_barriers(&self) -> Result<()> {
        let mut queue = self.queue_on(&self.aborts)?;
        let signals = self.pinned.data().wrapping_add(ABORT_SIGNALS);
        let broken = ptr::with_exposed_provenance_mut((self.known + offset_of!(PeerTable, broken) as u64) as usize);
        // SAFETY: the copies read pinned memory, and write to `known` and to buffers mapped here, which begin with the
        // signals. All of it stays until `self` is dropped, which waits for enqueued work.
        unsafe {
            queue.copy(broken, signals, size_of::<u32>())?;
            self.buffers.iter().try_for_each(|&buffer| {
                queue.copy(ptr::with_exposed_provenance_mut(buffer as usize), signals, SIGNALS as usize)
            })
        }
    }
}

fn broken_off(rank: usize) -> Error {
    error!(Comm, "communicator: an earlier exchange of rank {rank} over peer memory was broken off; make another one")
}

impl Transport for Peers {
    fn place(&self) -> (usize, usize) {
        (self.rank, self.world())
    }

    fn exchange(&self, exchange: &Exchange<'_>) -> Result<*const u8> {
        let Queue::Cuda(mut queue) = exchange.queue()? else {
            return Err(error!(UnsupportedDevice, "{}: only CUDA has peer memory", exchange.device));
        };
        let Exchange { pattern, send, bytes, error_flag, .. } = *exchange;
        // SAFETY: the size of the blocks was checked when their memory was made. On every rank a barrier lies between
        // the last read of the receive slots and this: that of the exchange before, or one of `begin` or `end`.
        let pushed = unsafe { self.push(&mut queue, pattern, send, bytes as u64) };
        pushed.and_then(|()| self.barrier(&mut queue, error_flag))?;
        Ok(ptr::with_exposed_provenance(self.area(pattern) as usize))
    }

    /// Performs the bootstrap all-gather, and waits for it.
    fn all_gather_records(&self, own: &Bytes, all: &mut [Bytes]) -> Result<()> {
        let mut queue = self.queue_on(&self.stream)?;
        self.begin_on(&mut queue, Phases::AllGather)?;
        let gathered = self.gather(&mut queue, own, all);
        if gathered.is_err() {
            self.give_up();
        }
        gathered
    }

    /// Makes current and later barriers of all ranks fail.
    fn abort(&self) -> Result<()> {
        if let Some(arrivals) = &self.arrivals {
            arrivals.abort();
        }
        self.give_up();
        self.end_barriers()
    }

    /// Marks the transport as broken. Other ranks notice in the rendezvous, or when their timeout ends.
    fn give_up(&self) {
        self.broken.store(true, Ordering::Relaxed);
        match &self.arrivals {
            // The other ranks of this process may not have seen the abort yet.
            Some(arrivals) if self.barrier_failure() == ABORTED => arrivals.abort(),
            Some(arrivals) => arrivals.give_up(),
            None => {}
        }
    }

    fn out_of_step(&self) {
        self.give_up();
    }

    fn check(&self, device: Device, memory: &Block, bytes: i64) -> Result<()> {
        let own = Device::Cuda(self.device.ordinal as i32);
        match memory {
            Block::Cpu(_) => Err(error!(
                UnsupportedDevice,
                "device: {device}; the communicator, over peer memory, exchanges memory of {own}"
            )),
            Block::Cuda(_) if device != own => {
                Err(error!(InvalidArgument, "device: {device}; the communicator, over peer memory, is on {own}"))
            }
            Block::Cuda(memory) if memory.home.id != self.home.id => Err(error!(
                InvalidArgument,
                "the current context is not the one that the communicator, over peer memory of {own}, was made in"
            )),
            Block::Cuda(_) if self.world() > 1 && bytes as u64 > self.most_bytes() => Err(error!(
                InvalidArgument,
                "{bytes} bytes from each rank; the communicator's buffers have room for {}: gc_allreduce_peers_bytes \
                 says how large they must be",
                self.most_bytes()
            )),
            Block::Cuda(_) => Ok(()),
        }
    }

    fn async_error(&self, rank: usize) -> Result<()> {
        if self.is_broken() { Err(broken_off(rank)) } else { Ok(()) }
    }

    fn lost_rank(&self, rank: usize) -> Result<()> {
        // Read the timeout flag before the abort flag, so that an abort is not reported as a timeout.
        let is_late = self.barrier_failure() != 0 || self.peer_lost.load(Ordering::Relaxed);
        if self.barrier_failure() == ABORTED {
            return Err(error!(
                Comm,
                "communicator: a rank has aborted it over peer memory, which rank {rank} has seen"
            ));
        }
        if is_late {
            return Err(error!(
                Timeout,
                "communicator: rank {rank} waited {} ms over peer memory for a rank that did not arrive",
                self.timeout_ms
            ));
        }
        Ok(())
    }

    /// Returns true if threads of this process wait for each other.
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
        [Pattern::AllToAll, Pattern::AllGather]
            .map(|pattern| ptr::with_exposed_provenance_mut(self.area(pattern) as usize))
    }

    fn sending(&self, pattern: Pattern, bytes: i64) -> PeerDestination {
        let steps = if self.arrivals.is_some() { Steps::Signal } else { Steps::Both };
        PeerDestination { slot: self.slot(pattern, bytes as u64), steps }
    }

    fn complete_barrier(&self, queue: &mut cuda::Queue, error_flag: *mut u8) -> Result<()> {
        self.arrivals.as_ref().map_or(Ok(()), |arrivals| self.wait(arrivals, queue, error_flag))
    }

    fn one_shot(&self, bytes: i64) -> Option<OneShot> {
        let bytes = bytes as u64;
        let fits = bytes.checked_mul(self.world() as u64).is_some_and(|all| all <= self.areas.one_shot);
        let at = self.areas.start_one_shot() + self.rank as u64 * bytes;
        fits.then_some(OneShot { slot: PeerSlot { peers: self.known, at }, apart: bytes, turn: self.areas.one_shot })
    }

    fn one_shot_launches(&self) -> &'static [Steps] {
        if self.arrivals.is_some() { &[Steps::Signal, Steps::Wait] } else { &[Steps::Both] }
    }

    fn wait_for_launches(&self) -> Result<()> {
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
        // cuMemFree waits for running work, so `is_broken` below covers that work, too.
        self.memory = None;
        if self.is_broken() {
            // A rank that is late, or has not seen the failure yet, may still write to this rank's buffer. So the
            // buffer is never freed.
            mem::forget(self.own.take());
        }
    }
}
