//! SHARING
//!
//! Passes a tensor to another process on this host, over a connected Unix stream socket of yours (socketpair(), or
//! connect()).
//!
//! ```c
//! gc_share_t *lease;                                          // here
//! gc_share_send(tensor, socket, 0, 1000, &lease);              // no flags; waits for at most 1000 ms
//! gc_share_wait(lease, -1);                                    // without limit, until it is released there
//! gc_share_free(lease);
//!
//! DLDevice cpu = {kDLCPU, 0};                                 // in the other process
//! DLManagedTensor *tensor;
//! gc_share_receive(socket, cpu, 1000, &tensor);
//! gc_tensor_free(tensor);
//! ```
//!
//! A tensor on the CPU or CUDAHost is sent as a copy, in memory that both processes can map and that contains nothing
//! else. The copy is made once, on the sender's side, and mapped by the receiver. Later writes of one side are not
//! visible to the other.
//!
//! A CUDA tensor is sent as the memory itself, without a copy: the writes of each side are visible to the other, and
//! both must order their work by means of their own. gc_share_send() waits for the work that was enqueued before it in
//! the context that simple functions use (see CUDA). gc_tensor_free() of the receiver's tensor does the same before it
//! notifies the sender. After a share of this library's memory has ended, gc_share_wait() frees the memory, or else the
//! next call that makes a tensor on the GPU, such as gc_tensor_empty(); these calls wait, too. So make none of them
//! between the launches of a collective on several GPUs. If gc_tensor_free() cannot wait, because a stream of the
//! context captures or memory is short, the memory stays mapped. The sender is then notified only when the receiver's
//! process ends. CUDA shares whole allocations: the receiver could read and write all of the tensor's allocation, with
//! other tensors that a pool such as PyTorch's has put there. For small allocations of cuMemAlloc, it could also access
//! the allocations beside them. GC_SHARE_COPY sends a copy instead, in memory that contains nothing else.
//!
//! ```text
//! cuMemAlloc: cudaMalloc, PyTorch, CuPy, gc_tensor_empty()      by its handle (cuIpcGetMemHandle)
//! cuMemCreate with POSIX file descriptors: PyTorch's            part by part, up to 4096, each a descriptor
//!     expandable segments
//! pools (cuMemAllocAsync), managed memory, memory of the host   not at all; GC_SHARE_COPY sends a copy
//! ```
//!
//! The sender must keep its tensor, and its process must live, until gc_share_wait() reports that the receiver has
//! released the tensor. If the memory is freed or reused before, so is the receiver's. Memory of this library is kept
//! automatically, also after its tensor is released. It is freed when the share has ended, and never used for another
//! tensor. Without a lease, it is never freed, and a descriptor of this process stays open until the receiver has
//! answered and a later gc_share_send() or gc_share_free() finds the answer. A copy by GC_SHARE_COPY need not be kept.
//!
//! `socket`: a connected AF_UNIX socket of type SOCK_STREAM, blocking or not. Your own messages may precede and follow
//! a message of these functions, which carries one descriptor or more. No byte beyond it is read, and no SIGPIPE is
//! raised. One thread at a time may send on a socket, and one may receive.
//!
//! `timeout_ms`: the time in ms that a call may wait for the other side; 0: do not wait; negative: without limit.
//! TIMEOUT: the other side did not answer in time. A message normally passes whole or not at all, and then the socket
//! is as it was. If only a part of it has passed, or if it was CORRUPT, neither side can use the socket any more. The
//! same applies if the memory has more than 252 parts, whose descriptors pass 253 at a time, and the system accepts the
//! first descriptors and refuses others (SHARE: ETOOMANYREFS, too many in flight). gc_share_wait() does not use the
//! socket. The timeout does not limit calls of the CUDA driver, nor the work that they wait for. Nor does it limit the
//! closing of unwanted descriptors whose close() waits: of a socket with SO_LINGER, or of a file of FUSE.
//!
//! Messages are not trusted: sizes, strides, dtype and descriptors are checked before memory is mapped, and the
//! descriptors of a rejected message are closed. But a sender other than this library may go on changing the elements,
//! so check their values in a copy.

use std::ffi::c_int;

use dlpark::ffi::{DLDevice, DLManagedTensor};

use crate::{
    dlpack::{Device, input},
    ffi::{api::gc_status_t, borrow::Out, error::error, handle, name::Name, panics::boundary},
    share,
};

use super::{
    Lease, Parcel,
    socket::{BorrowedSocket, Deadline},
};

/// Lease of a tensor that was sent: gc_share_send() makes it.
pub struct gc_share_t(Lease);

/// Flags of gc_share_send().
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareFlag {
    /// Send a copy, in memory that contains nothing else: on the CPU always, on CUDA of memory of any kind.
    Copy = 1,
}

