//! The loops, generic over the instruction set that they are compiled for. The compiler does not vectorize the
//! conversion of signs to bits, so `simd` does that.
//!
//! All functions must be inlined into the functions at the end, or they are compiled without the set's instructions.

use crate::{
    codec::{
        cpu::{
            chunks::Chunks,
            sources::{FINITE, Source, for_each_word, has_bit, magnitude},
            sum::{self, TILE_UNITS, UNIT_ELEMENTS, Unit},
        },
        plan::ScaleRule,
    },
    cpu::{
        dispatch::multiversion,
        numbers::{F32, Number, is_kept},
        simd::{Simd, ZeroRange},
    },
    dlpack::floats::canonical,
};

/// Number of bytes of bits in a unit.
pub const UNIT_BYTES: usize = UNIT_ELEMENTS / 8;

/// Elements whose bit is 0: below 0, from the smallest denormal to -Inf. A NaN of either sign is not among them.
const NEGATIVE: ZeroRange<u32> = ZeroRange { first: 0x8000_0001, span: 0x7f7f_ffff };

/// Destination of a tile's elements, c^, and of their bits.
pub struct Sink {
    /// Address of the tile's first kept element, if elements are kept.
    pub kept: *mut u8,
    pub chunks: Chunks,
    /// Index of the tile's first byte of bits.
    pub byte: i64,
}

/// Options of the work on a tile.
#[derive(Clone, Copy)]
pub struct Treatment {
    /// Sum that is computed, if any.
    pub sum: Option<ScaleRule>,
    /// True if numbers that are not finite become 0.
    pub zero: bool,
}

/// Results of a tile.
pub struct Outcome {
    pub sum: f64,
    pub nonfinite: bool,
}

/// Replaces c by c^. Returns true if a number is not finite, before it becomes 0.
#[inline(always)]
fn settle<E: Number>(elements: &mut [f32], zero: bool) -> bool {
    let mut highest = 0;
    for c in elements {
        let kept = E::round(*c);
        highest = highest.max(magnitude(kept));
        *c = if zero && magnitude(kept) > FINITE { 0.0 } else { kept };
    }
    highest > FINITE
}

/// Converts elements to bits: 0 if they are in `zeros`, otherwise 1. Returns the bytes of `count` elements; padding
/// bits of the last byte are 0.
///
/// # Safety
/// The processor has the instructions, and `elements` points at a unit.
#[inline(always)]
unsafe fn bits_of<S: Simd<u32>>(
    elements: *const u32, zeros: ZeroRange<u32>, count: usize, bytes: &mut [u8; UNIT_BYTES],
) -> &[u8] {
    for (index, bytes) in bytes.as_chunks_mut::<8>().0[..count.div_ceil(64)].iter_mut().enumerate() {
        // SAFETY: a unit has 16 times 64 elements, and `count` is at most as many.
        *bytes = unsafe { S::to_bits::<true>(zeros, elements.add(64 * index).cast()) }.to_le_bytes();
    }
    let used = &mut bytes[..count.div_ceil(8)];
    if !count.is_multiple_of(8)
        && let Some(last) = used.last_mut()
    {
        *last &= 0xff << (8 - count % 8);
    }
    used
}

#[inline(always)]
unsafe fn tile_on<S: Simd<u32>, C: Source>(source: &C, sink: &Sink, treatment: Treatment, elements: usize) -> Outcome {
    let mut unit = Unit([0.0; UNIT_ELEMENTS]);
    let mut bytes = [0; UNIT_BYTES];
    let mut sums = [0.0; TILE_UNITS];
    let mut nonfinite = false;
    for (number, first) in (0..elements).step_by(UNIT_ELEMENTS).enumerate() {
        let count = (elements - first).min(UNIT_ELEMENTS);
        let next = first + UNIT_ELEMENTS;
        // SAFETY: `source` holds these elements, and `sink` has room for their kept elements and bits.
        unsafe {
            nonfinite |= source.form(first, &mut unit, count);
            source.prefetch_part(next, 0);
            nonfinite |= settle::<C::Kept>(&mut unit.0[..count], treatment.zero);
            unit.0[count..].fill(0.0);
            source.prefetch_part(next, 1);
            if is_kept::<C::Kept>() {
                let kept = sink.kept;
                for (index, &c) in unit.0[..count].iter().enumerate() {
                    C::Kept::store(kept, first + index, c);
                }
            }
            let bits = bits_of::<S>(unit.0.as_ptr().cast(), NEGATIVE, count, &mut bytes);
            source.prefetch_part(next, 2);
            sink.chunks.write(sink.byte + (first / 8) as i64, bits);
        }
        if let Some(rule) = treatment.sum {
            sums[number] = f64::from(sum::of_unit(&unit, rule));
        }
        source.prefetch_part(next, 3);
    }
    Outcome { sum: sum::of_tile(sums, elements.div_ceil(UNIT_ELEMENTS)), nonfinite }
}

