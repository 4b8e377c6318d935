//! Memory that is opened by its handle, once per process and context.

use std::sync::{Mutex, PoisonError};

use crate::{
    cuda::{device::Device, ipc::IpcHandle},
    ffi::error::{Result, error},
};

use super::mapping::{as_share_error, with_likely_cause};

/// Process that sent a handle, by its id and its start: once it has ended, the same handle may refer to other memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sender {
    pub process: u32,
    pub started: u64,
}

/// Memory that was opened by its handle, by its first user.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Opened {
    handle: IpcHandle,
    sender: Sender,
    context: u64,
    pub(super) address: u64,
}

struct Open {
    memory: Opened,
    tensors: usize,
}

/// Memory that is open. The driver is not called while this is locked, so two threads may open a handle at the same
/// time. The handle then has two entries, and each is closed once, because the driver also counts.
static OPEN: Mutex<Vec<Open>> = Mutex::new(Vec::new());

impl Opened {
    pub(super) fn of(device: Device, context: u64, handle: IpcHandle, sender: Sender, bytes: u64) -> Result<Self> {
        let memory = |address| Self { handle, sender, context, address };
        {
            let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = open.iter_mut().find(|known| known.memory == memory(known.memory.address)) {
                known.tensors += 1;
                return Ok(known.memory);
            }
        }
        let address = device.open_ipc(&handle, bytes).map_err(|failure| with_likely_cause(as_share_error(failure)))?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if open.try_reserve(1).is_err() {
            drop(open);
            // SAFETY: `address` was opened above, and nothing else uses it.
            unsafe { device.close_ipc(address) };
            return Err(error!(OutOfMemory, "cannot allocate a list of open memory"));
        }
        open.push(Open { memory: memory(address), tensors: 1 });
        Ok(memory(address))
    }

    /// Removes one user. Returns true if it was the last one, which must then close the memory.
    pub(super) fn release_one(&self) -> bool {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = open.iter().position(|known| known.memory == *self) else { return false };
        open[at].tensors -= 1;
        let is_last = open[at].tensors == 0;
        if is_last {
            open.swap_remove(at);
        }
        is_last
    }
}
