//! AVX2: compares give bytes of ones, whose sign bits are gathered.

#![allow(clippy::missing_safety_doc, reason = "the promises are those of Simd")]

use std::arch::x86_64::*;

use super::{Element, Simd, Values, ZeroRange, in_order, portable::lane_bits};

pub struct Avx2;

/// Shuffle that reverses each group of 8 bytes, so that a compare's mask has the most significant bit first.
const REVERSED: [u8; 16] = [7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8];

/// # Safety
/// `dst` has room for a vector, aligned to 32 with STREAM, and the processor has AVX.
#[inline(always)]
unsafe fn store<const STREAM: bool>(dst: *mut u8, elements: __m256i) {
    // SAFETY: the caller promises the room, and the alignment that streaming needs.
    unsafe {
        if STREAM { _mm256_stream_si256(dst.cast(), elements) } else { _mm256_storeu_si256(dst.cast(), elements) }
    }
}

/// Elements as the lanes of a vector. All functions require a processor that has AVX2.
trait Lanes256: Element {
    /// Returns a vector with `self` in every lane.
    unsafe fn splat(self) -> __m256i;
    unsafe fn subtract(one: __m256i, other: __m256i) -> __m256i;
    /// Returns the smaller one of unsigned elements in each lane.
    unsafe fn smaller(one: __m256i, other: __m256i) -> __m256i;
    /// Returns ones in every bit of the lanes that are equal.
    unsafe fn equal(one: __m256i, other: __m256i) -> __m256i;

    /// Returns ones in every bit of the lanes whose element stands for a bit of 0.
    #[inline(always)]
    unsafe fn is_zero(zeros: ZeroRange<Self>, elements: __m256i) -> __m256i {
        // SAFETY: the processor has AVX2.
        unsafe {
            if Self::SIZE == 1 {
                return Self::equal(elements, _mm256_setzero_si256());
            }
            // AVX2 has no unsigned compare: an offset is not above the span if it is the smaller of the two.
            let offsets = Self::subtract(elements, zeros.first.splat());
            Self::equal(Self::smaller(offsets, zeros.span.splat()), offsets)
        }
    }
}

/// Implements [`Lanes256`] with the instructions for a width of elements. `$splat` takes a signed integer.
macro_rules! lanes {
    ($($t:ty: $integer:ty, $splat:ident $subtract:ident $smaller:ident $equal:ident;)*) => {$(
        impl Lanes256 for $t {
            #[inline(always)]
            unsafe fn splat(self) -> __m256i {
                // SAFETY: the processor has AVX2.
                unsafe { $splat(self as $integer) }
            }
            #[inline(always)]
            unsafe fn subtract(one: __m256i, other: __m256i) -> __m256i {
                // SAFETY: the processor has AVX2.
                unsafe { $subtract(one, other) }
            }
            #[inline(always)]
            unsafe fn smaller(one: __m256i, other: __m256i) -> __m256i {
                // SAFETY: the processor has AVX2.
                unsafe { $smaller(one, other) }
            }
            #[inline(always)]
            unsafe fn equal(one: __m256i, other: __m256i) -> __m256i {
                // SAFETY: the processor has AVX2.
                unsafe { $equal(one, other) }
            }
        }
    )*};
}
lanes! {
    u8: i8, _mm256_set1_epi8 _mm256_sub_epi8 _mm256_min_epu8 _mm256_cmpeq_epi8;
    u16: i16, _mm256_set1_epi16 _mm256_sub_epi16 _mm256_min_epu16 _mm256_cmpeq_epi16;
    u32: i32, _mm256_set1_epi32 _mm256_sub_epi32 _mm256_min_epu32 _mm256_cmpeq_epi32;
}

/// Returns the second vector in lanes where every bit of `mask` is 1, and the first where every bit is 0.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn select(mask: __m256i, [zeros, ones]: [__m256i; 2]) -> __m256i {
    // SAFETY: the processor has AVX2.
    unsafe { _mm256_xor_si256(zeros, _mm256_and_si256(mask, _mm256_xor_si256(zeros, ones))) }
}

impl Simd<u8> for Avx2 {
    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: ZeroRange<u8>, src: *const u8) -> u64 {
        let mut bits = 0;
        for part in 0..2 {
            // SAFETY: the vector lies within the 64 elements.
            let mask = unsafe {
                let mut elements = _mm256_loadu_si256(src.add(part * 32).cast());
                if BIG {
                    let reversed = _mm256_broadcastsi128_si256(_mm_loadu_si128(REVERSED.as_ptr().cast()));
                    elements = _mm256_shuffle_epi8(elements, reversed);
                }
                _mm256_movemask_epi8(u8::is_zero(zeros, elements))
            };
            bits |= u64::from(mask as u32) << (part * 32);
        }
        !bits
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(values: Values<u8>, bits: u64, dst: *mut u8) {
        for part in 0..2 {
            // SAFETY: the vector lies within the room for 64 elements.
            unsafe {
                // Copies each byte to eight lanes, and tests one bit in each.
                let copies = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
                let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((bits >> (part * 32)) as i32), copies);
                let lane = _mm256_set1_epi64x(lane_bits::<BIG>() as i64);
                let ones = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, lane), lane);
                let elements = select(ones, [values.zero.splat(), values.one.splat()]);
                store::<STREAM>(dst.add(part * 32), elements);
            }
        }
    }
}

