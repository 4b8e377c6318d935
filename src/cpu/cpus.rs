//! The CPUs that a thread may use, and how many of them its process may keep busy.

use std::{
    ffi::CStr,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

/// What this library calls its own threads.
pub const OWN_NAME: &CStr = c"gradcodec";

/// Words of a set: of 8192 CPUs, the most that Linux can be built for on x86-64. cpu_set_t has room for 1024.
const SET_WORDS: usize = 128;

/// Some of the machine's CPUs: bit number `cpu % 64` of word `cpu / 64`.
pub struct CpuSet([u64; SET_WORDS]);

impl CpuSet {
    /// The CPUs that the calling thread may run on. None where the system does not tell.
    pub fn of_caller() -> Option<Self> {
        let mut set = [0u64; SET_WORDS];
        // SAFETY: writes no more than the size of the set. Any bits are a set.
        let refused = unsafe { libc::sched_getaffinity(0, size_of_val(&set), (&raw mut set).cast()) } != 0;
        (!refused).then_some(Self(set))
    }

    /// Has a thread of this library run on these CPUs. It runs where it did if the system refuses.
    pub fn give(&self, thread: libc::pthread_t) {
        // SAFETY: the library's threads never end; reads no more than the size of the set.
        unsafe { libc::pthread_setaffinity_np(thread, size_of_val(&self.0), (&raw const self.0).cast()) };
    }
}

/// A set that threads may read and change at the same time, word by word.
pub struct SharedCpuSet([AtomicU64; SET_WORDS]);

impl SharedCpuSet {
    /// No CPU.
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

/// How many CPUs the calling thread's affinity and the CPU quota of the process's cgroups allow, at least 1.
pub fn count() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}
