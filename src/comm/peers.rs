//! Exchanges over memory that the ranks of a machine reach, by kernels of ours.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    process,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use arrayvec::ArrayVec;

use crate::{
    backend::{
        Block, Queue,
        cuda::{
            self,
            peers::{self as cards, Area, Buffer, Identity, Mapped, Sending, Steps},
        },
    },
    cancel,
    error::{Error, Result, error},
    ops::bits::chunk_bytes,
    plan::codec::chunk_stride,
    tensor::Device,
};

pub use crate::backend::cuda::peers::MOST_RANKS;

use super::{
    Communicator, RECORD, Shared,
    rendezvous::Rendezvous,
    shared::Room,
    transport::{Exchange, Pattern, Span},
};

/// How long a rank waits for the others, in milliseconds, unless it is said.
const PATIENCE: u32 = 30_000;

/// One rank's part.
pub struct Peers {
    rank: usize,
    way: cards::Peers,
    milliseconds: u32,
    /// Where ranks share a card within a process: those of the process all say that they have come before one is told to
    /// listen, for kernels that wait for others may keep those from being launched.
    order: Option<Shared<Rendezvous>>,
    /// An exchange was not enqueued as a whole: the others count one more.
    broken: AtomicBool,
    /// A rank of this process did not come.
    alone: AtomicBool,
}

/// Where the buffers of all ranks are, as the caller has mapped them.
pub struct Places<'a> {
    pub rank: i32,
    pub device: Device,
    pub bytes: usize,
    /// By rank.
    pub buffers: &'a [u64],
    /// 0: as usual.
    pub milliseconds: u32,
}

/// Bytes of each rank's buffer for calls with up to so many elements.
pub fn peers_bytes(elements: i64, world: i32) -> Result<i64> {
    let ranks = ranks_of(world)?;
    let too_large =
        || error!(SizeOverflow, "n_elements: {elements} elements want a buffer of more than 2^63 - 1 bytes");
    let block = chunk_stride(1, chunk_bytes(elements, ranks)?).ok_or_else(too_large)?;
    let bytes = cards::buffer_bytes(ranks as u64, block as u64).ok_or_else(too_large)?;
    i64::try_from(bytes).map_err(|_| too_large())
}

/// How many ranks a world has.
pub fn ranks_of(world: i32) -> Result<usize> {
    match usize::try_from(world) {
        Ok(ranks @ 1..=MOST_RANKS) => Ok(ranks),
        _ => Err(error!(InvalidArgument, "world_size: {world}; 1 to {MOST_RANKS} expected")),
    }
}

