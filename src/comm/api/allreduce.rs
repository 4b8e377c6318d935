//! ALL-REDUCE
//!
//! An *all-reduce* (gc_allreduce_t) joins a communicator and a codec. It keeps the errors itself and takes several
//! tensors at once, in any dtype that codecs accept. The result is the mean, with GC_REDUCTION_SUM the sum, and with
//! GC_CODEC_SIGN the majority.
//!
//! Each rank encodes its gradient plus its error into a chunk for every rank. Every rank takes the mean of its own
//! chunks, adds the error of its last mean, encodes the result and sends it to all. The *worker error* is what the
//! first encoding loses, the *server error* what the second loses. With GC_CODEC_ONEBIT this is the compressed
//! all-reduce of DeepSpeed's 1-bit Adam (Tang et al., 2021). docs/NUMERICS.md specifies the results, docs/WHEN.md says
//! when it pays, and docs/ALLREDUCE.md how a program keeps DeepSpeed's two error tensors.
//!
//! ```c
//! gc_codec_options_t options = {.struct_size = sizeof options, .codec = GC_CODEC_ONEBIT, .n_elements = n};
//! gc_allreduce_t *allreduce;
//! gc_allreduce_create(comm, &options, &allreduce);                        // on every rank
//! DLTensor *values[] = {&gradient};                                       // in: this rank's; out: the mean
//! gc_allreduce_run(allreduce, values, 1, NULL, NULL, NULL);               // each step, on every rank
//! gc_allreduce_free(allreduce);
//! ```
//!
//! A run is *two-shot*: an all_to_all of chunks, and an all_gather of reduced chunks. Over a flat communicator it is
//! *one-shot* if the codec keeps nothing (GC_ERROR_NONE, but not GC_CODEC_SIGN) and world_size *
//! gc_codec_payload_bytes(), for n_chunks = world_size, is at most
//!
//! - 8912896 over peer memory, for 2 to 4 ranks;
//! - 4194304 over another transport on CUDA, for 2 ranks;
//! - 1048576 otherwise.
//!
//! In one-shot every rank gets all payloads by all_gather, and reduces them itself, to the same bytes. Over peer memory
//! GC_CODEC_ONEBIT is two-shot, and so is an all-reduce whose payloads do not fit into the buffers;
//! gc_allreduce_peers_bytes() includes the room for one-shot. Each half of a run makes one exchange.
//!
//! The rules of codecs hold here for streams, BUSY, memory allocated at creation and values that are not finite.
//! Payloads carry a flag for such values to every rank, so with GC_NONFINITE_TRANSACTIONAL all ranks take the same step
//! back.
//!
//! With GC_NONFINITE_TRANSACTIONAL training can continue when ranks are lost or join:
//!
//! - If a step fails on a rank, rolling it back restores the errors of that rank. The step may have succeeded on
//!   others: the survivors decide whether all of them commit or roll back, before the next run, which commits. With the
//!   same number of ranks, a repeated step sends the same bytes if its values are restored first: the call may have
//!   written to them.
//! - A rank that is lost loses its own worker errors and the server errors of its shard, nothing else. A rank that
//!   joins begins with errors of +0.
//! - The survivors save their errors with gc_allreduce_errors_out(), create a communicator and an all-reduce of the new
//!   world, and load the errors with gc_allreduce_errors_in(). A rank may pass its own worker errors alone, and the
//!   server errors that it has, with +0 for the rest. Server errors of elements that another rank reduces now are lost,
//!   unless the survivors pass them to each other.
//! - Over NCCL host waits end within the timeout; over peer memory all waits do. A call of gc_comm_abort() ends the
//!   waits of a group, and those of NCCL's kernels if the library created the communicator. Your callbacks must return
//!   an error when another rank disconnects.

use std::ffi::c_void;

use dlpark::ffi::DLTensor;

use crate::{
    codec::api::gc_codec_options_t,
    comm::allreduce::AllReduce,
    cuda::Stream,
    dlpack::input,
    ffi::{
        api::gc_status_t,
        borrow::{self, Count, Out},
        error::error,
        handle,
        panics::boundary,
    },
};

