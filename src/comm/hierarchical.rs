//! Two levels: ranks of a node, and nodes.
//!
//! Ranks are numbered node by node, and every node has as many. The first ranks of each node, its leaders, exchange with the
//! leaders of the same number on the other nodes. Where all ranks are leaders:
//!
//! ```text
//!     all to all    inter-node: a block for each rank there    intra-node: each node's block to the rank that it is for
//!     all gather    inter-node: its own                        intra-node: what came from every node
//! ```
//!
//! Otherwise each block is cut into a slice for each leader, and an intra-node exchange comes first, which brings the
//! leaders their slices.

use std::{ptr, sync::Arc};

use dlpark::ffi::{DLDataType, DLDataTypeCode, DLTensor};

use crate::{
    backend::{Block, Queue, cuda},
    error::{Result, error},
    ops::copy::copy_on,
    tensor::{Described, Device, Elements, Name},
};

use super::{
    link::Link,
    record::{Bytes, Records},
    transport::{Exchange, Pattern, Staging},
};

/// What slices are whole numbers of.
const VECTOR: usize = 16;

/// A rank's part.
pub struct Hierarchical {
    pub intra: Arc<Link>,
    /// Of leaders.
    pub inter: Option<Arc<Link>>,
    pub nodes: Nodes,
}

/// Where this rank is among all.
#[derive(Clone, Copy)]
pub struct Nodes {
    pub count: usize,
    /// Of each node.
    pub ranks: usize,
    pub leaders: usize,
    /// The node of this rank.
    pub own: usize,
}

/// Where blocks lie between two exchanges.
pub struct Workspace {
    memory: Block,
    /// Of each of two buffers.
    bytes: usize,
    /// For the intra-node and the inter-node transport, where they want it.
    staging: [Option<Staging>; 2],
}

impl Workspace {
    fn buffers(&self) -> [*mut u8; 2] {
        [0, self.bytes].map(|offset| self.memory.data().wrapping_add(offset))
    }

    /// The buffer that does not begin at `place`.
    fn other(&self, place: *const u8) -> *mut u8 {
        let [one, other] = self.buffers();
        if ptr::eq(one, place) { other } else { one }
    }
}

/// A permuted copy of runs of bytes: how many there are along each axis, the first axis outermost, and how many bytes
/// lie between them where they go and where they come from.
struct Permuted<const N: usize> {
    counts: [usize; N],
    to: [usize; N],
    from: [usize; N],
    run: usize,
}

impl Nodes {
    /// Of a block of so many bytes, for each leader.
    fn slice(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.leaders).next_multiple_of(VECTOR)
    }

    /// Bytes of the largest blocks of intra-node and of inter-node exchanges, and of a buffer between them, for blocks of
    /// `bytes` bytes.
    fn sizes(&self, bytes: u64) -> Option<[u64; 3]> {
        let (nodes, ranks) = (self.count as u64, self.ranks as u64);
        let (part, of_node) = match self.leaders == self.ranks {
            true => (bytes, 1),
            false => (bytes.div_ceil(self.leaders as u64).checked_next_multiple_of(VECTOR as u64)?, ranks),
        };
        let intra = nodes.checked_mul(of_node)?.checked_mul(part)?;
        let inter = ranks.checked_mul(of_node)?.checked_mul(part)?;
        Some([intra, inter, ranks.checked_mul(intra)?])
    }
}

impl Hierarchical {
    pub fn links(&self) -> impl Iterator<Item = &Link> {
        [Some(&self.intra), self.inter.as_ref()].into_iter().flatten().map(|link| &**link)
    }

    pub fn check(&self, device: Device, memory: &Block, bytes: i64) -> Result<()> {
        let [intra, inter, _] = self.sizes(bytes)?;
        self.links().zip([intra, inter]).try_for_each(|(link, bytes)| link.transport.check(device, memory, bytes))
    }

    fn sizes(&self, bytes: i64) -> Result<[i64; 3]> {
        let too_large = || error!(SizeOverflow, "{bytes} bytes a chunk, several times over, are more than 2^63 - 1");
        let [intra, inter, all] = self.nodes.sizes(bytes as u64).ok_or_else(too_large)?;
        // Twice: what is sent, and what is received.
        i64::try_from(all).ok().and_then(|all| all.checked_mul(2)).ok_or_else(too_large)?;
        Ok([intra as i64, inter as i64, all as i64])
    }

