//! Flattening memory whose contiguous dimension is not the last: a transposed matrix in C order, say.
//!
//! One element at a time would fetch a cache line for each. So the work is done in tiles of 64 x 64 elements: lines that
//! are contiguous in memory, and columns whose elements follow each other in the result.
//!
//! ```text
//!              columns, contiguous in memory      as bits: a word a line     transposed: a word a column
//!     line 0   e00 e01 e02 .. e63                 b00 b01 b02 .. b63         b00 b10 b20 .. -> 64 bits of the result
//!     line 1   e10 e11 e12 ..                     b10 b11 b12 ..             b01 b11 b21 .. -> column_bits further on
//!     line 2   e20 ..                             b20 ..                     b02 ..
//! ```
//!
//! Each transposed word is put where it belongs in the result, at any bit. At the edges, columns are done as a whole tile
//! that overlaps the one before; a few lines or columns go without any tile.

use std::ops::Range;

use crate::{
    backend::cpu::{
        bit_stream::{BitReader, joined},
        dispatch::Variant,
        simd::{LineAligned, TILE},
    },
    plan::{
        bits::{BitOrder, BitPlan, BitRule, Layout, Patterns},
        loops::{Cursor, Loops, Run},
    },
};

use super::{across::Lines, bodies::FEW_COLUMNS, flat::Rows, kernels};

/// Fewer elements than this on a side leave most of a tile empty.
const MIN_SIDE: i64 = 16;

/// So few lines of a tile are faster done one bit at a time than transposed.
const FEW_LINES: usize = 3;

/// Columns that are worked on together: enough of each line to be worth the page it is on, and few enough for their
/// lines of results to stay in the second cache meanwhile.
const STRIP: i64 = 16 * TILE as i64;

/// How a plan of one row falls into tiles.
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
    /// The tiles of a plan, if it is of a transposed matrix large enough for them.
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

    /// Calls `work` for each tile of some columns with the offset of its first element, the number of its first bit,
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
                            // Rather than a tile of some columns a whole one, with some of those before once more: what
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
    /// `elements` and `bytes` are the first of the plan that the tiles were made of, of elements that `variant` is
    /// for; nobody else works on the same columns, nor on others if the tiles are not divisible.
    pub unsafe fn pack(
        &self, variant: Variant, rule: BitRule, order: BitOrder, columns: &Range<i64>, elements: *const u8,
        bytes: *mut u8,
    ) {
        self.for_each(columns, rule.size, |element, bit, lines, columns| {
            let LineAligned(words) = &mut LineAligned([0; TILE]);
            // SAFETY: the loops of the plan, of which the tiles are made, stay within both sides; a line's bits are at
            // most a word.
            unsafe {
                let src = elements.offset(element);
                let tile = Lines { count: lines, columns, stride: self.line_stride as isize };
                if lines <= FEW_LINES {
                    for line in 0..lines as i64 {
                        let src = src.offset((line * self.line_stride) as isize);
                        let mut word = [0; 8];
                        kernels::pack_rows(
                            variant,
                            rule,
                            BitOrder::Little,
                            src,
                            columns,
                            word.as_mut_ptr(),
                            &Rows::ONE,
                        );
                        add_apart(order, u64::from_le_bytes(word), columns, bytes, bit + line, self.column_bits);
                    }
                    return;
                }
                kernels::pack_tile(variant, rule, order, src, tile, words);
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
        &self, variant: Variant, patterns: Patterns, order: BitOrder, columns: &Range<i64>, bytes: (*const u8, usize),
        elements: *mut u8,
    ) {
        self.for_each(columns, patterns.size, |element, bit, lines, columns| {
            let LineAligned(words) = &mut LineAligned([0; TILE]);
            // SAFETY: the loops of the plan, of which the tiles are made, stay within both sides; bytes past the last are not
            // read.
            unsafe {
                let dst = elements.offset(element);
                let tile = Lines { count: lines, columns, stride: self.line_stride as isize };
                if lines <= FEW_LINES {
                    for line in 0..lines as i64 {
                        let word = take_apart(order, columns, bytes, bit + line, self.column_bits);
                        let dst = dst.offset((line * self.line_stride) as isize);
                        let word = word.to_le_bytes();
                        kernels::unpack_rows(
                            variant,
                            patterns,
                            BitOrder::Little,
                            word.as_ptr(),
                            columns,
                            dst,
                            &Rows::ONE,
                        );
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
                    (BitOrder::Big, _) => places.for_each(|(word, at)| *word = bits_near_the_end::<true>(bytes, at)),
                    (BitOrder::Little, true) => {
                        places.for_each(|(word, at)| *word = bits_from::<false>(first_byte, at))
                    }
                    (BitOrder::Little, _) => {
                        places.for_each(|(word, at)| *word = bits_near_the_end::<false>(bytes, at))
                    }
                }
                kernels::unpack_tile(variant, patterns, order, words, dst, tile);
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
        // SAFETY: this is a byte of one of the bits.
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
    order: BitOrder, count: usize, (bytes, available): (*const u8, usize), first: i64, step: i64,
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
    // SAFETY: so many bytes are touched, and the caller promises those.
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

/// 64 bits from bit number `first`. The first one is the lowest, or with BIG the highest.
///
/// # Safety
/// There are 9 bytes from the one that the first bit is in.
#[inline(always)]
unsafe fn bits_from<const BIG: bool>(bytes: *const u8, first: usize) -> u64 {
    let shift = first % 8;
    // SAFETY: 9 bytes are there.
    let (word, last) = unsafe {
        let src = bytes.add(first / 8);
        (u64::from_le(src.cast::<u64>().read_unaligned()), src.add(8).read())
    };
    let word = joined::<BIG>(word, last, shift);
    if BIG { word.swap_bytes() } else { word }
}

/// The same where fewer bytes may be there: zeros past the last.
///
/// # Safety
/// There are `available` bytes.
#[inline(always)]
unsafe fn bits_near_the_end<const BIG: bool>((bytes, available): (*const u8, usize), first: usize) -> u64 {
    // SAFETY: `available` bytes are there.
    let word = unsafe { BitReader::<BIG>::new(bytes, available) }.word_at(first);
    if BIG { word.swap_bytes() } else { word }
}
