//! AVX-512: compares give masks, and masks give elements.

#![allow(clippy::missing_safety_doc, reason = "the promises are those of Simd")]

use std::arch::x86_64::*;

use super::{BoolByte, Element, Simd, TILE, Values, ZeroRange, portable::lane_bits};
use crate::backend::cpu::bit_stream::{BitReader, in_order};

/// AVX-512 F and BW, and BMI2.
pub struct Avx512;

/// The bytes of each group of 8 in reverse: what makes a compare's mask most significant bit first.
const REVERSED: [u8; 16] = [7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8];

/// # Safety
/// `dst` has room for a vector, aligned to 64 with STREAM, and the processor has AVX-512.
#[inline(always)]
unsafe fn store<const STREAM: bool>(dst: *mut u8, elements: __m512i) {
    // SAFETY: the caller promises the room, and the alignment that streaming wants.
    unsafe {
        if STREAM { _mm512_stream_si512(dst.cast(), elements) } else { _mm512_storeu_si512(dst.cast(), elements) }
    }
}

/// Elements as the lanes of a vector; bit k of a mask stands for lane k. All of its functions want a processor that has
/// AVX-512 F and BW.
trait Lanes512: Element {
    const LANES: usize = 64 / Self::SIZE;

    /// `self` in every lane.
    unsafe fn splat(self) -> __m512i;
    /// The elements at `src` in some lanes, zeros in the others; only those are read.
    unsafe fn load_some(lanes: u64, src: *const u8) -> __m512i;
    /// Writes the elements of some lanes to `dst`, and nothing else.
    unsafe fn store_some(lanes: u64, dst: *mut u8, elements: __m512i);
    unsafe fn subtract(one: __m512i, other: __m512i) -> __m512i;
    /// The lanes in which the first is above the other, both unsigned.
    unsafe fn above(one: __m512i, other: __m512i) -> u64;
    /// The lanes in which a bit is set in both.
    unsafe fn meet(one: __m512i, other: __m512i) -> u64;
    /// Some lanes of the second vector, those of the first in the others.
    unsafe fn select(lanes: u64, elements: [__m512i; 2]) -> __m512i;

    /// Both values, each in every lane.
    #[inline(always)]
    unsafe fn splat_both(values: Values<Self>) -> [__m512i; 2] {
        // SAFETY: the processor has AVX-512.
        unsafe { [values.zero.splat(), values.one.splat()] }
    }

    /// The lanes whose element has the bit 1.
    #[inline(always)]
    unsafe fn ones(zeros: ZeroRange<Self>, elements: __m512i) -> u64 {
        // SAFETY: the processor has AVX-512.
        unsafe { Self::above(Self::subtract(elements, zeros.first.splat()), zeros.span.splat()) }
    }
}

