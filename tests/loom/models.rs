//! Models how the pool's threads share a job, in every interleaving and with every value that a load may return. Loom
//! fails a model with a data race or with all threads asleep.
#![cfg(test)]

#[path = "../../src/cpu/pool/job.rs"]
mod job;
mod sync;

use std::ptr;

use job::Pool;
use loom::{cell::UnsafeCell, model::Builder, sync::Arc, thread};
use sync::{AtomicBool, AtomicPtr, AtomicU64, Ordering, Word};

type Failure = usize;

fn new_pool() -> Arc<Pool<Failure>> {
    Arc::new(Pool {
        taken: AtomicBool::new(false),
        job: AtomicPtr::new(ptr::null_mut()),
        tickets: AtomicU64::new(0),
        left: Word::new(0),
        bell: Word::new(0),
    })
}

/// Tries the interleavings with at most `preemptions` preemptions, where most faults are found.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}

/// Spawns a thread that looks for parts at any moment, like one that is woken late or spuriously.
fn looks_for_parts(pool: &Arc<Pool<Failure>>, times: usize) -> thread::JoinHandle<()> {
    let pool = pool.clone();
    thread::spawn(move || (0..times).for_each(|_| pool.do_parts()))
}

/// Cells that the parts of a job write without atomics, one cell each: 1 where it was 0.
struct Runs(Vec<UnsafeCell<usize>>);

// SAFETY: loom checks that no two threads access a cell at the same time.
unsafe impl Sync for Runs {}

impl Runs {
    fn of(parts: usize) -> Self {
        Self((0..parts).map(|_| UnsafeCell::new(0)).collect())
    }

    fn write(&self, index: usize, value: usize) {
        // SAFETY: loom checks that no other thread accesses the cell.
        self.0[index].with_mut(|runs| unsafe {
            assert_ne!(*runs, value);
            *runs = value;
        });
    }

    fn run(&self, index: usize, parts: usize) {
        assert_eq!(parts, self.0.len(), "a part of another job");
        self.write(index, 1);
    }

    /// Checks by writing, so that loom detects a part that still runs.
    fn assert_each_ran_once(&self) {
        (0..self.0.len()).for_each(|index| self.write(index, 0));
    }
}

/// Runs a job of a caller that holds the threads.
fn share(pool: &Pool<Failure>, parts: usize) {
    let runs = Runs::of(parts);
    let outcome = pool.take().unwrap().share(2, parts as u32, &|index, parts| {
        runs.run(index, parts);
        Ok(())
    });
    assert_eq!(outcome, Ok(()));
    runs.assert_each_ran_once();
}

#[test]
fn every_part_runs_once_before_the_caller_returns() {
    model(3, || {
        let pool = new_pool();
        let threads = [looks_for_parts(&pool, 1), looks_for_parts(&pool, 1)];
        share(&pool, 3);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_late_thread_takes_no_part_of_another_job() {
    model(3, || {
        let pool = new_pool();
        let late = looks_for_parts(&pool, 2);
        for parts in [2, 1, 3] {
            share(&pool, parts);
        }
        late.join().unwrap();
    });
}

#[test]
fn a_job_wakes_a_sleeping_thread() {
    model(3, || {
        let pool = new_pool();
        let ended = Arc::new(AtomicBool::new(false));
        let thread = {
            let (pool, ended) = (pool.clone(), ended.clone());
            thread::spawn(move || pool.serve(|| ended.load(Ordering::Relaxed)))
        };
        share(&pool, 2);
        ended.store(true, Ordering::Relaxed);
        share(&pool, 2);
        thread.join().unwrap();
    });
}

#[test]
fn the_failure_of_a_part_arrives_and_the_others_run() {
    model(3, || {
        let pool = new_pool();
        let thread = looks_for_parts(&pool, 1);
        let runs = Runs::of(3);
        let outcome = pool.take().unwrap().share(1, 3, &|index, parts| {
            runs.run(index, parts);
            if index == 0 { Ok(()) } else { Err(index) }
        });
        assert!(matches!(outcome, Err(1 | 2)), "{outcome:?}");
        runs.assert_each_ran_once();
        thread.join().unwrap();
        share(&pool, 1);
    });
}

#[test]
fn one_caller_at_a_time_has_the_threads() {
    model(3, || {
        let pool = new_pool();
        let frame = Arc::new(Runs::of(1));
        let calls = |pool: &Pool<Failure>, frame: &Runs| {
            for _ in 0..2 {
                if let Some(taken) = pool.take() {
                    // Only the caller that holds the threads may write to the frame.
                    frame.write(0, 1);
                    taken.share(1, 1, &|_, _| Ok(())).unwrap();
                    frame.write(0, 0);
                }
            }
        };
        let other = {
            let (pool, frame) = (pool.clone(), frame.clone());
            thread::spawn(move || calls(&pool, &frame))
        };
        calls(&pool, &frame);
        other.join().unwrap();
        share(&pool, 2);
    });
}

/// Copies the pool as fork() copies memory to a child: each word with its value at that moment.
fn copy(pool: &Pool<Failure>) -> Arc<Pool<Failure>> {
    Arc::new(Pool {
        taken: AtomicBool::new(pool.taken.load(Ordering::Relaxed)),
        job: AtomicPtr::new(pool.job.load(Ordering::Relaxed)),
        tickets: AtomicU64::new(pool.tickets.load(Ordering::Relaxed)),
        left: Word::new(pool.left.load(Ordering::Relaxed)),
        bell: Word::new(pool.bell.load(Ordering::Relaxed)),
    })
}

#[test]
fn a_copy_made_at_any_moment_starts_fresh() {
    model(2, || {
        let pool = new_pool();
        let forking = {
            let pool = pool.clone();
            thread::spawn(move || {
                let child = copy(&pool);
                child.reset_in_child();
                let thread = looks_for_parts(&child, 1);
                share(&child, 2);
                thread.join().unwrap();
            })
        };
        share(&pool, 3);
        forking.join().unwrap();
    });
}
