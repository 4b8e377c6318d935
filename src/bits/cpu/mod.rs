//! Packing and unpacking bits on the CPU.
//!
//! There are two paths. Rows that are contiguous on both sides go straight through the kernels (`flat`). All other
//! layouts are processed in tiles, which a buffer makes dense (`tiled`, `across`).

mod across;
mod flat;
mod kernels;
mod tiled;

use std::ops::Range;

use crate::{
    cpu::{
        InstructionSet,
        dispatch::Variant,
        pool::{self, cut},
    },
    dlpack::{
        View,
        loops::{Cursor, Run},
        rules::{BitRule, Patterns},
    },
};

use super::plan::{BitPlan, bytes_for};

use flat::Rows;
use tiled::Tiles;

/// Bytes of elements that justify another thread: about 40 us of work.
pub const BYTES_A_THREAD: i64 = 4 << 20;

/// Bytes of elements in a part: about 10 us of work, against which the cost of taking a part is negligible. A thread
/// that the system delays delays the others by at most one part.
pub const BYTES_A_PART: i64 = 1 << 20;

/// Minimum number of elements of a row; several shorter rows are processed in tiles, since a call per row is slower.
const SHORT_ROW: i64 = 64;

/// Number of groups from which the kernels stream their output past the caches (see `flat`), if they can.
const STREAM_PACKED: i64 = 2 << 20;
const fn stream_unpacked(size: usize) -> i64 {
    (8 << 20) / size as i64
}

/// Writes the bits of the elements of `src` to the bytes of `dst`. `plan` was made from these two views.
pub fn pack(plan: &BitPlan, rule: BitRule, src: &View<'_>, dst: &View<'_>) {
    let job = Job::new(plan, Variant::new(InstructionSet::chosen(), plan.size), src.data(), dst.data());
    job.pack(rule);
}

/// Writes the bits in the bytes of `src` to the elements of `dst`. `plan` was made from these two views.
pub fn unpack(plan: &BitPlan, patterns: Patterns, src: &View<'_>, dst: &View<'_>) {
    let job = Job::new(plan, Variant::new(InstructionSet::chosen(), plan.size), dst.data(), src.data());
    job.unpack(|_| (patterns, i64::MAX));
}

/// Unpacks a plan of one row, of which each `groups` groups of 8 elements have their own patterns.
pub fn unpack_chunks(
    plan: &BitPlan, groups: i64, patterns: impl Fn(i64) -> Patterns + Sync, src: &View<'_>, dst: &View<'_>,
) {
    let job = Job::new(plan, Variant::new(InstructionSet::chosen(), plan.size), dst.data(), src.data());
    job.unpack(|group| (patterns(group / groups), (group / groups + 1) * groups));
}

/// Plan and its memory.
///
/// The accesses below are sound for these reasons. The plan was made from two views, whose makers promised valid
/// memory. Every offset of its loops is within the views, and the views do not overlap. No two rounds write the same
/// place, so parts of the work may run concurrently.
struct Job<'a> {
    plan: &'a BitPlan,
    variant: Variant,
    elements: *mut u8,
    bytes: *mut u8,
}

// SAFETY: see the comment above.
unsafe impl Sync for Job<'_> {}

/// Part of the work: some groups, each of 8 elements and their byte, of some rows.
struct Part {
    groups: Range<i64>,
    rows: Range<i64>,
}

impl<'a> Job<'a> {
    fn new(plan: &'a BitPlan, variant: Variant, elements: *mut u8, bytes: *mut u8) -> Self {
        Self { plan, variant, elements: elements.wrapping_offset(plan.start as isize), bytes }
    }

    /// Returns true if rows are passed directly to the kernels.
    fn is_flat(&self) -> bool {
        let is_long = self.plan.rows.count() == 1 || self.plan.elements.count() >= SHORT_ROW;
        is_long && self.plan.has_contiguous_rows()
    }

    fn pack(&self, rule: BitRule) {
        let groups = self.plan.bytes.count();
        if self.is_flat() {
            // SAFETY: see Job; `split` passes each part to one call.
            return self.split(groups, STREAM_PACKED, |part| unsafe { self.pack_rows(rule, part) });
        }
        let tiles = Tiles::new(self, groups);
        // SAFETY: see Job; `split` passes each part to one call.
        self.split(groups, i64::MAX, |part| unsafe { tiles.pack(rule, part) });
    }

    /// Unpacks. `patterns` returns the patterns of a group, and the first group after it that may have other patterns.
    fn unpack(&self, patterns: impl Fn(i64) -> (Patterns, i64) + Sync) {
        let groups = bytes_for(self.plan.elements.count());
        let tiles = (!self.is_flat()).then(|| Tiles::new(self, groups));
        let streamed = if tiles.is_some() { i64::MAX } else { stream_unpacked(self.plan.size) };
        self.split(groups, streamed, |part| {
            let mut first = part.groups.start;
            while first < part.groups.end {
                let (patterns, next) = patterns(first);
                let some = Part { groups: first..next.min(part.groups.end), rows: part.rows.clone() };
                first = some.groups.end;
                // SAFETY: see Job; `split` passes each part to one call.
                unsafe {
                    match &tiles {
                        Some(tiles) => tiles.unpack(patterns, &some),
                        None => self.unpack_rows(patterns, &some),
                    }
                }
            }
        });
    }

