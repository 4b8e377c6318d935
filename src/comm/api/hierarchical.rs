//! NODES
//!
//! A hierarchical communicator combines two: one among the ranks of a node, such as over peer memory, and one between
//! nodes, over NCCL, MPI or any other engine. An all-reduce over it sums the values of a node up in float32 first, and
//! compresses only the sums, so the least number of bytes leaves a node.
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
//! N nodes have R ranks each. The global rank is node * R + the rank within the node. Rank i of a node receives part i of
//! the values of its node's ranks, adds them, and exchanges the encoded sums with the ranks i of the other nodes. With P
//! the bytes of the whole payload, 2 P (N - 1) / N bytes leave a node in an all-reduce. A flat communicator of all ranks
//! makes a node send (R + 1) times half of that, or more.
//!
//! The result differs from that of a flat communicator, since values are encoded once per node and not once per rank.
//! All ranks of all nodes end with the same bytes. Errors are kept of the sums: with float32 they take 4 (1 / R + 1 /
//! (R N)) bytes per element. GC_CODEC_SIGN is refused, since a majority needs the bits of every rank. The formulas are
//! in docs/NUMERICS.md 12; an all-reduce needs memory for twice the values and a part, see docs/CHOOSING.md.
//!
//! The rules of the two communicators hold for the memory that they exchange, for graph capture and for timeouts. While
//! a call on the hierarchical communicator is running, calls on the two give BUSY. After a failed exchange or a lost
//! rank this rank aborts both, as gc_comm_abort() does, since the ranks of one may wait where those of the other have
//! failed. Later calls give COMM. The other ranks fail in this call or the next, within their timeout; over callbacks
//! when the callback returns.

use crate::{
    comm::communicator::Communicator,
    ffi::{api::gc_status_t, borrow::Out, handle, panics::boundary},
};

use super::comm::{gc_comm_t, hand_out};

/// Combines a communicator among the ranks of each node and one between nodes. Every rank must call this. The ranks
/// check over both communicators that the two form a grid.
///
/// `intra_node`: connects the ranks of this node. `inter_node`: connects the ranks that have this rank's number on
/// their nodes, one of each node. Its ranks number the nodes, so all ranks of a node have the same rank there. Both
/// stay yours. `*out`: yours to release, by gc_comm_free(). With one node it is the flat communicator over
/// `intra_node`, with one rank per node the one over `inter_node`.
///
/// Over peer memory the buffers of `intra_node` need the bytes that gc_allreduce_peers_bytes() returns for N nodes.
/// Those of `inter_node` need at most the bytes that it returns for the same options with float32 values, N ranks and 1
/// node.
///
/// If one rank fails, all do, except with BUSY or a NULL `intra_node`, or if another rank passes NULL or another
/// communicator in place of its `inter_node`: then the others keep waiting.
/// - GC_STATUS_INVALID_ARGUMENT: `inter_node` is NULL on a rank; nodes differ in size (every rank's message has two of
///   the sizes); a communicator connects other ranks than described; both are the same; or one is hierarchical.
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
        // Continue after a refusal, because the other ranks wait for this one.
        let (out, so_far) = out.map_or_else(|refusal| (None, Err(refusal)), |out| (Some(out), Ok(())));
        let (inter, so_far) = inter.map_or_else(|refusal| (None, Err(refusal)), |inter| (inter, so_far));
        let communicator = Communicator::hierarchical(&intra.0, inter.map(|inter| &*inter.0), so_far)?;
        if let Some(out) = out {
            hand_out(out, communicator);
        }
        Ok(())
    })
}
