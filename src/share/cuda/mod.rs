//! Device memory that several processes share.
//!
//! ```text
//! from cuMemAlloc   as a whole, by a handle of 64 bytes; a process opens a handle once, and never one of its own
//! from cuMemMap     part by part, each as a file, which any process that has it can map, including this one
//! ```
//!
//! All functions work in a context, but memory that is mapped by parts belongs to none.

mod mapping;
mod opened;

use std::{
    ffi::{c_int, c_uint, c_void},
    mem,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    ptr,
};

use cudarc::driver::sys::{CUmemAllocationGranularity_flags, CUmemAllocationProp, CUpointer_attribute};

use crate::{
    cuda::{Queue, Stream, Uuid, context::ContextRef, device::Device, driver::Driver, ipc::IpcHandle},
    ffi::{
        error::{Error, Result, Status, error},
        fallible,
    },
};

use mapping::{
    AS_FILE, Allocation, AllocationProperties, Mapping, ON_DEVICE, PINNED, as_share_error, check, with_likely_cause,
};
use opened::Opened;

pub use opened::Sender;

/// Maximum number of parts in which memory is shared.
pub const MOST_PARTS: usize = 4096;

/// Part of memory, as a file.
pub struct Part {
    pub bytes: u64,
    pub file: OwnedFd,
}

/// Method by which another process gets access to memory.
pub enum ExportMethod {
    /// Handle, and a loan that keeps the memory for it.
    Handle(IpcHandle, Loan),
    Parts(Vec<Part>),
}

/// Memory that another process can import.
pub struct Exported {
    pub uuid: Uuid,
    /// Address of the memory in this process; 0 for a copy.
    pub address: u64,
    pub bytes: u64,
    pub means: ExportMethod,
}

/// Loan of memory. While it exists, memory of this library is neither freed nor reused. It has no effect on other
/// memory.
pub struct Loan {
    device: Device,
    address: u64,
    /// Context of this library's block, which is returned on drop; None: there is no block.
    block: Option<u64>,
}

impl Loan {
    fn of(device: Device, address: u64) -> Self {
        Self { device, address, block: device.properties().cache.export(address) }
    }

    /// Makes another loan of the same memory.
    pub fn again(&self) -> Self {
        Self::of(self.device, self.address)
    }

    /// Keeps the memory for ever.
    pub fn keep_for_ever(&mut self) {
        self.block = None;
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(context) = self.block {
            self.device.properties().cache.returned(self.address, context);
        }
    }
}

impl Queue {
    /// Returns the device's identity, which is the same in every process.
    pub fn uuid(&self) -> Result<Uuid> {
        self.device.uuid()
    }

    /// Exports the memory that contains the bytes from `begin` to `end`, when all work of the context on them is done.
    pub fn export(&mut self, begin: u64, end: u64) -> Result<Exported> {
        self.finish()?;
        let driver = self.device.driver;
        let about = PointerAttributes::memory_at(driver, begin)?;
        let instead = "GC_SHARE_COPY sends a copy, and gc_tensor_empty makes memory that can be shared";
        if about.memory_type == 0 {
            return Err(error!(InvalidArgument, "tensor: address {begin:#x} is not in memory of CUDA"));
        }
        if about.is_managed || about.memory_type == HOST || about.pool != 0 {
            let what = match about {
                PointerAttributes { is_managed: true, .. } => "managed memory (cuMemAllocManaged)",
                PointerAttributes { memory_type: HOST, .. } => "memory of the host",
                _ => "memory of a pool (cuMemAllocAsync)",
            };
            return Err(error!(Share, "tensor: {what} cannot be given to another process; {instead}"));
        }
        if about.is_legacy {
            let (first, bytes) = range_of(driver, begin)?;
            if end > first + bytes {
                return Err(error!(
                    InvalidArgument,
                    "tensor: it ends at {end:#x}, {} bytes behind the allocation that it begins in",
                    end - first - bytes
                ));
            }
            let device = self.device_numbered(about.ordinal)?;
            let handle = device
                .ipc_handle(first, bytes)
                .map_err(as_share_error)
                .map_err(|failure| Error::new(failure.status, format_args!("{}; {instead}", failure.message)))?;
            let uuid = device.uuid()?;
            let means = ExportMethod::Handle(handle, Loan::of(device, first));
            return Ok(Exported { uuid, address: first, bytes, means });
        }
        let ranges = self.ranges(begin, end, instead)?;
        let (mut parts, mut device) = (fallible::list(ranges.len(), "parts")?, None);
        for &range in &ranges {
            let (part, on) = self.export_part(range, instead)?;
            parts.push(part);
            if *device.get_or_insert(on) != on {
                return Err(error!(Share, "tensor: its memory is of several devices; {instead}"));
            }
        }
        let address = ranges.first().map_or(0, |&(first, _)| first);
        let bytes = ranges.iter().map(|&(_, bytes)| bytes).sum();
        let uuid = self.device_numbered(device.unwrap_or(-1))?.uuid()?;
        Ok(Exported { uuid, address, bytes, means: ExportMethod::Parts(parts) })
    }

