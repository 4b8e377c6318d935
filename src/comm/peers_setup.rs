//! Sets up peer memory with the help of another communicator.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    process,
    sync::OnceLock,
};

use arrayvec::ArrayVec;

use crate::{
    codec::plan::fnv1a,
    dlpack::Device,
    ffi::{
        error::{Error, Result, error},
        fallible,
    },
};

use super::{
    buffers::LeakIfHanging,
    communicator::Communicator,
    record::{self, Bytes, Record, Records, Subject},
    transport::{
        Buffer, Identity, MOST_RANKS, Mapped, Peers, Rendezvous, check_buffer_bytes, ordinal_of, ranks_of, timeout,
    },
};

const NOTHING: Bytes = [0; record::BYTES];

impl Communicator {
    /// Creates a communicator over peer memory, allocated and mapped over `bootstrap`. Every rank must call this.
    pub fn open_peers(bootstrap: &Self, device: Result<Device>, bytes: i64, timeout_ms: u32) -> Result<Self> {
        let _call = bootstrap.enter()?;
        open(bootstrap, device, bytes, timeout_ms).map(Self::over)
    }
}

/// Creates the transport. Every rank of `bootstrap` must call this, also with an error as `device`.
fn open(bootstrap: &Communicator, device: Result<Device>, bytes: i64, timeout_ms: u32) -> Result<Peers> {
    let rank = bootstrap.rank();
    // Continue if this fails, because the other ranks wait.
    let opening = device.and_then(|device| OwnBuffer::new(device, bytes, bootstrap.world()));
    let greeting = opening.as_ref().map_or_else(|_| Record::new(SUBJECT, true), |opening| opening.greeting().record());
    let mut opening = LeakIfHanging::new(opening);
    let records = bootstrap.all_gather_records(SUBJECT, greeting);
    opening.leak_if(records.is_err() && bootstrap.may_hang());
    let records = records?;
    let mut opening = LeakIfHanging::new(opening.into_inner()?);
    let greetings = PeerRecord::all(&records, rank)?;
    let timeout_ms = timeout(timeout_ms);
    let reached = opening.reach_all(bootstrap, &greetings, timeout_ms);
    // After a failed exchange other ranks may have mapped this buffer, and may write to it, so it is kept.
    opening.leak_if(reached.is_err());
    let mut peers = reached??;
    peers.take(opening.into_inner().buffer);
    Ok(peers)
}

const SUBJECT: Subject = Subject::Peers;

/// Buffer of a rank before the others are mapped.
struct OwnBuffer {
    buffer: Buffer,
    identity: Identity,
}

impl OwnBuffer {
    fn new(device: Device, bytes: i64, world: usize) -> Result<Self> {
        let world = ranks_of(i32::try_from(world).unwrap_or(i32::MAX))?;
        let (ordinal, bytes) = (ordinal_of(device)?, check_buffer_bytes("bytes", bytes, world)?);
        let buffer = Buffer::new(ordinal, bytes)?;
        let identity = buffer.identity()?;
        Ok(Self { buffer, identity })
    }

    fn greeting(&self) -> PeerRecord {
        let (host, process) = this_process();
        PeerRecord { bytes: self.buffer.bytes(), host, process, identity: self.identity }
    }

    /// Maps the memory of the other ranks. The inner error says that ranks cannot reach each other; then no rank has
    /// this rank's buffer mapped any more. The outer error is a failure of the bootstrap.
    fn reach_all(&self, bootstrap: &Communicator, greetings: &[PeerRecord], timeout_ms: u32) -> Result<Result<Peers>> {
        let rank = bootstrap.rank();
        let own = &greetings[rank];
        let alone = greetings.iter().all(|other| other.process == own.process);
        let handle = if alone { Ok(NOTHING) } else { self.buffer.handle() };
        let handles = if alone { None } else { Some(bootstrap.all_gather_bytes(handle.as_ref().unwrap_or(&NOTHING))?) };
        let here = || greetings.iter().filter(|other| other.process == own.process);
        let shares_gpu = here().any(|one| here().filter(|other| one.identity.uuid == other.identity.uuid).count() > 1);
        // The key is the address of the first buffer of this process. No other buffer has this address meanwhile.
        let key = here().next().map_or(0, |first| first.identity.address);
        let (arrivals, found) = match shares_gpu.then(|| Rendezvous::find(key, here().count())).transpose() {
            Ok(arrivals) => (arrivals, Ok(())),
            Err(failure) => (None, Err(failure)),
        };
        let made = handle.and(found).and_then(|()| {
            let (buffers, mapped) = self.map(greetings, rank, handles.as_ref())?;
            Peers::over_own(&self.buffer, rank, &buffers, timeout_ms, mapped, arrivals.clone())
        });
        let failed = bootstrap.all_gather_records(SUBJECT, Record::new(SUBJECT, made.is_err()));
        let mut made = LeakIfHanging::new(made);
        if let Some(arrivals) = arrivals {
            arrivals.close();
            if failed.is_err() {
                arrivals.give_up(); // other ranks may have succeeded, and wait for this one
            }
        }
        made.leak_if(failed.is_err() && bootstrap.may_hang());
        let (failed, made) = (failed?, made.into_inner());
        let Some(other) = failed.iter().position(|record| record.failed()) else { return Ok(made) };
        let refusal = made.err().unwrap_or_else(|| {
            error!(UnsupportedDevice, "communicator: rank {other} cannot reach the memory of all others")
        });
        // This rank has unmapped all buffers. Wait until the other ranks have, too.
        bootstrap.all_gather_bytes(&NOTHING)?;
        Ok(Err(refusal))
    }

