//! Ranks that exchange memory, and the all-reduces of gradients made small over them.
//!
//! From below, each of the files uses only those before it:
//!
//! - `exchange`: the two exchanges that there are. `record`: what ranks tell each other when something is created;
//! - `callbacks` of the caller, `group` for ranks that are threads of one process, `nccl` (by `nccl_library`), and
//!   `peers` for ranks that reach each other's memory (`rendezvous` where they share a GPU) make exchanges; `transport`
//!   is any of them, `link` one with its rank and world;
//! - `hierarchical`: two links as one, among the ranks of a node and between nodes; `topology`: that, or one link;
//! - `peers_setup`, `hierarchical_setup`: how ranks find each other over another communicator;
//! - `buffers`: the memory that is exchanged. `communicator`: all of this, and the steps of an all-reduce;
//! - `allreduce`: the handle, whose codec keeps the errors.

mod allreduce;
mod buffers;
#[path = "transport/callbacks.rs"]
mod callbacks;
mod communicator;
mod exchange;
#[path = "transport/group.rs"]
mod group;
mod hierarchical;
mod hierarchical_setup;
mod link;
#[path = "transport/nccl.rs"]
mod nccl;
#[path = "transport/nccl_library.rs"]
mod nccl_library;
#[path = "transport/peers.rs"]
mod peers;
mod peers_setup;
mod record;
#[path = "transport/rendezvous.rs"]
mod rendezvous;
mod topology;
mod transport;

pub use allreduce::{AllReduce, Part};
pub use callbacks::{Callback, Callbacks};
pub use communicator::Communicator;
pub use group::group;
pub use nccl::{ID_BYTES as NCCL_ID_BYTES, Nccl};
pub use peers::{MOST_RANKS as MOST_PEERS, Peers, Places, ranks_of as check_peers_world};
