//! How one job at a time is shared: who takes which part, and when all of them are done.
//!
//! Parts are taken, not handed out: a thread that is late, or not there, takes none, and the caller does them. No lock
//! is held and nothing is allocated, so that a process can be forked while its threads are anywhere in here. The
//! atomics and the futex are those of `sync`, so that `tests/loom` can put a model checker's in their place.

use super::sync::{AtomicBool, AtomicPtr, AtomicU64, Mutex, Ordering, Word};

/// What the threads of a process and their callers share. `E` is how a part fails.
pub struct Pool<E: 'static> {
    /// Whether a caller has the threads. Only that caller changes the rest.
    pub(super) taken: AtomicBool,
    /// Lies on its caller's stack, and is there as long as a part of it is not done.
    pub(super) job: AtomicPtr<Job<'static, E>>,
    /// The job's number of parts in the upper half, the next one to be taken in the lower. They are read and counted in
    /// one step, so that a late thread can only take a part of the job that it sees.
    pub(super) tickets: AtomicU64,
    /// The parts that are not done. The caller sleeps on it.
    pub(super) left: Word,
    /// Changes with each job. The threads sleep on it.
    pub(super) bell: Word,
}

pub struct Job<'a, E> {
    work: &'a (dyn Fn(usize, usize) -> Result<(), E> + Sync),
    /// The first failure of a part.
    failure: Mutex<Option<E>>,
}

/// A caller's right to the threads.
pub struct Taken<'a, E: 'static>(&'a Pool<E>);

impl<E> Drop for Taken<'_, E> {
    fn drop(&mut self) {
        // Not a store: see `share`.
        self.0.taken.swap(false, Ordering::Release);
    }
}

impl<E> Pool<E> {
    /// The threads, unless another caller has them.
    pub fn take(&self) -> Option<Taken<'_, E>> {
        (!self.taken.swap(true, Ordering::Acquire)).then(|| Taken(self))
    }

    /// What a thread does until it has `ended`.
    pub fn serve(&self, ended: impl Fn() -> bool) {
        loop {
            // Read before the tickets are looked at: a job that comes in between has changed it, and sleep returns.
            let rung = self.bell.load(Ordering::Acquire);
            if ended() {
                return;
            }
            self.do_parts();
            self.bell.sleep(rung);
        }
    }

    /// Forgets the threads and their job. In a forked child, which has this memory as some thread may have been about
    /// to change it, but the forking thread alone.
    pub fn start_anew(&self) {
        self.tickets.store(0, Ordering::Relaxed);
        self.taken.store(false, Ordering::Relaxed);
    }

    /// Takes parts of the job, and does them, until there are none to be taken.
    pub fn do_parts(&self) {
        loop {
            let ticket = self.tickets.fetch_add(1, Ordering::Acquire);
            let (index, parts) = ((ticket & u64::from(u32::MAX)) as usize, (ticket >> 32) as usize);
            if index >= parts {
                return;
            }
            // SAFETY: the job was there before its tickets, and stays until this part of it is counted as done, below.
            let job = unsafe { &*self.job.load(Ordering::Relaxed) };
            if let Err(failure) = (job.work)(index, parts)
                && let Ok(mut first) = job.failure.lock()
            {
                first.get_or_insert(failure);
            }
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.left.wake(1);
            }
        }
    }
}

impl<E> Taken<'_, E> {
    /// Runs `work(index, parts)` for every index below `parts` on this thread and up to `others` more. Returns when all
    /// parts are done, with the first failure. `work` does not panic.
    pub fn share(
        &self, others: usize, parts: u32, work: &(dyn Fn(usize, usize) -> Result<(), E> + Sync),
    ) -> Result<(), E> {
        let pool = self.0;
        let job = Job { work, failure: Mutex::new(None) };
        pool.job.store((&raw const job).cast_mut().cast(), Ordering::Relaxed);
        pool.left.store(parts, Ordering::Relaxed);
        // A late thread may be counting the last job's tickets. A store cannot come between the reading and the writing
        // of its step, but loom does not know that. A swap costs nothing here.
        pool.tickets.swap(u64::from(parts) << 32, Ordering::Release);
        pool.bell.fetch_add(1, Ordering::Release);
        pool.bell.wake(others);
        pool.do_parts();
        loop {
            match pool.left.load(Ordering::Acquire) {
                0 => break,
                left => pool.left.sleep(left),
            }
        }
        job.failure.into_inner().ok().flatten().map_or(Ok(()), Err)
    }
}
