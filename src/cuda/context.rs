//! Finds the context that a call works in, and restores the caller's context afterwards.

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

/// Context that a call works in.
pub struct Context {
    driver: &'static Driver,
    handle: CUcontext,
    /// Id that no other context of the process has, including contexts that are gone.
    pub id: u64,
    /// True if the context is current on this thread.
    current: bool,
    /// True if this object made it current. Dropping it then makes the previous context current again.
    pushed: bool,
}

impl Context {
    /// Returns the stream's own context. For the legacy and the per-thread stream, returns the current context if it is
    /// on this device, else the device's primary context.
    ///
    /// A stream's own context need not be current for launches: a kernel without a context takes the stream's.
    pub fn of(device: Device, stream: Stream) -> Result<Self> {
        match stream.created() {
            Some(stream) => Self::of_stream(device, stream),
            None => Self::of_thread(device),
        }
    }

    fn of_stream(device: Device, stream: *mut c_void) -> Result<Self> {
        let driver = device.driver;
        let mut handle = ptr::null_mut();
        // SAFETY: the caller of a function with a stream promises that the stream is alive.
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

    /// Returns the context that calls without a stream use. None: a primary context that this library has not used yet.
    pub fn existing(device: Device) -> Result<Option<Self>> {
        match Self::of_thread_now(device)? {
            None if device.properties().primary.get().is_some() => Self::primary(device).map(Some),
            current => Ok(current),
        }
    }

    /// Returns the current context if it is on this device.
    fn of_thread_now(device: Device) -> Result<Option<Self>> {
        let Some(current) = Self::of_thread_anywhere(device.driver)? else { return Ok(None) };
        let on = match DEVICES.recall(current.id) {
            Some(ordinal) => ordinal,
            None => current.ask_for_device()?,
        };
        Ok((on == device.ordinal).then_some(current))
    }

    /// Returns the current context, on any device.
    fn of_thread_anywhere(driver: &'static Driver) -> Result<Option<Self>> {
        let mut id = 0;
        // SAFETY: `id` outlives the call; NULL stands for the current context.
        let code = unsafe { (driver.functions.cuCtxGetId)(ptr::null_mut(), &mut id) };
        if code == INVALID_CONTEXT {
            return Ok(None); // no context is current
        }
        driver.check(code, format_args!("cuCtxGetId of the current context"))?;
        Ok(Some(Self { driver, handle: ptr::null_mut(), id, current: true, pushed: false }))
    }

    /// Returns the context that a handle was made in. A created stream must belong to it. For the legacy and the
    /// per-thread stream, the context's own stream is meant, whichever context is current.
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

    /// Returns a reference to this context, which is current and on this device, for a handle to use later.
    pub fn home(&self, device: Device) -> Result<ContextRef> {
        let handle = self.handle_now()?;
        // A primary context is retained and lives as long as the process.
        let is_primary = is_primary_active(device)? && primary(device)? == handle;
        Ok(ContextRef { handle: handle as usize, id: self.id, is_primary })
    }

    /// Returns the driver's handle of this context, which is current.
    pub fn handle_now(&self) -> Result<CUcontext> {
        let mut handle = ptr::null_mut();
        // SAFETY: the driver writes to a local variable, which outlives the call.
        let code = unsafe { (self.driver.functions.cuCtxGetCurrent)(&mut handle) };
        self.driver.check(code, format_args!("cuCtxGetCurrent"))?;
        Ok(handle)
    }

    /// Returns true if this context, which is current, is still the one that a handle was made in. A primary context
    /// that was reset keeps its address, but all of its memory is gone.
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

    /// Makes the context current on this thread; every call except a launch needs it.
    pub fn make_current(&mut self) -> Result<()> {
        if !self.current {
            // SAFETY: the handle is a live stream's own context, or a primary context, which is retained.
            let code = unsafe { (self.driver.functions.cuCtxPushCurrent_v2)(self.handle) };
            self.driver.check(code, format_args!("cuCtxPushCurrent"))?;
            (self.current, self.pushed) = (true, true);
        }
        Ok(())
    }

    /// Returns the number of the device that a stream of this context is on.
    fn ask_for_device_of(&mut self, stream: *mut c_void) -> Result<usize> {
        // A context with a part of a GPU's processors may be current on one thread only: do not make it current.
        if let Some(get_device) = self.driver.functions.cuStreamGetDevice {
            let mut handle = 0;
            // SAFETY: the stream is alive, and `handle` outlives the call.
            let code = unsafe { get_device(stream.cast(), &mut handle) };
            self.driver.check(code, format_args!("cuStreamGetDevice"))?;
            return self.remember_device(handle);
        }
        self.make_current()?;
        let found = self.ask_for_device();
        self.leave();
        found
    }

    /// Returns the number of the device that this context, which is current, is on.
    fn ask_for_device(&self) -> Result<usize> {
        let mut handle = 0;
        // SAFETY: the driver writes to a local variable, which outlives the call.
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

    /// Makes the previous context current again, if this object had replaced it.
    fn leave(&mut self) {
        if self.pushed {
            let mut context = ptr::null_mut();
            // SAFETY: the pushed context is still on top of this thread's stack: this library leaves no other one
            // there. A failure is ignored: no caller can receive it, and it leaves the caller no worse off.
            unsafe { (self.driver.functions.cuCtxPopCurrent_v2)(&mut context) };
            (self.current, self.pushed) = (false, false);
        }
    }
}

/// Reference to the context that a handle lives in and must not outlive. The address is a number, so that threads can
/// share it.
#[derive(Clone, Copy)]
pub struct ContextRef {
    handle: usize,
    pub id: u64,
    /// True if this is the device's primary context.
    pub is_primary: bool,
}

impl ContextRef {
    /// Returns the context's address, for other code of this process.
    pub fn handle(self) -> usize {
        self.handle
    }

    /// Returns true if the handle may be used: the primary context is retained, and the current one is alive. The
    /// program may have destroyed any other context, and the driver does not define the use of its handle then.
    pub fn may_be_entered(self, device: Device) -> bool {
        let is_current =
            || Context::of_thread_anywhere(device.driver).is_ok_and(|it| it.is_some_and(|it| it.id == self.id));
        self.is_primary || is_current()
    }

    /// Returns true if the context is gone, or if another one has its address. Requires [`Self::may_be_entered`].
    pub fn is_gone(self, device: Device) -> bool {
        let mut id = 0;
        // SAFETY: `id` outlives the call, and the context may be entered.
        let code = unsafe { (device.driver.functions.cuCtxGetId)(self.handle as CUcontext, &mut id) };
        code == INVALID_CONTEXT || code == 0 && id != self.id
    }

    /// Calls `release` with the context current, to give something of it back to the driver. Does nothing if the
    /// context is gone or may be gone: its destruction frees its contents. Errors are ignored, because no caller can
    /// receive them: in a forked child and while the process ends, the driver refuses every call.
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

/// Guard that keeps a device's primary context current on this thread. Libraries over CUDA's runtime need it: they work
/// in no other context, and may leave it current.
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

    /// Like `enter`, for threads of the library: they do not disturb captures of other threads if the driver permits.
    pub fn enter_relaxed(ordinal: i32) -> Result<(Self, Option<RelaxedCapture>)> {
        Ok((Self::enter(ordinal)?, RelaxedCapture::begin(Device::of(ordinal)?.driver).ok()))
    }
}

/// Returns the id of a context; NULL stands for the current one.
fn id_of(driver: &Driver, handle: CUcontext) -> Result<u64> {
    let mut id = 0;
    // SAFETY: the handle is a live context or NULL, and `id` outlives the call.
    let code = unsafe { (driver.functions.cuCtxGetId)(handle, &mut id) };
    driver.check(code, format_args!("cuCtxGetId"))?;
    Ok(id)
}

fn is_primary_active(device: Device) -> Result<bool> {
    let (mut flags, mut active) = (0, 0);
    let handle = device.properties().handle;
    // SAFETY: the integers outlive the call, and the handle belongs to a device that the driver listed.
    let code = unsafe { (device.driver.functions.cuDevicePrimaryCtxGetState)(handle, &mut flags, &mut active) };
    device.driver.check(code, format_args!("cuDevicePrimaryCtxGetState of {device}"))?;
    Ok(active != 0)
}

/// Returns the primary context of a device, retained for good.
pub fn primary(device: Device) -> Result<CUcontext> {
    let Properties { handle, primary, .. } = device.properties();
    if let Some(&context) = primary.get() {
        return Ok(context as CUcontext);
    }
    let mut context = ptr::null_mut();
    // SAFETY: the driver listed the device. If two threads retain the context at the same time, both get the same one.
    let code = unsafe { (device.driver.functions.cuDevicePrimaryCtxRetain)(&mut context, *handle) };
    device.driver.check(code, format_args!("cuDevicePrimaryCtxRetain of {device}"))?;
    Ok(*primary.get_or_init(|| context as usize) as CUcontext)
}

/// Device numbers of contexts.
static DEVICES: LossyCache = LossyCache::nothing();

/// Small numbers by context id, which the driver never reuses. A number that is often asked for stays. A context with
/// the same slot replaces it, and then the number of the first must be found again.
pub struct LossyCache([AtomicU64; 64]);

impl LossyCache {
    pub const fn nothing() -> Self {
        Self([const { AtomicU64::new(0) }; 64])
    }

    fn place(&self, id: u64) -> &AtomicU64 {
        &self.0[(id % 64) as usize]
    }

    /// Returns the number remembered for this context.
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

/// Guard: while it lives, calls of this thread do not disturb captures of any thread. Otherwise loading, allocating and
/// waiting for the legacy stream would fail while any thread captures, and break the capture.
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
        // `before` was this thread's mode, so the driver accepts it and the result can be ignored.
        let _ = exchange_capture_mode(self.driver, self.before);
    }
}

/// Sets this thread's capture mode, a CUstreamCaptureMode, and returns the one before.
fn exchange_capture_mode(driver: &Driver, mut mode: c_int) -> Result<c_int> {
    // SAFETY: the driver reads and writes the enum as an int.
    let code = unsafe { (driver.functions.cuThreadExchangeStreamCaptureMode)(ptr::from_mut(&mut mode).cast()) };
    driver.check(code, format_args!("cuThreadExchangeStreamCaptureMode"))?;
    Ok(mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_never_returns_the_value_of_another_context() {
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
