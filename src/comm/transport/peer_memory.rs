//! Exchanges over memory that the ranks of a machine reach: kernels/peers.cu.
//!
//! Each rank has a buffer that all others write to, and nobody else reads:
//!
//! ```text
//!     heard    | in even meetings | in odd ones |        a number of each rank
//!     area     | of rank 0 | of rank 1 | ...             blocks of an exchange of all to all
//!     area     | of rank 0 | of rank 1 | ...             blocks of an exchange in which all gather the same
//!     area     | of rank 0 | of rank 1 | ...             whole payloads of calls that exchange once, in even meetings
//!     area     | of rank 0 | of rank 1 | ...             and in odd ones
//! ```
//!
//! The two kinds of exchanges come in turn, and a meeting lies between an area's reading and the next writing to it:
//! that of the other kind. Where a kind follows itself, a meeting of its own is needed. A call that exchanges once has
//! one meeting, by whose number it takes its area: before the next call that takes the same one all have come to
//! another meeting, whatever that was of.

use std::{mem::offset_of, ptr};

use cudarc::driver::sys::{CUipcMemHandle, CUpointer_attribute};

use crate::{
    codec::plan::ONE_EXCHANGE_BYTES_OF_TWO,
    cuda::{
        Event, Memory, Pinned, Queue, Stream,
        context::ContextRef,
        device::Device,
        launch::argument,
        layout::kernel_structs,
        module::{PEERS, PEERS_MODULE},
        own_stream::OwnStream,
        peers::{Once, Steps, Way},
    },
    ffi::{
        error::{Error, Result, Status, error},
        fallible,
    },
};

/// As the kernels have it.
pub const MOST_RANKS: usize = 64;

/// Bytes of what is heard.
const HEARD: u64 = 2 * 8 * MOST_RANKS as u64;

/// What areas are aligned to.
const ALIGNMENT: u64 = 256;

/// Bytes of all payloads of a call that exchanges once, at most. Those of two ranks, in every world: buffers for many
/// ranks may be those of the two of a node, with areas of the same sizes.
const MOST_ONCE: u64 = ONE_EXCHANGE_BYTES_OF_TWO as u64;

/// Bytes that a block of threads pushes, at most: 256 threads, 4 vectors of 16.
const PUSHED: u64 = 256 * 4 * 16;

/// Bytes of a buffer for exchanges of `block` bytes between `world` ranks.
pub fn buffer_bytes(world: u64, block: u64) -> Option<u64> {
    let area = world.checked_mul(block)?.checked_next_multiple_of(ALIGNMENT)?;
    area.checked_add(area.min(MOST_ONCE))?.checked_mul(2)?.checked_add(HEARD)
}

/// Bytes of an area of a buffer of so many, at least those for the smallest blocks, and of one of calls that exchange
/// once.
fn areas_of(bytes: u64) -> (u64, u64) {
    let all = bytes.saturating_sub(HEARD);
    let once = (all / 4).next_multiple_of(ALIGNMENT).min(MOST_ONCE);
    (all.saturating_sub(2 * once) / 2 / ALIGNMENT * ALIGNMENT, once)
}

kernel_structs! {
    /// What the kernels know of the ranks: in memory of this one.
    #[derive(Clone, Copy)]
    struct Known: gc_peers {
        meetings: u64,
        broken: u32,
        world: u32,
        rank: u32,
        reserved: u32,
        nanoseconds: u64,
        told: u64,
        buffers: [u64; MOST_RANKS],
    }
}

kernel_structs! {
    struct Push: gc_push {
        way: Way,
        from: *const u8,
        vectors: u64,
        apart: u64,
    }
}

/// What an area is for.
#[derive(Clone, Copy)]
pub enum Area {
    AllToAll = 0,
    AllGather = 1,
}

/// Where a record of this rank lies in pinned memory, and what is told to all if this rank aborts: in the place of
/// each rank's number one that is never due.
const RECORD: usize = 64;
const ABORTED: usize = 128;
const PINNED_BYTES: usize = ABORTED + HEARD as usize;

/// What a GPU writes in pinned memory when a meeting was broken off because a rank has aborted.
const ENDED: u32 = 2;

