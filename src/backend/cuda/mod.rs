//! CUDA: the driver API, without the toolkit.

pub mod bits;
mod context;
mod driver;
mod launch;
mod memory;
mod module;

use std::fmt;

use crate::{
    backend::Stream,
    error::{Result, error},
};

use driver::{Driver, Properties};

pub use memory::Memory;
pub use module::ptx;

/// A device that is there.
#[derive(Clone, Copy)]
pub struct Device {
    driver: &'static Driver,
    ordinal: usize,
}

impl Device {
    /// Finds the driver, and the device with this number.
    pub fn of(ordinal: i32) -> Result<Self> {
        let driver = Driver::get()?;
        match usize::try_from(ordinal) {
            Ok(index) if index < driver.devices.len() => Ok(Self { driver, ordinal: index }),
            _ => {
                Err(error!(UnsupportedDevice, "cuda:{ordinal}: the CUDA driver shows {} devices", driver.devices.len()))
            }
        }
    }

    /// Loads what calls on this device need.
    pub fn prepare(self) -> Result<()> {
        self.enter(Stream::LEGACY)?.prepare()
    }

    /// Waits for the work that simple-tier calls have enqueued.
    pub fn wait(self) -> Result<()> {
        let _entered = self.enter(Stream::LEGACY)?;
        // SAFETY: the legacy stream is always there.
        let code = unsafe { (self.driver.functions.cuStreamSynchronize)(Stream::LEGACY.as_ptr().cast()) };
        self.driver.check(code, format_args!("cuStreamSynchronize on {self}"))
    }

    fn properties(self) -> &'static Properties {
        &self.driver.devices[self.ordinal]
    }
}

impl fmt::Display for Device {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "cuda:{}", self.ordinal)
    }
}
