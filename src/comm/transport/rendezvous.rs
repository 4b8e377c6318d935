//! A barrier with a timeout for ranks that are threads of this process.

use std::{
    ptr,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::ffi::{
    error::{Result, error},
    fallible,
};

pub struct Rendezvous {
    ranks: usize,
    state: Mutex<State>,
    /// Signalled when all ranks have arrived, or one has given up or aborted.
    moved: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of completed rounds, and number of ranks that have arrived since.
    rounds: u64,
    here: usize,
    given_up: bool,
    aborted: bool,
}

/// Rendezvous that ranks can still find, each with a key that only these ranks have.
static OPEN: Mutex<Vec<(u64, Arc<Rendezvous>)>> = Mutex::new(Vec::new());

impl Rendezvous {
    /// Returns the rendezvous of `ranks` ranks with this key; the first call creates it. Call `close` once all have it.
    pub fn find(key: u64, ranks: usize) -> Result<Arc<Self>> {
        let mut open = lock(&OPEN);
        if let Some((_, found)) = open.iter().find(|(other, _)| *other == key) {
            return Ok(found.clone());
        }
        fallible::reserve(&mut open, 1, "rendezvous")?;
        let new = Arc::new(Self { ranks, state: Mutex::default(), moved: Condvar::new() });
        open.push((key, new.clone()));
        Ok(new)
    }

    /// Removes the rendezvous from the list, because no other rank needs to find it.
    pub fn close(&self) {
        lock(&OPEN).retain(|(_, other)| !ptr::eq(&**other, self));
    }

    /// Waits until all ranks have arrived.
    pub fn wait(&self, milliseconds: u32) -> Result<()> {
        let mut state = lock(&self.state);
        let (round, end) = (state.rounds, Instant::now() + Duration::from_millis(milliseconds.into()));
        state.here += 1;
        if state.here == self.ranks {
            (state.rounds, state.here) = (round + 1, 0);
            self.moved.notify_all();
        }
        while state.rounds == round {
            let left = end.saturating_duration_since(Instant::now());
            if state.aborted {
                return Err(error!(Comm, "communicator: a rank of this process has aborted it"));
            }
            if state.given_up {
                return Err(error!(Comm, "communicator: a rank of this process has given up"));
            }
            if left.is_zero() {
                return Err(error!(
                    Timeout,
                    "communicator: {} of {} ranks of this process arrived within {milliseconds} ms",
                    state.here,
                    self.ranks
                ));
            }
            state = self.moved.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Ends all waits, because a rank has aborted.
    pub fn abort(&self) {
        self.set(|state| state.aborted = true);
    }

    pub fn was_aborted(&self) -> bool {
        lock(&self.state).aborted
    }

    /// Ends all waits, because a rank will not arrive any more.
    pub fn give_up(&self) {
        self.set(|state| state.given_up = true);
    }

    fn set(&self, what: impl FnOnce(&mut State)) {
        what(&mut lock(&self.state));
        self.moved.notify_all();
    }
}

/// Locks a mutex, also if it is poisoned: no code panics while it holds the lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::ffi::error::Status;

    #[test]
    fn all_ranks_pass_after_the_last_arrives() {
        let kept = Rendezvous::find(41, 3).unwrap();
        let passed = thread::scope(|scope| {
            let ranks: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        let barrier = Rendezvous::find(41, 3).unwrap();
                        (0..100).all(|_| barrier.wait(60_000).is_ok())
                    })
                })
                .collect();
            ranks.into_iter().all(|rank| rank.join().unwrap())
        });
        kept.close();
        assert!(passed && lock(&OPEN).iter().all(|(key, _)| *key != 41));
    }

    #[test]
    fn the_wait_for_a_missing_rank_ends_at_the_timeout() {
        let barrier = Rendezvous::find(42, 2).unwrap();
        assert_eq!(barrier.wait(1).unwrap_err().status, Status::Timeout);
        barrier.give_up();
        assert_eq!(barrier.wait(60_000).map_err(|refusal| refusal.status), Ok(())); // two have arrived by now
        assert_eq!(barrier.wait(60_000).unwrap_err().status, Status::Comm);
        barrier.close();
    }
}
