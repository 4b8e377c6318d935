//! Ways to the other ranks, a file each behind `trait Transport`: `callbacks` of the caller, `group` for threads of one
//! process, `nccl` (by `nccl_library`), `peers` for ranks that reach each other's memory (`peer_buffers`; `rendezvous`
//! where they share a GPU). Outside this folder only one question is asked: whether a transport has `Fused` exchanges.

mod callbacks;
mod exchange;
mod group;
mod nccl;
mod nccl_library;
mod peer_buffers;
mod peers;
mod rendezvous;

pub use callbacks::{Callback, Callbacks, is_inside as is_inside_callback};
pub use exchange::{Exchange, Fused, Pattern, Phases, Staging, Transport, timeout};
pub use group::group;
pub use nccl::{ID_BYTES, Nccl};
pub use peer_buffers::{
    Buffer, Identity, MOST_RANKS, Mapped, buffer_bytes, check_buffer_bytes, least_buffer_bytes, ordinal_of, ranks_of,
};
pub use peers::{Peers, Places};
pub use rendezvous::Rendezvous;
