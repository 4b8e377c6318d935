//! What launches know of the memory of other ranks: kernels/peers.cu.

use crate::ffi::error::Result;

use super::{launch::argument, layout::kernel_structs, module::PEERS, queue::Queue};

kernel_structs! {
    /// Where this rank's block lies in each buffer, for the kernels. Without an address: nowhere.
    #[derive(Clone, Copy, Default)]
    pub struct Way: gc_way {
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

/// What the launch of a barrier does.
#[derive(Clone, Copy)]
pub enum Steps {
    Signal = 1,
    Wait = 2,
    Both = 3,
}

impl Way {
    /// Whether it leads anywhere.
    pub fn is_given(&self) -> bool {
        self.peers != 0
    }

    /// A barrier of the ranks that it leads to. `mark`: a uint32 on this device that becomes 1 if a rank does not
    /// arrive, or NULL.
    ///
    /// # Safety
    /// The way was made of buffers that are mapped here, and stays until the stream has passed this, as does the mark.
    pub unsafe fn barrier(self, queue: &mut Queue, steps: Steps, mark: *mut u8) -> Result<()> {
        let mut call = Barrier { peers: self.peers, mark, steps: steps as u32, reserved: 0 };
        // SAFETY: the kernel's argument: memory of this rank, which names buffers that are mapped here, and the
        // caller's mark.
        unsafe { queue.launch(&PEERS.barrier, 1, &mut argument(&mut call)) }
    }
}

/// Where chunks go that a launch writes to other ranks, and the barrier behind them.
#[derive(Clone, Copy)]
pub struct Sending {
    pub way: Way,
    pub steps: Steps,
}

/// Where whole payloads go of calls that exchange once.
#[derive(Clone, Copy)]
pub struct Once {
    /// Of this rank's payload, to the area of even barriers.
    pub way: Way,
    /// Bytes from payload to payload, and from that area to the other one.
    pub apart: u64,
    pub turn: u64,
}