impl Simd<u16> for Avx2 {
    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: ZeroRange<u16>, src: *const u8) -> u64 {
        let mut bits = 0;
        for part in 0..2 {
            // SAFETY: the vector lies within the 64 elements.
            let mask = unsafe {
                let low = _mm256_loadu_si256(src.add(part * 64).cast());
                let high = _mm256_loadu_si256(src.add(part * 64 + 32).cast());
                let low = u16::is_zero(zeros, low);
                let high = u16::is_zero(zeros, high);
                // Packing works within halves, so the order of the quarters is low, high, low, high.
                _mm256_movemask_epi8(_mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(low, high)))
            };
            bits |= u64::from(mask as u32) << (part * 32);
        }
        in_order::<BIG>(!bits)
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(values: Values<u16>, bits: u64, dst: *mut u8) {
        let bits = in_order::<BIG>(bits);
        for part in 0..4 {
            // SAFETY: the vector lies within the room for 64 elements.
            unsafe {
                let lane =
                    _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
                let copies = _mm256_set1_epi16((bits >> (part * 16)) as i16);
                let ones = _mm256_cmpeq_epi16(_mm256_and_si256(copies, lane), lane);
                let elements = select(ones, [values.zero.splat(), values.one.splat()]);
                store::<STREAM>(dst.add(part * 32), elements);
            }
        }
    }
}

impl Simd<u32> for Avx2 {
    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: ZeroRange<u32>, src: *const u8) -> u64 {
        let mut bits = 0;
        for part in 0..8 {
            // SAFETY: the vector lies within the 64 elements.
            let mask = unsafe {
                _mm256_movemask_ps(_mm256_castsi256_ps(u32::is_zero(
                    zeros,
                    _mm256_loadu_si256(src.add(part * 32).cast()),
                )))
            };
            bits |= u64::from(mask as u32) << (part * 8);
        }
        in_order::<BIG>(!bits)
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(values: Values<u32>, bits: u64, dst: *mut u8) {
        let bits = in_order::<BIG>(bits);
        for part in 0..8 {
            // SAFETY: the vector lies within the room for 64 elements.
            unsafe {
                let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
                let copies = _mm256_set1_epi32((bits >> (part * 8)) as i32);
                let ones = _mm256_cmpeq_epi32(_mm256_and_si256(copies, lane), lane);
                let elements = select(ones, [values.zero.splat(), values.one.splat()]);
                store::<STREAM>(dst.add(part * 32), elements);
            }
        }
    }
}

impl Simd<u64> for Avx2 {
    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: ZeroRange<u64>, src: *const u8) -> u64 {
        let mut bits = 0;
        for part in 0..16 {
            // SAFETY: the vector lies within the 64 elements.
            let mask = unsafe {
                // AVX2 has no unsigned compare of this width: with inverted sign bits, the signed one is equal to it.
                let sign = _mm256_set1_epi64x(i64::MIN);
                let elements = _mm256_loadu_si256(src.add(part * 32).cast());
                let offsets = _mm256_sub_epi64(elements, _mm256_set1_epi64x(zeros.first as i64));
                let span = _mm256_set1_epi64x(zeros.span as i64);
                let ones = _mm256_cmpgt_epi64(_mm256_xor_si256(offsets, sign), _mm256_xor_si256(span, sign));
                _mm256_movemask_pd(_mm256_castsi256_pd(ones))
            };
            bits |= u64::from(mask as u32) << (part * 4);
        }
        in_order::<BIG>(bits)
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(values: Values<u64>, bits: u64, dst: *mut u8) {
        let bits = in_order::<BIG>(bits);
        for part in 0..16 {
            // SAFETY: the vector lies within the room for 64 elements.
            unsafe {
                let lane = _mm256_setr_epi64x(1, 2, 4, 8);
                let copies = _mm256_set1_epi64x((bits >> (part * 4)) as i64);
                let ones = _mm256_cmpeq_epi64(_mm256_and_si256(copies, lane), lane);
                let values = [values.zero, values.one].map(|value| _mm256_set1_epi64x(value as i64));
                let elements = select(ones, values);
                store::<STREAM>(dst.add(part * 32), elements);
            }
        }
    }
}