/// A rank's way to the memory of the others.
pub struct Peers {
    device: Device,
    home: ContextRef,
    rank: usize,
    world: usize,
    area: u64,
    once: u64,
    /// By rank, as they are mapped here.
    buffers: Vec<u64>,
    /// Of what kernels know: its address, and itself until it is freed.
    known: u64,
    memory: Option<Memory>,
    /// Where a GPU writes that a rank did not come, or has aborted: a uint32, not 0 then; a record of this rank, to be
    /// pushed; and what is told if this rank aborts.
    said: Pinned,
    /// The end of the last call.
    ended: Event,
    /// For what belongs to no call.
    stream: OwnStream,
    /// For aborts alone: on the other one a meeting may be waiting.
    aborts: OwnStream,
    /// What is to be closed, and this rank's buffer, where they are ours.
    _mapped: Vec<Mapped>,
    own: Option<Memory>,
}

/// What a rank tells the others, so that they can reach its buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Of the GPU.
    pub uuid: [u8; 16],
    /// In this process: where the buffer lies, and its context.
    pub address: u64,
    pub context: u64,
}

/// A rank's own buffer, before the others are mapped.
pub struct Buffer {
    device: Device,
    memory: Memory,
    bytes: u64,
}

impl Buffer {
    /// `bytes` bytes in the context that calls without a stream work in, all 0.
    pub fn new(ordinal: i32, bytes: u64) -> Result<Self> {
        let mut queue = Queue::of(ordinal, Stream::LEGACY)?;
        let memory = Memory::new(&mut queue, bytes)?;
        queue.wait()?;
        Ok(Self { device: queue.device, memory, bytes })
    }

    pub fn identity(&self) -> Result<Identity> {
        let home = self.memory.home;
        Ok(Identity { uuid: self.device.uuid()?, address: self.memory.at(0), context: home.handle() as u64 })
    }

    /// For another process.
    pub fn handle(&self) -> Result<[u8; 64]> {
        let mut queue = self.memory.queue(Stream::LEGACY)?;
        queue.current()?;
        let (driver, mut handle) = (self.device.driver, CUipcMemHandle { reserved: [0; 64] });
        // SAFETY: the place outlives the call; the address is of memory from cuMemAlloc.
        let code = unsafe { (driver.functions.cuIpcGetMemHandle)(&mut handle, self.memory.at(0)) };
        driver.check(code, format_args!("cuIpcGetMemHandle of {} bytes on {}", self.bytes, self.device))?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    /// The buffer of another process.
    pub fn open(&self, handle: &[u8; 64]) -> Result<Mapped> {
        /// So that a GPU that can be reached is.
        const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
        let mut queue = self.memory.queue(Stream::LEGACY)?;
        queue.current()?;
        let (driver, mut address) = (self.device.driver, 0);
        let handle = CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        // SAFETY: the place outlives the call; the driver checks a handle.
        let code = unsafe { (driver.functions.cuIpcOpenMemHandle_v2)(&mut address, handle, LAZY_ENABLE_PEER_ACCESS) };
        driver.check(code, format_args!("cuIpcOpenMemHandle on {}", self.device)).map_err(unreachable)?;
        Ok(Mapped { device: self.device, home: self.memory.home, address })
    }

    /// The buffer of another rank of this process: its address, once this GPU reaches it.
    pub fn reach(&self, other: &Identity) -> Result<u64> {
        let driver = self.device.driver;
        if self.device.uuid()? == other.uuid {
            return Ok(other.address);
        }
        let mut queue = self.memory.queue(Stream::LEGACY)?;
        queue.current()?;
        const ALREADY_ENABLED: i32 = 704;
        // SAFETY: the other rank of this process keeps its buffer's context; a context is current.
        match unsafe { (driver.functions.cuCtxEnablePeerAccess)(other.context as _, 0) } {
            0 | ALREADY_ENABLED => Ok(other.address),
            code => {
                driver.check(code, format_args!("cuCtxEnablePeerAccess on {}", self.device)).map_err(unreachable)?;
                Ok(other.address)
            }
        }
    }
}

/// A buffer of another process, mapped here.
pub struct Mapped {
    device: Device,
    home: ContextRef,
    pub address: u64,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.home.give_back(self.device, || {
            // SAFETY: from cuIpcOpenMemHandle in this context, which is current; the work of its user is done.
            unsafe { (self.device.driver.functions.cuIpcCloseMemHandle)(self.address) };
        });
    }
}

