//! Where operations run: one module a kind of device, with the same functions.

mod cpu;
mod cuda;

use std::ffi::c_void;

use crate::{
    error::Result,
    ops::bits::{BitPlan, One, Test},
    tensor::{Device, View},
};

/// Sets the number of CPU workers, the caller counted; 0 for as many as this process has CPUs.
pub use cpu::pool::set_threads;

/// The PTX for devices of a compute capability, 90 for 9.0.
pub use cuda::ptx;

/// A device that can be worked on.
#[derive(Clone, Copy)]
pub enum Backend {
    Cpu,
    Cuda(cuda::Device),
}

/// The backend of a device.
pub fn of(device: Device) -> Result<Backend> {
    match device {
        Device::Cpu => Ok(Backend::Cpu),
        Device::Cuda(ordinal) => cuda::Device::of(ordinal).map(Backend::Cuda),
    }
}

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

    /// A CUstream for the driver, which knows the small numbers too.
    fn as_ptr(self) -> *mut c_void {
        self.0
    }

    /// The stream, if it is one that somebody created, and so belongs to a context.
    fn created(self) -> Option<*mut c_void> {
        (self.0.addr() > 2).then_some(self.0)
    }
}

/// Memory of a tensor of ours, given back when it is dropped.
pub enum Memory {
    Cpu(cpu::memory::Memory),
    Cuda(cuda::Memory),
}

impl Memory {
    /// Its address; NULL when there is none of it.
    pub fn data(&self) -> *mut u8 {
        match self {
            Self::Cpu(memory) => memory.data(),
            Self::Cuda(memory) => memory.data(),
        }
    }
}

impl Backend {
    /// Memory of `bytes` bytes, not initialized.
    pub fn allocate(self, bytes: i64) -> Result<Memory> {
        match self {
            Self::Cpu => cpu::memory::Memory::allocate(bytes).map(Memory::Cpu),
            Self::Cuda(device) => device.allocate(bytes).map(Memory::Cuda),
        }
    }

    /// Does up front what first calls would do.
    pub fn prepare(self) -> Result<()> {
        match self {
            Self::Cpu => {
                cpu::prepare();
                Ok(())
            }
            Self::Cuda(device) => device.prepare(),
        }
    }

    /// Gives back memory that is kept for reuse.
    pub fn trim(self) -> Result<()> {
        match self {
            Self::Cpu => Ok(()), // nothing is kept
            Self::Cuda(device) => device.trim(),
        }
    }

    /// Waits until what was enqueued on [`Stream::LEGACY`] is done.
    pub fn wait(self) -> Result<()> {
        match self {
            Self::Cpu => Ok(()),
            Self::Cuda(device) => device.wait(),
        }
    }

    /// Writes the bits of the elements of `src` to the bytes of `dst`. `plan` was made from these two views.
    pub fn pack(self, plan: &BitPlan, test: Test, src: &View<'_>, dst: &View<'_>, stream: Stream) -> Result<()> {
        match self {
            Self::Cpu => {
                cpu::bits::pack(plan, test, src, dst);
                Ok(())
            }
            Self::Cuda(device) => cuda::bits::pack(device, plan, test, src, dst, stream),
        }
    }

    /// Writes the bits in the bytes of `src` to the elements of `dst`. `plan` was made from these two views.
    pub fn unpack(self, plan: &BitPlan, one: One, src: &View<'_>, dst: &View<'_>, stream: Stream) -> Result<()> {
        match self {
            Self::Cpu => {
                cpu::bits::unpack(plan, one, src, dst);
                Ok(())
            }
            Self::Cuda(device) => cuda::bits::unpack(device, plan, one, src, dst, stream),
        }
    }
}
