//! The buffers of peer memory (kernels/peers.cu): their layout, and how ranks reach them.
//!
//! Each rank has a buffer, to which all others write and which it alone reads:
//!
//! ```text
//!     signals  | of even barriers | of odd ones |     a number from each rank
//!     area     | of rank 0 | of rank 1 | ...          blocks of an all-to-all
//!     area     | of rank 0 | of rank 1 | ...          blocks of an all-gather
//!     area     | of rank 0 | of rank 1 | ...          whole payloads of one-shot calls, in even barriers
//!     area     | of rank 0 | of rank 1 | ...          and in odd ones
//! ```
//!
//! All-to-all and all-gather alternate, so the barrier of one lies between a read of the other's area and the next
//! write to it. Two exchanges of one pattern in a row need an extra barrier. A one-shot call has one barrier, whose
//! number selects the area. All ranks pass another barrier before the next call that uses the same area.

use std::ptr;

use cudarc::driver::sys::CUpointer_attribute;

use crate::{
    codec::plan::{ONE_SHOT_BYTES_OF_PEERS, sizes::LEAST_STRIDE},
    cuda::{Memory, Queue, Stream, context::ContextRef, device::Device as Gpu, ipc::IpcHandle},
    dlpack::Device,
    ffi::error::{Error, Result, Status, error},
};

use super::exchange::Pattern;

/// Largest number of ranks that the kernels have room for.
pub const MOST_RANKS: usize = 64;

/// Size of the signals, in bytes.
pub const SIGNALS: u64 = 2 * 8 * MOST_RANKS as u64;

/// Alignment of the areas, in bytes.
const ALIGNMENT: u64 = 256;

/// Largest size of all payloads of a one-shot call, in bytes. Every world has the limit of two to four ranks: buffers
/// for many ranks may be those of the two ranks of a node, with areas of the same sizes.
const MOST_ONE_SHOT: u64 = ONE_SHOT_BYTES_OF_PEERS as u64;

/// Sizes of the areas of a buffer, in bytes: for an exchange, and for one-shot calls.
#[derive(Clone, Copy)]
pub struct Areas {
    pub exchange: u64,
    pub one_shot: u64,
}

impl Areas {
    /// Returns the areas of a buffer of `bytes` bytes, at least [`least_buffer_bytes`].
    pub fn of(bytes: u64) -> Self {
        let all = bytes.saturating_sub(SIGNALS);
        let one_shot = (all / 4 / ALIGNMENT * ALIGNMENT).min(MOST_ONE_SHOT);
        Self { exchange: all.saturating_sub(2 * one_shot) / 2 / ALIGNMENT * ALIGNMENT, one_shot }
    }

    /// Returns the offset of an area in a buffer, in bytes.
    pub fn start(&self, pattern: Pattern) -> u64 {
        match pattern {
            Pattern::AllToAll => SIGNALS,
            Pattern::AllGather => SIGNALS + self.exchange,
        }
    }

    /// Returns the offset of the area for one-shot calls in even barriers, in bytes. The area for odd ones follows.
    pub fn start_one_shot(&self) -> u64 {
        SIGNALS + 2 * self.exchange
    }
}

/// Returns the bytes of each rank's buffer for exchanges of blocks of up to `block` bytes.
pub fn buffer_bytes(ranks: usize, block: i64) -> Option<i64> {
    let area = (ranks as u64).checked_mul(block as u64)?.checked_next_multiple_of(ALIGNMENT)?;
    let bytes = area.checked_add(area.min(MOST_ONE_SHOT))?.checked_mul(2)?.checked_add(SIGNALS)?;
    i64::try_from(bytes).ok()
}

/// Returns the bytes of the smallest buffers of `ranks` ranks, at most [`MOST_RANKS`]. They hold chunks with a header
/// and no element, which are larger than the records of a bootstrap.
pub fn least_buffer_bytes(ranks: usize) -> i64 {
    buffer_bytes(ranks, LEAST_STRIDE).unwrap_or(i64::MAX)
}

/// Checks that buffers have room for the exchanges that every communicator makes.
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

/// Returns the number of ranks of a world, and checks that the kernels have room for it.
pub fn ranks_of(world: i32) -> Result<usize> {
    match usize::try_from(world) {
        Ok(ranks @ 1..=MOST_RANKS) => Ok(ranks),
        _ => Err(error!(InvalidArgument, "world_size: {world}; 1 to {MOST_RANKS} expected")),
    }
}

/// Returns the number of a CUDA device, and refuses the CPU.
pub fn ordinal_of(device: Device) -> Result<i32> {
    match device {
        Device::Cuda(ordinal) => Ok(ordinal),
        Device::Cpu => Err(error!(UnsupportedDevice, "device: {device}; ranks reach each other's memory on CUDA")),
    }
}

/// Data that a rank sends to the others, so that they can reach its buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// UUID of the GPU.
    pub uuid: [u8; 16],
    /// Address of the buffer, and handle of its context, within the rank's process.
    pub address: u64,
    pub context: u64,
}

/// A rank's own buffer, before the others are mapped.
pub struct Buffer {
    device: Gpu,
    memory: Memory,
    bytes: u64,
}

impl Buffer {
    /// Allocates `bytes` bytes, all 0, in the context of calls without a stream.
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