fn ordinal_of(device: Device) -> Result<i32> {
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

fn patience(milliseconds: u32) -> u32 {
    if milliseconds == 0 { PATIENCE } else { milliseconds }
}

impl Peers {
    /// Over buffers of the caller's.
    pub fn new(places: &Places<'_>) -> Result<Self> {
        let ranks = places.buffers.len();
        let rank = usize::try_from(places.rank).ok().filter(|&rank| rank < ranks).ok_or_else(|| {
            error!(InvalidArgument, "options: rank {} of {ranks}: 0 <= rank < world_size expected", places.rank)
        })?;
        let (ordinal, least) = (ordinal_of(places.device)?, peers_bytes(0, ranks as i32)?);
        if (places.bytes as u64) < least as u64 {
            return Err(error!(
                InvalidArgument,
                "options: buffers of {} bytes; gc_peers_bytes says {least} and more", places.bytes
            ));
        }
        let _delay = cancel::delay();
        for (number, &address) in places.buffers.iter().enumerate() {
            if let Some(other) = places.buffers[..number].iter().position(|&other| other == address) {
                return Err(error!(
                    InvalidArgument,
                    "options: buffers[{other}] and buffers[{number}] are both {address:#x}"
                ));
            }
            cards::check_buffer(ordinal, number, address, places.bytes as u64, number == rank)?;
        }
        let milliseconds = patience(places.milliseconds);
        let bytes = places.bytes as u64;
        let way = cards::Peers::new(ordinal, rank, places.buffers, bytes, milliseconds, Vec::new(), None)?;
        Ok(Self::over(rank, way, milliseconds, None))
    }

    fn over(rank: usize, way: cards::Peers, milliseconds: u32, order: Option<Shared<Rendezvous>>) -> Self {
        Self { rank, way, milliseconds, order, broken: AtomicBool::new(false), alone: AtomicBool::new(false) }
    }

    pub fn place(&self) -> (usize, usize) {
        (self.rank, self.way.world())
    }

    /// Whether threads of this process wait for each other.
    pub fn waits_on_host(&self) -> bool {
        self.order.is_some()
    }

    /// Where blocks arrive, by pattern.
    pub fn areas(&self) -> [*mut u8; 2] {
        [Area::AllToAll, Area::AllGather].map(|area| self.way.area(area))
    }

    pub fn check(&self, device: Device, memory: &Block, bytes: i64) -> Result<()> {
        let own = Device::Cuda(self.way.ordinal());
        match memory {
            Block::Cpu(_) => Err(error!(
                UnsupportedDevice,
                "device: {device}; the communicator, over peer memory, exchanges memory of {own}"
            )),
            Block::Cuda(_) if device != own => {
                Err(error!(InvalidArgument, "device: {device}; the communicator, over peer memory, is on {own}"))
            }
            Block::Cuda(memory) if !self.way.is_in_context_of(memory) => Err(error!(
                InvalidArgument,
                "the current context is not the one that the communicator, over peer memory of {own}, was made in"
            )),
            Block::Cuda(_) if self.way.world() > 1 && bytes as u64 > self.way.most_bytes() => Err(error!(
                InvalidArgument,
                "{bytes} bytes a chunk; the communicator's buffers have room for {}: gc_peers_bytes of more elements",
                self.way.most_bytes()
            )),
            Block::Cuda(_) => Ok(()),
        }
    }

    pub fn begin(&self, queue: &mut cuda::Queue, span: Span) -> Result<()> {
        if self.way.is_broken() || self.broken.load(Ordering::Relaxed) {
            self.give_up(); // if others still wait on the host
            return Err(error!(
                Comm,
                "communicator: an earlier exchange of rank {} over peer memory was broken off; make another one",
                self.rank
            ));
        }
        let capturing = queue.is_capturing()?;
        if capturing && self.order.is_some() {
            return Err(error!(
                InvalidArgument,
                "stream: it is being captured, and ranks that share a card within a process wait for each other on the host"
            ));
        }
        if !capturing {
            self.way.begin(queue)?;
        }
        // The call before may have ended with reading what this one writes to.
        if span == Span::AllGather { self.meet_alone(queue) } else { Ok(()) }
    }

    pub fn end(&self, queue: &mut cuda::Queue, span: Span) -> Result<()> {
        // The next call may begin with writing to what this one has read.
        if span == Span::AllToAll {
            self.meet_alone(queue)?;
        }
        if queue.is_capturing()? { Ok(()) } else { self.way.end(queue) }
    }

    /// A meeting that no codec hears of: if a rank does not come, the next one tells.
    pub fn meet_alone(&self, queue: &mut cuda::Queue) -> Result<()> {
        if self.way.world() == 1 {
            return Ok(());
        }
        let met = self.meet(queue, std::ptr::null_mut());
        if met.is_err() {
            self.give_up();
        }
        met
    }

    /// For chunks of `bytes` bytes that a codec makes straight in the others' memory, and the meeting behind them, which
    /// `arrive` completes.
    pub fn sending(&self, pattern: Pattern, bytes: i64) -> Sending {
        let steps = if self.order.is_some() { Steps::Speak } else { Steps::Both };
        Sending { way: self.way.way(area_of(pattern), bytes as u64), steps }
    }

    /// Behind what a codec has sent. `mark`: its own.
    pub fn arrive(&self, queue: &mut cuda::Queue, mark: *mut u8) -> Result<()> {
        match &self.order {
            None => Ok(()),
            Some(order) => self.listen(order, queue, mark),
        }
    }

    pub fn exchange(&self, exchange: &Exchange<'_>) -> Result<()> {
        let Queue::Cuda(mut queue) = exchange.queue()? else {
            return Err(error!(UnsupportedDevice, "{}: only CUDA has peer memory", exchange.device));
        };
        let area = area_of(exchange.pattern);
        // SAFETY: blocks of so many bytes, whose sizes were checked when their memory was made; a meeting lies between
        // this and what read the area last, on any rank: that of the exchange before, or one that `begin` or `end` made.
        let pushed = unsafe { self.way.push(&mut queue, area, exchange.send, exchange.bytes as u64) };
        pushed.and_then(|()| self.meet(&mut queue, exchange.mark))
    }

    fn meet(&self, queue: &mut cuda::Queue, mark: *mut u8) -> Result<()> {
        let Some(order) = &self.order else {
            // SAFETY: a mark of the codec whose call this is, or none.
            return unsafe { self.way.meet(queue, Steps::Both, mark) };
        };
        // SAFETY: as above.
        unsafe { self.way.meet(queue, Steps::Speak, mark)? };
        self.listen(order, queue, mark)
    }

    fn listen(&self, order: &Rendezvous, queue: &mut cuda::Queue, mark: *mut u8) -> Result<()> {
        if let Err(refusal) = order.wait(self.milliseconds) {
            self.alone.store(true, Ordering::Relaxed);
            return Err(refusal);
        }
        // SAFETY: a mark of the codec whose call this is, or none.
        unsafe { self.way.meet(queue, Steps::Listen, mark) }
    }

    /// Tells every rank 64 bytes of each. Waits for it.
    pub fn tell(&self, own: &[u8; RECORD], all: &mut [[u8; RECORD]]) -> Result<()> {
        let _delay = cancel::delay();
        let mut queue = self.way.own_queue()?;
        self.begin(&mut queue, Span::AllGather)?;
        let told = self.tell_in(&mut queue, own, all);
        if told.is_err() {
            self.give_up();
        }
        told
    }

    fn tell_in(&self, queue: &mut cuda::Queue, own: &[u8; RECORD], all: &mut [[u8; RECORD]]) -> Result<()> {
        let record = self.way.write_record(own);
        // SAFETY: memory of this communicator, which is written to again only after this has been waited for, for
        // otherwise there is no other call; `begin` has met the others.
        unsafe { self.way.push(queue, Area::AllGather, record, RECORD as u64)? };
        self.meet(queue, std::ptr::null_mut())?;
        self.way.read(queue, Area::AllGather, all.as_flattened_mut())?;
        self.end(queue, Span::AllGather)?;
        self.async_error()
    }

    /// The others find out when they have waited long enough.
    pub fn give_up(&self) {
        self.broken.store(true, Ordering::Relaxed);
        if let Some(order) = &self.order {
            order.give_up();
        }
    }

    pub fn async_error(&self) -> Result<()> {
        if self.way.is_broken() || self.alone.load(Ordering::Relaxed) {
            return Err(error!(
                Timeout,
                "communicator: rank {} waited {} ms over peer memory for a rank that did not come",
                self.rank,
                self.milliseconds
            ));
        }
        Ok(())
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        if self.way.is_broken() || self.broken.load(Ordering::Relaxed) {
            // A rank that comes late, or has not found out yet, writes there.
            self.way.keep();
        }
    }
}

/// A communicator over peer memory, found over another one. Every rank comes here.
pub fn open_peers(
    bootstrap: Shared<Communicator>,
    device: Result<Device>,
    elements: i64,
    milliseconds: u32,
) -> Result<Shared<Communicator>> {
    let _delay = cancel::delay();
    let entered = bootstrap.enter()?;
    let (rank, world) = (bootstrap.rank, bootstrap.world);
    // Whatever goes wrong here, the others wait.
    let opened = device.and_then(|device| Ok((Opening::new(device, elements, world)?, Room::new()?)));
    let greeting = opened.as_ref().map_or_else(|_| Greeting::of_failure(), |(opening, _)| opening.greeting());
    let records = bootstrap.tell_all(&greeting.encoded())?;
    let (opening, room) = opened?;
    let greetings = Greeting::all(&records, rank)?;
    let own = &greetings[rank];
    let alone = greetings.iter().all(|other| other.is_in_process_of(own));
    let handle = if alone { Ok([0; RECORD]) } else { opening.buffer.handle() };
    let handles = if alone { None } else { Some(bootstrap.tell_all(handle.as_ref().unwrap_or(&[0; RECORD]))?) };
    // In one process, of the first of its ranks: no other buffer is there meanwhile.
    let here = || greetings.iter().filter(|other| other.is_in_process_of(own));
    let key = here().next().map_or(0, |first| first.identity.address);
    let (ordinal, bytes, milliseconds) = (opening.ordinal, opening.bytes, patience(milliseconds));
    let made = handle.and_then(|_| opening.map(&greetings, rank, handles.as_deref())).and_then(|(buffers, mapped)| {
        let shares_card = here().any(|one| here().filter(|other| one.identity.uuid == other.identity.uuid).count() > 1);
        let order = if shares_card { Some(Rendezvous::find(key, here().count())?) } else { None };
        let own = Some(&opening.buffer);
        Ok((cards::Peers::new(ordinal, rank, &buffers, bytes, milliseconds, mapped, own)?, order))
    });
    let outcomes = bootstrap.tell_all(&[u8::from(made.is_err()); RECORD])?;
    Rendezvous::close(key);
    if let Some(other) = outcomes.iter().position(|outcome| outcome[0] != 0) {
        let refusal = made.err().unwrap_or_else(|| {
            error!(UnsupportedDevice, "communicator: rank {other} cannot reach the memory of all others")
        });
        // What was mapped here is not any more. Nobody frees a buffer that another rank has mapped.
        bootstrap.tell_all(&[0; RECORD])?;
        return Err(refusal);
    }
    let (mut way, order) = made?;
    way.take(opening.buffer);
    drop(entered);
    Ok(room.fill(Communicator::over_peers(Peers::over(rank, way, milliseconds, order))))
}

/// A rank that has its buffer.
struct Opening {
    ordinal: i32,
    bytes: u64,
    buffer: Buffer,
    identity: Identity,
}

impl Opening {
    fn new(device: Device, elements: i64, world: usize) -> Result<Self> {
        let (ordinal, bytes) = (ordinal_of(device)?, peers_bytes(elements, world as i32)? as u64);
        let buffer = Buffer::new(ordinal, bytes)?;
        let identity = buffer.identity()?;
        Ok(Self { ordinal, bytes, buffer, identity })
    }

    fn greeting(&self) -> Greeting {
        let (host, process) = this_process();
        Greeting { failed: false, bytes: self.bytes, host, process, identity: self.identity }
    }

    /// Reaches the buffers of all ranks.
    fn map(
        &self,
        greetings: &[Greeting],
        rank: usize,
        handles: Option<&[[u8; RECORD]]>,
    ) -> Result<(ArrayVec<u64, MOST_RANKS>, Vec<Mapped>)> {
        let (mut buffers, mut mapped) = (ArrayVec::new(), Vec::new());
        mapped
            .try_reserve_exact(greetings.len())
            .map_err(|_| error!(OutOfMemory, "a list of {} buffers could not be had", greetings.len()))?;
        for (number, greeting) in greetings.iter().enumerate() {
            let address = match handles {
                Some(handles) if !greeting.is_in_process_of(&greetings[rank]) => {
                    let buffer = self.buffer.open(&handles[number])?;
                    let address = buffer.address;
                    mapped.push(buffer);
                    address
                }
                _ => self.buffer.reach(&greeting.identity)?,
            };
            buffers.push(address);
        }
        Ok((buffers, mapped))
    }
}

/// What a rank tells of itself.
struct Greeting {
    failed: bool,
    bytes: u64,
    host: u64,
    process: u64,
    identity: Identity,
}

impl Greeting {
    fn of_failure() -> Self {
        let identity = Identity { uuid: [0; 16], address: 0, context: 0 };
        Self { failed: true, bytes: 0, host: 0, process: 0, identity }
    }

    fn encoded(&self) -> [u8; RECORD] {
        let mut record = [0; RECORD];
        record[..4].copy_from_slice(b"GCPE");
        (record[4], record[5]) = (1, u8::from(self.failed));
        for (at, number) in [
            (8, self.bytes),
            (16, self.host),
            (24, self.process),
            (32, self.identity.address),
            (40, self.identity.context),
        ] {
            record[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        record[48..].copy_from_slice(&self.identity.uuid);
        record
    }

    /// Those of all ranks, which want the same.
    fn all(records: &[[u8; RECORD]], own: usize) -> Result<ArrayVec<Self, MOST_RANKS>> {
        let refusal = |rank: usize, why: &str| -> Error { error!(InvalidArgument, "communicator: rank {rank} {why}") };
        let mut greetings = ArrayVec::new();
        for (rank, record) in records.iter().enumerate() {
            let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| record[at + byte]));
            if record[..5] != records[own][..5] {
                return Err(refusal(rank, "runs another version"));
            }
            if record[5] != 0 {
                return Err(refusal(rank, "could not make its buffer"));
            }
            if record[8..16] != records[own][8..16] {
                return Err(refusal(rank, "has another n_elements"));
            }
            if record[16..24] != records[own][16..24] {
                return Err(error!(UnsupportedDevice, "communicator: rank {rank} is on another machine"));
            }
            let identity =
                Identity { uuid: std::array::from_fn(|byte| record[48 + byte]), address: word(32), context: word(40) };
            let (bytes, host, process) = (word(8), word(16), word(24));
            greetings.push(Self { failed: false, bytes, host, process, identity });
        }
        Ok(greetings)
    }

    fn is_in_process_of(&self, other: &Self) -> bool {
        (self.host, self.process) == (other.host, other.process)
    }
}

/// Numbers that tell this machine, since it was started, and this process from all others.
fn this_process() -> (u64, u64) {
    static RANDOM: OnceLock<u64> = OnceLock::new();
    let random = RANDOM.get_or_init(|| RandomState::new().build_hasher().finish());
    let started = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let host = started
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    (host, random ^ u64::from(process::id()) << 32)
}