pub use crate::comm::allreduce::Part;

use super::comm::gc_comm_t;

/// A compressed all-reduce. gc_allreduce_create() creates one.
pub struct gc_allreduce_t(AllReduce);

/// Creates an all-reduce from a communicator and the options of a codec. Every rank calls this, with the same options
/// except for the device's number; the ranks compare them.
///
/// `options`: as for gc_codec_create(), with n_chunks 0 or the world size, server 0, and results all 0 or the same as
/// values. `*out`: yours to release, by gc_allreduce_free().
///
/// - All errors of gc_codec_create().
/// - GC_STATUS_INVALID_ARGUMENT: the options differ between ranks, or a rank could not create its all-reduce; or peer
///   memory is too small (gc_allreduce_peers_bytes()).
/// - GC_STATUS_COMM: an exchange failed.
/// - GC_STATUS_BUSY: another call is running on this communicator.
///
/// A failure on one rank fails all, except BUSY and a NULL `comm`: then the others keep waiting.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_create(
    comm: *mut gc_comm_t, options: *const gc_codec_options_t, out: *mut *mut gc_allreduce_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a communicator, options of `struct_size` bytes, segments, and room for a pointer.
        let (comm, options, out) =
            unsafe { (handle::borrow("comm", comm)?, borrow::options("options", options), Out::one("out", out)) };
        // SAFETY: the caller promises that the options' segments are readable.
        let descriptor = options.and_then(|options| unsafe { options.descriptor_for_values() });
        // Continue after a refusal, because the other ranks wait for this one.
        let (out, descriptor) = match out {
            Ok(out) => (Some(out), descriptor),
            Err(refusal) => (None, Err(refusal)),
        };
        let allreduce = gc_allreduce_t(AllReduce::new(comm.0.clone(), descriptor)?);
        if let Some(out) = out {
            out.fill([handle::hand_out(allreduce)]);
        }
        Ok(())
    })
}

/// Releases an all-reduce, as gc_codec_free() releases a codec. Other ranks need not call this. Over NCCL it may be the
/// last release of a communicator: see gc_comm_free().
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_free(allreduce: *mut gc_allreduce_t) {
    boundary(|| {
        // SAFETY: the caller promises a handle that nothing uses any more, or NULL.
        unsafe { handle::release(allreduce) };
        Ok(())
    });
}

/// Returns the number of elements of this rank's shard: its part of every segment, raw or not, which it reduces.
/// `shard` in gc_allreduce_reduce_scatter() and `server` in gc_allreduce_errors_out() have this number, which may be 0.
/// -1, and the last error, if `allreduce` is NULL.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_shard_elements(allreduce: *const gc_allreduce_t) -> i64 {
    boundary(|| {
        // SAFETY: the caller promises a handle.
        Ok(unsafe { handle::borrow("allreduce", allreduce)? }.0.shard_elements())
    })
}

/// Returns the bytes that this rank sends to other ranks in one gc_allreduce_run(), headers included.
///
/// `*between_nodes`: the bytes among these that leave the node; -1 if the communicator is not from
/// gc_comm_hierarchical(), because only that one has nodes. May be NULL.
///
/// -1, and the last error: `allreduce` is NULL.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_sent_bytes(allreduce: *const gc_allreduce_t, between_nodes: *mut i64) -> i64 {
    boundary(|| {
        // SAFETY: the caller promises a handle, and room for a number unless the pointer is NULL.
        let (allreduce, place) = unsafe {
            let place = if between_nodes.is_null() { None } else { Some(Out::one("between_nodes", between_nodes)?) };
            (handle::borrow("allreduce", allreduce)?, place)
        };
        let traffic = allreduce.0.traffic();
        if let Some(place) = place {
            place.fill([traffic.between_nodes.unwrap_or(-1)]);
        }
        Ok(traffic.sent)
    })
}

