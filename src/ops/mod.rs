//! What the operations mean: shapes, sizes and refusals, and which of a device's functions does the work.
//!
//! Every operation goes the same way: it checks, opens the queue of its device, makes a plan of the checked views, and
//! matches on the queue to choose the backend's function.
#![forbid(unsafe_code)]

pub mod bits;
pub mod checks;
pub mod codec;
pub mod copy;
pub mod devices;
pub mod kernel;
pub mod signs;
pub mod tensors;
