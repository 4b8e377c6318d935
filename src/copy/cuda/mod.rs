//! Copies and casts between the memory of GPUs, and between that and the memory of the host.
//!
//! | from, to | contiguous, without a cast | otherwise |
//! |---|---|---|
//! | one GPU, or it and pinned memory | cuMemcpyAsync | a kernel, which reads and writes pinned memory itself |
//! | two GPUs | cuMemcpyPeerAsync | a kernel of the target's GPU, if it may read the source; else staged |
//! | pageable memory and a GPU | staged | staged |
//!
//! What is staged (staged.rs) goes through pinned memory of the library's own, in pieces, and is done when the call
//! returns.

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

/// One side of a copy: on which device, and where its element 0 lies.
struct Side {
    place: Place,
    data: *mut u8,
}

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Of the host, and GPUs do not reach it.
    Pageable,
    /// Of the host, and GPUs reach it: CUDAHost.
    Pinned,
    /// Of the device with this number.
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

/// Copies the elements of `src` to those of `dst`. `plan` was made of these two. `on_host`: what does the CPU's part.
pub fn copy(queue: &mut Queue, plan: &CopyPlan, src: &Elements<'_>, dst: &Elements<'_>, on_host: OnHost) -> Result<()> {
    // SAFETY: the makers of the two vouched for the memory, until the stream has done it.
    unsafe { between(queue, plan, Side::of(dst), Side::of(src), on_host) }
}

/// Copies the elements of the source to those of the target, in the order of the queue's stream, which is on the
/// target's device, or on the source's where the target is memory of the host. What runs on another device is not
/// waited for. Where one side is pageable, or a GPU may not read another one's memory and the copy is not of contiguous
/// bytes, all is done when this returns, and in a capture it refuses.
///
/// # Safety
/// Both sides are such memory as the plan describes, and stay until the stream has done it.
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

/// One side is said to be pageable. It may be pinned all the same, by cuMemHostRegister for instance.
///
/// # Safety
/// As for [`between`].
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

/// The addresses of the first and of the last byte of this side, of which there is at least one.
fn ends(plan: &CopyPlan, data: *mut u8, side: usize) -> [u64; 2] {
    let size = plan.conversion.sizes()[side];
    let mut ends = [plan.starts[side], plan.starts[side] + size - 1];
    for item in plan.loops.as_slice() {
        let reach = (item.count - 1) * item.strides[side];
        ends[usize::from(reach > 0)] += reach;
    }
    ends.map(|end| data.wrapping_offset(end as isize).addr() as u64)
}

/// What the driver says of memory, in the context that is current; None of what it does not know.
fn ask(queue: &Queue, attribute: CUpointer_attribute, address: u64) -> Option<u64> {
    let mut said = 0u64;
    // SAFETY: any address may be asked for; the place has room for the largest of what is asked here.
    let code = unsafe {
        (queue.device.driver.functions.cuPointerGetAttribute)(ptr::from_mut(&mut said).cast(), attribute, address)
    };
    // An address that it does not know is an error to it, and an answer to us.
    (code == 0).then_some(said)
}

/// Whether GPUs reach all of this side: it lies in one piece of memory of which the driver says so.
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

/// Whether kernels in the queue's context may read all of the source. To enable access to a context is not enough: that
/// covers what cuMemAlloc made there, but no memory of pools, nor what is mapped by parts.
fn may_read(queue: &mut Queue, plan: &CopyPlan, source: *mut u8) -> Result<bool> {
    queue.current()?;
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS;
    let may = |end| ask(queue, attribute, end).is_some_and(|access| access & READ_ACCESS != 0);
    Ok(ends(plan, source, 1).into_iter().all(may))
}

/// From another GPU, the one with the number `from`, to the queue's.
///
/// # Safety
/// As for [`between`].
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
/// So many bytes are there on both sides, and stay until the stream has done it.
unsafe fn copy_from_peer(queue: &mut Queue, source: Device, places: [*mut u8; 2], bytes: usize) -> Result<()> {
    let from = primary(source)?;
    let to = queue.current()?.handle_now()?;
    let (driver, stream) = (queue.device.driver, queue.stream.as_raw().cast());
    let [to_address, from_address] = places.map(|place| place.addr() as u64);
    // SAFETY: the caller's promise; both contexts and the stream are alive.
    let code = unsafe { (driver.functions.cuMemcpyPeerAsync)(to_address, to, from_address, from, bytes, stream) };
    driver.check(code, format_args!("cuMemcpyPeerAsync of {bytes} bytes from {source} to {}", queue.device))
}

/// The device that a context was last seen to reach.
static REACHED: LossyCache = LossyCache::nothing();

/// The memory of the other is enabled for the context already.
const ALREADY_ENABLED: c_int = 704;
/// It cannot be.
const NOT_SUPPORTED: c_int = 217;
/// Too many others are.
const TOO_MANY: c_int = 711;

/// Whether kernels in the queue's context reach memory of another GPU's primary context. Makes it so if it can be.
fn reaches(queue: &mut Queue, other: Device) -> Result<bool> {
    let id = queue.current()?.id;
    if REACHED.recall(id) == Some(other.ordinal) {
        return Ok(true);
    }
    let (driver, mut can) = (queue.device.driver, 0 as c_int);
    let [here, there] = [queue.device, other].map(|device| device.properties().handle);
    // SAFETY: the place outlives the call; both are devices of the driver's.
    let code = unsafe { (driver.functions.cuDeviceCanAccessPeer)(&mut can, here, there) };
    driver.check(code, format_args!("cuDeviceCanAccessPeer of {other} by {}", queue.device))?;
    if can == 0 {
        return Ok(false);
    }
    let context = primary(other)?;
    queue.current()?;
    // SAFETY: a context that is alive, and another one of another device is current.
    let code = unsafe { (driver.functions.cuCtxEnablePeerAccess)(context, 0) };
    match code {
        NOT_SUPPORTED | TOO_MANY => return Ok(false),
        0 | ALREADY_ENABLED => {}
        code => driver.check(code, format_args!("cuCtxEnablePeerAccess to {other} on {}", queue.device))?,
    }
    REACHED.remember(id, other.ordinal);
    Ok(true)
}
