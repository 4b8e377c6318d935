//! What the operations mean: shapes, layouts, sizes and refusals. No device code and no FFI here.
#![forbid(unsafe_code)]

pub mod bits;
pub mod loops;