impl Peers {
    /// Over buffers of `bytes` bytes, by rank, that are mapped here. `own`: this rank's buffer, where it is ours, to be
    /// taken over.
    pub fn new(
        ordinal: i32, rank: usize, given: &[u64], bytes: u64, milliseconds: u32, mapped: Vec<Mapped>,
        own: Option<&Buffer>,
    ) -> Result<Self> {
        let mut queue = match own {
            Some(buffer) => buffer.memory.queue(Stream::LEGACY)?,
            None => Queue::of(ordinal, Stream::LEGACY)?,
        };
        queue.put_into_context(&PEERS_MODULE)?;
        let memory = Memory::new(&mut queue, size_of::<Known>() as u64)?;
        let (said, ended) = (Pinned::new(&mut queue, PINNED_BYTES as i64)?, Event::new(&mut queue)?);
        let (stream, aborts) = (OwnStream::new(&mut queue)?, OwnStream::new(&mut queue)?);
        queue.wait()?;
        let mut buffers = fallible::list(given.len(), "buffers")?;
        buffers.extend_from_slice(given);
        // SAFETY: within pinned memory that nobody else has yet.
        unsafe { said.data().add(ABORTED).write_bytes(0xff, HEARD as usize) };
        let mut known = Known {
            meetings: 0,
            broken: 0,
            world: given.len() as u32,
            rank: rank as u32,
            reserved: 0,
            nanoseconds: u64::from(milliseconds) * 1_000_000,
            told: said.data() as u64,
            buffers: [0; MOST_RANKS],
        };
        known.buffers[..given.len()].copy_from_slice(given);
        memory.put(0, &[known])?;
        let (area, once) = areas_of(bytes);
        Ok(Self {
            device: queue.device,
            home: memory.home,
            rank,
            world: given.len(),
            area,
            once,
            buffers,
            known: memory.at(0),
            memory: Some(memory),
            said,
            ended,
            stream,
            aborts,
            _mapped: mapped,
            own: None,
        })
    }

    pub fn ordinal(&self) -> i32 {
        self.device.ordinal as i32
    }

    pub fn world(&self) -> usize {
        self.world
    }

    /// Bytes of a block that an exchange can have, at most.
    pub fn most_bytes(&self) -> u64 {
        self.area / self.world as u64
    }

