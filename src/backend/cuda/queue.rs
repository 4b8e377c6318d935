//! A call's way to a device: which one, in what context, on what stream.

use crate::{backend::Stream, cancel, error::Result};

use super::{
    Device,
    context::{Context, Relaxed},
};

/// A device that is there, and a stream there. Its context is found at the first allocation or launch.
pub struct Queue {
    // In this order they are dropped, so that the thread is left as it was found.
    relaxed: Option<Relaxed>,
    context: Option<Context>,
    /// The driver may reach cancellation points wherever it waits.
    _delay: cancel::Delay,
    pub(super) device: Device,
    pub(super) stream: Stream,
}

impl Queue {
    /// Finds the driver, and the device with this number.
    pub fn of(ordinal: i32, stream: Stream) -> Result<Self> {
        Ok(Self { relaxed: None, context: None, _delay: cancel::delay(), device: Device::of(ordinal)?, stream })
    }

    /// The context, for launches.
    pub(super) fn context(&mut self) -> Result<&mut Context> {
        let context = match self.context.take() {
            Some(context) => context,
            None => Context::of(self.device, self.stream)?,
        };
        Ok(self.context.insert(context))
    }

    /// Whether there is a context to work in that need not be made.
    pub(super) fn has_context(&mut self) -> Result<bool> {
        if self.context.is_none() {
            self.context = Context::existing(self.device)?;
        }
        Ok(self.context.is_some())
    }

    /// The context, current on this thread, and in a capture mode in which what is not a launch disturbs no capture: for
    /// loading, allocating, freeing and waiting.
    pub(super) fn current(&mut self) -> Result<&mut Context> {
        self.context()?.make_current()?;
        self.relax()?;
        self.context()
    }

    /// Begins the capture mode in which what is not a launch disturbs no capture.
    pub(super) fn relax(&mut self) -> Result<()> {
        if self.relaxed.is_none() {
            self.relaxed = Some(Relaxed::begin(self.device.driver)?);
        }
        Ok(())
    }

    /// Waits until what this call enqueued on the legacy stream is done.
    pub fn wait(&mut self) -> Result<()> {
        if self.context.is_none() {
            return Ok(()); // nothing was
        }
        self.current()?;
        // SAFETY: the stream is alive, as the caller promised.
        let code = unsafe { (self.device.driver.functions.cuStreamSynchronize)(self.stream.as_ptr().cast()) };
        self.device.driver.check(code, format_args!("cuStreamSynchronize on {}", self.device))
    }
}
