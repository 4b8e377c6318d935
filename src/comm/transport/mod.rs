//! The transports, one file each, behind `trait Transport`: `callbacks` of the caller, `group` for threads of one
//! process, `nccl` (with `nccl_library`), `peers` for peer memory (with `peer_buffers`, and with `rendezvous` where
//! ranks share a GPU). Outside this folder transports differ only in whether they have `Fused` exchanges.

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
pub use peers::{MappedBuffers, Peers};
pub use rendezvous::Rendezvous;
