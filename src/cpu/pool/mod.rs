//! The library's threads: they share the parts of a large job with the caller, and sleep between jobs.
//!
//! The threads work on one job at a time. A caller that finds them busy works alone, at once. `job` shares the parts,
//! and tests/loom checks it in every order. All state is in atomics, for the reason given in `job`.

mod job;
mod sync;

use std::{
    ffi::c_void,
    ops::Range,
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

use crate::ffi::{
    detached,
    error::{Error, Result, error},
    panics::boundary,
};

use super::cpus::{self, CpuSet, SharedCpuSet};

use job::{Pool, Taken};
use sync::Word;

/// Bytes of a thread's stack. Parts take a few KiB; the rest is for thread-local storage, which glibc takes from it.
const STACK_BYTES: usize = 2 << 20;

/// Number of workers that was set, including the caller; 0: as many as this process has CPUs.
static WANTED: AtomicU32 = AtomicU32::new(0);
/// True if the handler that resets the pool in forked children is registered.
static PREPARED: AtomicBool = AtomicBool::new(false);

static POOL: Pool<Error> = Pool {
    taken: AtomicBool::new(false),
    job: AtomicPtr::new(ptr::null_mut()),
    tickets: AtomicU64::new(0),
    left: Word::new(0),
    bell: Word::new(0),
};

/// State of the threads, for the caller that has them.
static TEAM: Team = Team {
    recount: AtomicBool::new(true),
    cpus: AtomicUsize::new(0),
    set: SharedCpuSet::new(),
    started: AtomicUsize::new(0),
    threads: [const { AtomicU64::new(0) }; MOST_WORKERS as usize],
};

struct Team {
    /// True if the next job must count the CPUs, whichever thread starts it.
    recount: AtomicBool,
    /// Number of threads that the CPUs of the callers and the process's quota allow.
    cpus: AtomicUsize,
    /// The CPUs that the threads may run on.
    set: SharedCpuSet,
    /// Number of threads that were started. They never end.
    started: AtomicUsize,
    /// pthread_t of each thread.
    threads: [AtomicU64; MOST_WORKERS as usize],
}

/// Largest number of workers that can be set.
const MOST_WORKERS: u32 = 1024;

/// Sets the number of workers, including the caller, for later jobs. Threads beyond it sleep.
pub fn set_threads(wanted: u32) -> Result<()> {
    if wanted > MOST_WORKERS {
        return Err(error!(InvalidArgument, "n: {wanted} workers; at most {MOST_WORKERS} expected"));
    }
    TEAM.recount.store(true, Ordering::Relaxed);
    WANTED.store(wanted, Ordering::Relaxed);
    Ok(())
}

/// Counts the CPUs now, so that the first large job need not.
pub fn prepare() {
    if let Some(taken) = take() {
        TEAM.update_cpus(&taken);
    }
}

/// Returns the range of part `index` of `parts`, in multiples of 64.
pub fn cut(total: i64, index: usize, parts: usize) -> Range<i64> {
    if parts == 1 {
        return 0..total; // without a division
    }
    let piece = (total / parts as i64 / 64 + 1) * 64;
    (index as i64 * piece).min(total)..((index as i64 + 1) * piece).min(total)
}

/// Runs `work(index, parts)` for every index below `parts`, on the caller and on threads: up to `worth` in all.
/// `parts_for` returns the number of parts for a number of threads. It is larger than the number of threads, so that a
/// slow thread does not delay the job by a whole share. A caller alone has one part. A panic in a part is raised again
/// here, after all parts are done.
pub fn run(worth: usize, parts_for: impl Fn(usize) -> u32, work: impl Fn(usize, usize) + Sync) {
    let Some(taken) = (if worth > 1 && WANTED.load(Ordering::Relaxed) != 1 { take() } else { None }) else {
        return work(0, 1);
    };
    let threads = TEAM.gather(&taken, worth);
    if threads == 1 {
        drop(taken);
        return work(0, 1);
    }
    let outcome = taken.share(threads - 1, parts_for(threads), &|index, parts| Error::catch(|| work(index, parts)));
    drop(taken);
    if let Err(failure) = outcome {
        failure.resume();
    }
}

/// Returns the threads. None: another caller has them, or the handler for forked children could not be registered.
fn take() -> Option<Taken<'static, Error>> {
    if prepared() { POOL.take() } else { None }
}

