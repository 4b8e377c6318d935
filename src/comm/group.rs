//! Ranks that are threads of one process.
//!
//! A round: each rank posts what it sends, waits until all have, takes what is meant for it out of the others' memory, and
//! waits until all have done so, for until then what it sent must stay.

use std::{
    ptr,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

use crate::{
    cancel,
    error::{Error, Result, error},
    tensor::Device,
};

use super::{
    Communicator, Shared,
    transport::{Exchange, Pattern, Transport},
};

/// What the ranks share.
struct Group {
    round: Mutex<Round>,
    /// All have posted, or all have taken, or one has given up.
    moved: Condvar,
}

struct Round {
    /// By rank.
    posts: Vec<Option<Post>>,
    posted: usize,
    taken: usize,
    number: u64,
    /// A rank that will come no more.
    gone: Option<usize>,
}

/// What a rank offers to the others.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Post {
    pattern: Pattern,
    bytes: usize,
    /// The address as a number, to be shared.
    send: usize,
}

/// One rank's part of a group.
pub struct Member {
    rank: usize,
    group: Shared<Group>,
}

/// The communicators of a group, by rank.
pub fn group(world: usize) -> Result<Vec<Communicator>> {
    let no_memory = |_| error!(OutOfMemory, "{world} communicators could not be had");
    let (mut posts, mut all) = (Vec::new(), Vec::new());
    posts.try_reserve_exact(world).map_err(no_memory)?;
    all.try_reserve_exact(world).map_err(no_memory)?;
    posts.resize(world, None);
    let round = Round { posts, posted: 0, taken: 0, number: 0, gone: None };
    let group = Shared::new(Group { round: Mutex::new(round), moved: Condvar::new() })?;
    for rank in 0..world {
        all.push(Communicator::new(rank, world, Transport::Group(Member { rank, group: group.clone() })));
    }
    Ok(all)
}

impl Member {
    pub fn exchange(&self, rank: usize, world: usize, exchange: &Exchange) -> Result<()> {
        if let Device::Cuda(_) = exchange.device {
            return Err(error!(
                UnsupportedDevice,
                "a group in one process exchanges host memory, not {}", exchange.device
            ));
        }
        let _delay = cancel::delay();
        let own = Post { pattern: exchange.pattern, bytes: exchange.bytes, send: exchange.send.expose_provenance() };
        let number = self.post(own)?;
        let outcome = (0..world).try_for_each(|other| self.take(rank, other, &own, exchange));
        // The others must not wait for this rank, whatever it has found.
        self.done(world, number);
        outcome
    }

    /// Posts, and waits until all have. Tells the number of the round.
    fn post(&self, own: Post) -> Result<u64> {
        let mut round = self.lock();
        check(&round)?;
        let number = round.number;
        round.posts[self.rank] = Some(own);
        round.posted += 1;
        if round.posted == round.posts.len() {
            self.group.moved.notify_all();
        }
        while round.posted < round.posts.len() {
            check(&round)?;
            round = self.group.moved.wait(round).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(number)
    }

    /// Takes what another rank has for this one.
    fn take(&self, rank: usize, other: usize, own: &Post, exchange: &Exchange) -> Result<()> {
        let Some(post) = self.lock().posts[other] else {
            return Err(gone(other));
        };
        if (post.pattern, post.bytes) != (own.pattern, own.bytes) {
            return Err(error!(
                Comm,
                "rank {other} makes an {:?} of {} bytes where rank {rank} makes an {:?} of {}: ranks' calls come in the same \
                 order",
                post.pattern,
                post.bytes,
                own.pattern,
                own.bytes
            ));
        }
        let block = if own.pattern == Pattern::AllToAll { rank } else { 0 };
        let from = ptr::with_exposed_provenance::<u8>(post.send).wrapping_add(block * own.bytes);
        // SAFETY: the other rank sends a block for each rank, or one for all, which stays until `done`; here is room for a
        // block of each.
        unsafe { exchange.recv.add(other * own.bytes).copy_from_nonoverlapping(from, own.bytes) };
        Ok(())
    }

    /// Waits until all have taken what they wanted. All are in this round, so none of them fails to come.
    fn done(&self, world: usize, number: u64) {
        let mut round = self.lock();
        round.taken += 1;
        if round.taken == world {
            (round.posted, round.taken) = (0, 0);
            round.number += 1;
            self.group.moved.notify_all();
        }
        while round.number == number {
            round = self.group.moved.wait(round).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub fn give_up(&self, rank: usize) {
        let mut round = self.lock();
        round.gone.get_or_insert(rank);
        self.group.moved.notify_all();
    }

    /// Nothing panics while it is held, and each field is right by itself.
    fn lock(&self) -> MutexGuard<'_, Round> {
        self.group.round.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.give_up(self.rank);
    }
}

fn check(round: &Round) -> Result<()> {
    round.gone.map_or(Ok(()), |rank| Err(gone(rank)))
}

fn gone(rank: usize) -> Error {
    error!(Comm, "rank {rank} of the group has failed or was freed")
}
