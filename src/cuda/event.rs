//! Events: points in a stream's work that other streams wait for.

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

/// Event of any owner, as a number so that threads can share it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct EventHandle(usize);

impl Event {
    pub fn new(queue: &mut Queue) -> Result<Self> {
        let (device, mut handle) = (queue.device, ptr::null_mut());
        let home = queue.home()?;
        // SAFETY: the driver writes to a local variable, which outlives the call.
        let code = unsafe { (device.driver.functions.cuEventCreate)(&mut handle, WITHOUT_TIMES) };
        device.driver.check(code, format_args!("cuEventCreate on {device}"))?;
        Ok(Self { device, home, handle: EventHandle(handle.expose_provenance()) })
    }

    pub fn handle(&self) -> EventHandle {
        self.handle
    }

    /// Returns the id of the event's context. The event can only be recorded there.
    pub fn context(&self) -> u64 {
        self.home.id
    }
}

impl EventHandle {
    fn as_ptr(self) -> CUevent {
        ptr::with_exposed_provenance_mut(self.0)
    }

    /// Records the event after all work that was enqueued on the queue's stream so far.
    ///
    /// # Safety
    /// The event is alive, and in the context that the queue works in.
    pub unsafe fn record(self, queue: &mut Queue) -> Result<()> {
        queue.context()?.make_current()?;
        let (driver, stream) = (queue.device.driver, queue.stream.as_raw().cast());
        // SAFETY: the caller promises that the event is alive, and the stream is alive.
        let code = unsafe { (driver.functions.cuEventRecord)(self.as_ptr(), stream) };
        driver.check(code, format_args!("cuEventRecord on {}", queue.device))
    }

    /// Makes later work on the queue's stream wait for the work that the event was last recorded after.
    ///
    /// # Safety
    /// The event is alive; it may be in any context.
    pub unsafe fn make_stream_wait(self, queue: &mut Queue) -> Result<()> {
        queue.context()?.make_current()?;
        let (driver, stream) = (queue.device.driver, queue.stream.as_raw().cast());
        // SAFETY: the caller promises that the event is alive, and the stream is alive.
        let code = unsafe { (driver.functions.cuStreamWaitEvent)(stream, self.as_ptr(), 0) };
        driver.check(code, format_args!("cuStreamWaitEvent on {}", queue.device))
    }

    /// Waits until the work that the event was last recorded after is done.
    ///
    /// # Safety
    /// The event is alive.
    pub unsafe fn wait(self, queue: &mut Queue) -> Result<()> {
        queue.current()?;
        let driver = queue.device.driver;
        // SAFETY: the caller promises that the event is alive.
        let code = unsafe { (driver.functions.cuEventSynchronize)(self.as_ptr()) };
        driver.check(code, format_args!("cuEventSynchronize on {}", queue.device))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.home.give_back(self.device, || {
            // SAFETY: cuEventCreate made it in this context, which is current; streams that wait for it still do.
            unsafe { (self.device.driver.functions.cuEventDestroy_v2)(self.handle.as_ptr()) };
        });
    }
}