/// The instructions for elements of a width, whose lanes have a mask of type `$mask`: `splat` takes the integer that the
/// closure makes of an element.
macro_rules! lanes {
    ($(
        $t:ty: |$element:ident| $integer:expr, $mask:ty,
        $splat:ident $load:ident $store:ident $subtract:ident $above:ident $meet:ident $select:ident, {$($own:item)*}
    )*) => {$(
        impl Lanes512 for $t {
            #[inline(always)]
            unsafe fn splat(self) -> __m512i {
                let $element = self;
                // SAFETY: the processor has AVX-512.
                unsafe { $splat($integer) }
            }
            #[inline(always)]
            unsafe fn load_some(lanes: u64, src: *const u8) -> __m512i {
                // SAFETY: lanes that are masked out are not read; the others are there, as the caller promises.
                unsafe { $load(lanes as $mask, src.cast()) }
            }
            #[inline(always)]
            unsafe fn store_some(lanes: u64, dst: *mut u8, elements: __m512i) {
                // SAFETY: lanes that are masked out are not written; for the others there is room, as the caller
                // promises.
                unsafe { $store(dst.cast(), lanes as $mask, elements) }
            }
            #[inline(always)]
            unsafe fn subtract(one: __m512i, other: __m512i) -> __m512i {
                // SAFETY: the processor has AVX-512.
                unsafe { $subtract(one, other) }
            }
            #[inline(always)]
            unsafe fn above(one: __m512i, other: __m512i) -> u64 {
                // SAFETY: the processor has AVX-512.
                unsafe { $above(one, other).into() }
            }
            #[inline(always)]
            unsafe fn meet(one: __m512i, other: __m512i) -> u64 {
                // SAFETY: the processor has AVX-512.
                unsafe { $meet(one, other).into() }
            }
            #[inline(always)]
            unsafe fn select(lanes: u64, [zeros, ones]: [__m512i; 2]) -> __m512i {
                // SAFETY: the processor has AVX-512.
                unsafe { $select(zeros, lanes as $mask, ones) }
            }
            $($own)*
        }
    )*};
}
lanes! {
    u8: |element| element as i8, __mmask64,
    _mm512_set1_epi8 _mm512_maskz_loadu_epi8 _mm512_mask_storeu_epi8 _mm512_sub_epi8 _mm512_cmpgt_epu8_mask
    _mm512_test_epi8_mask _mm512_mask_mov_epi8, {}
    u16: |element| element as i16, __mmask32,
    _mm512_set1_epi16 _mm512_maskz_loadu_epi16 _mm512_mask_storeu_epi16 _mm512_sub_epi16 _mm512_cmpgt_epu16_mask
    _mm512_test_epi16_mask _mm512_mask_mov_epi16, {}
    u32: |element| element as i32, __mmask16,
    _mm512_set1_epi32 _mm512_maskz_loadu_epi32 _mm512_mask_storeu_epi32 _mm512_sub_epi32 _mm512_cmpgt_epu32_mask
    _mm512_test_epi32_mask _mm512_mask_mov_epi32, {}
    u64: |element| element as i64, __mmask8,
    _mm512_set1_epi64 _mm512_maskz_loadu_epi64 _mm512_mask_storeu_epi64 _mm512_sub_epi64 _mm512_cmpgt_epu64_mask
    _mm512_test_epi64_mask _mm512_mask_mov_epi64, {}
    BoolByte: |element| element.0 as i8, __mmask64,
    _mm512_set1_epi8 _mm512_maskz_loadu_epi8 _mm512_mask_storeu_epi8 _mm512_sub_epi8 _mm512_cmpgt_epu8_mask
    _mm512_test_epi8_mask _mm512_mask_mov_epi8, {
        #[inline(always)]
        unsafe fn ones(_zeros: ZeroRange<Self>, elements: __m512i) -> u64 {
            // SAFETY: the processor has AVX-512.
            unsafe { Self::meet(elements, elements) }
        }
    }
}

/// The widest distance in bytes of elements that [`StridedVector`] takes.
const WIDEST: usize = 16;

/// How many of the elements at every `step`-th of some lanes are used: a power of two, so that groups make whole words.
const fn per_group(lanes: usize, step: usize) -> usize {
    1 << (lanes / step).ilog2()
}

/// `EVERY[step]`: the lanes of the elements among 64.
const EVERY: [u64; WIDEST + 1] = {
    let (mut table, mut step) = ([0; WIDEST + 1], 1);
    while step <= WIDEST {
        let mut element = 0;
        while element < per_group(64, step) {
            table[step] |= 1 << (element * step);
            element += 1;
        }
        step += 1;
    }
    table
};

/// How the bits of a word are spread over the bytes of a vector in which elements lie so many bytes apart: which of the
/// word's bytes each byte is a copy of, and which bit of it counts there, in little and in big order.
struct Spread {
    copies: [u8; 64],
    bits: [[u8; 64]; 2],
}

/// `SPREAD[backward][distance]`.
static SPREAD: [[Spread; WIDEST + 1]; 2] = {
    const NONE: Spread = Spread { copies: [0; 64], bits: [[0; 64]; 2] };
    let mut table = [[NONE; WIDEST + 1], [NONE; WIDEST + 1]];
    let mut distance = 1;
    while distance <= WIDEST {
        let (elements, mut element) = (per_group(64, distance), 0);
        while element < elements {
            let at = element * distance;
            let mut backward = 0;
            while backward < 2 {
                let bit = if backward == 1 { elements - 1 - element } else { element };
                table[backward][distance].copies[at] = bit as u8 / 8;
                table[backward][distance].bits[0][at] = 1 << (bit % 8);
                table[backward][distance].bits[1][at] = 0x80 >> (bit % 8);
                backward += 1;
            }
            element += 1;
        }
        distance += 1;
    }
    table
};

/// A vector of strided elements: `elements` of them at every `step`-th of its lanes, in memory's order or against it.
#[derive(Clone, Copy)]
struct StridedVector {
    step: usize,
    elements: usize,
    backward: bool,
}

impl StridedVector {
    /// None if elements are so far apart, or so oddly, that one at a time is as good.
    #[inline(always)]
    fn new(stride: isize, size: usize) -> Option<Self> {
        let (lanes, distance) = (64 / size, stride.unsigned_abs());
        let step = distance / size;
        if !distance.is_multiple_of(size) || step == 0 || distance > WIDEST {
            return None;
        }
        Some(Self { step, elements: per_group(lanes, step), backward: stride < 0 })
    }

    /// The lanes of the first `count` elements of a vector.
    #[inline(always)]
    fn lanes(self, count: usize) -> u64 {
        EVERY[self.step] & (u64::MAX >> (63 - (count - 1) * self.step))
    }

