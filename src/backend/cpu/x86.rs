//! 64 elements to 64 bits and back on x86-64.

#![allow(clippy::missing_safety_doc, reason = "the promises are those of Lanes")]

use std::arch::x86_64::*;

use super::words::{BitReader, Lanes, TILE, Zeros, comb, in_lanes, in_order, lane_bits, unpack_one_by_one};

/// AVX-512 F and BW, and BMI2: compares give masks, and masks give elements.
pub struct Avx512;

/// AVX2: compares give bytes of ones, whose signs are gathered.
pub struct Avx2;

/// The bytes of each group of 8 in reverse: what makes a compare's mask most significant bit first.
const REVERSED: [u8; 16] = [7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8];

/// # Safety
/// `dst` has room for a vector, aligned to 64 with STREAM, and the processor has AVX-512.
#[inline(always)]
unsafe fn store512<const STREAM: bool>(dst: *mut u8, words: __m512i) {
    // SAFETY: the caller's promise.
    unsafe { if STREAM { _mm512_stream_si512(dst.cast(), words) } else { _mm512_storeu_si512(dst.cast(), words) } }
}

/// # Safety
/// `dst` has room for a vector, aligned to 32 with STREAM, and the processor has AVX.
#[inline(always)]
unsafe fn store256<const STREAM: bool>(dst: *mut u8, words: __m256i) {
    // SAFETY: the caller's promise.
    unsafe { if STREAM { _mm256_stream_si256(dst.cast(), words) } else { _mm256_storeu_si256(dst.cast(), words) } }
}

/// Widest distance in bytes of elements that [`Comb`] takes.
const WIDEST: usize = 16;

