//! Where elements and their bits lie, as values: nothing here reads memory, knows a device or refuses anything.
#![forbid(unsafe_code)]

pub mod bits;
pub mod loops;
pub mod signs;
