//! Elements that do not lie side by side: every other element, all of them backwards, rows with gaps between. They pass
//! through the stack, where they do, a block at a time: gathered and scattered as by a copy.

use std::mem::MaybeUninit;

use crate::{
    backend::cpu::{dispatch::Variant, moves::move_all, simd::LineAligned},
    plan::{
        bits::{BitOrder, BitRule, Patterns},
        loops::{Block, Cursor, Loop, Loops},
    },
};

use super::{flat::Rows, kernels};

/// Bytes of elements that pass through the stack at once: what a call leaves of its 32 KiB.
const ROOM: usize = 8192;

/// Runs side by side of more elements than this, and of more bytes, are long: bits are made as fast where they lie.
const LONGEST: i64 = 63;
const MOST_BYTES: i64 = 128;

/// The inner loop, if its runs are long.
fn long_runs(cursor: &Cursor<'_, 1>, size: usize) -> Option<i64> {
    let &Loop { count, strides: [stride] } = cursor.loops().last()?;
    (count > LONGEST && count * size as i64 > MOST_BYTES).then_some(stride)
}

/// How many elements to take at once: whole runs, where they are short, of whole bytes of bits.
fn block_of(cursor: &Cursor<'_, 1>, size: usize) -> usize {
    let most = ROOM / size;
    let run = cursor.loops().last().map_or(1, |run| run.count as usize);
    let together = run << (3 - run.trailing_zeros().min(3));
    if together > most { most } else { most - most % together }
}

/// Packs the next `bits` elements that the cursor passes over to ceil(bits / 8) bytes, zeros after the last bit.
///
/// # Safety
/// Every offset of the cursor from `base` is an element that `rule` and `variant` are for, at any alignment; `dst` has
/// room for the bytes.
pub unsafe fn pack(
    variant: Variant, rule: BitRule, order: BitOrder, cursor: &mut Cursor<'_, 1>, base: *const u8, bits: usize,
    dst: *mut u8,
) {
    if long_runs(cursor, rule.size) == Some(rule.size as i64) {
        // SAFETY: the cursor has `bits` elements for this variant, and `dst` room for their bits.
        return unsafe { kernels::pack_runs(variant, rule, order, cursor, base, bits, dst) };
    }
    let LineAligned(block) = &mut LineAligned([MaybeUninit::<u8>::uninit(); ROOM]);
    let block = block.as_mut_ptr().cast::<u8>();
    let most = block_of(cursor, rule.size);
    for first in (0..bits).step_by(most) {
        let count = most.min(bits - first);
        // SAFETY: the cursor has so many more elements, the block has room for them and `dst` for their bits, which are
        // whole bytes in all blocks but the last.
        unsafe {
            for_each_nest(
                cursor,
                rule.size,
                count,
                |[side_by_side, apart]| [side_by_side, apart],
                |offset, done, loops| {
                    move_all(variant.set(), rule.size, block.add(done), base.offset(offset), loops);
                },
            );
            kernels::pack_rows(variant, rule, order, block, count, dst.add(first / 8), &Rows::ONE);
        }
    }
}

/// Unpacks `bytes`, an address and how many there are, to the next `bits` elements that the cursor passes over: the
/// pattern for 1, 0 for 0 and past the last byte.
///
/// # Safety
/// Every offset of the cursor from `base` is the place of an element that `patterns` and `variant` are for, at any
/// alignment; the bytes are there.
pub unsafe fn unpack(
    variant: Variant, patterns: Patterns, order: BitOrder, (src, available): (*const u8, usize),
    cursor: &mut Cursor<'_, 1>, base: *mut u8, bits: usize,
) {
    if long_runs(cursor, patterns.size).is_some_and(|stride| stride != -(patterns.size as i64)) {
        // SAFETY: the bytes are there, and the cursor has `bits` places of elements for this variant.
        return unsafe { kernels::unpack_runs(variant, patterns, order, (src, available), cursor, base, bits) };
    }
    let LineAligned(block) = &mut LineAligned([MaybeUninit::<u8>::uninit(); ROOM]);
    let block = block.as_mut_ptr().cast::<u8>();
    let (size, most) = (patterns.size, block_of(cursor, patterns.size));
    for first in (0..bits).step_by(most) {
        let count = most.min(bits - first);
        let there = count.min(available.saturating_sub(first / 8).saturating_mul(8));
        // SAFETY: so many bits are there, and the block has room for `count` elements, as the cursor has; bits are
        // whole bytes in all blocks but the last.
        unsafe {
            kernels::unpack_rows(variant, patterns, order, src.wrapping_add(first / 8), there, block, &Rows::ONE);
            block.add(there * size).write_bytes(0, (count - there) * size);
            for_each_nest(
                cursor,
                size,
                count,
                |[side_by_side, apart]| [apart, side_by_side],
                |offset, done, loops| {
                    move_all(variant.set(), size, base.offset(offset), block.add(done), loops);
                },
            );
        }
    }
}

/// Passes over `count` elements. Calls `work` with where some of them begin, where they belong side by side, and the
/// loops over both, the strides there in the order that `sides` puts them in.
fn for_each_nest(
    cursor: &mut Cursor<'_, 1>, size: usize, count: usize, sides: impl Fn([i64; 2]) -> [i64; 2],
    mut work: impl FnMut(isize, usize, &mut Loops<2>),
) {
    let mut left = count as i64;
    while let Some(Block { offsets: [offset], count: outermost, strides, inside }) = cursor.next_block(left) {
        let rounds = inside.iter().fold(outermost, |rounds, item| rounds * item.count);
        let (mut loops, mut side_by_side) = (Loops::new(), rounds * size as i64);
        for item in [Loop { count: outermost, strides }].iter().chain(inside) {
            side_by_side /= item.count;
            loops.push(item.count, sides([side_by_side, item.strides[0]]));
        }
        work(offset as isize, (count as i64 - left) as usize * size, &mut loops);
        left -= rounds;
    }
}
