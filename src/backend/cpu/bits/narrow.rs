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

use std::{mem::MaybeUninit, ops::Range};

use crate::{
    backend::cpu::{
        bit_stream::{self, BitWriter},
        dispatch::Variant,
        simd::{Element, LineAligned, Simd},
    },
    plan::{
        bits::{BitOrder, BitPlan, BitRule, Layout, Patterns, bytes_for},
        loops::{Cursor, Loops},
    },
};

use super::{gather_bytes, kernels, scatter_bytes, short};

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

/// Bytes of a string, and of what it is cut into: large enough for the calls between not to matter.
pub const STRING: usize = 1024;
pub const PACKED: usize = 2048;

/// Bytes that words may be read and written past the end of either.
pub const SLACK: usize = 8;

/// The groups of a plan, in the order of their elements in memory.
pub struct Narrow {
    elements: Loops<1>,
    bytes: Loops<1>,
    groups: Groups,
    /// How many there are.
    pub count: i64,
}

/// What groups are like.
#[derive(Clone, Copy)]
pub struct Groups {
    /// Columns, or the elements of a row.
    width: usize,
    /// Groups, of which the last may have fewer lines: those that follow each other along the lines. 1 for rows.
    per_row: usize,
    /// Bits of a group, and of the last of a row.
    bits: usize,
    last_bits: usize,
    /// Bytes of a group.
    bytes: usize,
}

impl Groups {
    fn are_rows(&self) -> bool {
        self.bits == self.width
    }

    /// The number of bits of the first `count` groups.
    fn bits_before(&self, count: i64) -> i64 {
        let (rows, groups) = (count / self.per_row as i64, count % self.per_row as i64);
        let row = (self.per_row - 1) * self.bits + self.last_bits;
        rows * row as i64 + groups * self.bits as i64
    }

    /// The bits of `count` groups from number `first`, one after the other.
    #[inline(always)]
    fn bits_of_each(self, first: usize, count: usize) -> impl Iterator<Item = usize> {
        let mut at = first % self.per_row;
        (0..count).map(move |_| {
            at += 1;
            if at < self.per_row {
                return self.bits;
            }
            at = 0;
            self.last_bits
        })
    }
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
        &self,
        variant: Variant,
        rule: BitRule,
        order: BitOrder,
        groups: &Range<i64>,
        elements: *const u8,
        bytes: *mut u8,
    ) {
        let (mut string, mut packed) = ([0; STRING + SLACK], [0; PACKED + SLACK]);
        let mut from = Cursor::starting_at(&self.elements, self.groups.bits_before(groups.start));
        let mut to = Cursor::starting_at(&self.bytes, groups.start * self.groups.bytes as i64);
        self.for_each_block(groups, |first, count, bits, n_bytes| {
            // SAFETY: the loops of the plan, of which these are made, stay within both sides; a block has room for the
            // bits and bytes of its groups.
            unsafe {
                short::pack_runs(variant, rule, BitOrder::Little, &mut from, elements, bits, string.as_mut_ptr());
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
        &self,
        variant: Variant,
        patterns: Patterns,
        order: BitOrder,
        groups: &Range<i64>,
        bytes: *const u8,
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
                short::unpack_runs(variant, patterns, BitOrder::Little, string, &mut to, elements, bits);
            }
        });
    }
}

/// Transposes 8 bytes: bit j of byte i becomes bit i of byte j.
#[inline(always)]
fn transposed(mut bytes: u64) -> u64 {
    for (apart, mask) in [(7, 0x00aa_00aa_00aa_00aa), (14, 0x0000_cccc_0000_cccc), (28, 0x0000_0000_f0f0_f0f0)] {
        let changed = (bytes >> apart ^ bytes) & mask;
        bytes ^= changed ^ changed << apart;
    }
    bytes
}

/// A way between lines of `width` bits one after the other and the same lines in a field each, of 8 or 16 bits: half of the
/// lines move, then half of each half, and so on.
#[derive(Clone, Copy)]
struct Spread<const STEPS: usize> {
    /// How far lines move, which of them stay, and which move.
    steps: [(u32, u64, u64); STEPS],
}

impl<const STEPS: usize> Spread<STEPS> {
    /// `width` is at most a field, of which there are 2 to the power of STEPS in a word.
    #[inline(always)]
    fn new(width: usize) -> Self {
        let field = 64 >> STEPS;
        let steps = std::array::from_fn(|step| {
            // Each half of every such stretch gets so many lines; the upper ones come from below.
            let lines = 1 << (STEPS - 1 - step);
            let half = field * lines;
            let stays = (0..64).step_by(2 * half).fold(0, |stays, at| stays | (u64::MAX >> (64 - lines * width)) << at);
            ((half - lines * width) as u32, stays, stays << half)
        });
        Self { steps }
    }

