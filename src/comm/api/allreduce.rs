//! ALL-REDUCE
//!
//! An *all-reduce* (gc_allreduce_t) joins a communicator and a codec. It keeps the errors itself and takes several
//! tensors at once, in any dtype that codecs know. The result is the mean, the sum where GC_REDUCTION_SUM says so, or
//! the majority with GC_CODEC_SIGN.
//!
//! Each rank's gradient plus its error is encoded and divided into a chunk for every rank. Every rank takes the mean of
//! its own chunks, adds the error of its last mean, and sends that, encoded, to all. What the two encodings lose is
//! kept: of the first in the *worker error*, of the second in the *server error*. With GC_CODEC_ONEBIT this is the
//! compressed all-reduce of DeepSpeed's 1-bit Adam (Tang et al., 2021). docs/NUMERICS.md specifies the results,
//! docs/WHEN.md says when it pays, and docs/ALLREDUCE.md how a program keeps DeepSpeed's two error tensors.
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
//! A run exchanges twice: all_to_all of chunks, and all_gather of reduced ones. Over a flat communicator it exchanges
//! once if the codec keeps nothing (GC_ERROR_NONE, but not GC_CODEC_SIGN) and world_size * gc_codec_payload_bytes(), for
//! n_chunks = world_size, is at most
//!
//! - 8912896 over peer memory, for 2 to 4 ranks;
//! - 4194304 over another transport on CUDA, for 2 ranks;
//! - 1048576 otherwise.
//!
//! Then every rank gets all payloads by all_gather, and reduces them itself, to the same bytes. Over peer memory
//! GC_CODEC_ONEBIT exchanges twice, and so does a call whose payloads do not fit into the buffers;
//! gc_allreduce_peers_bytes() includes the room for one exchange. The halves are an exchange each.
//!
//! The rules of codecs hold here: one stream, BUSY, memory that is allocated at creation, values that are not finite.
//! Payloads tell every rank of values that are not finite, so with GC_NONFINITE_TRANSACTIONAL all ranks take the same
//! step back.
//!
//! Training can go on when ranks are lost or join, with GC_NONFINITE_TRANSACTIONAL:
//!
//! - A step that failed on a rank leaves the errors of that rank as they were before, once it is rolled back. It may
//!   have ended well on others: the survivors decide whether all of them commit or roll back, before the next run,
//!   which commits. Among as many ranks, a step that is taken again sends the same bytes, if its values are restored
//!   first: the call may have written to them.
//! - A rank that is lost loses its own worker errors and the server errors of its shard, nothing else. A rank that
//!   joins begins with errors of +0.
//! - The survivors save gc_allreduce_errors_out(), create a communicator and an all-reduce of the new world, and take
//!   the errors in by gc_allreduce_errors_in(). A rank may give its own worker errors alone, and of the server errors
//!   those that it has, +0 for the rest. What it has of elements that another rank reduces now is lost, unless the
//!   survivors pass their server errors to each other.
//! - Over NCCL host waits end within the timeout; over peer memory all waits do. A call of gc_comm_abort() ends the
//!   waits of a group, and those of NCCL's kernels if the library created the communicator. Your callbacks must return
//!   an error when another rank disconnects.

use std::ffi::c_void;

use dlpark::ffi::DLTensor;

use crate::{
    codec::api::gc_codec_options_t,
    comm::allreduce::{AllReduce, Part},
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

use super::comm::gc_comm_t;

/// A compressed all-reduce: gc_allreduce_create() makes one.
pub struct gc_allreduce_t(AllReduce);

/// Creates an all-reduce from a communicator and the options of a codec. Every rank calls this, with the same options
/// except for the device's number; the ranks compare them.
///
/// `options`: as for gc_codec_create(), with n_chunks 0 or the world size, server 0, and results all 0 or the same as
/// values. `*out`: yours to release, by gc_allreduce_free().
///
/// - All errors of gc_codec_create().
/// - GC_STATUS_INVALID_ARGUMENT: other options on some rank, or a rank that could not create its own; peer memory with
///   too little room (gc_allreduce_peers_bytes()).
/// - GC_STATUS_COMM: an exchange failed.
/// - GC_STATUS_BUSY: another call is running on this communicator.
///
/// A failure on one rank fails all, except BUSY and a NULL `comm`: then the others keep waiting.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_create(
    comm: *mut gc_comm_t, options: *const gc_codec_options_t, out: *mut *mut gc_allreduce_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a communicator, options of their own size, segments, and room for a pointer.
        let (comm, options, out) =
            unsafe { (handle::borrow("comm", comm)?, borrow::options("options", options), Out::one("out", out)) };
        // SAFETY: the caller's promise.
        let descriptor = options.and_then(|options| unsafe { options.descriptor_for_values() });
        // Whatever was refused, the others wait for this rank.
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
        // SAFETY: the caller's promise.
        unsafe { handle::release(allreduce) };
        Ok(())
    });
}

/// Elements of this rank's shard: its part of every segment, raw or not, which it reduces. It is the element count of
/// `shard` in gc_allreduce_reduce_scatter() and of `server` in gc_allreduce_errors_out(). May be 0. -1, and the last
/// error, if `allreduce` is NULL.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_allreduce_shard_elements(allreduce: *const gc_allreduce_t) -> i64 {
    boundary(|| {
        // SAFETY: the caller promises a handle.
        Ok(unsafe { handle::borrow("allreduce", allreduce)? }.0.shard_elements())
    })
}

/// Bytes that one gc_allreduce_run() makes this rank send to other ranks, headers included.
///
/// `*between_nodes`: how many of them leave the node; -1 where the communicator is not from gc_comm_hierarchical(), and
/// so does not know the nodes. NULL: not wanted.
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

