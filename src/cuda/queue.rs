//! Queues: the device, context and stream that a call uses.

use std::{ffi::c_int, ptr};

use crate::{dlpack::View, ffi::error::Result};

use super::{
    context::{Context, ContextRef, RelaxedCapture},
    device::Device,
    driver::NOT_READY,
    stream::Stream,
};

/// A device and one of its streams. The context is found at the first allocation or launch.
pub struct Queue {
    // The fields are dropped in this order, which restores the thread's state.
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

    /// Makes a queue on a stream, in the context that a handle was made in.
    pub fn at(device: Device, stream: Stream, home: ContextRef) -> Result<Self> {
        let context = Some(Context::of_home(device, stream, home)?);
        Ok(Self { relaxed: None, context, device, stream })
    }

    /// Returns the context, for launches.
    pub fn context(&mut self) -> Result<&mut Context> {
        let context = match self.context.take() {
            Some(context) => context,
            None => Context::of(self.device, self.stream)?,
        };
        Ok(self.context.insert(context))
    }

    /// Returns true if there is a context that need not be created.
    pub fn has_context(&mut self) -> Result<bool> {
        if self.context.is_none() {
            self.context = Context::existing(self.device)?;
        }
        Ok(self.context.is_some())
    }

    /// Returns the context, current on this thread and in a capture mode that disturbs no capture. Loading, allocating,
    /// freeing and waiting need it.
    pub fn current(&mut self) -> Result<&mut Context> {
        self.context()?.make_current()?;
        self.relax()?;
        self.context()
    }

    /// Returns a reference to the context.
    pub fn home(&mut self) -> Result<ContextRef> {
        let device = self.device;
        self.current()?.home(device)
    }

    /// Begins the capture mode in which calls other than launches disturb no capture.
    pub fn relax(&mut self) -> Result<()> {
        if self.relaxed.is_none() {
            self.relaxed = Some(RelaxedCapture::begin(self.device.driver)?);
        }
        Ok(())
    }

    /// Reads a contiguous view of `to.len()` bytes, after all work that was enqueued before is done.
    pub fn read_bytes(&mut self, src: &View<'_>, to: &mut [u8]) -> Result<()> {
        self.current()?;
        self.wait()?;
        // SAFETY: the maker of the view promised that its memory has as many bytes.
        unsafe { self.copy_to_host(to, src.data() as u64) }
    }

    /// Copies from device memory, after the work enqueued on the legacy stream, and waits for the copy.
    ///
    /// # Safety
    /// `from` has at least `to.len()` bytes.
    pub unsafe fn copy_to_host(&mut self, to: &mut [u8], from: u64) -> Result<()> {
        self.current()?;
        let driver = self.device.driver;
        // SAFETY: the caller promises the bytes, a context is current, and `to` outlives the synchronous copy.
        let code = unsafe { (driver.functions.cuMemcpyDtoH_v2)(to.as_mut_ptr().cast(), from, to.len()) };
        driver.check(code, format_args!("cuMemcpyDtoH of {} bytes on {}", to.len(), self.device))
    }

    /// Copies between memory of devices and pinned memory of the host, in the order of the stream.
    ///
    /// # Safety
    /// Both sides are device memory or pinned memory of `bytes` bytes, and stay until the stream has done the copy.
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
    /// The memory has `bytes` bytes, and stays until the stream has done the work.
    pub unsafe fn clear(&mut self, at: *mut u8, bytes: usize) -> Result<()> {
        self.context()?.make_current()?;
        let (driver, stream) = (self.device.driver, self.stream.as_raw().cast());
        // SAFETY: the caller promises `bytes` bytes of the device; the stream is alive.
        let code = unsafe { (driver.functions.cuMemsetD8Async)(at as u64, 0, bytes, stream) };
        driver.check(code, format_args!("cuMemsetD8Async of {bytes} bytes on {}", self.device))
    }

    /// Returns true if work on the stream is captured into a graph.
    pub fn is_capturing(&mut self) -> Result<bool> {
        self.context()?.make_current()?;
        let (driver, mut status) = (self.device.driver, 0 as c_int);
        // SAFETY: the stream is alive, and the driver writes the enum as an int.
        let code = unsafe {
            (driver.functions.cuStreamIsCapturing)(self.stream.as_raw().cast(), ptr::from_mut(&mut status).cast())
        };
        driver.check(code, format_args!("cuStreamIsCapturing on {}", self.device))?;
        Ok(status != 0)
    }

    /// Returns true if all work enqueued on the stream is done. Never waits.
    pub fn is_done(&mut self) -> Result<bool> {
        self.current()?;
        // SAFETY: the stream is alive, as the caller promised.
        match unsafe { (self.device.driver.functions.cuStreamQuery)(self.stream.as_raw().cast()) } {
            NOT_READY => Ok(false),
            code => self.device.driver.check(code, format_args!("cuStreamQuery on {}", self.device)).map(|()| true),
        }
    }

    /// Waits until the work that this call enqueued on the stream is done.
    pub fn wait(&mut self) -> Result<()> {
        if self.context.is_none() {
            return Ok(()); // nothing was enqueued
        }
        self.wait_for_all()
    }

    /// Waits until all work enqueued on the stream is done, including other callers' work.
    pub fn wait_for_all(&mut self) -> Result<()> {
        self.current()?;
        // SAFETY: the stream is alive, as the caller promised.
        let code = unsafe { (self.device.driver.functions.cuStreamSynchronize)(self.stream.as_raw().cast()) };
        self.device.driver.check(code, format_args!("cuStreamSynchronize on {}", self.device))
    }
}
