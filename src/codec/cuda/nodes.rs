//! Sums within a node on CUDA: kernels/nodes.cuh.

use std::ptr;

use crate::{
    codec::plan::{
        HEADER, NonFinite,
        nodes::{NodePlan, Tile as PlanTile},
    },
    cuda::{Memory, Queue, launch::argument, layout::kernel_structs, memory::Parts, module::ONEBIT},
    dlpack::{Address, View},
    ffi::error::Result,
};

use super::{
    Codec,
    layout::{MOST_VALUES, number_of},
};

/// Elements that a thread block of gc_nodes_sum adds.
const SUMS: u64 = 1024;

kernel_structs! {
    #[derive(Clone, Copy)]
    pub struct Tile: gc_node_tile {
        first: u64,
        to: u64,
        segment: u32,
        count: u32,
    }

    pub struct Pack: gc_node_pack {
        tiles: u64,
        headers: u64,
        dst: *mut u8,
        factor: *const u8,
        addresses: u64,
        n_tiles: u64,
        block_bytes: u64,
        size: u32,
        reserved: u32,
        values: [*const u8; MOST_VALUES],
    }

    pub struct Sum: gc_node_sum {
        blocks: *const u8,
        to: *mut u8,
        control: u64,
        report: u64,
        elements: u64,
        block_bytes: u64,
        ranks: u32,
        dtype: u32,
        zero: u32,
        reserved: u32,
        header: [u8; HEADER],
    }
}

/// The tables of a plan on the device.
pub struct Tables {
    memory: Memory,
    tiles: u64,
    headers: u64,
}

impl Tables {
    pub fn new(queue: &mut Queue, plan: &NodePlan) -> Result<Self> {
        let mut parts = Parts::default();
        let tiles = parts.add(plan.tiles.len(), size_of::<PlanTile>())?;
        let headers = parts.add(plan.headers.len(), HEADER)?;
        let memory = Memory::new(queue, parts.bytes)?;
        queue.wait()?;
        memory.put(tiles, &plan.tiles)?;
        memory.put(headers, &plan.headers)?;
        Ok(Self { memory, tiles, headers })
    }

    /// Writes the blocks that a rank sends to the ranks of its node. `whole`: the codec of all elements, which passes
    /// the addresses of values. `values`: an address per segment. `send`: room for a block for each part.
    pub fn pack(
        &self, queue: &mut Queue, plan: &NodePlan, whole: &Codec, values: &[Address], factor: Option<&View<'_>>,
        send: &View<'_>,
    ) -> Result<()> {
        let n_tiles = plan.tiles.len() as u64;
        let mut call = Pack {
            tiles: self.memory.at(self.tiles),
            headers: self.memory.at(self.headers),
            dst: send.data(),
            factor: factor.map_or(ptr::null(), |factor| factor.data().cast_const()),
            addresses: 0,
            n_tiles,
            block_bytes: plan.block_bytes as u64,
            size: plan.values.size as u32,
            reserved: 0,
            values: [ptr::null(); MOST_VALUES],
        };
        call.addresses = whole.pass_addresses(queue, values, &mut call.values)?;
        // SAFETY: `call` is the kernel's struct: tables of this plan, and values and blocks of the plan's sizes.
        unsafe { queue.launch(&ONEBIT.pack_blocks, n_tiles + plan.parts.len() as u64, &mut argument(&mut call)) }
    }
}

/// Sums up the blocks that a rank has received, one from each rank of its node. `codec`: encodes the sums next, and
/// receives the flags. `sums`: float32, an element for each of this rank's part, aligned to 16.
pub fn sum(queue: &mut Queue, plan: &NodePlan, codec: &Codec, received: &View<'_>, sums: &View<'_>) -> Result<()> {
    let part = plan.own_part();
    let mut call = Sum {
        blocks: received.data(),
        to: sums.data(),
        control: codec.control(),
        report: codec.report(),
        elements: part.elements as u64,
        block_bytes: plan.block_bytes as u64,
        ranks: plan.parts.len() as u32,
        dtype: number_of(plan.values) as u32,
        zero: u32::from(part.rules.policy == NonFinite::Zero),
        reserved: 0,
        header: plan.headers[plan.own],
    };
    let blocks = (part.elements as u64).div_ceil(SUMS).max(1);
    // SAFETY: `call` is the kernel's struct: the codec's memory, and blocks and sums of the plan's sizes.
    unsafe { queue.launch(&ONEBIT.sum_blocks, blocks, &mut argument(&mut call)) }
}
