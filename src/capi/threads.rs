//! WORKERS
//!
//! Large CPU tensors are worked on by several threads, which are started when the first one comes and again in a forked
//! child that needs them. The instruction set is chosen at run time; GRADCODEC_CPU in the environment, read once, asks
//! for another that the processor has: portable, avx2 or avx512. Results are the same with any number and any set.

use crate::{backend::cpu::pool, panics::boundary};

use super::status::gc_status_t;

/// Sets the number of CPU workers for calls from now on, the caller counted: 1 starts none; 0, as at the start, stands
/// for the CPUs that this process may use by its affinity and cgroup.
///
/// INVALID_ARGUMENT: more than 1024.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_set_threads(n: u32) -> gc_status_t {
    boundary(|| pool::set_threads(n))
}
