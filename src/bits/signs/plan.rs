//! Signs as elements, +scale where the bit is 1 and -scale where it is 0; and votes on them.
//!
//! Scales are rounded as in `floats`, and identically on a GPU (kernels/signs.cu).
#![forbid(unsafe_code)]

use crate::dlpack::{
    Dtype, Kind,
    floats::{canonical, to_bf16, to_f16, to_f64},
    rules::Patterns,
};

impl Patterns {
    /// Returns the patterns of +1 and -1. `dtype` is a float or a signed integer.
    pub fn signs(dtype: Dtype) -> Self {
        if dtype.is_float() {
            return Self::scaled(dtype, 1.0);
        }
        Self { size: dtype.size, zero: u64::MAX >> (64 - 8 * dtype.size), one: 1 }
    }

    /// Returns the patterns of +scale and -scale, rounded once, to nearest even. For NaN, both are the same NaN.
    pub fn scaled(dtype: Dtype, scale: f32) -> Self {
        let one = rounded(dtype, scale);
        let sign = u64::from(!scale.is_nan()) << (8 * dtype.size - 1);
        Self { size: dtype.size, zero: one ^ sign, one }
    }
}

/// Returns the bits of a float32 that is rounded to a float's dtype.
fn rounded(dtype: Dtype, scale: f32) -> u64 {
    match (dtype.kind, dtype.size) {
        (Kind::Bfloat, _) => to_bf16(scale).into(),
        (_, 2) => to_f16(scale).into(),
        (_, 4) => canonical(scale).to_bits().into(),
        _ => to_f64(scale),
    }
}

/// Majority vote on every bit of equally many bytes of each voter.
#[derive(Clone, Copy, Debug)]
pub struct Poll {
    /// Number of voters, at least one.
    pub voters: u64,
    pub bytes: i64,
    /// Bytes from the beginning of a voter to the next voter's.
    pub stride: i64,
    /// Voter in turn at byte 0, below `voters`. At each next byte, the next voter is in turn, cyclically. With an even
    /// number of voters, the voter in turn votes twice: that breaks ties and changes no majority.
    pub turn: u64,
}

impl Poll {
    /// Returns the voter in turn at a byte.
    pub fn in_turn(&self, byte: u64) -> u64 {
        // The sum does not overflow, since both terms are below 2^63.
        (byte % self.voters + self.turn) % self.voters
    }
}
