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
