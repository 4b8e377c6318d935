//! CUDA IPC: handles by which other processes open memory from cuMemAlloc.

use std::ffi::c_uint;

use cudarc::driver::sys::CUipcMemHandle;

use crate::ffi::error::Result;

use super::device::Device;

/// Handle of an allocation, for another process.
pub type IpcHandle = [u8; 64];

/// The context of the memory must be current for all of these.
impl Device {
    /// Returns the handle of an allocation of `bytes` bytes that begins at `address`.
    pub fn ipc_handle(self, address: u64, bytes: u64) -> Result<IpcHandle> {
        let (driver, mut handle) = (self.driver, CUipcMemHandle { reserved: [0; 64] });
        // SAFETY: `handle` outlives the call; the driver checks the address.
        let code = unsafe { (driver.functions.cuIpcGetMemHandle)(&mut handle, address) };
        driver.check(code, format_args!("cuIpcGetMemHandle of {bytes} bytes on {self}"))?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    /// Opens an allocation of `bytes` bytes of another process, on this GPU or on one that it can access. Returns its
    /// address here.
    pub fn open_ipc(self, handle: &IpcHandle, bytes: u64) -> Result<u64> {
        const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
        let (driver, mut address) = (self.driver, 0);
        let handle = CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        // SAFETY: `address` outlives the call; the driver checks the handle.
        let code = unsafe { (driver.functions.cuIpcOpenMemHandle_v2)(&mut address, handle, LAZY_ENABLE_PEER_ACCESS) };
        driver.check(code, format_args!("cuIpcOpenMemHandle of {bytes} bytes on {self}"))?;
        Ok(address)
    }

    /// Closes memory that was opened. There is nothing to do if the driver refuses.
    ///
    /// # Safety
    /// `address` is from `open_ipc` in the current context, and nothing uses it any more.
    pub unsafe fn close_ipc(self, address: u64) {
        // SAFETY: the caller promises it.
        unsafe { (self.driver.functions.cuIpcCloseMemHandle)(address) };
    }
}