impl Team {
    /// Returns the number of threads, including the caller, for a job that is worth `worth`. Starts missing threads.
    fn gather(&self, taken: &Taken<'_, Error>, worth: usize) -> usize {
        self.update_cpus(taken);
        let workers = match WANTED.load(Ordering::Relaxed) {
            0 => self.cpus.load(Ordering::Relaxed),
            wanted => wanted as usize,
        };
        let others = workers.min(worth) - 1;
        self.start(others).min(others) + 1
    }

    /// Counts the CPUs if this is requested, or if the caller may use a CPU that was not counted. An earlier caller, or
    /// the process, may have been limited to fewer.
    fn update_cpus(&self, taken: &Taken<'_, Error>) {
        let recount = self.recount.swap(false, Ordering::Relaxed);
        let callers = CpuSet::of_caller();
        if recount || callers.as_ref().is_some_and(|set| !self.set.has_all_of(set)) {
            self.count_cpus(taken, callers.as_ref(), recount);
        }
    }

    /// Counts the CPUs. `anew`: forgets the counts for earlier callers.
    #[inline(never)] // keeps its sets off the stack of a job
    fn count_cpus(&self, _: &Taken<'_, Error>, callers: Option<&CpuSet>, anew: bool) {
        if let Some(callers) = callers {
            if anew {
                self.set.store(callers)
            } else {
                self.set.add(callers)
            }
            let (set, started) = (self.set.load(), self.started.load(Ordering::Relaxed));
            self.threads.iter().take(started).for_each(|thread| set.give(thread.load(Ordering::Relaxed)));
        }
        let before = if anew { 0 } else { self.cpus.load(Ordering::Relaxed) };
        self.cpus.store(cpus::count().max(before), Ordering::Relaxed);
    }

    /// Starts threads until there are `wanted`, or the system refuses. Returns the number of threads.
    fn start(&self, wanted: usize) -> usize {
        let mut started = self.started.load(Ordering::Relaxed);
        while started < wanted
            && let Some(thread) = start_one()
        {
            // A thread inherits its starter's CPUs, perhaps only one. (With a set in its attributes, glibc allocates.)
            self.set.load().give(thread);
            self.threads[started].store(thread, Ordering::Relaxed);
            started += 1;
            self.started.store(started, Ordering::Relaxed);
        }
        started
    }
}

/// Runs the loop of a thread, for ever.
extern "C" fn worker(_: *mut c_void) -> *mut c_void {
    boundary(|| {
        POOL.serve(|| false);
        Ok(ptr::null_mut::<c_void>())
    })
}

fn start_one() -> Option<libc::pthread_t> {
    // SAFETY: `worker` needs no argument, and never ends.
    unsafe {
        let thread = detached::start(STACK_BYTES, worker, ptr::null_mut())?;
        libc::pthread_setname_np(thread, cpus::OWN_NAME.as_ptr());
        Some(thread)
    }
}

/// Registers the handler that resets the pool in forked children. This is done before the threads are taken, so that no
/// child misses it; a second registration is harmless.
fn prepared() -> bool {
    // SAFETY: `reset_in_child` can be called in a forked child.
    if !PREPARED.load(Ordering::Relaxed) && unsafe { libc::pthread_atfork(None, None, Some(reset_in_child)) } == 0 {
        PREPARED.store(true, Ordering::Relaxed);
    }
    PREPARED.load(Ordering::Relaxed)
}