/// Returns the number of exchanges of a gc_allreduce_run(): 1 or 2. Over a hierarchical communicator, between nodes.
///
/// -1, and the last error: `allreduce` is NULL.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_exchanges(allreduce: *const gc_allreduce_t) -> i32 {
    boundary(|| {
        // SAFETY: the caller promises a handle.
        Ok(unsafe { handle::borrow("allreduce", allreduce)? }.0.traffic().exchanges)
    })
}

/// Consecutive elements of a segment: see gc_allreduce_parts().
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct gc_part_t {
    /// Number of the segment.
    pub segment: i64,
    /// Number of the first element in the segment.
    pub first: i64,
    /// Number of elements, at least 1.
    pub count: i64,
}

/// Lists the elements that a rank's worker error or shard covers, raw segments included. It shows which element each
/// number of gc_allreduce_errors_out() belongs to, on any rank.
///
/// `rank`: 0 to gc_comm_world_size() - 1. `which`: GC_PART_WORKER or GC_PART_SHARD. `parts`: room for `room` pieces;
/// receives the first ones, in the order of their elements; NULL if `room` is 0. Returns the number of all pieces,
/// which may be more than `room`.
///
/// -1, and the last error:
/// - GC_STATUS_INVALID_ARGUMENT: `rank` or `which` is out of range, `room` is negative, or `parts` is NULL.
/// - GC_STATUS_BUSY: another call is running on `allreduce`.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_parts(
    allreduce: *const gc_allreduce_t, rank: i32, which: i32, parts: *mut gc_part_t, room: i64,
) -> i64 {
    boundary(|| {
        // SAFETY: the caller promises a handle.
        let allreduce = unsafe { handle::borrow("allreduce", allreduce)? };
        let world = allreduce.0.world();
        let rank = usize::try_from(rank).ok().filter(|&rank| rank < world).ok_or_else(|| {
            error!(InvalidArgument, "rank: {rank}; 0 to {} expected, as there are {world} ranks", world - 1)
        })?;
        let which = [Part::Worker, Part::Shard]
            .into_iter()
            .find(|&part| part as i32 == which)
            .ok_or_else(|| error!(InvalidArgument, "which: {which} is neither GC_PART_WORKER 0 nor GC_PART_SHARD 1"))?;
        let room = usize::try_from(room).map_err(|_| error!(InvalidArgument, "room: {room} is negative"))?;
        // SAFETY: the caller promises room for `room` pieces.
        let mut places = unsafe { borrow::room("parts", parts, Count::of("room", room))? }.iter_mut();
        let mut pieces = 0i64;
        allreduce.0.for_each_piece(rank, which, |segment, first, count| {
            if let Some(place) = places.next() {
                place.write(gc_part_t { segment: segment as i64, first, count });
            }
            pieces += 1;
        })?;
        Ok(pieces)
    })
}

/// Replaces values on every rank by their mean over the ranks. With GC_CODEC_SIGN they become +1 or -1, the sign of the
/// majority, or NaN if a value was not finite on at least one rank, unless that counts as 0. All ranks end with the same
/// bytes.
///
/// `values`: n_values tensors, one for each segment, as for gc_codec_encode(), and written to. `value_factor`,
/// `error_factor`: as for gc_codec_encode().
///
/// - All errors of gc_codec_encode().
/// - GC_STATUS_INVALID_ARGUMENT: values overlap.
/// - GC_STATUS_COMM: an exchange failed.
/// - GC_STATUS_CORRUPT: on the CPU, a rank sent a payload that does not belong to this all-reduce. Values are
///   unchanged. (On CUDA GC_FLAG_CORRUPT is set.)
///
/// After a failure this rank's errors may already be those after the step: roll the step back, or reset the errors.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_run(
    allreduce: *mut gc_allreduce_t, values: *const *mut DLTensor, n_values: usize, value_factor: *const DLTensor,
    error_factor: *const DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a handle, and tensors that stay as they are during the call.
        let (allreduce, values, factors) = unsafe {
            (
                handle::borrow("allreduce", allreduce)?,
                input::tensors("values", values.cast(), Count::of("n_values", n_values))?,
                [input::optional("value_factor", value_factor)?, input::optional("error_factor", error_factor)?],
            )
        };
        allreduce.0.run(values, &factors, Stream::from_raw(stream))
    })
}

