//! The CPU implementation. It is also the reference: CUDA results must be bit-identical to it.

#[allow(non_camel_case_types, clippy::missing_safety_doc, reason = "C names; lib.rs says what all require")]
pub mod api;
mod cpus;
pub mod dispatch;
pub mod memory;
pub mod moves;
pub mod numbers;
pub mod pool;
pub mod simd;

pub use dispatch::InstructionSet;

/// Counts the CPUs and chooses the instruction set, which reads files and the environment.
pub fn prepare() {
    pool::prepare();
    InstructionSet::chosen();
}
