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
            peers::{self as cards, Area, Buffer, Identity, Mapped, Steps},
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
    shared::Room,
    transport::{Exchange, Pattern},
};

/// How long a rank waits for the others, in milliseconds, unless it is said.
const PATIENCE: u32 = 30_000;

/// One rank's part.
pub struct Peers {
    rank: usize,
    way: cards::Peers,
    milliseconds: u32,
    /// Where ranks share a card within a process: they all say that they have come before one is told to listen, for kernels
    /// that wait for others may keep those from being launched.
    order: Option<Shared<Communicator>>,
    /// An exchange was not enqueued as a whole: the others count one more.
    broken: AtomicBool,
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
            cards::check_buffer(ordinal, number, address, number == rank)?;
        }
        let milliseconds = patience(places.milliseconds);
        let bytes = places.bytes as u64;
        let way = cards::Peers::new(ordinal, rank, places.buffers, bytes, milliseconds, (Vec::new(), None))?;
        Ok(Self { rank, way, milliseconds, order: None, broken: AtomicBool::new(false) })
    }

    pub fn place(&self) -> (usize, usize) {
        (self.rank, self.way.world())
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

    pub fn begin(&self, queue: &mut cuda::Queue) -> Result<()> {
        if self.way.is_broken() || self.broken.load(Ordering::Relaxed) {
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
        if capturing { Ok(()) } else { self.way.begin(queue) }
    }

    /// `half`: nothing but a meeting lies between this call's reading and the next one's writing.
    pub fn end(&self, queue: &mut cuda::Queue, half: bool) -> Result<()> {
        if half && self.way.world() > 1 {
            self.meet(queue, std::ptr::null_mut())?;
        }
        if queue.is_capturing()? { Ok(()) } else { self.way.end(queue) }
    }

    pub fn exchange(&self, exchange: &Exchange<'_>) -> Result<()> {
        let Queue::Cuda(mut queue) = exchange.queue()? else {
            return Err(error!(UnsupportedDevice, "{}: only CUDA has peer memory", exchange.device));
        };
        let area = match exchange.pattern {
            Pattern::AllToAll => Area::AllToAll,
            Pattern::AllGather => Area::AllGather,
        };
        // SAFETY: blocks of so many bytes, whose sizes were checked when their memory was made; the meetings of the calls
        // before lie between this and what read the area last.
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
        order.wait_for_all()?;
        // SAFETY: as above.
        unsafe { self.way.meet(queue, Steps::Listen, mark) }
    }

    /// Tells every rank 64 bytes of each. Waits for it.
    pub fn tell(&self, own: &[u8; RECORD], all: &mut [[u8; RECORD]]) -> Result<()> {
        let _delay = cancel::delay();
        let mut queue = self.way.own_queue()?;
        self.begin(&mut queue)?;
        let record = self.way.write_record(own);
        // SAFETY: memory of this communicator, which is written to again after this has been waited for; calls end with a
        // meeting if they read this area last.
        unsafe { self.way.push(&mut queue, Area::AllGather, record, RECORD as u64)? };
        self.meet(&mut queue, std::ptr::null_mut())?;
        self.way.read(&mut queue, Area::AllGather, all.as_flattened_mut())?;
        self.end(&mut queue, true)?;
        queue.wait()?;
        self.async_error()
    }

    /// The others find out when they have waited long enough.
    pub fn give_up(&self) {
        self.broken.store(true, Ordering::Relaxed);
        if let Some(order) = &self.order {
            order.transport.give_up();
        }
    }

    pub fn async_error(&self) -> Result<()> {
        if self.way.is_broken() {
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
    let mapped = if greetings.iter().any(|other| !other.is_in_process_of(own)) {
        let handle = opening.buffer.handle();
        let handles = bootstrap.tell_all(handle.as_ref().unwrap_or(&[0; RECORD]))?;
        handle.and_then(|_| opening.map(&greetings, rank, Some(&handles)))
    } else {
        opening.map(&greetings, rank, None)
    };
    let made = mapped.and_then(|(buffers, mapped)| {
        let (ordinal, bytes) = (opening.ordinal, opening.bytes);
        cards::Peers::new(ordinal, rank, &buffers, bytes, patience(milliseconds), (mapped, Some(opening.buffer)))
    });
    let outcome = [u8::from(made.is_err()); RECORD];
    let outcomes = bootstrap.tell_all(&outcome)?;
    let way = made.map_err(cards::unreachable)?;
    if let Some(other) = outcomes.iter().position(|outcome| outcome[0] != 0) {
        return Err(error!(UnsupportedDevice, "communicator: rank {other} cannot reach the memory of all others"));
    }
    let shared = (0..world).any(|one| (0..one).any(|other| greetings[one].shares_card_with(&greetings[other])));
    drop(entered);
    let order = shared.then_some(bootstrap);
    let milliseconds = patience(milliseconds);
    let peers = Peers { rank, way, milliseconds, order, broken: AtomicBool::new(false) };
    Ok(room.fill(Communicator::over_peers(peers)))
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

    fn shares_card_with(&self, other: &Self) -> bool {
        self.is_in_process_of(other) && self.identity.uuid == other.identity.uuid
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
