//! Where operations run. Each kind of device has a file an operation, and they know plans, not what operations mean.
//!
//! A call enters its device once, by a [`Queue`]: it allocates, launches, copies and waits, and is handed down.

pub mod cpu;
pub mod cuda;

use std::ffi::c_void;

use crate::{
    error::Result,
    plan::codec::ScaleRule,
    tensor::{Device, Dtype, Owner, View},
};

/// Where work on CUDA is enqueued: as the caller names it. The CPU's work is done when a call returns.
#[derive(Clone, Copy)]
pub struct Stream(*mut c_void);

impl Stream {
    /// The one that simple-tier calls work on.
    pub const LEGACY: Self = Self(std::ptr::null_mut());

    /// NULL and 1: the legacy stream, 2: the per-thread one, anything else a CUstream.
    pub fn from_raw(stream: *mut c_void) -> Self {
        Self(stream)
    }

    /// As the caller names it.
    pub fn as_raw(self) -> *mut c_void {
        self.0
    }

    /// A CUstream for the driver, which knows the small numbers too.
    fn as_ptr(self) -> *mut c_void {
        self.0
    }

    /// The stream, if it is one that somebody created, and so belongs to a context.
    fn created(self) -> Option<*mut c_void> {
        (self.0.addr() > 2).then_some(self.0)
    }
}

/// The device and the stream that a call works on. Operations `match` on it to choose the function of a device.
pub enum Queue {
    Cpu,
    Cuda(cuda::Queue),
}

impl Queue {
    /// Checks that the device is there. Its context is entered only when something is to be done.
    #[inline]
    pub fn of(device: Device, stream: Stream) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Self::Cpu),
            Device::Cuda(ordinal) => cuda::Queue::of(ordinal, stream).map(Self::Cuda),
        }
    }

    /// New memory of `bytes` bytes, not initialized, aligned to 256.
    pub fn allocate(&mut self, bytes: i64) -> Result<Owner> {
        match self {
            _ if bytes == 0 => Ok(Owner::of_nothing()),
            Self::Cpu => cpu::memory::allocate(bytes),
            Self::Cuda(queue) => queue.allocate(bytes),
        }
    }

    /// The float32 of a view of one, once what was enqueued before is done.
    pub fn read(&mut self, src: &View<'_>) -> Result<f32> {
        match self {
            Self::Cpu => Ok(cpu::memory::read(src)),
            Self::Cuda(queue) => queue.read(src),
        }
    }

    /// Whether what is enqueued becomes part of a graph.
    pub fn is_capturing(&mut self) -> Result<bool> {
        match self {
            Self::Cpu => Ok(false),
            Self::Cuda(queue) => queue.is_capturing(),
        }
    }

    /// Waits until what was enqueued is done.
    pub fn wait(&mut self) -> Result<()> {
        match self {
            Self::Cpu => Ok(()),
            Self::Cuda(queue) => queue.wait(),
        }
    }

    /// Waits until all that is enqueued on the stream is done, whoever did that.
    pub fn wait_for_all(&mut self) -> Result<()> {
        match self {
            Self::Cpu => Ok(()),
            Self::Cuda(queue) => queue.wait_for_all(),
        }
    }
}

/// Where something begins in memory that threads share, each in places of its own.
#[derive(Clone, Copy)]
pub struct Address(pub *mut u8);

// SAFETY: an address; who reads and writes there promises that it may be done.
unsafe impl Send for Address {}
// SAFETY: likewise.
unsafe impl Sync for Address {}

impl Address {
    pub fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

/// A gradient that is compressed in the plain form, and where what becomes of it goes.
pub struct Compression<'a> {
    pub grad: &'a View<'a>,
    /// Carried, and written anew.
    pub error: Option<&'a View<'a>>,
    pub rule: ScaleRule,
    pub dst: &'a View<'a>,
    pub scale: &'a View<'a>,
    pub workspace: &'a View<'a>,
}

/// Memory of a handle: its own from creation to the end, aligned to 256.
pub enum Block {
    Cpu(Owner),
    Cuda(cuda::Memory),
}

impl Block {
    /// `bytes`: at least 1. Waits until it can be used on any stream.
    pub fn new(queue: &mut Queue, bytes: i64) -> Result<Self> {
        match queue {
            Queue::Cpu => cpu::memory::allocate(bytes).map(Self::Cpu),
            Queue::Cuda(queue) => {
                let memory = cuda::Memory::new(queue, bytes as u64)?;
                queue.wait()?;
                Ok(Self::Cuda(memory))
            }
        }
    }

    /// A queue on a stream of the context that this is in.
    pub fn queue(&self, stream: Stream) -> Result<Queue> {
        match self {
            Self::Cpu(_) => Ok(Queue::Cpu),
            Self::Cuda(memory) => memory.queue(stream).map(Queue::Cuda),
        }
    }

    pub fn data(&self) -> *mut u8 {
        match self {
            Self::Cpu(owner) => owner.data(),
            Self::Cuda(memory) => std::ptr::with_exposed_provenance_mut(memory.at(0) as usize),
        }
    }
}

/// How a payload is decoded.
pub struct Decoding<'a> {
    /// float32, float16 or bfloat16.
    pub dtype: Dtype,
    /// What scales are divided by: at least 1.
    pub divisor: i32,
    /// What they are then multiplied by: one float32, or 1.
    pub factor: Option<&'a View<'a>>,
    /// Whether values are added to what is there, or set.
    pub add: bool,
    /// On a card: the launch before is one of ours, so that this one may begin while that one ends.
    pub behind_ours: bool,
}

/// Whether a commit takes a step back although nothing was met that is not finite.
pub enum Skip<'a> {
    Never,
    Always,
    /// If this scalar, a bool, an int32 or a float32, is not 0. NaN is not 0.
    If(&'a View<'a>),
}

/// Where the chunks go that a codec makes.
pub enum Destination<'a> {
    Memory(View<'a>),
    /// Into receive slots of other ranks, on a GPU.
    Peers(cuda::peers::Sending),
}
