//! Encode, reduce and decode: the steps around the work of the codec's family.

use std::mem;

use crate::{
    codec::{
        call::{Decoding, Received, Skip},
        plan::{CORRUPT, CodecPlan, NONFINITE, Run},
    },
    dlpack::{Address, View},
    ffi::error::{Error, Result},
};

use super::{
    Codec, SERVER, chunks, factor,
    family::Family,
    inputs::Inputs,
    state::{scale_in, turn},
};

fn flag_of(nonfinite: bool) -> u32 {
    if nonfinite { NONFINITE } else { 0 }
}

impl Codec {
    /// Encodes a gradient, an address per segment. `factors`: gradients and errors are multiplied by them.
    pub fn encode(
        &mut self, plan: &CodecPlan, values: &[Address], factors: [Option<&View<'_>>; 2], payload: &View<'_>,
    ) -> Result<()> {
        if self.worker.pending {
            self.commit(Skip::Never)?;
        }
        let family = self.family;
        let flags = flag_of(family.encode(self, plan, values, factors.map(factor), payload))
            | mem::take(&mut self.before_encode);
        // A corrupt payload has no other flag.
        let flags = if flags & CORRUPT != 0 { CORRUPT } else { flags };
        for chunk in 0..plan.n_chunks {
            let at = payload.data().wrapping_add(chunk * plan.stride() as usize);
            // SAFETY: the payload has `n_chunks` chunks.
            unsafe { chunks::write_frame(family, plan, at, chunk, flags, &|part| self.scales[part.segment]) };
        }
        (self.worker.pending, self.begun) = (self.transactional, self.transactional);
        self.raise(flags);
        Ok(())
    }

    /// Reduces chunks of each payload to as many in `dst`. If a chunk is corrupt, `dst` is flagged as corrupt, and the
    /// state stays unchanged.
    pub fn reduce(&mut self, plan: &CodecPlan, received: Received, dst: &View<'_>) -> Result<()> {
        let Some(number) = plan.server else { return Ok(()) }; // `ops` refuses this case
        self.commit_pending_reduce()?;
        let family = self.family;
        let inputs = match check_inputs(family, plan, received, number) {
            Ok(sound) => sound,
            Err(failure) => return Err(self.refuse(plan, number, dst, failure)),
        };
        let nonfinite = family.reduce(self, plan, &inputs, dst);
        self.finish_chunks(plan, number, inputs.flags | flag_of(nonfinite), dst);
        Ok(())
    }

    /// Writes the mean (or sum) of `chunks`, one per payload, or the majority as +1 and -1 or NaN, to the parts of a
    /// shard, an address per segment. This is the first half of `reduce`. If a chunk is corrupt, nothing is written.
    /// `room`: memory for a chunk. The state is only read.
    pub fn mean(&mut self, plan: &CodecPlan, chunks: &View<'_>, room: &View<'_>, shard: &[Address]) -> Result<()> {
        let Some(number) = plan.server else { return Ok(()) }; // `ops` refuses this case
        let family = self.family;
        let received = Received::of(chunks, plan.stride());
        let inputs = check_inputs(family, plan, received, number).inspect_err(|_| self.raise(CORRUPT))?;
        let nonfinite = family.mean(self, plan, &inputs, room, shard);
        self.raise(inputs.flags | flag_of(nonfinite));
        Ok(())
    }

    /// Encodes a shard plus the error to a chunk: the second half of `reduce`.
    pub fn encode_shard(&mut self, plan: &CodecPlan, shard: &[Address], dst: &View<'_>) -> Result<()> {
        let Some(number) = plan.server else { return Ok(()) }; // `ops` refuses this case
        self.commit_pending_reduce()?;
        let family = self.family;
        let nonfinite = family.encode_shard(self, plan, number, shard, dst);
        self.finish_chunks(plan, number, flag_of(nonfinite), dst);
        Ok(())
    }

    /// Decodes a payload to an address per segment. If a chunk is corrupt, nothing is written.
    pub fn decode(
        &mut self, plan: &CodecPlan, payload: &View<'_>, by: &Decoding<'_>, values: &[Address],
    ) -> Result<()> {
        let (family, flags) = (self.family, self.check(plan, payload)?);
        let nonfinite = family.decode(self, plan, payload, by, values);
        self.raise(flags | flag_of(nonfinite));
        Ok(())
    }

    /// Refuses a payload with a chunk that is corrupt. Returns the flags of all chunks.
    pub fn check(&mut self, plan: &CodecPlan, payload: &View<'_>) -> Result<u32> {
        let mut flags = 0;
        for chunk in 0..plan.n_chunks {
            let at = payload.data().wrapping_add(chunk * plan.stride() as usize);
            let who = format_args!("{}: chunk {chunk}", payload.name());
            // SAFETY: the payload has `n_chunks` chunks.
            let of_chunk = unsafe { chunks::check(self.family, plan, who, at, chunk) };
            flags |= of_chunk.inspect_err(|_| self.raise(CORRUPT))?;
        }
        Ok(flags)
    }

    /// Commits a pending step of the server, as `encode` does with a pending step of the worker.
    fn commit_pending_reduce(&mut self) -> Result<()> {
        if self.server.pending { self.commit(Skip::Never) } else { Ok(()) }
    }

    /// Writes the frames of the reduced chunks, and increments the turn.
    fn finish_chunks(&mut self, plan: &CodecPlan, number: usize, flags: u32, dst: &View<'_>) {
        let (valid, next) = self.buffers_of(self.server);
        // SAFETY: both buffers are states of this codec, and each has a turn, aligned to 8.
        unsafe { turn(next).write(turn(valid).read().wrapping_add(1)) };
        let scale_of = |part: &Run| {
            // SAFETY: the state has a scale per segment.
            unsafe { scale_in(plan, next, SERVER, part.segment).read() }
        };
        for index in 0..plan.server_chunks {
            let chunk = chunk_of(plan, dst, index);
            // SAFETY: `dst` has `server_chunks` chunks, aligned to 16.
            unsafe { chunks::write_frame(self.family, plan, chunk, number + index, flags, &scale_of) };
        }
        (self.server.pending, self.begun) = (self.transactional, self.transactional);
        self.raise(flags);
    }

    /// Marks `dst` as made of a corrupt chunk. The step counts as begun: on a GPU the host cannot check chunks.
    fn refuse(&mut self, plan: &CodecPlan, number: usize, dst: &View<'_>, failure: Error) -> Error {
        for index in 0..plan.server_chunks {
            let chunk = chunk_of(plan, dst, index);
            // SAFETY: `dst` has `server_chunks` chunks, aligned to 16.
            unsafe {
                chunk.write_bytes(0, plan.stride() as usize);
                chunks::write_frame(self.family, plan, chunk, number + index, CORRUPT, &|_| 0.0);
            }
        }
        self.raise(CORRUPT);
        self.begun = self.transactional;
        failure
    }
}

/// Checks the chunks of several payloads from `number` on. Returns them with their flags, or refuses a corrupt chunk.
fn check_inputs<'a>(family: &dyn Family, plan: &'a CodecPlan, received: Received, number: usize) -> Result<Inputs<'a>> {
    let mut flags = 0;
    for payload in 0..received.payloads {
        let who = format_args!("{}[{payload}]", received.name);
        for index in 0..plan.server_chunks {
            let chunk = received.at(payload).wrapping_add(index * plan.stride() as usize);
            // SAFETY: every payload has `server_chunks` chunks there.
            flags |= unsafe { chunks::check(family, plan, who, chunk, number + index) }?;
        }
    }
    Ok(Inputs { received, number, flags, plan })
}

/// Returns the address of a chunk that is written.
fn chunk_of(plan: &CodecPlan, dst: &View<'_>, index: usize) -> *mut u8 {
    dst.data().wrapping_add(index * plan.stride() as usize)
}
