//! Sums within a node on the CPU.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{
    codec::plan::{
        CORRUPT, HEADER, NONFINITE, NonFinite,
        nodes::{FACTOR_AT, NodePlan, TILE},
    },
    cpu::{
        memory,
        numbers::{Number, with_numbers},
    },
    dlpack::{Address, View},
};

use super::tiles::in_parts;

/// Writes the blocks that a rank sends to the ranks of its node. `values`: an address per segment of the plan. `send`:
/// room for a block for each part.
pub fn pack(plan: &NodePlan, values: &[Address], factor: Option<&View<'_>>, send: &View<'_>) {
    let (size, factor, send) = (plan.values.size, factor.map_or(1.0, memory::read), send.data());
    for (number, (header, part)) in plan.headers.iter().zip(&plan.parts).enumerate() {
        let block = send.wrapping_add(number * plan.block_bytes as usize);
        let end = HEADER + part.elements as usize * size;
        // SAFETY: `send` has this block, which begins with a header and has room for the part's values.
        unsafe {
            block.copy_from_nonoverlapping(header.as_ptr(), HEADER);
            block.add(FACTOR_AT).cast::<f32>().write_unaligned(factor);
            block.add(end).write_bytes(0, plan.block_bytes as usize - end);
        }
    }
    let send = Address(send);
    in_parts(plan.tiles.len(), (plan.tiles.len() as i64 * TILE).saturating_mul(2 * size as i64), |tiles| {
        for tile in &plan.tiles[tiles] {
            let from = values[tile.segment as usize].at(tile.first as usize * size);
            // SAFETY: the tile's elements are in the segment and have their place in a block.
            unsafe { send.at(tile.to as usize).copy_from_nonoverlapping(from, tile.count as usize * size) };
        }
    });
}

/// Sums the blocks that a rank has received, one from each rank of its node. Returns flags: CORRUPT if a header is
/// wrong, and the sums are then +0; NONFINITE if a value counts as +0. `received`: a block for each rank. `sums`:
/// float32, an element for each of this rank's part, aligned to 4.
pub fn sum(plan: &NodePlan, received: &View<'_>, sums: &View<'_>) -> u32 {
    let (ranks, elements) = (plan.parts.len(), plan.own_part().elements);
    let zero = plan.own_part().rules.policy == NonFinite::Zero;
    let (received, to) = (received.data(), sums.data());
    let block = |rank: usize| received.wrapping_add(rank * plan.block_bytes as usize);
    let expected = &plan.headers[plan.own];
    let is_right = |rank: usize| {
        // SAFETY: a block begins with a header.
        let header = unsafe { block(rank).cast::<[u8; HEADER]>().read_unaligned() };
        header[..FACTOR_AT] == expected[..FACTOR_AT] && header[FACTOR_AT + 4..] == expected[FACTOR_AT + 4..]
    };
    if !(0..ranks).all(is_right) {
        // SAFETY: `sums` has `elements` float32.
        unsafe { to.write_bytes(0, elements as usize * size_of::<f32>()) };
        return CORRUPT;
    }
    let (received, to, met) = (Address(received), Address(to), AtomicBool::new(false));
    let sum_tile: SumTile = with_numbers!(plan.values, None, |G, _E| sum_tile::<G>);
    let tiles = (elements as u64).div_ceil(TILE as u64) as usize;
    in_parts(tiles, elements.saturating_mul(4 + (ranks * plan.values.size) as i64), |tiles| {
        for tile in tiles {
            let range = tile as i64 * TILE..elements.min((tile as i64 + 1) * TILE);
            // SAFETY: every block and the sums have the elements of the tile.
            let nonfinite = unsafe { sum_tile(plan, zero, received, to, range) };
            if nonfinite {
                met.store(true, Ordering::Relaxed);
            }
        }
    });
    if met.into_inner() { NONFINITE } else { 0 }
}

type SumTile = unsafe fn(&NodePlan, bool, Address, Address, Range<i64>) -> bool;

/// Sums the elements of a range. Returns true if a value counts as +0 because it is not finite.
///
/// # Safety
/// The elements are in every block and in the sums, and no other thread uses these sums.
unsafe fn sum_tile<G: Number>(plan: &NodePlan, zero: bool, received: Address, to: Address, range: Range<i64>) -> bool {
    let count = (range.end - range.start) as usize;
    // SAFETY: `to` has room for the elements, aligned to 4, and only this thread uses it.
    let sums = unsafe { std::slice::from_raw_parts_mut(to.at(range.start as usize * 4).cast::<f32>(), count) };
    let mut nonfinite = false;
    for rank in 0..plan.parts.len() {
        let block = received.at(rank * plan.block_bytes as usize);
        // SAFETY: a block has a factor and these elements.
        let factor = unsafe { block.wrapping_add(FACTOR_AT).cast::<f32>().read_unaligned() };
        let values = block.wrapping_add(HEADER + range.start as usize * size_of::<G::Bits>());
        for (index, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the block has `count` values from there on.
            let value = unsafe { G::load(values, index) };
            let mut v = factor * value;
            if zero && !(value.is_finite() && v.is_finite()) {
                (v, nonfinite) = (0.0, true);
            }
            *sum = if rank == 0 { v } else { *sum + v };
        }
    }
    nonfinite
}
