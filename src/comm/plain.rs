//! The all-reduce whose errors are tensors of the caller.
//!
//! A codec in memory of the communicator carries them for the call: they go in, the payloads go round, and what is new
//! comes out at last, on every rank or on none.

use crate::{
    backend::{Queue, Stream},
    error::{Result, error},
    ops::{
        bits::chunk_bytes,
        codec::{Codec, Descriptor, check_contiguous, check_dtype, check_elements},
    },
    plan::codec::{ErrorKind, Kind, NonFinite, ScaleRule},
    tensor::{Device, Dtype, View},
};

use super::{Communicator, transport::Span, wire::Wire};

/// What such calls with up to `most` elements work in.
pub struct Scratch {
    device: Device,
    most: i64,
    codec: Codec,
    wire: Wire,
}

impl Scratch {
    /// The last one on this device that has room for so many elements.
    pub fn there(scratches: &mut [Self], device: Device, elements: i64) -> Option<&mut Self> {
        scratches.iter_mut().rfind(|one| one.device == device && one.most >= elements)
    }

    /// One more, for so many elements, at least 1.
    pub fn made<'a>(
        communicator: &Communicator,
        scratches: &'a mut Vec<Self>,
        device: Device,
        elements: i64,
    ) -> Result<&'a mut Self> {
        let count = scratches.len();
        scratches.try_reserve(1).map_err(|_| error!(OutOfMemory, "a list of {} stages could not be had", count + 1))?;
        scratches.push(Self::new(communicator, device, elements)?);
        Ok(&mut scratches[count])
    }

    fn new(communicator: &Communicator, device: Device, elements: i64) -> Result<Self> {
        let codec = Codec::new(&Descriptor {
            kind: Kind::Onebit,
            device,
            values: Dtype::F32,
            results: Dtype::F32,
            error: ErrorKind::Float32,
            scale: ScaleRule::Rms,
            nonfinite: NonFinite::Propagate,
            beta: 1.0,
            segments: None,
            elements,
            n_chunks: communicator.world,
            server: communicator.rank as u64 + 1,
        })?;
        let wire = Wire::new(communicator, device, &codec)?;
        Ok(Self { device, most: elements, codec, wire })
    }
}

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
    communicator: &Communicator,
    buffer: &View<'_>,
    worker_error: &View<'_>,
    server_error: &View<'_>,
    stream: Stream,
) -> Result<()> {
    let elements = buffer.elements();
    check(communicator, buffer, worker_error, server_error)?;
    let mut scratches = communicator.enter()?;
    if elements == 0 {
        return Ok(());
    }
    let mut queue = Queue::of(buffer.device(), stream)?;
    communicator.transport.begin(&mut queue, Span::Both)?;
    let scratch = match Scratch::there(&mut scratches, buffer.device(), elements) {
        Some(scratch) => scratch,
        None if queue.is_capturing()? => {
            return Err(error!(
                InvalidArgument,
                "stream: it is being captured, and no memory is reserved for {elements} elements: gc_comm_reserve first"
            ));
        }
        None => Scratch::made(communicator, &mut scratches, buffer.device(), elements)?,
    };
    drop(queue);
    scratch.codec.refit(elements)?;
    scratch.wire.fit(&scratch.codec);
    let outcome = scratch.allreduce(communicator, buffer, worker_error, server_error, stream);
    communicator.note(outcome)
}

impl Scratch {
    fn allreduce(
        &self,
        communicator: &Communicator,
        buffer: &View<'_>,
        worker_error: &View<'_>,
        server_error: &View<'_>,
        stream: Stream,
    ) -> Result<()> {
        let Self { codec, wire, .. } = self;
        let shard = [codec.server_elements()];
        let server_error = server_error.part(0, &shard);
        codec.borrow_errors(worker_error, &server_error, stream)?;
        communicator.encode(codec, wire, [Ok(*buffer)].into_iter(), &[None, None], stream)?;
        let reduced = communicator.reduce_among_ranks(codec, wire, stream)?;
        let returned = communicator
            .decode(codec, &reduced, [Ok(*buffer)].into_iter(), stream)
            .and_then(|()| codec.return_errors(buffer, worker_error, &server_error, stream));
        communicator.end(returned, wire, Span::Both, stream)
    }
}

fn check(
    communicator: &Communicator,
    buffer: &View<'_>,
    worker_error: &View<'_>,
    server_error: &View<'_>,
) -> Result<()> {
    let elements = buffer.elements();
    let shard = shard_elements(elements, communicator.world as i32)?;
    for (tensor, expected) in [(buffer, elements), (worker_error, elements), (server_error, shard)] {
        check_dtype(tensor, &[Dtype::F32])?;
        check_elements(tensor, expected)?;
        check_contiguous(tensor)?;
        if tensor.device() != buffer.device() {
            let (name, device, other) = (tensor.name(), tensor.device(), buffer.device());
            return Err(error!(InvalidArgument, "{name} is on {device}, {} on {other}", buffer.name()));
        }
    }
    worker_error.check_output(&[buffer])?;
    server_error.check_output(&[buffer, worker_error])
}
