//! Checks that two communicators form a grid of nodes, and combines them.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    ptr,
};

use crate::{
    codec::plan::fnv1a,
    ffi::error::{Error, Result, Status, error},
};

use super::{
    communicator::Communicator,
    record::{Record, Records, Subject},
};

impl Communicator {
    /// Creates a communicator over nodes. Every rank must call this, with its earlier error in `so_far`. One node, or
    /// nodes of one rank, make a flat communicator.
    pub fn hierarchical(intra: &Self, inter: Option<&Self>, so_far: Result<()>) -> Result<Self> {
        let mut links = None;
        let so_far = so_far.and_then(|()| {
            if inter.is_some_and(|inter| ptr::eq(intra, inter)) {
                return Err(error!(InvalidArgument, "intra_node and inter_node are one communicator"));
            }
            links = Some((intra.link()?, inter.map(Self::link).transpose()?));
            Ok(())
        });
        let found = intra.enter().and_then(|_intra_call| {
            let (inter, _inter_call) = match inter.map(|inter| (inter, inter.enter())) {
                None => (None, None),
                Some((inter, Ok(call))) => (Some(inter), Some(call)),
                // `inter` is `intra`, or shares a transport with it.
                Some((_, Err(_))) if so_far.is_err() => (None, None),
                Some((_, Err(refusal))) => return Err(refusal),
            };
            find_grid(intra, inter, so_far)
        });
        if found.as_ref().is_err_and(|failure| failure.status != Status::Busy) {
            // Other ranks may wait for this rank over either communicator.
            [Some(intra), inter].into_iter().flatten().for_each(Self::give_up);
        }
        found??;
        match links {
            Some((intra, Some(inter))) if intra.world == 1 => Ok(Self::Flat(inter)),
            Some((intra, Some(inter))) if inter.world == 1 => Ok(Self::Flat(intra)),
            Some((intra, Some(inter))) => Ok(Self::Nodes { intra, inter }),
            _ => Err(error!(Panic, "communicator: nodes without links")),
        }
    }
}

const SUBJECT: Subject = Subject::Hierarchical;

/// Checks the grid. Every rank must call this, with its earlier error in `so_far`, and takes part in every exchange,
/// since the others wait. The outer error is a failed exchange, the inner one a refusal by all ranks.
fn find_grid(intra: &Communicator, inter: Option<&Communicator>, so_far: Result<()>) -> Result<Result<()>> {
    let mut outcome = so_far;
    let intra_record = IntraRecord {
        inter: inter.map(|inter| (inter.rank(), inter.world())),
        id: RandomState::new().build_hasher().finish(),
    };
    let here = intra.all_gather_records(SUBJECT, intra_record.record(outcome.is_err()))?;
    outcome = outcome.and(check_node(&here));

    // Exchange records with the ranks that have the same number on other nodes.
    let inter_record = InterRecord { rank: intra.rank(), ranks: intra.world(), id: IntraRecord::of(here.of(0)).id };
    let there =
        inter.map(|inter| inter.all_gather_records(SUBJECT, inter_record.record(outcome.is_err()))).transpose()?;
    let column = there.as_ref().zip(inter);
    if let Some((there, inter)) = column {
        outcome = outcome.and_then(|()| check_column(there, inter.rank()));
    }

    // Check that all ranks of this node have found the same nodes, with as many ranks as this node.
    let ids = there.iter().flat_map(Records::iter).flat_map(|record| InterRecord::of(record).id.to_le_bytes());
    let mut report = Record::new(SUBJECT, outcome.is_err());
    report.set_word(0, fnv1a(ids));
    if let Some((there, inter)) = column
        && let Some((node, ranks)) = other_size(there, intra.world())
    {
        (0..).zip([ranks, node, inter.rank()]).for_each(|(index, number)| report.set_word(1 + index, number as u64));
    }
    let reports = intra.all_gather_records(SUBJECT, report)?;
    let refusal = |rank: usize, why: &str| Err(error!(InvalidArgument, "intra_node: rank {rank} {why}"));
    let unequal = reports.iter().find(|one| one.word(1) != 0);
    if unequal.is_none() && here.iter().any(|record| IntraRecord::of(record).inter.is_none()) {
        // All ranks of this node have the record of a rank without inter_node. Ranks with its number on other nodes
        // would wait forever, so no rank can continue: give_up() ends their wait. (In a node with more ranks than
        // another one, no rank waits for the additional ones.)
        inter.into_iter().for_each(Communicator::give_up);
        return Ok(outcome);
    }
    if let Some(one) = unequal {
        outcome = Err(error!(
            InvalidArgument,
            "inter_node: node {} has {} ranks and node {} has {}; as many on every node expected",
            one.word(3),
            intra.world(),
            one.word(2),
            one.word(1)
        ));
    } else if let Some(rank) = reports.iter().position(|one| one.failed()) {
        outcome = outcome.and(refusal(rank, "rejected this pair of communicators"));
    } else if let Some(rank) = (1..intra.world()).find(|&rank| reports.of(rank).word(0) != reports.of(0).word(0)) {
        outcome = outcome.and(refusal(rank, "reaches other nodes by its inter_node than rank 0"));
    }
    if let Some(inter) = inter
        && i32::try_from(inter.world().saturating_mul(intra.world())).is_err()
    {
        outcome = outcome.and(Err(error!(
            InvalidArgument,
            "inter_node: {} nodes of {} ranks; at most 2^31 - 1 ranks expected",
            inter.world(),
            intra.world()
        )));
    }

    // Succeed only if all ranks do.
    let mut done = Record::new(SUBJECT, outcome.is_err());
    if let Some(inter) = inter {
        let column = inter.all_gather_records(SUBJECT, done)?;
        done = Record::new(SUBJECT, column.iter().any(|record| record.failed()));
    }
    if intra.all_gather_records(SUBJECT, done)?.iter().any(|record| record.failed()) {
        outcome = outcome.and(Err(error!(
            InvalidArgument,
            "inter_node: a rank of another node rejected this pair of communicators"
        )));
    }
    Ok(outcome)
}

