//! AVX-512: compares give masks, and masks select elements.

#![allow(clippy::missing_safety_doc, reason = "the promises are those of Simd")]

use std::arch::x86_64::*;

use super::{Element, Simd, Values, ZeroRange, in_order, portable::lane_bits};

/// AVX-512 F, BW, DQ and VL, and BMI2.
pub struct Avx512;

/// Shuffle that reverses each group of 8 bytes, so that a compare's mask has the most significant bit first.
const REVERSED: [u8; 16] = [7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8];

/// # Safety
/// `dst` has room for a vector, aligned to 64 with STREAM, and the processor has AVX-512.
#[inline(always)]
unsafe fn store<const STREAM: bool>(dst: *mut u8, elements: __m512i) {
    // SAFETY: the caller promises the room, and the alignment that streaming needs.
    unsafe {
        if STREAM { _mm512_stream_si512(dst.cast(), elements) } else { _mm512_storeu_si512(dst.cast(), elements) }
    }
}

/// Elements as the lanes of a vector; bit k of a mask stands for lane k. All functions require a processor that has
/// AVX-512 F and BW.
trait Lanes512: Element {
    const LANES: usize = 64 / Self::SIZE;

    /// Returns a vector with `self` in every lane.
    unsafe fn splat(self) -> __m512i;
    /// Loads the elements at `src` into some lanes, and zeros into the others. Other elements are not read.
    unsafe fn load_some(lanes: u64, src: *const u8) -> __m512i;
    /// Stores the elements of some lanes to `dst`, and nothing else.
    unsafe fn store_some(lanes: u64, dst: *mut u8, elements: __m512i);
    unsafe fn subtract(one: __m512i, other: __m512i) -> __m512i;
    /// Returns the lanes in which the first element is above the other, both unsigned.
    unsafe fn above(one: __m512i, other: __m512i) -> u64;
    /// Returns the lanes in which both elements have a bit set in common.
    unsafe fn meet(one: __m512i, other: __m512i) -> u64;
    /// Returns some lanes of the second vector, and the other lanes of the first one.
    unsafe fn select(lanes: u64, elements: [__m512i; 2]) -> __m512i;

    /// Returns both values, each in every lane.
    #[inline(always)]
    unsafe fn splat_both(values: Values<Self>) -> [__m512i; 2] {
        // SAFETY: the processor has AVX-512.
        unsafe { [values.zero.splat(), values.one.splat()] }
    }

    /// Returns the lanes whose element stands for a bit of 1.
    #[inline(always)]
    unsafe fn ones(zeros: ZeroRange<Self>, elements: __m512i) -> u64 {
        // SAFETY: the processor has AVX-512.
        unsafe {
            if Self::SIZE == 1 {
                return Self::meet(elements, elements);
            }
            Self::above(Self::subtract(elements, zeros.first.splat()), zeros.span.splat())
        }
    }
}

/// Implements [`Lanes512`] with the instructions for a width of elements, whose lanes have a mask of type `$mask`.
/// `$splat` takes a signed integer.
macro_rules! lanes {
    ($(
        $t:ty: $integer:ty, $mask:ty,
        $splat:ident $load:ident $store:ident $subtract:ident $above:ident $meet:ident $select:ident;
    )*) => {$(
        impl Lanes512 for $t {
            #[inline(always)]
            unsafe fn splat(self) -> __m512i {
                // SAFETY: the processor has AVX-512.
                unsafe { $splat(self as $integer) }
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
        }
    )*};
}
lanes! {
    u8: i8, __mmask64,
    _mm512_set1_epi8 _mm512_maskz_loadu_epi8 _mm512_mask_storeu_epi8 _mm512_sub_epi8 _mm512_cmpgt_epu8_mask
    _mm512_test_epi8_mask _mm512_mask_mov_epi8;
    u16: i16, __mmask32,
    _mm512_set1_epi16 _mm512_maskz_loadu_epi16 _mm512_mask_storeu_epi16 _mm512_sub_epi16 _mm512_cmpgt_epu16_mask
    _mm512_test_epi16_mask _mm512_mask_mov_epi16;
    u32: i32, __mmask16,
    _mm512_set1_epi32 _mm512_maskz_loadu_epi32 _mm512_mask_storeu_epi32 _mm512_sub_epi32 _mm512_cmpgt_epu32_mask
    _mm512_test_epi32_mask _mm512_mask_mov_epi32;
    u64: i64, __mmask8,
    _mm512_set1_epi64 _mm512_maskz_loadu_epi64 _mm512_mask_storeu_epi64 _mm512_sub_epi64 _mm512_cmpgt_epu64_mask
    _mm512_test_epi64_mask _mm512_mask_mov_epi64;
}

impl<T: Lanes512> Simd<T> for Avx512 {
    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: ZeroRange<T>, src: *const u8) -> u64 {
        if T::SIZE == 1 {
            // SAFETY: 64 elements of a byte are a vector.
            return unsafe {
                let mut elements = _mm512_loadu_si512(src.cast());
                if BIG {
                    // This is cheaper than reversing the bits of a mask.
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
                // Copies each byte to eight lanes, and tests one bit in each. Reversing a mask's bits costs more.
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
            // SAFETY: the lanes have the elements from `first` on that are below `count`, which the caller promises.
            bits |= unsafe { T::ones(zeros, T::load_some(lanes, src.add(first * T::SIZE))) & lanes } << first;
        }
        bits
    }

    #[inline(always)]
    unsafe fn some_from_bits(values: Values<T>, bits: u64, dst: *mut u8, count: usize) {
        for first in (0..count).step_by(T::LANES) {
            let lanes = u64::MAX >> (64 - T::LANES.min(count - first));
            // SAFETY: the lanes have the elements from `first` on that are below `count`, for which there is room.
            unsafe { T::store_some(lanes, dst.add(first * T::SIZE), T::select(bits >> first, T::splat_both(values))) };
        }
    }
}
