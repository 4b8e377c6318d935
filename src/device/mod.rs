//! The device that a call works on: the CPU or a GPU. A call enters its device once, by a [`Queue`], which allocates,
//! launches, copies and waits, and is passed down. A [`Block`] is memory of a handle.

#[allow(non_camel_case_types, clippy::missing_safety_doc, reason = "C names; lib.rs says what all require")]
pub mod api;
pub mod devices;
pub mod tensors;

use crate::{
    cpu::{self, InstructionSet},
    cuda::{self, Stream},
    dlpack::{Device, Owner, View},
    ffi::error::Result,
};

/// The device and the stream that a call works on. Operations `match` on it to choose the function of a device.
pub enum Queue {
    Cpu,
    Cuda(cuda::Queue),
}

impl Queue {
    /// Checks that the device exists, and that the CPU has the instruction set of GRADCODEC_CPU. A GPU's context is
    /// entered only when there is work.
    #[inline]
    pub fn of(device: Device, stream: Stream) -> Result<Self> {
        match device {
            Device::Cpu => InstructionSet::check().map(|()| Self::Cpu),
            Device::Cuda(ordinal) => cuda::Queue::of(ordinal, stream).map(Self::Cuda),
        }
    }

    /// Allocates `bytes` bytes, not initialized, aligned to 256 bytes.
    pub fn allocate(&mut self, bytes: i64) -> Result<Owner> {
        match self {
            _ if bytes == 0 => Ok(Owner::of_nothing()),
            Self::Cpu => cpu::memory::allocate(bytes),
            Self::Cuda(queue) => queue.allocate(bytes),
        }
    }

    /// Copies the bytes of a contiguous view to the host, once the work enqueued before is done.
    pub fn read_bytes(&mut self, src: &View<'_>, to: &mut [u8]) -> Result<()> {
        assert!(src.is_contiguous() && src.elements() as usize * src.dtype().size == to.len());
        match self {
            Self::Cpu => cpu::memory::read_bytes(src, to),
            Self::Cuda(queue) => queue.read_bytes(src, to)?,
        }
        Ok(())
    }

    /// Returns true if enqueued work becomes part of a graph.
    pub fn is_capturing(&mut self) -> Result<bool> {
        match self {
            Self::Cpu => Ok(false),
            Self::Cuda(queue) => queue.is_capturing(),
        }
    }

    /// Waits until the work that this call enqueued is done.
    pub fn wait(&mut self) -> Result<()> {
        match self {
            Self::Cpu => Ok(()),
            Self::Cuda(queue) => queue.wait(),
        }
    }

    /// Waits until all work on the stream is done, also work of other calls.
    pub fn wait_for_all(&mut self) -> Result<()> {
        match self {
            Self::Cpu => Ok(()),
            Self::Cuda(queue) => queue.wait_for_all(),
        }
    }
}

/// Memory of a handle, from the handle's creation to its end, aligned to 256 bytes.
pub enum Block {
    Cpu(Owner),
    Cuda(cuda::Memory),
}

impl Block {
    /// Allocates `bytes` bytes, at least 1. Waits until every stream can use the memory.
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

    /// Returns a queue on a stream of the context of this memory.
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
