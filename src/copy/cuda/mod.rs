//! Copies and casts between the memory of GPUs, and between that and the memory of the host.
//!
//! | from, to | contiguous, without a cast | otherwise |
//! |---|---|---|
//! | one GPU, or it and pinned memory | cuMemcpyAsync | a kernel, which reads and writes pinned memory itself |
//! | two GPUs | cuMemcpyPeerAsync | a kernel of the target's GPU, if it may read the source; else staged |
//! | pageable memory and a GPU | staged | staged |
//!
//! Staged copies (staged.rs) go through pinned staging buffers, in pieces, and are complete when the call returns.

mod direct;
mod launch;
mod staged;

use std::{ffi::c_int, ptr};

use cudarc::driver::sys::CUpointer_attribute;

use crate::{
    cuda::{
        Queue,
        context::{LossyCache, primary},
        device::Device,
    },
    dlpack::{self, Elements},
    ffi::error::{Result, error},
};

use super::plan::CopyPlan;

use direct::{OnHost, flat, on_device, with_pinned};
use launch::launch;

/// Side of a copy: location of its memory, and address of its element 0.
struct Side {
    place: Place,
    data: *mut u8,
}

/// Location of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Host memory that GPUs cannot access.
    Pageable,
    /// Host memory that GPUs can access: CUDAHost.
    Pinned,
    /// Memory of the device with this number.
    Device(i32),
}

impl Side {
    fn of(elements: &Elements<'_>) -> Self {
        let place = match elements.device() {
            dlpack::Device::Cuda(ordinal) => Place::Device(ordinal),
            dlpack::Device::Cpu if elements.is_pinned() => Place::Pinned,
            dlpack::Device::Cpu => Place::Pageable,
        };
        Self { place, data: elements.data() }
    }
}

/// Copies the elements of `src` to `dst`. `plan` was made of these two. `on_host`: function for the CPU's part.
pub fn copy(queue: &mut Queue, plan: &CopyPlan, src: &Elements<'_>, dst: &Elements<'_>, on_host: OnHost) -> Result<()> {
    // SAFETY: the makers of `src` and `dst` promised the memory until the stream has done the copy.
    unsafe { between(queue, plan, Side::of(dst), Side::of(src), on_host) }
}

/// Copies the elements of the source to the target, in the order of the queue's stream. The stream is on the target's
/// device, or on the source's if the target is host memory. Work on another device is not waited for. A copy with a
/// pageable side is complete when this returns, and refused in a capture. So is a copy from a GPU whose memory the
/// queue may not read, unless the bytes are contiguous.
///
/// # Safety
/// Both sides are memory as the plan describes it, and stay until the stream has done the copy.
unsafe fn between(queue: &mut Queue, plan: &CopyPlan, target: Side, source: Side, on_host: OnHost) -> Result<()> {
    if plan.loops.count() == 0 {
        return Ok(());
    }
    let data = [target.data, source.data];
    // SAFETY: both sides are memory as the plan describes it and stay until the stream is done, as the caller promises.
    unsafe {
        match (target.place, source.place) {
            (Place::Device(to), Place::Device(from)) if to != from => between_devices(queue, plan, data, from),
            (Place::Device(_), Place::Device(_)) => on_device(queue, plan, data),
            (Place::Device(_) | Place::Pinned, Place::Device(_) | Place::Pinned) => with_pinned(queue, plan, data),
            (_, Place::Pageable) => with_pageable(queue, plan, data, 1, on_host),
            (Place::Pageable, _) => with_pageable(queue, plan, data, 0, on_host),
        }
    }
}

/// Copies if one side is described as pageable. It may still be pinned, for example by cuMemHostRegister.
///
/// # Safety
/// See [`between`].
unsafe fn with_pageable(
    queue: &mut Queue, plan: &CopyPlan, data: [*mut u8; 2], pageable: usize, on_host: OnHost,
) -> Result<()> {
    refuse_capture(queue, "between pageable memory and CUDA")?;
    // SAFETY: both sides are memory as the plan describes it and stay until the stream is done, as the caller promises.
    unsafe {
        if is_pinned(queue, plan, data[pageable], pageable) {
            with_pinned(queue, plan, data)?;
            return queue.wait();
        }
        staged::between_host_and_device(queue, plan, data, pageable, on_host)
    }
}

fn refuse_capture(queue: &mut Queue, what: &str) -> Result<()> {
    if queue.is_capturing()? {
        return Err(error!(
            InvalidArgument,
            "stream: it captures, and a copy {what} is done when the call returns; memory of CUDAHost can be copied in a \
             capture"
        ));
    }
    Ok(())
}

/// Returns the addresses of the first and the last byte of this side, which has at least one.
fn ends(plan: &CopyPlan, data: *mut u8, side: usize) -> [u64; 2] {
    let size = plan.conversion.sizes()[side];
    let mut ends = [plan.starts[side], plan.starts[side] + size - 1];
    for item in plan.loops.as_slice() {
        let reach = (item.count - 1) * item.strides[side];
        ends[usize::from(reach > 0)] += reach;
    }
    ends.map(|end| data.wrapping_offset(end as isize).addr() as u64)
}

