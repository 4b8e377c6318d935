//! Several rows side by side: in memory all their first elements, then all their second ones, and so on. Each group of
//! such lines becomes a line of bytes.
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

/// Bytes past the last line, on either side, that are read or written: a block may be wider than the lines.
pub const SLACK: usize = 64;

/// The mask of a line's bits.
#[inline(always)]
fn mask(order: BitOrder, line: usize) -> u8 {
    if order == BitOrder::Big { 0x80 >> line } else { 1 << line }
}

/// The first columns of blocks that cover all columns. The last one overlaps the one before it. A block that is wider
/// than a line reaches into the next lines, which are written later.
#[inline(always)]
fn blocks(columns: usize, width: usize) -> impl Iterator<Item = usize> {
    (0..columns).step_by(width).map(move |start| start.min(columns.saturating_sub(width)))
}

/// Packs groups of 8 lines.
///
/// # Safety
/// `src` holds `8 * groups` lines of `columns` elements, at any alignment; `dst` has room for `groups` lines of as many
/// bytes; both have SLACK bytes more, which `src` holds too; the processor has S's instructions.
#[inline(always)]
pub unsafe fn pack<S: Simd<T>, T: Element>(
    rule: BitRule, order: BitOrder, src: *const u8, groups: usize, dst: *mut u8, columns: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match T::SIZE {
            1 if columns > 16 => pack_blocks::<T, 32>(rule, order, src, groups, dst, columns),
            1 | 2 => pack_blocks::<T, 16>(rule, order, src, groups, dst, columns),
            _ => pack_blocks::<T, 8>(rule, order, src, groups, dst, columns),
        }
    }
}

/// # Safety
/// As for [`pack`]; SLACK bytes hold WIDTH elements.
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
                // SAFETY: a block begins in this line.
                let elements = unsafe { src.add(at * T::SIZE).cast::<[T; WIDTH]>().read_unaligned() };
                for (byte, element) in bytes.iter_mut().zip(elements) {
                    *byte |= element.bit(zeros).wrapping_neg() & mask;
                }
            }
            // SAFETY: a block begins in this line.
            unsafe { dst.add(group * columns + start).cast::<[u8; WIDTH]>().write_unaligned(bytes) };
        }
    }
}

/// Unpacks to groups of 8 lines: the inverse of [`pack`].
///
/// # Safety
/// As for [`pack`], with `src` and `dst` exchanged.
#[inline(always)]
pub unsafe fn unpack<S: Simd<T>, T: Element>(
    patterns: Patterns, order: BitOrder, src: *const u8, groups: usize, dst: *mut u8, columns: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match T::SIZE {
            1 if columns > 16 => unpack_blocks::<T, 32>(patterns, order, src, groups, dst, columns),
            1 | 2 => unpack_blocks::<T, 16>(patterns, order, src, groups, dst, columns),
            _ => unpack_blocks::<T, 8>(patterns, order, src, groups, dst, columns),
        }
    }
}

/// # Safety
/// As for [`unpack`]; SLACK bytes hold WIDTH elements.
#[inline(always)]
unsafe fn unpack_blocks<T: Element, const WIDTH: usize>(
    patterns: Patterns, order: BitOrder, src: *const u8, groups: usize, dst: *mut u8, columns: usize,
) {
    let values = Values::<T>::new(patterns);
    for group in 0..groups {
        for start in blocks(columns, WIDTH) {
            // SAFETY: a block begins in this line.
            let bytes = unsafe { src.add(group * columns + start).cast::<[u8; WIDTH]>().read_unaligned() };
            for line in 0..8 {
                let mask = mask(order, line);
                let at = (8 * group + line) * columns + start;
                // Not `map`, of which the compiler makes no vectors.
                let mut elements = [values.zero; WIDTH];
                for (element, byte) in elements.iter_mut().zip(bytes) {
                    *element = values.of(u8::from(byte & mask != 0));
                }
                // SAFETY: a block begins in this line.
                unsafe { dst.add(at * T::SIZE).cast::<[T; WIDTH]>().write_unaligned(elements) };
            }
        }
    }
}
