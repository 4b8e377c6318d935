//! The CPU: also the reference that other backends are held to, bit for bit.

pub mod bits;
mod cpus;
pub mod memory;
pub mod pool;
mod tiles;
mod words;
#[cfg(target_arch = "x86_64")]
mod x86;

/// Counts the CPUs and chooses the instruction set, which reads files and the environment.
pub fn prepare() {
    pool::prepare();
    words::InstructionSet::chosen();
}
