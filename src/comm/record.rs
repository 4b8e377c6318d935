//! The record of 64 bytes that each rank sends when an object is created over a communicator.
//!
//! ```text
//!     0       2         3        4      8       12      16                64
//!     | what  | version | failed | rank | world | small | six words of 64 |
//! ```

use std::fmt;

use crate::ffi::{
    error::{Result, error},
    fallible,
};

/// Bytes of a record.
pub const BYTES: usize = 64;

/// Raw bytes of a record, or other data of this size.
pub type Bytes = [u8; BYTES];

/// Kind of object that is created.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    AllReduce,
    Peers,
    Hierarchical,
}

impl Subject {
    fn tag(self) -> [u8; 2] {
        match self {
            Self::AllReduce => *b"AR",
            Self::Peers => *b"PE",
            Self::Hierarchical => *b"HI",
        }
    }
}

const VERSION: u8 = 2;

#[derive(Clone, Copy)]
pub struct Record(Bytes);

impl Record {
    /// Creates a record. `failed`: the rank has failed, and takes part only so that the others do not wait.
    pub fn new(subject: Subject, failed: bool) -> Self {
        let mut bytes = [0; BYTES];
        bytes[..2].copy_from_slice(&subject.tag());
        (bytes[2], bytes[3]) = (VERSION, failed.into());
        Self(bytes)
    }

    /// Returns the bytes that rank `rank` of `world` ranks sends.
    pub fn of_rank(mut self, rank: usize, world: usize) -> Bytes {
        self.set_half(4, rank as u32);
        self.set_half(8, world as u32);
        self.0
    }

    pub fn failed(&self) -> bool {
        self.0[3] != 0
    }

    pub fn small(&self) -> u32 {
        self.half(12)
    }

    pub fn set_small(&mut self, number: u32) {
        self.set_half(12, number);
    }

    pub fn word(&self, index: usize) -> u64 {
        u64::from(self.half(16 + 8 * index)) | u64::from(self.half(20 + 8 * index)) << 32
    }

    pub fn set_word(&mut self, index: usize, number: u64) {
        self.0[16 + 8 * index..][..8].copy_from_slice(&number.to_le_bytes());
    }

    fn half(&self, at: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|byte| self.0[at + byte]))
    }

    fn set_half(&mut self, at: usize, number: u32) {
        self.0[at..at + 4].copy_from_slice(&number.to_le_bytes());
    }
}

/// Records of all ranks, by rank.
pub struct Records(pub Vec<Bytes>);

impl Records {
    pub fn with_room(ranks: usize) -> Result<Self> {
        let mut all = fallible::list(ranks, "records")?;
        all.resize(ranks, [0; BYTES]);
        Ok(Self(all))
    }

    pub fn of(&self, rank: usize) -> Record {
        Record(self.0[rank])
    }

    pub fn iter(&self) -> impl Iterator<Item = Record> {
        self.0.iter().copied().map(Record)
    }

    /// Checks that all ranks are of one world, each in its place, and create the same kind of object in one version.
    pub fn check(&self, subject: Subject) -> Result<()> {
        for (rank, record) in self.iter().enumerate() {
            let refusal = |why: fmt::Arguments<'_>| Err(error!(InvalidArgument, "communicator: rank {rank}: {why}"));
            if record.0[..2] != subject.tag() {
                return refusal(format_args!("creates something else, or runs another version"));
            }
            if record.0[2] != VERSION {
                return refusal(format_args!("version {VERSION} of records expected, got {}", record.0[2]));
            }
            let (number, world) = (record.half(4), record.half(8));
            if world as usize != self.0.len() {
                return refusal(format_args!("world size {} expected, got {world}", self.0.len()));
            }
            if number as usize != rank {
                return refusal(format_args!("rank {rank} expected, got {number}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_overlap() {
        let mut record = Record(Record::new(Subject::Peers, true).of_rank(3, 5));
        record.set_small(7);
        (0..6).for_each(|index| record.set_word(index, 1 << 40 | index as u64));
        assert!(record.failed() && record.small() == 7 && (record.half(4), record.half(8)) == (3, 5));
        assert!((0..6).all(|index| record.word(index) == 1 << 40 | index as u64));
    }

    #[test]
    fn a_rank_in_another_place_or_world_is_named() {
        let of = |rank, world| Record(Record::new(Subject::AllReduce, false).of_rank(rank, world));
        let found = |records: &[Record]| {
            let records = Records(records.iter().map(|record| record.0).collect());
            records.check(Subject::AllReduce).map_err(|refusal| refusal.message)
        };
        assert_eq!(found(&[of(0, 2), of(1, 2)]), Ok(()));
        assert_eq!(found(&[of(0, 2), of(0, 2)]), Err("communicator: rank 1: rank 1 expected, got 0".into()));
        assert_eq!(found(&[of(0, 3), of(1, 2)]), Err("communicator: rank 0: world size 2 expected, got 3".into()));
        assert!(found(&[of(0, 2), Record::new(Subject::Peers, false)]).unwrap_err().contains("another version"));
    }
}
