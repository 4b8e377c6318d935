//! Runs of elements that do not lie side by side: every other element, a column of a matrix, all of them backwards.
//!
//! Elements a few lanes apart are read a vector at a time with what lies between them (see the picture in `simd`),
//! others one at a time.

use crate::backend::cpu::{
    bit_stream::{BitReader, BitWriter, Words, in_order},
    simd::{Element, LineAligned, Simd, Values, ZeroRange, per_group, prefetch},
};

/// Writes the bits of elements that lie `stride` bytes apart.
///
/// # Safety
/// `src` is the first of `count` elements, at any alignment; `writer` has room; the processor has S's instructions.
#[inline(always)]
pub unsafe fn pack_strided<S: Simd<T>, T: Element>(
    zeros: ZeroRange<T>, src: *const u8, stride: isize, count: usize, writer: &mut BitWriter<'_>,
) {
    let distance = stride.unsigned_abs();
    let step = distance / T::SIZE;
    let lanes = (count - 1).saturating_mul(step) + 1;
    macro_rules! of_step {
        ($($step:literal)*) => {
            match step {
                $($step if $step * T::SIZE <= S::WIDEST_STRIDE && distance == step * T::SIZE && lanes >= 64 => {
                    pack_strided_lanes::<S, T, $step>(zeros, src, stride < 0, count, writer)
                })*
                _ => pack_one_by_one::<S, T>(zeros, src, stride, count, writer),
            }
        };
    }
    // SAFETY: the elements, the room and the instructions are there, as the caller promises.
    unsafe { of_step!(2 3 4 5 6 7 8) };
}

/// Writes the bits of the elements at every `STEP`-th lane, in memory's order or against it, by testing all the lanes
/// from the lowest to the highest.
///
/// # Safety
/// As for [`pack_strided`], and there are at least 64 lanes.
#[inline(always)]
unsafe fn pack_strided_lanes<S: Simd<T>, T: Element, const STEP: usize>(
    zeros: ZeroRange<T>, src: *const u8, backward: bool, count: usize, writer: &mut BitWriter<'_>,
) {
    /// Groups of 64 lanes whose bits are compacted at once: where that takes several steps, in vectors.
    const GROUPS: usize = 16;
    /// Bytes ahead of which a cache line is asked for.
    const AHEAD: isize = 2048;
    let lanes = (count - 1) * STEP + 1;
    let bottom = if backward { src.wrapping_sub((lanes - 1) * T::SIZE) } else { src };
    let each = const { per_group(64, STEP) };
    let (whole, together) = (count / 64, GROUPS * each / 64);
    // SAFETY: all that is read lies between the first lane and the last (see `strided_word`); there is room for `count`
    // bits.
    unsafe {
        for start in (0..whole).step_by(together) {
            let some = together.min(whole - start);
            let lowest = STEP * if backward { count - 64 * (start + some) } else { 64 * start };
            let LineAligned(words) = &mut LineAligned([0; GROUPS / 2]);
            if some == together && lowest + (64 * together - each) * STEP + 64 <= lanes {
                let mut groups = [0; GROUPS];
                for (index, bits) in groups.iter_mut().enumerate() {
                    let group = bottom.add((lowest + index * each * STEP) * T::SIZE);
                    if S::PREFETCHES_STRIDED {
                        prefetch(group.wrapping_offset(if backward { -AHEAD } else { AHEAD }));
                    }
                    *bits = S::to_bits::<false>(zeros, group);
                }
                S::compact::<STEP, GROUPS>(&mut groups);
                for (word, groups) in words.iter_mut().zip(groups.chunks_exact(64 / each)) {
                    // Added up in a register: what vectors have just written is read slowly.
                    *word = (0..64 / each).fold(0, |word, index| word | groups[index] << (index * each));
                }
            } else {
                for (index, word) in words[..some].iter_mut().enumerate() {
                    *word = strided_word::<S, T, STEP>(zeros, bottom, lanes, lowest + 64 * index * STEP, 64);
                }
            }
            if backward {
                words[..some].reverse();
                words.iter_mut().for_each(|word| *word = word.reverse_bits());
            }
            writer.push_words(some, Ready(words.as_ptr()));
        }
        let rest = count % 64;
        if rest > 0 {
            let lowest = if backward { 0 } else { 64 * whole * STEP };
            let word = strided_word::<S, T, STEP>(zeros, bottom, lanes, lowest, rest);
            writer.push(if backward { word.reverse_bits() >> (64 - rest) } else { word }, rest);
        }
    }
}

