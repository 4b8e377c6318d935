//! The threads of this library: rayon's, started when a job is large enough for them.

use std::{
    num::NonZero,
    process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// Workers asked for, the caller counted; 0: as many as this process has CPUs.
static WANTED: AtomicU32 = AtomicU32::new(0);

/// The pool, of one thread less than there are workers.
struct Pool {
    /// A forked child has this memory, but not the threads.
    process: u32,
    wanted: u32,
    /// None for one worker, or when no thread could be started.
    threads: Option<Arc<ThreadPool>>,
}

static POOL: Mutex<Option<Pool>> = Mutex::new(None);

/// Sets the number of workers, the caller counted, for jobs from now on.
pub fn set_threads(wanted: u32) {
    WANTED.store(wanted, Ordering::Relaxed);
}

/// Runs `work(index, parts)` for every index below `parts`, which is at most `worth`, on the caller and the pool.
pub fn run(worth: usize, work: impl Fn(usize, usize) + Sync) {
    let threads = if worth > 1 { threads() } else { None };
    let parts = threads.as_ref().map_or(1, |pool| pool.current_num_threads() + 1).min(worth.max(1));
    let work = &work;
    match threads {
        Some(pool) if parts > 1 => pool.in_place_scope(|scope| {
            for index in 1..parts {
                scope.spawn(move |_| work(index, parts));
            }
            work(0, parts);
        }),
        _ => work(0, 1),
    }
}

/// The pool's threads, started if they are not there yet; None if there is to be none.
fn threads() -> Option<Arc<ThreadPool>> {
    let wanted = WANTED.load(Ordering::Relaxed);
    if wanted == 1 {
        return None;
    }
    // Waiting here could be for ever, in a child that was forked while another thread held the lock. Whoever finds it
    // taken works alone this once.
    let mut pool = POOL.try_lock().ok()?;
    let current = pool.as_ref().filter(|pool| pool.process == process::id() && pool.wanted == wanted);
    if current.is_none() {
        // In a forked child the threads of the old pool do not exist and cannot be told to end: it is left as it is.
        if let Some(old) = pool.take().filter(|pool| pool.process != process::id()) {
            std::mem::forget(old);
        }
        let workers = match wanted {
            // What the affinity mask and the cgroup allow.
            0 => thread::available_parallelism().map_or(1, NonZero::get),
            wanted => wanted as usize,
        };
        *pool = Some(Pool { process: process::id(), wanted, threads: start(workers - 1) });
    }
    pool.as_ref()?.threads.clone()
}

fn start(threads: usize) -> Option<Arc<ThreadPool>> {
    if threads == 0 {
        return None;
    }
    let builder = ThreadPoolBuilder::new().num_threads(threads).thread_name(|index| format!("gradcodec-{index}"));
    // Without threads the work is done by the caller alone.
    builder.build().ok().map(Arc::new)
}
