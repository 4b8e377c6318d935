//! NCCL
//!
//! A communicator over NCCL: over your own ncclComm_t, such as PyTorch's, for which NCCL 2.18 suffices, or over a new
//! one, which needs 2.19.1. This library is not linked against NCCL. It uses the NCCL that the process has loaded:
//!
//! ```c
//! gc_nccl_options_t mine = {.struct_size = sizeof mine, .comm = my_nccl_comm};
//! gc_comm_t *comm;
//! gc_comm_from_nccl(&mine, &comm);                                        // borrowed: keep my_nccl_comm alive
//!
//! gc_nccl_options_t none = {.struct_size = sizeof none};
//! uint8_t id[128];
//! if (rank == 0) gc_comm_nccl_id(&none, id);                              // and send it to the others, as you like
//! gc_comm_from_nccl_id(&none, id, rank, size, (DLDevice){kDLCUDA, gpu}, &comm);      // on every rank
//! ```
//!
//! It exchanges memory of one CUDA device, in that device's primary context, on the stream of the call, and calls can
//! be captured. Tensors on the CPU give UNSUPPORTED_DEVICE. Two ranks cannot share a device. Do not make calls between
//! your ncclGroupStart and ncclGroupEnd. If the host waits for a non-blocking communicator of NCCL, or for the other
//! ranks when an all-reduce is created, the call gives TIMEOUT after timeout_ms. The communicator is then unusable, as
//! it is after gc_comm_abort(), which ends such waits with COMM.
//!
//! The GPU waits for a lost rank until NCCL's communicator is aborted. gc_comm_async_error() queries NCCL's state. You
//! must abort your own communicator yourself, by ncclCommAbort(). One that this library has created does not block, and
//! gc_comm_abort() aborts it at any time. When it and all that was created from it are released, it is aborted instead
//! of destroyed if NCCL has reported an error or a call has given TIMEOUT. The memory of all-reduces that are released
//! after a TIMEOUT is kept until the process ends.
//!
//! This library uses the NCCL of dl_handle, if you pass one, which must stay open; otherwise the one where this process
//! finds ncclSend; otherwise a loaded libnccl.so.2. Some builds of PyTorch have NCCL within another library. If several
//! libraries have ncclSend, a borrowed communicator needs dl_handle (otherwise COMM_UNAVAILABLE), since it works only
//! in the one that made it.

use std::{ffi::c_void, mem::offset_of, ops::Range};

use dlpark::ffi::DLDevice;

use crate::{
    comm::{
        communicator::Communicator,
        transport::{ID_BYTES, Nccl},
    },
    dlpack::Device,
    ffi::{
        api::gc_status_t,
        borrow::{self, Count, Out},
        error::{Result, error},
        name::Name,
        panics::boundary,
    },
};

use super::comm::{gc_comm_t, hand_out};

/// NCCL communicator, and NCCL library, to use.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gc_nccl_options_t {
    /// Set by you: sizeof(gc_nccl_options_t).
    pub struct_size: u32,
    /// Flags: 0, or GC_NCCL_SPLIT.
    pub flags: u32,
    /// An ncclComm_t, for gc_comm_from_nccl(); NULL for the other functions.
    pub comm: *mut c_void,
    /// Handle of NCCL, from dlopen(). NULL: the NCCL that is loaded.
    pub dl_handle: *mut c_void,
    /// Longest wait of a call for NCCL on the host, in milliseconds; 0: 10 minutes.
    pub timeout_ms: u32,
    /// Reserved; must be 0.
    pub reserved: u32,
}

// SAFETY: the fields are numbers and pointers, without padding.
unsafe impl borrow::Extensible for gc_nccl_options_t {
    const FIRST_SIZE: usize = 32;
    const RESERVED: Range<usize> = offset_of!(Self, reserved)..size_of::<Self>();
}

/// Bytes of the id of gc_comm_nccl_id().
pub const GC_NCCL_ID_BYTES: usize = 128;
const _: () = assert!(GC_NCCL_ID_BYTES == ID_BYTES);

/// Use of an ncclComm_t.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NcclFlag {
    /// Splits a communicator of all its ranks from it, so that calls on the two need not be ordered.
    Split = 1,
}

