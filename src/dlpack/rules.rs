//! Elements as bits, and bits as elements: by the unsigned integer of an element's width.
#![forbid(unsafe_code)]

use super::dtype::Dtype;

/// How elements become bits. Each is looked at as an unsigned integer of its width: its bit is 0 when it lies in
/// `first_zero ..= first_zero + span`, and 1 otherwise. That covers non-zero (only 0 gives 0) and signs: as integers, the
/// floats below zero are one range, from the smallest negative denormal to -inf; -0 and the NaNs lie outside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitRule {
    /// Bytes an element.
    pub size: usize,
    pub first_zero: u64,
    pub span: u64,
}

impl BitRule {
    /// Non-zero is 1: for bool and integers.
    pub fn nonzero(dtype: Dtype) -> Self {
        Self { size: dtype.size, first_zero: 0, span: 0 }
    }

    /// Not below zero is 1: for floats.
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

/// How bits become elements: what is written for a 0 and for a 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patterns {
    /// Bytes an element.
    pub size: usize,
    pub zero: u64,
    pub one: u64,
}

impl Patterns {
    /// The numbers 0 and 1.
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
