//! COMMUNICATORS
//!
//! A *rank* is one of the processes or threads that train together; all of them are its *world*. A communicator
//! connects a rank to the others: by your callbacks over any engine (gloo, UCX; gradcodec/mpi.h has callbacks for MPI),
//! by NCCL or peer memory (see there), or among threads of one process.
//!
//! Over a communicator gc_allreduce_run() averages gradients with any codec: see ALL-REDUCE.
//!
//! ```c
//! gc_transport_t mpi = {.struct_size = sizeof mpi, .rank = rank, .world_size = size, .ctx = &my_comm,
//!                       .all_to_all = my_all_to_all, .all_gather = my_all_gather};
//! gc_comm_t *comm;
//! gc_comm_from_transport(&mpi, &comm);
//! gc_comm_free(comm);                                     // the all-reduces over it remain usable
//! ```
//!
//! A call may block until all ranks have made the matching call, so each rank needs a thread of its own. Every rank
//! must make its calls on a communicator in the same order. If a run fails for its arguments or for lack of memory, its
//! rank does not take part. The others then wait for its next call; a group gives COMM once that rank has freed its
//! communicator and its all-reduces. If a call fails on one rank, it need not fail on the others.
//!
//! A second call on the same communicator gives BUSY while the first is running. gc_comm_async_error() and
//! gc_comm_abort() may always be called.
//!
//! On CUDA the work is enqueued. Over NCCL and over peer memory the call then returns, and the GPU waits for the other
//! ranks; over a group it returns after the other ranks' calls; with GC_TRANSPORT_HOST it waits for its stream. Ranks
//! may share a GPU: see PEER MEMORY for its rules. A call can be captured in a graph over NCCL, over peer memory (with
//! an exception there), and over callbacks without GC_TRANSPORT_HOST; over a group or with GC_TRANSPORT_HOST it cannot
//! (INVALID_ARGUMENT). A corrupt chunk does not fail a call on CUDA: gc_comm_async_error() reports CORRUPT afterwards.

use std::{ffi::c_void, sync::Arc};

use dlpark::ffi::DLDevice;

use crate::{
    comm::{
        communicator::Communicator,
        transport::{self, Callback, Callbacks},
    },
    ffi::{
        api::gc_status_t,
        borrow::{self, Out},
        error::{Result, error},
        handle,
        panics::boundary,
    },
};

/// A communicator. gc_comm_from_transport(), gc_comm_group(), gc_comm_from_nccl(), gc_comm_from_nccl_id(),
/// gc_comm_from_peers(), gc_comm_open_peers() and gc_comm_hierarchical() create one.
pub struct gc_comm_t(pub(super) Arc<Communicator>);

/// Hands a communicator out.
pub(super) fn hand_out(out: Out<*mut gc_comm_t>, communicator: Communicator) {
    out.fill([handle::hand_out(gc_comm_t(Arc::new(communicator)))]);
}

/// Your transport callbacks. Both functions return 0, or an error code of yours, with which the call fails as COMM. The
/// library calls them on the thread of its caller, one at a time, never with 0 bytes or in a world of one. They must
/// neither throw nor longjmp. `send` and `recv` do not overlap.
///
/// `device` is the device of both. If it is the host (kDLCPU), the exchange is done when the function returns, and
/// `stream` has no meaning. If it is a GPU (kDLCUDA), the function enqueues the exchange on `stream`, that of the
/// library's call. Host memory is also passed without GC_TRANSPORT_HOST: gc_allreduce_create(), gc_comm_open_peers()
/// and gc_comm_hierarchical() exchange a few bytes of each rank there, also for tensors on a GPU.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gc_transport_t {
    /// Set by you: sizeof(gc_transport_t).
    pub struct_size: u32,
    /// This rank: 0 to world_size - 1.
    pub rank: i32,
    /// Number of ranks, at least 1.
    pub world_size: i32,
    /// Flags: 0, or GC_TRANSPORT_HOST.
    pub flags: u32,
    /// Pointer that is passed to the functions unchanged.
    pub ctx: *mut c_void,
    /// Sends block k of `send` to rank k, and receives a block from each rank, in the order of ranks. Each block has
    /// bytes_per_rank bytes.
    pub all_to_all: Option<
        unsafe extern "C" fn(
            ctx: *mut c_void,
            send: *const c_void,
            recv: *mut c_void,
            bytes_per_rank: usize,
            device: DLDevice,
            stream: *mut c_void,
        ) -> i32,
    >,
    /// Sends the bytes_per_rank bytes at `send` to every rank, and receives as many from each rank, by rank.
    pub all_gather: Option<
        unsafe extern "C" fn(
            ctx: *mut c_void,
            send: *const c_void,
            recv: *mut c_void,
            bytes_per_rank: usize,
            device: DLDevice,
            stream: *mut c_void,
        ) -> i32,
    >,
}

