//! Packing and unpacking bits on the CPU.
//!
//! The work is bound by memory, so each byte is touched once, in the order it lies in:
//! - rows that are contiguous on both sides go straight through the kernels;
//! - rows that lie across memory whose columns are contiguous (packing along the first axis, say) are worked on many at
//!   a time, side by side;
//! - one row of memory whose contiguous dimension is not the last goes in tiles (`tiles`);
//! - rows or columns of a few elements, many of them at once, pass through the stack as a string of bits (`narrow`);
//! - everything else passes through the stack, where elements lie side by side (`gathered`); but not long runs that do
//!   so already (`runs`).

mod across;
mod bodies;
mod flat;
mod gathered;
mod kernels;
mod narrow;
mod runs;
#[cfg(test)]
mod tests;
mod tiles;

use std::ops::Range;

use crate::{
    plan::{
        bits::{BitPlan, BitRule, Layout, Patterns, bytes_for},
        loops::{Cursor, Loop, Loops, Run},
    },
    tensor::View,
};

use super::{
    dispatch::{InstructionSet, Variant},
    pool::{self, cut},
    simd::LineAligned,
};

use across::Lines;
use flat::Rows;
use narrow::Narrow;
use tiles::Tiles;

/// Bytes that pass through the stack at once where they do not lie side by side.
const BLOCK: usize = 512;

/// Fewer columns than this are not worth working across: the overhead of a call is that of some dozens of elements.
const MIN_COLUMNS: i64 = 16;

/// Bytes of elements that are worth waking another thread for: some 40 us of work.
pub const BYTES_A_THREAD: i64 = 4 << 20;

/// Bytes of elements in a part: some 10 us of work, beside which the taking of a part is nothing. A thread that the
/// system holds up keeps the others waiting for no more than this.
pub const BYTES_A_PART: i64 = 1 << 20;

/// Columns in a part, where there are as many: fewer leave most of each page that a row lies on to other parts.
const COLUMNS_A_PART: i64 = 4096;

/// Groups from whose output on the kernels stream past the caches (see `words`), where they can at all.
const STREAM_PACKED: i64 = 2 << 20;
const fn stream_unpacked(size: usize) -> i64 {
    (8 << 20) / size as i64
}

/// Writes the bits of the elements of `src` to the bytes of `dst`. `plan` was made from these two views.
pub fn pack(plan: &BitPlan, rule: BitRule, src: &View<'_>, dst: &View<'_>) {
    pack_with(InstructionSet::chosen(), plan, rule, src, dst);
}

/// Writes the bits in the bytes of `src` to the elements of `dst`. `plan` was made from these two views.
pub fn unpack(plan: &BitPlan, patterns: Patterns, src: &View<'_>, dst: &View<'_>) {
    unpack_with(InstructionSet::chosen(), plan, patterns, src, dst);
}

/// Writes the bits of a flat plan, each `groups` groups of 8 by patterns of their own.
pub fn unpack_chunks(
    plan: &BitPlan, groups: i64, patterns: impl Fn(i64) -> Patterns + Sync, src: &View<'_>, dst: &View<'_>,
) {
    let layout = plan.layout();
    let job = Job::new(plan, &None, Variant::unpacking(InstructionSet::chosen(), plan.size), dst.data(), src.data());
    job.split(bytes_for(plan.elements.count()), stream_unpacked(plan.size), |part| {
        let mut first = part.groups.start;
        while first < part.groups.end {
            let chunk = first / groups;
            let some = first..((chunk + 1) * groups).min(part.groups.end);
            first = some.end;
            // SAFETY: see Job.
            unsafe {
                match layout {
                    Layout::Flat => job.unpack_rows(patterns(chunk), job.first_element(), job.bytes, &some, &Rows::ONE),
                    _ => job.unpack_row(patterns(chunk), job.first_element(), job.bytes, &some),
                }
            }
        }
    });
}