/// Resets the pool in a forked child: see [`Pool::reset_in_child`].
extern "C" fn reset_in_child() {
    boundary(|| {
        TEAM.recount.store(true, Ordering::Relaxed);
        TEAM.started.store(0, Ordering::Relaxed);
        POOL.reset_in_child();
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashSet,
        env,
        ffi::CStr,
        mem::MaybeUninit,
        process::{Command, Output},
        sync::{Barrier, Mutex},
        thread,
    };

    use super::*;
    use crate::ffi::panics::last_error;

    /// Runs a job with as many parts as threads.
    fn run(worth: usize, work: impl Fn(usize, usize) + Sync) {
        super::run(worth, |threads| threads as u32, work);
    }

    const ALONE: &str = "GRADCODEC_TEST_ALONE";

    /// Runs a test again in its own process, where no other test takes the threads or changes their number.
    fn again_alone(test: &str) -> Output {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "--nocapture", &format!("cpu::pool::tests::{test}")])
            .env(ALONE, "1")
            .output()
            .unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
        child
    }

    macro_rules! alone {
        (fn $name:ident() $body:block) => {
            #[test]
            fn $name() {
                if env::var_os(ALONE).is_none() {
                    again_alone(stringify!($name));
                    return;
                }
                // SAFETY: the alarm ends this process, which has no other handler, if a job is never done.
                unsafe { libc::alarm(60) };
                $body
            }
        };
    }

    /// Returns how often each part of a job ran.
    fn runs_of(worth: usize) -> Vec<u32> {
        let (runs, parts_seen) = ([const { AtomicU32::new(0) }; 100], AtomicUsize::new(0));
        run(worth, |index, parts| {
            runs[index].fetch_add(1, Ordering::Relaxed);
            parts_seen.store(parts, Ordering::Relaxed);
        });
        let (these, beyond) = runs.split_at(parts_seen.into_inner());
        assert!(beyond.iter().all(|runs| runs.load(Ordering::Relaxed) == 0), "a part beyond the last one");
        these.iter().map(|runs| runs.load(Ordering::Relaxed)).collect()
    }

    /// Returns the threads that do a job whose parts wait for each other.
    fn threads_of(parts: usize) -> HashSet<thread::ThreadId> {
        let (barrier, threads) = (Barrier::new(parts), Mutex::new(HashSet::new()));
        run(parts, |_, parts_made| {
            threads.lock().unwrap().insert(thread::current().id());
            if parts_made == parts {
                barrier.wait();
            }
        });
        threads.into_inner().unwrap()
    }

    alone! {
        fn every_part_runs_once() {
            for wanted in [2, 1, 7, 3, 64, 2] {
                set_threads(wanted).unwrap();
                for worth in (0..=9).chain([63, 64, 65, 99]) {
                    for _ in 0..50 {
                        assert_eq!(runs_of(worth), vec![1; worth.clamp(1, wanted as usize)], "{worth} {wanted}");
                    }
                }
            }
        }
    }

    alone! {
        fn a_slow_thread_delays_at_most_one_part() {
            set_threads(3).unwrap();
            let (slow, done, parts) = (Barrier::new(2), AtomicUsize::new(0), 100);
            super::run(3, |threads| { assert_eq!(threads, 3); parts }, |index, parts| {
                // The thread with the first part waits for the thread that does the last of the other parts.
                if index == 0 || done.fetch_add(1, Ordering::Relaxed) + 2 == parts {
                    slow.wait();
                }
            });
            assert_eq!(done.into_inner() + 1, parts as usize);
        }
    }

    alone! {
        fn the_number_of_threads_includes_the_caller() {
            for wanted in [2, 5, 3, 5, 9] {
                set_threads(wanted).unwrap();
                assert_eq!(threads_of(wanted as usize).len(), wanted as usize);
            }
            assert_eq!(TEAM.started.load(Ordering::Relaxed), 8, "the caller is the ninth");
        }
    }

    alone! {
        fn one_worker_is_the_caller_and_starts_nothing() {
            set_threads(1).unwrap();
            assert_eq!(runs_of(64), [1]);
            assert_eq!(threads_of(1), HashSet::from([thread::current().id()]));
            assert_eq!(TEAM.started.load(Ordering::Relaxed), 0);
        }
    }

    alone! {
        fn without_threads_the_caller_runs_all_parts() {
            set_threads(4).unwrap();
            let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: limits of this process, which is this test's own: no more memory for stacks.
            unsafe {
                libc::getrlimit(libc::RLIMIT_AS, &mut before);
                libc::setrlimit(libc::RLIMIT_AS, &libc::rlimit { rlim_cur: 0, ..before });
            }
            let (done, parts_made) = (AtomicUsize::new(0), AtomicUsize::new(0));
            run(4, |_, parts| {
                done.fetch_add(1, Ordering::Relaxed);
                parts_made.store(parts, Ordering::Relaxed);
            });
            // SAFETY: a limit that this process had before.
            unsafe { libc::setrlimit(libc::RLIMIT_AS, &before) };
            assert_eq!((done.into_inner(), parts_made.into_inner()), (1, 1));
            assert_eq!(runs_of(4), [1; 4]);
        }
    }

    alone! {
        fn without_a_number_there_are_as_many_as_cpus() {
            set_threads(3).unwrap();
            set_threads(0).unwrap();
            let cpus = thread::available_parallelism().unwrap().get();
            assert_eq!(runs_of(99).len(), cpus.min(99));
        }
    }

    alone! {
        fn callers_at_the_same_time_all_get_their_work_done() {
            set_threads(4).unwrap();
            thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        for _ in 0..5000 {
                            let runs = runs_of(4);
                            assert!(runs == [1] || runs == [1; 4], "{runs:?}");
                        }
                    });
                }
            });
            assert_eq!(runs_of(4), [1; 4]);
        }
    }

    alone! {
        fn a_caller_works_alone_while_the_threads_are_busy() {
            set_threads(3).unwrap();
            let parts_within = Mutex::new(Vec::new());
            run(3, |_, _| parts_within.lock().unwrap().push(runs_of(3)));
            assert_eq!(parts_within.into_inner().unwrap(), [[1], [1], [1]]);
            assert_eq!(runs_of(3), [1, 1, 1]);
        }
    }

    alone! {
        fn signals_of_the_host_stay_with_its_threads() {
            set_threads(3).unwrap();
            let blocked = |signal| {
                let mut mask = MaybeUninit::uninit();
                // SAFETY: asks for this thread's mask, which is then initialized.
                unsafe {
                    libc::pthread_sigmask(libc::SIG_SETMASK, ptr::null(), mask.as_mut_ptr());
                    libc::sigismember(mask.as_ptr(), signal) == 1
                }
            };
            let (caller, barrier, masks) = (thread::current().id(), Barrier::new(3), Mutex::new(Vec::new()));
            run(3, |_, _| {
                barrier.wait();
                let is_caller = thread::current().id() == caller;
                masks.lock().unwrap().push((is_caller, [libc::SIGINT, libc::SIGCHLD, libc::SIGSEGV].map(blocked)));
            });
            let mut masks = masks.into_inner().unwrap();
            masks.sort();
            let of_a_thread = (false, [true, true, false]);
            assert_eq!(masks, [of_a_thread, of_a_thread, (true, [false; 3])]);
        }
    }

    /// Runs in the process that the next test starts.
    #[test]
    fn a_part_that_panics() {
        if env::var_os(ALONE).is_none() {
            return;
        }
        set_threads(4).unwrap();
        let (caller, barrier) = (thread::current().id(), Barrier::new(4));
        for caller_panics in [false, true] {
            let done = AtomicU32::new(0);
            let status = boundary(|| {
                run(4, |_, _| {
                    barrier.wait();
                    done.fetch_add(1, Ordering::Relaxed);
                    assert!((thread::current().id() == caller) != caller_panics, "not to be printed");
                });
                Ok(())
            });
            // SAFETY: this thread's text, which ends with a NUL.
            let words = unsafe { CStr::from_ptr(last_error()) }.to_str().unwrap();
            eprintln!("{status} after {done:?} parts: {words}");
        }
        assert_eq!(runs_of(4), [1; 4]);
    }

    #[test]
    fn a_panic_in_a_part_is_silent_and_names_its_place() {
        let stderr = String::from_utf8(again_alone("a_part_that_panics").stderr).unwrap();
        let lines: Vec<&str> = stderr.lines().collect();
        assert_eq!(lines.len(), 4, "two sentences of two lines, and nothing else: {stderr}");
        for sentence in lines.chunks(2) {
            assert!(sentence[0].starts_with("99 after 4 parts: a defect of this library, caught: "), "{stderr}");
            assert!(sentence[0].contains("src/cpu/pool/mod.rs:"), "{stderr}");
            assert_eq!(sentence[1], "not to be printed", "{stderr}");
        }
    }
}