// SAFETY: the fields are numbers, pointers and functions that may be NULL, without padding; a function is called only
// if the caller promised that it is one.
unsafe impl borrow::Extensible for gc_transport_t {
    const FIRST_SIZE: usize = 40;
}

/// Restrictions of a transport.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportFlag {
    /// The transport takes host memory only. GPU values pass through pinned memory, and calls wait for their stream.
    Host = 1,
}

/// Creates a communicator from your transport callbacks.
///
/// `transport`: read during the call; gc_comm_free() says how long its functions and ctx must stay. `*out`: yours to
/// release, by gc_comm_free().
///
/// - GC_STATUS_INVALID_ARGUMENT: `rank` is not within 0 to world_size - 1, a function is NULL, or a flag is unknown.
///
/// # Safety
/// The pointers and functions are as described.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_from_transport(
    transport: *const gc_transport_t, out: *mut *mut gc_comm_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises options of `struct_size` bytes, and room for a pointer.
        let (transport, out) = unsafe { (borrow::options("transport", transport)?, Out::one("out", out)?) };
        // SAFETY: the caller promises that the functions are as gc_transport_t describes them.
        let callbacks = unsafe { callbacks(&transport)? };
        hand_out(out, Communicator::over(callbacks));
        Ok(())
    })
}

/// # Safety
/// The functions are as gc_transport_t describes them.
unsafe fn callbacks(transport: &gc_transport_t) -> Result<Callbacks> {
    const HOST: u32 = TransportFlag::Host as u32;
    if transport.flags & !HOST != 0 {
        return Err(error!(
            InvalidArgument,
            "transport: flags {:#x}; 0 or GC_TRANSPORT_HOST {HOST} expected", transport.flags
        ));
    }
    let named =
        |name, function: Option<Callback>| function.ok_or_else(|| error!(InvalidArgument, "transport: {name} is NULL"));
    let (all_to_all, all_gather) =
        (named("all_to_all", transport.all_to_all)?, named("all_gather", transport.all_gather)?);
    let host = transport.flags & HOST != 0;
    // SAFETY: the caller promises that the functions are as gc_transport_t describes them.
    unsafe { Callbacks::new((transport.rank, transport.world_size), transport.ctx, all_to_all, all_gather, host) }
}

/// Creates communicators among threads of this process: one for each rank, each for one thread.
///
/// `out`: room for `world_size` pointers, by rank; each is yours to release, by gc_comm_free().
///
/// - GC_STATUS_INVALID_ARGUMENT: `world_size` is below 1.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_group(world_size: i32, out: *mut *mut gc_comm_t) -> gc_status_t {
    boundary(|| {
        let ranks = usize::try_from(world_size).ok().filter(|&ranks| ranks > 0);
        let ranks = ranks.ok_or_else(|| error!(InvalidArgument, "world_size: {world_size}; at least 1 expected"))?;
        // SAFETY: the caller promises room for `ranks` pointers.
        let out = unsafe { Out::several("out", out, borrow::Count::of("world_size", ranks))? };
        let made = transport::group(ranks)?.map(|member| gc_comm_t(Arc::new(Communicator::over(member))));
        out.fill(made.map(handle::hand_out));
        Ok(())
    })
}

