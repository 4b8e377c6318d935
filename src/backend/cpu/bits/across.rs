//! Columns: rows whose elements lie side by side, while those of one row lie apart.

use std::ptr;

use crate::{
    backend::cpu::simd::{Element, Simd, Values, ZeroRange},
    plan::bits::{BitOrder, BitRule, Patterns},
};

/// Lines of elements in memory, `columns` each, from one to the next so many bytes.
#[derive(Clone, Copy)]
pub struct Lines {
    pub count: usize,
    pub columns: usize,
    pub stride: isize,
}

/// First column and width of blocks that cover all columns. Rather than a narrow last one there is a whole one that
/// overlaps the one before: what is done twice has the same result, and a narrow block takes longer than two whole ones.
#[inline(always)]
fn blocks<const BLOCK: usize>(columns: usize) -> impl Iterator<Item = (usize, usize)> {
    let width = BLOCK.min(columns);
    (0..columns).step_by(BLOCK).map(move |start| (start.min(columns - width), width))
}

/// Packs at most 8 lines across: bit j of byte c is that of element c of line j, and 0 where there is no such line.
///
/// # Safety
/// The lines of elements begin at `src`, at any alignment; `dst` has room for a byte a column; the processor has S's
/// instructions.
#[inline(always)]
pub unsafe fn pack_across<S: Simd<T>, T: Element>(
    rule: BitRule, order: BitOrder, src: *const u8, lines: Lines, dst: *mut u8,
) {
    // SAFETY: the lines are elements, `dst` has room for their bits, and the processor has the instructions.
    unsafe {
        match order {
            BitOrder::Big => pack::<T, true>(ZeroRange::new(rule), src, lines, dst),
            BitOrder::Little => pack::<T, false>(ZeroRange::new(rule), src, lines, dst),
        }
    }
}

/// # Safety
/// As for [`pack_across`].
#[inline(always)]
unsafe fn pack<T: Element, const BIG: bool>(
    zeros: ZeroRange<T>, src: *const u8, Lines { count, columns, stride }: Lines, dst: *mut u8,
) {
    const BLOCK: usize = 64;
    for (start, width) in blocks::<BLOCK>(columns) {
        let mut bytes = [0u8; BLOCK];
        for line in 0..count {
            let shift = if BIG { 7 - line } else { line };
            // SAFETY: `width` elements of this line are there.
            unsafe {
                let line = src.offset(line as isize * stride).add(start * T::SIZE);
                let elements = if width == BLOCK {
                    line.cast::<[T; BLOCK]>().read_unaligned()
                } else {
                    let mut elements = [zeros.first; BLOCK];
                    ptr::copy_nonoverlapping(line, elements.as_mut_ptr().cast(), width * T::SIZE);
                    elements
                };
                bytes.iter_mut().zip(elements).for_each(|(byte, element)| *byte |= element.bit(zeros) << shift);
            }
        }
        // SAFETY: there is room for `columns` bytes.
        unsafe {
            let dst = dst.add(start);
            if width == BLOCK {
                dst.cast::<[u8; BLOCK]>().write_unaligned(bytes);
            } else {
                ptr::copy_nonoverlapping(bytes.as_ptr(), dst, width);
            }
        }
    }
}

/// Unpacks across: the inverse of [`pack_across`].
///
/// # Safety
/// `src` holds a byte a column; from `dst` there is room for the lines of elements, at any alignment; the processor has
/// S's instructions.
#[inline(always)]
pub unsafe fn unpack_across<S: Simd<T>, T: Element>(
    patterns: Patterns, order: BitOrder, src: *const u8, dst: *mut u8, lines: Lines,
) {
    let values = Values::new(patterns);
    // SAFETY: the lines are places of elements, and the bytes of their bits are there.
    unsafe {
        match order {
            BitOrder::Big => unpack::<T, true>(values, src, dst, lines),
            BitOrder::Little => unpack::<T, false>(values, src, dst, lines),
        }
    }
}

/// # Safety
/// As for [`unpack_across`].
#[inline(always)]
unsafe fn unpack<T: Element, const BIG: bool>(
    values: Values<T>, src: *const u8, dst: *mut u8, Lines { count, columns, stride }: Lines,
) {
    const BLOCK: usize = 64;
    for (start, width) in blocks::<BLOCK>(columns) {
        let mut bytes = [0u8; BLOCK];
        // SAFETY: there are `columns` bytes.
        unsafe {
            let src = src.add(start);
            if width == BLOCK {
                bytes = src.cast::<[u8; BLOCK]>().read_unaligned();
            } else {
                ptr::copy_nonoverlapping(src, bytes.as_mut_ptr(), width);
            }
        }
        for line in 0..count {
            let shift = if BIG { 7 - line } else { line };
            let elements: [T; BLOCK] = bytes.map(|byte| values.of(byte >> shift & 1));
            // SAFETY: there is room for `width` elements of this line.
            unsafe {
                let line = dst.offset(line as isize * stride).add(start * T::SIZE);
                if width == BLOCK {
                    line.cast::<[T; BLOCK]>().write_unaligned(elements);
                } else {
                    ptr::copy_nonoverlapping(elements.as_ptr().cast(), line, width * T::SIZE);
                }
            }
        }
    }
}