fn pack_with(set: InstructionSet, plan: &BitPlan, rule: BitRule, src: &View<'_>, dst: &View<'_>) {
    let layout = plan.layout();
    let across = columns_of(plan, layout);
    let job = Job::new(plan, &across, Variant::packing(set, rule), src.data(), dst.data());
    if layout == Layout::Flat {
        // SAFETY: see Job.
        return job.split(plan.bytes.count(), STREAM_PACKED, |part| unsafe {
            job.pack_rows(rule, job.first_element(), job.bytes, &part.groups, &Rows::ONE)
        });
    }
    if let Some(tiles) = Tiles::of(plan, layout) {
        // SAFETY: see Job. Tiles add their bits to zeros.
        unsafe { job.bytes.write_bytes(0, plan.bytes.count() as usize) };
        return job.split_columns(&tiles, |columns| job.pack_tiles(&tiles, rule, columns));
    }
    if let Some(narrow) = Narrow::packing(plan, layout) {
        // SAFETY: see Job; the groups are this part's alone.
        return job.split_narrow(&narrow, |groups| unsafe {
            narrow.pack(job.variant, rule, plan.order, groups, job.first_element(), job.bytes)
        });
    }
    job.split(plan.bytes.count(), STREAM_PACKED, |part| match job.columns {
        None if layout == Layout::Rows => job.for_each_run(&part.lines, |element, byte, rows| {
            // SAFETY: see Job.
            unsafe { job.pack_rows(rule, element, byte, &part.groups, rows) }
        }),
        None => job.for_each_row(&part.lines, |element, byte| {
            // SAFETY: see Job.
            unsafe { job.pack_row(rule, element, byte, &part.groups) }
        }),
        Some(columns) => job.for_each_row(&(0..job.rows.count()), |element, byte| {
            // SAFETY: see Job.
            unsafe { job.pack_columns(rule, columns, element, byte, part) };
        }),
    });
}

fn unpack_with(set: InstructionSet, plan: &BitPlan, patterns: Patterns, src: &View<'_>, dst: &View<'_>) {
    let layout = plan.layout();
    let across = columns_of(plan, layout);
    let job = Job::new(plan, &across, Variant::unpacking(set, plan.size), dst.data(), src.data());
    if layout == Layout::Flat {
        // SAFETY: see Job.
        return job.split(bytes_for(plan.elements.count()), stream_unpacked(plan.size), |part| unsafe {
            job.unpack_rows(patterns, job.first_element(), job.bytes, &part.groups, &Rows::ONE)
        });
    }
    if let Some(tiles) = Tiles::of(plan, layout) {
        return job.split_columns(&tiles, |columns| job.unpack_tiles(&tiles, patterns, columns));
    }
    if let Some(narrow) = Narrow::unpacking(plan, layout) {
        // SAFETY: see Job; the groups are this part's alone.
        return job.split_narrow(&narrow, |groups| unsafe {
            narrow.unpack(job.variant, patterns, plan.order, groups, job.bytes, job.first_element())
        });
    }
    job.split(bytes_for(plan.elements.count()), stream_unpacked(plan.size), |part| match job.columns {
        None if layout == Layout::Rows => job.for_each_run(&part.lines, |element, byte, rows| {
            // SAFETY: see Job.
            unsafe { job.unpack_rows(patterns, element, byte, &part.groups, rows) }
        }),
        None => job.for_each_row(&part.lines, |element, byte| {
            // SAFETY: see Job.
            unsafe { job.unpack_row(patterns, element, byte, &part.groups) }
        }),
        Some(columns) => job.for_each_row(&(0..job.rows.count()), |element, byte| {
            // SAFETY: see Job.
            unsafe { job.unpack_columns(patterns, columns, element, byte, part) };
        }),
    });
}

/// A plan with its memory.
///
/// What makes the accesses below sound: the plan was made of two views, whose memory their makers vouched for. Every
/// offset that its loops give lies within them, they do not intersect, and no two rounds of the side that is written lie
/// in the same place, so that parts of the work may run side by side.
struct Job<'a> {
    plan: &'a BitPlan,
    variant: Variant,
    elements: *mut u8,
    bytes: *mut u8,
    /// The loop over rows whose elements lie side by side, when rows are to be worked on across.
    columns: Option<&'a Loop<2>>,
    /// The rows, without the columns.
    rows: &'a Loops<2>,
}

// SAFETY: see above.
unsafe impl Sync for Job<'_> {}

/// A part of the work: `groups` of 8 elements and their byte, counted along a row, of `lines`: rows, or columns.
struct Part {
    groups: Range<i64>,
    lines: Range<i64>,
}

