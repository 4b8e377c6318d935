//! Which context a call works in, and leaving the caller's thread as it was.

use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use cudarc::driver::sys::{CUcontext, CUdevice, CUstreamCaptureMode};

use crate::ffi::error::{Result, error};

use super::{
    device::Device,
    driver::{Driver, INVALID_CONTEXT, Properties},
    stream::Stream,
};

/// The context that a call works in.
pub struct Context {
    driver: &'static Driver,
    handle: CUcontext,
    /// What tells it apart from all others of the process, also from those that are gone.
    pub id: u64,
    /// Whether it is current on this thread.
    current: bool,
    /// Whether that is our doing: then the one before is current again once this is dropped.
    pushed: bool,
}

impl Context {
    /// The stream's own context; for the legacy and the per-thread stream the current one if it is on this device, else
    /// the device's primary one.
    ///
    /// A stream's own need not be current for launches: a kernel that belongs to no context takes it from the stream.
    pub fn of(device: Device, stream: Stream) -> Result<Self> {
        match stream.created() {
            Some(stream) => Self::of_stream(device, stream),
            None => Self::of_thread(device),
        }
    }

    fn of_stream(device: Device, stream: *mut c_void) -> Result<Self> {
        let driver = device.driver;
        let mut handle = ptr::null_mut();
        // SAFETY: the caller of the stream tier promises a stream that is alive.
        let code = unsafe { (driver.functions.cuStreamGetCtx)(stream.cast(), &mut handle) };
        driver.check(code, format_args!("cuStreamGetCtx"))?;
        let id = id_of(driver, handle)?;
        let mut context = Self { driver, handle, id, current: false, pushed: false };
        let on = match DEVICES.recall(id) {
            Some(ordinal) => ordinal,
            None => context.ask_for_device_of(stream)?,
        };
        if on != device.ordinal {
            return Err(error!(InvalidArgument, "stream: it is on cuda:{on}, the tensors on {device}"));
        }
        Ok(context)
    }

    fn of_thread(device: Device) -> Result<Self> {
        match Self::of_thread_now(device)? {
            Some(current) => Ok(current),
            None => Self::primary(device),
        }
    }

    /// The context that calls without a stream work in, unless it is a primary one that nobody here has used.
    pub fn existing(device: Device) -> Result<Option<Self>> {
        match Self::of_thread_now(device)? {
            None if device.properties().primary.get().is_some() => Self::primary(device).map(Some),
            current => Ok(current),
        }
    }

    /// The current context, if it is on this device.
    fn of_thread_now(device: Device) -> Result<Option<Self>> {
        let Some(current) = Self::of_thread_anywhere(device.driver)? else { return Ok(None) };
        let on = match DEVICES.recall(current.id) {
            Some(ordinal) => ordinal,
            None => current.ask_for_device()?,
        };
        Ok((on == device.ordinal).then_some(current))
    }

    /// The current context, on whatever device it is.
    fn of_thread_anywhere(driver: &'static Driver) -> Result<Option<Self>> {
        let mut id = 0;
        // SAFETY: the place outlives the call; NULL stands for the current context.
        let code = unsafe { (driver.functions.cuCtxGetId)(ptr::null_mut(), &mut id) };
        if code == INVALID_CONTEXT {
            return Ok(None); // there is none
        }
        driver.check(code, format_args!("cuCtxGetId of the current context"))?;
        Ok(Some(Self { driver, handle: ptr::null_mut(), id, current: true, pushed: false }))
    }

    /// The context that a handle was made in. A stream that somebody created must belong to it; the others are its own,
    /// whichever context is current.
    pub fn of_home(device: Device, stream: Stream, home: ContextRef) -> Result<Self> {
        if let Some(stream) = stream.created() {
            let context = Self::of_stream(device, stream)?;
            if context.id != home.id {
                return Err(error!(
                    InvalidArgument,
                    "stream: it belongs to context {}, the handle was made in context {}", context.id, home.id
                ));
            }
            return Ok(context);
        }
        if let Some(current) = Self::of_thread_anywhere(device.driver)?
            && current.id == home.id
        {
            return Ok(current);
        }
        let handle = home.handle as CUcontext;
        let mut context = Self { driver: device.driver, handle, id: home.id, current: false, pushed: false };
        context.make_current()?;
        Ok(context)
    }

    /// A reference to this, which is current and on this device, for a handle to come back to.
    pub fn home(&self, device: Device) -> Result<ContextRef> {
        let handle = self.handle_now()?;
        // Retained, it lives as long as the process.
        let is_primary = is_primary_active(device)? && primary(device)? == handle;
        Ok(ContextRef { handle: handle as usize, id: self.id, is_primary })
    }

    /// The handle of this, which is current.
    pub fn handle_now(&self) -> Result<CUcontext> {
        let mut handle = ptr::null_mut();
        // SAFETY: what the driver writes to is a local variable, which outlives the call.
        let code = unsafe { (self.driver.functions.cuCtxGetCurrent)(&mut handle) };
        self.driver.check(code, format_args!("cuCtxGetCurrent"))?;
        Ok(handle)
    }

