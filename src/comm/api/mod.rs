//! The exported functions of communicators and all-reduces.

pub mod allreduce;
pub mod comm;
pub mod hierarchical;
pub mod nccl;
pub mod peers;
