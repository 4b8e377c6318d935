//! The CPU: also the reference that other backends are held to, bit for bit.

pub mod bits;