    /// For exchanges of blocks with up to so many bytes.
    pub fn workspace(&self, queue: &mut Queue, bytes: i64) -> Result<Workspace> {
        let [intra, inter, all] = self.sizes(bytes)?;
        if let Queue::Cuda(queue) = &mut *queue {
            cuda::copy::prepare(queue)?;
        }
        let of_inter = self.inter.as_ref().map_or(Ok(None), |inter_node| inter_node.staging(queue, inter))?;
        let staging = [self.intra.staging(queue, intra)?, of_inter];
        Ok(Workspace { memory: Block::new(queue, 2 * all)?, bytes: all as usize, staging })
    }

    /// Bytes that `exchange` makes this rank send to other ranks of its node and of other nodes.
    pub fn sent(&self, pattern: Pattern, bytes: i64) -> (i64, i64) {
        let Nodes { count, ranks, leaders, .. } = self.nodes;
        let slice = self.nodes.slice(bytes as usize) as i64;
        let [nodes, ranks, all] = [count, ranks, count * ranks].map(|number| number as i64);
        // Blocks within the node and between nodes, each of which goes to all others there.
        let (within, between) = match (leaders == self.nodes.ranks, pattern) {
            (true, Pattern::AllToAll) => (nodes * bytes, ranks * bytes),
            (true, Pattern::AllGather) => (nodes * bytes, bytes),
            (false, Pattern::AllToAll) => (2 * all * slice, ranks * ranks * slice),
            (false, Pattern::AllGather) => (bytes + all * slice, ranks * slice),
        };
        ((ranks - 1) * within, if self.inter.is_some() { (nodes - 1) * between } else { 0 })
    }

    pub fn exchange(&self, exchange: &Exchange<'_>, workspace: &Workspace) -> Result<()> {
        let mut queue = exchange.queue()?;
        match (self.nodes.leaders == self.nodes.ranks, exchange.pattern) {
            (true, Pattern::AllToAll) => self.all_to_all(exchange, workspace, &mut queue),
            (true, Pattern::AllGather) => self.all_gather(exchange, workspace, &mut queue),
            (false, Pattern::AllToAll) => self.all_to_all_by_leaders(exchange, workspace, &mut queue),
            (false, Pattern::AllGather) => self.all_gather_by_leaders(exchange, workspace, &mut queue),
        }
    }

    fn all_to_all(&self, exchange: &Exchange<'_>, workspace: &Workspace, queue: &mut Queue) -> Result<()> {
        let (bytes, Nodes { count: nodes, ranks, .. }) = (exchange.bytes, self.nodes);
        let [one, other] = workspace.buffers();
        let came = self.inter_node(&Exchange { recv: one, bytes: ranks * bytes, ..*exchange }, workspace)?;
        // [node][rank here] to [rank here][node].
        let turned =
            Permuted { counts: [ranks, nodes], to: [nodes * bytes, bytes], from: [bytes, ranks * bytes], run: bytes };
        // SAFETY: both sides have a block for each rank of the world.
        unsafe { turned.copy(queue, exchange.device, other, came)? };
        let intra = Exchange { send: other, recv: one, bytes: nodes * bytes, ..*exchange };
        let came = self.intra_node(&intra, workspace)?;
        self.in_order_of_ranks(exchange, queue, came)
    }

    fn all_gather(&self, exchange: &Exchange<'_>, workspace: &Workspace, queue: &mut Queue) -> Result<()> {
        let [one, other] = workspace.buffers();
        let came = self.inter_node(&Exchange { recv: one, ..*exchange }, workspace)?;
        let bytes = self.nodes.count * exchange.bytes;
        let came = self.intra_node(&Exchange { send: came, recv: other, bytes, ..*exchange }, workspace)?;
        self.in_order_of_ranks(exchange, queue, came)
    }

    /// From `[rank][node]` to `[node][rank]`.
    fn in_order_of_ranks(&self, exchange: &Exchange<'_>, queue: &mut Queue, came: *const u8) -> Result<()> {
        let (bytes, Nodes { count: nodes, ranks, .. }) = (exchange.bytes, self.nodes);
        let turned =
            Permuted { counts: [nodes, ranks], to: [ranks * bytes, bytes], from: [bytes, nodes * bytes], run: bytes };
        // SAFETY: both sides have a block of each rank of the world.
        unsafe { turned.copy(queue, exchange.device, exchange.recv, came) }
    }