/// Words in memory.
struct Ready(*const u64);

impl Words for Ready {
    #[inline(always)]
    unsafe fn next(&mut self) -> u64 {
        // SAFETY: the caller knows of another word.
        unsafe {
            self.0 = self.0.add(1);
            self.0.sub(1).read()
        }
    }
}

/// The bits of `count` elements, at most 64, of [`pack_strided_lanes`], that of the one at lane `lowest` lowest. Where that is not
/// 64 of them, those above are of the elements that come next in memory, if any.
///
/// # Safety
/// As for [`pack_strided_lanes`]: so many lanes from `bottom` are between its first element and its last.
#[inline(always)]
unsafe fn strided_word<S: Simd<T>, T: Element, const STEP: usize>(
    zeros: ZeroRange<T>, bottom: *const u8, lanes: usize, lowest: usize, count: usize,
) -> u64 {
    let each = const { per_group(64, STEP) };
    let mut word = 0;
    // SAFETY: all 64 lanes are between the run's lowest element and its highest, so near each other that there is no
    // page that none of them is in. What another thread may be writing between the elements meanwhile is left out of
    // the result.
    unsafe {
        for at in (0..count).step_by(each) {
            // Where fewer than 64 lanes are left, the last 64.
            let lane = lowest + at * STEP;
            let from = lane.min(lanes - 64);
            let mut bits = [S::to_bits::<false>(zeros, bottom.add(from * T::SIZE)) >> (lane - from)];
            S::compact::<STEP, 1>(&mut bits);
            word |= bits[0] << at;
        }
    }
    word
}

/// # Safety
/// As for [`pack_strided`].
#[inline(always)]
unsafe fn pack_one_by_one<S: Simd<T>, T: Element>(
    zeros: ZeroRange<T>, src: *const u8, stride: isize, count: usize, writer: &mut BitWriter<'_>,
) {
    let whole = count - count % 64;
    // SAFETY: every index is below `count`; there is room for as many bits.
    unsafe {
        let at = |index: usize| src.offset(index as isize * stride);
        for first in (0..whole).step_by(64) {
            writer.push(collect::<S, T>(zeros, at(first), stride, 64), 64);
        }
        if whole < count {
            writer.push(collect::<S, T>(zeros, at(whole), stride, count - whole), count - whole);
        }
    }
}

/// Reads bits to elements that lie `stride` bytes apart.
///
/// # Safety
/// `dst` is the place of the first of `count` elements, at any alignment; the processor has S's instructions.
#[inline(always)]
pub unsafe fn unpack_strided<S: Simd<T>, T: Element, const BIG: bool>(
    values: Values<T>, reader: &mut BitReader<BIG>, dst: *mut u8, stride: isize, count: usize,
) {
    // SAFETY: the room and the instructions are there, as the caller promises.
    unsafe {
        if !S::unpack_strided(values, reader, dst, stride, count) {
            unpack_one_by_one::<S, T, BIG>(values, reader, dst, stride, count);
        }
    }
}

/// # Safety
/// As for [`unpack_strided`].
#[inline(always)]
unsafe fn unpack_one_by_one<S: Simd<T>, T: Element, const BIG: bool>(
    values: Values<T>, reader: &mut BitReader<BIG>, dst: *mut u8, stride: isize, count: usize,
) {
    let whole = count - count % 64;
    // SAFETY: every index is below `count`.
    unsafe {
        let at = |index: usize| dst.offset(index as isize * stride);
        for first in (0..whole).step_by(64) {
            distribute::<S, T, BIG>(values, reader.next_few(64), at(first), stride, 64);
        }
        if whole < count {
            distribute::<S, T, BIG>(values, reader.next_few(count - whole), at(whole), stride, count - whole);
        }
    }
}

/// The bits of up to 64 elements that lie `stride` bytes apart, the first one lowest, zeros above.
///
/// # Safety
/// `src` is the first of `count` elements, at any alignment, and the processor has S's instructions.
#[inline(always)]
pub unsafe fn collect<S: Simd<T>, T: Element>(zeros: ZeroRange<T>, src: *const u8, stride: isize, count: usize) -> u64 {
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
