//! The CPU: also the reference that other backends are held to, bit for bit.

pub mod bits;
pub mod pool;
mod tiles;
mod words;
#[cfg(target_arch = "x86_64")]
mod x86;
