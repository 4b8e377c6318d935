//! CUDA: the driver API, without the toolkit.

pub mod bits;
pub mod codec;
pub mod compiled;
mod context;
pub mod copy;
mod divisor;
mod driver;
mod event;
mod launch;
mod layout;
mod memory;
mod module;
mod own_stream;
pub mod peers;
mod pinned;
mod queue;
mod reuse;
pub mod shared;
pub mod signs;
mod strided;
mod tiles;
mod walk;

use std::fmt;

use crate::error::{Result, error};

use driver::{Driver, Properties};

pub use codec::Memory;
pub use compiled::Image;
pub use context::InPrimary;
pub use event::{Event, EventHandle};
pub use module::{FAMILIES, LaunchShape, launch_shape};
pub use pinned::Pinned;
pub use queue::Queue;

/// A device that is there.
#[derive(Clone, Copy)]
struct Device {
    driver: &'static Driver,
    ordinal: usize,
}

impl Device {
    /// Finds the driver, and the device with this number.
    fn of(ordinal: i32) -> Result<Self> {
        let driver = Driver::get()?;
        match usize::try_from(ordinal) {
            Ok(index) if index < driver.devices.len() => Ok(Self { driver, ordinal: index }),
            _ => {
                Err(error!(UnsupportedDevice, "cuda:{ordinal}: the CUDA driver shows {} devices", driver.devices.len()))
            }
        }
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
