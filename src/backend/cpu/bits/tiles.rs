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
        dispatch::Variant,
        simd::{Element, LineAligned, Simd, TILE, Values, ZeroRange, prefetch},
    },
    plan::{
        bits::{BitOrder, BitPlan, BitRule, Layout, Patterns},
        loops::{Cursor, Loops, Run},
    },
};

use super::{
    across::Lines,
    flat::Rows,
    kernels,
    strided::{collect, distribute},
};

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
        &self,
        variant: Variant,
        rule: BitRule,
        order: BitOrder,
        columns: &Range<i64>,
        elements: *const u8,
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
        &self,
        variant: Variant,
        patterns: Patterns,
        order: BitOrder,
        columns: &Range<i64>,
        bytes: (*const u8, usize),
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
                    (BitOrder::Big, _) => places.for_each(|(word, at)| *word = bits_at::<true>(lines, bytes, at)),
                    (BitOrder::Little, true) => {
                        places.for_each(|(word, at)| *word = bits_from::<false>(first_byte, at))
                    }
                    (BitOrder::Little, _) => places.for_each(|(word, at)| *word = bits_at::<false>(lines, bytes, at)),
                }
                kernels::unpack_tile(variant, patterns, order, words, dst, tile);
            }
        });
    }
}

/// So few columns of a tile are faster done one element at a time than transposed.
const FEW_COLUMNS: usize = 3;

/// The words of the lines in a tile: after transposing, the first line's bit is the lowest of each word, or the highest.
#[inline(always)]
fn words_of(order: BitOrder) -> impl Iterator<Item = usize> {
    let last = if order == BitOrder::Big { TILE - 1 } else { 0 };
    (0..TILE).map(move |line| line ^ last)
}

/// The bits of a tile, transposed: word i has those of element i of each line. The first line's bit is the lowest, or
/// with [`BitOrder::Big`] the highest.
///
/// # Safety
/// The lines begin at `src`, at most [`TILE`] both ways, and the processor has S's instructions.
#[inline(always)]
pub unsafe fn pack_tile<S: Simd<T>, T: Element>(
    rule: BitRule,
    order: BitOrder,
    src: *const u8,
    Lines { count: lines, columns, stride }: Lines,
    words: &mut [u64; TILE],
) {
    let zeros = ZeroRange::new(rule);
    if columns <= FEW_COLUMNS {
        for (column, word) in words[..columns].iter_mut().enumerate() {
            // SAFETY: a column of the lines.
            let bits = unsafe { collect::<S, T>(zeros, src.add(column * T::SIZE), stride, lines) };
            *word = if order == BitOrder::Big { bits.reverse_bits() } else { bits };
        }
        return;
    }
    if lines < TILE {
        words.fill(0);
    }
    // SAFETY: every line has `columns` elements.
    unsafe {
        if columns == TILE {
            for (word, line) in words_of(order).zip(0..lines) {
                let src = src.offset(line as isize * stride);
                // The next tile: no prefetcher of a processor follows 64 lines at once.
                prefetch(src.wrapping_add(TILE * T::SIZE));
                words[word] = S::to_bits::<false>(zeros, src);
            }
        } else {
            for (word, line) in words_of(order).zip(0..lines) {
                words[word] = S::some_to_bits(zeros, src.offset(line as isize * stride), columns);
            }
        }
    }
    // SAFETY: the processor has the instructions.
    unsafe { S::transpose(words) };
}

/// The inverse: elements of a tile of the bits of [`pack_tile`].
///
/// # Safety
/// There is room for `lines` lines of `columns` elements each, both at most [`TILE`], and the processor has L's
/// instructions.
#[inline(always)]
pub unsafe fn unpack_tile<S: Simd<T>, T: Element>(
    patterns: Patterns,
    order: BitOrder,
    words: &mut [u64; TILE],
    dst: *mut u8,
    Lines { count: lines, columns, stride }: Lines,
) {
    let values = Values::new(patterns);
    if columns <= FEW_COLUMNS {
        for (column, &word) in words[..columns].iter().enumerate() {
            let bits = if order == BitOrder::Big { word.reverse_bits() } else { word };
            // SAFETY: a column of the lines.
            unsafe { distribute::<S, T, false>(values, bits, dst.add(column * T::SIZE), stride, lines) };
        }
        return;
    }
    // SAFETY: the processor has the instructions, and every line has `columns` elements.
    unsafe {
        S::transpose(words);
        if columns == TILE {
            for (word, line) in words_of(order).zip(0..lines) {
                let dst = dst.offset(line as isize * stride);
                // The next tile: no prefetcher of a processor follows 64 lines at once.
                prefetch(dst.wrapping_add(TILE * T::SIZE));
                S::from_bits::<false, false>(values, words[word], dst);
            }
        } else {
            for (word, line) in words_of(order).zip(0..lines) {
                S::some_from_bits(values, words[word], dst.offset(line as isize * stride), columns);
            }
        }
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
    // SAFETY: the caller promises 9 bytes.
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
