//! Shares one job at a time: threads take its parts, and the caller waits until all parts are done.
//!
//! No part is assigned to a thread: a thread that is late, or missing, takes none, and the caller does them. No lock is
//! held and nothing is allocated, so the process can be forked at any point of this code. The atomics and the futex are
//! those of `sync`, so that `tests/loom` can replace them by a model checker's.

use super::sync::{AtomicBool, AtomicPtr, AtomicU64, Mutex, Ordering, Word};

/// State that the threads of a process and their callers share. `E`: error type of a part.
pub struct Pool<E: 'static> {
    /// True if a caller has the threads. Only that caller may share a job.
    pub(super) taken: AtomicBool,
    /// Current job. It lies on its caller's stack, and stays there until all of its parts are done.
    pub(super) job: AtomicPtr<Job<'static, E>>,
    /// Number of the job's parts in the upper 32 bits, index of the next part in the lower ones. An atomic add reads
    /// both and counts, so that a late thread can only take a part of the job that it reads.
    pub(super) tickets: AtomicU64,
    /// Number of parts that are not done. The caller sleeps on it.
    pub(super) left: Word,
    /// Counter of jobs. The threads sleep on it.
    pub(super) bell: Word,
}

pub struct Job<'a, E> {
    work: &'a (dyn Fn(usize, usize) -> Result<(), E> + Sync),
    /// First failure of a part.
    failure: Mutex<Option<E>>,
}

/// A caller's exclusive use of the threads.
pub struct Taken<'a, E: 'static>(&'a Pool<E>);

impl<E> Drop for Taken<'_, E> {
    fn drop(&mut self) {
        // This is a swap and not a store, for the reason given in `share`.
        self.0.taken.swap(false, Ordering::Release);
    }
}

impl<E> Pool<E> {
    /// Returns the threads. None: another caller has them.
    pub fn take(&self) -> Option<Taken<'_, E>> {
        (!self.taken.swap(true, Ordering::Acquire)).then(|| Taken(self))
    }

    /// Runs a thread's loop until `ended` returns true.
    pub fn serve(&self, ended: impl Fn() -> bool) {
        loop {
            // Read the bell before the tickets: a job that starts in between changes it, and sleep returns at once.
            let rung = self.bell.load(Ordering::Acquire);
            if ended() {
                return;
            }
            self.do_parts();
            self.bell.sleep(rung);
        }
    }

    /// Forgets the threads and their job, in a forked child. The child has only the forking thread, and this memory
    /// possibly in the middle of another thread's change.
    pub fn reset_in_child(&self) {
        self.tickets.store(0, Ordering::Relaxed);
        self.taken.store(false, Ordering::Relaxed);
    }

    /// Takes parts of the job and does them, until no part is left.
    pub fn do_parts(&self) {
        loop {
            let ticket = self.tickets.fetch_add(1, Ordering::Acquire);
            let (index, parts) = ((ticket & u64::from(u32::MAX)) as usize, (ticket >> 32) as usize);
            if index >= parts {
                return;
            }
            // SAFETY: the job was stored before its tickets, and stays until this part is counted as done, below.
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
        // A late thread may be counting the last job's tickets. A store cannot fall between the read and the write of
        // that atomic add, but loom does not model that. A swap costs nothing here.
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
