//! What the codes and scales of each codec stand for. All of it without branches: loops over it become vectors.

use crate::{
    cpu::numbers::{BF16, Number},
    dlpack::floats::NAN,
};

/// Magnitudes of a finite block, as integers, are below this: 2^127.
pub const LIMIT: u32 = 0x7f00_0000;

/// A codec's elements and scales, as memory has them in the lowest bits of a number.
pub trait Coding: 'static {
    const BLOCK: usize;
    /// Of a code.
    const BITS: usize;
    const SCALE_BYTES: usize;
    /// What a code, and a scale, of a block is that is not finite.
    const WRONG_CODE: u32 = 0;
    const WRONG_SCALE: u32;

    /// The scale of a block whose largest magnitude this is, below 2^127.
    fn scale_for(largest: f32) -> u32;
    /// What a scale stands for.
    fn step(scale: u32) -> f32;
    /// What c is multiplied by, with a scale of [`Self::scale_for`].
    fn inverse(scale: u32) -> f32;
    /// The code of c times the inverse, which may have more bits than it should above those of a code; and what it
    /// stands for.
    fn code(y: f32) -> (u32, f32);
    /// What a code stands for, whoever wrote it.
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
        // Finite, and rounded it is at most 2^127.
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
            /// Bits of a float32's mantissa that it lacks.
            const LACKS: u32 = 23 - $mantissa;
            /// The least normal number, as a float32's bits: 2^(1 - bias).
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
                // Up to a power of two; of denormals all above 2^-127.
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
                // A normal number: of less than 2^127 a scale is at most 252.
                f32::from_bits((254 - scale) << 23)
            }
            #[inline(always)]
            fn code(y: f32) -> (u32, f32) {
                let magnitude = (y.to_bits() & 0x7fff_ffff).min(f32::to_bits($most));
                // Added to a power of two whose last bit is worth as much as the code's, it is rounded as the code is.
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
                // A multiple of the distance of the least normal number's neighbours.
                let denormal = (f32::from_bits(Self::NORMAL | bits) - f32::from_bits(Self::NORMAL)).to_bits();
                let finite = if magnitude >> $mantissa == 0 { denormal } else { normal };
                f32::from_bits(sign | if magnitude == $nan { NAN.to_bits() } else { finite })
            }
        }
    )*};
}
floats! {
    Mxfp8: 8 bits, 3 of them mantissa, bias 7, most 448.0, reciprocal 0x3b12_4925, NaN 0x7f;
    Mxfp4: 4 bits, 1 of them mantissa, bias 1, most 6.0, reciprocal 0x3e2a_aaab, NaN 0xff; // none
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
                // Of neighbours of this the distance is 1, so the sum is rounded to an integer, which is in its last
                // bits. It is never more than the most: a scale is at least A / most but for one rounding, its inverse
                // and y are rounded once each, and three roundings do not make it half more.
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
