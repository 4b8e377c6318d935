//! A call's way to a device: which one, in what context, on what stream.

use std::{ffi::c_int, ptr};

use crate::{dlpack::View, ffi::error::Result};

use super::{
    context::{Context, ContextRef, RelaxedCapture},
    device::Device,
    driver::NOT_READY,
    stream::Stream,
};

/// A device that is there, and a stream there. Its context is found at the first allocation or launch.
pub struct Queue {
    // In this order they are dropped, so that the thread is left as it was found.
    relaxed: Option<RelaxedCapture>,
    context: Option<Context>,
    pub device: Device,
    pub stream: Stream,
}

impl Queue {
    /// Finds the driver, and the device with this number.
    pub fn of(ordinal: i32, stream: Stream) -> Result<Self> {
        Ok(Self { relaxed: None, context: None, device: Device::of(ordinal)?, stream })
    }

    /// On a stream, in the context that a handle was made in.
    pub fn at(device: Device, stream: Stream, home: ContextRef) -> Result<Self> {
        let context = Some(Context::of_home(device, stream, home)?);
        Ok(Self { relaxed: None, context, device, stream })
    }

    /// The context, for launches.
    pub fn context(&mut self) -> Result<&mut Context> {
        let context = match self.context.take() {
            Some(context) => context,
            None => Context::of(self.device, self.stream)?,
        };
        Ok(self.context.insert(context))
    }

    /// Whether there is a context to work in that need not be made.
    pub fn has_context(&mut self) -> Result<bool> {
        if self.context.is_none() {
            self.context = Context::existing(self.device)?;
        }
        Ok(self.context.is_some())
    }

    /// The context, current on this thread, and in a capture mode in which what is not a launch disturbs no capture:
    /// for loading, allocating, freeing and waiting.
    pub fn current(&mut self) -> Result<&mut Context> {
        self.context()?.make_current()?;
        self.relax()?;
        self.context()
    }

    /// A reference to the context.
    pub fn home(&mut self) -> Result<ContextRef> {
        let device = self.device;
        self.current()?.home(device)
    }

    /// Begins the capture mode in which what is not a launch disturbs no capture.
    pub fn relax(&mut self) -> Result<()> {
        if self.relaxed.is_none() {
            self.relaxed = Some(RelaxedCapture::begin(self.device.driver)?);
        }
        Ok(())
    }

    /// The bytes of a contiguous view, which are as many as `to` has, once what was enqueued before is done.
    pub fn read_bytes(&mut self, src: &View<'_>, to: &mut [u8]) -> Result<()> {
        self.current()?;
        self.wait()?;
        // SAFETY: the maker of the view vouched for so many bytes there.
        unsafe { self.copy_to_host(to, src.data() as u64) }
    }

    /// Copies from memory of the device, behind what was enqueued on the legacy stream, and waits for that.
    ///
    /// # Safety
    /// There are as many bytes.
    pub unsafe fn copy_to_host(&mut self, to: &mut [u8], from: u64) -> Result<()> {
        self.current()?;
        let driver = self.device.driver;
        // SAFETY: the caller's promise; a context is current, and `to` is there until it is done.
        let code = unsafe { (driver.functions.cuMemcpyDtoH_v2)(to.as_mut_ptr().cast(), from, to.len()) };
        driver.check(code, format_args!("cuMemcpyDtoH of {} bytes on {}", to.len(), self.device))
    }

    /// Copies between memory of devices and pinned memory of the host, in the order of the stream.
    ///
    /// # Safety
    /// Both sides are such memory of so many bytes, and stay until the stream has done it.
    pub unsafe fn copy(&mut self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        self.context()?.make_current()?;
        let (driver, stream) = (self.device.driver, self.stream.as_raw().cast());
        // SAFETY: both sides have this many bytes and stay until the stream is done, as the caller promises; the stream
        // is alive.
        let code = unsafe { (driver.functions.cuMemcpyAsync)(to as u64, from as u64, bytes, stream) };
        driver.check(code, format_args!("cuMemcpyAsync of {bytes} bytes on {}", self.device))
    }

    /// Sets memory of the device to 0.
    ///
    /// # Safety
    /// It has so many bytes, and stays until the stream has done it.
    pub unsafe fn clear(&mut self, at: *mut u8, bytes: usize) -> Result<()> {
        self.context()?.make_current()?;
        let (driver, stream) = (self.device.driver, self.stream.as_raw().cast());
        // SAFETY: so many bytes of the device, as the caller promises; the stream is alive.
        let code = unsafe { (driver.functions.cuMemsetD8Async)(at as u64, 0, bytes, stream) };
        driver.check(code, format_args!("cuMemsetD8Async of {bytes} bytes on {}", self.device))
    }

    /// Whether what is enqueued becomes part of a graph.
    pub fn is_capturing(&mut self) -> Result<bool> {
        self.context()?.make_current()?;
        let (driver, mut status) = (self.device.driver, 0 as c_int);
        // SAFETY: the stream is alive; the enum is an int to the driver, which writes it.
        let code = unsafe {
            (driver.functions.cuStreamIsCapturing)(self.stream.as_raw().cast(), ptr::from_mut(&mut status).cast())
        };
        driver.check(code, format_args!("cuStreamIsCapturing on {}", self.device))?;
        Ok(status != 0)
    }

    /// Whether all that is enqueued on its stream is done. Never waits.
    pub fn is_done(&mut self) -> Result<bool> {
        self.current()?;
        // SAFETY: the stream is alive, as the caller promised.
        match unsafe { (self.device.driver.functions.cuStreamQuery)(self.stream.as_raw().cast()) } {
            NOT_READY => Ok(false),
            code => self.device.driver.check(code, format_args!("cuStreamQuery on {}", self.device)).map(|()| true),
        }
    }

    /// Waits until what this call enqueued on its stream is done.
    pub fn wait(&mut self) -> Result<()> {
        if self.context.is_none() {
            return Ok(()); // nothing was
        }
        self.wait_for_all()
    }

    /// Waits until all that is enqueued on its stream is done, whoever did that.
    pub fn wait_for_all(&mut self) -> Result<()> {
        self.current()?;
        // SAFETY: the stream is alive, as the caller promised.
        let code = unsafe { (self.device.driver.functions.cuStreamSynchronize)(self.stream.as_raw().cast()) };
        self.device.driver.check(code, format_args!("cuStreamSynchronize on {}", self.device))
    }
}
