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
    let own_buffer = device.and_then(|device| OwnBuffer::new(device, bytes, bootstrap.world()));
    let peer_record =
        own_buffer.as_ref().map_or_else(|_| Record::new(SUBJECT, true), |own_buffer| own_buffer.peer_record().record());
    let mut own_buffer = LeakIfHanging::new(own_buffer);
    let records = bootstrap.all_gather_records(SUBJECT, peer_record);
    own_buffer.leak_if(records.is_err() && bootstrap.may_hang());
    let records = records?;
    let mut own_buffer = LeakIfHanging::new(own_buffer.into_inner()?);
    let peer_records = PeerRecord::all(&records, rank)?;
    let timeout_ms = timeout(timeout_ms);
    let reached = own_buffer.reach_all(bootstrap, &peer_records, timeout_ms);
    // After a failed exchange other ranks may have mapped this buffer, and may write to it, so it is kept.
    own_buffer.leak_if(reached.is_err());
    let mut peers = reached??;
    peers.take(own_buffer.into_inner().buffer);
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

    fn peer_record(&self) -> PeerRecord {
        let (host, process) = this_process();
        PeerRecord { bytes: self.buffer.bytes(), host, process, identity: self.identity }
    }

    /// Maps the memory of the other ranks. The inner error says that a rank could not map all buffers; no rank then has
    /// this rank's buffer mapped any more. The outer error is a failure of the bootstrap.
    fn reach_all(
        &self, bootstrap: &Communicator, peer_records: &[PeerRecord], timeout_ms: u32,
    ) -> Result<Result<Peers>> {
        let rank = bootstrap.rank();
        let own = &peer_records[rank];
        let alone = peer_records.iter().all(|other| other.process == own.process);
        let handle = if alone { Ok(NOTHING) } else { self.buffer.handle() };
        let handles = if alone { None } else { Some(bootstrap.all_gather_bytes(handle.as_ref().unwrap_or(&NOTHING))?) };
        let here = || peer_records.iter().filter(|other| other.process == own.process);
        let shares_gpu = here().any(|one| here().filter(|other| one.identity.uuid == other.identity.uuid).count() > 1);
        // The key is the address of the first buffer of this process. No other buffer has this address meanwhile.
        let key = here().next().map_or(0, |first| first.identity.address);
        let (arrivals, found) = match shares_gpu.then(|| Rendezvous::find(key, here().count())).transpose() {
            Ok(arrivals) => (arrivals, Ok(())),
            Err(failure) => (None, Err(failure)),
        };
        let made = handle.and(found).and_then(|()| {
            let (buffers, mapped) = self.map(peer_records, rank, handles.as_ref())?;
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
        &self, peer_records: &[PeerRecord], rank: usize, handles: Option<&Records>,
    ) -> Result<(ArrayVec<u64, MOST_RANKS>, Vec<Mapped>)> {
        let (mut buffers, mut mapped) = (ArrayVec::new(), fallible::list(peer_records.len(), "buffers")?);
        for (number, peer_record) in peer_records.iter().enumerate() {
            let address = match handles {
                Some(handles) if peer_record.process != peer_records[rank].process => {
                    let buffer = self.buffer.open(&handles.0[number])?;
                    let address = buffer.address;
                    mapped.push(buffer);
                    address
                }
                _ => self.buffer.reach(&peer_record.identity)?,
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

    /// Returns the records of all ranks, if their options are the same.
    fn all(records: &Records, own: usize) -> Result<ArrayVec<Self, MOST_RANKS>> {
        let (mut peer_records, own) = (ArrayVec::new(), Self::of(records.of(own)));
        for (rank, record) in records.iter().enumerate() {
            let refusal =
                |why: std::fmt::Arguments<'_>| -> Error { error!(InvalidArgument, "communicator: rank {rank}: {why}") };
            let peer_record = Self::of(record);
            if record.failed() {
                return Err(refusal(format_args!("could not allocate its buffer")));
            }
            if peer_record.bytes != own.bytes {
                return Err(refusal(format_args!(
                    "a buffer of {} bytes expected, got {}",
                    own.bytes, peer_record.bytes
                )));
            }
            if peer_record.host != own.host {
                return Err(error!(UnsupportedDevice, "communicator: rank {rank} is on another node"));
            }
            peer_records.push(peer_record);
        }
        Ok(peer_records)
    }
}

/// Returns numbers that identify this node, since its start, and this process.
fn this_process() -> (u32, u64) {
    static RANDOM: OnceLock<u64> = OnceLock::new();
    let random = RANDOM.get_or_init(|| RandomState::new().build_hasher().finish());
    let host = fnv1a(std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default().into_iter());
    ((host ^ host >> 32) as u32, random ^ u64::from(process::id()) << 32)
}