    /// From one after the other to a field each.
    #[inline(always)]
    fn spread(self, mut lines: u64) -> u64 {
        for (by, stays, moves) in self.steps {
            lines = lines & stays | lines << by & moves;
        }
        lines
    }

    /// The other way round.
    #[inline(always)]
    fn close(self, mut lines: u64) -> u64 {
        for (by, stays, moves) in self.steps.into_iter().rev() {
            lines = lines & stays | (lines & moves) >> by;
        }
        lines
    }
}

/// Up to so many columns, looking up the bits of each takes less than transposing all: half the time for 2.
const WIDEST_TABLE: usize = 4;

/// `LINES_OF[big][width - 2][byte]`: the bits of a byte of a column, each in its line.
static LINES_OF: [[[u64; 256]; WIDEST_TABLE - 1]; 2] = {
    let mut table = [[[0; 256]; WIDEST_TABLE - 1]; 2];
    let mut index = 0;
    while index < 2 * (WIDEST_TABLE - 1) * 256 * 8 {
        let (line, byte, width, big) = (index % 8, index / 8 % 256, 2 + index / 2048 % 3, index / 6144);
        let bit = if big == 1 { 7 - line } else { line };
        table[big][width - 2][byte] |= (byte as u64 >> bit & 1) << (line * width);
        index += 1;
    }
    table
};

/// 57 bits of a string from number `at`, or more: all 64 where that begins a byte.
///
/// # Safety
/// The string has a bit of that number, or ends there; 8 bytes of slack are behind it.
#[inline(always)]
unsafe fn bits_from(string: &[u8; STRING + SLACK], at: usize) -> u64 {
    // SAFETY: the caller's bit is in the string, and the 7 bytes after it are there at least as slack.
    u64::from_le(unsafe { string.as_ptr().add(at / 8).cast::<u64>().read_unaligned() }) >> (at % 8)
}

/// Cuts a string of bits into `count` groups of columns from number `first`: a byte a column.
///
/// # Safety
/// The string has all their bits, and `packed` has room; the processor has S's instructions.
#[inline(always)]
pub unsafe fn string_to_columns<S: Simd<T>, T: Element>(
    order: BitOrder,
    string: &[u8; STRING + SLACK],
    groups: Groups,
    (first, count): (usize, usize),
    packed: &mut [u8; PACKED + SLACK],
) {
    let width = groups.width;
    let (mut at, mut dst) = (0, packed.as_mut_ptr());
    // Bytes past those of a group are written over by the next group.
    let put = |lines: u64, dst: *mut u8| {
        let lines = if order == BitOrder::Big { lines.swap_bytes() } else { lines };
        // SAFETY: there are so many bytes, with the slack behind them.
        unsafe { dst.cast::<u64>().write_unaligned(transposed(lines).to_le()) };
    };
    if width <= 8 {
        let spread = Spread::<3>::new(width);
        for bits in groups.bits_of_each(first, count) {
            // 8 lines of 8 begin a byte, so this is all of them.
            // SAFETY: the string has these bits.
            let lines = unsafe { bits_from(string, at) } & u64::MAX >> (64 - bits);
            put(spread.spread(lines), dst);
            at += bits;
            dst = dst.wrapping_add(width);
        }
        return;
    }
    for bits in groups.bits_of_each(first, count) {
        for column in (0..width).step_by(8) {
            // SAFETY: the string has this line.
            let line = |index: usize| unsafe { bits_from(string, at + index * width + column) & 0xff } << (8 * index);
            let lines = if bits == 8 * width {
                (0..8).fold(0, |lines, index| lines | line(index))
            } else {
                (0..bits / width).fold(0, |lines, index| lines | line(index))
            };
            put(lines, dst.wrapping_add(column));
        }
        at += bits;
        dst = dst.wrapping_add(width);
    }
}

/// The inverse: bytes of columns to a string of bits.
///
/// # Safety
/// `packed` has the bytes of the groups, and `string` room for their bits; the processor has S's instructions.
#[inline(always)]
pub unsafe fn columns_to_string<S: Simd<T>, T: Element>(
    order: BitOrder,
    packed: &[u8; PACKED + SLACK],
    groups: Groups,
    (first, count): (usize, usize),
    string: &mut [u8; STRING + SLACK],
) {
    let width = groups.width;
    let LineAligned(block) = &mut LineAligned([MaybeUninit::uninit(); bit_stream::BLOCK]);
    // SAFETY: the string has room for all the bits that are pushed; every read of `packed` ends in its slack.
    unsafe {
        let mut writer = BitWriter::new(block, string.as_mut_ptr(), BitOrder::Little);
        let mut src = packed.as_ptr();
        let lines_of = |columns: usize, src: *const u8| {
            let columns = u64::from_le(src.cast::<u64>().read_unaligned()) & u64::MAX >> (64 - 8 * columns);
            let lines = transposed(columns);
            if order == BitOrder::Big { lines.swap_bytes() } else { lines }
        };
        if width <= WIDEST_TABLE {
            let table = &LINES_OF[usize::from(order == BitOrder::Big)][width - 2];
            for bits in groups.bits_of_each(first, count) {
                let columns = (0..width).map(|column| table[usize::from(*src.add(column))] << column);
                let word = columns.fold(0, |word, column| word | column);
                writer.push(word & u64::MAX >> (64 - bits), bits);
                src = src.add(width);
            }
        } else if width <= 8 {
            let spread = Spread::<3>::new(width);
            for bits in groups.bits_of_each(first, count) {
                let word = spread.close(lines_of(width, src));
                writer.push(word & u64::MAX >> (64 - bits), bits);
                src = src.add(width);
            }
        } else if width <= 16 {
            push_wide::<2, 2>(groups, (first, count), src, lines_of, &mut writer);
        } else {
            push_wide::<1, 4>(groups, (first, count), src, lines_of, &mut writer);
        }
        writer.finish();
    }
}

