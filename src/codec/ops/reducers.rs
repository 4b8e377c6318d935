//! Reducers of all chunks of whole payloads, for one-shot all-reduces.

use crate::{
    codec::{
        call::{Destination, Received},
        cuda::ChunkDestination,
    },
    cuda::Stream,
    dlpack::{Address, View},
    ffi::{
        error::{Error, Result, Status, error},
        fallible,
    },
};

use super::{Backend, Codec};

/// Codecs without errors: one for all chunks if the codec is a block codec, otherwise one for each chunk.
pub struct Reducers(Vec<Codec>);

impl Reducers {
    /// Makes the reducers of the payloads of `codec`. They give the results of codecs with its options.
    pub fn of(codec: &Codec) -> Result<Self> {
        let plan = codec.plan();
        let (chunks, at_once) = (plan.n_chunks, plan.chunks_at_once());
        let mut reducers = fallible::list(chunks / at_once, "reducers")?;
        for first in (0..chunks).step_by(at_once) {
            reducers.push(Codec::of_plan(codec.device(), plan.reducer(first)?)?);
        }
        Ok(Self(reducers))
    }

    /// Reduces whole payloads. `payloads`: one of each rank. `dst`: a payload of reduced chunks. A corrupt chunk
    /// becomes a flagged chunk, which decoding reports.
    pub fn reduce(&self, payloads: &View<'_>, dst: &View<'_>, stream: Stream) -> Result<()> {
        for codec in &self.0 {
            match codec.reduce_of(payloads, dst, stream) {
                Ok(()) | Err(Error { status: Status::Corrupt, .. }) => {}
                refused => return refused,
            }
        }
        Ok(())
    }
}

impl Codec {
    /// Reduces this codec's chunks of whole payloads to the same chunks of `dst`.
    fn reduce_of(&self, payloads: &View<'_>, dst: &View<'_>, stream: Stream) -> Result<()> {
        let (plan, bytes) = (&self.plan, self.plan.payload_bytes());
        let &[count, each] = payloads.shape() else { return Err(error!(Panic, "reducers: no payloads")) };
        if each != bytes || plan.rules.error.is_some() {
            return Err(error!(
                Panic,
                "reducers: payloads of {each} bytes, {bytes} expected, for a codec without errors"
            ));
        }
        self.check_bytes(dst, bytes)?;
        let first = plan.server.unwrap_or(0) as i64 * plan.stride();
        let shape = [plan.server_chunks as i64 * plan.stride()];
        let (to, first) = (dst.part(first, &shape), Address(payloads.data().wrapping_add(first as usize)));
        let received = Received { name: payloads.name(), first, payloads: count as usize, apart: bytes };
        to_destination!(&mut self.enter()?.backend, stream, Destination::Memory(to), reduce(plan, received))
    }
}
