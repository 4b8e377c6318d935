//! Flattening memory whose contiguous dimension is not the last: a transposed matrix in C order, say.
//!
//! OnePattern element at a time would fetch a cache line for each. So the work is done in squares of 64 x 64: 64 lines of 64
//! elements side by side become 64 words, the square of bits is turned round, and each word, now 64 bits that follow
//! each other in the result, is put where it belongs, at any bit. Of what is left at the edges, columns are done as a
//! whole square that overlaps the one before, and a few lines or columns without any square.

use std::ops::Range;

use crate::plan::{
    bits::{BitOrder, BitPlan, BitRule, Layout, OnePattern},
    loops::{Cursor, Loops, Run},
};

use super::words::{FEW_COLUMNS, Kernels, Rows, TILE};

/// Fewer elements than this on a side leave most of a square empty.
const MIN_SIDE: i64 = 16;

/// So few lines of a square are faster done one bit at a time than turned round.
const FEW_LINES: usize = 3;

/// Columns that are worked on together: enough of each line to be worth the page it is on, and few enough for their
/// lines of results to stay in the second cache meanwhile.
const STRIP: i64 = 16 * TILE as i64;

/// How a plan of one row falls into squares.
pub struct Tiles {
    /// Elements side by side, and how many bits of the result lie between two of them.
    columns: i64,
    column_bits: i64,
    /// Lines, which follow each other in the result, and how far apart they are.
    lines: i64,
    line_stride: i64,
    /// The other loops: how far they go in the elements, and in bits.
    others: Loops<2>,
    /// Whether a stretch of columns, 64 or a multiple, begins a byte of its own wherever the other loops are.
    pub divisible: bool,
}

impl Tiles {
    /// The squares of a plan, if it is of a transposed matrix large enough for them.
    pub fn of(plan: &BitPlan, layout: Layout) -> Option<Self> {
        let Layout::Transposed { across } = layout else {
            return None;
        };
        let (inner, outer) = plan.elements.as_slice().split_last()?;
        if inner.count < MIN_SIDE || outer[across].count < MIN_SIDE {
            return None;
        }
        let mut tiles = Self {
            columns: outer[across].count,
            column_bits: 0,
            lines: inner.count,
            line_stride: inner.strides[0],
            others: Loops::new(),
            divisible: true,
        };
        let mut bits = plan.elements.count();
        for (index, item) in outer.iter().enumerate() {
            bits /= item.count;
            if index == across {
                tiles.column_bits = bits;
            } else {
                tiles.divisible &= index > across || bits % 8 == 0;
                tiles.others.push(item.count, [item.strides[0], bits]);
            }
        }
        Some(tiles)
    }

    /// Columns, in the direction in which the work can be divided.
    pub fn columns(&self) -> i64 {
        self.columns
    }

    /// Calls `work` for each square of some columns with the offset of its first element, the number of its first bit,
    /// and its lines and columns.
    fn for_each(&self, columns: &Range<i64>, size: usize, mut work: impl FnMut(isize, i64, usize, usize)) {
        let side = TILE as i64;
        let mut cursor = Cursor::starting_at(&self.others, 0);
        while let Some(Run { offsets: [element, bit], count, strides: [element_step, bit_step] }) =
            cursor.next_run(i64::MAX)
        {
            for round in 0..count {
                let (element, bit) = (element + round * element_step, bit + round * bit_step);
                for strip in (columns.start..columns.end).step_by(STRIP as usize) {
                    let end = (strip + STRIP).min(columns.end);
                    for line in (0..self.lines).step_by(TILE) {
                        let lines = side.min(self.lines - line) as usize;
                        for column in (strip..end).step_by(TILE) {
                            // Rather than a square of some columns a whole one, with some of those before once more: what
                            // is done twice has the same result.
                            let few = end - column <= FEW_COLUMNS as i64;
                            let column = if few { column } else { column.min((end - side).max(columns.start)) };
                            work(
                                (element + line * self.line_stride + column * size as i64) as isize,
                                bit + line + column * self.column_bits,
                                lines,
                                side.min(end - column) as usize,
                            );
                        }
                    }
                }
            }
        }
    }