    /// Where blocks arrive.
    pub fn area(&self, area: Area) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.place(area) as usize)
    }

    fn place(&self, area: Area) -> u64 {
        self.buffers[self.rank] + HEARD + area as u64 * self.area
    }

    /// The way of this rank's block of `bytes` bytes, a multiple of 16, to the others.
    pub fn way(&self, area: Area, bytes: u64) -> Way {
        assert!(bytes.is_multiple_of(16) && bytes <= self.most_bytes());
        Way { peers: self.known, at: self.place(area) - self.buffers[self.rank] + self.rank as u64 * bytes }
    }

    /// The way of this rank's whole payload of `bytes` bytes, a multiple of 16, to the others; None without room.
    pub fn once(&self, bytes: u64) -> Option<Once> {
        let fits = bytes.checked_mul(self.world as u64).is_some_and(|all| all <= self.once);
        let at = HEARD + 2 * self.area + self.rank as u64 * bytes;
        fits.then_some(Once { way: Way { peers: self.known, at }, apart: bytes, turn: self.once })
    }

    /// Whether a queue works in the context that this was made in.
    pub fn is_in_context_of(&self, memory: &Memory) -> bool {
        memory.home.id == self.home.id
    }

    /// Whether a meeting was broken off. Never waits.
    pub fn is_broken(&self) -> bool {
        self.told() != 0
    }

    /// Whether that was because a rank has aborted.
    pub fn was_ended(&self) -> bool {
        self.told() == ENDED
    }

    fn told(&self) -> u32 {
        // SAFETY: four bytes that are there as long as this is, which a GPU may be writing.
        unsafe { self.said.data().cast::<u32>().read_volatile() }
    }

    /// Ends meetings on all ranks, those that are under way and the next ones; this rank speaks in none that begins
    /// from now on. Where it has just spoken, the meeting may come about; the one behind it hears that this rank has
    /// aborted, for numbers are heard in two places in turn.
    pub fn end_meetings(&self) -> Result<()> {
        let mut queue = self.queue(self.aborts.stream())?;
        let told = self.said.data().wrapping_add(ABORTED);
        let broken = ptr::with_exposed_provenance_mut((self.known + offset_of!(Known, broken) as u64) as usize);
        // SAFETY: pinned memory, and buffers that are mapped here, which begin with what their ranks hear. All of it
        // stays until this is released, where `settle` waits for what is enqueued.
        unsafe {
            queue.copy(broken, told, size_of::<u32>())?;
            self.buffers.iter().try_for_each(|&buffer| {
                queue.copy(ptr::with_exposed_provenance_mut(buffer as usize), told, HEARD as usize)
            })
        }
    }

    /// What follows in the queue comes after the call before, whichever stream that was on.
    pub fn begin(&self, queue: &mut Queue) -> Result<()> {
        // SAFETY: an event that this has.
        unsafe { self.ended.handle().hold_up(queue) }
    }

    pub fn end(&self, queue: &mut Queue) -> Result<()> {
        // SAFETY: an event that this has, of the context that the queue works in.
        unsafe { self.ended.handle().record(queue) }
    }

    /// Pushes blocks of `bytes` bytes, a multiple of 16: one for each rank, or one for all.
    ///
    /// # Safety
    /// There is such memory of this device at `from`, aligned to 16, which stays until the stream has passed this;
    /// nobody reads what arrived in the area before.
    pub unsafe fn push(&self, queue: &mut Queue, area: Area, from: *const u8, bytes: u64) -> Result<()> {
        let apart = if matches!(area, Area::AllToAll) { bytes } else { 0 };
        let mut call = Push { way: self.way(area, bytes), from, vectors: bytes / 16, apart };
        let blocks = self.world as u64 * bytes.div_ceil(PUSHED);
        // SAFETY: the kernel's argument: buffers that are mapped here, with room for a block of each rank in each area,
        // as `way` asserts, and the caller's memory.
        unsafe { queue.launch(&PEERS.push, blocks, &mut argument(&mut call)) }
    }

    /// Meets the others. `mark`: a uint32 on this device that becomes 1 if a rank does not come, or NULL.
    ///
    /// # Safety
    /// The mark stays until the stream has passed this.
    pub unsafe fn meet(&self, queue: &mut Queue, steps: Steps, mark: *mut u8) -> Result<()> {
        // SAFETY: of memory that this has; the caller's promise.
        unsafe { Way { peers: self.known, at: 0 }.meet(queue, steps, mark) }
    }

    /// A queue on a stream of its own, which waits for no other.
    pub fn own_queue(&self) -> Result<Queue> {
        self.queue(self.stream.stream())
    }

    fn queue(&self, stream: Stream) -> Result<Queue> {
        Queue::at(self.device, stream, self.home)
    }

    /// Where a record lies that is to be pushed, once it is written there.
    pub fn write_record(&self, record: &[u8; 64]) -> *const u8 {
        let place = self.said.data().wrapping_add(RECORD);
        // SAFETY: within pinned memory that nobody else writes to; a push that read it before has been waited for.
        unsafe { place.copy_from_nonoverlapping(record.as_ptr(), record.len()) };
        place
    }

    /// Copies what arrived in an area to the host, once the queue is done.
    pub fn read(&self, queue: &mut Queue, area: Area, to: &mut [u8]) -> Result<()> {
        queue.current()?;
        queue.wait()?;
        assert!(to.len() as u64 <= self.area);
        // SAFETY: from within this rank's buffer, as was asserted.
        unsafe { queue.copy_to_host(to, self.place(area)) }
    }

    /// Takes this rank's buffer over.
    pub fn take(&mut self, buffer: Buffer) {
        self.own = Some(buffer.memory);
    }

    /// At the end: waits for what is under way, for cuMemFree does.
    pub fn settle(&mut self) {
        self.memory = None;
    }

    /// Others may go on writing to this rank's buffer: it is never freed.
    pub fn keep(&mut self) {
        std::mem::forget(self.own.take());
    }
}