    /// Whether this, which is current, is still the context that a handle was made in: a primary one that was reset
    /// keeps its address, and all memory is gone.
    pub fn is_still(&self, home: ContextRef) -> bool {
        id_of(self.driver, ptr::null_mut()).is_ok_and(|id| id == home.id)
    }

    fn primary(device: Device) -> Result<Self> {
        let mut primary =
            Self { driver: device.driver, handle: primary(device)?, id: 0, current: false, pushed: false };
        primary.make_current()?;
        primary.id = id_of(device.driver, ptr::null_mut())?;
        DEVICES.remember(primary.id, device.ordinal);
        Ok(primary)
    }

    /// Makes it current on this thread, for whatever is not a launch.
    pub fn make_current(&mut self) -> Result<()> {
        if !self.current {
            // SAFETY: a stream's own context, or a primary one that is retained.
            let code = unsafe { (self.driver.functions.cuCtxPushCurrent_v2)(self.handle) };
            self.driver.check(code, format_args!("cuCtxPushCurrent"))?;
            (self.current, self.pushed) = (true, true);
        }
        Ok(())
    }

    /// The number of the device that a stream of this context is on.
    fn ask_for_device_of(&mut self, stream: *mut c_void) -> Result<usize> {
        // A context of some of a GPU's processors may be current to one thread at a time: it is not made so for this.
        if let Some(get_device) = self.driver.functions.cuStreamGetDevice {
            let mut handle = 0;
            // SAFETY: a stream that is alive; the place outlives the call.
            let code = unsafe { get_device(stream.cast(), &mut handle) };
            self.driver.check(code, format_args!("cuStreamGetDevice"))?;
            return self.remember_device(handle);
        }
        self.make_current()?;
        let found = self.ask_for_device();
        self.leave();
        found
    }

    /// The number of the device that this context, which is current, is on.
    fn ask_for_device(&self) -> Result<usize> {
        let mut handle = 0;
        // SAFETY: what the driver writes to is a local variable, which outlives the call.
        let code = unsafe { (self.driver.functions.cuCtxGetDevice)(&mut handle) };
        self.driver.check(code, format_args!("cuCtxGetDevice"))?;
        self.remember_device(handle)
    }

    /// Remembers the device that this context is on, and returns its number.
    fn remember_device(&self, handle: CUdevice) -> Result<usize> {
        let ordinal = self.driver.devices.iter().position(|device| device.handle == handle).ok_or_else(|| {
            error!(InvalidArgument, "stream: it is on a device, {handle}, that the driver did not show")
        })?;
        DEVICES.remember(self.id, ordinal);
        Ok(ordinal)
    }

    /// Makes the context current that was so before.
    fn leave(&mut self) {
        if self.pushed {
            let mut context = ptr::null_mut();
            // SAFETY: what was pushed on this thread is still on top: nothing of ours leaves another one there. There
            // is nobody to tell of a failure, and none that leaves the caller worse off than it is.
            unsafe { (self.driver.functions.cuCtxPopCurrent_v2)(&mut context) };
            (self.current, self.pushed) = (false, false);
        }
    }
}

/// A reference to the context that a handle of ours lives in, and must not outlive. The address as a number, to be
/// shared.
#[derive(Clone, Copy)]
pub struct ContextRef {
    handle: usize,
    pub id: u64,
    /// Whether it is the device's primary context.
    pub is_primary: bool,
}

impl ContextRef {
    /// The context, for others of this process.
    pub fn handle(self) -> usize {
        self.handle
    }

    /// Whether its handle may be used: the primary context is retained, and the current one is alive. Any other context
    /// the program may have destroyed, and the driver does not say what it does with a handle of such.
    pub fn may_be_entered(self, device: Device) -> bool {
        let is_current =
            || Context::of_thread_anywhere(device.driver).is_ok_and(|it| it.is_some_and(|it| it.id == self.id));
        self.is_primary || is_current()
    }

    /// Whether it is gone, or another has its address. Of a context that may be entered.
    pub fn is_gone(self, device: Device) -> bool {
        let mut id = 0;
        // SAFETY: `id` outlives the call, and the context may be entered.
        let code = unsafe { (device.driver.functions.cuCtxGetId)(self.handle as CUcontext, &mut id) };
        code == INVALID_CONTEXT || code == 0 && id != self.id
    }