/// Returns a pointer attribute of the driver, in the current context. None: the address is unknown to the driver.
fn ask(queue: &Queue, attribute: CUpointer_attribute, address: u64) -> Option<u64> {
    let mut said = 0u64;
    // SAFETY: any address may be queried; `said` has room for the largest attribute that is queried here.
    let code = unsafe {
        (queue.device.driver.functions.cuPointerGetAttribute)(ptr::from_mut(&mut said).cast(), attribute, address)
    };
    // An unknown address is an error of the call, but a valid answer here.
    (code == 0).then_some(said)
}

/// Returns true if GPUs can access all of this side: according to the driver, it lies in one piece of host memory.
fn is_pinned(queue: &Queue, plan: &CopyPlan, data: *mut u8, side: usize) -> bool {
    let [first, last] = ends(plan, data, side);
    let asked = [
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    ];
    match asked.map(|attribute| ask(queue, attribute, first)) {
        [Some(HOST_MEMORY), Some(start), Some(bytes)] => start <= first && last - start < bytes,
        _ => false,
    }
}

/// CU_MEMORYTYPE_HOST.
const HOST_MEMORY: u64 = 1;

/// CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ.
const READ_ACCESS: u64 = 1;

/// Returns true if kernels in the queue's context may read all of the source. Enabled access to its context is not
/// enough: it covers cuMemAlloc's memory there, but neither memory of pools nor memory that is mapped in parts.
fn may_read(queue: &mut Queue, plan: &CopyPlan, source: *mut u8) -> Result<bool> {
    queue.current()?;
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS;
    let may = |end| ask(queue, attribute, end).is_some_and(|access| access & READ_ACCESS != 0);
    Ok(ends(plan, source, 1).into_iter().all(may))
}

/// Copies from the GPU with the number `from` to the queue's GPU.
///
/// # Safety
/// See [`between`].
unsafe fn between_devices(queue: &mut Queue, plan: &CopyPlan, data: [*mut u8; 2], from: i32) -> Result<()> {
    let source = Device::of(from)?;
    if let Some((places, bytes)) = flat(plan, data) {
        // SAFETY: both sides are memory as the plan describes it and stay until the stream is done, as the caller
        // promises.
        return unsafe { copy_from_peer(queue, source, places, bytes) };
    }
    // SAFETY: both sides are memory as the plan describes it and stay until the stream is done, as the caller promises.
    unsafe {
        if reaches(queue, source)? && may_read(queue, plan, data[1])? {
            return launch(queue, plan, data);
        }
        refuse_capture(queue, "between GPUs that do not reach each other's memory")?;
        staged::between_devices(queue, plan, data, from)
    }
}

/// # Safety
/// Both sides have `bytes` bytes, which stay until the stream has done the copy.
unsafe fn copy_from_peer(queue: &mut Queue, source: Device, places: [*mut u8; 2], bytes: usize) -> Result<()> {
    let from = primary(source)?;
    let to = queue.current()?.handle_now()?;
    let (driver, stream) = (queue.device.driver, queue.stream.as_raw().cast());
    let [to_address, from_address] = places.map(|place| place.addr() as u64);
    // SAFETY: the caller promises both sides; both contexts and the stream are alive.
    let code = unsafe { (driver.functions.cuMemcpyPeerAsync)(to_address, to, from_address, from, bytes, stream) };
    driver.check(code, format_args!("cuMemcpyPeerAsync of {bytes} bytes from {source} to {}", queue.device))
}

/// Last device found to be accessible from each context.
static REACHED: LossyCache = LossyCache::nothing();

/// Code: access to the other context's memory is already enabled.
const ALREADY_ENABLED: c_int = 704;
/// Code: access cannot be enabled.
const NOT_SUPPORTED: c_int = 217;
/// Code: access to too many contexts is enabled.
const TOO_MANY: c_int = 711;

/// Returns true if kernels in the queue's context can access another GPU's primary context. Enables it if possible.
fn reaches(queue: &mut Queue, other: Device) -> Result<bool> {
    let id = queue.current()?.id;
    if REACHED.recall(id) == Some(other.ordinal) {
        return Ok(true);
    }
    let (driver, mut can) = (queue.device.driver, 0 as c_int);
    let [here, there] = [queue.device, other].map(|device| device.properties().handle);
    // SAFETY: `can` outlives the call, and the driver listed both devices.
    let code = unsafe { (driver.functions.cuDeviceCanAccessPeer)(&mut can, here, there) };
    driver.check(code, format_args!("cuDeviceCanAccessPeer of {other} by {}", queue.device))?;
    if can == 0 {
        return Ok(false);
    }
    let context = primary(other)?;
    queue.current()?;
    // SAFETY: `context` is alive, and the current context is another one, of another device.
    let code = unsafe { (driver.functions.cuCtxEnablePeerAccess)(context, 0) };
    match code {
        NOT_SUPPORTED | TOO_MANY => return Ok(false),
        0 | ALREADY_ENABLED => {}
        code => driver.check(code, format_args!("cuCtxEnablePeerAccess to {other} on {}", queue.device))?,
    }
    REACHED.remember(id, other.ordinal);
    Ok(true)
}
