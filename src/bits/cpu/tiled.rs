//! Packing and unpacking of all layouts except contiguous rows. A tile of elements is copied to a dense buffer and
//! packed there, and its bytes are copied to the output. Unpacking does these steps in reverse, but a tile of one row
//! with long lines of adjacent elements is unpacked without a copy of the elements.
//!
//! Elements that are closest in memory are adjacent in the buffer: elements of a row, or one element of each of several
//! rows (`across`). So a copy keeps the order of memory, whichever dimension a tensor is packed along.
//!
//! ```text
//!     elements closest: each row is padded                    rows closest: the last group of
//!     to whole groups              packed                     lines is padded          packed
//!     a0 a1 .. a9 - - - - - -      A0 A1                      a0 b0                    A0 B0
//!     b0 b1 .. b9 - - - - - -      B0 B1                      a1 b1 ..                 A1 B1
//! ```

use std::{mem::MaybeUninit, ops::Range};

use crate::{
    bits::plan::BitOrder,
    cpu::{moves::move_all, simd::LineAligned},
    dlpack::{
        loops::{Block, Cursor, Loop, Loops},
        rules::{BitRule, Patterns},
    },
};

use super::{Job, Part, across::SLACK, flat::Rows, kernels, length};

/// Bytes of elements in the buffer, which fit in the L1 cache.
const ROOM: usize = 8 << 10;

/// Bytes of elements in the buffer if rows are so long that neighbours in memory are far apart in a row; they fit in
/// the L2 cache. With half as many, transposed matrices of 16 to 31 columns take over twice the time.
const LARGE_ROOM: usize = 1 << 20;

/// Bytes from which a line of adjacent elements is unpacked without a copy. Shorter ones are faster with it.
const LONG_LINE: i64 = 1 << 10;

/// Bytes of a cache line.
const LINE: i64 = 64;

/// Loop in which the elements of a tile are closest in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Closest {
    /// Innermost loop over the elements of a row.
    Elements,
    /// Innermost loop over rows.
    Rows,
}

/// Job that is processed in tiles.
pub struct Tiles<'a> {
    job: &'a Job<'a>,
    /// Loops over rows, in the order of the elements' memory.
    rows: Loops<2>,
    closest: Closest,
    /// The innermost loop over the elements of a row is a long line.
    has_long_lines: bool,
    /// Maximum number of rows and of groups of a tile.
    most_rows: i64,
    most_groups: i64,
}

/// Direction of a copy.
#[derive(Clone, Copy)]
enum Toward {
    Buffer,
    Memory,
}

/// Tile of some rows, which begin at the block's offsets, and some groups of each.
struct Tile<'a> {
    rows: &'a Block<'a, 2>,
    n_rows: i64,
    groups: Range<i64>,
}

/// Room for the elements and the bytes of a tile. SLACK bytes follow the bytes, and the elements if rows are closest.
struct Buffer {
    elements: *mut u8,
    bytes: *mut u8,
}

impl<'a> Tiles<'a> {
    /// Determines the size of tiles. `groups`: number of groups of each row.
    pub fn new(job: &'a Job<'a>, groups: i64) -> Self {
        let (plan, size) = (job.plan, job.plan.size as i64);
        let mut rows = Loops::new();
        plan.rows.as_slice().iter().for_each(|item| rows.push(item.count, item.strides));
        rows.sort_by_step();
        let step = |item: &Loop<1>| item.strides[0].unsigned_abs();
        let loops = plan.elements.as_slice();
        let (inner, n_rows) = (loops.last().map_or(0, step), rows.count().max(1));
        let closest = match rows.as_slice().last() {
            Some(item) if item.strides[0].unsigned_abs() < inner => Closest::Rows,
            _ => Closest::Elements,
        };
        let room = ROOM as i64 / (8 * size);
        let most_groups = match closest {
            // A tile has a cache line of elements of each row, or more if there are few rows.
            Closest::Rows => i64::max(LINE / size / 8, room / n_rows.min(ROOM as i64 / LINE)).max(1),
            // A tile has whole rounds of the loops inside the one where elements are closest: a cache line of rounds.
            Closest::Elements => match (0..loops.len()).rev().min_by_key(|&index| step(&loops[index])) {
                Some(index) if index + 1 < loops.len() => {
                    let inside: i64 = loops[index + 1..].iter().map(|item| item.count).product();
                    let fit = (LARGE_ROOM as i64 / size / inside).min(LINE.max(ROOM as i64 / size / inside)) & !7;
                    if fit > 0 { fit * inside / 8 } else { LARGE_ROOM as i64 / size / 8 }
                }
                _ => room,
            },
        };
        let most_groups = most_groups.clamp(1, groups.max(1));
        let has_long_lines = loops.last().is_some_and(|line| line.strides == [size] && line.count >= LONG_LINE / size);
        Self { job, rows, closest, has_long_lines, most_rows: (room / most_groups).max(1), most_groups }
    }

