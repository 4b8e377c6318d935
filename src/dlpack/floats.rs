//! A float32 as another float: rounded once, to nearest, to even in the middle, in integers, so that neither the caller's
//! rounding mode nor its flushing of denormals changes a result. NaN becomes the one that is written.
#![forbid(unsafe_code)]

/// The only NaN that is written.
pub const NAN: f32 = f32::from_bits(0x7fc0_0000);

/// `value`, or the NaN that is written.
#[inline(always)]
pub fn canonical(value: f32) -> f32 {
    if value.is_nan() { NAN } else { value }
}

/// As bfloat16. Without branches: loops over it become vectors. (VCVTNEPS2BF16 would flush denormals.)
#[inline(always)]
pub fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    // May carry into the exponent, up to that of Inf: rightly.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if value.is_nan() { 0x7fc0 } else { rounded }) as u16
}

/// As float16.
pub fn to_f16(value: f32) -> u16 {
    const OVERFLOWS: u32 = 65520f32.to_bits(); // nearer to what would be the next than to the largest
    const NORMAL: u32 = 0x3880_0000; // 2^-14
    let (sign, size) = (value.to_bits() >> 16 & 0x8000, value.to_bits() & 0x7fff_ffff);
    let rounded = match size {
        _ if value.is_nan() => return 0x7e00,
        OVERFLOWS.. => 0x7c00,
        NORMAL.. => cut_off(size - (112 << 23), 13),
        _ => {
            // A multiple of 2^-24; less than half of that is 0.
            let bits = 126 - (size >> 23);
            if bits > 24 { 0 } else { cut_off(size & 0x7f_ffff | 0x80_0000, bits) }
        }
    };
    (sign | rounded) as u16
}

/// A value without its lowest bits, at most 31, rounded to nearest, to even in the middle.
fn cut_off(value: u32, bits: u32) -> u32 {
    (value + (1 << (bits - 1)) - 1 + (value >> bits & 1)) >> bits
}

/// As float64, which has every float32.
pub fn to_f64(value: f32) -> u64 {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    let (sign, size) = (u64::from(value.to_bits() >> 31) << 63, value.to_bits() & 0x7fff_ffff);
    let wide = u64::from(size) << 29;
    let size = match size {
        _ if value.is_nan() => return 0x7ff8_0000_0000_0000,
        0 => 0,
        INFINITY.. => wide | f64::INFINITY.to_bits(),
        0x80_0000.. => wide + (896 << 52),
        _ => {
            // Denormal here, not there: its first one moves to where it is not written.
            let up = size.leading_zeros() - 8;
            (wide << up) + (u64::from(896 - up) << 52)
        }
    };
    sign | size
}