/// Returns the rank of this process or thread in a communicator: 0 to gc_comm_world_size() - 1.
///
/// -1, and the last error: `comm` is NULL.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_rank(comm: *const gc_comm_t) -> i32 {
    boundary(|| {
        // SAFETY: the caller promises a communicator.
        Ok(unsafe { handle::borrow("comm", comm)? }.0.rank() as i32)
    })
}

/// Returns the number of ranks that a communicator connects, this one included.
///
/// -1, and the last error: `comm` is NULL.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_world_size(comm: *const gc_comm_t) -> i32 {
    boundary(|| {
        // SAFETY: the caller promises a communicator.
        Ok(unsafe { handle::borrow("comm", comm)? }.0.world() as i32)
    })
}

/// Reports a permanent failure of earlier calls on this rank. COMM: an exchange failed, or gc_comm_abort() was called;
/// CORRUPT: a payload was not one of this version; TIMEOUT: over NCCL or peer memory, a rank was late; OK otherwise.
/// After a failure release the communicator, and the all-reduces over it, on every rank, and create new ones. This call
/// never waits, and any thread may make it.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_async_error(comm: *const gc_comm_t) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a communicator.
        unsafe { handle::borrow("comm", comm)? }.0.async_error()
    })
}

/// Aborts a communicator, also while another thread is in a call on it. Use it when a rank is lost: blocked threads
/// return at once, whatever their timeout. Aborting a hierarchical communicator aborts both of its parts. This call
/// does not wait and cannot be undone; a second call does nothing.
///
/// Blocked calls return COMM:
///
/// - Over a group, on all ranks.
/// - Over NCCL, host waits end. A thread of the library aborts communicators that the library has created.
/// - Over peer memory, the barriers of all ranks end as if this rank had not arrived, and gc_comm_async_error() gives
///   COMM on each rank. This writes to the buffers of the other ranks, so none may be released yet.
/// - You must end: a blocked transport callback, your own ncclComm_t, and CUDA graphs that contain NCCL work. Do not
///   launch these graphs afterwards.
///
/// From then on gc_comm_async_error() and all calls that exchange or create something over this communicator, or over
/// one that shares a part with it, give COMM. gc_allreduce_commit(), rollback, flags, errors_out, reset and all
/// functions that release something keep working. Over NCCL, memory of all-reduces that are released afterwards is kept
/// until the process ends, because the GPU may still use it.
///
/// Any thread may call this, also during a call that creates something over `comm`, but not during gc_comm_free(comm).
/// A signal handler must not call it. An all-reduce alone cannot be aborted: keep `comm` to be able to.
///
/// - GC_STATUS_INVALID_ARGUMENT: a transport callback called this, or `comm` was made before the process was forked.
/// - GC_STATUS_OUT_OF_MEMORY: could not start the thread that aborts NCCL; NCCL keeps running.
/// - GC_STATUS_CUDA: the driver failed; other ranks over peer memory wait until their timeout.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_abort(comm: *mut gc_comm_t) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a communicator.
        unsafe { handle::borrow("comm", comm)? }.0.abort()
    })
}

/// Releases a communicator. No thread may be in a call on it. NULL is ignored. All-reduces that were created from it
/// remain usable. Your transport callbacks are not called here. They must stay until the last all-reduce, and the last
/// hierarchical communicator, that was created from it is released.
///
/// NCCL destroys a communicator when all ranks of the node destroy theirs. The last release of one that this library
/// has created, here or in gc_allreduce_free(), waits for the other ranks for one second at most. After that a thread
/// of the library waits: keep dl_handle open, and do not reset the device, until all ranks have released theirs.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_free(comm: *mut gc_comm_t) {
    boundary(|| {
        // SAFETY: the caller promises a communicator that nothing uses any more, or NULL.
        unsafe { handle::release(comm) };
        Ok(())
    });
}