/// Looks whether a buffer of the caller's is memory of a GPU that a call of this device's context reaches.
pub fn check_buffer(ordinal: i32, rank: usize, address: u64, bytes: u64, own: bool) -> Result<()> {
    use CUpointer_attribute::{
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE as MEMORY_TYPE,
    };
    const OF_DEVICE: u32 = 2;
    let mut queue = Queue::of(ordinal, Stream::LEGACY)?;
    queue.current()?;
    let (device, driver) = (queue.device, queue.device.driver);
    let refusal =
        || -> Error { error!(InvalidArgument, "options: buffers[{rank}], {address:#x}, is no device memory here") };
    if address == 0 || !address.is_multiple_of(ALIGNMENT) {
        return Err(error!(
            InvalidArgument,
            "options: buffers[{rank}] is {address:#x}; an address that is a multiple of {ALIGNMENT} expected"
        ));
    }
    let (mut memory_type, mut on) = (0u32, 0i32);
    // SAFETY: the places are of the attributes' types; any address may be asked for.
    unsafe {
        let get = driver.functions.cuPointerGetAttribute;
        if get(ptr::from_mut(&mut memory_type).cast(), MEMORY_TYPE, address) != 0 || memory_type != OF_DEVICE {
            return Err(refusal());
        }
        let code = get(ptr::from_mut(&mut on).cast(), ORDINAL, address);
        driver.check(code, format_args!("cuPointerGetAttribute of buffers[{rank}]"))?;
    }
    // Of memory of others it may be theirs, or this one.
    if own && on != ordinal {
        return Err(error!(
            InvalidArgument,
            "options: buffers[{rank}], this rank's own, is on cuda:{on}, not on {device}"
        ));
    }
    // Part by part, where it was mapped so.
    let mut there = address;
    while there - address < bytes {
        let (mut first, mut size) = (0, 0);
        // SAFETY: the places outlive the call. Any address may be asked about.
        let code = unsafe { (driver.functions.cuMemGetAddressRange_v2)(&mut first, &mut size, there) };
        let end = if code == 0 { first.saturating_add(size as u64) } else { there };
        if end <= there {
            return Err(error!(
                InvalidArgument,
                "options: buffers[{rank}], {address:#x}, has {} bytes; {bytes} expected",
                there - address
            ));
        }
        there = end;
    }
    let mut heard = [0u64; 2 * MOST_RANKS];
    // SAFETY: the driver refuses what is not mapped; the integers outlive the call.
    let code = unsafe { (driver.functions.cuMemcpyDtoH_v2)(heard.as_mut_ptr().cast(), address, size_of_val(&heard)) };
    if code != 0 {
        return Err(refusal());
    }
    if own && heard.contains(&u64::MAX) {
        return Err(error!(Comm, "options: a rank that was ahead has aborted over these buffers"));
    }
    // Ranks that are ahead have come to the first meeting, but not to another.
    if own
        && (heard[..MOST_RANKS].iter().any(|&number| number != 0)
            || heard[MOST_RANKS..].iter().any(|&number| number > 1))
    {
        return Err(error!(InvalidArgument, "options: buffers[{rank}], this rank's own, is not all 0"));
    }
    Ok(())
}

/// Peers that cannot be reached are told so, whatever the driver calls that.
fn unreachable(failure: Error) -> Error {
    match failure.status {
        Status::OutOfMemory | Status::ContextLost => failure,
        _ => Error { status: Status::UnsupportedDevice, ..failure },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_has_room_for_its_blocks_and_up_to_a_size_for_those_of_one_exchange() {
        for (world, block) in [(1, 16), (2, 16), (2, 1 << 20), (2, 1 << 21), (2, 1 << 22), (3, 1 << 30), (64, 16_400)] {
            let bytes = buffer_bytes(world, block).unwrap();
            let ((area, once), all) = (areas_of(bytes), world * block);
            assert!(area >= all && once >= all.min(MOST_ONCE), "{world} {block}: {area} {once}");
            assert!(HEARD + 2 * (area + once) <= bytes && area.is_multiple_of(ALIGNMENT), "{world} {block}");
            assert!(areas_of(bytes - 1).0 < all.next_multiple_of(ALIGNMENT), "{world} {block}: a byte too many");
        }
    }
}