    /// Runs `work` on `groups` groups of every row, in as many parts as the work justifies. Parts with at least
    /// `streamed` groups of one row stream.
    fn split(&self, groups: i64, streamed: i64, work: impl Fn(&Part) + Sync) {
        let rows = self.plan.rows.count();
        let bytes = rows.saturating_mul(groups.saturating_mul(8 * self.plan.size as i64));
        // The work is cut along the longer direction, into pieces of whole cache lines on both sides.
        let by_rows = |parts: usize| rows >= groups && rows >= 64 * parts as i64;
        let parts_for = |threads: usize| {
            let most = if by_rows(threads) {
                rows / 64
            } else if groups / threads as i64 >= streamed {
                groups / streamed // A thread's share that would stream is cut into parts that stream.
            } else {
                groups / 64
            };
            (bytes / BYTES_A_PART).min(most).clamp(threads as i64, i64::from(u32::MAX)) as u32
        };
        pool::run((bytes / BYTES_A_THREAD) as usize, parts_for, |index, parts| {
            work(&if by_rows(parts) {
                Part { groups: 0..groups, rows: cut(rows, index, parts) }
            } else {
                Part { groups: cut(groups, index, parts), rows: 0..rows }
            });
        });
    }

    /// Returns the elements and the bytes of some groups of a row.
    fn ranges(&self, groups: &Range<i64>) -> (Range<i64>, Range<i64>) {
        let (elements, bytes) = (self.plan.elements.count(), self.plan.bytes.count());
        let element = |group: i64| group.saturating_mul(8).min(elements);
        (element(groups.start)..element(groups.end), groups.start.min(bytes)..groups.end.min(bytes))
    }

    /// Calls `work` with the first element and the first byte of runs of these rows.
    fn for_each_run(&self, rows: &Range<i64>, mut work: impl FnMut(*mut u8, *mut u8, &Rows)) {
        if self.plan.rows.count() == 1 && rows.start == 0 && rows.end == 1 {
            return work(self.elements, self.bytes, &Rows::ONE);
        }
        let mut cursor = Cursor::starting_at(&self.plan.rows, rows.start);
        let mut left = rows.end - rows.start;
        while let Some(Run { offsets: [element, byte], count, strides }) = cursor.next_run(left) {
            left -= count;
            work(
                self.elements.wrapping_offset(element as isize),
                self.bytes.wrapping_offset(byte as isize),
                &Rows { count: count as usize, steps: strides.map(|stride| stride as isize) },
            );
        }
    }

    /// Packs rows that are contiguous on both sides.
    ///
    /// # Safety
    /// See Job; no other call works on the part.
    unsafe fn pack_rows(&self, rule: BitRule, part: &Part) {
        let (elements, bytes) = self.ranges(&part.groups);
        let (bits, room) = (length(&elements), length(&bytes));
        let used = bits.div_ceil(8);
        self.for_each_run(&part.rows, |element, byte, rows| {
            // SAFETY: see Job.
            unsafe {
                let dst = byte.add(bytes.start as usize);
                let src = element.add(elements.start as usize * self.plan.size);
                kernels::pack_rows(self.variant, rule, self.plan.order, src, bits, dst, rows);
                if used < room {
                    rows.offsets().for_each(|[_, byte]| dst.offset(byte).add(used).write_bytes(0, room - used));
                }
            }
        });
    }

    /// Unpacks rows that are contiguous on both sides.
    ///
    /// # Safety
    /// See Job; no other call works on the part.
    unsafe fn unpack_rows(&self, patterns: Patterns, part: &Part) {
        let (elements, bytes) = self.ranges(&part.groups);
        let (wanted, available) = (length(&elements), length(&bytes));
        let bits = wanted.min(available.saturating_mul(8));
        self.for_each_run(&part.rows, |element, byte, rows| {
            // SAFETY: see Job.
            unsafe {
                let (src, dst) =
                    (byte.add(bytes.start as usize), element.add(elements.start as usize * self.plan.size));
                kernels::unpack_rows(self.variant, patterns, self.plan.order, src, bits, dst, rows);
                if bits < wanted {
                    // Signs have as many bytes as they need.
                    debug_assert_eq!(patterns.zero, 0);
                    let (end, zeros) = (dst.add(bits * self.plan.size), (wanted - bits) * self.plan.size);
                    rows.offsets().for_each(|[element, _]| end.offset(element).write_bytes(0, zeros));
                }
            }
        });
    }
}

fn length(range: &Range<i64>) -> usize {
    (range.end - range.start) as usize
}