    /// Returns addresses and sizes of the adjacent parts of memory that contain the bytes from `begin` to `end`.
    fn ranges(&self, begin: u64, end: u64, instead: &str) -> Result<Vec<(u64, u64)>> {
        let (mut ranges, mut at) = (Vec::new(), begin);
        while at < end {
            let (first, bytes) = range_of(self.device.driver, at)?;
            if at != begin && first != at || bytes == 0 {
                return Err(error!(
                    InvalidArgument,
                    "tensor: it ends at {end:#x}, and behind {at:#x} is none of its memory"
                ));
            }
            if ranges.len() == MOST_PARTS {
                return Err(error!(
                    Share,
                    "tensor: its memory is of more than {MOST_PARTS} parts; {instead}, of one part"
                ));
            }
            fallible::reserve(&mut ranges, 1, "parts")?;
            ranges.push((first, bytes));
            at = first + bytes;
        }
        Ok(ranges)
    }

    /// Exports the part with this address and size. Also returns the number of its device.
    fn export_part(&self, (address, bytes): (u64, u64), instead: &str) -> Result<(Part, c_int)> {
        let (driver, device, mut handle) = (self.device.driver, self.device, 0);
        let place = ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: the driver writes to a local variable, which outlives the call.
        let code = unsafe { (driver.functions.cuMemRetainAllocationHandle)(&mut handle, place) };
        check(driver, code, "cuMemRetainAllocationHandle", bytes, device)
            .map_err(|failure| Error::new(failure.status, format_args!("{}; {instead}", failure.message)))?;
        let allocation = Allocation { driver, handle };
        let mut properties = AllocationProperties::default();
        // SAFETY: the struct is as large as the driver's and outlives the call.
        let code = unsafe {
            (driver.functions.cuMemGetAllocationPropertiesFromHandle)(ptr::from_mut(&mut properties).cast(), handle)
        };
        check(driver, code, "cuMemGetAllocationPropertiesFromHandle", bytes, device)?;
        if properties.location_type != ON_DEVICE || properties.handle_types & AS_FILE.0 == 0 {
            return Err(error!(
                Share,
                "tensor: {bytes} bytes of its memory were made by cuMemCreate with handle types {:#x} and location type \
                 {}; {:#x} (POSIX file descriptor) and {ON_DEVICE} can be shared; {instead}",
                properties.handle_types,
                properties.location_type,
                AS_FILE.0
            ));
        }
        Ok((Part { bytes, file: allocation.export(bytes, device)? }, properties.location))
    }

    /// Exports new memory of `bytes` bytes, at least one, that contains nothing else. `fill` must have written the
    /// memory when it returns.
    pub fn export_copy(&mut self, bytes: u64, fill: impl FnOnce(*mut u8) -> Result<()>) -> Result<Exported> {
        self.finish()?;
        let (driver, device) = (self.device.driver, self.device);
        let properties = AllocationProperties {
            kind: PINNED,
            handle_types: AS_FILE.0,
            location_type: ON_DEVICE,
            location: device.ordinal as c_int,
            ..Default::default()
        };
        let described: *const CUmemAllocationProp = ptr::from_ref(&properties).cast();
        let mut step = 0;
        // SAFETY: `step` and the properties outlive the call.
        let code = unsafe {
            let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
            (driver.functions.cuMemGetAllocationGranularity)(&mut step, described, minimum)
        };
        check(driver, code, "cuMemGetAllocationGranularity", bytes, device)?;
        let whole = bytes
            .checked_next_multiple_of(step.max(1) as u64)
            .ok_or_else(|| error!(SizeOverflow, "tensor: {bytes} bytes exceed the address space"))?;
        let handle = self.with_memory(|_| {
            let mut handle = 0;
            // SAFETY: `handle` and the properties outlive the call.
            let code = unsafe { (driver.functions.cuMemCreate)(&mut handle, whole as usize, described, 0) };
            check(driver, code, "cuMemCreate", whole, device).map(|()| handle)
        })?;
        let allocation = Allocation { driver, handle };
        let mut mapping = Mapping::reserve(device, whole, 1)?;
        mapping.map(&allocation, whole)?;
        mapping.open_for(&[device])?;
        if let Err(failure) = fill(ptr::with_exposed_provenance_mut(mapping.address as usize)) {
            if !is_unused(self.finish()) {
                mem::forget(mapping); // enqueued work may still write to it
            }
            return Err(failure);
        }
        let mut parts = fallible::list(1, "parts")?;
        parts.push(Part { bytes: whole, file: allocation.export(whole, device)? });
        Ok(Exported { uuid: device.uuid()?, address: 0, bytes: whole, means: ExportMethod::Parts(parts) })
    }