/// The columns of a plan, and its other loops over rows, if there are so many that it pays to work across them.
fn columns_of(plan: &BitPlan, layout: Layout) -> Option<(Loop<2>, Loops<2>)> {
    let across = match layout {
        Layout::Columns { across } => across,
        // Rows of one element are columns, too.
        Layout::Rows if plan.elements.count() == 1 => {
            plan.rows.as_slice().iter().rposition(|rows| rows.strides[0] == plan.size as i64)?
        }
        _ => return None,
    };
    (plan.rows.as_slice()[across].count >= MIN_COLUMNS).then(|| plan.rows.split_off(across))
}

impl<'a> Job<'a> {
    fn new(
        plan: &'a BitPlan, across: &'a Option<(Loop<2>, Loops<2>)>, variant: Variant, elements: *mut u8, bytes: *mut u8,
    ) -> Self {
        let (columns, rows) = match across {
            Some((columns, rows)) => (Some(columns), rows),
            None => (None, &plan.rows),
        };
        Self { plan, variant, elements, bytes, columns, rows }
    }

    /// Does the work on `groups` groups of every row in as many parts as it is worth. Parts with `streamed` groups of
    /// one row stream.
    fn split(&self, groups: i64, streamed: i64, work: impl Fn(&Part) + Sync) {
        let lines = self.columns.map_or(self.rows.count(), |columns| columns.count);
        // Along the longer direction, in pieces that are whole cache lines on either side. Columns, only where there
        // are few groups: those of some rows lie side by side.
        let along_lines = |parts: usize| {
            let pieces = 64 * parts as i64;
            if self.columns.is_some() { groups < pieces } else { lines >= groups && lines >= pieces }
        };
        let parts_for = |threads: usize| {
            let most = if !along_lines(threads) {
                // A thread's share that would stream is cut to parts that do.
                if groups / threads as i64 >= streamed { groups / streamed } else { groups / 64 }
            } else if self.columns.is_some() {
                lines / COLUMNS_A_PART
            } else {
                lines / 64
            };
            self.parts(groups, most, threads)
        };
        pool::run(self.worth(groups), parts_for, |index, parts| {
            work(&if along_lines(parts) {
                Part { groups: 0..groups, lines: cut(lines, index, parts) }
            } else {
                Part { groups: cut(groups, index, parts), lines: 0..lines }
            });
        });
    }

    /// Does the work on tiles in as many parts as it is worth, and as can be.
    fn split_columns(&self, tiles: &Tiles, work: impl Fn(&Range<i64>) + Sync) {
        let groups = bytes_for(self.plan.elements.count());
        let worth = if tiles.divisible { self.worth(groups) } else { 1 };
        let parts_for = |threads: usize| self.parts(groups, tiles.columns() / COLUMNS_A_PART, threads);
        pool::run(worth, parts_for, |index, parts| work(&cut(tiles.columns(), index, parts)));
    }

    /// Does the work on groups of narrow rows or columns in as many parts as it is worth.
    fn split_narrow(&self, narrow: &Narrow, work: impl Fn(&Range<i64>) + Sync) {
        let groups = bytes_for(self.plan.elements.count());
        let parts_for = |threads: usize| self.parts(groups, narrow.count / 64, threads);
        pool::run(self.worth(groups), parts_for, |index, parts| work(&cut(narrow.count, index, parts)));
    }

    fn pack_tiles(&self, tiles: &Tiles, rule: BitRule, columns: &Range<i64>) {
        // SAFETY: see Job; the columns are this part's alone.
        unsafe { tiles.pack(self.variant, rule, self.plan.order, columns, self.elements, self.bytes) }
    }

    fn unpack_tiles(&self, tiles: &Tiles, patterns: Patterns, columns: &Range<i64>) {
        let bytes = (self.bytes.cast_const(), self.plan.bytes.count() as usize);
        // SAFETY: see Job; the columns are this part's alone.
        unsafe { tiles.unpack(self.variant, patterns, self.plan.order, columns, bytes, self.elements) }
    }

    /// The bytes of elements in `groups` groups of every row.
    fn bytes_of(&self, groups: i64) -> i64 {
        self.plan.rows.count().saturating_mul(groups.saturating_mul(8 * self.plan.size as i64))
    }

