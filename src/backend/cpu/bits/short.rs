//! Short runs: a few elements at one stride, then a gap. Elements pass through the stack, where they lie side by side,
//! many runs at once. That is less work than to make bits of each run by itself.

use std::{hint::black_box, mem::MaybeUninit, ptr};

use crate::{
    backend::cpu::dispatch::Variant,
    plan::{
        bits::{BitOrder, BitRule, Patterns},
        loops::{Block, Cursor, Loop, Loops},
    },
};

use super::{flat, kernels};

/// The longest runs that pass through the stack: elements side by side, or bytes of them. Of 64 elements of 4 bytes
/// side by side, bits are made as fast without; of 150 bytes, too.
const LONGEST_SIDE_BY_SIDE: i64 = 63;
const MOST_BYTES_SIDE_BY_SIDE: i64 = 128;

/// The same for runs at other strides. Of 24 elements against the order of memory, bits are made a tenth slower
/// through the stack with AVX-512, twice as fast without vectors.
const LONGEST: i64 = 20;

/// Bytes of elements that pass through the stack at once: what a call leaves of its 32 KiB.
const ROOM: usize = 4096;

#[repr(align(64))]
struct Room([MaybeUninit<u8>; ROOM]);

/// Elements of so many bytes that pass at once.
fn block_of(size: usize) -> usize {
    (ROOM / size).min(1024)
}

/// How many elements to take at once where runs are short: whole bytes of bits, and whole rounds of as many loops as
/// fit.
fn block_of_short_runs(cursor: &Cursor<'_, 1>, size: usize) -> Option<usize> {
    let [outer @ .., run] = cursor.loops() else {
        return None;
    };
    let is_short = if run.strides == [size as i64] {
        run.count <= LONGEST_SIDE_BY_SIDE || run.count * size as i64 <= MOST_BYTES_SIDE_BY_SIDE
    } else {
        run.count <= LONGEST
    };
    if outer.is_empty() || !is_short {
        return None;
    }
    let most = block_of(size);
    let whole_bytes = |elements: i64| elements << (3 - elements.trailing_zeros().min(3));
    let rounds = outer.iter().rev().scan(run.count, |elements, item| {
        *elements = elements.saturating_mul(item.count);
        Some(*elements)
    });
    let fitting =
        rounds.take_while(|&elements| elements <= most as i64 / 8 || elements % 8 == 0 && elements <= most as i64);
    let together = whole_bytes(fitting.last().unwrap_or(run.count)) as usize;
    Some(most - most % together)
}

/// Packs the next `bits` elements that the cursor passes over to ceil(bits / 8) bytes, zeros after the last bit.
///
/// # Safety
/// Every offset of the cursor from `base` is an element that `rule` and `variant` are for, at any alignment; `dst` has
/// room for the bytes.
pub unsafe fn pack_runs(
    variant: Variant, rule: BitRule, order: BitOrder, cursor: &mut Cursor<'_, 1>, base: *const u8, bits: usize,
    mut dst: *mut u8,
) {
    let Some(most) = block_of_short_runs(cursor, rule.size) else {
        // SAFETY: the cursor has `bits` elements for this variant, and `dst` room for their bits.
        return unsafe { kernels::pack_runs(variant, rule, order, cursor, base, bits, dst) };
    };
    let mut block = Room([MaybeUninit::uninit(); ROOM]);
    let block = block.0.as_mut_ptr().cast::<u8>();
    let mut left = bits;
    while left > 0 {
        let count = left.min(most);
        // SAFETY: the cursor has so many more elements, the block has room for them and `dst` for their bits, which are
        // whole bytes in all blocks but the last.
        unsafe {
            for_each_rows(cursor, rule.size, count, |outside, inside, counts| {
                copy_rows(rule.size, outside.of(base.cast_mut()), inside.of(block), counts);
            });
            kernels::pack_rows(variant, rule, order, block, count, dst, &flat::Rows::ONE);
            dst = dst.add(count.div_ceil(8));
        }
        left -= count;
    }
}

