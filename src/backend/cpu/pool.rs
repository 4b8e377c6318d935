//! The threads of this library: they share the parts of a large job with the caller, and sleep in between.
//!
//! One job at a time has the threads; a caller who finds them at work works alone, at once. Parts are taken, not handed
//! out: what a thread that is late, or not there, does not take, the caller does. Nothing is allocated for a job. All
//! state is in atomics and no lock is held at any time, so that a process can be forked while its threads are anywhere.

use std::{
    ffi::c_void,
    mem::MaybeUninit,
    ptr,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
};

use crate::{
    cancel,
    error::{Error, Result, error},
    panics::boundary,
};

use super::cpus;

/// Stack of a thread. Parts take a few KiB; the rest is for thread-local storage, which glibc takes from it.
const STACK_BYTES: usize = 2 << 20;

/// Signals that an access or an instruction of the thread itself causes: only its own handler can deal with them.
const FAULTS: [i32; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Workers asked for, the caller counted; 0: as many as this process has CPUs.
static WANTED: AtomicU32 = AtomicU32::new(0);
/// The CPUs that this process may use; 0 before they are counted.
static CPUS: AtomicUsize = AtomicUsize::new(0);
/// Whether a forked child will know that it has no threads.
static PREPARED: AtomicBool = AtomicBool::new(false);
/// Whether a caller has the threads. The rest is his to change.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// Threads that were started. They never end.
static STARTED: AtomicUsize = AtomicUsize::new(0);
/// Lies on its caller's stack, and is there as long as a part of it is not done.
static JOB: AtomicPtr<Job<'static>> = AtomicPtr::new(ptr::null_mut());
/// The job's number of parts in the upper half, the next one to be taken in the lower: read and counted in one step, so
/// that who comes late can never take a part of another job than he sees.
static TICKETS: AtomicU64 = AtomicU64::new(0);
/// The parts that are not done. The caller sleeps on it.
static LEFT: AtomicU32 = AtomicU32::new(0);
/// Changes with each job. The threads sleep on it.
static BELL: AtomicU32 = AtomicU32::new(0);

struct Job<'a> {
    work: &'a (dyn Fn(usize, usize) + Sync),
    /// The first panic in a part.
    failure: Mutex<Option<Error>>,
}

/// The most workers that can be asked for.
const MOST_WORKERS: u32 = 1024;

/// Sets the number of workers, the caller counted, for jobs from now on. Threads beyond it sleep.
pub fn set_threads(wanted: u32) -> Result<()> {
    if wanted > MOST_WORKERS {
        return Err(error!(InvalidArgument, "n: {wanted} workers; at most {MOST_WORKERS} expected"));
    }
    CPUS.store(0, Ordering::Relaxed);
    WANTED.store(wanted, Ordering::Relaxed);
    Ok(())
}

/// Runs `work(index, parts)` for every index below `parts`, which is at most `worth`, on the caller and the threads. A
/// panic in a part is raised again here, when all parts are done.
pub fn run(worth: usize, work: impl Fn(usize, usize) + Sync) {
    let wanted = if worth > 1 { workers().min(worth) } else { 1 };
    if wanted == 1 || !prepared() || TAKEN.swap(true, Ordering::Acquire) {
        return work(0, 1);
    }
    let outcome = share(start(wanted - 1).min(wanted - 1) + 1, &work);
    TAKEN.store(false, Ordering::Release);
    if let Err(failure) = outcome {
        failure.resume();
    }
}

/// The number of workers wanted.
pub fn workers() -> usize {
    match (WANTED.load(Ordering::Relaxed), CPUS.load(Ordering::Relaxed)) {
        (0, 0) => {
            // What the affinity mask and the cgroup allow. Reads files: once.
            let cpus = cpus::count();
            CPUS.store(cpus, Ordering::Relaxed);
            cpus
        }
        (0, cpus) => cpus,
        (wanted, _) => wanted as usize,
    }
}

/// Does a job of the caller, who has the threads.
fn share(parts: usize, work: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
    let job = Job { work, failure: Mutex::new(None) };
    JOB.store(ptr::from_ref(&job).cast_mut().cast(), Ordering::Relaxed);
    LEFT.store(parts as u32, Ordering::Relaxed);
    TICKETS.store((parts as u64) << 32, Ordering::Release);
    BELL.fetch_add(1, Ordering::Release);
    wake(&BELL, parts - 1);
    do_parts();
    loop {
        match LEFT.load(Ordering::Acquire) {
            0 => break,
            left => sleep(&LEFT, left),
        }
    }
    job.failure.into_inner().unwrap_or(None).map_or(Ok(()), Err)
}

/// Takes parts of the job, and does them, until there are none to be taken.
fn do_parts() {
    loop {
        let ticket = TICKETS.fetch_add(1, Ordering::Acquire);
        let (index, parts) = ((ticket & u64::from(u32::MAX)) as usize, (ticket >> 32) as usize);
        if index >= parts {
            return;
        }
        // SAFETY: the job was there before its tickets, and stays until this part of it is counted as done, below.
        let job = unsafe { &*JOB.load(Ordering::Relaxed) };
        if let Err(failure) = Error::catch(|| (job.work)(index, parts))
            && let Ok(mut first) = job.failure.lock()
        {
            first.get_or_insert(failure);
        }
        if LEFT.fetch_sub(1, Ordering::AcqRel) == 1 {
            wake(&LEFT, 1);
        }
    }
}

