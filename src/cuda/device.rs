//! CUDA devices by number.

use std::fmt;

use cudarc::driver::sys::CUuuid;

use crate::ffi::error::{Result, error};

use super::driver::{Driver, Properties};

/// UUID of a device, which is the same in every process.
pub type Uuid = [u8; 16];

/// Device that exists.
#[derive(Clone, Copy)]
pub struct Device {
    pub driver: &'static Driver,
    pub ordinal: usize,
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

    pub fn uuid(self) -> Result<Uuid> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: `uuid` outlives the call, and the handle belongs to a device that the driver listed.
        let code = unsafe { (self.driver.functions.cuDeviceGetUuid_v2)(&mut uuid, self.properties().handle) };
        self.driver.check(code, format_args!("cuDeviceGetUuid of {self}"))?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    pub fn properties(self) -> &'static Properties {
        &self.driver.devices[self.ordinal]
    }
}

impl fmt::Display for Device {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "cuda:{}", self.ordinal)
    }
}