/// Unpacks `bytes`, an address and how many there are, to the next `bits` elements that the cursor passes over: the
/// pattern for 1, 0 for 0 and past the last byte.
///
/// # Safety
/// Every offset of the cursor from `base` is the place of an element that `patterns` and `variant` are for, at any
/// alignment; the bytes are there.
pub unsafe fn unpack_runs(
    variant: Variant, patterns: Patterns, order: BitOrder, bytes: (*const u8, usize), cursor: &mut Cursor<'_, 1>,
    base: *mut u8, bits: usize,
) {
    let Some(most) = block_of_short_runs(cursor, patterns.size) else {
        // SAFETY: the bytes are there, and the cursor has `bits` places of elements for this variant.
        return unsafe { kernels::unpack_runs(variant, patterns, order, bytes, cursor, base, bits) };
    };
    let mut block = Room([MaybeUninit::uninit(); ROOM]);
    let block = block.0.as_mut_ptr().cast::<u8>();
    let (mut src, mut available) = bytes;
    let mut left = bits;
    while left > 0 {
        let count = left.min(most);
        let there = count.min(available.saturating_mul(8));
        // SAFETY: so many bits are there, and the block has room for `count` elements, as the cursor has; bits are
        // whole bytes in all blocks but the last.
        unsafe {
            kernels::unpack_rows(variant, patterns, order, src, there, block, &flat::Rows::ONE);
            block.add(there * patterns.size).write_bytes(0, (count - there) * patterns.size);
            for_each_rows(cursor, patterns.size, count, |outside, inside, counts| {
                copy_rows(patterns.size, inside.of(block), outside.of(base), counts);
            });
            src = src.add(there.div_ceil(8));
        }
        available -= there.div_ceil(8);
        left -= count;
    }
}

/// Where rows lie: the first element, and how far it is from row to row and from element to element, in bytes.
#[derive(Clone, Copy)]
struct Place<P> {
    first: P,
    strides: [isize; 2],
}

impl Place<isize> {
    /// The same, its first element so far from `base`.
    fn of(self, base: *mut u8) -> Place<*mut u8> {
        Place { first: base.wrapping_offset(self.first), strides: self.strides }
    }
}

/// With fewer rows than this, the loop over them takes longer to begin than to run.
const FEW_ROWS: i64 = 16;

/// Passes over `count` elements. Calls `work` with where some rows of them lie, where they belong side by side, and
/// how many rows of how many elements they are.
#[inline(always)]
fn for_each_rows(
    cursor: &mut Cursor<'_, 1>, size: usize, count: usize, mut work: impl FnMut(Place<isize>, Place<isize>, [usize; 2]),
) {
    let mut done = 0;
    while let Some(Block { offsets: [first], count: outermost, strides, inside }) =
        cursor.next_block((count - done) as i64)
    {
        // The loops with the strides of both sides: the innermost, the one over rows, and others around these in any
        // order.
        let [mut rows, mut row] = [Loop { count: 1, strides: [0; 2] }; 2];
        let mut others = Loops::new();
        let mut side_by_side = size as i64;
        let outermost = Loop { count: outermost, strides };
        for (depth, item) in inside.iter().rev().chain([&outermost]).enumerate() {
            let item = Loop { count: item.count, strides: [item.strides[0], side_by_side] };
            side_by_side *= item.count;
            if depth == 0 {
                row = item;
            } else if rows.count < FEW_ROWS && rows.count < item.count {
                others.push(rows.count, rows.strides);
                rows = item;
            } else {
                others.push(item.count, item.strides);
            }
        }
        for round in 0..others.count() {
            let (mut outer, mut firsts) = (round, [first, (done * size) as i64]);
            for item in others.as_slice() {
                let index = outer % item.count;
                outer /= item.count;
                firsts = [firsts[0] + index * item.strides[0], firsts[1] + index * item.strides[1]];
            }
            let place = |side: usize| Place {
                first: firsts[side] as isize,
                strides: [rows.strides[side] as isize, row.strides[side] as isize],
            };
            work(place(0), place(1), [rows.count as usize, row.count as usize]);
        }
        done += side_by_side as usize / size;
    }
}

/// Copies rows of elements of `size` bytes.
///
/// # Safety
/// Both places have all of them, at any alignment, and do not intersect.
#[inline(always)]
unsafe fn copy_rows(size: usize, from: Place<*mut u8>, to: Place<*mut u8>, counts: [usize; 2]) {
    // SAFETY: both places have all rows, which do not intersect.
    unsafe {
        if from.strides[1] == size as isize && to.strides[1] == size as isize {
            return copy_side_by_side(from, to, counts[0], counts[1] * size);
        }
        match size {
            1 => copy_elements::<u8>(from, to, counts),
            2 => copy_elements::<u16>(from, to, counts),
            4 => copy_elements::<u32>(from, to, counts),
            _ => copy_elements::<u64>(from, to, counts),
        }
    }
}

