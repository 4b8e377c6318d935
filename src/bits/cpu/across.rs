//! Interleaved rows: memory has the first elements of all rows, which are a line, then their second elements, and so
//! on. Each group of 8 lines becomes a line of bytes.
//!
//! ```text
//!     line 0   a0 b0 c0
//!     line 1   a1 b1 c1          A0 B0 C0       where A0 has the bits of a0 .. a7
//!     ..
//!     line 7   a7 b7 c7
//! ```

use crate::{
    bits::plan::BitOrder,
    cpu::simd::{Element, Simd, Values, ZeroRange},
    dlpack::rules::{BitRule, Patterns},
};

/// Bytes after the last line, on both sides, that are read or written: a block may be wider than the lines.
pub const SLACK: usize = 64;

/// Returns the mask of a line's bits.
#[inline(always)]
fn mask(order: BitOrder, line: usize) -> u8 {
    if order == BitOrder::Big { 0x80 >> line } else { 1 << line }
}

/// Returns the first columns of blocks that cover all columns. The last block may overlap the block before it. A block
/// that is wider than a line reaches into the next lines, which are written later.
#[inline(always)]
fn blocks(columns: usize, width: usize) -> impl Iterator<Item = usize> {
    (0..columns).step_by(width).map(move |start| start.min(columns.saturating_sub(width)))
}

/// Packs groups of 8 lines.
///
/// # Safety
/// `src` has `8 * groups` lines of `columns` elements, at any alignment; `dst` has room for `groups` lines of `columns`
/// bytes; both have SLACK more bytes, initialized in `src`; the processor has S's instructions.
#[inline(always)]
pub unsafe fn pack<S: Simd<T>, T: Element>(
    rule: BitRule, order: BitOrder, src: *const u8, groups: usize, dst: *mut u8, columns: usize,
) {
    // SAFETY: the caller promises lines, room and instructions; WIDTH elements take at most SLACK bytes.
    unsafe {
        match T::SIZE {
            1 if columns > 16 => pack_blocks::<T, 32>(rule, order, src, groups, dst, columns),
            1 | 2 => pack_blocks::<T, 16>(rule, order, src, groups, dst, columns),
            _ => pack_blocks::<T, 8>(rule, order, src, groups, dst, columns),
        }
    }
}

/// # Safety
/// See [`pack`]; SLACK bytes hold WIDTH elements.
#[inline(always)]
unsafe fn pack_blocks<T: Element, const WIDTH: usize>(
    rule: BitRule, order: BitOrder, src: *const u8, groups: usize, dst: *mut u8, columns: usize,
) {
    let zeros = ZeroRange::new(rule);
    for group in 0..groups {
        for start in blocks(columns, WIDTH) {
            let mut bytes = [0u8; WIDTH];
            for line in 0..8 {
                let mask = mask(order, line);
                let at = (8 * group + line) * columns + start;
                // SAFETY: the block begins in this line and ends at most SLACK bytes after the last line.
                let elements = unsafe { src.add(at * T::SIZE).cast::<[T; WIDTH]>().read_unaligned() };
                for (byte, element) in bytes.iter_mut().zip(elements) {
                    *byte |= element.bit(zeros).wrapping_neg() & mask;
                }
            }
            // SAFETY: the block begins in this line and ends at most SLACK bytes after the last line.
            unsafe { dst.add(group * columns + start).cast::<[u8; WIDTH]>().write_unaligned(bytes) };
        }
    }
}

/// Unpacks to groups of 8 lines: the inverse of [`pack`].
///
/// # Safety
/// See [`pack`], with `src` and `dst` exchanged.
#[inline(always)]
pub unsafe fn unpack<S: Simd<T>, T: Element>(
    patterns: Patterns, order: BitOrder, src: *const u8, groups: usize, dst: *mut u8, columns: usize,
) {
    // SAFETY: the caller promises lines, room and instructions; WIDTH elements take at most SLACK bytes.
    unsafe {
        match T::SIZE {
            1 if columns > 16 => unpack_blocks::<T, 32>(patterns, order, src, groups, dst, columns),
            1 | 2 => unpack_blocks::<T, 16>(patterns, order, src, groups, dst, columns),
            _ => unpack_blocks::<T, 8>(patterns, order, src, groups, dst, columns),
        }
    }
}

/// # Safety
/// See [`unpack`]; SLACK bytes hold WIDTH elements.
#[inline(always)]
unsafe fn unpack_blocks<T: Element, const WIDTH: usize>(
    patterns: Patterns, order: BitOrder, src: *const u8, groups: usize, dst: *mut u8, columns: usize,
) {
    let values = Values::<T>::new(patterns);
    for group in 0..groups {
        for start in blocks(columns, WIDTH) {
            // SAFETY: the block begins in this line and ends at most SLACK bytes after the last line.
            let bytes = unsafe { src.add(group * columns + start).cast::<[u8; WIDTH]>().read_unaligned() };
            for line in 0..8 {
                let mask = mask(order, line);
                let at = (8 * group + line) * columns + start;
                // The compiler does not vectorize `map`.
                let mut elements = [values.zero; WIDTH];
                for (element, byte) in elements.iter_mut().zip(bytes) {
                    *element = values.of(u8::from(byte & mask != 0));
                }
                // SAFETY: the block begins in this line and ends at most SLACK bytes after the last line.
                unsafe { dst.add(at * T::SIZE).cast::<[T; WIDTH]>().write_unaligned(elements) };
            }
        }
    }
}
