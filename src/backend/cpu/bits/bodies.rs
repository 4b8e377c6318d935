//! The generic bodies of what passes through the stack: tiles of lines and columns, and strings of bits (see `narrow`).
//! `kernels` compiles them for each instruction set.

use std::mem::MaybeUninit;

use crate::{
    backend::cpu::{
        bit_stream::{self, BitWriter, in_order},
        simd::{Element, LineAligned, Simd, TILE, Values, ZeroRange, prefetch},
    },
    plan::bits::{BitOrder, BitRule, Patterns},
};

use super::across::Lines;

/// So few columns of a tile are faster done one element at a time than transposed.
pub const FEW_COLUMNS: usize = 3;

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
    rule: BitRule, order: BitOrder, src: *const u8, Lines { count: lines, columns, stride }: Lines,
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
    patterns: Patterns, order: BitOrder, words: &mut [u64; TILE], dst: *mut u8,
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

/// The bits of up to 64 elements that lie `stride` bytes apart, the first one lowest, zeros above.
///
/// # Safety
/// `src` is the first of `count` elements, at any alignment, and the processor has S's instructions.
#[inline(always)]
unsafe fn collect<S: Simd<T>, T: Element>(zeros: ZeroRange<T>, src: *const u8, stride: isize, count: usize) -> u64 {
    // SAFETY: every index is below `count`; 64 elements are on the stack.
    unsafe {
        let element = |index: usize| src.offset(index as isize * stride).cast::<T>().read_unaligned();
        if count == 64 {
            let elements: [T; 64] = std::array::from_fn(element);
            return S::to_bits::<false>(zeros, elements.as_ptr().cast());
        }
        (0..count).fold(0, |bits, index| bits | u64::from(element(index).bit(zeros)) << index)
    }
}

/// The inverse, of bits in the order of memory; anything may be above.
///
/// # Safety
/// `dst` is the place of the first of `count` elements, at any alignment, and the processor has S's instructions.
#[inline(always)]
pub unsafe fn distribute<S: Simd<T>, T: Element, const BIG: bool>(
    values: Values<T>, bits: u64, dst: *mut u8, stride: isize, count: usize,
) {
    // SAFETY: every index is below `count`; 64 elements are on the stack.
    unsafe {
        let put = |index: usize, element: T| dst.offset(index as isize * stride).cast::<T>().write_unaligned(element);
        if count == 64 {
            let mut elements = [T::default(); 64];
            S::from_bits::<BIG, false>(values, bits, elements.as_mut_ptr().cast());
            return elements.into_iter().enumerate().for_each(|(index, element)| put(index, element));
        }
        // From a table: a branch on a bit of data is foreseen half the time.
        let (bits, elements) = (in_order::<BIG>(bits), [values.zero, values.one]);
        (0..count).for_each(|index| put(index, elements[(bits >> index & 1) as usize]));
    }
}

/// Bytes of a string, and of what it is cut into: large enough for the calls between not to matter.
pub const STRING: usize = 1024;
pub const PACKED: usize = 2048;

/// Bytes that words may be read and written past the end of either.
pub const SLACK: usize = 8;

/// What groups are like.
#[derive(Clone, Copy)]
pub struct Groups {
    /// Columns, or the elements of a row.
    pub width: usize,
    /// Groups, of which the last may have fewer lines: those that follow each other along the lines. 1 for rows.
    pub per_row: usize,
    /// Bits of a group, and of the last of a row.
    pub bits: usize,
    pub last_bits: usize,
    /// Bytes of a group.
    pub bytes: usize,
}

impl Groups {
    pub fn are_rows(&self) -> bool {
        self.bits == self.width
    }

    /// The number of bits of the first `count` groups.
    pub fn bits_before(&self, count: i64) -> i64 {
        let (rows, groups) = (count / self.per_row as i64, count % self.per_row as i64);
        let row = (self.per_row - 1) * self.bits + self.last_bits;
        rows * row as i64 + groups * self.bits as i64
    }

    /// The bits of `count` groups from number `first`, one after the other.
    #[inline(always)]
    pub fn bits_of_each(self, first: usize, count: usize) -> impl Iterator<Item = usize> {
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
    order: BitOrder, string: &[u8; STRING + SLACK], groups: Groups, (first, count): (usize, usize),
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
    order: BitOrder, packed: &[u8; PACKED + SLACK], groups: Groups, (first, count): (usize, usize),
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
    groups: Groups, (first, count): (usize, usize), mut src: *const u8, lines_of: impl Fn(usize, *const u8) -> u64,
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
    order: BitOrder, string: &[u8; STRING + SLACK], groups: Groups, count: usize, packed: &mut [u8; PACKED + SLACK],
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
    order: BitOrder, packed: &mut [u8; PACKED + SLACK], groups: Groups, count: usize, string: &mut [u8; STRING + SLACK],
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
