//! Signs as elements, a scale where the bit is 1 and minus it where it is 0; and votes on them.
//!
//! Scales are rounded as `floats` does it, and a GPU does the same (kernels/signs.cu).
#![forbid(unsafe_code)]

use crate::dlpack::{
    Dtype, Kind,
    floats::{canonical, to_bf16, to_f16, to_f64},
    rules::Patterns,
};

impl Patterns {
    /// +1 and -1. `dtype` is a float or a signed integer.
    pub fn signs(dtype: Dtype) -> Self {
        if dtype.is_float() {
            return Self::scaled(dtype, 1.0);
        }
        Self { size: dtype.size, zero: u64::MAX >> (64 - 8 * dtype.size), one: 1 }
    }

    /// A scale rounded to a float's dtype once, to nearest even, and minus that. NaN is the same NaN twice.
    pub fn scaled(dtype: Dtype, scale: f32) -> Self {
        let one = rounded(dtype, scale);
        let sign = u64::from(!scale.is_nan()) << (8 * dtype.size - 1);
        Self { size: dtype.size, zero: one ^ sign, one }
    }
}

/// The bits of a float32 in a float's format.
fn rounded(dtype: Dtype, scale: f32) -> u64 {
    match (dtype.kind, dtype.size) {
        (Kind::Bfloat, _) => to_bf16(scale).into(),
        (_, 2) => to_f16(scale).into(),
        (_, 4) => canonical(scale).to_bits().into(),
        _ => to_f64(scale),
    }
}

/// Voters who have as many bytes each, and vote on every bit.
#[derive(Clone, Copy, Debug)]
pub struct Poll {
    /// At least one.
    pub voters: u64,
    pub bytes: i64,
    /// From a voter's bytes to the next voter's.
    pub stride: i64,
    /// Who is in turn at byte 0, below `voters`; the next one at the next byte, and so on around. In an even number of
    /// voters the one in turn votes twice: then there is no tie, and who has a majority without that keeps it.
    pub turn: u64,
}

impl Poll {
    /// Who is in turn at a byte.
    pub fn in_turn(&self, byte: u64) -> u64 {
        // Neither is more than 2^63.
        (byte % self.voters + self.turn) % self.voters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a 16-bit float that is not NaN; infinite is the next power of two.
    fn value(dtype: Dtype, bits: u64) -> f64 {
        let fraction_bits = if dtype == Dtype::BF16 { 7 } else { 10 };
        let (bias, magnitude) = (if dtype == Dtype::BF16 { 127 } else { 15 }, bits & 0x7fff);
        let (exponent, fraction) = (magnitude >> fraction_bits, magnitude & ((1 << fraction_bits) - 1));
        let unit = 2f64.powi(exponent.max(1) as i32 - bias - fraction_bits);
        let size = (fraction + if exponent > 0 { 1 << fraction_bits } else { 0 }) as f64 * unit;
        if bits >> 15 == 1 { -size } else { size }
    }

    #[test]
    fn a_scale_is_rounded_to_the_nearest_and_to_even_between_two() {
        for dtype in [Dtype::F16, Dtype::BF16] {
            let infinity = if dtype == Dtype::BF16 { 0x7f80 } else { 0x7c00 };
            for low in 0..infinity {
                // Both are exact, and so is what lies between them.
                let (below, above) = (value(dtype, low), value(dtype, low + 1));
                let middle = ((below + above) / 2.0) as f32;
                let even = low + low % 2;
                if value(dtype, low) as f32 as f64 == below {
                    assert_eq!(rounded(dtype, below as f32), low, "{dtype} {low:#x}");
                }
                if f64::from(middle) == (below + above) / 2.0 {
                    assert_eq!(rounded(dtype, middle), even, "{dtype} between {low:#x} and the next");
                    assert_eq!(rounded(dtype, middle.next_down()), low);
                    assert_eq!(rounded(dtype, middle.next_up()), low + 1);
                }
                assert_eq!(rounded(dtype, -middle), rounded(dtype, middle) | 0x8000);
            }
            assert_eq!(rounded(dtype, f32::MAX), infinity);
            assert_eq!(rounded(dtype, f32::INFINITY), infinity);
        }
        assert_eq!(rounded(Dtype::F16, f32::from_bits(1)), 0);
    }

    #[test]
    fn a_float64_has_every_scale() {
        for exponent in 0..256 {
            for fraction in [0, 1, 0x2a_aaaa, 0x7f_ffff] {
                let scale = f32::from_bits(exponent << 23 | fraction);
                if !scale.is_nan() {
                    assert_eq!(rounded(Dtype::F64, scale), f64::from(scale).to_bits(), "{scale:e}");
                    assert_eq!(rounded(Dtype::F64, -scale), f64::from(-scale).to_bits(), "{scale:e}");
                }
            }
        }
    }

    #[test]
    fn every_nan_is_the_one_for_either_bit() {
        for (dtype, nan) in [
            (Dtype::F16, 0x7e00),
            (Dtype::BF16, 0x7fc0),
            (Dtype::F32, 0x7fc0_0000),
            (Dtype::F64, 0x7ff8_0000_0000_0000),
        ] {
            for bits in [0x7f80_0001, 0x7fc0_0000, 0x7fff_ffff, 0xff80_0001, 0xffff_ffff] {
                let expected = Patterns { size: dtype.size, zero: nan, one: nan };
                assert_eq!(Patterns::scaled(dtype, f32::from_bits(bits)), expected, "{dtype} {bits:#x}");
            }
        }
    }

    #[test]
    fn minus_a_scale_has_the_other_sign() {
        let patterns = |dtype, zero, one: u64| Patterns { size: dtype, zero, one };
        for (dtype, scale, expected) in [
            (Dtype::F32, 0.0, patterns(4, 0x8000_0000, 0)),
            (Dtype::F32, -0.0, patterns(4, 0, 0x8000_0000)),
            (Dtype::F16, -2.0, patterns(2, 0x4000, 0xc000)),
            (Dtype::BF16, f32::INFINITY, patterns(2, 0xff80, 0x7f80)),
            (Dtype::F64, 1.0, patterns(8, 0xbff0_0000_0000_0000, 0x3ff0_0000_0000_0000)),
        ] {
            assert_eq!(Patterns::scaled(dtype, scale), expected, "{dtype} {scale}");
        }
        assert_eq!(Patterns::signs(Dtype { kind: Kind::Int, size: 2 }), patterns(2, 0xffff, 1));
        assert_eq!(Patterns::signs(Dtype { kind: Kind::Int, size: 8 }), patterns(8, u64::MAX, 1));
    }
}
