//! AVX-512: compares give masks, and masks give elements.

#![allow(clippy::missing_safety_doc, reason = "the promises are those of Simd")]

use std::arch::x86_64::*;

use super::{Element, Simd, Values, ZeroRange, in_order, portable::lane_bits};

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
        unsafe {
            if Self::SIZE == 1 {
                return Self::meet(elements, elements);
            }
            Self::above(Self::subtract(elements, zeros.first.splat()), zeros.span.splat())
        }
    }
}

/// The instructions for elements of a width, whose lanes have a mask of type `$mask`: `$splat` takes a signed
/// integer.
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
}