/// Runs the first half of gc_allreduce_run(): writes the mean of this rank's part of the elements. It is for an
/// optimizer whose state is divided among the ranks: the optimizer computes its step from the mean, in float32, and
/// gc_allreduce_all_gather() sends the step to all ranks. Calling both without changing the shard gives the same bytes
/// as gc_allreduce_run().
///
/// `values`, `value_factor`, `error_factor`: as for gc_codec_encode(); values are only read. `shard`: float32, written:
/// it has the elements of `server` in gc_allreduce_errors_out(), in the same order; there may be none. The server error
/// is not added, and stays. With GC_CODEC_SIGN it has +1, -1 or NaN as in gc_allreduce_run(), also for ties;
/// gc_allreduce_all_gather() begins the next turn.
///
/// - All errors of gc_codec_encode().
/// - GC_STATUS_SHAPE_MISMATCH: `shard` has another number of elements.
/// - GC_STATUS_INVALID_ARGUMENT: `shard` overlaps values or factors.
/// - GC_STATUS_COMM: an exchange failed.
/// - GC_STATUS_CORRUPT: on the CPU, a rank sent a payload that does not belong to this all-reduce. The shard is
///   unchanged. (On CUDA GC_FLAG_CORRUPT is set, and the shard is +0.)
///
/// After a failure other ranks may have succeeded, and block in gc_allreduce_all_gather(). This rank's worker errors
/// may already be those after the step.
///
/// With GC_NONFINITE_TRANSACTIONAL each half leaves a step pending. gc_allreduce_commit() ends all pending steps: that
/// of one half, or both. Calling a half whose step is still pending commits both first.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_reduce_scatter(
    allreduce: *mut gc_allreduce_t, values: *const *const DLTensor, n_values: usize, value_factor: *const DLTensor,
    error_factor: *const DLTensor, shard: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a handle, and tensors that stay as they are during the call.
        let (allreduce, values, factors, shard) = unsafe {
            (
                handle::borrow("allreduce", allreduce)?,
                input::tensors("values", values, Count::of("n_values", n_values))?,
                [input::optional("value_factor", value_factor)?, input::optional("error_factor", error_factor)?],
                input::tensor("shard", shard)?,
            )
        };
        allreduce.0.reduce_scatter(values, &factors, &shard, Stream::from_raw(stream))
    })
}

/// Runs the second half of gc_allreduce_run(): sends this rank's shard to all ranks, and replaces values on every rank
/// by the decoded shards of all ranks. All ranks end with the same bytes.
///
/// `shard`: as in gc_allreduce_reduce_scatter(), with any numbers, such as the optimizer's step in place of the mean.
/// The server error is added first, and the error of this compression becomes the new one. Values that are not finite
/// are treated as in the mean. With GC_CODEC_SIGN the signs are sent. `values`: as for gc_allreduce_run(), written.
///
/// - All errors of gc_allreduce_run().
/// - GC_STATUS_SHAPE_MISMATCH: `shard` has another number of elements.
/// - GC_STATUS_INVALID_ARGUMENT: values overlap `shard`.
///
/// After a failure this rank's server errors may already be those after the step.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_all_gather(
    allreduce: *mut gc_allreduce_t, shard: *const DLTensor, values: *const *mut DLTensor, n_values: usize,
    stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a handle, and tensors that stay as they are during the call.
        let (allreduce, shard, values) = unsafe {
            (
                handle::borrow("allreduce", allreduce)?,
                input::tensor("shard", shard)?,
                input::tensors("values", values.cast(), Count::of("n_values", n_values))?,
            )
        };
        allreduce.0.all_gather(&shard, values, Stream::from_raw(stream))
    })
}