    /// Packs some columns. Bits are added to what is there: the bytes must be zeros.
    ///
    /// # Safety
    /// `elements` and `bytes` are the first of the plan that the squares were made of, of elements that `kernels` are
    /// for; nobody else works on the same columns, nor on others if the squares are not divisible.
    pub unsafe fn pack(
        &self,
        kernels: &Kernels,
        rule: BitRule,
        order: BitOrder,
        columns: &Range<i64>,
        elements: *const u8,
        bytes: *mut u8,
    ) {
        self.for_each(columns, rule.size, |element, bit, lines, columns| {
            let mut words = [0; TILE];
            // SAFETY: the loops of the plan, of which the squares are made, stay within both sides; a line's bits are at
            // most a word.
            unsafe {
                let src = elements.offset(element);
                if lines <= FEW_LINES {
                    for line in 0..lines as i64 {
                        let src = src.offset((line * self.line_stride) as isize);
                        let mut word = [0; 8];
                        (kernels.pack)(rule, BitOrder::Little, src, columns, word.as_mut_ptr(), &Rows::ONE);
                        add_apart(order, u64::from_le_bytes(word), columns, bytes, bit + line, self.column_bits);
                    }
                    return;
                }
                (kernels.pack_tile)(rule, order, src, self.line_stride as isize, lines, columns, &mut words);
                let firsts = (0..).map(|column| (bit + column * self.column_bits) as usize);
                let places = words[..columns].iter().zip(firsts);
                // Whole words apart, for they take fewer instructions when their length is known.
                match (order, lines) {
                    (BitOrder::Big, TILE) => places.for_each(|(&word, at)| add_bits::<true>(word, TILE, bytes, at)),
                    (BitOrder::Big, _) => places.for_each(|(&word, at)| add_bits::<true>(word, lines, bytes, at)),
                    (BitOrder::Little, TILE) => places.for_each(|(&word, at)| add_bits::<false>(word, TILE, bytes, at)),
                    (BitOrder::Little, _) => places.for_each(|(&word, at)| add_bits::<false>(word, lines, bytes, at)),
                }
            }
        });
    }

    /// Unpacks some columns: zeros past the last byte.
    ///
    /// # Safety
    /// As for `pack`, and `bytes` says how many there are.
    pub unsafe fn unpack(
        &self,
        kernels: &Kernels,
        one: OnePattern,
        order: BitOrder,
        columns: &Range<i64>,
        bytes: (*const u8, usize),
        elements: *mut u8,
    ) {
        self.for_each(columns, one.size, |element, bit, lines, columns| {
            let mut words = [0; TILE];
            // SAFETY: as in `pack`.
            unsafe {
                let dst = elements.offset(element);
                if lines <= FEW_LINES {
                    for line in 0..lines as i64 {
                        let word = take_apart(order, columns, bytes, bit + line, self.column_bits);
                        let dst = dst.offset((line * self.line_stride) as isize);
                        let word = word.to_le_bytes();
                        (kernels.unpack)(one, BitOrder::Little, word.as_ptr(), columns, dst, &Rows::ONE);
                    }
                    return;
                }
                let firsts = (0..).map(|column| (bit + column * self.column_bits) as usize);
                let places = words[..columns].iter_mut().zip(firsts);
                // Where all of them are, and more, no word has to ask.
                let last = (bit + (columns as i64 - 1) * self.column_bits) as usize;
                let (first_byte, all) = (bytes.0, bytes.1 >= last / 8 + 9);
                match (order, all) {
                    (BitOrder::Big, true) => places.for_each(|(word, at)| *word = bits_from::<true>(first_byte, at)),
                    (BitOrder::Big, _) => places.for_each(|(word, at)| *word = bits_at::<true>(lines, bytes, at)),
                    (BitOrder::Little, true) => {
                        places.for_each(|(word, at)| *word = bits_from::<false>(first_byte, at))
                    }
                    (BitOrder::Little, _) => places.for_each(|(word, at)| *word = bits_at::<false>(lines, bytes, at)),
                }
                (kernels.unpack_tile)(one, order, &mut words, dst, self.line_stride as isize, lines, columns);
            }
        });
    }
}

