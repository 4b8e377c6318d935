//! NODES
//!
//! A hierarchical communicator combines two: one among the ranks of a node, such as over peer memory, and one between
//! nodes, over NCCL, MPI or any other engine. Calls over it give the same bytes as over one communicator of all ranks,
//! and fewer of them go from node to node.
//!
//! ```c
//! MPI_Comm_split(world, node, rank, &mine);                   // the ranks of this node
//! MPI_Comm_split(world, rank_in_node, rank, &alike);          // the ranks with this number, one of each node
//! gc_comm_t *intra_node, *inter_node, *comm;                  // over these, the first by gc_comm_open_peers()
//! gc_comm_hierarchical(intra_node, inter_node, &comm);        // on every rank
//! gc_comm_free(intra_node);
//! gc_comm_free(inter_node);                                   // comm keeps what it needs of them
//! ```
//!
//! Ranks are numbered node by node, in the order that nodes have in `inter_node`, and within each as in `intra_node`.
//! Every node has the same number of ranks. A block for a rank of another node goes there over `inter_node`, to the
//! rank with the sender's number, and on over `intra_node`. With N nodes each rank sends (N - 1) / N of a payload from
//! node to node, and N - 1 reduced chunks; over one communicator of all ranks it is (N - 1) / N of a payload twice. An
//! all-reduce of n elements needs memory for two payloads more, about n / 4 bytes.
//!
//! Where a node has fewer network adapters than ranks, only the first L ranks of each node, its leaders, have an
//! `inter_node`, and the others pass NULL. L is the same on every node, and each leader carries an equal part of
//! everything. Two more intra-node exchanges bring that to them; with R ranks on each of N nodes the memory is that for
//! 2 * N * R * R / L chunks.
//!
//! The rules of the two communicators hold here: the memory that they exchange, whether calls can be captured, how long
//! they wait. A failure in one is a failure of this one. While a call on it is under way, calls on the two give BUSY;
//! otherwise they go on working, in the same order on every rank.

use crate::{comm::Communicator, panics::boundary};

use super::{
    borrow::Out,
    comm::{gc_comm_t, hand_out},
    handle,
    status::gc_status_t,
};

/// Combines a communicator among the ranks of each node and one between nodes. Every rank calls this: they tell each
/// other, over both, who is where.
///
/// `intra_node`: of this node's ranks. `inter_node`: of the ranks that have this rank's number on their nodes, one of
/// each node; its ranks number the nodes, so all ranks of a node have the same rank there. Or NULL, on every node from
/// the same number on: see above. Both stay yours. `*out`: yours to release, by gc_comm_free().
///
/// Over peer memory `intra_node` carries what all ranks send. With N nodes of R ranks its buffers need the bytes that
/// gc_allreduce_peers_bytes() returns for a `world_size` of N * R; above 64 ranks those for 64, and
/// 1024 + 16 * n_segments more for each rank. Where only L ranks of each node have an `inter_node`, they need R / L
/// times as many, and 64 * N * R * R more.
///
/// - GC_STATUS_INVALID_ARGUMENT: nodes with different numbers of ranks, on every rank, which says the two numbers; a
///   rank with an `inter_node` whose number is above that of one without; other ranks than those described in one of
///   the two; one communicator twice; one that is itself hierarchical. If one rank fails, all do, except with BUSY or a
///   NULL `intra_node`, or with an `inter_node` of which another rank does not pass its own (but NULL, or another
///   communicator): then the others keep waiting.
/// - GC_STATUS_OUT_OF_MEMORY: memory could not be allocated.
/// - GC_STATUS_COMM: an exchange failed.
/// - GC_STATUS_BUSY: another call is running on this communicator.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_hierarchical(
    intra_node: *mut gc_comm_t, inter_node: *mut gc_comm_t, out: *mut *mut gc_comm_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a communicator, another one or NULL, and room for a pointer.
        let (intra, inter, out) = unsafe {
            let inter =
                if inter_node.is_null() { Ok(None) } else { handle::borrow("inter_node", inter_node).map(Some) };
            (handle::borrow("intra_node", intra_node)?, inter, Out::one("out", out))
        };
        // Whatever was refused, the others wait for this rank.
        let (out, so_far) = out.map_or_else(|refusal| (None, Err(refusal)), |out| (Some(out), Ok(())));
        let (inter, so_far) = inter.map_or_else(|refusal| (None, Err(refusal)), |inter| (inter, so_far));
        let communicator = Communicator::hierarchical(&intra.0, inter.map(|inter| &*inter.0), so_far)?;
        if let Some(out) = out {
            hand_out(out, communicator);
        }
        Ok(())
    })
}
