//! Which context a call works in, and leaving the caller's thread as it was.

use std::{ffi::c_int, ptr};

use cudarc::driver::sys::{CUcontext, CUstreamCaptureMode};

use crate::{
    backend::Stream,
    error::{Result, error},
};

use super::{
    Device,
    driver::{Driver, Properties},
};

/// A context that is current; the one before is again once this is dropped.
pub struct Entered {
    pub device: Device,
    context: CUcontext,
    pushed: bool,
    _relaxed: Relaxed,
}

impl Device {
    /// Enters the stream's own context; for the legacy and the per-thread stream the current one if it is on this device,
    /// else the device's primary one.
    pub fn enter(self, stream: Stream) -> Result<Entered> {
        let relaxed = Relaxed::begin(self.driver)?;
        let Some(stream) = stream.created() else {
            return match self.current()? {
                Some(context) => Ok(Entered { device: self, context, pushed: false, _relaxed: relaxed }),
                None => self.push(self.primary()?, relaxed),
            };
        };
        let mut context = ptr::null_mut();
        // SAFETY: the caller of the stream tier promises a stream that is alive.
        let code = unsafe { (self.driver.functions.cuStreamGetCtx)(stream.cast(), &mut context) };
        self.driver.check(code, format_args!("cuStreamGetCtx"))?;
        let entered = self.push(context, relaxed)?;
        let on = device_of_current(self.driver)?;
        if on != self.properties().handle {
            return Err(match self.driver.devices.iter().position(|device| device.handle == on) {
                Some(on) => error!(InvalidArgument, "stream: it is on cuda:{on}, the tensors on {self}"),
                None => error!(InvalidArgument, "stream: it is on another device than {self}, where the tensors are"),
            });
        }
        Ok(entered)
    }

    fn push(self, context: CUcontext, relaxed: Relaxed) -> Result<Entered> {
        // SAFETY: a stream's own context, or a primary one that is retained.
        let code = unsafe { (self.driver.functions.cuCtxPushCurrent_v2)(context) };
        self.driver.check(code, format_args!("cuCtxPushCurrent on {self}"))?;
        Ok(Entered { device: self, context, pushed: true, _relaxed: relaxed })
    }

    /// The caller's current context, if it is on this device.
    fn current(self) -> Result<Option<CUcontext>> {
        let mut context = ptr::null_mut();
        // SAFETY: the place outlives the call.
        let code = unsafe { (self.driver.functions.cuCtxGetCurrent)(&mut context) };
        self.driver.check(code, format_args!("cuCtxGetCurrent"))?;
        let here = !context.is_null() && device_of_current(self.driver)? == self.properties().handle;
        Ok(here.then_some(context))
    }

    /// The primary context, retained for good.
    fn primary(self) -> Result<CUcontext> {
        let Properties { handle, primary, .. } = self.properties();
        if let Some(&context) = primary.get() {
            return Ok(context as CUcontext);
        }
        let mut context = ptr::null_mut();
        // SAFETY: a device of the driver's. Two threads may retain it side by side: it is one context.
        let code = unsafe { (self.driver.functions.cuDevicePrimaryCtxRetain)(&mut context, *handle) };
        self.driver.check(code, format_args!("cuDevicePrimaryCtxRetain of {self}"))?;
        Ok(*primary.get_or_init(|| context as usize) as CUcontext)
    }
}

impl Entered {
    pub fn driver(&self) -> &'static Driver {
        self.device.driver
    }

    /// What tells this context apart from all others of the process, also from those that are gone.
    pub fn id(&self) -> Result<u64> {
        let mut id = 0;
        // SAFETY: the context is current.
        let code = unsafe { (self.driver().functions.cuCtxGetId)(self.context, &mut id) };
        self.driver().check(code, format_args!("cuCtxGetId on {}", self.device))?;
        Ok(id)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if self.pushed {
            let mut context = ptr::null_mut();
            // SAFETY: what was pushed on this thread is still on top: nothing of ours leaves another one there. There is
            // nobody to tell of a failure, and none that leaves the caller worse off than it is.
            unsafe { (self.driver().functions.cuCtxPopCurrent_v2)(&mut context) };
        }
    }
}

fn device_of_current(driver: &Driver) -> Result<i32> {
    let mut device = 0;
    // SAFETY: the place outlives the call.
    let code = unsafe { (driver.functions.cuCtxGetDevice)(&mut device) };
    driver.check(code, format_args!("cuCtxGetDevice"))?;
    Ok(device)
}

/// While it lives, calls of this thread do not disturb what other threads, or this one, capture: to load, to allocate or
/// to wait for the legacy stream would fail otherwise, and break the capture, for as long as any thread captures.
struct Relaxed {
    driver: &'static Driver,
    before: c_int,
}

impl Relaxed {
    fn begin(driver: &'static Driver) -> Result<Self> {
        let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        Ok(Self { driver, before: exchange_capture_mode(driver, relaxed)? })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // The mode that this thread came with, so it is a valid one.
        let _ = exchange_capture_mode(self.driver, self.before);
    }
}

/// Sets this thread's capture mode, a CUstreamCaptureMode, and returns the one before.
fn exchange_capture_mode(driver: &Driver, mut mode: c_int) -> Result<c_int> {
    // SAFETY: the enum is an int to the driver, which reads and writes it as such.
    let code = unsafe { (driver.functions.cuThreadExchangeStreamCaptureMode)(ptr::from_mut(&mut mode).cast()) };
    driver.check(code, format_args!("cuThreadExchangeStreamCaptureMode"))?;
    Ok(mode)
}