/// `EVERY[step]`: the lanes of the elements among 64.
const EVERY: [u64; WIDEST + 1] = {
    let (mut table, mut step) = ([0; WIDEST + 1], 1);
    while step <= WIDEST {
        table[step] = comb(step, 1);
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
        let (elements, mut element) = (in_lanes(64, distance), 0);
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

/// How elements that lie apart are written a vector at a time: at every `step`-th of its lanes, `elements` of them, in
/// memory's order or against it. None if they are so far apart, or so oddly, that one at a time is as good.
#[derive(Clone, Copy)]
struct Comb {
    step: usize,
    elements: usize,
    backward: bool,
}

impl Comb {
    #[inline(always)]
    fn new(stride: isize, size: usize) -> Option<Self> {
        let (lanes, distance) = (64 / size, stride.unsigned_abs());
        let step = distance / size;
        if !distance.is_multiple_of(size) || step == 0 || distance > WIDEST {
            return None;
        }
        Some(Self { step, elements: in_lanes(lanes, step), backward: stride < 0 })
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
    fn turned(self, bits: u64, count: usize) -> u64 {
        if self.backward { bits.reverse_bits() >> (64 - count) } else { bits }
    }
}

/// Turns a square of bits round: bit j of word i becomes bit i of word j. Left to the compiler, its last three steps are
/// gathers and scatters.
///
/// # Safety
/// The processor has AVX-512 F.
#[inline(always)]
unsafe fn transpose512(words: &mut [u64; TILE]) {
    /// Of a step that swaps squares of `half` bits, what word number `index` keeps; all else comes from its partner,
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

    // SAFETY: the caller's promise; every load and store is of 8 words of an array.
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

/// What AVX-512 does with elements apart, and with fewer than 64: masks leave the lanes between and beyond alone.
macro_rules! avx512_some {
    ($t:ty, $load:ident, $store:ident, $set1:ident as $signed:ty, $sub:ident, $cmpgt:ident, $rule:ident, $select:ident,
     $mask:ty) => {
        #[inline(always)]
        unsafe fn some_to_bits(zeros: Zeros<$t>, src: *const u8, count: usize) -> u64 {
            const LANES: usize = 64 / size_of::<$t>();
            let mut bits = 0;
            for first in (0..count).step_by(LANES) {
                let lanes = (u64::MAX >> (64 - LANES.min(count - first))) as $mask;
                // SAFETY: the caller's promise; masked lanes are not read.
                bits |= unsafe {
                    let words = $load(lanes, src.add(first * size_of::<$t>()).cast());
                    let (first_zero, span) = ($set1(zeros.first as $signed), $set1(zeros.span as $signed));
                    u64::from($cmpgt($sub(words, first_zero), span) & lanes) << first
                };
            }
            bits
        }

        #[inline(always)]
        unsafe fn some_from_bits(one: $t, bits: u64, dst: *mut u8, count: usize) {
            const LANES: usize = 64 / size_of::<$t>();
            for first in (0..count).step_by(LANES) {
                let lanes = (u64::MAX >> (64 - LANES.min(count - first))) as $mask;
                // SAFETY: the caller's promise; masked lanes are not written.
                unsafe {
                    let words = $select((bits >> first) as $mask, $set1(one as $signed));
                    $store(dst.add(first * size_of::<$t>()).cast(), lanes, words);
                }
            }
        }

        #[inline(always)]
        unsafe fn transpose(words: &mut [u64; TILE]) {
            // SAFETY: the caller's promise.
            unsafe { transpose512(words) };
        }

        const WIDEST_COMB: usize = WIDEST;

        #[inline(always)]
        unsafe fn pick<const STEP: usize, const GROUPS: usize>(groups: &mut [u64; GROUPS]) {
            for bits in groups {
                // SAFETY: the caller's promise.
                *bits = unsafe { _pext_u64(*bits, const { comb(STEP, 1) }) };
            }
        }

        #[inline(always)]
        unsafe fn unpack_apart<const BIG: bool>(
            one: $t,
            reader: &mut BitReader<BIG>,
            dst: *mut u8,
            stride: isize,
            count: usize,
        ) {
            // SAFETY: the caller's promise; masked lanes are not written.
            unsafe {
                let Some(comb) = Comb::new(stride, size_of::<$t>()) else {
                    return unpack_one_by_one::<Self, $t, BIG>(one, reader, dst, stride, count);
                };
                let one = $set1(one as $signed);
                let every = comb.lanes(comb.elements) as $mask;
                let spread = &SPREAD[usize::from(comb.backward)][stride.unsigned_abs()];
                let copies = _mm512_loadu_si512(spread.copies.as_ptr().cast());
                let bits = _mm512_loadu_si512(spread.bits[usize::from(BIG)].as_ptr().cast());
                let store = |word: u64, low: *mut u8| {
                    let bytes = _mm512_shuffle_epi8(_mm512_set1_epi64(word as i64), copies);
                    $store(low.cast(), every, $select($rule(bytes, bits), one));
                };
                let (mut first, mut low) = (0, dst.wrapping_offset(comb.lowest(0, comb.elements) as isize * stride));
                let step = comb.elements as isize * stride;
                // Words, where vectors of whole bytes make them: loads between masked stores are slow.
                while comb.elements.is_multiple_of(8) && first + 64 <= count {
                    let (mut word, mut part) = (reader.next_few(64), 0);
                    while part < 64 {
                        store(word, low);
                        low = low.wrapping_offset(step);
                        word >>= comb.elements;
                        part += comb.elements;
                    }
                    first += 64;
                }
                while first + comb.elements <= count {
                    store(reader.next_few(comb.elements), low);
                    low = low.wrapping_offset(step);
                    first += comb.elements;
                }
                while first < count {
                    let some = comb.elements.min(count - first);
                    let lanes = comb.lanes(some);
                    let ones = _pdep_u64(comb.turned(reader.next(some), some), lanes);
                    let low = dst.offset(comb.lowest(first, some) as isize * stride);
                    $store(low.cast(), lanes as $mask, $select(ones as $mask, one));
                    first += some;
                }
            }
        }
    };
}

impl Lanes<u8> for Avx512 {
    avx512_some!(
        u8,
        _mm512_maskz_loadu_epi8,
        _mm512_mask_storeu_epi8,
        _mm512_set1_epi8 as i8,
        _mm512_sub_epi8,
        _mm512_cmpgt_epu8_mask,
        _mm512_test_epi8_mask,
        _mm512_maskz_mov_epi8,
        u64
    );

    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: Zeros<u8>, src: *const u8) -> u64 {
        // SAFETY: the caller's promise.
        unsafe {
            let mut words = _mm512_loadu_si512(src.cast());
            if BIG {
                let reversed = _mm512_broadcast_i32x4(_mm_loadu_si128(REVERSED.as_ptr().cast()));
                words = _mm512_shuffle_epi8(words, reversed);
            }
            // Bytes have no signs: only 0 counts as 0.
            debug_assert!(zeros.first == 0 && zeros.span == 0);
            _mm512_test_epi8_mask(words, words)
        }
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(one: u8, bits: u64, dst: *mut u8) {
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
            let ones = _mm512_test_epi8_mask(bytes, _mm512_set1_epi64(lane_bits::<BIG>() as i64));
            let words = _mm512_maskz_mov_epi8(ones, _mm512_set1_epi8(one as i8));
            store512::<STREAM>(dst, words);
        }
    }
}

macro_rules! avx512_lanes {
    ($t:ty, $lanes:literal, $load:ident, $store:ident, $set1:ident as $signed:ty, $sub:ident, $cmpgt:ident,
     $rule:ident, $select:ident, $mask:ty) => {
        impl Lanes<$t> for Avx512 {
            avx512_some!($t, $load, $store, $set1 as $signed, $sub, $cmpgt, $rule, $select, $mask);

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
            unsafe fn from_bits<const BIG: bool, const STREAM: bool>(one: $t, bits: u64, dst: *mut u8) {
                let bits = in_order::<BIG>(bits);
                for part in 0..64 / $lanes {
                    // SAFETY: the caller's promise.
                    unsafe {
                        let words = $select((bits >> (part * $lanes)) as $mask, $set1(one as $signed));
                        store512::<STREAM>(dst.add(part * 64), words);
                    }
                }
            }
        }
    };
}
avx512_lanes!(
    u16,
    32,
    _mm512_maskz_loadu_epi16,
    _mm512_mask_storeu_epi16,
    _mm512_set1_epi16 as i16,
    _mm512_sub_epi16,
    _mm512_cmpgt_epu16_mask,
    _mm512_test_epi16_mask,
    _mm512_maskz_mov_epi16,
    u32
);
avx512_lanes!(
    u32,
    16,
    _mm512_maskz_loadu_epi32,
    _mm512_mask_storeu_epi32,
    _mm512_set1_epi32 as i32,
    _mm512_sub_epi32,
    _mm512_cmpgt_epu32_mask,
    _mm512_test_epi32_mask,
    _mm512_maskz_mov_epi32,
    u16
);
avx512_lanes!(
    u64,
    8,
    _mm512_maskz_loadu_epi64,
    _mm512_mask_storeu_epi64,
    _mm512_set1_epi64 as i64,
    _mm512_sub_epi64,
    _mm512_cmpgt_epu64_mask,
    _mm512_test_epi64_mask,
    _mm512_maskz_mov_epi64,
    u8
);

/// Bytes of ones where an element's bit is 0.
macro_rules! avx2_is_zero {
    ($set1:ident as $signed:ty, $sub:ident, $min:ident, $cmpeq:ident, $zeros:expr, $words:expr) => {{
        let offsets = $sub($words, $set1($zeros.first as $signed));
        $cmpeq($min(offsets, $set1($zeros.span as $signed)), offsets)
    }};
}

impl Lanes<u8> for Avx2 {
    const WIDEST_COMB: usize = 8;

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
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(one: u8, bits: u64, dst: *mut u8) {
        for part in 0..2 {
            // SAFETY: the caller's promise.
            unsafe {
                // Each byte eight times, and of each copy one bit.
                let copies = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
                let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((bits >> (part * 32)) as i32), copies);
                let lane = _mm256_set1_epi64x(lane_bits::<BIG>() as i64);
                let ones = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, lane), lane);
                let words = _mm256_and_si256(ones, _mm256_set1_epi8(one as i8));
                store256::<STREAM>(dst.add(part * 32), words);
            }
        }
    }
}