    /// The lowest in memory of `count` elements from number `first`.
    #[inline(always)]
    fn lowest(self, first: usize, count: usize) -> usize {
        if self.backward { first + count - 1 } else { first }
    }

    /// `count` bits, the lowest for the first element, in the order of lanes.
    #[inline(always)]
    fn in_lane_order(self, bits: u64, count: usize) -> u64 {
        if self.backward { bits.reverse_bits() >> (64 - count) } else { bits }
    }
}

/// Transposes a tile of bits: bit j of word i becomes bit i of word j. Left to the compiler, the last three steps are
/// gathers and scatters.
///
/// # Safety
/// The processor has AVX-512 F.
#[inline(always)]
unsafe fn transpose512(words: &mut [u64; TILE]) {
    /// Of a step that swaps tiles of `half` bits, what word number `index` keeps; all else comes from its partner,
    /// rotated by `half` one way or the other.
    const fn kept(half: usize, index: usize) -> u64 {
        let mut mask = 0;
        let mut bit = 0;
        while bit < 64 {
            if (bit ^ index) & half == 0 {
                mask |= 1 << bit;
            }
            bit += 1;
        }
        mask
    }
    /// The masks and rotations of eight words, for steps within a vector.
    const fn within(half: usize) -> ([u64; 8], [u64; 8]) {
        let (mut masks, mut turns, mut lane) = ([0; 8], [0; 8], 0);
        while lane < 8 {
            masks[lane] = kept(half, lane);
            turns[lane] = if lane & half == 0 { half as u64 } else { 64 - half as u64 };
            lane += 1;
        }
        (masks, turns)
    }
    static WITHIN: [([u64; 8], [u64; 8]); 3] = [within(4), within(2), within(1)];
    /// Where the mask, the third operand, has ones the first, elsewhere the second.
    const SELECT: i32 = 0b1110_0100;

    // SAFETY: every load and store is of 8 words of an array; the processor has AVX-512.
    unsafe {
        let place = words.as_mut_ptr().cast::<__m512i>();
        let mut rows: [__m512i; 8] = std::array::from_fn(|row| _mm512_loadu_si512(place.add(row)));
        macro_rules! between {
            ($half:literal, $apart:literal, $($row:literal)*) => {
                let (upper, lower) = (kept($half, 0) as i64, kept($half, $half) as i64);
                $({
                    let (one, other) = (rows[$row], rows[$row + $apart]);
                    let (to_one, to_other) = (_mm512_rol_epi64::<$half>(other), _mm512_ror_epi64::<$half>(one));
                    rows[$row] = _mm512_ternarylogic_epi64::<SELECT>(one, to_one, _mm512_set1_epi64(upper));
                    rows[$row + $apart] = _mm512_ternarylogic_epi64::<SELECT>(other, to_other, _mm512_set1_epi64(lower));
                })*
            };
        }
        between!(32, 4, 0 1 2 3);
        between!(16, 2, 0 1 4 5);
        between!(8, 1, 0 2 4 6);
        let [four, two, one] = WITHIN.each_ref().map(|(masks, turns)| {
            (_mm512_loadu_si512(masks.as_ptr().cast()), _mm512_loadu_si512(turns.as_ptr().cast()))
        });
        for (index, row) in rows.into_iter().enumerate() {
            let step = |row, partner, (mask, turns)| {
                _mm512_ternarylogic_epi64::<SELECT>(row, _mm512_rolv_epi64(partner, turns), mask)
            };
            let row = step(row, _mm512_shuffle_i64x2::<0b01_00_11_10>(row, row), four);
            let row = step(row, _mm512_shuffle_i64x2::<0b10_11_00_01>(row, row), two);
            let row = step(row, _mm512_shuffle_epi32::<0b01_00_11_10>(row), one);
            _mm512_storeu_si512(place.add(index), row);
        }
    }
}

