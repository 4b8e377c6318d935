//! What is done to a device, whatever will run there.

use crate::{
    backend::{Queue, Stream, cpu},
    error::Result,
    tensor::Device,
};

/// Does up front what first calls on a device would do.
pub fn prepare(device: Device) -> Result<()> {
    match Queue::of(device, Stream::LEGACY)? {
        Queue::Cpu => cpu::prepare(),
        Queue::Cuda(mut queue) => {
            queue.prepare()?;
        }
    }
    Ok(())
}

/// Gives back memory that is kept for reuse.
pub fn trim(device: Device) -> Result<()> {
    match Queue::of(device, Stream::LEGACY)? {
        Queue::Cpu => Ok(()), // nothing is kept
        Queue::Cuda(mut queue) => queue.trim(),
    }
}
