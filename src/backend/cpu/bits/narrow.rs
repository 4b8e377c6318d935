//! Narrow rows and columns: a few elements side by side, too few for a vector or for a call. Elements and bytes pass
//! through the stack, in blocks. The kernels of runs turn elements into a string of bits, a bit an element in the order of
//! memory, many rows at once; then the string is cut into groups, each of which becomes some bytes.
//!
//! ```text
//!     columns, here 3; a group is 8 lines of them               rows, here of 5; a group is a row
//!         line 0        a0 b0 c0                                    row 0    a0 a1 a2 a3 a4
//!         line 1        a1 b1 c1                                    row 1    b0 b1 b2 b3 b4
//!         ..
//!         line 7        a7 b7 c7
//!     string            a0 b0 c0 a1 b1 c1 .. c7                 string       a0 a1 a2 a3 a4 b0 b1 ..
//!     a byte a line     a0 b0 c0 -- | a1 b1 c1 -- | ..
//!     transposed        a0 a1 .. a7 | b0 .. b7 | c0 .. c7       filled up    a0 a1 a2 a3 a4 -- | b0 ..
//! ```
//!
//! Unpacking takes the same steps the other way round.

use std::ops::Range;

use crate::{
    backend::cpu::dispatch::Variant,
    plan::{
        bits::{BitOrder, BitPlan, BitRule, Layout, Patterns, bytes_for},
        loops::{Cursor, Loops},
    },
};

use super::{
    bodies::{Groups, PACKED, SLACK, STRING},
    gather_bytes, gathered, kernels, scatter_bytes,
};

/// With more columns than this, lines are long enough to be worked on across. Packing 63 columns as a string takes half of
/// the time that it takes across; unpacking 32 with vectors takes 1.3 times as long, 24 without them half as long.
const MOST_COLUMNS_PACKED: i64 = 63;
const MOST_COLUMNS_UNPACKED: i64 = 24;

/// A row of more elements than this is long enough for a call of its own. Rows of 33 bytes take up to 1.5 times NumPy's time
/// in calls (without vectors), less than it as a string; rows of 48 elements of 4 bytes took 1.5 times as long as a string
/// (AVX-512). 57 bits are what a word has from any bit on.
const MOST_BYTES: i64 = 57;
const MOST_WIDER_ELEMENTS: i64 = 31;

/// With fewer elements side by side than this, all the lines of a group together, a string of bits is made no faster than
/// the bits of each row.
const FEWEST_TOGETHER: i64 = 16;

/// The groups of a plan, in the order of their elements in memory.
pub struct Narrow {
    elements: Loops<1>,
    bytes: Loops<1>,
    groups: Groups,
    /// How many there are.
    pub count: i64,
}

impl Narrow {
    /// The groups of a plan, if its rows or columns are narrow and lie so close together that it pays.
    fn of(plan: &BitPlan, layout: Layout, most_columns: i64) -> Option<Self> {
        let lines = plan.elements.count();
        let [[element_step], [byte_step]] = [plan.elements.single_stride([0])?, plan.bytes.single_stride([0])?];
        if lines < 2 || plan.bytes.count() != bytes_for(lines) {
            return None;
        }
        let most_elements = if plan.size == 1 { MOST_BYTES } else { MOST_WIDER_ELEMENTS };
        let (mut elements, mut bytes) = (Loops::new(), Loops::new());
        let groups = match layout {
            Layout::Columns { across } if plan.rows.as_slice()[across].count <= most_columns => {
                let (columns, others) = plan.rows.split_off(across);
                for item in others.as_slice() {
                    elements.push(item.count, [item.strides[0]]);
                    bytes.push(item.count, [item.strides[1]]);
                }
                elements.push(lines, [element_step]);
                elements.push(columns.count, [columns.strides[0]]);
                bytes.push(plan.bytes.count(), [byte_step]);
                bytes.push(columns.count, [columns.strides[1]]);
                let width = columns.count as usize;
                let per_row = plan.bytes.count() as usize;
                let last_lines = lines as usize - 8 * (per_row - 1);
                Groups { width, per_row, bits: 8 * width, last_bits: last_lines * width, bytes: width }
            }
            Layout::Rows | Layout::OneStride if lines <= most_elements && plan.rows.count() > 1 => {
                for item in plan.rows.as_slice() {
                    elements.push(item.count, [item.strides[0]]);
                    bytes.push(item.count, [item.strides[1]]);
                }
                elements.push(lines, [element_step]);
                bytes.push(plan.bytes.count(), [byte_step]);
                let width = lines as usize;
                Groups { width, per_row: 1, bits: width, last_bits: width, bytes: width.div_ceil(8) }
            }
            _ => return None,
        };
        let together = elements.as_slice().last()?.count;
        let count = bytes.count() / groups.bytes as i64;
        (together >= FEWEST_TOGETHER).then_some(Self { elements, bytes, groups, count })
    }

