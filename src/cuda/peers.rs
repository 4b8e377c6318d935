//! Arguments of launches that access the memory of other ranks: kernels/peers.cu.

use crate::ffi::error::Result;

use super::{launch::argument, layout::kernel_structs, module::PEERS, queue::Queue};

kernel_structs! {
    /// Offset of this rank's block in each rank's buffer, for the kernels. `peers` 0: nothing is sent.
    #[derive(Clone, Copy, Default)]
    pub struct PeerSlot: gc_peer_slot {
        pub peers: u64,
        pub at: u64,
    }

    struct Barrier: gc_barrier {
        peers: u64,
        mark: *mut u8,
        steps: u32,
        reserved: u32,
    }
}

/// Steps of a barrier that a launch does.
#[derive(Clone, Copy)]
pub enum Steps {
    Signal = 1,
    Wait = 2,
    Both = 3,
}

impl PeerSlot {
    /// Returns true if the slot leads to other ranks.
    pub fn is_given(&self) -> bool {
        self.peers != 0
    }

    /// Launches a barrier of all ranks. `mark`: a uint32 on this device that becomes 1 if a rank does not arrive in
    /// time, or NULL.
    ///
    /// # Safety
    /// The slot's buffers are mapped here. `peers`, the buffers and `mark` stay until the stream has done this launch.
    pub unsafe fn barrier(self, queue: &mut Queue, steps: Steps, mark: *mut u8) -> Result<()> {
        let mut call = Barrier { peers: self.peers, mark, steps: steps as u32, reserved: 0 };
        // SAFETY: the argument is the kernel's struct. `peers` is memory of this rank that lists mapped buffers, and
        // the caller promises `mark`.
        unsafe { queue.launch(&PEERS.barrier, 1, &mut argument(&mut call)) }
    }
}

/// Destination of the chunks that a launch writes to other ranks, and the barrier after them.
#[derive(Clone, Copy)]
pub struct PeerDestination {
    pub slot: PeerSlot,
    pub steps: Steps,
}

/// Destination of complete payloads in a one-shot all-reduce.
#[derive(Clone, Copy)]
pub struct OneShot {
    /// Place of this rank's payload in the area of even barriers.
    pub slot: PeerSlot,
    /// Bytes from payload to payload (`apart`), and from that area to the area of odd barriers (`turn`).
    pub apart: u64,
    pub turn: u64,
}