    /// How many threads it is worth to work on `groups` groups of every row.
    fn worth(&self, groups: i64) -> usize {
        (self.bytes_of(groups) / BYTES_A_THREAD) as usize
    }

    /// How many parts `groups` groups of every row are cut to: small ones, but at most `most` unless there are more
    /// threads.
    fn parts(&self, groups: i64, most: i64, threads: usize) -> u32 {
        (self.bytes_of(groups) / BYTES_A_PART).min(most).clamp(threads as i64, i64::from(u32::MAX)) as u32
    }

    /// The first element of the first row.
    fn first_element(&self) -> *mut u8 {
        self.elements.wrapping_offset(self.plan.start as isize)
    }

    /// Calls `work` with the first element and the first byte of runs of these rows.
    fn for_each_run(&self, lines: &Range<i64>, mut work: impl FnMut(*mut u8, *mut u8, &Rows)) {
        if self.rows.count() == 1 && lines.start == 0 && lines.end == 1 {
            return work(self.first_element(), self.bytes, &Rows::ONE);
        }
        let mut cursor = Cursor::starting_at(self.rows, lines.start);
        let mut left = lines.end - lines.start;
        while let Some(Run { offsets: [element, byte], count, strides }) = cursor.next_run(left) {
            left -= count;
            work(
                self.first_element().wrapping_offset(element as isize),
                self.bytes.wrapping_offset(byte as isize),
                &Rows { count: count as usize, steps: strides.map(|stride| stride as isize) },
            );
        }
    }

    /// Calls `work` with the first element and the first byte of each of these rows.
    fn for_each_row(&self, lines: &Range<i64>, mut work: impl FnMut(*mut u8, *mut u8)) {
        self.for_each_run(lines, |first_element, first_byte, rows| {
            for [element, byte] in rows.offsets() {
                work(first_element.wrapping_offset(element), first_byte.wrapping_offset(byte));
            }
        });
    }

    /// The elements of some groups of a row, and its bytes.
    fn ranges(&self, groups: &Range<i64>) -> (Range<i64>, Range<i64>) {
        let (elements, bytes) = (self.plan.elements.count(), self.plan.bytes.count());
        let element = |group: i64| group.saturating_mul(8).min(elements);
        (element(groups.start)..element(groups.end), groups.start.min(bytes)..groups.end.min(bytes))
    }

    /// Packs rows that are contiguous on both sides.
    ///
    /// # Safety
    /// `element` and `byte` are the first of the first row.
    unsafe fn pack_rows(&self, rule: BitRule, element: *const u8, byte: *mut u8, groups: &Range<i64>, rows: &Rows) {
        let (elements, bytes) = self.ranges(groups);
        let (bits, room) = (length(&elements), length(&bytes));
        let used = bits.div_ceil(8);
        // SAFETY: see Job.
        unsafe {
            let dst = byte.add(bytes.start as usize);
            let src = element.add(elements.start as usize * self.plan.size);
            kernels::pack_rows(self.variant, rule, self.plan.order, src, bits, dst, rows);
            if used < room {
                rows.offsets().for_each(|[_, byte]| dst.offset(byte).add(used).write_bytes(0, room - used));
            }
        }
    }

    /// Unpacks rows that are contiguous on both sides.
    ///
    /// # Safety
    /// `element` and `byte` are the first of the first row.
    unsafe fn unpack_rows(
        &self, patterns: Patterns, element: *mut u8, byte: *const u8, groups: &Range<i64>, rows: &Rows,
    ) {
        let (elements, bytes) = self.ranges(groups);
        let (wanted, available) = (length(&elements), length(&bytes));
        let bits = wanted.min(available.saturating_mul(8));
        // SAFETY: see Job.
        unsafe {
            let (src, dst) = (byte.add(bytes.start as usize), element.add(elements.start as usize * self.plan.size));
            kernels::unpack_rows(self.variant, patterns, self.plan.order, src, bits, dst, rows);
            if bits < wanted {
                // Signs come with as many bytes as they need.
                debug_assert_eq!(patterns.zero, 0);
                let (end, zeros) = (dst.add(bits * self.plan.size), (wanted - bits) * self.plan.size);
                rows.offsets().for_each(|[element, _]| end.offset(element).write_bytes(0, zeros));
            }
        }
    }

