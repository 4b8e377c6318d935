//! The CPU: also the reference that other backends are held to, bit for bit.

pub mod bits;
pub mod codec;
pub mod copy;
mod cpus;
mod dispatch;
pub mod memory;
mod moves;
pub mod nodes;
pub mod pool;
pub mod signs;
mod simd;

pub use dispatch::InstructionSet;

/// Counts the CPUs and chooses the instruction set, which reads files and the environment.
pub fn prepare() {
    pool::prepare();
    InstructionSet::chosen();
}
