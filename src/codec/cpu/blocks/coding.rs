//! Meaning of each codec's codes and scales. Functions have no branches, so that loops over them become vectors.

use crate::{
    cpu::numbers::{BF16, Number},
    dlpack::floats::NAN,
};

/// Limit of the magnitudes in a finite block, as integers: they are below 2^127.
pub const LIMIT: u32 = 0x7f00_0000;

/// Conversion of a codec's elements and scales, whose codes are the lowest bits of a number.
pub trait Coding: 'static {
    const BLOCK: usize;
    /// Number of bits in a code.
    const BITS: usize;
    const SCALE_BYTES: usize;
    /// Code, and scale, of a block that is not finite.
    const WRONG_CODE: u32 = 0;
    const WRONG_SCALE: u32;

    /// Returns the scale of a block whose largest magnitude is `largest`, below 2^127.
    fn scale_for(largest: f32) -> u32;
    /// Returns the number that a scale represents.
    fn step(scale: u32) -> f32;
    /// Returns the factor by which c is multiplied, for a scale of [`Self::scale_for`].
    fn inverse(scale: u32) -> f32;
    /// Returns the code of `y`, which is c times the inverse, and the number that the code represents. Bits above the
    /// code's may be set.
    fn code(y: f32) -> (u32, f32);
    /// Returns the number that a code represents, for any code.
    fn value(code: u32) -> f32;
}

pub struct Bf16;

impl Coding for Bf16 {
    const BLOCK: usize = 32;
    const BITS: usize = 16;
    const SCALE_BYTES: usize = 0;
    const WRONG_CODE: u32 = 0x7fc0;
    const WRONG_SCALE: u32 = 0;

    #[inline(always)]
    fn scale_for(_: f32) -> u32 {
        0
    }
    #[inline(always)]
    fn step(_: u32) -> f32 {
        1.0
    }
    #[inline(always)]
    fn inverse(_: u32) -> f32 {
        1.0
    }
    #[inline(always)]
    fn code(y: f32) -> (u32, f32) {
        // `y` is finite, and at most 2^127 when it is rounded.
        let bits = y.to_bits();
        let code = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        (code, f32::from_bits(code << 16))
    }
    #[inline(always)]
    fn value(code: u32) -> f32 {
        f32::from_bits(code << 16)
    }
}

/// Floats with a scale that is a power of two.
macro_rules! floats {
    ($($name:ident: $bits:literal bits, $mantissa:literal of them mantissa, bias $bias:literal, most $most:literal,
       reciprocal $reciprocal:literal, NaN $nan:literal;)*) => {$(
        pub struct $name;

        impl $name {
            /// Number of mantissa bits of a float32 that the format lacks.
            const LACKS: u32 = 23 - $mantissa;
            /// Smallest normal number, as the bits of a float32: 2^(1 - bias).
            const NORMAL: u32 = (128 - $bias) << 23;
        }

        impl Coding for $name {
            const BLOCK: usize = 32;
            const BITS: usize = $bits;
            const SCALE_BYTES: usize = 1;
            const WRONG_SCALE: u32 = 0xff;

            #[inline(always)]
            fn scale_for(largest: f32) -> u32 {
                let quotient = (largest * f32::from_bits($reciprocal)).to_bits();
                let (exponent, mantissa) = (quotient >> 23, quotient & 0x7f_ffff);
                // This rounds up to a power of two. A denormal is rounded up if it is above 2^-127.
                let least = if exponent > 0 { 0 } else { 0x40_0000 };
                exponent + u32::from(mantissa > least)
            }
            #[inline(always)]
            fn step(scale: u32) -> f32 {
                let bits = if scale == 0 { 0x40_0000 } else { scale << 23 };
                if scale == 0xff { NAN } else { f32::from_bits(bits) }
            }
            #[inline(always)]
            fn inverse(scale: u32) -> f32 {
                // The result is a normal number: the scale of magnitudes below 2^127 is at most 252.
                f32::from_bits((254 - scale) << 23)
            }
            #[inline(always)]
            fn code(y: f32) -> (u32, f32) {
                let magnitude = (y.to_bits() & 0x7fff_ffff).min(f32::to_bits($most));
                // `power` and the code have the same unit in the last place, so the sum is rounded as the code is.
                let exponent = (magnitude & 0x7f80_0000).max(Self::NORMAL);
                let power = f32::from_bits(exponent + (Self::LACKS << 23));
                let sum = f32::from_bits(magnitude) + power;
                let last_bits = sum.to_bits() - power.to_bits();
                let code = ((exponent - Self::NORMAL) >> Self::LACKS) + last_bits;
                let sign = y.to_bits() & 0x8000_0000;
                (code | sign >> (32 - $bits), f32::from_bits((sum - power).to_bits() | sign))
            }
            #[inline(always)]
            fn value(code: u32) -> f32 {
                let (sign, magnitude) = (code >> ($bits - 1) << 31, code & ((1 << ($bits - 1)) - 1));
                let bits = magnitude << Self::LACKS;
                let normal = bits + ((127 - $bias) << 23);
                // A denormal is a multiple of the distance between the smallest normal number and the next one.
                let denormal = (f32::from_bits(Self::NORMAL | bits) - f32::from_bits(Self::NORMAL)).to_bits();
                let finite = if magnitude >> $mantissa == 0 { denormal } else { normal };
                f32::from_bits(sign | if magnitude == $nan { NAN.to_bits() } else { finite })
            }
        }
    )*};
}
floats! {
    Mxfp8: 8 bits, 3 of them mantissa, bias 7, most 448.0, reciprocal 0x3b12_4925, NaN 0x7f;
    Mxfp4: 4 bits, 1 of them mantissa, bias 1, most 6.0, reciprocal 0x3e2a_aaab, NaN 0xff; // e2m1 has no NaN
}

/// Integers with a bfloat16 scale.
macro_rules! integers {
    ($($name:ident: $bits:literal bits, blocks of $block:literal, most $most:literal;)*) => {$(
        pub struct $name;

        impl Coding for $name {
            const BLOCK: usize = $block;
            const BITS: usize = $bits;
            const SCALE_BYTES: usize = 2;
            const WRONG_SCALE: u32 = 0x7fc0;

            #[inline(always)]
            fn scale_for(largest: f32) -> u32 {
                const LEAST: f32 = f32::from_bits(27 << 23); // 2^-100
                let up = ((largest / $most).to_bits() + 0xffff) >> 16;
                if largest < LEAST { 0 } else { up }
            }
            #[inline(always)]
            fn step(scale: u32) -> f32 {
                BF16::widen(scale as u16)
            }
            #[inline(always)]
            fn inverse(scale: u32) -> f32 {
                if scale == 0 { 0.0 } else { 1.0 / Self::step(scale) }
            }
            #[inline(always)]
            fn code(y: f32) -> (u32, f32) {
                // Floats near MIDDLE are 1 apart, so the sum is rounded to an integer, which is in its last bits. Its
                // magnitude never exceeds `$most`. A scale is at least A / $most except for one rounding, its inverse
                // and y are rounded once each, and three roundings add less than a half.
                const MIDDLE: f32 = 12582912.0;
                let sum = y + MIDDLE;
                (sum.to_bits(), sum - MIDDLE)
            }
            #[inline(always)]
            fn value(code: u32) -> f32 {
                const ABOVE: u32 = 32 - $bits;
                ((code << ABOVE) as i32 >> ABOVE) as f32
            }
        }
    )*};
}
integers! {
    Int8: 8 bits, blocks of 64, most 127.0;
    Int4: 4 bits, blocks of 32, most 7.0;
}