/// Record that a rank sends to the ranks of its node.
struct IntraRecord {
    /// Rank in inter_node, and its world size; None without inter_node.
    inter: Option<(usize, usize)>,
    /// Random id of the rank. The id of rank 0 stands for the node.
    id: u64,
}

impl IntraRecord {
    fn record(&self, failed: bool) -> Record {
        let mut record = Record::new(SUBJECT, failed);
        let (rank, world) = self.inter.unwrap_or_default();
        (0..).zip([rank as u64, world as u64, self.id]).for_each(|(index, word)| record.set_word(index, word));
        record
    }

    fn of(record: Record) -> Self {
        let [rank, world] = [0, 1].map(|index| record.word(index) as usize);
        Self { inter: (world != 0).then_some((rank, world)), id: record.word(2) }
    }
}

/// Record that a rank sends to the ranks with its number on other nodes.
struct InterRecord {
    /// Rank on its node, and number of ranks there.
    rank: usize,
    ranks: usize,
    id: u64,
}

impl InterRecord {
    fn record(&self, failed: bool) -> Record {
        let mut record = Record::new(SUBJECT, failed);
        let words = [self.rank as u64, self.ranks as u64, self.id];
        (0..).zip(words).for_each(|(index, word)| record.set_word(index, word));
        record
    }

    fn of(record: Record) -> Self {
        let [rank, ranks] = [0, 1].map(|index| record.word(index) as usize);
        Self { rank, ranks, id: record.word(2) }
    }
}

/// Checks that every rank of the node has an inter_node, with the same rank and world size in it.
fn check_node(here: &Records) -> Result<()> {
    let refusal = |rank: usize, why: &str| -> Error { error!(InvalidArgument, "intra_node: rank {rank} {why}") };
    if let Some(rank) = here.iter().position(|record| record.failed()) {
        return Err(refusal(rank, "rejected this pair of communicators"));
    }
    let place = |rank: usize| IntraRecord::of(here.of(rank)).inter.ok_or_else(|| refusal(rank, "has no inter_node"));
    let (first, nodes) = place(0)?;
    for rank in 1..here.0.len() {
        let (own, all) = place(rank)?;
        if (own, all) != (first, nodes) {
            return Err(error!(
                InvalidArgument,
                "inter_node: rank {rank} of intra_node is rank {own} of {all} there, and rank 0 is rank {first} of {nodes}"
            ));
        }
    }
    Ok(())
}

/// Returns the first node whose number of ranks is not `ranks`, and that number.
fn other_size(there: &Records, ranks: usize) -> Option<(usize, usize)> {
    let mut sizes = there.iter().map(|record| InterRecord::of(record).ranks).enumerate();
    sizes.find(|&(_, other)| other != ranks)
}

/// Checks that the ranks of an inter_node have the same number on their nodes.
fn check_column(there: &Records, own: usize) -> Result<()> {
    let expected = InterRecord::of(there.of(own));
    for (node, record) in there.iter().enumerate() {
        let InterRecord { rank, .. } = InterRecord::of(record);
        if record.failed() {
            return Err(error!(InvalidArgument, "inter_node: rank {node} rejected this pair of communicators"));
        }
        if rank != expected.rank {
            return Err(error!(
                InvalidArgument,
                "inter_node: rank {node} is rank {rank} of its node; {}, as here, expected", expected.rank
            ));
        }
    }
    Ok(())
}
