//! PEER MEMORY
//!
//! A communicator whose ranks write into each other's memory by kernels of this library, without NCCL: for the GPUs of
//! one node, over NVLink or PCIe. The same calls work over it, and give the same bytes.
//!
//! ```c
//! gc_codec_options_t options = {.struct_size = sizeof options, .codec = GC_CODEC_INT8, .n_elements = n};
//! int64_t bytes = gc_allreduce_peers_bytes(&options, size);   // of each rank's buffer, for one all-reduce
//! gc_comm_t *comm;                                            // on every rank, with the help of another one
//! gc_comm_open_peers(bootstrap, (DLDevice){kDLCUDA, gpu}, bytes, 0, &comm);           // `bootstrap`, such as MPI's
//!
//! gc_peers_options_t mine = {.struct_size = sizeof mine, .rank = rank, .world_size = size, .device = {kDLCUDA, gpu},
//!                            .bytes = bytes, .buffers = buffers};        // or over memory that you have mapped
//! gc_comm_from_peers(&mine, &comm);
//! ```
//!
//! Each rank has a buffer, which the others write payloads to; no other GPU accesses your tensors. All calls over the
//! communicator use the same buffers, one after the other, so they must be as large as the largest call needs: the
//! maximum of what gc_allreduce_peers_bytes() returns for each all-reduce. There can be up to 64 ranks. Graphs can be
//! launched repeatedly, also with calls of other sizes between the launches. A call on another stream runs after the
//! call before it, but you must order the launches of graphs. All of them must be done, on every rank, before an
//! all-reduce is created: its creation is a barrier on a stream of its own.
//!
//! A rank waits for the others on its GPU, for at most `timeout_ms` of the GPU's clock, while the host continues. If a
//! rank does not arrive, the results of that call are NaN on the ranks that waited (an all-reduce sets
//! GC_FLAG_NONFINITE, too), and gc_comm_async_error() returns TIMEOUT. All later calls of this rank then fail with
//! COMM, and those of other ranks once they wait for it. The same happens if a rank has died or writes invalid data.
//!
//! Ranks within one process that share a GPU also wait for each other on the host, for at most the same time. Their
//! kernels then cannot keep each other from running. gc_comm_open_peers() arranges that, and such calls cannot be
//! captured. Release communicators when the work of all ranks is done, and no rank will make another call: the others
//! write to a rank's buffer until then.

use std::ffi::c_void;

use arrayvec::ArrayVec;
use dlpark::ffi::DLDevice;

use crate::{
    codec::api::gc_codec_options_t,
    comm::{
        allreduce::AllReduce,
        communicator::Communicator,
        transport::{MOST_RANKS, MappedBuffers, Peers, ranks_of},
    },
    dlpack::Device,
    ffi::{
        api::gc_status_t,
        borrow::{self, Count, Out},
        handle,
        name::Name,
        panics::boundary,
    },
};

use super::comm::{gc_comm_t, hand_out};

/// Peer memory of all ranks, as one rank has mapped it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gc_peers_options_t {
    /// Set by you: sizeof(gc_peers_options_t).
    pub struct_size: u32,
    /// This rank: 0 to world_size - 1.
    pub rank: i32,
    /// Number of ranks: 1 to 64.
    pub world_size: i32,
    /// Longest wait for the other ranks on the GPU, in milliseconds; 0: 10 minutes.
    pub timeout_ms: u32,
    /// This rank's device: CUDA.
    pub device: DLDevice,
    /// Bytes of each buffer, equal on all ranks: the maximum of gc_allreduce_peers_bytes() for the all-reduces over it.
    pub bytes: usize,
    /// The world_size addresses of the buffers as mapped here, by rank: multiples of 256. All buffers must be 0 before
    /// the first rank calls gc_comm_from_peers().
    pub buffers: *const *mut c_void,
}

// SAFETY: the fields are numbers and a pointer, without padding.
unsafe impl borrow::Extensible for gc_peers_options_t {
    const FIRST_SIZE: usize = 40;
}