/// Creates a communicator over an NCCL communicator of yours. Its rank, world size and device are those of `comm`.
///
/// Without a flag `comm` is borrowed. It must stay until gc_comm_free() and until the last all-reduce over it is
/// released, and is never destroyed here. You must order your own calls on it and calls of this library that use it, in
/// the same way on every rank. With GC_NCCL_SPLIT all ranks must call this, and block until all do. `comm` must then
/// have no running work that waits for another rank, and this library does not use it afterwards. The call also waits
/// until a non-blocking `comm` is initialized.
///
/// `*out`: yours to release, by gc_comm_free().
///
/// - GC_STATUS_INVALID_ARGUMENT: `comm` is NULL, or a flag is unknown.
/// - GC_STATUS_COMM_UNAVAILABLE: NCCL is not loaded, is older than 2.18 (2.19.1 with GC_NCCL_SPLIT), or several
///   libraries have ncclSend.
/// - GC_STATUS_COMM: NCCL failed.
/// - GC_STATUS_TIMEOUT: NCCL did not finish within timeout_ms.
/// - All errors of a tensor on the device of `comm`.
///
/// # Safety
/// The pointers are as described: comm is a communicator of the library that dl_handle or the process has.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_from_nccl(options: *const gc_nccl_options_t, out: *mut *mut gc_comm_t) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises options of `struct_size` bytes, and room for a pointer.
        let (options, out) = unsafe { (borrow::options("options", options)?, Out::one("out", out)?) };
        const SPLIT: u32 = NcclFlag::Split as u32;
        let gc_nccl_options_t { flags, comm, dl_handle, timeout_ms, .. } = options;
        if flags & !SPLIT != 0 {
            return Err(error!(InvalidArgument, "options: flags {flags:#x}; 0 or GC_NCCL_SPLIT {SPLIT} expected"));
        }
        if comm.is_null() {
            return Err(error!(InvalidArgument, "options: comm is NULL"));
        }
        // SAFETY: the caller promises that `comm` is a communicator of this NCCL, and that both stay.
        let nccl = unsafe { Nccl::of_comm(dl_handle, comm, flags & SPLIT != 0, timeout_ms)? };
        hand_out(out, Communicator::over(nccl));
        Ok(())
    })
}

/// Creates the GC_NCCL_ID_BYTES bytes by which the ranks of a new NCCL world find each other. One rank calls this, and
/// sends the bytes to all others.
///
/// `options`: comm NULL and flags 0. `id`: room for GC_NCCL_ID_BYTES bytes.
///
/// Loads libnccl.so.2 if no NCCL is loaded.
///
/// - GC_STATUS_INVALID_ARGUMENT: `comm` is not NULL, or flags are not 0.
/// - GC_STATUS_COMM_UNAVAILABLE: NCCL is not found, or older than 2.19.1.
/// - GC_STATUS_COMM: NCCL failed.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_nccl_id(options: *const gc_nccl_options_t, id: *mut u8) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises options of `struct_size` bytes, and room for an id.
        let (options, id) =
            unsafe { (borrow::options("options", options)?, Out::several("id", id, Count::of("id", ID_BYTES))?) };
        // SAFETY: the caller promises that dl_handle is NULL or open.
        id.fill(unsafe { Nccl::new_id(handle_alone(&options)?)? });
        Ok(())
    })
}

/// Creates a new communicator over NCCL, from the bytes of gc_comm_nccl_id(). All ranks of a world must call this, and
/// block until all do. gc_comm_free() destroys NCCL's communicator.
///
/// `options`: as for gc_comm_nccl_id(). `id`: the bytes that it gave on one rank. `device`: this rank's CUDA device.
/// `*out`: yours to release, by gc_comm_free().
///
/// - All errors of gc_comm_nccl_id().
/// - GC_STATUS_INVALID_ARGUMENT: `rank` is not within 0 to world_size - 1.
/// - GC_STATUS_UNSUPPORTED_DEVICE: `device` is not CUDA.
/// - GC_STATUS_TIMEOUT: not all ranks called within timeout_ms.
/// - All errors of a tensor on the device.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_from_nccl_id(
    options: *const gc_nccl_options_t, id: *const u8, rank: i32, world_size: i32, device: DLDevice,
    out: *mut *mut gc_comm_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises options of `struct_size` bytes, an id, and room for a pointer.
        let (options, id, out) = unsafe {
            borrow::check(&Name::new("id"), id)?;
            (borrow::options("options", options)?, &*id.cast::<[u8; ID_BYTES]>(), Out::one("out", out)?)
        };
        let device = Device::from_dlpack(&Name::new("device"), device)?;
        // SAFETY: the caller promises that dl_handle is NULL or open, and stays open.
        let nccl = unsafe { Nccl::of_id(handle_alone(&options)?, id, rank, world_size, device, options.timeout_ms)? };
        hand_out(out, Communicator::over(nccl));
        Ok(())
    })
}

/// Returns dl_handle, and refuses options in which flags or comm are set.
fn handle_alone(options: &gc_nccl_options_t) -> Result<*mut c_void> {
    if options.flags != 0 || !options.comm.is_null() {
        return Err(error!(
            InvalidArgument,
            "options: flags {:#x} and comm {:p}; 0 and NULL expected, for a world is made anew",
            options.flags,
            options.comm
        ));
    }
    Ok(options.dl_handle)
}
