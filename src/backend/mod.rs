//! Where operations run: one module a kind of device, with the same functions.

mod cpu;

use crate::{
    error::{Result, error},
    ops::bits::{BitPlan, One, Test},
    tensor::{Device, Memory, View},
};

/// Sets the number of CPU workers, the caller counted; 0 for as many as this process has CPUs.
pub use cpu::pool::set_threads;

/// A device that can be worked on.
#[derive(Clone, Copy)]
pub enum Backend {
    Cpu,
}

/// The backend of a device.
pub fn of(device: Device) -> Result<Backend> {
    match device {
        Device::Cpu => Ok(Backend::Cpu),
        Device::Cuda(_) => Err(error!(DriverUnavailable, "{device}: this build has no CUDA")),
    }
}

impl Backend {
    /// Memory of `bytes` bytes, not initialized.
    pub fn allocate(self, bytes: i64) -> Result<Memory> {
        match self {
            Self::Cpu => Memory::allocate(bytes),
        }
    }

    /// Writes the bits of the elements of `src` to the bytes of `dst`. `plan` was made from these two views.
    pub fn pack(self, plan: &BitPlan, test: Test, src: &View<'_>, dst: &View<'_>) -> Result<()> {
        match self {
            Self::Cpu => cpu::bits::pack(plan, test, src, dst),
        }
        Ok(())
    }

    /// Writes the bits in the bytes of `src` to the elements of `dst`. `plan` was made from these two views.
    pub fn unpack(self, plan: &BitPlan, one: One, src: &View<'_>, dst: &View<'_>) -> Result<()> {
        match self {
            Self::Cpu => cpu::bits::unpack(plan, one, src, dst),
        }
        Ok(())
    }
}
