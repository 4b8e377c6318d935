//! Ranks that exchange memory, and the compressed all-reduces over them.
//!
//! From below, each of the files uses only those before it:
//!
//! - `record`: what ranks send to each other when something is created;
//! - `transport`: the four ways to the other ranks, behind one trait;
//! - `link`: a transport, which one call at a time uses;
//! - `communicator`: a link to all ranks, or one within the node and one between nodes;
//! - `peers_setup`, `nodes_setup`: how ranks find each other over other communicators;
//! - `buffers`: the memory that is exchanged; `node`: how the ranks of a node sum their values up;
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
