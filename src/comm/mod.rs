//! Communicators, and the compressed all-reduces over them.
//!
//! Each file uses only files that are listed before it:
//!
//! - `record`: the bytes that ranks send to each other when an object is created;
//! - `transport`: the four transports, behind one trait;
//! - `link`: a transport, which one call at a time uses;
//! - `communicator`: a link to all ranks, or one within the node and one between nodes;
//! - `buffers`: the memory that is exchanged; `node`: sums of values within a node;
//! - `peers_setup`, `nodes_setup`: communicators that ranks create over other communicators;
//! - `allreduce`: the handle, whose codec keeps the errors.

mod allreduce;
#[allow(non_camel_case_types, clippy::missing_safety_doc, reason = "C names; lib.rs says what all require")]
pub mod api;
mod buffers;
mod communicator;
mod link;
mod node;
mod nodes_setup;
mod peers_setup;
mod record;
mod transport;