    fn all_to_all_by_leaders(&self, exchange: &Exchange<'_>, workspace: &Workspace, queue: &mut Queue) -> Result<()> {
        let Nodes { count: nodes, ranks, leaders, .. } = self.nodes;
        let (bytes, slice, device) = (exchange.bytes, self.nodes.slice(exchange.bytes), exchange.device);
        let (world, [one, other]) = (nodes * ranks, workspace.buffers());
        let padded = Permuted { counts: [world], to: [leaders * slice], from: [bytes], run: bytes };
        // SAFETY: a block for each rank, and room for the slices of as many.
        unsafe { padded.copy(queue, device, one, exchange.send)? };
        let cut = Permuted {
            counts: [leaders, world],
            to: [world * slice, slice],
            from: [slice, leaders * slice],
            run: slice,
        };
        // SAFETY: both sides have the slices of a block for each rank.
        unsafe { cut.copy(queue, device, other, one)? };
        let intra = Exchange { send: other, recv: one, bytes: world * slice, ..*exchange };
        let came = self.intra_node(&intra, workspace)?;
        let mut led = other;
        if self.inter.is_some() {
            // [rank here that sends][node][rank there] to [node][rank here][rank there].
            let gathered = Permuted {
                counts: [nodes, ranks],
                to: [ranks * ranks * slice, ranks * slice],
                from: [ranks * slice, world * slice],
                run: ranks * slice,
            };
            let to = workspace.other(came);
            // SAFETY: both sides have a slice of what each rank of this node sends to each rank.
            unsafe { gathered.copy(queue, device, to, came)? };
            let sent = Exchange { send: to, recv: workspace.other(to), bytes: ranks * ranks * slice, ..*exchange };
            let came = self.inter_node(&sent, workspace)?;
            led = workspace.other(came);
            // [rank that sent][rank here] to [rank here][rank that sent].
            let turned = Permuted {
                counts: [ranks, world],
                to: [world * slice, slice],
                from: [slice, ranks * slice],
                run: slice,
            };
            // SAFETY: both sides have a slice of what each rank sent to each rank of this node.
            unsafe { turned.copy(queue, device, led, came)? };
        }
        self.intra.transport.barrier(queue)?;
        self.join(exchange, queue, workspace, &Exchange { send: led, recv: workspace.other(led), ..intra })
    }

    fn all_gather_by_leaders(&self, exchange: &Exchange<'_>, workspace: &Workspace, queue: &mut Queue) -> Result<()> {
        let Nodes { count: nodes, ranks, .. } = self.nodes;
        let (bytes, slice, [one, other]) = (exchange.bytes, self.nodes.slice(exchange.bytes), workspace.buffers());
        let came = self.intra_node(&Exchange { recv: one, ..*exchange }, workspace)?;
        let mut led = other.cast_const();
        if self.inter.is_some() {
            // The last leaders may have less, or nothing.
            let skipped = (self.intra.rank * slice).min(bytes);
            let run = slice.min(bytes - skipped);
            if run > 0 {
                let cut = Permuted { counts: [ranks], to: [slice], from: [bytes], run };
                // SAFETY: a block of each rank of this node, and room for a slice of each.
                unsafe { cut.copy(queue, exchange.device, other, came.wrapping_add(skipped))? };
            }
            let sent = Exchange { send: other, recv: one, bytes: ranks * slice, ..*exchange };
            led = self.inter_node(&sent, workspace)?;
        }
        self.intra.transport.barrier(queue)?;
        let bytes = nodes * ranks * slice;
        self.join(exchange, queue, workspace, &Exchange { send: led, recv: workspace.other(led), bytes, ..*exchange })
    }

