//! Numbers of the model: read and rounded by float64 arithmetic, with divisions.

use crate::tensor::Dtype;

/// Bits of mantissa behind the point, the lowest exponent, the highest finite number, and what a NaN is.
fn format(dtype: Dtype) -> (i32, i32, f64, u32) {
    match dtype {
        Dtype::F16 => (10, -14, 65504.0, 0x7e00),
        Dtype::BF16 => (7, -126, f64::from(f32::from_bits(0x7f7f_0000)), 0x7fc0),
        _ => (23, -126, f64::from(f32::MAX), 0x7fc0_0000),
    }
}

fn infinity(dtype: Dtype) -> u32 {
    let mantissa = format(dtype).0;
    ((1u32 << (8 * dtype.size as i32 - 1 - mantissa)) - 1) << mantissa
}

fn power_of_2(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

/// An element's bits as a number.
pub fn widen(dtype: Dtype, bits: u32) -> f32 {
    let (mantissa, lowest, _, _) = format(dtype);
    let width = 8 * dtype.size as i32;
    let sign = if bits >> (width - 1) == 1 { -1.0 } else { 1.0 };
    let highest_exponent = (1 << (width - 1 - mantissa)) - 1;
    let exponent = (bits >> mantissa) as i32 & highest_exponent;
    let fraction = f64::from(bits & ((1 << mantissa) - 1)) / power_of_2(mantissa);
    let value = match exponent {
        0 => fraction * power_of_2(lowest),
        _ if exponent == highest_exponent && fraction == 0.0 => f64::INFINITY,
        _ if exponent == highest_exponent => return f32::NAN,
        _ => (1.0 + fraction) * power_of_2(exponent - 1 + lowest),
    };
    (sign * value) as f32
}

/// The bits of a number in a dtype, rounded to nearest even.
pub fn narrow(dtype: Dtype, value: f32) -> u32 {
    let (mantissa, lowest, highest, nan) = format(dtype);
    if value.is_nan() {
        return nan;
    }
    let sign = u32::from(value.is_sign_negative()) << (8 * dtype.size - 1);
    let value = f64::from(value).abs();
    if value == f64::INFINITY {
        return sign | infinity(dtype);
    }
    // That of a float64, in which all these numbers are normal.
    let exponent = ((value.to_bits() >> 52) as i32 - 1023).max(lowest);
    let step = power_of_2(exponent - mantissa);
    let rounded = (value / step).round_ties_even() * step;
    if rounded > highest {
        return sign | infinity(dtype);
    }
    // Consecutive bits are consecutive multiples of the step.
    let of_exponent = ((exponent - lowest) as u32) << mantissa;
    sign | (of_exponent + (rounded / step) as u32)
}

pub fn round(dtype: Dtype, value: f32) -> f32 {
    widen(dtype, narrow(dtype, value))
}

pub fn canonical(value: f32) -> f32 {
    if value.is_nan() { f32::from_bits(0x7fc0_0000) } else { value }
}

pub fn sigma(value: f32) -> f32 {
    if value < 0.0 { -1.0 } else { 1.0 }
}
