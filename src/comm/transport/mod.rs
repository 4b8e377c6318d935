//! Ways to the other ranks, a file each behind `trait Transport`: `callbacks` of the caller, `group` for threads of one
//! process, `nccl` (by `nccl_library`), `peers` for ranks that reach each other's memory (`rendezvous` where they share a
//! GPU). Nothing outside of this folder asks which one it has.

mod callbacks;
mod exchange;
mod group;
mod nccl;
mod nccl_library;
pub mod peer_memory;
mod peers;
mod rendezvous;

pub use callbacks::{Callback, Callbacks, is_inside as is_inside_callback};
pub use exchange::{Exchange, Fused, Pattern, Phases, Staging, Transport, timeout};
pub use group::group;
pub use nccl::{ID_BYTES, Nccl};
pub use rendezvous::Rendezvous;
pub use {
    peer_memory::MOST_RANKS,
    peers::{Peers, Places, buffer_bytes, check_buffer_bytes, least_buffer_bytes, ordinal_of, ranks_of},
};