/// Copies rows whose bytes lie side by side.
///
/// # Safety
/// As for [`copy_rows`].
#[inline(always)]
unsafe fn copy_side_by_side(from: Place<*mut u8>, to: Place<*mut u8>, rows: usize, bytes: usize) {
    /// In two pieces that may overlap: the first bytes and the last.
    ///
    /// # Safety
    /// As for [`copy_rows`], and there are as many bytes as P has, and at most twice as many.
    #[inline(always)]
    unsafe fn in_two<P>(from: Place<*mut u8>, to: Place<*mut u8>, rows: usize, bytes: usize) {
        let last = bytes - size_of::<P>();
        for row in 0..rows as isize {
            let (src, dst) =
                (from.first.wrapping_offset(row * from.strides[0]), to.first.wrapping_offset(row * to.strides[0]));
            // SAFETY: both pieces lie within the bytes of this row.
            unsafe {
                let (low, high) = (src.cast::<P>().read_unaligned(), src.add(last).cast::<P>().read_unaligned());
                dst.cast::<P>().write_unaligned(low);
                dst.add(last).cast::<P>().write_unaligned(high);
            }
        }
    }
    // SAFETY: a row has `bytes` bytes in both places, which do not intersect; other lengths go to where rows are copied
    // whole.
    unsafe {
        match bytes {
            1 => in_two::<u8>(from, to, rows, bytes),
            2..=4 => in_two::<u16>(from, to, rows, bytes),
            5..=8 => in_two::<u32>(from, to, rows, bytes),
            9..=16 => in_two::<u64>(from, to, rows, bytes),
            17..=32 => in_two::<u128>(from, to, rows, bytes),
            33..=64 => in_two::<[u128; 2]>(from, to, rows, bytes),
            65..=128 => in_two::<[u128; 4]>(from, to, rows, bytes),
            _ => {
                for row in 0..rows as isize {
                    let src = from.first.wrapping_offset(row * from.strides[0]);
                    ptr::copy_nonoverlapping(src, to.first.wrapping_offset(row * to.strides[0]), bytes);
                }
            }
        }
    }
}

/// Copies rows of elements one at a time: all of a row, or one of each row, whichever are more. Rows that lie on
/// several cache lines each go one after the other, as the lines do.
///
/// # Safety
/// As for [`copy_rows`].
#[inline(always)]
unsafe fn copy_elements<T>(from: Place<*mut u8>, to: Place<*mut u8>, counts: [usize; 2]) {
    let on_several_lines = |place: Place<*mut u8>| {
        let [row, element] = place.strides.map(isize::unsigned_abs);
        row > element && element > size_of::<T>() && counts[1] * element > 64
    };
    let by_rows = counts[1] >= counts[0] || counts[1] >= 8 && (on_several_lines(from) || on_several_lines(to));
    let [outer, inner] = if by_rows { [0, 1] } else { [1, 0] };
    let [from_step, to_step] = [from.strides[inner], to.strides[inner]];
    // Left to itself, the compiler makes each place of a byte by adding to the one before, which takes twice as long.
    // What comes out of a black box it cannot make so.
    let steps = [0, from_step, black_box(2 * from_step), black_box(3 * from_step)];
    for line in 0..counts[outer] as isize {
        let mut src = from.first.wrapping_offset(line * from.strides[outer]);
        let mut dst = to.first.wrapping_offset(line * to.strides[outer]);
        // SAFETY: every place is that of an element in this line.
        unsafe {
            if size_of::<T>() == 1 && to_step == 1 {
                copy_bytes(src, steps, dst, counts[inner]);
                continue;
            }
            for _ in 0..counts[inner] {
                dst.cast::<T>().write_unaligned(src.cast::<T>().read_unaligned());
                (src, dst) = (src.wrapping_offset(from_step), dst.wrapping_offset(to_step));
            }
        }
    }
}

/// Copies bytes that lie `steps[1]` bytes apart to where they lie side by side.
///
/// # Safety
/// There are `count` on both sides, which do not intersect; `steps` are multiples.
#[inline(always)]
unsafe fn copy_bytes(src: *const u8, steps: [isize; 4], dst: *mut u8, count: usize) {
    let (step, mut src, mut done) = (steps[1], src, 0);
    // Eight at a time.
    // SAFETY: the caller promises `count` bytes, of which these are the next.
    unsafe {
        while done + 8 <= count {
            let middle = src.wrapping_offset(4 * step);
            let [low, high] = [src, middle].map(|four| steps.map(|step| four.offset(step).read()));
            dst.add(done).cast::<[[u8; 4]; 2]>().write_unaligned([low, high]);
            src = middle.wrapping_offset(4 * step);
            done += 8;
        }
        for index in done..count {
            dst.add(index).write(src.read());
            src = src.wrapping_offset(step);
        }
    }
}