/// Which bit of its byte bit number `at` is, from the lowest.
#[inline(always)]
fn place(order: BitOrder, at: usize) -> usize {
    (at % 8) ^ if order == BitOrder::Big { 7 } else { 0 }
}

/// Adds the lowest `count` bits of a word: the lowest at bit number `first`, each of the others `step` bits after the one
/// before.
///
/// # Safety
/// The bytes that these bits touch are there.
#[inline(always)]
unsafe fn add_apart(order: BitOrder, mut word: u64, count: usize, bytes: *mut u8, first: i64, step: i64) {
    let mut at = first as usize;
    for _ in 0..count {
        // SAFETY: the caller's promise.
        unsafe { *bytes.add(at / 8) |= ((word & 1) as u8) << place(order, at) };
        word >>= 1;
        at += step as usize;
    }
}

/// The inverse: zeros past the last byte.
///
/// # Safety
/// There are `available` bytes.
#[inline(always)]
unsafe fn take_apart(
    order: BitOrder,
    count: usize,
    (bytes, available): (*const u8, usize),
    first: i64,
    step: i64,
) -> u64 {
    let (mut word, mut at) = (0, first as usize);
    for index in 0..count {
        if at / 8 < available {
            // SAFETY: this byte is there.
            word |= unsafe { u64::from(*bytes.add(at / 8) >> place(order, at) & 1) } << index;
        }
        at += step as usize;
    }
    word
}

/// Adds `count` bits of `word` at bit number `first`: the lowest ones, or with BIG the highest. All other
/// bits of it are zeros.
///
/// # Safety
/// The bytes that these bits touch are there.
#[inline(always)]
unsafe fn add_bits<const BIG: bool>(word: u64, count: usize, bytes: *mut u8, first: usize) {
    let (dst, shift) = (bytes.wrapping_add(first / 8), first % 8);
    let touched = (shift + count).div_ceil(8);
    // The bits that fit in 8 bytes, and those in the byte behind them, as they lie in memory.
    let (most, last) = if BIG {
        ((word >> shift).swap_bytes(), (word << (8 - shift)) as u8)
    } else {
        (word << shift, (word >> 1 >> (63 - shift)) as u8)
    };
    // SAFETY: the caller's promise.
    unsafe {
        if touched >= 8 {
            let place = dst.cast::<u64>();
            place.write_unaligned(place.read_unaligned() | most);
            if touched == 9 {
                *dst.add(8) |= last;
            }
        } else if touched == 1 {
            *dst |= most as u8;
        } else {
            for (index, byte) in most.to_le_bytes().into_iter().enumerate().take(touched) {
                *dst.add(index) |= byte;
            }
        }
    }
}

/// `count` bits from bit number `first`, zeros past the last byte. The first one is the lowest, or with BIG
/// the highest; the others of the word may be anything.
///
/// # Safety
/// There are `available` bytes.
#[inline(always)]
unsafe fn bits_at<const BIG: bool>(count: usize, (bytes, available): (*const u8, usize), first: usize) -> u64 {
    let (start, shift) = (first / 8, first % 8);
    let mut memory = [0u8; 9];
    // SAFETY: so many bytes are there.
    unsafe {
        let there = available.saturating_sub(start).min((shift + count).div_ceil(8));
        std::ptr::copy_nonoverlapping(bytes.wrapping_add(start), memory.as_mut_ptr(), there);
        bits_from::<BIG>(memory.as_ptr(), shift)
    }
}

/// 64 bits from bit number `first`. The first one is the lowest, or with BIG the highest.
///
/// # Safety
/// There are 9 bytes from the one that the first bit is in.
#[inline(always)]
unsafe fn bits_from<const BIG: bool>(bytes: *const u8, first: usize) -> u64 {
    let shift = first % 8;
    // SAFETY: the caller's promise.
    let (word, last) = unsafe {
        let src = bytes.add(first / 8);
        (src.cast::<[u8; 8]>().read_unaligned(), src.add(8).read())
    };
    if BIG {
        u64::from_be_bytes(word) << shift | u64::from(last) >> (8 - shift)
    } else {
        u64::from_le_bytes(word) >> shift | u64::from(last) << 1 << (63 - shift)
    }
}
