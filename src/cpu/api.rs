//! CPU THREADS
//!
//! Several threads work on large CPU tensors. The first call with a large tensor starts them, also in a forked child.
//! Results are the same with any number of threads.
//!
//! Unless gc_set_threads() sets another number, there is one thread for each CPU that the calling thread may use (its
//! affinity mask), but no more than the quota of the process's cgroup allows. The library's threads may run on these
//! CPUs. The CPUs are counted at the first large call, at the next one after gc_set_threads() or in a forked child, and
//! whenever the calling thread may run on a CPU that was not among them. If each of your threads is bound to one CPU
//! (by OMP_PROC_BIND, for example), set the number with gc_set_threads().
//!
//! The instruction set is chosen at run time. The environment variable GRADCODEC_CPU, which the first call reads,
//! selects another one that the processor has: portable, avx2 or avx512. Results are the same with any set. Any other
//! name gives GC_STATUS_INVALID_ARGUMENT in calls that work on CPU tensors.

use crate::ffi::{api::gc_status_t, panics::boundary};

use super::pool;

/// Sets the number of CPU threads for later calls, including the calling thread. 1 starts no thread. 0, the default,
/// stands for the number of CPUs that the calling threads may use.
///
/// - GC_STATUS_INVALID_ARGUMENT: `n` is more than 1024.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_set_threads(n: u32) -> gc_status_t {
    boundary(|| pool::set_threads(n))
}