    /// # Safety
    /// `element` and `byte` are the first of a row.
    unsafe fn pack_row(&self, rule: BitRule, element: *const u8, byte: *mut u8, groups: &Range<i64>) {
        let (elements, bytes) = self.ranges(groups);
        let (mut bits, mut left) = (length(&elements), length(&bytes));
        let mut from = Cursor::starting_at(&self.plan.elements, elements.start);
        if self.plan.bytes.single_stride([1]) == Some([1]) {
            // SAFETY: see Job.
            unsafe {
                let dst = byte.add(bytes.start as usize);
                gathered::pack(self.variant, rule, self.plan.order, &mut from, element, bits, dst);
                let used = bits.div_ceil(8);
                dst.add(used).write_bytes(0, left - used);
            }
            return;
        }
        let LineAligned(packed) = &mut LineAligned([0u8; BLOCK]);
        let mut to = Cursor::starting_at(&self.plan.bytes, bytes.start);
        while left > 0 {
            let (count, filled) = (bits.min(8 * BLOCK), left.min(BLOCK));
            packed[..filled].fill(0);
            // SAFETY: see Job; the block has room for `count` bits.
            unsafe {
                gathered::pack(self.variant, rule, self.plan.order, &mut from, element, count, packed.as_mut_ptr());
                scatter_bytes(&mut to, byte, &packed[..filled]);
            }
            bits -= count;
            left -= filled;
        }
    }

    /// # Safety
    /// `element` and `byte` are the first of a row.
    unsafe fn unpack_row(&self, patterns: Patterns, element: *mut u8, byte: *const u8, groups: &Range<i64>) {
        let (elements, bytes) = self.ranges(groups);
        let (mut left, mut available) = (length(&elements), length(&bytes));
        let mut to = Cursor::starting_at(&self.plan.elements, elements.start);
        if self.plan.bytes.single_stride([1]) == Some([1]) {
            // SAFETY: see Job.
            unsafe {
                let src = byte.add(bytes.start as usize);
                gathered::unpack(self.variant, patterns, self.plan.order, (src, available), &mut to, element, left);
            }
            return;
        }
        let LineAligned(packed) = &mut LineAligned([0u8; BLOCK]);
        let mut from = Cursor::starting_at(&self.plan.bytes, bytes.start);
        while left > 0 {
            let count = left.min(8 * BLOCK);
            let filled = available.min(count.div_ceil(8));
            // SAFETY: see Job; the block holds `filled` bytes.
            unsafe {
                gather_bytes(&mut from, byte, &mut packed[..filled]);
                gathered::unpack(
                    self.variant,
                    patterns,
                    self.plan.order,
                    (packed.as_ptr(), filled),
                    &mut to,
                    element,
                    count,
                );
            }
            available -= filled;
            left -= count;
        }
    }

    /// Packs some columns, all rows of a run at once.
    ///
    /// # Safety
    /// `element` and `byte` are the first of column 0.
    unsafe fn pack_columns(&self, rule: BitRule, columns: &Loop<2>, element: *const u8, byte: *mut u8, part: &Part) {
        let [[element_step], [byte_step]] = self.steps();
        let [_, column_step] = columns.strides;
        let LineAligned(packed) = &mut LineAligned([0u8; BLOCK]);
        for group in part.groups.clone() {
            let (elements, _) = self.ranges(&(group..group + 1));
            for_each_block(&part.lines, if column_step == 1 { i64::MAX } else { BLOCK as i64 }, |first, count| {
                // SAFETY: see Job; the block has room for `count` bytes.
                unsafe {
                    // Past the last element no line is read, and the pointer only has to exist.
                    let src = element.wrapping_offset((elements.start * element_step) as isize);
                    let src = src.wrapping_add(first as usize * self.plan.size);
                    let dst = byte.offset((group * byte_step + first * column_step) as isize);
                    let direct = if column_step == 1 { dst } else { packed.as_mut_ptr() };
                    let lines = Lines { count: length(&elements), columns: count, stride: element_step as isize };
                    kernels::pack_across(self.variant, rule, self.plan.order, src, lines, direct);
                    if column_step != 1 {
                        for (column, &byte) in packed[..count].iter().enumerate() {
                            dst.offset(column as isize * column_step as isize).write(byte);
                        }
                    }
                }
            });
        }
    }

