//! SHARING
//!
//! A tensor for another process of this machine, over a connected Unix stream socket of yours (socketpair(), or connect()).
//!
//! ```c
//! gc_share_t *lease;                                          // here
//! gc_share_send(tensor, socket, 0, 1000, &lease);
//! gc_share_wait(lease, -1);
//! gc_share_free(lease);
//!
//! DLDevice cpu = {kDLCPU, 0};                                 // in the other process
//! DLManagedTensor *tensor;
//! gc_share_receive(socket, cpu, 1000, &tensor);
//! gc_tensor_free(tensor);
//! ```
//!
//! What is sent is a copy, in memory that both processes can have and that holds nothing else; it is made once, on the
//! sender's side, and mapped by the receiver. What one side writes afterwards the other does not see. This version shares
//! memory of the CPU and CUDAHost; tensors on CUDA are refused.
//!
//! `socket`: SOCK_STREAM of AF_UNIX, connected; blocking or not, as you like. A message of these functions lies on it between
//! yours, with two descriptors; no byte beyond it is read, and no SIGPIPE is raised. One thread at a time sends on a socket,
//! and one receives.
//!
//! `timeout_ms`: how long a call may wait for the other side; 0: only for what is there; negative: without end. TIMEOUT: it was
//! too short. A message normally passes whole or not at all, and then the socket is as it was; but if only a part of it has
//! passed, or if it was CORRUPT, the socket is of no use to both sides. gc_share_wait() does not touch the socket.
//!
//! What comes is believed no more than a stranger's word: sizes, dtype and descriptors are checked before anything is
//! mapped, and descriptors of what is refused are closed. But a sender that is not this library may go on changing the
//! elements: whoever checks what they say checks a copy.

use std::ffi::c_int;

use dlpark::ffi::{DLDevice, DLManagedTensor};

use crate::{
    error::error,
    panics::boundary,
    share::{self, BorrowedSocket, Lease, Parcel, Patience},
    tensor::{Device, Name},
};

use super::{
    borrow::{self, Out},
    handle::{self, Place},
    status::gc_status_t,
};

/// What the sender keeps of a tensor that it has sent: gc_share_send() makes it.
#[allow(non_camel_case_types, reason = "the name in the header")]
pub struct gc_share_t(Lease);

/// How a tensor is shared.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareFlag {
    /// As a copy, so that nothing else can be seen. On the CPU it always is one.
    Copy = 1,
}

/// Sends a tensor. Returns when its message is written; whether the other side takes it shows in gc_share_wait().
///
/// `tensor`: of any dtype, on CPU or CUDAHost, with any strides; elements of less than a byte must be C-contiguous. It is
/// copied, and yours again when this returns. `flags`: 0 or GC_SHARE_COPY. `*lease`: yours to release, by gc_share_free();
/// `lease` may be NULL if nobody is to wait.
///
/// INVALID_ARGUMENT: no such socket; an unknown flag; more than 64 dimensions. UNSUPPORTED_DEVICE: on CUDA or elsewhere.
/// SIZE_OVERFLOW: the copy would have more than 2^63 - 1 bytes. NOT_CONTIGUOUS, OUT_OF_MEMORY. SHARE: the other side has
/// closed the socket, or the system refuses. TIMEOUT. The copy counts as a file: RLIMIT_FSIZE and its SIGXFSZ apply.
///
/// # Safety
/// The pointers are as described.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_share_send(
    tensor: *const DLManagedTensor,
    socket: c_int,
    flags: u32,
    timeout_ms: i32,
    lease: *mut *mut gc_share_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor of its own, and room for a pointer.
        let (tensor, lease) = unsafe {
            let lease: Option<Out<*mut gc_share_t>> =
                if lease.is_null() { None } else { Some(Out::one("lease", lease)?) };
            (borrow::described("tensor", tensor)?, lease)
        };
        const COPY: u32 = ShareFlag::Copy as u32;
        if flags & !COPY != 0 {
            return Err(error!(InvalidArgument, "flags: {flags:#x}; 0 or GC_SHARE_COPY {COPY} expected"));
        }
        let (socket, parcel) = (BorrowedSocket::new(socket)?, Parcel::new(&tensor, flags & COPY != 0)?);
        // Once the message is written, nothing may fail.
        let place = lease.map(|lease| Place::new().map(|place| (lease, place))).transpose()?;
        let sent = parcel.send(socket, Patience::of_milliseconds(timeout_ms))?;
        match place {
            Some((lease, place)) => lease.fill([place.hand_out(gc_share_t(sent))]),
            None => sent.give_up(),
        }
        Ok(())
    })
}

/// Waits until the receiver has released a tensor, with all that it made of it. Any number of times, on any thread.
///
/// TIMEOUT: it has not. SHARE: it refused the tensor, for the reason that is said, or it ended without releasing it; that it
/// ended shows when its children that inherited the tensor have ended, too.
///
/// # Safety
/// The pointer is as described.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_share_wait(lease: *mut gc_share_t, timeout_ms: i32) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a lease.
        unsafe { handle::borrow("lease", lease)? }.0.wait(Patience::of_milliseconds(timeout_ms))
    })
}

/// Releases what gc_share_send() made; NULL: nothing. It does not wait, and the receiver keeps its tensor.
///
/// # Safety
/// As described; nothing waits for it.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_share_free(lease: *mut gc_share_t) {
    boundary(|| {
        // SAFETY: the caller's promise.
        unsafe { handle::release(lease) };
        Ok(())
    });
}

/// Receives the tensor that comes next: compact, writable, its elements as they were when it was sent.
///
/// `device`: {kDLCPU, 0}. `*out`: yours to release, which tells the sender; a child that is forked meanwhile has the same
/// memory, and its release tells nobody.
///
/// INVALID_ARGUMENT: no such socket; a device of another type than the sender's. UNSUPPORTED_DEVICE: one that is not ours.
/// CORRUPT: no message of this version. SHARE: the other side has closed the socket, or this process can have no more
/// descriptors. TIMEOUT, OUT_OF_MEMORY. A message that was refused, for its device or for want of memory, has been taken.
///
/// # Safety
/// The pointer is as described.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_share_receive(
    socket: c_int,
    device: DLDevice,
    timeout_ms: i32,
    out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises room for a pointer.
        let out = unsafe { Out::one("out", out)? };
        let device = Device::from_dlpack(&Name::new("device"), device)?;
        let received = share::receive(BorrowedSocket::new(socket)?, device, Patience::of_milliseconds(timeout_ms));
        out.fill(received?.into_raw());
        Ok(())
    })
}