    /// Opens memory of another process on this device.
    pub fn open(&mut self, uuid: Uuid, handle: IpcHandle, sender: Sender, bytes: u64) -> Result<Imported> {
        self.check_reach(uuid)?;
        let (device, home) = (self.device, self.home()?);
        let opened = Opened::of(device, home.id, handle, sender, bytes)?;
        let imported = Imported { device, home, memory: Some(Memory::Opened(opened)) };
        let (first, there) = range_of(device.driver, imported.address()).map_err(with_likely_cause)?;
        let missing = (imported.address() - first).saturating_add(bytes).saturating_sub(there);
        if missing > 0 {
            return Err(error!(Corrupt, "socket: the message says {bytes} bytes of memory; {missing} are not there"));
        }
        Ok(imported)
    }

    /// Maps memory of another process on this device, part after part.
    pub fn map<'a>(
        &mut self, uuid: Uuid, parts: impl ExactSizeIterator<Item = (u64, BorrowedFd<'a>)>, bytes: u64,
    ) -> Result<Imported> {
        let owner = self.check_reach(uuid)?;
        let (device, home) = (self.device, self.home()?);
        let mut mapping = Mapping::reserve(device, bytes, parts.len())?;
        for (bytes, file) in parts {
            let (driver, mut handle) = (device.driver, 0);
            let number = ptr::without_provenance_mut(file.as_raw_fd() as usize);
            // SAFETY: `handle` outlives the call, and the file is open.
            let code = unsafe { (driver.functions.cuMemImportFromShareableHandle)(&mut handle, number, AS_FILE) };
            check(driver, code, "cuMemImportFromShareableHandle", bytes, device).map_err(with_likely_cause)?;
            mapping.map(&Allocation { driver, handle }, bytes).map_err(with_likely_cause)?;
        }
        // A query for a pointer's device returns the device with the memory, so that device gets access, too.
        let opened = match owner {
            Some(owner) if owner.ordinal != device.ordinal => mapping.open_for(&[device, owner]),
            _ => mapping.open_for(&[device]),
        };
        opened.map_err(with_likely_cause)?;
        Ok(Imported { device, home, memory: Some(Memory::Mapped(mapping)) })
    }

    /// Imports memory of this process that was sent back to it.
    pub fn own(&mut self, uuid: Uuid, lent: Loan) -> Result<Imported> {
        if self.device.uuid()? != uuid {
            return Err(error!(
                UnsupportedDevice,
                "device: {}; in the process that has sent it a tensor stays on its device", self.device
            ));
        }
        let (device, home) = (self.device, self.home()?);
        Ok(Imported { device, home, memory: Some(Memory::Own(lent)) })
    }

    /// Returns the device with this identity, if it is visible here; refuses a device that this queue's cannot access.
    fn check_reach(&self, uuid: Uuid) -> Result<Option<Device>> {
        let (driver, device) = (self.device.driver, self.device);
        for ordinal in 0..driver.devices.len() {
            let other = Device { driver, ordinal };
            if other.uuid()? != uuid {
                continue;
            }
            if ordinal != device.ordinal {
                let (mut can, one, another) = (0, device.properties().handle, other.properties().handle);
                // SAFETY: `can` outlives the call; both devices are the driver's.
                let code = unsafe { (driver.functions.cuDeviceCanAccessPeer)(&mut can, one, another) };
                driver.check(code, format_args!("cuDeviceCanAccessPeer of {device} and {other}"))?;
                if can == 0 {
                    return Err(error!(UnsupportedDevice, "device: {device} cannot reach memory of {other}"));
                }
            }
            return Ok(Some(other));
        }
        Ok(None)
    }