impl Lanes<u16> for Avx2 {
    const WIDEST_COMB: usize = 8;

    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: Zeros<u16>, src: *const u8) -> u64 {
        let mut bits = 0;
        for part in 0..2 {
            // SAFETY: the caller's promise.
            let mask = unsafe {
                let low = _mm256_loadu_si256(src.add(part * 64).cast());
                let high = _mm256_loadu_si256(src.add(part * 64 + 32).cast());
                let low = avx2_is_zero!(
                    _mm256_set1_epi16 as i16,
                    _mm256_sub_epi16,
                    _mm256_min_epu16,
                    _mm256_cmpeq_epi16,
                    zeros,
                    low
                );
                let high = avx2_is_zero!(
                    _mm256_set1_epi16 as i16,
                    _mm256_sub_epi16,
                    _mm256_min_epu16,
                    _mm256_cmpeq_epi16,
                    zeros,
                    high
                );
                // Packing works within halves: the quarters come out as low, high, low, high.
                _mm256_movemask_epi8(_mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(low, high)))
            };
            bits |= u64::from(mask as u32) << (part * 32);
        }
        in_order::<BIG>(!bits)
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(one: u16, bits: u64, dst: *mut u8) {
        let bits = in_order::<BIG>(bits);
        for part in 0..4 {
            // SAFETY: the caller's promise.
            unsafe {
                let lane =
                    _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
                let copies = _mm256_set1_epi16((bits >> (part * 16)) as i16);
                let ones = _mm256_cmpeq_epi16(_mm256_and_si256(copies, lane), lane);
                let words = _mm256_and_si256(ones, _mm256_set1_epi16(one as i16));
                store256::<STREAM>(dst.add(part * 32), words);
            }
        }
    }
}

impl Lanes<u32> for Avx2 {
    const WIDEST_COMB: usize = 8;

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
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(one: u32, bits: u64, dst: *mut u8) {
        let bits = in_order::<BIG>(bits);
        for part in 0..8 {
            // SAFETY: the caller's promise.
            unsafe {
                let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
                let copies = _mm256_set1_epi32((bits >> (part * 8)) as i32);
                let ones = _mm256_cmpeq_epi32(_mm256_and_si256(copies, lane), lane);
                let words = _mm256_and_si256(ones, _mm256_set1_epi32(one as i32));
                store256::<STREAM>(dst.add(part * 32), words);
            }
        }
    }
}

impl Lanes<u64> for Avx2 {
    const WIDEST_COMB: usize = 8;

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
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(one: u64, bits: u64, dst: *mut u8) {
        let bits = in_order::<BIG>(bits);
        for part in 0..16 {
            // SAFETY: the caller's promise.
            unsafe {
                let lane = _mm256_setr_epi64x(1, 2, 4, 8);
                let copies = _mm256_set1_epi64x((bits >> (part * 4)) as i64);
                let ones = _mm256_cmpeq_epi64(_mm256_and_si256(copies, lane), lane);
                let words = _mm256_and_si256(ones, _mm256_set1_epi64x(one as i64));
                store256::<STREAM>(dst.add(part * 32), words);
            }
        }
    }
}