/// How often a gc_allreduce_run() exchanges: 1 or 2. Over a hierarchical communicator, how often between nodes.
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
    /// The number of the segment.
    pub segment: i64,
    /// The number of the first element in the segment.
    pub first: i64,
    /// How many elements there are, at least 1.
    pub count: i64,
}

/// Which elements a rank's worker error or shard covers, raw segments included: so a program can tell which element each
/// number of gc_allreduce_errors_out() belongs to, on any rank.
///
/// `rank`: 0 to gc_comm_world_size() - 1. `which`: GC_PART_WORKER or GC_PART_SHARD. `parts`: room for `room` pieces, of
/// which the first are written, in the order in which their elements lie; NULL if `room` is 0. Returns how many pieces
/// there are, which may be more than `room`.
///
/// -1, and the last error:
/// - GC_STATUS_INVALID_ARGUMENT: `rank` or `which` is not one of those, `room` is negative, or `parts` is NULL.
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
        // SAFETY: the caller promises room for so many pieces.
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

/// Replaces values on every rank by their mean over the ranks. GC_CODEC_SIGN: by +1 and -1, the majority's sign, or by
/// NaN if a value was not finite on any rank, unless that counts as 0. All ranks end with the same bytes.
///
/// `values`: n_values tensors, one for each segment, as for gc_codec_encode(), and written to. `value_factor`,
/// `error_factor`: as for gc_codec_encode().
///
/// - All errors of gc_codec_encode().
/// - GC_STATUS_INVALID_ARGUMENT: values overlap.
/// - GC_STATUS_COMM: an exchange failed.
/// - GC_STATUS_CORRUPT: on the CPU, a rank sent a payload that is not of such an all-reduce. Values are unchanged. (On
///   CUDA GC_FLAG_CORRUPT is set.)
///
/// After a failure the errors of this rank may be those of the step: roll the step back, or reset the errors.
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

/// The first half of gc_allreduce_run(): the mean, for this rank's part of the elements. It is for an optimizer whose
/// state is divided among the ranks: from the mean, in float32, the optimizer computes its step, and
/// gc_allreduce_all_gather() gives that to all. Calling both without changing the shard gives the
/// same bytes as gc_allreduce_run().
///
/// `values`, `value_factor`, `error_factor`: as for gc_codec_encode(); values are only read. `shard`: float32, written:
/// it has as many elements, in the same order, as `server` of gc_allreduce_errors_out(); a rank may have none. The
/// server's error is not in it, and stays. GC_CODEC_SIGN: +1 and -1, the majority's sign, or NaN, as
/// gc_allreduce_run() has them; a tie is broken as there, and gc_allreduce_all_gather() begins the next turn.
///
/// - All errors of gc_codec_encode().
/// - GC_STATUS_SHAPE_MISMATCH: `shard` has another number of elements.
/// - GC_STATUS_INVALID_ARGUMENT: `shard` overlaps values or factors.
/// - GC_STATUS_COMM: an exchange failed.
/// - GC_STATUS_CORRUPT: on the CPU, a rank sent a payload that is not of such an all-reduce. The shard is unchanged.
///   (On CUDA GC_FLAG_CORRUPT is set, and the shard is +0.)
///
/// Other ranks may have succeeded, and block in gc_allreduce_all_gather(). After a failure the worker errors of this
/// rank may be those of the step.
///
/// With GC_NONFINITE_TRANSACTIONAL each half leaves a step pending. gc_allreduce_commit() ends what is pending, both or
/// one alone; a half whose step is still pending when it comes again commits both first. So end each half by itself, or
/// both together.
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

/// The second half of gc_allreduce_run(): sends this rank's part to all. It replaces values on every rank by the decoded
/// shards of all ranks. All ranks end with the same bytes.
///
/// `shard`: as gc_allreduce_reduce_scatter() has it, with any numbers in it: the optimizer's step in place of the mean.
/// The server's error is added first, and the error of this compression is the next one. Values that are not finite
/// are treated as in the mean. GC_CODEC_SIGN: its signs are sent. `values`: as for gc_allreduce_run(), and written to.
///
/// - All errors of gc_allreduce_run().
/// - GC_STATUS_SHAPE_MISMATCH: `shard` has another number of elements.
/// - GC_STATUS_INVALID_ARGUMENT: values overlap `shard`.
///
/// After a failure the server errors of this rank may be those of the step.
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

/// Ends a step, as gc_codec_commit() does. A value that was not finite on any rank takes the step back on all. The
/// values stay as they are. Nothing is exchanged, so `skip` must say the same on every rank.
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

/// Writes the errors of this rank and of its shard, as gc_codec_errors_out() does. Its shard is the part that it
/// reduces.
///
/// `worker`: NULL, or float32, as many elements as all segments have. `server`: NULL, or float32, as many as the shard
/// has (gc_allreduce_shard_elements()). gc_allreduce_errors_in() takes what all ranks' shards have, in the order of
/// elements: without raw segments the shards one after the other, in ranks' order; with raw ones each shard's parts
/// where these are (docs/NUMERICS.md 11).
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

/// Carries the errors of another world, of any size, from now on: gc_allreduce_errors_out() wrote them there. Other
/// ranks need not call this at the same time.
///
/// `workers`: NULL, or float32, C-contiguous, [W, n]: the worker errors of the W ranks of that world, by rank. If it
/// had as many ranks as this one, this rank takes its own row; otherwise every rank takes the mean of all, each
/// divided by W and added in order (with GC_REDUCTION_SUM: their sum, divided by the new number of ranks). A rank may
/// give its own errors alone: as [1, n], or, with GC_REDUCTION_SUM, which would divide these, as its own row of as
/// many rows as there are ranks now. `server`: NULL, or float32, C-contiguous, n elements: the server errors of all
/// shards, of which this rank takes those of its own.
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