    /// Unpacks some columns, all rows of a run at once.
    ///
    /// # Safety
    /// `element` and `byte` are the first of column 0.
    unsafe fn unpack_columns(
        &self, patterns: Patterns, columns: &Loop<2>, element: *mut u8, byte: *const u8, part: &Part,
    ) {
        let [[element_step], [byte_step]] = self.steps();
        let [_, column_step] = columns.strides;
        let LineAligned(packed) = &mut LineAligned([0u8; BLOCK]);
        for group in part.groups.clone() {
            let (elements, bytes) = self.ranges(&(group..group + 1));
            let direct = column_step == 1 && !bytes.is_empty();
            for_each_block(&part.lines, if direct { i64::MAX } else { BLOCK as i64 }, |first, count| {
                // SAFETY: see Job; the block has room for `count` bytes. Past the last byte there are zeros.
                unsafe {
                    let dst =
                        element.offset((elements.start * element_step) as isize).add(first as usize * self.plan.size);
                    let src = byte.wrapping_offset((group * byte_step + first * column_step) as isize);
                    if bytes.is_empty() {
                        packed[..count].fill(0);
                    } else if !direct {
                        for (column, slot) in packed[..count].iter_mut().enumerate() {
                            *slot = src.offset(column as isize * column_step as isize).read();
                        }
                    }
                    let lines = Lines { count: length(&elements), columns: count, stride: element_step as isize };
                    let packed = if direct { src } else { packed.as_ptr() };
                    kernels::unpack_across(self.variant, patterns, self.plan.order, packed, dst, lines);
                }
            });
        }
    }

    /// The strides along a row, on either side.
    fn steps(&self) -> [[i64; 1]; 2] {
        [self.plan.elements.single_stride([0]).unwrap_or([0]), self.plan.bytes.single_stride([0]).unwrap_or([0])]
    }
}

/// # Safety
/// `base` is the first byte of the cursor's row.
unsafe fn gather_bytes(cursor: &mut Cursor<'_, 1>, base: *const u8, mut block: &mut [u8]) {
    while let Some(Run { offsets: [offset], count, strides: [stride] }) = cursor.next_run(block.len() as i64) {
        let (some, rest) = block.split_at_mut(count as usize);
        let first = base.wrapping_offset(offset as isize);
        if stride == 1 {
            // SAFETY: the run is `count` bytes side by side: see Job.
            unsafe { some.as_mut_ptr().copy_from_nonoverlapping(first, some.len()) };
        } else {
            for (index, slot) in some.iter_mut().enumerate() {
                // SAFETY: this byte is one of the run: see Job.
                *slot = unsafe { first.offset(index as isize * stride as isize).read() };
            }
        }
        block = rest;
    }
}

/// # Safety
/// `base` is the first byte of the cursor's row.
unsafe fn scatter_bytes(cursor: &mut Cursor<'_, 1>, base: *mut u8, mut block: &[u8]) {
    while let Some(Run { offsets: [offset], count, strides: [stride] }) = cursor.next_run(block.len() as i64) {
        let (some, rest) = block.split_at(count as usize);
        let first = base.wrapping_offset(offset as isize);
        if stride == 1 {
            // SAFETY: the run is `count` bytes side by side: see Job.
            unsafe { first.copy_from_nonoverlapping(some.as_ptr(), some.len()) };
        } else {
            for (index, &byte) in some.iter().enumerate() {
                // SAFETY: this byte is one of the run: see Job.
                unsafe { first.offset(index as isize * stride as isize).write(byte) };
            }
        }
        block = rest;
    }
}

fn length(range: &Range<i64>) -> usize {
    (range.end - range.start) as usize
}

/// Calls `work` with the first and the number of lines of each block of at most `limit`.
fn for_each_block(lines: &Range<i64>, limit: i64, mut work: impl FnMut(i64, usize)) {
    let mut first = lines.start;
    while first < lines.end {
        let count = limit.min(lines.end - first);
        work(first, count as usize);
        first += count;
    }
}
