//! What a transport does: `trait Transport`, and the two exchanges that there are.

use std::ptr;

use crate::{
    comm::record::{self, Bytes},
    cuda::{
        self, Pinned, Stream,
        peers::{Once, Sending, Steps},
    },
    device::{Block, Queue},
    dlpack::Device,
    ffi::error::Result,
};

/// A way to the other ranks. One call at a time exchanges; `abort`, `async_error` and `may_hang` may be called beside
/// it.
pub trait Transport: Send + Sync {
    /// This rank, and how many ranks there are.
    fn place(&self) -> (usize, usize);

    /// Exchanges blocks, and returns where the received ones lie. Waits for the other ranks, if it has to.
    fn exchange(&self, exchange: &Exchange<'_>) -> Result<*const u8>;

    /// The bootstrap all-gather: 64 bytes of each rank, by rank. Waits for it.
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

    /// The caller gives the communicator up, maybe while another thread is in a call on it: ends what waits, here and,
    /// where the transport can, on the other ranks.
    fn abort(&self) -> Result<()>;

    /// This rank leaves out the exchange that the others may be waiting in: ends their wait, where the transport can.
    fn give_up(&self);

    /// A call broke off after an exchange: a transport that counts exchanges is out of step from now on.
    fn out_of_step(&self) {}

    /// Rejects memory that it cannot exchange, and blocks that are too large.
    fn check(&self, _device: Device, _memory: &Block, _bytes: i64) -> Result<()> {
        Ok(())
    }

    /// A failure since the last call. Never waits. `rank`: this rank's number for the message.
    fn async_error(&self, _rank: usize) -> Result<()> {
        Ok(())
    }

    /// A lost rank, which makes later exchanges fail: TIMEOUT if it did not arrive in time, COMM if it aborted. Never
    /// waits. `rank`: this rank's number for the message.
    fn lost_rank(&self, _rank: usize) -> Result<()> {
        Ok(())
    }

    /// Whether an exchange may go on for ever, so that its memory must not be freed.
    fn may_hang(&self) -> bool {
        false
    }

    /// Whether a GPU's memory has to be copied to the host first.
    fn wants_host_memory(&self) -> bool {
        false
    }

    /// Whether threads of the host wait for each other in an exchange of a GPU's memory, which no graph can contain.
    fn waits_on_host(&self) -> bool {
        false
    }

    /// Before the first of a call's launches.
    fn begin(&self, _queue: &mut Queue, _phases: Phases) -> Result<()> {
        Ok(())
    }

    /// Behind the last of a call's launches.
    fn end(&self, _queue: &mut Queue, _phases: Phases) -> Result<()> {
        Ok(())
    }

    /// If kernels of ours can reach the memory of the other ranks: the exchanges that are part of their launches.
    fn fused(&self) -> Option<&dyn Fused> {
        None
    }
}

/// Exchanges within the launches of a codec, over memory of the other ranks.
pub trait Fused {
    /// Memory that blocks arrive in, by pattern.
    fn receive_slots(&self) -> [*mut u8; 2];

    /// For chunks of `bytes` bytes that a codec writes to the other ranks, and the barrier behind them, which `arrive`
    /// completes.
    fn sending(&self, pattern: Pattern, bytes: i64) -> Sending;

    /// Behind what a codec has sent. `error_flag`: its own.
    fn arrive(&self, queue: &mut cuda::Queue, error_flag: *mut u8) -> Result<()>;

    /// For whole payloads of `bytes` bytes of calls that exchange once, if there is room.
    fn once(&self, bytes: i64) -> Option<Once>;

    /// What the launches of such a call do; `arrive_all` is called between two.
    fn steps_once(&self) -> &'static [Steps];

    /// Waits on the host until all ranks of this process have launched the first step.
    fn arrive_all(&self) -> Result<()>;
}

/// How long a rank waits for the others: what the caller says, or 10 minutes for 0.
pub fn timeout(milliseconds: u32) -> u32 {
    if milliseconds == 0 { 600_000 } else { milliseconds }
}

/// Which block goes to which rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Block k of what a rank sends is for rank k.
    AllToAll,
    /// What a rank sends is for every rank.
    AllGather,
}

/// Which exchanges a call makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phases {
    Both,
    AllToAll,
    AllGather,
    /// One of whole payloads over peer memory.
    Once,
}

/// One rank's part in an exchange. In both patterns it receives a block from each rank, its own too, in ranks' order.
#[derive(Clone, Copy)]
pub struct Exchange<'a> {
    pub pattern: Pattern,
    /// A block for each rank, or one for all.
    pub send: *const u8,
    /// Room for a block of each rank.
    pub recv: *mut u8,
    /// Of a block: at least 1.
    pub bytes: usize,
    pub device: Device,
    pub stream: Stream,
    /// What both sides are part of, on a GPU.
    pub memory: Option<&'a Block>,
    /// On a GPU: a uint32 that becomes 1 if a rank is lost; or NULL.
    pub error_flag: *mut u8,
}

impl Exchange<'_> {
    /// A queue in the context of the memory.
    pub fn queue(&self) -> Result<Queue> {
        self.memory.map_or(Ok(Queue::Cpu), |memory| memory.queue(self.stream))
    }
}

/// Pinned memory for what is sent and what is received, for transports that take host memory only.
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
