//! Conversion of elements to bits and back, by the unsigned integer of an element's width.
#![forbid(unsafe_code)]

use super::dtype::Dtype;

/// Rule for the bit of an element. As an unsigned integer of its width, an element gives 0 if it lies in
/// `first_zero ..= first_zero + span`, else 1. This covers truth (only 0 gives 0) and signs: as integers, the floats
/// below zero are one range, from the smallest negative denormal to -inf. -0 and the NaNs lie outside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitRule {
    /// Bytes of an element.
    pub size: usize,
    pub first_zero: u64,
    pub span: u64,
}

impl BitRule {
    /// Makes the rule for bool and integers: every element but 0 gives 1.
    pub fn nonzero(dtype: Dtype) -> Self {
        Self { size: dtype.size, first_zero: 0, span: 0 }
    }

    /// Makes the rule for floats: an element that is not below zero gives 1.
    pub fn not_below_zero(dtype: Dtype) -> Self {
        let (minus_zero, minus_infinity) = match dtype {
            Dtype::BF16 => (0x8000, 0xff80),
            Dtype::F16 => (0x8000, 0xfc00),
            Dtype::F32 => (0x8000_0000, u64::from(f32::NEG_INFINITY.to_bits())),
            _ => (1 << 63, f64::NEG_INFINITY.to_bits()),
        };
        Self { size: dtype.size, first_zero: minus_zero + 1, span: minus_infinity - minus_zero - 1 }
    }
}

/// Elements that are written for a bit of 0 and of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patterns {
    /// Bytes of an element.
    pub size: usize,
    pub zero: u64,
    pub one: u64,
}

impl Patterns {
    /// Returns the patterns of the numbers 0 and 1.
    pub fn of(dtype: Dtype) -> Self {
        let one = match dtype {
            Dtype::BF16 => 0x3f80,
            Dtype::F16 => 0x3c00,
            Dtype::F32 => u64::from(1f32.to_bits()),
            Dtype::F64 => 1f64.to_bits(),
            _ => 1,
        };
        Self { size: dtype.size, zero: 0, one }
    }
}