    /// Calls `work` with each tile of a part, and a buffer for the tile.
    fn for_each(&self, part: &Part, mut work: impl FnMut(&Tile<'_>, &Buffer)) {
        let groups = self.most_rows.min(length(&part.rows) as i64) * self.most_groups.min(length(&part.groups) as i64);
        let (elements, bytes) = (8 * groups as usize * self.job.plan.size, groups as usize);
        let LineAligned(near) = &mut LineAligned([MaybeUninit::<u8>::uninit(); ROOM + ROOM / 8 + 2 * SLACK]);
        let mut far = Vec::new();
        let (mut most_groups, mut buffer, mut bytes_at) = (self.most_groups, near.as_mut_ptr(), elements + SLACK);
        if bytes_at + bytes + SLACK > near.len() {
            if far.try_reserve_exact(bytes_at + bytes + SLACK).is_ok() {
                buffer = far.as_mut_ptr();
            } else {
                // Without memory, tiles are smaller and have one row: only tiles of one row are large.
                (most_groups, bytes_at) = ((ROOM / 8 / self.job.plan.size) as i64, ROOM);
            }
        }
        let buffer = buffer.cast::<u8>();
        let buffer = Buffer { elements: buffer, bytes: buffer.wrapping_add(bytes_at) };
        // Tiles follow the memory: all rows of some groups, or all groups of some rows.
        let strip = if self.closest == Closest::Rows { most_groups } else { i64::MAX };
        for strip in pieces(&part.groups, strip) {
            let mut cursor = Cursor::starting_at(&self.rows, part.rows.start);
            let mut left = part.rows.end - part.rows.start;
            while let Some(rows) = cursor.next_block(left.min(self.most_rows)) {
                let n_rows = rows.inside.iter().fold(rows.count, |count, item| count * item.count);
                left -= n_rows;
                for groups in pieces(&strip, most_groups) {
                    work(&Tile { rows: &rows, n_rows, groups }, &buffer);
                }
            }
        }
    }

    /// Packs a part.
    ///
    /// # Safety
    /// See Job; no other call works on the part.
    pub unsafe fn pack(&self, rule: BitRule, part: &Part) {
        let (plan, variant) = (self.job.plan, self.job.variant);
        self.for_each(part, |tile, buffer| {
            let (elements, bytes) = self.job.ranges(&tile.groups);
            let room = 8 * length(&tile.groups);
            let all = tile.n_rows as usize * room;
            // SAFETY: see Job; the buffer has room for the tile.
            unsafe {
                if length(&elements) < room {
                    fill(buffer.elements, plan.size, rule.first_zero, all);
                }
                self.copy_elements(Toward::Buffer, tile, &elements, buffer);
                let (src, dst) = (buffer.elements, buffer.bytes);
                match self.closest {
                    Closest::Elements => kernels::pack_rows(variant, rule, plan.order, src, all, dst, &Rows::ONE),
                    Closest::Rows => {
                        let (groups, columns) = (length(&tile.groups), tile.n_rows as usize);
                        src.add(all * plan.size).write_bytes(0, SLACK);
                        kernels::pack_across(variant, rule, plan.order, src, groups, dst, columns);
                    }
                }
                self.copy_bytes(Toward::Memory, tile, &bytes, buffer);
            }
        });
    }

    /// Unpacks a part.
    ///
    /// # Safety
    /// See Job; no other call works on the part.
    pub unsafe fn unpack(&self, patterns: Patterns, part: &Part) {
        let (plan, variant) = (self.job.plan, self.job.variant);
        self.for_each(part, |tile, buffer| {
            let (elements, bytes) = self.job.ranges(&tile.groups);
            let all = tile.n_rows as usize * length(&tile.groups);
            // SAFETY: see Job; the buffer has room for the tile.
            unsafe {
                if length(&bytes) < length(&tile.groups) {
                    // Signs have as many bytes as they need.
                    debug_assert_eq!(patterns.zero, 0);
                    buffer.bytes.write_bytes(0, all);
                }
                self.copy_bytes(Toward::Buffer, tile, &bytes, buffer);
                buffer.bytes.add(all).write_bytes(0, SLACK);
                let (src, dst) = (buffer.bytes, buffer.elements);
                match self.closest {
                    Closest::Elements if self.has_long_lines && tile.n_rows == 1 => {
                        return self.unpack_lines(patterns, tile, &elements, buffer);
                    }
                    Closest::Elements => {
                        kernels::unpack_rows(variant, patterns, plan.order, src, 8 * all, dst, &Rows::ONE);
                    }
                    Closest::Rows => {
                        let (groups, columns) = (length(&tile.groups), tile.n_rows as usize);
                        kernels::unpack_across(variant, patterns, plan.order, src, groups, dst, columns);
                    }
                }
                self.copy_elements(Toward::Memory, tile, &elements, buffer);
            }
        });
    }

    /// Unpacks the bytes in the buffer to these elements of the only row of a tile, line by line.
    ///
    /// # Safety
    /// See Job; the buffer has the tile's bytes, and SLACK initialized bytes after them.
    unsafe fn unpack_lines(&self, patterns: Patterns, tile: &Tile<'_>, elements: &Range<i64>, buffer: &Buffer) {
        let (plan, variant) = (self.job.plan, self.job.variant);
        let mut cursor = Cursor::starting_at(&plan.elements, elements.start);
        let (all, mut first) = (length(elements), 0);
        while let Some(line) = cursor.next_run((all - first) as i64) {
            let (count, shift) = (line.count as usize, first % 8);
            let dst = self.job.elements.wrapping_offset((tile.rows.offsets[0] + line.offsets[0]) as isize);
            // SAFETY: see Job. A line has at most the bits of the tile's bytes, so at most 8 bytes after them are
            // read, and its shifted bits fit in the room for the tile's elements.
            unsafe {
                let mut src = buffer.bytes.add(first / 8);
                if shift > 0 {
                    for index in (0..count.div_ceil(8)).step_by(8) {
                        let word = src.add(index).cast::<u64>().read_unaligned();
                        let next = u64::from(src.add(index + 8).read());
                        let shifted = match plan.order {
                            BitOrder::Big => (u64::from_be(word) << shift | next >> (8 - shift)).to_be(),
                            BitOrder::Little => (u64::from_le(word) >> shift | next << (64 - shift)).to_le(),
                        };
                        buffer.elements.add(index).cast::<u64>().write_unaligned(shifted);
                    }
                    src = buffer.elements;
                }
                kernels::unpack_rows(variant, patterns, plan.order, src, count, dst, &Rows::ONE);
            }
            first += count;
        }
    }

    /// Copies these elements of each row of a tile.
    ///
    /// # Safety
    /// See Job; the buffer has room for the tile.
    unsafe fn copy_elements(&self, toward: Toward, tile: &Tile<'_>, elements: &Range<i64>, buffer: &Buffer) {
        let (size, cursor) = (self.job.plan.size, Cursor::starting_at(&self.job.plan.elements, elements.start));
        let near = (buffer.elements, 8 * length(&tile.groups));
        // SAFETY: see Job.
        unsafe { self.copy(toward, size, tile, 0, (cursor, length(elements)), self.job.elements, near) };
    }

    /// Copies these bytes of each row of a tile.
    ///
    /// # Safety
    /// See Job; the buffer has room for the tile.
    unsafe fn copy_bytes(&self, toward: Toward, tile: &Tile<'_>, bytes: &Range<i64>, buffer: &Buffer) {
        let cursor = Cursor::starting_at(&self.job.plan.bytes, bytes.start);
        let near = (buffer.bytes, length(&tile.groups));
        // SAFETY: see Job.
        unsafe { self.copy(toward, 1, tile, 1, (cursor, length(bytes)), self.job.bytes, near) };
    }

    /// Copies the next `count` items of `size` bytes of each row of a tile between memory and a buffer, in which a row
    /// has room for `room` items. `side`: index of the rows' strides.
    ///
    /// # Safety
    /// The items at the offsets of the rows and the cursor are valid memory, and the buffer has room for them.
    #[allow(clippy::too_many_arguments, reason = "both ends of a copy, each of which is described by several numbers")]
    unsafe fn copy(
        &self, toward: Toward, size: usize, tile: &Tile<'_>, side: usize, (mut cursor, count): (Cursor<'_, 1>, usize),
        memory: *mut u8, (buffer, room): (*mut u8, usize),
    ) {
        let strides = |near: i64, far: i64| match toward {
            Toward::Buffer => [near, far],
            Toward::Memory => [far, near],
        };
        // Items that are closest in memory are also closest in the buffer.
        let [row_step, item_step] = match self.closest {
            Closest::Elements => [room as i64, 1],
            Closest::Rows => [1, tile.n_rows],
        }
        .map(|step| step * size as i64);
        let mut left = count as i64;
        while let Some(items) = cursor.next_block(left) {
            let mut loops = Loops::new();
            let outermost = Loop { count: tile.rows.count, strides: tile.rows.strides };
            let mut step = tile.n_rows * row_step;
            for row in [&outermost].into_iter().chain(tile.rows.inside) {
                step /= row.count;
                loops.push(row.count, strides(step, row.strides[side]));
            }
            let outermost = Loop { count: items.count, strides: items.strides };
            let rounds = items.inside.iter().fold(items.count, |count, item| count * item.count);
            let mut step = rounds * item_step;
            for item in [&outermost].into_iter().chain(items.inside) {
                step /= item.count;
                loops.push(item.count, strides(step, item.strides[0]));
            }
            loops.sort_by_step();
            let near = buffer.wrapping_offset(((count as i64 - left) * item_step) as isize);
            let far = memory.wrapping_offset((tile.rows.offsets[side] + items.offsets[0]) as isize);
            let (dst, src) = match toward {
                Toward::Buffer => (near, far),
                Toward::Memory => (far, near),
            };
            // SAFETY: the caller promises that the items are valid and that the buffer has room for them.
            unsafe { move_all(self.job.variant.set(), size, dst, src, &mut loops) };
            left -= rounds;
        }
    }
}

/// Cuts a range into pieces of at most `most`.
fn pieces(range: &Range<i64>, most: i64) -> impl Iterator<Item = Range<i64>> {
    let (mut first, end) = (range.start, range.end);
    std::iter::from_fn(move || {
        let piece = first..end.min(first.saturating_add(most));
        first = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Writes `count` elements of `size` bytes.
///
/// # Safety
/// `dst` has room for the elements.
unsafe fn fill(dst: *mut u8, size: usize, element: u64, count: usize) {
    // SAFETY: the caller promises room for `count` elements of this size; the writes need no alignment.
    unsafe {
        match size {
            1 => dst.write_bytes(element as u8, count),
            2 => (0..count).for_each(|index| dst.cast::<u16>().add(index).write_unaligned(element as u16)),
            4 => (0..count).for_each(|index| dst.cast::<u32>().add(index).write_unaligned(element as u32)),
            _ => (0..count).for_each(|index| dst.cast::<u64>().add(index).write_unaligned(element)),
        }
    }
}