/// Writes the flags of this rank since the last gc_allreduce_flags(), as gc_codec_flags() does.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_flags(
    allreduce: *mut gc_allreduce_t, dst: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a handle, and a tensor that stays as it is during the call.
        let (allreduce, dst) = unsafe { (handle::borrow("allreduce", allreduce)?, input::tensor("dst", dst)?) };
        allreduce.0.enter()?.codec.flags(&dst, Stream::from_raw(stream))
    })
}

/// Ends a step, as gc_codec_commit() does. A value that was not finite on any rank takes the step back on all ranks.
/// The values stay as they are. Nothing is exchanged, so `skip` must be the same on every rank.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_commit(
    allreduce: *mut gc_allreduce_t, skip: *const DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a handle, and a tensor that stays as it is during the call.
        let (allreduce, skip) = unsafe { (handle::borrow("allreduce", allreduce)?, input::optional("skip", skip)?) };
        allreduce.0.enter()?.codec.commit(skip.as_ref(), Stream::from_raw(stream))
    })
}

/// Takes the pending step back: gc_allreduce_commit() with a `skip` that is not 0.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_rollback(allreduce: *mut gc_allreduce_t, stream: *mut c_void) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a handle.
        unsafe { handle::borrow("allreduce", allreduce)? }.0.enter()?.codec.rollback(Stream::from_raw(stream))
    })
}

/// Resets the errors to +0, as after gc_allreduce_create(). Flags and a pending step are dropped.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_reset(allreduce: *mut gc_allreduce_t, stream: *mut c_void) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a handle.
        unsafe { handle::borrow("allreduce", allreduce)? }.0.enter()?.codec.reset(Stream::from_raw(stream))
    })
}

/// Writes the worker errors of this rank and the server errors of its shard, the part that it reduces, as
/// gc_codec_errors_out() does.
///
/// `worker`: NULL, or float32 with as many elements as all segments have. `server`: NULL, or float32 with as many
/// elements as the shard has (gc_allreduce_shard_elements()). gc_allreduce_errors_in() takes the server errors of all
/// ranks, in the order of elements. Without raw segments these are the shards one after the other, by rank; with raw
/// ones, the parts of each shard lie where their elements are (docs/NUMERICS.md 11).
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_errors_out(
    allreduce: *mut gc_allreduce_t, worker: *mut DLTensor, server: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a handle, and tensors that stay as they are during the call.
        let (allreduce, worker, server) = unsafe {
            (
                handle::borrow("allreduce", allreduce)?,
                input::optional("worker", worker)?,
                input::optional("server", server)?,
            )
        };
        allreduce.0.enter()?.codec.errors_out(worker.as_ref(), server.as_ref(), Stream::from_raw(stream))
    })
}

/// Loads the errors of another world, of any size, which gc_allreduce_errors_out() wrote there. Other ranks need not
/// call this at the same time.
///
/// `workers`: NULL, or float32, C-contiguous, [W, n]: the worker errors of the W ranks of that world, by rank. If that
/// world had as many ranks as this one, this rank takes its own row. Otherwise every rank takes the mean of all rows,
/// each divided by W and added in order (with GC_REDUCTION_SUM: their sum, divided by the new number of ranks). Over
/// several nodes see docs/NUMERICS.md, section 12. A rank may pass its own errors alone, as [1, n]. GC_REDUCTION_SUM
/// divides these: pass as many rows as there are ranks then, with its own in place. `server`: NULL, or float32,
/// C-contiguous, n elements: the server errors of all shards. This rank takes those of its own shard.
///
/// - All errors of gc_codec_errors_in().
/// - GC_STATUS_SHAPE_MISMATCH: a tensor has another shape than described.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_errors_in(
    allreduce: *mut gc_allreduce_t, workers: *const DLTensor, server: *const DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a handle, and tensors that stay as they are during the call.
        let (allreduce, workers, server) = unsafe {
            (
                handle::borrow("allreduce", allreduce)?,
                input::optional("workers", workers)?,
                input::optional("server", server)?,
            )
        };
        allreduce.0.errors_in(workers.as_ref(), server.as_ref(), Stream::from_raw(stream))
    })
}
