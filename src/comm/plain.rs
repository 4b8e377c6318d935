//! The all-reduce whose errors are tensors of the caller.
//!
//! A codec in memory of the communicator carries them for the call: they go in, the payloads go round, and what is new
//! comes out at last, on every rank or on none.

use crate::{
    backend::{Queue, Stream},
    error::{Result, error},
    ops::{
        bits::chunk_bytes,
        checks::{check_contiguous, check_dtype, check_elements, check_same_device},
    },
    tensor::{Dtype, View},
};

use super::{communicator::Communicator, exchange::Phases, scratch::Scratch};

/// Elements of a rank's server error.
pub fn shard_elements(elements: i64, world: i32) -> Result<i64> {
    let ranks = usize::try_from(world).ok().filter(|&ranks| ranks > 0);
    let ranks = ranks.ok_or_else(|| error!(InvalidArgument, "world_size: {world}; at least 1 expected"))?;
    // A shard is whole bytes of bits, so the last one's may be more elements than there are.
    chunk_bytes(elements, ranks)?
        .checked_mul(8)
        .ok_or_else(|| error!(SizeOverflow, "n_elements: {elements} elements are 2^63 bits, filled up"))
}

/// Replaces `buffer` by the mean over the ranks of what it was plus `worker_error`, at one bit per element.
pub fn allreduce(
    communicator: &Communicator, buffer: &View<'_>, worker_error: &View<'_>, server_error: &View<'_>, stream: Stream,
) -> Result<()> {
    let elements = buffer.elements();
    check(communicator, buffer, worker_error, server_error)?;
    let scratches = &mut *communicator.enter()?.scratches;
    if elements == 0 {
        return Ok(());
    }
    let mut queue = Queue::of(buffer.device(), stream)?;
    communicator.topology.begin(&mut queue, Phases::Both)?;
    let scratch = match Scratch::find(scratches, buffer.device(), elements) {
        Some(scratch) => scratch,
        None if queue.is_capturing()? => {
            return Err(error!(
                InvalidArgument,
                "stream: it is being captured, and no memory is reserved for {elements} elements: gc_comm_reserve first"
            ));
        }
        None => communicator.add_scratch(scratches, buffer.device(), elements)?,
    };
    drop(queue);
    scratch.codec.refit(elements)?;
    scratch.buffers.fit(&scratch.codec);
    communicator.failures.note(exchanged(communicator, scratch, buffer, worker_error, server_error, stream))
}

fn exchanged(
    communicator: &Communicator, Scratch { codec, buffers, .. }: &Scratch, buffer: &View<'_>, worker_error: &View<'_>,
    server_error: &View<'_>, stream: Stream,
) -> Result<()> {
    let shard = [codec.plan().server_elements()];
    let server_error = server_error.part(0, &shard);
    codec.borrow_errors(worker_error, &server_error, stream)?;
    communicator.encode(codec, buffers, [Ok(*buffer)].into_iter(), &[None, None], stream)?;
    let reduced = communicator.reduce(codec, buffers, stream)?;
    let returned = communicator
        .decode(codec, &reduced, [Ok(*buffer)].into_iter(), stream)
        .and_then(|()| codec.return_errors(buffer, worker_error, &server_error, stream));
    communicator.end(returned, buffers, Phases::Both, stream)
}

fn check(
    communicator: &Communicator, buffer: &View<'_>, worker_error: &View<'_>, server_error: &View<'_>,
) -> Result<()> {
    let elements = buffer.elements();
    let shard = shard_elements(elements, communicator.topology.world() as i32)?;
    for (tensor, expected) in [(buffer, elements), (worker_error, elements), (server_error, shard)] {
        check_dtype(tensor, &[Dtype::F32])?;
        check_elements(tensor, expected)?;
        check_contiguous(tensor)?;
        check_same_device(tensor, buffer)?;
    }
    worker_error.check_output(&[buffer])?;
    server_error.check_output(&[buffer, worker_error])
}
