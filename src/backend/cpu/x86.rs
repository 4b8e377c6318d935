//! 64 elements to 64 bits and back on x86-64.

#![allow(clippy::missing_safety_doc, reason = "the promises are those of Lanes")]

use std::arch::x86_64::*;

use super::words::{Lanes, Zeros};

/// AVX-512 F, BW, VL and DQ: compares give masks, and masks give elements.
pub struct Avx512;

/// AVX2: compares give bytes of ones, whose signs are gathered.
pub struct Avx2;

/// The order of bits within each byte turned round.
#[inline(always)]
fn reverse_in_bytes(bits: u64) -> u64 {
    bits.swap_bytes().reverse_bits()
}

#[inline(always)]
fn in_order<const BIG: bool>(bits: u64) -> u64 {
    if BIG { reverse_in_bytes(bits) } else { bits }
}

/// The bytes of each group of 8 in reverse: what makes a compare's mask most significant bit first.
const REVERSED: [u8; 16] = [7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8];

/// Bit k of a byte for lane k of 8, least or most significant first.
const fn lane_bits<const BIG: bool>() -> [u8; 8] {
    if BIG { [128, 64, 32, 16, 8, 4, 2, 1] } else { [1, 2, 4, 8, 16, 32, 64, 128] }
}

impl Lanes<u8> for Avx512 {
    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: Zeros<u8>, src: *const u8) -> u64 {
        // SAFETY: the caller's promise.
        unsafe {
            let mut words = _mm512_loadu_si512(src.cast());
            if BIG {
                let reversed = _mm512_broadcast_i32x4(_mm_loadu_si128(REVERSED.as_ptr().cast()));
                words = _mm512_shuffle_epi8(words, reversed);
            }
            let offsets = _mm512_sub_epi8(words, _mm512_set1_epi8(zeros.first as i8));
            _mm512_cmpgt_epu8_mask(offsets, _mm512_set1_epi8(zeros.span as i8))
        }
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool>(one: u8, bits: u64, dst: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            // Each byte eight times, and of each copy one bit: cheaper than reversing the bits of a mask.
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
            let lane = _mm512_set1_epi64(i64::from_le_bytes(lane_bits::<BIG>()));
            let words = _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(bytes, lane), _mm512_set1_epi8(one as i8));
            _mm512_storeu_si512(dst.cast(), words);
        }
    }
}

macro_rules! avx512_lanes {
    ($t:ty, $lanes:literal, $set1:ident as $signed:ty, $sub:ident, $cmpgt:ident, $select:ident, $mask:ty) => {
        impl Lanes<$t> for Avx512 {
            #[inline(always)]
            unsafe fn to_bits<const BIG: bool>(zeros: Zeros<$t>, src: *const u8) -> u64 {
                let mut bits = 0;
                for part in 0..64 / $lanes {
                    // SAFETY: the caller's promise.
                    let mask = unsafe {
                        let words = _mm512_loadu_si512(src.add(part * 64).cast());
                        $cmpgt($sub(words, $set1(zeros.first as $signed)), $set1(zeros.span as $signed))
                    };
                    bits |= u64::from(mask) << (part * $lanes);
                }
                in_order::<BIG>(bits)
            }

            #[inline(always)]
            unsafe fn from_bits<const BIG: bool>(one: $t, bits: u64, dst: *mut u8) {
                let bits = in_order::<BIG>(bits);
                for part in 0..64 / $lanes {
                    // SAFETY: the caller's promise.
                    unsafe {
                        let words = $select((bits >> (part * $lanes)) as $mask, $set1(one as $signed));
                        _mm512_storeu_si512(dst.add(part * 64).cast(), words);
                    }
                }
            }
        }
    };
}
avx512_lanes!(
    u16,
    32,
    _mm512_set1_epi16 as i16,
    _mm512_sub_epi16,
    _mm512_cmpgt_epu16_mask,
    _mm512_maskz_mov_epi16,
    u32
);
avx512_lanes!(
    u32,
    16,
    _mm512_set1_epi32 as i32,
    _mm512_sub_epi32,
    _mm512_cmpgt_epu32_mask,
    _mm512_maskz_mov_epi32,
    u16
);
avx512_lanes!(u64, 8, _mm512_set1_epi64 as i64, _mm512_sub_epi64, _mm512_cmpgt_epu64_mask, _mm512_maskz_mov_epi64, u8);

/// Bytes of ones where an element's bit is 0.
macro_rules! avx2_is_zero {
    ($set1:ident as $signed:ty, $sub:ident, $min:ident, $cmpeq:ident, $zeros:expr, $words:expr) => {{
        let offsets = $sub($words, $set1($zeros.first as $signed));
        $cmpeq($min(offsets, $set1($zeros.span as $signed)), offsets)
    }};
}