    fn device_numbered(&self, ordinal: c_int) -> Result<Device> {
        let driver = self.device.driver;
        match usize::try_from(ordinal) {
            Ok(ordinal) if ordinal < driver.devices.len() => Ok(Device { driver, ordinal }),
            _ => Err(error!(Share, "tensor: its memory is on device {ordinal}, which the driver did not show")),
        }
    }
}

/// Memory that a message described: of another process and mapped here, or of this process.
pub struct Imported {
    device: Device,
    home: ContextRef,
    /// None after the release.
    memory: Option<Memory>,
}

enum Memory {
    Opened(Opened),
    Mapped(Mapping),
    Own(Loan),
}

impl Imported {
    /// Returns the address of the memory in this process.
    pub fn address(&self) -> u64 {
        match &self.memory {
            Some(Memory::Opened(opened)) => opened.address,
            Some(Memory::Mapped(mapping)) => mapping.address,
            Some(Memory::Own(lent)) => lent.address,
            None => 0,
        }
    }

    /// Releases the memory, once all work that was enqueued in the context before is done. Returns false if the wait
    /// failed: for lack of memory, in a capture, or because the context is neither primary nor current and may be
    /// destroyed. The memory then stays mapped for ever, since such work may still use it.
    pub fn release(mut self) -> bool {
        self.give_up()
    }

    fn give_up(&mut self) -> bool {
        let Some(memory) = self.memory.take() else { return true };
        let wait = || Queue::at(self.device, Stream::LEGACY, self.home).and_then(|mut queue| queue.finish());
        let may_be_entered = self.home.may_be_entered(self.device);
        if !may_be_entered || !is_unused(wait()) && !self.home.is_gone(self.device) {
            mem::forget(memory);
            return false;
        }
        if let Memory::Opened(opened) = &memory
            && opened.release_one()
        {
            self.home.give_back(self.device, || {
                // SAFETY: the memory was opened in this context, which is current, and no tensor uses it any more.
                unsafe { self.device.close_ipc(opened.address) };
            });
        }
        true
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// Returns true if no work runs any more after a wait; this includes a lost context.
fn is_unused(waited: Result<()>) -> bool {
    waited.map_or_else(|failure| failure.status == Status::ContextLost, |()| true)
}

/// Attributes of memory, from the driver.
#[derive(Default)]
struct PointerAttributes {
    /// 0: the driver has no such memory.
    memory_type: c_uint,
    is_managed: bool,
    /// True if the memory is from cuMemAlloc.
    is_legacy: bool,
    pool: u64,
    ordinal: c_int,
}

const HOST: c_uint = 1;

impl PointerAttributes {
    fn memory_at(driver: &Driver, address: u64) -> Result<Self> {
        const ASKED: [CUpointer_attribute; 5] = [
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        ];
        let (mut asked, mut said) = (ASKED, [0u64; ASKED.len()]);
        let mut places = said.each_mut().map(|place| ptr::from_mut(place).cast::<c_void>());
        // SAFETY: each attribute has a place, with room for the largest attribute. Any address is allowed.
        let code = unsafe {
            let places = places.as_mut_ptr();
            (driver.functions.cuPointerGetAttributes)(ASKED.len() as c_uint, asked.as_mut_ptr(), places, address)
        };
        driver.check(code, format_args!("cuPointerGetAttributes"))?;
        let [memory_type, is_managed, is_legacy, pool, ordinal] = said;
        Ok(Self {
            memory_type: memory_type as c_uint,
            is_managed: is_managed as u8 != 0,
            is_legacy: is_legacy as u8 != 0,
            pool,
            ordinal: ordinal as c_int,
        })
    }
}

/// Returns address and size of the allocation that contains an address; for memory mapped by parts, of the part.
fn range_of(driver: &Driver, address: u64) -> Result<(u64, u64)> {
    let (mut first, mut bytes) = (0, 0);
    // SAFETY: `first` and `bytes` outlive the call. Any address is allowed.
    let code = unsafe { (driver.functions.cuMemGetAddressRange_v2)(&mut first, &mut bytes, address) };
    driver.check(code, format_args!("cuMemGetAddressRange of {address:#x}")).map_err(as_share_error)?;
    Ok((first, bytes as u64))
}