    /// Returns a queue in the context of the buffer.
    pub fn queue(&self) -> Result<Queue> {
        self.memory.queue(Stream::LEGACY)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the memory, for the rank that keeps it.
    pub fn into_memory(self) -> Memory {
        self.memory
    }

    /// Returns the buffer's IPC handle, for another process.
    pub fn handle(&self) -> Result<IpcHandle> {
        let mut queue = self.queue()?;
        queue.current()?;
        self.device.ipc_handle(self.memory.at(0), self.bytes)
    }

    /// Maps the buffer of another process.
    pub fn open(&self, handle: &IpcHandle) -> Result<Mapped> {
        let mut queue = self.queue()?;
        queue.current()?;
        let address = self.device.open_ipc(handle, self.bytes).map_err(unreachable)?;
        Ok(Mapped { device: self.device, home: self.memory.home, address })
    }

    /// Makes the buffer of another rank of this process reachable from this GPU. Returns its address.
    pub fn reach(&self, other: &Identity) -> Result<u64> {
        let driver = self.device.driver;
        if self.device.uuid()? == other.uuid {
            return Ok(other.address);
        }
        let mut queue = self.queue()?;
        queue.current()?;
        const ALREADY_ENABLED: i32 = 704;
        // SAFETY: the other rank of this process keeps the context of its buffer; a context is current.
        let code = unsafe { (driver.functions.cuCtxEnablePeerAccess)(other.context as _, 0) };
        if code != ALREADY_ENABLED {
            driver.check(code, format_args!("cuCtxEnablePeerAccess on {}", self.device)).map_err(unreachable)?;
        }
        Ok(other.address)
    }
}

/// A buffer of another process, mapped here.
pub struct Mapped {
    device: Gpu,
    home: ContextRef,
    pub address: u64,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.home.give_back(self.device, || {
            // SAFETY: the address is from `open_ipc` in this context, which is current; its work is done.
            unsafe { self.device.close_ipc(self.address) };
        });
    }
}

/// Checks that a buffer of the caller is memory of a GPU that the device's context reaches.
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
    // SAFETY: the results have the types of their attributes, and outlive the calls; any address is allowed.
    unsafe {
        let get = driver.functions.cuPointerGetAttribute;
        if get(ptr::from_mut(&mut memory_type).cast(), MEMORY_TYPE, address) != 0 || memory_type != OF_DEVICE {
            return Err(refusal());
        }
        let code = get(ptr::from_mut(&mut on).cast(), ORDINAL, address);
        driver.check(code, format_args!("cuPointerGetAttribute of buffers[{rank}]"))?;
    }
    // For another rank's memory the driver may report that rank's device or this one.
    if own && on != ordinal {
        return Err(error!(
            InvalidArgument,
            "options: buffers[{rank}], this rank's own, is on cuda:{on}, not on {device}"
        ));
    }
    // Memory from cuMemMap may consist of several parts.
    let mut there = address;
    while there - address < bytes {
        let (mut first, mut size) = (0, 0);
        // SAFETY: `first` and `size` outlive the call; any address is allowed.
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
    let mut signals = [0u64; 2 * MOST_RANKS];
    // SAFETY: the driver refuses addresses that are not mapped; `signals` outlives the call.
    let code =
        unsafe { (driver.functions.cuMemcpyDtoH_v2)(signals.as_mut_ptr().cast(), address, size_of_val(&signals)) };
    if code != 0 {
        return Err(refusal());
    }
    if own && signals.contains(&u64::MAX) {
        return Err(error!(Comm, "options: a rank that was ahead has aborted over these buffers"));
    }
    // Ranks that are ahead may have signalled the first barrier, but no later one.
    if own
        && (signals[..MOST_RANKS].iter().any(|&number| number != 0)
            || signals[MOST_RANKS..].iter().any(|&number| number > 1))
    {
        return Err(error!(InvalidArgument, "options: buffers[{rank}], this rank's own, is not all 0"));
    }
    Ok(())
}

/// Gives an error of the driver the status of unreachable peers, UNSUPPORTED_DEVICE, unless memory or context is lost.
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
    fn a_buffer_has_room_for_blocks_and_up_to_a_size_for_one_shot() {
        for (world, block) in
            [(1, 16), (2, 16), (2, 1 << 20), (2, 1 << 21), (2, 1 << 22), (4, 17 << 17), (3, 1 << 30), (64, 16_400)]
        {
            let bytes = buffer_bytes(world, block).unwrap() as u64;
            let (Areas { exchange, one_shot }, all) = (Areas::of(bytes), world as u64 * block as u64);
            assert!(exchange >= all && one_shot >= all.min(MOST_ONE_SHOT), "{world} {block}: {exchange} {one_shot}");
            assert!(
                SIGNALS + 2 * (exchange + one_shot) <= bytes && exchange.is_multiple_of(ALIGNMENT),
                "{world} {block}"
            );
            let less = Areas::of(bytes - 1);
            let area = all.next_multiple_of(ALIGNMENT);
            assert!(
                less.exchange < area || less.one_shot < area.min(MOST_ONE_SHOT),
                "{world} {block}: a byte too many"
            );
            for more in 1..=4 * ALIGNMENT {
                let Areas { exchange, one_shot } = Areas::of(bytes + more);
                assert!(exchange >= all && one_shot >= all.min(MOST_ONE_SHOT), "{world} {block}, {more} bytes more");
                assert!(SIGNALS + 2 * (exchange + one_shot) <= bytes + more, "{world} {block}, {more} bytes more");
            }
        }
    }
}
