//! Points in a stream's work that other streams wait for.

use std::ptr;

use cudarc::driver::sys::CUevent;

use crate::ffi::error::Result;

use super::{context::ContextRef, device::Device, queue::Queue};

const WITHOUT_TIMES: u32 = 2;

pub struct Event {
    device: Device,
    home: ContextRef,
    handle: EventHandle,
}

/// An event of somebody's, as a number, to be shared.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct EventHandle(usize);

impl Event {
    pub fn new(queue: &mut Queue) -> Result<Self> {
        let (device, mut handle) = (queue.device, ptr::null_mut());
        let home = queue.home()?;
        // SAFETY: what the driver writes to is a local variable, which outlives the call.
        let code = unsafe { (device.driver.functions.cuEventCreate)(&mut handle, WITHOUT_TIMES) };
        device.driver.check(code, format_args!("cuEventCreate on {device}"))?;
        Ok(Self { device, home, handle: EventHandle(handle.expose_provenance()) })
    }

    pub fn handle(&self) -> EventHandle {
        self.handle
    }

    /// Whether it is of the context that a queue works in: only there it can be recorded.
    pub fn is_of(&self, queue: &mut Queue) -> Result<bool> {
        Ok(queue.context()?.id == self.home.id)
    }
}

impl EventHandle {
    fn as_ptr(self) -> CUevent {
        ptr::with_exposed_provenance_mut(self.0)
    }

    /// It is after what has been enqueued on the queue's stream so far.
    ///
    /// # Safety
    /// The event is alive, and of the context that the queue works in.
    pub unsafe fn record(self, queue: &mut Queue) -> Result<()> {
        queue.context()?.make_current()?;
        let (driver, stream) = (queue.device.driver, queue.stream.as_raw().cast());
        // SAFETY: the event is alive, as the caller promises; so is the stream.
        let code = unsafe { (driver.functions.cuEventRecord)(self.as_ptr(), stream) };
        driver.check(code, format_args!("cuEventRecord on {}", queue.device))
    }

    /// What is enqueued on the queue's stream from now on waits for what the event was last recorded after.
    ///
    /// # Safety
    /// The event is alive; it may be of any context.
    pub unsafe fn hold_up(self, queue: &mut Queue) -> Result<()> {
        queue.context()?.make_current()?;
        let (driver, stream) = (queue.device.driver, queue.stream.as_raw().cast());
        // SAFETY: the event is alive, as the caller promises; so is the stream.
        let code = unsafe { (driver.functions.cuStreamWaitEvent)(stream, self.as_ptr(), 0) };
        driver.check(code, format_args!("cuStreamWaitEvent on {}", queue.device))
    }

    /// Waits until what it was last recorded after is done.
    ///
    /// # Safety
    /// The event is alive.
    pub unsafe fn wait(self, queue: &mut Queue) -> Result<()> {
        queue.current()?;
        let driver = queue.device.driver;
        // SAFETY: the event is alive, as the caller promises; so is the stream.
        let code = unsafe { (driver.functions.cuEventSynchronize)(self.as_ptr()) };
        driver.check(code, format_args!("cuEventSynchronize on {}", queue.device))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.home.give_back(self.device, || {
            // SAFETY: from cuEventCreate in this context, which is current; streams that wait for it go on to do so.
            unsafe { (self.device.driver.functions.cuEventDestroy_v2)(self.handle.as_ptr()) };
        });
    }
}
