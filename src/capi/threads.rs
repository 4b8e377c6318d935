//! WORKERS
//!
//! Large CPU tensors are worked on by several threads, which are started when the first one comes and again in a forked
//! child that needs them. The instruction set is chosen at run time; GRADCODEC_CPU in the environment, read once, asks
//! for another that the processor has: portable, avx2 or avx512. Results are the same with any number and any set.

use crate::{backend, error::error};

use super::boundary::{boundary, gc_status_t};

/// The most workers that can be asked for.
const MOST_THREADS: u32 = 1024;

/// Sets the number of CPU workers for calls from now on, the caller counted: 1 starts none; 0, as at the start, stands
/// for the CPUs that this process may use by its affinity and cgroup.
///
/// INVALID_ARGUMENT: more than 1024.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_set_threads(n: u32) -> gc_status_t {
    boundary(|| {
        if n > MOST_THREADS {
            return Err(error!(InvalidArgument, "n: {n} workers; at most {MOST_THREADS} expected"));
        }
        backend::set_threads(n);
        Ok(())
    })
}