impl Lanes<u8> for Avx2 {
    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: Zeros<u8>, src: *const u8) -> u64 {
        let mut bits = 0;
        for part in 0..2 {
            // SAFETY: the caller's promise.
            let mask = unsafe {
                let mut words = _mm256_loadu_si256(src.add(part * 32).cast());
                if BIG {
                    let reversed = _mm256_broadcastsi128_si256(_mm_loadu_si128(REVERSED.as_ptr().cast()));
                    words = _mm256_shuffle_epi8(words, reversed);
                }
                _mm256_movemask_epi8(avx2_is_zero!(
                    _mm256_set1_epi8 as i8,
                    _mm256_sub_epi8,
                    _mm256_min_epu8,
                    _mm256_cmpeq_epi8,
                    zeros,
                    words
                ))
            };
            bits |= u64::from(mask as u32) << (part * 32);
        }
        !bits
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool>(one: u8, bits: u64, dst: *mut u8) {
        for part in 0..2 {
            // SAFETY: the caller's promise.
            unsafe {
                // Each byte eight times, and of each copy one bit.
                let copies = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
                let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((bits >> (part * 32)) as i32), copies);
                let lane = _mm256_set1_epi64x(i64::from_le_bytes(lane_bits::<BIG>()));
                let ones = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, lane), lane);
                let words = _mm256_and_si256(ones, _mm256_set1_epi8(one as i8));
                _mm256_storeu_si256(dst.add(part * 32).cast(), words);
            }
        }
    }
}

impl Lanes<u16> for Avx2 {
    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: Zeros<u16>, src: *const u8) -> u64 {
        let mut bits = 0;
        for part in 0..2 {
            // SAFETY: the caller's promise.
            let mask = unsafe {
                let [low, high] = [0, 32].map(|offset| {
                    avx2_is_zero!(
                        _mm256_set1_epi16 as i16,
                        _mm256_sub_epi16,
                        _mm256_min_epu16,
                        _mm256_cmpeq_epi16,
                        zeros,
                        _mm256_loadu_si256(src.add(part * 64 + offset).cast())
                    )
                });
                // Packing works within halves: the quarters come out as low, high, low, high.
                _mm256_movemask_epi8(_mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(low, high)))
            };
            bits |= u64::from(mask as u32) << (part * 32);
        }
        in_order::<BIG>(!bits)
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool>(one: u16, bits: u64, dst: *mut u8) {
        let bits = in_order::<BIG>(bits);
        for part in 0..4 {
            // SAFETY: the caller's promise.
            unsafe {
                let lane =
                    _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
                let copies = _mm256_set1_epi16((bits >> (part * 16)) as i16);
                let ones = _mm256_cmpeq_epi16(_mm256_and_si256(copies, lane), lane);
                let words = _mm256_and_si256(ones, _mm256_set1_epi16(one as i16));
                _mm256_storeu_si256(dst.add(part * 32).cast(), words);
            }
        }
    }
}

impl Lanes<u32> for Avx2 {
    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: Zeros<u32>, src: *const u8) -> u64 {
        let mut bits = 0;
        for part in 0..8 {
            // SAFETY: the caller's promise.
            let mask = unsafe {
                _mm256_movemask_ps(_mm256_castsi256_ps(avx2_is_zero!(
                    _mm256_set1_epi32 as i32,
                    _mm256_sub_epi32,
                    _mm256_min_epu32,
                    _mm256_cmpeq_epi32,
                    zeros,
                    _mm256_loadu_si256(src.add(part * 32).cast())
                )))
            };
            bits |= u64::from(mask as u32) << (part * 8);
        }
        in_order::<BIG>(!bits)
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool>(one: u32, bits: u64, dst: *mut u8) {
        let bits = in_order::<BIG>(bits);
        for part in 0..8 {
            // SAFETY: the caller's promise.
            unsafe {
                let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
                let copies = _mm256_set1_epi32((bits >> (part * 8)) as i32);
                let ones = _mm256_cmpeq_epi32(_mm256_and_si256(copies, lane), lane);
                let words = _mm256_and_si256(ones, _mm256_set1_epi32(one as i32));
                _mm256_storeu_si256(dst.add(part * 32).cast(), words);
            }
        }
    }
}

impl Lanes<u64> for Avx2 {
    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: Zeros<u64>, src: *const u8) -> u64 {
        let mut bits = 0;
        for part in 0..16 {
            // SAFETY: the caller's promise.
            let mask = unsafe {
                // There is no unsigned compare of this width: turning the sign bits round makes the signed one fit.
                let sign = _mm256_set1_epi64x(i64::MIN);
                let words = _mm256_loadu_si256(src.add(part * 32).cast());
                let offsets = _mm256_sub_epi64(words, _mm256_set1_epi64x(zeros.first as i64));
                let span = _mm256_set1_epi64x(zeros.span as i64);
                let ones = _mm256_cmpgt_epi64(_mm256_xor_si256(offsets, sign), _mm256_xor_si256(span, sign));
                _mm256_movemask_pd(_mm256_castsi256_pd(ones))
            };
            bits |= u64::from(mask as u32) << (part * 4);
        }
        in_order::<BIG>(bits)
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool>(one: u64, bits: u64, dst: *mut u8) {
        let bits = in_order::<BIG>(bits);
        for part in 0..16 {
            // SAFETY: the caller's promise.
            unsafe {
                let lane = _mm256_setr_epi64x(1, 2, 4, 8);
                let copies = _mm256_set1_epi64x((bits >> (part * 4)) as i64);
                let ones = _mm256_cmpeq_epi64(_mm256_and_si256(copies, lane), lane);
                let words = _mm256_and_si256(ones, _mm256_set1_epi64x(one as i64));
                _mm256_storeu_si256(dst.add(part * 32).cast(), words);
            }
        }
    }
}
