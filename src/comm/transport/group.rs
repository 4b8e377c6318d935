//! Ranks that are threads of one process.
//!
//! In a round each rank posts the blocks that it sends, waits until all ranks have posted, and takes its blocks from
//! the memory of the others. Then it waits until all have taken theirs: what it sent must stay until then. On GPUs the
//! threads wait in the same way, and their streams by events, which stay until all ranks have left the round.

use std::{
    ptr,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use crate::{
    cuda::{self, Event, EventHandle},
    device::Queue,
    ffi::{
        error::{Error, Result, error},
        fallible,
    },
};

use super::exchange::{Exchange, Pattern, Transport};

/// State that the ranks share.
struct Group {
    round: Mutex<Round>,
    /// Signalled when all ranks have posted, taken or left, or one has given up.
    moved: Condvar,
}

struct Round {
    /// Posts of the ranks, by rank.
    posts: Vec<Option<Post>>,
    /// Numbers of ranks that have posted, taken and left in this round.
    posted: usize,
    taken: usize,
    left: usize,
    /// Rank that makes no further calls, if there is one.
    gone: Option<usize>,
}

/// Blocks that a rank offers to the others.
#[derive(Clone, Copy)]
struct Post {
    pattern: Pattern,
    bytes: usize,
    /// Address of the blocks, as an integer, so that threads can share it.
    send: usize,
    /// Events on a GPU: the first when the rank's blocks are ready, the second when the rank has taken all of its own.
    events: Option<[EventHandle; 2]>,
}

/// Transport of one rank of a group.
pub struct Member {
    rank: usize,
    world: usize,
    group: Arc<Group>,
    /// Events of this rank's posts, in the context that it last used.
    events: Mutex<Option<[Event; 2]>>,
}

/// Creates the members of a group, by rank.
pub fn group(world: usize) -> Result<impl Iterator<Item = Member>> {
    let mut posts = fallible::list(world, "ranks")?;
    posts.resize(world, None);
    let round = Round { posts, posted: 0, taken: 0, left: 0, gone: None };
    let group = Arc::new(Group { round: Mutex::new(round), moved: Condvar::new() });
    Ok((0..world).map(move |rank| Member { rank, world, group: group.clone(), events: Mutex::new(None) }))
}

/// Stream of a call, and this rank's events in the stream's context.
struct CallStream {
    queue: cuda::Queue,
    events: [EventHandle; 2],
}

impl CallStream {
    /// Records the event after which this rank has taken all its blocks. If that fails, waits for the stream.
    fn record_taken(&mut self) -> Result<()> {
        // SAFETY: the rank keeps its events until all have left the round.
        let recorded = unsafe { self.events[1].record(&mut self.queue) };
        if recorded.is_err() {
            let _ = self.queue.wait_for_all();
        }
        recorded
    }

    /// Makes the stream wait until another rank has taken all its blocks. If that fails, this thread waits.
    ///
    /// # Safety
    /// The event is alive.
    unsafe fn wait_for_taken(&mut self, taken: EventHandle) -> Result<()> {
        // SAFETY: the event is alive, as the caller promises.
        let waiting = unsafe { taken.make_stream_wait(&mut self.queue) };
        if waiting.is_err() {
            // SAFETY: the event is alive, as the caller promises.
            let _ = unsafe { taken.wait(&mut self.queue) };
        }
        waiting
    }
}

impl Member {
    /// Returns the stream of a call on a GPU, and records the event at which this rank's blocks are ready. CPU: None.
    fn call_stream(&self, exchange: &Exchange<'_>) -> Result<Option<CallStream>> {
        let Queue::Cuda(mut queue) = exchange.queue()? else { return Ok(None) };
        let mut kept = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let events = match &*kept {
            Some(events) if events[0].context() == queue.context()?.id => events,
            _ => {
                let events = [Event::new(&mut queue)?, Event::new(&mut queue)?];
                self.wait_until_all_have_left();
                kept.insert(events)
            }
        };
        let events = events.each_ref().map(Event::handle);
        // SAFETY: this rank keeps its events until all have left the round that they are posted in.
        unsafe { events[0].record(&mut queue)? };
        Ok(Some(CallStream { queue, events }))
    }

    /// Waits until the round that this rank has left is over, because the others may be about to wait for its events.
    /// All ranks of a round leave it, also after an abort.
    fn wait_until_all_have_left(&self) {
        let mut round = self.lock();
        while round.posted == self.world {
            round = self.wait(round);
        }
    }

    /// Posts once all ranks have left the round before, and waits until all have posted.
    fn post(&self, own: Post) -> Result<()> {
        let (mut round, world) = (self.lock(), self.world);
        while round.posted == world {
            check(&round)?;
            round = self.wait(round);
        }
        check(&round)?;
        round.posts[self.rank] = Some(own);
        round.posted += 1;
        self.group.moved.notify_all();
        while round.posted < world {
            check(&round)?;
            round = self.wait(round);
        }
        Ok(())
    }

    fn take_all(&self, exchange: &Exchange<'_>, own: &Post, call_stream: &mut Option<CallStream>) -> Result<()> {
        for other in 0..self.world {
            let Some(post) = self.lock().posts[other] else { return Err(gone(other)) };
            self.take(other, &post, own, exchange, call_stream)?;
        }
        Ok(())
    }

    /// Takes the block that another rank has for this one.
    fn take(
        &self, other: usize, post: &Post, own: &Post, exchange: &Exchange<'_>, call_stream: &mut Option<CallStream>,
    ) -> Result<()> {
        if (post.pattern, post.bytes) != (own.pattern, own.bytes) || post.events.is_some() != own.events.is_some() {
            let place = |post: &Post| if post.events.is_some() { "on a GPU" } else { "on the host" };
            return Err(error!(
                Comm,
                "rank {} makes an {:?} of {} bytes {} where rank {other} makes an {:?} of {} bytes {}: calls come in the \
                 same order on every rank",
                self.rank,
                own.pattern,
                own.bytes,
                place(own),
                post.pattern,
                post.bytes,
                place(post)
            ));
        }
        let block = if own.pattern == Pattern::AllToAll { self.rank } else { 0 };
        let from = ptr::with_exposed_provenance::<u8>(post.send).wrapping_add(block * own.bytes);
        // SAFETY: the other rank posted a block for each rank, or one for all, and keeps it until all have taken it.
        // `recv` has room for a block of each rank. The other rank's events are alive as long as its memory.
        unsafe {
            let to = exchange.recv.add(other * own.bytes);
            match (call_stream, post.events) {
                (Some(call_stream), Some([ready, _])) => {
                    ready.make_stream_wait(&mut call_stream.queue)?;
                    call_stream.queue.copy(to, from, own.bytes)?;
                }
                _ => to.copy_from_nonoverlapping(from, own.bytes),
            }
        }
        Ok(())
    }

    /// Makes this rank's stream wait until all ranks have taken its blocks, which later work may overwrite or free.
    fn wait_for_takers(&self, call_stream: &mut Option<CallStream>) -> Result<()> {
        let Some(call_stream) = call_stream else { return Ok(()) };
        let mut waiting = Ok(());
        for other in (0..self.world).filter(|&other| other != self.rank) {
            let post = self.lock().posts[other];
            if let Some([_, taken]) = post.and_then(|post| post.events) {
                // SAFETY: each rank keeps the events that it has posted until all have left the round.
                waiting = waiting.and(unsafe { call_stream.wait_for_taken(taken) });
            }
        }
        waiting
    }

    /// Counts this rank, and waits until all ranks are counted. All ranks are in this round, so each one arrives.
    fn arrive(&self, count: impl Fn(&mut Round) -> &mut usize) {
        let mut round = self.lock();
        *count(&mut round) += 1;
        self.group.moved.notify_all();
        while *count(&mut round) < self.world {
            round = self.wait(round);
        }
    }

    /// Leaves the round. The last rank to leave resets it for the next one.
    fn leave(&self) {
        let mut round = self.lock();
        round.left += 1;
        if round.left == round.posts.len() {
            (round.posted, round.taken, round.left) = (0, 0, 0);
            self.group.moved.notify_all();
        }
    }

    fn mark_gone(&self) {
        let mut round = self.lock();
        round.gone.get_or_insert(self.rank);
        self.group.moved.notify_all();
    }

    /// Locks the round, even if poisoned: no code panics while it holds the lock, and each field is valid by itself.
    fn lock(&self) -> MutexGuard<'_, Round> {
        self.group.round.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, round: MutexGuard<'a, Round>) -> MutexGuard<'a, Round> {
        self.group.moved.wait(round).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for Member {
    fn place(&self) -> (usize, usize) {
        (self.rank, self.world)
    }

    fn exchange(&self, exchange: &Exchange<'_>) -> Result<*const u8> {
        let mut call_stream = self.call_stream(exchange)?;
        let own = Post {
            pattern: exchange.pattern,
            bytes: exchange.bytes,
            send: exchange.send.expose_provenance(),
            events: call_stream.as_ref().map(|call_stream| call_stream.events),
        };
        self.post(own)?;
        // Continue if this fails: the other ranks wait for this one, and blocks that it has begun to take must stay.
        let taken = self.take_all(exchange, &own, &mut call_stream);
        let recorded = call_stream.as_mut().map_or(Ok(()), CallStream::record_taken);
        self.arrive(|round| &mut round.taken);
        // Only now has every rank recorded the event after which it has taken its blocks.
        let waiting = self.wait_for_takers(&mut call_stream);
        self.leave();
        taken.and(recorded).and(waiting).map(|()| exchange.recv.cast_const())
    }

    fn waits_on_host(&self) -> bool {
        true
    }

    fn abort(&self) -> Result<()> {
        self.give_up();
        Ok(())
    }

    fn give_up(&self) {
        self.mark_gone();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.mark_gone();
        self.wait_until_all_have_left();
    }
}

fn check(round: &Round) -> Result<()> {
    round.gone.map_or(Ok(()), |rank| Err(gone(rank)))
}

fn gone(rank: usize) -> Error {
    error!(Comm, "rank {rank} of the group has failed, or was aborted or freed")
}