/// What a thread does, for ever.
extern "C" fn worker(_: *mut c_void) -> *mut c_void {
    boundary(|| -> Result<*mut c_void> {
        loop {
            // Read before the tickets are looked at: a job that comes in between has changed it, and sleep returns.
            let rung = BELL.load(Ordering::Acquire);
            do_parts();
            sleep(&BELL, rung);
        }
    })
}

/// Starts threads until there are as many as `wanted`, or the system refuses; tells how many there are.
fn start(wanted: usize) -> usize {
    let mut started = STARTED.load(Ordering::Relaxed);
    while started < wanted && start_one() {
        started += 1;
        STARTED.store(started, Ordering::Relaxed);
    }
    started
}

fn start_one() -> bool {
    let _delay = cancel::delay();
    let (mut thread, mut attributes) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    let (mut blocked, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: each is initialized by the first function that gets it, which cannot fail with these arguments but for
    // pthread_create; `worker` needs nothing of this frame and never ends.
    unsafe {
        libc::pthread_attr_init(attributes.as_mut_ptr());
        libc::pthread_attr_setdetachstate(attributes.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES);
        // Handlers of the host run on the host's threads. A new thread has the mask of the one that starts it.
        libc::sigfillset(blocked.as_mut_ptr());
        for fault in FAULTS {
            libc::sigdelset(blocked.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), before.as_mut_ptr());
        let refusal = libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), worker, ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        if refusal == 0 {
            libc::pthread_setname_np(thread.assume_init(), c"gradcodec".as_ptr());
        }
        refusal == 0
    }
}

/// Sees to it that forked children start anew. Before anything is taken, so that no child can miss it; twice is harmless.
fn prepared() -> bool {
    // SAFETY: a function that can be called in a forked child.
    if !PREPARED.load(Ordering::Relaxed) && unsafe { libc::pthread_atfork(None, None, Some(start_anew)) } == 0 {
        PREPARED.store(true, Ordering::Relaxed);
    }
    PREPARED.load(Ordering::Relaxed)
}

/// In a forked child: it has this memory as some thread may have been about to change it, but the forking thread alone.
extern "C" fn start_anew() {
    boundary(|| {
        CPUS.store(0, Ordering::Relaxed);
        STARTED.store(0, Ordering::Relaxed);
        TICKETS.store(0, Ordering::Relaxed);
        TAKEN.store(false, Ordering::Relaxed);
        Ok(())
    });
}

/// Sleeps until somebody wakes this word's sleepers, unless it is not `expected` any more. May return early.
fn sleep(word: &AtomicU32, expected: u32) {
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: a word that is there, and no time limit.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, expected, ptr::null::<libc::timespec>()) };
}

/// Wakes up to `count` of those who sleep on this word.
fn wake(word: &AtomicU32, count: usize) {
    // SAFETY: a word that is there.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, count as i32) };
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashSet,
        env,
        ffi::CStr,
        process::{Command, Output},
        sync::Barrier,
        thread,
    };

    use super::*;
    use crate::panics::last_error;

    const ALONE: &str = "GRADCODEC_TEST_ALONE";

    /// Has a test run again in a process of its own, where nobody else takes the threads or changes their number.
    fn again_alone(test: &str) -> Output {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "--nocapture", &format!("backend::cpu::pool::tests::{test}")])
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
                // SAFETY: a job that is never done is to end this process, which has no other handler.
                unsafe { libc::alarm(60) };
                $body
            }
        };
    }

    /// How often each part of a job ran.
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

    /// The threads that do a job of parts that wait for each other.
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
        fn as_many_threads_work_as_are_wanted_the_caller_counted() {
            for wanted in [2, 5, 3, 5, 9] {
                set_threads(wanted).unwrap();
                assert_eq!(threads_of(wanted as usize).len(), wanted as usize);
            }
            assert_eq!(STARTED.load(Ordering::Relaxed), 8, "the caller is the ninth");
        }
    }

    alone! {
        fn one_worker_is_the_caller_and_starts_nothing() {
            set_threads(1).unwrap();
            assert_eq!(runs_of(64), [1]);
            assert_eq!(threads_of(1), HashSet::from([thread::current().id()]));
            assert_eq!(STARTED.load(Ordering::Relaxed), 0);
        }
    }

    alone! {
        fn without_threads_the_caller_does_it_all() {
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
            // SAFETY: as above.
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
        fn a_caller_who_finds_the_threads_at_work_works_alone() {
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

    /// Run by the next test.
    #[test]
    fn jobs_of_which_parts_panic() {
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
                    assert!((thread::current().id() == caller) != caller_panics, "not to be heard");
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
        let stderr = String::from_utf8(again_alone("jobs_of_which_parts_panic").stderr).unwrap();
        let lines: Vec<&str> = stderr.lines().collect();
        assert_eq!(lines.len(), 4, "two sentences of two lines, and nothing else: {stderr}");
        for sentence in lines.chunks(2) {
            assert!(sentence[0].starts_with("99 after 4 parts: a defect of this library, caught: "), "{stderr}");
            assert!(sentence[0].contains("src/backend/cpu/pool.rs:"), "{stderr}");
            assert_eq!(sentence[1], "not to be heard", "{stderr}");
        }
    }
}