/// Sends a tensor to another process. Returns when the message is written; gc_share_wait() reports whether the other
/// side accepted it.
///
/// `tensor`: of any dtype, with any strides; elements of less than a byte that are copied must be C-contiguous. On CPU
/// or CUDAHost, it is copied, and yours again when this returns. On CUDA, the receiver's tensor has the same strides;
/// keep yours until it is released there. `flags`: 0 or GC_SHARE_COPY, with which the receiver's tensor is compact.
/// `*lease`: yours to release, by gc_share_free(); `lease` may be NULL if you do not wait.
///
/// - GC_STATUS_INVALID_ARGUMENT: the socket does not exist; a flag is unknown; there are more than 64 dimensions; or
///   elements lie outside the allocation of element 0.
/// - GC_STATUS_UNSUPPORTED_DEVICE: the device is not supported.
/// - GC_STATUS_SIZE_OVERFLOW: the copy would have more than 2^63 - 1 bytes.
/// - GC_STATUS_NOT_CONTIGUOUS: elements of less than a byte are not C-contiguous.
/// - GC_STATUS_OUT_OF_MEMORY: memory could not be allocated.
/// - GC_STATUS_SHARE: the other side has closed the socket, the system refused, or memory of this kind cannot be
///   shared; the message names an alternative.
/// - GC_STATUS_TIMEOUT: the other side did not answer within `timeout_ms`.
/// - GC_STATUS_CUDA, GC_STATUS_CONTEXT_LOST: the driver failed.
///
/// A copy on the CPU counts as a file: RLIMIT_FSIZE and its SIGXFSZ apply.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_share_send(
    tensor: *const DLManagedTensor, socket: c_int, flags: u32, timeout_ms: i32, lease: *mut *mut gc_share_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor of its own, and room for a pointer.
        let (tensor, lease) = unsafe {
            let lease: Option<Out<*mut gc_share_t>> =
                if lease.is_null() { None } else { Some(Out::one("lease", lease)?) };
            (input::described("tensor", tensor)?, lease)
        };
        const COPY: u32 = ShareFlag::Copy as u32;
        if flags & !COPY != 0 {
            return Err(error!(InvalidArgument, "flags: {flags:#x}; 0 or GC_SHARE_COPY {COPY} expected"));
        }
        let (socket, parcel) = (BorrowedSocket::new(socket)?, Parcel::new(&tensor, flags & COPY != 0)?);
        let sent = parcel.send(socket, Deadline::after(timeout_ms))?;
        match lease {
            Some(lease) => lease.fill([handle::hand_out(gc_share_t(sent))]),
            None => sent.give_up(),
        }
        Ok(())
    })
}

/// Waits until the receiver has released a tensor and all that it made from it. May be called any number of times, on
/// any thread. Then frees CUDA memory of this library that was kept for the tensor, which waits for the work of its
/// context.
///
/// - GC_STATUS_TIMEOUT: the receiver has not released the tensor within `timeout_ms`.
/// - GC_STATUS_SHARE: the receiver refused the tensor (the message has the reason), or it ended without releasing the
///   tensor. A receiver has ended when its children that inherited the tensor have ended, too, and those of the sender
///   that were forked during gc_share_send().
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_share_wait(lease: *mut gc_share_t, timeout_ms: i32) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a lease.
        unsafe { handle::borrow("lease", lease)? }.0.wait(Deadline::after(timeout_ms))
    })
}

/// Releases the lease that gc_share_send() made. No thread may be using it, in gc_share_wait() or otherwise. NULL is
/// ignored. Does not wait, and the receiver keeps its tensor. CUDA memory of this library is kept as long; once the
/// receiver has released the tensor, the next gc_share_send() or gc_share_free() finds that.
///
/// # Safety
/// The pointer is as described, and no thread uses the lease.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_share_free(lease: *mut gc_share_t) {
    boundary(|| {
        // SAFETY: the caller promises NULL, or a lease that no thread uses.
        unsafe { handle::release(lease) };
        Ok(())
    });
}

/// Receives the next tensor, which is writable. On the CPU: compact, with the elements at the time of sending. On CUDA:
/// the sender's memory, mapped here, with the sender's strides; several tensors of one allocation of cuMemAlloc() have
/// one mapping.
///
/// `device`: {kDLCPU, 0}, or {kDLCUDA, n}, the GPU for which the memory is mapped and which is the tensor's device: the
/// sender's GPU or one that can access its memory, however each process numbers them. `*out`: yours to release, which
/// notifies the sender; on CUDA, the release waits for the work of the context in which it was received. A forked child
/// of the receiver shares CPU memory. Its release does not notify the sender, unless the child has the receiver's
/// process id in another PID namespace. In the process that sent it, the tensor is the same memory, on the same device.
///
/// - GC_STATUS_INVALID_ARGUMENT: the socket does not exist, or `device` has another type than the sender's.
/// - GC_STATUS_UNSUPPORTED_DEVICE: `device` does not exist, or cannot access the memory of the sender's.
/// - GC_STATUS_CORRUPT: the bytes are not a message of this version.
/// - GC_STATUS_SHARE: the other side has closed the socket, this process cannot open more descriptors, or the driver
///   cannot map the memory.
/// - GC_STATUS_TIMEOUT: the other side did not answer within `timeout_ms`.
/// - GC_STATUS_OUT_OF_MEMORY: memory could not be allocated.
/// - GC_STATUS_CUDA: the driver failed.
/// - GC_STATUS_CONTEXT_LOST: the context can no longer be used.
///
/// A message that is refused is removed from the socket, and the sender is notified.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_share_receive(
    socket: c_int, device: DLDevice, timeout_ms: i32, out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises room for a pointer.
        let out = unsafe { Out::one("out", out)? };
        let device = Device::from_dlpack(&Name::new("device"), device)?;
        let received = share::receive(BorrowedSocket::new(socket)?, device, Deadline::after(timeout_ms));
        out.fill(received?.into_raw());
        Ok(())
    })
}