    /// Calls what gives something of this context back to the driver, with the context current. Not where the context
    /// is gone, with all that was in it, or may be: then what is in it is left to whoever destroys it. Errors are
    /// ignored, for there is no caller to return them to: in a forked child, and while the process ends, the driver
    /// refuses everything.
    pub fn give_back(self, device: Device, release: impl FnOnce()) {
        if !self.may_be_entered(device) {
            return;
        }
        let Ok(context) = Context::of_home(device, Stream::LEGACY, self) else { return };
        if context.is_still(self)
            && let Ok(_relaxed) = RelaxedCapture::begin(device.driver)
        {
            release();
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.leave();
    }
}

/// While it lives, a device's primary context is current on this thread, whichever was before: for libraries over
/// CUDA's runtime, which work in no other one and may leave it current.
pub struct InPrimary {
    _context: Context,
}

impl InPrimary {
    pub fn enter(ordinal: i32) -> Result<Self> {
        let device = Device::of(ordinal)?;
        let handle = primary(device)?;
        let mut context = Context { driver: device.driver, handle, id: 0, current: false, pushed: false };
        context.make_current()?;
        Ok(Self { _context: context })
    }

    /// The same on a thread of the library, which disturbs no capture of other threads if the driver lets it.
    pub fn enter_relaxed(ordinal: i32) -> Result<(Self, Option<RelaxedCapture>)> {
        Ok((Self::enter(ordinal)?, RelaxedCapture::begin(Device::of(ordinal)?.driver).ok()))
    }
}

/// The id of a context; NULL stands for the current one.
fn id_of(driver: &Driver, handle: CUcontext) -> Result<u64> {
    let mut id = 0;
    // SAFETY: a context that is alive, or NULL; the place outlives the call.
    let code = unsafe { (driver.functions.cuCtxGetId)(handle, &mut id) };
    driver.check(code, format_args!("cuCtxGetId"))?;
    Ok(id)
}

fn is_primary_active(device: Device) -> Result<bool> {
    let (mut flags, mut active) = (0, 0);
    let handle = device.properties().handle;
    // SAFETY: the integers outlive the call, and the handle is that of a device that the driver listed.
    let code = unsafe { (device.driver.functions.cuDevicePrimaryCtxGetState)(handle, &mut flags, &mut active) };
    device.driver.check(code, format_args!("cuDevicePrimaryCtxGetState of {device}"))?;
    Ok(active != 0)
}

/// The primary context of a device, retained for good.
pub fn primary(device: Device) -> Result<CUcontext> {
    let Properties { handle, primary, .. } = device.properties();
    if let Some(&context) = primary.get() {
        return Ok(context as CUcontext);
    }
    let mut context = ptr::null_mut();
    // SAFETY: a device of the driver's. Two threads may retain it side by side: it is one context.
    let code = unsafe { (device.driver.functions.cuDevicePrimaryCtxRetain)(&mut context, *handle) };
    device.driver.check(code, format_args!("cuDevicePrimaryCtxRetain of {device}"))?;
    Ok(*primary.get_or_init(|| context as usize) as CUcontext)
}

/// The devices of contexts.
static DEVICES: LossyCache = LossyCache::nothing();

/// A small number for each of some contexts, by their ids, which the driver never gives twice. What is asked for again
/// and again is there; a context that comes to another's place takes it, and then that one's number is to be found out
/// anew.
pub struct LossyCache([AtomicU64; 64]);

impl LossyCache {
    pub const fn nothing() -> Self {
        Self([const { AtomicU64::new(0) }; 64])
    }

    fn place(&self, id: u64) -> &AtomicU64 {
        &self.0[(id % 64) as usize]
    }

    /// The number remembered of this context.
    pub fn recall(&self, id: u64) -> Option<usize> {
        let word = self.place(id).load(Ordering::Relaxed);
        (word >> 8 == id && word & 0xff > 0).then(|| (word & 0xff) as usize - 1)
    }

    /// Remembers a number below 255; larger ones, and ids beyond 56 bits, are not remembered.
    pub fn remember(&self, id: u64, number: usize) {
        if number < 255 && id >> 56 == 0 {
            self.place(id).store(id << 8 | (number as u64 + 1), Ordering::Relaxed);
        }
    }
}

/// While it lives, calls of this thread do not disturb what other threads, or this one, capture: to load, to allocate
/// or to wait for the legacy stream would fail otherwise, and break the capture, for as long as any thread captures.
pub struct RelaxedCapture {
    driver: &'static Driver,
    before: c_int,
}

impl RelaxedCapture {
    pub fn begin(driver: &'static Driver) -> Result<Self> {
        let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        Ok(Self { driver, before: exchange_capture_mode(driver, relaxed)? })
    }
}

impl Drop for RelaxedCapture {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_of_a_context_is_never_told_of_another() {
        let remembered = LossyCache::nothing();
        assert_eq!(remembered.recall(0), None);
        remembered.remember(7, 3);
        assert_eq!((remembered.recall(7), remembered.recall(7 + 64)), (Some(3), None));
        remembered.remember(7 + 64, 0);
        assert_eq!((remembered.recall(7), remembered.recall(7 + 64)), (None, Some(0)));
        remembered.remember(8, 255);
        remembered.remember(1 << 56 | 8, 1);
        assert_eq!((remembered.recall(8), remembered.recall(1 << 56 | 8)), (None, None));
    }
}
