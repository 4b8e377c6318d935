//! What reduces all chunks of whole payloads, where every rank has them.

use crate::{
    codec::{
        call::{Destination, Received},
        cuda::To,
    },
    cuda::Stream,
    dlpack::{Address, View},
    ffi::{
        error::{Error, Result, Status, error},
        fallible,
    },
};

use super::{Backend, Codec};

/// Codecs that keep nothing: of a block codec one, which reduces all chunks at once, otherwise one for each chunk.
pub struct Reducers(Vec<Codec>);

impl Reducers {
    /// For what a codec encodes, to what those with its options reduce that to.
    pub fn of(codec: &Codec) -> Result<Self> {
        let plan = codec.plan();
        let (chunks, at_once) = (plan.n_chunks, plan.chunks_at_once());
        let mut reducers = fallible::list(chunks / at_once, "reducers")?;
        for first in (0..chunks).step_by(at_once) {
            reducers.push(Codec::of_plan(codec.device(), plan.reducer(first)?)?);
        }
        Ok(Self(reducers))
    }

    /// `payloads`: one of each rank. `dst`: a payload, of reduced chunks. One that is corrupt goes on, flagged, and so
    /// the decoding says.
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
    /// Reduces the chunks of whole payloads that this codec is for, to their places in one.
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