/// Pushes the bits of groups of up to 8 * BYTES columns: lines in fields of as many bits, 2 to the power of STEPS of them in
/// a word. `lines_of` transposes up to 8 columns.
///
/// # Safety
/// `src` has the bytes of the groups, and `writer` has room for their bits.
#[inline(always)]
unsafe fn push_wide<const STEPS: usize, const BYTES: usize>(
    groups: Groups,
    (first, count): (usize, usize),
    mut src: *const u8,
    lines_of: impl Fn(usize, *const u8) -> u64,
    writer: &mut BitWriter<'_>,
) {
    let (width, together) = (groups.width, 1 << STEPS);
    let spread = Spread::<STEPS>::new(width);
    for bits in groups.bits_of_each(first, count) {
        let columns: [u64; BYTES] = std::array::from_fn(|byte| {
            let some = width.saturating_sub(8 * byte).min(8);
            if some == 0 { 0 } else { lines_of(some, src.wrapping_add(8 * byte)) }
        });
        let mut left = bits;
        for line in (0..8).step_by(together) {
            let byte = |line: usize, byte: usize| columns[byte] >> (8 * line) & 0xff;
            let word = (0..8).fold(0, |word, place| word | byte(line + place / BYTES, place % BYTES) << (8 * place));
            let some = left.min(together * width);
            if some > 0 {
                // SAFETY: these are bits of the group.
                unsafe { writer.push(spread.close(word) & u64::MAX >> (64 - some), some) };
            }
            left -= some;
        }
        src = src.wrapping_add(width);
    }
}

/// Cuts a string of bits into rows, which begin bytes of their own: zeros after the last bit.
///
/// # Safety
/// The string has all their bits, and `packed` has room; the processor has S's instructions.
#[inline(always)]
pub unsafe fn string_to_rows<S: Simd<T>, T: Element>(
    order: BitOrder,
    string: &[u8; STRING + SLACK],
    groups: Groups,
    count: usize,
    packed: &mut [u8; PACKED + SLACK],
) {
    let mask = u64::MAX >> (64 - groups.width);
    let mut dst = packed.as_mut_ptr();
    for index in 0..count {
        // SAFETY: the string has this row.
        let row = unsafe { bits_from(string, index * groups.width) } & mask;
        // SAFETY: there are so many bytes, with the slack behind them. Those past the row's are written over by the next.
        unsafe { dst.cast::<u64>().write_unaligned(row.to_le()) };
        dst = dst.wrapping_add(groups.bytes);
    }
    if order == BitOrder::Big {
        // All at once: in vectors.
        packed[..count * groups.bytes].iter_mut().for_each(|byte| *byte = byte.reverse_bits());
    }
}

/// The inverse: bytes of rows, which are changed, to a string of bits.
///
/// # Safety
/// `packed` has the bytes of the rows, and `string` room for their bits; the processor has S's instructions.
#[inline(always)]
pub unsafe fn rows_to_string<S: Simd<T>, T: Element>(
    order: BitOrder,
    packed: &mut [u8; PACKED + SLACK],
    groups: Groups,
    count: usize,
    string: &mut [u8; STRING + SLACK],
) {
    if order == BitOrder::Big {
        packed[..count * groups.bytes].iter_mut().for_each(|byte| *byte = byte.reverse_bits());
    }
    let mask = u64::MAX >> (64 - groups.width);
    let LineAligned(block) = &mut LineAligned([MaybeUninit::uninit(); bit_stream::BLOCK]);
    // SAFETY: the string has room for all the bits that are pushed; every read of `packed` ends in its slack.
    unsafe {
        let mut writer = BitWriter::new(block, string.as_mut_ptr(), BitOrder::Little);
        let mut src = packed.as_ptr();
        for _ in 0..count {
            writer.push(u64::from_le(src.cast::<u64>().read_unaligned()) & mask, groups.width);
            src = src.add(groups.bytes);
        }
        writer.finish();
    }
}
