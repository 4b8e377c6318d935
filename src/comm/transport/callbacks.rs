//! Exchanges by the caller's callbacks, over any engine.

use std::{cell::Cell, ffi::c_void};

use dlpark::ffi::DLDevice;

use crate::{
    codec::plan::HEADER,
    device::Queue,
    ffi::{
        environment,
        error::{Result, error},
    },
};

use super::exchange::{Exchange, Pattern, Transport};

/// C function that makes an exchange.
pub type Callback = unsafe extern "C" fn(
    ctx: *mut c_void,
    send: *const c_void,
    recv: *mut c_void,
    bytes_per_rank: usize,
    device: DLDevice,
    stream: *mut c_void,
) -> i32;

thread_local! {
    /// True if this thread is in a callback.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if this thread is in a callback that the library called.
pub fn is_inside() -> bool {
    INSIDE.get()
}

/// Transport of one rank over two callbacks.
pub struct Callbacks {
    rank: usize,
    world: usize,
    ctx: *mut c_void,
    all_to_all: Callback,
    all_gather: Callback,
    /// True if the callbacks take host memory only.
    host: bool,
}

// SAFETY: the caller of `new` promised that the functions may be called on any thread, one at a time.
unsafe impl Send for Callbacks {}
// SAFETY: the functions may be called on any thread, and a communicator admits one call at a time.
unsafe impl Sync for Callbacks {}

impl Callbacks {
    /// # Safety
    /// The functions may be called with `ctx` on any thread, one at a time, as long as the result lives. Each makes
    /// the exchange that its name says, with blocks of the size that it is passed, and nothing unwinds out of it.
    pub unsafe fn new(
        (rank, world): (i32, i32), ctx: *mut c_void, all_to_all: Callback, all_gather: Callback, host: bool,
    ) -> Result<Self> {
        let ranks = usize::try_from(world).ok().filter(|&ranks| ranks > 0);
        match (ranks, usize::try_from(rank)) {
            (Some(world), Ok(rank)) if rank < world => Ok(Self { rank, world, ctx, all_to_all, all_gather, host }),
            _ => Err(error!(InvalidArgument, "transport: rank {rank} of {world}: 0 <= rank < world_size expected")),
        }
    }
}

impl Callbacks {
    /// Clears the header of each block in the receive memory. If the callback leaves a block out, it is then CORRUPT,
    /// and not a block of an earlier exchange.
    fn clear_headers(&self, exchange: &Exchange<'_>) -> Result<()> {
        let mut queue = exchange.queue()?;
        for rank in 0..self.world {
            let block = exchange.recv.wrapping_add(rank * exchange.bytes);
            let header = exchange.bytes.min(HEADER);
            match &mut queue {
                // SAFETY: the receive memory has room for a block of each rank, and does not overlap `send`.
                Queue::Cpu => unsafe { block.write_bytes(0, header) },
                // SAFETY: the memory has this room, and stays until the exchange after this is done.
                Queue::Cuda(queue) => unsafe { queue.clear(block, header) }?,
            }
        }
        Ok(())
    }
}

impl Transport for Callbacks {
    fn place(&self) -> (usize, usize) {
        (self.rank, self.world)
    }

    fn wants_host_memory(&self) -> bool {
        self.host
    }

    fn waits_on_host(&self) -> bool {
        self.host
    }

    /// Does nothing: the caller must make a blocked callback return.
    fn abort(&self) -> Result<()> {
        Ok(())
    }

    /// Does nothing: the callbacks end their waits themselves.
    fn give_up(&self) {}

    fn exchange(&self, exchange: &Exchange<'_>) -> Result<*const u8> {
        let (name, function) = match exchange.pattern {
            Pattern::AllToAll => ("all_to_all", self.all_to_all),
            Pattern::AllGather => ("all_gather", self.all_gather),
        };
        self.clear_headers(exchange)?;
        let (send, recv) = (exchange.send.cast(), exchange.recv.cast());
        let (device, stream) = (exchange.device.to_dlpack(), exchange.stream.as_raw());
        let was_inside = INSIDE.replace(true);
        // SAFETY: the caller of `new` promised that this call is allowed; both sides have blocks of `bytes` bytes.
        let code = environment::callers(|| unsafe { function(self.ctx, send, recv, exchange.bytes, device, stream) });
        INSIDE.set(was_inside);
        match code {
            0 => Ok(exchange.recv),
            code => Err(error!(Comm, "{name}: the transport's function returned {code}")),
        }
    }
}