    pub fn packing(plan: &BitPlan, layout: Layout) -> Option<Self> {
        Self::of(plan, layout, MOST_COLUMNS_PACKED)
    }

    pub fn unpacking(plan: &BitPlan, layout: Layout) -> Option<Self> {
        Self::of(plan, layout, MOST_COLUMNS_UNPACKED)
    }

    /// Calls `work` with blocks of some groups: the first, and how many groups, bits and bytes they are.
    fn for_each_block(&self, groups: &Range<i64>, mut work: impl FnMut(usize, usize, usize, usize)) {
        let most = (8 * STRING / self.groups.bits).min(PACKED / self.groups.bytes) as i64;
        let mut first = groups.start;
        while first < groups.end {
            let count = most.min(groups.end - first);
            let bits = self.groups.bits_before(first + count) - self.groups.bits_before(first);
            work(first as usize, count as usize, bits as usize, count as usize * self.groups.bytes);
            first += count;
        }
    }

    /// Packs some groups.
    ///
    /// # Safety
    /// `elements` and `bytes` are the first of the plan that this was made of, of elements that `variant` is for; nobody
    /// else works on the same groups.
    pub unsafe fn pack(
        &self, variant: Variant, rule: BitRule, order: BitOrder, groups: &Range<i64>, elements: *const u8,
        bytes: *mut u8,
    ) {
        let (mut string, mut packed) = ([0; STRING + SLACK], [0; PACKED + SLACK]);
        let mut from = Cursor::starting_at(&self.elements, self.groups.bits_before(groups.start));
        let mut to = Cursor::starting_at(&self.bytes, groups.start * self.groups.bytes as i64);
        self.for_each_block(groups, |first, count, bits, n_bytes| {
            // SAFETY: the loops of the plan, of which these are made, stay within both sides; a block has room for the
            // bits and bytes of its groups.
            unsafe {
                gathered::pack(variant, rule, BitOrder::Little, &mut from, elements, bits, string.as_mut_ptr());
                if self.groups.are_rows() {
                    kernels::string_to_rows(variant, order, &string, self.groups, count, &mut packed);
                } else {
                    kernels::string_to_columns(variant, order, &string, self.groups, (first, count), &mut packed);
                }
                scatter_bytes(&mut to, bytes, &packed[..n_bytes]);
            }
        });
    }

    /// Unpacks some groups.
    ///
    /// # Safety
    /// As for `pack`.
    pub unsafe fn unpack(
        &self, variant: Variant, patterns: Patterns, order: BitOrder, groups: &Range<i64>, bytes: *const u8,
        elements: *mut u8,
    ) {
        let (mut string, mut packed) = ([0; STRING + SLACK], [0; PACKED + SLACK]);
        let mut from = Cursor::starting_at(&self.bytes, groups.start * self.groups.bytes as i64);
        let mut to = Cursor::starting_at(&self.elements, self.groups.bits_before(groups.start));
        self.for_each_block(groups, |first, count, bits, n_bytes| {
            // SAFETY: the loops of the plan, of which these are made, stay within both sides; a block has room for the
            // bits and bytes of its groups.
            unsafe {
                gather_bytes(&mut from, bytes, &mut packed[..n_bytes]);
                if self.groups.are_rows() {
                    kernels::rows_to_string(variant, order, &mut packed, self.groups, count, &mut string);
                } else {
                    kernels::columns_to_string(variant, order, &packed, self.groups, (first, count), &mut string);
                }
                let string = (string.as_ptr(), bits.div_ceil(8));
                gathered::unpack(variant, patterns, BitOrder::Little, string, &mut to, elements, bits);
            }
        });
    }
}