    /// Maps the buffers of all ranks. Returns their addresses, and the mappings of other processes' buffers.
    fn map(
        &self, greetings: &[PeerRecord], rank: usize, handles: Option<&Records>,
    ) -> Result<(ArrayVec<u64, MOST_RANKS>, Vec<Mapped>)> {
        let (mut buffers, mut mapped) = (ArrayVec::new(), fallible::list(greetings.len(), "buffers")?);
        for (number, greeting) in greetings.iter().enumerate() {
            let address = match handles {
                Some(handles) if greeting.process != greetings[rank].process => {
                    let buffer = self.buffer.open(&handles.0[number])?;
                    let address = buffer.address;
                    mapped.push(buffer);
                    address
                }
                _ => self.buffer.reach(&greeting.identity)?,
            };
            buffers.push(address);
        }
        Ok((buffers, mapped))
    }
}

/// Record that a rank sends about itself.
struct PeerRecord {
    bytes: u64,
    /// Numbers of the rank's node since its start, and of the rank's process among those of all nodes.
    host: u32,
    process: u64,
    identity: Identity,
}

impl PeerRecord {
    fn record(&self) -> Record {
        let (mut record, Identity { uuid, address, context }) = (Record::new(SUBJECT, false), self.identity);
        let uuid = u128::from_le_bytes(uuid);
        let words = [self.bytes, self.process, address, context, uuid as u64, (uuid >> 64) as u64];
        (0..).zip(words).for_each(|(index, word)| record.set_word(index, word));
        record.set_small(self.host);
        record
    }

    fn of(record: Record) -> Self {
        let [bytes, process, address, context, low, high] = std::array::from_fn(|index| record.word(index));
        let uuid = (u128::from(high) << 64 | u128::from(low)).to_le_bytes();
        Self { bytes, host: record.small(), process, identity: Identity { uuid, address, context } }
    }

    /// Returns the greetings of all ranks, if their options are the same.
    fn all(records: &Records, own: usize) -> Result<ArrayVec<Self, MOST_RANKS>> {
        let (mut greetings, own) = (ArrayVec::new(), Self::of(records.of(own)));
        for (rank, record) in records.iter().enumerate() {
            let refusal =
                |why: std::fmt::Arguments<'_>| -> Error { error!(InvalidArgument, "communicator: rank {rank}: {why}") };
            let greeting = Self::of(record);
            if record.failed() {
                return Err(refusal(format_args!("could not allocate its buffer")));
            }
            if greeting.bytes != own.bytes {
                return Err(refusal(format_args!("a buffer of {} bytes expected, got {}", own.bytes, greeting.bytes)));
            }
            if greeting.host != own.host {
                return Err(error!(UnsupportedDevice, "communicator: rank {rank} is on another node"));
            }
            greetings.push(greeting);
        }
        Ok(greetings)
    }
}

/// Returns numbers that identify this node, since its start, and this process.
fn this_process() -> (u32, u64) {
    static RANDOM: OnceLock<u64> = OnceLock::new();
    let random = RANDOM.get_or_init(|| RandomState::new().build_hasher().finish());
    let host = fnv1a(std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default().into_iter());
    ((host ^ host >> 32) as u32, random ^ u64::from(process::id()) << 32)
}
