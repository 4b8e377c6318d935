//! MACHINES
//!
//! A communicator made of two: one of the ranks of a machine, such as over peer memory, and one between machines,
//! over NCCL, MPI or any other engine. Calls over it give the same bytes as over one communicator of all ranks, and
//! fewer of them go from machine to machine.
//!
//! ```c
//! MPI_Comm_split(world, machine, rank, &mine);                // made a communicator, and of that: gc_comm_open_peers()
//! MPI_Comm_split(world, rank_in_machine, rank, &alike);       // the ranks with this number, one of each machine
//! gc_comm_t *inside, *between, *comm;                         // over these
//! gc_comm_from_two(inside, between, &comm);                   // on every rank
//! gc_comm_free(inside);
//! gc_comm_free(between);                                      // comm keeps what it needs of them
//! ```
//!
//! Ranks are numbered machine by machine, in the order that machines have in `between`, and within each as in
//! `inside`. What is for a rank of another machine goes there over `between`, to the rank with the sender's number,
//! and on over `inside`. With M machines each rank sends (M - 1) / M of a payload from machine to machine, and M - 1
//! reduced chunks; over one communicator of all ranks it is (M - 1) / M of a payload twice. A handle needs memory for
//! two payloads more, about n / 4 bytes.
//!
//! Machines need not have as many ranks. Then, or where a machine has fewer ways out than ranks, only the first C
//! ranks of each machine have a `between`, and NULL stands for it on the others: C is the same on every machine, and
//! these ranks carry for the others, each an equal part of everything. Two more exchanges inside bring that to them,
//! and all machines count as the largest one, of X ranks: the memory is that for 2 * M * X * X / C chunks.
//!
//! What is said of the two holds here: the memory they exchange, whether calls can be captured, how long they wait. A
//! failure in one is a failure of this one. While a call on it is under way, calls on the two give BUSY; otherwise
//! they go on working, in the same order on every rank.

use crate::{comm, panics::boundary};

use super::{borrow::Out, comm::gc_comm_t, handle, status::gc_status_t};

/// Combines a communicator inside each machine and one between machines. Every rank calls this: they tell each other,
/// over both, who is where.
///
/// `inside`: of this machine's ranks. `between`: of the ranks that have this rank's number in their machines, one of
/// each machine; its ranks number the machines, so all of a machine have the same rank there. Or NULL, on every rank
/// of a machine from the same number on: see above. Both stay yours. `*out`: yours to release, by gc_comm_free().
///
/// Over peer memory `inside` carries blocks of several ranks: give gc_comm_open_peers() 1024 elements more for each
/// rank of the world, of W, and X * X * M / (W * C) times as many where not every rank has a `between`.
///
/// INVALID_ARGUMENT: ranks of a machine that have a `between` behind one that has none; others than those said above in
/// one of the two; one communicator twice; one that is itself made of two. If one rank fails, all do, unless that is
/// with BUSY or a NULL `inside`, or with a `between` of which another rank does not give its own (but NULL, or another
/// communicator in its place): for that the others wait. OUT_OF_MEMORY, COMM, BUSY.
///
/// # Safety
/// The pointers are as described.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_comm_from_two(
    inside: *mut gc_comm_t,
    between: *mut gc_comm_t,
    out: *mut *mut gc_comm_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a communicator, another one or NULL, and room for a pointer.
        let (inside, between, out) = unsafe {
            let other = if between.is_null() { Ok(None) } else { handle::borrow("between", between).map(Some) };
            (handle::borrow("inside", inside)?, other, Out::one("out", out))
        };
        // Whatever was refused, the others wait for this rank; and once it has told them that all is well, nothing
        // may fail.
        let places = out.and_then(|out| Ok((out, handle::Place::new()?)));
        let (places, so_far) = match places {
            Ok(places) => (Some(places), Ok(())),
            Err(refusal) => (None, Err(refusal)),
        };
        let (between, so_far) = match between {
            Ok(between) => (between.map(|between| between.0.clone()), so_far),
            Err(refusal) => (None, Err(refusal)),
        };
        let communicator = comm::two(inside.0.clone(), between, so_far)?;
        if let Some((out, place)) = places {
            out.fill([place.hand_out(gc_comm_t(communicator))]);
        }
        Ok(())
    })
}