#[inline(always)]
unsafe fn write_on<S: Simd<u32>, C: Source>(source: &C, dst: *mut u8, elements: usize) -> bool {
    let mut unit = Unit([0.0; UNIT_ELEMENTS]);
    let mut nonfinite = false;
    for first in (0..elements).step_by(UNIT_ELEMENTS) {
        let count = (elements - first).min(UNIT_ELEMENTS);
        // SAFETY: `source` holds these elements, and `dst` has room for as many float32.
        unsafe {
            nonfinite |= source.form(first, &mut unit, count);
            for (index, &c) in unit.0[..count].iter().enumerate() {
                F32::store(dst, first + index, c);
            }
        }
    }
    nonfinite
}

/// Values that bits represent.
pub struct Values<V: Number> {
    pub plus: V::Bits,
    pub minus: V::Bits,
}

#[inline(always)]
unsafe fn set_on<S: Simd<u32>, V: Number>(bits: *const u8, values: &Values<V>, dst: *mut u8, count: usize) {
    let Values { plus, minus } = *values;
    let dst = dst.cast::<V::Bits>();
    let each = |first: usize, word: u32| {
        let mut some = [minus; 32];
        for (index, value) in some.iter_mut().enumerate() {
            *value = if has_bit(word, index) { plus } else { minus };
        }
        // SAFETY: `dst` has room for `count` values, and `count - first` are left.
        unsafe {
            match count - first {
                32.. => dst.add(first).cast::<[V::Bits; 32]>().write_unaligned(some),
                left => dst
                    .add(first)
                    .cast::<u8>()
                    .copy_from_nonoverlapping(some.as_ptr().cast(), left * size_of::<V::Bits>()),
            }
        }
    };
    // SAFETY: there are `count` bits at `bits`.
    unsafe { for_each_word(bits, count, each) };
}

#[inline(always)]
unsafe fn add_on<S: Simd<u32>>(bits: *const u8, value: f32, dst: *mut u8, count: usize) -> bool {
    let dst = dst.cast::<f32>();
    let mut highest = 0;
    let each = |first: usize, word: u32| {
        // SAFETY: there are `count` values at `dst`, and `count - first` are left.
        unsafe {
            let dst = dst.add(first);
            match count - first {
                // Here the sums stay in registers. Sums that cross cache lines on the stack took twice as long.
                32.. => {
                    let sums = sums_of(dst.cast::<[f32; 32]>().read_unaligned(), word, value, &mut highest);
                    dst.cast::<[f32; 32]>().write_unaligned(sums);
                }
                left => {
                    let mut some = [0.0f32; 32];
                    some.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(dst.cast(), 4 * left);
                    // Absent elements become the value with a sign, which is not finite only if no sum is finite.
                    let sums = sums_of(some, word, value, &mut highest);
                    dst.cast::<u8>().copy_from_nonoverlapping(sums.as_ptr().cast(), 4 * left);
                }
            }
        }
    };
    // SAFETY: there are `count` bits at `bits`.
    unsafe { for_each_word(bits, count, each) };
    highest > FINITE
}

/// Adds a value for each bit, with its sign. Raises `highest` to the magnitudes of the sums.
#[inline(always)]
fn sums_of(mut sums: [f32; 32], word: u32, value: f32, highest: &mut u32) -> [f32; 32] {
    for (index, sum) in sums.iter_mut().enumerate() {
        *sum += if has_bit(word, index) { value } else { -value };
    }
    for sum in &mut sums {
        *highest = (*highest).max(magnitude(*sum));
        *sum = canonical(*sum);
    }
    sums
}

multiversion! {
    /// Computes a tile of `elements` elements.
    fn tile<C: Source>(source: &C, sink: &Sink, treatment: Treatment, elements: usize) -> Outcome = tile_on;

    /// Writes c of a tile of `elements` elements as float32. Returns true if an input is not finite, which c need not
    /// show.
    fn write<C: Source>(source: &C, dst: *mut u8, elements: usize) -> bool = write_on;

    /// Writes a value for each bit.
    fn set_values<V: Number>(bits: *const u8, values: &Values<V>, dst: *mut u8, count: usize) = set_on;

    /// Adds a value to a float32 for each bit, with its sign. Returns true if a sum is not finite.
    fn add_values(bits: *const u8, value: f32, dst: *mut u8, count: usize) -> bool = add_on;
}
