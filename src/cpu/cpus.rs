//! The CPUs that a thread may use, and how many of them its process may keep busy.

use std::{
    ffi::CStr,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

/// Name of this library's threads.
pub const OWN_NAME: &CStr = c"gradcodec";

/// Words of a set: for 8192 CPUs, the most that Linux can be built for on x86-64. cpu_set_t has room for 1024.
const SET_WORDS: usize = 128;

/// Set of CPUs: bit number `cpu % 64` of word `cpu / 64`.
pub struct CpuSet([u64; SET_WORDS]);

impl CpuSet {
    /// Returns the CPUs that the calling thread may run on. None: the system refuses the call.
    pub fn of_caller() -> Option<Self> {
        let mut set = [0u64; SET_WORDS];
        // SAFETY: the call writes at most the size of `set`, and any bits are a valid set.
        let refused = unsafe { libc::sched_getaffinity(0, size_of_val(&set), (&raw mut set).cast()) } != 0;
        (!refused).then_some(Self(set))
    }

    /// Sets the CPUs that a thread of this library may run on. If the system refuses, they do not change.
    pub fn give(&self, thread: libc::pthread_t) {
        // SAFETY: the library's threads never end, and the call reads at most the size of the set.
        unsafe { libc::pthread_setaffinity_np(thread, size_of_val(&self.0), (&raw const self.0).cast()) };
    }
}

/// Set that threads may read and change at the same time, word by word.
pub struct SharedCpuSet([AtomicU64; SET_WORDS]);

impl SharedCpuSet {
    /// Makes a set without CPUs.
    pub const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; SET_WORDS])
    }

    pub fn has_all_of(&self, set: &CpuSet) -> bool {
        set.0.iter().zip(&self.0).all(|(bits, own)| bits & !own.load(Ordering::Relaxed) == 0)
    }

    pub fn load(&self) -> CpuSet {
        CpuSet(self.0.each_ref().map(|word| word.load(Ordering::Relaxed)))
    }

    pub fn store(&self, set: &CpuSet) {
        self.0.iter().zip(set.0).for_each(|(own, bits)| own.store(bits, Ordering::Relaxed));
    }

    pub fn add(&self, set: &CpuSet) {
        self.0.iter().zip(set.0).for_each(|(own, bits)| {
            own.fetch_or(bits, Ordering::Relaxed);
        });
    }
}

/// Returns the number of CPUs that the caller's affinity and the process's cgroup quotas allow, at least 1.
pub fn count() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}
