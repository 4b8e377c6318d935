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
//! A tensor on the CPU or CUDAHost is sent as a copy, in memory that both processes can map and that holds nothing
//! else. The copy is made once, on the sender's side, and mapped by the receiver. Neither side sees what the other
//! writes afterwards.
//!
//! A CUDA tensor is sent as the memory itself, and nothing is copied: each side sees what the other writes, and the two
//! have to order their work by means of their own. gc_share_send() waits for the work that was enqueued before it in
//! the context that simple functions work in (see CUDA), and gc_tensor_free() of the receiver's tensor does so before
//! it tells the sender. Once a share of this library's memory has ended, gc_share_wait() frees that, or else the next
//! call that makes a tensor on the GPU, such as gc_tensor_empty(): these wait, too. So none of them may stand between
//! the launches of a collective on several GPUs. Where gc_tensor_free() cannot wait, for a stream of the context
//! captures or memory is short, the memory stays mapped, and the sender hears only when the receiver's process ends.
//! CUDA gives memory away as a whole: the receiver could read and write all of the allocation that the tensor is in,
//! with the tensors of others that a pool such as PyTorch's has put there, and for small ones of cuMemAlloc also the
//! allocations beside it. GC_SHARE_COPY sends a copy instead, in memory that holds nothing else.
//!
//! ```text
//! cuMemAlloc: cudaMalloc, PyTorch, CuPy, gc_tensor_empty()      by its handle (cuIpcGetMemHandle)
//! cuMemCreate with POSIX file descriptors: PyTorch's            part by part, up to 4096, each a descriptor
//!     expandable segments
//! pools (cuMemAllocAsync), managed memory, memory of the host   not at all; GC_SHARE_COPY sends a copy
//! ```
//!
//! The sender keeps its tensor until gc_share_wait() says that the receiver has released it: if it is freed or used for
//! something else before, that happens to the receiver's tensor. The sender's process must live as long, too. Memory of
//! this library stays by itself, when its tensor is released, too; it is freed afterwards, and never used for another
//! tensor. Without a lease it is never freed, and a descriptor of this process stays open until the receiver has
//! answered and a later gc_share_send() or gc_share_free() finds that. A copy by GC_SHARE_COPY needs nobody to keep it.
//!
//! `socket`: SOCK_STREAM of AF_UNIX, connected; blocking or not, as you like. A message of these functions lies on it
//! between yours, with one descriptor or more; no byte beyond it is read, and no SIGPIPE is raised. One thread at a
//! time sends on a socket, and one receives.
//!
//! `timeout_ms`: how long a call may wait for the other side; 0: do not wait; negative: without limit. TIMEOUT: the
//! other side did not answer in time. A message normally passes whole or not at all, and then the socket is as it was;
//! but if only a part of it has passed, or if it was CORRUPT, neither side can use the socket any more. The same
//! happens if the memory has more than 252 parts, whose descriptors pass 253 at a time, and the system takes the first
//! of them and refuses others (SHARE: ETOOMANYREFS, of too many on their way). gc_share_wait() does not touch the
//! socket. The time of the CUDA driver's calls, and of the work that these wait for, is not limited. Neither is that of
//! closing descriptors that were sent and are not wanted, if they are of files whose close() waits: a socket with
//! SO_LINGER, a file of FUSE.
//!
//! Messages are not trusted: sizes, strides, dtype and descriptors are checked before memory is mapped, and the
//! descriptors of a rejected message are closed. But a sender that is not this library may go on changing the elements:
//! whoever checks what they say checks a copy.

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

/// What the sender keeps of a tensor that it has sent: gc_share_send() makes it.
pub struct gc_share_t(Lease);

/// How a tensor is shared.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareFlag {
    /// As a copy, so that nothing else can be seen. On the CPU it always is one. On CUDA it is of memory of any kind.
    Copy = 1,
}

/// Sends a tensor to another process. It returns when its message is written; gc_share_wait() says whether the other
/// side took it.
///
/// `tensor`: of any dtype, with any strides; elements of less than a byte that are copied must be C-contiguous. On CPU
/// or CUDAHost it is copied, and yours again when this returns. On CUDA: the receiver's has its strides; keep it until
/// it is released there. `flags`: 0 or GC_SHARE_COPY: the receiver's tensor is compact then. `*lease`: yours to
/// release, by gc_share_free(); `lease` may be NULL if nobody is to wait.
///
/// - GC_STATUS_INVALID_ARGUMENT: the socket does not exist; a flag is unknown; there are more than 64 dimensions; or
///   elements lie outside the allocation of element 0.
/// - GC_STATUS_UNSUPPORTED_DEVICE: the device is not supported.
/// - GC_STATUS_SIZE_OVERFLOW: the copy would have more than 2^63 - 1 bytes.
/// - GC_STATUS_NOT_CONTIGUOUS: elements of less than a byte are not C-contiguous.
/// - GC_STATUS_OUT_OF_MEMORY: memory could not be allocated.
/// - GC_STATUS_SHARE: the other side has closed the socket, the system refused, or memory of this kind cannot be shared;
///   the message says what to do instead.
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

/// Waits until the receiver has released a tensor, with all that it made from it. It may be called any number of times,
/// on any thread. Memory of this library on CUDA that was kept for it is then freed, which waits for the work of its
/// context.
///
/// - GC_STATUS_TIMEOUT: the receiver has not released the tensor within `timeout_ms`.
/// - GC_STATUS_SHARE: the receiver refused the tensor (the message has the reason), or it ended without releasing the
///   tensor. A receiver has ended when its children that inherited the tensor have ended, too.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_share_wait(lease: *mut gc_share_t, timeout_ms: i32) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a lease.
        unsafe { handle::borrow("lease", lease)? }.0.wait(Deadline::after(timeout_ms))
    })
}

/// Releases the lease that gc_share_send() made. No thread may be using it, in gc_share_wait() or otherwise. NULL is
/// ignored. It does not wait, and the receiver keeps its tensor. Memory of this library on CUDA stays as long; once the
/// receiver has released it, the next gc_share_send() or gc_share_free() finds that.
///
/// # Safety
/// As described; nothing waits for it.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_share_free(lease: *mut gc_share_t) {
    boundary(|| {
        // SAFETY: NULL, or a lease that no thread uses.
        unsafe { handle::release(lease) };
        Ok(())
    });
}

/// Receives the tensor that comes next, writable. Of the CPU: compact, its elements as they were when it was sent. Of
/// CUDA: the sender's memory, mapped here, with the sender's strides; several tensors of one allocation have one
/// mapping.
///
/// `device`: {kDLCPU, 0}, or {kDLCUDA, n}, for which the memory is mapped and which the tensor names: any that is the
/// sender's GPU or reaches its memory, however each process numbers them. `*out`: yours to release, which tells the
/// sender; on CUDA it waits for the work of the context that it was received in. A child that the receiver forks shares
/// the memory of the CPU; that the child releases it does not tell the sender, unless the child has the receiver's own
/// number in another PID namespace. In the process that has sent it the tensor is the same memory, on the same device.
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
