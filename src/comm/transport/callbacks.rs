//! Exchanges by functions of the caller's, over any engine.

use std::{cell::Cell, ffi::c_void};

use dlpark::ffi::DLDevice;

use crate::{
    environment,
    error::{Result, error},
};

use super::exchange::{Exchange, Pattern};

/// The C function that makes an exchange.
pub type Callback = unsafe extern "C" fn(
    ctx: *mut c_void,
    send: *const c_void,
    recv: *mut c_void,
    bytes_per_rank: usize,
    device: DLDevice,
    stream: *mut c_void,
) -> i32;

thread_local! {
    /// Whether this thread is in a function of a caller's.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is in a function of a caller's, which the library called.
pub fn is_inside() -> bool {
    INSIDE.get()
}

pub struct Callbacks {
    ctx: *mut c_void,
    all_to_all: Callback,
    all_gather: Callback,
    /// They take host memory only.
    host: bool,
}

// SAFETY: `new` was promised that the functions may be called on any thread, one at a time.
unsafe impl Send for Callbacks {}
// SAFETY: as above; a communicator lets one call in at a time.
unsafe impl Sync for Callbacks {}

impl Callbacks {
    /// # Safety
    /// The functions may be called with `ctx` on any thread, one at a time, as long as this lives; they do what their
    /// names say with as many bytes as they are told, and nothing unwinds out of them.
    pub unsafe fn new(ctx: *mut c_void, all_to_all: Callback, all_gather: Callback, host: bool) -> Self {
        Self { ctx, all_to_all, all_gather, host }
    }

    pub fn want_host_memory(&self) -> bool {
        self.host
    }

    pub fn exchange(&self, exchange: &Exchange<'_>) -> Result<()> {
        let (name, function) = match exchange.pattern {
            Pattern::AllToAll => ("all_to_all", self.all_to_all),
            Pattern::AllGather => ("all_gather", self.all_gather),
        };
        let (send, recv) = (exchange.send.cast(), exchange.recv.cast());
        let (device, stream) = (exchange.device.to_dlpack(), exchange.stream.as_raw());
        let was_inside = INSIDE.replace(true);
        // SAFETY: what `new` was promised; both sides are memory of these sizes.
        let code = environment::callers(|| unsafe { function(self.ctx, send, recv, exchange.bytes, device, stream) });
        INSIDE.set(was_inside);
        match code {
            0 => Ok(()),
            code => Err(error!(Comm, "{name}: the transport's function returned {code}")),
        }
    }
}
