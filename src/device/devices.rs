//! Operations on a device as a whole.
#![forbid(unsafe_code)]

use std::{ffi::CStr, fmt};

use crate::{
    cpu,
    cuda::{self, LaunchShape, Stream},
    dlpack::Device,
    ffi::error::{Result, error},
};

use super::Queue;

/// Does the work of the first calls on a device in advance.
pub fn prepare(device: Device) -> Result<()> {
    match Queue::of(device, Stream::LEGACY)? {
        Queue::Cpu => cpu::prepare(),
        Queue::Cuda(mut queue) => queue.prepare()?,
    }
    Ok(())
}

/// Frees memory that is kept for reuse.
pub fn trim(device: Device) -> Result<()> {
    match Queue::of(device, Stream::LEGACY)? {
        Queue::Cpu => Ok(()), // nothing is kept
        Queue::Cuda(mut queue) => {
            queue.trim()?;
            cuda::staging::trim(&mut queue)
        }
    }
}

/// Returns the fatbin of a module.
pub fn builtin_kernels(family: &CStr) -> Result<&'static [u8]> {
    match cuda::MODULES.iter().find(|known| known.name == family) {
        Some(known) => Ok(known.fatbin),
        None => Err(error!(InvalidArgument, "family: \"{}\"; there is {}", beginning(family), Modules)),
    }
}

/// Returns the launch shape of a kernel on GPUs of a compute capability.
pub fn kernel_shape(kernel: &CStr, compute_capability: i32) -> Result<LaunchShape> {
    cuda::launch_shape(kernel, compute_capability)?
        .ok_or_else(|| error!(InvalidArgument, "kernel: \"{}\" is not listed in docs/ABI.md", beginning(kernel)))
}

/// Returns up to 64 bytes of a caller's text, in ASCII, for a message.
fn beginning(text: &CStr) -> impl fmt::Display {
    let bytes = text.to_bytes();
    bytes[..bytes.len().min(64)].escape_ascii()
}

/// Names of all modules, for a message.
struct Modules;

impl fmt::Display for Modules {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, module) in cuda::MODULES.iter().enumerate() {
            write!(out, "{}\"{}\"", if index > 0 { ", " } else { "" }, module.name.to_string_lossy())?;
        }
        Ok(())
    }
}
