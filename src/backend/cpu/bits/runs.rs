//! Long runs: what lies side by side, or at one stride, one after the other. Bits begin anywhere in a byte.

use std::{marker::PhantomData, mem::MaybeUninit};

use crate::{
    backend::cpu::{
        bit_stream::{BLOCK, BitReader, BitWriter, TakesWords, Words},
        simd::{Element, LineAligned, Simd, Values, ZeroRange},
    },
    plan::{
        bits::{BitOrder, BitRule, Patterns},
        loops::{Cursor, Run},
    },
};

use super::bodies::distribute;

/// Elements side by side, from which words of bits are made.
struct Forward<S, T> {
    zeros: ZeroRange<T>,
    next: *const u8,
    set: PhantomData<S>,
}

/// Room for elements, which are made of words of bits.
struct IntoForward<S, T, const BIG: bool> {
    values: Values<T>,
    first: *mut u8,
    set: PhantomData<S>,
}

impl<S: Simd<T>, T: Element> Words for Forward<S, T> {
    #[inline(always)]
    unsafe fn next(&mut self) -> u64 {
        // SAFETY: 64 more elements are there: the caller knows of another word.
        unsafe {
            let word = S::to_bits::<false>(self.zeros, self.next);
            self.next = self.next.add(64 * T::SIZE);
            word
        }
    }
}

impl<S: Simd<T>, T: Element, const BIG: bool> TakesWords for IntoForward<S, T, BIG> {
    #[inline(always)]
    unsafe fn take(&self, number: usize, word: u64) {
        // SAFETY: there is room for the 64 elements of a word of this number.
        unsafe { S::from_bits::<BIG, false>(self.values, word, self.first.add(64 * number * T::SIZE)) };
    }
}

/// Writes the bits of elements side by side.
///
/// # Safety
/// As for [`pack_runs`].
#[inline(always)]
unsafe fn pack_side_by_side<S: Simd<T>, T: Element>(
    zeros: ZeroRange<T>, mut src: *const u8, count: usize, writer: &mut BitWriter<'_>,
) {
    // SAFETY: `src` is moved over `count` elements, and there is room for their bits.
    unsafe {
        writer.push_words(count / 64, Forward::<S, T> { zeros, next: src, set: PhantomData });
        src = src.add(count / 64 * 64 * T::SIZE);
        let rest = count % 64;
        if rest > 0 {
            // The last 64 once more, where there are so many: less than to take part of them.
            let bits = if count < 64 {
                S::some_to_bits(zeros, src, rest)
            } else {
                S::to_bits::<false>(zeros, src.sub((64 - rest) * T::SIZE)) >> (64 - rest)
            };
            writer.push(bits, rest);
        }
    }
}

/// Reads bits to elements side by side.
///
/// # Safety
/// As for [`unpack_runs`].
#[inline(always)]
unsafe fn unpack_side_by_side<S: Simd<T>, T: Element, const BIG: bool>(
    values: Values<T>, reader: &mut BitReader<BIG>, mut dst: *mut u8, count: usize,
) {
    // SAFETY: `dst` is moved over the room for `count` elements.
    unsafe {
        reader.for_each_word(count / 64, IntoForward::<S, T, BIG> { values, first: dst, set: PhantomData });
        dst = dst.add(count / 64 * 64 * T::SIZE);
        let rest = count % 64;
        if rest > 0 {
            if count < 64 {
                S::some_from_bits(values, reader.next(rest), dst, rest);
            } else {
                // The last 64 once more: less than to write part of them.
                S::from_bits::<BIG, false>(values, reader.word_up_to(rest), dst.sub((64 - rest) * T::SIZE));
            }
        }
    }
}

/// Packs the next `bits` elements that the cursor passes over to ceil(bits / 8) bytes, zeros after the last bit. Those of
/// a run lie side by side.
///
/// # Safety
/// Every offset of the cursor from `base` is an element, at any alignment; `dst` has room for the bytes; the processor
/// has S's instructions.
#[inline(always)]
pub unsafe fn pack_runs<S: Simd<T>, T: Element>(
    rule: BitRule, order: BitOrder, cursor: &mut Cursor<'_, 1>, base: *const u8, bits: usize, dst: *mut u8,
) {
    let zeros = ZeroRange::new(rule);
    let mut left = bits;
    // SAFETY: the cursor's runs are elements, as the caller promises, and all of them together are `bits`.
    unsafe {
        let LineAligned(block) = &mut LineAligned([MaybeUninit::uninit(); BLOCK]);
        let mut writer = BitWriter::new(block, dst, order);
        while let Some(Run { offsets: [offset], count, .. }) = cursor.next_run(left as i64) {
            pack_side_by_side::<S, T>(zeros, base.offset(offset as isize), count as usize, &mut writer);
            left -= count as usize;
        }
        writer.finish();
    }
}

/// Unpacks `bytes`, an address and how many there are, to the next `bits` elements that the cursor passes over: the pattern
/// of each bit, and of 0 past the last byte.
///
/// # Safety
/// Every offset of the cursor from `base` is the place of an element, at any alignment; the bytes are there;
/// the processor has S's instructions.
#[inline(always)]
pub unsafe fn unpack_runs<S: Simd<T>, T: Element>(
    patterns: Patterns, order: BitOrder, bytes: (*const u8, usize), cursor: &mut Cursor<'_, 1>, base: *mut u8,
    bits: usize,
) {
    let values = Values::new(patterns);
    // SAFETY: the cursor, the bytes and the instructions are as [`unpack_runs`] wants them.
    unsafe {
        match order {
            BitOrder::Big => unpack_ordered::<S, T, true>(values, bytes, cursor, base, bits),
            BitOrder::Little => unpack_ordered::<S, T, false>(values, bytes, cursor, base, bits),
        }
    }
}

/// # Safety
/// As for [`unpack_runs`].
#[inline(always)]
unsafe fn unpack_ordered<S: Simd<T>, T: Element, const BIG: bool>(
    values: Values<T>, (src, available): (*const u8, usize), cursor: &mut Cursor<'_, 1>, base: *mut u8, bits: usize,
) {
    let mut left = bits;
    // SAFETY: the cursor's runs are places of elements, as the caller promises.
    unsafe {
        let mut reader = BitReader::<BIG>::new(src, available);
        while let Some(Run { offsets: [offset], count, strides: [stride] }) = cursor.next_run(left as i64) {
            let (dst, count) = (base.offset(offset as isize), count as usize);
            if stride == T::SIZE as i64 {
                unpack_side_by_side::<S, T, BIG>(values, &mut reader, dst, count);
            } else if !S::unpack_strided(values, &mut reader, dst, stride as isize, count) {
                for first in (0..count).step_by(64) {
                    let (some, dst) = (64.min(count - first), dst.offset(first as isize * stride as isize));
                    distribute::<S, T, BIG>(values, reader.next_few(some), dst, stride as isize, some);
                }
            }
            left -= count;
        }
    }
}
