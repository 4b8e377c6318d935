//! The handle: an all-reduce that keeps its errors, as its codec does.

use std::sync::{Mutex, MutexGuard, TryLockError};

use crate::{
    backend::Stream,
    error::{Error, Result, error},
    ops::codec::{Codec, Descriptor},
    tensor::View,
};

use super::{Communicator, RECORD, Shared, transport::Span, wire::Wire};

pub struct AllReduce {
    communicator: Shared<Communicator>,
    /// Only ever tried: whoever finds it locked is told so.
    parts: Mutex<Parts>,
}

struct Parts {
    codec: Codec,
    wire: Wire,
}

impl AllReduce {
    /// Every rank comes here, with a descriptor or with what went wrong before it had one, for the others wait.
    pub fn new(communicator: Shared<Communicator>, descriptor: Result<Descriptor<'_>>) -> Result<Self> {
        let entered = communicator.enter()?;
        let parts = descriptor.and_then(|descriptor| Parts::new(&communicator, descriptor));
        let records = communicator.tell_all(&record(&parts))?;
        let parts = parts?;
        compare(&records, communicator.rank)?;
        drop(entered);
        Ok(Self { communicator, parts: Mutex::new(parts) })
    }

    fn enter(&self) -> Result<MutexGuard<'_, Parts>> {
        match self.parts.try_lock() {
            Ok(parts) => Ok(parts),
            Err(TryLockError::WouldBlock) => Err(error!(Busy, "handle: another thread's call on it is under way")),
            Err(TryLockError::Poisoned(_)) => Err(error!(Panic, "handle: an earlier call on it was broken off")),
        }
    }

    /// Replaces values by the mean over the ranks of what they were, with the errors carried.
    pub fn run<'v>(
        &self,
        values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone,
        factors: &[Option<View<'_>>; 2],
        stream: Stream,
    ) -> Result<()> {
        let parts = self.enter()?;
        let _entered = self.communicator.enter()?;
        let Parts { codec, wire } = &*parts;
        // What decoding would refuse, before anything is changed.
        codec.check_outputs(values.clone(), factors)?;
        self.communicator.transport.begin(&mut wire.memory().queue(stream)?, Span::Both)?;
        self.communicator.encode(codec, wire, values.clone(), factors, stream)?;
        let reduced = self.communicator.reduce_among_ranks(codec, wire, stream)?;
        let decoded = self.communicator.decode(codec, &reduced, values, stream);
        self.communicator.end(decoded, wire, Span::Both, stream)
    }

    /// The first half of `run`: the mean of the elements that this rank reduces, before the server's error is added.
    pub fn reduce_scatter<'v>(
        &self,
        values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone,
        factors: &[Option<View<'_>>; 2],
        shard: &View<'_>,
        stream: Stream,
    ) -> Result<()> {
        let parts = self.enter()?;
        let _entered = self.communicator.enter()?;
        let Parts { codec, wire } = &*parts;
        // What would be refused after the encoding, before anything is changed.
        codec.check_shard_output(shard, values.clone(), factors)?;
        self.communicator.transport.begin(&mut wire.memory().queue(stream)?, Span::AllToAll)?;
        self.communicator.encode(codec, wire, values, factors, stream)?;
        self.communicator.mean_among_ranks(codec, wire, shard, stream)?;
        self.communicator.end(Ok(()), wire, Span::AllToAll, stream)
    }

    /// The second half, of any shard.
    pub fn all_gather<'v>(
        &self,
        shard: &View<'_>,
        values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone,
        stream: Stream,
    ) -> Result<()> {
        let parts = self.enter()?;
        let _entered = self.communicator.enter()?;
        let Parts { codec, wire } = &*parts;
        codec.check_shard(shard)?;
        codec.check_outputs(values.clone(), &[Some(*shard)])?;
        self.communicator.transport.begin(&mut wire.memory().queue(stream)?, Span::AllGather)?;
        let reduced = self.communicator.gather_among_ranks(codec, wire, shard, stream)?;
        let decoded = self.communicator.decode(codec, &reduced, values, stream);
        self.communicator.end(decoded, wire, Span::AllGather, stream)
    }

    pub fn flags(&self, dst: &View<'_>, stream: Stream) -> Result<()> {
        self.enter()?.codec.flags(dst, stream)
    }

    pub fn commit(&self, skip: Option<&View<'_>>, stream: Stream) -> Result<()> {
        self.enter()?.codec.commit(skip, stream)
    }

    pub fn rollback(&self, stream: Stream) -> Result<()> {
        self.enter()?.codec.rollback(stream)
    }

    pub fn reset(&self, stream: Stream) -> Result<()> {
        self.enter()?.codec.reset(stream)
    }

    pub fn errors_out(&self, worker: Option<&View<'_>>, server: Option<&View<'_>>, stream: Stream) -> Result<()> {
        self.enter()?.codec.errors_out(worker, server, stream)
    }

    /// `workers`: a row of each rank of a world. `server`: of all elements.
    pub fn errors_in(&self, workers: Option<&View<'_>>, server: Option<&View<'_>>, stream: Stream) -> Result<()> {
        let rank = self.communicator.rank;
        self.enter()?.codec.errors_of_world_in(workers, server, (rank, self.communicator.world), stream)
    }
}

impl Parts {
    fn new(communicator: &Communicator, descriptor: Descriptor<'_>) -> Result<Self> {
        let world = communicator.world;
        if descriptor.n_chunks != 0 && descriptor.n_chunks != world {
            return Err(error!(
                InvalidArgument,
                "options: n_chunks {}; 0 or the world size, {world}, expected", descriptor.n_chunks
            ));
        }
        if descriptor.server != 0 {
            return Err(error!(
                InvalidArgument,
                "options: server {}; 0 expected, for each rank reduces its own chunk", descriptor.server
            ));
        }
        if descriptor.results != descriptor.values {
            return Err(error!(
                InvalidArgument,
                "options: results {}; {} expected, for the values are replaced", descriptor.results, descriptor.values
            ));
        }
        let codec = Codec::new(&Descriptor { n_chunks: world, server: communicator.rank as u64 + 1, ..descriptor })?;
        let wire = Wire::new(communicator, codec.device(), &codec)?;
        Ok(Self { codec, wire })
    }
}

/// What a rank tells the others of its handle: the version of what it sends, whether it has one, and what it computes.
fn record(parts: &Result<Parts>) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..4].copy_from_slice(b"GCAR");
    record[4] = 1;
    match parts {
        Ok(parts) => record[16..24].copy_from_slice(&parts.codec.digest().to_le_bytes()),
        Err(_) => record[8] = 1,
    }
    record
}

/// That all ranks told the same.
fn compare(records: &[[u8; RECORD]], own: usize) -> Result<()> {
    let refusal = |rank: usize, why: &str| -> Error { error!(InvalidArgument, "handle: rank {rank} {why}") };
    for (rank, record) in records.iter().enumerate() {
        if record[..8] != records[own][..8] {
            return Err(refusal(rank, "runs another version"));
        }
        if record[8] != 0 {
            return Err(refusal(rank, "could not make its handle"));
        }
        if record != &records[own] {
            return Err(refusal(rank, "has other options"));
        }
    }
    Ok(())
}
