//! Memory that is mapped by parts: allocations without an address, and addresses where they are mapped.

use std::{
    ffi::{c_int, c_uint, c_void},
    mem,
    os::fd::{FromRawFd, OwnedFd},
    ptr,
};

use cudarc::driver::sys::{CUmemAllocationHandleType, CUmemAllocationProp, CUmemGenericAllocationHandle};

use crate::{
    cuda::{
        device::Device,
        driver::{Driver, Functions},
    },
    ffi::{
        error::{Error, Result, Status, error},
        fallible,
    },
};

/// Device memory that has no address of its own.
pub(super) struct Allocation {
    pub(super) driver: &'static Driver,
    pub(super) handle: CUmemGenericAllocationHandle,
}

impl Allocation {
    pub(super) fn export(&self, bytes: u64, device: Device) -> Result<OwnedFd> {
        let mut number: c_int = -1;
        let place: *mut c_void = ptr::from_mut(&mut number).cast();
        // SAFETY: `place` has room for a descriptor, which is what the driver writes for this type of handle.
        let code = unsafe { (self.driver.functions.cuMemExportToShareableHandle)(place, self.handle, AS_FILE, 0) };
        check(self.driver, code, "cuMemExportToShareableHandle", bytes, device)?;
        // SAFETY: the descriptor is new, and nothing else owns it.
        let file = unsafe { OwnedFd::from_raw_fd(number) };
        // SAFETY: the descriptor is open. The driver makes it without close-on-exec and has no flag for that, so a
        // program that another thread starts right now may inherit it; a duplicate would not change that.
        unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
        Ok(file)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: the handle was made, imported or retained once.
        unsafe { (self.driver.functions.cuMemRelease)(self.handle) };
    }
}

/// Reserved addresses, and the parts that are mapped there.
pub(super) struct Mapping {
    device: Device,
    pub(super) address: u64,
    bytes: u64,
    /// Bytes of each part that is mapped so far.
    parts: Vec<u64>,
}

impl Mapping {
    pub(super) fn reserve(device: Device, bytes: u64, parts: usize) -> Result<Self> {
        let sizes = fallible::list(parts, "parts")?;
        let (driver, mut address) = (device.driver, 0);
        // SAFETY: the driver writes to a local variable, which outlives the call.
        let code = unsafe { (driver.functions.cuMemAddressReserve)(&mut address, bytes as usize, 0, 0, 0) };
        check(driver, code, "cuMemAddressReserve", bytes, device)?;
        Ok(Self { device, address, bytes, parts: sizes })
    }

    /// Maps a part after the parts that are mapped. The list must have room for it.
    pub(super) fn map(&mut self, allocation: &Allocation, bytes: u64) -> Result<()> {
        let at = self.address + self.parts.iter().sum::<u64>();
        let driver = self.device.driver;
        assert!(at + bytes <= self.address + self.bytes && self.parts.len() < self.parts.capacity());
        // SAFETY: the addresses are of this reservation, and nothing is mapped there yet.
        let code = unsafe { (driver.functions.cuMemMap)(at, bytes as usize, 0, allocation.handle, 0) };
        check(driver, code, "cuMemMap", bytes, self.device)?;
        self.parts.push(bytes);
        Ok(())
    }

    /// Gives devices read and write access to all parts.
    pub(super) fn open_for(&self, devices: &[Device]) -> Result<()> {
        let driver = self.device.driver;
        let mut access = [Access { location_type: ON_DEVICE, location: 0, flags: READ_AND_WRITE }; 2];
        for (access, device) in access.iter_mut().zip(devices) {
            access.location = device.ordinal as c_int;
        }
        let count = devices.len().min(access.len());
        // SAFETY: the mapping has `bytes` bytes, and `access` has `count` structs with the driver's layout.
        let code = unsafe {
            (driver.functions.cuMemSetAccess)(self.address, self.bytes as usize, access.as_ptr().cast(), count)
        };
        check(driver, code, "cuMemSetAccess", self.bytes, self.device)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Functions { cuMemUnmap, cuMemAddressFree, .. } = &self.device.driver.functions;
        let (mut at, mut is_empty) = (self.address, true);
        for &bytes in &self.parts {
            // SAFETY: `map` mapped the part there, and nothing uses it any more.
            is_empty &= unsafe { cuMemUnmap(at, bytes as usize) } == 0;
            at += bytes;
        }
        if is_empty {
            // SAFETY: the addresses are reserved, and nothing is mapped there any more.
            unsafe { cuMemAddressFree(self.address, self.bytes as usize) };
        }
    }
}

/// CUmemAllocationProp, with integers for enums that a newer driver may extend.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AllocationProperties {
    pub(super) kind: c_uint,
    pub(super) handle_types: c_uint,
    pub(super) location_type: c_uint,
    pub(super) location: c_int,
    pub(super) windows: *mut c_void,
    pub(super) flags: [u8; 8],
}

impl Default for AllocationProperties {
    fn default() -> Self {
        Self { kind: 0, handle_types: 0, location_type: 0, location: 0, windows: ptr::null_mut(), flags: [0; 8] }
    }
}

/// CUmemAccessDesc, with integers for enums.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Access {
    pub(super) location_type: c_uint,
    pub(super) location: c_int,
    flags: c_uint,
}

const _: () = assert!(mem::size_of::<AllocationProperties>() == mem::size_of::<CUmemAllocationProp>());
const _: () = assert!(mem::size_of::<Access>() == mem::size_of::<cudarc::driver::sys::CUmemAccessDesc>());

pub(super) const PINNED: c_uint = 1;
pub(super) const ON_DEVICE: c_uint = 1;
pub(super) const READ_AND_WRITE: c_uint = 3;
pub(super) const AS_FILE: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

pub(super) fn check(driver: &Driver, code: c_int, call: &str, bytes: u64, device: Device) -> Result<()> {
    driver.check(code, format_args!("{call} of {bytes} bytes on {device}")).map_err(as_share_error)
}

/// Changes the general status Cuda to Share: the memory cannot be shared.
pub(super) fn as_share_error(failure: Error) -> Error {
    match failure.status {
        Status::Cuda => Error { status: Status::Share, ..failure },
        _ => failure,
    }
}

/// Adds the likely cause to an error with memory that another process has sent.
pub(super) fn with_likely_cause(failure: Error) -> Error {
    match failure.status {
        Status::Share => {
            error!(Share, "{}; the sender may have ended, or its device may not be reached from here", failure.message)
        }
        _ => failure,
    }
}