/// Returns the bytes of each rank's buffer for an all-reduce with these options. Several all-reduces over one
/// communicator need the maximum, not the sum.
///
/// P is gc_codec_payload_bytes() of these options with `world_size` chunks. At most 2 KiB are added, and the result is
/// at least 320 bytes per rank.
/// - Two-shot: 2 x P + 2 x min(P, 8.5 MiB). The second term is at most 17 MiB.
/// - One-shot: 4 x world_size x P, at most 34 MiB.
///
/// `options`: as for gc_allreduce_create(); n_chunks, server and device are ignored, so that no GPU is needed.
/// `nodes`: 1 for a flat communicator of `world_size` ranks. Otherwise the buffers are for the `intra_node` of
/// gc_comm_hierarchical() over `nodes` nodes, each of `world_size` ranks. They have 2 x world_size x B + 2 x
/// min(world_size x B, 8.5 MiB) bytes. B is 64 bytes plus the values of the largest part (about n / world_size) or, if
/// larger, the reduced chunks of a part.
///
/// -1, and the last error: options that gc_allreduce_create() rejects, or world_size not within 1 to 64, or nodes below 1.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_peers_bytes(
    options: *const gc_codec_options_t, world_size: i32, nodes: i32,
) -> i64 {
    boundary(|| {
        // SAFETY: the caller promises options of `struct_size` bytes, and the memory that they point at.
        let descriptor = unsafe { borrow::options("options", options)?.descriptor_of_layout()? };
        AllReduce::peers_bytes(&descriptor, world_size, nodes)
    })
}

/// Creates a communicator over memory that you have mapped. That may be PyTorch's symmetric memory, NCCL's windows, or
/// memory from cuIpcOpenMemHandle(). Every rank calls this; none waits for another.
///
/// `options`: read during the call. The buffers must stay as long as the communicator and the all-reduces over it, and
/// nothing else may write to them; zero them before reuse. `*out`: yours to release, by gc_comm_free().
///
/// - GC_STATUS_INVALID_ARGUMENT: `rank` is not within 0 to world_size - 1; a buffer is too small or not mapped here; or
///   this rank's own buffer is not on `device` or not 0.
/// - GC_STATUS_COMM: another rank has aborted already.
/// - GC_STATUS_UNSUPPORTED_DEVICE: `device` is not CUDA.
/// - All errors of a tensor on the device.
///
/// # Safety
/// The pointers are as described, and each buffer has `bytes` bytes that this device can write to.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_from_peers(
    options: *const gc_peers_options_t, out: *mut *mut gc_comm_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises options of `struct_size` bytes, and room for a pointer.
        let (options, out) = unsafe { (borrow::options("options", options)?, Out::one("out", out)?) };
        let world = ranks_of(options.world_size)?;
        // SAFETY: the caller promises `world_size` addresses.
        let given = unsafe { borrow::items("options: buffers", options.buffers, Count::of("world_size", world))? };
        let buffers: ArrayVec<u64, MOST_RANKS> = given.iter().map(|buffer| buffer.expose_provenance() as u64).collect();
        let places = MappedBuffers {
            rank: options.rank,
            device: Device::from_dlpack(&Name::new("options: device"), options.device)?,
            bytes: options.bytes,
            buffers: &buffers,
            timeout_ms: options.timeout_ms,
        };
        hand_out(out, Communicator::over(Peers::new(&places)?));
        Ok(())
    })
}

/// Creates a communicator over peer memory that it allocates and maps itself. Every rank of another communicator must
/// call this, with the same `bytes`; the ranks exchange what they need over that communicator.
///
/// `bootstrap`: any communicator; yours again when this returns. `device`: this rank's CUDA device. `bytes`,
/// `timeout_ms`: as in gc_peers_options_t. `*out`: yours to release, by gc_comm_free().
///
/// A failure on one rank fails all, except BUSY and a NULL `bootstrap`: then the others keep waiting. If an exchange
/// over `bootstrap` fails, maybe on this rank alone, its buffer is kept until the process ends: others may write to it.
/// - GC_STATUS_UNSUPPORTED_DEVICE: `device` is the CPU; a rank cannot reach another (other node, no peer access).
/// - GC_STATUS_INVALID_ARGUMENT: `bytes` differs between ranks, or is below the minimum that the message has, such as
///   the -1 of a failed call; a rank could not make its buffer.
/// - GC_STATUS_OUT_OF_MEMORY, GC_STATUS_COMM, GC_STATUS_BUSY.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_open_peers(
    bootstrap: *mut gc_comm_t, device: DLDevice, bytes: i64, timeout_ms: u32, out: *mut *mut gc_comm_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a communicator, and room for a pointer.
        let (bootstrap, out) = unsafe { (handle::borrow("bootstrap", bootstrap)?, Out::one("out", out)) };
        // Continue after a refusal, because the other ranks wait for this one.
        let (out, device) = match out {
            Ok(out) => (Some(out), Device::from_dlpack(&Name::new("device"), device)),
            Err(refusal) => (None, Err(refusal)),
        };
        let communicator = Communicator::open_peers(&bootstrap.0, device, bytes, timeout_ms)?;
        if let Some(out) = out {
            hand_out(out, communicator);
        }
        Ok(())
    })
}
