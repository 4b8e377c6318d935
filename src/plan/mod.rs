//! Where elements and their bits lie, as values: nothing here reads memory, knows a device or refuses anything but sizes that do not fit.
#![forbid(unsafe_code)]

pub mod bits;
pub mod codec;
pub mod copy;
pub mod floats;
pub mod layout;
pub mod loops;
pub mod nodes;
pub mod signs;
pub mod sizes;