    /// The last intra-node exchange, of `[leader][rank]`, and the blocks put together of its slices.
    fn join(
        &self, exchange: &Exchange<'_>, queue: &mut Queue, workspace: &Workspace, last: &Exchange<'_>,
    ) -> Result<()> {
        let (leaders, world) = (self.nodes.leaders, self.nodes.count * self.nodes.ranks);
        let (bytes, slice, device) = (exchange.bytes, self.nodes.slice(exchange.bytes), exchange.device);
        let came = self.intra_node(last, workspace)?;
        let joined = workspace.other(came);
        let order = Permuted {
            counts: [world, leaders],
            to: [leaders * slice, slice],
            from: [slice, world * slice],
            run: slice,
        };
        // SAFETY: both sides have the slices of a block of each rank; the leaders are the first ranks of the node.
        unsafe { order.copy(queue, device, joined, came)? };
        let packed = Permuted { counts: [world], to: [bytes], from: [leaders * slice], run: bytes };
        // SAFETY: the slices of a block of each rank, and room for the blocks.
        unsafe { packed.copy(queue, device, exchange.recv, joined) }
    }

    fn intra_node(&self, exchange: &Exchange<'_>, workspace: &Workspace) -> Result<*const u8> {
        self.intra.exchange(exchange, workspace.staging[0].as_ref())
    }

    fn inter_node(&self, exchange: &Exchange<'_>, workspace: &Workspace) -> Result<*const u8> {
        match &self.inter {
            Some(inter) => inter.exchange(exchange, workspace.staging[1].as_ref()),
            None => Err(error!(Comm, "communicator: a rank that leads nothing was to exchange between nodes")),
        }
    }

    /// The bootstrap all-gather, by the first rank of each node.
    pub fn all_gather_bytes(&self, own: &Bytes, all: &mut [Bytes]) -> Result<()> {
        let (ranks, nodes) = (self.nodes.ranks, self.nodes.count);
        let (mut here, mut there) = (Records::with_room(ranks)?, Records::with_room(nodes)?);
        let mut sent = Records::with_room(ranks)?;
        self.intra.all_gather(own, &mut here.0)?;
        for rank in 0..ranks {
            if let Some(inter) = self.inter.as_ref().filter(|_| self.intra.rank == 0) {
                inter.all_gather(&here.0[rank], &mut there.0)?;
            }
            for (node, record) in there.0.iter().enumerate() {
                self.intra.all_gather(record, &mut sent.0)?;
                all[node * ranks + rank] = sent.0[0];
            }
        }
        Ok(())
    }
}

impl<const N: usize> Permuted<N> {
    /// # Safety
    /// Both sides are memory of the device that has all these runs, apart from each other, and stay until the queue
    /// has done it.
    unsafe fn copy(&self, queue: &mut Queue, device: Device, to: *mut u8, from: *const u8) -> Result<()> {
        if let Queue::Cpu = queue {
            for number in 0..self.counts.iter().product() {
                let (mut rest, mut at) = (number, [0, 0]);
                for axis in (0..N).rev() {
                    let index = rest % self.counts[axis];
                    rest /= self.counts[axis];
                    at = [at[0] + index * self.to[axis], at[1] + index * self.from[axis]];
                }
                // SAFETY: the caller promises that both sides have this run.
                unsafe { to.add(at[0]).copy_from_nonoverlapping(from.add(at[1]), self.run) };
            }
            return Ok(());
        }
        /// Of one axis more: the bytes of a run.
        const AXES: usize = 3;
        let mut shape = [1; AXES];
        let mut strides = [[0; AXES]; 2];
        for axis in 0..N {
            shape[axis] = self.counts[axis] as i64;
            (strides[0][axis], strides[1][axis]) = (self.to[axis] as i64, self.from[axis] as i64);
        }
        (shape[N], strides[0][N], strides[1][N]) = (self.run as i64, 1, 1);
        let side = |name, data: *mut u8, strides: &[i64; AXES]| {
            let tensor = DLTensor {
                data: data.cast(),
                device: device.to_dlpack(),
                ndim: N as i32 + 1,
                dtype: DLDataType { code: DLDataTypeCode::UINT, bits: 8, lanes: 1 },
                shape: shape.as_ptr().cast_mut(),
                strides: strides.as_ptr().cast_mut(),
                byte_offset: 0,
            };
            let name = Name::new(name);
            // SAFETY: the shape and the strides outlive the copy; the caller promises the memory that they describe.
            unsafe { Elements::new(&name, Described::from_dlpack(&name, &tensor)?) }
        };
        let (source, target) = (side("blocks", from.cast_mut(), &strides[1])?, side("blocks", to, &strides[0])?);
        copy_on(queue, &source, &target)
    }
}
