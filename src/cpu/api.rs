//! CPU THREADS
//!
//! Large CPU tensors are worked on by several threads, which are started when the first one comes and again in a forked
//! child that needs them. Results are the same with any number of them.
//!
//! Unless gc_set_threads() asks for another number, there is one for each CPU that the calling thread may use (its
//! affinity mask), but no more than the quota of the process's cgroup allows. The library's threads may run on these CPUs.
//! They are counted at the first large call, at the next one after gc_set_threads() or in a forked child, and whenever
//! the calling thread may run on a CPU that was not among them. Where each thread is held to one CPU (by OMP_PROC_BIND,
//! say), ask for threads by gc_set_threads().
//!
//! The instruction set is chosen at run time; GRADCODEC_CPU in the environment, read once, asks for another that the
//! processor has: portable, avx2 or avx512. Results are the same with any set.

use crate::ffi::{api::gc_status_t, panics::boundary};

use super::pool;

/// Sets the number of CPU threads for calls from now on, counting the calling one. 1 starts none; 0, as at the start,
/// stands for the number of CPUs that the calling threads may use.
///
/// - GC_STATUS_INVALID_ARGUMENT: `n` is more than 1024.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_set_threads(n: u32) -> gc_status_t {
    boundary(|| pool::set_threads(n))
}
