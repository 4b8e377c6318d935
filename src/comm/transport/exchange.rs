//! The interface of transports: `trait Transport`, and the two patterns of an exchange.

use std::ptr;

use crate::{
    comm::record::{self, Bytes},
    cuda::{
        self, Pinned, Stream,
        peers::{OneShot, PeerDestination, Steps},
    },
    device::{Block, Queue},
    dlpack::Device,
    ffi::error::Result,
};

/// Connection to the other ranks. One call at a time exchanges. `abort`, `async_error` and `may_hang` may be called
/// meanwhile.
pub trait Transport: Send + Sync {
    /// Returns this rank and the number of ranks.
    fn place(&self) -> (usize, usize);

    /// Exchanges blocks, and returns the address of the received ones. Waits for the other ranks if necessary.
    fn exchange(&self, exchange: &Exchange<'_>) -> Result<*const u8>;

    /// Performs the bootstrap all-gather of 64 bytes from each rank, and waits for it. `all`: by rank.
    fn all_gather_records(&self, own: &Bytes, all: &mut [Bytes]) -> Result<()> {
        let exchange = Exchange {
            pattern: Pattern::AllGather,
            send: own.as_ptr(),
            recv: all.as_mut_ptr().cast(),
            bytes: record::BYTES,
            device: Device::Cpu,
            stream: Stream::LEGACY,
            memory: None,
            error_flag: ptr::null_mut(),
        };
        self.exchange(&exchange).map(|_| ())
    }

    /// Aborts the communicator, also while another thread is in a call on it: ends waits on this rank and, if the
    /// transport can, on the other ranks.
    fn abort(&self) -> Result<()>;

    /// Ends the wait of the other ranks, if the transport can: this rank skips the exchange that they may wait in.
    fn give_up(&self);

    /// Marks the transport as out of step, if it counts exchanges: a call broke off after an exchange.
    fn out_of_step(&self) {}

    /// Rejects memory that the transport cannot exchange, and blocks that are too large.
    fn check(&self, _device: Device, _memory: &Block, _bytes: i64) -> Result<()> {
        Ok(())
    }

    /// Reports a failure since the last call. Never waits. `rank`: this rank's number for the message.
    fn async_error(&self, _rank: usize) -> Result<()> {
        Ok(())
    }

    /// Reports a lost rank, which makes later exchanges fail: TIMEOUT if it did not arrive in time, COMM if it aborted.
    /// Never waits. `rank`: this rank's number for the message.
    fn lost_rank(&self, _rank: usize) -> Result<()> {
        Ok(())
    }

    /// Returns true if an exchange may never end, so that its memory must not be freed.
    fn may_hang(&self) -> bool {
        false
    }

    /// Returns true if GPU memory must be copied to the host first.
    fn wants_host_memory(&self) -> bool {
        false
    }

    /// Returns true if host threads wait for each other in an exchange of GPU memory. No graph can contain such a wait.
    fn waits_on_host(&self) -> bool {
        false
    }

    /// Begins a call. Must be called before its first launch.
    fn begin(&self, _queue: &mut Queue, _phases: Phases) -> Result<()> {
        Ok(())
    }

    /// Ends a call. Must be called after its last launch.
    fn end(&self, _queue: &mut Queue, _phases: Phases) -> Result<()> {
        Ok(())
    }

    /// Returns the exchanges within launches, if the library's kernels can reach the memory of the other ranks.
    fn fused(&self) -> Option<&dyn Fused> {
        None
    }
}

/// Exchanges within the launches of a codec, over memory of the other ranks.
pub trait Fused {
    /// Returns the addresses at which blocks arrive, by pattern.
    fn receive_slots(&self) -> [*mut u8; 2];

    /// Returns where a codec writes chunks of `bytes` bytes for the other ranks, and the steps of the barrier after
    /// them. `complete_barrier` completes the barrier.
    fn sending(&self, pattern: Pattern, bytes: i64) -> PeerDestination;

    /// Completes the barrier after the chunks of a codec. `error_flag`: that of the codec.
    fn complete_barrier(&self, queue: &mut cuda::Queue, error_flag: *mut u8) -> Result<()>;

    /// Returns where one-shot calls write whole payloads of `bytes` bytes; None if the buffers have no room for them.
    fn one_shot(&self, bytes: i64) -> Option<OneShot>;

    /// Returns the barrier steps of each launch of a one-shot call, between which `wait_for_launches` must be called.
    fn one_shot_launches(&self) -> &'static [Steps];

    /// Waits on the host until all ranks of this process have launched the first step.
    fn wait_for_launches(&self) -> Result<()>;
}

/// Returns the longest wait for other ranks in milliseconds: the caller's number, or 10 minutes for 0.
pub fn timeout(milliseconds: u32) -> u32 {
    if milliseconds == 0 { 600_000 } else { milliseconds }
}

/// Assignment of blocks to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Every rank sends its block k to rank k.
    AllToAll,
    /// Every rank sends its block to all ranks.
    AllGather,
}

/// Exchanges of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phases {
    Both,
    AllToAll,
    AllGather,
}

/// Exchange as seen from one rank. In both patterns the rank receives a block from each rank, itself included, by rank.
#[derive(Clone, Copy)]
pub struct Exchange<'a> {
    pub pattern: Pattern,
    /// Block for each rank, or one for all ranks.
    pub send: *const u8,
    /// Room for a block of each rank.
    pub recv: *mut u8,
    /// Size of a block in bytes, at least 1.
    pub bytes: usize,
    pub device: Device,
    pub stream: Stream,
    /// Memory that contains both sides; on a GPU `queue` needs it.
    pub memory: Option<&'a Block>,
    /// Address of a uint32 on the GPU that becomes 1 if a rank is lost; or NULL.
    pub error_flag: *mut u8,
}

impl Exchange<'_> {
    /// Returns a queue in the context of the memory.
    pub fn queue(&self) -> Result<Queue> {
        self.memory.map_or(Ok(Queue::Cpu), |memory| memory.queue(self.stream))
    }
}

/// Pinned staging buffer for sent and received blocks, for transports that take host memory only.
pub struct Staging {
    memory: Pinned,
    half: usize,
}

impl Staging {
    pub fn new(queue: &mut cuda::Queue, half: i64) -> Result<Self> {
        Ok(Self { memory: Pinned::new(queue, 2 * half)?, half: half as usize })
    }

    pub fn send(&self) -> *mut u8 {
        self.memory.data()
    }

    pub fn recv(&self) -> *mut u8 {
        self.memory.data().wrapping_add(self.half)
    }
}
