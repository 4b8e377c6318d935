//! The exported functions of devices, and of new tensors on them.

pub mod devices;
pub mod tensors;