impl<T: Lanes512> Simd<T> for Avx512 {
    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: ZeroRange<T>, src: *const u8) -> u64 {
        if T::SIZE == 1 {
            // SAFETY: 64 elements of a byte are a vector.
            return unsafe {
                let mut elements = _mm512_loadu_si512(src.cast());
                if BIG {
                    // Cheaper than to reverse the bits of a mask.
                    let reversed = _mm512_broadcast_i32x4(_mm_loadu_si128(REVERSED.as_ptr().cast()));
                    elements = _mm512_shuffle_epi8(elements, reversed);
                }
                T::ones(zeros, elements)
            };
        }
        let mut bits = 0;
        for part in 0..T::SIZE {
            // SAFETY: 64 elements are as many vectors as an element has bytes.
            bits |= unsafe { T::ones(zeros, _mm512_loadu_si512(src.add(part * 64).cast())) } << (part * T::LANES);
        }
        in_order::<BIG>(bits)
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(values: Values<T>, bits: u64, dst: *mut u8) {
        if T::SIZE == 1 {
            // SAFETY: 64 elements of a byte are a vector, for which there is room.
            return unsafe {
                // Each byte eight times, and of each copy one bit: cheaper than to reverse the bits of a mask.
                let copies = _mm512_set_epi64(
                    0x0707070707070707,
                    0x0606060606060606,
                    0x0505050505050505,
                    0x0404040404040404,
                    0x0303030303030303,
                    0x0202020202020202,
                    0x0101010101010101,
                    0,
                );
                let bytes = _mm512_shuffle_epi8(_mm512_set1_epi64(bits as i64), copies);
                let ones = T::meet(bytes, _mm512_set1_epi64(lane_bits::<BIG>() as i64));
                store::<STREAM>(dst, T::select(ones, T::splat_both(values)));
            };
        }
        let bits = in_order::<BIG>(bits);
        for part in 0..T::SIZE {
            // SAFETY: 64 elements are as many vectors as an element has bytes, and there is room for them.
            unsafe { store::<STREAM>(dst.add(part * 64), T::select(bits >> (part * T::LANES), T::splat_both(values))) };
        }
    }

    #[inline(always)]
    unsafe fn some_to_bits(zeros: ZeroRange<T>, src: *const u8, count: usize) -> u64 {
        let mut bits = 0;
        for first in (0..count).step_by(T::LANES) {
            let lanes = u64::MAX >> (64 - T::LANES.min(count - first));
            // SAFETY: the lanes are those of elements from `first` that are below `count`, which are there.
            bits |= unsafe { T::ones(zeros, T::load_some(lanes, src.add(first * T::SIZE))) & lanes } << first;
        }
        bits
    }

    #[inline(always)]
    unsafe fn some_from_bits(values: Values<T>, bits: u64, dst: *mut u8, count: usize) {
        for first in (0..count).step_by(T::LANES) {
            let lanes = u64::MAX >> (64 - T::LANES.min(count - first));
            // SAFETY: the lanes are those of elements from `first` that are below `count`, for which there is room.
            unsafe { T::store_some(lanes, dst.add(first * T::SIZE), T::select(bits >> first, T::splat_both(values))) };
        }
    }

    #[inline(always)]
    unsafe fn transpose(words: &mut [u64; TILE]) {
        // SAFETY: the processor has AVX-512.
        unsafe { transpose512(words) };
    }

    #[inline(always)]
    unsafe fn unpack_strided<const BIG: bool>(
        values: Values<T>, reader: &mut BitReader<BIG>, dst: *mut u8, stride: isize, count: usize,
    ) -> bool {
        let Some(strided) = StridedVector::new(stride, T::SIZE) else {
            return false;
        };
        // SAFETY: lanes between elements are masked out and not written; every vector has elements below `count` alone,
        // for which there is room.
        unsafe {
            let values = T::splat_both(values);
            let every = strided.lanes(strided.elements);
            let spread = &SPREAD[usize::from(strided.backward)][stride.unsigned_abs()];
            let copies = _mm512_loadu_si512(spread.copies.as_ptr().cast());
            let bits = _mm512_loadu_si512(spread.bits[usize::from(BIG)].as_ptr().cast());
            let store = |word: u64, low: *mut u8| {
                let bytes = _mm512_shuffle_epi8(_mm512_set1_epi64(word as i64), copies);
                T::store_some(every, low, T::select(T::meet(bytes, bits), values));
            };
            let (mut first, mut low) = (0, dst.wrapping_offset(strided.lowest(0, strided.elements) as isize * stride));
            let step = strided.elements as isize * stride;
            // Words, where vectors of whole bytes make them: loads between masked stores are slow.
            while strided.elements.is_multiple_of(8) && first + 64 <= count {
                let (mut word, mut part) = (reader.next_few(64), 0);
                while part < 64 {
                    store(word, low);
                    low = low.wrapping_offset(step);
                    word >>= strided.elements;
                    part += strided.elements;
                }
                first += 64;
            }
            while first + strided.elements <= count {
                store(reader.next_few(strided.elements), low);
                low = low.wrapping_offset(step);
                first += strided.elements;
            }
            while first < count {
                let some = strided.elements.min(count - first);
                let lanes = strided.lanes(some);
                let ones = _pdep_u64(strided.in_lane_order(reader.next(some), some), lanes);
                let low = dst.offset(strided.lowest(first, some) as isize * stride);
                T::store_some(lanes, low, T::select(ones, values));
                first += some;
            }
        }
        true
    }
}
